/* Connections that began on a ring, in the kernel's list of sockets: `ss` shows them, and the owner.
 *
 * One that has lived for a while gets what an adopted one has: the service parks its kernel socket as established, in
 * repair mode, and gives it a rule of its own, since the rule of the port leaves to the kernel what the kernel has. Such a
 * connection also outlives the service. The internal thread does it, some at a time; short connections pay nothing. Those
 * that have traffic come first: until then the kernel is asked of each of their frames whether it has the connection. At
 * the end the program itself makes the kernel forget the connection, silently, and the rule follows. */
#include "vmh_base.h"
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_heap.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_worker.h"
#include <sys/stat.h>

#define SCAN_NS 1000000000u
#define SCAN_FEW_NS 250000000u
#define FEW 64 /* that are not shown: they hardly are short ones, one after the other */
#define PACE 9               /* times as long as a request took, until the next: 10 ms of the service, and of a core */
#define PACE_MIN_NS 50000000u
#define REFUSED_NS 10000000000u /* the service has no rules left for them */
#define FOUND_MAX 1024
#define LISTABLE (1u << 1 | 1u << 4 | 1u << 5 | 1u << 8) /* established, or one side goes on; linux/tcp_states.h */
/* of `lived`, from one scan to the next */
#define LIVED 1
#define REFUSED 2   /* the service did not show it: asked again when it has traffic */
#define BARRED 3    /* nor then */

static struct vmh_lock lock;   /* of the next four; no other is taken under it */
static uint64_t *gone;         /* inodes whose rules may go */
static unsigned ngone, room;
static unsigned shown;

/* These are the internal thread's. The last come first: the first nidle ones had no traffic since the scan before. */
static struct vmh_tcps *found[FOUND_MAX];
static unsigned nfound, nidle;
static unsigned unshown; /* in the last scan */

struct batch {
	struct vmh_msg_tcp_show req;
	struct vmh_tcps *s[VMH_TCP_SHOW_MAX];
	int fds[VMH_TCP_SHOW_MAX];
	uint64_t inode[VMH_TCP_SHOW_MAX];
};

static void count(int more)
{
	vmh_lock(&lock);
	shown += (unsigned)more;
	vmh_unlock(&lock);
}

void vmh_tshow_home(struct vmh_tcps *s)
{
	if (!s->shown)
		return;
	count(-1);
	s->shown = 0;
	s->shown_flow = 0;
}

static void note_gone(uint64_t inode)
{
	vmh_lock(&lock);
	if (ngone == room) {
		unsigned more = room ? 2 * room : VMH_TCP_HIDE_MAX;
		uint64_t *p = vmh_heap_more(gone, more * sizeof(*p));

		if (p) {
			gone = p;
			room = more;
		}
	}
	if (ngone < room)
		gone[ngone++] = inode;
	vmh_unlock(&lock);
}

void vmh_tshow_end(struct vmh_tcps *s)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };

	if (!s->shown)
		return;
	/* not by close(2): a child may have the socket, too */
	vmh_sys(SYS_connect, s->obj.fd, &none, sizeof(none));
	s->opening = VMH_TCPS_OPEN; /* it stays in repair mode: connect() can't begin another */
	note_gone(s->shown_inode);
	vmh_tshow_home(s);
	vmh_worker_wake();
}

void vmh_tshow_flush(void)
{
	struct vmh_msg_tcp_hide req;

	while (VMH_GET(ngone)) {
		req = (struct vmh_msg_tcp_hide){ 0 };
		vmh_lock(&lock);
		while (ngone && req.n < VMH_TCP_HIDE_MAX)
			req.inode[req.n++] = gone[--ngone];
		vmh_unlock(&lock);
		if (req.n)
			vmh_session_tcp_hide(&req);
	}
}

/* ---- which ones ---- */

static void find(struct vmh_tcps *s, bool busy)
{
	if (nfound < FOUND_MAX) {
		found[nfound++] = s;
		if (!busy) {
			found[nfound - 1] = found[nidle];
			found[nidle++] = s;
		}
	} else if (busy && nidle) {
		found[--nidle] = s;
	}
}

static void look_at(struct vmh_tcps *s, void *arg)
{
	(void)arg;
	if (!vmh_tcps_is_fresh(s) || vmh_tcps_state(s) != VMH_TCPS_RING)
		return;
	if (VMH_GET(s->shown)) {
		if (!(vmh_tcps_bits(s) & EPOLLHUP) || !vmh_trylock(&s->obj.lock))
			return;
		if (vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING && !atomic_load(&s->obj.closed))
			vmh_tshow_end(s); /* it has ended, and nobody has closed it yet */
		vmh_unlock(&s->obj.lock);
	} else if (s->lived != BARRED) {
		uint64_t bytes = VMH_GET(s->watch.bytes);
		bool busy = bytes != s->scanned_bytes;

		unshown++;
		s->scanned_bytes = bytes;
		if (!s->lived)
			s->lived = LIVED;
		else if (busy || s->lived == LIVED)
			find(s, busy);
	}
}

