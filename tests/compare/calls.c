/* Socket calls, one case a line in the tables; each case prints what the program saw. Run once on the kernel and once under
 * the shim, the two transcripts must be the same: `calls PEER_IP MY_IP [CASE...]`; `calls --names` lists the cases. */
#include "calls.h"
#ifdef TCP_CALLS
#include "tcp_calls.h"
#endif

const char *peer_ip, *my_ip;

static const char *errno_name(int e)
{
	static char buf[16];
	const char *n = strerrorname_np(e);

	if (n)
		return n;
	snprintf(buf, sizeof(buf), "E%d", e);
	return buf;
}

void say(const char *what, long r)
{
	int e = errno;

	if (r == -1)
		printf("  %s: -1 %s\n", what, errno_name(e));
	else
		printf("  %s: %ld\n", what, r);
}

void say_data(const char *what, const void *data, long n)
{
	const unsigned char *p = data;
	unsigned sum = 0;

	if (n < 0) {
		say(what, n);
		return;
	}
	for (long i = 0; i < n; i++)
		sum = sum * 31 + p[i];
	printf("  %s: %ld bytes %02x..%02x sum %08x\n", what, n, n ? p[0] : 0, n ? p[n - 1] : 0, sum);
}

void say_text(const char *what, const char *text)
{
	printf("  %s: %s\n", what, text);
}

void say_cancelled(pthread_t t)
{
	struct timespec until;
	void *result = NULL;

	say("cancel", pthread_cancel(t));
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 3;
	say("join", pthread_timedjoin_np(t, &result, &until));
	say_text("cancelled", result == PTHREAD_CANCELED ? "yes" : "no");
}

struct sockaddr_in peer(int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };

	inet_pton(AF_INET, peer_ip, &a.sin_addr);
	return a;
}

int udp(void)
{
	return socket(AF_INET, SOCK_DGRAM, 0);
}

static int bound_to(const char *ip)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int fd = udp();

	if (ip)
		inet_pton(AF_INET, ip, &a.sin_addr);
	if (bind(fd, (void *)&a, sizeof(a)))
		say("bind", -1);
	return fd;
}

int udp_bound(void)
{
	return bound_to(my_ip);
}

int udp_any(void)
{
	return bound_to(NULL);
}

int udp_connected(int port)
{
	struct sockaddr_in a = peer(port);
	int fd = udp();

	if (connect(fd, (void *)&a, sizeof(a)))
		say("connect", -1);
	return fd;
}

void ask(int fd, int port, const char *text)
{
	struct sockaddr_in a = peer(port);

	if (sendto(fd, text, strlen(text), 0, (void *)&a, sizeof(a)) < 0)
		say("ask", -1);
}

void settle(void)
{
	static int ms;

	if (!ms)
		ms = getenv("CALLS_SETTLE_MS") ? atoi(getenv("CALLS_SETTLE_MS")) : 30;
	usleep((unsigned)ms * 1000);
}

void drain(int fd, const char *what)
{
	char buf[2048];
	long r;

	while ((r = recv(fd, buf, sizeof(buf), MSG_DONTWAIT)) >= 0)
		say_data(what, buf, r);
	say(what, r);
}

int my_port(int fd)
{
	struct sockaddr_in a = { 0 };
	socklen_t l = sizeof(a);

	getsockname(fd, (void *)&a, &l);
	return ntohs(a.sin_port);
}

void now(struct timespec *t)
{
	clock_gettime(CLOCK_MONOTONIC, t);
}

long elapsed_ms(const struct timespec *since)
{
	struct timespec t;

	now(&t);
	return (t.tv_sec - since->tv_sec) * 1000 + (t.tv_nsec - since->tv_nsec) / 1000000;
}

static int wanted(const char *name, int argc, char **argv)
{
	if (argc < 4)
		return 1;
	for (int i = 3; i < argc; i++)
		if (!strcmp(name, argv[i]))
			return 1;
	return 0;
}

/* Whose sockets the shim tells of behind this line, when they are closed (VMA_STATS_FILE). */
static void begin_in_statistics(const char *name)
{
	const char *path = getenv("VMA_STATS_FILE");
	FILE *file = path ? fopen(path, "a") : NULL;

	if (file) {
		fprintf(file, "case %s\n", name);
		fclose(file);
	}
}

static int lowest_fd(void)
{
	int fd = dup(1);

	close(fd);
	return fd;
}

/* The neighbour is known before the first case, whoever resolves it; and the shim has its session and a ring. */
static void warm_up(void)
{
	int fd = udp_connected(7001);

	ask(fd, 7001, "hello");
	settle();
	close(fd);
}

int main(int argc, char **argv)
{
#ifdef TCP_CALLS
	const struct call_case *tables[] = { tcp_data_cases, tcp_wait_cases, tcp_opt_cases, tcp_life_cases };
#else
	const struct call_case *tables[] = { recv_cases, send_cases, mux_cases, opt_cases, life_cases, stamp_cases,
					     odd_cases };
#endif

	if (argc == 2 && !strcmp(argv[1], "--names")) {
		for (unsigned t = 0; t < sizeof(tables) / sizeof(tables[0]); t++)
			for (const struct call_case *c = tables[t]; c->name; c++)
				puts(c->name);
		return 0;
	}
	if (argc == 3 && !strcmp(argv[1], "--drain")) { /* what an exec left */
		drain(atoi(argv[2]), "by the new image");
		return 0;
	}
	if (argc < 3)
		return 2;
	peer_ip = argv[1];
	my_ip = argv[2];
	setvbuf(stdout, NULL, _IOLBF, 0);
	if (!getenv("CALLS_COLD"))
		warm_up();
	for (unsigned t = 0; t < sizeof(tables) / sizeof(tables[0]); t++) {
		for (const struct call_case *c = tables[t]; c->name; c++) {
			if (!wanted(c->name, argc, argv))
				continue;
			begin_in_statistics(c->name);
			int before = lowest_fd();

			alarm(8); /* a case that hangs names itself by being the last line */
			printf("%s\n", c->name);
#ifdef TCP_CALLS
			tcp_begin();
#endif
			errno = 0;
			c->run(c->arg);
#ifdef TCP_CALLS
			tcp_end();
#endif
			alarm(0);
			if (lowest_fd() != before)
				say_text("leaks", "a descriptor");
		}
	}
	return 0;
}
