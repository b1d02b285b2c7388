/* An IP address as the contracts have it: 16 bytes in network order, IPv4 mapped (::ffff:a.b.c.d), any address all zeros. */
#ifndef VMH_IP_H
#define VMH_IP_H
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

struct vmh_ip {
	union {
		uint8_t b[16];
		uint32_t w[4];
	};
};

static inline struct vmh_ip vmh_ip4(in_addr_t a)
{
	return (struct vmh_ip){ .w = { 0, 0, a ? htonl(0xffff) : 0, a } };
}

static inline struct vmh_ip vmh_ip6(const void *bytes)
{
	struct vmh_ip a;

	memcpy(a.b, bytes, sizeof(a.b));
	return a;
}

static inline bool vmh_ip_any(const struct vmh_ip *a)
{
	return !(a->w[0] | a->w[1] | a->w[2] | a->w[3]);
}

/* IPv4, as contracts.family_of: the any address counts as that. */
static inline bool vmh_ip_is4(const struct vmh_ip *a)
{
	return !(a->w[0] | a->w[1]) && (a->w[2] == htonl(0xffff) || !(a->w[2] | a->w[3]));
}

static inline in_addr_t vmh_ip_v4(const struct vmh_ip *a)
{
	return a->w[3];
}

static inline bool vmh_ip_same(const struct vmh_ip *a, const struct vmh_ip *b)
{
	return a->w[3] == b->w[3] && a->w[2] == b->w[2] && a->w[1] == b->w[1] && a->w[0] == b->w[0];
}
#endif
