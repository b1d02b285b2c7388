/* The adapter's time of arrival, handed on as XDP metadata. Such a program is bound to its device, in native mode. */
#ifndef VMH_STAMP_H
#define VMH_STAMP_H

#include "vmh_flow.h"

/* bpf_xdp_metadata_rx_timestamp() */
static int (*vmh_rx_timestamp)(const struct xdp_md *ctx, __u64 *ns) = (void *)VMH_CALL_RX_TIMESTAMP;

/* A frame that has no time (-ENODATA, or 0 as veth says it), or that has no room, goes its way without. */
static __always_inline void vmh_stamp_frame(struct xdp_md *ctx)
{
	struct vmh_stamp *stamp;
	__u64 ns = 0;

	if (vmh_rx_timestamp(ctx, &ns) || !ns || bpf_xdp_adjust_meta(ctx, -(int)sizeof(*stamp)))
		return;
	stamp = (void *)(long)ctx->data_meta;
	if ((void *)(stamp + 1) > (void *)(long)ctx->data)
		return;
	stamp->ns = ns;
	stamp->magic = VMH_STAMP_MAGIC;
}

#endif
