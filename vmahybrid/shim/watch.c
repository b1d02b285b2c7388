/* Which of the threads that sleep are woken by a ring. If all were, each packet would wake every thread of a program
 * though it is for one, which needs no other: with 64 of them the program had a twentieth of the kernel's rounds.
 *
 * So one thread, the first that sleeps, waits for its rings by itself (the first on each ring, if its call can look at
 * one alone): one that asks and is answered, as there is nearly always, is woken by nobody else. Of all others one, the deputy, waits for the rings that the first one does
 * not wait for: by an epoll set of ours, whose members are muted and heard by whoever becomes first, and who wakes, so
 * that the deputy sleeps on meanwhile. The rest, those behind, sleep for their eventfd. Whoever is woken by a ring
 * delivers what it holds, and so wakes the thread that it is for (vmh_wake_for).
 *
 * A deputy that leaves appoints another one, which it wakes for that. A first one whose ring brings nothing but what is
 * for others lets one of those be the first.
 *
 * A thread waits by itself for all rings, and nobody waits by it, where it runs at other times than the others: with
 * another priority than the process, or of another class. And so do all where there is no eventfd, or no epoll set.
 */
#include "vmh_iomux_int.h"
#include "vmh_ring.h"
#include "vmh_sleep.h"
#include <sched.h>
#include <sys/resource.h>

#define VAIN_MAX 2
#define BUDGET 256         /* frames */
#define ASKED_NS 50000000u /* its class and priority are believed for so long */

static struct vmh_lock watch_lock; /* outside of the rings' locks, and of the list of sleepers */
static struct vmh_sleeper *first, *deputy; /* first: for all rings; for one: vmh_ring.first */
static struct vmh_sleeper behind = { .behind_next = &behind, .behind_prev = &behind }; /* head; the last sleeps longest */
static _Atomic int set_plus_one;  /* the deputy's */
static _Atomic bool impossible;   /* the kernel has refused */

static void leave_behind(struct vmh_sleeper *s)
{
	s->behind_prev->behind_next = s->behind_next;
	s->behind_next->behind_prev = s->behind_prev;
}

static void go_behind(struct vmh_sleeper *s)
{
	VMH_SET(s->role, VMH_ROLE_BEHIND);
	s->behind_prev = &behind;
	s->behind_next = behind.behind_next;
	s->behind_next->behind_prev = s;
	behind.behind_next = s;
}

/* Lock held. The deputy is woken by all rings but those that others are the first on. */
static void hear(void)
{
	if (!deputy || vmh_rings_hear(set_plus_one - 1, first != NULL))
		return;
	atomic_store(&impossible, true);
	vmh_wake_all();
}

/* Lock held. The head of those behind: there is none. */
static void appoint(struct vmh_sleeper *s)
{
	VMH_SET(deputy, s != &behind ? s : NULL);
	if (s == &behind)
		return;
	leave_behind(s);
	VMH_SET(s->role, VMH_ROLE_DEPUTY);
	vmh_sleeper_appointed(s);
}

static struct vmh_sleeper **first_on(struct vmh_ring *only)
{
	return only ? &only->first : &first;
}

/* Lock held. */
static void lay_down(struct vmh_sleeper *s)
{
	enum vmh_role was = s->role;

	VMH_SET(s->role, VMH_ROLE_NONE);
	switch (was) {
	case VMH_ROLE_NONE:
		return;
	case VMH_ROLE_BEHIND:
		leave_behind(s);
		return;
	case VMH_ROLE_FIRST:
		*first_on(s->only) = NULL;
		hear();
		return;
	case VMH_ROLE_DEPUTY:
		appoint(behind.behind_prev);
		return;
	}
}

static bool made_set(void)
{
	int fd;

	if (set_plus_one)
		return true;
	fd = (int)vmh_sys(SYS_epoll_create1, EPOLL_CLOEXEC);
	if (fd < 0) {
		if (fd != -EMFILE && fd != -ENFILE && fd != -ENOMEM)
			atomic_store(&impossible, true); /* a sandbox */
		return false;
	}
	set_plus_one = vmh_fd_hide(fd) + 1;
	return true;
}

