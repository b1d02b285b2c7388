/* How connections end, and what other threads and processes do to them. */
#include "tcp_calls.h"
#include <spawn.h>
#include <sys/pidfd.h>
#include <sys/un.h>

static void shut(int how)
{
	char c[16];
	int fd = tcp_client();

	tell("send 4");
	settle();
	say("shutdown", shutdown(fd, how));
	say_poll("poll", fd, 0);
	say_data("recv", c, recv(fd, c, 16, MSG_DONTWAIT)), say("recv", recv(fd, c, 16, MSG_DONTWAIT));
	say("send", send(fd, "abc", 3, MSG_NOSIGNAL));
	if (how == SHUT_RD) {
		tell_said("peer", "recv 3");
		tell("send 5");
		settle();
		say_data("after SHUT_RD", c, recv(fd, c, 16, MSG_DONTWAIT)), say("then", recv(fd, c, 16, MSG_DONTWAIT));
	} else {
		tell_said("peer", "read");
		tell("send 5");
		settle();
		if (how == SHUT_WR)
			say_data("after SHUT_WR", c, recv(fd, c, 16, MSG_DONTWAIT));
	}
	say("again", shutdown(fd, how)), say("bad", shutdown(fd, 7));
	close(fd);
}

static void half_closed(int accepted)
{
	char c[64];
	int fd = tcp_pair(accepted);

	tell("send 3");
	tell("shut 1");
	settle();
	say_data("recv", c, recv(fd, c, 64, 0)), say("end", recv(fd, c, 64, 0));
	say("send", send(fd, "one", 3, 0)), say("send", send(fd, "two", 3, 0));
	say("shutdown", shutdown(fd, SHUT_WR));
	tell_said("peer", "read");
	settle();
	say_poll("poll", fd, 0);
	say("shutdown", shutdown(fd, SHUT_RD));
	close(fd);
}

static void closed(int unread)
{
	int fd = tcp_client();

	if (unread) {
		tell("send 5");
		settle();
	} else {
		say("send", send(fd, "bye", 3, 0));
	}
	say("close", close(fd));
	tell_said("peer", "read");
	say("closed", send(fd, "x", 1, 0));
}

static void lingered(int seconds)
{
	struct linger l = { 1, seconds };
	static char big[100000];
	int fd = tcp_client();

	say("SO_LINGER", setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof(l)));
	say("send", send(fd, seconds ? big : "abc", seconds ? sizeof(big) : 3, 0));
	settle();
	say("close", close(fd));
	if (seconds)
		tell_said("peer", "read");
	else
		say_yes("peer was reset", strstr(tell("read"), "ECONNRESET") != NULL);
}

static void sigpipe(int how)
{
	struct timespec none = { 0 };
	sigset_t pipe_, old;
	int fd = tcp_client();
	struct iovec v = { "x", 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };

	sigemptyset(&pipe_), sigaddset(&pipe_, SIGPIPE);
	sigprocmask(SIG_BLOCK, &pipe_, &old);
	tell("reset");
	settle();
	say("the error first", send(fd, "x", 1, 0));
	say("SIGPIPE", sigtimedwait(&pipe_, NULL, &none));
	switch (how) {
	case 0: say("send", send(fd, "x", 1, 0)); break;
	case 1: say("MSG_NOSIGNAL", send(fd, "x", 1, MSG_NOSIGNAL)); break;
	case 2: say("write", write(fd, "x", 1)); break;
	case 3: say("sendmsg", sendmsg(fd, &m, 0)); break;
	case 4: say("writev", writev(fd, &v, 1)); break;
	}
	say("SIGPIPE", sigtimedwait(&pipe_, NULL, &none));
	sigprocmask(SIG_SETMASK, &old, NULL);
	close(fd);
}

static void killed_by_sigpipe(int arg)
{
	int status;

	(void)arg;
	fflush(stdout);
	pid_t pid = fork();
	if (!pid) {
		int fd = tcp_client();
		tell("reset");
		settle();
		send(fd, "x", 1, MSG_NOSIGNAL);
		send(fd, "x", 1, 0);
		_exit(1);
	}
	waitpid(pid, &status, 0);
	say("signal", WIFSIGNALED(status) ? WTERMSIG(status) : -2);
}

/* A reset of the peer in a state: 0 idle, 1 unread data, 2 we have shut down, 3 it has shut down, 4 both, 5 as 2, and
 * send() learns of it */
static void peer_resets(int state)
{
	char c[16];
	int fd = tcp_client(), e = -1;

	if (state == 1)
		tell("send 5");
	if (state == 3 || state == 4)
		tell("shut 1");
	if (state == 2 || state == 5)
		say("shutdown", shutdown(fd, SHUT_WR));
	settle();
	tell("reset");
	settle();
	say_poll("poll", fd, 0);
	if (state == 5)
		say("send", send(fd, "x", 1, MSG_NOSIGNAL));
	say_data("recv", c, recv(fd, c, 16, MSG_DONTWAIT));
	say_data("recv", c, recv(fd, c, 16, MSG_DONTWAIT));
	say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &(socklen_t){ sizeof(e) })), say("value", e);
	if (state != 4)
		say("send", send(fd, "x", 1, MSG_NOSIGNAL));
	say("shutdown", shutdown(fd, SHUT_RDWR));
	close(fd);
}

