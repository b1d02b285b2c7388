/* Waiting: timeouts, signals, readiness. */
#include "tcp_calls.h"

static volatile sig_atomic_t signals;

static void on_signal(int sig)
{
	(void)sig;
	signals++;
}

static void handle(int sig, int flags)
{
	struct sigaction sa = { .sa_handler = on_signal, .sa_flags = flags };

	signals = 0;
	sigaction(sig, &sa, NULL);
}

static void alarm_in(int ms)
{
	struct itimerval it = { { 0 }, { 0, ms * 1000 } };

	setitimer(ITIMER_REAL, &it, NULL);
}

/* the watchdog of calls.c is the same timer */
static void alarm_back(void)
{
	signal(SIGALRM, SIG_DFL);
	alarm(8);
}

static void receive_timeout(int accepted)
{
	struct timeval tv = { 0, 70000 }, got = { 9, 9 };
	struct timespec t;
	char c[8];
	int fd = tcp_pair(accepted);

	say("SO_RCVTIMEO", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)));
	say("getsockopt", getsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &got, &(socklen_t){ sizeof(got) }));
	say("s", got.tv_sec), say_yes("about 70 ms", got.tv_usec >= 70000 && got.tv_usec < 76000);
	now(&t);
	say("recv", recv(fd, c, 8, 0));
	say_yes("waited", elapsed_ms(&t) >= 65 && elapsed_ms(&t) < 1000);
	say("read", read(fd, c, 8));
	tell("later 20 send 3");
	say_data("in time", c, recv(fd, c, 8, 0));
	tv.tv_usec = 0;
	say("none", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)));
	tell("later 100 send 3");
	say_data("waits for long", c, recv(fd, c, 8, 0));
	say("bad", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &(struct timeval){ 0, 2000000 }, sizeof(tv)));
	say("short", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, 4));
	close(fd);
}

static void interrupted(int restart)
{
	char c[8];
	int fd = tcp_client();

	handle(SIGALRM, restart ? SA_RESTART : 0);
	tell("later 150 send 3");
	alarm_in(40);
	say_data("recv", c, recv(fd, c, 8, 0));
	say("signals", signals);
	alarm_back();
	close(fd);
}

/* With a timeout the kernel does not restart. */
static void interrupted_timed(int restart)
{
	struct timeval tv = { 2, 0 };
	char c[8];
	int fd = tcp_client();

	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	handle(SIGALRM, restart ? SA_RESTART : 0);
	tell("later 150 send 3");
	alarm_in(40);
	say_data("recv", c, recv(fd, c, 8, 0));
	say("signals", signals);
	alarm_back();
	close(fd);
}

static void interrupted_send(int restart)
{
	static char big[2000000];
	long r;

	tell("rcvbuf 8192");
	int fd = tcp_client();
	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int));
	handle(SIGALRM, restart ? SA_RESTART : 0);
	alarm_in(60);
	tell("later 300 reset");
	r = send(fd, big, sizeof(big), MSG_NOSIGNAL);
	say_yes("a part", r > 10000 && r < 1000000);
	say("signals", signals);
	fill_window(fd);
	alarm_in(60);
	say_yes("hardly any", send(fd, big, sizeof(big), MSG_NOSIGNAL) < 90000);
	say("signals", signals);
	alarm_back();
	close(fd);
}

/* The peer reads nothing. */
static void interrupted_linger(int restart)
{
	struct timespec a, b;
	struct linger l = { 1, 5 };

	tell("rcvbuf 8192");
	int fd = tcp_client();
	fill_window(fd);
	setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof(l));
	handle(SIGALRM, restart ? SA_RESTART : 0);
	alarm_in(300);
	clock_gettime(CLOCK_MONOTONIC, &a);
	say("close", close(fd));
	clock_gettime(CLOCK_MONOTONIC, &b);
	say_yes("at the signal", b.tv_sec - a.tv_sec + (b.tv_nsec - a.tv_nsec) / 1e9 < 2);
	say("signals", signals);
	alarm_back();
}

static void interrupted_wait_all(int restart)
{
	char c[32];
	int fd = tcp_client();

	handle(SIGALRM, restart ? SA_RESTART : 0);
	tell("send 5");
	settle();
	tell("later 150 send 5");
	alarm_in(40);
	say_data("recv", c, recv(fd, c, 10, MSG_WAITALL));
	say("signals", signals);
	alarm_back();
	close(fd);
}

