/* The warnings about bonds: once for each interface, however flows take turns on several. */
#include "check.h"
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include <net/if.h>
#include <stdarg.h>

_Atomic int vmh_log_level_now = VMH_LOG_INFO;
static unsigned said;

void vmh_log_write(int level, const char *fmt, ...)
{
	(void)fmt;
	said += level == VMH_LOG_WARNING;
}

unsigned vmh_net_link_served(unsigned ifindex)
{
	return ifindex == 9 ? 0 : ifindex % 2 ? VMH_R_BOND_MODE : VMH_R_BOND_VLAN;
}

char *if_indextoname(unsigned ifindex, char name[IF_NAMESIZE])
{
	snprintf(name, IF_NAMESIZE, "bond%u", ifindex);
	return name;
}

int main(void)
{
	for (int i = 0; i < 5; i++) {
		CHECK(vmh_link_served(1) == VMH_R_BOND_MODE, "the answer is as it is");
		CHECK(vmh_link_served(2) == VMH_R_BOND_VLAN, "the answer is as it is");
		CHECK(vmh_link_served(9) == 0, "served");
	}
	CHECK(said == 7 + 3, "%u lines", said);
	return check_result();
}
