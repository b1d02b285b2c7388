/* Which lane a key gets: free ones first, then the one with the fewest keys; limits, refusals, moving. */
#include "check.h"
#include "vmh_lane.h"
#include "vmh_log.h"
#include "vmh_sock.h"
#include <pthread.h>
#include <sched.h>

struct vmh_params vmh_params;
struct vmh_ring *_Atomic vmh_rings;
_Atomic int vmh_log_level_now = VMH_LOG_DETAILS;
__thread unsigned vmh_my_tid = 100;
static unsigned said;

unsigned vmh_ask_tid(void) { return vmh_my_tid; }
const char *vmh_reason_text(unsigned reason) { return reason == VMH_R_RING_LIMIT ? "the limit" : "?"; }
void vmh_log_write(int level, const char *fmt, ...)
{
	(void)fmt;
	said += level == VMH_LOG_DETAILS;
}

static void logic(int64_t rx, int64_t tx, int64_t limit)
{
	vmh_params.ring_allocation_logic_rx = rx;
	vmh_params.ring_allocation_logic_tx = tx;
	vmh_params.ring_limit_per_interface = limit;
	vmh_params.ring_migration_ratio_rx = 100;
	vmh_params.ring_migration_ratio_tx = -1;
}

static unsigned rx(struct vmh_lane_use *u, int fd, in_addr_t addr)
{
	return vmh_lane_of(u, VMH_LANE_RX, fd, addr);
}

static void test_keys(void)
{
	struct vmh_lane_use u[6] = { 0 }, tx[2] = { 0 };

	logic(0, 0, 0);
	CHECK(rx(&u[0], 3, 7) == 0 && !u[0].key, "no books are kept");
	logic(10, 10, 0);
	for (int i = 0; i < 4; i++)
		CHECK(rx(&u[i], 10 + i, 0) == (unsigned)i, "the lowest that is free");
	CHECK(vmh_lane_of(&tx[0], VMH_LANE_TX, 12, 0) == 2, "one ring for both directions");
	vmh_lane_leave(&u[1]);
	CHECK(rx(&u[4], 14, 0) == 1, "free again");
	vmh_lane_leave(&u[2]);
	CHECK(rx(&u[5], 15, 0) == 4, "2 has a user left");
	CHECK(rx(&u[3], 99, 99) == 3, "it stays");
	for (int i = 0; i < 6; i++)
		vmh_lane_leave(&u[i]);
	vmh_lane_leave(&tx[0]);
	logic(1, 0, 0);
	CHECK(rx(&u[0], 1, 0x0a) == 0 && rx(&u[1], 2, 0x0b) == 1 && rx(&u[2], 3, 0x0a) == 0, "by address");
	CHECK(rx(&u[2], 3, 0x0b) == 1, "follows the address");
	CHECK(vmh_lane_of(&tx[0], VMH_LANE_TX, 1, 0x0a) == 2 && vmh_lane_of(&tx[1], VMH_LANE_TX, 2, 0x0b) == 2,
	      "all that send share another one");
	for (int i = 0; i < 3; i++)
		vmh_lane_leave(&u[i]);
	vmh_lane_leave(&tx[0]);
	vmh_lane_leave(&tx[1]);
}

static void test_limits(void)
{
	struct vmh_lane_use u[300] = { 0 };
	struct vmh_ring ring = { .lane = 0 };
	unsigned of[VMH_LANES] = { 0 };

	logic(10, 0, 2);
	CHECK(rx(&u[0], 1, 0) == 0 && rx(&u[1], 2, 0) == 1 && rx(&u[2], 3, 0) == 0 && rx(&u[3], 4, 0) == 1, "in turn");
	for (int i = 0; i < 4; i++)
		vmh_lane_leave(&u[i]);
	logic(10, 0, 0);
	for (int i = 0; i < 300; i++)
		of[rx(&u[i], i, 0)]++;
	CHECK(of[0] == 2 && of[43] == 2 && of[44] == 1 && of[VMH_LANES - 1] == 1, "%u %u %u", of[0], of[43], of[44]);
	for (int i = 0; i < 300; i++)
		vmh_lane_leave(&u[i]);
	vmh_rings = &ring;
	vmh_lane_refused("x", VMH_R_RING_LIMIT);
	vmh_lane_refused("x", VMH_R_RING_LIMIT);
	CHECK(said == 1, "said once");
	CHECK(rx(&u[0], 1, 0) == 0 && rx(&u[1], 2, 0) == 0, "the one with a ring");
	vmh_lane_leave(&u[0]);
	vmh_lane_leave(&u[1]);
	vmh_rings = NULL;
}

