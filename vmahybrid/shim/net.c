/* Sending decisions from the route and neighbour page, as the kernel (fib_lookup, ip_route_output) would
 * make them; whatever the page can't say for sure is the kernel's to send.
 *
 * The page is written by another process, slowly: a reader that meets the writer inside waits for some
 * microseconds, then gives up and lets the kernel send this one datagram.
 */
#include "vmh_net.h"
#include "net_table.h"
#include "vmh_heap.h"
#include <arpa/inet.h>
#include <sys/mman.h>

#define READ_TRIES 8
#define WRITER_SPINS 64 /* pauses per try */

/* One per mapped page; never freed, so that readers need no lock. Generations of different pages must
 * differ, since decisions cached from an older page may not survive: each view counts on from the last. */
struct view {
	const struct vmh_net_page *page;
	size_t size;
	uint64_t base;
	struct view *older;
};
static struct view *_Atomic current;
static struct view *retired;  /* its page is unmapped with the next change, long after its last reader */
static struct view *all;
static uint64_t next_base;

static inline const struct view *view(void)
{
	return atomic_load_explicit(&current, memory_order_acquire);
}

static void replace(struct view *v)
{
	struct view *old = atomic_load_explicit(&current, memory_order_relaxed);

	if (old)
		next_base = old->base + VMH_GET(old->page->generation) + 1;
	if (v) {
		v->base = next_base;
		v->older = all;
		all = v;
	}
	atomic_store_explicit(&current, v, memory_order_release);
	if (retired)
		vmh_sys(SYS_munmap, retired->page, retired->size);
	retired = old;
}

static int map(int fd, size_t size)
{
	const struct vmh_net_page *page;
	struct view *v;
	long file = vmh_sys(SYS_lseek, fd, 0, SEEK_END), p;

	if (file < 0)
		return (int)file;
	if (size < sizeof(*page) || (size_t)file < size) /* beyond the file's end lies SIGBUS */
		return -EPROTO;
	p = vmh_sys(SYS_mmap, NULL, size, PROT_READ, MAP_SHARED, fd, 0);
	if (p < 0 && p > -4096)
		return (int)p;
	page = (const void *)p;
	v = vmh_heap_get(sizeof(*v));
	if (!v || page->magic != VMH_NET_MAGIC || page->version != VMH_NET_VERSION || page->size < sizeof(*page)) {
		int rc = v ? -EPROTO : -ENOMEM;

		vmh_heap_free(v);
		vmh_sys(SYS_munmap, p, size);
		return rc;
	}
	*v = (struct view){.page = page, .size = size};
	replace(v);
	return 0;
}

int vmh_net_map(int fd, size_t size)
{
	int rc = map(fd, size);

	vmh_sys(SYS_close, fd);
	return rc;
}

void vmh_net_unmap(void)
{
	replace(NULL);
}

bool vmh_net_ready(void)
{
	return view() != NULL;
}

static uint64_t generation_of(const struct view *v)
{
	return v->base + VMH_GET(v->page->generation);
}

uint64_t vmh_net_generation(void)
{
	const struct view *v = view();

	return v ? generation_of(v) : 0;
}

/* ---- the sequence lock ---- */

struct reader {
	const struct vmh_net_page *page;
	unsigned seq, tries;
};

/* false: no page, or the writer stayed inside too long */
static bool read_begin(struct reader *r)
{
	if (!r->page || r->tries++ == READ_TRIES)
		return false;
	for (int spin = 0; spin < WRITER_SPINS; spin++) {
		r->seq = __atomic_load_n(&r->page->seq, __ATOMIC_ACQUIRE);
		if (!(r->seq & 1))
			return true;
		vmh_cpu_relax();
	}
	return false;
}

static bool read_again(const struct reader *r)
{
	atomic_thread_fence(memory_order_acquire);
	return __atomic_load_n(&r->page->seq, __ATOMIC_RELAXED) != r->seq;
}

