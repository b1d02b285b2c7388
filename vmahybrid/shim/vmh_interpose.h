/* What the interposers of socket calls share: the socket of an fd, its reference, errno. */
#ifndef VMH_INTERPOSE_H
#define VMH_INTERPOSE_H
#include "vmh_obj.h"
#include "vmh_sock.h"

/* r, or -errno: as a libc function returns it. The one place where errno is set. */
static inline ssize_t as_libc(ssize_t r)
{
	if (vmh_likely(r >= 0))
		return r;
	errno = (int)-r;
	return -1;
}
#define RETURN(r) return (__typeof__(r))as_libc(r)

static inline struct vmh_sock *sock_get(int fd)
{
	struct vmh_obj *o = vmh_fd_get(fd);

	if (vmh_likely(!o))
		return NULL;
	if (vmh_likely(atomic_load_explicit(&o->class_, memory_order_relaxed) == VMH_CLASS_UDP))
		return vmh_sock_of(o);
	vmh_obj_put(o);
	return NULL;
}

static inline void sock_put(struct vmh_sock *s)
{
	vmh_obj_put(&s->obj);
}

static inline void sock_drop(struct vmh_sock **s)
{
	if (*s)
		sock_put(*s);
}

/* The reference is given back on every way out of the function, pthread_cancel's unwinding among them (the shim is
 * compiled with -fexceptions for that). */
#define SOCK_HELD __attribute__((cleanup(sock_drop))) struct vmh_sock *

/* The socket goes home for good, because libc or the kernel is about to do with it what we don't see. */
/* -1 and errno where VMA_EXCEPTION_HANDLING wants the call to fail */
int vmh_kernel_takes(int fd, unsigned reason);

/* Such a call is counted as one of a socket of the kernel's; r as libc has it, errno is kept. No socket of ours: nothing
 * is. */
void vmh_kernel_called(int fd, int flags, bool send, ssize_t r);
void vmh_kernel_called_many(int fd, int flags, bool send, const struct mmsghdr *v, int r);

/* readv(2) and writev(2) on behalf of another call, which is the one that is logged */
ssize_t vmh_readv(int fd, const struct iovec *iov, int n);
ssize_t vmh_writev(int fd, const struct iovec *iov, int n);

/* The kernel has duplicated an fd; to is what it returned. */
void vmh_duplicated(int from, int to);
int pidfd_getfd(int pidfd, int fd, unsigned int flags); /* in glibc since 2.36 */
#endif
