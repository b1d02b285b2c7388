/* A ring against kernel sockets in another namespace: nothing lost, nothing changed, nothing leaked.
 * ring_exchange IFNAME ADDR MAC PEER-NETNS PEER-ADDR PEER-MAC */
#include "../../../vmahybrid/shim/ring_xdp.h"
#include "check.h"
#include "live.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/wait.h>

#define FRAMES 256u
static const struct vmh_xdp_limits no_limits;
#define RING 64u
#define PORT 7000       /* ours */
#define ECHO_PORT 7001  /* of the kernel's socket */
#define QUEUE 4096

static struct vmh_buf *queue[QUEUE];
static _Atomic unsigned queue_in, queue_out;
static _Atomic bool refuse, no_room;

int vmh_deliver(struct vmh_ring *r, struct vmh_buf *b)
{
	(void)r;
	if (b->dport != htons(PORT) || refuse)
		return 0;
	if (no_room)
		return -ENOBUFS;
	queue[queue_in % QUEUE] = b;
	queue_in++;
	return 1;
}

static struct vmh_ring *ring;
static struct vmh_frame_hdr header;
static unsigned char data[2048];

static struct xdp_ring *state(void)
{
	return (struct xdp_ring *)ring;
}

static struct vmh_buf *receive(void)
{
	for (uint64_t end = vmh_now_ns() + 1000000000; vmh_now_ns() < end;) {
		vmh_rings_poll(16);
		if (queue_out != queue_in)
			return queue[queue_out++ % QUEUE];
	}
	return NULL;
}

static void drain_for(unsigned ms)
{
	for (uint64_t end = vmh_now_ns() + ms * 1000000ull; vmh_now_ns() < end;) {
		vmh_rings_poll(64);
		while (queue_out != queue_in)
			vmh_ring_put(queue[queue_out++ % QUEUE]);
	}
}

static int send_bytes(size_t len, bool more)
{
	struct iovec iov = {data, len};

	return vmh_ring_send(ring, &header, &iov, 1, len, more);
}

/* Every RX frame is with the kernel or free, every TX frame free or in flight. */
static void check_frames(const char *when)
{
	struct xdp_ring *x = state();

	CHECK(ring->bufs_out == 0, "%s: %u buffers out", when, ring->bufs_out);
	CHECK(x->q[0].posted + x->rx_nfree == x->rx_frames, "%s: posted %u + free %u of %u", when, x->q[0].posted,
	      x->rx_nfree, x->rx_frames);
	CHECK(x->tx_nfree <= x->tx_frames, "%s: %u free TX frames", when, x->tx_nfree);
}

static void echo(const char *netns, const char *addr)
{
	struct sockaddr_in me = {.sin_family = AF_INET, .sin_port = htons(ECHO_PORT), .sin_addr.s_addr = inet_addr(addr)};
	int ns = open(netns, O_RDONLY | O_CLOEXEC), s, size = 1 << 20;
	char buf[2048];

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	if (ns < 0 || setns(ns, CLONE_NEWNET))
		live_die(netns, errno);
	s = socket(AF_INET, SOCK_DGRAM, 0);
	setsockopt(s, SOL_SOCKET, SO_RCVBUFFORCE, &size, sizeof(size));
	if (bind(s, (struct sockaddr *)&me, sizeof(me)))
		live_die("bind", errno);
	for (;;) {
		struct sockaddr_in from;
		socklen_t len = sizeof(from);
		ssize_t n = recvfrom(s, buf, sizeof(buf), 0, (struct sockaddr *)&from, &len);

		if (n >= 0)
			sendto(s, buf, (size_t)n, 0, (struct sockaddr *)&from, len);
	}
}

static void test_sizes(void)
{
	for (size_t len = 0; len <= 1472; len += len < 70 || len > 1465 ? 1 : 37) {
		struct vmh_buf *b;

		CHECK(send_bytes(len, false) == 0, "send %zu", len);
		b = receive();
		CHECK(b && b->len == len && !memcmp(b->data, data, len), "echo of %zu: %d", len, b ? (int)b->len : -1);
		if (!b)
			continue;
		CHECK(!memcmp(&b->saddr, header.bytes + 30, 4) && b->sport == htons(ECHO_PORT), "source");
		CHECK(b->stamp_ns == 0, "a stamp nobody asked for");
		vmh_ring_put(b);
	}
	CHECK(send_bytes(1473, false) == -EMSGSIZE, "above the MTU");
	check_frames("sizes");
}

