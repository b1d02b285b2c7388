/* Life of a ring on a raw packet QP: made after a grant of the service, closed when it is gone. */
#include "ring_verbs.h"
#include "vmh_heap.h"
#include "vmh_log.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_stats.h"
#include <fcntl.h>
#include <stdlib.h>
#include <sys/mman.h>

#define LEAST_WR 16u
#define EVENT_LOOK_NS 100000000ull

/* From here on frames go to the kernel; what was taken before waits in the CQ. */
static void verbs_stop(struct vmh_ring *r)
{
	vmh_verbs_ring_closing(verbs_ring_of(r));
}

static const struct vmh_ring_ops verbs_ops;

/* ---- making it ---- */

static uint32_t descriptors(const struct verbs_dev *d, int64_t wanted)
{
	uint32_t most = (d->max_wr - 1) & ~15u, n = (uint32_t)wanted;

	n = n < most ? n : most;
	n = n < d->max_cqe ? n : d->max_cqe;
	return n < LEAST_WR ? LEAST_WR : n;
}

static int make_channel(struct verbs_ring *x)
{
	long flags;

	x->channel = vmh_ibv.create_comp_channel(x->dev->ctx);
	if (!x->channel)
		return -errno;
	flags = vmh_sys(SYS_fcntl, x->channel->fd, F_GETFL);
	if (flags < 0)
		return (int)flags;
	return (int)vmh_sys(SYS_fcntl, x->channel->fd, F_SETFL, flags | O_NONBLOCK);
}

static int make_cqs(struct verbs_ring *x, uint32_t tx_wr)
{
	struct ibv_cq_init_attr_ex a = { .cqe = x->rx_wr, .cq_context = x, .channel = x->channel,
					 .wc_flags = IBV_WC_EX_WITH_BYTE_LEN | IBV_WC_EX_WITH_FLOW_TAG };
	const uint64_t plain = a.wc_flags;
	uint64_t stamps;

	/* nobody sleeps for room to send: no channel */
	x->tx_cq = vmh_ibv.create_cq(x->dev->ctx, (int)tx_wr, x, NULL, 0);
	if (!x->tx_cq)
		return -errno;
	for (stamps = vmh_verbs_clock_flags(x);; stamps = vmh_verbs_clock_less(x)) {
		a.wc_flags = plain | stamps;
		x->rx_ex = ibv_create_cq_ex(x->dev->ctx, &a);
		if (x->rx_ex || !stamps)
			break;
	}
	vmh_verbs_clock_ready(x);
	if (x->rx_ex) {
		x->rx_cq = ibv_cq_ex_to_cq(x->rx_ex);
		return 0;
	}
	vmh_debug("no flow tags on %s: %s", x->dev->name, strerror(errno));
	x->rx_cq = vmh_ibv.create_cq(x->dev->ctx, (int)x->rx_wr, x, x->channel, 0);
	return x->rx_cq ? 0 : -errno;
}

/* The device may have less room inline than VMA_TX_MAX_INLINE asks for. */
static int make_qp(struct verbs_ring *x, uint32_t tx_wr)
{
	struct ibv_qp_init_attr a = { .qp_context = x, .send_cq = x->tx_cq, .recv_cq = x->rx_cq,
				      .qp_type = IBV_QPT_RAW_PACKET,
				      .cap = { .max_send_wr = tx_wr, .max_recv_wr = x->rx_wr, .max_send_sge = 2,
					       .max_recv_sge = 1 } };
	uint32_t wanted = (uint32_t)vmh_params.tx_max_inline;
	struct ibv_qp_attr got = { 0 };

	for (;; wanted /= 2) {
		a.cap.max_inline_data = wanted;
		x->qp = vmh_ibv.create_qp(x->dev->pd, &a);
		if (x->qp)
			break;
		if (!wanted || (errno != EINVAL && errno != ENOMEM))
			return -errno;
	}
	if (vmh_ibv.query_qp(x->qp, &got, IBV_QP_CAP, &a))
		got.cap.max_inline_data = wanted;
	x->max_inline = got.cap.max_inline_data < wanted ? got.cap.max_inline_data : wanted;
	return 0;
}

static int move(struct verbs_ring *x, enum ibv_qp_state to, int mask)
{
	struct ibv_qp_attr a = { .qp_state = to, .port_num = x->dev->port };
	int rc = vmh_ibv.modify_qp(x->qp, &a, IBV_QP_STATE | mask);

	return rc > 0 ? -rc : rc;
}