static void peer_resets_waiter(int how)
{
	char c[16];
	struct pollfd p = { .events = POLLIN };
	static char big[2000000];
	long r;

	if (how == 2)
		tell("rcvbuf 8192");
	int fd = tcp_client();
	p.fd = fd;
	tell("later 60 reset");
	switch (how) {
	case 0: say("recv", recv(fd, c, 16, 0)); break;
	case 1: say("poll", poll(&p, 1, 2000)), say_events("events", (unsigned)p.revents); break;
	case 2:
		setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int));
		r = send(fd, big, sizeof(big), MSG_NOSIGNAL);
		say_yes("a part", r > 10000 && r < 1000000);
		say("send", send(fd, c, 1, MSG_NOSIGNAL));
		break;
	}
	say("then", recv(fd, c, 16, MSG_DONTWAIT));
	close(fd);
}

/* ---- calls on what is connected, or was ---- */

static int bound_client(void) /* the kernel connects it, and it comes to the ring then */
{
	struct sockaddr_in a = { .sin_family = AF_INET }, to = peer(TCP_PORT);
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	say("bind", bind(fd, (void *)&a, sizeof(a))), say("connect", connect(fd, (void *)&to, sizeof(to)));
	tell("accept");
	return fd;
}

static void say_names(int fd)
{
	struct sockaddr_in a = { 0 };
	socklen_t len = sizeof(a);

	say("getsockname", getsockname(fd, (void *)&a, &len)), say_text("address", inet_ntoa(a.sin_addr));
	say_yes("port", a.sin_port != 0);
	memset(&a, 0, len = sizeof(a));
	say("getpeername", getpeername(fd, (void *)&a, &len)), say_text("address", inet_ntoa(a.sin_addr));
}

static void say_state(int fd)
{
	struct tcp_info i = { 0 };

	say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &(socklen_t){ sizeof(i) })), say("state", i.tcpi_state);
}

static void bind_it(int fd)
{
	struct sockaddr_in a = { .sin_family = AF_INET };

	say("bind", bind(fd, (void *)&a, sizeof(a)));
	a.sin_port = htons(7198);
	say("to a port", bind(fd, (void *)&a, sizeof(a)));
	a.sin_addr.s_addr = htonl(0x0a090909);
	say("to another's address", bind(fd, (void *)&a, sizeof(a)));
	say("short", bind(fd, (void *)&a, 4));
	a.sin_family = AF_UNIX;
	say("other family", bind(fd, (void *)&a, sizeof(a)));
}

/* 0 to 2: a socket of a client, bound before, accepted */
static void bind_connected(int how)
{
	int fd = how == 1 ? bound_client() : tcp_pair(how == 2);

	bind_it(fd);
	say("send", send(fd, "abc", 3, 0));
	tell_said("peer", "recv 3");
	close(fd);
}

static void bind_privileged(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET }, is = { 0 }, to = peer(TCP_PORT);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	socklen_t len = sizeof(is);

	(void)arg;
	say("bindresvport", bindresvport(fd, &a)), say_yes("below 1024", ntohs(a.sin_port) < 1024);
	say("connect", connect(fd, (void *)&to, sizeof(to)));
	tell("accept");
	say("getsockname", getsockname(fd, (void *)&is, &len)), say_yes("the same", is.sin_port == a.sin_port);
	say("send", send(fd, "abc", 3, 0));
	tell_said("peer", "recv 3");
	a.sin_port = 0;
	say("again", bindresvport(fd, &a));
	close(fd);
}

static void connect_again(int fd)
{
	struct sockaddr_in a = peer(TCP_PORT);

	say("connect", connect(fd, (void *)&a, sizeof(a)));
	a.sin_family = AF_UNIX;
	say("other family", connect(fd, (void *)&a, sizeof(a)));
}

/* The kernel's from the call on that fails. */
static void connect_later_at_home(int arg)
{
	struct sockaddr_in a = peer(TCP_PORT);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
	char c;

	(void)arg;
	say("connect", connect(fd, (void *)&a, sizeof(a)));
	tell("accept");
	settle();
	say("MSG_OOB", recv(fd, &c, 1, MSG_OOB));
	connect_again(fd), connect_again(fd);
	close(fd);
}

/* The end, as far as names and states tell of it. 0 we close first, 1 the peer does, 2 it resets; + 10: bound before */
static void ended(int how)
{
	int fd = how >= 10 ? bound_client() : tcp_client();
	char c[16];

	if (how % 10 == 0)
		say("shutdown", shutdown(fd, SHUT_WR)), settle();
	tell(how % 10 == 2 ? "reset" : "close");
	settle();
	if (how % 10 == 1)
		say("shutdown", shutdown(fd, SHUT_WR)), settle();
	if (how % 10 != 2)
		say("recv", recv(fd, c, 16, MSG_DONTWAIT));
	say_state(fd);
	say_names(fd);
	connect_again(fd);
	say("shutdown", shutdown(fd, SHUT_WR)), say("bad", shutdown(fd, 7)), say("shutdown", shutdown(fd, SHUT_RD));
	say_state(fd);
	say_names(fd);
	close(fd);
}

