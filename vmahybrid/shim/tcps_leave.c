/* The end of a TCP connection's time on a ring: what it is from there on, and what its socket and its sets are told. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_move.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include <sched.h>

#define LEAVE_TURNS 100

_Atomic uint32_t vmh_tcps_leaves_begun, vmh_tcps_leaves_done;

/* Others may begin meanwhile: some turns are enough for one that has. */
void vmh_tcps_leaves_pass(void)
{
	for (int i = 0; i < LEAVE_TURNS && atomic_load(&vmh_tcps_leaves_begun) != atomic_load(&vmh_tcps_leaves_done); i++)
		sched_yield();
}

/* Object lock held. */
void vmh_tmove_keep_blob(struct vmh_tcps *s, struct vmh_tcp_blob blob)
{
	vmh_tcp_blob_free(&s->blob);
	s->blob = blob;
}

/* Object lock held: the stack has it no more. */
void vmh_tmove_leave(struct vmh_tcps *s, unsigned state, unsigned reason, bool abort_)
{
	bool had = s->conn != NULL, home = state == VMH_TCPS_HOME;

	if (home) {
		s->troubled = vmh_tcps_trouble(reason);
		if (s->resting || s->troubled)
			state = VMH_TCPS_KERNEL;
	}
	vmh_lock(&s->io);
	if (had && abort_)
		vmh_tcp_abort(s->conn);
	else if (had)
		vmh_tcp_forget(s->conn);
	s->conn = NULL;
	vmh_tcps_note_amounts(s, &(const struct vmh_tcp_amounts){ 0 });
	atomic_fetch_add(&vmh_tcps_leaves_begun, 1);
	atomic_store(&s->bits, state == VMH_TCPS_LOST ? EPOLLERR | EPOLLHUP | VMH_IN | VMH_OUT : 0);
	atomic_store(&s->state, state);
	vmh_unlock(&s->io);
	if (had) {
		vmh_tring_flush(s->tring);
		vmh_tring_count(s->tring, -1);
	}
	VMH_SET(s->stats->offloaded, 0);
	VMH_SET(s->stats->rx_offloaded, 0);
	VMH_SET(s->stats->tx_offloaded, 0);
	if (home && s->reuse_told) { /* the service knows what it was when it came */
		vmh_sys(SYS_setsockopt, s->obj.fd, SOL_SOCKET, SO_REUSEADDR, &(int){ s->opt.reuse }, sizeof(int));
		s->reuse_told = 0;
	}
	if (home && atomic_load(&s->fresh))
		vmh_tport_retire(s->flow_id);
	if (state == VMH_TCPS_LOST)
		vmh_tshow_end(s);
	else if (home)
		vmh_tshow_home(s);
	if (state == VMH_TCPS_KERNEL)
		atomic_store(&s->fresh, 0); /* as any that the kernel has opened */
	if (state != VMH_TCPS_STRANDED)
		VMH_SET(s->stats->flow_id, s->flow_id = 0);
	vmh_tcps_set_reason(s, reason);
	if (home)
		vmh_epoll_member_parked(&s->obj, false);
	else if (state == VMH_TCPS_LOST)
		vmh_epoll_notify(&s->obj);
	atomic_fetch_add(&vmh_tcps_leaves_done, 1);
	if (state == VMH_TCPS_KERNEL)
		vmh_tcps_rested(s); /* plain calls begin: the kernel's sets are right */
	vmh_wake_all();
}

/* Object lock held. */
void vmh_tmove_strand(struct vmh_tcps *s, struct vmh_tcp_blob blob, unsigned reason)
{
	vmh_tmove_keep_blob(s, blob);
	s->stranded_ns = vmh_now_ns();
	s->stranded_in = vmh_session_id();
	if (atomic_load(&s->fresh))
		vmh_tport_remember();
	vmh_tmove_leave(s, VMH_TCPS_STRANDED, reason, false);
}

/* Object lock held. The end of a connection that could not go home. */
void vmh_tmove_lost(struct vmh_tcps *s, unsigned reason, int err)
{
	uint32_t flow = atomic_load(&s->fresh) ? 0 : s->flow_id;

	if (err != -ENOTSUP || VMH_GET(s->phase)) /* else it has been closed by both sides, or reset */
		vmh_warn("fd %d: a TCP connection could not go home to the kernel (%s): reset", s->obj.fd, strerror(-err));
	vmh_tmove_leave(s, VMH_TCPS_LOST, reason, true);
	if (flow) /* by that other reason the service would go back to the state in which it has taken the connection */
		vmh_session_detach(flow, reason && reason != VMH_R_NO_ANSWER ? reason : VMH_R_TCP_STATE);
}

/* By which the service knows the kernel socket; one that is shown by its inode, and the next service by its names. Of one
 * that may be shown, since there was no answer, by its port as well. */
uint32_t vmh_tmove_flow(const struct vmh_tcps *s)
{
	return s->shown_flow ? 0 : s->flow_id;
}

/* The rule of a QP is ours to take away, and what has come until then was lost: the peer is asked what it has. */
void vmh_tmove_off_the_qp(struct vmh_tcps *s)
{
	if (vmh_tring_ring(s->tring)->kind != VMH_RING_VERBS)
		return;
	if (atomic_load(&s->fresh))
		vmh_tport_went_home(s->tring, s->flow_id, &s->addr);
	else if (!s->shown)
		vmh_verbs_detach(s->flow_id);
	if (s->conn)
		vmh_tcp_nudge(s->conn);
}

/* Home: what came for it meanwhile is in the ring still, or put aside. */
void vmh_tmove_at_home(struct vmh_tcps *s, unsigned reason, struct vmh_tcps_stash *st)
{
	vmh_tmove_off_the_qp(s);
	if (st)
		vmh_ring_poll(vmh_tring_ring(s->tring), VMH_LEFT_FRAMES);
	vmh_tmove_leave(s, VMH_TCPS_HOME, reason, false);
	if (st)
		vmh_tring_stash_home(s->tring, st, s);
}
