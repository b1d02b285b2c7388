/* What may go while something is unacknowledged, as in Linux: less than a segment waits only for another such one; and how
 * the window grows at the start, also where one ACK is for many segments. */
#include "tcp_wire.h"
#include "check.h"

#define MS 1000000ull
#define MSS 1460u

static char data[100000];

struct pair {
	struct wire w;
	struct vmh_tcp_conn *c, *p;
};

static void begin(struct pair *x, uint64_t delay_ns, const struct vmh_tcp_options *o)
{
	struct wire_faults f = { .delay_ns = delay_ns };

	wire_open(&x->w, &f, 100000);
	wire_meet(&x->w, o, 4 * delay_ns + MS, &x->c, &x->p);
}

static void end(struct pair *x)
{
	wire_part(&x->w, x->c, x->p);
}

/* Bytes that have come by now. */
static uint32_t came(const struct pair *x)
{
	struct vmh_tcp_info i;

	vmh_tcp_get_info(x->p, &i);
	return i.unread;
}

static struct vmh_tcp_options plain(void)
{
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	o.no_timestamps = true; /* a segment is MSS bytes */
	return o;
}

/* Writes one after the other, and says how much is at the other end before anything can be acknowledged. */
static void writes(const uint32_t *sizes, uint32_t at_once)
{
	struct vmh_tcp_options o = plain();
	uint32_t all = 0;
	struct pair x;

	begin(&x, 5 * MS, &o);
	for (int round = 0; round < 3; round++) { /* the first, and again */
		for (const uint32_t *n = sizes; *n; n++, all += n[-1])
			CHECK(wire_write(x.c, data, *n) == (ssize_t)*n, "%u not written", *n);
		wire_run(&x.w, 7 * MS);
		CHECK(came(&x) == at_once, "%u, ... (round %d): %u bytes came, not %u", sizes[0], round, came(&x), at_once);
		wire_run(&x.w, 200 * MS);
		CHECK(came(&x) == all, "%u, ... (round %d): %u bytes of %u", sizes[0], round, came(&x), all);
		while (wire_read(x.p, data, sizeof(data)) > 0)
			;
		all = 0;
	}
	end(&x);
}

#define WRITES(at_once, ...) writes((const uint32_t[]){ __VA_ARGS__, 0 }, at_once)

static void test_less_than_a_segment(void)
{
	WRITES(100, 100);
	WRITES(1500, 1500);
	WRITES(4500, 4500);
	WRITES(10000, 10000);
	WRITES(MSS + 100, MSS, 100);       /* whole ones are not waited for */
	WRITES(100, 100, 100);             /* but others are */
	WRITES(1600, 1500, 100);           /* but for the end of more than a segment */
	WRITES(1600, 1500, 100, 100);
	WRITES(2 * MSS + 110, 2 * MSS + 10, 100, 100);
	WRITES(2 * MSS + 10, MSS + 10, MSS + 10);
	WRITES(2900, 1500, 1400, 1400);
}

/* A round trip after the other, of a reader that acknowledges each flight once. */
static void test_the_window_doubles(enum vmh_tcp_cc cc)
{
	struct vmh_tcp_options o = plain();
	struct vmh_tcp_info i;
	uint32_t window = 10 * MSS;
	struct pair x;

	o.cc = cc;
	begin(&x, 10 * MS, &o);
	x.w.look_ns = 2 * MS;
	for (int round = 0; round < 5; round++, window *= 2) {
		vmh_tcp_get_info(x.c, &i);
		CHECK(i.cwnd + MSS > window, "cc %u, round %d: %u, not %u", cc, round, i.cwnd, window);
		for (uint32_t left = window, part; left; left -= part) {
			part = left < sizeof(data) ? left : (uint32_t)sizeof(data);
			CHECK(wire_write(x.c, data, part) == (ssize_t)part, "not written");
		}
		wire_run(&x.w, 70 * MS); /* a round trip, and what an ACK may wait */
		while (wire_read(x.p, data, sizeof(data)) > 0)
			;
	}
	end(&x);
}

/* Half of the window is used, and it grows still; a tenth, and it does not. */
static void test_the_window_is_used(void)
{
	struct vmh_tcp_options o = plain();
	struct vmh_tcp_info i, j;
	struct pair x;

	begin(&x, 10 * MS, &o);
	for (int round = 0; round < 4; round++) {
		wire_write(x.c, data, 8 * MSS);
		wire_run(&x.w, 100 * MS);
		while (wire_read(x.p, data, sizeof(data)) > 0)
			;
	}
	vmh_tcp_get_info(x.c, &i);
	CHECK(i.cwnd >= 16 * MSS && i.cwnd <= 24 * MSS, "%u", i.cwnd);
	for (int round = 0; round < 4; round++) {
		wire_write(x.c, data, MSS);
		wire_run(&x.w, 100 * MS);
	}
	vmh_tcp_get_info(x.c, &j);
	CHECK(j.cwnd == i.cwnd, "%u after %u", j.cwnd, i.cwnd);
	end(&x);
}

/* The peer writes an answer in two pieces, and its Nagle has the second one wait for the ACK of the first: the client's, which
 * has just asked, comes at once, as that of Linux in a new connection. */
static void test_an_answer_in_two_pieces(void)
{
	struct vmh_tcp_options o = plain();
	struct pair x;
	char got[400];
	ssize_t all = 0;

	begin(&x, 20000, &o);
	CHECK(wire_write(x.c, data, 100) == 100, "not written");
	wire_run(&x.w, 1 * MS);
	CHECK(wire_read(x.p, got, sizeof(got)) == 100, "no request");
	CHECK(wire_write(x.p, data, 100) == 100 && wire_write(x.p, data, 200) == 200, "not written");
	wire_run(&x.w, 1 * MS);
	CHECK(wire_read(x.c, got, sizeof(got)) == 300, "not the whole answer");
	end(&x);
	begin(&x, 20000, &o); /* and the same of pieces that are nearly a segment */
	wire_write(x.c, data, 100);
	wire_run(&x.w, 1 * MS);
	wire_read(x.p, got, sizeof(got));
	for (int piece = 0; piece < 4; piece++) {
		CHECK(wire_write(x.p, data, 1000) == 1000, "not written");
		if (piece == 1)
			wire_run(&x.w, 50000);
	}
	wire_run(&x.w, 1 * MS);
	for (ssize_t n; (n = wire_read(x.c, got, sizeof(got))) > 0; all += n)
		;
	CHECK(all == 4000, "%zd of the answer", all);
	end(&x);
}

int main(void)
{
	test_an_answer_in_two_pieces();
	test_less_than_a_segment();
	test_the_window_doubles(VMH_TCP_CC_LWIP);
	test_the_window_doubles(VMH_TCP_CC_CUBIC);
	test_the_window_is_used();
	return check_result();
}
