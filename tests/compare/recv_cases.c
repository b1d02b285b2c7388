#include "calls.h"

/* The six ways to receive, behind one signature: bytes, and where it came from. */
enum { RECV, RECVFROM, RECVMSG, RECVMMSG, READ, READV, WAYS };

static long get(int way, int fd, void *buf, size_t len, int flags)
{
	struct sockaddr_in from = { 0 };
	socklen_t fl = sizeof(from);
	struct iovec iov[2] = { { buf, len > 3 ? 3 : len }, { (char *)buf + 3, len > 3 ? len - 3 : 0 } };
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = 2, .msg_name = &from, .msg_namelen = sizeof(from) };
	struct mmsghdr mm = { .msg_hdr = m };
	long r = -1;

	switch (way) {
	case RECV: return recv(fd, buf, len, flags);
	case READ: return read(fd, buf, len);
	case READV: return readv(fd, iov, 2);
	case RECVFROM:
		r = recvfrom(fd, buf, len, flags, (void *)&from, &fl);
		if (r >= 0)
			say("from port", ntohs(from.sin_port)), say("fromlen", fl);
		return r;
	case RECVMSG:
		r = recvmsg(fd, &m, flags);
		if (r >= 0)
			say("from port", ntohs(from.sin_port)), say("namelen", m.msg_namelen), say("msg_flags", m.msg_flags);
		return r;
	case RECVMMSG:
		r = recvmmsg(fd, &mm, 1, flags, NULL);
		if (r == 1) {
			say("from port", ntohs(from.sin_port));
			say("msg_flags", mm.msg_hdr.msg_flags);
			return mm.msg_len;
		}
		return r;
	}
	return r;
}

