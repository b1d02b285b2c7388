/* The session with the service.
 *
 * One SEQPACKET connection, requests in lock step under `lock`; events that arrive in between are put
 * aside and handled by the internal thread (worker.c), which holds no lock then. A service that does not
 * answer in time (vmh_patience.h) is treated as gone. Nothing that it says is taken for granted.
 */
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_lane.h"
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_patience.h"
#include "vmh_sock.h"
#include "vmh_stats.h"
#include "vmh_verbs.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>

#define CONNECT_NS 1000000000ull /* a listener whose backlog is full */
#define RETRY_NS 1000000000ull
#define RECONNECT_NS (VMH_RECONNECT_MS * 1000000ull)
#define MAX_RINGS_REFUSED 32
#define MAX_RINGS_AGAIN 2 /* no QP, then no queue */
#define MAX_FDS 17

static struct vmh_lock lock;
static int sock_fd = -1;
static uint32_t seq;
static _Atomic uint32_t session;       /* 0: none */
static uint32_t sessions_opened;
static _Atomic uint32_t why_none = VMH_R_NOT_TRIED;
static _Atomic uint64_t next_try_ns;
static bool opened_late;               /* the program had been told that there is no service */
static _Atomic int settling;           /* a session after a loss: the worker brings the sockets to it */
static uint64_t mute_until;            /* a service that did not answer is left alone until then */
static _Atomic int ask_again;          /* ... and the worker looks what it missed */
static int told;                       /* the one line about why there is no session was logged */

static struct {
	unsigned ifindex, lane, reason;
	uint64_t until_ns;
} refused[MAX_RINGS_REFUSED];

static void header(struct vmh_msg_hdr *h, unsigned type, size_t len)
{
	*h = (struct vmh_msg_hdr){ .magic = VMH_CTL_MAGIC, .version = VMH_CTL_VERSION, .type = (unsigned short)type,
				   .len = (unsigned)len, .seq = ++seq };
}

static int send_fds(const void *msg, size_t len, const int *fds, int n)
{
	_Alignas(struct cmsghdr) char cbuf[CMSG_SPACE(VMH_TCP_SHOW_MAX * sizeof(int))] = { 0 };
	size_t bytes = (size_t)n * sizeof(int);
	struct iovec iov = { (void *)msg, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };

	if (n) {
		m.msg_control = cbuf;
		m.msg_controllen = CMSG_SPACE(bytes);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(bytes);
		memcpy(CMSG_DATA(c), fds, bytes);
	}
	long r = vmh_sys(SYS_sendmsg, sock_fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);
	return r < 0 ? (int)r : 0;
}

static int send_msg(const void *msg, size_t len)
{
	return send_fds(msg, len, NULL, 0);
}

static void close_fds(int *fds, int n)
{
	for (int i = 0; i < n; i++)
		vmh_sys(SYS_close, fds[i]);
}

static void take_fds(struct msghdr *m, int *fds, int *nfds)
{
	*nfds = 0;
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		if (c->cmsg_level != SOL_SOCKET || c->cmsg_type != SCM_RIGHTS)
			continue;
		/* alignment leaves room for one more than was asked for */
		for (size_t i = 0; i < (c->cmsg_len - CMSG_LEN(0)) / sizeof(int); i++) {
			int fd;

			memcpy(&fd, CMSG_DATA(c) + i * sizeof(fd), sizeof(fd));
			if (*nfds < MAX_FDS)
				fds[(*nfds)++] = fd;
			else
				vmh_sys(SYS_close, fd);
		}
	}
}

