/* Protection domains and memory regions. */
#include <stdlib.h>
#include <string.h>
#include "sv.h"

#define KEY_SHIFT 8
#define SV_ACCESS_KNOWN \
	(IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC | \
	 IBV_ACCESS_ZERO_BASED | IBV_ACCESS_OPTIONAL_RANGE)
#define SV_ACCESS_ABSENT (IBV_ACCESS_MW_BIND | IBV_ACCESS_ON_DEMAND | IBV_ACCESS_HUGETLB)

SV_EXPORT struct ibv_pd *ibv_alloc_pd(struct ibv_context *context)
{
	struct sv_pd *pd = sv_context(context)->dead ? SV_NULL(EIO) : calloc(1, sizeof(*pd));

	if (!pd)
		return NULL;
	pd->base.context = context;
	pd->base.handle = ++sv_context(context)->handles;
	return &pd->base;
}

SV_EXPORT int ibv_dealloc_pd(struct ibv_pd *base)
{
	struct sv_pd *pd = (struct sv_pd *)base;

	if (pd->users)
		return EBUSY;
	free(pd);
	return 0;
}

static int check_access(unsigned int access)
{
	if (access & SV_ACCESS_ABSENT)
		return EOPNOTSUPP;
	if (access & ~(unsigned int)SV_ACCESS_KNOWN)
		return EINVAL;
	if (access & (IBV_ACCESS_REMOTE_WRITE | IBV_ACCESS_REMOTE_ATOMIC) && !(access & IBV_ACCESS_LOCAL_WRITE))
		return EINVAL;
	return 0;
}

static int place(struct sv_context *x, struct sv_mr *mr)
{
	uint32_t index, slots = x->mr_slots;
	struct sv_mr **grown;

	for (uint32_t i = 0; i < slots; i++) {
		index = (x->mr_hint + i) % slots;
		if (!x->mrs[index])
			goto found;
	}
	if (slots >= SV_MAX_OBJECTS)
		return ENOMEM;
	grown = realloc(x->mrs, (slots ? slots * 2 : 64) * sizeof(*grown));
	if (!grown)
		return ENOMEM;
	x->mrs = grown;
	x->mr_slots = slots ? slots * 2 : 64;
	memset(grown + slots, 0, (x->mr_slots - slots) * sizeof(*grown));
	index = slots;
found:
	x->mrs[index] = mr;
	x->mr_hint = index + 1;
	/* a key that was freed is not the next one's */
	mr->base.lkey = mr->base.rkey = (index + 1) << KEY_SHIFT | ++x->mr_salt;
	return 0;
}

static struct ibv_mr *reg(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, unsigned int access)
{
	struct sv_context *x = sv_context(pd->context);
	struct sv_mr *mr;
	int error = check_access(access);

	if (!error && x->dead)
		error = EIO;
	if (!error)
		error = sv_memory_check(address, length, access & IBV_ACCESS_LOCAL_WRITE);
	if (error)
		return SV_NULL(error);
	mr = calloc(1, sizeof(*mr));
	if (!mr)
		return NULL;
	mr->base.context = pd->context;
	mr->base.pd = pd;
	mr->base.addr = address;
	mr->base.length = length;
	mr->base.handle = ++x->handles;
	mr->iova = access & IBV_ACCESS_ZERO_BASED ? 0 : iova;
	mr->access = access;
	pthread_rwlock_wrlock(&x->mr_lock);
	error = place(x, mr);
	pthread_rwlock_unlock(&x->mr_lock);
	if (error) {
		free(mr);
		return SV_NULL(error);
	}
	((struct sv_pd *)pd)->users++;
	return &mr->base;
}

#undef ibv_reg_mr
SV_EXPORT struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *address, size_t length, int access)
{
	return reg(pd, address, length, (uintptr_t)address, (unsigned int)access);
}

#undef ibv_reg_mr_iova
SV_EXPORT struct ibv_mr *ibv_reg_mr_iova(struct ibv_pd *pd, void *address, size_t length, uint64_t iova, int access)
{
	return reg(pd, address, length, iova, (unsigned int)access);
}

SV_EXPORT struct ibv_mr *ibv_reg_mr_iova2(struct ibv_pd *pd, void *address, size_t length, uint64_t iova,
					  unsigned int access)
{
	return reg(pd, address, length, iova, access);
}

SV_EXPORT int ibv_rereg_mr(struct ibv_mr *base, int flags, struct ibv_pd *pd, void *address, size_t length, int access)
{
	struct sv_context *x = sv_context(base->context);
	struct sv_mr *mr = (struct sv_mr *)base;
	bool moves = flags & IBV_REREG_MR_CHANGE_TRANSLATION;
	bool writes = (flags & IBV_REREG_MR_CHANGE_ACCESS ? (unsigned int)access : mr->access) & IBV_ACCESS_LOCAL_WRITE;

	if (flags & ~IBV_REREG_MR_FLAGS_SUPPORTED || !flags || (moves && (!address || !length)) ||
	    (flags & IBV_REREG_MR_CHANGE_PD && (!pd || pd->context != base->context))) {
		errno = EINVAL;
		return IBV_REREG_MR_ERR_INPUT;
	}
	if (x->dead) {
		errno = EIO;
		return IBV_REREG_MR_ERR_CMD;
	}
	errno = flags & IBV_REREG_MR_CHANGE_ACCESS ? check_access((unsigned int)access) : 0;
	if (!errno && flags & (IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_ACCESS))
		errno = sv_memory_check(moves ? address : base->addr, moves ? length : base->length, writes);
	if (errno)
		return IBV_REREG_MR_ERR_INPUT;
	pthread_rwlock_wrlock(&x->mr_lock);
	if (flags & IBV_REREG_MR_CHANGE_PD) {
		((struct sv_pd *)base->pd)->users--;
		((struct sv_pd *)pd)->users++;
		base->pd = pd;
	}
	if (flags & IBV_REREG_MR_CHANGE_ACCESS)
		mr->access = (unsigned int)access;
	if (moves) {
		base->addr = address;
		base->length = length;
		mr->iova = mr->access & IBV_ACCESS_ZERO_BASED ? 0 : (uintptr_t)address;
	}
	pthread_rwlock_unlock(&x->mr_lock);
	return 0;
}

SV_EXPORT int ibv_dereg_mr(struct ibv_mr *base)
{
	struct sv_context *x = sv_context(base->context);

	pthread_rwlock_wrlock(&x->mr_lock);
	x->mrs[(base->lkey >> KEY_SHIFT) - 1] = NULL;
	x->mr_hint = (base->lkey >> KEY_SHIFT) - 1;
	pthread_rwlock_unlock(&x->mr_lock);
	((struct sv_pd *)base->pd)->users--;
	free(base);
	return 0;
}

void *sv_mr_at(struct sv_context *x, struct ibv_pd *pd, const struct ibv_sge *sge, unsigned int access)
{
	uint32_t index = (sge->lkey >> KEY_SHIFT) - 1;
	struct sv_mr *mr = index < x->mr_slots ? x->mrs[index] : NULL;
	uint64_t offset;

	if (!mr || mr->base.lkey != sge->lkey || mr->base.pd != pd || (mr->access & access) != access)
		return NULL;
	offset = sge->addr - mr->iova;
	if (sge->addr < mr->iova || offset > mr->base.length || sge->length > mr->base.length - offset)
		return NULL;
	return (uint8_t *)mr->base.addr + offset;
}
