/* Calls that make, duplicate and close descriptors, and fork. */
#include "vmh_control.h"
#include "vmh_interpose.h"
#include "vmh_iomux.h"
#include "vmh_log.h"
#include "vmh_main.h"
#include "vmh_obj.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include "vmh_tcps_spare.h"
#include "vmh_tcps_ticket.h"
#include "vmh_trace.h"
#include "vmh_uring.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>

VMH_EXPORT int close(int fd)
{
	bool said = vmh_traces(VMH_LOG_DEBUG) && vmh_trace_known(fd);
	int r;

	if (vmh_unlikely(fd >= 0 && vmh_fd_is_hidden(fd))) {
		errno = EBADF; /* not the program's: a loop over all numbers passes by */
		return -1;
	}
	int saved = errno;
	vmh_tspare_closing(fd);
	vmh_fd_closing(fd);
	vmh_tspare_keep(fd);
	errno = saved;
	r = vmh_real()->close(fd);
	vmh_fd_closed(fd);
	if (vmh_unlikely(said))
		vmh_trace_said(VMH_LOG_DEBUG, "close", r, "%d", fd);
	return r;
}

VMH_EXPORT int fclose(FILE *f)
{
	static int (*real)(FILE *);

	if (!real)
		vmh_real_find(&real, "fclose");
	if (f)
		vmh_fd_close(fileno(f)); /* libc closes it without passing by close() */
	return real(f);
}

/* All but what is the shim's. */
static int close_kernels(unsigned first, unsigned last, int flags)
{
	for (;;) {
		long stop = vmh_fd_next_hidden(first, last);

		if (stop < 0)
			return vmh_real()->close_range(first, last, flags);
		if ((unsigned)stop > first && vmh_real()->close_range(first, (unsigned)stop - 1, flags))
			return -1;
		if ((unsigned)stop == last)
			return 0;
		first = (unsigned)stop + 1;
	}
}

/* With a table of its own for this thread; the others go on with what was in it. A program of one thread has it alone
 * already: ours must close with it. */
static int close_apart(unsigned first, unsigned last, int flags)
{
	int r;

	if (vmh_worker_and_one())
		return close_range(first, last, flags & ~(int)CLOSE_RANGE_UNSHARE);
	vmh_kernel_for_good(VMH_R_DESCRIPTORS);
	vmh_fdtab_name_all();
	r = close_kernels(first, last, flags);
	if (!r && vmh_process_has_threads())
		vmh_fdtab_part();
	return r;
}

VMH_EXPORT int close_range(unsigned int first, unsigned int last, int flags)
{
	if (first > last || flags & ~(int)(CLOSE_RANGE_UNSHARE | CLOSE_RANGE_CLOEXEC)) /* the kernel refuses it */
		return vmh_real()->close_range(first, last, flags);
	if (flags & (int)CLOSE_RANGE_UNSHARE && vmh_process_has_threads())
		return close_apart(first, last, flags);
	if (!(flags & (int)CLOSE_RANGE_CLOEXEC))
		for (unsigned fd = first; fd <= last && fd < atomic_load(&vmh_fdtab_used); fd++)
			vmh_fd_close((int)fd);
	if (!(flags & (int)CLOSE_RANGE_CLOEXEC))
		vmh_urings_closed(first, last); /* of higher numbers */
	return close_kernels(first, last, flags);
}

VMH_EXPORT void closefrom(int low)
{
	close_range(low < 0 ? 0 : (unsigned)low, UINT_MAX, 0);
}

void vmh_duplicated(int from, int to)
{
	if (to < 0)
		return;
	vmh_fd_dup(from, to);
	if (vmh_unlikely(to <= STDERR_FILENO && from != to)) /* stdin, stdout and stderr read and write inside libc */
		vmh_kernel_takes(to, VMH_R_UNKNOWN_CALL);
}

VMH_TRACED(dup, (int fd), (fd), "%d", fd)
{
	int r = vmh_tcps_kernel_takes_fd(fd, VMH_R_DUP);

	if (vmh_unlikely(r))
		RETURN(r);
	r = vmh_real()->dup(fd);

	vmh_duplicated(fd, r);
	return r;
}

