/* Opens short connections one after the other and looks at the kernel sockets below them: spare_calls CASE ADDRESS PORT.
 *
 * A connection that lived on a ring alone leaves its kernel socket to the next one; the program can tell by the inode and
 * SO_COOKIE alone. With `kernel` for a fourth argument there is no shim, and each has another. Says "done", or what is wrong. */
#define _GNU_SOURCE
#include "calls.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/close_range.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <semaphore.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

static bool shim;

/* By the instruction itself, which no shim sees. */
static long raw5(long nr, long a, long b, long c, long d, long e)
{
	register long fourth __asm__("r10") = d;
	register long fifth __asm__("r8") = e;
	long r;

	__asm__ volatile("syscall" : "=a"(r) : "a"(nr), "D"(a), "S"(b), "d"(c), "r"(fourth), "r"(fifth)
			 : "rcx", "r11", "memory");
	return r;
}

static long raw(long nr, long a, long b, long c)
{
	return raw5(nr, a, b, c, 0, 0);
}

static ino_t inode(int fd)
{
	struct stat st;

	CHECK(!fstat(fd, &st) && S_ISSOCK(st.st_mode));
	return st.st_ino;
}

static int made(int flags)
{
	int fd = socket(AF_INET, SOCK_STREAM | flags, 0);

	CHECK(fd >= 0);
	return fd;
}

/* Twice: what is in flight at its end is found by a program that looks. */
static void rounds(int fd)
{
	char c;

	for (int i = 0; i < 2; i++)
		CHECK(send(fd, "x", 1, 0) == 1 && recv(fd, &c, 1, MSG_WAITALL) == 1 && c == 'x');
}

static int opened(void)
{
	int fd = made(0);

	CHECK(!connect(fd, (struct sockaddr *)&server, sizeof(server)));
	rounds(fd);
	return fd;
}

static ino_t visit(void)
{
	int fd = opened();
	ino_t i = inode(fd);

	CHECK(!close(fd));
	return i;
}

/* The socket that comes after fd was closed is it again, or not. It is closed without having been used. */
static bool again(int fd)
{
	ino_t before = inode(fd);
	int next;
	bool is;

	CHECK(!close(fd));
	next = made(0);
	is = inode(next) == before;
	CHECK(!close(next));
	return is;
}

static int option(int fd, int level, int name)
{
	int v = -1;
	socklen_t len = sizeof(v);

	CHECK(!getsockopt(fd, level, name, &v, &len));
	return v;
}

static void set(int fd, int level, int name, int v)
{
	CHECK(!setsockopt(fd, level, name, &v, sizeof(v)));
}

static int sockets(void)
{
	DIR *d = opendir("/proc/self/fd");
	char target[64], path[300];
	struct dirent *e;
	int n = 0;

	CHECK(d);
	while ((e = readdir(d))) {
		ssize_t len;

		snprintf(path, sizeof(path), "/proc/self/fd/%s", e->d_name);
		len = readlink(path, target, sizeof(target) - 1);
		n += len > 7 && !memcmp(target, "socket:", 7);
	}
	closedir(d);
	return n;
}

/* ---- cases ---- */

static void reused(void)
{
	ino_t first = visit();

	for (int i = 0; i < 100; i++)
		CHECK((visit() == first) == shim);
}

static void several(void)
{
	int fd[4];
	ino_t were[4];

	for (int round = 0; round < 10; round++) {
		int known = 0;

		for (int i = 0; i < 4; i++) {
			fd[i] = opened();
			for (int k = 0; round && k < 4; k++)
				known += inode(fd[i]) == were[k];
			for (int k = 0; k < i; k++)
				CHECK(inode(fd[i]) != inode(fd[k]));
		}
		CHECK(!round || known == (shim ? 4 : 0));
		for (int i = 0; i < 4; i++) {
			rounds(fd[i]);
			were[i] = inode(fd[i]);
			CHECK(!close(fd[i]));
		}
	}
}

