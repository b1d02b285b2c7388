/* One-way UDP rate with sendmmsg and recvmmsg, an ordinary program that knows nothing of rings.
 *
 *   udp_mmsg send ADDRESS PORT SECONDS BATCH SIZE    prints {"messages":N,"seconds":S,"rate":R}
 *   udp_mmsg recv ADDRESS PORT                       counts until SIGINT or SIGTERM, prints the same
 *
 * The receiver's clock runs from its first to its last message.
 */
#define _GNU_SOURCE
#include "bench.h"
#include <arpa/inet.h>
#include <stdbool.h>
#include <sys/socket.h>

#define BATCH_MAX 64
#define SIZE_MAX_BYTES 2048

static uint8_t payload[BATCH_MAX][SIZE_MAX_BYTES];
static struct iovec vectors[BATCH_MAX];
static struct mmsghdr messages[BATCH_MAX];

static void prepare(size_t size)
{
	for (int i = 0; i < BATCH_MAX; i++) {
		vectors[i] = (struct iovec){.iov_base = payload[i], .iov_len = size};
		messages[i].msg_hdr = (struct msghdr){.msg_iov = &vectors[i], .msg_iovlen = 1};
	}
}

static void report(uint64_t count, double seconds)
{
	printf("{\"messages\":%llu,\"seconds\":%.6f,\"rate\":%.0f}\n", (unsigned long long)count, seconds,
	       seconds > 0 ? (double)count / seconds : 0.0);
}

static void send_all(int fd, double seconds, unsigned batch)
{
	double start = now(), end = start + seconds;
	uint64_t count = 0;

	while (!stopped && now() < end) {
		int sent = sendmmsg(fd, messages, batch, 0);

		if (sent > 0)
			count += (uint64_t)sent;
		else if (errno != EAGAIN && errno != EINTR && errno != ENOBUFS && errno != ECONNREFUSED)
			die("sendmmsg");
	}
	report(count, now() - start);
}

static void receive_all(int fd)
{
	/* the timeout lets the loop see a signal that came between the check and the call */
	struct timeval timeout = {.tv_usec = 100000};
	double first = 0, last = 0;
	uint64_t count = 0;

	if (setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &timeout, sizeof(timeout)))
		die("SO_RCVTIMEO");
	puts("ready");
	fflush(stdout);
	while (!stopped) {
		int got = recvmmsg(fd, messages, BATCH_MAX, MSG_WAITFORONE, NULL);

		if (got > 0) {
			last = now();
			if (!count)
				first = last;
			count += (uint64_t)got;
		} else if (errno != EAGAIN && errno != EINTR) {
			die("recvmmsg");
		}
	}
	report(count, last - first);
}

int main(int argc, char **argv)
{
	struct sigaction action = {.sa_handler = on_signal};
	struct sockaddr_in address = {.sin_family = AF_INET};
	bool sender = argc == 7 && !strcmp(argv[1], "send");
	unsigned batch = sender ? (unsigned)atoi(argv[5]) : 1;
	size_t size = sender ? (size_t)atoi(argv[6]) : SIZE_MAX_BYTES;
	int fd;

	if (!(sender || (argc == 4 && !strcmp(argv[1], "recv"))) || inet_pton(AF_INET, argv[2], &address.sin_addr) != 1 ||
	    batch < 1 || batch > BATCH_MAX || size > SIZE_MAX_BYTES) {
		fprintf(stderr, "usage: udp_mmsg send ADDRESS PORT SECONDS BATCH SIZE | recv ADDRESS PORT\n");
		return 2;
	}
	address.sin_port = htons((uint16_t)atoi(argv[3]));
	sigaction(SIGINT, &action, NULL);
	sigaction(SIGTERM, &action, NULL);
	prepare(size);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	if (fd < 0)
		die("socket");
	if ((sender ? connect : bind)(fd, (struct sockaddr *)&address, sizeof(address)))
		die(sender ? "connect" : "bind");
	if (sender)
		send_all(fd, atof(argv[4]), batch);
	else
		receive_all(fd);
	return 0;
}
