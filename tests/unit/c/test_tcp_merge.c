/* Segments of one look at the ring that go through the stack as one (merge.c): which do, in which order they are seen, what
 * is acknowledged and counted; and that a connection ends up as it would with each segment by itself. Peers are made by
 * hand. */
#include "tcp_wire.h"
#include "check.h"
#include <sys/socket.h>

#define FIN 1
#define SYN 2
#define RST 4
#define PSH 8
#define ACK 16
#define URG 32
#define MS 1000000ul
#define SIZE 1440u /* of a segment */
#define RCVBUF 100000u

struct seen { /* of what the stack sends */
	unsigned acks;
	uint32_t seq, ack;
	uint8_t flags;
};

struct peer {
	struct wire *w;
	struct vmh_tcp_conn *c;
	struct seen *seen; /* of all connections */
	uint16_t port, wnd;
	uint32_t seq, ack, tsval;
	bool ts;
};

static int look(void *arg, const uint8_t *frame, size_t len)
{
	struct seen *s = arg;
	const uint8_t *tcp = frame + wire_headers(frame);

	memcpy(&s->seq, tcp + 4, 4);
	memcpy(&s->ack, tcp + 8, 4);
	s->seq = ntohl(s->seq);
	s->ack = ntohl(s->ack);
	s->flags = tcp[13];
	s->acks += tcp + (tcp[12] >> 4) * 4 == frame + len && !(tcp[13] & (SYN | FIN | RST));
	return 1;
}

static uint8_t byte_at(uint32_t i)
{
	return (uint8_t)(i * 2654435761u >> 16);
}

/* One more frame of a look, at `seq`. */
static void send_as(struct peer *p, uint32_t seq, uint32_t ack, uint8_t flags, uint16_t wnd, const void *options,
		    size_t options_len, size_t len)
{
	uint8_t frame[1600], data[1460];

	for (size_t i = 0; i < len; i++)
		data[i] = byte_at(seq + (uint32_t)i);
	wire_inject_more(p->w, 1, frame, wire_segment(p->w, frame, 0, p->port, 80, seq, ack, flags, wnd, options, options_len,
						      data, len));
}

static void send_at(struct peer *p, uint32_t seq, uint8_t flags, size_t len)
{
	uint8_t ts[12] = {1, 1, 8, 10, (uint8_t)(p->tsval >> 24), (uint8_t)(p->tsval >> 16), (uint8_t)(p->tsval >> 8),
			  (uint8_t)p->tsval};

	send_as(p, seq, p->ack, flags, p->wnd, ts, p->ts ? sizeof(ts) : 0, len);
}

static void send_next(struct peer *p, unsigned segments)
{
	for (unsigned i = 0; i < segments; i++, p->seq += SIZE)
		send_at(p, p->seq, ACK, SIZE);
}

static struct vmh_tcp_stats stats(struct peer *p)
{
	struct vmh_tcp_stats s;

	vmh_tcp_get_stats(p->w->end[1].t, &s);
	return s;
}

static struct vmh_tcp_info info(struct peer *p)
{
	struct vmh_tcp_info i;

	vmh_tcp_get_info(p->c, &i);
	return i;
}

static struct peer meet(struct wire *w, struct vmh_tcp_conn *l, struct seen *seen, uint16_t port, bool ts)
{
	static const uint8_t with[20] = {2, 4, 5, 0xb4, 4, 2, 8, 10, 0, 0, 0, 1, 0, 0, 0, 0, 1, 3, 3, 7};
	struct peer p = {.w = w, .seen = seen, .port = port, .seq = 1000, .wnd = 1000, .tsval = 1, .ts = ts};

	send_as(&p, 999, 0, SYN, 1000, with, ts ? sizeof(with) : 4, 0);
	wire_look(w, 1);
	p.ack = seen->seq + 1;
	send_at(&p, p.seq, ACK, 0);
	wire_look(w, 1);
	CHECK(vmh_tcp_accept(l, NULL, &p.c) == 0, "accept");
	return p;
}

static struct vmh_tcp_conn *open_wire(struct wire *w, struct seen *seen, unsigned hold, unsigned share)
{
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	o.rcvbuf = RCVBUF;
	wire_open_share(w, &(struct wire_faults){.delay_ns = 10000}, hold, share);
	*seen = (struct seen){0};
	w->end[1].watch = look;
	w->end[1].arg = seen;
	return wire_listen(w, 80, 10, &o);
}

