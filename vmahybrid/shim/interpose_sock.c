/* The socket calls that a program makes. Thin: look up the fd, call its class, else libc. */
#include "vmh_control.h"
#include "vmh_interpose.h"
#include "vmh_obj.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include "vmh_main.h"
#include "vmh_params.h"
#include "vmh_trace.h"
#include <pthread.h>

/* A socket that only the kernel serves: the program's own system call, nothing but a count around it. No
 * reference is taken: objects are type-stable, and a count that hits a newer socket's slot harms nobody. */
static inline struct vmh_sock *plain_sock(int fd)
{
	struct vmh_obj *o = vmh_fd_peek(fd, VMH_CLASS_UDP);

	if (!o)
		return NULL;
	return atomic_load_explicit(&vmh_sock_of(o)->plain, memory_order_relaxed) ? vmh_sock_of(o) : NULL;
}

static inline struct vmh_sock *plain_rx(int fd, int flags)
{
	struct vmh_sock *s = plain_sock(fd);

	if (!s || vmh_sock_ready(s)) /* what a ring had delivered is read first */
		return NULL;
	/* one that waits is counted, where the socket may come to a ring meanwhile */
	return VMH_GET(s->home) || flags & MSG_DONTWAIT || atomic_load_explicit(&s->nonblock, memory_order_relaxed) ? s : NULL;
}

/* A TCP socket: its class does the call. */
#define TCP(call) \
	do { \
		TCPS_HELD t = vmh_tcps_get(fd); \
		if (vmh_unlikely(t != NULL)) { \
			pthread_testcancel(); \
			ssize_t tcp_ = (call); \
			RETURN(tcp_); \
		} \
		vmh_stats_look(); /* the kernel's alone, and not counted */ \
	} while (0)

static ssize_t tcp_buffer(struct vmh_tcps *t, int fd, void *buf, size_t len, int flags, bool send)
{
	struct iovec iov = { buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = &vmh_tcps_buffer };

	return send ? vmh_tcps_send(t, fd, &m, flags) : vmh_tcps_recv(t, fd, &m, flags);
}

static ssize_t tcp_vector(struct vmh_tcps *t, int fd, const struct iovec *iov, int n, bool send)
{
	struct msghdr m = { .msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n };

	size_t len = 0;

	for (int i = 0; i < n; i++)
		len |= iov[i].iov_len;
	if (!len)
		return 0;
	return send ? vmh_tcps_send(t, fd, &m, 0) : vmh_tcps_recv(t, fd, &m, 0);
}

static inline ssize_t sent(struct vmh_sock *s, ssize_t r)
{
	struct vmh_sock_stats *st = VMH_GET(s->stats);
	bool alone = vmh_tx_alone(st);

	if (vmh_likely(r >= 0)) {
		VMH_COUNT_BY(alone, st->tx_os_packets, 1);
		VMH_COUNT_BY(alone, st->tx_os_bytes, (uint64_t)r);
		VMH_SET(st->tx_os_reason, VMH_GET(st->reason));
	} else {
		VMH_COUNT_BY(alone, *(errno == EAGAIN ? &st->tx_os_eagain : &st->tx_os_errors), 1);
	}
	vmh_stats_look();
	return r;
}

static inline ssize_t received(struct vmh_sock *s, int flags, ssize_t r)
{
	struct vmh_sock_stats *st = VMH_GET(s->stats);
	bool alone = vmh_rx_alone(st);

	vmh_stats_look();
	if (vmh_likely(r > 0) || (!r && !vmh_sock_at_end(s))) {
		if (vmh_unlikely(flags & (MSG_PEEK | MSG_ERRQUEUE)))
			return r;
		VMH_COUNT_BY(alone, st->rx_os_packets, 1);
		VMH_COUNT_BY(alone, st->rx_os_bytes, (uint64_t)r);
	} else if (r) {
		VMH_COUNT_BY(alone, *(errno == EAGAIN ? &st->rx_os_eagain : &st->rx_os_errors), 1);
	}
	return r;
}

