/* System calls without libc: a preloaded library (vmahybrid's own, libvma) intercepts libc's socket and fd functions for
 * calls of libraries too, and would take this library's fds for the program's. All return -errno on failure. */
#ifndef SV_SYS_H
#define SV_SYS_H
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

/* Not libc's syscall() either, which vmahybrid intercepts as well. errno is the program's, or that of the call that we are
 * in. */
static inline long sv_call(long number, long a, long b, long c, long d, long e, long f)
{
#ifdef __x86_64__
	register long fourth __asm__("r10") = d;
	register long fifth __asm__("r8") = e;
	register long sixth __asm__("r9") = f;

	__asm__ volatile("syscall" : "+a"(number) : "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth), "r"(sixth)
			 : "rcx", "r11", "memory");
	return number;
#else
	int kept = errno;
	long r = syscall(number, a, b, c, d, e, f);

	if (r == -1) {
		r = -(long)errno;
		errno = kept;
	}
	return r;
#endif
}

#define SV_CALL(...) sv_filled(__VA_ARGS__, 0, 0, 0, 0, 0, 0)
#define sv_filled(number, a, b, c, d, e, f, ...) \
	sv_call((long)(number), (long)(a), (long)(b), (long)(c), (long)(d), (long)(e), (long)(f))

/* A preloaded vmahybrid keeps these descriptors from programs that close all they have. A NIC's library has no others
 * than the public ones, which vmahybrid knows. */
extern int vmh_fd_hide(int fd) __attribute__((weak));
extern void vmh_fd_hidden_close(int fd) __attribute__((weak));

static inline int sv_own(long fd)
{
	return fd >= 0 && vmh_fd_hide && vmh_fd_hidden_close ? vmh_fd_hide((int)fd) : (int)fd;
}

static inline int sv_socket(int domain, int type, int protocol)
{
	return sv_own(SV_CALL(SYS_socket, domain, type | SOCK_CLOEXEC, protocol));
}

static inline int sv_bind(int fd, const void *address, size_t size)
{
	return (int)SV_CALL(SYS_bind, fd, address, size);
}

static inline int sv_setsockopt(int fd, int level, int name, const void *value, size_t size)
{
	return (int)SV_CALL(SYS_setsockopt, fd, level, name, value, size);
}

static inline long sv_sendmsg(int fd, const struct msghdr *message, int flags)
{
	return SV_CALL(SYS_sendmsg, fd, message, flags);
}

static inline long sv_sendmmsg(int fd, struct mmsghdr *messages, unsigned int count, int flags)
{
	return SV_CALL(SYS_sendmmsg, fd, messages, count, flags);
}

static inline long sv_recv(int fd, void *buffer, size_t size, int flags)
{
	return SV_CALL(SYS_recvfrom, fd, buffer, size, flags, NULL, NULL);
}

static inline int sv_eventfd(void)
{
	return sv_own(SV_CALL(SYS_eventfd2, 0, 02000000 | 04000 | 1)); /* EFD_CLOEXEC, EFD_NONBLOCK, EFD_SEMAPHORE */
}

static inline void sv_eventfd_add(int fd, uint64_t value)
{
	(void)SV_CALL(SYS_write, fd, &value, sizeof(value));
}

static inline int sv_eventfd_take(int fd)
{
	uint64_t value;

	return (int)SV_CALL(SYS_read, fd, &value, sizeof(value));
}

static inline int sv_epoll_create(void)
{
	return sv_own(SV_CALL(SYS_epoll_create1, EPOLL_CLOEXEC));
}

static inline int sv_epoll_ctl(int epoll, int op, int fd, uint32_t events, uint64_t data)
{
	struct epoll_event event = { .events = events, .data.u64 = data };

	return (int)SV_CALL(SYS_epoll_ctl, epoll, op, fd, &event);
}

static inline int sv_epoll_wait(int epoll, struct epoll_event *events, int count, int timeout)
{
	return (int)SV_CALL(SYS_epoll_pwait, epoll, events, count, timeout, NULL, 8);
}

static inline int sv_fcntl(int fd, int command, long argument)
{
	return (int)SV_CALL(SYS_fcntl, fd, command, argument);
}

static inline void *sv_mmap(size_t size, int protection, int flags, int fd, long offset)
{
	long address = SV_CALL(SYS_mmap, NULL, size, protection, flags, fd, offset);

	return address < 0 ? NULL : (void *)address;
}

static inline void sv_munmap(void *address, size_t size)
{
	(void)SV_CALL(SYS_munmap, address, size);
}

/* Closes and forgets. */
static inline void sv_close(int *fd)
{
	if (*fd >= 0 && vmh_fd_hide && vmh_fd_hidden_close)
		vmh_fd_hidden_close(*fd);
	else if (*fd >= 0)
		(void)SV_CALL(SYS_close, *fd);
	*fd = -1;
}
#endif
