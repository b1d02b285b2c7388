/* Listeners: the kernel listens, and so does each ring by which connections may come. accept() takes from both.
 *
 * The rings begin when the program first waits for a connection by a call that we see: one that accepts by other ways
 * (io_uring) would never be told of theirs. */
#include "vmh_base.h"
#include "vmh_conf.h"
#include "vmh_heap.h"
#include "vmh_iomux_int.h"
#include "vmh_control.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_inherit.h"
#include "vmh_tcps_param.h"
#include "vmh_tcps_spare.h"
#include "vmh_tcps_ticket.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>

#define RINGS_MAX 8
#define KERNEL_EVERY 32  /* connections of rings: then the kernel's are looked at first */
#define WAITING_MAX 512
#define RETRY_NS 1000000000u
#define OPEN_NS 250000000u  /* for the half-open ones of a listener that goes home and can't stay: less than FAREWELL_SECONDS */
#define SOON_NS 10000000u   /* the same, where it may stay for them */
#define STAY_NS 3000000000u /* while the program goes on */
#define OPEN_NAP_NS 100000
#define OS_LOOK_NS 20000u /* for who accepts in a loop, without blocking */

struct vmh_tlisten {
	struct vmh_tname name;
	unsigned families;       /* of a wildcard: VMH_TCP_IPV* */
	uint32_t ifindex;        /* 0: all rings of the lane */
	uint32_t lane;
	uint32_t flow_id;
	bool syns_left;          /* by a rule that leaves SYNs to the kernel */
	bool rings_go;           /* nobody can stay there */
	bool back;               /* the kernel's alone for now: it may come to rings again */
	unsigned why;            /* of one that is on its way home, and stays for what is half open */
	uint64_t until;          /* the same: so long at most; else 0 */
	unsigned nrings;
	struct {
		struct vmh_tring *tring;
		struct vmh_tcp_conn *conn;
		uint32_t ifindex;
	} r[RINGS_MAX];
	struct vmh_inherited inherited; /* io */
	/* the kernel's by now, accepted by nobody yet; io */
	unsigned first, nwaiting;
	int waiting[WAITING_MAX];
};

/* ---- to the rings ---- */

/* NULL: why not. A raw packet QP has all frames of a port or none, and could not leave those to the kernel that are of
 * its connections. */
static struct vmh_tring *tring_on(const struct vmh_tlisten *l, unsigned ifindex, unsigned *reason)
{
	struct vmh_tring *t = NULL;
	struct vmh_ring *r;