void vmh_kernel_called(int fd, int flags, bool send, ssize_t r)
{
	int saved = errno;
	SOCK_HELD s = sock_get(fd);

	if (!s)
		vmh_tcps_kernel_called(fd, flags, send, r);
	else if (send)
		sent(s, r);
	else
		received(s, flags, r);
	errno = saved;
}

/* sendmmsg(2), recvmmsg(2): a message each, or how the first one failed */
void vmh_kernel_called_many(int fd, int flags, bool send, const struct mmsghdr *v, int r)
{
	if (r < 0)
		vmh_kernel_called(fd, flags, send, r);
	for (int i = 0; i < r; i++)
		vmh_kernel_called(fd, flags, send, v[i].msg_len);
}

/* A call that the kernel refuses at the sight of its arguments, or VMA_EXCEPTION_HANDLING: it fails, nothing moves, and the
 * socket stays where it is. r as libc has it. */
VMH_COLD static ssize_t refused(int fd, int flags, bool send, ssize_t r)
{
	if (r < 0)
		vmh_kernel_called(fd, flags, send, r);
	return r;
}

/* A call that does not wait is the system call itself. libc would only look whether the thread is cancelled, and each
 * function that returns after a system call costs a branch that the processor has guessed wrong: of a server with an event
 * loop 1 % of its rate. */
#define KERNELS(flags, name, nr, ...) \
	({ \
		ssize_t k_; \
		if (vmh_real_is_libc && (((flags) & MSG_DONTWAIT) || vmh_plain_nowait(fd))) { \
			pthread_testcancel(); \
			k_ = as_libc(vmh_sys(nr, __VA_ARGS__)); \
		} else { \
			k_ = vmh_real()->name(__VA_ARGS__); \
		} \
		k_; \
	})
#define PLAIN_TCP(done, flags, ...) \
	do { \
		PLAIN_CALL call_ = vmh_plain_begin(fd); \
		if (call_) { \
			ssize_t r_ = KERNELS(flags, __VA_ARGS__); \
			vmh_tcps_plain_##done(call_, fd, flags, r_); \
			return r_; \
		} \
	} while (0)
#define PLAIN_TX(flags, name, nr, ...) \
	do { \
		/* the kernel does not tell the service of the one, and connects by the other */ \
		if (vmh_likely(!((flags) & (MSG_OOB | MSG_FASTOPEN)))) \
			PLAIN_TCP(sent, flags, name, nr, __VA_ARGS__); /* first: it does not look at the object */ \
		struct vmh_sock *plain_ = plain_sock(fd); \
		if (plain_) \
			return sent(plain_, vmh_real()->name(__VA_ARGS__)); \
	} while (0)
#define PLAIN_RX(flags, name, nr, ...) \
	do { \
		PLAIN_TCP(received, flags, name, nr, __VA_ARGS__); \
		struct vmh_sock *plain_ = plain_rx(fd, flags); \
		if (plain_) \
			return received(plain_, flags, vmh_real()->name(__VA_ARGS__)); \
	} while (0)

VMH_TRACED(socket, (int domain, int type, int protocol), (domain, type, protocol), "%d, %#x, %d", domain, type, protocol)
{
	uint64_t inode;
	int fd = vmh_tcps_spare(domain, type, protocol, &inode);

	if (fd < 0)
		fd = vmh_real()->socket(domain, type, protocol);
	if (fd >= 0) {
		int saved = errno;

		vmh_fd_close(fd); /* closed behind our back, and the number is used again */
		if (vmh_unlikely(atomic_load_explicit(&vmh_filtered, memory_order_relaxed)))
			return fd;
		vmh_started();
		if (domain == AF_INET || domain == AF_INET6)
			vmh_session_open(); /* so that status and explain know of programs without UDP, too */
		vmh_sock_created(fd, domain, type, protocol);
		vmh_tcps_created(fd, domain, type, protocol, inode);
		errno = saved;
	}
	return fd;
}

