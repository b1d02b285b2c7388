/* Policy `adaptive`: which connections are worth a ring. In the kernel a connection is watched by its own calls; on a ring
 * by the internal thread, once in VMA_HYBRID_TCP_WINDOW, from counters that those calls keep anyway.
 *
 * Against flapping: each time a connection goes home by policy it takes twice as many rounds to come back, and all
 * adoptions together may take a small part of the process's time only, since each stops a connection for some
 * milliseconds.
 *
 * Against moves of connections that end too soon: what ended, or went home, in fewer rounds than pay for the move tells
 * how many those of this process must have had from then on.
 *
 * A process with many busy connections gains when all of them are on rings, and loses while some are: its waits ask
 * both sides then. If one thread serves them all they are moved together, which takes little longer than one of them
 * does. Those of several threads stay where they are, since each of these would spin. */
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_lane.h"
#include "vmh_main.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdlib.h>
#include <sys/ioctl.h>

/* What decides whether a connection moves is a parameter (VMA_HYBRID_TCP_*). These only say how soon and how many at a
 * time, once that is decided. */
#define HOMES_MAX 10        /* doublings of the rounds: 64 of them are 65536 then, some seconds of a busy connection */
#define AGAIN_NS 10000000000u /* after a homecoming that failed */
#define MOVES_MAX 8         /* homecomings in one look: each has the internal thread wait for the service */
#define PAUSE_MIN_NS 1000000000u /* until a process with too many is looked at again; doubled up to the next */
#define PAUSE_MAX_NS 64000000000u
#define CROWDED_LOOKS 3     /* in a row: one burst of the kernel's connections is none */
#define WANTED_NS 1000000000u /* for so long others took the processor */
#define TRIAL_NS 250000000u   /* twice as often in so long is enough in the first second on rings */
#define SERVED_NS 500000000u  /* after moves of many: it may be the service that wanted it, for them */
#define SERVED_ONE_NS 100000000u /* of one */
#define OFFERS_MIN 50       /* fewer in that time say nothing */
#define WANTED_MIN_NS 8000000000u /* until connections come to rings again; doubled up to PAUSE_MAX_NS */
#define WAITS_NS 200000000u   /* what a thread waits for its processor is measured for so long, */
#define KNOWN_NS 1000000000u  /* and believed for so long */
#define UNKNOWN UINT64_MAX
#define LONG_WAY_US 20000   /* on a shorter one the buffer carries more than the default of VMA_HYBRID_TCP_BULK */
#define MOVE_NS 20000000u   /* what one takes, as long as this thread has made none */
#define EASE_NS 30000000000u /* without a move in vain: half of the rounds do, from then on */
#define LOT_PAYS 4          /* as many rounds do where many are moved together */
#define LEAST_SHARE 16      /* one part less of them for each move that has paid */
#define HANDED_MIN 2        /* forks with a connection that the program had accepted and not used: one may be chance */

static _Atomic uint64_t free_at; /* ns: the next adoption */
static __thread uint64_t my_free_at __attribute__((tls_model("initial-exec"))); /* by this thread, of one in use; 0: ask */
static _Atomic bool underway;       /* one by such a thread is */
static __thread bool my_move __attribute__((tls_model("initial-exec")));
static _Atomic uint64_t moved_ns;   /* when some came to rings last */
static _Atomic uint64_t together_at; /* the next one of many at a time */
static uint64_t looked_ns;

/* How many connections are busy in the kernel: each counts itself once per epoch. */
VMH_EACH_CALL static _Atomic uint32_t epoch = 1;
static _Atomic uint32_t busy, shared_by = 1;
static _Atomic uint32_t busy_thread; /* that serves them; 0: nobody yet */
static _Atomic bool busy_threads;    /* another one, too */
static _Atomic uint64_t pause_ns;

static void note_thread(void)
{
	uint32_t other = 0, me = vmh_tid();

	if (!atomic_compare_exchange_strong(&busy_thread, &other, me) && other != me)
		atomic_store(&busy_threads, true);
}

