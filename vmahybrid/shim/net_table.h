/* Private to net.c: searches in the tables of the page. Only between the begin and the end of a read
 * under the sequence lock; results point into the page. */
#ifndef VMH_NET_TABLE_H
#define VMH_NET_TABLE_H
#include "vmh_base.h"
#include "net_page.h"
#include "vmh_ip.h"
#include <netinet/in.h>

extern const unsigned char vmh_v4_prefix[12]; /* of a v4-mapped address */

static inline in_addr_t v4(const unsigned char a[16])
{
	in_addr_t v;

	memcpy(&v, a + 12, 4);
	return v;
}

static inline bool is_zero(const unsigned char a[16])
{
	static const unsigned char zero[16];

	return memcmp(a, zero, 16) == 0;
}

/* Counts may be torn while the writer is inside: never walk over a table's end. */
static inline unsigned vmh_net_nlinks(const struct vmh_net_page *p)
{
	unsigned n = VMH_GET(p->nlinks);

	return n < VMH_NET_LINKS ? n : VMH_NET_LINKS;
}

const struct vmh_net_link *vmh_net_find_link(const struct vmh_net_page *p, unsigned ifindex);
const struct vmh_net_addr *vmh_net_find_addr(const struct vmh_net_page *p, in_addr_t addr);
bool vmh_net_broadcast_addr(const struct vmh_net_page *p, in_addr_t addr); /* of one of the addresses */
/* As the kernel's inet_select_addr: the first address of the link in the gateway's subnet, else its first;
 * 0: none. */
in_addr_t vmh_net_select_addr(const struct vmh_net_page *p, unsigned ifindex, in_addr_t gateway);
bool vmh_net_find_pair(const struct vmh_net_page *p, unsigned *one, unsigned *other); /* of vmh_net_same_network */
int vmh_net_list_addrs(const struct vmh_net_page *p, unsigned ifindex, in_addr_t *addrs, int max);
/* Local and broadcast routes only: the table "local" comes before the others, whatever the prefix lengths. */
const struct vmh_net_route *vmh_net_find_host_route(const struct vmh_net_page *p, in_addr_t addr);
/* All the others; oif 0: any. */
const struct vmh_net_route *vmh_net_find_route(const struct vmh_net_page *p, in_addr_t addr, unsigned oif);
bool vmh_net_find_metrics(const struct vmh_net_page *p, unsigned ifindex); /* of TCP, of a route by it */
/* IPv6. An address of this namespace, of a link or by a route of its own. */
bool vmh_net_find_local6(const struct vmh_net_page *p, const struct vmh_ip *addr, unsigned *ifindex);
/* complex: another route says the same, so that the kernel may choose either. */
const struct vmh_net_route *vmh_net_find_route6(const struct vmh_net_page *p, const struct vmh_ip *addr, bool *complex_);
bool vmh_net_find_mac6(const struct vmh_net_page *p, unsigned ifindex, const struct vmh_ip *addr, unsigned char mac[6]);
bool vmh_net_find_mac(const struct vmh_net_page *p, unsigned ifindex, in_addr_t addr, unsigned char mac[6]);
#endif
