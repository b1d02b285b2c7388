/* Calls that end in the kernel by a way that we don't see: between descriptors, or inside libc, whose stdio and aio
 * use system calls that no preload can stand before. The socket goes home first. And what changes a descriptor's flags. */
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_interpose.h"
#include "vmh_main.h"
#include "vmh_real.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_param.h"
#include "vmh_trace.h"
#include <aio.h>
#include <fcntl.h>
#include <linux/sockios.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/ioctl.h>

/* A socket that is at home already is not asked about. */
static int go_home(struct vmh_sock *s, int fd, unsigned reason, uint32_t detail)
{
	int r = s->home ? 0 : vmh_exception(fd, reason);

	if (!r)
		vmh_sock_home(s, reason, detail);
	return r;
}

int vmh_kernel_takes(int fd, unsigned reason)
{
	int saved = errno, r;
	SOCK_HELD s = sock_get(fd);

	r = s ? go_home(s, fd, reason, 0) : vmh_tcps_kernel_takes_fd(fd, reason);
	errno = r ? -r : saved;
	return r ? -1 : 0;
}

/* libc's function of the same name */
#define REAL(ret, name, params) \
	static ret(*real) params; \
	if (vmh_unlikely(!real)) \
	vmh_real_find(&real, #name)

/* --- between descriptors --- */

static ssize_t file_sent(int out, ssize_t r)
{
	vmh_kernel_called(out, 0, true, r);
	return r;
}

VMH_TRACED_AS(VMH_LOG_FINE, ssize_t, sendfile, (int out, int in, off_t *off, size_t n), (out, in, off, n),
	      vmh_trace_known(out), "%d, %d", out, in)
{
	if (vmh_kernel_takes(out, VMH_R_SENDFILE) || vmh_kernel_takes(in, VMH_R_SENDFILE)) /* to a pipe it is splice() */
		return file_sent(out, -1);
	return file_sent(out, vmh_real()->sendfile(out, in, off, n));
}

VMH_TRACED_AS(VMH_LOG_FINE, ssize_t, sendfile64, (int out, int in, off64_t *off, size_t n), (out, in, off, n),
	      vmh_trace_known(out), "%d, %d", out, in)
{
	if (vmh_kernel_takes(out, VMH_R_SENDFILE) || vmh_kernel_takes(in, VMH_R_SENDFILE)) /* to a pipe it is splice() */
		return file_sent(out, -1);
	return file_sent(out, vmh_real()->sendfile64(out, in, off, n));
}

VMH_TRACED_AS(VMH_LOG_FINE, ssize_t, splice,
	      (int in, off64_t *inoff, int out, off64_t *outoff, size_t n, unsigned int flags),
	      (in, inoff, out, outoff, n, flags), vmh_trace_known(in) || vmh_trace_known(out), "%d, %d", in, out)
{
	bool refused = vmh_kernel_takes(in, VMH_R_SENDFILE) || vmh_kernel_takes(out, VMH_R_SENDFILE);
	ssize_t r = refused ? -1 : vmh_real()->splice(in, inoff, out, outoff, n, flags);

	vmh_kernel_called(in, 0, false, r);
	return file_sent(out, r);
}

/* --- positions: a socket has none, and is read and written where it stands (-1) --- */

#define VECTOR_AT(name, plain, send) \
	VMH_TRACED_DATA(ssize_t, name, (int fd, const struct iovec *iov, int n, off_t at, int flags), \
			(fd, iov, n, at, flags)) \
	{ \
		REAL(ssize_t, name, (int, const struct iovec *, int, off_t, int)); \
		struct vmh_sock *s = sock_get(fd); \
		if (vmh_unlikely(s)) \
			sock_put(s); \
		if (vmh_unlikely(s) && at == -1 && !flags) \
			return plain(fd, iov, n); \
		bool refused = (vmh_likely(!s) || at == -1) && !vmh_bad_ptr(iov) && \
			       vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL); \
		ssize_t r = refused ? -1 : real(fd, iov, n, at, flags); \
		vmh_kernel_called(fd, 0, send, r); \
		return r; \
	}

VECTOR_AT(preadv2, vmh_readv, false)
VECTOR_AT(pwritev2, vmh_writev, true)
VECTOR_AT(preadv64v2, vmh_readv, false)
VECTOR_AT(pwritev64v2, vmh_writev, true)

/* --- stdio --- */

#define STREAM_OF(name) \
	VMH_EXPORT FILE *name(int fd, const char *mode) \
	{ \
		REAL(FILE *, name, (int, const char *)); \
		if (vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL)) \
			return NULL; \
		return real(fd, mode); \
	}

STREAM_OF(fdopen)
FILE *_IO_fdopen(int fd, const char *mode);
STREAM_OF(_IO_fdopen)

