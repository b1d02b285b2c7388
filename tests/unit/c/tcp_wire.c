#include "tcp_wire.h"
#include <sys/socket.h>

/* Ends the program: there is no going on. */
#define NEED(cond, ...) \
	do { \
		if (!(cond)) { \
			printf("%s:%d: %s: ", __FILE__, __LINE__, #cond); \
			printf(__VA_ARGS__); \
			putchar('\n'); \
			fflush(stdout); \
			abort(); \
		} \
	} while (0)

#define STREAMS 3 /* put together at a time: fewer than some tests have */

struct wire_frame {
	uint64_t at, seq;
	int to;
	size_t len;
	bool held;
	uint8_t *bytes; /* exactly as long as the frame: a sanitizer sees a read beyond it */
};

double wire_random(struct wire *w)
{
	w->random ^= w->random << 13;
	w->random ^= w->random >> 7;
	w->random ^= w->random << 17;
	return (double)(w->random >> 11) / 9007199254740992.0;
}

static bool before(const struct wire_frame *a, const struct wire_frame *b)
{
	return a->at < b->at || (a->at == b->at && a->seq < b->seq);
}

static void place(struct wire *w, struct wire_frame *f)
{
	unsigned at;

	if (w->n + 2 > w->size) {
		w->size = w->size ? 2 * w->size : 64;
		w->heap = realloc(w->heap, w->size * sizeof(*w->heap));
	}
	for (at = ++w->n; at > 1 && before(f, w->heap[at / 2]); at /= 2)
		w->heap[at] = w->heap[at / 2];
	w->heap[at] = f;
}

static void push(struct wire *w, struct wire_frame *f)
{
	f->seq = w->seq++;
	place(w, f);
}

static struct wire_frame *pop(struct wire *w)
{
	struct wire_frame *first = w->heap[1], *last = w->heap[w->n--];
	unsigned at = 1, child;

	for (; (child = 2 * at) <= w->n; at = child) {
		if (child < w->n && before(w->heap[child + 1], w->heap[child]))
			child++;
		if (!before(w->heap[child], last))
			break;
		w->heap[at] = w->heap[child];
	}
	w->heap[at] = last;
	return first;
}

static struct wire_frame *frame_new(const void *bytes, size_t len, int to, uint64_t at)
{
	struct wire_frame *f = calloc(1, sizeof(*f));

	f->bytes = malloc(len);
	memcpy(f->bytes, bytes, len);
	f->len = len;
	f->to = to;
	f->at = at;
	return f;
}

static void frame_free(struct wire_frame *f)
{
	free(f->bytes);
	free(f);
}

static uint64_t now_ns(void *ctx)
{
	return ((struct wire_end *)ctx)->w->now;
}

static int send_frame(void *ctx, const void *bytes, size_t len)
{
	struct wire_end *e = ctx;
	struct wire *w = e->w;
	const struct wire_faults *f = &e->faults;
	int to = e == &w->end[0];
	const uint8_t *b = bytes;
	size_t data;

	NEED(len <= WIRE_MTU + 14, "a frame of %zu bytes", len);
	data = len - wire_headers(b) - (size_t)(b[wire_headers(b) + 12] >> 4) * 4;
	if (data && f->full > 0 && wire_random(w) < f->full)
		return -EAGAIN;
	e->sent++;
	e->data_bytes += data;
	if (b[47] & 4)
		e->resets++;
	if ((e->watch && e->watch(e->arg, bytes, len)) || wire_random(w) < f->loss ||
	    (f->queue && e->in_flight >= f->queue)) {
		e->lost++;
		return 0;
	}
	if (e->free_at < w->now)
		e->free_at = w->now;
	if (f->gbit > 0)
		e->free_at += (uint64_t)((double)(len + 24) * 8 / f->gbit);
	for (int copy = wire_random(w) < f->duplicate ? 2 : 1; copy; copy--) {
		uint64_t at = e->free_at + f->delay_ns;
		struct wire_frame *frame;

		if (wire_random(w) < f->reorder)
			at += f->reorder_ns;
		frame = frame_new(bytes, len, to, at);
		if (wire_random(w) < f->corrupt)
			frame->bytes[14 + (size_t)(wire_random(w) * (double)(len - 14))] ^= (uint8_t)(1 << (int)(wire_random(w) * 8));
		e->in_flight++;
		push(w, frame);
	}
	return 0;
}

static void release(void *ctx, void *token)
{
	((struct wire_end *)ctx)->held_frames--;
	frame_free(token);
}

static void ready(void *ctx, void *user, struct vmh_tcp_conn *c)
{
	(void)user, (void)c;
	((struct wire_end *)ctx)->ready++;
}

void wire_faults(struct wire *w, const struct wire_faults *both)
{
	w->end[0].faults = w->end[1].faults = *both;
}

static void copied(void *ctx, unsigned frames)
{
	((struct wire_end *)ctx)->copied += frames;
}

static void talkers(void *ctx, uint32_t n)
{
	((struct wire_end *)ctx)->talkers = n;
}

static struct vmh_ip address(int end)
{
	struct vmh_ip v6 = { .b = { 0xfd, 0, 0x12, 0x34, 0xab, 0xcd, [15] = (uint8_t)(1 + end) } };

	return getenv("WIRE_IPV6") ? v6 : vmh_ip4(htonl(0x0a000001u + (unsigned)end));
}

void wire_open(struct wire *w, const struct wire_faults *both, unsigned hold_max)
{
	wire_open_share(w, both, hold_max, 0);
}

void wire_open_share(struct wire *w, const struct wire_faults *both, unsigned hold_max, unsigned hold_share)
{
	memset(w, 0, sizeof(*w));
	w->now = 1000000000;
	w->random = 88172645463325252u;
	w->zero_copy = hold_max;
	w->look_ns = getenv("WIRE_LOOK") ? strtoull(getenv("WIRE_LOOK"), NULL, 10) : 0;
	w->streams = getenv("WIRE_STREAMS") ? (unsigned)atoi(getenv("WIRE_STREAMS")) : STREAMS;
	for (int i = 0; i < 2; i++) {
		struct vmh_tcp_env env = {.ctx = &w->end[i], .now_ns = now_ns, .send = send_frame, .release = release,
					  .ready = ready, .copied = copied, .talkers = talkers, .hold_max = hold_max,
					  .hold_share = hold_share, .merge_max = w->streams, .verify = true, .reset_unknown = true};

		w->end[i].w = w;
		w->end[i].addr = address(i);
		NEED(vmh_tcp_open(&env, &w->end[i].t) == 0, "open");
	}
	wire_faults(w, both);
}

void wire_close(struct wire *w)
{
	for (int i = 0; i < 2; i++) {
		struct vmh_tcp_stats s;

		vmh_tcp_get_stats(w->end[i].t, &s);
		vmh_tcp_destroy(w->end[i].t);
		NEED(w->end[i].held_frames == 0, "%u frames of end %d are still held", w->end[i].held_frames, i);
	}
	while (w->n)
		frame_free(pop(w));
	free(w->heap);
}

static void arrive(struct wire *w, struct wire_frame *f)
{
	struct wire_end *e = &w->end[f->to];
	int rc;

	e->held_frames++; /* release may come at any time from here on */
	rc = vmh_tcp_input(e->t, f->bytes, f->len, w->zero_copy ? f : NULL);
	if (rc == 1)
		return;
	e->held_frames--;
	frame_free(f);
}

static void arrive_together(struct wire *w, int to, struct wire_frame **f, unsigned n)
{
	struct vmh_tcp_in in[WIRE_LOOK_MAX];
	struct wire_end *e = &w->end[to];

	for (unsigned i = 0; i < n; i++)
		in[i] = (struct vmh_tcp_in){.frame = f[i]->bytes, .len = (uint32_t)f[i]->len,
					    .token = w->zero_copy ? f[i] : NULL};
	e->held_frames += n;
	w->looks += n > 1;
	vmh_tcp_input_all(e->t, in, n);
	for (unsigned i = 0; i < n; i++)
		if (in[i].rc != 1) {
			e->held_frames--;
			frame_free(f[i]);
		}
}

void wire_inject_more(struct wire *w, int to, const void *frame, size_t len)
{
	if (w->nopen == WIRE_LOOK_MAX)
		wire_look(w, to);
	w->open[w->nopen++] = frame_new(frame, len, to, w->now);
}

void wire_look(struct wire *w, int to)
{
	unsigned n = w->nopen;

	w->nopen = 0;
	if (n)
		arrive_together(w, to, w->open, n);
}

void wire_inject(struct wire *w, int to, const void *frame, size_t len)
{
	arrive(w, frame_new(frame, len, to, w->now));
}

/* The next frame, and what else comes for that end soon. */
static void arrive_looking(struct wire *w)
{
	struct wire_frame *f[WIRE_LOOK_MAX], *other[WIRE_LOOK_MAX];
	unsigned n = 0, others = 0;
	uint64_t until = w->heap[1]->at + w->look_ns;
	int to = w->heap[1]->to;

	while (w->n && w->heap[1]->at <= until && n < WIRE_LOOK_MAX && others < WIRE_LOOK_MAX) {
		struct wire_frame *next = pop(w);

		if (next->to == to)
			f[n++] = next;
		else
			other[others++] = next;
	}
	while (others)
		place(w, other[--others]);
	if (f[n - 1]->at > w->now)
		w->now = f[n - 1]->at;
	w->end[!to].in_flight -= n < w->end[!to].in_flight ? n : w->end[!to].in_flight;
	arrive_together(w, to, f, n);
}

bool wire_step(struct wire *w, uint64_t until)
{
	uint64_t timer[2] = {vmh_tcp_tick(w->end[0].t), vmh_tcp_tick(w->end[1].t)}, next;
	bool frame;

	next = timer[0] < timer[1] ? timer[0] : timer[1];
	frame = w->n && w->heap[1]->at <= next;
	if (frame)
		next = w->heap[1]->at;
	if (next > until)
		return false;
	if (next > w->now)
		w->now = next;
	if (frame && w->look_ns) {
		arrive_looking(w);
	} else if (frame) {
		struct wire_frame *f = pop(w);

		w->end[!f->to].in_flight -= w->end[!f->to].in_flight > 0;
		arrive(w, f);
	}
	return true;
}

void wire_run(struct wire *w, uint64_t ns)
{
	uint64_t until = w->now + ns;

	while (wire_step(w, until))
		;
	w->now = until;
	vmh_tcp_tick(w->end[0].t);
	vmh_tcp_tick(w->end[1].t);
}

struct vmh_tcp_path wire_path(int end)
{
	struct vmh_tcp_path p = {{2, 0, 0, 0, 0, (uint8_t)(2 - end)}, {2, 0, 0, 0, 0, (uint8_t)(1 + end)}, WIRE_MTU};

	return p;
}

struct vmh_tcp_conn *wire_listen(struct wire *w, uint16_t port, unsigned backlog, const struct vmh_tcp_options *o)
{
	struct vmh_tcp_options def;
	struct vmh_tcp_conn *l = NULL;

	vmh_tcp_options_init(&def);
	NEED(vmh_tcp_listen(w->end[1].t, &w->end[1].addr, htons(port), 0, backlog, o ? o : &def, NULL, &l) == 0, "listen");
	return l;
}

struct vmh_tcp_conn *wire_connect(struct wire *w, uint16_t from, uint16_t port, const struct vmh_tcp_options *o)
{
	struct vmh_tcp_addr a = {w->end[0].addr, w->end[1].addr, htons(from), htons(port)};
	struct vmh_tcp_path p = wire_path(0);
	struct vmh_tcp_options def;
	struct vmh_tcp_conn *c = NULL;

	vmh_tcp_options_init(&def);
	if (vmh_tcp_connect(w->end[0].t, &a, &p, o ? o : &def, NULL, &c))
		return NULL;
	return c;
}

void wire_meet(struct wire *w, const struct vmh_tcp_options *o, uint64_t ns, struct vmh_tcp_conn **c, struct vmh_tcp_conn **p)
{
	struct vmh_tcp_conn *l = wire_listen(w, 80, 10, o);

	*c = wire_connect(w, 1000, 80, o);
	wire_run(w, ns);
	NEED(vmh_tcp_accept(l, NULL, p) == 0, "not accepted");
	vmh_tcp_close(l);
}

void wire_part(struct wire *w, struct vmh_tcp_conn *c, struct vmh_tcp_conn *p)
{
	vmh_tcp_abort(c);
	vmh_tcp_abort(p);
	wire_run(w, 1000000000);
	wire_close(w);
}

ssize_t wire_write(struct vmh_tcp_conn *c, const void *data, size_t len)
{
	struct iovec v = {(void *)(uintptr_t)data, len};

	return vmh_tcp_write(c, &v, 1, false);
}

ssize_t wire_read(struct vmh_tcp_conn *c, void *data, size_t len)
{
	struct iovec v = {data, len};

	return vmh_tcp_read(c, &v, 1, false);
}

static uint32_t sum16(const uint8_t *p, size_t len)
{
	uint32_t sum = 0;

	for (size_t i = 0; i < len; i++)
		sum += (uint32_t)p[i] << (i & 1 ? 0 : 8);
	return sum;
}

static void put_sum(uint8_t *at, uint32_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	at[0] = (uint8_t)(~sum >> 8);
	at[1] = (uint8_t)~sum;
}

/* IP header of a TCP segment; its length, and the sum of its addresses in *pseudo */
static size_t put_ip(struct wire *w, int from, uint8_t *ip, size_t tcp_len, uint32_t *pseudo)
{
	const struct vmh_ip *src = &w->end[from].addr, *dst = &w->end[!from].addr;
	uint16_t total = htons((uint16_t)(20 + tcp_len)), payload = htons((uint16_t)tcp_len);

	memset(ip, 0, 40);
	if (!vmh_ip_is4(src)) {
		ip[0] = 0x60;
		memcpy(ip + 4, &payload, 2);
		ip[6] = 6;
		ip[7] = 64;
		memcpy(ip + 8, src, 16);
		memcpy(ip + 24, dst, 16);
		*pseudo = sum16(ip + 8, 32);
		return 40;
	}
	ip[0] = 0x45;
	memcpy(ip + 2, &total, 2);
	ip[8] = 64;
	ip[9] = 6;
	memcpy(ip + 12, src->b + 12, 4);
	memcpy(ip + 16, dst->b + 12, 4);
	put_sum(ip + 10, sum16(ip, 20));
	*pseudo = sum16(ip + 12, 8);
	return 20;
}

size_t wire_segment(struct wire *w, uint8_t *frame, int from, uint16_t sport, uint16_t dport, uint32_t seq, uint32_t ack,
		    uint8_t flags, uint16_t wnd, const void *options, size_t options_len, const void *data, size_t len)
{
	struct vmh_tcp_path p = wire_path(from);
	size_t tcp_len = 20 + options_len + len;
	uint32_t pseudo, numbers[2] = {htonl(seq), htonl(ack)};
	uint8_t *tcp = frame + 14 + put_ip(w, from, frame + 14, tcp_len, &pseudo);
	uint16_t ports[2] = {htons(sport), htons(dport)};

	memcpy(frame, p.dmac, 6);
	memcpy(frame + 6, p.smac, 6);
	memcpy(frame + 12, frame[14] >> 4 == 6 ? "\x86\xdd" : "\10\0", 2);
	memset(tcp, 0, 20);
	memcpy(tcp, ports, 4);
	memcpy(tcp + 4, numbers, 8);
	tcp[12] = (uint8_t)((20 + options_len) / 4 << 4);
	tcp[13] = flags;
	tcp[14] = (uint8_t)(wnd >> 8);
	tcp[15] = (uint8_t)wnd;
	if (options_len)
		memcpy(tcp + 20, options, options_len);
	if (len)
		memcpy(tcp + 20 + options_len, data, len);
	put_sum(tcp + 16, pseudo + 6 + (uint32_t)tcp_len + sum16(tcp, tcp_len));
	return (size_t)(tcp - frame) + tcp_len;
}

static uint8_t byte_at(uint64_t at)
{
	return (uint8_t)((at * 2654435761u) >> 13 ^ at >> 32);
}

void stream_pump(struct stream *s)
{
	static uint8_t buf[60000];
	uint32_t chunk = s->chunk ? s->chunk : sizeof(buf), max = s->read_max ? s->read_max : sizeof(buf);
	ssize_t n;

	while (s->written < s->total && s->from && vmh_tcp_poll(s->from) & VMH_TCP_OUT) {
		size_t len = s->total - s->written < chunk ? (size_t)(s->total - s->written) : chunk;

		for (size_t i = 0; i < len; i++)
			buf[i] = byte_at(s->written + i);
		n = wire_write(s->from, buf, len);
		if (n < 0) {
			s->failed |= n != -EAGAIN;
			break;
		}
		s->written += (uint64_t)n;
		if ((size_t)n < len)
			break;
	}
	if (s->written == s->total && !s->shut && s->from) {
		s->shut = true;
		vmh_tcp_shutdown(s->from, SHUT_WR);
	}
	while (s->to && !s->ended) {
		n = wire_read(s->to, buf, max);
		if (n <= 0) {
			s->ended = n == 0;
			s->failed |= n < 0 && n != -EAGAIN;
			break;
		}
		for (ssize_t i = 0; i < n; i++)
			s->bad |= buf[i] != byte_at(s->read + (uint64_t)i);
		s->read += (uint64_t)n;
	}
}

bool stream_run(struct wire *w, struct stream *s, int n, uint64_t ns)
{
	uint64_t until = w->now + ns;

	for (;;) {
		bool done = true;

		for (int i = 0; i < n; i++) {
			if (!s[i].ended && !s[i].failed)
				stream_pump(&s[i]);
			if (s[i].ended && !s[i].ended_at)
				s[i].ended_at = w->now;
			done &= s[i].ended || s[i].failed;
		}
		if (done || !wire_step(w, until))
			return done;
	}
}
