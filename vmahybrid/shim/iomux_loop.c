/* The wait loop of select, poll and epoll: look, spin for the budget, sleep. */
#include "vmh_iomux_int.h"
#include "vmh_ring.h"
#include "vmh_sleep.h"
#include "vmh_tcps.h"
#include <pthread.h>

/* With VMA_SELECT_POLL_OS_RATIO=0 or VMA_SELECT_SKIP_OS=0 the manual never asks the kernel while rings
 * are polled or ready. A pipe in such a set would starve for ever; once in 10 ms costs nothing. */
#define OS_LOOK_NS 10000000u
#define USAGES 4 /* of one thread */
#define SELDOM_NS 20000 /* from the end of a call to the next one */

struct run {
	sig_atomic_t sig0;
	uint64_t start, now, deadline; /* UINT64_MAX: for ever */
	bool spun, hit;
};

static inline unsigned batch(void)
{
	return (unsigned)vmh_params.cq_poll_batch_max;
}

static bool look_due(int64_t *left, int64_t every, struct vmh_oslook *look, uint64_t now)
{
	if (every > 0) {
		int64_t l = VMH_GET(*left) - 1;

		VMH_SET(*left, l <= 0 ? every : l);
		return l <= 0;
	}
	return vmh_due(&look->last_ns, now, OS_LOOK_NS);
}

static bool os_ratio_due(struct vmh_waiter *w, uint64_t now)
{
	return look_due(&w->look->ratio_left, vmh_params.select_poll_os_ratio, w->look, now);
}

bool vmh_os_skip_due(struct vmh_waiter *w)
{
	uint64_t now = vmh_now_ns(), came = w->began ? w->began : now;
	int64_t pause = (int64_t)(came - VMH_GET(w->look->called_ns)); /* below 0: another thread called meanwhile */

	VMH_SET(w->look->called_ns, now);
	/* the count is for those who call in a tight loop; who comes seldom sees both sides each time */
	if (vmh_params.select_skip_os > 0 && pause >= SELDOM_NS)
		return true;
	return look_due(&w->look->skip_left, vmh_params.select_skip_os, w->look, now);
}

static int collect(struct vmh_waiter *w, bool os)
{
	uint32_t left = atomic_load(&vmh_tcps_leaves_done);
	int n = w->collect(w, os);

	/* of one that goes home the ring says nothing any more, and the kernel nothing yet */
	if (!n && os && vmh_unlikely(atomic_load(&vmh_tcps_leaves_begun) != left)) {
		vmh_tcps_leaves_pass();
		w->fresh = false;
		n = w->collect(w, os);
	}
	return n;
}

/* When may spinning end: the budget, but never later than the caller's timeout. */
static uint64_t spin_end(const struct run *r)
{
	int64_t us = vmh_params.select_poll;

	if (us < 0 || (uint64_t)us * 1000u >= r->deadline - r->now)
		return r->deadline;
	return r->now + (uint64_t)us * 1000u;
}

static bool is_closed(const struct vmh_waiter *w)
{
	return w->closed_with && atomic_load(&w->closed_with->closed);
}

/* `rings`: a member is on one. Where none is there is nothing to look at but the kernel, each time. */
static int spin(struct vmh_waiter *w, struct run *r, bool rings)
{
	uint64_t end = spin_end(r);
	VMH_SPINS_HERE;
	unsigned loops = 0;

	r->spun = true;
	while (r->now < end) {
		bool os = os_ratio_due(w, r->now) || !rings;
		int n;

		vmh_rings_poll(batch());
		n = collect(w, os);
		if (n) {
			r->hit = n > 0;
			return n;
		}
		if (vmh_signals_any != r->sig0)
			return -EINTR;
		if (os) {
			if (is_closed(w))
				return -EBADF;
			pthread_testcancel();
			rings = w->on_ring(w);
			if (!rings && !w->forced) /* the last member went home: nothing to spin for */
				return 0;
		}
		if (vmh_unlikely(++loops % VMH_SPIN_TURN == 0) && !vmh_spin_goes_on(loops, vmh_params.select_poll >= 0))
			return 0;
		vmh_cpu_relax();
		r->now = vmh_now_ns();
	}
	return 0;
}

static bool any_revents(const struct vmh_waiter *w)
{
	for (unsigned i = 0; i < w->nfds; i++)
		if (w->fds[i].revents)
			return true;
	return false;
}

static bool is_over(const struct vmh_waiter *w, const struct run *r)
{
	return vmh_signals_any != r->sig0 || is_closed(w);
}

/* Until something may have changed, or the time is over; woken by a ring for others it sleeps on. 0, -errno. */
static int sleep_well(struct vmh_waiter *w, struct run *r, int *n)
{
	VMH_SLEEPS_HERE(w->only);
	int err = 0;

	for (;;) {
		int64_t left = r->deadline == UINT64_MAX ? -1 : (int64_t)(r->deadline - r->now);

		vmh_sleep_looks(true);
		vmh_rings_poll(batch());
		*n = collect(w, false);
		vmh_sleep_looks(false);
		if (*n || is_over(w, r) || r->now >= r->deadline)
			return 0;
		if (err == VMH_SLEPT_BY_RINGS)
			vmh_watch_in_vain();
		if ((wakefd < 0 || w->hurries) && (left < 0 || left > 1000000))
			left = 1000000; /* no eventfd to be had, or it says so: look again every millisecond */
		err = vmh_sleep(w->fds, w->nfds, left, NULL, wakefd);
		if (err != VMH_SLEPT_BY_RINGS)
			return err;
		r->now = vmh_now_ns();
	}
}

