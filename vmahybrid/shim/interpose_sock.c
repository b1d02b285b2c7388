/* The socket calls that a program makes. Thin: look up the fd, call its class, else libc. */
#include "vmh_control.h"
#include "vmh_obj.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_main.h"
#include <fcntl.h>
#include <stdarg.h>
#include <sys/ioctl.h>

/* The one place where errno is set. */
#define RETURN(r) \
	do { \
		__typeof__(r) r_ = (r); \
		if (vmh_unlikely(r_ < 0)) { \
			errno = (int)-r_; \
			return -1; \
		} \
		return r_; \
	} while (0)

static struct vmh_sock *sock_get(int fd)
{
	struct vmh_obj *o = vmh_fd_get(fd);

	if (vmh_likely(!o))
		return NULL;
	if (vmh_likely(atomic_load_explicit(&o->class_, memory_order_relaxed) == VMH_CLASS_UDP))
		return vmh_sock_of(o);
	vmh_obj_put(o);
	return NULL;
}

static void sock_put(struct vmh_sock *s)
{
	vmh_obj_put(&s->obj);
}

/* A socket that only the kernel serves: the program's own system call, nothing but a count around it. No
 * reference is taken: objects are type-stable, and a count that hits a newer socket's slot harms nobody. */
static inline struct vmh_sock *plain_sock(int fd)
{
	struct vmh_obj *o;

	if (vmh_unlikely((unsigned)fd >= vmh_fdtab_size))
		return NULL;
	o = atomic_load_explicit(&vmh_fdtab[fd], memory_order_acquire);
	if (vmh_likely(!o) || atomic_load_explicit(&o->class_, memory_order_relaxed) != VMH_CLASS_UDP)
		return NULL;
	return atomic_load_explicit(&vmh_sock_of(o)->plain, memory_order_relaxed) ? vmh_sock_of(o) : NULL;
}

static inline struct vmh_sock *plain_rx(int fd)
{
	struct vmh_sock *s = plain_sock(fd);

	return s && !vmh_sock_ready(s) ? s : NULL; /* what a ring had delivered is read first */
}

static inline ssize_t sent(struct vmh_sock *s, ssize_t r)
{
	struct vmh_sock_stats *st = VMH_GET(s->stats);

	if (vmh_likely(r >= 0)) {
		VMH_COUNT(st->tx_os_packets, 1);
		VMH_COUNT(st->tx_os_bytes, (uint64_t)r);
	} else {
		VMH_COUNT(*(errno == EAGAIN ? &st->tx_os_eagain : &st->tx_os_errors), 1);
	}
	return r;
}

static inline ssize_t received(struct vmh_sock *s, ssize_t r)
{
	struct vmh_sock_stats *st = VMH_GET(s->stats);

	if (vmh_likely(r >= 0)) {
		VMH_COUNT(st->rx_os_packets, 1);
		VMH_COUNT(st->rx_os_bytes, (uint64_t)r);
	} else {
		VMH_COUNT(*(errno == EAGAIN ? &st->rx_os_eagain : &st->rx_os_errors), 1);
	}
	return r;
}

#define PLAIN(get, count, call) \
	do { \
		struct vmh_sock *plain_ = get(fd); \
		if (plain_) \
			return count(plain_, vmh_real()->call); \
	} while (0)

VMH_EXPORT int socket(int domain, int type, int protocol)
{
	int fd = vmh_real()->socket(domain, type, protocol);

	if (fd >= 0) {
		int saved = errno;

		vmh_fd_close(fd); /* closed behind our back, and the number is used again */
		vmh_started();
		if (domain == AF_INET || domain == AF_INET6)
			vmh_session_open(); /* so that status and explain know of programs without UDP, too */
		vmh_sock_created(fd, domain, type, protocol);
		errno = saved;
	}
	return fd;
}

VMH_EXPORT int bind(int fd, const struct sockaddr *addr, socklen_t len)
{
	struct vmh_sock *s = sock_get(fd);
	int r = vmh_real()->bind(fd, addr, len);

	if (!s)
		return r;
	int saved = errno;
	if (!r)
		vmh_sock_bound(s, fd);
	sock_put(s);
	errno = saved;
	return r;
}

