/* A segment that comes late is no loss: what was made of it is taken back, and what came twice is named (RFC 2883). */
#include "tcp_wire.h"
#include "check.h"
#include <sys/socket.h>

#define MS 1000000ull
#define SEGMENTS 400u
#define ODD 150u /* the segment that something happens to */

enum what { LATE, LOST, TWICE, BOTH /* late, and MORE behind it lost */ };
#define MORE 20u

struct wire_tap {
	enum what what;
	unsigned frames;
	uint32_t next;
	uint8_t frame[WIRE_MTU + 14], behind[WIRE_MTU + 14]; /* ODD, and the next but one */
	size_t len, behind_len;
};

static uint32_t word(const uint8_t *p)
{
	uint32_t v;

	memcpy(&v, p, 4);
	return ntohl(v);
}

static uint32_t seq_of(const uint8_t *frame)
{
	return word(frame + wire_headers(frame) + 4);
}

static int tap(void *arg, const uint8_t *frame, size_t len)
{
	struct wire_tap *t = arg;

	if (len <= 1000 || (t->frames && (int32_t)(seq_of(frame) - t->next) < 0))
		return 0;
	t->next = seq_of(frame) + 1;
	t->frames++;
	if (t->frames == ODD + 2)
		memcpy(t->behind, frame, t->behind_len = len);
	if (t->what == BOTH && t->frames > ODD + 10 && t->frames <= ODD + 10 + 2 * MORE)
		return t->frames & 1;
	if (t->frames != ODD)
		return 0;
	memcpy(t->frame, frame, t->len = len);
	return t->what != TWICE;
}

/* The SACK blocks of the last ACK. */
struct acks {
	uint32_t ack, block[8];
	unsigned n;
};

static int look(void *arg, const uint8_t *frame, size_t len)
{
	const uint8_t *tcp = frame + wire_headers(frame);
	unsigned header = (unsigned)(tcp[12] >> 4) * 4;
	struct acks *a = arg;

	(void)len;
	a->ack = word(tcp + 8);
	a->n = 0;
	for (unsigned i = 20; i < header && tcp[i]; i += tcp[i] == 1 ? 1u : tcp[i + 1])
		for (unsigned k = 2; tcp[i] == 5 && k < tcp[i + 1]; k += 4)
			a->block[a->n++] = word(tcp + i + k);
	return 0;
}

static bool twice(const struct acks *a, const uint8_t *frame, size_t len)
{
	uint32_t from = seq_of(frame), to;

	to = from + (uint32_t)(len - wire_headers(frame)) - (uint32_t)(frame[wire_headers(frame) + 12] >> 4) * 4;
	return a->n >= 2 && a->block[0] == from && a->block[1] == to;
}

static void odd(uint8_t cc, bool no_timestamps, enum what what)
{
	struct wire_faults f = {.delay_ns = 10 * MS};
	struct wire_tap t = {.what = what};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i, then;
	struct acks a = {0};
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = no_timestamps;
	o.sndbuf = o.rcvbuf = 4u << 20;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 50 * MS, &c, &p);
	w.end[0].watch = tap;
	w.end[0].arg = &t;
	vmh_tcp_get_info(c, &i);
	struct stream s = {.from = c, .to = p, .total = (uint64_t)SEGMENTS * i.snd_mss, .shut = true};
	for (int ms = 0; !t.len && ms < 3000; ms++) {
		stream_pump(&s);
		wire_run(&w, MS);
	}
	CHECK(t.len, "it never went");
	vmh_tcp_get_info(c, &then);
	wire_run(&w, 14 * MS); /* the others have come by then, and the answers have not */
	w.end[1].watch = look;
	w.end[1].arg = &a;
	if (what == LOST || what == TWICE) {
		wire_inject(&w, 1, t.behind, t.behind_len);
		CHECK(twice(&a, t.behind, t.behind_len), "behind: %u words", a.n);
		CHECK((what == TWICE) == ((int32_t)(a.ack - a.block[1]) >= 0), "%x acknowledged, %x twice", a.ack, a.block[1]);
	}
	if (what == LOST)
		CHECK(a.n >= 4 && (int32_t)(a.block[2] - a.block[0]) <= 0 && (int32_t)(a.block[3] - a.block[1]) >= 0, "not in a block");
	wire_run(&w, 10 * MS); /* a recovery has begun */
	if (what != LOST)
		wire_inject(&w, 1, t.frame, t.len);
	if (what == TWICE)
		CHECK(twice(&a, t.frame, t.len), "%u words", a.n);
	for (int ms = 0; s.read < s.total && ms < 3000; ms++) {
		stream_pump(&s);
		wire_run(&w, MS);
	}
	CHECK(s.read == s.total && !s.bad, "cc %d: it comes to no end", cc);
	wire_run(&w, 100 * MS);
	vmh_tcp_get_info(c, &i);
	/* LATE without timestamps: as for the end of a flight, until the peer has told */
	CHECK(i.retransmits <= (what == TWICE ? 0 : what == BOTH ? MORE + 3 : what == LATE && no_timestamps ? 40 : 3),
	      "cc %d, what %d: %u resent", cc, what, i.retransmits);
	CHECK((i.ssthresh == then.ssthresh) == (what == LATE || what == TWICE), "cc %d, what %d: %u, then %u", cc, what, i.ssthresh,
	      then.ssthresh);
	if (what != BOTH) {
		CHECK(i.fast_recoveries == (what != TWICE), "cc %d: %u recoveries", cc, i.fast_recoveries);
		CHECK(i.undone == (what == LATE), "cc %d, what %d: %u undone", cc, what, i.undone);
		CHECK((i.reordering > 3) == (what == LATE), "cc %d, what %d: reordering %u", cc, what, i.reordering);
	}
	CHECK(i.rtos == 0, "%u timeouts", i.rtos);
	wire_part(&w, c, p);
}

