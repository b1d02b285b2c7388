/* Completion channels. The fd is an epoll fd, so that it nests in the program's own poll, select and epoll. Its members
 * are an eventfd per CQ, which counts events that wait, and while a CQ is armed the rings of the QPs that receive on it. */
#include <fcntl.h>
#include <stdlib.h>
#include "sv.h"

#define RING_BIT 1ull /* of a member's data: the CQ's address, or that of the CQ whose ring it is plus this */

SV_EXPORT struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *context)
{
	struct sv_context *x = sv_context(context);
	struct sv_channel *channel = x->dead ? SV_NULL(EIO) : calloc(1, sizeof(*channel));

	if (!channel)
		return NULL;
	channel->base.context = context;
	channel->base.fd = sv_epoll_create();
	if (channel->base.fd < 0) {
		int error = -channel->base.fd;

		free(channel);
		return SV_NULL(error);
	}
	pthread_mutex_init(&channel->lock, NULL);
	pthread_mutex_lock(&x->lock);
	channel->next = x->channels;
	x->channels = channel;
	pthread_mutex_unlock(&x->lock);
	return &channel->base;
}

SV_EXPORT int ibv_destroy_comp_channel(struct ibv_comp_channel *base)
{
	struct sv_channel *channel = (struct sv_channel *)base, **at;
	struct sv_context *x = sv_context(base->context);

	pthread_mutex_lock(&channel->lock);
	if (base->refcnt) {
		pthread_mutex_unlock(&channel->lock);
		return EBUSY;
	}
	pthread_mutex_unlock(&channel->lock);
	pthread_mutex_lock(&x->lock);
	for (at = &x->channels; *at && *at != channel; at = &(*at)->next)
		;
	if (*at)
		*at = channel->next;
	pthread_mutex_unlock(&x->lock);
	sv_close(&base->fd);
	pthread_mutex_destroy(&channel->lock);
	free(channel);
	return 0;
}

int sv_channel_join(struct sv_channel *channel, struct sv_cq *cq)
{
	int error;

	cq->event_fd = sv_eventfd();
	if (cq->event_fd < 0)
		return cq->event_fd;
	pthread_mutex_lock(&channel->lock);
	error = sv_epoll_ctl(channel->base.fd, EPOLL_CTL_ADD, cq->event_fd, EPOLLIN, (uintptr_t)cq);
	if (error) {
		sv_close(&cq->event_fd);
	} else {
		cq->base.channel = &channel->base;
		cq->channel_next = channel->cqs;
		channel->cqs = cq;
		channel->base.refcnt++;
	}
	pthread_mutex_unlock(&channel->lock);
	return error;
}

void sv_channel_leave(struct sv_channel *channel, struct sv_cq *cq)
{
	struct sv_cq **at;

	pthread_mutex_lock(&channel->lock);
	for (at = &channel->cqs; *at && *at != cq; at = &(*at)->channel_next)
		;
	if (*at)
		*at = cq->channel_next;
	/* explicitly: a forked child may hold the eventfd. A child itself must not: the epoll set is the parent's */
	if (!sv_context(cq->base.context)->forked)
		sv_epoll_ctl(channel->base.fd, EPOLL_CTL_DEL, cq->event_fd, 0, 0);
	sv_close(&cq->event_fd);
	channel->base.refcnt--;
	pthread_mutex_unlock(&channel->lock);
}

void sv_channel_watch(struct sv_cq *cq, struct sv_qp *q)
{
	if (!cq->base.channel)
		return;
	sv_epoll_ctl(cq->base.channel->fd, EPOLL_CTL_ADD, q->ring->fd, EPOLLONESHOT, (uintptr_t)cq | RING_BIT);
	if (cq->armed == SV_ARMED)
		sv_channel_arm(cq, q);
}

void sv_channel_unwatch(struct sv_cq *cq, struct sv_qp *q)
{
	if (cq->base.channel && q->ring)
		sv_epoll_ctl(cq->base.channel->fd, EPOLL_CTL_DEL, q->ring->fd, 0, 0);
}