/* A new socket is one: flags, options, names, readiness. */
static void is_new(int fd, int flags)
{
	struct sockaddr_in a;
	socklen_t len = sizeof(a);
	struct pollfd p = { .fd = fd, .events = POLLIN };

	CHECK(fcntl(fd, F_GETFL) == (O_RDWR | (flags & SOCK_NONBLOCK ? O_NONBLOCK : 0)));
	CHECK(fcntl(fd, F_GETFD) == (flags & SOCK_CLOEXEC ? FD_CLOEXEC : 0));
	CHECK(!getsockname(fd, (struct sockaddr *)&a, &len) && !a.sin_port && !a.sin_addr.s_addr);
	CHECK(getpeername(fd, (struct sockaddr *)&a, &len) && errno == ENOTCONN);
	CHECK(!option(fd, SOL_SOCKET, SO_ERROR) && !option(fd, SOL_SOCKET, SO_REUSEADDR));
	CHECK(!option(fd, IPPROTO_TCP, TCP_NODELAY) && !option(fd, SOL_SOCKET, SO_KEEPALIVE));
	CHECK(option(fd, SOL_SOCKET, SO_TYPE) == SOCK_STREAM && option(fd, SOL_SOCKET, SO_PROTOCOL) == IPPROTO_TCP);
	CHECK(poll(&p, 1, 0) == 1 && p.revents == POLLHUP);
}

static void looks(void)
{
	static const int flags[] = { 0, SOCK_NONBLOCK, SOCK_CLOEXEC, SOCK_NONBLOCK | SOCK_CLOEXEC };

	for (int i = 0; i < 16; i++) {
		int fd = opened(), had = flags[i / 4], wants = flags[i % 4], next;
		ino_t before = inode(fd);

		if (had & SOCK_NONBLOCK)
			CHECK(i % 2 ? !fcntl(fd, F_SETFL, O_RDWR | O_NONBLOCK) : !ioctl(fd, FIONBIO, &(int){ 1 }));
		if (had & SOCK_CLOEXEC)
			CHECK(!fcntl(fd, F_SETFD, FD_CLOEXEC));
		set(fd, IPPROTO_TCP, TCP_NODELAY, i % 3 != 0);
		CHECK(!close(fd));
		next = made(wants);
		CHECK(next == fd); /* the lowest number that is free */
		CHECK((inode(next) == before) == shim);
		is_new(next, wants);
		CHECK(!close(next));
	}
}

/* After these the next socket is another one. */
static void changed(void)
{
	int fd, two;

	CHECK(again(opened()) == shim);
	fd = opened();
	set(fd, SOL_SOCKET, SO_RCVBUF, 50000);
	CHECK(!again(fd));
	fd = opened();
	set(fd, IPPROTO_TCP, TCP_KEEPIDLE, 77);
	CHECK(!again(fd));
	fd = opened();
	set(fd, SOL_SOCKET, SO_REUSEADDR, 1);
	CHECK(!again(fd));
	fd = opened();
	CHECK(!fcntl(fd, F_SETOWN, getpid()));
	CHECK(!again(fd));
	fd = opened();
	CHECK(!syscall(SYS_fcntl, fd, F_SETSIG, SIGUSR1));
	CHECK(!again(fd));
	fd = opened(); /* one more of it: home, and shared */
	CHECK((two = dup(fd)) >= 0);
	CHECK(!close(two));
	rounds(fd);
	CHECK(!again(fd));
	fd = made(0); /* the kernel has connected it */
	CHECK(!bind(fd, (struct sockaddr *)&(struct sockaddr_in){ .sin_family = AF_INET }, sizeof(server)));
	CHECK(!connect(fd, (struct sockaddr *)&server, sizeof(server)));
	rounds(fd);
	CHECK(!again(fd));
	fd = made(0); /* or has tried to: nobody listens there */
	CHECK(connect(fd, (struct sockaddr *)&(struct sockaddr_in){ .sin_family = AF_INET, .sin_port = htons(1),
								     .sin_addr.s_addr = htonl(INADDR_LOOPBACK) },
		      sizeof(server)) && errno == ECONNREFUSED);
	CHECK(!connect(fd, (struct sockaddr *)&server, sizeof(server)));
	rounds(fd);
	CHECK(!again(fd));
	CHECK(again(opened()) == shim);
}