static void count_busy(struct vmh_tcps *s)
{
	uint32_t now = atomic_load_explicit(&epoch, memory_order_relaxed);

	if (s->epoch != now) {
		s->epoch = now;
		s->epoch_rounds = 0;
	}
	if (s->epoch_rounds < vmh_params.hybrid_tcp_busy && ++s->epoch_rounds == vmh_params.hybrid_tcp_busy) {
		atomic_fetch_add_explicit(&busy, 1, memory_order_relaxed);
		note_thread();
	}
}

static void count_no_more(const struct vmh_tcps *s)
{
	uint32_t n = atomic_load(&busy);

	if (s->epoch != atomic_load(&epoch) || s->epoch_rounds < vmh_params.hybrid_tcp_busy)
		n = 0;
	while (n && !atomic_compare_exchange_weak(&busy, &n, n - 1))
		;
}

void vmh_tcps_kernel_round(struct vmh_tcps *s, bool send, ssize_t r)
{
	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD) {
		VMH_COUNT(s->rounds, 1); /* calls */
		VMH_COUNT(s->kernel_turns, !send && r > 0);
	} else if (r >= vmh_params.hybrid_tcp_small) {
		VMH_SET(s->rounds, 0);
	} else if (send) {
		VMH_SET(s->last_sent, 1);
	} else if (VMH_GET(s->last_sent)) {
		VMH_SET(s->last_sent, 0);
		if (!VMH_GET(s->rounds) && vmh_unlikely(!VMH_GET(s->stats->remote_port)))
			vmh_tcps_note_names(s, s->obj.fd, &(struct vmh_tcp_addr){ 0 });
		VMH_COUNT(s->rounds, 1);
		VMH_COUNT(s->kernel_turns, 1);
		count_busy(s);
	}
}

/* ---- does it live long enough? ---- */

static _Atomic uint64_t least_turns; /* in the kernel, of one that is to be moved */
static _Atomic uint64_t vain_at;     /* ns: a move was in vain, or would have been */
static _Atomic bool by_lots;         /* the last one was of many, or the next one will be */

/* A thread that serves many gains less by each round than one that waits for each answer. */
static bool has_paid(uint64_t turns)
{
	return turns >= (uint64_t)vmh_params.hybrid_tcp_pays * (atomic_load(&by_lots) ? LOT_PAYS : 1);
}

/* Moved after `before` rounds it had `after` more. */
static void judge_move(uint64_t before, uint64_t after)
{
	uint64_t least = atomic_load(&least_turns);

	if (has_paid(after)) {
		atomic_store(&least_turns, least - (least + LEAST_SHARE - 1) / LEAST_SHARE);
		return;
	}
	atomic_store(&vain_at, vmh_now_ns());
	if (least < (before + after) * 2)
		atomic_store(&least_turns, (before + after) * 2);
}

static uint64_t turns_on_ring(const struct vmh_tcps *s)
{
	return VMH_GET(s->watch.turns) - VMH_GET(s->turns_before);
}

void vmh_tcps_policy_end(const struct vmh_tcps *s)
{
	uint64_t turns = VMH_GET(s->kernel_turns), need = atomic_load(&least_turns);
	unsigned state = vmh_tcps_state(s);

	count_no_more(s);
	if (state == VMH_TCPS_RING && !VMH_GET(s->paid))
		judge_move(turns, turns_on_ring(s));
	if (need < (uint64_t)vmh_params.hybrid_tcp_rounds)
		need = (uint64_t)vmh_params.hybrid_tcp_rounds;
	if (state == VMH_TCPS_KERNEL && turns >= need)
		judge_move(need, turns - need);
}

/* May it go on for as long as a move takes to pay? So far it has been like those that did. */
static bool lives(const struct vmh_tcps *s, uint64_t now)
{
	uint64_t least = atomic_load_explicit(&least_turns, memory_order_relaxed);

	if (vmh_likely(!least))
		return true;
	if (now - atomic_load(&vain_at) > EASE_NS) {
		atomic_store(&vain_at, now);
		atomic_store(&least_turns, least /= 2);
	}
	return VMH_GET(s->kernel_turns) >= least;
}

