/* Bytes: send, receive, their flags, and full windows. */
#include "tcp_calls.h"
#include <sys/sendfile.h>

static void echo_each(int accepted)
{
	char buf[4000], got[4000];
	int fd = tcp_pair(accepted);

	fill(buf, sizeof(buf));
	tell("later 0 echo 3906");
	for (long n = 1; n <= 3125; n *= 5) {
		say("send", send(fd, buf, (size_t)n, 0));
		say_data("recv", got, recv(fd, got, (size_t)n, MSG_WAITALL));
	}
	close(fd);
}

/* The families of calls, one byte string each. */
static void families(int accepted)
{
	struct sockaddr_storage from = { 0 };
	socklen_t len = sizeof(from);
	char a[8], b[8];
	struct iovec v[2] = { { a, 3 }, { b, 4 } };
	struct msghdr m = { .msg_iov = v, .msg_iovlen = 2, .msg_name = &from, .msg_namelen = sizeof(from), .msg_flags = 99 };
	struct sockaddr_in to = peer(9);
	int fd = tcp_pair(accepted);

	tell("send 60");
	settle();
	say_data("read", a, read(fd, a, 5));
	say_data("recv", a, recv(fd, a, 5, 0));
	say_data("recvfrom", a, recvfrom(fd, a, 5, 0, (void *)&from, &len));
	say("namelen", len);
	say("readv", readv(fd, v, 2));
	say_data("first", a, 3), say_data("second", b, 4);
	say("recvmsg", recvmsg(fd, &m, 0));
	say("namelen", m.msg_namelen), say("flags", m.msg_flags), say("controllen", (long)m.msg_controllen);
	say("write", write(fd, "write", 5));
	say("send", send(fd, "send", 4, 0));
	say("sendto nobody", sendto(fd, "to", 2, 0, NULL, 0));
	say("sendto an address", sendto(fd, "address", 7, 0, (void *)&to, sizeof(to)));
	say("writev", writev(fd, v, 2));
	m.msg_name = NULL, m.msg_namelen = 0;
	say("sendmsg", sendmsg(fd, &m, 0));
	tell_said("peer", "recv 32");
	close(fd);
}

static void many_messages(int arg)
{
	char bufs[4][8];
	struct iovec v[4];
	struct mmsghdr m[4] = { 0 };
	int fd = tcp_client();

	(void)arg;
	for (int i = 0; i < 4; i++) {
		memcpy(bufs[i], "abcdefg", 8);
		v[i] = (struct iovec){ bufs[i], 7 };
		m[i].msg_hdr.msg_iov = &v[i], m[i].msg_hdr.msg_iovlen = 1;
	}
	say("sendmmsg", sendmmsg(fd, m, 4, 0));
	say("len", m[3].msg_len);
	tell_said("peer", "recv 28");
	tell("send 10");
	settle();
	say("recvmmsg", recvmmsg(fd, m, 4, MSG_DONTWAIT, NULL));
	say("len", m[0].msg_len), say("len", m[1].msg_len);
	close(fd);
}

static void vectors(int arg)
{
	static char big[100][50], got[5000];
	struct iovec v[100];
	struct msghdr m = { .msg_iov = v, .msg_iovlen = 100 };
	int fd = tcp_client();

	(void)arg;
	for (int i = 0; i < 100; i++) {
		fill(big[i], 50);
		v[i] = (struct iovec){ big[i], (size_t)(i % 25) };
	}
	tell("later 0 echo 1200");
	say("sendmsg", sendmsg(fd, &m, 0));
	say_data("back", got, recv(fd, got, 1200, MSG_WAITALL));
	tell("send 1200");
	memset(big, 0, sizeof(big));
	settle();
	say("readv", readv(fd, v, 100));
	say_data("into many", big, sizeof(big));
	say("writev of 1025", writev(fd, v, arg + 1025)), say("writev of -1", writev(fd, v, arg - 1));
	say("readv of 0", readv(fd, v, 0)), say("writev of 0", writev(fd, v, 0));
	v[0].iov_len = (size_t)-1;
	say("writev of too much", writev(fd, v, 2));
	close(fd);
}

