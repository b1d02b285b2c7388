/* The flow key, the action and the counters: what BPF, C and Python all know about steering.
 *
 * Read by three compilers: bcc (XDP programs), the C compiler (shim, through contracts/) and cffi
 * (vmahybrid._contracts). So: plain structs, integer #defines, no inline code, no conditionals
 * except the guard. Layout is part of contract version VMH_FLOW_VERSION.
 */
#ifndef VMH_FLOW_H
#define VMH_FLOW_H

#define VMH_FLOW_VERSION 1

/* Exact-match key. IPv4 addresses are v4-mapped (::ffff:a.b.c.d), network byte order throughout
 * except vlan (host order VID, 0 = untagged). A 3-tuple or multicast rule has src and sport zero. */
struct vmh_flow_key {
	unsigned char dst[16];
	unsigned char src[16];
	unsigned short dport;
	unsigned short sport;
	unsigned char proto;  /* IPPROTO_UDP or IPPROTO_TCP */
	unsigned char family; /* 4 or 6 */
	unsigned short vlan;  /* outer VID */
	unsigned short vlan2; /* inner VID when two tags */
	unsigned short pad;
};

#define VMH_ACT_PASS 0 /* kernel, on purpose */
#define VMH_ACT_RING 1 /* XSKMAP slot target + rx_queue_index */
#define VMH_ACT_DEV 2  /* DEVMAP slot target: ring veth, or forward */
#define VMH_ACT_DROP 3

struct vmh_action {
	unsigned int kind;
	unsigned int target;
	unsigned int rule;     /* index into rule_hits */
	unsigned int flags;    /* VMH_ACT_F_* */
};

#define VMH_ACT_F_LISTEN 1 /* a TCP 3-tuple: SYNs are the ring's, also where the kernel listens */
#define VMH_ACT_F_STAMP 2  /* `steer_stamped` puts a struct vmh_stamp before the frame, if the driver tells the time */

/* XDP metadata, which ends where the frame begins: the last one is at the descriptor's address less its size. */
struct vmh_stamp {
	unsigned long long ns;    /* of arrival, by the adapter's clock */
	unsigned long long magic; /* VMH_STAMP_MAGIC; whoever has read it puts 0, for the frame that comes next */
};

#define VMH_STAMP_MAGIC 0x56484d5f53544d50
/* A call that bcc can't name: this number stands in its place until the program is loaded (xdp/kfunc.py). */
#define VMH_CALL_RX_TIMESTAMP 0x7eaf0001

#define VMH_PORT_F_5T 1    /* rules5 may hold something: without the flag it is not looked at */
#define VMH_PORT_F_3T 8    /* the same of rules3 and rulesmc */
#define VMH_PORT_F_TCP 4   /* rules5 or rules3 may hold something of TCP */
#define VMH_PORT_F_CHAINS 16 /* each ring takes a frame that is longer than one of its buffers, in several */
#define VMH_PORT_F_FRAGS 2 /* loaded with BPF_F_XDP_HAS_FRAGS: a frame may be longer than its linear part */

/* One per attached interface, slot 0 of map `port`. */
struct vmh_port_config {
	unsigned int max_frame; /* bytes from the Ethernet header on, untagged: MTU + 14 */
	unsigned int flags;     /* VMH_PORT_F_* */
	unsigned int generation; /* of the rules: another number after each change. 0: `memos` is not used */
};

/* One slot of per-CPU array `memos`: what the rules said of a frame with this key. True while the rules have this
 * generation. A cache line. */
struct vmh_memo {
	struct vmh_flow_key key;
	unsigned int generation;
	struct vmh_action action;
};

#define VMH_MEMOS 256 /* a power of two */

struct vmh_hits {
	unsigned long long packets;
	unsigned long long bytes;
};

#define VMH_MAX_RULES 16384
#define VMH_MAX_XSK 4096   /* XSKMAP slots: ring slot * VMH_QUEUES + queue */
#define VMH_QUEUES 64
#define VMH_MAX_DEV 256

/* Array `nears`, for `tc_steer`: ifindexes of near ends, 0 for none; of the ring in slot n (VMH_QUEUES XSKMAP slots each),
 * from VMH_NEAR_DEV on of DEVMAP slot n. */
#define VMH_NEAR_DEV 64
#define VMH_NEARS 320

/* Ways out of the XDP program on an interface: index into per-CPU array `outs` (struct vmh_hits). */
#define VMH_OUT_RING 0          /* redirected to an AF_XDP ring */
#define VMH_OUT_DEV 1           /* redirected to a device (ring veth, forward) */
#define VMH_OUT_DROP 2          /* a rule says drop */
#define VMH_OUT_PASS_MISS 3     /* no rule */
#define VMH_OUT_PASS_RULE 4     /* a rule says kernel */
#define VMH_OUT_PASS_RING_GONE 5 /* rule hit, but the slot is empty */
#define VMH_OUT_PASS_NOT_IP 6
#define VMH_OUT_PASS_NOT_L4 7   /* IP, neither UDP nor TCP */
#define VMH_OUT_PASS_FRAGMENT 8
#define VMH_OUT_PASS_TOO_LONG 9 /* frame longer than the MTU: GSO super-packet or jumbo */
#define VMH_OUT_PASS_SHORT_ETH 10
#define VMH_OUT_PASS_SHORT_VLAN 11
#define VMH_OUT_PASS_VLAN_DEPTH 12 /* more than two tags */
#define VMH_OUT_PASS_SHORT_IP 13
#define VMH_OUT_PASS_BAD_IP 14  /* version, header length or total length impossible */
#define VMH_OUT_PASS_IP6_EXT 15 /* extension header we do not skip */
#define VMH_OUT_PASS_SHORT_L4 16
#define VMH_OUT_PASS_BAD_L4 17  /* UDP length or TCP data offset impossible */
#define VMH_OUT_PASS_KERNEL_TCP 18 /* a rule for a TCP port hit, but the kernel has the connection */
#define VMH_OUT_RING_TOO_LONG 19 /* as PASS_TOO_LONG, of a ring's TCP connection: the ring gets its headers. One that
				  * gets it whole (VMH_PORT_F_CHAINS) counts as VMH_OUT_RING or VMH_OUT_DEV */
#define VMH_OUT_COUNT 20

/* Ways out of the guard program on the near end of a ring veth: per-CPU array `guard_outs`. */
#define VMH_GUARD_SENT 0
#define VMH_GUARD_BAD_MAC 1
#define VMH_GUARD_BAD_SOURCE 2  /* source address and port not granted to this ring */
#define VMH_GUARD_NOT_FLOW 3    /* not parseable as UDP/TCP over IP */
#define VMH_GUARD_NO_DEV 4
#define VMH_GUARD_COUNT 5

/* Ways out of the program on the far end of a ring veth: per-CPU array `rin_outs`. */
#define VMH_RIN_RING 0
#define VMH_RIN_GONE 1 /* no socket for this receive queue: dropped, the frame is not for this namespace */
#define VMH_RIN_COUNT 2

#define VMH_MAX_GRANTS 4096 /* sources one ring veth may use */

/* What a ring veth's process may send as: key of hash `granted` (value: unsigned int flow id). */
struct vmh_grant_key {
	unsigned char src[16];
	unsigned short sport;
	unsigned char proto;
	unsigned char family;
};

/* Slot 0 of map `guard`: the MAC that frames must carry. */
struct vmh_guard_config {
	unsigned char mac[6];
	unsigned char pad[2];
};

#endif
