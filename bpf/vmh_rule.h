/* What `steer` and `tc_steer` share: from the tags on to the rule of a frame. */
#ifndef VMH_RULE_H
#define VMH_RULE_H

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

/* From what the last tag said to the transport, and the frame against the MTU: a GSO super-packet comes as one frame in
 * generic mode and would be lost in a ring. Looked at before IP, since bulk TCP comes that way. 0, or VMH_LEAVE. */
static __always_inline int vmh_parse_whole(struct vmh_cursor *c, struct vmh_flow_key *key,
					   const struct vmh_port_config *config, __u32 frame, int next)
{
	__u32 tags;

	if (next < 0)
		return next;
	tags = frame - c->left - sizeof(struct ethhdr);
	if (frame > config->max_frame + tags)
		return VMH_LEAVE(VMH_OUT_PASS_TOO_LONG);
	return vmh_parse_flow(c, key, next);
}

/* What is to be done with a frame that was parsed with the result *out, and the hit counted; or NULL, and in *out the
 * way on which it is left to the kernel. */
static __always_inline struct vmh_action *vmh_hit(struct vmh_flow_key *key, const struct vmh_port_config *config,
						  __u32 frame, int *out)
{
	struct vmh_action *action;
	int rule;

	if (*out < 0) {
		*out = VMH_LEFT(*out);
		return NULL;
	}
	action = vmh_find_rule(key, config->flags);
	if (!action) {
		*out = VMH_OUT_PASS_MISS;
		return NULL;
	}
	rule = action->rule;
	vmh_count(rule_hits.lookup(&rule), frame);
	return action;
}

#endif
