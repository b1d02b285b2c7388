/* SO_MAX_PACING_RATE of UDP sockets on rings: a datagram leaves when those before it have had their time. A blocking call
 * waits for that. One that may not wait is the kernel's, whose fq queueing discipline holds what is not due yet.
 *
 * Linux takes bytes per second; VMA's programs give a struct of 12 bytes (vmh_pacing) as well. */
#include "vmh_log.h"
#include "vmh_sock.h"
#include "vmh_wait.h"

#define FRAME_HEADERS 42
#define SLACK_NS 100000u      /* that a sender may be behind and catch up: sleeps end late */
#define SPIN_NS 60000u        /* the rest of a sleep: timers are no better than this */
#define LONGEST_NS 1000000000u /* between two datagrams, as in fq_dequeue() */

void vmh_sock_read_pacing(struct vmh_sock *s, int fd)
{
	unsigned long rate = ~0ul;
	socklen_t len = sizeof(rate);

	if (vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_MAX_PACING_RATE, &rate, &len) < 0)
		return;
	s->pacing.rate = rate;
	s->pacing.burst = 0; /* whoever gives one says so afterwards */
	s->pacing.typical = 0;
	VMH_SET(s->paced, rate != ~0ul);
}

unsigned long vmh_pacing_rate(const struct vmh_pacing *p)
{
	return p->kbps ? p->kbps * 125ul : ~0ul;
}

void vmh_sock_set_burst(struct vmh_sock *s, const struct vmh_pacing *p)
{
	vmh_lock(&s->obj.lock);
	s->pacing.burst = p->burst;
	s->pacing.typical = p->typical;
	vmh_unlock(&s->obj.lock);
}

static uint64_t time_of(const struct vmh_sock *s, uint64_t bytes)
{
	uint64_t rate = VMH_GET(s->pacing.rate), ns;

	ns = rate ? bytes * 1000000000u / rate : LONGEST_NS;
	return ns < LONGEST_NS ? ns : LONGEST_NS;
}

/* When it may leave. The next one leaves so much later. */
static uint64_t departure(struct vmh_sock *s, uint64_t took)
{
	uint64_t slack = time_of(s, VMH_GET(s->pacing.burst)), now = vmh_now_ns();
	uint64_t next = atomic_load(&s->pacing.next), at;

	slack = slack > SLACK_NS || !VMH_GET(s->pacing.rate) ? slack : SLACK_NS;
	do {
		at = next > now - slack ? next : now - slack;
	} while (!atomic_compare_exchange_weak(&s->pacing.next, &next, at + took));
	return at;
}

static int wait_until(uint64_t at, const struct vmh_waiting *w)
{
	uint64_t now = vmh_now_ns();

	while (now < at) {
		if (at - now > SPIN_NS) {
			uint64_t end = at - SPIN_NS;
			struct timespec t = { (time_t)(end / 1000000000u), (long)(end % 1000000000u) };

			vmh_sys(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
			if (vmh_interrupted(w))
				return -EINTR;
		} else {
			vmh_cpu_relax();
		}
		now = vmh_now_ns();
	}
	return 0;
}

static void say_once(const struct vmh_sock *s)
{
	static _Atomic int said;

	if (!atomic_exchange(&said, 1))
		vmh_info("fd %d: SO_MAX_PACING_RATE of a non-blocking UDP socket is left to the kernel, which paces UDP where "
			 "the interface has the fq queueing discipline", s->obj.fd);
}

int vmh_sock_pace(struct vmh_sock *s, size_t len, bool now)
{
	struct vmh_waiting w;
	uint64_t at, took = time_of(s, len + FRAME_HEADERS);
	int err;

	if (now) {
		say_once(s);
		return -EAGAIN;
	}
	vmh_waiting_begin(&w, VMH_GET(s->sndtimeo_ns));
	at = departure(s, took);
	if (at <= vmh_now_ns())
		return 0;
	vmh_sock_tx_flush(s); /* what sendmmsg has posted does not wait for this one */
	err = wait_until(w.deadline && at > w.deadline ? w.deadline : at, &w);
	if (!err && w.deadline && at > w.deadline)
		err = -EWOULDBLOCK;
	if (err)
		atomic_fetch_sub(&s->pacing.next, took); /* it does not leave */
	return err;
}
