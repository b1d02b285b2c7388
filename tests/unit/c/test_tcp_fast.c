/* Requests and answers of all kinds between two stacks, written down: every frame, and what each connection knows after each
 * step, with numbers from where its stream begins. The same must come out with header prediction and without. Its name and
 * how much of it was predicted go first, so that they can be left out. */
#include "tcp_wire.h"
#include <sys/socket.h>

#define CASES 120
#define STEPS 400

struct seen {
	uint32_t seq, ts;
	bool known;
};

static struct wire w;
static struct seen isn[2]; /* of each end, from its SYN */

static uint32_t get32(const uint8_t *p)
{
	return (uint32_t)p[0] << 24 | (uint32_t)p[1] << 16 | (uint32_t)p[2] << 8 | p[3];
}

static uint64_t hash_of(const uint8_t *p, size_t len)
{
	uint64_t h = 14695981039346656037u;

	for (size_t i = 0; i < len; i++)
		h = (h ^ p[i]) * 1099511628211u;
	return h;
}

static void show_options(const uint8_t *tcp, size_t header, int from)
{
	for (size_t i = 20; i < header && tcp[i]; i += tcp[i] == 1 ? 1 : tcp[i + 1]) {
		if (tcp[i] == 8) {
			if (tcp[13] & 2)
				isn[from].ts = get32(tcp + i + 2);
			printf(" ts %u %u", get32(tcp + i + 2) - isn[from].ts,
			       tcp[13] & 16 ? get32(tcp + i + 6) - isn[!from].ts : 0);
		} else if (tcp[i] == 5) {
			for (size_t at = i + 2; at < i + tcp[i + 1]; at += 4)
				printf(" sack %u", get32(tcp + at) - isn[!from].seq);
		} else {
			printf(" option %u", tcp[i]);
		}
	}
}

static int show_frame(void *arg, const uint8_t *frame, size_t len)
{
	int from = (int)((struct wire_end *)arg - w.end);
	size_t at = wire_headers(frame), header = (size_t)(frame[at + 12] >> 4) * 4;
	const uint8_t *tcp = frame + at;

	if (tcp[13] & 2)
		isn[from] = (struct seen){ .seq = get32(tcp + 4), .known = true };
	printf("%lu: %d len %zu ttl %u flags %02x seq %u ack %u wnd %02x%02x", (unsigned long)w.now, from, len,
	       frame[22], tcp[13], get32(tcp + 4) - isn[from].seq,
	       tcp[13] & 16 ? get32(tcp + 8) - isn[!from].seq : 0, tcp[14], tcp[15]);
	show_options(tcp, header, from);
	printf(" data %016lx\n", (unsigned long)hash_of(tcp + header, len - at - header));
	return 0;
}

static void show_span(const struct vmh_tcp_span *s, uint32_t base)
{
	printf(" %u+%u%s", s->len || s->fin ? s->seq - base : 0, s->len, s->fin ? "F" : "");
}

static void show_state(struct vmh_tcp_conn *c, int end)
{
	uint32_t mine = isn[end].seq, its = isn[!end].seq;
	struct vmh_tcp_info i;
	const struct vmh_tcp_pcb_info *p = &i.pcb;

	vmh_tcp_get_info(c, &i);
	printf("%d state %u events %x cwnd %u ssthresh %u rto %u rtt %u unread %u sent %u flags %x rcv %u+%u edge %u nxt %u "
	       "wl %u %u max %u lastack %u spans", end, i.state, vmh_tcp_poll(c), i.cwnd, i.ssthresh, i.rto_us, i.rtt_us,
	       i.unread, i.data_segs_out, p->flags, p->rcv_nxt - its, p->rcv_wnd, p->right_edge - its, p->snd_nxt - mine,
	       p->snd_wl1 - its, p->snd_wl2 - mine, p->snd_wnd_max, p->lastack - mine);
	show_span(&p->first_unsent, mine);
	show_span(&p->last_unsent, mine);
	show_span(&p->first_unacked, mine);
	show_span(&p->last_unacked, mine);
	putchar('\n');
}

static unsigned below(unsigned n)
{
	return (unsigned)(wire_random(&w) * n);
}

static struct vmh_tcp_options some_options(void)
{
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	o.nodelay = below(2);
	o.quickack = below(5) == 0;
	o.no_timestamps = below(2);
	o.no_sack = below(4) == 0;
	o.no_wscale = below(4) == 0;
	o.cc = (uint8_t)below(3);
	o.sndbuf = below(3) ? o.sndbuf : 3000 + below(9000);
	o.rcvbuf = below(3) ? o.rcvbuf : 2500 + below(9000);
	o.segs_max = below(4) ? 0 : 2 + below(4);
	o.keepalive = below(3) == 0;
	o.keep_idle_s = 1;
	return o;
}

static struct wire_faults some_faults(unsigned kind)
{
	struct wire_faults f = { .delay_ns = 2000 + below(200000) };

