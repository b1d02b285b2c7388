/* ACKs that wait for what may carry them. The timers run when a test says so: tcp_wire.c looks at them all the time. */
#include "tcp_stack.h"
#include "check.h"
#include <arpa/inet.h>
#include <errno.h>
#include <string.h>
#include <sys/socket.h>

#define FRAMES 32

struct end {
	struct vmh_tcp *t;
	struct end *peer;
	unsigned n, soon, sent;
	size_t len[FRAMES];
	unsigned char frame[FRAMES][2048];
};

static struct end client, server;
static uint64_t clock_ns = 1000000000;

static uint64_t now_ns(void *ctx)
{
	(void)ctx;
	return clock_ns;
}

static int send_frame(void *ctx, const void *frame, size_t len)
{
	struct end *e = ctx, *to = e->peer;

	e->sent++;
	if (to->n == FRAMES || len > sizeof(to->frame[0]))
		return -EAGAIN;
	memcpy(to->frame[to->n], frame, len);
	to->len[to->n++] = len;
	return 0;
}

static void release(void *ctx, void *token)
{
	(void)ctx, (void)token;
}

static void soon(void *ctx)
{
	((struct end *)ctx)->soon++;
}

/* What has been sent arrives, and what is sent in answer; frames in all. */
static unsigned deliver(void)
{
	unsigned before = client.sent + server.sent;

	while (client.n || server.n) {
		struct end *e = client.n ? &client : &server;
		unsigned n = e->n;

		e->n = 0;
		for (unsigned i = 0; i < n; i++) { /* an answer goes to the other end */
			unsigned char frame[2048];

			memcpy(frame, e->frame[i], e->len[i]);
			vmh_tcp_input(e->t, frame, e->len[i], NULL);
		}
	}
	return client.sent + server.sent - before;
}

static void open_ends(void)
{
	struct end *ends[2] = {&client, &server};

	for (int i = 0; i < 2; i++) {
		struct vmh_tcp_env env = {.ctx = ends[i], .now_ns = now_ns, .send = send_frame, .release = release, .soon = soon};

		*ends[i] = (struct end){.peer = ends[1 - i]};
		CHECK(vmh_tcp_open(&env, &ends[i]->t) == 0, "open");
	}
}

static void close_ends(void)
{
	vmh_tcp_destroy(client.t);
	vmh_tcp_destroy(server.t);
}

static struct vmh_tcp_conn *start(struct vmh_tcp_conn **l, uint16_t port, const struct vmh_tcp_options *o)
{
	struct vmh_tcp_addr a = {vmh_ip4(inet_addr("10.0.0.1")), vmh_ip4(inet_addr("10.0.0.2")), htons(port), htons(80)};
	struct vmh_tcp_path p = {.mtu = 1500};
	struct vmh_tcp_conn *c = NULL;

	if (!*l)
		CHECK(vmh_tcp_listen(server.t, &a.raddr, a.rport, 0, 10, o, NULL, l) == 0, "listen");
	CHECK(vmh_tcp_connect(client.t, &a, &p, o, NULL, &c) == 0, "connect");
	deliver();
	return c;
}

static ssize_t give(struct vmh_tcp_conn *c, size_t len)
{
	char data[1000] = "";
	struct iovec v = {data, len};

	return vmh_tcp_write(c, &v, 1, false);
}

static ssize_t take(struct vmh_tcp_conn *c)
{
	char data[1000];
	struct iovec v = {data, sizeof(data)};

	return vmh_tcp_read(c, &v, 1, false);
}

/* One whose request follows at once; the next one's will as well. */
static void prompt(struct vmh_tcp_conn **l, uint16_t port)
{
	struct vmh_tcp_options o;
	struct vmh_tcp_conn *c, *s = NULL;

	vmh_tcp_options_init(&o);
	c = start(l, port, &o);
	give(c, 80);
	deliver();
	CHECK(vmh_tcp_accept(*l, NULL, &s) == 0, "accept");
	vmh_tcp_abort(s);
	vmh_tcp_abort(c);
	deliver();
	client.sent = server.sent = client.soon = server.soon = 0;
}

/* SYN, SYN-ACK, request, answer, FIN, FIN, ACK. */
static void test_a_short_connection_takes_seven_segments(void)
{
	struct vmh_tcp_conn *l = NULL, *c, *s = NULL;
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	open_ends();
	prompt(&l, 3999);
	c = start(&l, 4000, &o);
	CHECK(client.sent == 1 && server.sent == 1 && client.soon == 1, "%u %u %u", client.sent, server.sent, client.soon);
	CHECK(vmh_tcp_accept(l, NULL, &s) == -EAGAIN, "half open");
	CHECK(give(c, 80) == 80, "request");
	deliver();
	CHECK(vmh_tcp_accept(l, NULL, &s) == 0, "accept");
	CHECK(take(s) == 80 && give(s, 64) == 64, "answer");
	deliver();
	CHECK(take(c) == 64, "answer arrives");
	vmh_tcp_close(c);
	deliver();
	CHECK(take(s) == 0, "end");
	vmh_tcp_close(s);
	deliver();
	CHECK(client.sent + server.sent == 7, "%u and %u segments", client.sent, server.sent);
	vmh_tcp_close(l);
	close_ends();
}

