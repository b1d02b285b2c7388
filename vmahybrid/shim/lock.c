/* The word of a lock: Drepper's three-state mutex ("Futexes are tricky", mutex 2), with two states more, so that a
 * thread that never sleeps can't keep the lock from those that do: a sleeper is some 50 us late for a lock that a poller
 * takes again after 100 ns. Who was woken in vain, and has waited for STARVES_NS, leaves STARVING, and then an unlock
 * keeps the lock for those who are woken (KEPT), until the starving one has had it. Nobody but a sleeper takes it then,
 * unless none comes in COMES_NS. */
#include "vmh_lock.h"
#include <dlfcn.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>

#define SPINS 100 /* holders are gone after some 100 ns, unless they were preempted */
#define STARVES_NS 2000000
#define COMES_NS 10000000 /* or it is put off by what may run before it, and the lock is for everybody again */
#define NAP_AFTER 1000
#define NAP_NS 50000
#define OUSTS_MAX 256 /* by threads of the program, until nobody owns its locks any more */

enum { FREE, HELD, SLEPT_ON, STARVING, KEPT = VMH_LOCK_KEPT }; /* vmh_lock.word; STARVING is held and slept on, too */
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

static _Atomic(void *) cancel_type;

void *vmh_cancel_find(void)
{
	void *at = dlsym(RTLD_NEXT, "pthread_setcanceltype"); /* ours is in front of it */

	atomic_store_explicit(&cancel_type, at, memory_order_relaxed); /* two threads may: they write the same value */
	return at;
}

int vmh_cancel_type(int type, int *before)
{
	int (*real)(int, int *);
	void *at = atomic_load_explicit(&cancel_type, memory_order_relaxed);

	if (!at)
		at = vmh_cancel_find();
	memcpy(&real, &at, sizeof(real));
	return real(type, before);
}

void vmh_cancel_later(void)
{
	vmh_cancel_type(PTHREAD_CANCEL_DEFERRED, NULL);
}

void vmh_cancel_now(void)
{
	if (!vmh_held.depth && !vmh_held.objs)
		vmh_cancel_type(PTHREAD_CANCEL_ASYNCHRONOUS, NULL);
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

static inline bool turn_word(struct vmh_lock *l, uint32_t from, uint32_t to)
{
	return atomic_compare_exchange_strong_explicit(&l->word, &from, to, memory_order_acquire, memory_order_relaxed);
}

static inline bool grab(struct vmh_lock *l)
{
	return turn_word(l, FREE, HELD);
}

static void sleep_on(struct vmh_lock *l, uint32_t word)
{
	const struct timespec comes = { 0, COMES_NS };

	vmh_sys(SYS_futex, &l->word, FUTEX_WAIT_PRIVATE, word, word == KEPT ? &comes : NULL, NULL, 0);
}

static void spin_for(struct vmh_lock *l, uint64_t since)
{
	for (int i = mode == MUTEX ? SPINS : 0; i < SPINS; i++) {
		if (mode != MANY_THREADS)
			vmh_cpu_relax();
		else if (vmh_now_ns() - since < STARVES_NS)
			sched_yield();
		else
			return; /* each of these may take a whole turn of another thread */
		if (atomic_load_explicit(&l->word, memory_order_relaxed) == FREE)
			return;
	}
}

VMH_COLD static void lock_slow(struct vmh_lock *l)
{
	uint64_t since = vmh_now_ns();
	bool starves = false;

	for (unsigned sleeps = 0;;) {
		spin_for(l, since);
		uint32_t word = atomic_load_explicit(&l->word, memory_order_relaxed), wanted;

		if (word == FREE || (word == KEPT && sleeps)) {
			/* Having slept once, we can't know whether others still sleep: our unlock wakes the next one. A lock that
			 * is kept for another one, who starves, is handed on. */
			wanted = !sleeps ? HELD : word == KEPT && !starves ? STARVING : SLEPT_ON;
			if (turn_word(l, word, wanted))
				return;
			continue;
		}
		wanted = word == KEPT || word == STARVING ? word : starves ? STARVING : SLEPT_ON;
		if (word != wanted && !turn_word(l, word, wanted))
			continue;
		sleep_on(l, wanted);
		starves = starves || (++sleeps > 1 && vmh_now_ns() - since > STARVES_NS);
	}
}

static long wake(struct vmh_lock *l)
{
	return vmh_sys(SYS_futex, &l->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
}

/* Somebody may have gone to sleep on it meanwhile. */
static void keep_no_more(struct vmh_lock *l)
{
	if (turn_word(l, KEPT, FREE))
		wake(l);
}

/* Without a pause, or now and then: the time between two refusals counts, but not all of a long one. */
VMH_COLD void vmh_lock_refused(struct vmh_lock *l)
{
	uint64_t now = vmh_now_ns(), gap = now - vmh_held.refused_last;

	vmh_held.refused_ns += gap < COMES_NS / 8 ? gap : COMES_NS / 8;
	if (vmh_held.refused_ns > COMES_NS) {
		vmh_held.refused_ns = 0;
		keep_no_more(l);
	}
	vmh_held.refused_last = now;
	if (!vmh_held.depth)
		sched_yield();
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

VMH_COLD static void wake_one(struct vmh_lock *l, bool starving)
{
	bool kept = starving && turn_word(l, FREE, KEPT);

	if (wake(l) <= 0 && kept)
		keep_no_more(l); /* who starves is awake, and takes it */
}

void vmh_unlock_word(struct vmh_lock *l)
{
	uint32_t was = atomic_exchange_explicit(&l->word, FREE, memory_order_release);

	if (vmh_unlikely(was > HELD))
		wake_one(l, was == STARVING);
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