static void nothing_asked(int arg)
{
	char c[4] = "";
	int fd = tcp_client();

	(void)arg;
	say("read of 0, empty", read(fd, c, 0)), say("recv of 0, empty", recv(fd, c, 0, MSG_DONTWAIT));
	say("send of 0", send(fd, c, 0, 0)), say("write of 0", write(fd, c, 0));
	tell("send 3");
	settle();
	say("recv of 0", recv(fd, c, 0, 0)), say("peek of 0", recv(fd, c, 0, MSG_PEEK));
	say_data("recv", c, recv(fd, c, 4, 0));
	tell("close");
	settle();
	say("recv of 0 at the end", recv(fd, c, 0, MSG_DONTWAIT)), say("at the end", recv(fd, c, 4, MSG_DONTWAIT));
	say("again", recv(fd, c, 4, 0));
	close(fd);
}

static void bad_pointers(int arg)
{
	struct iovec v = { (void *)8, 4 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };
	char c[8];
	int fd = tcp_client();

	(void)arg;
	tell("send 5");
	settle();
	say("recv", recv(fd, (void *)8, 4, 0)), say("recvmsg", recvmsg(fd, &m, 0));
	say("read", read(fd, (void *)8, 4));
	say("send", send(fd, (void *)8, 4, 0)), say("sendmsg", sendmsg(fd, &m, 0));
	m.msg_iov = (void *)8;
	say("sendmsg, vector", sendmsg(fd, &m, 0)), say("recvmsg, vector", recvmsg(fd, &m, MSG_DONTWAIT));
	say("recvmsg of nowhere", recvmsg(fd, (void *)8, 0)), say("sendmsg", sendmsg(fd, (void *)8, 0));
	say_data("unharmed", c, recv(fd, c, 8, 0));
	say("send", send(fd, "ok", 2, 0));
	tell_said("peer", "recv 2");
	close(fd);
}

static void peek(int accepted)
{
	char c[64];
	int fd = tcp_pair(accepted);

	tell("send 40");
	settle();
	say_data("peek", c, recv(fd, c, 10, MSG_PEEK)), say_data("peek more", c, recv(fd, c, 64, MSG_PEEK));
	say_data("recv", c, recv(fd, c, 30, 0));
	say_data("peek and wait for all", c, recv(fd, c, 10, MSG_PEEK | MSG_WAITALL));
	say_data("recv", c, recv(fd, c, 64, 0));
	say("peek of none", recv(fd, c, 1, MSG_PEEK | MSG_DONTWAIT));
	tell("later 40 send 5");
	say_data("peek that waits", c, recv(fd, c, 64, MSG_PEEK));
	say_data("recv", c, recv(fd, c, 64, 0));
	close(fd);
}

static void peek_all(int arg)
{
	char c[64];
	int fd = tcp_client();

	(void)arg;
	tell("send 4");
	settle();
	tell("later 60 send 6");
	say_data("peek, wait for all", c, recv(fd, c, 10, MSG_PEEK | MSG_WAITALL));
	say_data("recv", c, recv(fd, c, 64, MSG_DONTWAIT));
	close(fd);
}

static void trunc_(int arg)
{
	char c[64] = "unharmed";
	int fd = tcp_client();

	(void)arg;
	tell("send 40");
	settle();
	say("trunc", recv(fd, c, 30, MSG_TRUNC));
	say_text("the buffer", c);
	say_data("recv", c, recv(fd, c, 64, 0));
	say("trunc of none", recv(fd, c, 64, MSG_TRUNC | MSG_DONTWAIT));
	tell("send 5");
	settle();
	say("peek and trunc", recv(fd, NULL, 64, MSG_TRUNC | MSG_PEEK));
	say("nowhere", recv(fd, NULL, 64, MSG_TRUNC));
	close(fd);
}