/* ---- a server that forks, or passes its connections ---- */

static _Atomic int handed; /* to other processes, since an accepted connection was worth a ring */

static void look_unused(struct vmh_tcps *s, void *arg)
{
	*(bool *)arg |= s->accepted && vmh_tcps_state(s) == VMH_TCPS_RING && !VMH_GET(s->watch.bytes);
}

static void note_handed(bool any)
{
	if (any && atomic_load(&handed) < HANDED_MIN)
		atomic_fetch_add(&handed, 1);
}

void vmh_tcps_note_fork(void)
{
	bool any = false;

	vmh_tcps_glance(look_unused, &any);
	note_handed(any);
}

void vmh_tcps_note_handed(struct vmh_tcps *s)
{
	bool is = false;

	look_unused(s, &is);
	note_handed(is);
	if (is && vmh_tcps_hands_on())
		vmh_tlisten_port_home(s->addr.lport, VMH_R_FD_PASSED);
}

bool vmh_tcps_hands_on(void)
{
	return atomic_load_explicit(&handed, memory_order_relaxed) >= HANDED_MIN;
}

/* ---- adoption ---- */

static uint32_t count_anew(void)
{
	uint32_t n = atomic_exchange(&busy, 0);

	atomic_fetch_add(&epoch, 1);
	atomic_store(&busy_thread, 0);
	atomic_store(&busy_threads, false);
	return n;
}

static bool too_many(uint32_t n)
{
	return vmh_params.hybrid_tcp_many && n > (uint64_t)vmh_params.hybrid_tcp_many;
}

static void pause_adoptions(uint64_t now)
{
	uint64_t ns = atomic_load(&pause_ns) * 2;

	ns = ns < PAUSE_MIN_NS ? PAUSE_MIN_NS : ns > PAUSE_MAX_NS ? PAUSE_MAX_NS : ns;
	atomic_store(&pause_ns, ns);
	atomic_store(&free_at, now + ns);
	atomic_store(&together_at, now + ns);
}

/* ---- many at a time ---- */

#define GATHER_NS 120000000u     /* from one lot to the next, for the program's own work; the more of them are due then */
#define CROWD_NS 1000000000u
#define CROWD_LONG_NS 16000000000u /* a small one waits no longer than this, whatever VMA_HYBRID_TCP_LASTS, */
#define CROWD_LONG_MOVES 16        /* and a large one for so many times what its moves will take */
#define TOGETHER_ENDS_NS 3000000000u /* none was due for so long: while many move the others are slow to come to it */
#define QUIET_LOT (VMH_TAKES_MAX / 2)

static _Atomic bool together;    /* the internal thread moves all that are due */
static uint64_t next_lot_ns, last_lot_ns; /* its own */

/* With a ring for each socket a lot would stand still while all of these are made, and whose ring it is only the thread
 * itself can say. */
static bool lots_possible(uint64_t now)
{
	return vmh_params.hybrid_tcp_together && now >= atomic_load_explicit(&together_at, memory_order_relaxed) &&
	       vmh_lane_logic(VMH_LANE_RX) < VMH_LANE_PER_SOCKET;
}

static _Atomic uint64_t each_ns = 1000000; /* of a lot; as the last ones took */

/* There have been many for so long that it is known by now how long they live. */
static bool crowd_lasts(uint64_t now, uint64_t for_ns)
{
	static _Atomic uint64_t since, seen; /* by another thread, and later than now, too */

	if ((int64_t)(now - atomic_exchange(&seen, now)) > (int64_t)CROWD_NS)
		atomic_store(&since, now);
	atomic_store(&by_lots, true);
	return (int64_t)(now - atomic_load(&since)) >= (int64_t)for_ns;
}

