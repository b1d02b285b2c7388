#include "calls.h"

enum { SELECT, PSELECT, POLL, PPOLL, EPOLL, EPOLL_P, EPOLL_P2 };

/* Wait until fd can do `events` (POLLIN, POLLOUT) or ms are over; returns what the call did, *got the events. */
static int wait_for(int way, int fd, short events, int ms, short *got)
{
	struct timespec ts = { ms / 1000, ms % 1000 * 1000000L };
	struct timeval tv = { ms / 1000, ms % 1000 * 1000 };
	struct pollfd p = { .fd = fd, .events = events };
	struct epoll_event ev = { .events = (uint32_t)events, .data.u64 = 0x1234567890abcdefull }, out = { 0 };
	fd_set r, w;
	int n, ep;

	*got = 0;
	if (way == SELECT || way == PSELECT) {
		FD_ZERO(&r);
		FD_ZERO(&w);
		if (events & POLLIN)
			FD_SET(fd, &r);
		if (events & POLLOUT)
			FD_SET(fd, &w);
		n = way == SELECT ? select(fd + 1, &r, &w, NULL, ms < 0 ? NULL : &tv)
				  : pselect(fd + 1, &r, &w, NULL, ms < 0 ? NULL : &ts, NULL);
		if (n > 0)
			*got = (FD_ISSET(fd, &r) ? POLLIN : 0) | (FD_ISSET(fd, &w) ? POLLOUT : 0);
		return n;
	}
	if (way == POLL || way == PPOLL) {
		n = way == POLL ? poll(&p, 1, ms) : ppoll(&p, 1, ms < 0 ? NULL : &ts, NULL);
		*got = p.revents;
		return n;
	}
	ep = epoll_create1(EPOLL_CLOEXEC);
	if (epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev))
		return -1;
	n = way == EPOLL ? epoll_wait(ep, &out, 1, ms)
	    : way == EPOLL_P ? epoll_pwait(ep, &out, 1, ms, NULL)
			     : epoll_pwait2(ep, &out, 1, ms < 0 ? NULL : &ts, NULL);
	if (n == 1 && out.data.u64 != ev.data.u64)
		say_text("data", "wrong");
	*got = (short)out.events;
	close(ep);
	return n;
}

static void show(int way, int fd, short events, int ms, const char *what)
{
	short got;

	say(what, wait_for(way, fd, events, ms, &got));
	say("  events", got);
}

static void ready(int way)
{
	char buf[16];
	int fd = udp_connected(7001);

	show(way, fd, POLLIN, 0, "before");
	send(fd, "x", 1, 0);
	show(way, fd, POLLIN, 1000, "arrives");
	show(way, fd, POLLIN, 0, "still there");
	recv(fd, buf, sizeof(buf), 0);
	show(way, fd, POLLIN, 0, "taken");
	close(fd);
}

static void delayed(int way)
{
	int fd = udp_connected(7005);

	send(fd, "x", 1, 0);
	show(way, fd, POLLIN, 2000, "wakes");
	close(fd);
}

static void delayed_for_ever(int way)
{
	int fd = udp_connected(7005);

	send(fd, "x", 1, 0);
	show(way, fd, POLLIN, -1, "wakes");
	close(fd);
}

static void times_out(int way)
{
	struct timespec t;
	int fd = udp_bound();

	now(&t);
	show(way, fd, POLLIN, 50, "nothing");
	long ms = elapsed_ms(&t);
	say_text("in time", ms >= 49 && ms < 250 ? "yes" : "no");
	close(fd);
}

static void writable(int way)
{
	int fd = udp_connected(7001);

	show(way, fd, POLLIN | POLLOUT, 1000, "out");
	send(fd, "x", 1, 0);
	settle();
	show(way, fd, POLLIN | POLLOUT, 1000, "both");
	close(fd);
}

