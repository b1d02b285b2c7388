/* Where the flows of a UDP socket live: on a ring while the service grants it, on the kernel else. */
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_links.h"
#include "vmh_iomux.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <stdio.h>
#include <sys/socket.h>

#define DRAIN 65536
#define FLOWS_MAX (1 + VMH_SOCK_GROUPS) /* of a socket */

_Atomic int vmh_homesick;

/* Would another state of the network change the answer? */
static void note_homesick(unsigned reason)
{
	switch (reason) {
	case VMH_R_NO_INTERFACE: case VMH_R_IF_DOWN: case VMH_R_IF_GONE: case VMH_R_IF_MAC: case VMH_R_NO_ROUTE:
	case VMH_R_NOT_OFFLOADABLE_ADDR: case VMH_R_ATTACH_FAILED: case VMH_R_RING_FAILED:
		atomic_store(&vmh_homesick, 1);
	}
}

static bool is_multicast(in_addr_t a)
{
	return IN_MULTICAST(ntohl(a));
}

static bool is_loopback(in_addr_t a)
{
	return (ntohl(a) >> 24) == 127;
}

void vmh_sock_set_reason(struct vmh_sock *s, uint32_t reason, uint32_t detail)
{
	VMH_SET(s->stats->reason, reason);
	VMH_SET(s->stats->reason_detail, detail);
}

bool vmh_sock_entitled(const struct vmh_sock *s, unsigned ifindex)
{
	if (s->flow.id && (!s->flow.ifindex || s->flow.ifindex == ifindex))
		return true;
	for (unsigned i = 0; i < s->nmembers; i++)
		if (s->members[i].flow_id && s->members[i].ifindex == ifindex)
			return true;
	return false;
}

bool vmh_sock_any_flow(const struct vmh_sock *s)
{
	if (s->flow.id)
		return true;
	for (unsigned i = 0; i < s->nmembers; i++)
		if (s->members[i].flow_id)
			return true;
	return false;
}

/* Which ring the flow is on; a wildcard on several has none of its own. */
static void note_ring(struct vmh_sock *s)
{
	unsigned ifindex = s->flow.id ? s->flow.ifindex : 0;
	const struct vmh_ring *ring = NULL;

	for (unsigned i = 0; !s->flow.id && i < s->nmembers; i++)
		if (s->members[i].flow_id)
			ifindex = s->members[i].ifindex;
	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = __atomic_load_n(&r->next, __ATOMIC_ACQUIRE)) {
		if (atomic_load(&r->gone) || (ifindex && r->ifindex != ifindex) ||
		    vmh_lane_ring(r->ifindex, s->flow.lane) != r)
			continue;
		if (ring)
			return;
		ring = r;
	}
	if (!ring)
		return;
	if (s->rx_ring && s->rx_ring != ring)
		VMH_COUNT(s->stats->rx_migrations, 1);
	s->rx_ring = ring;
	VMH_SET(s->stats->ring_id, ring->id);
}

/* The one ring by which everything comes; NULL: there may be others. Where the port can be shared, frames of one socket
 * may come by the ring of another one. */
static struct vmh_ring *only_ring(const struct vmh_sock *s)
{
	struct vmh_ring *r;

	if (!vmh_params.ring_allocation_logic_rx || !s->flow.id || !s->flow.ifindex || s->nmembers || s->reuseaddr ||
	    s->reuseport)
		return NULL;
	r = vmh_lane_ring(s->flow.ifindex, s->flow.lane);
	return r && r->lane == s->flow.lane ? r : NULL;
}

/* Object lock held: tell everybody what rx_on is now. */
static void publish(struct vmh_sock *s)
{
	bool on = vmh_sock_any_flow(s), was = atomic_load(&s->rx_on);
	struct vmh_ring *only = only_ring(s);

	atomic_store(&s->leaving, 0);
	if (on)
		note_ring(s);
	if (atomic_exchange(&s->only_ring, only) != only && on && was)
		vmh_wake_all(); /* who sleeps does so on the old one */
	VMH_SET(s->stats->flow_id, s->flow.id);
	VMH_SET(s->stats->rx_offloaded, on);
	if (was && !on) /* until the next send says so */
		VMH_SET(s->stats->tx_offloaded, 0);
	VMH_SET(s->stats->offloaded, on || VMH_GET(s->stats->tx_offloaded));
	if (on == was)
		return;
	s->tx_cfg++; /* the entitlement to send by a ring came or went with it */
	if (on)
		atomic_store(&s->os_check, VMH_OS_FIRST);
	atomic_store(&s->rx_on, on);
	if (on)
		vmh_epoll_member_on_ring(&s->obj);
	vmh_wake_all();
}

