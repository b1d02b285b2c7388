/* Threads that share TCP connections to an echo at IP:PORT. usage: tcp_threads IP PORT SECONDS MODE
 *
 *  share   each connection has a thread that sends and one that receives, another one polls all and asks for options
 *  home    the same; now and then a connection is given to the kernel by dup()
 *  close   4 threads send, receive and poll on connections that another thread closes and opens all the time
 *  serve   it listens itself at PORT + 1: two threads wait in accept() and echo, a third one does both by epoll, another
 *          one asks and sets options of the listener; prints "ready" first
 *
 * The bytes of a connection count up: one that is lost, doubled or another's is "strange". Prints "sent N got N strange N
 * opened N". Exit 3 when a thread did not come back. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdbool.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define CONNECTIONS 4

static struct sockaddr_in peer;
static _Atomic int fds[CONNECTIONS];
static _Atomic unsigned long sent, got, strange, opened;
static _Atomic int stop;

static int open_one(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct timeval patience = { 0, 200000 };

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof(patience));
	if (connect(fd, (struct sockaddr *)&peer, sizeof(peer)) == 0)
		opened++;
	return fd;
}

static void *sender(void *arg)
{
	unsigned char buf[3000], next = 0;
	size_t i = (size_t)arg;

	while (!stop) {
		size_t len = 1 + (next * 37u) % sizeof(buf);
		ssize_t n;

		for (size_t k = 0; k < len; k++)
			buf[k] = (unsigned char)(next + k);
		n = send(fds[i], buf, len, MSG_NOSIGNAL);
		if (n < 0 && errno != EAGAIN)
			break;
		if (n > 0) {
			next = (unsigned char)(next + n);
			sent += (unsigned long)n;
		}
	}
	shutdown(fds[i], SHUT_WR);
	return NULL;
}

static void *receiver(void *arg)
{
	unsigned char buf[5000], next = 0;
	size_t i = (size_t)arg;

	for (;;) {
		ssize_t n = recv(fds[i], buf, sizeof(buf), 0);

		if (n == 0 || (n < 0 && errno != EAGAIN))
			return NULL;
		for (ssize_t k = 0; k < n; k++)
			strange += buf[k] != next++;
		got += n > 0 ? (unsigned long)n : 0;
	}
}

static void *onlooker(void *arg)
{
	struct timespec pause = { 0, 2000000 };

	for (unsigned turn = 0; !stop; turn++) {
		struct pollfd p[CONNECTIONS];
		struct tcp_info info;
		socklen_t len = sizeof(info);

		for (int i = 0; i < CONNECTIONS; i++)
			p[i] = (struct pollfd){ .fd = fds[i], .events = POLLIN | POLLOUT };
		poll(p, CONNECTIONS, 1);
		getsockopt(fds[turn % CONNECTIONS], IPPROTO_TCP, TCP_INFO, &info, &len);
		if (arg && turn % 16 == 15 && turn / 16 < CONNECTIONS)
			close(dup(fds[turn / 16]));
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static void *on_closing(void *arg)
{
	unsigned char buf[500] = { 0 };
	size_t me = (size_t)arg;

	for (unsigned turn = 0; !stop; turn++) {
		int fd = fds[(me + turn) % CONNECTIONS];
		struct pollfd p = { .fd = fd, .events = POLLIN };
		ssize_t n;

		if (me % 2 == 0) {
			n = send(fd, buf, sizeof(buf), MSG_NOSIGNAL | MSG_DONTWAIT);
			sent += n > 0 ? (unsigned long)n : 0;
		} else if (me == 3 || poll(&p, 1, 20) > 0) {
			n = recv(fd, buf, sizeof(buf), me == 3 ? 0 : MSG_DONTWAIT);
			got += n > 0 ? (unsigned long)n : 0;
			for (ssize_t k = 0; k < n; k++)
				strange += buf[k] != 0;
		}
	}
	return NULL;
}

static void close_and_open(unsigned turn)
{
	unsigned i = turn % CONNECTIONS;
	struct timespec pause = { 0, 300000 };

	if (turn % 3 == 0)
		shutdown(fds[i], SHUT_RDWR);
	close(fds[i]);
	fds[i] = open_one();
	nanosleep(&pause, NULL);
}

static int listener;

/* What has come goes back. false: it is over. */
static int echo_some(int fd, unsigned char *next, int flags)
{
	unsigned char buf[2000];
	ssize_t n = recv(fd, buf, sizeof(buf), flags), m;

	if (n <= 0)
		return n < 0 && errno == EAGAIN;
	for (ssize_t k = 0; k < n; k++)
		strange += buf[k] != (*next)++;
	got += (unsigned long)n;
	m = send(fd, buf, (size_t)n, MSG_NOSIGNAL);
	sent += m > 0 ? (unsigned long)m : 0;
	return m > 0;
}

