/* Waiting for a ring to change a TCP socket: accept and connect, and what other threads do to it meanwhile. (Data:
 * tcps_io.c.) */
#include "vmh_params.h"
#include "vmh_ring.h"
#include "vmh_tcps.h"
#include "vmh_wait.h"
#include <pthread.h>
#include <sched.h>

#define LOOK_EVERY 64 /* loops: clock, cancellation, the kernel's socket */

void vmh_twait_init(struct vmh_twait *w, const struct vmh_tcps *s, int64_t timeout_ns, uint32_t wanted, int kfd,
		    const struct vmh_signals *began)
{
	*w = (struct vmh_twait){ .wanted = wanted, .kfd = kfd };
	vmh_waiting_begin(&w->w, timeout_ns);
	w->w.began = *began;
	w->state = (uint8_t)vmh_tcps_state(s);
	w->now = atomic_load_explicit(&s->nonblock, memory_order_relaxed);
}

/* ---- another thread closes it ---- */

#define THERE_NS 50000000u /* a call that waits is woken, or looks, in less; a thread may have left it by siglongjmp() */
#define THERE_NAP_NS 50000

void vmh_tcps_blocks(struct vmh_tcps *s)
{
	const uint64_t tid = vmh_tid();

	atomic_fetch_add(&s->blocked_tids, tid);
	atomic_fetch_add(&s->blocked_squares, tid * tid);
	atomic_fetch_add(&s->blocked, 1);
}

void vmh_tcps_blocks_no_more(struct vmh_tcps *s)
{
	const uint64_t tid = vmh_tid();

	atomic_fetch_sub(&s->blocked, 1);
	atomic_fetch_sub(&s->blocked_squares, tid * tid);
	atomic_fetch_sub(&s->blocked_tids, tid);
}

/* Nobody waits, or this thread did and has left its calls by siglongjmp(). Numbers are all the same if their mean is that,
 * and that of their squares its square. */
static bool only_left(struct vmh_tcps *s)
{
	const uint64_t n = atomic_load(&s->blocked), tid = vmh_tid();

	return atomic_load(&s->blocked_tids) == n * tid && atomic_load(&s->blocked_squares) == n * tid * tid;
}

bool vmh_tcps_others_wait(struct vmh_tcps *s)
{
	uint32_t n = atomic_load(&s->blocked);

	return n && n != atomic_load(&s->strays) && !only_left(s);
}

/* Nobody has answered. */
static void forget(struct vmh_tcps *s)
{
	atomic_store(&s->strays, atomic_load(&s->blocked));
}

bool vmh_tcps_is_waited_for(struct vmh_tcps *s)
{
	const struct timespec nap = { 0, THERE_NAP_NS };
	uint64_t end;

	atomic_store(&s->waits, 0);
	atomic_store(&s->leaving, 1);
	vmh_wake_all();
	for (end = vmh_now_ns() + THERE_NS; !atomic_load(&s->waits) && vmh_now_ns() < end && !only_left(s);)
		vmh_sys(SYS_nanosleep, &nap, NULL);
	if (atomic_load(&s->waits))
		return true;
	vmh_tcps_left(s);
	if (!only_left(s))
		forget(s);
	return false;
}

/* left_fd and left_users. Not across a fork, whose handlers of the program may wait for a thread that wants it: while one is
 * under way none is made, and who has waited goes on by the number, as the fork wants it. What would be closed meanwhile
 * is put by until the fork is over, in parent and child: which of the two copies of memory and descriptors the kernel
 * makes first is its affair. */
static struct vmh_lock left_lock;
static _Atomic int forks, closings;
static int put_by[16];
static unsigned nput_by;
#define FORK_WAITS_NS 20000000u
#define HELD_NS 1000000000u /* much longer than it is held: by a thread that the child of a fork has not */

