/* Sleeping and waking. A thread that found nothing while spinning sleeps in poll(2) on: the fds the
 * caller waits for, its own wake eventfd, and, if it is the one that looks at them (watch.c), the fds of rings.
 * Whoever delivers something while somebody sleeps calls vmh_wake_for; close, homecoming and whatever else changes call
 * vmh_wake_all.
 *
 * Protocol of a sleeper: vmh_sleep_begin, then check readiness once more, then vmh_sleep, then
 * vmh_sleep_end. Begin and deliver are ordered by seq_cst: no wake-up is lost.
 */
#ifndef VMH_WAIT_H
#define VMH_WAIT_H
#include "vmh_base.h"
#include <poll.h>
#include <signal.h>

extern _Atomic int vmh_sleepers;
struct vmh_obj;
int vmh_sleep_begin(void);   /* returns the wake eventfd of this thread (owned by it), or -errno */
int vmh_sleep_begin_for(const void *obj); /* the same, to wait for what is delivered to this socket or epoll set alone */
bool vmh_sleep_give_up(void); /* closes that, until the next sleep; false: there is none, or it is in use */
void vmh_sleep_end(void);
static inline void vmh_sleep_over(const int *wakefd)
{
	(void)wakefd;
	vmh_sleep_end();
}
/* Until the end of the block, also when the thread is cancelled: other threads may sleep on what wakes this one. */
#define VMH_SLEEPS_HERE(obj) __attribute__((cleanup(vmh_sleep_over))) const int wakefd = vmh_sleep_begin_for(obj)
/* Between begin and end, around a look at the rings that ends with one at what this thread waits for: what it delivers to
 * itself need not wake it. */
void vmh_sleep_looks(bool on);
VMH_COLD void vmh_wake_all_slow(void);
#define VMH_WAKE_MAX 8u
VMH_COLD void vmh_wake_for_slow(struct vmh_obj *const *objs, unsigned n);
void vmh_wake_for_child(void); /* the internal thread: for the child of a vfork, which left it to it */
static inline void vmh_wake_all(void)
{
	atomic_thread_fence(memory_order_seq_cst);
	if (vmh_unlikely(atomic_load_explicit(&vmh_sleepers, memory_order_relaxed)))
		vmh_wake_all_slow();
}
/* Something was delivered to these, VMH_WAKE_MAX at most. The ring's lock may be held. */
static inline void vmh_wake_for(struct vmh_obj *const *objs, unsigned n)
{
	atomic_thread_fence(memory_order_seq_cst);
	if (vmh_unlikely(atomic_load_explicit(&vmh_sleepers, memory_order_relaxed)))
		vmh_wake_for_slow(objs, n);
}
#define VMH_SLEPT_BY_RINGS 1 /* something came by a ring, and nobody has said that it is for this thread */
/* Sleep on fds[0..n) (events as in poll) plus rings plus the wake fd; fds[].revents are filled in.
 * timeout_ns < 0: for ever. mask: as ppoll. 0 = woken or timed out, VMH_SLEPT_BY_RINGS, -EINTR, other -errno. */
int vmh_sleep(struct pollfd *fds, unsigned n, int64_t timeout_ns, const sigset_t *mask, int wakefd);
struct vmh_ring;
/* The same, and of the rings `only` one. */
int vmh_sleep_on(struct vmh_ring *only, struct pollfd *fds, unsigned n, int64_t timeout_ns, const sigset_t *mask,
		 int wakefd);

/* ppoll(2) that has said EINVAL, by another call (poll_few.c). ts: the kernel writes to it. */
VMH_COLD long vmh_poll_few(struct pollfd *p, unsigned n, struct timespec *ts, const sigset_t *mask, bool cancellable);

/* Signals (signal.c wraps the handlers that the program installs): how many handlers without
 * SA_RESTART, and how many at all, have run in this thread. A spinning call compares. */
extern __thread volatile sig_atomic_t vmh_signals_any __attribute__((tls_model("initial-exec")));
extern __thread volatile sig_atomic_t vmh_signals_norestart __attribute__((tls_model("initial-exec")));
bool vmh_in_handler(void); /* of a signal, this thread; also after a longjmp() out of one */

/* A call that spins. Where more threads of the program do so than it has processors, each would take the processor from
 * the others for a whole slice of milliseconds: they take turns (VMA_HYBRID_SPIN_TURNS). */
extern __thread bool vmh_spins __attribute__((tls_model("initial-exec"))); /* this thread is counted */
#define VMH_SPIN_TURN 16 /* looks */
void vmh_spin_init(void);               /* at the start of the process */
/* After each VMH_SPIN_TURN looks in vain. ends: the time for which it may spin is limited; false: it is over. */
VMH_COLD bool vmh_spin_goes_on(uint64_t looks, bool ends);
VMH_COLD void vmh_spin_over(void);
/* Whether a thread that spins offers its processor to other programs, once in a millisecond; and how many of the offers
 * since the last question were taken, and how long others had it, then and by the kernel's slices. */
extern _Atomic bool vmh_spin_offers;
struct vmh_offered {
	uint32_t all, taken;
	uint64_t gone_ns;
} vmh_spin_offered(void);
static inline void vmh_spin_ends(void)
{
	if (vmh_unlikely(vmh_spins))
		vmh_spin_over();
}
static inline void vmh_spin_left(const char *here)
{
	(void)here;
	vmh_spin_ends();
}
/* Ends where the block does, also when the thread is cancelled. */
#define VMH_SPINS_HERE __attribute__((cleanup(vmh_spin_left), unused)) const char spins_here = 0

/* The counters as they were when a call began. What it has to set up may take longer than the wait. */
struct vmh_signals {
	sig_atomic_t any, norestart;
};

static inline struct vmh_signals vmh_signals_now(void)
{
	return (struct vmh_signals){ vmh_signals_any, vmh_signals_norestart };
}

/* timed: the call has a timeout, and no handler restarts it (signal(7)) */
static inline bool vmh_signals_end(const struct vmh_signals *began, bool timed)
{
	return vmh_signals_norestart != began->norestart || (timed && vmh_signals_any != began->any);
}

/* A call that blocks: what ends it besides that for which it waits. Both socket classes have it. */
struct vmh_waiting {
	uint64_t deadline;         /* 0: none */
	struct vmh_signals began;
	bool timed;                /* SO_RCVTIMEO */
	struct vmh_ring *only;     /* the ring by which it comes; NULL: any */
	struct vmh_obj *obj;       /* to which; NULL: any */
};
VMH_HOT void vmh_waiting_begin(struct vmh_waiting *w, int64_t timeout_ns); /* 0: for ever */
/* One sleep, on `p` as well, unless ready(arg) after a poll of the rings. 0: look again. -EAGAIN: timed out. -EINTR. */
VMH_COLD int vmh_doze(const struct vmh_waiting *w, struct pollfd *p, bool (*ready)(void *arg), void *arg);

static inline bool vmh_interrupted(const struct vmh_waiting *w)
{
	return vmh_signals_end(&w->began, w->timed);
}
#endif
