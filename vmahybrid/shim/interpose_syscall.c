/* libc's syscall(): a number that names a descriptor of ours is the call of that name, as if the program had made it by
 * libc's function; what hands descriptors to the kernel's own queues sends them home; everything else is the kernel's.
 *
 * In assembler, because a call that does not concern us must find the stack as in libc's syscall(): the child of a
 * vfork runs on it, that of a clone has another, and sigreturn takes its frame from it. Such a number costs a comparison
 * and a byte of a table. No libc function is looked up for it either: allocators make such calls before all is ready.
 *
 * What io_uring is handed is looked at before it is entered (uring.c).
 *
 * A program, or a library such as liburing, that executes the instruction itself is not seen. */
#include "vmh_interpose.h"
#include "vmh_iomux.h"
#include "vmh_main.h"
#include "vmh_uring.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/io_uring.h>
#include <linux/sched.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>

#ifdef __x86_64__ /* elsewhere vmh_sys() is libc's syscall() */

#define NUMBERS 442 /* and in the assembler below */
_Static_assert(SYS_epoll_pwait2 == NUMBERS - 1, "the last number that is ours");

/* What a call is made with. */
struct call {
	long nr, a, b, c, d, e, f;
};
#define INT(x) ((int)k->x)
#define UINT(x) ((unsigned)k->x)
#define PTR(x) ((void *)k->x)
#define LEN(x) ((socklen_t)k->x)

static long said(long r)
{
	if ((unsigned long)r > -4096ul) {
		errno = (int)-r;
		return -1;
	}
	return r;
}

static long kernels(const struct call *k)
{
	return said(vmh_sys6(k->nr, k->a, k->b, k->c, k->d, k->e, k->f));
}

static bool ours(long fd)
{
	return vmh_fd_known((int)fd);
}

static bool hidden(long fd)
{
	return (int)fd >= 0 && vmh_fd_is_hidden((int)fd);
}

/* Descriptors may leave by it, whoever's it is. */
static bool has_control(const struct msghdr *m)
{
	return !vmh_bad_ptr(m) && m->msg_control && m->msg_controllen;
}

static bool any_control(const struct mmsghdr *v, unsigned n)
{
	for (unsigned i = 0; !vmh_bad_ptr(v) && i < n && i < 1024; i++)
		if (has_control(&v[i].msg_hdr))
			return true;
	return false;
}

static bool is_of_number(int command)
{
	return command == F_GETFD || command == F_SETFD;
}

/* ---- numbers that the kernel hands out anew: forget what was closed without our seeing it ---- */

static long opened(long fd)
{
	int saved = errno;

	if (fd >= 0)
		vmh_fd_close((int)fd);
	errno = saved;
	return fd;
}

static long opened_pair(long r, const int *fds)
{
	if (!r)
		for (int i = 0; i < 2; i++)
			opened(fds[i]);
	return r;
}

/* ---- waiting: the kernel has masks of 8 bytes, and tells what is left of the time ---- */

#define MASK_SIZE 8

static bool good_mask(const void *mask, long size)
{
	return !mask || (size == MASK_SIZE && !vmh_bad_ptr(mask));
}

static const sigset_t *wide_mask(const void *mask, sigset_t *wide)
{
	if (!mask)
		return NULL;
	sigemptyset(wide);
	memcpy(wide, mask, MASK_SIZE);
	return wide;
}

/* By the kernel, which does not mind memory that is read only. */
static void tell_left(struct timespec *timeout, uint64_t since)
{
	int64_t left = timeout->tv_sec * 1000000000ll + timeout->tv_nsec - (int64_t)(vmh_now_ns() - since);
	struct timespec t = { left > 0 ? left / 1000000000 : 0, left > 0 ? left % 1000000000 : 0 };
	struct iovec from = { &t, sizeof(t) }, to = { timeout, sizeof(t) };

	if (timeout->tv_sec < INT64_MAX / 1000000000 - 1)
		vmh_sys(SYS_process_vm_writev, vmh_sys(SYS_getpid), &from, 1, &to, 1, 0);
}

static long do_ppoll(const struct call *k)
{
	struct timespec *timeout = PTR(c);
	uint64_t since = vmh_now_ns();
	sigset_t wide;
	int r = ppoll(PTR(a), (nfds_t)k->b, timeout, wide_mask(PTR(d), &wide));
	int saved = errno;

	if (timeout)
		tell_left(timeout, since);
	errno = saved;
	return r;
}

