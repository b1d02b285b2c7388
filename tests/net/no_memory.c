/* no_memory ADDRESS PORT as|data: connections that have been used, then no byte more may be mapped; a fork, and child and
 * parent go on. */
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define CONNECTIONS 10

static int s[CONNECTIONS];

static int bad(int rounds)
{
	int n = 0;

	for (int i = 0; i < CONNECTIONS; i++)
		for (int k = 0; k < rounds; k++) {
			char c = (char)k, d = 0;

			if (send(s[i], &c, 1, MSG_NOSIGNAL) != 1 || recv(s[i], &d, 1, 0) != 1 || c != d) {
				n++;
				break;
			}
		}
	return n;
}

static long kilobytes(const char *what)
{
	FILE *f = fopen("/proc/self/status", "r");
	char line[200];
	long kb = -1;

	while (kb < 0 && fgets(line, sizeof(line), f))
		if (!strncmp(line, what, strlen(what)))
			kb = atol(line + strlen(what));
	fclose(f);
	return kb;
}

int main(int argc, char **argv)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons((unsigned short)atoi(argv[2])) };
	struct timeval patience = { 5, 0 };
	int data = argc > 3 && !strcmp(argv[3], "data"), status, before;
	struct rlimit limit;
	pid_t child;

	inet_aton(argv[1], &a.sin_addr);
	for (int i = 0; i < CONNECTIONS; i++) {
		s[i] = socket(AF_INET, SOCK_STREAM, 0);
		if (connect(s[i], (struct sockaddr *)&a, sizeof(a)))
			return 2;
		setsockopt(s[i], SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof(patience));
	}
	before = bad(100);
	limit.rlim_cur = limit.rlim_max = (rlim_t)kilobytes(data ? "VmData:" : "VmSize:") * 1024;
	setrlimit(data ? RLIMIT_DATA : RLIMIT_AS, &limit);
	child = fork();
	if (child < 0)
		return 3;
	if (!child)
		_exit(bad(20));
	waitpid(child, &status, 0);
	printf("%d before, %d of the child, %d after\n", before, WEXITSTATUS(status), bad(20));
	return 0;
}