/* What the rings before it have comes back to them alone, and one that can't fill its QP would receive nothing. */
static bool is_short_of_buffers(const struct verbs_ring *x)
{
	uint32_t free = vmh_verbs_pool_free(x->pool);

	return free < x->pool->count && free < x->rx_wr + x->level;
}

static int receive_tables(struct verbs_ring *x)
{
	x->batch = (uint32_t)vmh_params.rx_wre_batching;
	if (x->batch > x->rx_wr / 2)
		x->batch = x->rx_wr / 2;
	x->level = (uint32_t)vmh_params.qp_compensation_level;
	if (x->level < x->batch)
		x->level = x->batch;
	x->poll_max = (uint32_t)vmh_params.cq_poll_batch_max;
	if (x->level < x->poll_max) /* two of them cover the debt of a refill that is due and of one poll */
		x->level = x->poll_max;
	if (x->level > x->pool->count)
		x->level = x->pool->count;
	x->keep_full = vmh_params.cq_keep_qp_full;
	x->spare = vmh_heap_get(2 * (size_t)x->level * sizeof(*x->spare));
	x->rwr = vmh_heap_zero(x->batch, sizeof(*x->rwr));
	x->rsge = vmh_heap_zero(x->batch, sizeof(*x->rsge));
	if (vmh_params.rx_prefetch_bytes_before_poll)
		x->order = vmh_heap_zero(x->rx_wr, sizeof(*x->order));
	if (!x->spare || !x->rwr || !x->rsge)
		return -ENOMEM;
	if (is_short_of_buffers(x))
		return -ENOBUFS;
	for (uint32_t i = 0; i < x->batch; i++) {
		x->rsge[i] = (struct ibv_sge){ .length = x->pool->buf_size, .lkey = x->rx_mr->lkey };
		x->rwr[i] = (struct ibv_recv_wr){ .sg_list = &x->rsge[i], .num_sge = 1,
						  .next = i + 1 < x->batch ? &x->rwr[i + 1] : NULL };
	}
	return 0;
}

/* What the ring has of what was asked for. */
static void compare_sizes(const struct verbs_ring *x, uint32_t tx_wr)
{
	const char *where = x->r.ifname;

	const uint32_t most = descriptors(x->dev, INT32_MAX), half = x->pool->count / 2;

	vmh_params_used(VMH_PARAM_TX_WRE, where, LEAST_WR, most, tx_wr);
	vmh_params_used(VMH_PARAM_RX_WRE, where, LEAST_WR, half < most ? half : most, x->rx_wr);
	vmh_params_used(VMH_PARAM_TX_BUFS, where, LEAST_WR - 1, tx_wr - 1, x->tx_slots);
	if (vmh_params.rx_bufs < x->pool->count) /* of too many it is said where the memory is taken */
		vmh_params_used(VMH_PARAM_RX_BUFS, where, x->pool->count, INT32_MAX, x->pool->count);
	if (vmh_params.tx_buf_size && vmh_params.tx_buf_size + 63 < x->tx_buf_size)
		vmh_params_used(VMH_PARAM_TX_BUF_SIZE, where, x->tx_buf_size, 65280, x->tx_buf_size);
	vmh_params_used(VMH_PARAM_TX_WRE_BATCHING, where, 1, x->tx_slots / 2, x->tx_batch);
	vmh_params_used(VMH_PARAM_RX_WRE_BATCHING, where, 1, x->rx_wr / 2, x->batch);
	vmh_params_used(VMH_PARAM_QP_COMPENSATION_LEVEL, where, x->batch > x->poll_max ? x->batch : x->poll_max,
			x->pool->count, x->level);
	vmh_params_used(VMH_PARAM_TX_MAX_INLINE, where, 0, x->max_inline, x->max_inline);
}

