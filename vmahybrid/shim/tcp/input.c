/* A frame from the wire: checked, given to its connection's pcb, and what came of it. */
#include "core.h"
#include <arpa/inet.h>
#include <netinet/ip.h>

#define ETH_LEN 14
#define IP_LEN 20
#define IP6_LEN 40
#define FRAGMENT_LEN 8
#define EXTENSIONS_MOST 3 /* VMH_IPV6_EXTENSIONS */
#define IN_FRAGMENTS 0xffff /* bytes, more than there can be of a segment: the first fragment is none that is whole */
#define TCP_LEN 20
#define OPTIONS_MOST 40
#define INVALID_US (500 * MS)
#define PAUSE_US (100 * MS)
#define LONG_MOST (16u << 20) /* bytes: a ring takes some 10 ms more for them than the kernel, as a move does */
#define LATELY_US (VMH_TCP_LATELY_NS / 1000)
#define TS_VALID_US (24 * 86400 * SEC) /* a timestamp wraps after 24.8 days */

static bool ip_sum_ok(const uint8_t *ip, size_t len)
{
	uint32_t sum = 0;

	for (size_t i = 0; i < len; i += 2)
		sum += get16(ip + i);
	sum = (sum & 0xffff) + (sum >> 16);
	return ((sum + (sum >> 16)) & 0xffff) == 0xffff;
}

/* Broken ones the kernel drops, and source routes. */
static bool ip_options_ok(const uint8_t *o, size_t len)
{
	for (size_t i = 0; i < len && o[i] != IPOPT_EOL; i += o[i] == IPOPT_NOP ? 1 : o[i + 1]) {
		if (o[i] == IPOPT_NOP)
			continue;
		if (i + 1 == len || o[i + 1] < 2 || i + o[i + 1] > len || o[i] == IPOPT_LSRR || o[i] == IPOPT_SSRR)
			return false;
	}
	return true;
}

/* The payload of an IPv4 packet whose first `left` bytes are there, its length in *len, which may be more than is there;
 * NULL: not one for us. The rules of vmh_frame_parse. */
static uint8_t *in_ipv4(uint8_t *ip, size_t left, size_t *len, struct key *k)
{
	size_t ihl = (size_t)(ip[0] & 15) * 4, total = get16(ip + 2);
	in_addr_t from, to;

	if (ip[0] >> 4 != 4 || ihl < IP_LEN || total < ihl || ihl > left || ip[9] != IPPROTO_TCP ||
	    get16(ip + 6) & 0x1fff || !ip_sum_ok(ip, ihl) || !ip_options_ok(ip + IP_LEN, ihl - IP_LEN))
		return NULL;
	if (ip[12] == 0 || ip[12] == 127 || ip[12] >= 224 || ip[16] >= 224)
		return NULL;
	memcpy(&from, ip + 12, 4);
	memcpy(&to, ip + 16, 4);
	k->raddr = vmh_ip4(from);
	k->laddr = vmh_ip4(to);
	*len = get16(ip + 6) & 0x2000 ? IN_FRAGMENTS : total - ihl;
	return ip + ihl;
}

/* An IPv4 address in an IPv6 header is on no wire (RFC 4291, 2.5.5.2), and would be taken for the other. */
static bool wrong_ip6(const struct vmh_ip *a)
{
	return a->b[0] == 0xff || vmh_ip_is4(a) || !(a->w[0] | a->w[1] | a->w[2]);
}

/* Who does not know it may pass it by, and a source route has been followed (RFC 8200). All else of extension headers is
 * the kernel's. */
static bool is_plain_extension(uint8_t kind, const uint8_t *h, size_t size)
{
	if (kind == IPPROTO_ROUTING)
		return h[3] == 0;
	for (size_t i = 2; i < size; i += h[i] ? h[i + 1] + 2u : 1u)
		if (h[i] >> 6 || (h[i] && (i + 2 > size || i + 2 + h[i + 1] > size)))
			return false;
	return true;
}

/* Past the headers between IPv6 and TCP that bpf/vmh_parse.h skips; 0: not one for us. *whole: it is for a ring. */
static size_t behind_extensions(const uint8_t *ip, size_t left, bool *whole)
{
	size_t at = IP6_LEN, size;
	uint8_t next = ip[6];

	*whole = true;
	for (int i = 0; i < EXTENSIONS_MOST; i++, at += size) {
		if (next != IPPROTO_HOPOPTS && next != IPPROTO_ROUTING && next != IPPROTO_DSTOPTS)
			break;
		if (at + 8 > left)
			return 0;
		size = (ip[at + 1] + 1u) * 8;
		if (at + size > left)
			return 0;
		*whole &= is_plain_extension(next, ip + at, size);
		next = ip[at];
	}
	if (next == IPPROTO_FRAGMENT && at + FRAGMENT_LEN <= left && !(get16(ip + at + 2) & 0xfff8)) {
		*whole = false;
		next = ip[at];
		at += FRAGMENT_LEN;
	}
	return next == IPPROTO_TCP ? at : 0;
}

static uint8_t *in_ipv6(uint8_t *ip, size_t left, size_t *len, struct key *k)
{
	size_t payload, at;
	bool whole;

	if (left < IP6_LEN || ip[0] >> 4 != 6)
		return NULL;
	payload = get16(ip + 4) + (size_t)IP6_LEN;
	at = behind_extensions(ip, left, &whole);
	if (!at || payload < at)
		return NULL;
	k->raddr = vmh_ip6(ip + 8);
	k->laddr = vmh_ip6(ip + 24);
	if (wrong_ip6(&k->raddr) || wrong_ip6(&k->laddr))
		return NULL;
	*len = whole ? payload - at : IN_FRAGMENTS;
	return ip + at;
}

