/* Decisions from a route and neighbour page made by hand. Where the kernel's answer is not obvious it was
 * asked: `ip route get` on Linux 6.18 with these addresses and routes. */
#include "check.h"
#include "vmh_net.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdlib.h>
#include <sys/mman.h>

#define LO 1
#define ETH0 2   /* 192.168.0.1/24, 10.5.0.1/16; served */
#define ETH1 3   /* 10.9.0.1/24; served; MTU 9000 */
#define DOWN 4   /* 10.20.0.1/24 */
#define OTHER 5  /* 10.30.0.1/24; not served: IF_BUSY */
#define BARE 6   /* served, without an address */
#define NONE 0

static struct vmh_net_page *page;

static in_addr_t ip(const char *text)
{
	return text ? inet_addr(text) : 0;
}

static void mapped(unsigned char to[16], const char *text)
{
	in_addr_t a = ip(text);

	memset(to, 0, 16);
	if (!text)
		return;
	to[10] = to[11] = 0xff;
	memcpy(to + 12, &a, 4);
}

static void add_link(unsigned ifindex, unsigned flags, unsigned mtu, unsigned reason, const char *name)
{
	struct vmh_net_link *l = &page->links[page->nlinks++];

	*l = (struct vmh_net_link){.ifindex = ifindex, .flags = flags, .mtu = mtu, .reason = reason};
	strcpy(l->name, name);
}

static void add_addr(unsigned ifindex, const char *addr, unsigned char prefixlen, const char *broadcast)
{
	struct vmh_net_addr *a = &page->addrs[page->naddrs++];

	*a = (struct vmh_net_addr){.ifindex = ifindex, .family = 4, .prefixlen = prefixlen};
	mapped(a->addr, addr);
	mapped(a->broadcast, broadcast);
}

static struct vmh_net_route *add_route(unsigned char type, const char *dst, unsigned char prefixlen, unsigned oif,
				       const char *gateway, const char *prefsrc)
{
	struct vmh_net_route *r = &page->routes[page->nroutes++];

	*r = (struct vmh_net_route){.family = 4, .prefixlen = prefixlen, .type = type, .oif = oif};
	mapped(r->dst, dst);
	mapped(r->gateway, gateway);
	mapped(r->prefsrc, prefsrc);
	return r;
}

/* Written from the words of net_page.h, not from net.c. */
static void add_neigh(unsigned ifindex, const char *addr, unsigned char last, unsigned char valid)
{
	unsigned char key[20];
	uint32_t h = 2166136261u;

	memcpy(key, &ifindex, 4);
	mapped(key + 4, addr);
	for (int i = 0; i < 20; i++) {
		h ^= key[i];
		h *= 16777619u;
	}
	h %= VMH_NET_NEIGHS;
	while (page->neighs[h].ifindex)
		h = (h + 1) % VMH_NET_NEIGHS;
	page->neighs[h] = (struct vmh_net_neigh){.ifindex = ifindex, .family = 4, .valid = valid};
	memcpy(page->neighs[h].mac, (unsigned char[6]){2, 0, 0, 0, 0, last}, 6);
	memcpy(page->neighs[h].addr, key + 4, 16);
}

static int by_prefix(const void *a, const void *b)
{
	const struct vmh_net_route *x = a, *y = b;

	if (x->prefixlen != y->prefixlen)
		return y->prefixlen - x->prefixlen;
	return x->metric < y->metric ? -1 : x->metric > y->metric;
}

