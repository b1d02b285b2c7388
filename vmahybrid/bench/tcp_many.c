/* Many TCP connections that all work: each has one 64-byte message on its way, back and forth. Ordinary epoll programs.
 *
 *   tcp_many server ADDRESS PORT                          echoes until SIGINT or SIGTERM, prints "ready" first
 *   tcp_many client ADDRESS PORT CONNECTIONS SECONDS [IDLE SETTLE]
 *                prints {"connections":N,"messages":N,"seconds":S,"rate":R,"end_rate":R}, the latter of the last tenth
 *                of the time; with IDLE, beside so many further connections that are open, in the same epoll sets, and
 *                never used, SETTLE seconds after they came
 *
 * The client's clock begins when every connection has had its first answer.
 */
#define _GNU_SOURCE
#include "bench.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define MESSAGE 64
#define EVENTS 256
#define BACKLOG 4096
#define CONNECTIONS_MAX 100000
#define WARM_SECONDS 0.2

static uint8_t have[CONNECTIONS_MAX * 2]; /* bytes of an unfinished message, by descriptor */
static bool answered[CONNECTIONS_MAX * 2];

static void no_delay(int fd)
{
	int on = 1;

	if (setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on)))
		die("TCP_NODELAY");
}

static void watch(int ep, int fd)
{
	struct epoll_event event = {.events = EPOLLIN, .data.fd = fd};

	if (fd >= CONNECTIONS_MAX * 2) {
		errno = EMFILE;
		die("descriptor");
	}
	if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &event))
		die("epoll_ctl");
}

static void send_message(int fd)
{
	static const uint8_t message[MESSAGE] = "tcp_many";

	if (send(fd, message, MESSAGE, MSG_NOSIGNAL) != MESSAGE && errno != EPIPE && errno != ECONNRESET)
		die("send");
}

/* 1: a whole message came; 0: not yet; -1: the peer has closed. */
static int receive_message(int fd)
{
	uint8_t buffer[MESSAGE];
	ssize_t got = recv(fd, buffer, (size_t)(MESSAGE - have[fd]), MSG_DONTWAIT);

	if (got < 0 && errno == EAGAIN)
		return 0;
	if (got <= 0)
		return -1;
	have[fd] = (uint8_t)(have[fd] + got);
	if (have[fd] < MESSAGE)
		return 0;
	have[fd] = 0;
	return 1;
}

static void accept_all(int ep, int listener)
{
	int fd;

	while ((fd = accept4(listener, NULL, NULL, SOCK_NONBLOCK)) >= 0) {
		no_delay(fd);
		have[fd] = 0;
		watch(ep, fd);
	}
	if (errno != EAGAIN && errno != EINTR && errno != ECONNABORTED)
		die("accept4");
}

static void serve(const struct sockaddr_in *address)
{
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0), ep = epoll_create1(0), on = 1;
	struct epoll_event events[EVENTS];

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	if (bind(listener, (const struct sockaddr *)address, sizeof(*address)) || listen(listener, BACKLOG))
		die("listen");
	watch(ep, listener);
	puts("ready");
	fflush(stdout);
	while (!stopped) {
		int n = epoll_wait(ep, events, EVENTS, 100);

		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd, whole;

			if (fd == listener) {
				accept_all(ep, listener);
				continue;
			}
			whole = receive_message(fd);
			if (whole > 0)
				send_message(fd);
			else if (whole < 0)
				close(fd);
		}
	}
}

static int connect_one(int ep, const struct sockaddr_in *address)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	if (fd < 0 || connect(fd, (const struct sockaddr *)address, sizeof(*address)))
		die("connect");
	no_delay(fd);
	watch(ep, fd);
	return fd;
}

static unsigned first; /* connections that had an answer */

static void exchange(int ep, unsigned connections, double seconds)
{
	struct epoll_event events[EVENTS];
	double start = 0, end = 0, last = 0, at = 0;
	uint64_t count = 0, before = 0;

	while (!stopped && (!end || at < end)) {
		int n = epoll_wait(ep, events, EVENTS, 100);

		for (int i = 0; i < n; i++) {
			int fd = events[i].data.fd, whole = receive_message(fd);

			if (whole < 0)
				die("the server closed a connection");
			if (!whole)
				continue;
			count++;
			first += !answered[fd];
			answered[fd] = true;
			send_message(fd);
		}
		at = now();
		if (first == connections && !end) {
			fputs("begun\n", stderr);
			start = at + WARM_SECONDS, end = start + seconds, last = end - seconds / 10;
		}
		if (end && at < start)
			count = 0;
		if (end && at < last)
			before = count;
	}
	seconds = end ? at - start : 0;
	last = end ? at - last : 0;
	printf("{\"connections\":%u,\"messages\":%llu,\"seconds\":%.6f,\"rate\":%.0f,\"end_rate\":%.0f}\n", first,
	       (unsigned long long)count, seconds, seconds > 0 ? (double)count / seconds : 0.0,
	       last > 0 ? (double)(count - before) / last : 0.0);
}

static void run_client(const struct sockaddr_in *address, unsigned connections, double seconds, unsigned idle, double settle)
{
	static int fds[CONNECTIONS_MAX];
	int ep = epoll_create1(0);

	for (unsigned i = 0; i < connections; i++)
		fds[i] = connect_one(ep, address);
	for (unsigned i = 0; i < idle && !stopped; i++)
		answered[connect_one(ep, address)] = true;
	if (idle)
		nanosleep(&(struct timespec){.tv_sec = (time_t)settle}, NULL);
	for (unsigned i = 0; i < connections; i++)
		send_message(fds[i]);
	exchange(ep, connections, seconds);
	for (int fd = 0; fd < CONNECTIONS_MAX * 2; fd++)
		if (answered[fd])
			close(fd);
}

int main(int argc, char **argv)
{
	struct rlimit files = {CONNECTIONS_MAX, CONNECTIONS_MAX};
	struct sigaction action = {.sa_handler = on_signal};
	struct sockaddr_in address = {.sin_family = AF_INET};
	bool client = (argc == 6 || argc == 8) && !strcmp(argv[1], "client");
	unsigned connections = client ? (unsigned)atoi(argv[4]) : 1, idle = argc == 8 ? (unsigned)atoi(argv[6]) : 0;

	if (!(client || (argc == 4 && !strcmp(argv[1], "server"))) || inet_pton(AF_INET, argv[2], &address.sin_addr) != 1 ||
	    connections < 1 || connections > CONNECTIONS_MAX || idle > CONNECTIONS_MAX - connections) {
		fprintf(stderr, "usage: tcp_many server ADDRESS PORT | client ADDRESS PORT CONNECTIONS SECONDS [IDLE SETTLE]\n");
		return 2;
	}
	address.sin_port = htons((uint16_t)atoi(argv[3]));
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	setrlimit(RLIMIT_NOFILE, &files);
	if (client)
		run_client(&address, connections, atof(argv[5]), idle, idle ? atof(argv[7]) : 0);
	else
		serve(&address);
	return 0;
}
