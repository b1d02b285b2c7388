/* Connections that nobody has accepted when their listener goes home, for whichever process accepts next. */
#ifndef VMH_TCPS_TICKET_H
#define VMH_TCPS_TICKET_H
#include "vmh_tcps.h"

/* fd, a connection of the kernel, has a ticket in the queue of its listener from here on, and is closed here. False: it
 * has not. */
bool vmh_ticket_issue(const struct vmh_ip *addr, in_port_t port, unsigned families, int fd);

/* Around accept4(2): how much room there is for a name, before. */
static inline socklen_t vmh_ticket_room(const struct sockaddr *a, const socklen_t *len)
{
	return !a || vmh_bad_ptr(len) ? 0 : *len;
}
/* After one that has succeeded: the length of the whole name, or 0. */
static inline socklen_t vmh_ticket_named(const socklen_t *len, socklen_t room)
{
	return room && *len <= room ? *len : 0;
}
/* r: what accept4(2) gave. What the program gets: mostly that, or a number below 0 as of vmh_sys(); -EAGAIN: there was
 * nothing behind the ticket. */
int vmh_ticket_redeem(int r, struct sockaddr *a, socklen_t *len, socklen_t room, int flags);
#endif
