/* Rings: the one interface behind which AF_XDP (ring_xdp.c) and raw packet QPs (ring_verbs.c) sit.
 *
 * Invariants
 *  1. Receive state and buffers are guarded by ring->lock, transmit state by ring->tx_lock, so that a
 *     sender inside its kick never delays a receiver. Order: lock, then tx_lock.
 *  2. Every UMEM frame has one owner: kernel (fill or TX ring), the free lists, or a vmh_buf that was
 *     delivered and not yet put back. bufs[] has one entry per frame, so a buffer needs no allocation.
 *  3. A ring that is `gone` delivers and sends nothing; its memory stays mapped until the last
 *     delivered buffer came back and vmh_ring_close ran (the XSKs go at once). The struct is never freed.
 *  4. No allocation, no log call, no system call but the kick on poll, put, send.
 */
#ifndef VMH_RING_H
#define VMH_RING_H
#include "vmh_base.h"
#include "vmh_lock.h"
#include "control.h"
#include "stats_page.h"
#include <netinet/in.h>
#include <poll.h>
#include <sys/uio.h>

struct vmh_ring;
struct vmh_sock;

/* One received UDP datagram, zero-copy in the UMEM. */
struct vmh_buf {
	struct vmh_buf *next;      /* for whoever holds it */
	struct vmh_ring *ring;
	const unsigned char *data; /* UDP payload */
	uint32_t len;              /* payload bytes */
	uint32_t frame;            /* index of the UMEM frame */
	in_addr_t saddr, daddr;
	in_port_t sport, dport;    /* network order */
	uint8_t ttl, tos;
	uint8_t multicast : 1;     /* destination is a multicast group */
	uint8_t hw_stamped : 1;    /* vmh_buf_hw_stamp tells the adapter's time of arrival */
	uint8_t shared;            /* a heap copy with the payload behind it: put() frees it (several receivers) */
	uint64_t stamp_ns;         /* CLOCK_REALTIME at delivery, 0 when nobody asked for timestamps */
};

/* Over the last bytes of the headers, which nobody needs any more: in ns, of the clock that VMA_HW_TS_CONVERSION says. */
#define VMH_HW_STAMP sizeof(uint64_t)
#define VMH_HUGE_PAGE ((size_t)2 << 20)
static inline uint64_t vmh_buf_hw_stamp(const struct vmh_buf *b)
{
	uint64_t ns;

	memcpy(&ns, b->data - VMH_HW_STAMP, sizeof(ns));
	return ns;
}
static inline void vmh_buf_set_hw_stamp(struct vmh_buf *b, uint64_t ns) /* 0: it has none */
{
	b->hw_stamped = ns != 0;
	if (vmh_unlikely(ns))
		memcpy((unsigned char *)b->data - VMH_HW_STAMP, &ns, sizeof(ns));
}

/* Ethernet + IPv4 + UDP header template of a destination, made once by vmh_frame_hdr_init. */
struct vmh_frame_hdr {
	unsigned char bytes[42];
	uint32_t pseudo_sum;        /* one's complement sum of the pseudo header and the ports, without lengths */
	uint16_t ip_sum_base;       /* one's complement sum of the IP header with total length 0, id 0 */
	uint32_t priority;          /* SO_PRIORITY: a VLAN interface makes the tag's PCP of it */
};

struct vmh_ring_ops {
	int (*poll)(struct vmh_ring *r, unsigned budget);  /* lock held; delivers; returns frames taken */
	bool (*pending)(struct vmh_ring *r);               /* no lock held; is a poll worth it? NULL: only a poll tells */
	void (*put)(struct vmh_ring *r, struct vmh_buf *b); /* lock held */
	/* tx_lock held; 0, or -EAGAIN without a free frame or descriptor, -ENETDOWN when gone, -EMSGSIZE */
	int (*send)(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len);
	/* tx_lock held; the same for a whole frame, Ethernet header first; NULL: not on this kind of ring */
	int (*send_frame)(struct vmh_ring *r, const void *frame, size_t len);
	int (*kick)(struct vmh_ring *r);                   /* tx_lock held; pushes posted frames to the wire */
	int (*wait_fds)(struct vmh_ring *r, int *fds, int max); /* lock held; fds that become readable with RX */
	/* lock held, before each sleep; NULL where the fds need no arming. Asks for a notification, and delivers what
	 * came before it was asked for. */
	void (*arm)(struct vmh_ring *r);
	bool (*crowded)(struct vmh_ring *r);               /* lock held; half full or more: the kernel may soon drop */
	void (*stop)(struct vmh_ring *r);                  /* no lock held; takes its rules away; NULL: the service does */
	void (*close)(struct vmh_ring *r);                 /* both locks held, gone is set */
};