/* Object lock held, before the first rule is made. What the kernel has queued until then is older than anything that
 * comes by the ring, and after a way back younger than what still lies here from before that. */
static void keep_order(struct vmh_sock *s)
{
	uint32_t older = atomic_load(&s->rxq_len);

	VMH_SET(s->rxq_older, older);
	if (older)
		VMH_SET(s->next_from, VMH_NEXT_OLDER);
	atomic_store(&s->os_check, VMH_OS_FIRST_YET);
}

static void forget_flows(struct vmh_sock *s)
{
	s->flow.id = 0;
	for (unsigned i = 0; i < s->nmembers; i++)
		s->members[i].flow_id = 0;
}

/* Before rules go: if the kernel socket is empty, nothing in it is ever older than what the rings brought. By poll, which
 * leaves a pending error for the call that is to tell it. */
static void settle_order(struct vmh_sock *s)
{
	struct pollfd p = { .fd = s->obj.fd, .events = POLLIN };

	if (atomic_load(&s->os_check) && vmh_sys(SYS_ppoll, &p, 1, &(struct timespec){ 0 }, NULL, 0) == 0)
		atomic_store(&s->os_check, VMH_OS_SELDOM);
}

/* Object lock held, before rules go, and with them what entitles the socket to send by a ring: what a ring has goes out,
 * and who sends now waits until we are through, behind all that. Who does not wait sends by the kernel, until publish(). */
static void hold_senders(struct vmh_sock *s)
{
	vmh_lock(&s->tx_lock);
	s->tx_cfg++;
	atomic_store(&s->leaving, 1);
	vmh_unlock(&s->tx_lock);
	vmh_sock_tx_flush(s);
}

/* Object lock held. Which flows the service is to delete: so many, in *ids. */
static unsigned leave(struct vmh_sock *s, uint32_t *ids, uint32_t reason)
{
	unsigned n = 0;

	settle_order(s);
	if (reason)
		hold_senders(s);
	if (s->session != vmh_session_id())
		return 0;
	if (s->flow.id)
		ids[n++] = s->flow.id;
	for (unsigned i = 0; i < s->nmembers; i++)
		if (s->members[i].flow_id)
			ids[n++] = s->members[i].flow_id;
	return n;
}

void vmh_sock_release_flows(struct vmh_sock *s, uint32_t reason)
{
	uint32_t ids[FLOWS_MAX];
	unsigned n;

	if (vmh_sock_any_flow(s)) {
		n = leave(s, ids, reason);
		vmh_session_detach_all(ids, (int)n, reason);
		/* nothing more is steered: what is in the ring now are the last frames, and its reader may wait at the kernel */
		if (reason)
			vmh_rings_settle();
	}
	forget_flows(s);
	publish(s);
}

struct leavers {
	bool (*goes)(struct vmh_sock *s);
	uint32_t reason, ids[VMH_DETACHES_MAX];
	struct vmh_sock *s[VMH_DETACHES_MAX];
	unsigned n, nids;
};

static void release_some(struct leavers *l)
{
	if (!l->n)
		return;
	vmh_session_detach_all(l->ids, (int)l->nids, l->reason);
	vmh_rings_settle();
	while (l->n) {
		struct vmh_sock *s = l->s[--l->n];

		forget_flows(s);
		publish(s);
		vmh_unlock(&s->obj.lock);
		vmh_obj_put(&s->obj);
	}
	l->nids = 0;
}

static void add_leaver(struct vmh_sock *s, void *arg)
{
	struct leavers *l = arg;

	if (!atomic_load(&s->rx_on) || !vmh_trylock(&s->obj.lock))
		return;
	if (!vmh_sock_any_flow(s) || !l->goes(s)) {
		vmh_unlock(&s->obj.lock);
		return;
	}
	vmh_obj_hold(&s->obj);
	l->s[l->n++] = s;
	l->nids += leave(s, l->ids + l->nids, l->reason);
	if (l->nids > VMH_DETACHES_MAX - FLOWS_MAX || l->n == VMH_DETACHES_MAX)
		release_some(l);
}

