/* Below lwIP's TCP: IP and Ethernet headers, the clock, initial sequence numbers, memory. */
#include "core.h"
#include <arpa/inet.h>

#define ETH_LEN 14
#define IP_LEN 20
#define IP6_LEN 40
#define TCP_LEN 20
#define OPTIONS_LEN 40

struct vmh_tcp *core_now;
struct vmh_tcp_conn *core_conn;

static inline uint64_t rotl(uint64_t x, int b)
{
	return x << b | x >> (64 - b);
}

static inline void sip_round(uint64_t v[4])
{
	v[0] += v[1];
	v[1] = rotl(v[1], 13) ^ v[0];
	v[0] = rotl(v[0], 32);
	v[2] += v[3];
	v[3] = rotl(v[3], 16) ^ v[2];
	v[0] += v[3];
	v[3] = rotl(v[3], 21) ^ v[0];
	v[2] += v[1];
	v[1] = rotl(v[1], 17) ^ v[2];
	v[2] = rotl(v[2], 32);
}

static inline void sip_word(uint64_t v[4], uint64_t m)
{
	v[3] ^= m;
	sip_round(v);
	sip_round(v);
	v[0] ^= m;
}

/* SipHash-2-4 (Aumasson and Bernstein) of the 16 bytes a, b. */
static uint64_t siphash(const uint64_t secret[2], uint64_t a, uint64_t b)
{
	uint64_t v[4] = {secret[0] ^ 0x736f6d6570736575u, secret[1] ^ 0x646f72616e646f6du,
			 secret[0] ^ 0x6c7967656e657261u, secret[1] ^ 0x7465646279746573u};

	sip_word(v, a);
	sip_word(v, b);
	sip_word(v, 16ull << 56);
	v[2] ^= 0xff;
	for (int i = 0; i < 4; i++)
		sip_round(v);
	return v[0] ^ v[1] ^ v[2] ^ v[3];
}

uint64_t core_hash(const struct vmh_tcp *t, const struct key *k, uint64_t salt)
{
	uint64_t ports = salt << 32 | (uint64_t)k->lport << 16 | k->rport, q[4];

	if (key_is4(k))
		return siphash(t->secret, (uint64_t)k->laddr.w[3] << 32 | k->raddr.w[3], ports);
	memcpy(q, &k->laddr, 16);
	memcpy(q + 2, &k->raddr, 16);
	return siphash(t->secret, siphash(t->secret, siphash(t->secret, q[0], q[1]) ^ q[2], q[3]), ports);
}

uint64_t core_hash_more(const struct vmh_tcp *t, uint64_t hash, uint64_t word)
{
	return siphash(t->secret, hash, word);
}

/* RFC 6528: a clock of 4 us and a keyed hash of the connection's name. lwIP's addresses say less than it. */
u32_t core_isn(const ip_addr_t *laddr, u16_t lport, const ip_addr_t *raddr, u16_t rport)
{
	uint64_t hash = core_hash(core_now, core_conn ? &core_conn->key : &core_now->in, 0);
	u32_t isn = (u32_t)hash + (u32_t)(core_now->now / 4);

	(void)laddr, (void)lport, (void)raddr, (void)rport;
	if (core_now->recalling)
		return core_now->isn_floor;
	/* a name that one of the ends may have in TIME_WAIT is used again: beyond what its last connection may have sent, as Linux does it */
	if (core_now->reusing && TCP_SEQ_LT(isn, core_now->isn_floor))
		isn = core_now->isn_floor;
	return isn;
}

/* The clock of the timestamp option, which begins elsewhere for each connection. */
u32_t sys_now(void)
{
	u32_t now = (u32_t)(core_now->now / 1000);

	if (core_conn)
		core_conn->ts_sent = now += core_conn->ts_offset;
	return now;
}

void tcp_timer_needed(void)
{
}

struct netif *netif_get_by_index(u8_t index)
{
	(void)index;
	return core_now ? &core_now->netif : NULL;
}