#define VMH_RING_WAIT_FDS 16
#define VMH_BEFORE_SLEEP (-1)

/* The last datagram that was handed over: while sockets are bound as they were then, the next one of the same
 * flow is found to be the same socket's without a look at the table. */
struct vmh_taker_memo {
	const struct vmh_sock *sock;
	uint32_t bindings;          /* vmh_bindings at that time */
	in_addr_t saddr, daddr;
	in_port_t sport, dport;
};

enum { VMH_HEARD_NOT, VMH_MUTED, VMH_HEARD }; /* in the epoll set of threads that sleep */

struct vmh_ring {
	const struct vmh_ring_ops *ops;
	unsigned id, ifindex, mtu, kind, xdp_mode, flags, lane;
	unsigned char mac[6];
	char ifname[16];
	struct vmh_ring_stats *stats; /* read it under a lock only: close exchanges it */
	struct vmh_ring *next;      /* vmh_rings list; append only, under control lock */
	uint32_t rx_frames;         /* that circulate for receiving; 0: not this kind of ring's to count */
	uint32_t rx_share;          /* of them, those that one queue can have while the others have theirs; 0: the same */
	_Atomic int gone;           /* set by the control thread; read anywhere */
	bool hw_stamps;             /* datagrams come with the adapter's time */
	_Atomic uint32_t conns;     /* of TCP, listeners too */
	uint32_t talkers;           /* connections of TCP that may all send at once; under lock */
	/* own cache lines: a sender and a receiver thread shall not disturb each other */
	_Alignas(64) struct vmh_lock lock;
	const struct vmh_sock *taker; /* whose next datagram the poller wants in hand, not queued; under lock */
	struct vmh_buf *taken;
	struct vmh_taker_memo memo;   /* sock.c's; under lock */
	/* A frame that is no datagram, under lock, may be NULL: 1 if it stays (b goes back by vmh_ring_put), 0 if not. It
	 * can't stay if b is NULL. */
	int (*other)(struct vmh_ring *r, unsigned char *frame, uint32_t len, struct vmh_buf *b);
	void (*others_end)(struct vmh_ring *r); /* no more of them in this look; under lock, may be NULL */
	bool several;                 /* frames in this look, perhaps */
	bool brimming;                /* a socket's buffer is half full since the program's last look; under lock */
	bool scarce;                  /* few frames are left for the queue of this look: what stays is copied; under lock */
	uint8_t polled;               /* by the program, since vmh_rings_drain() */
	uint8_t heard;                /* VMH_HEARD*; under lock, and watch.c's but for close */
	int heard_by;
	struct vmh_sleeper *first;    /* watch.c's */
	void *other_arg;
	/* After each poll, no lock held; may be NULL. frames VMH_BEFORE_SLEEP: a thread is about to sleep. */
	void (*after)(struct vmh_ring *r, int frames);
	_Atomic uint32_t bufs_out;  /* delivered and not yet put back; written under lock */
	struct vmh_buf *_Atomic returned; /* put while the lock was busy; whoever unlocks takes them */
	struct vmh_buf *_Atomic kept; /* read by a receiver that is in a hurry: goes back when there is time */
	_Alignas(64) struct vmh_lock tx_lock;
	bool again;                   /* VMH_SEND_AGAIN of what is sent; under tx_lock */
	/* implementation state follows in the implementation's own struct */
};

/* For the implementations, lock held: a frame stays with `other`; a look is over. */
static inline void vmh_buf_is_out(struct vmh_ring *r)
{
	uint32_t out = atomic_load_explicit(&r->bufs_out, memory_order_relaxed);

	atomic_store_explicit(&r->bufs_out, out + 1, memory_order_relaxed);
}

static inline void vmh_others_end(struct vmh_ring *r)
{
	if (vmh_unlikely(r->others_end != NULL))
		r->others_end(r);
}