/* While so many move they get less done than in the kernel, the longer the slower the machine is. */
static uint64_t crowd_pays_after(uint32_t n)
{
	uint64_t moves = n * atomic_load(&each_ns), ns = moves * (uint64_t)vmh_params.hybrid_tcp_lasts;

	if (ns > CROWD_LONG_NS && vmh_params.hybrid_tcp_lasts > CROWD_LONG_MOVES)
		ns = moves * CROWD_LONG_MOVES > CROWD_LONG_NS ? moves * CROWD_LONG_MOVES : CROWD_LONG_NS;
	return ns < CROWD_NS ? CROWD_NS : ns < PAUSE_MAX_NS ? ns : PAUSE_MAX_NS;
}

/* Of one thread, more than would go one by one, but not so many that it stands for seconds. */
static bool may_go_together(void)
{
	uint32_t n = atomic_load_explicit(&busy, memory_order_relaxed);

	return too_many(n) && n <= (uint64_t)vmh_params.hybrid_tcp_together && !atomic_load(&busy_threads);
}

VMH_COLD static bool begin_together(uint64_t now)
{
	if (vmh_session_open()) {
		pause_adoptions(now);
		return false;
	}
	vmh_session_serve();
	if (!atomic_load(&vmh_worker_runs)) {
		atomic_store(&together_at, now + PAUSE_MIN_NS);
		return false;
	}
	count_anew();
	atomic_store(&together, true);
	vmh_worker_wake();
	return true;
}

struct lot {
	struct vmh_tcps *v[VMH_TAKES_MAX];
	int n;
	bool quiet;
	uint64_t now;
};

/* Of policy `offload`, opened by the kernel. */
static bool is_used(const struct vmh_tcps *s)
{
	return VMH_GET(s->rounds) >= (uint64_t)vmh_params.hybrid_tcp_rounds;
}

/* Now, together with others? Not one with a thread in a call on it, as those are that each have a thread. */
static bool goes_along(struct vmh_tcps *s, uint64_t now)
{
	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD)
		return is_used(s) && !atomic_load(&s->in_kernel) && now >= VMH_GET(s->retry_ns) && lives(s, now);
	return VMH_GET(s->policy) == VMH_TCPS_ADAPTIVE && vmh_tcps_is_due(s) && lives(s, now);
}

/* The service reads what is in the kernel's queues, of one after the other: those that have much would hold the others
 * up. And whoever was told of what is there stands still in his next call until the lot has moved. */
static bool is_light(const struct vmh_tcps *s, bool quiet)
{
	int in = 0, out = 0;

	return vmh_sys(SYS_ioctl, s->obj.fd, SIOCINQ, &in) >= 0 && vmh_sys(SYS_ioctl, s->obj.fd, SIOCOUTQ, &out) >= 0 &&
	       in <= (quiet ? 0 : VMH_TCPS_LIGHT_BYTES) && out <= VMH_TCPS_LIGHT_BYTES;
}

static bool is_in(const struct lot *l, const struct vmh_tcps *s)
{
	for (int i = 0; i < l->n; i++)
		if (l->v[i] == s)
			return true;
	return false;
}

static void gather(struct vmh_tcps *s, void *arg)
{
	struct lot *l = arg;

	if (l->n == VMH_TAKES_MAX || vmh_tcps_state(s) != VMH_TCPS_KERNEL || VMH_GET(s->kept) ||
	    !VMH_GET(s->connecting) || !goes_along(s, l->now) || (!l->quiet && is_in(l, s)))
		return;
	vmh_obj_hold(&s->obj);
	if (atomic_load(&s->obj.closed) || !is_light(s, l->quiet))
		vmh_obj_put(&s->obj);
	else
		l->v[l->n++] = s;
}

/* Those of which nobody has been told; the others as well where these are few. */
static void gather_lot(struct lot *l)
{
	vmh_tcps_glance(gather, l);
	if (l->n >= QUIET_LOT)
		return;
	l->quiet = false;
	vmh_tcps_glance(gather, l);
}

