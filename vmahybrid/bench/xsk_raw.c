/* The raw limit: frames of a 64-byte UDP message between two AF_XDP sockets, generic mode, busy polling, bounced or one
 * way, nothing between program and ring. What the shim adds is measured against this.
 *
 *   xsk_raw server IFACE
 *   xsk_raw client IFACE SECONDS           prints {"samples":N,"p50":US,"p99":US}, half round trips
 *   xsk_raw sink IFACE                     counts until SIGINT or SIGTERM, prints {"messages":N}
 *   xsk_raw send IFACE SECONDS BATCH       one way, BATCH frames a kick, prints {"messages":N,"seconds":S,"rate":R}
 *
 * Every frame of IFACE goes to the socket while it runs, so the interface must be a sandbox's.
 */
#define _GNU_SOURCE
#include "bench.h"
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <linux/if_xdp.h>
#include <net/if.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define FRAME_SIZE 2048u
#define FRAMES 512u
#define RING 256u
#define FRAME_LEN (14u + 20u + 8u + 64u)
#define ETHERTYPE_TEST 0x88b5 /* IEEE 802 local experimental */
#define WARMUP_NS 400000000ull
#define LOST_NS 100000000ull
#define BIND_TRIES 200 /* of 10 ms */

struct ring {
	_Atomic uint32_t *producer;
	_Atomic uint32_t *consumer;
	void *slots;
};

struct port {
	int fd;
	uint8_t *umem;
	struct ring rx, tx, fill, comp;
};

static long bpf(int command, union bpf_attr *attr)
{
	return syscall(SYS_bpf, command, attr, sizeof(*attr));
}

static int make_map(void)
{
	union bpf_attr attr = {.map_type = BPF_MAP_TYPE_XSKMAP, .key_size = 4, .value_size = 4, .max_entries = 1};
	int fd = (int)bpf(BPF_MAP_CREATE, &attr);

	if (fd < 0)
		die("BPF_MAP_CREATE (XSKMAP)");
	return fd;
}

static void put_socket(int map, int xsk)
{
	uint32_t key = 0;
	union bpf_attr attr = {.map_fd = (uint32_t)map, .key = (uintptr_t)&key, .value = (uintptr_t)&xsk};

	if (bpf(BPF_MAP_UPDATE_ELEM, &attr))
		die("BPF_MAP_UPDATE_ELEM (XSKMAP)");
}

/* return bpf_redirect_map(&map, ctx->rx_queue_index, XDP_PASS); the link dies with this process */
static void attach(int ifindex, int map)
{
	const struct bpf_insn code[] = {
		{.code = BPF_LDX | BPF_MEM | BPF_W, .dst_reg = 2, .src_reg = 1, .off = offsetof(struct xdp_md, rx_queue_index)},
		{.code = BPF_LD | BPF_IMM | BPF_DW, .dst_reg = 1, .src_reg = BPF_PSEUDO_MAP_FD, .imm = map},
		{0},
		{.code = BPF_ALU64 | BPF_MOV | BPF_K, .dst_reg = 3, .imm = XDP_PASS},
		{.code = BPF_JMP | BPF_CALL, .imm = BPF_FUNC_redirect_map},
		{.code = BPF_JMP | BPF_EXIT},
	};
	union bpf_attr load = {.prog_type = BPF_PROG_TYPE_XDP, .insns = (uintptr_t)code,
			       .insn_cnt = sizeof(code) / sizeof(code[0]), .license = (uintptr_t)"GPL"};
	union bpf_attr link = {.link_create = {.attach_type = BPF_XDP, .flags = XDP_FLAGS_SKB_MODE}};
	int program = (int)bpf(BPF_PROG_LOAD, &load);

	if (program < 0)
		die("BPF_PROG_LOAD");
	link.link_create.prog_fd = (uint32_t)program;
	link.link_create.target_ifindex = (uint32_t)ifindex;
	if (bpf(BPF_LINK_CREATE, &link) < 0)
		die("BPF_LINK_CREATE");
}

static void map_ring(int fd, struct ring *ring, off_t page, const struct xdp_ring_offset *offset, size_t slot)
{
	uint8_t *base = mmap(NULL, offset->desc + RING * slot, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, fd, page);

	if (base == MAP_FAILED)
		die("mmap of a ring");
	ring->producer = (_Atomic uint32_t *)(base + offset->producer);
	ring->consumer = (_Atomic uint32_t *)(base + offset->consumer);
	ring->slots = base + offset->desc;
}

static void set_ring_size(int fd, int option)
{
	uint32_t size = RING;

	if (setsockopt(fd, SOL_XDP, option, &size, sizeof(size)))
		die("setsockopt of a ring size");
}