static void test_stamps(void)
{
	struct timespec t;
	struct vmh_buf *b;

	vmh_want_stamps = 1;
	send_bytes(10, false);
	b = receive();
	vmh_want_stamps = 0;
	clock_gettime(CLOCK_REALTIME, &t);
	CHECK(b && b->stamp_ns / 1000000000 + 5 > (uint64_t)t.tv_sec && b->stamp_ns / 1000000000 <= (uint64_t)t.tv_sec,
	      "stamp");
	if (b)
		vmh_ring_put(b);
}

/* More at once than a batch of the kernel, than the TX ring, and than there are frames. */
/* The service's program puts a stamp before a frame; here it lies there already, in every frame of the receiver. */
static void plant_stamps(uint64_t ns)
{
	const struct vmh_stamp stamp = { ns, VMH_STAMP_MAGIC };
	struct xdp_ring *x = state();

	for (uint32_t f = x->tx_frames; f < x->frames; f++)
		memcpy(x->umem + ((size_t)f << x->frame_shift) + 256 - sizeof(stamp), &stamp, sizeof(stamp));
}

static bool stamped(uint64_t *ns, uint32_t *frame)
{
	struct vmh_buf *b;
	bool is;

	send_bytes(10, false);
	b = receive();
	CHECK(b && b->len == 10 && !memcmp(b->data, data, 10), "echo");
	if (!b)
		return false;
	is = b->hw_stamped;
	*ns = is ? vmh_buf_hw_stamp(b) : 0;
	*frame = b->frame;
	vmh_ring_put(b);
	return is;
}

static void test_hw_stamps(void)
{
	struct xdp_ring *x = state();
	uint32_t first, frame;
	uint64_t ns;

	CHECK(!ring->hw_stamps, "not granted");
	plant_stamps(77);
	CHECK(!stamped(&ns, &frame), "on a ring that has none");
	ring->hw_stamps = true;
	CHECK(!stamped(&ns, &frame), "nobody has ever asked for one");
	vmh_wanted_hw_stamps = true;
	CHECK(stamped(&ns, &first) && ns == 77, "%llu", (unsigned long long)ns);
	frame = first + 1;
	for (unsigned i = 0; i < 2 * FRAMES && frame != first; i++) {
		bool is = stamped(&ns, &frame);

		CHECK(is == (frame != first), "once from each frame");
	}
	CHECK(frame == first, "not used again");
	plant_stamps(78);
	x->clock = (struct xdp_clock){ .fd = -1, .synchronised = true, .ahead = 1000, .again = UINT64_MAX };
	CHECK(stamped(&ns, &frame) && ns == 1078, "by the other clock: %llu", (unsigned long long)ns);
	memset(x->umem + ((size_t)x->tx_frames << x->frame_shift), 0, (size_t)x->rx_frames << x->frame_shift);
	CHECK(!stamped(&ns, &frame), "it is not told again");
	ring->hw_stamps = false;
	vmh_wanted_hw_stamps = false;
	x->clock = (struct xdp_clock){ .fd = -1 };
}

