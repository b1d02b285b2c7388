/* The verbs ring on a device made of arrays: what no software device here has (memory on the device, no checksums, no
 * extended CQ), and what can't be timed from outside (full queues, completions between request and sleep). */
#include "../../../vmahybrid/shim/ring_verbs.h"
#include "check.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include "vmh_stats.h"
#include "vmh_wait.h"
#include <arpa/inet.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/resource.h>

#define WRS 64

struct vmh_params vmh_params;
struct verbs_lib vmh_ibv;
_Atomic int vmh_log_level_now = -1, vmh_sleepers;
static struct vmh_ring_stats stats;
static char said[8192];
unsigned prefetched;
const void *prefetched_first;

void vmh_log_write(int level, const char *fmt, ...)
{
	size_t n = strlen(said);
	va_list ap;

	va_start(ap, fmt);
	n += (size_t)vsnprintf(said + n, sizeof(said) - n, fmt, ap);
	va_end(ap);
	if (n < sizeof(said) - 20)
		snprintf(said + n, sizeof(said) - n, " %d\n", level);
}
void vmh_params_used(unsigned param, const char *where, int64_t least, int64_t most, int64_t used)
{
	(void)param, (void)where, (void)least, (void)most, (void)used;
}
int64_t vmh_param_number(unsigned param) { (void)param; return 0; }
struct vmh_ring_stats *vmh_stats_ring_new(void) { memset(&stats, 0, sizeof(stats)); return &stats; }
void vmh_stats_ring_free(struct vmh_ring_stats *s) { (void)s; }
void vmh_wake_all_slow(void) {}
int vmh_net_addrs(unsigned ifindex, in_addr_t *a, int max) { (void)ifindex; (void)a; (void)max; return 0; }
uint64_t vmh_net_generation(void) { return 1; }
void vmh_verbs_dev_close(struct verbs_dev *d) { (void)d; }
void vmh_verbs_distrust(unsigned ifindex) { (void)ifindex; }

/* ---- the device ---- */

static struct verbs_context v;
static struct ibv_comp_channel channel;
static struct ibv_cq rx_cq, tx_cq;
static struct ibv_qp qp;
static struct ibv_pd pd;
static struct ibv_mr mr = { .lkey = 7 }, dm_mr = { .lkey = 9 };
static struct ibv_recv_wr posted[WRS];
static struct ibv_sge posted_sge[WRS];
static unsigned long long dm_frames, dm_octets; /* that were sent from device memory */
static unsigned nposted, nsent, refuse_send, refuse_recv, notified, cqs;
static struct ibv_wc rx_wc[WRS], tx_wc[WRS];
static unsigned nrx, ntx, late; /* late: this many completions appear with the request for a notification */
static struct ibv_send_wr sent;
static struct ibv_sge sent_sge[2];
static unsigned char wire[2048], device_memory[512];
static struct ibv_dm dm;

static int take(struct ibv_wc *from, unsigned *n, int max, struct ibv_wc *to)
{
	int got = *n < (unsigned)max ? (int)*n : max;

	memcpy(to, from, (size_t)got * sizeof(*to));
	memmove(from, from + got, (*n - (unsigned)got) * sizeof(*from));
	*n -= (unsigned)got;
	return got;
}

static int most; /* completions of received frames that were asked for at once */

static int poll_cq(struct ibv_cq *cq, int max, struct ibv_wc *to)
{
	if (cq == &rx_cq && max > most)
		most = max;
	return cq == &rx_cq ? take(rx_wc, &nrx, max, to) : take(tx_wc, &ntx, max, to);
}

static void arrive(const unsigned char *frame, size_t len, unsigned flags)
{
	struct ibv_recv_wr w = posted[0];

	memcpy((void *)(uintptr_t)posted_sge[0].addr, frame, len);
	nposted--;
	memmove(posted, posted + 1, nposted * sizeof(*posted));
	memmove(posted_sge, posted_sge + 1, nposted * sizeof(*posted_sge));
	rx_wc[nrx++] = (struct ibv_wc){ .wr_id = w.wr_id, .byte_len = (uint32_t)len, .wc_flags = flags };
}

static int req_notify(struct ibv_cq *cq, int solicited)
{
	(void)cq; (void)solicited;
	notified++;
	for (; late; late--)
		arrive(wire, 62, 0);
	return 0;
}

