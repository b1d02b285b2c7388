/* select, poll, epoll: to us only where a set can become ready by a ring. */
#include "vmh_iomux_int.h"
#include "vmh_interpose.h"
#include "vmh_main.h"
#include "vmh_obj.h"
#include "vmh_real.h"
#include "vmh_trace.h"
#include "vmh_ring.h"
#include "vmh_tcps.h"
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>

static int64_t from_ms(int ms)
{
	return ms < 0 ? -1 : (int64_t)ms * 1000000;
}

/* -1 for ever; INT64_MAX where it does not fit */
static int64_t from_timespec(const struct timespec *t)
{
	if (!t)
		return -1;
	if (t->tv_sec > INT64_MAX / 1000000000 - 1)
		return INT64_MAX;
	return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec;
}

static bool bad_timespec(const struct timespec *t)
{
	return t && (vmh_bad_ptr(t) || t->tv_sec < 0 || (unsigned long)t->tv_nsec >= 1000000000ul);
}

/* an address that is given and can't be: EFAULT is the kernel's to say, and libc is called */
static bool bad_if_given(const volatile void *p)
{
	return p && vmh_bad_ptr(p);
}

/* glibc declares the array as written only; the compiler then warns where we read it */
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"

/* A wait that is libc's: counted once the shim has begun, with errno as libc left it. */
static int counted(bool is_poll, int r, int rx)
{
	struct vmh_stats_page *page = VMH_GET(vmh_stats);

	if (vmh_likely(page != NULL))
		vmh_iomux_count_os(is_poll ? &page->poll : &page->select, r < 0 ? -errno : r, rx);
	return r;
}

static int counted_poll(int r, const struct pollfd *fds, nfds_t n)
{
	return counted(true, r, r > 0 ? vmh_poll_rx(fds, n) : 0);
}

/* of a select that said r > 0 its sets are good */
static int counted_select(int r, int nfds, const fd_set *reads)
{
	int rx = 0;

	for (int fd = 0; r > 0 && reads && fd < nfds; fd++)
		rx += FD_ISSET(fd, reads) != 0;
	return counted(false, r, rx);
}

/* --- poll --- */

/* Then the long way, where a connection can be moved that is waited for. More than a tick of the kernel's: to set the
 * processor's timer anew in each call takes a tenth of a virtual machine's time. */
#define PLAIN_POLL_MS 20

/* Of one connection that is the kernel's and that the policy does not want: libc's poll. true: *r is the answer; else
 * it has taken from *timeout what was waited. */
static bool poll_plain(struct pollfd *p, int *timeout, int *r)
{
	PLAIN_CALL call = vmh_plain_begin(p->fd);
	bool brief = *timeout >= 0 && *timeout <= PLAIN_POLL_MS;

	if (!call || (*timeout && vmh_os_forced()))
		return false;
	*r = vmh_real()->poll(p, 1, brief ? *timeout : PLAIN_POLL_MS);
	if (!*r && !brief) {
		if (*timeout > 0)
			*timeout -= PLAIN_POLL_MS;
		return false;
	}
	counted_poll(*r, p, 1);
	return true;
}

VMH_TRACED_WAIT(poll, (struct pollfd *fds, nfds_t n, int timeout), (fds, n, timeout), "%lu fds, %d", (unsigned long)n, timeout)
{
	int r;

	if (n == 1 && !vmh_bad_ptr(fds) && poll_plain(fds, &timeout, &r))
		return r;
	if (vmh_likely(vmh_bad_ptr(fds) || !n || !vmh_poll_wanted(fds, n)))
		return counted_poll(vmh_real()->poll(fds, n, timeout), fds, n);
	pthread_testcancel(); /* also where it does not wait, as libc's; so in those that follow */
	RETURN(vmh_poll(fds, n, from_ms(timeout), NULL));
}

VMH_TRACED_WAIT(ppoll, (struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask),
		(fds, n, timeout, mask), "%lu fds", (unsigned long)n)
{
	if (vmh_likely(vmh_bad_ptr(fds) || !n || bad_timespec(timeout) || bad_if_given(mask) ||
		       !vmh_poll_wanted(fds, n)))
		return counted_poll(vmh_real()->ppoll(fds, n, timeout, mask), fds, n);
	pthread_testcancel();
	RETURN(vmh_poll(fds, n, from_timespec(timeout), mask));
}