/* The signal comes while the shim opens its session and ring in the call, which takes some 20 ms in a program's first
 * one (test_tcp_calls.py has a program for each). */
enum { BY_ACCEPT, BY_POLL, BY_SELECT, BY_CONNECT, RESTARTED = 10 };

static int first_wait(int fd, int how)
{
	struct sockaddr_in nobody = peer(TCP_PORT);
	struct pollfd p = { .fd = fd, .events = POLLIN };
	fd_set r;

	if (how == BY_ACCEPT)
		return accept(fd, NULL, NULL);
	if (how == BY_POLL)
		return poll(&p, 1, 1000);
	nobody.sin_addr.s_addr ^= htonl(64);
	if (how == BY_CONNECT)
		return connect(fd, (void *)&nobody, sizeof(nobody));
	FD_ZERO(&r);
	FD_SET(fd, &r);
	return select(fd + 1, &r, NULL, NULL, &(struct timeval){ 1, 0 });
}

static void interrupted_first(int how)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	struct timeval tv = { 1, 0 };
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	inet_pton(AF_INET, my_ip, &a.sin_addr);
	if (how % RESTARTED != BY_CONNECT && (bind(fd, (void *)&a, sizeof(a)) || listen(fd, 4)))
		say("listen", -1);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv));
	if (how < RESTARTED)
		setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &tv, sizeof(tv));
	handle(SIGALRM, how >= RESTARTED ? SA_RESTART : 0);
	alarm_in(5);
	say("call", first_wait(fd, how % RESTARTED));
	say("signals", signals);
	alarm_back();
	close(fd);
}

/* It goes on, and says what came. */
static void restarted_first(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int l = socket(AF_INET, SOCK_STREAM, 0), fd;

	(void)arg;
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	if (bind(l, (void *)&a, sizeof(a)) || listen(l, 4))
		say("listen", -1);
	handle(SIGALRM, SA_RESTART);
	tell("later 150 connect %d", my_port(l));
	alarm_in(5);
	fd = accept(l, NULL, NULL);
	say_yes("accepted", fd >= 0);
	say("signals", signals);
	alarm_back();
	close(fd), close(l);
}

/* What is ready is told before the mask lets a signal in, and what is not waits for none. */
static void masked(int ready)
{
	int fd = tcp_client(), ep = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN };
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec zero = { 0 };
	sigset_t usr1, none;
	fd_set r;

	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
	sigemptyset(&none), sigemptyset(&usr1), sigaddset(&usr1, SIGUSR1);
	handle(SIGUSR1, 0);
	sigprocmask(SIG_BLOCK, &usr1, NULL);
	if (ready)
		tell("send 3");
	settle();
	raise(SIGUSR1);
	say("ppoll", ppoll(&p, 1, &zero, &none)), say("signals", signals);
	raise(SIGUSR1);
	FD_ZERO(&r);
	FD_SET(fd, &r);
	say("pselect", pselect(fd + 1, &r, NULL, NULL, &zero, &none)), say("signals", signals);
	raise(SIGUSR1);
	say("epoll_pwait", epoll_pwait(ep, &e, 1, 0, &none)), say("signals", signals);
	sigprocmask(SIG_UNBLOCK, &usr1, NULL);
	say("signals", signals);
	close(fd), close(ep);
}

static void polled(int accepted)
{
	char c[8];
	int fd = tcp_pair(accepted);

	say_poll("fresh", fd, 0);
	tell("send 3");
	say_poll("data", fd, 100), settle(), say_poll("data", fd, 100);
	say_data("recv", c, recv(fd, c, 8, 0));
	say_poll("read", fd, 0);
	tell("shut 1");
	settle();
	say_poll("their end", fd, 0);
	say("recv", recv(fd, c, 8, 0));
	say_poll("still", fd, 0);
	say("send", send(fd, "x", 1, 0));
	tell_said("peer", "recv 1");
	tell("reset");
	settle();
	say_poll("reset", fd, 0);
	say("recv", recv(fd, c, 8, 0));
	say_poll("after the error", fd, 0);
	close(fd);
}

