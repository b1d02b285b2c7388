/* The VMA_* parameters of TCP sockets, and the kernel's. */
#ifndef VMH_TCPS_PARAM_H
#define VMH_TCPS_PARAM_H
#include "vmh_tcps.h"

void vmh_tcps_defaults(struct vmh_tcp_options *o, bool v6);     /* of a new socket's connections on rings */
void vmh_tcps_defaults_kernel(int fd, bool v6);                 /* of its kernel socket */
void vmh_tcps_adopted(struct vmh_tcps *s);                      /* io held: the options that the kernel had are s->opt */
/* VMA_AVOID_SYS_CALLS_ON_TCP_FD: options that are answered without the kernel. 0, -errno or VMH_TCPS_KERNELS */
int vmh_tcps_known(const struct vmh_tcps *s, int level, int name, void *val, socklen_t *len);
int vmh_tcps_fcntl(const struct vmh_tcps *s, int cmd);          /* F_GETFL; or VMH_TCPS_KERNELS */

/* tcps_sysctl.c: as it was a second ago, or is */
enum vmh_tcps_sysctl {
	VMH_SYSCTL_TTL, VMH_SYSCTL_TIMESTAMPS, VMH_SYSCTL_SACK, VMH_SYSCTL_WINDOW_SCALING,
	VMH_SYSCTL_SYN_COOKIES, VMH_SYSCTL_SYN_RETRIES, VMH_SYSCTL_KEEP_IDLE_S, VMH_SYSCTL_KEEP_INTVL_S, VMH_SYSCTL_KEEP_CNT,
	VMH_SYSCTL_SOMAXCONN, VMH_SYSCTL_AFTER_IDLE,
};
int vmh_tcps_sysctl(enum vmh_tcps_sysctl which);
#endif