static void error(int way)
{
	char c;
	int fd = udp_connected(7004);

	send(fd, "x", 1, 0);
	settle();
	show(way, fd, POLLIN, 1000, "refused");
	say("recv", recv(fd, &c, 1, MSG_DONTWAIT));
	show(way, fd, POLLIN, 0, "after");
	close(fd);
}

static void mixed(int way)
{
	struct timespec t;
	int p[2], fd = udp_connected(7001);
	short got;

	/* a pipe and a datagram socket; only epoll and poll here take several in this helper */
	(void)way;
	if (pipe(p))
		return;
	struct pollfd v[3] = { { .fd = fd, .events = POLLIN }, { .fd = p[0], .events = POLLIN }, { .fd = -1, .events = POLLIN } };
	say("none", poll(v, 3, 0));
	if (write(p[1], "y", 1) != 1)
		return;
	say("pipe", poll(v, 3, 1000));
	say("pipe events", v[1].revents);
	send(fd, "x", 1, 0);
	settle();
	say("both", poll(v, 3, 1000));
	say("socket events", v[0].revents), say("pipe events", v[1].revents), say("ignored", v[2].revents);
	v[2] = (struct pollfd){ .fd = 9999, .events = POLLIN };
	say("with a bad one", poll(v, 3, 0));
	say("nval", v[2].revents);
	now(&t);
	(void)got;
	close(fd), close(p[0]), close(p[1]);
}

static volatile int handled;
static void on_alarm(int sig)
{
	(void)sig;
	handled++;
}

static void alarm_in(int ms, int flags)
{
	struct sigaction sa = { .sa_handler = on_alarm, .sa_flags = flags };
	struct itimerval it = { .it_value = { 0, ms * 1000 } };

	sigaction(SIGALRM, &sa, NULL);
	setitimer(ITIMER_REAL, &it, NULL);
}

static void interrupted(int way)
{
	int fd = udp_bound();

	handled = 0;
	alarm_in(40, SA_RESTART);
	show(way, fd, POLLIN, 2000, "interrupted");
	say("handled", handled);
	signal(SIGALRM, SIG_DFL);
	close(fd);
}

static void recv_interrupted(int flags)
{
	char c;
	int fd = udp_bound();
	struct timespec t;

	handled = 0;
	now(&t);
	alarm_in(40, flags);
	if (flags & SA_RESTART) { /* the call goes on: an answer ends it */
		struct sockaddr_in a = peer(7005);
		usleep(20000);
		sendto(fd, "x", 1, 0, (void *)&a, sizeof(a));
	}
	say("recv", recv(fd, &c, 1, 0));
	say("handled", handled);
	signal(SIGALRM, SIG_DFL);
	close(fd);
}

static void recv_timeo_interrupted(int arg)
{
	struct timeval tv = { 1, 0 };
	char c;
	int fd = udp_bound();

	(void)arg;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	handled = 0;
	alarm_in(40, SA_RESTART);
	say("recv", recv(fd, &c, 1, 0));
	signal(SIGALRM, SIG_DFL);
	close(fd);
}

static void unmasked_in_wait(int way)
{
	sigset_t block, old, empty;
	struct timespec ts = { 2, 0 };
	struct epoll_event ev = { .events = EPOLLIN };
	int fd = udp_bound(), r = -1;
	fd_set rs;

	sigemptyset(&empty);
	sigemptyset(&block);
	sigaddset(&block, SIGALRM);
	sigprocmask(SIG_BLOCK, &block, &old);
	handled = 0;
	alarm_in(20, 0);
	usleep(60000); /* pending, blocked */
	say("before", handled);
	struct pollfd p = { .fd = fd, .events = POLLIN };
	if (way == PPOLL) {
		r = ppoll(&p, 1, &ts, &empty);
	} else if (way == PSELECT) {
		FD_ZERO(&rs);
		FD_SET(fd, &rs);
		r = pselect(fd + 1, &rs, NULL, NULL, &ts, &empty);
	} else {
		int ep = epoll_create1(0);
		epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
		r = epoll_pwait(ep, &ev, 1, 2000, &empty);
		close(ep);
	}
	say("wait", r);
	say("handled", handled);
	sigprocmask(SIG_SETMASK, &old, NULL);
	signal(SIGALRM, SIG_DFL);
	close(fd);
}

