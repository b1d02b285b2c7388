/* See vmh_spin.h. */
#include "vmh_spin.h"
#include "vmh_base.h"
#include <sched.h>

#define PREEMPTED (1u << 21) /* cycles, some 0.7 ms: interrupts and short visits of others are shorter */
#define TAKEN (1u << 15)     /* some 10 us: so long sched_yield() takes only if another thread runs */
#define LOOKS 4096u          /* some 40 ms */

static __thread struct {
	uint64_t last;
	unsigned company; /* looks for which it is thought to be there */
} my __attribute__((tls_model("initial-exec")));

VMH_COLD static void give_away(void)
{
	uint64_t before = vmh_cycles();

	my.company--;
	sched_yield();
	my.last = vmh_cycles();
	if (my.last - before > TAKEN)
		my.company = LOOKS;
}

void vmh_spin_look_slow(uint64_t loops)
{
	uint64_t now = vmh_cycles();

	if (vmh_unlikely(loops > VMH_SPIN_LOOK && now - my.last > PREEMPTED))
		my.company = LOOKS;
	my.last = now;
	if (vmh_unlikely(my.company))
		give_away();
}
