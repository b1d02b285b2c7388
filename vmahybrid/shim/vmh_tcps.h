/* The TCP socket class (VMA_HYBRID_TCP): connections begin on a ring, or are adopted
 * when the kernel has opened them, and go home to the kernel before anything that only it can do.
 *
 * Under every object is its kernel socket (same fd): in use, or parked by the service in repair mode. `state` changes
 * under the object's lock; `conn` is used under `io` only, which order 4 of vmh_lock.h has.
 */
#ifndef VMH_TCPS_H
#define VMH_TCPS_H
#include "vmh_base.h"
#include "tcp/tcp_stack.h"
#include "vmh_control.h"
#include "vmh_interpose.h"
#include "vmh_iomux.h"
#include "vmh_lane.h"
#include "vmh_params.h"
#include "vmh_stats.h"
#include "vmh_wait.h"
#include <errno.h>
#include <netinet/in.h>
#include <sys/socket.h>

enum vmh_tcps_state {
	VMH_TCPS_KERNEL,   /* and may be adopted */
	VMH_TCPS_ADOPTING,
	VMH_TCPS_RING,
	VMH_TCPS_HOMING,
	VMH_TCPS_STRANDED, /* its state waits in `blob` for a service to bring it home */
	VMH_TCPS_LOST,     /* nobody could: every call says ECONNRESET */
	VMH_TCPS_HOME,     /* the kernel's, for good */
	VMH_TCPS_LISTEN,   /* the kernel listens, and so do rings */
};

struct vmh_tring;
struct vmh_tlisten;

/* Of one that the program's connect() has begun: has it said that it is open? SEEKING: it is stranded, without a `blob`, as
 * the kernel has no route for its SYN. */
enum vmh_tcps_opening { VMH_TCPS_OPEN, VMH_TCPS_OPENING, VMH_TCPS_SEEKING };

#define VMH_TCPS_NODELAY 1 /* TCP_NODELAY was set, and nothing else */
#define VMH_TCPS_TOUCHED 2

enum vmh_tcps_only { VMH_TCPS_NOT_ONLY_V6 = 1, VMH_TCPS_ONLY_V6 };

/* VMA_HYBRID_TCP, of the program or of a rule. */
enum vmh_tcps_policy { VMH_TCPS_PLAIN, VMH_TCPS_ADAPTIVE, VMH_TCPS_OFFLOAD };

/* What the policy wants to know of a connection on a ring. */
struct vmh_tcps_watch {
	uint64_t bytes, turns; /* turns: from sending to receiving */
};

struct vmh_tcps {
	/* What a call on the kernel socket needs is one cache line: of many connections none stays in the cache. */
	struct vmh_obj obj; /* first: class TCP */
	_Atomic uint32_t in_kernel;       /* calls on the kernel socket that may sleep there; outlives the object */
	uint32_t rounds;
	struct vmh_sock_stats *stats;
	/* zero in a new object from here on */
	_Atomic uint8_t state;
	_Atomic uint8_t nonblock;
	uint8_t last_sent, homes;
	uint32_t kernel_turns;
	uint32_t epoch;                   /* of the count of busy connections, tcps_policy.c */
	uint8_t epoch_rounds, policy;     /* enum vmh_tcps_policy */

