/* Does with a TCP connection, or a UDP socket, what its first argument says, by libc's syscall() alone; the connection
 * is made by libc's own functions. Prints "done", or what went wrong, and waits to be killed.
 *
 * raw_calls CASE ADDRESS PORT */
#define _GNU_SOURCE
#include "calls.h"
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/aio_abi.h>
#include <linux/futex.h>
#include <linux/io_uring.h>
#include <linux/sched.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <threads.h>
#include <unistd.h>

static int c = -1;
static unsigned char out[1 << 20], in[1 << 20];

static int open_one(int type)
{
	int fd = socket(AF_INET, type, 0);

	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&server, sizeof(server)));
	return fd;
}

/* ---- sending and receiving: each number, with `n` bytes from or to `p` ---- */

static long send_by(int way, int fd, void *p, size_t n)
{
	struct iovec iov = { p, n };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	struct mmsghdr v = { .msg_hdr = m };

	switch (way) {
	case 0:
		return syscall(SYS_write, fd, p, n);
	case 1:
		return syscall(SYS_sendto, fd, p, n, 0, NULL, 0);
	case 2:
		return syscall(SYS_sendmsg, fd, &m, 0);
	case 3:
		return syscall(SYS_writev, fd, &iov, 1);
	case 4:
		return syscall(SYS_pwritev2, fd, &iov, 1, -1L, -1L, 0);
	}
	return syscall(SYS_sendmmsg, fd, &v, 1, 0) == 1 ? (long)v.msg_len : -1;
}

static long recv_by(int way, int fd, void *p, size_t n)
{
	struct iovec iov = { p, n };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1 };
	struct mmsghdr v = { .msg_hdr = m };

	switch (way) {
	case 0:
		return syscall(SYS_read, fd, p, n);
	case 1:
		return syscall(SYS_recvfrom, fd, p, n, 0, NULL, NULL);
	case 2:
		return syscall(SYS_recvmsg, fd, &m, 0);
	case 3:
		return syscall(SYS_readv, fd, &iov, 1);
	case 4:
		return syscall(SYS_preadv2, fd, &iov, 1, -1L, -1L, 0);
	}
	return syscall(SYS_recvmmsg, fd, &v, 1, 0, NULL) == 1 ? (long)v.msg_len : -1;
}

#define WAYS 6
#define STAY 4 /* of them; the others send a TCP connection home */

static void echo(int fd, const char *text)
{
	char got[64] = "";
	size_t len = strlen(text), have = 0;

	CHECK(send_by(0, fd, (void *)text, len) == (long)len);
	while (have < len) {
		long r = recv_by(1, fd, got + have, len - have);

		CHECK(r > 0);
		have += (size_t)r;
	}
	CHECK(!memcmp(got, text, len));
}

static void receive_all(int way, size_t n)
{
	size_t have = 0;

	while (have < n) {
		long r = recv_by(way, c, in + have, n - have);

		CHECK(r > 0);
		have += (size_t)r;
	}
	CHECK(!memcmp(in, out, n));
	memset(in, 0, n);
}

static void *sends(void *arg)
{
	for (size_t at = 0; at < sizeof(out);) {
		long r = send_by(*(int *)arg, c, out + at, sizeof(out) - at);

		CHECK(r > 0);
		at += (size_t)r;
	}
	return NULL;
}

static void stream(void)
{
	for (int i = 0; i < STAY; i++) {
		pthread_t thread;

		for (int j = 0; j < STAY; j++) {
			CHECK(send_by(i, c, out, 5000) == 5000);
			receive_all(j, 5000);
		}
		CHECK(!pthread_create(&thread, NULL, sends, &i));
		receive_all(i, sizeof(out));
		CHECK(!pthread_join(thread, NULL));
	}
	errno = 0;
	CHECK(syscall(SYS_recvfrom, c, in, 1, MSG_DONTWAIT, NULL, NULL) == -1 && errno == EAGAIN);
}

static void mmsg(void)
{
	for (int i = STAY; i < WAYS; i++) {
		CHECK(send_by(i, c, out, 5000) == 5000);
		receive_all(i, 5000);
	}
	echo(c, "after");
}

