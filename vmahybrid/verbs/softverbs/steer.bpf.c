/* The device's receive side: which frame goes to which QP. Runs at tcx ingress (frames that a rule takes are gone for
 * the kernel) and egress (loopback of frames that QPs send, and the sniffers' view). One look at a frame decides both
 * who gets it and whether the kernel does, so that it cannot be seen twice while rules change, nor lost but in the case of
 * SV_TABLES. */
#include <linux/bpf.h>
#include <linux/if_ether.h>
#include <linux/if_packet.h>
#include <linux/in.h>
#include <bpf/bpf_endian.h>
#include <bpf/bpf_helpers.h>
#include <stddef.h>
#include "steer.h"

/* the loader knows them by name */
#define MAP __attribute__((section("maps"), used)) char
MAP sv_rules;
MAP sv_tables;
MAP sv_controls;
MAP sv_rings;

/* of Linux 6.6, which Debian 12's headers precede */
enum { TCX_NEXT = -1, TCX_DROP = 2 };

#define INLINE static __attribute__((always_inline)) inline


INLINE int load(struct __sk_buff *skb, __u32 at, void *to, __u32 n)
{
	return bpf_skb_load_bytes(skb, at, to, n);
}

INLINE void parse_ports(struct __sk_buff *skb, struct sv_key *key, __u32 at)
{
	__u16 port[2];

	if (key->proto != IPPROTO_TCP && key->proto != IPPROTO_UDP)
		return;
	if (load(skb, at, port, sizeof(port)))
		return;
	key->layers |= key->proto == IPPROTO_TCP ? SV_HAS_TCP : SV_HAS_UDP;
	key->src_port = port[0];
	key->dst_port = port[1];
}

INLINE void parse_ipv4(struct __sk_buff *skb, struct sv_key *key, __u32 at)
{
	__u8 ip[20];
	__u32 header;

	if (load(skb, at, ip, sizeof(ip)) || ip[0] >> 4 != 4)
		return;
	header = (ip[0] & 15) * 4;
	if (header < sizeof(ip))
		return;
	key->layers |= SV_HAS_IPV4;
	key->tos = ip[1];
	key->ip_flags = ip[6] >> 5;
	key->ttl = ip[8];
	key->proto = ip[9];
	__builtin_memcpy(key->src_ip, ip + 12, 4);
	__builtin_memcpy(key->dst_ip, ip + 16, 4);
	if (!(ip[6] & 0x3f) && !ip[7]) /* a fragment has no ports that could be trusted: it is the kernel's */
		parse_ports(skb, key, at + header);
}

INLINE void parse_ipv6(struct __sk_buff *skb, struct sv_key *key, __u32 at)
{
	__u8 ip[40];

	if (load(skb, at, ip, sizeof(ip)) || ip[0] >> 4 != 6)
		return;
	key->layers |= SV_HAS_IPV6;
	key->tos = ip[0] << 4 | ip[1] >> 4;
	__builtin_memcpy(&key->flow_label, ip, 4);
	key->flow_label &= bpf_htonl(0xfffff);
	key->proto = ip[6];
	key->ttl = ip[7];
	__builtin_memcpy(key->src_ip, ip + 8, 16);
	__builtin_memcpy(key->dst_ip, ip + 24, 16);
	parse_ports(skb, key, at + 40); /* only directly behind: as NICs, no extension headers */
}

INLINE int parse(struct __sk_buff *skb, struct sv_key *key)
{
	__u8 eth[ETH_HLEN];
	__u32 at = ETH_HLEN;
	__u16 tag[2];

	if (load(skb, 0, eth, sizeof(eth)))
		return -1;
	__builtin_memcpy(key->dst_mac, eth, 12);
	__builtin_memcpy(&key->ether_type, eth + 12, 2);
	if (skb->vlan_present) {
		key->vlan = bpf_htons(skb->vlan_tci);
	} else if (key->ether_type == bpf_htons(ETH_P_8021Q)) {
		if (load(skb, at, tag, sizeof(tag)))
			return -1;
		key->vlan = tag[0];
		key->ether_type = tag[1];
		at += 4;
	}
	if (key->ether_type == bpf_htons(ETH_P_IP))
		parse_ipv4(skb, key, at);
	else if (key->ether_type == bpf_htons(ETH_P_IPV6))
		parse_ipv6(skb, key, at);
	return 0;
}

/* Ring records have sizes that the verifier knows: the smallest that holds the frame. */
#define PUT(class) \
	do { \
		record = bpf_ringbuf_reserve(ring, sizeof(*record) + (class), 0); \
		if (!record) \
			goto full; \
		if (length < 1 || length > (class) || bpf_skb_load_bytes(skb, 0, record + 1, length)) { \
			bpf_ringbuf_discard(record, BPF_RB_NO_WAKEUP); \
			goto full; \
		} \
	} while (0)

