/* Receiving on a UDP socket: from its ring queue, and from the kernel socket beneath. */
#include "vmh_control.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <limits.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/time.h>

#define LOOKS 8                 /* at the rings' indexes per poll of a waiting call */
#define CLOCK_EVERY 64          /* spins between looks at the clock */
#define SELDOM_NS 20000         /* who comes this long after his last call is no loop */

#define NOT_TAKEN (MSG_PEEK | MSG_ERRQUEUE)

/* recvmmsg has something already: that nothing more is there is no event of its own. */
static __thread bool has_some __attribute__((tls_model("initial-exec")));

/* Of a call with a bad address: the longest datagram that ends before it, -1 where none does. A longer one is lost: an
 * error, and nothing that was received. */
static __thread ssize_t fits __attribute__((tls_model("initial-exec"))) = SSIZE_MAX;

/* What is peeked at, or read from the error queue, is no datagram that came. */
VMH_COLD static void count_os(struct vmh_sock *s, ssize_t r, int flags)
{
	bool alone = vmh_rx_alone(s->stats);

	vmh_stats_look();
	if (r <= 0 && (r ? r == -EAGAIN && has_some : vmh_sock_at_end(s)))
		return;
	if (r >= 0 && (flags & NOT_TAKEN))
		return;
	if (vmh_likely(r >= 0 && r <= fits)) {
		VMH_COUNT_BY(alone, s->stats->rx_os_packets, 1);
		VMH_COUNT_BY(alone, s->stats->rx_os_bytes, (uint64_t)r);
	} else if (r == -EAGAIN) {
		VMH_COUNT_BY(alone, s->stats->rx_os_eagain, 1);
	} else {
		VMH_COUNT_BY(alone, s->stats->rx_os_errors, 1);
		if (r == -EMSGSIZE)
			vmh_sock_path_shrank(s);
	}
}

VMH_HOT static void count_poll(struct vmh_sock *s, bool hit)
{
	if (!hit && has_some)
		return;
	VMH_COUNT_BY(vmh_rx_alone(s->stats), *(hit ? &s->stats->rx_poll_hit : &s->stats->rx_poll_miss), 1);
}

/* A call that ends without a datagram, and not by the kernel's word. */
ssize_t vmh_sock_recv_failed(struct vmh_sock *s, ssize_t err)
{
	if (err == -EAGAIN && has_some)
		return err;
	VMH_COUNT_BY(vmh_rx_alone(s->stats), *(err == -EAGAIN ? &s->stats->rx_eagain : &s->stats->rx_errors), 1);
	return err;
}

/* Nothing will ever come from a ring as long as this call may block. On the way home its last frames come yet. */
VMH_HOT static bool kernel_only(const struct vmh_sock *s)
{
	return (!atomic_load_explicit(&s->rx_on, memory_order_acquire) &&
		(s->home || (VMH_GET(s->stats->reason) == VMH_R_LOOPBACK && VMH_GET(s->lport)))) ||
	       (!vmh_session_id() && !atomic_load_explicit(&vmh_worker_runs, memory_order_relaxed));
}

static size_t scatter(const struct msghdr *m, const unsigned char *data, size_t len)
{
	size_t done = 0;

	for (size_t i = 0; i < m->msg_iovlen && done < len; i++) {
		size_t n = m->msg_iov[i].iov_len;

		if (n > len - done)
			n = len - done;
		if (vmh_likely(n)) /* an empty one may be anywhere */
			memcpy(m->msg_iov[i].iov_base, data + done, n);
		done += n;
	}
	return done;
}

