/* Frames composed, parsed back, and broken in every place. */
#include "check.h"
#include "vmh_ring.h"
#include <arpa/inet.h>
#include <stdlib.h>

#define MAX_PAYLOAD 1472

static const unsigned char dmac[6] = {0x02, 1, 2, 3, 4, 5}, smac[6] = {0x02, 0x10, 0x20, 0x30, 0x40, 0x50};
static unsigned char payload[65536];

/* RFC 1071 as written down there; shares nothing with frame.c */
static uint16_t reference_sum(const unsigned char *p, size_t len, uint32_t start)
{
	uint32_t sum = start;

	for (size_t i = 0; i + 1 < len; i += 2)
		sum += (uint32_t)(p[i] << 8 | p[i + 1]);
	if (len & 1)
		sum += (uint32_t)(p[len - 1] << 8);
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)sum;
}

static unsigned get16(const unsigned char *p)
{
	return (unsigned)(p[0] << 8 | p[1]);
}

static void put16(unsigned char *p, unsigned v)
{
	p[0] = (unsigned char)(v >> 8);
	p[1] = (unsigned char)v;
}

/* Both checksums made good again after the frame was changed; ip points to the IP header. */
static void repair(unsigned char *ip)
{
	size_t ihl = (size_t)(ip[0] & 15) * 4;
	unsigned char *udp = ip + ihl;
	unsigned udp_len = get16(udp + 4);

	put16(ip + 10, 0);
	put16(ip + 10, (uint16_t)~reference_sum(ip, ihl, 0));
	put16(udp + 6, 0);
	put16(udp + 6, (uint16_t)~reference_sum(udp, udp_len, reference_sum(ip + 12, 8, 17 + udp_len)));
}

static struct vmh_frame_hdr template(bool df)
{
	struct vmh_frame_hdr h;

	vmh_frame_hdr_init(&h, dmac, smac, inet_addr("10.1.2.3"), inet_addr("10.200.0.9"), htons(4000), htons(53), 63, 0xb8,
			   df);
	return h;
}

static void check_sums(const unsigned char *frame, size_t len, const char *what, size_t payload_len)
{
	const unsigned char *ip = frame + 14, *udp = frame + 34;
	size_t udp_len = len - 34;

	CHECK(reference_sum(ip, 20, 0) == 0xffff, "IP sum, %s %zu", what, payload_len);
	CHECK(get16(udp + 6) != 0, "UDP sum is 0, %s %zu", what, payload_len);
	CHECK(reference_sum(udp, udp_len, reference_sum(ip + 12, 8, 17 + (uint32_t)udp_len)) == 0xffff,
	      "UDP sum, %s %zu", what, payload_len);
}

static void check_round_trip(bool df, size_t len, const struct iovec *iov, int n, const char *what)
{
	static unsigned char frame[42 + 65536];
	struct vmh_frame_hdr h = template(df);
	struct vmh_buf b = {.len = 77777};
	size_t size;

	memset(frame, 0xee, sizeof(frame));
	size = vmh_frame_build(frame, &h, 0x1234, iov, n, len);
	CHECK(size == 42 + len, "%s %zu: size %zu", what, len, size);
	CHECK(frame[42 + len] == 0xee, "%s %zu: written behind the frame", what, len);
	CHECK(!memcmp(frame, dmac, 6) && !memcmp(frame + 6, smac, 6) && get16(frame + 12) == 0x800, "%s Ethernet", what);
	CHECK(get16(frame + 16) == 28 + len && get16(frame + 38) == 8 + len, "%s %zu: lengths", what, len);
	CHECK(get16(frame + 18) == (df ? 0 : 0x1234) && get16(frame + 20) == (df ? 0x4000 : 0), "%s %zu: id, DF", what, len);
	check_sums(frame, size, what, len);
	CHECK(vmh_frame_parse(frame, size, true, &b) == 0, "%s %zu: parse", what, len);
	CHECK(b.len == len && b.data == frame + 42 && !memcmp(b.data, payload, len), "%s %zu: payload", what, len);
	CHECK(b.saddr == inet_addr("10.1.2.3") && b.daddr == inet_addr("10.200.0.9") && b.sport == htons(4000) &&
		      b.dport == htons(53) && b.ttl == 63 && b.tos == 0xb8 && !b.multicast,
	      "%s %zu: addresses", what, len);
}

