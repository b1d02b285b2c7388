/* Raw packet queue pairs: making, states, unmaking. */
#include <stdlib.h>
#include <string.h>
#include "sv.h"

static void link_qp(struct sv_context *x, struct sv_qp *q)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->recv_cq);

	pthread_mutex_lock(&x->lock);
	q->next = x->qps;
	x->qps = q;
	pthread_mutex_unlock(&x->lock);
	pthread_mutex_lock(&cq->lock);
	q->cq_next = cq->receivers;
	cq->receivers = q;
	pthread_mutex_unlock(&cq->lock);
}

static void unlink_qp(struct sv_context *x, struct sv_qp *q)
{
	struct sv_cq *rx = sv_cq(sv_qp_public(q)->recv_cq), *tx = sv_cq(sv_qp_public(q)->send_cq);
	struct sv_qp **at;

	pthread_mutex_lock(&rx->lock);
	for (at = &rx->receivers; *at && *at != q; at = &(*at)->cq_next)
		;
	if (*at)
		*at = q->cq_next;
	sv_channel_unwatch(rx, q);
	sv_cq_forget(rx, q);
	pthread_mutex_unlock(&rx->lock);
	pthread_mutex_lock(&tx->lock);
	sv_cq_forget(tx, q);
	pthread_mutex_unlock(&tx->lock);
	pthread_mutex_lock(&x->lock);
	for (at = &x->qps; *at && *at != q; at = &(*at)->next)
		;
	if (*at)
		*at = q->next;
	pthread_mutex_unlock(&x->lock);
}

static void free_qp(struct sv_qp *q)
{
	sv_tx_free(q);
	sv_held_forget(q);
	sv_builder_free(q);
	pthread_mutex_destroy(&q->sq_lock);
	pthread_mutex_destroy(&q->rq_lock);
	pthread_mutex_destroy(&sv_qp_public(q)->mutex);
	pthread_cond_destroy(&sv_qp_public(q)->cond);
	free(q->rq);
	free(q->rq_sges);
	free(q->scratch);
	free(q);
}

static int check_attr(struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr)
{
	const uint32_t known = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_CREATE_FLAGS | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS;
	const struct ibv_qp_cap *cap = &attr->cap;

	if (attr->qp_type != IBV_QPT_RAW_PACKET || attr->srq)
		return EOPNOTSUPP;
	if (attr->comp_mask & ~known) /* TSO, RSS, XRC domains */
		return EOPNOTSUPP;
	if (!(attr->comp_mask & IBV_QP_INIT_ATTR_PD) || !attr->pd || !attr->send_cq || !attr->recv_cq)
		return EINVAL;
	if (attr->pd->context != context || attr->send_cq->context != context || attr->recv_cq->context != context)
		return EINVAL;
	if (attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS && attr->create_flags & ~(uint32_t)IBV_QP_CREATE_CVLAN_STRIPPING)
		return EOPNOTSUPP;
	if (attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS && attr->send_ops_flags & ~(uint64_t)IBV_QP_EX_WITH_SEND)
		return EOPNOTSUPP;
	if (cap->max_send_wr > SV_MAX_WR || cap->max_recv_wr > SV_MAX_WR || cap->max_send_sge > SV_MAX_SGE ||
	    cap->max_recv_sge > SV_MAX_SGE || cap->max_inline_data > SV_MAX_INLINE)
		return EINVAL;
	return sv_context(context)->dead ? EIO : 0;
}

static uint32_t at_least(uint32_t value, uint32_t least)
{
	return value > least ? value : least;
}

static int allocate(struct sv_qp *q, const struct ibv_qp_init_attr_ex *attr)
{
	q->cap = attr->cap;
	q->cap.max_send_sge = at_least(q->cap.max_send_sge, 1);
	q->cap.max_recv_sge = at_least(q->cap.max_recv_sge, 1);
	for (q->rq_size = 1; q->rq_size < q->cap.max_recv_wr;)
		q->rq_size *= 2;
	q->rq = calloc(q->rq_size, sizeof(*q->rq));
	q->rq_sges = calloc((size_t)q->rq_size * q->cap.max_recv_sge, sizeof(*q->rq_sges));
	if (!q->rq || !q->rq_sges)
		return -ENOMEM;
	for (uint32_t i = 0; i < q->rq_size; i++)
		q->rq[i].sge = q->rq_sges + (size_t)i * q->cap.max_recv_sge;
	return 0;
}

static struct sv_qp *make_qp(struct ibv_context *context, const struct ibv_qp_init_attr_ex *attr, int *error)
{
	struct sv_context *x = sv_context(context);
	struct sv_qp *q = calloc(1, sizeof(*q));
	struct ibv_qp *qp = sv_qp_public(q);

