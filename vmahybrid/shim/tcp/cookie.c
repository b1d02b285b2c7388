/* SYN cookies: a listener that has no room for another half-open connection answers a SYN all the same, and keeps nothing
 * of it. What there is to remember goes out in the answer's sequence number, and comes back in the ACK, from which the
 * connection is made. As in Linux an index of MSS values is all that the number has room for; window scale and
 * SACK-permitted are in the low bits of our timestamp, so without timestamps there is neither.
 *
 *  number    29 bits of a keyed hash of the connection's name, the peer's number, the minute and what follows
 *            1 bit, the lowest of the minute; 2 bits, the index
 *  timestamp its clock, in the past by 31 ms at most, with SACK-permitted (1 bit) and the scale (4, 15: none) at its end
 */
#include "core.h"

#define MINUTE (60 * SEC)
#define REMEMBERED (2 * MINUTE) /* after the last cookie a listener looks for the answers */
#define AWAITED (1 * SEC)      /* most answers come within */
#define INDEX 3u
#define NO_SCALE 15u
#define SACK_BIT 16u
#define STAMP_BITS 31u
#define TCP_LEN 20

struct offer {
	uint16_t mss;
	uint8_t scale; /* NO_SCALE: none */
	bool sack, ts;
};

/* What most peers offer: the least that anyone may, tunnels, PPPoE, Ethernet; IPv6: jumbo frames, too. */
static const uint16_t sizes4[] = {536, 1300, 1440, 1460}, sizes6[] = {1220, 1420, 1440, 8940};

static uint16_t size_at(const struct key *k, unsigned index)
{
	return key_is4(k) ? sizes4[index] : sizes6[index];
}

static unsigned index_of(const struct key *k, uint16_t mss)
{
	unsigned i = INDEX;

	while (i && size_at(k, i) > mss)
		i--;
	return i;
}

static uint32_t make(const struct vmh_tcp *t, const struct key *k, uint32_t seq, uint32_t minute, unsigned index)
{
	uint64_t hash = core_hash_more(t, core_hash(t, k, 3), (uint64_t)seq << 32 | (uint32_t)(minute << 2 | index));

	return ((uint32_t)hash & ~7u) | (minute & 1) << 2 | index;
}

/* Of this minute or the last one. */
static bool is_ours(const struct vmh_tcp *t, const struct key *k, uint32_t seq, uint32_t cookie)
{
	uint32_t minute = (uint32_t)(t->now / MINUTE);

	if ((minute ^ cookie >> 2) & 1)
		minute--;
	return cookie == make(t, k, seq, minute, cookie & INDEX);
}

/* The options of a SYN; read_segment has seen to it that the list is sound. */
static struct offer offered(const struct vmh_tcp_conn *l, const struct key *k, const uint8_t *tcp, const struct seg_in *in)
{
	struct offer o = {.mss = size_at(k, 0), .scale = NO_SCALE, .ts = in->ts};
	unsigned header = (unsigned)(tcp[12] >> 4) * 4;

	for (unsigned i = TCP_LEN; i < header && tcp[i]; i += tcp[i] == 1 ? 1 : tcp[i + 1]) {
		if (tcp[i] == 2 && tcp[i + 1] == 4)
			o.mss = (uint16_t)(tcp[i + 2] << 8 | tcp[i + 3]);
		else if (tcp[i] == 3 && tcp[i + 1] == 3 && o.ts && !l->opt.no_wscale)
			o.scale = LWIP_MIN(tcp[i + 2], 14);
		else if (tcp[i] == 4 && tcp[i + 1] == 2 && o.ts && !l->opt.no_sack)
			o.sack = true;
	}
	return o;
}

