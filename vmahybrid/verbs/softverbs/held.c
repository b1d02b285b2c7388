/* The send queue in the drain state (IBV_QPS_SQD): requests are taken, and wait until the QP is ready to send again.
 * What was posted before is out already, as posting is sending here. All with sq_lock held. */
#include <stdlib.h>
#include <string.h>
#include "sv.h"

struct sv_held {
	struct sv_held *next;
	struct ibv_send_wr wr;
	struct ibv_sge sge[SV_MAX_SGE];
	uint8_t data[]; /* of an inline request, which is read by the call */
};

static uint32_t inline_length(const struct ibv_send_wr *wr)
{
	uint32_t length = 0;

	for (int i = 0; wr->send_flags & IBV_SEND_INLINE && i < wr->num_sge; i++)
		length += wr->sg_list[i].length;
	return length;
}

/* Keeps a copy of a request that is in order; 0 or an errno. */
int sv_hold(struct sv_qp *q, const struct ibv_send_wr *wr)
{
	struct sv_held *held = malloc(sizeof(*held) + inline_length(wr));
	uint32_t at = 0;

	if (!held)
		return ENOMEM;
	held->next = NULL;
	held->wr = *wr;
	held->wr.next = NULL;
	held->wr.sg_list = held->sge;
	for (int i = 0; i < wr->num_sge; i++) {
		held->sge[i] = wr->sg_list[i];
		if (!(wr->send_flags & IBV_SEND_INLINE))
			continue;
		memcpy(held->data + at, (const void *)(uintptr_t)wr->sg_list[i].addr, wr->sg_list[i].length);
		held->sge[i].addr = (uintptr_t)(held->data + at);
		at += wr->sg_list[i].length;
	}
	*(q->held ? &q->held_last->next : &q->held) = held;
	q->held_last = held;
	q->holds++;
	return 0;
}

/* Sends them in order, or flushes them, by the state that the QP has now. */
void sv_held_go(struct sv_qp *q)
{
	struct sv_held *first = q->held;
	struct ibv_send_wr *bad;

	for (struct sv_held *held = first; held && held->next; held = held->next)
		held->wr.next = &held->next->wr;
	q->held = NULL;
	q->holds = 0;
	if (first)
		sv_post_send_locked(q, &first->wr, &bad);
	while (first) {
		struct sv_held *next = first->next;

		free(first);
		first = next;
	}
}

void sv_held_forget(struct sv_qp *q)
{
	while (q->held) {
		struct sv_held *next = q->held->next;

		free(q->held);
		q->held = next;
	}
	q->holds = 0;
}
