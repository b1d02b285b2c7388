/* The UDP socket class.
 *
 * Under every object is its kernel socket (same fd), bound, connected and joined just the same: port
 * ownership, IGMP, ICMP errors, fragments, other interfaces, and everything after a homecoming.
 * Receive order: the ring queue, and the kernel socket every VMA_RX_UDP_POLL_OS_RATIO polls.
 */
#ifndef VMH_SOCK_H
#define VMH_SOCK_H
#include "vmh_base.h"
#include "vmh_lane.h"
#include "vmh_net.h"
#include "vmh_obj.h"
#include "vmh_ring.h"
#include "vmh_stats.h"
#include <sys/socket.h>

/* The kernel socket's turn: by VMA_RX_UDP_POLL_OS_RATIO; once; before all that comes by a ring, until it is empty; the
 * same, also when it is, since the rule is being made. */
enum vmh_os_check { VMH_OS_SELDOM, VMH_OS_ONCE, VMH_OS_FIRST, VMH_OS_FIRST_YET };

#define VMH_SOCK_GROUPS VMH_STATS_GROUPS /* memberships followed per socket (igmp_max_memberships is 20 by default) */
#define VMH_SOCK_DSTS 8   /* destinations remembered by an unconnected sender; power of two */
#ifndef SO_TIMESTAMP_OLD
#define SO_TIMESTAMP_OLD 29
#define SO_TIMESTAMPNS_OLD 35
#define SO_TIMESTAMPING_OLD 37
#define SO_TIMESTAMP_NEW 63
#define SO_TIMESTAMPNS_NEW 64
#define SO_TIMESTAMPING_NEW 65
#endif
enum { VMH_STAMP_US = 1, VMH_STAMP_NS };
enum { VMH_NEXT_ANY, VMH_NEXT_RING, VMH_NEXT_OS, VMH_NEXT_OLDER };
#define VMH_PATH_SURE (552 - 28) /* payload that fits the least path MTU that the kernel learns (route.min_pmtu) */

struct vmh_flow {
	uint32_t id;              /* of the service; 0 = free slot */
	uint32_t kind;            /* VMH_FLOW_3T or _5T */
	uint32_t ifindex;         /* 0: all rings */
	in_addr_t laddr, raddr;
	in_port_t lport, rport;
	in_addr_t paddr;          /* 3T of a connected socket: its peer, which rules of the operator may name */
	in_port_t pport;
	uint32_t lane;            /* whose rings */
};

/* A multicast membership, whether or not its flow is on a ring. */
struct vmh_member {
	in_addr_t group;          /* 0: free slot */
	uint32_t ifindex;
	uint32_t flow_id;
};

struct vmh_dst {
	in_addr_t daddr;          /* 0 = free */
	in_port_t dport;
	bool gateway;             /* behind one, and the socket minds the path's MTU */
	uint32_t reason;          /* not 0: the kernel sends, until generation changes */
	uint64_t generation;      /* of the net page */
	uint32_t cfg;             /* of sock->tx_cfg */
	uint32_t sure_payload;    /* up to this the ring has it; above, vmh_path_fits tells */
	uint32_t max_payload;     /* path's MTU - 28, as the kernel knew it when asked; at most link_payload */
	uint32_t link_payload;    /* MTU - 28 of route and ring */
	uint32_t asked;           /* when, for the path's MTU; 0: the next datagram asks */
	struct vmh_ring *ring;
	const struct vmh_ring *was; /* the last that was not NULL, to tell a migration */
	struct vmh_frame_hdr hdr;
};

/* SO_MAX_PACING_RATE as VMA's programs give it: told from the kernel's by its size, 12 bytes. */
struct vmh_pacing {
	uint32_t kbps;            /* 0: no limit */
	uint32_t burst;           /* bytes that may leave at once after a pause */
	uint16_t typical;         /* bytes of a packet; only remembered */
};

struct vmh_sock {
	struct vmh_obj obj;       /* first: class UDP */
	struct vmh_sock_stats *stats; /* second: see sock_reset */

	/* receive queue; guarded by rxq_lock; rxq_len readable without */
	struct vmh_lock rxq_lock;
	struct vmh_buf *rxq_head, **rxq_tail;
	_Atomic uint32_t rxq_len;
	uint32_t rxq_bytes;
	uint32_t rxq_truesize;    /* accounted against rcvbuf as the kernel would */

