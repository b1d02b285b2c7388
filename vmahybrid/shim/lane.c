/* The keys in use and their lanes. */
#include "vmh_lane.h"
#include "vmh_heap.h"
#include "vmh_lock.h"
#include "vmh_log.h"
#include "vmh_sock.h"
#include <sched.h>

#define CHAINS 256         /* a power of two */
#define STABLE 20          /* accesses by the same other thread before a socket moves, after those of the ratio */
#define REFUSED_NS 10000000000u
#define CPU_WORDS 64
#define CPUS (CPU_WORDS * 64)

struct vmh_lane_key {
	struct vmh_lane_key *next;
	uint64_t value;
	int64_t logic;
	uint32_t users;
	unsigned lane;
};

static struct vmh_lock lock; /* a leaf */
static struct vmh_lane_key *chains[CHAINS];
static uint32_t keys_of[VMH_LANES];
static uint64_t refused_until;  /* no lane gets its first ring before */
static uint32_t attached[CPUS]; /* threads of each processor */
static bool any_attached;
static uint64_t allowed[CPU_WORDS]; /* to the first thread that was attached */

/* ---- keys ---- */

static unsigned processor(void)
{
	int cpu = sched_getcpu();

	return cpu < 0 ? 0 : (unsigned)cpu;
}

static bool allows(const uint64_t *mask, unsigned cpu)
{
	return mask[cpu / 64] >> cpu % 64 & 1;
}

/* lock held. A thread that was started by an attached one may use that one's processor only: it gets the choice that the
 * first one had. */
static bool was_inherited(uint64_t *mask)
{
	unsigned n = 0;

	for (int i = 0; i < CPU_WORDS; i++)
		n += (unsigned)__builtin_popcountll(mask[i]);
	for (unsigned cpu = 0; n == 1 && cpu < CPUS; cpu++)
		if (allows(mask, cpu) && attached[cpu]) {
			memcpy(mask, allowed, sizeof(allowed));
			return true;
		}
	return false;
}

void vmh_lane_detach(void)
{
	uint64_t mask[CPU_WORDS] = { 0 };
	long bytes = vmh_sys(SYS_sched_getaffinity, 0, sizeof(mask), mask);
	bool inherited;

	vmh_lock(&lock);
	inherited = bytes > 0 && was_inherited(mask);
	vmh_unlock(&lock);
	if (inherited)
		vmh_sys(SYS_sched_setaffinity, 0, bytes, mask);
}

/* lock held. Of those that the thread may use the one with the fewest threads; CPUS: none. */
static unsigned least_used(uint64_t *mask)
{
	unsigned best = CPUS;

	was_inherited(mask);
	for (unsigned cpu = 0; cpu < CPUS; cpu++)
		if (allows(mask, cpu) && (best == CPUS || attached[cpu] < attached[best]))
			best = cpu;
	return best;
}

/* The processor of the thread, which stays there. */
static unsigned own_processor(void)
{
	static __thread unsigned mine __attribute__((tls_model("initial-exec"))); /* + 1 */
	uint64_t mask[CPU_WORDS] = { 0 };
	unsigned best;
	long bytes;

	if (mine)
		return mine - 1;
	bytes = vmh_sys(SYS_sched_getaffinity, 0, sizeof(mask), mask);
	vmh_lock(&lock);
	best = bytes > 0 ? least_used(mask) : CPUS;
	for (int i = 0; i < CPU_WORDS && !any_attached; i++)
		allowed[i] = mask[i];
	any_attached = true;
	if (best == CPUS)
		best = processor() % CPUS;
	attached[best]++;
	vmh_unlock(&lock);
	memset(mask, 0, sizeof(mask));
	mask[best / 64] = 1ull << best % 64;
	if (bytes <= 0 || vmh_sys(SYS_sched_setaffinity, 0, bytes, mask) < 0)
		vmh_log(VMH_LOG_DETAILS, "thread %u could not be attached to processor %u", vmh_tid(), best);
	else
		vmh_debug("thread %u is attached to processor %u", vmh_tid(), best);
	mine = best + 1;
	return best;
}

static uint64_t value_now(int64_t logic, int fd, in_addr_t addr)
{
	switch (logic) {
	case VMH_LANE_PER_IP:
		return addr;
	case VMH_LANE_PER_SOCKET:
		return (unsigned)fd;
	case VMH_LANE_PER_THREAD:
		return vmh_tid();
	case VMH_LANE_PER_CORE:
		return processor();
	case VMH_LANE_PER_CORE_ATTACH:
		return own_processor();
	}
	return 0;
}

/* ---- lanes ---- */

static bool has_ring(unsigned lane)
{
	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = __atomic_load_n(&r->next, __ATOMIC_ACQUIRE))
		if (r->lane == lane && !atomic_load(&r->gone))
			return true;
	return false;
}

