/* Whose is this segment: connections, TIME_WAIT and listeners by their names. */
#include "core.h"

#define FIRST_SIZE 256u
#define HALF_OPEN_MIN 128u
#define HALF_OPEN_OLD (1 * SEC) /* then one that was not answered makes room for a new one */
#define HALF_OPEN_OLD_COOKIES (3 * SEC) /* where new ones have another way: it is answered twice */

static uint32_t hash(const struct vmh_tcp *t, const struct key *k)
{
	return (uint32_t)core_hash(t, k, 1);
}

static inline bool same(const struct key *a, const struct key *b)
{
	return a->rport == b->rport && a->lport == b->lport && vmh_ip_same(&a->raddr, &b->raddr) &&
	       vmh_ip_same(&a->laddr, &b->laddr);
}

int demux_open(struct vmh_tcp *t)
{
	t->table = vmh_heap_zero(FIRST_SIZE, sizeof(*t->table));
	t->tw_table = vmh_heap_zero(FIRST_SIZE, sizeof(*t->tw_table));
	if (!t->table || !t->tw_table) {
		demux_close(t);
		return -ENOMEM;
	}
	t->table_mask = t->tw_mask = FIRST_SIZE - 1;
	t->tw_end = &t->tw_first;
	return 0;
}

void demux_close(struct vmh_tcp *t)
{
	while (t->tw_first)
		demux_tw_remove(t, t->tw_first);
	vmh_heap_free(t->table);
	vmh_heap_free(t->tw_table);
	vmh_heap_free(t->ends);
}

struct vmh_tcp_conn *demux_find(struct vmh_tcp *t, const struct key *k)
{
	struct vmh_tcp_conn *c = t->last;

	if (c && same(&c->key, k))
		return c;
	for (c = t->table[hash(t, k) & t->table_mask]; c; c = c->hash_next)
		if (same(&c->key, k))
			return t->last = c;
	return NULL;
}

static void grow(struct vmh_tcp *t)
{
	uint32_t mask = t->table_mask * 2 + 1;
	struct vmh_tcp_conn **table = vmh_heap_zero((size_t)mask + 1, sizeof(*table)), *c, *next;

	if (!table)
		return;
	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (c = t->table[i]; c; c = next) {
			uint32_t at = hash(t, &c->key) & mask;

			next = c->hash_next;
			c->hash_next = table[at];
			table[at] = c;
		}
	vmh_heap_free(t->table);
	t->table = table;
	t->table_mask = mask;
}

int demux_add(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;
	struct vmh_tcp_conn **at;

	if (demux_find(t, &c->key))
		return -EADDRNOTAVAIL;
	if (t->nconns > t->table_mask)
		grow(t);
	at = &t->table[hash(t, &c->key) & t->table_mask];
	c->hash_next = *at;
	*at = c;
	c->hashed = true;
	t->nconns++;
	return 0;
}

void demux_remove(struct vmh_tcp_conn *c)
{
	struct vmh_tcp *t = c->t;
	struct vmh_tcp_conn **at;

	if (!c->hashed)
		return;
	for (at = &t->table[hash(t, &c->key) & t->table_mask]; *at != c; at = &(*at)->hash_next)
		;
	*at = c->hash_next;
	c->hashed = false;
	t->nconns--;
	if (t->last == c)
		t->last = NULL;
}

struct vmh_tcp_conn *demux_listener(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport)
{
	unsigned family = vmh_ip_is4(laddr) ? VMH_TCP_IPV4 : VMH_TCP_IPV6;
	struct vmh_tcp_conn *any = NULL;

	for (struct vmh_tcp_conn *l = t->listeners; l; l = l->listening->next) {
		if (l->key.lport != lport)
			continue;
		if (vmh_ip_same(&l->key.laddr, laddr))
			return l;
		if (vmh_ip_any(&l->key.laddr) && l->listening->families & family)
			any = l;
	}
	return any;
}

struct vmh_tcp_conn *demux_taken(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families)
{
	struct vmh_tcp_conn *l = t->listeners;

	while (l && !(l->key.lport == lport && vmh_ip_same(&l->key.laddr, laddr) &&
		      (!vmh_ip_any(laddr) || l->listening->families & families)))
		l = l->listening->next;
	return l;
}

struct tw *demux_tw(struct vmh_tcp *t, const struct key *k)
{
	struct tw *w = t->ntw ? t->tw_table[hash(t, k) & t->tw_mask] : NULL;

