/* Counters: per CPU, so no atomics; XDP runs with bottom halves off. */
#ifndef VMH_COUNT_H
#define VMH_COUNT_H

#include "vmh_flow.h"

static __always_inline void vmh_count(struct vmh_hits *hits, __u32 bytes)
{
	if (!hits)
		return;
	hits->packets += 1;
	hits->bytes += bytes;
}

#endif
