#ifndef VMH_EXCEPTION_H
#define VMH_EXCEPTION_H
#include "vmh_base.h"

/* Before a call that takes a socket home. 0: go on; -EINVAL: fail with it. May end the process (3). */
VMH_COLD int vmh_exception(int fd, unsigned reason);
/* The process begins without a service. May end it (-2). No lock held. */
void vmh_exception_start(unsigned reason);
#endif
