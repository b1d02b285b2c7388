/* A call that waits: how it sleeps, and how it spins. */
#include "vmh_iomux_int.h"
#include "vmh_params.h"
#include "vmh_sleep.h"
#include <limits.h>
#include <sched.h>
#include <sys/resource.h>

void vmh_waiting_begin(struct vmh_waiting *w, int64_t timeout_ns)
{
	*w = (struct vmh_waiting){ .began = vmh_signals_now() };
	if (timeout_ns) {
		w->deadline = vmh_now_ns() + (uint64_t)timeout_ns;
		w->timed = true;
	}
}

/* false: it is over. */
static bool time_left(const struct vmh_waiting *w, int64_t *left)
{
	uint64_t now;

	*left = -1;
	if (!w->deadline)
		return true;
	now = vmh_now_ns();
	*left = (int64_t)(w->deadline - now);
	return now < w->deadline;
}

static bool looks(bool (*ready)(void *arg), void *arg)
{
	bool is;

	vmh_sleep_looks(true);
	is = ready(arg);
	vmh_sleep_looks(false);
	return is;
}

int vmh_doze(const struct vmh_waiting *w, struct pollfd *p, bool (*ready)(void *arg), void *arg)
{
	int64_t left;
	int err = 0;

	if (!time_left(w, &left))
		return -EAGAIN;
	VMH_SLEEPS_HERE(w->obj);
	/* a handler that ran before begin is seen here; one that runs after it wakes the sleep */
	if (vmh_interrupted(w))
		return -EINTR;
	while (!looks(ready, arg) && time_left(w, &left)) {
		sig_atomic_t any = vmh_signals_any;

		if (err == VMH_SLEPT_BY_RINGS)
			vmh_watch_in_vain();
		if (wakefd < 0 && (left < 0 || left > 1000000))
			left = 1000000; /* no eventfd to be had: look again every millisecond */
		err = vmh_sleep_on(w->only, p, 1, left, NULL, wakefd);
		/* a handler with SA_RESTART ended the sleep, not the call */
		if (err == -EINTR && vmh_signals_any != any && !vmh_interrupted(w))
			err = 0;
		if (err != VMH_SLEPT_BY_RINGS)
			return err;
	}
	return 0;
}

__thread bool vmh_spins __attribute__((tls_model("initial-exec")));
static _Atomic int spinners;
static int processors = INT_MAX; /* of the program; where nobody knows, nobody takes turns */

void vmh_spin_init(void)
{
	cpu_set_t mine = { 0 }; /* the kernel fills as much as it has */

	if (vmh_params.hybrid_spin_turns && vmh_sys(SYS_sched_getaffinity, 0, sizeof(mine), &mine) > 0)
		processors = CPU_COUNT(&mine);
}

#define LONG_LOOKS 256 /* a shorter wait is not worth two atomic operations */
#define OFFER_NS 1000000u /* more often would cost who is beside one that computes more than a tenth of its time */
#define TAKEN_NS 5000u    /* a sched_yield() that takes less found nobody */
#define GONE_NS 1000000u  /* from one turn to the next: the processor was taken */
#define LONG_NS 1000000000u /* or nobody has looked: offers were off when the wait began */

_Atomic bool vmh_spin_offers;
static _Atomic uint32_t offers, taken;
static _Atomic uint64_t gone_ns;

struct vmh_offered vmh_spin_offered(void)
{
	struct vmh_offered o = { .taken = atomic_exchange(&taken, 0), .gone_ns = atomic_exchange(&gone_ns, 0) };

	o.all = atomic_exchange(&offers, 0);
	return o;
}

#define REST_MIN_NS 1000000000u /* for so long a thread does not spin; doubled up to the next */
#define REST_MAX_NS 64000000000u
#define REST_ENDS_NS 30000000000u /* after the last one: then it begins anew */
#define OFFERS 64
#define LOST_NS 20000000u /* at once: more than a turn of one that computes; a cgroup's quota may be used up */

static __thread struct {
	uint64_t turn_ns, offer_ns, since_ns, gone_ns;
	uint64_t rests_until, rest_ns;
	uint64_t asked_ns, began_ns;
	uint64_t slept_ns, sleeps_ns; /* each so long; of a real-time class */
	uint32_t offers, taken, vain;
	bool by_policy, realtime, in_vain;
} my __attribute__((tls_model("initial-exec")));