static void test_lengths(void)
{
	for (size_t len = 0; len <= MAX_PAYLOAD; len++) {
		struct iovec one = {payload, len}, longer = {payload, len + 5};

		check_round_trip(true, len, &one, 1, "one iovec, DF");
		check_round_trip(false, len, &longer, 1, "longer iovec");
	}
	struct iovec jumbo = {payload, 65507};
	check_round_trip(true, 65507, &jumbo, 1, "largest datagram");
}

static void test_iovecs(void)
{
	for (size_t step = 1; step < 40; step++)
		for (size_t len = 0; len < 300; len += 7) {
			struct iovec v[304] = {{NULL, 0}}; /* an empty one with a NULL base first */
			int n = 1;

			for (size_t at = 0; at < len; at += step)
				v[n++] = (struct iovec){payload + at, len - at < step ? len - at : step};
			v[n++] = (struct iovec){NULL, 0};
			check_round_trip(step & 1, len, v, n, "iovecs");
		}
	struct iovec shorter[2] = {{payload, 10}, {payload, 10}};
	unsigned char frame[128];
	struct vmh_frame_hdr h = template(true);

	CHECK(vmh_frame_build(frame, &h, 0, shorter, 2, 21) == 0, "iovecs shorter than the datagram");
	CHECK(vmh_frame_build(frame, &h, 0, shorter, 1, 11) == 0, "iovec shorter than the datagram");
	CHECK(vmh_frame_build(frame, &h, 0, NULL, 0, 1) == 0, "no iovec");
	CHECK(vmh_frame_build(frame, &h, 0, NULL, 0, 0) == 42, "empty datagram without iovec");
}

/* A payload whose checksum comes out as 0 must be sent as 0xffff: 0 says "none". */
static void test_zero_sum(void)
{
	struct vmh_frame_hdr h = template(true);
	unsigned char frame[64], two[2] = {0, 0};
	struct iovec v = {two, 2};

	vmh_frame_build(frame, &h, 0, &v, 1, 2);
	memcpy(two, frame + 40, 2); /* what is missing to 0xffff */
	vmh_frame_build(frame, &h, 0, &v, 1, 2);
	CHECK(get16(frame + 40) == 0xffff, "sum 0 sent as %04x", get16(frame + 40));
	struct vmh_buf b;
	CHECK(vmh_frame_parse(frame, 44, true, &b) == 0, "sum 0xffff refused");
	put16(frame + 40, 0);
	CHECK(vmh_frame_parse(frame, 44, true, &b) == 0, "datagram without checksum refused");
}

static size_t plain(unsigned char *to, size_t len)
{
	struct vmh_frame_hdr h = template(false);
	struct iovec v = {payload, len};

	return vmh_frame_build(to, &h, 7, &v, 1, len);
}

/* Copies into exactly as many bytes as there are, so that the sanitizer sees a read beyond them. */
static int parse_exact(const unsigned char *frame, size_t len, bool verify)
{
	unsigned char *exact = malloc(len ? len : 1);
	struct vmh_buf b = {.len = 12345}, before = b;
	int rc;

	memcpy(exact, frame, len);
	rc = vmh_frame_parse(exact, len, verify, &b);
	if (rc)
		CHECK(rc == -EBADMSG && !memcmp(&b, &before, sizeof(b)), "refusal touched the result");
	free(exact);
	return rc;
}

/* VLAN tags after the MACs, and option bytes after the IP header */
static size_t decorate(unsigned char *to, size_t len, unsigned tags, unsigned options)
{
	unsigned char base[2048];
	size_t size = plain(base, len), at = 12;

	memcpy(to, base, 12);
	for (unsigned i = 0; i < tags; i++, at += 4) {
		put16(to + at, i + 1 < tags ? 0x88a8 : 0x8100);
		put16(to + at + 2, i ? 0xf000 : 0xe000); /* a priority, VID 0 */
	}
	memcpy(to + at, base + 12, 22);
	unsigned char *ip = to + at + 2;
	ip[0] = (unsigned char)(0x45 + options);
	put16(ip + 2, (unsigned)(28 + len + options * 4));
	memset(ip + 20, 1, options * 4); /* NOP */
	memcpy(ip + 20 + options * 4, base + 34, size - 34);
	repair(ip);
	return size + tags * 4 + options * 4;
}

