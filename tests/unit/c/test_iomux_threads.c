/* Wake-ups, members and sets that come and go under a waiting thread, cancellation. */
#include "iomux_fake.h"
#include <pthread.h>
#include <sched.h>

static struct epoll_event evs[64];

/* ---- threads ---- */

struct job {
	int ep, fd, max, result;
	int64_t ns;
	struct epoll_event ev[4];
	_Atomic int done;
	pthread_t t;
};

static void *wait_thread(void *arg)
{
	struct job *j = arg;

	j->result = wait_ep(j->ep, j->ev, j->max, j->ns, NULL);
	atomic_store(&j->done, 1);
	return NULL;
}

static void start(struct job *j)
{
	CHECK(pthread_create(&j->t, NULL, wait_thread, j) == 0);
}

static void doze(int ms)
{
	struct timespec t = { .tv_sec = ms / 1000, .tv_nsec = ms % 1000 * MS };

	nanosleep(&t, NULL);
}

/* Threads blocked in the kernel's epoll_wait when a member comes on a ring, or one is added. */
void t_offloaded_later(void)
{
	for (int added = 0; added < 2; added++) {
		int ep = fake_epoll(), fd = fake_sock(added), p[2];
		struct job j[3];

		CHECK(pipe(p) == 0);
		EQUAL(ctl(ep, EPOLL_CTL_ADD, p[0], EPOLLIN, 5), 0);
		if (!added)
			EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
		for (int i = 0; i < 3; i++) {
			j[i] = (struct job){ .ep = ep, .max = 1, .ns = i ? -1 : 10000 * MS };
			start(&j[i]);
		}
		while (atomic_load(&vmh_ep_of(atomic_load(&vmh_fdtab[ep]))->kwait) < 3)
			doze(1);
		if (added)
			EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
		else
			fake_on_ring(fd);
		doze(10);
		for (int i = 0; i < 3; i++)
			CHECK(!atomic_load(&j[i].done)); /* nobody sees the kick */
		fake_ring_rx(fd);
		for (int i = 0; i < 3; i++) {
			pthread_join(j[i].t, NULL);
			EQUAL(j[i].result, 1);
			EQUAL(j[i].ev[0].data.u64, 1);
		}
		EQUAL(atomic_load(&vmh_ep_of(atomic_load(&vmh_fdtab[ep]))->kick_on), 0);
		CHECK(fake_take(fd));
		struct pollfd q = { .fd = ep, .events = POLLIN };
		EQUAL(poll(&q, 1, 0), 0); /* the kick is out of the kernel set */
		fake_close(fd);
		fake_close(ep);
		close(p[0]);
		close(p[1]);
	}
}

struct race {
	int fd, how;
	_Atomic int want, got, stop;
};

static void *deliver_thread(void *arg)
{
	struct race *a = arg;
	unsigned seed = 1;

	for (int i = 1; i <= iomux_races; i++) {
		while (atomic_load(&a->got) != i - 1)
			sched_yield();
		for (int k = rand_r(&seed) % 300; k; k--)
			vmh_cpu_relax();
		atomic_store(&a->want, i);
		if (a->how & 1)
			fake_direct(a->fd);
		else
			fake_ring_rx(a->fd);
	}
	return NULL;
}

/* Each datagram is one wake-up of one sleeper: a lost one lasts until the timeout, and fails. */
void t_wake_races(void)
{
	for (int how = 0; how < 6; how++) {
		int ep = fake_epoll();
		struct race a = { .fd = fake_sock(true), .how = how };
		pthread_t t;

		vmh_params.select_poll = how == 5 ? 20 : 0;
		EQUAL(ctl(ep, EPOLL_CTL_ADD, a.fd, EPOLLIN | (how == 2 ? EPOLLET : 0), 1), 0);
		CHECK(pthread_create(&t, NULL, deliver_thread, &a) == 0);
		for (int i = 1; i <= iomux_races; i++) {
			struct pollfd q = { .fd = a.fd, .events = POLLIN };
			uint64_t t0 = vmh_now_ns();

			if (how < 4)
				EQUAL(wait_ep(ep, evs, 4, 5000 * MS, NULL), 1);
			else
				EQUAL(vmh_poll(&q, 1, 5000 * MS, NULL), 1);
			CHECK(vmh_now_ns() - t0 < 4500u * MS); /* woken, and not found by the look after the timeout */
			EQUAL(atomic_load(&a.want), i);
			CHECK(fake_take(a.fd));
			atomic_store(&a.got, i);
		}
		pthread_join(t, NULL);
		fake_close(a.fd);
		fake_close(ep);
	}
}

