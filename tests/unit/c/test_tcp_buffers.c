/* Buffers grow where the way is long, and only where somebody has use for it. */
#include "tcp_wire.h"
#include "check.h"

#define MS 1000000ull
#define MOST (4u << 20)

static char data[60000];

/* After half a second in which one side sends what goes, and the other reads `bytes` each millisecond; 0: all. */
static void play(uint64_t one_way_ns, uint32_t asked, size_t bytes, struct vmh_tcp_info *snd, struct vmh_tcp_info *rcv)
{
	struct wire_faults f = { .delay_ns = one_way_ns, .gbit = 3 };
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct wire w;

	vmh_tcp_options_init(&o);
	if (asked) {
		o.sndbuf = o.rcvbuf = asked;
		o.sndbuf_asked = o.rcvbuf_asked = true;
	}
	wire_open(&w, &f, 100000);
	l = wire_listen(&w, 80, 10, &o);
	c = wire_connect(&w, 1000, 80, &o);
	wire_run(&w, 4 * one_way_ns + 10 * MS);
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "not accepted");
	vmh_tcp_close(l);
	for (uint64_t end = w.now + 500 * MS; w.now < end;) {
		while (wire_write(c, data, sizeof(data)) > 0)
			;
		wire_run(&w, MS);
		if (bytes)
			wire_read(p, data, bytes);
		while (!bytes && wire_read(p, data, sizeof(data)) > 0)
			;
	}
	vmh_tcp_get_info(c, snd);
	vmh_tcp_get_info(p, rcv);
	vmh_tcp_abort(c);
	vmh_tcp_abort(p);
	wire_run(&w, 1000 * MS);
	wire_close(&w);
}

int main(void)
{
	struct vmh_tcp_info snd, rcv;

	play(5 * MS, 0, 0, &snd, &rcv);
	CHECK(snd.pcb.sndbuf == MOST && rcv.pcb.rcvbuf == MOST, "%u to send, %u to receive", snd.pcb.sndbuf, rcv.pcb.rcvbuf);
	CHECK(rcv.pcb.sndbuf == VMH_TCP_SNDBUF && snd.pcb.rcvbuf == 1u << 20, "the other way: %u, %u", rcv.pcb.sndbuf,
	      snd.pcb.rcvbuf);
	CHECK(rcv.bytes_received > 80u << 20, "%llu bytes", (unsigned long long)rcv.bytes_received);

	play(5 * MS, 300000, 0, &snd, &rcv); /* the program says how large */
	CHECK(snd.pcb.sndbuf == 300000 && rcv.pcb.rcvbuf == 300000, "%u, %u", snd.pcb.sndbuf, rcv.pcb.rcvbuf);

	play(5 * MS, 0, 10000, &snd, &rcv); /* it reads slowly */
	CHECK(rcv.pcb.rcvbuf == 1u << 20, "%u", rcv.pcb.rcvbuf);

	play(MS / 10, 0, 0, &snd, &rcv); /* a short way */
	CHECK(snd.pcb.sndbuf == VMH_TCP_SNDBUF && rcv.pcb.rcvbuf == 1u << 20, "%u, %u", snd.pcb.sndbuf, rcv.pcb.rcvbuf);
	return check_result();
}