static void fill_page(void)
{
	const unsigned good = VMH_LINK_UP | VMH_LINK_SERVED;

	memset(page, 0, sizeof(*page));
	page->magic = VMH_NET_MAGIC;
	page->version = VMH_NET_VERSION;
	page->size = sizeof(*page);
	page->generation = 5;
	add_link(LO, VMH_LINK_UP | VMH_LINK_LOOPBACK, 65536, VMH_R_LOOPBACK, "lo");
	add_link(ETH0, good, 1500, 0, "eth0");
	add_link(ETH1, good, 9000, 0, "eth1");
	add_link(DOWN, VMH_LINK_SERVED, 1500, 0, "down0");
	add_link(OTHER, VMH_LINK_UP, 1500, VMH_R_IF_BUSY, "other0");
	add_link(BARE, good, 1500, 0, "bare0");
	add_addr(LO, "127.0.0.1", 8, NULL);
	add_addr(ETH0, "192.168.0.1", 24, "192.168.0.255");
	add_addr(ETH0, "10.5.0.1", 16, "10.5.255.255");
	add_addr(ETH1, "10.9.0.1", 24, "10.9.0.255");
	add_addr(DOWN, "10.20.0.1", 24, "10.20.0.255");
	add_addr(OTHER, "10.30.0.1", 24, "10.30.0.255");
	add_route(VMH_ROUTE_LOCAL, "127.0.0.0", 8, LO, NULL, "127.0.0.1");
	add_route(VMH_ROUTE_LOCAL, "192.168.0.1", 32, ETH0, NULL, "192.168.0.1");
	add_route(VMH_ROUTE_LOCAL, "10.5.0.1", 32, ETH0, NULL, "10.5.0.1");
	add_route(VMH_ROUTE_LOCAL, "10.9.0.1", 32, ETH1, NULL, "10.9.0.1");
	add_route(VMH_ROUTE_LOCAL, "198.51.100.0", 24, LO, NULL, NULL); /* AnyIP */
	add_route(VMH_ROUTE_BROADCAST, "192.168.0.255", 32, ETH0, NULL, "192.168.0.1");
	add_route(VMH_ROUTE_BROADCAST, "10.66.0.255", 32, ETH0, NULL, NULL); /* not of an address */
	add_route(VMH_ROUTE_UNICAST, "192.168.0.0", 24, ETH0, NULL, "192.168.0.1");
	add_route(VMH_ROUTE_UNICAST, "10.5.0.0", 16, ETH0, NULL, NULL);
	add_route(VMH_ROUTE_UNICAST, "10.6.0.0", 16, ETH0, "10.5.0.9", NULL);
	add_route(VMH_ROUTE_UNICAST, "10.6.7.0", 24, ETH1, NULL, NULL);
	add_route(VMH_ROUTE_UNICAST, "10.6.7.8", 32, ETH0, "192.168.0.9", "10.5.0.1");
	add_route(VMH_ROUTE_UNICAST, "10.9.0.0", 24, ETH1, NULL, "10.9.0.1");
	add_route(VMH_ROUTE_UNICAST, "10.20.0.0", 24, DOWN, NULL, "10.20.0.1");
	add_route(VMH_ROUTE_UNICAST, "10.30.0.0", 24, OTHER, NULL, "10.30.0.1");
	add_route(VMH_ROUTE_UNICAST, "10.40.0.0", 24, BARE, NULL, NULL);
	add_route(VMH_ROUTE_UNICAST, "10.41.0.0", 24, 99, NULL, NULL); /* a link that is not in the page */
	add_route(VMH_ROUTE_OTHER, "10.50.0.0", 16, 0, NULL, NULL);
	add_route(VMH_ROUTE_MULTICAST, "10.52.0.0", 16, ETH0, NULL, NULL);
	add_route(VMH_ROUTE_UNICAST, "10.51.0.0", 16, ETH0, "10.5.0.9", NULL)->flags = VMH_ROUTE_F_COMPLEX;
	add_route(VMH_ROUTE_UNICAST, "127.1.2.3", 32, ETH0, NULL, NULL);     /* hidden by the table local */
	add_route(VMH_ROUTE_UNICAST, "198.51.100.7", 32, ETH0, NULL, NULL);  /* the same */
	add_route(VMH_ROUTE_UNICAST, "10.60.0.0", 16, ETH0, "10.5.0.9", NULL)->mtu = 1400;
	add_route(VMH_ROUTE_UNICAST, "10.61.0.0", 16, ETH0, "10.5.0.9", NULL)->mtu = 4000;
	add_route(VMH_ROUTE_UNICAST, "10.62.0.0", 16, ETH1, "10.9.0.3", NULL)->metric = 10;
	add_route(VMH_ROUTE_UNICAST, "10.62.0.0", 16, ETH0, "10.5.0.9", NULL)->metric = 20;
	memset(add_route(VMH_ROUTE_UNICAST, "10.63.0.0", 16, ETH0, "10.5.0.9", NULL)->gateway, 0xfe, 12); /* by IPv6 */
	add_route(VMH_ROUTE_UNICAST, NULL, 0, ETH0, "10.5.0.7", NULL);
	page->routes[0].family = 4;
	page->routes[page->nroutes++] = (struct vmh_net_route){.family = 6, .prefixlen = 128, .type = VMH_ROUTE_OTHER};
	qsort(page->routes, page->nroutes, sizeof(page->routes[0]), by_prefix);
	add_neigh(ETH0, "192.168.0.9", 0x09, 1);
	add_neigh(ETH0, "192.168.0.10", 0x10, 0);
	add_neigh(ETH0, "10.5.0.7", 0x57, 1);
	add_neigh(ETH0, "10.5.0.9", 0x59, 1);
	add_neigh(ETH0, "10.5.3.3", 0x33, 1);
	add_neigh(ETH1, "10.9.0.3", 0x93, 1);
	add_neigh(ETH1, "10.6.7.9", 0x79, 1);
	add_neigh(ETH1, "10.5.0.9", 0xbb, 1); /* the same address on another link */
}

