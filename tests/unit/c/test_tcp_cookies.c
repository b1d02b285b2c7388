/* SYN cookies: who gets a connection by one, with which options, and who does not. Ports from FLOOD on are of nobody. */
#include "tcp_wire.h"
#include "check.h"
#include <sys/socket.h>

#define FIN 1
#define SYN 2
#define RST 4
#define PSH 8
#define ACK 16
#define NS 1000000000ul
#define MS 1000000ul
#define FLOOD 10000
#define HALF_OPEN 128

static const struct wire_faults perfect = {.delay_ns = 20000};

struct seen { /* the last frame of end 1 to a port below FLOOD */
	unsigned n, flooded;
	uint8_t tcp[60];
	uint32_t seq, ack;
	uint8_t flags, ttl;
	bool mute;
};

static uint32_t get32(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static int look(void *arg, const uint8_t *frame, size_t len)
{
	const uint8_t *tcp = frame + wire_headers(frame);
	struct seen *s = arg;

	if ((tcp[2] << 8 | tcp[3]) >= FLOOD) {
		s->flooded++;
		return 1;
	}
	s->n++;
	memset(s->tcp, 0, sizeof(s->tcp));
	memcpy(s->tcp, tcp, len - wire_headers(frame) < 60 ? len - wire_headers(frame) : 60);
	s->seq = get32(tcp + 4);
	s->ack = get32(tcp + 8);
	s->flags = tcp[13];
	s->ttl = frame[frame[12] == 8 ? 22 : 21];
	return s->mute;
}

static struct vmh_tcp_stats stats(struct wire *w)
{
	struct vmh_tcp_stats s;

	vmh_tcp_get_stats(w->end[1].t, &s);
	return s;
}

/* The option of that kind in the last frame, NULL: none. */
static const uint8_t *option(const struct seen *s, uint8_t kind)
{
	for (unsigned i = 20; i < (unsigned)(s->tcp[12] >> 4) * 4 && s->tcp[i]; i += s->tcp[i] == 1 ? 1 : s->tcp[i + 1])
		if (s->tcp[i] == kind)
			return s->tcp + i;
	return NULL;
}

static void segment(struct wire *w, uint16_t port, uint32_t seq, uint32_t ack, uint8_t flags, const void *options, size_t options_len,
		    const char *data)
{
	uint8_t frame[1600];

	wire_inject(w, 1, frame,
		    wire_segment(w, frame, 0, port, 80, seq, ack, flags, 1000, options, options_len, data, strlen(data)));
}

static void flood(struct wire *w, unsigned n)
{
	static unsigned next;

	for (unsigned i = 0; i < n; i++)
		segment(w, (uint16_t)(FLOOD + next++ % 55000), i, 0, SYN, NULL, 0, "");
}

/* A listener with `backlog` in the middle of a flood; `mute`: what end 1 says is seen, and lost. */
static struct vmh_tcp_conn *flooded(struct wire *w, struct seen *seen, unsigned backlog, const struct vmh_tcp_options *o, bool mute)
{
	struct vmh_tcp_conn *l;

	memset(seen, 0, sizeof(*seen));
	seen->mute = mute;
	wire_open(w, &perfect, 16);
	w->end[1].watch = look;
	w->end[1].arg = seen;
	l = wire_listen(w, 80, backlog, o);
	flood(w, HALF_OPEN);
	return l;
}

static void finish(struct wire *w, struct vmh_tcp_conn *l, struct vmh_tcp_conn *p)
{
	if (p)
		vmh_tcp_close(p);
	wire_run(w, 300 * NS);
	CHECK(stats(w).conns == 0, "%u left", stats(w).conns);
	vmh_tcp_close(l);
	wire_close(w);
}

static void test_flood(void)
{
	struct vmh_tcp_conn *l, *c[20], *p;
	struct seen seen;
	struct wire w;
	char buf[10];
	unsigned n = 0;

	l = flooded(&w, &seen, 100, NULL, false);
	for (int i = 0; i < 20; i++) {
		struct vmh_tcp_info info;

		flood(&w, 2500);
		c[i] = wire_connect(&w, (uint16_t)(4000 + i), 80, NULL);
		wire_run(&w, MS);
		CHECK(vmh_tcp_poll(c[i]) & VMH_TCP_OUT, "client %d waits", i);
		if (vmh_tcp_accept(l, NULL, &p))
			continue;
		n++;
		vmh_tcp_get_info(p, &info);
		CHECK(info.timestamps && info.sack && info.wscale && info.snd_wscale == 7 && !info.rtt_us, "%d %d %d %d, %u us",
		      info.timestamps, info.sack, info.wscale, info.snd_wscale, info.rtt_us);
		CHECK(wire_write(c[i], "question", 8) == 8 && wire_write(p, "answer", 6) == 6, "write");
		wire_run(&w, 100 * MS);
		CHECK(wire_read(c[i], buf, 10) == 6 && wire_read(p, buf, 10) == 8, "read");
		vmh_tcp_close(c[i]);
		vmh_tcp_close(p);
	}
	CHECK(n == 20, "%u of 20", n);
	CHECK(stats(&w).cookies_sent == 50020 && stats(&w).cookies_taken == 20 && !stats(&w).cookies_failed, "%lu %lu %lu",
	      stats(&w).cookies_sent, stats(&w).cookies_taken, stats(&w).cookies_failed);
	wire_run(&w, NS);
	/* one for each SYN, and one more for those that are half open for a second */
	CHECK(stats(&w).conns <= HALF_OPEN && seen.flooded <= 50000 + 3 * HALF_OPEN, "%u, %u", stats(&w).conns, seen.flooded);
	finish(&w, l, NULL);
}

/* The stream is as long as it takes for windows, losses and both ends to matter. */
static void test_streams(bool timestamps)
{
	struct wire_faults bad = {.loss = 0.03, .reorder = 0.05, .reorder_ns = 100000, .duplicate = 0.02, .delay_ns = 100000};
	struct stream both[2] = {{.total = 3000000}, {.total = 3000000}};
	struct vmh_tcp_conn *l, *c, *p = NULL;
	struct vmh_tcp_options o;
	struct vmh_tcp_info info;
	struct seen seen;
	struct wire w;

	vmh_tcp_options_init(&o);
	o.syn_cookies = 2;
	o.no_timestamps = !timestamps;
	l = flooded(&w, &seen, 10, &o, false);
	wire_faults(&w, &bad);
	c = wire_connect(&w, 4000, 80, &o);
	both[0].from = both[1].to = c;
	for (int i = 0; i < 20000 && vmh_tcp_accept(l, NULL, &p); i++) {
		stream_pump(&both[0]); /* if the answer to the cookie is lost, its data tells */
		wire_run(&w, MS);
	}
	CHECK(p, "no connection");
	if (p) {
		both[0].to = both[1].from = p;
		vmh_tcp_get_info(p, &info);
		CHECK(stream_run(&w, both, 2, 600 * NS), "not at the end");
		CHECK(!both[0].bad && !both[1].bad && both[0].read == 3000000 && both[1].read == 3000000, "%lu %lu", both[0].read,
		      both[1].read);
		CHECK(info.sack == timestamps && info.wscale == timestamps && info.timestamps == timestamps, "%d %d %d", info.sack,
		      info.wscale, info.timestamps);
	}
	vmh_tcp_close(c);
	finish(&w, l, p);
}

/* Options as they were offered, from what the ACK brings back. */
static void test_options(void)
{
	static const struct {
		uint8_t syn[24], len;
		uint16_t mss4, mss6;
		bool ts, sack, wscale;
		uint8_t scale;
	} cases[] = {
		{{0}, 0, 536, 1220, false, false, false, 0},
		{{2, 4, 5, 0xb4}, 4, 1460, 1440, false, false, false, 0},
		{{2, 4, 5, 0xb3, 1, 3, 3, 9, 1, 1, 4, 2}, 12, 1440, 1440, false, false, false, 0},
		{{2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0, 1, 3, 3, 9}, 20, 1460, 1440, true, true, true, 9},
		{{2, 4, 5, 0x20, 1, 1, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0, 1, 3, 3, 0}, 20, 1300, 1220, true, false, true, 0},
		{{2, 4, 0x23, 0, 4, 2, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0}, 16, 1460, 1440, true, true, false, 0},
		{{2, 4, 2, 0, 4, 2, 8, 10, 0, 0, 1, 0, 0, 0, 0, 0, 1, 3, 3, 14}, 20, 536, 1220, true, true, true, 14},
	};

	for (unsigned i = 0; i < sizeof(cases) / sizeof(*cases) * 70; i++) {
		unsigned n = i / 70;
		uint8_t stamps[12] = {1, 1, 8, 10, 0, 0, 1, 1};
		struct vmh_tcp_conn *l, *p = NULL;
		struct vmh_tcp_info info;
		const uint8_t *ts, *mss;
		struct seen seen;
		struct wire w;
		uint16_t wanted = getenv("WIRE_IPV6") ? cases[n].mss6 : cases[n].mss4;

		l = flooded(&w, &seen, 10, NULL, true);
		w.now += i % 70 * MS; /* all places of the clock's low bits */
		segment(&w, 4000, 99, 0, SYN, cases[n].syn, cases[n].len, "");
		mss = option(&seen, 2);
		ts = option(&seen, 8);
		CHECK(seen.flags == (SYN | ACK) && seen.ack == 100 && stats(&w).cookies_sent == 1, "%x", seen.flags);
		CHECK(mss && (mss[2] << 8 | mss[3]) == (getenv("WIRE_IPV6") ? 1440 : 1460), "MSS");
		CHECK(!ts == !cases[n].ts && !option(&seen, 4) == !cases[n].sack && !option(&seen, 3) == !cases[n].wscale, "case %u", n);
		CHECK(!ts || get32(ts + 6) == 256, "echo %u", get32(ts + 6));
		if (ts)
			memcpy(stamps + 8, ts + 2, 4);
		segment(&w, 4000, 100, seen.seq + 1, ACK, stamps, ts ? 12 : 0, "");
		CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "case %u", n);
		if (p) {
			vmh_tcp_get_info(p, &info);
			CHECK(info.snd_mss + (info.timestamps ? 12 : 0) == wanted, "case %u: %u", n, info.snd_mss);
			CHECK(info.timestamps == cases[n].ts && info.sack == cases[n].sack && info.wscale == cases[n].wscale &&
			      info.snd_wscale == cases[n].scale && info.snd_wnd == 1000u << cases[n].scale,
			      "case %u: %d %d %d %d %u", n, info.timestamps, info.sack, info.wscale, info.snd_wscale, info.snd_wnd);
			CHECK(wire_write(p, "x", 1) == 1, "write");
			CHECK(!ts || (int32_t)(get32(option(&seen, 8) + 2) - get32(stamps + 8)) >= 0, "the clock went back");
			vmh_tcp_abort(p);
		}
		finish(&w, l, NULL);
	}
}

