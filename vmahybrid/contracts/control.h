/* Control socket: Unix SEQPACKET, one fixed struct per message, native byte order (both ends share
 * the host); addresses and ports in network order. Contract page: docs/control-protocol.md.
 *
 * The shim sends a request and waits for the reply with the same seq, of ATTACH and TCP_TAKE several at
 * a time; the service may send EVENTs at any time between. A reply has type | VMH_MSG_REPLY, status 0 or -errno, and a reason code from
 * reasons.def. Fds ride in SCM_RIGHTS. A message of a wrong magic, version or length is refused with
 * a reply of status -EPROTO (reason VERSION or PROTOCOL) and the connection is closed.
 */
#ifndef VMH_CONTROL_H
#define VMH_CONTROL_H

#define VMH_CTL_MAGIC 0x31484d56 /* "VMH1" */
#define VMH_CTL_VERSION 16

#define VMH_MSG_HELLO 1    /* fd: stats page (may be absent) */
#define VMH_MSG_RING 2     /* ask for the ring on an interface; reply fds: UMEM memfd, then nqueues XSKs (verbs: none) */
#define VMH_MSG_ATTACH 3   /* fd: the kernel socket, bound (and connected) as the flow says */
#define VMH_MSG_DETACH 4
#define VMH_MSG_NEIGH 5    /* resolve and keep a neighbour; reply when resolved or given up (1 s), others overtake it */
#define VMH_MSG_RELEASE 6  /* shim has closed and unmapped the ring */
#define VMH_MSG_REINJECT 7 /* fd: the kernel socket, which gets a datagram that a ring had delivered */
#define VMH_MSG_RING_MAPPED 8 /* of a ring with F_BIND_AFTER: everything is mapped, the service may bind */
#define VMH_MSG_TCP_TAKE 9 /* fds: the kernel socket of an attached TCP flow, and a memfd, which gets its state (tcp_state.h) */
#define VMH_MSG_TCP_HOME 10 /* fds: that socket, and its state as it is now, a memfd */
#define VMH_MSG_TCP_SHOW 11 /* fds: sockets never connected, of connections that began on a ring: they are parked */
#define VMH_MSG_TCP_HIDE 12 /* those of connections that have ended */
#define VMH_MSG_TCP_FRAMES 13 /* fds: the kernel socket of a connection that came home, and what its ring got meanwhile, a memfd */
#define VMH_MSG_TCP_KEEP 14 /* fds: a connection that nobody has accepted, and its ticket, which came to the listener */
#define VMH_MSG_TCP_FETCH 15 /* fd: a ticket that was accepted; then none: the reply has what it stands for */
#define VMH_MSG_EVENT 16   /* service to shim, no reply */
#define VMH_MSG_TCP_RENEW 17 /* fd: the kernel socket of a connection that has ended on the ring: out of repair mode, as if new */
#define VMH_MSG_REPLY 0x8000

/* The shim's own descriptors are the last VMH_FDS_OWN of a table of that size, or of RLIMIT_NOFILE if that is less (of one up
 * to twice as large as VMH_FDS_OWN: the second half). A larger table costs each fork, exec and close_range(2). */
#define VMH_FDS_TABLE 4096 /* above FD_SETSIZE */
#define VMH_FDS_OWN 256

#define VMH_MSG_MAX 4096   /* no message is longer; only REINJECT is longer than 1024 */

struct vmh_msg_hdr {
	unsigned int magic;
	unsigned short version;
	unsigned short type;
	unsigned int len;      /* of the whole message */
	unsigned int seq;
	int status;            /* replies: 0 or -errno */
	unsigned int reason;   /* replies, events, TCP_HOME: reasons.def */
};

struct vmh_msg_hello {
	struct vmh_msg_hdr hdr;
	unsigned int pid;
	unsigned int flags;
	char comm[16];
	char profile[32];
	char app_id[64];
	char cmdline[256];
};

struct vmh_msg_hello_reply { /* fd: net page, read-only */
	struct vmh_msg_hdr hdr;
	unsigned long long session;
	unsigned int net_page_size;
	unsigned int flags;
	char service_version[32];
};

#define VMH_VERBS_DEVICE 64
#define VMH_VERBS_NONE 0   /* verbs_reason says why */
#define VMH_VERBS_USABLE 1 /* a raw packet QP can be made: the device has them and the program CAP_NET_RAW */