static void names(void)
{
	struct sockaddr_in mine = { 0 }, theirs = { 0 };
	socklen_t len = sizeof(mine);
	int value = 0;

	CHECK(!syscall(SYS_getsockname, c, &mine, &len) && mine.sin_port);
	len = sizeof(theirs);
	CHECK(!syscall(SYS_getpeername, c, &theirs, &len) && theirs.sin_port == server.sin_port);
	len = sizeof(value);
	CHECK(!syscall(SYS_setsockopt, c, IPPROTO_TCP, TCP_NODELAY, &(int){ 1 }, sizeof(int)));
	CHECK(!syscall(SYS_getsockopt, c, IPPROTO_TCP, TCP_NODELAY, &value, &len) && value);
	CHECK(syscall(SYS_fcntl, c, F_GETFL) == (O_RDWR | 0));
	CHECK(!syscall(SYS_fcntl, c, F_SETFL, O_NONBLOCK));
	errno = 0;
	CHECK(recv(c, in, 1, 0) == -1 && errno == EAGAIN);
	CHECK(!syscall(SYS_fcntl, c, F_SETFL, 0));
	echo(c, "named");
}

/* ---- waiting ---- */

static const struct timespec for_ever = { 20, 0 }; /* read only: the kernel tells nobody then what is left */

static void waits(void)
{
	struct { const void *mask; size_t size; } arg = { NULL, 8 };
	struct timespec left = { 20, 0 };
	struct timeval left_v = { 20, 0 };
	struct epoll_event ev = { .events = EPOLLIN, .data.fd = c };
	struct pollfd p = { c, POLLIN, 0 };
	unsigned long mask = 0;
	long ep = syscall(SYS_epoll_create1, 0);
	fd_set set;

	CHECK(ep >= 0 && !syscall(SYS_epoll_ctl, ep, EPOLL_CTL_ADD, c, &ev));
	for (int way = 0; way < 8; way++) {
		CHECK(send_by(0, c, "x", 1) == 1);
		memset(&ev, 0, sizeof(ev));
		p.revents = 0;
		FD_ZERO(&set);
		FD_SET(c, &set);
		switch (way) {
		case 0:
			CHECK(syscall(SYS_poll, &p, 1, 20000) == 1 && p.revents == POLLIN);
			break;
		case 1:
			CHECK(syscall(SYS_ppoll, &p, 1, &for_ever, &mask, 8) == 1 && p.revents == POLLIN);
			break;
		case 2:
			CHECK(syscall(SYS_ppoll, &p, 1, &left, NULL, 8) == 1 && p.revents == POLLIN);
			CHECK(left.tv_sec == 19);
			break;
		case 3:
			CHECK(syscall(SYS_select, c + 1, &set, NULL, NULL, &left_v) == 1 && FD_ISSET(c, &set));
			CHECK(left_v.tv_sec == 19);
			break;
		case 4:
			left.tv_sec = 20;
			CHECK(syscall(SYS_pselect6, c + 1, &set, NULL, NULL, &left, &arg) == 1 && FD_ISSET(c, &set));
			CHECK(left.tv_sec <= 20);
			break;
		case 5:
			CHECK(syscall(SYS_epoll_wait, ep, &ev, 1, 20000) == 1 && ev.data.fd == c);
			break;
		case 6:
			CHECK(syscall(SYS_epoll_pwait, ep, &ev, 1, 20000, &mask, 8) == 1 && ev.data.fd == c);
			break;
		case 7:
			CHECK(syscall(SYS_epoll_pwait2, ep, &ev, 1, &for_ever, NULL, 8) == 1 && ev.data.fd == c);
			break;
		}
		CHECK(recv_by(0, c, in, 10) == 1);
	}
	errno = 0;
	CHECK(syscall(SYS_ppoll, &p, 1, &for_ever, &mask, 3) == -1 && errno == EINVAL);
	CHECK(!syscall(SYS_poll, &p, 1, 1));
	CHECK(!syscall(SYS_close, ep));
}

/* ---- descriptors ---- */

static void gives_to_itself(void)
{
	long me = syscall(SYS_pidfd_open, getpid(), 0), copy = syscall(SYS_pidfd_getfd, me, c, 0);

	CHECK(me >= 0 && copy >= 0 && !close((int)me));
	echo((int)copy, "copy");
	echo(c, "and the first");
	CHECK(!close((int)copy));
}

static void dups(void)
{
	long two = syscall(SYS_dup, c), three, four = syscall(SYS_fcntl, c, F_DUPFD_CLOEXEC, 100L);

	CHECK(two >= 0 && four >= 100);
	three = syscall(SYS_dup2, c, 77L);
	CHECK(three == 77 && syscall(SYS_dup3, c, 78L, O_CLOEXEC) == 78);
	CHECK(!syscall(SYS_close, c));
	echo((int)two, "two");
	echo(77, "three");
	CHECK(!syscall(SYS_close_range, 77, 78, 0));
	echo((int)four, "four");
	c = (int)two;
}