static int post_recv(struct ibv_qp *q, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad)
{
	(void)q;
	for (; wr; wr = wr->next) {
		if (refuse_recv || nposted == WRS) {
			*bad = wr;
			return ENOMEM;
		}
		posted_sge[nposted] = *wr->sg_list;
		posted[nposted++] = *wr;
	}
	return 0;
}

static int post_send(struct ibv_qp *q, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	size_t at = 0;

	(void)q;
	*bad = wr;
	if (refuse_send)
		return (int)refuse_send;
	sent = *wr;
	for (int i = 0; i < wr->num_sge; i++) {
		const struct ibv_sge *s = sent_sge + i;

		sent_sge[i] = wr->sg_list[i];
		dm_frames += s->lkey == dm_mr.lkey;
		dm_octets += s->lkey == dm_mr.lkey ? s->length : 0;
		memcpy(wire + at, s->lkey == dm_mr.lkey ? device_memory + s->addr : (void *)(uintptr_t)s->addr, s->length);
		at += s->length;
	}
	nsent++;
	return 0;
}

static struct ibv_dm *alloc_dm(struct ibv_context *c, struct ibv_alloc_dm_attr *a) { (void)c; (void)a; return &dm; }
static int free_dm(struct ibv_dm *d) { (void)d; return 0; }
static struct ibv_mr *reg_dm(struct ibv_pd *p, struct ibv_dm *d, uint64_t o, size_t l, unsigned a)
{
	(void)p; (void)d; (void)o; (void)l; (void)a;
	return &dm_mr;
}
static int to_dm(struct ibv_dm *d, uint64_t at, const void *from, size_t len)
{
	(void)d;
	CHECK(at + len <= sizeof(device_memory) && !(at & 3) && !(len & 3), "%llu + %zu", (unsigned long long)at, len);
	memcpy(device_memory + at, from, len);
	return 0;
}
static size_t lockable = SIZE_MAX;
static struct ibv_mr *reg_mr(struct ibv_pd *p, void *m, size_t l, int a)
{
	(void)p; (void)m; (void)a;
	if (l <= lockable)
		return &mr;
	errno = ENOMEM;
	return NULL;
}
static int dereg_mr(struct ibv_mr *m) { (void)m; return 0; }
static struct ibv_comp_channel *new_channel(struct ibv_context *c) { (void)c; channel.fd = eventfd(0, 0); return &channel; }
static int del_channel(struct ibv_comp_channel *c) { close(c->fd); return 0; }
static struct ibv_cq *new_cq(struct ibv_context *c, int n, void *x, struct ibv_comp_channel *ch, int vec)
{
	struct ibv_cq *cq = ch ? &rx_cq : &tx_cq;

	(void)n; (void)x; (void)vec;
	cqs++;
	cq->context = c;
	return cq;
}
static int del_cq(struct ibv_cq *c) { (void)c; cqs--; return 0; }
static int no_event(struct ibv_comp_channel *c, struct ibv_cq **q, void **x) { (void)c; (void)q; (void)x; errno = EAGAIN; return -1; }
static struct ibv_qp_cap asked; /* of the QP made last */

static struct ibv_qp *new_qp(struct ibv_pd *p, struct ibv_qp_init_attr *a)
{
	(void)p;
	asked = a->cap;
	if (a->cap.max_inline_data > 100) {
		errno = EINVAL;
		return NULL;
	}
	qp.context = &v.context;
	return &qp;
}
static int modify_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int m) { (void)q; (void)a; (void)m; return 0; }
static int query_qp(struct ibv_qp *q, struct ibv_qp_attr *a, int m, struct ibv_qp_init_attr *i)
{
	(void)q; (void)m; (void)i;
	a->cap.max_inline_data = 100;
	return 0;
}
static int del_qp(struct ibv_qp *q) { (void)q; nposted = 0; return 0; }
static int no_async(struct ibv_context *c, struct ibv_async_event *e) { (void)c; (void)e; errno = EAGAIN; return -1; }

static int refuse_flow;
static unsigned nflows;
static struct {
	_Alignas(8) unsigned char bytes[256];
} last; /* the attributes of the rule made last, and what follows them */
#define last_attr (*(const struct ibv_flow_attr *)(const void *)last.bytes)
#define last_rule ((const struct ibv_flow_spec_eth *)(const void *)(last.bytes + sizeof(struct ibv_flow_attr)))

static struct ibv_flow *new_flow(struct ibv_qp *q, struct ibv_flow_attr *a)
{
	struct ibv_flow *f;