static void *acceptor(void *arg)
{
	(void)arg;
	while (!stop) {
		unsigned char next = 0;
		int fd = accept(listener, NULL, NULL);

		if (fd < 0)
			continue;
		opened++;
		while (echo_some(fd, &next, 0))
			;
		close(fd);
	}
	return NULL;
}

static void *by_epoll(void *arg)
{
	static unsigned char next[1024];
	int ep = epoll_create1(0), one = 1;
	struct epoll_event e = { .events = EPOLLIN, .data.fd = listener }, all[8];

	(void)arg;
	epoll_ctl(ep, EPOLL_CTL_ADD, listener, &e);
	while (!stop) {
		int n = epoll_wait(ep, all, 8, 50);

		for (int i = 0; i < n; i++) {
			int fd = all[i].data.fd;

			if (fd != listener) {
				if (!echo_some(fd, &next[fd], MSG_DONTWAIT))
					close(fd);
			} else if ((fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC)) >= 0) {
				opened++;
				next[fd] = 0;
				setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
				e.data.fd = fd;
				epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
			}
		}
	}
	return NULL;
}

static void *sets_options(void *arg)
{
	struct timespec pause = { 0, 1000000 };
	struct pollfd p = { .fd = listener, .events = POLLIN };
	struct tcp_info info;
	socklen_t len = sizeof(info);

	(void)arg;
	for (int turn = 0; !stop; turn++) {
		setsockopt(listener, IPPROTO_TCP, TCP_NODELAY, &(int){ turn & 1 }, sizeof(int));
		getsockopt(listener, IPPROTO_TCP, TCP_INFO, &info, &len);
		poll(&p, 1, 0);
		nanosleep(&pause, NULL);
	}
	return NULL;
}

static int listens(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((unsigned short)(ntohs(peer.sin_port) + 1)) };
	struct timeval patience = { 0, 200000 };
	struct pollfd p = { .events = POLLIN };

	listener = p.fd = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	if (bind(listener, (struct sockaddr *)&at, sizeof(at)) || listen(listener, 64))
		return 0;
	poll(&p, 1, 0);
	puts("ready");
	return !fflush(stdout);
}

static void hung(int sig)
{
	(void)sig;
	_exit(3);
}

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

int main(int argc, char **argv)
{
	void *(*const servers[])(void *) = { acceptor, acceptor, by_epoll, sets_options };
	pthread_t t[2 * CONNECTIONS + 1];
	struct timespec pause = { 0, 10000000 };
	unsigned n = 0;
	double end;
	bool serve;

	if (argc != 5)
		return 2;
	peer.sin_family = AF_INET;
	peer.sin_port = htons((unsigned short)atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &peer.sin_addr);
	serve = !strcmp(argv[4], "serve");
	signal(SIGALRM, hung);
	alarm((unsigned)atoi(argv[3]) + 30);
	end = now() + atof(argv[3]);
	if (serve && !listens())
		return 1;
	for (size_t i = 0; !serve && i < CONNECTIONS; i++)
		fds[i] = open_one();
	if (serve) {
		for (; n < sizeof(servers) / sizeof(servers[0]); n++)
			pthread_create(&t[n], NULL, servers[n], NULL);
		while (now() < end)
			nanosleep(&pause, NULL);
	} else if (!strcmp(argv[4], "close")) {
		for (size_t i = 0; i < 4; i++)
			pthread_create(&t[n++], NULL, on_closing, (void *)i);
		for (unsigned turn = 0; now() < end; turn++)
			close_and_open(turn);
	} else {
		for (size_t i = 0; i < CONNECTIONS; i++) {
			pthread_create(&t[n++], NULL, sender, (void *)i);
			pthread_create(&t[n++], NULL, receiver, (void *)i);
		}
		pthread_create(&t[n++], NULL, onlooker, strcmp(argv[4], "home") ? NULL : "home");
		while (now() < end)
			nanosleep(&pause, NULL);
	}
	stop = 1;
	while (n)
		pthread_join(t[--n], NULL);
	for (size_t i = 0; !serve && i < CONNECTIONS; i++)
		close(fds[i]);
	printf("sent %lu got %lu strange %lu opened %lu\n", sent, got, strange, opened);
	return 0;
}
