/* Sending on a UDP socket: over a ring where the destination is worth it, through the kernel else. */
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_iomux.h"
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <netinet/in.h>
#include <sys/socket.h>

#define FULL_RETRIES 256  /* kicks before a full ring hands a datagram to the kernel */
#define NEVER_ON_RING (MSG_OOB | MSG_MORE | MSG_DONTROUTE | MSG_PROXY | MSG_ZEROCOPY | MSG_FASTOPEN)
#define ERROR_CHECK_FIRST 16         /* sends to a peer that never answered */
#define ERROR_CHECK_EVERY 128
#define ERROR_CHECK_NS 1000000ull
#define DUMMY_BYTES 264              /* as the peer's */
#define ERROR_ALERT 64               /* sends after an error: more are to be expected */

/* why: of reasons.def, for the statistics; 0 where the call is bound to fail or no reason is known. */
VMH_COLD static ssize_t by_kernel(struct vmh_sock *s, int fd, const struct msghdr *m, int flags, uint32_t why)
{
	bool alone = vmh_tx_alone(s->stats);
	ssize_t r;

	vmh_stats_look();
	vmh_sock_tx_flush(s); /* of one sendmmsg: what a ring was given before leaves before */
	r = vmh_real_sendmsg(fd, m, flags);
	if (r >= 0) {
		VMH_COUNT_BY(alone, s->stats->tx_os_packets, 1);
		VMH_COUNT_BY(alone, s->stats->tx_os_bytes, (uint64_t)r);
		if (why)
			VMH_SET(s->stats->tx_os_reason, why);
		/* the kernel chose a port: replies to it may come by a ring */
		if (vmh_unlikely(!s->lport) && !s->home)
			vmh_sock_bound(s, fd);
	} else if (r == -EAGAIN) {
		VMH_COUNT_BY(alone, s->stats->tx_os_eagain, 1);
	} else {
		VMH_COUNT_BY(alone, s->stats->tx_os_errors, 1);
	}
	return r;
}

ssize_t vmh_sock_send_refused(struct vmh_sock *s, ssize_t r)
{
	if (r < 0)
		VMH_COUNT_BY(vmh_tx_alone(s->stats), s->stats->tx_os_errors, 1);
	return r;
}

static bool is_multicast(in_addr_t a)
{
	return IN_MULTICAST(ntohl(a));
}

/* Why the socket may not send by a ring on the interface; 0 and the ring if it may. */
static unsigned no_ring(struct vmh_sock *s, unsigned ifindex, in_addr_t saddr, struct vmh_ring **ring)
{
	unsigned why = vmh_link_served(ifindex);

	if (why)
		return why;
	if (s->lport && !vmh_sock_entitled(s, ifindex)) {
		/* refused or taken home: a ring veth would not let its datagrams out, and a rule says kernel */
		why = VMH_GET(s->stats->reason);
		return !why || why == VMH_R_NOT_TRIED ? VMH_R_NOT_OFFLOADABLE_ADDR : why;
	}
	*ring = vmh_session_ring(ifindex, vmh_lane_of(&s->tx_lane, VMH_LANE_TX, s->obj.fd, saddr), &why);
	return *ring ? 0 : why ? why : VMH_R_RING_FAILED;
}

/* As the kernel's ip_make_skb for a datagram that needs no fragments. */
static bool sets_df(uint8_t pmtudisc)
{
	return pmtudisc == IP_PMTUDISC_WANT || pmtudisc == IP_PMTUDISC_DO || pmtudisc == IP_PMTUDISC_PROBE;
}

static void decide_sizes(struct vmh_sock *s, struct vmh_dst *d, const struct vmh_nexthop *hop)
{
	unsigned mtu = hop->mtu < d->ring->mtu ? hop->mtu : d->ring->mtu;

	if (vmh_params.mtu && mtu > vmh_params.mtu)
		mtu = (unsigned)vmh_params.mtu;
	d->link_payload = d->max_payload = d->sure_payload = mtu > 28 ? mtu - 28 : 0;
	/* nobody but a router answers that a datagram is too big; PROBE, INTERFACE and OMIT don't listen */
	d->gateway = hop->via && hop->via != d->daddr && s->pmtudisc < IP_PMTUDISC_PROBE;
	if (d->gateway && d->sure_payload > VMH_PATH_SURE)
		d->sure_payload = VMH_PATH_SURE;
}

