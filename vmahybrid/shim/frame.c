/* Ethernet + IPv4 + UDP frames: made from a template, and parsed. Pure functions.
 *
 * Checksums are one's complement sums of 16-bit words in memory order, which makes them independent of
 * the host's byte order (RFC 1071); only what is put in as a number is converted.
 */
#include "vmh_ring.h"
#include <arpa/inet.h>

#define ETH_LEN 14
#define IP_LEN 20
#define UDP_LEN 8
#define HDR_LEN (ETH_LEN + IP_LEN + UDP_LEN)
_Static_assert(HDR_LEN == sizeof(((struct vmh_frame_hdr *)0)->bytes), "template length");

#define OFF_IP_TOTAL 16
#define OFF_IP_ID 18
#define OFF_IP_FRAG 20
#define OFF_IP_SUM 24
#define OFF_UDP 34
#define OFF_UDP_LEN 38
#define OFF_UDP_SUM 40

#define IP_DF 0x4000
#define IP_FRAGMENT_MASK 0x3fff /* more fragments, or an offset */

static inline uint16_t load16(const unsigned char *p)
{
	uint16_t v;
	memcpy(&v, p, sizeof(v));
	return v;
}

static inline void store16(unsigned char *p, uint16_t v)
{
	memcpy(p, &v, sizeof(v));
}

static inline uint16_t fold(uint64_t s)
{
	s = (s & 0xffffffff) + (s >> 32);
	s = (s & 0xffffffff) + (s >> 32);
	s = (s & 0xffff) + (s >> 16);
	s = (s & 0xffff) + (s >> 16);
	return (uint16_t)s;
}

typedef uint64_t v2u64 __attribute__((vector_size(16)));

static inline uint64_t add_word64(const unsigned char *p)
{
	uint64_t w;
	memcpy(&w, p, sizeof(w));
	return (w & 0xffffffff) + (w >> 32);
}

/* fewer than 16 bytes */
static inline uint64_t sum_tail(const unsigned char *p, size_t len)
{
	uint64_t s = 0;
	uint32_t w4;
	uint16_t w2 = 0;

	if (len & 8) {
		s += add_word64(p);
		p += 8;
	}
	if (len & 4) {
		memcpy(&w4, p, sizeof(w4));
		s += w4;
		p += 4;
	}
	if (len & 2) {
		s += load16(p);
		p += 2;
	}
	if (len & 1) {
		memcpy(&w2, p, 1);
		s += w2;
	}
	return s;
}

/* Sum of up to 64 KiB; 32-bit halves in 64-bit lanes can't overflow. */
VMH_HOT static uint64_t sum_bytes(const unsigned char *p, size_t len)
{
	const v2u64 low = {0xffffffff, 0xffffffff};
	v2u64 a = {0, 0}, b = {0, 0}, v, w;

	for (; len >= 32; len -= 32, p += 32) {
		memcpy(&v, p, 16);
		memcpy(&w, p + 16, 16);
		a += (v & low) + (v >> 32);
		b += (w & low) + (w >> 32);
	}
	if (len & 16) {
		memcpy(&v, p, 16);
		a += (v & low) + (v >> 32);
		p += 16;
	}
	a += b;
	return a[0] + a[1] + sum_tail(p, len & 15);
}

void vmh_frame_hdr_init(struct vmh_frame_hdr *h, const unsigned char dmac[6], const unsigned char smac[6],
			in_addr_t saddr, in_addr_t daddr, in_port_t sport, in_port_t dport, uint8_t ttl, uint8_t tos,
			bool dont_fragment)
{
	unsigned char *ip = h->bytes + ETH_LEN, *udp = h->bytes + OFF_UDP;

	memset(h, 0, sizeof(*h));
	memcpy(h->bytes, dmac, 6);
	memcpy(h->bytes + 6, smac, 6);
	store16(h->bytes + 12, htons(0x0800));
	ip[0] = 0x45;
	ip[1] = tos;
	store16(h->bytes + OFF_IP_FRAG, htons(dont_fragment ? IP_DF : 0));
	ip[8] = ttl;
	ip[9] = IPPROTO_UDP;
	memcpy(ip + 12, &saddr, 4);
	memcpy(ip + 16, &daddr, 4);
	memcpy(udp, &sport, 2);
	memcpy(udp + 2, &dport, 2);
	h->ip_sum_base = fold(sum_bytes(ip, IP_LEN));
	h->pseudo_sum = fold(sum_bytes(ip + 12, 8) + htons(IPPROTO_UDP) + sport + dport);
}

/* Copies and sums in one pass: measured 5 to 35 % faster than memcpy and sum_bytes, at all sizes. */
static uint64_t copy_sum(unsigned char *to, const unsigned char *from, size_t len)
{
	const v2u64 low = {0xffffffff, 0xffffffff};
	v2u64 a = {0, 0}, b = {0, 0}, v, w;

	for (; len >= 32; len -= 32, from += 32, to += 32) {
		memcpy(&v, from, 16);
		memcpy(&w, from + 16, 16);
		memcpy(to, &v, 16);
		memcpy(to + 16, &w, 16);
		a += (v & low) + (v >> 32);
		b += (w & low) + (w >> 32);
	}
	if (len & 16) {
		memcpy(&v, from, 16);
		memcpy(to, &v, 16);
		a += (v & low) + (v >> 32);
		from += 16;
		to += 16;
	}
	a += b;
	memcpy(to, from, len & 15);
	return a[0] + a[1] + sum_tail(to, len & 15);
}

/* Bytes missing in iov: true. */
static bool gather(unsigned char *to, const struct iovec *iov, int n, size_t len)
{
	for (int i = 0; i < n && len; i++) {
		size_t part = iov[i].iov_len < len ? iov[i].iov_len : len;

		if (part) /* a NULL base is allowed with length 0, but not for memcpy */
			memcpy(to, iov[i].iov_base, part);
		to += part;
		len -= part;
	}
	return len != 0;
}

