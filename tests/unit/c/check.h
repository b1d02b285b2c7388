/* A failed check is printed and counted; the program's exit code says whether there was one. */
#ifndef CHECK_H
#define CHECK_H
#include <stdio.h>

static int checks, failures;

#define CHECK(cond, ...) \
	do { \
		checks++; \
		if (!(cond)) { \
			failures++; \
			printf("%s:%d: %s: ", __FILE__, __LINE__, #cond); \
			printf(__VA_ARGS__); \
			putchar('\n'); \
		} \
	} while (0)

static inline int check_result(void)
{
	printf("%d checks, %d failed\n", checks, failures);
	return failures != 0;
}
#endif
