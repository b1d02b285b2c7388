/* Received frames that stay in the ring's memory until the program has read them, and what is copied so that nobody who
 * does not read takes the ring's frames from the others.
 *
 * A frame stays while all connections together hold fewer than hold_max and its own fewer than hold_share. When all are
 * held, the connection that was not read for longest copies some of its own; from then on, until it is read, what comes
 * for it is copied. Data out of order can't be copied out later, so it gets half of the frames at most. */
#include "core.h"

#define COPY_OUT 32      /* frames in one go: the ring waits meanwhile */
#define BLOCK 1600       /* bytes of several small pieces in one */
#define SMALL 512
#define BACKLOG 4096     /* unread bytes from which on small pieces share blocks */
#define PBUF_HAS_ROOM 0x80u /* a flag that lwIP leaves alone: a block of BLOCK bytes, filled up to len */

static inline bool is_frame(const struct pbuf *p)
{
	return p->flags & PBUF_FLAG_IS_CUSTOM;
}

/* ---- who holds frames, the one that was not read for longest first ---- */

static void holder_add(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;

	c->holder_next = NULL;
	c->holder_prev = t->last_holder;
	*(t->last_holder ? &t->last_holder->holder_next : &t->first_holder) = c;
	t->last_holder = c;
}

static void holder_remove(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;

	*(c->holder_prev ? &c->holder_prev->holder_next : &t->first_holder) = c->holder_next;
	*(c->holder_next ? &c->holder_next->holder_prev : &t->last_holder) = c->holder_prev;
}

static void holds(struct vmh_tcp_conn *c)
{
	if (!c->held++)
		holder_add(c);
}

static void holds_no_more(struct vmh_tcp_conn *c)
{
	if (!--c->held)
		holder_remove(c);
}

/* ---- frames as pbufs ---- */

static void free_frame(struct pbuf *p)
{
	struct held *h = (struct held *)p;
	struct vmh_tcp *t = h->t;
	void *token = h->token;

	h->token = NULL;
	if (h->next == h) /* still inside core_input, which tells its caller */
		return;
	t->stats.held--;
	h->next = t->free_held;
	t->free_held = h;
	t->env.release(t->env.ctx, token);
}

static void count_copied(struct vmh_tcp *t, unsigned frames)
{
	t->stats.copied += frames;
	if (frames && t->env.copied)
		t->env.copied(t->env.ctx, frames);
}

/* Copies frames of the oldest unread bytes; small ones together. How many. */
static unsigned copy_out(struct vmh_tcp_conn *c, unsigned most)
{
	struct pbuf **at = &c->rx_head, *copy, *p;
	unsigned done = 0;

	while (*at && done < most) {
		uint32_t size = 0;

		if (!is_frame(*at)) {
			at = &(*at)->next;
			continue;
		}
		for (p = *at; p && is_frame(p) && (!size || size + p->len <= BLOCK); p = p->next)
			size += p->len;
		copy = pbuf_alloc(PBUF_RAW, (u16_t)size, PBUF_RAM);
		if (!copy)
			break;
		size = 0;
		for (p = *at; p && size < copy->len; p = *at, done++) {
			memcpy((uint8_t *)copy->payload + size, p->payload, p->len);
			size += p->len;
			*at = p->next;
			p->next = NULL;
			c->rx_pieces--;
			holds_no_more(c);
			pbuf_free(p);
		}
		copy->next = *at;
		*at = copy;
		c->rx_pieces++;
		if (!copy->next)
			c->rx_tail = copy;
		at = &copy->next;
	}
	count_copied(c->t, done);
	return done;
}

static bool make_room(struct vmh_tcp *t, const struct vmh_tcp_conn *c)
{
	struct vmh_tcp_conn *slowest = t->first_holder;

	if (!slowest || slowest == c)
		return false;
	slowest->not_read = true;
	return copy_out(slowest, COPY_OUT) != 0;
}

/* `more`: frames of the same segment that stay */
static bool may_hold(struct vmh_tcp_conn *c, bool in_order, unsigned more)
{
	struct vmh_tcp *t = c->t;
	unsigned share = t->env.hold_share ? t->env.hold_share : t->env.hold_max;

	if (c->not_read || c->held + more >= share || (!in_order && t->stats.held + more >= t->env.hold_max / 2))
		return false;
	return t->stats.held + more < t->env.hold_max || make_room(t, c);
}

/* len bytes at `at`, of the frame of s */
static struct pbuf *hold_frame(struct vmh_tcp *t, struct segment *s, uint8_t *at, uint32_t len, bool stays)
{
	struct held *h = NULL;
	struct pbuf *p;