VMH_EXPORT int __poll_chk(struct pollfd *fds, nfds_t n, int timeout, size_t size)
{
	if (vmh_unlikely(size / sizeof(*fds) < n))
		return vmh_real()->__poll_chk(fds, n, timeout, size);
	return poll(fds, n, timeout);
}

VMH_EXPORT int __ppoll_chk(struct pollfd *fds, nfds_t n, const struct timespec *timeout, const sigset_t *mask,
			   size_t size)
{
	if (vmh_unlikely(size / sizeof(*fds) < n))
		return vmh_real()->__ppoll_chk(fds, n, timeout, mask, size);
	return ppoll(fds, n, timeout, mask);
}

/* --- select --- */

static bool bad_sets(const fd_set *r, const fd_set *w, const fd_set *e)
{
	return bad_if_given(r) || bad_if_given(w) || bad_if_given(e);
}

VMH_TRACED_WAIT(select, (int nfds, fd_set *restrict r, fd_set *restrict w, fd_set *restrict e,
			 struct timeval *restrict timeout), (nfds, r, w, e, timeout), "%d", nfds)
{
	if (vmh_likely(nfds <= 0 || bad_sets(r, w, e) || bad_if_given(timeout) ||
		       (timeout && (timeout->tv_sec < 0 || timeout->tv_usec < 0)) ||
		       !vmh_select_wanted(nfds, r, w, e)))
		return counted_select(vmh_real()->select(nfds, r, w, e, timeout), nfds, r);
	int64_t ns = -1;
	uint64_t start = 0;
	if (timeout) {
		ns = timeout->tv_sec > INT64_MAX / 1000000000 - 2
			     ? INT64_MAX
			     : (int64_t)timeout->tv_sec * 1000000000 + (int64_t)timeout->tv_usec * 1000;
		start = vmh_now_ns();
	}
	pthread_testcancel();
	int ret = vmh_select(nfds, r, w, e, ns, NULL);
	if (timeout && ns != INT64_MAX) { /* Linux tells what is left */
		int64_t left = ns - (int64_t)(vmh_now_ns() - start);

		if (left < 0)
			left = 0;
		timeout->tv_sec = left / 1000000000;
		timeout->tv_usec = left % 1000000000 / 1000;
	}
	RETURN(ret);
}

VMH_TRACED_WAIT(pselect, (int nfds, fd_set *restrict r, fd_set *restrict w, fd_set *restrict e,
			  const struct timespec *restrict timeout, const sigset_t *restrict mask),
		(nfds, r, w, e, timeout, mask), "%d", nfds)
{
	if (vmh_likely(nfds <= 0 || bad_sets(r, w, e) || bad_timespec(timeout) || bad_if_given(mask) ||
		       !vmh_select_wanted(nfds, r, w, e)))
		return counted_select(vmh_real()->pselect(nfds, r, w, e, timeout, mask), nfds, r);
	pthread_testcancel();
	RETURN(vmh_select(nfds, r, w, e, from_timespec(timeout), mask));
}

/* --- epoll: a set that is no object of ours came by other ways (SCM_RIGHTS, before an exec) --- */

static struct vmh_obj *epoll_get(int epfd)
{
	struct vmh_obj *o = vmh_fd_get(epfd);

	if (!o)
		return NULL;
	if (atomic_load_explicit(&o->class_, memory_order_relaxed) == VMH_CLASS_EPOLL)
		return o;
	vmh_obj_put(o);
	return NULL;
}

static int created(int epfd)
{
	int saved = errno;

	if (epfd >= 0)
		vmh_fd_close(epfd);
	if (epfd >= 0 && vmh_likely(!atomic_load_explicit(&vmh_filtered, memory_order_relaxed))) {
		vmh_started();
		vmh_epoll_created(epfd);
	}
	errno = saved;
	return epfd;
}

VMH_TRACED(epoll_create, (int size), (size), "%d", size)
{
	return created(vmh_real()->epoll_create(size));
}

VMH_TRACED(epoll_create1, (int flags), (flags), "%#x", flags)
{
	return created(vmh_real()->epoll_create1(flags));
}

/* A set that is not ours may be another process', which looks at the kernel's sockets. */
static void into_another(int fd)
{
	struct vmh_obj *inner = epoll_get(fd);

	if (inner) {
		vmh_epoll_nested(inner, VMH_R_FD_PASSED);
		vmh_obj_put(inner);
	} else {
		vmh_kernel_takes(fd, VMH_R_FD_PASSED);
	}
}

