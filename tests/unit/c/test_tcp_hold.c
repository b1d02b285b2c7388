/* Received frames that stay in the ring's memory: who may hold how many, and that none is lost or held for ever. */
#include "tcp_wire.h"
#include "check.h"
#include "vmh_heap.h"
#include <sys/socket.h>

#define PERFECT &(struct wire_faults){.delay_ns = 10000}
#define MSS 1448u
#define MS 1000000u

struct pair {
	struct vmh_tcp_conn *from, *to;
	uint64_t written, read;
};

static struct vmh_tcp_stats stats(struct wire *w)
{
	struct vmh_tcp_stats s;

	vmh_tcp_get_stats(w->end[1].t, &s);
	return s;
}

static struct pair pair(struct wire *w, struct vmh_tcp_conn *l, uint16_t from)
{
	struct vmh_tcp_options o;
	struct pair p = {0};

	vmh_tcp_options_init(&o);
	o.nodelay = true;
	p.from = wire_connect(w, from, 80, &o);
	for (int i = 0; i < 40 && p.from && !p.to; i++) {
		wire_run(w, MS);
		vmh_tcp_accept(l, NULL, &p.to);
	}
	CHECK(p.to, "accept");
	return p;
}

static uint8_t byte_at(uint64_t i)
{
	return (uint8_t)(i * 2654435761u >> 16);
}

static void put(struct wire *w, struct pair *p, unsigned pieces, unsigned size)
{
	uint8_t data[MSS];

	for (unsigned n = 0; n < pieces; n++) {
		for (unsigned i = 0; i < size; i++)
			data[i] = byte_at(p->written + i);
		CHECK(wire_write(p->from, data, size) == (ssize_t)size, "write %u of %u", n, pieces);
		p->written += size;
		wire_run(w, 30000); /* each one a segment */
	}
}

/* `size` bytes at most, compared; 0: all that are there. */
static void get(struct pair *p, size_t size)
{
	static uint8_t buf[100000];
	size_t total = 0, bad = 0;
	ssize_t n = 1;

	while (n > 0 && (!size || total < size)) {
		n = wire_read(p->to, buf, size && size - total < sizeof(buf) ? size - total : sizeof(buf));
		for (ssize_t i = 0; i < n; i++)
			bad += buf[i] != byte_at(p->read + (uint64_t)i);
		if (n > 0) {
			p->read += (uint64_t)n;
			total += (size_t)n;
		}
	}
	CHECK(!bad, "%zu wrong bytes of %zu", bad, total);
	CHECK(size ? total == size : p->read == p->written, "%zu read, %ju of %ju", total, (uintmax_t)p->read,
	      (uintmax_t)p->written);
}

