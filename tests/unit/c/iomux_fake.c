#include "vmh_main.h"
#include "vmh_tcps.h"
#include "vmh_uring.h"
#include "vmh_worker.h"
#include "iomux_fake.h"
#include <sys/eventfd.h>
#include <sys/ioctl.h>

#define SOCKS 4096

struct vmh_params vmh_params;
static struct vmh_stats_page *page;
struct vmh_stats_page *vmh_stats;
_Atomic int fake_polls, fake_homes;
void (*fake_before_sleep)(void);
static struct vmh_sock socks[SOCKS];
static struct vmh_sock_stats sock_stats;
static _Atomic unsigned nsocks;
static int ring_fd;
static struct vmh_lock ring_lock;
static _Atomic unsigned pending[SOCKS], npending;

void fake_start(void)
{
	vmh_fdtab_init();
	page = calloc(1, sizeof(*page));
	vmh_stats = page;
	vmh_params.select_poll = 0;
	vmh_params.select_poll_os_ratio = 10;
	vmh_params.select_skip_os = 4;
	vmh_params.cq_poll_batch_max = 16;
	ring_fd = eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC);
}

static struct vmh_sock *sock_of(int fd)
{
	return vmh_sock_of(atomic_load(&vmh_fdtab[fd]));
}

int fake_kernel_sock(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	CHECK(fd >= 0 && bind(fd, (struct sockaddr *)&a, sizeof(a)) == 0);
	return fd;
}

int fake_sock(bool rx_on)
{
	int fd = fake_kernel_sock();
	struct vmh_sock *s;

	unsigned n = atomic_fetch_add(&nsocks, 1);

	CHECK(n < SOCKS);
	s = &socks[n];
	atomic_store(&s->obj.class_, VMH_CLASS_UDP);
	atomic_store(&s->rx_on, rx_on);
	s->stats = &sock_stats;
	CHECK(vmh_fd_install(fd, &s->obj) == 0);
	return fd;
}

void fake_on_ring(int fd)
{
	struct vmh_sock *s = sock_of(fd);

	atomic_store(&s->rx_on, 1);
	vmh_epoll_member_on_ring(&s->obj);
	vmh_wake_all();
}

static void deliver(struct vmh_sock *s)
{
	atomic_fetch_add(&s->rxq_len, 1);
	vmh_epoll_notify(&s->obj);
	vmh_wake_for(&(struct vmh_obj *){ &s->obj }, 1);
}

void fake_direct(int fd)
{
	deliver(sock_of(fd));
}

void fake_ring_rx(int fd)
{
	static const uint64_t one = 1;

	atomic_fetch_add(&pending[sock_of(fd) - socks], 1);
	atomic_fetch_add(&npending, 1);
	CHECK(write(ring_fd, &one, 8) == 8);
}

struct vmh_ring *_Atomic vmh_rings;
_Atomic uint32_t vmh_os_reports;

int vmh_rings_poll(unsigned budget)
{
	uint64_t v;
	int taken = 0;

	(void)budget;
	atomic_fetch_add_explicit(&fake_polls, 1, memory_order_relaxed);
	if (!atomic_load(&npending) || !vmh_trylock(&ring_lock))
		return 0;
	(void)!read(ring_fd, &v, 8);
	for (unsigned i = 0; i < atomic_load(&nsocks) && atomic_load(&npending); i++) {
		for (unsigned n = atomic_exchange(&pending[i], 0); n; n--, taken++) {
			atomic_fetch_sub(&npending, 1);
			deliver(&socks[i]);
		}
	}
	vmh_unlock(&ring_lock);
	if (atomic_load(&npending)) { /* as a real ring would stay readable */
		v = 1;
		(void)!write(ring_fd, &v, 8);
	}
	return taken;
}

void vmh_rings_catch_up(unsigned budget)
{
	vmh_rings_poll(budget); /* which takes all */
}

void vmh_rings_woken(const struct pollfd *p, int n)
{
	(void)p;
	(void)n;
}

int vmh_rings_wait_fds(int *fds, int max)
{
	CHECK(max > 0);
	if (fake_before_sleep)
		fake_before_sleep();
	fds[0] = ring_fd;
	return 1;
}

int vmh_ring_wait_fds(struct vmh_ring *r, int *fds, int max)
{
	(void)r;
	return vmh_rings_wait_fds(fds, max);
}

bool vmh_rings_hear(int set, bool muted)
{
	static _Atomic uint8_t heard = VMH_HEARD_NOT;
	struct epoll_event ev = { .events = muted ? 0 : EPOLLIN };
	int op = atomic_load(&heard) == VMH_HEARD_NOT ? EPOLL_CTL_ADD : EPOLL_CTL_MOD;

	if (atomic_exchange(&heard, muted ? VMH_MUTED : VMH_HEARD) == (muted ? VMH_MUTED : VMH_HEARD))
		return true;
	return syscall(SYS_epoll_ctl, set, op, ring_fd, &ev) == 0; /* epoll_ctl() is the shim's */
}

