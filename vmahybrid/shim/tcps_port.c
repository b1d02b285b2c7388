/* Local TCP ports whose connections are a ring's: a rule for the port steers every segment of which the kernel has no
 * connection, so opening one takes no word with the service.
 *
 * For the program's own connections ports are taken ahead, a few at first and more as they are used. A socket that the
 * service holds keeps each from everybody else. They are used in turn, so that a name rests as long as it can. */
#include "vmh_control.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include "vmh_worker.h"
#include <netinet/in.h>
#include <stdlib.h>

#define PORTS_MAX 256 /* of a ring and local address */
#define TAIL_LOOK_NS 50000000u
#define LEAVE_NS 2000000u

struct block {
	struct block *next;
	struct vmh_tring *tring;
	in_addr_t laddr;
	uint32_t ifindex;
	unsigned n, at, wanted;
	bool dead;
	struct {
		in_port_t port;
		uint32_t flow_id;
	} p[PORTS_MAX];
};

/* A port that gets no new connections: of a listener that was closed while connections were left, or of one that went
 * home. */
struct tail {
	struct tail *next;
	uint32_t flow_id;
	in_port_t lport;
};

static struct vmh_lock lock; /* blocks and tails; after the object lock, before io. Never across a call of the service */
static struct block *blocks;
static struct tail *tails;
static _Atomic uint8_t ports[65536]; /* flows of each */
static _Atomic uint32_t newest[65536];
static _Atomic int work; /* something for the internal thread */

static void mark(in_port_t port, bool on)
{
	atomic_fetch_add(&ports[port], on ? 1 : -1);
}

uint32_t vmh_tport_flow(in_port_t lport)
{
	return atomic_load(&newest[lport]);
}

bool vmh_tport_is(in_port_t lport)
{
	return atomic_load_explicit(&ports[lport], memory_order_relaxed) != 0;
}

unsigned vmh_tport_attach(int fd, in_addr_t laddr, in_port_t lport, unsigned ifindex, unsigned flags, uint32_t *flow_id)
{
	struct vmh_msg_attach req = { .kind = VMH_FLOW_3T, .ifindex = ifindex, .fd = (unsigned)fd, .proto = IPPROTO_TCP,
				      .family = 4, .local_port = lport, .flags = (unsigned short)flags };
	unsigned reason = 0;

	vmh_map4(req.local_addr, laddr);
	vmh_session_attach(&req, fd, flow_id, &reason);
	if (reason)
		return reason;
	mark(lport, true);
	atomic_store(&newest[lport], *flow_id);
	return 0;
}

/* Not waited for: nothing of the port is left. */
void vmh_tport_end(uint32_t flow_id, in_port_t lport)
{
	mark(lport, false);
	vmh_session_detach(flow_id, 0);
}

/* The listener is about to be closed, or to be the kernel's alone. Connections that are left keep a rule that leaves SYNs
 * to the kernel; a port that is somebody else's by then is no harm, as the kernel's own connections pass. */
void vmh_tport_leave(int fd, in_addr_t laddr, in_port_t lport, unsigned ifindex, uint32_t flow_id)
{
	uint64_t end = vmh_now_ns() + LEAVE_NS;
	struct tail *t = NULL;
	uint32_t flow = 0;

	while (vmh_trings_port_users(lport) && vmh_now_ns() < end)
		vmh_rings_poll(64); /* most are about to end */
	if (!vmh_trings_port_users(lport) || !(t = calloc(1, sizeof(*t))) ||
	    vmh_tport_attach(fd, laddr, lport, ifindex, 0, &flow)) {
		free(t);
		vmh_tport_end(flow_id, lport);
		return;
	}
	vmh_tport_end(flow_id, lport);
	*t = (struct tail){ .flow_id = flow, .lport = lport };
	vmh_lock(&lock);
	t->next = tails;
	tails = t;
	atomic_store(&work, 1);
	vmh_unlock(&lock);
	vmh_worker_wake();
}

/* ---- ports for connect() ---- */

static int reserve(struct block *b, unsigned count)
{
	for (unsigned i = 0; i < count && b->n < PORTS_MAX && !b->dead; i++) {
		struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = b->laddr };
		socklen_t len = sizeof(a);
		int fd = (int)vmh_sys(SYS_socket, AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
		uint32_t flow_id = 0;
		unsigned reason;

		if (fd < 0)
			return fd;
		reason = vmh_sys(SYS_bind, fd, &a, sizeof(a)) < 0 || vmh_sys(SYS_getsockname, fd, &a, &len) < 0 ?
			VMH_R_NOT_OFFLOADABLE_ADDR :
			vmh_tport_attach(fd, b->laddr, a.sin_port, b->ifindex, VMH_ATTACH_F_KEEP, &flow_id);
		vmh_sys(SYS_close, fd);
		if (reason) {
			vmh_debug("no more local ports for connections on rings: %s", vmh_reason_text(reason));
			return -EADDRNOTAVAIL;
		}
		vmh_lock(&lock);
		if (b->n < PORTS_MAX) {
			b->p[b->n].port = a.sin_port;
			b->p[b->n++].flow_id = flow_id;
		}
		vmh_unlock(&lock);
	}
	return 0;
}