static void test_bursts(void)
{
	static const unsigned sizes[] = {1, 2, 31, 33, 60};

	for (size_t i = 0; i < sizeof(sizes) / sizeof(sizes[0]); i++) {
		unsigned n = sizes[i], got = 0;
		struct vmh_buf *b;

		for (unsigned k = 0; k < n; k++) {
			memcpy(data, &k, sizeof(k));
			CHECK(send_bytes(100, true) == 0, "post %u of %u", k, n);
		}
		CHECK(queue_in == queue_out, "sent without a kick");
		CHECK(vmh_ring_kick(ring) == 0, "kick of %u", n);
		while (got < n && (b = receive())) {
			CHECK(b->len == 100 && !memcmp(b->data, &got, sizeof(got)), "order of %u", got);
			vmh_ring_put(b);
			got++;
		}
		CHECK(got == n, "%u of %u came back", got, n);
	}
	/* posting without end: the ring kicks by itself, or says EAGAIN; it never waits */
	unsigned posted = 0;
	uint64_t t0 = vmh_now_ns();

	for (unsigned k = 0; k < 1000; k++)
		posted += send_bytes(1, true) == 0;
	CHECK(vmh_now_ns() - t0 < 500000000, "took %ju ns", (uintmax_t)(vmh_now_ns() - t0));
	CHECK(posted >= RING, "%u posted", posted);
	vmh_ring_kick(ring);
	drain_for(200);
	check_frames("bursts");
	CHECK(send_bytes(5, false) == 0, "sends go on");
	drain_for(50);
}

/* A kick goes on until the kernel has taken everything, however small its batches are. */
static void test_small_batches(void)
{
	const struct xring *g = &state()->q[0].tx;
	uint64_t kicks = ring->stats->kicks;
	int budget = 32;

	CHECK(setsockopt(state()->q[0].fd, SOL_XDP, 9, &budget, sizeof(budget)) == 0, "XDP_MAX_TX_SKB_BUDGET, linux 6.17");
	for (unsigned k = 0; k < 48; k++)
		CHECK(send_bytes(1, true) == 0, "post %u", k);
	CHECK(vmh_ring_kick(ring) == 0, "kick");
	CHECK(kernel_index(g->cons) == g->here, "%u left behind", g->here - kernel_index(g->cons));
	CHECK(ring->stats->kicks - kicks == 2, "%ju kicks", (uintmax_t)(ring->stats->kicks - kicks));
	drain_for(50);
}

/* All frames are held by the program: nothing arrives any more; given back, everything goes on. */
static void test_hoarding(void)
{
	static struct vmh_buf *held[QUEUE];
	uint64_t empty = ring->stats->pool_rx_empty;
	unsigned n = 0;
	struct vmh_buf *b;

	while (n < state()->rx_frames) {
		if (send_bytes(20, false))
			break;
		b = receive();
		if (!b)
			break;
		held[n++] = b;
	}
	CHECK(n == state()->rx_frames, "held %u of %u", n, state()->rx_frames);
	CHECK(ring->bufs_out == n && state()->rx_nfree == 0, "%u out", ring->bufs_out);
	CHECK(ring->stats->pool_rx_empty > empty, "the empty pool was not counted");
	CHECK(ring->stats->queue_len == n && ring->stats->pool_rx_free == 0, "gauges");
	for (unsigned i = 0; i < n; i++) /* nobody polls: they must reach the kernel all the same */
		vmh_ring_put(held[i]);
	CHECK(state()->q[0].posted >= state()->low, "only %u posted", state()->q[0].posted);
	check_frames("hoarding");
	CHECK(send_bytes(20, false) == 0, "send after hoarding");
	b = receive();
	CHECK(b, "nothing arrives after hoarding");
	if (b)
		vmh_ring_put(b);
}

static void test_counters(void)
{
	struct vmh_ring_stats before = *ring->stats, *now = ring->stats;

	refuse = true;
	for (int i = 0; i < 10; i++)
		send_bytes(58, false);
	drain_for(100);
	refuse = false;
	CHECK(now->rx_no_socket - before.rx_no_socket == 10, "%ju unwanted",
	      (uintmax_t)(now->rx_no_socket - before.rx_no_socket));
	no_room = true;
	for (int i = 0; i < 10; i++)
		send_bytes(58, false);
	drain_for(100);
	no_room = false;
	CHECK(now->rx_dropped - before.rx_dropped == 10, "%ju dropped", (uintmax_t)(now->rx_dropped - before.rx_dropped));
	CHECK(now->rx_packets - before.rx_packets == 20 && now->rx_bytes - before.rx_bytes == 2000, "%ju packets",
	      (uintmax_t)(now->rx_packets - before.rx_packets));
	CHECK(now->tx_packets - before.tx_packets == 20 && now->tx_bytes - before.tx_bytes == 2000, "%ju sent",
	      (uintmax_t)(now->tx_packets - before.tx_packets));
	CHECK(now->kicks - before.kicks == 20, "%ju kicks", (uintmax_t)(now->kicks - before.kicks));
	CHECK(now->rx_bad == before.rx_bad, "bad frames");
	check_frames("counters");
}