int vmh_tcps_together(void)
{
	uint64_t now = vmh_now_ns();
	struct lot l = { .now = now, .quiet = true };

	if (!atomic_load(&together))
		return -1;
	if (!last_lot_ns) {
		last_lot_ns = now;
		next_lot_ns = now + GATHER_NS;
	}
	if (now >= next_lot_ns) {
		gather_lot(&l);
		for (int i = 0; i < l.n; i++)
			VMH_SET(l.v[i]->rounds, 0); /* asked once */
		if (l.n && vmh_tcps_adopt_together(l.v, l.n, VMH_R_TCP_BUSY, l.quiet))
			last_lot_ns = vmh_now_ns();
		for (int i = 0; i < l.n; i++)
			vmh_obj_put(&l.v[i]->obj);
		next_lot_ns = vmh_now_ns() + GATHER_NS;
	}
	if (now - last_lot_ns >= TOGETHER_ENDS_NS && now > last_lot_ns) {
		last_lot_ns = 0;
		atomic_store(&together_at, now + PAUSE_MIN_NS);
		atomic_store(&together, false);
		return -1;
	}
	return GATHER_NS / 1000000;
}

/* The processor is wanted by others: each time in a row they have to wait for longer. */
static void pause_for_processor(uint64_t now)
{
	static uint64_t ns, until;

	if (now < until)
		return;
	ns = now - until > EASE_NS || !ns ? WANTED_MIN_NS : ns < PAUSE_MAX_NS ? ns * 2 : ns;
	until = now + ns;
	atomic_store(&free_at, until);
	atomic_store(&together_at, until);
	atomic_store(&together, false);
	last_lot_ns = 0;
}

static bool taken_often(const struct vmh_offered *o, uint64_t ns, uint64_t percent)
{
	return percent && ((o->all >= OFFERS_MIN && o->taken * 100ull >= o->all * percent) || o->gone_ns * 100 >= ns * percent);
}

/* Others took it often, or for long, in a second in which a thread of this program would have spun: what runs for a moment
 * now and then is not meant, nor the service at moves of this program. One whose own threads want it, those that the
 * spinning one wakes up, is found out sooner. */
static bool processor_is_wanted(uint64_t now)
{
	static struct vmh_offered sum;
	static uint64_t last, ns;
	static bool wanted;
	struct vmh_offered o = vmh_spin_offered();
	uint64_t percent = (uint64_t)vmh_params.hybrid_tcp_processor, since = now - last;
	uint64_t served = atomic_load(&moved_ns) + (atomic_load(&by_lots) ? SERVED_NS : SERVED_ONE_NS);

	last = now;
	if (now < served)
		return false;
	ns += since < WANTED_NS ? since : WANTED_NS;
	sum.all += o.all;
	sum.taken += o.taken;
	sum.gone_ns += o.gone_ns;
	if (ns >= WANTED_NS)
		wanted = taken_often(&sum, ns, percent);
	else if (ns >= TRIAL_NS && now - served < WANTED_NS && taken_often(&sum, ns, percent * 2))
		wanted = true;
	else
		return wanted;
	ns = 0;
	sum = (struct vmh_offered){ 0 };
	return wanted;
}

/* How long the thread could have run and did not, as another one had the processor: ns since its start. */
static uint64_t waited_ns(void)
{
	char text[64], *second;
	long fd = vmh_filtered ? -1 : vmh_sys(SYS_openat, AT_FDCWD, "/proc/thread-self/schedstat", O_RDONLY | O_CLOEXEC), n;

	if (fd < 0)
		return UNKNOWN;
	n = vmh_sys(SYS_read, (int)fd, text, sizeof(text) - 1);
	vmh_sys(SYS_close, (int)fd);
	text[n > 0 ? n : 0] = 0;
	second = strchr(text, ' ');
	return second ? strtoull(second, NULL, 10) : UNKNOWN;
}