static struct block *block_of(struct vmh_tring *t, in_addr_t laddr, unsigned ifindex)
{
	struct block *b;

	vmh_lock(&lock);
	for (b = blocks; b && (b->dead || b->tring != t || b->laddr != laddr); b = b->next)
		;
	if (!b && (b = calloc(1, sizeof(*b)))) {
		*b = (struct block){ .next = blocks, .tring = t, .laddr = laddr, .ifindex = ifindex };
		blocks = b;
	}
	vmh_unlock(&lock);
	return b;
}

static int try_ports(struct block *b, struct vmh_tcps *s, struct vmh_tcp_addr *a, const struct vmh_tcp_path *path)
{
	int rc = -EADDRNOTAVAIL;

	vmh_lock(&lock);
	for (unsigned i = 0; i < b->n && rc == -EADDRNOTAVAIL; i++) {
		unsigned k = b->at % b->n;

		b->at++;
		if (b->at > 2 * b->n && b->n < PORTS_MAX && b->wanted <= b->n) { /* twice around: more would be better */
			b->at = k + 1;
			b->wanted = 2 * b->n;
			atomic_store(&work, 1);
		}
		a->lport = b->p[k].port;
		vmh_lock(&s->io);
		rc = vmh_tcp_connect(vmh_tring_stack(b->tring), a, path, &s->opt, s, &s->conn);
		s->flow_id = b->p[k].flow_id;
		vmh_unlock(&s->io);
	}
	vmh_unlock(&lock);
	return rc;
}

int vmh_tport_connect(struct vmh_tring *t, unsigned ifindex, struct vmh_tcps *s, struct vmh_tcp_addr *a,
		      const struct vmh_tcp_path *path)
{
	struct block *b = block_of(t, a->laddr, ifindex);
	int rc;

	if (!b)
		return -ENOMEM;
	rc = try_ports(b, s, a, path);
	if (rc == -EADDRNOTAVAIL && !reserve(b, b->n < 8 ? 1 : 8)) /* each has a connection to that peer */
		rc = try_ports(b, s, a, path);
	return rc;
}

void vmh_tport_gone(const struct vmh_tring *t, uint32_t flow_id)
{
	vmh_lock(&lock);
	for (struct block *b = blocks; b; b = b->next) {
		bool whole = t && b->tring == t && !b->dead;

		b->dead |= whole;
		for (unsigned i = 0; i < b->n; i++) {
			if (!whole && (!flow_id || b->p[i].flow_id != flow_id))
				continue;
			mark(b->p[i].port, false);
			b->p[i] = b->p[--b->n];
			i--;
		}
	}
	vmh_unlock(&lock);
}

/* A connection of this port is the kernel's, and the stack does not know its name as taken: no more of this port. */
void vmh_tport_retire(uint32_t flow_id)
{
	struct tail *t = calloc(1, sizeof(*t));

	vmh_lock(&lock);
	for (struct block *b = blocks; b && t; b = b->next)
		for (unsigned i = 0; i < b->n && t; i++) {
			if (b->p[i].flow_id != flow_id)
				continue;
			*t = (struct tail){ .next = tails, .flow_id = flow_id, .lport = b->p[i].port };
			tails = t;
			t = NULL;
			b->p[i] = b->p[--b->n];
			atomic_store(&work, 1);
		}
	vmh_unlock(&lock);
	free(t);
}

/* ---- by the internal thread ---- */

static void grow(void)
{
	for (struct block *b = blocks; b; b = b->next) /* they are never taken off */
		if (b->wanted > b->n && !b->dead && reserve(b, b->wanted - b->n))
			b->wanted = PORTS_MAX; /* not again */
}

static bool end_tails(void)
{
	struct tail **p, *t;

	for (;;) {
		vmh_lock(&lock);
		for (p = &tails; (t = *p) && vmh_trings_port_users(t->lport); p = &t->next)
			;
		if (t)
			*p = t->next;
		vmh_unlock(&lock);
		if (!t)
			return tails != NULL;
		vmh_tport_end(t->flow_id, t->lport);
		free(t);
	}
}

void vmh_tport_work(void)
{
	static uint64_t next;
	uint64_t now;

	if (vmh_likely(!atomic_load_explicit(&work, memory_order_relaxed)))
		return;
	grow();
	now = vmh_now_ns();
	if (now < next)
		return;
	next = now + TAIL_LOOK_NS;
	atomic_store(&work, 0);
	if (end_tails())
		atomic_store(&work, 1);
}

void vmh_tport_fork_child(void)
{
	vmh_lock_reset(&lock);
	tails = NULL;
	blocks = NULL;
	memset(ports, 0, sizeof(ports));
	atomic_store(&work, 0);
}
