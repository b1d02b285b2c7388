/* Sleeping and waking: one eventfd per thread that ever slept, the list of those who sleep now. */
#include "vmh_iomux_int.h"
#include "vmh_ring.h"
#include "vmh_sleep.h"
#include "vmh_worker.h"
#include <pthread.h>
#include <sys/eventfd.h>

_Atomic int vmh_sleepers;
static struct vmh_lock list_lock;
static struct vmh_sleeper *sleeping, *all;
static pthread_key_t exit_key;
static bool exit_key_made;
__thread struct vmh_sleeper vmh_me __attribute__((tls_model("initial-exec")));
__thread unsigned vmh_my_tid __attribute__((tls_model("initial-exec")));

unsigned vmh_ask_tid(void)
{
	return vmh_my_tid = (unsigned)vmh_sys(SYS_gettid);
}

static void unlink_sleeping(struct vmh_sleeper *s) /* list lock held */
{
	if (!s->pprev)
		return;
	*s->pprev = s->next;
	if (s->next)
		s->next->pprev = s->pprev;
	s->pprev = NULL;
	atomic_fetch_sub(&vmh_sleepers, 1);
}

/* Also runs when a thread is cancelled in its sleep: it is then still on the list. */
static void thread_exit(void *arg)
{
	struct vmh_sleeper *s = arg;

	vmh_watch_end(s);
	vmh_lock(&list_lock);
	unlink_sleeping(s);
	if (s->all_pprev) {
		*s->all_pprev = s->all_next;
		if (s->all_next)
			s->all_next->all_pprev = s->all_pprev;
		s->all_pprev = NULL;
	}
	vmh_unlock(&list_lock);
	if (s->fd_plus_one)
		vmh_fd_hidden_close(s->fd_plus_one - 1);
	s->fd_plus_one = s->depth = 0;
}

bool vmh_sleep_give_up(void)
{
	if (!vmh_me.fd_plus_one || vmh_me.depth)
		return false;
	thread_exit(&vmh_me);
	return true;
}

static int make_wakefd(void)
{
	int fd;

	if (vmh_fds_apart) /* the others would write to what they have under its number */
		return -EMFILE;
	fd = (int)vmh_sys(SYS_eventfd2, 0, EFD_CLOEXEC | EFD_NONBLOCK);

	if (fd < 0)
		return fd;
	fd = vmh_fd_hide(fd);
	vmh_lock(&list_lock);
	if (vmh_me.all_pprev) { /* a signal handler slept here before us */
		vmh_unlock(&list_lock);
		vmh_fd_hidden_close(fd);
		return 0;
	}
	if (!exit_key_made)
		exit_key_made = pthread_key_create(&exit_key, thread_exit) == 0;
	vmh_me.all_next = all;
	vmh_me.all_pprev = &all;
	if (all)
		all->all_pprev = &vmh_me.all_next;
	all = &vmh_me;
	vmh_me.fd_plus_one = fd + 1;
	vmh_unlock(&list_lock);
	/* without the destructor the list would keep a pointer into a dead thread's memory */
	if (!exit_key_made || pthread_setspecific(exit_key, &vmh_me) != 0) {
		thread_exit(&vmh_me);
		return -ENOMEM;
	}
	return 0;
}

int vmh_sleep_begin_for(const void *obj)
{
	if (vmh_unlikely(!vmh_me.fd_plus_one)) {
		int r = make_wakefd();
		if (r < 0)
			return r;
	}
	bool outermost = vmh_me.depth++ == 0; /* first, or a handler would take itself for that */

	atomic_signal_fence(memory_order_seq_cst);
	atomic_store_explicit(&vmh_me.waits_for, outermost ? obj : NULL, memory_order_relaxed);
	if (outermost) {
		vmh_watch_end(&vmh_me);
		vmh_me.vain = 0;
		vmh_lock(&list_lock);
		if (!vmh_me.pprev) { /* a handler that jumped out of a sleep left us on the list */
			vmh_me.next = sleeping;
			vmh_me.pprev = &sleeping;
			if (sleeping)
				sleeping->pprev = &vmh_me.next;
			sleeping = &vmh_me;
			atomic_fetch_add(&vmh_sleepers, 1);
		}
		vmh_unlock(&list_lock);
	}
	/* pairs with the fence of vmh_wake_all: either it sees us, or we see what it delivered */
	atomic_thread_fence(memory_order_seq_cst);
	return vmh_me.fd_plus_one - 1;
}

