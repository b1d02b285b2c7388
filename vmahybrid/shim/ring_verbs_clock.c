/* The adapter's time of arrival, from completions, as VMA_HW_TS_CONVERSION wants it: 1 seconds and nanoseconds of the
 * adapter's own clock; 3 that clock followed to CLOCK_REALTIME; 2 as 3, else as 1; 4 the device's own wall clock (PTP),
 * else as 3. Without what it needs: none. */
#include "ring_verbs.h"
#include "vmh_log.h"
#include "vmh_params.h"

#define SYNC_NS 1000000000ull /* between looks at both clocks: drift of some ppm comes to some us */
#define LOOKS 3               /* at both; the one with the least time in between counts */
#define MHZ 1000000u          /* kHz of a clock that counts nanoseconds */

enum { OFF, RAW, BEST, SYNC, PTP };

static bool look(struct verbs_ring *x, uint64_t *ticks, uint64_t *real, uint64_t *took)
{
	struct ibv_values_ex v = { .comp_mask = IBV_VALUES_MASK_RAW_CLOCK };
	uint64_t before = vmh_wall_ns(), after;

	if (ibv_query_rt_values_ex(x->dev->ctx, &v) || !(v.comp_mask & IBV_VALUES_MASK_RAW_CLOCK))
		return false;
	after = vmh_wall_ns();
	*ticks = (uint64_t)v.raw_clock.tv_sec * 1000000000u + (uint64_t)v.raw_clock.tv_nsec;
	*took = after - before;
	*real = before + *took / 2;
	return true;
}

static bool synchronise(struct verbs_ring *x)
{
	uint64_t least = UINT64_MAX, ticks, real, took;

	for (int i = 0; i < LOOKS; i++) {
		if (!look(x, &ticks, &real, &took))
			return false;
		if (took < least) {
			least = took;
			x->clock.ticks = ticks;
			x->clock.real = real;
		}
	}
	x->clock.again = real + SYNC_NS;
	return true;
}

uint64_t vmh_verbs_stamp(struct verbs_ring *x)
{
	uint64_t ticks, later;

	if (x->clock.how == PTP)
		return ibv_wc_read_completion_wallclock_ns(x->rx_ex);
	ticks = ibv_wc_read_completion_ts(x->rx_ex);
	if (x->clock.how == RAW)
		return (uint64_t)((unsigned __int128)(ticks & x->clock.mask) * MHZ / x->clock.khz);
	if (vmh_unlikely(vmh_wall_ns() >= x->clock.again))
		synchronise(x);
	later = (ticks - x->clock.ticks) & x->clock.mask;
	if (later <= x->clock.mask / 2)
		return x->clock.real + (uint64_t)((unsigned __int128)later * MHZ / x->clock.khz);
	later = (x->clock.ticks - ticks) & x->clock.mask; /* it came before the last look */
	return x->clock.real - (uint64_t)((unsigned __int128)later * MHZ / x->clock.khz);
}

/* The adapter's clock; verbs.h's function would need one that is not loaded by name. */
static bool has_clock(struct verbs_ring *x)
{
	struct verbs_context *v = verbs_get_ctx_op(x->dev->ctx, query_device_ex);
	struct ibv_device_attr_ex a;

	if (!v || v->query_device_ex(x->dev->ctx, NULL, &a, sizeof(a)))
		return false;
	x->clock.mask = a.completion_timestamp_mask;
	x->clock.khz = a.hca_core_clock;
	return x->clock.mask && x->clock.khz;
}

/* Before the CQ is made: what it is to be asked for. */
uint64_t vmh_verbs_clock_flags(struct verbs_ring *x)
{
	int64_t wanted = vmh_params.hw_ts_conversion;

	x->clock.how = OFF;
	if (wanted == OFF)
		return 0;
	if (wanted == PTP) {
		x->clock.how = PTP;
		return IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK;
	}
	if (!has_clock(x))
		return 0;
	if (wanted != RAW && synchronise(x))
		x->clock.how = SYNC;
	else if (wanted == RAW || wanted == BEST)
		x->clock.how = RAW;
	return x->clock.how == OFF ? 0 : IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
}

/* The device refused a CQ with those flags: others, or 0. */
uint64_t vmh_verbs_clock_less(struct verbs_ring *x)
{
	bool ptp = x->clock.how == PTP;

	x->clock.how = OFF;
	if (!ptp || !has_clock(x) || !synchronise(x))
		return 0;
	x->clock.how = SYNC;
	return IBV_WC_EX_WITH_COMPLETION_TIMESTAMP;
}

void vmh_verbs_clock_ready(struct verbs_ring *x)
{
	static const char *const names[] = { "no", "raw", "best", "synchronised", "PTP" };

	x->r.hw_stamps = x->rx_ex && x->clock.how != OFF;
	vmh_debug("%s: %s time stamps of the adapter", x->dev->name, names[x->r.hw_stamps ? x->clock.how : OFF]);
}
