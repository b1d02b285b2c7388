/* What is lost of what goes again, holes that no SACK tells of, and peers that take only small segments. */
#include "tcp_wire.h"
#include "check.h"

#define MS 1000000ull
#define SEGMENTS 80u
#define DELAY (10 * MS)

/* Segment number `hole`, and each `step` after it, so many, are lost `times` times each. */
struct losses {
	unsigned hole, step, holes, times;
	unsigned frames, lost[8];
	uint32_t first, mss;
};

static int watch(void *arg, const uint8_t *frame, size_t len)
{
	struct losses *l = arg;
	uint32_t seq;
	unsigned at;

	if (len <= 1000)
		return 0;
	memcpy(&seq, frame + wire_headers(frame) + 4, 4);
	seq = ntohl(seq);
	if (!l->frames++)
		l->first = seq;
	if ((seq - l->first) % l->mss)
		return 0;
	at = (seq - l->first) / l->mss;
	if (at < l->hole || (at - l->hole) % l->step || (at - l->hole) / l->step >= l->holes)
		return 0;
	at = (at - l->hole) / l->step;
	return l->lost[at] < l->times && ++l->lost[at];
}

static void pump(struct wire *w, struct stream *s)
{
	for (int step = 0; s->read < s->total && step < 60000; step++) {
		stream_pump(s);
		wire_run(w, DELAY / 10);
	}
}

/* The window has room for all of it, or it grows meanwhile: what is new goes behind what went again. */
enum window { WIDE, GROWS };

static void lose(uint8_t cc, bool no_sack, enum window window, unsigned holes, unsigned times, unsigned most_ms)
{
	struct wire_faults f = {.delay_ns = DELAY};
	struct losses l = {.hole = window == WIDE ? 10 : no_sack ? 24 : 8, .step = 7, .holes = holes, .times = times};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	uint64_t began;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_sack = no_sack;
	o.sndbuf = o.rcvbuf = 4u << 20;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 50 * MS, &c, &p);
	vmh_tcp_get_info(c, &i);
	l.mss = i.snd_mss;
	struct stream s = {.from = c, .to = p, .total = window == WIDE ? 2ull * SEGMENTS * l.mss : 0, .shut = true /* it goes on */};
	pump(&w, &s);
	wire_run(&w, 100 * MS);
	w.end[0].watch = watch;
	w.end[0].arg = &l;
	s.total += (uint64_t)SEGMENTS * l.mss;
	began = w.now;
	pump(&w, &s);
	vmh_tcp_get_info(c, &i);
	CHECK(s.read == s.total && !s.bad, "it comes to no end");
	CHECK(l.lost[holes - 1] == times, "%u lost", l.lost[holes - 1]);
	CHECK(i.rtos == 0 && i.retransmits <= holes * times + 1, "cc %u, %u holes: %u timeouts, %u resent, %u probes", cc, holes,
	      i.rtos, i.retransmits, i.probes);
	CHECK((w.now - began) / MS <= most_ms, "cc %u, %u holes: %llu ms", cc, holes, (w.now - began) / MS);
	wire_part(&w, c, p);
}

/* Each SACK is looked for in all that is on its way: of tiny segments that is not to be much. */
static void tiny(uint8_t cc)
{
	struct wire_faults f = {.delay_ns = DELAY};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	uint32_t flight = 0;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.mss_max = 60;
	o.sndbuf = o.rcvbuf = 4u << 20;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 50 * MS, &c, &p);
	struct stream s = {.from = c, .to = p, .total = 3000000};
	for (int step = 0; s.read < s.total && step < 60000; step++) {
		stream_pump(&s);
		wire_run(&w, DELAY / 10);
		vmh_tcp_get_info(c, &i);
		flight = i.unacked / i.snd_mss > flight ? i.unacked / i.snd_mss : flight;
	}
	CHECK(s.read == s.total && !s.bad, "it comes to no end");
	CHECK(flight > 500 && flight < 1400, "%u segments on their way", flight);
	wire_part(&w, c, p);
}