/* Data of the peer after both halves were shut: 0 reading first, 1 writing first, 2 at once, 3 as 0, but reading again.
 * + 10: something is unread then. + 20: a send() first learns of it. + 30: SO_ERROR does. + 40: an accepted one. + 50: all
 * that the peer sends comes with its end */
static void shut_both(int how)
{
	int fd = tcp_pair(how / 10 == 4), e = -1;
	char c[16];

	if (how / 10 == 1) {
		tell("send 7");
		settle();
	}
	if (how % 10 == 2)
		say("shutdown", shutdown(fd, SHUT_RDWR));
	else
		say("shutdown", shutdown(fd, how % 10 == 1 ? SHUT_WR : SHUT_RD)), settle();
	if (how % 10 != 2)
		say("shutdown", shutdown(fd, how % 10 == 1 ? SHUT_RD : SHUT_WR));
	if (how % 10 == 3)
		say("shutdown", shutdown(fd, SHUT_RD));
	settle();
	say_poll("before", fd, 0);
	tell_said("peer sends", how / 10 == 5 ? "last 5" : "send 5");
	settle();
	say_poll("after", fd, 0);
	say_state(fd);
	if (how / 10 == 2)
		say("send", send(fd, "x", 1, MSG_NOSIGNAL)), say("send", send(fd, "x", 1, MSG_NOSIGNAL));
	if (how / 10 == 3)
		say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &(socklen_t){ sizeof(e) })), say("value", e);
	for (int i = 0; i < 3; i++)
		say_data("recv", c, recv(fd, c, 16, MSG_DONTWAIT));
	say_poll("then", fd, 0);
	tell_said("peer", "read"), tell_said("peer sends", "send 1");
	say("shutdown", shutdown(fd, SHUT_RDWR));
	close(fd);
}

/* What has come before the call, and no call of the program has looked since. */
static void unseen(int how)
{
	char c[16];
	int fd = tcp_pair(how >= 10);

	tell("later 5 send 6");
	settle();
	if (how % 10 == 3) {
		say("close", close(fd));
		tell_said("peer", "read");
		return;
	}
	say("shutdown", shutdown(fd, how % 10));
	say_poll("poll", fd, 0);
	say_data("recv", c, recv(fd, c, 16, MSG_DONTWAIT)), say("recv", recv(fd, c, 16, MSG_DONTWAIT));
	close(fd);
}

/* ---- other threads ---- */

#define SILENT_HOST 99 /* of the peer's network: a neighbour that says nothing, test_tcp_calls.py */

struct waiter {
	int fd, other, how, ready;
	struct timespec began;
	long took_ms;
	long r;
	int err;
	unsigned events;
};

static void *wait_in(void *arg)
{
	static char big[2000000];
	struct waiter *w = arg;
	struct pollfd p[] = { { .fd = w->fd, .events = POLLIN }, { .fd = w->other, .events = POLLIN } };
	struct sockaddr_in silent = peer(TCP_PORT);
	struct epoll_event e = { .events = EPOLLIN };
	struct timeval tv = { 0, 400000 };
	fd_set in;
	char c[16];
	int ep;

	FD_ZERO(&in);
	FD_SET(w->fd, &in);
	now(&w->began);
	switch (w->how) {
	case 0: w->r = recv(w->fd, c, 16, 0); break;
	case 1: w->r = send(w->fd, big, sizeof(big), MSG_NOSIGNAL) > 0; break;
	case 2: w->r = poll(p, 1, 400), w->events = (unsigned)p->revents; break;
	case 3: w->r = select(w->fd + 1, &in, NULL, NULL, &tv); break;
	case 4:
		ep = epoll_create1(0);
		epoll_ctl(ep, EPOLL_CTL_ADD, w->fd, &e);
		w->r = epoll_wait(ep, &e, 1, 400), w->events = w->r == 1 ? e.events : 0;
		close(ep);
		break;
	case 5: w->r = accept(w->fd, NULL, NULL); break;
	case 6: w->r = send(w->fd, big, sizeof(big), MSG_NOSIGNAL); break;
	case 7:
		silent.sin_addr.s_addr = (silent.sin_addr.s_addr & htonl(0xffffff00)) | htonl(SILENT_HOST);
		w->r = connect(w->fd, (void *)&silent, sizeof(silent));
		break;
	case 8: w->r = poll(p, 2, 400), w->events = (unsigned)(p[0].revents | p[1].revents); break;
	}
	w->err = errno;
	w->took_ms = (long)elapsed_ms(&w->began);
	return NULL;
}

static int tcp_listener(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int l = socket(AF_INET, SOCK_STREAM, 0);

	inet_pton(AF_INET, my_ip, &a.sin_addr);
	if (bind(l, (void *)&a, sizeof(a)) || listen(l, 4))
		say("listen", -1);
	return l;
}

static int socket_for(int how)
{
	if (how == 7)
		return socket(AF_INET, SOCK_STREAM, 0);
	return how == 5 ? tcp_listener() : tcp_client();
}

static int port_of(int fd)
{
	struct sockaddr_in a;

	getsockname(fd, (void *)&a, &(socklen_t){ sizeof(a) });
	return ntohs(a.sin_port);
}