INLINE void deliver(struct __sk_buff *skb, struct sv_control *control, const struct sv_dest *dest)
{
	__u32 index = dest->slot, length = skb->len;
	struct sv_record *record;
	struct sv_slot *slot;
	void *ring;

	if (index >= SV_SLOTS)
		return;
	slot = &control->slot[index];
	ring = bpf_map_lookup_elem(&sv_rings, &index);
	if (!ring)
		return;
	if (length <= 128)
		PUT(128);
	else if (length <= 512)
		PUT(512);
	else if (length <= 1536)
		PUT(1536);
	else if (length <= 4096)
		PUT(4096);
	else if (length <= 9216)
		PUT(9216);
	else
		PUT(SV_FRAME_MAX);
	record->generation = dest->generation;
	record->length = length;
	record->tag = dest->tag;
	record->vlan = skb->vlan_present ? skb->vlan_tci : 0;
	record->vlan_proto = skb->vlan_present ? skb->vlan_proto : 0;
	record->gso_size = skb->gso_size;
	record->zero = 0;
	record->ktime = slot->stamped ? bpf_ktime_get_ns() : 0;
	/* A full barrier between the reservation, which the reader sees, and the look at `armed`, which the reader sets
	 * before it looks for reservations: one of the two notices. */
	__sync_fetch_and_add(&slot->frames, 1);
	bpf_ringbuf_submit(record, slot->armed ? BPF_RB_FORCE_WAKEUP : BPF_RB_NO_WAKEUP);
	return;
full:
	__sync_fetch_and_add(&slot->dropped, 1);
}

INLINE void sniff(struct __sk_buff *skb, struct sv_control *control)
{
	for (__u32 i = 0; i < SV_SNIFFERS; i++) {
		if (i >= control->sniffers)
			break;
		deliver(skb, control, &control->sniffer[i]);
	}
}

INLINE struct sv_rule *look(const struct sv_mask *mask, const union sv_words *key)
{
	struct sv_rule_key masked;

	for (__u32 i = 0; i < SV_WORDS; i++)
		masked.w[i] = key->w[i] & mask->w[i];
	masked.mask = mask->id;
	masked.zero = 0;
	return bpf_map_lookup_elem(&sv_rules, &masked);
}

INLINE void deliver_all(struct __sk_buff *skb, struct sv_control *control, const struct sv_rule *rule)
{
	for (__u32 i = 0; i < SV_DESTS; i++) {
		if (i >= rule->dests)
			break;
		deliver(skb, control, &rule->dest[i]);
	}
}

/* Delivers; 1 if a rule took the frame. Outside of the loop, so that the verifier need not look at each mask's
 * delivery anew, which takes it a third of a second. */
INLINE int steer(struct __sk_buff *skb, struct sv_control *control)
{
	__u32 which = control->table;
	struct sv_table *table = bpf_map_lookup_elem(&sv_tables, &which);
	struct sv_rule *copies, *takes = NULL;
	union sv_words key = {};
	__u32 copied; /* the mask of the first PASS rule, plus one */

	if (!table || !table->masks || skb->len > SV_FRAME_MAX || parse(skb, &key.key))
		return 0;
	/* A number that the verifier does not know, though it is 0: with a pointer, or a number that it knows, it looks
	 * at the rest of the loop once for each mask where the rule may have been found. */
	copied = table->zero;
	for (__u32 i = 0; i < SV_MASKS; i++) {
		struct sv_rule *rule;

		if (i >= table->masks)
			break;
		rule = look(&table->mask[i], &key);
		if (rule && !(rule->flags & SV_RULE_PASS)) {
			takes = rule;
			break;
		}
		if (rule && !copied)
			copied = i + 1 + table->zero;
	}
	if (copied && copied <= SV_MASKS) {
		copies = look(&table->mask[copied - 1], &key);
		if (copies)
			deliver_all(skb, control, copies);
	}
	if (takes)
		deliver_all(skb, control, takes);
	return takes ? 1 : 0;
}

__attribute__((section("ingress"), used)) int sv_ingress(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct sv_control *control = bpf_map_lookup_elem(&sv_controls, &zero);

	/* the kernel's copy of its own multicast has no Ethernet header */
	if (!control || skb->pkt_type == PACKET_LOOPBACK)
		return TCX_NEXT;
	sniff(skb, control);
	return steer(skb, control) ? TCX_DROP : TCX_NEXT;
}

__attribute__((section("egress"), used)) int sv_egress(struct __sk_buff *skb)
{
	__u32 zero = 0;
	struct sv_control *control = bpf_map_lookup_elem(&sv_controls, &zero);

	if (!control)
		return TCX_NEXT;
	sniff(skb, control);
	if (skb->mark == SV_MARK)
		steer(skb, control);
	return TCX_NEXT;
}
