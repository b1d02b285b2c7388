/* See vmh_fd.h. */
#include "vmh_fd.h"
#include "vmh_obj.h"
#include "control.h"
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <time.h>

#define HIDDEN_MAX 256
#define HIGH_FD 512 /* below the usual soft limit of 1024, above what a small server opens */

static _Atomic int hidden[HIDDEN_MAX]; /* fd + 1; 0 = free slot */
static _Atomic int hidden_used;        /* highest slot in use + 1 */

static void unhide(int fd)
{
	for (int i = 0; i < atomic_load(&hidden_used); i++) {
		int it = fd + 1;

		if (atomic_compare_exchange_strong(&hidden[i], &it, 0))
			break;
	}
}

int vmh_fd_high(int fd)
{
	long high = vmh_sys(SYS_fcntl, fd, F_DUPFD_CLOEXEC, HIGH_FD);

	if (high < 0)
		return fd;
	vmh_sys(SYS_close, fd);
	return (int)high;
}

/* fstat(2) raw: struct stat is the kernel's own layout on 64-bit machines. */
static bool identify(int fd, struct stat *st)
{
	return vmh_sys(SYS_fstat, fd, st) == 0;
}

int vmh_file_of(struct vmh_file *f, int fd)
{
	struct stat st;

	if (!identify(fd, &st))
		return -EBADF;
	*f = (struct vmh_file){ .fd = fd, .dev = st.st_dev, .ino = st.st_ino };
	return 0;
}

int vmh_file_open(struct vmh_file *f, const char *path, int flags, unsigned mode, bool regular)
{
	/* O_NONBLOCK: a FIFO at that path must not hang the program */
	long fd = vmh_sys(SYS_openat, AT_FDCWD, path, flags | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, mode);
	struct stat st;

	if (fd < 0)
		return (int)fd;
	if (!identify((int)fd, &st) || (regular && !S_ISREG(st.st_mode))) {
		vmh_sys(SYS_close, (int)fd);
		return -EINVAL;
	}
	f->fd = vmh_fd_high((int)fd);
	f->dev = st.st_dev;
	f->ino = st.st_ino;
	return 0;
}

int vmh_file_load(const char *path, char *buf, size_t size, struct stat *st)
{
	struct stat own;
	long fd = vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0), n = 0;
	size_t have = 0;

	if (fd < 0)
		return (int)fd;
	if (!st)
		st = &own;
	if (!identify((int)fd, st))
		n = -EINVAL;
	else if (!S_ISREG(st->st_mode))
		n = S_ISDIR(st->st_mode) ? -EISDIR : -EINVAL;
	while (n >= 0 && have < size) {
		n = vmh_sys(SYS_read, (int)fd, buf + have, size - have);
		if (n == 0)
			break;
		if (n > 0)
			have += (size_t)n;
		else if (n == -EINTR)
			n = 0;
	}
	vmh_sys(SYS_close, (int)fd);
	if (n < 0)
		return (int)n;
	if (have == size)
		return -EFBIG;
	buf[have] = 0;
	return memchr(buf, 0, have) ? -EINVAL : 0;
}

int vmh_file_truncate(struct vmh_file *f)
{
	return (int)vmh_sys(SYS_ftruncate, f->fd, 0L);
}

bool vmh_file_is_ours(const struct vmh_file *f)
{
	struct stat st;

	return f->fd >= 0 && identify(f->fd, &st) && st.st_dev == f->dev && st.st_ino == f->ino;
}

#define SIGNAL_BIT(n) (1ull << ((n)-1))

struct vmh_quiet vmh_quiet_begin(void)
{
	uint64_t set = SIGNAL_BIT(SIGPIPE) | SIGNAL_BIT(SIGXFSZ);
	struct vmh_quiet q = { 0 };

	vmh_sys(SYS_rt_sigpending, &q.pending, sizeof(q.pending));
	vmh_sys(SYS_rt_sigprocmask, SIG_BLOCK, &set, &q.mask, sizeof(q.mask));
	return q;
}

void vmh_quiet_end(const struct vmh_quiet *q, long result)
{
	uint64_t raised = result == -EPIPE ? SIGNAL_BIT(SIGPIPE) : result == -EFBIG ? SIGNAL_BIT(SIGXFSZ) : 0;
	struct timespec now = { 0 };

	if (raised & ~q->pending)
		vmh_sys(SYS_rt_sigtimedwait, &raised, NULL, &now, sizeof(raised));
	vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &q->mask, NULL, sizeof(q->mask));
}