/* how + 10: shutdown instead of close; + 20: the peer sends, or connects, after the close; + 30: the same after a dup2()
 * over it; + 40: close at once after a shutdown */
static void close_while(int how)
{
	struct waiter w = { .how = how % 10 };
	int pipefd[2] = { -1, -1 }, port;
	pthread_t t;

	if (w.how == 1)
		tell("rcvbuf 8192");
	w.fd = socket_for(w.how);
	port = port_of(w.fd);
	if (w.how == 8)
		say("pipe", pipe(pipefd)), w.other = pipefd[0];
	setsockopt(w.fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int));
	setsockopt(w.fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){ 0, 400000 }, sizeof(struct timeval));
	if (w.how != 6)
		setsockopt(w.fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){ 0, 400000 }, sizeof(struct timeval));
	pthread_create(&t, NULL, wait_in, &w);
	usleep(60000);
	if (how / 10 == 1) {
		say("shutdown", shutdown(w.fd, SHUT_RDWR));
	} else {
		if (how / 10 == 4)
			say("shutdown", shutdown(w.fd, SHUT_RDWR));
		if (how / 10 == 3)
			say("dup2", dup2(STDERR_FILENO, w.fd) == w.fd);
		say("close", close(w.fd));
		if (how == 20 || how == 30)
			tell_said("peer", "send 5");
		else if (how / 10 == 4)
			;
		else if (how / 10 >= 2 && w.how == 5)
			tell("connect %d", port);
		else if (w.how == 8)
			say("write", write(pipefd[1], "x", 1));
		else if (how / 10 >= 2)
			tell_said("peer", "read");
	}
	pthread_join(t, NULL);
	errno = w.err;
	if (how / 10 == 4)
		say_yes("at once", w.took_ms < 300);
	if (w.how == 5 && w.r >= 0)
		say("accepted, then close", close((int)w.r));
	else if (how / 10 == 4) /* it may see the one or the other */
		say("waiter", w.r);
	else
		say("waiter", w.r), say_events("events", w.events);
	if (how / 10 == 1)
		close(w.fd);
	if (w.how == 8)
		close(pipefd[0]), close(pipefd[1]);
}

/* The thread that closes has waited itself before. */
static void close_after_a_wait(int arg)
{
	static char big[300000];
	struct waiter w = { .how = arg };
	pthread_t t;

	tell("rcvbuf 8192");
	w.fd = tcp_client();
	setsockopt(w.fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int));
	pthread_create(&t, NULL, wait_in, &w);
	usleep(60000);
	tell("later 100 recv 300000");
	say("send", send(w.fd, big, sizeof(big), MSG_NOSIGNAL));
	settle();
	say("close", close(w.fd));
	tell_said("peer", "send 5");
	pthread_join(t, NULL);
	errno = w.err;
	say("waiter", w.r);
}

static void *send_half(void *arg)
{
	static char big[500000];
	long all = 0, r;

	while (all < (long)sizeof(big) && (r = send(*(int *)arg, big, sizeof(big) - (size_t)all, 0)) > 0)
		all += r;
	return (void *)all;
}

static void two_threads(int arg)
{
	static char buf[65536];
	pthread_t t;
	void *sent;
	int fd = tcp_client();
	long all = 0, r;

	(void)arg;
	tell("later 0 send 500000");
	pthread_create(&t, NULL, send_half, &fd);
	while (all < 500000 && (r = recv(fd, buf, sizeof(buf), 0)) > 0)
		all += r;
	say("received", all);
	settle();
	tell_said("peer", "recv 500000");
	pthread_join(t, &sent);
	say("sent", (long)sent);
	close(fd);
}

/* ---- other descriptors and processes ---- */

static void duplicated(int how)
{
	char c[16];
	int fd = tcp_client(), d;

	tell("send 5");
	settle();
	d = how == 0 ? dup(fd) : how == 1 ? dup2(fd, 200) : how == 2 ? dup3(fd, 201, O_CLOEXEC) : how == 3 ? fcntl(fd, F_DUPFD, 100)
	    : pidfd_getfd(pidfd_open(getpid(), 0), fd, 0);
	say_data("of the copy", c, recv(d, c, 3, 0));
	close(fd);
	say_data("after a close", c, recv(d, c, 3, 0));
	say("send", send(d, "x", 1, 0));
	tell_said("peer", "recv 1");
	close(d);
	tell_said("peer", "read");
}

static void over(int arg)
{
	int fd = tcp_client(), p[2];

	(void)arg;
	if (pipe(p))
		say("pipe", -1);
	send(fd, "last", 4, 0);
	say_yes("dup2 over it", dup2(p[0], fd) == fd);
	tell_said("peer", "read");
	say("send", send(fd, "x", 1, 0));
	close(fd), close(p[0]), close(p[1]);
}