/* What bind() of a UDP socket has said; its reference ends. */
static int bound(struct vmh_sock *s, int fd, int r, bool port_chosen)
{
	int saved = errno;

	if (!r) {
		VMH_SET(s->port_chosen, port_chosen);
		vmh_sock_bound(s, fd);
	}
	sock_put(s);
	errno = saved;
	return r;
}

VMH_TRACED(bind, (int fd, const struct sockaddr *addr, socklen_t len), (fd, addr, len), "%d, %s", fd,
	   vmh_trace_addr((char[VMH_TRACE_TEXT]){ 0 }, addr, len, r_))
{
	struct vmh_sock *s = sock_get(fd);
	int r;

	if (!s) {
		TCPS_HELD t = vmh_tcps_get(fd);

		r = t ? vmh_tcps_bind(t, addr, len) : VMH_TCPS_KERNELS;
		if (r != VMH_TCPS_KERNELS)
			RETURN(r);
		r = vmh_real()->bind(fd, addr, len);
		if (t && !r)
			vmh_tcps_bound(t, fd);
		return r;
	}
	r = vmh_real()->bind(fd, addr, len);
	return bound(s, fd, r, !r && ((const struct sockaddr_in *)addr)->sin_port);
}

/* libc binds inside. */
VMH_TRACED(bindresvport, (int fd, struct sockaddr_in *name), (fd, name), "%d", fd)
{
	const struct sockaddr_in any = { .sin_family = AF_INET };
	struct vmh_sock *s = sock_get(fd);
	int r, saved;

	if (!s) {
		TCPS_HELD t = vmh_tcps_get(fd);

		r = t ? vmh_tcps_bind(t, (const struct sockaddr *)(name ? name : &any), sizeof(any)) : VMH_TCPS_KERNELS;
		if (r != VMH_TCPS_KERNELS)
			RETURN(r);
		r = vmh_real()->bindresvport(fd, name);
		saved = errno;
		if (t && !r)
			vmh_tcps_bound(t, fd);
		errno = saved;
		return r;
	}
	r = vmh_real()->bindresvport(fd, name);
	return bound(s, fd, r, true);
}

VMH_TRACED(connect, (int fd, const struct sockaddr *addr, socklen_t len), (fd, addr, len), "%d, %s", fd,
	   vmh_trace_addr((char[VMH_TRACE_TEXT]){ 0 }, addr, len, r_))
{
	pthread_testcancel();
	struct vmh_sock *s = sock_get(fd);

	if (!s) {
		TCPS_HELD t = !vmh_bad_ptr(addr) ? vmh_tcps_get(fd) : NULL;
		int r = t ? vmh_tcps_connect(t, fd, addr, len) : VMH_TCPS_KERNELS, saved;

		if (vmh_unlikely(r != VMH_TCPS_KERNELS && r != VMH_TCPS_WAITS_ON))
			RETURN(r);
		bool began = r == VMH_TCPS_WAITS_ON;
		fd = vmh_tcps_fd(t, fd);
		r = vmh_real()->connect(fd, addr, len);
		saved = r && began && errno == EALREADY ? EINPROGRESS : errno;
		vmh_tcps_connected(fd, r ? -saved : 0, addr, len);
		errno = saved;
		return r;
	}
	int r = vmh_sock_connect(s, fd, addr, len);
	sock_put(s);
	RETURN(r);
}

VMH_TRACED(listen, (int fd, int backlog), (fd, backlog), "%d, %d", fd, backlog)
{
	TCPS_HELD t = vmh_tcps_get(fd);

	if (t && vmh_tcps_parked(t))
		RETURN(-EINVAL); /* connected: its kernel socket would not say so */
	int r = vmh_real()->listen(fd, backlog), saved = errno;
	if (t && !r)
		vmh_tcps_listen(t, backlog);
	errno = saved;
	return r;
}

