/* A TCP connection on loopback, for programs that know _GNU_SOURCE. */
#include <arpa/inet.h>
#include <sys/socket.h>
#include <unistd.h>

/* flags: of accept4(), for *accepted */
static void tcp_pair(int *client, int *accepted, int flags)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = htonl(INADDR_LOOPBACK) };
	socklen_t len = sizeof(a);
	int l = socket(AF_INET, SOCK_STREAM, 0);

	bind(l, (struct sockaddr *)&a, sizeof(a));
	listen(l, 1);
	getsockname(l, (struct sockaddr *)&a, &len);
	*client = socket(AF_INET, SOCK_STREAM, 0);
	connect(*client, (struct sockaddr *)&a, sizeof(a));
	*accepted = accept4(l, NULL, NULL, flags);
	close(l);
}
