/* Loss recovery of the sender: RFC 6675 on SACK, NewReno without it, a tail loss probe after RFC 8985, the
 * retransmission timer after RFC 6298. What was none is undo.c's.
 *
 * The scoreboard is three bits in each segment on lwIP's unacked list. lwIP's own fast retransmit never starts, since
 * its count of duplicate ACKs is reset before each segment; it holds back new data while we recover, because its
 * congestion window is what we say.
 */
#include "core.h"

#define INITIAL_SEGMENTS 10u /* RFC 6928 */
#define RTO_MIN (10 * MS)
/* One small segment may wait for the peer's delayed ACK: 40 ms in Linux, and a tick of its timer. Others' take up to 200 ms,
 * which is learned. */
#define ACK_WAIT_MIN (DELAYED_ACK_US + 10 * MS)
#define ACK_WAIT_MAX (210 * MS)
#define RTO_MAX (120 * SEC)
#define IDLE_MIN (200 * MS)
#define PROBE_MIN (2 * MS)
#define REORDER_MIN (1 * MS)
#define VOIDS 8u
#define VOIDS_BLIND 4u /* of a peer without SACK */
#define VOIDS_KEPT 4u /* then D-SACKs have come, or were lost */

struct board {
	uint32_t sacked, sacked_segs, pipe, to_resend, holes; /* bytes, but sacked_segs; holes: not (yet) lost below fack */
	uint32_t hole; /* where the first of those is */
};

static inline uint32_t seq_of(const struct tcp_seg *s)
{
	return lwip_ntohl(s->tcphdr->seqno);
}

static inline uint32_t end_of(const struct tcp_seg *s)
{
	return seq_of(s) + TCP_TCPLEN(s);
}

uint32_t recovery_flight(const struct vmh_tcp_conn *c)
{
	return c->pcb->snd_nxt - c->pcb->lastack;
}

/* A timer that runs out before the answer can come spoils the sample that would put it right (Karn). D-SACKs save that one
 * (void_twice); of a peer without them only timers that become longer (RFC 6298, 5.7). Not at once: where frames are lost
 * they would be long for nothing. */
static unsigned void_shift(const struct vmh_tcp_conn *c)
{
	bool blind = c->established && !(c->pcb->flags & TF_SACK);

	return LWIP_MIN(c->voids / (blind ? VOIDS_BLIND : VOIDS), 6);
}

uint32_t recovery_rto_us(const struct vmh_tcp_conn *c)
{
	uint32_t least = LWIP_MAX(RTO_MIN, c->srtt + 2 * PROBE_MIN), late = 4 * c->rttvar;
	uint64_t rto = SEC;

	if (recovery_flight(c) < 2u * c->pcb->mss)
		least += c->ack_wait_us;

	/* round trips that hardly vary have a small variance, and then a queue begins to fill: so the last segment is
	 * probed first */
	if (c->srtt)
		rto = (uint64_t)c->srtt + LWIP_MAX(late, least);
	rto <<= LWIP_MIN(c->retries, 16) + void_shift(c);
	return (uint32_t)LWIP_MIN(rto, RTO_MAX);
}

void recovery_rtt(struct vmh_tcp_conn *c, uint32_t us)
{
	uint32_t error;

	if (!us)
		us = 1;
	if (!c->min_rtt || us < c->min_rtt)
		c->min_rtt = us;
	if (!c->srtt) {
		c->srtt = us;
		c->rttvar = us / 2;
	} else {
		error = us > c->srtt ? us - c->srtt : c->srtt - us;
		c->rttvar = (3 * c->rttvar + error) / 4;
		c->srtt = (uint32_t)((7ull * c->srtt + us) / 8);
	}
	c->voids = 0;
	c->void_at = c->void_us = 0;
}

/* The peer has had these bytes twice, and had acknowledged all before `una` when it said so. If it says that of each time
 * that they went again, what went first was in time. */
static void void_twice(struct vmh_tcp_conn *c, uint32_t from, uint32_t to, uint32_t una)
{
	if (c->void_us && c->void_resent && TCP_SEQ_LEQ(to, una) && TCP_SEQ_LEQ(from, c->void_from) &&
	    TCP_SEQ_GT(to, c->void_from) && !--c->void_resent)
		recovery_rtt(c, c->void_us);
}

/* The peer had these bytes, and kept its ACK back until they came again. */
static void kept_back(struct vmh_tcp_conn *c)
{
	c->ack_wait_us = LWIP_MIN(2 * c->ack_wait_us, ACK_WAIT_MAX);
}

