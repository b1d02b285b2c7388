/* A way that becomes longer, and one where each frame takes another time: nothing is lost on either. */
#include "tcp_wire.h"
#include "check.h"

#define MS 1000000ull

static void bring(struct vmh_tcp_conn *from, struct vmh_tcp_conn *to, struct wire *w, size_t size)
{
	static uint8_t data[100000];
	size_t left = size, got = 0;
	ssize_t n;

	for (int k = 0; got < size && k < 40000; k++) {
		if (left && (n = wire_write(from, data, left)) > 0)
			left -= (size_t)n;
		wire_run(w, MS / 4);
		if ((n = wire_read(to, data, sizeof(data))) > 0)
			got += (size_t)n;
	}
	CHECK(got == size, "%zu of %zu bytes", got, size);
}

/* Requests of `size` bytes. A timer of the short way runs out before each answer: what is sent then spoils the sample. */
static void longer(uint64_t rtt_ns, size_t size, bool no_timestamps)
{
	struct wire_faults near = {.delay_ns = 20000}, far = {.delay_ns = rtt_ns / 2};
	struct vmh_tcp_info i, then;
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	uint64_t begun, took;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.no_timestamps = no_timestamps;
	wire_open(&w, &near, 256);
	wire_meet(&w, &o, 100 * MS, &c, &p);
	for (int k = 0; k < 50; k++) {
		bring(c, p, &w, 100);
		bring(p, c, &w, 100);
	}
	wire_faults(&w, &far);
	for (int k = 0; k < 12; k++) { /* this many to learn it */
		bring(c, p, &w, size);
		bring(p, c, &w, 100);
	}
	vmh_tcp_get_info(c, &then);
	begun = w.now;
	for (int k = 0; k < 20; k++) {
		bring(c, p, &w, size);
		bring(p, c, &w, 100);
	}
	took = (w.now - begun) / 20;
	vmh_tcp_get_info(c, &i);
	CHECK(took < rtt_ns * 13 / 10, "%zu bytes over %u ms, timestamps %d: %.1f ms", size, (unsigned)(rtt_ns / MS),
	      !no_timestamps, (double)took / 1e6);
	CHECK(i.retransmits == then.retransmits, "%zu bytes over %u ms, timestamps %d: %u resent for nothing", size,
	      (unsigned)(rtt_ns / MS), !no_timestamps, i.retransmits - then.retransmits);
	CHECK(i.rtt_us > rtt_ns / 1000 * 9 / 10 && i.rtt_us < rtt_ns / 1000 * 12 / 10, "%u us of %u ms", i.rtt_us,
	      (unsigned)(rtt_ns / MS));
	wire_part(&w, c, p);
}

/* Half of the frames are late. The window grows all the same. */
static void jitter(uint64_t late_ns, uint8_t cc, bool no_timestamps)
{
	struct wire_faults clean = {.delay_ns = 5 * MS};
	struct wire_faults f = {.delay_ns = 5 * MS, .reorder = 0.5, .reorder_ns = late_ns, .gbit = 1};
	struct stream s = {.total = 20000000};
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	uint64_t begun;
	double mbit;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = no_timestamps;
	wire_open(&w, &clean, 256);
	wire_meet(&w, &o, 1000 * MS, &s.from, &s.to);
	wire_faults(&w, &f);
	begun = w.now;
	CHECK(stream_run(&w, &s, 1, 10000 * MS), "only %lu bytes", s.read);
	mbit = (double)s.read * 8e3 / (double)(s.ended_at - begun);
	vmh_tcp_get_info(s.from, &i);
	CHECK(mbit > 350, "%.1f ms late, cc %d, timestamps %d: %.0f Mbit/s, window %u, %u resent, %u recoveries, %u undone",
	      (double)late_ns / 1e6, cc, !no_timestamps, mbit, i.cwnd, i.retransmits, i.fast_recoveries, i.undone);
	wire_part(&w, s.from, s.to);
}

struct late {
	unsigned frames, answers, blocks, most; /* most: no frame after that many; 0: all */
	uint8_t frame[WIRE_MTU + 14];
	size_t len;
};

static int keep_fifth(void *arg, const uint8_t *frame, size_t len)
{
	struct late *l = arg;

	if (len < 1000 || ++l->frames != 5)
		return l->most && l->frames > l->most;
	memcpy(l->frame, frame, l->len = len);
	return 1;
}

static int look(void *arg, const uint8_t *frame, size_t len)
{
	const uint8_t *tcp = frame + wire_headers(frame);
	unsigned header = (unsigned)(tcp[12] >> 4) * 4;
	struct late *l = arg;

	(void)len;
	l->answers++;
	for (unsigned i = 20; i < header && tcp[i]; i += tcp[i] == 1 ? 1u : tcp[i + 1])
		l->blocks += tcp[i] == 5;
	return 0;
}

/* A connection of whose `size` bytes the fifth segment has not come yet. */
static void keep_one(struct wire *w, struct late *l, bool no_timestamps, size_t size, struct vmh_tcp_conn **c,
		     struct vmh_tcp_conn **p)
{
	struct wire_faults f = {.delay_ns = 20000};
	static uint8_t data[30000];
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	o.no_timestamps = no_timestamps;
	wire_open(w, &f, 0);
	wire_meet(w, &o, 10 * MS, c, p);
	w->end[0].watch = keep_fifth;
	w->end[0].arg = l;
	wire_write(*c, data, size);
}

/* It comes now. */
static void give_it(struct wire *w, struct late *l)
{
	w->end[1].watch = look;
	w->end[1].arg = l;
	wire_inject(w, 1, l->frame, l->len);
}