VMH_HOT static ssize_t copy_out(struct vmh_sock *s, struct msghdr *m, int flags, const struct vmh_buf *b)
{
	size_t n = scatter(m, b->data, b->len);

	m->msg_flags = 0;
	if (m->msg_name) {
		struct sockaddr_in from = { .sin_family = AF_INET, .sin_port = b->sport, .sin_addr.s_addr = b->saddr };
		socklen_t len = m->msg_namelen < sizeof(from) ? m->msg_namelen : (socklen_t)sizeof(from);

		memcpy(m->msg_name, &from, len);
		m->msg_namelen = sizeof(from);
	}
	if (vmh_unlikely(vmh_sock_tells_more(s)))
		vmh_sock_put_control(s, m, b);
	else
		m->msg_controllen = 0;
	if (n < b->len)
		m->msg_flags |= MSG_TRUNC;
	return (flags & MSG_TRUNC) ? (ssize_t)b->len : (ssize_t)n;
}

struct vmh_buf *vmh_sock_pop(struct vmh_sock *s)
{
	struct vmh_buf *b;

	vmh_lock(&s->rxq_lock);
	b = s->rxq_head;
	if (b) {
		uint32_t n = atomic_load_explicit(&s->rxq_len, memory_order_relaxed) - 1;

		s->rxq_head = b->next;
		if (!s->rxq_head)
			s->rxq_tail = &s->rxq_head;
		s->rxq_bytes -= b->len;
		s->rxq_truesize -= vmh_sock_truesize(b);
		atomic_store_explicit(&s->rxq_len, n, memory_order_release);
		VMH_SET(s->stats->rx_ready_packets, n);
		VMH_SET(s->stats->rx_ready_bytes, s->rxq_bytes);
	}
	vmh_unlock(&s->rxq_lock);
	return b;
}

void vmh_sock_unpop(struct vmh_sock *s, struct vmh_buf *b)
{
	vmh_lock(&s->rxq_lock);
	uint32_t n = atomic_load_explicit(&s->rxq_len, memory_order_relaxed) + 1;

	b->next = s->rxq_head;
	if (!s->rxq_head)
		s->rxq_tail = &b->next;
	s->rxq_head = b;
	s->rxq_bytes += b->len;
	s->rxq_truesize += vmh_sock_truesize(b);
	atomic_store_explicit(&s->rxq_len, n, memory_order_release);
	VMH_SET(s->stats->rx_ready_packets, n);
	VMH_SET(s->stats->rx_ready_bytes, s->rxq_bytes);
	vmh_unlock(&s->rxq_lock);
}

VMH_HOT static ssize_t consume(struct vmh_sock *s, struct msghdr *m, int flags, struct vmh_buf *b)
{
	ssize_t r = copy_out(s, m, flags, b);

	bool alone = vmh_rx_alone(s->stats);

	if (vmh_likely(r <= fits)) {
		VMH_COUNT_BY(alone, s->stats->rx_packets, 1);
		VMH_COUNT_BY(alone, s->stats->rx_bytes, b->len < (uint64_t)r ? b->len : (uint64_t)r);
	} else {
		VMH_COUNT_BY(alone, s->stats->rx_errors, 1);
	}
	VMH_SET(s->heard, 1);
	VMH_SET(s->tx_since_rx, 0);
	vmh_ring_put_later(b);
	return r;
}

/* One queued datagram. -EAGAIN: none. */
VMH_HOT static ssize_t take(struct vmh_sock *s, struct msghdr *m, int flags)
{
	ssize_t r = -EAGAIN;

	if (!vmh_sock_ready(s))
		return r;
	if (vmh_unlikely(flags & MSG_PEEK)) {
		vmh_lock(&s->rxq_lock);
		if (s->rxq_head)
			r = copy_out(s, m, flags, s->rxq_head);
		vmh_unlock(&s->rxq_lock);
		if (r >= 0)
			VMH_SET(s->next_from, VMH_NEXT_RING);
		return r;
	}
	struct vmh_buf *b = vmh_sock_pop(s);
	return b ? consume(s, m, flags, b) : r;
}

/* The same in a call whose first look finds it. */
static ssize_t take_hit(struct vmh_sock *s, struct msghdr *m, int flags)
{
	ssize_t r = take(s, m, flags);

	if (r != -EAGAIN)
		count_poll(s, true);
	return r;
}

