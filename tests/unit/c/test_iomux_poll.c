/* poll and select, entry by entry; the budget; fork. */
#include "iomux_fake.h"
#include <sys/resource.h>
#include <sys/select.h>
#include <sys/wait.h>

static struct epoll_event evs[64];

static int look(int ep)
{
	return wait_ep(ep, evs, 64, 0, NULL);
}

/* ---- poll and select, entry by entry ---- */

void t_poll_exact(void)
{
	int a = fake_sock(true), b = fake_sock(true), k = fake_kernel_sock(), p[2];

	CHECK(pipe(p) == 0);
	fake_ring_rx(a);
	struct pollfd q[] = {
		{ .fd = a, .events = POLLIN }, { .fd = -1, .events = POLLIN, .revents = 99 },
		{ .fd = a, .events = POLLIN | POLLRDNORM | POLLOUT }, { .fd = a, .events = 0 },
		{ .fd = b, .events = POLLIN }, { .fd = k, .events = POLLOUT }, { .fd = 99999, .events = POLLIN },
		{ .fd = p[0], .events = POLLIN }, { .fd = a, .events = POLLPRI },
	};
	short want[] = { POLLIN, 0, POLLIN | POLLRDNORM | POLLOUT, 0, 0, POLLOUT, POLLNVAL, 0, 0 };
	CHECK(vmh_poll_wanted(q, 9));
	EQUAL(vmh_poll(q, 9, 0, NULL), 4);
	for (int i = 0; i < 9; i++)
		EQUAL(q[i].revents, want[i]);
	CHECK(!vmh_poll_wanted(&q[5], 3));
	CHECK(!vmh_poll_wanted(NULL, 0));
	close(p[1]);
	EQUAL(vmh_poll(&q[7], 2, -1, NULL), 1);
	EQUAL(q[7].revents, POLLHUP);
	/* an epoll set inside */
	int ep = fake_epoll();
	struct pollfd e = { .fd = ep, .events = POLLIN };
	EQUAL(ctl(ep, EPOLL_CTL_ADD, b, EPOLLIN, 1), 0);
	CHECK(vmh_poll_wanted(&e, 1));
	EQUAL(vmh_poll(&e, 1, 0, NULL), 0);
	fake_ring_rx(b);
	EQUAL(vmh_poll(&e, 1, -1, NULL), 1);
	EQUAL(e.revents, POLLIN);
	/* more than the stack holds */
	struct pollfd big[600];
	for (int i = 0; i < 600; i++)
		big[i] = (struct pollfd){ .fd = i & 1 ? b : a, .events = POLLIN };
	EQUAL(vmh_poll(big, 600, 0, NULL), 600);
	CHECK(fake_take(a));
	EQUAL(vmh_poll(big, 600, -1, NULL), 300);
	CHECK(fake_take(b));
	EQUAL(vmh_poll(big, 600, 5 * MS, NULL), 0);
	fake_close(a);
	fake_close(b);
	fake_close(ep);
	close(k);
	close(p[0]);
}

void t_select_exact(void)
{
	int a = fake_sock(true), b = fake_sock(true), n, high = 3000;
	fd_set r, w, e;
	unsigned long big[64] = { 0 };
	struct vmh_obj *o;

	FD_ZERO(&r);
	FD_ZERO(&w);
	FD_ZERO(&e);
	FD_SET(a, &r);
	FD_SET(b, &r);
	FD_SET(a, &w);
	FD_SET(a, &e);
	fake_ring_rx(a);
	CHECK(vmh_select_wanted(b + 1, &r, &w, &e));
	EQUAL(vmh_select(b + 1, &r, &w, &e, 0, NULL), 2);
	CHECK(FD_ISSET(a, &r) && FD_ISSET(a, &w) && !FD_ISSET(a, &e) && !FD_ISSET(b, &r));
	FD_SET(b, &r);
	EQUAL(vmh_select(a + 1, &r, NULL, NULL, -1, NULL), 1); /* b is beyond nfds */
	FD_SET(999, &r);
	EQUAL(vmh_select(1000, &r, NULL, NULL, 0, NULL), -EBADF);
	CHECK(FD_ISSET(999, &r)); /* sets untouched by an error */
	CHECK(!vmh_select_wanted(a, &r, NULL, NULL));
	/* more than FD_SETSIZE */
	o = vmh_fd_get(a);
	vmh_obj_put(o);
	n = dup2(a, high);
	if (n == high) {
		vmh_fd_dup(a, high);
		big[high / 64] |= 1ul << (high % 64);
		CHECK(vmh_select_wanted(high + 1, (fd_set *)big, NULL, NULL));
		EQUAL(vmh_select(high + 1, (fd_set *)big, NULL, NULL, -1, NULL), 1);
		CHECK(big[high / 64] >> (high % 64) & 1);
		CHECK(fake_take(a));
		EQUAL(vmh_select(high + 1, (fd_set *)big, NULL, NULL, MS, NULL), 0);
		EQUAL(big[high / 64], 0);
		fake_close(high);
	}
	fake_close(a);
	fake_close(b);
}

