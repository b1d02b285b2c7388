/* Calls on TCP sockets: by the stack while the connection is on a ring, by the kernel else. What the stack can't do
 * sends the connection home first. */
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_real.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_wait.h"
#include <limits.h>
#include <netinet/in.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/ioctl.h>

#define LOOKS 8         /* at the rings' indexes per poll of a waiting call */
#define CLOCK_EVERY 64  /* spins between looks at the clock */
#define RECV_FLAGS (MSG_PEEK | MSG_TRUNC | MSG_DONTWAIT | MSG_WAITALL | MSG_NOSIGNAL | MSG_CMSG_CLOEXEC)
#define SEND_FLAGS (MSG_DONTWAIT | MSG_NOSIGNAL | MSG_MORE | MSG_CONFIRM | MSG_EOR)
#define GO_ON (-1000000) /* the state has changed: look again */

char vmh_tcps_buffer;

/* ---- by the kernel ---- */

static ssize_t kernel_call(int fd, struct msghdr *m, int flags, bool send)
{
	int saved = errno;
	ssize_t r;

	if (m->msg_name != &vmh_tcps_buffer)
		return send ? vmh_real_sendmsg(fd, m, flags) : vmh_real_recvmsg(fd, m, flags);
	/* the kernel has less to do */
	r = send ? vmh_real()->send(fd, m->msg_iov->iov_base, m->msg_iov->iov_len, flags)
		 : vmh_real()->recv(fd, m->msg_iov->iov_base, m->msg_iov->iov_len, flags);
	if (r < 0) {
		r = -errno;
		errno = saved;
	}
	return r;
}

static void in_kernel_ends(struct vmh_tcps **s)
{
	atomic_fetch_sub(&(*s)->in_kernel, 1);
}

static ssize_t counted_call(struct vmh_tcps *s, int fd, struct msghdr *m, int flags, bool send)
{
	__attribute__((cleanup(in_kernel_ends))) struct vmh_tcps *in = s; /* also when the thread is cancelled */

	atomic_fetch_add(&s->in_kernel, 1); /* before the look at state: see vmh_tcps_adopt */
	if (atomic_load(&in->state) != VMH_TCPS_KERNEL)
		return GO_ON;
	return kernel_call(fd, m, flags, send);
}

/* Of one call: what it moved, or how it failed. A look (MSG_PEEK) moves nothing, nor does the end of the stream. */
static void account(struct vmh_tcps *s, ssize_t r, int flags, bool send, bool kernel)
{
	struct vmh_sock_stats *st = VMH_GET(s->stats);
	bool alone = send ? vmh_tx_alone(st) : vmh_rx_alone(st);

	if (kernel)
		vmh_stats_look();
	if (vmh_likely(r > 0)) {
		if (vmh_unlikely(flags & MSG_PEEK))
			return;
		if (kernel) {
			VMH_COUNT_BY(alone, *(send ? &st->tx_os_packets : &st->rx_os_packets), 1);
			VMH_COUNT_BY(alone, *(send ? &st->tx_os_bytes : &st->rx_os_bytes), (uint64_t)r);
		} else {
			VMH_COUNT_BY(alone, *(send ? &st->tx_packets : &st->rx_packets), 1);
			VMH_COUNT_BY(alone, *(send ? &st->tx_bytes : &st->rx_bytes), (uint64_t)r);
		}
	} else if (!r) {
		return;
	} else if (r == -EAGAIN) {
		VMH_COUNT_BY(alone, *(kernel ? send ? &st->tx_os_eagain : &st->rx_os_eagain
					     : send ? &st->tx_eagain : &st->rx_eagain), 1);
	} else {
		VMH_COUNT_BY(alone, *(kernel ? send ? &st->tx_os_errors : &st->rx_os_errors
					     : send ? &st->tx_errors : &st->rx_errors), 1);
	}
}