	/* receive configuration (object lock to write) */
	_Atomic uint8_t rx_on;    /* a flow of ours is steered to a ring */
	_Atomic uint8_t plain;    /* nothing of this socket goes by a ring before its next bind or connect */
	_Atomic uint8_t rd_shut, wr_shut;
	_Atomic uint8_t nonblock;
	_Atomic uint8_t os_check; /* enum vmh_os_check */
	_Atomic uint8_t want_stamp; /* some timestamp option is on */
	uint8_t opt_timestamp;    /* VMH_STAMP_*: SO_TIMESTAMP, SO_TIMESTAMPNS; 0: neither */
	uint8_t stamp_new;        /* by the options' numbers for 64-bit times */
	uint32_t stamping;        /* SO_TIMESTAMPING: SOF_TIMESTAMPING_* */
	uint8_t opt_pktinfo, opt_recvttl, opt_recvtos;
	uint32_t rcvbuf;          /* kernel's doubled value */
	int64_t rcvtimeo_ns, sndtimeo_ns; /* 0: none */
	uint32_t os_ratio_left;
	_Atomic uint64_t inode;   /* vmh_obj_name() */
	uint64_t tried_ns;        /* when a call that never blocks last found nothing on rings */
	uint32_t os_reports;      /* vmh_os_reports when it was last seen empty */
	uint8_t os_more;          /* the last look at it found something */
	uint8_t next_from;        /* VMH_NEXT_*: what was peeked at or measured is what the next call gets */
	uint32_t rxq_older;       /* VMH_NEXT_OLDER: so many in the queue are older than what the kernel socket has */
	uint64_t drained_ns;      /* when the rings were last looked at while something was queued */
	uint8_t heard;            /* something was received since connect: the peer is alive */

	/* identity */
	in_addr_t laddr, raddr;
	in_port_t lport, rport;   /* 0: not bound / not connected */
	uint8_t connected, reuseport, reuseaddr;
	uint8_t port_chosen;      /* by the program in bind(): others send to it first */
	uint32_t bound_if;        /* SO_BINDTODEVICE ifindex */
	uint32_t mc_if;           /* IP_MULTICAST_IF */
	in_addr_t mc_if_addr;
	uint8_t ttl, tos, mc_ttl, mc_loop;
	uint32_t priority;        /* SO_PRIORITY, which IP_TOS sets as well */
	uint8_t pmtudisc;         /* IP_MTU_DISCOVER */
	uint32_t home;            /* reason for which it stays on the kernel for good; 0: may be offloaded */
	uint32_t home_detail;
	_Atomic uint32_t in_kernel; /* receives that wait there, where no ring could wake them */
	_Atomic uint8_t put_off;  /* until there are none */
	_Atomic uint8_t shared;   /* a fork shared it: the kernel serves it until one process holds it again */
	uint8_t share_tries;
	uint64_t share_next_ns;   /* when the worker asks again */
	struct vmh_flow flow;     /* the unicast flow; id 0: none */
	uint64_t joined_ns;       /* the last join */
	uint32_t nmembers;        /* slots of members[] in use up to */
	struct vmh_member members[VMH_SOCK_GROUPS];
	uint8_t mc_all;           /* IP_MULTICAST_ALL */
	uint32_t session;         /* control session in which flows were attached */
	const struct vmh_ring *rx_ring; /* that its flow was on last; only to compare */
	/* All that comes for this socket comes by this ring, so who receives looks at no other; NULL: any. A gone ring
	 * means any as well. */
	struct vmh_ring *_Atomic only_ring;
	struct vmh_lane_use rx_lane, tx_lane;
	struct vmh_ring *last_ring; /* for sendmmsg's flush */

	/* transmit: dst cache, guarded by the object lock for writing and by tx_lock in use */
	struct vmh_lock tx_lock;
	uint32_t tx_cfg;          /* changes with any option that alters headers */
	_Atomic uint8_t leaving;  /* on its way home: who does not wait sends by the kernel */
	_Atomic uint8_t out_edges; /* an epoll set wants EPOLLOUT after each send; a hint */
	uint32_t tx_since_rx;     /* sends since anything was received: when to look for ICMP errors */
	uint32_t error_alert;     /* sends that look for one all the same */
	uint64_t error_asked_ns;
	uint8_t paced;            /* pacing acts */
	struct {
		uint64_t rate;    /* bytes per second */
		uint32_t burst;
		uint16_t typical;
		_Atomic uint64_t next; /* ns: when the next datagram may leave */
	} pacing;
	uint8_t recverr;          /* IP_RECVERR: the sends of an unconnected socket fail too */
	struct vmh_dst dsts[VMH_SOCK_DSTS];

	struct vmh_sock *demux_next; /* sock.c: hash chain by local port */
	uint32_t demux_hash;
	struct vmh_sock *all_next;   /* every UDP object ever made (type-stable memory) */
	struct vmh_sock *free_next;
};

static inline struct vmh_sock *vmh_sock_of(struct vmh_obj *o) { return (struct vmh_sock *)o; }