	_Atomic uint32_t bits;            /* EPOLL*, while the stack has it; written under the stack's lock */
	uint32_t edge;                    /* which of them came last; stack's lock */
	_Atomic uint64_t inode;           /* 0 until it is of use (vmh_obj_name()) */
	uint8_t phase;                    /* of the connection, as the statistics page has it; 0 closed */
	uint8_t connecting, resting;      /* resting: going home by policy or the operator, not for good */
	uint8_t troubled;                 /* the last time it came home because an interface or the service went */
	uint8_t lent;                     /* to the service, which may hold the socket yet when the program closes it */
	uint8_t kept;                     /* on the kernel by the operator, until he says otherwise */
	uint32_t seen_kernel_turns;
	struct vmh_tcps_watch watch, seen; /* on the ring; seen, as the next ones: the internal thread's */
	uint64_t turns_before;            /* of watch: when it came to the ring, from the kernel */
	uint8_t paid;                     /* the move, by what it has done since */
	uint32_t seen_out, seen_again;
	uint32_t seen_resent;             /* stack's lock */
	uint64_t quiet_ns, rest_at;
	uint64_t retry_ns;
	uint32_t srtt_us, rttvar_us;      /* when it was on a ring last; 0: unknown */
	int64_t rcvtimeo_ns, sndtimeo_ns; /* 0: none */
	struct vmh_lane_use lane;         /* of both directions */
	struct vmh_tring *tring;
	struct vmh_tcp_conn *conn;
	uint32_t flow_id, ifindex;
	struct vmh_tcp_blob blob;         /* of a stranded one; at home: the peer's end, for the next service */
	uint32_t stranded_in;             /* this session (vmh_session_id) */
	uint64_t stranded_ns;
	int route_err;                    /* of one that seeks: what the kernel has said last */
	_Atomic uint32_t blocked;         /* calls that wait at a ring; blocked_tids, _squares: sums of their threads' numbers */
	_Atomic uint64_t blocked_tids, blocked_squares;
	_Atomic uint32_t strays;          /* what was counted there when nobody answered: left by siglongjmp() */
	_Atomic uint8_t leaving, waits;   /* another thread is about to close it, and asks; a call that waits is there and says so */
	_Atomic int left_fd;              /* 0, or of the kernel socket: they go on by it when another thread has closed theirs */
	uint32_t left_users;              /* calls at the kernel, by that */
	/* Began on a ring: the kernel socket was never connected, flow_id is that of the local port, which it shares. */
	_Atomic uint8_t fresh;
	_Atomic uint8_t put_off;          /* a call was told EAGAIN because the connection was being moved */
	_Atomic uint8_t taken;            /* being moved: by now the service may have parked the kernel socket */
	_Atomic uint8_t unfit;            /* VMH_R_*: the peer sends urgent data, or long frames, which is the kernel's */
	_Atomic uint8_t asked;            /* VMH_R_*, by a child in our memory: the internal thread is to bring it home */
	_Atomic uint8_t ended;            /* an adopted one, by a reset or a timeout */
	uint32_t priority;                /* SO_PRIORITY, which IP_TOS sets as well */
	uint8_t accepted;                 /* by a listener */
	uint8_t v6;                       /* AF_INET6: its names, also where it is connected over IPv4 */
	uint8_t opening, bound, odd, linger; /* odd: an option that the stack has not; linger: SO_LINGER is on */
	uint8_t only_v6;                  /* VMH_TCPS_*ONLY_V6: IPV6_V6ONLY before a service bound it; 0 none has */
	uint8_t touched;                  /* VMH_TCPS_NODELAY, VMH_TCPS_TOUCHED: its kernel socket is not as it was made */
	uint8_t secret;                   /* segments are signed (TCP_MD5SIG, TCP_AO), which only the kernel does */
	uint8_t suspect;                  /* a service that did not answer may have begun to park it */
	uint8_t reuse_told;               /* SO_REUSEADDR was set while it was parked */
	uint8_t inq;                      /* TCP_INQ: recvmsg() says how much is left */
	uint8_t peculiar;                 /* an option that acts on an open connection, and that only the kernel has */
	uint8_t quick;                    /* TCP_QUICKACK: 1 and what getsockopt() says; 0: it was not set */
	_Atomic uint16_t accepts;
	uint32_t linger_s;
	struct vmh_tcp_addr addr;         /* once it has come to a ring */
	/* On a ring, tcps_path.c. way_if: interface of the route when it began, 0 none; learned: path MTU, 0 none */
	struct vmh_tcp_path path;
	uint16_t learned;
	_Atomic uint8_t doubt;            /* it has sent again, or the page has changed unseen */
	uint8_t nowhere;                  /* there is no route */
	uint32_t way_if;
	uint64_t way_generation, resumed_ns;
	_Atomic uint32_t wild_port;       /* of a wildcard that listens on rings; 0: none */
	struct vmh_ring *_Atomic missed;  /* has had a SYN for it, and it does not listen there */
	/* Its kernel socket is parked as that of an adopted one, for who looks at the kernel's (tcps_show.c); object lock */
	uint8_t shown, lived;             /* lived: for a second */
	uint32_t shown_flow;              /* rule of its own, 0 if not known */
	uint64_t shown_inode;
	uint64_t scanned_bytes;           /* watch.bytes when it was last asked whether to show it; the internal thread's */
	struct vmh_tcp_options opt;       /* as the program wants them */
	struct vmh_tlisten *listening;    /* io; in state LISTEN */
	_Atomic uint8_t listens;          /* listen() was called */
	uint32_t os_reports;              /* vmh_os_reports when the kernel's listener was last seen empty */
	uint64_t os_looked_ns;
	int backlog;
	/* up to here */
	struct vmh_lock io;
	struct vmh_tcps *all_next, *free_next;
} __attribute__((aligned(64)));
_Static_assert(offsetof(struct vmh_tcps, bits) == 64, "a call on the kernel socket needs one cache line");

static inline struct vmh_tcps *vmh_tcps_of(struct vmh_obj *o) { return (struct vmh_tcps *)o; }
extern _Atomic int vmh_tcps_on; /* the policy is not `kernel`, and this is not the child of a process with TCP rings */
/* The process ends: nothing comes to a ring any more. Looked at under the object's lock, which the thread that has set
 * it takes once of each object: what had begun before is on its ring then, or in the kernel. */
extern _Atomic bool vmh_tcps_ending;

/* How many connections have begun to leave rings, and have left: who looked at both sides while one did may have found it
 * on neither. */
extern _Atomic uint32_t vmh_tcps_leaves_begun, vmh_tcps_leaves_done;
void vmh_tcps_leaves_pass(void); /* waits for those that have begun, a moment at most */

static inline unsigned vmh_tcps_state(const struct vmh_tcps *s)
{
	return atomic_load_explicit(&s->state, memory_order_acquire);
}
/* The kernel socket is parked or was never connected, and says nothing of the connection. */
static inline bool vmh_tcps_parked(const struct vmh_tcps *s)
{
	unsigned state = vmh_tcps_state(s);

	return state >= VMH_TCPS_RING && state <= VMH_TCPS_LOST;
}
static inline uint32_t vmh_tcps_bits(const struct vmh_tcps *s)
{
	return vmh_tcps_parked(s) || vmh_tcps_state(s) == VMH_TCPS_LISTEN ?
		atomic_load_explicit(&s->bits, memory_order_acquire) : 0;
}

/* Does an interface that went, or the service, send home for this reason? They may be back, and so may the sockets. */
bool vmh_tcps_trouble(unsigned reason);