static struct reader reader(void)
{
	const struct view *v = view();

	return (struct reader){.page = v ? v->page : NULL};
}

/* ---- decisions ---- */

static bool broadcast_in(const struct vmh_net_page *p, in_addr_t addr)
{
	const struct vmh_net_route *r;

	if (addr == INADDR_BROADCAST)
		return true;
	if (vmh_net_broadcast_addr(p, addr))
		return true;
	r = vmh_net_find_host_route(p, addr);
	return r && r->type == VMH_ROUTE_BROADCAST;
}

static bool is_loopback(in_addr_t a)
{
	return ntohl(a) >> 24 == 127;
}

static bool is_multicast(in_addr_t a)
{
	return ntohl(a) >> 28 == 14;
}

static bool local_in(const struct vmh_net_page *p, in_addr_t addr, unsigned *ifindex)
{
	const struct vmh_net_addr *a = vmh_net_find_addr(p, addr);
	const struct vmh_net_route *r;

	if (a) {
		*ifindex = a->ifindex;
		return true;
	}
	r = vmh_net_find_host_route(p, addr);
	*ifindex = r ? r->oif : 0;
	return is_loopback(addr) || (r && r->type == VMH_ROUTE_LOCAL);
}

static unsigned link_reason(const struct vmh_net_link *l)
{
	if (!l)
		return VMH_R_NO_INTERFACE;
	if (l->flags & VMH_LINK_LOOPBACK)
		return VMH_R_LOOPBACK;
	if (!(l->flags & VMH_LINK_UP))
		return VMH_R_IF_DOWN;
	if (!(l->flags & VMH_LINK_SERVED))
		return l->reason ? l->reason : VMH_R_NO_INTERFACE;
	return VMH_R_NONE;
}

static unsigned page_reason(const struct vmh_net_page *p)
{
	unsigned flags = VMH_GET(p->flags);

	if (flags & VMH_NET_F_CLOSED)
		return VMH_R_SERVICE_GONE;
	if (flags & VMH_NET_F_POLICY)
		return VMH_R_POLICY_ROUTING;
	if (flags & VMH_NET_F_TRUNCATED)
		return VMH_R_ROUTE_COMPLEX;
	return VMH_R_NONE;
}

static unsigned route_reason(const struct vmh_net_route *r)
{
	if (r && r->flags & VMH_ROUTE_F_COMPLEX) /* one that refuses may be for a TOS alone */
		return VMH_R_ROUTE_COMPLEX;
	if (!r || r->type == VMH_ROUTE_OTHER)
		return VMH_R_NO_ROUTE;
	if (!is_zero(r->gateway) && memcmp(r->gateway, vmh_v4_prefix, 12) != 0)
		return VMH_R_ROUTE_COMPLEX; /* an IPv6 gateway */
	return VMH_R_NONE;
}

/* What the link adds: served or not, MTU, source address. */
static unsigned leave_by(const struct vmh_net_page *p, const struct vmh_net_route *r, in_addr_t gateway,
			 struct vmh_nexthop *out)
{
	const struct vmh_net_link *l = vmh_net_find_link(p, out->ifindex);
	unsigned reason = link_reason(l);

	if (reason)
		return reason;
	out->mtu = l->mtu;
	if (r && r->mtu && r->mtu < out->mtu)
		out->mtu = r->mtu;
	if (!out->saddr && r && !is_zero(r->prefsrc))
		out->saddr = v4(r->prefsrc);
	if (!out->saddr)
		out->saddr = vmh_net_select_addr(p, out->ifindex, gateway);
	if (!out->saddr) /* the kernel borrows an address of another link */
		return VMH_R_NOT_OFFLOADABLE_ADDR;
	return VMH_R_NONE;
}

