/* The ibv_wr_*() way of sending: requests are built between wr_start, which takes the queue's lock, and wr_complete. */
#include <stdlib.h>
#include <string.h>
#include "sv.h"

struct entry {
	struct ibv_send_wr wr;
	struct ibv_sge sge[SV_MAX_SGE];
	uint8_t data[SV_MAX_INLINE];
};

struct sv_builder {
	struct entry **entries;
	uint32_t made, used;
	int error;
};

static struct sv_qp *of(struct ibv_qp_ex *qp)
{
	return (struct sv_qp *)qp;
}

static void wr_start(struct ibv_qp_ex *qp)
{
	struct sv_qp *q = of(qp);

	pthread_mutex_lock(&q->sq_lock);
	q->builder->used = 0;
	q->builder->error = 0;
}

static bool grow(struct sv_builder *b)
{
	struct entry **grown, *made;

	if (b->used < b->made)
		return true;
	grown = realloc(b->entries, (b->made + 1) * sizeof(*grown));
	if (grown)
		b->entries = grown;
	made = calloc(1, sizeof(*made));
	if (!grown || !made) {
		free(made);
		return false;
	}
	b->entries[b->made++] = made;
	return true;
}

static void wr_send(struct ibv_qp_ex *qp)
{
	struct sv_qp *q = of(qp);
	struct sv_builder *b = q->builder;
	struct ibv_send_wr *wr;

	if (q->sq_posted + q->holds + b->used - atomic_load(&q->sq_retired) >= q->cap.max_send_wr || !grow(b)) {
		b->error = ENOMEM;
		return;
	}
	wr = &b->entries[b->used++]->wr;
	memset(wr, 0, sizeof(*wr));
	wr->wr_id = qp->wr_id;
	wr->opcode = IBV_WR_SEND;
	wr->send_flags = qp->wr_flags & ~(unsigned int)IBV_SEND_INLINE;
	wr->sg_list = b->entries[b->used - 1]->sge;
}

/* The request that is being built. */
static struct entry *current(struct sv_qp *q)
{
	struct sv_builder *b = q->builder;

	if (!b->used && !b->error) /* no wr_send(); one that failed has said why */
		b->error = EINVAL;
	return b->error ? NULL : b->entries[b->used - 1];
}

static void wr_set_sge_list(struct ibv_qp_ex *qp, size_t sges, const struct ibv_sge *list)
{
	struct sv_qp *q = of(qp);
	struct entry *entry = current(q);

	if (!entry)
		return;
	if (sges > q->cap.max_send_sge) {
		q->builder->error = EINVAL;
		return;
	}
	memcpy(entry->sge, list, sges * sizeof(*list));
	entry->wr.num_sge = (int)sges;
}

static void wr_set_sge(struct ibv_qp_ex *qp, uint32_t lkey, uint64_t address, uint32_t length)
{
	struct ibv_sge sge = { address, length, lkey };

	wr_set_sge_list(qp, 1, &sge);
}

static void wr_set_inline_data_list(struct ibv_qp_ex *qp, size_t parts, const struct ibv_data_buf *list)
{
	struct sv_qp *q = of(qp);
	struct entry *entry = current(q);
	size_t length = 0;

	if (!entry)
		return;
	for (size_t i = 0; i < parts; i++) {
		if (list[i].length > q->cap.max_inline_data - length) {
			q->builder->error = EINVAL;
			return;
		}
		memcpy(entry->data + length, list[i].addr, list[i].length);
		length += list[i].length;
	}
	entry->sge[0] = (struct ibv_sge){ (uintptr_t)entry->data, (uint32_t)length, 0 };
	entry->wr.num_sge = 1;
	entry->wr.send_flags |= IBV_SEND_INLINE;
}

static void wr_set_inline_data(struct ibv_qp_ex *qp, void *address, size_t length)
{
	struct ibv_data_buf part = { address, length };

	wr_set_inline_data_list(qp, 1, &part);
}

/* All requests are posted, or none. */
static int wr_complete(struct ibv_qp_ex *qp)
{
	struct sv_qp *q = of(qp);
	struct sv_builder *b = q->builder;
	struct ibv_send_wr *bad;
	int error = b->error;

	for (uint32_t i = 0; i < b->used; i++)
		b->entries[i]->wr.next = i + 1 < b->used ? &b->entries[i + 1]->wr : NULL;
	if (!error && b->used)
		error = sv_post_send_locked(q, &b->entries[0]->wr, &bad);
	pthread_mutex_unlock(&q->sq_lock);
	return error;
}

static void wr_abort(struct ibv_qp_ex *qp)
{
	pthread_mutex_unlock(&of(qp)->sq_lock);
}

int sv_builder_make(struct sv_qp *q)
{
	q->builder = calloc(1, sizeof(*q->builder));
	if (!q->builder)
		return -ENOMEM;
	q->base.wr_start = wr_start;
	q->base.wr_send = wr_send;
	q->base.wr_set_sge = wr_set_sge;
	q->base.wr_set_sge_list = wr_set_sge_list;
	q->base.wr_set_inline_data = wr_set_inline_data;
	q->base.wr_set_inline_data_list = wr_set_inline_data_list;
	q->base.wr_complete = wr_complete;
	q->base.wr_abort = wr_abort;
	return 0;
}

void sv_builder_free(struct sv_qp *q)
{
	if (!q->builder)
		return;
	for (uint32_t i = 0; i < q->builder->made; i++)
		free(q->builder->entries[i]);
	free(q->builder->entries);
	free(q->builder);
}
