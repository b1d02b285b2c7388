/* See vmh_patience.h. */
#include "vmh_patience.h"

#define ALL_NS 3000000000ull
#define LEAST_NS 250000000ull  /* what a single answer may take when the patience is used up */
#define THREAD_NS 1000000000ull /* the same, for the internal thread */
#define FREE_NS 100000000ull   /* an answer within this costs nothing */
#define REFILL 20              /* a second of patience comes back in 20 s */
#define FIRST_RETRY_NS 4000000000ull
#define MAX_SHIFT 4            /* retries after 4, 16 and from then on 64 s */

static uint64_t left = ALL_NS, at;
static unsigned timeouts;

uint64_t vmh_patience_ns(uint64_t now, bool internal)
{
	uint64_t least = internal ? THREAD_NS : LEAST_NS;

	if (at && now > at)
		left += (now - at) / REFILL;
	if (left >= ALL_NS) {
		left = ALL_NS;
		timeouts = 0;
	}
	at = now;
	return left > least ? left : least;
}

void vmh_patience_spent(uint64_t start, uint64_t now, bool timed_out, bool internal)
{
	uint64_t cost = now > start + FREE_NS ? now - start - FREE_NS : 0;

	if (internal && !timed_out)
		cost = 0;
	left -= cost < left ? cost : left;
	at = now;
	if (timed_out)
		timeouts++;
}

uint64_t vmh_patience_retry_ns(uint64_t usual)
{
	unsigned shift = timeouts > 2 ? MAX_SHIFT : (timeouts - 1) * 2;

	return timeouts ? FIRST_RETRY_NS << shift : usual;
}