void vmh_frame_hdr_init(struct vmh_frame_hdr *h, const unsigned char dmac[6], const unsigned char smac[6],
			in_addr_t saddr, in_addr_t daddr, in_port_t sport, in_port_t dport,
			uint8_t ttl, uint8_t tos, bool dont_fragment);

/* Parse one frame from the wire into b (b->data and the addresses). 0, or -EBADMSG. Accepts up to two
 * tags of VID 0, IP options but source routes, Ethernet padding; checks lengths, the IP header sum and that the source
 * can be one; checks the UDP sum only where verify is set. Pure: the fuzzer calls it. */
VMH_HOT int vmh_frame_parse(const unsigned char *frame, size_t len, bool verify, struct vmh_buf *b);

/* Compose the frame for `len` payload bytes gathered from iov; id (host order) is used without DF only.
 * Returns the frame's length, 42 + len, or 0 if iov holds less than len bytes. `to` has that room. */
VMH_HOT size_t vmh_frame_build(unsigned char *to, const struct vmh_frame_hdr *h, uint16_t id, const struct iovec *iov,
			       int n, size_t len);

/* What the parameters leave of the frames that the service gave; 0: no limit. */
struct vmh_xdp_limits {
	uint32_t posted; /* per queue, for receiving: VMA_RX_WRE */
	uint32_t rx_bufs, tx_bufs;
	int hw_ts_conversion; /* VMA_HW_TS_CONVERSION */
	uint32_t batch;  /* VMA_RX_WRE_BATCHING, 0: our own */
};

/* ring_wish.c: what the program's parameters ask the service for, what they limit, and a warning of an AF_XDP ring that
 * has less than was asked for. */
void vmh_ring_wish(struct vmh_msg_ring *req);
struct vmh_xdp_limits vmh_ring_limits(void);
void vmh_ring_wish_compare(const struct vmh_ring *r);

/* From a grant (ring reply and its fds, taken over on success: UMEM then XSKs). Appends the ring to
 * vmh_rings. `bound` is called for a grant with
 * VMH_RING_F_BIND_AFTER, when everything is mapped: it has the XSKs bound and puts the flags for good into the
 * grant, or returns -errno. 0; -EPROTO for a grant that contradicts itself; another -errno. */
int vmh_ring_xdp_open(struct vmh_msg_ring_reply *grant, const char *ifname, const int *fds, int nfds,
		      const struct vmh_xdp_limits *limits, int (*bound)(struct vmh_msg_ring_reply *), struct vmh_ring **out);

#define VMH_DELIVERED 1
#define VMH_DELIVERED_COPY 2 /* of it, where frames are scarce */
/* Upcall: sock.c takes the datagram. Ring lock held. Returns VMH_DELIVERED*, 0 if no socket wants it, -ENOBUFS
 * if the socket has no room; the ring takes the frame back unless that itself was delivered. */
VMH_HOT int vmh_deliver(struct vmh_ring *r, struct vmh_buf *b);

extern struct vmh_ring *_Atomic vmh_rings;  /* every ring of the process, gone ones included */
extern _Atomic uint32_t vmh_bindings;       /* changes with every socket's port or address */
/* VMA_BUFFER_BATCHING_MODE, set before the first ring: 0 gives each buffer back at once, to the kernel as well; 1 gives
 * them back in batches, and those that are kept when there is time; 2 leaves these until the next one comes. */
extern int64_t vmh_ring_batching;
extern _Atomic int vmh_want_stamps;         /* number of sockets that want stamp_ns */
extern _Atomic int vmh_want_hw_stamps;      /* number of sockets that want the adapter's time */
extern _Atomic bool vmh_wanted_hw_stamps;   /* there was one: an AF_XDP ring may hold frames with a stamp */

/* How often the kernel told of readiness in a program with rings: what a receiver knew of an empty kernel socket before
 * is out of date. */
extern _Atomic uint32_t vmh_os_reports;
static inline int vmh_os_reported(int n) /* returns it */
{
	if (n > 0 && vmh_unlikely(atomic_load_explicit(&vmh_rings, memory_order_relaxed)))
		atomic_fetch_add_explicit(&vmh_os_reports, 1, memory_order_release);
	return n;
}

