/* select, poll, epoll, waiting and signals over the fakes of iomux_fake.c. Arguments: names of tests (all
 * when none) and, as a number, the iterations of the races. Prints "ok NAME" for each. */
#include "iomux_fake.h"
#include <fcntl.h>
#include <pthread.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/select.h>
#include <sys/wait.h>

static int races = 20000;
static struct epoll_event evs[64];

static uint64_t now(void)
{
	return vmh_now_ns();
}

static int look(int ep)
{
	return wait_ep(ep, evs, 64, 0, NULL);
}

/* ---- level, edge, oneshot ---- */

static void level(void)
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

static void edge(void)
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

static void oneshot(void)
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
static void oneshot_shared_data(void)
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

static void masks(void)
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

static void errors(void)
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

static void many_sets(void)
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

static void nested(void)
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

static void fairness(void)
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

/* A kernel fd that is ready beside rings that are always ready, for each way of asking. */
static void kernel_not_starved(void)
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

/* ---- time ---- */

static void timeouts(void)
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
static void kernel_only_set(void)
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
static void offloaded_later(void)
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

struct races_arg {
	int fd, how;
	_Atomic int want, got, stop;
};

static void *deliver_thread(void *arg)
{
	struct races_arg *a = arg;
	unsigned seed = 1;

	for (int i = 1; i <= races; i++) {
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

/* Each datagram is one wake-up of one sleeper: a lost one hangs until the timeout, and fails. */
static void wake_races(void)
{
	for (int how = 0; how < 6; how++) {
		int ep = fake_epoll();
		struct races_arg a = { .fd = fake_sock(true), .how = how };
		pthread_t t;

		vmh_params.select_poll = how == 5 ? 20 : 0;
		EQUAL(ctl(ep, EPOLL_CTL_ADD, a.fd, EPOLLIN | (how == 2 ? EPOLLET : 0), 1), 0);
		CHECK(pthread_create(&t, NULL, deliver_thread, &a) == 0);
		for (int i = 1; i <= races; i++) {
			struct pollfd q = { .fd = a.fd, .events = POLLIN };

			if (how < 4)
				EQUAL(wait_ep(ep, evs, 4, 5000 * MS, NULL), 1);
			else
				EQUAL(vmh_poll(&q, 1, 5000 * MS, NULL), 1);
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
	struct races_arg *a = arg;
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
	struct races_arg *a = arg;
	struct epoll_event e[4];

	while (!atomic_load(&a->stop))
		CHECK(wait_ep(a->fd, e, 4, MS, NULL) >= 0);
	return NULL;
}

/* Add, modify, delete and close members while others wait; then close the set under them. */
static void churn(void)
{
	struct races_arg a = { .fd = fake_epoll() };
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

static void *cancelled_thread(void *arg)
{
	struct pollfd q = { .fd = *(int *)arg, .events = POLLIN };

	vmh_poll(&q, 1, -1, NULL);
	return NULL;
}

__attribute__((unused)) static void cancellation(void)
{
	int fd = fake_sock(true);

	for (int spin = 0; spin < 2; spin++) {
		pthread_t t;
		void *r;

		vmh_params.select_poll = -spin;
		CHECK(pthread_create(&t, NULL, cancelled_thread, &fd) == 0);
		doze(20);
		CHECK(pthread_cancel(t) == 0);
		pthread_join(t, &r);
		CHECK(r == PTHREAD_CANCELED);
		EQUAL(atomic_load(&vmh_sleepers), 0);
	}
}

/* ---- signals ---- */

static volatile sig_atomic_t ran, ran_info;

static void on_signal(int sig)
{
	ran = sig;
}

static void on_info(int sig, siginfo_t *info, void *ctx)
{
	ran = sig;
	ran_info = info->si_signo == sig && ctx != NULL;
}

struct shooter {
	pthread_t who;
	int delay_us;
};

static void *shoot(void *arg)
{
	struct shooter *s = arg;

	usleep((useconds_t)s->delay_us);
	pthread_kill(s->who, SIGUSR1);
	return NULL;
}

/* In the spin and in the sleep, with SA_RESTART and without; races with the way to sleep included. */
static void eintr(void)
{
	int ep = fake_epoll(), fd = fake_sock(true), rounds = races / 50;
	struct sigaction sa = { .sa_handler = on_signal };

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 1), 0);
	for (int i = 0; i < rounds; i++) {
		struct shooter s = { .who = pthread_self(), .delay_us = i % 100 };
		struct pollfd q = { .fd = fd, .events = POLLIN };
		sigset_t all, none, was;
		pthread_t t;
		fd_set r;
		int n = 0;

		sa.sa_flags = i & 1 ? SA_RESTART : 0;
		EQUAL(sigaction(SIGUSR1, &sa, NULL), 0);
		vmh_params.select_poll = i & 2 ? -1 : i & 4 ? 20 : 0;
		/* the signal is let in by the mask of the call only: it can't be missed */
		sigfillset(&all);
		sigemptyset(&none);
		pthread_sigmask(SIG_SETMASK, &all, &was);
		CHECK(pthread_create(&t, NULL, shoot, &s) == 0);
		FD_ZERO(&r);
		FD_SET(fd, &r);
		switch (i % 3) {
		case 0:
			n = wait_ep(ep, evs, 4, 5000 * MS, &none);
			break;
		case 1:
			n = vmh_poll(&q, 1, 5000 * MS, &none);
			break;
		case 2:
			n = vmh_select(fd + 1, &r, NULL, NULL, 5000 * MS, &none);
			break;
		}
		EQUAL(n, -EINTR);
		EQUAL(ran, SIGUSR1);
		sigset_t after;
		pthread_sigmask(SIG_SETMASK, NULL, &after);
		CHECK(sigismember(&after, SIGUSR2) == 1 && sigismember(&after, SIGUSR1) == 1);
		pthread_join(t, NULL);
		pthread_sigmask(SIG_SETMASK, &was, NULL);
	}
	fake_close(fd);
	fake_close(ep);
}

/* What is ready is returned, and the pending signal stays pending, as in the kernel. */
static void mask_ready_first(void)
{
	int fd = fake_sock(true);
	struct pollfd q = { .fd = fd, .events = POLLIN };
	sigset_t set, none, was, pending;

	signal(SIGUSR1, on_signal);
	sigemptyset(&none);
	sigemptyset(&set);
	sigaddset(&set, SIGUSR1);
	pthread_sigmask(SIG_BLOCK, &set, &was);
	ran = 0;
	raise(SIGUSR1);
	fake_ring_rx(fd);
	EQUAL(vmh_poll(&q, 1, -1, &none), 1);
	EQUAL(ran, 0);
	CHECK(fake_take(fd));
	EQUAL(vmh_poll(&q, 1, 0, &none), -EINTR);
	EQUAL(ran, SIGUSR1);
	sigpending(&pending);
	CHECK(!sigismember(&pending, SIGUSR1));
	pthread_sigmask(SIG_SETMASK, &was, NULL);
	fake_close(fd);
}

static void handlers(void)
{
	struct sigaction sa = { .sa_sigaction = on_info, .sa_flags = SA_SIGINFO | SA_NODEFER }, old;
	sig_atomic_t any = vmh_signals_any, nor = vmh_signals_norestart;

	CHECK(signal(SIGUSR2, on_signal) == SIG_DFL);
	EQUAL(sigaction(SIGUSR2, NULL, &old), 0);
	CHECK(old.sa_handler == on_signal && (old.sa_flags & SA_RESTART) && !(old.sa_flags & SA_SIGINFO));
	CHECK(sigismember(&old.sa_mask, SIGUSR2) == 1);
	raise(SIGUSR2);
	EQUAL(ran, SIGUSR2);
	EQUAL(vmh_signals_any, any + 1);
	EQUAL(vmh_signals_norestart, nor);
	sigaddset(&sa.sa_mask, SIGHUP);
	EQUAL(sigaction(SIGUSR2, &sa, &old), 0);
	CHECK(old.sa_handler == on_signal);
	raise(SIGUSR2);
	EQUAL(ran_info, 1);
	EQUAL(vmh_signals_norestart, nor + 1);
	EQUAL(sigaction(SIGUSR2, NULL, &old), 0);
	CHECK(old.sa_sigaction == on_info && (old.sa_flags & SA_SIGINFO) && (old.sa_flags & SA_NODEFER));
	CHECK(sigismember(&old.sa_mask, SIGHUP) == 1);
	CHECK((void *)signal(SIGUSR2, SIG_IGN) == (void *)on_info);
	raise(SIGUSR2);
	CHECK(signal(SIGUSR2, SIG_DFL) == SIG_IGN);
	CHECK(sysv_signal(SIGUSR2, on_signal) == SIG_DFL);
	raise(SIGUSR2);          /* once: SA_RESETHAND */
	CHECK(signal(SIGUSR2, on_signal) == SIG_DFL);
	EQUAL(siginterrupt(SIGUSR2, 1), 0);
	EQUAL(sigaction(SIGUSR2, NULL, &old), 0);
	CHECK(old.sa_handler == on_signal && !(old.sa_flags & SA_RESTART));
	nor = vmh_signals_norestart;
	raise(SIGUSR2);
	EQUAL(vmh_signals_norestart, nor + 1);
	CHECK(signal(SIGUSR2, on_signal) == on_signal);
	EQUAL(sigaction(SIGUSR2, NULL, &old), 0);
	CHECK(!(old.sa_flags & SA_RESTART)); /* siginterrupt outlives signal() */
	EQUAL(siginterrupt(SIGUSR2, 0), 0);
	errno = 0;
	CHECK(signal(SIGKILL, on_signal) == SIG_ERR && errno == EINVAL);
	errno = 0;
	CHECK(sigaction(99, &sa, NULL) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(sigaction(SIGKILL, &sa, NULL) == -1 && errno == EINVAL);
	CHECK(sigset(SIGUSR2, on_signal) == on_signal);
	signal(SIGUSR2, SIG_DFL);
	EQUAL(errno, EINVAL);
}

/* ---- poll and select, entry by entry ---- */

static void poll_exact(void)
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

static void select_exact(void)
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

static void budget(void)
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

static void after_fork(void)
{
	int ep = fake_epoll(), fd = fake_sock(true), status;

	EQUAL(ctl(ep, EPOLL_CTL_ADD, fd, EPOLLIN, 4), 0);
	fake_ring_rx(fd);
	EQUAL(look(ep), 1);
	pid_t pid = fork();
	if (pid == 0) {
		vmh_wait_fork_child();
		vmh_epoll_fork_child();
		EQUAL(look(ep), 0);
		fake_os_rx(fd);
		EQUAL(wait_ep(ep, evs, 4, 1000 * MS, NULL), 1);
		EQUAL(evs[0].data.u64, 4);
		int mine = fake_sock(true);
		EQUAL(ctl(ep, EPOLL_CTL_ADD, mine, EPOLLIN, 6), 0);
		EQUAL(ctl(ep, EPOLL_CTL_DEL, mine, EPOLLIN, 6), 0);
		fake_os_take(fd);
		struct pollfd q = { .fd = mine, .events = POLLIN };
		EQUAL(vmh_poll(&q, 1, MS, NULL), 0);
		exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && WIFEXITED(status));
	EQUAL(WEXITSTATUS(status), 0);
	fake_close(fd);
	fake_close(ep);
}

/* A cancelled thread's frames leave ASan's shadow of its stack poisoned: its own exit trips over that. */
#if defined(__SANITIZE_ADDRESS__)
#define ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define ASAN 1
#endif
#endif

#define T(f) { #f, f }
static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	T(level), T(edge), T(oneshot), T(oneshot_shared_data), T(masks), T(errors), T(many_sets), T(nested),
	T(fairness), T(kernel_not_starved), T(timeouts), T(kernel_only_set), T(offloaded_later), T(wake_races),
	T(churn), T(eintr), T(mask_ready_first), T(handlers), T(poll_exact), T(select_exact),
	T(budget), T(after_fork),
#ifndef ASAN
	T(cancellation),
#endif
};

int main(int argc, char **argv)
{
	for (int k = 1; k < argc; k++)
		if (atoi(argv[k]) > 0)
			races = atoi(argv[k]);
	for (unsigned i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
		bool named = false, match = false;
		int status;

		for (int k = 1; k < argc; k++) {
			named |= atoi(argv[k]) <= 0;
			match |= strcmp(argv[k], tests[i].name) == 0;
		}
		if (named && !match)
			continue;
		/* each in a process of its own: fresh tables, and a hang has a name */
		pid_t pid = fork();
		if (pid == 0) {
			alarm(120);
			fake_start();
			tests[i].run();
			exit(0);
		}
		CHECK(waitpid(pid, &status, 0) == pid);
		if (status != 0) {
			printf("FAILED %s (status %#x)\n", tests[i].name, (unsigned)status);
			return 1;
		}
		printf("ok %s\n", tests[i].name);
		fflush(stdout);
	}
	return 0;
}
