/* A connection leaves the stack as bytes and comes back, a thousand times at random moments, while data runs in both
 * directions over a wire with faults; and every state in which a connection may be when that happens. */
#include "tcp_wire.h"
#include "check.h"
#include "tcp_state.h"
#include <sys/socket.h>

static uint8_t blob[8 << 20];

static bool move(struct wire *w, int end, struct vmh_tcp_conn **c, uint64_t frozen_ns)
{
	struct vmh_tcp_path p = wire_path(end);
	struct vmh_tcp_conn *again;
	ssize_t len, half;
	int rc;

	rc = vmh_tcp_freeze(*c);
	if (rc)
		return false;
	if (frozen_ns)
		wire_run(w, frozen_ns); /* what arrives now is lost */
	len = vmh_tcp_export(*c, blob, sizeof(blob));
	if (len == -ENOTSUP) {
		vmh_tcp_thaw(*c);
		return false;
	}
	half = vmh_tcp_export(*c, blob, 10);
	CHECK(len >= VMH_TCP_STATE_LEN && half == len, "%zd %zd", len, half);
	vmh_tcp_forget(*c);
	*c = NULL;
	if (wire_random(w) < 0.5) /* what comes from the kernel does not know it */
		memset(blob + offsetof(struct vmh_tcp_state, ts_recent), 0, 4);
	rc = vmh_tcp_import(w->end[end].t, blob, (size_t)len, &p, NULL, &again);
	CHECK(rc == 0, "import: %d", rc);
	if (rc)
		return false;
	vmh_tcp_thaw(again);
	*c = again;
	return true;
}

static void open_pair(struct wire *w, const struct wire_faults *f, struct vmh_tcp_conn **l, struct vmh_tcp_conn **c,
		      struct vmh_tcp_conn **p)
{
	wire_open(w, f, 128);
	*l = wire_listen(w, 80, 10, NULL);
	*c = wire_connect(w, 4000, 80, NULL);
	*p = NULL;
	for (int try = 0; try < 20 && vmh_tcp_accept(*l, NULL, p) == -EAGAIN; try++)
		wire_run(w, 500000000);
	CHECK(*p, "not accepted");
}

