#ifndef VMH_LINKS_H
#define VMH_LINKS_H
#include "vmh_base.h"

/* As vmh_net_link_served; says what the manual says where a bond is the reason. */
unsigned vmh_link_served(unsigned ifindex);
/* A sysctl of one digit, net.ipv4.conf.NAME.WHAT; 0: it can't be read. */
int vmh_link_setting(const char *name, const char *what);
void vmh_warn_arp_flux(void); /* when the net page is there, or has changed; said once */
#endif
