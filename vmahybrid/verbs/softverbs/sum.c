/* What a NIC does with IP, TCP and UDP headers: checksums, and the cutting of super frames that the kernel, having no
 * wire in between, never cut. */
#include <linux/if_ether.h>
#include <netinet/in.h>
#include <string.h>
#include "sv.h"

/* Where the parts of a frame are. */
struct layout {
	uint32_t ip, transport, end; /* offsets; end: of the IP packet, without padding */
	uint32_t sum;                /* of the transport checksum, 0: none that could be computed */
	bool v6, tcp;
};

static uint16_t read16(const uint8_t *at)
{
	return (uint16_t)(at[0] << 8 | at[1]);
}

static void write16(uint8_t *at, uint32_t value)
{
	at[0] = (uint8_t)(value >> 8);
	at[1] = (uint8_t)value;
}

/* Ones' complement sum in the machine's byte order: it is the same whichever way the octets are paired (RFC 1071). */
static uint64_t add(uint64_t sum, const uint8_t *at, uint32_t length)
{
	uint32_t words[2];
	uint16_t last = 0;

	for (; length >= 8; length -= 8, at += 8) {
		memcpy(words, at, 8);
		sum += (uint64_t)words[0] + words[1];
	}
	for (; length >= 2; length -= 2, at += 2) {
		memcpy(&last, at, 2);
		sum += last;
	}
	if (length) {
		last = 0;
		memcpy(&last, at, 1);
		sum += last;
	}
	return sum;
}

static uint16_t fold(uint64_t sum)
{
	while (sum >> 16)
		sum = (sum & 0xffff) + (sum >> 16);
	return (uint16_t)sum;
}

/* `have` octets of a frame of `length`. False: not IP, or too short to be. */
static bool find(const uint8_t *frame, uint32_t have, uint32_t length, struct layout *at)
{
	uint32_t type, header, total;
	uint8_t protocol;

	at->ip = ETH_HLEN;
	at->sum = 0;
	if (have < ETH_HLEN + 20)
		return false;
	type = read16(frame + 12);
	if (type == ETH_P_8021Q) {
		type = read16(frame + 16);
		at->ip += 4;
	}
	at->v6 = type == ETH_P_IPV6;
	if ((type != ETH_P_IP && !at->v6) || have < at->ip + (at->v6 ? 40 : 20) || frame[at->ip] >> 4 != (at->v6 ? 6 : 4))
		return false;
	header = at->v6 ? 40 : (frame[at->ip] & 15) * 4u;
	total = at->v6 ? 40u + read16(frame + at->ip + 4) : read16(frame + at->ip + 2);
	if (header < 20 || total < header || at->ip + total > length || at->ip + header > have)
		return false;
	protocol = frame[at->ip + (at->v6 ? 6 : 9)];
	at->transport = at->ip + header;
	at->end = at->ip + total;
	at->tcp = protocol == IPPROTO_TCP;
	if (!at->v6 && read16(frame + at->ip + 6) & 0x3fff) /* a fragment */
		return true;
	if (at->tcp && at->end - at->transport >= 20)
		at->sum = at->transport + 16;
	else if (protocol == IPPROTO_UDP && at->end - at->transport >= 8)
		at->sum = at->transport + 6;
	if (at->sum + 2 > have)
		at->sum = 0;
	return true;
}

/* The pseudo header's share of the transport checksum. */
static uint64_t pseudo(const uint8_t *frame, const struct layout *at)
{
	uint8_t tail[4] = { 0, at->tcp ? IPPROTO_TCP : IPPROTO_UDP };
	uint64_t sum;

	write16(tail + 2, at->end - at->transport);
	sum = add(0, tail, sizeof(tail));
	return at->v6 ? add(sum, frame + at->ip + 8, 32) : add(sum, frame + at->ip + 12, 8);
}

static void put(uint8_t *to, uint16_t native)
{
	memcpy(to, &native, sizeof(native));
}

static uint16_t get(const uint8_t *from)
{
	uint16_t native;

	memcpy(&native, from, sizeof(native));
	return native;
}

/* What the checksum field must hold, given the field's present contents are to be left out. */
static uint16_t transport_sum(const uint8_t *frame, const struct layout *at)
{
	uint64_t sum = add(pseudo(frame, at), frame + at->transport, at->end - at->transport);
	uint16_t value = (uint16_t)~fold(sum + (uint16_t)~get(frame + at->sum));

	return !at->tcp && !value ? 0xffff : value;
}