/* Before it would spin: does this thread wait for its processor as it is, that often would others then. Looked at for a
 * while first, and true until that is known; from then on since the last look. */
static bool waits_for_processor(struct vmh_tcps *s, uint64_t now)
{
	static __thread struct {
		uint64_t since, waited, known_at;
		bool waits;
	} my __attribute__((tls_model("initial-exec")));
	uint64_t percent = (uint64_t)vmh_params.hybrid_tcp_processor, waited;

	if (!percent || (my.known_at && !my.waits && now < atomic_load(&moved_ns) + SERVED_NS))
		return false;
	if (my.known_at && now - my.known_at < KNOWN_NS)
		return my.waits;
	waited = waited_ns();
	if (waited == UNKNOWN)
		return false;
	if (!my.since || waited < my.waited) { /* less: that was the parent's, before a fork */
		my.since = now;
		my.waited = waited;
		return true;
	}
	if (now - my.since < WAITS_NS)
		return true;
	my.waits = (waited - my.waited) * 100 >= (now - my.since) * percent;
	my.since = my.known_at = now;
	my.waited = waited;
	if (my.waits) {
		count_anew(); /* who was busy so far need not be when it is asked again */
		vmh_tcps_set_reason(s, VMH_R_TCP_PROCESSOR);
	}
	return my.waits;
}

static bool worth_it(uint64_t now)
{
	uint32_t n;

	if (now < atomic_load_explicit(&free_at, memory_order_relaxed))
		return false;
	n = count_anew();
	if (too_many(n)) {
		pause_adoptions(now);
		return false;
	}
	atomic_store(&pause_ns, 0);
	atomic_store(&shared_by, n ? n : 1);
	return true;
}

static uint64_t pause_after(uint64_t ns)
{
	uint64_t percent = (uint64_t)vmh_params.hybrid_tcp_budget;

	return ns * (100 - percent) / percent;
}

/* Has this thread the time for it, and is no other one at it? They would stand in a queue for the service. A thread that
 * is new has had no time yet. */
static bool my_turn(uint64_t now)
{
	bool none = false;

	if (!my_free_at)
		my_free_at = now + pause_after(MOVE_NS);
	my_move = now >= my_free_at && atomic_compare_exchange_strong(&underway, &none, true);
	return my_move;
}

/* Policy `offload`: one that the kernel has opened. A move takes as long as hundreds of short connections do in the kernel,
 * so there is a part of the time for them, too: of the process's for any, of the thread's own for those in use. */
VMH_COLD static bool wants_offload(const struct vmh_tcps *s)
{
	uint64_t now = vmh_now_ns();

	if (VMH_GET(s->kept) || !lives(s, now))
		return false;
	if (now >= atomic_load_explicit(&free_at, memory_order_relaxed))
		return true;
	if (!is_used(s))
		return false;
	if (!atomic_load(&together) && lots_possible(now) && crowd_lasts(now, CROWD_NS))
		begin_together(now);
	return my_turn(now);
}

bool vmh_tcps_wants_adoption(struct vmh_tcps *s)
{
	uint64_t now;

	if (!VMH_GET(s->connecting))
		return false;
	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD)
		return wants_offload(s);
	if (vmh_likely(!vmh_tcps_is_due(s)))
		return false;
	if (atomic_load_explicit(&together, memory_order_relaxed) && atomic_load(&vmh_worker_runs))
		return false;
	now = vmh_now_ns();
	if (!lives(s, now)) {
		VMH_SET(s->rounds, 0);
		return false;
	}
	if (may_go_together() && lots_possible(now)) {
		bool waits = waits_for_processor(s, now); /* measured while it is seen whether they last */

		if (crowd_lasts(now, crowd_pays_after(atomic_load(&busy))) && !waits)
			begin_together(now);
		VMH_SET(s->rounds, 0);
		return false;
	}
	if (!VMH_GET(s->kept) && !waits_for_processor(s, now) && worth_it(now)) {
		if (s->accepted)
			atomic_store_explicit(&handed, 0, memory_order_relaxed);
		return true;
	}
	VMH_SET(s->rounds, 0); /* looks again after as many more */
	return false;
}