	errno = refuse_flow;
	if (refuse_flow)
		return NULL;
	memcpy(&last, a, a->size);
	f = calloc(1, sizeof(*f));
	f->context = q->context;
	nflows++;
	return f;
}
static int del_flow(struct ibv_flow *f) { free(f); nflows--; return 0; }

/* ---- the shim around the ring ---- */

static struct vmh_buf *got[WRS];
static unsigned ngot;

int vmh_deliver(struct vmh_ring *r, struct vmh_buf *b)
{
	(void)r;
	got[ngot++] = b;
	return 1;
}

int vmh_deliver_hint(struct vmh_ring *r, struct vmh_buf *b, struct vmh_sock *hint, bool *used)
{
	(void)hint;
	*used = false;
	return vmh_deliver(r, b);
}

static void put_all(void)
{
	while (ngot)
		vmh_ring_put(got[--ngot]);
}

static struct verbs_dev dev;
static int opening; /* the errno that opening a ring is expected to end with */
static struct vmh_frame_hdr header;
static unsigned char data[1472];

static struct verbs_ring *make(bool csum, uint64_t max_dm)
{
	const unsigned char mac[6] = { 2, 0, 0, 0, 0, 1 };
	struct vmh_msg_ring_reply g = { .ring_id = 1, .ifindex = 3, .kind = VMH_RING_VERBS, .mtu = 1500 };
	struct vmh_ring *r = NULL;
	int rc;

	memcpy(g.mac, mac, 6);
	nposted = nsent = nrx = ntx = 0;
	dev = (struct verbs_dev){ .ctx = &v.context, .pd = &pd, .port = 1, .max_wr = 4096, .max_cqe = 4096, .csum = csum,
				  .max_dm = max_dm };
	rc = vmh_ring_verbs_open(&g, "x0", &dev, &r);
	CHECK(rc == -opening, "%d", rc);
	vmh_frame_hdr_init(&header, mac, mac, htonl(0x0a000001), htonl(0x0a000002), htons(7), htons(8), 64, 0, true);
	return rc ? NULL : verbs_ring_of(r);
}

static int send_bytes(struct verbs_ring *x, size_t len)
{
	struct iovec iov = { data, len };

	return vmh_ring_send(&x->r, &header, &iov, 1, len, false);
}

static int send_again(struct verbs_ring *x, size_t len)
{
	struct iovec iov = { data, len };

	return vmh_ring_send(&x->r, &header, &iov, 1, len, VMH_SEND_AGAIN);
}

static void complete(struct verbs_ring *x)
{
	tx_wc[ntx++] = (struct ibv_wc){ .wr_id = x->tx_posted };
}

/* VMA_TX_WRE, VMA_RX_WRE, VMA_TX_MAX_INLINE, VMA_QP_COMPENSATION_LEVEL and VMA_CQ_POLL_BATCH_MAX: what the device and
 * the pool of buffers are asked for. */
static void test_sizes(void)
{
	struct vmh_params old = vmh_params;
	struct verbs_ring *x;

	vmh_params.tx_bufs = 64;
	vmh_params.tx_wre = 48;
	vmh_params.tx_max_inline = 90;
	vmh_params.cq_poll_batch_max = 3;
	vmh_params.qp_compensation_level = 40;
	x = make(false, 0);
	CHECK(asked.max_send_wr == 48 && x->tx_slots == 47, "%u, %u", asked.max_send_wr, x->tx_slots);
	CHECK(asked.max_recv_wr == 32 && nposted == 32, "%u, %u", asked.max_recv_wr, nposted);
	CHECK(asked.max_inline_data == 90 && x->max_inline == 90, "%u", asked.max_inline_data);
	CHECK(vmh_verbs_pool_free(x->pool) == x->pool->count - 40, "%u", vmh_verbs_pool_free(x->pool));
	most = 0;
	for (int i = 0; i < 10; i++)
		arrive(wire, 62, 0);
	CHECK(vmh_ring_poll(&x->r, 100) == 10 && most == 3, "%d at once", most);
	put_all();
	vmh_ring_close(&x->r);
	vmh_params.cq_poll_batch_max = 16;
	vmh_params.qp_compensation_level = 8;
	x = make(false, 0);
	CHECK(vmh_verbs_pool_free(x->pool) == x->pool->count - 32, "no less than one poll takes: %u",
	      vmh_verbs_pool_free(x->pool));
	vmh_ring_close(&x->r);
	vmh_params = old;
}

