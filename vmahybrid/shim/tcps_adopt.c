/* A TCP connection from the kernel onto a ring: the program's calls that wait for the service, or the internal thread's. */
#include "vmh_base.h"
#include "tcp/tcp_state.h"
#include "vmh_control.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include "vmh_tcps_move.h"
#include "vmh_tcps_param.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#define RETRY_NS 50000000u     /* for a neighbour, or a thread that is in a call */
#define ROUTES_NS 1000000000u  /* for another route */
#define NAP_NS 50000
#define NAPS 40
#define NAPS_ORDERED 500    /* longer than a plain poll() is, interpose_iomux.c */
#define REPAIR_NAP_NS 5000000

bool vmh_tcps_reuses(int fd)
{
	int v = 0;
	socklen_t len = sizeof(v);

	return vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_REUSEADDR, &v, &len) >= 0 && v;
}

static int import(struct vmh_tcps *s, const struct vmh_tcp_blob *state, const struct vmh_tcp_path *path)
{
	int rc;

	vmh_tmove_recall_rtt(s, state);
	vmh_lock(&s->io);
	rc = vmh_tcp_import(vmh_tring_stack(s->tring), state->p, state->len, path, s, &s->conn);
	if (!rc)
		rc = vmh_tcp_thaw(s->conn);
	if (!rc)
		vmh_tcps_adopted(s);
	vmh_unlock(&s->io);
	return rc;
}

static void publish(struct vmh_tcps *s, int fd)
{
	vmh_tcps_ask_nonblock(s, fd);
	VMH_SET(s->rcvtimeo_ns, vmh_sock_timeout_of(fd, SO_RCVTIMEO));
	VMH_SET(s->sndtimeo_ns, vmh_sock_timeout_of(fd, SO_SNDTIMEO));
	vmh_tcps_watch_from_now(s);
	vmh_tring_count(s->tring, 1);
	VMH_SET(s->stats->flow_id, s->flow_id);
	VMH_SET(s->stats->ring_id, vmh_tring_ring(s->tring)->id);
	VMH_SET(s->stats->offloaded, 1);
	VMH_SET(s->stats->rx_offloaded, 1);
	VMH_SET(s->stats->tx_offloaded, 1);
	vmh_tcps_set_reason(s, VMH_R_NONE);
	vmh_lock(&s->io);
	vmh_tcps_refresh(s);
	atomic_store(&s->state, VMH_TCPS_RING);
	vmh_unlock(&s->io);
	vmh_tpath_begun(s);
	atomic_store(&s->put_off, 0);
	vmh_tended_watch(s);
	vmh_epoll_member_parked(&s->obj, true);
	vmh_epoll_member_on_ring(&s->obj);
	if (vmh_tcps_bits(s))
		vmh_epoll_notify(&s->obj);
	vmh_tring_flush(s->tring);
	vmh_wake_all();
	vmh_debug("fd %d: the TCP connection is on the ring of %s", fd, vmh_tring_ring(s->tring)->ifname);
}

/* The kernel keeps the connection: what came to the ring meanwhile is its, too. */
static void left_at_home(struct vmh_tcps *s, struct vmh_tcps_stash *st)
{
	if (s->flow_id)
		vmh_ring_poll(vmh_tring_ring(s->tring), VMH_LEFT_FRAMES);
	s->flow_id = 0;
	vmh_tring_stash_home(s->tring, st, s);
}

/* On its way to a ring, from ADOPTING on; the object lock is held. */
struct adoption {
	struct vmh_tcps *s;
	int fd;
	unsigned why, reason;           /* reason: 0, or why it stays; the connection is the kernel's then */
	struct vmh_tcp_addr a;
	struct vmh_tcp_path path;
	struct vmh_tcps_stash *st;
	struct vmh_session_take *take;  /* the service is asked for it */
};

/* Its frames are to come to the ring, where they wait. */
static unsigned ready_to_steer(struct adoption *m, struct vmh_msg_attach *req)
{
	const struct vmh_tcps *s = m->s;

	*req = (struct vmh_msg_attach){ .kind = VMH_FLOW_5T, .ifindex = s->ifindex, .fd = (unsigned)m->fd,
					.proto = IPPROTO_TCP, .family = s->v6 ? 6 : 4, .local_port = m->a.lport,
					.remote_port = m->a.rport, .lane = vmh_tring_ring(s->tring)->lane };
	memcpy(req->local_addr, m->a.laddr.b, sizeof(req->local_addr));
	memcpy(req->remote_addr, m->a.raddr.b, sizeof(req->remote_addr));
	m->st = vmh_tring_stash(s->tring, &m->a, NULL);
	return m->st ? 0 : VMH_R_RING_FAILED;
}