static void test_moves(const char *name, const struct wire_faults *f, int wanted, uint64_t bytes)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct wire w;
	int moves = 0, refused = 0;

	open_pair(&w, f, &l, &c, &p);
	struct stream s[2] = {{.from = c, .to = p, .total = bytes}, {.from = p, .to = c, .total = bytes}};
	while (moves < wanted && !(s[0].ended && s[1].ended)) {
		uint64_t until = w.now + (uint64_t)(wire_random(&w) * 400000);
		int end = wire_random(&w) < 0.5;
		struct vmh_tcp_conn **which = end ? &p : &c;

		while (wire_step(&w, until)) {
			stream_pump(&s[0]);
			stream_pump(&s[1]);
		}
		stream_pump(&s[0]);
		stream_pump(&s[1]);
		if (move(&w, end, which, wire_random(&w) < 0.1 ? 100000 : 0))
			moves++;
		else
			refused++;
		s[end].from = s[!end].to = *which;
		if (!*which)
			break;
	}
	CHECK(stream_run(&w, s, 2, 600000000000ull), "%s: streams hang: %lu %lu", name, s[0].read, s[1].read);
	for (int i = 0; i < 2; i++)
		CHECK(!s[i].bad && !s[i].failed && s[i].read == bytes, "%s: stream %d: bad %d failed %d, %lu of %lu", name, i,
		      s[i].bad, s[i].failed, s[i].read, bytes);
	CHECK(moves >= wanted, "%s: only %d moves, %d refused", name, moves, refused);
	printf("%s: %d moves, %d refused\n", name, moves, refused);
	vmh_tcp_close(c);
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Where each side may stand in its closing: 0 open, 1 has shut down */
static void test_closing(int client_shut, int server_shut, bool settle, int end)
{
	struct vmh_tcp_conn *l, *c, *p, **which;
	struct wire w;
	char buf[10];
	bool moved;

	open_pair(&w, &(struct wire_faults){.delay_ns = 20000}, &l, &c, &p);
	CHECK(wire_write(c, "abc", 3) == 3 && wire_write(p, "xyz", 3) == 3, "write");
	wire_run(&w, 1000000);
	if (client_shut)
		CHECK(vmh_tcp_shutdown(c, SHUT_WR) == 0, "shutdown");
	if (settle)
		wire_run(&w, 1000000);
	if (server_shut)
		CHECK(vmh_tcp_shutdown(p, SHUT_WR) == 0, "shutdown");
	if (settle)
		wire_run(&w, 1000000);
	which = end ? &p : &c;
	moved = move(&w, end, which, 0);
	CHECK(moved || (settle && client_shut && server_shut), "%d %d %d %d", client_shut, server_shut, settle, end);
	if (*which) {
		wire_run(&w, 1000000);
		CHECK(wire_read(p, buf, 10) == 3 && !memcmp(buf, "abc", 3), "what was unread before");
		CHECK(wire_read(c, buf, 10) == 3 && !memcmp(buf, "xyz", 3), "what was unread before");
		if (!client_shut) {
			CHECK(wire_write(c, "more", 4) == 4, "write");
			CHECK(vmh_tcp_shutdown(c, SHUT_WR) == 0, "shutdown");
			wire_run(&w, 400000000);
			CHECK(wire_read(p, buf, 10) == 4, "read");
		}
		if (!server_shut) {
			CHECK(wire_write(p, "more", 4) == 4, "write");
			CHECK(vmh_tcp_shutdown(p, SHUT_WR) == 0, "shutdown");
			wire_run(&w, 400000000);
			CHECK(wire_read(c, buf, 10) == 4, "read");
		}
		wire_run(&w, 1000000000);
		CHECK(wire_read(c, buf, 10) == 0 && wire_read(p, buf, 10) == 0, "%d %d %d %d: ends", client_shut, server_shut,
		      settle, end);
		vmh_tcp_close(*which);
	}
	vmh_tcp_close(end ? c : p);
	wire_run(&w, 200000000000ull);
	struct vmh_tcp_stats a, b;
	vmh_tcp_get_stats(w.end[0].t, &a);
	vmh_tcp_get_stats(w.end[1].t, &b);
	CHECK(a.conns + b.conns == 0, "%u %u", a.conns, b.conns);
	CHECK(w.end[0].resets + w.end[1].resets == 0, "a reset");
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Every byte of the header may be wrong: import refuses or takes it, and nothing breaks. */
static void test_refusals(void)
{
	struct vmh_tcp_conn *l, *c, *p, *again;
	struct vmh_tcp_path path = wire_path(0);
	struct vmh_tcp_state s;
	struct wire w;
	ssize_t len;
	unsigned taken = 0;

	open_pair(&w, &(struct wire_faults){.delay_ns = 20000}, &l, &c, &p);
	wire_write(c, "unacknowledged", 14);
	CHECK(vmh_tcp_export(c, blob, sizeof(blob)) == -ENOTSUP, "only when frozen");
	CHECK(vmh_tcp_freeze(c) == 0 && vmh_tcp_freeze(c) == 0, "freeze");
	CHECK(wire_write(c, "x", 1) == -EAGAIN, "a frozen one takes nothing");
	len = vmh_tcp_export(c, blob, sizeof(blob));
	CHECK(vmh_tcp_import(w.end[0].t, blob, (size_t)len, &path, NULL, &again) == -EADDRNOTAVAIL, "its name is in use");
	vmh_tcp_forget(c);
	memcpy(&s, blob, sizeof(s));
	CHECK(s.send_len == 14 && s.snd_nxt == s.snd_una + 14 && s.recv_len == 0, "%u %u", s.send_len, s.recv_len);
	CHECK(s.flags == (VMH_TCP_F_WSCALE | VMH_TCP_F_SACK | VMH_TCP_F_TIMESTAMPS), "%x", s.flags);
	for (ssize_t at = 0; at < len; at++)
		for (int bit = 0; bit < 8; bit++) {
			uint8_t saved = blob[at];

			blob[at] ^= (uint8_t)(1 << bit);
			if (vmh_tcp_import(w.end[0].t, blob, (size_t)len, &path, NULL, &again) == 0) {
				taken++;
				vmh_tcp_forget(again);
			}
			blob[at] = saved;
		}
	for (ssize_t cut = 0; cut < len; cut++)
		CHECK(vmh_tcp_import(w.end[0].t, blob, (size_t)cut, &path, NULL, &again) < 0, "cut to %zd", cut);
	CHECK(taken > 500, "%u", taken);
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Before it moves nothing new goes, what is lost goes again, and the rest stays in the queue, also of what comes. */
static void test_settling(void)
{
	static char data[200000], got[sizeof(data)];
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_info i;
	struct wire w;
	ssize_t took, more, n, all = 0;
	uint32_t left;

	open_pair(&w, &(struct wire_faults){.delay_ns = 20000, .loss = 0.1}, &l, &c, &p);
	memset(data, 's', sizeof(data));
	took = wire_write(c, data, sizeof(data) / 2);
	vmh_tcp_get_info(c, &i);
	CHECK(took > 0 && i.unacked && i.unsent, "%zd, %u on their way, %u wait", took, i.unacked, i.unsent);
	left = i.unsent;
	vmh_tcp_settle(c, true);
	more = wire_write(c, data, 100);
	wire_run(&w, 2000000000);
	vmh_tcp_get_info(c, &i);
	CHECK(more == 100 && !i.unacked && i.unsent == left + 100, "%u on their way, %u wait, of %u", i.unacked, i.unsent, left);
	CHECK(vmh_tcp_freeze(c) == 0 && vmh_tcp_thaw(c) == 0, "it stays after all");
	do {
		wire_run(&w, 200000000);
		n = wire_read(p, got, sizeof(got));
		all += n > 0 ? n : 0;
	} while (n > 0);
	CHECK(all == took + more, "%zd came of %zd", all, took + more);
	vmh_tcp_settle(c, true);
	CHECK(wire_write(c, data, 10) == 10, "write");
	wire_run(&w, 200000000);
	CHECK(wire_read(p, got, sizeof(got)) == -EAGAIN, "nothing new");
	vmh_tcp_settle(c, false);
	wire_run(&w, 2000000000);
	CHECK(wire_read(p, got, sizeof(got)) == 10, "at once when it stays");
	vmh_tcp_close(c);
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Nor does the window move on for the peer, so that in the end nothing of it is under way. */
static void test_settling_of_what_comes(void)
{
	static char data[300000], got[sizeof(data)];
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_info i;
	struct wire w;
	size_t sent = 0, read = 0;
	uint32_t edge = 0, left;
	ssize_t n;

	open_pair(&w, &(struct wire_faults){.delay_ns = 20000, .gbit = 1}, &l, &c, &p);
	for (int k = 0; k < 400; k++) {
		if (k == 50) {
			vmh_tcp_settle(p, true);
			vmh_tcp_get_info(p, &i);
			edge = i.pcb.right_edge;
		}
		n = wire_write(c, data, sizeof(data));
		sent += n > 0 ? (size_t)n : 0;
		wire_run(&w, 200000);
		while ((n = wire_read(p, got, sizeof(got))) > 0)
			read += (size_t)n;
	}
	vmh_tcp_get_info(p, &i);
	left = (i.pcb.right_edge - i.pcb.rcv_nxt) >> i.rcv_wscale << i.rcv_wscale; /* as the peer was told */
	CHECK(i.pcb.right_edge - edge <= i.pcb.rcvbuf / 4 && left < i.rcv_mss, "%u further, %u left", i.pcb.right_edge - edge,
	      left);
	vmh_tcp_get_info(c, &i);
	CHECK(!i.unacked && sent > read, "%u on their way, %zu of %zu", i.unacked, read, sent);
	vmh_tcp_settle(p, false);
	wire_run(&w, 1000000);
	CHECK(wire_read(p, got, sizeof(got)) > 0, "it goes on at once when it stays");
	vmh_tcp_close(c);
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

int main(int argc, char **argv)
{
	int n = argc > 1 ? atoi(argv[1]) : 300;

	test_moves("clean", &(struct wire_faults){.delay_ns = 20000, .gbit = 1}, n, (uint64_t)n * 40000);
	test_moves("loss and reordering", &(struct wire_faults){.delay_ns = 20000, .gbit = 1, .loss = 0.01, .reorder = 0.02,
		   .reorder_ns = 100000}, n, (uint64_t)n * 40000);
	for (int i = 0; i < 16; i++)
		test_closing(i & 1, i >> 1 & 1, i >> 2 & 1, i >> 3);
	test_refusals();
	test_settling();
	test_settling_of_what_comes();
	return check_result();
}
