/* UDP socket objects: creation, death, and finding the receiver of a datagram. */
#include "vmh_sock.h"
#include "vmh_control.h"
#include "vmh_heap.h"
#include "vmh_iomux.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_real.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include <fcntl.h>
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define CHUNK 16       /* sockets per allocation */
#define DEMUX_SIZE 1024 /* hash chains by local port; a power of two */

static struct vmh_lock pool_lock;
static struct vmh_sock *free_list;
static struct vmh_sock *_Atomic all;

/* Chains are walked under a ring lock by whoever polls: demux_lock is a leaf, held for a few loads. */
static struct vmh_lock demux_lock;
_Atomic uint32_t vmh_bindings;
static struct vmh_sock *demux[DEMUX_SIZE];

static struct vmh_sock *sock_alloc(void)
{
	struct vmh_sock *s;

	vmh_lock(&pool_lock);
	if (!free_list) {
		struct vmh_sock *chunk = mmap(NULL, CHUNK * sizeof(*chunk), PROT_READ | PROT_WRITE,
					      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (chunk == MAP_FAILED) {
			vmh_unlock(&pool_lock);
			return NULL;
		}
		for (int i = 0; i < CHUNK; i++) {
			atomic_store(&chunk[i].obj.closed, 2);
			chunk[i].free_next = free_list;
			free_list = &chunk[i];
			chunk[i].all_next = atomic_load(&all);
			atomic_store_explicit(&all, &chunk[i], memory_order_release);
		}
	}
	s = free_list;
	free_list = s->free_next;
	vmh_unlock(&pool_lock);
	return s;
}

static void sock_free(struct vmh_sock *s)
{
	vmh_lock(&pool_lock);
	s->free_next = free_list;
	free_list = s;
	vmh_unlock(&pool_lock);
}

void vmh_sock_each(void (*fn)(struct vmh_sock *s, void *arg), void *arg)
{
	for (struct vmh_sock *s = atomic_load_explicit(&all, memory_order_acquire); s; s = s->all_next) {
		if (atomic_load(&s->obj.closed))
			continue;
		vmh_obj_hold(&s->obj);
		if (!atomic_load(&s->obj.closed))
			fn(s, arg);
		vmh_obj_put(&s->obj);
	}
}

/* Everything but the object header, the statistics and the pool links starts at zero. A call on the closed
 * socket may only now come back from the kernel and count: the pointer is never NULL again, old or new. */
static void sock_reset(struct vmh_sock *s)
{
	const size_t from = offsetof(struct vmh_sock, rxq_lock);
	struct vmh_sock *all_next = s->all_next;

	memset((char *)s + from, 0, sizeof(*s) - from);
	s->all_next = all_next;
	s->rxq_tail = &s->rxq_head;
	atomic_store(&s->obj.class_, VMH_CLASS_UDP);
	s->obj.items = NULL;
	s->os_ratio_left = (uint32_t)vmh_params.rx_udp_poll_os_ratio;
	s->mc_all = 1;
}

void vmh_sock_created(int fd, int domain, int type, int protocol)
{
	if (domain != AF_INET || (type & 0xf) != SOCK_DGRAM || (protocol && protocol != IPPROTO_UDP))
		return;
	vmh_fdtab_init();
	if (!vmh_fd_fits(fd))
		return;
	struct vmh_sock *s = sock_alloc();
	if (!s)
		return;
	sock_reset(s);
	VMH_SET(s->stats, vmh_stats_sock_new(fd));
	VMH_SET(s->stats->proto, IPPROTO_UDP);
	VMH_SET(s->stats->family, 4);
	VMH_SET(s->stats->reason, VMH_R_NOT_TRIED);
	atomic_store(&s->nonblock, !!(type & SOCK_NONBLOCK));
	VMH_SET(s->stats->blocking, !(type & SOCK_NONBLOCK));
	vmh_sock_read_options(s, fd);
	if (!vmh_params.tx_mc_loopback) {
		int off = 0;
		if (!vmh_sys(SYS_setsockopt, fd, IPPROTO_IP, IP_MULTICAST_LOOP, &off, sizeof(off)))
			s->mc_loop = 0;
	}
	VMH_SET(s->stats->mc_loop, s->mc_loop);
	if (!vmh_params.offloaded_sockets)
		vmh_sock_set_reason(s, s->home = VMH_R_DISABLED, 0);
	vmh_fd_install(fd, &s->obj);
	vmh_obj_name(&s->obj, 0);
}

static void drop_queue(struct vmh_sock *s)
{
	struct vmh_buf *b;

	vmh_lock(&s->rxq_lock);
	b = s->rxq_head;
	s->rxq_head = NULL;
	s->rxq_tail = &s->rxq_head;
	atomic_store(&s->rxq_len, 0);
	s->rxq_bytes = s->rxq_truesize = 0;
	vmh_unlock(&s->rxq_lock);
	while (b) {
		struct vmh_buf *next = b->next;

		vmh_sock_buf_put(b);
		b = next;
	}
}

void vmh_sock_closed(struct vmh_sock *s)
{
	vmh_epoll_member_closed(&s->obj, false);
	vmh_lock(&s->obj.lock);
	bool any = vmh_sock_any_flow(s);

	vmh_sock_release_flows(s, VMH_R_NONE);
	if (any)
		vmh_rings_settle(); /* while it is filed: the next socket on the port is not to get what came for this one */
	vmh_lane_leave(&s->rx_lane);
	vmh_lane_leave(&s->tx_lane);
	vmh_sock_demux(s, 0);
	vmh_unlock(&s->obj.lock);
	vmh_wake_all();
}

void vmh_sock_recycle(struct vmh_sock *s)
{
	drop_queue(s);
	vmh_stats_file_dump(s->stats);
	vmh_stats_sock_free(s->stats);
	if (s->want_stamp)
		atomic_fetch_sub(&vmh_want_stamps, 1);
	if (s->stamping & SOF_TIMESTAMPING_RAW_HARDWARE)
		atomic_fetch_sub(&vmh_want_hw_stamps, 1);
	atomic_store(&s->obj.class_, VMH_CLASS_FREE);
	sock_free(s);
}

void vmh_sock_demux(struct vmh_sock *s, in_port_t port)
{
	vmh_lock(&demux_lock);
	atomic_fetch_add(&vmh_bindings, 1);
	if (s->demux_hash) {
		struct vmh_sock **p = &demux[(s->demux_hash - 1) % DEMUX_SIZE];

		while (*p && *p != s)
			p = &(*p)->demux_next;
		if (*p)
			*p = s->demux_next;
		s->demux_hash = 0;
	}
	if (port) {
		struct vmh_sock **p = &demux[ntohs(port) % DEMUX_SIZE];

		s->demux_hash = ntohs(port) % DEMUX_SIZE + 1;
		s->demux_next = *p; /* newest first, as in the kernel */
		*p = s;
	}
	vmh_unlock(&demux_lock);
}

bool vmh_sock_has_company(const struct vmh_sock *s)
{
	const struct vmh_sock *other;

	vmh_lock(&demux_lock);
	for (other = demux[ntohs(s->lport) % DEMUX_SIZE]; other; other = other->demux_next)
		if (other != s && other->lport == s->lport)
			break;
	vmh_unlock(&demux_lock);
	return other != NULL;
}

static bool is_member(const struct vmh_sock *s, in_addr_t group, unsigned ifindex)
{
	for (unsigned i = 0; i < s->nmembers; i++)
		if (s->members[i].group == group && s->members[i].ifindex == ifindex)
			return true;
	return false;
}

static bool wants_multicast(const struct vmh_sock *s, const struct vmh_ring *r, const struct vmh_buf *b)
{
	if (s->laddr && s->laddr != b->daddr)
		return false;
	if (s->rport && (s->rport != b->sport || s->raddr != b->saddr))
		return false;
	if (s->bound_if && s->bound_if != r->ifindex)
		return false;
	return is_member(s, b->daddr, r->ifindex) || s->mc_all;
}

/* The kernel's compute_score, as far as it applies; -1: not for this socket. One bound to the address comes before all
 * wildcards, which the kernel looks at only where it finds none (udp4_lib_lookup). */
static int score(const struct vmh_sock *s, const struct vmh_ring *r, const struct vmh_buf *b)
{
	int n = 0;

	if (s->laddr) {
		if (s->laddr != b->daddr)
			return -1;
		n += 16;
	}
	if (s->rport) {
		if (s->rport != b->sport || s->raddr != b->saddr)
			return -1;
		n += 8;
	}
	if (s->bound_if) {
		if (s->bound_if != r->ifindex)
			return -1;
		n += 4;
	}
	return n;
}

/* What an skb of this datagram would charge to the receive buffer (kernel: SKB_TRUESIZE of the size
 * class the head comes from, 768 for small ones). */
static uint32_t truesize(uint32_t len)
{
	return 256 + ((len + 362 + 511) & ~511u);
}

static bool enqueue(struct vmh_sock *s, struct vmh_buf *b)
{
	uint32_t size = truesize(b->len), limit = s->rcvbuf;

	if (limit < vmh_params.rx_bytes_min)
		limit = (uint32_t)vmh_params.rx_bytes_min;
	vmh_lock(&s->rxq_lock);
	if (s->rxq_truesize > limit || atomic_load_explicit(&s->obj.closed, memory_order_relaxed)) {
		VMH_COUNT(s->stats->rx_drop_packets, 1);
		VMH_COUNT(s->stats->rx_drop_bytes, b->len);
		vmh_unlock(&s->rxq_lock);
		return false;
	}
	b->next = NULL;
	*s->rxq_tail = b;
	s->rxq_tail = &b->next;
	s->rxq_bytes += b->len;
	s->rxq_truesize += size;
	if (s->rxq_truesize > limit / 2 && (!b->shared || b->ring->scarce))
		b->ring->brimming = true;
	uint32_t n = atomic_load_explicit(&s->rxq_len, memory_order_relaxed) + 1;
	atomic_store_explicit(&s->rxq_len, n, memory_order_release);
	VMH_SET(s->stats->rx_ready_packets, n);
	VMH_SET(s->stats->rx_ready_bytes, s->rxq_bytes);
	if (n > VMH_GET(s->stats->rx_ready_packets_max))
		VMH_SET(s->stats->rx_ready_packets_max, n);
	if (s->rxq_bytes > VMH_GET(s->stats->rx_ready_bytes_max))
		VMH_SET(s->stats->rx_ready_bytes_max, s->rxq_bytes);
	vmh_unlock(&s->rxq_lock);
	vmh_epoll_notify(&s->obj);
	vmh_wake_for(&(struct vmh_obj *){ &s->obj }, 1);
	return true;
}

/* The poller is a receiver of this very socket, and nothing is before this datagram. */
static int hand_over(struct vmh_ring *r, const struct vmh_sock *s, struct vmh_buf *b, uint32_t bindings)
{
	r->taken = b;
	r->memo = (struct vmh_taker_memo){ s, bindings, b->saddr, b->daddr, b->sport, b->dport };
	if (vmh_unlikely(!VMH_GET(s->stats->rx_ready_packets_max)))
		VMH_SET(s->stats->rx_ready_packets_max, 1);
	if (vmh_unlikely(b->len > VMH_GET(s->stats->rx_ready_bytes_max)))
		VMH_SET(s->stats->rx_ready_bytes_max, b->len);
	return 1;
}

uint32_t vmh_sock_truesize(const struct vmh_buf *b)
{
	return truesize(b->len);
}

/* A private copy for one more receiver of a multicast datagram: the only allocation on this path, and
 * only for the second and further receivers within one process. */
static struct vmh_buf *copy_of(const struct vmh_buf *b)
{
	struct vmh_buf *c = vmh_heap_get(sizeof(*c) + VMH_HW_STAMP + b->len);