static void forked(int who)
{
	char c[16];
	int status, fd = tcp_client();

	tell("send 6");
	settle();
	fflush(stdout);
	pid_t pid = fork();
	if (!pid) {
		if (who == 0)
			say_data("child", c, recv(fd, c, 3, 0)), send(fd, "child", 5, 0), fflush(stdout);
		close(fd);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	say("status", status);
	say_data("parent", c, recv(fd, c, 3, 0));
	say("send", send(fd, "parent", 6, 0));
	tell_said("peer", "recv %d", who ? 6 : 11);
	close(fd);
	tell_said("peer", "read");
}

extern char **environ;

/* A program gets the connection as its standard input and output, and FD_CLOEXEC is set. */
static long spawned_with(int fd)
{
	char *argv[] = { "dd", "bs=1", "count=3", "status=none", NULL };
	posix_spawn_file_actions_t actions;
	int status = -1;
	pid_t pid;

	fcntl(fd, F_SETFD, FD_CLOEXEC);
	posix_spawn_file_actions_init(&actions);
	posix_spawn_file_actions_adddup2(&actions, fd, 0);
	posix_spawn_file_actions_adddup2(&actions, fd, 1);
	if (!posix_spawnp(&pid, "dd", &actions, NULL, argv, environ))
		waitpid(pid, &status, 0);
	posix_spawn_file_actions_destroy(&actions);
	return status;
}

static long spawned_by(int how, int fd)
{
	char command[96], *argv[] = { "sh", "-c", command, NULL };
	int status = -1;
	pid_t pid;
	FILE *f;

	sprintf(command, "dd bs=1 count=3 status=none <&%d >&%d", fd, fd);
	fflush(stdout);
	if (how == 1)
		return posix_spawn(&pid, "/bin/sh", NULL, NULL, argv, environ) || waitpid(pid, &status, 0) < 0 ? -1 : status;
	if (how == 2)
		return system(command);
	f = popen(command, "r");
	return f ? pclose(f) : -1;
}

/* The child gives three bytes back to the peer, the parent goes on. */
static void spawned(int how)
{
	char c[16];
	int fd = tcp_client();

	tell("send 6");
	settle();
	say("status", how ? spawned_by(how, fd) : spawned_with(fd));
	say_data("parent", c, recv(fd, c, 3, 0));
	say("send", send(fd, "parent", 6, 0));
	tell_said("peer", "recv 9");
	close(fd);
	tell_said("peer", "read");
}

static void passed(int arg)
{
	char c[16], cbuf[64] = "";
	struct iovec v = { "f", 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = CMSG_SPACE(sizeof(int)) };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	int fd = tcp_client(), sv[2], got;

	(void)arg;
	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv))
		say("socketpair", -1);
	tell("send 5");
	settle();
	h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &fd, sizeof(fd));
	say("sendmsg", sendmsg(sv[0], &m, 0));
	close(fd);
	v.iov_base = c;
	say("recvmsg", recvmsg(sv[1], &m, 0));
	memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(got));
	say_data("recv", c, recv(got, c, 16, 0));
	say("send", send(got, "x", 1, 0));
	tell_said("peer", "recv 1");
	close(got), close(sv[0]), close(sv[1]);
	tell_said("peer", "read");
}

/* Another process may wait at it. later: it is added to the set that was passed; 2: by the number that was received; 3: a
 * set that it is in is */
static void passed_set(int later)
{
	char byte = 's', cbuf[CMSG_SPACE(sizeof(int))] = "";
	struct iovec v = { &byte, 1 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = sizeof(cbuf) };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);
	struct epoll_event e = { .events = EPOLLIN };
	int fd = tcp_client(), set = epoll_create1(0), inner = -1, sv[2], got;

	if (socketpair(AF_UNIX, SOCK_STREAM, 0, sv))
		say("socketpair", -1);
	if (later == 3) {
		inner = epoll_create1(0);
		say("add", epoll_ctl(inner, EPOLL_CTL_ADD, fd, &e));
	}
	if (!later)
		say("add", epoll_ctl(set, EPOLL_CTL_ADD, fd, &e));
	h->cmsg_level = SOL_SOCKET, h->cmsg_type = SCM_RIGHTS, h->cmsg_len = CMSG_LEN(sizeof(int));
	memcpy(CMSG_DATA(h), &set, sizeof(set));
	say("sendmsg", sendmsg(sv[0], &m, 0));
	say("recvmsg", recvmsg(sv[1], &m, 0));
	memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(got));
	if (later)
		say("add", epoll_ctl(later >= 2 ? got : set, EPOLL_CTL_ADD, later == 3 ? inner : fd, &e));
	say("none", epoll_wait(got, &e, 1, 20));
	tell("send 5");
	say("theirs", epoll_wait(got, &e, 1, 500)), say("events", (int)e.events);
	say("ours", epoll_wait(set, &e, 1, 0)), say("events", (int)e.events);
	close(got), close(set), close(inner), close(sv[0]), close(sv[1]), close(fd);
}

/* ---- the beginning ---- */

static void refused(int nonblocking)
{
	struct sockaddr_in a = peer(7199);
	int e = -1, fd = socket(AF_INET, SOCK_STREAM | (nonblocking ? SOCK_NONBLOCK : 0), 0);

	say("connect", connect(fd, (void *)&a, sizeof(a)));
	if (nonblocking) {
		settle();
		say_poll("poll", fd, 200);
		say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &(socklen_t){ sizeof(e) })), say("value", e);
	}
	say("send", send(fd, "x", 1, MSG_NOSIGNAL)), say("recv", recv(fd, &e, 1, 0));
	a = peer(TCP_PORT);
	fcntl(fd, F_SETFL, O_RDWR);
	say("another", connect(fd, (void *)&a, sizeof(a)));
	if (!nonblocking) {
		tell("accept");
		say("send", send(fd, "abc", 3, MSG_NOSIGNAL));
		tell_said("peer", "recv 3");
	}
	close(fd);
}

