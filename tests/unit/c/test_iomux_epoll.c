/* epoll: level, edge, oneshot, several sets, fairness. */
#include "iomux_fake.h"
#include <fcntl.h>

static struct epoll_event evs[64];

static int look(int ep)
{
	return wait_ep(ep, evs, 64, 0, NULL);
}

/* ---- level, edge, oneshot ---- */

void t_level(void)
{
	int ep = fake_epoll(), fd = fake_sock(true);

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 7), 0);
	EQUAL(look(ep), 0);
	fake_ring_rx(fd);
	fake_ring_rx(fd);
	for (int i = 0; i < 3; i++) {
		EQUAL(look(ep), 1);
		EQUAL(evs[0].events, EPOLLIN);
		EQUAL(evs[0].data.u64, 7);
	}
	CHECK(fake_take(fd));
	EQUAL(look(ep), 1);
	CHECK(fake_take(fd));
	EQUAL(look(ep), 0);
	fake_ring_rx(fd);
	EQUAL(wait_ep(ep, evs, 64, -1, NULL), 1);
	EQUAL(ctl(ep, EPOLL_CTL_DEL, fd, 0, 0), 0);
	EQUAL(look(ep), 0);
	fake_close(fd);
	fake_close(ep);
}

void t_edge(void)
{
	int ep = fake_epoll(), fd = fake_sock(true);

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, 1), 0);
	fake_ring_rx(fd);
	EQUAL(look(ep), 1);
	EQUAL(look(ep), 0);      /* not read, but no new datagram */
	fake_ring_rx(fd);
	EQUAL(look(ep), 1);
	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLET, 2), 0);
	EQUAL(look(ep), 1);      /* MOD looks again */
	EQUAL(evs[0].data.u64, 2);
	EQUAL(look(ep), 0);
	CHECK(fake_take(fd) && fake_take(fd));
	fake_ring_rx(fd);
	vmh_rings_poll(1);
	CHECK(fake_take(fd));
	EQUAL(look(ep), 0);      /* read before the wait: no event, as in the kernel */
	fake_os_rx(fd);
	EQUAL(look(ep), 1);      /* the kernel's edge passes */
	EQUAL(look(ep), 0);
	fake_close(fd);
	fake_close(ep);
}

void t_oneshot(void)
{
	int ep = fake_epoll(), fd = fake_sock(true);

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLONESHOT, 9), 0);
	fake_ring_rx(fd);
	EQUAL(look(ep), 1);
	EQUAL(look(ep), 0);
	fake_os_rx(fd);          /* the kernel's side is disabled with it */
	EQUAL(look(ep), 0);
	fake_ring_rx(fd);
	EQUAL(look(ep), 0);
	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, 10), 0);
	EQUAL(look(ep), 1);      /* one entry, though both sides are ready */
	EQUAL(evs[0].data.u64, 10);
	EQUAL(look(ep), 0);
	while (fake_take(fd))
		;
	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, 11), 0);
	EQUAL(look(ep), 1);      /* from the kernel now: disarms the ring's side */
	fake_ring_rx(fd);
	EQUAL(look(ep), 0);
	fake_close(fd);
	fake_close(ep);
}

/* Two members with the same data: an event does not say whose it is; nothing may be lost. */
void t_oneshot_shared_data(void)
{
	int ep = fake_epoll(), a = fake_sock(true), b = fake_sock(true);

	EQUAL(ctl(ep, EPOLL_CTL_ADD, a, EPOLLIN | EPOLLONESHOT, 0), 0);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, b, EPOLLIN | EPOLLONESHOT, 0), 0);
	fake_os_rx(a);
	EQUAL(look(ep), 1);
	fake_ring_rx(b);
	EQUAL(look(ep), 1);
	fake_close(a);
	fake_close(b);
	fake_close(ep);
}

