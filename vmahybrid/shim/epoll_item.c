/* Epoll sets and their items: pools, and who is in which set. */
#include "vmh_iomux_int.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"

#define CHUNK_BYTES 65536
struct chunk {
	struct chunk *next;
	char mem[];
};
#define ITEMS_PER_CHUNK ((CHUNK_BYTES - sizeof(struct chunk)) / sizeof(struct vmh_epitem))
#define EPS_PER_CHUNK ((CHUNK_BYTES - sizeof(struct chunk)) / sizeof(struct vmh_ep))

static struct vmh_lock pool_lock;
static struct chunk *item_chunks, *ep_chunks;
static struct vmh_epitem *free_items;
static struct vmh_ep *free_eps;

/* Members are hashed over these, so that two rings seldom wait for each other in notify. */
#define ITEMS_LOCKS 64
static struct vmh_lock items_locks[ITEMS_LOCKS];

static struct vmh_lock *items_lock(const struct vmh_obj *member)
{
	return &items_locks[((uintptr_t)member >> 6) * 0x9e3779b97f4a7c15u >> 58];
}

static struct chunk *chunk_new(struct chunk **list)
{
	struct chunk *c = vmh_scratch_new(CHUNK_BYTES);

	if (c) {
		c->next = *list;
		*list = c;
	}
	return c;
}

static void free_items_of(struct chunk *c)
{
	struct vmh_epitem *it = (struct vmh_epitem *)c->mem;

	for (size_t i = 0; i < ITEMS_PER_CHUNK; i++, it++) {
		it->set = NULL;
		it->rdy_next = NULL;
		it->set_next = free_items;
		free_items = it;
	}
}

struct vmh_epitem *vmh_epitem_alloc(void)
{
	struct vmh_epitem *it;
	struct chunk *c;

	vmh_lock(&pool_lock);
	if (!free_items) {
		c = chunk_new(&item_chunks);
		if (c)
			free_items_of(c);
	}
	it = free_items;
	if (it)
		free_items = it->set_next;
	vmh_unlock(&pool_lock);
	return it;
}

void vmh_epitem_free(struct vmh_epitem *it)
{
	vmh_lock(&pool_lock);
	it->set_next = free_items;
	free_items = it;
	vmh_unlock(&pool_lock);
}

static void ep_init(struct vmh_ep *e)
{
	e->items = NULL;
	e->nitems = e->noneshot = 0;
	e->rdy.rdy_next = e->rdy.rdy_prev = &e->rdy;
	atomic_store(&e->rdy_n, 0);
	atomic_store(&e->maybe_ring, 0);
	atomic_store(&e->out_armed, 0);
	atomic_store(&e->nested, 0);
	atomic_store(&e->tcp, 0);
	atomic_store(&e->kwait, 0);
	atomic_store(&e->kick_on, 0);
	__atomic_store_n(&e->hint, NULL, __ATOMIC_RELAXED);
	memset(e->foreign, 0, sizeof(e->foreign));
	e->look = (struct vmh_oslook){ 0 };
}

struct vmh_ep *vmh_ep_alloc(void)
{
	struct vmh_ep *e;
	struct chunk *c;

	vmh_lock(&pool_lock);
	if (!free_eps && (c = chunk_new(&ep_chunks))) {
		e = (struct vmh_ep *)c->mem;
		for (size_t i = 0; i < EPS_PER_CHUNK; i++, e++) {
			e->free_next = free_eps;
			free_eps = e;
		}
	}
	e = free_eps;
	if (e)
		free_eps = e->free_next;
	vmh_unlock(&pool_lock);
	if (e)
		ep_init(e);
	return e;
}

void vmh_ep_free(struct vmh_ep *e)
{
	vmh_lock(&pool_lock);
	e->free_next = free_eps;
	free_eps = e;
	vmh_unlock(&pool_lock);
}

/* ---- membership ---- */

