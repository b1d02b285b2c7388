/* Searches in the tables of the route and neighbour page. */
#include "net_table.h"
#include <arpa/inet.h>

static unsigned naddrs(const struct vmh_net_page *p)
{
	unsigned n = VMH_GET(p->naddrs);

	return n < VMH_NET_ADDRS ? n : VMH_NET_ADDRS;
}

static unsigned nroutes(const struct vmh_net_page *p)
{
	unsigned n = VMH_GET(p->nroutes);

	return n < VMH_NET_ROUTES ? n : VMH_NET_ROUTES;
}

const unsigned char vmh_v4_prefix[12] = {0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0xff, 0xff};

static bool in_prefix(in_addr_t a, in_addr_t net, unsigned prefixlen)
{
	if (prefixlen == 0)
		return true;
	return prefixlen <= 32 && ((ntohl(a) ^ ntohl(net)) >> (32 - prefixlen)) == 0;
}

const struct vmh_net_link *vmh_net_find_link(const struct vmh_net_page *p, unsigned ifindex)
{
	for (unsigned i = 0; i < vmh_net_nlinks(p); i++)
		if (p->links[i].ifindex == ifindex)
			return &p->links[i];
	return NULL;
}

const struct vmh_net_addr *vmh_net_find_addr(const struct vmh_net_page *p, in_addr_t addr)
{
	for (unsigned i = 0; i < naddrs(p); i++)
		if (p->addrs[i].family == 4 && v4(p->addrs[i].addr) == addr)
			return &p->addrs[i];
	return NULL;
}

bool vmh_net_broadcast_addr(const struct vmh_net_page *p, in_addr_t addr)
{
	for (unsigned i = 0; i < naddrs(p); i++)
		if (p->addrs[i].family == 4 && !is_zero(p->addrs[i].broadcast) && v4(p->addrs[i].broadcast) == addr)
			return true;
	return false;
}

in_addr_t vmh_net_select_addr(const struct vmh_net_page *p, unsigned ifindex, in_addr_t gateway)
{
	in_addr_t first = 0;

	for (unsigned i = 0; i < naddrs(p); i++) {
		const struct vmh_net_addr *a = &p->addrs[i];

		if (a->family != 4 || a->ifindex != ifindex)
			continue;
		if (!gateway || in_prefix(gateway, v4(a->addr), a->prefixlen))
			return v4(a->addr);
		if (!first)
			first = v4(a->addr);
	}
	return first;
}

int vmh_net_list_addrs(const struct vmh_net_page *p, unsigned ifindex, in_addr_t *addrs, int max)
{
	int n = 0;

	for (unsigned i = 0; i < naddrs(p) && n < max; i++)
		if (p->addrs[i].family == 4 && p->addrs[i].ifindex == ifindex)
			addrs[n++] = v4(p->addrs[i].addr);
	return n;
}

static bool in_use(const struct vmh_net_page *p, const struct vmh_net_addr *a, bool *served)
{
	const struct vmh_net_link *l = a->family == 4 && a->prefixlen < 31 ? vmh_net_find_link(p, a->ifindex) : NULL;

	*served = l && l->flags & VMH_LINK_SERVED;
	return l && l->flags & VMH_LINK_UP && !(l->flags & VMH_LINK_LOOPBACK);
}

bool vmh_net_find_pair(const struct vmh_net_page *p, unsigned *one, unsigned *other)
{
	bool served, too;

	for (unsigned i = 0; i < naddrs(p); i++) {
		const struct vmh_net_addr *a = &p->addrs[i];

		if (!in_use(p, a, &served))
			continue;
		for (unsigned j = i + 1; j < naddrs(p); j++) {
			const struct vmh_net_addr *b = &p->addrs[j];

			if (b->ifindex == a->ifindex || !in_use(p, b, &too) || !(served || too) ||
			    !in_prefix(v4(b->addr), v4(a->addr), a->prefixlen))
				continue;
			*one = a->ifindex;
			*other = b->ifindex;
			return true;
		}
	}
	return false;
}

static bool is_host_route(const struct vmh_net_route *r)
{
	return r->type == VMH_ROUTE_LOCAL || r->type == VMH_ROUTE_BROADCAST;
}

const struct vmh_net_route *vmh_net_find_host_route(const struct vmh_net_page *p, in_addr_t addr)
{
	for (unsigned i = 0; i < nroutes(p); i++) {
		const struct vmh_net_route *r = &p->routes[i];

		if (r->family == 4 && is_host_route(r) && in_prefix(addr, v4(r->dst), r->prefixlen))
			return r;
	}
	return NULL;
}