void recovery_start(struct vmh_tcp_conn *c)
{
	c->ack_wait_us = ACK_WAIT_MIN;
	c->cwnd = INITIAL_SEGMENTS * c->pcb->mss;
	c->ssthresh = 1u << 30;
	c->recovery = OPEN;
	if (c->opt.cc == VMH_TCP_CC_NONE)
		c->cwnd = c->ssthresh;
	undo_start(c);
}

/* Before data is written: what the way had room for may be another's by now (RFC 2861, as Linux has it). */
void recovery_idle(struct vmh_tcp_conn *c)
{
	uint32_t least = INITIAL_SEGMENTS * c->pcb->mss, rto;
	uint64_t idle = c->t->now - c->sent_at;

	if (idle < IDLE_MIN || c->pcb->unacked || !c->sent_at || c->cwnd <= least || c->opt.keeps_cwnd ||
	    c->opt.cc == VMH_TCP_CC_NONE)
		return;
	rto = LWIP_MAX(recovery_rto_us(c), IDLE_MIN);
	if (idle <= rto)
		return;
	c->ssthresh = LWIP_MAX(c->ssthresh, c->cwnd / 4 * 3);
	for (; idle > rto && c->cwnd > least; idle -= rto)
		c->cwnd /= 2;
	c->cwnd = LWIP_MAX(c->cwnd, least);
	c->flight_max = 0;
}

/* Has the window any part in how much is on its way? In slow start as in Linux: if half of it was used in this round. */
void recovery_limited(struct vmh_tcp_conn *c)
{
	uint32_t flight = recovery_flight(c);

	if (flight > c->flight_max || TCP_SEQ_GEQ(c->pcb->lastack, c->round_end)) {
		c->flight_max = flight;
		c->round_end = c->pcb->snd_nxt;
	}
	c->cwnd_limited = flight + c->pcb->mss >= c->cwnd || (c->cwnd < c->ssthresh && c->cwnd < 2 * c->flight_max);
}

static bool overtaken(const struct vmh_tcp_conn *c, const struct tcp_seg *s)
{
	return c->recovery != LOSS && !(s->flags & (SEG_SACKED | SEG_RETRANS)) && TCP_SEQ_LT(seq_of(s), c->fack);
}

/* Before lwIP sees a segment. */
void recovery_before(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	struct tcp_pcb *pcb = c->pcb;

	pcb->dupacks = 0;
	if (pcb->state < ESTABLISHED)
		return;
	if (c->sacked_any && in->flags & TCP_ACK && TCP_SEQ_LEQ(in->ack, pcb->snd_nxt))
		for (struct tcp_seg *s = pcb->unacked; s && TCP_SEQ_LEQ(end_of(s), in->ack); s = s->next)
			if (overtaken(c, s))
				undo_overtaken(c);
	recovery_limited(c);
	if (c->recovery == OPEN && !c->sacked_any) {
		pcb->cwnd = c->cwnd;
		pcb->ssthresh = c->ssthresh;
	} else {
		pcb->cwnd = pcb->ssthresh = 0; /* it sends nothing new on this ACK; output() will */
	}
}

/* The window may have shrunk since a segment went out, and a peer short of memory throws away, whole, what ends beyond it
 * (seen of Linux 6.18). */
static uint32_t room_for(const struct tcp_pcb *pcb, const struct tcp_seg *s)
{
	uint32_t end = pcb->lastack + pcb->snd_wnd;

	return pcb->state < ESTABLISHED ? UINT32_MAX : TCP_SEQ_LT(seq_of(s), end) ? end - seq_of(s) : 0;
}

/* A sample ends before what went twice, where a probe is the last of many; else on a way that has become longer each flight
 * is probed, and there would be none ever. */
static void karn(struct vmh_tcp_conn *c, uint32_t seq)
{
	if (seq == c->void_from && c->void_at && c->void_resent < 255)
		c->void_resent++;
	if (!c->rtt_at || TCP_SEQ_GEQ(seq, c->rtt_cut ? c->rtt_most : c->rtt_seq))
		return;
	c->rtt_cut = true;
	c->rtt_most = seq;
	c->rtt_seq = c->rtt_from + 1;
	if (TCP_SEQ_LEQ(seq, c->rtt_from) || seq == c->pcb->lastack || c->pcb->state < ESTABLISHED) {
		c->voids += c->voids < 255;
		if (!c->void_us || c->voids % VOIDS_KEPT == 0) {
			c->void_at = c->rtt_at;
			c->void_from = c->rtt_from;
			c->void_us = 0;
			c->void_resent = seq == c->void_from;
		}
		c->rtt_at = 0;
	}
}

