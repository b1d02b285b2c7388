/* ibv_create_flow(): from the attributes to what is matched. What cannot be matched is refused with EOPNOTSUPP. */
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <string.h>
#include "sv.h"

#define SV_TAG_MAX 0xffffff

enum { RANK_MULTICAST = 1 << 16, RANK_ALL = 2 << 16 }; /* behind all 16-bit priorities */

#define BOTH(field, from) \
	do { \
		memcpy(&flow->value.key.field, &spec->val.from, sizeof(spec->val.from)); \
		memcpy(&flow->mask.key.field, &spec->mask.from, sizeof(spec->mask.from)); \
	} while (0)

static void layer(struct sv_flow *flow, uint16_t bit)
{
	flow->value.key.layers |= bit;
	flow->mask.key.layers |= bit;
}

static int parse_eth(struct sv_flow *flow, const void *at)
{
	const struct ibv_flow_spec_eth *spec = at;

	BOTH(dst_mac, dst_mac);
	BOTH(src_mac, src_mac);
	BOTH(ether_type, ether_type);
	BOTH(vlan, vlan_tag);
	return 0;
}

static int parse_ipv4(struct sv_flow *flow, const void *at)
{
	const struct ibv_flow_spec_ipv4 *spec = at;

	layer(flow, SV_HAS_IPV4);
	BOTH(src_ip, src_ip);
	BOTH(dst_ip, dst_ip);
	return 0;
}

static int parse_ipv4_ext(struct sv_flow *flow, const void *at)
{
	const struct ibv_flow_spec_ipv4_ext *spec = at;

	layer(flow, SV_HAS_IPV4);
	BOTH(src_ip, src_ip);
	BOTH(dst_ip, dst_ip);
	BOTH(proto, proto);
	BOTH(tos, tos);
	BOTH(ttl, ttl);
	BOTH(ip_flags, flags);
	return 0;
}

static int parse_ipv6(struct sv_flow *flow, const void *at)
{
	const struct ibv_flow_spec_ipv6 *spec = at;

	layer(flow, SV_HAS_IPV6);
	BOTH(src_ip, src_ip);
	BOTH(dst_ip, dst_ip);
	BOTH(flow_label, flow_label);
	BOTH(proto, next_hdr);
	BOTH(tos, traffic_class);
	BOTH(ttl, hop_limit);
	return 0;
}

static int parse_ports(struct sv_flow *flow, const void *at)
{
	const struct ibv_flow_spec_tcp_udp *spec = at;

	layer(flow, spec->type == IBV_FLOW_SPEC_TCP ? SV_HAS_TCP : SV_HAS_UDP);
	BOTH(dst_port, dst_port);
	BOTH(src_port, src_port);
	return 0;
}

static int parse_tag(struct sv_flow *flow, const void *at)
{
	const struct ibv_flow_spec_action_tag *spec = at;

	if (spec->tag_id > SV_TAG_MAX)
		return -EINVAL;
	flow->tag = spec->tag_id;
	return 0;
}

static int parse_drop(struct sv_flow *flow, const void *at)
{
	(void)at;
	flow->drop = true;
	return 0;
}

static const struct {
	uint32_t type;
	uint32_t layer; /* specs come in this order */
	size_t size;
	int (*parse)(struct sv_flow *flow, const void *spec);
} specs[] = {
	{ IBV_FLOW_SPEC_ETH, 2, sizeof(struct ibv_flow_spec_eth), parse_eth },
	{ IBV_FLOW_SPEC_IPV4, 3, sizeof(struct ibv_flow_spec_ipv4), parse_ipv4 },
	{ IBV_FLOW_SPEC_IPV4_EXT, 3, sizeof(struct ibv_flow_spec_ipv4_ext), parse_ipv4_ext },
	{ IBV_FLOW_SPEC_IPV6, 3, sizeof(struct ibv_flow_spec_ipv6), parse_ipv6 },
	{ IBV_FLOW_SPEC_TCP, 4, sizeof(struct ibv_flow_spec_tcp_udp), parse_ports },
	{ IBV_FLOW_SPEC_UDP, 4, sizeof(struct ibv_flow_spec_tcp_udp), parse_ports },
	{ IBV_FLOW_SPEC_ACTION_TAG, 5, sizeof(struct ibv_flow_spec_action_tag), parse_tag },
	{ IBV_FLOW_SPEC_ACTION_DROP, 5, sizeof(struct ibv_flow_spec_action_drop), parse_drop },
};