/* Readiness from rings alone (the kernel fd is asked by whoever polls it). */
static inline bool vmh_sock_ready(const struct vmh_sock *s)
{
	return atomic_load_explicit(&s->rxq_len, memory_order_acquire) != 0;
}
/* Reading is shut down: zero bytes are its end, and an empty datagram only by a rare chance. */
static inline bool vmh_sock_at_end(const struct vmh_sock *s)
{
	return atomic_load_explicit(&s->rd_shut, memory_order_relaxed);
}
/* May packets arrive on a ring for this socket (so: spin and sleep on rings)? */
static inline bool vmh_sock_on_ring(const struct vmh_sock *s)
{
	return atomic_load_explicit(&s->rx_on, memory_order_acquire) || vmh_sock_ready(s);
}

/* sock.c: life cycle and demultiplexing */
void vmh_sock_created(int fd, int domain, int type, int protocol);  /* after socket(2) succeeded */
void vmh_sock_closed(struct vmh_sock *s);             /* last fd closed; from vmh_fd_close */
void vmh_sock_recycle(struct vmh_sock *s);            /* last reference; from vmh_obj_put */
bool vmh_sock_has_company(const struct vmh_sock *s);  /* on its port, in this process */
void vmh_sock_demux(struct vmh_sock *s, in_port_t port); /* file under this port (0: nowhere) */
void vmh_sock_buf_put(struct vmh_buf *b);             /* a datagram was consumed */
void vmh_sock_each(void (*fn)(struct vmh_sock *s, void *arg), void *arg);
void vmh_sock_fork_child(void);
uint32_t vmh_sock_truesize(const struct vmh_buf *b);

/* sock_flow.c: where the flows of a socket live */
void vmh_sock_bound(struct vmh_sock *s, int fd);      /* local or remote address may have changed */
VMH_COLD void vmh_sock_home(struct vmh_sock *s, uint32_t reason, uint32_t detail); /* for good */
void vmh_sock_home_all(uint32_t reason, bool for_good);
void vmh_sock_service_back(void);                     /* a new session: attach again what may be */
extern _Atomic uint8_t vmh_sock_any_shared;           /* or put off */
void vmh_sock_comes_out(const struct vmh_sock *s);    /* nobody is in_kernel any more */
/* sock_share.c */
void vmh_sock_share_inherited(void);                  /* before an exec: those without FD_CLOEXEC */
void vmh_sock_give_back(struct vmh_sock *s, int fd);  /* object lock held, flows released; sock_give.c */
void vmh_sock_share_all(void);                        /* before a fork: the kernel serves all of them */
bool vmh_sock_retry_shared(void);                     /* by the worker: are some alone again? true: ask again later */
extern _Atomic int vmh_homesick;                      /* a flow is on the kernel because of its interface or address */
void vmh_sock_ring_gone(struct vmh_ring *r, unsigned reason);
void vmh_sock_flow_home(uint32_t flow_id, unsigned reason);
VMH_COLD void vmh_sock_migrate(struct vmh_sock *s, int fd);    /* its flows come to the ring of the calling thread */
void vmh_sock_update(struct vmh_sock *s, int fd);     /* object lock held: flows as the state wants them */
void vmh_sock_converge(struct vmh_sock *s, int fd);   /* the same, whether or not the kernel is to serve it for now */
bool vmh_sock_any_flow(const struct vmh_sock *s);
void vmh_sock_release_flows(struct vmh_sock *s, uint32_t reason); /* object lock held */
/* Many at once, each of which takes as long: those with flows of which goes() says so, its lock held. Whose lock somebody
 * else has keeps them. */
void vmh_sock_release_all(bool (*goes)(struct vmh_sock *s), uint32_t reason);
/* Object lock held: does a flow entitle this socket to send by the ring of ifindex? */
bool vmh_sock_entitled(const struct vmh_sock *s, unsigned ifindex);
void vmh_sock_set_reason(struct vmh_sock *s, uint32_t reason, uint32_t detail);
int vmh_sock_connect(struct vmh_sock *s, int fd, const struct sockaddr *a, socklen_t len); /* 0 / -errno */
void vmh_sock_join(struct vmh_sock *s, int fd, in_addr_t group, unsigned ifindex); /* object lock held */
void vmh_sock_leave(struct vmh_sock *s, in_addr_t group, unsigned ifindex);        /* object lock held */

/* sock_conf.c: VMH_R_CONF_RULE where libvma.conf keeps it on the kernel, else 0 */
unsigned vmh_sock_kept_connected(const struct vmh_sock *s);
unsigned vmh_sock_kept_receiver(const struct vmh_sock *s, in_addr_t local); /* local: bound address, or the group */
unsigned vmh_sock_kept_sender(in_addr_t daddr, in_port_t dport);

