/* Completion queues. */
#include <stdlib.h>
#include <string.h>
#include "sv.h"

#define STAMPS (IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)

uint32_t sv_cq_room(const struct sv_cq *cq)
{
	return (uint32_t)cq->base.cqe - (cq->tail - cq->head);
}

/* A CQ that ran over is of no use any more, on a NIC as well: its QPs are told by their next completion. */
static void overrun(struct sv_cq *cq)
{
	if (!cq->overrun)
		sv_event_queue(sv_context(cq->base.context), IBV_EVENT_CQ_ERR, cq);
	cq->overrun = true;
}

void sv_cq_push(struct sv_cq *cq, const struct sv_cqe *cqe)
{
	struct sv_cqe *entry;

	if (!sv_cq_room(cq)) {
		overrun(cq);
		return;
	}
	entry = &cq->ring[cq->tail++ & (cq->size - 1)];
	*entry = *cqe;
	if (cq->wc_flags & STAMPS && !entry->ktime)
		entry->ktime = (uint64_t)sv_clock(1);
	if (!cq->armed || cq->event_fd < 0 || (cq->armed == SV_ARMED_SOLICITED && cqe->status == IBV_WC_SUCCESS))
		return;
	sv_channel_disarm(cq);
	cq->pending++;
	sv_eventfd_add(cq->event_fd, 1);
}

/* The oldest completion; looks for up to `wanted` new frames when there is none. */
bool sv_cq_take(struct sv_cq *cq, struct sv_cqe *cqe, uint32_t wanted)
{
	if (cq->head == cq->tail)
		sv_rx_pump(cq, wanted);
	if (cq->head == cq->tail)
		return false;
	*cqe = cq->ring[cq->head++ & (cq->size - 1)];
	if (cq->blocked)
		sv_channel_room(cq);
	if (cqe->retires)
		atomic_fetch_add(&cqe->qp->sq_retired, cqe->retires);
	return true;
}

/* Drops the completions of a QP that is destroyed. */
void sv_cq_forget(struct sv_cq *cq, struct sv_qp *qp)
{
	uint32_t to = cq->head;

	for (uint32_t from = cq->head; from != cq->tail; from++)
		if (cq->ring[from & (cq->size - 1)].qp != qp)
			cq->ring[to++ & (cq->size - 1)] = cq->ring[from & (cq->size - 1)];
	cq->tail = to;
	sv_channel_room(cq);
}

int sv_poll_cq(struct ibv_cq *base, int entries, struct ibv_wc *wc)
{
	struct sv_cq *cq = sv_cq(base);
	struct sv_cqe cqe;
	int n = 0;

	pthread_mutex_lock(&cq->lock);
	for (; n < entries && sv_cq_take(cq, &cqe, (uint32_t)(entries - n)); n++) {
		memset(&wc[n], 0, sizeof(wc[n]));
		wc[n].wr_id = cqe.wr_id;
		wc[n].status = cqe.status;
		wc[n].opcode = cqe.opcode;
		wc[n].vendor_err = cqe.vendor_err;
		wc[n].byte_len = cqe.byte_len;
		wc[n].qp_num = cqe.qp_num;
		wc[n].wc_flags = cqe.wc_flags;
	}
	if (!n && cq->overrun)
		n = -EIO;
	pthread_mutex_unlock(&cq->lock);
	return n;
}

static uint32_t ring_entries(uint32_t cqe)
{
	uint32_t size = 2;

	while (size <= cqe)
		size *= 2;
	return size;
}

