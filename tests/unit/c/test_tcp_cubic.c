/* The window of CUBIC (RFC 9438) after one loss, on a wire of 10 ms. */
#include "tcp_wire.h"
#include "check.h"

#define MS 1000000ull

struct pair {
	struct wire w;
	struct vmh_tcp_conn *c, *p;
	unsigned frames, lose; /* which of the big frames is lost */
};

static char data[60000];

static int watch(void *arg, const uint8_t *frame, size_t len)
{
	struct pair *x = arg;

	(void)frame;
	return len > 1000 && ++x->frames == x->lose;
}

static double window(struct pair *x)
{
	struct vmh_tcp_info i;

	vmh_tcp_get_info(x->c, &i);
	return (double)i.cwnd / i.snd_mss;
}

/* Sends for so long: as much as goes, or `bytes` each millisecond. */
static void send_for(struct pair *x, uint64_t ns, size_t bytes)
{
	for (uint64_t end = x->w.now + ns; x->w.now < end;) {
		while (wire_write(x->c, data, bytes ? bytes : sizeof(data)) > 0 && !bytes)
			;
		wire_run(&x->w, MS);
		while (wire_read(x->p, data, sizeof(data)) > 0)
			;
	}
}

/* Until everything has come. */
static void drain(struct pair *x)
{
	for (int i = 0; i < 200; i++) {
		wire_run(&x->w, MS);
		while (wire_read(x->p, data, sizeof(data)) > 0)
			;
	}
}

/* A connection some time after the loss of its nth big frame. */
static void begin(struct pair *x, unsigned lose, uint64_t ns)
{
	struct wire_faults f = { .delay_ns = 5 * MS, .gbit = 10 };
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;

	vmh_tcp_options_init(&o);
	o.cc = VMH_TCP_CC_CUBIC;
	o.sndbuf = o.rcvbuf = 4u << 20;
	*x = (struct pair){ .lose = lose };
	wire_open(&x->w, &f, 100000);
	wire_meet(&x->w, &o, 50 * MS, &x->c, &x->p);
	x->w.end[0].watch = watch;
	x->w.end[0].arg = x;
	send_for(x, ns, 0);
	vmh_tcp_get_info(x->c, &i);
	CHECK(i.fast_recoveries == 1 && !i.rtos, "%u recoveries, %u timeouts", i.fast_recoveries, i.rtos);
}

static void end(struct pair *x)
{
	wire_part(&x->w, x->c, x->p);
}

/* How much it grows in 100 ms after `seconds` in which it sent little or nothing. */
static double growth_after(unsigned seconds, size_t bytes)
{
	struct pair x;
	double before, after;

	begin(&x, 400, 300 * MS);
	drain(&x);
	if (bytes)
		send_for(&x, seconds * 1000 * MS, bytes);
	else
		wire_run(&x.w, seconds * 1000 * MS);
	before = window(&x);
	send_for(&x, 100 * MS, 0);
	after = window(&x);
	printf("after %2u s of %4zu bytes per ms: %.0f to %.0f segments\n", seconds, bytes, before, after);
	end(&x);
	return after - before;
}

static void test_time_without_sending_is_none(void)
{
	double usual = growth_after(0, 0);

	for (unsigned seconds = 2; seconds <= 50; seconds += 16) {
		CHECK(growth_after(seconds, 0) <= usual + 2, "grows by more after %u s of nothing", seconds);
		CHECK(growth_after(seconds, 1448) <= usual + 2, "grows by more after %u s of little", seconds);
	}
}

/* In the Reno-friendly region: a segment per round trip from when it is as large as before the loss. */
static void test_alpha_is_one_from_the_last_window_on(void)
{
	struct pair x;
	struct vmh_tcp_info i;
	double prior, before = 0, slow = 0;
	int rounds = 0;

	begin(&x, 25, 60 * MS);
	vmh_tcp_get_info(x.c, &i);
	prior = (double)i.ssthresh / i.snd_mss / 0.7;
	for (; window(&x) < prior && rounds < 200; rounds++) {
		before = window(&x);
		send_for(&x, 10 * MS, 0);
		slow = window(&x) - before > slow ? window(&x) - before : slow;
	}
	before = window(&x);
	send_for(&x, 200 * MS, 0); /* 20 round trips */
	printf("%.1f segments before the loss: %d rounds by at most %.2f, then 20 rounds by %.2f\n", prior, rounds, slow,
	       (window(&x) - before) / 20);
	CHECK(rounds > 5 && rounds < 100, "%d rounds", rounds);
	CHECK((window(&x) - before) / 20 > 0.85 && (window(&x) - before) / 20 < 1.15, "by %.2f", (window(&x) - before) / 20);
	end(&x);
}

/* A queue that fills and runs over, on ways where the round trip varies by little before: what was lost is sent again,
 * and nothing else, but after a timeout, which comes where what was sent again was lost again. */
static void test_a_short_queue(int cc, uint64_t delay_ns, unsigned queue)
{
	struct wire_faults f = { .delay_ns = delay_ns, .gbit = 0.1, .queue = queue };
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	struct pair x = { 0 };
	struct stream s = { .total = 20000000 };

	vmh_tcp_options_init(&o);
	o.cc = cc;
	wire_open(&x.w, &f, 64);
	wire_meet(&x.w, &o, 200 * MS, &x.c, &x.p);
	s.from = x.c;
	s.to = x.p;
	CHECK(stream_run(&x.w, &s, 1, 20000 * MS), "not in 20 s");
	vmh_tcp_get_info(x.c, &i);
	printf("cc %d, %.1f ms each way, %u under way: %u lost, %u sent again, %u timeouts\n", cc, (double)delay_ns / 1e6,
	       queue, (unsigned)x.w.end[0].lost, i.retransmits, i.rtos);
	CHECK(x.w.end[0].lost > 10 && i.retransmits <= x.w.end[0].lost + (i.rtos ? 20 : 2), "%u of %u", i.retransmits,
	      (unsigned)x.w.end[0].lost);
	end(&x);
}

int main(void)
{
	test_time_without_sending_is_none();
	test_alpha_is_one_from_the_last_window_on();
	for (int cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++)
		for (unsigned queue = 50; queue <= 200; queue *= 2)
			for (uint64_t delay = MS / 2; delay <= 8 * MS; delay *= 4)
				test_a_short_queue(cc, delay, queue);
	return check_result();
}
