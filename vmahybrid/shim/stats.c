/* The statistics page: where it lives and who gets which slot. See vmh_stats.h.
 *
 * The claims of slots are kept in private bitmaps, so that nothing in the shared file, which readers
 * and other processes of the same user see, can lead a pointer astray.
 */
#include "vmh_stats.h"
#include "vmh_fd.h"
#include "vmh_heap.h"
#include "vmh_obj.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <fcntl.h>
#include <stdio.h>
#include <sys/file.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define SOCKS_MAX 1024 /* VMA_STATS_FD_NUM's limit */
#define WORDS(n) (((n) + 63) / 64)

VMH_EACH_CALL struct vmh_stats_page *vmh_stats;

static size_t page_size;
static struct vmh_file file = { .fd = -1 };
static bool nameless; /* the file waits for its name */
static bool no_file_here; /* it could not be made */
static bool in_memory;    /* the child of a fork: none before it has a session, since it costs more than the fork */
static char path[sizeof(vmh_params.stats_shmem_dir) + 32]; /* empty: no name */
static pid_t made_by;

static _Atomic uint64_t sock_claims[WORDS(SOCKS_MAX)];
static _Atomic uint64_t ring_claims[WORDS(VMH_STATS_RINGS)];
static _Atomic uint64_t epoll_claims[WORDS(VMH_STATS_EPOLLS)];
static _Atomic uint64_t open_claims[WORDS(VMH_STATS_OPEN)];

/* Of a socket that found no slot, where VMA_STATS_FILE is to have its counters all the same. Never freed. */
struct spare {
	struct vmh_sock_stats s; /* first: what is given out */
	struct spare *next, *next_free;
};
static struct vmh_lock spare_lock;
static struct spare *spares, *free_spares;

/* Written by everybody who found no slot, read by nobody. */
static struct vmh_sock_stats dummy_sock;
static struct vmh_ring_stats dummy_ring;
static struct vmh_iomux_stats dummy_epoll;

/* Lowest free bit below n, taken; -1 when all are. */
static int claim(_Atomic uint64_t *claims, unsigned n)
{
	unsigned w;

	for (w = 0; w < WORDS(n); w++) {
		uint64_t old = atomic_load_explicit(&claims[w], memory_order_relaxed);

		while (~old) {
			unsigned bit = (unsigned)__builtin_ctzll(~old);

			if (w * 64 + bit >= n)
				return -1;
			if (atomic_compare_exchange_weak_explicit(&claims[w], &old, old | 1ull << bit,
								  memory_order_acquire, memory_order_relaxed))
				return (int)(w * 64 + bit);
		}
	}
	return -1;
}

/* Behind `last`, -1 for the first; -1: none. The memory of a slot that is not claimed may not be there yet, and a look at it
 * would cost a page fault. */
static int next_claimed(_Atomic uint64_t *claims, unsigned n, int last)
{
	for (unsigned at = (unsigned)last + 1; at < n; at = (at / 64 + 1) * 64) {
		uint64_t left = atomic_load_explicit(&claims[at / 64], memory_order_acquire) >> at % 64;

		if (left)
			return (int)(at + (unsigned)__builtin_ctzll(left));
	}
	return -1;
}

static void unclaim(_Atomic uint64_t *claims, size_t slot)
{
	atomic_fetch_and_explicit(&claims[slot / 64], ~(1ull << slot % 64), memory_order_release);
}

/* A file left by a dead process that had our pid. Only a plain file of our own user is replaced. */
static bool replace_stale(const char *name)
{
	struct stat st;

	if (vmh_sys(SYS_newfstatat, AT_FDCWD, name, &st, AT_SYMLINK_NOFOLLOW) || !S_ISREG(st.st_mode) ||
	    st.st_uid != (uid_t)vmh_sys(SYS_geteuid) || st.st_nlink != 1)
		return false;
	return vmh_sys(SYS_unlinkat, AT_FDCWD, name, 0) == 0;
}

static void no_file(const char *name, int err)
{
	vmh_warn("no statistics file %s (%s): the service can read the statistics all the same", name,
		 strerrorname_np(-err));
}

