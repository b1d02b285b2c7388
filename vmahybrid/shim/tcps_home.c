/* A TCP connection from a ring home to the kernel: the program's calls that wait for the service. */
#include "vmh_base.h"
#include "tcp/tcp_state.h"
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include "vmh_tcps_move.h"
#include "vmh_worker.h"
#include <netinet/in.h>
#include <netinet/tcp.h>

#define NEW_SEGMENTS 10 /* TCP_INIT_CWND */

int vmh_tcps_export(struct vmh_tcp_conn *c, struct vmh_tcp_blob *state)
{
	ssize_t n = vmh_tcp_export(c, NULL, 0);
	void *p;

	if (n < 0)
		return (int)n;
	p = vmh_scratch_certain((size_t)n);
	if (!p)
		return -ENOMEM;
	if (vmh_tcp_export(c, p, (size_t)n) != n) {
		vmh_scratch_free(p, (size_t)n);
		return -EAGAIN;
	}
	*state = (struct vmh_tcp_blob){ p, (size_t)n };
	return 0;
}

/* It has sent its SYN and heard nothing yet, nor does it from here on, being put aside: the kernel takes over by a SYN of
 * its own. */
static bool restart(struct vmh_tcps *s, unsigned reason, bool must)
{
	struct vmh_tcp_info info;

	vmh_lock(&s->io);
	vmh_tcp_get_info(s->conn, &info);
	vmh_unlock(&s->io);
	if (info.state != VMH_TCP_SYN_SENT)
		return false;
	vmh_tcps_restart(s, must);
	vmh_tcps_set_reason(s, reason);
	if (vmh_tcps_seeks(s)) {
		s->stranded_ns = vmh_now_ns();
		atomic_store(&vmh_tstranded_no_way_open, 1);
	}
	return true;
}

/* A path that takes no segments of that size lets none through, and the kernel learns it by the answer to one of its own:
 * as new they go at once, as sent after a timeout of 3 s. As many as it sends at first. */
static void send_as_new(const struct vmh_tcp_blob *state)
{
	struct vmh_tcp_state *st = state->p;

	if (!(st->flags & VMH_TCP_F_FIN_SENT) && st->snd_nxt - st->snd_una <= NEW_SEGMENTS * st->snd_mss)
		st->snd_nxt = st->snd_una;
}

/* The stack has let go of it, and vmh_homing_ends() follows, if there is no .err when the service was asked. false: that was
 * all, with .err. */
bool vmh_homing_begins(struct vmh_homing *h)
{
	struct vmh_tcps *s = h->s;
	struct vmh_session_home *home = &h->home;

	h->st = vmh_tring_stash(s->tring, &s->addr, s->conn);
	if (s->opening && restart(s, home->reason, h->must)) {
		if (h->st)
			vmh_tring_unstash(s->tring, h->st, false);
		return false;
	}
	vmh_lock(&s->io);
	vmh_tcp_freeze(s->conn);
	home->err = vmh_tcps_export(s->conn, &home->state);
	if (!home->err) {
		vmh_tmove_note_rtt(s, &home->state);
		if (home->reason == VMH_R_TCP_STUCK)
			send_as_new(&home->state);
	}
	if (home->err == -ENOTSUP) { /* it has ended: the stack answers until close */
		vmh_tcp_thaw(s->conn);
		vmh_unlock(&s->io);
		if (h->st)
			vmh_tring_unstash(s->tring, h->st, true);
		if (!h->must || atomic_load(&s->fresh))
			return false;
		vmh_tmove_lost(s, home->reason, home->err);
		home->err = 0;
		return false;
	}
	atomic_store(&s->state, VMH_TCPS_HOMING);
	vmh_unlock(&s->io);
	s->lent = 1;
	vmh_tended_leave(s);
	VMH_COUNT(vmh_stats->calls_home, 1);
	if (atomic_load(&s->fresh)) {
		vmh_tcps_dress(s, s->obj.fd);
		if (vmh_tring_ring(s->tring)->kind == VMH_RING_VERBS)
			vmh_tport_retire(s->flow_id); /* before its rule is narrowed */
	}
	home->fd = s->obj.fd;
	home->flow_id = vmh_tmove_flow(s);
	home->ifindex = s->ifindex;
	return true;
}