/* The first unsent segment in two. lwIP gives the end to the second one, and does not take it from the first. */
err_t core_split(struct tcp_pcb *pcb, u16_t at)
{
	struct tcp_seg *s = pcb->unsent;
	bool long_enough = s->len > at;
	err_t err = tcp_split_unsent_seg(pcb, at);

	if (!err && long_enough)
		TCPH_UNSET_FLAG(s->tcphdr, TCP_FIN | TCP_PSH);
	return err;
}

/* Sends the segment at *at, which is unacked, again, or what the window has room for, and the first one as a probe if it
 * has none. It keeps its place. False: not possible now. */
bool recovery_resend(struct vmh_tcp_conn *c, struct tcp_seg **at)
{
	struct tcp_pcb *pcb = c->pcb;
	struct tcp_seg *s = *at, *unsent = pcb->unsent;
	u16_t oversize = pcb->unsent_oversize, owed = pcb->flags & (TF_ACK_DELAY | TF_ACK_NOW);
	uint32_t cwnd = pcb->cwnd, wnd = pcb->snd_wnd, room = room_for(pcb, s);

	if (s->len > room) {
		c->shut_out = true;
		if (!room && s != pcb->unacked)
			return false;
	}
	*at = s->next;
	s->next = NULL;
	pcb->unsent = s;
	if (room && s->len > room && core_split(pcb, (u16_t)LWIP_MIN(room, pcb->mss)) == ERR_OK) {
		s->next->next = *at;
		*at = s->next;
		s->next = NULL;
	}
	pcb->cwnd = pcb->snd_wnd = UINT32_MAX / 2;
	tcp_set_flags(pcb, TF_NAGLEMEMERR); /* no Nagle */
	tcp_output(pcb);
	pcb->cwnd = cwnd;
	pcb->snd_wnd = wnd;
	if (!room) /* nor is the ACK of a probe looked at */
		tcp_set_flags(pcb, owed);
	karn(c, seq_of(s));
	if (pcb->unsent == s) {
		s->next = *at;
		*at = s;
	} else {
		c->count.retransmits++;
		c->resent++;
		undo_resent(c, end_of(s));
		if (c->t->env.resent)
			c->t->env.resent(c->t->env.ctx);
	}
	s = pcb->unsent == s ? NULL : s;
	if (s && s == pcb->unacked && !c->head_again_at) {
		c->head_again_at = c->t->now;
		c->head_again_nxt = pcb->snd_nxt;
	}
	pcb->unsent = unsent;
	pcb->unsent_oversize = oversize;
	return s != NULL;
}

/* RFC 2883: the first block is what came twice, if that is acknowledged already, or within the second. */
static bool came_twice(const struct seg_in *in)
{
	uint32_t from = in->sack[0].from, to = in->sack[0].to;

	return TCP_SEQ_LEQ(to, in->ack) ||
	       (in->nsacks > 1 && TCP_SEQ_GEQ(from, in->sack[1].from) && TCP_SEQ_LEQ(to, in->sack[1].to));
}

static void mark_sacked(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	struct tcp_pcb *pcb = c->pcb;
	bool before = c->sacked_any;
	uint32_t fack = c->fack;

	for (unsigned i = came_twice(in); i < in->nsacks; i++) {
		uint32_t from = in->sack[i].from, to = in->sack[i].to;

		if (!TCP_SEQ_LT(from, to) || TCP_SEQ_LEQ(from, pcb->lastack) || TCP_SEQ_GT(to, pcb->snd_nxt))
			continue;
		for (struct tcp_seg *s = pcb->unacked; s && TCP_SEQ_LT(seq_of(s), to); s = s->next) {
			if (TCP_SEQ_LT(seq_of(s), from) || TCP_SEQ_GT(end_of(s), to))
				continue;
			if (before && overtaken(c, s) && TCP_SEQ_LT(seq_of(s), fack))
				undo_overtaken(c);
			s->flags = (u8_t)((s->flags | SEG_SACKED) & ~SEG_LOST);
		}
		if (!c->sacked_any || TCP_SEQ_GT(to, c->fack))
			c->fack = to;
		c->sacked_any = true;
	}
}

static struct board scan(struct vmh_tcp_conn *c)
{
	struct board b = {0};