struct vmh_epitem *vmh_epitem_find(struct vmh_ep *e, struct vmh_obj *member, int fd)
{
	struct vmh_lock *l = items_lock(member);
	struct vmh_epitem *it;

	vmh_lock(l);
	for (it = member->items; it; it = it->member_next)
		if (it->set == e && (it->fd == fd || fd < 0))
			break;
	vmh_unlock(l);
	return it;
}

bool vmh_epitem_link(struct vmh_epitem *it)
{
	struct vmh_ep *e = it->set;
	struct vmh_obj *m = it->member;
	struct vmh_lock *l = items_lock(m);

	vmh_lock(l);
	/* closed is set before the items are taken away (vmh_epoll_member_closed): no item survives */
	if (atomic_load(&m->closed)) {
		vmh_unlock(l);
		return false;
	}
	it->member_next = m->items;
	it->member_pprev = &m->items;
	if (m->items)
		m->items->member_pprev = &it->member_next;
	__atomic_store_n(&m->items, it, __ATOMIC_RELEASE);
	vmh_unlock(l);
	it->set_next = e->items;
	it->set_pprev = &e->items;
	if (e->items)
		e->items->set_pprev = &it->set_next;
	e->items = it;
	VMH_SET(e->nitems, e->nitems + 1);
	/* pairs with the fence of notify: it sees the item, or we see its datagram */
	atomic_thread_fence(memory_order_seq_cst);
	return true;
}

void vmh_epitem_unlink(struct vmh_epitem *it)
{
	struct vmh_ep *e = it->set;
	struct vmh_lock *l = items_lock(it->member);

	vmh_ep_shut(it->fd);
	vmh_lock(l);
	__atomic_store_n(it->member_pprev, it->member_next, __ATOMIC_RELAXED);
	if (it->member_next)
		it->member_next->member_pprev = it->member_pprev;
	vmh_lock(&e->rdy_lock);
	if (it->rdy_next)
		vmh_ep_rdy_remove(e, it);
	if (it->events & EPOLLONESHOT)
		e->noneshot--;
	__atomic_store_n(&it->set, NULL, __ATOMIC_RELAXED);
	vmh_unlock(&e->rdy_lock);
	vmh_unlock(l);
	*it->set_pprev = it->set_next;
	if (it->set_next)
		it->set_next->set_pprev = it->set_pprev;
	VMH_SET(e->nitems, e->nitems - 1);
	if (e->hint == it)
		__atomic_store_n(&e->hint, NULL, __ATOMIC_RELAXED);
	vmh_epitem_free(it);
}

struct vmh_ep *vmh_ep_of_member(struct vmh_obj *member, bool (*match)(const struct vmh_ep *e))
{
	struct vmh_lock *l = items_lock(member);
	struct vmh_ep *e = NULL;

	vmh_lock(l);
	for (struct vmh_epitem *it = member->items; it && !e; it = it->member_next)
		if (match(it->set))
			e = it->set;
	if (e)
		vmh_obj_hold(&e->obj); /* alive: a closing set takes its items away first */
	vmh_unlock(l);
	return e;
}

void vmh_ep_mark_ring(struct vmh_obj *member)
{
	struct vmh_lock *l = items_lock(member);

	vmh_lock(l);
	for (struct vmh_epitem *it = member->items; it; it = it->member_next)
		atomic_store(&it->set->maybe_ring, 1);
	vmh_unlock(l);
}

unsigned vmh_epoll_sets_of(struct vmh_obj *member, const void **sets, unsigned max)
{
	struct vmh_lock *l;
	unsigned n = 0;

	if (!__atomic_load_n(&member->items, __ATOMIC_RELAXED))
		return 0;
	l = items_lock(member);
	vmh_lock(l);
	for (struct vmh_epitem *it = member->items; it && n < max; it = it->member_next)
		sets[n++] = &it->set->obj;
	vmh_unlock(l);
	return n;
}

