/* SO_TIMESTAMPING and its relations: which control messages come, what of their three times is filled in, and what the
 * error queue tells of what was sent. The adapter's time is left out: a raw packet QP has it where a veth has none. */
#include "calls.h"
#include <linux/errqueue.h>
#include <linux/net_tstamp.h>

#define SOFT (SOF_TIMESTAMPING_RX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE)
#define HARD (SOF_TIMESTAMPING_RX_HARDWARE | SOF_TIMESTAMPING_RAW_HARDWARE)
#define RX_FILTER (1 << 17)
#define OLD 37
#define NEW 65

static const struct {
	int option, flags;
	int other; /* an option that is set to 1 as well, before it */
} kinds[] = {
	{ OLD, SOFT, 0 },
	{ OLD, SOF_TIMESTAMPING_RX_SOFTWARE, 0 },
	{ OLD, SOFT | HARD, 0 },
	{ OLD, SOF_TIMESTAMPING_TX_SOFTWARE | SOF_TIMESTAMPING_SOFTWARE, 0 },
	{ OLD, SOF_TIMESTAMPING_TX_SCHED | SOF_TIMESTAMPING_SOFTWARE | SOF_TIMESTAMPING_OPT_ID |
	       SOF_TIMESTAMPING_OPT_TSONLY, 0 },
	{ OLD, SOFT | 1 << 30, 0 },
	{ OLD, SOFT | RX_FILTER, 0 },
	{ OLD, SOFT, SO_TIMESTAMPNS },
	{ OLD, SOF_TIMESTAMPING_SOFTWARE | RX_FILTER, SO_TIMESTAMPNS },
	{ OLD, SOF_TIMESTAMPING_SOFTWARE, SO_TIMESTAMP },
	{ NEW, SOFT, 0 },
	{ NEW, SOFT, SO_TIMESTAMP },
};

static void say_time(const char *what, const struct timespec *t)
{
	say_text(what, !t->tv_sec && !t->tv_nsec ? "none" : labs(t->tv_sec - time(NULL)) < 5 ? "recent" : "odd");
}

static void say_controls(struct msghdr *m)
{
	for (struct cmsghdr *c = CMSG_FIRSTHDR(m); c; c = CMSG_NXTHDR(m, c)) {
		struct timespec t[3] = { { 0 } };
		struct sock_extended_err e;

		say("level", c->cmsg_level), say("type", c->cmsg_type), say("len", (long)c->cmsg_len);
		if (c->cmsg_level == IPPROTO_IP) {
			memcpy(&e, CMSG_DATA(c), sizeof(e));
			say("errno", e.ee_errno), say("origin", e.ee_origin), say("info", e.ee_info), say("id", e.ee_data);
			continue;
		}
		memcpy(t, CMSG_DATA(c), c->cmsg_len - CMSG_LEN(0) < sizeof(t) ? c->cmsg_len - CMSG_LEN(0) : sizeof(t));
		say_time("software", &t[0]), say_time("unused", &t[1]);
	}
}

/* Whether a received datagram has a time is then up to others: the kernel takes it for all as soon as one socket of the
 * machine asks. */
static int told_of_chance(int kind)
{
	return !kinds[kind].other && (kinds[kind].flags & (SOFT | RX_FILTER)) == SOF_TIMESTAMPING_SOFTWARE;
}

static void say_received(int fd, int flags, const char *what, size_t room)
{
	char buf[256], cbuf[512];
	struct iovec iov = { buf, sizeof(buf) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = cbuf, .msg_controllen = room };

	memset(cbuf, 0, sizeof(cbuf));
	say(what, recvmsg(fd, &m, flags | MSG_DONTWAIT));
	if (!room)
		return;
	say("flags", m.msg_flags), say("controllen", (long)m.msg_controllen);
	say_controls(&m);
}

static void stamping(int kind)
{
	int flags = kinds[kind].flags, got = -1, fd = udp_connected(7001);
	size_t room = told_of_chance(kind) ? 0 : 512, little = room ? 40 : 0;
	struct pollfd p = { .fd = fd };
	socklen_t len = sizeof(got);

	if (kinds[kind].other)
		say("other", setsockopt(fd, SOL_SOCKET, kinds[kind].other, &(int){ 1 }, sizeof(int)));
	say("set", setsockopt(fd, SOL_SOCKET, kinds[kind].option, &flags, sizeof(flags)));
	say("get", getsockopt(fd, SOL_SOCKET, kinds[kind].option, &got, &len)), say("value", got), say("length", len);
	settle();
	say("send", send(fd, "stamped", 7, 0));
	settle();
	say("poll", poll(&p, 1, 0)), say("events", p.revents);
	say_received(fd, MSG_ERRQUEUE, "error queue", 512);
	say_received(fd, 0, "received", room);
	say("send", send(fd, "short", 5, 0));
	settle();
	say_received(fd, MSG_PEEK, "no room, peek", little);
	say_received(fd, 0, "little room", little);
	flags = 0;
	say("clear", setsockopt(fd, SOL_SOCKET, kinds[kind].option, &flags, sizeof(flags)));
	say("send", send(fd, "plain", 5, 0));
	settle();
	say_received(fd, MSG_ERRQUEUE, "error queue", 512);
	say_received(fd, MSG_ERRQUEUE, "error queue", 512);
	say_received(fd, 0, "received", 512);
	close(fd);
}

const struct call_case stamp_cases[] = {
	{ "timestamping of receiving", stamping, 0 }, { "timestamping that is not reported", stamping, 1 },
	{ "timestamping, adapter's too", stamping, 2 }, { "timestamping of sending", stamping, 3 },
	{ "timestamping of sending, queueing with ids", stamping, 4 }, { "timestamping, bad flags", stamping, 5 },
	{ "timestamping, filtered", stamping, 6 }, { "timestamping and timestampns", stamping, 7 },
	{ "timestamping, filtered, and timestampns", stamping, 8 }, { "timestamping by timestamp", stamping, 9 },
	{ "timestamping for 64 bits", stamping, 10 }, { "timestamping for 64 bits and timestamp", stamping, 11 },
	{ 0 },
};
