/* Listeners: the kernel listens, and so does each ring by which connections may come. accept() takes from both.
 *
 * The rings begin when the program first waits for a connection by a call that we see: one that accepts by other ways
 * (io_uring) would never be told of theirs. */
#include "vmh_base.h"
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_heap.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_listen.h"
#include "vmh_tcps_param.h"
#include "vmh_wait.h"
#include "vmh_worker.h"

#define RETRY_NS 1000000000u

/* NULL: why not. A raw packet QP has all frames of a port or none, and could not leave those to the kernel that are of
 * its connections. */
static struct vmh_tring *tring_on(const struct vmh_tlisten *l, unsigned ifindex, unsigned *reason)
{
	struct vmh_tring *t = NULL;
	struct vmh_ring *r;

	*reason = VMH_R_RING_FAILED;
	r = l->nrings < VMH_TLISTEN_RINGS_MAX ? vmh_session_ring(ifindex, l->lane, reason) : NULL;
	if (r && r->kind == VMH_RING_VERBS)
		*reason = VMH_R_TCP_LISTEN_QP;
	else if (r)
		t = vmh_tring_of(r);
	if (!t && !*reason)
		*reason = VMH_R_RING_FAILED;
	return t;
}

/* io held, or nobody accepts yet. */
static bool listen_on(struct vmh_tlisten *l, struct vmh_tcps *s, unsigned ifindex, struct vmh_tring *t, unsigned backlog)
{
	struct vmh_tcp_options o = s->opt;
	struct vmh_tcp_conn *conn;

	if (vmh_tcp_listen(vmh_tring_stack(t), &l->name.addr, l->name.port, l->families, backlog, &o, s, &conn))
		return false;
	l->r[l->nrings].tring = t;
	l->r[l->nrings].ifindex = ifindex;
	l->r[l->nrings++].conn = conn;
	vmh_tring_count(t, 1);
	return true;
}

void vmh_tlisten_stop(struct vmh_tlisten *l)
{
	for (unsigned i = 0; i < l->nrings; i++) {
		vmh_tcp_close(l->r[i].conn);
		vmh_tring_flush(l->r[i].tring);
		vmh_tring_count(l->r[i].tring, -1);
	}
	l->nrings = 0;
}

static unsigned attach(struct vmh_tcps *s, int fd, struct vmh_tlisten *l, unsigned backlog)
{
	unsigned links[VMH_NET_LINKS], reason = vmh_session_open(), why = VMH_R_NO_INTERFACE;
	struct vmh_tring *t;
	int n = 1;

	if (reason)
		return reason;
	vmh_session_serve();
	if (!vmh_ip_any(&l->name.addr) && !vmh_net_local(&l->name.addr, &l->ifindex))
		return VMH_R_NOT_OFFLOADABLE_ADDR;
	if (!vmh_ip_any(&l->name.addr))
		links[0] = l->ifindex;
	else
		n = vmh_net_served_links(links, VMH_NET_LINKS);
	for (int i = 0; i < n; i++)
		if (vmh_net_metrics_by(links[i])) /* they act on the answer to the SYN; not known: it is tried again */
			return VMH_R_TCP_METRICS;
	for (int i = 0; i < n; i++)
		if (!vmh_net_link_served(links[i]) && (t = tring_on(l, links[i], &why)) && !listen_on(l, s, links[i], t, backlog))
			why = VMH_R_RING_FAILED;
	if (!l->nrings)
		return why;
	reason = vmh_tport_attach(fd, &l->name, l->ifindex, l->lane, VMH_ATTACH_F_LISTEN, &l->flow_id);
	if (reason)
		vmh_tlisten_stop(l);
	return reason;
}

static unsigned backlog_of(int backlog)
{
	int most = vmh_tcps_sysctl(VMH_SYSCTL_SOMAXCONN);

	return (unsigned)(backlog < 0 || backlog > most ? most : backlog);
}

/* 0, or why this socket is the kernel's whatever the program does. */
static unsigned kernels(const struct vmh_tcps *s)
{
	if (s->odd)
		return VMH_R_SOCKOPT;
	return atomic_load(&s->obj.nfds) != 1 ? VMH_R_DUP : 0;
}