/* The kernel socket, never blocking. */
VMH_COLD static ssize_t kernel_now(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	struct msghdr copy = *m; /* a failed recvmsg leaves lengths as they were */
	long r = vmh_sys(SYS_recvmsg, fd, &copy, flags | MSG_DONTWAIT);

	if (r != -EAGAIN) {
		*m = copy;
		count_os(s, r, flags);
		VMH_SET(s->os_more, 1);
		if (r >= 0)
			VMH_SET(s->heard, 1);
		if (r >= 0 && (flags & MSG_PEEK))
			VMH_SET(s->next_from, VMH_NEXT_OS);
	}
	return r;
}

VMH_COLD static ssize_t kernel_as_asked(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	ssize_t r = vmh_real_recvmsg(fd, m, flags);

	count_os(s, r, flags);
	return r;
}

void vmh_sock_comes_out(const struct vmh_sock *s)
{
	if (atomic_load(&s->put_off)) {
		atomic_store(&vmh_sock_any_shared, 1);
		vmh_worker_wake();
	}
}

static void came_out(struct vmh_sock **s)
{
	/* 0: in the child of a fork that a handler made, where it was forgotten */
	if (*s && atomic_load(&(*s)->in_kernel) && atomic_fetch_sub(&(*s)->in_kernel, 1) == 1)
		vmh_sock_comes_out(*s);
}

#define TOO_LATE (-0x10000)

/* A call that may wait, for the kernel alone; TOO_LATE: no longer. */
VMH_COLD static ssize_t wait_in_kernel(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	__attribute__((cleanup(came_out))) struct vmh_sock *in = s->home ? NULL : s; /* also when the thread is cancelled */

	if (in) {
		atomic_fetch_add(&s->in_kernel, 1);
		if (!kernel_only(s))
			return TOO_LATE;
	}
	return kernel_as_asked(s, fd, m, flags);
}

/* Is it the kernel socket's turn? */
VMH_HOT static bool os_turn(struct vmh_sock *s)
{
	uint32_t left;

	if (vmh_unlikely(atomic_load_explicit(&s->os_check, memory_order_relaxed)))
		return true;
	if (!vmh_params.rx_udp_poll_os_ratio)
		return false;
	if (vmh_unlikely(!atomic_load_explicit(&s->rx_on, memory_order_relaxed)))
		return false; /* back on the kernel, with a queue of what came by the rings before */
	/* written from what was read: threads that count at once lose a count, and never pass below 1 */
	left = VMH_GET(s->os_ratio_left);
	if (left > 1) {
		VMH_SET(s->os_ratio_left, left - 1);
		return false;
	}
	VMH_SET(s->os_ratio_left, (uint32_t)vmh_params.rx_udp_poll_os_ratio);
	return true;
}

/* >= 0: there is a datagram. A peek at nothing costs two thirds of a recvmsg, and most looks find nothing. An error is
 * told once, by whichever call meets it: it is the caller's to tell. */
static ssize_t peek_at_kernel(struct vmh_sock *s, int fd, int flags)
{
	ssize_t r = vmh_sys(SYS_recvfrom, fd, NULL, 0, MSG_PEEK | MSG_DONTWAIT, NULL, NULL);

	if (r < 0 && r != -EAGAIN)
		count_os(s, r, flags);
	return r;
}

static bool os_first(const struct vmh_sock *s)
{
	return vmh_unlikely(atomic_load_explicit(&s->os_check, memory_order_relaxed) >= VMH_OS_FIRST);
}

/* last: rings had nothing. What one has brought meanwhile is older than what came here when its rule was gone, unless it
 * has just been made. */
