#include "calls.h"
#include <linux/net_tstamp.h>
#include <net/if.h>

static void int_option(int fd, int level, int name, int value, const char *what)
{
	int got = -99;
	socklen_t len = sizeof(got);

	say(what, setsockopt(fd, level, name, &value, sizeof(value)));
	say("  getsockopt", getsockopt(fd, level, name, &got, &len));
	say("  value", got);
}

static const struct { const char *name; int level, opt, value; } ints[] = {
	{ "SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR, 1 }, { "SO_REUSEPORT", SOL_SOCKET, SO_REUSEPORT, 1 },
	{ "SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 50000 },   { "SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 50000 },
	{ "SO_BROADCAST", SOL_SOCKET, SO_BROADCAST, 1 }, { "SO_PRIORITY", SOL_SOCKET, SO_PRIORITY, 3 },
	{ "SO_TIMESTAMP", SOL_SOCKET, SO_TIMESTAMP, 1 }, { "SO_TIMESTAMPNS", SOL_SOCKET, SO_TIMESTAMPNS, 1 },
	{ "IP_TTL", IPPROTO_IP, IP_TTL, 9 },             { "IP_TTL bad", IPPROTO_IP, IP_TTL, 999 },
	{ "IP_TOS", IPPROTO_IP, IP_TOS, 0x10 },          { "IP_PKTINFO", IPPROTO_IP, IP_PKTINFO, 1 },
	{ "IP_MULTICAST_TTL", IPPROTO_IP, IP_MULTICAST_TTL, 5 },
	{ "IP_MULTICAST_LOOP", IPPROTO_IP, IP_MULTICAST_LOOP, 0 },
	{ "IP_MTU_DISCOVER", IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DONT },
	{ "IP_RECVTTL", IPPROTO_IP, IP_RECVTTL, 1 },     { "IP_RECVERR", IPPROTO_IP, IP_RECVERR, 1 },
	{ "SO_MARK", SOL_SOCKET, SO_MARK, 7 },           { "unknown option", SOL_SOCKET, 999, 1 },
	{ "unknown level", 999, 1, 1 },
};

/* Every option alone, then traffic: the socket works whatever it did to the offload. */
static void one_option(int i)
{
	char buf[64];
	int fd = udp_connected(7001);

	int_option(fd, ints[i].level, ints[i].opt, ints[i].value, ints[i].name);
	say("send", send(fd, "still works", 11, 0));
	settle();
	say_data("echo", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
}

/* Who sets DF, and who sends what is larger than the MTU. */
static void mtu_discover(int how)
{
	static char big[1473];
	char buf[64];
	int fd = udp_connected(7009);

	int_option(fd, IPPROTO_IP, IP_MTU_DISCOVER, how, "IP_MTU_DISCOVER");
	for (size_t len = 7; len <= 1472; len += 1465) {
		say("send", send(fd, big, len, 0));
		settle();
		say_data("was sent with", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	}
	say("above the MTU", send(fd, big, sizeof(big), 0));
	close(fd);
}

static void control(int which)
{
	static const struct { int level, opt; } opt[] = {
		{ SOL_SOCKET, SO_TIMESTAMP }, { SOL_SOCKET, SO_TIMESTAMPNS }, { IPPROTO_IP, IP_PKTINFO },
		{ IPPROTO_IP, IP_RECVTTL }, { IPPROTO_IP, IP_RECVTOS },
	};
	char buf[64], cbuf[512];
	struct iovec iov = { buf, sizeof(buf) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = sizeof(cbuf) };
	int fd = udp_bound();

	say("set", setsockopt(fd, opt[which].level, opt[which].opt, &(int){ 1 }, sizeof(int)));
	ask(fd, 7001, "with control");
	say("recvmsg", recvmsg(fd, &m, 0));
	say("controllen", (long)m.msg_controllen);
	say("flags", m.msg_flags);
	for (struct cmsghdr *c = CMSG_FIRSTHDR(&m); c; c = CMSG_NXTHDR(&m, c)) {
		say("level", c->cmsg_level), say("type", c->cmsg_type), say("len", (long)c->cmsg_len);
		if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_PKTINFO) {
			struct in_pktinfo p;
			memcpy(&p, CMSG_DATA(c), sizeof(p));
			say("ifindex", p.ipi_ifindex);
			say("spec_dst", p.ipi_spec_dst.s_addr), say("addr", p.ipi_addr.s_addr);
		} else if (c->cmsg_level == IPPROTO_IP && c->cmsg_type == IP_TTL) {
			int ttl;
			memcpy(&ttl, CMSG_DATA(c), sizeof(ttl));
			say("ttl", ttl);
		} else if (c->cmsg_level == IPPROTO_IP) {
			say("tos", *(unsigned char *)CMSG_DATA(c));
		} else {
			struct timespec t = { 0 };
			memcpy(&t, CMSG_DATA(c), sizeof(t));
			say_text("recent", labs(t.tv_sec - time(NULL)) < 5 ? "yes" : "no");
		}
	}
	/* no room for it: cut and told */
	ask(fd, 7001, "again");
	m.msg_controllen = 4;
	say("recvmsg", recvmsg(fd, &m, 0));
	say("controllen", (long)m.msg_controllen), say("flags", m.msg_flags);
	close(fd);
}

static void names(int arg)
{
	struct sockaddr_in a = { 0 };
	socklen_t l = sizeof(a);
	int fd = udp();

	(void)arg;
	say("fresh port", my_port(fd));
	say("getpeername", getpeername(fd, (void *)&a, &l));
	struct sockaddr_in p = peer(7001);
	say("connect", connect(fd, (void *)&p, sizeof(p)));
	l = sizeof(a);
	say("getpeername", getpeername(fd, (void *)&a, &l));
	say("peer port", ntohs(a.sin_port)), say("len", l);
	l = sizeof(a);
	getsockname(fd, (void *)&a, &l);
	say_text("local address chosen", a.sin_addr.s_addr ? inet_ntoa(a.sin_addr) : "none");
	close(fd);
}

static void bind_errors(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int fd = udp_bound(), other = udp();

	(void)arg;
	say("bind twice", bind(fd, (void *)&a, sizeof(a)));
	a.sin_port = htons(my_port(fd));
	inet_pton(AF_INET, my_ip, &a.sin_addr);
	say("in use", bind(other, (void *)&a, sizeof(a)));
	a.sin_port = 0;
	inet_pton(AF_INET, "203.0.113.7", &a.sin_addr);
	say("not mine", bind(other, (void *)&a, sizeof(a)));
	say("short", bind(other, (void *)&a, 3));
	a.sin_family = AF_INET6;
	say("family", bind(other, (void *)&a, sizeof(a)));
	close(fd), close(other);
}

static void reconnect(int arg)
{
	char buf[32];
	struct sockaddr_in a = peer(7001), b = peer(7007), un = { .sin_family = AF_UNSPEC };
	int fd = udp_connected(7003);

	(void)arg;
	say("again", connect(fd, (void *)&a, sizeof(a)));
	say("send", send(fd, "moved", 5, 0));
	settle();
	say_data("echo", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	say("unspec", connect(fd, (void *)&un, sizeof(un)));
	say("nowhere", send(fd, "x", 1, 0));
	say("sendto", sendto(fd, "anybody", 7, 0, (void *)&b, sizeof(b)));
	settle();
	say_data("any source", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	say("short", connect(fd, (void *)&a, 3));
	close(fd);
}

static void bound_then_unspec(int arg)
{
	char buf[32];
	struct sockaddr_in a = peer(7001), un = { .sin_family = AF_UNSPEC };
	int fd = udp_bound(), port = my_port(fd);

	(void)arg;
	say("connect", connect(fd, (void *)&a, sizeof(a)));
	say("unspec", connect(fd, (void *)&un, sizeof(un)));
	say_text("same port", my_port(fd) == port ? "yes" : "no");
	ask(fd, 7007, "open again");
	settle();
	say_data("any source", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd);
}

static void bind_to_device(int arg)
{
	char buf[32], name[IF_NAMESIZE] = "";
	socklen_t l = sizeof(name);
	int fd = udp_any();

	(void)arg;
	for (unsigned i = 1; i < 20; i++)
		if (if_indextoname(i, name) && strcmp(name, "lo"))
			break;
	say("device", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, name, strlen(name)));
	say("get", getsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, name, &l));
	ask(fd, 7001, "by device");
	settle();
	say_data("echo", buf, recv(fd, buf, sizeof(buf), MSG_DONTWAIT));
	say("lo", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "lo", 2));
	struct sockaddr_in a = peer(7001);
	say("unreachable", sendto(fd, "x", 1, 0, (void *)&a, sizeof(a)));
	say("none such", setsockopt(fd, SOL_SOCKET, SO_BINDTODEVICE, "nosuchif", 8));
	close(fd);
}

/* --- multicast: joined, then the peer sends --- */
static void mc_send(int fd, const char *group, int n)
{
	char text[64];

	snprintf(text, sizeof(text), "%s %d %d", group, my_port(fd), n);
	int ctl = udp_connected(7006);
	send(ctl, text, strlen(text), 0);
	settle();
	close(ctl);
}

static void mc_drain(int fd, const char *what)
{
	char buf[64];
	int n = 0, sum = 0;
	long r;

	while ((r = recv(fd, buf, sizeof(buf), MSG_DONTWAIT)) > 0)
		n++, sum += buf[r - 1];
	say(what, n), say("  sum", sum);
}

static int mc_socket(const char *bind_ip)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int fd = udp();

	setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	if (bind_ip)
		inet_pton(AF_INET, bind_ip, &a.sin_addr);
	if (bind(fd, (void *)&a, sizeof(a)))
		say("bind", -1);
	return fd;
}