static inline void plain_done(const struct vmh_plain_call *c, int fd, int flags, bool send, ssize_t r)
{
	struct vmh_obj *o = vmh_fd_peek(fd, VMH_CLASS_TCP); /* no reference is taken: objects are type-stable */
	struct vmh_tcps *s;
	struct vmh_sock_stats *st;

	if (vmh_unlikely(!o))
		return;
	s = vmh_tcps_of(o);
	st = VMH_GET(s->stats);
	if (vmh_unlikely(r <= 0 || (flags & MSG_PEEK) ||
			 !vmh_alone_by(c->tid, send ? &st->thread_tx : &st->thread_rx, send ? &st->tx_many : &st->rx_many))) {
		account(s, r < 0 ? -errno : r, flags, send, true);
	} else { /* the same, in fewer instructions */
		vmh_stats_look();
		vmh_add_here(send ? &st->tx_os_packets : &st->rx_os_packets, 1);
		vmh_add_here(send ? &st->tx_os_bytes : &st->rx_os_bytes, (uint64_t)r);
	}
	if (r <= 0)
		return;
	vmh_tcps_kernel_round(s, send, r);
	if (vmh_unlikely(vmh_tcps_is_due(s)))
		vmh_plain_shut(fd);
}

void vmh_tcps_plain_sent(const struct vmh_plain_call *c, int fd, int flags, ssize_t r)
{
	plain_done(c, fd, flags, true, r);
}

void vmh_tcps_plain_received(const struct vmh_plain_call *c, int fd, int flags, ssize_t r)
{
	plain_done(c, fd, flags, false, r);
}

void vmh_tcps_kernel_called(int fd, int flags, bool send, ssize_t r)
{
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s) /* one that fails may have left it on its ring */
		account(s, r < 0 ? -errno : r, flags, send, r >= 0 || vmh_tcps_state(s) != VMH_TCPS_RING);
}

ssize_t vmh_tcps_failed(struct vmh_tcps *s, bool send, ssize_t err)
{
	account(s, err, 0, send, vmh_tcps_state(s) != VMH_TCPS_RING);
	return err;
}

static ssize_t by_kernel(struct vmh_tcps *s, int fd, struct msghdr *m, int flags, bool send)
{
	unsigned state = vmh_tcps_state(s);
	bool may = state == VMH_TCPS_KERNEL;
	ssize_t r;

	if (vmh_unlikely(!may && state != VMH_TCPS_HOME)) /* its adoption began just now, and has seen no call */
		return GO_ON;
	if (may && vmh_unlikely(send && (flags & MSG_OOB))) { /* the kernel does not tell the service of it */
		vmh_tcps_home(s, VMH_R_TCP_URGENT, false);
		return GO_ON;
	}

	if (may && vmh_unlikely(vmh_tcps_wants_adoption(s))) {
		if (!vmh_tcps_adopt_later(s, fd))
			vmh_tcps_adopt(s, fd, VMH_GET(s->policy) == VMH_TCPS_OFFLOAD ? VMH_R_TCP_OFFLOAD : VMH_R_TCP_BUSY);
		if (vmh_tcps_state(s) != VMH_TCPS_KERNEL)
			return GO_ON;
	} else if (may && (unsigned)fd < vmh_plain_size) {
		vmh_plain_open_again(s, fd);
	}
	r = may ? counted_call(s, fd, m, flags, send) : kernel_call(fd, m, flags, send);
	if (r != GO_ON)
		account(s, r, flags, send, true);
	if (may && r > 0)
		vmh_tcps_kernel_round(s, send, r);
	return r;
}

/* ---- by the stack ---- */

#define READABLE (EPOLLIN | EPOLLRDHUP | EPOLLERR | EPOLLHUP)
#define WRITABLE (EPOLLOUT | EPOLLERR | EPOLLHUP)

struct waiting {
	struct vmh_waiting w;
	struct vmh_tcps *s;
	uint64_t loops;
	bool now;
	bool counted;              /* the polling of one receive call hits or misses once */
	struct vmh_tcps **blocks;  /* counted in its `blocked` */
	uint32_t wanted;           /* EPOLL* */
};

/* What a call has that waits, or has waited: the connection. */
struct stay {
	struct vmh_tcps *blocks;   /* counted in its `blocked` */
	struct vmh_tcps *goes_on;  /* at the kernel, by its left_fd */
	uint64_t deadline;         /* of SO_RCVTIMEO and the like, wherever the call waits; 0: none, or it was not on the ring */
};

#define STAY __attribute__((cleanup(stay_ends))) struct stay /* also when the thread is cancelled */

static void count_poll(struct waiting *w, bool hit)
{
	struct vmh_sock_stats *st = VMH_GET(w->s->stats);

	if (!w->counted && (w->wanted & EPOLLIN))
		VMH_COUNT_BY(vmh_rx_alone(st), *(hit ? &st->rx_poll_hit : &st->rx_poll_miss), 1);
	w->counted = true;
}

