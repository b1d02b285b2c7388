/* Program `steer`, on a served interface: frames of granted flows go to their ring, all else to the kernel. And
 * `steer_stamped`, where the driver tells the time of arrival: the same, with that time for flows that want it.
 */
#include "vmh_parse.h"
#include "vmh_maps.h"
#include "vmh_rule.h"
#include "vmh_stamp.h"

static __always_inline int vmh_to_ring(struct xdp_md *ctx, const struct vmh_action *action)
{
	__u32 queue = ctx->rx_queue_index;

	/* A higher queue would land in the slots of the next ring. */
	if (queue >= VMH_QUEUES)
		return XDP_PASS;
	return xsks.redirect_map(action->target + queue, XDP_PASS);
}

/* Does what the rule says. *out is the way out; an empty slot of a map is the kernel's. */
static __always_inline int vmh_act(struct xdp_md *ctx, const struct vmh_action *action, int *out)
{
	int verdict;

	switch (action->kind) {
	case VMH_ACT_RING:
		verdict = vmh_to_ring(ctx, action);
		*out = VMH_OUT_RING;
		break;
	case VMH_ACT_DEV:
		verdict = devs.redirect_map(action->target, XDP_PASS);
		*out = VMH_OUT_DEV;
		break;
	case VMH_ACT_DROP:
		*out = VMH_OUT_DROP;
		return XDP_DROP;
	default:
		*out = VMH_OUT_PASS_RULE;
		return XDP_PASS;
	}
	if (verdict != XDP_REDIRECT)
		*out = VMH_OUT_PASS_RING_GONE;
	return verdict;
}

/* As vmh_act(), of the headers alone: `more` bytes of the frame are cut off. */
static __always_inline int vmh_act_cut(struct xdp_md *ctx, const struct vmh_action *action, __u32 more, int *out)
{
	int verdict;

	if (bpf_xdp_adjust_tail(ctx, -(int)more))
		return XDP_DROP; /* the kernel would reset the connection, or drop the frame as well */
	verdict = vmh_act(ctx, action, out);
	if (verdict == XDP_REDIRECT)
		*out = VMH_OUT_RING_TOO_LONG;
	return verdict;
}

static __always_inline int vmh_steer(struct xdp_md *ctx, int stamps)
{
	struct vmh_cursor c = {(void *)(long)ctx->data, (void *)(long)ctx->data_end};
	struct vmh_flow_key key __attribute__((aligned(8))) = {};
	struct vmh_port_config *config;
	struct vmh_action *action;
	int verdict = XDP_PASS, out, zero = 0;
	__u32 frame = ctx->data_end - ctx->data;

	config = port.lookup(&zero);
	if (!config) /* slot 0 of an array: never, but the verifier wants it said */
		return XDP_PASS;
	if (config->flags & VMH_PORT_F_FRAGS)
		frame = bpf_xdp_get_buff_len(ctx);
	c.left = frame;
	out = vmh_parse_vlans(&c, &key, vmh_parse_ethernet(&c));
	out = vmh_parse_whole(&c, &key, config, frame, out);
	action = vmh_hit(ctx, &key, config, frame, c.tcp, &out);
	if (action && out == VMH_OUT_RING_TOO_LONG && !(config->flags & VMH_PORT_F_CHAINS)) {
		verdict = vmh_act_cut(ctx, action, frame - vmh_headers(&c, (void *)(long)ctx->data), &out);
	} else if (action) {
		if (stamps && action->flags & VMH_ACT_F_STAMP)
			vmh_stamp_frame(ctx);
		verdict = vmh_act(ctx, action, &out);
	}
	vmh_count(outs.lookup(&out), frame);
	return verdict;
}

int xdp_steer(struct xdp_md *ctx)
{
	return vmh_steer(ctx, 0);
}

int xdp_steer_stamped(struct xdp_md *ctx)
{
	return vmh_steer(ctx, 1);
}