VMH_COLD static ssize_t look_at_kernel(struct vmh_sock *s, int fd, struct msghdr *m, int flags, bool last)
{
	uint32_t reports = atomic_load(&vmh_os_reports); /* before the look: a later one calls for another */
	ssize_t r = peek_at_kernel(s, fd, flags), older;

	if (r >= 0 && last && vmh_sock_ready(s) && !os_first(s)) {
		older = take(s, m, flags);
		if (older != -EAGAIN) {
			VMH_SET(s->os_more, 1);
			return older;
		}
	}
	if (r >= 0)
		r = kernel_now(s, fd, m, flags);
	if (r == -EAGAIN) {
		uint8_t turn = atomic_load(&s->os_check);

		if (turn != VMH_OS_FIRST_YET)
			atomic_compare_exchange_strong(&s->os_check, &turn, VMH_OS_SELDOM);
		VMH_SET(s->os_reports, reports);
		VMH_SET(s->os_more, 0);
	}
	return r;
}

/* The ratio is for those who call in a tight loop; who comes seldom is told the truth each time. Nobody hears EAGAIN
 * while the kernel socket is known to have something: it was found there, or select, poll or epoll reported of it. */
static bool os_due(struct vmh_sock *s)
{
	if (VMH_GET(s->os_more) || VMH_GET(s->os_reports) != atomic_load_explicit(&vmh_os_reports, memory_order_relaxed))
		return true;
	if (!vmh_params.rx_udp_poll_os_ratio)
		return false;
	uint64_t now = vmh_now_ns(), last = VMH_GET(s->tried_ns);

	VMH_SET(s->tried_ns, now);
	return now - last >= SELDOM_NS;
}

static struct vmh_ring *only_ring(const struct vmh_sock *s)
{
	struct vmh_ring *r = atomic_load_explicit(&s->only_ring, memory_order_relaxed);

	return vmh_unlikely(r && atomic_load_explicit(&r->gone, memory_order_relaxed)) ? NULL : r;
}

static int poll_own(const struct vmh_sock *s)
{
	struct vmh_ring *only = only_ring(s);

	return only ? vmh_ring_poll(only, vmh_poll_batch()) : vmh_rings_poll(vmh_poll_batch());
}

static bool may_go_on(void *arg)
{
	struct vmh_sock *s = arg;

	return vmh_sock_ready(s) || atomic_load(&s->obj.closed) ||
	       (atomic_load(&s->rx_on) && poll_own(s) && vmh_sock_ready(s));
}

/* Sleep until something may have changed. 0: look again. -EAGAIN: timed out. -EINTR. */
VMH_COLD static int doze(struct vmh_sock *s, int fd, struct vmh_waiting *w)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	int err;

	w->only = only_ring(s);
	w->obj = &s->obj;
	err = vmh_doze(w, &p, may_go_on, s);

	if (p.revents)
		atomic_compare_exchange_strong(&s->os_check, &(uint8_t){ VMH_OS_SELDOM }, VMH_OS_ONCE);
	return err;
}

/* No signal handler runs while a datagram is in hand: one that reads would get a later one before it, one that jumps
 * out would lose it. handed() ends that. */
static struct vmh_buf *in_hand(struct vmh_sock *s, int *frames, bool seen)
{
	struct vmh_buf *b;

	vmh_held_enter();
	b = vmh_rings_take(only_ring(s), s, vmh_poll_batch(), frames, seen);
	if (!b)
		vmh_held_leave();
	return b;
}

static ssize_t handed(struct vmh_sock *s, struct msghdr *m, int flags, struct vmh_buf *b)
{
	ssize_t r = consume(s, m, flags, b);

	vmh_held_leave();
	return r;
}

/* Polls the rings once: with several looks, since a look costs a fraction of what is done between polls. */
static struct vmh_buf *poll_once(struct vmh_sock *s, bool peek)
{
	struct vmh_ring *only = only_ring(s);
	bool seen = false;
	int frames;

	for (int i = 0; i < LOOKS && !seen; i++)
		seen = vmh_rings_pending(only);
	return peek ? poll_own(s), NULL : in_hand(s, &frames, seen);
}

