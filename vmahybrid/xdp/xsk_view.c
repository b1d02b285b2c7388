/* Ring access for RingView: maps the rings of a passed AF_XDP socket as any unprivileged process may
 * (XDP_MMAP_OFFSETS) and moves descriptors by libxdp's inline helpers. And the two steps that libxdp takes at once,
 * for sockets that are bound later. Included into vmahybrid._xsk.
 * Functions return 0 or -errno, or a number of descriptors.
 */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <xdp/xsk.h>

#ifndef SOL_XDP
#define SOL_XDP 283
#endif

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

/* What it can. huge: ask for transparent huge pages first, as whoever maps it later does */
static void vmh_umem_populate(int fd, uint64_t bytes, int huge)
{
	void *map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);

	if (map == MAP_FAILED)
		return;
	if (huge)
		madvise(map, bytes, MADV_HUGEPAGE);
	madvise(map, bytes, MADV_POPULATE_WRITE);
	munmap(map, bytes);
}

static int vmh_umem_register(int fd, void *area, uint64_t bytes, uint32_t chunk_size)
{
	struct xdp_umem_reg reg = { .addr = (uintptr_t)area, .len = bytes, .chunk_size = chunk_size };

	return setsockopt(fd, SOL_XDP, XDP_UMEM_REG, &reg, sizeof(reg)) ? -errno : 0;
}

/* umem_fd: the socket whose memory is shared, or -1 */
static int vmh_xsk_bind(int fd, uint32_t ifindex, uint32_t queue, uint16_t flags, int umem_fd)
{
	struct sockaddr_xdp to = { .sxdp_family = AF_XDP, .sxdp_flags = flags, .sxdp_ifindex = ifindex,
				   .sxdp_queue_id = queue };

	if (umem_fd >= 0) {
		to.sxdp_flags = XDP_SHARED_UMEM;
		to.sxdp_shared_umem_fd = (uint32_t)umem_fd;
	}
	return bind(fd, (struct sockaddr *)&to, sizeof(to)) ? -errno : 0;
}

/* Can the RX ring, of `size` descriptors, be mapped now? */
static int vmh_xsk_map(int fd, uint32_t size)
{
	struct xdp_mmap_offsets off;
	socklen_t len = sizeof(off);
	size_t bytes;
	void *map;

	if (getsockopt(fd, SOL_XDP, XDP_MMAP_OFFSETS, &off, &len))
		return -errno;
	bytes = off.rx.desc + size * sizeof(struct xdp_desc);
	map = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, fd, XDP_PGOFF_RX_RING);
	if (map == MAP_FAILED)
		return -errno;
	munmap(map, bytes);
	return 0;
}

struct vmh_view {
	int fd;
	void *maps[4];
	size_t lens[4];
	struct xsk_ring_cons rx, comp;
	struct xsk_ring_prod tx, fill;
};

static void *view_map(struct vmh_view *v, int i, const struct xdp_ring_offset *off, size_t bytes, off_t pgoff)
{
	size_t len = off->desc + bytes;
	void *map = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_POPULATE, v->fd, pgoff);

	if (map == MAP_FAILED)
		return NULL;
	v->maps[i] = map;
	v->lens[i] = len;
	return map;
}

static void view_prod(struct xsk_ring_prod *r, char *map, const struct xdp_ring_offset *off, uint32_t size)
{
	r->mask = size - 1;
	r->size = size;
	r->producer = (uint32_t *)(map + off->producer);
	r->consumer = (uint32_t *)(map + off->consumer);
	r->flags = (uint32_t *)(map + off->flags);
	r->ring = map + off->desc;
	r->cached_prod = *r->producer;
	r->cached_cons = *r->consumer + size; /* xsk_prod_nb_free keeps it `size` ahead */
}

static void view_cons(struct xsk_ring_cons *r, char *map, const struct xdp_ring_offset *off, uint32_t size)
{
	r->mask = size - 1;
	r->size = size;
	r->producer = (uint32_t *)(map + off->producer);
	r->consumer = (uint32_t *)(map + off->consumer);
	r->flags = (uint32_t *)(map + off->flags);
	r->ring = map + off->desc;
	r->cached_prod = *r->producer;
	r->cached_cons = *r->consumer;
}