/* The ring of the lane (vmh_lane.h) on ifindex, or of the lowest lane that has one there; NULL. The service chooses so. */
struct vmh_ring *vmh_lane_ring(unsigned ifindex, unsigned lane);
/* Poll one ring if nobody else does. Frames taken, 0 if none or busy. */
int vmh_ring_poll(struct vmh_ring *r, unsigned budget);
/* Poll every ring of the process once. */
int vmh_rings_poll(unsigned budget);
/* Until nothing is there, for a call that says "not ready" of what is not delivered; under a flood not for ever. */
#define VMH_CATCH_UP 8192 /* frames */
VMH_COLD void vmh_rings_catch_up(unsigned budget);
/* All that the rings hold goes to its sockets as they are now; waits for a thread that is polling. */
VMH_COLD void vmh_rings_settle(void);
/* The next ones: `only` this ring, or, NULL, all of them.
 * Poll for a receiver: the next datagram of `s`, if nothing waits in its queue, is the caller's and
 * never queued. NULL: none, or it was queued. *frames: how many were polled, of all sockets. seen:
 * vmh_rings_pending(only) has just said so. */
VMH_HOT struct vmh_buf *vmh_rings_take(struct vmh_ring *only, const struct vmh_sock *s, unsigned budget, int *frames,
				       bool seen);
/* Is there anything to poll? Reads indexes, takes no lock. */
VMH_HOT bool vmh_rings_pending(struct vmh_ring *only);
/* Any thread, any time, gone rings too; never waits for a lock, so vmh_deliver may call it as well. */
void vmh_ring_put(struct vmh_buf *b);
/* The same at leisure: at the next poll that finds nothing, or when the next one comes. One per ring is kept.
 * As vmh_ring_batching says. */
VMH_HOT void vmh_ring_put_later(struct vmh_buf *b);
/* 0 means posted. -EAGAIN: no frame or descriptor free; -EMSGSIZE: above the MTU; -ENETDOWN: the ring is
 * gone or the interface down (then the frame may be posted all the same). */
#define VMH_SEND_MORE 1u  /* do not kick yet */
#define VMH_SEND_AGAIN 2u /* the same datagram found the ring full before: that was counted then */
VMH_HOT int vmh_ring_send(struct vmh_ring *r, const struct vmh_frame_hdr *h, const struct iovec *iov, int n, size_t len,
			  unsigned how);
int vmh_ring_send_frame(struct vmh_ring *r, const void *frame, size_t len, bool more); /* -EOPNOTSUPP: not this ring */
int vmh_ring_kick(struct vmh_ring *r);
/* Poll those rings that nobody has looked at until they are half full: the internal thread does. */
void vmh_rings_drain(unsigned budget);
int vmh_rings_wait_fds(int *fds, int max);  /* of all live rings, for one sleep */
int vmh_ring_wait_fds(struct vmh_ring *r, int *fds, int max);
void vmh_rings_woken(const struct pollfd *p, int n); /* what the sleep found on them, for the statistics */
/* Which rings wake those who wait for epoll set `set`: those without a first sleeper of their own; if muted, none. By one
 * thread at a time. false: the kernel refuses. */
bool vmh_rings_hear(int set, bool muted);
void vmh_rings_heard(void);                 /* one of those has woken it: for the statistics */
bool vmh_rings_waiting(void);               /* does one hold what nobody has taken? Or who knows: takes no lock */
void vmh_rings_before_sleep(void);          /* for a thread that waits for none of them */
/* Delivers what the ring holds and marks it gone: nothing goes by it from here on. */
void vmh_ring_retire(struct vmh_ring *r);
/* Marks the ring gone, unmaps its rings and closes its XSKs: afterwards VMH_MSG_RELEASE may be sent. The
 * UMEM stays mapped until the last delivered buffer came back. Idempotent. */
void vmh_ring_close(struct vmh_ring *r);
bool vmh_rings_closed(void);                /* their descriptors, too */
/* In the child of a fork: lets go of every ring without touching what the parent goes on using. Payload of
 * buffers delivered before stays mapped, but the parent's kernel may overwrite it. */
void vmh_rings_fork_child(void);
/* For the implementations: publish a ring that is ready. */
void vmh_ring_add(struct vmh_ring *r);
#endif