static long mc_join(int fd, int op, const char *group)
{
	struct ip_mreq r;

	inet_pton(AF_INET, group, &r.imr_multiaddr);
	inet_pton(AF_INET, my_ip, &r.imr_interface);
	return setsockopt(fd, IPPROTO_IP, op, &r, sizeof(r));
}

static void mc_member(int to_group)
{
	int fd = mc_socket(to_group ? "239.1.1.1" : NULL);

	say("join", mc_join(fd, IP_ADD_MEMBERSHIP, "239.1.1.1"));
	say("twice", mc_join(fd, IP_ADD_MEMBERSHIP, "239.1.1.1"));
	mc_send(fd, "239.1.1.1", 5);
	mc_drain(fd, "got");
	say("leave", mc_join(fd, IP_DROP_MEMBERSHIP, "239.1.1.1"));
	say("leave twice", mc_join(fd, IP_DROP_MEMBERSHIP, "239.1.1.1"));
	mc_send(fd, "239.1.1.1", 3);
	mc_drain(fd, "after leave");
	close(fd);
}

static void mc_unicast_bound(int arg)
{
	int fd = mc_socket(my_ip);

	(void)arg;
	say("join", mc_join(fd, IP_ADD_MEMBERSHIP, "239.1.1.2"));
	mc_send(fd, "239.1.1.2", 3);
	mc_drain(fd, "bound to unicast");
	close(fd);
}

