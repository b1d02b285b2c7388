/* Decisions from the route and neighbour page (contracts/net_page.h), and the destinations made from
 * them. Everything here is a pure function of the mapped page; no system call. */
#ifndef VMH_NET_H
#define VMH_NET_H
#include "vmh_base.h"
#include "vmh_ip.h"
#include "vmh_ring.h"
#include "net_page.h"

/* v4-mapped, as the contracts have addresses; the wildcard is all zero */
static inline void vmh_map4(unsigned char out[16], in_addr_t a)
{
	memset(out, 0, 16);
	if (!a)
		return;
	out[10] = out[11] = 0xff;
	memcpy(out + 12, &a, 4);
}

int vmh_net_map(int fd, size_t size);   /* takes the fd over, on failure too; replaces an older page */
void vmh_net_unmap(void);
bool vmh_net_ready(void);
VMH_HOT uint64_t vmh_net_generation(void);      /* 0 without a page; one relaxed load */

struct vmh_nexthop {
	uint64_t generation;  /* the decision holds while vmh_net_generation() is this */
	unsigned ifindex;
	unsigned mtu;         /* of route or link */
	in_addr_t saddr;      /* what the kernel would choose, or the one asked for */
	in_addr_t via;        /* neighbour to resolve: gateway or daddr; 0 for multicast */
	bool metrics;         /* the route has some of TCP */
	unsigned char dmac[6];
};
/* The same of either family. */
struct vmh_way {
	uint64_t generation;
	unsigned ifindex, mtu;
	struct vmh_ip saddr; /* of IPv6: that of the route, or the one asked for; any: the kernel has to choose */
	struct vmh_ip via;
	unsigned char dmac[6];
};
#define VMH_NET_UNSURE UINT64_MAX /* a generation that no page has */

/* How would the kernel send to daddr? saddr 0 = any, oif 0 = any (SO_BINDTODEVICE, IP_MULTICAST_IF).
 * Returns 0, or the reason (enum vmh_reason) for which the kernel must send; VMH_R_NO_NEIGHBOUR has
 * ifindex, saddr, via and mtu filled in. out->generation is set whatever is returned; where the writer kept
 * the page locked for longer than a reader waits, it is VMH_NET_UNSURE, so that the next send asks again. */
unsigned vmh_net_resolve(in_addr_t daddr, in_addr_t saddr, unsigned oif, struct vmh_nexthop *out);

/* Of TCP, unicast only. */
unsigned vmh_net_way(const struct vmh_ip *daddr, const struct vmh_ip *saddr, struct vmh_way *out);
int vmh_net_metrics_by(unsigned ifindex); /* 1: some route by it has metrics of TCP; 0: none; -EAGAIN: not known now */
bool vmh_net_local(const struct vmh_ip *addr, unsigned *ifindex);

bool vmh_net_is_local(in_addr_t addr, unsigned *ifindex);   /* an address of this namespace */
bool vmh_net_is_broadcast(in_addr_t addr);
/* 0 and served, or the reason why not */
unsigned vmh_net_link_served(unsigned ifindex);
int vmh_net_served_links(unsigned *ifindexes, int max);
/* Two interfaces, at least one of them served, with addresses of one network. */
bool vmh_net_same_network(unsigned *one, unsigned *other);
bool vmh_net_is_vlan(unsigned ifindex);
bool vmh_net_translates(void);   /* rules translate addresses of what this host sends or gets */
bool vmh_net_link_name(unsigned ifindex, char name[16]);
unsigned vmh_net_first_multicast_link(void); /* interface of the kernel's route to 224.0.0.0/4, or 0 */
bool vmh_net_addr_of(unsigned ifindex, in_addr_t *addr); /* first IPv4 address */
int vmh_net_addrs(unsigned ifindex, in_addr_t *addrs, int max); /* IPv4; how many */
#endif