/* The TCP header in a frame, and the length of the segment, which may be cut; NULL: not one for us. */
static uint8_t *find_header(uint8_t *frame, size_t len, size_t *tcp_len, struct key *k)
{
	size_t off = ETH_LEN;
	uint8_t *tcp;

	if (len < ETH_LEN + IP_LEN + TCP_LEN)
		return NULL;
	for (int tags = 0; get16(frame + off - 2) == 0x8100 || get16(frame + off - 2) == 0x88a8; tags++, off += 4)
		if (tags == 2 || len < off + 4 + IP_LEN + TCP_LEN || get16(frame + off) & 0xfff)
			return NULL;
	if (get16(frame + off - 2) == 0x0800)
		tcp = in_ipv4(frame + off, len - off, tcp_len, k);
	else
		tcp = get16(frame + off - 2) == 0x86dd ? in_ipv6(frame + off, len - off, tcp_len, k) : NULL;
	if (!tcp || *tcp_len < TCP_LEN || frame + len < tcp + TCP_LEN || (size_t)(tcp[12] >> 4) * 4 < TCP_LEN ||
	    (size_t)(tcp[12] >> 4) * 4 > *tcp_len)
		return NULL;
	memcpy(&k->rport, tcp, 2);
	memcpy(&k->lport, tcp + 2, 2);
	return tcp;
}

uint8_t *input_find(uint8_t *frame, size_t len, size_t *tcp_len, struct key *k)
{
	uint8_t *tcp = find_header(frame, len, tcp_len, k);

	return tcp && tcp + *tcp_len <= frame + len ? tcp : NULL;
}

bool core_name(void *frame, size_t len, struct vmh_tcp_addr *a)
{
	struct key k;
	size_t tcp_len;

	if (!find_header(frame, len, &tcp_len, &k))
		return false;
	*a = (struct vmh_tcp_addr){k.laddr, k.raddr, k.lport, k.rport};
	return true;
}

static void read_sacks(struct seg_in *in, const uint8_t *at, unsigned len)
{
	for (unsigned i = 2; i + 8 <= len && in->nsacks < MAX_SACKS; i += 8) {
		in->sack[in->nsacks].from = get32(at + i);
		in->sack[in->nsacks++].to = get32(at + i + 4);
	}
}

/* Also mends what lwIP would misunderstand: broken options end the list, since it would look for the length of the last one
 * behind the header; and what belongs into a SYN is blanked elsewhere, since it would take an MSS at any time. */
static void read_segment(uint8_t *tcp, size_t len, struct seg_in *in)
{
	unsigned header = (unsigned)(tcp[12] >> 4) * 4;

	in->seq = get32(tcp + 4);
	in->ack = get32(tcp + 8);
	in->flags = tcp[13];
	in->payload = (uint16_t)(len - header);
	in->nsacks = 0;
	in->ts = false;
	for (unsigned i = TCP_LEN, n; i < header && tcp[i]; i += n) {
		if (tcp[i] == 1) {
			n = 1;
			continue;
		}
		if (i + 1 >= header || (n = tcp[i + 1]) < 2 || i + n > header) {
			memset(tcp + i, 0, header - i);
			return;
		}
		if (tcp[i] == 8 && n == 10) {
			in->ts = true;
			in->tsval = get32(tcp + i + 2);
			in->tsecr = get32(tcp + i + 6);
		} else if (tcp[i] == 5) {
			read_sacks(in, tcp + i, n);
		} else if (tcp[i] <= 4 && !(in->flags & TCP_SYN)) {
			memset(tcp + i, 1, n);
		}
	}
}

/* c is NULL if there is none yet */
static void to_lwip(struct vmh_tcp *t, struct vmh_tcp_conn *c, const struct seg_in *in, struct segment *s,
		    const struct key *k)
{
	struct pbuf *p = hold_segment(t, c, in, s);

	if (!p)
		return;
	ip_data.current_iphdr_src.addr = key_remote(k);
	ip_data.current_iphdr_dest.addr = key_local(k);
	ip_data.current_netif = ip_data.current_input_netif = &t->netif;
	tcp_input(p, &t->netif);
	hold_done(t, s);
}

/* Answered by an ACK, and if the peer thinks the same of that one, they go on for ever; or by a challenge (RFC 5961). So, as
 * in Linux, not more often than tcp_invalid_ratelimit. *counted: this one is answered. */
static bool storm(struct vmh_tcp_conn *c, const struct seg_in *in, bool *counted)
{
	const struct tcp_pcb *pcb = c->pcb;
	bool within = TCP_SEQ_BETWEEN(in->seq, pcb->rcv_nxt, pcb->rcv_nxt + pcb->rcv_wnd), answered;

	if (in->flags & TCP_RST)
		answered = within && in->seq != pcb->rcv_nxt;
	else
		answered = in->flags & TCP_SYN || (!in->payload && !(in->flags & TCP_FIN) && !within);
	if (pcb->state < ESTABLISHED || !answered)
		return false;
	if (c->t->now - c->answered_at < INVALID_US)
		return true;
	c->answered_at = c->t->now;
	*counted = true;
	return false;
}

