/* What the steering programs in the kernel (steer.bpf.c) and the library share: the maps' contents. */
#ifndef SV_STEER_H
#define SV_STEER_H
#include <linux/types.h>

#define SV_SLOTS 256   /* receiving QPs of a device and process */
#define SV_MASKS 32    /* different (priority, set of matched fields) at a time */
/* Versions of the mask table. A program that is interrupted while 8 changes of the masks pass reads a mixture: nothing
 * waits for it, as a grace period per change would take milliseconds. */
#define SV_TABLES 8
#define SV_DESTS 8     /* QPs that share one rule */
#define SV_SNIFFERS 4
#define SV_WORDS 8     /* 64-bit words of a key */
#define SV_FRAME_MAX 65600

/* Frames sent by QPs carry this mark, so that the egress program of whoever has a matching rule on the same device
 * (NICs loop such frames back to their own QPs) can tell them from the kernel's. "svtx" */
#define SV_MARK 0x73767478

/* What can be matched. Network order as in the frame; 0 where the frame has no such field. 64 bytes, no padding. */
struct sv_key {
	__u8 dst_mac[6], src_mac[6];
	__u16 ether_type; /* behind the VLAN tag */
	__u16 vlan;       /* TCI */
	__u32 src_ip[4], dst_ip[4]; /* IPv4 in [0] */
	__u16 dst_port, src_port;   /* not of fragments */
	__u8 proto, tos, ttl, ip_flags;
	__u32 flow_label;
	__u16 layers; /* SV_HAS_*, so that a spec without fields still demands its protocol */
	__u16 zero;
};

enum { SV_HAS_IPV4 = 1, SV_HAS_IPV6 = 2, SV_HAS_TCP = 4, SV_HAS_UDP = 8 };

union sv_words {
	struct sv_key key;
	__u64 w[SV_WORDS];
};

struct sv_rule_key {
	__u64 w[SV_WORDS]; /* masked */
	__u32 mask;        /* its id, which stays when the table is sorted anew */
	__u32 zero;
};

struct sv_dest {
	__u32 slot;
	__u32 tag;
	__u32 generation; /* of the QP that owns the slot; its successor skips its frames */
	__u32 zero;
};

struct sv_rule {
	__u32 dests;
	__u32 flags; /* SV_RULE_* */
	struct sv_dest dest[SV_DESTS];
};

/* No dests: nobody gets it. PASS: the dests get a copy and matching goes on below, of several such the first */
enum { SV_RULE_PASS = 1 };

struct sv_mask {
	__u64 w[SV_WORDS];
	__u32 id;
	__u32 zero;
};

/* Sorted: the first rule that matches wins. */
struct sv_table {
	__u32 masks;
	__u32 zero;
	struct sv_mask mask[SV_MASKS];
};

/* One cache line each: the reader writes the first, programs write the counters. */
struct sv_slot {
	__u32 armed;   /* wake the reader */
	__u32 stamped; /* wants time stamps */
	__u64 frames;     /* that were to be delivered */
	__u64 dropped;    /* for want of room in the ring */
	__u64 pad[5];
};

struct sv_control {
	__u32 table; /* index of the valid one */
	__u32 sniffers;
	struct sv_dest sniffer[SV_SNIFFERS];
	__u64 pad[7];
	struct sv_slot slot[SV_SLOTS];
};

/* In front of each frame in a ring. */
struct sv_record {
	__u32 generation;
	__u32 length;
	__u32 tag;
	__u16 vlan;      /* TCI the kernel took out of the frame */
	__u16 vlan_proto; /* network order; 0: none */
	__u32 gso_size;  /* payload per frame of a super frame, 0: plain */
	__u32 zero;
	__u64 ktime;     /* CLOCK_MONOTONIC ns, 0 unless wanted */
};
#endif
