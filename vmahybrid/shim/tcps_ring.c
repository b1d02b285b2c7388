/* The TCP stack on a ring, as the socket class uses it: whoever polls the ring also runs the timers, pushes what the
 * stack has sent, and tells the sockets whose readiness has changed. */
#include "vmh_base.h"
#include "tcp/tcp_ring.h"
#include "vmh_control.h"
#include "vmh_heap.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_main.h"
#include "vmh_tcps.h"
#include "vmh_params.h"
#include "vmh_tcps_info.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <net/ethernet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/tcp.h>

#define STASH_BYTES (8u << 20) /* what a peer has under way; a page is there when it is written to */
#define POLL_BUDGET 64
#define TICK_MAX_NS 1000000u
#define CLOCK_EVERY 64  /* polls and frames */
#define LOOK_MAX_MS 1000
#define LOSS_NS 200000000u /* what the loss of a frame costs at worst: the peer's retransmission timeout */
#define LOOKS_IN_VAIN 100 /* until the internal thread sleeps for as long as there is no connection */
#define STRAYS_NS 130000000000ull /* and so long peers of the last one may send: Linux' TCP_RTO_MAX is 120 s */
#define STRAYS_MS 1000      /* such a ring is looked at so often at least */
#define BORROWED_NS 1000000000u /* so long a child in our memory waits for the internal thread */
#define BORROWED_NAP_NS 200000

struct stashed {
	_Alignas(8) uint32_t len;
	unsigned char frame[];
};

struct vmh_tcps_stash {
	struct vmh_tcps_stash *next;
	struct vmh_tcp_addr addr;
	uint32_t used;
	_Alignas(8) unsigned char bytes[STASH_BYTES]; /* struct stashed, one behind the other */
};

struct vmh_tring {
	struct vmh_tcp_ring tr;             /* first: other_arg of the ring */
	struct vmh_tcps_stash *stashes;     /* ring lock */
	_Atomic bool news;                  /* for those who sleep, */
	_Atomic bool news_many;             /* of more sockets than these */
	struct vmh_obj *_Atomic news_of[VMH_WAKE_MAX];
	uint32_t polls;
	uint8_t polled;                     /* by the program, since the internal thread's last look */
	uint8_t used;                       /* a connection began or ended since then */
	bool closed;
	bool strict;                        /* rp_filter of its interface */
	bool told_long;                     /* the log of long frames; the internal thread's, as the next */
	uint64_t used_ns;                   /* when it last had a connection */
	struct vmh_tring *next;
};

static struct vmh_lock list_lock;
static struct vmh_tring *_Atomic trings; /* append only */

struct vmh_ring *vmh_tring_ring(struct vmh_tring *t)
{
	return t->tr.ring;
}

struct vmh_tcp *vmh_tring_stack(struct vmh_tring *t)
{
	return t->tr.tcp;
}

static _Atomic bool looked_after = false; /* by the internal thread, every look_ms() */

/* A program that has one connection after the other must not wake it for each. */
void vmh_tring_count(struct vmh_tring *t, int more)
{
	VMH_SET(t->used, 1);
	vmh_signals_end_well();
	if (!atomic_fetch_add(&t->tr.ring->conns, (uint32_t)more) && !atomic_load(&looked_after))
		vmh_worker_wake();
}

static uint32_t bits_of(unsigned events)
{
	return (events & VMH_TCP_IN ? VMH_IN : 0u) | (events & VMH_TCP_OUT ? VMH_OUT : 0u) |
	       (events & VMH_TCP_RDHUP ? EPOLLRDHUP | VMH_IN : 0u) | (events & VMH_TCP_HUP ? EPOLLHUP | VMH_IN : 0u) |
	       (events & VMH_TCP_ERR ? EPOLLERR | VMH_IN | VMH_OUT : 0u);
}

static _Atomic int any_unfit; /* or ended */

static bool takes_long(const struct vmh_tring *t)
{
	return t && t->tr.ring->flags & VMH_RING_F_CHAINS;
}

