/* Threads that share sockets, with an echo at IP:PORT. usage: threads IP PORT SECONDS MODE
 *
 *  recv       4 threads receive on one connected socket, one sends
 *  exclusive  4 threads, each with its own epoll set, EPOLLEXCLUSIVE on the same sockets
 *  edge       4 threads in epoll_wait on one set, EPOLLET, which read until EAGAIN
 *  close      4 threads receive, poll or epoll_wait on sockets that another thread closes and opens all the time
 *
 * Every question has a number; an answer that comes twice, or is none that was asked, is an error. Prints
 * "asked N answered N twice N strange N hung N". Exit 3 when a thread did not come back.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define THREADS 4
#define SOCKETS 4
#define MANY (1u << 24)
#define WINDOW 64

struct question {
	uint32_t magic, n, pad[6];
};
#define MAGIC 0x5eed5eed

static struct sockaddr_in peer;
static _Atomic int fds[SOCKETS];
static int shared_set;
static _Atomic uint32_t asked, answered, twice, strange;
static _Atomic int stop, running;
static _Atomic unsigned char *seen;

static void nap_us(long us)
{
	struct timespec t = { us / 1000000, us % 1000000 * 1000 };

	nanosleep(&t, NULL);
}

static int open_socket(int flags)
{
	int fd = socket(AF_INET, SOCK_DGRAM | flags, 0);
	struct timeval patience = { 0, 100000 };

	if (fd < 0)
		return -1;
	connect(fd, (struct sockaddr *)&peer, sizeof(peer));
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	return fd;
}

static void ask(int fd)
{
	struct question q = { .magic = MAGIC, .n = atomic_load(&asked) };

	if (send(fd, &q, sizeof(q), MSG_DONTWAIT) == (ssize_t)sizeof(q))
		atomic_fetch_add(&asked, 1);
}

/* 1: an answer, 0: nothing now, -1: the socket is not what it was */
static int take(int fd, int flags)
{
	struct question q = { 0 };
	ssize_t r = recv(fd, &q, sizeof(q), flags);

	if (r < 0)
		return errno == EAGAIN || errno == EINTR ? 0 : -1;
	if (r == 0) /* shut down */
		return 0;
	if (r != (ssize_t)sizeof(q) || q.magic != MAGIC || q.n >= MANY)
		atomic_fetch_add(&strange, 1);
	else if (atomic_fetch_add(&seen[q.n], 1))
		atomic_fetch_add(&twice, 1);
	else
		atomic_fetch_add(&answered, 1);
	return 1;
}

static void *receiver(void *arg)
{
	(void)arg;
	while (!stop)
		take(fds[0], 0);
	running--;
	return NULL;
}

static void *exclusive(void *arg)
{
	struct epoll_event evs[SOCKETS];
	int set = epoll_create1(0);

	(void)arg;
	for (int i = 0; i < SOCKETS; i++) {
		struct epoll_event ev = { .events = EPOLLIN | EPOLLEXCLUSIVE, .data.fd = fds[i] };
		epoll_ctl(set, EPOLL_CTL_ADD, fds[i], &ev);
	}
	while (!stop) {
		int n = epoll_wait(set, evs, SOCKETS, 100);

		for (int i = 0; i < n; i++)
			take(evs[i].data.fd, MSG_DONTWAIT);
	}
	close(set);
	running--;
	return NULL;
}

static void *edge(void *arg)
{
	struct epoll_event evs[2];

	(void)arg;
	while (!stop) {
		int n = epoll_wait(shared_set, evs, 2, 100);

		for (int i = 0; i < n; i++)
			while (take(evs[i].data.fd, MSG_DONTWAIT) > 0)
				;
	}
	running--;
	return NULL;
}

static void *on_closing(void *arg)
{
	size_t me = (size_t)arg;
	struct epoll_event ev;
	struct pollfd p;

	for (unsigned turn = 0; !stop; turn++) {
		int fd = fds[(me + turn) % SOCKETS];

		switch (me % 3) {
		case 0:
			take(fd, 0);
			break;
		case 1:
			p = (struct pollfd){ .fd = fd, .events = POLLIN };
			if (poll(&p, 1, 20) > 0 && (p.revents & POLLIN))
				take(fd, MSG_DONTWAIT);
			break;
		default:
			if (epoll_wait(shared_set, &ev, 1, 20) > 0)
				take(ev.data.fd, MSG_DONTWAIT);
		}
	}
	running--;
	return NULL;
}