struct route_case {
	const char *daddr, *saddr;
	unsigned oif, reason, ifindex;
	const char *source, *via;
	unsigned mtu, mac; /* last byte */
};

static const struct route_case cases[] = {
	/* to           from        oif   reason             link  source         via             mtu   mac */
	{"192.168.0.9", NULL, 0, NONE, ETH0, "192.168.0.1", "192.168.0.9", 1500, 0x09},
	{"192.168.0.9", "10.5.0.1", 0, NONE, ETH0, "10.5.0.1", "192.168.0.9", 1500, 0x09},
	{"192.168.0.9", "10.9.0.1", 0, NONE, ETH0, "10.9.0.1", "192.168.0.9", 1500, 0x09},
	{"192.168.0.10", NULL, 0, VMH_R_NO_NEIGHBOUR, ETH0, "192.168.0.1", "192.168.0.10", 1500, 0},
	{"192.168.0.11", NULL, 0, VMH_R_NO_NEIGHBOUR, ETH0, "192.168.0.1", "192.168.0.11", 1500, 0},
	/* on link without prefsrc: the first address, though the second one's subnet fits */
	{"10.5.3.3", NULL, 0, NONE, ETH0, "192.168.0.1", "10.5.3.3", 1500, 0x33},
	/* by a gateway: the address in the gateway's subnet */
	{"10.6.1.1", NULL, 0, NONE, ETH0, "10.5.0.1", "10.5.0.9", 1500, 0x59},
	{"8.8.8.8", NULL, 0, NONE, ETH0, "10.5.0.1", "10.5.0.7", 1500, 0x57},
	{"240.0.0.1", NULL, 0, NONE, ETH0, "10.5.0.1", "10.5.0.7", 1500, 0x57},
	/* longest prefix */
	{"10.6.7.9", NULL, 0, NONE, ETH1, "10.9.0.1", "10.6.7.9", 9000, 0x79},
	{"10.6.7.8", NULL, 0, NONE, ETH0, "10.5.0.1", "192.168.0.9", 1500, 0x09},
	/* lowest metric */
	{"10.62.1.1", NULL, 0, NONE, ETH1, "10.9.0.1", "10.9.0.3", 9000, 0x93},
	/* the device asked for */
	{"10.62.1.1", NULL, ETH0, NONE, ETH0, "10.5.0.1", "10.5.0.9", 1500, 0x59},
	{"10.9.0.3", NULL, ETH1, NONE, ETH1, "10.9.0.1", "10.9.0.3", 9000, 0x93},
	{"10.9.0.77", NULL, ETH0, NONE, ETH0, "10.5.0.1", "10.5.0.7", 1500, 0x57},
	{"8.8.8.8", NULL, ETH1, VMH_R_NO_ROUTE, 0, NULL, NULL, 0, 0},
	{"8.8.8.8", NULL, 77, VMH_R_NO_ROUTE, 0, NULL, NULL, 0, 0},
	{"10.50.1.1", NULL, ETH0, VMH_R_NO_ROUTE, 0, NULL, NULL, 0, 0},
	/* MTU of the route, never above the link's */
	{"10.60.0.1", NULL, 0, NONE, ETH0, "10.5.0.1", "10.5.0.9", 1400, 0x59},
	{"10.61.0.1", NULL, 0, NONE, ETH0, "10.5.0.1", "10.5.0.9", 1500, 0x59},
	/* this host */
	{"192.168.0.1", NULL, 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"10.9.0.1", NULL, ETH0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"10.20.0.1", NULL, 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0}, /* by its address alone */
	{"127.0.0.1", NULL, 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"127.1.2.3", NULL, 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"127.9.9.9", NULL, ETH0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"0.0.0.0", NULL, 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"198.51.100.7", NULL, 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	{"192.168.0.9", "127.0.0.1", 0, VMH_R_LOOPBACK, 0, NULL, NULL, 0, 0},
	/* broadcast */
	{"255.255.255.255", NULL, 0, VMH_R_BROADCAST, 0, NULL, NULL, 0, 0},
	{"255.255.255.255", NULL, ETH1, VMH_R_BROADCAST, 0, NULL, NULL, 0, 0},
	{"192.168.0.255", NULL, 0, VMH_R_BROADCAST, 0, NULL, NULL, 0, 0},
	{"10.9.0.255", NULL, 0, VMH_R_BROADCAST, 0, NULL, NULL, 0, 0}, /* of the address, no route */
	{"10.66.0.255", NULL, 0, VMH_R_BROADCAST, 0, NULL, NULL, 0, 0},
	{"10.5.255.255", NULL, 0, VMH_R_BROADCAST, 0, NULL, NULL, 0, 0},
	/* what only the kernel can do */
	{"10.50.1.1", NULL, 0, VMH_R_NO_ROUTE, 0, NULL, NULL, 0, 0},
	{"10.51.1.1", NULL, 0, VMH_R_ROUTE_COMPLEX, 0, NULL, NULL, 0, 0},
	{"10.52.1.1", NULL, 0, VMH_R_ROUTE_COMPLEX, 0, NULL, NULL, 0, 0},
	{"10.63.1.1", NULL, 0, VMH_R_ROUTE_COMPLEX, 0, NULL, NULL, 0, 0},
	/* links */
	{"10.20.0.9", NULL, 0, VMH_R_IF_DOWN, DOWN, NULL, NULL, 0, 0},
	{"10.30.0.9", NULL, 0, VMH_R_IF_BUSY, OTHER, NULL, NULL, 0, 0},
	{"10.40.0.9", NULL, 0, VMH_R_NOT_OFFLOADABLE_ADDR, BARE, NULL, NULL, 0, 0},
	{"10.40.0.9", "10.5.0.1", 0, VMH_R_NO_NEIGHBOUR, BARE, "10.5.0.1", "10.40.0.9", 1500, 0},
	{"10.41.0.9", NULL, 0, VMH_R_NO_INTERFACE, 99, NULL, NULL, 0, 0},
	/* multicast: default route and its source; the device; the address's device */
	{"224.1.1.1", NULL, 0, NONE, ETH0, "10.5.0.1", NULL, 1500, 0x01},
	{"224.1.1.1", NULL, ETH1, NONE, ETH1, "10.9.0.1", NULL, 9000, 0x01},
	{"224.1.1.1", NULL, ETH0, NONE, ETH0, "192.168.0.1", NULL, 1500, 0x01}, /* not that of the route */
	{"224.1.1.1", "10.9.0.1", 0, NONE, ETH1, "10.9.0.1", NULL, 9000, 0x01},
	{"239.129.2.254", "10.9.0.1", ETH0, NONE, ETH0, "10.9.0.1", NULL, 1500, 0xfe},
	{"224.1.1.1", "203.0.113.1", 0, VMH_R_NOT_OFFLOADABLE_ADDR, 0, NULL, NULL, 0, 0},
	{"224.1.1.1", NULL, LO, VMH_R_LOOPBACK, LO, NULL, NULL, 0, 0},
	{"224.1.1.1", NULL, DOWN, VMH_R_IF_DOWN, DOWN, NULL, NULL, 0, 0},
	{"224.1.1.1", NULL, 77, VMH_R_NO_INTERFACE, 77, NULL, NULL, 0, 0},
	{"224.1.1.1", NULL, BARE, VMH_R_NOT_OFFLOADABLE_ADDR, BARE, NULL, NULL, 0, 0},
};

static void test_cases(void)
{
	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		const struct route_case *c = &cases[i];
		struct vmh_nexthop h;
		unsigned reason;

		memset(&h, 0x77, sizeof(h));
		reason = vmh_net_resolve(ip(c->daddr), ip(c->saddr), c->oif, &h);
		CHECK(reason == c->reason, "case %zu to %s oif %u: reason %u", i, c->daddr, c->oif, reason);
		CHECK(h.generation == vmh_net_generation(), "case %zu: generation", i);
		if (reason && reason != VMH_R_NO_NEIGHBOUR)
			continue;
		CHECK(h.ifindex == c->ifindex && h.mtu == c->mtu, "case %zu to %s: link %u, mtu %u", i, c->daddr, h.ifindex,
		      h.mtu);
		CHECK(h.saddr == ip(c->source), "case %zu to %s: source %08x", i, c->daddr, ntohl(h.saddr));
		CHECK(h.via == ip(c->via), "case %zu to %s: via %08x", i, c->daddr, ntohl(h.via));
		if (!reason)
			CHECK(h.dmac[5] == c->mac, "case %zu to %s: mac %02x", i, c->daddr, h.dmac[5]);
	}
}

