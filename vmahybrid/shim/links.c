/* The interface's answer to a flow, and the warnings of the manual where it is a bond's. */
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include <fcntl.h>
#include <net/if.h>
#include <stdio.h>

#define TOLD 16

static void warn_mode(const char *name)
{
	static const char stars[] = "******************************************************************************";

	vmh_warn("%s", stars);
	vmh_warn("VMA doesn't support current bonding configuration of %s.", name);
	vmh_warn("The only supported bonding mode is \"802.3ad(#4)\" or \"active-backup(#1)\"");
	vmh_warn("with \"fail_over_mac=1\" or \"fail_over_mac=0\".");
	vmh_warn("The effect of working in unsupported bonding mode is undefined.");
	vmh_warn("Read more about Bonding in the VMA's User Manual");
	vmh_warn("%s", stars);
}

static void warn_vlan(const char *name)
{
	static const char stars[] = "******************************************************************";

	vmh_warn("%s", stars);
	vmh_warn("%s: vlan over bond while fail_over_mac=1 is not offloaded", name);
	vmh_warn("%s", stars);
}

/* The first time that this interface is met; of more than TOLD of them, never. */
static bool first_time(unsigned ifindex)
{
	static _Atomic unsigned told[TOLD]; /* 0: free */

	for (unsigned i = 0; i < TOLD; i++) {
		unsigned who = 0;

		if (atomic_compare_exchange_strong(&told[i], &who, ifindex))
			return true;
		if (who == ifindex)
			return false;
	}
	return false;
}

static void warn(unsigned ifindex, unsigned reason)
{
	char name[IF_NAMESIZE];

	if (!first_time(ifindex) || !if_indextoname(ifindex, name))
		return;
	if (reason == VMH_R_BOND_MODE)
		warn_mode(name);
	else
		warn_vlan(name);
}

int vmh_link_setting(const char *name, const char *what)
{
	char path[96], digit = '0';
	long fd;

	snprintf(path, sizeof(path), "/proc/sys/net/ipv4/conf/%s/%s", name, what);
	fd = vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	vmh_sys(SYS_read, fd, &digit, 1);
	vmh_sys(SYS_close, fd);
	return digit - '0';
}

unsigned vmh_link_served(unsigned ifindex)
{
	unsigned reason = vmh_net_link_served(ifindex);

	if (vmh_unlikely(reason == VMH_R_BOND_MODE || reason == VMH_R_BOND_VLAN))
		warn(ifindex, reason);
	return reason;
}