/* The size of the spec at `at`, or -errno. */
static int parse_spec(struct sv_flow *flow, const uint8_t *at, uint32_t *layer_before)
{
	struct ibv_flow_spec head;

	memcpy(&head, at, sizeof(head.hdr));
	for (size_t i = 0; i < sizeof(specs) / sizeof(*specs); i++) {
		int error;

		if (head.hdr.type != specs[i].type)
			continue;
		/* one spec per layer, from outer to inner; actions may follow each other */
		if (head.hdr.size < specs[i].size || specs[i].layer < *layer_before ||
		    (specs[i].layer == *layer_before && specs[i].layer < 5))
			return -EINVAL;
		*layer_before = specs[i].layer;
		memcpy(&head, at, specs[i].size); /* specs need not be aligned */
		error = specs[i].parse(flow, &head);
		return error ? error : head.hdr.size;
	}
	return -EOPNOTSUPP;
}

static int parse_specs(const struct ibv_flow_attr *attr, struct sv_flow *flow)
{
	const uint8_t *at = (const uint8_t *)(attr + 1);
	uint32_t layer_before = 0;

	/* attr->size says nothing: neither pyverbs nor rdma-core's own tests set it to the size of all */
	for (int i = 0; i < attr->num_of_specs; i++) {
		int size = parse_spec(flow, at, &layer_before);

		if (size < 0)
			return size;
		at += size;
	}
	for (int i = 0; i < SV_WORDS; i++)
		flow->value.w[i] &= flow->mask.w[i];
	return 0;
}

/* 0 or -errno; `flow` is zeroed by the caller. */
int sv_flow_parse(const struct ibv_flow_attr *attr, struct sv_flow *flow)
{
	if (attr->comp_mask || attr->port != 1)
		return -EINVAL;
	if (attr->flags & ~(uint32_t)IBV_FLOW_ATTR_FLAGS_DONT_TRAP)
		return -EOPNOTSUPP;
	flow->pass = attr->flags & IBV_FLOW_ATTR_FLAGS_DONT_TRAP;
	flow->rank = attr->priority;
	switch (attr->type) {
	case IBV_FLOW_ATTR_NORMAL:
		return attr->num_of_specs ? parse_specs(attr, flow) : -EINVAL;
	case IBV_FLOW_ATTR_SNIFFER:
		flow->sniffer = true;
		break;
	case IBV_FLOW_ATTR_MC_DEFAULT:
		flow->rank = RANK_MULTICAST;
		flow->value.key.dst_mac[0] = flow->mask.key.dst_mac[0] = 1;
		break;
	case IBV_FLOW_ATTR_ALL_DEFAULT:
		flow->rank = RANK_ALL;
		break;
	default:
		return -EINVAL;
	}
	return attr->num_of_specs ? -EINVAL : 0;
}

/* Has the interface let the flow's frames in. The membership belongs to the QP's AF_PACKET socket, and ends with it. */
static void membership(const struct sv_flow *flow, int ifindex, const uint8_t *own, int option)
{
	static const uint8_t all[6] = { 255, 255, 255, 255, 255, 255 };
	const struct sv_key *value = &flow->value.key, *mask = &flow->mask.key;
	struct packet_mreq request = { .mr_ifindex = ifindex };

	if (flow->sniffer || flow->rank == RANK_ALL) {
		request.mr_type = PACKET_MR_PROMISC;
	} else if (flow->rank == RANK_MULTICAST) {
		request.mr_type = PACKET_MR_ALLMULTI;
	} else {
		if (memcmp(mask->dst_mac, all, 6) || !memcmp(value->dst_mac, all, 6) || !memcmp(value->dst_mac, own, 6))
			return;
		request.mr_type = value->dst_mac[0] & 1 ? PACKET_MR_MULTICAST : PACKET_MR_UNICAST;
		request.mr_alen = 6;
		memcpy(request.mr_address, value->dst_mac, 6);
	}
	sv_setsockopt(flow->qp->tx_fd, SOL_PACKET, option, &request, sizeof(request));
}

struct ibv_flow *sv_create_flow(struct ibv_qp *qp, struct ibv_flow_attr *attr)
{
	struct sv_context *x = sv_context(qp->context);
	struct sv_flow *flow;
	int error;

	if (x->dead)
		return SV_NULL(EIO);
	flow = calloc(1, sizeof(*flow));
	if (!flow)
		return NULL;
	flow->base.context = qp->context;
	flow->base.handle = ++x->handles;
	flow->qp = sv_qp(qp);
	error = sv_flow_parse(attr, flow);
	if (!error)
		error = sv_engine_add(x, flow);
	if (error) {
		free(flow);
		return SV_NULL(-error);
	}
	membership(flow, x->device->ifindex, x->device->mac, PACKET_ADD_MEMBERSHIP);
	flow->qp->flows++;
	return &flow->base;
}

int sv_destroy_flow(struct ibv_flow *base)
{
	struct sv_flow *flow = (struct sv_flow *)base;
	struct sv_context *x = sv_context(base->context);

	sv_engine_remove(x, flow);
	membership(flow, x->device->ifindex, x->device->mac, PACKET_DROP_MEMBERSHIP);
	flow->qp->flows--;
	free(flow);
	return 0;
}