static void to_rings(struct vmh_tcps *s, int fd, unsigned backlog)
{
	struct vmh_tname name = { .v6 = s->v6 };
	struct vmh_tlisten *l;
	unsigned reason;

	reason = kernels(s);
	if (reason)
		vmh_tcps_suppose(s, reason);
	if (reason || atomic_load(&s->in_kernel) || !vmh_tcps_kernel_name(fd, false, &name.addr, &name.port) ||
	    !vmh_tcps_not_plain(s))
		return;
	l = s->listening; /* of before */
	if (!l && !(l = vmh_heap_zero(1, sizeof(*l))))
		return;
	s->opt.reuse = vmh_tcps_reuses(fd); /* it may be another program's that was executed */
	l->name = name;
	l->rings_go = false;
	l->families = vmh_tcps_families(s, fd);
	l->lane = vmh_lane_of(&s->lane, VMH_LANE_RX, fd, vmh_ip_v4(&name.addr));
	s->opt.syn_cookies = (uint8_t)vmh_tcps_sysctl(VMH_SYSCTL_SYN_COOKIES);
	vmh_inherited_read(&l->inherited, fd, s->v6);
	memcpy(s->stats->local_addr, name.addr.b, 16);
	VMH_SET(s->stats->local_port, name.port);
	vmh_conf_refresh();
	s->way_generation = vmh_net_generation();
	reason = vmh_tcps_kept_server(&name.addr, name.port);
	if (!reason)
		reason = attach(s, fd, l, backlog);
	vmh_tcps_set_reason(s, reason);
	if (reason) {
		vmh_debug("fd %d: the kernel alone listens: %s", fd, vmh_reason_text(reason));
		if (!s->listening)
			vmh_heap_free(l);
		return;
	}
	vmh_lock(&s->io);
	s->listening = l;
	atomic_store(&s->bits, 0);
	atomic_store(&s->state, VMH_TCPS_LISTEN);
	atomic_store(&s->wild_port, vmh_ip_any(&l->name.addr) ? l->name.port : 0);
	vmh_tlisten_refresh(s);
	vmh_unlock(&s->io);
	vmh_tpath_begun(s);
	vmh_tended_watch(s);
	VMH_SET(s->stats->flow_id, l->flow_id);
	VMH_SET(s->stats->offloaded, 1);
	VMH_SET(s->stats->rx_offloaded, 1);
	vmh_epoll_member_on_ring(&s->obj);
	if (vmh_tcps_bits(s))
		vmh_epoll_notify(&s->obj);
	vmh_debug("fd %d: %u rings listen", fd, l->nrings);
}

static bool listens_on(const struct vmh_tlisten *l, unsigned ifindex)
{
	for (unsigned i = 0; i < l->nrings; i++)
		if (l->r[i].ifindex == ifindex)
			return true;
	return false;
}

/* Object lock held. */
static unsigned join(struct vmh_tcps *s, struct vmh_tlisten *l, unsigned ifindex)
{
	unsigned reason;
	struct vmh_tring *t;
	bool listens;

	if (vmh_net_metrics_by(ifindex))
		return VMH_R_TCP_METRICS;
	t = tring_on(l, ifindex, &reason);
	if (!t)
		return reason;
	vmh_lock(&s->io);
	listens = !atomic_load(&vmh_tring_ring(t)->gone) && listen_on(l, s, ifindex, t, backlog_of(VMH_GET(s->backlog)));
	vmh_unlock(&s->io);
	if (!listens)
		return VMH_R_RING_FAILED;
	vmh_debug("fd %d: a ring listens on interface %u as well", s->obj.fd, ifindex);
	vmh_wake_all(); /* who sleeps has not this ring among those that wake him */
	return 0;
}

static bool listens_by(const struct vmh_tlisten *l, const struct vmh_ring *r)
{
	for (unsigned i = 0; i < l->nrings; i++)
		if (vmh_tring_ring(l->r[i].tring) == r)
			return true;
	return false;
}

unsigned vmh_tlisten_join(struct vmh_tcps *s, struct vmh_ring *missed)
{
	unsigned links[VMH_NET_LINKS], why, reason = VMH_R_RING_FAILED;
	struct vmh_tlisten *l;
	int n = 0;

	if (!vmh_trylock(&s->obj.lock))
		return VMH_R_NOT_TRIED;
	l = s->listening;
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && l->flow_id && !l->syns_left && vmh_ip_any(&l->name.addr))
		n = vmh_net_served_links(links, VMH_NET_LINKS);
	for (int i = 0; i < n; i++) {
		why = listens_on(l, links[i]) ? 0 : join(s, l, links[i]);
		if (missed && missed->ifindex == links[i] && why)
			reason = why;
	}
	if (!n || !missed || atomic_load(&missed->gone) || listens_by(l, missed))
		reason = 0;
	vmh_unlock(&s->obj.lock);
	return reason;
}

struct missed {
	in_port_t port;
	bool any;
	struct vmh_ring *r;
};

static void miss(struct vmh_tcps *s, void *arg)
{
	struct missed *m = arg;

	if (atomic_load(&s->wild_port) != m->port)
		return;
	m->any = true;
	atomic_store(&s->missed, m->r);
	vmh_tpath_sent_again(s);
}

/* Rules of a wildcard are in force where any ring of the program begins, and it may not listen there yet. Ring lock held. */
bool vmh_tlisten_missed(in_port_t port, struct vmh_ring *r)
{
	struct missed m = { .port = port, .r = r };

	vmh_tcps_glance(miss, &m);
	return m.any;
}