static inline bool vmh_tcps_at_kernel(const struct vmh_tcps *s)
{
	unsigned state = vmh_tcps_state(s);

	return state == VMH_TCPS_KERNEL || state == VMH_TCPS_HOME;
}

/* What the kernel says of an error or an end is not the connection's: it is parked, or being parked. */
static inline bool vmh_tcps_hushed(struct vmh_tcps *s)
{
	if (vmh_tcps_state(s) == VMH_TCPS_ADOPTING) {
		atomic_store(&s->put_off, 1);
		return !vmh_tcps_at_kernel(s);
	}
	return vmh_tcps_parked(s);
}

/* Its kernel socket says nothing of it for a while, not even its names. */
static inline bool vmh_tcps_moves(const struct vmh_tcps *s)
{
	unsigned state = vmh_tcps_state(s);

	return state == VMH_TCPS_ADOPTING || state == VMH_TCPS_HOMING;
}

/* Returns when nobody is moving it. */
static inline void vmh_tcps_await_move(struct vmh_tcps *s)
{
	if (vmh_unlikely(vmh_tcps_moves(s))) {
		vmh_lock(&s->obj.lock);
		vmh_unlock(&s->obj.lock);
	}
}

/* Can a ring make it ready? */
static inline bool vmh_tcps_on_rings(const struct vmh_tcps *s)
{
	return vmh_tcps_parked(s) || vmh_tcps_state(s) == VMH_TCPS_LISTEN;
}
/* An adopted one that has ended: its kernel socket is about to have no connection any more, and no names. */
static inline bool vmh_tcps_has_ended(const struct vmh_tcps *s)
{
	return vmh_tcps_state(s) == VMH_TCPS_RING && atomic_load_explicit(&s->ended, memory_order_acquire);
}
static inline bool vmh_tcps_is_fresh(const struct vmh_tcps *s)
{
	return atomic_load_explicit(&s->fresh, memory_order_relaxed) && vmh_tcps_parked(s);
}

/* Opening, and the kernel will begin as soon as it has a route. */
static inline bool vmh_tcps_seeks(const struct vmh_tcps *s)
{
	return vmh_tcps_state(s) == VMH_TCPS_STRANDED && VMH_GET(s->opening) == VMH_TCPS_SEEKING;
}

static inline struct vmh_tcps *vmh_tcps_get(int fd)
{
	struct vmh_obj *o = atomic_load_explicit(&vmh_tcps_on, memory_order_relaxed) ? vmh_fd_get(fd) : NULL;

	if (!o)
		return NULL;
	if (atomic_load_explicit(&o->class_, memory_order_relaxed) == VMH_CLASS_TCP)
		return vmh_tcps_of(o);
	vmh_obj_put(o);
	return NULL;
}
static inline void vmh_tcps_drop(struct vmh_tcps **s)
{
	if (*s)
		vmh_obj_put(&(*s)->obj);
}
#define TCPS_HELD __attribute__((cleanup(vmh_tcps_drop))) struct vmh_tcps *

/* tcps.c: life */
void vmh_tcps_init(void);
struct vmh_tcps *vmh_tcps_install(int fd, bool v6, bool nonblock, uint64_t inode); /* NULL: a kernel fd. inode: 0 of a new one */
void vmh_tcps_set_nonblock(struct vmh_tcps *s, bool on);
void vmh_tcps_ask_nonblock(struct vmh_tcps *s, int fd); /* as the kernel has it */
void vmh_tcps_will_wait(struct vmh_tcps *s);     /* before the kernel is told so */
void vmh_tcps_touch(int fd); /* its kernel socket is no more as it was made */
/* socket(2) from those that were kept, or -1; and after it: inode as that has it, 0 of a new one */
int vmh_tcps_spare(int domain, int type, int protocol, uint64_t *inode);
void vmh_tcps_created(int fd, int domain, int type, int protocol, uint64_t inode);
/* after connect(2) to that name, if it is known, which said r: 0 or -errno */
void vmh_tcps_connected(int fd, long r, const struct sockaddr *to, socklen_t len);
/* after accept(2); from: the listener, NULL: none of ours; peer: as accept(2) gave it, peer_len 0: not, or only in part */
void vmh_tcps_accepted(const struct vmh_tcps *from, int fd, const struct sockaddr *peer, socklen_t peer_len, int flags);
void vmh_tcps_closed(struct vmh_tcps *s);
void vmh_tcps_recycle(struct vmh_tcps *s);
void vmh_tcps_each(void (*fn)(struct vmh_tcps *s, void *arg), void *arg);
/* Also those that a thread is about to close. */
void vmh_tcps_each_closing(void (*fn)(struct vmh_tcps *s, void *arg), void *arg);
void vmh_tcps_glance(void (*fn)(struct vmh_tcps *s, void *arg), void *arg); /* not held: it may be closed at any time */
void vmh_tcps_fork_child(void);
void vmh_tcps_set_reason(struct vmh_tcps *s, unsigned reason);
/* The same, of a socket with which nothing has been tried yet: what was found out stays. */
void vmh_tcps_suppose(struct vmh_tcps *s, unsigned reason);
bool vmh_tcps_in_repair(int fd); /* the kernel socket is */
bool vmh_tcps_at_rest(int fd); /* the kernel socket is neither connected nor about to be */
/* Of the kernel socket, as far as it has some, in *a and the statistics. true: it has both. */
bool vmh_tcps_note_names(struct vmh_tcps *s, int fd, struct vmh_tcp_addr *a);
void vmh_tcps_forget_peer(struct vmh_tcps *s); /* the same: it has none any more */