/* Each 20th frame is late, on a way that has just become long: several recoveries begin before the peer can tell of the first. */
static void many_late(uint8_t cc, uint64_t seed)
{
	struct wire_faults near = {.delay_ns = 20000}, far = {.delay_ns = 5 * MS, .reorder = 0.05, .reorder_ns = 300000, .gbit = 1};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	uint8_t data[100] = {0};
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = true;
	wire_open(&w, &near, 256);
	w.random += seed * 7919;
	wire_meet(&w, &o, MS, &c, &p);
	for (int k = 0; k < 20; k++) {
		wire_write(c, data, sizeof(data));
		wire_run(&w, MS);
		wire_read(p, data, sizeof(data));
	}
	wire_faults(&w, &far);
	struct stream s = {.from = c, .to = p, .total = 20000000};
	stream_run(&w, &s, 1, 1000 * MS);
	vmh_tcp_get_info(c, &i);
	CHECK(s.read == s.total, "cc %d: only %lu bytes, window %u, %u recoveries, %u undone", cc, s.read, i.cwnd, i.fast_recoveries,
	      i.undone);
	wire_part(&w, c, p);
}

struct far_behind {
	unsigned frames, lost; /* lost: the first one from there on */
	uint8_t frame[WIRE_MTU + 14];
	size_t len;
};

static int keep(void *arg, const uint8_t *frame, size_t len)
{
	struct far_behind *b = arg;

	if (len < 1000)
		return 0;
	b->frames++;
	if (b->frames == 900)
		memcpy(b->frame, frame, b->len = len);
	if (b->frames != b->lost)
		return b->frames == 900;
	return 1;
}

/* Who has learned that frames are overtaken by many finds a loss among few by the time that it stays. */
static void a_loss_after_that(uint64_t delay_ns, uint64_t each_ns)
{
	struct wire_faults f = {.delay_ns = delay_ns};
	struct far_behind b = {0};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i, then;
	static uint8_t data[1400];
	struct wire w;

	vmh_tcp_options_init(&o);
	o.sndbuf = o.rcvbuf = 4u << 20;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 50 * MS, &c, &p);
	w.end[0].watch = keep;
	w.end[0].arg = &b;
	struct stream s = {.from = c, .to = p, .total = 3000000, .shut = true};
	for (int k = 0; s.read < s.total && k < 200000; k++) {
		stream_pump(&s);
		wire_run(&w, 10000);
		if (b.len && b.frames >= 1100) {
			wire_inject(&w, 1, b.frame, b.len);
			b.len = 0;
		}
	}
	wire_run(&w, 100 * MS);
	vmh_tcp_get_info(c, &then);
	CHECK(then.reordering > 50, "reordering %u", then.reordering);
	b.lost = b.frames + 100;
	for (int k = 0; k < 400; k++) {
		wire_write(c, data, sizeof(data));
		wire_run(&w, each_ns);
		wire_read(p, data, sizeof(data));
	}
	vmh_tcp_get_info(c, &i);
	CHECK(i.retransmits - then.retransmits == 1 && i.rtos == then.rtos, "%u resent, %u timeouts",
	      i.retransmits - then.retransmits, i.rtos - then.rtos);
	wire_part(&w, c, p);
}

