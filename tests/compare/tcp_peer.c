/* The other end of tcp_calls: does what the case says, line by line over a Unix socket, and answers each line with one.
 *
 *   accept | connect PORT           the connection; a reset ends the one before
 *   send N | recv N | read          N bytes of the pattern; N bytes; all up to the end, and how it ended
 *   last N                          N bytes, and its FIN in the same segment
 *   shut HOW | close | reset | oob  shutdown(2) 0 to 2; close; SO_LINGER 0 and close; one urgent byte
 *   echo N                          N bytes come back as they came
 *   rcvbuf N                        of the next connections
 *   later MS COMMAND                COMMAND after MS, without an answer
 * `tcp_peer IP PORT SOCKET SECONDS` */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/un.h>
#include <unistd.h>

static int listener, conn = -1, rcvbuf;
static volatile int generation; /* of control connections: what is late for its own does nothing */
static const char *my_ip;
static struct sockaddr_in other; /* where the case listens */

static const char *error_name(void)
{
	const char *n = strerrorname_np(errno);

	return n ? n : "?";
}

static void answer(char *out, const char *what, long r)
{
	if (r < 0)
		sprintf(out, "%s -1 %s", what, error_name());
	else
		sprintf(out, "%s %ld", what, r);
}

static void quit_conn(int reset)
{
	struct linger now = { 1, 0 };

	if (conn < 0)
		return;
	if (reset)
		setsockopt(conn, SOL_SOCKET, SO_LINGER, &now, sizeof(now));
	close(conn);
	conn = -1;
}

static long opened(int fd)
{
	struct timeval two = { 2, 0 };

	if (fd < 0)
		return -1;
	quit_conn(1);
	conn = fd;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &two, sizeof(two));
	return 0;
}

static long do_connect(int port)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	other.sin_port = htons(port);
	if (rcvbuf)
		setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &rcvbuf, sizeof(rcvbuf));
	if (connect(fd, (void *)&other, sizeof(other))) {
		close(fd);
		return -1;
	}
	return opened(fd);
}

static long do_send(long n)
{
	static char buf[1 << 16];
	long done = 0;

	while (done < n) {
		long part = n - done < (long)sizeof(buf) ? n - done : (long)sizeof(buf);

		for (long i = 0; i < part; i++)
			buf[i] = (char)('a' + (done + i) % 26);
		part = send(conn, buf, part, MSG_NOSIGNAL);
		if (part < 0)
			return -1;
		done += part;
	}
	return done;
}

static void do_read(char *out, long n, int to_the_end)
{
	static unsigned char buf[1 << 16];
	unsigned sum = 0;
	long done = 0, r = 1;

	while (to_the_end || done < n) {
		size_t want = to_the_end || n - done > (long)sizeof(buf) ? sizeof(buf) : (size_t)(n - done);

		r = recv(conn, buf, want, 0);
		if (r <= 0)
			break;
		for (long i = 0; i < r; i++)
			sum = sum * 31 + buf[i];
		done += r;
	}
	sprintf(out, "%ld bytes sum %08x%s%s", done, sum, r == 0 ? ", end" : r < 0 ? ", " : "", r < 0 ? error_name() : "");
}

static long do_echo(int n)
{
	char buf[65536];

	for (int done = 0; done < n;) {
		ssize_t r = recv(conn, buf, sizeof(buf), 0);

		if (r <= 0 || send(conn, buf, r, MSG_NOSIGNAL) != r)
			return done;
		done += (int)r;
	}
	return n;
}

static void run(char *line, char *out);

struct delayed {
	int ms, generation;
	char line[64];
};

static void *late(void *arg)
{
	struct delayed *d = arg;
	char out[256];

	usleep((unsigned)d->ms * 1000);
	if (d->generation == generation)
		run(d->line, out);
	free(d);
	return NULL;
}

static void later(const char *rest)
{
	struct delayed *d = calloc(1, sizeof(*d));
	pthread_t t;

	d->generation = generation;
	sscanf(rest, "%d %63[^\n]", &d->ms, d->line);
	pthread_create(&t, NULL, late, d);
	pthread_detach(t);
}

static void run(char *line, char *out)
{
	char verb[16] = "";
	long n = 0;

	sscanf(line, "%15s %ld", verb, &n);
	strcpy(out, "ok");
	if (!strcmp(verb, "accept")) {
		struct timeval two = { 2, 0 };

		setsockopt(listener, SOL_SOCKET, SO_RCVTIMEO, &two, sizeof(two));
		setsockopt(listener, SOL_SOCKET, SO_RCVBUF, &(int){ rcvbuf ? rcvbuf : 131072 }, sizeof(int));
		answer(out, "accept", opened(accept(listener, NULL, NULL)));
	} else if (!strcmp(verb, "connect")) {
		answer(out, "connect", do_connect((int)n));
	} else if (!strcmp(verb, "send")) {
		answer(out, "sent", do_send(n));
	} else if (!strcmp(verb, "last")) {
		setsockopt(conn, IPPROTO_TCP, TCP_CORK, &(int){ 1 }, sizeof(int));
		answer(out, "sent", do_send(n));
		shutdown(conn, SHUT_WR);
	} else if (!strcmp(verb, "recv")) {
		do_read(out, n, 0);
	} else if (!strcmp(verb, "read")) {
		do_read(out, 0, 1);
	} else if (!strcmp(verb, "echo")) {
		answer(out, "echoed", do_echo((int)n));
	} else if (!strcmp(verb, "shut")) {
		answer(out, "shut", shutdown(conn, (int)n));
	} else if (!strcmp(verb, "oob")) {
		answer(out, "oob", send(conn, "!", 1, MSG_OOB));
	} else if (!strcmp(verb, "close") || !strcmp(verb, "reset")) {
		quit_conn(*verb == 'r');
	} else if (!strcmp(verb, "rcvbuf")) {
		rcvbuf = (int)n;
	} else if (!strcmp(verb, "later")) {
		later(line + strlen("later "));
	} else {
		strcpy(out, "what?");
	}
}

static void serve(int ctl)
{
	FILE *f = fdopen(ctl, "r");
	char line[256], out[256];

	while (f && fgets(line, sizeof(line), f)) {
		run(line, out);
		if (dprintf(ctl, "%s\n", out) < 0)
			break;
	}
	generation++;
	quit_conn(1);
	rcvbuf = 0;
	fclose(f);
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	struct sockaddr_un u = { .sun_family = AF_UNIX };
	int ctl = socket(AF_UNIX, SOCK_STREAM, 0);

	if (argc < 6)
		return 2;
	alarm((unsigned)atoi(argv[4]));
	my_ip = argv[1];
	inet_pton(AF_INET, argv[1], &a.sin_addr);
	a.sin_port = htons(atoi(argv[2]));
	other.sin_family = AF_INET;
	inet_pton(AF_INET, argv[5], &other.sin_addr);
	listener = socket(AF_INET, SOCK_STREAM, 0);
	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	if (bind(listener, (void *)&a, sizeof(a)) || listen(listener, 16)) {
		perror("listen");
		return 1;
	}
	snprintf(u.sun_path, sizeof(u.sun_path), "%s", argv[3]);
	unlink(argv[3]);
	if (bind(ctl, (void *)&u, sizeof(u)) || listen(ctl, 4)) {
		perror(argv[3]);
		return 1;
	}
	puts("ready");
	fflush(stdout);
	for (;;) {
		int fd = accept(ctl, NULL, NULL);

		if (fd < 0)
			return 1;
		serve(fd);
	}
}
