/* The manual's "Wrong ARP resolution when multiple ports are on the same network": where two interfaces have addresses of
 * one network, and Linux answers for both from either, the neighbours may send to the one that does not serve the flow. */
#include "vmh_links.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include <stdio.h>

/* ip-sysctl: the larger of the interface's and that of all. */
static bool answers_for_others(const char *name)
{
	return !vmh_link_setting("all", "arp_ignore") && !vmh_link_setting(name, "arp_ignore");
}

void vmh_warn_arp_flux(void)
{
	static const char stars[] = "******************************************************************************";
	static _Atomic uint64_t looked; /* the generation of the net page, + 1 */
	static _Atomic int said;
	uint64_t now = vmh_net_generation() + 1;
	char one[16], other[16];
	unsigned a, b;

	if (vmh_likely(atomic_load_explicit(&looked, memory_order_relaxed) == now))
		return;
	atomic_store(&looked, now);
	if (atomic_load(&said) || !vmh_net_same_network(&a, &b) || !vmh_net_link_name(a, one) ||
	    !vmh_net_link_name(b, other) || (!answers_for_others(one) && !answers_for_others(other)) ||
	    atomic_exchange(&said, 1))
		return;
	vmh_warn("%s", stars);
	vmh_warn("Interfaces %s and %s are on the same network, and Linux answers ARP requests for the", one, other);
	vmh_warn("addresses of both from either (ARP flux): neighbours may send to the wrong one.");
	vmh_warn("sysctl -w net.ipv4.conf.[DEVICE].arp_announce=1 net.ipv4.conf.[DEVICE].arp_ignore=2");
	vmh_warn("sysctl -w net.ipv4.conf.[DEVICE].rp_filter=0");
	vmh_warn("Read more about this issue in the VMA's User Manual");
	vmh_warn("%s", stars);
}