/* Object lock held. Decides where daddr:dport is sent from, and makes the header for it. */
static void decide(struct vmh_sock *s, struct vmh_dst *d)
{
	struct vmh_nexthop hop = { 0 };
	in_addr_t saddr = is_multicast(s->laddr) ? 0 : s->laddr;
	bool mc = is_multicast(d->daddr);
	unsigned oif = s->bound_if, reason;

	d->cfg = s->tx_cfg;
	d->generation = vmh_net_generation();
	d->ring = NULL;
	if (atomic_load(&s->shared)) {
		d->reason = VMH_R_FORK;
		return;
	}
	if (mc && s->mc_loop) {
		d->reason = VMH_R_MULTICAST_LOOP;
		return;
	}
	if (mc && !oif)
		oif = s->mc_if;
	if (mc && !saddr)
		saddr = s->mc_if_addr;
	reason = vmh_sock_sends_stamped(s);
	if (!reason && vmh_net_translates())
		reason = VMH_R_NAT;
	if (!reason)
		reason = vmh_sock_kept_sender(d->daddr, d->dport);
	if (!reason && saddr && !vmh_net_is_local(saddr, NULL))
		reason = VMH_R_NOT_OFFLOADABLE_ADDR; /* removed since bind or connect, or no address to send from */
	if (reason) {
		d->reason = reason;
		return;
	}
	reason = vmh_net_resolve(d->daddr, saddr, oif, &hop);
	d->generation = hop.generation ? hop.generation : d->generation;
	if (!reason || reason == VMH_R_NO_NEIGHBOUR) {
		unsigned why = no_ring(s, hop.ifindex, hop.saddr, &d->ring);

		if (why)
			reason = why;
		else if (hop.via)
			vmh_session_neigh(hop.ifindex, hop.via); /* resolve it, keep it fresh */
	}
	/* on its way through a ring veth a frame loses the priority, and a QP's has no tag */
	if (!reason && s->priority && d->ring->kind != VMH_RING_DIRECT && vmh_net_is_vlan(hop.ifindex))
		reason = VMH_R_PRIORITY;
	d->reason = reason;
	if (reason) {
		d->ring = NULL;
		return;
	}
	decide_sizes(s, d, &hop);
	vmh_frame_hdr_init(&d->hdr, hop.dmac, d->ring->mac, hop.saddr, d->daddr, s->lport, d->dport,
			   mc ? s->mc_ttl : s->ttl, s->tos, sets_df(s->pmtudisc));
	d->hdr.priority = s->priority;
}

static unsigned slot_of(in_addr_t addr, in_port_t port)
{
	uint32_t h = addr * 2654435761u ^ port * 40503u;

	return (h >> 16 ^ h) & (VMH_SOCK_DSTS - 1);
}

static inline bool current(const struct vmh_sock *s, const struct vmh_dst *d, in_addr_t addr, in_port_t port)
{
	return d->daddr == addr && d->dport == port && d->cfg == s->tx_cfg &&
	       d->generation == vmh_net_generation() && (!d->ring || !atomic_load_explicit(&d->ring->gone, memory_order_relaxed));
}

/* VMA_WAIT_AFTER_JOIN_MSEC: a switch may take its time for a new member, whose own first packet would be lost. */
static void wait_after_join(const struct vmh_sock *s, in_addr_t group)
{
	uint64_t end = VMH_GET(s->joined_ns) + (uint64_t)vmh_params.wait_after_join_msec * 1000000u, now = vmh_now_ns();
	struct timespec left;

	if (!VMH_GET(s->joined_ns) || !is_multicast(group) || now >= end)
		return;
	left = (struct timespec){ (time_t)((end - now) / 1000000000u), (long)((end - now) % 1000000000u) };
	vmh_sys(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &left, NULL);
}

