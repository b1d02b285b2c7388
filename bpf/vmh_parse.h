/* Parsers: one per protocol, each checks bounds, advances the cursor and returns the next protocol.
 *
 * A parser that cannot go on returns VMH_LEAVE(way out), which is negative. Bounds are checked against the linear
 * data (the verifier wants that), lengths against `len`: a multi-buffer frame is longer than its linear part.
 */
#ifndef VMH_PARSE_H
#define VMH_PARSE_H

#include <uapi/linux/if_ether.h>
#include <uapi/linux/in.h>
#include <uapi/linux/ip.h>
#include <uapi/linux/ipv6.h>
#include <uapi/linux/tcp.h>
#include <uapi/linux/udp.h>
#include "vmh_const.h"
#include "vmh_flow.h"

#define VMH_LEAVE(out) (-1 - (out))
#define VMH_LEFT(verdict) (-1 - (verdict)) /* the way out that VMH_LEAVE carried */

struct vmh_cursor {
	void *pos;
	void *end;   /* of the linear data */
	__u32 left;  /* bytes of the frame from pos on, linear or not; from IP on: of the IP payload */
	const struct tcphdr *tcp; /* of a TCP segment that was parsed; else NULL */
	int firsts; /* of TCP segments in fragments, the first, and extension headers are skipped: else no parser knows them */
};

struct vmh_ipv6_extension {
	__u8 next, units; /* of 8 bytes, behind the first */
};

struct vmh_ipv6_fragment {
	__u8 next, reserved;
	__be16 offset;
	__be32 ident;
};

struct vmh_vlan_tag {
	__be16 tci;
	__be16 next;
};

static __always_inline int vmh_parse_ethernet(struct vmh_cursor *c)
{
	struct ethhdr *eth = c->pos;

	if ((void *)(eth + 1) > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_ETH);
	c->pos = eth + 1;
	c->left -= sizeof(*eth);
	return ntohs(eth->h_proto);
}

static __always_inline int vmh_is_vlan(int ethertype)
{
	return ethertype == VMH_ETH_8021Q || ethertype == VMH_ETH_8021AD;
}

static __always_inline int vmh_parse_tag(struct vmh_cursor *c, unsigned short *vid)
{
	struct vmh_vlan_tag *tag = c->pos;

	if ((void *)(tag + 1) > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_VLAN);
	*vid = ntohs(tag->tci) & VMH_VID_MASK;
	c->pos = tag + 1;
	c->left -= sizeof(*tag);
	return ntohs(tag->next);
}

/* What follows the outer tag, whose VID is in the key. VID 0 is a priority tag, which the kernel takes as no tag; the
 * key says the same. */
static __always_inline int vmh_parse_inner_vlan(struct vmh_cursor *c, struct vmh_flow_key *key, int next)
{
	if (!vmh_is_vlan(next))
		return next;
	next = vmh_parse_tag(c, &key->vlan2);
	if (vmh_is_vlan(next))
		return VMH_LEAVE(VMH_OUT_PASS_VLAN_DEPTH);
	if (!key->vlan) {
		key->vlan = key->vlan2;
		key->vlan2 = 0;
	}
	return next;
}

/* Tags, if any. */
static __always_inline int vmh_parse_vlans(struct vmh_cursor *c, struct vmh_flow_key *key, int next)
{
	if (!vmh_is_vlan(next))
		return next;
	return vmh_parse_inner_vlan(c, key, vmh_parse_tag(c, &key->vlan));
}

static __always_inline void vmh_map_ipv4(unsigned char *out, const void *address)
{
	out[10] = 0xff;
	out[11] = 0xff;
	__builtin_memcpy(out + 12, address, 4);
}

static __always_inline int vmh_is_alien_fragment(const struct vmh_cursor *c, const struct iphdr *ip)
{
	__be16 place = ip->frag_off & htons(VMH_IPV4_FRAGMENT);

	return place && !(c->firsts && place == htons(VMH_IPV4_FIRST) && ip->protocol == IPPROTO_TCP);
}

static __always_inline int vmh_parse_ipv4(struct vmh_cursor *c, struct vmh_flow_key *key)
{
	struct iphdr *ip = c->pos;
	__u32 header, total;

	if ((void *)(ip + 1) > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_IP);
	header = ip->ihl * 4;
	total = ntohs(ip->tot_len);
	if (ip->version != 4 || header < VMH_IPV4_HEADER)
		return VMH_LEAVE(VMH_OUT_PASS_BAD_IP);
	if (c->pos + header > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_IP);
	if (total < header || total > c->left)
		return VMH_LEAVE(VMH_OUT_PASS_BAD_IP);
	if (vmh_is_alien_fragment(c, ip))
		return VMH_LEAVE(VMH_OUT_PASS_FRAGMENT);
	vmh_map_ipv4(key->dst, &ip->daddr);
	vmh_map_ipv4(key->src, &ip->saddr);
	key->family = 4;
	c->pos += header;
	c->left = total - header; /* drops Ethernet padding */
	return ip->protocol;
}