/* All that is there; the bytes are right if they go on at `from`. */
static size_t take(struct peer *p, uint32_t from)
{
	static uint8_t buf[4096];
	size_t total = 0, bad = 0;
	ssize_t n;

	while ((n = wire_read(p->c, buf, sizeof(buf))) > 0)
		for (ssize_t i = 0; i < n; i++, total++)
			bad += buf[i] != byte_at(from + (uint32_t)total);
	CHECK(!bad, "%zu of %zu bytes are wrong", bad, total);
	return total;
}

/* So much has come that runs may be long. */
static void grow_up(struct peer *p)
{
	uint32_t from = p->seq, got = 0;

	while (got <= 2 * RCVBUF + SIZE) {
		send_next(p, 2);
		wire_look(p->w, 1);
		got += (uint32_t)take(p, from + got);
	}
}

static void part(struct vmh_tcp_conn *l, struct peer *p)
{
	if (p->c)
		vmh_tcp_abort(p->c);
	vmh_tcp_close(l);
	wire_close(p->w);
}

static void test_a_run(bool ts)
{
	struct wire w;
	struct seen seen;
	struct vmh_tcp_conn *l = open_wire(&w, &seen, 64, 0);
	struct peer p = meet(&w, l, &seen, 4000, ts);
	uint64_t merged;
	struct vmh_tcp_info was, is;
	struct vmh_tcp_stats before, after;

	CHECK(info(&p).timestamps == ts, "timestamps %d", ts);
	/* at the beginning an ACK for each two */
	seen.acks = 0;
	send_next(&p, 9);
	wire_look(&w, 1);
	CHECK(seen.acks == 4 && stats(&p).merged == 4, "%u ACKs, %ju merged", seen.acks, (uintmax_t)stats(&p).merged);
	send_next(&p, 2); /* one is owed an ACK */
	wire_look(&w, 1);
	CHECK(seen.acks == 5 && seen.ack == p.seq - SIZE && stats(&p).merged == 4, "%u ACKs, to %u of %u, %ju merged",
	      seen.acks, seen.ack, p.seq, (uintmax_t)stats(&p).merged);
	CHECK(take(&p, 1000) == 11 * SIZE, "all of it");
	grow_up(&p);
	merged = stats(&p).merged;
	seen.acks = 0;
	was = info(&p);
	before = stats(&p);
	send_next(&p, 12);
	send_at(&p, p.seq, ACK | PSH, 7);
	p.seq += 7;
	wire_look(&w, 1);
	is = info(&p);
	after = stats(&p);
	CHECK(after.merged == merged + 12, "%ju merged", (uintmax_t)(after.merged - merged));
	CHECK(seen.acks == 1 && seen.ack == p.seq, "%u ACKs, to %u of %u", seen.acks, seen.ack, p.seq);
	CHECK(is.segs_in - was.segs_in == 13 && is.data_segs_in - was.data_segs_in == 13 &&
	      is.bytes_received - was.bytes_received == 12 * SIZE + 7 && is.ooo_in == was.ooo_in, "%u, %u segments, %ju bytes",
	      is.segs_in - was.segs_in, is.data_segs_in - was.data_segs_in, (uintmax_t)(is.bytes_received - was.bytes_received));
	CHECK(after.in - before.in == 13 && after.kept - before.kept == 13 && w.end[1].held_frames == 13,
	      "%ju frames, %ju kept, %u held", (uintmax_t)(after.in - before.in), (uintmax_t)(after.kept - before.kept),
	      w.end[1].held_frames);
	CHECK(take(&p, p.seq - 12 * SIZE - 7) == 12 * SIZE + 7 && w.end[1].held_frames == 0, "%u held", w.end[1].held_frames);
	/* each later timestamp begins a run */
	send_next(&p, 2);
	p.tsval++;
	send_next(&p, 2);
	wire_look(&w, 1);
	CHECK(stats(&p).merged == after.merged + (ts ? 2 : 3), "%ju merged", (uintmax_t)(stats(&p).merged - after.merged));
	/* after a pause an ACK for each two, as at the beginning */
	wire_run(&w, 20 * MS);
	seen.acks = 0;
	send_next(&p, 8);
	wire_look(&w, 1);
	CHECK(seen.acks == 4, "%u ACKs after a pause", seen.acks);
	part(l, &p);
}