static void poll_waits(int how)
{
	struct pollfd p = { .events = POLLIN };
	struct timespec t, limit = { 2, 0 };
	struct timeval tv = { 2, 0 };
	int fd = tcp_client(), ep = epoll_create1(0), r = 0;
	struct epoll_event e = { .events = EPOLLIN };
	fd_set in;

	FD_ZERO(&in);
	FD_SET(fd, &in);
	p.fd = fd;
	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
	now(&t);
	tell("later 50 send 3");
	switch (how) {
	case 0: r = poll(&p, 1, 2000); break;
	case 1: r = ppoll(&p, 1, &limit, NULL); break;
	case 2: r = select(fd + 1, &in, NULL, NULL, &tv); break;
	case 3: r = pselect(fd + 1, &in, NULL, NULL, &limit, NULL); break;
	case 4: r = epoll_wait(ep, &e, 1, 2000); break;
	}
	say("ready", r);
	say_yes("after some time", elapsed_ms(&t) >= 35 && elapsed_ms(&t) < 1500);
	if (how < 2)
		say_events("events", (unsigned)p.revents);
	now(&t);
	p.events = POLLPRI;
	say("none", poll(&p, 1, 40));
	say_yes("waited", elapsed_ms(&t) >= 35);
	close(fd), close(ep);
}

static void selected(int arg)
{
	fd_set in, out, ex;
	struct timeval tv;
	char c[8];
	int fd = tcp_client();

	(void)arg;
	for (int i = 0; i < 4; i++) {
		FD_ZERO(&in);
		FD_ZERO(&out);
		FD_ZERO(&ex);
		FD_SET(fd, &in), FD_SET(fd, &out), FD_SET(fd, &ex);
		tv = (struct timeval){ 0, 30000 };
		say("select", select(fd + 1, &in, &out, &ex, &tv));
		say("in", FD_ISSET(fd, &in)), say("out", FD_ISSET(fd, &out)), say("except", FD_ISSET(fd, &ex));
		if (i == 0)
			tell("send 3");
		else if (i == 1)
			say_data("recv", c, recv(fd, c, 8, 0)), tell("close");
		else
			say("recv", recv(fd, c, 8, 0));
		settle();
	}
	close(fd);
}

static void mixed_poll(int arg)
{
	int fd = tcp_client(), pipes[2], u = udp();
	struct pollfd p[4] = { { .fd = fd, .events = POLLIN }, { .events = POLLIN }, { .fd = u, .events = POLLIN }, { .fd = -1 } };

	(void)arg;
	if (pipe(pipes))
		say("pipe", -1);
	p[1].fd = pipes[0];
	say("none", poll(p, 4, 20));
	say("write", write(pipes[1], "x", 1));
	say("pipe", poll(p, 4, 200)), say_events("tcp", (unsigned)p[0].revents), say_events("pipe", (unsigned)p[1].revents);
	tell("send 1");
	settle();
	say("both", poll(p, 4, 200)), say_events("tcp", (unsigned)p[0].revents), say_events("pipe", (unsigned)p[1].revents);
	close(fd), close(u), close(pipes[0]), close(pipes[1]);
}

static void wait_events(int ep, const char *what, int ms)
{
	struct epoll_event e[4];
	int n = epoll_wait(ep, e, 4, ms);

	if (n != 1)
		say(what, n);
	else
		say_events(what, e[0].events);
}

/* flags: EPOLLET, EPOLLONESHOT or none */
static void epolled(int flags)
{
	char c[8];
	int fd = tcp_client(), ep = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN | EPOLLRDHUP | (unsigned)flags, .data.fd = fd };

	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e)), say("twice", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
	wait_events(ep, "fresh", 0);
	tell("send 6");
	wait_events(ep, "data", 200);
	wait_events(ep, "again", 30);
	say_data("a part", c, recv(fd, c, 3, 0));
	wait_events(ep, "a part is left", 30);
	tell("send 2");
	settle();
	wait_events(ep, "more came", 30);
	say_data("rest", c, recv(fd, c, 8, 0));
	wait_events(ep, "nothing left", 30);
	e.events |= EPOLLOUT;
	say("mod", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e));
	wait_events(ep, "writable", 30), wait_events(ep, "again", 30);
	e.events &= ~(unsigned)EPOLLOUT;
	say("mod", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e));
	tell("shut 1");
	settle();
	wait_events(ep, "their end", 30), wait_events(ep, "again", 30);
	say("recv", recv(fd, c, 8, 0));
	wait_events(ep, "after", 30);
	tell("reset");
	settle();
	wait_events(ep, "reset", 30), wait_events(ep, "again", 30);
	say("del", epoll_ctl(ep, EPOLL_CTL_DEL, fd, &e)), say("twice", epoll_ctl(ep, EPOLL_CTL_DEL, fd, &e));
	close(fd), close(ep);
}

