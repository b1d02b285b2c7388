/* Policy `adaptive`: which connections are worth a ring. In the kernel a connection is watched by its own calls; on a ring
 * by the internal thread, ten times a second, from counters that those calls keep anyway.
 *
 * Against flapping: each time a connection goes home by policy it takes twice as many rounds to come back, and all
 * adoptions together may take a small part of the process's time only, since each stops a connection for some
 * milliseconds, in a call of the program. */
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_worker.h"

#define SMALL 4096
#define WINDOW_NS 100000000u
#define TURN_BYTES 16384u   /* between two changes of direction: more is bulk */
#define LOSS_SEGMENTS 100u  /* of a window: fewer say nothing */
#define HOMES_MAX 10
#define AGAIN_NS 10000000000u /* after one that failed */
#define MOVES_MAX 8         /* homecomings in one look */

static _Atomic uint64_t free_at; /* ns: the next adoption */
static uint64_t looked_ns;

void vmh_tcps_kernel_round(struct vmh_tcps *s, bool send, ssize_t r)
{
	if (r >= SMALL) {
		s->rounds = 0;
	} else if (send) {
		s->last_sent = 1;
	} else if (s->last_sent) {
		s->last_sent = 0;
		s->rounds++;
	}
}

bool vmh_tcps_wants_adoption(struct vmh_tcps *s)
{
	if (!s->connecting || vmh_params.hybrid_tcp == 2)
		return s->connecting;
	if (vmh_likely(s->rounds < (uint64_t)vmh_params.hybrid_tcp_rounds << s->homes))
		return false;
	if (vmh_now_ns() >= atomic_load_explicit(&free_at, memory_order_relaxed))
		return true;
	s->rounds = 0; /* looks again after as many more */
	return false;
}

void vmh_tcps_adoption_took(uint64_t ns)
{
	uint64_t percent = (uint64_t)vmh_params.hybrid_tcp_budget;

	atomic_store_explicit(&free_at, vmh_now_ns() + ns * (100 - percent) / percent, memory_order_relaxed);
}

/* ---- on a ring; the internal thread's ---- */

static bool is_bulk(const struct vmh_tcps_watch *was, const struct vmh_tcps_watch *is)
{
	uint64_t bytes = is->bytes - was->bytes, turns = is->turns - was->turns;
	uint64_t limit = (uint64_t)vmh_params.hybrid_tcp_bulk << 10;

	return limit && bytes >= limit && bytes / (turns + 1) >= TURN_BYTES;
}

static bool is_lossy(struct vmh_tcps *s)
{
	struct vmh_tcp_info info = { 0 };
	uint32_t sent, again;
	bool begun;

	vmh_lock(&s->io);
	if (s->conn)
		vmh_tcp_get_info(s->conn, &info);
	vmh_unlock(&s->io);
	begun = s->seen_out != 0;
	sent = info.segs_out - s->seen_out;
	again = info.retransmits - s->seen_again;
	s->seen_out = info.segs_out;
	s->seen_again = info.retransmits;
	return begun && sent >= LOSS_SEGMENTS && again * 100ull >= (uint64_t)vmh_params.hybrid_tcp_loss * sent;
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
};

static void look_at(struct vmh_tcps *s, void *arg)
{
	struct look *l = arg;
	struct vmh_tcps_watch is, was = s->seen;
	unsigned reason = 0;
	bool quiet;

	if (vmh_tcps_state(s) != VMH_TCPS_RING || l->moves == MOVES_MAX || l->now < s->rest_at)
		return;
	is = (struct vmh_tcps_watch){ VMH_GET(s->watch.bytes), VMH_GET(s->watch.turns) };
	quiet = is.bytes == was.bytes;
	s->seen = is;
	if (is_idle(s, quiet, l->now))
		reason = VMH_R_TCP_IDLE;
	else if (is_bulk(&was, &is))
		reason = VMH_R_TCP_BULK;
	else if (!quiet && vmh_params.hybrid_tcp_loss && is_lossy(s))
		reason = VMH_R_TCP_LOSS;
	if (!reason)
		return;
	l->moves++;
	if (!vmh_tcps_rest(s, reason))
		s->rest_at = l->now + AGAIN_NS;
}

/* No program's thread is in here: the internal thread alone. */
void vmh_tcps_look(void)
{
	struct look l = { .now = vmh_now_ns() };

	if (vmh_params.hybrid_tcp != 1 || l.now - looked_ns < WINDOW_NS)
		return;
	looked_ns = l.now;
	vmh_tcps_each(look_at, &l);
}

/* Object lock held: it is on the ring, from now on. */
void vmh_tcps_watch_from_now(struct vmh_tcps *s)
{
	s->seen = s->watch;
	s->seen_out = s->seen_again = 0;
	s->quiet_ns = s->rest_at = 0;
}

/* Object lock held: it is the kernel's, and may come back. */
void vmh_tcps_rested(struct vmh_tcps *s)
{
	s->rounds = 0;
	s->last_sent = 0;
	if (s->homes < HOMES_MAX)
		s->homes++;
}
