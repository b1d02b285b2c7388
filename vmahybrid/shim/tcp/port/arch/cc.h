/* lwIP's port: compiler and libc. */
#ifndef VMH_TCP_CC_H
#define VMH_TCP_CC_H
#include <stdio.h>
#include <stdlib.h>

#define LWIP_PLATFORM_DIAG(x) ((void)0)
#define LWIP_PLATFORM_ASSERT(text) \
	do { \
		fprintf(stderr, "lwIP: %s (%s:%d)\n", text, __FILE__, __LINE__); \
		abort(); \
	} while (0)

#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__ /* else lwIP has them as casts */
#define lwip_htons(x) __builtin_bswap16(x)
#define lwip_htonl(x) __builtin_bswap32(x)
#endif

/* ip.c */
unsigned short core_chksum(const void *data, int len);
void *core_malloc(size_t len);
void core_free(void *p);
void *core_calloc(size_t n, size_t len);
#endif
