/* A thread whose first wait begins after the vfork: what it is woken by is not in the table of the child, which brings the
 * connection home. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static int conn;

static void *waits(void *arg)
{
	struct pollfd p = { .fd = conn, .events = POLLIN };
	struct timespec from, to;

	usleep(200000);
	clock_gettime(CLOCK_MONOTONIC, &from);
	poll(&p, 1, 6000);
	clock_gettime(CLOCK_MONOTONIC, &to);
	printf("%s after %.1f\n", p.revents & POLLIN ? "readable" : "nothing",
	       (double)(to.tv_sec - from.tv_sec) + (double)(to.tv_nsec - from.tv_nsec) / 1e9);
	return arg;
}

int main(int argc, char **argv)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	pthread_t thread;
	pid_t child;

	(void)argc;
	inet_pton(AF_INET, argv[1], &to.sin_addr);
	to.sin_port = htons((uint16_t)atoi(argv[2]));
	conn = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (connect(conn, (struct sockaddr *)&to, sizeof(to)))
		return 1;
	pthread_create(&thread, NULL, waits, NULL);
	child = vfork();
	if (!child) {
		nanosleep(&(struct timespec){ 0, 400000000 }, NULL);
		dup2(conn, 0);
		execl("/bin/true", "true", (char *)NULL);
		_exit(1);
	}
	waitpid(child, NULL, 0);
	puts("child");
	fflush(stdout);
	pthread_join(thread, NULL);
	return 0;
}