/* It has ended, and can't go home any more: what is left is told all the same. */
static void left_at_the_end(int how)
{
	char c[16];
	int fd = tcp_pair(how & 1);

	tell("send 11");
	tell(how & 2 ? "reset" : "close");
	settle();
	if (!(how & 2))
		say("SHUT_WR", shutdown(fd, SHUT_WR)), settle();
	say("trunc", recv(fd, c, 2, MSG_TRUNC));
	say_data("peek, wait for all", c, recv(fd, c, 4, MSG_PEEK | MSG_WAITALL));
	say_data("the same, at once", c, recv(fd, c, 16, MSG_PEEK | MSG_WAITALL | MSG_DONTWAIT));
	say_data("recv", c, recv(fd, c, 16, 0));
	say("trunc of none", recv(fd, c, 2, MSG_TRUNC)), say("again", recv(fd, c, 2, MSG_TRUNC));
	say("urgent", send(fd, "!", 1, MSG_OOB | MSG_NOSIGNAL));
	close(fd);
}

static void wait_all(int accepted)
{
	char c[200];
	int fd = tcp_pair(accepted);

	tell("send 60");
	tell("later 50 send 60");
	say_data("in two parts", c, recv(fd, c, 120, MSG_WAITALL));
	tell("send 30");
	settle();
	say_data("of a part, at once", c, recv(fd, c, 120, MSG_WAITALL | MSG_DONTWAIT));
	tell("send 20");
	tell("later 40 close");
	say_data("up to the end", c, recv(fd, c, 120, MSG_WAITALL));
	say("the end", recv(fd, c, 120, MSG_WAITALL));
	close(fd);
}

static void wait_all_reset(int arg)
{
	char c[200];
	int fd = tcp_client();

	(void)arg;
	tell("send 20");
	settle();
	tell("later 40 reset");
	say_data("up to the reset", c, recv(fd, c, 120, MSG_WAITALL));
	say("then", recv(fd, c, 120, MSG_DONTWAIT)), say("then", recv(fd, c, 120, MSG_DONTWAIT));
	close(fd);
}

static void wait_all_timeout(int arg)
{
	struct timeval tv = { 0, 60000 };
	char c[200];
	int fd = tcp_client();

	(void)arg;
	say("SO_RCVTIMEO", setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &tv, sizeof(tv)));
	tell("send 20");
	settle();
	say_data("a part", c, recv(fd, c, 120, MSG_WAITALL));
	say("none", recv(fd, c, 120, MSG_WAITALL));
	close(fd);
}

static void dont_wait(int accepted)
{
	char c[8];
	int fd = tcp_pair(accepted);

	say("recv", recv(fd, c, 8, MSG_DONTWAIT));
	nonblock(fd);
	say("recv", recv(fd, c, 8, 0)), say("read", read(fd, c, 8));
	tell("send 2");
	settle();
	say_data("recv", c, recv(fd, c, 8, 0)), say("recv", recv(fd, c, 8, 0));
	say("FIONBIO", ioctl(fd, FIONBIO, &(int){ 0 }));
	tell("later 40 send 3");
	say_data("waits again", c, recv(fd, c, 8, 0));
	close(fd);
}

static void odd_flags(int arg)
{
	char c[32];
	struct iovec v = { c, 2 };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1 };
	int fd = tcp_client();

	(void)arg;
	tell("send 20");
	settle();
	say_data("MSG_CMSG_CLOEXEC", c, recv(fd, c, 4, MSG_CMSG_CLOEXEC));
	say_data("recvmsg", c, recvmsg(fd, &m, MSG_CMSG_CLOEXEC)), say("its flags", m.msg_flags);
	say_data("MSG_NOSIGNAL", c, recv(fd, c, 4, MSG_NOSIGNAL));
	say_data("an unknown flag", c, recv(fd, c, 4, 0x80000));
	say("MSG_ERRQUEUE", recv(fd, c, 4, MSG_ERRQUEUE | MSG_DONTWAIT));
	say("MSG_OOB", recv(fd, c, 4, MSG_OOB | MSG_DONTWAIT));
	say("send MSG_CONFIRM", send(fd, "a", 1, MSG_CONFIRM)), say("send MSG_EOR", send(fd, "b", 1, MSG_EOR));
	say("send MSG_DONTROUTE", send(fd, "c", 1, MSG_DONTROUTE)), say("unknown", send(fd, "d", 1, 0x80000));
	tell_said("peer", "recv 4");
	say_data("recv", c, recv(fd, c, 32, 0));
	close(fd);
}