	if (!c)
		return NULL;
	*c = *b;
	memcpy(c + 1, b->data - VMH_HW_STAMP, VMH_HW_STAMP + b->len);
	c->data = (unsigned char *)(c + 1) + VMH_HW_STAMP;
	c->shared = 1;
	return c;
}

/* A socket that is not read must not take the last frames of a queue from all others. */
VMH_COLD static int enqueue_copy(struct vmh_sock *s, struct vmh_buf *b)
{
	struct vmh_buf *c = copy_of(b);

	if (!c)
		return enqueue(s, b) ? VMH_DELIVERED : -ENOBUFS;
	if (enqueue(s, c))
		return VMH_DELIVERED_COPY;
	vmh_heap_free(c);
	return -ENOBUFS;
}

static inline int enqueue_in(const struct vmh_ring *r, struct vmh_sock *s, struct vmh_buf *b)
{
	if (vmh_unlikely(r->scarce))
		return enqueue_copy(s, b);
	return enqueue(s, b) ? VMH_DELIVERED : -ENOBUFS;
}

/* Of groups whose Ethernet address a member's group has, a rule by that address alone brings all (ip_check_mc() of Linux
 * drops them before any socket is asked). */
static bool nobody_joined(const struct vmh_ring *r, const struct vmh_buf *b)
{
	if (vmh_likely(!vmh_params.eth_mc_l2_only_rules))
		return false;
	for (struct vmh_sock *s = atomic_load_explicit(&all, memory_order_acquire); s; s = s->all_next)
		if (!atomic_load(&s->obj.closed) && is_member(s, b->daddr, r->ifindex))
			return false;
	return true;
}

static int deliver_multicast(struct vmh_ring *r, struct vmh_buf *b, struct vmh_sock *chain)
{
	struct vmh_sock *first = NULL;

	if (nobody_joined(r, b))
		return 0;
	for (struct vmh_sock *s = chain; s; s = s->demux_next) {
		if (s->lport != b->dport || !wants_multicast(s, r, b))
			continue;
		if (!first) {
			first = s;
			continue;
		}
		struct vmh_buf *c = copy_of(b);
		if (!c || !enqueue(s, c))
			vmh_heap_free(c);
	}
	if (!first)
		return 0;
	return enqueue_in(r, first, b);
}

/* demux_lock held. Is hint the receiver, whoever else there is? Where a connected socket of the same port could have
 * the better claim, or one more wants the group, it must be alone on the chain, unless the program promises that by
 * VMA_MC_FORCE_FLOWTAG. What the hint was may be closed or another socket by now. */
static bool surely(const struct vmh_sock *hint, const struct vmh_sock *chain, const struct vmh_ring *r,
		   const struct vmh_buf *b)
{
	bool alone = chain == hint && hint && !hint->demux_next;

	if (!hint || !hint->demux_hash || hint->lport != b->dport)
		return false;
	if (b->multicast)
		return !nobody_joined(r, b) && (vmh_params.mc_force_flowtag || (alone && !hint->reuseaddr)) &&
		       wants_multicast(hint, r, b);
	return (hint->rport || alone) && score(hint, r, b) >= 0;
}

int vmh_deliver(struct vmh_ring *r, struct vmh_buf *b)
{
	return vmh_deliver_hint(r, b, NULL, &(bool){ false });
}

int vmh_deliver_hint(struct vmh_ring *r, struct vmh_buf *b, struct vmh_sock *hint, bool *used)
{
	uint32_t bindings = atomic_load_explicit(&vmh_bindings, memory_order_acquire);
	struct vmh_sock *best = NULL;
	int best_score = -1, taken = 0;

	/* the taker is in a call on its socket, which therefore is what it was */
	if (r->taker && r->taker == r->memo.sock && r->memo.bindings == bindings && !r->taken &&
	    b->sport == r->memo.sport && b->saddr == r->memo.saddr && b->dport == r->memo.dport &&
	    b->daddr == r->memo.daddr && !vmh_sock_ready(r->taker)) {
		*used = hint == r->taker;
		return hand_over(r, r->taker, b, bindings);
	}
	vmh_lock(&demux_lock);
	struct vmh_sock *chain = demux[ntohs(b->dport) % DEMUX_SIZE];
	*used = surely(hint, chain, r, b);
	if (*used) {
		best = hint;
	} else if (vmh_unlikely(b->multicast)) {
		taken = deliver_multicast(r, b, chain);
	} else {
		for (struct vmh_sock *s = chain; s; s = s->demux_next) {
			if (s->lport != b->dport)
				continue;
			int n = score(s, r, b);
			if (n > best_score) {
				best = s;
				best_score = n;
			}
		}
	}
	if (best && best == r->taker && !r->taken && !vmh_sock_ready(best))
		taken = hand_over(r, best, b, bindings);
	else if (best && !atomic_load(&best->obj.closed)) /* else nobody's any more */
		taken = enqueue_in(r, best, b);
	vmh_unlock(&demux_lock);
	return taken;
}

void vmh_sock_buf_put(struct vmh_buf *b)
{
	if (vmh_unlikely(b->shared))
		vmh_heap_free(b);
	else
		vmh_ring_put(b);
}

static void child_reset(struct vmh_sock *s, void *arg)
{
	(void)arg;
	/* locks may have been held by threads that do not exist here */
	vmh_lock_reset(&s->obj.lock);
	vmh_lock_reset(&s->rxq_lock);
	vmh_lock_reset(&s->tx_lock);
	/* what the parent's ring delivered is the parent's to read */
	s->rxq_head = NULL;
	s->rxq_tail = &s->rxq_head;
	atomic_store(&s->rxq_len, 0);
	s->rxq_bytes = s->rxq_truesize = 0;
	s->flow.id = 0;
	for (unsigned i = 0; i < s->nmembers; i++)
		s->members[i].flow_id = 0;
	atomic_store(&s->rx_on, 0);
	atomic_store(&s->in_kernel, 0);
	atomic_store(&s->put_off, 0);
	memset(s->dsts, 0, sizeof(s->dsts));
	s->last_ring = NULL;
	/* the child's page has the parent's descriptions at the same addresses */
	VMH_SET(s->stats->flow_id, 0);
	vmh_sock_set_reason(s, s->home ? s->home : VMH_R_FORK, s->home_detail);
}

void vmh_sock_fork_child(void)
{
	vmh_lock_reset(&pool_lock);
	vmh_lock_reset(&demux_lock);
	for (struct vmh_sock *s = atomic_load(&all); s; s = s->all_next)
		if (!atomic_load(&s->obj.closed))
			vmh_obj_fork_child(&s->obj);
	vmh_sock_each(child_reset, NULL);
}