static void test_a_share_for_each(void)
{
	struct wire w;
	struct vmh_tcp_conn *l;
	struct pair idle, busy;
	struct vmh_tcp_stats before, after;

	wire_open_share(&w, PERFECT, 64, 16);
	l = wire_listen(&w, 80, 10, NULL);
	idle = pair(&w, l, 4000);
	busy = pair(&w, l, 4001);
	put(&w, &idle, 100, 1000);
	CHECK(w.end[1].held_frames == 16, "%u", w.end[1].held_frames);
	before = stats(&w);
	CHECK(before.kept == 16 && before.copied == 84 && w.end[1].copied == 84, "%ju kept, %ju copied",
	      (uintmax_t)before.kept, (uintmax_t)before.copied);
	for (int i = 0; i < 50; i++) {
		put(&w, &busy, 3, 1000);
		get(&busy, 0);
	}
	after = stats(&w);
	CHECK(after.kept - before.kept == 150 && after.copied == before.copied, "%ju kept, %ju copied",
	      (uintmax_t)(after.kept - before.kept), (uintmax_t)(after.copied - before.copied));
	get(&idle, 0);
	CHECK(w.end[1].held_frames == 0, "%u", w.end[1].held_frames);
	put(&w, &idle, 3, 1000);
	CHECK(stats(&w).kept == after.kept + 3, "who reads again holds again");
	vmh_tcp_abort(idle.to);
	CHECK(w.end[1].held_frames == 0, "%u after a reset", w.end[1].held_frames);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Many that do not read hold all there are. One that reads gets frames all the same. */
static void test_starvation(void)
{
	struct wire w;
	struct vmh_tcp_conn *l;
	struct pair idle[8], busy;
	uint64_t kept;

	wire_open_share(&w, PERFECT, 64, 16);
	l = wire_listen(&w, 80, 10, NULL);
	busy = pair(&w, l, 5000);
	for (unsigned i = 0; i < 8; i++) {
		idle[i] = pair(&w, l, (uint16_t)(4000 + i));
		put(&w, &idle[i], 40, 700 + i);
		get(&idle[i], 100 + i); /* some of the first frame */
		put(&w, &idle[i], 10, 33);
	}
	CHECK(w.end[1].held_frames <= 64, "%u", w.end[1].held_frames);
	kept = stats(&w).kept;
	for (int i = 0; i < 200; i++) {
		put(&w, &busy, 2, 900);
		get(&busy, 0);
		CHECK(w.end[1].held_frames <= 64, "%u", w.end[1].held_frames);
	}
	CHECK(stats(&w).kept - kept == 400, "%ju of 400 frames", (uintmax_t)(stats(&w).kept - kept));
	for (unsigned i = 0; i < 8; i++)
		get(&idle[i], 0);
	CHECK(w.end[1].held_frames == 0, "%u", w.end[1].held_frames);
	vmh_tcp_close(l);
	wire_close(&w);
}

static int lose_one(void *arg, const uint8_t *frame, size_t len)
{
	int *left = arg;

	(void)frame;
	return len > 1000 && (*left)-- == 0;
}

/* What comes out of order can't be copied later: half of the frames at most. */
static void test_out_of_order(void)
{
	int left = 2;
	struct wire w;
	struct vmh_tcp_conn *l;
	struct vmh_tcp_info info;
	struct pair b;

	wire_open_share(&w, &(struct wire_faults){.delay_ns = 5 * MS}, 32, 32);
	l = wire_listen(&w, 80, 10, NULL);
	b = pair(&w, l, 4001);
	for (int round = 0; round < 4; round++) { /* opens the congestion window */
		put(&w, &b, 30, 1000);
		wire_run(&w, 30 * MS);
		get(&b, 0);
	}
	w.end[0].watch = lose_one;
	w.end[0].arg = &left;
	put(&w, &b, 100, 1400);
	for (int i = 0; i < 40; i++) {
		wire_run(&w, MS / 4);
		CHECK(w.end[1].held_frames <= 17, "%u", w.end[1].held_frames);
	}
	wire_run(&w, 200 * MS);
	vmh_tcp_get_info(b.to, &info);
	CHECK(info.ooo_in > 20, "%u out of order", info.ooo_in);
	get(&b, 0);
	CHECK(w.end[1].held_frames == 0, "%u", w.end[1].held_frames);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* A backlog of single bytes costs about as much memory as bytes. */
static void test_small_pieces(void)
{
	struct wire w;
	struct vmh_tcp_conn *l;
	struct pair p;
	size_t before, after;

	wire_open_share(&w, PERFECT, 64, 16);
	l = wire_listen(&w, 80, 10, NULL);
	p = pair(&w, l, 4000);
	put(&w, &p, 4, 1400);
	put(&w, &p, 100, 1);
	before = vmh_heap_used();
	put(&w, &p, 20000, 1);
	after = vmh_heap_used();
	CHECK(after < before + 100000, "%zu bytes for 20000", after - before);
	get(&p, 5000);
	put(&w, &p, 300, 20);
	get(&p, 0);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* The ring goes: no frame is held any more, and what was not read can be read. */
static void test_let_go(void)
{
	struct wire w;
	struct vmh_tcp_conn *l;
	struct pair p, q, ended;
	struct vmh_tcp_piece piece;

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	p = pair(&w, l, 4000);
	q = pair(&w, l, 4001);
	put(&w, &p, 10, 1200);
	put(&w, &q, 10, 50);
	get(&p, 500);
	ended = pair(&w, l, 4002);
	put(&w, &ended, 10, 1200);
	vmh_tcp_shutdown(ended.from, SHUT_WR);
	wire_run(&w, 50 * MS);
	vmh_tcp_shutdown(ended.to, SHUT_WR);
	wire_run(&w, 50 * MS);
	CHECK(vmh_tcp_poll(ended.to) & VMH_TCP_HUP, "not ended");
	CHECK(w.end[1].held_frames == 30, "%u", w.end[1].held_frames);
	CHECK(vmh_tcp_take(p.to, &piece, 1) == 1 && piece.len == 700, "a piece");
	p.read += 700;
	vmh_tcp_let_go(w.end[1].t);
	CHECK(w.end[1].held_frames == 1, "%u but the piece", w.end[1].held_frames);
	vmh_tcp_give(w.end[1].t, piece.handle);
	CHECK(w.end[1].held_frames == 0, "%u", w.end[1].held_frames);
	get(&p, 0);
	get(&q, 0);
	get(&ended, 0);
	vmh_tcp_close(ended.to);
	vmh_tcp_close(ended.from);
	vmh_tcp_close(l);
	wire_close(&w);
}

/* Unread frames of one that leaves for another stack, is reset, or closed. */
static void test_ends(void)
{
	struct wire w;
	struct vmh_tcp_conn *l;
	struct pair p[4];

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	for (unsigned i = 0; i < 4; i++) {
		p[i] = pair(&w, l, (uint16_t)(4000 + i));
		put(&w, &p[i], 5, 1000);
	}
	CHECK(w.end[1].held_frames == 20, "%u", w.end[1].held_frames);
	CHECK(vmh_tcp_freeze(p[0].to) == 0, "freeze");
	vmh_tcp_forget(p[0].to);
	CHECK(w.end[1].held_frames == 15, "%u", w.end[1].held_frames);
	vmh_tcp_abort(p[1].to);
	CHECK(w.end[1].held_frames == 10, "%u", w.end[1].held_frames);
	vmh_tcp_close(p[2].to);
	CHECK(w.end[1].held_frames == 5, "%u", w.end[1].held_frames);
	vmh_tcp_close(l);
	wire_close(&w); /* and the last one's */
	CHECK(w.end[1].held_frames == 0, "%u", w.end[1].held_frames);
}

int main(void)
{
	test_a_share_for_each();
	test_starvation();
	test_out_of_order();
	test_small_pieces();
	test_let_go();
	test_ends();
	return check_result();
}
