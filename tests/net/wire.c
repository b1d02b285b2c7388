/* A bad wire between two interfaces of one namespace: it loses, doubles, delays and corrupts TCP frames. Everything else
 * passes. The interfaces have no offloads, so a frame is a segment.
 *
 * usage: wire IF IF SEED LOST DOUBLED LATE CORRUPT CORRUPT LENGTH   in frames of a million; the last two of those: from
 *        the first interface, from the second. LENGTH: us that every frame takes. Prints "ready", and at SIGTERM what
 *        it did. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define FRAME 2048
#define HELD 256
#define LINE 16384 /* frames on the way */
#define LATE_NS 300000 /* a handful of segments */

struct held {
	uint64_t due;
	int to;
	uint32_t corrupt;
	size_t len;
	uint8_t bytes[FRAME];
};

static struct held late[HELD], line[LINE];
static unsigned first, on_line;
static uint32_t rate[5];
static unsigned waiting;
static unsigned long frames, lost, doubled, delayed, corrupted;
static uint64_t state;
static volatile sig_atomic_t ended;

static void end(int sig)
{
	ended = sig;
}

static void die(const char *what)
{
	perror(what);
	exit(1);
}

static uint64_t now(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static uint32_t chance(uint32_t below)
{
	state ^= state << 13;
	state ^= state >> 7;
	state ^= state << 17;
	return (uint32_t)((state >> 16) % below);
}

static int port(const char *name)
{
	struct sockaddr_ll at = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL),
				  .sll_ifindex = (int)if_nametoindex(name) };
	int fd = socket(AF_PACKET, SOCK_RAW | SOCK_NONBLOCK, 0), one = 1, room = 4 << 20;

	if (fd < 0 || setsockopt(fd, SOL_PACKET, PACKET_IGNORE_OUTGOING, &one, sizeof(one)) ||
	    setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)) ||
	    bind(fd, (struct sockaddr *)&at, sizeof(at)))
		die(name);
	return fd;
}

static void put(int to, const uint8_t *bytes, size_t len)
{
	if (send(to, bytes, len, 0) < 0)
		lost++; /* the interface's queue is full */
}

static void hold(int to, const uint8_t *bytes, size_t len)
{
	struct held *h;

	if (waiting == HELD) {
		lost++;
		return;
	}
	h = &late[waiting++];
	h->due = now() + LATE_NS;
	h->to = to;
	h->len = len;
	memcpy(h->bytes, bytes, len);
	delayed++;
}

/* What was held long enough goes, in the order in which it came. */
static void release(void)
{
	unsigned n = 0;

	while (n < waiting && late[n].due <= now()) {
		put(late[n].to, late[n].bytes, late[n].len);
		n++;
	}
	waiting -= n;
	if (n)
		memmove(late, late + n, waiting * sizeof(*late));
}

/* Where the TCP header begins; 0: it is none. */
static ssize_t tcp_at(const uint8_t *bytes)
{
	if (bytes[12] == 0x08 && bytes[13] == 0x00)
		return bytes[23] == IPPROTO_TCP ? 34 : 0;
	if (bytes[12] == 0x86 && bytes[13] == 0xdd)
		return bytes[20] == IPPROTO_TCP ? 54 : 0;
	return 0;
}

static void harm(int to, uint8_t *bytes, ssize_t len, uint32_t corrupt)
{
	ssize_t tcp = tcp_at(bytes);

	if (!tcp || len <= tcp) {
		put(to, bytes, (size_t)len);
		return;
	}
	frames++;
	if (chance(1000000) < rate[0]) {
		lost++;
		return;
	}
	if (chance(1000000) < corrupt) {
		bytes[tcp + chance((uint32_t)(len - tcp))] ^= (uint8_t)(1u << chance(8));
		corrupted++;
	}
	if (chance(1000000) < rate[2]) {
		hold(to, bytes, (size_t)len);
		return;
	}
	put(to, bytes, (size_t)len);
	if (chance(1000000) < rate[1]) {
		put(to, bytes, (size_t)len);
		doubled++;
	}
}

/* The frames of both directions are on one line, as they came. */
static void pass(int from, int to, uint32_t corrupt, uint64_t length)
{
	struct held *h = &line[(first + on_line) % LINE];
	ssize_t len;

	if (on_line == LINE) {
		recv(from, NULL, 0, 0);
		lost++;
		return;
	}
	len = recv(from, h->bytes, sizeof(h->bytes), 0);
	if (len < 0)
		return;
	h->due = now() + length;
	h->to = to;
	h->len = (size_t)len;
	h->corrupt = corrupt;
	on_line++;
}

static void arrive(void)
{
	for (struct held *h; on_line && (h = &line[first])->due <= now(); on_line--, first = (first + 1) % LINE)
		harm(h->to, h->bytes, (ssize_t)h->len, h->corrupt);
}

int main(int argc, char **argv)
{
	struct pollfd p[2];
	uint64_t length;

	if (argc != 10)
		return 2;
	state = strtoull(argv[3], NULL, 0) * 2654435761u + 1;
	for (int i = 0; i < 5; i++)
		rate[i] = (uint32_t)atoi(argv[4 + i]);
	length = strtoull(argv[9], NULL, 0) * 1000;
	for (int i = 0; i < 2; i++)
		p[i] = (struct pollfd){ .fd = port(argv[1 + i]), .events = POLLIN };
	signal(SIGTERM, end);
	puts("ready");
	fflush(stdout);
	while (!ended) {
		struct timespec soon = { 0, 100000 }, later = { 0, 100000000 };

		ppoll(p, 2, waiting || on_line ? &soon : &later, NULL);
		for (int i = 0; i < 2; i++)
			if (p[i].revents)
				pass(p[i].fd, p[!i].fd, rate[3 + i], length);
		arrive();
		release();
	}
	printf("frames %lu lost %lu doubled %lu late %lu corrupted %lu\n", frames, lost, doubled, delayed, corrupted);
	return 0;
}
