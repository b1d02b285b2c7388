/* The session with the service.
 *
 * One SEQPACKET connection, requests in lock step under `lock`, or several of one type; events that arrive in
 * between are put aside and handled by the internal thread (worker.c), which holds no lock then. A service that does
 * not answer in time (vmh_patience.h) is treated as gone. Nothing that it says is taken for granted.
 */
#include "vmh_control_int.h"
#include "vmh_exception.h"
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_patience.h"
#include "vmh_ring.h"
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

struct vmh_lock vmh_ctl_lock;
int vmh_ctl_fd = -1;
static uint32_t seq;
static _Atomic uint32_t session;       /* 0: none */
static uint32_t sessions_opened;
static _Atomic uint32_t why_none = VMH_R_NOT_TRIED;
static _Atomic uint32_t closing;       /* until a fork: why the kernel serves the program for good */
static _Atomic uint64_t next_try_ns;
static bool opened_late;               /* the program had been told that there is no service */
static _Atomic int settling;           /* a session after a loss: the worker brings the sockets to it */
static uint64_t mute_until;            /* a service that did not answer is left alone until then */
static _Atomic int ask_again;          /* ... and the worker looks what it missed */
static int told;                       /* the one line about why there is no session was logged */

void vmh_ctl_header(struct vmh_msg_hdr *h, unsigned type, size_t len)
{
	*h = (struct vmh_msg_hdr){ .magic = VMH_CTL_MAGIC, .version = VMH_CTL_VERSION, .type = (unsigned short)type,
				   .len = (unsigned)len, .seq = ++seq };
}

/* Descriptors on their way, of all programs of the user, count against RLIMIT_NOFILE until the service has received
 * them. */
#define REFS_TRIES 50
#define REFS_NAP_NS 1000000

static int send_fds(const void *msg, size_t len, const int *fds, int n)
{
	_Alignas(struct cmsghdr) char cbuf[CMSG_SPACE(VMH_TCP_SHOW_MAX * sizeof(int))] = { 0 };
	size_t bytes = (size_t)n * sizeof(int);
	struct iovec iov = { (void *)msg, len };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	const struct timespec nap = { 0, REFS_NAP_NS };

	if (n) {
		m.msg_control = cbuf;
		m.msg_controllen = CMSG_SPACE(bytes);
		struct cmsghdr *c = CMSG_FIRSTHDR(&m);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(bytes);
		memcpy(CMSG_DATA(c), fds, bytes);
	}
	for (int tries = 0;; tries++) {
		long r = vmh_sys(SYS_sendmsg, vmh_ctl_fd, &m, MSG_NOSIGNAL | MSG_DONTWAIT);

		if (r != -ETOOMANYREFS || tries == REFS_TRIES)
			return r < 0 ? (int)r : 0;
		vmh_sys(SYS_nanosleep, &nap, NULL);
	}
}

int vmh_ctl_send(const void *msg, size_t len)
{
	return send_fds(msg, len, NULL, 0);
}

void vmh_ctl_close_fds(int *fds, int n)
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
	long r = vmh_sys(SYS_recvmsg, vmh_ctl_fd, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
	const struct vmh_msg_hdr *h = buf;

	*nfds = 0;
	if (r < 0)
		return r;
	take_fds(&m, fds, nfds); /* an empty message can carry some, too */
	if (r > 0 && (size_t)r >= sizeof(*h) && h->magic == VMH_CTL_MAGIC && h->len == (unsigned)r)
		return r;
	vmh_ctl_close_fds(fds, *nfds);
	*nfds = 0;
	return r ? -EPROTO : 0;
}

/* The worker looks more often than a call of the program does: connect() to nobody costs it microseconds. */
static uint64_t next_try(unsigned reason)
{
	bool soon = atomic_load(&vmh_worker_runs) && (reason == VMH_R_NO_SERVICE || reason == VMH_R_SERVICE_GONE ||
						      reason == VMH_R_SERVICE_STOP);

	if (atomic_load(&closing))
		return UINT64_MAX;
	return vmh_now_ns() + vmh_patience_retry_ns(soon ? RECONNECT_NS : RETRY_NS);
}

