/* TCP on an AF_XDP ring, against whoever speaks the same small protocol: the first byte of a connection says what it is.
 * E echo. S sink: until the end, then four bytes of CRC. G generate: eight bytes of length, that many bytes come back.
 * tcp_ring_peer IFNAME ADDR MAC PEER-ADDR PEER-MAC MODE [NUMBER [LOSS]]; modes: server, echo COUNT, sink BYTES, trickle COUNT,
 * generate BYTES, opens COUNT, and adopt COUNT FILE: a connection (E) from FILE (tcp_state.h), with an answer to read; it goes
 * on here, and back to FILE
 * LOSS: per cent of the frames, both ways */
#include "live.h"
#include "tcp_ring.h"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/socket.h>

#define PORT 7000
#define DEADLINE_NS 40000000000u
#define CHUNK 60000
#define MESSAGE 64

static struct vmh_tcp_ring tr;
static struct vmh_tcp_addr name;
static struct vmh_tcp_path path;
static uint64_t end_ns;

int vmh_deliver(struct vmh_ring *r, struct vmh_buf *b)
{
	(void)r, (void)b;
	return 0;
}

static void progress(void)
{
	vmh_tcp_ring_poll(&tr, 64);
	if (vmh_now_ns() > end_ns)
		live_die("too slow", ETIMEDOUT);
}

static uint32_t crc(uint32_t c, const unsigned char *p, size_t len)
{
	static uint32_t table[256];

	for (uint32_t i = 0; i < 256 && !table[255]; i++) {
		uint32_t v = i;

		for (int k = 0; k < 8; k++)
			v = v & 1 ? v >> 1 ^ 0xedb88320u : v >> 1;
		table[i] = v;
	}
	for (c = ~c; len; len--)
		c = table[(c ^ *p++) & 255] ^ c >> 8;
	return ~c;
}

static void pattern(unsigned char *to, uint64_t at, size_t len)
{
	for (size_t i = 0; i < len; i++)
		to[i] = (unsigned char)((at + i) * 2654435761u >> 13);
}

static ssize_t put(struct vmh_tcp_conn *c, const void *data, size_t len)
{
	struct iovec v = {(void *)(uintptr_t)data, len};
	ssize_t n = vmh_tcp_write(c, &v, 1, false);

	vmh_tcp_ring_flush(&tr);
	return n;
}

static ssize_t get(struct vmh_tcp_conn *c, void *data, size_t len)
{
	struct iovec v = {data, len};

	return vmh_tcp_read(c, &v, 1, false);
}

static void put_all(struct vmh_tcp_conn *c, const void *data, size_t len)
{
	for (size_t at = 0; at < len;) {
		ssize_t n = put(c, (const char *)data + at, len - at);

		if (n < 0 && n != -EAGAIN)
			live_die("write", (int)n);
		at += n > 0 ? (size_t)n : 0;
		if (at < len)
			progress();
	}
}

static size_t get_all(struct vmh_tcp_conn *c, void *data, size_t len)
{
	size_t at = 0;

	while (at < len) {
		ssize_t n = get(c, (char *)data + at, len - at);

		if (n == 0)
			break;
		if (n < 0 && n != -EAGAIN)
			live_die("read", (int)n);
		at += n > 0 ? (size_t)n : 0;
		if (n < 0)
			progress();
	}
	return at;
}

static struct vmh_tcp_conn *dial(uint16_t port)
{
	struct vmh_tcp_options o;
	struct vmh_tcp_conn *c;
	int rc;

	vmh_tcp_options_init(&o);
	o.nodelay = true;
	name.lport = htons(port);
	name.rport = htons(PORT);
	rc = vmh_tcp_connect(tr.tcp, &name, &path, &o, NULL, &c);
	if (rc)
		live_die("connect", rc);
	vmh_tcp_ring_flush(&tr);
	while (!(vmh_tcp_poll(c) & (VMH_TCP_OUT | VMH_TCP_ERR)))
		progress();
	rc = vmh_tcp_error(c);
	if (rc)
		live_die("connect", rc);
	return c;
}

