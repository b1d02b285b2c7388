/* Handlers and their wrapper; EINTR. */
#include "iomux_fake.h"
#include <pthread.h>
#include <sys/select.h>

static struct epoll_event evs[64];

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
void t_eintr(void)
{
	int ep = fake_epoll(), on = fake_sock(true), off = fake_sock(false), alone = fake_epoll(), rounds = iomux_races / 50;
	struct sigaction sa = { .sa_handler = on_signal };

	EQUAL(ctl(ep, EPOLL_CTL_ADD, on, EPOLLIN, 1), 0);
	EQUAL(ctl(alone, EPOLL_CTL_ADD, off, EPOLLIN, 1), 0);
	vmh_params.select_poll_os_force = 1;
	for (int i = 0; i < rounds; i++) {
		int fd = i & 8 ? off : on;
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
			n = wait_ep(i & 8 ? alone : ep, evs, 4, 5000 * MS, &none);
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
	fake_close(on);
	fake_close(off);
	fake_close(ep);
	fake_close(alone);
}

static void raise_usr1(void)
{
	raise(SIGUSR1);
}

/* The handler runs when the call has looked for the last time, and has not gone to sleep yet. */
void t_signal_before_sleep(void)
{
	int fd = fake_sock(true);
	struct pollfd q = { .fd = fd, .events = POLLIN };
	uint64_t t0 = vmh_now_ns();

	signal(SIGUSR1, on_signal);
	fake_before_sleep = raise_usr1;
	EQUAL(vmh_poll(&q, 1, 5000 * MS, NULL), -EINTR);
	CHECK(vmh_now_ns() - t0 < 4000u * MS);
	fake_before_sleep = NULL;
	EQUAL(vmh_poll(&q, 1, 10 * MS, NULL), 0); /* the wake-up was used up */
	fake_close(fd);
}

/* What is ready is returned, and the pending signal stays pending, as in the kernel. */
void t_mask_ready_first(void)
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

void t_handlers(void)
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

static volatile sig_atomic_t counts[65], under_lock;

static void on_count(int sig)
{
	counts[sig]++;
	under_lock |= vmh_held.depth != 0;
}

/* No handler runs while its thread has a lock of ours: not one for once, nor of signals that are faults' else. */
void t_put_off(void)
{
	static const int sigs[] = { SIGUSR2, SIGSEGV, SIGABRT, SIGBUS, SIGUSR1 };
	struct sigaction sa = { .sa_handler = on_count };
	static struct vmh_lock lock;
	sigset_t before, after;

	for (unsigned i = 0; i < sizeof(sigs) / sizeof(*sigs); i++) {
		sa.sa_flags = i ? 0 : (int)SA_RESETHAND;
		EQUAL(sigaction(sigs[i], &sa, NULL), 0);
	}
	sigprocmask(SIG_SETMASK, NULL, &before);
	for (int round = 1; round <= 3; round++) {
		vmh_lock(&lock);
		for (unsigned i = round > 1; i < sizeof(sigs) / sizeof(*sigs); i++)
			kill(getpid(), sigs[i]);
		for (unsigned i = 0; i < sizeof(sigs) / sizeof(*sigs); i++)
			EQUAL(counts[sigs[i]], i ? round - 1 : round > 1);
		vmh_unlock(&lock);
		for (unsigned i = 0; i < sizeof(sigs) / sizeof(*sigs); i++)
			EQUAL(counts[sigs[i]], i ? round : 1);
		sigprocmask(SIG_SETMASK, NULL, &after);
		CHECK(!memcmp(&before, &after, 8));
	}
	EQUAL(under_lock, 0);
	CHECK(signal(SIGUSR2, SIG_DFL) == SIG_DFL); /* it was for once */
}
