/* What libc or the kernel does with a socket by itself (stdio, aio, signals), cancelled threads, bad addresses. */
#include "calls.h"
#include <aio.h>
#include <linux/sockios.h>

static char buf[256];

/* On a ring, with a datagram there that nobody has read, and answers within a second or never. */
static int busy_socket(const char *unread)
{
	int fd = udp_connected(7001);
	struct timeval second = { 1, 0 };

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second));
	for (int i = 0; i < 3; i++) {
		send(fd, "warm", 4, 0);
		say("warm", recv(fd, buf, sizeof(buf), 0));
	}
	if (unread) {
		send(fd, unread, strlen(unread), 0);
		settle();
	}
	return fd;
}

/* --- stdio and what else libc does inside --- */

static void say_line(const char *what, FILE *f)
{
	say_data(what, buf, fgets(buf, sizeof(buf), f) ? (long)strlen(buf) : 0);
}

static void stream(int how)
{
	int fd = busy_socket("unread\n");
	FILE *out = fdopen(dup(fd), "w"), *in = fdopen(how ? dup(fd) : fd, "r");

	say_line("unread", in);
	fputs("a line\n", out);
	fclose(out);
	say_line("answer", in);
	fclose(in);
	if (how) {
		say("send", send(fd, "after", 5, 0));
		say_data("recv", buf, recv(fd, buf, sizeof(buf), 0));
		close(fd);
	}
}

static void standard_input(int arg)
{
	int fd = busy_socket(NULL), saved = dup(0);

	if (arg) {
		close(0);
		fcntl(fd, F_DUPFD, 0);
	} else {
		dup2(fd, 0);
	}
	send(fd, "to stdin\n", 9, 0);
	say_line("fgets", stdin);
	dup2(saved, 0);
	clearerr(stdin);
	close(saved);
	close(fd);
}

static void reopened(int arg)
{
	int fd = busy_socket(NULL), fresh;
	FILE *f = freopen("/dev/null", "r+", fdopen(fd, "r+"));

	(void)arg;
	say("read", read(fileno(f), buf, sizeof(buf)));
	fresh = udp_connected(7001);
	say("fresh", send(fresh, "x", 1, 0));
	say("its answer", recv(fresh, buf, sizeof(buf), 0));
	close(fresh);
	fclose(f);
}

static void printed(int arg)
{
	int fd = busy_socket("unread");

	(void)arg;
	say("dprintf", dprintf(fd, "line %d", 3));
	say_data("first", buf, recv(fd, buf, sizeof(buf), 0));
	say_data("second", buf, recv(fd, buf, sizeof(buf), 0));
	close(fd);
}

static void at_position(int arg)
{
	struct iovec v[2] = { { buf, 3 }, { buf + 3, sizeof(buf) - 3 } }, out = { "written", 7 };
	int fd = busy_socket("unread");

	(void)arg;
	say("pwritev2", pwritev2(fd, &out, 1, -1, 0));
	say("unread", preadv2(fd, v, 2, -1, 0));
	say_data("preadv2", buf, preadv2(fd, v, 2, -1, 0));
	say("at 5", preadv2(fd, v, 2, 5, 0));
	say("bad flags", preadv2(fd, v, 2, -1, 1 << 30));
	say("pread", pread(fd, buf, 5, 0));
	say("preadv", preadv(fd, v, 2, 0));
	say("pwrite", pwrite(fd, buf, 5, 0));
	close(fd);
}

static void asynchronous(int list)
{
	struct aiocb w = { .aio_buf = "by aio", .aio_nbytes = 6, .aio_lio_opcode = LIO_WRITE };
	struct aiocb r = { .aio_buf = buf, .aio_nbytes = sizeof(buf), .aio_lio_opcode = LIO_READ };
	struct aiocb *both[2] = { &w, &r };
	const struct aiocb *one[1] = { &r };

	w.aio_fildes = r.aio_fildes = busy_socket(NULL);
	if (list) {
		say("lio_listio", lio_listio(LIO_WAIT, both, 2, NULL));
	} else {
		say("aio_write", aio_write(&w));
		say("aio_read", aio_read(&r));
		while (aio_error(&r) == EINPROGRESS)
			aio_suspend(one, 1, NULL);
	}
	say("written", aio_return(&w));
	say_data("read", buf, aio_return(&r));
	close(w.aio_fildes);
}

/* --- signals of arrival, stamps --- */

static volatile sig_atomic_t arrivals;

static void on_io(int sig)
{
	(void)sig;
	arrivals++;
}