/* --- epoll --- */

static int ep_add(int ep, int fd, uint32_t events)
{
	struct epoll_event ev = { .events = events, .data.fd = fd };

	return epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
}

static void ep_show(int ep, int ms, const char *what)
{
	struct epoll_event v[8];
	int n = epoll_wait(ep, v, 8, ms);
	uint32_t all = 0;

	for (int i = 0; i < n; i++)
		all |= v[i].events;
	say(what, n);
	say("  events", all);
}

static void edge(int events)
{
	char buf[64];
	int ep = epoll_create1(0), fd = udp_connected(7003);

	ep_add(ep, fd, (uint32_t)events | EPOLLET);
	ep_show(ep, 0, "at first");
	send(fd, "1 4", 3, 0);
	settle();
	ep_show(ep, 500, "edge");
	ep_show(ep, 50, "no second edge");
	send(fd, "1 4", 3, 0);
	settle();
	ep_show(ep, 500, "new edge, unread data");
	recv(fd, buf, sizeof(buf), 0);
	ep_show(ep, 50, "no edge by reading");
	recv(fd, buf, sizeof(buf), 0);
	send(fd, "1 4", 3, 0);
	settle();
	ep_show(ep, 500, "edge after drain");
	close(fd), close(ep);
}

static void level(int arg)
{
	char buf[64];
	int ep = epoll_create1(0), fd = udp_connected(7003);

	(void)arg;
	ep_add(ep, fd, EPOLLIN);
	send(fd, "2 4", 3, 0);
	settle();
	ep_show(ep, 500, "two there");
	recv(fd, buf, sizeof(buf), 0);
	ep_show(ep, 0, "one there");
	recv(fd, buf, sizeof(buf), 0);
	ep_show(ep, 0, "none there");
	close(fd), close(ep);
}

static void oneshot(int extra)
{
	struct epoll_event ev = { .events = EPOLLIN | EPOLLONESHOT | (uint32_t)extra };
	char buf[64];
	int ep = epoll_create1(0), fd = udp_connected(7003);

	ep_add(ep, fd, EPOLLIN | EPOLLONESHOT | (uint32_t)extra);
	send(fd, "2 4", 3, 0);
	settle();
	ep_show(ep, 500, "once");
	ep_show(ep, 30, "disarmed");
	recv(fd, buf, sizeof(buf), 0);
	say("rearm", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	ep_show(ep, 500, "again");
	recv(fd, buf, sizeof(buf), 0);
	say("rearm", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	ep_show(ep, 0, "nothing left");
	close(fd), close(ep);
}

static void modify(int arg)
{
	struct epoll_event ev = { .events = 0 };
	int ep = epoll_create1(0), fd = udp_connected(7003);

	(void)arg;
	ep_add(ep, fd, EPOLLIN);
	send(fd, "1 4", 3, 0);
	settle();
	say("to nothing", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	ep_show(ep, 0, "quiet");
	ev.events = EPOLLOUT;
	say("to out", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	ep_show(ep, 0, "out only");
	ev.events = EPOLLIN | EPOLLOUT;
	say("to both", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	ep_show(ep, 0, "both");
	say("del", epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL));
	ep_show(ep, 0, "gone");
	close(fd), close(ep);
}

static void ctl_errors(int arg)
{
	struct epoll_event ev = { .events = EPOLLIN };
	int ep = epoll_create1(0), fd = udp_bound();

	(void)arg;
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev));
	say("twice", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev));
	say("itself", epoll_ctl(ep, EPOLL_CTL_ADD, ep, &ev));
	say("bad fd", epoll_ctl(ep, EPOLL_CTL_ADD, 9999, &ev));
	say("bad op", epoll_ctl(ep, 77, fd, &ev));
	say("null event", epoll_ctl(ep, EPOLL_CTL_MOD, fd, NULL));
	say("del", epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL));
	say("del twice", epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL));
	say("mod absent", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	say("not an epoll", epoll_ctl(fd, EPOLL_CTL_ADD, ep, &ev));
	say("zero events", epoll_wait(ep, &ev, 0, 0));
	say("negative size", epoll_create(-1));
	say("wait on a socket", epoll_wait(fd, &ev, 1, 0));
	close(fd), close(ep);
}

