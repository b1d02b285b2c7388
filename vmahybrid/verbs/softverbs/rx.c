/* From a QP's ring to the program's receive buffers. All with the receive CQ's lock held. */
#include <linux/bpf.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include "sv.h"

#define VLAN_AT 12   /* offset in a frame */
#define VLAN_SIZE 4u

/* A frame in pieces, as the VLAN tag goes back between the addresses and the rest, or out from there. */
struct frame {
	struct iovec piece[3];
	int pieces;
	uint32_t length, shift; /* shift: what the tag moved, modulo 2^32 */
	uint8_t tag[4];
	uint16_t tci;
};

/* The record at the ring's head, or NULL. `next` is where the one behind begins. */
static const struct sv_record *peek(const struct sv_ring *ring, unsigned long *next)
{
	unsigned long consumer = *ring->consumer, producer = __atomic_load_n(ring->producer, __ATOMIC_ACQUIRE);

	while (consumer != producer) {
		const uint8_t *at = ring->data + (consumer & (ring->size - 1));
		uint32_t head = __atomic_load_n((const uint32_t *)at, __ATOMIC_ACQUIRE);

		if (head & BPF_RINGBUF_BUSY_BIT)
			return NULL;
		*next = consumer + (((head & ~(BPF_RINGBUF_BUSY_BIT | BPF_RINGBUF_DISCARD_BIT)) + BPF_RINGBUF_HDR_SZ + 7) & ~7u);
		if (!(head & BPF_RINGBUF_DISCARD_BIT))
			return (const struct sv_record *)(at + BPF_RINGBUF_HDR_SZ);
		consumer = *next;
		__atomic_store_n(ring->consumer, consumer, __ATOMIC_RELEASE);
	}
	return NULL;
}

static void consume(struct sv_qp *q, unsigned long next)
{
	q->segment = 0;
	__atomic_store_n(q->ring->consumer, next, __ATOMIC_RELEASE);
}

void sv_rx_discard(struct sv_qp *q)
{
	unsigned long next;

	while (q->ring && peek(q->ring, &next))
		consume(q, next);
}

/* A receive buffer, or NULL; then sv_post_recv() will say when there is one. */
static struct sv_recv *next_buffer(struct sv_qp *q)
{
	uint32_t head = atomic_load_explicit(&q->rq_head, memory_order_relaxed);

	if (head == atomic_load_explicit(&q->rq_tail, memory_order_acquire)) {
		pthread_mutex_lock(&q->rq_lock);
		if (head == atomic_load(&q->rq_tail)) {
			q->starved = true;
			pthread_mutex_unlock(&q->rq_lock);
			return NULL;
		}
		pthread_mutex_unlock(&q->rq_lock);
	}
	return &q->rq[head & (q->rq_size - 1)];
}

/* The kernel takes the tag out of frames that come in, and leaves it in those that QPs of the own device send. */
static bool holds_tag(const struct sv_record *record, const uint8_t *data, uint32_t length)
{
	return !record->vlan_proto && length >= VLAN_AT + VLAN_SIZE && data[VLAN_AT] == 0x81 && !data[VLAN_AT + 1];
}

static void lay_out(const struct sv_record *record, const uint8_t *data, uint32_t length, bool strip, struct frame *frame)
{
	bool inside = holds_tag(record, data, length), out = inside && strip;
	uint32_t rest = out ? VLAN_AT + VLAN_SIZE : VLAN_AT;

	frame->tci = inside ? (uint16_t)(data[VLAN_AT + 2] << 8 | data[VLAN_AT + 3]) : record->vlan;
	if (length < VLAN_AT || !(out || (record->vlan_proto && !strip))) {
		frame->piece[0] = (struct iovec){ (void *)(uintptr_t)data, length };
		frame->pieces = 1;
		frame->length = length;
		frame->shift = 0;
		return;
	}
	memcpy(frame->tag, &record->vlan_proto, 2);
	frame->tag[2] = (uint8_t)(record->vlan >> 8);
	frame->tag[3] = (uint8_t)record->vlan;
	frame->shift = out ? 0u - VLAN_SIZE : VLAN_SIZE;
	frame->piece[0] = (struct iovec){ (void *)(uintptr_t)data, VLAN_AT };
	frame->piece[1] = (struct iovec){ frame->tag, out ? 0 : VLAN_SIZE };
	frame->piece[2] = (struct iovec){ (void *)(uintptr_t)(data + rest), length - rest };
	frame->pieces = 3;
	frame->length = length + frame->shift;
}

