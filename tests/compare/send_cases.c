#include "calls.h"

enum { SEND, SENDTO, SENDMSG, SENDMMSG, WRITE, WRITEV };

static long put(int way, int fd, const void *buf, size_t len, int flags, struct sockaddr_in *to)
{
	struct iovec iov[2] = { { (void *)buf, len > 2 ? 2 : len }, { (char *)buf + 2, len > 2 ? len - 2 : 0 } };
	struct msghdr m = { .msg_iov = iov, .msg_iovlen = 2, .msg_name = to, .msg_namelen = to ? sizeof(*to) : 0 };
	struct mmsghdr mm = { .msg_hdr = m };
	long r;

	switch (way) {
	case SEND: return send(fd, buf, len, flags);
	case SENDTO: return sendto(fd, buf, len, flags, (void *)to, to ? sizeof(*to) : 0);
	case SENDMSG: return sendmsg(fd, &m, flags);
	case WRITE: return write(fd, buf, len);
	case WRITEV: return writev(fd, iov, 2);
	case SENDMMSG:
		r = sendmmsg(fd, &mm, 1, flags);
		return r == 1 ? (long)mm.msg_len : r;
	}
	return -1;
}

static void back(int fd)
{
	static char buf[65536];

	settle();
	say_data("echo", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
}

static void connected(int way)
{
	int fd = udp_connected(7001);

	say("sent", put(way, fd, "payload", 7, 0, NULL));
	back(fd);
	close(fd);
}

static void unconnected(int way)
{
	struct sockaddr_in a = peer(7001);
	int fd = udp();

	say("sent", put(way, fd, "first packet", 12, 0, &a)); /* the kernel chooses a port here */
	say_text("port chosen", my_port(fd) ? "yes" : "no");
	back(fd);
	say("sent", put(way, fd, "second", 6, 0, &a));
	back(fd);
	close(fd);
}

static void no_destination(int way)
{
	int fd = udp_bound();

	say("nowhere", put(way, fd, "x", 1, 0, NULL));
	close(fd);
}

static void empty(int way)
{
	int fd = udp_connected(7001);

	say("sent", put(way, fd, "", 0, 0, NULL));
	settle();
	char c;
	say("echo", recv(fd, &c, 1, MSG_DONTWAIT));
	close(fd);
}

static void too_long(int way)
{
	static char buf[70000];
	int fd = udp_connected(7001);

	say("65508", put(way, fd, buf, 65508, 0, NULL));
	close(fd);
}

static void above_mtu(int way)
{
	static char buf[5000];
	int fd = udp_connected(7001);

	memset(buf, 'z', sizeof(buf));
	say("1472", put(way, fd, buf, 1472, 0, NULL));
	back(fd);
	say("1473", put(way, fd, buf, 1473, 0, NULL));
	back(fd);
	say("5000", put(way, fd, buf, 5000, 0, NULL));
	back(fd);
	close(fd);
}

static void refused(int way)
{
	int fd = udp_connected(7004);

	say("first", put(way, fd, "x", 1, 0, NULL));
	settle();
	say("second", put(way, fd, "x", 1, 0, NULL)); /* the ICMP error of the first */
	close(fd);
}

/* Every second one fails, also after an answer, and on an unconnected socket that asks for it. */
static void refused_again(int recverr)
{
	struct sockaddr_in closed = peer(7004);
	int fd = recverr ? udp_bound() : udp_connected(7001);

	ask(fd, 7001, "first");
	back(fd);
	if (recverr)
		setsockopt(fd, IPPROTO_IP, IP_RECVERR, &(int){ 1 }, sizeof(int));
	else
		say("connect", connect(fd, (void *)&closed, sizeof(closed)));
	for (int i = 0; i < 4; i++) {
		say("send", recverr ? sendto(fd, "x", 1, 0, (void *)&closed, sizeof(closed)) : send(fd, "x", 1, 0));
		settle();
	}
	close(fd);
}

static void negative_length(int arg)
{
	struct sockaddr_in a = peer(7001);
	volatile size_t len = SIZE_MAX; /* the compiler would warn */
	int fd = udp_connected(7001);

	(void)arg;
	say("send", send(fd, "x", len, 0));
	say("sendto", sendto(fd, "x", len, 0, (void *)&a, sizeof(a)));
	close(fd);
}

static void after_shutdown(int way)
{
	int fd = udp_connected(7001);

	signal(SIGPIPE, SIG_IGN);
	say("shutdown", shutdown(fd, SHUT_WR));
	say("sent", put(way, fd, "x", 1, 0, NULL));
	signal(SIGPIPE, SIG_DFL);
	close(fd);
}

static void other_destination(int way)
{
	struct sockaddr_in a = peer(7007);
	int fd = udp_connected(7001);

	say("elsewhere", put(way, fd, "x", 1, 0, &a));
	settle();
	char c;
	say("filtered", recv(fd, &c, 1, MSG_DONTWAIT));
	close(fd);
}

static void bad_address(int arg)
{
	struct sockaddr_in a = peer(7001);
	int fd = udp();

	(void)arg;
	say("short", sendto(fd, "x", 1, 0, (void *)&a, 8));
	a.sin_family = AF_INET6;
	say("family", sendto(fd, "x", 1, 0, (void *)&a, sizeof(a)));
	a = peer(0);
	say("port 0", sendto(fd, "x", 1, 0, (void *)&a, sizeof(a)));
	a = peer(7001);
	inet_pton(AF_INET, "203.0.113.9", &a.sin_addr);
	say("no route", sendto(fd, "x", 1, 0, (void *)&a, sizeof(a)));
	inet_pton(AF_INET, "255.255.255.255", &a.sin_addr);
	say("broadcast", sendto(fd, "x", 1, 0, (void *)&a, sizeof(a)));
	a = peer(7001);
	say("null buffer", sendto(fd, NULL, 5, 0, (void *)&a, sizeof(a)));
	say("null address", sendto(fd, "x", 1, 0, NULL, 0));
	say("oob", sendto(fd, "x", 1, MSG_OOB, (void *)&a, sizeof(a)));
	say("closed fd", sendto(9999, "x", 1, 0, (void *)&a, sizeof(a)));
	close(fd);
}

/* Address lengths that no sockaddr_in has; sendmsg(2) cuts what sendto(2) refuses. */
static void address_length(int is_connected)
{
	static const socklen_t lengths[] = { 0, 1, 15, 16, 17, 128, 129, 200, 0x7fffffff, 0x80000000, 0xffffffff };
	union { struct sockaddr_in in; char room[256]; } a = { .in = peer(7001) };
	int fd = is_connected ? udp_connected(7001) : udp_bound();

	for (size_t i = 0; i < sizeof(lengths) / sizeof(lengths[0]); i++) {
		struct iovec iov = { "payload", 7 };
		struct mmsghdr mm = { .msg_hdr = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = &a } };

		mm.msg_hdr.msg_namelen = lengths[i];
		say("length", (int)lengths[i]);
		say("  sendto", sendto(fd, "payload", 7, 0, (void *)&a, lengths[i]));
		say("  sendmsg", sendmsg(fd, &mm.msg_hdr, 0));
		say("  sendmmsg", sendmmsg(fd, &mm, 1, 0));
		mm.msg_hdr.msg_name = NULL;
		say("  sendmsg, no name", sendmsg(fd, &mm.msg_hdr, 0));
		say("  sendto, no name", sendto(fd, "payload", 7, 0, NULL, lengths[i]));
	}
	close(fd);
}