static void sets(void)
{
	int e = epoll_create1(0), fd;
	struct epoll_event ev = { .events = EPOLLIN | EPOLLET }, got[4];
	ino_t first = visit();

	for (int i = 0; i < 20; i++) {
		bool early = i % 2;

		fd = made(0);
		ev.data.fd = 1000 + i;
		if (early)
			CHECK(!epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
		CHECK(!connect(fd, (struct sockaddr *)&server, sizeof(server)));
		if (!early)
			CHECK(!epoll_ctl(e, EPOLL_CTL_ADD, fd, &ev));
		CHECK((inode(fd) == first) == shim);
		CHECK(send(fd, "x", 1, 0) == 1);
		do
			CHECK(epoll_wait(e, got, 4, 3000) == 1 && got[0].data.fd == 1000 + i);
		while (!(got[0].events & EPOLLIN));
		CHECK(recv(fd, &(char){ 0 }, 1, MSG_WAITALL) == 1);
		CHECK(!close(fd));
		CHECK(epoll_wait(e, got, 4, 10) == 0); /* it is in the set no more */
		fd = made(0);
		CHECK(epoll_wait(e, got, 4, 10) == 0);
		CHECK(epoll_ctl(e, EPOLL_CTL_DEL, fd, NULL) && errno == ENOENT);
		CHECK(!connect(fd, (struct sockaddr *)&server, sizeof(server)));
		rounds(fd);
		CHECK(!close(fd));
	}
}

/* The peer hears of each end at once, also of one that went home on a socket of before. */
static void ends(void)
{
	for (int i = 0; i < 10; i++) {
		int fd = opened(), two;
		char c;

		CHECK(!shutdown(fd, SHUT_WR) && recv(fd, &c, 1, 0) == 0);
		CHECK(!close(fd));
		fd = opened();
		CHECK((two = dup(fd)) >= 0 && !close(two));
		rounds(fd);
		CHECK(!shutdown(fd, SHUT_WR) && recv(fd, &c, 1, 0) == 0);
		CHECK(!close(fd));
	}
}

static void forks(void)
{
	ino_t before = visit();
	int status, had = sockets();
	pid_t pid = fork();

	CHECK(pid >= 0);
	if (!pid) {
		CHECK(sockets() < had || !shim);
		CHECK(visit() != before);
		_exit(0);
	}
	CHECK(waitpid(pid, &status, 0) == pid && !status);
	CHECK(visit() != before); /* the kernel serves this process by now, or it is another one */
	visit();
	pid = vfork();
	if (!pid)
		execl("/bin/true", "true", NULL);
	CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && !status);
	visit();
}

/* What was kept is closed, by somebody who does not ask, and the number is another file's. */
static void closed_unseen(void)
{
	for (int i = 0; i < 5; i++) {
		int files[64], n = 0, null = open("/dev/null", O_RDONLY);
		ino_t before = visit();
		int fd;

		for (fd = 256; fd < 8192; fd++) {
			struct stat st;

			if (raw(SYS_fstat, fd, (long)&st, 0) || st.st_ino != before)
				continue;
			CHECK(!raw(SYS_close, fd, 0, 0));
			CHECK(raw(SYS_fcntl, null, F_DUPFD, fd) == fd);
			files[n++] = fd;
		}
		CHECK(n == shim);
		CHECK(visit() != before);
		for (fd = 0; fd < n; fd++)
			CHECK(!raw(SYS_close, files[fd], 0, 0)); /* still open, then */
		close(null);
		/* a connection that ends by such a call, and whose number the next one gets */
		fd = opened();
		before = inode(fd);
		CHECK(!raw(SYS_close, fd, 0, 0));
		CHECK(open("/dev/null", O_RDONLY) == fd && !close(fd));
		CHECK(inode(made(0)) != before);
		CHECK(!close(fd));
	}
}