/* Sets the flag first: epoll then looks whether frames are there already. See steer.bpf.c for the other side. */
void sv_channel_arm(struct sv_cq *cq, struct sv_qp *q)
{
	if (!q->slot)
		return;
	__atomic_store_n(&q->slot->armed, 1, __ATOMIC_SEQ_CST);
	sv_epoll_ctl(cq->base.channel->fd, EPOLL_CTL_MOD, q->ring->fd, EPOLLIN | EPOLLONESHOT, (uintptr_t)cq | RING_BIT);
}

void sv_channel_disarm(struct sv_cq *cq)
{
	cq->armed = SV_UNARMED;
	for (struct sv_qp *q = cq->receivers; q; q = q->cq_next)
		if (q->slot)
			__atomic_store_n(&q->slot->armed, 0, __ATOMIC_RELAXED);
}

/* Frames of a full CQ stay in their rings, and are told when something was taken out of it: sv_channel_room(). */
static void arm_all(struct sv_cq *cq, bool but_starved)
{
	cq->blocked = !sv_cq_room(cq);
	if (cq->blocked)
		return;
	for (struct sv_qp *q = cq->receivers; q; q = q->cq_next)
		if (!but_starved || !q->starved)
			sv_channel_arm(cq, q);
}

void sv_channel_room(struct sv_cq *cq)
{
	if (cq->blocked && cq->armed == SV_ARMED && !sv_context(cq->base.context)->dead)
		arm_all(cq, true);
}

int sv_req_notify_cq(struct ibv_cq *base, int solicited_only)
{
	struct sv_cq *cq = sv_cq(base);

	if (sv_context(base->context)->forked)
		return EIO;
	pthread_mutex_lock(&cq->lock);
	if (cq->armed != SV_ARMED)
		cq->armed = solicited_only ? SV_ARMED_SOLICITED : SV_ARMED;
	/* no received frame is solicited */
	if (cq->armed == SV_ARMED && base->channel && !sv_context(base->context)->dead)
		arm_all(cq, false);
	pthread_mutex_unlock(&cq->lock);
	return 0;
}

static struct sv_cq *member(struct sv_channel *channel, uint64_t data)
{
	for (struct sv_cq *cq = channel->cqs; cq; cq = cq->channel_next)
		if ((uintptr_t)cq == (data & ~RING_BIT))
			return cq;
	return NULL;
}

/* Has the CQ an event? Frames of an armed one become completions here, and these the event. */
static bool take_event(struct sv_cq *cq)
{
	bool taken = false;

	pthread_mutex_lock(&cq->lock);
	if (!cq->pending && cq->armed == SV_ARMED)
		sv_rx_pump(cq, 1);
	if (cq->pending) {
		cq->pending--;
		cq->told++;
		sv_eventfd_take(cq->event_fd);
		taken = true;
	} else if (cq->armed == SV_ARMED) {
		/* nothing yet, for instance because a frame is still being written. A ring whose frames find no receive
		 * buffer waits for sv_post_recv() */
		arm_all(cq, true);
	}
	pthread_mutex_unlock(&cq->lock);
	return taken;
}

SV_EXPORT int ibv_get_cq_event(struct ibv_comp_channel *base, struct ibv_cq **cq, void **cq_context)
{
	struct sv_channel *channel = (struct sv_channel *)base;

	for (;;) {
		bool blocking = !(sv_fcntl(base->fd, F_GETFL, 0) & O_NONBLOCK);
		struct epoll_event event;
		struct sv_cq *found;
		int n = sv_context(base->context)->forked ? -EIO : sv_epoll_wait(base->fd, &event, 1, blocking ? -1 : 0);

		if (n <= 0) {
			errno = n < 0 ? -n : EAGAIN;
			return -1;
		}
		pthread_mutex_lock(&channel->lock);
		found = member(channel, event.data.u64);
		if (found && take_event(found)) {
			*cq = sv_cq_public(found);
			*cq_context = found->base.cq_context;
			pthread_mutex_unlock(&channel->lock);
			return 0;
		}
		pthread_mutex_unlock(&channel->lock);
	}
}

SV_EXPORT void ibv_ack_cq_events(struct ibv_cq *cq, unsigned int events)
{
	pthread_mutex_lock(&cq->mutex);
	cq->comp_events_completed += events;
	pthread_cond_broadcast(&cq->cond);
	pthread_mutex_unlock(&cq->mutex);
}
