/* Blocks of classes, 16 bytes apart up to 128, then four to a doubling, so that at most a fifth of a block of more than
 * 64 bytes is unused. They are cut from slabs and, given back, kept for the next one of their class: a slab is never
 * unmapped. Bigger blocks are mappings of their own. */
#include "vmh_heap.h"
#include "vmh_lock.h"

#ifdef VMH_PLAIN_MALLOC
#include <stdlib.h>

void *vmh_heap_get(size_t n)
{
	return malloc(n);
}

void *vmh_heap_zero(size_t count, size_t n)
{
	return calloc(count, n);
}

void *vmh_heap_more(void *p, size_t n)
{
	return realloc(p, n ? n : 1);
}

void vmh_heap_free(void *p)
{
	free(p);
}

size_t vmh_heap_used(void)
{
	return 0;
}

void vmh_heap_fork_child(void) {}

#else
#include <sys/mman.h>

#define STEP 16
#define LINEAR 8             /* classes of up to 128 bytes */
#define CLASSES (LINEAR + 4 * 9)
#define CLASS_MAX (64 * 1024)
#define SLAB (1024 * 1024)   /* what is not used of it costs addresses only */
#define PAGE 4096
#define HUGE_MAX (SIZE_MAX / 2) /* and no sum below overflows */

struct block { /* the program's bytes follow */
	union {
		size_t room; /* of them; more than CLASS_MAX: a mapping, with this head */
		char align[STEP];
	};
	struct block *next[]; /* of those that were given back, where the program's bytes were */
};

static struct vmh_lock lock;
static struct block *given[CLASSES];
static unsigned char *slab, *slab_end;
static size_t used;

static inline unsigned class_of(size_t n)
{
	size_t last = n ? n - 1 : 0;
	unsigned bits;

	if (last < LINEAR * STEP)
		return (unsigned)(last / STEP);
	bits = 63 - (unsigned)__builtin_clzll(last);
	return LINEAR + (bits - 7) * 4 + (unsigned)(last >> (bits - 2) & 3);
}

static inline size_t room_of(unsigned class_)
{
	unsigned k = class_ - LINEAR;

	return class_ < LINEAR ? (class_ + 1) * STEP : (size_t)(5 + k % 4) << (k / 4 + 5);
}

static void *map(size_t bytes)
{
	long p = vmh_sys(SYS_mmap, NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0L);

	return p < 0 && p > -PAGE ? NULL : (void *)p;
}

static inline size_t mapped(size_t n)
{
	return (sizeof(struct block) + n + PAGE - 1) & ~(size_t)(PAGE - 1);
}

static void count(size_t more, size_t less)
{
	vmh_lock(&lock);
	VMH_COUNT(used, more - less);
	vmh_unlock(&lock);
}

static void *get_mapped(size_t n)
{
	struct block *b = n < HUGE_MAX ? map(mapped(n)) : NULL;

	if (!b)
		return NULL;
	b->room = mapped(n) - sizeof(*b);
	count(b->room, 0);
	return b + 1;
}

static void *grow_mapped(struct block *b, size_t n)
{
	size_t had = b->room;
	long p = n < HUGE_MAX ? vmh_sys(SYS_mremap, b, mapped(had), mapped(n), MREMAP_MAYMOVE) : -ENOMEM;

	if (p < 0 && p > -PAGE)
		return NULL;
	b = (struct block *)p;
	b->room = mapped(n) - sizeof(*b);
	count(b->room, had);
	return b + 1;
}

/* Lock held. */
VMH_COLD static struct block *cut(size_t room)
{
	struct block *b;

	if ((size_t)(slab_end - slab) < sizeof(*b) + room) {
		unsigned char *p = map(SLAB);

		if (!p)
			return NULL;
		slab = p;
		slab_end = p + SLAB;
	}
	b = (struct block *)slab;
	slab += sizeof(*b) + room;
	b->room = room;
	return b;
}

void *vmh_heap_get(size_t n)
{
	unsigned k = class_of(n);
	struct block *b;

	if (vmh_unlikely(n > CLASS_MAX))
		return get_mapped(n);
	vmh_lock(&lock);
	b = given[k];
	if (vmh_likely(b != NULL))
		given[k] = b->next[0];
	else
		b = cut(room_of(k));
	if (vmh_likely(b != NULL))
		VMH_COUNT(used, b->room);
	vmh_unlock(&lock);
	return b ? b + 1 : NULL;
}

void *vmh_heap_zero(size_t count, size_t n)
{
	size_t bytes;
	void *p = __builtin_mul_overflow(count, n, &bytes) ? NULL : vmh_heap_get(bytes);

	return p && bytes <= CLASS_MAX ? memset(p, 0, bytes) : p; /* the kernel's pages are zero */
}

void *vmh_heap_more(void *p, size_t n)
{
	struct block *b = p ? (struct block *)p - 1 : NULL;
	void *more;

	if (b && n <= b->room)
		return p;
	if (b && b->room > CLASS_MAX)
		return grow_mapped(b, n);
	more = vmh_heap_get(n);
	if (b && more) {
		memcpy(more, p, b->room);
		vmh_heap_free(p);
	}
	return more;
}

void vmh_heap_free(void *p)
{
	struct block *b = p ? (struct block *)p - 1 : NULL;
	unsigned k;

	if (!b)
		return;
	if (vmh_unlikely(b->room > CLASS_MAX)) {
		count(0, b->room);
		vmh_sys(SYS_munmap, b, mapped(b->room));
		return;
	}
	k = class_of(b->room);
	vmh_lock(&lock);
	b->next[0] = given[k];
	given[k] = b;
	VMH_COUNT(used, -b->room);
	vmh_unlock(&lock);
}

size_t vmh_heap_used(void)
{
	return VMH_GET(used);
}

/* Another thread of the parent may have been at any of it: what was given back is lost to the child. */
void vmh_heap_fork_child(void)
{
	vmh_lock_reset(&lock);
	memset(given, 0, sizeof(given));
	slab = slab_end = NULL;
}
#endif