static void aged(void)
{
	int had = sockets(), fd[4];

	for (int i = 0; i < 4; i++)
		fd[i] = opened();
	for (int i = 0; i < 4; i++)
		close(fd[i]);
	CHECK(sockets() >= had + 3 * shim); /* one of them was there */
	for (int i = 0; i < 60 && sockets() > had + 1; i++) /* the connection to the service may have begun since */
		usleep(100000);
	CHECK(sockets() <= had + 1);
}

/* Whose it is, and who may do what with it, is said when a socket is made. */
static void users(void)
{
	int fd = opened();
	struct stat st;

	for (int i = 0; i < 5; i++) {
		bool late = i % 2;

		if (!late)
			CHECK(!close(fd));
		CHECK(i < 2 ? !seteuid(65534) : i < 4 ? !setegid(65534) : !fchmod(opened(), 0600));
		if (late)
			CHECK(!close(fd));
		fd = made(0);
		CHECK(!fstat(fd, &st) && st.st_mode == (S_IFSOCK | 0777) && st.st_uid == (i < 2 ? 65534 : 0) &&
		      st.st_gid == (i > 1 && i < 4 ? 65534 : 0));
		CHECK(!close(fd) && !seteuid(0) && !setegid(0));
		fd = opened();
	}
	CHECK(!fchmod(fd, 0600) && !fchown(fd, 7, 7) && !close(fd));
	fd = made(0);
	CHECK(!fstat(fd, &st) && st.st_mode == (S_IFSOCK | 0777) && !st.st_uid && !st.st_gid);
}

/* What is made in another network namespace is that one's; what was there before goes on in its own. */
static void namespaces(void)
{
	ino_t before;
	int here = open("/proc/self/ns/net", O_RDONLY), stays = opened(), fd, udp = socket(AF_INET, SOCK_DGRAM, 0);

	CHECK(here >= 0 && !connect(udp, (struct sockaddr *)&server, sizeof(server)) && send(udp, "x", 1, 0) == 1);
	before = visit();
	for (int i = 0; i < 2; i++) {
		CHECK(!unshare(CLONE_NEWNET));
		fd = made(0);
		CHECK(inode(fd) != before);
		errno = 0;
		CHECK(connect(fd, (struct sockaddr *)&server, sizeof(server)) && errno == ENETUNREACH);
		CHECK(!close(fd));
		fd = socket(AF_INET, SOCK_DGRAM, 0);
		CHECK(connect(fd, (struct sockaddr *)&server, sizeof(server)) && errno == ENETUNREACH);
		CHECK(!close(fd));
		rounds(stays);
		CHECK(send(udp, "x", 1, 0) == 1 || errno == ECONNREFUSED);
		CHECK(!setns(here, i ? CLONE_NEWNET : 0));
		visit();
	}
	CHECK(!close(stays) && !close(udp) && !close(here));
}

/* The kernel's connections from a port of ours: established ones. */
static int established(int port)
{
	FILE *f = fopen("/proc/self/net/tcp", "r");
	unsigned local, state;
	char line[256];
	int n = 0;

	CHECK(f);
	while (fgets(line, sizeof(line), f))
		n += sscanf(line, " %*d: %*x:%x %*x:%*x %x", &local, &state) == 2 && (int)local == port && state == 1;
	fclose(f);
	return n;
}

/* One that goes home, and is closed: the peer is told, whoever had a copy of the table of descriptors before. */
static void ends_at_home(void)
{
	int fd = opened(), two = dup(fd), tries = 0;
	struct sockaddr_in a;
	socklen_t len = sizeof(a);

	CHECK(two >= 0 && !close(two) && !getsockname(fd, (struct sockaddr *)&a, &len));
	rounds(fd);
	CHECK(established(ntohs(a.sin_port)) == 1);
	CHECK(!close(fd));
	while (established(ntohs(a.sin_port)))
		CHECK(tries++ < 100 && !usleep(10000));
}