static unsigned resolve_multicast(const struct vmh_net_page *p, in_addr_t group, unsigned oif, struct vmh_nexthop *out)
{
	const struct vmh_net_route *r = NULL;
	const struct vmh_net_addr *a = NULL;
	uint32_t g = ntohl(group);
	in_addr_t gateway = 0;
	unsigned reason;

	if (!oif && out->saddr) { /* ip_route_output: a bound address chooses the device */
		a = vmh_net_find_addr(p, out->saddr);
		if (!a)
			return VMH_R_NOT_OFFLOADABLE_ADDR;
		oif = a->ifindex;
	}
	if (oif && !out->saddr) /* chosen by the device alone, before the route is looked up */
		out->saddr = vmh_net_select_addr(p, oif, 0);
	r = vmh_net_find_route(p, group, oif);
	if (r || !oif) {
		reason = route_reason(r);
		if (reason)
			return reason;
		gateway = v4(r->gateway);
	}
	/* with a device and no route the kernel takes the group to be on the link */
	out->ifindex = oif ? oif : r->oif;
	out->via = 0;
	out->dmac[0] = 0x01;
	out->dmac[1] = 0x00;
	out->dmac[2] = 0x5e;
	out->dmac[3] = (g >> 16) & 0x7f;
	out->dmac[4] = (unsigned char)(g >> 8);
	out->dmac[5] = (unsigned char)g;
	return leave_by(p, r, gateway, out);
}

static unsigned resolve_unicast(const struct vmh_net_page *p, in_addr_t daddr, unsigned oif, struct vmh_nexthop *out)
{
	const struct vmh_net_route *r = vmh_net_find_route(p, daddr, oif);
	in_addr_t gateway;
	unsigned reason = route_reason(r);

	if (reason)
		return reason;
	if (r->type != VMH_ROUTE_UNICAST)
		return VMH_R_ROUTE_COMPLEX;
	gateway = v4(r->gateway);
	out->ifindex = r->oif;
	out->via = gateway ? gateway : daddr;
	out->metrics = r->flags & VMH_ROUTE_F_METRICS;
	reason = leave_by(p, r, gateway, out);
	if (reason)
		return reason;
	return vmh_net_find_mac(p, out->ifindex, out->via, out->dmac) ? VMH_R_NONE : VMH_R_NO_NEIGHBOUR;
}

static unsigned resolve(const struct vmh_net_page *p, in_addr_t daddr, unsigned oif, struct vmh_nexthop *out)
{
	unsigned reason, ifindex;

	if (!daddr || is_loopback(daddr) || is_loopback(out->saddr))
		return VMH_R_LOOPBACK; /* the kernel takes 0.0.0.0 for this host */
	if (daddr == INADDR_BROADCAST)
		return VMH_R_BROADCAST;
	reason = page_reason(p);
	if (reason)
		return reason;
	if (is_multicast(daddr))
		return resolve_multicast(p, daddr, oif, out);
	if (local_in(p, daddr, &ifindex))
		return VMH_R_LOOPBACK;
	if (broadcast_in(p, daddr))
		return VMH_R_BROADCAST;
	return resolve_unicast(p, daddr, oif, out);
}

unsigned vmh_net_resolve(in_addr_t daddr, in_addr_t saddr, unsigned oif, struct vmh_nexthop *out)
{
	const struct view *v = view();
	struct reader r = {.page = v ? v->page : NULL};
	unsigned reason;

	while (read_begin(&r)) {
		*out = (struct vmh_nexthop){.generation = generation_of(v), .saddr = saddr};
		reason = resolve(r.page, daddr, oif, out);
		if (!read_again(&r))
			return reason;
	}
	*out = (struct vmh_nexthop){.generation = r.page ? VMH_NET_UNSURE : 0, .saddr = saddr};
	return r.page ? VMH_R_NO_ROUTE : VMH_R_NO_SERVICE;
}

