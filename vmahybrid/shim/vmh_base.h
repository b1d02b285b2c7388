/* What every file of the shim needs: raw system calls, atomics, branch hints, the reason codes.
 *
 * Rules: internal functions return 0 or -errno and never touch errno; only the interposers
 * (interpose_*.c) set errno. Every fd the shim owns is close-on-exec and used by raw system calls
 * only (vmh_sys_*), so that no other preload, nor our own interposers, see them.
 */
#ifndef VMH_BASE_H
#define VMH_BASE_H

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <errno.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define vmh_likely(x) __builtin_expect(!!(x), 1)
#define vmh_unlikely(x) __builtin_expect(!!(x), 0)
/* Where code lies. The path of a datagram displaces the kernel's code from the instruction cache, which works for the
 * same datagram: 14 KB cost 160 ns in the kernel (EPYC). So the functions on it lie together, and the branches that
 * end in a call of a cold one lie elsewhere. */
#define VMH_HOT __attribute__((hot))
#define VMH_COLD __attribute__((cold, noinline))
#define VMH_EXPORT __attribute__((visibility("default")))

/* A system call: its result, or -errno. errno is not touched. */
static inline long vmh_sys6(long nr, long a, long b, long c, long d, long e, long f)
{
#ifdef __x86_64__
	register long r10 __asm__("r10") = d;
	register long r8 __asm__("r8") = e;
	register long r9 __asm__("r9") = f;

	__asm__ volatile("syscall" : "+a"(nr) : "D"(a), "S"(b), "d"(c), "r"(r10), "r"(r8), "r"(r9) : "rcx", "r11", "memory");
	return nr;
#else
	int saved = errno;
	long r = syscall(nr, a, b, c, d, e, f);

	if (r == -1) {
		r = -errno;
		errno = saved;
	}
	return r;
#endif
}
/* Every argument is made a long: an int would leave garbage in the upper half. */
#define vmh_sys(...) vmh_sys7_(__VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define vmh_sys7_(nr, a, b, c, d, e, f, ...) \
	vmh_sys6((long)(nr), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* No program has memory here, so the kernel says EFAULT, and we must not touch it: below the first page that may be
 * mapped, and above the end of user space (2^47, with five levels of page tables 2^56). */
static inline bool vmh_bad_ptr(const volatile void *p)
{
#ifdef __x86_64__
	return vmh_unlikely((uintptr_t)p - 4096 >= (1ul << 56) - 4096);
#else
	return vmh_unlikely((uintptr_t)p < 4096);
#endif
}

enum vmh_reason {
#define REASON(code, name, slug, text, remedy) VMH_R_##name = code,
#include "reasons.def"
#undef REASON
};
const char *vmh_reason_slug(unsigned reason);
const char *vmh_reason_text(unsigned reason);

static inline uint64_t vmh_clock_ns(clockid_t clock)
{
	struct timespec t;

	clock_gettime(clock, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static inline uint64_t vmh_now_ns(void)
{
	return vmh_clock_ns(CLOCK_MONOTONIC);
}
static inline uint64_t vmh_wall_ns(void)
{
	return vmh_clock_ns(CLOCK_REALTIME);
}

/* A counter of some GHz that is cheap to read, without order to what surrounds it; 0 where there is none. */
static inline uint64_t vmh_cycles(void)
{
#if defined(__x86_64__)
	return __builtin_ia32_rdtsc();
#else
	return 0;
#endif
}

/* Globals that each call of the program reads, side by side: a program that has just been in the kernel finds few of its
 * cache lines again. */
#define VMH_EACH_CALL __attribute__((section("vmh_each_call")))

/* For counters with one writer at a time, such as those under a lock; else VMH_COUNT_BY of vmh_stats.h. */
#define VMH_COUNT(c, n) __atomic_store_n(&(c), __atomic_load_n(&(c), __ATOMIC_RELAXED) + (n), __ATOMIC_RELAXED)
#define VMH_SET(c, v) __atomic_store_n(&(c), (v), __ATOMIC_RELAXED)
#define VMH_GET(c) __atomic_load_n(&(c), __ATOMIC_RELAXED)

/* True once in `every` ns at the most; *last is of vmh_now_ns(). */
static inline bool vmh_due(uint64_t *last, uint64_t now, uint64_t every)
{
	if (now - VMH_GET(*last) < every)
		return false;
	VMH_SET(*last, now);
	return true;
}

static inline void vmh_cpu_relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
	__builtin_ia32_pause();
#elif defined(__aarch64__)
	__asm__ volatile("yield");
#endif
}

extern __thread unsigned vmh_my_tid __attribute__((tls_model("initial-exec"))); /* sleep.c; 0: not asked yet */
VMH_COLD unsigned vmh_ask_tid(void);
static inline unsigned vmh_tid(void)
{
	return vmh_likely(vmh_my_tid) ? vmh_my_tid : vmh_ask_tid();
}

#endif