void vmh_epoll_notify(struct vmh_obj *member)
{
	struct vmh_lock *l;

	atomic_thread_fence(memory_order_seq_cst); /* the datagram before the items: see vmh_epitem_link */
	if (!__atomic_load_n(&member->items, __ATOMIC_RELAXED))
		return;
	l = items_lock(member);
	vmh_lock(l);
	for (struct vmh_epitem *it = member->items; it; it = it->member_next)
		vmh_ep_push(it);
	vmh_unlock(l);
}

void vmh_epoll_sent(struct vmh_sock *s)
{
	struct vmh_lock *l = items_lock(&s->obj);
	bool any = false;

	if (!atomic_load_explicit(&s->rx_on, memory_order_relaxed))
		return; /* its sets are waited for in the kernel */
	vmh_lock(l);
	/* cleared before the look: who arms an item meanwhile sets it again */
	atomic_store(&s->out_edges, 0);
	for (struct vmh_epitem *it = s->obj.items; it; it = it->member_next) {
		if (!vmh_ep_out_edges(it))
			continue;
		vmh_ep_push_out(it);
		any = true;
	}
	if (any)
		atomic_store(&s->out_edges, 1);
	vmh_unlock(l);
	if (any)
		vmh_wake_all();
}

struct vmh_tcps *vmh_epitem_tcp(const struct vmh_epitem *it)
{
	struct vmh_obj *m = __atomic_load_n(&it->member, __ATOMIC_RELAXED);

	return atomic_load_explicit(&m->class_, memory_order_relaxed) == VMH_CLASS_TCP ? (struct vmh_tcps *)m : NULL;
}

bool vmh_epitem_parked(const struct vmh_epitem *it)
{
	const struct vmh_tcps *s = vmh_epitem_tcp(it);

	return s && vmh_tcps_parked(s);
}

bool vmh_epitem_hushed(const struct vmh_epitem *it)
{
	struct vmh_tcps *s = vmh_epitem_tcp(it);

	return s && vmh_tcps_hushed(s);
}

bool vmh_epitem_on_ring(const struct vmh_epitem *it)
{
	const struct vmh_obj *m = __atomic_load_n(&it->member, __ATOMIC_RELAXED);

	if (vmh_unlikely(atomic_load_explicit(&m->class_, memory_order_relaxed) == VMH_CLASS_TCP))
		return vmh_tcps_on_rings((const struct vmh_tcps *)m);
	return vmh_sock_on_ring((const struct vmh_sock *)m);
}

#define FEW_SETS 32 /* that a socket is a member of */

/* The sets that it is a member of, held, until forget_sets(). Without memory those that fit in `few`, and not the whole. */
struct sets {
	struct in_set { struct vmh_ep *e; int fd; } few[FEW_SETS], *all;
	unsigned n, room;
	bool whole;
};

static void forget_sets(struct sets *x)
{
	for (unsigned i = 0; i < x->n; i++)
		vmh_obj_put(&x->all[i].e->obj);
	if (x->all != x->few)
		vmh_scratch_free(x->all, x->room * sizeof(*x->all));
}

static void sets_of(struct vmh_obj *member, struct sets *x)
{
	struct vmh_lock *l = items_lock(member);
	struct vmh_epitem *it;
	struct in_set *more;
	unsigned there;

	x->all = x->few;
	for (x->room = FEW_SETS;; x->room = there) {
		vmh_lock(l);
		for (it = member->items, x->n = 0; it && x->n < x->room; it = it->member_next) {
			x->all[x->n++] = (struct in_set){ it->set, it->fd };
			vmh_obj_hold(&it->set->obj);
		}
		for (there = x->n; it; it = it->member_next)
			there++;
		vmh_unlock(l);
		x->whole = there == x->n;
		more = x->whole ? NULL : vmh_scratch_new(there * sizeof(*more));
		if (!more)
			return;
		forget_sets(x);
		x->all = more;
	}
}

