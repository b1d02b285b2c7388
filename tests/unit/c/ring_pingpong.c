/* Half round trip over veth, through the ring library or on bare AF_XDP rings.
 * ring_pingpong ring|raw ping|pong IFNAME ADDR MAC PEER-ADDR PEER-MAC [COUNT] */
#include "../../../vmahybrid/shim/ring_xdp.h"
#include "live.h"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#define PAYLOAD 22 /* a frame of 64 bytes */
#define WARM_UP 5000
#define DEADLINE_NS 20000000000u

static struct vmh_buf *arrived;

int vmh_deliver(struct vmh_ring *r, struct vmh_buf *b)
{
	(void)r;
	if (b->dport != htons(7000) || arrived)
		return 0;
	arrived = b;
	return 1;
}

static struct vmh_ring *ring;
static struct vmh_frame_hdr header;
static unsigned char payload[PAYLOAD];

static void ring_send(void)
{
	struct iovec iov = {payload, sizeof(payload)};

	vmh_ring_send(ring, &header, &iov, 1, sizeof(payload), false);
}

static bool ring_receive(void)
{
	unsigned char to[64];

	if (!vmh_ring_poll(ring, 16) || !arrived)
		return false;
	memcpy(to, arrived->data, arrived->len);
	__asm__ volatile("" ::"r"(to) : "memory");
	vmh_ring_put(arrived);
	arrived = NULL;
	return true;
}

/* The least that AF_XDP needs: no locks, no parsing, one prepared frame. */
static void raw_send(void)
{
	struct xqueue *q = &((struct xdp_ring *)ring)->q[0];
	struct xdp_desc *d = desc_at(&q->tx, q->tx.here);

	q->comp.here = kernel_index(q->comp.prod);
	publish(q->comp.cons, q->comp.here);
	*d = (struct xdp_desc){.addr = 0, .len = 42 + PAYLOAD};
	publish(q->tx.prod, ++q->tx.here);
	syscall(SYS_sendto, q->fd, NULL, 0, MSG_DONTWAIT, NULL, 0);
}

static bool raw_receive(void)
{
	struct xqueue *q = &((struct xdp_ring *)ring)->q[0];
	uint64_t addr;

	if (kernel_index(q->rx.prod) == q->rx.here)
		return false;
	addr = desc_at(&q->rx, q->rx.here)->addr;
	publish(q->rx.cons, ++q->rx.here);
	*addr_at(&q->fill, q->fill.here) = addr & ~(uint64_t)2047;
	publish(q->fill.prod, ++q->fill.here);
	return true;
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return x < y ? -1 : x > y;
}

static void ping(void (*send)(void), bool (*receive)(void), unsigned count, const char *mode)
{
	uint32_t *ns = calloc(count, sizeof(*ns)), lost = 0;
	uint64_t end = vmh_now_ns() + DEADLINE_NS, t0;
	unsigned n = 0, warm = WARM_UP;

	while (n < count && vmh_now_ns() < end) {
		t0 = vmh_now_ns();
		send();
		while (!receive())
			if (vmh_now_ns() - t0 > 100000000) {
				lost++;
				goto again;
			}
		if (warm)
			warm--;
		else
			ns[n++] = (uint32_t)(vmh_now_ns() - t0);
again:;
	}
	if (n < count)
		live_die("too few round trips", ETIMEDOUT);
	qsort(ns, n, sizeof(*ns), by_value);
	printf("%s half-RTT us: min %.3f p50 %.3f p99 %.3f lost %u\n", mode, ns[0] / 2e3, ns[n / 2] / 2e3,
	       ns[n * 99ull / 100] / 2e3, lost);
}

int main(int argc, char **argv)
{
	unsigned char mac[6], peer_mac[6];
	bool raw;

	if (argc < 8)
		live_die("arguments", EINVAL);
	raw = !strcmp(argv[1], "raw");
	live_mac(argv[5], mac);
	live_mac(argv[7], peer_mac);
	ring = live_open(argv[3], getenv("FRAMES") ? (unsigned)atoi(getenv("FRAMES")) : 4096, 2048);
	vmh_frame_hdr_init(&header, peer_mac, mac, inet_addr(argv[4]), inet_addr(argv[6]), htons(7000), htons(7000), 64, 0,
			   true);
	if (raw) {
		struct iovec iov = {payload, sizeof(payload)};

		vmh_frame_build(((struct xdp_ring *)ring)->umem, &header, 0, &iov, 1, sizeof(payload));
	}
	if (!strcmp(argv[2], "ping")) {
		ping(raw ? raw_send : ring_send, raw ? raw_receive : ring_receive, argc > 8 ? (unsigned)atoi(argv[8]) : 50000,
		     argv[1]);
		return 0;
	}
	puts("ready");
	fflush(stdout);
	for (uint64_t end = vmh_now_ns() + DEADLINE_NS; vmh_now_ns() < end;)
		if (raw ? raw_receive() : ring_receive())
			(raw ? raw_send : ring_send)();
	return 0;
}