static void had_by_others(uint64_t ns, bool by_policy)
{
	my.gone_ns += ns;
	if (by_policy)
		atomic_fetch_add_explicit(&gone_ns, ns, memory_order_relaxed);
}

static void rest(uint64_t now)
{
	my.rest_ns = !my.rest_ns || now - my.rests_until > REST_ENDS_NS ? REST_MIN_NS
		   : my.rest_ns < REST_MAX_NS ? my.rest_ns * 2 : my.rest_ns;
	my.rests_until = now + my.rest_ns;
}

/* Do others want the processor of this thread so much that it is to rest? */
static void weigh(uint64_t now)
{
	uint64_t share = (uint64_t)vmh_params.hybrid_spin_share;

	if (my.taken * 100ull >= my.offers * share || my.gone_ns * 100 >= (now - my.since_ns) * share)
		rest(now);
	my.offers = my.taken = 0;
	my.gone_ns = 0;
	my.since_ns = now;
}

/* Does another thread wait for this processor? The kernel tells nobody, but gives it to one when it is offered, if that
 * one has had less than its share. One that computes has slices of milliseconds anyway. */
static void look_for_others(uint64_t now, bool first, bool by_policy)
{
	uint64_t then;

	if (!first && now - my.turn_ns >= GONE_NS && now - my.turn_ns < LONG_NS) {
		had_by_others(now - my.turn_ns, by_policy);
		if (now - my.turn_ns >= LOST_NS && my.rests_until < now + REST_MIN_NS)
			my.rests_until = now + REST_MIN_NS;
	}
	my.turn_ns = now;
	if (now - my.offer_ns < OFFER_NS)
		return;
	sched_yield();
	then = vmh_now_ns();
	my.offers++;
	if (by_policy)
		atomic_fetch_add_explicit(&offers, 1, memory_order_relaxed);
	if (then - now >= TAKEN_NS) {
		my.taken++;
		if (by_policy)
			atomic_fetch_add_explicit(&taken, 1, memory_order_relaxed);
		had_by_others(then - now, by_policy);
	}
	my.turn_ns = my.offer_ns = then;
}

/* false: it sleeps now. */
static bool worth_it(uint64_t now, uint64_t looks, bool by_policy)
{
	bool first = looks == VMH_SPIN_TURN || by_policy != my.by_policy; /* it may not have looked before */

	if (!by_policy && now < my.rests_until)
		return false;
	my.by_policy = by_policy;
	look_for_others(now, first, by_policy);
	if (my.offers >= OFFERS)
		weigh(my.offer_ns);
	return by_policy || my.turn_ns >= my.rests_until;
}

#define DEADLINE 6            /* SCHED_DEADLINE: only the kernel's headers have it */
#define ASKED_NS 50000000u    /* a class is believed for so long */
#define REALTIME_NS 200000u   /* round trips of a data center are shorter */
#define IN_VAIN_MAX 3         /* in a row */

/* A thread of a real-time class that has not slept for RLIMIT_RTTIME is ended by the kernel. */
static uint64_t may_stay_awake_ns(void)
{
	struct rlimit limit = { RLIM_INFINITY, RLIM_INFINITY };

	vmh_sys(SYS_prlimit64, 0, RLIMIT_RTTIME, NULL, &limit);
	return limit.rlim_cur < UINT64_MAX / 1000 ? limit.rlim_cur * 1000 / 4 : UINT64_MAX;
}

static bool is_realtime(uint64_t now)
{
	if (!my.asked_ns || now - my.asked_ns >= ASKED_NS) {
		long class_ = vmh_sys(SYS_sched_getscheduler, 0) & ~(long)SCHED_RESET_ON_FORK;

		my.asked_ns = now;
		my.realtime = class_ == SCHED_FIFO || class_ == SCHED_RR || class_ == DEADLINE;
		if (my.realtime)
			my.sleeps_ns = class_ == DEADLINE ? UINT64_MAX : may_stay_awake_ns();
	}
	return my.realtime;
}

