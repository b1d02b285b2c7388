/* A program that must get on whatever the service does: sockets that are opened, bound or connected, asked an echo and
 * closed, for some seconds. usage: through MY_IP PEER_IP PORT SECONDS
 *
 * Every call is timed; what is longer than 50 ms counts as blocked, less the time in which it waited for a processor. A
 * lost answer ends the wait after 1 s and does not count.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static unsigned long rounds, asked, answered, wrong;
static double blocked, longest;
static const char *longest_call = "none";

static double now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

/* Second field of /proc/PID/schedstat: ns on the run queue. On a busy machine that is nobody's fault. */
static double queued(void)
{
	static int fd = -1;
	static pid_t of;
	unsigned long long run, wait = 0;
	char text[128];
	ssize_t n;

	if (fd < 0 || of != getpid())
		fd = open("/proc/self/schedstat", O_RDONLY | O_CLOEXEC);
	of = getpid();
	n = pread(fd, text, sizeof(text) - 1, 0);
	text[n > 0 ? n : 0] = 0;
	return sscanf(text, "%llu %llu", &run, &wait) == 2 ? (double)wait / 1e9 : 0;
}

static void took(const char *call, double since, double waited)
{
	double d = now() - since - (queued() - waited);

	if (d > 0.05)
		blocked += d;
	if (d > longest) {
		longest = d;
		longest_call = call;
	}
}

#define TIMED(call, ...) \
	({ \
		double waited_ = queued(), since_ = now(); \
		__typeof__(call(__VA_ARGS__)) r_ = call(__VA_ARGS__); \
		took(#call, since_, waited_); \
		r_; \
	})

static void ask(int fd, const struct sockaddr_in *to, unsigned long n)
{
	char buf[256], want[256];
	int len = snprintf(want, sizeof(want), "question %lu", n);
	struct pollfd p = { .fd = fd, .events = POLLIN };

	asked++;
	TIMED(sendto, fd, want, (size_t)len, 0, (const struct sockaddr *)to, to ? (socklen_t)sizeof(*to) : 0);
	for (;;) {
		if (poll(&p, 1, 1000) <= 0) /* it may wait that long */
			return;
		ssize_t r = TIMED(recv, fd, buf, sizeof(buf), MSG_DONTWAIT);
		if (r == len && !memcmp(buf, want, (size_t)len)) {
			answered++;
			return;
		}
		if (r >= 0 && strncmp(buf, "question ", 9))
			wrong++;
	}
}

static void one_round(const char *mine, const struct sockaddr_in *peer)
{
	struct sockaddr_in me = { .sin_family = AF_INET };
	int fd = TIMED(socket, AF_INET, SOCK_DGRAM, 0);
	int connected = rounds % 3 == 0;

	inet_pton(AF_INET, mine, &me.sin_addr);
	if (rounds % 3 != 1)
		TIMED(bind, fd, (struct sockaddr *)&me, sizeof(me));
	if (connected)
		TIMED(connect, fd, (const struct sockaddr *)peer, sizeof(*peer));
	for (unsigned long i = 0; i < 5; i++)
		ask(fd, connected ? NULL : peer, rounds * 5 + i);
	if (rounds % 16 == 15) {
		pid_t pid = TIMED(fork);

		if (pid == 0)
			_exit(0);
		waitpid(pid, NULL, 0);
	}
	TIMED(close, fd);
	rounds++;
}

int main(int argc, char **argv)
{
	struct sockaddr_in peer = { .sin_family = AF_INET };
	double end;

	if (argc != 5)
		return 2;
	inet_pton(AF_INET, argv[2], &peer.sin_addr);
	peer.sin_port = htons((unsigned short)atoi(argv[3]));
	end = now() + atof(argv[4]);
	while (now() < end) {
		one_round(argv[1], &peer);
		usleep(2000);
	}
	printf("rounds %lu asked %lu answered %lu wrong %lu blocked_ms %.0f longest_ms %.0f in %s\n", rounds, asked, answered,
	       wrong, blocked * 1e3, longest * 1e3, longest_call);
	return 0;
}