	*reason = VMH_R_RING_FAILED;
	r = l->nrings < RINGS_MAX ? vmh_session_ring(ifindex, l->lane, reason) : NULL;
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

static void stop(struct vmh_tlisten *l)
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
		stop(l);
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
static bool rings_have(const struct vmh_tlisten *l)
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
	bool any = s->listening->nwaiting || rings_have(s->listening);

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

/* ---- accept ---- */

/* What a connection has from its listener. */
static void inherit(struct vmh_tcps *n, const struct vmh_tcps *s)
{
	n->opt = s->opt;
	n->linger = s->linger;
	n->linger_s = s->linger_s;
	n->inq = s->inq;
	n->rcvtimeo_ns = VMH_GET(s->rcvtimeo_ns);
	n->sndtimeo_ns = VMH_GET(s->sndtimeo_ns);
	VMH_SET(n->connecting, 1);
	n->accepted = 1;
}

/* io of the listener held. The next connection, its holder is n. */
static int next_conn(struct vmh_tcps *s, struct vmh_tcps *n)
{
	struct vmh_tlisten *l = s->listening;
	int rc = -EAGAIN;

	for (unsigned i = 0; i < l->nrings && rc; i++) {
		rc = vmh_tcp_accept(l->r[i].conn, n, &n->conn);
		if (rc)
			continue;
		n->tring = l->r[i].tring;
		n->ifindex = l->r[i].ifindex;
		n->flow_id = l->flow_id;
		vmh_tcp_address(n->conn, &n->addr);
	}
	return rc;
}

/* A descriptor, -EAGAIN, or an error of socket(2). */
static int from_ring(struct vmh_tcps *s, int flags, struct vmh_tcp_addr *a)
{
	struct vmh_inherited of_listener;
	struct vmh_tcps *n;
	uint64_t inode;
	int fd, rc = -EAGAIN;

	if (!(vmh_tcps_bits(s) & VMH_IN))
		return -EAGAIN;
	of_listener.n = 0; /* the rest is large */
	flags &= SOCK_NONBLOCK | SOCK_CLOEXEC;
	fd = vmh_tspare_take(VMH_TSPARE_ACCEPTS, s->v6, flags, &inode);
	if (fd < 0)
		fd = (int)vmh_sys(SYS_socket, s->v6 ? AF_INET6 : AF_INET, SOCK_STREAM | flags, IPPROTO_TCP);
	if (fd < 0)
		return fd;
	vmh_fd_close(fd); /* closed behind our back */
	n = vmh_tcps_install(fd, s->v6, flags & SOCK_NONBLOCK, inode);
	if (!n) {
		vmh_sys(SYS_close, fd);
		return -ENFILE;
	}
	vmh_lock(&n->obj.lock);
	inherit(n, s);
	vmh_lock(&s->io);
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && vmh_tcps_state(n) == VMH_TCPS_KERNEL) {
		rc = next_conn(s, n);
		vmh_tlisten_refresh(s);
		if (s->listening->inherited.n)
			of_listener = s->listening->inherited;
	}
	vmh_unlock(&s->io);
	if (!rc) {
		*a = n->addr;
		n->touched = vmh_inherited_write(&of_listener, fd);
		vmh_tpath_accepted(n);
		vmh_tcps_publish(n);
	}
	vmh_unlock(&n->obj.lock);
	if (rc) {
		vmh_fd_close(fd);
		vmh_sys(SYS_close, fd);
		return rc;
	}
	/* a rule may be for one of the addresses that the listener has */
	if (vmh_ip_any(&s->listening->name.addr) && vmh_tcps_kept_server(&a->laddr, a->lport))
		vmh_tcps_home(n, VMH_R_CONF_RULE, false);
	return fd;
}

/* Under io: between the look and the call no other thread takes it, and a listener that another process has is not on
 * rings. So accept(2) does not sleep. */
static int from_kernel(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec zero = { 0 };
	socklen_t room = vmh_ticket_room(a, len);
	uint32_t reports = atomic_load(&vmh_os_reports); /* before the look: a later one calls for another */
	int r = -EAGAIN;

	vmh_lock(&s->io);
	if (vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) > 0)
		r = (int)vmh_sys(SYS_accept4, fd, a, len, flags);
	vmh_unlock(&s->io);
	if (r == -EAGAIN) /* until then it is known to have some: of a burst there is one report */
		VMH_SET(s->os_reports, reports);
	r = vmh_ticket_redeem(r, a, len, room, flags);
	if (r < 0)
		return r;
	vmh_fd_close(r);
	vmh_tcps_accepted(s, r, a, vmh_ticket_named(len, room), flags);
	return r;
}

/* Who comes seldom is told the truth each time, and so is whoever heard of readiness from the kernel. */
static bool os_due(struct vmh_tcps *s)
{
	if (VMH_GET(s->os_reports) != atomic_load_explicit(&vmh_os_reports, memory_order_relaxed))
		return true;
	return vmh_due(&s->os_looked_ns, vmh_now_ns(), OS_LOOK_NS);
}

/* As accept(2): a name that can't be told costs the connection. */
static int untold(int fd, int err)
{
	vmh_fd_close(fd);
	vmh_sys(SYS_close, fd);
	return err;
}

/* io held. A connection of the kernel's that nobody has accepted, or -EAGAIN. */
static int next_waiting(struct vmh_tlisten *l)
{
	if (!l->nwaiting)
		return -EAGAIN;
	l->nwaiting--;
	return l->waiting[l->first++ % WAITING_MAX];
}

