/* select, poll and epoll over offloaded and kernel fds. */
#ifndef VMH_IOMUX_H
#define VMH_IOMUX_H
#include "vmh_obj.h"
#include <poll.h>
#include <signal.h>
#include <sys/epoll.h>

/* epoll.c: the object of an epoll set made through us */
void vmh_epoll_created(int epfd);
void vmh_epoll_closed(struct vmh_obj *ep);            /* last fd of the set closed */
void vmh_epoll_recycle(struct vmh_obj *ep);
int vmh_epoll_ctl(struct vmh_obj *ep, int epfd, int op, int fd, struct epoll_event *ev); /* 0 / -errno */
/* fd is no object; the set need not be held: it is asked for its memory and no more */
int vmh_epoll_ctl_kernels(struct vmh_obj *ep, int epfd, int op, int fd, struct epoll_event *ev);
void vmh_epoll_others(struct vmh_obj *ep, uint64_t data); /* such a member has it, or will; nor need it be held */
void vmh_epoll_duped(struct vmh_obj *ep);
/* reason: of its members */
void vmh_epoll_nested(struct vmh_obj *ep, unsigned reason); /* the kernel alone says from now on whether it is ready */
/* epoll_plain.c: may the call be made on the kernel's set and nowhere else? */
bool vmh_epoll_plain(int epfd, int op, int fd, const struct epoll_event *ev);
int vmh_epoll_wait(struct vmh_obj *ep, int epfd, struct epoll_event *evs, int max, int64_t timeout_ns,
		   const sigset_t *mask);             /* count / -errno; timeout < 0 = for ever */
bool vmh_epoll_ready(struct vmh_obj *ep);             /* some offloaded member is ready */
bool vmh_epoll_on_ring(struct vmh_obj *ep);           /* some member may become ready by a ring */
/* Upcalls from the socket class */
void vmh_epoll_notify(struct vmh_obj *member);        /* a datagram was queued (ring lock held: leaf locks only) */
struct vmh_sock;
/* By a ring, where out_edges is set: an edge for EPOLLOUT|ET. */
VMH_COLD void vmh_epoll_sent(struct vmh_sock *s);
/* It leaves all sets, as the kernel does. held: by another process, too, which would keep it in the kernel's */
void vmh_epoll_member_closed(struct vmh_obj *member, bool held);
/* The kernel socket of a TCP member is parked, and says nothing true any more; or it is the connection's again. */
void vmh_epoll_member_parked(struct vmh_obj *member, bool parked);
/* Its state is no longer KERNEL: calls that saw it are over, and its items are as the kernel has them. No call of
 * epoll_plain.c is under way. false: the kernel does not say. */
bool vmh_epoll_member_settle(struct vmh_obj *member);
void vmh_epoll_member_on_ring(struct vmh_obj *member); /* rx_on became true: sleeping waits must look at rings */

/* iomux.c */
int vmh_poll(struct pollfd *fds, nfds_t n, int64_t timeout_ns, const sigset_t *mask);  /* count / -errno */
bool vmh_poll_wanted(const struct pollfd *fds, nfds_t n); /* any fd on a ring, or to spin for? else call libc */
int vmh_select(int nfds, fd_set *r, fd_set *w, fd_set *e, int64_t timeout_ns, const sigset_t *mask);
bool vmh_select_wanted(int nfds, const fd_set *r, const fd_set *w, const fd_set *e);
#endif