/* Whoever waits for room gets an edge when there is some. */
static void epoll_out(int flags)
{
	tell("rcvbuf 8192");
	int fd = tcp_client(), ep = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLOUT | (unsigned)flags };

	setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int));
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e));
	wait_events(ep, "fresh", 0);
	wait_events(ep, "again", 0);
	long n = fill_window(fd);
	usleep(300000); /* window probes */
	n += fill_window(fd);
	wait_events(ep, "full", 0);
	tell("recv %ld", n);
	wait_events(ep, "room", 500);
	close(fd), close(ep);
}

static void epoll_closed(int arg)
{
	int fd = tcp_client(), ep = epoll_create1(0), other;
	struct epoll_event e = { .events = EPOLLIN, .data.u32 = 7 };

	(void)arg;
	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e);
	tell("send 3");
	settle();
	wait_events(ep, "before", 30);
	close(fd);
	wait_events(ep, "closed", 30);
	other = tcp_client();
	say_yes("the same number", other == fd);
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, other, &e));
	tell("send 3");
	wait_events(ep, "of the new one", 200);
	close(other), close(ep);
}

static void epoll_exclusive(int arg)
{
	int fd = tcp_client(), ep = epoll_create1(0), other = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN | EPOLLEXCLUSIVE, .data.fd = fd };

	(void)arg;
	say("add", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e)), say("mod", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e));
	e.events = EPOLLIN;
	say("mod to others", epoll_ctl(ep, EPOLL_CTL_MOD, fd, &e)), say("add", epoll_ctl(other, EPOLL_CTL_ADD, fd, &e));
	e.events = EPOLLIN | EPOLLEXCLUSIVE;
	say("mod to exclusive", epoll_ctl(other, EPOLL_CTL_MOD, fd, &e));
	e.events |= EPOLLONESHOT;
	say("one shot, twice", epoll_ctl(ep, EPOLL_CTL_ADD, fd, &e)), say("del", epoll_ctl(other, EPOLL_CTL_DEL, fd, &e));
	say("one shot", epoll_ctl(other, EPOLL_CTL_ADD, fd, &e));
	tell("send 3");
	wait_events(ep, "data", 300);
	setsockopt(fd, SOL_SOCKET, SO_OOBINLINE, &(int){ 0 }, sizeof(int)); /* goes home */
	wait_events(ep, "still", 300);
	say("del", epoll_ctl(ep, EPOLL_CTL_DEL, fd, &e));
	close(fd), close(ep), close(other);
}

static void epoll_nested(int arg)
{
	int fd = tcp_client(), in = epoll_create1(0), out = epoll_create1(0);
	struct epoll_event e = { .events = EPOLLIN };

	(void)arg;
	say("add", epoll_ctl(in, EPOLL_CTL_ADD, fd, &e)), say("add", epoll_ctl(out, EPOLL_CTL_ADD, in, &e));
	wait_events(out, "none", 20);
	tell("send 3");
	wait_events(out, "outer", 300), wait_events(in, "inner", 100);
	close(fd), close(in), close(out);
}

static void low_water(int arg)
{
	char c[32];
	int fd = tcp_client(), got = -1;

	(void)arg;
	say("SO_RCVLOWAT", setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &(int){ 6 }, sizeof(int)));
	say("getsockopt", getsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &got, &(socklen_t){ sizeof(got) })), say("value", got);
	tell("send 3");
	settle();
	say_poll("three", fd, 0);
	say_data("peek", c, recv(fd, c, 32, MSG_PEEK | MSG_DONTWAIT));
	tell("send 3");
	settle();
	say_poll("six", fd, 0);
	say_data("recv", c, recv(fd, c, 32, MSG_DONTWAIT));
	close(fd);
}

static int looked_at, looking_set;