static void vmh_view_close(struct vmh_view *v)
{
	for (int i = 0; i < 4; i++)
		if (v->maps[i])
			munmap(v->maps[i], v->lens[i]);
	memset(v, 0, sizeof(*v));
	v->fd = -1;
}

static int vmh_view_open(struct vmh_view *v, int fd, uint32_t rx, uint32_t tx, uint32_t fill, uint32_t comp)
{
	struct xdp_mmap_offsets off;
	socklen_t len = sizeof(off);
	void *m;

	memset(v, 0, sizeof(*v));
	v->fd = fd;
	if (getsockopt(fd, SOL_XDP, XDP_MMAP_OFFSETS, &off, &len))
		return -errno;
	if (!(m = view_map(v, 0, &off.rx, rx * sizeof(struct xdp_desc), XDP_PGOFF_RX_RING)))
		goto fail;
	view_cons(&v->rx, m, &off.rx, rx);
	if (!(m = view_map(v, 1, &off.tx, tx * sizeof(struct xdp_desc), XDP_PGOFF_TX_RING)))
		goto fail;
	view_prod(&v->tx, m, &off.tx, tx);
	if (!(m = view_map(v, 2, &off.fr, fill * sizeof(uint64_t), XDP_UMEM_PGOFF_FILL_RING)))
		goto fail;
	view_prod(&v->fill, m, &off.fr, fill);
	if (!(m = view_map(v, 3, &off.cr, comp * sizeof(uint64_t), XDP_UMEM_PGOFF_COMPLETION_RING)))
		goto fail;
	view_cons(&v->comp, m, &off.cr, comp);
	return 0;
fail:;
	int err = -errno;
	vmh_view_close(v);
	return err;
}

/* All n or none. A driver with zero-copy may sleep until it is told of new frames. */
static uint32_t vmh_view_fill(struct vmh_view *v, const uint64_t *addrs, uint32_t n)
{
	uint32_t at;

	if (!xsk_ring_prod__reserve(&v->fill, n, &at))
		return 0;
	for (uint32_t i = 0; i < n; i++)
		*xsk_ring_prod__fill_addr(&v->fill, at + i) = addrs[i];
	xsk_ring_prod__submit(&v->fill, n);
	if (xsk_ring_prod__needs_wakeup(&v->fill))
		recvfrom(v->fd, NULL, 0, MSG_DONTWAIT, NULL, NULL);
	return n;
}

static uint32_t vmh_view_receive(struct vmh_view *v, struct xdp_desc *out, uint32_t n)
{
	uint32_t at;

	n = xsk_ring_cons__peek(&v->rx, n, &at);
	for (uint32_t i = 0; i < n; i++)
		out[i] = *xsk_ring_cons__rx_desc(&v->rx, at + i);
	if (n)
		xsk_ring_cons__release(&v->rx, n);
	return n;
}

/* All n or none. */
static uint32_t vmh_view_send(struct vmh_view *v, const struct xdp_desc *descs, uint32_t n)
{
	uint32_t at;

	if (!xsk_ring_prod__reserve(&v->tx, n, &at))
		return 0;
	for (uint32_t i = 0; i < n; i++)
		*xsk_ring_prod__tx_desc(&v->tx, at + i) = descs[i];
	xsk_ring_prod__submit(&v->tx, n);
	return n;
}

static uint32_t vmh_view_completed(struct vmh_view *v, uint64_t *addrs, uint32_t n)
{
	uint32_t at;

	n = xsk_ring_cons__peek(&v->comp, n, &at);
	for (uint32_t i = 0; i < n; i++)
		addrs[i] = *xsk_ring_cons__comp_addr(&v->comp, at + i);
	if (n)
		xsk_ring_cons__release(&v->comp, n);
	return n;
}

/* One wake-up of the driver for TX. The kernel sends a limited batch per call: -EAGAIN asks for another. */
static int vmh_view_kick(struct vmh_view *v)
{
	if (!xsk_ring_prod__needs_wakeup(&v->tx))
		return 0;
	return sendto(v->fd, NULL, 0, MSG_DONTWAIT, NULL, 0) < 0 ? -errno : 0;
}
