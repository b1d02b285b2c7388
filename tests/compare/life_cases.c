#include "calls.h"
#include <net/if.h>
#include <pty.h>

static void echo(int fd, const char *what)
{
	char buf[64];

	if (send(fd, what, strlen(what), 0) < 0) {
		say(what, -1);
		return;
	}
	settle();
	say_data(what, buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
}

static void dups(int how)
{
	int fd = udp_connected(7001), d = -1;

	switch (how) {
	case 0: d = dup(fd); break;
	case 1: d = dup2(fd, 50); break;
	case 2: d = dup3(fd, 51, O_CLOEXEC); break;
	case 3: d = fcntl(fd, F_DUPFD, 60); break;
	case 4: d = fcntl(fd, F_DUPFD_CLOEXEC, 61); break;
	}
	say_text("dup", d >= 0 ? "ok" : "failed");
	say("cloexec", fcntl(d, F_GETFD));
	echo(d, "by the dup");
	echo(fd, "by the first");
	send(fd, "from one", 8, 0);
	settle();
	char buf[16];
	say_data("to the other", buf, recv(d, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
	echo(d, "first closed");
	close(d);
	say("closed", send(d, "x", 1, 0));
}

static void dup_onto_socket(int arg)
{
	int a = udp_connected(7001), b = udp_connected(7001), p[2];
	char c;

	(void)arg;
	say_text("dup2", dup2(a, b) == b ? "ok" : "failed");
	echo(b, "b is a now");
	if (pipe(p))
		return;
	say_text("pipe over socket", dup2(p[0], a) == a ? "ok" : "failed");
	if (write(p[1], "z", 1) != 1)
		return;
	say("read the pipe", read(a, &c, 1));
	say("not a socket", send(a, "x", 1, 0));
	say("bad", dup2(9999, a));
	close(a), close(b), close(p[0]), close(p[1]);
}

static void nonblock_shared(int how)
{
	int fd = udp_connected(7001), d = dup(fd), on = 1;
	char c;

	if (how)
		say("FIONBIO", ioctl(fd, FIONBIO, &on));
	else
		say("F_SETFL", fcntl(fd, F_SETFL, O_NONBLOCK));
	say("dup is non-blocking", recv(d, &c, 1, 0));
	say("flags", (fcntl(d, F_GETFL) & O_NONBLOCK) != 0);
	close(fd), close(d);
	fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0);
	say("from the start", recv(fd, &c, 1, 0));
	say("cloexec", fcntl(fd, F_GETFD));
	close(fd);
}

static void use_after_close(int arg)
{
	int fd = udp_connected(7001);
	char c;

	(void)arg;
	say("close", close(fd));
	say("again", close(fd));
	say("recv", recv(fd, &c, 1, 0));
	say("send", send(fd, "x", 1, 0));
	say("setsockopt", setsockopt(fd, SOL_SOCKET, SO_BROADCAST, &(int){ 1 }, sizeof(int)));
	int f = open("/dev/null", O_RDWR);
	say_text("number used again", f == fd ? "yes" : "no");
	say("read a file", read(f, &c, 1));
	close(f);
}

static void reopen_port(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int fd = udp_bound(), port = my_port(fd);

	(void)arg;
	a.sin_port = htons(port);
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	for (int i = 0; i < 5; i++) {
		char buf[16];

		ask(fd, 7001, "round");
		settle();
		say_data("echo", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
		close(fd);
		fd = udp();
		say("bind again", bind(fd, (void *)&a, sizeof(a)));
	}
	close(fd);
}

/* What came for a socket and was not read is nothing to the next one on its port. */
static void reopen_unread(int connected)
{
	struct sockaddr_in a = { .sin_family = AF_INET }, to = peer(7003);
	int fd = udp_bound(), port = my_port(fd);

	a.sin_port = htons(port);
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	for (int i = 0; i < 3; i++) {
		char size[8] = "2 ?0";

		if (connected)
			say("connect", connect(fd, (void *)&to, sizeof(to)));
		size[2] = (char)('1' + i);
		ask(fd, 7003, size);
		settle();
		if (i == 2)
			break;
		if (i == 1) {
			int other = udp();

			say("dup2", dup2(other, fd) == fd);
			close(other);
		} else {
			close(fd);
			fd = udp();
		}
		say("bind again", bind(fd, (void *)&a, sizeof(a)));
	}
	drain(fd, "of this one only");
	close(fd);
}

/* An option that the kernel alone has: what was queued before comes before what follows. */
static void home_queued(int looked)
{
	int fd = udp_connected(7003), one = 1;
	char c;

	ask(fd, 7003, "3 20");
	settle();
	if (looked)
		say("peek", recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT));
	say("option", setsockopt(fd, SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof(one)));
	ask(fd, 7003, "2 30");
	settle();
	drain(fd, "in order");
	close(fd);
}

/* Then an error of the kernel's is told before what lies in the queue. */
static void home_refused(int arg)
{
	struct sockaddr_in closed = peer(7004);
	int fd = udp_connected(7003), one = 1;

	(void)arg;
	ask(fd, 7003, "3 20");
	settle();
	say("option", setsockopt(fd, SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof(one)));
	say("connect", connect(fd, (void *)&closed, sizeof(closed)));
	say("send", send(fd, "x", 1, 0));
	settle();
	drain(fd, "the error");
	drain(fd, "what was queued");
	close(fd);
}

static void shutdowns(int how)
{
	int fd = udp_connected(7001);
	char c;

	signal(SIGPIPE, SIG_IGN);
	send(fd, "x", 1, 0);
	settle();
	say("shutdown", shutdown(fd, how));
	say("queued", recv(fd, &c, 1, MSG_DONTWAIT));
	if (how != SHUT_WR)
		say("end", recv(fd, &c, 1, 0));
	say("send", send(fd, "x", 1, 0));
	say("again", shutdown(fd, how));
	say("bad", shutdown(fd, 9));
	signal(SIGPIPE, SIG_DFL);
	close(fd);
	fd = udp_bound();
	say("unconnected", shutdown(fd, how));
	close(fd);
}

static void *shut_later(void *arg)
{
	usleep(50000);
	shutdown(*(int *)arg, SHUT_RD);
	return NULL;
}

static void shutdown_wakes(int arg)
{
	pthread_t t;
	char c;
	int fd = udp_connected(7001);

	(void)arg;
	pthread_create(&t, NULL, shut_later, &fd);
	say("woken", recv(fd, &c, 1, 0));
	pthread_join(t, NULL);
	close(fd);
}

static void fork_child_uses(int bare)
{
	int fd = udp_connected(7001), status = 0;

	echo(fd, "before fork");
	fflush(stdout);
	pid_t pid = bare ? _Fork() : fork();
	if (pid == 0) {
		echo(fd, "in the child");
		fflush(stdout);
		_exit(7);
	}
	waitpid(pid, &status, 0);
	say("exit", WEXITSTATUS(status));
	echo(fd, "in the parent");
	close(fd);
}

static void fork_server(int arg)
{
	int fd = udp_bound(), status = 0;
	char buf[32];

	(void)arg;
	fflush(stdout);
	pid_t pid = fork(); /* opened in the parent, served in the child */
	if (pid == 0) {
		ask(fd, 7001, "child asks");
		alarm(5);
		_exit(recv(fd, buf, sizeof(buf), 0) == 10 ? 0 : 1);
	}
	waitpid(pid, &status, 0);
	say("child", status);
	int g = udp_connected(7001); /* opened after the fork */
	echo(g, "new socket in the parent");
	close(g), close(fd);
}

/* Datagrams that have arrived and are unread when the process forks: the child may read them. */
enum { QUEUED_CONNECTED = 1, QUEUED_HOME };

static void fork_queued(int how)
{
	int fd = how ? udp_connected(7003) : udp_any(), status = 0, one = 1;
	char c;

	ask(fd, 7003, "3 20");
	settle();
	say("peek", recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT));
	if (how == QUEUED_HOME) /* an option that the kernel alone has */
		say("option", setsockopt(fd, SOL_SOCKET, SO_LOCK_FILTER, &one, sizeof(one)));
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		drain(fd, "in the child");
		fflush(stdout);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	say("child", status);
	drain(fd, "left for the parent");
	close(fd);
}

static void exec_queued(int arg)
{
	int status = 0;

	(void)arg;
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		char number[12], c;
		int fd = udp_connected(7003);

		ask(fd, 7003, "3 20");
		settle();
		say("peek", recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT));
		snprintf(number, sizeof(number), "%d", fd);
		execl("/proc/self/exe", "calls", "--drain", number, NULL);
		_exit(1);
	}
	waitpid(pid, &status, 0);
	say("exit", status);
}

