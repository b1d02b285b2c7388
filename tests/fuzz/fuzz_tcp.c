/* libFuzzer target: a peer that sends whatever it likes, and a program that does whatever it likes meanwhile. The input is
 * a list of steps; segments are made relative to where the connection stands, so that they reach the depths. */
#include "tcp_wire.h"
#include "tcp_state.h"
#include <sys/socket.h>

#define MUST(cond) \
	do { \
		if (!(cond)) \
			abort(); \
	} while (0)

struct input {
	const uint8_t *at, *end;
};

static uint8_t byte(struct input *in)
{
	return in->at < in->end ? *in->at++ : 0;
}

static uint32_t peer_seq, peer_ack; /* what an honest peer would send next */
static uint64_t out_bytes;

static int look(void *arg, const uint8_t *frame, size_t len)
{
	size_t before = wire_headers(frame), length = before == 34 ? 14 : 54; /* what the length of IP does not count */
	const uint8_t *tcp = frame + before, *said = frame + (before == 34 ? 16 : 18);
	uint32_t seq = (uint32_t)tcp[4] << 24 | (uint32_t)tcp[5] << 16 | (uint32_t)tcp[6] << 8 | tcp[7];
	size_t header = (size_t)(tcp[12] >> 4) * 4;

	(void)arg;
	MUST(len >= before + 20 && len <= 1514 && header >= 20 && before + header <= len);
	MUST(((size_t)said[0] << 8 | said[1]) == len - length);
	out_bytes += len - before - header;
	if (!(tcp[13] & 4))
		peer_ack = seq + (uint32_t)(len - before - header) + (tcp[13] & 1) + (tcp[13] >> 1 & 1);
	return 1; /* the other instance stays out of it */
}

static uint32_t place(struct input *in, uint32_t base)
{
	static const int32_t jumps[] = {0, 0, 0, 1, -1, 1448, -1448, 65535, 1 << 20, -(1 << 20), INT32_MAX, 100};
	uint8_t b = byte(in);

	return b & 0x80 ? base + (uint32_t)(b & 0x7f) : base + (uint32_t)jumps[b % 12];
}

static void segment(struct wire *w, struct input *in)
{
	static const uint16_t sizes[] = {0, 0, 1, 7, 100, 1000, 1448, 1460};
	uint8_t frame[1600], options[40], data[1460], flags = byte(in), shape = byte(in);
	uint32_t seq = place(in, peer_seq), ack = place(in, peer_ack);
	size_t len = sizes[shape & 7], options_len = (size_t)(shape >> 4) % 11 * 4;
	uint16_t wnd = shape & 8 ? (uint16_t)(byte(in) << 8) : 0xffff;

	for (size_t i = 0; i < options_len; i++)
		options[i] = byte(in);
	memset(data, 'x', len);
	if (flags & 2 && seq == peer_seq)
		peer_seq++;
	else if (seq == peer_seq && flags & 16)
		peer_seq += (uint32_t)len + (flags & 1);
	wire_inject_more(w, 1, frame, wire_segment(w, frame, 0, (uint16_t)(4000 + (byte(in) & 1)), 80, seq, ack, flags & 63,
						   wnd, options, options_len, data, len));
	if (!(flags & 64)) /* else the next one is of the same look, if it is a segment */
		wire_look(w, 1);
}

static struct vmh_tcp_conn *move(struct wire *w, struct vmh_tcp_conn *c, struct input *in)
{
	static uint8_t blob[1 << 20];
	struct vmh_tcp_path p = wire_path(1);
	struct vmh_tcp_conn *again;
	struct vmh_tcp_options o;
	ssize_t len;

	if (vmh_tcp_freeze(c))
		return c;
	len = vmh_tcp_export(c, blob, sizeof(blob));
	if (len < 0 || len > (ssize_t)sizeof(blob)) {
		vmh_tcp_thaw(c);
		return c;
	}
	vmh_tcp_forget(c);
	if (byte(in) & 1)
		blob[byte(in) % VMH_TCP_STATE_LEN] ^= byte(in);
	if (vmh_tcp_import(w->end[1].t, blob, (size_t)len, &p, NULL, &again))
		return NULL;
	vmh_tcp_get_options(again, &o);
	if (o.user_timeout_ms > 600000) { /* it is kept to, by closed ones too: for weeks, as Linux does */
		o.user_timeout_ms = 600000;
		vmh_tcp_set_options(again, &o);
	}
	vmh_tcp_thaw(again);
	return again;
}

