/* A program that got several ready sockets from one wait answers them one after the other, and waits again. What it
 * sends meanwhile is posted on the ring and pushed by one system call for many frames: when the last of those sockets
 * was answered, when BATCH frames wait, when the program next looks at a ring, and HOLD_CYCLES after the last push.
 *
 * A program that computes for long between two answers would delay the first one. It is found out by its next call, and
 * pushes each frame at once for a while; a thread that is only preempted now and then does not, what it had sent would
 * have been no earlier. The internal thread pushes what a program leaves behind, every 10 ms. */
#include "vmh_tcps.h"

#define BATCH 16
#define HOLD_CYCLES (1u << 16)  /* some 20 us */
#define LATE_CYCLES (1u << 20)  /* some 300 us */
#define PENALTY_MIN 1024u       /* waits, doubled each time */
#define PENALTY_MAX (1u << 20)
#define IN_TIME_MAX 2048u       /* answers, then the penalty begins anew */
#define LATE_COST 256u          /* one in so many is late by the scheduler */

__thread unsigned vmh_batch_left __attribute__((tls_model("initial-exec"))); /* answers that may still come */
static __thread struct {
	unsigned held, penalty, without, in_time;
	uint64_t since; /* the last push, in cycles */
} my __attribute__((tls_model("initial-exec")));

static void late(void)
{
	vmh_batch_left = 0;
	if (my.in_time >= LATE_COST) {
		my.in_time -= LATE_COST;
		return;
	}
	my.penalty = my.penalty ? my.penalty * 2 : PENALTY_MIN;
	if (my.penalty > PENALTY_MAX)
		my.penalty = PENALTY_MAX;
	my.without = my.penalty;
}

void vmh_batch_slow(unsigned ready)
{
	uint64_t now = vmh_cycles();

	if (vmh_unlikely(my.held && now - my.since > LATE_CYCLES))
		late();
	my.held = 0;
	vmh_batch_left = 0;
	if (!ready || !now)
		return;
	if (vmh_unlikely(my.without)) {
		my.without--;
		return;
	}
	my.since = now;
	vmh_batch_left = ready;
}

bool vmh_batch_more(void)
{
	uint64_t now = vmh_cycles(), gone = now - my.since;

	if (my.in_time < IN_TIME_MAX)
		my.in_time++;
	else
		my.penalty = 0;
	if (--vmh_batch_left && ++my.held < BATCH && gone < HOLD_CYCLES)
		return true;
	if (vmh_unlikely(my.held > 1 && gone > LATE_CYCLES))
		late();
	my.held = 0;
	my.since = now;
	return false;
}
