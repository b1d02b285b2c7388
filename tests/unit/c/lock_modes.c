/* Under the shim: one thread waits for the lock of a socket that another one holds for a millisecond, in a setsockopt(2)
 * whose value comes from a page that userfaultfd(2) keeps back. Prints how often the waiting thread gave the processor
 * away in all of that. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/userfaultfd.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROUNDS 100
#define PAGE 4096

static _Atomic long yields;
static _Atomic int hold, wait_now, waited;
static int fd, uffd;
static char *page;

int sched_yield(void) /* before libc's: the shim's calls come here */
{
	yields++;
	return (int)syscall(SYS_sched_yield);
}

static void spin_until(_Atomic int *flag, int value)
{
	while (atomic_load(flag) != value)
		;
}

static void *holder(void *arg)
{
	for (int i = 1; i <= ROUNDS; i++) {
		spin_until(&hold, i);
		setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, page, sizeof(int));
	}
	return arg;
}

static void *waiter(void *arg)
{
	int one = 1;

	for (int i = 1; i <= ROUNDS; i++) {
		spin_until(&wait_now, i);
		setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
		atomic_store(&waited, i);
	}
	return arg;
}

static void keep_page_back(void)
{
	struct uffdio_api api = { .api = UFFD_API };
	struct uffdio_register reg = { .mode = UFFDIO_REGISTER_MODE_MISSING };

	page = mmap(NULL, PAGE, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	uffd = (int)syscall(SYS_userfaultfd, O_CLOEXEC);
	reg.range.start = (unsigned long)page;
	reg.range.len = PAGE;
	if (uffd < 0 || ioctl(uffd, UFFDIO_API, &api) || ioctl(uffd, UFFDIO_REGISTER, &reg)) {
		perror("userfaultfd");
		exit(77);
	}
}

int main(void)
{
	static int value[PAGE / sizeof(int)] = { 1 };
	struct uffd_msg m;
	pthread_t a, b;

	keep_page_back();
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	pthread_create(&a, NULL, holder, NULL);
	pthread_create(&b, NULL, waiter, NULL);
	for (int i = 1; i <= ROUNDS; i++) {
		struct uffdio_copy copy = { .dst = (unsigned long)page, .src = (unsigned long)value, .len = PAGE };

		madvise(page, PAGE, MADV_DONTNEED);
		atomic_store(&hold, i);
		if (read(uffd, &m, sizeof(m)) != sizeof(m))
			return 1;
		atomic_store(&wait_now, i);
		usleep(1000);
		if (ioctl(uffd, UFFDIO_COPY, &copy))
			return 1;
		spin_until(&waited, i);
	}
	printf("yields %ld\n", atomic_load(&yields));
	return 0;
}