static int refuse_hidden(int fd)
{
	if (vmh_likely(fd < 0 || !vmh_fd_is_hidden(fd)))
		return 0;
	/* The program asks for a number that we use inside: we can't move without losing packets in flight. */
	errno = EBUSY; /* an error that dup2 documents */
	return -1;
}

/* Put there on purpose: the log follows. The child of a vfork has the descriptor for itself, and not the memory. */
static int laid_over(int newfd)
{
	if (vmh_unlikely(newfd == STDERR_FILENO) && !vmh_filtered && !vmh_fdtab_borrowed())
		vmh_log_stderr_moved();
	return newfd;
}

/* Two descriptors of one connection are the kernel's, and so is what dup2() closes. 0 or -errno. */
static int dup_over(int oldfd, int newfd)
{
	int err = oldfd != newfd ? vmh_tcps_kernel_takes_fd(oldfd, VMH_R_DUP) : 0;

	if (!err && oldfd != newfd)
		vmh_tcps_laid_over(newfd);
	return err;
}

VMH_TRACED(dup2, (int oldfd, int newfd), (oldfd, newfd), "%d, %d", oldfd, newfd)
{
	if (refuse_hidden(newfd))
		return -1;
	int r = dup_over(oldfd, newfd);
	if (vmh_unlikely(r))
		RETURN(r);
	r = vmh_real()->dup2(oldfd, newfd);
	vmh_duplicated(oldfd, r);
	return laid_over(r);
}

VMH_TRACED(dup3, (int oldfd, int newfd, int flags), (oldfd, newfd, flags), "%d, %d, %#x", oldfd, newfd, flags)
{
	if (refuse_hidden(newfd))
		return -1;
	int r = dup_over(oldfd, newfd);
	if (vmh_unlikely(r))
		RETURN(r);
	r = vmh_real()->dup3(oldfd, newfd, flags);
	vmh_duplicated(oldfd, r);
	return laid_over(r);
}

/* Numbers that the kernel hands out anew: forget an object that was closed without our seeing it. */
#define FORGET(fd) \
	do { \
		if ((fd) >= 0) { \
			int saved_ = errno; \
			vmh_fd_close(fd); \
			errno = saved_; \
		} \
	} while (0)

static void accepted(const struct vmh_tcps *from, int listener, int fd, const struct sockaddr *peer, socklen_t len, int flags)
{
	int saved = errno;

	if (fd >= 0 && vmh_likely(!atomic_load_explicit(&vmh_filtered, memory_order_relaxed))) {
		if (vmh_unlikely(atomic_load_explicit(&vmh_accept_tells, memory_order_relaxed)))
			vmh_accept_tell(listener, fd);
		vmh_tcps_accepted(from, fd, peer, len, flags);
	}
	errno = saved;
}

/* Of a listener on rings. */
static int by_rings(struct vmh_tcps *t, int fd, struct sockaddr *a, socklen_t *len, int flags, struct vmh_tcps **goes_on)
{
	struct vmh_signals began = vmh_signals_now();

	if (!t || flags & ~(SOCK_NONBLOCK | SOCK_CLOEXEC))
		return VMH_TCPS_KERNELS;
	pthread_testcancel();
	vmh_tcps_waited_for(&t->obj, fd);
	return vmh_tcps_accept(t, fd, a, len, flags, &began, goes_on);
}

static int by_kernel(int fd, struct sockaddr *a, socklen_t *len, socklen_t room, int flags)
{
	for (;;) {
		int got = vmh_real()->accept4(fd, a, len, flags), saved = errno, r;

		if (got >= 0)
			FORGET(got);
		r = vmh_ticket_redeem(got, a, len, room, flags);
		if (r != -EAGAIN) {
			errno = r < -1 ? -r : saved;
			return r < 0 ? -1 : r;
		}
		if (room)
			*len = room;
	}
}

struct accepting {
	struct vmh_tcps *in_kernel, *goes_on; /* as vmh_tcps_goes_on() says */
};

static void accept_ends(struct accepting *w)
{
	if (w->in_kernel)
		atomic_fetch_sub(&w->in_kernel->in_kernel, 1);
	if (vmh_unlikely(w->goes_on != NULL))
		vmh_tcps_went_on(w->goes_on);
}

