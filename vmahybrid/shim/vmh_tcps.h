/* The TCP socket class, a preview that is off by default (VMA_HYBRID_TCP): connections begin on a ring, or are adopted
 * when the kernel has opened them, and go home to the kernel before anything that only it can do.
 *
 * Under every object is its kernel socket (same fd): in use, or parked by the service in repair mode. `state` changes
 * under the object's lock; `conn` is used under `io` only, which order 4 of vmh_lock.h has.
 */
#ifndef VMH_TCPS_H
#define VMH_TCPS_H
#include "vmh_base.h"
#include "tcp/tcp_stack.h"
#include "vmh_interpose.h"
#include "vmh_iomux.h"
#include "vmh_stats.h"
#include "vmh_wait.h"
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

/* Of a connection that began on the ring by the program's connect(). */
enum vmh_tcps_opening { VMH_TCPS_OPEN, VMH_TCPS_OPENING };

/* What the policy wants to know of a connection on a ring. */
struct vmh_tcps_watch {
	uint64_t bytes, turns; /* turns: from sending to receiving */
};

struct vmh_tcps {
	struct vmh_obj obj; /* first: class TCP */
	struct vmh_sock_stats *stats;
	struct vmh_lock io;
	struct vmh_tcps *all_next, *free_next;
	/* zero in a new object from here on */
	_Atomic uint8_t state;
	_Atomic uint8_t nonblock;
	_Atomic uint32_t bits;            /* EPOLL*, while the stack has it; written under the stack's lock */
	uint32_t edge;                    /* which of them came last; stack's lock */
	_Atomic uint32_t in_kernel;       /* calls on the kernel socket that may sleep there */
	uint8_t last_sent, connecting, homes, resting; /* resting: going home by policy, not for good */
	uint32_t rounds;
	struct vmh_tcps_watch watch, seen; /* on the ring; seen, as the next ones: the internal thread's */
	uint32_t seen_out, seen_again;
	uint64_t quiet_ns, rest_at;
	uint64_t retry_ns;
	int64_t rcvtimeo_ns, sndtimeo_ns; /* 0: none */
	struct vmh_tring *tring;
	struct vmh_tcp_conn *conn;
	uint32_t flow_id, ifindex;
	int blob;                         /* of a stranded one: a memory file */
	uint64_t stranded_ns;
	/* Began on a ring: the kernel socket was never connected, flow_id is that of the local port, which it shares. */
	_Atomic uint8_t fresh;
	_Atomic uint8_t urgent;           /* the peer sends urgent data, which is the kernel's */
	uint8_t reuse;                    /* SO_REUSEADDR, of an adopted one */
	uint8_t opening, bound, odd, linger; /* odd: an option that the stack has not; linger: SO_LINGER is on */
	uint16_t accepts;
	uint32_t linger_s;
	struct vmh_tcp_addr addr;         /* of a fresh one */
	struct vmh_tcp_options opt;       /* as the program wants them */
	struct vmh_tlisten *listening;    /* io; in state LISTEN */
	_Atomic uint8_t listens;          /* listen() was called */
	int backlog;
};

static inline struct vmh_tcps *vmh_tcps_of(struct vmh_obj *o) { return (struct vmh_tcps *)o; }
extern _Atomic int vmh_tcps_on; /* the policy is not `kernel`, and this is not the child of a process with TCP rings */

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