struct sv_cq *sv_cq_make(struct ibv_context *context, uint32_t cqe, void *cq_context, struct ibv_comp_channel *channel,
			 uint32_t vector)
{
	struct sv_context *x = sv_context(context);
	struct sv_cq *cq;
	int error = 0;

	if (!cqe || cqe > SV_MAX_CQE || vector >= (uint32_t)context->num_comp_vectors ||
	    (channel && channel->context != context))
		return SV_NULL(EINVAL);
	if (x->dead)
		return SV_NULL(EIO);
	cq = calloc(1, sizeof(*cq));
	if (!cq)
		return NULL;
	cq->size = ring_entries(cqe);
	cq->ring = calloc(cq->size, sizeof(*cq->ring));
	cq->base.context = context;
	cq->base.cq_context = cq_context;
	cq->base.cqe = (int)cq->size - 1;
	cq->base.handle = ++x->handles;
	cq->event_fd = -1;
	pthread_mutex_init(&cq->poll_lock, NULL);
	pthread_mutex_init(&cq->lock, NULL);
	pthread_mutex_init(&cq->base.mutex, NULL);
	pthread_cond_init(&cq->base.cond, NULL);
	if (!cq->ring)
		error = -ENOMEM;
	else if (channel)
		error = sv_channel_join((struct sv_channel *)channel, cq);
	if (error) {
		free(cq->ring);
		free(cq);
		return SV_NULL(-error);
	}
	pthread_mutex_lock(&x->lock);
	cq->next = x->cqs;
	x->cqs = cq;
	pthread_mutex_unlock(&x->lock);
	return cq;
}

SV_EXPORT struct ibv_cq *ibv_create_cq(struct ibv_context *context, int cqe, void *cq_context,
				       struct ibv_comp_channel *channel, int vector)
{
	struct sv_cq *cq;

	if (cqe < 0 || vector < 0)
		return SV_NULL(EINVAL);
	cq = sv_cq_make(context, (uint32_t)cqe, cq_context, channel, (uint32_t)vector);
	return cq ? sv_cq_public(cq) : NULL;
}

SV_EXPORT int ibv_resize_cq(struct ibv_cq *base, int cqe)
{
	struct sv_cq *cq = sv_cq(base);
	struct sv_cqe *ring;
	uint32_t size, used;

	if (sv_context(base->context)->dead)
		return EIO;
	if (cqe < 1 || cqe > SV_MAX_CQE)
		return EINVAL;
	size = ring_entries((uint32_t)cqe);
	ring = calloc(size, sizeof(*ring));
	if (!ring)
		return ENOMEM;
	pthread_mutex_lock(&cq->lock);
	used = cq->tail - cq->head;
	if (used >= size) {
		pthread_mutex_unlock(&cq->lock);
		free(ring);
		return EINVAL;
	}
	for (uint32_t i = 0; i < used; i++)
		ring[i] = cq->ring[(cq->head + i) & (cq->size - 1)];
	free(cq->ring);
	cq->ring = ring;
	cq->size = size;
	cq->head = 0;
	cq->tail = used;
	base->cqe = (int)size - 1;
	sv_channel_room(cq);
	pthread_mutex_unlock(&cq->lock);
	return 0;
}

/* Accepted as on a NIC. There is no interrupt to spare: an event is there when a frame is. */
int sv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr)
{
	if (sv_context(cq->context)->dead)
		return EIO;
	return attr->attr_mask & ~(uint32_t)IBV_CQ_ATTR_MODERATE ? EINVAL : 0;
}

SV_EXPORT int ibv_destroy_cq(struct ibv_cq *base)
{
	struct sv_cq *cq = sv_cq(base), **at;
	struct sv_context *x = sv_context(base->context);

	if (cq->users)
		return EBUSY;
	if (base->channel)
		sv_channel_leave((struct sv_channel *)base->channel, cq);
	pthread_mutex_lock(&x->lock);
	for (at = &x->cqs; *at && *at != cq; at = &(*at)->next)
		;
	if (*at)
		*at = cq->next;
	pthread_mutex_unlock(&x->lock);
	sv_event_drain(x, cq, &base->mutex, &base->cond, &base->async_events_completed, &cq->async_told);
	if (!x->forked) {
		pthread_mutex_lock(&base->mutex);
		while (base->comp_events_completed != cq->told)
			pthread_cond_wait(&base->cond, &base->mutex);
		pthread_mutex_unlock(&base->mutex);
	}
	pthread_mutex_destroy(&cq->poll_lock);
	pthread_mutex_destroy(&cq->lock);
	pthread_mutex_destroy(&base->mutex);
	pthread_cond_destroy(&base->cond);
	free(cq->ring);
	free(cq);
	return 0;
}