/* At most as often as storm() allows. */
static void tell_right_one(struct vmh_tcp_conn *c)
{
	if (c->t->now - c->answered_at < INVALID_US)
		return;
	c->answered_at = c->t->now;
	tcp_send_empty_ack(c->pcb);
}

/* Of what somebody has begun to open here: outside of the window, as Linux. A SYN that comes again is answered as before. */
static bool is_beside_syn(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	const struct tcp_pcb *pcb = c->pcb;
	uint32_t end = in->seq + in->payload + !!(in->flags & TCP_SYN) + !!(in->flags & TCP_FIN);

	if (!c->parent || pcb->state != SYN_RCVD || in->flags & TCP_RST ||
	    (in->flags & TCP_SYN && in->seq + 1 == pcb->rcv_nxt) ||
	    in->seq == pcb->rcv_nxt || (TCP_SEQ_GT(end, pcb->rcv_nxt) && TCP_SEQ_LT(in->seq, pcb->rcv_nxt + pcb->rcv_wnd)))
		return false;
	tell_right_one(c);
	return true;
}

/* What nobody sends who knows the connection: without an ACK (RFC 9293, 3.10.7.4), or with one of what the peer has
 * acknowledged long ago, or never had (RFC 5961, 5.2), or what was never sent, to which it is told the right one. Of what
 * is opening yet: with the right one and without a SYN (RFC 9293, 3.10.7.3), where lwIP would refuse it. Inside. */
static bool is_guessed(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	struct tcp_pcb *pcb = c->pcb;
	bool fin = pcb->state == FIN_WAIT_2 || pcb->state == TIME_WAIT; /* ours is acknowledged */
	uint64_t acked = c->count.bytes_acked + fin;
	uint32_t most = pcb->snd_wnd_max, back = c->imported || acked > most ? most : (uint32_t)acked;

	if (in->flags & (TCP_SYN | TCP_RST))
		return false;
	if (pcb->state == SYN_SENT)
		return in->flags & TCP_ACK && in->ack == pcb->lastack + 1;
	if (pcb->state < ESTABLISHED)
		return false;
	if (!(in->flags & TCP_ACK))
		return true;
	if (!TCP_SEQ_LT(in->ack, pcb->lastack - back) && !TCP_SEQ_GT(in->ack, pcb->snd_nxt))
		return false;
	tell_right_one(c);
	return true;
}

/* Of a peer that has ended its stream: some do not count their FIN in a reset after it, and Linux takes that. */
static void take_late_reset(const struct tcp_pcb *pcb, struct seg_in *in, const struct segment *s)
{
	if (!(in->flags & TCP_RST) || in->seq != pcb->rcv_nxt - 1 ||
	    (pcb->state != CLOSE_WAIT && pcb->state != CLOSING && pcb->state != LAST_ACK))
		return;
	in->seq = pcb->rcv_nxt;
	memcpy(s->tcp + 4, &(uint32_t){lwip_htonl(in->seq)}, 4);
}

bool input_sum_ok(const struct vmh_tcp *t, const uint8_t *tcp, size_t len, const struct key *k)
{
	uint32_t sum = core_pseudo(k) + PP_HTONS(IPPROTO_TCP) + lwip_htons((u16_t)len);
	uint16_t said;

	if (!t->env.verify)
		return true;
	memcpy(&said, tcp + 16, 2);
	sum = (sum & 0xffff) + (sum >> 16);
	sum = (sum & 0xffff) + (sum >> 16);
	if (t->env.partial && said == sum)
		return true;
	sum += core_chksum(tcp, (int)len);
	return (sum & 0xffff) + (sum >> 16) == 0xffff;
}

/* What the program is most likely to answer at once, by its request or its own FIN, which carry the ACK. */
static bool has_company(const struct vmh_tcp_conn *c, const struct seg_in *in)
{
	const struct tcp_pcb *pcb = c->pcb;

	if (c->opt.quickack || in->payload || in->flags & TCP_RST)
		return false;
	if (pcb->state == SYN_SENT)
		return c->t->prompt && (in->flags & (TCP_SYN | TCP_ACK)) == (TCP_SYN | TCP_ACK);
	return pcb->state == ESTABLISHED && in->flags & TCP_FIN && in->seq == pcb->rcv_nxt;
}

/* Frames of a segment. */
static unsigned frames(const struct segment *s)
{
	unsigned n = 0;

	for (; s; s = s->next)
		n++;
	return n;
}

/* What comes behind a hole and goes beyond the window: lwIP keeps it whole if it has nothing else, and when the hole is
 * filled its window is below 0, hence without an end. */
static void cut_to_window(const struct tcp_pcb *pcb, struct seg_in *in, struct segment *s)
{
	uint32_t ahead = in->seq - pcb->rcv_nxt, room = pcb->rcv_wnd - ahead, len = in->payload;

	len += in->flags & TCP_FIN ? 1 : 0;
	if (pcb->state < ESTABLISHED || !ahead || ahead >= pcb->rcv_wnd || len <= room)
		return;
	if (in->payload > room) {
		s->len -= in->payload - room;
		s->payload = in->payload = (uint16_t)room;
	}
	in->flags &= (uint8_t)~TCP_FIN;
	s->tcp[13] &= (uint8_t)~TCP_FIN;
}

