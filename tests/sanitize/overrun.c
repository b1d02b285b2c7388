/* Asks the echo for 64 bytes and says that a heap buffer of 16 has room for them: the copy inside the shim overruns it.
 * usage: overrun IP PORT */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <unistd.h>

int main(int argc, char **argv)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct timeval patience = { .tv_sec = 5 };
	char *small = malloc(16), text[64] = "x";
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	if (argc != 3 || !small)
		return 2;
	setsockopt(fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	to.sin_port = htons((unsigned short)atoi(argv[2]));
	inet_pton(AF_INET, argv[1], &to.sin_addr);
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)))
		return 2;
	for (int i = 0; i < 1000; i++) { /* the first ones may come by the kernel */
		volatile size_t room = i < 900 ? 0 : sizeof(text);

		send(fd, text, sizeof(text), 0);
		if (recv(fd, small, room, 0) < 0)
			return fprintf(stderr, "no answer to question %d\n", i), 4;
	}
	puts("nobody noticed");
	free(small);
	close(fd);
	return 0;
}