struct mask_arg {
	const void *mask;
	long size;
};

static bool good_mask_arg(const struct mask_arg *m)
{
	return !m || (!vmh_bad_ptr(m) && good_mask(m->mask, m->size));
}

static long do_pselect(const struct call *k)
{
	const struct mask_arg *m = PTR(f);
	struct timespec *timeout = PTR(e);
	uint64_t since = vmh_now_ns();
	sigset_t wide;
	int r = pselect(INT(a), PTR(b), PTR(c), PTR(d), timeout, wide_mask(m ? m->mask : NULL, &wide));
	int saved = errno;

	if (timeout)
		tell_left(timeout, since);
	errno = saved;
	return r;
}

static bool bad_if_given(const void *p)
{
	return p && vmh_bad_ptr(p);
}

static bool select_wanted(const struct call *k)
{
	return !bad_if_given(PTR(b)) && !bad_if_given(PTR(c)) && !bad_if_given(PTR(d)) && !bad_if_given(PTR(e)) &&
	       vmh_select_wanted(INT(a), PTR(b), PTR(c), PTR(d));
}

static bool poll_wanted(const struct call *k)
{
	return !vmh_bad_ptr(PTR(a)) && k->b && vmh_poll_wanted(PTR(a), (nfds_t)UINT(b));
}

static bool ppoll_wanted(const struct call *k)
{
	return poll_wanted(k) && !bad_if_given(PTR(c)) && good_mask(PTR(d), k->e);
}

static long do_epoll_pwait(const struct call *k)
{
	sigset_t wide;

	return epoll_pwait(INT(a), PTR(b), INT(c), INT(d), wide_mask(PTR(e), &wide));
}

static long do_epoll_pwait2(const struct call *k)
{
	sigset_t wide;

	return epoll_pwait2(INT(a), PTR(b), INT(c), PTR(d), wide_mask(PTR(e), &wide));
}

/* ---- processes ---- */

static long do_fork(const struct call *k)
{
	int saved = errno;
	long r;

	vmh_before_fork();
	r = vmh_sys6(k->nr, k->a, k->b, k->c, k->d, k->e, k->f);
	if (r)
		vmh_after_fork_parent();
	else
		vmh_after_fork_child();
	errno = saved;
	return said(r);
}

/* A process with memory of its own, on the stack of its parent. Others use the memory that is ours. */
static bool forks(uint64_t flags, uint64_t stack)
{
	return !(flags & CLONE_VM) && !stack;
}

static bool forks3(const struct clone_args *c, size_t size)
{
	return !vmh_bad_ptr(c) && size >= CLONE_ARGS_SIZE_VER0 && forks(c->flags, c->stack);
}

static long do_exit_group(const struct call *k)
{
	vmh_before_exit();
	return said(vmh_sys(SYS_exit_group, k->a));
}

static long do_filter(const struct call *k)
{
	vmh_before_filter();
	return kernels(k);
}

static long do_exit(const struct call *k)
{
	if (vmh_worker_and_one()) /* the process would go on with the internal thread alone */
		return do_exit_group(k);
	if (!vmh_filtered && vmh_sys(SYS_gettid) == vmh_sys(SYS_getpid) && !vmh_memory_borrowed())
		vmh_worker_first_ends();
	return kernels(k);
}

/* ---- queues of the kernel, which works on the descriptors behind our back ---- */

static bool any_ours(const int *fds, unsigned n)
{
	for (unsigned i = 0; !vmh_bad_ptr(fds) && i < n; i++)
		if (ours(fds[i]))
			return true;
	return false;
}

static bool all_home(const int *fds, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (vmh_kernel_takes(fds[i], VMH_R_IO_URING))
			return false;
	return true;
}

#define BY_INDEX (1u << 31) /* the ring; headers before Linux 6.3 have no name for it */