int vmh_sleep_begin(void)
{
	return vmh_sleep_begin_for(NULL);
}

void vmh_sleep_looks(bool on)
{
	vmh_me.looks = on;
}

void vmh_sleep_end(void)
{
	if (!vmh_me.fd_plus_one || vmh_me.depth == 0)
		return;
	if (vmh_me.depth == 1) {
		vmh_watch_end(&vmh_me);
		vmh_lock(&list_lock);
		unlink_sleeping(&vmh_me);
		vmh_unlock(&list_lock);
	}
	vmh_me.depth--;
	/* An inner sleep may drain a wake-up of the outer one: the handler's wrapper writes again when
	 * the handler returns. */
	if (atomic_load(&vmh_me.woken)) {
		uint64_t v;

		atomic_store(&vmh_me.woken, 0);
		vmh_sys(SYS_read, vmh_me.fd_plus_one - 1, &v, sizeof(v));
	}
}

/* Why one was woken. */
#define FOR_IT 1    /* it is to look at what it waits for, and then the call decides */
#define APPOINTED 2 /* watch.c: to sleep in another way */

static void wake(struct vmh_sleeper *s, int why)
{
	static const uint64_t one = 1;

	if (!atomic_fetch_or(&s->woken, why))
		vmh_sys(SYS_write, s->fd_plus_one - 1, &one, sizeof(one));
}

void vmh_sleeper_appointed(struct vmh_sleeper *s)
{
	wake(s, APPOINTED);
}

/* For nothing else, that is. */
static bool was_appointed(int wakefd)
{
	int why = APPOINTED;
	uint64_t v;

	if (atomic_load(&vmh_me.woken) != APPOINTED)
		return false;
	vmh_sys(SYS_read, wakefd, &v, sizeof(v)); /* first: who finds the bit set does not write */
	return atomic_compare_exchange_strong(&vmh_me.woken, &why, 0);
}

static _Atomic bool left_to_worker;

void vmh_wake_for_child(void)
{
	if (vmh_unlikely(atomic_exchange(&left_to_worker, false)))
		vmh_wake_all();
}

static bool is_left_to_worker(void)
{
	if (vmh_likely(!vmh_memory_borrowed()))
		return false;
	atomic_store(&left_to_worker, true); /* sleepers that are younger than our table of descriptors are not in it */
	vmh_worker_wake();
	return true;
}

void vmh_wake_all_slow(void)
{
	if (vmh_unlikely(is_left_to_worker()))
		return;
	vmh_lock(&list_lock);
	for (struct vmh_sleeper *s = sleeping; s; s = s->next)
		wake(s, FOR_IT);
	vmh_unlock(&list_lock);
}

static bool is_one_of(const void *obj, const void *const *objs, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (objs[i] == obj)
			return true;
	return false;
}

#define SETS 16u

void vmh_wake_for_slow(struct vmh_obj *const *objs, unsigned n)
{
	const void *all[VMH_WAKE_MAX + SETS];
	unsigned k = 0;

	if (vmh_unlikely(is_left_to_worker()))
		return;
	for (unsigned i = 0; i < n; i++) {
		unsigned sets = vmh_epoll_sets_of(objs[i], all + k, VMH_WAKE_MAX + SETS - n + i - k);

		if (sets == VMH_WAKE_MAX + SETS - n + i - k) { /* there may be more */
			vmh_wake_all_slow();
			return;
		}
		k += sets;
		all[k++] = objs[i];
	}
	vmh_lock(&list_lock);
	for (struct vmh_sleeper *s = sleeping; s; s = s->next) {
		const void *obj = atomic_load_explicit(&s->waits_for, memory_order_relaxed);

		if ((!obj || is_one_of(obj, all, k)) && !(s == &vmh_me && s->looks))
			wake(s, FOR_IT);
	}
	vmh_unlock(&list_lock);
}