VMH_TRACED(epoll_ctl, (int epfd, int op, int fd, struct epoll_event *ev), (epfd, op, fd, ev), "%d, %d, %d", epfd, op, fd)
{
	bool bad = op != EPOLL_CTL_DEL && vmh_bad_ptr(ev);
	struct vmh_obj *ep;
	int r;

	if (!bad) {
		PLAIN_CALL call = vmh_plain_begin(fd);

		if (call && vmh_epoll_plain(epfd, op, fd, ev)) /* not by libc: see KERNELS in interpose_sock.c */
			return vmh_real_is_libc ? (int)as_libc(vmh_sys(SYS_epoll_ctl, epfd, op, fd, ev))
						: vmh_real()->epoll_ctl(epfd, op, fd, ev);
	}
	ep = bad ? NULL : vmh_fd_peek(epfd, VMH_CLASS_EPOLL);
	if (ep && (unsigned)fd < vmh_fdtab_size && !atomic_load_explicit(&vmh_fdtab[fd], memory_order_relaxed))
		RETURN(vmh_epoll_ctl_kernels(ep, epfd, op, fd, ev));
	ep = ep ? epoll_get(epfd) : NULL;
	if (!ep) {
		if (!bad && op != EPOLL_CTL_DEL && !vmh_filtered && vmh_sys(SYS_fcntl, epfd, F_GETFD) >= 0)
			into_another(fd);
		return vmh_real()->epoll_ctl(epfd, op, fd, ev);
	}
	r = vmh_epoll_ctl(ep, epfd, op, fd, ev);
	vmh_obj_put(ep);
	RETURN(r);
}

static void obj_drop(struct vmh_obj **o)
{
	vmh_obj_put(*o);
}

static int wait_on(struct vmh_obj *o, int epfd, struct epoll_event *evs, int max, int64_t ns, const sigset_t *mask)
{
	__attribute__((cleanup(obj_drop))) struct vmh_obj *ep = o; /* also when the thread is cancelled */

	pthread_testcancel();
	RETURN(vmh_epoll_wait(ep, epfd, evs, max, ns, mask));
}

/* what the kernel refuses at once is the kernel's to say */
static bool bad_args(const struct epoll_event *evs, int max, const sigset_t *mask)
{
	return (intptr_t)evs < 0 || max <= 0 || max > INT_MAX / (int)sizeof(*evs) || bad_if_given(mask);
}

/* r: what libc says of such a call, or of a set that is not ours */
static int libc_said(int epfd, int r)
{
	struct vmh_obj *ep = vmh_unlikely(r < 0) ? epoll_get(epfd) : NULL;

	if (ep) {
		vmh_iomux_count_os(vmh_ep_of(ep)->stats, -errno, 0);
		vmh_obj_put(ep);
	}
	return vmh_os_reported(r);
}

VMH_TRACED_WAIT(epoll_wait, (int epfd, struct epoll_event *evs, int max, int timeout), (epfd, evs, max, timeout),
		"%d, %d, %d", epfd, max, timeout)
{
	struct vmh_obj *ep = bad_args(evs, max, NULL) ? NULL : epoll_get(epfd);

	if (!ep)
		return libc_said(epfd, vmh_real()->epoll_wait(epfd, evs, max, timeout));
	return wait_on(ep, epfd, evs, max, from_ms(timeout), NULL);
}

VMH_TRACED_WAIT(epoll_pwait, (int epfd, struct epoll_event *evs, int max, int timeout, const sigset_t *mask),
		(epfd, evs, max, timeout, mask), "%d, %d, %d", epfd, max, timeout)
{
	struct vmh_obj *ep = bad_args(evs, max, mask) ? NULL : epoll_get(epfd);

	if (!ep)
		return libc_said(epfd, vmh_real()->epoll_pwait(epfd, evs, max, timeout, mask));
	return wait_on(ep, epfd, evs, max, from_ms(timeout), mask);
}

VMH_TRACED_WAIT(epoll_pwait2, (int epfd, struct epoll_event *evs, int max, const struct timespec *timeout,
			       const sigset_t *mask), (epfd, evs, max, timeout, mask), "%d, %d", epfd, max)
{
	struct vmh_obj *ep = bad_args(evs, max, mask) || bad_timespec(timeout) ? NULL : epoll_get(epfd);

	if (!ep)
		return libc_said(epfd, vmh_real()->epoll_pwait2(epfd, evs, max, timeout, mask));
	return wait_on(ep, epfd, evs, max, from_timespec(timeout), mask);
}