	for (struct tcp_seg *s = c->pcb->unacked; s; s = s->next) {
		uint32_t len = TCP_TCPLEN(s);

		if (s->flags & SEG_SACKED) {
			b.sacked += len;
			b.sacked_segs++;
			continue;
		}
		if (!(s->flags & SEG_LOST) || s->flags & SEG_RETRANS)
			b.pipe += len;
		if (!(s->flags & SEG_LOST) && c->sacked_any && TCP_SEQ_LT(seq_of(s), c->fack)) {
			if (!b.holes)
				b.hole = seq_of(s);
			b.holes += len;
		}
		if ((s->flags & (SEG_LOST | SEG_RETRANS)) == SEG_LOST)
			b.to_resend += len;
	}
	c->sacked_any = b.sacked != 0;
	return b;
}

/* IsLost() of RFC 6675 for every segment. `all`: whatever lies below the highest SACK. True: something was lost. */
static bool mark_lost(struct vmh_tcp_conn *c, const struct board *b, bool all)
{
	uint32_t bytes = b->sacked, segs = b->sacked_segs, limit = (c->reordering - 1u) * c->pcb->mss;
	bool again = TCP_SEQ_GT(c->fack, c->retrans_mark + limit), found = false;

	for (struct tcp_seg *s = c->pcb->unacked; s && segs; s = s->next) {
		if (s->flags & SEG_SACKED) {
			bytes -= TCP_TCPLEN(s);
			segs--;
			continue;
		}
		if (s->flags & SEG_RETRANS && again) { /* what was sent after it has arrived: lost a second time */
			s->flags &= (u8_t)~SEG_RETRANS;
			found = true;
		}
		if (!(s->flags & SEG_LOST) && (all || segs >= c->reordering || bytes > limit)) {
			s->flags |= SEG_LOST;
			found = true;
		}
	}
	if (found && again)
		c->retrans_mark = c->pcb->snd_nxt;
	return found;
}

/* What was sent again has arrived, and of what lies behind the highest SACK, and went out before it, nothing has: the
 * end of that flight is lost as well (RFC 8985). SACKs tell of what is before them, and a probe of one segment only. */
static void mark_tail(struct vmh_tcp_conn *c)
{
	for (struct tcp_seg *s = c->pcb->unacked; s && TCP_SEQ_LT(seq_of(s), c->head_again_nxt); s = s->next)
		if (!(s->flags & (SEG_SACKED | SEG_LOST | SEG_RETRANS)) &&
		    (!c->sacked_any || TCP_SEQ_GEQ(seq_of(s), c->fack)))
			s->flags |= SEG_LOST;
}

static void enter(struct vmh_tcp_conn *c)
{
	if (c->recovery != OPEN)
		return;
	c->recovery = RECOVERY;
	c->recover = c->retrans_mark = c->pcb->snd_nxt;
	c->count.fast_recoveries++;
	c->head_again_at = 0; /* by a probe */
	undo_begin(c, false);
	cc_loss(c, false);
}

/* True: of what was sent meanwhile something was lost as well, and has gone out again. */
static bool leave(struct vmh_tcp_conn *c)
{
	bool again = false;

	for (struct tcp_seg *s = c->pcb->unacked; s; s = s->next) {
		if (c->pcb->flags & TF_SACK && (s->flags & (SEG_SACKED | SEG_LOST | SEG_RETRANS)) == (SEG_LOST | SEG_RETRANS))
			again = true;
		else
			s->flags &= (u8_t)~(SEG_LOST | SEG_RETRANS);
	}
	c->recovery = OPEN;
	c->dupacks = 0;
	return again;
}

/* The time of the first hole; those that are seen later have theirs when it is filled or lost. */
static void wait_for_hole(struct vmh_tcp_conn *c, const struct board *b)
{
	if (!b->holes) {
		c->due[T_REORDER] = 0;
	} else if (!c->due[T_REORDER] || c->hole != b->hole) {
		c->due[T_REORDER] = c->t->now + LWIP_MAX(c->srtt / 4 * c->reo_steps, REORDER_MIN);
		c->hole = b->hole;
		c->hole_end = c->fack;
	}
}

