/* ADDRESS PORT THREADS: threads that each ask over an own UDP socket, one question after the other, without a pause. A line
 * on stdin: "fork" makes a child, which ends at once; "end" ends it. Says "ready", a line of each fork, and at the end:
 * rounds, answers that never came (those that were waited for for a second). */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : (fprintf(stderr, "%d: %s: %s\n", __LINE__, #x, strerror(errno)), _exit(3)))
#define MAX 16

static struct sockaddr_in peer = { .sin_family = AF_INET };
static _Atomic long rounds, lost;
static _Atomic int at_work;
static _Atomic bool over;

static void *ask(void *arg)
{
	const struct timeval second = { 1, 0 };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	unsigned asked = 0, answer;

	CHECK(fd >= 0 && connect(fd, (struct sockaddr *)&peer, sizeof(peer)) == 0);
	CHECK(setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second)) == 0);
	while (!atomic_load(&over)) {
		if (++asked == 100)
			atomic_fetch_add(&at_work, 1);
		CHECK(send(fd, &asked, sizeof(asked), 0) == sizeof(asked));
		do {
			if (recv(fd, &answer, sizeof(answer), 0) == sizeof(answer))
				continue;
			CHECK(errno == EAGAIN);
			atomic_fetch_add(&lost, 1);
			break;
		} while (answer != asked);
		atomic_fetch_add(&rounds, 1);
	}
	close(fd);
	return arg;
}

int main(int argc, char **argv)
{
	int threads = argc == 4 ? atoi(argv[3]) : 0;
	pthread_t all[MAX];
	char line[16];

	CHECK(threads > 0 && threads <= MAX && inet_pton(AF_INET, argv[1], &peer.sin_addr) == 1);
	peer.sin_port = htons((in_port_t)atoi(argv[2]));
	for (int i = 0; i < threads; i++)
		CHECK(pthread_create(&all[i], NULL, ask, NULL) == 0);
	while (atomic_load(&at_work) < threads)
		usleep(1000);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin) && !strcmp(line, "fork\n")) {
		pid_t child = fork();

		if (!child)
			_exit(0);
		CHECK(child > 0 && waitpid(child, NULL, 0) == child);
		printf("forked\n");
		fflush(stdout);
	}
	atomic_store(&over, true);
	for (int i = 0; i < threads; i++)
		pthread_join(all[i], NULL);
	printf("%ld %ld\n", atomic_load(&rounds), atomic_load(&lost));
	return 0;
}