/* libc puts another file under the number, without passing by dup2() */
#define REOPEN(name) \
	VMH_EXPORT FILE *name(const char *restrict path, const char *restrict mode, FILE *restrict f) \
	{ \
		REAL(FILE *, name, (const char *, const char *, FILE *)); \
		int saved = errno; \
		if (f) \
			vmh_fd_close(fileno(f)); \
		errno = saved; \
		f = real(path, mode, f); \
		if (f && f == stderr && fileno(f) == STDERR_FILENO && !vmh_filtered && !vmh_fdtab_borrowed()) \
			vmh_log_stderr_moved(); \
		return f; \
	}

REOPEN(freopen)
REOPEN(freopen64)

VMH_EXPORT int vdprintf(int fd, const char *restrict format, va_list ap)
{
	REAL(int, vdprintf, (int, const char *, va_list));
	if (vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL))
		return -1;
	return real(fd, format, ap);
}

VMH_EXPORT int dprintf(int fd, const char *restrict format, ...)
{
	va_list ap;

	va_start(ap, format);
	int r = vdprintf(fd, format, ap);
	va_end(ap);
	return r;
}

int __vdprintf_chk(int fd, int flag, const char *format, va_list ap);
VMH_EXPORT int __vdprintf_chk(int fd, int flag, const char *format, va_list ap)
{
	REAL(int, __vdprintf_chk, (int, int, const char *, va_list));
	if (vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL))
		return -1;
	return real(fd, flag, format, ap);
}

int __dprintf_chk(int fd, int flag, const char *format, ...);
VMH_EXPORT int __dprintf_chk(int fd, int flag, const char *format, ...)
{
	va_list ap;

	va_start(ap, format);
	int r = __vdprintf_chk(fd, flag, format, ap);
	va_end(ap);
	return r;
}

/* --- aio: threads of libc's own, that read() and write() --- */

#define AIO(name, block) \
	VMH_EXPORT int name(struct block *cb) \
	{ \
		REAL(int, name, (struct block *)); \
		if (vmh_kernel_takes(cb->aio_fildes, VMH_R_UNKNOWN_CALL)) \
			return -1; \
		return real(cb); \
	}

AIO(aio_read, aiocb)
AIO(aio_write, aiocb)
AIO(aio_read64, aiocb64)
AIO(aio_write64, aiocb64)

#define LISTIO(name, block) \
	VMH_EXPORT int name(int mode, struct block *const list[restrict], int n, struct sigevent *restrict ev) \
	{ \
		REAL(int, name, (int, struct block *const *, int, struct sigevent *)); \
		for (int i = 0; i < n; i++) \
			if (list[i] && vmh_kernel_takes(list[i]->aio_fildes, VMH_R_UNKNOWN_CALL)) \
				return -1; \
		return real(mode, list, n, ev); \
	}

LISTIO(lio_listio, aiocb)
LISTIO(lio_listio64, aiocb64)

/* --- descriptor flags --- */

/* F_SETFL failed. */
static void stayed(int fd)
{
	TCPS_HELD t = vmh_tcps_get(fd);

	if (t)
		vmh_tcps_ask_nonblock(t, fd);
}

static void nonblock_changed(struct vmh_sock *s, bool on)
{
	atomic_store(&s->nonblock, on);
	VMH_SET(s->stats->blocking, !on);
}

/* Has the kernel socket more by it than O_NONBLOCK? */
static bool lasts(int cmd, long arg)
{
	if (cmd == F_SETFL)
		return arg & ~(long)(O_ACCMODE | O_NONBLOCK);
	return cmd != F_GETFL && cmd != F_GETFD && cmd != F_SETFD;
}

static int do_fcntl(int (*real)(int, int, ...), int fd, int cmd, void *arg)
{
	/* before: what the ring had delivered raises a signal, too, rather than nothing */
	if (cmd == F_SETFL && vmh_unlikely((long)arg & O_ASYNC) && vmh_kernel_takes(fd, VMH_R_UNKNOWN_CALL))
		return -1;
	if (vmh_unlikely(cmd == F_DUPFD || cmd == F_DUPFD_CLOEXEC)) {
		int refused = vmh_tcps_kernel_takes_fd(fd, VMH_R_DUP);

		if (refused)
			RETURN(refused);
	}
	if (vmh_unlikely(cmd == F_GETFL && vmh_params.avoid_sys_calls_on_tcp_fd)) {
		TCPS_HELD t = vmh_tcps_get(fd);
		int flags = t ? vmh_tcps_fcntl(t, cmd) : VMH_TCPS_KERNELS;

		if (flags != VMH_TCPS_KERNELS)
			return flags;
	}
	if (cmd == F_SETFL && !((long)arg & O_NONBLOCK)) {
		TCPS_HELD t = vmh_tcps_get(fd);

		if (t)
			vmh_tcps_will_wait(t);
	}
	int r = real(fd, cmd, arg);

	if (r < 0) {
		if (vmh_unlikely(cmd == F_SETFL))
			stayed(fd);
		return r;
	}
	if (cmd == F_DUPFD || cmd == F_DUPFD_CLOEXEC) {
		vmh_duplicated(fd, r);
		return r;
	}
	if (vmh_unlikely(lasts(cmd, (long)arg)))
		vmh_tcps_touch(fd);
	if (cmd == F_SETFL) {
		struct vmh_sock *s = sock_get(fd);

		if (s) {
			nonblock_changed(s, ((long)arg & O_NONBLOCK) != 0);
			sock_put(s);
		} else {
			TCPS_HELD t = vmh_tcps_get(fd);

			if (t)
				vmh_tcps_set_nonblock(t, ((long)arg & O_NONBLOCK) != 0);
		}
	}
	return r;
}

