/* The interface's answer to a flow, and the warnings of the manual where it is a bond's. */
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include <net/if.h>

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

/* Once for each interface. */
static void warn(unsigned ifindex, unsigned reason)
{
	static _Atomic unsigned last;
	char name[IF_NAMESIZE];

	if (atomic_exchange(&last, ifindex) == ifindex || !if_indextoname(ifindex, name))
		return;
	if (reason == VMH_R_BOND_MODE)
		warn_mode(name);
	else
		warn_vlan(name);
}

unsigned vmh_link_served(unsigned ifindex)
{
	unsigned reason = vmh_net_link_served(ifindex);

	if (vmh_unlikely(reason == VMH_R_BOND_MODE || reason == VMH_R_BOND_VLAN))
		warn(ifindex, reason);
	return reason;
}
