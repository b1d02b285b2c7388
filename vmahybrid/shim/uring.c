/* The rings of io_uring that are known, by their descriptor. Each is mapped once more, when it is first entered with
 * requests: the program's own mapping may be gone at any time. That mapping goes before the descriptor is closed, since
 * it would keep the ring, and what it was asked for, alive.
 *
 * A descriptor may be another file's meanwhile. That is looked at before the first request is touched, not before they
 * are read: the memory is the ring's either way. */
#include "vmh_uring.h"
#include "vmh_fd.h"
#include "vmh_lock.h"
#include "vmh_main.h"
#include "vmh_obj.h"
#include <limits.h>
#include <linux/io_uring.h>
#include <sys/mman.h>

#define RINGS 64 /* further ones are the kernel's alone */

/* Those that leave the requests where we look for them. Headers before Linux 6.5 lack some of the names. */
#define NO_SQARRAY (1u << 16)
#define FLAGS_KNOWN ((1u << 19) - 1)
#define FLAGS_OTHERS (IORING_SETUP_IOPOLL | IORING_SETUP_SQPOLL | 1u << 14 /* NO_MMAP */ | 1u << 15 /* no descriptor */)

static struct uring {
	_Atomic unsigned number; /* the descriptor + 1; 0: not known. Set to 0 without the lock, too */
	struct vmh_lock lock;    /* for the rest */
	struct vmh_file file;
	struct io_sqring_offsets at;
	unsigned entries, flags;
	char *queue, *requests;  /* NULL: not mapped */
	const void *thread;      /* that entered it first */
	unsigned outside;        /* threads that hand in without the lock */
	bool many;               /* others do, too */
} rings[RINGS];

_Atomic unsigned vmh_urings;

static size_t request_size(const struct uring *r)
{
	return sizeof(struct io_uring_sqe) << !!(r->flags & IORING_SETUP_SQE128);
}

static size_t requests_size(const struct uring *r)
{
	return r->entries * request_size(r);
}

static size_t queue_size(const struct uring *r)
{
	size_t end = (r->at.head > r->at.tail ? r->at.head : r->at.tail) + sizeof(uint32_t);
	size_t array = r->flags & NO_SQARRAY ? 0 : r->at.array + r->entries * sizeof(uint32_t);

	return array > end ? array : end;
}

static char *map(int fd, size_t size, unsigned long offset)
{
	long p = vmh_sys(SYS_mmap, NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, offset);

	return (unsigned long)p > -4096ul ? NULL : (char *)p;
}

static void unmap(struct uring *r)
{
	if (r->queue)
		vmh_sys(SYS_munmap, r->queue, queue_size(r));
	if (r->requests)
		vmh_sys(SYS_munmap, r->requests, requests_size(r));
	r->queue = r->requests = NULL;
}

/* Lock held. false: it is not there, or can't be had. */
static bool mapped(struct uring *r, int fd)
{
	if (r->requests)
		return true;
	if (!vmh_file_is_ours(&r->file))
		return false;
	r->queue = map(fd, queue_size(r), IORING_OFF_SQ_RING);
	r->requests = r->queue ? map(fd, requests_size(r), IORING_OFF_SQES) : NULL;
	return r->requests != NULL;
}

static struct uring *ring_of(int fd)
{
	unsigned n = fd >= 0 ? atomic_load_explicit(&vmh_urings, memory_order_acquire) : 0;

	for (unsigned i = 0; i < n; i++)
		if (atomic_load_explicit(&rings[i].number, memory_order_relaxed) == (unsigned)fd + 1)
			return &rings[i];
	return NULL;
}

bool vmh_uring_known(int fd)
{
	return ring_of(fd) != NULL;
}

static void sweep(struct uring *r)
{
	if (!vmh_trylock(&r->lock))
		return; /* who has it does so */
	if (!atomic_load(&r->number))
		unmap(r);
	vmh_unlock(&r->lock);
}

static void leave(struct uring *r)
{
	vmh_unlock(&r->lock);
	if (!atomic_load(&r->number))
		sweep(r);
}

void vmh_urings_forget(unsigned first, unsigned last)
{
	for (unsigned i = 0; i < atomic_load(&vmh_urings); i++) {
		unsigned number = atomic_load(&rings[i].number);

		if (number && number - 1 >= first && number - 1 <= last && !vmh_fdtab_borrowed() &&
		    atomic_compare_exchange_strong(&rings[i].number, &number, 0))
			sweep(&rings[i]);
	}
}

/* Lock held; nobody else has it. */
static void begin(struct uring *r, unsigned place, int fd, const struct io_uring_params *params)
{
	unsigned used = atomic_load(&vmh_urings);

	unmap(r);
	r->at = params->sq_off;
	r->entries = params->sq_entries;
	r->flags = params->flags;
	r->thread = NULL;
	r->many = false;
	r->outside = 0;
	if (vmh_file_of(&r->file, fd))
		return;
	atomic_store(&r->number, (unsigned)fd + 1);
	while (used <= place && !atomic_compare_exchange_weak(&vmh_urings, &used, place + 1))
		;
}