/* Headers that may stand between IPv6 and UDP or TCP. */
static __always_inline int vmh_is_ipv6_extension(int next)
{
	return next == IPPROTO_HOPOPTS || next == IPPROTO_ROUTING || next == IPPROTO_FRAGMENT ||
	       next == IPPROTO_AH || next == IPPROTO_DSTOPTS || next == IPPROTO_MH;
}

static __always_inline int vmh_parse_ipv6_fragment(struct vmh_cursor *c)
{
	struct vmh_ipv6_fragment *fragment = c->pos;

	if ((void *)(fragment + 1) > c->end || c->left < sizeof(*fragment) ||
	    fragment->next != IPPROTO_TCP || fragment->offset & htons(VMH_IPV6_OFFSET))
		return VMH_LEAVE(VMH_OUT_PASS_IP6_EXT);
	c->pos = fragment + 1;
	c->left -= sizeof(*fragment);
	return IPPROTO_TCP;
}

/* Where it is wanted those before TCP are skipped, as the shim does (shim/tcp/input.c); all others are the kernel's, and so is
 * who opens a connection in such a way. */
static __always_inline int vmh_parse_ipv6_extensions(struct vmh_cursor *c, int next)
{
	struct vmh_ipv6_extension *extension;
	struct tcphdr *tcp;
	__u32 size;

	if (!c->firsts)
		return VMH_LEAVE(VMH_OUT_PASS_IP6_EXT);
#pragma unroll
	for (int i = 0; i < VMH_IPV6_EXTENSIONS; i++) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS)
			break;
		extension = c->pos;
		if ((void *)(extension + 1) > c->end)
			return VMH_LEAVE(VMH_OUT_PASS_IP6_EXT);
		size = (extension->units + 1) * 8;
		if (size > c->left)
			return VMH_LEAVE(VMH_OUT_PASS_IP6_EXT);
		next = extension->next;
		c->pos += size;
		c->left -= size;
	}
	if (next == IPPROTO_FRAGMENT)
		return vmh_parse_ipv6_fragment(c);
	tcp = c->pos;
	if (next != IPPROTO_TCP || (void *)(tcp + 1) > c->end || tcp->syn)
		return VMH_LEAVE(VMH_OUT_PASS_IP6_EXT);
	return next;
}

static __always_inline int vmh_parse_ipv6(struct vmh_cursor *c, struct vmh_flow_key *key)
{
	struct ipv6hdr *ip = c->pos;
	__u32 payload;

	if ((void *)(ip + 1) > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_IP);
	payload = ntohs(ip->payload_len);
	if (ip->version != 6 || payload + sizeof(*ip) > c->left)
		return VMH_LEAVE(VMH_OUT_PASS_BAD_IP);
	__builtin_memcpy(key->dst, &ip->daddr, 16);
	__builtin_memcpy(key->src, &ip->saddr, 16);
	key->family = 6;
	c->pos = ip + 1;
	c->left = payload;
	return vmh_is_ipv6_extension(ip->nexthdr) ? vmh_parse_ipv6_extensions(c, ip->nexthdr) : ip->nexthdr;
}

static __always_inline int vmh_parse_udp(struct vmh_cursor *c, struct vmh_flow_key *key)
{
	struct udphdr *udp = c->pos;
	__u32 length;

	if (c->left < VMH_UDP_HEADER || (void *)(udp + 1) > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_L4);
	length = ntohs(udp->len);
	if (length < VMH_UDP_HEADER || length > c->left)
		return VMH_LEAVE(VMH_OUT_PASS_BAD_L4);
	key->dport = udp->dest;
	key->sport = udp->source;
	return 0;
}

static __always_inline int vmh_parse_tcp(struct vmh_cursor *c, struct vmh_flow_key *key)
{
	struct tcphdr *tcp = c->pos;
	__u32 header;

	if (c->left < VMH_TCP_HEADER || (void *)(tcp + 1) > c->end)
		return VMH_LEAVE(VMH_OUT_PASS_SHORT_L4);
	header = tcp->doff * 4;
	if (header < VMH_TCP_HEADER || header > c->left)
		return VMH_LEAVE(VMH_OUT_PASS_BAD_L4);
	key->dport = tcp->dest;
	key->sport = tcp->source;
	c->tcp = tcp;
	return 0;
}

/* IP and the transport, from what Ethernet or the last tag said. 0 when the key is whole. */
static __always_inline int vmh_parse_flow(struct vmh_cursor *c, struct vmh_flow_key *key, int next)
{
	if (next == VMH_ETH_IPV4)
		next = vmh_parse_ipv4(c, key);
	else if (next == VMH_ETH_IPV6)
		next = vmh_parse_ipv6(c, key);
	else
		return next < 0 ? next : VMH_LEAVE(VMH_OUT_PASS_NOT_IP);
	if (next < 0)
		return next;
	key->proto = next;
	if (next == IPPROTO_UDP)
		return vmh_parse_udp(c, key);
	if (next == IPPROTO_TCP)
		return vmh_parse_tcp(c, key);
	return VMH_LEAVE(VMH_OUT_PASS_NOT_L4);
}

#endif
