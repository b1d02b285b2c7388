/* What the files of select, poll and epoll share: the wait loop, and the epoll set.
 *
 * Locks (vmh_lock.h has the whole order): the set lock is vmh_obj.lock of the set (3) and guards the
 * list of its items and the kernel set's registration of UDP members. Leaves, in this order: the
 * items lock of a member (which sets it is in), the ready lock of a set. Invariants:
 *  1. An item is linked in its set and in its member, or in neither; both under the set lock.
 *  2. What epoll_ctl sets in an item (events, data, disarmed) changes under set lock and ready lock.
 *  3. A level item whose socket is ready is on the ready list; one that is not ready may still be.
 *  4. Items and sets live in pools whose memory is never given back.
 *  5. Of a TCP member that the kernel serves the item may be behind (epoll_plain.c): its events are the kernel's to
 *     say, and whether it is one. Its data is true.
 */
#ifndef VMH_IOMUX_INT_H
#define VMH_IOMUX_INT_H
#include "vmh_iomux.h"
#include "vmh_params.h"
#include "vmh_stats.h"
#include "vmh_wait.h"

#define VMH_IN (EPOLLIN | EPOLLRDNORM) /* what a ring can make ready; POLL* have the same values */
#define VMH_OUT (EPOLLOUT | EPOLLWRNORM) /* a UDP socket on a ring can always send */
#define VMH_NOT_RX (VMH_OUT | EPOLLWRBAND) /* ready with no more than this: nothing to receive, and not counted as such */

/* iomux_loop.c: spin, sleep, and the rules of when the kernel is asked */
struct vmh_oslook {            /* relaxed: a lost count shifts one look by one loop */
	int64_t ratio_left, skip_left;
	uint64_t last_ns;   /* when there was a look that no count asked for */
	uint64_t called_ns; /* when a call last found rings ready */
};

struct vmh_waiter {
	/* Fill in the caller's result. os: ask the kernel too. > 0 ready, 0 nothing, -errno. */
	int (*collect)(struct vmh_waiter *w, bool os);
	bool (*on_ring)(struct vmh_waiter *w); /* may a ring make it ready: is spinning worth it? */
	sig_atomic_t sig0;             /* vmh_signals_any, when the call began */
	struct pollfd *fds;            /* kernel fds to sleep on */
	unsigned nfds;
	struct vmh_obj *closed_with;   /* return EBADF when this was closed; may be NULL */
	struct vmh_obj *only;          /* what rings may make ready, an epoll set or a socket; NULL: several */
	struct vmh_oslook *look;
	struct vmh_iomux_stats *stats;
	const sigset_t *os_mask;       /* for the kernel calls of a zero timeout */
	bool is_select;                /* POLLNVAL is EBADF in the first look, and later all that was asked for */
	bool hurries;                  /* collect is to be called again in a millisecond */
	bool os_saw;                   /* the kernel was asked already, and nothing was ready */
	bool forced;                   /* spin though no ring may make it ready: VMA_SELECT_POLL_OS_FORCE */
	bool faults;                   /* the caller has no room for what is ready: EFAULT */
	bool fresh;                    /* the sleep has just filled in fds[].revents */
	uint64_t began;                /* when the call had looked once, and waits; 0: it has not */
	int ring_n;                    /* of the last collect: ready by rings */
	int ring_rx, os_rx;            /* and those of either side that may have something to receive, for the statistics */
};

int vmh_waiter_run(struct vmh_waiter *w, int64_t timeout_ns, const sigset_t *mask);
/* A wait that the kernel alone served: n or -errno, and how many of those n may have something to receive. */
void vmh_iomux_count_os(struct vmh_iomux_stats *s, int n, int rx);
bool vmh_has_hung_up(int fd); /* says the kernel: now */
int vmh_poll_rx(const struct pollfd *fds, nfds_t nfds);
bool vmh_os_skip_due(struct vmh_waiter *w); /* rings are ready: is it the kernel's turn too? */
void *vmh_scratch_new(size_t bytes);        /* not malloc: poll and select may run in a signal handler */
void *vmh_scratch_certain(size_t bytes);    /* the same, where there is no more by what is kept: for a moment */
void vmh_scratch_fork_child(void);
void vmh_scratch_free(void *p, size_t bytes);
void *vmh_scratch_lent(size_t bytes);       /* the same, for a moment; not of zeros */
void vmh_scratch_give_back(void *p);