/* Make the cache slot current. The socket gets its port here if it has none and a ring will be used. */
VMH_COLD static void refresh(struct vmh_sock *s, int fd, in_addr_t addr, in_port_t port)
{
	struct vmh_dst d = { .daddr = addr, .dport = port };

	if (vmh_unlikely(vmh_params.wait_after_join_msec))
		wait_after_join(s, addr);
	vmh_lock(&s->obj.lock);
	decide(s, &d);
	if (!d.reason && !s->lport) {
		struct sockaddr_in any = { .sin_family = AF_INET };

		vmh_unlock(&s->obj.lock);
		/* what sendto would do by itself, now, so that the port is known */
		vmh_sys(SYS_bind, fd, &any, sizeof(any));
		vmh_sock_bound(s, fd);
		vmh_lock(&s->obj.lock);
		decide(s, &d);
		if (!s->lport)
			d.reason = VMH_R_NOT_TRIED;
	}
	if (d.reason != VMH_R_LOOPBACK)
		vmh_session_serve();
	vmh_lock(&s->tx_lock);
	struct vmh_dst *old = &s->dsts[slot_of(addr, port)];

	if (old->daddr == addr && old->dport == port)
		d.was = old->ring ? old->ring : old->was;
	if (d.ring && d.was && d.ring != d.was)
		VMH_COUNT(s->stats->tx_migrations, 1);
	*old = d;
	vmh_unlock(&s->tx_lock);
	VMH_SET(s->stats->tx_offloaded, !d.reason);
	VMH_SET(s->stats->offloaded, !d.reason || VMH_GET(s->stats->rx_offloaded));
	if (d.ring)
		VMH_SET(s->stats->ring_id, d.ring->id);
	/* a socket that only sends is explained by its last destination */
	if (d.reason && !atomic_load(&s->rx_on) && !s->home)
		vmh_sock_set_reason(s, d.reason, 0);
	else if (!d.reason && !s->home && !s->nmembers && VMH_GET(s->stats->reason) == VMH_R_NOT_TRIED)
		vmh_sock_set_reason(s, VMH_R_NONE, 0);
	vmh_unlock(&s->obj.lock);
}

/* VMA_TRIGGER_DUMMY_SEND_GETSOCKNAME: everything that a send touches but the ring's descriptors. */
void vmh_sock_dummy_send(struct vmh_sock *s, int fd)
{
	static const unsigned char nothing[DUMMY_BYTES];
	const struct iovec v = { .iov_base = (void *)nothing, .iov_len = sizeof(nothing) };
	unsigned char frame[DUMMY_BYTES + 64];
	struct vmh_dst *d;

	if (s->home || !s->rport || vmh_session_open())
		return;
	d = &s->dsts[slot_of(s->raddr, s->rport)];
	if (!current(s, d, s->raddr, s->rport))
		refresh(s, fd, s->raddr, s->rport);
	vmh_lock(&s->tx_lock);
	if (!d->reason && d->ring && vmh_frame_build(frame, &d->hdr, 0, &v, 1, sizeof(nothing)))
		VMH_COUNT(s->stats->tx_dummy, 1);
	vmh_unlock(&s->tx_lock);
}

void vmh_sock_path_shrank(struct vmh_sock *s)
{
	vmh_lock(&s->tx_lock);
	vmh_path_forget(s->raddr);
	s->dsts[slot_of(s->raddr, s->rport)].asked = 0;
	vmh_unlock(&s->tx_lock);
}

/* ICMP errors are in the kernel socket, and asking it is a system call: at every send where errors are wanted
 * (IP_RECVERR) or came lately, else by time, and not at all while every send is answered. */
