/* Calls on connections that are the kernel's: the program's own system calls, as long as the policy does not want the
 * connection. Of many connections none stays in the cache, so such a call reads a byte of a table and writes a word of
 * its thread, and looks at the connection when the system call is on its way.
 *
 * Whoever moves a connection shuts its byte, has the kernel put a barrier into all threads (membarrier(2)), and finds
 * in their words who was in before. A word holds one call: what a signal handler does inside of it goes the long way. */
#include "vmh_iomux_int.h"
#include "vmh_tcps.h"
#include <pthread.h>
#include <sched.h>

VMH_EACH_CALL uint8_t *vmh_plain_fds;
VMH_EACH_CALL unsigned vmh_plain_size;
__thread struct vmh_plain_call *vmh_plain_mine __attribute__((tls_model("initial-exec")));

static struct vmh_plain_call *_Atomic calls; /* of all threads, also of those that have ended; append only */
static pthread_key_t exit_key;
static _Atomic int ready;                    /* 1: made, -1: can't be */

static void thread_exit(void *arg)
{
	struct vmh_plain_call *c = arg;

	vmh_plain_mine = NULL;
	atomic_store(&c->fd, 0);
	atomic_store(&c->taken, 0);
}

/* One at a time: the pool's lock is held. */
void vmh_plain_init(void)
{
	void *table;

	if (atomic_load(&ready) || vmh_params.hybrid_tcp == 2)
		return;
	table = vmh_scratch_new(vmh_fdtab_size);
	if (!table || !vmh_barrier_possible() || pthread_key_create(&exit_key, thread_exit)) {
		atomic_store(&ready, -1);
		return;
	}
	vmh_plain_fds = table;
	__atomic_store_n(&vmh_plain_size, vmh_fdtab_size, __ATOMIC_RELEASE);
	atomic_store(&ready, 1);
}

VMH_COLD static struct vmh_plain_call *new_call(void)
{
	struct vmh_plain_call *c;

	for (c = atomic_load(&calls); c; c = c->next)
		if (!atomic_exchange(&c->taken, 1))
			return c;
	c = vmh_scratch_new(sizeof(*c));
	if (!c)
		return NULL;
	c->taken = 1;
	c->next = atomic_load(&calls);
	while (!atomic_compare_exchange_weak(&calls, &c->next, c))
		;
	return c;
}

bool vmh_plain_join(void)
{
	struct vmh_plain_call *c = vmh_plain_mine;

	if (c)
		return !atomic_load_explicit(&c->fd, memory_order_relaxed);
	c = new_call();
	if (!c)
		return false;
	if (pthread_setspecific(exit_key, c)) {
		thread_exit(c);
		return false;
	}
	c->tid = vmh_tid();
	vmh_plain_mine = c;
	return true;
}

/* This thread has descriptors of its own. */
void vmh_plain_part(void)
{
	static struct vmh_plain_call never = { .fd = -1 };

	vmh_plain_mine = &never;
}

void vmh_plain_off(void)
{
	__atomic_store_n(&vmh_plain_size, 0, __ATOMIC_SEQ_CST);
}

/* Unless a move, or close(), has shut the way meanwhile. */
static void no_longer_nowait(int fd)
{
	uint8_t nowait = VMH_PLAIN_NOWAIT;

	__atomic_compare_exchange_n(&vmh_plain_fds[fd], &nowait, VMH_PLAIN, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

void vmh_plain_open(struct vmh_tcps *s)
{
	unsigned fd = (unsigned)s->obj.fd;

	if (fd >= vmh_plain_size || vmh_tcps_state(s) != VMH_TCPS_KERNEL || atomic_load(&s->obj.nfds) != 1)
		return;
	__atomic_store_n(&vmh_plain_fds[fd], atomic_load(&s->nonblock) ? VMH_PLAIN_NOWAIT : VMH_PLAIN, __ATOMIC_SEQ_CST);
	if (!atomic_load(&s->nonblock)) /* vmh_tcps_will_wait() came between */
		no_longer_nowait((int)fd);
}

void vmh_plain_open_again(struct vmh_tcps *s, int fd)
{
	if (s->obj.fd != fd || VMH_GET(vmh_plain_fds[fd]) || !vmh_trylock(&s->obj.lock))
		return;
	if (!vmh_tcps_is_due(s))
		vmh_plain_open(s);
	vmh_unlock(&s->obj.lock);
}

bool vmh_plain_stop(int fd)
{
	if ((unsigned)fd >= vmh_plain_size)
		return true;
	VMH_SET(vmh_plain_fds[fd], 0);
	return vmh_barrier();
}

bool vmh_plain_is_in(int fd)
{
	for (struct vmh_plain_call *c = atomic_load(&calls); c; c = c->next)
		if (atomic_load_explicit(&c->fd, memory_order_acquire) == fd + 1)
			return true;
	return false;
}

#define LEAVE_TRIES 1000 /* none of them waits yet */

void vmh_plain_waits(int fd)
{
	no_longer_nowait(fd);
	vmh_barrier();
	for (int tries = 0; tries < LEAVE_TRIES && vmh_plain_is_in(fd); tries++)
		sched_yield();
}

bool vmh_tcps_not_plain(struct vmh_tcps *s)
{
	int fd = s->obj.fd;

	return (unsigned)fd >= vmh_plain_size ||
	       (vmh_plain_stop(fd) && !vmh_plain_is_in(fd) && vmh_epoll_member_settle(&s->obj));
}

/* The caller is the only thread. */
void vmh_plain_fork_child(void)
{
	for (struct vmh_plain_call *c = atomic_load(&calls); c; c = c->next) {
		if (c == vmh_plain_mine) {
			c->tid = vmh_tid();
			continue;
		}
		atomic_store(&c->fd, 0);
		atomic_store(&c->taken, 0);
	}
}