/* Nothing that happens to the session changes it. */
static unsigned for_good_or(unsigned reason)
{
	unsigned r = atomic_load(&closing);

	return r ? r : reason;
}

/* lock held. Nothing more comes to a ring. */
static void refuse(unsigned reason)
{
	reason = for_good_or(reason);
	atomic_store(&session, 0);
	atomic_store(&settling, 0);
	atomic_store(&why_none, reason);
	atomic_store(&next_try_ns, next_try(reason));
}

/* lock held. The connection is over; the worker takes the sockets home. */
static void lose(unsigned reason)
{
	if (vmh_ctl_fd >= 0)
		vmh_fd_hidden_close(vmh_ctl_fd);
	vmh_ctl_fd = -1;
	refuse(reason);
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

static uint64_t making_ns; /* lock held: when the service said last that it makes the ring that was asked for */

static bool on_event(const void *msg, size_t len)
{
	const struct vmh_msg_event *ev = msg;

	if (ev->hdr.type != VMH_MSG_EVENT)
		return false;
	if (len >= sizeof(*ev) && ev->event == VMH_EV_MAKING)
		making_ns = vmh_now_ns();
	else if (len >= sizeof(*ev))
		vmh_worker_event(ev);
	return true;
}

union message {
	struct vmh_msg_hdr h;
	char bytes[VMH_MSG_MAX];
};

static union message came; /* lock held; the stack of a coroutine or a signal handler may be small */

#define LOT_NS 2500000000ull
#define MAKING_NS 12000000000ull /* at most, of all */
#define RING_NS 2000000000ull    /* at least, for a ring: that it is in the making the service tells after a second */
#define OPEN 1 /* err of a request that was sent */
#define POLL_BUDGET 64
#define MOVE_NAP_NS 200000

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
		vmh_ctl_header(&no.detach.hdr, VMH_MSG_DETACH, sizeof(no.detach));
		no.detach.flow_id = ((const struct vmh_msg_attach_reply *)late)->flow_id;
	} else if (late->h.type == (VMH_MSG_RING | VMH_MSG_REPLY) && len >= sizeof(struct vmh_msg_ring_reply)) {
		vmh_ctl_header(&no.release.hdr, VMH_MSG_RELEASE, sizeof(no.release));
		no.release.ring_id = ((const struct vmh_msg_ring_reply *)late)->ring_id;
	} else {
		return;
	}
	vmh_ctl_send(&no, no.detach.hdr.len);
}

static struct vmh_ctl_request *asked(struct vmh_ctl_request *q, int n, uint32_t seq_)
{
	for (int i = 0; i < n; i++)
		if (q[i].err == OPEN && q[i].req->seq == seq_)
			return q + i;
	return NULL;
}

/* Frames of a connection that is asked for come to a ring meanwhile, for as long as an RCU grace period takes, and may be
 * more than it has room for. */
static bool is_of_a_move(const struct vmh_msg_hdr *req)
{
	return req->type == VMH_MSG_ATTACH || req->type == VMH_MSG_TCP_TAKE || req->type == VMH_MSG_TCP_HOME;
}

/* lock held. A reply to one of n requests, of whatever length, is what came; bytes, or -errno. */
static long await_reply(struct vmh_ctl_request *q, int n, uint64_t deadline, int *fds, int *nfds)
{
	uint64_t start = vmh_now_ns(), patience = deadline - start;

	for (;;) {
		long r = recv_msg(&came, sizeof(came), fds, nfds);
		uint64_t now;

		if (r == 0)
			return -ECONNRESET;
		if (r < 0 && r != -EAGAIN && r != -EINTR)
			return r;
		if (r > 0) {
			bool event = on_event(&came, (size_t)r);

			if (!event && asked(q, n, came.h.seq))
				return r;
			if (!event)
				decline(&came, (size_t)r);
			vmh_ctl_close_fds(fds, *nfds); /* an event, or the reply to something we no longer wait for */
			*nfds = 0;
		}
		/* looked at each time: a service that chatters has not answered either */
		now = vmh_now_ns();
		if (making_ns > start)
			deadline = making_ns + (making_ns - start < MAKING_NS ? patience : 0);
		if (now >= deadline)
			return -ETIMEDOUT;
		if (r == -EAGAIN) {
			struct pollfd p = { .fd = vmh_ctl_fd, .events = POLLIN };
			uint64_t ns = deadline - now;

			if (is_of_a_move(q->req) && ns > MOVE_NAP_NS)
				ns = vmh_rings_poll(POLL_BUDGET) ? 0 : MOVE_NAP_NS;
			struct timespec ts = { (time_t)(ns / 1000000000), (long)(ns % 1000000000) };

			vmh_sys(SYS_ppoll, &p, 1, &ts, NULL, 0);
		}
	}
}

