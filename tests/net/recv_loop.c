/* How many calls of recv() until one finds a datagram, or finds none: in C, as an interpreter's loop is interrupted
 * before it has made thousands of them. A library for ctypes. */
#include <stdbool.h>
#include <sys/socket.h>

int calls_until(int fd, bool found)
{
	char byte;
	int n = 1;

	while ((recv(fd, &byte, 1, MSG_DONTWAIT) >= 0) != found)
		n++;
	return n;
}
