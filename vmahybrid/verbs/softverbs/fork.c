/* The contexts of this process, and what fork does to them.
 *
 * A child that kept the fds would keep the steering rules of its parent alive when that dies. It closes them, and its
 * copies of the objects only know how to be destroyed: everything else fails with EIO. It may open the device anew.
 */
#include "sv.h"
#include <dlfcn.h>

static pthread_mutex_t registry = PTHREAD_MUTEX_INITIALIZER;
static struct sv_context *contexts;

void sv_registry_lock(void)
{
	pthread_mutex_lock(&registry);
}

void sv_registry_unlock(void)
{
	pthread_mutex_unlock(&registry);
}

static void before(void)
{
	pthread_mutex_lock(&registry);
	for (struct sv_context *x = contexts; x; x = x->next)
		pthread_mutex_lock(&x->lock);
}

static void parent(void)
{
	for (struct sv_context *x = contexts; x; x = x->next)
		pthread_mutex_unlock(&x->lock);
	pthread_mutex_unlock(&registry);
}

static void child_qp(struct sv_qp *q)
{
	pthread_mutex_init(&q->sq_lock, NULL);
	pthread_mutex_init(&q->rq_lock, NULL);
	sv_close(&q->tx_fd);
	q->ring = NULL;
	q->slot = NULL;
}

static void child_cq(struct sv_cq *cq)
{
	pthread_mutex_init(&cq->poll_lock, NULL);
	pthread_mutex_init(&cq->lock, NULL);
	pthread_mutex_init(&cq->base.mutex, NULL);
	pthread_cond_init(&cq->base.cond, NULL);
	cq->head = cq->tail; /* what waits is the parent's to read, once */
	sv_close(&cq->event_fd);
}

/* Locks belong to threads that this process has not. */
static void child(void)
{
	for (struct sv_context *x = contexts; x; x = x->next) {
		x->dead = x->forked = true;
		pthread_mutex_init(&x->lock, NULL);
		pthread_mutex_init(&x->link_lock, NULL);
		pthread_rwlock_init(&x->mr_lock, NULL);
		sv_close(&x->event_fd);
		sv_close(&x->netlink_fd);
		sv_tx_close_spares(x);
		for (struct sv_channel *channel = x->channels; channel; channel = channel->next)
			pthread_mutex_init(&channel->lock, NULL);
		for (struct sv_cq *cq = x->cqs; cq; cq = cq->next)
			child_cq(cq);
		for (struct sv_qp *q = x->qps; q; q = q->next)
			child_qp(q);
	}
	sv_engines_after_fork();
	pthread_mutex_init(&registry, NULL);
}

/* Under the shim its own come first, which close what is open; they can't while these have the locks. */
__attribute__((constructor)) static void start(void)
{
	void (*shims)(void (*)(void), void (*)(void), void (*)(void));

	*(void **)&shims = dlsym(RTLD_DEFAULT, "vmh_atfork");
	if (shims)
		shims(before, parent, child);
	else
		pthread_atfork(before, parent, child);
}

void sv_registry_add(struct sv_context *x)
{
	pthread_mutex_lock(&registry);
	x->next = contexts;
	contexts = x;
	pthread_mutex_unlock(&registry);
}

void sv_registry_remove(struct sv_context *x)
{
	struct sv_context **at;

	pthread_mutex_lock(&registry);
	for (at = &contexts; *at && *at != x; at = &(*at)->next)
		;
	if (*at)
		*at = x->next;
	pthread_mutex_unlock(&registry);
}

/* Nothing is needed: no page of the program is ever written to by a device. */
SV_EXPORT int ibv_fork_init(void)
{
	return 0;
}

SV_EXPORT enum ibv_fork_status ibv_is_fork_initialized(void)
{
	return IBV_FORK_UNNEEDED;
}
