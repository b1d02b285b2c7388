/* tcp_small_stack coroutine|handler BYTES ADDRESS PORT: a connection to an echo server, the calls of which are made on a
 * stack of so many bytes; of a handler not connect(). Says "fine, N used", or which call failed. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <ucontext.h>
#include <unistd.h>

#define PAGE 4096
#define TURNS 300
#define UNUSED 0x5a

static struct sockaddr_in to = { .sin_family = AF_INET };
static ucontext_t outside, inside;
static const char *failed;
static int fd, ep;

static void wait_for(int turn)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct epoll_event ev;
	fd_set set;

	FD_ZERO(&set);
	FD_SET(fd, &set);
	if (turn % 4 == 0 && poll(&p, 1, 5000) != 1)
		failed = "poll";
	if (turn % 4 == 1 && epoll_wait(ep, &ev, 1, 5000) != 1)
		failed = "epoll_wait";
	if (turn % 4 == 2 && select(fd + 1, &set, NULL, NULL, NULL) != 1)
		failed = "select";
}

static void begin(void)
{
	struct epoll_event ev = { .events = EPOLLIN };
	int one = 1;

	fd = socket(AF_INET, SOCK_STREAM, 0);
	ep = epoll_create1(0);
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)) || epoll_ctl(ep, EPOLL_CTL_ADD, fd, &ev) ||
	    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one)))
		failed = "connect";
}

static void go_on(void)
{
	char text[8] = "1234567";

	for (int turn = 0; turn < TURNS && !failed; turn++) {
		if (send(fd, text, sizeof(text), 0) != sizeof(text))
			failed = "send";
		wait_for(turn);
		if (recv(fd, text, sizeof(text), MSG_WAITALL) != sizeof(text))
			failed = "recv";
		if (turn == TURNS / 2) /* ss shows it from here on */
			usleep(2500000);
	}
	if (shutdown(fd, SHUT_WR) || recv(fd, text, sizeof(text), 0) || close(fd) || close(ep))
		failed = failed ? failed : "close";
}

static void all(void)
{
	begin();
	go_on();
}

static void on_signal(int sig)
{
	(void)sig;
	go_on();
}

static void on_stack(unsigned char *stack, size_t bytes, int handler)
{
	stack_t alternate = { .ss_sp = stack, .ss_size = bytes };
	struct sigaction a = { .sa_handler = on_signal, .sa_flags = SA_ONSTACK };

	if (handler) {
		sigaltstack(&alternate, NULL);
		sigaction(SIGUSR1, &a, NULL);
		begin();
		raise(SIGUSR1);
		return;
	}
	getcontext(&inside);
	inside.uc_stack = alternate;
	inside.uc_link = &outside;
	makecontext(&inside, all, 0);
	swapcontext(&outside, &inside);
}

int main(int argc, char **argv)
{
	size_t bytes = argc == 5 ? (size_t)atoi(argv[2]) : 0, unused = 0;
	unsigned char *stack;

	if (!bytes || bytes % PAGE)
		return 2;
	inet_pton(AF_INET, argv[3], &to.sin_addr);
	to.sin_port = htons((uint16_t)atoi(argv[4]));
	stack = mmap(NULL, bytes + PAGE, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	stack += PAGE;
	if (mprotect(stack, bytes, PROT_READ | PROT_WRITE))
		return 2;
	memset(stack, UNUSED, bytes);
	on_stack(stack, bytes, !strcmp(argv[1], "handler"));
	while (unused < bytes && stack[unused] == UNUSED)
		unused++;
	if (failed)
		printf("%s failed\n", failed);
	else
		printf("fine, %zu used\n", bytes - unused);
	return failed != NULL;
}