static bool error_due(struct vmh_sock *s, uint32_t n)
{
	uint32_t alert = VMH_GET(s->error_alert);

	if (s->recverr)
		return true;
	if (alert) {
		VMH_SET(s->error_alert, alert - 1);
		return true;
	}
	if (n == 1)
		return false;
	if ((n <= ERROR_CHECK_FIRST && !VMH_GET(s->heard)) || n % ERROR_CHECK_EVERY == 0)
		return true;
	return vmh_due(&s->error_asked_ns, vmh_now_ns(), ERROR_CHECK_NS);
}

static int pending_error(struct vmh_sock *s, int fd)
{
	int err = 0;
	socklen_t len = sizeof(err);
	uint32_t n = VMH_GET(s->tx_since_rx) + 1;

	VMH_SET(s->tx_since_rx, n);
	if (!error_due(s, n))
		return 0;
	vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_ERROR, &err, &len);
	if (err)
		VMH_SET(s->error_alert, ERROR_ALERT);
	if (err == EMSGSIZE)
		vmh_sock_path_shrank(s);
	return -err;
}

/* Posts; -EAGAIN when the ring stayed full. tx_lock held. */
static int post(struct vmh_ring *ring, const struct vmh_frame_hdr *h, const struct msghdr *m, size_t len, bool more)
{
	for (int i = 0;; i++) {
		unsigned how = (more ? VMH_SEND_MORE : 0) | (i ? VMH_SEND_AGAIN : 0);
		int r = vmh_ring_send(ring, h, m->msg_iov, (int)m->msg_iovlen, len, how);

		if (r != -EAGAIN || i == FULL_RETRIES)
			return r;
		vmh_ring_kick(ring);
		vmh_cpu_relax();
	}
}

/* Another thread or core sends by now: its ring, from the next datagram on. */
VMH_COLD static void migrate(struct vmh_sock *s)
{
	if (!vmh_trylock(&s->obj.lock))
		return;
	if (vmh_lane_move(&s->tx_lane, VMH_LANE_TX))
		s->tx_cfg++;
	vmh_unlock(&s->obj.lock);
}

static bool is_nonblocking(const struct vmh_sock *s, int flags)
{
	return (flags & MSG_DONTWAIT) || atomic_load_explicit(&s->nonblock, memory_order_relaxed);
}

static ssize_t by_ring(struct vmh_sock *s, int fd, const struct msghdr *m, int flags, in_addr_t addr, in_port_t port,
		       size_t len, bool more)
{
	struct vmh_dst *d = &s->dsts[slot_of(addr, port)];
	uint32_t why;
	int r;

	if (vmh_lane_due(&s->tx_lane, VMH_LANE_TX))
		migrate(s);
	vmh_lock(&s->tx_lock);
	while (vmh_unlikely(!current(s, d, addr, port))) {
		vmh_unlock(&s->tx_lock);
		if (vmh_unlikely(atomic_load(&s->leaving)) && is_nonblocking(s, flags))
			return by_kernel(s, fd, m, flags, 0);
		refresh(s, fd, addr, port);
		vmh_lock(&s->tx_lock);
	}
	if (d->reason || d->daddr != addr || d->dport != port ||
	    (vmh_unlikely(len > d->sure_payload) && !vmh_path_fits(d, s->bound_if, len))) {
		why = d->daddr != addr || d->dport != port ? 0 : d->reason ? d->reason : VMH_R_MTU;
		vmh_unlock(&s->tx_lock);
		return by_kernel(s, fd, m, flags, why);
	}
	if (vmh_unlikely(s->last_ring != d->ring) && s->last_ring)
		vmh_ring_kick(s->last_ring); /* the caller flushes the last one only */
	s->last_ring = d->ring;
	r = post(d->ring, &d->hdr, m, len, more);
	if (vmh_likely(!r)) {
		VMH_COUNT(s->stats->tx_packets, 1);
		VMH_COUNT(s->stats->tx_bytes, len);
	}
	vmh_unlock(&s->tx_lock);
	bool alone = vmh_tx_alone(s->stats);

	if (vmh_unlikely(r == -EAGAIN) && vmh_params.tx_nonblocked_eagains && is_nonblocking(s, flags)) {
		VMH_COUNT_BY(alone, s->stats->tx_eagain, 1);
		return r;
	}
	if (vmh_unlikely(r)) /* the ring counts tx_full */
		return by_kernel(s, fd, m, flags, r == -EAGAIN ? VMH_R_RING_FULL : VMH_R_IF_GONE);
	if (vmh_unlikely(atomic_load_explicit(&s->out_edges, memory_order_relaxed)))
		vmh_epoll_sent(s);
	return (ssize_t)len;
}

