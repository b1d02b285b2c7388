/* A program that ends while its threads open and end connections: ending_begins HOW connect|accept ADDRESS PORT FILE
 *
 * Each has 8 bytes and 3000 bytes sent by the program, or 8 bytes received and 3000 sent. The first thread connects without
 * blocking. FILE has 256 numbers: of each thread the connections that it has ended, and when the last is written the
 * program ends. A call that fails is told of. */
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <unistd.h>

#define MOST 256
#define THREADS 3

static struct sockaddr_in at = { .sin_family = AF_INET };
static uint64_t *ended;
static int listener = -1;
static char bytes[3000];

static int check(const char *call, ssize_t r, ssize_t wanted)
{
	if (r != wanted)
		printf("failed: %s %zd %s\n", call, r, strerror(errno));
	return r == wanted;
}

static int opens(int fd)
{
	return check("connect", connect(fd, (struct sockaddr *)&at, sizeof(at)), 0);
}

static int opens_later(int fd)
{
	struct pollfd p = { .fd = fd, .events = POLLOUT };

	fcntl(fd, F_SETFL, O_NONBLOCK);
	if (!connect(fd, (struct sockaddr *)&at, sizeof(at)))
		return 1;
	return check("connect without blocking", errno, EINPROGRESS) && check("poll", poll(&p, 1, -1), 1) &&
	       check("poll's events", p.revents, POLLOUT) && opens(fd);
}

static int next(int later)
{
	int fd = listener < 0 ? socket(AF_INET, SOCK_STREAM, 0) : accept(listener, NULL, NULL), good;

	if (listener >= 0)
		good = check("accept", fd >= 0, 1) && check("recv", recv(fd, (char[8]){ 0 }, 8, MSG_WAITALL), 8);
	else
		good = (later ? opens_later(fd) : opens(fd)) && check("send", send(fd, bytes, 8, MSG_NOSIGNAL), 8);
	if (!good)
		close(fd);
	return good ? fd : -1;
}

static void *one_after_the_other(void *number)
{
	uint64_t *mine = number;
	int fd;

	for (;;) {
		fd = next(mine == ended);
		if (fd < 0)
			continue;
		check("the last send", send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL), sizeof(bytes));
		if (check("close", close(fd), 0))
			++*mine;
	}
	return NULL;
}

static void end(const char *how)
{
	if (!strcmp(how, "exit"))
		exit(7);
	if (!strcmp(how, "_exit"))
		_exit(7);
	if (!strcmp(how, "TERM"))
		kill(getpid(), SIGTERM);
}

int main(int argc, char **argv)
{
	int file = open(argv[argc - 1], O_RDWR | O_CREAT, 0600), i;
	pthread_t t;

	if (argc != 6 || ftruncate(file, MOST * 8) || inet_pton(AF_INET, argv[3], &at.sin_addr) != 1)
		return 1;
	at.sin_port = htons((uint16_t)atoi(argv[4]));
	ended = mmap(NULL, MOST * 8, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
	setvbuf(stdout, NULL, _IONBF, 0);
	if (!strcmp(argv[2], "accept")) {
		listener = socket(AF_INET, SOCK_STREAM, 0);
		setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
		if (bind(listener, (struct sockaddr *)&at, sizeof(at)) || listen(listener, MOST))
			return 1;
	}
	for (i = 0; i < THREADS; i++)
		pthread_create(&t, NULL, one_after_the_other, &ended[i]);
	puts("there");
	while (!__atomic_load_n(&ended[MOST - 1], __ATOMIC_SEQ_CST))
		usleep(1000);
	end(argv[1]);
	return 7;
}