/* The kernel socket of a connection that began on a ring has no names. */
static int name_of(struct vmh_tcps *t, struct sockaddr *a, socklen_t *len, bool peer)
{
	vmh_tcps_await_move(t);
	if (peer && vmh_tcps_state(t) == VMH_TCPS_RING && !VMH_GET(t->phase))
		return -ENOTCONN; /* a parked socket is connected for ever */
	if (!vmh_tcps_is_fresh(t) && !vmh_tcps_has_ended(t))
		return VMH_TCPS_KERNELS;
	return vmh_tcps_name(t, peer, a, len);
}

static int kernels_name(int fd, struct sockaddr *a, socklen_t *len, bool peer)
{
	return peer ? vmh_real()->getpeername(fd, a, len) : vmh_real()->getsockname(fd, a, len);
}

/* 0, or -1 with errno */
static int name(int fd, struct sockaddr *a, socklen_t *len, bool peer)
{
	TCPS_HELD t = vmh_tcps_get(fd);
	int r = t ? name_of(t, a, len, peer) : VMH_TCPS_KERNELS, saved;

	if (vmh_unlikely(r != VMH_TCPS_KERNELS))
		RETURN(r);
	if (!t || vmh_tcps_state(t) == VMH_TCPS_HOME)
		return kernels_name(fd, a, len, peer);
	vmh_lock(&t->obj.lock); /* nobody moves it meanwhile */
	r = kernels_name(fd, a, len, peer);
	saved = errno;
	vmh_unlock(&t->obj.lock);
	errno = saved;
	return r;
}

VMH_TRACED(getsockname, (int fd, struct sockaddr *restrict a, socklen_t *restrict len), (fd, a, len), "%d", fd)
{
	int r = name(fd, a, len, false);

	if (!r && vmh_unlikely(vmh_params.trigger_dummy_send_getsockname)) {
		SOCK_HELD s = sock_get(fd);

		if (s)
			vmh_sock_dummy_send(s, fd);
	}
	return r;
}

VMH_TRACED(getpeername, (int fd, struct sockaddr *restrict a, socklen_t *restrict len), (fd, a, len), "%d", fd)
{
	return name(fd, a, len, true);
}

VMH_TRACED(shutdown, (int fd, int how), (fd, how), "%d, %d", fd, how)
{
	struct vmh_sock *s = sock_get(fd);

	if (!s) {
		TCPS_HELD t = vmh_tcps_get(fd);
		int done = t && (vmh_tcps_is_fresh(t) || vmh_tcps_has_ended(t) || vmh_tcps_seeks(t)) ? vmh_tcps_shutdown(t, fd, how) : VMH_TCPS_KERNELS;

		if (done != VMH_TCPS_KERNELS)
			RETURN(done);
		if (t && (how == SHUT_RD || how == SHUT_RDWR)) {
			vmh_lock(&t->obj.lock);
			vmh_tlisten_shut(t);
			vmh_unlock(&t->obj.lock);
		}
		vmh_tcps_home_fd(fd, VMH_R_SHUTDOWN);
		if (t)
			vmh_tcps_await_service(t);
	}
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

/* VMA's struct becomes what the kernel knows. */
static int set_pacing(int fd, const void *val)
{
	struct vmh_pacing p;
	unsigned long rate;
	struct vmh_sock *s;
	int r;

	memcpy(&p, val, sizeof(p));
	rate = vmh_pacing_rate(&p);
	r = setsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, sizeof(rate));
	s = r ? NULL : sock_get(fd);
	if (s) {
		vmh_sock_set_burst(s, &p);
		sock_put(s);
	}
	return r;
}

static int get_pacing(int fd, void *val)
{
	struct vmh_pacing p = { 0 };
	unsigned long rate = ~0ul;
	socklen_t len = sizeof(rate);
	struct vmh_sock *s;
	int r = getsockopt(fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &len);

	s = r ? NULL : sock_get(fd);
	if (s) {
		p.burst = s->pacing.burst;
		p.typical = s->pacing.typical;
		sock_put(s);
	}
	p.kbps = rate == ~0ul ? 0 : rate / 125 < UINT32_MAX ? (uint32_t)(rate / 125) : UINT32_MAX;
	if (!r)
		memcpy(val, &p, sizeof(p));
	return r;
}