struct netif *ip4_route(const ip4_addr_t *dest)
{
	(void)dest;
	return &core_now->netif;
}

static void hide_option(uint8_t *at, const uint8_t *end, uint8_t kind)
{
	while (at < end && *at) {
		uint8_t len = *at == 1 ? 1 : at[1];

		if (*at == kind)
			memset(at, 1, len);
		at += len;
	}
}

/* Called when lwIP has written the options of a segment. */
u32_t *core_options_out(struct pbuf *p, struct tcp_hdr *hdr, const struct tcp_pcb *pcb, u32_t *end)
{
	struct vmh_tcp_conn *c = pcb ? core_conn : NULL;
	uint8_t *options = (uint8_t *)(hdr + 1);

	(void)p;
	if (!c || !(TCPH_FLAGS(hdr) & TCP_SYN))
		return end;
	if (c->opt.rcvbuf < 0xffff)
		hdr->wnd = lwip_htons((u16_t)c->opt.rcvbuf);
	if (c->opt.mss_max && *options == 2) {
		u16_t mss = LWIP_MIN(c->opt.mss_max, (u16_t)(options[2] << 8 | options[3]));

		options[2] = (uint8_t)(mss >> 8);
		options[3] = (uint8_t)mss;
	}
	if (*options == 2)
		c->offered = (uint16_t)(options[2] << 8 | options[3]);
	if (c->opt.no_timestamps)
		hide_option(options, (uint8_t *)end, 8);
	if (c->opt.no_wscale)
		hide_option(options, (uint8_t *)end, 3);
	if (c->opt.no_sack)
		hide_option(options, (uint8_t *)end, 4);
	return end;
}

/* One's complement sum of 16-bit words in the order of memory (RFC 1071); an odd byte is the first of its word. */
u16_t core_chksum(const void *data, int len)
{
	const uint8_t *p = data;
	uint64_t a = 0, b = 0, w[2];

	for (; len >= 16; p += 16, len -= 16) {
		memcpy(w, p, 16);
		a += (w[0] & UINT32_MAX) + (w[1] & UINT32_MAX);
		b += (w[0] >> 32) + (w[1] >> 32);
	}
	w[0] = w[1] = 0;
	memcpy(w, p, (size_t)len);
	a += (w[0] & UINT32_MAX) + (w[1] & UINT32_MAX) + b + (w[0] >> 32) + (w[1] >> 32);
	a = (a & UINT32_MAX) + (a >> 32);
	a = (a & UINT32_MAX) + (a >> 32);
	a = (a & UINT16_MAX) + (a >> 16);
	a = (a & UINT16_MAX) + (a >> 16);
	return (u16_t)a;
}

static uint16_t header_sum(const uint8_t *ip)
{
	uint32_t sum = 0;

	for (int i = 0; i < IP_LEN; i += 2)
		sum += (uint32_t)(ip[i] << 8 | ip[i + 1]);
	return htons(sum_of(sum));
}

