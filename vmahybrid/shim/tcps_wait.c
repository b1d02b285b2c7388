/* Waiting for a ring to change a TCP socket: accept and connect. (Data: tcps_io.c.) */
#include "vmh_params.h"
#include "vmh_ring.h"
#include "vmh_tcps.h"
#include "vmh_wait.h"
#include <pthread.h>
#include <sched.h>

#define POLL_BUDGET 32
#define LOOK_EVERY 64 /* loops: clock, cancellation, the kernel's socket */

void vmh_twait_init(struct vmh_twait *w, const struct vmh_tcps *s, int64_t timeout_ns, uint32_t wanted, int kfd)
{
	*w = (struct vmh_twait){ .any = vmh_signals_any, .norestart = vmh_signals_norestart, .wanted = wanted, .kfd = kfd };
	w->state = (uint8_t)vmh_tcps_state(s);
	w->now = atomic_load_explicit(&s->nonblock, memory_order_relaxed);
	if (timeout_ns) {
		w->deadline = vmh_now_ns() + (uint64_t)timeout_ns;
		w->timed = true;
	}
}

static bool interrupted(const struct vmh_twait *w)
{
	return vmh_signals_norestart != w->norestart || (w->timed && vmh_signals_any != w->any);
}

static inline bool changed(const struct vmh_tcps *s, const struct vmh_twait *w)
{
	return vmh_tcps_state(s) != w->state || atomic_load_explicit(&s->obj.closed, memory_order_relaxed) ||
	       (atomic_load_explicit(&s->bits, memory_order_acquire) & (w->wanted | EPOLLERR | EPOLLHUP));
}

static int doze(const struct vmh_tcps *s, const struct vmh_twait *w)
{
	struct pollfd k = { .fd = w->kfd, .events = POLLIN };
	int64_t left = -1;
	int err = 0, wakefd;

	if (w->deadline) {
		uint64_t now = vmh_now_ns();

		if (now >= w->deadline)
			return -EAGAIN;
		left = (int64_t)(w->deadline - now);
	}
	wakefd = vmh_sleep_begin();
	if (interrupted(w)) {
		vmh_sleep_end();
		return -EINTR;
	}
	if (wakefd < 0 && (left < 0 || left > 1000000))
		left = 1000000;
	vmh_rings_poll(POLL_BUDGET);
	if (!changed(s, w)) {
		sig_atomic_t any = vmh_signals_any;

		err = vmh_sleep(&k, 1, left, NULL, wakefd);
		if (err == -EINTR && vmh_signals_any != any && !interrupted(w))
			err = 0;
	}
	vmh_sleep_end();
	return err;
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

	for (;;) {
		vmh_rings_poll(POLL_BUDGET);
		if (changed(s, w))
			return 0;
		if (w->now)
			return -EAGAIN;
		if (vmh_unlikely(interrupted(w)))
			return -EINTR;
		if (budget >= 0 && w->loops >= (uint64_t)budget)
			break;
		w->loops++;
		if (vmh_params.rx_poll_yield && w->loops % (uint64_t)vmh_params.rx_poll_yield == 0)
			sched_yield();
		if (vmh_unlikely(w->loops % LOOK_EVERY == 0)) {
			pthread_testcancel();
			if (kernel_ready(w->kfd))
				return 0;
			if (w->deadline && vmh_now_ns() >= w->deadline)
				return -EAGAIN;
		}
		vmh_cpu_relax();
	}
	return doze(s, w);
}