/* lock held. The first of those with the fewest keys. */
static unsigned choose(void)
{
	int64_t limit = vmh_params.ring_limit_per_interface;
	unsigned n = limit && limit < VMH_LANES ? (unsigned)limit : VMH_LANES, best = n;
	bool refused = refused_until && vmh_now_ns() < refused_until;

	for (unsigned i = 0; i < n && (best == n || keys_of[best]); i++)
		if ((best == n || keys_of[i] < keys_of[best]) && (!refused || has_ring(i)))
			best = i;
	return best == n ? 0 : best;
}

static struct vmh_lane_key **chain_of(int64_t logic, uint64_t value)
{
	return &chains[(value ^ value >> 8 ^ value >> 24 ^ (uint64_t)logic) & (CHAINS - 1)];
}

static struct vmh_lane_key *take(int64_t logic, uint64_t value)
{
	struct vmh_lane_key **chain = chain_of(logic, value), *k;

	vmh_lock(&lock);
	for (k = *chain; k && (k->logic != logic || k->value != value); k = k->next)
		;
	if (!k && (k = vmh_heap_zero(1, sizeof(*k)))) {
		*k = (struct vmh_lane_key){ .next = *chain, .value = value, .logic = logic, .lane = choose() };
		keys_of[k->lane]++;
		*chain = k;
	}
	if (k)
		k->users++;
	vmh_unlock(&lock);
	return k;
}

void vmh_lane_leave(struct vmh_lane_use *u)
{
	struct vmh_lane_key *k = u->key, **p;

	if (!k)
		return;
	VMH_SET(u->key, NULL);
	vmh_lock(&lock);
	if (!--k->users) {
		for (p = chain_of(k->logic, k->value); *p != k; p = &(*p)->next)
			;
		*p = k->next;
		keys_of[k->lane]--;
		vmh_heap_free(k);
	}
	vmh_unlock(&lock);
}

static int32_t ratio_of(enum vmh_lane_direction d)
{
	int64_t ratio = d == VMH_LANE_RX ? vmh_params.ring_migration_ratio_rx : vmh_params.ring_migration_ratio_tx;

	return (int32_t)ratio;
}

static void enter(struct vmh_lane_use *u, enum vmh_lane_direction d, struct vmh_lane_key *k)
{
	VMH_SET(u->value, k ? k->value : 0);
	VMH_SET(u->key, k);
	VMH_SET(u->candidate, 0);
	VMH_SET(u->left, ratio_of(d));
}

unsigned vmh_lane_of(struct vmh_lane_use *u, enum vmh_lane_direction d, int fd, in_addr_t addr)
{
	int64_t logic = vmh_lane_logic(d);

	/* both directions by interface: no need to keep books */
	if (logic == VMH_LANE_PER_INTERFACE && vmh_lane_logic(!d) == logic)
		return 0;
	if (u->key && logic == VMH_LANE_PER_IP && u->value != addr)
		vmh_lane_leave(u);
	if (!u->key)
		enter(u, d, take(logic, value_now(logic, fd, addr)));
	return u->key ? u->key->lane : 0;
}

bool vmh_lane_move(struct vmh_lane_use *u, enum vmh_lane_direction d)
{
	int64_t logic = vmh_lane_logic(d);
	uint64_t value = value_now(logic, 0, 0);
	struct vmh_lane_key *old = u->key, *now;
	bool other;

	if (!old || old->value == value || !(now = take(logic, value)))
		return false;
	other = now->lane != old->lane;
	vmh_lane_leave(u);
	enter(u, d, now);
	return other;
}

bool vmh_lane_look(struct vmh_lane_use *u, enum vmh_lane_direction d)
{
	int32_t ratio = ratio_of(d);
	uint64_t candidate, now;

	if (ratio <= 0 || !VMH_GET(u->key))
		return false;
	now = value_now(vmh_lane_logic(d), 0, 0) + 1;
	candidate = VMH_GET(u->candidate);
	if (now == VMH_GET(u->value) + 1) {
		VMH_SET(u->candidate, 0);
		VMH_SET(u->left, ratio);
	} else if (candidate >> 32 && (candidate & UINT32_MAX) == now) {
		VMH_SET(u->candidate, candidate - (1ull << 32));
		return candidate >> 32 == 1;
	} else {
		VMH_SET(u->candidate, (uint64_t)STABLE << 32 | now);
	}
	return false;
}

/* ---- rings ---- */

void vmh_lane_refused(const char *ifname, unsigned reason)
{
	static _Atomic int said;

	vmh_lock(&lock);
	refused_until = vmh_now_ns() + REFUSED_NS;
	vmh_unlock(&lock);
	if (!atomic_exchange(&said, 1))
		vmh_log(VMH_LOG_DETAILS, "no further ring on %s: %s; sockets share those that are there "
			"(VMA_RING_ALLOCATION_LOGIC)", ifname, vmh_reason_text(reason));
}

void vmh_lane_fork_child(void)
{
	vmh_lock_reset(&lock);
}
