/* Sending: work requests of one call become one sendmmsg(2) on the QP's AF_PACKET socket; what they point to is copied
 * by the kernel meanwhile, so that a request is complete when the call returns. */
#include <arpa/inet.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/virtio_net.h>
#include <stdlib.h>
#include <string.h>
#include "sv.h"

#define PIECES (SV_MAX_SGE + 2)
#define PATIENCE 1000 /* attempts while the way out is full: a NIC's send queue waits, it does not drop */

struct sv_tx {
	uint32_t count;
	struct mmsghdr message[SV_TX_BATCH];
	struct iovec piece[SV_TX_BATCH][PIECES];
	struct virtio_net_hdr offload[SV_TX_BATCH];
	struct ibv_send_wr *wr[SV_TX_BATCH];
	uint8_t head[SV_TX_BATCH][SV_HEADERS];
};

static int open_socket(struct sv_context *x, int *fd)
{
	/* protocol 0: this socket receives nothing */
	struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_ifindex = x->device->ifindex };
	int on = 1, mark = SV_MARK, error;

	if (!sv_device_here(x->device))
		return -ENODEV;
	*fd = sv_socket(AF_PACKET, SOCK_RAW, 0);
	if (*fd < 0)
		return *fd;
	error = sv_bind(*fd, &address, sizeof(address));
	if (!error)
		error = sv_setsockopt(*fd, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof(on));
	if (!error)
		error = sv_setsockopt(*fd, SOL_SOCKET, SO_MARK, &mark, sizeof(mark));
	if (error)
		sv_close(fd);
	return error;
}

int sv_tx_make(struct sv_qp *q)
{
	struct sv_context *x = sv_context(sv_qp_public(q)->context);
	int error = 0;

	q->tx = calloc(1, sizeof(*q->tx));
	if (!q->tx)
		return -ENOMEM;
	pthread_mutex_lock(&x->lock);
	if (x->spares)
		q->tx_fd = x->spare_tx[--x->spares];
	pthread_mutex_unlock(&x->lock);
	if (q->tx_fd < 0)
		error = open_socket(x, &q->tx_fd);
	return error;
}

void sv_tx_free(struct sv_qp *q)
{
	struct sv_context *x = sv_context(sv_qp_public(q)->context);

	pthread_mutex_lock(&x->lock);
	if (q->tx_fd >= 0 && x->spares < SV_SPARE_TX) {
		x->spare_tx[x->spares++] = q->tx_fd;
		q->tx_fd = -1;
	}
	pthread_mutex_unlock(&x->lock);
	sv_close(&q->tx_fd);
	free(q->tx);
}

void sv_tx_close_spares(struct sv_context *x)
{
	while (x->spares)
		sv_close(&x->spare_tx[--x->spares]);
}

static void complete(struct sv_qp *q, const struct ibv_send_wr *wr, enum ibv_wc_status status)
{
	struct sv_cq *cq = sv_cq(sv_qp_public(q)->send_cq);
	struct sv_cqe cqe = { .wr_id = wr->wr_id, .qp = q, .opcode = IBV_WC_SEND, .status = (uint8_t)status,
			      .qp_num = sv_qp_public(q)->qp_num };
	bool failed = false;

	q->sq_posted++;
	q->sq_unsignalled++;
	if (status == IBV_WC_SUCCESS && !q->sig_all && !(wr->send_flags & IBV_SEND_SIGNALED))
		return;
	cqe.retires = q->sq_unsignalled;
	q->sq_unsignalled = 0;
	pthread_mutex_lock(&cq->lock);
	sv_cq_push(cq, &cqe);
	if (cq->overrun && !cq->overrun_told)
		failed = cq->overrun_told = true;
	pthread_mutex_unlock(&cq->lock);
	if (failed && atomic_load(&q->state) != IBV_QPS_ERR) {
		sv_event_queue(sv_context(sv_qp_public(q)->context), IBV_EVENT_QP_FATAL, q);
		sv_qp_fail(q);
	}
}