/* Once per interface: all connections by it will go the same way. */
static void tell_of_long_frames(struct vmh_tring *t, bool offload)
{
	if (!t || t->told_long)
		return;
	t->told_long = true;
	vmh_log(offload ? VMH_LOG_WARNING : VMH_LOG_INFO,
		"%s: the peer sends frames of several segments, as virtual interfaces do. %s go home to the kernel "
		"(ethtool -K IF gso off tso off on the peer's end keeps them on rings)", t->tr.ring->ifname,
		takes_long(t) ? "TCP connections that get bulk by them"
			      : "They fit no ring, and TCP connections that get them");
}

static void home_if_unfit(struct vmh_tcps *s, void *arg)
{
	unsigned reason = atomic_load(&s->unfit), asked = atomic_load(&s->asked);

	(void)arg;
	if (vmh_unlikely(asked)) {
		vmh_tcps_home(s, asked, false);
		atomic_store(&s->asked, 0);
	}
	if (atomic_load(&s->ended)) {
		vmh_tcps_let_name_go(s);
	} else if (reason && vmh_tcps_state(s) == VMH_TCPS_RING) {
		if (reason != VMH_R_TCP_LONG_FRAMES && reason != VMH_R_TCP_FRAGMENTS) {
			vmh_tcps_home(s, reason, false);
			return;
		}
		if (reason == VMH_R_TCP_LONG_FRAMES)
			tell_of_long_frames(s->tring, VMH_GET(s->policy) == VMH_TCPS_OFFLOAD);
		if (reason == VMH_R_TCP_FRAGMENTS || !takes_long(s->tring))
			vmh_tcps_adoption_took(LOSS_NS, 1, 1); /* or one after the other would come, and lose its frame */
		vmh_tcps_keep_home(s, reason);
	}
}

void vmh_tcps_unfit_home(void)
{
	if (vmh_unlikely(atomic_exchange(&any_unfit, 0)))
		vmh_tcps_each(home_if_unfit, NULL);
}

/* Stack lock held. */
static void is_unfit(struct vmh_tcps *s, uint8_t reason)
{
	if (atomic_exchange(&s->unfit, reason) == reason)
		return;
	atomic_store(&any_unfit, 1);
	vmh_worker_wake();
}

bool vmh_tcps_home_by_worker(struct vmh_tcps *s, unsigned reason)
{
	const struct timespec nap = { 0, BORROWED_NAP_NS };
	uint64_t end = vmh_now_ns() + BORROWED_NS;

	if (!atomic_load(&vmh_worker_runs))
		return false;
	atomic_store(&s->asked, (uint8_t)reason);
	atomic_store(&any_unfit, 1);
	vmh_worker_wake();
	while (atomic_load(&s->asked) && vmh_now_ns() < end)
		vmh_sys(SYS_nanosleep, &nap, NULL);
	return !atomic_exchange(&s->asked, 0);
}

void vmh_tcps_unfit_from_birth(struct vmh_tcps *s)
{
	if (vmh_likely(!atomic_load(&s->unfit)))
		return;
	atomic_store(&any_unfit, 1);
	vmh_worker_wake();
}

/* Stack lock held: so no older state ever overwrites a newer one. */
static void level(void *arg, void *user, unsigned events, const struct vmh_tcp_amounts *a)
{
	struct vmh_tcps *s = user;
	uint32_t bits = bits_of(events);

	(void)arg;
	if (!s)
		return;
	if (vmh_unlikely(events >> 16 == VMH_TCP_LISTEN) && vmh_tlisten_holds(s))
		bits |= VMH_IN;
	s->edge = bits & ~atomic_load_explicit(&s->bits, memory_order_relaxed);
	atomic_store_explicit(&s->bits, bits, memory_order_release);
	vmh_tcps_note_state(s, events >> 16);
	vmh_tcps_note_amounts(s, a);
	if (vmh_unlikely(events & (VMH_TCP_URGENT | VMH_TCP_LONG | VMH_TCP_FRAGMENTS)))
		is_unfit(s, events & VMH_TCP_FRAGMENTS ? VMH_R_TCP_FRAGMENTS :
			    events & VMH_TCP_LONG ? VMH_R_TCP_LONG_FRAMES : VMH_R_TCP_URGENT);
	if (vmh_unlikely(events >> 16 == VMH_TCP_CLOSE) && !vmh_tcps_is_fresh(s) && !atomic_exchange(&s->ended, 1)) {
		atomic_store(&any_unfit, 1);
		vmh_worker_wake();
	}
}