/* The number is used again at once, for a connection that must not be taken for the old one. */
static void closes(void)
{
	int old = c;

	CHECK(send_by(0, c, "last", 4) == 4);
	CHECK(!syscall(SYS_close, c));
	errno = 0;
	CHECK(recv(old, in, 1, 0) == -1 && errno == EBADF);
	c = open_one(SOCK_STREAM);
	CHECK(c == old);
	echo(c, "again");
	CHECK(syscall(SYS_dup2, STDOUT_FILENO, c) == c && !syscall(SYS_close, c));
	c = open_one(SOCK_STREAM);
	CHECK(c == old);
	echo(c, "once more");
	CHECK(!syscall(SYS_shutdown, c, SHUT_WR));
	CHECK(!recv_by(0, c, in, 10));
}

/* Numbers that belong to nobody we know: closing them all must not end the process. */
static void closes_all(void)
{
	for (long fd = 3; fd < 1024; fd++)
		syscall(SYS_close, fd);
	c = open_one(SOCK_STREAM);
	echo(c, "after all");
}

static void *connects(void *arg)
{
	struct sockaddr_in to = *(struct sockaddr_in *)arg;
	int fd = socket(AF_INET, SOCK_STREAM, 0);

	CHECK(!connect(fd, (struct sockaddr *)&to, sizeof(to)));
	CHECK(send(fd, "hello", 5, 0) == 5 && recv(fd, in, 5, MSG_WAITALL) == 5 && !memcmp(in, "hello", 5));
	close(fd);
	return NULL;
}

/* Prints its port, and serves one connection from elsewhere after one from here. */
/* No function of libc at all: nobody sees it. */
static void close_unseen(int fd)
{
#ifdef __x86_64__
	long r;

	__asm__ volatile("syscall" : "=a"(r) : "a"((long)SYS_close), "D"((long)fd) : "rcx", "r11", "memory");
	CHECK(!r);
#else
	CHECK(!syscall(SYS_close, fd));
#endif
}

static void unseen(void)
{
	int others[] = { open_one(SOCK_STREAM), open_one(SOCK_STREAM), open_one(SOCK_STREAM), open_one(SOCK_STREAM) };
	int status;
	pid_t child;

	for (int i = 0; i < 4; i++)
		echo(others[i], "before");
	close_unseen(c); /* its number is that of the next file that the shim makes, which hides nothing */
	close_unseen(others[0]);
	close_unseen(others[2]);
	child = fork();
	if (!child)
		_exit(0);
	CHECK(child > 0 && waitpid(child, &status, 0) == child && !status);
	echo(others[1], "after");
	echo(others[3], "after");
	c = open_one(SOCK_STREAM);
	echo(c, "new");
}

static void accepts(void)
{
	struct sockaddr_in at = { .sin_family = AF_INET };
	socklen_t len = sizeof(at);
	int listener = socket(AF_INET, SOCK_STREAM, 0);
	pthread_t thread;
	char text[8];

	CHECK(!syscall(SYS_bind, listener, &at, sizeof(at)) && !syscall(SYS_listen, listener, 5));
	CHECK(!syscall(SYS_getsockname, listener, &at, &len));
	at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	CHECK(!pthread_create(&thread, NULL, connects, &at));
	for (int i = 0; i < 2; i++) {
		long fd = syscall(i ? SYS_accept4 : SYS_accept, listener, NULL, NULL, 0);

		CHECK(fd >= 0);
		CHECK(recv_by(i, (int)fd, text, 5) == 5 && send_by(i, (int)fd, text, 5) == 5);
		if (!i)
			printf("port %d\n", ntohs(at.sin_port)), fflush(stdout);
		else
			CHECK(!recv_by(i, (int)fd, text, 5)); /* the end */
		CHECK(!syscall(SYS_close, fd));
	}
	CHECK(!pthread_join(thread, NULL));
}

static void files(void)
{
	long fd = syscall(SYS_openat, AT_FDCWD, "/proc/self/exe", O_RDONLY);
	int p[2];
	char start[4];

	CHECK(fd >= 0 && syscall(SYS_pread64, fd, start, 4, 0) == 4);
	CHECK(syscall(SYS_sendfile, c, fd, NULL, 4) == 4);
	CHECK(recv_by(0, c, in, 4) == 4 && !memcmp(in, start, 4));
	CHECK(!syscall(SYS_pipe2, p, 0) && syscall(SYS_write, p[1], "pipe", 4) == 4);
	CHECK(syscall(SYS_splice, p[0], NULL, c, NULL, 4, 0) == 4);
	CHECK(recv_by(0, c, in, 4) == 4 && !memcmp(in, "pipe", 4));
}

