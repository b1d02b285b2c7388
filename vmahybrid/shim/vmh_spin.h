/* A thread that spins and was preempted for a whole time slice shares its processor with others that want it, often
 * with those for whom it waits: it gives it away for a while, each LOOK_EVERY loops, as long as somebody takes it. */
#ifndef VMH_SPIN_H
#define VMH_SPIN_H
#include <stdint.h>

#define VMH_SPIN_LOOK 64 /* loops */

void vmh_spin_look_slow(uint64_t loops);
static inline void vmh_spin_look(uint64_t loops) /* loops of this call, from 1 on */
{
	if (__builtin_expect(loops % VMH_SPIN_LOOK == 0, 0))
		vmh_spin_look_slow(loops);
}
#endif