int sv_sum_check(const uint8_t *frame, uint32_t length, struct sv_sum *sum)
{
	struct layout at;
	uint16_t held, wanted;

	if (!find(frame, length, length, &at))
		return SV_SUM_NONE;
	if (!at.v6 && fold(add(0, frame + at.ip, at.transport - at.ip)) != 0xffff)
		return SV_SUM_BAD;
	if (!at.sum)
		return SV_SUM_NONE;
	held = get(frame + at.sum);
	if (!at.tcp && !at.v6 && !held) /* UDP without */
		return SV_SUM_GOOD;
	wanted = transport_sum(frame, &at);
	if (held == wanted || ((held ^ wanted) == 0xffff && (!held || !wanted))) /* two zeros of ones' complement */
		return SV_SUM_GOOD;
	/* CHECKSUM_PARTIAL: the kernel leaves the pseudo header's sum there for the NIC to go on from */
	if (held == fold(pseudo(frame, &at))) {
		*sum = (struct sv_sum){ at.sum, wanted };
		return SV_SUM_UNFINISHED;
	}
	return SV_SUM_BAD;
}

static void fill_ip(uint8_t *frame, const struct layout *at)
{
	if (at->v6)
		return;
	put(frame + at->ip + 10, 0);
	put(frame + at->ip + 10, (uint16_t)~fold(add(0, frame + at->ip, at->transport - at->ip)));
}

void sv_sum_prepare(uint8_t *head, uint32_t have, uint32_t length, struct sv_offload *offload)
{
	struct layout at;

	if (!find(head, have, length, &at))
		return;
	fill_ip(head, &at);
	if (!at.sum)
		return;
	put(head + at.sum, fold(pseudo(head, &at)));
	offload->start = (uint16_t)at.transport;
	offload->offset = (uint16_t)(at.sum - at.transport);
	offload->end = at.end;
}

uint16_t sv_sum_add(uint16_t sum, const uint8_t *at, uint32_t length, uint32_t offset)
{
	uint16_t part = fold(add(0, at, length));

	return fold((uint64_t)sum + (offset & 1 ? __builtin_bswap16(part) : part));
}

void sv_sum_put(uint8_t *head, const struct sv_offload *offload, uint16_t sum)
{
	uint16_t value = (uint16_t)~sum;

	put(head + offload->start + offload->offset, value ? value : 0xffff); /* as the kernel does: 0 is UDP without */
}

void sv_sum_fill(uint8_t *frame, uint32_t length)
{
	struct layout at;

	if (!find(frame, length, length, &at))
		return;
	fill_ip(frame, &at);
	if (at.sum)
		put(frame + at.sum, transport_sum(frame, &at));
}

uint32_t sv_segment(const uint8_t *frame, uint32_t length, uint32_t gso_size, uint32_t index, uint8_t *out)
{
	struct layout at;
	uint32_t headers, payload, offset, part;
	bool last;

	if (!find(frame, length, length, &at) || !at.sum || !gso_size)
		return 0;
	headers = at.transport + (at.tcp ? (frame[at.transport + 12] >> 4) * 4u : 8u);
	if (headers > at.end)
		return 0;
	payload = at.end - headers;
	offset = index * gso_size;
	if (offset >= payload)
		return 0;
	last = payload - offset <= gso_size;
	part = last ? payload - offset : gso_size;
	memcpy(out, frame, headers);
	memcpy(out + headers, frame + headers + offset, part);
	if (at.v6) {
		write16(out + at.ip + 4, headers + part - at.ip - 40);
	} else {
		write16(out + at.ip + 2, headers + part - at.ip);
		write16(out + at.ip + 4, read16(frame + at.ip + 4) + index);
	}
	if (at.tcp) {
		uint32_t sequence;

		memcpy(&sequence, frame + at.transport + 4, 4);
		sequence = htonl(ntohl(sequence) + offset);
		memcpy(out + at.transport + 4, &sequence, 4);
		if (!last)
			out[at.transport + 13] &= (uint8_t)~0x09; /* FIN, PSH */
		if (index)
			out[at.transport + 13] &= (uint8_t)~0x80; /* CWR */
	} else {
		write16(out + at.transport + 4, headers + part - at.transport);
	}
	sv_sum_fill(out, headers + part);
	return headers + part;
}