static void urgent(int sending)
{
	char c[8];
	int fd = tcp_client();

	if (sending) {
		say("send", send(fd, "x", 1, MSG_OOB));
		say("send", send(fd, "abc", 3, 0));
		settle();
		tell_said("peer", "recv 3");
	} else {
		tell("send 4"), tell("oob"), tell("send 2");
		settle();
		say("at the mark", ioctl(fd, SIOCATMARK, &(int){ 0 }));
		say_data("recv", c, recv(fd, c, 8, 0));
		say_data("urgent", c, recv(fd, c, 8, MSG_OOB | MSG_DONTWAIT));
		say_data("recv", c, recv(fd, c, 8, 0));
	}
	close(fd);
}

static void more(int cork)
{
	char buf[200];
	int fd = tcp_client();

	fill(buf, sizeof(buf));
	if (cork)
		say("TCP_CORK", setsockopt(fd, IPPROTO_TCP, TCP_CORK, &(int){ 1 }, sizeof(int)));
	for (int i = 0; i < 4; i++)
		say("send", send(fd, buf, 50, cork ? 0 : MSG_MORE));
	if (cork) {
		int on = -1;
		say("getsockopt", getsockopt(fd, IPPROTO_TCP, TCP_CORK, &on, &(socklen_t){ sizeof(on) }));
		say("value", on);
		say("TCP_CORK 0", setsockopt(fd, IPPROTO_TCP, TCP_CORK, &(int){ 0 }, sizeof(int)));
	} else {
		say("send", send(fd, buf, 50, 0));
	}
	tell_said("peer", "recv %d", cork ? 200 : 250);
	close(fd);
}

/* ---- a full window ---- */

