/* The statistics page of this process (contracts/stats_page.h). Every pointer given out stays valid
 * for the life of the process: where no slot is free, a private dummy slot is given. */
#ifndef VMH_STATS_H
#define VMH_STATS_H
#include "vmh_base.h"
#include "stats_page.h"

extern struct vmh_stats_page *vmh_stats; /* never NULL after vmh_stats_init */

void vmh_stats_init(void);              /* makes the file, nameless yet, or private memory where it can't */
/* Gives the file its name, before the first hello: without a service nobody asks for it, and a program that is
 * killed would leave it behind. */
void vmh_stats_show(void);
int vmh_stats_fd(void);                 /* O_RDWR fd of the file for the service, or -1 */
void vmh_stats_fork_child(void);        /* a new page for the child; the parent's file is left alone */
void vmh_stats_fini(void);              /* unlinks the file if this process made it */
struct vmh_sock_stats *vmh_stats_sock_new(int fd);  /* zeroed, used = 1 */
void vmh_stats_sock_free(struct vmh_sock_stats *s);
struct vmh_ring_stats *vmh_stats_ring_new(void);
void vmh_stats_ring_free(struct vmh_ring_stats *s);
struct vmh_iomux_stats *vmh_stats_epoll_new(int epfd);
void vmh_stats_epoll_free(struct vmh_iomux_stats *s);
void vmh_stats_zero(void);              /* counters only, not gauges nor descriptions */
void vmh_stats_dump_fd(int fd, int level); /* the manual's fd dump, through the log; fd 0 = all */
void vmh_stats_file_dump(const struct vmh_sock_stats *s); /* VMA_STATS_FILE: at socket close */
#endif