static int lose_first(void *arg, const uint8_t *frame, size_t len)
{
	unsigned *data = arg;
	size_t headers = wire_headers(frame);

	return len - headers > (size_t)(frame[headers + 12] >> 4) * 4 && !(*data)++;
}

/* An answer is lost, and the FIN behind it comes: without a block for it the answer would go again by a timer only. */
static void answer_and_fin(bool no_timestamps, size_t size)
{
	struct wire_faults f = {.delay_ns = 20000};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	uint8_t data[5000] = {0};
	struct acks a = {0};
	unsigned answers = 0;
	uint64_t begun;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.no_timestamps = no_timestamps;
	wire_open(&w, &f, 256);
	wire_meet(&w, &o, MS, &c, &p);
	w.end[1].watch = lose_first;
	w.end[1].arg = &answers;
	w.end[0].watch = look;
	w.end[0].arg = &a;
	begun = w.now;
	CHECK(wire_write(p, data, size) == (ssize_t)size, "not written");
	vmh_tcp_shutdown(p, SHUT_WR);
	wire_run(&w, 30000);
	CHECK(a.n >= 2 && a.block[1] - a.ack == size + 1, "%u words, to %u", a.n, a.block[1] - a.ack);
	for (int ms = 0; ms < 300 && !(vmh_tcp_get_info(c, &i), i.unread == size); ms++)
		wire_run(&w, MS);
	CHECK(w.now - begun < 10 * MS, "%.1f ms", (double)(w.now - begun) / MS);
	wire_part(&w, c, p);
}

static int lose_one(void *arg, const uint8_t *frame, size_t len)
{
	(void)frame, (void)len;
	return !(*(unsigned *)arg)++;
}

/* A SYN that went twice is no sample, and what comes after it is. */
static void syn_lost(void)
{
	struct wire_faults f = {.delay_ns = MS};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	uint8_t data[100] = {0};
	unsigned frames = 0;
	struct wire w;

	vmh_tcp_options_init(&o);
	wire_open(&w, &f, 256);
	w.end[0].watch = lose_one;
	w.end[0].arg = &frames;
	wire_meet(&w, &o, 2000 * MS, &c, &p);
	for (int k = 0; k < 3; k++) {
		wire_write(c, data, sizeof(data));
		wire_run(&w, 100 * MS);
		wire_read(p, data, sizeof(data));
	}
	vmh_tcp_get_info(c, &i);
	CHECK(i.rtt_us >= 2000 && i.rtt_us < 50000, "round trip of %u us", i.rtt_us);
	wire_part(&w, c, p);
}

/* ---- a timeout ---- */

struct loser {
	bool losing;
	unsigned frames;
};

static int lose_some(void *arg, const uint8_t *frame, size_t len)
{
	struct loser *l = arg;

	(void)frame;
	l->frames += len > 1000;
	return l->losing || l->frames == 60; /* so that the window does not double any more */
}