static void full_nonblock(int accepted)
{
	int outq = -1, space = 0;
	char c[1] = "x";

	tell("rcvbuf 8192");
	int fd = tcp_pair(accepted);
	nonblock(fd);
	say("SO_SNDBUF", setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int)));
	long n = fill_window(fd);
	say_yes("something was taken", n > 10000 && n < 400000);
	while (send(fd, c, 1, 0) == 1) /* a window probe may have made room */
		n++;
	say("now", -1), say("writev", writev(fd, &(struct iovec){ c, 1 }, 1));
	say_poll("poll", fd, 0);
	say("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &outq));
	say_yes("unacknowledged", outq > 10000 && outq <= n);
	say("SIOCOUTQNSD", ioctl(fd, SIOCOUTQNSD, &space));
	say_yes("unsent", space > 0 && space <= outq);
	char want[32];
	snprintf(want, sizeof(want), "recv %ld", n);
	tell("%s", want);
	settle();
	say_poll("poll", fd, 100);
	say("send", send(fd, c, 1, 0));
	tell_said("peer", "recv 1");
	settle();
	say("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &outq)), say("empty", outq);
	close(fd);
}

static void full_blocking(int how)
{
	static char big[3000000];
	struct timespec t;
	long r;

	tell("rcvbuf 8192");
	int fd = tcp_client();
	fill(big, sizeof(big));
	say("SO_SNDBUF", setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &(int){ 40000 }, sizeof(int)));
	now(&t);
	switch (how) {
	case 0: /* waits for the reader */
		tell("later 60 recv 3000000");
		say("send", send(fd, big, sizeof(big), 0));
		say_yes("waited", elapsed_ms(&t) > 40);
		break;
	case 1: /* SO_SNDTIMEO: a part, then none */
		setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &(struct timeval){ 0, 80000 }, sizeof(struct timeval));
		r = send(fd, big, sizeof(big), 0);
		say_yes("a part", r > 10000 && r < 1000000);
		fill_window(fd);
		say_yes("no more than a probe makes room for", send(fd, big, 100000, 0) < 90000);
		say_yes("waited", elapsed_ms(&t) > 120);
		break;
	case 2: /* the peer closes with our bytes unread: reset */
		tell("later 60 close");
		r = send(fd, big, sizeof(big), MSG_NOSIGNAL);
		say_yes("a part", r > 10000 && r < 1000000);
		say("then", send(fd, big, 1, MSG_NOSIGNAL)), say("then", send(fd, big, 1, MSG_NOSIGNAL));
		break;
	case 3: /* MSG_DONTWAIT of more than fits */
		r = send(fd, big, sizeof(big), MSG_DONTWAIT);
		say_yes("a part", r > 10000 && r < 1000000);
		fill_window(fd);
		while ((r = send(fd, big, 1, MSG_DONTWAIT)) == 1)
			;
		say("then", r);
		break;
	case 4: /* the peer answers the probes */
		setsockopt(fd, IPPROTO_TCP, TCP_USER_TIMEOUT, &(int){ 700 }, sizeof(int));
		fill_window(fd);
		now(&t);
		say_yes("an end", poll(&(struct pollfd){ .fd = fd }, 1, 5000) == 1);
		say_yes("in its time", elapsed_ms(&t) > 300 && elapsed_ms(&t) < 3000);
		say_poll("poll", fd, 0);
		say("recv", recv(fd, big, 1, MSG_DONTWAIT)), say("send", send(fd, big, 1, MSG_NOSIGNAL));
		break;
	}
	close(fd);
}

static void zero_window_of_ours(int arg)
{
	static char buf[400000];
	int fd = tcp_client(), n = -1;
	long all = 0, r;

	(void)arg;
	tell("later 0 send 3000000");
	settle(), settle(), settle();
	say("FIONREAD", ioctl(fd, FIONREAD, &n));
	say_yes("much", n > 50000);
	while (all < 3000000 && (r = recv(fd, buf, sizeof(buf), 0)) > 0)
		all += r;
	say("all", all);
	close(fd);
}

