/* Included before every source of a test that counts what is prefetched: one call is one cache line. */
#ifndef COUNT_PREFETCH_H
#define COUNT_PREFETCH_H
extern unsigned prefetched;
extern const void *prefetched_first;
static inline void count_prefetch(const void *p)
{
	if (!prefetched++)
		prefetched_first = p;
}
#define __builtin_prefetch(p, ...) count_prefetch(p)
#endif
