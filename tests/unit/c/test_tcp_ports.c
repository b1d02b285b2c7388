/* What the shim needs of the stack for connections that begin on it: names that are used again, ports that nobody has,
 * closed connections that go elsewhere, and what still comes for those that went. */
#include "tcp_wire.h"
#include "check.h"
#include "tcp_state.h"
#include <sys/socket.h>

#define PERFECT &(struct wire_faults){.delay_ns = 10000}
#define MS 1000000ull

struct seen {
	uint32_t syn_seq, last_end;
	unsigned syns, resets, frames;
};

static int watch(void *arg, const uint8_t *frame, size_t len)
{
	struct seen *s = arg;
	const uint8_t *tcp = frame + wire_headers(frame);
	uint32_t seq;

	memcpy(&seq, tcp + 4, 4);
	seq = ntohl(seq);
	s->frames++;
	s->resets += (tcp[13] & 4) != 0;
	if (tcp[13] & 2) {
		s->syns++;
		s->syn_seq = seq;
	}
	s->last_end = seq + (uint32_t)(len - wire_headers(frame) - (size_t)(tcp[12] >> 4) * 4);
	return 0;
}

static struct vmh_tcp_conn *open_pair(struct wire *w, uint16_t from, struct vmh_tcp_conn *l, struct vmh_tcp_conn **s)
{
	struct vmh_tcp_conn *c = wire_connect(w, from, 80, NULL);

	wire_run(w, MS);
	CHECK(vmh_tcp_accept(l, NULL, s) == 0, "accept");
	return c;
}

/* Who has opened it may use the name again at once, beyond what it has sent: also where the other one closes first, which
 * has it in TIME_WAIT then. */
static void test_a_name_used_again(bool other_first)
{
	struct seen seen = {0};
	struct vmh_tcp_conn *l, *c, *s;
	struct vmh_tcp_stats st;
	static char data[50000];
	struct wire w;
	uint32_t end;

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	w.end[0].watch = watch;
	w.end[0].arg = &seen;
	for (int i = 0; i < 20; i++) {
		end = seen.last_end;
		c = open_pair(&w, 4000, l, &s);
		CHECK(!i || (int32_t)(seen.syn_seq - end) >= 65535, "%u after %u", seen.syn_seq, end);
		CHECK(wire_write(c, data, sizeof(data)) == (ssize_t)sizeof(data), "write");
		wire_run(&w, 60 * MS); /* the last bytes may wait for a delayed ACK */
		CHECK(wire_read(s, data, sizeof(data)) == (ssize_t)sizeof(data), "read");
		vmh_tcp_close(other_first ? s : c);
		wire_run(&w, MS);
		vmh_tcp_close(other_first ? c : s);
		wire_run(&w, MS);
		vmh_tcp_get_stats(w.end[other_first].t, &st);
		CHECK(st.conns == 0 && st.time_wait == 1, "%u %u", st.conns, st.time_wait);
	}
	CHECK(seen.syns == 20 && seen.resets == 0, "%u %u", seen.syns, seen.resets);
	vmh_tcp_close(l);
	wire_close(&w);
}

static void test_refused(void)
{
	uint8_t frame[100];
	struct vmh_tcp_conn *c;
	struct wire w;
	size_t len;

	wire_open(&w, PERFECT, 64);
	c = wire_connect(&w, 4000, 81, NULL);
	len = wire_segment(&w, frame, 0, htons(4000), htons(81), 1, 0, 2, 1000, NULL, 0, NULL, 0);
	vmh_tcp_refuse(w.end[1].t, frame, len);
	CHECK(w.end[1].sent == 1, "%lu", w.end[1].sent);
	len = wire_segment(&w, frame, 0, htons(4000), htons(81), 1, 0, 4, 1000, NULL, 0, NULL, 0);
	vmh_tcp_refuse(w.end[1].t, frame, len);
	CHECK(w.end[1].sent == 1, "a reset is not answered");
	vmh_tcp_refuse(w.end[1].t, frame, 20);
	vmh_tcp_abort(c);
	wire_close(&w);
}

/* A connection that was closed with bytes on the way becomes another's, and is forgotten without a word. */
static void test_an_orphan_goes_elsewhere(void)
{
	struct seen seen = {0};
	struct vmh_tcp_conn *l, *c, *s, *o = NULL;
	struct vmh_tcp_stats st;
	static char data[3000], blob[4000];
	struct wire w;
	uint64_t left;
	unsigned before;

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	c = open_pair(&w, 4000, l, &s);
	CHECK(vmh_tcp_port_users(w.end[0].t, htons(4000)) == 1 && vmh_tcp_port_users(w.end[1].t, htons(80)) == 1, "users");
	CHECK(vmh_tcp_reclaim(w.end[0].t, NULL, &o) == -ENOENT, "nobody has closed");
	wire_write(c, data, sizeof(data));
	vmh_tcp_close(c);
	CHECK(vmh_tcp_closing(w.end[0].t, &left) == 1 && left == 3001, "%lu with the FIN", left);
	CHECK(vmh_tcp_reclaim(w.end[0].t, NULL, &o) == 0 && o == c, "reclaim");
	CHECK(vmh_tcp_closing(w.end[0].t, &left) == 0 && left == 0, "it has a holder again");
	CHECK(vmh_tcp_freeze(o) == 0, "freeze");
	CHECK(vmh_tcp_export(o, blob, sizeof(blob)) == 200 + 3000, "%zd", vmh_tcp_export(o, NULL, 0));
	vmh_tcp_forget(o);
	vmh_tcp_get_stats(w.end[0].t, &st);
	CHECK(st.conns == 0, "%u", st.conns);
	w.end[0].watch = watch;
	w.end[0].arg = &seen;
	before = (unsigned)w.end[0].sent;
	wire_write(s, "still here", 10);
	wire_run(&w, 20 * MS);
	CHECK(w.end[0].sent == before && seen.resets == 0, "what comes late is not answered");
	CHECK(vmh_tcp_connect(w.end[0].t, &(struct vmh_tcp_addr){w.end[0].addr, w.end[1].addr, htons(4000), htons(80)},
			      &(struct vmh_tcp_path){.mtu = 1500}, &(struct vmh_tcp_options){0}, NULL, &o) == -EADDRNOTAVAIL,
	      "its name is taken");
	vmh_tcp_abort(s);
	vmh_tcp_close(l);
	wire_run(&w, MS);
	wire_close(&w);
}