static inline bool changed(const struct waiting *w)
{
	const struct vmh_tcps *s = w->s;

	return vmh_tcps_state(s) != VMH_TCPS_RING || atomic_load_explicit(&s->obj.closed, memory_order_relaxed) ||
	       vmh_tcps_leaving(s) || (atomic_load_explicit(&s->bits, memory_order_acquire) & w->wanted);
}

static bool may_go_on(void *arg)
{
	vmh_rings_poll(VMH_TCPS_POLL);
	return changed(arg);
}

/* Several looks per poll: a look costs a fraction of what is done between polls. */
static inline void poll_once(void)
{
	for (int i = 0; i < LOOKS && !vmh_rings_pending(NULL); i++)
		;
	vmh_rings_poll(VMH_TCPS_POLL);
}

static inline void note_blocked(struct waiting *w)
{
	if (!*w->blocks)
		vmh_tcps_blocks(*w->blocks = w->s);
}

static inline void not_blocked(struct vmh_tcps **s)
{
	if (vmh_unlikely(*s != NULL))
		vmh_tcps_blocks_no_more(*s);
	*s = NULL;
}

static inline void stay_ends(struct stay *y)
{
	not_blocked(&y->blocks);
	if (vmh_unlikely(y->goes_on != NULL))
		vmh_tcps_went_on(y->goes_on);
}

/* The descriptor for a call of the kernel; -1: there is none any more. */
static inline int goes_on_by(struct vmh_tcps *s, struct stay *y, int fd)
{
	if (vmh_unlikely(atomic_load(&s->obj.closed)) && atomic_load(&s->fresh) && !atomic_load(&s->left_fd))
		return -1; /* it has ended on its ring */
	if (vmh_likely(!y->blocks && !atomic_load(&s->left_fd)) || vmh_unlikely(vmh_fds_apart))
		return fd;
	if (!y->goes_on)
		vmh_tcps_goes_on(y->goes_on = s, fd);
	not_blocked(&y->blocks);
	fd = vmh_tcps_fd(s, fd);
	return vmh_fd_is_another(fd, &s->obj) ? -1 : fd;
}

/* Until something may be done; spinning as VMA_RX_POLL says. 0, -EAGAIN, -EINTR. */
static int spin_for(struct waiting *w)
{
	int64_t budget = vmh_params.rx_poll;
	struct pollfd none = { .fd = -1 };
	bool over = false;
	VMH_SPINS_HERE;
	int err;

	for (;;) {
		poll_once();
		if (changed(w))
			return 0;
		if (w->now) {
			count_poll(w, false);
			return -EAGAIN;
		}
		if (vmh_unlikely(vmh_interrupted(&w->w))) {
			count_poll(w, false);
			return -EINTR;
		}
		if (over || (budget >= 0 && w->loops >= (uint64_t)budget)) {
			over = false;
			count_poll(w, false);
			vmh_spin_ends();
			note_blocked(w);
			err = vmh_doze(&w->w, &none, may_go_on, w);
			if (err)
				return err;
			continue;
		}
		w->loops++;
		if (vmh_params.rx_poll_yield && w->loops % (uint64_t)vmh_params.rx_poll_yield == 0)
			sched_yield();
		over = vmh_unlikely(w->loops % VMH_SPIN_TURN == 0) && !vmh_spin_goes_on(w->loops, budget >= 0);
		if (vmh_unlikely(w->loops % CLOCK_EVERY == 0)) {
			note_blocked(w);
			pthread_testcancel();
			if (w->w.deadline && vmh_now_ns() >= w->w.deadline) {
				count_poll(w, false);
				return -EAGAIN;
			}
		}
		if (budget >= 0)
			vmh_cpu_relax(); /* who polls for ever has paid for the core */
	}
}

/* Of one that is being moved from the kernel: select() and the like may have said that it is readable. Once it is parked
 * nobody knows. */
static bool kernel_may_have_told(const struct vmh_tcps *s)
{
	struct pollfd p = { .fd = s->obj.fd, .events = POLLIN | POLLRDHUP };
	struct timespec zero = { 0 };

	return vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) != 0 || atomic_load(&s->taken);
}