static void test_sending(void)
{
	struct verbs_ring *x = make(false, 0);
	struct vmh_buf b;

	CHECK(x->max_inline == 51, "%u", x->max_inline); /* 204, 102, 51: the device said no to more than 100 */
	CHECK(send_bytes(x, 20) == 0 && sent.num_sge == 1, "%d", sent.num_sge);
	CHECK(!(sent.send_flags & IBV_SEND_IP_CSUM), "%x", sent.send_flags);
	CHECK(vmh_frame_parse(wire, 62, true, &b) == 0 && b.len == 20, "checksums in software");
	CHECK(!(sent.send_flags & (IBV_SEND_INLINE | IBV_SEND_SIGNALED)), "%x", sent.send_flags);
	for (unsigned i = 1; i < x->tx_slots; i++)
		CHECK(send_bytes(x, 20) == 0 && !!(sent.send_flags & IBV_SEND_SIGNALED) == ((i + 1) % 4 == 0), "%u", i);
	CHECK(send_bytes(x, 20) == -EAGAIN && stats.tx_full == 1, "every slot is in use");
	CHECK(send_again(x, 20) == -EAGAIN && stats.tx_full == 1 && stats.pool_tx_empty == 1, "tried again: counted once");
	tx_wc[ntx++] = (struct ibv_wc){ .wr_id = 4 };
	CHECK(send_bytes(x, 20) == 0 && x->tx_done == 4, "one completion frees the slots before it");
	tx_wc[ntx++] = (struct ibv_wc){ .wr_id = 99999 };
	vmh_verbs_reap(x);
	CHECK(x->tx_done == 4, "a completion of nothing");
	refuse_send = ENOMEM;
	CHECK(send_bytes(x, 20) == -EAGAIN && !x->suspect, "queue full");
	refuse_send = EINVAL;
	CHECK(send_bytes(x, 20) == -ENETDOWN && x->suspect, "queue dead");
	refuse_send = 0;
	CHECK(send_bytes(x, 1473) == -EMSGSIZE, "beyond the MTU");
	vmh_ring_close(&x->r);
	CHECK(cqs == 0, "%u", cqs);
}

/* Each that is not for the end of the QP, of both queues. */
static void test_completions_with_an_error(void)
{
	static const enum ibv_wc_status errors[] = { IBV_WC_LOC_LEN_ERR, IBV_WC_WR_FLUSH_ERR, IBV_WC_RETRY_EXC_ERR };
	struct verbs_ring *x = make(false, 0);

	for (unsigned i = 0; i < 9; i++) {
		CHECK(send_bytes(x, 20) == 0, "%u", i);
		tx_wc[ntx++] = (struct ibv_wc){ .wr_id = x->tx_posted, .status = errors[i % 3] };
		vmh_verbs_reap(x);
	}
	CHECK(stats.cq_errors == 6 && x->suspect, "%llu of sending", stats.cq_errors);
	for (unsigned i = 0; i < 6; i++) {
		arrive(wire, 62, 0);
		rx_wc[nrx - 1].status = errors[i % 3];
		CHECK(vmh_rings_poll(8) == 1 && ngot == 0, "%u", ngot);
	}
	CHECK(stats.cq_errors == 10, "%llu with those of receiving", stats.cq_errors);
	vmh_ring_close(&x->r);
}

