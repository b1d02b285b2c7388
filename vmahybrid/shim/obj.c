/* The fd table. See vmh_obj.h for the lifetime rules. */
#include "vmh_obj.h"
#include "vmh_iomux.h"
#include "vmh_main.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include "vmh_uring.h"
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#define FDTAB_MAX (1u << 20)

VMH_EACH_CALL struct vmh_obj *_Atomic *vmh_fdtab;
VMH_EACH_CALL unsigned vmh_fdtab_size;
_Atomic unsigned vmh_fdtab_used;

void vmh_fdtab_init(void)
{
	struct rlimit lim = { 1024, 1024 };

	if (vmh_fdtab)
		return;
	vmh_sys(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &lim);
	rlim_t n = lim.rlim_max;
	if (n == RLIM_INFINITY || n > FDTAB_MAX)
		n = FDTAB_MAX;
	if (n < 1024)
		n = 1024;
	void *p = mmap(NULL, n * sizeof(*vmh_fdtab), PROT_READ | PROT_WRITE,
		       MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	if (p == MAP_FAILED)
		return; /* size stays 0: every fd is a kernel fd */
	vmh_fdtab = p;
	vmh_fdtab_size = (unsigned)n;
}

__thread bool vmh_fds_apart __attribute__((tls_model("initial-exec")));
static _Atomic bool parted;

/* The pid of this process, in a page that a fork leaves empty. */
static long *owner;

void vmh_fdtab_own(void)
{
	atomic_store(&parted, vmh_fds_apart); /* a child has no other thread */
	if (!owner) {
		void *p = mmap(NULL, sizeof(*owner), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

		if (p == MAP_FAILED || madvise(p, sizeof(*owner), MADV_WIPEONFORK) < 0)
			return;
		owner = p;
	}
	*owner = vmh_sys(SYS_getpid);
}

static bool is_of(const struct vmh_obj *o, enum vmh_class class_)
{
	return atomic_load_explicit(&o->class_, memory_order_relaxed) == class_;
}

static _Atomic uint64_t *inode_in(struct vmh_obj *o)
{
	if (is_of(o, VMH_CLASS_TCP))
		return &((struct vmh_tcps *)o)->inode;
	return is_of(o, VMH_CLASS_UDP) ? &((struct vmh_sock *)o)->inode : NULL;
}

void vmh_obj_name(struct vmh_obj *o, uint64_t inode)
{
	_Atomic uint64_t *is = inode_in(o);
	struct stat st;

	if (!is || atomic_load(is))
		return;
	if (!inode && !vmh_sys(SYS_fstat, o->fd, &st))
		inode = st.st_ino;
	atomic_store(is, inode);
	vmh_stats_sock_name(is_of(o, VMH_CLASS_TCP) ? ((struct vmh_tcps *)o)->stats : ((struct vmh_sock *)o)->stats, inode);
}

/* Sockets are told apart by their inodes, before one has its own that it is a socket. A set of epoll has none of its own. */
bool vmh_fd_is_another(int fd, const struct vmh_obj *o)
{
	const _Atomic uint64_t *of_socket = inode_in((struct vmh_obj *)o);
	uint64_t inode = of_socket ? atomic_load(of_socket) : 0;
	struct stat is;

	if (vmh_sys(SYS_fstat, fd, &is) < 0)
		return true;
	return of_socket ? !S_ISSOCK(is.st_mode) || (inode && is.st_ino != inode) : (is.st_mode & S_IFMT) != 0;
}

void vmh_fdtab_name_all(void)
{
	unsigned used;

	if (vmh_fdtab_borrowed()) /* it has left before */
		return;
	atomic_store(&parted, true); /* those that are made from here on have a name at once */
	used = atomic_load(&vmh_fdtab_used);
	for (int fd = 0; fd < (int)used; fd++) {
		struct vmh_obj *o = vmh_fd_get(fd);

		if (!o)
			continue;
		vmh_obj_name(o, 0);
		vmh_obj_put(o);
	}
}

void vmh_fdtab_part(void)
{
	vmh_fds_apart = true;
	vmh_plain_part();
}

bool vmh_fdtab_parted(void)
{
	return atomic_load(&parted);
}

void vmh_fdtab_off(void)
{
	__atomic_store_n(&vmh_fdtab_size, 0, __ATOMIC_SEQ_CST);
	vmh_plain_off();
}

bool vmh_memory_borrowed(void)
{
	return owner && *owner && !atomic_load_explicit(&vmh_filtered, memory_order_relaxed) && *owner != vmh_sys(SYS_getpid);
}

/* The child of a vfork has descriptors of its own in the memory of its parent: what it closes stays the parent's. So does
 * what a thread closes that has left the table of the others (CLONE_FILES, CLOSE_RANGE_UNSHARE). */
bool vmh_fdtab_borrowed(void)
{
	return vmh_unlikely(vmh_fds_apart) || vmh_unlikely(vmh_memory_borrowed());
}

/* What the table says of a connection that is being closed: under its number is a kernel socket yet, for which the kernel
 * has other errors than EBADF, and SIGPIPE. */
static struct vmh_obj being_closed = { .refs = 1, .class_ = VMH_CLASS_CLOSING, .closed = 2 };
static __thread int closing_here __attribute__((tls_model("initial-exec"))); /* + 1 */

#define CLOSES_NS 50000000u
#define CLOSES_NAP_NS 20000

/* Not in a handler of the thread that closes it, and not for one that lingers, or was left by siglongjmp(). */
VMH_COLD static void await_close(int fd)
{
	const struct timespec nap = { 0, CLOSES_NAP_NS };
	uint64_t end = vmh_now_ns() + CLOSES_NS;
	struct vmh_obj *is;

	while (closing_here != fd + 1 && atomic_load(&vmh_fdtab[fd]) == &being_closed) {
		if (vmh_now_ns() >= end) {
			is = &being_closed;
			atomic_compare_exchange_strong(&vmh_fdtab[fd], &is, NULL);
			return;
		}
		vmh_sys(SYS_nanosleep, &nap, NULL);
	}
}

struct vmh_obj *vmh_fd_get_slow(int fd)
{
	for (;;) {
		struct vmh_obj *o = atomic_load_explicit(&vmh_fdtab[fd], memory_order_acquire);

		if (vmh_unlikely(o == &being_closed)) {
			await_close(fd);
			return NULL;
		}
		if (!o)
			return NULL;
		vmh_obj_hold(o);
		/* the memory is type-stable: if the table moved on, give the reference back and look again */
		if (vmh_likely(atomic_load_explicit(&vmh_fdtab[fd], memory_order_acquire) == o)) {
			if (vmh_fd_is_mine(fd, o))
				return o;
			vmh_obj_put(o);
			return NULL;
		}
		vmh_obj_put(o);
	}
}

void vmh_obj_hold(struct vmh_obj *o)
{
	if (vmh_unlikely(vmh_held.async_cancel) && !vmh_held.objs)
		vmh_cancel_later();
	vmh_held.objs++;
	atomic_fetch_add_explicit(&o->refs, 1, memory_order_acq_rel);
}

void vmh_obj_hand_over(void)
{
	vmh_held.objs--;
}

void vmh_obj_take_over(void)
{
	vmh_held.objs++;
}

/* A reference less; the table's, too. */
static void drop(struct vmh_obj *o)
{
	uint8_t closed = 1;

	if (vmh_likely(atomic_fetch_sub_explicit(&o->refs, 1, memory_order_acq_rel) != 1))
		return;
	/* A stray vmh_fd_get_slow may take a free object from 0 to 1 and back: only the first one after
	 * the close recycles. */
	if (!atomic_compare_exchange_strong(&o->closed, &closed, 2))
		return;
	if (atomic_load(&o->class_) == VMH_CLASS_EPOLL)
		vmh_epoll_recycle(o);
	else if (atomic_load(&o->class_) == VMH_CLASS_TCP)
		vmh_tcps_recycle(vmh_tcps_of(o));
	else
		vmh_sock_recycle(vmh_sock_of(o));
}

void vmh_obj_put(struct vmh_obj *o)
{
	vmh_held.objs--;
	drop(o);
	if (vmh_unlikely(vmh_held.async_cancel))
		vmh_cancel_now();
}

/* Of one that is open. A handler of a signal that came in the midst of a call may fork, too: that call goes on here, and
 * the references stay. */
void vmh_obj_fork_child(struct vmh_obj *o)
{
	if (!vmh_held.objs)
		atomic_store(&o->refs, 1);
}

static void put_in(int fd, struct vmh_obj *o)
{
	unsigned used = atomic_load_explicit(&vmh_fdtab_used, memory_order_relaxed);

	while (vmh_unlikely(used <= (unsigned)fd) && !atomic_compare_exchange_weak(&vmh_fdtab_used, &used, (unsigned)fd + 1))
		;
	atomic_store_explicit(&vmh_fdtab[fd], o, memory_order_release);
}

bool vmh_fd_fits(int fd)
{
	return (unsigned)fd < vmh_fdtab_size && !vmh_fds_apart;
}

int vmh_fd_install(int fd, struct vmh_obj *o)
{
	if (!vmh_fd_fits(fd))
		return -EMFILE;
	atomic_store(&o->nfds, 1);
	o->fd = fd;
	atomic_fetch_add(&o->refs, 1);
	atomic_store(&o->closed, 0);
	put_in(fd, o);
	return 0;
}

void vmh_fd_dup(int oldfd, int newfd)
{
	struct vmh_obj *o;

	if (oldfd == newfd || (unsigned)newfd >= vmh_fdtab_size)
		return;
	vmh_fd_close(newfd);
	o = vmh_fd_get(oldfd);
	if (!o)
		return;
	if (vmh_fdtab_borrowed()) {
		vmh_obj_put(o);
		return;
	}
	atomic_fetch_add(&o->nfds, 1);
	put_in(newfd, o);
	if (atomic_load(&o->class_) == VMH_CLASS_EPOLL)
		vmh_epoll_duped(o);
	vmh_obj_put(o);
}

/* The table says no more that fd is o. */
static void let_go(int fd, struct vmh_obj *o)
{
	if (atomic_load(&o->nfds) > 1 && atomic_load(&o->class_) == VMH_CLASS_TCP)
		vmh_tcps_closes_one(vmh_tcps_of(o), fd);
	if (atomic_fetch_sub(&o->nfds, 1) != 1) {
		if (o->fd == fd)
			vmh_fd_rename(o);
		return;
	}
	if (atomic_load(&o->class_) == VMH_CLASS_TCP) {
		vmh_tcps_close(vmh_tcps_of(o), fd);
		vmh_plain_shut(fd); /* who was about to open it has done so, and nobody does any more: it is home */
	}
	atomic_store(&o->closed, 1);
	if (atomic_load(&o->class_) == VMH_CLASS_EPOLL)
		vmh_epoll_closed(o);
	else if (atomic_load(&o->class_) == VMH_CLASS_TCP)
		vmh_tcps_closed(vmh_tcps_of(o));
	else
		vmh_sock_closed(vmh_sock_of(o));
	drop(o);
}

/* instead: what the table says from here on. */
static void forget(int fd, struct vmh_obj *instead)
{
	struct vmh_obj *o;

	vmh_plain_shut(fd);
	o = atomic_exchange(&vmh_fdtab[fd], instead);
	if (o && o != &being_closed)
		let_go(fd, o);
}

void vmh_fd_close(int fd)
{
	vmh_urings_closed((unsigned)fd, (unsigned)fd);
	if (vmh_fd_known(fd) && !vmh_fdtab_borrowed())
		forget(fd, NULL);
}

void vmh_fd_closing(int fd)
{
	vmh_urings_closed((unsigned)fd, (unsigned)fd);
	if (!vmh_fd_known(fd) || vmh_fdtab_borrowed())
		return;
	closing_here = fd + 1;
	forget(fd, vmh_fd_peek(fd, VMH_CLASS_TCP) ? &being_closed : NULL);
}

void vmh_fd_closed(int fd)
{
	struct vmh_obj *is = &being_closed;

	if (vmh_unlikely(vmh_fd_known(fd)) && closing_here == fd + 1)
		atomic_compare_exchange_strong(&vmh_fdtab[fd], &is, NULL);
	closing_here = 0;
}

bool vmh_fd_forget(struct vmh_obj *o, int fd)
{
	struct vmh_obj *is = o;

	if (vmh_fdtab_borrowed())
		return false;
	vmh_plain_shut(fd);
	if (!atomic_compare_exchange_strong(&vmh_fdtab[fd], &is, NULL))
		return false;
	let_go(fd, o);
	return true;
}

/* The fd an object was made as is gone, but a dup lives: logs, statistics and kernel calls made on the
 * object's own account use that one. */
void vmh_fd_rename(struct vmh_obj *o)
{
	for (unsigned fd = 0; fd < atomic_load(&vmh_fdtab_used); fd++) {
		if (atomic_load_explicit(&vmh_fdtab[fd], memory_order_relaxed) == o) {
			o->fd = (int)fd;
			if (atomic_load(&o->class_) == VMH_CLASS_UDP)
				VMH_SET(vmh_sock_of(o)->stats->fd, (int)fd);
			if (atomic_load(&o->class_) == VMH_CLASS_TCP)
				VMH_SET(vmh_tcps_of(o)->stats->fd, (int)fd);
			return;
		}
	}
}
