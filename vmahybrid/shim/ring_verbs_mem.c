/* Packet memory of the verbs rings: one block for receiving per size of frames and process (VMA_RX_BUFS), which every
 * ring registers with its device, and a block per ring for sending. */
#include "ring_verbs.h"
#include "vmh_banner.h"
#include "vmh_heap.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <sys/mman.h>

#define L2_ROOM 22       /* Ethernet header and two VLAN tags before the MTU's bytes */
#define SIZE_STEP 512u   /* buffers of 2048 bytes for 1500, of 9216 for 9000: whole multiples, cache line aligned */
#define RX_BUFS_LEAST 64u
#define DM_ALIGN 64u

static struct vmh_lock list_lock;
static struct verbs_pool *pools;

void *vmh_verbs_map(size_t len)
{
	long p = vmh_sys(SYS_mmap, NULL, len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
			 0L);

	return p < 0 && p > -4096 ? NULL : (void *)p;
}

/* Packet memory as VMA_MEM_ALLOC_TYPE wants it: 2 huge pages, 1 (and where there are not enough) pages that the kernel
 * may make huge, 0 plain pages. *len grows to whole huge pages. */
static void *packet_memory(size_t *len)
{
	size_t whole = (*len + VMH_HUGE_PAGE - 1) & ~(VMH_HUGE_PAGE - 1);
	void *mem;
	long p;

	if (vmh_params.mem_alloc_type == 2) {
		/* reserved at once: without that, a page that is not there is a SIGBUS later */
		p = vmh_sys(SYS_mmap, NULL, whole, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1,
			    0L);
		if (p >= 0 || p <= -4096) {
			*len = whole;
			return (void *)p;
		}
		vmh_warn_huge_pages();
	}
	mem = vmh_verbs_map(*len);
	/* a ring goes round through thousands of buffers */
	if (mem && vmh_params.mem_alloc_type)
		vmh_sys(SYS_madvise, mem, *len, MADV_HUGEPAGE);
	return mem;
}

static uint32_t frame_room(uint32_t mtu)
{
	uint32_t size = (mtu + L2_ROOM + SIZE_STEP - 1) & ~(SIZE_STEP - 1);

	return size < 2048 ? 2048 : size;
}

static void pool_free(struct verbs_pool *p)
{
	if (p->mem)
		vmh_sys(SYS_munmap, p->mem, p->mem_len);
	if (p->bufs)
		vmh_sys(SYS_munmap, p->bufs, p->tables_len);
	vmh_heap_free(p);
}

static struct verbs_pool *pool_new(uint32_t buf_size, uint32_t count)
{
	struct verbs_pool *p = vmh_heap_zero(1, sizeof(*p));

	if (!p)
		return NULL;
	p->count = count;
	p->buf_size = buf_size;
	p->mem_len = (size_t)count * buf_size;
	p->tables_len = (size_t)count * (sizeof(struct verbs_buf) + sizeof(uint32_t));
	p->mem = packet_memory(&p->mem_len);
	p->bufs = vmh_verbs_map(p->tables_len);
	if (!p->mem || !p->bufs) {
		pool_free(p);
		return NULL;
	}
	p->free = (uint32_t *)(p->bufs + count);
	/* a dump of them helps nobody */
	vmh_sys(SYS_madvise, p->mem, p->mem_len, MADV_DONTDUMP);
	return p;
}

static struct ibv_mr *reg(struct verbs_ring *x, void *mem, size_t len)
{
	return vmh_ibv.reg_mr(x->dev->pd, mem, len, IBV_ACCESS_LOCAL_WRITE);
}

int vmh_verbs_pool_get(struct verbs_ring *x)
{
	uint32_t size = frame_room(x->r.mtu), wanted = (uint32_t)vmh_params.rx_bufs, n;
	struct verbs_pool *p;
	int err = ENOMEM;

	vmh_lock(&list_lock);
	for (p = pools; p && p->buf_size != size; p = p->next)
		;
	if (p) {
		x->rx_mr = reg(x, p->mem, p->mem_len);
		err = x->rx_mr ? 0 : errno;
	} else {
		if (wanted < RX_BUFS_LEAST)
			wanted = RX_BUFS_LEAST;
		/* registered memory is locked memory, of which the user may have little */
		for (n = wanted; n >= RX_BUFS_LEAST && err; n /= 2) {
			p = pool_new(size, n);
			if (!p)
				continue;
			x->rx_mr = reg(x, p->mem, p->mem_len);
			err = x->rx_mr ? 0 : errno;
			if (err)
				pool_free(p);
		}
		if (!err) {
			p->next = pools;
			pools = p;
		}
		if (err || p->count < wanted)
			vmh_warn_locked_memory();
		if (!err && p->count < wanted)
			vmh_warn("memory for %u receive buffers only, VMA_RX_BUFS asks for %u: raise ulimit -l",
				 p->count, wanted);
	}
	vmh_unlock(&list_lock);
	x->pool = err ? NULL : p;
	return -err;
}

uint32_t vmh_verbs_pool_take(struct verbs_pool *p, uint32_t *ids, uint32_t n)
{
	uint32_t got = 0;

	vmh_lock(&p->lock);
	while (got < n && p->nfree)
		ids[got++] = p->free[--p->nfree];
	while (got < n && p->fresh < p->count)
		ids[got++] = p->fresh++;
	vmh_unlock(&p->lock);
	return got;
}