size_t vmh_frame_build(unsigned char *to, const struct vmh_frame_hdr *h, uint16_t id, const struct iovec *iov, int n,
		       size_t len)
{
	uint16_t ip_len = htons((uint16_t)(IP_LEN + UDP_LEN + len)), udp_len = htons((uint16_t)(UDP_LEN + len)), sum;
	uint64_t ip_sum = (uint64_t)h->ip_sum_base + ip_len, payload;

	memcpy(to, h->bytes, HDR_LEN);
	if (vmh_likely(n == 1 && iov->iov_len >= len)) {
		payload = len ? copy_sum(to + HDR_LEN, iov->iov_base, len) : 0;
	} else {
		if (gather(to + HDR_LEN, iov, n, len))
			return 0;
		payload = sum_bytes(to + HDR_LEN, len);
	}
	store16(to + OFF_IP_TOTAL, ip_len);
	if (!(h->bytes[OFF_IP_FRAG] & (IP_DF >> 8))) {
		store16(to + OFF_IP_ID, htons(id));
		ip_sum += htons(id);
	}
	store16(to + OFF_IP_SUM, (uint16_t)~fold(ip_sum));
	store16(to + OFF_UDP_LEN, udp_len);
	/* the length counts twice: in the pseudo header and in the UDP header */
	sum = (uint16_t)~fold(payload + h->pseudo_sum + udp_len + udp_len);
	store16(to + OFF_UDP_SUM, sum ? sum : 0xffff); /* 0 would mean "no checksum" (RFC 768) */
	return HDR_LEN + len;
}

static inline bool is_vlan(uint16_t type)
{
	return type == htons(0x8100) || type == htons(0x88a8);
}

static bool udp_sum_ok(const unsigned char *ip, const unsigned char *udp, size_t udp_len)
{
	if (load16(udp + 6) == 0)
		return true;
	return fold(sum_bytes(ip + 12, 8) + htons(IPPROTO_UDP) + htons((uint16_t)udp_len) + sum_bytes(udp, udp_len)) ==
	       0xffff;
}

/* As in __ip_options_compile() of Linux: well-formed, and no source route (accept_source_route is off by default). */
VMH_COLD static bool options_ok(const unsigned char *p, const unsigned char *end)
{
	while (p < end && *p != 0) {
		if (*p == 1) {
			p++;
			continue;
		}
		if (end - p < 2 || p[1] < 2 || p[1] > end - p || *p == 131 || *p == 137)
			return false;
		p += p[1];
	}
	return true;
}

/* Sources that no host has, or that would be this one: the kernel drops them too (ip_route_input_slow(),
 * ip_mc_validate_source()). A program may trust 127.0.0.1. */
static inline bool martian(const unsigned char *ip)
{
	unsigned char a = ip[12];

	if (vmh_likely(a != 0 && a != 127 && a < 224))
		return memcmp(ip + 12, ip + 16, 4) == 0;
	if (a == 0)
		return memcmp(ip + 16, "\340\0\0", 3) != 0; /* 224.0.0.x may come from a host without an address */
	return a < 240 || memcmp(ip + 12, "\377\377\377\377", 4) == 0;
}

int vmh_frame_parse(const unsigned char *frame, size_t len, bool verify, struct vmh_buf *b)
{
	const unsigned char *ip, *udp;
	size_t off = ETH_LEN, ip_hdr, ip_total, udp_len;
	uint16_t type;

	if (vmh_unlikely(len < HDR_LEN)) /* so two tags and the first words of IP are there; ip_total tells the rest */
		return -EBADMSG;
	type = load16(frame + 12);
	for (int tags = 0; vmh_unlikely(is_vlan(type)); tags++) {
		if (tags == 2 || (load16(frame + off) & htons(0x0fff))) /* a VLAN device's; VID 0 is only a priority */
			return -EBADMSG;
		type = load16(frame + off + 2);
		off += 4;
	}
	ip = frame + off;
	ip_hdr = (size_t)(ip[0] & 15) * 4;
	ip_total = ntohs(load16(ip + 2));
	if (vmh_unlikely(type != htons(0x0800) || ip[0] >> 4 != 4 || ip_hdr < IP_LEN || ip_total < ip_hdr + UDP_LEN ||
			 ip_total > len - off))
		return -EBADMSG;
	if (vmh_unlikely(ip[9] != IPPROTO_UDP || (load16(ip + 6) & htons(IP_FRAGMENT_MASK)) ||
			 fold(sum_bytes(ip, ip_hdr)) != 0xffff))
		return -EBADMSG;
	if (vmh_unlikely(martian(ip) || (ip_hdr != IP_LEN && !options_ok(ip + IP_LEN, ip + ip_hdr))))
		return -EBADMSG;
	udp = ip + ip_hdr;
	udp_len = ntohs(load16(udp + 4));
	if (vmh_unlikely(udp_len < UDP_LEN || udp_len > ip_total - ip_hdr))
		return -EBADMSG;
	if (verify && !udp_sum_ok(ip, udp, udp_len))
		return -EBADMSG;
	b->data = udp + UDP_LEN;
	b->len = (uint32_t)(udp_len - UDP_LEN);
	memcpy(&b->saddr, ip + 12, 4);
	memcpy(&b->daddr, ip + 16, 4);
	memcpy(&b->sport, udp, 2);
	memcpy(&b->dport, udp + 2, 2);
	b->ttl = ip[8];
	b->tos = ip[1];
	b->multicast = (ip[16] & 0xf0) == 0xe0;
	return 0;
}