/* Where the internal thread does it only one connection stands still, and the program goes on with the others. */
void vmh_tcps_adoption_took(uint64_t ns, unsigned n, unsigned asked)
{
	atomic_store(&by_lots, n > 1);
	if (asked >= QUIET_LOT)
		atomic_store(&each_ns, (atomic_load(&each_ns) * 3 + ns / asked) / 4);
	if (vmh_worker_is_me())
		ns /= n > atomic_load(&shared_by) ? n : atomic_load(&shared_by);
	my_free_at = vmh_now_ns() + pause_after(ns);
	if (my_free_at > atomic_load(&free_at)) /* else a pause has begun meanwhile */
		atomic_store_explicit(&free_at, my_free_at, memory_order_relaxed);
}

void vmh_tcps_adoption_over(void)
{
	if (!my_move)
		return;
	my_move = false;
	atomic_store(&underway, false);
}

/* ---- on a ring; the internal thread's ---- */

/* On a long way a connection carries no more than its buffer in each round trip, and the kernel's buffers grow. Half of
 * that is bulk, too. (By the shortest round trip: queues make others longer, by milliseconds also that of a connection
 * which has just been adopted.) */
static uint64_t carried_at_most(const struct vmh_tcp_info *info)
{
	uint64_t window_us = (uint64_t)vmh_params.hybrid_tcp_window * 1000;

	return info->min_rtt_us < LONG_WAY_US ? UINT64_MAX : VMH_TCP_SNDBUF / 2 * window_us / info->min_rtt_us;
}

static bool is_bulk(const struct vmh_tcps_watch *was, const struct vmh_tcps_watch *is, const struct vmh_tcp_info *info)
{
	uint64_t bytes = is->bytes - was->bytes, turns = is->turns - was->turns, most = carried_at_most(info);
	uint64_t limit = (uint64_t)vmh_params.hybrid_tcp_bulk << 10, turn = (uint64_t)vmh_params.hybrid_tcp_turn << 10;

	return limit && bytes >= (limit < most ? limit : most) && bytes / (turns + 1) >= turn;
}

static bool is_lossy(struct vmh_tcps *s, const struct vmh_tcp_info *info)
{
	bool begun = s->seen_out != 0;
	uint32_t sent = info->segs_out - s->seen_out, again = info->retransmits - s->seen_again;

	s->seen_out = info->segs_out;
	s->seen_again = info->retransmits;
	return begun && sent >= (uint64_t)vmh_params.hybrid_tcp_loss_segments &&
	       again * 100ull >= (uint64_t)vmh_params.hybrid_tcp_loss * sent;
}

static bool is_idle(struct vmh_tcps *s, bool quiet, uint64_t now)
{
	if (!quiet || !s->quiet_ns)
		s->quiet_ns = now;
	return vmh_params.hybrid_tcp_idle && now - s->quiet_ns >= (uint64_t)vmh_params.hybrid_tcp_idle * 1000000000u;
}

struct look {
	uint64_t now;
	unsigned moves;
	unsigned why;                       /* those on rings go home; 0: they do not */
	bool any;                           /* there are some */
	uint32_t busy;                      /* in the kernel */
	uint64_t kernel_turns, ring_turns;
};

static void look_at_kernels(struct vmh_tcps *s, struct look *l)
{
	uint32_t is = VMH_GET(s->kernel_turns), turns = is - s->seen_kernel_turns;

	if (!turns)
		return;
	s->seen_kernel_turns = is;
	l->kernel_turns += turns;
	l->busy++;
}