static void stays_on_ring(struct vmh_tcps *s)
{
	vmh_lock(&s->io);
	vmh_tcp_thaw(s->conn);
	atomic_store(&s->state, VMH_TCPS_RING);
	vmh_unlock(&s->io);
	vmh_tended_watch_again(s);
	vmh_tring_flush(s->tring);
}

/* As the kernel says: a parked socket is in repair mode, one of a connection that began on a ring was never connected. */
bool vmh_tmove_is_home(const struct vmh_tcps *s)
{
	struct tcp_info info = { 0 };
	socklen_t n = sizeof(info), m = sizeof(int);
	int repair = 1;

	return vmh_tcps_owns_fd(s) &&
	       !vmh_sys(SYS_getsockopt, s->obj.fd, IPPROTO_TCP, TCP_REPAIR, &repair, &m) && !repair &&
	       !vmh_sys(SYS_getsockopt, s->obj.fd, IPPROTO_TCP, TCP_INFO, &info, &n) && info.tcpi_state != TCP_CLOSE &&
	       info.tcpi_state != TCP_LISTEN;
}

/* That the peer has ended its stream, which it does not say again: the service tells the kernel as soon as that takes it,
 * and the next service has to hear of it. Without the data. */
struct vmh_tcp_blob vmh_tmove_end_of(const struct vmh_tcp_blob *state)
{
	const struct vmh_tcp_state *st = state->p;
	struct vmh_tcp_state *end;

	if (state->len < sizeof(*st) || !(st->flags & VMH_TCP_F_PEER_FIN))
		return (struct vmh_tcp_blob){ 0 };
	end = vmh_scratch_certain(sizeof(*end));
	if (!end)
		return (struct vmh_tcp_blob){ 0 };
	*end = *st;
	end->snd_nxt = end->snd_una;
	end->send_len = end->recv_len = 0;
	return (struct vmh_tcp_blob){ end, sizeof(*end) };
}

/* After the service's answer. */
void vmh_homing_ends(struct vmh_homing *h)
{
	struct vmh_tcps *s = h->s;
	struct vmh_session_home *home = &h->home;
	bool back = false;

	if (home->err && vmh_tmove_is_home(s))
		home->err = 0; /* the service could not say so any more, or not in time */
	/* the rule is gone with the service; with one that only hangs it is not */
	h->must |= home->err == -ENOTCONN && !h->may_stay && atomic_load(&s->fresh) && !s->shown && !vmh_session_muted();
	if (!home->err) {
		vmh_tmove_keep_blob(s, vmh_tmove_end_of(&home->state));
		vmh_tmove_at_home(s, home->reason, h->st);
		h->st = NULL;
	} else if (!h->must && !h->may_stay && home->state.p &&
		   (home->err == -ENOTCONN || vmh_tcps_trouble(home->reason))) {
		if (home->err != -ENOTCONN) /* it can't stay, as its ring is about to be closed */
			atomic_store(&vmh_tstranded_no_way_home, 1);
		vmh_tmove_strand(s, home->state, home->reason);
		home->state.p = NULL;
		home->err = 0;
	} else if (h->must) {
		vmh_tmove_lost(s, home->reason, home->err);
	} else {
		stays_on_ring(s);
		back = true;
	}
	if (h->st)
		vmh_tring_unstash(s->tring, h->st, back);
	vmh_tcp_blob_free(&home->state);
}

void vmh_homing_ask(struct vmh_session_home *home)
{
	if (!home->err)
		home->err = vmh_session_tcp_home(home->fd, &home->state, home->flow_id, home->ifindex, home->reason);
}

int vmh_homing_alone(struct vmh_homing h)
{
	vmh_tmove_land(&h.s, 1, h.home.reason, VMH_FLIGHT_NS);
	if (vmh_homing_begins(&h)) {
		vmh_homing_ask(&h.home);
		vmh_homing_ends(&h);
	}
	return h.home.err;
}

