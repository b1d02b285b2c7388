/* What interposing costs a program that is not offloaded: send and recv pairs between two UDP sockets over loopback.
 *
 *   loop_pairs COUNT      prints {"pairs":N,"cpu_ns":C,"wall_ns":W}, per pair
 */
#define _GNU_SOURCE
#include "bench.h"
#include <arpa/inet.h>
#include <sys/socket.h>

static int bound_socket(struct sockaddr_in *address)
{
	socklen_t len = sizeof(*address);
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	*address = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	if (fd < 0 || bind(fd, (struct sockaddr *)address, len) || getsockname(fd, (struct sockaddr *)address, &len))
		die("bind to loopback");
	return fd;
}

int main(int argc, char **argv)
{
	struct sockaddr_in from, to;
	char buffer[64] = {0};
	long count = argc == 2 ? atol(argv[1]) : 0;
	double cpu, wall;
	int sender, receiver;

	if (count < 1) {
		fprintf(stderr, "usage: loop_pairs COUNT\n");
		return 2;
	}
	sender = bound_socket(&from);
	receiver = bound_socket(&to);
	if (connect(sender, (struct sockaddr *)&to, sizeof(to)))
		die("connect");
	cpu = clock_ns(CLOCK_PROCESS_CPUTIME_ID);
	wall = clock_ns(CLOCK_MONOTONIC);
	for (long i = 0; i < count; i++) {
		if (send(sender, buffer, sizeof(buffer), 0) != (ssize_t)sizeof(buffer))
			die("send");
		if (recv(receiver, buffer, sizeof(buffer), 0) != (ssize_t)sizeof(buffer))
			die("recv");
	}
	printf("{\"pairs\":%ld,\"cpu_ns\":%.2f,\"wall_ns\":%.2f}\n", count,
	       (clock_ns(CLOCK_PROCESS_CPUTIME_ID) - cpu) / (double)count, (clock_ns(CLOCK_MONOTONIC) - wall) / (double)count);
	return 0;
}