/* false: it stays on the kernel, as nobody could wake who sleeps in one. */
bool vmh_epoll_member_settle(struct vmh_obj *member)
{
	struct sets x;
	bool good;

	sets_of(member, &x);
	good = x.whole && (!x.n || vmh_ep_can_kick());
	for (unsigned i = 0; i < x.n; i++) {
		vmh_lock(&x.all[i].e->obj.lock);
		good = good && vmh_ep_catch_up(x.all[i].e, member, x.all[i].fd);
		vmh_unlock(&x.all[i].e->obj.lock);
	}
	for (unsigned i = 0; good && i < x.n; i++)
		vmh_ep_caught_up(x.all[i].fd);
	if (good)
		vmh_ep_caught_up(member->fd); /* also if it was taken out of its sets */
	forget_sets(&x);
	return good;
}

/* Set lock held. */
static void park_item(struct vmh_epitem *it, bool parked)
{
	if (!parked && !it->silent && !(it->events & (EPOLLET | EPOLLONESHOT)) && vmh_ep_behind(it->fd))
		return; /* it was not parked, and what its events are now only the kernel knows */
	vmh_epitem_tell(it, it->set->obj.fd, parked);
}

/* Object lock of the member held. The state has changed before: an epoll_ctl under way sees it (set_member in epoll.c),
 * or is over when we have the lock of its set. */
void vmh_epoll_member_parked(struct vmh_obj *member, bool parked)
{
	struct vmh_epitem *it;
	struct sets x;

	sets_of(member, &x);
	for (unsigned i = 0; i < x.n; i++) {
		vmh_lock(&x.all[i].e->obj.lock);
		it = vmh_epitem_find(x.all[i].e, member, x.all[i].fd);
		if (it)
			park_item(it, parked);
		vmh_unlock(&x.all[i].e->obj.lock);
	}
	forget_sets(&x);
}

/* ---- fork ---- */

static void sets_fork_child(void)
{
	for (struct chunk *c = ep_chunks; c; c = c->next) {
		struct vmh_ep *e = (struct vmh_ep *)c->mem;

		for (size_t i = 0; i < EPS_PER_CHUNK; i++, e++) {
			uint8_t nested = atomic_load(&e->nested);

			if (!e->stats)
				continue; /* free */
			if (!atomic_load(&e->obj.closed))
				vmh_obj_fork_child(&e->obj);
			vmh_lock_reset(&e->obj.lock);
			vmh_lock_reset(&e->rdy_lock);
			ep_init(e);
			atomic_store(&e->nested, nested); /* the kernel's nesting was inherited */
			e->stats = vmh_stats_epoll_new(e->obj.fd);
		}
	}
}

static bool survives(const struct vmh_epitem *it)
{
	return it->set && it->set->stats && atomic_load(&it->member->class_) == VMH_CLASS_UDP;
}

/* The lists may have been in the middle of a change by another thread of the parent, so they are made
 * anew from the items. Members stay: after daemon() they come back on rings. */
void vmh_epoll_fork_child(void)
{
	vmh_lock_reset(&pool_lock);
	for (unsigned i = 0; i < ITEMS_LOCKS; i++)
		vmh_lock_reset(&items_locks[i]);
	vmh_ep_kick_fork_child();
	vmh_ep_plain_fork_child();
	sets_fork_child();
	free_items = NULL;
	for (struct chunk *c = item_chunks; c; c = c->next)
		for (size_t i = 0; i < ITEMS_PER_CHUNK; i++)
			if (((struct vmh_epitem *)c->mem)[i].set)
				((struct vmh_epitem *)c->mem)[i].member->items = NULL;
	for (struct chunk *c = item_chunks; c; c = c->next) {
		struct vmh_epitem *it = (struct vmh_epitem *)c->mem;

		for (size_t i = 0; i < ITEMS_PER_CHUNK; i++, it++) {
			it->rdy_next = NULL;
			it->sent = 0;
			if (survives(it) && vmh_epitem_link(it)) {
				it->set->noneshot += (it->events & EPOLLONESHOT) != 0;
				vmh_ep_push_if_ready(it);
			} else {
				it->set = NULL;
				vmh_epitem_free(it);
			}
		}
	}
}