void t_budget(void)
{
	int fd = fake_sock(true), off = fake_sock(false), polls;
	struct pollfd q = { .fd = fd, .events = POLLIN }, k = { .fd = off, .events = POLLIN };

	vmh_params.select_poll = 3000;
	polls = atomic_load(&fake_polls);
	EQUAL(vmh_poll(&q, 1, 20 * MS, NULL), 0);
	CHECK(atomic_load(&fake_polls) > polls + 50);
	EQUAL(vmh_stats->poll.poll_miss, 1);
	vmh_params.select_poll = -1;
	polls = atomic_load(&fake_polls);
	EQUAL(vmh_poll(&k, 1, 20 * MS, NULL), 0);
	CHECK(atomic_load(&fake_polls) <= polls + 6); /* nothing on a ring: no spinning */
	fake_ring_rx(fd);
	EQUAL(vmh_poll(&q, 1, -1, NULL), 1);
	EQUAL(vmh_stats->poll.poll_hit, 1);
	EQUAL(vmh_stats->poll.rx_ready, 1);
	CHECK(vmh_stats->poll.thread == (unsigned)getpid());
	fake_close(fd);
	fake_close(off);
}

static int looks_of(int n)
{
	static int before;
	int now = atomic_load(&fake_polls), looks = now - before;

	before = now;
	EQUAL(n, 0);
	return looks;
}