	if (kind % 4 == 1)
		f.loss = 0.03;
	if (kind % 4 == 2)
		f = (struct wire_faults){ .delay_ns = f.delay_ns, .loss = 0.01, .duplicate = 0.05, .reorder = 0.05, .reorder_ns = 300000 };
	if (kind % 8 == 3)
		f.full = 0.1;
	return f;
}

/* A message of one end, often short. */
static void say(struct vmh_tcp_conn *c, unsigned step)
{
	static uint8_t data[20000];
	size_t len = below(8) ? 1 + below(300) : 1 + below(below(4) ? 1600 : (unsigned)sizeof(data));
	struct iovec v[2] = { { data, len }, { data, below(50) } };
	bool more = below(12) == 0;
	ssize_t rc;

	for (size_t i = 0; i < len; i++)
		data[i] = (uint8_t)(step + i * 7);
	rc = vmh_tcp_write(c, v, below(10) ? 1 : 2, more);
	printf("write %zd\n", rc);
}

static void hear(struct vmh_tcp_conn *c)
{
	static uint8_t data[30000];
	struct iovec v = { data, below(4) ? sizeof(data) : 1 + below(100) };
	ssize_t rc = vmh_tcp_read(c, &v, 1, below(10) == 0);

	printf("read %zd %016lx\n", rc, (unsigned long)hash_of(data, rc > 0 ? (size_t)rc : 0));
}

static void change_options(struct vmh_tcp_conn *c)
{
	struct vmh_tcp_options o;

	vmh_tcp_get_options(c, &o);
	o.cork = below(3) == 0;
	o.nodelay = below(2);
	o.quickack = below(4) == 0;
	vmh_tcp_set_options(c, &o);
}

/* Home and back, as far as the stack has a part in it. */
static struct vmh_tcp_conn *move(struct vmh_tcp_conn *c, int end)
{
	static uint8_t blob[200000];
	struct vmh_tcp_path path = wire_path(end);
	struct vmh_tcp_conn *again = NULL;
	ssize_t len;

	if (vmh_tcp_freeze(c))
		return c;
	len = vmh_tcp_export(c, blob, sizeof(blob));
	printf("move %zd\n", len);
	if (len <= 0 || (size_t)len > sizeof(blob)) {
		vmh_tcp_thaw(c);
		return c;
	}
	vmh_tcp_forget(c);
	if (vmh_tcp_import(w.end[end].t, blob, (size_t)len, &path, NULL, &again))
		abort();
	vmh_tcp_thaw(again);
	return again;
}

static void step(struct vmh_tcp_conn **c, unsigned n)
{
	static const unsigned pause_us[] = { 0, 1, 30, 100, 500, 3000, 45000, 300000, 1500000 };
	int end = (int)below(2);

	switch (below(20)) {
	case 0:
		change_options(c[end]);
		break;
	case 1:
		wire_run(&w, pause_us[5 + below(4)] * 1000ull);
		break;
	case 2:
		hear(c[end]);
		hear(c[!end]);
		break;
	case 3:
		if (below(8) == 0)
			c[end] = move(c[end], end);
		break;
	default:
		say(c[end], n);
		wire_run(&w, pause_us[below(6)] * 1000ull);
		if (below(8))
			hear(c[!end]);
	}
	show_state(c[0], 0);
	show_state(c[1], 1);
}

static uint64_t run_case(unsigned number)
{
	struct vmh_tcp_options o, lo;
	struct vmh_tcp_conn *l, *c[2] = { 0 };
	struct wire_faults none = { .delay_ns = 1000 };
	struct vmh_tcp_stats s[2];

	memset(isn, 0, sizeof(isn));
	wire_open(&w, &none, below(2) ? 0 : 64);
	w.random += number * 7919ull;
	for (int i = 0; i < 2; i++) {
		w.end[i].watch = show_frame;
		w.end[i].arg = &w.end[i];
	}
	o = some_options();
	lo = some_options();
	l = wire_listen(&w, 80, 8, &lo);
	c[0] = wire_connect(&w, 5000, 80, &o);
	wire_run(&w, 10000000);
	if (vmh_tcp_accept(l, NULL, &c[1]))
		abort();
	none = some_faults(number);
	wire_faults(&w, &none);
	for (unsigned i = 0; i < STEPS; i++)
		step(c, i);
	vmh_tcp_shutdown(c[0], SHUT_WR);
	wire_run(&w, 2000000000);
	vmh_tcp_close(c[0]);
	vmh_tcp_close(c[1]);
	wire_run(&w, 4000000000);
	vmh_tcp_close(l);
	for (int i = 0; i < 2; i++)
		vmh_tcp_get_stats(w.end[i].t, &s[i]);
	wire_close(&w);
	return s[0].predicted + s[1].predicted;
}

int main(void)
{
	uint64_t predicted = 0;

	w.random = 1;
	for (unsigned i = 0; i < CASES; i++) {
		printf("case %u\n", i);
		predicted += run_case(i);
	}
	fprintf(stderr, "%lu\n", (unsigned long)predicted);
	return 0;
}
