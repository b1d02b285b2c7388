/* One engine per device and process: the flows of all contexts and QPs on it, and the maps that mirror them.
 *
 * Rules with equal priority and fields that match the same frame: the one with more fields wins; identical rules of
 * several QPs give each a copy, as on ConnectX. Between processes nothing is arbitrated: each that has a matching rule
 * gets the frame only if no one before it took it.
 */
#include <stdlib.h>
#include <string.h>
#include "sv.h"

#define SV_RINGS_KEPT 4
#define SV_RING_MIN (1u << 22) /* some 20,000 small frames: as long as a reader may be off its CPU */
#define SV_RING_MAX (1u << 23)
#define SV_FRAME_USUAL 1600

struct mask {
	union sv_words words;
	uint32_t rank, id, flows;
};

struct slot {
	struct sv_ring *ring;
	struct sv_qp *qp;
};

struct sv_engine {
	struct sv_engine *next;
	int ifindex;
	uint64_t netns;
	int contexts;
	bool gone; /* the device, or this is the child of a fork: nothing is steered any more. Set once; atomic */
	pthread_mutex_t lock;
	struct sv_steering steering;
	struct sv_flow *flows;
	struct mask mask[SV_MASKS]; /* sorted */
	uint32_t masks, next_id, generation;
	struct slot slot[SV_SLOTS];
};

static struct sv_engine *engines; /* registry lock */

static bool is_gone(struct sv_engine *e)
{
	return __atomic_load_n(&e->gone, __ATOMIC_ACQUIRE);
}

/* An engine that serves the device of a context. One whose interface was deleted does not, though another interface may
 * have come to its index. */
static struct sv_engine *find_engine(const struct sv_context *x)
{
	struct sv_engine *e;

	for (e = engines; e; e = e->next)
		if (e->ifindex == x->device->ifindex && e->netns == x->device->netns && !is_gone(e) &&
		    sv_steering_attached(&e->steering, e->ifindex))
			break;
	return e;
}

static struct sv_engine *engine_join(struct sv_context *x, int *error)
{
	struct sv_engine *e;

	sv_registry_lock();
	e = x->engine ? x->engine : find_engine(x);
	if (!e && (e = calloc(1, sizeof(*e)))) {
		e->ifindex = x->device->ifindex;
		e->netns = x->device->netns;
		pthread_mutex_init(&e->lock, NULL);
		*error = sv_device_here(x->device) ? sv_steering_open(e->ifindex, &e->steering) : -ENODEV;
		if (*error) {
			free(e);
			e = NULL;
		} else {
			e->next = engines;
			engines = e;
		}
	}
	if (e && !x->engine) {
		e->contexts++;
		__atomic_store_n(&x->engine, e, __ATOMIC_RELEASE);
	}
	sv_registry_unlock();
	return e;
}

static void free_ring(struct sv_engine *e, uint32_t index)
{
	struct slot *slot = &e->slot[index];

	sv_map_delete(e->steering.rings, &index);
	sv_ring_close(slot->ring);
	free(slot->ring);
	slot->ring = NULL;
}

void sv_engine_leave(struct sv_context *x)
{
	struct sv_engine *e = x->engine, **at;

	if (!e)
		return;
	sv_registry_lock();
	x->engine = NULL;
	if (--e->contexts) {
		sv_registry_unlock();
		return;
	}
	for (at = &engines; *at && *at != e; at = &(*at)->next)
		;
	if (*at) /* not in the child of a fork */
		*at = e->next;
	sv_registry_unlock();
	/* links first: nothing writes to the rings any more */
	sv_close(&e->steering.ingress);
	sv_close(&e->steering.egress);
	for (uint32_t i = 0; i < SV_SLOTS; i++)
		if (e->slot[i].ring) {
			sv_ring_close(e->slot[i].ring);
			free(e->slot[i].ring);
		}
	sv_steering_close(&e->steering);
	pthread_mutex_destroy(&e->lock);
	free(e);
}

