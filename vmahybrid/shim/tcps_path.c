/* The ways of connections on rings, which follow the kernel's.
 *
 * The internal thread reads the page of routes and neighbours when it has changed: the neighbour's address and the MTU
 * are the stack's at once, and a connection whose route leaves its interface goes home. What no page tells shows in
 * segments that are sent again and again: a router's ICMP error, which the kernel believes of its own connections only,
 * or a neighbour that has moved without a word. Then the kernel is asked what it has learned of the path, and in the end
 * it gets the connection, and finds the way as for any. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include <netinet/in.h>

#define EVERY_NS 20000000u
#define MOVES_MAX 4              /* homecomings in one look */
#define ASKS_MAX 4               /* of the service, in one look */
#define RETRIES 3                /* of one segment, and so long without an answer: */
#define SYNS 2                   /* sent again, or one and an ICMP error came: then it begins anew in the kernel */
#define DOUBT_MS 200             /* the kernel is asked */
#define NARROW_MS 300            /* it gets one that sends long segments by a gateway */
#define STUCK_MS 1000            /* any */
#define PATIENT_MS 10000         /* without a route. With TCP_USER_TIMEOUT: at least, or it ends here; the kernel would measure
				  * anew */
#define RESUMED_NS 3000000000u   /* in which the neighbours know each other again, where there was no route */
#define AGAIN_NS 1000000000u     /* until it may come back */
#define STUCK_NS 10000000000u    /* the same, doubled each time */
#define NARROWEST 552            /* what the kernel learns at least (route.min_pmtu): then it sends without DF */
#define LEAST 576                /* that a path has room for */
#define LEAST6 1280

static _Atomic int doubts;       /* about some connection */

struct look {
	uint64_t now;
	bool all, unsure;
	unsigned moves, asks;
};