static void say(const char *what, struct vmh_tcp_conn *c, uint64_t bytes, uint64_t ns, uint32_t sum)
{
	struct vmh_tcp_info i;
	struct vmh_tcp_stats s;

	vmh_tcp_get_info(c, &i);
	vmh_tcp_get_stats(tr.tcp, &s);
	printf("%s %lu bytes crc %08x %.2f Gbit/s resent %u in vain %u timeouts %u kept %lu copied %lu rtt %u us\n", what, bytes,
	       sum, (double)bytes * 8 / (double)ns, i.retransmits, i.dsacks, i.rtos, s.kept, s.copied, i.rtt_us);
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

static void run_echo(unsigned count)
{
	struct vmh_tcp_conn *c = dial(20001);
	uint32_t *ns = calloc(count, sizeof(*ns));
	unsigned char out[MESSAGE], in[MESSAGE];

	put_all(c, "E", 1);
	for (unsigned i = 0, warm = count / 10; i < count; i += warm == 0, warm -= warm > 0) {
		uint64_t t0 = vmh_now_ns();

		pattern(out, i, sizeof(out));
		put_all(c, out, sizeof(out));
		if (get_all(c, in, sizeof(in)) != sizeof(in) || memcmp(in, out, sizeof(in)))
			live_die("echo", EPROTO);
		ns[i] = (uint32_t)(vmh_now_ns() - t0);
	}
	qsort(ns, count, sizeof(*ns), by_value);
	printf("echo half-RTT us: min %.2f p50 %.2f p99 %.2f\n", ns[0] / 2e3, ns[count / 2] / 2e3, ns[count * 99ull / 100] / 2e3);
	vmh_tcp_close(c);
}

/* pause_ns after each chunk: then the peer has only one small segment at a time to acknowledge */
static void run_sink(uint64_t bytes, size_t chunk, uint64_t pause_ns)
{
	struct vmh_tcp_conn *c = dial(20002);
	static unsigned char buf[CHUNK];
	uint64_t start = vmh_now_ns();
	uint32_t sum = 0, theirs = 0;

	put_all(c, "S", 1);
	for (uint64_t at = 0; at < bytes;) {
		size_t len = bytes - at < chunk ? (size_t)(bytes - at) : chunk;
		uint64_t until;

		pattern(buf, at, len);
		sum = crc(sum, buf, len);
		put_all(c, buf, len);
		at += len;
		for (until = pause_ns ? vmh_now_ns() + pause_ns : 0; vmh_now_ns() < until;)
			progress();
	}
	vmh_tcp_shutdown(c, SHUT_WR);
	if (get_all(c, &theirs, 4) != 4 || theirs != sum)
		live_die("what arrived is not what was sent", EPROTO);
	say("sent", c, bytes, vmh_now_ns() - start, sum);
	vmh_tcp_close(c);
}

static void run_generate(uint64_t bytes)
{
	struct vmh_tcp_conn *c = dial(20003);
	static unsigned char buf[CHUNK], expected[CHUNK];
	uint64_t start = vmh_now_ns(), got = 0;
	char request[9] = "G";
	uint32_t sum = 0;
	size_t n;

	memcpy(request + 1, &bytes, 8);
	put_all(c, request, sizeof(request));
	while ((n = get_all(c, buf, CHUNK))) {
		pattern(expected, got, n);
		if (memcmp(buf, expected, n))
			live_die("what arrived is not what was sent", EPROTO);
		sum = crc(sum, buf, n);
		got += n;
	}
	if (got != bytes)
		live_die("too few bytes", EPROTO);
	say("received", c, bytes, vmh_now_ns() - start, sum);
	vmh_tcp_close(c);
}

static void run_opens(unsigned count)
{
	unsigned char buf[MESSAGE] = {0};
	uint64_t start = vmh_now_ns();

	for (unsigned i = 0; i < count; i++) {
		struct vmh_tcp_conn *c = dial((uint16_t)(21000 + i % 40000));

		put_all(c, "E", 1);
		put_all(c, buf, MESSAGE);
		if (get_all(c, buf, MESSAGE) != MESSAGE)
			live_die("echo", EPROTO);
		vmh_tcp_shutdown(c, SHUT_WR);
		if (get_all(c, buf, 1) != 0)
			live_die("end", EPROTO);
		vmh_tcp_close(c);
	}
	printf("opens %u connections, %.0f per second\n", count, count / ((double)(vmh_now_ns() - start) / 1e9));
}

/* ---- a connection that the kernel had before and gets afterwards ---- */

static unsigned char blob[16 << 20];

static struct vmh_tcp_conn *adopt(const char *file)
{
	struct vmh_tcp_conn *c;
	FILE *f = fopen(file, "rb");
	size_t len = f ? fread(blob, 1, sizeof(blob), f) : 0;
	int rc = vmh_tcp_import(tr.tcp, blob, len, &path, NULL, &c);

	if (rc)
		live_die("import", rc);
	fclose(f);
	vmh_tcp_thaw(c);
	vmh_tcp_ring_flush(&tr);
	return c;
}

static void go_home(struct vmh_tcp_conn *c, const char *file)
{
	ssize_t len = vmh_tcp_freeze(c) ? -ENOTCONN : vmh_tcp_export(c, blob, sizeof(blob));
	FILE *f = fopen(file, "wb");

	if (len < 0 || !f || fwrite(blob, 1, (size_t)len, f) != (size_t)len || fclose(f))
		live_die("export", (int)len);
	vmh_tcp_forget(c);
}

static void run_adopt(unsigned count, const char *file)
{
	struct vmh_tcp_conn *c = adopt(file);
	unsigned char out[MESSAGE], in[MESSAGE];
	uint64_t until;

	for (unsigned i = 0; i <= count; i++) { /* the first answer was on its way, or here, before */
		pattern(out, i, sizeof(out));
		if (i)
			put_all(c, out, sizeof(out));
		if (get_all(c, in, sizeof(in)) != sizeof(in) || memcmp(in, out, sizeof(in)))
			live_die("echo", EPROTO);
	}
	pattern(out, 0, sizeof(out));
	put_all(c, out, sizeof(out)); /* the answer is for the kernel's side */
	for (until = vmh_now_ns() + 20000000; vmh_now_ns() < until;)
		progress();
	go_home(c, file);
	printf("adopted, %u rounds, and home\n", count);
}

/* ---- server ---- */

struct served {
	struct vmh_tcp_conn *c;
	struct served *next;
	char op;
	uint64_t length, done;
	unsigned char head[9];
	size_t nhead, pending, pending_at;
	uint32_t sum;
	bool finished;
	unsigned char buf[CHUNK];
};

static bool flush_pending(struct served *s)
{
	while (s->pending) {
		ssize_t n = put(s->c, s->buf + s->pending_at, s->pending);

		if (n <= 0)
			return false;
		s->pending_at += (size_t)n;
		s->pending -= (size_t)n;
	}
	s->pending_at = 0;
	return true;
}

static void generate(struct served *s)
{
	while (flush_pending(s) && s->done < s->length) {
		s->pending = s->length - s->done < CHUNK ? (size_t)(s->length - s->done) : CHUNK;
		pattern(s->buf, s->done, s->pending);
		s->done += s->pending;
	}
	if (!s->pending && s->done == s->length)
		s->finished = true;
}

static void serve(struct served *s)
{
	ssize_t n;

	if (s->op == 'G' && s->nhead == 9) {
		generate(s);
		return;
	}
	if (!flush_pending(s))
		return;
	if (s->nhead < (s->op == 'G' ? 9u : 1u)) {
		n = get(s->c, s->head + s->nhead, s->nhead ? 9 - s->nhead : 1);
		s->nhead += n > 0 ? (size_t)n : 0;
		s->op = (char)s->head[0];
		memcpy(&s->length, s->head + 1, 8);
		s->finished = n == 0;
		return;
	}
	n = get(s->c, s->buf, CHUNK);
	if (n > 0 && s->op == 'E')
		s->pending = (size_t)n;
	else if (n > 0)
		s->sum = crc(s->sum, s->buf, (size_t)n);
	if (n == 0 && s->op == 'S')
		put(s->c, &s->sum, 4);
	s->finished = n != -EAGAIN && n <= 0;
	if (s->pending)
		flush_pending(s);
}

static void run_server(void)
{
	struct served *all = NULL;
	struct vmh_tcp_conn *l, *c;
	struct vmh_tcp_options o;

	vmh_tcp_options_init(&o);
	o.nodelay = true;
	if (vmh_tcp_listen(tr.tcp, &name.laddr, htons(PORT), 0, 128, &o, NULL, &l))
		live_die("listen", EADDRINUSE);
	puts("ready");
	fflush(stdout);
	for (;;) {
		progress();
		while (vmh_tcp_accept(l, NULL, &c) == 0) {
			struct served *s = calloc(1, sizeof(*s));

			s->c = c;
			s->next = all;
			all = s;
		}
		for (struct served **at = &all, *s; (s = *at);) {
			serve(s);
			if (!s->finished) {
				at = &s->next;
				continue;
			}
			vmh_tcp_close(s->c);
			*at = s->next;
			free(s);
		}
	}
}

/* ---- loss ---- */

static struct vmh_ring_ops lossy;
static int (*true_send)(struct vmh_ring *r, const void *frame, size_t len);
static int (*true_take)(struct vmh_ring *r, unsigned char *frame, uint32_t len, struct vmh_buf *b);
static double loss;

static bool lost(void)
{
	static uint64_t x = 88172645463325252u;

	x ^= x << 13;
	x ^= x >> 7;
	x ^= x << 17;
	return (double)(x >> 11) / 9007199254740992.0 < loss;
}

static int lossy_send(struct vmh_ring *r, const void *frame, size_t len)
{
	return lost() ? 0 : true_send(r, frame, len);
}

static int lossy_take(struct vmh_ring *r, unsigned char *frame, uint32_t len, struct vmh_buf *b)
{
	return lost() ? 0 : true_take(r, frame, len, b);
}

static void lose(struct vmh_ring *ring, double percent)
{
	loss = percent / 100;
	lossy = *ring->ops;
	true_send = lossy.send_frame;
	lossy.send_frame = lossy_send;
	ring->ops = &lossy;
	true_take = ring->other;
	ring->other = lossy_take;
}

int main(int argc, char **argv)
{
	uint64_t n = argc > 7 ? strtoull(argv[7], NULL, 0) : 0, linger;
	struct vmh_ring *ring;
	int rc;

	if (argc < 7)
		live_die("arguments", EINVAL);
	end_ns = vmh_now_ns() + DEADLINE_NS;
	name.laddr = vmh_ip4(inet_addr(argv[2]));
	name.raddr = vmh_ip4(inet_addr(argv[4]));
	live_mac(argv[3], path.smac);
	live_mac(argv[5], path.dmac);
	path.mtu = 1500;
	ring = live_open(argv[1], 4096, 2048);
	rc = vmh_tcp_ring_open(&tr, ring, true, 32, NULL, NULL);
	if (rc)
		live_die("stack", rc);
	if (argc > 8 && !strcmp(argv[6], "adopt")) {
		run_adopt((unsigned)n, argv[8]);
		vmh_tcp_ring_close(&tr);
		vmh_ring_close(ring);
		return 0;
	}
	if (argc > 8)
		lose(ring, atof(argv[8]));
	if (!strcmp(argv[6], "server"))
		run_server();
	else if (!strcmp(argv[6], "echo"))
		run_echo((unsigned)n);
	else if (!strcmp(argv[6], "sink"))
		run_sink(n, CHUNK, 0);
	else if (!strcmp(argv[6], "trickle"))
		run_sink(n * MESSAGE, MESSAGE, 50000000);
	else if (!strcmp(argv[6], "generate"))
		run_generate(n);
	else
		run_opens((unsigned)n);
	for (linger = vmh_now_ns() + 50000000; vmh_now_ns() < linger;)
		progress(); /* the last FINs and ACKs */
	vmh_tcp_ring_close(&tr);
	vmh_ring_close(ring);
	return 0;
}
