/* A second thread counts where one did alone. */
#include "vmh_stats.h"
#include "vmh_lock.h"

void vmh_another_counts(unsigned *thread, unsigned char *many, unsigned tid)
{
	unsigned nobody = 0;

	if (__atomic_compare_exchange_n(thread, &nobody, tid, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
		return;
	VMH_SET(*many, 1);
	if (!vmh_barrier() && vmh_barrier_possible())
		vmh_barrier();
	VMH_SET(*thread, tid);
}
