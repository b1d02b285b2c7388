/* The adapter's clock of an AF_XDP ring: what each VMA_HW_TS_CONVERSION makes of a stamp. CLOCK_MONOTONIC stands for the
 * adapter's, since a machine without one is to do. */
#include "../../../vmahybrid/shim/ring_xdp.h"
#include "check.h"
#include "vmh_obj.h"

#define MS 1000000ull
#define NOT_A_CLOCK ((clockid_t)99)

static int hidden, closed;

int vmh_fd_hide(int fd)
{
	hidden++;
	return fd;
}

void vmh_fd_hidden_close(int fd)
{
	closed++;
	close(fd);
}

static bool near(uint64_t a, uint64_t b)
{
	return a - b + MS < 2 * MS;
}

static void test_conversions(void)
{
	static const bool told[] = { false, true, true, false, true }; /* the loopback has no clock */
	struct xdp_clock c;

	for (int conversion = 0; conversion < 5; conversion++) {
		CHECK(vmh_xdp_clock_open(&c, "lo", conversion) == told[conversion], "%d", conversion);
		CHECK(c.fd == -1 && !c.synchronised, "%d", conversion);
		CHECK(vmh_xdp_clock_ns(&c, 1234) == 1234, "%d: as it is", conversion);
		vmh_xdp_clock_close(&c);
	}
	CHECK(!vmh_xdp_clock_open(&c, "no-such-link-here", 3), "no interface");
	CHECK(hidden == closed, "%d fds, %d closed", hidden, closed);
}

static void test_following(void)
{
	struct xdp_clock c = { .fd = -1, .id = CLOCK_MONOTONIC };
	uint64_t then, ahead;

	CHECK(vmh_xdp_clock_look(&c) && c.synchronised, "look");
	then = vmh_now_ns();
	CHECK(near(vmh_xdp_clock_ns(&c, then), vmh_wall_ns()), "now");
	CHECK(vmh_xdp_clock_ns(&c, then - 5 * MS) + 5 * MS == vmh_xdp_clock_ns(&c, then), "before");
	CHECK(c.again > vmh_wall_ns(), "not due yet");
	c.ahead += 1000 * MS;
	ahead = c.ahead;
	vmh_xdp_clock_ns(&c, then);
	CHECK(c.ahead == ahead, "not looked at again before it is due");
	c.again = 0;
	CHECK(near(vmh_xdp_clock_ns(&c, vmh_now_ns()), vmh_wall_ns()), "looked at again");
	CHECK(c.ahead != ahead && c.again > vmh_wall_ns(), "for the next time");
	c.id = NOT_A_CLOCK;
	c.again = 0;
	ahead = c.ahead;
	CHECK(near(vmh_xdp_clock_ns(&c, vmh_now_ns()), vmh_wall_ns()) && c.ahead == ahead, "as it was, where it can't be");
}

static void test_no_clock(void)
{
	struct xdp_clock c = { .fd = -1, .id = NOT_A_CLOCK };

	CHECK(!vmh_xdp_clock_look(&c) && !c.synchronised, "look");
	c.fd = dup(1);
	vmh_xdp_clock_close(&c);
	vmh_xdp_clock_close(&c);
	CHECK(c.fd == -1 && closed == hidden + 1, "closed once");
}

int main(void)
{
	test_conversions();
	test_following();
	test_no_clock();
	return check_result();
}