void vmh_sleep_signal(void)
{
	if (vmh_me.depth > 0 && vmh_me.fd_plus_one)
		wake(&vmh_me, FOR_IT);
}

void vmh_sleep_interrupted(void)
{
	if (vmh_me.depth == 0 || vmh_held.depth) /* a fault of ours, under a lock */
		return;
	vmh_me.looks = false;
	vmh_watch_end(&vmh_me);
	atomic_store_explicit(&vmh_me.waits_for, NULL, memory_order_relaxed);
}

/* A raw system call is no cancellation point; poll, recv and the others must be one while they block.
 * This is what libc itself does around its blocking calls. No lock is held here. */
static long cancellable_ppoll(struct pollfd *p, unsigned n, struct timespec *ts, const sigset_t *mask)
{
	int type;
	long r;

	vmh_cancel_type(PTHREAD_CANCEL_ASYNCHRONOUS, &type);
	r = vmh_sys(SYS_ppoll, p, n, ts, mask, sizeof(uint64_t));
	vmh_cancel_type(type, NULL);
	return r;
}

#define STACK_FDS 128
#define STACK_RING_FDS 32
#define RING_FDS 1024

int vmh_sleep(struct pollfd *fds, unsigned n, int64_t timeout_ns, const sigset_t *mask, int wakefd)
{
	return vmh_sleep_on(NULL, fds, n, timeout_ns, mask, wakefd);
}

int vmh_sleep_on(struct vmh_ring *only, struct pollfd *fds, unsigned n, int64_t timeout_ns, const sigset_t *mask,
		 int wakefd)
{
	struct pollfd st[STACK_FDS], *p = st;
	int few[STACK_RING_FDS], *ring = few;
	struct timespec ts, *t = NULL;
	unsigned nring = vmh_watch_begin(only, wakefd >= 0, few, STACK_RING_FDS), total = n + nring + 1;
	bool asked = false;
	long r;

	if (nring == STACK_RING_FDS || total > STACK_FDS) {
		p = vmh_scratch_lent((n + RING_FDS + 1) * sizeof(*p) + RING_FDS * sizeof(*ring));
		if (!p)
			return -ENOMEM;
		ring = (int *)(p + n + RING_FDS + 1);
		nring = vmh_watch_begin(only, wakefd >= 0, ring, RING_FDS);
		total = n + nring + 1;
	}
	memcpy(p, fds, n * sizeof(*p));
	for (unsigned i = 0; i < nring; i++)
		p[n + i] = (struct pollfd){ .fd = ring[i], .events = POLLIN };
	p[total - 1] = (struct pollfd){ .fd = wakefd, .events = POLLIN };
	if (timeout_ns >= 0) {
		ts = (struct timespec){ .tv_sec = timeout_ns / 1000000000, .tv_nsec = timeout_ns % 1000000000 };
		t = &ts;
	}
	r = cancellable_ppoll(p, total, t, mask);
	if (vmh_unlikely(r == -EINVAL))
		r = vmh_poll_few(p, total, t, mask, true);
	for (unsigned i = 0; i < n; i++) {
		fds[i].revents = r > 0 ? p[i].revents : 0;
		asked |= fds[i].revents;
	}
	if (r > 0 && nring)
		vmh_watch_woken(p + n, (int)nring);
	asked |= r > 0 && p[total - 1].revents && !was_appointed(wakefd);
	if (p != st)
		vmh_scratch_give_back(p);
	return r < 0 ? (int)r : r > 0 && !asked ? VMH_SLEPT_BY_RINGS : 0;
}

void vmh_sleep_fork_child(void)
{
	vmh_watch_fork_child();
	vmh_lock_reset(&list_lock);
	atomic_store(&vmh_sleepers, 0);
	/* the eventfds are shared with the parent: reading ours would take away its wake-ups */
	for (struct vmh_sleeper *s = all; s; s = s->all_next)
		if (s->fd_plus_one)
			vmh_fd_hidden_close(s->fd_plus_one - 1);
	sleeping = all = NULL;
	memset(&vmh_me, 0, sizeof(vmh_me));
	vmh_my_tid = 0;
}
