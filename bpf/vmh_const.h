/* What the wire and the kernel's ABI fix. Ethernet types are in host order: parsers return them that way. */
#ifndef VMH_CONST_H
#define VMH_CONST_H

#define VMH_ETH_IPV4 0x0800
#define VMH_ETH_IPV6 0x86dd
#define VMH_ETH_8021Q 0x8100
#define VMH_ETH_8021AD 0x88a8

#define VMH_VLAN_TAG 4 /* bytes */
#define VMH_VLAN_TAGS 2
#define VMH_VID_MASK 0x0fff

#define VMH_IPV4_HEADER 20
#define VMH_IPV4_FRAGMENT 0x3fff /* MF and the offset; DF and the reserved bit do not make a fragment */
#define VMH_IPV4_FIRST 0x2000    /* of these the first fragment has only MF */
#define VMH_IPV6_EXTENSIONS 3    /* are skipped */
#define VMH_IPV6_OFFSET 0xfff8   /* of the fragment header; 0 in the first, or in one that is all there is (RFC 6946) */
#define VMH_UDP_HEADER 8
#define VMH_TCP_HEADER 20

#endif
