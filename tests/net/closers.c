/* What others do to a call that waits: two threads lay over its connection at once ("two"); one closes its number, which
 * another socket gets, and there is a dup() ("moved", of UDP "datagrams", of a listener "listeners") or none ("closed"); or
 * one looks at the array of a poll(), which a handler leaves then by siglongjmp() ("array"), and many such polls are left
 * ("jumps"); or one forks, and a handler of pthread_atfork() takes the lock under which the other waits ("forks"), or the
 * child of its vfork() lays over the number ("vforks"); or one closes what another sends much by ("large"), many small
 * pieces ("pieces"), or can't be run to receive from ("starved"). */
#define _GNU_SOURCE
#include "calls.h"
#include <arpa/inet.h>
#include <errno.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <setjmp.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#define MANY 50
#define ROUNDS 12

static sigjmp_buf before;
static pthread_barrier_t both;
static struct pollfd set[MANY];
static struct in_addr here;
static int fd, nothing[2];
static _Atomic int who, stop;
static char much[32 << 20];

static int connected(void)
{
	int made = socket(AF_INET, SOCK_STREAM, 0);

	if (connect(made, (struct sockaddr *)&server, sizeof(server)) || write(made, "x", 1) != 1)
		abort();
	return made;
}

/* Until the thread that says so waits. */
static void until_it_waits(void)
{
	char path[64], text[256];

	for (int i = 0, asleep = 0; i < 1000 && asleep < 3; i++) {
		FILE *f;

		usleep(3000);
		snprintf(path, sizeof(path), "/proc/self/task/%d/stat", atomic_load(&who));
		f = fopen(path, "r");
		asleep = f && fgets(text, sizeof(text), f) && strstr(text, ") S ") ? asleep + 1 : 0;
		if (f)
			fclose(f);
	}
	atomic_store(&who, 0);
}

static void *receive(void *arg)
{
	char byte;

	atomic_store(&who, gettid());
	while (recv(fd, &byte, 1, 0) == 1 && byte != 'y')
		;
	return arg;
}

static void *lay_over(void *arg)
{
	pthread_barrier_wait(&both);
	dup2(nothing[0], fd);
	return arg;
}

static void two(void)
{
	pthread_t reader, first, second;

	pthread_barrier_init(&both, NULL, 2);
	for (int i = 0; i < ROUNDS; i++) {
		fd = connected();
		pthread_create(&reader, NULL, receive, NULL);
		until_it_waits();
		pthread_create(&first, NULL, lay_over, NULL);
		pthread_create(&second, NULL, lay_over, NULL);
		pthread_join(first, NULL);
		pthread_join(second, NULL);
		close(fd);
		pthread_join(reader, NULL);
	}
}

static struct sockaddr_in own_name(unsigned short port)
{
	return (struct sockaddr_in){.sin_family = AF_INET, .sin_port = htons(port), .sin_addr = here};
}

static int bound(int type, unsigned short port)
{
	struct sockaddr_in own = own_name(port);
	int made = socket(AF_INET, type, 0);

	setsockopt(made, SOL_SOCKET, SO_REUSEADDR, &(int){1}, sizeof(int));
	if (bind(made, (struct sockaddr *)&own, sizeof(own)))
		abort();
	return made;
}

static int to_own(unsigned short port)
{
	struct sockaddr_in to = own_name(port);
	int made = socket(AF_INET, SOCK_STREAM, 0);

	if (connect(made, (struct sockaddr *)&to, sizeof(to)))
		abort();
	return made;
}

static void tell(unsigned short port, const char *what)
{
	struct sockaddr_in to = own_name(port);
	int made = socket(AF_INET, SOCK_DGRAM, 0);

	sendto(made, what, 1, 0, (struct sockaddr *)&to, sizeof(to));
	close(made);
}

static void *receive_one(void *got)
{
	atomic_store(&who, gettid());
	if (recv(fd, got, 1, 0) != 1)
		*(char *)got = '-';
	return NULL;
}