/* A reader thread and many threads that give back, while frames keep coming. */
static _Atomic bool stop;
static _Atomic unsigned put_by_threads;

static void *putter(void *arg)
{
	(void)arg;
	while (!stop || queue_out != queue_in) {
		unsigned at = queue_out;

		if (at != queue_in) {
			struct vmh_buf *b = queue[at % QUEUE];

			if (atomic_compare_exchange_strong(&queue_out, &at, at + 1)) {
				vmh_ring_put(b);
				put_by_threads++;
				continue;
			}
		}
		sched_yield();
	}
	return NULL;
}

static void *poller(void *arg)
{
	(void)arg;
	while (!stop)
		if (!vmh_rings_poll(16))
			sched_yield();
	return NULL;
}

static void test_threads(void)
{
	pthread_t t[4];
	unsigned sent = 0, before = queue_in;

	for (int i = 0; i < 4; i++)
		pthread_create(&t[i], NULL, i < 2 ? putter : poller, NULL);
	for (uint64_t end = vmh_now_ns() + 600000000; vmh_now_ns() < end;) {
		sent += send_bytes(64, false) == 0;
		if (sent % 64 == 0)
			usleep(200);
	}
	usleep(200000);
	stop = true;
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	/* many are lost on the way, the ring is small; none that was delivered */
	CHECK(put_by_threads == queue_in - before, "%u of %u given back", put_by_threads, queue_in - before);
	CHECK(put_by_threads > 1000, "%u of %u came back", put_by_threads, sent);
	CHECK(!ring->returned, "a buffer was left behind");
	drain_for(50);
	check_frames("threads");
}

static void test_sleep(void)
{
	int fds[VMH_RING_WAIT_FDS], n = vmh_rings_wait_fds(fds, VMH_RING_WAIT_FDS);
	struct pollfd p = {.fd = fds[0], .events = POLLIN};
	struct vmh_buf *b;

	CHECK(n == 1, "%d fds", n);
	CHECK(vmh_rings_wait_fds(fds, 0) == 0, "no room for fds");
	CHECK(poll(&p, 1, 0) == 0, "readable without a frame");
	send_bytes(9, false);
	CHECK(poll(&p, 1, 1000) == 1 && (p.revents & POLLIN), "not woken");
	b = receive();
	CHECK(b && b->len == 9, "nothing to read");
	if (b)
		vmh_ring_put(b);
}

/* Closed with buffers out: they stay readable, the queue is free at once. */
static void test_close(const char *ifname)
{
	struct vmh_buf *a, *b;
	struct xdp_ring *x = state();
	unsigned char copy[50];

	memcpy(copy, data, sizeof(copy));
	send_bytes(50, false);
	send_bytes(50, false);
	a = receive();
	b = receive();
	CHECK(a && b, "two datagrams");
	if (!a || !b)
		return;
	vmh_ring_close(ring);
	CHECK(ring->gone && send_bytes(1, false) == -ENETDOWN && vmh_ring_kick(ring) == -ENETDOWN, "sends when gone");
	CHECK(vmh_ring_poll(ring, 16) == 0 && vmh_rings_wait_fds((int[1]){0}, 1) == 0, "polls when gone");
	CHECK(a->len == 50 && !memcmp(a->data, copy, 50), "payload gone");
	vmh_ring_put(a);
	CHECK(x->umem && !memcmp(b->data, copy, 50), "unmapped while a buffer is out");
	vmh_ring_put(b);
	CHECK(!x->umem && !x->bufs, "still mapped");
	vmh_ring_close(ring);
	/* the old XSK must be gone, or this bind fails with EBUSY */
	ring = live_open(ifname, FRAMES, RING);
	CHECK(vmh_rings->next == ring, "the list");
	send_bytes(50, false);
	a = receive();
	CHECK(a && a->len == 50, "the next ring");
	if (a)
		vmh_ring_put(a);
}