static void open_port(struct port *port, const char *name)
{
	struct xdp_umem_reg reg = {.len = FRAMES * FRAME_SIZE, .chunk_size = FRAME_SIZE};
	struct xdp_mmap_offsets offsets;
	socklen_t len = sizeof(offsets);
	struct sockaddr_xdp address = {.sxdp_family = AF_XDP, .sxdp_flags = XDP_COPY | XDP_USE_NEED_WAKEUP};
	int map;

	address.sxdp_ifindex = if_nametoindex(name);
	if (!address.sxdp_ifindex)
		die(name);
	port->umem = mmap(NULL, reg.len, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_POPULATE, -1, 0);
	if (port->umem == MAP_FAILED)
		die("mmap of the UMEM");
	port->fd = socket(AF_XDP, SOCK_RAW | SOCK_CLOEXEC, 0);
	if (port->fd < 0)
		die("socket(AF_XDP)");
	reg.addr = (uintptr_t)port->umem;
	if (setsockopt(port->fd, SOL_XDP, XDP_UMEM_REG, &reg, sizeof(reg)))
		die("XDP_UMEM_REG");
	set_ring_size(port->fd, XDP_UMEM_FILL_RING);
	set_ring_size(port->fd, XDP_UMEM_COMPLETION_RING);
	set_ring_size(port->fd, XDP_RX_RING);
	set_ring_size(port->fd, XDP_TX_RING);
	if (getsockopt(port->fd, SOL_XDP, XDP_MMAP_OFFSETS, &offsets, &len))
		die("XDP_MMAP_OFFSETS");
	map_ring(port->fd, &port->rx, XDP_PGOFF_RX_RING, &offsets.rx, sizeof(struct xdp_desc));
	map_ring(port->fd, &port->tx, XDP_PGOFF_TX_RING, &offsets.tx, sizeof(struct xdp_desc));
	map_ring(port->fd, &port->fill, XDP_UMEM_PGOFF_FILL_RING, &offsets.fr, sizeof(uint64_t));
	map_ring(port->fd, &port->comp, XDP_UMEM_PGOFF_COMPLETION_RING, &offsets.cr, sizeof(uint64_t));
	/* the kernel lets go of an earlier socket's queue a moment after that one was closed */
	for (int i = 0; bind(port->fd, (struct sockaddr *)&address, sizeof(address)); i++) {
		if (errno != EBUSY || i == BIND_TRIES)
			die("bind to queue 0");
		usleep(10000);
	}
	map = make_map();
	put_socket(map, port->fd);
	attach((int)address.sxdp_ifindex, map);
	for (uint32_t i = 0; i < RING; i++)
		((uint64_t *)port->fill.slots)[i] = (uint64_t)i * FRAME_SIZE;
	atomic_store_explicit(port->fill.producer, RING, memory_order_release);
}

static void post(struct port *port, const uint8_t *frame)
{
	uint32_t at = atomic_load_explicit(port->tx.producer, memory_order_relaxed);
	uint64_t address = (uint64_t)(RING + at % RING) * FRAME_SIZE;
	struct xdp_desc *desc = &((struct xdp_desc *)port->tx.slots)[at % RING];

	memcpy(port->umem + address, frame, FRAME_LEN);
	*desc = (struct xdp_desc){.addr = address, .len = FRAME_LEN};
	atomic_store_explicit(port->tx.producer, at + 1, memory_order_release);
}

static void kick(struct port *port)
{
	if (sendto(port->fd, NULL, 0, MSG_DONTWAIT, NULL, 0) < 0 && errno != EAGAIN && errno != EBUSY && errno != ENOBUFS)
		die("kick");
	atomic_store_explicit(port->comp.consumer, atomic_load_explicit(port->comp.producer, memory_order_acquire),
			      memory_order_release);
}

/* One frame is in flight at a time, so a plain send of frame RING + (n mod RING) needs no bookkeeping. */
static void send_frame(struct port *port, const uint8_t *frame)
{
	post(port, frame);
	kick(port);
}

/* Copies the next frame of the test into frame; false when there is none now. */
static bool receive(struct port *port, uint8_t *frame)
{
	uint32_t at = atomic_load_explicit(port->rx.consumer, memory_order_relaxed);
	struct xdp_desc desc;
	uint32_t fill;
	bool ours;

	if (at == atomic_load_explicit(port->rx.producer, memory_order_acquire))
		return false;
	desc = ((struct xdp_desc *)port->rx.slots)[at % RING];
	ours = desc.len == FRAME_LEN && port->umem[desc.addr + 12] == ETHERTYPE_TEST >> 8 &&
	       port->umem[desc.addr + 13] == (ETHERTYPE_TEST & 0xff);
	if (ours)
		memcpy(frame, port->umem + desc.addr, FRAME_LEN);
	atomic_store_explicit(port->rx.consumer, at + 1, memory_order_release);
	fill = atomic_load_explicit(port->fill.producer, memory_order_relaxed);
	((uint64_t *)port->fill.slots)[fill % RING] = desc.addr & ~(uint64_t)(FRAME_SIZE - 1);
	atomic_store_explicit(port->fill.producer, fill + 1, memory_order_release);
	return ours;
}

