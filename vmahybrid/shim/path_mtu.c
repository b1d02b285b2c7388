/* What the kernel has learned about the MTU of the paths behind gateways (RFC 1191): a router's ICMP error lowers it,
 * and after net.ipv4.route.mtu_expires it is forgotten. Neither is announced by netlink, so it has to be asked for.
 */
#include "vmh_sock.h"
#include <netinet/in.h>

#ifndef SO_BINDTOIFINDEX
#define SO_BINDTOIFINDEX 62
#endif

#define ASK_EVERY 6  /* ticks: 100 ms */
#define KNOWN 256    /* paths; power of two */

/* Answers for all sockets: address, MTU, and the last 16 bits of the tick. In one word, so that no thread, signal
 * handler or child of a fork meets half of one. */
static _Atomic uint64_t known[KNOWN];

/* of 2^24 ns */
static uint32_t tick(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC_COARSE, &t);
	return (uint32_t)(((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec) >> 24);
}

static _Atomic uint64_t *known_of(in_addr_t daddr)
{
	return &known[daddr * 2654435761u >> 24 & (KNOWN - 1)];
}

/* By a connected socket, and not by the program's own: that one remembers the route of its last send by the kernel.
 * 0: no answer. */
static uint32_t ask_kernel(in_addr_t daddr, uint32_t oif)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9), .sin_addr.s_addr = daddr };
	socklen_t len = sizeof(int);
	int mtu = 0;
	long fd = vmh_sys(SYS_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return 0;
	if ((!oif || vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_BINDTOIFINDEX, &oif, sizeof(oif)) >= 0) &&
	    vmh_sys(SYS_connect, fd, &to, sizeof(to)) >= 0)
		vmh_sys(SYS_getsockopt, fd, IPPROTO_IP, IP_MTU, &mtu, &len);
	vmh_sys(SYS_close, fd);
	return mtu > 0 ? (uint32_t)mtu : 0;
}

static uint32_t path_mtu(in_addr_t daddr, uint32_t oif, uint32_t now)
{
	uint64_t k = atomic_load_explicit(known_of(daddr), memory_order_relaxed);
	uint32_t mtu;

	if (oif) /* may be another path than by the route */
		return ask_kernel(daddr, oif);
	if (k >> 32 == daddr && (uint16_t)(now - k) < ASK_EVERY)
		return k >> 16 & 0xffff;
	mtu = ask_kernel(daddr, 0);
	if (mtu > 0xffff)
		mtu = 0xffff;
	k = (uint64_t)daddr << 32 | mtu << 16 | (now & 0xffff);
	atomic_store_explicit(known_of(daddr), k, memory_order_relaxed);
	return mtu;
}

bool vmh_path_fits(struct vmh_dst *d, uint32_t oif, size_t len)
{
	uint32_t now, mtu;

	if (!d->gateway)
		return false;
	now = tick();
	if (now - d->asked < ASK_EVERY)
		return len <= d->max_payload;
	d->asked = now;
	mtu = path_mtu(d->daddr, oif, now);
	if (mtu) {
		uint32_t room = mtu > 28 ? mtu - 28 : 0;

		d->max_payload = room < d->link_payload ? room : d->link_payload;
		d->sure_payload = d->max_payload < VMH_PATH_SURE ? d->max_payload : VMH_PATH_SURE;
		/* The path may be narrower than the kernel's least: then it sends everything without DF. */
		if (room <= VMH_PATH_SURE && room < d->link_payload)
			d->max_payload = d->sure_payload = 0;
	}
	return len <= d->max_payload;
}

void vmh_path_forget(in_addr_t daddr)
{
	atomic_store_explicit(known_of(daddr), 0, memory_order_relaxed);
}
