/* A program whose library ends its thread in a destructor, which runs after the shim's: ending_library CALL ADDRESS PORT
 *
 * The thread waits in that call on a connection; the destructor shuts it down, joins, and looks whether anything spins
 * from then on. Once as the library, with -DLIBRARY, and once as the program. */
#include <arpa/inet.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

void library_begins(const char *call, const char *address, const char *port);

#ifdef LIBRARY
static const char *what;
static int fd = -1;
static pthread_t thread;

static void *waits(void *arg)
{
	static char bytes[100000];
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct epoll_event e = { .events = EPOLLIN };
	int set = epoll_create1(0);

	epoll_ctl(set, EPOLL_CTL_ADD, fd, &e);
	if (!strcmp(what, "recv"))
		recv(fd, bytes, 1, 0);
	else if (!strcmp(what, "poll"))
		poll(&p, 1, -1);
	else if (!strcmp(what, "epoll_wait"))
		epoll_wait(set, &e, 1, -1);
	else
		while (send(fd, bytes, sizeof(bytes), MSG_NOSIGNAL) > 0)
			;
	return arg;
}

void library_begins(const char *call, const char *address, const char *port)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(port)) };

	what = call;
	inet_pton(AF_INET, address, &to.sin_addr);
	fd = socket(AF_INET, SOCK_STREAM, 0);
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)) || send(fd, "hello", 5, 0) != 5)
		_exit(1);
	pthread_create(&thread, NULL, waits, NULL);
}

#define NAP_MS 200

__attribute__((destructor)) static void library_ends(void)
{
	struct timespec before, after;

	if (send(fd, "", 0, MSG_NOSIGNAL | MSG_DONTWAIT) < 0 && strcmp(what, "send"))
		_exit(2);
	if (shutdown(fd, SHUT_RDWR))
		_exit(3);
	pthread_join(thread, NULL);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &before);
	usleep(NAP_MS * 1000);
	clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &after);
	if ((after.tv_sec - before.tv_sec) * 1000 + (after.tv_nsec - before.tv_nsec) / 1000000 > NAP_MS / 5)
		_exit(4);
}
#else
int main(int argc, char **argv)
{
	if (argc != 4)
		return 1;
	library_begins(argv[1], argv[2], argv[3]);
	if (write(1, "there\n", 6) != 6)
		return 1;
	sleep(1);
	exit(7);
}
#endif