/* Stack lock held: nobody else adds one. */
static void note_news(struct vmh_tring *t, struct vmh_obj *o)
{
	unsigned i = 0;

	for (; i < VMH_WAKE_MAX; i++) {
		struct vmh_obj *there = atomic_load(&t->news_of[i]);

		if (there == o)
			break;
		if (!there) {
			atomic_store(&t->news_of[i], o);
			break;
		}
	}
	if (i == VMH_WAKE_MAX)
		atomic_store(&t->news_many, true);
	atomic_store(&t->news, true);
}

static void tell_news(struct vmh_tring *t)
{
	struct vmh_obj *of[VMH_WAKE_MAX];
	unsigned n = 0;

	for (unsigned i = 0; i < VMH_WAKE_MAX; i++) {
		struct vmh_obj *o = atomic_exchange(&t->news_of[i], NULL);

		if (o)
			of[n++] = o;
	}
	if (atomic_exchange(&t->news_many, false))
		vmh_wake_all();
	else if (n)
		vmh_wake_for(of, n);
}

/* Stack lock held, and often the ring's: sleepers are woken later. */
static void ready(void *arg, void *user, struct vmh_tcp_conn *c)
{
	struct vmh_tring *t = arg;
	struct vmh_tcps *s = user;

	(void)c;
	/* who waits for room has been told when there was some */
	if (!s || !((atomic_load_explicit(&s->bits, memory_order_relaxed) & ~(uint32_t)VMH_OUT) | s->edge))
		return;
	vmh_epoll_notify(&s->obj); /* with a fence between the bits and whoever sleeps, as in vmh_wake_all */
	if (atomic_load_explicit(&vmh_sleepers, memory_order_relaxed))
		note_news(t, &s->obj);
}

#define SYN_ACK_RST 0x16
#define FILTERS_NS 1000000000u

static bool is_syn(const unsigned char *frame, uint32_t len)
{
	bool v4 = frame[12] == 0x08;
	uint32_t at = ETH_HLEN + (v4 ? (frame[ETH_HLEN] & 15) * 4u : 40);

	return (v4 || frame[ETH_HLEN + 6] == IPPROTO_TCP) && len >= at + 20 && (frame[at + 13] & SYN_ACK_RST) == TH_SYN;
}

/* Ring lock held: at a port that is the ring's, nobody has that connection. A SYN without an answer comes again. */
static void unknown(struct vmh_tcp_ring *tr, unsigned char *frame, uint32_t len)
{
	struct vmh_tcp_addr a;

	if (vmh_tcp_name(tr->tcp, frame, len, &a) && vmh_tport_is(a.lport) &&
	    !(is_syn(frame, len) && vmh_tlisten_missed(a.lport, tr->ring)))
		vmh_tcp_refuse(tr->tcp, frame, len);
}

static uint32_t stashed_size(uint32_t len)
{
	return (uint32_t)(sizeof(struct stashed) + len + 7) & ~7u;
}

static void put_aside(struct vmh_tcps_stash *st, const unsigned char *frame, uint32_t len)
{
	struct stashed *f = (struct stashed *)(st->bytes + st->used);

	if (stashed_size(len) > STASH_BYTES - st->used)
		return;
	f->len = len;
	memcpy(f->frame, frame, len);
	st->used += stashed_size(len);
}

/* The next one after f, the first after NULL. */
static struct stashed *next_of(struct vmh_tcps_stash *st, struct stashed *f)
{
	unsigned char *at = f ? (unsigned char *)f + stashed_size(f->len) : st->bytes;