static bool is_pacing(int level, int name, socklen_t len)
{
	return vmh_unlikely(name == SO_MAX_PACING_RATE) && level == SOL_SOCKET && len == sizeof(struct vmh_pacing);
}

VMH_TRACED(setsockopt, (int fd, int level, int name, const void *val, socklen_t len), (fd, level, name, val, len),
	   "%d, %d, %d, %u bytes", fd, level, name, len)
{
	if (is_pacing(level, name, len) && !vmh_bad_ptr(val))
		return set_pacing(fd, val);
	struct vmh_sock *s = sock_get(fd);

	if (!s) {
		TCPS_HELD t = vmh_tcps_get(fd);

		if (vmh_likely(!t || vmh_bad_ptr(val)))
			return vmh_real()->setsockopt(fd, level, name, val, len);
		RETURN(vmh_tcps_setsockopt(t, fd, level, name, val, len));
	}
	int r = vmh_sock_setsockopt(s, fd, level, name, val, len);
	sock_put(s);
	RETURN(r);
}

VMH_TRACED(getsockopt, (int fd, int level, int name, void *restrict val, socklen_t *restrict len),
	   (fd, level, name, val, len), "%d, %d, %d", fd, level, name)
{
	if (vmh_unlikely(name == SO_MAX_PACING_RATE) && !vmh_bad_ptr(val) && !vmh_bad_ptr(len) &&
	    is_pacing(level, name, *len))
		return get_pacing(fd, val);
	TCPS_HELD t = vmh_tcps_get(fd);

	if (vmh_likely(!t || vmh_bad_ptr(val) || vmh_bad_ptr(len)))
		return vmh_real()->getsockopt(fd, level, name, val, len);
	RETURN(vmh_tcps_getsockopt(t, fd, level, name, val, len));
}

/* --- receive --- */

static ssize_t do_recv(struct vmh_sock *s, int fd, void *buf, size_t len, int flags, struct sockaddr *from,
		       socklen_t *fromlen)
{
	struct iovec iov = { buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = from };
	ssize_t r;

	if (from && vmh_unlikely(vmh_bad_ptr(fromlen))) { /* met last, when the datagram is gone */
		m.msg_name = NULL;
		r = vmh_sock_recvmsg(s, fd, &m, flags);
		return r < 0 ? r : vmh_sock_recv_failed(s, -EFAULT);
	}
	if (from) {
		if ((int)*fromlen < 0)
			return vmh_sock_recv_failed(s, -EINVAL);
		m.msg_namelen = *fromlen;
	}
	r = vmh_sock_recvmsg(s, fd, &m, flags);
	if (r >= 0 && from)
		*fromlen = m.msg_namelen;
	return r;
}

VMH_TRACED_DATA(ssize_t, recv, (int fd, void *buf, size_t len, int flags), (fd, buf, len, flags))
{
	PLAIN_RX(flags, recv, SYS_recvfrom, fd, buf, len, flags);
	SOCK_HELD s = sock_get(fd);

	if (!s) {
		TCP(tcp_buffer(t, fd, buf, len, flags, false));
		return vmh_real()->recv(fd, buf, len, flags);
	}
	pthread_testcancel();
	ssize_t r = do_recv(s, fd, buf, len, flags, NULL, NULL);
	RETURN(r);
}

static ssize_t tcp_from(struct vmh_tcps *t, int fd, void *buf, size_t len, int flags, socklen_t *fromlen)
{
	ssize_t r = tcp_buffer(t, fd, buf, len, flags, false);

	if (r < 0)
		return r;
	if (vmh_bad_ptr(fromlen)) /* met last, when the bytes are gone */
		return vmh_tcps_failed(t, false, -EFAULT);
	if ((int)*fromlen < 0)
		return vmh_tcps_failed(t, false, -EINVAL);
	*fromlen = 0; /* as the kernel: a stream names nobody */
	return r;
}