void vmh_uring_made(int fd, const struct io_uring_params *params)
{
	if (params->flags & (FLAGS_OTHERS | ~FLAGS_KNOWN) || vmh_filtered || vmh_fdtab_borrowed())
		return;
	for (unsigned i = 0; i < RINGS && !vmh_uring_known(fd); i++) {
		if (atomic_load(&rings[i].number))
			continue;
		vmh_lock(&rings[i].lock);
		if (!atomic_load(&rings[i].number))
			begin(&rings[i], i, fd, params);
		leave(&rings[i]);
	}
}

/* NULL: the program named none that is there, and the kernel passes over it. */
static struct io_uring_sqe *request(const struct uring *r, unsigned at)
{
	const uint32_t *array = (const uint32_t *)(r->queue + r->at.array);
	unsigned i = at & (r->entries - 1);

	if (!(r->flags & NO_SQARRAY))
		i = VMH_GET(array[i]);
	return i < r->entries ? (struct io_uring_sqe *)(r->requests + i * request_size(r)) : NULL;
}

/* How many of at most so many wait and were gone through. Or -errno. */
static long go_through(struct uring *r, unsigned most)
{
	unsigned head = __atomic_load_n((uint32_t *)(r->queue + r->at.head), __ATOMIC_ACQUIRE);
	unsigned tail = __atomic_load_n((uint32_t *)(r->queue + r->at.tail), __ATOMIC_ACQUIRE), n;
	bool sure = false, linked = false, first_of_next = false;
	int err = 0;

	for (n = 0; !err && head + n != tail && n < r->entries && n < most; n++) {
		struct io_uring_sqe *q = request(r, head + n);

		linked = first_of_next;
		first_of_next = q && q->flags & (IOSQE_IO_LINK | IOSQE_IO_HARDLINK);
		if (!q || !vmh_sqe_concerns(q))
			continue;
		if (!sure && !vmh_file_is_ours(&r->file)) {
			atomic_store(&r->number, 0);
			continue;
		}
		sure = true;
		err = vmh_sqe_taken(q, linked);
	}
	return err ? err : (long)n;
}

static long enter(const struct vmh_uring_call *k)
{
	return vmh_sys(SYS_io_uring_enter, k->fd, k->submit, k->wait, k->flags, k->arg, k->size);
}

/* Lock held: of several threads no other is to hand in what has not been gone through, nor this one what another has
 * written since. One that was alone so far may be about to hand in these instead of its own: all are gone through. */
static long hand_in(struct uring *r, const struct vmh_uring_call *k)
{
	struct vmh_uring_call part = *k;
	long n = go_through(r, VMH_GET(r->outside) ? UINT_MAX : k->submit);

	if (n < 0 || !r->many)
		return n;
	if (n < (long)part.submit)
		part.submit = (unsigned)n;
	part.wait = 0;
	part.flags &= ~(unsigned)IORING_ENTER_GETEVENTS;
	return enter(&part);
}

/* After the requests were handed in, as the kernel does it: not where it took fewer, and they are the answer. */
static long waited(const struct vmh_uring_call *k, long n)
{
	struct vmh_uring_call rest = *k;

	rest.submit = 0;
	if (n == (long)k->submit && k->flags & IORING_ENTER_GETEVENTS)
		enter(&rest);
	return n;
}

long vmh_uring_enter(const struct vmh_uring_call *k)
{
	struct uring *r = ring_of(k->fd);
	bool many = false, alone = false;
	long n = 0;

	if (!r)
		return enter(k);
	vmh_lock(&r->lock);
	if (atomic_load(&r->number) != (unsigned)k->fd + 1) {
		; /* closed by another thread */
	} else if (!mapped(r, k->fd)) {
		atomic_store(&r->number, 0);
	} else {
		if (!r->thread)
			r->thread = &vmh_held;
		r->many = many = r->many || r->thread != &vmh_held;
		n = hand_in(r, k);
		alone = n >= 0 && !many;
		if (alone)
			__atomic_fetch_add(&r->outside, 1, __ATOMIC_RELAXED);
	}
	leave(r);
	if (n < 0)
		return n;
	if (many)
		return waited(k, n);
	n = enter(k);
	if (alone && VMH_GET(r->outside)) /* 0: the descriptor is another ring's meanwhile */
		__atomic_fetch_sub(&r->outside, 1, __ATOMIC_RELAXED);
	return n;
}

/* The mappings are shared, and good here, too. */
void vmh_uring_fork_child(void)
{
	for (unsigned i = 0; i < atomic_load(&vmh_urings); i++) {
		vmh_lock_reset(&rings[i].lock);
		rings[i].outside = 0;
	}
}