/* Is the kernel polled for a set with any socket of ours, on a ring or not? For pipes alone, or a poll() that is a
 * sleep, a processor would be burnt for nothing. */
static inline bool vmh_os_forced(void)
{
	return vmh_params.select_poll_os_force && vmh_params.select_poll;
}

/* iomux.c, for select as well */
bool vmh_fd_wanted(int fd);                 /* can rings make this fd ready, now or later, or is it spun for? */
int vmh_poll_run(struct pollfd *fds, unsigned n, int64_t timeout_ns, const sigset_t *mask,
		 struct vmh_oslook *look, struct vmh_iomux_stats *stats);

/* wait.c */
void vmh_wait_fork_child(void);
/* sleep.c */
void vmh_sleep_interrupted(void); /* a handler is about to run in this thread, and may not come back */
void vmh_sleep_signal(void);      /* it ran: a sleep that is about to begin must not */

/* epoll sets */
struct vmh_ep;
struct vmh_epitem {
	struct vmh_epitem *member_next, **member_pprev; /* member->items */
	struct vmh_epitem *set_next, **set_pprev;       /* set->items; set_next also the free list */
	struct vmh_epitem *rdy_next, *rdy_prev;         /* rdy_next == NULL: not on the ready list */
	struct vmh_ep *set;                             /* NULL: free */
	struct vmh_obj *member;
	uint64_t data;
	uint64_t call;             /* the harvest that reported it last */
	uint32_t events;           /* as the user wants, with flags */
	int fd;                    /* with the member, the key that the kernel uses */
	uint8_t disarmed;          /* ONESHOT fired */
	uint8_t sent;              /* an EPOLLOUT edge is due; ready lock */
	uint8_t silent;            /* the kernel has it without its events: parked; set lock */
};

#define VMH_EP_FOREIGN 64 /* words of the filter below */

struct vmh_ep {
	struct vmh_obj obj;        /* first: class EPOLL */
	struct vmh_epitem *items;
	unsigned nitems, noneshot; /* set lock to write; read by others too */
	struct vmh_lock rdy_lock;
	struct vmh_epitem rdy;     /* head of the ring of ready items */
	_Atomic unsigned rdy_n;
	_Atomic uint64_t calls;
	_Atomic uint8_t maybe_ring; /* some member was on a ring; cleared by the search that finds none */
	_Atomic uint8_t out_armed; /* the kernel owes the EPOLLOUT of an ADD or MOD: ask it too, once */
	_Atomic uint8_t nested;    /* VMH_R_*: inside another set, or passed on: members stay on the kernel */
	struct vmh_epitem *hint;   /* the member that was last found on a ring */
	_Atomic int kwait;         /* threads that sleep in the kernel's epoll_wait, blind to rings */
	_Atomic int kwait_fd;      /* an fd of the set, for kicking them */
	_Atomic uint8_t kick_on;
	_Atomic uint64_t kick_ns;  /* when */
	uint8_t flip;
	_Atomic uint8_t tcp;       /* a TCP socket was a member */
	uint64_t foreign[VMH_EP_FOREIGN]; /* Bloom filter of the data of kernel-only members */
	struct vmh_oslook look;
	struct vmh_iomux_stats *stats;
	struct vmh_ep *free_next;
};
static inline struct vmh_ep *vmh_ep_of(struct vmh_obj *o) { return (struct vmh_ep *)o; }