/* An end without data is taken where the window is shut: some do not count it (Linux since 6.16 takes it, too). */
static void let_end_in(struct tcp_pcb *pcb, const struct seg_in *in)
{
	if (in->flags & TCP_FIN && !in->payload && !pcb->rcv_wnd && in->seq == pcb->rcv_nxt && pcb->state >= ESTABLISHED)
		pcb->rcv_wnd = 1;
}

/* The window of a run is as new as its last frame; lwIP would take it for one of the first. */
static void take_window(struct tcp_pcb *pcb, const struct seg_in *in, const struct segment *s)
{
	uint32_t seq;

	while (s->next)
		s = s->next;
	seq = in->seq + in->payload - s->payload;
	if (!TCP_SEQ_LT(pcb->snd_wl1, seq))
		return;
	pcb->snd_wl1 = seq;
	pcb->snd_wl2 = in->ack;
	pcb->snd_wnd = SND_WND_SCALE(pcb, get16(s->tcp + 14));
	pcb->snd_wnd_max = LWIP_MAX(pcb->snd_wnd_max, pcb->snd_wnd);
}

/* lwIP keeps the wider one of two windows that are equally new, also where the later one is shut: a peer short of memory
 * takes it back so (Linux takes that, too). */
static void take_shut_window(struct tcp_pcb *pcb, const struct seg_in *in, const struct segment *s)
{
	if (in->flags & TCP_ACK && in->seq == pcb->snd_wl1 && in->ack == pcb->snd_wl2 && !get16(s->tcp + 14) &&
	    pcb->state >= ESTABLISHED)
		pcb->snd_wnd = 0;
}

/* RFC 9293, 3.10.7.4: only what is of this connection tells the window (where ours is shut also a peer that has sent a
 * byte to look). lwIP takes it of any segment that seems newer, and
 * after one of a former connection of that name, far ahead perhaps, of none of the peer's. */
static bool tells_window(const struct tcp_pcb *pcb, const struct seg_in *in)
{
	uint32_t end = in->seq + in->payload + (in->flags & TCP_FIN ? 1 : 0);

	return pcb->state < ESTABLISHED ||
	       (TCP_SEQ_GEQ(end, pcb->rcv_nxt) && TCP_SEQ_LEQ(in->seq, pcb->rcv_nxt + LWIP_MAX(pcb->rcv_wnd, 1)) &&
		TCP_SEQ_BETWEEN(in->ack, pcb->lastack, pcb->snd_nxt));
}

/* As Linux: what acknowledges something new tells the window, also where it comes late. lwIP would keep the old one, whose
 * end has moved by then. */
static bool tells_late(struct tcp_pcb *pcb, const struct seg_in *in)
{
	if (pcb->state < ESTABLISHED || !(in->flags & TCP_ACK) || TCP_SEQ_GT(in->seq, pcb->rcv_nxt + pcb->rcv_wnd) ||
	    TCP_SEQ_GEQ(in->seq, pcb->snd_wl1) || TCP_SEQ_LEQ(in->ack, pcb->lastack) || TCP_SEQ_GT(in->ack, pcb->snd_nxt))
		return false;
	pcb->snd_wl1 = in->seq;
	pcb->snd_wl2 = in->ack - 1;
	return true;
}

/* To lwIP, which keeps the window that it has: nothing is newer than this. */
static void to_lwip_alone(struct vmh_tcp_conn *c, const struct seg_in *in, struct segment *s)
{
	uint32_t wl1 = c->pcb->snd_wl1, wl2 = c->pcb->snd_wl2, una = c->pcb->lastack, wnd = c->pcb->snd_wnd;

	if (in->flags & TCP_ACK && TCP_SEQ_BETWEEN(in->ack, una, c->pcb->snd_nxt)) /* its end stays where it is */
		c->pcb->snd_wnd -= LWIP_MIN(in->ack - una, wnd);

	c->pcb->snd_wl1 = in->seq + 1;
	c->pcb->snd_wl2 = in->ack + 1;
	to_lwip(c->t, c, in, s, &c->key);
	if (!c->pcb)
		return;
	c->pcb->snd_wl1 = wl1;
	c->pcb->snd_wl2 = wl2;
	if (c->pcb->lastack == una)
		c->pcb->snd_wnd = wnd;
}

/* RFC 2883: bytes that came before stand in front of the SACKs of the answer, so that a peer which sent them again for nothing
 * takes back what it made of that. What of them is unread behind a hole is in a block, the second then; lwIP gets none of
 * it, and we answer. True: `sacks` are the pcb's again afterwards. */
static bool tell_twice(struct tcp_pcb *pcb, struct seg_in *in, struct segment *s, struct tcp_sack_range *sacks, bool *behind)
{
	uint32_t end = in->seq + in->payload;
	struct tcp_sack_range *r = pcb->rcv_sacks;
	unsigned i = 0, n = 0;

	if (pcb->state < ESTABLISHED || !(pcb->flags & TF_SACK) || !in->payload || s->next ||
	    (in->flags & (TCP_SYN | TCP_FIN | TCP_RST | TCP_ACK)) != TCP_ACK)
		return false;
	if (TCP_SEQ_GT(end, pcb->rcv_nxt)) {
		while (i < LWIP_TCP_MAX_SACK_NUM && LWIP_TCP_SACK_VALID(pcb, i) &&
		       (TCP_SEQ_LT(in->seq, r[i].left) || TCP_SEQ_GT(end, r[i].right)))
			i++;
		if (i == LWIP_TCP_MAX_SACK_NUM || !LWIP_TCP_SACK_VALID(pcb, i))
			return false;
		s->len -= in->payload;
		s->payload = in->payload = 0;
		*behind = true;
	}
	memcpy(sacks, r, sizeof(pcb->rcv_sacks));
	r[n++] = (struct tcp_sack_range){.left = in->seq, .right = end};
	r[n++] = sacks[i];
	for (unsigned k = 0; n < LWIP_TCP_MAX_SACK_NUM; k++)
		if (k != i)
			r[n++] = sacks[k];
	return true;
}