/* lock held. To a service that hangs: what it has to know when it comes to itself, and nothing else. */
static int tell_muted(const struct vmh_msg_hdr *req, struct vmh_msg_hdr *reply)
{
	reply->reason = VMH_R_NO_ANSWER;
	if ((req->type == VMH_MSG_DETACH || req->type == VMH_MSG_RELEASE || req->type == VMH_MSG_TCP_HIDE) &&
	    vmh_ctl_send(req, req->len) < 0)
		lose(VMH_R_SERVICE_GONE);
	return -ETIMEDOUT;
}

/* A request that could not be sent for what the program did with its descriptors says nothing of the service. */
static bool for_its_fds(long err, int n)
{
	return n && (err == -ETOOMANYREFS || (err == -EBADF && vmh_sys(SYS_fcntl, vmh_ctl_fd, F_GETFD, 0) >= 0));
}

static bool is_muted(uint64_t now)
{
	return vmh_ctl_fd >= 0 && atomic_load(&session) && vmh_unlikely(now < mute_until);
}

/* What came for req: r, or that it is no reply of at least len bytes. */
static long checked(long r, const union message *buf, const struct vmh_msg_hdr *req, size_t len)
{
	if (r > 0 && (buf->h.type != (req->type | VMH_MSG_REPLY) || (!buf->h.status && (size_t)r < len)))
		return -EPROTO;
	return r;
}

/* lock held. No reply came: -errno r. */
static void unanswered(long r, struct vmh_msg_hdr *reply)
{
	if (r == -ETIMEDOUT && atomic_load(&session)) {
		mute();
		reply->reason = VMH_R_NO_ANSWER;
	} else if (vmh_ctl_fd >= 0) {
		vmh_warn("the service does not answer (%s): the kernel serves this program", strerror((int)-r));
		lose(r == -EPROTO ? VMH_R_PROTOCOL : VMH_R_SERVICE_GONE);
	}
}

/* For a request that may take so long without anything being wrong. */
static uint64_t patience_of(uint64_t least, uint64_t now, bool internal)
{
	uint64_t patience = vmh_patience_ns(now, internal);

	return patience < least ? least : patience;
}

/* Of several all may be answered when the last is done, and Mover of the service gives a lot of them 2 s. */
static uint64_t patience_for(int n, uint64_t now, bool internal)
{
	return patience_of(n > 1 ? LOT_NS : 0, now, internal);
}

/* A ring takes its time, and more where there are many: what its making took says nothing of the service, and until it
 * would have told of it nobody gives up. */
static bool is_of_a_ring(const struct vmh_msg_hdr *req)
{
	return req->type == VMH_MSG_RING || req->type == VMH_MSG_RING_MAPPED;
}

/* lock held. Reply of at least reply_len bytes into reply, all zero but a reason where there is none; its fds belong
 * to the caller on success. */
int vmh_ctl_rpc_fds(struct vmh_msg_hdr *req, const int *out, int nout, void *reply, size_t reply_len, int *fds, int *nfds)
{
	bool internal = vmh_worker_is_me(), ring = is_of_a_ring(req);
	uint64_t start = vmh_now_ns(), deadline = start + patience_of(ring ? RING_NS : 0, start, internal);
	struct vmh_ctl_request q = { .req = req, .err = OPEN };
	int got[MAX_FDS], ngot = 0;
	long r;

	memset(reply, 0, reply_len);
	if (is_muted(start))
		return tell_muted(req, reply);
	r = vmh_ctl_fd < 0 ? -ENOTCONN : send_fds(req, req->len, out, nout);
	if (vmh_unlikely(for_its_fds(r, nout)))
		return (int)r;
	if (r == 0) {
		r = await_reply(&q, 1, deadline, got, &ngot);
		vmh_patience_spent(making_ns > start ? making_ns : start, vmh_now_ns(), r == -ETIMEDOUT, internal || ring);
	}
	r = checked(r, &came, req, reply_len);
	if (r < 0 || came.h.status || !fds) {
		vmh_ctl_close_fds(got, ngot);
		ngot = 0;
	}
	if (r < 0) {
		unanswered(r, reply);
		return (int)r;
	}
	memcpy(reply, &came, (size_t)r < reply_len ? (size_t)r : reply_len);
	if (fds) {
		memcpy(fds, got, (size_t)ngot * sizeof(int));
		*nfds = ngot;
	}
	return came.h.status;
}