/* Of a state in which nobody serves the connection now. 0: look again. */
static int wait_for_state(struct vmh_tcps *s, struct waiting *w)
{
	struct pollfd none = { .fd = -1 };
	int wakefd;

	switch (vmh_tcps_state(s)) {
	case VMH_TCPS_ADOPTING:
		/* a program that could send a moment ago, or was told to receive, may not expect it */
		if (w->now && !(w->wanted & EPOLLOUT) && !kernel_may_have_told(s)) {
			atomic_store(&s->put_off, 1);
			if (vmh_tcps_state(s) == VMH_TCPS_ADOPTING)
				return -EAGAIN;
		}
		/* fall through */
	case VMH_TCPS_HOMING:
		note_blocked(w);
		vmh_lock(&s->obj.lock); /* whoever moves it has this */
		vmh_unlock(&s->obj.lock);
		return 0;
	case VMH_TCPS_LOST:
		return -vmh_tcps_take_lost(s);
	}
	if (w->now)
		return -EAGAIN;
	if (vmh_interrupted(&w->w))
		return -EINTR;
	wakefd = vmh_sleep_begin();
	vmh_sleep(&none, 1, 20000000, NULL, wakefd);
	vmh_sleep_end();
	return w->w.deadline && vmh_now_ns() >= w->w.deadline ? -EAGAIN : 0;
}

#define SHORT 1024 /* bytes: one segment, mostly */
#define LONG 65536 /* bytes: takes several writes, mostly */

/* A short message is on its way before the stack has looked at its timers. Of the owner's lock nobody notices that it is
 * held during a system call. */
static inline bool goes_at_once(size_t len)
{
	return len <= SHORT && vmh_batch_left <= 1 && VMH_GET(vmh_held.owner);
}

static ssize_t stack_call(struct vmh_tcps *s, const struct iovec *iov, int n, int flags, size_t len, bool send)
{
	bool at_once = send && goes_at_once(len);
	ssize_t r = GO_ON;

	vmh_lock(&s->io);
	if (vmh_tcps_state(s) == VMH_TCPS_RING) {
		if (at_once)
			vmh_tring_at_once(s->tring, true);
		r = send ? vmh_tcp_write(s->conn, iov, n, flags & MSG_MORE)
			 : vmh_tcp_read(s->conn, iov, n, flags & MSG_PEEK);
		if (at_once)
			vmh_tring_at_once(s->tring, false);
	}
	vmh_unlock(&s->io);
	if (r != GO_ON && !(r > 0 && (send ? vmh_batch_holds() : vmh_batch_left != 0)))
		vmh_tring_flush(s->tring);
	return r;
}

struct rest { /* of the caller's buffers */
	const struct iovec *iov;
	size_t n, skip, left;
	bool nowhere; /* MSG_TRUNC: nothing is written to them */
};

#define PARTS 16

/* Up to `max` of the buffers that are left. How many. */
static int parts_of(const struct rest *t, struct iovec *out, int max)
{
	size_t skip = t->skip;
	int k = 0;

	if (vmh_unlikely(t->nowhere)) {
		*out = (struct iovec){ .iov_len = t->left };
		return 1;
	}
	for (size_t i = 0; i < t->n && k < max; i++) {
		if (skip >= t->iov[i].iov_len) {
			skip -= t->iov[i].iov_len;
			continue;
		}
		out[k++] = (struct iovec){ (char *)t->iov[i].iov_base + skip, t->iov[i].iov_len - skip };
		skip = 0;
	}
	return k;
}

/* Of a vector that takes several writes: it is sent as one. */
static bool more_follows(const struct rest *t, const struct iovec *parts, int n)
{
	size_t here = 0;

	if (vmh_likely(n < PARTS))
		return false;
	for (int i = 0; i < n; i++)
		here += parts[i].iov_len;
	return here < t->left;
}

static void waiting_init(struct waiting *w, struct vmh_tcps *s, struct stay *y, int flags, bool send)
{
	*w = (struct waiting){ .s = s, .blocks = &y->blocks, .wanted = send ? WRITABLE : READABLE };
	w->now = (flags & MSG_DONTWAIT) || atomic_load_explicit(&s->nonblock, memory_order_relaxed);
	vmh_waiting_begin(&w->w, send ? VMH_GET(s->sndtimeo_ns) : VMH_GET(s->rcvtimeo_ns));
	w->w.obj = &s->obj;
	if (vmh_likely(!w->w.deadline))
		return;
	if (y->deadline)
		w->w.deadline = y->deadline;
	y->deadline = w->w.deadline;
}