/* The descriptors that a ring of io_uring is to keep: how many, and where. */
static unsigned registered(const struct call *k, const int **fds)
{
	const struct io_uring_rsrc_update2 *update2 = PTR(c);
	const struct io_uring_rsrc_register *files2 = PTR(c);
	const struct io_uring_files_update *update = PTR(c);
	unsigned n = 0;

	if (vmh_bad_ptr(PTR(c)))
		return 0;
	switch (UINT(b) & ~BY_INDEX) {
	case IORING_REGISTER_FILES:
		*fds = PTR(c);
		return UINT(d);
	case IORING_REGISTER_FILES_UPDATE:
		*fds = (const int *)(uintptr_t)update->fds;
		return UINT(d);
	case IORING_REGISTER_FILES2:
		*fds = (const int *)(uintptr_t)files2->data;
		n = files2->nr;
		return UINT(d) >= sizeof(*files2) ? n : 0;
	case IORING_REGISTER_FILES_UPDATE2:
		*fds = (const int *)(uintptr_t)update2->data;
		n = update2->nr;
		return UINT(d) >= sizeof(*update2) ? n : 0;
	}
	return 0;
}

static bool registers(const struct call *k)
{
	const int *fds = NULL;
	unsigned n = registered(k, &fds);

	return any_ours(fds, n);
}

static long do_register(const struct call *k)
{
	const int *fds = NULL;
	unsigned n = registered(k, &fds);

	return all_home(fds, n) ? kernels(k) : -1;
}

static long do_setup(const struct call *k)
{
	long fd = opened(kernels(k));

	if (fd >= 0)
		vmh_uring_made((int)fd, PTR(b));
	return fd;
}

#define BY_REGISTERED (1u << 4) /* the ring, in a call that enters it; as above */

static bool enters(const struct call *k)
{
	return k->b && !(UINT(d) & BY_REGISTERED) && vmh_uring_known(INT(a));
}

static long do_enter(const struct call *k)
{
	const struct vmh_uring_call call = { INT(a), UINT(b), UINT(c), UINT(d), PTR(e), (size_t)k->f };

	return said(vmh_uring_enter(&call));
}

/* Linux aio: the n-th request's descriptor, -1: there is none */
static int submitted(const struct call *k, long n)
{
	struct iocb *const *list = PTR(c);

	return vmh_bad_ptr(list) || n >= k->b || vmh_bad_ptr(list[n]) ? -1 : (int)list[n]->aio_fildes;
}

static bool submits(const struct call *k)
{
	int fd;

	for (long i = 0; (fd = submitted(k, i)) >= 0; i++)
		if (ours(fd))
			return true;
	return false;
}

static long do_submit(const struct call *k)
{
	int fd;

	for (long i = 0; (fd = submitted(k, i)) >= 0; i++)
		if (!all_home(&fd, 1))
			return -1;
	return kernels(k);
}

/* ---- the table ---- */