static void test_multicast_mac(void)
{
	static const unsigned char wanted[6] = {0x01, 0x00, 0x5e, 0x01, 0x02, 0xfe};
	struct vmh_nexthop h;

	CHECK(vmh_net_resolve(ip("239.129.2.254"), 0, ETH1, &h) == 0 && !memcmp(h.dmac, wanted, 6), "RFC 1112 6.4");
}

static void test_questions(void)
{
	unsigned ifindex = 0, links[8];
	in_addr_t a = 0;
	char name[16] = "";

	CHECK(vmh_net_is_local(ip("10.9.0.1"), &ifindex) && ifindex == ETH1, "link %u", ifindex);
	CHECK(vmh_net_is_local(ip("127.0.0.1"), &ifindex) && ifindex == LO, "link %u", ifindex);
	CHECK(vmh_net_is_local(ip("127.3.3.3"), &ifindex) && ifindex == LO, "link %u", ifindex);
	CHECK(vmh_net_is_local(ip("198.51.100.9"), NULL), "AnyIP");
	ifindex = 4242;
	CHECK(!vmh_net_is_local(ip("10.9.0.2"), &ifindex) && ifindex == 4242, "a neighbour");
	CHECK(!vmh_net_is_local(ip("192.168.0.255"), NULL), "a broadcast address");
	CHECK(vmh_net_is_broadcast(ip("192.168.0.255")) && vmh_net_is_broadcast(ip("10.9.0.255")), "broadcast");
	CHECK(vmh_net_is_broadcast(INADDR_BROADCAST) && !vmh_net_is_broadcast(ip("10.9.0.254")), "broadcast");
	CHECK(!vmh_net_is_broadcast(0), "0.0.0.0 and addresses without a broadcast address");
	CHECK(vmh_net_link_served(ETH0) == 0 && vmh_net_link_served(OTHER) == VMH_R_IF_BUSY, "served");
	CHECK(vmh_net_link_served(DOWN) == VMH_R_IF_DOWN && vmh_net_link_served(LO) == VMH_R_LOOPBACK, "served");
	CHECK(vmh_net_link_served(99) == VMH_R_NO_INTERFACE, "served");
	CHECK(vmh_net_served_links(links, 8) == 3 && links[0] == ETH0 && links[1] == ETH1 && links[2] == BARE, "links");
	CHECK(vmh_net_served_links(links, 1) == 1, "links, limited");
	CHECK(vmh_net_link_name(ETH1, name) && !strcmp(name, "eth1"), "%s", name);
	CHECK(!vmh_net_link_name(99, name) && !strcmp(name, "eth1"), "name touched");
	CHECK(vmh_net_first_multicast_link() == ETH0, "%u", vmh_net_first_multicast_link());
	CHECK(vmh_net_addr_of(ETH0, &a) && a == ip("192.168.0.1"), "%08x", a);
	CHECK(!vmh_net_addr_of(BARE, &a) && a == ip("192.168.0.1"), "address touched");
}