/* 0600: readers get the fd through the service. Its name comes later: see vmh_stats_show. */
static int open_file(void)
{
	const char *dir = vmh_params.stats_shmem_dir;
	int err;

	if (!dir[0])
		return -ENOENT;
	err = vmh_file_open(&file, dir, O_RDWR | O_TMPFILE, 0600, true);
	if (err)
		no_file(dir, err);
	no_file_here = err;
	nameless = !err;
	return err;
}

/* Who would remove the file of a dead process asks for this lock, which the kernel takes from us when we die: our pid
 * may be somebody else's by then, or of another pid namespace. */
static void show_life(int fd)
{
	vmh_sys(SYS_flock, fd, LOCK_SH | LOCK_NB);
}

/* The descriptor of a nameless file calls it "#INODE" for ever; the service knows a page by its name. */
static void open_by_name(void)
{
	struct vmh_file named;

	if (vmh_file_open(&named, path, O_RDWR | O_NOFOLLOW, 0, true))
		return;
	if (named.dev == file.dev && named.ino == file.ino) {
		show_life(named.fd);
		vmh_file_close(&file);
		named.fd = vmh_fd_hide(named.fd);
		file = named;
	} else {
		vmh_file_close(&named);
	}
}

static int link_file(void)
{
	char from[32];

	snprintf(from, sizeof(from), "/proc/self/fd/%d", file.fd);
	return (int)vmh_sys(SYS_linkat, AT_FDCWD, from, AT_FDCWD, path, AT_SYMLINK_FOLLOW);
}

static int open_memfd(void)
{
	long fd = vmh_sys(SYS_memfd_create, "vmastat", MFD_CLOEXEC);

	if (fd < 0)
		return (int)fd;
	fd = vmh_fd_high((int)fd);
	if (vmh_file_of(&file, (int)fd)) {
		vmh_sys(SYS_close, (int)fd);
		return -EIO;
	}
	return 0;
}

static long allocate(int fd)
{
	struct vmh_quiet q = vmh_quiet_begin();
	long r = vmh_sys(SYS_fallocate, fd, 0, 0L, (long)page_size);

	vmh_quiet_end(&q, r);
	return r;
}

/* The open file, as a zeroed page; closed again if that can't be. */
static void *map_file(void)
{
	void *page = MAP_FAILED;

	if (!allocate(file.fd))
		page = mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_SHARED, file.fd, 0);
	/* every new session hands it over: a program that closes all fds must not take it away */
	file.fd = vmh_fd_hide(file.fd);
	if (page == MAP_FAILED) {
		nameless = false;
		vmh_file_close(&file);
	}
	return page;
}

/* A zeroed page that others can read: in the file, else in a memfd. fallocate, because a write into a hole of a full file
 * system would kill the program with SIGBUS. */
static void *shared_page(bool with_file)
{
	void *page = MAP_FAILED;
	int tries;

	for (tries = with_file ? 0 : 1; tries < 2 && page == MAP_FAILED; tries++)
		if (!(tries ? open_memfd() : open_file()))
			page = map_file();
	if (page == MAP_FAILED)
		vmh_warn("no memory for a statistics page that the service can read");
	return page;
}