VMH_TRACED(accept4, (int fd, struct sockaddr *restrict a, socklen_t *restrict len, int flags), (fd, a, len, flags),
	   "%d, %#x", fd, flags)
{
	if (vmh_unlikely(vmh_filtered))
		return vmh_real()->accept4(fd, a, len, flags);
	TCPS_HELD t = vmh_tcps_get(fd);
	__attribute__((cleanup(accept_ends))) struct accepting w = { 0 };
	socklen_t room;
	int r;

	do {
		r = by_rings(t, fd, a, len, flags, &w.goes_on);
		if (r != VMH_TCPS_KERNELS)
			RETURN(r);
	} while (t && !vmh_tcps_accept_in_kernel(t, flags));
	w.in_kernel = t;
	room = vmh_ticket_room(a, len);
	if (vmh_unlikely(w.goes_on != NULL))
		fd = vmh_tcps_fd(t, fd);
	r = by_kernel(fd, a, len, room, flags);
	accepted(t, fd, r, a, r < 0 ? 0 : vmh_ticket_named(len, room), flags);
	return r;
}

VMH_TRACED(accept, (int fd, struct sockaddr *restrict a, socklen_t *restrict len), (fd, a, len), "%d", fd)
{
	return vmh_unlikely(vmh_filtered) ? vmh_real()->accept(fd, a, len) : accept4_call(fd, a, len, 0);
}