/* Can a ring make it ready? */
static inline bool vmh_tcps_on_rings(const struct vmh_tcps *s)
{
	return vmh_tcps_parked(s) || vmh_tcps_state(s) == VMH_TCPS_LISTEN;
}
static inline bool vmh_tcps_is_fresh(const struct vmh_tcps *s)
{
	return atomic_load_explicit(&s->fresh, memory_order_relaxed) && vmh_tcps_parked(s);
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
struct vmh_tcps *vmh_tcps_install(int fd, bool nonblock); /* NULL: a kernel fd */
void vmh_tcps_created(int fd, int domain, int type, int protocol); /* after socket(2) */
void vmh_tcps_connected(int fd, int r, int err);                   /* after connect(2) */
void vmh_tcps_accepted(int fd, int flags);                         /* after accept(2) */
void vmh_tcps_closed(struct vmh_tcps *s);
void vmh_tcps_recycle(struct vmh_tcps *s);
void vmh_tcps_each(void (*fn)(struct vmh_tcps *s, void *arg), void *arg);
void vmh_tcps_fork_child(void);
void vmh_tcps_set_reason(struct vmh_tcps *s, unsigned reason);

/* tcps_move.c */
int vmh_tcps_export(struct vmh_tcp_conn *c);     /* a frozen one, as a memory file; or -errno */
void vmh_tcps_adopt(struct vmh_tcps *s, int fd);
/* Home for good. must: where that fails the connection is reset, else it stays on the ring. 0, or -errno. */
int vmh_tcps_home(struct vmh_tcps *s, unsigned reason, bool must);
bool vmh_tcps_rest(struct vmh_tcps *s, unsigned reason); /* home from the ring, until it is worth another adoption */
void vmh_tcps_home_all(unsigned reason);
void vmh_tcps_home_fd(int fd, unsigned reason); /* if it is one */
void vmh_tcps_flow_home(uint32_t flow_id, unsigned reason);
void vmh_tcps_ring_gone(struct vmh_ring *r, unsigned reason); /* before it is closed */
void vmh_tcps_service_back(void);

void vmh_tcps_publish(struct vmh_tcps *s); /* it is on the ring now */

#define VMH_TCPS_KERNELS (-1000000) /* libc's call is to be made */

/* tcps_listen.c: listeners on rings. */
void vmh_tcps_listen(struct vmh_tcps *s, int backlog);           /* after listen(2) */
void vmh_tcps_accepts(struct vmh_tcps *s, int fd);               /* the program waits for connections of this one */
static inline void vmh_tcps_waited_for(struct vmh_obj *o, int fd)
{
	if (atomic_load_explicit(&vmh_tcps_of(o)->listens, memory_order_relaxed) &&
	    vmh_tcps_state(vmh_tcps_of(o)) == VMH_TCPS_KERNEL)
		vmh_tcps_accepts(vmh_tcps_of(o), fd);
}
int vmh_tcps_accept(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags);
void vmh_tlisten_refresh(struct vmh_tcps *s);                    /* io held */
void vmh_tlisten_home(struct vmh_tcps *s, unsigned reason);      /* object lock held */
void vmh_tlisten_options(struct vmh_tcps *s);                    /* object lock held */
void vmh_tlisten_fork_child(struct vmh_tcps *s);
bool vmh_tlisten_is(struct vmh_tcps *s, const struct vmh_ring *r, uint32_t flow_id); /* on that ring, or of that flow */

/* tcps_connect.c: 0, -errno or VMH_TCPS_KERNELS */
int vmh_tcps_connect(struct vmh_tcps *s, int fd, const struct sockaddr *a, socklen_t len);
int vmh_tcps_shutdown(struct vmh_tcps *s, int fd, int how);
int vmh_tcps_name(struct vmh_tcps *s, bool peer, struct sockaddr *a, socklen_t *len);
void vmh_tcps_restart(struct vmh_tcps *s);                       /* object lock held: the kernel connects instead */

/* tcps_port.c: local ports whose connections are a ring's */
unsigned vmh_tport_attach(int fd, in_addr_t laddr, in_port_t lport, unsigned ifindex, unsigned flags, uint32_t *flow_id);
void vmh_tport_end(uint32_t flow_id, in_port_t lport);
void vmh_tport_leave(int fd, in_addr_t laddr, in_port_t lport, unsigned ifindex, uint32_t flow_id);
uint32_t vmh_tport_flow(in_port_t lport);                        /* the last one of that port */
bool vmh_tport_is(in_port_t lport);                              /* segments of no connection are answered by a reset */
int vmh_tport_connect(struct vmh_tring *t, unsigned ifindex, struct vmh_tcps *s, struct vmh_tcp_addr *a,
		      const struct vmh_tcp_path *path);
void vmh_tport_gone(const struct vmh_tring *t, uint32_t flow_id); /* ports of a ring that is gone, or of a flow */
void vmh_tport_retire(uint32_t flow_id);
void vmh_tport_work(void);                                       /* by the internal thread */
void vmh_tport_fork_child(void);

/* tcps_end.c */
void vmh_tcps_close(struct vmh_tcps *s);                         /* the last descriptor is about to be closed */
void vmh_tcps_finish(bool exiting);                              /* what was closed is done with before this returns */

/* tcps_wait.c */
struct vmh_twait {
	struct vmh_waiting w;
	uint64_t loops;
	bool now;
	uint8_t state;             /* as long as it is this one */
	uint32_t wanted;           /* EPOLL* */
	int kfd;                   /* readable ends the wait, too; -1: none */
};
void vmh_twait_init(struct vmh_twait *w, const struct vmh_tcps *s, int64_t timeout_ns, uint32_t wanted, int kfd);
int vmh_tcps_wait(struct vmh_tcps *s, struct vmh_twait *w);      /* 0: look again; -EAGAIN, -EINTR */

/* tcps_policy.c */
void vmh_tcps_kernel_round(struct vmh_tcps *s, bool send, ssize_t r); /* a call that the kernel has served */
bool vmh_tcps_wants_adoption(struct vmh_tcps *s);
void vmh_tcps_adoption_took(uint64_t ns);
void vmh_tcps_look(void);                       /* by the internal thread */
void vmh_tcps_watch_from_now(struct vmh_tcps *s); /* object lock held, as for the next */
void vmh_tcps_rested(struct vmh_tcps *s);
static inline void vmh_tcps_ring_call(struct vmh_tcps *s, bool send, size_t n)
{
	VMH_COUNT(s->watch.bytes, n);
	if (send != s->last_sent) {
		s->last_sent = send;
		VMH_COUNT(s->watch.turns, send);
	}
}

/* tcps_io.c: bytes, or -errno */
ssize_t vmh_tcps_recv(struct vmh_tcps *s, int fd, struct msghdr *m, int flags);
ssize_t vmh_tcps_send(struct vmh_tcps *s, int fd, const struct msghdr *m, int flags);
int vmh_tcps_fionread(struct vmh_tcps *s, int fd, int *value);

/* tcps_opt.c */
void vmh_tcps_dress(struct vmh_tcps *s, int fd); /* the kernel socket gets the options that a fresh one was given */
int vmh_tcps_setsockopt(struct vmh_tcps *s, int fd, int level, int name, const void *val, socklen_t len);
int vmh_tcps_getsockopt(struct vmh_tcps *s, int fd, int level, int name, void *val, socklen_t *len);

/* tcps_ring.c: the stack of a ring */
struct vmh_tcps_stash; /* frames that come before the stack has the connection */
struct vmh_tring *vmh_tring_of(struct vmh_ring *r); /* NULL: none to be had */
struct vmh_ring *vmh_tring_ring(struct vmh_tring *t);
struct vmh_tcp *vmh_tring_stack(struct vmh_tring *t);
struct vmh_tcps_stash *vmh_tring_stash(struct vmh_tring *t, const struct vmh_tcp_addr *a);
void vmh_tring_unstash(struct vmh_tring *t, struct vmh_tcps_stash *st, bool feed);
void vmh_tring_flush(struct vmh_tring *t);
void vmh_tring_count(struct vmh_tring *t, int more);
void vmh_tring_close(struct vmh_ring *r);
void vmh_tcps_refresh(struct vmh_tcps *s);  /* io held: bits anew */
void vmh_tcps_urgent_home(void);            /* the internal thread: connections with urgent data go home */
int vmh_trings_progress(void);              /* the internal thread: polls, timers; ms until the next look, -1: none */
bool vmh_trings_any(void);
void vmh_trings_fork_child(void);
unsigned vmh_trings_port_users(in_port_t lport);
unsigned vmh_trings_closing(void);          /* connections that the program has closed, and that are not through yet */
struct vmh_tring *vmh_trings_orphan(struct vmh_tcp_conn **c);
#endif
