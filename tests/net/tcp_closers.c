/* What others do to a call that waits: two threads lay over its connection at once ("two"), or one looks at the array of a
 * poll() ("array"), which a handler leaves by siglongjmp() ("jump"). */
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#define MANY 50
#define ROUNDS 40

static sigjmp_buf before;
static struct sockaddr_in name = {.sin_family = AF_INET};
static pthread_barrier_t both;
static struct pollfd set[MANY];
static int fd, nothing[2];

static int connected(void)
{
	int made = socket(AF_INET, SOCK_STREAM, 0);

	if (connect(made, (struct sockaddr *)&name, sizeof(name)) || write(made, "x", 1) != 1)
		abort();
	return made;
}

static void *receive(void *arg)
{
	char byte;

	while (recv(fd, &byte, 1, 0) == 1 && byte != 'y')
		;
	return arg;
}

static void *lay_over(void *arg)
{
	pthread_barrier_wait(&both);
	dup2(nothing[0], fd);
	return arg;
}

static void two(void)
{
	pthread_t reader, first, second;

	pthread_barrier_init(&both, NULL, 2);
	for (int i = 0; i < ROUNDS; i++) {
		fd = connected();
		pthread_create(&reader, NULL, receive, NULL);
		usleep(5000);
		pthread_create(&first, NULL, lay_over, NULL);
		pthread_create(&second, NULL, lay_over, NULL);
		pthread_join(first, NULL);
		pthread_join(second, NULL);
		close(fd);
		pthread_join(reader, NULL);
	}
}

static void leave(int sig)
{
	siglongjmp(before, sig);
}

static void *look(void *waits)
{
	int seen = 0;

	usleep(100000);
	for (int i = 0; i < MANY; i++)
		seen += set[i].fd >= 0;
	printf("%d seen\n", seen);
	pthread_kill(*(pthread_t *)waits, SIGUSR1);
	return waits;
}

static void array(void)
{
	pthread_t self = pthread_self(), other;

	for (int i = 0; i < MANY; i++)
		set[i] = (struct pollfd){connected(), POLLPRI, 0};
	if (!sigsetjmp(before, 1)) {
		pthread_create(&other, NULL, look, &self);
		poll(set, MANY, 5000);
		abort();
	}
	pthread_join(other, NULL);
	set[MANY / 2].events = POLLOUT;
	printf("%d ready\n", poll(set, MANY, 3000));
}

int main(int argc, char **argv)
{
	if (argc != 4 || pipe(nothing) || signal(SIGUSR1, leave) == SIG_ERR)
		return 1;
	inet_pton(AF_INET, argv[2], &name.sin_addr);
	name.sin_port = htons((unsigned short)atoi(argv[3]));
	if (!strcmp(argv[1], "two"))
		two();
	else
		array();
	puts("done");
	fflush(stdout);
	sleep(10); /* what has leaked is open until then */
	return 0;
}