/* Of those without a reason, the ones whose frames come to the ring from here on. */
static void steer(struct adoption *m, int n)
{
	struct vmh_session_attach at[n];
	struct adoption *of[n];
	int asked = 0;

	for (int i = 0; i < n; i++) {
		if (!m[i].reason)
			m[i].reason = ready_to_steer(m + i, &at[asked].req);
		if (m[i].reason)
			continue;
		at[asked].fd = m[i].fd;
		of[asked++] = m + i;
	}
	if (asked)
		vmh_session_attach_all(at, asked);
	for (int i = 0; i < asked; i++) {
		of[i]->s->flow_id = at[i].flow_id;
		of[i]->reason = at[i].reason ? at[i].reason : vmh_verbs_attach_tcp(at[i].flow_id, &at[i].req);
	}
}

/* What the service has taken goes to the stack. 0, or why not. */
static unsigned to_ring(struct adoption *m)
{
	struct vmh_tcps *s = m->s;
	int err = import(s, &m->take->state, &m->path);

	if (!err)
		return 0;
	vmh_debug("fd %d: the stack does not take the connection: %s", m->fd, strerror(-err));
	err = vmh_session_tcp_home(m->fd, &m->take->state, s->flow_id, s->ifindex, VMH_R_TCP_STATE);
	vmh_verbs_detach(s->flow_id);
	if (err)
		vmh_warn("fd %d: a TCP connection was lost between kernel and ring", m->fd);
	return VMH_R_TCP_STATE;
}

/* The service did not answer, and may have parked the socket. It has been told, and gives it back to the kernel when it
 * goes on: until then every call on it would fail. */
static void await_kernel(int fd)
{
	const struct timespec nap = { 0, REPAIR_NAP_NS };

	for (uint64_t end = vmh_now_ns() + VMH_STRANDED_NS; vmh_now_ns() < end; vmh_sys(SYS_nanosleep, &nap, NULL))
		if (!vmh_tcps_in_repair(fd))
			return;
}

/* `ret 0`, as the service has it: nothing is to come in while it reads the state. */
static bool drops_all(int fd)
{
	struct sock_filter f[2] = { { 0 } };
	socklen_t n = 2; /* instructions */

	return !vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_GET_FILTER, f, &n) && n == 1 &&
	       f[0].code == (BPF_RET | BPF_K) && !f[0].k;
}

/* The service has ended, or does not answer, and has not said how far it has come. False: the connection is the kernel's. */
static bool was_left_frozen(int fd)
{
	int on = 0;

	if (vmh_tcps_in_repair(fd))
		return true;
	if (drops_all(fd))
		vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_DETACH_FILTER, &on, sizeof(on));
	return false;
}

/* After steer() and the service. */
static void move(struct adoption *m)
{
	if (m->take && !m->take->err) {
		m->reason = to_ring(m);
		vmh_tcp_blob_free(&m->take->state);
	} else {
		if (m->take)
			m->reason = m->take->reason;
		if (m->s->flow_id)
			vmh_session_detach(m->s->flow_id, m->reason);
		if (m->take && m->take->err == -ETIMEDOUT) {
			await_kernel(m->fd);
			was_left_frozen(m->fd); /* the filter alone, most often */
			m->s->suspect = 1; /* it may go on, and end */
		}
	}
	if (!m->st)
		return;
	if (m->reason)
		left_at_home(m->s, m->st);
	else
		vmh_tring_unstash(m->s->tring, m->st, true);
}

/* Is nobody in a call on the kernel socket? One that sleeps there would never wake up again. The state is ADOPTING:
 * none begins. The internal thread has the time to wait for one that does not sleep. */
static bool left_alone(struct vmh_tcps *s, bool ordered)
{
	const int naps = ordered ? NAPS_ORDERED : NAPS;
	const struct timespec nap = { 0, NAP_NS };

	if (!vmh_plain_stop(s->obj.fd))
		return false;
	for (int i = 0; atomic_load(&s->in_kernel) || vmh_plain_is_in(s->obj.fd); i++) {
		if (!vmh_worker_is_me() || i == naps)
			return false;
		vmh_sys(SYS_nanosleep, &nap, NULL);
	}
	return true;
}

