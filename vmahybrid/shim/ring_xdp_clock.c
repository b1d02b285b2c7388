/* The adapter's time of arrival, from XDP metadata, as VMA_HW_TS_CONVERSION wants it. The driver tells it by the clock
 * that /dev/ptpN shows: 1 and 4 as it is; 3 followed to CLOCK_REALTIME; 2 as 3, else as it is. */
#include "ring_xdp.h"
#include "vmh_obj.h"
#include <fcntl.h>
#include <linux/ethtool.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <stdio.h>
#include <sys/ioctl.h>
#include <time.h>

#define SYNC_NS 1000000000ull /* between looks at both clocks: drift of some ppm comes to some us */
#define LOOKS 3               /* at both; the one with the least time in between counts */
#define CLOCK_OF_FD(fd) ((~(clockid_t)(fd) << 3) | 3) /* clock_gettime(2) */

enum { OFF, RAW, BEST, SYNC, PTP };

bool vmh_xdp_clock_look(struct xdp_clock *c)
{
	uint64_t least = UINT64_MAX;
	struct timespec t;

	for (int i = 0; i < LOOKS; i++) {
		uint64_t before = vmh_wall_ns(), took;

		if (vmh_sys(SYS_clock_gettime, c->id, &t) < 0)
			return false;
		took = vmh_wall_ns() - before;
		if (took >= least)
			continue;
		least = took;
		c->ahead = before + took / 2 - ((uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec);
		c->again = before + SYNC_NS;
	}
	c->synchronised = true;
	return true;
}

uint64_t vmh_xdp_clock_ns(struct xdp_clock *c, uint64_t ns)
{
	if (!c->synchronised)
		return ns;
	if (vmh_wall_ns() >= c->again)
		vmh_xdp_clock_look(c); /* if not: as it was before */
	return ns + c->ahead;
}

/* N of /dev/ptpN, or negative. */
static int clock_index(const char *ifname)
{
	struct ethtool_ts_info info = { .cmd = ETHTOOL_GET_TS_INFO, .phc_index = -1 };
	struct ifreq req = { .ifr_data = (void *)&info };
	long fd = vmh_sys(SYS_socket, AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0), rc;

	if (fd < 0)
		return -1;
	fd = vmh_fd_hide((int)fd);
	snprintf(req.ifr_name, sizeof(req.ifr_name), "%s", ifname);
	rc = vmh_sys(SYS_ioctl, fd, SIOCETHTOOL, &req);
	vmh_fd_hidden_close((int)fd);
	return rc < 0 ? -1 : info.phc_index;
}

static bool synchronise(struct xdp_clock *c, const char *ifname)
{
	int n = clock_index(ifname);
	char path[32];
	long fd;

	if (n < 0)
		return false;
	snprintf(path, sizeof(path), "/dev/ptp%d", n);
	fd = vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return false;
	c->fd = vmh_fd_hide((int)fd);
	c->id = CLOCK_OF_FD(c->fd);
	if (vmh_xdp_clock_look(c))
		return true;
	vmh_xdp_clock_close(c);
	return false;
}

bool vmh_xdp_clock_open(struct xdp_clock *c, const char *ifname, int conversion)
{
	*c = (struct xdp_clock){ .fd = -1 };
	if (conversion == SYNC || conversion == BEST)
		return synchronise(c, ifname) || conversion == BEST;
	return conversion != OFF;
}

void vmh_xdp_clock_close(struct xdp_clock *c)
{
	if (c->fd >= 0)
		vmh_fd_hidden_close(c->fd);
	c->fd = -1;
	c->synchronised = false;
}