bool vmh_net_is_local(in_addr_t addr, unsigned *ifindex)
{
	struct reader r = reader();
	unsigned found = 0;
	bool local = false;

	while (read_begin(&r)) {
		local = local_in(r.page, addr, &found);
		if (read_again(&r))
			continue;
		if (local && ifindex)
			*ifindex = found;
		return local;
	}
	return false;
}

bool vmh_net_is_broadcast(in_addr_t addr)
{
	struct reader r = reader();
	bool found = false;

	while (read_begin(&r)) {
		found = broadcast_in(r.page, addr);
		if (!read_again(&r))
			return found;
	}
	return addr == INADDR_BROADCAST;
}

unsigned vmh_net_link_served(unsigned ifindex)
{
	struct reader r = reader();
	unsigned reason;

	while (read_begin(&r)) {
		reason = page_reason(r.page) == VMH_R_SERVICE_GONE ? VMH_R_SERVICE_GONE
								    : link_reason(vmh_net_find_link(r.page, ifindex));
		if (!read_again(&r))
			return reason;
	}
	return r.page ? VMH_R_NO_INTERFACE : VMH_R_NO_SERVICE;
}

int vmh_net_served_links(unsigned *ifindexes, int max)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		int n = 0;

		for (unsigned i = 0; i < vmh_net_nlinks(r.page) && n < max; i++)
			if (!link_reason(&r.page->links[i]))
				ifindexes[n++] = r.page->links[i].ifindex;
		if (!read_again(&r))
			return n;
	}
	return 0;
}

bool vmh_net_same_network(unsigned *one, unsigned *other)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		bool found = vmh_net_find_pair(r.page, one, other);

		if (!read_again(&r))
			return found;
	}
	return false;
}

bool vmh_net_translates(void)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		bool nat = VMH_GET(r.page->flags) & VMH_NET_F_NAT;

		if (!read_again(&r))
			return nat;
	}
	return false;
}

int vmh_net_metrics_by(unsigned ifindex)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		bool found = vmh_net_find_metrics(r.page, ifindex);

		if (!read_again(&r))
			return found;
	}
	return r.page ? -EAGAIN : 0;
}

bool vmh_net_is_vlan(unsigned ifindex)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		const struct vmh_net_link *l = vmh_net_find_link(r.page, ifindex);
		bool is = l && l->flags & VMH_LINK_VLAN;

		if (!read_again(&r))
			return is;
	}
	return false;
}

bool vmh_net_link_name(unsigned ifindex, char name[16])
{
	struct reader r = reader();

	while (read_begin(&r)) {
		const struct vmh_net_link *l = vmh_net_find_link(r.page, ifindex);
		char copy[16] = "";

		if (l)
			memcpy(copy, l->name, sizeof(copy));
		if (read_again(&r))
			continue;
		copy[15] = 0;
		if (l)
			memcpy(name, copy, sizeof(copy));
		return l != NULL;
	}
	return false;
}

unsigned vmh_net_first_multicast_link(void)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		const struct vmh_net_route *route = vmh_net_find_route(r.page, htonl(0xe0000000), 0);
		unsigned oif = route_reason(route) == VMH_R_NONE ? route->oif : 0;

		if (!read_again(&r))
			return oif;
	}
	return 0;
}

bool vmh_net_addr_of(unsigned ifindex, in_addr_t *addr)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		in_addr_t found = vmh_net_select_addr(r.page, ifindex, 0);

		if (read_again(&r))
			continue;
		if (found)
			*addr = found;
		return found != 0;
	}
	return false;
}

int vmh_net_addrs(unsigned ifindex, in_addr_t *addrs, int max)
{
	struct reader r = reader();

	while (read_begin(&r)) {
		int n = vmh_net_list_addrs(r.page, ifindex, addrs, max);

		if (!read_again(&r))
			return n;
	}
	return 0;
}

/* ---- either family ---- */

static bool is_link_local(const struct vmh_ip *a)
{
	return a->b[0] == 0xfe && (a->b[1] & 0xc0) == 0x80;
}