static void counts(int accepted)
{
	char c[16];
	int n = -1, fd = tcp_pair(accepted);

	say("FIONREAD", ioctl(fd, FIONREAD, &n)), say("none", n);
	tell("send 30");
	settle();
	say("FIONREAD", ioctl(fd, FIONREAD, &n)), say("unread", n);
	say_data("recv", c, recv(fd, c, 10, 0));
	say("FIONREAD", ioctl(fd, FIONREAD, &n)), say("unread", n);
	say("SIOCATMARK", ioctl(fd, SIOCATMARK, &n)), say("mark", n);
	say("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &n)), say("unacked", n);
	say("SIOCOUTQNSD", ioctl(fd, SIOCOUTQNSD, &n)), say("unsent", n);
	tell("close");
	settle();
	say("FIONREAD", ioctl(fd, FIONREAD, &n)), say("unread", n);
	say("FIONREAD nowhere", ioctl(fd, FIONREAD, (void *)8)), say("SIOCOUTQ nowhere", ioctl(fd, SIOCOUTQ, (void *)8));
	say("unknown", ioctl(fd, 0x1234, &n));
	say("SIOCGSTAMP", ioctl(fd, 0x8906, &n));
	say("bytes left", recv(fd, c, 16, 0) + recv(fd, c, 16, MSG_DONTWAIT));
	close(fd);
}

static void say_queues(int fd)
{
	int n = -1;

	say("SIOCOUTQ", ioctl(fd, SIOCOUTQ, &n)), say("unacked", n);
	say("SIOCOUTQNSD", ioctl(fd, SIOCOUTQNSD, &n)), say("unsent", n);
}

/* What the peer never acknowledged. 0: it answers by a reset; 1: the SYN of a connect() that is refused */
static void left_over(int refused)
{
	struct sockaddr_in a = peer(1);
	int e = -1, fd;

	if (refused) {
		fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
		say("connect", connect(fd, (void *)&a, sizeof(a)));
	} else {
		fd = tcp_client();
		tell("close");
		settle();
		say("send", send(fd, "abcd", 4, 0));
	}
	settle();
	say_queues(fd);
	say("SO_ERROR", getsockopt(fd, SOL_SOCKET, SO_ERROR, &e, &(socklen_t){ sizeof(e) })), say("value", e);
	say_queues(fd);
	close(fd);
}

static void by_the_kernel(int which)
{
	char path[] = "/tmp/tcp-calls-XXXXXX", got[32] = "";
	int file = mkstemp(path), fd = tcp_client(), p[2];

	unlink(path);
	if (write(file, "from a file", 11) != 11 || pipe(p))
		say("write", -1);
	tell("send 5");
	settle();
	switch (which) {
	case 0:
		say("sendfile", sendfile(fd, file, &(off_t){ 0 }, 11));
		tell_said("peer", "recv 11");
		break;
	case 1:
		say("splice", splice(fd, NULL, p[1], NULL, 5, 0));
		say_data("pipe", got, read(p[0], got, 8));
		break;
	case 2:
		say("dprintf", dprintf(fd, "%s", "printed"));
		tell_said("peer", "recv 7");
		break;
	case 3:
		say("sendfile", sendfile(p[1], fd, NULL, 5));
		say_data("pipe", got, read(p[0], got, 8));
		break;
	}
	if (which != 1 && which != 3)
		say_data("unread before", got, recv(fd, got, 32, MSG_DONTWAIT));
	say("send", send(fd, "after", 5, 0));
	tell_said("peer", "recv 5");
	close(fd), close(file), close(p[0]), close(p[1]);
}

/* ---- TCP_INQ: what is left ---- */

static void say_left(int fd, size_t want, int flags, size_t room)
{
	char buf[64], control[64] = { 0 };
	struct iovec v = { buf, want };
	struct msghdr m = { .msg_iov = &v, .msg_iovlen = 1, .msg_control = room ? control : NULL, .msg_controllen = room,
			    .msg_flags = 99 };
	struct cmsghdr *c;

	say_data("recvmsg", buf, recvmsg(fd, &m, flags));
	say("flags", m.msg_flags), say("controllen", (long)m.msg_controllen);
	if ((c = m.msg_controllen >= sizeof(*c) ? CMSG_FIRSTHDR(&m) : NULL)) {
		say("len", (long)c->cmsg_len), say("level", c->cmsg_level), say("type", c->cmsg_type);
		say_data("left", (char *)CMSG_DATA(c), (long)(c->cmsg_len - sizeof(*c)));
	}
}

/* The peer's end comes first, and ours is acknowledged before anything is read. */
static void left_of_both_ended(int accepted)
{
	int fd = tcp_pair(accepted);

	say("1", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &(int){ 1 }, sizeof(int)));
	tell("send 3"), tell("close");
	settle();
	say("shutdown", shutdown(fd, SHUT_WR));
	settle();
	say_left(fd, 2, 0, 64), say_left(fd, 1, 0, 64), say_left(fd, 1, 0, 64), say_left(fd, 1, 0, 64);
	close(fd);
}

