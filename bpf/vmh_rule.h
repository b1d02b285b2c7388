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

/* Does the segment answer a SYN cookie of this listener, the kernel's? It asks that first whether cookies were sent lately.
 */
static __always_inline int vmh_answers_cookie(struct bpf_sock *listener, const struct vmh_flow_key *key,
					      const struct tcphdr *tcp)
{
	union {
		struct iphdr v4;
		struct ipv6hdr v6;
	} ip = {};

	if (key->family == 4) {
		ip.v4.version = 4;
		__builtin_memcpy(&ip.v4.saddr, key->src + 12, 4);
		__builtin_memcpy(&ip.v4.daddr, key->dst + 12, 4);
	} else {
		ip.v6.version = 6;
		__builtin_memcpy(&ip.v6.saddr, key->src, 16);
		__builtin_memcpy(&ip.v6.daddr, key->dst, 16);
	}
	return bpf_tcp_check_syncookie(listener, &ip, sizeof(ip), (void *)tcp, sizeof(*tcp)) == 0;
}

/* The rule for a port of TCP leaves to the kernel what is the kernel's: every connection that it has, opening and closing
 * ones too, and those that are in its SYN cookies alone. A listener of the kernel gets SYNs, and none where the ring
 * listens; all else at its port it would answer by a reset. */
static __always_inline int vmh_is_kernels(void *ctx, const struct vmh_flow_key *key, const struct vmh_action *action,
					  const struct tcphdr *tcp)
{
	int leave;
	struct bpf_sock_tuple tuple = {};
	struct bpf_sock *sk;
	__u32 state;

	if (key->family == 4) {
		__builtin_memcpy(&tuple.ipv4.saddr, key->src + 12, 4);
		__builtin_memcpy(&tuple.ipv4.daddr, key->dst + 12, 4);
		tuple.ipv4.sport = key->sport;
		tuple.ipv4.dport = key->dport;
		sk = bpf_skc_lookup_tcp(ctx, &tuple, sizeof(tuple.ipv4), BPF_F_CURRENT_NETNS, 0);
	} else {
		__builtin_memcpy(&tuple.ipv6.saddr, key->src, 16);
		__builtin_memcpy(&tuple.ipv6.daddr, key->dst, 16);
		tuple.ipv6.sport = key->sport;
		tuple.ipv6.dport = key->dport;
		sk = bpf_skc_lookup_tcp(ctx, &tuple, sizeof(tuple.ipv6), BPF_F_CURRENT_NETNS, 0);
	}
	if (!sk)
		return 0;
	state = sk->state;
	leave = state != BPF_TCP_LISTEN;
	if (!leave && tcp && tcp->syn)
		leave = !tcp->ack && !(action->flags & VMH_ACT_F_LISTEN);
	else if (!leave && tcp && tcp->ack && !tcp->rst)
		leave = vmh_answers_cookie(sk, key, tcp);
	bpf_sk_release(sk);
	return leave;
}

static __always_inline int vmh_is_rings(const struct vmh_action *action)
{
	return action->kind == VMH_ACT_RING || action->kind == VMH_ACT_DEV;
}

/* The rule for what `key` names, whoever sent it. */
static __always_inline struct vmh_action *vmh_find_port(const struct vmh_port_config *config,
							const struct vmh_flow_key *key)
{
	struct vmh_flow_key whole __attribute__((aligned(8))) = *key;
	struct vmh_action *action;

	if (!(config->flags & VMH_PORT_F_3T))
		return NULL;
	__builtin_memset(whole.src, 0, sizeof(whole.src));
	whole.sport = 0;
	action = rules3.lookup(&whole);
	if (action || !vmh_is_multicast(&whole))
		return action;
	return rulesmc.lookup(&whole);
}

/* An exact-match cache before the hashes, whose code and lines are cold between two messages (108 ns of 1.5 us there,
 * 40 ns when they are warm). */
static __always_inline struct vmh_memo *vmh_memo_slot(const struct vmh_flow_key *key)
{
	__u32 hash = *(const __u32 *)(key->src + 12) ^ *(const __u32 *)(key->dst + 12) ^ *(const __u32 *)&key->dport;
	int slot = hash * 2654435761u >> 24 & (VMH_MEMOS - 1);

	return memos.lookup(&slot);
}

static __always_inline int vmh_same_key(const struct vmh_flow_key *a, const struct vmh_flow_key *b)
{
	const __u64 *x = (const __u64 *)a, *y = (const __u64 *)b;

	_Static_assert(sizeof(*a) == 44, "all bytes are compared");
	return x[0] == y[0] && x[1] == y[1] && x[2] == y[2] && x[3] == y[3] && x[4] == y[4] &&
	       *(const __u32 *)(x + 5) == *(const __u32 *)(y + 5);
}