void vmh_sock_release_all(bool (*goes)(struct vmh_sock *s), uint32_t reason)
{
	struct leavers l = { .goes = goes, .reason = reason };

	vmh_sock_each(add_leaver, &l);
	release_some(&l);
}

static void read_addresses(struct vmh_sock *s, int fd)
{
	struct sockaddr_in a = { 0 }, p = { 0 };
	socklen_t len = sizeof(a);

	if (vmh_sys(SYS_getsockname, fd, &a, &len) < 0)
		return;
	len = sizeof(p);
	if (vmh_sys(SYS_getpeername, fd, &p, &len) < 0)
		memset(&p, 0, sizeof(p));
	if (s->laddr != a.sin_addr.s_addr || s->lport != a.sin_port || s->raddr != p.sin_addr.s_addr ||
	    s->rport != p.sin_port)
		s->tx_cfg++;
	bool refile = s->lport != a.sin_port;
	s->laddr = a.sin_addr.s_addr;
	s->lport = a.sin_port;
	s->raddr = p.sin_addr.s_addr;
	s->rport = p.sin_port;
	if (refile)
		vmh_sock_demux(s, s->lport);
	atomic_fetch_add(&vmh_bindings, 1);
	vmh_map4(s->stats->local_addr, s->laddr);
	vmh_map4(s->stats->remote_addr, s->raddr);
	VMH_SET(s->stats->local_port, s->lport);
	VMH_SET(s->stats->remote_port, s->rport);
}

/* Of a connected socket: is the rule for its peer alone? VMA_UDP_3T_RULES=1 has the whole port come by the ring, where
 * datagrams of others are dropped. Not where the port may be shared: they are another socket's there. */
static bool wants_five(const struct vmh_sock *s)
{
	return !vmh_params.udp_3t_rules || s->reuseaddr || s->reuseport || is_multicast(s->raddr) || !s->laddr;
}

/* The unicast flow that the state of the socket asks for: 0, or why there is none. */
static unsigned wanted_flow(const struct vmh_sock *s, struct vmh_flow *f)
{
	unsigned reason;

	*f = (struct vmh_flow){ .kind = VMH_FLOW_3T, .laddr = s->laddr, .lport = s->lport };
	if (is_loopback(s->laddr))
		return VMH_R_LOOPBACK;
	reason = vmh_sock_kept_receiver(s, s->laddr);
	/* an answer comes from the address that the request was translated to */
	if (!reason && (s->rport || !VMH_GET(s->port_chosen)) && vmh_net_translates())
		reason = VMH_R_NAT;
	if (reason)
		return reason;
	if (s->rport) {
		struct vmh_nexthop hop;

		if (wants_five(s)) {
			f->kind = VMH_FLOW_5T;
			f->raddr = s->raddr;
			f->rport = s->rport;
		} else {
			f->paddr = s->raddr;
			f->pport = s->rport;
		}
		/* connected to a group nothing arrives, but the flow entitles the sender */
		reason = vmh_net_resolve(s->raddr, s->laddr,
					 !s->bound_if && is_multicast(s->raddr) ? s->mc_if : s->bound_if, &hop);
		if (reason && reason != VMH_R_NO_NEIGHBOUR)
			return reason;
		f->ifindex = hop.ifindex;
		return 0;
	}
	if (s->reuseport)
		return VMH_R_PORT_SHARED;
	if (is_multicast(s->laddr))
		return VMH_R_NONE; /* bound to a group: its memberships carry it */
	if (s->laddr) {
		if (vmh_net_is_broadcast(s->laddr))
			return VMH_R_BROADCAST;
		if (!vmh_net_is_local(s->laddr, &f->ifindex))
			return VMH_R_NOT_OFFLOADABLE_ADDR;
		return vmh_link_served(f->ifindex);
	}
	f->ifindex = s->bound_if;
	return s->bound_if ? vmh_link_served(s->bound_if) : 0;
}

