/* What a process does with its descriptors beside a TCP connection that goes on: child_calls HOW ADDRESS PORT
 *
 * The other end is an echo. Prints "rounds N" at the end, N as many as were answered of 200. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define HANDLED 300

static const char *how;
static struct sockaddr_in peer = { .sin_family = AF_INET };
static int conn;
static char stack[1 << 20];
static _Atomic bool stop;
static volatile sig_atomic_t handled;

static bool is(const char *word)
{
	return !strcmp(how, word);
}

static int new_connection(void)
{
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	struct timeval limit = { .tv_sec = 5 };

	if (connect(fd, (struct sockaddr *)&peer, sizeof(peer)) < 0)
		return -1;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &limit, sizeof(limit));
	return fd;
}

static int rounds(int fd, int n)
{
	char answer[8];
	int good = 0;

	while (good < n && send(fd, "hello", 5, MSG_NOSIGNAL) == 5 && recv(fd, answer, 5, MSG_WAITALL) == 5)
		good++;
	return good;
}

static int cloned(void *arg)
{
	(void)arg;
	if (is("clone-close"))
		close(conn);
	else if (is("clone-closefrom"))
		closefrom(3);
	else
		exit(0);
	_exit(0);
}

static void *leaves(void *arg)
{
	(void)arg;
	if (is("apart-range")) {
		close_range(3, ~0u, CLOSE_RANGE_UNSHARE);
	} else {
		unshare(CLONE_FILES);
		close(conn);
	}
	return NULL;
}

static void forks(int sig)
{
	int pid = fork();

	(void)sig;
	if (!pid)
		_exit(0);
	waitpid(pid, NULL, 0);
	handled++;
}

static void fork_in_handlers(void)
{
	struct itimerval each = { .it_interval.tv_usec = 1000, .it_value.tv_usec = 1000 };

	signal(SIGALRM, forks);
	setitimer(ITIMER_REAL, &each, NULL);
	while (handled < HANDLED)
		free(realloc(malloc(2000), 3000));
	setitimer(ITIMER_REAL, &(struct itimerval){ 0 }, NULL);
}

static void *open_sockets(void *arg)
{
	while (!atomic_load(&stop)) {
		int fd = new_connection();

		rounds(fd, 1);
		close(fd);
	}
	return arg;
}

/* Children that make their first socket while threads of the parent make theirs, the first of all. */
static void fork_at_the_start(void)
{
	pthread_t threads[3];
	int status;

	for (int i = 0; i < 3; i++)
		pthread_create(&threads[i], NULL, open_sockets, NULL);
	for (int i = 0; i < 20; i++) {
		int pid = fork();

		if (!pid) {
			alarm(10);
			_exit(rounds(new_connection(), 1) != 1);
		}
		waitpid(pid, &status, 0);
		if (status)
			printf("child %x ", status);
	}
	atomic_store(&stop, true);
	for (int i = 0; i < 3; i++)
		pthread_join(threads[i], NULL);
}

static void beside(void)
{
	pthread_t thread;

	if (!strncmp(how, "clone", 5)) {
		waitpid(clone(cloned, stack + sizeof(stack), SIGCHLD, NULL), NULL, 0);
	} else if (!strncmp(how, "apart", 5)) {
		pthread_create(&thread, NULL, leaves, NULL);
		pthread_join(thread, NULL);
	} else if (is("refused")) {
		if (!close_range(3, ~0u, 0xf0))
			printf("not refused ");
	} else if (is("handler")) {
		fork_in_handlers();
	}
}

int main(int argc, char **argv)
{
	int good;

	if (argc != 4)
		return 2;
	how = argv[1];
	inet_pton(AF_INET, argv[2], &peer.sin_addr);
	peer.sin_port = htons((in_port_t)atoi(argv[3]));
	if (is("start"))
		fork_at_the_start();
	conn = new_connection();
	good = rounds(conn, 100);
	beside();
	good += rounds(conn, 100);
	printf("rounds %d\n", good);
	return 0;
}