const struct vmh_net_route *vmh_net_find_route(const struct vmh_net_page *p, in_addr_t addr, unsigned oif)
{
	for (unsigned i = 0; i < nroutes(p); i++) {
		const struct vmh_net_route *r = &p->routes[i];

		if (r->family != 4 || is_host_route(r) || !in_prefix(addr, v4(r->dst), r->prefixlen))
			continue;
		/* a blackhole has no device and stops every lookup; the legs of a multipath route are not
		 * in the page, so only the kernel knows whether one of them fits oif */
		if (!oif || r->oif == oif || r->type == VMH_ROUTE_OTHER || (r->flags & VMH_ROUTE_F_COMPLEX))
			return r;
	}
	return NULL;
}

bool vmh_net_find_metrics(const struct vmh_net_page *p, unsigned ifindex)
{
	for (unsigned i = 0; i < nroutes(p); i++)
		if (p->routes[i].oif == ifindex && p->routes[i].flags & VMH_ROUTE_F_METRICS)
			return true;
	return false;
}

static uint32_t neigh_hash(unsigned ifindex, const unsigned char addr[16])
{
	unsigned char key[20];
	uint32_t h = 2166136261u;

	memcpy(key, &ifindex, 4);
	memcpy(key + 4, addr, 16);
	for (unsigned i = 0; i < sizeof(key); i++)
		h = (h ^ key[i]) * 16777619u;
	return h;
}

bool vmh_net_find_mac6(const struct vmh_net_page *p, unsigned ifindex, const struct vmh_ip *addr, unsigned char mac[6])
{
	uint32_t slot = neigh_hash(ifindex, addr->b) % VMH_NET_NEIGHS;

	for (unsigned i = 0; i < VMH_NET_NEIGHS; i++, slot = (slot + 1) % VMH_NET_NEIGHS) {
		const struct vmh_net_neigh *n = &p->neighs[slot];

		if (!n->ifindex)
			return false;
		if (n->ifindex == ifindex && memcmp(n->addr, addr->b, 16) == 0) {
			memcpy(mac, n->mac, 6);
			return n->valid;
		}
	}
	return false;
}

bool vmh_net_find_mac(const struct vmh_net_page *p, unsigned ifindex, in_addr_t addr, unsigned char mac[6])
{
	const struct vmh_ip mapped = vmh_ip4(addr);

	return vmh_net_find_mac6(p, ifindex, &mapped, mac);
}

/* ---- IPv6 ---- */

static bool in_prefix6(const struct vmh_ip *a, const unsigned char net[16], unsigned prefixlen)
{
	unsigned bytes = prefixlen / 8, bits = prefixlen % 8;

	if (prefixlen > 128 || memcmp(a->b, net, bytes) != 0)
		return false;
	return !bits || ((a->b[bytes] ^ net[bytes]) >> (8 - bits)) == 0;
}

bool vmh_net_find_local6(const struct vmh_net_page *p, const struct vmh_ip *addr, unsigned *ifindex)
{
	for (unsigned i = 0; i < naddrs(p); i++)
		if (p->addrs[i].family == 6 && memcmp(p->addrs[i].addr, addr->b, 16) == 0) {
			*ifindex = p->addrs[i].ifindex;
			return true;
		}
	for (unsigned i = 0; i < nroutes(p); i++) {
		const struct vmh_net_route *r = &p->routes[i];

		if (r->family == 6 && r->type == VMH_ROUTE_LOCAL && in_prefix6(addr, r->dst, r->prefixlen)) {
			*ifindex = r->oif;
			return true;
		}
	}
	return false;
}

const struct vmh_net_route *vmh_net_find_route6(const struct vmh_net_page *p, const struct vmh_ip *addr, bool *complex_)
{
	for (unsigned i = 0; i < nroutes(p); i++) {
		const struct vmh_net_route *r = &p->routes[i], *next = r + 1;

		if (r->family != 6 || is_host_route(r) || !in_prefix6(addr, r->dst, r->prefixlen))
			continue;
		*complex_ = i + 1 < nroutes(p) && next->family == 6 && next->prefixlen == r->prefixlen &&
			    next->metric == r->metric && memcmp(next->dst, r->dst, 16) == 0;
		return r;
	}
	return NULL;
}