/* Two segments, the second of which is different: both are taken, not as one. */
static void test_what_is_not_merged(void)
{
	static const uint8_t later[12] = {1, 1, 8, 10, 0, 0, 0, 2}, sack[12] = {1, 1, 5, 10, 0, 0, 0, 1, 0, 0, 0, 2};
	static const struct {
		const char *what;
		uint32_t skip;
		uint16_t wnd;
		uint8_t flags, bad;
		const uint8_t *options;
		bool refused; /* not taken at all */
	} others[] = {
		{"same", 0, 1000, ACK, 0, NULL, false},
		{"a hole before", 1, 1000, ACK, 0, NULL, true},
		{"another window", 0, 999, ACK, 0, NULL, false},
		{"CWR", 0, 1000, ACK | 0x80, 0, NULL, false},
		{"timestamps", 0, 1000, ACK, 0, later, false},
		{"SACK", 0, 1000, ACK, 0, sack, false},
		{"SYN", 0, 1000, ACK | SYN, 0, NULL, true},
		{"urgent", 0, 1000, ACK | URG, 0, NULL, true},
		{"no ACK", 0, 1000, PSH, 0, NULL, true},
		{"FIN", 0, 1000, ACK | FIN, 0, NULL, false},
		{"broken", 0, 1000, ACK, 1, NULL, true},
	};

	for (size_t i = 0; i < sizeof(others) / sizeof(others[0]); i++) {
		struct wire w;
		struct seen seen;
		struct vmh_tcp_conn *l = open_wire(&w, &seen, 64, 0);
		struct peer p = meet(&w, l, &seen, 4000, false);
		uint8_t frame[1600], data[SIZE];
		size_t len;

		send_next(&p, 1);
		for (size_t k = 0; k < SIZE; k++)
			data[k] = byte_at(p.seq + others[i].skip + (uint32_t)k);
		len = wire_segment(&w, frame, 0, p.port, 80, p.seq + others[i].skip, p.ack, others[i].flags, others[i].wnd,
				   others[i].options, others[i].options ? 12 : 0, data, SIZE);
		frame[len - 1] ^= others[i].bad;
		wire_inject_more(&w, 1, frame, len);
		wire_look(&w, 1);
		CHECK(stats(&p).merged == !i, "%s: %ju merged", others[i].what, (uintmax_t)stats(&p).merged);
		len = take(&p, 1000);
		CHECK(len == (others[i].refused ? SIZE : 2 * SIZE), "%s: %zu bytes", others[i].what,
		      len);
		CHECK(stats(&p).bad == others[i].bad, "%s: %ju bad", others[i].what, (uintmax_t)stats(&p).bad);
		part(l, &p);
	}
}

static void test_the_order_of_segments(void)
{
	struct wire w;
	struct seen seen;
	struct vmh_tcp_conn *l = open_wire(&w, &seen, 64, 0);
	struct peer p = meet(&w, l, &seen, 4000, false), q = meet(&w, l, &seen, 4001, false), r;
	char byte;

	grow_up(&p);
	/* the reset comes behind the data, and is the last thing that is seen */
	send_next(&p, 3);
	send_at(&p, p.seq, RST | ACK, 0);
	send_next(&p, 1);
	wire_look(&w, 1);
	CHECK(info(&p).state == 7 && take(&p, p.seq - 4 * SIZE) == 3 * SIZE, "state %u", info(&p).state);
	CHECK(wire_read(p.c, &byte, 1) == 0 || vmh_tcp_error(p.c) == 0, "told");
	vmh_tcp_close(p.c);
	/* data, FIN, in one look */
	send_next(&q, 3);
	send_at(&q, q.seq, FIN | ACK | PSH, 10);
	wire_look(&w, 1);
	CHECK(take(&q, 1000) == 3 * SIZE + 10 && wire_read(q.c, &byte, 1) == 0 && info(&q).state == 8, "state %u",
	      info(&q).state);
	/* a connection of nobody is reset by its data, and its struct freed, in the middle of a look */
	r = meet(&w, l, &seen, 4002, false);
	vmh_tcp_close(r.c);
	r.c = NULL;
	send_next(&r, 2);
	send_at(&r, r.seq + 5, ACK, 10);
	send_next(&r, 2);
	wire_look(&w, 1);
	CHECK(seen.flags & RST, "%x", seen.flags);
	vmh_tcp_abort(q.c);
	part(l, &r);
}