static void echo_unconnected(int way)
{
	char buf[256] = { 0 };
	int fd = udp_bound();

	ask(fd, 7001, "hello echo");
	say_data("got", buf, get(way, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void echo_any(int way)
{
	char buf[256] = { 0 };
	int fd = udp_any();

	ask(fd, 7001, "hello any");
	say_data("got", buf, get(way, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void echo_connected(int way)
{
	char buf[256] = { 0 };
	int fd = udp_connected(7001);

	say("send", send(fd, "connected", 9, 0));
	say_data("got", buf, get(way, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void short_buffer(int way)
{
	char buf[8] = { 0 };
	int fd = udp_connected(7003);

	send(fd, "2 100", 5, 0);
	settle();
	say_data("short", buf, get(way, fd, buf, 5, 0));
	say_data("next", buf, get(way, fd, buf, 8, 0)); /* the rest of the first one is gone */
	say_data("none", buf, get(way == READ || way == READV ? RECV : way, fd, buf, 8, MSG_DONTWAIT));
	close(fd);
}

static void empty_datagram(int way)
{
	char buf[16] = "x";
	int fd = udp_connected(7003);

	send(fd, "1 0", 3, 0);
	say_data("empty", buf, get(way, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void zero_length_call(int way)
{
	char buf[16] = "x";
	int fd = udp_connected(7003);

	send(fd, "2 4", 3, 0);
	settle();
	say("zero", get(way, fd, buf, 0, 0));
	say_data("then", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	say_data("and", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
}

static void nothing_there(int way)
{
	char buf[16];
	int fd = udp_connected(7001);

	fcntl(fd, F_SETFL, O_NONBLOCK);
	say("empty", get(way, fd, buf, sizeof(buf), 0));
	send(fd, "late", 4, 0);
	settle();
	say_data("there", buf, get(way, fd, buf, sizeof(buf), 0));
	say("empty again", get(way, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void timeout(int way)
{
	struct timeval tv = { 0, 60000 };
	struct timespec t;
	char buf[16];
	int fd = udp_connected(7001);

	say("setsockopt", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)));
	now(&t);
	say("timed out", get(way, fd, buf, sizeof(buf), 0));
	long ms = elapsed_ms(&t);
	say_text("in time", ms >= 55 && ms < 300 ? "yes" : "no");
	close(fd);
}

static void peek(int way)
{
	char buf[64] = { 0 };
	int fd = udp_connected(7001);

	send(fd, "peek me", 7, 0);
	settle();
	say_data("peek", buf, get(way, fd, buf, sizeof(buf), MSG_PEEK));
	memset(buf, 0, sizeof(buf));
	say_data("peek short", buf, get(way, fd, buf, 2, MSG_PEEK));
	say_data("take", buf, get(way, fd, buf, sizeof(buf), 0));
	say("gone", get(way, fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
}

static void trunc_flag(int way)
{
	char buf[64] = { 0 };
	int fd = udp_connected(7003);

	send(fd, "3 1000", 6, 0);
	settle();
	say("real length", get(way, fd, buf, 10, MSG_TRUNC));
	say("peek and trunc", get(way, fd, buf, 10, MSG_TRUNC | MSG_PEEK));
	say("again", get(way, fd, buf, 10, MSG_TRUNC));
	say("whole", get(way, fd, buf, 64, 0));
	close(fd);
}

static void delayed_blocking(int way)
{
	char buf[64] = { 0 };
	int fd = udp_connected(7005);

	send(fd, "later", 5, 0);
	say_data("got", buf, get(way, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void closed_port(int way)
{
	char buf[16];
	int fd = udp_connected(7004);

	say("send", send(fd, "anybody?", 8, 0));
	settle();
	say("refused", get(way, fd, buf, sizeof(buf), 0));
	say("once", recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
}

static void many(int n)
{
	char text[32], buf[2048];
	int fd = udp_connected(7003), sum = 0, bytes = 0;

	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &(int){ 1000000 }, sizeof(int));
	snprintf(text, sizeof(text), "%d 700", n);
	send(fd, text, strlen(text), 0);
	for (int i = 0; i < n; i++) {
		long r = recv(fd, buf, sizeof(buf), 0);

		if (r < 0) {
			say("recv", r);
			break;
		}
		bytes += r;
		sum = sum * 31 + buf[r - 1];
	}
	say("bytes", bytes);
	say("order", sum);
	close(fd);
}

static void mmsg_several(int flags)
{
	struct mmsghdr v[8];
	struct iovec iov[8];
	char buf[8][64];
	int fd = udp_connected(7003);

	memset(v, 0, sizeof(v));
	for (int i = 0; i < 8; i++) {
		iov[i] = (struct iovec){ buf[i], sizeof(buf[i]) };
		v[i].msg_hdr.msg_iov = &iov[i];
		v[i].msg_hdr.msg_iovlen = 1;
	}
	send(fd, "5 20", 4, 0);
	settle();
	int r = recvmmsg(fd, v, 8, flags, NULL);
	say("recvmmsg", r);
	for (int i = 0; i < r; i++)
		say_data("datagram", buf[i], v[i].msg_len);
	say("none", recvmmsg(fd, v, 8, MSG_DONTWAIT, NULL));
	close(fd);
}

static void mmsg_timeout(int ms)
{
	struct mmsghdr v[4];
	struct iovec iov[4];
	char buf[4][64];
	struct timespec t = { 0, ms * 1000000L };
	int fd = udp_connected(7003);

	memset(v, 0, sizeof(v));
	for (int i = 0; i < 4; i++) {
		iov[i] = (struct iovec){ buf[i], sizeof(buf[i]) };
		v[i].msg_hdr.msg_iov = &iov[i];
		v[i].msg_hdr.msg_iovlen = 1;
	}
	send(fd, "4 20", 4, 0);
	settle();
	say("recvmmsg", recvmmsg(fd, v, 4, 0, &t));
	t = (struct timespec){ 0, -1 };
	say("bad timeout", recvmmsg(fd, v, 4, 0, &t));
	close(fd);
}

static void filter_after_connect(int arg)
{
	char buf[64];
	int fd = udp_connected(7007); /* answers from 7008: not the peer we are connected to */

	(void)arg;
	send(fd, "wrong door", 10, 0);
	settle();
	say("filtered", recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
	fd = udp_bound();
	ask(fd, 7007, "open door");
	say_data("unfiltered", buf, get(RECVFROM, fd, buf, sizeof(buf), 0));
	close(fd);
}

static void bad_arguments(int arg)
{
	char buf[16];
	struct sockaddr_in a;
	socklen_t l = (socklen_t)-1;
	int fd = udp_connected(7001);

	(void)arg;
	say("closed fd", recv(9999, buf, 4, 0));
	say("negative fd", recv(-1, buf, 4, 0));
	say("oob", recv(fd, buf, 4, MSG_OOB | MSG_DONTWAIT));
	say("errqueue", recv(fd, buf, 4, MSG_ERRQUEUE));
	send(fd, "x", 1, 0);
	settle();
	say("negative fromlen", recvfrom(fd, buf, 4, 0, (void *)&a, &l));
	close(fd);
	fd = udp_connected(7001);
	send(fd, "x", 1, 0);
	settle();
	l = 4;
	memset(&a, 0, sizeof(a));
	say("short fromlen", recvfrom(fd, buf, 4, 0, (void *)&a, &l));
	say("full length told", l);
	say("family", a.sin_family);
	close(fd);
	fd = udp_connected(7001);
	send(fd, "x", 1, 0);
	settle();
	say("null buffer", recv(fd, NULL, 4, 0));
	struct msghdr m = { .msg_iovlen = 2000 };
	say("too many iov", recvmsg(fd, &m, MSG_DONTWAIT));
	close(fd);
}

static void fionread(int arg)
{
	char buf[64];
	int n = -1, fd = udp_connected(7003);

	(void)arg;
	say("ioctl", ioctl(fd, FIONREAD, &n));
	say("none", n);
	send(fd, "2 33", 4, 0);
	settle();
	say("ioctl", ioctl(fd, FIONREAD, &n));
	say("first", n);
	recv(fd, buf, sizeof(buf), 0);
	recv(fd, buf, sizeof(buf), 0);
	ioctl(fd, FIONREAD, &n);
	say("after", n);
	close(fd);
}

static void big_datagram(int len)
{
	static char buf[65536];
	char text[16];
	int fd = udp_connected(7003);

	setsockopt(fd, SOL_SOCKET, SO_RCVBUFFORCE, &(int){ 1000000 }, sizeof(int));
	snprintf(text, sizeof(text), "1 %d", len);
	send(fd, text, strlen(text), 0);
	say_data("got", buf, recv(fd, buf, sizeof(buf), 0)); /* above the MTU: fragments */
	close(fd);
}

static void name_length(int what)
{
	static const socklen_t lengths[] = { 0, 3, 16, 128, 200, 0x7fffffff, 0x80000000, 0xffffffff };
	char buf[32], name[256];
	int fd = udp_bound();

	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		struct iovec iov = { buf, sizeof(buf) };
		struct mmsghdr mm = { .msg_hdr = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = what & 2 ? name : NULL,
						   .msg_namelen = lengths[i] } };

		say("length", (int)lengths[i]);
		if (what & 1) { /* something is there */
			ask(fd, 7001, "hello");
			settle();
		}
		say("  recvmsg", recvmsg(fd, &mm.msg_hdr, MSG_DONTWAIT | MSG_PEEK));
		say("  namelen", (int)mm.msg_hdr.msg_namelen);
		mm.msg_hdr.msg_namelen = lengths[i];
		say("  recvmmsg", recvmmsg(fd, &mm, 1, MSG_DONTWAIT, NULL));
		say("  namelen", (int)mm.msg_hdr.msg_namelen);
	}
	close(fd);
}

/* Five datagrams of one peer wait, then the socket connects to another: they are read still, later ones are not. */
static void queued_before_connect(int looked)
{
	struct sockaddr_in to = peer(7005);
	int fd = udp_bound();
	char buf[16];

	ask(fd, 7003, "5 10");
	settle();
	if (looked) /* from the ring to the socket's own queue */
		say("first", recv(fd, buf, sizeof(buf), MSG_PEEK));
	say("connect", connect(fd, (void *)&to, sizeof(to)));
	ask(fd, 7001, "a stranger's");
	ask(fd, 7005, "the peer's");
	settle();
	usleep(40000); /* that port answers late */
	drain(fd, "datagram");
	close(fd);
}

static void queued_before_disconnect(int arg)
{
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	int fd = udp_connected(7003);

	(void)arg;
	send(fd, "5 10", 4, 0);
	settle();
	say("disconnect", connect(fd, &none, sizeof(none)));
	drain(fd, "queued");
	close(fd);
}

#define PER_WAY(label, fn) \
	{ label " recv", fn, RECV }, { label " recvfrom", fn, RECVFROM }, { label " recvmsg", fn, RECVMSG }, \
	{ label " recvmmsg", fn, RECVMMSG }, { label " read", fn, READ }, { label " readv", fn, READV }
#define PER_FLAG_WAY(label, fn) \
	{ label " recv", fn, RECV }, { label " recvfrom", fn, RECVFROM }, { label " recvmsg", fn, RECVMSG }, \
	{ label " recvmmsg", fn, RECVMMSG }

/* One datagram behind many of another socket: who looks once finds it. */
static void behind_others(int how)
{
	int busy = udp_bound(), fd = udp_bound(), n = -1;
	struct epoll_event ev = { .events = EPOLLIN };
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int ep = epoll_create1(0);
	char buf[16];
	fd_set set;

	epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev);
	ask(busy, 7003, "100 10");
	settle();
	ask(fd, 7001, "behind");
	settle();
	FD_ZERO(&set);
	FD_SET(fd, &set);
	switch (how) {
	case 0: say_data("recv", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT)); break;
	case 1: say_data("peek", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT | MSG_PEEK)); break;
	case 2: say("poll", poll(&p, 1, 0)); break;
	case 3: say("select", select(fd + 1, &set, NULL, NULL, &(struct timeval){ 0 })); break;
	case 4: say("epoll", epoll_wait(ep, &ev, 1, 0)); break;
	case 5: say("FIONREAD", ioctl(fd, FIONREAD, &n) ? -1 : n); break;
	}
	close(busy), close(fd), close(ep);
}

const struct call_case recv_cases[] = {
	PER_WAY("echo unconnected", echo_unconnected),
	PER_WAY("echo any", echo_any),
	PER_WAY("echo connected", echo_connected),
	PER_WAY("short buffer", short_buffer),
	PER_WAY("empty datagram", empty_datagram),
	PER_WAY("zero length call", zero_length_call),
	PER_WAY("non-blocking", nothing_there),
	PER_WAY("rcvtimeo", timeout),
	PER_WAY("delayed", delayed_blocking),
	PER_WAY("closed port", closed_port),
	PER_FLAG_WAY("peek", peek),
	PER_FLAG_WAY("trunc", trunc_flag),
	{ "name length, nothing there", name_length, 2 }, { "name length", name_length, 3 },
	{ "name length without a name", name_length, 1 },
	{ "many 10", many, 10 }, { "many 100", many, 100 },
	{ "recvmmsg dontwait", mmsg_several, MSG_DONTWAIT },
	{ "recvmmsg waitforone", mmsg_several, MSG_WAITFORONE },
	{ "recvmmsg timeout", mmsg_timeout, 500 },
	{ "filter after connect", filter_after_connect, 0 },
	{ "on the ring before connect", queued_before_connect, 0 }, { "queued before connect", queued_before_connect, 1 },
	{ "queued before disconnect", queued_before_disconnect, 0 },
	{ "bad receive arguments", bad_arguments, 0 },
	{ "fionread", fionread, 0 },
	{ "recv behind others", behind_others, 0 }, { "peek behind others", behind_others, 1 },
	{ "poll behind others", behind_others, 2 }, { "select behind others", behind_others, 3 },
	{ "epoll behind others", behind_others, 4 }, { "fionread behind others", behind_others, 5 },
	{ "big 1472", big_datagram, 1472 }, { "big 1473", big_datagram, 1473 }, { "big 9000", big_datagram, 9000 },
	{ "big 60000", big_datagram, 60000 },
	{ 0 },
};
