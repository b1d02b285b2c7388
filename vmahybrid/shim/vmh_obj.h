/* The fd table and the objects behind fds: a UDP socket, a TCP socket (vmh_tcps.h), or an epoll set. No object: a kernel fd.
 *
 * Lifetime: objects live in pools and their memory is never given back, so a stale pointer is always
 * readable. vmh_fd_get takes a use reference and checks that the table still says so; the last
 * vmh_obj_put after close recycles. dup'd fds point to the same object (nfds counts them).
 */
#ifndef VMH_OBJ_H
#define VMH_OBJ_H
#include "vmh_base.h"
#include "vmh_lock.h"

enum vmh_class { VMH_CLASS_FREE = 0, VMH_CLASS_UDP = 1, VMH_CLASS_EPOLL = 2, VMH_CLASS_TCP = 3, VMH_CLASS_CLOSING = 4 };

struct vmh_epitem; /* epoll.c */

struct vmh_obj {
	_Atomic uint32_t refs;     /* users inside a call, plus one while any fd points here */
	_Atomic uint8_t class_;
	_Atomic uint8_t closed;    /* last fd closed: calls in progress return EBADF */
	_Atomic uint32_t nfds;
	int fd;                    /* the fd it was made as, for logs; calls use the caller's fd */
	struct vmh_lock lock;      /* configuration (order 2 for sockets, 3 for epoll sets) */
	struct vmh_epitem *items;  /* sets this object is a member of; guarded by vmh_epoll_items_lock */
};

extern struct vmh_obj *_Atomic *vmh_fdtab;
extern unsigned vmh_fdtab_size;
extern _Atomic unsigned vmh_fdtab_used; /* above the highest number that was ever in it: tables may have a million */

/* This thread has descriptors of its own (CLONE_FILES, CLOSE_RANGE_UNSHARE): a number may be another file's in the table. */
extern __thread bool vmh_fds_apart __attribute__((tls_model("initial-exec")));
VMH_COLD bool vmh_fd_is_another(int fd, const struct vmh_obj *o);
static inline bool vmh_fd_is_mine(int fd, const struct vmh_obj *o) /* o is what this thread has as fd */
{
	return vmh_likely(!vmh_fds_apart) || !vmh_fd_is_another(fd, o);
}

/* After a wait: another one of several, when another thread has closed this one. */
static inline int vmh_fd_now(int fd, const struct vmh_obj *o)
{
	bool is = vmh_likely(atomic_load_explicit(&vmh_fdtab[fd], memory_order_relaxed) == o) || vmh_fds_apart;

	return is ? fd : o->fd;
}

VMH_HOT struct vmh_obj *vmh_fd_get_slow(int fd);
static inline struct vmh_obj *vmh_fd_get(int fd) /* NULL: kernel fd; else put it back */
{
	if (vmh_unlikely((unsigned)fd >= vmh_fdtab_size))
		return NULL;
	if (vmh_likely(!atomic_load_explicit(&vmh_fdtab[fd], memory_order_relaxed)))
		return NULL;
	return vmh_fd_get_slow(fd);
}
static inline bool vmh_fd_known(int fd) /* it was an object's, a moment ago */
{
	return (unsigned)fd < vmh_fdtab_size && atomic_load_explicit(&vmh_fdtab[fd], memory_order_relaxed);
}
/* The object behind fd if it is of that class, without a reference: it may be another's in the next moment. */
static inline struct vmh_obj *vmh_fd_peek(int fd, unsigned class_)
{
	struct vmh_obj *o;

	if (vmh_unlikely((unsigned)fd >= vmh_fdtab_size))
		return NULL;
	o = atomic_load_explicit(&vmh_fdtab[fd], memory_order_acquire);
	if (vmh_likely(!o) || atomic_load_explicit(&o->class_, memory_order_relaxed) != class_)
		return NULL;
	return vmh_fd_is_mine(fd, o) ? o : NULL;
}
VMH_HOT void vmh_obj_put(struct vmh_obj *o);
void vmh_obj_hold(struct vmh_obj *o);             /* one more use reference */
void vmh_obj_hand_over(void);                     /* another thread gives back what this one holds */
void vmh_obj_take_over(void);                     /* that thread, before it does */
void vmh_obj_fork_child(struct vmh_obj *o);       /* those of other threads are gone */
bool vmh_fd_fits(int fd);                         /* else no object can have it: it is the kernel's */
int vmh_fd_install(int fd, struct vmh_obj *o);    /* first fd of a new object */
/* Of a socket, what the kernel has as fd, by which it is told from others; once it is installed. 0: the kernel is asked. */
void vmh_obj_name(struct vmh_obj *o, uint64_t inode);
void vmh_fd_dup(int oldfd, int newfd);            /* after the kernel's dup succeeded */
void vmh_fd_close(int fd);                        /* forget fd (before the kernel's close, or when it was closed behind our back) */
bool vmh_fd_forget(struct vmh_obj *o, int fd);    /* the same, if fd is still o's. Hold a reference */
/* close(): as vmh_fd_close(), and other threads' calls wait until vmh_fd_closed(), after the kernel's close. */
void vmh_fd_closing(int fd);
void vmh_fd_closed(int fd);
void vmh_fdtab_init(void);
void vmh_fdtab_own(void);                         /* at the start and after a fork: the table is this process's */
void vmh_fdtab_off(void);                         /* no descriptor is an object's from here on */
bool vmh_memory_borrowed(void);                   /* in the child of a vfork */
bool vmh_fdtab_borrowed(void);                    /* in the child of a vfork, in the memory of its parent */
void vmh_fdtab_name_all(void);                    /* before a thread leaves the table: by number, each is what it is yet */
void vmh_fdtab_part(void);                        /* this thread has descriptors of its own from here on */
bool vmh_fdtab_parted(void);                        /* some thread has */
void vmh_fd_rename(struct vmh_obj *o);

/* Fds of the shim itself: moved to a high number, close-on-exec, and kept out of reach of the program's
 * close, close_range, closefrom and dup2. Returns the new number (or the old one, or the negative given). softverbs
 * finds hide and hidden_close by name. */
int vmh_fd_hide(int fd);
int vmh_fd_hide_instead(int fd); /* the same, of one that the program is about to close; -errno */
int vmh_fd_hide_another(int fd); /* another number of the same, which stays; or -errno: the program may need it itself */
void vmh_fd_hidden_close(int fd);
bool vmh_fd_is_hidden(int fd);
long vmh_fd_next_hidden(unsigned first, unsigned last); /* the lowest of them, or -1 */
/* The same for fds of a library that knows them by their number: they stay where they are. Taken off the list
 * before that library closes them, whose close is ours. */
void vmh_fd_guard(int fd);
void vmh_fd_unguard(int fd);
#endif