static sem_t parted, over;

static void *parts(void *how)
{
	CHECK(how ? !unshare(CLONE_FILES) : !close_range(900, 1000, CLOSE_RANGE_UNSHARE));
	sem_post(&parted);
	sem_wait(&over);
	return NULL;
}

static int waits(void *arg)
{
	(void)arg;
	raw(SYS_nanosleep, (long)&(struct timespec){ 1, 0 }, 0, 0);
	return 0;
}

static void tables(void)
{
	static char stack[65536] __attribute__((aligned(16)));
	pthread_t t;
	pid_t pid;

	visit();
	pid = clone(waits, stack + sizeof(stack), CLONE_VM | SIGCHLD, NULL);
	CHECK(pid > 0);
	ends_at_home();
	CHECK(waitpid(pid, NULL, 0) == pid);
	sem_init(&parted, 0, 0);
	sem_init(&over, 0, 0);
	for (long how = 0; how < 2; how++) {
		visit();
		CHECK(!pthread_create(&t, NULL, parts, (void *)how));
		sem_wait(&parted);
		ends_at_home();
		sem_post(&over);
		pthread_join(t, NULL);
	}
}

static volatile int other = -1;

static void close_other(int sig)
{
	(void)sig;
	if (other >= 0)
		close(other);
	other = -1;
}

/* A handler closes another one while this one is closed. */
static void handlers(void)
{
	signal(SIGALRM, close_other);
	for (int i = 0; i < 400; i++) {
		int fd = opened(), more[2];

		set(fd, IPPROTO_TCP, TCP_NODELAY, i % 2);
		other = opened();
		set(other, IPPROTO_TCP, TCP_NODELAY, 1 - i % 2);
		setitimer(ITIMER_REAL, &(struct itimerval){ .it_value.tv_usec = 1 + i % 40 }, NULL);
		usleep(i % 7);
		close(fd);
		while (other >= 0)
			;
		for (int k = 0; k < 2; k++) {
			more[k] = made(0);
			CHECK(!option(more[k], IPPROTO_TCP, TCP_NODELAY));
		}
		CHECK(!close(more[0]) && !close(more[1]));
	}
}

static void *visits(void *arg)
{
	for (int i = 0; i < 300; i++)
		visit();
	return arg;
}

/* No child has one that was kept, also of another thread. */
static void forks_meanwhile(void)
{
	pthread_t t;
	int status;

	CHECK(!pthread_create(&t, NULL, visits, NULL));
	for (int i = 0; i < 60; i++) {
		pid_t pid = fork();

		if (!pid) {
			int fd, proto;

			for (fd = 256; fd < 8192; fd++) {
				socklen_t len = sizeof(proto);

				if (!raw5(SYS_getsockopt, fd, SOL_SOCKET, SO_PROTOCOL, (long)&proto, (long)&len) &&
				    proto == IPPROTO_TCP)
					_exit(1);
			}
			_exit(0);
		}
		CHECK(pid > 0 && waitpid(pid, &status, 0) == pid && !status);
	}
	CHECK(!pthread_join(t, NULL));
}

static void *leaves(void *arg)
{
	int fd;

	CHECK(!unshare(CLONE_NEWNET));
	sem_post(&parted);
	sem_wait(&over);
	fd = made(0);
	CHECK(connect(fd, (struct sockaddr *)&server, sizeof(server)) && errno == ENETUNREACH);
	CHECK(!close(fd));
	return arg;
}

/* A thread is in another network namespace before the program has any socket. */
static void left_before(void)
{
	pthread_t t;

	sem_init(&parted, 0, 0);
	sem_init(&over, 0, 0);
	CHECK(!pthread_create(&t, NULL, leaves, NULL));
	sem_wait(&parted);
	visit();
	sem_post(&over);
	CHECK(!pthread_join(t, NULL));
	visit();
}

