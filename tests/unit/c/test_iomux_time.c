/* Timeouts, and when nothing is spun for. */
#include "iomux_fake.h"
#include <pthread.h>
#include <sys/select.h>

static struct epoll_event evs[64];

static uint64_t now(void)
{
	return vmh_now_ns();
}

/* ---- looks at the kernel while spinning ---- */

static void *write_later(void *arg)
{
	usleep(30000);
	CHECK(write(*(int *)arg, "x", 1) == 1);
	return NULL;
}

/* Does a spinning poll() of 200 ms see a kernel's fd that becomes ready after 30 ms? */
static bool sees(int ratio)
{
	int fd = fake_sock(true), p[2], n;
	struct pollfd q[2] = { { .fd = fd, .events = POLLIN }, { .events = POLLIN } };
	pthread_t writer;

	CHECK(pipe(p) == 0);
	q[1].fd = p[0];
	vmh_params.select_poll = -1;
	vmh_params.select_poll_os_ratio = ratio;
	pthread_create(&writer, NULL, write_later, &p[1]);
	n = vmh_poll(q, 2, 200 * MS, NULL);
	EQUAL(q[1].revents, n == 1 ? POLLIN : 0);
	pthread_join(writer, NULL);
	close(p[0]);
	close(p[1]);
	fake_close(fd);
	vmh_params.select_poll_os_ratio = 10;
	return n == 1;
}

/* VMA_SELECT_POLL_OS_RATIO: so many loops for a look at the kernel. */
void t_os_ratio(void)
{
	CHECK(sees(10));
	CHECK(sees(0));
	CHECK(!sees(2000000000));
}

/* VMA_CPU_USAGE_STATS: of a thread that does nothing else, and of one that is not measured. */
void t_cpu_usage(void)
{
	int fd = fake_sock(true);
	struct pollfd q = { .fd = fd, .events = POLLIN };

	vmh_params.select_poll = -1;
	for (int on = 0; on < 2; on++) {
		vmh_params.cpu_usage_stats = on;
		for (int k = 0; k < 6; k++)
			EQUAL(vmh_poll(&q, 1, 200 * MS, NULL), 0);
		CHECK(on ? vmh_stats->poll.polling_percent > 50 : !vmh_stats->poll.polling_percent);
	}
	vmh_params.cpu_usage_stats = 0;
	fake_close(fd);
}

/* ---- time ---- */

void t_timeouts(void)
{
	int ep = fake_epoll(), fd = fake_sock(true);
	struct pollfd q = { .fd = fd, .events = POLLIN };
	fd_set r;

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
	for (int spin = 0; spin < 3; spin++) {
		static const int64_t budget[] = { 0, 5000, -1 };
		uint64_t t0 = now(), t1, t2, t3;

		vmh_params.select_poll = budget[spin];
		EQUAL(wait_ep(ep, evs, 8, 30 * MS, NULL), 0);
		t1 = now();
		q.revents = 0x7f;
		EQUAL(vmh_poll(&q, 1, 30 * MS, NULL), 0);
		EQUAL(q.revents, 0);
		t2 = now();
		FD_ZERO(&r);
		FD_SET(fd, &r);
		EQUAL(vmh_select(fd + 1, &r, NULL, NULL, 30 * MS, NULL), 0);
		CHECK(!FD_ISSET(fd, &r));
		t3 = now();
		CHECK(t1 - t0 >= 30u * MS && t2 - t1 >= 30u * MS && t3 - t2 >= 30u * MS);
		CHECK(t3 - t0 < 300u * MS);
	}
	EQUAL(vmh_stats->poll.timeouts, 3);
	EQUAL(vmh_stats->select.timeouts, 3);
	fake_close(fd);
	fake_close(ep);
}

/* No member on a ring: not one poll of a ring, and no spinning. */
void t_kernel_only_set(void)
{
	int ep = fake_epoll(), fd = fake_sock(false), before = atomic_load(&fake_polls);

	vmh_params.select_poll = -1;
	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
	EQUAL(wait_ep(ep, evs, 8, 20 * MS, NULL), 0);
	EQUAL(wait_ep(ep, evs, 8, 100000, NULL), 0);
	fake_os_rx(fd);
	EQUAL(wait_ep(ep, evs, 8, -1, NULL), 1);
	EQUAL(atomic_load(&fake_polls), before);
	fake_close(fd);
	fake_close(ep);
}