static void two_sets(int arg)
{
	char c;
	int a = epoll_create1(0), b = epoll_create1(0), fd = udp_connected(7001);

	(void)arg;
	say("first", ep_add(a, fd, EPOLLIN));
	say("second", ep_add(b, fd, EPOLLIN | EPOLLET));
	send(fd, "x", 1, 0);
	settle();
	ep_show(a, 500, "level set");
	ep_show(b, 500, "edge set");
	ep_show(b, 0, "edge set again");
	recv(fd, &c, 1, 0);
	ep_show(a, 0, "level set after");
	close(a), close(b), close(fd);
}

static void close_leaves(int arg)
{
	int ep = epoll_create1(0), fd = udp_connected(7001);

	(void)arg;
	ep_add(ep, fd, EPOLLIN);
	send(fd, "x", 1, 0);
	settle();
	close(fd);
	ep_show(ep, 30, "closed");
	close(ep);
}

static void dup_stays(int arg)
{
	int ep = epoll_create1(0), fd = udp_connected(7001), d = dup(fd);

	(void)arg;
	ep_add(ep, fd, EPOLLIN);
	close(fd); /* the file lives on in d: the kernel keeps the registration */
	send(d, "x", 1, 0);
	settle();
	ep_show(ep, 200, "by the dup");
	char c;
	say("recv", recv(d, &c, 1, MSG_DONTWAIT));
	close(d);
	ep_show(ep, 0, "now gone");
	close(ep);
}

static void nested(int arg)
{
	int outer = epoll_create1(0), inner = epoll_create1(0), fd = udp_connected(7001);

	(void)arg;
	ep_add(inner, fd, EPOLLIN);
	say("nest", ep_add(outer, inner, EPOLLIN));
	ep_show(outer, 0, "before");
	send(fd, "x", 1, 0);
	settle();
	ep_show(outer, 500, "outer");
	ep_show(inner, 0, "inner");
	struct pollfd p = { .fd = inner, .events = POLLIN };
	say("poll on a set", poll(&p, 1, 0));
	close(fd), close(inner), close(outer);
}

static void poll_on_set(int arg)
{
	int ep = epoll_create1(0), fd = udp_connected(7005);
	struct pollfd p = { .fd = ep, .events = POLLIN };

	(void)arg;
	ep_add(ep, fd, EPOLLIN);
	say("before", poll(&p, 1, 0));
	send(fd, "x", 1, 0);
	say("wakes", poll(&p, 1, 2000));
	ep_show(ep, 0, "event");
	close(fd), close(ep);
}

static void add_before_bind(int arg)
{
	struct sockaddr_in a = peer(7001);
	int ep = epoll_create1(0), fd = udp();

	(void)arg;
	ep_add(ep, fd, EPOLLIN);
	say("connect", connect(fd, (void *)&a, sizeof(a)));
	send(fd, "x", 1, 0);
	ep_show(ep, 1000, "arrives");
	close(fd), close(ep);
}

static void several_ready(int max)
{
	int ep = epoll_create1(0), fd[6], seen = 0;
	struct epoll_event v[8];

	for (int i = 0; i < 6; i++) {
		fd[i] = udp_connected(7001);
		ep_add(ep, fd[i], EPOLLIN);
		send(fd[i], "x", 1, 0);
	}
	settle();
	for (int round = 0; round < 12 / max + 1; round++) { /* everybody gets a turn */
		int n = epoll_wait(ep, v, max, 0);

		for (int i = 0; i < n; i++)
			for (int k = 0; k < 6; k++)
				if (v[i].data.fd == fd[k])
					seen |= 1 << k;
	}
	say("seen", seen);
	for (int i = 0; i < 6; i++)
		close(fd[i]);
	close(ep);
}