/* It comes after it was sent again, and its timestamp is an old one by then: the peer is told all the same (RFC 2883). */
static void after_its_resend(bool no_timestamps, unsigned ms)
{
	static uint8_t more[5000];
	struct vmh_tcp_conn *c, *p;
	struct late l = {0};
	struct wire w;

	keep_one(&w, &l, no_timestamps, 30000, &c, &p);
	wire_run(&w, ms * MS);
	wire_write(c, more, sizeof(more));
	wire_run(&w, 2 * MS);
	give_it(&w, &l);
	CHECK(l.answers == 1 && l.blocks == 1, "%u ms late, timestamps %d: %u answers, %u blocks", ms, !no_timestamps, l.answers,
	      l.blocks);
	wire_part(&w, c, p);
}

/* What fills the hole is acknowledged at once, and not when a second segment comes (RFC 5681, 4.2). */
static void the_last_one_late(bool no_timestamps)
{
	struct vmh_tcp_conn *c, *p;
	struct late l = {.most = 9};
	struct wire w;

	keep_one(&w, &l, no_timestamps, 14000, &c, &p);
	wire_run(&w, MS);
	give_it(&w, &l);
	wire_run(&w, 100000);
	CHECK(l.answers == 1 && !l.blocks, "timestamps %d: %u answers, %u blocks", !no_timestamps, l.answers, l.blocks);
	wire_part(&w, c, p);
}

/* Frames overtake one another, and others come twice: D-SACKs tell nothing then, and what the first recoveries made of the
 * window stays for a while. */
static void late_and_doubled(double doubled, uint64_t late_ns, uint8_t cc, bool no_timestamps)
{
	struct wire_faults clean = {.delay_ns = 10 * MS};
	struct wire_faults f = {.delay_ns = 10 * MS, .reorder = 0.03, .reorder_ns = late_ns, .duplicate = doubled};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	struct wire w;
	uint64_t begun;
	double each;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = no_timestamps;
	wire_open(&w, &clean, 256);
	wire_meet(&w, &o, 1000 * MS, &c, &p);
	wire_faults(&w, &f);
	begun = w.now;
	for (int k = 0; k < 100; k++) {
		bring(c, p, &w, 100000);
		bring(p, c, &w, 100);
	}
	each = (double)(w.now - begun) / 1e8;
	vmh_tcp_get_info(c, &i);
	CHECK(each < (no_timestamps && doubled > 0 ? 55 : 24) + (double)late_ns / 1e6, "cc %d, timestamps %d: %.1f ms each, window %u, %u recoveries, %u undone", cc,
	      !no_timestamps, each, i.cwnd, i.fast_recoveries, i.undone);
	wire_part(&w, c, p);
}

static int count(void *arg, const uint8_t *frame, size_t len)
{
	unsigned *segments = arg;

	(void)frame;
	*segments += len > 1000;
	return 0;
}

/* After a rest the window is not what it was (RFC 5681, 4.1): as Linux, ten segments go, unless nothing is to control it, or
 * the sysctl says so. */
static void rests(uint8_t cc, bool keeps_cwnd, uint64_t rest_ns, unsigned least, unsigned most)
{
	struct wire_faults f = {.delay_ns = 10 * MS, .gbit = 1};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	unsigned segments = 0;
	static uint8_t data[60000];
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.keeps_cwnd = keeps_cwnd;
	wire_open(&w, &f, 256);
	wire_meet(&w, &o, 1000 * MS, &c, &p);
	for (int k = 0; k < 80; k++)
		bring(c, p, &w, 100000);
	wire_run(&w, rest_ns);
	w.end[0].watch = count;
	w.end[0].arg = &segments;
	for (int k = 0; k < 5; k++)
		wire_write(c, data, sizeof(data));
	wire_run(&w, 9 * MS);
	CHECK(segments >= least && segments <= most, "cc %d, after %.0f ms: %u segments at once", cc, (double)rest_ns / 1e6,
	      segments);
	wire_run(&w, 1000 * MS);
	while (wire_read(p, data, sizeof(data)) > 0)
		;
	wire_part(&w, c, p);
}

int main(void)
{
	static const unsigned ways[] = {20, 50, 80, 150, 300};
	static const size_t sizes[] = {100, 3000, 100000};

	for (int no_timestamps = 0; no_timestamps <= 1; no_timestamps++) {
		for (unsigned k = 0; k < sizeof(ways) / sizeof(*ways); k++)
			for (unsigned n = 0; n < sizeof(sizes) / sizeof(*sizes); n++)
				longer(ways[k] * MS, sizes[n], no_timestamps);
		for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++)
			for (uint64_t late = 300000; late <= 3 * MS; late *= 10)
				jitter(late, cc, no_timestamps);
		for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++)
			for (uint64_t late = 300000; late < 2 * MS; late *= 5)
				for (unsigned n = 0; n < 3; n++)
					late_and_doubled((double[]){0, 0.001, 0.01}[n], late, cc, no_timestamps);
		for (unsigned ms = 1; ms < 30; ms += 14)
			after_its_resend(no_timestamps, ms);
		the_last_one_late(no_timestamps);
	}
	for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++) {
		rests(cc, false, 100 * MS, 60, 300);
		rests(cc, false, 10000 * MS, 9, 10);
		rests(cc, true, 10000 * MS, 60, 300);
	}
	rests(VMH_TCP_CC_NONE, false, 10000 * MS, 60, 300);
	return check_result();
}