/* Some bytes went before the error: the next call says it. */
static void give_back(struct vmh_tcps *s, int err)
{
	vmh_lock(&s->io);
	if (s->conn) {
		vmh_tcp_fail(s->conn, err);
		vmh_tcps_refresh(s);
	}
	vmh_unlock(&s->io);
}

/* As much as the call wants, on the ring. GO_ON: the rest is another's. */
static ssize_t by_stack(struct vmh_tcps *s, struct rest *t, struct stay *y, int flags, bool send)
{
	struct iovec parts[PARTS];
	struct waiting w;
	bool again = false;
	ssize_t r;
	bool more;
	int err, n;

	waiting_init(&w, s, y, flags, send);
	if (vmh_unlikely(t->left > LONG) && !w.now && (send || (flags & MSG_WAITALL)))
		note_blocked(&w); /* it may be closed in the midst of what is done first */
	for (;;) {
		err = vmh_tcps_is_closed(s, &w.w);
		if (vmh_unlikely(err))
			return w.now ? -EAGAIN : err;
		if (vmh_unlikely(vmh_tcps_state(s) != VMH_TCPS_RING)) {
			err = vmh_tcps_at_kernel(s) ? GO_ON : wait_for_state(s, &w);
			if (err)
				return err;
			continue;
		}
		if (send && vmh_params.rx_poll_on_tx_tcp) {
			vmh_rings_poll(VMH_TCPS_POLL);
		} else if (!send && !(atomic_load_explicit(&s->bits, memory_order_acquire) & READABLE)) {
			vmh_tring_acks_now(s->tring);
			if ((err = spin_for(&w)))
				return err;
			continue;
		}
		n = parts_of(t, parts, PARTS);
		more = more_follows(t, parts, n);
		r = stack_call(s, parts, n, flags | (more ? MSG_MORE : 0), t->left, send);
		if (r > 0) {
			t->skip += (size_t)r;
			t->left -= (size_t)r;
			if (!send)
				count_poll(&w, true);
			vmh_tcps_ring_call(s, send, (size_t)r);
			if (!t->left || (!send && !(flags & MSG_WAITALL) && !more) || (flags & MSG_PEEK))
				return r;
			w.now |= !send && !(flags & MSG_WAITALL); /* only what is there fills the rest of the vector */
			if (!w.w.timed) {                         /* any signal ends it from here on */
				w.w.timed = true;
				w.w.began = vmh_signals_now();
			}
			if (!w.now)
				note_blocked(&w); /* with the kernel, one that has begun goes on when another thread closes it */
			continue;
		}
		if (r == 0 && (!send || !t->left))
			return 0;
		if (r != -EAGAIN && r != 0 && r != GO_ON) {
			if (t->skip && r != -EPIPE)
				give_back(s, (int)-r);
			return r;
		}
		if (r == GO_ON)
			continue;
		if ((err = w.now && again ? -EAGAIN : spin_for(&w)))
			return err;
		again = true;
	}
}

/* SIZE_MAX: one is negative */
static size_t length_of(const struct msghdr *m)
{
	size_t len = 0;

	for (size_t i = 0; i < m->msg_iovlen; i++)
		if ((ssize_t)m->msg_iov[i].iov_len < 0)
			return SIZE_MAX;

	for (size_t i = 0; i < m->msg_iovlen; i++)
		len += m->msg_iov[i].iov_len;
	return len;
}

/* Is it a call that the stack can't do as it is? 0, or why. */
static unsigned kernels(const struct msghdr *m, int flags, bool send)
{
	if (flags & MSG_OOB)
		return VMH_R_TCP_URGENT;
	if (flags & ~(send ? SEND_FLAGS : RECV_FLAGS) || (send && m->msg_controllen))
		return VMH_R_SEND_FLAGS;
	if (!send && (flags & MSG_PEEK) && ((flags & MSG_WAITALL) || m->msg_iovlen > PARTS))
		return VMH_R_SEND_FLAGS;
	return 0;
}