/* A program whose QP can't be made after a grant of VMH_RING_VERBS RELEASEs that ring and asks once more, with verbs
 * VMH_VERBS_NONE and verbs_reason VERBS_FAILED. */
struct vmh_msg_ring {
	struct vmh_msg_hdr hdr;
	unsigned int ifindex;
	unsigned int rx_size;   /* wanted descriptors, 0 = the service's default; powers of two */
	unsigned int tx_size;
	unsigned int frames;    /* wanted UMEM frames, 0 = default */
	unsigned int verbs;     /* VMH_VERBS_*: what the program found out about the interface's RDMA device */
	unsigned int verbs_reason; /* not usable: reasons.def, why */
	char verbs_device[VMH_VERBS_DEVICE]; /* its name, empty without one */
	unsigned int lane;      /* which of the program's rings on the interface: 0..VMH_LANES-1 */
	unsigned int memory;    /* VMH_MEMORY_*: of the UMEM; an earlier service takes it for padding, and gives plain pages */
};

#define VMH_FRAMES_MAX 131072 /* 256 MiB of 2048 bytes: more takes longer to make than a program waits */

/* Of huge pages as many frames as fill one at least; where they run out: as MAY_BE_HUGE, without VMH_RING_F_HUGE. */
#define VMH_MEMORY_PLAIN 0
#define VMH_MEMORY_MAY_BE_HUGE 1
#define VMH_MEMORY_HUGE 2

/* Rings of one lane belong together: a program has one ring per interface and lane, and flows name the lane, so that a
 * wildcard's frames come by the lane's ring on each interface. */
#define VMH_LANES 256

#define VMH_RING_DIRECT 0
#define VMH_RING_VETH 1
#define VMH_RING_VERBS 2       /* the program makes a raw packet QP of its own: nqueues 0, no fds, geometry 0 */
#define VMH_XDP_GENERIC 0
#define VMH_XDP_NATIVE 1
#define VMH_RING_F_ZEROCOPY 1
#define VMH_RING_F_VERIFY_CSUM 2 /* a physical wire: verify UDP checksums on receive */
#define VMH_RING_F_BIND_AFTER 4  /* the XSKs are not bound: map everything, then RING_MAPPED, whose reply has the flags */
#define VMH_RING_F_FAR 8         /* the last queue is the same flows' other way in, never both at a time: receive only */
#define VMH_RING_F_HUGE 16       /* the UMEM is of huge pages */
#define VMH_RING_F_CHAINS 64     /* a long frame of TCP comes in several buffers, all but the last with XDP_PKT_CONTD */
#define VMH_RING_F_STAMP 32      /* frames of flows with VMH_ATTACH_F_STAMP may have a struct vmh_stamp before them */

struct vmh_msg_ring_reply {
	struct vmh_msg_hdr hdr;
	unsigned int ring_id;
	unsigned int ifindex;
	unsigned int nqueues;    /* XSK fds passed, 1..16; each with its own fill and completion ring. Verbs: 0 */
	unsigned int kind;       /* VMH_RING_* */
	unsigned int xdp_mode;   /* VMH_XDP_* */
	unsigned int flags;      /* VMH_RING_F_* */
	unsigned int frame_size; /* bytes, power of two */
	unsigned int frames;     /* in the UMEM; all belong to the shim, none is in a ring yet */
	unsigned int rx_size;    /* per queue */
	unsigned int tx_size;
	unsigned int fill_size;
	unsigned int comp_size;
	unsigned int mtu;
	unsigned char mac[6];    /* source MAC to put into frames */
	unsigned char pad[2];
	unsigned int lane;       /* as asked for */
};

/* Only after the reply the ring carries packets. Refused: the ring is released already; with status -EBUSY another
 * has the queues, and one more RING leads to another kind of ring. */
struct vmh_msg_ring_mapped {
	struct vmh_msg_hdr hdr;
	unsigned int ring_id;
	unsigned int pad;
};

struct vmh_msg_ring_mapped_reply {
	struct vmh_msg_hdr hdr;
	unsigned int ring_id;
	unsigned int flags;    /* VMH_RING_F_*, for good */
};