/* RFC 7323 section 5: older than what was seen last; an answer shows the peer where we are, and what it sent
 * again for nothing; one that brings nothing either only as often as storm() allows. counted: it does. */
static bool paws_refuses(struct vmh_tcp_conn *c, struct seg_in *in, struct segment *s, bool counted)
{
	struct tcp_sack_range sacks[LWIP_TCP_MAX_SACK_NUM];
	struct tcp_pcb *pcb = c->pcb;
	bool twice, behind;

	if (!in->ts || !(pcb->flags & TF_TIMESTAMP) || pcb->state < ESTABLISHED || in->flags & TCP_RST)
		return false;
	/* 0: never heard, after an import; the kernel did not tell (tcp_state.h) */
	if (!pcb->ts_recent || TCP_SEQ_GEQ(in->tsval, pcb->ts_recent) || c->t->now - c->heard_at > TS_VALID_US)
		return false;
	c->t->stats.paws++;
	if (!in->payload && !counted) {
		if (c->t->now - c->answered_at < INVALID_US)
			return true;
		c->answered_at = c->t->now;
	}
	twice = tell_twice(pcb, in, s, sacks, &behind);
	tcp_send_empty_ack(pcb);
	if (twice)
		memcpy(pcb->rcv_sacks, sacks, sizeof(sacks));
	return true;
}

/* lwIP's blocks leave out the FIN behind a hole: of one that is alone there the peer would learn nothing, and wait for its
 * timer. lwIP has answered, so it is said once more. */
static void tell_fin(struct tcp_pcb *pcb)
{
	const struct tcp_seg *last = pcb->ooseq;
	struct tcp_sack_range *r = pcb->rcv_sacks, *end = r + LWIP_TCP_MAX_SACK_NUM;

	if (!last || !(pcb->flags & TF_SACK))
		return;
	while (last->next)
		last = last->next;
	if (!(TCPH_FLAGS(last->tcphdr) & TCP_FIN))
		return;
	while (r < end && r->right != last->tcphdr->seqno + last->len)
		r++;
	if (r == end)
		return;
	r->right++;
	tcp_send_empty_ack(pcb);
}

/* A frame of several segments, which counts as two at least. True: what the peer sends is bulk, and the kernel's. */
static bool count_long(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	tcp_set_flags(c->pcb, TF_ACK_DELAY);
	c->long_in = (c->out_then == c->count.data_segs_out ? c->long_in : 0) + in->payload;
	return c->long_in >= LONG_MOST;
}

#define QUICK_ACKS 16

/* As Linux at the begin: until the program has answered. */
static bool is_quick(const struct vmh_tcp_conn *c)
{
	return !c->answered && c->count.data_segs_in < QUICK_ACKS;
}

/* Says whether the ACK of this segment is to go at once (TF_ACK_DELAY); else the second one's is. True: it goes soon. */
static bool count_segment(struct vmh_tcp_conn *c, const struct seg_in *in, unsigned n)
{
	uint32_t whole = c->pcb->mss - OPTIONS_MOST;
	bool one_way, first, late;

	c->count.segs_in += n;
	if (!in->payload)
		return false;
	if (TCP_SEQ_GT(in->seq, c->pcb->rcv_nxt) && c->pcb->state >= ESTABLISHED)
		c->count.ooo_in += n;
	c->answered |= c->count.data_segs_in && c->out_then != c->count.data_segs_out;
	/* no answer went out since the last data, so none may carry the ACK; and the peer's Nagle may wait for it */
	one_way = c->out_then == c->count.data_segs_out && in->payload < (is_quick(c) ? whole : c->pcb->mss / 2);
	/* a request, whose answer carries the ACK, or the head of an answer, for whose ACK the peer's Nagle may wait */
	first = !c->count.data_segs_in && n == 1 && !c->opt.quickack;
	/* after a pause, perhaps sent again: the peer may have nothing else under way until it is acknowledged */
	late = in->payload >= whole && c->t->now - c->received_at > PAUSE_US;
	c->count.data_segs_in += n;
	if (n == 1 && in->payload > c->pcb->mss && count_long(c, in) && !c->long_frames)
		c->long_frames = c->changed = true;
	c->received_at = c->t->now;
	c->out_then = c->count.data_segs_out;
	if (c->opt.quickack || (one_way && !first) || n > 1 || late)
		tcp_set_flags(c->pcb, TF_ACK_DELAY); /* so that this one is answered at once */
	return first;
}

/* New data for a program that neither reads nor writes any more: RFC 1122, 4.2.2.13, where Linux has it, also behind a hole,
 * or an end that is behind one.
 * lwIP would do so without an error for the program, and without a reset for data that comes with a FIN. */