/* The options of ours, or those of the peer's SYN as far as they are known; how many bytes, 24 at most. */
static size_t put_options(uint8_t *to, const struct offer *o, uint32_t tsval, uint32_t tsecr)
{
	uint32_t stamps[2] = {lwip_htonl(tsval), lwip_htonl(tsecr)};
	uint8_t *at = to;

	memcpy(at, (uint8_t[]){2, 4, (uint8_t)(o->mss >> 8), (uint8_t)o->mss}, 4);
	at += 4;
	if (o->ts) {
		memcpy(at, (uint8_t[]){o->sack ? 4 : 1, o->sack ? 2 : 1, 8, 10}, 4);
		memcpy(at + 4, stamps, 8);
		at += 12;
	}
	if (o->scale != NO_SCALE) {
		memcpy(at, (uint8_t[]){1, 3, 3, o->scale}, 4);
		at += 4;
	}
	return (size_t)(at - to);
}

/* Never in the future: what the connection says later must not be less. */
static uint32_t stamp(const struct vmh_tcp *t, const struct offer *o)
{
	uint32_t now = (uint32_t)(t->now / 1000), said = (now & ~STAMP_BITS) | (o->sack ? SACK_BIT : 0) | o->scale;

	return (now & STAMP_BITS) < (said & STAMP_BITS) ? said - STAMP_BITS - 1 : said;
}

void cookie_send(struct vmh_tcp_conn *l, const struct key *k, const uint8_t *tcp, const struct seg_in *in)
{
	struct vmh_tcp *t = l->t;
	struct offer o = offered(l, k, tcp, in);
	uint32_t tsval = stamp(t, &o) + (uint32_t)core_hash(t, k, 2);
	uint16_t mss = LWIP_MIN((uint16_t)(t->reply.mtu - key_headers(k)), TCP_MSS);
	uint8_t options[24];
	struct bare b = {.seq = make(t, k, in->seq, (uint32_t)(t->now / MINUTE), index_of(k, o.mss)), .ack = in->seq + 1,
			 .flags = TCP_SYN | TCP_ACK, .wnd = (uint16_t)LWIP_MIN(l->opt.rcvbuf, 0xffff), .options = options,
			 .ttl = key_ttl(k, &l->opt), .tos = key_tos(k, &l->opt)};

	o.mss = l->opt.mss_max ? LWIP_MIN(l->opt.mss_max, mss) : mss;
	o.scale = o.scale == NO_SCALE ? NO_SCALE : TCP_RCV_SCALE;
	b.options_len = put_options(options, &o, tsval, in->tsval);
	l->listening->cookies_until = t->now + REMEMBERED;
	t->stats.cookies_sent++;
	core_send_bare(t, &t->reply, k, &b);
}

bool cookie_awaited(const struct vmh_tcp_conn *l)
{
	return l->t->env.now_ns(l->t->env.ctx) / 1000 + REMEMBERED - AWAITED < l->listening->cookies_until;
}

/* True if the segment answers a cookie, with the SYN that had it: of its options, what both sides have. */
bool cookie_syn(struct vmh_tcp_conn *l, const struct key *k, const uint8_t *tcp, const struct seg_in *in, struct syn *out)
{
	struct vmh_tcp *t = l->t;
	uint32_t cookie = in->ack - 1, seq = lwip_htonl(in->seq - 1), said;
	struct offer o = {.scale = NO_SCALE, .ts = in->ts};

	if (!(in->flags & TCP_ACK) || in->flags & (TCP_SYN | TCP_RST) || t->now >= l->listening->cookies_until)
		return false;
	if (!is_ours(t, k, in->seq - 1, cookie)) {
		t->stats.cookies_failed++;
		return false;
	}
	t->stats.cookies_taken++;
	o.mss = size_at(k, cookie & INDEX);
	if (o.ts) {
		said = in->tsecr - (uint32_t)core_hash(t, k, 2);
		o.scale = said & NO_SCALE;
		o.sack = said & SACK_BIT;
	}
	memset(out, 0, sizeof(*out));
	memcpy(out->tcp, tcp, 4);           /* ports */
	memcpy(out->tcp + 4, &seq, 4);
	memcpy(out->tcp + 14, tcp + 14, 2); /* window */
	out->len = TCP_LEN + put_options(out->tcp + TCP_LEN, &o, in->tsval, 0);
	out->tcp[12] = (uint8_t)(out->len / 4 << 4);
	out->tcp[13] = TCP_SYN;
	return true;
}