	if (stays) {
		h = t->free_held;
		if (h)
			t->free_held = h->next;
		else
			h = vmh_heap_zero(1, sizeof(*h));
	}
	s->held = h;
	if (!h) {
		p = pbuf_alloc(PBUF_RAW, (u16_t)len, PBUF_RAM);
		if (p)
			memcpy(p->payload, at, len);
		if (s->payload)
			count_copied(t, 1);
		return p;
	}
	h->p.custom_free_function = free_frame;
	h->token = s->token;
	h->t = t;
	h->next = h;
	return pbuf_alloced_custom(PBUF_RAW, (u16_t)len, PBUF_REF, &h->p, at, (u16_t)len);
}

/* The first one with its header, of the others the payload. Without memory it ends before. */
struct pbuf *hold_segment(struct vmh_tcp *t, struct vmh_tcp_conn *c, const struct seg_in *in, struct segment *s)
{
	struct pbuf *first = NULL, *p, **end = &first;
	bool in_order = c && in->seq == c->pcb->rcv_nxt, stays;
	unsigned more = 0, skip = 0;
	uint32_t len = 0;

	for (; s; s = s->next) {
		/* one without data is given back before hold_done() */
		stays = s->token && c && (!in->payload || may_hold(c, in_order, more));
		p = hold_frame(t, s, s->tcp + skip, s->len - skip, stays);
		if (!p)
			break;
		more += s->held != NULL;
		len += s->len - skip;
		skip = s->header;
		*end = p;
		end = &p->next;
	}
	for (p = first; p; p = p->next) {
		p->tot_len = (u16_t)len;
		len -= p->len;
	}
	return first;
}

void hold_done(struct vmh_tcp *t, struct segment *s)
{
	for (; s; s = s->next) {
		struct held *h = s->held;

		s->kept = h && h->token;
		if (s->kept) {
			h->next = NULL;
			t->stats.held++;
			t->stats.kept++;
		} else if (h) {
			h->next = t->free_held;
			t->free_held = h;
		}
	}
}

/* ---- the queue of unread bytes ---- */

static void append(struct vmh_tcp_conn *c, struct pbuf *p)
{
	*(c->rx_tail ? &c->rx_tail->next : &c->rx_head) = p;
	c->rx_tail = p;
	c->rx_pieces++;
}

/* Of a backlog: a byte takes a byte then, not a block of its own. True if p is gone. */
static bool share_block(struct vmh_tcp_conn *c, struct pbuf *p)
{
	struct pbuf *tail = c->rx_tail;

	if (!tail || p->len > SMALL)
		return false;
	if (!(tail->flags & PBUF_HAS_ROOM) || tail->len + p->len > BLOCK) {
		tail = c->rx_bytes < BACKLOG ? NULL : pbuf_alloc(PBUF_RAW, BLOCK, PBUF_RAM);
		if (!tail)
			return false;
		tail->flags |= PBUF_HAS_ROOM;
		tail->len = tail->tot_len = 0;
		append(c, tail);
	}
	memcpy((uint8_t *)tail->payload + tail->len, p->payload, p->len);
	tail->len = tail->tot_len = (u16_t)(tail->len + p->len);
	pbuf_free(p);
	return true;
}

void hold_append(struct vmh_tcp_conn *c, struct pbuf *p)
{
	uint32_t len = p->len;

	if (is_frame(p)) {
		holds(c);
		append(c, p);
	} else if (!share_block(c, p)) {
		append(c, p);
	}
	c->rx_bytes += len;
}

struct pbuf *hold_pop(struct vmh_tcp_conn *c)
{
	struct pbuf *p = c->rx_head;

	c->rx_head = p->next;
	c->rx_pieces--;
	if (!c->rx_head)
		c->rx_tail = NULL;
	c->rx_bytes -= p->len - c->rx_off;
	c->rx_off = 0;
	p->next = NULL;
	if (is_frame(p))
		holds_no_more(c);
	return p;
}

void hold_was_read(struct vmh_tcp_conn *c)
{
	c->not_read = false;
	if (c->held && c->holder_next) {
		holder_remove(c);
		holder_add(c);
	}
}

bool hold_next(struct vmh_tcp_conn *c, struct segment *s)
{
	struct pbuf *p = hold_frame(c->t, s, s->tcp + s->header, s->payload, s->token && may_hold(c, true, 0));

	if (!p)
		return false;
	hold_append(c, p);
	hold_done(c->t, s);
	return true;
}

/* The ring is about to go: nothing here lies in its frames afterwards. */
void hold_let_go(struct vmh_tcp *t)
{
	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (struct vmh_tcp_conn *c = t->table[i]; c; c = c->hash_next)
			if (c->pcb && c->pcb->ooseq)
				tcp_free_ooseq(c->pcb);
	/* also those that have ended, which are in no table */
	for (struct vmh_tcp_conn *c = t->first_holder, *next; c; c = next) {
		next = c->holder_next;
		copy_out(c, UINT32_MAX);
	}
}