static bool unwanted(const struct vmh_tcp_conn *c, const struct seg_in *in)
{
	const struct tcp_pcb *pcb = c->pcb;

	return c->shut_wr && (c->shut_rd || c->app_closed) && !c->eof && (in->payload || in->flags & TCP_FIN) &&
	       (in->flags & (TCP_ACK | TCP_SYN | TCP_RST)) == TCP_ACK &&
	       TCP_SEQ_GT(in->seq + in->payload, pcb->rcv_nxt) && TCP_SEQ_LEQ(in->seq, pcb->rcv_nxt + pcb->rcv_wnd);
}

/* New data, of which some is urgent. */
static bool brings_urgent(const struct tcp_pcb *pcb, const struct seg_in *in)
{
	return in->flags & TCP_URG && in->payload && pcb->state >= ESTABLISHED &&
	       TCP_SEQ_GT(in->seq + in->payload, pcb->rcv_nxt) && TCP_SEQ_LT(in->seq, pcb->rcv_nxt + pcb->rcv_wnd);
}

#define KEPT_MAX 65536 /* bytes: what comes until the connection is somebody else's */

/* For who gets the connection: the peer may reset it instead of sending that again, which is where nobody expects it then;
 * and what Linux sends again has its urgent pointer where it was, though it begins elsewhere. */
static void keep(struct vmh_tcp_conn *c, const struct segment *s)
{
	size_t len = (size_t)(s->tcp + s->len - s->frame);
	struct kept *k = c->kept_bytes + len <= KEPT_MAX ? vmh_heap_get(sizeof(*k) + len) : NULL;
	struct kept **end = &c->kept;

	c->urgent = c->changed = true;
	if (!k) {
		c->kept_full = true;
		return;
	}
	k->next = NULL;
	k->len = len;
	memcpy(k->frame, s->frame, len);
	while (*end)
		end = &(*end)->next;
	*end = k;
	c->kept_bytes += len;
}

/* Inside. The peer takes a reset at once that is where it expects the next byte. */
static void reset_unwanted(struct vmh_tcp_conn *c, const struct seg_in *in)
{
	core_send_segment(c->t, &c->path, &c->key, in->ack, 0, TCP_RST, 0, 0, false);
	core_drop(c, ECONNRESET, false);
}

static void tell_talkers(const struct vmh_tcp *t)
{
	if (t->env.talkers)
		t->env.talkers(t->env.ctx, t->talkers.now > t->talkers.before ? t->talkers.now : t->talkers.before);
}

/* Periods are counted, not compared with heard_at: that of a connection which came from the kernel is not its own. */
static inline void count_talker(struct vmh_tcp *t, struct vmh_tcp_conn *c)
{
	if (t->now >= t->talkers.until) {
		t->talkers.before = t->now - t->talkers.until < LATELY_US ? t->talkers.now : 0;
		t->talkers.now = 0;
		t->talkers.period++;
		t->talkers.until = t->now + LATELY_US;
	}
	if (c->talked == t->talkers.period)
		return;
	c->talked = t->talkers.period;
	t->talkers.now++;
	tell_talkers(t);
}

bool input_count(struct vmh_tcp_conn *c, const struct seg_in *in, unsigned n)
{
	c->heard_at = c->t->now;
	count_talker(c->t, c);
	c->keep_sent = 0;
	return count_segment(c, in, n);
}

void input_segment(struct vmh_tcp_conn *c, struct segment *s)
{
	struct vmh_tcp *t = c->t;
	struct tcp_sack_range sacks[LWIP_TCP_MAX_SACK_NUM];
	struct seg_in in;
	uint32_t una = c->una, acked;
	bool first, tells, twice, holes, behind = false, counted = false;

	read_segment(s->tcp, s->len, &in);
	if (s->next)
		in.payload = s->payload;
	s->payload = in.payload;
	if (c->parent && c->pcb->state == SYN_RCVD && !(in.flags & (TCP_SYN | TCP_RST)) &&
	    c->parent->listening->ready.n > c->parent->listening->backlog) {
		t->stats.accept_dropped++; /* the peer sends again, and there may be room then */
		return;
	}
	core_enter(t, c);
	take_late_reset(c->pcb, &in, s);
	if (is_guessed(c, &in) || is_beside_syn(c, &in) || storm(c, &in, &counted) || paws_refuses(c, &in, s, counted)) {
		core_leave(t, c);
		return;
	}
	if (unwanted(c, &in)) {
		reset_unwanted(c, &in);
		core_leave(t, c);
		return;
	}
	if (brings_urgent(c->pcb, &in) || (c->urgent && in.payload && !c->kept_full && !s->next)) {
		keep(c, s);
		core_leave(t, c);
		return;
	}
	cut_to_window(c->pcb, &in, s);
	first = input_count(c, &in, frames(s));
	c->hold_ack = has_company(c, &in);
	tells = tells_late(c->pcb, &in) || tells_window(c->pcb, &in);
	if (tells && s->next)
		take_window(c->pcb, &in, s);
	else if (tells)
		take_shut_window(c->pcb, &in, s);
	recovery_before(c, &in);
	twice = tell_twice(c->pcb, &in, s, sacks, &behind);
	holes = c->pcb->ooseq;
	let_end_in(c->pcb, &in);
	if (tells)
		to_lwip(t, c, &in, s, &c->key);
	else
		to_lwip_alone(c, &in, s);
	if (c->pcb && behind)
		tcp_send_empty_ack(c->pcb);
	if (c->pcb && twice)
		memcpy(c->pcb->rcv_sacks, sacks, sizeof(sacks));
	if (c->pcb && in.flags & TCP_FIN)
		tell_fin(c->pcb);
	/* one that fills a hole is acknowledged at once (RFC 5681, 4.2): the sender takes what stays away for lost */
	if (c->pcb && (c->held_ack || ((first || holes) && c->pcb->flags & TF_ACK_DELAY)))
		core_ack_soon(c);
	c->hold_ack = c->held_ack = false;
	if (c->pcb && c->pcb->mss > c->path.mtu - key_headers(&c->key)) /* from a second SYN */
		c->pcb->mss = (u16_t)(c->path.mtu - key_headers(&c->key));
	if (c->pcb && c->pcb->state >= ESTABLISHED && c->pcb->state != TIME_WAIT) {
		acked = c->pcb->lastack - una;
		recovery_ack(c, &in, acked, c->pcb->dupacks != 0 && !acked);
	}
	core_leave(t, c);
}