/* The order of research/verbs.md, section 6; what is made here, take_apart takes apart. */
static int make(struct verbs_ring *x)
{
	uint32_t tx_wr = descriptors(x->dev, vmh_params.tx_wre);
	int rc;

	x->rx_wr = descriptors(x->dev, vmh_params.rx_wre);
	x->tx_slots = tx_wr - 1;
	if (x->tx_slots > (uint64_t)vmh_params.tx_bufs)
		x->tx_slots = vmh_params.tx_bufs < LEAST_WR ? LEAST_WR - 1 : (uint32_t)vmh_params.tx_bufs;
	x->tx_batch = (uint32_t)vmh_params.tx_wre_batching;
	if (x->tx_batch > x->tx_slots / 2)
		x->tx_batch = x->tx_slots / 2;
	rc = vmh_verbs_pool_get(x);
	if (rc)
		return rc;
	if (x->rx_wr > x->pool->count / 2)
		x->rx_wr = x->pool->count / 2; /* a QP that held all of them would leave none to be read */
	rc = vmh_verbs_tx_memory(x);
	if (!rc)
		rc = receive_tables(x);
	if (!rc)
		rc = make_channel(x);
	if (!rc)
		rc = make_cqs(x, tx_wr);
	if (!rc)
		rc = make_qp(x, tx_wr);
	if (!rc)
		rc = move(x, IBV_QPS_INIT, IBV_QP_PORT);
	if (!rc)
		rc = move(x, IBV_QPS_RTR, 0);
	if (!rc)
		compare_sizes(x, tx_wr);
	return rc ? rc : move(x, IBV_QPS_RTS, 0);
}

/* A call that fails because the device was removed has nothing left to free. */
static void take_apart(struct verbs_ring *x)
{
	if (x->qp) {
		move(x, IBV_QPS_ERR, 0);
		vmh_ibv.destroy_qp(x->qp);
	}
	if (x->rx_cq) {
		vmh_verbs_take_events(x);
		vmh_ibv.destroy_cq(x->rx_cq);
	}
	if (x->tx_cq)
		vmh_ibv.destroy_cq(x->tx_cq);
	if (x->channel)
		vmh_ibv.destroy_comp_channel(x->channel);
	if (x->pool) {
		vmh_verbs_pool_recover(x->pool, x->owner_id);
		vmh_verbs_pool_give(x->pool, x->spare, x->nspare);
		vmh_ibv.dereg_mr(x->rx_mr);
	}
	vmh_verbs_tx_memory_free(x);
	vmh_verbs_dev_close(x->dev);
	vmh_heap_free(x->spare);
	vmh_heap_free(x->rwr);
	vmh_heap_free(x->rsge);
	vmh_heap_free(x->order);
	x->order = NULL;
	x->qp = NULL;
	x->rx_cq = x->tx_cq = NULL;
	x->rx_ex = NULL;
	x->channel = NULL;
	x->rx_mr = NULL;
	x->dev = NULL;
	x->spare = NULL;
	x->rwr = NULL;
	x->rsge = NULL;
	x->nspare = 0;
}

static void describe(struct verbs_ring *x, const struct vmh_msg_ring_reply *g)
{
	struct vmh_ring_stats *s = vmh_stats_ring_new();

	x->r.stats = s;
	s->ring_id = g->ring_id;
	s->ifindex = g->ifindex;
	s->kind = g->kind;
	memcpy(s->ifname, x->r.ifname, sizeof(s->ifname));
	VMH_SET(s->pool_tx_free, x->tx_slots);
	VMH_SET(s->dm_size, x->slot_dm ? x->dm.size : 0);
	__atomic_store_n(&s->used, 1, __ATOMIC_RELEASE);
}

int vmh_ring_verbs_open(const struct vmh_msg_ring_reply *grant, const char *ifname, struct verbs_dev *dev,
			struct vmh_ring **out)
{
	static uint32_t owners;
	struct verbs_ring *x = aligned_alloc(64, (sizeof(*x) + 63) & ~(size_t)63);
	int rc;

	if (!x) {
		vmh_verbs_dev_close(dev);
		return -ENOMEM;
	}
	memset(x, 0, sizeof(*x));
	x->dev = dev;
	x->pid = (pid_t)vmh_sys(SYS_getpid);
	x->owner_id = ++owners;
	x->r.ops = &verbs_ops;
	x->r.id = grant->ring_id;
	x->r.ifindex = grant->ifindex;
	x->r.mtu = grant->mtu;
	x->r.kind = grant->kind;
	x->r.lane = grant->lane;
	memcpy(x->r.mac, grant->mac, sizeof(x->r.mac));
	strncpy(x->r.ifname, ifname, sizeof(x->r.ifname) - 1);
	rc = grant->mtu >= 68 && grant->mtu <= 65535 ? make(x) : -EPROTO;
	if (!rc) {
		rc = vmh_verbs_try_rule(x);
		if (rc)
			vmh_warn("the RDMA device %s takes no flow rules: %s", dev->name, strerror(-rc));
	}
	if (rc) {
		take_apart(x);
		free(x);
		return rc;
	}
	describe(x, grant);
	x->debt = x->rx_wr;
	vmh_verbs_refill(x);
	vmh_verbs_pool_report(x);
	vmh_verbs_moderation_start(x);
	vmh_fd_guard(x->channel->fd);
	vmh_fd_guard(x->dev->ctx->cmd_fd);
	vmh_fd_guard(x->dev->ctx->async_fd);
	vmh_ring_add(&x->r);
	vmh_verbs_ring_opened();
	*out = &x->r;
	return 0;
}

