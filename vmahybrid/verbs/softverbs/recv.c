/* Posting receive buffers. */
#include <string.h>
#include "sv.h"

static int put(struct sv_qp *q, const struct ibv_recv_wr *wr)
{
	uint32_t tail = atomic_load(&q->rq_tail);
	struct sv_recv *entry;

	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > q->cap.max_recv_sge)
		return EINVAL;
	if (tail - atomic_load(&q->rq_head) >= q->cap.max_recv_wr)
		return ENOMEM;
	entry = &q->rq[tail & (q->rq_size - 1)];
	entry->wr_id = wr->wr_id;
	entry->sges = wr->num_sge;
	memcpy(entry->sge, wr->sg_list, (size_t)wr->num_sge * sizeof(*entry->sge));
	atomic_store(&q->rq_tail, tail + 1);
	return 0;
}

/* Frames that waited for a buffer, or a QP in the error state: both are the receive CQ's affair. */
static void after_post(struct sv_qp *q)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->recv_cq);

	pthread_mutex_lock(&cq->lock);
	if (atomic_load(&q->state) == IBV_QPS_ERR)
		sv_qp_flush_receives(q);
	else if (cq->armed == SV_ARMED && cq->base.channel)
		sv_channel_arm(cq, q);
	pthread_mutex_unlock(&cq->lock);
}

int sv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	struct sv_qp *q = sv_qp(qp);
	bool starved;
	int error = 0;

	if (sv_context(qp->context)->dead)
		error = EIO;
	else if (atomic_load(&q->state) == IBV_QPS_RESET)
		error = EINVAL;
	pthread_mutex_lock(&q->rq_lock);
	for (; wr && !error; wr = error ? wr : wr->next)
		error = put(q, wr);
	starved = q->starved;
	q->starved = false;
	pthread_mutex_unlock(&q->rq_lock);
	if (starved || atomic_load(&q->state) == IBV_QPS_ERR)
		after_post(q);
	if (error)
		*bad = wr;
	return error;
}