#define OPENER(name, params, args) \
	VMH_EXPORT int name params \
	{ \
		static int(*real) params; \
		if (vmh_unlikely(!real)) \
			vmh_real_find(&real, #name); \
		int r = real args; \
		FORGET(r); \
		return r; \
	}
#define OPENER_MODE(name, params, pass) \
	VMH_EXPORT int name params \
	{ \
		static int(*real) params; \
		mode_t mode = 0; \
		if (vmh_unlikely(!real)) \
			vmh_real_find(&real, #name); \
		if (flags & (O_CREAT | __O_TMPFILE)) { \
			va_list ap; \
			va_start(ap, flags); \
			mode = va_arg(ap, mode_t); \
			va_end(ap); \
		} \
		int r = real pass; \
		FORGET(r); \
		return r; \
	}

OPENER_MODE(open, (const char *path, int flags, ...), (path, flags, mode))
OPENER_MODE(open64, (const char *path, int flags, ...), (path, flags, mode))
OPENER_MODE(openat, (int dir, const char *path, int flags, ...), (dir, path, flags, mode))
OPENER_MODE(openat64, (int dir, const char *path, int flags, ...), (dir, path, flags, mode))
OPENER(creat, (const char *path, mode_t mode), (path, mode))
OPENER(eventfd, (unsigned int init, int flags), (init, flags))
OPENER(timerfd_create, (int clock, int flags), (clock, flags))

static void forget_pair(int r, const int fds[2])
{
	if (r)
		return;
	FORGET(fds[0]);
	FORGET(fds[1]);
}

/* Is it the pidfd of this process? A kernel before 6.9 has one inode for all of them. */
static bool means_us(int pidfd)
{
	int mine = (int)vmh_sys(SYS_pidfd_open, vmh_sys(SYS_getpid), 0);
	struct stat of_mine, of_it;
	bool is = mine >= 0 && !vmh_sys(SYS_fstat, mine, &of_mine) && !vmh_sys(SYS_fstat, pidfd, &of_it) &&
		  of_mine.st_dev == of_it.st_dev && of_mine.st_ino == of_it.st_ino;

	if (mine >= 0)
		vmh_sys(SYS_close, mine);
	return is;
}

VMH_EXPORT int pidfd_getfd(int pidfd, int fd, unsigned int flags)
{
	long r;

	if (!vmh_filtered && means_us(pidfd) && vmh_kernel_takes(fd, VMH_R_DUP))
		return -1;
	r = vmh_sys(SYS_pidfd_getfd, pidfd, fd, flags);
	if (r >= 0)
		FORGET((int)r);
	RETURN((int)r);
}

#define PAIR_BODY(name, params, args, pair) \
	{ \
		static int(*real) params; \
		if (vmh_unlikely(!real)) \
			vmh_real_find(&real, #name); \
		int r = real args; \
		forget_pair(r, pair); \
		return r; \
	}

VMH_EXPORT int pipe(int fds[2])
PAIR_BODY(pipe, (int[2]), (fds), fds)
VMH_EXPORT int pipe2(int fds[2], int flags)
PAIR_BODY(pipe2, (int[2], int), (fds, flags), fds)
VMH_TRACED(socketpair, (int domain, int type, int protocol, int fds[2]), (domain, type, protocol, fds), "%d, %#x, %d",
	   domain, type, protocol)
PAIR_BODY(socketpair, (int, int, int, int[2]), (domain, type, protocol, fds), fds)

static pid_t forked_now(pid_t pid)
{
	int saved = errno;

	if (pid == 0)
		vmh_after_fork_child();
	else
		vmh_after_fork_parent();
	errno = saved;
	return pid;
}

static pid_t forked(pid_t (*real)(void))
{
	int saved = errno;

	vmh_before_fork();
	errno = saved;
	return forked_now(real());
}

/* Where a program has one thread, libc's fork() takes none of its locks, and may be called by a handler that has come in
 * the midst of malloc(). With ours it would: such a fork goes without. */
VMH_EXPORT pid_t fork(void)
{
	if (vmh_unlikely(vmh_in_handler()) && vmh_real()->_Fork && vmh_worker_and_one())
		return forked(vmh_real()->_Fork);
	vmh_watch_forks();
	return vmh_real()->fork();
}

struct cloned {
	int (*fn)(void *);
	void *arg;
};

static int cloned_now(void *arg)
{
	const struct cloned c = *(const struct cloned *)arg;

	forked_now(0);
	return c.fn(c.arg);
}

/* With memory of its own the child is that of a fork. */
VMH_EXPORT int clone(int (*fn)(void *), void *stack, int flags, void *arg, ...);
VMH_EXPORT int clone(int (*fn)(void *), void *stack, int flags, void *arg, ...)
{
	static int (*real)(int (*)(void *), void *, int, void *, ...);
	struct cloned c = { fn, arg };
	void *parent_tid, *tls, *child_tid;
	int saved = errno, r;
	va_list ap;

	va_start(ap, arg); /* libc takes them, too, whether they were given or not */
	parent_tid = va_arg(ap, void *);
	tls = va_arg(ap, void *);
	child_tid = va_arg(ap, void *);
	va_end(ap);
	if (!real)
		vmh_real_find(&real, "clone");
	if (flags & CLONE_VM && !(flags & CLONE_FILES))
		vmh_tspare_drop();
	if (flags & CLONE_VM || !fn || !stack)
		return real(fn, stack, flags, arg, parent_tid, tls, child_tid);
	vmh_before_fork();
	errno = saved;
	r = real(cloned_now, stack, flags, &c, parent_tid, tls, child_tid);
	return forked_now(r);
}

/* Of glibc 2.34. What is done around it makes system calls and takes the shim's own locks alone, which a signal handler
 * never finds held (vmh_lock.h). */
VMH_EXPORT pid_t _Fork(void)
{
	return forked(vmh_real()->_Fork ? vmh_real()->_Fork : vmh_real()->fork);
}

struct termios;
struct winsize;
VMH_EXPORT pid_t forkpty(int *master, char *name, const struct termios *tio, const struct winsize *win);
VMH_EXPORT pid_t forkpty(int *master, char *name, const struct termios *tio, const struct winsize *win)
{
	static pid_t (*real)(int *, char *, const struct termios *, const struct winsize *);
	int saved = errno;

	if (!real)
		vmh_real_find(&real, "forkpty");
	vmh_watch_forks();
	errno = saved;
	pid_t pid = real(master, name, tio, win);
	if (pid == 0)
		vmh_log_stderr_moved(); /* onto the new terminal */
	return pid;
}

VMH_EXPORT int daemon(int nochdir, int noclose)
{
	vmh_before_daemon();
	int r = vmh_real()->daemon(nochdir, noclose);
	int saved = errno;
	vmh_after_daemon();
	errno = saved;
	return r;
}