static void *private_page(void)
{
	return mmap(NULL, page_size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
}

/* Instead of what is there, at its addresses, which are all over the sockets. */
static bool put_page(void *page)
{
	if (mremap(page, page_size, page_size, MREMAP_MAYMOVE | MREMAP_FIXED, vmh_stats) != MAP_FAILED)
		return true;
	munmap(page, page_size);
	return false;
}

/* Of a fork's child. Only what another thread counts in this very moment is lost. */
static void move_to_file(void)
{
	void *page = shared_page(!no_file_here);

	in_memory = false;
	if (page == MAP_FAILED)
		return;
	memcpy(page, vmh_stats, page_size);
	if (put_page(page))
		return;
	vmh_file_close(&file);
	nameless = false;
}

void vmh_stats_show(void)
{
	const char *dir = vmh_params.stats_shmem_dir;
	int err;

	if (in_memory)
		move_to_file();
	if (!nameless || !vmh_file_is_ours(&file))
		return;
	nameless = false;
	snprintf(path, sizeof(path), "%s%svmastat.%d", dir, dir[strlen(dir) - 1] == '/' ? "" : "/", (int)made_by);
	show_life(file.fd);
	err = link_file();
	if (err == -EEXIST && replace_stale(path))
		err = link_file();
	if (err) {
		no_file(path, err);
		path[0] = 0;
		return;
	}
	open_by_name();
}

static void describe(struct vmh_stats_page *p)
{
	struct timespec now;
	long fd, n = 0;

	clock_gettime(CLOCK_REALTIME, &now);
	p->version = VMH_STATS_VERSION;
	p->size = (unsigned)page_size;
	p->pid = (unsigned)made_by;
	p->nsocks = (unsigned)vmh_params.stats_fd_num;
	p->sock_size = sizeof(struct vmh_sock_stats);
	p->started_ns = (unsigned long long)now.tv_sec * 1000000000u + (unsigned long long)now.tv_nsec;
	p->log_level = (unsigned)atomic_load(&vmh_log_level_now);
	p->log_details = (unsigned)atomic_load(&vmh_log_details_now);
	fd = vmh_sys(SYS_openat, AT_FDCWD, "/proc/self/comm", O_RDONLY | O_CLOEXEC, 0);
	if (fd >= 0) {
		n = vmh_sys(SYS_read, (int)fd, p->comm, sizeof(p->comm) - 1);
		vmh_sys(SYS_close, (int)fd);
	}
	n = n > 0 ? n : 0;
	p->comm[n > 0 && p->comm[n - 1] == '\n' ? n - 1 : n] = 0;
	__atomic_store_n(&p->magic, VMH_STATS_MAGIC, __ATOMIC_RELEASE);
}

/* Last resort without memory: a page with no slots, so that vmh_stats is never NULL. */
static struct vmh_stats_page bare_page;

void vmh_stats_init(void)
{
	void *page;

	if (vmh_stats)
		return;
	made_by = (pid_t)vmh_sys(SYS_getpid);
	page_size = sizeof(struct vmh_stats_page) + (size_t)vmh_params.stats_fd_num * sizeof(struct vmh_sock_stats) +
		    VMH_STATS_OPEN * sizeof(struct vmh_open_name);
	page = shared_page(true);
	if (page == MAP_FAILED)
		page = private_page();
	if (page == MAP_FAILED) {
		vmh_stats = &bare_page;
		page_size = 0;
		return;
	}
	vmh_stats = page;
	describe(vmh_stats);
	vmh_stats_file_init();
}

int vmh_stats_fd(void)
{
	return vmh_file_is_ours(&file) ? file.fd : -1;
}

/* Counters stand together in the structs; these name the first and the one behind the last. */
static void zero_range(void *start, void *end)
{
	unsigned long long *c;

	for (c = start; c < (unsigned long long *)end; c++)
		VMH_SET(*c, 0);
}

static void zero_iomux(struct vmh_iomux_stats *s)
{
	zero_range(&s->rx_ready, &s->polling_percent);
}

static void zero_sock(struct vmh_sock_stats *s)
{
	zero_range(&s->rx_packets, &s->rx_ready_packets);
	VMH_SET(s->rx_ready_packets_max, VMH_GET(s->rx_ready_packets));
	VMH_SET(s->rx_ready_bytes_max, VMH_GET(s->rx_ready_bytes));
}

static void zero_all(void)
{
	if (page_size)
		vmh_stats_each_sock(zero_sock);
	for (int i = -1; (i = next_claimed(ring_claims, VMH_STATS_RINGS, i)) >= 0;) {
		struct vmh_ring_stats *r = &vmh_stats->rings[i];

		zero_range(&r->rx_packets, &r->pool_rx_free);
		zero_range(&r->pool_rx_empty, &r->queue_len);
	}
	zero_iomux(&vmh_stats->select);
	zero_iomux(&vmh_stats->poll);
	for (int i = -1; (i = next_claimed(epoll_claims, VMH_STATS_EPOLLS, i)) >= 0;)
		zero_iomux(&vmh_stats->epoll[i]);
}

static void copy_page(struct vmh_stats_page *to, const struct vmh_stats_page *from)
{
	memcpy(to, from, offsetof(struct vmh_stats_page, epoll)); /* its connections are the parent's */
	for (int i = -1; (i = next_claimed(sock_claims, SOCKS_MAX, i)) >= 0;)
		to->socks[i] = from->socks[i];
}

/* In the child of a fork: a page of its own in the place of the parent's, with the same slots of sockets and counters at 0.
 * Its rings are closed (ring.c), its epoll sets take their slots anew (epoll_item.c). */
void vmh_stats_fork_child(void)
{
	struct vmh_stats_page *old = vmh_stats;
	void *fresh;

	if (!old)
		return;
	vmh_lock_reset(&spare_lock);
	made_by = (pid_t)vmh_sys(SYS_getpid);
	vmh_file_close(&file);
	path[0] = 0;
	nameless = false;
	if (!page_size)
		return;
	vmh_stats_file_fork_child();
	vmh_params_expand_again(VMH_PARAM_STATS_SHMEM_DIR);
	fresh = private_page();
	if (fresh == MAP_FAILED)
		return;
	copy_page(fresh, old);
	if (!put_page(fresh))
		return;
	memset(ring_claims, 0, sizeof(ring_claims));
	memset(epoll_claims, 0, sizeof(epoll_claims));
	memset(open_claims, 0, sizeof(open_claims));
	in_memory = true;
	old->magic = 0;
	old->state = 0;
	old->session = old->socks_over = old->calls_home = 0;
	old->listens = old->dump_wanted = 0;
	old->taken = old->asked; /* orders to the parent are not ours */
	zero_all();
	describe(old);
}

void vmh_stats_fini(void)
{
	struct stat st;

	if (!path[0] || made_by != (pid_t)vmh_sys(SYS_getpid))
		return;
	/* only our own file, not one that somebody put in its place */
	if (!vmh_sys(SYS_newfstatat, AT_FDCWD, path, &st, AT_SYMLINK_NOFOLLOW) && st.st_dev == file.dev &&
	    st.st_ino == file.ino)
		vmh_sys(SYS_unlinkat, AT_FDCWD, path, 0);
	path[0] = 0;
}

/* Zeroes a slot behind `used`, which readers look at first and which the caller sets last. */
#define CLEAR_SLOT(s) memset((char *)(s) + sizeof((s)->used), 0, sizeof(*(s)) - sizeof((s)->used))
#define SHOW_SLOT(s) __atomic_store_n(&(s)->used, 1, __ATOMIC_RELEASE)
#define HIDE_SLOT(s) __atomic_store_n(&(s)->used, 0, __ATOMIC_RELEASE)

static struct vmh_sock_stats *spare_new(int fd)
{
	struct spare *x;

	vmh_lock(&spare_lock);
	x = free_spares;
	if (x) {
		free_spares = x->next_free;
		CLEAR_SLOT(&x->s);
	} else if ((x = vmh_heap_zero(1, sizeof(*x)))) {
		x->next = spares;
		__atomic_store_n(&spares, x, __ATOMIC_RELEASE);
	}
	vmh_unlock(&spare_lock);
	if (!x)
		return &dummy_sock;
	x->s.fd = fd;
	SHOW_SLOT(&x->s);
	return &x->s;
}

static void spare_free(struct vmh_sock_stats *s)
{
	struct spare *x = (struct spare *)s;

	HIDE_SLOT(s);
	vmh_lock(&spare_lock);
	x->next_free = free_spares;
	free_spares = x;
	vmh_unlock(&spare_lock);
}

static bool in_page(const struct vmh_sock_stats *s)
{
	return s >= vmh_stats->socks && s < vmh_stats->socks + vmh_stats->nsocks;
}

void vmh_stats_each_sock(void (*f)(struct vmh_sock_stats *s))
{
	for (int i = -1; (i = next_claimed(sock_claims, SOCKS_MAX, i)) >= 0;)
		f(&vmh_stats->socks[i]);
	for (struct spare *x = __atomic_load_n(&spares, __ATOMIC_ACQUIRE); x; x = x->next)
		f(&x->s);
}

struct vmh_sock_stats *vmh_stats_sock_new(int fd)
{
	int slot = claim(sock_claims, vmh_stats->nsocks < SOCKS_MAX ? vmh_stats->nsocks : SOCKS_MAX);
	struct vmh_sock_stats *s;

	if (slot < 0 || !page_size) {
		if (!vmh_stats->socks_over++)
			vmh_info("VMA Statistics can monitor up to %lld sockets - increase VMA_STATS_FD_NUM",
				 (long long)vmh_params.stats_fd_num);
		return vmh_params.stats_file[0] ? spare_new(fd) : &dummy_sock;
	}
	s = &vmh_stats->socks[slot];
	CLEAR_SLOT(s);
	s->fd = fd;
	SHOW_SLOT(s);
	return s;
}

void vmh_stats_sock_name(struct vmh_sock_stats *s, uint64_t inode)
{
	if (s != &dummy_sock)
		VMH_SET(s->inode, inode);
}

void vmh_stats_sock_free(struct vmh_sock_stats *s)
{
	if (!s || s == &dummy_sock)
		return;
	if (!in_page(s)) {
		spare_free(s);
		return;
	}
	HIDE_SLOT(s);
	unclaim(sock_claims, (size_t)(s - vmh_stats->socks));
}

struct vmh_ring_stats *vmh_stats_ring_new(void)
{
	int slot = page_size ? claim(ring_claims, VMH_STATS_RINGS) : -1;
	struct vmh_ring_stats *s;

	if (slot < 0) {
		static _Atomic int said;

		if (!atomic_exchange(&said, 1))
			vmh_info("VMA Statistics can monitor up to %d ring elements", VMH_STATS_RINGS);
		return &dummy_ring;
	}
	s = &vmh_stats->rings[slot];
	CLEAR_SLOT(s);
	SHOW_SLOT(s);
	return s;
}

void vmh_stats_ring_free(struct vmh_ring_stats *s)
{
	if (!s || s == &dummy_ring)
		return;
	HIDE_SLOT(s);
	unclaim(ring_claims, (size_t)(s - vmh_stats->rings));
}

struct vmh_iomux_stats *vmh_stats_epoll_new(int epfd)
{
	int slot = page_size ? claim(epoll_claims, VMH_STATS_EPOLLS) : -1;
	static _Atomic bool told;
	struct vmh_iomux_stats *s;

	if (slot < 0) {
		if (!atomic_exchange(&told, true))
			vmh_info("VMA Statistics can monitor up to %d epoll fds", VMH_STATS_EPOLLS);
		return &dummy_epoll;
	}
	s = &vmh_stats->epoll[slot];
	CLEAR_SLOT(s);
	s->epfd = epfd;
	SHOW_SLOT(s);
	return s;
}

void vmh_stats_epoll_free(struct vmh_iomux_stats *s)
{
	if (!s || s == &dummy_epoll)
		return;
	HIDE_SLOT(s);
	unclaim(epoll_claims, (size_t)(s - vmh_stats->epoll));
}

static struct vmh_open_name *open_name(size_t slot)
{
	return (struct vmh_open_name *)(vmh_stats->socks + vmh_stats->nsocks) + slot;
}

unsigned vmh_stats_open_new(const unsigned char *laddr, unsigned short lport, const unsigned char *raddr,
			    unsigned short rport)
{
	int slot = page_size ? claim(open_claims, VMH_STATS_OPEN) : -1;
	struct vmh_open_name *o;

	if (slot < 0)
		return 0;
	o = open_name((size_t)slot);
	memcpy(o->local_addr, laddr, sizeof(o->local_addr));
	memcpy(o->remote_addr, raddr, sizeof(o->remote_addr));
	VMH_SET(o->local_port, lport);
	VMH_SET(o->remote_port, rport);
	SHOW_SLOT(o);
	return (unsigned)slot + 1;
}

void vmh_stats_open_free(unsigned place)
{
	HIDE_SLOT(open_name(place - 1));
	unclaim(open_claims, place - 1);
}
