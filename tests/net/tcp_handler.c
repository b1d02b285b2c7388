/* tcp_handler close|send ADDRESS PORT: some connections to an echo server. At SIGUSR1 an alarm begins to close them or to
 * send on them, one each time, while the program does nothing but malloc() and free(). Says "old" and "went on". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

#define CONNECTIONS 24
#define BLOCKS 64
#define OLD_US 2500000 /* ss shows them from 2 s on: more to do at their end */
#define EVERY_US 7000

static int fds[CONNECTIONS];
static char text[20000]; /* as much memory as no connection has left of an earlier time */
static volatile sig_atomic_t turns, failed;
static int closes;

static void on_alarm(int sig)
{
	int fd = fds[turns];

	(void)sig;
	if (turns == CONNECTIONS)
		return;
	if (closes ? close(fd) : send(fd, text, sizeof(text), MSG_DONTWAIT) <= 0)
		failed++;
	turns++;
}

static int connected(const char *address, const char *port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	char c;

	inet_pton(AF_INET, address, &a.sin_addr);
	if (connect(fd, (struct sockaddr *)&a, sizeof(a)) || send(fd, "x", 1, 0) != 1 || recv(fd, &c, 1, 0) != 1)
		return -1;
	return fd;
}

int main(int argc, char **argv)
{
	struct itimerval every = { { 0, EVERY_US }, { 0, EVERY_US } };
	void *blocks[BLOCKS] = { 0 };
	unsigned r = 1;
	sigset_t go;
	int sig;

	if (argc != 4)
		return 2;
	closes = !strcmp(argv[1], "close");
	sigemptyset(&go);
	sigaddset(&go, SIGUSR1);
	sigprocmask(SIG_BLOCK, &go, NULL);
	for (int i = 0; i < CONNECTIONS; i++)
		if ((fds[i] = connected(argv[2], argv[3])) < 0) {
			perror("connect");
			return 1;
		}
	usleep(OLD_US);
	printf("old\n");
	fflush(stdout);
	sigwait(&go, &sig);
	signal(SIGALRM, on_alarm);
	setitimer(ITIMER_REAL, &every, NULL);
	while (turns < CONNECTIONS) {
		unsigned i = (r = r * 1103515245 + 12345) >> 16 & (BLOCKS - 1);

		free(blocks[i]);
		blocks[i] = malloc(1500 + (r >> 8) % 60000); /* none of a thread's own cache: the arena, with its lock */
	}
	printf("went on, %d failed\n", (int)failed);
	fflush(stdout);
	_exit(0);
}
