/* Start, fork and end of the library in a process. */
#ifndef VMH_MAIN_H
#define VMH_MAIN_H
#include "vmh_base.h"

struct sigaction;

void vmh_started(void);         /* before the first object: parameters, log, statistics page */
/* The service does not know of this process yet: accept() calls vmh_accept_tell(). */
extern _Atomic bool vmh_accept_tells;
VMH_COLD void vmh_accept_tell(int listener, int fd);
void vmh_crash_init(void);      /* crash.c */
bool vmh_crash_handles(const struct sigaction *act);
void vmh_before_exec(void);
void vmh_before_spawn(bool actions); /* with file actions */
void vmh_spawn_names(int fd); /* a file action will dup it */
void vmh_before_exit(void);
void vmh_kernel_for_good(unsigned reason); /* interpose_ns.c: no ring from here on, and the log says why */
bool vmh_sets_filter(long number, unsigned long a, unsigned long b, const void *filter); /* interpose_seccomp.c: of system calls */
void vmh_before_filter(void);   /* the kernel for good, and no calls but the program's */
extern _Atomic bool vmh_filtered; /* it was */
bool vmh_is_own_process(void); /* else the child of a vfork, or there is nothing of ours */
void vmh_signals_fork_child(void);
void vmh_signals_end_by_kernel(void);
void vmh_signals_end_well(void); /* signal.c; from the first connection on a ring on */
void vmh_before_fork(void);
void vmh_after_fork_parent(void);
void vmh_after_fork_child(void);
void vmh_watch_forks(void); /* libc's fork() does from here on what is to be done before and after one */
void vmh_before_daemon(void);
void vmh_after_daemon(void);
#endif