static void take_lock(void)
{
	const struct timespec nap = { 0, THERE_NAP_NS };
	uint64_t end;

	if (vmh_likely(!atomic_load(&forks))) {
		vmh_lock(&left_lock);
		return;
	}
	for (end = vmh_now_ns() + HELD_NS; !vmh_trylock(&left_lock); vmh_sys(SYS_nanosleep, &nap, NULL))
		if (vmh_now_ns() >= end)
			vmh_lock_reset(&left_lock);
}

int vmh_tcps_own_number(struct vmh_tcps *s, int fd)
{
	int own = vmh_fd_hide_instead(fd);

	if (own > 0 && !vmh_fd_is_another(own, &s->obj))
		return own;
	vmh_fd_hidden_close(own);
	return 0;
}

static bool leave(struct vmh_tcps *s, int fd)
{
	if (atomic_load(&s->left_fd) || atomic_load(&forks) || vmh_fdtab_parted() || vmh_fd_is_another(fd, &s->obj))
		return false;
	fd = vmh_tcps_own_number(s, fd);
	if (fd)
		atomic_store(&s->left_fd, fd);
	return fd != 0;
}

bool vmh_tcps_leave(struct vmh_tcps *s, int fd)
{
	bool ours;

	take_lock();
	ours = leave(s, fd);
	vmh_unlock(&left_lock);
	return ours;
}

/* Lock held, which it gives back: close() may linger. */
static void close_and_unlock(struct vmh_tcps *s)
{
	int fd = atomic_exchange(&s->left_fd, 0);
	bool later = fd && atomic_load(&forks) && nput_by < sizeof(put_by) / sizeof(put_by[0]);

	if (later)
		put_by[nput_by++] = fd;
	else
		atomic_fetch_add(&closings, 1);
	vmh_unlock(&left_lock);
	if (later)
		return;
	if (fd)
		vmh_fd_hidden_close(fd);
	atomic_fetch_sub(&closings, 1);
}

static void close_put_by(void)
{
	int fds[sizeof(put_by) / sizeof(put_by[0])];
	unsigned n = 0;

	take_lock();
	if (!atomic_load(&forks)) {
		n = nput_by;
		memcpy(fds, put_by, sizeof(fds));
		nput_by = 0;
	}
	vmh_unlock(&left_lock);
	while (n)
		vmh_fd_hidden_close(fds[--n]);
}

void vmh_tcps_close_left(struct vmh_tcps *s)
{
	if (vmh_likely(!atomic_load(&s->left_fd)))
		return;
	take_lock();
	close_and_unlock(s);
}

bool vmh_tcps_left_is_used(const struct vmh_tcps *s)
{
	bool used;

	take_lock();
	used = s->left_users != 0;
	vmh_unlock(&left_lock);
	return used;
}

/* What is being made or closed is so before. */
void vmh_tcps_left_before_fork(void)
{
	const struct timespec nap = { 0, THERE_NAP_NS };
	uint64_t end = vmh_now_ns() + FORK_WAITS_NS;

	take_lock();
	atomic_fetch_add(&forks, 1);
	vmh_unlock(&left_lock);
	while (atomic_load(&closings) && vmh_now_ns() < end)
		vmh_sys(SYS_nanosleep, &nap, NULL);
}

void vmh_tcps_left_after_fork_parent(void)
{
	if (atomic_fetch_sub(&forks, 1) == 1)
		close_put_by();
}

void vmh_tcps_left_fork_child(struct vmh_tcps *s)
{
	int fd = atomic_exchange(&s->left_fd, 0);

	if (fd)
		vmh_fd_hidden_close(fd);
	s->left_users = 0;
	atomic_store(&s->strays, 0);
	atomic_store(&s->blocked, 0); /* those are threads of the parent */
	atomic_store(&s->blocked_tids, 0);
	atomic_store(&s->blocked_squares, 0);
}

void vmh_tcps_left_after_fork_child(void)
{
	vmh_lock_reset(&left_lock);
	atomic_store(&forks, 0);
	atomic_store(&closings, 0);
	close_put_by();
}

