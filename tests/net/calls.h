/* Of programs that make calls with a server, and say what went wrong. */
#ifndef CALLS_H
#define CALLS_H
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#define CHECK(x) \
	do { \
		if (!(x)) { \
			printf("line %d: %s: %s\n", __LINE__, #x, strerror(errno)); \
			fflush(stdout); \
			_exit(1); \
		} \
	} while (0)

static struct sockaddr_in server = { .sin_family = AF_INET };
#endif