static void *add_later(void *arg)
{
	int *v = arg;

	usleep(50000);
	ep_add(v[0], v[1], EPOLLIN);
	send(v[1], "x", 1, 0);
	return NULL;
}

static void added_while_waiting(int arg)
{
	int v[2] = { epoll_create1(0), udp_connected(7001) }, p[2];
	pthread_t t;

	(void)arg;
	if (pipe(p))
		return;
	ep_add(v[0], p[0], EPOLLIN); /* a set without any socket: the wait starts in the kernel */
	pthread_create(&t, NULL, add_later, v);
	ep_show(v[0], 2000, "woken by a later member");
	pthread_join(t, NULL);
	close(v[0]), close(v[1]), close(p[0]), close(p[1]);
}

static void kernel_event_among(int arg)
{
	int ep = epoll_create1(0), p[2], fd = udp_connected(7003), pipes = 0;
	struct epoll_event v[1];

	(void)arg;
	if (pipe(p))
		return;
	ep_add(ep, fd, EPOLLIN);
	ep_add(ep, p[0], EPOLLIN);
	send(fd, "20 4", 4, 0);
	if (write(p[1], "y", 1) != 1)
		return;
	settle();
	for (int i = 0; i < 20; i++) /* a socket that is always ready must not hide the pipe */
		if (epoll_wait(ep, v, 1, 0) == 1 && v[0].data.fd == p[0])
			pipes = 1;
	say("pipe seen", pipes);
	close(ep), close(fd), close(p[0]), close(p[1]);
}

static void select_high_fd(int arg)
{
	int fd = udp_connected(7001), high = fcntl(fd, F_DUPFD, 700);
	fd_set r;
	struct timeval tv = { 1, 0 };

	(void)arg;
	send(fd, "x", 1, 0);
	FD_ZERO(&r);
	FD_SET(high, &r);
	say("select", select(high + 1, &r, NULL, NULL, &tv));
	say("set", FD_ISSET(high, &r));
	say_text("time left", tv.tv_sec == 0 && tv.tv_usec > 0 ? "yes" : "no");
	close(fd), close(high);
}

static void bad_waits(int arg)
{
	struct pollfd p = { .fd = udp_bound(), .events = POLLIN };
	struct timespec bad = { 0, 2000000000 };
	struct timeval badv = { -1, 0 };
	fd_set r;

	(void)arg;
	say("ppoll", ppoll(&p, 1, &bad, NULL));
	FD_ZERO(&r);
	FD_SET(p.fd, &r);
	say("pselect", pselect(p.fd + 1, &r, NULL, NULL, &bad, NULL));
	say("select", select(p.fd + 1, &r, NULL, NULL, &badv));
	say("select nfds", select(-1, &r, NULL, NULL, NULL));
	say("no fds", poll(NULL, 0, 10));
	close(p.fd);
	struct timeval zero = { 0, 0 };
	FD_ZERO(&r);
	FD_SET(p.fd, &r);
	say("select closed", select(p.fd + 1, &r, NULL, NULL, &zero));
}

static void say_wait(int ep, int ms, const char *what)
{
	struct epoll_event out[4] = { 0 };

	say(what, epoll_wait(ep, out, 4, ms));
	say("  events", out[0].events);
}

/* A socket on a ring whose datagrams come by the kernel, from this host: EAGAIN must not hide one. */
static int fed_locally(int *sender, struct sockaddr_in *to)
{
	int fd = udp_any();
	socklen_t len = sizeof(*to);

	ask(fd, 7001, "warm");
	settle();
	fcntl(fd, F_SETFL, O_NONBLOCK);
	while (recv(fd, &(char){ 0 }, 1, 0) >= 0)
		;
	getsockname(fd, (void *)to, &len);
	inet_pton(AF_INET, my_ip, &to->sin_addr);
	*sender = udp();
	return fd;
}