/* ---- its end ---- */

/* In the child of a fork the QP and its rules are the parent's: what the child calls would act on them. Its copies of
 * the descriptors are closed, or they would live on when the parent is gone. */
static void abandon(struct verbs_ring *x)
{
	const int fds[] = { x->channel->fd, x->dev->ctx->async_fd, x->dev->ctx->cmd_fd };

	for (size_t i = 0; i < sizeof(fds) / sizeof(fds[0]); i++)
		vmh_fd_hidden_close(fds[i]);
}

static void verbs_close(struct vmh_ring *r)
{
	struct verbs_ring *x = verbs_ring_of(r);

	if (x->closed)
		return;
	x->closed = true;
	if (x->pid != (pid_t)vmh_sys(SYS_getpid)) {
		abandon(x);
		return;
	}
	vmh_verbs_ring_closing(x);
	vmh_fd_unguard(x->channel->fd);
	vmh_fd_unguard(x->dev->ctx->cmd_fd);
	vmh_fd_unguard(x->dev->ctx->async_fd);
	take_apart(x);
}

static const struct vmh_ring_ops verbs_ops = {
	.poll = vmh_verbs_poll,
	.put = vmh_verbs_put,
	.send = vmh_verbs_send,
	.send_frame = vmh_verbs_send_frame,
	.kick = vmh_verbs_kick,
	.wait_fds = vmh_verbs_wait_fds,
	.arm = vmh_verbs_arm,
	.crowded = vmh_verbs_crowded,
	.stop = verbs_stop,
	.close = verbs_close,
};

/* ---- for the internal thread, which alone closes rings ---- */

static bool device_fatal(struct verbs_ring *x)
{
	struct ibv_async_event ev;
	bool fatal = false;

	while (!vmh_ibv.get_async_event(x->dev->ctx, &ev)) {
		fatal |= ev.event_type == IBV_EVENT_DEVICE_FATAL || ev.event_type == IBV_EVENT_QP_FATAL ||
			 ev.event_type == IBV_EVENT_CQ_ERR;
		vmh_debug("event %d of the RDMA device %s", (int)ev.event_type, x->dev->name);
		vmh_ibv.ack_async_event(&ev);
	}
	return fatal;
}

static bool qp_dead(struct verbs_ring *x)
{
	struct ibv_qp_init_attr init;
	struct ibv_qp_attr a = { 0 };

	if (!atomic_exchange(&x->suspect, false))
		return false;
	return vmh_ibv.query_qp(x->qp, &a, IBV_QP_STATE, &init) || a.qp_state != IBV_QPS_RTS;
}

static inline struct vmh_ring *first(void)
{
	return atomic_load_explicit(&vmh_rings, memory_order_acquire);
}

bool vmh_verbs_any(void)
{
	for (struct vmh_ring *r = first(); r; r = r->next)
		if (r->ops == &verbs_ops && !atomic_load(&r->gone))
			return true;
	return false;
}

struct vmh_ring *vmh_verbs_failed(void)
{
	static uint64_t next_look;
	uint64_t now = vmh_now_ns();
	bool look = now >= next_look;

	if (look)
		next_look = now + EVENT_LOOK_NS;
	for (struct vmh_ring *r = first(); r; r = r->next) {
		struct verbs_ring *x = verbs_ring_of(r);
		int err;

		if (r->ops != &verbs_ops || atomic_load(&r->gone))
			continue;
		err = atomic_load(&x->refused);
		if (!err && !qp_dead(x) && !(look && device_fatal(x)))
			continue;
		vmh_warn("the raw packet QP on %s (%s) failed%s%s", r->ifname, x->dev->name,
			 err ? ", no flow rule can be made: " : "", err ? strerror(err) : "");
		vmh_verbs_distrust(r->ifindex);
		return r;
	}
	return NULL;
}

void vmh_verbs_fork_child(void)
{
	vmh_verbs_flows_fork_child();
	vmh_verbs_mem_fork_child();
}
