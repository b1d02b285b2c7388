/* Connections per second: each is opened, carries a request of 80 bytes and an answer of 64, and is closed by the client.
 *
 * tcp_rate server ADDRESS PORT spin|block
 * tcp_rate client ADDRESS PORT spin|block SECONDS   prints connections per second
 * spin: sockets without blocking, in a loop. block: plain blocking calls. */
#define _GNU_SOURCE
#include "bench.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <sys/socket.h>
#include <unistd.h>

#define REQUEST 80
#define ANSWER 64

static bool spin;

static bool again(void)
{
	return spin && (errno == EAGAIN || errno == EINPROGRESS || errno == EALREADY || errno == ENOTCONN);
}

static bool take(int fd, size_t size)
{
	char buf[256];

	for (size_t have = 0; have < size;) {
		ssize_t n = recv(fd, buf, size - have, 0);

		if (n == 0 || (n < 0 && !again()))
			return false;
		have += n > 0 ? (size_t)n : 0;
	}
	return true;
}

static bool give(int fd, size_t size)
{
	static const char buf[256];

	for (;;) {
		ssize_t n = send(fd, buf, size, MSG_NOSIGNAL);

		if (n == (ssize_t)size)
			return true;
		if (n >= 0 || !again())
			return false;
	}
}

__attribute__((noreturn)) static void server(const struct sockaddr_in *at)
{
	int l = socket(AF_INET, SOCK_STREAM | (spin ? SOCK_NONBLOCK : 0), 0), one = 1;

	setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(l, (const struct sockaddr *)at, sizeof(*at)) || listen(l, 512))
		die("listen");
	puts("ready");
	fflush(stdout);
	for (;;) {
		int fd = accept4(l, NULL, NULL, spin ? SOCK_NONBLOCK : 0);

		if (fd < 0 && again())
			continue;
		if (fd < 0)
			die("accept");
		if (take(fd, REQUEST))
			give(fd, ANSWER);
		take(fd, 1); /* the end */
		close(fd);
	}
}

static bool once(const struct sockaddr_in *to)
{
	int fd = socket(AF_INET, SOCK_STREAM | (spin ? SOCK_NONBLOCK : 0), 0), one = 1;
	bool good;

	if (fd < 0)
		die("socket");
	setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	while ((good = connect(fd, (const struct sockaddr *)to, sizeof(*to)) == 0) == false)
		if (!again())
			break;
	good = good && give(fd, REQUEST) && take(fd, ANSWER);
	close(fd);
	return good;
}

static int client(const struct sockaddr_in *to, double seconds)
{
	double begun, end;
	unsigned long done = 0, failed = 0;

	for (int i = 0; i < 200; i++)
		once(to);
	begun = now();
	end = begun + seconds;
	while (now() < end)
		*(once(to) ? &done : &failed) += 1;
	printf("%.0f %lu\n", (double)done / (now() - begun), failed);
	return 0;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET };

	if (argc < 5 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
		return 2;
	at.sin_port = htons((uint16_t)atoi(argv[3]));
	spin = !strcmp(argv[4], "spin");
	if (!strcmp(argv[1], "server"))
		server(&at);
	return client(&at, argc > 5 ? atof(argv[5]) : 1);
}