/* ---- processes ---- */

static void child_speaks(long pid)
{
	int status;

	CHECK(pid >= 0);
	if (!pid) {
		echo(c, "child");
		syscall(SYS_exit_group, 7);
	}
	CHECK(syscall(SYS_wait4, pid, &status, 0, NULL) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 7);
	echo(c, "parent");
}

static void forks(void)
{
	struct clone_args args = { .exit_signal = SIGCHLD };

	echo(c, "before");
	child_speaks(syscall(SYS_fork));
	c = open_one(SOCK_STREAM);
	echo(c, "before");
	child_speaks(syscall(SYS_clone, SIGCHLD, 0, 0, 0, 0));
	c = open_one(SOCK_STREAM);
	echo(c, "before");
	child_speaks(syscall(SYS_clone3, &args, sizeof(args)));
}

static void ends(void)
{
	syscall(SYS_exit, 9);
}

/* The child begins by a return from syscall() on a stack of its own. */
static void clones(void)
{
	static uintptr_t stack[8192] __attribute__((aligned(16)));
	uintptr_t *top = stack + 8190;
	int status;
	long pid;

	*top = (uintptr_t)ends;
	top[1] = 0;
	pid = syscall(SYS_clone, CLONE_VM | CLONE_VFORK | SIGCHLD, top, 0, 0, 0);
	CHECK(pid > 0 && waitpid((pid_t)pid, &status, 0) == pid && WIFEXITED(status) && WEXITSTATUS(status) == 9);
	echo(c, "cloned");
}

static void executes(void)
{
	char command[64];
	char *argv[] = { "sh", "-c", command, NULL };
	static char *none[] = { NULL };

	snprintf(command, sizeof(command), "printf executed >&%d; echo done; exec sleep 60", c);
	echo(c, "before");
	syscall(SYS_execve, "/bin/sh", argv, none);
}

static void exits(void)
{
	CHECK(send_by(0, c, out, 1000) == 1000);
	puts("done");
	fflush(stdout);
	syscall(SYS_exit_group, 5);
}

/* A program of one thread that ends by exit(2), which is of threads. */
static void exits_thread(void)
{
	echo(c, "before");
	puts("done");
	fflush(stdout);
	syscall(SYS_exit, 6);
}

static void *goes_on(void *arg)
{
	(void)arg;
	usleep(300000);
	echo(c, "before");
	puts("done");
	fflush(stdout);
	return NULL;
}

/* By libc's own functions: the program ends with its last thread, which is not the first. */
static void leaves(void)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, goes_on, NULL));
	pthread_exit(NULL);
}

static void leaves_by_c11(void)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, goes_on, NULL));
	thrd_exit(0);
}

static void leaves_by_number(void)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, goes_on, NULL));
	syscall(SYS_exit, 6);
}

static void leaves_cancelled(void)
{
	pthread_t thread;

	CHECK(!pthread_create(&thread, NULL, goes_on, NULL));
	pthread_cancel(pthread_self());
	pause();
}

/* ---- what does not concern sockets ---- */

static void others(void)
{
	int word = 1;
	struct timespec at = { 0, 0 };
	char *page = (char *)syscall(SYS_mmap, NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	CHECK(page != MAP_FAILED);
	page[4095] = 1;
	CHECK(!syscall(SYS_munmap, page, 4096));
	CHECK(syscall(SYS_getpid) == getpid() && syscall(SYS_gettid) == gettid());
	CHECK(!syscall(SYS_futex, &word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0));
	errno = 0;
	CHECK(syscall(SYS_futex, &word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0) == -1 && errno == EAGAIN);
	errno = 0; /* the sixth argument: none of the bits, which the kernel refuses, and all */
	CHECK(syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 1, &at, NULL, 0) == -1 && errno == EINVAL);
	errno = 0;
	CHECK(syscall(SYS_futex, &word, FUTEX_WAIT_BITSET_PRIVATE, 1, &at, NULL, -1) == -1 && errno == ETIMEDOUT);
	errno = 0;
	CHECK(syscall(100000L) == -1 && errno == ENOSYS);
	errno = 0;
	CHECK(syscall(-1L) == -1 && errno == ENOSYS);
	errno = 0;
	CHECK(syscall(SYS_read, -1, in, 1) == -1 && errno == EBADF);
	errno = 0;
	CHECK(syscall(SYS_close, -1) == -1 && errno == EBADF);
	errno = 0;
	CHECK(syscall(SYS_sendmsg, c, NULL, 0) == -1 && errno == EFAULT);
	echo(c, "others");
}