/* tcps_adopt.c tcps_home.c tcps_homes.c tcps_stranded.c tcps_told.c */
bool vmh_tcps_reuses(int fd);                    /* SO_REUSEADDR of the kernel socket */
int vmh_tcps_export(struct vmh_tcp_conn *c, struct vmh_tcp_blob *state); /* a frozen one; 0 or -errno */
void vmh_tcps_adopt(struct vmh_tcps *s, int fd, unsigned why); /* why: for who reads the events */
bool vmh_tcps_adopt_later(struct vmh_tcps *s, int fd); /* by the internal thread; false: the call has to do it */
void vmh_tcps_adopt_chosen(void);                /* the internal thread */
void vmh_tcps_move_fork_child(void);
#define VMH_TCPS_LIGHT_BYTES 65536 /* in a queue of one that moves with others */
extern _Atomic int vmh_tcps_lots; /* that are on their way from the kernel now */
/* The same; up to VMH_TAKES_MAX, held. quiet: only those of which nothing is to be read now. How many it did. */
int vmh_tcps_adopt_together(struct vmh_tcps *const *v, int n, unsigned why, bool quiet);
/* Home for good. must: where that fails the connection is reset, else it stays on the ring. 0, or -errno. */
int vmh_tcps_home(struct vmh_tcps *s, unsigned reason, bool must);
/* Else the number is closed, or another file's, by a call that nobody saw or in the child of a vfork. A socket without
 * a slot in the statistics page can't be told from others. */
bool vmh_tcps_owns_fd(const struct vmh_tcps *s);
/* The internal thread's. From a ring, and back by the operator only. */
void vmh_tcps_keep_home(struct vmh_tcps *s, unsigned reason);
bool vmh_tcps_rest(struct vmh_tcps *s, unsigned reason); /* home from the ring, until it is worth another adoption */
void vmh_tcps_home_all(unsigned reason);
/* What the program gets that a child executes: of a vfork, by the child; of a spawn, before. `named`: also these. */
void vmh_tcps_home_inherited(bool (*named)(int fd));
void vmh_tcps_home_fd(int fd, unsigned reason); /* if it is one */
void vmh_tcps_laid_over(int fd); /* another file is about to have its number */
/* Before a call that only the kernel can do. 0: it is home, as far as that can be; -EINVAL: VMA_EXCEPTION_HANDLING wants
 * the call to fail, and nothing has moved. */
int vmh_tcps_kernel_takes(struct vmh_tcps *s, unsigned reason);
int vmh_tcps_kernel_takes_fd(int fd, unsigned reason);
void vmh_tcps_flow_home(uint32_t flow_id, unsigned reason);
void vmh_tcps_told(int fd, bool adopt, unsigned reason); /* by the operator; fd -1: all */
void vmh_tcps_ring_gone(struct vmh_ring *r, unsigned reason); /* before it is closed */
void vmh_tcps_service_back(void);
void vmh_tcps_leave_to_kernel(void); /* at the end of the process; what can't go stays */
bool vmh_tcps_without_way(void); /* are some to try again to go home, or to open? */
void vmh_tcps_try_home(void);
void vmh_tcps_try_open(void);
void vmh_tcps_await_service(struct vmh_tcps *s); /* as long as it stands still on its way home */
void vmh_tcps_let_name_go(struct vmh_tcps *s); /* of a connection that has ended: the peer may use it for another */

void vmh_tcps_publish(struct vmh_tcps *s); /* it is on the ring now */

#define VMH_TCPS_KERNELS (-1000000) /* libc's call is to be made */
#define VMH_TCPS_WAITS_ON (-1000001) /* the same: it goes on with this one, and begins none */
#define VMH_TCPS_POLL 32 /* frames of a ring that a call looks at */

/* tcps_listen.c tcps_accept.c tcps_listen_home.c: listeners on rings. */
void vmh_tcps_listen(struct vmh_tcps *s, int backlog);           /* after listen(2) */
void vmh_tcps_accepts(struct vmh_tcps *s, int fd);               /* the program waits for connections of this one */
/* Before accept(2), which may sleep: a listener does not come to be on rings meanwhile, nor until in_kernel is counted
 * down. false: it is on rings now. */
bool vmh_tcps_accept_in_kernel(struct vmh_tcps *s, int flags);
static inline void vmh_tcps_waited_for(struct vmh_obj *o, int fd)
{
	if (atomic_load_explicit(&vmh_tcps_of(o)->listens, memory_order_relaxed) &&
	    vmh_tcps_state(vmh_tcps_of(o)) == VMH_TCPS_KERNEL)
		vmh_tcps_accepts(vmh_tcps_of(o), fd);
}
/* *goes_on: at the kernel, as vmh_tcps_goes_on() says, until the caller says vmh_tcps_went_on(). */
int vmh_tcps_accept(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags,
		    const struct vmh_signals *began, struct vmh_tcps **goes_on);