static uint32_t cookie_for(struct wire *w, struct seen *seen, uint16_t port, uint32_t seq)
{
	segment(w, port, seq, 0, SYN, NULL, 0, "");
	CHECK(seen->flags == (SYN | ACK) && seen->ack == seq + 1, "%x", seen->flags);
	return seen->seq;
}

static void test_data_with_the_answer(void)
{
	struct vmh_tcp_conn *l, *p = NULL;
	struct seen seen;
	struct wire w;
	uint32_t isn;
	char buf[20];

	for (int fin = 0; fin < 2; fin++) {
		l = flooded(&w, &seen, 10, NULL, true);
		isn = cookie_for(&w, &seen, 4000, 0xffffffff);
		segment(&w, 4000, 0, isn + 1, ACK | PSH | (fin ? FIN : 0), NULL, 0, "a question");
		CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "no connection");
		CHECK(wire_read(p, buf, sizeof(buf)) == 10 && !memcmp(buf, "a question", 10), "data");
		CHECK(wire_read(p, buf, sizeof(buf)) == (fin ? 0 : -EAGAIN), "the end");
		segment(&w, 4000, 0, isn + 1, ACK | PSH | (fin ? FIN : 0), NULL, 0, "a question"); /* again: nothing new */
		CHECK(wire_read(p, buf, sizeof(buf)) == (fin ? 0 : -EAGAIN), "the end");
		CHECK(vmh_tcp_accept(l, NULL, &p) == -EAGAIN && stats(&w).cookies_taken == 1, "a second one");
		CHECK(stats(&w).conns == HALF_OPEN + 1, "%u", stats(&w).conns);
		CHECK(wire_write(p, "answer", 6) == 6 && seen.seq == isn + 1 && seen.ack == 10 + (uint32_t)fin, "answer");
		vmh_tcp_abort(p);
		finish(&w, l, NULL);
	}
}