/* > 0 ready, 0 go on, -errno. */
static int sleep_once(struct vmh_waiter *w, struct run *r)
{
	int n, err = sleep_well(w, r, &n);
	bool os = !n && !err && any_revents(w);

	if (!n) {
		vmh_rings_poll(batch());
		w->fresh = os;
		n = collect(w, os);
		w->fresh = false;
	}
	if (n)
		return n;
	if (err < 0)
		return err;
	if (vmh_signals_any != r->sig0)
		return -EINTR;
	if (is_closed(w))
		return -EBADF;
	return 0;
}

/* No ring to spin for, as where sockets on rings are to be sent by: what is ready is found by one look, as the first
 * round of spinning does, and not by a sleep that ends in no time. */
static int look_once(struct vmh_waiter *w, struct run *r)
{
	int n = collect(w, true);

	r->hit = n > 0;
	return n;
}

static int wait_long(struct vmh_waiter *w, struct run *r, int64_t timeout_ns)
{
	bool rings;
	int n = 0;

	w->began = r->start = r->now = vmh_now_ns();
	r->deadline = timeout_ns < 0 || (uint64_t)timeout_ns >= UINT64_MAX / 2 - r->now ?
		UINT64_MAX : r->now + (uint64_t)timeout_ns;
	if (vmh_params.select_poll != 0) {
		rings = w->on_ring(w);
		n = rings || w->forced ? spin(w, r, rings) : look_once(w, r);
	}
	while (!n && r->now < r->deadline) {
		n = sleep_once(w, r);
		if (!n)
			r->now = vmh_now_ns();
	}
	return n;
}

struct usage {
	const struct vmh_iomux_stats *of;
	uint64_t since, busy;
};

/* Of select, poll or an epoll set; that of the one which was told of longest ago, if there are too many. */
static struct usage *usage_of(const struct vmh_iomux_stats *s)
{
	static __thread struct usage all[USAGES] __attribute__((tls_model("initial-exec")));
	struct usage *oldest = all;

	for (unsigned i = 0; i < USAGES; i++) {
		if (all[i].of == s)
			return &all[i];
		if (all[i].since < oldest->since)
			oldest = &all[i];
	}
	*oldest = (struct usage){ .of = s };
	return oldest;
}

/* Share of the last second or more that this thread spent in such calls that spun. */
static void cpu_usage(struct vmh_waiter *w, const struct run *r)
{
	struct usage *u;
	uint64_t now;

	if (!vmh_params.cpu_usage_stats || !r->start)
		return;
	u = usage_of(w->stats);
	now = vmh_now_ns();
	if (!u->since)
		u->since = r->start;
	if (r->spun) {
		uint64_t end = spin_end(&(struct run){ .now = r->start, .deadline = r->deadline });

		u->busy += (now < end ? now : end) - r->start;
	}
	if (now - u->since < 1000000000u)
		return;
	VMH_SET(w->stats->polling_percent, u->busy * 100 / (now - u->since));
	u->since = now;
	u->busy = 0;
}

static void count_ready(struct vmh_iomux_stats *s, bool alone, int n, int ring_rx, int os_rx)
{
	if (n > 0) {
		VMH_COUNT_BY(alone, s->rx_ready, (unsigned)ring_rx);
		VMH_COUNT_BY(alone, s->os_rx_ready, (unsigned)os_rx);
	} else if (n == 0) {
		VMH_COUNT_BY(alone, s->timeouts, 1);
	} else {
		VMH_COUNT_BY(alone, s->errors, 1);
	}
}

void vmh_iomux_count_os(struct vmh_iomux_stats *s, int n, int rx)
{
	count_ready(s, vmh_iomux_alone(s), n, 0, rx);
	vmh_stats_look();
}

static int account(struct vmh_waiter *w, const struct run *r, int n)
{
	struct vmh_iomux_stats *s = w->stats;
	bool alone = vmh_iomux_alone(s);

	for (unsigned i = 0; w->is_select && n > 0 && i < w->nfds; i++)
		if (w->fds[i].revents & POLLNVAL && w->os_saw)
			w->fds[i].revents = w->fds[i].events;
		else if (w->fds[i].revents & POLLNVAL)
			n = -EBADF;
	if (vmh_unlikely(w->faults && n > 0))
		n = -EFAULT;
	count_ready(s, alone, n, w->ring_rx, w->os_rx);
	if (n >= 0 || n == -EINTR) /* what a signal ended had polled in vain */
		VMH_COUNT_BY(alone, *(r->hit && n > 0 ? &s->poll_hit : &s->poll_miss), 1);
	cpu_usage(w, r);
	return n;
}

int vmh_waiter_run(struct vmh_waiter *w, int64_t timeout_ns, const sigset_t *mask)
{
	struct run r = { .sig0 = w->sig0, .deadline = UINT64_MAX };
	sigset_t old;
	int n;

	/* Look at both sides where that may be the end of it. As in the kernel, what is ready is returned before
	 * the mask lets a signal in. */
	vmh_stats_look();
	vmh_rings_catch_up(batch());
	n = collect(w, timeout_ns == 0 || mask || vmh_signals_any != r.sig0);
	if (!n && timeout_ns == 0 && mask) { /* and what is pending ends the call where the kernel says so */
		w->os_mask = mask;
		n = collect(w, true);
		w->os_mask = NULL;
	}
	if (n || timeout_ns == 0) {
		r.hit = n > 0;
		return account(w, &r, n);
	}
	if (mask) /* a pending signal that it lets in runs here, and is seen in the counters */
		vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, mask, &old, sizeof(uint64_t));
	n = wait_long(w, &r, timeout_ns);
	if (mask)
		vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &old, NULL, sizeof(uint64_t));
	return account(w, &r, n);
}
