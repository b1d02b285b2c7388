/* libvma.conf (VMA_CONFIG_FILE) at work: which sockets, groups and destinations the kernel keeps. Asked when a socket
 * is bound, connected or joins, and once per destination; never for a packet. */
#ifndef VMH_CONF_H
#define VMH_CONF_H
#include "vmh_base.h"
#include "vmh_conf_rules.h"

/* VMH_R_CONF_RULE where the rule that decides says os, else 0. Addresses and ports in network order: local for servers
 * and receivers, remote for senders, remote and then local for clients and connect. Takes a leaf lock. */
unsigned vmh_conf_keeps(enum vmh_conf_role role, uint32_t addr, uint16_t port, uint32_t addr2, uint16_t port2);
/* VMA_HYBRID_TCP of such a connection; -1: no rule says. The same ends as above. */
int vmh_conf_tcp(enum vmh_conf_role role, uint32_t addr, uint16_t port, uint32_t addr2, uint16_t port2);
bool vmh_conf_any_tcp(void); /* may there be one that does? */
/* Reads the file again if it has changed. A file that is wrong is warned about and changes nothing. */
void vmh_conf_refresh(void);
void vmh_conf_fork_child(void);
#endif
