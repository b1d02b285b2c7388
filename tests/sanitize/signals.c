/* A SIGALRM handler that sends and receives on the socket that the main loop uses, at 1 kHz.
 *
 * usage: signals IP PORT COUNT WAIT    WAIT: recv, poll, epoll, nonblock
 * The peer at IP:PORT echoes. Ends after COUNT handler runs and prints what was counted; a deadlock is a SIGALRM that
 * is never answered, which a thread without signals notices: exit 3.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

static int fd, other, ep;
static volatile sig_atomic_t runs, depth, nested, wrong_mask, wrong_info;
static volatile unsigned long sent, got, bad;

static void check(const char *buf, ssize_t n)
{
	if (n < 0)
		return;
	got++;
	for (ssize_t i = 1; i < n; i++)
		if (buf[i] != buf[0]) {
			bad++;
			return;
		}
}

static void send_one(void)
{
	char buf[64];

	memset(buf, 'a' + (int)(sent % 26), sizeof(buf));
	if (send(fd, buf, sizeof(buf), MSG_DONTWAIT) == (ssize_t)sizeof(buf))
		sent++;
}

static void on_alarm(int sig, siginfo_t *info, void *context)
{
	int saved = errno;
	sigset_t now;
	char buf[128];
	struct pollfd p = { .fd = fd, .events = POLLIN };

	(void)context;
	if (depth++)
		nested++;
	if (info->si_signo != sig || info->si_code != SI_KERNEL)
		wrong_info++;
	pthread_sigmask(SIG_SETMASK, NULL, &now);
	if (!sigismember(&now, SIGALRM) || !sigismember(&now, SIGUSR2) || sigismember(&now, SIGUSR1))
		wrong_mask++;
	send_one();
	poll(&p, 1, 0);
	check(buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	if (runs % 64 == 0) { /* the lock of the fd table's objects, and the pools */
		int extra = socket(AF_INET, SOCK_DGRAM, 0);
		struct sockaddr_in any = { .sin_family = AF_INET };

		bind(extra, (struct sockaddr *)&any, sizeof(any));
		close(extra);
	}
	runs++;
	depth--;
	errno = saved;
}

static void *watch(void *arg)
{
	sig_atomic_t last = -1;

	(void)arg;
	for (;;) {
		sleep(5);
		if (runs == last) {
			dprintf(2, "hung after %d runs\n", (int)runs);
			_exit(3);
		}
		last = runs;
	}
	return NULL;
}

static void wait_for(const char *how)
{
	struct epoll_event ev;
	struct pollfd p = { .fd = fd, .events = POLLIN };
	char buf[128];

	if (!strcmp(how, "poll"))
		poll(&p, 1, 2);
	else if (!strcmp(how, "epoll"))
		epoll_wait(ep, &ev, 1, 2);
	check(buf, recv(fd, buf, sizeof(buf), strcmp(how, "recv") ? MSG_DONTWAIT : 0));
}

static void *watcher_without_signals(void)
{
	pthread_t t;
	sigset_t all, old;

	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pthread_create(&t, NULL, watch, NULL);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
	return NULL;
}

int main(int argc, char **argv)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct sigaction act = { .sa_sigaction = on_alarm, .sa_flags = SA_SIGINFO | SA_RESTART };
	struct itimerval every = { { 0, 1000 }, { 0, 1000 } }, off = { 0 };
	struct epoll_event ev = { .events = EPOLLIN };
	struct timeval patience = { 0, 2000 };
	sigset_t before, after;
	int count;

	if (argc != 5)
		return 2;
	to.sin_port = htons((unsigned short)atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &to.sin_addr);
	count = atoi(argv[3]);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	other = socket(AF_INET, SOCK_DGRAM, 0);
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)) || connect(other, (struct sockaddr *)&to, sizeof(to)))
		return perror("connect"), 1;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	ep = epoll_create1(EPOLL_CLOEXEC);
	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
	send_one();
	watcher_without_signals();
	pthread_sigmask(SIG_SETMASK, NULL, &before);
	sigemptyset(&act.sa_mask);
	sigaddset(&act.sa_mask, SIGUSR2);
	sigaction(SIGALRM, &act, NULL);
	setitimer(ITIMER_REAL, &every, NULL);
	while (runs < count) {
		send_one();
		wait_for(argv[4]);
	}
	setitimer(ITIMER_REAL, &off, NULL);
	pthread_sigmask(SIG_SETMASK, NULL, &after);
	for (int sig = 1; sig < 65; sig++)
		if (sigismember(&before, sig) != sigismember(&after, sig))
			wrong_mask++;
	printf("runs %d sent %lu got %lu bad %lu nested %d mask %d info %d\n", (int)runs, sent, got, bad, (int)nested,
	       (int)wrong_mask, (int)wrong_info);
	return bad || nested || wrong_mask || wrong_info;
}