/* The rings that the flow needs; 0 if at least one is there. */
static unsigned need_rings(unsigned ifindex, unsigned lane)
{
	unsigned links[VMH_NET_LINKS], reason = VMH_R_NO_INTERFACE;
	bool any = false;
	int n;

	if (ifindex) {
		vmh_session_ring(ifindex, lane, &reason);
		return reason;
	}
	n = vmh_net_served_links(links, VMH_NET_LINKS);
	for (int i = 0; i < n; i++) {
		unsigned why;

		if (vmh_session_ring(links[i], lane, &why))
			any = true;
		else
			reason = why;
	}
	return any ? 0 : reason;
}

static unsigned attach(struct vmh_sock *s, int fd, struct vmh_flow *f)
{
	struct vmh_msg_attach req = { .kind = f->kind, .ifindex = f->ifindex, .fd = (unsigned)s->obj.fd,
				      .proto = IPPROTO_UDP, .family = 4, .local_port = f->lport,
				      .remote_port = f->rport ? f->rport : f->pport, .lane = f->lane,
				      .flags = atomic_load(&s->shared) ? VMH_ATTACH_F_WAS_SHARED : 0 };
	unsigned reason = need_rings(f->ifindex, f->lane);

	if (vmh_unlikely(s->stamping & SOF_TIMESTAMPING_RAW_HARDWARE))
		req.flags |= VMH_ATTACH_F_STAMP;
	if (!reason)
		reason = vmh_sock_stamped_by_adapter(s, fd, f->ifindex);
	if (reason)
		return reason;
	vmh_map4(req.local_addr, f->laddr);
	vmh_map4(req.remote_addr, f->raddr ? f->raddr : f->paddr);
	s->session = vmh_session_id();
	vmh_session_attach(&req, fd, &f->id, &reason);
	if (reason)
		return reason;
	reason = vmh_verbs_attach(f, s);
	if (reason)
		vmh_session_detach(f->id, reason);
	return reason;
}

static bool same_flow(const struct vmh_flow *a, const struct vmh_flow *b)
{
	return a->kind == b->kind && a->ifindex == b->ifindex && a->laddr == b->laddr && a->raddr == b->raddr &&
	       a->lport == b->lport && a->rport == b->rport && a->lane == b->lane &&
	       a->paddr == b->paddr && a->pport == b->pport;
}

static unsigned attach_group(struct vmh_sock *s, int fd, struct vmh_member *m)
{
	struct vmh_flow f = { .kind = VMH_FLOW_MC, .ifindex = m->ifindex, .laddr = m->group, .lport = s->lport,
			      .lane = s->flow.lane };
	unsigned reason;

	if (m->flow_id)
		return 0;
	if (s->laddr && s->laddr != m->group)
		return VMH_R_NONE; /* bound to another address: the kernel would not deliver the group either */
	reason = vmh_sock_kept_receiver(s, m->group);
	if (!reason)
		reason = vmh_link_served(m->ifindex);
	if (!reason)
		reason = attach(s, fd, &f);
	m->flow_id = reason ? 0 : f.id;
	return reason;
}

/* Object lock held. Rings could not wake who waits in the kernel: the last one of them has the worker ask again. Later
 * calls wait where both do. */
static void put_off(struct vmh_sock *s)
{
	vmh_sock_set_reason(s, VMH_R_RECEIVER_WAITS, 0);
	atomic_store(&s->put_off, 1);
	if (!atomic_load(&s->in_kernel))
		vmh_sock_comes_out(s);
}