/* sock_drain.c: a look at the rings though something is queued, at most once per VMA_RX_CQ_DRAIN_RATE_NSEC */
VMH_COLD void vmh_sock_drain_at_rate(struct vmh_sock *s);

/* sock_opt.c */
int vmh_sock_setsockopt(struct vmh_sock *s, int fd, int level, int name, const void *val, socklen_t len); /* 0 / -errno */
int64_t vmh_sock_timeout_of(int fd, int name); /* SO_RCVTIMEO or SO_SNDTIMEO of the kernel socket: ns, 0: none */
void vmh_sock_read_options(struct vmh_sock *s, int fd); /* what the kernel socket has */

/* sock_pace.c; read: object lock held. pace: 0, the datagram may leave; -EAGAIN, it is not to be waited for (now);
 * -EWOULDBLOCK, SO_SNDTIMEO is over; -EINTR */
void vmh_sock_read_pacing(struct vmh_sock *s, int fd);
unsigned long vmh_pacing_rate(const struct vmh_pacing *p); /* bytes per second, as the kernel has it */
void vmh_sock_set_burst(struct vmh_sock *s, const struct vmh_pacing *p);
VMH_COLD int vmh_sock_pace(struct vmh_sock *s, size_t len, bool now);

/* sock_stamp.c; object lock held */
void vmh_sock_set_timestamp(struct vmh_sock *s, int name, bool on);
void vmh_sock_set_timestamping(struct vmh_sock *s, int fd, int name, uint32_t flags);
/* VMH_R_TIMESTAMPING where stamps are wanted that only the kernel has, else 0 */
unsigned vmh_sock_sends_stamped(const struct vmh_sock *s);
unsigned vmh_sock_stamped_by_adapter(const struct vmh_sock *s, int fd, unsigned ifindex); /* 0: all served ones */
/* What vmh_sock_put_control puts something for. */
static inline bool vmh_sock_tells_more(const struct vmh_sock *s)
{
	return s->opt_timestamp | s->stamping | s->opt_pktinfo | s->opt_recvttl | s->opt_recvtos;
}
/* sock_cmsg.c */
struct vmh_cmsg_out { /* msg_control */
	unsigned char *at;
	size_t left, used;
	bool truncated;
};
void vmh_put_cmsg(struct vmh_cmsg_out *o, int level, int type, const void *data, size_t len);
void vmh_cmsg_begin(struct vmh_cmsg_out *o, const struct msghdr *m);
void vmh_cmsg_end(const struct vmh_cmsg_out *o, struct msghdr *m); /* sets msg_controllen and MSG_CTRUNC */
void vmh_sock_put_control(const struct vmh_sock *s, struct msghdr *m, const struct vmh_buf *b);

/* sock_rx.c, sock_tx.c: bytes, or -errno */
VMH_HOT ssize_t vmh_sock_recvmsg(struct vmh_sock *s, int fd, struct msghdr *m, int flags);
VMH_COLD ssize_t vmh_sock_recv_failed(struct vmh_sock *s, ssize_t err); /* counts; err */
int vmh_sock_recvmmsg(struct vmh_sock *s, int fd, struct mmsghdr *v, unsigned n, int flags, struct timespec *timeout);
void vmh_sock_shutdown(struct vmh_sock *s, int how);
struct vmh_buf *vmh_sock_pop(struct vmh_sock *s);     /* the oldest queued datagram, the caller's; NULL */
void vmh_sock_unpop(struct vmh_sock *s, struct vmh_buf *b);
int vmh_sock_fionread(struct vmh_sock *s, int fd, int *value);
VMH_COLD ssize_t vmh_sock_send_refused(struct vmh_sock *s, ssize_t r); /* by the kernel: counts; r */
VMH_HOT ssize_t vmh_sock_sendmsg(struct vmh_sock *s, int fd, const struct msghdr *m, int flags, bool more);
void vmh_sock_tx_flush(struct vmh_sock *s);           /* kick what `more` left behind */
void vmh_sock_dummy_send(struct vmh_sock *s, int fd); /* warms the path of a connected socket's sends */
VMH_COLD void vmh_sock_path_shrank(struct vmh_sock *s);        /* the peer of a connected socket answered EMSGSIZE */

/* path_mtu.c; tx_lock held. Does the path take a datagram of len bytes whole, as far as the kernel knows? Asks it at
 * most every 100 ms. */
VMH_COLD bool vmh_path_fits(struct vmh_dst *d, uint32_t oif, size_t len);
void vmh_path_forget(in_addr_t daddr);                /* what other sockets were told */
#endif