static void test_device_memory(void)
{
	struct verbs_ring *x;
	unsigned i;

	vmh_params.ring_dev_mem_tx = 1 << 20;
	x = make(true, 64);
	CHECK(!x->slot_dm && !stats.dm_size, "less than one frame");
	vmh_ring_close(&x->r);
	vmh_params.bf = 0;
	said[0] = 0;
	atomic_store(&vmh_log_level_now, 2);
	x = make(true, 2048 + 64);
	CHECK(!x->slot_dm && strstr(said, "Device Memory functionality is not used on devices w/o Blue Flame support. 2\n"),
	      "%s", said);
	vmh_ring_close(&x->r);
	atomic_store(&vmh_log_level_now, -1);
	vmh_params.bf = 1;
	x = make(true, 2048 + 64);
	CHECK(stats.dm_size == x->dm.size && stats.dm_size > sizeof(device_memory), "%llu", stats.dm_size);
	x->dm.size = sizeof(device_memory); /* small, so that it goes round */
	dm_frames = dm_octets = 0;
	for (i = 0; i < 200; i++) {
		size_t len = 60 + i % 90;

		memset(data, (int)i, sizeof(data));
		CHECK(send_bytes(x, len) == 0, "%u", i);
		CHECK(!memcmp(wire + 42, data, len), "frame %u", i);
		CHECK(x->dm.used <= x->dm.size, "%u of %u", x->dm.used, x->dm.size);
		if (sent.send_flags & IBV_SEND_SIGNALED)
			complete(x);
	}
	CHECK(dm_frames > 50 && dm_frames < 200, "%llu of 200", dm_frames);
	CHECK(stats.dm_packets == dm_frames && stats.dm_bytes == dm_octets && stats.dm_full == 200 - dm_frames,
	      "%llu frames, %llu bytes, no room for %llu", stats.dm_packets, stats.dm_bytes, stats.dm_full);
	refuse_send = ENOMEM;
	complete(x);
	vmh_verbs_reap(x);
	CHECK(send_bytes(x, 60) == -EAGAIN && !x->dm.used, "what was not sent holds nothing");
	refuse_send = 0;
	CHECK(send_bytes(x, 60) == 0 && x->dm.used, "%u", x->dm.used);
	refuse_send = ENOMEM;
	i = x->dm.head;
	CHECK(send_bytes(x, 60) == -EAGAIN && x->dm.head == i, "%u, was %u", x->dm.head, i);
	CHECK(stats.dm_packets == dm_frames && stats.dm_packets + stats.dm_full == 201, "refused ones are not counted: %llu",
	      stats.dm_packets);
	refuse_send = 0;
	vmh_params.ring_dev_mem_tx = 0;
	vmh_ring_close(&x->r);
}

/* Lines of the frame that are asked for before it is written, or read, or there. */
static void test_prefetching(void)
{
	struct verbs_ring *x = make(true, 0);

	vmh_params.tx_prefetch_bytes = 256;
	prefetched = 0;
	send_bytes(x, 1000);
	CHECK(prefetched == 4, "%u", prefetched);
	prefetched = 0;
	send_bytes(x, 60);
	CHECK(prefetched == 2, "%u: as long as the frame", prefetched);
	vmh_params.tx_prefetch_bytes = 0;
	prefetched = 0;
	send_bytes(x, 60);
	CHECK(prefetched == 0, "%u", prefetched);
	for (int lines = 1; lines <= 2; lines++) {
		vmh_params.rx_prefetch_bytes = lines * 64;
		arrive(wire, 300, 0);
		prefetched = 0;
		CHECK(vmh_verbs_poll(&x->r, 8) == 1 && (int)prefetched == lines, "%u", prefetched);
	}
	prefetched = 0;
	CHECK(vmh_verbs_poll(&x->r, 8) == 0 && !prefetched && !x->order, "%u", prefetched);
	put_all();
	vmh_ring_close(&x->r);
	vmh_params.rx_prefetch_bytes_before_poll = 192;
	x = make(true, 0);
	for (unsigned i = 0; i < 3 * WRS; i++) {
		const void *next = (void *)(uintptr_t)posted_sge[0].addr;

		prefetched = 0;
		CHECK(vmh_verbs_poll(&x->r, 8) == 0 && prefetched == 3 && prefetched_first == next, "%u: %u", i, prefetched);
		arrive(wire, 62, 0);
		vmh_verbs_poll(&x->r, 8);
		put_all();
	}
	vmh_params.rx_prefetch_bytes_before_poll = vmh_params.rx_prefetch_bytes = 0;
	vmh_ring_close(&x->r);
}

static void test_receiving(void)
{
	struct verbs_ring *x = make(false, 0);
	unsigned before = nposted;

	CHECK(before >= x->rx_wr - x->batch && x->rx_cq == &rx_cq && !x->rx_ex, "%u posted", before);
	send_bytes(x, 20); /* the frame is on the wire now */
	arrive(wire, 62, 0);
	wire[50] ^= 1;
	arrive(wire, 62, IBV_WC_IP_CSUM_OK); /* a device that claims what it can't do is not believed */
	wire[50] ^= 1;
	CHECK(vmh_rings_poll(8) == 2 && ngot == 1 && stats.rx_bad == 1 && stats.rx_hw_csum == 0, "%u", ngot);
	put_all();
	rx_wc[nrx++] = (struct ibv_wc){ .wr_id = 1u << 30 };
	CHECK(vmh_rings_poll(8) == 1 && stats.rx_bad == 2, "a buffer that does not exist");
	notified = 0;
	late = 1;
	CHECK(vmh_rings_wait_fds(&(int){ 0 }, 1) == 1 && notified == 1 && ngot == 1, "came before the notification");
	put_all();
	refuse_recv = 1;
	for (unsigned i = 0; i < 2 * x->batch; i++)
		arrive(wire, 62, 0);
	vmh_rings_poll(64);
	put_all();
	CHECK(x->suspect && x->debt >= x->batch, "debt %u", x->debt);
	refuse_recv = 0;
	x->suspect = false;
	arrive(wire, 62, 0);
	vmh_rings_poll(8);
	CHECK(x->debt < x->batch, "debt %u", x->debt);
	vmh_ring_close(&x->r);
	CHECK(vmh_verbs_pool_free(x->pool) == x->pool->count - ngot, "%u of %u free, %u out", vmh_verbs_pool_free(x->pool),
	      x->pool->count, ngot);
	put_all(); /* of a closed ring */
	CHECK(vmh_verbs_pool_free(x->pool) == x->pool->count, "%u of %u", vmh_verbs_pool_free(x->pool), x->pool->count);
}