	*error = -ENOMEM;
	if (!q)
		return NULL;
	qp->context = context;
	qp->qp_context = attr->qp_context;
	qp->pd = attr->pd;
	qp->send_cq = attr->send_cq;
	qp->recv_cq = attr->recv_cq;
	qp->handle = ++x->handles;
	qp->qp_num = qp->handle & 0xffffff;
	qp->state = IBV_QPS_RESET;
	qp->qp_type = attr->qp_type;
	pthread_mutex_init(&qp->mutex, NULL);
	pthread_cond_init(&qp->cond, NULL);
	pthread_mutex_init(&q->sq_lock, NULL);
	pthread_mutex_init(&q->rq_lock, NULL);
	q->state = IBV_QPS_RESET;
	q->sig_all = attr->sq_sig_all;
	q->strip_vlan = attr->comp_mask & IBV_QP_INIT_ATTR_CREATE_FLAGS &&
			attr->create_flags & IBV_QP_CREATE_CVLAN_STRIPPING;
	q->tx_fd = -1;
	*error = allocate(q, attr);
	if (!*error)
		*error = sv_tx_make(q);
	if (!*error && attr->comp_mask & IBV_QP_INIT_ATTR_SEND_OPS_FLAGS)
		*error = sv_builder_make(q);
	if (*error) {
		free_qp(q);
		return NULL;
	}
	return q;
}

struct ibv_qp *sv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr)
{
	int error = check_attr(context, attr);
	struct sv_qp *q;

	if (error)
		return SV_NULL(error);
	q = make_qp(context, attr, &error);
	if (!q)
		return SV_NULL(-error);
	((struct sv_pd *)attr->pd)->users++;
	sv_cq(attr->send_cq)->users++;
	sv_cq(attr->recv_cq)->users++;
	link_qp(sv_context(context), q);
	attr->cap = q->cap;
	return sv_qp_public(q);
}

SV_EXPORT struct ibv_qp *ibv_create_qp(struct ibv_pd *pd, struct ibv_qp_init_attr *attr)
{
	struct ibv_qp_init_attr_ex ex;
	struct ibv_qp *qp;

	memset(&ex, 0, sizeof(ex));
	memcpy(&ex, attr, sizeof(*attr)); /* the one begins as the other */
	ex.comp_mask = IBV_QP_INIT_ATTR_PD;
	ex.pd = pd;
	qp = sv_create_qp_ex(pd->context, &ex);
	if (qp)
		attr->cap = ex.cap;
	return qp;
}

SV_EXPORT struct ibv_qp_ex *ibv_qp_to_qp_ex(struct ibv_qp *qp)
{
	return sv_qp(qp)->builder ? &sv_qp(qp)->base : NULL;
}

void sv_qp_flush_receives(struct sv_qp *q)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->recv_cq);
	uint32_t head = q->rq_head, tail = atomic_load(&q->rq_tail);

	for (; head != tail; head++) {
		struct sv_cqe cqe = { .wr_id = q->rq[head & (q->rq_size - 1)].wr_id, .qp = q, .opcode = IBV_WC_RECV,
				      .status = IBV_WC_WR_FLUSH_ERR, .qp_num = sv_qp_public(q)->qp_num };

		sv_cq_push(cq, &cqe);
	}
	atomic_store(&q->rq_head, head);
}

static void set_state(struct sv_qp *q, enum ibv_qp_state state)
{
	atomic_store(&q->state, state);
	sv_qp_public(q)->state = state;
}

void sv_qp_fail(struct sv_qp *q)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->recv_cq);

	pthread_mutex_lock(&cq->lock);
	set_state(q, IBV_QPS_ERR);
	sv_rx_discard(q);
	sv_qp_flush_receives(q);
	pthread_mutex_unlock(&cq->lock);
}

static void reset(struct sv_qp *q)
{
	struct sv_cq *rx = sv_cq(sv_qp_public(q)->recv_cq), *tx = sv_cq(sv_qp_public(q)->send_cq);

	pthread_mutex_lock(&rx->lock);
	set_state(q, IBV_QPS_RESET);
	sv_rx_discard(q);
	sv_cq_forget(rx, q);
	pthread_mutex_lock(&q->rq_lock);
	atomic_store(&q->rq_head, atomic_load(&q->rq_tail));
	pthread_mutex_unlock(&q->rq_lock);
	pthread_mutex_unlock(&rx->lock);
	pthread_mutex_lock(&tx->lock);
	sv_cq_forget(tx, q);
	pthread_mutex_unlock(&tx->lock);
	sv_held_forget(q);
	q->sq_posted = q->sq_unsignalled = 0;
	atomic_store(&q->sq_retired, 0);
}

/* What came before the QP could receive is lost, as on a NIC. */
static void start_receiving(struct sv_qp *q)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->recv_cq);

	pthread_mutex_lock(&cq->lock);
	sv_rx_discard(q);
	set_state(q, IBV_QPS_RTR);
	pthread_mutex_unlock(&cq->lock);
}