static void exec_fails(int arg)
{
	int fd = udp_connected(7001);

	(void)arg;
	echo(fd, "before");
	say("execl", execl("/nonexistent", "x", NULL));
	echo(fd, "after");
	close(fd);
}

static void pass_queued(int arg)
{
	int sv[2], fd = udp_connected(7003), got;
	char cbuf[CMSG_SPACE(sizeof(int))] = { 0 }, b = 'x', c;
	struct iovec iov = { &b, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = sizeof(cbuf) };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);

	(void)arg;
	ask(fd, 7003, "3 20");
	settle();
	say("peek", recv(fd, &c, 1, MSG_PEEK | MSG_DONTWAIT));
	socketpair(AF_UNIX, SOCK_STREAM, 0, sv);
	*h = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(h), &fd, sizeof(fd));
	say("pass", sendmsg(sv[0], &m, 0));
	say("get", recvmsg(sv[1], &m, 0));
	memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(got));
	close(fd);
	drain(got, "by the passed one");
	close(got), close(sv[0]), close(sv[1]);
}

static void fork_new_in_child(int arg)
{
	int status = 0;

	(void)arg;
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		int fd = udp_connected(7001);
		echo(fd, "opened in the child");
		fflush(stdout);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	say("child", status);
}

static void pass_fd(int arg)
{
	int sv[2], fd = udp_connected(7001);
	char cbuf[CMSG_SPACE(sizeof(int))] = { 0 }, b = 'x';
	struct iovec iov = { &b, 1 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = sizeof(cbuf) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);

	(void)arg;
	echo(fd, "before");
	socketpair(AF_UNIX, SOCK_STREAM, 0, sv);
	*c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS };
	memcpy(CMSG_DATA(c), &fd, sizeof(fd));
	say("pass", sendmsg(sv[0], &m, 0));
	memset(cbuf, 0, sizeof(cbuf));
	say("get", recvmsg(sv[1], &m, 0));
	int got;
	memcpy(&got, CMSG_DATA(CMSG_FIRSTHDR(&m)), sizeof(got));
	close(fd);
	echo(got, "by the passed one");
	close(got), close(sv[0]), close(sv[1]);
}

