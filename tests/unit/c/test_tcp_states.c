/* Segments that a peer should not send, in every state; floods; timers; options. Segments are made by hand here. */
#include "tcp_wire.h"
#include "check.h"
#include <sys/socket.h>

#define FIN 1
#define SYN 2
#define RST 4
#define ACK 16
#define URG 32
#define NS 1000000000ul

static const struct wire_faults perfect = {.delay_ns = 20000};

struct seen { /* the last frame that went out of an end */
	unsigned n;
	uint32_t seq, ack, tsval;
	uint8_t flags;
	size_t payload;
};

static int look(void *arg, const uint8_t *frame, size_t len)
{
	struct seen *s = arg;
	const uint8_t *tcp = frame + wire_headers(frame);

	s->n++;
	memcpy(&s->seq, tcp + 4, 4);
	memcpy(&s->ack, tcp + 8, 4);
	s->seq = ntohl(s->seq);
	s->ack = ntohl(s->ack);
	if (tcp[12] >> 4 == 8) { /* two NOPs and a timestamp */
		memcpy(&s->tsval, tcp + 24, 4);
		s->tsval = ntohl(s->tsval);
	}
	s->flags = tcp[13];
	s->payload = len - wire_headers(frame) - (size_t)(tcp[12] >> 4) * 4;
	return 0;
}

static int mute(void *arg, const uint8_t *frame, size_t len)
{
	look(arg, frame, len);
	return 1;
}

static void mute_both(struct wire *w, struct seen *seen)
{
	w->end[0].watch = w->end[1].watch = mute;
	w->end[0].arg = w->end[1].arg = seen;
}

static struct vmh_tcp_stats stats(struct wire *w, int end)
{
	struct vmh_tcp_stats s;

	vmh_tcp_get_stats(w->end[end].t, &s);
	return s;
}

static void inject_window(struct wire *w, uint16_t wnd, uint16_t sport, uint16_t dport, uint32_t seq, uint32_t ack,
			  uint8_t flags, const void *data, size_t len)
{
	uint8_t frame[1600];

	wire_inject(w, 1, frame, wire_segment(w, frame, 0, sport, dport, seq, ack, flags, wnd, NULL, 0, data, len));
}

static void inject(struct wire *w, uint16_t sport, uint16_t dport, uint32_t seq, uint32_t ack, uint8_t flags,
		   const void *data, size_t len)
{
	inject_window(w, 1000, sport, dport, seq, ack, flags, data, len);
}

/* End 1 is brought to a state by hand-made segments of end 0; returns the next numbers. */
enum state { LISTENING, SYN_RECEIVED, OPENED, PEER_CLOSED, CLOSED_FIRST, HALF_CLOSED, BOTH_CLOSING, LAST, WAITING, STATES };

static struct vmh_tcp_conn *bring(struct wire *w, struct vmh_tcp_conn **l, enum state state, struct seen *seen, uint32_t *seq,
				  uint32_t *ack)
{
	struct vmh_tcp_conn *p = NULL;

	wire_open(w, &perfect, 16);
	w->end[1].watch = mute;
	w->end[1].arg = seen;
	*l = wire_listen(w, 80, 4, NULL);
	*seq = 1000;
	*ack = 0;
	if (state == LISTENING)
		return NULL;
	inject(w, 4000, 80, 999, 0, SYN, NULL, 0);
	CHECK(seen->flags == (SYN | ACK) && seen->ack == 1000, "%x", seen->flags);
	*ack = seen->seq + 1;
	if (state == SYN_RECEIVED)
		return NULL;
	inject(w, 4000, 80, *seq, *ack, ACK, NULL, 0);
	CHECK(vmh_tcp_accept(*l, NULL, &p) == 0, "accept");
	if (state == PEER_CLOSED || state == LAST)
		inject(w, 4000, 80, (*seq)++, *ack, FIN | ACK, NULL, 0);
	if (state >= CLOSED_FIRST) {
		vmh_tcp_shutdown(p, SHUT_WR);
		CHECK(seen->flags & FIN, "%x", seen->flags);
	}
	if (state == HALF_CLOSED || state == WAITING)
		inject(w, 4000, 80, *seq, ++*ack, ACK, NULL, 0);
	if (state == BOTH_CLOSING || state == WAITING)
		inject(w, 4000, 80, (*seq)++, *ack, FIN | ACK, NULL, 0);
	return p;
}

/* Every combination of flags, at every interesting place, in every state: no crash, no leak; a reset at the right place
 * ends a connection, one beside it does not. */
static void test_any_segment(void)
{
	static const int places[] = {0, -1, 1, 5, 100000, -100000};

	for (int state = 0; state < STATES; state++)
		for (unsigned flags = 0; flags < 64; flags++)
			for (unsigned at = 0; at < 36; at++) {
				struct vmh_tcp_conn *l, *p;
				struct seen seen = {0};
				struct wire w;
				uint32_t seq, ack;

				p = bring(&w, &l, (enum state)state, &seen, &seq, &ack);
				inject(&w, 4000, 80, seq + (uint32_t)places[at % 6], ack + (uint32_t)places[at / 6],
				       (uint8_t)flags, "data", flags & 8 ? 4 : 0);
				inject(&w, 4000, 80, seq, ack, ACK, "more", 4);
				if (state == OPENED && flags == RST)
					CHECK((vmh_tcp_poll(p) & VMH_TCP_ERR) == (at % 6 ? 0 : VMH_TCP_ERR), "RST at %d: %x",
					      places[at % 6], vmh_tcp_poll(p));
				if (state == WAITING && flags & RST)
					CHECK(stats(&w, 1).time_wait == (at % 6 != 0), "RST at %d", places[at % 6]);
				wire_run(&w, NS);
				if (p || vmh_tcp_accept(l, NULL, &p) == 0)
					vmh_tcp_close(p);
				wire_run(&w, 300 * NS);
				CHECK(stats(&w, 1).conns == 0, "state %d flags %x place %d: a connection is left", state, flags, at);
				vmh_tcp_close(l);
				wire_close(&w);
			}
}

/* Data or an end without an ACK, or with one of long ago: as Linux, nothing of it counts. Elsewhere too: so the service asks
 * whether there is such a connection. */
static void test_guessed(void)
{
	static const enum state states[] = {OPENED, CLOSED_FIRST, HALF_CLOSED};

	for (unsigned i = 0; i < 3; i++)
		for (unsigned flags = 0; flags < 8; flags++) {
			bool away = flags & 4, old = flags & 2, fin = flags & 1;
			struct vmh_tcp_conn *l, *p;
			struct seen seen = {0};
			uint32_t seq, ack;
			struct wire w;
			unsigned n;

			p = bring(&w, &l, states[i], &seen, &seq, &ack);
			wire_run(&w, NS);
			n = seen.n;
			inject(&w, 4000, 80, seq + (away ? 1u << 30 : 0), ack - 100000,
			       (uint8_t)((fin ? FIN : 0) | (old ? ACK : 0)), "data", away ? 0 : 4);
			CHECK(!(vmh_tcp_poll(p) & VMH_TCP_IN), "state %u flags %u: taken", i, flags);
			CHECK(old ? seen.flags == ACK && seen.ack == seq : seen.n == n, "state %u flags %u: %x %u", i, flags,
			      seen.flags, seen.ack);
			inject(&w, 4000, 80, seq, ack, ACK, "data", 4);
			CHECK(vmh_tcp_poll(p) & VMH_TCP_IN, "state %u flags %u", i, flags);
			vmh_tcp_close(p);
			vmh_tcp_close(l);
			wire_close(&w);
		}
}