void vmh_tcps_listen(struct vmh_tcps *s, int backlog)
{
	struct vmh_tcp_addr a;

	vmh_tcps_note_names(s, s->obj.fd, &a);
	vmh_tcps_policy_server(s, &a.laddr, a.lport);
	vmh_lock(&s->obj.lock);
	atomic_store(&s->listens, 1);
	VMH_SET(s->backlog, backlog);
	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD && vmh_tcps_state(s) == VMH_TCPS_KERNEL)
		vmh_tcps_suppose(s, kernels(s) ? kernels(s) : VMH_R_TCP_ACCEPT);
	vmh_lock(&s->io);
	for (unsigned i = 0; vmh_tcps_state(s) == VMH_TCPS_LISTEN && i < s->listening->nrings; i++)
		vmh_tcp_set_backlog(s->listening->r[i].conn, backlog_of(backlog));
	vmh_unlock(&s->io);
	vmh_unlock(&s->obj.lock);
}

void vmh_tcps_accepts(struct vmh_tcps *s, int fd)
{
	if (VMH_GET(s->policy) != VMH_TCPS_OFFLOAD || vmh_now_ns() < VMH_GET(s->retry_ns) || !vmh_trylock(&s->obj.lock))
		return;
	if (vmh_tcps_state(s) == VMH_TCPS_KERNEL && atomic_load(&s->listens) && !atomic_load(&vmh_tcps_ending)) {
		VMH_SET(s->retry_ns, vmh_now_ns() + RETRY_NS);
		to_rings(s, fd, backlog_of(VMH_GET(s->backlog)));
	}
	vmh_unlock(&s->obj.lock);
}

/* Under the lock, which another thread has for as long as it takes to put the listener on rings. */
bool vmh_tcps_accept_in_kernel(struct vmh_tcps *s, int flags)
{
	bool may;

	if (VMH_GET(s->policy) != VMH_TCPS_OFFLOAD || atomic_load(&s->nonblock) ||
	    flags & ~(SOCK_NONBLOCK | SOCK_CLOEXEC)) { /* it does not sleep, or never comes to be on rings */
		atomic_fetch_add(&s->in_kernel, 1);
		return true;
	}
	vmh_lock(&s->obj.lock);
	may = vmh_tcps_state(s) != VMH_TCPS_LISTEN;
	if (may)
		atomic_fetch_add(&s->in_kernel, 1);
	vmh_unlock(&s->obj.lock);
	return may;
}

void vmh_tlisten_options(struct vmh_tcps *s)
{
	struct vmh_inherited now;

	vmh_inherited_read(&now, s->obj.fd, s->v6);
	vmh_lock(&s->io);
	s->listening->inherited = now;
	for (unsigned i = 0; i < s->listening->nrings; i++)
		vmh_tcp_set_options(s->listening->r[i].conn, &s->opt);
	vmh_unlock(&s->io);
}

/* io held */
bool vmh_tlisten_rings_have(const struct vmh_tlisten *l)
{
	bool any = false;

	for (unsigned i = 0; i < l->nrings && !any; i++)
		any = vmh_tcp_poll(l->r[i].conn) & VMH_TCP_IN;
	return any;
}

unsigned vmh_tlisten_waiting(struct vmh_tcps *s)
{
	struct vmh_tcp_info info;
	unsigned n = 0;

	vmh_lock(&s->io);
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN) {
		n = s->listening->nwaiting;
		for (unsigned i = 0; i < s->listening->nrings; i++) {
			vmh_tcp_get_info(s->listening->r[i].conn, &info);
			n += info.waiting;
		}
	}
	vmh_unlock(&s->io);
	return n;
}

void vmh_tlisten_refresh(struct vmh_tcps *s)
{
	bool any = s->listening->nwaiting || vmh_tlisten_rings_have(s->listening);

	atomic_store_explicit(&s->bits, any ? VMH_IN : 0, memory_order_release);
}

bool vmh_tlisten_holds(const struct vmh_tcps *s)
{
	return s->listening && VMH_GET(s->listening->nwaiting);
}

bool vmh_tlisten_is(struct vmh_tcps *s, const struct vmh_ring *r, uint32_t flow_id)
{
	bool is = false;

	vmh_lock(&s->io);
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN)
		is = (flow_id && s->listening->flow_id == flow_id) || (r && listens_by(s->listening, r));
	vmh_unlock(&s->io);
	return is;
}

int vmh_tlisten_has_metrics(struct vmh_tcps *s)
{
	int has = 0;

	vmh_lock(&s->io);
	for (unsigned i = 0; !has && vmh_tcps_state(s) == VMH_TCPS_LISTEN && i < s->listening->nrings; i++)
		has = vmh_net_metrics_by(s->listening->r[i].ifindex);
	vmh_unlock(&s->io);
	return has;
}