/* The child of a fork lets go; the parent's ring goes on, and closing it frees the queue. */
static void test_fork(void)
{
	struct vmh_buf *b;
	int status = -1;
	pid_t pid;

	vmh_lock(&ring->lock); /* as if another thread polled just now */
	pid = fork();
	if (pid == 0) {
		vmh_rings_fork_child();
		_exit(ring->gone && vmh_ring_poll(ring, 16) == 0 && send_bytes(1, false) == -ENETDOWN ? 0 : 1);
	}
	vmh_unlock(&ring->lock);
	waitpid(pid, &status, 0);
	CHECK(status == 0, "child: %x", status);
	CHECK(send_bytes(11, false) == 0, "the parent's ring sends");
	b = receive();
	CHECK(b && b->len == 11, "the parent's ring receives");
	if (b)
		vmh_ring_put(b);
}

static void test_grants(void)
{
	const struct vmh_msg_ring_reply good = {.nqueues = 1, .frame_size = 2048, .frames = 64, .rx_size = 64,
						.tx_size = 64, .fill_size = 64, .comp_size = 64};
	struct vmh_msg_ring_reply g;
	struct vmh_ring *r = NULL;
	int fds[2] = {open("/dev/null", O_RDWR), open("/dev/null", O_RDWR)};

	g = good, g.frame_size = 3000;
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 2, &no_limits, NULL, &r) == -EPROTO, "frame size");
	g = good, g.frames = 1;
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 2, &no_limits, NULL, &r) == -EPROTO, "one frame");
	g = good, g.nqueues = 17;
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 18, &no_limits, NULL, &r) == -EPROTO, "17 queues");
	g = good, g.nqueues = 0;
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 1, &no_limits, NULL, &r) == -EPROTO, "no queue");
	g = good, g.rx_size = 65;
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 2, &no_limits, NULL, &r) == -EPROTO, "ring size");
	g = good;
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 3, &no_limits, NULL, &r) == -EPROTO, "number of fds");
	CHECK(vmh_ring_xdp_open(&g, "x", fds, 2, &no_limits, NULL, &r) < 0, "memory that is none");
	int memfd = (int)syscall(SYS_memfd_create, "m", 0u);
	CHECK(ftruncate(memfd, 64 * 2048 - 1) == 0, "ftruncate");
	CHECK(vmh_ring_xdp_open(&g, "x", (int[2]){memfd, fds[1]}, 2, &no_limits, NULL, &r) == -EPROTO, "memory too small");
	CHECK(ftruncate(memfd, 64 * 2048) == 0, "ftruncate");
	CHECK(vmh_ring_xdp_open(&g, "x", (int[2]){memfd, fds[1]}, 2, &no_limits, NULL, &r) == -ENOTSOCK, "an XSK that is none");
	CHECK(r == NULL && fcntl(memfd, F_GETFD) >= 0, "fds are the caller's on failure");
}

int main(int argc, char **argv)
{
	unsigned char mac[6], peer_mac[6];
	pid_t child;

	if (argc != 7)
		live_die("arguments", EINVAL);
	live_mac(argv[3], mac);
	live_mac(argv[6], peer_mac);
	child = fork();
	if (child == 0)
		echo(argv[4], argv[5]);
	usleep(100000);
	for (size_t i = 0; i < sizeof(data); i++)
		data[i] = (unsigned char)(i * 31);
	ring = live_open(argv[1], FRAMES, RING);
	vmh_frame_hdr_init(&header, peer_mac, mac, inet_addr(argv[2]), inet_addr(argv[5]), htons(PORT), htons(ECHO_PORT), 64,
			   0, true);
	test_grants();
	test_sizes();
	test_stamps();
	test_hw_stamps();
	test_bursts();
	test_small_batches();
	test_hoarding();
	test_counters();
	test_threads();
	test_sleep();
	test_close(argv[1]);
	test_fork();
	vmh_ring_close(ring);
	kill(child, SIGKILL);
	return check_result();
}