ssize_t vmh_sock_sendmsg(struct vmh_sock *s, int fd, const struct msghdr *m, int flags, bool more)
{
	in_addr_t addr = s->raddr;
	in_port_t port = s->rport;
	size_t len = 0;
	uint32_t why;

	if (s->home || vmh_unlikely((flags & NEVER_ON_RING) || m->msg_controllen || atomic_load(&s->wr_shut))) {
		if (flags & MSG_MORE) { /* the kernel holds a half-made datagram: what follows belongs to it */
			int refused = s->home ? 0 : vmh_exception(fd, VMH_R_UNKNOWN_CALL);

			if (refused)
				return vmh_sock_send_refused(s, refused);
			vmh_sock_home(s, VMH_R_UNKNOWN_CALL, MSG_MORE);
		}
		return by_kernel(s, fd, m, flags, s->home ? s->home : VMH_R_SEND_FLAGS);
	}
	if (m->msg_name) {
		const struct sockaddr_in *to = m->msg_name;

		if (vmh_bad_ptr(to))
			return by_kernel(s, fd, m, flags, 0); /* EFAULT */
		if ((int)m->msg_namelen < (int)sizeof(*to) || to->sin_family != AF_INET)
			return by_kernel(s, fd, m, flags, VMH_R_DEST_MULTI);
		addr = to->sin_addr.s_addr;
		port = to->sin_port;
	}
	if (vmh_unlikely(!port || !addr || m->msg_iovlen > 1024 || (m->msg_iovlen && vmh_bad_ptr(m->msg_iov))))
		return by_kernel(s, fd, m, flags, VMH_R_DEST_MULTI);
	for (size_t i = 0; i < m->msg_iovlen; i++) {
		const struct iovec *v = &m->msg_iov[i];

		if (vmh_unlikely((vmh_bad_ptr(v->iov_base) && (v->iov_len || v->iov_base)) || v->iov_len > 65507))
			return by_kernel(s, fd, m, flags, 0); /* EFAULT, EMSGSIZE, EINVAL */
		len += m->msg_iov[i].iov_len;
	}
	if (vmh_unlikely(len > 65507))
		return by_kernel(s, fd, m, flags, 0); /* EMSGSIZE */
	why = vmh_session_open();
	if (vmh_unlikely(why))
		return by_kernel(s, fd, m, flags, why);
	/* what the kernel sends in any case may fail for another reason, which comes before a pending error */
	if ((s->rport || vmh_unlikely(s->recverr)) && !atomic_load_explicit(&s->plain, memory_order_relaxed)) {
		int err = pending_error(s, fd);

		if (err) {
			VMH_COUNT_BY(vmh_tx_alone(s->stats), s->stats->tx_errors, 1);
			return err;
		}
	}
	if (vmh_unlikely(VMH_GET(s->paced))) {
		bool now = is_nonblocking(s, flags);
		int err = vmh_sock_pace(s, len, now);

		if (err && now)
			return by_kernel(s, fd, m, flags, VMH_R_PACING);
		if (err) {
			VMH_COUNT_BY(vmh_tx_alone(s->stats), *(err == -EINTR ? &s->stats->tx_errors : &s->stats->tx_eagain), 1);
			return err;
		}
	}
	return by_ring(s, fd, m, flags, addr, port, len, more);
}

void vmh_sock_tx_flush(struct vmh_sock *s)
{
	struct vmh_ring *r = s->last_ring;

	if (r)
		vmh_ring_kick(r);
}
