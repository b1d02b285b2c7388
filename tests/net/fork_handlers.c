/* fork_handlers WHO WHAT ADDRESS PORT: forks, while a handler of pthread_atfork(), WHO (prepare, parent, child), does WHAT
 * with an echo server: "connect"; "option", which a connection on a ring goes home for; "first": no socket was made
 * before; "lock": prepare takes a mutex under which a thread connects, parent and child give it back. Each process uses a
 * new connection afterwards. Says "fine". */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PATIENCE 20 /* seconds */
#define FORKS 40

static const char *who, *what;
static struct sockaddr_in server = { .sin_family = AF_INET };
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static atomic_bool stop;
static atomic_int calls;

static void failed(const char *at)
{
	perror(at);
	_exit(1);
}

static void use(int with_option)
{
	struct timeval late = { .tv_sec = PATIENCE / 2 };
	int fd = socket(AF_INET, SOCK_STREAM, 0), one = 1;
	char text[4];

	if (connect(fd, (struct sockaddr *)&server, sizeof(server)))
		failed("connect");
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &late, sizeof(late));
	for (int i = 0; i < 10; i++) {
		if (send(fd, "echo", 4, MSG_NOSIGNAL) != 4 || recv(fd, text, 4, MSG_WAITALL) != 4 || memcmp(text, "echo", 4))
			failed("echo");
		if (with_option && i == 5 && setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one)))
			failed("option");
	}
	close(fd);
}

static void handle(const char *in)
{
	calls++;
	if (!strcmp(what, "lock")) {
		if (!strcmp(in, "prepare"))
			pthread_mutex_lock(&lock);
		else
			pthread_mutex_unlock(&lock);
	} else if (!strcmp(in, who)) {
		use(!strcmp(what, "option"));
	}
}

static void prepare(void)
{
	handle("prepare");
}

static void parent(void)
{
	handle("parent");
}

static void child(void)
{
	handle("child");
}

static void *connects(void *arg)
{
	while (!stop) {
		pthread_mutex_lock(&lock);
		use(1);
		pthread_mutex_unlock(&lock);
		usleep(1000);
	}
	return arg;
}

static void fork_once(void)
{
	int status;
	pid_t pid = fork();

	if (pid < 0)
		failed("fork");
	if (!pid) {
		alarm(PATIENCE);
		use(0);
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status)
		failed("child");
}

int main(int argc, char **argv)
{
	pthread_t thread;

	if (argc != 5)
		return 2;
	who = argv[1];
	what = argv[2];
	inet_pton(AF_INET, argv[3], &server.sin_addr);
	server.sin_port = htons((uint16_t)atoi(argv[4]));
	alarm(PATIENCE);
	pthread_atfork(prepare, parent, child);
	if (!strcmp(what, "lock")) {
		pthread_create(&thread, NULL, connects, NULL);
		for (int i = 0; i < FORKS; i++)
			fork_once();
		stop = true;
		pthread_join(thread, NULL);
	} else {
		if (strcmp(what, "first"))
			use(0);
		fork_once();
	}
	use(0);
	puts(calls ? "fine" : "no handler was called");
	return 0;
}