static void moved(int datagrams, int closed)
{
	int right = 0;

	for (int i = 0; i < ROUNDS; i++) {
		pthread_t reader;
		int other, new;
		char got;

		fd = datagrams ? bound(SOCK_DGRAM, 7900) : connected();
		pthread_create(&reader, NULL, receive_one, &got);
		until_it_waits();
		other = closed ? -1 : dup(fd);
		close(fd);
		new = bound(SOCK_DGRAM, 7901);
		tell(7901, "n");
		usleep(5000);
		if (datagrams)
			tell(7900, "y");
		pthread_join(reader, NULL);
		right += new == fd && got == 'y';
		close(new);
		close(other);
	}
	printf("%d right\n", right);
}

static void on_cpu(int cpu)
{
	cpu_set_t set;

	CPU_ZERO(&set);
	CPU_SET(cpu, &set);
	sched_setaffinity(0, sizeof(set), &set);
}

static void *receive_there(void *got)
{
	on_cpu(0);
	return receive_one(got);
}

static void *compute_there(void *arg)
{
	on_cpu(0);
	if (sched_setscheduler(0, SCHED_FIFO, &(struct sched_param){5}))
		abort();
	while (!atomic_load(&stop))
		;
	return arg;
}

static void starved(void)
{
	int right = 0;

	on_cpu(1);
	for (int i = 0; i < ROUNDS / 3; i++) {
		pthread_t reader, computes;
		int other, new;
		char got;

		fd = connected();
		pthread_create(&reader, NULL, receive_there, &got);
		until_it_waits();
		atomic_store(&stop, 0);
		pthread_create(&computes, NULL, compute_there, NULL);
		usleep(10000);
		other = dup(fd);
		close(fd);
		new = bound(SOCK_DGRAM, 7901);
		tell(7901, "n");
		usleep(100000);
		atomic_store(&stop, 1);
		pthread_join(computes, NULL);
		pthread_join(reader, NULL);
		right += new == fd && got == 'y';
		close(new);
		close(other);
	}
	printf("%d right\n", right);
}

static __attribute__((noinline)) pid_t vforked(void)
{
	pid_t pid = vfork();

	if (!pid) {
		dup2(nothing[0], fd);
		_exit(0);
	}
	return pid;
}

static void vforks(void)
{
	int right = 0;

	for (int i = 0; i < ROUNDS; i++) {
		pthread_t reader;
		int status;
		pid_t pid;
		char got;

		fd = connected();
		pthread_create(&reader, NULL, receive_one, &got);
		until_it_waits();
		pid = vforked();
		pthread_join(reader, NULL);
		right += got == 'y' && waitpid(pid, &status, 0) == pid && send(fd, "z", 1, 0) == 1;
		close(fd);
	}
	printf("%d right\n", right);
}

static void *send_much(void *result)
{
	atomic_store(&who, gettid());
	*(ssize_t *)result = send(fd, much, sizeof(much), 0);
	return NULL;
}

/* No more than the peer has room for: what it says before it reads would reset a connection whose end waits for that. */
static void *send_pieces(void *result)
{
	int n = 0;

	atomic_store(&who, gettid());
	while (send(fd, "s", 1, 0) == 1)
		if (++n > 30000)
			usleep(20);
	*(ssize_t *)result = -errno;
	return NULL;
}

static void closed_while(void *(*sends)(void *), useconds_t after, ssize_t wanted)
{
	int right = 0;

	for (int i = 0; i < ROUNDS; i++) {
		pthread_t sender;
		ssize_t result;

		atomic_store(&who, 0);
		fd = connected();
		pthread_create(&sender, NULL, sends, &result);
		while (!atomic_load(&who))
			usleep(100);
		usleep(after + 1000 * i);
		close(fd);
		pthread_join(sender, NULL);
		right += result == wanted;
	}
	atomic_store(&who, 0);
	printf("%d right\n", right);
}

static void *accept_one(void *port)
{
	struct sockaddr_in is = {0};
	socklen_t len = sizeof(is);
	int got;

	atomic_store(&who, gettid());
	got = accept(fd, NULL, NULL);

	getsockname(got, (struct sockaddr *)&is, &len);
	*(int *)port = ntohs(is.sin_port);
	close(got);
	return NULL;
}