static void *churn_thread(void *arg)
{
	struct race *a = arg;
	int fd;

	for (unsigned i = 0; !atomic_load(&a->stop); i++) {
		fd = fake_sock(i & 1);
		ctl(a->fd, EPOLL_CTL_ADD, fd, EPOLLIN | (i & 2 ? EPOLLONESHOT : i & 4 ? EPOLLET : 0), i);
		if (!(i & 1))
			fake_on_ring(fd);
		fake_ring_rx(fd);
		if (i & 8)
			ctl(a->fd, EPOLL_CTL_MOD, fd, EPOLLIN | EPOLLONESHOT, i);
		if (i & 16)
			ctl(a->fd, EPOLL_CTL_DEL, fd, 0, 0);
		fake_close(fd);
		if (i >= 1500)
			break;
	}
	return NULL;
}

static void *drain_thread(void *arg)
{
	struct race *a = arg;
	struct epoll_event e[4];

	while (!atomic_load(&a->stop))
		CHECK(wait_ep(a->fd, e, 4, MS, NULL) >= 0);
	return NULL;
}

/* Add, modify, delete and close members while others wait; then close the set under them. */
void t_churn(void)
{
	struct race a = { .fd = fake_epoll() };
	pthread_t t[4];
	struct job j = { .max = 4, .ns = -1 };
	int fd;

	for (int i = 0; i < 4; i++)
		CHECK(pthread_create(&t[i], NULL, i < 2 ? churn_thread : drain_thread, &a) == 0);
	pthread_join(t[0], NULL);
	pthread_join(t[1], NULL);
	atomic_store(&a.stop, 1);
	pthread_join(t[2], NULL);
	pthread_join(t[3], NULL);
	EQUAL(vmh_ep_of(atomic_load(&vmh_fdtab[a.fd]))->nitems, 0);
	fd = fake_sock(true);
	EQUAL(ctl(a.fd, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
	j.ep = a.fd;
	start(&j);
	while (!atomic_load(&vmh_sleepers))
		doze(1);
	fake_close(a.fd);
	pthread_join(j.t, NULL);
	EQUAL(j.result, -EBADF);
	fake_close(fd);
}

/* A member that is closed between the kernel's answer and our link must not stay in the set. */
void t_link_closed(void)
{
	int ep = fake_epoll(), fd = fake_sock(true);
	struct vmh_ep *e = vmh_ep_of(atomic_load(&vmh_fdtab[ep]));
	struct vmh_epitem *it = vmh_epitem_alloc();
	struct vmh_obj *m = vmh_fd_get(fd);

	fake_close(fd);
	it->set = e;
	it->member = m;
	CHECK(!vmh_epitem_link(it));
	EQUAL(e->nitems, 0);
	CHECK(!m->items);
	vmh_obj_put(m);
	fake_close(ep);
}

static void *cancelled_thread(void *arg)
{
	struct pollfd q = { .fd = *(int *)arg, .events = POLLIN };

	vmh_poll(&q, 1, -1, NULL);
	return NULL;
}

void t_cancellation(void)
{
	int on = fake_sock(true), off = fake_sock(false);

	for (int how = 0; how < 3; how++) {
		int fd = how == 2 ? off : on;
		pthread_t t;
		void *r;

		vmh_params.select_poll = -(how > 0);
		vmh_params.select_poll_os_force = how == 2;
		CHECK(pthread_create(&t, NULL, cancelled_thread, &fd) == 0);
		doze(20);
		CHECK(pthread_cancel(t) == 0);
		pthread_join(t, &r);
		CHECK(r == PTHREAD_CANCELED);
		EQUAL(atomic_load(&vmh_sleepers), 0);
	}
}
