/* What the bench's programs have in common. */
#ifndef VMH_BENCH_H
#define VMH_BENCH_H
#include <errno.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

static inline _Noreturn void die(const char *what)
{
	fprintf(stderr, "%s: %s: %s\n", program_invocation_short_name, what, strerror(errno));
	exit(1);
}

static inline uint64_t clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

/* Seconds, of no particular beginning. */
static inline double now(void)
{
	return (double)clock_ns(CLOCK_MONOTONIC) / 1e9;
}

static volatile sig_atomic_t stopped __attribute__((unused));

static inline void on_signal(int number)
{
	(void)number;
	stopped = 1;
}

#endif
