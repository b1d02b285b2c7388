/* What the stack says of a connection on a ring; options that need no kernel. */
#ifndef VMH_TCPS_INFO_H
#define VMH_TCPS_INFO_H
#include "vmh_tcps.h"

bool vmh_tcps_info(struct vmh_tcps *s, struct vmh_tcp_info *i); /* false: it is not on a ring */
int vmh_tcps_give(void *val, socklen_t *len, const void *what, size_t size);
/* 0, -errno or VMH_TCPS_KERNELS */
int vmh_tcps_tcp_info(struct vmh_tcps *s, void *val, socklen_t *len);
int vmh_tcps_listener_info(struct vmh_tcps *s, int fd, void *val, socklen_t *len); /* the same: 0 or -errno */
void vmh_tcps_tell_inq(struct vmh_tcps *s, struct msghdr *m); /* the control message of TCP_INQ */
/* Of a queue: what whoever has the connection says. 0 or -errno; VMH_TCPS_KERNELS of other requests. */
int vmh_tcps_queue(struct vmh_tcps *s, int fd, unsigned long request, void *value);
void vmh_tcps_dump(int fd, int level);          /* the PCB of example 7 in the monitoring manual */
void vmh_tcps_note_state(struct vmh_tcps *s, unsigned state); /* stack lock held; of linux/tcp_states.h */
void vmh_tcps_note_amounts(struct vmh_tcps *s, const struct vmh_tcp_amounts *a);
#endif