#define VMH_FLOW_5T 0
#define VMH_FLOW_3T 1
#define VMH_FLOW_MC 2  /* local_addr is the group */

#define VMH_ATTACH_F_WAS_SHARED 1 /* the process forked: refuse (FORK) while another process holds the socket */
#define VMH_ATTACH_F_STAMP 8      /* the socket wants the adapter's time of arrival, where the ring has it */
/* of a TCP port (VMH_FLOW_3T): connections of which the kernel knows nothing are the ring's */
#define VMH_ATTACH_F_LISTEN 2     /* the socket listens, and SYNs are the ring's, too */
#define VMH_ATTACH_F_PORT 4       /* no socket comes with it: the service makes one with a port of its own, and keeps it */

struct vmh_msg_attach {
	struct vmh_msg_hdr hdr;
	unsigned int kind;
	unsigned int ifindex;  /* 0: every ring of this process (wildcard address) */
	unsigned int fd;       /* the program's fd number, for explain */
	unsigned char proto;
	unsigned char family;  /* 4 or 6 */
	unsigned short local_port;
	unsigned short remote_port;
	unsigned short flags;  /* VMH_ATTACH_F_* */
	unsigned char local_addr[16];  /* v4-mapped; all zero = wildcard: one rule per address */
	unsigned char remote_addr[16]; /* with remote_port: of a connected socket, with VMH_FLOW_3T as well */
	unsigned int lane;     /* whose rings it is for; where that lane has none: the program's lowest lane there */
	unsigned int pad;
};

struct vmh_msg_attach_reply {
	struct vmh_msg_hdr hdr;
	unsigned int flow_id;
	unsigned int rules;    /* rules installed now (wildcards follow address changes) */
	unsigned short local_port;
	unsigned short pad[3];
};

struct vmh_msg_detach { /* the reply comes when no more frame will be steered to the ring */
	struct vmh_msg_hdr hdr;
	unsigned int flow_id;
	unsigned int cause;    /* reasons.def: why the shim lets it go */
};

struct vmh_msg_neigh {
	struct vmh_msg_hdr hdr;
	unsigned int ifindex;
	unsigned int family;   /* 4 or 6 */
	unsigned char addr[16];
};

struct vmh_msg_release {
	struct vmh_msg_hdr hdr;
	unsigned int ring_id;
	unsigned int pad;
};

/* Homecoming with datagrams unread (fork, exec, SCM_RIGHTS): the service puts them into the kernel's receive path of
 * the interface, one by one, in order. The socket's rules are gone already. kind, local and remote say what the socket
 * is, as in ATTACH; src and dst are the datagram's. hdr.len is the offset of data plus len. The reply comes when the
 * kernel has it. */
#define VMH_REINJECT_DATA 3840

struct vmh_msg_reinject {
	struct vmh_msg_hdr hdr;
	unsigned int kind;
	unsigned int ifindex;  /* where it arrived */
	unsigned int len;      /* payload bytes */
	unsigned char proto;
	unsigned char family;
	unsigned short local_port;
	unsigned short remote_port;
	unsigned short src_port;
	unsigned char ttl;
	unsigned char tos;
	unsigned char pad[2];
	unsigned char local_addr[16];
	unsigned char remote_addr[16];
	unsigned char src_addr[16];
	unsigned char dst_addr[16];
	unsigned char data[VMH_REINJECT_DATA];
};

/* VMA_HYBRID_TCP. TCP_HOME with the flow of a port (VMH_FLOW_3T): the connection began on the ring, and the
 * socket has never been bound or connected; it is made that connection's. Else the frames are steered to the ring before (ATTACH) and are the kernel's after TCP_HOME. A
 * refusal changes nothing, but that a refused TCP_TAKE has taken the flow's rule away, too. */
struct vmh_msg_tcp_take { /* takes an RCU grace period, which several share */
	struct vmh_msg_hdr hdr;
	unsigned int flow_id;
	unsigned int follow;   /* so many more of the program follow at once; they are answered in any order */
	unsigned long long at; /* where in the file the state goes */
};

struct vmh_msg_tcp_take_reply {
	struct vmh_msg_hdr hdr;
	unsigned int len;      /* bytes of the state */
	unsigned int pad;
};

