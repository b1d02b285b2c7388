/* The slow path of vmh_lock: Drepper's three-state mutex ("Futexes are tricky", mutex 2). */
#include "vmh_lock.h"
#include <signal.h>

#define SPINS 100 /* holders are gone after some 100 ns, unless they were preempted */

__thread struct vmh_held vmh_held;

/* The kernel delivers what was put off before this call returns, with the masks and flags that the program
 * asked for. A handler may jump out of here: nothing is left to do. */
void vmh_let_signals_in(void)
{
	uint64_t mask = vmh_held.mask;

	vmh_held.put_off = 0;
	vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &mask, NULL, sizeof(mask));
}

void vmh_lock_slow(struct vmh_lock *l)
{
	for (int i = 0; i < SPINS; i++) {
		vmh_cpu_relax();
		if (atomic_load_explicit(&l->word, memory_order_relaxed) == 0 && vmh_lock_grab(l))
			return;
	}
	/* Having slept once, we can't know whether others still sleep: take the lock as 2, so that our
	 * unlock wakes the next one. */
	while (atomic_exchange_explicit(&l->word, 2, memory_order_acquire) != 0)
		vmh_sys(SYS_futex, &l->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}