	while (w && !same(&w->key, k))
		w = w->hash_next;
	return w;
}

static void tw_grow(struct vmh_tcp *t)
{
	uint32_t mask = t->tw_mask * 2 + 1;
	struct tw **table = vmh_heap_zero((size_t)mask + 1, sizeof(*table));

	if (!table)
		return;
	for (struct tw *w = t->tw_first; w; w = w->next) {
		struct tw **at = &table[hash(t, &w->key) & mask];

		w->hash_next = *at;
		*at = w;
	}
	vmh_heap_free(t->tw_table);
	t->tw_table = table;
	t->tw_mask = mask;
}

/* All stay equally long, so the list is in the order of their ends. */
static void tw_append(struct vmh_tcp *t, struct tw *w)
{
	w->until = t->now + TIME_WAIT_US;
	w->next = NULL;
	w->in = t->tw_end;
	*w->in = w;
	t->tw_end = &w->next;
}

void demux_tw_add(struct vmh_tcp_conn *c, const struct tcp_pcb *pcb, bool moved)
{
	struct vmh_tcp *t = c->t;
	struct tw *w = vmh_heap_zero(1, sizeof(*w)), **at;

	if (!w)
		return;
	if (t->ntw >= t->env.tw_max) {
		t->stats.tw_dropped++;
		demux_tw_remove(t, t->tw_first);
	}
	if (t->ntw > t->tw_mask)
		tw_grow(t);
	w->key = c->key;
	w->path = c->path;
	w->snd_nxt = pcb->snd_nxt;
	w->rcv_nxt = pcb->rcv_nxt;
	w->ts = pcb->flags & TF_TIMESTAMP;
	w->moved = moved;
	w->reuse = c->opt.reuse;
	w->ts_recent = pcb->ts_recent;
	w->ts_offset = c->ts_offset;
	at = &t->tw_table[hash(t, &w->key) & t->tw_mask];
	w->hash_next = *at;
	*at = w;
	tw_append(t, w);
	t->ntw++;
}

static void tw_unlink(struct vmh_tcp *t, struct tw *w)
{
	*w->in = w->next;
	if (w->next)
		w->next->in = w->in;
	else
		t->tw_end = w->in;
}

void demux_tw_renew(struct vmh_tcp *t, struct tw *w)
{
	tw_unlink(t, w);
	tw_append(t, w);
}

/* Not always the first one: its name may be used anew. */
void demux_tw_remove(struct vmh_tcp *t, struct tw *w)
{
	struct tw **at;

	for (at = &t->tw_table[hash(t, &w->key) & t->tw_mask]; *at != w; at = &(*at)->hash_next)
		;
	*at = w->hash_next;
	t->ntw--;
	tw_unlink(t, w);
	vmh_heap_free(w);
}

uint64_t demux_tw_expire(struct vmh_tcp *t)
{
	while (t->tw_first && t->tw_first->until <= t->now)
		demux_tw_remove(t, t->tw_first);
	return t->tw_first ? t->tw_first->until : UINT64_MAX;
}

static uint32_t tag_of(uint64_t hash)
{
	return (uint32_t)(hash >> 32) | 1;
}

void demux_ended(struct vmh_tcp *t, const struct key *k, uint32_t snd_nxt)
{
	uint64_t h = core_hash(t, k, 1);

	if (!t->ends)
		t->ends = vmh_heap_zero(ENDS, sizeof(*t->ends));
	if (t->ends)
		t->ends[h % ENDS] = (struct end){tag_of(h), snd_nxt};
}

bool demux_end(const struct vmh_tcp *t, const struct key *k, uint32_t *snd_nxt)
{
	uint64_t h = core_hash(t, k, 1);
	const struct end *e = t->ends ? &t->ends[h % ENDS] : NULL;

	if (!e || e->tag != tag_of(h))
		return false;
	*snd_nxt = e->snd_nxt;
	return true;
}

static struct vmh_tcp_conn *orphan_in(struct vmh_tcp_conn *c)
{
	while (c && !(c->app_closed && core_movable(c)))
		c = c->hash_next;
	return c;
}

struct vmh_tcp_conn *demux_orphan(struct vmh_tcp *t)
{
	struct vmh_tcp_conn *c = NULL;

