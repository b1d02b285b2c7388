/* Threads that sleep in the kernel's epoll_wait, because no member of their set was on a ring, are
 * told by an eventfd that stands in the kernel set until the last of them has left. It is always
 * readable and never read, so each wake-up of the kernel passes it on to the next sleeper. Its data
 * is a random number that no program uses; whoever sees it drops it. */
#include "vmh_iomux_int.h"
#include <sys/eventfd.h>

static struct vmh_lock make_lock;
static _Atomic int kick_fd_plus_one; /* written after kick_data */
static uint64_t kick_data;

/* A number that no program uses as data. */
static uint64_t random_data(void)
{
	uint64_t random;

	if (vmh_sys(SYS_getrandom, &random, sizeof(random), 0) != sizeof(random))
		random = vmh_now_ns() * 0x9e3779b97f4a7c15u ^ (uintptr_t)&random;
	return random;
}

static int kick_fd(void)
{
	int fd = atomic_load(&kick_fd_plus_one) - 1;

	if (fd >= 0)
		return fd;
	vmh_lock(&make_lock);
	fd = atomic_load(&kick_fd_plus_one) - 1;
	if (fd < 0) {
		fd = vmh_fd_hide((int)vmh_sys(SYS_eventfd2, 1, EFD_CLOEXEC | EFD_NONBLOCK));
		if (fd >= 0) {
			kick_data = random_data();
			atomic_store(&kick_fd_plus_one, fd + 1);
		}
	}
	vmh_unlock(&make_lock);
	return fd;
}

bool vmh_ep_can_kick(void)
{
	return kick_fd() >= 0;
}

bool vmh_ep_is_kick(uint64_t data)
{
	return vmh_unlikely(atomic_load_explicit(&kick_fd_plus_one, memory_order_acquire)) && data == kick_data;
}

static _Atomic uint64_t silent_data; /* a child has sets in common with its parent, and this, too */

uint64_t vmh_ep_silent_data(void)
{
	uint64_t none = 0;

	if (!atomic_load(&silent_data))
		atomic_compare_exchange_strong(&silent_data, &none, random_data() | 1);
	return atomic_load(&silent_data);
}

bool vmh_ep_is_silent(uint64_t data)
{
	return vmh_unlikely(data == atomic_load_explicit(&silent_data, memory_order_relaxed)) && data;
}

/* The fd by which the last sleeper came may be closed meanwhile, and the set live on by a dup. */
static int fd_of_set(struct vmh_ep *e)
{
	int fd = atomic_load(&e->kwait_fd);

	if ((unsigned)fd < vmh_fdtab_size && atomic_load(&vmh_fdtab[fd]) == &e->obj)
		return fd;
	for (unsigned i = 0; i < atomic_load(&vmh_fdtab_used); i++)
		if (atomic_load_explicit(&vmh_fdtab[i], memory_order_relaxed) == &e->obj)
			return (int)i;
	return -EBADF;
}

static void take_back(struct vmh_ep *e, int epfd) /* set lock held */
{
	vmh_ep_kernel_ctl(epfd, EPOLL_CTL_DEL, kick_fd(), NULL);
	atomic_store(&e->kick_on, 0);
}

void vmh_ep_kick(struct vmh_ep *e)
{
	int epfd, kfd;

	atomic_thread_fence(memory_order_seq_cst); /* maybe_ring before kwait: see vmh_ep_kernel_enter */
	if (!atomic_load(&e->kwait))
		return;
	vmh_lock(&e->obj.lock);
	epfd = fd_of_set(e);
	kfd = kick_fd();
	if (epfd >= 0 && kfd >= 0 && atomic_load(&e->kwait) && !atomic_load(&e->kick_on)) {
		struct epoll_event ev = { .events = EPOLLIN, .data.u64 = kick_data };

		atomic_store(&e->kick_ns, vmh_now_ns());
		atomic_store(&e->kick_on, 1);
		if (vmh_ep_kernel_ctl(epfd, EPOLL_CTL_ADD, kfd, &ev) < 0)
			atomic_store(&e->kick_on, 0);
		else if (!atomic_load(&e->kwait)) /* the last one left before it could see kick_on */
			take_back(e, epfd);
	}
	vmh_unlock(&e->obj.lock);
}

/* A sleeper that was cancelled, or jumped out of a signal handler, never leaves: without this its
 * kick would keep the set readable for ever. */
void vmh_ep_kick_seen(struct vmh_ep *e, int epfd)
{
	if (!atomic_load(&e->kick_on) || vmh_now_ns() - atomic_load(&e->kick_ns) < VMH_KICK_NS)
		return;
	vmh_lock(&e->obj.lock);
	if (atomic_load(&e->kick_on))
		take_back(e, epfd);
	vmh_unlock(&e->obj.lock);
}

void vmh_ep_kernel_enter(struct vmh_ep *e, int epfd)
{
	atomic_store_explicit(&e->kwait_fd, epfd, memory_order_relaxed);
	atomic_fetch_add(&e->kwait, 1); /* seq_cst, before the caller looks at maybe_ring */
}

void vmh_ep_kernel_leave(struct vmh_ep *e, int epfd)
{
	if (atomic_fetch_sub(&e->kwait, 1) != 1 || vmh_likely(!atomic_load(&e->kick_on)))
		return;
	vmh_lock(&e->obj.lock);
	if (atomic_load(&e->kick_on) && !atomic_load(&e->kwait))
		take_back(e, epfd);
	vmh_unlock(&e->obj.lock);
}

/* A kick that stands in a set is the parent's to take back. The child keeps the number, to filter it,
 * and the fd, because a set takes the same eventfd once only. */
void vmh_ep_kick_fork_child(void)
{
	vmh_lock_reset(&make_lock);
}
