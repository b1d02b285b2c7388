/* Connections that nobody has accepted when a program forks, for whichever process accepts next. */
#ifndef VMH_TCPS_TICKET_H
#define VMH_TCPS_TICKET_H
#include "vmh_tcps.h"

/* Before a fork; object lock held. Without success there are none. */
void vmh_tickets_begin(struct vmh_tcps *listener);
/* fd, a connection of the kernel, waits in the queue of the listener from here on, and is closed here. Else: the
 * descriptor of one that does not, this or another; or < 0. */
int vmh_ticket_issue(const struct vmh_tcps *listener, const struct vmh_ip *addr, in_port_t port, unsigned families, int fd);
void vmh_tickets_end(struct vmh_tcps *listener); /* nobody holds it */

/* Around accept4(2). */
extern _Atomic bool vmh_tickets_any; /* of this process */
struct vmh_ticket {
	const struct vmh_tcps *listener;
	struct sockaddr *a;
	socklen_t *len, size;
	int flags;
};
/* Of a listener that no fork saw, listener is NULL. */
struct vmh_ticket vmh_ticket_await(const struct vmh_tcps *listener, struct sockaddr *a, socklen_t *len, int flags);
/* r: what accept4(2) gave. The descriptor that the program gets, or a number below 0 as of vmh_sys(): -EAGAIN if there
 * was nothing behind the ticket. */
int vmh_ticket_redeem(const struct vmh_ticket *t, int r);
#endif