/* The next tick sends what had no company: the server, who speaks first, hears of the connection; the client of its
 * request and of its FIN. */
static void test_alone_by_the_next_tick(void)
{
	struct vmh_tcp_conn *l = NULL, *c, *s = NULL;
	struct vmh_tcp_options o;
	unsigned sent;

	vmh_tcp_options_init(&o);
	open_ends();
	prompt(&l, 3999);
	c = start(&l, 4000, &o);
	vmh_tcp_tick(client.t);
	CHECK(deliver() == 0 && client.sent == 2, "%u", client.sent);
	CHECK(vmh_tcp_accept(l, NULL, &s) == 0, "accept");
	CHECK(give(c, 80) == 80, "request");
	deliver();
	CHECK(server.sent == 1 && server.soon == 1, "%u %u", server.sent, server.soon);
	vmh_tcp_tick(server.t);
	CHECK(server.sent == 2, "%u", server.sent);
	deliver();
	CHECK(take(s) == 80, "request arrives");
	vmh_tcp_shutdown(c, SHUT_WR);
	deliver();
	sent = server.sent;
	CHECK(sent == 2 && server.soon == 2, "%u %u", sent, server.soon);
	vmh_tcp_tick(server.t);
	deliver();
	CHECK(server.sent == 3 && take(s) == 0, "%u", server.sent);
	CHECK(vmh_tcp_poll(c) & VMH_TCP_DRAINED, "the FIN was acknowledged");
	vmh_tcp_abort(s);
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	close_ends();
}

/* TCP_QUICKACK waits for nothing, nor does a second segment; and who takes the connection over owes no ACK. */
static void test_no_waiting(void)
{
	struct vmh_tcp_conn *l = NULL, *c, *s = NULL;
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	o.nodelay = true;
	open_ends();
	c = start(&l, 4000, &o);
	give(c, 80);
	give(c, 80);
	deliver();
	CHECK(server.sent == 2, "%u: one for both", server.sent);
	CHECK(vmh_tcp_accept(l, NULL, &s) == 0, "accept");
	vmh_tcp_abort(s);
	vmh_tcp_abort(c);
	deliver();
	prompt(&l, 3999);
	c = start(&l, 4001, &o);
	CHECK(client.sent == 1, "%u", client.sent);
	CHECK(vmh_tcp_freeze(c) == 0 && client.sent == 2, "%u: before it goes elsewhere", client.sent);
	vmh_tcp_forget(c);
	deliver();
	client.sent = server.sent = 0;
	o.quickack = true;
	c = start(&l, 4002, &o);
	CHECK(client.sent == 2, "%u", client.sent);
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	close_ends();
}

/* The next one, when those two are gone. */
static struct vmh_tcp_conn *start_after(struct vmh_tcp_conn *a, struct vmh_tcp_conn *b, struct vmh_tcp_conn **l,
					uint16_t port, const struct vmh_tcp_options *o)
{
	vmh_tcp_abort(a);
	vmh_tcp_abort(b);
	deliver();
	client.sent = 0;
	return start(l, port, o);
}

/* Who waits in accept() hears of it at once, where the program was not prompt the last time, and of two connections in the
 * order in which they were opened. */
static void test_the_peer_accepts_in_time(void)
{
	struct vmh_tcp_conn *l = NULL, *c, *other, *s = NULL;
	struct vmh_tcp_options o;
	struct vmh_tcp_addr a;

	vmh_tcp_options_init(&o);
	open_ends();
	c = start(&l, 4000, &o);
	CHECK(client.sent == 2 && vmh_tcp_accept(l, NULL, &s) == 0, "the first one: %u", client.sent);
	vmh_tcp_abort(s);
	vmh_tcp_abort(c);
	deliver();
	prompt(&l, 3999);
	c = start(&l, 4001, &o);
	CHECK(vmh_tcp_accept(l, NULL, &s) == -EAGAIN, "it waits for company");
	other = start(&l, 4002, &o);
	give(other, 80);
	deliver();
	for (uint16_t port = 4001; port <= 4002; port++) {
		CHECK(vmh_tcp_accept(l, NULL, &s) == 0, "accept");
		vmh_tcp_address(s, &a);
		CHECK(a.rport == htons(port), "%u, not %u", ntohs(a.rport), port);
		vmh_tcp_abort(s);
	}
	c = start_after(other, c, &l, 4003, &o);
	clock_ns += 1000000;
	give(c, 80);
	deliver();
	CHECK(vmh_tcp_accept(l, NULL, &s) == 0, "accept");
	c = start_after(s, c, &l, 4004, &o);
	CHECK(client.sent == 2, "the program took its time: %u", client.sent);
	CHECK(vmh_tcp_accept(l, NULL, &s) == 0 && give(s, 10) == 10, "a greeting");
	deliver();
	CHECK(take(c) == 10 && give(c, 10) == 10, "answered at once");
	deliver();
	c = start_after(s, c, &l, 4005, &o);
	CHECK(client.sent == 2, "the peer speaks first: %u", client.sent);
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	close_ends();
}

int main(void)
{
	test_the_peer_accepts_in_time();
	test_a_short_connection_takes_seven_segments();
	test_alone_by_the_next_tick();
	test_no_waiting();
	return check_result();
}