/* What the kernel has learned of the path; by a connected socket, which sends nothing. 0: no answer. */
static uint32_t learned_mtu(const struct vmh_ip *to)
{
	const bool v4 = vmh_ip_is4(to);
	struct sockaddr_storage name;
	socklen_t len = vmh_tcps_compose(!v4, to, htons(9), &name), size = sizeof(int);
	int mtu = 0, fd = (int)vmh_sys(SYS_socket, v4 ? AF_INET : AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return 0;
	if (vmh_sys(SYS_connect, fd, &name, len) >= 0)
		vmh_sys(SYS_getsockopt, fd, v4 ? IPPROTO_IP : IPPROTO_IPV6, v4 ? IP_MTU : IPV6_MTU, &mtu, &size);
	vmh_sys(SYS_close, fd);
	return mtu > 0 ? (uint32_t)mtu : 0;
}

static bool by_gateway(const struct vmh_way *hop, const struct vmh_ip *to)
{
	return !vmh_ip_same(&hop->via, to);
}

static uint16_t narrower(const struct vmh_way *hop, const struct vmh_ring *r)
{
	return (uint16_t)(hop->mtu && hop->mtu < r->mtu ? hop->mtu : r->mtu);
}

/* The one over the ring; 0, or why it is the kernel's. */
unsigned vmh_tpath_make(struct vmh_tcps *s, const struct vmh_way *hop, const struct vmh_ip *to, struct vmh_tcp_path *path)
{
	const struct vmh_ring *r = vmh_tring_ring(s->tring);
	uint32_t learned = by_gateway(hop, to) ? learned_mtu(to) : 0;

	memcpy(path->dmac, hop->dmac, 6);
	memcpy(path->smac, r->mac, 6);
	path->mtu = narrower(hop, r);
	s->way_generation = hop->generation;
	s->way_if = hop->ifindex;
	s->learned = learned && learned < path->mtu ? (uint16_t)learned : 0;
	if (s->learned)
		path->mtu = s->learned;
	s->path = *path;
	return s->learned && s->learned <= NARROWEST ? VMH_R_ROUTE_COMPLEX : 0;
}

static void doubt(struct vmh_tcps *s)
{
	atomic_store_explicit(&s->doubt, 1, memory_order_relaxed);
	atomic_store_explicit(&doubts, 1, memory_order_release);
}

void vmh_tpath_sent_again(struct vmh_tcps *s)
{
	if (!atomic_load_explicit(&s->doubt, memory_order_relaxed))
		doubt(s);
}

void vmh_tpath_begun(struct vmh_tcps *s)
{
	if (vmh_unlikely(s->way_generation != vmh_net_generation()))
		doubt(s); /* a look in between has not seen it */
}

/* Does the kernel take a source by an interface only if its route leaves there? */
bool vmh_tpath_is_strict(const char *ifname)
{
	int all = vmh_link_setting("all", "rp_filter"), its = vmh_link_setting(ifname, "rp_filter");

	return (all > its ? all : its) == 1; /* 2: any route will do */
}

/* The answer to a SYN goes where the SYN came from. Somebody else's address in it, which the kernel would not answer, or
 * not by this interface, would open a connection with whoever sent it. */
bool vmh_tpath_none_back(const struct vmh_ip *laddr, const struct vmh_ip *raddr, unsigned ifindex, bool strict)
{
	struct vmh_way hop = { 0 };

	switch (vmh_net_way(raddr, laddr, &hop)) {
	case VMH_R_LOOPBACK:
	case VMH_R_BROADCAST:
	case VMH_R_DEST_MULTI:
		return true;
	case VMH_R_NO_ROUTE:
		return hop.generation != VMH_NET_UNSURE;
	}
	return strict && vmh_ip_is4(raddr) && hop.ifindex && hop.ifindex != ifindex;
}

/* Where the answers to the SYN went is the way, as long as the kernel's is that too. */
void vmh_tpath_accepted(struct vmh_tcps *s)
{
	struct vmh_tcp_path path;
	struct vmh_way hop = { 0 };
	unsigned reason = vmh_net_way(&s->addr.raddr, &s->addr.laddr, &hop);

	s->way_generation = hop.generation;
	s->way_if = reason && reason != VMH_R_NO_NEIGHBOUR ? 0 : hop.ifindex;
	if (reason == VMH_R_TCP_METRICS) /* since the listener came to rings */
		doubt(s);
	if (reason || hop.ifindex != s->ifindex)
		return;
	if (vmh_tpath_make(s, &hop, &s->addr.raddr, &path))
		doubt(s);
	vmh_tcp_set_path(s->conn, &path);
}

/* ---- the internal thread's ---- */

static void go_home(struct vmh_tcps *s, struct look *l, unsigned reason)
{
	if (l->moves++ >= MOVES_MAX) {
		doubt(s);
		return;
	}
	VMH_SET(s->retry_ns, l->now + (reason == VMH_R_TCP_STUCK ? (uint64_t)STUCK_NS << s->homes : AGAIN_NS));
	vmh_tcps_rest(s, reason);
}

static void ask_neighbour(struct look *l, const struct vmh_way *hop)
{
	if (l->asks++ < ASKS_MAX && !vmh_ip_any(&hop->via))
		vmh_session_neigh_of(hop->ifindex, &hop->via);
}

static void set_path(struct vmh_tcps *s, const struct vmh_tcp_path *p)
{
	if (!memcmp(p, &s->path, sizeof(*p)))
		return;
	vmh_lock(&s->io);
	if (s->conn && vmh_tcps_state(s) == VMH_TCPS_RING) {
		s->path = *p;
		vmh_tcp_set_path(s->conn, p);
		vmh_tcps_refresh(s);
	}
	vmh_unlock(&s->io);
	vmh_tring_flush(s->tring);
	vmh_debug("fd %d: the TCP connection has another way: MTU %u, next hop %02x:%02x:%02x:%02x:%02x:%02x", s->obj.fd,
		  p->mtu, p->dmac[0], p->dmac[1], p->dmac[2], p->dmac[3], p->dmac[4], p->dmac[5]);
}

/* The kernel would not send either, or the service says what is to be done. */
static bool is_mute(const struct vmh_tcps *s, const struct vmh_way *hop, unsigned reason)
{
	if (!reason || reason == VMH_R_NO_NEIGHBOUR || reason == VMH_R_TCP_METRICS)
		return false;
	return reason == VMH_R_NO_ROUTE || reason == VMH_R_IF_DOWN || reason == VMH_R_NO_SERVICE ||
	       reason == VMH_R_SERVICE_GONE || hop->ifindex == s->ifindex;
}

/* As the route has it now; or why it is not the ring's. */
static unsigned follow(struct vmh_tcps *s, struct look *l, const struct vmh_ip *to, const struct vmh_way *hop, unsigned reason)
{
	const struct vmh_ring *r = vmh_tring_ring(s->tring);
	uint32_t way = reason && reason != VMH_R_NO_NEIGHBOUR ? 0 : hop->ifindex;
	struct vmh_tcp_path p = s->path;

	if (reason == VMH_R_TCP_METRICS)
		return reason;
	if (way != s->ifindex)
		return way == s->way_if ? 0 : VMH_R_TCP_ROUTE; /* the same: since it was accepted */
	s->way_if = way;
	memcpy(p.smac, r->mac, 6);
	p.mtu = narrower(hop, r);
	if (reason)
		ask_neighbour(l, hop);
	else
		memcpy(p.dmac, hop->dmac, 6);
	if (by_gateway(hop, to) && memcmp(p.dmac, s->path.dmac, 6))
		s->learned = (uint16_t)learned_mtu(to);
	if (s->learned && s->learned < p.mtu)
		p.mtu = s->learned;
	if (p.mtu < (vmh_ip_is4(to) ? LEAST : LEAST6))
		return VMH_R_TCP_ROUTE;
	set_path(s, &p);
	return 0;
}

/* What was under way when there was no route was lost. */
static void resume(struct vmh_tcps *s, const struct look *l)
{
	s->nowhere = 0;
	s->resumed_ns = l->now;
	vmh_lock(&s->io);
	if (s->conn && vmh_tcps_state(s) == VMH_TCPS_RING) {
		vmh_tcp_resume(s->conn);
		vmh_tcps_refresh(s);
	}
	vmh_unlock(&s->io);
	vmh_tring_flush(s->tring);
}

/* Segments were sent again, and may be still. */
static unsigned look_at_stuck(struct vmh_tcps *s, struct look *l, const struct vmh_ip *to, const struct vmh_way *hop)
{
	struct vmh_tcp_path p = s->path;
	struct vmh_tcp_info i;
	uint32_t learned, limit;

	if (!vmh_tcps_info(s, &i) || !i.retries)
		return 0;
	doubt(s);
	if (i.state == VMH_TCP_SYN_SENT) { /* a router may have said why, to the kernel */
		ask_neighbour(l, hop);
		return i.retries >= SYNS || vmh_ticmp_heard(!vmh_ip_is4(to), l->now) ? VMH_R_TCP_STUCK : 0;
	}
	if (i.retries < RETRIES || i.pcb.rtime_ms < DOUBT_MS || l->now - s->resumed_ns < RESUMED_NS)
		return 0;
	limit = s->nowhere ? PATIENT_MS : by_gateway(hop, to) && i.pcb.first_unacked.len + 40 > LEAST ? NARROW_MS : STUCK_MS;
	learned = by_gateway(hop, to) && !s->nowhere ? learned_mtu(to) : 0;
	if (learned && learned < p.mtu && learned >= LEAST) {
		s->learned = p.mtu = (uint16_t)learned;
		set_path(s, &p);
		return 0;
	}
	if (limit == STUCK_MS && s->opt.user_timeout_ms && s->opt.user_timeout_ms < PATIENT_MS)
		return 0;
	return i.pcb.rtime_ms < limit ? 0 : VMH_R_TCP_STUCK;
}

/* Object lock held. 0, or why it goes home. */
static unsigned judge(struct vmh_tcps *s, struct look *l)
{
	bool doubted = atomic_exchange(&s->doubt, 0);
	struct vmh_way hop = { 0 };
	struct vmh_tcp_addr a;
	unsigned reason, home = 0;

	if (vmh_tcps_state(s) != VMH_TCPS_RING || !s->conn)
		return 0;
	vmh_tcp_address(s->conn, &a);
	reason = vmh_net_way(&a.raddr, &a.laddr, &hop);
	if (hop.generation == VMH_NET_UNSURE) {
		l->unsure = true;
		if (doubted)
			doubt(s);
		return 0;
	}
	if (!is_mute(s, &hop, reason))
		home = follow(s, l, &a.raddr, &hop, reason);
	if (reason == VMH_R_NO_ROUTE || reason == VMH_R_IF_DOWN)
		s->nowhere = 1;
	else if (s->nowhere && !home)
		resume(s, l);
	return home || !doubted ? home : look_at_stuck(s, l, &a.raddr, &hop);
}

/* Where a ring has SYNs for it and it can't listen there, they have to be the kernel's. */
static void look_at_listener(struct vmh_tcps *s, struct look *l)
{
	struct vmh_ring *missed;
	int has = vmh_tlisten_has_metrics(s);
	unsigned reason;

	atomic_store(&s->doubt, 0);
	missed = atomic_exchange(&s->missed, NULL);
	reason = has > 0 ? VMH_R_TCP_METRICS : vmh_tlisten_join(s, missed);
	l->unsure |= has < 0;
	if (reason == VMH_R_NOT_TRIED) {
		l->unsure = true;
		if (missed)
			atomic_store(&s->missed, missed);
	} else if (reason) {
		vmh_tcps_home(s, reason, false);
	}
}

static void look_at(struct vmh_tcps *s, struct look *l)
{
	unsigned reason;

	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN) {
		look_at_listener(s, l);
		return;
	}
	if (!vmh_trylock(&s->obj.lock)) { /* it is being closed or moved, or next time */
		doubt(s);
		return;
	}
	reason = judge(s, l);
	vmh_unlock(&s->obj.lock);
	if (reason)
		go_home(s, l, reason);
}

static void glance_at(struct vmh_tcps *s, void *arg)
{
	struct look *l = arg;
	unsigned state = vmh_tcps_state(s);

	if ((state != VMH_TCPS_RING && state != VMH_TCPS_LISTEN) ||
	    (!l->all && !atomic_load_explicit(&s->doubt, memory_order_relaxed)))
		return;
	vmh_obj_hold(&s->obj);
	if (!atomic_load(&s->obj.closed))
		look_at(s, l);
	vmh_obj_put(&s->obj);
}

void vmh_tpath_look(void)
{
	static uint64_t followed, looked_ns;
	uint64_t generation = vmh_net_generation();
	struct look l = { .all = generation && generation != followed };

	if (!l.all && !atomic_load_explicit(&doubts, memory_order_acquire))
		return;
	l.now = vmh_now_ns();
	if (l.now - looked_ns < EVERY_NS)
		return;
	looked_ns = l.now;
	atomic_store(&doubts, 0);
	vmh_tcps_glance(glance_at, &l);
	if (l.all)
		followed = l.unsure ? VMH_NET_UNSURE : generation;
}