/* One message; fds are close-on-exec. Bytes, 0 at the end of the connection, or -errno. */
static long recv_msg(void *buf, size_t len, int *fds, int *nfds)
{
	_Alignas(struct cmsghdr) char cbuf[CMSG_SPACE(sizeof(int) * MAX_FDS)];
	struct iovec iov = { buf, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = sizeof(cbuf) };
	long r = vmh_sys(SYS_recvmsg, sock_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	const struct vmh_msg_hdr *h = buf;

	*nfds = 0;
	if (r < 0)
		return r;
	take_fds(&m, fds, nfds); /* an empty message can carry some, too */
	if (r > 0 && (size_t)r >= sizeof(*h) && h->magic == VMH_CTL_MAGIC && h->len == (unsigned)r)
		return r;
	close_fds(fds, *nfds);
	*nfds = 0;
	return r ? -EPROTO : 0;
}

/* The worker looks more often than a call of the program does: connect() to nobody costs it microseconds. */
static uint64_t next_try(unsigned reason)
{
	bool soon = atomic_load(&vmh_worker_runs) && (reason == VMH_R_NO_SERVICE || reason == VMH_R_SERVICE_GONE ||
						      reason == VMH_R_SERVICE_STOP);

	return vmh_now_ns() + vmh_patience_retry_ns(soon ? RECONNECT_NS : RETRY_NS);
}

/* lock held. The connection is over; the worker takes the sockets home. */
static void lose(unsigned reason)
{
	if (sock_fd >= 0)
		vmh_fd_hidden_close(sock_fd);
	sock_fd = -1;
	atomic_store(&session, 0);
	atomic_store(&settling, 0);
	atomic_store(&why_none, reason);
	atomic_store(&next_try_ns, next_try(reason));
	VMH_SET(vmh_stats->state, 0);
	VMH_SET(vmh_stats->reason, reason);
	vmh_worker_lost(); /* takes the sockets home, after a last look at the rings */
}

/* lock held. A service that hangs: what it has granted goes on, and it is asked for nothing more until later. */
static void mute(void)
{
	mute_until = vmh_now_ns() + vmh_patience_retry_ns(RETRY_NS);
	atomic_store(&ask_again, 1);
	vmh_warn("the service does not answer: what is on rings stays there, the kernel serves what is new");
}

static bool on_event(const void *msg, size_t len)
{
	const struct vmh_msg_event *ev = msg;

	if (ev->hdr.type != VMH_MSG_EVENT)
		return false;
	if (len >= sizeof(*ev))
		vmh_worker_event(ev);
	return true;
}

union message {
	struct vmh_msg_hdr h;
	char bytes[VMH_MSG_MAX];
};

/* lock held. An answer that came too late: what it grants is given back, nobody here knows of it. */
static void decline(const union message *late, size_t len)
{
	union {
		struct vmh_msg_detach detach;
		struct vmh_msg_release release;
	} no = { 0 };

	if (late->h.status)
		return;
	if (late->h.type == (VMH_MSG_ATTACH | VMH_MSG_REPLY) && len >= sizeof(struct vmh_msg_attach_reply)) {
		header(&no.detach.hdr, VMH_MSG_DETACH, sizeof(no.detach));
		no.detach.flow_id = ((const struct vmh_msg_attach_reply *)late)->flow_id;
	} else if (late->h.type == (VMH_MSG_RING | VMH_MSG_REPLY) && len >= sizeof(struct vmh_msg_ring_reply)) {
		header(&no.release.hdr, VMH_MSG_RELEASE, sizeof(no.release));
		no.release.ring_id = ((const struct vmh_msg_ring_reply *)late)->ring_id;
	} else {
		return;
	}
	send_msg(&no, no.detach.hdr.len);
}

/* lock held. The reply to req, of whatever length; bytes, or -errno. */
static long await_reply(const struct vmh_msg_hdr *req, union message *buf, uint64_t deadline, int *fds, int *nfds)
{
	for (;;) {
		long r = recv_msg(buf, sizeof(*buf), fds, nfds);
		uint64_t now;

		if (r == 0)
			return -ECONNRESET;
		if (r < 0 && r != -EAGAIN && r != -EINTR)
			return r;
		if (r > 0) {
			bool event = on_event(buf, (size_t)r);

			if (!event && buf->h.seq == req->seq)
				return r;
			if (!event)
				decline(buf, (size_t)r);
			close_fds(fds, *nfds); /* an event, or the reply to something we no longer wait for */
			*nfds = 0;
		}
		/* looked at each time: a service that chatters has not answered either */
		now = vmh_now_ns();
		if (now >= deadline)
			return -ETIMEDOUT;
		if (r == -EAGAIN) {
			struct pollfd p = { .fd = sock_fd, .events = POLLIN };
			struct timespec ts = { (time_t)((deadline - now) / 1000000000), (long)((deadline - now) % 1000000000) };

			vmh_sys(SYS_ppoll, &p, 1, &ts, NULL, 0);
		}
	}
}

/* lock held. To a service that hangs: what it has to know when it comes to itself, and nothing else. */
static int tell_muted(const struct vmh_msg_hdr *req, struct vmh_msg_hdr *reply)
{
	reply->reason = VMH_R_NO_ANSWER;
	if ((req->type == VMH_MSG_DETACH || req->type == VMH_MSG_RELEASE || req->type == VMH_MSG_TCP_HIDE) &&
	    send_msg(req, req->len) < 0)
		lose(VMH_R_SERVICE_GONE);
	return -ETIMEDOUT;
}

/* lock held. Reply of at least reply_len bytes into reply, all zero but a reason where there is none; its fds belong
 * to the caller on success. */
static int rpc_fds(struct vmh_msg_hdr *req, const int *out, int nout, void *reply, size_t reply_len, int *fds, int *nfds)
{
	bool internal = vmh_worker_is_me();
	uint64_t start = vmh_now_ns(), deadline = start + vmh_patience_ns(start, internal);
	union message buf;
	int got[MAX_FDS], ngot = 0;
	long r;

	memset(reply, 0, reply_len);
	if (sock_fd >= 0 && atomic_load(&session) && vmh_unlikely(start < mute_until))
		return tell_muted(req, reply);
	r = sock_fd < 0 ? -ENOTCONN : send_fds(req, req->len, out, nout);
	if (r == 0) {
		r = await_reply(req, &buf, deadline, got, &ngot);
		vmh_patience_spent(start, vmh_now_ns(), r == -ETIMEDOUT, internal);
	}
	if (r > 0 && (buf.h.type != (req->type | VMH_MSG_REPLY) || (!buf.h.status && (size_t)r < reply_len)))
		r = -EPROTO;
	if (r < 0 || buf.h.status || !fds) {
		close_fds(got, ngot);
		ngot = 0;
	}
	if (r == -ETIMEDOUT && atomic_load(&session)) {
		mute();
		((struct vmh_msg_hdr *)reply)->reason = VMH_R_NO_ANSWER;
	} else if (r < 0 && sock_fd >= 0) {
		vmh_warn("the service does not answer (%s): the kernel serves this program", strerror((int)-r));
		lose(r == -EPROTO ? VMH_R_PROTOCOL : VMH_R_SERVICE_GONE);
	}
	if (r < 0)
		return (int)r;
	memcpy(reply, &buf, (size_t)r < reply_len ? (size_t)r : reply_len);
	if (fds) {
		memcpy(fds, got, (size_t)ngot * sizeof(int));
		*nfds = ngot;
	}
	return buf.h.status;
}

static int rpc(struct vmh_msg_hdr *req, int fd, void *reply, size_t reply_len, int *fds, int *nfds)
{
	return rpc_fds(req, &fd, fd >= 0, reply, reply_len, fds, nfds);
}

static unsigned connect_reason(int err)
{
	switch (err) {
	case -EACCES:
	case -EPERM:
		return VMH_R_NO_PERMISSION;
	default:
		return VMH_R_NO_SERVICE;
	}
}

static void fill_text(char *dst, size_t n, const char *src)
{
	size_t len = strnlen(src, n - 1);

	memcpy(dst, src, len);
	dst[len] = 0;
}

static int connect_service(void)
{
	struct sockaddr_un a = { .sun_family = AF_UNIX };
	int fd = (int)vmh_sys(SYS_socket, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return fd;
	fill_text(a.sun_path, sizeof(a.sun_path), vmh_params.hybrid_socket);
	/* a listener whose backlog is full must not hold the program up */
	bool internal = vmh_worker_is_me();
	uint64_t start = vmh_now_ns(), may = vmh_patience_ns(start, internal);
	struct timeval tv = { (time_t)(may / 1000000000), (suseconds_t)(may % 1000000000 / 1000) };
	if (may > CONNECT_NS)
		tv = (struct timeval){ .tv_sec = 1 };
	vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
	long r = vmh_sys(SYS_connect, fd, &a, sizeof(a));
	vmh_patience_spent(start, vmh_now_ns(), r == -EAGAIN, internal);
	if (r < 0) {
		vmh_sys(SYS_close, fd);
		return (int)r;
	}
	return vmh_fd_hide(fd);
}

static void read_proc(const char *path, char *buf, size_t n)
{
	int fd = (int)vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	long r = fd < 0 ? 0 : vmh_sys(SYS_read, fd, buf, n - 1);

	if (fd >= 0)
		vmh_sys(SYS_close, fd);
	if (r < 0)
		r = 0;
	for (long i = 0; i < r; i++)
		if (!buf[i] || buf[i] == '\n')
			buf[i] = ' ';
	while (r > 0 && buf[r - 1] == ' ')
		r--;
	buf[r] = 0;
}

static unsigned hello(void)
{
	struct vmh_msg_hello req = { 0 };
	struct vmh_msg_hello_reply rep;
	int fds[MAX_FDS], nfds = 0;

	header(&req.hdr, VMH_MSG_HELLO, sizeof(req));
	req.pid = (unsigned)getpid();
	read_proc("/proc/self/comm", req.comm, sizeof(req.comm));
	read_proc("/proc/self/cmdline", req.cmdline, sizeof(req.cmdline));
	fill_text(req.profile, sizeof(req.profile),
		  vmh_params.hybrid_profile[0] ? vmh_params.hybrid_profile : vmh_params.spec);
	fill_text(req.app_id, sizeof(req.app_id), vmh_params.application_id);
	vmh_stats_show();
	int err = rpc(&req.hdr, vmh_stats_fd(), &rep, sizeof(rep), fds, &nfds);
	if (err)
		return rep.hdr.reason ? rep.hdr.reason : VMH_R_NO_SERVICE;
	if (nfds != 1) {
		close_fds(fds, nfds);
		return VMH_R_PROTOCOL;
	}
	err = vmh_net_map(fds[0], rep.net_page_size); /* takes the fd over */
	if (err)
		return VMH_R_VERSION;
	VMH_SET(vmh_stats->session, rep.session);
	return 0;
}

static unsigned open_locked(void)
{
	unsigned reason;
	int fd;

	if (atomic_load(&session))
		return 0;
	if (!vmh_params.offloaded_sockets) {
		atomic_store(&next_try_ns, UINT64_MAX);
		reason = VMH_R_DISABLED;
		goto none;
	}
	if (vmh_now_ns() < atomic_load(&next_try_ns))
		return atomic_load(&why_none);
	fd = connect_service();
	if (fd < 0) {
		reason = connect_reason(fd);
		goto none;
	}
	sock_fd = fd;
	mute_until = 0;
	memset(refused, 0, sizeof(refused));
	reason = hello();
	if (reason) {
		if (sock_fd >= 0)
			lose(reason);
		goto none;
	}
	atomic_store(&why_none, VMH_R_NONE);
	atomic_store(&settling, atomic_load(&vmh_worker_runs));
	atomic_store(&session, ++sessions_opened);
	VMH_SET(vmh_stats->reason, VMH_R_NONE);
	VMH_SET(vmh_stats->state, 1);
	vmh_debug("session with the service on %s", vmh_params.hybrid_socket);
	vmh_warn_arp_flux();
	opened_late = told;
	if (atomic_load(&vmh_worker_runs))
		vmh_worker_start(fd, opened_late);
	return 0;
none:
	atomic_store(&why_none, reason);
	if (atomic_load(&next_try_ns) != UINT64_MAX)
		atomic_store(&next_try_ns, next_try(reason));
	VMH_SET(vmh_stats->reason, reason);
	if (!told)
		vmh_info("not offloading, the kernel serves this program: %s (%s)", vmh_reason_text(reason),
			 vmh_params.hybrid_socket);
	told = 1;
	return reason;
}

unsigned vmh_session_open(void)
{
	unsigned r;

	if (vmh_likely(atomic_load_explicit(&session, memory_order_acquire) &&
		       !atomic_load_explicit(&settling, memory_order_relaxed)))
		return 0;
	/* A service that starts may take a while for the rings of many programs. The calls of this one do
	 * not wait for it: where there is a worker, it reconnects, and brings every socket to the rings. */
	if (atomic_load(&vmh_worker_runs) && !vmh_worker_is_me()) {
		r = atomic_load(&why_none);
		return r ? r : VMH_R_SERVICE_GONE;
	}
	if (vmh_now_ns() < atomic_load(&next_try_ns) && !atomic_load(&session))
		return atomic_load(&why_none);
	vmh_lock(&lock);
	r = open_locked();
	vmh_unlock(&lock);
	if (vmh_unlikely(r) && r != VMH_R_DISABLED && !sessions_opened)
		vmh_exception_start(r);
	return r;
}

/* For the worker: is it time to ask for what a service that hung did not grant? */
bool vmh_session_ask_again(void)
{
	bool due;

	if (vmh_likely(!atomic_load_explicit(&ask_again, memory_order_relaxed)))
		return false;
	vmh_lock(&lock);
	due = vmh_now_ns() >= mute_until;
	if (due)
		atomic_store(&ask_again, 0);
	vmh_unlock(&lock);
	return due;
}

bool vmh_session_muted(void)
{
	return atomic_load_explicit(&ask_again, memory_order_relaxed);
}

/* The worker has brought the sockets to the new session. */
void vmh_session_settled(void)
{
	atomic_store(&settling, 0);
}

void vmh_session_serve(void)
{
	if (vmh_likely(atomic_load_explicit(&vmh_worker_runs, memory_order_relaxed)))
		return;
	vmh_lock(&lock);
	if (sock_fd >= 0)
		vmh_worker_start(sock_fd, opened_late);
	vmh_unlock(&lock);
}

uint32_t vmh_session_id(void)
{
	return atomic_load_explicit(&session, memory_order_acquire);
}

unsigned vmh_session_reason(void)
{
	return atomic_load(&why_none);
}

static const char *kind_name(unsigned kind)
{
	return kind == VMH_RING_DIRECT ? "direct" : kind == VMH_RING_VETH ? "ring veth" : "raw packet QP";
}

static void give_back(unsigned ring_id)
{
	struct vmh_msg_release rel = { .ring_id = ring_id };
	struct vmh_msg_hdr ack;

	header(&rel.hdr, VMH_MSG_RELEASE, sizeof(rel));
	rpc(&rel.hdr, -1, &ack, sizeof(ack), NULL, NULL);
}

/* lock held. The second step where a bound XSK can't be mapped (before linux 6.4). */
static int have_bound(struct vmh_msg_ring_reply *grant)
{
	struct vmh_msg_ring_mapped req = { .ring_id = grant->ring_id };
	struct vmh_msg_ring_mapped_reply rep;
	int err;

	header(&req.hdr, VMH_MSG_RING_MAPPED, sizeof(req));
	err = rpc(&req.hdr, -1, &rep, sizeof(rep), NULL, NULL);
	grant->hdr.status = rep.hdr.status;
	grant->hdr.reason = rep.hdr.reason;
	grant->flags = rep.flags & ~(unsigned)VMH_RING_F_BIND_AFTER;
	return err;
}

static int take_ring(struct vmh_msg_ring_reply *rep, const char *name, int *fds, int nfds, struct vmh_ring **out)
{
	int err;

	/* the program may close all fds it does not know; the first one, the memory, is closed at once */
	for (int i = 1; i < nfds; i++)
		fds[i] = vmh_fd_hide(fds[i]);
	err = vmh_ring_xdp_open(rep, name, fds, nfds, (uint32_t)vmh_params.rx_wre, have_bound, out);
	for (int i = 0; err && i < nfds; i++)
		vmh_fd_hidden_close(fds[i]);
	return err;
}

/* One request; dev: the device that it offers, taken over. again: the next one may get another kind of ring. */
static unsigned ask_once(struct vmh_msg_ring *req, struct verbs_dev *dev, const char *name, struct vmh_ring **out,
			 bool *again)
{
	struct vmh_msg_ring_reply rep;
	int fds[MAX_FDS], nfds = 0, err;

	req->verbs = dev ? VMH_VERBS_USABLE : VMH_VERBS_NONE;
	header(&req->hdr, VMH_MSG_RING, sizeof(*req));
	err = rpc(&req->hdr, -1, &rep, sizeof(rep), fds, &nfds);
	if (err) {
		vmh_verbs_dev_close(dev);
		return rep.hdr.reason ? rep.hdr.reason : VMH_R_RING_FAILED;
	}
	rep.lane = req->lane;
	if (rep.kind == VMH_RING_VERBS) {
		close_fds(fds, nfds);
		err = dev ? vmh_ring_verbs_open(&rep, name, dev, out) : -EPROTO; /* none was offered */
	} else {
		vmh_verbs_dev_close(dev);
		err = take_ring(&rep, name, fds, nfds, out);
	}
	if (err) {
		*again = rep.kind == VMH_RING_VERBS ? dev != NULL : rep.hdr.status == -EBUSY;
		vmh_warn("the ring on %s could not be %s: %s", name,
			 rep.kind == VMH_RING_VERBS ? "made" : rep.hdr.status ? "bound" : "mapped", strerror(-err));
		give_back(rep.ring_id);
		return rep.kind == VMH_RING_VERBS ? VMH_R_VERBS_FAILED
		       : rep.hdr.reason		  ? rep.hdr.reason
						  : VMH_R_RING_FAILED;
	}
	vmh_debug("ring %u on %s, lane %u: %s, %s%s", rep.ring_id, name, rep.lane, kind_name(rep.kind),
		  rep.kind == VMH_RING_VERBS ? req->verbs_device
		  : rep.xdp_mode == VMH_XDP_NATIVE ? "native XDP" : "generic XDP",
		  rep.flags & VMH_RING_F_ZEROCOPY ? ", zero-copy" : "");
	if (vmh_params.mtu && vmh_params.mtu != (*out)->mtu)
		vmh_warn("Mismatch between interface %s MTU=%u and VMA_MTU=%lld. Make sure VMA_MTU and all offloaded "
			 "interfaces MTUs match.", name, (*out)->mtu, (long long)vmh_params.mtu);
	if (rep.kind == VMH_RING_VERBS)
		vmh_params_no_effect(VMH_PARAM_ON_VERBS, "verbs");
	else
		vmh_params_no_effect(VMH_PARAM_ON_XDP, "xdp");
	return 0;
}

static unsigned ask_ring(unsigned ifindex, unsigned lane, struct vmh_ring **out)
{
	struct vmh_msg_ring req = { .ifindex = ifindex, .lane = lane };
	char name[16] = "";
	struct verbs_dev *dev;
	unsigned reason;
	bool again = false;

	vmh_net_link_name(ifindex, name);
	dev = vmh_verbs_probe(ifindex, name, req.verbs_device, &req.verbs_reason);
	reason = ask_once(&req, dev, name, out, &again);
	for (int i = 0; again && sock_fd >= 0 && i < MAX_RINGS_AGAIN; i++) {
		again = false;
		if (reason == VMH_R_VERBS_FAILED)
			req.verbs_reason = VMH_R_VERBS_FAILED; /* the next rung */
		reason = ask_once(&req, NULL, name, out, &again);
	}
	return reason;
}

/* lock held. The ring of this very lane, or NULL and *reason. */
static struct vmh_ring *new_ring(unsigned ifindex, unsigned lane, unsigned *reason)
{
	uint64_t now = vmh_now_ns();
	struct vmh_ring *r = NULL;
	int slot = 0;

	for (int i = 0; i < MAX_RINGS_REFUSED; i++) {
		if (refused[i].ifindex == ifindex && refused[i].lane == lane && refused[i].until_ns > now) {
			*reason = refused[i].reason;
			return NULL;
		}
		if (refused[i].until_ns < refused[slot].until_ns)
			slot = i;
	}
	*reason = atomic_load(&session) ? ask_ring(ifindex, lane, &r) : atomic_load(&why_none);
	if (!*reason)
		return r;
	refused[slot].ifindex = ifindex;
	refused[slot].lane = lane;
	refused[slot].reason = *reason;
	refused[slot].until_ns = now + RETRY_NS;
	return NULL;
}

struct vmh_ring *vmh_session_ring(unsigned ifindex, unsigned lane, unsigned *reason)
{
	struct vmh_ring *r = vmh_lane_ring(ifindex, lane), *other;

	*reason = 0;
	if (vmh_likely(r && r->lane == lane))
		return r;
	vmh_lock(&lock);
	other = vmh_lane_ring(ifindex, lane);
	r = other && other->lane == lane ? other : new_ring(ifindex, lane, reason);
	if (!r && other && atomic_load(&session)) {
		vmh_lane_refused(other->ifname, *reason);
		r = other;
		*reason = 0;
	}
	vmh_unlock(&lock);
	return r;
}

int vmh_session_attach(const struct vmh_msg_attach *want, int fd, uint32_t *flow_id, unsigned *reason)
{
	struct vmh_msg_attach req = *want;
	struct vmh_msg_attach_reply rep = { 0 };
	int err;

	vmh_lock(&lock);
	header(&req.hdr, VMH_MSG_ATTACH, sizeof(req));
	err = rpc(&req.hdr, fd, &rep, sizeof(rep), NULL, NULL);
	vmh_unlock(&lock);
	*flow_id = rep.flow_id;
	*reason = err ? (rep.hdr.reason ? rep.hdr.reason : atomic_load(&why_none)) : 0;
	if (err && !*reason)
		*reason = VMH_R_PROTOCOL;
	return err;
}

void vmh_session_detach(uint32_t flow_id, unsigned cause)
{
	struct vmh_msg_detach req = { .flow_id = flow_id, .cause = cause };
	struct vmh_msg_hdr ack;

	vmh_verbs_detach(flow_id);
	vmh_lock(&lock);
	if (sock_fd >= 0) {
		header(&req.hdr, VMH_MSG_DETACH, sizeof(req));
		rpc(&req.hdr, -1, &ack, sizeof(ack), NULL, NULL);
	}
	vmh_unlock(&lock);
}

/* Fire and forget: the reply (up to a second later) is dropped by whoever reads it. The kernel path
 * carries the datagrams meanwhile, and the page's generation tells when the neighbour is there. */
int vmh_session_neigh(unsigned ifindex, in_addr_t addr)
{
	const struct vmh_ip ip = vmh_ip4(addr);

	return vmh_session_neigh_of(ifindex, &ip);
}

int vmh_session_neigh_of(unsigned ifindex, const struct vmh_ip *addr)
{
	struct vmh_msg_neigh req = { .ifindex = ifindex, .family = vmh_ip_is4(addr) ? 4 : 6 };
	int err = -ENOTCONN;

	memcpy(req.addr, addr->b, sizeof(req.addr));
	vmh_lock(&lock);
	if (sock_fd >= 0) {
		header(&req.hdr, VMH_MSG_NEIGH, sizeof(req));
		err = send_msg(&req, sizeof(req));
	}
	vmh_unlock(&lock);
	return err;
}

int vmh_session_reinject(struct vmh_msg_reinject *req, int fd)
{
	struct vmh_msg_hdr ack;
	int err;

	vmh_lock(&lock);
	header(&req->hdr, VMH_MSG_REINJECT, offsetof(struct vmh_msg_reinject, data) + req->len);
	err = rpc(&req->hdr, fd, &ack, sizeof(ack), NULL, NULL);
	vmh_unlock(&lock);
	return err;
}

int vmh_session_tcp_take(int fd, uint32_t flow_id, int *state, unsigned *reason)
{
	struct vmh_msg_tcp_take req = { .flow_id = flow_id };
	struct vmh_msg_tcp_take_reply rep;
	int fds[MAX_FDS], nfds = 0, err;

	vmh_lock(&lock);
	header(&req.hdr, VMH_MSG_TCP_TAKE, sizeof(req));
	err = rpc(&req.hdr, fd, &rep, sizeof(rep), fds, &nfds);
	vmh_unlock(&lock);
	*reason = err && rep.hdr.reason ? rep.hdr.reason : VMH_R_TCP_STATE;
	if (!err && nfds != 1) {
		close_fds(fds, nfds);
		return -EPROTO;
	}
	if (!err)
		*state = fds[0];
	return err;
}

int vmh_session_tcp_home(int fd, int state, uint32_t flow_id, unsigned ifindex)
{
	struct vmh_msg_tcp_home req = { .flow_id = flow_id, .ifindex = ifindex };
	const int out[2] = { fd, state };
	struct vmh_msg_hdr ack;
	int err;

	vmh_lock(&lock);
	header(&req.hdr, VMH_MSG_TCP_HOME, sizeof(req));
	err = rpc_fds(&req.hdr, out, state < 0 ? 1 : 2, &ack, sizeof(ack), NULL, NULL);
	if (err && (sock_fd < 0 || err == -ETIMEDOUT))
		err = -ENOTCONN;
	vmh_unlock(&lock);
	return err;
}

int vmh_session_tcp_show(struct vmh_msg_tcp_show *req, const int *fds, struct vmh_msg_tcp_show_reply *rep)
{
	int err;

	vmh_lock(&lock);
	header(&req->hdr, VMH_MSG_TCP_SHOW, sizeof(*req));
	err = rpc_fds(&req->hdr, fds, (int)req->n, rep, sizeof(*rep), NULL, NULL);
	vmh_unlock(&lock);
	return err;
}

void vmh_session_tcp_hide(struct vmh_msg_tcp_hide *req)
{
	struct vmh_msg_hdr ack;

	vmh_lock(&lock);
	if (sock_fd >= 0) {
		header(&req->hdr, VMH_MSG_TCP_HIDE, sizeof(*req));
		rpc(&req->hdr, -1, &ack, sizeof(ack), NULL, NULL);
	}
	vmh_unlock(&lock);
}

void vmh_session_release(unsigned ring_id)
{
	struct vmh_msg_release req = { .ring_id = ring_id };
	struct vmh_msg_hdr ack;

	vmh_lock(&lock);
	if (sock_fd >= 0) {
		header(&req.hdr, VMH_MSG_RELEASE, sizeof(req));
		rpc(&req.hdr, -1, &ack, sizeof(ack), NULL, NULL);
	}
	vmh_unlock(&lock);
}

/* For the worker: something is readable. Takes what is there. */
void vmh_session_read(void)
{
	union message buf;
	int fds[MAX_FDS], nfds;

	vmh_lock(&lock);
	while (sock_fd >= 0) {
		long r = recv_msg(&buf, sizeof(buf), fds, &nfds);

		if (r == -EINTR)
			continue;
		if (r == -EAGAIN)
			break;
		if (r <= 0) {
			vmh_info("the service is gone: the kernel serves this program until it is back");
			lose(VMH_R_SERVICE_GONE);
			break;
		}
		if (!on_event(&buf, (size_t)r))
			decline(&buf, (size_t)r);
		close_fds(fds, nfds);
	}
	vmh_unlock(&lock);
}

/* The service said goodbye: no call uses the session from here on. The connection stays until the worker has
 * taken everything home, because the service takes the rings away when it ends. */
void vmh_session_bye(void)
{
	vmh_lock(&lock);
	if (sock_fd >= 0) {
		atomic_store(&why_none, VMH_R_SERVICE_STOP);
		atomic_store(&session, 0);
	}
	vmh_unlock(&lock);
}

void vmh_session_end(unsigned reason)
{
	vmh_lock(&lock);
	if (sock_fd >= 0)
		lose(reason);
	vmh_unlock(&lock);
}

void vmh_session_lock(void)
{
	vmh_lock(&lock);
}

void vmh_session_unlock(void)
{
	vmh_unlock(&lock);
}

void vmh_session_fork_child(void) /* lock held, as at fork */
{
	if (sock_fd >= 0)
		vmh_fd_hidden_close(sock_fd);
	sock_fd = -1;
	atomic_store(&session, 0);
	atomic_store(&settling, 0);
	if (!vmh_patience_retry_ns(0)) /* a service that hangs does so for the child, too */
		atomic_store(&next_try_ns, 0);
	atomic_store(&why_none, VMH_R_NOT_TRIED);
	vmh_net_unmap();
	vmh_worker_fork_child();
}

void vmh_session_fini(void)
{
	vmh_lock(&lock);
	if (sock_fd >= 0)
		vmh_fd_hidden_close(sock_fd);
	sock_fd = -1;
	atomic_store(&session, 0);
	atomic_store(&next_try_ns, UINT64_MAX); /* nothing is attached any more while the process ends */
	vmh_unlock(&lock);
}
