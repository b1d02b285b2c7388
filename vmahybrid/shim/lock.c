/* The word of a lock: Drepper's three-state mutex ("Futexes are tricky", mutex 2). */
#include "vmh_lock.h"
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <sched.h>
#include <signal.h>

#define SPINS 100 /* holders are gone after some 100 ns, unless they were preempted */
#define NAP_AFTER 1000
#define NAP_NS 50000
#define OUSTS_MAX 256 /* by threads of the program, until nobody owns its locks any more */

enum { UNOWNED, OWNED, ENDING };  /* vmh_lock_biased; while it may end it is still biased */
enum { SINGLE, SPIN, MUTEX, MANY_THREADS }; /* VMA_THREAD_MODE */

_Atomic int vmh_lock_biased;
static int mode = SPIN;
static struct vmh_held *owner; /* NULL: not the main thread, whose memory alone outlives it */
static _Atomic unsigned ousts;

__thread struct vmh_held vmh_held;

/* The kernel delivers what was put off before this call returns, with the masks and flags that the program
 * asked for. A handler may jump out of here: nothing is left to do. */
void vmh_let_signals_in(void)
{
	uint64_t mask = vmh_held.mask;

	vmh_held.put_off = 0;
	vmh_held.faults = 0;
	vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &mask, NULL, sizeof(mask));
}

static long barrier(int command)
{
	return vmh_sys(SYS_membarrier, command, 0, 0);
}

bool vmh_barrier_possible(void)
{
	return barrier(MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED) >= 0;
}

bool vmh_barrier(void)
{
	return barrier(MEMBARRIER_CMD_PRIVATE_EXPEDITED) >= 0;
}

static inline bool grab(struct vmh_lock *l)
{
	uint32_t free_ = 0;

	return atomic_compare_exchange_strong_explicit(&l->word, &free_, 1, memory_order_acquire, memory_order_relaxed);
}

VMH_COLD static void lock_slow(struct vmh_lock *l)
{
	for (int i = mode == MUTEX ? SPINS : 0; i < SPINS; i++) {
		if (mode == MANY_THREADS)
			sched_yield();
		else
			vmh_cpu_relax();
		if (atomic_load_explicit(&l->word, memory_order_relaxed) == 0 && grab(l))
			return;
	}
	/* Having slept once, we can't know whether others still sleep: take the lock as 2, so that our
	 * unlock wakes the next one. */
	while (atomic_exchange_explicit(&l->word, 2, memory_order_acquire) != 0)
		vmh_sys(SYS_futex, &l->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
}

static bool too_often(void)
{
	return !vmh_held.internal && owner && (atomic_fetch_add(&ousts, 1) + 1) % OUSTS_MAX == 0;
}

static bool turn(int from, int to)
{
	return atomic_compare_exchange_strong(&vmh_lock_biased, &from, to);
}

/* A barrier in the owner. One that holds no lock is none from then on, if it was ousted too often: it tells of a lock
 * (depth) before it looks whether it is the owner. */
static void stop_owner(void)
{
	bool ends = too_often() && turn(OWNED, ENDING);

	if (ends)
		VMH_SET(owner->owner, false);
	vmh_barrier();
	if (!ends)
		return;
	if (owner->depth) {
		VMH_SET(owner->owner, true);
		atomic_store(&vmh_lock_biased, OWNED);
	} else {
		vmh_barrier(); /* for everybody who takes a word from now on, too */
		atomic_store(&vmh_lock_biased, UNOWNED);
	}
}

/* The owner itself, about to take its only lock. */
static void give_up(void)
{
	if (atomic_load(&ousts) >= OUSTS_MAX && vmh_held.depth == 1 && turn(OWNED, UNOWNED))
		VMH_SET(vmh_held.owner, false);
}

/* Of the owner, by who has the word. If it is inside, the word is given back. */
VMH_COLD static bool try_oust(struct vmh_lock *l)
{
	stop_owner();
	if (!atomic_load_explicit(&l->own, memory_order_acquire))
		return true;
	vmh_unlock_word(l);
	return false;
}

/* Waits for it. */
VMH_COLD static void oust(struct vmh_lock *l)
{
	const struct timespec nap = { 0, NAP_NS };

	stop_owner();
	for (int i = 0; atomic_load_explicit(&l->own, memory_order_acquire); i++) {
		if (i < NAP_AFTER)
			vmh_cpu_relax();
		else /* preempted, or in a call to the service; it does not know that somebody waits */
			vmh_sys(SYS_clock_nanosleep, CLOCK_MONOTONIC, 0, &nap, NULL);
	}
}

void vmh_lock_word(struct vmh_lock *l)
{
	if (vmh_unlikely(VMH_GET(vmh_held.owner)))
		give_up();
	if (vmh_unlikely(!grab(l)))
		lock_slow(l);
	if (vmh_unlikely(atomic_load_explicit(&vmh_lock_biased, memory_order_acquire)) && !VMH_GET(vmh_held.owner))
		oust(l);
}

bool vmh_trylock_word(struct vmh_lock *l)
{
	return vmh_likely(grab(l)) &&
	       (vmh_likely(!atomic_load_explicit(&vmh_lock_biased, memory_order_acquire)) || try_oust(l));
}

VMH_COLD static void wake_one(struct vmh_lock *l)
{
	vmh_sys(SYS_futex, &l->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

void vmh_unlock_word(struct vmh_lock *l)
{
	if (vmh_unlikely(atomic_exchange_explicit(&l->word, 0, memory_order_release) == 2))
		wake_one(l);
}

bool vmh_lock_set_mode(int wanted)
{
	mode = wanted;
	if (wanted != SINGLE)
		return true;
	if (!vmh_barrier_possible()) {
		mode = SPIN;
		return false;
	}
	atomic_store(&ousts, 0);
	atomic_store(&vmh_lock_biased, OWNED);
	/* who took a word without seeing that has done so for everybody to see */
	vmh_barrier();
	owner = vmh_sys(SYS_gettid) == vmh_sys(SYS_getpid) ? &vmh_held : NULL;
	vmh_held.owner = vmh_held.was_owner = true;
	return true;
}

void vmh_lock_fork_child(void)
{
	vmh_held.owner = atomic_load(&vmh_lock_biased);
	vmh_held.was_owner |= vmh_held.owner;
	if (owner != &vmh_held)
		owner = NULL;
}