static unsigned steer(uint32_t id, unsigned kind, in_addr_t addr)
{
	struct vmh_flow f = { .id = id, .kind = kind, .ifindex = 3, .laddr = htonl(addr), .lport = htons(7) };
	static struct vmh_sock s;

	return vmh_verbs_attach(&f, &s);
}

/* A ring to which nothing can be steered is given back: when it is opened, or by the internal thread. */
static void test_flows_refused(void)
{
	struct verbs_ring *x;

	for (unsigned i = 0; i < 2; i++) {
		refuse_flow = opening = i ? EPERM : EOPNOTSUPP;
		x = make(true, 0);
		CHECK(!x && !cqs, "%u", cqs);
	}
	opening = 0;
	refuse_flow = EEXIST; /* another program tries at the same time */
	x = make(true, 0);
	CHECK(steer(1, VMH_FLOW_3T, 0x0a000001) == 0 && !vmh_verbs_failed(), "a rule that exists goes soon");
	vmh_verbs_detach(1);
	refuse_flow = 0;
	CHECK(steer(2, VMH_FLOW_3T, 0x0a000001) == 0 && nflows == 1, "%u", nflows);
	refuse_flow = EPERM;
	CHECK(steer(3, VMH_FLOW_3T, 0x0a000002) == VMH_R_VERBS_FAILED, "one of them");
	CHECK(!vmh_verbs_failed(), "the ring has another flow");
	vmh_verbs_detach(2);
	CHECK(!nflows && steer(4, VMH_FLOW_3T, 0x0a000002) == VMH_R_VERBS_FAILED, "%u", nflows);
	CHECK(vmh_verbs_failed() == &x->r, "none of them");
	refuse_flow = 0;
	CHECK(steer(5, VMH_FLOW_3T, 0x0a000002) == 0 && !vmh_verbs_failed(), "it takes flows again");
	vmh_verbs_detach(5);
	refuse_flow = EACCES;
	CHECK(steer(6, VMH_FLOW_MC, 0xef000001) == VMH_R_VERBS_FAILED && vmh_verbs_failed() == &x->r, "a group");
	refuse_flow = 0;
	vmh_ring_close(&x->r);
	CHECK(!vmh_verbs_failed() && !cqs, "closed");
}

static unsigned steer_tcp(uint32_t id, unsigned kind, const char *laddr, const char *raddr)
{
	struct vmh_msg_attach req = { .kind = kind, .ifindex = 3, .local_port = htons(80), .remote_port = htons(4000) };
	const char *text[2] = { laddr, raddr };
	unsigned char *to[2] = { req.local_addr, req.remote_addr };

	for (int i = 0; i < 2 && text[i]; i++)
		inet_pton(AF_INET6, text[i], to[i]);
	return vmh_verbs_attach_tcp(id, &req);
}

