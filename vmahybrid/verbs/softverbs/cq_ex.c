/* Extended completion queues: polled one by one, with time stamps, VLAN tags and flow tags. */
#include "sv.h"

#define SV_WC_KNOWN \
	((uint64_t)(IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_CVLAN | \
		    IBV_WC_EX_WITH_FLOW_TAG | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK))
#define SV_POLL_BATCH 16

static struct sv_cq *of(struct ibv_cq_ex *base)
{
	return (struct sv_cq *)base;
}

static int take(struct sv_cq *cq, int when_empty)
{
	bool taken, overrun;

	pthread_mutex_lock(&cq->lock);
	taken = sv_cq_take(cq, &cq->current, SV_POLL_BATCH);
	overrun = cq->overrun;
	pthread_mutex_unlock(&cq->lock);
	if (!taken)
		return overrun ? when_empty : ENOENT;
	cq->base.wr_id = cq->current.wr_id;
	cq->base.status = cq->current.status;
	return 0;
}

static int next_poll(struct ibv_cq_ex *base)
{
	return take(of(base), ENOENT);
}

/* Until end_poll() other threads that start wait; cq->lock is free meanwhile, as the program may post, ask for an event
 * or change a QP before it ends. */
static int start_poll(struct ibv_cq_ex *base, struct ibv_poll_cq_attr *attr)
{
	struct sv_cq *cq = of(base);
	int error;

	if (attr->comp_mask)
		return EINVAL;
	pthread_mutex_lock(&cq->poll_lock);
	error = take(cq, EIO);
	if (error)
		pthread_mutex_unlock(&cq->poll_lock);
	else if (cq->wc_flags & IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK)
		cq->wallclock = sv_clock(0) - sv_clock(1);
	return error;
}

static void end_poll(struct ibv_cq_ex *base)
{
	pthread_mutex_unlock(&of(base)->poll_lock);
}

#define READ(name, type, expression) \
	static type name(struct ibv_cq_ex *base) \
	{ \
		const struct sv_cq *cq = of(base); \
		(void)cq; \
		return expression; \
	}

READ(read_opcode, enum ibv_wc_opcode, cq->current.opcode)
READ(read_vendor_err, uint32_t, cq->current.vendor_err)
READ(read_byte_len, uint32_t, cq->current.byte_len)
READ(read_qp_num, uint32_t, cq->current.qp_num)
READ(read_wc_flags, unsigned int, cq->current.wc_flags)
READ(read_completion_ts, uint64_t, cq->current.ktime)
READ(read_wallclock, uint64_t, cq->current.ktime + (uint64_t)cq->wallclock)
READ(read_cvlan, uint16_t, cq->current.cvlan)
READ(read_flow_tag, uint32_t, cq->current.tag)
/* fields of InfiniBand packets */
READ(read_nothing32, uint32_t, 0)
READ(read_nothing8, uint8_t, 0)

struct ibv_cq_ex *sv_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr)
{
	struct sv_cq *cq;

	if (attr->wc_flags & ~SV_WC_KNOWN)
		return SV_NULL(EOPNOTSUPP);
	if (attr->comp_mask & ~(uint32_t)(IBV_CQ_INIT_ATTR_MASK_FLAGS | IBV_CQ_INIT_ATTR_MASK_PD))
		return SV_NULL(EINVAL);
	if (attr->comp_mask & IBV_CQ_INIT_ATTR_MASK_FLAGS &&
	    attr->flags & ~(uint32_t)IBV_CREATE_CQ_ATTR_SINGLE_THREADED) /* which is less than we give */
		return SV_NULL(EOPNOTSUPP);
	cq = sv_cq_make(context, attr->cqe, attr->cq_context, attr->channel, attr->comp_vector);
	if (!cq)
		return NULL;
	cq->wc_flags = attr->wc_flags;
	cq->base.start_poll = start_poll;
	cq->base.next_poll = next_poll;
	cq->base.end_poll = end_poll;
	cq->base.read_opcode = read_opcode;
	cq->base.read_vendor_err = read_vendor_err;
	cq->base.read_byte_len = read_byte_len;
	cq->base.read_imm_data = read_nothing32;
	cq->base.read_qp_num = read_qp_num;
	cq->base.read_src_qp = read_nothing32;
	cq->base.read_wc_flags = read_wc_flags;
	cq->base.read_slid = read_nothing32;
	cq->base.read_sl = read_nothing8;
	cq->base.read_dlid_path_bits = read_nothing8;
	cq->base.read_completion_ts = read_completion_ts;
	cq->base.read_completion_wallclock_ns = read_wallclock;
	cq->base.read_cvlan = read_cvlan;
	cq->base.read_flow_tag = read_flow_tag;
	return &cq->base;
}