/* X(name, when it concerns us, what is done then) */
#define CALLS(X) \
	X(read, ours(k->a), read(INT(a), PTR(b), (size_t)k->c)) \
	X(write, ours(k->a), write(INT(a), PTR(b), (size_t)k->c)) \
	X(readv, ours(k->a) && (unsigned long)k->c <= 1024, readv(INT(a), PTR(b), INT(c))) \
	X(writev, ours(k->a) && (unsigned long)k->c <= 1024, writev(INT(a), PTR(b), INT(c))) \
	X(preadv2, ours(k->a) && (unsigned long)k->c <= 1024, preadv2(INT(a), PTR(b), INT(c), k->d, INT(f))) \
	X(pwritev2, ours(k->a) && (unsigned long)k->c <= 1024, pwritev2(INT(a), PTR(b), INT(c), k->d, INT(f))) \
	X(recvfrom, ours(k->a), recvfrom(INT(a), PTR(b), (size_t)k->c, INT(d), PTR(e), PTR(f))) \
	X(sendto, ours(k->a), sendto(INT(a), PTR(b), (size_t)k->c, INT(d), PTR(e), LEN(f))) \
	X(recvmsg, ours(k->a), recvmsg(INT(a), PTR(b), INT(c))) \
	X(sendmsg, ours(k->a) || has_control(PTR(b)), sendmsg(INT(a), PTR(b), INT(c))) \
	X(recvmmsg, ours(k->a), recvmmsg(INT(a), PTR(b), UINT(c), INT(d), PTR(e))) \
	X(sendmmsg, ours(k->a) || any_control(PTR(b), UINT(c)), sendmmsg(INT(a), PTR(b), UINT(c), INT(d))) \
	X(sendfile, ours(k->a) || ours(k->b), sendfile(INT(a), INT(b), PTR(c), (size_t)k->d)) \
	X(splice, ours(k->a) || ours(k->c), splice(INT(a), PTR(b), INT(c), PTR(d), (size_t)k->e, UINT(f))) \
	X(bind, ours(k->a), bind(INT(a), PTR(b), LEN(c))) \
	X(connect, ours(k->a), connect(INT(a), PTR(b), LEN(c))) \
	X(listen, ours(k->a), listen(INT(a), INT(b))) \
	X(accept, true, accept(INT(a), PTR(b), PTR(c))) \
	X(accept4, true, accept4(INT(a), PTR(b), PTR(c), INT(d))) \
	X(shutdown, ours(k->a), shutdown(INT(a), INT(b))) \
	X(getsockname, ours(k->a), getsockname(INT(a), PTR(b), PTR(c))) \
	X(getpeername, ours(k->a), getpeername(INT(a), PTR(b), PTR(c))) \
	X(setsockopt, ours(k->a), setsockopt(INT(a), INT(b), INT(c), PTR(d), LEN(e))) \
	X(getsockopt, ours(k->a), getsockopt(INT(a), INT(b), INT(c), PTR(d), PTR(e))) \
	X(ioctl, ours(k->a), ioctl(INT(a), (unsigned long)UINT(b), PTR(c))) \
	X(fcntl, ours(k->a) && !is_of_number(INT(b)), fcntl(INT(a), INT(b), PTR(c))) \
	X(dup, ours(k->a), dup(INT(a))) \
	X(dup2, ours(k->a) || ours(k->b) || hidden(k->b) || k->b == STDERR_FILENO, dup2(INT(a), INT(b))) \
	X(dup3, ours(k->a) || ours(k->b) || hidden(k->b) || k->b == STDERR_FILENO, dup3(INT(a), INT(b), INT(c))) \
	X(pidfd_getfd, ours(k->b), pidfd_getfd(INT(a), INT(b), UINT(c))) \
	X(close, ours(k->a) || hidden(k->a), close(INT(a))) \
	X(close_range, vmh_fdtab_size > 0, close_range(UINT(a), UINT(b), INT(c))) \
	X(poll, poll_wanted(k), poll(PTR(a), (nfds_t)UINT(b), INT(c))) \
	X(ppoll, ppoll_wanted(k), do_ppoll(k)) \
	X(select, select_wanted(k), select(INT(a), PTR(b), PTR(c), PTR(d), PTR(e))) \
	X(pselect6, select_wanted(k) && good_mask_arg(PTR(f)), do_pselect(k)) \
	X(epoll_create, true, epoll_create(INT(a))) \
	X(epoll_create1, true, epoll_create1(INT(a))) \
	X(epoll_ctl, ours(k->a) || ours(k->c), epoll_ctl(INT(a), INT(b), INT(c), PTR(d))) \
	X(epoll_wait, ours(k->a), epoll_wait(INT(a), PTR(b), INT(c), INT(d))) \
	X(epoll_pwait, ours(k->a) && good_mask(PTR(e), k->f), do_epoll_pwait(k)) \
	X(epoll_pwait2, ours(k->a) && good_mask(PTR(e), k->f), do_epoll_pwait2(k)) \
	X(socket, true, opened(kernels(k))) \
	X(open, true, opened(kernels(k))) \
	X(openat, true, opened(kernels(k))) \
	X(openat2, true, opened(kernels(k))) \
	X(creat, true, opened(kernels(k))) \
	X(eventfd, true, opened(kernels(k))) \
	X(eventfd2, true, opened(kernels(k))) \
	X(timerfd_create, true, opened(kernels(k))) \
	X(memfd_create, true, opened(kernels(k))) \
	X(pipe, true, opened_pair(kernels(k), PTR(a))) \
	X(pipe2, true, opened_pair(kernels(k), PTR(a))) \
	X(socketpair, true, opened_pair(kernels(k), PTR(d))) \
	X(fork, true, do_fork(k)) \
	X(clone, forks((uint64_t)k->a, (uint64_t)k->b), do_fork(k)) \
	X(clone3, forks3(PTR(a), (size_t)k->b), do_fork(k)) \
	X(execve, true, execve(PTR(a), PTR(b), PTR(c))) \
	X(execveat, true, execveat(INT(a), PTR(b), PTR(c), PTR(d), INT(e))) \
	X(exit_group, true, do_exit_group(k)) \
	X(exit, true, do_exit(k)) \
	X(unshare, true, unshare(INT(a))) \
	X(setns, true, setns(INT(a), INT(b))) \
	X(prctl, vmh_sets_filter(k->nr, (unsigned long)k->a, (unsigned long)k->b, PTR(c)), do_filter(k)) \
	X(seccomp, vmh_sets_filter(k->nr, (unsigned long)k->a, (unsigned long)k->b, PTR(c)), do_filter(k)) \
	X(io_submit, submits(k), do_submit(k)) \
	X(io_uring_setup, true, do_setup(k)) \
	X(io_uring_enter, enters(k), do_enter(k)) \
	X(io_uring_register, registers(k), do_register(k))