static void local_edges(int in_between)
{
	struct epoll_event ev = { .events = EPOLLIN | EPOLLET }, out;
	struct sockaddr_in to;
	int sender, fd = fed_locally(&sender, &to), ep = epoll_create1(0), got = 0;
	char buf[16];

	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
	epoll_wait(ep, &out, 1, 0);
	for (int i = 0; i < 20; i++) {
		for (int k = 0; k < 3; k++)
			sendto(sender, "local", 5, 0, (void *)&to, sizeof(to));
		if (epoll_wait(ep, &out, 1, 300) != 1)
			break;
		for (int k = 0; recv(fd, buf, sizeof(buf), 0) >= 0; k++, got++)
			if (in_between && k == 1)
				sendto(sender, "more", 4, 0, (void *)&to, sizeof(to));
	}
	say("received", got);
	close(sender), close(fd), close(ep);
}

static void local_looks(int way)
{
	struct sockaddr_in to;
	struct mmsghdr v[8] = { 0 };
	struct iovec iov[8];
	char buf[8][16];
	int sender, fd = fed_locally(&sender, &to), n = 0;
	short got;

	for (int k = 0; k < 8; k++) {
		iov[k] = (struct iovec){ buf[k], sizeof(buf[k]) };
		v[k].msg_hdr = (struct msghdr){ .msg_iov = &iov[k], .msg_iovlen = 1 };
	}
	for (int i = 0; i < 20; i++) {
		for (int k = 0; k < (way < 0 ? 5 : 1); k++)
			sendto(sender, "local", 5, 0, (void *)&to, sizeof(to));
		if (way < 0)
			wait_for(POLL, fd, POLLIN, 300, &got);
		else
			n += wait_for(way, fd, POLLIN, 300, &got) == 1;
		if (way < 0)
			n += recvmmsg(fd, v, 8, way == -1 ? MSG_DONTWAIT : MSG_WAITFORONE, NULL);
		else
			n += recv(fd, buf[0], 16, MSG_PEEK) == 5 && recv(fd, buf[0], 16, 0) == 5;
	}
	say("found", n);
	say("no more", recv(fd, buf[0], 16, 0));
	close(sender), close(fd);
}

/* The kernel wakes a writer when the packet has left: an edge after each send. */
static void edge_of_send(int in)
{
	struct epoll_event ev = { .events = EPOLLOUT | EPOLLET | in, .data.u64 = 7 };
	struct epoll_event level = { .events = EPOLLIN, .data.u64 = 9 };
	int fd = udp_connected(7001), ep = epoll_create1(EPOLL_CLOEXEC), other = epoll_create1(EPOLL_CLOEXEC);
	char buf[16];

	ask(fd, 7001, "warm");
	settle();
	drain(fd, "warm");
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev) | epoll_ctl(other, EPOLL_CTL_ADD, fd, &level));
	say_wait(ep, 0, "added");
	say_wait(ep, 0, "once");
	for (int i = 0; i < 2; i++) {
		ask(fd, 7001, "x");
		settle();
		recv(fd, buf, sizeof(buf), 0);
		say_wait(ep, 0, "sent");
		say_wait(ep, 10, "and no more");
		say_wait(other, 0, "for reading");
	}
	ask(fd, 7001, "y");
	settle();
	say_wait(ep, 0, "sent and answered");
	say_wait(ep, 0, "once");
	ev.events |= EPOLLONESHOT;
	say("modify", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	ask(fd, 7001, "z");
	settle();
	say_wait(ep, 0, "one shot");
	ask(fd, 7001, "z");
	settle();
	say_wait(ep, 0, "spent");
	ev.events = EPOLLIN | EPOLLET;
	say("modify", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &ev));
	drain(fd, "answers");
	say("delete", epoll_ctl(ep, EPOLL_CTL_DEL, fd, NULL));
	send(fd, "x", 1, 0);
	say_wait(ep, 0, "deleted");
	close(ep), close(other), close(fd);
}

