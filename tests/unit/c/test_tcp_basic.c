/* The stack between two instances: opening, echo, closing. */
#include "tcp_wire.h"
#include "check.h"
#include <sys/socket.h>

#define PERFECT &(struct wire_faults){.delay_ns = 10000}

static void accept_one(struct vmh_tcp_conn *l, struct vmh_tcp_conn **c)
{
	CHECK(vmh_tcp_accept(l, NULL, c) == 0, "accept");
}

static void test_echo(void)
{
	struct wire w;
	struct vmh_tcp_conn *l, *c, *s = NULL;
	struct vmh_tcp_info i;
	char buf[100];

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	CHECK(vmh_tcp_accept(l, NULL, &s) == -EAGAIN, "nobody came yet");
	c = wire_connect(&w, 4000, 80, NULL);
	CHECK(wire_write(c, "x", 1) == -EAGAIN, "not connected yet");
	CHECK(vmh_tcp_poll(c) == 0, "%x", vmh_tcp_poll(c));
	wire_run(&w, 1000000);
	CHECK(vmh_tcp_poll(c) == (VMH_TCP_OUT | VMH_TCP_DRAINED), "%x", vmh_tcp_poll(c));
	CHECK(vmh_tcp_poll(l) == VMH_TCP_IN, "%x", vmh_tcp_poll(l));
	accept_one(l, &s);
	CHECK(wire_write(c, "hello", 5) == 5, "write");
	wire_run(&w, 1000000);
	CHECK(vmh_tcp_poll(s) & VMH_TCP_IN, "%x", vmh_tcp_poll(s));
	CHECK(wire_read(s, buf, sizeof(buf)) == 5 && !memcmp(buf, "hello", 5), "read");
	CHECK(wire_read(s, buf, sizeof(buf)) == -EAGAIN, "no more");
	CHECK(wire_write(s, "world", 5) == 5, "write");
	wire_run(&w, 1000000);
	CHECK(wire_read(c, buf, sizeof(buf)) == 5 && !memcmp(buf, "world", 5), "read");
	vmh_tcp_get_info(c, &i);
	CHECK(i.state == 1 && i.timestamps && i.sack && i.wscale, "%d", i.state);
	CHECK(i.snd_mss == (vmh_ip_is4(&w.end[0].addr) ? 1448 : 1428), "%u", i.snd_mss);
	CHECK(i.min_rtt_us == 20, "%u", i.min_rtt_us);
	vmh_tcp_close(c);
	wire_run(&w, 1000000);
	CHECK(wire_read(s, buf, sizeof(buf)) == 0, "end of stream");
	CHECK(vmh_tcp_poll(s) & VMH_TCP_RDHUP, "%x", vmh_tcp_poll(s));
	vmh_tcp_close(s);
	wire_run(&w, 1000000);
	struct vmh_tcp_stats a, b;
	vmh_tcp_get_stats(w.end[0].t, &a);
	vmh_tcp_get_stats(w.end[1].t, &b);
	CHECK(a.conns == 0 && a.time_wait == 1 && b.conns == 0 && b.time_wait == 0, "%u %u %u %u", a.conns, a.time_wait,
	      b.conns, b.time_wait);
	wire_run(&w, 61000000000ull);
	vmh_tcp_get_stats(w.end[0].t, &a);
	CHECK(a.time_wait == 0, "%u", a.time_wait);
	vmh_tcp_close(l);
	wire_close(&w);
}

int main(void)
{
	test_echo();
	return check_result();
}