static void *looks(void *arg)
{
	struct pollfd p = { looked_at, POLLIN, 0 };
	struct timespec none = { 0 };
	struct epoll_event e;
	fd_set set;

	FD_ZERO(&set);
	for (;;) {
		FD_SET(looked_at, &set);
		switch ((int)(long)arg) {
		case 0: poll(&p, 1, 0); break;
		case 1: ppoll(&p, 1, &none, NULL); break;
		case 2: select(looked_at + 1, &set, NULL, NULL, &(struct timeval){ 0 }); break;
		case 3: pselect(looked_at + 1, &set, NULL, NULL, &none, NULL); break;
		case 4: epoll_wait(looking_set, &e, 1, 0); break;
		default: epoll_pwait(looking_set, &e, 1, 0, NULL);
		}
	}
	return NULL;
}

static void cancelled_look(int which)
{
	struct epoll_event e = { .events = EPOLLIN };
	pthread_t t;

	looked_at = tcp_client(), looking_set = epoll_create1(0);
	epoll_ctl(looking_set, EPOLL_CTL_ADD, looked_at, &e);
	pthread_create(&t, NULL, looks, (void *)(long)which);
	settle();
	say_cancelled(t);
	close(looking_set), close(looked_at);
}

const struct call_case tcp_wait_cases[] = {
	{ "tcp cancel a poll that does not wait", cancelled_look, 0 },
	{ "tcp cancel a ppoll that does not wait", cancelled_look, 1 },
	{ "tcp cancel a select that does not wait", cancelled_look, 2 },
	{ "tcp cancel a pselect that does not wait", cancelled_look, 3 },
	{ "tcp cancel an epoll_wait that does not wait", cancelled_look, 4 },
	{ "tcp cancel an epoll_pwait that does not wait", cancelled_look, 5 },
	{ "tcp SO_RCVTIMEO", receive_timeout, 0 }, { "tcp SO_RCVTIMEO, accepted", receive_timeout, 1 },
	{ "tcp EINTR", interrupted, 0 }, { "tcp SA_RESTART", interrupted, 1 },
	{ "tcp EINTR with a timeout", interrupted_timed, 0 }, { "tcp SA_RESTART with a timeout", interrupted_timed, 1 },
	{ "tcp EINTR in send", interrupted_send, 0 },
	{ "tcp a signal in SO_LINGER", interrupted_linger, 0 },
	{ "tcp a signal with SA_RESTART in SO_LINGER", interrupted_linger, 1 },
	{ "tcp EINTR in MSG_WAITALL", interrupted_wait_all, 0 }, { "tcp SA_RESTART in MSG_WAITALL", interrupted_wait_all, 1 },
	{ "tcp EINTR in the first accept", interrupted_first, BY_ACCEPT },
	{ "tcp EINTR in the first poll", interrupted_first, BY_POLL },
	{ "tcp EINTR in the first select", interrupted_first, BY_SELECT },
	{ "tcp EINTR in the first connect", interrupted_first, BY_CONNECT },
	{ "tcp SA_RESTART in the first accept with a timeout", interrupted_first, RESTARTED + BY_ACCEPT },
	{ "tcp SA_RESTART in the first poll", interrupted_first, RESTARTED + BY_POLL },
	{ "tcp SA_RESTART in the first accept", restarted_first, 0 },
	{ "tcp masks, nothing ready", masked, 0 }, { "tcp masks, data ready", masked, 1 },
	{ "tcp poll", polled, 0 }, { "tcp poll, accepted", polled, 1 },
	{ "tcp poll waits", poll_waits, 0 }, { "tcp ppoll waits", poll_waits, 1 }, { "tcp select waits", poll_waits, 2 },
	{ "tcp pselect waits", poll_waits, 3 }, { "tcp epoll waits", poll_waits, 4 },
	{ "tcp select", selected, 0 }, { "tcp poll beside others", mixed_poll, 0 },
	{ "tcp epoll", epolled, 0 }, { "tcp epoll, edge", epolled, (int)EPOLLET },
	{ "tcp epoll, one shot", epolled, EPOLLONESHOT },
	{ "tcp epoll, room", epoll_out, 0 }, { "tcp epoll, room, edge", epoll_out, (int)EPOLLET },
	{ "tcp epoll of a closed one", epoll_closed, 0 }, { "tcp epoll in epoll", epoll_nested, 0 },
	{ "tcp epoll, exclusive", epoll_exclusive, 0 },
	{ "tcp SO_RCVLOWAT", low_water, 0 },
	{ 0 },
};