static void *wait_for_edge(void *ep)
{
	say_wait(*(int *)ep, 2000, "asleep");
	return NULL;
}

static void edge_wakes(int arg)
{
	struct epoll_event ev = { .events = EPOLLOUT | EPOLLET, .data.u64 = 7 };
	int fd = udp_connected(7001), ep = epoll_create1(EPOLL_CLOEXEC);
	struct timespec t;
	pthread_t thread;

	(void)arg;
	ask(fd, 7001, "warm");
	settle();
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev));
	say_wait(ep, 0, "added");
	now(&t);
	pthread_create(&thread, NULL, wait_for_edge, &ep);
	settle();
	ask(fd, 7001, "x");
	pthread_join(thread, NULL);
	say_text("woken", elapsed_ms(&t) < 1500 ? "in time" : "late");
	close(ep), close(fd);
}

#define PER_WAIT(label, fn) \
	{ label " select", fn, SELECT }, { label " pselect", fn, PSELECT }, { label " poll", fn, POLL }, \
	{ label " ppoll", fn, PPOLL }, { label " epoll", fn, EPOLL }, { label " epoll_pwait", fn, EPOLL_P }, \
	{ label " epoll_pwait2", fn, EPOLL_P2 }

const struct call_case mux_cases[] = {
	PER_WAIT("ready", ready),
	PER_WAIT("wait delayed", delayed),
	PER_WAIT("wait for ever", delayed_for_ever),
	PER_WAIT("times out", times_out),
	PER_WAIT("writable", writable),
	PER_WAIT("wait error", error),
	PER_WAIT("interrupted", interrupted),
	{ "mixed fds", mixed, 0 },
	{ "recv EINTR", recv_interrupted, 0 }, { "recv SA_RESTART", recv_interrupted, SA_RESTART },
	{ "recv timeo EINTR", recv_timeo_interrupted, 0 },
	{ "unmasked ppoll", unmasked_in_wait, PPOLL }, { "unmasked pselect", unmasked_in_wait, PSELECT },
	{ "unmasked epoll", unmasked_in_wait, EPOLL_P },
	{ "epoll edge", edge, EPOLLIN }, { "epoll edge in and out", edge, EPOLLIN | EPOLLOUT },
	{ "epoll edge of a send", edge_of_send, 0 }, { "epoll edge of a send and in", edge_of_send, EPOLLIN },
	{ "epoll edge of a send wakes", edge_wakes, 0 },
	{ "epoll edge by the kernel", local_edges, 0 }, { "epoll edge by the kernel, more", local_edges, 1 },
	{ "by the kernel: poll", local_looks, POLL }, { "by the kernel: select", local_looks, SELECT },
	{ "by the kernel: epoll", local_looks, EPOLL }, { "by the kernel: recvmmsg", local_looks, -1 },
	{ "by the kernel: recvmmsg WAITFORONE", local_looks, -2 },
	{ "epoll level", level, 0 },
	{ "epoll oneshot", oneshot, 0 }, { "epoll oneshot edge", oneshot, (int)EPOLLET },
	{ "epoll modify", modify, 0 }, { "epoll errors", ctl_errors, 0 }, { "epoll two sets", two_sets, 0 },
	{ "epoll close", close_leaves, 0 }, { "epoll dup", dup_stays, 0 }, { "epoll nested", nested, 0 },
	{ "epoll in poll", poll_on_set, 0 }, { "epoll before bind", add_before_bind, 0 },
	{ "epoll one at a time", several_ready, 1 }, { "epoll four at a time", several_ready, 4 },
	{ "epoll added while waiting", added_while_waiting, 0 }, { "epoll fair to pipes", kernel_event_among, 0 },
	{ "select high fd", select_high_fd, 0 }, { "bad waits", bad_waits, 0 },
	{ 0 },
};