void vmh_tlisten_refresh(struct vmh_tcps *s);                    /* io held */
void vmh_tlisten_home(struct vmh_tcps *s, unsigned reason);      /* object lock held */
void vmh_tlisten_port_home(in_port_t port, unsigned reason); /* those of this port */
void vmh_tlisten_options(struct vmh_tcps *s);                    /* object lock held */
void vmh_tlisten_shut(struct vmh_tcps *s);                      /* the same: it ends, and who is not accepted is reset */
void vmh_tlisten_fork_child(struct vmh_tcps *s);
int vmh_tlisten_has_metrics(struct vmh_tcps *s);                 /* as vmh_net_metrics_by, of its interfaces */
unsigned vmh_tlisten_waiting(struct vmh_tcps *s);               /* connections of rings that are not accepted yet */
bool vmh_tlisten_holds(const struct vmh_tcps *s);                /* some that went home wait in the shim */
void vmh_tlisten_look(void);                                     /* by the internal thread */
/* The same: of a wildcard, on interfaces that came. VMH_R_NOT_TRIED: another time; else 0, or why not on `missed`. */
unsigned vmh_tlisten_join(struct vmh_tcps *s, struct vmh_ring *missed);
bool vmh_tlisten_missed(in_port_t port, struct vmh_ring *r);     /* a SYN came by r, where a wildcard does not listen yet */
void vmh_tlisten_rings_go(struct vmh_tcps *s);                   /* before it goes home */
bool vmh_tlisten_is(struct vmh_tcps *s, const struct vmh_ring *r, uint32_t flow_id); /* on that ring, or of that flow */

/* tcps_conf.c: VMH_R_CONF_RULE where libvma.conf keeps it on the kernel, else 0; the last one reads a changed file */
unsigned vmh_tcps_kept_client(const struct vmh_tcps *s, const struct vmh_tcp_addr *a);
unsigned vmh_tcps_kept_server(const struct vmh_ip *laddr, in_port_t lport);
unsigned vmh_tcps_kept(const struct vmh_tcps *s, const struct vmh_tcp_addr *a);
/* s->policy as a rule says, or else VMA_HYBRID_TCP */
void vmh_tcps_policy_client(struct vmh_tcps *s, const struct vmh_tcp_addr *a);
void vmh_tcps_policy_server(struct vmh_tcps *s, const struct vmh_ip *laddr, in_port_t lport);

/* tcps_connect.c: 0, -errno or VMH_TCPS_KERNELS; the first one VMH_TCPS_WAITS_ON as well */
int vmh_tcps_connect(struct vmh_tcps *s, int fd, const struct sockaddr *a, socklen_t len);
int vmh_tcps_connect_by_send(struct vmh_tcps *s, int fd, bool now);
void vmh_tcps_ask_untold(struct vmh_tcps *s, int fd, const struct vmh_tcp_addr *a);
int vmh_tcps_bind(struct vmh_tcps *s, const struct sockaddr *a, socklen_t len);
void vmh_tcps_bound(struct vmh_tcps *s, int fd);                 /* by the kernel, as it is shown */
int vmh_tcps_shutdown(struct vmh_tcps *s, int fd, int how);
int vmh_tcps_name(struct vmh_tcps *s, bool peer, struct sockaddr *a, socklen_t *len);
bool vmh_tcps_is_over(struct vmh_tcps *s);                       /* the stack's part has come to its end */
/* Object lock held: the kernel connects instead. It seeks a route then, if there is none: unless `must`, when connect() fails. */
void vmh_tcps_restart(struct vmh_tcps *s, bool must);
/* The error of one that is LOST, or 0. */
int vmh_tcps_take_lost(struct vmh_tcps *s);

/* tcps_name.c */
bool vmh_tcps_parse(const struct sockaddr *a, socklen_t len, struct vmh_ip *ip, in_port_t *port); /* false: neither family */
socklen_t vmh_tcps_compose(bool v6, const struct vmh_ip *ip, in_port_t port, struct sockaddr_storage *out);
/* As much as fits. 0, or what getsockname(2) says of such a place. */
int vmh_tcps_tell(bool v6, const struct vmh_ip *ip, in_port_t port, struct sockaddr *a, socklen_t *len);
bool vmh_tcps_kernel_name(int fd, bool peer, struct vmh_ip *ip, in_port_t *port);
bool vmh_tcps_only_v6(int fd);                                   /* IPV6_V6ONLY */
/* VMH_TCP_IPV*: of the connections that it may take */
static inline unsigned vmh_tcps_families(const struct vmh_tcps *s, int fd)
{
	return !s->v6 ? VMH_TCP_IPV4 : vmh_tcps_only_v6(fd) ? VMH_TCP_IPV6 : VMH_TCP_IPV4 | VMH_TCP_IPV6;
}
struct vmh_ip vmh_tcps_source(const struct vmh_ip *to);          /* what the kernel would send from; any: it would not */

/* tcps_port.c: local ports whose connections are a ring's */
struct vmh_tname {
	struct vmh_ip addr;
	in_port_t port;
	uint8_t v6; /* of an AF_INET6 socket */
};
unsigned vmh_tport_attach(int fd, const struct vmh_tname *l, unsigned ifindex, unsigned lane, unsigned flags,
			  uint32_t *flow_id);
void vmh_tport_end(uint32_t flow_id, in_port_t lport, unsigned reason);
void vmh_tport_remember(void);
void vmh_tport_leave(int fd, const struct vmh_tname *l, unsigned ifindex, unsigned lane, uint32_t flow_id, bool no_syns);
uint32_t vmh_tport_flow(in_port_t lport);                        /* the last one of that port */
bool vmh_tport_is(in_port_t lport);                              /* segments of no connection are answered by a reset */
int vmh_tport_connect(struct vmh_tring *t, unsigned ifindex, struct vmh_tcps *s, struct vmh_tcp_addr *a,
		      const struct vmh_tcp_path *path);
