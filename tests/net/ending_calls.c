/* A server that ends while its threads are in calls on its connections: ending_calls HOW PORT CONNECTIONS FILE
 *
 * Two threads send all the time, another waits in recv(2) for what never comes. FILE has 256 numbers: for each
 * connection how many bytes send(2) has taken; when the last is written the program ends. The first byte of a
 * connection is its number. A thread that a call has told of the end says "woken". */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define MOST 256

static uint64_t *sent;
static int conns[MOST], quiet, sets[2];
static volatile sig_atomic_t handled;

static void woken(const char *call, ssize_t r)
{
	printf("woken: %s %zd %s\n", call, r, strerror(errno));
	fflush(stdout);
}

static void *writes(void *set)
{
	static __thread unsigned char bytes[3000];
	struct epoll_event e[32];
	int n, i;
	ssize_t r;

	for (;;) {
		n = epoll_wait(*(int *)set, e, 32, -1);
		for (i = 0; i < n; i++) {
			bytes[0] = (unsigned char)e[i].data.u32;
			if (e[i].events != EPOLLOUT)
				woken("epoll_wait", e[i].events);
			r = send(conns[e[i].data.u32], bytes, sizeof(bytes), MSG_DONTWAIT);
			if (r > 0)
				sent[e[i].data.u32] += (uint64_t)r;
			else if (errno != EAGAIN)
				woken("send", r);
		}
	}
	return NULL;
}

static void *reads(void *arg)
{
	char byte;
	ssize_t r = recv(quiet, &byte, 1, 0);

	woken("recv", r);
	return arg;
}

static void *another_signal(void *arg)
{
	usleep(1000);
	raise(SIGUSR1);
	return arg;
}

static void *another_end(void *arg)
{
	usleep(500);
	kill(getpid(), SIGTERM);
	return arg;
}

static void *another_exit(void *arg)
{
	usleep(1000);
	exit(8);
	return arg;
}

static void ends_at_once(int sig)
{
	(void)sig;
	_exit(7);
}

/* By a thread that sends, somewhere in a call. */
static void by_another(int sig, unsigned flags)
{
	sigset_t set;

	sigaction(sig, &(struct sigaction){ .sa_handler = ends_at_once, .sa_flags = (int)flags }, NULL);
	sigemptyset(&set);
	sigaddset(&set, sig);
	pthread_sigmask(SIG_BLOCK, &set, NULL);
	kill(getpid(), sig);
}

static void handler(int sig)
{
	handled = sig;
}

/* A child in our memory: what it does with signals is its own affair. */
static int of_a_vfork(int sig)
{
	int status = -1;
	pid_t child = vfork();

	if (!child) {
		signal(SIGTERM, SIG_DFL);
		if (sig)
			raise(sig);
		_exit(0);
	}
	waitpid(child, &status, 0);
	return status;
}

static void end(const char *how)
{
	pthread_t t;

	if (!strcmp(how, "exit"))
		exit(7);
	if (!strcmp(how, "_exit"))
		_exit(7);
	if (!strcmp(how, "both")) {
		pthread_create(&t, NULL, another_end, NULL);
		exit(7);
	}
	if (!strcmp(how, "two")) {
		pthread_create(&t, NULL, another_signal, NULL);
		raise(SIGTERM);
	}
	if (!strcmp(how, "TERM"))
		kill(getpid(), SIGTERM);
	if (!strcmp(how, "quick_exit"))
		quick_exit(7);
	if (!strcmp(how, "exits")) {
		pthread_create(&t, NULL, another_exit, NULL);
		exit(7);
	}
	if (!strcmp(how, "returns")) {
		pthread_create(&t, NULL, another_exit, NULL);
		usleep(1300);
		return;
	}
	if (!strcmp(how, "oneshot"))
		by_another(SIGTERM, SA_RESETHAND);
	if (!strcmp(how, "abort"))
		by_another(SIGABRT, 0);
	if (!strcmp(how, "twice")) {
		pthread_create(&t, NULL, another_end, NULL);
		raise(SIGTERM);
	}
	if (!strcmp(how, "once")) {
		sigaction(SIGUSR2, &(struct sigaction){ .sa_handler = handler, .sa_flags = (int)SA_RESETHAND }, NULL);
		raise(SIGUSR2);
		if (handled != SIGUSR2)
			exit(5);
		raise(SIGUSR2);
	}
	if (!strcmp(how, "vfork")) {
		signal(SIGTERM, handler);
		if (of_a_vfork(0))
			exit(2);
		raise(SIGTERM);
		if (handled != SIGTERM)
			exit(3);
		if (of_a_vfork(SIGUSR2) != SIGUSR2)
			exit(4);
		signal(SIGTERM, SIG_DFL);
		raise(SIGTERM);
	}
	pause();
}

int main(int argc, char **argv)
{
	struct sockaddr_in at = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(argv[2])) };
	int listener = socket(AF_INET, SOCK_STREAM, 0), n = atoi(argv[3]), i;
	int file = open(argv[argc - 1], O_RDWR | O_CREAT, 0600);
	struct epoll_event e = { .events = EPOLLOUT };
	pthread_t t;

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	if (ftruncate(file, MOST * 8) || bind(listener, (struct sockaddr *)&at, sizeof(at)) || listen(listener, MOST))
		return 1;
	sent = mmap(NULL, MOST * 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	setvbuf(stdout, NULL, _IONBF, 0);
	puts("ready");
	quiet = accept(listener, NULL, NULL);
	for (i = 0; i < 2; i++)
		sets[i] = epoll_create1(0);
	for (i = 0; i < n; i++) {
		conns[i] = accept(listener, NULL, NULL);
		e.data.u32 = (uint32_t)i;
		epoll_ctl(sets[i % 2], EPOLL_CTL_ADD, conns[i], &e);
	}
	pthread_create(&t, NULL, reads, NULL);
	for (i = 0; i < 2; i++)
		pthread_create(&t, NULL, writes, &sets[i]);
	puts("there");
	while (!__atomic_load_n(&sent[MOST - 1], __ATOMIC_SEQ_CST))
		usleep(1000);
	end(argv[1]);
	return 7;
}
