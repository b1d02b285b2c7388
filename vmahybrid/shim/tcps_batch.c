/* A program that got several ready sockets from one wait answers them one after the other, and waits again. What it
 * sends meanwhile is posted on the ring and pushed by one system call for many frames: when the last of those sockets
 * was answered, when BATCH frames wait, when the program next looks at a ring, and HOLD_CYCLES after the last push.
 *
 * A program that computes for long between two answers would delay the first one. It is found out by its next call, and
 * pushes each frame at once for a while. The internal thread pushes what a program leaves behind, every 10 ms. */
#include "vmh_tcps.h"

#define BATCH 16
#define HOLD_CYCLES (1u << 16)  /* some 20 us */
#define LATE_CYCLES (1u << 20)  /* some 300 us */
#define PENALTY_MIN 1024u       /* waits, doubled each time */
#define PENALTY_MAX (1u << 20)

__thread unsigned vmh_batch_left __attribute__((tls_model("initial-exec"))); /* answers that may still come */
static __thread struct {
	unsigned held, penalty, without;
	uint64_t since; /* the last push, in cycles */
} my __attribute__((tls_model("initial-exec")));

static void late(void)
{
	my.penalty = my.penalty ? my.penalty * 2 : PENALTY_MIN;
	if (my.penalty > PENALTY_MAX)
		my.penalty = PENALTY_MAX;
	my.without = my.penalty;
	vmh_batch_left = 0;
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

	if (--vmh_batch_left && ++my.held < BATCH && gone < HOLD_CYCLES)
		return true;
	if (vmh_unlikely(my.held > 1 && gone > LATE_CYCLES))
		late();
	my.held = 0;
	my.since = now;
	return false;
}
