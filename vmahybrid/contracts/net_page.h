/* Route and neighbour page: one memfd per network namespace, written by the service, mapped
 * read-only by the shims of that namespace. Contract page: docs/net-page.md.
 *
 * Readers use the sequence lock `seq` (odd while the writer is inside) around any read of the
 * tables, or compare `generation` (one aligned load) to know whether a cached decision still holds.
 * Addresses are v4-mapped, network order. Routes are those of the main, local and default tables,
 * sorted: longest prefix first, then lowest metric, per family.
 */
#ifndef VMH_NET_PAGE_H
#define VMH_NET_PAGE_H

#define VMH_NET_MAGIC 0x314e4d56 /* "VMN1" */
#define VMH_NET_VERSION 1
#define VMH_NET_LINKS 128
#define VMH_NET_ADDRS 512
#define VMH_NET_ROUTES 4096
#define VMH_NET_NEIGHS 4096

#define VMH_NET_F_POLICY 1    /* ip rules beyond the default three: do not decide from this page */
#define VMH_NET_F_TRUNCATED 2 /* a table did not fit: do not decide from this page */
#define VMH_NET_F_CLOSED 4    /* nobody updates this page any more */
#define VMH_NET_F_NAT 8       /* rules translate addresses: let the kernel open connections, and send */

#define VMH_LINK_UP 1         /* administratively up, with carrier */
#define VMH_LINK_SERVED 2     /* rings may be asked for here */
#define VMH_LINK_LOOPBACK 4
#define VMH_LINK_VLAN 8       /* tags what it sends, by the priority of the sender */

struct vmh_net_link {
	unsigned int ifindex;
	unsigned int flags;
	unsigned int mtu;
	unsigned int reason;      /* why not served (reasons.def) */
	unsigned char mac[6];
	unsigned char pad[2];
	char name[16];
};

struct vmh_net_addr {
	unsigned int ifindex;
	unsigned char family;     /* 4 or 6 */
	unsigned char prefixlen;
	unsigned char pad[2];
	unsigned char addr[16];
	unsigned char broadcast[16]; /* zero if none */
};

#define VMH_ROUTE_UNICAST 1
#define VMH_ROUTE_LOCAL 2
#define VMH_ROUTE_BROADCAST 3
#define VMH_ROUTE_MULTICAST 5
#define VMH_ROUTE_OTHER 255   /* blackhole, unreachable, prohibit, nat...: the kernel answers */
#define VMH_ROUTE_F_COMPLEX 1 /* multipath, encapsulation, nexthop object, tos, own source rules */
#define VMH_ROUTE_F_METRICS 2 /* metrics of TCP, on which only the kernel acts: its connections are the kernel's */

struct vmh_net_route {
	unsigned char family;
	unsigned char prefixlen;
	unsigned char type;
	unsigned char flags;
	unsigned int oif;
	unsigned int metric;
	unsigned int mtu;         /* 0: the link's */
	unsigned char dst[16];
	unsigned char gateway[16]; /* zero: on link */
	unsigned char prefsrc[16]; /* zero: first address of oif that fits */
};

struct vmh_net_neigh {        /* open addressing by vmh_net_hash(ifindex, addr); ifindex 0 = free */
	unsigned int ifindex;
	unsigned char family;
	unsigned char valid;      /* mac may be used */
	unsigned char mac[6];
	unsigned char addr[16];
};

struct vmh_net_page {
	unsigned int magic;
	unsigned int version;
	unsigned int size;
	unsigned int seq;
	unsigned long long generation; /* any change that could alter a sending decision */
	unsigned int flags;
	unsigned int nlinks;
	unsigned int naddrs;
	unsigned int nroutes;
	unsigned int nneighs;          /* used slots, for humans */
	unsigned int pad;
	struct vmh_net_link links[VMH_NET_LINKS];
	struct vmh_net_addr addrs[VMH_NET_ADDRS];
	struct vmh_net_route routes[VMH_NET_ROUTES];
	struct vmh_net_neigh neighs[VMH_NET_NEIGHS];
};

/* Neighbour slot: FNV-1a (32 bit, offset 2166136261, prime 16777619) over the 4 bytes of ifindex
 * (native order) and the 16 of addr, modulo VMH_NET_NEIGHS, then linear probing; a free slot ends
 * the search. */

#endif