static void test_page_flags(void)
{
	static const struct {
		unsigned flag, reason;
	} table[] = {{VMH_NET_F_POLICY, VMH_R_POLICY_ROUTING},
		     {VMH_NET_F_TRUNCATED, VMH_R_ROUTE_COMPLEX},
		     {VMH_NET_F_CLOSED, VMH_R_SERVICE_GONE}};
	struct vmh_nexthop h;

	for (int i = 0; i < 3; i++) {
		page->flags = table[i].flag;
		CHECK(vmh_net_resolve(ip("192.168.0.9"), 0, 0, &h) == table[i].reason, "flag %u", table[i].flag);
		CHECK(vmh_net_resolve(ip("224.1.1.1"), 0, ETH0, &h) == table[i].reason, "flag %u", table[i].flag);
		CHECK(vmh_net_resolve(ip("127.0.0.1"), 0, 0, &h) == VMH_R_LOOPBACK, "flag %u", table[i].flag);
	}
	CHECK(vmh_net_link_served(ETH0) == VMH_R_SERVICE_GONE, "closed page");
	page->flags = 0;
}

/* Collisions: many neighbours, some in one slot, all found; a full table ends the search. */
static void test_neighbours(void)
{
	struct vmh_nexthop h;
	char text[32];

	for (unsigned i = 0; i < 3000; i++) {
		snprintf(text, sizeof(text), "10.5.%u.%u", 64 + i / 250, 1 + i % 250);
		add_neigh(ETH0, text, (unsigned char)(i * 7), 1);
	}
	for (unsigned i = 0; i < 3000; i++) {
		snprintf(text, sizeof(text), "10.5.%u.%u", 64 + i / 250, 1 + i % 250);
		CHECK(vmh_net_resolve(ip(text), 0, 0, &h) == 0 && h.dmac[5] == (unsigned char)(i * 7), "%s", text);
	}
	for (unsigned i = 0; i < VMH_NET_NEIGHS; i++)
		page->neighs[i] = (struct vmh_net_neigh){.ifindex = 500};
	CHECK(vmh_net_resolve(ip("192.168.0.9"), 0, 0, &h) == VMH_R_NO_NEIGHBOUR, "full table");
}