static void sendmmsg_many(int n)
{
	struct mmsghdr v[64];
	struct iovec iov[64];
	char buf[64][32];
	int fd = udp_connected(7001), got = 0;

	memset(v, 0, sizeof(v));
	for (int i = 0; i < n; i++) {
		int len = snprintf(buf[i], sizeof(buf[i]), "message %d", i);

		iov[i] = (struct iovec){ buf[i], len };
		v[i].msg_hdr.msg_iov = &iov[i];
		v[i].msg_hdr.msg_iovlen = 1;
	}
	say("sendmmsg", sendmmsg(fd, v, n, 0));
	say("len of last", v[n - 1].msg_len);
	settle();
	for (char b[32]; recv(fd, b, sizeof(b), MSG_DONTWAIT) > 0;)
		got++;
	say("echoes", got);
	close(fd);
}

/* A control message sends one of them by the kernel: it does not overtake those before it. */
static void sendmmsg_in_order(int which)
{
	union {
		struct cmsghdr h;
		char room[CMSG_SPACE(sizeof(int))];
	} tos = { .h = { .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = IPPROTO_IP, .cmsg_type = IP_TOS } };
	struct mmsghdr v[4] = { 0 };
	struct iovec iov[4];
	char text[4][8];
	int fd = udp_connected(7001);

	for (int i = 0; i < 4; i++) {
		iov[i] = (struct iovec){ text[i], (size_t)snprintf(text[i], sizeof(text[i]), "no %d", i) };
		v[i].msg_hdr = (struct msghdr){ .msg_iov = &iov[i], .msg_iovlen = 1 };
	}
	v[which].msg_hdr.msg_control = &tos;
	v[which].msg_hdr.msg_controllen = sizeof(tos);
	say("sendmmsg", sendmmsg(fd, v, 4, 0));
	settle();
	drain(fd, "in order");
	close(fd);
}

static void sendmmsg_stops(int arg)
{
	struct mmsghdr v[3];
	struct iovec iov = { "x", 1 };
	static char big[70000];
	struct iovec bad = { big, sizeof(big) };
	int fd = udp_connected(7001);

	(void)arg;
	memset(v, 0, sizeof(v));
	for (int i = 0; i < 3; i++) {
		v[i].msg_hdr.msg_iov = i == 1 ? &bad : &iov;
		v[i].msg_hdr.msg_iovlen = 1;
	}
	say("one of three", sendmmsg(fd, v, 3, 0));
	say("bad first", sendmmsg(fd, v + 1, 2, 0));
	say("none", sendmmsg(fd, v, 0, 0));
	close(fd);
}

