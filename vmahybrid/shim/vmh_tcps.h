/* The TCP socket class, a preview that is off by default (VMA_HYBRID_TCP): connections that the kernel has opened are
 * adopted onto a ring, and go home to the kernel before anything that only it can do, close among it.
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
#include <sys/socket.h>

enum vmh_tcps_state {
	VMH_TCPS_KERNEL,   /* and may be adopted */
	VMH_TCPS_ADOPTING,
	VMH_TCPS_RING,
	VMH_TCPS_HOMING,
	VMH_TCPS_STRANDED, /* its state waits in `blob` for a service to bring it home */
	VMH_TCPS_LOST,     /* nobody could: every call says ECONNRESET */
	VMH_TCPS_HOME,     /* the kernel's, for good */
};

struct vmh_tring;

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
	uint8_t last_sent, connecting;
	uint32_t rounds;
	uint64_t retry_ns;
	int64_t rcvtimeo_ns, sndtimeo_ns; /* 0: none */
	struct vmh_tring *tring;
	struct vmh_tcp_conn *conn;
	uint32_t flow_id, ifindex;
	int blob;                         /* of a stranded one: a memory file */
	uint64_t stranded_ns;
};

static inline struct vmh_tcps *vmh_tcps_of(struct vmh_obj *o) { return (struct vmh_tcps *)o; }
extern _Atomic int vmh_tcps_on; /* the policy is not `kernel`, and this is not the child of a process with TCP rings */

static inline unsigned vmh_tcps_state(const struct vmh_tcps *s)
{
	return atomic_load_explicit(&s->state, memory_order_acquire);
}
/* The kernel socket is parked, and says nothing of the connection. */
static inline bool vmh_tcps_parked(const struct vmh_tcps *s)
{
	unsigned state = vmh_tcps_state(s);

	return state >= VMH_TCPS_RING && state <= VMH_TCPS_LOST;
}
static inline uint32_t vmh_tcps_bits(const struct vmh_tcps *s)
{
	return vmh_tcps_parked(s) ? atomic_load_explicit(&s->bits, memory_order_acquire) : 0;
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
void vmh_tcps_created(int fd, int domain, int type, int protocol); /* after socket(2) */
void vmh_tcps_connected(int fd, int r, int err);                   /* after connect(2) */
void vmh_tcps_accepted(int fd, int flags);                         /* after accept(2) */
void vmh_tcps_closed(struct vmh_tcps *s);
void vmh_tcps_recycle(struct vmh_tcps *s);
void vmh_tcps_each(void (*fn)(struct vmh_tcps *s, void *arg), void *arg);
void vmh_tcps_fork_child(void);
void vmh_tcps_set_reason(struct vmh_tcps *s, unsigned reason);

/* tcps_move.c */
void vmh_tcps_adopt(struct vmh_tcps *s, int fd);
/* Home for good. must: where that fails the connection is reset, else it stays on the ring. 0, or -errno. */
int vmh_tcps_home(struct vmh_tcps *s, unsigned reason, bool must);
void vmh_tcps_home_all(unsigned reason);
void vmh_tcps_home_fd(int fd, unsigned reason); /* if it is one */
void vmh_tcps_flow_home(uint32_t flow_id, unsigned reason);
void vmh_tcps_ring_gone(struct vmh_ring *r, unsigned reason); /* before it is closed */
void vmh_tcps_service_back(void);

/* tcps_io.c: bytes, or -errno */
ssize_t vmh_tcps_recv(struct vmh_tcps *s, int fd, struct msghdr *m, int flags);
ssize_t vmh_tcps_send(struct vmh_tcps *s, int fd, const struct msghdr *m, int flags);
int vmh_tcps_fionread(struct vmh_tcps *s, int fd, int *value);
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
int vmh_trings_progress(void);              /* the internal thread: polls, timers; ms until the next look, -1: none */
bool vmh_trings_any(void);
#endif