/* Of four connections whose segments alternate as many are merged as there may be; wire.streams says 3. */
static void test_streams(void)
{
	struct wire w;
	struct seen seen;
	struct vmh_tcp_conn *l = open_wire(&w, &seen, 64, 0);
	struct peer p[4];

	for (unsigned i = 0; i < 4; i++)
		p[i] = meet(&w, l, &seen, (uint16_t)(4000 + i), false);
	for (unsigned i = 0; i < 4; i++)
		grow_up(&p[i]);
	for (unsigned i = 0; i < 4; i++)
		take(&p[i], p[i].seq);
	uint64_t merged = stats(&p[0]).merged;
	for (unsigned i = 0; i < 20; i++)
		send_next(&p[i % 4], 1);
	wire_look(&w, 1);
	CHECK(stats(&p[0]).merged - merged == 3 * 4, "%ju merged", (uintmax_t)(stats(&p[0]).merged - merged));
	for (unsigned i = 0; i < 4; i++)
		CHECK(take(&p[i], p[i].seq - 5 * SIZE) == 5 * SIZE, "of %u", i);
	for (unsigned i = 1; i < 4; i++)
		vmh_tcp_abort(p[i].c);
	part(l, &p[0]);
	/* 0 switches it off */
	l = open_wire(&w, &seen, 64, 0);
	vmh_tcp_close(l);
	wire_close(&w);
	setenv("WIRE_STREAMS", "0", 1);
	l = open_wire(&w, &seen, 64, 0);
	p[0] = meet(&w, l, &seen, 4000, false);
	unsetenv("WIRE_STREAMS");
	send_next(&p[0], 10);
	wire_look(&w, 1);
	CHECK(stats(&p[0]).merged == 0 && take(&p[0], 1000) == 10 * SIZE, "switched off");
	part(l, &p[0]);
}

static void test_quick_acks_and_holes(void)
{
	struct wire w;
	struct seen seen;
	struct vmh_tcp_conn *l = open_wire(&w, &seen, 64, 0);
	struct peer p = meet(&w, l, &seen, 4000, false);
	struct vmh_tcp_options o;
	uint64_t merged;

	grow_up(&p);
	merged = stats(&p).merged;
	seen.acks = 0;
	send_at(&p, p.seq + 8 * SIZE, ACK, SIZE); /* each that follows fills a part of the hole */
	send_next(&p, 4);
	wire_look(&w, 1);
	CHECK(stats(&p).merged == merged && seen.acks >= 3, "%u ACKs", seen.acks);
	send_next(&p, 4);
	wire_look(&w, 1);
	p.seq += SIZE;
	CHECK(seen.ack == p.seq && take(&p, p.seq - 9 * SIZE) == 9 * SIZE, "%u of %u", seen.ack, p.seq);
	vmh_tcp_get_options(p.c, &o);
	o.quickack = true;
	vmh_tcp_set_options(p.c, &o);
	seen.acks = 0;
	send_next(&p, 6);
	wire_look(&w, 1);
	CHECK(seen.acks == 6 && stats(&p).merged == merged, "%u quick ACKs", seen.acks);
	part(l, &p);
}

/* A run takes no more frames than one after the other would, and no more bytes than the window has. */
static void test_limits(void)
{
	struct wire w;
	struct seen seen;
	struct vmh_tcp_conn *l = open_wire(&w, &seen, 32, 8);
	struct peer p = meet(&w, l, &seen, 4000, false);
	struct vmh_tcp_stats before, after;

	grow_up(&p);
	before = stats(&p);
	send_next(&p, 20);
	wire_look(&w, 1);
	after = stats(&p);
	CHECK(after.merged - before.merged == 19 && after.held == 8 && w.end[1].held_frames == 8 &&
	      after.copied - before.copied == 12, "%ju merged, %u and %u held, %ju copied",
	      (uintmax_t)(after.merged - before.merged), after.held, w.end[1].held_frames,
	      (uintmax_t)(after.copied - before.copied));
	CHECK(take(&p, p.seq - 20 * SIZE) == 20 * SIZE, "all");
	for (unsigned i = 0; i < 4; i++) {
		send_next(&p, 30);
		wire_look(&w, 1);
	}
	CHECK(take(&p, p.seq - 120 * SIZE) == 0xffff && info(&p).pcb.rcv_nxt == p.seq - 120 * SIZE + 0xffff, "%u of 65535",
	      info(&p).pcb.rcv_nxt - (p.seq - 120 * SIZE));
	part(l, &p);
}

/* ---- by itself or merged: the same comes of it ---- */

static uint64_t chance = 88172645463325252u;

static unsigned roll(unsigned n)
{
	chance ^= chance << 13;
	chance ^= chance >> 7;
	chance ^= chance << 17;
	return (unsigned)(chance >> 20) % n;
}