/* Copies into the scatter list of a receive request; `patch` goes over the two octets at `patch_at`, if that is not 0. */
static enum ibv_wc_status scatter(struct sv_qp *q, const struct sv_recv *recv, const struct frame *frame,
				  uint32_t patch_at, uint16_t patch)
{
	struct sv_context *x = sv_context(sv_qp_public(q)->context);
	uint32_t at = 0, piece = 0, used = 0; /* used: of the piece */

	for (int i = 0; i < recv->sges && at < frame->length; i++) {
		const struct ibv_sge *sge = &recv->sge[i];
		uint8_t *to = sv_mr_at(x, sv_qp_public(q)->pd, sge, IBV_ACCESS_LOCAL_WRITE);
		uint32_t room = sge->length, start = at;

		if (room && (!to || !sv_memory_writable(to, room < frame->length - at ? room : frame->length - at)))
			return IBV_WC_LOC_PROT_ERR;
		while (room && at < frame->length) {
			const struct iovec *from = &frame->piece[piece];
			uint32_t part = (uint32_t)from->iov_len - used < room ? (uint32_t)from->iov_len - used : room;

			memcpy(to + (at - start), (uint8_t *)from->iov_base + used, part);
			at += part;
			room -= part;
			used += part;
			if (used == from->iov_len) {
				piece++;
				used = 0;
			}
		}
		for (uint32_t byte = 0; patch_at && byte < 2; byte++)
			if (patch_at + byte >= start && patch_at + byte < at)
				to[patch_at + byte - start] = ((const uint8_t *)&patch)[byte];
	}
	return at < frame->length ? IBV_WC_LOC_LEN_ERR : IBV_WC_SUCCESS;
}

/* Gives one frame to one receive request. */
static void complete(struct sv_cq *cq, struct sv_qp *q, const struct sv_recv *recv, const struct sv_record *record,
		     const uint8_t *data, uint32_t length)
{
	struct sv_cqe cqe = { .wr_id = recv->wr_id, .qp = q, .opcode = IBV_WC_RECV, .qp_num = sv_qp_public(q)->qp_num,
			      .tag = record->tag, .ktime = record->ktime };
	struct sv_sum sum = { 0, 0 };
	int state = sv_sum_check(data, length, &sum);
	struct frame frame;

	lay_out(record, data, length, q->strip_vlan, &frame);
	cqe.cvlan = frame.tci;
	cqe.status = (uint8_t)scatter(q, recv, &frame, state == SV_SUM_UNFINISHED ? sum.at + frame.shift : 0, sum.value);
	cqe.byte_len = frame.length;
	if (state == SV_SUM_GOOD || state == SV_SUM_UNFINISHED)
		cqe.wc_flags = IBV_WC_IP_CSUM_OK;
	atomic_fetch_add_explicit(&q->rq_head, 1, memory_order_release);
	sv_cq_push(cq, &cqe);
	if (cqe.status != IBV_WC_SUCCESS) {
		atomic_store(&q->state, IBV_QPS_ERR);
		sv_qp_public(q)->state = IBV_QPS_ERR;
		sv_rx_discard(q);
		sv_qp_flush_receives(q);
	}
}

static bool receives(const struct sv_qp *q)
{
	unsigned int state = atomic_load_explicit(&q->state, memory_order_relaxed);

	return state == IBV_QPS_RTR || state == IBV_QPS_RTS || state == IBV_QPS_SQD;
}

/* The next frame of a super frame; false when it has no more. */
static bool deliver_segment(struct sv_cq *cq, struct sv_qp *q, const struct sv_recv *recv, const struct sv_record *record)
{
	const uint8_t *data = (const uint8_t *)(record + 1);
	uint32_t length;

	if (!q->scratch && !(q->scratch = malloc(SV_FRAME_MAX)))
		return false;
	length = sv_segment(data, record->length, record->gso_size, q->segment, q->scratch);
	if (!length)
		return false;
	q->segment++;
	complete(cq, q, recv, record, q->scratch, length);
	return true;
}

/* Frames of one QP, up to `wanted`; how many became completions. */
static uint32_t pump(struct sv_cq *cq, struct sv_qp *q, uint32_t wanted)
{
	uint32_t n = 0;

	while (n < wanted) {
		unsigned long next;
		const struct sv_record *record = peek(q->ring, &next);
		const struct sv_recv *recv;

		if (!record)
			break;
		if (record->generation != q->generation || !receives(q)) {
			consume(q, next);
			continue;
		}
		recv = next_buffer(q);
		if (!recv)
			break;
		if (record->gso_size && record->length > record->gso_size) {
			if (deliver_segment(cq, q, recv, record))
				n++;
			else
				consume(q, next);
			continue;
		}
		complete(cq, q, recv, record, (const uint8_t *)(record + 1), record->length);
		if (receives(q))
			consume(q, next);
		n++;
	}
	return n;
}

static bool waits(const struct sv_qp *q)
{
	return q->ring && *q->ring->consumer != __atomic_load_n(q->ring->producer, __ATOMIC_RELAXED);
}

void sv_rx_pump(struct sv_cq *cq, uint32_t wanted)
{
	struct sv_context *x = sv_context(cq->base.context);
	bool locked = false;

	if (wanted > sv_cq_room(cq))
		wanted = sv_cq_room(cq);
	for (struct sv_qp *q = cq->receivers; q && wanted; q = q->cq_next) {
		if (!waits(q))
			continue;
		if (!locked)
			pthread_rwlock_rdlock(&x->mr_lock);
		locked = true;
		wanted -= pump(cq, q, wanted);
	}
	if (locked)
		pthread_rwlock_unlock(&x->mr_lock);
}