static void signalled(int how)
{
	int fd = busy_socket(NULL), on = 1;

	arrivals = 0;
	signal(how == 2 ? SIGUSR1 : SIGIO, on_io);
	say("F_SETOWN", fcntl(fd, F_SETOWN, getpid()));
	if (how == 2)
		say("F_SETSIG", fcntl(fd, F_SETSIG, SIGUSR1));
	if (how == 1)
		say("FIOASYNC", ioctl(fd, FIOASYNC, &on));
	else
		say("O_ASYNC", fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_ASYNC));
	send(fd, "ring", 4, 0);
	settle();
	settle();
	say_text("signal", arrivals ? "yes" : "no");
	say("recv", recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
}

static void stamp(int nanoseconds)
{
	unsigned long request = nanoseconds ? SIOCGSTAMPNS : SIOCGSTAMP;
	struct timespec t = { 0 };
	int fd = udp_connected(7001);

	say("before all", ioctl(fd, request, &t));
	close(fd);
	fd = busy_socket(NULL);
	say("ioctl", ioctl(fd, request, &t));
	say_text("recent", labs(t.tv_sec - time(NULL)) < 5 ? "yes" : "no");
	send(fd, "x", 1, 0);
	say("recv", recv(fd, buf, sizeof(buf), 0));
	say("next", ioctl(fd, request, &t));
	say_text("recent", labs(t.tv_sec - time(NULL)) < 5 ? "yes" : "no");
	say_text("fraction", t.tv_nsec < (nanoseconds ? 1000000000 : 1000000) ? "good" : "bad");
	say("bad address", ioctl(fd, request, (void *)8));
	close(fd);
}

/* --- cancelled threads --- */

static int cancel_fd, cancel_set;

static void *waits(void *arg)
{
	struct iovec v = { buf, sizeof(buf) };
	struct mmsghdr m[2] = { { .msg_hdr = { .msg_iov = &v, .msg_iovlen = 1 } } };
	struct pollfd p = { cancel_fd, POLLIN, 0 };
	struct epoll_event ev;

	m[1] = m[0];
	switch ((long)arg) {
	case 0: recv(cancel_fd, buf, sizeof(buf), 0); break;
	case 1: recvmmsg(cancel_fd, m, 2, 0, NULL); break;
	case 2: poll(&p, 1, -1); break;
	case 3: epoll_wait(cancel_set, &ev, 1, -1); break;
	case 4:
		for (;;)
			send(cancel_fd, "on and on", 9, 0);
	case 5:
		for (;;)
			recv(cancel_fd, buf, sizeof(buf), MSG_DONTWAIT);
	}
	return NULL;
}

static void cancelled(int how)
{
	struct epoll_event ev = { .events = EPOLLIN };
	pthread_t t;

	cancel_fd = busy_socket(NULL);
	setsockopt(cancel_fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){ 0 }, sizeof(struct timeval));
	cancel_set = epoll_create1(0);
	epoll_ctl(cancel_set, EPOLL_CTL_ADD, cancel_fd, &ev);
	pthread_create(&t, NULL, waits, (void *)(long)how);
	settle();
	say_cancelled(t);
	if (how != 4) {
		send(cancel_fd, "goes on", 7, 0);
		settle();
		say("ready", epoll_wait(cancel_set, &ev, 1, 1000));
		say_data("recv", buf, recv(cancel_fd, buf, sizeof(buf), 0));
	}
	close(cancel_set);
	close(cancel_fd);
}

/* --- addresses that nobody has: 8, and beyond user space --- */

static void *volatile bad[2] = { (void *)8, (void *)-8 };

static void bad_receive(int which)
{
	struct iovec v[2] = { { buf, 4 }, { bad[which], 4 } };
	struct msghdr m = { .msg_iov = v, .msg_iovlen = 2 };
	struct mmsghdr mm = { .msg_hdr = m };
	int fd = busy_socket("first");
	socklen_t len = 16;

	say("read", read(fd, bad[which], 4));
	drain(fd, "after read");
	ask(fd, 7001, "2nd"), ask(fd, 7001, "third");
	settle();
	say("short enough", readv(fd, v, 2));
	say("too long", readv(fd, v, 2));
	drain(fd, "after readv");
	ask(fd, 7001, "4"), ask(fd, 7001, "5"), ask(fd, 7001, "6");
	settle();
	say("address", recvfrom(fd, buf, 9, 0, bad[which], &len));
	say("its length", recvfrom(fd, buf, 9, 0, (void *)buf, bad[which]));
	say("no length", recvfrom(fd, buf, 9, MSG_DONTWAIT, (void *)buf, NULL));
	drain(fd, "after recvfrom");
	ask(fd, 7001, "7");
	settle();
	say("recvmsg", recvmsg(fd, bad[which], 0));
	m.msg_iov = bad[which];
	say("vector", recvmsg(fd, &m, 0));
	say("readv", readv(fd, bad[which], 1));
	say("recvmmsg", recvmmsg(fd, bad[which], 1, 0, NULL));
	mm.msg_hdr.msg_iovlen = 1;
	say("timeout", recvmmsg(fd, &mm, 1, 0, bad[which]));
	say("FIONREAD", ioctl(fd, FIONREAD, bad[which]));
	drain(fd, "after recvmsg");
	say("empty", recv(fd, bad[which], 0, MSG_DONTWAIT));
	close(fd);
}