/* Inside. */
static void to_listening_pcb(struct vmh_tcp_conn *l, const struct seg_in *in, struct segment *s, const struct key *k)
{
	tcp_listen_pcbs.listen_pcbs = l->listening->pcb;
	l->listening->pcb->next = NULL;
	to_lwip(l->t, NULL, in, s, k);
	tcp_listen_pcbs.listen_pcbs = NULL;
}

/* The peer's SYN comes a second time, for a connection that its ACK, s, makes a whole one at once. */
static int to_cookie(struct vmh_tcp_conn *l, struct syn *syn, const struct seg_in *in, struct segment *s, const struct key *k)
{
	struct segment first = {.tcp = syn->tcp, .len = (uint32_t)syn->len};
	const struct seg_in none = {0};
	struct vmh_tcp *t = l->t;
	struct vmh_tcp_conn *c;

	if (l->listening->ready.n > l->listening->backlog) {
		t->stats.accept_dropped++;
		return 0;
	}
	core_enter(t, NULL);
	t->recalling = true;
	t->isn_floor = in->ack - 1;
	to_listening_pcb(l, &none, &first, k);
	t->recalling = false;
	core_leave(t, NULL);
	c = demux_find(t, k);
	if (!c) /* no memory */
		return 0;
	c->rtt_at = 0; /* our answer went out before */
	input_segment(c, s);
	return s->kept;
}

/* A SYN came twice, and was answered by a cookie, then as half open, c. True: the peer answers the cookie. */
static bool answers_cookie(struct vmh_tcp_conn *c, const struct segment *s, struct seg_in *in, struct syn *syn)
{
	if (!c->parent || c->pcb->state != SYN_RCVD)
		return false;
	read_segment(s->tcp, s->len, in);
	if (in->ack == c->pcb->snd_nxt)
		return false;
	c->t->now = c->t->env.now_ns(c->t->env.ctx) / 1000;
	return cookie_syn(c->parent, &c->key, s->tcp, in, syn);
}

/* The cookie's connection takes the place of c. */
static int instead(struct vmh_tcp_conn *c, struct syn *syn, const struct seg_in *in, struct segment *s)
{
	struct vmh_tcp_conn *l = c->parent;
	struct vmh_tcp *t = c->t;
	const struct key k = c->key;

	t->in = k;
	t->reply = c->path;
	core_enter(t, c);
	core_drop(c, ETIMEDOUT, false);
	core_leave(t, c);
	return to_cookie(l, syn, in, s, &k);
}

int input_conn(struct vmh_tcp_conn *c, struct segment *s)
{
	struct seg_in in;
	struct syn syn;

	if (c->frozen)
		return -EBUSY;
	if (!input_sum_ok(c->t, s->tcp, s->len, &c->key)) {
		c->t->stats.bad++;
		return 0;
	}
	if (fast_input(c, s))
		return s->kept;
	if (answers_cookie(c, s, &in, &syn))
		return instead(c, &syn, &in, s);
	input_segment(c, s);
	return s->kept;
}

/* RFC 6191: the SYN of another connection. Of one that went home the kernel would have it, if it were not over. */
static bool is_newer(const struct tw *w, const struct seg_in *in)
{
	if (w->moved)
		return true;
	if (w->ts && in->ts && in->tsval != w->ts_recent)
		return TCP_SEQ_GT(in->tsval, w->ts_recent);
	return TCP_SEQ_GT(in->seq, w->rcv_nxt);
}

static int to_tw(struct vmh_tcp *t, struct tw *w, uint8_t *tcp, size_t len)
{
	struct seg_in in;

	read_segment(tcp, len, &in);
	if (in.flags & TCP_RST) { /* as Linux without tcp_rfc1337: who asks for the name anew gets it */
		if (!w->moved && in.seq == w->rcv_nxt)
			demux_tw_remove(t, w);
		return 0;
	}
	if (w->moved && !(in.flags & TCP_SYN))
		return 0;
	if (in.flags & TCP_SYN && !(in.flags & TCP_ACK) && demux_listener(t, &w->key.laddr, w->key.lport) && is_newer(w, &in)) {
		t->reusing = true;
		t->isn_floor = w->snd_nxt + REUSE_GAP;
		demux_tw_remove(t, w);
		return -ENOENT;
	}
	if (!w->moved && in.flags & TCP_ACK && (in.payload || in.flags & TCP_FIN))
		demux_tw_renew(t, w);
	if (!w->moved && (in.payload || in.flags & (TCP_FIN | TCP_SYN)))
		core_send_segment(t, &w->path, &w->key, w->snd_nxt, w->rcv_nxt, TCP_ACK,
				  (uint32_t)(t->now / 1000) + w->ts_offset, w->ts_recent, w->ts);
	return 0;
}

