/* Frames that overtake one another look like losses. How far they do is learned (RFC 4653's idea, as Linux counts it), and a
 * recovery for nothing is undone: by D-SACKs for all that was sent again (RFC 3708), a timestamp (RFC 3522), or, after a
 * timeout, by what is acknowledged and went out once (RFC 5682).
 */
#include "core.h"
#include "lwip/sys.h"

#define REORDERING_MOST 300u /* net.ipv4.tcp_max_reordering */
#define STEPS_MOST 4u        /* quarters of a round trip */
#define DOUBLED_ONE_IN 32u
#define RECOVERIES 16u       /* that were none for nothing: then it is forgotten */

enum doubt { NONE, ALONE, NEW_DATA };

void undo_start(struct vmh_tcp_conn *c)
{
	c->reordering = DUP_THRESHOLD;
	c->reo_steps = 1;
	c->reo_left = 0;
	c->undo.may = false;
}

static void more_reordering(struct vmh_tcp_conn *c)
{
	c->reordering = (uint16_t)LWIP_MIN(2u * c->reordering, REORDERING_MOST);
}

/* A segment came behind others, and was never sent again: others may come later still, and with each such one the time that
 * a hole stays says more than how many have passed it. Linux goes by the time alone from the first on. It is what is left
 * where D-SACKs tell nothing, as the wire doubles frames. */
void undo_overtaken(struct vmh_tcp_conn *c)
{
	c->count.overtaken++;
	c->reo_left = RECOVERIES;
	more_reordering(c);
}

static void resent_until(struct vmh_tcp_conn *c, uint32_t end)
{
	c->undo.resent++;
	c->undo.round = c->pcb->snd_nxt + recovery_flight(c);
	if (TCP_SEQ_GT(end, c->undo.to))
		c->undo.to = end;
}

/* Before cc_loss. One that begins before the peer can have told of the last one is part of that. */
void undo_begin(struct vmh_tcp_conn *c, bool timeout)
{
	bool again = false;

	if (c->reo_left && !--c->reo_left)
		undo_start(c);
	if (c->undo.may && c->undo.resent && TCP_SEQ_LEQ(c->pcb->lastack, c->undo.round))
		return;
	c->undo.may = true;
	c->undo.timeout = timeout;
	c->undo.cwnd = c->cwnd;
	c->undo.ssthresh = c->ssthresh;
	c->undo.cubic = c->cubic;
	c->undo.from = c->undo.round = c->pcb->lastack;
	c->undo.to = c->probed ? c->probe_end : c->undo.from;
	c->undo.resent = c->probed; /* its answer may be under way */
	for (struct tcp_seg *s = c->pcb->unacked; s; s = s->next) { /* one before that was undone has sent it again */
		if ((s->flags & (SEG_RETRANS | SEG_SACKED)) != SEG_RETRANS)
			continue;
		resent_until(c, lwip_ntohl(s->tcphdr->seqno) + TCP_TCPLEN(s));
		again = true;
	}
	c->undo.stamped = c->undo.stamped && again;
}

/* A segment that ends at `end` goes again. */
void undo_resent(struct vmh_tcp_conn *c, uint32_t end)
{
	c->undo.doubt = NONE; /* what is acknowledged next may be this one */
	if (!c->undo.may)
		return;
	resent_until(c, end);
	if (!c->undo.stamped && c->pcb->flags & TF_TIMESTAMP) {
		c->undo.stamp = sys_now();
		c->undo.stamped = true;
	}
}

static void undo(struct vmh_tcp_conn *c)
{
	c->undo.may = false;
	c->count.undone++;
	c->cwnd = LWIP_MAX(c->cwnd, c->undo.cwnd);
	c->ssthresh = LWIP_MAX(c->ssthresh, c->undo.ssthresh);
	c->cubic = c->undo.cubic;
	c->recovery = OPEN;
	c->dupacks = 0;
	for (struct tcp_seg *s = c->pcb->unacked; s; s = s->next)
		s->flags &= (u8_t)~SEG_LOST; /* what went again may be under way */
	if (c->undo.timeout)
		return;
	more_reordering(c);
	c->reo_steps = (uint8_t)LWIP_MIN(c->reo_steps + 1u, STEPS_MOST);
	c->reo_left = RECOVERIES;
}

/* The peer has had these bytes twice. */
bool undo_is_doubled(const struct vmh_tcp_conn *c)
{
	return c->count.dsacks > c->count.retransmits + c->count.data_segs_out / DOUBLED_ONE_IN;
}

void undo_twice(struct vmh_tcp_conn *c, uint32_t from, uint32_t to)
{
	uint32_t n = (to - from + c->pcb->mss - 1) / c->pcb->mss;

	if (undo_is_doubled(c) || !c->undo.may || !c->undo.resent ||
	    TCP_SEQ_LEQ(to, c->undo.from) || TCP_SEQ_GT(to, c->undo.to))
		return; /* or it was a probe */
	c->undo.resent -= LWIP_MIN(c->undo.resent, n);
	if (!c->undo.resent)
		undo(c);
}

/* New bytes were acknowledged: by what was sent first? */
void undo_acked(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	if (c->undo.may && c->recovery == OPEN && TCP_SEQ_GT(c->pcb->lastack, c->undo.round))
		c->undo.may = false; /* or it would be young again when the numbers come round */
	if (!c->undo.may || c->recovery == OPEN || !c->undo.stamped || !in->ts || !in->tsecr ||
	    !TCP_SEQ_LT(in->tsecr, c->undo.stamp))
		return;
	undo(c);
}

/* A timeout while no SACK tells of a hole may be a pause of the way: all that was under way is acknowledged yet. After it
 * only the first segment has gone again. */
void undo_doubt(struct vmh_tcp_conn *c)
{
	const struct tcp_seg *head = c->pcb->unacked, *next = head ? head->next : NULL;

	c->undo.doubt = NONE;
	/* the last one of all has been sent again as a probe */
	if (!next || !next->next || !(c->pcb->flags & TF_SACK) || c->sacked_any || !(head->flags & SEG_RETRANS) ||
	    next->flags & SEG_RETRANS)
		return;
	c->undo.doubt = ALONE;
	c->undo.again = lwip_ntohl(head->tcphdr->seqno) + TCP_TCPLEN(head);
}

/* Two segments that were never sent: what is acknowledged next tells whether the others were lost. */
static bool sends_new(struct vmh_tcp_conn *c)
{
	uint32_t before = c->pcb->snd_nxt;

	if (!c->pcb->unsent)
		return false;
	c->pcb->cwnd = recovery_flight(c) + 2u * c->pcb->mss;
	tcp_output(c->pcb);
	return c->pcb->snd_nxt != before;
}

bool undo_waits(struct vmh_tcp_conn *c, uint32_t acked, bool dup)
{
	enum doubt was = c->undo.doubt;

	if (was == NONE || (!acked && !dup && !c->sacked_any))
		return false;
	c->undo.doubt = NONE;
	if (c->recovery != LOSS || !c->undo.may || c->sacked_any || !acked)
		return false;
	if (TCP_SEQ_GT(c->pcb->lastack, c->undo.again)) {
		undo(c);
		return false;
	}
	if (was == NEW_DATA || !sends_new(c))
		return false;
	c->undo.doubt = NEW_DATA;
	return true;
}