/* VMA_SELECT_POLL_OS_FORCE: the kernel is polled for the budget though nothing is on a ring. */
void t_os_forced(void)
{
	int off = fake_sock(false), home = fake_sock(false), ep = fake_epoll(), p[2];
	struct vmh_sock *s = vmh_sock_of(atomic_load(&vmh_fdtab[home]));
	struct pollfd k[2] = { { .fd = off, .events = POLLIN } }, h = { .fd = home, .events = POLLIN };
	uint64_t begun;
	fd_set r;

	CHECK(pipe(p) == 0);
	k[1] = (struct pollfd){ .fd = p[0], .events = POLLIN };
	s->home = VMH_R_NESTED;
	EQUAL(ctl(ep, EPOLL_CTL_ADD, home, EPOLLIN, 1), 0);
	EQUAL(ctl(ep, EPOLL_CTL_ADD, p[0], EPOLLIN, 2), 0);
	FD_ZERO(&r);
	FD_SET(home, &r);
	vmh_params.select_poll = -1;
	vmh_params.select_poll_os_ratio = 1;
	CHECK(!vmh_poll_wanted(&h, 1) && !vmh_select_wanted(home + 1, &r, NULL, NULL));
	vmh_params.select_poll_os_force = 1;
	CHECK(vmh_poll_wanted(&h, 1) && vmh_select_wanted(home + 1, &r, NULL, NULL));
	CHECK(!vmh_poll_wanted(&k[1], 1)); /* pipes alone */
	for (int ratio = 0; ratio < 20; ratio += 10) { /* each look is one at the kernel */
		vmh_params.select_poll_os_ratio = ratio;
		looks_of(0);
		begun = vmh_now_ns();
		CHECK(looks_of(vmh_poll(k, 2, 20 * MS, NULL)) > 50);
		CHECK(looks_of(vmh_poll(&h, 1, 20 * MS, NULL)) > 50);
		CHECK(looks_of(wait_ep(ep, evs, 8, 20 * MS, NULL)) > 50);
		CHECK(looks_of(vmh_select(home + 1, &r, NULL, NULL, 20 * MS, NULL)) > 50);
		FD_SET(home, &r);
		CHECK(vmh_now_ns() - begun >= 80 * MS);
		/* what comes is seen */
		CHECK(write(p[1], "x", 1) == 1);
		EQUAL(vmh_poll(k, 2, -1, NULL), 1);
		EQUAL(k[1].revents, POLLIN);
		EQUAL(wait_ep(ep, evs, 8, -1, NULL), 1);
		EQUAL(evs[0].data.u64, 2);
		CHECK(read(p[0], &(char){ 0 }, 1) == 1);
		fake_os_rx(home);
		EQUAL(vmh_poll(&h, 1, -1, NULL), 1);
		EQUAL(wait_ep(ep, evs, 8, -1, NULL), 1);
		EQUAL(evs[0].data.u64, 1);
		fake_os_take(home);
	}
	/* not at all, and for the budget */
	looks_of(0);
	for (int i = 0; i < 10; i++)
		CHECK(looks_of(vmh_poll(&h, 1, 0, NULL)) <= 1);
	CHECK(looks_of(wait_ep(ep, evs, 8, 0, NULL)) <= 1);
	vmh_params.select_poll = 3000;
	struct rusage u[2];
	getrusage(RUSAGE_SELF, &u[0]);
	CHECK(looks_of(vmh_poll(&h, 1, 200 * MS, NULL)) > 10);
	CHECK(looks_of(wait_ep(ep, evs, 8, 200 * MS, NULL)) > 10);
	getrusage(RUSAGE_SELF, &u[1]);
	CHECK((u[1].ru_utime.tv_sec - u[0].ru_utime.tv_sec) * 1000000 + u[1].ru_utime.tv_usec - u[0].ru_utime.tv_usec < 50000);
	vmh_params.select_poll = 0;
	CHECK(!vmh_poll_wanted(&h, 1));
	CHECK(looks_of(vmh_poll(k, 2, 20 * MS, NULL)) <= 6);
	CHECK(looks_of(wait_ep(ep, evs, 8, 20 * MS, NULL)) == 0);
	/* of sockets no more */
	vmh_params.select_poll = -1;
	fake_close(home);
	CHECK(looks_of(wait_ep(ep, evs, 8, 20 * MS, NULL)) == 0);
	fake_close(off);
	fake_close(ep);
	close(p[0]);
	close(p[1]);
}

void t_after_fork(void)
{
	int ep = fake_epoll(), fd = fake_sock(true), status;

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 4), 0);
	fake_ring_rx(fd);
	EQUAL(look(ep), 1);
	pid_t pid = fork();
	if (pid == 0) {
		vmh_wait_fork_child();
		CHECK(fake_take(fd)); /* the socket class leaves nothing of the parent's ring */
		vmh_epoll_fork_child();
		EQUAL(look(ep), 0);
		fake_os_rx(fd);
		EQUAL(wait_ep(ep, evs, 4, 1000 * MS, NULL), 1);
		EQUAL(evs[0].data.u64, 4);
		int mine = fake_sock(true);
		EQUAL(ctl(ep, EPOLL_CTL_ADD, mine, EPOLLIN, 6), 0);
		EQUAL(ctl(ep, EPOLL_CTL_DEL, mine, EPOLLIN, 6), 0);
		fake_os_take(fd);
		fake_on_ring(fd); /* as after daemon() */
		fake_ring_rx(fd);
		EQUAL(wait_ep(ep, evs, 4, 1000 * MS, NULL), 1);
		EQUAL(evs[0].data.u64, 4);
		CHECK(fake_take(fd));
		EQUAL(look(ep), 0);
		struct pollfd q = { .fd = mine, .events = POLLIN };
		EQUAL(vmh_poll(&q, 1, MS, NULL), 0);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
	EQUAL(WEXITSTATUS(status), 0);
	fake_close(fd);
	fake_close(ep);
}