	return at < st->bytes + st->used ? (struct stashed *)at : NULL;
}

/* Ring lock held. The stack must not see it: to a listener of that port, or what remembers that the connection has left,
 * it would be nobody's. */
static bool is_moving(struct vmh_tcp_ring *tr, unsigned char *frame, uint32_t len)
{
	struct vmh_tring *t = (struct vmh_tring *)tr;
	struct vmh_tcps_stash *st = t->stashes;
	struct vmh_tcp_addr a;

	if (!vmh_tcp_name(tr->tcp, frame, len, &a))
		return false;
	while (st && memcmp(&st->addr, &a, sizeof(a)))
		st = st->next;
	if (st)
		put_aside(st, frame, len);
	return st != NULL;
}

struct vmh_tcps_stash *vmh_tring_stash(struct vmh_tring *t, const struct vmh_tcp_addr *a, struct vmh_tcp_conn *its)
{
	struct vmh_tcps_stash *st = vmh_scratch_new(sizeof(*st));
	const void *kept = NULL;
	size_t len;

	if (!st)
		return NULL;
	st->addr = *a;
	vmh_lock(&t->tr.ring->lock);
	while (its && (kept = vmh_tcp_urgent(its, kept, &len)))
		put_aside(st, kept, (uint32_t)len);
	st->next = t->stashes;
	t->stashes = st;
	t->tr.aside = is_moving;
	vmh_unlock(&t->tr.ring->lock);
	return st;
}

/* Ring lock held. */
static void take_off(struct vmh_tring *t, struct vmh_tcps_stash *st)
{
	struct vmh_tcps_stash **p = &t->stashes;

	while (*p != st)
		p = &(*p)->next;
	*p = st->next;
	if (!t->stashes)
		t->tr.aside = NULL;
}

/* None that comes now overtakes those that came before. */
void vmh_tring_unstash(struct vmh_tring *t, struct vmh_tcps_stash *st, bool feed)
{
	vmh_lock(&t->tr.ring->lock);
	for (struct stashed *f = next_of(st, NULL); feed && f; f = next_of(st, f))
		vmh_tcp_input(t->tr.tcp, f->frame, f->len, NULL);
	take_off(t, st);
	vmh_unlock(&t->tr.ring->lock);
	if (feed)
		vmh_tring_flush(t);
	vmh_scratch_free(st, sizeof(*st));
}

/* Between virtual interfaces the checksum of a local sender is of the addresses only. */
static bool is_virtual(const struct vmh_ring *r)
{
	return r->kind != VMH_RING_VERBS && !(r->flags & VMH_RING_F_VERIFY_CSUM);
}

static uint32_t sum_words(const unsigned char *p, uint32_t len, uint32_t sum)
{
	for (uint32_t i = 0; i < len; i++)
		sum += (uint32_t)p[i] << (i & 1 ? 0 : 8);
	sum = (sum & 0xffff) + (sum >> 16);
	return (sum & 0xffff) + (sum >> 16);
}

/* Such a one the kernel would find wrong in what it gets as a packet. */
static void complete_sum(unsigned char *tcp, uint32_t len, const unsigned char *addrs, uint32_t addrs_len)
{
	uint32_t sum = sum_words(addrs, addrs_len, IPPROTO_TCP + len);

	if (sum != (uint32_t)(tcp[16] << 8 | tcp[17]))
		return;
	memset(tcp + 16, 0, 2);
	sum = sum_words(tcp, len, sum);
	tcp[16] = (unsigned char)(~sum >> 8);
	tcp[17] = (unsigned char)~sum;
}

/* The IP packet of a frame that vmh_tcp_name() knew: its bytes, without padding; 0: more than are `there`. */
static uint32_t packet_of(unsigned char *ip, uint32_t there, bool complete)
{
	bool v4 = ip[0] >> 4 == 4;
	uint32_t head = v4 ? (ip[0] & 15u) * 4 : 40, len = v4 ? (uint32_t)(ip[2] << 8 | ip[3]) : 40u + (uint32_t)(ip[4] << 8 | ip[5]);

	if (len > there || (!v4 && ip[6] != IPPROTO_TCP)) /* one with extension headers: the peer sends it again */
		return 0;
	if (complete)
		complete_sum(ip + head, len - head, ip + (v4 ? 12 : 8), v4 ? 8 : 32);
	return len;
}

