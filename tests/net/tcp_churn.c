/* Connections one after another, each with 80 bytes and 64 back, closed by the client first.
 *
 * tcp_churn server ADDRESS PORT
 * tcp_churn client ADDRESS PORT COUNT [home|reset|refused]
 *                          COUNT connections at each SIGUSR1; prints "ready", then "done GOOD" after each */
#include <arpa/inet.h>
#include <netinet/in.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static bool take(int fd, size_t size)
{
	char buf[128];
	ssize_t n;

	for (size_t have = 0; have < size; have += (size_t)n)
		if ((n = recv(fd, buf, size - have, 0)) <= 0)
			return false;
	return true;
}

static bool give(int fd, size_t size)
{
	static const char buf[128];

	return send(fd, buf, size, MSG_NOSIGNAL) == (ssize_t)size;
}

static int server(const struct sockaddr_in *at)
{
	int l = socket(AF_INET, SOCK_STREAM, 0), one = 1;

	setsockopt(l, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(l, (const struct sockaddr *)at, sizeof(*at)) || listen(l, 64))
		return 1;
	puts("ready");
	fflush(stdout);
	for (;;) {
		int fd = accept(l, NULL, NULL);

		if (fd < 0)
			return 1;
		if (take(fd, 80))
			give(fd, 64);
		take(fd, 1); /* the end */
		close(fd);
	}
}

static bool goes_home, is_reset, is_refused; /* to the kernel, before it is used; at its end; nobody listens */

static bool once(const struct sockaddr_in *to)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	bool good = connect(fd, (const struct sockaddr *)to, sizeof(*to)) == 0;

	if (is_refused)
		return close(fd) == 0 && !good;
	if (goes_home)
		close(dup(fd));
	good = good && give(fd, 80) && take(fd, 64);
	if (is_reset)
		setsockopt(fd, SOL_SOCKET, SO_LINGER, &(struct linger){ 1, 0 }, sizeof(struct linger));
	return close(fd) == 0 && good;
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	sigset_t go;
	int sig;

	if (argc < 4 || inet_pton(AF_INET, argv[2], &at.sin_addr) != 1)
		return 2;
	at.sin_port = htons((unsigned short)atoi(argv[3]));
	if (!strcmp(argv[1], "server"))
		return server(&at);
	sigemptyset(&go);
	sigaddset(&go, SIGUSR1);
	sigprocmask(SIG_BLOCK, &go, NULL);
	goes_home = argc > 5 && !strcmp(argv[5], "home");
	is_reset = argc > 5 && !strcmp(argv[5], "reset");
	is_refused = argc > 5 && !strcmp(argv[5], "refused");
	if (is_refused)
		at.sin_port = htons(1);
	once(&at); /* from here on the program has its ring */
	puts("ready");
	for (fflush(stdout); sigwait(&go, &sig) == 0; fflush(stdout)) {
		long good = 0;

		for (long i = atol(argv[4]); i; i--)
			good += once(&at);
		printf("done %ld\n", good);
	}
}