/* What is remembered of a connection that lives elsewhere ends when it is back. */
static void test_back_again(void)
{
	struct vmh_tcp_conn *l, *c, *s, *again = NULL;
	struct vmh_tcp_path path = wire_path(0);
	struct vmh_tcp_stats st;
	static char blob[4000];
	struct wire w;
	ssize_t len;

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	c = open_pair(&w, 4000, l, &s);
	CHECK(vmh_tcp_freeze(c) == 0, "freeze");
	len = vmh_tcp_export(c, blob, sizeof(blob));
	vmh_tcp_forget(c);
	CHECK(vmh_tcp_import(w.end[0].t, blob, (size_t)len, &path, NULL, &again) == 0, "import");
	vmh_tcp_get_stats(w.end[0].t, &st);
	CHECK(st.conns == 1 && st.time_wait == 0, "%u %u", st.conns, st.time_wait);
	vmh_tcp_thaw(again);
	vmh_tcp_abort(again);
	wire_run(&w, MS);
	vmh_tcp_abort(s);
	c = open_pair(&w, 4000, l, &s);
	vmh_tcp_abort(c);
	vmh_tcp_abort(s);
	vmh_tcp_close(l);
	wire_run(&w, MS);
	wire_close(&w);
}

/* The peer has closed first: its FIN is told, and ours goes with the data or waits behind it. */
static void test_an_orphan_of_a_peer_that_closed(void)
{
	static char data[300000], blob[310000];
	struct vmh_tcp_conn *l, *c, *s, *o = NULL;
	struct vmh_tcp_state state;
	struct wire w;
	uint64_t left;

	for (int sent = 0; sent < 2; sent++) {
		size_t len = sent ? 100 : sizeof(data);

		wire_open(&w, PERFECT, 64);
		l = wire_listen(&w, 80, 10, NULL);
		c = open_pair(&w, 4000, l, &s);
		vmh_tcp_shutdown(s, SHUT_WR);
		wire_run(&w, 60 * MS);
		CHECK(wire_write(c, data, len) == (ssize_t)len, "write");
		vmh_tcp_close(c);
		CHECK(vmh_tcp_closing(w.end[0].t, &left) == 1 && left >= len, "%lu", left);
		CHECK(vmh_tcp_reclaim(w.end[0].t, NULL, &o) == 0 && o == c && vmh_tcp_freeze(o) == 0, "reclaim");
		CHECK(vmh_tcp_export(o, blob, sizeof(blob)) == (ssize_t)(sizeof(state) + len), "export");
		memcpy(&state, blob, sizeof(state));
		CHECK((state.flags & 0xf0) == (VMH_TCP_F_PEER_FIN | VMH_TCP_F_FIN_WANTED | (sent ? VMH_TCP_F_FIN_SENT : 0)), "%x",
		      state.flags);
		vmh_tcp_forget(o);
		vmh_tcp_abort(s);
		vmh_tcp_close(l);
		wire_run(&w, MS);
		wire_close(&w);
	}
}

static void test_a_smaller_backlog(void)
{
	struct vmh_tcp_conn *l, *c[4], *s;
	struct wire w;
	int n = 0;

	wire_open(&w, PERFECT, 64);
	l = wire_listen(&w, 80, 10, NULL);
	vmh_tcp_set_backlog(l, 1);
	for (int i = 0; i < 4; i++) {
		c[i] = wire_connect(&w, (uint16_t)(4000 + i), 80, NULL);
		wire_run(&w, MS);
	}
	while (vmh_tcp_accept(l, NULL, &s) == 0) {
		n++;
		vmh_tcp_abort(s);
	}
	CHECK(n == 2, "%d, one more than it says", n);
	for (int i = 0; i < 4; i++)
		vmh_tcp_abort(c[i]);
	vmh_tcp_close(l);
	wire_run(&w, MS);
	wire_close(&w);
}

int main(void)
{
	test_a_name_used_again(false);
	test_a_name_used_again(true);
	test_refused();
	test_an_orphan_goes_elsewhere();
	test_back_again();
	test_an_orphan_of_a_peer_that_closed();
	test_a_smaller_backlog();
	return check_result();
}