/* lock held. *open: how many wait for a reply. 0, or -errno of the first one that could not be sent. */
static long send_many(struct vmh_ctl_request *q, int n, int *open)
{
	long r = vmh_ctl_fd < 0 ? -ENOTCONN : 0;

	for (int i = 0; i < n; i++) {
		if (!r)
			r = send_fds(q[i].req, q[i].req->len, q[i].out, q[i].nout);
		q[i].err = r ? (int)r : OPEN;
		*open += !r;
	}
	return r;
}

/* lock held. The next reply to one of those that are open: bytes, or -errno. */
static long take_reply(struct vmh_ctl_request *q, int n, size_t reply_len, uint64_t deadline)
{
	struct vmh_ctl_request *one;
	int got[MAX_FDS], ngot = 0;
	long r = await_reply(q, n, deadline, got, &ngot);

	if (r < 0)
		return r;
	vmh_ctl_close_fds(got, ngot);
	one = asked(q, n, came.h.seq);
	r = checked(r, &came, one->req, reply_len);
	if (r < 0)
		return r;
	memcpy(one->reply, &came, (size_t)r < reply_len ? (size_t)r : reply_len);
	one->err = came.h.status;
	return r;
}

void vmh_ctl_rpc_many(struct vmh_ctl_request *q, int n, size_t reply_len)
{
	bool internal = vmh_worker_is_me();
	uint64_t start = vmh_now_ns(), deadline = start + patience_for(n, start, internal);
	struct vmh_msg_hdr none = { 0 };
	int open = 0;
	long r;

	for (int i = 0; i < n; i++) {
		memset(q[i].reply, 0, reply_len);
		q[i].err = is_muted(start) ? tell_muted(q[i].req, q[i].reply) : 0;
	}
	if (is_muted(start))
		return;
	r = send_many(q, n, &open);
	if (r && !open && !for_its_fds(r, q->nout))
		unanswered(r, &none);
	if (!open)
		return;
	do {
		uint64_t now;

		r = take_reply(q, n, reply_len, deadline);
		now = vmh_now_ns();
		vmh_patience_spent(start, now, r == -ETIMEDOUT, internal);
		start = now;
		deadline = now + patience_for(open, now, internal);
	} while (r >= 0 && --open);
	if (r >= 0)
		return;
	unanswered(r, &none);
	for (int i = 0; i < n; i++) {
		if (q[i].err != OPEN)
			continue;
		q[i].err = (int)r;
		((struct vmh_msg_hdr *)q[i].reply)->reason = none.reason;
	}
}

int vmh_ctl_rpc(struct vmh_msg_hdr *req, int fd, void *reply, size_t reply_len, int *fds, int *nfds)
{
	return vmh_ctl_rpc_fds(req, &fd, fd >= 0, reply, reply_len, fds, nfds);
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

	vmh_ctl_header(&req.hdr, VMH_MSG_HELLO, sizeof(req));
	req.pid = (unsigned)getpid();
	read_proc("/proc/self/comm", req.comm, sizeof(req.comm));
	read_proc("/proc/self/cmdline", req.cmdline, sizeof(req.cmdline));
	fill_text(req.profile, sizeof(req.profile),
		  vmh_params.hybrid_profile[0] ? vmh_params.hybrid_profile : vmh_params.spec);
	fill_text(req.app_id, sizeof(req.app_id), vmh_params.application_id);
	int err = vmh_ctl_rpc(&req.hdr, vmh_stats_fd(), &rep, sizeof(rep), fds, &nfds);
	if (err)
		return rep.hdr.reason ? rep.hdr.reason : VMH_R_NO_SERVICE;
	if (nfds != 1) {
		vmh_ctl_close_fds(fds, nfds);
		return VMH_R_PROTOCOL;
	}
	err = vmh_net_map(fds[0], rep.net_page_size); /* takes the fd over */
	if (err)
		return VMH_R_VERSION;
	VMH_SET(vmh_stats->session, rep.session);
	return 0;
}