static void control_message(int arg)
{
	struct sockaddr_in a = peer(7001);
	char cbuf[CMSG_SPACE(sizeof(int))] = { 0 };
	struct iovec iov = { "with ttl", 8 };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_name = &a, .msg_namelen = sizeof(a),
			    .msg_control = cbuf, .msg_controllen = sizeof(cbuf) };
	struct cmsghdr *c = CMSG_FIRSTHDR(&m);
	int fd = udp_bound();

	(void)arg;
	*c = (struct cmsghdr){ .cmsg_len = CMSG_LEN(sizeof(int)), .cmsg_level = IPPROTO_IP, .cmsg_type = IP_TTL };
	memcpy(CMSG_DATA(c), &(int){ 7 }, sizeof(int));
	say("sendmsg", sendmsg(fd, &m, 0));
	back(fd);
	memcpy(CMSG_DATA(c), &(int){ 700 }, sizeof(int));
	say("bad ttl", sendmsg(fd, &m, 0));
	close(fd);
}

static void cork(int arg)
{
	int fd = udp_connected(7001);

	(void)arg;
	say("more", send(fd, "one ", 4, MSG_MORE));
	say("end", send(fd, "two", 3, 0));
	back(fd);
	close(fd);
}

#define PER_WAY(label, fn) \
	{ label " send", fn, SEND }, { label " sendto", fn, SENDTO }, { label " sendmsg", fn, SENDMSG }, \
	{ label " sendmmsg", fn, SENDMMSG }, { label " write", fn, WRITE }, { label " writev", fn, WRITEV }
#define PER_TO(label, fn) \
	{ label " sendto", fn, SENDTO }, { label " sendmsg", fn, SENDMSG }, { label " sendmmsg", fn, SENDMMSG }

static void refused_reconnects(int arg)
{
	struct sockaddr_in closed = peer(7004);
	int fd = udp_connected(7004);

	(void)arg;
	for (int i = 0; i < 4; i++) {
		say("connect", connect(fd, (void *)&closed, sizeof(closed)));
		say("send", send(fd, "x", 1, 0));
		settle();
	}
	close(fd);
}

/* From 127.0.0.1 nothing goes to the peer, which the kernel says before it tells of an earlier refusal. */
static void refused_no_route(int way)
{
	struct sockaddr_in closed = { .sin_family = AF_INET, .sin_port = htons(1) }, to = peer(7001);
	struct iovec v = { "x", 1 };
	struct mmsghdr m = { .msg_hdr = { .msg_name = &to, .msg_namelen = sizeof(to), .msg_iov = &v, .msg_iovlen = 1 } };
	int fd = udp();
	char c;

	say("connect", connect(fd, (void *)&closed, sizeof(closed)));
	say("send", send(fd, "x", 1, 0));
	settle();
	for (int i = 0; i < 3; i++)
		say("no route", way == SENDMMSG ? sendmmsg(fd, &m, 1, 0) : sendmsg(fd, &m.msg_hdr, 0));
	say("then refused", recv(fd, &c, 1, MSG_DONTWAIT));
	close(fd);
}

const struct call_case send_cases[] = {
	PER_WAY("send connected", connected),
	PER_TO("send unconnected", unconnected),
	PER_WAY("send nowhere", no_destination),
	PER_WAY("send empty", empty),
	PER_WAY("send too long", too_long),
	PER_WAY("send above mtu", above_mtu),
	PER_WAY("send refused", refused),
	{ "send refused again", refused_again, 0 }, { "send refused, IP_RECVERR", refused_again, 1 },
	{ "send refused, reconnects", refused_reconnects, 0 },
	{ "send refused, no route", refused_no_route, SENDMSG }, { "sendmmsg refused, no route", refused_no_route, SENDMMSG },
	{ "send negative length", negative_length, 0 },
	PER_WAY("send after shutdown", after_shutdown),
	PER_TO("send elsewhere", other_destination),
	{ "send bad address", bad_address, 0 },
	{ "send address length", address_length, 0 }, { "send address length, connected", address_length, 1 },
	{ "sendmmsg 2", sendmmsg_many, 2 }, { "sendmmsg 33", sendmmsg_many, 33 }, { "sendmmsg 64", sendmmsg_many, 64 },
	{ "sendmmsg in order", sendmmsg_in_order, 1 },
	{ "sendmmsg in order, last", sendmmsg_in_order, 3 }, { "sendmmsg stops", sendmmsg_stops, 0 },
	{ "send control message", control_message, 0 },
	{ "send cork", cork, 0 },
	{ 0 },
};