/* Not VMH_TRACED, which passes no arguments on that vary. What may be a file, too, is logged where it is none. */
static int traced(const char *name, int fd, unsigned long what, int r)
{
	if (vmh_traces(VMH_LOG_DEBUG) && vmh_trace_known(fd))
		vmh_trace_said(VMH_LOG_DEBUG, name, r, "%d, %#lx", fd, what);
	return r;
}

VMH_EXPORT int fcntl(int fd, int cmd, ...)
{
	va_list ap;

	va_start(ap, cmd);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	return traced("fcntl", fd, (unsigned int)cmd, do_fcntl(vmh_real()->fcntl, fd, cmd, arg));
}

VMH_EXPORT int fcntl64(int fd, int cmd, ...)
{
	va_list ap;

	va_start(ap, cmd);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	return traced("fcntl64", fd, (unsigned int)cmd, do_fcntl(vmh_real()->fcntl64, fd, cmd, arg));
}

/* The kernel knows no datagram that a ring delivered. For the last one before the homecoming we say what it says of a
 * datagram that it took no time of: now. */
static int stamp_of_last(struct vmh_sock *s, int fd, unsigned long request, void *arg)
{
	struct timespec now;
	int saved = errno, r;

	r = go_home(s, fd, VMH_R_UNKNOWN_CALL, (uint32_t)request);
	if (r)
		RETURN(r);
	r = vmh_real()->ioctl(fd, request, arg);
	if (r >= 0 || errno != ENOENT || !VMH_GET(s->stats->rx_packets) || vmh_bad_ptr(arg))
		return r;
	errno = saved;
	clock_gettime(CLOCK_REALTIME, &now);
	if (request == SIOCGSTAMP_OLD || request == SIOCGSTAMP_NEW)
		now.tv_nsec /= 1000; /* a timeval, which is laid out alike */
	memcpy(arg, &now, sizeof(now));
	return 0;
}

static int tcp_ioctl(struct vmh_tcps *t, int fd, unsigned long request, void *arg)
{
	int done = vmh_bad_ptr(arg) ? VMH_TCPS_KERNELS : vmh_tcps_queue(t, fd, request, arg);

	if (done != VMH_TCPS_KERNELS)
		RETURN(done);
	if (request == FIONCLEX && vmh_tcps_parked(t)) { /* posix_spawn() and others execute inside libc */
		vmh_tcps_home(t, VMH_R_EXEC, false);
	} else if (request != FIONBIO && request != FIOCLEX && vmh_tcps_parked(t)) {
		int refused = vmh_tcps_kernel_takes(t, VMH_R_IOCTL);

		if (refused)
			RETURN(refused);
	}
	if (request == FIONBIO && !vmh_bad_ptr(arg) && !*(int *)arg)
		vmh_tcps_will_wait(t);
	int r = vmh_real()->ioctl(fd, request, arg);
	if (request != FIONBIO && request != FIOCLEX)
		t->touched |= VMH_TCPS_TOUCHED;
	if (!r && request == FIONBIO && arg)
		vmh_tcps_set_nonblock(t, *(int *)arg != 0);
	return r;
}

static int do_ioctl(int fd, unsigned long request, void *arg)
{
	SOCK_HELD s = sock_get(fd);
	if (vmh_likely(!s)) {
		TCPS_HELD t = vmh_tcps_get(fd);

		return vmh_likely(!t) ? vmh_real()->ioctl(fd, request, arg) : tcp_ioctl(t, fd, request, arg);
	}
	switch (request) {
	case FIONREAD:
		if (vmh_bad_ptr(arg))
			break;
		RETURN(vmh_sock_fionread(s, fd, arg));
	case FIOASYNC:
		if (!vmh_bad_ptr(arg) && *(int *)arg) {
			int refused = go_home(s, fd, VMH_R_UNKNOWN_CALL, (uint32_t)request);

			if (refused)
				RETURN(refused);
		}
		break;
	case SIOCGSTAMP_OLD:
	case SIOCGSTAMPNS_OLD:
	case SIOCGSTAMP_NEW:
	case SIOCGSTAMPNS_NEW:
		return stamp_of_last(s, fd, request, arg);
	}
	int r = vmh_real()->ioctl(fd, request, arg);
	if (!r && request == FIONBIO && arg)
		nonblock_changed(s, *(int *)arg != 0);
	return r;
}

VMH_EXPORT int ioctl(int fd, unsigned long request, ...)
{
	va_list ap;

	va_start(ap, request);
	void *arg = va_arg(ap, void *);
	va_end(ap);
	return traced("ioctl", fd, request, do_ioctl(fd, request, arg));
}