/* Lock held. A connection on which the service knows this program; 0, or why there is none. */
static unsigned introduce(void)
{
	unsigned reason;
	int fd;

	vmh_stats_show();
	fd = connect_service();
	if (fd < 0)
		return connect_reason(fd);
	vmh_ctl_fd = fd;
	mute_until = 0;
	vmh_ctl_forget_refusals();
	vmh_verbs_session_begins();
	reason = hello();
	if (reason && vmh_ctl_fd >= 0)
		lose(reason);
	if (!reason)
		VMH_SET(vmh_stats->state, 1);
	return reason;
}

static unsigned none(unsigned reason)
{
	atomic_store(&why_none, reason);
	VMH_SET(vmh_stats->reason, reason);
	if (!told)
		vmh_info("not offloading, the kernel serves this program: %s (%s)", vmh_reason_text(reason),
			 vmh_params.hybrid_socket);
	told = 1;
	return reason;
}

/* VMA_OFFLOADED_SOCKETS=0: no session is ever open, so no call asks for anything; but the service knows the program,
 * for vma_stats and status, and the internal thread hears what vma_stats wants of it. */
static unsigned only_introduce(void)
{
	unsigned reason = introduce();

	atomic_store(&next_try_ns, reason ? next_try(reason) : UINT64_MAX);
	none(VMH_R_DISABLED);
	if (!reason)
		vmh_worker_start(vmh_ctl_fd, false);
	return VMH_R_DISABLED;
}

static unsigned open_locked(void)
{
	unsigned reason;

	if (atomic_load(&session))
		return 0;
	if (vmh_now_ns() < atomic_load(&next_try_ns))
		return atomic_load(&why_none);
	if (!vmh_params.offloaded_sockets)
		return only_introduce();
	reason = introduce();
	if (reason) {
		if (atomic_load(&next_try_ns) != UINT64_MAX)
			atomic_store(&next_try_ns, next_try(reason));
		return none(reason);
	}
	atomic_store(&why_none, VMH_R_NONE);
	atomic_store(&settling, atomic_load(&vmh_worker_runs));
	atomic_store(&session, ++sessions_opened);
	VMH_SET(vmh_stats->reason, VMH_R_NONE);
	vmh_debug("session with the service on %s", vmh_params.hybrid_socket);
	vmh_warn_arp_flux();
	opened_late = told;
	if (atomic_load(&vmh_worker_runs))
		vmh_worker_start(vmh_ctl_fd, opened_late);
	return 0;
}

unsigned vmh_session_open(void)
{
	unsigned r;

	if (vmh_likely(atomic_load_explicit(&session, memory_order_acquire) &&
		       !atomic_load_explicit(&settling, memory_order_relaxed) && !atomic_load(&closing)))
		return 0;
	r = atomic_load(&closing);
	if (vmh_unlikely(r))
		return r;
	/* A service that starts may take a while for the rings of many programs. The calls of this one do
	 * not wait for it: where there is a worker, it reconnects, and brings every socket to the rings. */
	if (atomic_load(&vmh_worker_runs) && !vmh_worker_is_me()) {
		r = atomic_load(&why_none);
		return r ? r : VMH_R_SERVICE_GONE;
	}
	if (vmh_now_ns() < atomic_load(&next_try_ns) && !atomic_load(&session))
		return atomic_load(&why_none);
	vmh_lock(&vmh_ctl_lock);
	r = open_locked();
	vmh_unlock(&vmh_ctl_lock);
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
	vmh_lock(&vmh_ctl_lock);
	due = vmh_now_ns() >= mute_until;
	if (due)
		atomic_store(&ask_again, 0);
	vmh_unlock(&vmh_ctl_lock);
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

bool vmh_session_told(void)
{
	const struct timespec now = { 0 };
	struct pollfd p = { .events = POLLIN };
	bool any = false;

	if (!vmh_trylock(&vmh_ctl_lock))
		return false; /* what comes may be an answer */
	p.fd = vmh_ctl_fd;
	any = p.fd >= 0 && vmh_sys(SYS_ppoll, &p, 1, &now, NULL, 0) > 0;
	vmh_unlock(&vmh_ctl_lock);
	return any;
}

void vmh_session_serve(void)
{
	if (vmh_likely(atomic_load_explicit(&vmh_worker_runs, memory_order_relaxed)))
		return;
	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0)
		vmh_worker_start(vmh_ctl_fd, opened_late);
	vmh_unlock(&vmh_ctl_lock);
}