static void listeners(void)
{
	int right = 0;

	for (int i = 0; i < ROUNDS; i++) {
		int other, new, got = 0, port = 7910 + 2 * i, first, second;
		pthread_t acceptor;

		listen(fd = bound(SOCK_STREAM, port), 5);
		pthread_create(&acceptor, NULL, accept_one, &got);
		until_it_waits();
		other = dup(fd);
		close(fd);
		listen(new = bound(SOCK_STREAM, port + 1), 5);
		first = to_own(port + 1);
		usleep(5000);
		second = to_own(port);
		pthread_join(acceptor, NULL);
		right += new == fd && got == port;
		close(new);
		close(other);
		close(first);
		close(second);
	}
	printf("%d right\n", right);
}

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;

static void take(void)
{
	pthread_mutex_lock(&mutex);
}

static void give(void)
{
	pthread_mutex_unlock(&mutex);
}

static void *receive_locked(void *got)
{
	take();
	receive_one(got);
	give();
	return NULL;
}

static void forks(void)
{
	int right = 0;

	pthread_atfork(take, give, give);
	for (int i = 0; i < ROUNDS; i++) {
		pthread_t reader;
		char got = 0;
		int status;
		pid_t pid;

		fd = connected();
		pthread_create(&reader, NULL, receive_locked, &got);
		until_it_waits();
		pid = fork();
		if (!pid) {
			close(fd);
			_exit(0);
		}
		pthread_join(reader, NULL);
		right += got == 'y' && waitpid(pid, &status, 0) == pid && !status;
		close(fd);
	}
	printf("%d right\n", right);
}

static void leave(int sig)
{
	siglongjmp(before, sig);
}

static void *look(void *waits)
{
	int seen = 0;

	usleep(100000);
	for (int i = 0; i < MANY; i++)
		seen += set[i].fd >= 0;
	printf("%d seen\n", seen);
	pthread_kill(*(pthread_t *)waits, SIGUSR1);
	return waits;
}

static void array(void)
{
	pthread_t self = pthread_self(), other;

	for (int i = 0; i < MANY; i++)
		set[i] = (struct pollfd){connected(), POLLPRI, 0};
	if (!sigsetjmp(before, 1)) {
		pthread_create(&other, NULL, look, &self);
		poll(set, MANY, 5000);
		abort();
	}
	pthread_join(other, NULL);
	set[MANY / 2].events = POLLOUT;
	printf("%d ready\n", poll(set, MANY, 3000));
}

static long resident(void)
{
	long total = 0, pages = 0;
	FILE *f = fopen("/proc/self/statm", "r");

	if (!f || fscanf(f, "%ld %ld", &total, &pages) != 2)
		abort();
	fclose(f);
	return pages;
}

static void jumps(void)
{
	volatile long at_first = 0;

	for (int i = 0; i < MANY; i++)
		set[i] = (struct pollfd){connected(), POLLPRI, 0};
	signal(SIGALRM, leave);
	for (volatile int i = 0; i < 300; i++) {
		if (i == 50)
			at_first = resident();
		if (!sigsetjmp(before, 1)) {
			struct itimerval soon = {.it_value.tv_usec = 1000};

			setitimer(ITIMER_REAL, &soon, NULL);
			poll(set, MANY, 5000);
			abort();
		}
	}
	printf("%d pages more\n", (int)(resident() - at_first) / 100);
}

static void large(void)
{
	closed_while(send_much, 102000, sizeof(much)); /* the peer reads by then */
}

static void pieces(void)
{
	closed_while(send_pieces, 5000, -EBADF);
}

static void of_streams(void)
{
	moved(0, 0);
}

static void datagrams(void)
{
	moved(1, 0);
}

static void closed(void)
{
	moved(0, 1);
}

static const struct call_case scenes[] = {
	{ "two", two }, { "array", array }, { "listeners", listeners }, { "forks", forks }, { "vforks", vforks }, { "large", large },
	{ "pieces", pieces }, { "starved", starved }, { "jumps", jumps }, { "moved", of_streams }, { "datagrams", datagrams },
	{ "closed", closed }, { 0 },
};

int main(int argc, char **argv)
{
	if (argc != 5 || pipe(nothing) || signal(SIGUSR1, leave) == SIG_ERR)
		return 1;
	inet_pton(AF_INET, argv[2], &server.sin_addr);
	server.sin_port = htons((unsigned short)atoi(argv[3]));
	inet_pton(AF_INET, argv[4], &here);
	if (!run_case(scenes, argv[1]))
		return 2;
	puts("done");
	fflush(stdout);
	sleep(10); /* what has leaked is open until then */
	return 0;
}
