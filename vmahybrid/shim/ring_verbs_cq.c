/* Sleeping on a verbs ring: the completion channel, arming, and interrupt moderation. */
#include "ring_verbs.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_wait.h"

#define ARM_DRAIN 65536     /* frames: more than any QP holds */
#define AIM_BYTES 1024      /* smaller frames at a lower rate than this want the least delay, not few interrupts */
#define AIM_RATE 450000
#define MOST 65535          /* of frames and of microseconds that a device takes */
#define AIM_STEP 20         /* a change of less than a twentieth of both values is not worth a call */

int vmh_verbs_wait_fds(struct vmh_ring *r, int *fds, int max)
{
	if (max < 1)
		return 0;
	fds[0] = verbs_ring_of(r)->channel->fd;
	return 1;
}

void vmh_verbs_take_events(struct verbs_ring *x)
{
	struct ibv_cq *cq;
	unsigned n = 0;
	void *ctx;

	while (!vmh_ibv.get_cq_event(x->channel, &cq, &ctx))
		n++;
	if (n) /* an event that is not acknowledged would hang ibv_destroy_cq */
		vmh_ibv.ack_cq_events(x->rx_cq, n);
}

/* ---- moderation ---- */

static uint32_t least(uint64_t a, int64_t b)
{
	return a < (uint64_t)b ? (uint32_t)a : (uint32_t)b;
}

static void moderate(struct verbs_ring *x, int64_t frames, int64_t period)
{
	uint32_t count = least((uint64_t)frames, MOST), usec = least((uint64_t)period, MOST);
	struct ibv_modify_cq_attr a = { .attr_mask = IBV_CQ_ATTR_MODERATE,
					.moderate = { .cq_count = (uint16_t)count, .cq_period = (uint16_t)usec } };
	int rc;

	if (x->mod.unsupported || (count == x->mod.count && usec == x->mod.usec))
		return;
	rc = ibv_modify_cq(x->rx_cq, &a);
	if (rc) {
		vmh_debug("no interrupt moderation on %s: %s", x->dev->name, strerror(rc < 0 ? -rc : rc));
		x->mod.unsupported = rc == EOPNOTSUPP || rc == ENOSYS || rc == EINVAL;
		return;
	}
	x->mod.count = count;
	x->mod.usec = usec;
	VMH_SET(x->r.stats->mod_count, count);
	VMH_SET(x->r.stats->mod_usec, usec);
}

static void moderate_as_set(struct verbs_ring *x)
{
	moderate(x, vmh_params.cq_moderation_count, vmh_params.cq_moderation_period_usec);
}

/* What a device can't do of it. */
static void compare_sizes(const struct verbs_ring *x)
{
	static const unsigned params[] = { VMH_PARAM_CQ_MODERATION_COUNT, VMH_PARAM_CQ_MODERATION_PERIOD_USEC,
					   VMH_PARAM_CQ_AIM_MAX_COUNT, VMH_PARAM_CQ_AIM_MAX_PERIOD_USEC };

	for (unsigned i = 0; i < sizeof(params) / sizeof(params[0]); i++)
		vmh_params_used(params[i], x->r.ifname, 0, MOST, least((uint64_t)vmh_param_number(params[i]), MOST));
}

static uint32_t distance(uint32_t a, uint32_t b)
{
	return a > b ? a - b : b - a;
}

/* Count and period for the interrupt rate that VMA_CQ_AIM_INTERRUPTS_RATE_PER_SEC asks for, at this rate of frames. */
static void adapt(struct verbs_ring *x, uint64_t packets, uint64_t bytes, uint64_t ns)
{
	uint64_t wanted = (uint64_t)vmh_params.cq_aim_interrupts_rate_per_sec, rate, each, period;
	uint32_t count, usec;

	if (!packets) {
		moderate_as_set(x);
		return;
	}
	rate = packets * 1000000000u / ns;
	if (bytes / packets < AIM_BYTES && rate < AIM_RATE) {
		moderate(x, 0, 0);
		return;
	}
	wanted = wanted ? wanted : 1;
	each = 1000000u / wanted;                         /* between interrupts */
	period = 1000000u / (rate > wanted ? rate : wanted); /* between frames, or interrupts where there are fewer frames */
	count = least(rate / wanted, vmh_params.cq_aim_max_count);
	usec = least(each > period ? each - period : 0, vmh_params.cq_aim_max_period_usec);
	if (distance(count, x->mod.count) * AIM_STEP < x->mod.count && distance(usec, x->mod.usec) * AIM_STEP < x->mod.usec)
		return;
	moderate(x, count, usec);
}

static void adapt_if_due(struct verbs_ring *x)
{
	uint64_t interval = (uint64_t)vmh_params.cq_aim_interval_msec * 1000000u, now, packets, bytes, begin;

	if (!interval || x->mod.unsupported)
		return;
	now = vmh_now_ns();
	if (now < x->mod.due_ns)
		return;
	begin = x->mod.due_ns - interval;
	packets = VMH_GET(x->r.stats->rx_packets);
	bytes = VMH_GET(x->r.stats->rx_bytes);
	/* counters that were zeroed meanwhile say nothing about this interval */
	if (packets >= x->mod.packets && bytes >= x->mod.bytes)
		adapt(x, packets - x->mod.packets, bytes - x->mod.bytes, now - begin);
	x->mod.packets = packets;
	x->mod.bytes = bytes;
	x->mod.due_ns = now + interval;
}

void vmh_verbs_moderation_start(struct verbs_ring *x)
{
	x->mod.due_ns = vmh_now_ns() + (uint64_t)vmh_params.cq_aim_interval_msec * 1000000u;
	if (!vmh_params.cq_moderation_enable)
		return;
	compare_sizes(x);
	moderate_as_set(x);
}

/* ---- arming ---- */

/* The notification is for completions that come after the request: what came before is delivered here. That wakes the
 * caller, who is on the list of sleepers already. */
void vmh_verbs_arm(struct vmh_ring *r)
{
	struct verbs_ring *x = verbs_ring_of(r);

	adapt_if_due(x);
	if (x->armed)
		vmh_verbs_take_events(x);
	x->armed = true;
	if (ibv_req_notify_cq(x->rx_cq, 0)) {
		atomic_store_explicit(&x->suspect, true, memory_order_relaxed);
		vmh_wake_all(); /* nothing would end this sleep */
		return;
	}
	if (vmh_verbs_poll(r, ARM_DRAIN) == ARM_DRAIN)
		vmh_wake_all();
}

/* The internal thread takes what nobody has looked for since its last turn. */
bool vmh_verbs_crowded(struct vmh_ring *r)
{
	struct verbs_ring *x = verbs_ring_of(r);
	bool idle = x->polls == x->polls_seen;

	adapt_if_due(x);
	x->polls_seen = idle ? x->polls + 1 : x->polls; /* its own poll follows */
	return idle;
}