static unsigned resolve6(const struct vmh_net_page *p, const struct vmh_ip *daddr, struct vmh_way *out)
{
	const struct vmh_net_route *r;
	const struct vmh_net_link *l;
	unsigned reason = page_reason(p), ifindex;
	bool complex_ = false;

	if (vmh_ip_any(daddr) || IN6_IS_ADDR_LOOPBACK(daddr))
		return VMH_R_LOOPBACK;
	if (daddr->b[0] == 0xff)
		return VMH_R_DEST_MULTI;
	if (is_link_local(daddr) || is_link_local(&out->saddr))
		return VMH_R_LINK_LOCAL;
	if (reason)
		return reason;
	if (vmh_net_find_local6(p, daddr, &ifindex))
		return VMH_R_LOOPBACK;
	r = vmh_net_find_route6(p, daddr, &complex_);
	if (!r || (r->type == VMH_ROUTE_OTHER && !complex_))
		return VMH_R_NO_ROUTE;
	if (complex_ || r->flags & VMH_ROUTE_F_COMPLEX || r->type != VMH_ROUTE_UNICAST)
		return VMH_R_ROUTE_COMPLEX;
	if (r->flags & VMH_ROUTE_F_METRICS)
		return VMH_R_TCP_METRICS;
	l = vmh_net_find_link(p, r->oif);
	reason = link_reason(l);
	if (reason)
		return reason;
	out->ifindex = r->oif;
	out->mtu = r->mtu && r->mtu < l->mtu ? r->mtu : l->mtu;
	out->via = is_zero(r->gateway) ? *daddr : vmh_ip6(r->gateway);
	if (vmh_ip_any(&out->saddr))
		out->saddr = vmh_ip6(r->prefsrc);
	return vmh_net_find_mac6(p, r->oif, &out->via, out->dmac) ? VMH_R_NONE : VMH_R_NO_NEIGHBOUR;
}

static unsigned way4(const struct vmh_ip *daddr, const struct vmh_ip *saddr, struct vmh_way *out)
{
	struct vmh_nexthop hop;
	unsigned reason = vmh_net_resolve(vmh_ip_v4(daddr), vmh_ip_v4(saddr), 0, &hop);

	*out = (struct vmh_way){ .generation = hop.generation, .ifindex = hop.ifindex, .mtu = hop.mtu,
				 .saddr = vmh_ip4(hop.saddr), .via = vmh_ip4(hop.via) };
	memcpy(out->dmac, hop.dmac, 6);
	return hop.metrics && (!reason || reason == VMH_R_NO_NEIGHBOUR) ? VMH_R_TCP_METRICS : reason;
}

unsigned vmh_net_way(const struct vmh_ip *daddr, const struct vmh_ip *saddr, struct vmh_way *out)
{
	const struct view *v = view();
	struct reader r = {.page = v ? v->page : NULL};
	unsigned reason;

	if (vmh_ip_is4(daddr))
		return way4(daddr, saddr, out);
	while (read_begin(&r)) {
		*out = (struct vmh_way){ .generation = generation_of(v), .saddr = *saddr };
		reason = resolve6(r.page, daddr, out);
		if (!read_again(&r))
			return reason;
	}
	*out = (struct vmh_way){ .generation = r.page ? VMH_NET_UNSURE : 0, .saddr = *saddr };
	return r.page ? VMH_R_NO_ROUTE : VMH_R_NO_SERVICE;
}

bool vmh_net_local(const struct vmh_ip *addr, unsigned *ifindex)
{
	struct reader r = reader();

	if (vmh_ip_is4(addr))
		return vmh_net_is_local(vmh_ip_v4(addr), ifindex);
	while (read_begin(&r)) {
		bool local = vmh_net_find_local6(r.page, addr, ifindex);

		if (!read_again(&r))
			return local && !is_link_local(addr);
	}
	return false;
}