/* What RFC 6675 calls NextSeg(): lost segments first, then new data, while the pipe has room. */
static void output(struct vmh_tcp_conn *c, bool force)
{
	struct tcp_pcb *pcb = c->pcb;
	struct board b = scan(c);
	uint32_t inflated = pcb->flags & TF_SACK ? 0 : c->dupacks * pcb->mss;

	b.pipe -= LWIP_MIN(b.pipe, inflated);
	for (struct tcp_seg **at = &pcb->unacked; b.to_resend && *at; at = &(*at)->next) {
		uint32_t len = TCP_TCPLEN(*at);

		if (((*at)->flags & (SEG_LOST | SEG_RETRANS | SEG_SACKED)) != SEG_LOST)
			continue;
		if (b.pipe + len > c->cwnd && !force)
			break;
		if (!recovery_resend(c, at))
			break;
		if (*at == pcb->unacked)
			c->due[T_RTO] = 0; /* from now on: its answer can't have come yet */
		(*at)->flags |= SEG_RETRANS;
		c->retrans_mark = pcb->snd_nxt;
		b.pipe += len;
		b.to_resend -= len;
		force = false;
	}
	pcb->cwnd = recovery_flight(c) + (c->cwnd > b.pipe && !b.to_resend ? c->cwnd - b.pipe : 0);
	tcp_output(pcb);
	if (c->recovery == OPEN && !c->sacked_any)
		pcb->cwnd = c->cwnd;
	wait_for_hole(c, &b);
}

/* What had no room is sent again as soon as it has, not when the timer says so. */
static void after_shut_out(struct vmh_tcp_conn *c)
{
	struct tcp_seg *s = c->pcb->unacked;

	if (s && s->len > room_for(c->pcb, s))
		return;
	c->shut_out = false;
	c->void_at = c->void_us = 0; /* it was the window that took time */
	for (; s; s = s->next)
		s->flags &= (u8_t)~SEG_RETRANS;
}

/* After lwIP saw a segment: `acked` new bytes, or `dup`. */
void recovery_ack(struct vmh_tcp_conn *c, const struct seg_in *in, uint32_t acked, bool dup)
{
	struct tcp_pcb *pcb = c->pcb;
	struct board b;
	bool force = false, again = false, may_go = false, open, ours = c->recovery != OPEN; /* lwIP's window is none then */

	if (in->nsacks && pcb->flags & TF_SACK) {
		if (came_twice(in)) {
			c->count.dsacks++;
			if (!undo_is_doubled(c)) {
				void_twice(c, in->sack[0].from, in->sack[0].to, pcb->lastack - acked);
				if (c->probed && TCP_SEQ_GT(in->sack[0].to, pcb->lastack - acked))
					kept_back(c);
			}
			undo_twice(c, in->sack[0].from, in->sack[0].to);
		}
		mark_sacked(c, in);
	}
	if (acked)
		undo_acked(c, in);
	if (c->shut_out)
		after_shut_out(c);
	if (undo_waits(c, acked, dup))
		return;
	if (c->short_out && TCP_SEQ_GEQ(pcb->lastack, c->short_end)) {
		c->short_out = false;
		core_nagle(c);
		may_go = pcb->unsent;
	}
	if (acked)
		c->dupacks = 0;
	else if (dup && !(pcb->flags & TF_SACK))
		c->dupacks++;
	if (c->recovery == OPEN && !c->sacked_any && !c->dupacks) {
		if (acked)
			cc_ack(c, acked, ours ? 0 : pcb->cwnd);
		if (pcb->cwnd != c->cwnd || may_go) {
			pcb->cwnd = c->cwnd;
			if (pcb->unsent)
				tcp_output(pcb);
		}
		return;
	}
	open = c->recovery == OPEN;
	if (acked && c->recovery != OPEN && TCP_SEQ_GEQ(pcb->lastack, c->recover))
		again = leave(c);
	else if (acked && c->recovery == LOSS)
		cc_ack(c, acked, 0);
	if (pcb->unacked && !(pcb->flags & TF_SACK) &&
	    (c->dupacks >= DUP_THRESHOLD || (acked && c->recovery == RECOVERY))) {
		if (c->recovery == OPEN || acked)
			pcb->unacked->flags = (u8_t)((pcb->unacked->flags | SEG_LOST) & ~SEG_RETRANS);
		force = c->recovery == OPEN || acked; /* RFC 6582: the next hole goes at once */
		enter(c);
	}
	b = scan(c);
	if (acked && c->recovery == RECOVERY && pcb->flags & TF_SACK && c->head_again_at &&
	    c->t->now - c->head_again_at >= c->min_rtt) /* else the ACK is for what went before that */
		mark_tail(c);
	if (acked)
		c->head_again_at = 0;
	if (b.sacked && mark_lost(c, &b, c->probed && c->recovery == OPEN && TCP_SEQ_GEQ(c->fack, c->probe_end)))
		again = true;
	if (again) {
		force = c->recovery == OPEN;
		enter(c);
	}
	if (acked && open && c->recovery == OPEN) /* frames overtake one another, and nothing is lost */
		cc_ack(c, acked, 0);
	output(c, force);
}