static void left_told(int accepted)
{
	int fd = tcp_pair(accepted), on = -1;
	char c[8];

	say("2", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &(int){ 2 }, sizeof(int)));
	say("no length", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &(int){ 1 }, 1));
	tell("send 60");
	settle();
	say_left(fd, 5, 0, 64);
	say("1", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &(int){ 1 }, sizeof(int)));
	say("getsockopt", getsockopt(fd, IPPROTO_TCP, TCP_INQ, &on, &(socklen_t){ sizeof(on) })), say("value", on);
	say_left(fd, 5, MSG_PEEK, 64), say_left(fd, 5, 0, 64), say_left(fd, 0, 0, 64), say_left(fd, 5, MSG_TRUNC, 64);
	say_left(fd, 5, 0, 0), say_left(fd, 5, 0, 8), say_left(fd, 5, 0, 16), say_left(fd, 5, 0, 18), say_left(fd, 5, 0, 20);
	say_data("recv", c, recv(fd, c, 5, 0)), say_data("read", c, read(fd, c, 1));
	say_left(fd, 64, 0, 64), say_left(fd, 64, MSG_DONTWAIT, 64);
	tell("send 3"), tell("close");
	settle();
	say_left(fd, 2, 0, 64), say_left(fd, 1, 0, 64), say_left(fd, 1, 0, 64);
	say("0", setsockopt(fd, IPPROTO_TCP, TCP_INQ, &(int){ 0 }, sizeof(int)));
	say_left(fd, 1, 0, 64);
	close(fd);
}

const struct call_case tcp_data_cases[] = {
	{ "tcp TCP_INQ", left_told, 0 }, { "tcp TCP_INQ, accepted", left_told, 1 },
	{ "tcp TCP_INQ, both ended", left_of_both_ended, 0 }, { "tcp TCP_INQ, both ended, accepted", left_of_both_ended, 1 },
	{ "tcp echo", echo_each, 0 }, { "tcp echo, accepted", echo_each, 1 },
	{ "tcp call families", families, 0 }, { "tcp call families, accepted", families, 1 },
	{ "tcp many messages", many_messages, 0 }, { "tcp vectors", vectors, 0 },
	{ "tcp nothing asked for", nothing_asked, 0 }, { "tcp bad pointers", bad_pointers, 0 },
	{ "tcp peek", peek, 0 }, { "tcp peek, accepted", peek, 1 }, { "tcp peek, wait for all", peek_all, 0 },
	{ "tcp left at the end", left_at_the_end, 0 }, { "tcp left at the end, accepted", left_at_the_end, 1 },
	{ "tcp left at a reset", left_at_the_end, 2 }, { "tcp left at a reset, accepted", left_at_the_end, 3 },
	{ "tcp MSG_TRUNC", trunc_, 0 },
	{ "tcp MSG_WAITALL", wait_all, 0 }, { "tcp MSG_WAITALL, accepted", wait_all, 1 },
	{ "tcp left over by a reset", left_over, 0 }, { "tcp left over by a refused connect", left_over, 1 },
	{ "tcp MSG_WAITALL and a reset", wait_all_reset, 0 }, { "tcp MSG_WAITALL and a timeout", wait_all_timeout, 0 },
	{ "tcp without waiting", dont_wait, 0 }, { "tcp without waiting, accepted", dont_wait, 1 },
	{ "tcp odd flags", odd_flags, 0 },
	{ "tcp urgent byte received", urgent, 0 }, { "tcp urgent byte sent", urgent, 1 },
	{ "tcp MSG_MORE", more, 0 }, { "tcp TCP_CORK", more, 1 },
	{ "tcp full window", full_nonblock, 0 }, { "tcp full window, accepted", full_nonblock, 1 },
	{ "tcp full window, send waits", full_blocking, 0 }, { "tcp full window, SO_SNDTIMEO", full_blocking, 1 },
	{ "tcp full window, peer closes", full_blocking, 2 }, { "tcp full window, MSG_DONTWAIT", full_blocking, 3 },
	{ "tcp full window, TCP_USER_TIMEOUT", full_blocking, 4 },
	{ "tcp zero window of ours", zero_window_of_ours, 0 },
	{ "tcp counts", counts, 0 }, { "tcp counts, accepted", counts, 1 },
	{ "tcp sendfile", by_the_kernel, 0 }, { "tcp splice", by_the_kernel, 1 }, { "tcp dprintf", by_the_kernel, 2 },
	{ "tcp sendfile to a pipe", by_the_kernel, 3 },
	{ 0 },
};