/* The interface may live on, in another namespace: its frames are not ours there. The context's lock keeps forks away, whose
 * child closes the links as well. */
void sv_engine_device_gone(struct sv_context *x)
{
	struct sv_engine *e = __atomic_load_n(&x->engine, __ATOMIC_ACQUIRE);

	if (!e)
		return;
	pthread_mutex_lock(&x->lock);
	if (!__atomic_exchange_n(&e->gone, true, __ATOMIC_ACQ_REL)) {
		sv_close(&e->steering.ingress);
		sv_close(&e->steering.egress);
	}
	pthread_mutex_unlock(&x->lock);
}

/* In the child of a fork: the links must not outlive the parent here. The mappings were not inherited. No context of the
 * child's own finds these engines; its copies of the parent's free them. */
void sv_engines_after_fork(void)
{
	struct sv_engine *inherited = engines;

	engines = NULL;
	for (struct sv_engine *e = inherited; e; e = e->next) {
		pthread_mutex_init(&e->lock, NULL);
		e->gone = true;
		e->steering.control = NULL;
		sv_steering_close(&e->steering);
		for (uint32_t i = 0; i < SV_SLOTS; i++)
			if (e->slot[i].ring) {
				sv_close(&e->slot[i].ring->fd);
				e->slot[i].qp = NULL;
			}
	}
}

static size_t ring_size(const struct sv_qp *q)
{
	size_t wanted = (size_t)q->cap.max_recv_wr * SV_FRAME_USUAL, size = SV_RING_MIN;

	while (size < wanted && size < SV_RING_MAX)
		size *= 2;
	return size;
}

/* Takes over a ring that a QP left, or makes one. With e->lock held. */
static int find_slot(struct sv_engine *e, size_t size)
{
	int empty = -1;

	for (uint32_t i = 0; i < SV_SLOTS; i++) {
		if (e->slot[i].qp)
			continue;
		if (e->slot[i].ring && e->slot[i].ring->size == size)
			return (int)i;
		if (!e->slot[i].ring && empty < 0)
			empty = (int)i;
	}
	if (empty >= 0)
		return empty;
	for (uint32_t i = 0; i < SV_SLOTS; i++)
		if (!e->slot[i].qp) {
			free_ring(e, i);
			return (int)i;
		}
	return -ENOSPC;
}

static int own_slot(struct sv_engine *e, struct sv_qp *q)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->recv_cq);
	int error, index;
	uint32_t key;

	if (q->slot)
		return 0;
	index = find_slot(e, ring_size(q));
	if (index < 0)
		return index;
	key = (uint32_t)index;
	if (!e->slot[index].ring) {
		struct sv_ring *ring = calloc(1, sizeof(*ring));

		if (!ring)
			return -ENOMEM;
		error = sv_ring_open(ring_size(q), ring);
		if (!error)
			error = sv_map_update(e->steering.rings, &key, &ring->fd);
		if (error) {
			if (ring->producer)
				sv_ring_close(ring);
			free(ring);
			return error;
		}
		e->slot[index].ring = ring;
	}
	e->slot[index].qp = q;
	pthread_mutex_lock(&cq->lock);
	q->slot_index = key;
	q->slot = &e->steering.control->slot[index];
	q->slot->stamped = cq->wc_flags & (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
				   ? 1 : 0;
	q->slot->frames = q->slot->dropped = 0;
	q->generation = ++e->generation;
	q->ring = e->slot[index].ring;
	sv_rx_discard(q); /* what came for its predecessor */
	sv_channel_watch(cq, q);
	pthread_mutex_unlock(&cq->lock);
	return 0;
}