/* The frames of a stash become struct vmh_tcp_frame, in the same memory: no packet is longer than its frame. */
static uint32_t as_packets(struct vmh_tcps_stash *st, bool complete)
{
	struct stashed *f = next_of(st, NULL), *next;
	uint32_t used = 0;

	for (; f; f = next) {
		struct vmh_tcp_frame *out = (struct vmh_tcp_frame *)(st->bytes + used);
		unsigned char *ip = f->frame + ETHER_HDR_LEN;
		uint32_t len = packet_of(ip, f->len - ETHER_HDR_LEN, complete);

		next = next_of(st, f);
		if (!len) /* the headers of a long one, or such */
			continue;
		memmove(out->packet, ip, len);
		out->len = len;
		used += (uint32_t)(sizeof(*out) + len + 7) & ~7u;
	}
	return used;
}

void vmh_tring_stash_home(struct vmh_tring *t, struct vmh_tcps_stash *st, const struct vmh_tcps *s)
{
	struct vmh_msg_tcp_frames m = { .kind = VMH_FLOW_5T, .ifindex = s->ifindex, .proto = IPPROTO_TCP,
					.family = s->v6 ? 6 : 4, .local_port = st->addr.lport,
					.remote_port = st->addr.rport };
	struct vmh_tcp_blob frames = { .p = st->bytes };
	int err = 0;

	vmh_lock(&t->tr.ring->lock);
	take_off(t, st);
	vmh_unlock(&t->tr.ring->lock);
	memcpy(m.local_addr, st->addr.laddr.b, sizeof(m.local_addr));
	memcpy(m.remote_addr, st->addr.raddr.b, sizeof(m.remote_addr));
	frames.len = as_packets(st, is_virtual(t->tr.ring));
	if (frames.len)
		err = vmh_session_tcp_frames(&m, s->obj.fd, &frames);
	if (err)
		vmh_debug("fd %d: the peer has to send again what came meanwhile: %s", s->obj.fd, strerror(-err));
	vmh_scratch_free(st, sizeof(*st));
}

void vmh_tcps_refresh(struct vmh_tcps *s)
{
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN)
		vmh_tlisten_refresh(s);
	else if (s->conn)
		vmh_tcp_poll(s->conn);
}

static void look_at_clock(struct vmh_tring *t)
{
	uint64_t now = vmh_now_ns(), next;

	if (vmh_likely(now < atomic_load_explicit(&t->tr.due, memory_order_relaxed)))
		return;
	next = vmh_tcp_tick(t->tr.tcp);
	atomic_store_explicit(&t->tr.due, next < now + TICK_MAX_NS ? next : now + TICK_MAX_NS, memory_order_relaxed);
}

void vmh_tring_flush(struct vmh_tring *t)
{
	vmh_tcp_ring_flush(&t->tr);
	if (atomic_load_explicit(&t->news, memory_order_relaxed) &&
	    atomic_exchange(&t->news, false))
		tell_news(t);
}

void vmh_tring_at_once(struct vmh_tring *t, bool on)
{
	VMH_SET(t->tr.at_once, on);
}

void vmh_tring_acks_now(struct vmh_tring *t)
{
	vmh_tcp_ring_acks(&t->tr, true);
}

/* After each poll of the ring; no lock is held. A look at the clock costs as much as several polls. */
static void after(struct vmh_ring *r, int frames)
{
	struct vmh_tring *t = r->other_arg;
	uint32_t polls;

	vmh_tcp_ring_acks(&t->tr, frames < 0);
	polls = VMH_GET(t->polls) + 1 + (uint32_t)(frames > 0 ? frames : 0);
	if (vmh_unlikely(polls >= CLOCK_EVERY)) {
		polls = 0;
		look_at_clock(t);
	}
	VMH_SET(t->polls, polls);
	if (!vmh_held.internal)
		VMH_SET(t->polled, 1);
	vmh_tring_flush(t);
}