uint32_t core_pseudo(const struct key *k)
{
	const struct vmh_ip *ends[2] = {&k->laddr, &k->raddr};
	const bool v4 = key_is4(k);
	uint32_t sum = 0;

	for (int e = 0; e < 2; e++)
		for (int i = v4 ? 3 : 0; i < 4; i++)
			sum += (ends[e]->w[i] & 0xffff) + (ends[e]->w[i] >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

static void fill_ipv4(uint8_t *ip, size_t tcp_len, const struct key *k, uint16_t number, uint8_t ttl, uint8_t tos)
{
	uint16_t total = htons((uint16_t)(IP_LEN + tcp_len)), id = htons(number), sum;

	memset(ip, 0, IP_LEN);
	ip[0] = 0x45;
	ip[1] = tos;
	memcpy(ip + 2, &total, 2);
	memcpy(ip + 4, &id, 2);
	ip[6] = 0x40; /* don't fragment: the path's MTU is told by ICMP */
	ip[8] = ttl;
	ip[9] = IPPROTO_TCP;
	memcpy(ip + 12, &k->laddr.w[3], 4);
	memcpy(ip + 16, &k->raddr.w[3], 4);
	sum = header_sum(ip);
	memcpy(ip + 10, &sum, 2);
}

static void fill_ipv6(uint8_t *ip, size_t tcp_len, const struct key *k, uint8_t hops, uint8_t tclass)
{
	uint16_t payload = htons((uint16_t)tcp_len);

	ip[0] = (uint8_t)(0x60 | tclass >> 4);
	ip[1] = (uint8_t)(tclass << 4);
	ip[2] = ip[3] = 0;
	memcpy(ip + 4, &payload, 2);
	ip[6] = IPPROTO_TCP;
	ip[7] = hops;
	memcpy(ip + 8, &k->laddr, 16);
	memcpy(ip + 24, &k->raddr, 16);
}

static size_t ip_len(const struct key *k)
{
	return key_is4(k) ? IP_LEN : IP6_LEN;
}

static void fill_headers(const struct vmh_tcp_path *path, uint8_t *frame, size_t tcp_len, const struct key *k, uint16_t number,
			 uint8_t ttl, uint8_t tos)
{
	memcpy(frame, path->dmac, 6);
	memcpy(frame + 6, path->smac, 6);
	if (key_is4(k)) {
		frame[12] = 0x08;
		frame[13] = 0x00;
		fill_ipv4(frame + ETH_LEN, tcp_len, k, number, ttl, tos);
	} else {
		frame[12] = 0x86;
		frame[13] = 0xdd;
		fill_ipv6(frame + ETH_LEN, tcp_len, k, ttl, tos);
	}
}

/* From the checksum with the tokens to that with the addresses (RFC 1624). */
static void mend_sum(struct tcp_hdr *tcp, const struct key *k)
{
	const uint32_t tokens[2] = {LOCAL_TOKEN, REMOTE_TOKEN};
	uint32_t sum = (uint16_t)~tcp->chksum + core_pseudo(k);

	for (int i = 0; i < 2; i++)
		sum += (uint16_t)~(tokens[i] & 0xffff) + (uint16_t)~(tokens[i] >> 16);
	tcp->chksum = sum_of(sum);
}

static int put_on_wire(struct vmh_tcp *t, const void *frame, size_t len)
{
	int rc = t->env.send(t->env.ctx, frame, len);

	if (rc)
		t->stats.send_failed++;
	else
		t->stats.out++;
	return rc;
}

static void count_sent(struct vmh_tcp_conn *c, size_t payload)
{
	c->count.segs_out++;
	if (payload) {
		c->count.data_segs_out++;
		c->sent_at = c->t->now;
	}
}

/* For 16 bits of the header that are others now (RFC 1624). */
static void put_sum(struct tcp_hdr *tcp, uint16_t old, uint16_t new)
{
	tcp->chksum = sum_of((uint32_t)(uint16_t)~tcp->chksum + (uint16_t)~old + new);
}

/* A segment without data is numbered within the peer's window: if that has shrunk, snd_nxt lies beyond it, and the peer
 * looks at nothing of such a segment. With data stopped in both directions its own would never be acknowledged. */
static void number_within_window(struct tcp_hdr *tcp, const struct tcp_pcb *pcb)
{
	uint32_t next = lwip_htonl(pcb->snd_nxt), end = pcb->lastack + pcb->snd_wnd;

	if (pcb->state < ESTABLISHED || TCP_SEQ_LEQ(pcb->snd_nxt, end) || tcp->seqno != next)
		return;
	tcp->seqno = lwip_htonl(end);
	put_sum(tcp, (uint16_t)next, (uint16_t)tcp->seqno);
	put_sum(tcp, (uint16_t)(next >> 16), (uint16_t)(tcp->seqno >> 16));
}

/* The identification of an IP packet. One count for all would tell each peer how much the others get. */
static uint16_t number_of(const struct vmh_tcp_conn *c)
{
	return c ? (uint16_t)((c->ts_offset >> 16) + c->count.segs_out) : 0;
}

/* p: a segment from its TCP header on, with room for the others; c is NULL if there is none. */
static err_t down(struct vmh_tcp *t, struct vmh_tcp_conn *c, struct pbuf *p, u8_t ttl, u8_t tos)
{
	const struct key *k = c ? &c->key : &t->in;
	size_t tcp_len = p->tot_len, header = 4u * TCPH_HDRLEN((struct tcp_hdr *)p->payload);

	if (pbuf_add_header(p, ETH_LEN + ip_len(k)))
		return ERR_BUF;
	fill_headers(c ? &c->path : &t->reply, p->payload, tcp_len, k, number_of(c), ttl, tos);
	if (c)
		count_sent(c, tcp_len - header);
	return put_on_wire(t, p->payload, p->len) ? ERR_MEM : ERR_OK;
}

err_t core_send(struct vmh_tcp_conn *c, struct pbuf *p)
{
	return down(c->t, c, p, c->pcb->ttl, c->pcb->tos);
}

/* Less than a segment at the end of a corked stream. lwIP would send it when all before it is acknowledged; Linux when it is
 * uncorked, or after 200 ms (on_persist). Here it is a segment that could not be sent, and stays in the queue. */
static bool is_corked_rest(const struct vmh_tcp_conn *c, const struct tcp_hdr *tcp, size_t tcp_len)
{
	const struct tcp_pcb *pcb = c->pcb;
	const struct tcp_seg *s = pcb->unsent;

	return c->opt.cork && !c->uncorked && pcb->snd_wnd && s && s->len && !s->next && !is_whole(pcb, s) &&
	       !(pcb->flags & TF_FIN) && tcp->seqno == lwip_htonl(pcb->snd_nxt) && tcp_len - 4u * TCPH_HDRLEN(tcp) == s->len;
}

/* The end of the stream has a number, and is within the window as each byte: a peer drops what is not, and maybe the data
 * before it. lwIP does not count it. True: it stays in the queue; behind data it goes back there. */
static bool is_end_beyond(struct vmh_tcp_conn *c, struct tcp_hdr *tcp, size_t tcp_len)
{
	struct tcp_pcb *pcb = c->pcb;
	size_t len = tcp_len - 4u * TCPH_HDRLEN(tcp);
	uint16_t flags;

	if (!(TCPH_FLAGS(tcp) & TCP_FIN) || tcp->seqno != lwip_htonl(pcb->snd_nxt) || pcb->state < ESTABLISHED ||
	    TCP_SEQ_LT(pcb->snd_nxt + (uint32_t)len, pcb->lastack + pcb->snd_wnd))
		return false;
	if (!len) {
		c->kept_rest = true;
		return true;
	}
	flags = tcp->_hdrlen_rsvd_flags;
	TCPH_UNSET_FLAG(tcp, TCP_FIN);
	if (tcp_enqueue_flags(pcb, TCP_FIN)) /* no memory */
		TCPH_SET_FLAG(tcp, TCP_FIN);
	put_sum(tcp, flags, tcp->_hdrlen_rsvd_flags);
	return false;
}

/* The next segment of the stream, and not one that is sent again. */
static bool is_new(const struct vmh_tcp_conn *c, const struct tcp_hdr *tcp, size_t tcp_len)
{
	return tcp->seqno == lwip_htonl(c->pcb->snd_nxt) && tcp_len > 4u * TCPH_HDRLEN(tcp);
}

/* The same, and more would fit into it. */
static bool is_short(const struct vmh_tcp_conn *c, const struct tcp_hdr *tcp, size_t tcp_len)
{
	const struct tcp_seg *s = c->pcb->unsent;

	return s && !is_whole(c->pcb, s) && is_new(c, tcp, tcp_len);
}

/* lwIP's way down; p's payload begins with the TCP header. */
err_t ip4_output_if(struct pbuf *p, const ip4_addr_t *src, const ip4_addr_t *dest, u8_t ttl, u8_t tos, u8_t proto,
		    struct netif *netif)
{
	struct vmh_tcp *t = core_now;
	const struct key *k = core_conn ? &core_conn->key : &t->in;
	struct tcp_hdr *tcp = p->payload;
	size_t tcp_len = p->tot_len;

	(void)proto, (void)netif, (void)src, (void)dest;
	if (t->recalling)
		return ERR_OK;
	if (core_conn && core_conn->hold_ack && tcp_len == 4u * TCPH_HDRLEN(tcp) && TCPH_FLAGS(tcp) == TCP_ACK) {
		core_conn->held_ack = true;
		return ERR_OK;
	}
	if (core_conn && core_conn->pcb && is_corked_rest(core_conn, tcp, tcp_len)) {
		core_conn->kept_rest = true;
		return ERR_WOULDBLOCK;
	}
	if (core_conn && core_conn->pcb && is_end_beyond(core_conn, tcp, tcp_len))
		return ERR_WOULDBLOCK;
	if (core_conn && core_conn->settling && core_conn->pcb && is_new(core_conn, tcp, tcp_len))
		return ERR_WOULDBLOCK; /* stays in the queue */
	if (core_conn && core_conn->pcb && is_short(core_conn, tcp, tcp_len)) {
		core_conn->short_out = true;
		core_conn->short_tail = false;
		core_conn->short_end = lwip_ntohl(tcp->seqno) + core_conn->pcb->unsent->len;
		core_nagle(core_conn);
	}
	if (!key_is4(k))
		mend_sum(tcp, k);
	if (core_conn && core_conn->pcb && tcp_len == 4u * TCPH_HDRLEN(tcp))
		number_within_window(tcp, core_conn->pcb);
	if (TCPH_FLAGS(tcp) & TCP_RST)
		t->stats.resets_out++;
	return down(t, core_conn, p, ttl, tos);
}

int core_send_bare(struct vmh_tcp *t, const struct vmh_tcp_path *path, const struct key *k, const struct bare *b)
{
	uint8_t frame[ETH_LEN + IP6_LEN + TCP_LEN + OPTIONS_LEN], *tcp = frame + ETH_LEN + ip_len(k);
	uint32_t words[2] = {htonl(b->seq), htonl(b->ack)}, sum;
	size_t len = TCP_LEN + b->options_len;

	memset(tcp, 0, TCP_LEN);
	memcpy(tcp, &k->lport, 2);
	memcpy(tcp + 2, &k->rport, 2);
	memcpy(tcp + 4, words, 8);
	tcp[12] = (uint8_t)(len / 4 << 4);
	tcp[13] = b->flags;
	tcp[14] = (uint8_t)(b->wnd >> 8);
	tcp[15] = (uint8_t)b->wnd;
	if (b->options_len)
		memcpy(tcp + TCP_LEN, b->options, b->options_len);
	if (b->flags & TCP_RST)
		t->stats.resets_out++;
	sum = (uint32_t)IPPROTO_TCP + (uint32_t)len + lwip_ntohs((u16_t)core_pseudo(k));
	for (size_t i = 0; i < len; i += 2)
		sum += (uint32_t)(tcp[i] << 8 | tcp[i + 1]);
	sum = sum_of(sum);
	tcp[16] = (uint8_t)(sum >> 8);
	tcp[17] = (uint8_t)sum;
	fill_headers(path, frame, len, k, 0, b->ttl, b->tos);
	return put_on_wire(t, frame, ETH_LEN + ip_len(k) + len);
}

/* RFC 7323, behind two bytes of nothing. */
static void put_stamps(uint8_t options[TS_LEN], uint32_t val, uint32_t ecr)
{
	const uint32_t words[2] = {htonl(val), htonl(ecr)};

	memcpy(options, (const uint8_t[]){1, 1, 8, 10}, 4);
	memcpy(options + 4, words, 8);
}

/* As Linux asks a peer for an answer: by the number of a byte that it has had. */
void core_send_probe(struct vmh_tcp_conn *c, uint32_t tsval)
{
	const struct tcp_pcb *pcb = c->pcb;
	uint8_t options[TS_LEN];
	struct bare b = {.seq = pcb->lastack - 1, .ack = pcb->rcv_nxt, .flags = TCP_ACK, .ttl = pcb->ttl, .tos = pcb->tos,
			 .wnd = TCPWND_MIN16(RCV_WND_SCALE(pcb, pcb->rcv_ann_wnd)),
			 .options = options, .options_len = pcb->flags & TF_TIMESTAMP ? TS_LEN : 0};

	put_stamps(options, tsval, pcb->ts_recent);
	core_send_bare(c->t, &c->path, &c->key, &b);
	count_sent(c, 0);
}

/* lwIP's own have no timestamps. Inside. */
void core_probe(struct vmh_tcp_conn *c)
{
	core_send_probe(c, sys_now());
	c->pcb->rcv_ann_right_edge = c->pcb->rcv_nxt + c->pcb->rcv_ann_wnd;
	c->pcb->ts_lastacksent = c->pcb->rcv_nxt;
}

int core_send_segment(struct vmh_tcp *t, const struct vmh_tcp_path *path, const struct key *k, uint32_t seq, uint32_t ack,
		      uint8_t flags, uint32_t tsval, uint32_t tsecr, bool ts)
{
	uint8_t options[TS_LEN];
	struct bare b = {.seq = seq, .ack = ack, .flags = flags, .ttl = 64, .wnd = flags & TCP_RST ? 0 : 0xff00,
			 .options = options, .options_len = ts ? TS_LEN : 0};

	put_stamps(options, tsval, tsecr);
	return core_send_bare(t, path, k, &b);
}

/* Blocks of a few sizes are kept for the next time: one connection takes and gives the same ones over and over. */
#define CLASSES 4
#define KEEP_MAX 512 /* of each */

static const size_t class_size[CLASSES] = {128, 512, 1664, 9216};

struct block {
	union {
		struct block *next;
		size_t class_;
		char align[16];
	};
};

#ifndef VMH_TCP_PLAIN_MALLOC /* with it a sanitizer sees every block by itself */
static struct block *kept[CLASSES];
static unsigned nkept[CLASSES];
#endif

void *core_malloc(size_t len)
{
	struct block *b;
	size_t k = 0;

	while (k < CLASSES && len > class_size[k])
		k++;
#ifdef VMH_TCP_PLAIN_MALLOC
	b = vmh_heap_get(sizeof(*b) + len);
#else
	if (k < CLASSES && kept[k]) {
		b = kept[k];
		kept[k] = b->next;
		nkept[k]--;
	} else {
		b = vmh_heap_get(sizeof(*b) + (k < CLASSES ? class_size[k] : len));
	}
#endif
	if (!b)
		return NULL;
	b->class_ = k;
	return b + 1;
}

void core_free(void *p)
{
	struct block *b = p ? (struct block *)p - 1 : NULL;
	size_t k = b ? b->class_ : 0;

	if (!b)
		return;
#ifndef VMH_TCP_PLAIN_MALLOC
	if (k < CLASSES && nkept[k] < KEEP_MAX) {
		b->next = kept[k];
		kept[k] = b;
		nkept[k]++;
		return;
	}
#endif
	(void)k;
	vmh_heap_free(b);
}

void *core_calloc(size_t n, size_t len)
{
	void *p = len && n > SIZE_MAX / len ? NULL : core_malloc(n * len);

	return p ? memset(p, 0, n * len) : NULL;
}