static void close_range_all(int arg)
{
	int fd = udp_connected(7001), status = 0;

	(void)arg;
	echo(fd, "before");
	fflush(stdout);
	pid_t pid = fork();
	if (pid == 0) {
		closefrom(3);
		int n = udp_connected(7001); /* still a program that works */
		echo(n, "after closefrom");
		fflush(stdout);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	say("child", status);
	say("close_range", close_range(fd, fd, 0));
	say("gone", send(fd, "x", 1, 0));
	int n = udp_connected(7001);
	echo(n, "after close_range");
	close(n);
}

static void *receiver(void *arg)
{
	static char buf[4][64];
	int *v = arg;

	return (void *)recv(v[0], buf[v[1]], sizeof(buf[0]), 0);
}

static void threads_share(int arg)
{
	int fd = udp_connected(7005);
	pthread_t t[4];
	int v[4][2];
	long total = 0;

	(void)arg;
	for (int i = 0; i < 4; i++) {
		v[i][0] = fd, v[i][1] = i;
		pthread_create(&t[i], NULL, receiver, v[i]);
	}
	usleep(20000);
	for (int i = 0; i < 4; i++)
		send(fd, "to one of us", 12, 0);
	for (int i = 0; i < 4; i++) {
		void *r;
		pthread_join(t[i], &r);
		total += (long)r;
	}
	say("bytes", total);
	close(fd);
}

static void other_sockets(int arg)
{
	int sv[2], six = socket(AF_INET6, SOCK_DGRAM, 0), raw = socket(AF_INET, SOCK_STREAM, 0);
	char buf[8];

	(void)arg;
	socketpair(AF_UNIX, SOCK_DGRAM, 0, sv);
	say("unix", write(sv[0], "pair", 4));
	say("unix", read(sv[1], buf, sizeof(buf)));
	say_text("ipv6", six >= 0 ? "ok" : "no");
	say("tcp not connected", send(raw, "x", 1, MSG_NOSIGNAL));
	say("bad domain", socket(999, SOCK_DGRAM, 0));
	say("bad protocol", socket(AF_INET, SOCK_DGRAM, IPPROTO_TCP));
	close(sv[0]), close(sv[1]), close(six), close(raw);
}

static void loopback(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	socklen_t l = sizeof(a);
	int rx = udp(), tx = udp();
	char buf[16];

	(void)arg;
	inet_pton(AF_INET, "127.0.0.1", &a.sin_addr);
	say("bind", bind(rx, (void *)&a, sizeof(a)));
	getsockname(rx, (void *)&a, &l);
	say("send", sendto(tx, "local", 5, 0, (void *)&a, sizeof(a)));
	say_data("recv", buf, recv(rx, buf, sizeof(buf), 0));
	close(rx);
	rx = udp_any(); /* reached over the host's own address */
	a.sin_port = htons(my_port(rx));
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	say("send to myself", sendto(tx, "me", 2, 0, (void *)&a, sizeof(a)));
	say_data("recv", buf, recv(rx, buf, sizeof(buf), 0));
	close(rx), close(tx);
}

static void reuse_newest_wins(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int x = udp(), y = udp(), on = 1;
	char buf[16];

	(void)arg;
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	setsockopt(x, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	setsockopt(y, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	say("x", bind(x, (void *)&a, sizeof(a)));
	a.sin_port = htons(my_port(x));
	say("y", bind(y, (void *)&a, sizeof(a)));
	ask(x, 7001, "who gets it");
	settle();
	say_data("x", buf, recv(x, buf, sizeof(buf), MSG_DONTWAIT));
	say_data("y", buf, recv(y, buf, sizeof(buf), MSG_DONTWAIT));
	close(y);
	ask(x, 7001, "and now");
	settle();
	say_data("x alone", buf, recv(x, buf, sizeof(buf), MSG_DONTWAIT));
	close(x);
}

static void wildcard_and_specific(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int any = udp(), one = udp(), on = 1;
	char buf[16];

	(void)arg;
	setsockopt(any, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	bind(any, (void *)&a, sizeof(a));
	a.sin_port = htons(my_port(any));
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	say("specific", bind(one, (void *)&a, sizeof(a)));
	ask(any, 7001, "best match");
	settle();
	say_data("any", buf, recv(any, buf, sizeof(buf), MSG_DONTWAIT));
	say_data("one", buf, recv(one, buf, sizeof(buf), MSG_DONTWAIT));
	close(one);
	ask(any, 7001, "only one");
	settle();
	say_data("any", buf, recv(any, buf, sizeof(buf), MSG_DONTWAIT));
	close(any);
}

/* The newer one is bound to the interface, the older one to the address: the kernel asks for an address first. */
static void device_and_specific(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int one = udp(), any = udp(), on = 1;
	char buf[16], name[IF_NAMESIZE];

	(void)arg;
	setsockopt(any, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	setsockopt(one, SOL_SOCKET, SO_REUSEADDR, &on, sizeof(on));
	for (unsigned i = 1; i < 20; i++)
		if (if_indextoname(i, name) && strcmp(name, "lo"))
			break;
	say("device", setsockopt(any, SOL_SOCKET, SO_BINDTODEVICE, name, (socklen_t)strlen(name)));
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	bind(one, (void *)&a, sizeof(a));
	a.sin_port = htons(my_port(one));
	a.sin_addr.s_addr = 0;
	say("wildcard", bind(any, (void *)&a, sizeof(a)));
	ask(one, 7001, "best match");
	settle();
	say_data("any", buf, recv(any, buf, sizeof(buf), MSG_DONTWAIT));
	say_data("one", buf, recv(one, buf, sizeof(buf), MSG_DONTWAIT));
	close(one), close(any);
}

static void errno_kept(int arg)
{
	int fd = udp_connected(7001);
	char c[8];

	(void)arg;
	errno = 77;
	send(fd, "x", 1, 0);
	say("after send", errno);
	settle();
	errno = 78;
	recv(fd, c, sizeof(c), 0);
	say("after recv", errno);
	errno = 79;
	close(fd);
	say("after close", errno);
	errno = 80;
	fd = udp_bound();
	say("after bind", errno);
	close(fd);
}

/* It forks inside libc. */
static void forkpty_child(int arg)
{
	int fd = udp_connected(7001), master = -1;
	char c;

	(void)arg;
	echo(fd, "before");
	pid_t pid = forkpty(&master, NULL, NULL, NULL);
	if (pid == 0) {
		int own = udp_connected(7001);

		echo(own, "of its own");
		close(own), close(fd);
		_exit(0);
	}
	char text[256] = "";
	size_t n = 0;
	while (n < sizeof(text) - 1 && read(master, &c, 1) == 1)
		text[n++] = c;
	waitpid(pid, NULL, 0);
	text[strcspn(text, "\r")] = 0;
	say_text("the child said", text);
	echo(fd, "after");
	close(fd), close(master);
}

/* How Python's subprocess starts a program: the child closes what it does not need, in the memory of its parent. */
static void vfork_child_closes(int how)
{
	int fd = udp_connected(7001), more = udp_bound(), ep = epoll_create1(0), status;
	struct epoll_event ev = { .events = EPOLLIN, .data.fd = fd };

	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
	pid_t pid = vfork();
	if (pid == 0) {
		if (how == 0)
			close_range(3, ~0u, 0);
		else if (how == 1)
			close(fd), close(more), close(ep);
		else
			dup2(fd, more), dup2(1, fd), open("/dev/null", O_RDONLY);
		_exit(0);
	}
	waitpid(pid, &status, 0);
	say("status", status);
	echo(fd, "still there");
	send(fd, "one more", 8, 0);
	say("waited", epoll_wait(ep, &ev, 1, 500));
	int late = udp_connected(7001); /* a socket that is made after it joins the set */
	epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL);
	epoll_ctl(ep, EPOLL_CTL_ADD, late, &ev);
	send(late, "late", 4, 0);
	say("waited for the late one", epoll_wait(ep, &ev, 1, 500));
	ask(more, 7001, "the other");
	settle();
	char buf[16];
	say_data("the other", buf, recv(more, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd), close(more), close(late), close(ep);
}

const struct call_case life_cases[] = {
	{ "dup", dups, 0 }, { "dup2", dups, 1 }, { "dup3", dups, 2 }, { "F_DUPFD", dups, 3 }, { "F_DUPFD_CLOEXEC", dups, 4 },
	{ "dup onto a socket", dup_onto_socket, 0 },
	{ "nonblock F_SETFL", nonblock_shared, 0 }, { "nonblock FIONBIO", nonblock_shared, 1 },
	{ "use after close", use_after_close, 0 }, { "reopen port", reopen_port, 0 },
	{ "reopen port, unread", reopen_unread, 0 }, { "reopen port, unread, connected", reopen_unread, 1 },
	{ "goes home, queued", home_queued, 0 }, { "goes home, queued and seen", home_queued, 1 },
	{ "goes home, queued, refused", home_refused, 0 },
	{ "shutdown rd", shutdowns, SHUT_RD }, { "shutdown wr", shutdowns, SHUT_WR }, { "shutdown rdwr", shutdowns, SHUT_RDWR },
	{ "shutdown wakes", shutdown_wakes, 0 },
	{ "fork child uses", fork_child_uses, 0 }, { "_Fork child uses", fork_child_uses, 1 },
	{ "fork server", fork_server, 0 },
	{ "fork new in child", fork_new_in_child, 0 },
	{ "fork queued", fork_queued, 0 }, { "fork queued, connected", fork_queued, QUEUED_CONNECTED },
	{ "fork queued, home", fork_queued, QUEUED_HOME },
	{ "exec queued", exec_queued, 0 }, { "exec fails", exec_fails, 0 }, { "pass fd queued", pass_queued, 0 },
	{ "pass fd", pass_fd, 0 }, { "close_range", close_range_all, 0 },
	{ "threads share", threads_share, 0 }, { "other sockets", other_sockets, 0 }, { "loopback", loopback, 0 },
	{ "reuseaddr newest wins", reuse_newest_wins, 0 }, { "wildcard and specific", wildcard_and_specific, 0 },
	{ "device and specific", device_and_specific, 0 },
	{ "forkpty", forkpty_child, 0 },
	{ "vfork child: close_range", vfork_child_closes, 0 }, { "vfork child: close", vfork_child_closes, 1 },
	{ "vfork child: dup2", vfork_child_closes, 2 },
	{ "errno kept", errno_kept, 0 },
	{ 0 },
};
