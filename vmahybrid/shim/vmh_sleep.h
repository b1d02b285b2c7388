/* Threads that sleep (sleep.c), and which of them look at the rings for the others (watch.c). */
#ifndef VMH_SLEEP_H
#define VMH_SLEEP_H
#include "vmh_base.h"
#include <poll.h>

struct vmh_ring;

enum vmh_role {
	VMH_ROLE_NONE,
	VMH_ROLE_FIRST,  /* is woken by the rings that it waits for: all, or `only` */
	VMH_ROLE_DEPUTY, /* by those that no first one waits for */
	VMH_ROLE_BEHIND, /* by who delivers something to it */
};

struct vmh_sleeper {
	struct vmh_sleeper *next, **pprev;         /* those who sleep now */
	struct vmh_sleeper *all_next, **all_pprev; /* every thread with an eventfd: fork closes them */
	int fd_plus_one;                           /* 0: none yet, so that zeroed TLS is valid */
	int depth;                                 /* > 1: a signal handler sleeps inside our sleep */
	_Atomic int woken;
	bool looks;                                /* and then sees what it has delivered to itself; its own thread's */
	const void *_Atomic waits_for;             /* the socket, or the epoll set; NULL: it looks at whatever comes */
	/* watch.c; its lock */
	struct vmh_sleeper *behind_next, *behind_prev;
	struct vmh_ring *only;
	enum vmh_role role;
	unsigned vain;                             /* wake-ups by the rings that were for others */
};
extern __thread struct vmh_sleeper vmh_me __attribute__((tls_model("initial-exec")));

void vmh_sleeper_appointed(struct vmh_sleeper *s);
void vmh_sleep_fork_child(void);

/* This thread is about to sleep on ring `only`, or all. How many fds of fds[0..max) it is woken by for that. */
unsigned vmh_watch_begin(struct vmh_ring *only, bool can_be_woken, int *fds, int max);
/* What the sleep found on those. */
void vmh_watch_woken(const struct pollfd *p, int n);
/* It does not sleep any more, or its thread ends: others do what it did. */
void vmh_watch_end(struct vmh_sleeper *s);
/* What woke it by the rings was not for it. */
void vmh_watch_in_vain(void);
/* By the internal thread, each turn: delivers what the one that was woken for others has not taken, wherever it is. */
void vmh_watch_look(void);
void vmh_watch_fork_child(void);
#endif
