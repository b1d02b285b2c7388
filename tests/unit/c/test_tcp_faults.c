/* Streams over a wire that loses, reorders, doubles and corrupts; both directions at once; each congestion control. */
#include "tcp_wire.h"
#include "check.h"
#include <sys/socket.h>

#define MB (1u << 20)

struct scenario {
	const char *name;
	struct wire_faults faults;
	uint64_t bytes, seconds;
	uint32_t rcvbuf, chunk, read_max;
	bool no_sack, no_timestamps, no_wscale;
	unsigned hold;
	double least; /* Mbit/s: well below what it does, and far above what timeouts alone would give */
};

static const struct scenario scenarios[] = {
	{"clean", {.delay_ns = 20000}, 4 * MB, 5, .hold = 256, .least = 5000},
	{"loss 1 %", {.delay_ns = 20000, .loss = 0.01, .gbit = 10}, 6 * MB, 60, .hold = 256, .least = 1000},
	{"loss 5 %", {.delay_ns = 20000, .loss = 0.05, .gbit = 10}, 4 * MB, 120, .hold = 256, .least = 50},
	{"loss 20 %", {.delay_ns = 20000, .loss = 0.2, .gbit = 10}, MB / 2, 600, .hold = 64},
	{"reordering", {.delay_ns = 20000, .reorder = 0.05, .reorder_ns = 60000, .gbit = 10}, 4 * MB, 20, .hold = 256, .least = 2500},
	{"heavy reordering", {.delay_ns = 20000, .reorder = 0.3, .reorder_ns = 200000, .gbit = 10}, 2 * MB, 60, .hold = 0, .least = 300},
	{"duplication", {.delay_ns = 20000, .duplicate = 0.2, .gbit = 10}, 4 * MB, 20, .hold = 256},
	{"corruption", {.delay_ns = 20000, .corrupt = 0.02, .gbit = 10}, 2 * MB, 120, .hold = 256, .least = 500},
	{"all of it", {.delay_ns = 20000, .loss = 0.02, .corrupt = 0.01, .duplicate = 0.02, .reorder = 0.02,
		       .reorder_ns = 100000, .gbit = 10}, 2 * MB, 300, .hold = 256},
	{"no SACK, loss 2 %", {.delay_ns = 20000, .loss = 0.02, .gbit = 10}, 2 * MB, 120, .no_sack = true, .hold = 256},
	{"no options, loss 2 %", {.delay_ns = 20000, .loss = 0.02, .gbit = 10}, 2 * MB, 120, .no_sack = true,
	 .no_timestamps = true, .no_wscale = true},
	{"small queue", {.delay_ns = 100000, .gbit = 1, .queue = 40}, 4 * MB, 30, .hold = 256, .least = 500},
	{"tiny window", {.delay_ns = 20000, .gbit = 10}, MB / 4, 100, .rcvbuf = 2304},
	{"tiny window, loss", {.delay_ns = 20000, .loss = 0.02, .gbit = 10}, MB / 8, 300, .rcvbuf = 2304},
	{"slow reader", {.delay_ns = 20000, .gbit = 10}, MB / 2, 100, .rcvbuf = 16384, .read_max = 100},
	{"small writes", {.delay_ns = 20000, .gbit = 10, .loss = 0.01}, 200000, 100, .chunk = 7, .hold = 64},
	{"few frames to hold", {.delay_ns = 20000, .loss = 0.01, .gbit = 10}, 2 * MB, 60, .hold = 4},
};

static uint64_t merged; /* in all runs */

static void run(const struct scenario *s, uint8_t cc)
{
	struct vmh_tcp_conn *l, *c, *p = NULL;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	struct wire w;
	uint64_t start;
	double rate;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_sack = s->no_sack;
	o.no_timestamps = s->no_timestamps;
	o.no_wscale = s->no_wscale;
	if (s->rcvbuf)
		o.rcvbuf = s->rcvbuf;
	wire_open(&w, &s->faults, s->hold);
	w.random += cc * 7919;
	l = wire_listen(&w, 80, 10, &o);
	c = wire_connect(&w, 4000, 80, &o);
	for (int try = 0; try < 100 && vmh_tcp_accept(l, NULL, &p) == -EAGAIN; try++)
		wire_run(&w, 1000000000);
	CHECK(p, "%s: not accepted", s->name);
	if (!p)
		return;
	start = w.now;
	struct stream both[2] = {{.from = c, .to = p, .total = s->bytes, .chunk = s->chunk, .read_max = s->read_max},
				 {.from = p, .to = c, .total = s->bytes / 2, .chunk = s->chunk, .read_max = s->read_max}};
	CHECK(stream_run(&w, both, 2, s->seconds * 1000000000ull), "%s cc %d: %lu and %lu of %lu after %lu s", s->name, cc,
	      both[0].read, both[1].read, s->bytes, s->seconds);
	for (int k = 0; k < 2; k++)
		CHECK(!both[k].bad && !both[k].failed && both[k].read == both[k].total, "%s cc %d: stream %d: bad %d failed %d %lu",
		      s->name, cc, k, both[k].bad, both[k].failed, both[k].read);
	rate = (double)s->bytes * 8e3 / (double)(both[0].ended_at - start);
	CHECK(getenv("WIRE_LOOK") || rate >= s->least, "%s cc %d: only %.0f Mbit/s", s->name, cc, rate);
	vmh_tcp_get_info(c, &i);
	printf("%-22s cc %d: %6.1f Mbit/s, %u resent, %u timeouts, %u probes, %u recoveries, %u sent in vain\n", s->name, cc,
	       rate, i.retransmits, i.rtos, i.probes, i.fast_recoveries, i.dsacks);
	vmh_tcp_close(c);
	vmh_tcp_close(p);
	wire_run(&w, 200000000000ull);
	struct vmh_tcp_stats a, b;
	vmh_tcp_get_stats(w.end[0].t, &a);
	vmh_tcp_get_stats(w.end[1].t, &b);
	merged += a.merged + b.merged;
	CHECK(a.conns == 0 && b.conns == 0 && a.held == 0 && b.held == 0 && a.time_wait + b.time_wait == 0,
	      "%s: left: %u %u conns, %u %u held, %u %u in TIME_WAIT", s->name, a.conns, b.conns, a.held, b.held, a.time_wait,
	      b.time_wait);
	vmh_tcp_close(l);
	wire_close(&w);
}

int main(void)
{
	for (unsigned i = 0; i < sizeof(scenarios) / sizeof(scenarios[0]); i++)
		for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++)
			run(&scenarios[i], cc);
	run(&scenarios[0], VMH_TCP_CC_NONE);
	run(&scenarios[1], VMH_TCP_CC_NONE);
	printf("%lu frames were merged\n", merged);
	CHECK(!getenv("WIRE_LOOK") == !merged, "%lu frames merged", merged);
	return check_result();
}