static void serve(struct port *port)
{
	uint8_t frame[FRAME_LEN];

	puts("ready");
	fflush(stdout);
	while (!stopped)
		if (receive(port, frame))
			send_frame(port, frame);
}

static const uint8_t test_frame[FRAME_LEN] = {[0 ... 5] = 0xff, [12] = ETHERTYPE_TEST >> 8, [13] = ETHERTYPE_TEST & 0xff};

static void sink(struct port *port)
{
	uint8_t frame[FRAME_LEN];
	uint64_t count = 0;

	puts("ready");
	fflush(stdout);
	while (!stopped)
		count += receive(port, frame);
	printf("{\"messages\":%llu}\n", (unsigned long long)count);
}

/* A kick may leave frames behind (the kernel takes so many of a kick), hence the wait for the ring to be empty, after
 * which every frame is the program's again: in copy mode it is completed before the kick returns, or shortly after. */
static void blast(struct port *port, double seconds, uint32_t batch)
{
	uint64_t start = clock_ns(CLOCK_MONOTONIC), end = start + (uint64_t)(seconds * 1e9), count = 0, took;

	while (!stopped && clock_ns(CLOCK_MONOTONIC) < end) {
		for (uint32_t i = 0; i < batch; i++)
			post(port, test_frame);
		do
			kick(port);
		while (!stopped && atomic_load_explicit(port->comp.producer, memory_order_acquire) !=
				   atomic_load_explicit(port->tx.producer, memory_order_relaxed));
		count += batch;
	}
	took = clock_ns(CLOCK_MONOTONIC) - start;
	printf("{\"messages\":%llu,\"seconds\":%.6f,\"rate\":%.0f}\n", (unsigned long long)count, (double)took / 1e9,
	       (double)count * 1e9 / (double)took);
}

static int by_value(const void *a, const void *b)
{
	uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;

	return (x > y) - (x < y);
}

static void measure(struct port *port, double seconds)
{
	uint8_t frame[FRAME_LEN];
	uint32_t *samples = calloc(20000000, sizeof(*samples));
	uint64_t start = clock_ns(CLOCK_MONOTONIC), end = start + WARMUP_NS + (uint64_t)(seconds * 1e9), sent, got;
	uint32_t count = 0;

	if (!samples)
		die("calloc");
	while (!stopped && (sent = clock_ns(CLOCK_MONOTONIC)) < end && count < 20000000) {
		send_frame(port, test_frame);
		while (!receive(port, frame) && !stopped)
			if (clock_ns(CLOCK_MONOTONIC) - sent > LOST_NS)
				break; /* the peer is not there yet, or a frame was lost */
		got = clock_ns(CLOCK_MONOTONIC);
		if (sent - start > WARMUP_NS && got - sent < LOST_NS)
			samples[count++] = (uint32_t)(got - sent);
	}
	if (!count) {
		fprintf(stderr, "xsk_raw: no frame came back: is the server running on the other end?\n");
		exit(1);
	}
	qsort(samples, count, sizeof(*samples), by_value);
	printf("{\"samples\":%u,\"p50\":%.3f,\"p99\":%.3f}\n", count, samples[count / 2] / 2e3,
	       samples[(uint64_t)count * 99 / 100] / 2e3);
	free(samples);
}

static int usage(void)
{
	fprintf(stderr, "usage: xsk_raw server IFACE | client IFACE SECONDS | sink IFACE | send IFACE SECONDS BATCH\n");
	return 2;
}

int main(int argc, char **argv)
{
	const char *role = argc > 1 ? argv[1] : "";
	bool timed = !strcmp(role, "client") || !strcmp(role, "send");
	int wanted = !strcmp(role, "send") ? 5 : timed ? 4 : 3;
	uint32_t batch = wanted == 5 && argc == 5 ? (uint32_t)atoi(argv[4]) : 1;
	struct port port;

	if (argc != wanted || (timed && !(atof(argv[3]) > 0)) || batch < 1 || batch > RING ||
	    (!timed && strcmp(role, "server") && strcmp(role, "sink")))
		return usage();
	if (!timed) {
		signal(SIGINT, on_signal);
		signal(SIGTERM, on_signal);
	}
	open_port(&port, argv[2]);
	if (!strcmp(role, "server"))
		serve(&port);
	else if (!strcmp(role, "sink"))
		sink(&port);
	else if (!strcmp(role, "client"))
		measure(&port, atof(argv[3]));
	else
		blast(&port, atof(argv[3]), batch);
	return 0;
}