void vmh_tport_gone(const struct vmh_tring *t, uint32_t flow_id); /* ports of a ring that is gone, or of a flow */
void vmh_tport_session_over(void);                               /* its rings are closed */
void vmh_tport_retire(uint32_t flow_id);
void vmh_tport_went_home(struct vmh_tring *t, uint32_t flow_id, const struct vmh_tcp_addr *a); /* the kernel has this one */
void vmh_tport_work(void);                                       /* by the internal thread */
void vmh_tport_fork_child(void);

/* tcps_end.c */
void vmh_tcps_close(struct vmh_tcps *s, int fd);                 /* the last descriptor is about to be closed */
void vmh_tcps_closes_one(struct vmh_tcps *s, int fd);            /* not the last */
void vmh_tcps_finish(bool exiting);                              /* what was closed is done with before this returns */

/* tcps_show.c */
void vmh_tshow_look(void);                                       /* by the internal thread */
void vmh_tshow_end(struct vmh_tcps *s);                          /* object lock held: the kernel forgets it, without a word */
void vmh_tshow_home(struct vmh_tcps *s);                         /* the same: the connection is the kernel's */
void vmh_tshow_flush(void);
void vmh_tshow_fork_child(void);

/* tcps_ended.c: sockets on rings that are ended in the kernel. Object lock held. */
void vmh_tended_watch(struct vmh_tcps *s);                       /* if the kernel has it in its lists */
void vmh_tended_watch_again(struct vmh_tcps *s);                 /* one that could not go home */
void vmh_tended_leave(struct vmh_tcps *s);
int vmh_tended_fd(void);                                         /* readable: vmh_tended_look(), by the internal thread; or -1 */
void vmh_tended_look(void);
void vmh_tended_fork_child(void);

/* tcps_wait.c */
struct vmh_twait {
	struct vmh_waiting w;
	uint64_t loops;
	bool now;
	uint8_t state;             /* as long as it is this one */
	uint32_t wanted;           /* EPOLL* */
	int kfd;                   /* readable ends the wait, too; -1: none */
	struct vmh_tcps *blocks;   /* counted in its `blocked` */
};
#define TWAIT __attribute__((cleanup(vmh_twait_end))) struct vmh_twait /* also when the thread is cancelled */
void vmh_twait_end(struct vmh_twait *w);
void vmh_twait_init(struct vmh_twait *w, const struct vmh_tcps *s, int64_t timeout_ns, uint32_t wanted, int kfd,
		    const struct vmh_signals *began);
int vmh_tcps_wait(struct vmh_tcps *s, struct vmh_twait *w);      /* 0: look again; -EAGAIN, -EINTR */
void vmh_tcps_blocks(struct vmh_tcps *s);                        /* this thread waits from here on; counts in `blocked` */
void vmh_tcps_blocks_no_more(struct vmh_tcps *s);
bool vmh_tcps_others_wait(struct vmh_tcps *s);                   /* by what is counted */
/* Does another thread wait in a call? true: it stands still until vmh_tcps_left(), and no handler may need it in between. */
bool vmh_tcps_is_waited_for(struct vmh_tcps *s);
int vmh_tcps_own_number(struct vmh_tcps *s, int fd);             /* hidden, of its kernel socket, beside `fd`; 0: none */
/* The same, left_fd, unless there is one; false: none is made. */
bool vmh_tcps_leave(struct vmh_tcps *s, int fd);
void vmh_tcps_close_left(struct vmh_tcps *s);
bool vmh_tcps_left_is_used(const struct vmh_tcps *s);
void vmh_tcps_left_before_fork(void);
void vmh_tcps_left_after_fork_parent(void);
void vmh_tcps_left_after_fork_child(void);
void vmh_tcps_left_fork_child(struct vmh_tcps *s);
/* A call that has waited, and is counted still, goes on at the kernel: by left_fd, until it ends. */
void vmh_tcps_goes_on(struct vmh_tcps *s, int fd);
void vmh_tcps_went_on(struct vmh_tcps *s);
/* Those that wait are on their way to the kernel: until none is left. False: some are still. */
bool vmh_tcps_let_pass(struct vmh_tcps *s);
void vmh_tcps_left(struct vmh_tcps *s);
static inline bool vmh_tcps_leaving(const struct vmh_tcps *s)
{
	return atomic_load_explicit(&s->leaving, memory_order_relaxed);
}
VMH_COLD void vmh_tcps_still_waits(struct vmh_tcps *s);          /* the answer of who waits */
/* The kernel socket, for a call that has begun: another thread may have closed the program's descriptor since. */
static inline int vmh_tcps_fd(struct vmh_tcps *s, int fd)
{
	int left = s ? atomic_load(&s->left_fd) : 0;

	return vmh_unlikely(left) ? left : fd;
}
/* While this call waits, which answers who asks, and does not go on: by another thread, or by a handler in this one. 0, or
 * what it says. */
static inline int vmh_tcps_is_closed(struct vmh_tcps *s, const struct vmh_waiting *w)
{
	if (vmh_unlikely(vmh_tcps_leaving(s)))
		vmh_tcps_still_waits(s);
	if (vmh_likely(!atomic_load(&s->obj.closed)) || atomic_load(&s->left_fd))
		return 0;
	return vmh_interrupted(w) ? -EINTR : -EBADF;
}