static void program(struct wire *w, struct vmh_tcp_conn **c, struct input *in)
{
	static uint8_t buf[8192];
	struct vmh_tcp_piece piece;
	struct vmh_tcp_options o;
	struct vmh_tcp_path path = wire_path(1);
	struct vmh_tcp_info info;
	uint8_t what = byte(in);

	switch (what % 11) {
	case 0:
		wire_write(*c, buf, (size_t)byte(in) * 32);
		break;
	case 1:
		MUST(wire_read(*c, buf, (size_t)byte(in) * 32) <= 8192);
		break;
	case 2:
		if (vmh_tcp_take(*c, &piece, 1) == 1)
			vmh_tcp_give(w->end[1].t, piece.handle);
		break;
	case 3:
		vmh_tcp_shutdown(*c, byte(in) % 3);
		break;
	case 4:
		if (byte(in) & 1)
			vmh_tcp_close(*c);
		else
			vmh_tcp_abort(*c);
		*c = NULL;
		break;
	case 5:
		vmh_tcp_get_options(*c, &o);
		o.nodelay = what & 64;
		o.cork = what & 128;
		o.keepalive = byte(in) & 1;
		o.rcvbuf = (uint32_t)byte(in) * 1000;
		vmh_tcp_set_options(*c, &o);
		break;
	case 6:
		path.mtu = (uint16_t)(500 + byte(in) * 1000 / 255);
		vmh_tcp_set_path(*c, &path);
		break;
	case 7:
		*c = move(w, *c, in);
		break;
	case 8:
		vmh_tcp_get_info(*c, &info);
		MUST(vmh_tcp_poll(*c) < 128 && info.state >= 1 && info.state <= 11);
		break;
	case 9:
		vmh_tcp_error(*c);
		break;
	default:
		vmh_tcp_fail(*c, EHOSTUNREACH);
	}
}

static void raw(struct wire *w, struct input *in)
{
	size_t len = (size_t)(in->end - in->at) < 100 ? (size_t)(in->end - in->at) : 100;

	if (len)
		wire_inject(w, 1, in->at, len);
	in->at += len;
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size);

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t size)
{
	struct input in = {bytes, bytes + size};
	struct vmh_tcp_conn *l, *c[2] = {NULL, NULL};
	struct vmh_tcp_options o;
	struct vmh_tcp_stats s;
	struct wire w;
	uint8_t start = byte(&in);

	wire_open(&w, &(struct wire_faults){.delay_ns = 1000}, start & 1 ? 4 : 0);
	vmh_tcp_options_init(&o);
	o.cc = (uint8_t)(start >> 1 & 3) % 3;
	o.no_sack = start & 8;
	o.no_timestamps = start & 16;
	o.no_wscale = start & 32;
	o.syn_cookies = start & 64 ? 2 : 1;
	w.end[1].watch = look;
	peer_seq = 0xfffffff0;
	peer_ack = 0;
	out_bytes = 0;
	l = wire_listen(&w, 80, 2, &o);
	for (unsigned steps = 0; in.at < in.end && steps < 300; steps++) {
		uint8_t step = byte(&in), which = step >> 7;

		if (step % 8 >= 4)
			wire_look(&w, 1);
		if (!c[which])
			vmh_tcp_accept(l, NULL, &c[which]);
		if (step % 8 < 4)
			segment(&w, &in);
		else if (step % 8 == 4)
			wire_run(&w, (uint64_t)byte(&in) * byte(&in) * 100000);
		else if (step % 8 == 5)
			raw(&w, &in);
		else if (c[which])
			program(&w, &c[which], &in);
	}
	wire_look(&w, 1);
	/* whatever came, it all ends by itself */
	for (int i = 0; i < 2; i++)
		if (c[i])
			vmh_tcp_close(c[i]);
	vmh_tcp_close(l);
	wire_run(&w, 1200000000000u);
	vmh_tcp_get_stats(w.end[1].t, &s);
	MUST(s.conns == 0 && s.time_wait == 0 && s.held == 0 && s.listeners == 0);
	wire_close(&w);
	return 0;
}
