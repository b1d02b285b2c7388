/* The internal thread: reads the service's events, takes sockets home when it must, reconnects, and
 * drains rings that the program does not poll (VMA_PROGRESS_ENGINE_INTERVAL). */
#ifndef VMH_WORKER_H
#define VMH_WORKER_H
#include "vmh_base.h"
#include "control.h"

#define VMH_RECONNECT_MS 250

/* Control lock held; also with a new connection. late: sockets were used before there was a session. */
void vmh_worker_start(int control_fd, bool late);
void vmh_worker_event(const struct vmh_msg_event *ev);    /* control lock held: only put aside */
void vmh_worker_lost(void);                               /* control lock held */
void vmh_worker_parted(void);                             /* the same; by ourselves: there is nothing to take home */
void vmh_worker_fork_child(void);
/* There was a session, and flows may move from the kernel to a ring at any time from now on: a blocked
 * call must sleep where it can be woken, not in the kernel's recv. */
extern _Atomic int vmh_worker_runs;
void vmh_worker_wake(void);                               /* any thread: its intervals may be others now */
bool vmh_worker_is_me(void);
/* Has the process one thread beside the internal one? false where /proc does not say. */
bool vmh_worker_and_one(void);
bool vmh_process_has_threads(void); /* more than one, ours too; or /proc does not say */
/* Ends the thread, if the process has one other; true: it has, until vmh_worker_step_back(). errno is kept where false. */
bool vmh_worker_step_aside(void);
void vmh_worker_leave(void);     /* for good */
void vmh_worker_step_back(void);
void vmh_worker_first_ends(void);
void vmh_worker_first_thread(void); /* this one is: where it ends alone, by whatever way, the last of all ends the process */

/* control.c, for the worker */
void vmh_session_read(void);
void vmh_session_bye(void);
void vmh_session_end(unsigned reason);
void vmh_session_closing(unsigned reason); /* for good: no socket comes to a ring any more, rules are given back yet */
void vmh_session_part(unsigned reason); /* nothing more comes to a ring; the connection stays, to bring home what is there */
void vmh_session_settled(void);
bool vmh_session_ask_again(void);
bool vmh_session_muted(void);
void vmh_session_release(unsigned ring_id);
#endif