/* Spin on the rings. 0: *b, or a datagram may be in the queue. -EAGAIN: budget spent. */
static int spin(struct vmh_sock *s, const struct vmh_waiting *w, uint64_t *loops, bool peek, struct vmh_buf **b)
{
	int64_t budget = vmh_params.rx_poll;

	for (;;) {
		*b = poll_once(s, peek);
		if (*b || vmh_sock_ready(s))
			return 0;
		++*loops;
		if (vmh_unlikely(vmh_interrupted(w)))
			return -EINTR;
		if (vmh_unlikely(!atomic_load_explicit(&s->rx_on, memory_order_relaxed) ||
				 atomic_load_explicit(&s->rd_shut, memory_order_relaxed) ||
				 atomic_load_explicit(&s->obj.closed, memory_order_relaxed)))
			return -EAGAIN;
		if (budget >= 0 && *loops >= (uint64_t)budget)
			return -EAGAIN;
		if (vmh_params.rx_poll_yield && *loops % (uint64_t)vmh_params.rx_poll_yield == 0)
			sched_yield();
		if (vmh_unlikely(*loops % VMH_SPIN_TURN == 0) && !vmh_spin_goes_on(*loops, budget >= 0))
			return -EAGAIN;
		if (vmh_unlikely(*loops % CLOCK_EVERY == 0)) {
			pthread_testcancel(); /* no lock is held; the interposer's reference is dropped by its cleanup */
			if (w->deadline && vmh_now_ns() >= w->deadline)
				return -EAGAIN;
		}
		if (os_turn(s))
			return -ENOMSG; /* the caller looks at the kernel socket and comes back */
		if (budget >= 0)
			vmh_cpu_relax(); /* who polls for ever has paid for the core: a pause would delay the datagram */
	}
}

VMH_HOT static ssize_t recv_blocking(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	struct vmh_waiting w;
	VMH_SPINS_HERE;
	uint64_t loops = 0;
	struct vmh_buf *b = NULL;
	bool missed = false;
	ssize_t r;

	vmh_waiting_begin(&w, VMH_GET(s->rcvtimeo_ns));
	for (;;) {
		if (vmh_unlikely(atomic_load(&s->obj.closed)))
			return vmh_sock_recv_failed(s, -EBADF);
		if (vmh_unlikely(atomic_load(&s->rd_shut)))
			return vmh_sock_ready(s) ? take(s, m, flags) : kernel_as_asked(s, vmh_fd_now(fd, &s->obj), m, flags);
		if (kernel_only(s)) {
			r = vmh_sock_ready(s) ? take(s, m, flags) : -EAGAIN;
			if (r == -EAGAIN)
				r = wait_in_kernel(s, vmh_fd_now(fd, &s->obj), m, flags);
			if (r != TOO_LATE)
				return r;
		}
		r = os_first(s) ? look_at_kernel(s, vmh_fd_now(fd, &s->obj), m, flags, false) : -EAGAIN;
		if (r != -EAGAIN)
			return r;
		r = vmh_interrupted(&w) ? -EINTR :
		    atomic_load(&s->rx_on) ? spin(s, &w, &loops, flags & MSG_PEEK, &b) : -EAGAIN;
		if (r == 0) {
			r = b ? handed(s, m, flags, b) : take(s, m, flags);
			if (r != -EAGAIN) {
				if (!missed) /* the polling of one call hits or misses once */
					count_poll(s, true);
				return r;
			}
			continue;
		}
		if (r == -EINTR) {
			if (!missed)
				count_poll(s, false);
			return vmh_sock_recv_failed(s, r);
		}
		bool spent = r == -EAGAIN;
		fd = vmh_fd_now(fd, &s->obj);
		r = look_at_kernel(s, fd, m, flags, true);
		if (r != -EAGAIN)
			return r;
		if (!spent)
			continue;
		if (loops && !missed) {
			count_poll(s, false);
			missed = true;
		}
		vmh_spin_ends();
		int err = doze(s, fd, &w);
		if (err)
			return vmh_sock_recv_failed(s, err);
		/* The budget is per call: woken by somebody else's datagram, this thread looks and sleeps again. */
		r = os_first(s) ? -EAGAIN : take(s, m, flags);
		if (r != -EAGAIN)
			return r;
	}
}

