/* A flight of which a segment is lost and the end as well: no SACK tells of the end. And one of which nothing arrives. */
#include "tcp_wire.h"
#include "check.h"

#define MS 1000000ull
#define SEGMENTS 500u
#define HOLE 350u

struct losses {
	unsigned frames, from; /* segments that went; from which one on the end is lost */
	unsigned again, lost;  /* so many that go again are lost, too */
	uint32_t next;
};

static int watch(void *arg, const uint8_t *frame, size_t len)
{
	struct losses *l = arg;
	uint32_t seq;

	if (len <= 1000)
		return 0;
	memcpy(&seq, frame + wire_headers(frame) + 4, 4);
	seq = ntohl(seq);
	if (l->frames && (int32_t)(seq - l->next) < 0)
		return l->lost < l->again && ++l->lost;
	l->next = seq + 1;
	l->frames++;
	return l->frames == HOLE || l->frames >= l->from;
}

static int drop_one(void *arg, const uint8_t *frame, size_t len)
{
	int *left = arg;

	return len > wire_headers(frame) + 40 && *left && (*left)--;
}

/* A segment alone is lost, and a probe brings it. */
static void probe(struct wire *w, struct vmh_tcp_conn *c, struct vmh_tcp_conn *p)
{
	char data[100] = { 0 };
	struct vmh_tcp_info i;
	int left = 0;

	w->end[0].watch = drop_one;
	w->end[0].arg = &left;
	for (int round = 0; round < 20; round++) {
		left = round == 19;
		wire_write(c, data, sizeof(data));
		wire_run(w, 150 * MS);
		CHECK(wire_read(p, data, sizeof(data)) == sizeof(data), "round %d", round);
	}
	vmh_tcp_get_info(c, &i);
	CHECK(i.probes == 1 && !i.rtos, "%u probes, %u timeouts", i.probes, i.rtos);
}

/* How many round trips it takes from the end of the flight on. */
static void lose(uint8_t cc, bool no_timestamps, unsigned from, unsigned again, bool probed, unsigned most)
{
	const uint64_t delay = probed ? MS : 10 * MS; /* on a longer way the timeout comes before a probe */
	struct wire_faults f = {.delay_ns = delay};
	struct losses losses = {.from = from, .again = again};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	struct wire w;
	uint64_t sent;

	vmh_tcp_options_init(&o);
	o.cc = cc;
	o.no_timestamps = no_timestamps;
	o.quickack = probed; /* the round trip is that of the way then */
	o.sndbuf = o.rcvbuf = 4u << 20;
	wire_open(&w, &f, 100000);
	wire_meet(&w, &o, 50 * MS, &c, &p);
	if (probed)
		probe(&w, c, p);
	w.end[0].watch = watch;
	w.end[0].arg = &losses;
	vmh_tcp_get_info(c, &i);
	struct stream s = {.from = c, .to = p, .total = (uint64_t)SEGMENTS * i.snd_mss, .shut = true /* a FIN would be SACKed */};
	for (int ms = 0; losses.frames < SEGMENTS && ms < 3000; ms++) {
		stream_pump(&s);
		wire_run(&w, delay / 10);
	}
	sent = w.now;
	CHECK(losses.frames == SEGMENTS, "%u frames went", losses.frames);
	for (int ms = 0; s.read < s.total && ms < 60000; ms++) {
		stream_pump(&s);
		wire_run(&w, delay / 10);
	}
	CHECK(s.read == s.total && !s.bad, "it comes to no end");
	vmh_tcp_get_info(c, &i);
	CHECK((w.now - sent) / (2 * delay) <= most, "cc %u, from %u: %.1f round trips, %u resent, %u timeouts, %u probes", cc, from,
	      (double)(w.now - sent) / (2.0 * (double)delay), i.retransmits, i.rtos, i.probes);
	CHECK(i.retransmits <= SEGMENTS - from + 4 + probed, "%u resent of %u", i.retransmits, SEGMENTS - from + 2);
	wire_part(&w, c, p);
}

static int swallow(void *arg, const uint8_t *frame, size_t len)
{
	(void)frame, (void)len;
	return *(const bool *)arg;
}

/* There is no way for a while; as soon as there is, what was lost goes again, and not with the next timeout. */
static void no_way(uint64_t ms)
{
	struct wire_faults f = {.delay_ns = MS};
	struct vmh_tcp_conn *c, *p;
	struct vmh_tcp_info i;
	bool down = true;
	struct wire w;

	wire_open(&w, &f, 100000);
	wire_meet(&w, NULL, 50 * MS, &c, &p);
	struct stream s = {.from = c, .to = p, .total = 20000, .shut = true};
	for (int end = 0; end < 2; end++) {
		w.end[end].watch = swallow;
		w.end[end].arg = &down;
	}
	stream_pump(&s);
	wire_run(&w, ms * MS);
	vmh_tcp_get_info(c, &i);
	CHECK(i.retries > 1, "%u timeouts", i.retries);
	down = false;
	vmh_tcp_resume(c);
	for (int each = 0; each < 20; each++) {
		stream_pump(&s);
		wire_run(&w, MS);
	}
	CHECK(s.read == s.total && !s.bad, "%llu of %llu bytes", (unsigned long long)s.read, (unsigned long long)s.total);
	vmh_tcp_get_info(c, &i);
	CHECK(!i.retries, "%u timeouts are counted", i.retries);
	vmh_tcp_resume(c);
	vmh_tcp_get_info(p, &i);
	CHECK(i.pcb.rtime_ms == 0, "its peer waits");
	wire_part(&w, c, p);
}

int main(void)
{
	no_way(900);
	no_way(20000);
	for (uint8_t cc = VMH_TCP_CC_LWIP; cc <= VMH_TCP_CC_CUBIC; cc++)
		for (int plain = 0; plain < 2; plain++) {
			lose(cc, plain, 480, 0, false, 6);
			lose(cc, plain, 480, 0, true, 3);
			lose(cc, plain, 400, 0, false, 6);
			lose(cc, plain, 351, 0, false, 6); /* from the hole on */
			lose(cc, plain, 400, 1, false, 20); /* what goes again, too: until a timeout */
		}
	return check_result();
}
