/* ADDRESS PORT udp|tcp recv|poll|epoll THREADS WHAT: threads that each wait for the echoes of an own socket. WHAT:
 *   idle       one asks ROUNDS times, the others wait; then each of those is sent one message
 *   nice       the same, and the others have a lower priority
 *   all        each asks, with moments in between
 *   handler, raw, longjmp, cancel   the thread that has slept longest is in a handler for a while, or in one of which
 *              libc knows nothing, or has left its call by one, or is cancelled and cleans up; meanwhile the others are
 *              sent messages
 * Says "ready", waits for a line, and says: rounds, times that the others slept, longest wait in us. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : (fprintf(stderr, "%d: %s: %s\n", __LINE__, #x, strerror(errno)), _exit(3)))
#define ROUNDS 500
#define TOGETHER 150 /* rounds of each, where all ask */
#define MAX 64
#define AWAY_MS 1000

static struct waiter {
	pthread_t thread;
	int fd, epfd;
	_Atomic int got;
	_Atomic long slept;
} all[MAX];
static const char *how, *what;
static int threads;
static _Atomic long longest_us;
static _Atomic bool go;
static sigjmp_buf out;

static long now_us(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return t.tv_sec * 1000000 + t.tv_nsec / 1000;
}

static void nap(long us)
{
	nanosleep(&(struct timespec){ us / 1000000, us % 1000000 * 1000 }, NULL);
}

/* false: a handler has ended the call. */
static bool came(struct waiter *w)
{
	struct pollfd p = { .fd = w->fd, .events = POLLIN };
	struct epoll_event ev;
	char b[64];
	long n = 1;

	if (*how == 'p')
		n = poll(&p, 1, 5000);
	else if (*how == 'e')
		n = epoll_wait(w->epfd, &ev, 1, 5000);
	if (n == 1)
		n = recv(w->fd, b, sizeof(b), 0);
	CHECK((n == 1 && *b == 'm') || (n < 0 && errno == EINTR));
	return n == 1;
}

static void await(struct waiter *w)
{
	CHECK(came(w));
}

static void note(long us)
{
	long was = atomic_load(&longest_us);

	while (us > was && !atomic_compare_exchange_weak(&longest_us, &was, us))
		;
}

static void ask(struct waiter *w)
{
	long began = now_us();

	CHECK(send(w->fd, "m", 1, 0) == 1);
	await(w);
	note(now_us() - began);
}

static void *asks(void *arg)
{
	struct waiter *w = arg;
	unsigned seed = (unsigned)(w - all) + 1;

	while (!atomic_load(&go))
		nap(1000);
	for (int i = 0; i < TOGETHER; i++) {
		ask(w);
		if (rand_r(&seed) % 4 == 0)
			nap(rand_r(&seed) % 1000);
	}
	return NULL;
}

static void *waits(void *arg)
{
	struct waiter *w = arg;
	struct rusage u;

	if (!strcmp(what, "nice"))
		CHECK(setpriority(PRIO_PROCESS, (id_t)gettid(), 1) == 0);
	for (;;) {
		await(w);
		getrusage(RUSAGE_THREAD, &u);
		atomic_store(&w->slept, u.ru_nvcsw);
		atomic_fetch_add(&w->got, 1);
	}
	return NULL;
}

static void handler(int sig)
{
	(void)sig;
	if (!strcmp(what, "longjmp"))
		siglongjmp(out, 1);
	for (long end = now_us() + AWAY_MS * 1000; now_us() < end;)
		nap(1000);
}

#ifdef __x86_64__
#define RESTORER 0x04000000ul
void comes_back(void);
__asm__(".text\ncomes_back: mov $15, %eax\nsyscall\n");
#else
#define RESTORER 0ul
#define comes_back NULL
#endif

/* As Go does it: the handler is not known to who wraps those of sigaction(). */
static void install_raw(void)
{
	struct {
		void (*handler)(int);
		unsigned long flags;
		void (*restorer)(void);
		unsigned long mask;
	} a = { handler, RESTORER | SA_RESTART, comes_back, 0 };

	CHECK(syscall(SYS_rt_sigaction, SIGUSR1, &a, NULL, sizeof(a.mask)) == 0);
}

