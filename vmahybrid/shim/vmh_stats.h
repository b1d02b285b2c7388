/* The statistics page of this process (contracts/stats_page.h). Every pointer given out stays valid
 * for the life of the process: where no slot is free, a private dummy slot is given. */
#ifndef VMH_STATS_H
#define VMH_STATS_H
#include "vmh_base.h"
#include "stats_page.h"

/* Counters of a socket and of select, poll and epoll are written by whoever calls, under no lock. While one thread does, a
 * plain add is exact and costs nothing; once a second one has come, all of them add atomically. The second one has the
 * kernel put a barrier into the first before it counts (membarrier(2)), and an add is one instruction: a thread that was
 * interrupted before it does not undo what others have counted since. */
VMH_COLD void vmh_another_counts(unsigned *thread, unsigned char *many, unsigned tid);
static inline bool vmh_alone_by(unsigned tid, unsigned *thread, unsigned char *many)
{
	if (vmh_unlikely(VMH_GET(*thread) != tid)) {
		if (VMH_GET(*many))
			VMH_SET(*thread, tid);
		else
			vmh_another_counts(thread, many, tid);
	}
	return vmh_likely(!VMH_GET(*many));
}
static inline bool vmh_alone(unsigned *thread, unsigned char *many) { return vmh_alone_by(vmh_tid(), thread, many); }
static inline bool vmh_rx_alone(struct vmh_sock_stats *s) { return vmh_alone(&s->thread_rx, &s->rx_many); }
static inline bool vmh_tx_alone(struct vmh_sock_stats *s) { return vmh_alone(&s->thread_tx, &s->tx_many); }
static inline bool vmh_iomux_alone(struct vmh_iomux_stats *s) { return vmh_alone(&s->thread, &s->many); }
static inline void vmh_add_here(unsigned long long *c, uint64_t n)
{
#ifdef __x86_64__
	__asm__ volatile("addq %1, %0" : "+m"(*c) : "er"(n));
#else
	VMH_COUNT(*c, n);
#endif
}
#define VMH_COUNT_BY(alone, c, n) \
	do { \
		if (alone) \
			vmh_add_here(&(c), (n)); \
		else \
			__atomic_fetch_add(&(c), (n), __ATOMIC_RELAXED); \
	} while (0)

extern struct vmh_stats_page *vmh_stats; /* never NULL after vmh_stats_init */

/* Orders of an operator in the page. Where there is no internal thread, the program's calls that the kernel serves look. */
VMH_COLD void vmh_stats_asked(void);
static inline void vmh_stats_look(void)
{
	if (vmh_stats && vmh_unlikely(VMH_GET(vmh_stats->asked) != VMH_GET(vmh_stats->taken)))
		vmh_stats_asked();
}

void vmh_stats_init(void);              /* makes the file, nameless yet, or private memory where it can't */
/* Gives the file its name (and the child of a fork its file), before the service is first asked for;
 * without one, vma_stats -k reads it all the same, and removes what a program left that was killed. */
void vmh_stats_show(void);
int vmh_stats_fd(void);                 /* O_RDWR fd of the file for the service, or -1 */
void vmh_stats_fork_child(void);        /* a new page for the child; the parent's file is left alone */
void vmh_stats_fini(void);              /* unlinks the file if this process made it */
struct vmh_sock_stats *vmh_stats_sock_new(int fd);  /* zeroed, used = 1 */
void vmh_stats_sock_name(struct vmh_sock_stats *s, uint64_t inode); /* by which others know it */
void vmh_stats_sock_free(struct vmh_sock_stats *s);
void vmh_stats_each_sock(void (*f)(struct vmh_sock_stats *s)); /* unused slots, too */
struct vmh_ring_stats *vmh_stats_ring_new(void);
void vmh_stats_ring_free(struct vmh_ring_stats *s);
struct vmh_iomux_stats *vmh_stats_epoll_new(int epfd);
void vmh_stats_epoll_free(struct vmh_iomux_stats *s);
/* A connection that the service is told of in no other way yet; ports in network order. Its place, 0: there is none. */
unsigned vmh_stats_open_new(const unsigned char *laddr, unsigned short lport, const unsigned char *raddr,
			    unsigned short rport);
void vmh_stats_open_free(unsigned place);
void vmh_sock_dump(int fd, int level);  /* what the page does not have: sock_stamp.c, epoll_dump.c */
void vmh_epoll_dump(int epfd, int level);
void vmh_stats_dump_fd(int fd, int level); /* the manual's fd dump, through the log; fd 0 = all */
/* VMA_STATS_FILE: a block for each socket that was used, at its close or at the end of the program. */
void vmh_stats_file_init(void);
void vmh_stats_file_fork_child(void);
void vmh_stats_file_dump(const struct vmh_sock_stats *s);
void vmh_stats_file_dump_all(void);
#endif