/* Object lock held. A program that waits for edges was told EAGAIN, or nothing, and no edge follows unless it is armed
 * anew. */
static void goes_on(struct vmh_tcps *s, unsigned state)
{
	atomic_store(&s->state, state);
	if (atomic_exchange(&s->put_off, 0)) {
		vmh_epoll_member_parked(&s->obj, false);
		vmh_wake_all();
	}
	vmh_plain_open(s);
}

/* Routes change again: one that has been on a ring may come back. */
static bool waits_for_route(const struct vmh_tcps *s, unsigned reason)
{
	return s->homes && (reason == VMH_R_ROUTE_COMPLEX || reason == VMH_R_POLICY_ROUTING || reason == VMH_R_TCP_METRICS);
}

static void stays(struct vmh_tcps *s, unsigned reason)
{
	bool waits = waits_for_route(s, reason);

	vmh_tcps_set_reason(s, reason);
	VMH_SET(s->retry_ns, vmh_now_ns() + (waits ? ROUTES_NS : RETRY_NS));
	VMH_SET(s->rounds, 0);
	goes_on(s, waits || vmh_tmove_passes(reason) || (s->troubled && vmh_tmove_no_way(reason)) ? VMH_TCPS_KERNEL
												     : VMH_TCPS_HOME);
	vmh_debug("fd %d: the TCP connection stays on the kernel: %s", s->obj.fd, vmh_reason_text(reason));
}

static bool unread(int fd)
{
	int in = 0;

	return vmh_sys(SYS_ioctl, fd, SIOCINQ, &in) < 0 || in;
}

#define PATIENT 1 /* for a neighbour; the others of a lot stand still meanwhile */
#define QUIET 2   /* only while there is nothing to read */

/* The object lock is held from here on. false: it is not, and nothing is to be done. */
static bool adoption_begins(struct adoption *m, struct vmh_tcps *s, int fd, unsigned why, int how)
{
	bool patient = how & PATIENT;

	*m = (struct adoption){ .s = s, .fd = fd, .why = why };
	if (VMH_GET(s->kept) || vmh_now_ns() < VMH_GET(s->retry_ns) || !vmh_trylock(&s->obj.lock))
		return false;
	if (vmh_tcps_state(s) != VMH_TCPS_KERNEL || atomic_load(&s->obj.nfds) != 1 || atomic_load(&vmh_tcps_ending) ||
	    !vmh_tcps_note_names(s, fd, &m->a)) {
		vmh_unlock(&s->obj.lock);
		return false;
	}
	vmh_obj_name(&s->obj, 0);
	/* the kernel has it, so no rule of its port would do */
	m->reason = s->peculiar ? VMH_R_SOCKOPT : vmh_params.tcp_3t_rules ? VMH_R_TCP_RULES : vmh_tcps_kept(s, &m->a);
	if (!m->reason)
		m->reason = vmh_tmove_way(s, &m->a, &m->path, patient);
	if (m->reason)
		return true;
	vmh_tcps_ask_untold(s, fd, &m->a);
	s->opt.reuse = vmh_tcps_reuses(fd);
	vmh_tcps_note_only_v6(s, fd);
	atomic_store(&s->taken, 0);
	atomic_store(&s->state, VMH_TCPS_ADOPTING);
	m->reason = left_alone(s, patient && why == VMH_R_OPERATOR) && vmh_epoll_member_settle(&s->obj) ? 0 : VMH_R_NOT_TRIED;
	if (m->reason || !(how & QUIET) || !unread(fd))
		return true;
	goes_on(s, VMH_TCPS_KERNEL);
	VMH_SET(s->rounds, (uint32_t)vmh_params.hybrid_tcp_rounds << s->homes); /* with the next lot */
	vmh_unlock(&s->obj.lock);
	return false;
}

bool vmh_tmove_waits_for_thaw(struct vmh_tcps *s, int fd, struct vmh_tcp_blob *left)
{
	struct vmh_tcp_blob state = left ? *left : (struct vmh_tcp_blob){ 0 };

	if (left)
		*left = (struct vmh_tcp_blob){ 0 };
	if (!state.p) {
		state = (struct vmh_tcp_blob){ vmh_scratch_new(sizeof(struct vmh_tcp_state)), sizeof(struct vmh_tcp_state) };
		if (state.p)
			memset(state.p, 0, state.len);
	}
	if (!state.p || !was_left_frozen(fd)) {
		vmh_tcp_blob_free(&state);
		return false;
	}
	s->reuse_told = 1;
	atomic_store(&s->put_off, 0);
	vmh_epoll_member_parked(&s->obj, true);
	vmh_tmove_strand(s, state, VMH_R_SERVICE_GONE);
	return true;
}