static void test_moving(void)
{
	struct vmh_lane_use u = { 0 }, other = { 0 };
	int n = 0;

	logic(10, 0, 0);
	CHECK(!vmh_lane_due(&u, VMH_LANE_RX), "sockets stay");
	logic(20, 20, 0);
	CHECK(rx(&u, 1, 0) == 0, "0");
	for (int i = 0; i < 1000; i++)
		CHECK(!vmh_lane_due(&u, VMH_LANE_RX), "it is this thread's");
	vmh_my_tid = 200;
	while (!vmh_lane_due(&u, VMH_LANE_RX) && n < 1000)
		n++;
	CHECK(n >= 20 && n <= 121, "%d", n);
	CHECK(vmh_lane_move(&u, VMH_LANE_RX) && rx(&u, 1, 0) == 1, "taken before the old one is left");
	vmh_lane_leave(&u);
	rx(&u, 1, 0);
	vmh_my_tid = 300;
	CHECK(rx(&other, 2, 0) == 1 && vmh_lane_move(&u, VMH_LANE_RX) && rx(&u, 1, 0) == 1, "where that thread is");
	CHECK(!vmh_lane_move(&u, VMH_LANE_RX), "it is there");
	for (n = 0; n < 2000; n++) { /* in turn: nobody keeps on */
		vmh_my_tid = n & 1 ? 300 : 400;
		CHECK(!vmh_lane_due(&u, VMH_LANE_RX), "%d", n);
	}
	vmh_my_tid = 500;
	for (n = 0; n < 2000; n++)
		CHECK(!vmh_lane_due(&other, VMH_LANE_TX), "never, says the ratio");
	vmh_lane_leave(&u);
	vmh_lane_leave(&other);
}

static void *attach(void *arg)
{
	struct vmh_lane_use u = { 0 };
	cpu_set_t set;

	rx(&u, 1, 0);
	CHECK(!sched_getaffinity(0, sizeof(set), &set) && CPU_COUNT(&set) == 1, "%d", CPU_COUNT(&set));
	for (int cpu = 0; cpu < CPU_SETSIZE; cpu++)
		if (CPU_ISSET(cpu, &set))
			*(int *)arg = cpu;
	CHECK(u.value == (unsigned)*(int *)arg, "%llu", (unsigned long long)u.value);
	vmh_lane_leave(&u);
	return NULL;
}

static void *attach_more(void *arg)
{
	pthread_t t;

	attach(arg);
	pthread_create(&t, NULL, attach, (int *)arg + 1);
	pthread_join(t, NULL);
	return NULL;
}

static void test_attached_threads(void)
{
	pthread_t t;
	cpu_set_t mine;
	int cpu[2] = { -1, -1 }, more[2] = { -1, -1 };

	logic(31, 31, 0);
	CHECK(!sched_getaffinity(0, sizeof(mine), &mine), "%m");
	for (int i = 0; i < 2; i++) {
		pthread_create(&t, NULL, attach, &cpu[i]);
		pthread_join(t, NULL);
	}
	CHECK(!sched_getaffinity(0, sizeof(mine), &mine), "%m");
	pthread_create(&t, NULL, attach_more, more);
	pthread_join(t, NULL);
	CHECK((more[0] != more[1]) == (CPU_COUNT(&mine) > 1), "started by an attached one: %d %d", more[0], more[1]);
	CHECK(cpu[0] >= 0 && (cpu[0] != cpu[1]) == (CPU_COUNT(&mine) > 1), "%d %d", cpu[0], cpu[1]);
}

int main(void)
{
	test_keys();
	test_moving();
	test_attached_threads();
	test_limits(); /* last: a refusal holds for seconds */
	return check_result();
}
