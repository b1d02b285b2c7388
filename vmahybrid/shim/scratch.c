/* Memory for a moment, not by malloc(): poll() and select() may run in a signal handler. */
#include "vmh_iomux_int.h"
#include <signal.h>
#include <stddef.h>
#include <sys/mman.h>

#define PAGE 4096u
#define PAGES 64u

/* For a program that may have no more (RLIMIT_AS, RLIMIT_DATA): connections come home by it. Free pages are zeros. */
static _Alignas(PAGE) char reserve[PAGES][PAGE];
static _Atomic uint64_t in_use; /* a bit for each page */

static uint64_t pages_of(size_t bytes)
{
	size_t n = (bytes + PAGE - 1) / PAGE;

	return n < PAGES ? (1ull << n) - 1 : UINT64_MAX;
}

static void *of_reserve(size_t bytes)
{
	uint64_t pages = pages_of(bytes), had = atomic_load(&in_use);

	if (pages == UINT64_MAX)
		return NULL;
	for (unsigned i = 0; pages << i >> i == pages && i < PAGES;) {
		if (had & pages << i)
			i++;
		else if (atomic_compare_exchange_strong(&in_use, &had, had | pages << i))
			return reserve[i];
	}
	return NULL;
}

void *vmh_scratch_new(size_t bytes)
{
	long p = vmh_sys(SYS_mmap, NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);

	return p < 0 && p > -4096 ? NULL : (void *)p;
}

void *vmh_scratch_certain(size_t bytes)
{
	void *p = vmh_scratch_new(bytes);

	return vmh_likely(p) ? p : of_reserve(bytes);
}

void vmh_scratch_fork_child(void)
{
	if (atomic_exchange(&in_use, 0)) /* by threads that are not here */
		memset(reserve, 0, sizeof(reserve));
}

void vmh_scratch_free(void *p, size_t bytes)
{
	size_t at = (uintptr_t)p - (uintptr_t)reserve;

	if (vmh_likely(at >= sizeof(reserve))) {
		vmh_sys(SYS_munmap, p, bytes);
		return;
	}
	memset(p, 0, bytes);
	atomic_fetch_and(&in_use, ~(pages_of(bytes) << at / PAGE));
}

/* Those that nobody has at the moment: a new one costs more than a look at a hundred sockets. */
static _Atomic(struct lent *) kept[8];

struct lent {
	size_t bytes;
	struct lent *before;           /* of the same thread */
	const char *frame;             /* of who has it */
	const void *caller;
	max_align_t p[];
};

#define KEPT_BYTES 65536u

static __thread struct lent *lent_here __attribute__((tls_model("initial-exec")));

/* Nobody has it any more. */
static void take_back(struct lent *l)
{
	for (struct lent **at = &lent_here; *at; at = &(*at)->before)
		if (*at == l) {
			*at = l->before;
			break;
		}
	for (unsigned i = 0; l->bytes == KEPT_BYTES && i < sizeof(kept) / sizeof(kept[0]); i++) {
		struct lent *none = NULL;

		if (atomic_compare_exchange_strong(&kept[i], &none, l))
			return;
	}
	vmh_scratch_free(l, l->bytes);
}

static bool on_stack_of_handlers(void)
{
	stack_t is = { 0 };

	return vmh_sys(SYS_sigaltstack, NULL, &is) || is.ss_flags & SS_ONSTACK;
}

/* A call that a handler has left by siglongjmp() gives nothing back: its frame is where this one's is, or below. */
static void take_from_the_left(const char *frame, const void *caller)
{
	struct lent *l = lent_here;

	if (vmh_likely(!l) || l->frame > frame || (l->frame == frame && l->caller != caller) || on_stack_of_handlers())
		return;
	for (; (l = lent_here) && (l->frame < frame || (l->frame == frame && l->caller == caller));)
		take_back(l);
}

static struct lent *some(size_t all)
{
	struct lent *l;

	for (unsigned i = 0; all <= KEPT_BYTES && i < sizeof(kept) / sizeof(kept[0]); i++) {
		if (!atomic_load_explicit(&kept[i], memory_order_relaxed))
			continue;
		l = atomic_exchange(&kept[i], NULL);
		if (l)
			return l;
	}
	if (all < KEPT_BYTES)
		all = KEPT_BYTES; /* pages that are not touched cost nothing */
	l = vmh_scratch_new(all);
	if (l)
		l->bytes = all;
	return l;
}

__attribute__((noinline)) void *vmh_scratch_lent(size_t bytes)
{
	const char *frame = __builtin_frame_address(0);
	const void *caller = __builtin_return_address(0);
	struct lent *l;

	take_from_the_left(frame, caller);
	l = some(sizeof(*l) + bytes);
	if (!l)
		return NULL;
	l->frame = frame;
	l->caller = caller;
	l->before = lent_here;
	lent_here = l;
	return l->p;
}

void vmh_scratch_give_back(void *p)
{
	take_back((struct lent *)((char *)p - offsetof(struct lent, p)));
}