/* The QP goes; its ring stays for the next one, as making one waits for an RCU grace period. */
void sv_engine_release_slot(struct sv_qp *q)
{
	struct sv_context *x = sv_context(sv_qp_public(q)->context);
	struct sv_engine *e = x->engine;
	uint32_t kept = 0, index = q->slot_index;

	if (!q->slot || !e)
		return;
	pthread_mutex_lock(&e->lock);
	__atomic_store_n(&q->slot->armed, 0, __ATOMIC_SEQ_CST);
	q->slot = NULL;
	e->slot[index].qp = NULL;
	for (uint32_t i = 0; i < SV_SLOTS; i++)
		kept += e->slot[i].ring && !e->slot[i].qp;
	if (kept > SV_RINGS_KEPT)
		free_ring(e, index);
	pthread_mutex_unlock(&e->lock);
}

static uint32_t bits(const union sv_words *words)
{
	uint32_t n = 0;

	for (int i = 0; i < SV_WORDS; i++)
		n += (uint32_t)__builtin_popcountll(words->w[i]);
	return n;
}

static bool before(const struct mask *a, const struct mask *b)
{
	if (a->rank != b->rank)
		return a->rank < b->rank;
	return bits(&a->words) > bits(&b->words);
}

static struct mask *find_mask(struct sv_engine *e, const struct sv_flow *flow)
{
	for (uint32_t i = 0; i < e->masks; i++)
		if (e->mask[i].rank == flow->rank && !memcmp(&e->mask[i].words, &flow->mask, sizeof(flow->mask)))
			return &e->mask[i];
	return NULL;
}

static struct mask *add_mask(struct sv_engine *e, const struct sv_flow *flow)
{
	struct mask made = { .words = flow->mask, .rank = flow->rank, .id = e->next_id };
	uint32_t i;

	if (e->masks == SV_MASKS)
		return NULL;
	e->next_id++;
	for (i = e->masks++; i && before(&made, &e->mask[i - 1]); i--)
		e->mask[i] = e->mask[i - 1];
	e->mask[i] = made;
	return &e->mask[i];
}

static int publish_masks(struct sv_engine *e)
{
	uint32_t next = (e->steering.control->table + 1) % SV_TABLES;
	struct sv_table table;
	int error;

	memset(&table, 0, sizeof(table));
	table.masks = e->masks;
	for (uint32_t i = 0; i < e->masks; i++) {
		memcpy(table.mask[i].w, e->mask[i].words.w, sizeof(table.mask[i].w));
		table.mask[i].id = e->mask[i].id;
	}
	error = sv_map_update(e->steering.tables, &next, &table);
	if (!error)
		__atomic_store_n(&e->steering.control->table, next, __ATOMIC_SEQ_CST);
	return error;
}

static void drop_mask(struct sv_engine *e, struct mask *mask)
{
	uint32_t i = (uint32_t)(mask - e->mask);

	memmove(mask, mask + 1, (--e->masks - i) * sizeof(*mask));
	publish_masks(e);
}

/* Writes the rule for the key of `flow` from all flows that share it, or deletes it. */
static int publish_rule(struct sv_engine *e, const struct sv_flow *flow, uint32_t mask_id)
{
	struct sv_rule_key key = { .mask = mask_id };
	struct sv_rule rule;
	bool any = false;

	memset(&rule, 0, sizeof(rule));
	rule.flags = SV_RULE_PASS;
	memcpy(key.w, flow->value.w, sizeof(key.w));
	for (struct sv_flow *f = e->flows; f; f = f->next) {
		if (f->sniffer || f->rank != flow->rank || memcmp(&f->mask, &flow->mask, sizeof(f->mask)) ||
		    memcmp(&f->value, &flow->value, sizeof(f->value)))
			continue;
		any = true;
		if (!f->pass)
			rule.flags &= ~(uint32_t)SV_RULE_PASS;
		if (f->drop)
			continue;
		if (rule.dests == SV_DESTS)
			return -ENOSPC;
		rule.dest[rule.dests++] = (struct sv_dest){ f->qp->slot_index, f->tag, f->qp->generation, 0 };
	}
	if (any)
		return sv_map_update(e->steering.rules, &key, &rule);
	sv_map_delete(e->steering.rules, &key);
	return 0;
}

