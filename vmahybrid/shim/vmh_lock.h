/* A small futex mutex: spins briefly, then sleeps, so that a preempted holder costs a context switch
 * and not a time slice. Order of locks in the shim, outermost first (never the other way round):
 *   1. object lock of a socket (vmh_obj.lock: configuration, options, binding)   sock*.c
 *   2. control lock (one RPC at a time)      control.c
 *   3. epoll set lock                        epoll.c
 *   4. tx_lock of a socket                   sock_tx.c
 *   5. ring lock                             ring*.c
 *   6. receive queue lock of a socket (leaf: nothing is taken inside, except 7)
 *   7. epoll ready-list lock, sleepers list, demux table (leaves)
 * A thread that holds a ring lock never sleeps and never makes an RPC.
 */
#ifndef VMH_LOCK_H
#define VMH_LOCK_H
#include "vmh_base.h"
#include <linux/futex.h>

struct vmh_lock {
	_Atomic uint32_t word; /* 0 free, 1 held, 2 held and somebody sleeps */
};

void vmh_lock_slow(struct vmh_lock *l);

static inline bool vmh_trylock(struct vmh_lock *l)
{
	uint32_t free_ = 0;
	return atomic_compare_exchange_strong_explicit(&l->word, &free_, 1, memory_order_acquire, memory_order_relaxed);
}

static inline void vmh_lock(struct vmh_lock *l)
{
	if (vmh_unlikely(!vmh_trylock(l)))
		vmh_lock_slow(l);
}

static inline void vmh_unlock(struct vmh_lock *l)
{
	if (vmh_unlikely(atomic_exchange_explicit(&l->word, 0, memory_order_release) == 2))
		vmh_sys(SYS_futex, &l->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}
#endif