	for (uint32_t i = 0; i <= t->table_mask && !c; i++)
		c = orphan_in(t->table[i]);
	return c;
}

unsigned demux_closing(struct vmh_tcp *t, uint64_t *left)
{
	unsigned n = 0;

	*left = 0;
	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (struct vmh_tcp_conn *c = t->table[i]; c; c = c->hash_next)
			if (c->app_closed && c->pcb && c->pcb->state != FIN_WAIT_2) {
				*left += c->pcb->snd_lbb - c->pcb->lastack;
				n++;
			}
	return n;
}

unsigned demux_port_users(struct vmh_tcp *t, uint16_t lport)
{
	unsigned n = 0;

	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (struct vmh_tcp_conn *c = t->table[i]; c; c = c->hash_next)
			n += c->key.lport == lport;
	return n;
}

static bool meets(const struct key *k, const struct vmh_ip *laddr, unsigned families, uint16_t lport)
{
	unsigned family = vmh_ip_is4(&k->laddr) ? VMH_TCP_IPV4 : VMH_TCP_IPV6;

	return k->lport == lport && families & family && (vmh_ip_any(laddr) || vmh_ip_same(laddr, &k->laddr));
}

/* inet_bind_conflict() */
bool demux_in_use(struct vmh_tcp *t, const struct vmh_ip *laddr, unsigned families, uint16_t lport, bool reuse)
{
	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (struct vmh_tcp_conn *c = t->table[i]; c; c = c->hash_next)
			if (meets(&c->key, laddr, families, lport) && !(reuse && c->opt.reuse))
				return true;
	for (const struct tw *w = t->tw_first; w; w = w->next)
		if (w->until > t->now && !w->moved && meets(&w->key, laddr, families, lport) && !(reuse && w->reuse))
			return true;
	return false;
}

unsigned demux_port_names(struct vmh_tcp *t, uint16_t lport, struct vmh_tcp_addr *out, unsigned max)
{
	unsigned n = 0;

	for (uint32_t i = 0; i <= t->table_mask; i++)
		for (struct vmh_tcp_conn *c = t->table[i]; c && n < max; c = c->hash_next)
			if (c->key.lport == lport)
				core_address(c, &out[n++]);
	return n;
}

void list_add(struct conn_list *l, struct vmh_tcp_conn *c)
{
	c->q_next = NULL;
	c->q_prev = l->tail;
	if (l->tail)
		l->tail->q_next = c;
	else
		l->head = c;
	l->tail = c;
	l->n++;
}

void list_remove(struct conn_list *l, struct vmh_tcp_conn *c)
{
	if (c->q_prev)
		c->q_prev->q_next = c->q_next;
	else
		l->head = c->q_next;
	if (c->q_next)
		c->q_next->q_prev = c->q_prev;
	else
		l->tail = c->q_prev;
	c->q_next = c->q_prev = NULL;
	l->n--;
}

/* Inside. A flood of SYNs takes the half-open ones' places, never those of established connections. */
enum fate demux_syn(struct vmh_tcp_conn *l)
{
	struct listener *s = l->listening;
	struct vmh_tcp *t = l->t;
	struct vmh_tcp_conn *oldest = s->half_open.head;
	/* as Linux, which answers those beyond by cookies where it may; so they need not begin that early here */
	unsigned room = l->opt.syn_cookies ? LWIP_MAX(s->backlog, HALF_OPEN_MIN) : s->backlog + 1;

	if (l->opt.syn_rate) {
		if (t->now - s->rate_since >= SEC) {
			s->rate_since = t->now;
			s->rate_used = 0;
		}
		if (s->rate_used >= l->opt.syn_rate)
			return SYN_DROPPED;
	}
	if (s->ready.n > s->backlog) /* as Linux: one more than it says */
		return SYN_DROPPED;
	s->rate_used++;
	if (l->opt.syn_cookies > 1)
		return SYN_COOKIE;
	if (s->half_open.n >= room) {
		if (t->now - oldest->heard_at < (l->opt.syn_cookies ? HALF_OPEN_OLD_COOKIES : HALF_OPEN_OLD))
			return l->opt.syn_cookies ? SYN_COOKIE : SYN_DROPPED;
		core_leave(t, NULL);
		core_enter(t, oldest);
		core_drop(oldest, ETIMEDOUT, false);
		core_leave(t, oldest);
		core_enter(t, NULL);
	}
	return SYN_TAKEN;
}