/* For 15 ms nothing comes through: all that was under way comes after that, or is lost. */
static void stands_still(uint8_t cc, bool no_timestamps, bool lost, bool much)
{
	struct wire_faults f = {.delay_ns = 50000, .gbit = 10};
	struct stream s = {.total = much ? 20000000 : 400000};
	struct vmh_tcp_options o;
	struct vmh_tcp_info before, i;
	struct loser l = {0};
	struct wire w;
	uint64_t begun, took;
	uint32_t least = UINT32_MAX;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = no_timestamps;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 50 * MS, &s.from, &s.to);
	w.end[0].watch = lose_some;
	w.end[0].arg = &l;
	begun = w.now;
	while (s.read < (much ? 10000000u : 200000u)) {
		stream_pump(&s);
		wire_run(&w, 20000);
	}
	vmh_tcp_get_info(s.from, &before);
	if (lost) {
		l.losing = true;
		wire_run(&w, 200000);
		l.losing = false;
	}
	for (int e = 0; !lost && e < 2; e++)
		w.end[e].free_at = w.now + 15 * MS;
	while (s.read < s.total && w.now < begun + 2000 * MS) {
		stream_pump(&s);
		wire_run(&w, 20000);
		vmh_tcp_get_info(s.from, &i);
		if (i.undone && i.cwnd < least)
			least = i.cwnd;
	}
	took = w.now - begun;
	CHECK(s.read == s.total, "only %lu bytes", s.read);
	CHECK(lost || (i.rtos == 1 && i.undone == 1 && i.retransmits <= 8), "%u timeouts, %u undone, %u resent", i.rtos,
	      i.undone, i.retransmits);
	CHECK(lost || least >= before.cwnd, "a window of %u, %u before", least, before.cwnd);
	CHECK(!lost || (i.rtos <= 1 && i.undone == 0 && took < (much ? 120 : 60) * MS), "%u timeouts, %u undone, %.1f ms",
	      i.rtos, i.undone, (double)took / MS);
	wire_part(&w, s.from, s.to);
}

/* From a moment on all is lost; then the first segment passes that goes again, and of the new ones behind it none: nothing
 * that went once has come, whatever else goes again meanwhile. */
struct flight {
	enum { FLOWS, LOST_ALL, AGAIN } phase;
	uint32_t first, most;
	unsigned frames, lost_new;
};

static int lose_flight(void *arg, const uint8_t *frame, size_t len)
{
	struct flight *f = arg;
	uint32_t seq = seq_of(frame);
	bool again = f->frames && (int32_t)(seq - f->most) <= 0;

	if (len < 1000)
		return 0;
	f->frames++;
	if (!again)
		f->most = seq;
	if (f->phase == LOST_ALL && !f->first)
		f->first = seq;
	if (f->phase == LOST_ALL && again && seq == f->first)
		f->phase = AGAIN;
	return f->phase == LOST_ALL || (f->phase == AGAIN && !again && f->lost_new++ < 2);
}

static void a_flight_is_lost(uint8_t cc, uint64_t delay_ns)
{
	struct wire_faults f = {.delay_ns = delay_ns, .gbit = 1};
	struct stream s = {.total = 40000000};
	struct vmh_tcp_options o;
	struct vmh_tcp_info before, i;
	struct flight flight = {0};
	uint64_t begun;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = o.quickack = true;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 1000 * MS, &s.from, &s.to);
	w.end[0].watch = lose_flight;
	w.end[0].arg = &flight;
	begun = w.now;
	for (; s.read < 10000000; wire_run(&w, 50000))
		stream_pump(&s);
	vmh_tcp_get_info(s.from, &before);
	flight.phase = LOST_ALL;
	for (; s.read < s.total && w.now < begun + 5000 * MS; wire_run(&w, 50000))
		stream_pump(&s);
	vmh_tcp_get_info(s.from, &i);
	CHECK(s.read == s.total, "only %lu bytes", s.read);
	CHECK(i.undone == before.undone, "cc %d: %u timeouts, %u undone", cc, i.rtos - before.rtos,
	      i.undone - before.undone);
	wire_part(&w, s.from, s.to);
}

int main(void)
{
	for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++) {
		a_flight_is_lost(cc, MS);
		a_flight_is_lost(cc, 10 * MS);
	}
	for (int how = 0; how < 16; how++)
		stands_still(how & 8 ? VMH_TCP_CC_LWIP : VMH_TCP_CC_CUBIC, how & 1, how & 2, how & 4);
	for (int k = 0; k < 8; k++) /* wherever the numbers begin */
		syn_lost();
	a_loss_after_that(20000, MS / 2);
	a_loss_after_that(5 * MS, MS);
	for (uint64_t seed = 0; seed < 6; seed++)
		many_late(seed & 1 ? VMH_TCP_CC_CUBIC : VMH_TCP_CC_LWIP, seed);
	for (int plain = 0; plain < 2; plain++) {
		answer_and_fin(plain, 3);
		answer_and_fin(plain, 4000);
	}
	for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++)
		for (int plain = 0; plain < 2; plain++)
			for (int what = LATE; what <= BOTH; what++)
				odd(cc, plain, (enum what)what);
	return check_result();
}
