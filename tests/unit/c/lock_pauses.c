/* Under the shim: one thread holds the lock of a socket in a setsockopt(2) whose value comes from a page that
 * userfaultfd(2) keeps back, another one waits for it, and a process that single-steps that thread prints how many PAUSE
 * instructions it executes before it goes to sleep in futex(2). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/user.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef __x86_64__
#define PAGE 4096
#define STEPS_MAX 1000000
#define PAUSE 0x90f3 /* F3 90 */
#define SYSCALL 0x050f /* 0F 05 */

static _Atomic int wait_now;
static int fd, told[2], attached[2];
static char *page;

static void skip(const char *what)
{
	perror(what);
	exit(77);
}

static int keep_page_back(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };
	int uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);

	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	reg.range.start = (unsigned long)page;
	reg.range.len = PAGE;
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &reg))
		skip("userfaultfd");
	return uffd;
}

static void *holder(void *arg)
{
	setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, page, sizeof(int));
	return arg;
}

static void *waiter(void *arg)
{
	int one = 1, tid = (int)syscall(SYS_gettid);

	if (write(told[1], &tid, sizeof(tid)) != sizeof(tid))
		exit(1);
	while (!wait_now)
		;
	setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
	return arg;
}

/* In a process of its own, which is told the thread, and tells when that may go. */
static int count(int told, int attached)
{
	struct user_regs_struct regs;
	int tid, status, pauses = 0;

	if (read(told, &tid, sizeof(tid)) != sizeof(tid))
		return 1;
	if (ptrace(PTRACE_SEIZE, tid, 0, 0) || ptrace(PTRACE_INTERRUPT, tid, 0, 0))
		skip("ptrace");
	waitpid(tid, &status, __WALL);
	if (write(attached, "", 1) != 1)
		return 1;
	for (int step = 0; step < STEPS_MAX; step++) {
		ptrace(PTRACE_GETREGS, tid, 0, &regs);
		unsigned next = ptrace(PTRACE_PEEKTEXT, tid, regs.rip, 0) & 0xffff;

		if (next == SYSCALL && regs.rax == SYS_futex) {
			printf("pauses %d\n", pauses);
			fflush(stdout);
			return ptrace(PTRACE_DETACH, tid, 0, 0) != 0;
		}
		pauses += next == PAUSE;
		if (ptrace(PTRACE_SINGLESTEP, tid, 0, 0) || waitpid(tid, &status, __WALL) != tid)
			return 1;
	}
	return 1;
}

int main(void)
{
	static int value[PAGE / sizeof(int)] = { 1 };
	int status, uffd = keep_page_back();
	struct uffdio_copy copy = { .dst = (unsigned long)page, .src = (unsigned long)value, .len = PAGE };
	struct uffd_msg held;
	pthread_t a, b;
	char go;

	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY, 0, 0, 0);
	if (pipe(told) || pipe(attached))
		return 1;
	pid_t child = fork(); /* not later: the shim's own part of a fork waits for the lock, too */
	if (!child)
		_exit(count(told[0], attached[1]));
	close(attached[1]);
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	pthread_create(&a, NULL, holder, NULL);
	if (read(uffd, &held, sizeof(held)) != sizeof(held))
		return 1;
	pthread_create(&b, NULL, waiter, NULL);
	if (read(attached[0], &go, 1) == 1)
		wait_now = 1;
	waitpid(child, &status, 0);
	if (!WIFEXITED(status) || WEXITSTATUS(status))
		_exit(WIFEXITED(status) ? WEXITSTATUS(status) : 1);
	ioctl(uffd, UFFDIO_COPY, &copy);
	pthread_join(a, NULL);
	pthread_join(b, NULL);
	return 0;
}
#else
int main(void)
{
	fputs("single steps are read on x86-64 only\n", stderr);
	return 77;
}
#endif