/* tcps_policy.c */
void vmh_tcps_kernel_round(struct vmh_tcps *s, bool send, ssize_t r); /* a call that the kernel has served */
bool vmh_tcps_wants_adoption(struct vmh_tcps *s);
static inline bool vmh_tcps_is_due(const struct vmh_tcps *s)
{
	unsigned policy = VMH_GET(s->policy);

	return policy == VMH_TCPS_ADAPTIVE ? VMH_GET(s->rounds) >= (uint64_t)vmh_params.hybrid_tcp_rounds << s->homes
					   : policy == VMH_TCPS_OFFLOAD;
}
void vmh_tcps_note_fork(void);
void vmh_tcps_note_handed(struct vmh_tcps *s); /* another process is about to get it */
bool vmh_tcps_hands_on(void); /* accepted connections are its children's: on a ring only as with policy adaptive */
void vmh_tcps_adoption_took(uint64_t ns, unsigned n, unsigned asked); /* of n at a time; the service was asked for so many */
void vmh_tcps_adoption_over(void);              /* done or not; by the thread that wanted it */
int vmh_tcps_together(void);                    /* by the internal thread: moves many; ms to the next look, -1: at will */
void vmh_tcps_look(void);                       /* by the internal thread */
void vmh_tcps_watch_from_now(struct vmh_tcps *s); /* object lock held, as for the next */
void vmh_tcps_rested(struct vmh_tcps *s);
void vmh_tcps_policy_end(const struct vmh_tcps *s); /* it is to be closed: not one from the SYN on */
static inline void vmh_tcps_ring_call(struct vmh_tcps *s, bool send, size_t n)
{
	VMH_COUNT(s->watch.bytes, n);
	if (send != VMH_GET(s->last_sent)) { /* two threads may be in here: a turn too many or too few does no harm */
		VMH_SET(s->last_sent, send);
		VMH_COUNT(s->watch.turns, send);
	}
}

/* tcps_batch.c: answers of a thread whose last wait has returned several sockets go out together. */
void vmh_batch_slow(unsigned ready);             /* a wait ends with so many ready sockets, or begins */
bool vmh_batch_more(void);
extern __thread unsigned vmh_batch_left __attribute__((tls_model("initial-exec")));
static inline void vmh_batch_begin(int ready)
{
	if (ready > 1 || vmh_unlikely(vmh_batch_left))
		vmh_batch_slow(ready > 1 ? (unsigned)ready : 0);
}
/* May what was sent just now wait for the next answers? Whoever looks at the ring next pushes it. */
static inline bool vmh_batch_holds(void)
{
	return vmh_batch_left && vmh_batch_more();
}

/* tcps_path.c: the way to the peer, as the kernel has it */
struct vmh_way;
unsigned vmh_tpath_make(struct vmh_tcps *s, const struct vmh_way *hop, const struct vmh_ip *to,
			struct vmh_tcp_path *path);      /* object lock held, as for the next; tring is set */
void vmh_tpath_accepted(struct vmh_tcps *s);
bool vmh_tpath_is_strict(const char *ifname);            /* rp_filter */
bool vmh_tpath_none_back(const struct vmh_ip *laddr, const struct vmh_ip *raddr, unsigned ifindex, bool strict);
void vmh_tpath_begun(struct vmh_tcps *s);                /* it is on the ring now */
VMH_COLD void vmh_tpath_sent_again(struct vmh_tcps *s);  /* stack lock held */
void vmh_tpath_look(void);                               /* by the internal thread */

/* tcps_icmp.c: has a router or the peer refused a SYN of ours? */
void vmh_ticmp_begin(void);                              /* before the first one of a ring */
bool vmh_ticmp_heard(bool v6, uint64_t now);             /* the internal thread's: lately, some SYN */

/* tcps_plain.c: calls on a connection that is the kernel's, as long as the policy does not want it. */
struct vmh_plain_call {
	_Atomic int fd;                          /* + 1; 0: in no such call */
	_Atomic int taken;
	unsigned tid;
	struct vmh_plain_call *next;
} __attribute__((aligned(64)));
enum { VMH_PLAIN = 1, VMH_PLAIN_NOWAIT };         /* it does not wait, either: O_NONBLOCK */
extern uint8_t *vmh_plain_fds;                   /* by descriptor: may a call be made so? 0: no */
extern unsigned vmh_plain_size;
extern __thread struct vmh_plain_call *vmh_plain_mine __attribute__((tls_model("initial-exec")));
void vmh_plain_init(void);
VMH_COLD bool vmh_plain_join(void);              /* this thread; false: not this call */
void vmh_plain_open(struct vmh_tcps *s);         /* object lock held, or the object is new */
void vmh_plain_open_again(struct vmh_tcps *s, int fd);
static inline void vmh_plain_shut(int fd)        /* for calls that begin after this */
{
	if ((unsigned)fd < vmh_plain_size)
		VMH_SET(vmh_plain_fds[fd], 0);
}
bool vmh_plain_stop(int fd);                     /* the same, and vmh_plain_is_in() tells of all others; false: it can't */
bool vmh_plain_is_in(int fd);
static inline bool vmh_plain_nowait(int fd)
{
	return (unsigned)fd < vmh_plain_size && VMH_GET(vmh_plain_fds[fd]) == VMH_PLAIN_NOWAIT;
}
void vmh_plain_waits(int fd);                    /* no thread is in a call any more in which it can't be cancelled */
/* Object lock held, state KERNEL: it begins on a ring, or listens there. false: somebody is in such a call. */
bool vmh_tcps_not_plain(struct vmh_tcps *s);
void vmh_plain_off(void);                        /* nobody makes any */
void vmh_plain_part(void);                       /* this thread has descriptors of its own: it makes no such calls */
void vmh_plain_fork_child(void);
static inline void vmh_plain_end(struct vmh_plain_call **c)
{
	if (*c)
		atomic_store_explicit(&(*c)->fd, 0, memory_order_release);
}
#define PLAIN_CALL __attribute__((cleanup(vmh_plain_end))) struct vmh_plain_call * /* also when the thread is cancelled */
static inline struct vmh_plain_call *vmh_plain_begin(int fd)
{
	struct vmh_plain_call *c;

	if ((unsigned)fd >= vmh_plain_size || !VMH_GET(vmh_plain_fds[fd]))
		return NULL;
	c = vmh_plain_mine;
	if (vmh_unlikely(!c || atomic_load_explicit(&c->fd, memory_order_relaxed))) {
		if (!vmh_plain_join())
			return NULL;
		c = vmh_plain_mine;
	}
	__builtin_prefetch(atomic_load_explicit(&vmh_fdtab[fd], memory_order_relaxed), 1);
	atomic_store_explicit(&c->fd, fd + 1, memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst); /* for the compiler; for the processor membarrier stands in */
	if (vmh_likely(VMH_GET(vmh_plain_fds[fd])))
		return c;
	atomic_store_explicit(&c->fd, 0, memory_order_relaxed);
	return NULL;
}
void vmh_tcps_kernel_called(int fd, int flags, bool send, ssize_t r); /* a call that we don't make: it is counted */
void vmh_tcps_plain_sent(const struct vmh_plain_call *c, int fd, int flags, ssize_t r); /* as libc has it; errno is kept */
void vmh_tcps_plain_received(const struct vmh_plain_call *c, int fd, int flags, ssize_t r);