/* How a frame that the kernel refused completes. What a congested or cabled-off port would swallow is sent. */
static enum ibv_wc_status status_of(struct sv_qp *q, int error)
{
	switch (error) {
	case -ENOBUFS:
	case -ENOMEM:
	case -EAGAIN:
	case -ENETDOWN:
		q->tx_dropped++;
		return IBV_WC_SUCCESS;
	case -EMSGSIZE:
		return IBV_WC_LOC_LEN_ERR;
	case -EFAULT:
		return IBV_WC_LOC_PROT_ERR;
	case -ENODEV:
	case -ENXIO:
		sv_device_gone(sv_context(sv_qp_public(q)->context));
		return IBV_WC_WR_FLUSH_ERR;
	default:
		return IBV_WC_LOC_QP_OP_ERR;
	}
}

/* Sends what was gathered. False when the QP failed; the requests behind the failed one are flushed. */
static bool transmit(struct sv_qp *q)
{
	struct sv_tx *tx = q->tx;
	uint32_t done = 0, count = tx->count, attempts = 0;
	bool good = true;

	tx->count = 0;
	while (done < count) {
		long n;

		if (!good) {
			complete(q, tx->wr[done++], IBV_WC_WR_FLUSH_ERR);
			continue;
		}
		n = count - done == 1 ? sv_sendmsg(q->tx_fd, &tx->message[done].msg_hdr, 0) :
					sv_sendmmsg(q->tx_fd, tx->message + done, count - done, 0);
		if (n > 0 && count - done == 1)
			n = 1;
		for (; n > 0; n--)
			complete(q, tx->wr[done++], IBV_WC_SUCCESS);
		if (n == -ENOBUFS && attempts++ < PATIENCE) {
			(void)SV_CALL(SYS_sched_yield);
		} else if (n < 0 && n != -EINTR) {
			enum ibv_wc_status status = status_of(q, (int)n);

			good = status == IBV_WC_SUCCESS;
			complete(q, tx->wr[done++], status);
		}
		good = good && atomic_load(&q->state) == IBV_QPS_RTS;
	}
	if (!good && atomic_load(&q->state) != IBV_QPS_ERR)
		sv_qp_fail(q);
	return good;
}

/* The kernel sums up all that is left of a frame. Where something follows the IP packet, padding for instance, the sum is
 * made here. False: the memory is gone. */
static bool sum_up(struct iovec *piece, const struct sv_offload *sums)
{
	uint8_t *head = piece->iov_base;
	uint32_t at = piece->iov_len < sums->end ? (uint32_t)piece->iov_len : sums->end;
	uint16_t sum = sv_sum_add(0, head + sums->start, at - sums->start, 0);

	while (at < sums->end) {
		uint32_t part = sums->end - at;

		piece++;
		if (piece->iov_len < part)
			part = (uint32_t)piece->iov_len;
		if (part && !sv_memory_readable(piece->iov_base, part))
			return false;
		sum = sv_sum_add(sum, piece->iov_base, part, at - sums->start);
		at += part;
	}
	sv_sum_put(head, sums, sum);
	return true;
}

/* Copies the headers aside, as the program's memory is not ours to write to, and has the kernel do the rest. False: the
 * memory is gone. */
static bool offload(struct sv_tx *tx, uint32_t slot, uint32_t pieces, uint32_t length)
{
	struct iovec *piece = tx->piece[slot];
	struct virtio_net_hdr *header = &tx->offload[slot];
	uint32_t have = 0, from = 2;
	struct sv_offload sums = { 0, 0, 0 };

	while (from < pieces && have < SV_HEADERS) {
		size_t part = piece[from].iov_len < SV_HEADERS - have ? piece[from].iov_len : SV_HEADERS - have;

		if (!sv_memory_readable(piece[from].iov_base, part))
			return false;
		memcpy(tx->head[slot] + have, piece[from].iov_base, part);
		have += (uint32_t)part;
		piece[from].iov_base = (uint8_t *)piece[from].iov_base + part;
		piece[from].iov_len -= part;
		if (!piece[from].iov_len)
			from++;
	}
	piece[1] = (struct iovec){ tx->head[slot], have };
	sv_sum_prepare(tx->head[slot], have, length, &sums);
	if (sums.start && sums.end < length)
		return sum_up(piece + 1, &sums);
	if (sums.start) {
		header->flags = VIRTIO_NET_HDR_F_NEEDS_CSUM;
		header->csum_start = sums.start;
		header->csum_offset = sums.offset;
	}
	return true;
}