VMH_TRACED_DATA(ssize_t, recvfrom, (int fd, void *restrict buf, size_t len, int flags, struct sockaddr *restrict from,
				    socklen_t *restrict fromlen), (fd, buf, len, flags, from, fromlen))
{
	PLAIN_RX(flags, recvfrom, SYS_recvfrom, fd, buf, len, flags, from, fromlen);
	SOCK_HELD s = sock_get(fd);

	if (!s) {
		if (!from)
			TCP(tcp_buffer(t, fd, buf, len, flags, false));
		else
			TCP(tcp_from(t, fd, buf, len, flags, fromlen));
		return vmh_real()->recvfrom(fd, buf, len, flags, from, fromlen);
	}
	pthread_testcancel();
	ssize_t r = do_recv(s, fd, buf, len, flags, from, fromlen);
	RETURN(r);
}

VMH_TRACED_DATA(ssize_t, recvmsg, (int fd, struct msghdr *m, int flags), (fd, m, flags))
{
	PLAIN_RX(flags, recvmsg, SYS_recvmsg, fd, m, flags);
	SOCK_HELD s = !vmh_bad_ptr(m) ? sock_get(fd) : NULL;

	if (!s) {
		if (vmh_bad_ptr(m))
			return refused(fd, flags, false, vmh_real()->recvmsg(fd, m, flags));
		TCP(vmh_tcps_recv(t, fd, m, flags));
		return vmh_real()->recvmsg(fd, m, flags);
	}
	pthread_testcancel();
	ssize_t r = vmh_sock_recvmsg(s, fd, m, flags);
	RETURN(r);
}

VMH_TRACED_DATA(int, recvmmsg, (int fd, struct mmsghdr *v, unsigned int n, int flags, struct timespec *timeout),
		(fd, v, n, flags, timeout))
{
	bool sound = n && !vmh_bad_ptr(v) && !(timeout && vmh_bad_ptr(timeout)); /* else nothing moves */
	SOCK_HELD s = sound ? sock_get(fd) : NULL;

	if (!s) {
		if (sound && vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL))
			return (int)refused(fd, flags, false, -1);
		int r = vmh_real()->recvmmsg(fd, v, n, flags, timeout);

		vmh_kernel_called_many(fd, flags, false, v, r);
		return r;
	}
	pthread_testcancel();
	int r = vmh_sock_recvmmsg(s, fd, v, n, flags, timeout);
	RETURN(r);
}

VMH_TRACED_DATA(ssize_t, read, (int fd, void *buf, size_t len), (fd, buf, len))
{
	PLAIN_RX(0, read, SYS_read, fd, buf, len);
	SOCK_HELD s = sock_get(fd);

	if (vmh_likely(!s)) {
		TCP((ssize_t)len > 0 ? tcp_buffer(t, fd, buf, len, 0, false) : len ? vmh_tcps_failed(t, false, -EFAULT) : 0);
		return vmh_real()->read(fd, buf, len);
	}
	pthread_testcancel();
	/* read(2) of nothing takes nothing, unlike recv(2) */
	ssize_t r = len ? do_recv(s, fd, buf, len, 0, NULL, NULL) : 0;
	RETURN(r);
}

VMH_TRACED_DATA(ssize_t, readv, (int fd, const struct iovec *iov, int n), (fd, iov, n))
{
	PLAIN_RX(0, readv, SYS_readv, fd, iov, n);
	SOCK_HELD s = n > 0 && n <= 1024 && !vmh_bad_ptr(iov) ? sock_get(fd) : NULL;
	struct msghdr m = { .msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n };
	size_t len = 0;

	if (!s) {
		if (vmh_unlikely(n <= 0 || n > 1024 || vmh_bad_ptr(iov)))
			return refused(fd, 0, false, vmh_real()->readv(fd, iov, n));
		TCP(tcp_vector(t, fd, iov, n, false));
		return vmh_real()->readv(fd, iov, n);
	}
	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	pthread_testcancel();
	ssize_t r = len ? vmh_sock_recvmsg(s, fd, &m, 0) : 0;
	RETURN(r);
}