enum way {
	WAY_KERNEL,
#define X(name, concerns, call) WAY_##name,
	CALLS(X)
#undef X
};

extern const uint8_t vmh_syscall_ways[NUMBERS];
const uint8_t vmh_syscall_ways[NUMBERS] = {
#define X(name, concerns, call) [SYS_##name] = WAY_##name,
	CALLS(X)
#undef X
};

bool vmh_syscall_concerns(long nr, long a, long b, long c, long d, long e, long f);
bool vmh_syscall_concerns(long nr, long a, long b, long c, long d, long e, long f)
{
	const struct call call_ = { nr, a, b, c, d, e, f }, *k = &call_;

	switch (vmh_syscall_ways[nr]) {
#define X(name, concerns, call) \
	case WAY_##name: \
		return concerns;
		CALLS(X)
#undef X
	}
	return false;
}

static void cancel_as_before(const int *state)
{
	pthread_setcancelstate(*state, NULL);
}

/* syscall() is no cancellation point, as libc's functions are. */
long vmh_syscall_ours(long nr, long a, long b, long c, long d, long e, long f);
long vmh_syscall_ours(long nr, long a, long b, long c, long d, long e, long f)
{
	const struct call call_ = { nr, a, b, c, d, e, f }, *k = &call_;
	__attribute__((cleanup(cancel_as_before))) int state = 0;

	pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &state);
	switch (vmh_syscall_ways[nr]) {
#define X(name, concerns, call) \
	case WAY_##name: \
		return call;
		CALLS(X)
#undef X
	}
	return kernels(k);
}

long vmh_syscall_failed(long r);
long vmh_syscall_failed(long r)
{
	return said(r);
}

/* long syscall(long nr, ...): the sixth argument of the system call is the seventh here, above the return address. */
__asm__(
	".pushsection .text\n"
	".globl syscall\n"
	".type syscall, @function\n"
	".p2align 4\n"
	"syscall:\n"
	"	.cfi_startproc\n"
	"	cmpq $442, %rdi\n"
	"	jae 1f\n"
	"	leaq vmh_syscall_ways(%rip), %rax\n"
	"	cmpb $0, (%rax,%rdi)\n"
	"	jne 2f\n"
	"1:	movq %rdi, %rax\n"
	"	movq %rsi, %rdi\n"
	"	movq %rdx, %rsi\n"
	"	movq %rcx, %rdx\n"
	"	movq %r8, %r10\n"
	"	movq %r9, %r8\n"
	"	movq 8(%rsp), %r9\n"
	"	syscall\n"
	"	cmpq $-4095, %rax\n"
	"	jae 3f\n"
	"	ret\n"
	/* the arguments are kept on the stack, which is the caller's again before anything else is done */
	"2:	pushq %rdi\n"
	"	pushq %rsi\n"
	"	pushq %rdx\n"
	"	pushq %rcx\n"
	"	pushq %r8\n"
	"	pushq %r9\n"
	"	pushq 56(%rsp)\n"
	"	.cfi_adjust_cfa_offset 56\n"
	"	call vmh_syscall_concerns\n"
	"	addq $8, %rsp\n"
	"	popq %r9\n"
	"	popq %r8\n"
	"	popq %rcx\n"
	"	popq %rdx\n"
	"	popq %rsi\n"
	"	popq %rdi\n"
	"	.cfi_adjust_cfa_offset -56\n"
	"	testb %al, %al\n"
	"	je 1b\n"
	"	jmp vmh_syscall_ours\n"
	"3:	movq %rax, %rdi\n"
	"	jmp vmh_syscall_failed\n"
	"	.cfi_endproc\n"
	".size syscall, . - syscall\n"
	".popsection\n");
#endif