/* Nobody gets in: what is tried, and whether the listener has sent cookies before. */
static void refused(const char *what, bool sent, uint16_t port, uint32_t seq, uint32_t change, uint64_t wait_ns, uint8_t flags)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen;
	struct wire w;
	uint32_t isn;
	unsigned before, resets = flags & RST ? 0 : 1;

	l = flooded(&w, &seen, 10, NULL, true);
	isn = cookie_for(&w, &seen, 4000, 99);
	wire_run(&w, wait_ns);
	before = seen.n;
	segment(&w, port, seq, (isn ^ change) + 1, flags, NULL, 0, "");
	CHECK(vmh_tcp_accept(l, NULL, &p) == -EAGAIN, "%s", what);
	CHECK(stats(&w).cookies_taken == 0 && stats(&w).cookies_failed == (sent && resets), "%s: %lu %lu", what,
	      stats(&w).cookies_taken, stats(&w).cookies_failed);
	CHECK(seen.n == before + resets && (!resets || seen.flags & RST), "%s: %u, %x", what, seen.n - before, seen.flags);
	finish(&w, l, NULL);
}

static void test_refused(void)
{
	refused("another port", true, 4001, 100, 0, 0, ACK);
	refused("another number", true, 4000, 101, 0, 0, ACK);
	for (int bit = 0; bit < 32; bit++)
		refused("another cookie", true, 4000, 100, 1u << bit, 0, ACK);
	refused("expired", false, 4000, 100, 0, 121 * NS, ACK);
	refused("a reset", false, 4000, 100, 0, 0, ACK | RST);
}