/* One that fails, or one buffer that is too long for us. */
static bool is_wrong(const struct msghdr *m, bool nowhere)
{
	if (m->msg_iovlen > 1024 || (m->msg_iovlen && vmh_bad_ptr(m->msg_iov)))
		return true;
	if (m->msg_name == &vmh_tcps_buffer && m->msg_iov->iov_len > INT_MAX)
		return true; /* the kernel goes as far as there is memory */
	for (size_t i = 0; !nowhere && i < m->msg_iovlen; i++)
		if (m->msg_iov[i].iov_len && vmh_bad_ptr(m->msg_iov[i].iov_base))
			return true;
	return false;
}

/* 0: it is home, or somewhere else now; VMH_TCPS_KERNELS: the kernel's call says what is wrong; else what the call returns. */
static ssize_t give_to_kernel(struct vmh_tcps *s, unsigned why)
{
	int err = why ? vmh_exception(s->obj.fd, why) : 0;

	if (err)
		return err;
	if (vmh_tcps_home(s, why ? why : VMH_R_UNKNOWN_CALL, false))
		return VMH_TCPS_KERNELS;
	switch (vmh_tcps_state(s)) {
	case VMH_TCPS_LOST: return -vmh_tcps_take_lost(s);
	case VMH_TCPS_STRANDED: return -EAGAIN;
	}
	return 0;
}

static bool begins_nowhere(const struct msghdr *m)
{
	for (size_t i = 0; i < m->msg_iovlen; i++)
		if (m->msg_iov[i].iov_len)
			return vmh_bad_ptr(m->msg_iov[i].iov_base);
	return false;
}

/* Of a call that begins nowhere: EFAULT, unless the connection has something else to say first. Nothing moves. */
static ssize_t fault(struct vmh_tcps *s, const struct msghdr *m, int flags, bool send)
{
	char byte;
	struct iovec one = { &byte, 1 };
	struct rest t = { &one, !send, 0, !send, false };
	STAY y = { 0 };
	ssize_t r;

	if (m->msg_name != &vmh_tcps_buffer && length_of(m) == SIZE_MAX)
		return -EINVAL;
	r = by_stack(s, &t, &y, (flags & ~MSG_WAITALL) | (send ? MSG_MORE : MSG_PEEK), send);
	return r > 0 || (send && !r) ? -EFAULT : r;
}

/* What a receive call that the ring has done, or begun, says beside the data. Returns r. */
static ssize_t told(struct vmh_tcps *s, struct msghdr *m, int flags, bool send, ssize_t r)
{
	if (send || r < 0)
		return r;
	if (m->msg_name)
		m->msg_namelen = 0;
	m->msg_flags = flags & MSG_CMSG_CLOEXEC; /* as the kernel says it back */
	if (vmh_unlikely(VMH_GET(s->inq)) && m->msg_name != &vmh_tcps_buffer)
		vmh_tcps_tell_inq(s, m);
	else
		m->msg_controllen = 0;
	return r;
}

/* One that can't go home any more, as it has ended: what is left of it is the stack's to tell. */
static bool stack_tells(struct vmh_tcps *s, const struct msghdr *m, int flags, bool send)
{
	return vmh_tcps_state(s) == VMH_TCPS_RING && (send || !(flags & (MSG_OOB | MSG_ERRQUEUE))) && vmh_tcps_is_over(s) &&
	       !is_wrong(m, false) && length_of(m) != SIZE_MAX;
}

/* A call that the stack can't do as it is (why), or that is wrong: one that fails leaves the connection where it is. GO_ON:
 * it is home, or somewhere else now. */
VMH_COLD static ssize_t unfit(struct vmh_tcps *s, int fd, struct msghdr *m, int flags, bool send, unsigned why)
{
	ssize_t r;

	if (m->msg_iovlen > 1024) {
		r = -EMSGSIZE;
	} else if (m->msg_iovlen && vmh_bad_ptr(m->msg_iov)) {
		r = -EFAULT;
	} else if (!why && begins_nowhere(m)) {
		r = told(s, m, flags, send, fault(s, m, flags, send));
	} else {
		r = give_to_kernel(s, why);
		if (!r)
			return GO_ON;
		if (r == VMH_TCPS_KERNELS && stack_tells(s, m, flags, send)) {
			struct rest t = { m->msg_iov, m->msg_iovlen, 0, length_of(m), !send && (flags & MSG_TRUNC) };
			STAY y = { 0 };

			r = by_stack(s, &t, &y, flags & (send ? SEND_FLAGS : RECV_FLAGS & ~MSG_WAITALL), send);
			r = told(s, m, flags, send, r);
		} else if (r == VMH_TCPS_KERNELS) {
			r = kernel_call(fd, m, flags, send);
		}
	}
	if (r != GO_ON)
		account(s, r, flags, send, vmh_tcps_state(s) != VMH_TCPS_RING);
	return r;
}