static void bad_send(int which)
{
	struct iovec v[2] = { { buf, 4 }, { bad[which], 4 } };
	struct msghdr m = { .msg_iov = bad[which], .msg_iovlen = 1 };
	struct sockaddr_in a = peer(7001);
	int fd = busy_socket(NULL);

	say("send", send(fd, bad[which], 4, 0));
	say("nothing of it", send(fd, bad[which], 0, 0));
	say("writev", writev(fd, v, 2));
	say("vector", writev(fd, bad[which], 2));
	say("address", sendto(fd, buf, 4, 0, bad[which], sizeof(a)));
	say("sendmsg", sendmsg(fd, bad[which], 0));
	say("its vector", sendmsg(fd, &m, 0));
	say("sendmmsg", sendmmsg(fd, bad[which], 1, 0));
	v[1] = (struct iovec){ buf, (size_t)-2 };
	say("too much", writev(fd, v, 2));
	say("connect", connect(fd, bad[which], sizeof(a)));
	settle();
	drain(fd, "what went out");
	close(fd);
}

static void bad_wait(int which)
{
	struct timeval tv = { 0, 1000 };
	struct epoll_event ev = { .events = EPOLLIN };
	int fd = busy_socket("ready"), set = epoll_create1(0);
	struct pollfd p = { fd, POLLIN, 0 };
	fd_set r;

	FD_ZERO(&r);
	FD_SET(fd, &r);
	say("epoll_ctl", epoll_ctl(set, EPOLL_CTL_ADD, fd, bad[which]));
	say("good", epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev));
	say("epoll_wait", epoll_wait(set, bad[which], 1, 100));
	say("mask", epoll_pwait2(set, &ev, 1, bad[which], NULL));
	say("poll", poll(bad[which], 1, 100));
	say("ppoll", ppoll(&p, 1, bad[which], NULL));
	say("select", select(fd + 1, bad[which], NULL, NULL, &tv));
	say("its time", select(fd + 1, &r, NULL, NULL, bad[which]));
	say("epoll_wait", epoll_wait(set, &ev, 1, 100));
	drain(fd, "still there");
	say("nothing ready", epoll_wait(set, bad[which], 1, 10));
	close(set);
	close(fd);
}

const struct call_case odd_cases[] = {
	{ "fdopen", stream, 0 }, { "fdopen of a dup", stream, 1 }, { "dup2 onto stdin", standard_input, 0 },
	{ "F_DUPFD onto stdin", standard_input, 1 },
	{ "freopen", reopened, 0 }, { "dprintf", printed, 0 }, { "preadv2 and pwritev2", at_position, 0 },
	{ "aio", asynchronous, 0 }, { "lio_listio", asynchronous, 1 },
	{ "SIGIO by O_ASYNC", signalled, 0 }, { "SIGIO by FIOASYNC", signalled, 1 }, { "F_SETSIG", signalled, 2 },
	{ "SIOCGSTAMP", stamp, 0 }, { "SIOCGSTAMPNS", stamp, 1 },
	{ "cancel in recv", cancelled, 0 }, { "cancel in recvmmsg", cancelled, 1 }, { "cancel in poll", cancelled, 2 },
	{ "cancel in epoll_wait", cancelled, 3 }, { "cancel while sending", cancelled, 4 },
	{ "cancel while looking", cancelled, 5 },
	{ "bad addresses, receiving", bad_receive, 0 }, { "kernel addresses, receiving", bad_receive, 1 },
	{ "bad addresses, sending", bad_send, 0 }, { "kernel addresses, sending", bad_send, 1 },
	{ "kernel addresses, waiting", bad_wait, 1 },
	{ "bad addresses, waiting", bad_wait, 0 }, /* the last: the C library reads them itself, and there it ends */
	{ NULL },
};