void vmh_sock_converge(struct vmh_sock *s, int fd)
{
	bool was_on = atomic_load(&s->rx_on);
	struct vmh_flow want;
	unsigned reason, why, lane;

	atomic_store(&s->put_off, 0);
	if (!s->lport) {
		vmh_sock_release_flows(s, VMH_R_NOT_TRIED);
		vmh_sock_set_reason(s, VMH_R_NOT_TRIED, 0);
		return;
	}
	if (is_loopback(s->laddr) && !s->nmembers) {
		vmh_sock_release_flows(s, VMH_R_LOOPBACK);
		vmh_sock_set_reason(s, VMH_R_LOOPBACK, 0);
		return;
	}
	lane = vmh_lane_of(&s->rx_lane, VMH_LANE_RX, fd, s->laddr);
	reason = vmh_session_open();
	if (reason) {
		vmh_sock_release_flows(s, reason);
		vmh_sock_set_reason(s, reason, 0);
		return;
	}
	vmh_session_serve();
	if (s->session != vmh_session_id())
		forget_flows(s);
	if (!was_on && atomic_load(&s->in_kernel)) {
		put_off(s);
		return;
	}
	if (!was_on)
		keep_order(s);
	reason = wanted_flow(s, &want);
	want.lane = lane;
	if (!s->flow.id || reason || !same_flow(&s->flow, &want)) {
		struct vmh_flow old = s->flow;

		if (old.id && reason)
			settle_order(s);
		s->flow.id = 0;
		s->flow.lane = lane;
		if (!reason && !is_multicast(want.laddr))
			reason = attach(s, fd, &want);
		if (!reason && want.id)
			s->flow = want;
		if (old.id && reason)
			hold_senders(s);
		/* with a cause the service waits until nothing more comes by the old ring */
		if (old.id)
			vmh_session_detach(old.id, reason || old.lane == lane ? reason : VMH_R_MOVED);
		if (old.id)
			vmh_rings_settle();
	}
	for (unsigned i = 0; i < s->nmembers; i++) {
		if (!s->members[i].group)
			continue;
		why = attach_group(s, fd, &s->members[i]);
		if (why && !reason)
			reason = why;
	}
	vmh_sock_set_reason(s, reason, 0);
	note_homesick(reason);
	publish(s);
	atomic_compare_exchange_strong(&s->os_check, &(uint8_t){ VMH_OS_FIRST_YET }, VMH_OS_ONCE);
	if (!was_on && atomic_load(&s->rx_on) && atomic_load(&s->in_kernel)) { /* it went in while the rule was made */
		vmh_sock_release_flows(s, VMH_R_RECEIVER_WAITS);
		vmh_sock_give_back(s, fd);
		put_off(s);
	}
}

/* Calls on such a socket are passed on as they are. What may come to a ring by itself is not plain. */
static bool is_plain(const struct vmh_sock *s)
{
	if (s->home)
		return true;
	if (atomic_load(&s->shared) || vmh_sock_any_flow(s) || !s->lport)
		return false;
	if (vmh_params.rx_poll_init)
		return false; /* its receives have something to do first */
	return VMH_GET(s->stats->reason) == VMH_R_LOOPBACK || !atomic_load(&vmh_worker_runs);
}

void vmh_sock_update(struct vmh_sock *s, int fd)
{
	if (!s->home && !atomic_load(&s->shared))
		vmh_sock_converge(s, fd);
	atomic_store(&s->plain, is_plain(s));
}

/* Each group by the ring that the lane has now: the new rule first, so that no datagram is the kernel's. */
static void move_groups(struct vmh_sock *s, int fd)
{
	for (unsigned i = 0; i < s->nmembers; i++) {
		struct vmh_member *m = &s->members[i];
		uint32_t old = m->flow_id;

		if (!old)
			continue;
		m->flow_id = 0;
		attach_group(s, fd, m);
		vmh_session_detach(old, VMH_R_MOVED);
	}
}

void vmh_sock_migrate(struct vmh_sock *s, int fd)
{
	if (!vmh_trylock(&s->obj.lock))
		return;
	if (!s->home && !atomic_load(&s->shared) && vmh_sock_any_flow(s) && s->session == vmh_session_id() &&
	    vmh_lane_move(&s->rx_lane, VMH_LANE_RX)) {
		vmh_sock_converge(s, fd);
		move_groups(s, fd);
		/* what still comes by the old ring is older, but it comes to the queue by whoever polls that one */
		vmh_rings_poll(DRAIN);
		publish(s);
	}
	vmh_unlock(&s->obj.lock);
}

void vmh_sock_bound(struct vmh_sock *s, int fd)
{
	vmh_conf_refresh();
	vmh_lock(&s->obj.lock);
	read_addresses(s, fd);
	vmh_sock_update(s, fd);
	vmh_unlock(&s->obj.lock);
}

int vmh_sock_connect(struct vmh_sock *s, int fd, const struct sockaddr *a, socklen_t len)
{
	unsigned kept;
	long r;

	vmh_conf_refresh();
	vmh_lock(&s->obj.lock);
	/* what came before the call stays readable, from whomever it is */
	if (vmh_sock_any_flow(s))
		vmh_rings_settle();
	r = vmh_sys(SYS_connect, fd, a, len);
	if (VMH_GET(s->tx_since_rx) && !VMH_GET(s->error_alert))
		VMH_SET(s->error_alert, 1); /* an error of what was sent before is told after connect as well */
	VMH_SET(s->heard, 0);
	VMH_SET(s->tx_since_rx, 0);
	read_addresses(s, fd);
	kept = vmh_sock_kept_connected(s);
	if (!kept)
		vmh_sock_update(s, fd);
	vmh_unlock(&s->obj.lock);
	if (kept)
		vmh_sock_home(s, kept, 0); /* for good, as the manual says of such a rule */
	return (int)r;
}