static void look_at(struct vmh_tcps *s, void *arg)
{
	struct look *l = arg;
	struct vmh_tcps_watch is, was = s->seen;
	struct vmh_tcp_info info;
	unsigned reason = 0;
	bool quiet, busy;

	if (vmh_tcps_state(s) != VMH_TCPS_RING || VMH_GET(s->policy) != VMH_TCPS_ADAPTIVE || l->moves == MOVES_MAX ||
	    l->now < s->rest_at)
		return;
	l->any = true;
	is = (struct vmh_tcps_watch){ VMH_GET(s->watch.bytes), VMH_GET(s->watch.turns) };
	quiet = is.bytes == was.bytes;
	s->seen = is;
	l->ring_turns += is.turns - was.turns;
	if (!s->paid && has_paid(turns_on_ring(s))) {
		VMH_SET(s->paid, 1);
		judge_move(0, turns_on_ring(s));
	}
	busy = !quiet && vmh_tcps_info(s, &info);
	if (l->why)
		reason = l->why;
	else if (is_idle(s, quiet, l->now))
		reason = VMH_R_TCP_IDLE;
	else if (busy && is_bulk(&was, &is, &info))
		reason = VMH_R_TCP_BULK;
	else if (busy && vmh_params.hybrid_tcp_loss && is_lossy(s, &info))
		reason = VMH_R_TCP_LOSS;
	if (!reason)
		return;
	l->moves++;
	if (!vmh_tcps_rest(s, reason))
		s->rest_at = l->now + AGAIN_NS;
	else if (!l->why && !VMH_GET(s->paid))
		judge_move(VMH_GET(s->kernel_turns), turns_on_ring(s));
}

/* Thousands of idle ones are passed by without writing to them. */
static void glance_at(struct vmh_tcps *s, void *arg)
{
	unsigned state = vmh_tcps_state(s);

	if (state == VMH_TCPS_KERNEL)
		look_at_kernels(s, arg);
	if (state != VMH_TCPS_RING)
		return;
	vmh_obj_hold(&s->obj);
	if (!atomic_load(&s->obj.closed))
		look_at(s, arg);
	vmh_obj_put(&s->obj);
}

/* No program's thread is in here: the internal thread alone. */
void vmh_tcps_look(void)
{
	static unsigned crowded;
	struct look l = { .now = vmh_now_ns() };
	bool wanted;
	uint64_t window = (uint64_t)vmh_params.hybrid_tcp_window * 1000000u;

	if ((vmh_params.hybrid_tcp != VMH_TCPS_ADAPTIVE && !vmh_conf_any_tcp()) || l.now - looked_ns < window)
		return;
	looked_ns = l.now;
	wanted = processor_is_wanted(l.now);
	if (crowded >= CROWDED_LOOKS) {
		l.why = VMH_R_TCP_MANY;
		if (crowded == CROWDED_LOOKS) /* the rest goes home by the next looks */
			pause_adoptions(l.now);
	} else if (wanted) {
		l.why = VMH_R_TCP_PROCESSOR;
		pause_for_processor(l.now);
	}
	vmh_tcps_glance(glance_at, &l);
	atomic_store(&vmh_spin_offers, l.any && vmh_params.hybrid_tcp_processor);
	crowded = l.any && too_many(l.busy) && l.kernel_turns > l.ring_turns && !atomic_load(&together) ? crowded + 1 : 0;
}

/* Object lock held: it is on the ring, from now on. */
void vmh_tcps_watch_from_now(struct vmh_tcps *s)
{
	s->seen = s->watch;
	atomic_store(&moved_ns, vmh_now_ns());
	VMH_SET(s->turns_before, s->watch.turns);
	VMH_SET(s->paid, 0);
	s->seen_out = s->seen_again = 0;
	s->quiet_ns = s->rest_at = 0;
	atomic_store(&s->unfit, 0);
}

/* Object lock held: it is the kernel's, and may come back. */
void vmh_tcps_rested(struct vmh_tcps *s)
{
	VMH_SET(s->rounds, 0);
	VMH_SET(s->last_sent, 0);
	if (s->homes < HOMES_MAX && !s->troubled)
		s->homes++;
	vmh_plain_open(s);
}