/* It is over, and there is nothing to hear but why. */
static bool is_over(const struct pollfd *p, bool send)
{
	int n = 0;

	return p->revents & POLLHUP && (send || (p->revents & POLLERR && (vmh_sys(SYS_ioctl, p->fd, FIONREAD, &n) || !n)));
}

/* Until the kernel's socket may do something, for a call whose SO_RCVTIMEO would begin anew, or that has begun: how the
 * connection has failed is the next one's to hear. 0; -EAGAIN, -EINTR; GO_ON: it is being adopted. */
static int wait_at_kernel(struct vmh_tcps *s, int fd, const struct stay *y, bool begun, bool now, bool send)
{
	__attribute__((cleanup(in_kernel_ends))) struct vmh_tcps *in = s;
	struct pollfd p = { .fd = fd, .events = send ? POLLOUT : POLLIN };
	struct timespec ts = { 0 };
	int saved = errno, r;

	if (!now && y->deadline) {
		uint64_t at = vmh_now_ns(), left = y->deadline > at ? y->deadline - at : 0;

		ts = (struct timespec){ .tv_sec = (time_t)(left / 1000000000), .tv_nsec = (long)(left % 1000000000) };
	}
	atomic_fetch_add(&s->in_kernel, 1); /* as counted_call() */
	if (!vmh_tcps_at_kernel(in))
		return GO_ON;
	r = vmh_real()->ppoll(&p, 1, now || y->deadline ? &ts : NULL, NULL);
	if (r < 0)
		r = errno == EINVAL ? 1 : -errno; /* of no descriptor (RLIMIT_NOFILE): the call itself waits */
	errno = saved;
	if (r <= 0)
		return r ? r : -EAGAIN;
	return begun && is_over(&p, send) ? -EAGAIN : 0;
}

static void give_back_iov(struct iovec **v)
{
	if (*v)
		vmh_scratch_give_back(*v);
}

/* The rest of a call whose connection went home in between. */
static ssize_t rest_by_kernel(struct vmh_tcps *s, int fd, const struct msghdr *m, const struct rest *t, int flags,
			      bool send)
{
	__attribute__((cleanup(give_back_iov))) struct iovec *lent = NULL;
	struct iovec parts[PARTS], *v = parts;
	struct msghdr c = *m;
	int max = PARTS;

	if (!t->skip)
		return by_kernel(s, fd, (struct msghdr *)m, flags, send);
	if (t->n > PARTS && (lent = vmh_scratch_lent(t->n * sizeof(*lent)))) {
		v = lent;
		max = (int)t->n;
	}
	c.msg_iov = v;
	c.msg_iovlen = (size_t)parts_of(t, v, max);
	if (send)
		flags |= MSG_NOSIGNAL; /* it has something, and says that */
	else if (!(flags & MSG_WAITALL))
		flags |= MSG_DONTWAIT;
	return by_kernel(s, fd, &c, flags, send);
}

static void close_own(int *fd)
{
	if (*fd > 0)
		vmh_fd_hidden_close(*fd);
}

/* The same, and what is there to be waited for first: by a number of its own, as that of the program may be closed
 * meanwhile, and be another's. */
static ssize_t go_on_by_kernel(struct vmh_tcps *s, int fd, struct stay *y, const struct msghdr *m, const struct rest *t,
			       int flags, bool send)
{
	bool now = flags & MSG_DONTWAIT || atomic_load(&s->nonblock) || (t->skip && !send && !(flags & MSG_WAITALL));
	bool waits = t->skip || (y->deadline && !now);
	__attribute__((cleanup(close_own))) int own = 0;
	int r = 0;

	fd = goes_on_by(s, y, fd);
	if (vmh_unlikely(waits) && fd >= 0 && (now || (own = vmh_tcps_own_number(s, fd)))) {
		fd = own ? own : fd;
		r = wait_at_kernel(s, fd, y, t->skip != 0, now, send);
	}
	if (!r)
		return rest_by_kernel(s, fd, m, t, flags, send);
	if (r != GO_ON && !t->skip)
		account(s, r, flags, send, true);
	return r;
}

