/* Program `ring_in`, on the far end of a ring veth: everything to the AF_XDP socket of the receive queue. */
#include "vmh_count.h"
#include "vmh_maps.h"

int xdp_ring_in(struct xdp_md *ctx)
{
	__u32 frame = bpf_xdp_get_buff_len(ctx);
	int verdict = rin_xsks.redirect_map(ctx->rx_queue_index, XDP_DROP);
	int out = verdict == XDP_REDIRECT ? VMH_RIN_RING : VMH_RIN_GONE;

	vmh_count(rin_outs.lookup(&out), frame);
	return verdict;
}
