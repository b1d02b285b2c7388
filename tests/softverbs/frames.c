/* Frames and flow rules. */
#include "rig.h"
#include <arpa/inet.h>
#include <net/ethernet.h>
#include <netinet/in.h>

static uint16_t checksum(const uint8_t *at, uint32_t length, uint32_t sum)
{
	for (; length > 1; length -= 2, at += 2)
		sum += (uint32_t)(at[0] << 8 | at[1]);
	sum += length ? (uint32_t)at[0] << 8 : 0;
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return htons((uint16_t)~sum);
}

static uint32_t ethernet(uint8_t *frame, const uint8_t *to, uint16_t vlan, uint16_t type)
{
	uint16_t words[3] = { htons(ETHERTYPE_VLAN), htons(vlan), htons(type) };

	memcpy(frame, to, 6);
	memcpy(frame + 6, rig.peer, 6);
	if (vlan)
		memcpy(frame + 12, words, 6);
	else
		memcpy(frame + 12, words + 2, 2);
	return vlan ? 18 : 14;
}

uint32_t udp4(uint8_t *frame, struct udp udp, uint32_t size, uint8_t fill)
{
	uint32_t at = ethernet(frame, udp.to, udp.vlan, ETHERTYPE_IP);
	uint8_t *ip = frame + at, *transport = ip + 20;
	uint16_t total = htons((uint16_t)(28 + size)), words[4];
	uint16_t sum;

	memset(ip, 0, 20);
	ip[0] = 0x45;
	memcpy(ip + 2, &total, 2);
	ip[8] = 64;
	ip[9] = udp.protocol ? udp.protocol : IPPROTO_UDP;
	inet_pton(AF_INET, udp.src, ip + 12);
	inet_pton(AF_INET, udp.dst, ip + 16);
	sum = checksum(ip, 20, 0);
	memcpy(ip + 10, &sum, 2);
	words[0] = htons(udp.sport);
	words[1] = htons(udp.dport);
	words[2] = htons((uint16_t)(8 + size));
	words[3] = 0;
	memcpy(transport, words, 8);
	memset(transport + 8, fill, size);
	sum = checksum(transport, 8 + size, (uint32_t)(ip[12] << 8 | ip[13]) + (uint32_t)(ip[14] << 8 | ip[15]) +
						    (uint32_t)(ip[16] << 8 | ip[17]) + (uint32_t)(ip[18] << 8 | ip[19]) +
						    IPPROTO_UDP + 8 + size);
	memcpy(transport + 6, &sum, 2);
	return at + 28 + size;
}

uint32_t udp6(uint8_t *frame, const uint8_t *to, const char *src, const char *dst, uint16_t dport, uint32_t size)
{
	uint32_t at = ethernet(frame, to, 0, ETHERTYPE_IPV6), sum = IPPROTO_UDP + 8 + size;
	uint8_t *ip = frame + at, *transport = ip + 40;
	uint16_t words[4] = { htons(9), htons(dport), htons((uint16_t)(8 + size)), 0 }, result;

	memset(ip, 0, 40);
	ip[0] = 0x60;
	memcpy(ip + 4, &words[2], 2);
	ip[6] = IPPROTO_UDP;
	ip[7] = 64;
	inet_pton(AF_INET6, src, ip + 8);
	inet_pton(AF_INET6, dst, ip + 24);
	memcpy(transport, words, 8);
	memset(transport + 8, 6, size);
	for (int i = 8; i < 40; i += 2)
		sum += (uint32_t)(ip[i] << 8 | ip[i + 1]);
	result = checksum(transport, 8 + size, sum);
	memcpy(transport + 6, &result, 2);
	return at + 48 + size;
}

struct flow new_flow(enum ibv_flow_attr_type type, uint16_t priority)
{
	struct flow flow = { .attr = { .type = type, .size = sizeof(flow.attr), .priority = priority, .port = 1 } };

	return flow;
}

void add_spec(struct flow *flow, const void *spec, uint16_t size)
{
	memcpy(flow->specs + (flow->attr.size - sizeof(flow->attr)), spec, size);
	flow->attr.size = (uint16_t)(flow->attr.size + size);
	flow->attr.num_of_specs++;
}

void add_eth(struct flow *flow, const uint8_t *to, uint16_t type, uint16_t vlan)
{
	struct ibv_flow_spec_eth spec = { .type = IBV_FLOW_SPEC_ETH, .size = sizeof(spec) };

	if (to) {
		memcpy(spec.val.dst_mac, to, 6);
		memset(spec.mask.dst_mac, 0xff, 6);
	}
	spec.val.ether_type = htons(type);
	spec.mask.ether_type = type ? 0xffff : 0;
	spec.val.vlan_tag = htons(vlan);
	spec.mask.vlan_tag = vlan ? htons(0xfff) : 0;
	add_spec(flow, &spec, sizeof(spec));
}

void add_ipv4(struct flow *flow, const char *src, const char *dst)
{
	struct ibv_flow_spec_ipv4 spec = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof(spec) };

	if (src) {
		inet_pton(AF_INET, src, &spec.val.src_ip);
		spec.mask.src_ip = 0xffffffff;
	}
	if (dst) {
		inet_pton(AF_INET, dst, &spec.val.dst_ip);
		spec.mask.dst_ip = 0xffffffff;
	}
	add_spec(flow, &spec, sizeof(spec));
}

void add_udp(struct flow *flow, uint16_t sport, uint16_t dport)
{
	struct ibv_flow_spec_tcp_udp spec = { .type = IBV_FLOW_SPEC_UDP, .size = sizeof(spec) };

	spec.val.src_port = htons(sport);
	spec.mask.src_port = sport ? 0xffff : 0;
	spec.val.dst_port = htons(dport);
	spec.mask.dst_port = dport ? 0xffff : 0;
	add_spec(flow, &spec, sizeof(spec));
}

void add_tag(struct flow *flow, uint32_t tag)
{
	struct ibv_flow_spec_action_tag spec = { .type = IBV_FLOW_SPEC_ACTION_TAG, .size = sizeof(spec), .tag_id = tag };

	add_spec(flow, &spec, sizeof(spec));
}

void add_drop(struct flow *flow)
{
	struct ibv_flow_spec_action_drop spec = { .type = IBV_FLOW_SPEC_ACTION_DROP, .size = sizeof(spec) };

	add_spec(flow, &spec, sizeof(spec));
}

struct ibv_flow *attach(struct end *end, struct flow *flow)
{
	return ibv_create_flow(end->qp, &flow->attr);
}

struct ibv_flow *attach_udp(struct end *end, uint16_t dport, uint16_t priority, uint32_t tag)
{
	struct flow flow = new_flow(IBV_FLOW_ATTR_NORMAL, priority);
	struct ibv_flow *made;

	add_eth(&flow, rig.own, ETHERTYPE_IP, 0);
	add_ipv4(&flow, NULL, OWN_IP);
	add_udp(&flow, 0, dport);
	if (tag)
		add_tag(&flow, tag);
	made = attach(end, &flow);
	CHECK(made, "%s", strerror(errno));
	return made;
}
