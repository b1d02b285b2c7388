/* Program `guard`, on the near end of a ring veth: a process sends only as what it was granted.
 *
 * Tagged frames are refused (NOT_FLOW): a grant names no VLAN, and a tag would carry the process into another one.
 */
#include "vmh_parse.h"
#include "vmh_count.h"
#include "vmh_maps.h"

static __always_inline int vmh_has_own_mac(const struct vmh_cursor *c)
{
	struct ethhdr *eth = c->pos;
	struct vmh_guard_config *config;
	int zero = 0;

	config = guard.lookup(&zero);
	if (!config || (void *)(eth + 1) > c->end)
		return 0;
	/* By hand: BPF has no memcmp to call, and clang makes one. */
#pragma unroll
	for (int i = 0; i < ETH_ALEN; i++)
		if (eth->h_source[i] != config->mac[i])
			return 0;
	return 1;
}

/* Granted as this address and port, or as any address with this port. */
static __always_inline int vmh_is_granted(const struct vmh_flow_key *key)
{
	struct vmh_grant_key source __attribute__((aligned(8))) = {};

	__builtin_memcpy(source.src, key->src, sizeof(source.src));
	source.sport = key->sport;
	source.proto = key->proto;
	source.family = key->family;
	if (granted.lookup(&source))
		return 1;
	__builtin_memset(source.src, 0, sizeof(source.src));
	return granted.lookup(&source) != 0;
}

static __always_inline int vmh_guard_out(struct vmh_cursor *c)
{
	struct vmh_flow_key key __attribute__((aligned(8))) = {};

	if (!vmh_has_own_mac(c))
		return VMH_GUARD_BAD_MAC;
	if (vmh_parse_flow(c, &key, vmh_parse_ethernet(c)) < 0)
		return VMH_GUARD_NOT_FLOW;
	return vmh_is_granted(&key) ? VMH_GUARD_SENT : VMH_GUARD_BAD_SOURCE;
}

int xdp_guard(struct xdp_md *ctx)
{
	__u32 frame = bpf_xdp_get_buff_len(ctx);
	struct vmh_cursor c = {(void *)(long)ctx->data, (void *)(long)ctx->data_end, frame};
	int verdict = XDP_DROP, out = vmh_guard_out(&c);

	if (out == VMH_GUARD_SENT) {
		verdict = guard_dev.redirect_map(0, XDP_DROP);
		if (verdict != XDP_REDIRECT)
			out = VMH_GUARD_NO_DEV;
	}
	vmh_count(guard_outs.lookup(&out), frame);
	return verdict;
}
