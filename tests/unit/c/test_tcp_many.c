/* A hundred thousand connections opened, used and closed: nothing is left, and a lookup among many costs no more. */
#include "tcp_wire.h"
#include "check.h"
#include "vmh_heap.h"
#include <sys/socket.h>
#include <time.h>

#define NS 1000000000ul
#define AT_ONCE 1000

static double cpu(void)
{
	struct timespec t;

	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &t);
	return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static unsigned connections(struct wire *w)
{
	struct vmh_tcp_stats a, b;

	vmh_tcp_get_stats(w->end[0].t, &a);
	vmh_tcp_get_stats(w->end[1].t, &b);
	return a.conns + b.conns;
}

static void round_of(struct wire *w, struct vmh_tcp_conn *l, unsigned first_port, unsigned round)
{
	static struct vmh_tcp_conn *c[AT_ONCE], *p[AT_ONCE];
	char buf[100];
	int n = 0;

	for (int i = 0; i < AT_ONCE; i++) {
		c[i] = wire_connect(w, (uint16_t)(first_port + (unsigned)i), 80, NULL);
		CHECK(c[i], "connect %d of round %u", i, round);
	}
	wire_run(w, 1000000);
	while (n < AT_ONCE && vmh_tcp_accept(l, NULL, &p[n]) == 0)
		n++;
	CHECK(n == AT_ONCE, "%d accepted", n);
	for (int i = 0; i < AT_ONCE; i++)
		CHECK(wire_write(c[i], "request", 7) == 7, "write");
	wire_run(w, 1000000);
	for (int i = 0; i < n; i++) {
		CHECK(wire_read(p[i], buf, sizeof(buf)) == 7, "read");
		CHECK(wire_write(p[i], "reply", 5) == 5, "write");
		if (i % 2)
			vmh_tcp_close(p[i]);
	}
	wire_run(w, 1000000);
	for (int i = 0; i < AT_ONCE; i++) {
		CHECK(wire_read(c[i], buf, sizeof(buf)) == 5, "read");
		if (i % 10 == 3)
			vmh_tcp_abort(c[i]);
		else
			vmh_tcp_close(c[i]);
	}
	for (int i = 0; i < n; i += 2)
		vmh_tcp_close(p[i]);
	wire_run(w, 100000000);
}

static void test_open_and_close(unsigned total)
{
	struct vmh_tcp_conn *l;
	size_t before = 0, after;
	struct wire w;
	double start;

	wire_open(&w, &(struct wire_faults){.delay_ns = 10000}, 256);
	l = wire_listen(&w, 80, 4096, NULL);
	start = cpu();
	for (unsigned i = 0; i < total / AT_ONCE; i++) {
		round_of(&w, l, 1000 + i % 60 * AT_ONCE, i);
		if (i % 20 == 19) {
			wire_run(&w, 62 * NS); /* TIME_WAIT ends */
			CHECK(connections(&w) == 0, "%u are left", connections(&w));
			after = vmh_heap_used();
			if (before)
				CHECK(after <= before + 65536, "%zu bytes more after %u connections",
				      after - before, i * AT_ONCE);
			else
				before = after;
		}
	}
	printf("%u connections, %.1f us of CPU each, both ends\n", total, (cpu() - start) / total * 1e6);
	vmh_tcp_close(l);
	wire_close(&w);
}

static void talk(struct wire *w, struct vmh_tcp_conn **c, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		CHECK(wire_write(c[i], "x", 1) == 1, "write");
	wire_run(w, NS);
}

/* Who has said nothing for a while gets no frames for what it may send. */
static void test_talkers(void)
{
	struct vmh_tcp_conn *l, *c[100], *p;
	struct wire w;

	wire_open(&w, &(struct wire_faults){.delay_ns = 10000}, 256);
	l = wire_listen(&w, 80, 4096, NULL);
	for (unsigned i = 0; i < 100; i++)
		c[i] = wire_connect(&w, (uint16_t)(1000 + i), 80, NULL);
	wire_run(&w, NS);
	while (vmh_tcp_accept(l, NULL, &p) == 0)
		;
	CHECK(w.end[0].talkers == 100 && w.end[1].talkers == 100, "%u, %u", w.end[0].talkers, w.end[1].talkers);
	for (uint64_t ns = 0; ns <= 2 * VMH_TCP_LATELY_NS + NS; ns += NS)
		talk(&w, c, 3);
	CHECK(w.end[1].talkers == 3, "%u of 3", w.end[1].talkers);
	talk(&w, c, 50);
	CHECK(w.end[1].talkers == 50, "%u of 50", w.end[1].talkers);
	for (uint64_t ns = 0; ns < VMH_TCP_LATELY_NS - 2 * NS; ns += NS)
		talk(&w, c, 3);
	CHECK(w.end[1].talkers == 50, "%u of 50, lately", w.end[1].talkers);
	wire_run(&w, 5 * VMH_TCP_LATELY_NS);
	talk(&w, c, 2);
	CHECK(w.end[1].talkers == 2, "%u of 2 after a pause", w.end[1].talkers);
	wire_close(&w);
}

/* A request and reply on one connection, beside `idle` others. */
static double round_trip(unsigned idle)
{
	struct vmh_tcp_conn *l, *c = NULL, *p = NULL, *other;
	const unsigned rounds = 2000;
	struct wire w;
	double start;
	char buf[64];

	wire_open(&w, &(struct wire_faults){.delay_ns = 10000}, 256);
	l = wire_listen(&w, 80, 4096, NULL);
	for (unsigned i = 0; i <= idle; i++) {
		if (i % 1000 == 999)
			wire_run(&w, 1000000);
		other = wire_connect(&w, (uint16_t)(1000 + i), 80, NULL);
		c = c ? c : other;
		while (vmh_tcp_accept(l, NULL, &other) == 0)
			p = p ? p : other;
	}
	wire_run(&w, NS);
	while (vmh_tcp_accept(l, NULL, &other) == 0)
		p = p ? p : other;
	CHECK(connections(&w) == 2 * (idle + 1), "%u", connections(&w));
	start = cpu();
	for (unsigned i = 0; i < rounds; i++) {
		wire_write(c, buf, 64);
		wire_run(&w, 15000);
		CHECK(wire_read(p, buf, 64) == 64, "read");
		wire_write(p, buf, 64);
		wire_run(&w, 15000);
		CHECK(wire_read(c, buf, 64) == 64, "read");
	}
	start = (cpu() - start) / rounds * 1e6;
	wire_close(&w); /* takes the connections along */
	return start;
}

int main(int argc, char **argv)
{
	double alone, among;

	test_open_and_close(argc > 1 ? (unsigned)atoi(argv[1]) : 100000);
	if (argc > 2)
		return check_result();
	test_talkers();
	alone = round_trip(0);
	among = round_trip(20000);
	printf("a round trip: %.2f us of CPU alone, %.2f us beside 20000 idle connections\n", alone, among);
	CHECK(among < 3 * alone + 1, "%.2f and %.2f us", alone, among);
	return check_result();
}