void vmh_verbs_pool_give(struct verbs_pool *p, const uint32_t *ids, uint32_t n)
{
	vmh_lock(&p->lock);
	memcpy(p->free + p->nfree, ids, n * sizeof(*ids));
	p->nfree += n;
	vmh_unlock(&p->lock);
}

void vmh_verbs_pool_recover(struct verbs_pool *p, uint32_t owner_id)
{
	vmh_lock(&p->lock);
	for (uint32_t i = 0; i < p->fresh; i++) {
		if (p->bufs[i].owner != owner_id)
			continue;
		p->bufs[i].owner = 0;
		p->free[p->nfree++] = i;
	}
	vmh_unlock(&p->lock);
}

uint32_t vmh_verbs_pool_free(const struct verbs_pool *p)
{
	return p->count - VMH_GET(p->fresh) + VMH_GET(p->nfree);
}

void vmh_verbs_pool_report(struct verbs_ring *x)
{
	struct verbs_pool *p = x->pool;
	struct verbs_ring *who = atomic_load_explicit(&p->reporter, memory_order_relaxed);
	uint32_t n = x->nspare;

	if (vmh_unlikely(who != x && (!who || atomic_load(&who->r.gone))) &&
	    atomic_compare_exchange_strong(&p->reporter, &who, x))
		who = x;
	if (who == x)
		n += vmh_verbs_pool_free(p);
	VMH_SET(x->r.stats->pool_rx_free, n);
}

/* ---- transmit ---- */

/* Best effort: without it frames go from the host's memory. */
static void device_memory(struct verbs_ring *x)
{
	struct ibv_alloc_dm_attr a = { 0 };
	struct verbs_dm *m = &x->dm;
	uint64_t wanted = (uint64_t)vmh_params.ring_dev_mem_tx;

	if (!wanted)
		return;
	if (!vmh_params.bf) {
		vmh_warn("Device Memory functionality is not used on devices w/o Blue Flame support."); /* the manual's words */
		return;
	}
	a.length = (wanted < x->dev->max_dm ? wanted : x->dev->max_dm) & ~(uint64_t)(DM_ALIGN - 1);
	if (a.length > UINT32_MAX)
		a.length = UINT32_MAX & ~(uint64_t)(DM_ALIGN - 1);
	if (a.length < x->tx_buf_size) {
		vmh_params_used(VMH_PARAM_RING_DEV_MEM_TX, x->r.ifname, x->dev->max_dm < x->tx_buf_size ? 0 : x->tx_buf_size,
				x->dev->max_dm < x->tx_buf_size ? 0 : (int64_t)x->dev->max_dm, 0);
		return;
	}
	if (wanted > x->dev->max_dm)
		vmh_params_used(VMH_PARAM_RING_DEV_MEM_TX, x->r.ifname, x->tx_buf_size, (int64_t)x->dev->max_dm,
				(int64_t)a.length);
	m->dm = ibv_alloc_dm(x->dev->ctx, &a);
	m->mr = m->dm ? ibv_reg_dm_mr(x->dev->pd, m->dm, 0, a.length, IBV_ACCESS_ZERO_BASED | IBV_ACCESS_LOCAL_WRITE)
		      : NULL;
	if (m->mr) {
		m->size = (uint32_t)a.length;
		x->slot_dm = vmh_heap_zero(x->tx_slots, sizeof(*x->slot_dm));
	}
	if (!x->slot_dm)
		vmh_warn("no device memory for sending on %s (VMA_RING_DEV_MEM_TX): %s", x->r.ifname, strerror(errno));
}

int vmh_verbs_tx_memory(struct verbs_ring *x)
{
	uint32_t size = frame_room(x->r.mtu), wanted = (uint32_t)vmh_params.tx_buf_size;

	if (wanted > size)
		size = (wanted + 63) & ~63u;
	x->tx_buf_size = size;
	x->tx_mem_len = (size_t)x->tx_slots * size;
	x->tx_mem = packet_memory(&x->tx_mem_len);
	if (!x->tx_mem)
		return -ENOMEM;
	x->tx_mr = reg(x, x->tx_mem, x->tx_mem_len);
	if (!x->tx_mr) {
		int err = errno;

		vmh_warn_locked_memory();
		return -err;
	}
	device_memory(x);
	return 0;
}

void vmh_verbs_tx_memory_free(struct verbs_ring *x)
{
	if (x->dm.mr)
		vmh_ibv.dereg_mr(x->dm.mr);
	if (x->dm.dm)
		ibv_free_dm(x->dm.dm);
	if (x->tx_mr)
		vmh_ibv.dereg_mr(x->tx_mr);
	if (x->tx_mem)
		vmh_sys(SYS_munmap, x->tx_mem, x->tx_mem_len);
	vmh_heap_free(x->slot_dm);
	x->dm = (struct verbs_dm){ 0 };
	x->tx_mr = NULL;
	x->tx_mem = NULL;
	x->slot_dm = NULL;
}

void vmh_verbs_mem_fork_child(void)
{
	/* the parent's, and by ibv_fork_init perhaps not mapped here */
	pools = NULL;
	vmh_lock_reset(&list_lock);
}