static struct vmh_ip ip6(const char *text)
{
	struct vmh_ip a = { 0 };

	inet_pton(AF_INET6, text, a.b);
	return a;
}

static struct vmh_net_route *add_route6(unsigned char type, const char *dst, unsigned char prefixlen, unsigned oif,
					const char *gateway, const char *prefsrc)
{
	struct vmh_net_route *r = &page->routes[page->nroutes++];

	*r = (struct vmh_net_route){ .family = 6, .prefixlen = prefixlen, .type = type, .oif = oif, .metric = 256 };
	memcpy(r->dst, ip6(dst).b, 16);
	if (gateway)
		memcpy(r->gateway, ip6(gateway).b, 16);
	if (prefsrc)
		memcpy(r->prefsrc, ip6(prefsrc).b, 16);
	return r;
}

static void add_neigh6(unsigned ifindex, const char *text, unsigned char last)
{
	const struct vmh_ip a = ip6(text);
	uint32_t h = 2166136261u;
	unsigned char key[20];

	memcpy(key, &ifindex, 4);
	memcpy(key + 4, a.b, 16);
	for (unsigned i = 0; i < sizeof(key); i++)
		h = (h ^ key[i]) * 16777619u;
	for (h %= VMH_NET_NEIGHS; page->neighs[h].ifindex; h = (h + 1) % VMH_NET_NEIGHS)
		;
	page->neighs[h] = (struct vmh_net_neigh){ .ifindex = ifindex, .family = 6, .valid = 1, .mac = { 2, [5] = last } };
	memcpy(page->neighs[h].addr, a.b, 16);
}

static unsigned way(const char *to, const char *from, struct vmh_way *w)
{
	const struct vmh_ip daddr = ip6(to), saddr = from ? ip6(from) : (struct vmh_ip){ 0 };

	return vmh_net_way(&daddr, &saddr, w);
}