ssize_t vmh_readv(int fd, const struct iovec *iov, int n)
{
	return readv_call(fd, iov, n);
}

/* --- send --- */

static ssize_t do_send(struct vmh_sock *s, int fd, const void *buf, size_t len, int flags, const struct sockaddr *to,
		       socklen_t tolen)
{
	struct iovec iov = { (void *)buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = (void *)to, .msg_namelen = to ? tolen : 0 };

	/* sendmsg(2) takes some of these lengths of an address, and has another error for a negative one of data */
	if (vmh_unlikely((ssize_t)len < 0 ||
			 (to && (tolen < sizeof(struct sockaddr_in) || tolen > sizeof(struct sockaddr_storage)))))
		return vmh_sock_send_refused(s, vmh_sys(SYS_sendto, fd, buf, len, flags, to, tolen));
	return vmh_sock_sendmsg(s, fd, &m, flags, false);
}

VMH_TRACED_DATA(ssize_t, send, (int fd, const void *buf, size_t len, int flags), (fd, buf, len, flags))
{
	PLAIN_TX(flags, send, SYS_sendto, fd, buf, len, flags);
	SOCK_HELD s = sock_get(fd);

	if (!s) {
		TCP(tcp_buffer(t, fd, (void *)buf, len, flags, true));
		return vmh_real()->send(fd, buf, len, flags);
	}
	pthread_testcancel();
	ssize_t r = do_send(s, fd, buf, len, flags, NULL, 0);
	RETURN(r);
}

/* A connected stream socket takes no address; MSG_FASTOPEN connects it to that one. */
static ssize_t tcp_to(struct vmh_tcps *t, int fd, const void *buf, size_t len, int flags, const struct sockaddr *to,
		      socklen_t tolen)
{
	struct iovec iov = { (void *)buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = (void *)to, .msg_namelen = tolen };

	if (to && tolen > sizeof(struct sockaddr_storage))
		return vmh_tcps_failed(t, true, -EINVAL);
	if (to && tolen && vmh_bad_ptr(to))
		return vmh_tcps_failed(t, true, -EFAULT);
	return to && flags & MSG_FASTOPEN ? vmh_tcps_send(t, fd, &m, flags)
					  : tcp_buffer(t, fd, (void *)buf, len, flags, true);
}

VMH_TRACED_DATA(ssize_t, sendto, (int fd, const void *buf, size_t len, int flags, const struct sockaddr *to,
				  socklen_t tolen), (fd, buf, len, flags, to, tolen))
{
	PLAIN_TX(flags, sendto, SYS_sendto, fd, buf, len, flags, to, tolen);
	SOCK_HELD s = sock_get(fd);

	if (!s) {
		TCP(tcp_to(t, fd, buf, len, flags, to, tolen));
		return vmh_real()->sendto(fd, buf, len, flags, to, tolen);
	}
	pthread_testcancel();
	ssize_t r = do_send(s, fd, buf, len, flags, to, tolen);
	RETURN(r);
}

/* A descriptor that leaves the process by SCM_RIGHTS has two readers from then on. */
static void leaves(int fd)
{
	struct vmh_obj *o = vmh_fd_get(fd);

	if (!o)
		return;
	switch (atomic_load(&o->class_)) {
	case VMH_CLASS_EPOLL: vmh_epoll_nested(o, VMH_R_FD_PASSED); break;
	case VMH_CLASS_TCP:
		vmh_tcps_note_handed(vmh_tcps_of(o));
		vmh_tcps_home(vmh_tcps_of(o), VMH_R_FD_PASSED, false);
		break;
	case VMH_CLASS_UDP: vmh_sock_home(vmh_sock_of(o), VMH_R_FD_PASSED, 0); break;
	}
	vmh_obj_put(o);
}

static void fds_leave(const struct msghdr *m)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR((struct msghdr *)m, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS || c->cmsg_len < CMSG_LEN(0))
			continue;
		for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			leaves(fd);
		}
	}
}

