/* See vmh_fd.h. */
#include "vmh_fd.h"
#include <fcntl.h>
#include <sys/stat.h>

#define HIGH_FD 512 /* below the usual soft limit of 1024, above what a small server opens */

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

int vmh_file_truncate(struct vmh_file *f)
{
	return (int)vmh_sys(SYS_ftruncate, f->fd, 0L);
}

bool vmh_file_is_ours(const struct vmh_file *f)
{
	struct stat st;

	return f->fd >= 0 && identify(f->fd, &st) && st.st_dev == f->dev && st.st_ino == f->ino;
}

int vmh_file_write(struct vmh_file *f, const char *buf, size_t len)
{
	if (!vmh_file_is_ours(f)) {
		f->fd = -1;
		return -EBADF;
	}
	while (len) {
		long n = vmh_sys(SYS_write, f->fd, buf, len);

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
		vmh_sys(SYS_close, f->fd);
	f->fd = -1;
}
