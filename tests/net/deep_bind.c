/* deep_bind ADDRESS PORT: rounds with an echo server, then with the calls of a library that was opened with RTLD_DEEPBIND
 * and is found by this program's RUNPATH, then by either process of a fork that libc's own handle is asked for. Says what
 * went wrong, or "fine". As a library (-DPLUGIN): those calls. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <dlfcn.h>
#include <gnu/lib-names.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#ifdef PLUGIN
ssize_t plugin_send(int fd, const void *p, size_t n);
ssize_t plugin_recv(int fd, void *p, size_t n);

ssize_t plugin_send(int fd, const void *p, size_t n)
{
	return send(fd, p, n, MSG_NOSIGNAL);
}

ssize_t plugin_recv(int fd, void *p, size_t n)
{
	return recv(fd, p, n, 0);
}
#else
typedef ssize_t (*send_fn)(int fd, const void *p, size_t n);
typedef ssize_t (*recv_fn)(int fd, void *p, size_t n);

static void failed(const char *what)
{
	perror(what);
	exit(1);
}

static void *symbol(void *library, const char *name)
{
	void *at = dlsym(library, name);

	if (!at)
		failed(name);
	return at;
}

static ssize_t plain_send(int fd, const void *p, size_t n)
{
	return send(fd, p, n, MSG_NOSIGNAL);
}

static ssize_t plain_recv(int fd, void *p, size_t n)
{
	return recv(fd, p, n, 0);
}

static void rounds(int fd, const char *text, send_fn send_by, recv_fn recv_by, const char *what)
{
	char answer[8];

	for (int i = 0; i < 100; i++)
		if (send_by(fd, text, 4) != 4 || recv_by(fd, answer, sizeof(answer)) != 4 || memcmp(answer, text, 4))
			failed(what);
}

int main(int argc, char **argv)
{
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((uint16_t)(argc == 3 ? atoi(argv[2]) : 0)) };
	struct timeval patience = { .tv_sec = 3 };
	void *plugin = dlopen("libdeep_bind.so", RTLD_NOW | RTLD_DEEPBIND), *libc = dlopen(LIBC_SO, RTLD_NOW);
	int fd = socket(AF_INET, SOCK_STREAM, 0), status = 0;
	send_fn send_by;
	recv_fn recv_by;
	pid_t (*fork_by)(void), pid;

	if (!plugin || !libc) {
		fprintf(stderr, "%s\n", dlerror());
		return 1;
	}
	*(void **)&send_by = symbol(plugin, "plugin_send");
	*(void **)&recv_by = symbol(plugin, "plugin_recv");
	*(void **)&fork_by = symbol(libc, "fork");
	inet_pton(AF_INET, argv[1], &to.sin_addr);
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)))
		failed("connect");
	rounds(fd, "main", plain_send, plain_recv, "at first");
	rounds(fd, "plug", send_by, recv_by, "by the library");
	pid = fork_by();
	if (pid < 0)
		failed("fork");
	if (!pid) {
		rounds(fd, "kid.", plain_send, plain_recv, "child");
		_exit(0);
	}
	if (waitpid(pid, &status, 0) != pid || status)
		failed("child");
	rounds(fd, "dad.", plain_send, plain_recv, "parent");
	puts("fine");
	return 0;
}
#endif