uint32_t vmh_session_id(void)
{
	return atomic_load_explicit(&session, memory_order_acquire);
}

unsigned vmh_session_reason(void)
{
	return atomic_load(&why_none);
}

/* For the worker: something is readable. Takes what is there. */
void vmh_session_read(void)
{
	int fds[MAX_FDS], nfds;

	vmh_lock(&vmh_ctl_lock);
	while (vmh_ctl_fd >= 0) {
		long r = recv_msg(&came, sizeof(came), fds, &nfds);

		if (r == -EINTR)
			continue;
		if (r == -EAGAIN)
			break;
		if (r <= 0) {
			vmh_info("the service is gone: the kernel serves this program until it is back");
			lose(VMH_R_SERVICE_GONE);
			break;
		}
		if (!on_event(&came, (size_t)r))
			decline(&came, (size_t)r);
		vmh_ctl_close_fds(fds, nfds);
	}
	vmh_unlock(&vmh_ctl_lock);
}

/* The service said goodbye: no call uses the session from here on. The connection stays until the worker has
 * taken everything home, because the service takes the rings away when it ends. */
void vmh_session_bye(void)
{
	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0) {
		atomic_store(&why_none, for_good_or(VMH_R_SERVICE_STOP));
		atomic_store(&session, 0);
	}
	vmh_unlock(&vmh_ctl_lock);
}

void vmh_session_end(unsigned reason)
{
	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0)
		lose(reason);
	vmh_unlock(&vmh_ctl_lock);
}

void vmh_session_closing(unsigned reason)
{
	atomic_compare_exchange_strong(&closing, &(uint32_t){ 0 }, reason);
}

void vmh_session_part(unsigned reason)
{
	vmh_lock(&vmh_ctl_lock);
	refuse(reason);
	vmh_unlock(&vmh_ctl_lock);
}

void vmh_session_lock(void)
{
	vmh_lock(&vmh_ctl_lock);
}

void vmh_session_unlock(void)
{
	vmh_unlock(&vmh_ctl_lock);
}

void vmh_session_unlock_fork_child(void)
{
	vmh_unlock_fork_child(&vmh_ctl_lock);
}

void vmh_session_fork_child(void) /* lock held, as at fork */
{
	if (vmh_ctl_fd >= 0)
		vmh_fd_hidden_close(vmh_ctl_fd);
	vmh_ctl_fd = -1;
	atomic_store(&session, 0);
	atomic_store(&settling, 0);
	/* a service that hangs does so for the child, too */
	if (!vmh_patience_retry_ns(0) || atomic_load(&closing))
		atomic_store(&next_try_ns, 0);
	atomic_store(&why_none, VMH_R_NOT_TRIED);
	atomic_store(&closing, vmh_fds_apart ? VMH_R_DESCRIPTORS : 0);
	if (vmh_fds_apart)
		refuse(VMH_R_DESCRIPTORS); /* its numbers are not those of the table of objects */
	vmh_ctl_state_fork_child();
	vmh_net_unmap();
	vmh_worker_fork_child();
}

void vmh_session_fini(void)
{
	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0)
		vmh_fd_hidden_close(vmh_ctl_fd);
	vmh_ctl_fd = -1;
	atomic_store(&session, 0);
	atomic_store(&why_none, VMH_R_CLOSED);
	atomic_store(&next_try_ns, UINT64_MAX); /* nothing is attached any more while the process ends */
	vmh_worker_parted(); /* it would look at a number that is nothing, without a pause, to the end of the process */
	vmh_unlock(&vmh_ctl_lock);
}
