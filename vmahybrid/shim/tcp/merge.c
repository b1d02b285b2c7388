/* Generic receive offload (VMA_GRO_STREAMS_MAX): of the frames of one look at the ring, those of a connection that carry
 * its next bytes, one after the other, go through the state machine as one segment, and are answered by one ACK.
 *
 * As in Linux, what is put together has the same acknowledgement, window and options (none, or timestamps), and no flag
 * but PSH. Whatever else comes for the connection ends the run before, so that it sees its segments in their order.
 * While data is missing, and with quick ACK, each segment goes alone.
 *
 * A peer that counts ACKs, not bytes, grows its window by them in slow start. So a run is two segments at most, as many
 * as an ACK is for anyway, for twice the receive buffer from the beginning, and from each pause: doubled with each round
 * trip, the peer's window is as large as the buffer then. */
#include "core.h"

#define FRAMES 64u      /* in one go */
#define RUN_MAX 60000u  /* bytes of a run: lwIP has 16 bits for header and payload */
#define PAUSE_US (10 * MS) /* our own least RTO, Linux has 200: a sender that was silent for so long may begin anew */
#define TCP_LEN 20u
#define TCP_LEN_TS 32u  /* with timestamps, as everybody writes them */

struct run {
	struct vmh_tcp_conn *c;
	struct segment *first, *last;
	uint32_t next_seq, n, n_max, room;
};

static struct look {
	struct run run[FRAMES];
	struct segment seg[FRAMES];
	unsigned runs, max, merged;
} look; /* of this copy: its lock is held */

/* Data with nothing to it that has to be looked at on its own. */
static bool is_plain(struct segment *s)
{
	static const uint8_t ts[4] = {1, 1, 8, 10};
	const uint8_t *tcp = s->tcp;

	s->header = (uint16_t)((tcp[12] >> 4) * 4);
	if ((tcp[13] & ~TCP_PSH) != TCP_ACK || tcp[12] & 15 || s->len <= s->header)
		return false;
	s->payload = (uint16_t)(s->len - s->header);
	return s->header == TCP_LEN || (s->header == TCP_LEN_TS && !memcmp(tcp + TCP_LEN, ts, 4));
}

static bool may_begin(const struct vmh_tcp_conn *c, const struct segment *s)
{
	const struct tcp_pcb *pcb = c->pcb;
	uint32_t ack = get32(s->tcp + 8);

	return pcb && pcb->state >= ESTABLISHED && pcb->state < CLOSE_WAIT && !pcb->ooseq && !c->opt.quickack &&
	       get32(s->tcp + 4) == pcb->rcv_nxt && s->payload <= LWIP_MIN(pcb->rcv_wnd, RUN_MAX) &&
	       TCP_SEQ_BETWEEN(ack, pcb->lastack, pcb->snd_nxt) && input_sum_ok(c->t, s->tcp, s->len, &c->key);
}

/* How many segments a run that begins now may have. */
static uint32_t longest(struct vmh_tcp_conn *c)
{
	if (c->t->now - c->received_at > PAUSE_US)
		c->long_runs_at = c->count.bytes_received + 2ull * core_rcvbuf(c);
	if (c->count.bytes_received >= c->long_runs_at)
		return FRAMES;
	return c->pcb->flags & TF_ACK_DELAY ? 1 : 2; /* 1: the second of two */
}

static void begin(struct vmh_tcp_conn *c, struct segment *s)
{
	struct run *r = &look.run[look.runs++];

	*r = (struct run){.c = c, .first = s, .last = s, .next_seq = get32(s->tcp + 4) + s->payload, .n = 1,
			  .n_max = longest(c), .room = LWIP_MIN(c->pcb->rcv_wnd, RUN_MAX) - s->payload};
	c->run = r;
}

static bool goes_on(const struct run *r, const struct segment *s)
{
	const uint8_t *first = r->first->tcp, *tcp = s->tcp;

	return r->n < r->n_max && s->header == r->first->header && get32(tcp + 4) == r->next_seq && s->payload <= r->room &&
	       !memcmp(tcp + 8, first + 8, 4) && !memcmp(tcp + 14, first + 14, 2) &&
	       !memcmp(tcp + TCP_LEN, first + TCP_LEN, s->header - TCP_LEN) &&
	       input_sum_ok(r->c->t, tcp, s->len, &r->c->key);
}

static void add(struct run *r, struct segment *s)
{
	r->first->payload = (uint16_t)(r->first->payload + s->payload);
	r->first->tcp[13] |= s->tcp[13];
	r->last->next = s;
	r->last = s;
	r->next_seq += s->payload;
	r->room -= s->payload;
	r->n++;
	look.merged++;
}

/* The connection may be gone afterwards. */
static void end(struct vmh_tcp_conn *c)
{
	struct run *r = c->run, *last = &look.run[--look.runs];

	c->run = NULL;
	input_segment(c, r->first);
	if (r != last) {
		*r = *last;
		r->c->run = r;
	}
}

static int one(struct vmh_tcp *t, const struct vmh_tcp_in *in, struct segment *s)
{
	size_t len;
	struct key k;
	uint8_t *tcp = input_find(in->frame, in->len, &len, &k);
	struct vmh_tcp_conn *c = tcp ? demux_find(t, &k) : NULL;
	bool plain;

	if (!c)
		return core_input(t, in->frame, in->len, in->token);
	*s = (struct segment){.frame = in->frame, .tcp = tcp, .len = (uint32_t)len, .token = in->token};
	plain = is_plain(s);
	if (c->run) {
		if (plain && goes_on(c->run, s)) {
			add(c->run, s);
			t->stats.in++;
			return 0;
		}
		end(c);
		c = demux_find(t, &k);
		if (!c)
			return core_input(t, in->frame, in->len, in->token);
	}
	t->stats.in++;
	if (!plain || c->frozen || look.runs == look.max || !may_begin(c, s))
		return input_conn(c, s);
	begin(c, s);
	return 0;
}

static void some(struct vmh_tcp *t, struct vmh_tcp_in *in, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		look.seg[i].kept = false;
		in[i].rc = one(t, &in[i], &look.seg[i]);
	}
	for (unsigned i = 0; i < look.runs; i++) {
		look.run[i].c->run = NULL;
		input_segment(look.run[i].c, look.run[i].first);
	}
	look.runs = 0;
	for (unsigned i = 0; i < n; i++)
		if (look.seg[i].kept)
			in[i].rc = 1;
}

unsigned merge_input(struct vmh_tcp *t, struct vmh_tcp_in *in, unsigned n)
{
	look.max = LWIP_MIN(t->env.merge_max, FRAMES);
	look.merged = 0;
	for (unsigned i = 0; i < n; i += FRAMES)
		some(t, in + i, LWIP_MIN(n - i, FRAMES));
	t->stats.merged += look.merged;
	return look.merged;
}
