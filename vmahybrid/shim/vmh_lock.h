/* A small futex mutex: spins briefly, then sleeps, so that a preempted holder costs a context switch
 * and not a time slice. Order of locks in the shim, outermost first (never the other way round):
 *   0. a ring of io_uring, while its requests are gone through   uring.c
 *   1. object lock of a socket (vmh_obj.lock: configuration, options, binding)   sock*.c
 *      then that of the local ports that are being asked for   tcps_port.c
 *   2. control lock (one RPC at a time)      control.c
 *   3. epoll set lock                        epoll.c
 *   4. tx_lock of a socket                   sock_tx.c
 *   5. ring lock                             ring*.c
 *      then the lock of a TCP stack's copy   tcp/tcp_stack.c (it sends: the ring's tx_lock comes inside)
 *   6. demux table                           sock.c
 *   7. receive queue lock of a socket (leaf: nothing is taken inside, except 8 and 9)
 *   8. epoll ready-list lock, sleepers list, rules of libvma.conf (conf.c) (leaves, except for 9)
 *   9. the heap (heap.c): inside any of them, and nothing inside it
 * A thread that holds a ring lock never sleeps and never makes an RPC.
 *
 * Signals: recv, send, poll and close are async-signal-safe, so a handler may come here while the code
 * that it interrupted holds a lock. vmh_held.depth counts the locks of a thread, from before each is
 * taken to after it is free; signal.c puts handlers off while it is not 0, and the last unlock lets
 * them in. A lock is given back by the thread that took it.
 */
#ifndef VMH_LOCK_H
#define VMH_LOCK_H
#include "vmh_base.h"

#define VMH_LOCK_KEPT 4u /* free, for one that sleeps */

struct vmh_lock {
	_Atomic uint32_t word; /* 0 free; else lock.c */
	_Atomic uint32_t own;  /* VMA_THREAD_MODE=0: the owner thread has it */
};

/* Per thread; volatile, because a handler on the same thread reads and writes it. */
struct vmh_held {
	volatile unsigned depth;
	volatile unsigned put_off; /* a handler waits, and every signal that can is blocked */
	uint64_t mask;             /* what was blocked before that */
	uint64_t faults;           /* those of faults among them that wait: they can't, else */
	uint64_t refused_ns;       /* in which locks were kept for others */
	uint64_t refused_last;
	int objs;                  /* references of this thread: at a fork all others are those of threads that the child has not */
	bool owner;                /* VMA_THREAD_MODE=0: the program's one thread; another may end that */
	bool was_owner;            /* and may still have taken a lock as that */
	bool internal;             /* our own thread */
	bool async_cancel;         /* PTHREAD_CANCEL_ASYNCHRONOUS, as the program has it */
};
extern __thread struct vmh_held vmh_held __attribute__((tls_model("initial-exec")));

/* VMA_THREAD_MODE=0: one thread, the owner, takes and gives every lock by plain stores. The internal thread, and any
 * further thread of the program, takes the word, has the kernel put a barrier into the owner (membarrier(2)), and
 * waits for it to be out: dear for them, and right however many threads there are. A program whose other threads do so
 * over and over has no owner any more: its locks are as with VMA_THREAD_MODE=1. (Not where the owner is another thread
 * than the first: its state ends with it, so nobody else may change that.) */
extern _Atomic int vmh_lock_biased;

/* Who is not the owner takes, tries and gives the word. */
VMH_HOT void vmh_lock_word(struct vmh_lock *l);
VMH_HOT bool vmh_trylock_word(struct vmh_lock *l);
VMH_HOT void vmh_unlock_word(struct vmh_lock *l);
/* Lets the one run that the lock is kept for; if that does not come, it is kept no more. */
VMH_COLD void vmh_lock_refused(struct vmh_lock *l);
/* By VMA_THREAD_MODE; the caller becomes the owner. false: no membarrier here, locks are as with mode 1. */
bool vmh_lock_set_mode(int mode);
bool vmh_barrier_possible(void);           /* from here on */
bool vmh_barrier(void);                    /* in every thread of the process; false: the kernel refuses */
void vmh_lock_fork_child(void);            /* the caller is the only thread */
static inline void vmh_lock_reset(struct vmh_lock *l) /* who held it does not exist in this process */
{
	atomic_store(&l->word, 0);
	atomic_store(&l->own, 0);
}
VMH_COLD void vmh_let_signals_in(void);
VMH_COLD void vmh_cancel_later(void); /* a thread with async_cancel */
VMH_COLD void vmh_cancel_now(void);   /* unless it holds a lock or an object */
int vmh_cancel_type(int type, int *before); /* pthread_setcanceltype(3) of libc */
VMH_COLD void *vmh_cancel_find(void); /* it, early: dlsym() takes a kilobyte of stack, which a handler may not have */

static inline void vmh_held_enter(void)
{
	vmh_held.depth = vmh_held.depth + 1;
	atomic_signal_fence(memory_order_seq_cst);
	if (vmh_unlikely(vmh_held.async_cancel) && vmh_held.depth == 1)
		vmh_cancel_later();
}

static inline void vmh_held_leave(void)
{
	unsigned depth = vmh_held.depth - 1;

	atomic_signal_fence(memory_order_seq_cst);
	vmh_held.depth = depth;
	if (vmh_unlikely(vmh_held.put_off) && !depth)
		vmh_let_signals_in();
	if (vmh_unlikely(vmh_held.async_cancel))
		vmh_cancel_now();
}

/* false: somebody has the word, and the caller must take it as anybody does */
static inline bool vmh_lock_owned(struct vmh_lock *l)
{
	atomic_store_explicit(&l->own, 1, memory_order_relaxed);
	atomic_signal_fence(memory_order_seq_cst); /* for the compiler; for the processor membarrier stands in */
	if (vmh_likely(atomic_load_explicit(&l->word, memory_order_acquire) == 0))
		return true;
	atomic_store_explicit(&l->own, 0, memory_order_release);
	return false;
}

static inline bool vmh_trylock(struct vmh_lock *l)
{
	vmh_held_enter();
	if (VMH_GET(vmh_held.owner)) {
		/* a caller further up may have it */
		if (!atomic_load_explicit(&l->own, memory_order_relaxed) && vmh_lock_owned(l))
			return true;
	} else if (vmh_trylock_word(l)) {
		return true;
	}
	vmh_held_leave();
	if (vmh_unlikely(atomic_load_explicit(&l->word, memory_order_relaxed) == VMH_LOCK_KEPT))
		vmh_lock_refused(l);
	return false;
}

static inline void vmh_lock(struct vmh_lock *l)
{
	vmh_held_enter();
	if (!VMH_GET(vmh_held.owner) || !vmh_lock_owned(l))
		vmh_lock_word(l);
}

static inline void vmh_unlock(struct vmh_lock *l)
{
	if (vmh_held.was_owner && atomic_load_explicit(&l->own, memory_order_relaxed))
		atomic_store_explicit(&l->own, 0, memory_order_release);
	else
		vmh_unlock_word(l);
	vmh_held_leave();
}

/* In the child of a fork, of a lock that the forking thread held: another thread of the parent, which does not exist
 * here, may have taken the word of the owner's lock and wait for the owner to be out. */
static inline void vmh_unlock_fork_child(struct vmh_lock *l)
{
	vmh_lock_reset(l);
	vmh_held_leave();
}
#endif