/* Lock held. */
static void choose(struct vmh_sleeper *s, struct vmh_ring *only)
{
	if (s->role == VMH_ROLE_FIRST && s->only != only)
		lay_down(s);
	if (s->role == VMH_ROLE_NONE && !*first_on(only) && s->vain < VAIN_MAX) {
		VMH_SET(s->role, VMH_ROLE_FIRST);
		*first_on(only) = s;
	} else if (s->role == VMH_ROLE_NONE && deputy) {
		go_behind(s);
	} else if (s->role == VMH_ROLE_NONE && made_set()) {
		VMH_SET(s->role, VMH_ROLE_DEPUTY);
		VMH_SET(deputy, s);
	}
	s->only = only;
}

/* Another class than the usual ones, or another priority than the first thread. */
static bool runs_at_other_times(void)
{
	static __thread struct {
		uint64_t asked_ns;
		bool others;
	} my __attribute__((tls_model("initial-exec")));
	uint64_t now = vmh_now_ns();
	long class_;

	if (my.asked_ns && now - my.asked_ns < ASKED_NS)
		return my.others;
	my.asked_ns = now;
	class_ = vmh_sys(SYS_sched_getscheduler, 0) & ~(long)SCHED_RESET_ON_FORK;
	my.others = (class_ != SCHED_OTHER && class_ != SCHED_BATCH) ||
		    vmh_sys(SYS_getpriority, PRIO_PROCESS, 0) != vmh_sys(SYS_getpriority, PRIO_PROCESS, getpid());
	return my.others;
}

/* All rings wake this thread, as if there was no other. */
static bool alone(const struct vmh_sleeper *s, bool can_be_woken)
{
	return !can_be_woken || s->depth > 1 || atomic_load_explicit(&impossible, memory_order_relaxed) ||
	       vmh_memory_borrowed() || runs_at_other_times();
}

unsigned vmh_watch_begin(struct vmh_ring *only, bool can_be_woken, int *fds, int max)
{
	struct vmh_sleeper *s = &vmh_me;
	enum vmh_role role = VMH_ROLE_NONE;
	int n;

	if (alone(s, can_be_woken)) {
		vmh_watch_end(s);
	} else {
		vmh_lock(&watch_lock);
		choose(s, only);
		role = s->role;
		if (role != VMH_ROLE_BEHIND)
			hear(); /* there may be other rings by now */
		vmh_unlock(&watch_lock);
	}
	if (role == VMH_ROLE_BEHIND) {
		vmh_rings_before_sleep();
		return 0;
	}
	n = only && role != VMH_ROLE_DEPUTY ? vmh_ring_wait_fds(only, fds, max) : vmh_rings_wait_fds(fds, max);
	if (role == VMH_ROLE_DEPUTY) { /* those are armed now */
		fds[0] = set_plus_one - 1;
		return 1;
	}
	return n > 0 ? (unsigned)n : 0;
}

void vmh_watch_woken(const struct pollfd *p, int n)
{
	if (p->fd != set_plus_one - 1) {
		vmh_rings_woken(p, n);
		return;
	}
	if (p->revents & POLLNVAL) { /* the program has closed what is not its own */
		atomic_store(&impossible, true);
		vmh_wake_all();
	} else if (p->revents) {
		vmh_rings_heard();
		vmh_sleep_looks(true);
		vmh_rings_poll(BUDGET); /* all: its own call, which looks next, may look at one alone */
		vmh_sleep_looks(false);
	}
}

void vmh_watch_end(struct vmh_sleeper *s)
{
	if (vmh_likely(VMH_GET(s->role) == VMH_ROLE_NONE))
		return;
	vmh_lock(&watch_lock);
	lay_down(s);
	vmh_unlock(&watch_lock);
}

void vmh_watch_in_vain(void)
{
	struct vmh_sleeper *s = &vmh_me;

	vmh_lock(&watch_lock);
	if (s->role == VMH_ROLE_FIRST && deputy && ++s->vain >= VAIN_MAX)
		lay_down(s);
	vmh_unlock(&watch_lock);
}

void vmh_watch_look(void)
{
	if (VMH_GET(deputy) && vmh_rings_waiting())
		vmh_rings_poll(BUDGET);
}

void vmh_watch_fork_child(void)
{
	vmh_lock_reset(&watch_lock);
	first = deputy = NULL; /* and of each ring: vmh_rings_fork_child() */
	behind.behind_next = behind.behind_prev = &behind;
	if (set_plus_one) /* it is the parent's, and so is what is in it */
		vmh_fd_hidden_close(set_plus_one - 1);
	set_plus_one = 0;
}