/* The specifications of the rule made last, by their types. */
static void test_tcp_rules(void)
{
	struct vmh_verbs_peer gone = { .port = htons(1) }, left[2] = { { .port = htons(2) }, { .port = htons(3) } };
	const struct ibv_flow_spec_ipv4 *v4 = (const void *)(last_rule + 1);
	const struct ibv_flow_spec_ipv6 *v6 = (const void *)v4;
	struct verbs_ring *x = make(true, 0);

	CHECK(steer_tcp(1, VMH_FLOW_5T, "::ffff:10.0.0.1", "::ffff:10.0.0.2") == 0 && nflows == 1, "%u", nflows);
	CHECK(last_attr.num_of_specs == 3 && last_attr.priority == 0, "%u", last_attr.num_of_specs);
	CHECK(last_rule->val.ether_type == htons(0x0800) && v4->type == IBV_FLOW_SPEC_IPV4, "%x", v4->type);
	CHECK(v4->val.dst_ip == htonl(0x0a000001) && v4->val.src_ip == htonl(0x0a000002) && v4->mask.src_ip == ~0u, "v4");
	CHECK(((const struct ibv_flow_spec_tcp_udp *)(v4 + 1))->type == IBV_FLOW_SPEC_TCP, "ports");
	vmh_verbs_detach(1);
	CHECK(!nflows, "%u", nflows);
	CHECK(steer_tcp(2, VMH_FLOW_3T, "fd00::1", NULL) == 0 && nflows == 1 && last_attr.priority == 1, "%u", nflows);
	CHECK(last_rule->val.ether_type == htons(0x86dd) && v6->type == IBV_FLOW_SPEC_IPV6, "%x", v6->type);
	CHECK(v6->val.dst_ip[0] == 0xfd && v6->val.dst_ip[15] == 1 && v6->mask.dst_ip[15] == 0xff && !v6->mask.src_ip[0], "v6");
	CHECK(steer(3, VMH_FLOW_3T, 0x0a000001) == 0 && nflows == 2, "UDP beside it");
	for (int i = 0; i < 2; i++)
		inet_pton(AF_INET6, "fd00::9", left[i].addr.b);
	vmh_verbs_narrow(2, &gone, left, 2);
	CHECK(nflows == 3 && last_attr.priority == 0 && v6->val.src_ip[15] == 9, "one rule for each that is left: %u", nflows);
	vmh_verbs_narrow(2, &left[0], NULL, 0);
	CHECK(nflows == 2, "%u", nflows);
	vmh_verbs_narrow(2, &gone, NULL, 0);
	CHECK(nflows == 2, "%u", nflows);
	vmh_verbs_detach(2);
	vmh_verbs_detach(3);
	CHECK(!nflows, "%u", nflows);
	vmh_ring_close(&x->r);
}

static unsigned others;

static int take_other(struct vmh_ring *r, unsigned char *frame, uint32_t len, struct vmh_buf *b)
{
	(void)r;
	others += frame[12] == 0x86 && len == 80 && b->ring == r;
	return 0;
}

static void test_whole_frames(void)
{
	struct verbs_ring *x = make(true, 0);
	unsigned char frame[1600] = { 2, [12] = 0x86, 0xdd };

	for (unsigned i = 60; i < sizeof(frame); i++)
		frame[i] = (unsigned char)i;
	CHECK(vmh_ring_send_frame(&x->r, frame, 1514, true) == 0 && !memcmp(wire, frame, 1514), "as it is");
	CHECK(!(sent.send_flags & (IBV_SEND_INLINE | IBV_SEND_IP_CSUM)), "%x", sent.send_flags);
	CHECK(vmh_ring_send_frame(&x->r, frame, 40, true) == 0 && sent.send_flags & IBV_SEND_INLINE, "%x", sent.send_flags);
	CHECK(!memcmp(wire, frame, 40), "inline");
	CHECK(vmh_ring_send_frame(&x->r, frame, 1515, true) == -EMSGSIZE, "beyond the MTU");
	arrive(frame, 80, 0);
	vmh_rings_poll(8);
	CHECK(!others && stats.rx_bad == 1, "nobody wants it");
	x->r.other = take_other;
	arrive(frame, 80, 0);
	vmh_rings_poll(8);
	CHECK(others == 1 && stats.rx_bad == 1, "%u", others);
	vmh_ring_close(&x->r);
}

static bool huge_pages_are_there(size_t len)
{
	void *p = mmap(NULL, (len + (2 << 20) - 1) & ~(size_t)((2 << 20) - 1), PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_HUGETLB, -1, 0);

	return p != MAP_FAILED;
}

