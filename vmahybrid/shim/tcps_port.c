/* Local TCP ports whose connections are a ring's: a rule for the port steers every segment of which the kernel has no
 * connection, so opening one takes no word with the service.
 *
 * For the program's own connections ports are taken ahead, a few at first and more as they are used. A socket that the
 * service holds keeps each from everybody else. They are used in turn, so that a name rests as long as it can. */
#include "vmh_control.h"
#include "vmh_heap.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include "vmh_verbs.h"
#include "vmh_worker.h"
#include <netinet/in.h>

#define PORTS_MAX 16384 /* of a ring and local address */
#define PORTS_AHEAD 256 /* as many by themselves; more for connections that are open at once */
#define PORTS_AT_ONCE 8
#define TAIL_LOOK_NS 50000000u
#define LEAVE_NS 2000000u

struct block {
	struct block *next;
	struct vmh_tring *tring;
	struct vmh_ip laddr;
	uint32_t ifindex;
	unsigned n, at, wanted;
	bool dead, full; /* full: more were refused, and none are taken ahead any more */
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
static _Atomic bool marked; /* any of them, ever */
static _Atomic int work; /* something for the internal thread */

static void mark(in_port_t port, bool on)
{
	atomic_store_explicit(&marked, true, memory_order_relaxed);
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

static struct vmh_session_attach request(int fd, const struct vmh_tname *l, unsigned ifindex, unsigned lane, unsigned flags)
{
	struct vmh_session_attach a = { .fd = fd,
					.req = { .kind = VMH_FLOW_3T, .ifindex = ifindex, .fd = (unsigned)fd,
						 .proto = IPPROTO_TCP, .family = l->v6 ? 6 : 4, .local_port = l->port,
						 .flags = (unsigned short)flags, .lane = lane } };

	memcpy(a.req.local_addr, l->addr.b, sizeof(a.req.local_addr));
	return a;
}

/* What it was answered: the reason, 0 where the port is the ring's. */
static unsigned attached(const struct vmh_session_attach *a)
{
	unsigned reason = a->reason;

	if (!reason && a->req.flags & VMH_ATTACH_F_PORT) { /* a QP would rob the kernel of what it has of a listener's port */
		reason = vmh_verbs_attach_tcp(a->flow_id, &a->req);
		if (reason)
			vmh_session_detach(a->flow_id, reason);
	}
	if (reason)
		return reason;
	mark(a->req.local_port, true);
	atomic_store(&newest[a->req.local_port], a->flow_id);
	return 0;
}

unsigned vmh_tport_attach(int fd, const struct vmh_tname *l, unsigned ifindex, unsigned lane, unsigned flags,
			  uint32_t *flow_id)
{
	struct vmh_session_attach a = request(fd, l, ifindex, lane, flags);

	vmh_session_attach_all(&a, 1);
	*flow_id = a.flow_id;
	return attached(&a);
}

static _Atomic bool remembered;

/* A connection that began on a ring has left it, and is not home yet: it will be asked for by the flow of its port. */
void vmh_tport_remember(void)
{
	atomic_store(&remembered, true);
}

/* With a reason it returns when no frame comes by it any more; 0: nothing of the port is left, and the service forgets
 * it. */
void vmh_tport_end(uint32_t flow_id, in_port_t lport, unsigned reason)
{
	mark(lport, false);
	if (!reason && vmh_unlikely(atomic_load(&remembered)))
		reason = VMH_R_CLOSED;
	vmh_session_detach(flow_id, reason);
}

/* The listener is about to be closed, or to be the kernel's alone. Connections that are left keep a rule that leaves SYNs
 * to the kernel (no_syns: it has that already); a port that is somebody else's by then is no harm, as the kernel's own
 * connections pass. */
void vmh_tport_leave(int fd, const struct vmh_tname *l, unsigned ifindex, unsigned lane, uint32_t flow_id, bool no_syns)
{
	uint64_t end = vmh_now_ns() + LEAVE_NS;
	struct tail *t = NULL;
	uint32_t flow = flow_id;
	bool any;

	while (vmh_trings_port_users(l->port) && vmh_now_ns() < end)
		vmh_rings_poll(64); /* most are about to end */
	any = vmh_trings_port_users(l->port);
	if (!any || !(t = vmh_heap_zero(1, sizeof(*t))) ||
	    (!no_syns && vmh_tport_attach(fd, l, ifindex, lane, 0, &flow))) {
		vmh_heap_free(t);
		vmh_tport_end(flow_id, l->port, any ? VMH_R_CLOSED : 0);
		return;
	}
	if (!no_syns)
		vmh_tport_end(flow_id, l->port, 0);
	*t = (struct tail){ .flow_id = flow, .lport = l->port };
	vmh_lock(&lock);
	t->next = tails;
	tails = t;
	atomic_store(&work, 1);
	vmh_unlock(&lock);
	vmh_worker_wake();
}

/* ---- ports for connect() ---- */

/* PORTS_MAX: it gets no more. */
static unsigned ports_of(struct block *b)
{
	unsigned n;

	vmh_lock(&lock);
	n = b->dead ? PORTS_MAX : b->n;
	vmh_unlock(&lock);
	return n;
}

static void add(struct block *b, const struct vmh_session_attach *a)
{
	bool fits;

	vmh_lock(&lock);
	fits = !b->dead && b->n < PORTS_MAX;
	if (fits) {
		b->p[b->n].port = a->req.local_port;
		b->p[b->n++].flow_id = a->flow_id;
	}
	vmh_unlock(&lock);
	if (!fits)
		vmh_tport_end(a->flow_id, a->req.local_port, 0);
}

/* Asked for together: the service takes less time for each. */
static int reserve_lot(struct block *b, unsigned count)
{
	const struct vmh_tname l = { .addr = b->laddr, .v6 = !vmh_ip_is4(&b->laddr) };
	struct vmh_session_attach lot[PORTS_AT_ONCE];
	unsigned reason = 0, no;

	for (unsigned i = 0; i < count; i++)
		lot[i] = request(-1, &l, b->ifindex, vmh_tring_ring(b->tring)->lane, VMH_ATTACH_F_PORT);
	vmh_session_attach_all(lot, (int)count);
	for (unsigned i = 0; i < count; i++) {
		no = attached(&lot[i]);
		if (!no)
			add(b, &lot[i]);
		else
			reason = no;
	}
	if (!reason)
		return 0;
	vmh_debug("no more local ports for connections on rings: %s", vmh_reason_text(reason));
	return -EADDRNOTAVAIL;
}

static int reserve(struct block *b, unsigned count)
{
	int rc = 0;

	for (unsigned n; count && !rc && ports_of(b) < PORTS_MAX; count -= n) {
		n = count < PORTS_AT_ONCE ? count : PORTS_AT_ONCE;
		rc = reserve_lot(b, n);
	}
	return rc;
}

/* All n ports have a connection to that peer. Some now; and more, ahead of the next calls, by the internal thread. True:
 * there are others than those, also where fewer were to be had than wished, or that thread was first. */
static bool reserve_more(struct block *b, unsigned n)
{
	int rc = reserve(b, n < 8 ? 1 : 8);

	vmh_lock(&lock);
	if (b->dead || b->n <= n) {
		vmh_unlock(&lock);
		return false;
	}
	b->at = n; /* the new ones */
	if (!rc && n >= 8 && b->wanted < b->n + n / 4) {
		b->wanted = b->n + n / 4 < PORTS_MAX ? b->n + n / 4 : PORTS_MAX;
		atomic_store(&work, 1);
	}
	vmh_unlock(&lock);
	if (!rc && n >= 8)
		vmh_worker_wake();
	return true;
}

static struct block *block_of(struct vmh_tring *t, const struct vmh_ip *laddr, unsigned ifindex)
{
	struct block *b;

	vmh_lock(&lock);
	for (b = blocks; b && (b->dead || b->tring != t || !vmh_ip_same(&b->laddr, laddr)); b = b->next)
		;
	if (!b && (b = vmh_heap_zero(1, sizeof(*b)))) {
		*b = (struct block){ .next = blocks, .tring = t, .laddr = *laddr, .ifindex = ifindex };
		blocks = b;
	}
	vmh_unlock(&lock);
	return b;
}

/* *n: of so many */
static int try_ports(struct block *b, struct vmh_tcps *s, struct vmh_tcp_addr *a, const struct vmh_tcp_path *path,
		     unsigned *n)
{
	int rc = -EADDRNOTAVAIL;

	vmh_lock(&lock);
	*n = b->n;
	for (unsigned i = 0; i < b->n && rc == -EADDRNOTAVAIL; i++) {
		unsigned k = b->at % b->n;

		b->at++;
		if (b->at > 2 * b->n && b->n < PORTS_AHEAD && b->wanted <= b->n) { /* twice around: more would be better */
			b->at = k + 1;
			b->wanted = 2 * b->n;
			atomic_store(&work, 1);
		}
		a->lport = b->p[k].port;
		vmh_lock(&s->io);
		rc = vmh_tcp_connect(vmh_tring_stack(b->tring), a, path, &s->opt, s, &s->conn);
		if (!rc)
			s->flow_id = b->p[k].flow_id;
		vmh_unlock(&s->io);
	}
	vmh_unlock(&lock);
	return rc;
}

int vmh_tport_connect(struct vmh_tring *t, unsigned ifindex, struct vmh_tcps *s, struct vmh_tcp_addr *a,
		      const struct vmh_tcp_path *path)
{
	struct block *b = block_of(t, &a->laddr, ifindex);
	unsigned n;
	int rc;

	if (!b)
		return -ENOMEM;
	rc = try_ports(b, s, a, path, &n);
	if (rc == -EADDRNOTAVAIL && reserve_more(b, n))
		rc = try_ports(b, s, a, path, &n);
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

/* The numbers were the old session's: in the next one they may be other flows of ours. */
void vmh_tport_session_over(void)
{
	struct tail *t;

	vmh_lock(&lock);
	while ((t = tails)) {
		tails = t->next;
		mark(t->lport, false);
		vmh_heap_free(t);
	}
	vmh_unlock(&lock);
}

/* A connection of this port is the kernel's, and the stack does not know its name as taken: no more of this port. */
void vmh_tport_retire(uint32_t flow_id)
{
	struct tail *t = vmh_heap_zero(1, sizeof(*t));

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
	vmh_heap_free(t);
}

void vmh_tport_went_home(struct vmh_tring *t, uint32_t flow_id, const struct vmh_tcp_addr *a)
{
	struct vmh_verbs_peer gone = { a->raddr, a->rport }, *left;
	struct vmh_tcp_addr *names;
	unsigned n = 0, users;

	if (vmh_tring_ring(t)->kind != VMH_RING_VERBS)
		return;
	users = vmh_trings_port_users(a->lport);
	names = vmh_heap_zero(users + 1, sizeof(*names));
	left = vmh_heap_zero(users + 1, sizeof(*left));
	users = names && left ? vmh_tring_port_names(t, a->lport, names, users) : 0;
	for (unsigned i = 0; i < users; i++)
		if (memcmp(&names[i], a, sizeof(*a)))
			left[n++] = (struct vmh_verbs_peer){ names[i].raddr, names[i].rport };
	vmh_verbs_narrow(flow_id, &gone, left, n);
	vmh_heap_free(names);
	vmh_heap_free(left);
}

/* ---- by the internal thread ---- */

static unsigned missing(struct block *b)
{
	unsigned n;

	vmh_lock(&lock);
	n = b->wanted > b->n && !b->dead && !b->full ? b->wanted - b->n : 0;
	vmh_unlock(&lock);
	return n;
}

static void grow(void)
{
	struct block *b;
	unsigned n;

	vmh_lock(&lock);
	b = blocks;
	vmh_unlock(&lock);
	for (; b; b = b->next) { /* they are never taken off */
		n = missing(b);
		if (!n || !reserve(b, n))
			continue;
		vmh_lock(&lock);
		b->full = true;
		vmh_unlock(&lock);
	}
}

static bool end_tails(void)
{
	struct tail **p, *t;
	bool any;

	for (;;) {
		vmh_lock(&lock);
		for (p = &tails; (t = *p) && vmh_trings_port_users(t->lport); p = &t->next)
			;
		if (t)
			*p = t->next;
		any = tails != NULL;
		vmh_unlock(&lock);
		if (!t)
			return any;
		vmh_tport_end(t->flow_id, t->lport, 0);
		vmh_heap_free(t);
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
	if (atomic_exchange(&marked, false))
		memset(ports, 0, sizeof(ports));
	atomic_store(&work, 0);
}