static void mc_before_bind(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int fd = udp();

	(void)arg;
	say("join", mc_join(fd, IP_ADD_MEMBERSHIP, "239.1.1.3"));
	say("bind", bind(fd, (void *)&a, sizeof(a)));
	mc_send(fd, "239.1.1.3", 4);
	mc_drain(fd, "got");
	close(fd);
}

static void mc_two_sockets(int arg)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int x = mc_socket(NULL), y = udp();

	(void)arg;
	setsockopt(y, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	a.sin_port = htons(my_port(x));
	say("bind", bind(y, (void *)&a, sizeof(a)));
	mc_join(x, IP_ADD_MEMBERSHIP, "239.1.1.4");
	mc_join(y, IP_ADD_MEMBERSHIP, "239.1.1.4");
	mc_send(x, "239.1.1.4", 4);
	mc_drain(x, "first");
	mc_drain(y, "second");
	close(x), close(y);
}

static void mc_not_member(int all)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int x = mc_socket(NULL), y = udp();

	setsockopt(y, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	setsockopt(y, IPPROTO_IP, IP_MULTICAST_ALL, &all, sizeof(all));
	a.sin_port = htons(my_port(x));
	bind(y, (void *)&a, sizeof(a));
	mc_join(x, IP_ADD_MEMBERSHIP, "239.1.1.5");
	mc_send(x, "239.1.1.5", 2);
	mc_drain(x, "member");
	mc_drain(y, "bystander");
	close(x), close(y);
}

static void mc_sender(int loop)
{
	struct sockaddr_in g = { .sin_family = AF_INET };
	int fd = udp_bound(), rx = mc_socket(NULL);
	struct in_addr me;
	char buf[16];

	inet_pton(AF_INET, my_ip, &me);
	inet_pton(AF_INET, "239.1.1.6", &g.sin_addr);
	g.sin_port = htons(my_port(rx));
	mc_join(rx, IP_ADD_MEMBERSHIP, "239.1.1.6");
	say("if", setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &me, sizeof(me)));
	say("loop", setsockopt(fd, IPPROTO_IP, IP_MULTICAST_LOOP, &loop, sizeof(loop)));
	say("send", sendto(fd, "to all", 6, 0, (void *)&g, sizeof(g)));
	settle();
	say_data("own copy", buf, recv(rx, buf, sizeof(buf), MSG_DONTWAIT));
	close(fd), close(rx);
}

static void mc_errors(int arg)
{
	int fd = udp();

	(void)arg;
	say("not a group", mc_join(fd, IP_ADD_MEMBERSHIP, "10.1.1.1"));
	struct ip_mreqn r = { .imr_ifindex = 9999 };
	inet_pton(AF_INET, "239.1.1.7", &r.imr_multiaddr);
	say("no interface", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &r, sizeof(r)));
	say("short", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, &r, 2));
	say("null", setsockopt(fd, IPPROTO_IP, IP_ADD_MEMBERSHIP, NULL, sizeof(r)));
	say("loop bad", setsockopt(fd, IPPROTO_IP, IP_MULTICAST_TTL, &(int){ 300 }, sizeof(int)));
	close(fd);
}