void t_masks(void)
{
	int ep = fake_epoll(), fd = fake_sock(true);

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLOUT, 1), 0);
	fake_ring_rx(fd);
	EQUAL(look(ep), 1);
	EQUAL(evs[0].events, EPOLLOUT);
	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLRDNORM | EPOLLOUT, 1), 0);
	EQUAL(look(ep), 1);      /* both sides in one entry */
	EQUAL(evs[0].events, EPOLLIN | EPOLLRDNORM | EPOLLOUT);
	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, 0, 1), 0);
	EQUAL(look(ep), 0);
	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLET, 1), 0);
	EQUAL(look(ep), 1);
	fake_close(fd);
	fake_close(ep);
}

void t_errors(void)
{
	int ep = fake_epoll(), fd = fake_sock(true), file = open("/dev/null", O_RDONLY), reg = open("/proc/self/exe", O_RDONLY);
	struct vmh_obj *o = vmh_fd_get(ep);

	EQUAL(ctl(ep, EPOLL_CTL_MOD, fd, EPOLLIN, 0), -ENOENT);
	EQUAL(ctl(ep, EPOLL_CTL_DEL, fd, EPOLLIN, 0), -ENOENT);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 0), 0);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 0), -EEXIST);
	EQUAL(ctl(ep, 77, fd, EPOLLIN, 0), -EINVAL);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, ep, EPOLLIN, 0), -EINVAL);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, 999999, EPOLLIN, 0), -EBADF);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, reg, EPOLLIN, 0), -EPERM);
	EQUAL(vmh_epoll_ctl(o, ep, EPOLL_CTL_MOD, fd, NULL), -EFAULT);
	EQUAL(wait_ep(ep, evs, 0, 0, NULL), -EINVAL);
	errno = 0;
	EQUAL(wait_ep(ep, evs, -1, 0, NULL), -EINVAL);
	EQUAL(errno, 0);
	vmh_obj_put(o);
	close(file);
	close(reg);
	fake_close(fd);
	fake_close(ep);
}

/* ---- sets and dups ---- */