void vmh_rings_heard(void)
{
}

bool vmh_rings_waiting(void)
{
	return atomic_load(&npending);
}

void vmh_rings_before_sleep(void)
{
	if (fake_before_sleep)
		fake_before_sleep();
}

bool fake_take(int fd)
{
	struct vmh_sock *s = sock_of(fd);
	uint32_t n = atomic_load(&s->rxq_len);

	while (n && !atomic_compare_exchange_weak(&s->rxq_len, &n, n - 1))
		;
	return n != 0;
}

void fake_os_rx(int fd)
{
	struct sockaddr_in a;
	socklen_t len = sizeof(a);
	int from = socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	CHECK(getsockname(fd, (struct sockaddr *)&a, &len) == 0);
	CHECK(sendto(from, "x", 1, 0, (struct sockaddr *)&a, len) == 1);
	close(from);
}

void fake_os_take(int fd)
{
	char c;

	EQUAL(recv(fd, &c, 1, MSG_DONTWAIT), 1);
}

void fake_close(int fd)
{
	vmh_fd_close(fd);
	close(fd);
}

int fake_epoll(void)
{
	int fd = epoll_create1(EPOLL_CLOEXEC);

	CHECK(fd >= 0);
	vmh_epoll_created(fd);
	return fd;
}

int ctl(int ep, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event ev = { .events = events, .data.u64 = data };
	struct vmh_obj *o = vmh_fd_get(ep);
	int r = vmh_epoll_ctl(o, ep, op, fd, &ev);

	vmh_obj_put(o);
	return r;
}

int wait_ep(int ep, struct epoll_event *evs, int max, int64_t ns, const sigset_t *mask)
{
	struct vmh_obj *o = vmh_fd_get(ep);
	int r = o ? vmh_epoll_wait(o, ep, evs, max, ns, mask) : -EBADF;

	if (o)
		vmh_obj_put(o);
	return r;
}

/* ---- the rest of the shim ---- */

void vmh_sock_closed(struct vmh_sock *s)
{
	vmh_epoll_member_closed(&s->obj, false);
	vmh_wake_all();
}

void vmh_sock_recycle(struct vmh_sock *s)
{
	CHECK(!s->obj.items);
}

void vmh_sock_home(struct vmh_sock *s, uint32_t reason, uint32_t detail)
{
	(void)detail;
	EQUAL(reason, VMH_R_NESTED);
	__atomic_store_n(&s->home, reason, __ATOMIC_RELAXED);
	atomic_store(&s->rx_on, 0);
	atomic_fetch_add(&fake_homes, 1);
}

struct vmh_iomux_stats *vmh_stats_epoll_new(int epfd)
{
	static _Atomic unsigned n;
	struct vmh_iomux_stats *s = &page->epoll[atomic_fetch_add(&n, 1) % VMH_STATS_EPOLLS];

	memset(s, 0, sizeof(*s));
	s->epfd = epfd;
	return s;
}

void vmh_stats_epoll_free(struct vmh_iomux_stats *s)
{
	(void)s;
}

/* no TCP sockets here */
_Atomic int vmh_tcps_on, vmh_tcps_lots;
void vmh_worker_wake(void) /* there is no internal thread here */
{
}

int vmh_tcps_home(struct vmh_tcps *s, unsigned reason, bool must)
{
	(void)s;
	(void)reason;
	(void)must;
	return -ENOTSUP;
}

void vmh_plain_off(void)
{
}

void vmh_plain_part(void) { }
void vmh_stats_sock_name(struct vmh_sock_stats *s, uint64_t inode)
{
	(void)s, (void)inode;
}
uint8_t *vmh_plain_fds;
unsigned vmh_plain_size;

void vmh_tcps_accepts(struct vmh_tcps *s, int fd)
{
	(void)s;
	(void)fd;
}

void vmh_tcps_close(struct vmh_tcps *s, int fd)
{
	(void)s;
	(void)fd;
}

void vmh_tcps_closes_one(struct vmh_tcps *s, int fd)
{
	(void)s;
	(void)fd;
}

void vmh_tcps_closed(struct vmh_tcps *s)
{
	(void)s;
}

void vmh_tcps_recycle(struct vmh_tcps *s)
{
	(void)s;
}

_Atomic unsigned vmh_urings;
_Atomic bool vmh_filtered;
_Atomic uint32_t vmh_tcps_leaves_begun, vmh_tcps_leaves_done;

void vmh_tcps_leaves_pass(void)
{
}

void vmh_urings_forget(unsigned first, unsigned last)
{
	(void)first;
	(void)last;
}

bool vmh_is_own_process(void)
{
	return true;
}

void vmh_before_exit(void)
{
}

void vmh_stats_asked(void)
{
}

bool vmh_crash_handles(const struct sigaction *act)
{
	(void)act;
	return false;
}