/* Good for one minute at least, two at most; looked at for two after the last one was sent. */
static void test_age(void)
{
	for (unsigned start = 0; start < 120; start += 17)
		for (unsigned age = 1; age < 200; age += 29) {
			struct vmh_tcp_conn *l, *p = NULL;
			struct seen seen;
			struct wire w;
			uint32_t isn;
			int rc;

			l = flooded(&w, &seen, 10, NULL, true);
			vmh_tcp_close(l);
			w.now += start * NS;
			l = wire_listen(&w, 80, 10, NULL);
			flood(&w, HALF_OPEN);
			isn = cookie_for(&w, &seen, 4000, 99);
			for (unsigned i = 0; i < age; i++) { /* the flood goes on */
				wire_run(&w, NS);
				flood(&w, 2 * HALF_OPEN);
			}
			segment(&w, 4000, 100, isn + 1, ACK, NULL, 0, "");
			rc = vmh_tcp_accept(l, NULL, &p);
			CHECK(age >= 60 || rc == 0, "refused after %u s", age);
			CHECK(age <= 120 || rc == -EAGAIN, "taken after %u s", age);
			if (p)
				vmh_tcp_abort(p);
			finish(&w, l, NULL);
		}
}

/* Without a flood nobody looks, and who looks for a cookie of before finds none. */
static void test_no_flood(void)
{
	struct vmh_tcp_conn *l, *p;
	struct seen seen = {.mute = true};
	struct wire w;
	uint32_t isn;

	l = flooded(&w, &seen, 10, NULL, true);
	isn = cookie_for(&w, &seen, 4000, 99);
	vmh_tcp_close(l);
	l = wire_listen(&w, 80, 10, NULL); /* another one: it has sent none */
	segment(&w, 4000, 100, isn + 1, ACK, NULL, 0, "");
	CHECK(vmh_tcp_accept(l, NULL, &p) == -EAGAIN && seen.flags & RST, "%x", seen.flags);
	CHECK(stats(&w).cookies_taken + stats(&w).cookies_failed == 0, "looked at");
	finish(&w, l, NULL);
}

