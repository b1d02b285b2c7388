/* What the kernel socket of an accepted connection has from its listener: as accept(2) does it, whose sockets are copies
 * of the listener. */
#ifndef VMH_TCPS_INHERIT_H
#define VMH_TCPS_INHERIT_H
#include "vmh_base.h"
#include <sys/socket.h>

#define VMH_INHERITED 21 /* rows of the table in tcps_inherit.c */

/* Options of which the listener has another value than a new socket. */
struct vmh_inherited {
	unsigned n;
	struct {
		uint64_t value[2];
		uint8_t which; /* row of the table */
	} o[VMH_INHERITED];
};

void vmh_inherited_read(struct vmh_inherited *i, int listener, bool v6);
uint8_t vmh_inherited_write(const struct vmh_inherited *i, int fd); /* VMH_TCPS_NODELAY, VMH_TCPS_TOUCHED */
#endif