static ssize_t recv_now(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	bool peek = flags & MSG_PEEK;
	int frames = 0;
	struct vmh_buf *b = peek ? NULL : in_hand(s, &frames, false);

	if (peek || (!b && frames && !vmh_sock_ready(s)))
		vmh_rings_catch_up(vmh_poll_batch()); /* before it may lie frames of others */
	ssize_t r = b ? handed(s, m, flags, b) : take(s, m, flags);
	if (r != -EAGAIN) {
		count_poll(s, true);
		return r;
	}
	count_poll(s, false);
	if (os_due(s))
		r = look_at_kernel(s, fd, m, flags, true);
	return r == -EAGAIN ? vmh_sock_recv_failed(s, r) : r;
}

/* VMA_RX_POLL_INIT: looks at the kernel socket before sleeping, while no flow of this one is on a ring. */
VMH_COLD static ssize_t poll_init(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	int64_t loops = vmh_params.rx_poll_init;
	struct vmh_waiting w;
	ssize_t r = -EAGAIN;

	vmh_waiting_begin(&w, VMH_GET(s->rcvtimeo_ns));
	for (int64_t i = 0; r == -EAGAIN && (loops < 0 || i < loops); i++) {
		if (vmh_interrupted(&w))
			return vmh_sock_recv_failed(s, -EINTR);
		if (s->home || atomic_load(&s->rx_on) || atomic_load(&s->rd_shut) || atomic_load(&s->obj.closed) ||
		    (w.deadline && vmh_now_ns() >= w.deadline))
			break;
		r = kernel_now(s, fd, m, flags);
		pthread_testcancel();
	}
	return r;
}

/* What a ring had brought before the kernel had its turn, and now rings have it again: oldest first. */
static ssize_t recv_older(struct vmh_sock *s, struct msghdr *m, int flags)
{
	ssize_t r = take_hit(s, m, flags);
	uint32_t left = VMH_GET(s->rxq_older);

	if (r >= 0 && !(flags & MSG_PEEK) && left)
		VMH_SET(s->rxq_older, --left);
	VMH_SET(s->next_from, r >= 0 && left ? VMH_NEXT_OLDER : VMH_NEXT_ANY);
	return r;
}

/* Between ring and kernel socket there is no order, but who has seen a datagram, or its length, gets that one. */
static ssize_t recv_seen(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	uint8_t from = VMH_GET(s->next_from);
	ssize_t r;

	if (from == VMH_NEXT_OLDER)
		return recv_older(s, m, flags);
	r = from == VMH_NEXT_RING ? take_hit(s, m, flags) : look_at_kernel(s, fd, m, flags, false);
	if (r == -EAGAIN || !(flags & MSG_PEEK))
		VMH_SET(s->next_from, VMH_NEXT_ANY);
	return r;
}