static int publish_sniffers(struct sv_engine *e)
{
	struct sv_control *control = e->steering.control;
	uint32_t n = 0;

	for (struct sv_flow *f = e->flows; f; f = f->next) {
		if (!f->sniffer)
			continue;
		if (n == SV_SNIFFERS)
			return -ENOSPC;
		control->sniffer[n++] = (struct sv_dest){ f->qp->slot_index, f->tag, f->qp->generation, 0 };
	}
	__atomic_store_n(&control->sniffers, n, __ATOMIC_SEQ_CST);
	return 0;
}

static int publish(struct sv_engine *e, struct sv_flow *flow)
{
	struct mask *mask;
	int error;

	if (flow->sniffer)
		return publish_sniffers(e);
	mask = find_mask(e, flow);
	if (!mask && !(mask = add_mask(e, flow)))
		return -ENOSPC;
	mask->flows++;
	error = publish_rule(e, flow, mask->id);
	/* the rule first: a mask without it would cost each frame a vain look */
	if (!error && mask->flows == 1)
		error = publish_masks(e);
	return error;
}

static void unlink_flow(struct sv_engine *e, struct sv_flow *flow)
{
	struct sv_flow **at;
	struct mask *mask;

	for (at = &e->flows; *at && *at != flow; at = &(*at)->next)
		;
	if (*at)
		*at = flow->next;
	if (!e->steering.control)
		return;
	if (flow->sniffer) {
		publish_sniffers(e);
		return;
	}
	mask = find_mask(e, flow);
	if (!mask)
		return;
	publish_rule(e, flow, mask->id);
	if (!--mask->flows)
		drop_mask(e, mask);
}

/* Would a frame be copied to both? The programs give out the copies of one rule. */
static bool copies_too(const struct sv_flow *a, const struct sv_flow *b)
{
	bool same = a->rank == b->rank && !memcmp(&a->mask, &b->mask, sizeof(a->mask)) &&
		    !memcmp(&a->value, &b->value, sizeof(a->value));

	if (!a->pass || !b->pass || a->sniffer || b->sniffer || same)
		return false;
	for (int i = 0; i < SV_WORDS; i++)
		if ((a->value.w[i] ^ b->value.w[i]) & a->mask.w[i] & b->mask.w[i])
			return false;
	return true;
}

static int check_copies(const struct sv_engine *e, const struct sv_flow *flow)
{
	for (const struct sv_flow *f = e->flows; f; f = f->next)
		if (copies_too(f, flow))
			return -EOPNOTSUPP;
	return 0;
}

int sv_engine_add(struct sv_context *x, struct sv_flow *flow)
{
	int error = -ENOMEM;
	struct sv_engine *e = engine_join(x, &error);

	if (!e)
		return error;
	pthread_mutex_lock(&e->lock);
	error = is_gone(e) ? -EIO : check_copies(e, flow);
	if (!error)
		error = own_slot(e, flow->qp);
	if (!error) {
		flow->next = e->flows;
		e->flows = flow;
		error = publish(e, flow);
		if (error)
			unlink_flow(e, flow);
	}
	pthread_mutex_unlock(&e->lock);
	return error;
}

/* The flows themselves are the program's, and leak with its other objects. */
void sv_engine_forget(struct sv_context *x)
{
	struct sv_engine *e = x->engine;

	if (!e)
		return;
	pthread_mutex_lock(&e->lock);
	for (struct sv_flow *f = e->flows, *next; f; f = next) {
		next = f->next;
		if (f->base.context == sv_public(x))
			unlink_flow(e, f);
	}
	pthread_mutex_unlock(&e->lock);
	for (struct sv_qp *q = x->qps; q; q = q->next)
		sv_engine_release_slot(q);
}

void sv_engine_remove(struct sv_context *x, struct sv_flow *flow)
{
	struct sv_engine *e = x->engine;

	pthread_mutex_lock(&e->lock);
	unlink_flow(e, flow);
	pthread_mutex_unlock(&e->lock);
}