/* One that went home before anybody had accepted it. */
static int from_waiting(struct vmh_tcps *s, struct sockaddr *a, socklen_t *len, int flags)
{
	struct vmh_tlisten *l;
	int fd = -EAGAIN, err;

	vmh_lock(&s->io);
	l = s->listening;
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && l->nwaiting) {
		fd = next_waiting(l);
		vmh_tlisten_refresh(s);
		if (!l->nwaiting && !l->nrings)
			atomic_store(&s->state, l->back ? VMH_TCPS_KERNEL : VMH_TCPS_HOME);
	}
	vmh_unlock(&s->io);
	if (fd < 0)
		return fd;
	if (!(flags & SOCK_CLOEXEC))
		vmh_sys(SYS_fcntl, fd, F_SETFD, 0);
	if (flags & SOCK_NONBLOCK)
		vmh_sys(SYS_fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
	err = a ? (int)vmh_sys(SYS_getpeername, fd, a, len) : 0;
	return err == -EFAULT || err == -EINVAL ? untold(fd, err) : fd;
}

static int accept_any(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags)
{
	struct vmh_tcp_addr from;
	bool kernel_first = ++s->accepts % KERNEL_EVERY == 0;
	int err, r = VMH_GET(s->listening->nwaiting) ? from_waiting(s, a, len, flags) : -EAGAIN;

	if (r == -EAGAIN && kernel_first)
		r = from_kernel(s, fd, a, len, flags);
	if (r != -EAGAIN)
		return r;
	r = from_ring(s, flags, &from);
	err = r >= 0 && a ? vmh_tcps_tell(s->v6, &from.raddr, from.rport, a, len) : 0;
	return err ? untold(r, err) : r;
}

/* A signal came while the rings were asked to listen, and they don't: accept(2) would wait for another. */
static bool ended_before(struct vmh_tcps *s, int fd, const struct vmh_signals *began)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec zero = { 0 };

	return vmh_unlikely(vmh_signals_end(began, VMH_GET(s->rcvtimeo_ns) != 0)) && !atomic_load(&s->nonblock) &&
	       vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) == 0;
}

int vmh_tcps_accept(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags,
		    const struct vmh_signals *began, struct vmh_tcps **goes_on)
{
	TWAIT w;
	bool listens;
	int r, err;

	vmh_twait_init(&w, s, VMH_GET(s->rcvtimeo_ns), VMH_IN, fd, began);
	if (w.state != VMH_TCPS_LISTEN)
		return atomic_load(&s->listens) && ended_before(s, fd, began) ? -EINTR : VMH_TCPS_KERNELS;
	vmh_rings_poll(1);
	for (;;) {
		err = vmh_tcps_is_closed(s, &w.w);
		if (vmh_unlikely(err))
			return err;
		listens = vmh_tcps_state(s) == VMH_TCPS_LISTEN;
		if (w.blocks && !*goes_on && (!listens || atomic_load(&s->left_fd)) && !vmh_fds_apart)
			vmh_tcps_goes_on(*goes_on = s, fd);
		if (!listens)
			return VMH_TCPS_KERNELS;
		if (*goes_on)
			fd = w.kfd = vmh_tcps_fd(s, fd);
		r = accept_any(s, fd, a, len, flags);
		if (r != -EAGAIN)
			return r;
		err = vmh_tcps_wait(s, &w);
		if (vmh_tcps_bits(s) & VMH_IN)
			continue;
		if (w.now && !os_due(s))
			return err;
		r = from_kernel(s, fd, a, len, flags);
		if (r != -EAGAIN && !(err && r == -EBADF)) /* a handler that ended the wait has closed it */
			return r;
		if (err)
			return err;
	}
}

/* ---- to the kernel ---- */

/* SYNs are the kernel's from here on, and what is half open is still ours. Object lock held. */
static void leave_syns(struct vmh_tcps *s, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;
	uint32_t flow, was = l->flow_id;

	if (!was || l->syns_left || vmh_tport_attach(s->obj.fd, &l->name, l->ifindex, l->lane, 0, &flow))
		return;
	vmh_lock(&s->io);
	l->flow_id = flow;
	vmh_unlock(&s->io);
	l->syns_left = true;
	vmh_tport_end(was, l->name.port, reason); /* no frame comes by it any more */
}

/* Somebody else accepts, or by another number, or the kernel for the program. */
static bool is_of_others(unsigned reason)
{
	return reason == VMH_R_FORK || reason == VMH_R_EXEC || reason == VMH_R_FD_PASSED || reason == VMH_R_DUP ||
	       reason == VMH_R_IO_URING;
}

