/* A listener that leaves its rings: what is half open there, or opened and not accepted, is kept for accept(). */
#include "vmh_base.h"
#include "vmh_iomux_int.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_listen.h"
#include "vmh_tcps_ticket.h"
#include "vmh_wait.h"
#include "vmh_worker.h"

#define OPEN_NS 250000000u  /* for the half-open ones of a listener that goes home and can't stay: less than FAREWELL_SECONDS */
#define SOON_NS 10000000u   /* the same, where it may stay for them */
#define STAY_NS 3000000000u /* while the program goes on */
#define OPEN_NAP_NS 100000

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
	l->waiting[(l->first + l->nwaiting++) % VMH_TLISTEN_WAITING_MAX] = fd;
	vmh_tlisten_refresh(s);
	vmh_unlock(&s->io);
}

/* Connections that nobody has accepted become the kernel's. Object lock held. */
static void keep_waiting(struct vmh_tcps *s, unsigned reason)
{
	struct vmh_tlisten *l = s->listening;
	struct vmh_tcp_addr from;

	while (l->nwaiting < VMH_TLISTEN_WAITING_MAX) {
		struct vmh_tcps *n;
		bool any;
		int fd;

		vmh_lock(&s->io);
		any = vmh_tlisten_rings_have(l);
		vmh_unlock(&s->io);
		if (!any || (fd = vmh_tlisten_from_ring(s, SOCK_CLOEXEC, &from)) < 0)
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
	fd = vmh_tlisten_next_waiting(s->listening);
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
	vmh_tlisten_stop(l);
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
		int fd = l->waiting[(l->first + i) % VMH_TLISTEN_WAITING_MAX];

		vmh_fd_close(fd);
		vmh_sys(SYS_close, fd);
	}
	s->listening = NULL;
	atomic_store(&s->wild_port, 0);
	atomic_store(&staying, 0); /* the parent's */
}