/* tcps_io.c: bytes, or -errno */
extern char vmh_tcps_buffer; /* as msg_name: one buffer and nothing else, of send() or recv() */
ssize_t vmh_tcps_recv(struct vmh_tcps *s, int fd, struct msghdr *m, int flags);
VMH_COLD ssize_t vmh_tcps_failed(struct vmh_tcps *s, bool send, ssize_t err); /* a call of whoever serves it: counts; err */
ssize_t vmh_tcps_send(struct vmh_tcps *s, int fd, const struct msghdr *m, int flags);

/* tcps_opt.c */
void vmh_tcps_dress(struct vmh_tcps *s, int fd); /* a kernel socket that was never connected, before the service has it */
void vmh_tcps_note_only_v6(struct vmh_tcps *s, int fd); /* the same, of any */
unsigned vmh_tcps_tagged(const struct vmh_tcps *s, unsigned ifindex); /* VMH_R_PRIORITY: a tag that rings don't make */
int vmh_tcps_setsockopt(struct vmh_tcps *s, int fd, int level, int name, const void *val, socklen_t len);
int vmh_tcps_getsockopt(struct vmh_tcps *s, int fd, int level, int name, void *val, socklen_t *len);

/* tcps_ring.c: the stack of a ring */
struct vmh_tcps_stash; /* frames that come while nobody has the connection */
struct vmh_tring *vmh_tring_of(struct vmh_ring *r); /* NULL: none to be had */
struct vmh_ring *vmh_tring_ring(struct vmh_tring *t);
struct vmh_tcp *vmh_tring_stack(struct vmh_tring *t);
/* That begins with what its stack has not taken. */
struct vmh_tcps_stash *vmh_tring_stash(struct vmh_tring *t, const struct vmh_tcp_addr *a, struct vmh_tcp_conn *its);
void vmh_tring_unstash(struct vmh_tring *t, struct vmh_tcps_stash *st, bool feed);
/* to the kernel, which has it now */
void vmh_tring_stash_home(struct vmh_tring *t, struct vmh_tcps_stash *st, const struct vmh_tcps *s);
void vmh_tring_flush(struct vmh_tring *t);
void vmh_tring_at_once(struct vmh_tring *t, bool on); /* the next frame is pushed before the call that sends it returns */
void vmh_tring_acks_now(struct vmh_tring *t); /* the program waits: none goes with data any more */
void vmh_tring_count(struct vmh_tring *t, int more);
void vmh_tring_close(struct vmh_ring *r);
void vmh_tcps_refresh(struct vmh_tcps *s);  /* io held: bits anew */
void vmh_tcps_unfit_home(void);             /* the internal thread: connections that the stack can't serve go home */
/* For the child of a vfork, whose table has not all that waits, and other numbers for what it accepts. False: the internal
 * thread has not done it. */
bool vmh_tcps_home_by_worker(struct vmh_tcps *s, unsigned reason);
void vmh_tcps_unfit_from_birth(struct vmh_tcps *s); /* it is on a ring now: the thread may have looked too early */
int vmh_trings_progress(void);              /* the internal thread: polls, timers; ms until the next look, -1: none */
bool vmh_trings_any(void);
void vmh_trings_fork_child(void);
unsigned vmh_trings_port_users(in_port_t lport);
bool vmh_trings_in_use(const struct vmh_ip *laddr, unsigned families, in_port_t lport, bool reuse); /* by what is, or was */
unsigned vmh_tring_port_names(struct vmh_tring *t, in_port_t lport, struct vmh_tcp_addr *out, unsigned max);
unsigned vmh_trings_closing(uint64_t *left); /* connections that the program has closed, and that are not through yet; bytes */
struct vmh_tring *vmh_trings_orphan(struct vmh_tcp_conn **c);
#endif