void vmh_tcps_goes_on(struct vmh_tcps *s, int fd)
{
	take_lock();
	s->left_users++;
	leave(s, fd);
	vmh_unlock(&left_lock);
}

void vmh_tcps_went_on(struct vmh_tcps *s)
{
	take_lock();
	if (!--s->left_users && !atomic_load(&s->blocked))
		close_and_unlock(s);
	else
		vmh_unlock(&left_lock);
}

bool vmh_tcps_let_pass(struct vmh_tcps *s)
{
	const struct timespec nap = { 0, THERE_NAP_NS };
	uint64_t end = vmh_now_ns() + THERE_NS;

	vmh_wake_all();
	while (!only_left(s)) {
		if (vmh_now_ns() >= end) {
			forget(s);
			return false;
		}
		vmh_sys(SYS_nanosleep, &nap, NULL);
	}
	return true;
}

void vmh_tcps_left(struct vmh_tcps *s)
{
	atomic_store(&s->leaving, 0);
}

void vmh_tcps_still_waits(struct vmh_tcps *s)
{
	const struct timespec nap = { 0, THERE_NAP_NS };

	do { /* two threads may ask */
		atomic_store(&s->waits, 1);
		vmh_sys(SYS_nanosleep, &nap, NULL);
	} while (atomic_load(&s->leaving));
}

/* ---- waiting ---- */

void vmh_twait_end(struct vmh_twait *w)
{
	if (w->blocks)
		vmh_tcps_blocks_no_more(w->blocks);
	w->blocks = NULL;
}

static inline bool changed(const struct vmh_tcps *s, const struct vmh_twait *w)
{
	return vmh_tcps_state(s) != w->state || atomic_load_explicit(&s->obj.closed, memory_order_relaxed) ||
	       vmh_tcps_leaving(s) || (atomic_load_explicit(&s->bits, memory_order_acquire) & (w->wanted | EPOLLERR | EPOLLHUP));
}

struct sleeper {
	const struct vmh_tcps *s;
	const struct vmh_twait *w;
};

static bool may_go_on(void *arg)
{
	const struct sleeper *p = arg;

	vmh_rings_poll(VMH_TCPS_POLL);
	return changed(p->s, p->w);
}

static int doze(const struct vmh_tcps *s, const struct vmh_twait *w)
{
	struct pollfd k = { .fd = w->kfd, .events = POLLIN };
	struct sleeper me = { s, w };

	return vmh_doze(&w->w, &k, may_go_on, &me);
}

static bool kernel_ready(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec zero = { 0 };

	return fd >= 0 && vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) > 0;
}

int vmh_tcps_wait(struct vmh_tcps *s, struct vmh_twait *w)
{
	int64_t budget = vmh_params.rx_poll;
	VMH_SPINS_HERE;

	w->w.obj = &s->obj;
	for (;;) {
		vmh_rings_poll(VMH_TCPS_POLL);
		if (changed(s, w))
			return 0;
		if (w->now)
			return -EAGAIN;
		if (vmh_unlikely(vmh_interrupted(&w->w)))
			return -EINTR;
		if (!w->blocks)
			vmh_tcps_blocks(w->blocks = s);
		if (budget >= 0 && w->loops >= (uint64_t)budget)
			break;
		w->loops++;
		if (vmh_params.rx_poll_yield && w->loops % (uint64_t)vmh_params.rx_poll_yield == 0)
			sched_yield();
		if (vmh_unlikely(w->loops % VMH_SPIN_TURN == 0) && !vmh_spin_goes_on(w->loops, budget >= 0))
			break;
		if (vmh_unlikely(w->loops % LOOK_EVERY == 0)) {
			pthread_testcancel();
			if (kernel_ready(w->kfd))
				return 0;
			if (w->w.deadline && vmh_now_ns() >= w->w.deadline)
				return -EAGAIN;
		}
		vmh_cpu_relax();
	}
	vmh_spin_ends();
	return doze(s, w);
}