VMH_EXPORT int connect(int fd, const struct sockaddr *addr, socklen_t len)
{
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return vmh_real()->connect(fd, addr, len);
	int r = vmh_sock_connect(s, fd, addr, len);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT int shutdown(int fd, int how)
{
	struct vmh_sock *s = sock_get(fd);
	int r = vmh_real()->shutdown(fd, how);

	if (!s)
		return r;
	int saved = errno;
	/* Linux shuts an unconnected UDP socket down too, and says ENOTCONN */
	if (!r || saved == ENOTCONN)
		vmh_sock_shutdown(s, how);
	sock_put(s);
	errno = saved;
	return r;
}

VMH_EXPORT int setsockopt(int fd, int level, int name, const void *val, socklen_t len)
{
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return vmh_real()->setsockopt(fd, level, name, val, len);
	int r = vmh_sock_setsockopt(s, fd, level, name, val, len);
	sock_put(s);
	RETURN(r);
}

/* --- receive --- */

static ssize_t do_recv(struct vmh_sock *s, int fd, void *buf, size_t len, int flags, struct sockaddr *from,
		       socklen_t *fromlen)
{
	struct iovec iov = { buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = from };
	ssize_t r;

	if (from && fromlen) {
		if ((int)*fromlen < 0)
			return -EINVAL;
		m.msg_namelen = *fromlen;
	}
	r = vmh_sock_recvmsg(s, fd, &m, flags);
	if (r >= 0 && from && fromlen)
		*fromlen = m.msg_namelen;
	return r;
}

VMH_EXPORT ssize_t recv(int fd, void *buf, size_t len, int flags)
{
	PLAIN(plain_rx, received, recv(fd, buf, len, flags));
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return vmh_real()->recv(fd, buf, len, flags);
	ssize_t r = do_recv(s, fd, buf, len, flags, NULL, NULL);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT ssize_t recvfrom(int fd, void *restrict buf, size_t len, int flags, struct sockaddr *restrict from,
			    socklen_t *restrict fromlen)
{
	PLAIN(plain_rx, received, recvfrom(fd, buf, len, flags, from, fromlen));
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return vmh_real()->recvfrom(fd, buf, len, flags, from, fromlen);
	ssize_t r = do_recv(s, fd, buf, len, flags, from, fromlen);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT ssize_t recvmsg(int fd, struct msghdr *m, int flags)
{
	PLAIN(plain_rx, received, recvmsg(fd, m, flags));
	struct vmh_sock *s = m ? sock_get(fd) : NULL;

	if (!s)
		return vmh_real()->recvmsg(fd, m, flags);
	ssize_t r = vmh_sock_recvmsg(s, fd, m, flags);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT int recvmmsg(int fd, struct mmsghdr *v, unsigned int n, int flags, struct timespec *timeout)
{
	struct vmh_sock *s = v && n ? sock_get(fd) : NULL;

	if (!s)
		return vmh_real()->recvmmsg(fd, v, n, flags, timeout);
	int r = vmh_sock_recvmmsg(s, fd, v, n, flags, timeout);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT ssize_t read(int fd, void *buf, size_t len)
{
	PLAIN(plain_rx, received, read(fd, buf, len));
	struct vmh_sock *s = sock_get(fd);

	if (vmh_likely(!s))
		return vmh_real()->read(fd, buf, len);
	/* read(2) of nothing takes nothing, unlike recv(2) */
	ssize_t r = len ? do_recv(s, fd, buf, len, 0, NULL, NULL) : 0;
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT ssize_t readv(int fd, const struct iovec *iov, int n)
{
	PLAIN(plain_rx, received, readv(fd, iov, n));
	struct vmh_sock *s = n > 0 && n <= 1024 && iov ? sock_get(fd) : NULL;
	struct msghdr m = { .msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n };
	size_t len = 0;

	if (!s)
		return vmh_real()->readv(fd, iov, n);
	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	ssize_t r = len ? vmh_sock_recvmsg(s, fd, &m, 0) : 0;
	sock_put(s);
	RETURN(r);
}

/* --- send --- */

static ssize_t do_send(struct vmh_sock *s, int fd, const void *buf, size_t len, int flags, const struct sockaddr *to,
		       socklen_t tolen)
{
	struct iovec iov = { (void *)buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = (void *)to, .msg_namelen = to ? tolen : 0 };

	return vmh_sock_sendmsg(s, fd, &m, flags, false);
}

VMH_EXPORT ssize_t send(int fd, const void *buf, size_t len, int flags)
{
	PLAIN(plain_sock, sent, send(fd, buf, len, flags));
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return vmh_real()->send(fd, buf, len, flags);
	ssize_t r = do_send(s, fd, buf, len, flags, NULL, 0);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT ssize_t sendto(int fd, const void *buf, size_t len, int flags, const struct sockaddr *to, socklen_t tolen)
{
	PLAIN(plain_sock, sent, sendto(fd, buf, len, flags, to, tolen));
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return vmh_real()->sendto(fd, buf, len, flags, to, tolen);
	ssize_t r = do_send(s, fd, buf, len, flags, to, tolen);
	sock_put(s);
	RETURN(r);
}

/* A descriptor that leaves the process by SCM_RIGHTS has two readers from then on. */
static void fds_leave(const struct msghdr *m)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR((struct msghdr *)m, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(0))
			continue;
		for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			struct vmh_sock *s = sock_get(fd);
			if (s) {
				vmh_sock_home(s, VMH_R_FD_PASSED, 0);
				sock_put(s);
			}
		}
	}
}

VMH_EXPORT ssize_t sendmsg(int fd, const struct msghdr *m, int flags)
{
	PLAIN(plain_sock, sent, sendmsg(fd, m, flags));
	struct vmh_sock *s = m ? sock_get(fd) : NULL;

	if (!s) {
		if (m && vmh_unlikely(m->msg_control && m->msg_controllen >= CMSG_LEN(sizeof(int))))
			fds_leave(m);
		return vmh_real()->sendmsg(fd, m, flags);
	}
	ssize_t r = vmh_sock_sendmsg(s, fd, m, flags, false);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT int sendmmsg(int fd, struct mmsghdr *v, unsigned int n, int flags)
{
	struct vmh_sock *s = v && n ? sock_get(fd) : NULL;
	ssize_t r = 0;
	unsigned done = 0;

	if (!s) {
		for (unsigned i = 0; v && i < n && i < 1024; i++)
			if (vmh_unlikely(v[i].msg_hdr.msg_control && v[i].msg_hdr.msg_controllen >= CMSG_LEN(sizeof(int))))
				fds_leave(&v[i].msg_hdr);
		return vmh_real()->sendmmsg(fd, v, n, flags);
	}
	if (n > 1024)
		n = 1024; /* UIO_MAXIOV, as the kernel */
	for (; done < n; done++) {
		r = vmh_sock_sendmsg(s, fd, &v[done].msg_hdr, flags, done + 1 < n);
		if (r < 0)
			break;
		v[done].msg_len = (unsigned)r;
	}
	if (done > 1 || r < 0)
		vmh_sock_tx_flush(s);
	sock_put(s);
	if (done)
		return (int)done;
	RETURN((int)r);
}

VMH_EXPORT ssize_t write(int fd, const void *buf, size_t len)
{
	PLAIN(plain_sock, sent, write(fd, buf, len));
	struct vmh_sock *s = sock_get(fd);

	if (vmh_likely(!s))
		return vmh_real()->write(fd, buf, len);
	ssize_t r = do_send(s, fd, buf, len, 0, NULL, 0);
	sock_put(s);
	RETURN(r);
}

VMH_EXPORT ssize_t writev(int fd, const struct iovec *iov, int n)
{
	PLAIN(plain_sock, sent, writev(fd, iov, n));
	struct vmh_sock *s = n > 0 && n <= 1024 && iov ? sock_get(fd) : NULL;
	struct msghdr m = { .msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n };

	if (!s)
		return vmh_real()->writev(fd, iov, n);
	size_t len = 0;
	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	/* writev(2) of nothing sends nothing, unlike write(2) */
	ssize_t r = len ? vmh_sock_sendmsg(s, fd, &m, 0, false) : 0;
	sock_put(s);
	RETURN(r);
}

/* --- what only the kernel does with a socket --- */

static void kernel_takes(int fd)
{
	struct vmh_sock *s = sock_get(fd);

	if (!s)
		return;
	vmh_sock_home(s, VMH_R_UNKNOWN_CALL, 0);
	sock_put(s);
}

VMH_EXPORT ssize_t sendfile(int out, int in, off_t *off, size_t n)
{
	kernel_takes(out);
	return vmh_real()->sendfile(out, in, off, n);
}

VMH_EXPORT ssize_t sendfile64(int out, int in, off64_t *off, size_t n)
{
	kernel_takes(out);
	return vmh_real()->sendfile64(out, in, off, n);
}

VMH_EXPORT ssize_t splice(int in, off64_t *inoff, int out, off64_t *outoff, size_t n, unsigned int flags)
{
	kernel_takes(in);
	kernel_takes(out);
	return vmh_real()->splice(in, inoff, out, outoff, n, flags);
}

/* --- fortified entry points: the check is libc's, and so is the abort --- */

VMH_EXPORT ssize_t __read_chk(int fd, void *buf, size_t len, size_t size)
{
	if (vmh_unlikely(len > size))
		return vmh_real()->__read_chk(fd, buf, len, size);
	return read(fd, buf, len);
}

VMH_EXPORT ssize_t __recv_chk(int fd, void *buf, size_t len, size_t size, int flags)
{
	if (vmh_unlikely(len > size))
		return vmh_real()->__recv_chk(fd, buf, len, size, flags);
	return recv(fd, buf, len, flags);
}

VMH_EXPORT ssize_t __recvfrom_chk(int fd, void *restrict buf, size_t len, size_t size, int flags,
				  struct sockaddr *restrict from, socklen_t *restrict fromlen)
{
	if (vmh_unlikely(len > size))
		return vmh_real()->__recvfrom_chk(fd, buf, len, size, flags, from, fromlen);
	return recvfrom(fd, buf, len, flags, from, fromlen);
}

/* --- descriptor flags --- */

static void nonblock_changed(struct vmh_sock *s, bool on)
{
	atomic_store(&s->nonblock, on);
	VMH_SET(s->stats->blocking, !on);
}

static int do_fcntl(int (*real)(int, int, ...), int fd, int cmd, void *arg)
{
	int r = real(fd, cmd, arg);

	if (r < 0)
		return r;
	if (cmd == F_DUPFD || cmd == F_DUPFD_CLOEXEC) {
		vmh_fd_dup(fd, r);
		return r;
	}
	if (cmd == F_SETFL) {
		struct vmh_sock *s = sock_get(fd);

		if (s) {
			nonblock_changed(s, ((long)arg & O_NONBLOCK) != 0);
			sock_put(s);
		}
	}
	return r;
}

VMH_EXPORT int fcntl(int fd, int cmd, ...)
{
	va_list ap;

	va_start(ap, cmd);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	return do_fcntl(vmh_real()->fcntl, fd, cmd, arg);
}

VMH_EXPORT int fcntl64(int fd, int cmd, ...)
{
	va_list ap;

	va_start(ap, cmd);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	return do_fcntl(vmh_real()->fcntl64, fd, cmd, arg);
}

VMH_EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list ap;

	va_start(ap, request);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	struct vmh_sock *s = sock_get(fd);
	if (vmh_likely(!s))
		return vmh_real()->ioctl(fd, request, arg);
	int r;
	if (request == FIONREAD && arg) {
		r = vmh_sock_fionread(s, fd, arg);
		sock_put(s);
		RETURN(r);
	}
	r = vmh_real()->ioctl(fd, request, arg);
	if (!r && request == FIONBIO && arg)
		nonblock_changed(s, *(int *)arg != 0);
	sock_put(s);
	return r;
}