static void test_a_full_queue(void)
{
	struct vmh_tcp_conn *l, *p[5];
	struct seen seen;
	struct wire w;
	uint32_t isn[5];
	unsigned n;
	char buf[9];

	l = flooded(&w, &seen, 2, NULL, true);
	for (uint16_t i = 0; i < 5; i++)
		isn[i] = cookie_for(&w, &seen, (uint16_t)(4000 + i), 99);
	n = seen.n;
	for (uint16_t i = 0; i < 5; i++)
		segment(&w, (uint16_t)(4000 + i), 100, isn[i] + 1, ACK, NULL, 0, "");
	CHECK(seen.n == n, "an answer: %x", seen.flags);
	CHECK(stats(&w).cookies_taken == 5 && stats(&w).accept_dropped == 2, "%lu", stats(&w).accept_dropped);
	segment(&w, 4010, 99, 0, SYN, NULL, 0, "");
	CHECK(seen.n == n && stats(&w).syn_dropped == 1, "a SYN is answered while nobody accepts");
	for (n = 0; n < 5 && vmh_tcp_accept(l, NULL, &p[n]) == 0; n++)
		;
	CHECK(n == 3, "%u", n);
	segment(&w, 4003, 100, isn[3] + 1, ACK | PSH, NULL, 0, "question"); /* the client's data, again and again */
	CHECK(vmh_tcp_accept(l, NULL, &p[3]) == 0 && wire_read(p[3], buf, 9) == 8, "room again");
	for (int i = 0; i < 4; i++)
		vmh_tcp_abort(p[i]);
	finish(&w, l, NULL);
}

/* The name's last connection is in TIME_WAIT: its answer does not make another one. */
static void test_replay(void)
{
	struct vmh_tcp_conn *l, *p = NULL;
	struct seen seen;
	struct wire w;
	uint32_t isn;

	l = flooded(&w, &seen, 10, NULL, true);
	isn = cookie_for(&w, &seen, 4000, 99);
	for (int i = 0; i < 3; i++)
		segment(&w, 4000, 100, isn + 1, ACK, NULL, 0, "");
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "no connection");
	vmh_tcp_close(p);
	segment(&w, 4000, 100, isn + 2, ACK | FIN, NULL, 0, "");
	CHECK(stats(&w).time_wait == 1, "TIME_WAIT");
	segment(&w, 4000, 100, isn + 1, ACK, NULL, 0, "");
	CHECK(vmh_tcp_accept(l, NULL, &p) == -EAGAIN && stats(&w).cookies_taken == 1, "another one");
	finish(&w, l, NULL);
}