/* The manual's boxes: each where what it says is so, and once. */
static void test_memory(void)
{
	struct verbs_dev dev = { .pd = &pd };
	struct verbs_ring x = { .dev = &dev, .r.mtu = 3000 };
	struct rlimit limit = { 12345, 12345 }, unlimited = { RLIM_INFINITY, RLIM_INFINITY };
	bool there = huge_pages_are_there(256 * 3072);
	int old = atomic_exchange(&vmh_log_level_now, VMH_LOG_INFO);

	vmh_params.mem_alloc_type = 1;
	CHECK(vmh_verbs_pool_get(&x) == 0 && !said[0], "%s", said);
	vmh_params.mem_alloc_type = 2;
	x.r.mtu = 4000;
	CHECK(vmh_verbs_pool_get(&x) == 0 && x.pool->count == 256, "works on");
	CHECK(!!strstr(said, "* Not enough hugepage resources for VMA memory allocation.    * 2\n") == !there, "%s", said);
	CHECK(!!strstr(said, "*              (VMA_MEM_ALLOC_TYPE= 0 or 1)                   * 3\n") == !there, "%s", said);
	CHECK(there == (x.pool->mem_len % (2 << 20) == 0), "%zu", x.pool->mem_len);
	said[0] = 0;
	x.tx_slots = 4;
	CHECK(vmh_verbs_tx_memory(&x) == 0 && !said[0], "%s", said);
	CHECK(x.tx_buf_size >= 4014 && x.tx_buf_size < 8192, "%u", x.tx_buf_size);
	vmh_verbs_tx_memory_free(&x);
	vmh_params.tx_buf_size = 8192;
	CHECK(vmh_verbs_tx_memory(&x) == 0 && x.tx_buf_size == 8192, "%u", x.tx_buf_size);
	vmh_verbs_tx_memory_free(&x);
	vmh_params.tx_buf_size = 0;
	vmh_params.mem_alloc_type = 0;
	x.r.mtu = 5000;
	lockable = 128 * 5120;
	if (!setrlimit(RLIMIT_MEMLOCK, &unlimited)) { /* root */
		CHECK(vmh_verbs_pool_get(&x) == 0 && !strstr(said, "max locked memory"), "%s", said);
		x.r.mtu = 5600;
	}
	lockable = 128 * 5632;
	said[0] = 0;
	CHECK(!setrlimit(RLIMIT_MEMLOCK, &limit), "%m");
	CHECK(vmh_verbs_pool_get(&x) == 0 && x.pool->count < 256, "%u", x.pool->count);
	CHECK(strstr(said, "Your current max locked memory is: 12345. Please change it to unlimited. 2\n"), "%s", said);
	CHECK(strstr(said, "buffers only, VMA_RX_BUFS asks for 256: raise ulimit -l"), "%s", said);
	said[0] = 0;
	x.r.mtu = 6200;
	lockable = 0;
	CHECK(vmh_verbs_pool_get(&x) == -ENOMEM && !said[0], "told already: %s", said);
	CHECK(vmh_verbs_tx_memory(&x) == -ENOMEM, "nothing can be locked");
	vmh_verbs_tx_memory_free(&x);
	lockable = SIZE_MAX;
	atomic_store(&vmh_log_level_now, old);
}

int main(void)
{
	v = (struct verbs_context){ .alloc_dm = alloc_dm, .free_dm = free_dm, .reg_dm_mr = reg_dm,
				    .ibv_create_flow = new_flow, .ibv_destroy_flow = del_flow, .sz = sizeof(v) };
	v.context.abi_compat = __VERBS_ABI_IS_EXTENDED;
	v.context.ops.poll_cq = poll_cq;
	v.context.ops.req_notify_cq = req_notify;
	v.context.ops.post_recv = post_recv;
	v.context.ops.post_send = post_send;
	v.context.cmd_fd = v.context.async_fd = -1;
	dm.context = &v.context;
	dm.memcpy_to_dm = to_dm;
	pd.context = mr.context = dm_mr.context = &v.context;
	vmh_ibv = (struct verbs_lib){ .reg_mr = reg_mr, .dereg_mr = dereg_mr, .create_comp_channel = new_channel,
				      .destroy_comp_channel = del_channel, .create_cq = new_cq, .destroy_cq = del_cq,
				      .get_cq_event = no_event, .create_qp = new_qp, .modify_qp = modify_qp,
				      .query_qp = query_qp, .destroy_qp = del_qp, .get_async_event = no_async };
	vmh_params.bf = 1;
	vmh_params.rx_bufs = 256;
	vmh_params.tx_bufs = vmh_params.tx_wre = vmh_params.rx_wre = 32;
	vmh_params.tx_wre_batching = vmh_params.rx_wre_batching = 4;
	vmh_params.tx_max_inline = 204;
	vmh_params.qp_compensation_level = 8;
	vmh_params.cq_poll_batch_max = 16;
	test_memory();
	test_sizes();
	test_sending();
	test_completions_with_an_error();
	test_device_memory();
	test_prefetching();
	test_receiving();
	test_flows_refused();
	test_tcp_rules();
	test_whole_frames();
	return check_result();
}
