/* Program `tc_steer`, at the tcx ingress of an interface in the place of `steer` while bulk traffic comes: the same rules
 * and counters, but super-packets stay as they are (generic XDP linearises each). An AF_XDP socket is out of reach from
 * here, so a frame goes to the far end of a veth pair, where `ring_in` has one.
 *
 * bpf_redirect_peer also for ring veths: generic XDP does not look at what bpf_redirect() sent (skb_is_redirected).
 */
#include <uapi/linux/pkt_cls.h>
#include "vmh_parse.h"
#include "vmh_maps.h"
#include "vmh_rule.h"

#define VMH_TCX_NEXT (-1) /* the other programs of the interface, then the stack */
#define VMH_LINEAR 160 /* bytes: two tags, IP and transport headers with all options */

static __always_inline int vmh_tc_redirect(__u32 slot, int *out)
{
	__u32 *ifindex = nears.lookup(&slot);

	if (!ifindex || !*ifindex) {
		*out = VMH_OUT_PASS_RING_GONE;
		return VMH_TCX_NEXT;
	}
	return bpf_redirect_peer(*ifindex, 0);
}

/* As vmh_act() of `steer`. Rules of tagged frames are not for rings here: the tag is not in the frame any more. */
static __always_inline int vmh_tc_act(const struct vmh_action *action, int tagged, int *out)
{
	switch (action->kind) {
	case VMH_ACT_RING:
		*out = VMH_OUT_RING;
		return vmh_tc_redirect(tagged ? VMH_NEARS : action->target / VMH_QUEUES, out);
	case VMH_ACT_DEV:
		*out = VMH_OUT_DEV;
		return vmh_tc_redirect(tagged ? VMH_NEARS : VMH_NEAR_DEV + action->target, out);
	case VMH_ACT_DROP:
		*out = VMH_OUT_DROP;
		return TC_ACT_SHOT;
	default:
		*out = VMH_OUT_PASS_RULE;
		return VMH_TCX_NEXT;
	}
}

/* As vmh_tc_act(), of the first `headers` bytes alone: they are no super-packet any more. */
static __always_inline int vmh_tc_act_cut(struct __sk_buff *skb, const struct vmh_action *action, int tagged,
					  __u32 headers, int *out)
{
	int verdict;

	if (bpf_skb_change_tail(skb, headers, 0))
		return TC_ACT_SHOT; /* the kernel would reset the connection, or drop the frame as well */
	verdict = vmh_tc_act(action, tagged, out);
	if (verdict != VMH_TCX_NEXT)
		*out = VMH_OUT_RING_TOO_LONG;
	return verdict;
}

/* The kernel has taken the outer tag out of the frame. */
static __always_inline int vmh_tc_parse(struct __sk_buff *skb, struct vmh_flow_key *key,
					const struct vmh_port_config *config, const struct tcphdr **tcp,
					__u32 *headers)
{
	struct vmh_cursor c = {(void *)(long)skb->data, (void *)(long)skb->data_end, skb->len};
	int next = vmh_parse_ethernet(&c);

	if (skb->vlan_present) {
		key->vlan = skb->vlan_tci & VMH_VID_MASK;
		next = vmh_parse_inner_vlan(&c, key, next);
	} else {
		next = vmh_parse_vlans(&c, key, next);
	}
	next = vmh_parse_whole(&c, key, config, skb->len, next);
	*tcp = c.tcp;
	*headers = vmh_headers(&c, (void *)(long)skb->data);
	return next;
}

int tc_steer(struct __sk_buff *skb)
{
	struct vmh_flow_key key __attribute__((aligned(8))) = {};
	struct vmh_port_config *config;
	struct vmh_action *action;
	int verdict = VMH_TCX_NEXT, out = VMH_OUT_PASS_TOO_LONG, zero = 0;
	__u32 frame = skb->len, headers = 0;
	const struct tcphdr *tcp = NULL;

	config = port.lookup(&zero);
	if (!config)
		return VMH_TCX_NEXT;
	/* first of all: this is what the program is here for */
	if (skb->gso_size && !(config->flags & VMH_PORT_F_TCP))
		goto leave;
	if (skb->data_end - skb->data < (frame < VMH_LINEAR ? frame : VMH_LINEAR))
		bpf_skb_pull_data(skb, frame < VMH_LINEAR ? frame : VMH_LINEAR); /* when it can't, the parser says so */
	out = vmh_tc_parse(skb, &key, config, &tcp, &headers);
	if (skb->gso_size && out == 0) /* no longer than the MTU, and yet several segments */
		out = VMH_LEAVE(key.proto == IPPROTO_TCP ? VMH_OUT_RING_TOO_LONG : VMH_OUT_PASS_TOO_LONG);
	action = vmh_hit(skb, &key, config, frame, tcp, &out);
	if (action && out == VMH_OUT_RING_TOO_LONG && !(config->flags & VMH_PORT_F_CHAINS))
		verdict = vmh_tc_act_cut(skb, action, key.vlan, headers, &out);
	else if (action)
		verdict = vmh_tc_act(action, key.vlan, &out);
leave:
	vmh_count(outs.lookup(&out), frame);
	return verdict;
}