VMH_HOT static ssize_t recv_some(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	bool now = (flags & MSG_DONTWAIT) || atomic_load_explicit(&s->nonblock, memory_order_relaxed);
	ssize_t r;

	if (vmh_unlikely(flags & MSG_ERRQUEUE))
		return kernel_as_asked(s, fd, m, flags);
	if (vmh_lane_due(&s->rx_lane, VMH_LANE_RX))
		vmh_sock_migrate(s, fd);
	flags &= ~MSG_OOB; /* UDP does not look at it */
	if (!atomic_load_explicit(&s->rx_on, memory_order_relaxed) && !vmh_sock_ready(s)) {
		if (vmh_unlikely(atomic_load_explicit(&s->shared, memory_order_relaxed)))
			if (!vmh_session_open())
				vmh_session_serve(); /* the child of a fork: the worker brings the socket back */
		if (!now && vmh_unlikely(vmh_params.rx_poll_init)) {
			r = poll_init(s, fd, m, flags);
			if (r != -EAGAIN)
				return r;
		}
		if (now)
			return kernel_as_asked(s, fd, m, flags);
		if (kernel_only(s)) {
			r = wait_in_kernel(s, fd, m, flags);
			if (r != TOO_LATE)
				return r;
		}
		r = kernel_now(s, fd, m, flags);
		return r != -EAGAIN ? r : recv_blocking(s, fd, m, flags);
	}
	if (vmh_unlikely(!atomic_load_explicit(&s->rx_on, memory_order_relaxed))) {
		/* back on the kernel, with a queue of what came by the rings before: an error comes first, as there */
		r = peek_at_kernel(s, fd, flags);
		if (r < 0 && r != -EAGAIN)
			return r;
	}
	if (vmh_unlikely(VMH_GET(s->next_from))) {
		r = recv_seen(s, fd, m, flags);
		if (r != -EAGAIN)
			return r;
	}
	if (os_turn(s)) {
		r = look_at_kernel(s, fd, m, flags, false);
		if (r != -EAGAIN)
			return r;
	}
	if (vmh_unlikely(vmh_params.rx_cq_drain_rate_nsec) && vmh_sock_ready(s))
		vmh_sock_drain_at_rate(s);
	r = take_hit(s, m, flags);
	if (r != -EAGAIN)
		return r;
	return now ? recv_now(s, fd, m, flags) : recv_blocking(s, fd, m, flags);
}

static bool bad_target(const struct msghdr *m)
{
	if (m->msg_name && m->msg_namelen && vmh_bad_ptr(m->msg_name))
		return true;
	if (m->msg_controllen && vmh_bad_ptr(m->msg_control) && m->msg_control)
		return true;
	for (size_t i = 0; i < m->msg_iovlen; i++) {
		const struct iovec *v = &m->msg_iov[i];

		if (vmh_bad_ptr(v->iov_base) && (v->iov_len || (intptr_t)v->iov_base < 0))
			return true;
	}
	return false;
}

/* As the kernel: what lies beyond user space is refused at once; a bad address in it is met when there is a datagram,
 * which is lost, unless it ends before. */
VMH_COLD static ssize_t recv_to_bad(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	bool bad_name = m->msg_name && m->msg_namelen && vmh_bad_ptr(m->msg_name);
	struct msghdr c = *m;
	size_t good = m->msg_iovlen, room = 0;
	ssize_t r;

	for (size_t i = m->msg_iovlen; i-- > 0;) {
		if ((intptr_t)m->msg_iov[i].iov_base < 0)
			return vmh_sock_recv_failed(s, -EFAULT);
		if (m->msg_iov[i].iov_len && vmh_bad_ptr(m->msg_iov[i].iov_base))
			good = i;
	}
	for (size_t i = 0; i < good; i++)
		room += m->msg_iov[i].iov_len;
	c.msg_iovlen = good;
	if (bad_name)
		c.msg_name = NULL;
	if (vmh_bad_ptr(c.msg_control)) {
		c.msg_control = NULL;
		c.msg_controllen = 0;
	}
	fits = bad_name ? -1 : good < m->msg_iovlen ? (ssize_t)room : SSIZE_MAX;
	r = recv_some(s, fd, &c, flags | MSG_TRUNC);
	bool fault = r > fits;
	fits = SSIZE_MAX;
	if (r < 0)
		return r;
	if (fault) /* counted where it was taken */
		return (flags & NOT_TAKEN) ? vmh_sock_recv_failed(s, -EFAULT) : -EFAULT;
	m->msg_namelen = c.msg_namelen;
	m->msg_controllen = c.msg_controllen;
	m->msg_flags = c.msg_flags;
	return (flags & MSG_TRUNC) || (size_t)r < room ? r : (ssize_t)room;
}

