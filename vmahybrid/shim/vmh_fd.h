/* Fds of our own that live in a process that does not know of them: kept above the numbers that
 * programs use, and recognised before each use, because a daemon may close every fd and reuse it. */
#ifndef VMH_FD_H
#define VMH_FD_H
#include "vmh_base.h"
#include <sys/stat.h>
#include <sys/types.h>

/* Around a write of ours: a reader that has gone, or the program's RLIMIT_FSIZE, is an error and no signal that ends a
 * program which writes nothing itself. result as of the system call. */
struct vmh_quiet {
	uint64_t mask, pending;
};
struct vmh_quiet vmh_quiet_begin(void);
void vmh_quiet_end(const struct vmh_quiet *q, long result);

struct vmh_file {
	int fd; /* -1: none */
	dev_t dev;
	ino_t ino;
};

/* O_CLOEXEC, O_NOCTTY and O_NONBLOCK are added; 0 or -errno. -EINVAL where regular is asked for and
 * it is something else (then nothing was truncated: the caller passes no O_TRUNC, see truncate). */
int vmh_file_open(struct vmh_file *f, const char *path, int flags, unsigned mode, bool regular);
int vmh_file_of(struct vmh_file *f, int fd); /* what fd is now; 0 or -EBADF, *f is as it was then */
int vmh_file_truncate(struct vmh_file *f);
bool vmh_file_is_ours(const struct vmh_file *f);
/* Writes all of it as far as possible; forgets f where the fd is no longer ours. 0 or -errno. */
int vmh_file_write(struct vmh_file *f, const char *buf, size_t len);
void vmh_file_close(struct vmh_file *f);
/* The text of a regular file, with a 0 behind it; *st (may be NULL) as of that moment. 0 or -errno: -EFBIG where it
 * does not fit, -EISDIR of a directory, -EINVAL where it is no regular file either or holds a 0. */
int vmh_file_load(const char *path, char *buf, size_t size, struct stat *st);
/* Moves an fd to a high number (close-on-exec), so that programs that count on low ones get them.
 * The fd itself where there is no room. */
int vmh_fd_high(int fd);
#endif