static void *parts_and_leaves(void *arg)
{
	CHECK(!unshare(CLONE_FILES));
	sem_post(&parted);
	sem_wait(&over);
	CHECK(!unshare(CLONE_NEWNET));
	return arg;
}

/* What other threads are about disturbs nobody: connections that were there, and those that are being opened. */
static void left_by_others(void)
{
	pthread_t t[4];
	int fd;

	sem_init(&parted, 0, 0);
	sem_init(&over, 0, 0);
	CHECK(!pthread_create(&t[3], NULL, parts_and_leaves, NULL));
	sem_wait(&parted);
	fd = opened();
	for (int i = 0; i < 3; i++)
		CHECK(!pthread_create(&t[i], NULL, visits, NULL));
	sem_post(&over);
	usleep(20000);
	rounds(fd);
	CHECK(!unshare(CLONE_NEWNET));
	rounds(fd);
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(t[i], NULL));
	rounds(fd);
}

static void threads(void)
{
	pthread_t t[4];

	for (int i = 0; i < 4; i++)
		CHECK(!pthread_create(&t[i], NULL, visits, NULL));
	for (int i = 0; i < 4; i++)
		CHECK(!pthread_join(t[i], NULL));
}

static bool inherit;

/* The other side: each accepted connection is the next one's kernel socket. */
static void accepts(void)
{
	int l = made(0), one, known = 0;
	ino_t before = 0;

	set(l, SOL_SOCKET, SO_REUSEADDR, 1);
	if (inherit)
		set(l, SOL_SOCKET, SO_RCVBUF, 50000);
	server.sin_addr.s_addr = INADDR_ANY;
	CHECK(!bind(l, (struct sockaddr *)&server, sizeof(server)) && !listen(l, 64));
	puts("ready");
	fflush(stdout);
	for (int i = 0; i < 50; i++) {
		char c;

		one = accept4(l, NULL, NULL, i % 2 ? SOCK_CLOEXEC : 0);
		CHECK(one >= 0 && fcntl(one, F_GETFD) == (i % 2 ? FD_CLOEXEC : 0) && fcntl(one, F_GETFL) == O_RDWR);
		CHECK(!option(one, IPPROTO_TCP, TCP_NODELAY) && option(one, SOL_SOCKET, SO_REUSEADDR) == 1);
		known += inode(one) == before;
		CHECK(!inherit || option(one, SOL_SOCKET, SO_RCVBUF) == 100000);
		before = inode(one);
		while (recv(one, &c, 1, 0) == 1)
			CHECK(send(one, &c, 1, 0) == 1);
		if (i % 3)
			set(one, IPPROTO_TCP, TCP_NODELAY, 1);
		CHECK(!close(one));
	}
	/* the first ones may have come before the ring listened */
	CHECK(shim && !inherit ? known >= 40 : !known);
}

static void inherits(void)
{
	inherit = true;
	accepts();
}

static const struct call_case cases[] = {
	{ "reused", reused }, { "several", several }, { "looks", looks }, { "changed", changed }, { "sets", sets },
	{ "ends", ends }, { "forks", forks }, { "closed_unseen", closed_unseen }, { "aged", aged }, { "users", users },
	{ "namespaces", namespaces }, { "threads", threads }, { "tables", tables }, { "handlers", handlers }, { "forks_meanwhile", forks_meanwhile },
	{ "left_before", left_before }, { "left_by_others", left_by_others }, { "accepts", accepts }, { "inherits", inherits }, { 0 },
};

int main(int argc, char **argv)
{
	CHECK(argc >= 4 && inet_pton(AF_INET, argv[2], &server.sin_addr) == 1);
	server.sin_port = htons((uint16_t)atoi(argv[3]));
	shim = argc == 4;
	if (strcmp(argv[1], "accepts") && strcmp(argv[1], "inherits") && strcmp(argv[1], "left_before"))
		visit(); /* the ring, and what else begins with the first one */
	if (!run_case(cases, argv[1]))
		return 2;
	puts("done");
	return 0;
}