struct vmh_msg_tcp_home {
	struct vmh_msg_hdr hdr;
	unsigned int flow_id;  /* 0, or one that is not there any more: an earlier service parked the socket */
	unsigned int ifindex;  /* by which its frames come */
	unsigned int follow;   /* as of TCP_TAKE */
	unsigned int pad;
	unsigned long long at; /* where in the file the state is */
};

/* After TCP_HOME, in order. The socket is named as in ATTACH. The file has struct vmh_tcp_frame, one behind the other, each at
 * a multiple of 8 bytes: a whole IP packet, with a checksum that is right. One that is longer than the kernel takes here
 * is left out, as if the wire had lost it. */
#define VMH_TCP_FRAMES_MAX 4096 /* what follows is left out, too */

struct vmh_tcp_frame {
	unsigned int len;
	unsigned char packet[];
};

struct vmh_msg_tcp_frames {
	struct vmh_msg_hdr hdr;
	unsigned int kind;     /* VMH_FLOW_5T */
	unsigned int ifindex;  /* where they arrived */
	unsigned int len;      /* bytes in the file */
	unsigned char proto;
	unsigned char family;
	unsigned short local_port;
	unsigned short remote_port;
	unsigned char pad[2];
	unsigned char local_addr[16];
	unsigned char remote_addr[16];
};

/* A connection that began on the ring, for who looks at the kernel's sockets: `fd` is bound, connected and in repair mode
 * afterwards, and its frames have a rule of their own. TCP_HOME of it is as of any other. In order of the fds. */
#define VMH_TCP_SHOW_MAX 15
struct vmh_tcp_shown {
	unsigned int flow_id;  /* of the port (VMH_FLOW_3T) */
	unsigned int ifindex;
	unsigned int fd;       /* the program's number, for explain */
	unsigned short local_port;
	unsigned short remote_port;
	unsigned char local_addr[16];
	unsigned char remote_addr[16];
};

#define VMH_TCP_SHOW_BUSY 1 /* they have traffic, and get what is left of the rules */
struct vmh_msg_tcp_show {
	struct vmh_msg_hdr hdr;
	unsigned int n;
	unsigned int flags;
	struct vmh_tcp_shown conn[VMH_TCP_SHOW_MAX];
};

struct vmh_msg_tcp_show_reply {
	struct vmh_msg_hdr hdr;
	unsigned int flow_id[VMH_TCP_SHOW_MAX]; /* 0: it is not shown, the socket is as it was */
	unsigned int pad;
};

/* The program has taken the connection from the kernel sockets (connect to AF_UNSPEC) or closed them; their rules go. */
#define VMH_TCP_HIDE_MAX 64
struct vmh_msg_tcp_hide {
	struct vmh_msg_hdr hdr;
	unsigned int n;
	unsigned int pad;
	unsigned long long inode[VMH_TCP_HIDE_MAX]; /* of the sockets */
};

struct vmh_msg_tcp_keep {
	struct vmh_msg_hdr hdr;
};

/* In two steps: in between the program closes the ticket, and has a descriptor for what follows. */
struct vmh_msg_tcp_fetch {
	struct vmh_msg_hdr hdr;
	unsigned int id;       /* with a ticket 0; then as in the reply to that */
	unsigned int pad;
};

struct vmh_msg_tcp_fetch_reply {
	struct vmh_msg_hdr hdr;
	unsigned int id;
	unsigned int pad;
};

struct vmh_msg_tcp_renew {
	struct vmh_msg_hdr hdr;
};

#define VMH_EV_RING_GONE 1   /* a = ring id: stop using it, go home, RELEASE it */
#define VMH_EV_FLOW_HOME 2   /* a = flow id: its rules are already gone */
#define VMH_EV_BYE 3         /* the service stops: everything goes home */
#define VMH_EV_ASKED 4       /* the statistics page has an order */
#define VMH_EV_TCP_MOVE 5    /* a = fd, VMH_EV_ALL = all; b = 0: TCP connections go home, 1: they are adopted */
#define VMH_EV_MAKING 6      /* the ring that was asked for is being made, which takes a while: the answer has its time again */
#define VMH_EV_ALL 0xffffffffu

struct vmh_msg_event {
	struct vmh_msg_hdr hdr;
	unsigned int event;
	unsigned int a;
	unsigned int b;
	unsigned int pad;
};

#endif