/* A thread of a real-time class: whoever else is to run on its processor, it may be the one whose answer it waits for, can't,
 * and it learns nothing of that. So it spins for a short time, and rests where that was in vain. */
static bool realtime_goes_on(uint64_t now, uint64_t looks)
{
	if (!is_realtime(now))
		return true;
	if (looks == VMH_SPIN_TURN) {
		if (!my.in_vain)
			my.vain = 0;
		my.in_vain = false;
		my.began_ns = now;
	}
	if (now < my.rests_until)
		return false;
	if (now - my.began_ns < REALTIME_NS)
		return true;
	my.in_vain = true;
	if (++my.vain >= IN_VAIN_MAX) {
		my.vain = 0;
		rest(now);
	}
	return false;
}

/* One that spins without end. */
static void sleep_in_time(uint64_t now)
{
	struct timespec moment = { .tv_nsec = 20000 }; /* one that is over at once is no sleep */

	if (vmh_likely(!is_realtime(now)) || now - my.slept_ns < my.sleeps_ns)
		return;
	vmh_sys(SYS_nanosleep, &moment, NULL);
	my.slept_ns = vmh_now_ns();
}

#define LEND_NS 3000u        /* others that spin and lend have work for moments */
#define LENT_NS 1500u        /* a sched_yield() that takes less found nobody */
#define LEND_MAX_NS 8000000u /* nobody wants it */
#define SLICE_NS 2000000u    /* for so long only one has it that computes */
#define SLICES_MAX 3         /* in a row */
#define SECOND_NS 1000000000u

/* A thread that is to spin without end (VMA_RX_POLL=-1) lends its processor to those that wait for it, as threads of other
 * programs that spin do: else each round trip takes slices of all of them. To one that computes it would lend nearly all of
 * it. It looks whether that one has gone at each whole second, as they all do: while some don't lend their slices look the
 * same. */
static void lend(uint64_t now)
{
	static __thread struct {
		uint64_t next_ns, every_ns;
		unsigned slices;
	} lent __attribute__((tls_model("initial-exec")));
	uint64_t took;

	if (now < lent.next_ns)
		return;
	sched_yield();
	took = vmh_now_ns() - now;
	now += took;
	lent.slices = took >= SLICE_NS ? lent.slices + 1 : 0;
	if (took >= LENT_NS)
		lent.every_ns = LEND_NS;
	else if (lent.every_ns < LEND_MAX_NS)
		lent.every_ns = lent.every_ns * 2 + LEND_NS;
	lent.next_ns = now + lent.every_ns;
	if (lent.slices == SLICES_MAX) {
		lent.slices = 0;
		lent.next_ns = (now / SECOND_NS + 1) * SECOND_NS;
	}
}

bool vmh_spin_goes_on(uint64_t looks, bool ends)
{
	int others = atomic_load_explicit(&spinners, memory_order_relaxed) - vmh_spins;
	bool by_policy = atomic_load_explicit(&vmh_spin_offers, memory_order_relaxed);

	if (by_policy || vmh_params.hybrid_spin_share) {
		uint64_t now = vmh_now_ns();

		if (ends && vmh_params.hybrid_spin_share && !realtime_goes_on(now, looks))
			return false;
		if (others < processors && !by_policy && !ends)
			lend(now);
		else if (others < processors && !worth_it(now, looks, by_policy))
			return false;
	}
	if (!ends)
		sleep_in_time(vmh_now_ns());
	if (processors == INT_MAX)
		return true;
	if (!vmh_spins && (looks >= LONG_LOOKS || others >= processors)) { /* else a handler may have jumped out of a call that was */
		atomic_fetch_add_explicit(&spinners, 1, memory_order_relaxed);
		vmh_spins = true;
	}
	if (others >= processors)
		sched_yield();
	return true;
}

void vmh_spin_over(void)
{
	vmh_spins = false;
	atomic_fetch_sub_explicit(&spinners, 1, memory_order_relaxed);
}

void vmh_wait_fork_child(void)
{
	vmh_scratch_fork_child();
	atomic_store(&spinners, 0);
	vmh_spins = false;
	vmh_sleep_fork_child();
}
