/* Threads that share TCP connections to an echo at IP:PORT. usage: tcp_threads IP PORT SECONDS MODE
 *
 *  share   each connection has a thread that sends and one that receives, another one polls all and asks for options
 *  home    the same; now and then a connection is given to the kernel by dup()
 *  close   4 threads send, receive and poll on connections that another thread closes and opens all the time
 *
 * The bytes of a connection count up: one that is lost, doubled or another's is "strange". Prints "sent N got N strange N
 * opened N". Exit 3 when a thread did not come back. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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
	pthread_t t[2 * CONNECTIONS + 1];
	struct timespec pause = { 0, 10000000 };
	unsigned n = 0;
	double end;

	if (argc != 5)
		return 2;
	peer.sin_family = AF_INET;
	peer.sin_port = htons((unsigned short)atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &peer.sin_addr);
	signal(SIGALRM, hung);
	alarm((unsigned)atoi(argv[3]) + 30);
	end = now() + atof(argv[3]);
	for (size_t i = 0; i < CONNECTIONS; i++)
		fds[i] = open_one();
	if (!strcmp(argv[4], "close")) {
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
	for (size_t i = 0; i < CONNECTIONS; i++)
		close(fds[i]);
	printf("sent %lu got %lu strange %lu opened %lu\n", sent, got, strange, opened);
	return 0;
}