ssize_t vmh_sock_recvmsg(struct vmh_sock *s, int fd, struct msghdr *m, int flags)
{
	if (vmh_unlikely(m->msg_iovlen > 1024 || (m->msg_name && (int)m->msg_namelen < 0) ||
			 (m->msg_iovlen && vmh_bad_ptr(m->msg_iov))))
		return kernel_as_asked(s, fd, m, flags); /* EMSGSIZE, EINVAL and EFAULT are the kernel's to say */
	int cloexec = flags & MSG_CMSG_CLOEXEC; /* nothing comes that it would apply to, but the kernel says it back */
	ssize_t r = vmh_unlikely(bad_target(m)) ? recv_to_bad(s, fd, m, flags & ~cloexec)
						 : recv_some(s, fd, m, flags & ~cloexec);

	if (vmh_unlikely(cloexec) && r >= 0)
		m->msg_flags |= cloexec;
	return r;
}

int vmh_sock_fionread(struct vmh_sock *s, int fd, int *value)
{
	int r = 0, os = 0;

	vmh_rings_catch_up(vmh_poll_batch());
	if (VMH_GET(s->next_from) == VMH_NEXT_OS)
		r = (int)vmh_sys(SYS_ioctl, fd, FIONREAD, &os);
	vmh_lock(&s->rxq_lock);
	bool any = s->rxq_head && os <= 0;
	if (any)
		*value = (int)s->rxq_head->len;
	vmh_unlock(&s->rxq_lock);
	if (!any && os <= 0)
		r = (int)vmh_sys(SYS_ioctl, fd, FIONREAD, &os);
	if (!any && !r)
		*value = os;
	if (!any || VMH_GET(s->next_from) != VMH_NEXT_OLDER)
		VMH_SET(s->next_from, any ? VMH_NEXT_RING : os > 0 ? VMH_NEXT_OS : VMH_NEXT_ANY);
	return any ? 0 : r;
}

int vmh_sock_recvmmsg(struct vmh_sock *s, int fd, struct mmsghdr *v, unsigned n, int flags, struct timespec *timeout)
{
	uint64_t deadline = 0;
	unsigned done = 0;
	ssize_t r = 0;

	if (timeout) {
		if (timeout->tv_sec < 0 || (unsigned long)timeout->tv_nsec >= 1000000000ul)
			return (int)vmh_sock_recv_failed(s, -EINVAL);
		deadline = vmh_now_ns() + (uint64_t)timeout->tv_sec * 1000000000u + (uint64_t)timeout->tv_nsec;
	}
	if (n > 1024)
		n = 1024; /* UIO_MAXIOV, as the kernel */
	while (done < n) {
		has_some = done > 0;
		r = vmh_sock_recvmsg(s, fd, &v[done].msg_hdr, flags & ~MSG_WAITFORONE);
		has_some = false;
		if (r < 0)
			break;
		v[done++].msg_len = (unsigned)r;
		if (flags & MSG_WAITFORONE)
			flags |= MSG_DONTWAIT;
		/* as in Linux the timeout is looked at after a datagram only (recvmmsg(2), BUGS) */
		if (timeout) {
			uint64_t now = vmh_now_ns(), left = now < deadline ? deadline - now : 0;

			timeout->tv_sec = (time_t)(left / 1000000000u);
			timeout->tv_nsec = (long)(left % 1000000000u);
			if (!left)
				break;
		}
	}
	return done ? (int)done : (int)r;
}

void vmh_sock_shutdown(struct vmh_sock *s, int how)
{
	if (how == SHUT_RD || how == SHUT_RDWR)
		atomic_store(&s->rd_shut, 1);
	if (how == SHUT_WR || how == SHUT_RDWR)
		atomic_store(&s->wr_shut, 1);
	vmh_wake_all();
}
