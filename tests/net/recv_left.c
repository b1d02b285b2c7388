/* A receive call that waits, and is left: by siglongjmp() of a signal handler, or as its thread is cancelled. Then the
 * connection is closed. */
#include <arpa/inet.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static sigjmp_buf before;
static int fd;

static void leave(int sig)
{
	siglongjmp(before, sig);
}

static void *receive(void *arg)
{
	char byte;

	recv(fd, &byte, 1, 0);
	return arg;
}

int main(int argc, char **argv)
{
	struct sockaddr_in to = {.sin_family = AF_INET};
	char byte = 'x';
	void *end = NULL;
	pthread_t thread;

	if (argc != 4 || inet_pton(AF_INET, argv[2], &to.sin_addr) != 1)
		return 2;
	to.sin_port = htons((unsigned short)atoi(argv[3]));
	fd = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)) || send(fd, &byte, 1, 0) != 1 || recv(fd, &byte, 1, 0) != 1)
		return 1;
	if (strcmp(argv[1], "jump")) {
		pthread_create(&thread, NULL, receive, NULL);
		usleep(200000);
		pthread_cancel(thread);
		pthread_join(thread, &end);
	} else {
		signal(SIGALRM, leave);
		if (!sigsetjmp(before, 1)) {
			ualarm(200000, 0);
			receive(NULL);
		} else {
			end = PTHREAD_CANCELED;
		}
	}
	if (end != PTHREAD_CANCELED || close(fd))
		return 1;
	puts("closed");
	fflush(stdout);
	sleep(10);
	return 0;
}