static void compare_mss(const struct vmh_ring *r)
{
	int64_t most = (int64_t)r->mtu - (int64_t)(sizeof(struct iphdr) + sizeof(struct tcphdr));

	if (vmh_params.mss > most)
		vmh_params_used(VMH_PARAM_MSS, r->ifname, vmh_param_def(VMH_PARAM_MSS)->min, most, most);
}

static unsigned opened(const struct vmh_tcp_addr *a)
{
	return vmh_stats_open_new(a->laddr.b, a->lport, a->raddr.b, a->rport);
}

static bool no_way_back(const struct vmh_tcp_ring *tr, const struct vmh_ip *laddr, const struct vmh_ip *raddr)
{
	const struct vmh_tring *t = (const struct vmh_tring *)tr;

	return vmh_tpath_none_back(laddr, raddr, tr->ring->ifindex, VMH_GET(t->strict));
}

struct vmh_tring *vmh_tring_of(struct vmh_ring *r)
{
	struct vmh_tring *t;

	if (!vmh_session_tcp_ready())
		return NULL;
	vmh_lock(&list_lock);
	for (t = atomic_load(&trings); t && (t->tr.ring != r || t->closed); t = t->next)
		;
	if (!t && r->ops->send_frame && !atomic_load(&r->gone) && (t = vmh_heap_zero(1, sizeof(*t)))) {
		if (vmh_tcp_ring_open(&t->tr, r, is_virtual(r), (unsigned)vmh_params.gro_streams_max, ready, t)) {
			vmh_heap_free(t);
			t = NULL;
		} else {
			compare_mss(r);
			vmh_ticmp_begin();
			vmh_lock(&r->lock);
			t->tr.level = level;
			t->tr.opened = opened;
			t->tr.over = vmh_stats_open_free;
			t->tr.no_way_back = no_way_back;
			t->strict = vmh_tpath_is_strict(r->ifname);
			t->tr.stray = unknown;
			VMH_SET(r->after, after);
			vmh_unlock(&r->lock);
			t->next = atomic_load(&trings);
			atomic_store(&trings, t);
		}
	}
	vmh_unlock(&list_lock);
	return t;
}

/* The sockets have left it. A thread may still be in after(): the memory stays. */
void vmh_tring_close(struct vmh_ring *r)
{
	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next) {
		if (t->tr.ring != r || t->closed)
			continue;
		vmh_lock(&r->lock);
		VMH_SET(r->after, NULL);
		r->other = NULL;
		r->others_end = NULL;
		vmh_unlock(&r->lock);
		t->closed = true;
		vmh_tcp_let_go(t->tr.tcp); /* of what still closes: its memory goes when no frame of it is out */
		vmh_tport_gone(t, 0);
	}
}

void vmh_trings_fork_child(void)
{
	vmh_lock_reset(&list_lock);
	vmh_tcp_fork_child();
	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next)
		t->closed = true; /* the parent's, and its locks may be held for ever */
}

bool vmh_trings_any(void)
{
	return atomic_load(&trings) != NULL;
}

unsigned vmh_trings_port_users(in_port_t lport)
{
	unsigned n = 0;

	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next)
		n += t->closed ? 0 : vmh_tcp_port_users(t->tr.tcp, lport);
	return n;
}

bool vmh_trings_in_use(const struct vmh_ip *laddr, unsigned families, in_port_t lport, bool reuse)
{
	bool used = false;

	for (struct vmh_tring *t = atomic_load(&trings); t && !used; t = t->next)
		used = !t->closed && vmh_tcp_in_use(t->tr.tcp, laddr, families, lport, reuse);
	return used;
}