static void cleans_up(void *arg)
{
	(void)arg;
	nap(AWAY_MS * 1000);
}

static void *goes_away(void *arg)
{
	struct waiter *w = arg;

	pthread_cleanup_push(cleans_up, NULL);
	if (sigsetjmp(out, 1)) /* not back in the call */
		for (;;)
			nap(10000);
	for (;;)
		came(w);
	pthread_cleanup_pop(0);
	return NULL;
}

static void tell_each(int from)
{
	for (int i = from; i < threads; i++) {
		int before = atomic_load(&all[i].got);
		long began = now_us();

		CHECK(send(all[i].fd, "m", 1, 0) == 1);
		while (atomic_load(&all[i].got) == before) {
			CHECK(now_us() - began < 5000000);
			nap(50);
		}
		note(now_us() - began);
	}
}

static void make(struct waiter *w, const struct sockaddr_in *peer, bool tcp)
{
	struct epoll_event ev = { .events = EPOLLIN };
	int one = 1;

	w->fd = socket(AF_INET, tcp ? SOCK_STREAM : SOCK_DGRAM, 0);
	CHECK(w->fd >= 0 && connect(w->fd, (const struct sockaddr *)peer, sizeof(*peer)) == 0);
	if (tcp)
		CHECK(setsockopt(w->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)) == 0);
	w->epfd = epoll_create1(0);
	CHECK(epoll_ctl(w->epfd, EPOLL_CTL_ADD, w->fd, &ev) == 0);
	ask(w);
}

int main(int argc, char **argv)
{
	struct sockaddr_in peer = { .sin_family = AF_INET };
	long slept = 0, rounds = 0;
	char line[8];
	int from = 0;

	CHECK(argc == 7 && inet_aton(argv[1], &peer.sin_addr));
	peer.sin_port = htons((in_port_t)atoi(argv[2]));
	how = argv[4];
	threads = atoi(argv[5]);
	what = argv[6];
	CHECK(threads <= MAX);
	for (int i = 0; i < threads; i++)
		make(&all[i], &peer, !strcmp(argv[3], "tcp"));
	puts("ready");
	fflush(stdout);
	CHECK(fgets(line, sizeof(line), stdin));
	atomic_store(&longest_us, 0);
	if (!strcmp(what, "idle") || !strcmp(what, "nice")) {
		for (from = 1; from < threads; from++)
			CHECK(pthread_create(&all[from].thread, NULL, waits, &all[from]) == 0);
		nap(50000);
		tell_each(1); /* all have slept in their call */
		for (int i = 1; i < threads; i++)
			slept -= atomic_load(&all[i].slept);
		for (; rounds < ROUNDS; rounds++)
			ask(&all[0]);
		tell_each(1);
		for (int i = 1; i < threads; i++)
			slept += atomic_load(&all[i].slept);
	} else if (!strcmp(what, "all")) {
		for (int i = 0; i < threads; i++)
			CHECK(pthread_create(&all[i].thread, NULL, asks, &all[i]) == 0);
		atomic_store(&go, true);
		for (int i = 0; i < threads; i++)
			CHECK(pthread_join(all[i].thread, NULL) == 0);
		rounds = (long)threads * TOGETHER;
	} else {
		if (!strcmp(what, "raw"))
			install_raw();
		else
			CHECK(signal(SIGUSR1, handler) != SIG_ERR);
		CHECK(pthread_create(&all[0].thread, NULL, goes_away, &all[0]) == 0);
		nap(50000);
		for (int i = 1; i < threads; i++) {
			CHECK(pthread_create(&all[i].thread, NULL, waits, &all[i]) == 0);
			nap(10000);
		}
		CHECK((!strcmp(what, "cancel") ? pthread_cancel(all[0].thread) : pthread_kill(all[0].thread, SIGUSR1)) == 0);
		nap(5000);
		for (; rounds < 5; rounds++)
			tell_each(1);
	}
	printf("%ld %ld %ld\n", rounds, slept, atomic_load(&longest_us));
	fflush(stdout);
	_exit(0);
}