static void test_tags_and_options(void)
{
	unsigned char f[2048];

	for (unsigned tags = 0; tags <= 3; tags++)
		for (unsigned options = 0; options <= 10; options++) {
			size_t len = decorate(f, 33, tags, options);
			struct vmh_buf b;
			int rc = vmh_frame_parse(f, len, true, &b);

			if (tags > 2) {
				CHECK(rc == -EBADMSG, "%u tags accepted", tags);
				continue;
			}
			CHECK(rc == 0 && b.len == 33 && !memcmp(b.data, payload, 33) && b.sport == htons(4000),
			      "%u tags, %u option words: %d", tags, options, rc);
			CHECK(parse_exact(f, len, true) == 0, "%u tags, %u option words", tags, options);
			for (size_t cut = 0; cut < len; cut++)
				CHECK(parse_exact(f, cut, true) == -EBADMSG, "%u tags, %u option words cut at %zu", tags,
				      options, cut);
		}
}

static void test_vlan_ids(void)
{
	unsigned char f[256];

	for (unsigned tags = 1; tags <= 2; tags++)
		for (unsigned tagged = 0; tagged < tags; tagged++) {
			size_t len = decorate(f, 33, tags, 0);

			CHECK(parse_exact(f, len, true) == 0, "VID 0, %u tags", tags);
			put16(f + 14 + tagged * 4, 100);
			CHECK(parse_exact(f, len, true) == -EBADMSG, "VID 100 in tag %u of %u", tagged, tags);
		}
}

static void test_martians(void)
{
	static const struct {
		const char *from, *to;
		int rc;
	} table[] = {
		{"127.0.0.1", "192.0.2.2", -EBADMSG}, {"127.255.255.255", "192.0.2.2", -EBADMSG},
		{"126.0.0.1", "192.0.2.2", 0}, {"128.0.0.1", "192.0.2.2", 0},
		{"0.0.0.0", "192.0.2.2", -EBADMSG}, {"0.0.0.0", "224.0.1.1", -EBADMSG}, {"0.0.0.0", "224.0.0.251", 0},
		{"192.0.2.2", "192.0.2.2", -EBADMSG}, {"192.0.2.3", "192.0.2.2", 0},
		{"223.255.255.255", "192.0.2.2", 0}, {"224.0.0.1", "192.0.2.2", -EBADMSG},
		{"239.255.255.255", "192.0.2.2", -EBADMSG}, {"240.0.0.1", "192.0.2.2", 0},
		{"255.255.255.254", "192.0.2.2", 0}, {"255.255.255.255", "192.0.2.2", -EBADMSG},
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		struct vmh_frame_hdr h;
		struct iovec v = {payload, 20};
		unsigned char f[128];

		vmh_frame_hdr_init(&h, dmac, smac, inet_addr(table[i].from), inet_addr(table[i].to), 1, 1, 1, 0, true);
		vmh_frame_build(f, &h, 0, &v, 1, 20);
		CHECK(parse_exact(f, 62, true) == table[i].rc, "%s to %s", table[i].from, table[i].to);
	}
}

static void test_options(void)
{
	static const struct {
		const char *what;
		unsigned char bytes[8];
		int rc;
	} table[] = {
		{"end, then anything", {0, 131, 9, 9, 9, 9, 9, 9}, 0},
		{"record route", {7, 7, 4, 0, 0, 0, 0, 0}, 0},
		{"router alert", {148, 4, 0, 0, 0, 0, 0, 0}, 0},
		{"loose source route", {131, 7, 4, 192, 0, 2, 1, 0}, -EBADMSG},
		{"strict source route", {1, 137, 7, 4, 192, 0, 2, 1}, -EBADMSG},
		{"length 0", {7, 0, 0, 0, 0, 0, 0, 0}, -EBADMSG},
		{"length 1", {7, 1, 0, 0, 0, 0, 0, 0}, -EBADMSG},
		{"longer than the header", {7, 9, 4, 0, 0, 0, 0, 0}, -EBADMSG},
		{"without a length", {1, 1, 1, 1, 1, 1, 1, 7}, -EBADMSG},
	};

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		unsigned char f[256];
		size_t len = decorate(f, 33, 0, 2);

		memcpy(f + 34, table[i].bytes, 8);
		repair(f + 14);
		CHECK(parse_exact(f, len, true) == table[i].rc, "%s", table[i].what);
	}
}

static void test_padding(void)
{
	unsigned char f[256];
	struct vmh_buf b;

	for (size_t pad = 0; pad < 40; pad++) {
		memset(f, 0xaa, sizeof(f));
		size_t len = plain(f, 3);

		CHECK(vmh_frame_parse(f, len + pad, true, &b) == 0 && b.len == 3, "padding of %zu", pad);
	}
	/* UDP shorter than IP says: the kernel trims */
	plain(f, 20);
	put16(f + 38, 8 + 5);
	repair(f + 14);
	CHECK(vmh_frame_parse(f, 62, true, &b) == 0 && b.len == 5, "UDP shorter than IP");
}