int vmh_file_write(struct vmh_file *f, const char *buf, size_t len)
{
	if (!vmh_file_is_ours(f)) {
		f->fd = -1;
		return -EBADF;
	}
	while (len) {
		struct vmh_quiet q = vmh_quiet_begin();
		long n = vmh_sys(SYS_write, f->fd, buf, len);

		vmh_quiet_end(&q, n);
		if (n == -EINTR)
			continue;
		if (n <= 0)
			return n ? (int)n : -EIO;
		buf += n;
		len -= (size_t)n;
	}
	return 0;
}

void vmh_file_close(struct vmh_file *f)
{
	if (vmh_file_is_ours(f))
		vmh_fd_hidden_close(f->fd);
	else
		unhide(f->fd);
	f->fd = -1;
}

static bool hide(int fd)
{
	for (int i = 0; i < HIDDEN_MAX; i++) {
		int none = 0;

		if (atomic_compare_exchange_strong(&hidden[i], &none, fd + 1)) {
			int used = atomic_load(&hidden_used);

			while (used < i + 1 && !atomic_compare_exchange_weak(&hidden_used, &used, i + 1))
				;
			return true;
		}
	}
	return false;
}

void vmh_fd_guard(int fd)
{
	if (fd >= 0 && !vmh_fd_is_hidden(fd))
		hide(fd);
}

void vmh_fd_unguard(int fd)
{
	unhide(fd);
}

/* The least number of ours: see VMH_FDS_OWN. */
static long own_numbers(void)
{
	struct rlimit lim = { 1024, 1024 };

	vmh_sys(SYS_prlimit64, 0, RLIMIT_NOFILE, NULL, &lim);
	rlim_t top = lim.rlim_cur > VMH_FDS_TABLE ? VMH_FDS_TABLE : lim.rlim_cur;
	return (long)(top > 2 * VMH_FDS_OWN ? top - VMH_FDS_OWN : top / 2);
}

int vmh_fd_hide_another(int fd)
{
	long own = own_numbers(), high = -EMFILE;

	if (own > VMH_FDS_OWN && fd < own / 2)
		high = vmh_sys(SYS_fcntl, fd, F_DUPFD_CLOEXEC, own);
	if (high >= 0)
		vmh_fd_guard((int)high);
	return (int)high;
}

int vmh_fd_hide_instead(int fd)
{
	long other = vmh_sys(SYS_fcntl, fd, F_DUPFD_CLOEXEC, own_numbers());

	if (other == -EMFILE)
		other = vmh_sys(SYS_fcntl, fd, F_DUPFD_CLOEXEC, STDERR_FILENO + 1);
	if (other >= 0 && !hide((int)other)) {
		vmh_sys(SYS_close, other);
		other = -EMFILE;
	}
	return (int)other;
}

VMH_EXPORT int vmh_fd_hide(int fd)
{
	long high;

	if (fd < 0)
		return fd;
	high = vmh_sys(SYS_fcntl, fd, F_DUPFD_CLOEXEC, own_numbers());
	if (high >= 0) {
		vmh_sys(SYS_close, fd);
		fd = (int)high;
	}
	vmh_fd_guard(fd);
	return fd;
}

VMH_EXPORT void vmh_fd_hidden_close(int fd)
{
	if (fd < 0)
		return;
	unhide(fd);
	vmh_sys(SYS_close, fd);
}

long vmh_fd_next_hidden(unsigned first, unsigned last)
{
	long next = -1;

	for (int i = 0; i < atomic_load(&hidden_used); i++) {
		unsigned fd = (unsigned)atomic_load(&hidden[i]) - 1;

		if (fd >= first && fd <= last && fd <= INT_MAX && (next < 0 || fd < (unsigned)next))
			next = (long)fd;
	}
	return next;
}

bool vmh_fd_is_hidden(int fd)
{
	int used = atomic_load_explicit(&hidden_used, memory_order_relaxed);

	for (int i = 0; i < used; i++)
		if (atomic_load_explicit(&hidden[i], memory_order_relaxed) == fd + 1)
			return true;
	return false;
}