/* A probe that Linux drops. */
static void test_an_end_in_a_syn(void)
{
	struct vmh_tcp_conn *l;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;

	bring(&w, &l, LISTENING, &seen, &seq, &ack);
	inject(&w, 4000, 80, 999, 0, SYN | FIN, NULL, 0);
	CHECK(!seen.n, "%x", seen.flags);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Sent before the peer acknowledged our end, and comes after that, to one that has sent nothing else. */
static void test_overtaken_by_the_ack_of_our_end(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;

	p = bring(&w, &l, HALF_CLOSED, &seen, &seq, &ack);
	inject(&w, 4000, 80, seq, ack - 1, FIN | ACK, "data", 4);
	CHECK(vmh_tcp_poll(p) & VMH_TCP_IN && seen.ack == seq + 5, "%u", seen.ack - seq);
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* One that does not count the peer's FIN. */
static void test_late_reset(void)
{
	static const enum state states[] = {PEER_CLOSED, BOTH_CLOSING, LAST};

	for (unsigned i = 0; i < 3; i++)
		for (uint32_t back = 1; back < 3; back++) {
			struct vmh_tcp_conn *l, *p;
			struct seen seen = {0};
			uint32_t seq, ack;
			struct wire w;

			p = bring(&w, &l, states[i], &seen, &seq, &ack);
			inject(&w, 4000, 80, seq - back, 0, RST, NULL, 0);
			CHECK(!!vmh_tcp_error(p) == (back == 1), "state %u back %u: %d", i, back, vmh_tcp_error(p));
			vmh_tcp_close(p);
			vmh_tcp_close(l);
			wire_close(&w);
		}
}

/* A peer that does not remember the name asks for it below what it had: it gets it after a reset, as with Linux. */
static void test_time_wait_ends_by_a_reset(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	struct wire w;
	uint32_t seq, ack;

	p = bring(&w, &l, WAITING, &seen, &seq, &ack);
	vmh_tcp_close(p);
	inject(&w, 4000, 80, seq - 500, 0, SYN, NULL, 0);
	CHECK(seen.flags == ACK && seen.ack == seq, "%x %u", seen.flags, seen.ack);
	inject(&w, 4000, 80, seen.ack, 0, RST, NULL, 0);
	inject(&w, 4000, 80, seq - 500, 0, SYN, NULL, 0);
	CHECK(seen.flags == (SYN | ACK) && seen.ack == seq - 499, "%x %u", seen.flags, seen.ack);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* As above, while a SYN waits for its answer. */
static void test_any_answer_to_a_syn(void)
{
	static const int places[] = {0, -1, 1, 5, 100000, -100000};

	for (unsigned flags = 0; flags < 64; flags++)
		for (unsigned at = 0; at < 36; at++) {
			struct vmh_tcp_conn *c;
			struct seen seen = {0};
			uint8_t frame[200];
			struct wire w;
			bool hit = places[at / 6] == 0;

			wire_open(&w, &perfect, 16);
			w.end[0].watch = mute;
			w.end[0].arg = &seen;
			c = wire_connect(&w, 4000, 80, NULL);
			wire_inject(&w, 0, frame, wire_segment(&w, frame, 1, 80, 4000, 5000 + (uint32_t)places[at % 6],
							       seen.seq + 1 + (uint32_t)places[at / 6], (uint8_t)flags, 1000,
							       NULL, 0, "data", flags & 8 ? 4 : 0));
			if ((flags & 55) == (RST | ACK))
				CHECK(vmh_tcp_error(c) == (hit ? ECONNREFUSED : 0), "RST at %d", places[at / 6]);
			if ((flags & 55) == (SYN | ACK))
				CHECK(!!(vmh_tcp_poll(c) & VMH_TCP_OUT) == hit, "SYN and ACK at %d", places[at / 6]);
			wire_run(&w, NS);
			vmh_tcp_close(c);
			wire_run(&w, 300 * NS);
			CHECK(stats(&w, 0).conns == 0, "flags %x place %d: a connection is left", flags, at);
			wire_close(&w);
		}
}

static void test_syn_flood(void)
{
	struct vmh_tcp_conn *l, *c, *p = NULL;
	struct vmh_tcp_options o;
	struct seen seen = {0};
	struct wire w;

	wire_open(&w, &perfect, 16);
	vmh_tcp_options_init(&o);
	o.syn_cookies = 0; /* with them: test_tcp_cookies.c */
	l = wire_listen(&w, 80, 100, &o);
	w.end[1].watch = mute;
	w.end[1].arg = &seen;
	for (unsigned i = 0; i < 50000; i++) {
		inject(&w, (uint16_t)(10000 + i), 80, i, 0, SYN, NULL, 0);
		if (i % 100 == 0)
			wire_run(&w, 10000000);
	}
	CHECK(stats(&w, 1).conns <= 128, "%u half-open ones", stats(&w, 1).conns);
	CHECK(stats(&w, 1).syn_dropped > 40000, "%lu", stats(&w, 1).syn_dropped);
	w.end[1].watch = NULL;
	wire_run(&w, 2 * NS);
	c = wire_connect(&w, 4000, 80, NULL); /* the old ones give way */
	wire_run(&w, NS);
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "no place for an honest one");
	wire_run(&w, 120 * NS);
	CHECK(stats(&w, 1).conns == (p != NULL), "%u", stats(&w, 1).conns);
	vmh_tcp_close(c);
	if (p)
		vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

static void test_backlog(void)
{
	struct vmh_tcp_conn *l, *c[8], *p[8] = {NULL};
	struct vmh_tcp_options o;
	unsigned n = 0, ok = 0;
	struct wire w;

	wire_open(&w, &perfect, 16);
	l = wire_listen(&w, 80, 2, NULL);
	for (int i = 0; i < 8; i++)
		c[i] = wire_connect(&w, (uint16_t)(4000 + i), 80, NULL);
	wire_run(&w, NS / 2);
	for (int i = 0; i < 8; i++)
		n += vmh_tcp_accept(l, NULL, &p[i]) == 0;
	CHECK(n == 3, "backlog 2 holds 3, as in Linux, not %u", n);
	for (int k = 0; k < 20; k++) {
		wire_run(&w, NS);
		for (int i = 0; i < 8; i++)
			if (!p[i])
				n += vmh_tcp_accept(l, NULL, &p[i]) == 0;
	}
	CHECK(n == 8, "the others come later: %u", n);
	for (int i = 0; i < 8; i++) {
		ok += vmh_tcp_poll(c[i]) == (VMH_TCP_OUT | VMH_TCP_DRAINED);
		vmh_tcp_close(c[i]);
		if (p[i])
			vmh_tcp_close(p[i]);
	}
	CHECK(ok == 8, "%u", ok);
	vmh_tcp_close(l);
	vmh_tcp_options_init(&o);
	o.syn_rate = 5;
	l = wire_listen(&w, 81, 100, &o);
	for (int i = 0; i < 8; i++)
		c[i] = wire_connect(&w, (uint16_t)(5000 + i), 81, NULL);
	wire_run(&w, NS / 2);
	for (n = 0; vmh_tcp_accept(l, NULL, &p[0]) == 0; n++)
		vmh_tcp_abort(p[0]);
	CHECK(n == 5, "SYN rate: %u", n);
	for (int i = 0; i < 8; i++)
		vmh_tcp_abort(c[i]);
	vmh_tcp_close(l);
	wire_close(&w);
}

static void test_refused_and_timed_out(void)
{
	struct vmh_tcp_conn *c;
	struct seen seen = {0};
	struct wire w;
	uint64_t start;

	wire_open(&w, &perfect, 16);
	c = wire_connect(&w, 4000, 80, NULL);
	wire_run(&w, NS);
	CHECK(vmh_tcp_error(c) == ECONNREFUSED, "refused");
	vmh_tcp_close(c);
	w.end[0].watch = mute;
	w.end[0].arg = &seen;
	c = wire_connect(&w, 4001, 80, NULL);
	start = w.now;
	for (int i = 0; i < 200 && !(vmh_tcp_poll(c) & VMH_TCP_ERR); i++)
		wire_run(&w, NS);
	CHECK(vmh_tcp_error(c) == ETIMEDOUT, "timed out");
	CHECK(seen.n == 7 && w.now - start >= 126 * NS && w.now - start <= 128 * NS, "%u SYNs in %lu s, as in Linux 7 in 127",
	      seen.n, (w.now - start) / NS);
	vmh_tcp_close(c);
	c = wire_connect(&w, 4002, 80, NULL);
	CHECK(vmh_tcp_fail(c, EHOSTUNREACH) == 0 && vmh_tcp_error(c) == EHOSTUNREACH, "told from outside");
	vmh_tcp_close(c);
	wire_close(&w);
}

static void open_pair(struct wire *w, struct vmh_tcp_conn **l, struct vmh_tcp_conn **c, struct vmh_tcp_conn **p,
		      const struct vmh_tcp_options *o)
{
	wire_open(w, &perfect, 64);
	*l = wire_listen(w, 80, 10, o);
	*c = wire_connect(w, 4000, 80, o);
	wire_run(w, 10000000);
	*p = NULL;
	CHECK(vmh_tcp_accept(*l, NULL, p) == 0, "accept");
}

static void close_pair(struct wire *w, struct vmh_tcp_conn *l, struct vmh_tcp_conn *c, struct vmh_tcp_conn *p)
{
	vmh_tcp_close(c);
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_run(w, 300 * NS);
	CHECK(stats(w, 0).conns + stats(w, 1).conns == 0, "left");
	wire_close(w);
}

static void test_zero_window(void)
{
	static char buf[300000];
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	size_t written = 0, got = 0;
	struct seen seen = {0};
	struct wire w;
	ssize_t n;

	vmh_tcp_options_init(&o);
	o.rcvbuf = 20000;
	open_pair(&w, &l, &c, &p, &o);
	for (; written < 200000 && (n = wire_write(c, buf, 30000)) > 0; written += (size_t)n)
		;
	wire_run(&w, 600 * NS); /* nobody reads: the window is zero, probes go on */
	vmh_tcp_get_info(c, &i);
	CHECK(i.snd_wnd == 0 && i.probes > 5 && !(vmh_tcp_poll(c) & VMH_TCP_ERR), "wnd %u probes %u", i.snd_wnd, i.probes);
	for (int k = 0; k < 4; k++) { /* reading a part opens the window by that part */
		got += (size_t)wire_read(p, buf, 3000);
		wire_run(&w, NS);
		vmh_tcp_get_info(p, &i);
		CHECK(i.unread <= 20000, "%u unread in a buffer of 20000", i.unread);
	}
	w.end[1].watch = mute; /* the news that the window is open is lost: only a probe finds out */
	w.end[1].arg = &seen;
	while ((n = wire_read(p, buf, sizeof(buf))) > 0)
		got += (size_t)n;
	w.end[1].watch = NULL;
	CHECK(seen.n > 0, "no window update");
	for (int k = 0; k < 1000 && got < written; k++) {
		while ((n = wire_read(p, buf, sizeof(buf))) > 0)
			got += (size_t)n;
		wire_run(&w, k ? 100000 : 200 * NS);
	}
	CHECK(got == written, "%zu of %zu", got, written);
	close_pair(&w, l, c, p);
}

/* The byte of a probe is acknowledged when the peer reads again: that was no round trip. */
static void test_time_of_a_shut_window(void)
{
	struct seen seen = {0};
	struct vmh_tcp_conn *l, *c;
	struct vmh_tcp_info i;
	uint32_t seq, ack;
	struct wire w;

	c = bring(&w, &l, OPENED, &seen, &seq, &ack);
	inject_window(&w, 0, 4000, 80, seq, ack, ACK, "x", 1);
	CHECK(wire_write(c, "answer", 6) == 6, "write");
	wire_run(&w, 20 * NS);
	vmh_tcp_get_info(c, &i);
	CHECK(i.probes > 3, "%u probes", i.probes);
	inject_window(&w, 5000, 4000, 80, seq + 1, ack, ACK, NULL, 0);
	CHECK(seen.seq == ack && seen.payload == 6, "%zu bytes", seen.payload);
	wire_run(&w, 1000000);
	inject_window(&w, 5000, 4000, 80, seq + 1, ack + 6, ACK, NULL, 0);
	vmh_tcp_get_info(c, &i);
	CHECK(!i.unacked && i.rtt_us < 10000, "%u unacknowledged, a round trip of %u us", i.unacked, i.rtt_us);
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* A window that shuts behind what is under way, of a peer that answers: TCP_USER_TIMEOUT counts from what it acknowledges. */
static void test_user_timeout_and_a_shut_window(void)
{
	for (int timeout = 0; timeout < 2; timeout++) {
		struct seen seen = {0};
		struct vmh_tcp_conn *l, *c;
		struct vmh_tcp_options o;
		uint32_t seq, ack;
		struct wire w;

		c = bring(&w, &l, OPENED, &seen, &seq, &ack);
		vmh_tcp_options_init(&o);
		o.user_timeout_ms = timeout ? 5000 : 0;
		vmh_tcp_set_options(c, &o);
		CHECK(wire_write(c, "answer", 6) == 6, "write");
		inject_window(&w, 0, 4000, 80, seq, ack, ACK, NULL, 0);
		for (int k = 0; k < 8; k++) {
			wire_run(&w, NS);
			inject_window(&w, 0, 4000, 80, seq, ack, ACK, NULL, 0);
		}
		CHECK(vmh_tcp_error(c) == (timeout ? ETIMEDOUT : 0), "%d", vmh_tcp_error(c));
		vmh_tcp_abort(c);
		vmh_tcp_close(l);
		wire_close(&w);
	}
}

/* A whole segment after a pause may have been sent again, by a peer with nothing else under way. */
static void test_ack_after_a_pause(void)
{
	struct seen seen = {0};
	struct vmh_tcp_conn *l, *c;
	uint8_t data[536] = "";
	uint32_t seq, ack;
	struct wire w;
	unsigned before;

	c = bring(&w, &l, OPENED, &seen, &seq, &ack);
	for (int k = 0; k < 2; k++, seq += sizeof(data))
		inject(&w, 4000, 80, seq, ack, ACK, data, sizeof(data));
	for (int k = 0; k < 2; k++) { /* the second one comes at once: it waits for another */
		wire_run(&w, k ? 0 : 200000000);
		before = seen.n;
		inject(&w, 4000, 80, seq, ack, ACK, data, sizeof(data));
		seq += sizeof(data);
		CHECK(seen.n == before + !k && (k || seen.ack == seq), "%u segments, ACK of %u", seen.n - before, seen.ack);
	}
	wire_run(&w, 200000000);
	CHECK(wire_write(c, "answer", 6) == 6, "write"); /* so that the next is none of a stream */
	inject(&w, 4000, 80, seq, ack + 6, ACK, NULL, 0);
	wire_run(&w, 200000000);
	before = seen.n;
	inject(&w, 4000, 80, seq, ack + 6, ACK, data, 80);
	CHECK(seen.n == before, "a short request: its answer carries the ACK");
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	wire_close(&w);
}

static void test_keepalive_and_user_timeout(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct seen seen = {0};
	struct wire w;
	uint64_t start;

	vmh_tcp_options_init(&o);
	o.keepalive = true;
	o.keep_idle_s = 10;
	o.keep_intvl_s = 2;
	o.keep_cnt = 3;
	open_pair(&w, &l, &c, &p, &o);
	wire_run(&w, 1000 * NS);
	CHECK(vmh_tcp_poll(c) == (VMH_TCP_OUT | VMH_TCP_DRAINED), "a peer that answers is kept");
	mute_both(&w, &seen);
	start = w.now;
	for (int i = 0; i < 100 && !(vmh_tcp_poll(c) & VMH_TCP_ERR); i++)
		wire_run(&w, NS);
	CHECK(vmh_tcp_error(c) == ETIMEDOUT && w.now - start >= 6 * NS && w.now - start <= 17 * NS, "after %lu s",
	      (w.now - start) / NS);
	w.end[0].watch = w.end[1].watch = NULL;
	vmh_tcp_abort(p);
	p = NULL;
	vmh_tcp_close(c);
	vmh_tcp_options_init(&o);
	o.user_timeout_ms = 3000;
	c = wire_connect(&w, 4001, 80, &o);
	wire_run(&w, NS);
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "accept");
	w.end[0].watch = mute;
	w.end[0].arg = &seen;
	wire_write(c, "x", 1);
	start = w.now;
	for (int i = 0; i < 1000 && !(vmh_tcp_poll(c) & VMH_TCP_ERR); i++)
		wire_run(&w, NS / 100);
	CHECK(vmh_tcp_error(c) == ETIMEDOUT && w.now - start >= 3 * NS && w.now - start < 7 * NS, "after %lu ms",
	      (w.now - start) / 1000000);
	w.end[0].watch = NULL;
	close_pair(&w, l, c, p);
}

/* A shorter time that is set counts from when the peer was heard; other options, and a time between probes, move nothing. */
static void test_keepalive_that_is_changed(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct seen seen = {0};
	struct wire w;
	uint64_t start;

	vmh_tcp_options_init(&o);
	o.keepalive = true;
	o.keep_idle_s = 100;
	open_pair(&w, &l, &c, &p, &o);
	mute_both(&w, &seen);
	vmh_tcp_get_options(p, &o);
	o.keepalive = false;
	vmh_tcp_set_options(p, &o);
	wire_run(&w, 5 * NS);
	vmh_tcp_get_options(c, &o);
	o.keep_idle_s = 10;
	o.keep_intvl_s = 1;
	o.keep_cnt = 2;
	vmh_tcp_set_options(c, &o);
	start = w.now;
	for (int i = 0; i < 3000 && !(vmh_tcp_poll(c) & VMH_TCP_ERR); i++) {
		wire_run(&w, NS / 100);
		o.nodelay = i % 2;
		vmh_tcp_set_options(c, &o);
	}
	CHECK(vmh_tcp_error(c) == ETIMEDOUT && w.now - start >= 6 * NS && w.now - start < 8 * NS, "after %lu ms",
	      (w.now - start) / 1000000);
	w.end[0].watch = w.end[1].watch = NULL;
	close_pair(&w, l, c, p);
}

/* The end comes at its time: with data that is not acknowledged, and with a window that stays closed, whether the peer
 * answers or not; there the time begins with the first probe of the window, which what is left of it was sent into. */
static void test_end_of_user_timeout(void)
{
	static const uint32_t ms[] = {1000, 2500, 5000};
	static const char *const name[] = {"data", "full, silence", "full, answers"};
	static char data[60000];
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct seen seen = {0};
	struct wire w;

	for (int i = 0; i < 9; i++) {
		uint64_t start, took, wanted = ms[i % 3];
		bool full = i >= 3;

		vmh_tcp_options_init(&o);
		o.user_timeout_ms = ms[i % 3];
		o.rcvbuf = 16384;
		open_pair(&w, &l, &c, &p, &o);
		for (int k = 0; full && k < 100; k++) {
			wire_write(c, data, sizeof(data));
			wire_run(&w, NS / 1000);
		}
		if (i < 6) {
			mute_both(&w, &seen);
		}
		if (!full)
			wire_write(c, "x", 1);
		start = w.now;
		while (!(vmh_tcp_poll(c) & VMH_TCP_ERR) && w.now - start < 60 * NS)
			wire_run(&w, NS / 100);
		took = (w.now - start) / 1000000;
		CHECK(vmh_tcp_error(c) == ETIMEDOUT && took + 100 >= wanted && took <= wanted + (full ? 400 : 30),
		      "%s, %lu ms: after %lu ms", name[i / 3], wanted, took);
		w.end[0].watch = w.end[1].watch = NULL;
		close_pair(&w, l, c, p);
	}
}

/* A window that opens in time begins it anew. */
static void test_user_timeout_of_a_slow_reader(void)
{
	static char data[60000];
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_info i;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.user_timeout_ms = 2000;
	o.rcvbuf = 16384;
	open_pair(&w, &l, &c, &p, &o);
	for (int k = 0; k < 20; k++) {
		while (wire_write(c, data, sizeof(data)) > 0)
			;
		wire_run(&w, 3 * NS / 2);
		CHECK(wire_read(p, data, sizeof(data)) > 0, "nothing came in round %d", k);
	}
	vmh_tcp_get_info(c, &i);
	CHECK(i.probes > 20 && !(vmh_tcp_poll(c) & VMH_TCP_ERR), "%u probes, error %d", i.probes, vmh_tcp_error(c));
	close_pair(&w, l, c, p);
}

/* One small segment, whose ACK a Linux peer may hold back for 40 ms: never sent twice. When it is lost: soon. */
static void test_lone_segment(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_info i;
	struct seen seen = {0};
	struct wire w;
	char buf[10];
	uint64_t start;

	open_pair(&w, &l, &c, &p, NULL);
	for (int k = 0; k < 50; k++) {
		CHECK(wire_write(c, "x", 1) == 1, "write");
		wire_run(&w, 200000000); /* the ACK comes after 40 ms */
	}
	vmh_tcp_get_info(c, &i);
	CHECK(i.retransmits == 0 && i.dsacks == 0, "%u sent again", i.retransmits);
	CHECK(wire_read(p, buf, 10) == 10, "read");
	w.end[0].watch = mute;
	w.end[0].arg = &seen;
	wire_write(c, "y", 1);
	w.end[0].watch = NULL;
	start = w.now;
	while (wire_read(p, buf, 10) != 1 && w.now - start < NS)
		wire_run(&w, 1000000);
	while (wire_read(p, buf, 10) > 0)
		;
	CHECK(w.now - start < 200000000, "lost for %lu ms", (w.now - start) / 1000000);
	close_pair(&w, l, c, p);
}

/* Of 20,000 bytes in small writes, with the ACKs of the first ones between them. */
static uint64_t segments_of_a_cork(struct wire *w, struct vmh_tcp_conn *c, bool nodelay)
{
	uint64_t before = w->end[0].sent;
	struct vmh_tcp_options o;
	char buf[100] = { 0 };

	vmh_tcp_get_options(c, &o);
	o.nodelay = nodelay;
	o.cork = true;
	vmh_tcp_set_options(c, &o);
	for (int k = 0; k < 200; k++) {
		wire_write(c, buf, sizeof(buf));
		wire_run(w, 1000);
	}
	o.cork = false;
	vmh_tcp_set_options(c, &o);
	wire_run(w, NS);
	return w->end[0].sent - before;
}

static void test_nagle_cork_quickack(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct wire w;
	uint64_t before;
	uint64_t sent[2];

	open_pair(&w, &l, &c, &p, NULL);
	before = w.end[0].sent;
	for (int k = 0; k < 10; k++)
		wire_write(c, "x", 1);
	CHECK(w.end[0].sent == before + 1, "Nagle: %lu segments", w.end[0].sent - before);
	wire_run(&w, NS);
	vmh_tcp_get_options(c, &o);
	o.nodelay = true;
	vmh_tcp_set_options(c, &o);
	before = w.end[0].sent;
	for (int k = 0; k < 10; k++)
		wire_write(c, "x", 1);
	CHECK(w.end[0].sent == before + 10, "no Nagle: %lu segments", w.end[0].sent - before);
	wire_run(&w, NS);
	o.cork = true;
	vmh_tcp_set_options(c, &o);
	before = w.end[0].sent;
	for (int k = 0; k < 10; k++)
		wire_write(c, "x", 1);
	CHECK(w.end[0].sent == before, "cork: %lu segments", w.end[0].sent - before);
	o.cork = false;
	vmh_tcp_set_options(c, &o);
	CHECK(w.end[0].sent == before + 1, "uncorked: %lu segments", w.end[0].sent - before);
	wire_run(&w, NS);
	for (int k = 0; k < 2; k++)
		sent[k] = segments_of_a_cork(&w, c, k);
	CHECK(sent[1] == sent[0] && sent[0] < 25, "%lu segments; with TCP_NODELAY %lu", sent[0], sent[1]);
	wire_run(&w, NS);
	vmh_tcp_get_options(p, &o);
	o.quickack = true;
	vmh_tcp_set_options(p, &o);
	before = w.end[1].sent;
	wire_write(c, "x", 1);
	wire_run(&w, 100000);
	CHECK(w.end[1].sent == before + 1, "quick ACK: %lu segments", w.end[1].sent - before);
	close_pair(&w, l, c, p);
}

/* What the peer has got by now. */
static ssize_t got(struct wire *w, struct vmh_tcp_conn *p, uint64_t ms)
{
	static char buf[8000];
	ssize_t n, all = 0;

	wire_run(w, ms * 1000000);
	while ((n = wire_read(p, buf, sizeof(buf))) > 0)
		all += n;
	return all;
}

/* As in Linux: the rest of a corked stream stays until it is uncorked, a whole segment, TCP_NODELAY is set anew, 200 ms have
 * passed, or the end of the stream is sent. Of MSG_MORE alone any ACK makes it go. */
static void test_the_rest_of_a_cork(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_info i;
	struct vmh_tcp_options o;
	static char data[4000];
	struct wire w;
	ssize_t mss;

	open_pair(&w, &l, &c, &p, NULL);
	vmh_tcp_get_info(c, &i);
	mss = i.snd_mss;
	vmh_tcp_get_options(c, &o);
	o.cork = true;
	vmh_tcp_set_options(c, &o);
	for (int k = 0; k < 3; k++) {
		wire_write(c, data, (size_t)mss + 100);
		CHECK(got(&w, p, 150) == mss, "the rest has gone");
		CHECK(got(&w, p, 150) == 100, "the rest stays");
	}
	wire_write(c, data, (size_t)mss + 100);
	CHECK(got(&w, p, 100) == mss, "the rest has gone");
	wire_write(p, "hello", 5);
	CHECK(got(&w, p, 20) == 0 && wire_read(c, data, 10) == 5, "with an ACK");
	wire_write(c, data, (size_t)mss - 100);
	CHECK(got(&w, p, 20) == mss, "a whole segment");
	wire_write(c, data, (size_t)mss + 100);
	CHECK(got(&w, p, 100) == mss, "the rest has gone");
	o.nodelay = true;
	vmh_tcp_set_options(c, &o);
	CHECK(got(&w, p, 1) == 100, "TCP_NODELAY");
	wire_write(c, data, (size_t)mss + 100);
	CHECK(got(&w, p, 100) == mss, "the rest has gone");
	o.cork = false;
	vmh_tcp_set_options(c, &o);
	CHECK(got(&w, p, 1) == 100, "uncorked");
	CHECK(vmh_tcp_write(c, &(struct iovec){ data, (size_t)mss + 100 }, 1, true) == mss + 100, "MSG_MORE");
	CHECK(got(&w, p, 100) == mss + 100, "an ACK has come");
	o.cork = true;
	vmh_tcp_set_options(c, &o);
	wire_write(c, data, (size_t)mss + 100);
	CHECK(got(&w, p, 100) == mss, "the rest has gone");
	vmh_tcp_shutdown(c, SHUT_WR);
	CHECK(got(&w, p, 1) == 100, "the end of the stream");
	close_pair(&w, l, c, p);
}

/* A peer that has our FIN and does not close is not asked any more when nobody here waits for it. */
static void test_no_keepalive_of_an_orphan(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct vmh_tcp_options o;
	struct vmh_tcp_stats st;
	struct wire w;
	uint64_t before;

	open_pair(&w, &l, &c, &p, NULL);
	vmh_tcp_get_options(c, &o);
	o.keepalive = true;
	o.keep_idle_s = o.keep_intvl_s = 1;
	o.keep_cnt = 3;
	vmh_tcp_set_options(c, &o);
	vmh_tcp_shutdown(c, SHUT_WR);
	wire_run(&w, NS / 2);
	before = w.end[0].sent;
	wire_run(&w, 3 * NS);
	CHECK(w.end[0].sent > before, "the program may read still");
	vmh_tcp_close(c);
	before = w.end[0].sent;
	wire_run(&w, 50 * NS);
	CHECK(w.end[0].sent == before, "%lu probes", w.end[0].sent - before);
	vmh_tcp_get_stats(w.end[0].t, &st);
	CHECK(st.conns == 1, "net.ipv4.tcp_fin_timeout has not passed");
	wire_run(&w, 20 * NS);
	vmh_tcp_get_stats(w.end[0].t, &st);
	CHECK(st.conns == 0, "it has");
	vmh_tcp_abort(p);
	vmh_tcp_close(l);
	wire_run(&w, NS);
	wire_close(&w);
}

/* Frames that are too long for the path vanish, until set_path says how long they may be. */
static int narrow(void *arg, const uint8_t *frame, size_t len)
{
	(void)frame;
	return len > *(size_t *)arg + 14;
}

static void path_mtu(uint64_t total)
{
	struct vmh_tcp_path path = wire_path(0);
	struct vmh_tcp_conn *l, *c, *p;
	struct wire w;
	size_t mtu = 600;

	open_pair(&w, &l, &c, &p, NULL);
	w.end[0].watch = narrow;
	w.end[0].arg = &mtu;
	struct stream s = {.from = c, .to = p, .total = total};
	CHECK(!stream_run(&w, &s, 1, 100000000), "nothing can have come through");
	path.mtu = (uint16_t)mtu;
	vmh_tcp_set_path(c, &path);
	CHECK(stream_run(&w, &s, 1, 2 * NS) && !s.bad && s.read == s.total, "%lu of %lu", s.read, s.total);
	close_pair(&w, l, c, p);
}

static void test_path_mtu(void)
{
	path_mtu(300000);
	path_mtu(20000); /* its end is in a segment that is cut */
}

/* What an end sends, in the numbers of its stream. */
struct sends {
	uint32_t first, data_end, end; /* end: of the stream; 0: not yet */
	unsigned n, without_time;
};

static int note_sends(void *arg, const uint8_t *frame, size_t len)
{
	const uint8_t *tcp = frame + wire_headers(frame);
	size_t header = (size_t)(tcp[12] >> 4) * 4, data = len - wire_headers(frame) - header;
	struct sends *s = arg;
	uint32_t seq;

	memcpy(&seq, tcp + 4, 4);
	seq = ntohl(seq) - s->first;
	s->n++;
	s->without_time += tcp[12] >> 4 != 8;
	if (data && (int32_t)(seq + data - s->data_end) > 0)
		s->data_end = seq + (uint32_t)data;
	if (tcp[13] & FIN)
		s->end = seq + (uint32_t)data;
	return 1;
}

static void inject_ack(struct wire *w, uint32_t seq, uint32_t ack, uint16_t wnd)
{
	inject_window(w, wnd, 4000, 80, seq, ack, ACK, NULL, 0);
}

/* The end of the stream has a number, and goes when the peer's window has room for it: of a segment of which it takes a
 * part, or all but that. */
static void test_an_end_and_the_window(void)
{
	static const uint16_t windows[] = {400, 1000};
	static char buf[1000];

	for (unsigned i = 0; i < 2; i++) {
		struct vmh_tcp_conn *l, *p;
		struct sends sends = {0};
		struct seen seen = {0};
		uint32_t seq, ack;
		struct wire w;

		p = bring(&w, &l, OPENED, &seen, &seq, &ack);
		sends.first = ack;
		w.end[1].watch = note_sends;
		w.end[1].arg = &sends;
		inject_window(&w, 0, 4000, 80, seq, ack, ACK, "x", 1);
		wire_write(p, buf, sizeof(buf));
		vmh_tcp_shutdown(p, SHUT_WR);
		CHECK(!sends.data_end && !sends.end, "%u %u", sends.data_end, sends.end);
		inject_ack(&w, ++seq, ack, windows[i]);
		wire_run(&w, NS * 3 / 10); /* it is cut after 200 ms, and not sent again yet */
		CHECK(sends.data_end == windows[i] && !sends.end, "%u of %u, %u", sends.data_end, windows[i], sends.end);
		inject_ack(&w, seq, ack + windows[i], 1000);
		CHECK(sends.data_end == 1000 && sends.end == 1000, "%u at once: %u %u", windows[i], sends.data_end, sends.end);
		vmh_tcp_abort(p);
		vmh_tcp_close(l);
		wire_close(&w);
	}
}

/* Of a peer that does not wait so, the end is taken. */
static void test_an_end_at_a_shut_window(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;
	static char buf[1000];

	p = bring(&w, &l, OPENED, &seen, &seq, &ack);
	for (unsigned i = 0; i < 10000 && vmh_tcp_poll(p); i++) {
		struct vmh_tcp_info info;
		uint32_t room;

		vmh_tcp_get_info(p, &info);
		room = info.pcb.rcv_wnd < sizeof(buf) ? info.pcb.rcv_wnd : (uint32_t)sizeof(buf);
		if (!room)
			break;
		inject(&w, 4000, 80, seq, ack, ACK, buf, room);
		seq += room;
	}
	inject(&w, 4000, 80, seq, ack, ACK, buf, 1);
	CHECK(seen.ack == seq, "it is shut");
	inject(&w, 4000, 80, seq, ack, FIN | ACK, NULL, 0);
	CHECK(vmh_tcp_poll(p) & VMH_TCP_RDHUP, "%x", vmh_tcp_poll(p));
	wire_run(&w, NS);
	CHECK(seen.ack == seq + 1, "%u", seen.ack - seq);
	vmh_tcp_abort(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* A segment that comes late, and acknowledges, tells the window that goes with that. */
static void a_window_that_comes_late(uint32_t ahead)
{
	struct vmh_tcp_conn *l, *p;
	struct sends sends = {0};
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;
	static char buf[9000];

	p = bring(&w, &l, OPENED, &seen, &seq, &ack);
	sends.first = ack;
	w.end[1].watch = note_sends;
	w.end[1].arg = &sends;
	inject_window(&w, 4 * 536, 4000, 80, seq + 100, ack, ACK, "later", 5);
	wire_write(p, buf, sizeof(buf));
	wire_run(&w, NS / 100);
	CHECK(sends.data_end == 4 * 536, "%u", sends.data_end);
	inject_window(&w, 536, 4000, 80, seq + ahead, ack + 4 * 536, ACK, "x", 1);
	wire_run(&w, NS / 2);
	CHECK(sends.data_end == 5 * 536, "%u: %u", ahead, sends.data_end);
	vmh_tcp_abort(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

static void test_a_window_that_comes_late(void)
{
	a_window_that_comes_late(0);
	a_window_that_comes_late(50);
}

/* Probes of a shut window and of a peer that is silent have the time, as all segments then (RFC 7323, 3.2). */
static void test_probes_have_the_time(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct sends sends = {0};
	struct vmh_tcp_options o;
	struct wire w;
	static char buf[60000];

	open_pair(&w, &l, &c, &p, NULL);
	vmh_tcp_get_options(c, &o);
	o.keepalive = true;
	o.keep_idle_s = o.keep_intvl_s = 1;
	o.keep_cnt = 30;
	vmh_tcp_set_options(c, &o);
	w.end[0].watch = note_sends;
	w.end[0].arg = &sends;
	wire_run(&w, 10 * NS);
	CHECK(sends.n > 5 && !sends.without_time, "%u, %u without", sends.n, sends.without_time);
	w.end[0].watch = NULL;
	wire_run(&w, 2 * NS);
	for (unsigned i = 0; i < 1000 && wire_write(c, buf, sizeof(buf)) > 0; i++)
		wire_run(&w, NS / 100);
	wire_run(&w, NS);
	w.end[0].watch = note_sends;
	sends = (struct sends){0};
	wire_run(&w, 10 * NS);
	CHECK(sends.n > 1 && !sends.without_time, "%u, %u without", sends.n, sends.without_time);
	w.end[0].watch = NULL;
	close_pair(&w, l, c, p);
}

/* A peer that answers may keep its window shut for ever, but not when nobody here has the connection any more. */
static void an_orphan_at_a_shut_window(bool closed)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct wire w;
	static char buf[60000];

	open_pair(&w, &l, &c, &p, NULL);
	for (unsigned i = 0; i < 1000 && wire_write(c, buf, sizeof(buf)) > 0; i++)
		wire_run(&w, NS / 100);
	wire_run(&w, closed ? NS : 1000 * NS);
	CHECK(!vmh_tcp_error(c), "%d", vmh_tcp_error(c));
	vmh_tcp_close(c);
	wire_run(&w, (closed ? 190 : 1) * NS);
	CHECK(stats(&w, 0).conns == 1, "too soon");
	wire_run(&w, (closed ? 40 : 120) * NS);
	CHECK(stats(&w, 0).conns == 0, "for ever");
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_run(&w, 300 * NS);
	wire_close(&w);
}

static void test_an_orphan_at_a_shut_window(void)
{
	an_orphan_at_a_shut_window(true);
	an_orphan_at_a_shut_window(false); /* by then it has been asked for long enough */
}

/* Of what was never sent, or urgent somewhere: nothing is taken, and the connection stays where it is. */
static void test_of_what_was_never_sent(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;

	p = bring(&w, &l, OPENED, &seen, &seq, &ack);
	wire_run(&w, NS);
	inject(&w, 4000, 80, seq, ack + 1000, ACK, "data", 4);
	CHECK(!(vmh_tcp_poll(p) & VMH_TCP_IN) && seen.flags == ACK && seen.ack == seq, "%x %u", seen.flags, seen.ack - seq);
	wire_run(&w, NS);
	inject(&w, 4000, 80, seq, ack + 1000, FIN | ACK, NULL, 0);
	CHECK(!(vmh_tcp_poll(p) & VMH_TCP_RDHUP) && seen.ack == seq, "%u", seen.ack - seq);
	inject(&w, 4000, 80, seq + 10000000, ack, ACK | URG, "data", 4);
	inject(&w, 4000, 80, seq, ack + 1000, ACK | URG, "data", 4);
	inject(&w, 4000, 80, seq - 4, ack, ACK | URG, "data", 4);
	CHECK(!(vmh_tcp_poll(p) & VMH_TCP_URGENT), "%x", vmh_tcp_poll(p));
	inject(&w, 4000, 80, seq, ack, ACK | URG, "data", 4);
	CHECK(vmh_tcp_poll(p) & VMH_TCP_URGENT, "%x", vmh_tcp_poll(p));
	inject(&w, 4000, 80, seq, ack + 1000, RST | ACK, NULL, 0);
	CHECK(vmh_tcp_error(p) == ECONNRESET, "a reset is looked at by its number alone");
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* A peer that begins anew hears of it at once, and ends the old one. */
static void test_another_syn(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;

	bring(&w, &l, SYN_RECEIVED, &seen, &seq, &ack);
	inject(&w, 4000, 80, seq + 990000, ack, ACK, NULL, 0);
	CHECK(seen.flags == ACK && vmh_tcp_accept(l, NULL, &p) == -EAGAIN, "%x: far outside", seen.flags);
	wire_run(&w, NS);
	inject(&w, 4000, 80, 500000, 0, SYN, NULL, 0);
	CHECK(seen.flags == ACK && seen.ack == seq && seen.seq == ack, "%x %u", seen.flags, seen.ack);
	inject(&w, 4000, 80, seq, 0, RST, NULL, 0);
	inject(&w, 4000, 80, 500000, 0, SYN, NULL, 0);
	CHECK(seen.flags == (SYN | ACK) && seen.ack == 500001, "%x %u", seen.flags, seen.ack);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* RFC 5961, section 7. */
static void test_challenges_are_few(void)
{
	static const uint8_t flags[] = {SYN, RST, SYN | ACK};
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;

	p = bring(&w, &l, OPENED, &seen, &seq, &ack);
	for (unsigned f = 0; f < sizeof(flags); f++) {
		wire_run(&w, NS);
		seen.n = 0;
		for (unsigned i = 1; i < 100; i++)
			inject(&w, 4000, 80, seq + i, ack, flags[f], NULL, 0);
		CHECK(seen.n == 1 && seen.flags == ACK, "%x: %u answers, %x", flags[f], seen.n, seen.flags);
	}
	inject(&w, 4000, 80, seq, ack, RST, NULL, 0);
	CHECK(vmh_tcp_error(p) == ECONNRESET, "%d", vmh_tcp_error(p));
	vmh_tcp_close(p);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* The name of one in TIME_WAIT gets another connection, whose numbers are beyond (RFC 1122, 4.2.2.13), unless the SYN is
 * older (RFC 7323, 5). */
static void test_a_name_used_again(void)
{
	uint8_t options[12] = {1, 1, 8, 10}, frame[200];
	struct vmh_tcp_conn *l, *c, *p;
	struct seen seen = {0};
	static char buf[60000];
	uint32_t end, ends, tsval;
	struct wire w;

	open_pair(&w, &l, &c, &p, NULL);
	for (unsigned i = 0; i < 40; i++) {
		wire_write(p, buf, sizeof(buf));
		wire_run(&w, NS / 1000);
		wire_read(c, buf, sizeof(buf));
	}
	w.end[1].watch = look;
	w.end[1].arg = &seen;
	vmh_tcp_close(p);
	while (wire_read(c, buf, sizeof(buf)) > 0)
		wire_run(&w, NS / 1000);
	w.end[0].watch = mute;
	w.end[0].arg = &(struct seen){0};
	vmh_tcp_close(c);
	wire_run(&w, NS / 100);
	w.end[0].watch = NULL;
	wire_run(&w, 10 * NS);
	CHECK(stats(&w, 1).time_wait == 1, "it waits");
	end = seen.seq;
	ends = seen.ack;
	w.end[1].watch = mute;
	for (unsigned newer = 0; newer < 2; newer++) {
		tsval = htonl(newer ? ((struct seen *)w.end[0].arg)->tsval + 100000 : ((struct seen *)w.end[0].arg)->tsval - 100000);
		memcpy(options + 4, &tsval, 4);
		seen.flags = 0;
		wire_inject(&w, 1, frame, wire_segment(&w, frame, 0, 4000, 80, ends + 1000, 0, SYN, 1000, options, 12, NULL, 0));
		CHECK(seen.flags == (newer ? SYN | ACK : ACK), "%u: %x", newer, seen.flags);
	}
	CHECK((int32_t)(seen.seq - end) > 0, "%d", (int32_t)(seen.seq - end));
	vmh_tcp_close(l);
	wire_close(&w);
}

/* An end that comes again has not heard our ACK, and may once more. */
static void test_an_end_that_comes_again(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {0};
	uint32_t seq, ack;
	struct wire w;

	p = bring(&w, &l, WAITING, &seen, &seq, &ack);
	vmh_tcp_close(p);
	for (unsigned i = 0; i < 3; i++) {
		wire_run(&w, 50 * NS);
		inject(&w, 4000, 80, seq - 1, ack, FIN | ACK, NULL, 0);
		CHECK(seen.flags == ACK && seen.ack == seq, "%u: %x", i, seen.flags);
	}
	wire_run(&w, 61 * NS);
	CHECK(stats(&w, 1).time_wait == 0, "it is over then");
	vmh_tcp_close(l);
	wire_close(&w);
}

static void test_paws_and_isn(void)
{
	uint8_t frame[200], options[12] = {1, 1, 8, 10};
	struct vmh_tcp_conn *l, *c, *p;
	struct seen seen = {0};
	struct wire w;
	uint32_t isn[4], old;
	uint64_t before;
	char buf[10];

	open_pair(&w, &l, &c, &p, NULL);
	w.end[0].watch = look;
	w.end[0].arg = &seen;
	wire_write(c, "x", 1);
	wire_run(&w, NS);
	/* in order, but older than what was seen last: after a wrap of sequence numbers it would be old data */
	old = htonl(seen.tsval - 1000);
	memcpy(options + 4, &old, 4);
	wire_inject(&w, 1, frame, wire_segment(&w, frame, 0, 4000, 80, seen.seq + 1, seen.ack, ACK | 8, 1000, options, 12,
					       "old", 3));
	CHECK(stats(&w, 1).paws == 1, "%lu", stats(&w, 1).paws);
	CHECK(wire_read(p, buf, 10) == 1, "the data of before only");
	/* the two disagree about what was sent: an answer to each answer would never end */
	old = htonl(seen.tsval + 1000);
	memcpy(options + 4, &old, 4);
	before = w.end[1].sent;
	wire_inject(&w, 1, frame, wire_segment(&w, frame, 0, 4000, 80, seen.seq + 1, seen.ack, ACK | 8, 1000, options, 12,
					       "new", 3));
	wire_run(&w, 10 * NS);
	CHECK(wire_read(p, buf, 10) == 3 && w.end[1].sent - before < 50, "%lu segments", w.end[1].sent - before);
	/* a peer that was started anew, and its clock as well, opens one of the same name: by the answer it learns of this one */
	old = htonl(seen.tsval - 2000);
	memcpy(options + 4, &old, 4);
	for (unsigned again = 0; again < 3; again++) {
		before = w.end[1].sent;
		wire_inject(&w, 1, frame, wire_segment(&w, frame, 0, 4000, 80, seen.seq + 100000, 0, SYN, 1000, options, 12, NULL, 0));
		CHECK(w.end[1].sent - before == (again != 1), "SYN %u: %lu answers", again, w.end[1].sent - before);
		if (again)
			wire_run(&w, NS);
	}
	wire_inject(&w, 1, frame, wire_segment(&w, frame, 0, 4000, 80, seen.seq, seen.ack, RST, 0, NULL, 0, NULL, 0));
	close_pair(&w, l, c, p);
	wire_open(&w, &perfect, 0);
	w.end[0].watch = mute;
	w.end[0].arg = &seen;
	for (int i = 0; i < 4; i++) {
		c = wire_connect(&w, (uint16_t)(4000 + i / 2), 80, NULL);
		isn[i] = seen.seq;
		vmh_tcp_abort(c);
		wire_run(&w, NS);
	}
	CHECK(isn[1] - isn[0] > 240000 && isn[1] - isn[0] < 260000, "the same name: a clock of 4 us: %u", isn[1] - isn[0]);
	CHECK(isn[2] - isn[1] > 1000000, "another name: a different start: %u", isn[2] - isn[1]);
	wire_close(&w);
}

/* With one byte that p has read; seen: of c. */
static void open_and_tell(struct wire *w, struct vmh_tcp_conn **l, struct vmh_tcp_conn **c, struct vmh_tcp_conn **p, struct seen *seen)
{
	char byte;

	open_pair(w, l, c, p, NULL);
	w->end[0].watch = look;
	w->end[0].arg = seen;
	wire_write(*c, "x", 1);
	wire_run(w, NS);
	CHECK(wire_read(*p, &byte, 1) == 1, "it was not told");
}

/* Of ends that disagree. */
static void abort_pair(struct wire *w, struct vmh_tcp_conn *l, struct vmh_tcp_conn *c, struct vmh_tcp_conn *p)
{
	vmh_tcp_abort(c);
	vmh_tcp_abort(p);
	vmh_tcp_close(l);
	wire_run(w, NS);
	wire_close(w);
}

/* The segment that p expects, behind `size` bytes between IPv6 and TCP; what p reads. */
static ssize_t extended(struct wire *w, struct vmh_tcp_conn *p, const struct seen *seen, uint8_t kind, const void *headers, size_t size)
{
	uint8_t frame[300];
	size_t len = wire_segment(w, frame, 0, 4000, 80, seen->seq + (uint32_t)seen->payload, seen->ack, ACK | 8, 1000, NULL, 0, "data", 4);
	char buf[10];

	memmove(frame + 54 + size, frame + 54, len - 54);
	memcpy(frame + 54, headers, size);
	frame[19] = (uint8_t)(frame[19] + size);
	frame[20] = kind;
	wire_inject(w, 1, frame, len + size);
	return wire_read(p, buf, sizeof(buf));
}

static void test_extension_headers(void)
{
	static const struct {
		uint8_t kind, size, headers[32];
		bool taken, unfit; /* unfit: for a ring */
	} cases[] = {
		{60, 8, {6, 0, 1, 4}, true, false}, {60, 8, {6, 0, 0, 0, 0x1e, 2}, true, false}, /* of those that may be passed by */
		{0, 16, {6, 1, 5, 2, 0, 0, 1, 8}, true, false}, {43, 8, {6, 0, 4, 0}, true, false},
		{0, 24, {43, 0, 1, 4, 0, 0, 0, 0, 60, 0, 0, 0, 0, 0, 0, 0, 6, 0, 1, 4}, true, false},
		{43, 8, {6, 0, 0, 1}, false, true}, {60, 8, {6, 0, 0xc9, 4}, false, true}, {60, 8, {6, 0, 1, 9}, false, true},
		{60, 8, {6, 0, 0, 0, 0, 0, 0, 1}, false, true}, {44, 8, {6, 0, 0, 1}, false, true},
		{60, 16, {44, 0, 1, 4, 0, 0, 0, 0, 6, 0, 0, 1}, false, true},
		{60, 8, {6, 9, 1, 4}, false, false}, {60, 8, {17, 0, 1, 4}, false, false}, {51, 8, {6, 0}, false, false},
		{0, 32, {60, 0, 1, 4, 0, 0, 0, 0, 60, 0, 1, 4, 0, 0, 0, 0, 60, 0, 1, 4, 0, 0, 0, 0, 6, 0, 1, 4}, false, false},
	};

	for (unsigned i = 0; getenv("WIRE_IPV6") && i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct vmh_tcp_conn *l, *c, *p;
		struct seen seen = {0};
		struct wire w;
		ssize_t n;

		open_and_tell(&w, &l, &c, &p, &seen);
		seen.payload = 1;
		n = extended(&w, p, &seen, cases[i].kind, cases[i].headers, cases[i].size);
		CHECK((n == 4) == cases[i].taken, "%u: %zd", i, n);
		CHECK(!!(vmh_tcp_poll(p) & VMH_TCP_FRAGMENTS) == cases[i].unfit, "%u", i);
		abort_pair(&w, l, c, p);
	}
}

/* As the kernel: no source route, and no broken options. */
static void test_options_of_ipv4(void)
{
	static const struct {
		uint8_t options[8];
		bool taken;
	} cases[] = {
		{{1, 1, 1, 0}, true}, {{148, 4, 0, 0}, true}, {{7, 7, 4, 0, 0, 0, 0, 0}, true}, {{0, 131, 1, 1}, true},
		{{131, 7, 4, 0, 0, 0, 0, 0}, false}, {{137, 7, 4, 0, 0, 0, 0, 0}, false}, {{7, 9}, false}, {{1, 1, 1, 1, 1, 1, 1, 7}, false},
		{{148, 1}, false}, {{148, 0}, false},
	};

	for (unsigned i = 0; !getenv("WIRE_IPV6") && i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct vmh_tcp_conn *l, *c, *p;
		struct seen seen = {0};
		uint8_t frame[300];
		struct wire w;
		uint32_t sum = 0;
		char buf[10];
		size_t len;
		ssize_t n;

		open_and_tell(&w, &l, &c, &p, &seen);
		len = wire_segment(&w, frame, 0, 4000, 80, seen.seq + 1, seen.ack, ACK | 8, 1000, NULL, 0, "data", 4);
		memmove(frame + 42, frame + 34, len - 34);
		memcpy(frame + 34, cases[i].options, 8);
		frame[14] = 0x47;
		frame[17] = (uint8_t)(frame[17] + 8);
		frame[24] = frame[25] = 0;
		for (unsigned at = 14; at < 42; at += 2)
			sum += (uint32_t)(frame[at] << 8 | frame[at + 1]);
		sum = ~((sum & 0xffff) + (sum >> 16));
		frame[24] = (uint8_t)(sum >> 8);
		frame[25] = (uint8_t)sum;
		wire_inject(&w, 1, frame, len + 8);
		n = wire_read(p, buf, sizeof(buf));
		CHECK((n == 4) == cases[i].taken, "%u: %zd", i, n);
		abort_pair(&w, l, c, p);
	}
}

static void test_reset_of_unread(void)
{
	struct vmh_tcp_conn *l, *c, *p;
	struct wire w;

	open_pair(&w, &l, &c, &p, NULL);
	wire_write(c, "unread", 6);
	wire_run(&w, NS);
	vmh_tcp_close(p);
	wire_run(&w, NS);
	CHECK(vmh_tcp_error(c) == ECONNRESET, "a close with unread bytes resets");
	p = NULL;
	vmh_tcp_close(c);
	c = wire_connect(&w, 4001, 80, NULL);
	wire_run(&w, NS);
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "accept");
	vmh_tcp_close(p);
	wire_run(&w, NS);
	CHECK(vmh_tcp_poll(c) & VMH_TCP_RDHUP && !(vmh_tcp_poll(c) & VMH_TCP_ERR), "an orderly end");
	CHECK(wire_write(c, "x", 1) == 1, "still takes a write");
	wire_run(&w, NS);
	CHECK(wire_write(c, "x", 1) == -EPIPE, "and then it has been told by a reset");
	vmh_tcp_close(c);
	vmh_tcp_close(l);
	wire_run(&w, 100 * NS);
	CHECK(stats(&w, 0).conns + stats(&w, 1).conns == 0, "left");
	wire_close(&w);
}

/* Data for a program that has shut both halves, or closed: a reset where the peer expects it, at once, also behind a hole
 * and with a FIN. What came before, and an ACK, are answered as ever. */
static void test_unwanted(void)
{
	static const struct {
		int at;
		uint8_t flags;
		bool close, resets;
	} cases[] = {{0, ACK, false, true}, {3, ACK, false, true},  {0, ACK | FIN, false, true}, {0, ACK, true, true},
		     {0, ACK | FIN, true, true}, {0, ACK | URG, false, true}, {0, ACK | URG, true, true},
		     {-5, ACK, false, false}, {100000, ACK, false, false}, {-5, ACK, true, false}};

	for (unsigned i = 0; i < sizeof(cases) / sizeof(cases[0]); i++)
		for (enum state state = CLOSED_FIRST; state <= HALF_CLOSED; state++) {
			struct vmh_tcp_conn *l, *p;
			struct seen seen = {0};
			struct wire w;
			uint32_t seq, ack;
			int err;

			p = bring(&w, &l, state, &seen, &seq, &ack);
			if (cases[i].close)
				vmh_tcp_close(p);
			else
				vmh_tcp_shutdown(p, SHUT_RD);
			seen = (struct seen){0};
			inject(&w, 4000, 80, seq + (uint32_t)cases[i].at, ack, cases[i].flags, "12345", 5);
			err = cases[i].close ? 0 : vmh_tcp_error(p);
			CHECK(!(seen.flags & RST) == !cases[i].resets && (!cases[i].resets || seen.seq == ack),
			      "%u: flags %x, at %d", i, seen.flags, (int)(seen.seq - ack));
			CHECK(cases[i].close || err == (cases[i].resets ? ECONNRESET : 0), "%u: error %d", i, err);
			CHECK(stats(&w, 1).conns == !cases[i].resets, "%u: %u left", i, stats(&w, 1).conns);
			if (!cases[i].resets)
				inject(&w, 4000, 80, seq, ack, RST, NULL, 0);
			if (!cases[i].close)
				vmh_tcp_close(p);
			vmh_tcp_close(l);
			wire_close(&w);
		}
}

/* One end has lost its connection and the other does not know: it learns of it when it sends, or when the name is used
 * again. */
static void test_half_open(void)
{
	struct vmh_tcp_conn *l, *c, *p, *again = NULL;
	struct seen seen = {0};
	struct wire w;

	open_pair(&w, &l, &c, &p, NULL);
	w.end[1].watch = mute;
	w.end[1].arg = &seen;
	vmh_tcp_abort(p);
	w.end[1].watch = NULL;
	wire_run(&w, 100 * NS);
	CHECK(vmh_tcp_error(c) == 0, "nobody has told it");
	wire_write(c, "x", 1);
	wire_run(&w, NS);
	CHECK(vmh_tcp_error(c) == ECONNRESET, "%d", vmh_tcp_error(c));
	vmh_tcp_close(c);

	c = wire_connect(&w, 4001, 80, NULL);
	wire_run(&w, NS);
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "accept");
	w.end[0].watch = mute;
	w.end[0].arg = &seen;
	vmh_tcp_abort(c);
	w.end[0].watch = NULL;
	c = wire_connect(&w, 4001, 80, NULL);
	wire_run(&w, 4 * NS); /* the SYN is answered by an ACK, that by a RST, and the next SYN is taken */
	CHECK(vmh_tcp_error(p) == ECONNRESET, "%d", vmh_tcp_error(p));
	CHECK(vmh_tcp_accept(l, NULL, &again) == 0 && wire_write(c, "new", 3) == 3, "not accepted");
	vmh_tcp_close(p);
	close_pair(&w, l, c, again);
}

/* The first `there` bytes of a segment of `len`. */
static void inject_cut(struct wire *w, uint16_t sport, uint32_t seq, uint32_t ack, size_t len, size_t there)
{
	static const uint8_t data[1400];
	uint8_t frame[1600];

	wire_segment(w, frame, 0, sport, 80, seq, ack, ACK, 1000, NULL, 0, data, len);
	wire_inject(w, 1, frame, wire_headers(frame) + there);
}

/* A segment as a fragment of it: the one at `offset` (in 8 bytes), with more behind it or not. Its length. */
static size_t fragment(uint8_t *frame, size_t len, uint16_t offset, bool more)
{
	uint8_t *ip = frame + 14;
	uint16_t place = (uint16_t)(offset | (more ? 0x2000 : 0)), payload;
	uint32_t sum;

	if (ip[0] >> 4 == 4) {
		sum = (uint32_t)((ip[10] << 8 | ip[11]) ^ 0xffff) + place;
		sum = (sum & 0xffff) + (sum >> 16);
		ip[10] = (uint8_t)(~sum >> 8);
		ip[11] = (uint8_t)~sum;
		ip[6] = (uint8_t)(place >> 8);
		ip[7] = (uint8_t)place;
		return len;
	}
	payload = htons((uint16_t)(len - 54 + 8));
	memmove(ip + 48, ip + 40, len - 54);
	memcpy(ip + 4, &payload, 2);
	memcpy(ip + 40, (const uint8_t[8]){6, 0, (uint8_t)(offset >> 5), (uint8_t)(offset << 3 | more), 0, 0, 0, 7}, 8);
	ip[6] = 44;
	return len + 8;
}

/* Of a segment in fragments the first one comes to a ring: the holder is told, and nothing is taken or answered. An IPv6
 * packet may have the header and be whole (RFC 6946). */
static void test_fragments(void)
{
	static const struct { int32_t at; uint16_t offset; bool more, known, last; } cases[] = {
		{0, 0, true, true, false}, {-1400, 0, true, true, false}, {-70000, 0, true, false, false},
		{0, 4, true, false, false}, {0, 4, false, false, false}, {0, 0, false, true, true},
	};
	static const uint8_t data[1400];

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct seen seen = {0};
		struct vmh_tcp_conn *l, *p;
		uint8_t frame[1600];
		struct wire w;
		uint32_t seq, ack;
		size_t len;

		p = bring(&w, &l, OPENED, &seen, &seq, &ack);
		seen.n = 0;
		len = wire_segment(&w, frame, 0, 4000, 80, seq + (uint32_t)cases[i].at, ack, ACK, 1000, NULL, 0, data,
				   sizeof(data));
		if (frame[14] >> 4 == 6 || !cases[i].last) {
			wire_inject(&w, 1, frame, fragment(frame, len, cases[i].offset, cases[i].more));
			CHECK(!(vmh_tcp_poll(p) & VMH_TCP_FRAGMENTS) == !cases[i].known, "%zu: %x", i, vmh_tcp_poll(p));
			CHECK(!(vmh_tcp_poll(p) & (VMH_TCP_LONG | VMH_TCP_IN)) && !seen.n, "%zu: %u", i, seen.n);
		}
		inject(&w, 4000, 80, seq, ack, ACK, "x", 1);
		CHECK(vmh_tcp_poll(p) & VMH_TCP_IN, "%zu: it goes on", i);
		vmh_tcp_close(p);
		vmh_tcp_close(l);
		wire_run(&w, 2000 * NS);
		wire_close(&w);
	}
}

/* Of what fits no ring the headers come: the holder is told, and nothing is taken or answered. */
static void test_cut(void)
{
	static const struct { int32_t at; size_t there; bool known; } cases[] = {
		{0, 20, true}, {0, 1000, true}, {-1400, 20, true}, {1400, 20, true},
		{-70000, 20, false}, {2000000, 20, false}, {0, 19, false}, {0, 0, false},
	};

	for (size_t i = 0; i < sizeof(cases) / sizeof(cases[0]); i++) {
		struct seen seen = {0};
		struct vmh_tcp_conn *l, *p;
		struct wire w;
		uint32_t seq, ack;
		uint64_t bad;

		p = bring(&w, &l, OPENED, &seen, &seq, &ack);
		seen.n = 0;
		bad = stats(&w, 1).bad;
		inject_cut(&w, 4001, seq, ack, 1400, 20);
		CHECK(!(vmh_tcp_poll(p) & VMH_TCP_LONG), "another's");
		inject_cut(&w, 4000, seq + (uint32_t)cases[i].at, ack, 1400, cases[i].there);
		CHECK(!(vmh_tcp_poll(p) & VMH_TCP_LONG) == !cases[i].known, "%zu: %x", i, vmh_tcp_poll(p));
		CHECK(stats(&w, 1).bad == bad + 1 + !cases[i].known && !seen.n, "%zu: %u", i, seen.n);
		inject(&w, 4000, 80, seq, ack, ACK, "x", 1);
		CHECK(vmh_tcp_poll(p) & VMH_TCP_IN, "%zu: it goes on", i);
		vmh_tcp_close(p);
		vmh_tcp_close(l);
		wire_run(&w, 2000 * NS);
		wire_close(&w);
	}
}

static void test_take_and_give(void)
{
	struct vmh_tcp_piece pieces[8];
	struct vmh_tcp_conn *l, *c, *p;
	struct wire w;
	int n;

	open_pair(&w, &l, &c, &p, NULL);
	wire_write(c, "zero", 4);
	wire_run(&w, 100000);
	n = vmh_tcp_take(p, pieces, 8);
	CHECK(n == 1 && pieces[0].len == 4 && !memcmp(pieces[0].data, "zero", 4), "%d", n);
	CHECK(stats(&w, 1).held == 1 && w.end[1].held_frames == 1, "it is the received frame itself");
	CHECK(vmh_tcp_take(p, pieces + 1, 7) == -EAGAIN, "no more");
	vmh_tcp_close(p);
	CHECK(!memcmp(pieces[0].data, "zero", 4), "ours beyond the close");
	vmh_tcp_give(w.end[1].t, pieces[0].handle);
	CHECK(w.end[1].held_frames == 0, "given back");
	vmh_tcp_close(c);
	vmh_tcp_close(l);
	wire_run(&w, 100 * NS);
	wire_close(&w);
}

/* Behind a hole, half of it beyond the window: with the hole filled the window is used up, and not without an end. */
static void test_beyond_the_window(void)
{
	for (int fin = 0; fin < 2; fin++) {
		struct wire w;
		struct seen seen = {0};
		struct vmh_tcp_conn *l, *c;
		struct vmh_tcp_info i;
		uint8_t data[1000] = "";
		uint32_t seq, ack, wnd, at;

		c = bring(&w, &l, OPENED, &seen, &seq, &ack);
		vmh_tcp_get_info(c, &i);
		wnd = i.pcb.rcv_wnd;
		inject(&w, 4000, 80, seq + wnd - 500, ack, fin ? ACK | FIN : ACK, data, fin ? 500 : 1000);
		for (at = 0; at < wnd; at += 1000)
			inject(&w, 4000, 80, seq + at, ack, ACK, data, wnd - at < 1000 ? wnd - at : 1000);
		vmh_tcp_get_info(c, &i);
		CHECK(i.pcb.rcv_wnd == 0 && i.pcb.rcv_nxt == seq + wnd && i.unread == wnd && i.state == 1,
		      "%u unread of %u, window %u, state %u", i.unread, wnd, i.pcb.rcv_wnd, i.state);
		vmh_tcp_abort(c);
		vmh_tcp_close(l);
		wire_close(&w);
	}
}

/* Of a former connection of that name, or old: far ahead, behind, or with an ACK of what was not sent. */
static void test_others_tell_no_window(void)
{
	static const int32_t away[] = {INT32_MAX / 2, -100000, 3000000};
	struct seen seen = {0};
	struct vmh_tcp_conn *l, *c;
	struct vmh_tcp_info i;
	uint8_t data[500] = "";
	uint32_t seq, ack;
	struct wire w;

	c = bring(&w, &l, OPENED, &seen, &seq, &ack);
	inject_window(&w, 5000, 4000, 80, seq, ack, ACK, NULL, 0);
	for (size_t k = 0; k < sizeof(away) / sizeof(*away); k++) {
		inject_window(&w, 0, 4000, 80, seq + (uint32_t)away[k], ack, ACK, NULL, 0);
		inject_window(&w, 0, 4000, 80, seq, ack + (uint32_t)away[k], ACK, NULL, 0);
		inject_window(&w, 0, 4000, 80, seq + (uint32_t)away[k], ack + (uint32_t)away[k], ACK, data, sizeof(data));
		wire_run(&w, 1000000000);
		vmh_tcp_get_info(c, &i);
		CHECK(i.snd_wnd == 5000 && i.state == 1, "%d away: window %u, state %u", away[k], i.snd_wnd, i.state);
	}
	inject_window(&w, 6000, 4000, 80, seq, ack, ACK, NULL, 0);
	CHECK(wire_write(c, data, sizeof(data)) == sizeof(data), "write");
	inject_window(&w, 7000, 4000, 80, seq, ack + sizeof(data), ACK, NULL, 0);
	vmh_tcp_get_info(c, &i);
	CHECK(i.snd_wnd == 7000 && i.unsent == 0 && i.pcb.first_unacked.len == 0, "window %u, %u unsent", i.snd_wnd, i.unsent);
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	wire_close(&w);
}

struct edge { /* what goes out, beside the peer's window */
	uint32_t una, end;
	unsigned acks, data, beyond;
	uint32_t highest;
};

static int look_at_edge(void *arg, const uint8_t *frame, size_t len)
{
	struct edge *e = arg;
	struct seen s = {0};

	look(&s, frame, len);
	*(s.payload ? &e->data : &e->acks) += 1;
	e->beyond += (int32_t)(s.seq + s.payload - e->end) > 0 && (s.seq != e->una || e->una != e->end);
	if ((int32_t)(s.seq + s.payload - e->highest) > 0)
		e->highest = s.seq + (uint32_t)s.payload;
	return 1;
}

/* A peer short of memory takes its window back and looks at nothing that goes beyond it, not even at the ACK. */
static void test_a_window_that_shrank(void)
{
	struct seen seen = {0};
	struct edge e = {0};
	struct vmh_tcp_conn *l, *c;
	struct vmh_tcp_info i;
	uint8_t data[5000] = "";
	uint32_t seq, ack;
	struct wire w;

	c = bring(&w, &l, OPENED, &seen, &seq, &ack);
	inject_window(&w, 5360, 4000, 80, seq, ack, ACK, NULL, 0);
	w.end[1].watch = look_at_edge;
	w.end[1].arg = &e;
	e.una = e.highest = ack;
	e.end = ack + 5360;
	CHECK(wire_write(c, data, sizeof(data)) == sizeof(data) && e.highest >= ack + 4000, "%u sent", e.highest - ack);
	e.una = ack += 536;
	e.end = ack + 300;
	e.acks = e.data = 0;
	inject_window(&w, 300, 4000, 80, seq, ack, ACK, NULL, 0);
	for (int k = 0; k < 2; k++, seq += 100)
		inject_window(&w, 300, 4000, 80, seq, ack, ACK, data, 100);
	wire_run(&w, 1000000000);
	CHECK(e.acks && e.data && !e.beyond, "%u ACKs, %u of data, %u beyond the window", e.acks, e.data, e.beyond);
	e.una = ack += 300; /* and with all of it taken it is shut */
	e.end = ack;
	e.acks = e.data = 0;
	for (int k = 0; k < 2; k++, seq += 100)
		inject_window(&w, 0, 4000, 80, seq, ack, ACK, data, 100);
	wire_run(&w, 1000000000);
	CHECK(e.acks && e.data && !e.beyond, "%u ACKs, %u probes, %u beyond the window", e.acks, e.data, e.beyond);
	vmh_tcp_get_info(c, &i);
	CHECK(i.snd_wnd == 0 && i.retries > 2, "window %u, %u retries", i.snd_wnd, i.retries);
	e.end = ack + 5000; /* it opens: all goes at once, in as many segments as the congestion window has */
	e.data = 0;
	inject_window(&w, 5000, 4000, 80, seq, ack, ACK, NULL, 0);
	CHECK(e.data, "nothing");
	while ((int32_t)(ack - e.highest) < 0) {
		ack = (int32_t)(ack + 500 - e.highest) < 0 ? ack + 500 : e.highest;
		inject_window(&w, 5000, 4000, 80, seq, ack, ACK, NULL, 0);
	}
	vmh_tcp_get_info(c, &i);
	CHECK(ack == e.una + sizeof(data) - 836 && i.unsent == 0 && i.pcb.first_unacked.len == 0,
	      "%u of %zu, %u unsent", ack - e.una, sizeof(data) - 836, i.unsent);
	vmh_tcp_abort(c);
	vmh_tcp_close(l);
	wire_close(&w);
}

int main(void)
{
	test_any_segment();
	test_guessed();
	test_overtaken_by_the_ack_of_our_end();
	test_an_end_in_a_syn();
	test_late_reset();
	test_time_wait_ends_by_a_reset();
	test_any_answer_to_a_syn();
	test_syn_flood();
	test_backlog();
	test_refused_and_timed_out();
	test_zero_window();
	test_time_of_a_shut_window();
	test_user_timeout_and_a_shut_window();
	test_ack_after_a_pause();
	test_keepalive_and_user_timeout();
	test_keepalive_that_is_changed();
	test_end_of_user_timeout();
	test_user_timeout_of_a_slow_reader();
	test_lone_segment();
	test_nagle_cork_quickack();
	test_the_rest_of_a_cork();
	test_no_keepalive_of_an_orphan();
	test_path_mtu();
	test_an_end_and_the_window();
	test_an_end_at_a_shut_window();
	test_a_window_that_comes_late();
	test_probes_have_the_time();
	test_an_orphan_at_a_shut_window();
	test_of_what_was_never_sent();
	test_another_syn();
	test_challenges_are_few();
	test_a_name_used_again();
	test_an_end_that_comes_again();
	test_paws_and_isn();
	test_extension_headers();
	test_options_of_ipv4();
	test_reset_of_unread();
	test_unwanted();
	test_half_open();
	test_cut();
	test_fragments();
	test_take_and_give();
	test_beyond_the_window();
	test_others_tell_no_window();
	test_a_window_that_shrank();
	return check_result();
}