/* Object lock held. */
static bool add(struct batch *b, struct vmh_tcps *s)
{
	struct vmh_tcp_shown *c = &b->req.conn[b->req.n];
	struct vmh_tcp_info info = { 0 };
	struct stat st;

	if (!vmh_tcps_is_fresh(s) || vmh_tcps_state(s) != VMH_TCPS_RING || s->shown ||
	    !s->lived || s->lived == BARRED || atomic_load(&s->obj.nfds) != 1)
		return false;
	vmh_lock(&s->io);
	if (s->conn)
		vmh_tcp_get_info(s->conn, &info);
	vmh_unlock(&s->io);
	if (!(LISTABLE >> info.state & 1) || vmh_sys(SYS_fstat, s->obj.fd, &st) < 0 || !vmh_tcps_owns_fd(s))
		return false;
	*c = (struct vmh_tcp_shown){ .flow_id = s->flow_id, .ifindex = s->ifindex, .fd = (unsigned)s->obj.fd,
				     .local_port = s->addr.lport, .remote_port = s->addr.rport };
	memcpy(c->local_addr, s->addr.laddr.b, sizeof(c->local_addr));
	memcpy(c->remote_addr, s->addr.raddr.b, sizeof(c->remote_addr));
	s->lent = 1;
	b->inode[b->req.n] = st.st_ino;
	b->fds[b->req.n] = s->obj.fd;
	b->s[b->req.n++] = s;
	return true;
}

/* Busy ones or idle ones. Takes object locks, several at a time: by trying only, so that it never waits for who waits for
 * us. */
static void collect(struct batch *b, bool busy)
{
	while (nfound > (busy ? nidle : 0) && b->req.n < VMH_TCP_SHOW_MAX) {
		struct vmh_tcps *s = found[--nfound];

		nidle -= !busy;
		vmh_obj_hold(&s->obj);
		if (!atomic_load(&s->obj.closed) && vmh_trylock(&s->obj.lock)) {
			if (!atomic_load(&s->obj.closed) && add(b, s))
				continue;
			vmh_unlock(&s->obj.lock);
		}
		vmh_obj_put(&s->obj);
	}
}

static bool connected(int fd)
{
	struct sockaddr_storage name;
	socklen_t len = sizeof(name);

	return vmh_sys(SYS_getpeername, fd, &name, &len) == 0;
}

/* Object lock held: the service knows of it. */
static void told(struct vmh_tcps *s)
{
	count(1);
	vmh_tended_watch(s);
	vmh_lock(&s->io);
	if (s->conn)
		vmh_tcp_delist(s->conn);
	vmh_unlock(&s->io);
}

/* Was any of them taken? */
static bool show_some(bool busy)
{
	struct batch b = { 0 };
	struct vmh_msg_tcp_show_reply rep;
	bool any = false;
	int err;

	collect(&b, busy);
	if (!b.req.n)
		return true;
	b.req.flags = busy ? VMH_TCP_SHOW_BUSY : 0;
	for (unsigned i = 0; i < b.req.n; i++) /* the service gives SO_REUSEADDR back at the end of repair mode */
		vmh_tcps_dress(b.s[i], b.fds[i]);
	err = vmh_session_tcp_show(&b.req, b.fds, &rep);
	for (unsigned i = 0; i < b.req.n; i++) {
		struct vmh_tcps *s = b.s[i];

		s->shown_inode = b.inode[i];
		s->shown_flow = err ? 0 : rep.flow_id[i];
		/* without an answer it may have been done, or may yet be */
		VMH_SET(s->shown, err ? err == -ETIMEDOUT || connected(b.fds[i]) : s->shown_flow != 0);
		if (s->shown)
			told(s);
		else
			s->lived = busy ? BARRED : REFUSED;
		any |= s->shown;
		vmh_unlock(&s->obj.lock);
		vmh_obj_put(&s->obj);
	}
	vmh_debug("%u TCP connections for the kernel's list: %d", b.req.n, err);
	return any;
}

void vmh_tshow_look(void)
{
	static uint64_t next_scan, next_batch, next_idle;
	uint64_t now, took;
	bool busy;

	/* VMA_TCP_3T_RULES: rules of ports only */
	if ((vmh_params.hybrid_tcp != VMH_TCPS_OFFLOAD && !vmh_conf_any_tcp()) || vmh_params.tcp_3t_rules ||
	    !vmh_session_id())
		return;
	vmh_tshow_flush();
	now = vmh_now_ns();
	if (now >= next_scan && vmh_trings_any()) {
		nfound = nidle = unshown = 0;
		vmh_tcps_each(look_at, NULL);
		next_scan = now + (unshown < FEW ? SCAN_FEW_NS : SCAN_NS);
	}
	busy = nfound > nidle;
	if (nfound && now >= next_batch && (busy || now >= next_idle) &&
	    VMH_GET(shown) < (unsigned)vmh_params.hybrid_tcp_show) {
		bool any = show_some(busy);

		took = vmh_now_ns() - now;
		next_batch = now + took + (took * PACE > PACE_MIN_NS ? took * PACE : PACE_MIN_NS);
		if (!any)
			*(busy ? &next_batch : &next_idle) = now + REFUSED_NS;
	}
}

void vmh_tshow_fork_child(void)
{
	vmh_lock_reset(&lock);
	ngone = nfound = nidle = shown = 0;
}