/* The SYN comes a second time, when there is room, and both answers arrive. */
static void test_two_answers(void)
{
	for (int first = 0; first < 2; first++) {
		struct vmh_tcp_conn *l, *p = NULL;
		struct seen seen;
		struct wire w;
		uint32_t isn[2];
		unsigned n;
		char buf[9];

		l = flooded(&w, &seen, 10, NULL, true);
		isn[1] = cookie_for(&w, &seen, 4000, 99);
		wire_run(&w, 4 * NS);
		isn[0] = cookie_for(&w, &seen, 4000, 99);
		CHECK(isn[0] != isn[1] && stats(&w).cookies_sent == 1, "half open");
		n = seen.n;
		segment(&w, 4000, 100, isn[first] + 2, ACK, NULL, 0, "");
		CHECK(seen.n == n + 1 && seen.flags & RST && vmh_tcp_accept(l, NULL, &p) == -EAGAIN, "neither");
		segment(&w, 4000, 100, isn[first] + 1, ACK | PSH, NULL, 0, "question");
		CHECK(vmh_tcp_accept(l, NULL, &p) == 0 && wire_read(p, buf, 9) == 8, "answer %d", first);
		CHECK(stats(&w).conns == HALF_OPEN && stats(&w).cookies_taken == (unsigned)first, "%u", stats(&w).conns);
		if (p)
			vmh_tcp_abort(p);
		finish(&w, l, NULL);
	}
}

static void test_settings(void)
{
	struct vmh_tcp_conn *l, *p;
	struct vmh_tcp_options o;
	struct seen seen;
	struct wire w;
	uint32_t isn;

	vmh_tcp_options_init(&o);
	o.syn_cookies = 0;
	l = flooded(&w, &seen, 10, &o, true);
	segment(&w, 4000, 99, 0, SYN, NULL, 0, "");
	CHECK(seen.n == 0 && stats(&w).cookies_sent == 0, "off: %u", seen.n);
	CHECK(stats(&w).conns == 11 && stats(&w).syn_dropped == HALF_OPEN - 11 + 1, "as many as the backlog, and one");
	finish(&w, l, NULL);
	o.syn_cookies = 2;
	l = flooded(&w, &seen, 10, &o, true);
	CHECK(stats(&w).cookies_sent == HALF_OPEN && stats(&w).conns == 0, "always");
	isn = cookie_for(&w, &seen, 4000, 99);
	segment(&w, 4000, 100, isn + 1, ACK, NULL, 0, "");
	CHECK(vmh_tcp_accept(l, NULL, &p) == 0, "always");
	vmh_tcp_abort(p);
	finish(&w, l, NULL);
	o.syn_cookies = 1;
	o.syn_rate = HALF_OPEN + 2;
	o.mss_max = 1000;
	o.rcvbuf = 5000;
	o.ttl = o.hops = 9;
	l = flooded(&w, &seen, 10, &o, true);
	for (uint16_t i = 0; i < 10; i++)
		segment(&w, (uint16_t)(4000 + i), 99, 0, SYN, NULL, 0, "");
	CHECK(stats(&w).cookies_sent == 2 && stats(&w).syn_dropped == 8, "they count for the rate: %lu", stats(&w).cookies_sent);
	CHECK(option(&seen, 2) && (option(&seen, 2)[2] << 8 | option(&seen, 2)[3]) == 1000, "MSS");
	CHECK((seen.tcp[14] << 8 | seen.tcp[15]) == 5000 && seen.ttl == 9, "window, TTL");
	finish(&w, l, NULL);
	o.syn_rate = 0;
	o.no_timestamps = o.no_wscale = true;
	l = flooded(&w, &seen, 10, &o, true);
	segment(&w, 4000, 99, 0, SYN, "\2\4\5\264\4\2\10\12\0\0\0\1\0\0\0\0\1\3\3\7", 20, "");
	CHECK(option(&seen, 4) && option(&seen, 8) && !option(&seen, 3), "timestamps, which SACK needs, but no scale");
	finish(&w, l, NULL);
}

int main(void)
{
	test_flood();
	test_streams(true);
	test_streams(false);
	test_options();
	test_data_with_the_answer();
	test_refused();
	test_age();
	test_no_flood();
	test_a_full_queue();
	test_replay();
	test_two_answers();
	test_settings();
	return check_result();
}