static void *reads(void *arg)
{
	(void)arg;
	CHECK(recv_by(0, c, in, 1) == 1); /* no cancellation point */
	CHECK(send_by(0, c, "y", 1) == 1);
	for (;;)
		sleep(1);
	return NULL;
}

static void cancel(void)
{
	pthread_t thread;
	void *r;

	CHECK(!pthread_create(&thread, NULL, reads, NULL));
	usleep(100000);
	CHECK(!pthread_cancel(thread));
	usleep(100000);
	CHECK(send_by(0, c, "x", 1) == 1);
	CHECK(!pthread_join(thread, &r) && r == PTHREAD_CANCELED);
	CHECK(recv_by(0, c, in, 1) == 1 && in[0] == 'y');
}

/* ---- queues of the kernel ---- */

static void uring(void)
{
	struct io_uring_params params = { 0 };
	struct io_uring_files_update update = { .fds = (uintptr_t)&c };
	long ring = syscall(SYS_io_uring_setup, 4, &params);
	int none = -1;

	CHECK(ring >= 0 || errno == ENOSYS || errno == EPERM);
	echo(c, "before");
	if (ring < 0) { /* the kernel has none: it is asked for all the same */
		CHECK(syscall(SYS_io_uring_register, -1, IORING_REGISTER_FILES, &c, 1) == -1);
	} else {
		CHECK(!syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES, &none, 1));
		CHECK(syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES_UPDATE, &update, 1) == 1);
	}
	echo(c, "after");
}

static void aio(void)
{
	aio_context_t ctx = 0;
	struct iocb cb = { .aio_lio_opcode = IOCB_CMD_PWRITE, .aio_buf = (uintptr_t) "aio", .aio_nbytes = 3 };
	struct iocb *list[] = { &cb };
	struct io_event event;

	cb.aio_fildes = (unsigned)c;
	CHECK(!syscall(SYS_io_setup, 1, &ctx) && syscall(SYS_io_submit, ctx, 1, list) == 1);
	CHECK(syscall(SYS_io_getevents, ctx, 1, 1, &event, NULL) == 1 && event.res == 3);
	CHECK(recv_by(0, c, in, 3) == 3 && !memcmp(in, "aio", 3));
}

/* ---- UDP ---- */

static void udp(void)
{
	struct pollfd p;
	struct sockaddr_in from;
	socklen_t len = sizeof(from);

	close(c);
	c = open_one(SOCK_DGRAM);
	p = (struct pollfd){ c, POLLIN, 0 };
	for (int turn = 0; turn < 20; turn++) {
		for (int i = 0; i < WAYS; i++) {
			CHECK(send_by(i, c, out, 100) == 100);
			CHECK(syscall(SYS_poll, &p, 1, 5000) == 1);
			CHECK(recv_by((i + turn) % WAYS, c, in, 200) == 100 && !memcmp(in, out, 100));
		}
	}
	CHECK(syscall(SYS_sendto, c, out, 10, 0, &server, sizeof(server)) == 10);
	CHECK(syscall(SYS_recvfrom, c, in, 20, 0, &from, &len) == 10 && from.sin_port == server.sin_port);
}

static const struct call_case cases[] = {
	{ "stream", stream }, { "mmsg", mmsg }, { "names", names }, { "waits", waits }, { "dups", dups },
	{ "gives_to_itself", gives_to_itself },
	{ "closes", closes }, { "unseen", unseen }, { "closes_all", closes_all }, { "accepts", accepts },
	{ "files", files },
	{ "forks", forks }, { "clones", clones }, { "executes", executes }, { "exits", exits },
	{ "exits_thread", exits_thread }, { "others", others }, { "cancel", cancel }, { "uring", uring },
	{ "aio", aio }, { "udp", udp }, { "leaves", leaves },
	{ "leaves_by_c11", leaves_by_c11 }, { "leaves_cancelled", leaves_cancelled },
	{ "leaves_by_number", leaves_by_number }, { 0 },
};

int main(int argc, char **argv)
{
	uint32_t x = 1;

	CHECK(argc == 4 && inet_pton(AF_INET, argv[2], &server.sin_addr) == 1);
	server.sin_port = htons((uint16_t)atoi(argv[3]));
	for (size_t i = 0; i < sizeof(out); i++)
		out[i] = (unsigned char)((x = x * 1664525 + 1013904223) >> 24);
	alarm(60);
	c = open_one(SOCK_STREAM);
	run_case(cases, argv[1]);
	return done();
}