/* A connection of the kernel's that nobody has accepted waits for whichever process does, or here. */
static void keep(struct vmh_tcps *s, int fd, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;

	if (is_of_others(reason) && vmh_ticket_issue(&l->name.addr, l->name.port, l->families, fd))
		return;
	vmh_lock(&s->io);
	l->waiting[(l->first + l->nwaiting++) % WAITING_MAX] = fd;
	vmh_tlisten_refresh(s);
	vmh_unlock(&s->io);
}

/* Connections that nobody has accepted become the kernel's. Object lock held. */
static void keep_waiting(struct vmh_tcps *s, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;
	struct vmh_tcp_addr from;

	while (l->nwaiting < WAITING_MAX) {
		struct vmh_tcps *n;
		bool any;
		int fd;

		vmh_lock(&s->io);
		any = rings_have(l);
		vmh_unlock(&s->io);
		if (!any || (fd = from_ring(s, SOCK_CLOEXEC, &from)) < 0)
			return;
		n = vmh_tcps_get(fd);
		if (n && !vmh_tcps_home(n, reason, true) && vmh_tcps_at_kernel(n)) {
			keep(s, fd, reason);
		} else {
			vmh_fd_close(fd);
			vmh_sys(SYS_close, fd);
		}
		vmh_tcps_drop(&n);
	}
}

static int take_waiting(struct vmh_tcps *s)
{
	int fd;

	vmh_lock(&s->io);
	fd = next_waiting(s->listening);
	vmh_unlock(&s->io);
	return fd;
}

/* Those that waited here. Object lock held. */
static void keep_again(struct vmh_tcps *s, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;

	for (unsigned n = l->nwaiting; n; n--) {
		int fd = take_waiting(s);

		if (fd >= 0)
			keep(s, fd, reason);
	}
}

static unsigned half_open(const struct vmh_tlisten *l)
{
	unsigned n = 0;

	for (unsigned i = 0; i < l->nrings; i++)
		n += vmh_tcp_half_open(l->r[i].conn);
	return n;
}

/* Those that are half open come to be whole, for so long. A peer that has our SYN-ACK and is forgotten would be reset.
 * Object lock held. */
static void let_them_open(struct vmh_tcps *s, unsigned reason, uint64_t ns)
{
	const struct timespec nap = { 0, OPEN_NAP_NS };
	uint64_t end = vmh_now_ns() + ns;

	for (int i = 0; i < 4; i++)
		vmh_rings_poll(64);
	for (;;) {
		keep_waiting(s, reason);
		if (!half_open(s->listening) || vmh_now_ns() >= end)
			return;
		if (!vmh_rings_poll(64))
			vmh_sys(SYS_nanosleep, &nap, NULL);
	}
}

static _Atomic int staying; /* listeners */

static void tell(struct vmh_tcps *s)
{
	if (vmh_tcps_bits(s))
		vmh_epoll_notify(&s->obj);
	vmh_wake_all();
}

/* Its connections that nobody has accepted are reset, as by close(). Object lock held; other threads may be in accept(). */
static void reset_waiting(struct vmh_tcps *s)
{
	int fd;

	while ((fd = take_waiting(s)) >= 0) {
		vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_LINGER, &(struct linger){ .l_onoff = 1 }, sizeof(struct linger));
		vmh_fd_close(fd);
		vmh_sys(SYS_close, fd);
	}
	vmh_lock(&s->io);
	atomic_store(&s->state, VMH_TCPS_HOME);
	vmh_unlock(&s->io);
}

