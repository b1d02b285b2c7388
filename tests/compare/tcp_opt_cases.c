/* Options of a connection, before and after it carried something. */
#include "tcp_calls.h"
#include <sys/mman.h>

struct option {
	const char *name;
	int level, opt, value;
};

/* set on a connection, read back, and it still works; `value` 1000000: only read */
static const struct option options[] = {
	{ "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1 },
	{ "TCP_NODELAY 0", IPPROTO_TCP, TCP_NODELAY, 0 },
	{ "TCP_CORK", IPPROTO_TCP, TCP_CORK, 0 },
	{ "TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 77 },
	{ "TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL, 7 },
	{ "TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 5 },
	{ "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 1 },
	{ "TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 12345 },
	{ "TCP_SYNCNT", IPPROTO_TCP, TCP_SYNCNT, 3 },
	{ "TCP_LINGER2", IPPROTO_TCP, TCP_LINGER2, 9 },
	{ "TCP_DEFER_ACCEPT", IPPROTO_TCP, TCP_DEFER_ACCEPT, 3 },
	{ "TCP_WINDOW_CLAMP", IPPROTO_TCP, TCP_WINDOW_CLAMP, 60000 },
	{ "TCP_MAXSEG", IPPROTO_TCP, TCP_MAXSEG, 1000 },
	{ "TCP_NOTSENT_LOWAT", IPPROTO_TCP, TCP_NOTSENT_LOWAT, 16384 },
	{ "SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 50000 },
	{ "SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 50000 },
	{ "SO_RCVBUF tiny", SOL_SOCKET, SO_RCVBUF, 1 },
	{ "SO_SNDBUF tiny", SOL_SOCKET, SO_SNDBUF, 1 },
	{ "SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR, 1 },
	{ "SO_PRIORITY", SOL_SOCKET, SO_PRIORITY, 3 },
	{ "SO_MARK", SOL_SOCKET, SO_MARK, 7 },
	{ "SO_OOBINLINE", SOL_SOCKET, SO_OOBINLINE, 1 },
	{ "SO_BROADCAST", SOL_SOCKET, SO_BROADCAST, 1 },
	{ "SO_DONTROUTE", SOL_SOCKET, SO_DONTROUTE, 0 },
	{ "SO_TIMESTAMP", SOL_SOCKET, SO_TIMESTAMP, 0 },
	{ "SO_BUSY_POLL", SOL_SOCKET, SO_BUSY_POLL, 0 },
	{ "SO_INCOMING_CPU", SOL_SOCKET, SO_INCOMING_CPU, 0 },
	{ "IP_TTL", IPPROTO_IP, IP_TTL, 33 },
	{ "IP_TOS", IPPROTO_IP, IP_TOS, 0x10 },
	{ "IP_RECVERR", IPPROTO_IP, IP_RECVERR, 1 },
	{ "IP_MTU_DISCOVER", IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_DO },
	{ "bad IP_TTL", IPPROTO_IP, IP_TTL, 999 },
	{ "bad TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 0 },
	{ "bad TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 1000 },
	{ "bad TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, -1 },
	{ "unknown option", SOL_SOCKET, 999, 1 }, { "unknown TCP option", IPPROTO_TCP, 999, 1 },
	{ "unknown level", 999, 1, 1 },
};

static void works(int fd)
{
	char c[16];

	tell("later 0 echo 11");
	say("send", send(fd, "still works", 11, 0));
	say_data("back", c, recv(fd, c, 11, MSG_WAITALL));
}

static void read_int(int fd, const struct option *o)
{
	int got = -99;
	socklen_t len = sizeof(got);

	say(o->name, getsockopt(fd, o->level, o->opt, &got, &len));
	say("  value", got), say("  length", len);
}

/* Some in a row: each connection costs two moves. */
static void set_options(int arg)
{
	int from = arg / 100, to = from + arg % 100, n = (int)(sizeof(options) / sizeof(options[0]));
	int fd = tcp_client();

	for (int i = from; i < to && i < n; i++) {
		const struct option *o = &options[i];

		say(o->name, setsockopt(fd, o->level, o->opt, &o->value, sizeof(o->value)));
		read_int(fd, o);
	}
	works(fd);
	close(fd);
}

static const struct option read_only[] = {
	{ "SO_TYPE", SOL_SOCKET, SO_TYPE, 0 }, { "SO_PROTOCOL", SOL_SOCKET, SO_PROTOCOL, 0 },
	{ "SO_DOMAIN", SOL_SOCKET, SO_DOMAIN, 0 }, { "SO_ACCEPTCONN", SOL_SOCKET, SO_ACCEPTCONN, 0 },
	{ "SO_ERROR", SOL_SOCKET, SO_ERROR, 0 }, { "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 0 },
	{ "SO_OOBINLINE", SOL_SOCKET, SO_OOBINLINE, 0 }, { "SO_RCVLOWAT", SOL_SOCKET, SO_RCVLOWAT, 0 },
	{ "SO_SNDLOWAT", SOL_SOCKET, SO_SNDLOWAT, 0 }, { "SO_REUSEADDR", SOL_SOCKET, SO_REUSEADDR, 0 },
	{ "SO_REUSEPORT", SOL_SOCKET, SO_REUSEPORT, 0 }, { "SO_PRIORITY", SOL_SOCKET, SO_PRIORITY, 0 },
	{ "SO_MARK", SOL_SOCKET, SO_MARK, 0 }, { "SO_BINDTODEVICE", SOL_SOCKET, SO_BINDTODEVICE, 0 },
	{ "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 0 }, { "TCP_CORK", IPPROTO_TCP, TCP_CORK, 0 },
	{ "TCP_MAXSEG", IPPROTO_TCP, TCP_MAXSEG, 0 }, { "TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 0 },
	{ "TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL, 0 }, { "TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 0 },
	{ "TCP_SYNCNT", IPPROTO_TCP, TCP_SYNCNT, 0 }, { "TCP_LINGER2", IPPROTO_TCP, TCP_LINGER2, 0 },
	{ "TCP_DEFER_ACCEPT", IPPROTO_TCP, TCP_DEFER_ACCEPT, 0 }, { "TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 0 },
	{ "TCP_NOTSENT_LOWAT", IPPROTO_TCP, TCP_NOTSENT_LOWAT, 0 }, { "TCP_FASTOPEN", IPPROTO_TCP, TCP_FASTOPEN, 0 },
	{ "TCP_REPAIR", IPPROTO_TCP, TCP_REPAIR, 0 }, { "TCP_THIN_LINEAR_TIMEOUTS", IPPROTO_TCP, TCP_THIN_LINEAR_TIMEOUTS, 0 },
	{ "IP_TTL", IPPROTO_IP, IP_TTL, 0 }, { "IP_TOS", IPPROTO_IP, IP_TOS, 0 }, { "IP_MTU", IPPROTO_IP, IP_MTU, 0 },
	{ "IP_MTU_DISCOVER", IPPROTO_IP, IP_MTU_DISCOVER, 0 },
};

static void read_options(int accepted)
{
	char name[32] = "";
	socklen_t len = sizeof(name);
	int fd = tcp_pair(accepted), got;

	works(fd);
	for (unsigned i = 0; i < sizeof(read_only) / sizeof(read_only[0]); i++)
		read_int(fd, &read_only[i]);
	say("TCP_CONGESTION", getsockopt(fd, IPPROTO_TCP, TCP_CONGESTION, name, &len));
	say_text("name", name), say("length", len);
	len = sizeof(got);
	say("SO_SNDBUF", getsockopt(fd, SOL_SOCKET, SO_SNDBUF, &got, &len));
	say_yes("large enough", got >= 16384 && got <= 8 << 20);
	say("SO_RCVBUF", getsockopt(fd, SOL_SOCKET, SO_RCVBUF, &got, &len));
	say_yes("large enough", got >= 65536 && got <= 64 << 20);
	works(fd);
	close(fd);
}

/* Set before connect(), seen after it. */
static void before_connect(int arg)
{
	static const struct option early[] = {
		{ "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 1 }, { "TCP_KEEPIDLE", IPPROTO_TCP, TCP_KEEPIDLE, 70 },
		{ "TCP_KEEPINTVL", IPPROTO_TCP, TCP_KEEPINTVL, 6 }, { "TCP_KEEPCNT", IPPROTO_TCP, TCP_KEEPCNT, 4 },
		{ "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 1 }, { "TCP_USER_TIMEOUT", IPPROTO_TCP, TCP_USER_TIMEOUT, 54321 },
		{ "TCP_MAXSEG", IPPROTO_TCP, TCP_MAXSEG, 900 }, { "SO_RCVBUF", SOL_SOCKET, SO_RCVBUF, 70000 },
		{ "SO_SNDBUF", SOL_SOCKET, SO_SNDBUF, 60000 }, { "IP_TOS", IPPROTO_IP, IP_TOS, 8 },
		{ "IP_TTL", IPPROTO_IP, IP_TTL, 44 }, { "TCP_QUICKACK", IPPROTO_TCP, TCP_QUICKACK, 1 },
	};
	struct sockaddr_in a = peer(TCP_PORT);
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	(void)arg;
	for (unsigned i = 0; i < sizeof(early) / sizeof(early[0]); i++)
		say(early[i].name, setsockopt(fd, early[i].level, early[i].opt, &early[i].value, sizeof(int)));
	say("connect", connect(fd, (void *)&a, sizeof(a)));
	tell("accept");
	works(fd);
	for (unsigned i = 0; i + 1 < sizeof(early) / sizeof(early[0]); i++)
		read_int(fd, &early[i]);
	say("keepalive off", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, &(int){ 0 }, sizeof(int)));
	read_int(fd, &early[4]);
	works(fd);
	close(fd);
}

static void lengths(int arg)
{
	char small[8] = { 1, 1, 1, 1, 9, 9, 9, 9 };
	int fd = tcp_client();
	socklen_t len;

	(void)arg;
	say("TCP_NODELAY of 1", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, small, 1));
	say("TCP_NODELAY of 8", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, small, 8));
	say("SO_KEEPALIVE of 1", setsockopt(fd, SOL_SOCKET, SO_KEEPALIVE, small, 1));
	say("IP_TOS of 1", setsockopt(fd, IPPROTO_IP, IP_TOS, &(char){ 4 }, 1));
	say("nowhere", setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, (void *)8, 4));
	static const struct option each[] = {
		{ "TCP_NODELAY", IPPROTO_TCP, TCP_NODELAY, 0 }, { "SO_ERROR", SOL_SOCKET, SO_ERROR, 0 },
		{ "SO_KEEPALIVE", SOL_SOCKET, SO_KEEPALIVE, 0 }, { "TCP_MAXSEG", IPPROTO_TCP, TCP_MAXSEG, 0 },
		{ "IP_TOS", IPPROTO_IP, IP_TOS, 0 }, { "TCP_INFO", IPPROTO_TCP, TCP_INFO, 0 },
	};
	for (unsigned i = 0; i < sizeof(each) / sizeof(each[0]); i++)
		for (len = 0; len <= 8; len += 2) {
			socklen_t l = len;

			memset(small, 0x55, sizeof(small));
			say(each[i].name, getsockopt(fd, each[i].level, each[i].opt, small, &l));
			say("  length", l);
			say("  first, untouched", small[0] == 0x55), say("  last, untouched", small[7] == 0x55);
		}
	len = (socklen_t)-1;
	say("negative", getsockopt(fd, IPPROTO_TCP, TCP_NODELAY, small, &len));
	len = 4;
	say("nowhere", getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, (void *)8, &len));
	say("no length", getsockopt(fd, IPPROTO_TCP, TCP_MAXSEG, small, (void *)8));
	close(fd);
}

static void quick_ack(int arg)
{
	int fd = tcp_client();

	(void)arg;
	say("TCP_QUICKACK 1", setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &(int){ 1 }, sizeof(int)));
	works(fd);
	say("TCP_QUICKACK 0", setsockopt(fd, IPPROTO_TCP, TCP_QUICKACK, &(int){ 0 }, sizeof(int)));
	works(fd);
	close(fd);
}

static void linger_option(int arg)
{
	struct linger l = { 1, 5 }, got = { 9, 9 };
	socklen_t len = sizeof(got);
	int fd = tcp_client();

	(void)arg;
	say("SO_LINGER", setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, sizeof(l)));
	say("getsockopt", getsockopt(fd, SOL_SOCKET, SO_LINGER, &got, &len));
	say("on", got.l_onoff), say("seconds", got.l_linger);
	say("short", setsockopt(fd, SOL_SOCKET, SO_LINGER, &l, 4));
	works(fd);
	say("close", close(fd));
	tell_said("peer", "read");
}

static void say_info(int fd)
{
	struct tcp_info i = { 0 };
	socklen_t len = sizeof(i);

	say("TCP_INFO", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &len));
	say_yes("whole", len == sizeof(i));
	say("state", i.tcpi_state), say("ca_state", i.tcpi_ca_state), say("retransmits", i.tcpi_retransmits);
	say("options", i.tcpi_options & 7);
	say("probes", i.tcpi_probes), say("backoff", i.tcpi_backoff);
	say("snd_mss", i.tcpi_snd_mss), say("advmss", i.tcpi_advmss), say("pmtu", i.tcpi_pmtu);
	say("unacked", i.tcpi_unacked), say("sacked", i.tcpi_sacked), say("lost", i.tcpi_lost), say("retrans", i.tcpi_retrans);
	say("total_retrans", i.tcpi_total_retrans);
	say_yes("rto", i.tcpi_rto >= 10000 && i.tcpi_rto < 3000000);
	say_yes("rtt", i.tcpi_rtt > 0 && i.tcpi_rtt < 500000);
	say_yes("cwnd", i.tcpi_snd_cwnd >= 2), say_yes("rcv_mss", i.tcpi_rcv_mss >= 88);
	say_yes("data came lately", i.tcpi_last_data_recv < 2000);
	say_yes("data went lately", i.tcpi_last_data_sent < 2000);
	say("bytes_acked", (long)i.tcpi_bytes_acked), say("bytes_received", (long)i.tcpi_bytes_received);
	say("notsent", i.tcpi_notsent_bytes);
	say_yes("segments", i.tcpi_segs_in >= 2 && i.tcpi_segs_out >= 2); /* the ACK of a SYN-ACK may go with data */
	say_yes("data segments", i.tcpi_data_segs_in >= 1 && i.tcpi_data_segs_out >= 1);
}

static void info(int accepted)
{
	char c[64];
	int fd = tcp_pair(accepted);

	works(fd);
	settle();
	say_info(fd);
	tell("send 40");
	settle();
	say_data("recv", c, recv(fd, c, 64, 0));
	settle();
	say_info(fd);
	tell("shut 1");
	settle();
	struct tcp_info i = { 0 };
	say("after their end", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &(socklen_t){ sizeof(i) })), say("state", i.tcpi_state);
	tell("reset");
	settle();
	say("after the reset", getsockopt(fd, IPPROTO_TCP, TCP_INFO, &i, &(socklen_t){ sizeof(i) })), say("state", i.tcpi_state);
	close(fd);
}

static void names(int accepted)
{
	struct sockaddr_in a = { 0 };
	socklen_t len = sizeof(a);
	int fd = tcp_pair(accepted);

	say("getsockname", getsockname(fd, (void *)&a, &len)), say_text("local", inet_ntoa(a.sin_addr)), say("len", len);
	say_yes("port", a.sin_port != 0);
	len = sizeof(a);
	say("getpeername", getpeername(fd, (void *)&a, &len)), say_text("peer", inet_ntoa(a.sin_addr));
	say_yes("port", accepted ? a.sin_port != 0 : ntohs(a.sin_port) == TCP_PORT);
	say("F_GETFL", fcntl(fd, F_GETFL) & (O_NONBLOCK | O_ACCMODE)), say("F_GETFD", fcntl(fd, F_GETFD));
	tell("shut 1");
	settle();
	len = sizeof(a);
	say("getpeername", getpeername(fd, (void *)&a, &len));
	tell("reset");
	settle();
	len = sizeof(a);
	say("after a reset", getpeername(fd, (void *)&a, &len)), say("getsockname", getsockname(fd, (void *)&a, &len));
	close(fd);
}

static void again(int which)
{
	struct sockaddr_in a = peer(TCP_PORT);
	struct sockaddr none = { .sa_family = AF_UNSPEC };
	int fd = tcp_client();

	switch (which) {
	case 0:
		say("connect", connect(fd, (void *)&a, sizeof(a)));
		say("bind", bind(fd, (void *)&a, sizeof(a)));
		say("listen", listen(fd, 5));
		say("accept", accept(fd, NULL, NULL));
		works(fd);
		break;
	case 1:
		say("AF_UNSPEC", connect(fd, &none, sizeof(none)));
		tell_said("peer", "read");
		say("send", send(fd, "x", 1, MSG_NOSIGNAL));
		say("connect", connect(fd, (void *)&a, sizeof(a)));
		tell("accept");
		works(fd);
		break;
	}
	close(fd);
}

static void error_option(int arg)
{
	int e = -1, fd = tcp_client();
	socklen_t len = sizeof(e);
	char c[4];

	(void)arg;
	say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len)), say("none", e);
	tell("reset");
	settle();
	say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len)), say_yes("ECONNRESET", e == ECONNRESET);
	say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &len)), say("none", e);
	say("recv", recv(fd, c, 4, 0)), say("send", send(fd, c, 1, MSG_NOSIGNAL));
	close(fd);
}

static void odd_options(int arg)
{
	struct sockaddr_in name = { 0 };
	socklen_t len = sizeof(name);
	int fd = tcp_client(), v = 0;

	(void)arg;
	say("SO_PEERNAME", getsockopt(fd, SOL_SOCKET, SO_PEERNAME, &name, &len)), say("length", len);
	say("port", ntohs(name.sin_port)), say("family", name.sin_family);
	len = 4, memset(&name, 0, sizeof(name));
	say("a part", getsockopt(fd, SOL_SOCKET, SO_PEERNAME, &name, &len)), say("length", len), say("port", ntohs(name.sin_port));
	len = 28;
	say("more", getsockopt(fd, SOL_SOCKET, SO_PEERNAME, &name, &len)), say("length", len);
	len = (socklen_t)-1;
	say("negative", getsockopt(fd, SOL_SOCKET, SO_PEERNAME, &name, &len));
	say("SO_ERROR, negative", getsockopt(fd, SOL_SOCKET, SO_ERROR, &v, &len));
	len = sizeof(v);
	say("IPV6_MTU", getsockopt(fd, IPPROTO_IPV6, IPV6_MTU, &v, &len));
	say("TCP_FASTOPEN", setsockopt(fd, IPPROTO_TCP, TCP_FASTOPEN, &(int){ 5 }, sizeof(int)));
	works(fd);
	close(fd);
}

/* Addresses that a stream has no use for, and names for nobody. */
static void odd_addresses(int arg)
{
	struct sockaddr_storage a = { 0 };
	socklen_t len = (socklen_t)-1;
	char c[4096];
	int fd = tcp_client();

	(void)arg;
	say("getpeername nowhere", getpeername(fd, NULL, NULL)), say("getsockname nowhere", getsockname(fd, NULL, NULL));
	say("negative", getpeername(fd, (void *)&a, &len));
	len = 0;
	say("nothing", getpeername(fd, NULL, &len)), say("length", len);
	say("sendto, long", sendto(fd, "abc", 3, 0, (void *)&a, 2000)), say("nowhere", sendto(fd, "abc", 3, 0, (void *)8, 16));
	say("none", sendto(fd, "abc", 3, 0, (void *)8, 0));
	tell("send 3");
	settle();
	say("recvfrom, no length", recvfrom(fd, c, 1, 0, (void *)&a, NULL));
	len = (socklen_t)-1;
	say("negative", recvfrom(fd, c, 1, 0, (void *)&a, &len));
	len = 5;
	say("length", recvfrom(fd, c, 1, 0, (void *)8, &len)), say("is", len);
	say("read", read(fd, c, (size_t)-1)), say("write", write(fd, c, (size_t)-1));
	works(fd);
	close(fd);
}

/* An option that reads. */
static void zero_copy(int accepted)
{
	static char copy[65536], rest[65536];
	struct {
		uint64_t address;
		uint32_t length, skip;
		uint32_t inq;
		int32_t err;
		uint64_t copy_address;
		int32_t copy_len;
		uint32_t flags;
	} z = { .length = sizeof(copy), .copy_address = (uintptr_t)copy, .copy_len = sizeof(copy) };
	int fd = tcp_pair(accepted);
	void *at = mmap(NULL, sizeof(copy), PROT_READ, MAP_SHARED, fd, 0);
	ssize_t n;

	z.address = (uintptr_t)at;
	tell("send 30000");
	settle();
	say("getsockopt", getsockopt(fd, IPPROTO_TCP, TCP_ZEROCOPY_RECEIVE, &z, &(socklen_t){ sizeof(z) }));
	n = z.length + (z.copy_len > 0 ? z.copy_len : 0);
	say_yes("some, or it is to be read", n > 0 || z.skip > 0);
	while (n < 30000)
		n += recv(fd, rest, sizeof(rest), 0);
	say("all", n);
	munmap(at, sizeof(copy));
	close(fd);
}

const struct call_case tcp_opt_cases[] = {
	{ "tcp options 1", set_options, 8 }, { "tcp options 2", set_options, 804 }, { "tcp options 3", set_options, 1202 },
	{ "tcp options 4", set_options, 1404 }, { "tcp options 5", set_options, 1803 }, { "tcp options 6", set_options, 2106 },
	{ "tcp options 7", set_options, 2704 }, { "tcp options, bad", set_options, 3107 },
	{ "tcp options read", read_options, 0 }, { "tcp options read, accepted", read_options, 1 },
	{ "tcp options before connect", before_connect, 0 }, { "tcp option lengths", lengths, 0 },
	{ "tcp TCP_QUICKACK", quick_ack, 0 }, { "tcp SO_LINGER option", linger_option, 0 },
	{ "tcp TCP_INFO", info, 0 }, { "tcp TCP_INFO, accepted", info, 1 },
	{ "tcp names", names, 0 }, { "tcp names, accepted", names, 1 },
	{ "tcp connected already", again, 0 }, { "tcp connect to AF_UNSPEC", again, 1 },
	{ "tcp TCP_ZEROCOPY_RECEIVE", zero_copy, 0 }, { "tcp TCP_ZEROCOPY_RECEIVE, accepted", zero_copy, 1 },
	{ "tcp SO_ERROR", error_option, 0 }, { "tcp odd options", odd_options, 0 }, { "tcp odd addresses", odd_addresses, 0 },
	{ 0 },
};