static void connect_later(int arg)
{
	struct sockaddr_in a = peer(TCP_PORT);
	char c[8];
	int e = -1, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);

	(void)arg;
	say("connect", connect(fd, (void *)&a, sizeof(a)));
	tell("accept");
	say_poll("poll", fd, 500);
	say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &(socklen_t){ sizeof(e) })), say("value", e);
	say("again", connect(fd, (void *)&a, sizeof(a))), say("again", connect(fd, (void *)&a, sizeof(a)));
	say("recv", recv(fd, c, 8, 0));
	say("send", send(fd, "abc", 3, 0));
	tell_said("peer", "echo 3");
	settle();
	say_data("recv", c, recv(fd, c, 8, 0));
	close(fd);
}

static void never_connected(int arg)
{
	char c[8];
	int n = -1, fd = socket(AF_INET, SOCK_STREAM, 0);

	(void)arg;
	say("send", send(fd, "x", 1, MSG_NOSIGNAL)), say("recv", recv(fd, c, 8, 0)), say("shutdown", shutdown(fd, SHUT_WR));
	say("FIONREAD", ioctl(fd, FIONREAD, &n)), say("value", n);
	say("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &n)), say("value", n);
	say_poll("poll", fd, 0);
	close(fd);
}

static void listener_calls(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	char c[8];
	int n = -1, l = socket(AF_INET, SOCK_STREAM, 0), fd;
	socklen_t len = sizeof(a);

	(void)arg;
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	say("bind", bind(l, (void *)&a, sizeof(a))), say("listen", listen(l, 4)), say("again", listen(l, 8));
	say("recv", recv(l, c, 8, 0)), say("send", send(l, c, 1, MSG_NOSIGNAL));
	say("FIONREAD", ioctl(l, FIONREAD, &n));
	say_poll("poll", l, 0);
	nonblock(l);
	say("accept", accept(l, NULL, NULL));
	tell("connect %d", my_port(l));
	say_poll("poll", l, 200);
	fd = accept4(l, (void *)&a, &len, SOCK_NONBLOCK | SOCK_CLOEXEC);
	say("length", len), say_text("from", inet_ntoa(a.sin_addr));
	say("F_GETFL", fcntl(fd, F_GETFL) & O_NONBLOCK), say("F_GETFD", fcntl(fd, F_GETFD));
	say("recv", recv(fd, c, 8, 0));
	tell("send 3");
	settle();
	say_data("recv", c, recv(fd, c, 8, 0));
	say("SO_ACCEPTCONN", getsockopt(l, SOL_SOCKET, SO_ACCEPTCONN, &n, &(socklen_t){ sizeof(n) })), say("value", n);
	close(l);
	say("send", send(fd, "x", 1, 0));
	tell_said("peer", "recv 1");
	close(fd);
}

/* Data calls fail at once, also when rings listen. */
static void listener_data(int blocking)
{
	int l = tcp_listener();
	char c[8];

	say_poll("poll", l, 0);
	if (!blocking)
		nonblock(l);
	signal(SIGPIPE, SIG_IGN);
	say("recv", recv(l, c, 8, 0)), say("send", send(l, c, 1, MSG_NOSIGNAL));
	say("read", read(l, c, 8)), say("write", write(l, c, 1));
	say("peek", recv(l, c, 8, MSG_PEEK | MSG_DONTWAIT)), say("nothing", recv(l, c, 0, 0));
	tell("connect %d", my_port(l));
	say_poll("poll", l, 200);
	say("recv", recv(l, c, 8, 0)), say("send", send(l, c, 1, MSG_NOSIGNAL));
	say_yes("accept", accept(l, NULL, NULL) >= 0);
	signal(SIGPIPE, SIG_DFL);
	close(l);
}

/* A name that can't be told: the connection is taken all the same. */
static void accept_nowhere(int blocking)
{
	struct sockaddr_in a;
	socklen_t negative = (socklen_t)-1, whole = sizeof(a), none = 0;
	const struct {
		const char *what;
		void *a;
		socklen_t *len;
	} tries[] = { { "negative length", &a, &negative }, { "bad address", (void *)8, &whole },
		      { "bad length", &a, (void *)8 }, { "no length", &a, NULL }, { "bad address, nothing", (void *)8, &none } };
	int l = tcp_listener();

	if (!blocking)
		nonblock(l);
	for (unsigned i = 0; i < sizeof(tries) / sizeof(tries[0]); i++) {
		int fd;

		if (!blocking)
			say("none", accept(l, tries[i].a, tries[i].len));
		tell("connect %d", my_port(l));
		say_poll("poll", l, 500);
		fd = accept(l, tries[i].a, tries[i].len);
		say(tries[i].what, fd < 0 ? fd : 0);
		say_poll("poll", l, 0);
		if (fd >= 0)
			close(fd);
	}
	say("is", none);
	close(l);
}

static void connect_lengths(int arg)
{
	struct sockaddr_storage to = { 0 };
	struct sockaddr_in a = peer(TCP_PORT);
	const socklen_t lengths[] = { (socklen_t)-1, sizeof(to) + 1, 0, 1, 15 };
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	(void)arg;
	memcpy(&to, &a, sizeof(a));
	for (unsigned i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++)
		say("connect", connect(fd, (void *)&to, lengths[i]));
	say("128", connect(fd, (void *)&to, sizeof(to)));
	tell("accept");
	say("129", connect(fd, (void *)&to, sizeof(to) + 1));
	close(fd);
}

/* The peer has sent and closed before accept(). */
static void accepted_late(int how)
{
	char c[16];
	int l = tcp_listener(), fd;

	tell("connect %d", my_port(l));
	tell("send 5");
	tell(how ? "reset" : "close");
	settle();
	fd = accept(l, NULL, NULL);
	if (fd < 0)
		say("accept", fd);
	say_poll("poll", fd, 0);
	say_data("recv", c, recv(fd, c, 16, 0)), say("recv", recv(fd, c, 16, 0));
	close(fd), close(l);
}

/* The listener's option is set before its first accept(), or after it. Returned is a connection, which has it. */
static int accepted_with(int l, const char *what, int name, int after)
{
	const int on = 1;
	int fd, has = -1;

	nonblock(l);
	if (!after)
		say(what, setsockopt(l, IPPROTO_TCP, name, &on, sizeof(on)));
	say("none", accept(l, NULL, NULL));
	if (after)
		say(what, setsockopt(l, IPPROTO_TCP, name, &on, sizeof(on)));
	tell("connect %d", my_port(l));
	say_poll("poll", l, 1500);
	fd = accept(l, NULL, NULL);
	say_yes("accept", fd >= 0);
	say("getsockopt", getsockopt(fd, IPPROTO_TCP, name, &has, &(socklen_t){ sizeof(has) })), say("value", has);
	tell("send 5");
	return fd;
}

/* Its SYN-ACK is less than a segment, and no rest of a stream. */
static void corked_listener(int after)
{
	char c[16];
	int l = tcp_listener(), fd = accepted_with(l, "TCP_CORK", TCP_CORK, after);

	say_data("recv", c, recv(fd, c, 16, 0));
	close(fd), close(l);
}

static void telling_listener(int after)
{
	char buf[8], control[64] = { 0 };
	struct iovec v = { buf, 2 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = control, .msg_controllen = sizeof(control) };
	int l = tcp_listener(), fd = accepted_with(l, "TCP_INQ", TCP_INQ, after);

	settle();
	say_data("recvmsg", buf, recvmsg(fd, &m, 0)), say("controllen", (long)m.msg_controllen);
	say_data("control", control, CMSG_LEN(sizeof(int)));
	close(fd), close(l);
}

/* Who went home with its listener, and nobody has accepted, is reset when that is closed. */
static void dropped_at_home(int how)
{
	int l = tcp_listener();

	nonblock(l);
	say("none", accept(l, NULL, NULL));
	tell("connect %d", my_port(l));
	say_poll("poll", l, 500);
	if (how)
		close(dup(l));
	else
		say("SHUT_WR", shutdown(l, SHUT_WR));
	close(l);
	settle();
	tell_said("peer", "recv 1");
}

const struct call_case tcp_life_cases[] = {
	{ "tcp listener with TCP_INQ", telling_listener, 0 }, { "tcp listener on its ring, TCP_INQ", telling_listener, 1 },
	{ "tcp listener with TCP_CORK", corked_listener, 0 }, { "tcp listener on its ring, TCP_CORK", corked_listener, 1 },
	{ "tcp listener closed after dup", dropped_at_home, 1 }, { "tcp listener closed after SHUT_WR", dropped_at_home, 0 },
	{ "tcp accept to nowhere", accept_nowhere, 0 }, { "tcp accept to nowhere, blocking", accept_nowhere, 1 },
	{ "tcp connect lengths", connect_lengths, 0 },
	{ "tcp SHUT_RD, unseen data", unseen, SHUT_RD }, { "tcp SHUT_RDWR, unseen data", unseen, SHUT_RDWR },
	{ "tcp close, unseen data", unseen, 3 }, { "tcp SHUT_RDWR, unseen data, accepted", unseen, 10 + SHUT_RDWR },
	{ "tcp SHUT_RD", shut, SHUT_RD }, { "tcp SHUT_WR", shut, SHUT_WR }, { "tcp SHUT_RDWR", shut, SHUT_RDWR },
	{ "tcp data after SHUT_RD, SHUT_WR", shut_both, 0 }, { "tcp data after SHUT_WR, SHUT_RD", shut_both, 1 },
	{ "tcp data after SHUT_RDWR", shut_both, 2 }, { "tcp data after SHUT_RD, SHUT_WR, SHUT_RD", shut_both, 3 },
	{ "tcp data after both, unread data", shut_both, 10 }, { "tcp data after both, then send", shut_both, 20 },
	{ "tcp data after both, then SO_ERROR", shut_both, 30 }, { "tcp data after both, accepted", shut_both, 40 },
	{ "tcp data with the end after both", shut_both, 50 },
	{ "tcp half closed by the peer", half_closed, 0 }, { "tcp half closed, accepted", half_closed, 1 },
	{ "tcp close", closed, 0 }, { "tcp close with unread data", closed, 1 },
	{ "tcp SO_LINGER 0", lingered, 0 }, { "tcp SO_LINGER 2", lingered, 2 },
	{ "tcp SIGPIPE of send", sigpipe, 0 }, { "tcp SIGPIPE, MSG_NOSIGNAL", sigpipe, 1 },
	{ "tcp SIGPIPE of write", sigpipe, 2 }, { "tcp SIGPIPE of sendmsg", sigpipe, 3 },
	{ "tcp SIGPIPE of writev", sigpipe, 4 }, { "tcp killed by SIGPIPE", killed_by_sigpipe, 0 },
	{ "tcp reset, idle", peer_resets, 0 }, { "tcp reset, unread data", peer_resets, 1 },
	{ "tcp reset, after SHUT_WR", peer_resets, 2 }, { "tcp reset, after their end", peer_resets, 3 },
	{ "tcp reset, after SHUT_WR, then send", peer_resets, 5 },
	{ "tcp reset, while recv waits", peer_resets_waiter, 0 }, { "tcp reset, while poll waits", peer_resets_waiter, 1 },
	{ "tcp reset, while send waits", peer_resets_waiter, 2 },
	{ "tcp close while recv waits", close_while, 0 }, { "tcp close while send waits", close_while, 1 },
	{ "tcp close while poll waits", close_while, 2 }, { "tcp close while select waits", close_while, 3 },
	{ "tcp close while epoll waits", close_while, 4 }, { "tcp close while accept waits", close_while, 5 },
	{ "tcp close while connect waits", close_while, 7 }, { "tcp close while poll waits for two", close_while, 8 },
	{ "tcp connection after close while accept waits", close_while, 25 },
	{ "tcp connection after dup2 over it while accept waits", close_while, 35 },
	{ "tcp shutdown while connect waits", close_while, 17 },
	{ "tcp shutdown and close while poll waits", close_while, 42 },
	{ "tcp shutdown and close while select waits", close_while, 43 },
	{ "tcp shutdown and close while recv waits", close_while, 40 },
	{ "tcp shutdown while recv waits", close_while, 10 }, { "tcp shutdown while send waits", close_while, 11 },
	{ "tcp shutdown while poll waits", close_while, 12 }, { "tcp shutdown while select waits", close_while, 13 },
	{ "tcp shutdown while epoll waits", close_while, 14 }, { "tcp shutdown while accept waits", close_while, 15 },
	{ "tcp data after close while recv waits", close_while, 20 },
	{ "tcp the rest of a send that was closed", close_while, 26 },
	{ "tcp close after a send that waited, while recv waits", close_after_a_wait, 0 },
	{ "tcp data after dup2 over it while recv waits", close_while, 30 }, { "tcp dup2 over it while send waits", close_while, 31 },
	{ "tcp two threads", two_threads, 0 },
	{ "tcp dup", duplicated, 0 }, { "tcp dup2", duplicated, 1 }, { "tcp dup3", duplicated, 2 },
	{ "tcp F_DUPFD", duplicated, 3 }, { "tcp pidfd_getfd", duplicated, 4 }, { "tcp dup2 over it", over, 0 },
	{ "tcp fork, child uses it", forked, 0 }, { "tcp fork, child does not", forked, 1 },
	{ "tcp posix_spawn, file actions", spawned, 0 }, { "tcp posix_spawn, inherited", spawned, 1 },
	{ "tcp system, inherited", spawned, 2 }, { "tcp popen, inherited", spawned, 3 },
	{ "tcp SCM_RIGHTS", passed, 0 },
	{ "tcp SCM_RIGHTS of an epoll set", passed_set, 0 }, { "tcp SCM_RIGHTS of an empty epoll set", passed_set, 1 },
	{ "tcp epoll set that was received", passed_set, 2 }, { "tcp epoll set in one that was received", passed_set, 3 },
	{ "tcp bind of a connected one", bind_connected, 0 }, { "tcp bind of an adopted one", bind_connected, 1 },
	{ "tcp bind of an accepted one", bind_connected, 2 }, { "tcp bind by libc", bind_privileged, 0 },
	{ "tcp connect without blocking, then home", connect_later_at_home, 0 },
	{ "tcp ended, we first", ended, 0 }, { "tcp ended, the peer first", ended, 1 }, { "tcp ended by a reset", ended, 2 },
	{ "tcp adopted and ended, we first", ended, 10 }, { "tcp adopted and ended, the peer first", ended, 11 },
	{ "tcp adopted and ended by a reset", ended, 12 },
	{ "tcp refused", refused, 0 }, { "tcp refused without blocking", refused, 1 },
	{ "tcp connect without blocking", connect_later, 0 }, { "tcp never connected", never_connected, 0 },
	{ "tcp listener", listener_calls, 0 }, { "tcp listener, data calls", listener_data, 0 },
	{ "tcp listener, data calls that block", listener_data, 1 }, { "tcp accepted late", accepted_late, 0 },
	{ "tcp accepted late, reset", accepted_late, 1 },
	{ 0 },
};
