/* VMA_RX_BUFS, VMA_TX_BUFS, VMA_TX_WRE, VMA_RX_WRE and VMA_MEM_ALLOC_TYPE on AF_XDP rings, whose memory and sockets the
 * service makes: it is asked for what is set, and the rest is its own sizes. */
#include "vmh_banner.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "ring_xdp.h"

#define BUFS_LEAST 64 /* as of verbs rings */
#define SIZE_LEAST 16
#define SIZE_MOST (1 << 16)

/* 0: as many as the service gives. */
static uint32_t buffers(unsigned param, int64_t value)
{
	if (vmh_params_origin(param) == VMH_FROM_DEFAULT)
		return 0;
	if (value > VMH_FRAMES_MAX)
		value = VMH_FRAMES_MAX;
	return value > BUFS_LEAST ? (uint32_t)value : BUFS_LEAST;
}

/* Of received frames, before they are posted again; 0: our own number, which is measured. */
static uint32_t batch(void)
{
	return vmh_params_origin(VMH_PARAM_RX_WRE_BATCHING) != VMH_FROM_DEFAULT ? (uint32_t)vmh_params.rx_wre_batching : 0;
}

static uint32_t power_of_two_from(uint32_t v)
{
	return v < 2 ? 1 : 1u << (32 - __builtin_clz(v - 1));
}

struct vmh_xdp_limits vmh_ring_limits(void)
{
	return (struct vmh_xdp_limits){
		.posted = (uint32_t)vmh_params.rx_wre,
		.rx_bufs = buffers(VMH_PARAM_RX_BUFS, vmh_params.rx_bufs),
		.tx_bufs = buffers(VMH_PARAM_TX_BUFS, vmh_params.tx_bufs),
		.hw_ts_conversion = (int)vmh_params.hw_ts_conversion,
		.batch = batch(),
	};
}

void vmh_ring_wish(struct vmh_msg_ring *req)
{
	const struct vmh_xdp_limits l = vmh_ring_limits();
	uint32_t most = SIZE_MOST;

	req->memory = (unsigned)vmh_params.mem_alloc_type;
	if (vmh_params_origin(VMH_PARAM_TX_WRE) != VMH_FROM_DEFAULT) {
		if (vmh_params.tx_wre < most)
			most = (uint32_t)vmh_params.tx_wre;
		req->tx_size = power_of_two_from(most > SIZE_LEAST ? most : SIZE_LEAST);
	}
	if (l.rx_bufs) /* a quarter of the memory is for sending where nothing else is said */
		req->frames = power_of_two_from(l.rx_bufs + (l.tx_bufs ? l.tx_bufs : l.rx_bufs / 3));
	if (req->frames > VMH_FRAMES_MAX)
		req->frames = VMH_FRAMES_MAX;
}

/* What the ring has of what was asked for. */
static void compare_sizes(const struct vmh_ring *r, const struct xdp_ring *x)
{
	const int64_t half = x->frames / 2, on_way = x->q[0].tx.size + x->q[0].comp.size;

	vmh_params_used(VMH_PARAM_TX_BUFS, r->ifname, BUFS_LEAST, half < on_way ? half : on_way, x->tx_frames);
	if (vmh_params.rx_bufs < r->rx_frames)
		vmh_params_used(VMH_PARAM_RX_BUFS, r->ifname, BUFS_LEAST, VMH_FRAMES_MAX - BUFS_LEAST, r->rx_frames);
	if (vmh_params.rx_wre > x->share)
		vmh_params_used(VMH_PARAM_RX_WRE, r->ifname, 1, x->share, x->share);
	if (vmh_params.tx_wre < SIZE_LEAST || vmh_params.tx_wre > SIZE_MOST)
		vmh_params_used(VMH_PARAM_TX_WRE, r->ifname, SIZE_LEAST, SIZE_MOST, x->q[0].tx.size);
	else /* no power of two, or the service had no room */
		vmh_params_used(VMH_PARAM_TX_WRE, r->ifname, 0, 0, x->q[0].tx.size);
}

void vmh_ring_wish_compare(const struct vmh_ring *r)
{
	const struct xdp_ring *x = (const struct xdp_ring *)r;
	static _Atomic int said;
	int level;

	/* the memory of a ring that fills no huge page is not asked for in such */
	if (vmh_params.mem_alloc_type == VMH_MEMORY_HUGE && !(r->flags & VMH_RING_F_HUGE) &&
	    !(x->umem_len % VMH_HUGE_PAGE))
		vmh_warn_huge_pages();
	compare_sizes(r, x);
	if (!buffers(VMH_PARAM_RX_BUFS, vmh_params.rx_bufs) || r->rx_frames >= vmh_params.rx_bufs ||
	    atomic_exchange(&said, 1))
		return;
	/* that of a built-in profile adapts itself */
	level = vmh_params_is_set(VMH_PARAM_RX_BUFS) ? VMH_LOG_WARNING : VMH_LOG_DETAILS;
	if (x->frames >= VMH_FRAMES_MAX)
		vmh_log(level, "the ring on %s has %u receive buffers only, VMA_RX_BUFS asks for %lld: a ring has %d buffers at "
			"most, %u of them to send", r->ifname, r->rx_frames, (long long)vmh_params.rx_bufs, VMH_FRAMES_MAX,
			x->tx_frames);
	else
		vmh_log(level, "the ring on %s has %u receive buffers only, VMA_RX_BUFS asks for %lld: raise limits.memory of "
			"the service, up to %u are possible", r->ifname, r->rx_frames, (long long)vmh_params.rx_bufs,
			VMH_FRAMES_MAX - x->tx_frames);
}
