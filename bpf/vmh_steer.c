/* Program `steer`, on a served interface: frames of granted flows go to their ring, all else to the kernel. */
#include "vmh_parse.h"
#include "vmh_count.h"
#include "vmh_maps.h"

static __always_inline int vmh_is_multicast(const struct vmh_flow_key *key)
{
	return key->family == 4 ? (key->dst[12] & 0xf0) == 0xe0 : key->dst[0] == 0xff;
}

/* The most specific rule, or NULL. Turns the key into its 3-tuple on the way. */
static __always_inline struct vmh_action *vmh_find_rule(struct vmh_flow_key *key, __u32 flags)
{
	struct vmh_action *action;

	if (flags & VMH_PORT_F_5T) {
		action = rules5.lookup(key);
		if (action)
			return action;
	}
	__builtin_memset(key->src, 0, sizeof(key->src));
	key->sport = 0;
	action = rules3.lookup(key);
	if (action || !vmh_is_multicast(key))
		return action;
	return rulesmc.lookup(key);
}

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

/* Ethernet to transport, and the frame against the MTU: a GSO super-packet comes as one frame in generic mode and
 * would be lost in a ring. Looked at before IP, since bulk TCP comes that way. 0, or VMH_LEAVE. */
static __always_inline int vmh_parse_frame(struct vmh_cursor *c, struct vmh_flow_key *key,
					   const struct vmh_port_config *config, __u32 frame)
{
	__u32 tags;
	int next;

	next = vmh_parse_ethernet(c);
	next = vmh_parse_vlans(c, key, next);
	if (next < 0)
		return next;
	tags = frame - c->left - sizeof(struct ethhdr);
	if (frame > config->max_frame + tags)
		return VMH_LEAVE(VMH_OUT_PASS_TOO_LONG);
	return vmh_parse_flow(c, key, next);
}

int xdp_steer(struct xdp_md *ctx)
{
	struct vmh_cursor c = {(void *)(long)ctx->data, (void *)(long)ctx->data_end};
	struct vmh_flow_key key __attribute__((aligned(8))) = {};
	struct vmh_port_config *config;
	struct vmh_action *action;
	int verdict = XDP_PASS, out, rule, zero = 0;
	__u32 frame = ctx->data_end - ctx->data;

	config = port.lookup(&zero);
	if (!config) /* slot 0 of an array: never, but the verifier wants it said */
		return XDP_PASS;
	if (config->flags & VMH_PORT_F_FRAGS)
		frame = bpf_xdp_get_buff_len(ctx);
	c.left = frame;
	out = vmh_parse_frame(&c, &key, config, frame);
	if (out < 0) {
		out = VMH_LEFT(out);
		goto leave;
	}
	action = vmh_find_rule(&key, config->flags);
	if (!action) {
		out = VMH_OUT_PASS_MISS;
		goto leave;
	}
	rule = action->rule;
	vmh_count(rule_hits.lookup(&rule), frame);
	verdict = vmh_act(ctx, action, &out);
leave:
	vmh_count(outs.lookup(&out), frame);
	return verdict;
}