/* The attributes that a step demands besides the state; -1: there is no such step. */
static int demanded(enum ibv_qp_state from, enum ibv_qp_state to)
{
	if (to == IBV_QPS_RESET || to == IBV_QPS_ERR)
		return 0;
	if (from == IBV_QPS_RESET && to == IBV_QPS_INIT)
		return IBV_QP_PORT;
	if (from == IBV_QPS_INIT)
		return to == IBV_QPS_INIT || to == IBV_QPS_RTR ? 0 : -1;
	if (from == IBV_QPS_RTR)
		return to == IBV_QPS_RTS ? 0 : -1;
	if (from == IBV_QPS_RTS || from == IBV_QPS_SQD)
		return to == IBV_QPS_RTS || to == IBV_QPS_SQD ? 0 : -1;
	return -1;
}

static int allowed(enum ibv_qp_state from, enum ibv_qp_state to)
{
	return IBV_QP_STATE | IBV_QP_CUR_STATE | (to == IBV_QPS_INIT ? IBV_QP_PORT : 0) |
	       (from == IBV_QPS_RTS && to == IBV_QPS_SQD ? IBV_QP_EN_SQD_ASYNC_NOTIFY : 0);
}

static void step(struct sv_qp *q, enum ibv_qp_state from, enum ibv_qp_state to, bool tell)
{
	if (to == IBV_QPS_RESET)
		reset(q);
	else if (to == IBV_QPS_ERR)
		sv_qp_fail(q);
	else if (from == IBV_QPS_INIT && to == IBV_QPS_RTR)
		start_receiving(q);
	else
		set_state(q, to);
	if (to != IBV_QPS_SQD)
		sv_held_go(q);
	else if (tell)
		sv_event_queue(sv_context(sv_qp_public(q)->context), IBV_EVENT_SQ_DRAINED, q);
}

static int modify(struct sv_qp *q, const struct ibv_qp_attr *attr, int mask)
{
	enum ibv_qp_state from = atomic_load(&q->state), to = mask & IBV_QP_STATE ? attr->qp_state : from;
	int needed = demanded(from, to);

	if (mask & IBV_QP_RATE_LIMIT)
		return EOPNOTSUPP;
	if (needed < 0 || (mask & needed) != needed || mask & ~allowed(from, to) ||
	    (mask & IBV_QP_CUR_STATE && attr->cur_qp_state != from) || (mask & IBV_QP_PORT && attr->port_num != 1))
		return EINVAL;
	step(q, from, to, mask & IBV_QP_EN_SQD_ASYNC_NOTIFY && attr->en_sqd_async_notify);
	return 0;
}

SV_EXPORT int ibv_modify_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask)
{
	struct sv_qp *q = sv_qp(qp);
	int error;

	if (sv_context(qp->context)->dead)
		return EIO;
	pthread_mutex_lock(&q->sq_lock);
	error = modify(q, attr, mask);
	pthread_mutex_unlock(&q->sq_lock);
	return error;
}

SV_EXPORT int ibv_query_qp(struct ibv_qp *qp, struct ibv_qp_attr *attr, int mask, struct ibv_qp_init_attr *init)
{
	struct sv_qp *q = sv_qp(qp);

	(void)mask; /* names the least that is wanted */
	memset(attr, 0, sizeof(*attr));
	attr->qp_state = attr->cur_qp_state = atomic_load(&q->state);
	attr->port_num = 1;
	attr->cap = q->cap;
	memset(init, 0, sizeof(*init));
	init->qp_context = qp->qp_context;
	init->send_cq = qp->send_cq;
	init->recv_cq = qp->recv_cq;
	init->cap = q->cap;
	init->qp_type = qp->qp_type;
	init->sq_sig_all = q->sig_all;
	return 0;
}

SV_EXPORT int ibv_destroy_qp(struct ibv_qp *qp)
{
	struct sv_qp *q = sv_qp(qp);
	struct sv_context *x = sv_context(qp->context);

	if (q->flows)
		return EBUSY;
	unlink_qp(x, q);
	if (q->slot)
		sv_say("QP %u: %llu frames for it, %llu lost for want of room, %llu not sent", qp->qp_num,
		       (unsigned long long)q->slot->frames, (unsigned long long)q->slot->dropped,
		       (unsigned long long)q->tx_dropped);
	sv_engine_release_slot(q);
	sv_event_drain(x, q, &qp->mutex, &qp->cond, &qp->events_completed, &q->async_told);
	((struct sv_pd *)qp->pd)->users--;
	sv_cq(qp->send_cq)->users--;
	sv_cq(qp->recv_cq)->users--;
	free_qp(q);
	return 0;
}
