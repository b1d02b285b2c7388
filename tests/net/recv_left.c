/* A call that waits, and is left: by siglongjmp() of a signal handler, or as its thread is cancelled. Then what it waits for
 * is closed, by the same thread or by another: a connection, also one that a dup() has moved to the kernel before, or a
 * listener, whose port is bound again. */
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
static struct sockaddr_in name = {.sin_family = AF_INET};
static int fd, listens, moves;

static void leave(int sig)
{
	siglongjmp(before, sig);
}

static void *wait_in(void *arg)
{
	char byte;

	if (listens)
		accept(fd, NULL, NULL);
	else
		recv(fd, &byte, 1, 0);
	return arg;
}

static void *end_it(void *arg)
{
	int another = moves ? dup(fd) : -1;

	return close(fd) || (moves && close(another)) ? arg : PTHREAD_CANCELED;
}

/* PTHREAD_CANCELED, as intended */
static void *in_thread(void *(*does)(void *), int cancelled)
{
	pthread_t thread;
	void *end = NULL;

	pthread_create(&thread, NULL, does, NULL);
	usleep(cancelled ? 200000 : 0);
	if (cancelled)
		pthread_cancel(thread);
	pthread_join(thread, &end);
	return end;
}

static void *jump_out(void)
{
	signal(SIGALRM, leave);
	if (sigsetjmp(before, 1))
		return PTHREAD_CANCELED;
	ualarm(200000, 0);
	return wait_in(NULL);
}

static int opened(const char *address, unsigned short port)
{
	char byte = 'x';

	fd = socket(AF_INET, SOCK_STREAM, 0);
	name.sin_port = htons(port);
	if (inet_pton(AF_INET, address, &name.sin_addr) != 1)
		return 0;
	if (listens)
		return !bind(fd, (struct sockaddr *)&name, sizeof(name)) && !listen(fd, 4);
	return !connect(fd, (struct sockaddr *)&name, sizeof(name)) && send(fd, &byte, 1, 0) == 1 &&
	       recv(fd, &byte, 1, 0) == 1;
}

/* recv_left jump|cancel same|other connects|moves|listens ADDRESS PORT */
int main(int argc, char **argv)
{
	if (argc != 6)
		return 2;
	listens = !strcmp(argv[3], "listens");
	moves = !strcmp(argv[3], "moves");
	if (!opened(argv[4], (unsigned short)atoi(argv[5])))
		return 1;
	puts("open");
	fflush(stdout);
	if ((strcmp(argv[1], "jump") ? in_thread(wait_in, 1) : jump_out()) != PTHREAD_CANCELED)
		return 1;
	if ((strcmp(argv[2], "same") ? in_thread(end_it, 0) : end_it(NULL)) != PTHREAD_CANCELED)
		return 1;
	if (listens && !opened(argv[4], (unsigned short)atoi(argv[5])))
		return 1;
	puts("closed");
	fflush(stdout);
	sleep(10);
	return 0;
}
