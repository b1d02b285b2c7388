#ifndef VMH_AFFINITY_H
#define VMH_AFFINITY_H
#include "vmh_base.h"

#define VMH_CPUS 8192 /* CONFIG_NR_CPUS of distribution kernels */

struct vmh_cpus {
	uint64_t words[VMH_CPUS / 64];
};

/* A hexadecimal mask (0x7) or a list (0,1,7-10), as taskset(1). false: neither, or no processor in it. */
bool vmh_cpus_parse(const char *text, struct vmh_cpus *cpus);
/* May VMA_INTERNAL_THREAD_AFFINITY be this? Such a text, or -1. */
bool vmh_cpus_says(const char *text);
/* The calling thread goes where the parameters say. */
void vmh_affinity_apply(void);
#endif