void t_many_sets(void)
{
	int a = fake_epoll(), b = fake_epoll(), fd = fake_sock(true), d;

	EQUAL(ctl(a, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
	EQUAL(ctl(b, EPOLL_CTL_ADD, fd, EPOLLIN | EPOLLET, 2), 0);
	d = dup(fd);
	vmh_fd_dup(fd, d);
	EQUAL(ctl(a, EPOLL_CTL_ADD, d, EPOLLIN, 3), 0); /* the kernel's key is (file, fd) */
	fake_ring_rx(fd);
	EQUAL(look(a), 2);
	CHECK(evs[0].data.u64 + evs[1].data.u64 == 4);
	EQUAL(look(b), 1);
	EQUAL(look(b), 0);
	fake_close(fd);          /* the dup lives: so does the membership, under the old fd */
	EQUAL(look(a), 2);
	fake_close(d);
	EQUAL(look(a), 0);
	fake_close(b);
	fake_close(a);
}

void t_nested(void)
{
	int inner = fake_epoll(), outer = fake_epoll(), fd = fake_sock(true), late = fake_sock(true);
	int before = atomic_load(&fake_homes);

	EQUAL(ctl(inner, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
	EQUAL(ctl(outer, EPOLL_CTL_ADD, inner, EPOLLIN, 2), 0);
	EQUAL(atomic_load(&fake_homes), before + 1);
	EQUAL(ctl(inner, EPOLL_CTL_ADD, late, EPOLLIN, 3), 0);
	EQUAL(atomic_load(&fake_homes), before + 2);
	fake_os_rx(late);
	EQUAL(look(outer), 1);
	EQUAL(evs[0].data.u64, 2);
	EQUAL(look(inner), 1);
	EQUAL(ctl(inner, EPOLL_CTL_ADD, outer, EPOLLIN, 4), -ELOOP);
	fake_close(fd);
	fake_close(late);
	fake_close(inner);
	fake_close(outer);
}

/* ---- fairness ---- */

void t_fairness(void)
{
	enum { N = 20 };
	int ep = fake_epoll(), fd[N], seen[N] = { 0 };

	for (int i = 0; i < N; i++) {
		fd[i] = fake_sock(true);
		EQUAL(ctl(ep, EPOLL_CTL_ADD, fd[i], EPOLLIN, (uint64_t)i), 0);
		fake_ring_rx(fd[i]);
	}
	for (int k = 0; k < 40; k++) {
		int n = wait_ep(ep, evs, 3, -1, NULL);

		CHECK(n > 0 && n <= 3);
		for (int i = 0; i < n; i++)
			seen[evs[i].data.u64]++;
	}
	for (int i = 0; i < N; i++)
		CHECK(seen[i] >= 4 && seen[i] <= 8);
	for (int i = 0; i < N; i++)
		fake_close(fd[i]);
	fake_close(ep);
}

static bool polled_os(int ring, int os)
{
	struct pollfd q[2] = { { .fd = ring, .events = POLLIN }, { .fd = os, .events = POLLIN } };

	vmh_poll(q, 2, -1, NULL);
	return q[1].revents == POLLIN;
}

/* In how many of these calls that find a ring ready the kernel's fd is seen, which is ready, too. */
static int os_seen(int ring, int os, int skip, int calls)
{
	int seen = 0;

	vmh_params.select_skip_os = skip;
	while (calls--)
		seen += polled_os(ring, os);
	return seen;
}

/* A kernel fd that is ready beside rings that are always ready, for each way of asking. */
void t_kernel_not_starved(void)
{
	int maxes[] = { 1, 2, 8 };
	int p[2];

	CHECK(pipe(p) == 0 && write(p[1], "x", 1) == 1);
	for (unsigned m = 0; m < 3; m++) {
		int ep = fake_epoll(), fd = fake_sock(true), os = 0, ring = 0;

		EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
		EQUAL(ctl(ep, EPOLL_CTL_ADD, p[0], EPOLLIN, 2), 0);
		fake_ring_rx(fd);
		for (int k = 0; k < 40; k++) {
			int n = wait_ep(ep, evs, maxes[m], -1, NULL);

			for (int i = 0; i < n; i++)
				*(evs[i].data.u64 == 2 ? &os : &ring) += 1;
		}
		CHECK(ring >= 20);
		CHECK(os >= (maxes[m] == 1 ? 5 : 10)); /* every 4th call; shared when there is one slot */
		fake_close(fd);
		fake_close(ep);
	}
	int fd = fake_sock(true), os = 0;
	fake_ring_rx(fd);
	for (int k = 0; k < 40; k++) {
		struct pollfd q[2] = { { .fd = fd, .events = POLLIN }, { .fd = p[0], .events = POLLIN } };

		CHECK(vmh_poll(q, 2, -1, NULL) >= 1);
		CHECK(q[0].revents == POLLIN);
		os += q[1].revents == POLLIN;
	}
	CHECK(os >= 10);
	/* VMA_SELECT_SKIP_OS: every call, or every 20th or 100,000th of a tight loop, but for where it was interrupted */
	os = os_seen(fd, p[0], 1, 2000);
	CHECK(os >= 1990);
	os = os_seen(fd, p[0], 20, 2000);
	CHECK(os >= 100 && os < 1500);
	uint64_t begun = vmh_now_ns();
	os = os_seen(fd, p[0], 100000, 500000);
	CHECK(os >= 5 && (uint64_t)os < 10 + (vmh_now_ns() - begun) / 100000); /* a look in 20 us would be five times that */
	/* and each of those that come seldom */
	vmh_params.select_skip_os = 10000;
	for (int k = 0; k < 10; k++) {
		usleep(100);
		CHECK(polled_os(fd, p[0]));
	}
	vmh_params.select_skip_os = 4;
	/* while spinning without a ring event, too, and with the ratio switched off */
	fake_take(fd);
	vmh_params.select_poll = -1;
	for (int ratio = 0; ratio <= 10; ratio += 10) {
		struct pollfd q[2] = { { .fd = fd, .events = POLLIN }, { .fd = p[0], .events = POLLIN } };

		vmh_params.select_poll_os_ratio = ratio;
		EQUAL(vmh_poll(q, 2, -1, NULL), 1);
		EQUAL(q[1].revents, POLLIN);
	}
	fake_close(fd);
	close(p[0]);
	close(p[1]);
}
