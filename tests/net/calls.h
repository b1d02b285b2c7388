/* Of programs that make calls with a server, and say what went wrong. */
#ifndef CALLS_H
#define CALLS_H
#include <errno.h>
#include <netinet/in.h>
#include <stdbool.h>
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

struct call_case {
	const char *name; /* NULL: there are no more */
	void (*run)(void);
};

/* false: there is no such one */
static inline bool run_case(const struct call_case *cases, const char *name)
{
	while (cases->name && strcmp(cases->name, name))
		cases++;
	if (cases->name)
		cases->run();
	return cases->name;
}

/* Says that it is done, and waits to be killed. */
static inline int done(void)
{
	puts("done");
	fflush(stdout);
	pause();
	return 0;
}
#endif