static void adoption_ends(struct adoption *m)
{
	move(m);
	if (!m->reason) {
		m->s->addr = m->a;
		publish(m->s, m->fd);
	} else if (m->take && m->take->err == -ENOTCONN && vmh_tmove_waits_for_thaw(m->s, m->fd, &m->take->state)) {
		vmh_warn("fd %d: the service ended while it moved the TCP connection, which waits for the next one", m->fd);
	} else {
		stays(m->s, m->reason);
	}
	vmh_unlock(&m->s->obj.lock);
}

/* Those that have begun; began: when the first one did. */
static void adopt(struct adoption *m, int n, uint64_t began)
{
	struct vmh_session_take take[n];
	int asked = 0;

	steer(m, n);
	for (int i = 0; i < n; i++) {
		if (m[i].reason)
			continue;
		atomic_store(&m[i].s->taken, 1);
		m[i].s->lent = 1;
		take[asked] = (struct vmh_session_take){ .fd = m[i].fd, .flow_id = m[i].s->flow_id, .why = m[i].why };
		m[i].take = take + asked++;
	}
	if (asked)
		vmh_session_tcp_take(take, asked);
	for (int i = 0; i < n; i++)
		adoption_ends(m + i);
	vmh_tcps_adoption_took(vmh_now_ns() - began, (unsigned)n, (unsigned)asked);
}

void vmh_tcps_adopt(struct vmh_tcps *s, int fd, unsigned why)
{
	uint64_t began = vmh_now_ns();
	struct adoption m;

	if (adoption_begins(&m, s, fd, why, PATIENT))
		adopt(&m, 1, began);
	vmh_tcps_adoption_over();
}

/* ---- by the internal thread: the program's call does not wait for the service ---- */

static struct vmh_tcps *_Atomic chosen; /* held */

/* A program that blocks would wait in its next call instead, and be found there. */
bool vmh_tcps_adopt_later(struct vmh_tcps *s, int fd)
{
	struct vmh_tcps *none = NULL;
	long flags;

	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD || !atomic_load(&vmh_worker_runs))
		return false;
	flags = vmh_sys(SYS_fcntl, fd, F_GETFL);
	if (flags < 0 || !(flags & O_NONBLOCK))
		return false;
	VMH_SET(s->rounds, 0); /* asked once */
	if (vmh_trylock(&s->obj.lock)) { /* by this thread, which uses it */
		vmh_lane_of(&s->lane, VMH_LANE_RX, fd, 0);
		vmh_unlock(&s->obj.lock);
	}
	vmh_obj_hold(&s->obj);
	if (atomic_compare_exchange_strong(&chosen, &none, s)) {
		vmh_obj_hand_over();
		vmh_worker_wake();
	} else {
		vmh_obj_put(&s->obj);
	}
	return true;
}

void vmh_tcps_adopt_chosen(void)
{
	struct vmh_tcps *s = atomic_exchange(&chosen, NULL);

	if (!s)
		return;
	vmh_obj_take_over();
	if (!atomic_load(&s->obj.closed))
		vmh_tcps_adopt(s, s->obj.fd, VMH_R_TCP_BUSY);
	vmh_obj_put(&s->obj);
}

void vmh_tcps_move_fork_child(void)
{
	atomic_store(&chosen, NULL);
	atomic_store(&vmh_tcps_lots, 0);
	atomic_store(&vmh_tcps_leaves_done, atomic_load(&vmh_tcps_leaves_begun));
}

VMH_EACH_CALL _Atomic int vmh_tcps_lots;

int vmh_tcps_adopt_together(struct vmh_tcps *const *v, int n, unsigned why, bool quiet)
{
	struct adoption m[VMH_TAKES_MAX];
	uint64_t began = vmh_now_ns();
	int moving = 0, moved = 0;

	atomic_fetch_add(&vmh_tcps_lots, 1);
	for (int i = 0; i < n; i++)
		moving += adoption_begins(m + moving, v[i], v[i]->obj.fd, why, quiet ? QUIET : 0);
	if (moving)
		adopt(m, moving, began);
	atomic_fetch_sub(&vmh_tcps_lots, 1);
	for (int i = 0; i < moving; i++)
		moved += !m[i].reason;
	return moved;
}