/* Something for both peers, which are at one place of their streams. */
static void do_something(struct peer p[2])
{
	static const uint16_t sizes[] = {1, 50, 1000, 1448, 1448, 1448};
	unsigned what = roll(30), size = sizes[roll(6)], old = 1 + roll(4000), ahead = 1 + roll(4000);
	uint8_t flags = (uint8_t)(ACK | (roll(4) ? 0 : PSH));

	for (int i = 0; i < 2; i++) {
		if (what < 22) {
			send_at(&p[i], p[i].seq, flags, size);
			p[i].seq += size;
		} else if (what == 22) {
			send_at(&p[i], p[i].seq + ahead, flags, size);
		} else if (what == 23) {
			send_at(&p[i], p[i].seq - old, flags, size);
		} else if (what == 24) {
			send_at(&p[i], p[i].seq, flags, 0);
		} else if (what == 25) {
			p[i].wnd = (uint16_t)(500 + old);
		} else if (what == 26) {
			p[i].tsval += 1;
		} else if (what == 27) {
			p[i].seq += ahead % 3 * 1448; /* lost, until it goes back */
		} else if (what == 28) {
			p[i].seq = info(&p[i]).pcb.rcv_nxt;
		} else {
			p[i].ack = p[i].seen->seq; /* what the program wrote is acknowledged, perhaps */
		}
	}
}

static bool same(struct peer p[2])
{
	struct vmh_tcp_info a = info(&p[0]), b = info(&p[1]);

	return a.state == b.state && a.pcb.rcv_nxt == b.pcb.rcv_nxt && a.segs_in == b.segs_in &&
	       a.data_segs_in == b.data_segs_in && a.bytes_received == b.bytes_received && a.unread == b.unread &&
	       a.snd_wnd == b.snd_wnd && a.ooo_in == b.ooo_in && a.unacked == b.unacked && a.unsent == b.unsent &&
	       vmh_tcp_poll(p[0].c) == vmh_tcp_poll(p[1].c);
}

static void test_the_same_comes_of_it(bool ts, unsigned hold)
{
	struct wire w[2];
	struct seen seen[2];
	struct vmh_tcp_conn *l[2];
	struct peer p[2];
	uint32_t at[2] = {1000, 1000};
	size_t got[2];

	for (int i = 0; i < 2; i++) {
		setenv("WIRE_STREAMS", i ? "3" : "0", 1);
		l[i] = open_wire(&w[i], &seen[i], hold, 0);
		p[i] = meet(&w[i], l[i], &seen[i], 4000, ts);
	}
	unsetenv("WIRE_STREAMS");
	for (unsigned round = 0; round < 4000; round++) {
		for (unsigned n = roll(30); n; n--)
			do_something(p);
		for (int i = 0; i < 2; i++)
			if (w[i].nopen)
				wire_look(&w[i], 1);
		if (!roll(3))
			for (int i = 0; i < 2; i++) {
				got[i] = take(&p[i], at[i]);
				at[i] += (uint32_t)got[i];
				if (round % 5 == 0)
					wire_write(p[i].c, "answer", 6);
			}
		wire_run(&w[0], round % 7 * 100000);
		wire_run(&w[1], round % 7 * 100000);
		CHECK(same(p) && at[0] == at[1], "round %u: %u and %u read", round, at[0], at[1]);
		if (failures)
			return;
	}
	for (int i = 0; i < 2; i++) {
		p[i].seq = info(&p[i]).pcb.rcv_nxt;
		take(&p[i], at[i]);
		wire_run(&w[i], 100 * MS);
	}
	CHECK(seen[0].ack == seen[1].ack && seen[1].ack == p[1].seq, "%u and %u acknowledged of %u", seen[0].ack, seen[1].ack,
	      p[1].seq);
	CHECK(stats(&p[0]).merged == 0 && stats(&p[1]).merged > 1000, "%ju merged", (uintmax_t)stats(&p[1]).merged);
	CHECK(seen[1].acks <= seen[0].acks, "%u and %u ACKs", seen[0].acks, seen[1].acks);
	for (int i = 0; i < 2; i++)
		part(l[i], &p[i]);
}

int main(void)
{
	test_a_run(false);
	test_a_run(true);
	test_what_is_not_merged();
	test_the_order_of_segments();
	test_streams();
	test_quick_acks_and_holes();
	test_limits();
	test_the_same_comes_of_it(false, 64);
	test_the_same_comes_of_it(true, 64);
	test_the_same_comes_of_it(true, 0);
	return check_result();
}