void vmh_sock_home(struct vmh_sock *s, uint32_t reason, uint32_t detail)
{
	vmh_lock(&s->obj.lock);
	if (!s->home) {
		s->home = reason;
		s->home_detail = detail;
		if (vmh_sock_any_flow(s))
			VMH_COUNT(vmh_stats->calls_home, 1);
		vmh_sock_release_flows(s, reason);
		if (reason == VMH_R_FD_PASSED || reason == VMH_R_UNKNOWN_CALL || reason == VMH_R_SENDFILE ||
		    reason == VMH_R_IO_URING)
			vmh_sock_give_back(s, s->obj.fd); /* somebody else reads on */
		s->tx_cfg++;
		VMH_SET(s->stats->tx_offloaded, 0);
		VMH_SET(s->stats->offloaded, 0);
		vmh_sock_set_reason(s, reason, detail);
		atomic_store(&s->plain, 1);
		vmh_debug("fd %d goes home to the kernel: %s", s->obj.fd, vmh_reason_text(reason));
	}
	vmh_unlock(&s->obj.lock);
}

struct home_all {
	uint32_t reason;
	bool for_good;
};

static bool goes_home(struct vmh_sock *s)
{
	if (!s->home)
		VMH_COUNT(vmh_stats->calls_home, 1);
	return !s->home;
}

static void home_one(struct vmh_sock *s, void *arg)
{
	const struct home_all *h = arg;

	if (h->for_good) {
		vmh_sock_home(s, h->reason, 0);
		return;
	}
	vmh_lock(&s->obj.lock);
	if (!s->home) {
		if (vmh_sock_any_flow(s))
			VMH_COUNT(vmh_stats->calls_home, 1);
		vmh_sock_release_flows(s, h->reason);
		s->tx_cfg++;
		VMH_SET(s->stats->tx_offloaded, 0);
		VMH_SET(s->stats->offloaded, 0);
		vmh_sock_set_reason(s, h->reason, 0);
	}
	vmh_unlock(&s->obj.lock);
}

void vmh_sock_home_all(uint32_t reason, bool for_good)
{
	struct home_all h = { reason, for_good };

	vmh_sock_release_all(goes_home, reason);
	vmh_sock_each(home_one, &h);
}

static void back_one(struct vmh_sock *s, void *arg)
{
	(void)arg;
	vmh_lock(&s->obj.lock);
	s->tx_cfg++;
	if (!s->home && s->lport)
		vmh_sock_update(s, s->obj.fd);
	vmh_unlock(&s->obj.lock);
}

void vmh_sock_service_back(void)
{
	vmh_sock_each(back_one, NULL);
}

struct gone {
	struct vmh_ring *ring;
	uint32_t reason, flow_id;
};

/* Of a lane without a ring of its own the lowest lane's carried the flow. */
static bool was_carried_by(const struct vmh_sock *s, const struct vmh_ring *r)
{
	const struct vmh_ring *now = vmh_lane_ring(r->ifindex, s->flow.lane);

	return s->flow.lane == r->lane || !now || (now->lane != s->flow.lane && now->lane > r->lane);
}

/* Where the interface has other rings, the service has them carry the flow: it is not to, until the socket asks. */
static bool let_go(uint32_t *flow_id, const struct gone *g)
{
	if (vmh_lane_ring(g->ring->ifindex, 0))
		vmh_session_detach(*flow_id, g->reason);
	*flow_id = 0;
	return true;
}