static void test_ipv6(void)
{
	const unsigned routes = page->nroutes, addrs = page->naddrs;
	struct vmh_net_addr *a = &page->addrs[page->naddrs++];
	struct vmh_ip any, own = ip6("fd00::1"), alias = ip6("fd00:5::5"), near = ip6("fe80::1");
	struct vmh_way w;
	unsigned ifindex = 0;

	*a = (struct vmh_net_addr){ .ifindex = ETH0, .family = 6, .prefixlen = 64 };
	memcpy(a->addr, own.b, 16);
	add_route6(VMH_ROUTE_LOCAL, "fd00:5::", 32, LO, NULL, NULL);
	add_route6(VMH_ROUTE_UNICAST, "fd00:2::9", 128, ETH1, NULL, "fd00::77")->mtu = 1400;
	add_route6(VMH_ROUTE_UNICAST, "fd00::", 64, ETH0, NULL, NULL);
	add_route6(VMH_ROUTE_OTHER, "fd00:3::", 48, ETH0, NULL, NULL);
	add_route6(VMH_ROUTE_UNICAST, "fd00:4::", 33, ETH0, "fe80::aa", NULL);
	add_route6(VMH_ROUTE_UNICAST, "fd00:4::", 33, ETH1, "fe80::bb", NULL);
	add_route6(VMH_ROUTE_UNICAST, "2000::", 3, ETH0, "fe80::aa", NULL);
	add_route6(VMH_ROUTE_UNICAST, "fd00:6::", 48, DOWN, NULL, NULL);
	add_neigh6(ETH0, "fd00::2", 2);
	add_neigh6(ETH0, "fe80::aa", 9);
	CHECK(way("fd00::2", NULL, &w) == 0 && w.ifindex == ETH0 && w.dmac[5] == 2, "on the link");
	memset(&any, 0, sizeof(any));
	CHECK(vmh_ip_same(&w.saddr, &any), "the kernel chooses the source");
	CHECK(way("fd00::2", "fd00::1", &w) == 0 && vmh_ip_same(&w.saddr, &own), "or the socket has");
	CHECK(way("fd00::3", NULL, &w) == VMH_R_NO_NEIGHBOUR && w.via.b[15] == 3 && w.ifindex == ETH0, "not resolved");
	CHECK(way("2001:db8::1", NULL, &w) == 0 && w.dmac[5] == 9 && w.via.b[0] == 0xfe, "by a gateway");
	CHECK(way("fd00:2::9", NULL, &w) == VMH_R_NO_NEIGHBOUR && w.mtu == 1400 && w.saddr.b[15] == 0x77, "MTU, source");
	CHECK(way("fd00:3::1", NULL, &w) == VMH_R_NO_ROUTE, "blackhole");
	CHECK(way("fd00:4::1", NULL, &w) == VMH_R_ROUTE_COMPLEX, "two routes");
	CHECK(way("fd00:4:8000::1", NULL, &w) == VMH_R_NO_ROUTE, "the 33rd bit");
	CHECK(way("fd00:6::1", NULL, &w) == VMH_R_IF_DOWN, "down");
	CHECK(way("fd00::1", NULL, &w) == VMH_R_LOOPBACK && way("fd00:5::9", NULL, &w) == VMH_R_LOOPBACK, "own addresses");
	CHECK(way("::1", NULL, &w) == VMH_R_LOOPBACK && way("ff02::1", NULL, &w) == VMH_R_DEST_MULTI, "special");
	CHECK(way("fe80::2", NULL, &w) == VMH_R_LINK_LOCAL && way("fd00::2", "fe80::1", &w) == VMH_R_LINK_LOCAL, "link-local");
	CHECK(way("::ffff:192.168.0.1", NULL, &w) == VMH_R_LOOPBACK, "an IPv4 address is one");
	CHECK(vmh_net_local(&own, &ifindex) && ifindex == ETH0, "%u", ifindex);
	CHECK(vmh_net_local(&alias, &ifindex) && ifindex == LO && !vmh_net_local(&near, &ifindex), "%u", ifindex);
	page->routes[routes + 2].flags = VMH_ROUTE_F_METRICS;
	CHECK(way("fd00::2", NULL, &w) == VMH_R_TCP_METRICS, "metrics of TCP");
	page->routes[routes + 2].flags = 0;
	page->flags = VMH_NET_F_POLICY;
	CHECK(way("fd00::2", NULL, &w) == VMH_R_POLICY_ROUTING, "rules");
	page->flags = 0;
	page->nroutes = routes;
	page->naddrs = addrs;
}

/* They are TCP's: datagrams go by the ring. */
static void test_metrics(void)
{
	struct vmh_net_route *r = page->routes;
	struct vmh_nexthop h;
	struct vmh_way w;

	while (r->type != VMH_ROUTE_UNICAST || r->oif != ETH0 || r->prefixlen != 24)
		r++;
	CHECK(way("::ffff:192.168.0.9", NULL, &w) == 0 && !vmh_net_metrics_by(ETH0), "none yet");
	r->flags |= VMH_ROUTE_F_METRICS;
	CHECK(vmh_net_resolve(inet_addr("192.168.0.9"), 0, 0, &h) == 0 && h.metrics, "a datagram");
	CHECK(way("::ffff:192.168.0.9", NULL, &w) == VMH_R_TCP_METRICS && w.ifindex == ETH0, "a connection");
	CHECK(way("::ffff:192.168.0.77", NULL, &w) == VMH_R_TCP_METRICS, "its neighbour is not resolved");
	CHECK(vmh_net_metrics_by(ETH0) == 1 && !vmh_net_metrics_by(ETH1), "listeners by that interface");
	r->flags = 0;
}

static void test_dead_writer(void)
{
	struct vmh_nexthop h;
	uint64_t t0 = vmh_now_ns();

	page->seq = 7;
	CHECK(vmh_net_resolve(ip("192.168.0.9"), 0, 0, &h) == VMH_R_NO_ROUTE, "dead writer");
	CHECK(h.generation != vmh_net_generation(), "the answer must not be kept");
	CHECK(!vmh_net_is_local(ip("10.9.0.1"), NULL) && vmh_net_link_served(ETH0) == VMH_R_NO_INTERFACE, "dead writer");
	CHECK(vmh_now_ns() - t0 < 50000000, "%ju ns of waiting", (uintmax_t)(vmh_now_ns() - t0));
	page->seq = 8;
}

static _Atomic bool stop;