unsigned vmh_tring_port_names(struct vmh_tring *t, in_port_t lport, struct vmh_tcp_addr *out, unsigned max)
{
	return vmh_tcp_port_names(t->tr.tcp, lport, out, max);
}

static unsigned conns(const struct vmh_tring *t)
{
	struct vmh_tcp_stats st = { 0 };

	if (!t->closed)
		vmh_tcp_get_stats(t->tr.tcp, &st);
	return st.conns;
}

unsigned vmh_trings_closing(uint64_t *left)
{
	unsigned n = 0;
	uint64_t part = 0;

	*left = 0;
	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next) {
		n += t->closed ? 0 : vmh_tcp_closing(t->tr.tcp, &part);
		*left += t->closed ? 0 : part;
	}
	return n;
}

struct vmh_tring *vmh_trings_orphan(struct vmh_tcp_conn **c)
{
	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next)
		if (!t->closed && !vmh_tcp_reclaim(t->tr.tcp, NULL, c))
			return t;
	return NULL;
}

static uint64_t frames_out(const struct vmh_tring *t)
{
	struct vmh_tcp_stats st;

	vmh_tcp_get_stats(t->tr.tcp, &st);
	return st.out;
}

/* A ring at which the program does not look had something to answer, and may soon again: with its buffer full and the
 * program asleep, each window of it waits for a look. */
static bool busy_alone;

/* Of the internal thread: a timer that came to be since its last look is found after this. */
static int look_ms(void)
{
	if (vmh_params.internal_thread_tcp_timer_handling || busy_alone)
		return 1;
	return vmh_params.timer_resolution_msec < LOOK_MAX_MS ? (int)vmh_params.timer_resolution_msec : LOOK_MAX_MS;
}

static void look_at_ring(struct vmh_tring *t)
{
	if (!VMH_GET(t->polled)) {
		uint64_t before = frames_out(t);

		vmh_ring_poll(t->tr.ring, POLL_BUDGET);
		vmh_tring_acks_now(t);
		busy_alone |= frames_out(t) != before;
	}
	VMH_SET(t->polled, 0);
	look_at_clock(t);
	vmh_tring_flush(t);
}

enum { NOTHING, STRAYS, CONNECTIONS };

/* A ring at which the program looks itself is left to it: each lock that this thread takes costs the program more than
 * it costs here, and with VMA_THREAD_MODE=0 a system call. Without connections it may get what their peers send again, and
 * the program, which has none, need not look any more. What was found. */
static int look_at_all(void)
{
	uint64_t now = vmh_now_ns();
	int found = NOTHING;

	busy_alone = false;
	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next) {
		if (t->closed)
			continue;
		if (atomic_load(&t->tr.ring->conns) || conns(t)) {
			VMH_SET(t->used, 1);
			found = CONNECTIONS;
		}
		if (VMH_GET(t->used)) {
			VMH_SET(t->used, 0);
			t->used_ns = now;
		}
		if (now - t->used_ns >= STRAYS_NS)
			continue;
		if (!found)
			found = STRAYS;
		look_at_ring(t);
	}
	return found;
}

/* rp_filter may be changed at any time. */
static void read_filters(void)
{
	static uint64_t last;

	if (!vmh_due(&last, vmh_now_ns(), FILTERS_NS))
		return;
	for (struct vmh_tring *t = atomic_load(&trings); t; t = t->next)
		if (!t->closed)
			VMH_SET(t->strict, vmh_tpath_is_strict(vmh_tring_ring(t)->ifname));
}

int vmh_trings_progress(void)
{
	static unsigned in_vain;
	int found = look_at_all();

	read_filters();
	in_vain = found == CONNECTIONS ? 0 : in_vain + 1;
	atomic_store(&looked_after, trings && in_vain < LOOKS_IN_VAIN);
	if (!atomic_load(&looked_after) && look_at_all() == CONNECTIONS) { /* the first one of a new burst, that has not seen it */
		in_vain = 0;
		atomic_store(&looked_after, true);
	}
	if (atomic_load(&looked_after))
		return look_ms();
	return found ? STRAYS_MS : -1;
}
