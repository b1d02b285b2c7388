/* The way of a TCP connection that is to come to a ring, and for how long a reason without one counts. */
#include "vmh_links.h"
#include "vmh_base.h"
#include "tcp/tcp_state.h"
#include "vmh_control.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_move.h"

#define NEIGHBOUR_MS 100

/* Passes by itself: the connection may be adopted later. */
bool vmh_tmove_passes(unsigned reason)
{
	return reason == VMH_R_NO_NEIGHBOUR || reason == VMH_R_NOT_TRIED || reason == VMH_R_NO_SERVICE ||
	       reason == VMH_R_SERVICE_GONE || reason == VMH_R_SERVICE_STOP || reason == VMH_R_NO_ANSWER;
}

bool vmh_tcps_trouble(unsigned reason)
{
	return reason == VMH_R_IF_DOWN || reason == VMH_R_IF_GONE || reason == VMH_R_IF_MAC ||
	       reason == VMH_R_VERBS_FAILED || reason == VMH_R_SERVICE_GONE || reason == VMH_R_SERVICE_STOP;
}

/* What an interface that is down, or away, leaves. */
bool vmh_tmove_no_way(unsigned reason)
{
	return reason == VMH_R_IF_DOWN || reason == VMH_R_IF_GONE || reason == VMH_R_NO_INTERFACE ||
	       reason == VMH_R_NO_ROUTE || reason == VMH_R_NOT_OFFLOADABLE_ADDR || reason == VMH_R_VERBS_FAILED ||
	       reason == VMH_R_RING_FAILED || reason == VMH_R_ATTACH_FAILED || reason == VMH_R_IF_BUSY;
}

/* Is it worth to ask again soon? The peer has just been spoken to, so its neighbour's entry is about to come, and while
 * the page is being written nothing is known at all. */
static bool too_early(unsigned reason, const struct vmh_way *hop)
{
	return hop->generation == VMH_NET_UNSURE || (reason == VMH_R_NO_NEIGHBOUR && vmh_params.hybrid_tcp == 2);
}

static unsigned next_hop(const struct vmh_tcp_addr *a, struct vmh_way *hop, bool patient)
{
	struct timespec ms = { 0, 1000000 };
	bool asked = false;
	unsigned reason;

	for (int i = 0;; i++) {
		reason = vmh_net_way(&a->raddr, &a->laddr, hop);
		if (reason == VMH_R_NO_NEIGHBOUR && !vmh_ip_any(&hop->via) && !asked) {
			vmh_session_neigh_of(hop->ifindex, &hop->via);
			asked = true;
		}
		if (!too_early(reason, hop) || !patient || i == NEIGHBOUR_MS)
			return hop->generation == VMH_NET_UNSURE ? VMH_R_NOT_TRIED : reason;
		vmh_sys(SYS_nanosleep, &ms, NULL);
	}
}

/* The ring and the way to the peer: 0, or why there is none. */
unsigned vmh_tmove_way(struct vmh_tcps *s, const struct vmh_tcp_addr *a, struct vmh_tcp_path *path, bool patient)
{
	struct vmh_way hop = { 0 };
	struct vmh_ring *r;
	unsigned reason = vmh_session_open();

	if (reason)
		return reason;
	if (vmh_ip_is4(&a->raddr) && (ntohl(vmh_ip_v4(&a->raddr)) >> 24) == 127)
		return VMH_R_LOOPBACK;
	vmh_session_serve();
	reason = next_hop(a, &hop, patient);
	if (!reason)
		reason = vmh_link_served(hop.ifindex);
	if (!reason)
		reason = vmh_tcps_tagged(s, hop.ifindex);
	if (reason)
		return reason;
	r = vmh_session_ring(hop.ifindex, vmh_lane_of(&s->lane, VMH_LANE_RX, s->obj.fd, vmh_ip_v4(&a->laddr)), &reason);
	if (!r)
		return reason ? reason : VMH_R_RING_FAILED;
	s->tring = vmh_tring_of(r);
	s->ifindex = hop.ifindex;
	if (!s->tring)
		return VMH_R_RING_FAILED;
	return vmh_tpath_make(s, &hop, &a->raddr, path);
}

/* The kernel can't be told what the round trip was, and measures none as long as it sends again what a ring had sent: with
 * that a ring would begin by a timeout of a second. */
void vmh_tmove_note_rtt(struct vmh_tcps *s, const struct vmh_tcp_blob *state)
{
	const struct vmh_tcp_state *st = state->p;

	if (state->len >= sizeof(*st) && st->srtt_us) {
		s->srtt_us = st->srtt_us;
		s->rttvar_us = st->rttvar_us;
	}
}

void vmh_tmove_recall_rtt(const struct vmh_tcps *s, const struct vmh_tcp_blob *state)
{
	struct vmh_tcp_state *st = state->p;

	if (state->len >= sizeof(*st) && !st->srtt_us) {
		st->srtt_us = s->srtt_us;
		st->rttvar_us = s->rttvar_us;
	}
}
