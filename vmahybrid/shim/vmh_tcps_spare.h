/* Kernel sockets with which nothing was ever done: those of connections that lived on a ring alone. */
#ifndef VMH_TCPS_SPARE_H
#define VMH_TCPS_SPARE_H
#include "vmh_tcps.h"

/* What a descriptor is wanted for: the kernel sockets of both differ by VMA_TCP_NODELAY and VMA_MSS. */
enum vmh_tspare_use { VMH_TSPARE_OPENS, VMH_TSPARE_ACCEPTS };

/* As socket(2), with flags of SOCK_NONBLOCK and SOCK_CLOEXEC, from those that were kept; -1: there is none. *inode of it. */
int vmh_tspare_take(enum vmh_tspare_use use, bool v6, int flags, uint64_t *inode);

/* Around what close() does with the object: the last of them may keep the kernel socket, under another number. */
void vmh_tspare_closing(int fd);
void vmh_tspare_offer(const struct vmh_tcps *s);           /* it was closed on its ring; object lock held */
bool vmh_tspare_is_offered(const struct vmh_tcps *s);
void vmh_tspare_keep(int fd);

void vmh_tspare_look(void);       /* the internal thread: what nobody wanted for a while is closed */
void vmh_tspare_drop(void);       /* all of them: somebody else will have a copy of the table of descriptors */
void vmh_tspare_off(void);        /* for good */
/* A fork has none of them. In between nobody keeps or gives one. */
void vmh_tspare_before_fork(void);
void vmh_tspare_after_fork_parent(void);
void vmh_tspare_after_fork_child(void);
#endif