/* Changes gateway and source of a route together; a reader must never see one without the other. */
static void *writer(void *arg)
{
	struct vmh_net_route *r = &page->routes[page->nroutes - 1];

	(void)arg;
	for (unsigned i = 0; !stop; i++) {
		__atomic_store_n(&page->seq, page->seq + 1, __ATOMIC_RELAXED);
		atomic_thread_fence(memory_order_release);
		*(volatile unsigned char *)&r->gateway[15] = i & 1 ? 7 : 9;
		for (volatile int j = 0; j < 20; j++)
			;
		*(volatile unsigned char *)&r->prefsrc[15] = i & 1 ? 7 : 9;
		VMH_SET(page->generation, page->generation + 1);
		__atomic_store_n(&page->seq, page->seq + 1, __ATOMIC_RELEASE);
		for (volatile int j = 0; j < 200; j++)
			;
	}
	return NULL;
}

static void test_live_writer(void)
{
	struct vmh_net_route *r = &page->routes[page->nroutes - 1];
	unsigned torn = 0, good = 0;
	pthread_t t;

	CHECK(r->family == 4 && r->prefixlen == 0, "the default route is last");
	mapped(r->prefsrc, "10.5.0.7");
	pthread_create(&t, NULL, writer, NULL);
	for (uint64_t end = vmh_now_ns() + 300000000; vmh_now_ns() < end;) {
		struct vmh_nexthop h;
		unsigned reason = vmh_net_resolve(ip("8.8.8.8"), 0, 0, &h);

		if (reason != VMH_R_NONE && reason != VMH_R_NO_NEIGHBOUR)
			continue;
		good++;
		torn += h.saddr != h.via;
	}
	stop = true;
	pthread_join(t, NULL);
	CHECK(torn == 0, "%u of %u torn", torn, good);
	CHECK(good > 100, "%u good reads", good);
}

static int new_page(size_t size)
{
	int fd = memfd_create("page", MFD_CLOEXEC);

	if (ftruncate(fd, (off_t)size))
		perror("ftruncate");
	page = mmap(NULL, sizeof(*page), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
	return fd;
}

static void test_mapping(void)
{
	struct vmh_nexthop h;
	uint64_t before;
	int fd;

	CHECK(!vmh_net_ready() && vmh_net_generation() == 0, "no page yet");
	CHECK(vmh_net_resolve(ip("192.168.0.9"), 0, 0, &h) == VMH_R_NO_SERVICE, "no page yet");
	CHECK(vmh_net_link_served(ETH0) == VMH_R_NO_SERVICE && !vmh_net_is_local(ip("10.9.0.1"), NULL), "no page yet");
	fd = new_page(sizeof(*page) - 1);
	CHECK(vmh_net_map(fd, sizeof(*page)) == -EPROTO, "file too short");
	CHECK(fcntl(fd, F_GETFD) == -1, "the fd is taken over on failure too");
	fd = new_page(sizeof(*page));
	fill_page();
	CHECK(vmh_net_map(dup(fd), sizeof(*page) - 1) == -EPROTO, "size too small");
	page->magic++;
	CHECK(vmh_net_map(dup(fd), sizeof(*page)) == -EPROTO, "magic");
	page->magic--;
	page->version++;
	CHECK(vmh_net_map(dup(fd), sizeof(*page)) == -EPROTO && !vmh_net_ready(), "version");
	page->version--;
	CHECK(vmh_net_map(fd, sizeof(*page)) == 0 && vmh_net_ready(), "a good page");
	CHECK(fcntl(fd, F_GETFD) == -1, "the fd is taken over");
	before = vmh_net_generation();
	/* the next service starts with the same number: what was decided from the old page must not hold */
	for (int i = 0; i < 3; i++) {
		fd = new_page(sizeof(*page));
		fill_page();
		CHECK(vmh_net_map(fd, sizeof(*page)) == 0, "the next page");
		CHECK(vmh_net_generation() > before, "generation %ju", (uintmax_t)vmh_net_generation());
		before = vmh_net_generation();
	}
	page->generation++;
	CHECK(vmh_net_generation() == before + 1, "counts with the page");
}

int main(void)
{
	test_mapping();
	test_cases();
	test_multicast_mac();
	test_questions();
	test_page_flags();
	test_dead_writer();
	test_live_writer();
	fill_page();
	test_ipv6();
	test_metrics();
	test_neighbours();
	vmh_net_unmap();
	CHECK(!vmh_net_ready() && vmh_net_generation() == 0, "unmapped");
	return check_result();
}