/* What the ring has done of a call, once: it counts as one packet, as with VMA. */
static void account_ring(struct vmh_tcps *s, const struct rest *t, ssize_t r, int flags, bool send)
{
	if (t->skip || (r < 0 && r != GO_ON))
		account(s, t->skip ? (ssize_t)t->skip : r, flags, send, false);
}

/* What the ring has done and what the kernel has done after it. */
static ssize_t total(const struct rest *t, ssize_t r)
{
	return t->skip ? (ssize_t)t->skip + (r > 0 ? r : 0) : r;
}

static ssize_t call(struct vmh_tcps *s, int fd, struct msghdr *m, int flags, bool send)
{
	bool nowhere = !send && (flags & MSG_TRUNC);
	struct rest t = { 0 };
	STAY y = { 0 };
	unsigned why;
	ssize_t r;

	if (vmh_unlikely(!send && (flags & MSG_PEEK)) && ((flags & MSG_DONTWAIT) || atomic_load(&s->nonblock)))
		flags &= ~MSG_WAITALL; /* waits for nothing */
	for (;;) {
		unsigned state = vmh_tcps_state(s);

		if (state == VMH_TCPS_KERNEL || state == VMH_TCPS_HOME) {
			r = go_on_by_kernel(s, fd, &y, m, &t, flags, send);
			if (r != GO_ON) {
				account_ring(s, &t, GO_ON, flags, send);
				if (t.skip)
					told(s, m, flags, send, 0);
				return total(&t, r);
			}
			continue;
		}
		if (vmh_unlikely(state == VMH_TCPS_LISTEN)) { /* the kernel's listener says what is wrong */
			r = kernel_call(fd, m, flags, send);
			account(s, r, flags, send, true);
			return r;
		}
		why = kernels(m, flags, send);
		if (vmh_unlikely(why || is_wrong(m, nowhere))) {
			r = unfit(s, fd, m, flags, send, why);
			if (r != GO_ON)
				return r;
			continue;
		}
		if (!t.iov)
			t = (struct rest){ m->msg_iov, m->msg_iovlen, 0, length_of(m), nowhere };
		if (vmh_unlikely(t.left == SIZE_MAX))
			return vmh_tcps_failed(s, send, -EINVAL);
		r = by_stack(s, &t, &y, flags, send);
		if (r != GO_ON) {
			account_ring(s, &t, r, flags, send);
			return told(s, m, flags, send, t.skip && !(flags & MSG_PEEK) ? (ssize_t)t.skip : r);
		}
	}
}

ssize_t vmh_tcps_recv(struct vmh_tcps *s, int fd, struct msghdr *m, int flags)
{
	if (vmh_unlikely(m->msg_name && (int)m->msg_namelen < 0))
		return vmh_tcps_failed(s, false, -EINVAL);
	return call(s, fd, m, flags, false);
}

/* MSG_FASTOPEN is a connect() by the kernel as well, which may be adopted once it is open. Where it is switched off it
 * has done nothing; else the kernel has the next connect(), too, and says what became of this one. */
static void opened_fast(struct vmh_tcps *s, int fd, ssize_t r)
{
	if (vmh_tcps_state(s) != VMH_TCPS_KERNEL || VMH_GET(s->connecting) || r == -EOPNOTSUPP || r == -EINVAL)
		return;
	vmh_tcps_connected(fd, -EINPROGRESS, NULL, 0);
}

ssize_t vmh_tcps_send(struct vmh_tcps *s, int fd, const struct msghdr *m, int flags)
{
	ssize_t r;

	if (vmh_unlikely(flags & MSG_FASTOPEN) && s->opening) {
		r = vmh_tcps_connect_by_send(s, fd, (flags & MSG_DONTWAIT) || atomic_load(&s->nonblock));
		if (r && r != VMH_TCPS_KERNELS)
			return r;
		flags &= r ? ~0 : ~MSG_FASTOPEN;
	}
	r = call(s, fd, (struct msghdr *)m, flags, true);
	if (r == -EPIPE && !(flags & MSG_NOSIGNAL) && vmh_tcps_parked(s))
		pthread_kill(pthread_self(), SIGPIPE); /* the kernel has raised its own */
	if (vmh_unlikely(flags & MSG_FASTOPEN))
		opened_fast(s, fd, r);
	return r;
}