static void mc_source(int arg)
{
	struct ip_mreq_source r;
	int fd = mc_socket(NULL);

	(void)arg;
	inet_pton(AF_INET, "239.1.1.8", &r.imr_multiaddr);
	inet_pton(AF_INET, my_ip, &r.imr_interface);
	inet_pton(AF_INET, peer_ip, &r.imr_sourceaddr);
	say("join source", setsockopt(fd, IPPROTO_IP, IP_ADD_SOURCE_MEMBERSHIP, &r, sizeof(r)));
	mc_send(fd, "239.1.1.8", 3);
	mc_drain(fd, "got");
	say("leave source", setsockopt(fd, IPPROTO_IP, IP_DROP_SOURCE_MEMBERSHIP, &r, sizeof(r)));
	close(fd);
}

static void rcvbuf_overflow(int arg)
{
	char buf[2048];
	int n = 0, fd = udp_connected(7003);

	(void)arg;
	setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &(int){ 4096 }, sizeof(int));
	send(fd, "500 1000", 8, 0);
	settle();
	settle();
	while (recv(fd, buf, sizeof(buf), MSG_DONTWAIT) > 0)
		n++;
	say_text("some kept", n > 0 ? "yes" : "no"); /* a ring in front of the buffer keeps more than the kernel alone */
	close(fd);
}

const struct call_case opt_cases[] = {
	{ "option SO_REUSEADDR", one_option, 0 }, { "option SO_REUSEPORT", one_option, 1 },
	{ "option SO_RCVBUF", one_option, 2 }, { "option SO_SNDBUF", one_option, 3 },
	{ "option SO_BROADCAST", one_option, 4 }, { "option SO_PRIORITY", one_option, 5 },
	{ "option SO_TIMESTAMP", one_option, 6 }, { "option SO_TIMESTAMPNS", one_option, 7 },
	{ "option IP_TTL", one_option, 8 }, { "option IP_TTL bad", one_option, 9 },
	{ "option IP_TOS", one_option, 10 }, { "option IP_PKTINFO", one_option, 11 },
	{ "option IP_MULTICAST_TTL", one_option, 12 }, { "option IP_MULTICAST_LOOP", one_option, 13 },
	{ "option IP_MTU_DISCOVER", one_option, 14 }, { "option IP_RECVTTL", one_option, 15 },
	{ "option IP_RECVERR", one_option, 16 }, { "option SO_MARK", one_option, 17 },
	{ "option unknown", one_option, 18 }, { "option unknown level", one_option, 19 },
	{ "path MTU discovery: dont", mtu_discover, IP_PMTUDISC_DONT },
	{ "path MTU discovery: want", mtu_discover, IP_PMTUDISC_WANT },
	{ "path MTU discovery: do", mtu_discover, IP_PMTUDISC_DO },
	{ "path MTU discovery: probe", mtu_discover, IP_PMTUDISC_PROBE },
	{ "path MTU discovery: interface", mtu_discover, IP_PMTUDISC_INTERFACE },
	{ "path MTU discovery: omit", mtu_discover, IP_PMTUDISC_OMIT },
	{ "path MTU discovery: bad", mtu_discover, 9 },
	{ "control timestamp", control, 0 }, { "control timestampns", control, 1 }, { "control pktinfo", control, 2 },
	{ "control ttl", control, 3 }, { "control tos", control, 4 },
	{ "names", names, 0 }, { "bind errors", bind_errors, 0 }, { "reconnect", reconnect, 0 },
	{ "bound, then AF_UNSPEC", bound_then_unspec, 0 }, { "bind to device", bind_to_device, 0 },
	{ "multicast member", mc_member, 0 }, { "multicast bound to group", mc_member, 1 },
	{ "multicast, unicast bound", mc_unicast_bound, 0 }, { "multicast join before bind", mc_before_bind, 0 },
	{ "multicast two sockets", mc_two_sockets, 0 }, { "multicast bystander", mc_not_member, 1 },
	{ "multicast bystander, all off", mc_not_member, 0 }, { "multicast sender loop", mc_sender, 1 },
	{ "multicast sender no loop", mc_sender, 0 }, { "multicast errors", mc_errors, 0 },
	{ "multicast source", mc_source, 0 }, { "rcvbuf overflow", rcvbuf_overflow, 0 },
	{ 0 },
};