/* `generation` was read before the rules: if they have changed since, the memo is stale from the start. */
static __always_inline struct vmh_action *vmh_remember(struct vmh_memo *memo, const struct vmh_flow_key *key,
						       __u32 generation, struct vmh_action *action)
{
	if (memo) {
		memo->key = *key;
		memo->action = *action;
		memo->generation = generation;
	}
	return action;
}

/* The most specific rule, or NULL and in *out the way on which the frame is left to the kernel. */
static __always_inline struct vmh_action *vmh_find_rule(void *ctx, const struct vmh_flow_key *key,
							const struct vmh_port_config *config, const struct tcphdr *tcp,
							int *out)
{
	__u32 generation = *(const volatile __u32 *)&config->generation;
	struct vmh_memo *memo = NULL;
	struct vmh_action *action;

	asm volatile("" ::: "memory"); /* all that is known of the rules is read after it */
	*out = VMH_OUT_PASS_MISS;
	if (!(config->flags & (VMH_PORT_F_5T | VMH_PORT_F_3T)))
		return NULL;
	if (generation) {
		memo = vmh_memo_slot(key);
		if (memo && memo->generation == generation && vmh_same_key(&memo->key, key))
			return &memo->action;
	}
	if (config->flags & VMH_PORT_F_5T) {
		action = rules5.lookup(key);
		if (action)
			return vmh_remember(memo, key, generation, action);
	}
	action = vmh_find_port(config, key);
	if (!action)
		return NULL;
	if (key->proto != IPPROTO_TCP)
		return vmh_remember(memo, key, generation, action);
	/* not remembered: the kernel's connections come and go */
	if (vmh_is_rings(action) && vmh_is_kernels(ctx, key, action, tcp)) {
		*out = VMH_OUT_PASS_KERNEL_TCP;
		return NULL;
	}
	return action;
}

/* From what the last tag said to the transport, and the frame against the MTU: a GSO super-packet comes as one frame in
 * generic mode and would be lost in a ring. Looked at before IP, since bulk TCP comes that way; but where a ring may have
 * TCP connections, the kernel would reset them or drop the frame without a word. So it would with a segment in fragments:
 * the first one goes by the rules, and the shim brings the connection home. 0, or VMH_LEAVE. */
static __always_inline int vmh_parse_whole(struct vmh_cursor *c, struct vmh_flow_key *key,
					   const struct vmh_port_config *config, __u32 frame, int next)
{
	__u32 tags;

	if (next < 0)
		return next;
	tags = frame - c->left - sizeof(struct ethhdr);
	c->firsts = config->flags & VMH_PORT_F_TCP;
	if (frame <= config->max_frame + tags)
		return vmh_parse_flow(c, key, next);
	if (config->flags & VMH_PORT_F_TCP && vmh_parse_flow(c, key, next) == 0 && key->proto == IPPROTO_TCP)
		return VMH_LEAVE(VMH_OUT_RING_TOO_LONG);
	return VMH_LEAVE(VMH_OUT_PASS_TOO_LONG);
}

/* Of a frame that vmh_parse_whole() left as RING_TOO_LONG: what the ring gets. Less than the IP header says: by this the
 * shim knows it. */
static __always_inline __u32 vmh_headers(const struct vmh_cursor *c, const void *data)
{
	__u64 n = c->pos - data;

	asm volatile("" : "+r"(n)); /* the verifier would not follow clang's next sum with these pointers */
	return (__u32)n + VMH_TCP_HEADER;
}

/* What is to be done with a frame that was parsed with the result *out, and the hit counted; or NULL, and in *out the
 * way on which it is left to the kernel. *out stays RING_TOO_LONG for a frame that has to be cut first. */
static __always_inline struct vmh_action *vmh_hit(void *ctx, const struct vmh_flow_key *key,
						  const struct vmh_port_config *config, __u32 frame,
						  const struct tcphdr *tcp, int *out)
{
	int rule, parsed = *out, too_long = parsed == VMH_LEAVE(VMH_OUT_RING_TOO_LONG);
	struct vmh_action *action = NULL;

	if (parsed == 0 || too_long)
		action = vmh_find_rule(ctx, key, config, tcp, out);
	else
		*out = VMH_LEFT(parsed);
	if (too_long) {
		*out = VMH_OUT_RING_TOO_LONG;
		if (!action || !vmh_is_rings(action)) {
			*out = VMH_OUT_PASS_TOO_LONG;
			return NULL;
		}
	}
	if (!action)
		return NULL;
	rule = action->rule;
	vmh_count(rule_hits.lookup(&rule), frame);
	return action;
}

#endif