VMH_TRACED_DATA(ssize_t, sendmsg, (int fd, const struct msghdr *m, int flags), (fd, m, flags))
{
	PLAIN_TX(flags, sendmsg, SYS_sendmsg, fd, m, flags);
	SOCK_HELD s = !vmh_bad_ptr(m) ? sock_get(fd) : NULL;

	if (!s) {
		if (vmh_bad_ptr(m))
			return refused(fd, flags, true, vmh_real()->sendmsg(fd, m, flags));
		if (vmh_unlikely(!vmh_bad_ptr(m->msg_control) && m->msg_controllen >= CMSG_LEN(sizeof(int))))
			fds_leave(m);
		TCP(vmh_tcps_send(t, fd, m, flags));
		return vmh_real()->sendmsg(fd, m, flags);
	}
	pthread_testcancel();
	ssize_t r = vmh_sock_sendmsg(s, fd, m, flags, false);
	RETURN(r);
}

VMH_TRACED_DATA(int, sendmmsg, (int fd, struct mmsghdr *v, unsigned int n, int flags), (fd, v, n, flags))
{
	bool sound = n && !vmh_bad_ptr(v); /* else nothing moves */
	SOCK_HELD s = sound ? sock_get(fd) : NULL;
	ssize_t r = 0;
	unsigned done = 0;

	if (!s) {
		for (unsigned i = 0; sound && i < n && i < 1024; i++)
			if (vmh_unlikely(!vmh_bad_ptr(v[i].msg_hdr.msg_control) &&
					 v[i].msg_hdr.msg_controllen >= CMSG_LEN(sizeof(int))))
				fds_leave(&v[i].msg_hdr);
		if (sound && vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL))
			return (int)refused(fd, flags, true, -1);
		r = vmh_real()->sendmmsg(fd, v, n, flags);
		vmh_kernel_called_many(fd, flags, true, v, (int)r);
		return (int)r;
	}
	pthread_testcancel();
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
	if (done)
		return (int)done;
	RETURN((int)r);
}

VMH_TRACED_DATA(ssize_t, write, (int fd, const void *buf, size_t len), (fd, buf, len))
{
	PLAIN_TX(0, write, SYS_write, fd, buf, len);
	SOCK_HELD s = sock_get(fd);

	if (vmh_likely(!s)) {
		TCP((ssize_t)len < 0 ? vmh_tcps_failed(t, true, -EFAULT) : tcp_buffer(t, fd, (void *)buf, len, 0, true));
		return vmh_real()->write(fd, buf, len);
	}
	pthread_testcancel();
	ssize_t r = do_send(s, fd, buf, len, 0, NULL, 0);
	RETURN(r);
}

VMH_TRACED_DATA(ssize_t, writev, (int fd, const struct iovec *iov, int n), (fd, iov, n))
{
	PLAIN_TX(0, writev, SYS_writev, fd, iov, n);
	SOCK_HELD s = n > 0 && n <= 1024 && !vmh_bad_ptr(iov) ? sock_get(fd) : NULL;
	struct msghdr m = { .msg_iov = (struct iovec *)iov, .msg_iovlen = (size_t)n };

	if (!s) {
		if (vmh_unlikely(n <= 0 || n > 1024 || vmh_bad_ptr(iov)))
			return refused(fd, 0, true, vmh_real()->writev(fd, iov, n));
		TCP(tcp_vector(t, fd, iov, n, true));
		return vmh_real()->writev(fd, iov, n);
	}
	size_t len = 0;
	for (int i = 0; i < n; i++)
		len += iov[i].iov_len;
	pthread_testcancel();
	/* writev(2) of nothing sends nothing, unlike write(2) */
	ssize_t r = len ? vmh_sock_sendmsg(s, fd, &m, 0, false) : 0;
	RETURN(r);
}

ssize_t vmh_writev(int fd, const struct iovec *iov, int n)
{
	return writev_call(fd, iov, n);
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