static void refuse(struct vmh_tcp *t, uint8_t *tcp, size_t len, const struct key *k)
{
	struct seg_in in;

	read_segment(tcp, len, &in);
	if (in.flags & TCP_RST)
		return;
	if (in.flags & TCP_ACK)
		core_send_segment(t, &t->reply, k, in.ack, 0, TCP_RST, 0, 0, false);
	else
		core_send_segment(t, &t->reply, k, 0, in.seq + in.payload + !!(in.flags & TCP_SYN) + !!(in.flags & TCP_FIN),
				  TCP_RST | TCP_ACK, 0, 0, false);
}

static int to_nobody(struct vmh_tcp *t, uint8_t *tcp, size_t len, const struct key *k)
{
	t->stats.no_conn++;
	if (!t->env.reset_unknown)
		return -ENOENT;
	refuse(t, tcp, len, k);
	return 0;
}

void core_refuse(struct vmh_tcp *t, void *frame, size_t len)
{
	struct key k;
	size_t tcp_len;
	uint8_t *tcp = input_find(frame, len, &tcp_len, &k);

	if (!tcp)
		return;
	t->now = t->env.now_ns(t->env.ctx) / 1000;
	t->in = k;
	memcpy(t->reply.dmac, (uint8_t *)frame + 6, 6);
	memcpy(t->reply.smac, frame, 6);
	refuse(t, tcp, tcp_len, &k);
}

static bool is_astray(const struct vmh_tcp *t, const struct seg_in *in, const struct key *k)
{
	return (in->flags & (TCP_SYN | TCP_ACK)) == TCP_SYN && t->env.no_way_back &&
	       t->env.no_way_back(t->env.ctx, &k->laddr, &k->raddr);
}

static int to_listener(struct vmh_tcp_conn *l, struct segment *s, const struct key *k)
{
	struct vmh_tcp *t = l->t;
	enum fate what = SYN_TAKEN;
	struct seg_in in;
	struct syn syn;

	read_segment(s->tcp, s->len, &in);
	if (in.flags & TCP_RST || (in.flags & (TCP_SYN | TCP_FIN | TCP_ACK)) == (TCP_SYN | TCP_FIN)) /* as Linux */
		return 0;
	if (is_astray(t, &in, k)) {
		t->stats.syn_dropped++;
		return 0;
	}
	if (cookie_syn(l, k, s->tcp, &in, &syn))
		return to_cookie(l, &syn, &in, s, k);
	s->payload = in.payload;
	s->token = NULL;
	core_enter(t, NULL);
	if ((in.flags & (TCP_SYN | TCP_ACK)) == TCP_SYN)
		what = demux_syn(l);
	if (what == SYN_TAKEN)
		to_listening_pcb(l, &in, s, k);
	else if (what == SYN_COOKIE)
		cookie_send(l, k, s->tcp, &in);
	else
		t->stats.syn_dropped++;
	core_leave(t, NULL);
	return 0;
}

/* Of a frame that was too long for the ring the headers come, of one in fragments the first (bpf/vmh_rule.h). The data is
 * lost, and so will be all that the peer sends in such a way: another stack has to take this connection. */
static int no_segment(struct vmh_tcp *t, void *frame, size_t len)
{
	struct vmh_tcp_conn *c;
	size_t tcp_len;
	struct key k;
	uint8_t *tcp = find_header(frame, len, &tcp_len, &k);
	uint32_t seq = tcp ? get32(tcp + 4) : 0;

	c = tcp ? demux_find(t, &k) : NULL;
	if (!c || c->frozen || !c->pcb || c->pcb->state < ESTABLISHED ||
	    !TCP_SEQ_BETWEEN(seq, c->pcb->rcv_nxt - 0xffff, c->pcb->rcv_nxt + c->pcb->rcv_wnd)) {
		t->stats.bad++;
		return tcp && !c ? -ENOENT : -EBADMSG;
	}
	*(tcp_len == IN_FRAGMENTS ? &c->fragments : &c->long_frames) = c->changed = true;
	core_enter(t, c);
	core_leave(t, c);
	return 0;
}

int core_input(struct vmh_tcp *t, void *frame, size_t len, void *token)
{
	struct vmh_tcp_conn *c;
	struct tw *w;
	struct key k;
	size_t tcp_len;
	uint8_t *tcp = input_find(frame, len, &tcp_len, &k);
	struct segment s;
	int r;

	t->stats.in++;
	if (!tcp)
		return no_segment(t, frame, len);
	s = (struct segment){.frame = frame, .tcp = tcp, .len = (uint32_t)tcp_len, .token = token};
	c = demux_find(t, &k);
	if (c)
		return input_conn(c, &s);
	if (!input_sum_ok(t, tcp, tcp_len, &k)) {
		t->stats.bad++;
		return -EBADMSG;
	}
	t->now = t->env.now_ns(t->env.ctx) / 1000;
	t->in = k;
	memcpy(t->reply.dmac, (uint8_t *)frame + 6, 6);
	memcpy(t->reply.smac, frame, 6);
	w = demux_tw(t, &k);
	if (w && to_tw(t, w, tcp, tcp_len) == 0)
		return 0;
	c = demux_listener(t, &k.laddr, k.lport);
	r = c ? to_listener(c, &s, &k) : to_nobody(t, tcp, tcp_len, &k);
	t->reusing = false;
	return r;
}
