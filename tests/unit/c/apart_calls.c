/* A program of test_nowait_calls.py: a thread with descriptors of its own, whose numbers are those of connections that
 * another thread has made since, and a connection that both have. */
#define _GNU_SOURCE
#include "tcp_pair.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <sys/epoll.h>

static int both[2], mine[2];
static pthread_barrier_t turn;
static char buf[64];

static void say(const char *what, long r)
{
	printf("%s %ld %d\n", what, r, r < 0 ? errno : 0);
}

static void *own(void *arg)
{
	struct epoll_event ev = { .events = EPOLLIN };
	int q[2], p[2], set;

	say("unshare", unshare(CLONE_FILES));
	pthread_barrier_wait(&turn);
	pthread_barrier_wait(&turn); /* the other one has a pair, and its numbers */
	pipe(q);
	for (int i = 0; i < 2; i++)
		p[i] = fcntl(q[i], F_DUPFD, 100);
	for (int i = 0; i < 2; i++)
		close(q[i]);
	for (int i = 0; i < 2; i++)
		p[i] = fcntl(p[i], F_DUPFD, mine[i]);
	printf("same numbers %d\n", p[0] == mine[0] && p[1] == mine[1]);
	set = epoll_create1(0);
	say("add", epoll_ctl(set, EPOLL_CTL_ADD, p[0], &ev));
	say("write", write(p[1], "abc", 3));
	say("poll", poll(&(struct pollfd){ p[0], POLLIN, 0 }, 1, 500));
	say("epoll", epoll_wait(set, &ev, 1, 500));
	say("read", read(p[0], buf, 9));
	say("of both", recv(both[1], buf, 9, 0));
	say("to both", send(both[1], "four", 4, 0));
	return arg;
}

int main(void)
{
	pthread_t t;

	tcp_pair(&both[0], &both[1], 0);
	pthread_barrier_init(&turn, NULL, 2);
	pthread_create(&t, NULL, own, NULL);
	pthread_barrier_wait(&turn);
	tcp_pair(&mine[0], &mine[1], 0);
	for (int i = 0; i < 100; i++)
		send(mine[1], "x", 1, 0), recv(mine[0], buf, 9, 0);
	send(both[0], "seven77", 7, 0);
	pthread_barrier_wait(&turn);
	pthread_join(t, NULL);
	say("four", recv(both[0], buf, 9, 0));
	say("mine", send(mine[1], "xy", 2, 0));
	say("mine", recv(mine[0], buf, 9, 0));
	return 0;
}