/* epoll_item.c */
struct vmh_ep *vmh_ep_alloc(void);
void vmh_ep_free(struct vmh_ep *e);
struct vmh_epitem *vmh_epitem_alloc(void);
void vmh_epitem_free(struct vmh_epitem *it);
struct vmh_epitem *vmh_epitem_find(struct vmh_ep *e, struct vmh_obj *member, int fd);  /* set lock held; -1: any */
bool vmh_epitem_link(struct vmh_epitem *it);    /* set lock held; false: the member was closed meanwhile */
void vmh_epitem_unlink(struct vmh_epitem *it);  /* set lock held; frees it */
/* A set that the member is in and that matches, held; NULL: none. */
struct vmh_ep *vmh_ep_of_member(struct vmh_obj *member, bool (*match)(const struct vmh_ep *e));
void vmh_ep_mark_ring(struct vmh_obj *member);  /* maybe_ring in all its sets */
unsigned vmh_epoll_sets_of(struct vmh_obj *member, const void **sets, unsigned max); /* how many */
void vmh_epoll_fork_child(void); /* after vmh_stats_fork_child and vmh_sock_fork_child */

/* A parked TCP member, of which the kernel knows nothing true. */
bool vmh_epitem_parked(const struct vmh_epitem *it);
struct vmh_tcps *vmh_epitem_tcp(const struct vmh_epitem *it); /* NULL: the member is none */
bool vmh_epitem_hushed(const struct vmh_epitem *it); /* or one that is on its way there */
bool vmh_epitem_on_ring(const struct vmh_epitem *it);

/* epoll_set.c: the ready list */
void vmh_ep_rdy_remove(struct vmh_ep *e, struct vmh_epitem *it); /* ready lock held */
void vmh_ep_push(struct vmh_epitem *it);        /* the item can't go away: items lock or set lock held */
bool vmh_ep_push_if_ready(struct vmh_epitem *it);
/* Does a send make a new edge? Not for ONESHOT: there the kernel's own EPOLLOUT waits since ADD or MOD. */
static inline bool vmh_ep_out_edges(const struct vmh_epitem *it)
{
	return (it->events & VMH_OUT) && (it->events & (EPOLLET | EPOLLONESHOT)) == EPOLLET;
}
void vmh_ep_push_out(struct vmh_epitem *it);    /* items lock held */
/* Take up to max ready items, at most once each per call number. */
/* Adds what rings have for the sockets of these n events, without taking entries of their own. */
void vmh_ep_join(struct vmh_ep *e, struct epoll_event *evs, int n, uint64_t call);
int vmh_ep_harvest(struct vmh_ep *e, int epfd, struct epoll_event *out, int max, uint64_t call);

/* epoll.c */
long vmh_ep_kernel_ctl(int epfd, int op, int fd, struct epoll_event *ev);
void vmh_epitem_tell(struct vmh_epitem *it, int epfd, bool silent); /* the kernel; set lock held */
bool vmh_ep_foreign(const struct vmh_ep *e, uint64_t data);

/* epoll_plain.c: calls on members that are the kernel's, which their items do not see */
void vmh_ep_open(const struct vmh_epitem *it, int epfd); /* set lock held: from here on, if it is such a one */
void vmh_ep_shut(int fd);                                /* for calls that begin after this */
void vmh_ep_shut_all(struct vmh_ep *e);                  /* set lock held */
bool vmh_ep_behind(int fd);                              /* such a call was made since it caught up */
bool vmh_ep_catch_up(struct vmh_ep *e, struct vmh_obj *member, int fd); /* set lock held; false: nobody says how */
void vmh_ep_caught_up(int fd);
void vmh_ep_plain_fork_child(void);

/* epoll_kick.c: threads in the kernel's epoll_wait */
#define VMH_KICK_NS 1000000000u /* longest life of a kick */
bool vmh_ep_is_kick(uint64_t data);
/* The data by which the kernel has a member that it is to be silent about. Its ERR or HUP, which it tells all the same, is
 * nobody's then: the program's own data may be another member's, too. */
uint64_t vmh_ep_silent_data(void);
bool vmh_ep_is_silent(uint64_t data);
bool vmh_ep_can_kick(void);                 /* there is, or was to be had, an eventfd for it */
void vmh_ep_kick_seen(struct vmh_ep *e, int epfd); /* takes back a kick that nobody waits for any more */
void vmh_ep_kick(struct vmh_ep *e);         /* after maybe_ring was set; takes the set lock */
void vmh_ep_kernel_enter(struct vmh_ep *e, int epfd);
void vmh_ep_kernel_leave(struct vmh_ep *e, int epfd);
void vmh_ep_kick_fork_child(void);
#endif