/* SUCCESS when the request is in the batch. With the memory regions locked. */
static enum ibv_wc_status gather(struct sv_qp *q, struct ibv_send_wr *wr)
{
	struct sv_context *x = sv_context(sv_qp_public(q)->context);
	struct sv_tx *tx = q->tx;
	uint32_t slot = tx->count, pieces = 2, length = 0;
	struct iovec *piece = tx->piece[slot];

	tx->offload[slot] = (struct virtio_net_hdr){ 0 };
	piece[0] = (struct iovec){ &tx->offload[slot], sizeof(tx->offload[slot]) };
	piece[1] = (struct iovec){ NULL, 0 };
	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *sge = &wr->sg_list[i];
		void *at = (void *)(uintptr_t)sge->addr;

		if (!sge->length)
			continue;
		if (!(wr->send_flags & IBV_SEND_INLINE) && !(at = sv_mr_at(x, sv_qp_public(q)->pd, sge, 0)))
			return IBV_WC_LOC_PROT_ERR;
		piece[pieces++] = (struct iovec){ at, sge->length };
		length += sge->length;
	}
	if (length < ETH_HLEN)
		return IBV_WC_LOC_LEN_ERR;
	if (wr->send_flags & IBV_SEND_IP_CSUM && !offload(tx, slot, pieces, length))
		return IBV_WC_LOC_PROT_ERR;
	tx->message[slot].msg_hdr = (struct msghdr){ .msg_iov = piece, .msg_iovlen = pieces };
	tx->wr[slot] = wr;
	tx->count++;
	return IBV_WC_SUCCESS;
}

/* Errors of the call itself, which leave the QP as it is. */
static int refuse(const struct sv_qp *q, const struct ibv_send_wr *wr, uint32_t waiting)
{
	uint64_t length = 0;

	if (wr->opcode != IBV_WR_SEND)
		return wr->opcode == IBV_WR_TSO ? EOPNOTSUPP : EINVAL;
	if (wr->num_sge < 0 || (uint32_t)wr->num_sge > q->cap.max_send_sge)
		return EINVAL;
	for (int i = 0; i < wr->num_sge; i++)
		length += wr->sg_list[i].length;
	if (wr->send_flags & IBV_SEND_INLINE && length > q->cap.max_inline_data)
		return EINVAL;
	if (q->sq_posted + waiting - atomic_load(&q->sq_retired) >= q->cap.max_send_wr)
		return ENOMEM;
	return 0;
}

static int post(struct sv_qp *q, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	enum ibv_qp_state state = atomic_load(&q->state);
	bool good = state == IBV_QPS_RTS, waits = state == IBV_QPS_SQD;
	int error = good || waits || state == IBV_QPS_ERR ? 0 : EINVAL;

	for (; wr && !error; wr = wr->next) {
		enum ibv_wc_status status;

		error = refuse(q, wr, q->tx->count + q->holds);
		if (!error && waits)
			error = sv_hold(q, wr);
		if (error)
			break;
		if (waits)
			continue;
		status = good ? gather(q, wr) : IBV_WC_WR_FLUSH_ERR;
		if (status != IBV_WC_SUCCESS) {
			if (good && !transmit(q))
				status = IBV_WC_WR_FLUSH_ERR;
			complete(q, wr, status);
			if (good && atomic_load(&q->state) != IBV_QPS_ERR)
				sv_qp_fail(q);
			good = false;
		} else if (q->tx->count == SV_TX_BATCH) {
			good = transmit(q);
		}
	}
	if (q->tx->count)
		transmit(q);
	if (error)
		*bad = wr;
	return error;
}

/* The caller holds sq_lock. */
int sv_post_send_locked(struct sv_qp *q, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct sv_context *x = sv_context(sv_qp_public(q)->context);
	int error;

	if (x->dead) {
		*bad = wr;
		return EIO;
	}
	if (q->held && atomic_load(&q->state) != IBV_QPS_SQD) /* a receive fault put it into the error state */
		sv_held_go(q);
	pthread_rwlock_rdlock(&x->mr_lock);
	error = post(q, wr, bad);
	pthread_rwlock_unlock(&x->mr_lock);
	return error;
}

int sv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	struct sv_qp *q = sv_qp(qp);
	int error;

	pthread_mutex_lock(&q->sq_lock);
	error = sv_post_send_locked(q, wr, bad);
	pthread_mutex_unlock(&q->sq_lock);
	return error;
}