bool vmh_tcps_owns_fd(const struct vmh_tcps *s)
{
	return !vmh_fd_is_another(s->obj.fd, &s->obj);
}

/* By a call that nobody saw: it is closed as any other, and its number names something else to the service. */
bool vmh_tmove_closed_unseen(struct vmh_tcps *s, unsigned reason)
{
	if (reason == VMH_R_CLOSED || !vmh_tcps_parked(s) || vmh_tcps_owns_fd(s))
		return false;
	vmh_debug("fd %d: closed without our seeing it", s->obj.fd);
	if (s->linger_s)
		s->linger = 0; /* nobody waits for it */
	return vmh_fd_forget(&s->obj, s->obj.fd) && atomic_load(&s->obj.closed);
}

int vmh_tcps_home(struct vmh_tcps *s, unsigned reason, bool must)
{
	int err = 0;

	if (vmh_tcps_state(s) == VMH_TCPS_HOME ||
	    (vmh_unlikely(vmh_memory_borrowed()) ? vmh_tcps_home_by_worker(s, reason) : vmh_tmove_closed_unseen(s, reason)))
		return 0;
	vmh_lock(&s->obj.lock);
	switch (vmh_tcps_state(s)) {
	case VMH_TCPS_KERNEL:
		atomic_store(&s->state, VMH_TCPS_HOME);
		if (vmh_plain_nowait(s->obj.fd)) /* other processes, too, may say from now on whether its calls wait */
			VMH_SET(vmh_plain_fds[s->obj.fd], VMH_PLAIN);
		vmh_tcps_set_reason(s, reason);
		break;
	case VMH_TCPS_RING:
		err = vmh_homing_alone((struct vmh_homing){ .s = s, .must = must, .home.reason = reason });
		vmh_debug("fd %d: the TCP connection goes home to the kernel: %s", s->obj.fd, vmh_reason_text(reason));
		break;
	case VMH_TCPS_STRANDED:
		err = vmh_tstranded_home(s, reason, must);
		break;
	case VMH_TCPS_LISTEN:
		vmh_tlisten_home(s, reason);
		break;
	}
	vmh_unlock(&s->obj.lock);
	return err;
}

bool vmh_tcps_rest(struct vmh_tcps *s, unsigned reason)
{
	bool done = false;

	if (vmh_tmove_closed_unseen(s, reason))
		return true;
	if (vmh_session_muted()) /* nobody would take it, and it can wait */
		return false;
	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_RING && !atomic_load(&s->obj.closed)) {
		s->resting = 1;
		done = !vmh_homing_alone((struct vmh_homing){ .s = s, .must = false, .home.reason = reason });
		s->resting = 0;
		vmh_debug("fd %d: the TCP connection goes home to the kernel for now: %s", s->obj.fd, vmh_reason_text(reason));
	}
	vmh_unlock(&s->obj.lock);
	return done;
}

void vmh_tcps_let_name_go(struct vmh_tcps *s)
{
	uint32_t flow = 0;

	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_RING && !atomic_load(&s->fresh) && !atomic_load(&s->obj.closed)) {
		flow = s->flow_id;
		VMH_SET(s->stats->flow_id, s->flow_id = 0);
	}
	vmh_unlock(&s->obj.lock);
	if (flow)
		vmh_session_detach(flow, 0);
}

void vmh_tcps_home_fd(int fd, unsigned reason)
{
	int saved = errno;
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s)
		vmh_tcps_home(s, reason, false);
	errno = saved;
}

int vmh_tcps_kernel_takes(struct vmh_tcps *s, unsigned reason)
{
	int err = vmh_tcps_on_rings(s) ? vmh_exception(s->obj.fd, reason) : 0;

	if (!err)
		vmh_tcps_home(s, reason, false);
	return err;
}

int vmh_tcps_kernel_takes_fd(int fd, unsigned reason)
{
	int saved = errno, err;
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s && vmh_memory_borrowed()) /* the standard input of a child, most often */
		vmh_tcps_note_handed(s);
	err = s ? vmh_tcps_kernel_takes(s, reason) : 0;
	errno = saved;
	return err;
}