/* A hole has stayed for a quarter of the round trip, or more: not reordering, a loss (the idea of RFC 8985). */
void recovery_reorder(struct vmh_tcp_conn *c)
{
	bool force = c->recovery == OPEN, found = false;

	for (struct tcp_seg *s = c->pcb->unacked; c->sacked_any && s && TCP_SEQ_LT(seq_of(s), c->hole_end); s = s->next) {
		found |= !(s->flags & (SEG_SACKED | SEG_LOST));
		if (!(s->flags & SEG_SACKED))
			s->flags |= SEG_LOST;
	}
	if (!found)
		return;
	enter(c);
	output(c, force);
}

/* The timer has run out; c->retries counts it already. */
void recovery_rto(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;
	bool reneged = pcb->unacked->flags & SEG_SACKED; /* RFC 2018: then nothing of it counts */
	bool first = c->recovery == OPEN;

	c->count.rtos++;
	if (pcb->state < ESTABLISHED) {
		recovery_resend(c, &pcb->unacked);
		return;
	}
	for (struct tcp_seg *s = pcb->unacked; s; s = s->next) {
		if (reneged)
			s->flags &= (u8_t)~SEG_SACKED;
		s->flags &= (u8_t)~SEG_RETRANS;
		if (!(s->flags & SEG_SACKED))
			s->flags |= SEG_LOST;
	}
	if (c->recovery == OPEN)
		undo_begin(c, true);
	if (c->recovery != LOSS)
		cc_loss(c, true);
	else if (c->opt.cc != VMH_TCP_CC_NONE)
		c->cwnd = pcb->mss;
	c->recovery = LOSS;
	c->recover = pcb->snd_nxt;
	c->dupacks = 0;
	output(c, true);
	if (first)
		undo_doubt(c);
}

/* A probe while we recover: what was sent again may be lost again. With a hole the peer answers each segment at once, so
 * there is no delayed ACK to wait for. */
static void probe_first(struct vmh_tcp_conn *c)
{
	struct tcp_seg **at = &c->pcb->unacked;

	while (*at && (*at)->flags & SEG_SACKED)
		at = &(*at)->next;
	if (!*at)
		return;
	(*at)->flags |= SEG_LOST | SEG_RETRANS;
	recovery_resend(c, at);
	c->probe_end = c->pcb->snd_nxt;
}

/* Nothing came for two round trips: the end of the flight may be lost, and nobody would tell. The last segment, never new
 * data as RFC 8985 prefers: what the peer has already, or what leaves a hole, is answered at once; new data after 40 ms. */
void recovery_probe(struct vmh_tcp_conn *c)
{
	struct tcp_pcb *pcb = c->pcb;
	struct tcp_seg **last = &pcb->unacked;

	c->count.probes++;
	c->probed = true;
	if (c->recovery != OPEN || c->sacked_any) {
		probe_first(c);
		return;
	}
	while ((*last)->next)
		last = &(*last)->next;
	recovery_resend(c, last);
	c->probe_end = pcb->snd_nxt;
}

/* When to probe; 0: not at all. */
uint32_t recovery_probe_us(const struct vmh_tcp_conn *c)
{
	uint32_t wait;

	if (c->probed || !c->srtt || c->pcb->state < ESTABLISHED)
		return 0;
	wait = 2 * c->srtt + PROBE_MIN;
	if (c->recovery == OPEN && recovery_flight(c) < 2u * c->pcb->mss)
		wait += c->ack_wait_us;
	return LWIP_MIN(wait, RTO_MAX >> 6) << void_shift(c);
}

/* Corked or not. */
void recovery_push(struct vmh_tcp_conn *c)
{
	c->uncorked = true;
	recovery_output(c);
	c->uncorked = false;
}

/* For whoever queued data. */
void recovery_output(struct vmh_tcp_conn *c)
{
	if (c->recovery == OPEN && !c->sacked_any) {
		if (c->established)
			c->pcb->cwnd = c->cwnd;
		tcp_output(c->pcb);
	} else {
		output(c, false);
	}
}
