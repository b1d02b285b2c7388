/* A program of test_nowait_calls.py: what calls on a connection that does not wait say, and how a thread is cancelled in
 * them. */
#define _GNU_SOURCE
#include "tcp_pair.h"
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>

enum { RECV, READ, READV, RECVFROM, RECVMSG, SEND, WRITE, WRITEV, SENDTO, SENDMSG, CALLS };

static const char *const names[] = { "recv", "read", "readv", "recvfrom", "recvmsg",
				     "send", "write", "writev", "sendto", "sendmsg" };
static int fd, peer;

static ssize_t call(int which, size_t len)
{
	static char buf[64];
	struct iovec v = { buf, len };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };

	switch (which) {
	case RECV: return recv(fd, buf, len, 0);
	case READ: return read(fd, buf, len);
	case READV: return readv(fd, &v, 1);
	case RECVFROM: return recvfrom(fd, buf, len, 0, NULL, NULL);
	case RECVMSG: return recvmsg(fd, &m, 0);
	case SEND: return send(fd, buf, len, 0);
	case WRITE: return write(fd, buf, len);
	case WRITEV: return writev(fd, &v, 1);
	case SENDTO: return sendto(fd, buf, len, 0, NULL, 0);
	default: return sendmsg(fd, &m, 0);
	}
}

static void say(const char *what, int which)
{
	ssize_t r;

	errno = 0;
	r = call(which, 3);
	printf("%s %s %zd %s\n", what, names[which], r, strerrorname_np(errno));
}

/* arg: which, and 16 to enable cancellation only once it is asked for */
static void *cancelled(void *arg)
{
	int how = (int)(long)arg;

	if (how & 16) {
		pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
		usleep(5000);
		pthread_setcancelstate(PTHREAD_CANCEL_ENABLE, NULL);
	}
	call(how & 15, 3);
	return NULL;
}

static void cancel(const char *what, int how)
{
	struct timespec until;
	void *result = NULL;
	pthread_t t;
	int r;

	pthread_create(&t, NULL, cancelled, (void *)(long)how);
	if (!(how & 16))
		usleep(5000);
	pthread_cancel(t);
	clock_gettime(CLOCK_REALTIME, &until);
	until.tv_sec += 3;
	r = pthread_timedjoin_np(t, &result, &until);
	printf("%s %s %s\n", what, names[how & 15], r ? "goes on" : result == PTHREAD_CANCELED ? "cancelled" : "returned");
}

static void *looks(void *arg)
{
	for (;;)
		call(READ, 1);
	return arg;
}

/* While a thread looks, another one says that its calls are to wait: it can be cancelled all the same. */
static int stuck(int by_child)
{
	int n = 0;

	for (int i = 0; i < 300 && !n; i++) {
		struct timespec until;
		pthread_t t;

		tcp_pair(&peer, &fd, SOCK_NONBLOCK);
		call(READ, 1);
		call(READ, 1);
		pthread_create(&t, NULL, looks, NULL);
		usleep((useconds_t)(i % 7) * 10);
		if (!by_child) {
			fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
		} else if (!fork()) {
			fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
			_exit(0);
		} else {
			i += 20;
			wait(NULL);
		}
		pthread_cancel(t);
		clock_gettime(CLOCK_REALTIME, &until);
		until.tv_sec += 3;
		n = pthread_timedjoin_np(t, NULL, &until) != 0;
		close(peer);
		close(fd);
	}
	return n;
}

int main(void)
{
	setvbuf(stdout, NULL, _IOLBF, 0);
	printf("stuck %d, by a child %d\n", stuck(0), stuck(1));
	for (int way = 0; way < 3; way++) {
		tcp_pair(&peer, &fd, way == 0 ? SOCK_NONBLOCK : 0);
		if (way == 1)
			fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
		else if (way == 2)
			ioctl(fd, FIONBIO, &(int){ 1 });
		for (int which = 0; which < CALLS; which++) {
			say("first", which);
			say("second", which);
			cancel("asked before", which | 16);
		}
		send(peer, "abcdef", 6, 0);
		usleep(1000);
		say("data", RECV), say("data", READ), say("none", READ);
		if (way == 1)
			fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
		else
			ioctl(fd, FIONBIO, &(int){ 0 });
		for (int which = RECV; which <= RECVMSG; which++)
			cancel("waits", which);
		close(peer);
		usleep(1000);
		say("end", RECV), say("end", READ);
		close(fd);
	}
	return 0;
}
