/* The libc functions under our interposers, resolved once by dlsym(RTLD_NEXT). Calling one before
 * vmh_real_init resolves all (constructors of other libraries may run before ours). */
#ifndef VMH_REAL_H
#define VMH_REAL_H
#include "vmh_base.h"
#include <netinet/in.h>
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/types.h>
#include <sys/uio.h>

/* X(return type, name, parameter types); those that event loops call most are one cache line */
#define VMH_REAL_LIST(X) \
	X(ssize_t, read, (int, void *, size_t)) \
	X(ssize_t, write, (int, const void *, size_t)) \
	X(ssize_t, recv, (int, void *, size_t, int)) \
	X(ssize_t, send, (int, const void *, size_t, int)) \
	X(ssize_t, readv, (int, const struct iovec *, int)) \
	X(ssize_t, writev, (int, const struct iovec *, int)) \
	X(int, epoll_wait, (int, struct epoll_event *, int, int)) \
	X(int, epoll_ctl, (int, int, int, struct epoll_event *)) \
	X(int, socket, (int, int, int)) \
	X(void *, dlopen, (const char *, int)) \
	X(int, close, (int)) \
	X(int, shutdown, (int, int)) \
	X(int, bind, (int, const struct sockaddr *, socklen_t)) \
	X(int, bindresvport, (int, struct sockaddr_in *)) \
	X(int, connect, (int, const struct sockaddr *, socklen_t)) \
	X(int, listen, (int, int)) \
	X(int, accept, (int, struct sockaddr *, socklen_t *)) \
	X(int, accept4, (int, struct sockaddr *, socklen_t *, int)) \
	X(int, getsockname, (int, struct sockaddr *, socklen_t *)) \
	X(int, getpeername, (int, struct sockaddr *, socklen_t *)) \
	X(int, setsockopt, (int, int, int, const void *, socklen_t)) \
	X(int, getsockopt, (int, int, int, void *, socklen_t *)) \
	X(ssize_t, sendto, (int, const void *, size_t, int, const struct sockaddr *, socklen_t)) \
	X(ssize_t, sendmsg, (int, const struct msghdr *, int)) \
	X(int, sendmmsg, (int, struct mmsghdr *, unsigned int, int)) \
	X(ssize_t, recvfrom, (int, void *, size_t, int, struct sockaddr *, socklen_t *)) \
	X(ssize_t, recvmsg, (int, struct msghdr *, int)) \
	X(int, recvmmsg, (int, struct mmsghdr *, unsigned int, int, struct timespec *)) \
	X(ssize_t, sendfile, (int, int, off_t *, size_t)) \
	X(ssize_t, sendfile64, (int, int, off64_t *, size_t)) \
	X(ssize_t, splice, (int, off64_t *, int, off64_t *, size_t, unsigned int)) \
	X(int, dup, (int)) \
	X(int, dup2, (int, int)) \
	X(int, dup3, (int, int, int)) \
	X(int, fcntl, (int, int, ...)) \
	X(int, fcntl64, (int, int, ...)) \
	X(int, ioctl, (int, unsigned long, ...)) \
	X(int, close_range, (unsigned int, unsigned int, int)) \
	X(void, closefrom, (int)) \
	X(int, select, (int, fd_set *, fd_set *, fd_set *, struct timeval *)) \
	X(int, pselect, (int, fd_set *, fd_set *, fd_set *, const struct timespec *, const sigset_t *)) \
	X(int, poll, (struct pollfd *, nfds_t, int)) \
	X(int, ppoll, (struct pollfd *, nfds_t, const struct timespec *, const sigset_t *)) \
	X(int, epoll_create, (int)) \
	X(int, epoll_create1, (int)) \
	X(int, epoll_pwait, (int, struct epoll_event *, int, int, const sigset_t *)) \
	X(int, epoll_pwait2, (int, struct epoll_event *, int, const struct timespec *, const sigset_t *)) \
	X(pid_t, fork, (void)) \
	X(pid_t, _Fork, (void)) \
	X(int, daemon, (int, int)) \
	X(int, sigaction, (int, const struct sigaction *, struct sigaction *)) \
	X(sighandler_t, signal, (int, sighandler_t)) \
	X(ssize_t, __read_chk, (int, void *, size_t, size_t)) \
	X(ssize_t, __recv_chk, (int, void *, size_t, size_t, int)) \
	X(ssize_t, __recvfrom_chk, (int, void *, size_t, size_t, int, struct sockaddr *, socklen_t *)) \
	X(int, __poll_chk, (struct pollfd *, nfds_t, int, size_t)) \
	X(int, __ppoll_chk, (struct pollfd *, nfds_t, const struct timespec *, const sigset_t *, size_t))

struct vmh_real {
#define X(ret, name, args) ret (*name) args;
	VMH_REAL_LIST(X)
#undef X
} __attribute__((aligned(64)));
extern struct vmh_real vmh_real_table;
extern _Atomic int vmh_real_ready;
extern bool vmh_real_is_libc; /* nobody stands between it and us: neither a sanitizer nor another preloaded library */
void vmh_real_init(void);
/* one more libc function, for an interposer that is not in the table: *slot is a function pointer */
void vmh_real_find(void *slot, const char *name);
static inline struct vmh_real *vmh_real(void)
{
	if (vmh_unlikely(!atomic_load_explicit(&vmh_real_ready, memory_order_acquire)))
		vmh_real_init();
	return &vmh_real_table;
}

/* libc's, which may block and then is a cancellation point: bytes, or -errno with the program's errno kept. */
static inline ssize_t vmh_real_recvmsg(int fd, struct msghdr *m, int flags)
{
	int saved = errno;
	ssize_t r = vmh_real()->recvmsg(fd, m, flags);

	if (r < 0) {
		r = -errno;
		errno = saved;
	}
	return r;
}

static inline ssize_t vmh_real_sendmsg(int fd, const struct msghdr *m, int flags)
{
	int saved = errno;
	ssize_t r = vmh_real()->sendmsg(fd, m, flags);

	if (r < 0) {
		r = -errno;
		errno = saved;
	}
	return r;
}
#endif