static void ring_gone_one(struct vmh_sock *s, void *arg)
{
	const struct gone *g = arg;
	unsigned ifindex = g->ring->ifindex;
	bool hit = false;

	vmh_lock(&s->obj.lock);
	s->tx_cfg++; /* destinations over this ring are decided anew, with the next send */
	VMH_SET(s->stats->tx_offloaded, 0);
	/* the service has taken the rules of this interface away; wildcards live on elsewhere */
	if (was_carried_by(s, g->ring)) {
		if (s->flow.id && s->flow.ifindex == ifindex)
			hit = let_go(&s->flow.id, g);
		for (unsigned i = 0; i < s->nmembers; i++)
			if (s->members[i].flow_id && s->members[i].ifindex == ifindex)
				hit = let_go(&s->members[i].flow_id, g);
	}
	if (hit) {
		VMH_COUNT(vmh_stats->calls_home, 1);
		vmh_sock_set_reason(s, g->reason, 0);
		note_homesick(g->reason);
	}
	publish(s);
	vmh_unlock(&s->obj.lock);
}

void vmh_sock_ring_gone(struct vmh_ring *r, unsigned reason)
{
	struct gone g = { .ring = r, .reason = reason };

	vmh_sock_each(ring_gone_one, &g);
}

static void flow_home_one(struct vmh_sock *s, void *arg)
{
	const struct gone *g = arg;
	bool hit = false;

	vmh_lock(&s->obj.lock);
	if (s->flow.id == g->flow_id) {
		s->flow.id = 0;
		hit = true;
	}
	for (unsigned i = 0; i < s->nmembers; i++) {
		if (s->members[i].flow_id == g->flow_id) {
			s->members[i].flow_id = 0;
			hit = true;
		}
	}
	if (hit) {
		/* not before we have the lock: the news may be older than the answer to ATTACH, and so than the rule */
		vmh_verbs_detach(g->flow_id);
		vmh_rings_settle();
		VMH_COUNT(vmh_stats->calls_home, 1);
		vmh_sock_set_reason(s, g->reason, 0);
		note_homesick(g->reason);
		publish(s);
		vmh_debug("fd %d: the service took flow %u home: %s", s->obj.fd, g->flow_id,
			  vmh_reason_text(g->reason));
	}
	vmh_unlock(&s->obj.lock);
}

void vmh_sock_flow_home(uint32_t flow_id, unsigned reason)
{
	struct gone g = { .reason = reason, .flow_id = flow_id };

	if (!flow_id)
		return;
	vmh_sock_each(flow_home_one, &g);
}

static void publish_groups(struct vmh_sock *s)
{
	unsigned n = 0;

	for (unsigned i = 0; i < s->nmembers; i++) {
		if (!s->members[i].group)
			continue;
		if (n < VMH_STATS_GROUPS)
			VMH_SET(s->stats->groups[n], s->members[i].group);
		n++;
	}
	VMH_SET(s->stats->ngroups, n);
}

void vmh_sock_join(struct vmh_sock *s, int fd, in_addr_t group, unsigned ifindex)
{
	unsigned i;

	if (!ifindex && vmh_session_open() == 0) {
		struct vmh_nexthop hop = { 0 };

		vmh_net_resolve(group, 0, 0, &hop); /* the interface is filled in whatever the answer is */
		ifindex = hop.ifindex;
	}
	for (i = 0; i < s->nmembers && s->members[i].group; i++)
		;
	VMH_SET(s->joined_ns, vmh_now_ns());
	if (i == VMH_SOCK_GROUPS) { /* the kernel has joined and delivers it */
		static _Atomic bool said;

		if (!atomic_exchange(&said, true))
			vmh_info("VMA Statistics can monitor up to %d mc groups of a socket", VMH_STATS_GROUPS);
		return;
	}
	s->members[i] = (struct vmh_member){ .group = group, .ifindex = ifindex };
	if (i == s->nmembers)
		s->nmembers++;
	publish_groups(s);
	vmh_sock_update(s, fd);
}

void vmh_sock_leave(struct vmh_sock *s, in_addr_t group, unsigned ifindex)
{
	if (atomic_load(&s->rx_on))
		vmh_rings_settle(); /* what has come before is read still */
	for (unsigned i = 0; i < s->nmembers; i++) {
		struct vmh_member *m = &s->members[i];

		if (m->group != group || (ifindex && m->ifindex && m->ifindex != ifindex))
			continue;
		if (m->flow_id)
			hold_senders(s);
		if (m->flow_id && s->session == vmh_session_id())
			vmh_session_detach(m->flow_id, VMH_R_NONE);
		*m = (struct vmh_member){ 0 };
		break;
	}
	publish_groups(s);
	publish(s);
}