/* Object lock held. The kernel alone listens from here on, or nobody, if it is closed. */
static void end(struct vmh_tcps *s, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;
	if (l->until)
		atomic_fetch_sub(&staying, 1);
	l->until = 0;
	vmh_tended_leave(s);
	atomic_store(&s->wild_port, 0);
	vmh_lock(&s->io);
	stop(l);
	vmh_tlisten_refresh(s);
	l->back = vmh_tcps_trouble(reason) || reason == VMH_R_TCP_METRICS;
	if (!l->nwaiting)
		atomic_store(&s->state, l->back ? VMH_TCPS_KERNEL : VMH_TCPS_HOME);
	vmh_unlock(&s->io);
	if (l->flow_id)
		vmh_tport_leave(s->obj.fd, &l->name, l->ifindex, l->lane, l->flow_id, l->syns_left);
	l->flow_id = 0;
	l->syns_left = false;
	/* reset, as those of a listener of the kernel; at the end of the process other threads may accept them yet */
	if (reason == VMH_R_CLOSED && !atomic_load(&vmh_tcps_ending))
		reset_waiting(s);
	VMH_SET(s->stats->offloaded, 0);
	VMH_SET(s->stats->rx_offloaded, 0);
	VMH_SET(s->stats->flow_id, 0);
	vmh_tcps_set_reason(s, reason);
	tell(s);
}

void vmh_tlisten_shut(struct vmh_tcps *s)
{
	if (vmh_tcps_state(s) != VMH_TCPS_LISTEN)
		return;
	end(s, VMH_R_CLOSED);
	atomic_store(&s->state, VMH_TCPS_HOME);
	vmh_tcps_set_reason(s, VMH_R_SHUTDOWN);
}

/* May the rings go on with what is half open, SYNs being the kernel's? Somebody has to look when it is over. */
static bool may_stay(const struct vmh_tlisten *l, unsigned reason)
{
	return reason != VMH_R_SHUTDOWN && l->syns_left && !l->rings_go && atomic_load(&vmh_worker_runs) &&
	       (!l->until || vmh_now_ns() < l->until);
}

void vmh_tlisten_home(struct vmh_tcps *s, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;
	bool stays;

	if (reason == VMH_R_CLOSED || reason == VMH_R_SERVICE_GONE) {
		end(s, reason);
		return;
	}
	leave_syns(s, reason);
	if (is_of_others(reason))
		keep_again(s, reason);
	stays = may_stay(l, reason);
	let_them_open(s, reason, !stays ? OPEN_NS : l->until ? 0 : SOON_NS);
	if (!stays || !half_open(l)) {
		end(s, reason);
		return;
	}
	if (!l->until) {
		l->why = reason;
		l->until = vmh_now_ns() + STAY_NS;
		atomic_fetch_add(&staying, 1);
	}
	vmh_tcps_set_reason(s, reason);
	tell(s);
}

struct port {
	in_port_t port;
	unsigned reason;
};

static void port_home(struct vmh_tcps *s, void *arg)
{
	const struct port *p = arg;

	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && s->listening->name.port == p->port)
		vmh_tcps_home(s, p->reason, false);
}

void vmh_tlisten_port_home(in_port_t port, unsigned reason)
{
	struct port p = { port, reason };

	vmh_tcps_each(port_home, &p);
}

static void look_at(struct vmh_tcps *s, void *arg)
{
	(void)arg;
	if (vmh_tcps_state(s) != VMH_TCPS_LISTEN)
		return;
	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && s->listening->until) {
		keep_waiting(s, s->listening->why);
		if (!half_open(s->listening) || vmh_now_ns() >= s->listening->until)
			end(s, s->listening->why);
		else if (vmh_tlisten_holds(s))
			tell(s);
	}
	vmh_unlock(&s->obj.lock);
}

void vmh_tlisten_look(void)
{
	if (vmh_unlikely(atomic_load_explicit(&staying, memory_order_relaxed)))
		vmh_tcps_each(look_at, NULL);
}

void vmh_tlisten_rings_go(struct vmh_tcps *s)
{
	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN)
		s->listening->rings_go = true;
	vmh_unlock(&s->obj.lock);
}

void vmh_tlisten_fork_child(struct vmh_tcps *s)
{
	struct vmh_tlisten *l = s->listening;

	for (unsigned i = 0; l && i < l->nwaiting; i++) {
		int fd = l->waiting[(l->first + i) % WAITING_MAX];

		vmh_fd_close(fd);
		vmh_sys(SYS_close, fd);
	}
	s->listening = NULL;
	atomic_store(&s->wild_port, 0);
	atomic_store(&staying, 0); /* the parent's */
}