/* A peer that thinks for longer than it keeps its ACKs back: one or two questions that went again tell how long that is. */
static void slow_to_acknowledge(uint8_t ms, uint64_t delay, unsigned most)
{
	struct wire_faults f = {.delay_ns = delay};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	struct wire w;
	char got[16];

	vmh_tcp_options_init(&o);
	o.ack_ms = ms;
	wire_open(&w, &f, 100);
	wire_meet(&w, &o, 50 * MS + 4 * delay, &c, &p);
	for (int n = 0; n < 40; n++) {
		CHECK(wire_write(c, "question", 8) == 8, "question %d", n);
		wire_run(&w, 300 * MS);
		CHECK(wire_read(p, got, sizeof(got)) == 8 && wire_write(p, "answer", 6) == 6, "question %d", n);
		wire_run(&w, 300 * MS);
		CHECK(wire_read(c, got, sizeof(got)) == 6, "answer %d", n);
	}
	vmh_tcp_get_info(c, &i);
	CHECK(i.retransmits <= most, "%u ms: %u sent again", ms, i.retransmits);
	CHECK(!i.rtos, "%u ms: %u timeouts", ms, i.rtos);
	wire_part(&w, c, p);
}

static int number(void *arg, const uint8_t *frame, size_t len)
{
	uint16_t *id = arg;

	(void)len;
	memcpy(id, frame + 18, 2);
	*id = ntohs(*id);
	return 0;
}

/* A peer learns nothing of what the others get. */
static void numbers(void)
{
	struct wire_faults f = {.delay_ns = MS};
	struct vmh_tcp_conn *l, *c[2];
	uint16_t id = 0, before[2];
	struct wire w;

	wire_open(&w, &f, 100);
	l = wire_listen(&w, 80, 4, NULL);
	for (uint16_t k = 0; k < 2; k++)
		c[k] = wire_connect(&w, (uint16_t)(4000 + k), 80, NULL);
	wire_run(&w, 50 * MS);
	w.end[0].watch = number;
	w.end[0].arg = &id;
	for (int k = 0; k < 2; k++) {
		wire_write(c[k], "x", 1);
		wire_run(&w, MS);
		before[k] = id;
	}
	CHECK(before[0] != before[1], "both have %u", id);
	for (int round = 0; round < 5; round++) {
		for (int many = 0; many < 10; many++) {
			wire_write(c[1], "x", 1);
			wire_run(&w, 5 * MS);
		}
		wire_write(c[0], "x", 1);
		wire_run(&w, 5 * MS);
		CHECK(id == (uint16_t)++before[0], "%u", id);
	}
	for (int k = 0; k < 2; k++)
		vmh_tcp_abort(c[k]);
	wire_run(&w, 100 * MS);
	vmh_tcp_close(l);
	wire_run(&w, 1000 * MS);
	wire_close(&w);
}

int main(void)
{
	for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++) {
		lose(cc, false, WIDE, 1, 2, 140);
		lose(cc, false, WIDE, 3, 2, 240); /* by a probe each */
		lose(cc, false, GROWS, 1, 2, 140);
		lose(cc, true, WIDE, 3, 1, 120);
		lose(cc, true, GROWS, 3, 1, 160);
		tiny(cc);
	}
	tiny(VMH_TCP_CC_NONE);
	slow_to_acknowledge(40, MS / 10, 0);
	slow_to_acknowledge(55, MS / 10, 1);
	slow_to_acknowledge(100, MS / 10, 2);
	slow_to_acknowledge(200, MS / 10, 3);
	slow_to_acknowledge(200, 5 * MS, 3);
	slow_to_acknowledge(200, 20 * MS, 3);
	if (!getenv("WIRE_IPV6"))
		numbers();
	return check_result();
}