static void close_and_open(unsigned turn)
{
	unsigned i = turn % SOCKETS;
	struct epoll_event ev = { .events = EPOLLIN };
	int old = fds[i], fd;

	ask(old);
	if (turn % 3 == 0)
		shutdown(old, SHUT_RDWR);
	close(old);
	fd = open_socket(0);
	fds[i] = fd;
	ev.data.fd = fd;
	epoll_ctl(shared_set, EPOLL_CTL_ADD, fd, &ev);
	ask(fd);
	if (turn % 8 == 0)
		nap_us(500);
}

static void *(*thread_of(const char *mode))(void *)
{
	return !strcmp(mode, "recv") ? receiver : !strcmp(mode, "exclusive") ? exclusive :
	       !strcmp(mode, "edge") ? edge : on_closing;
}

static void drive(int closing, double seconds)
{
	struct timespec begin, now;
	uint32_t stuck = 0, last = 0;

	clock_gettime(CLOCK_MONOTONIC, &begin);
	for (unsigned turn = 0; atomic_load(&asked) < MANY - 8; turn++) {
		if (turn % 64 == 0) {
			clock_gettime(CLOCK_MONOTONIC, &now);
			if ((double)(now.tv_sec - begin.tv_sec) + (double)(now.tv_nsec - begin.tv_nsec) / 1e9 > seconds)
				return;
		}
		if (closing) {
			close_and_open(turn);
			continue;
		}
		/* a lost answer must not close the window for ever */
		if (asked - answered > WINDOW + stuck) {
			nap_us(50);
			if (atomic_load(&answered) == last)
				stuck += turn % 2000 == 0 ? WINDOW : 0;
			last = answered;
			continue;
		}
		ask(fds[turn % SOCKETS]);
	}
}

static void on_signal(int sig)
{
	(void)sig;
}

/* A thread may have taken the number of a socket that was closed, and received on the next one of that number before
 * that had its timeout: a signal ends such a call, as it ends none that waits for a lock. */
static void stop_threads(const pthread_t *threads, size_t n)
{
	stop = 1;
	for (int i = 0; i < 100 && running; i++) {
		for (size_t k = 0; k < n; k++)
			pthread_kill(threads[k], SIGUSR1); /* not joined: the handle stays valid */
		nap_us(100000);
	}
}

int main(int argc, char **argv)
{
	pthread_t threads[THREADS];
	int closing, one;

	if (argc != 5)
		return 2;
	sigaction(SIGUSR1, &(struct sigaction){ .sa_handler = on_signal }, NULL);
	peer.sin_family = AF_INET;
	peer.sin_port = htons((unsigned short)atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &peer.sin_addr);
	seen = calloc(MANY, 1);
	closing = !strcmp(argv[4], "close");
	one = !strcmp(argv[4], "recv");
	shared_set = epoll_create1(0);
	for (int i = 0; i < SOCKETS; i++) {
		fds[i] = one && i ? atomic_load(&fds[0]) : open_socket(0);
		struct epoll_event ev = { .events = EPOLLIN | (closing ? 0 : (unsigned)EPOLLET), .data.fd = fds[i] };
		if (!one || !i)
			epoll_ctl(shared_set, EPOLL_CTL_ADD, fds[i], &ev);
	}
	running = THREADS;
	for (size_t i = 0; i < THREADS; i++)
		pthread_create(&threads[i], NULL, thread_of(argv[4]), (void *)i);
	drive(closing, atof(argv[3]));
	nap_us(300000);
	stop_threads(threads, THREADS);
	printf("asked %u answered %u twice %u strange %u hung %d\n", asked, answered, twice, strange, running);
	fflush(stdout);
	if (running)
		_exit(3);
	for (int i = 0; i < THREADS; i++)
		pthread_join(threads[i], NULL);
	return twice || strange;
}