struct broken {
	const char *what;
	size_t at;
	unsigned value; /* 16 bits */
};

static void test_broken(void)
{
	static const struct broken table[] = {
		{"ARP", 12, 0x0806},
		{"IPv6", 12, 0x86dd},
		{"length field instead of a type", 12, 0x0040},
		{"IP version 5", 14, 0x5500},
		{"IP version 6", 14, 0x6500},
		{"header length 0", 14, 0x4000},
		{"header length 4 words", 14, 0x4400},
		{"header length beyond the packet", 14, 0x4f00},
		{"total length 0", 16, 0},
		{"total length without UDP", 16, 27},
		{"total length beyond the frame", 16, 28 + 21},
		{"total length 65535", 16, 65535},
		{"more fragments", 20, 0x2000},
		{"fragment offset", 20, 0x0001},
		{"last fragment", 20, 0x1fff},
		{"TCP", 22, 0x3f06},
		{"ICMP", 22, 0x3f01},
		{"UDP length 0", 38, 0},
		{"UDP length 7", 38, 7},
		{"UDP length beyond IP", 38, 8 + 21},
		{"UDP length 65535", 38, 65535},
	};
	struct vmh_buf b;

	for (size_t i = 0; i < sizeof(table) / sizeof(table[0]); i++) {
		unsigned char f[256];
		size_t len = plain(f, 20);

		put16(f + table[i].at, table[i].value);
		/* the IP sum is made good, so that the field itself is what is refused */
		put16(f + 24, 0);
		if ((f[14] & 15) * 4 <= 48 && (f[14] & 15))
			put16(f + 24, (uint16_t)~reference_sum(f + 14, (size_t)(f[14] & 15) * 4, 0));
		CHECK(parse_exact(f, len, false) == -EBADMSG, "%s", table[i].what);
	}
	unsigned char f[256];
	size_t len = plain(f, 20);
	put16(f + 20, 0xc000); /* DF and the reserved bit are no fragments */
	repair(f + 14);
	CHECK(vmh_frame_parse(f, len, true, &b) == 0, "DF or reserved bit");
}

static void test_bad_sums(void)
{
	unsigned char f[256];
	size_t len = plain(f, 31);

	for (size_t byte = 14; byte < 34; byte++)
		for (int bit = 0; bit < 8; bit++) {
			f[byte] ^= (unsigned char)(1 << bit);
			CHECK(parse_exact(f, len, false) == -EBADMSG, "IP bit %d of byte %zu", bit, byte);
			f[byte] ^= (unsigned char)(1 << bit);
		}
	for (size_t byte = 34; byte < len; byte++)
		for (int bit = 0; bit < 8; bit++) {
			f[byte] ^= (unsigned char)(1 << bit);
			CHECK(parse_exact(f, len, true) == -EBADMSG, "UDP bit %d of byte %zu", bit, byte);
			if (byte != 38 && byte != 39)
				CHECK(parse_exact(f, len, false) == 0, "sum not to be verified, byte %zu", byte);
			f[byte] ^= (unsigned char)(1 << bit);
		}
}

static void test_multicast(void)
{
	static const struct {
		const char *to;
		bool multicast;
	} table[] = {{"223.255.255.255", false}, {"224.0.0.1", true}, {"239.255.255.255", true}, {"240.0.0.1", false}};

	for (int i = 0; i < 4; i++) {
		struct vmh_frame_hdr h;
		struct iovec v = {payload, 1};
		unsigned char f[64];
		struct vmh_buf b;

		vmh_frame_hdr_init(&h, dmac, smac, inet_addr("192.0.2.1"), inet_addr(table[i].to), 1, 1, 1, 0, true);
		vmh_frame_build(f, &h, 0, &v, 1, 1);
		CHECK(vmh_frame_parse(f, 43, true, &b) == 0 && b.multicast == table[i].multicast, "%s", table[i].to);
	}
}

int main(void)
{
	srand(1);
	for (size_t i = 0; i < sizeof(payload); i++)
		payload[i] = (unsigned char)rand();
	test_lengths();
	test_iovecs();
	test_zero_sum();
	test_tags_and_options();
	test_vlan_ids();
	test_martians();
	test_options();
	test_padding();
	test_broken();
	test_bad_sums();
	test_multicast();
	/* sums of all ones are where folding goes wrong */
	memset(payload, 0xff, sizeof(payload));
	test_lengths();
	return check_result();
}
