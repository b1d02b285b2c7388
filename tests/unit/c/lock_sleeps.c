/* Under the shim: two threads, each on a processor of its own, set an option of one socket for half a second, so that
 * each finds its lock taken over and over, for less than a microsecond. Prints how often they went to sleep. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

static int fd;
static _Atomic int ready, stop;
static _Atomic long calls, sleeps;

static void *user(void *cpu)
{
	struct rusage before, after;
	int one = 1;
	long n = 0;

	pthread_setaffinity_np(pthread_self(), sizeof(cpu_set_t), cpu);
	ready++;
	while (ready < 2)
		;
	getrusage(RUSAGE_THREAD, &before);
	for (; !stop; n++)
		setsockopt(fd, SOL_SOCKET, SO_RCVLOWAT, &one, sizeof(one));
	getrusage(RUSAGE_THREAD, &after);
	calls += n;
	sleeps += after.ru_nvcsw - before.ru_nvcsw;
	return NULL;
}

int main(void)
{
	cpu_set_t allowed, own[2];
	pthread_t t[2];
	int found = 0;

	sched_getaffinity(0, sizeof(allowed), &allowed);
	for (int cpu = 0; cpu < CPU_SETSIZE && found < 2; cpu++) {
		if (!CPU_ISSET(cpu, &allowed))
			continue;
		CPU_ZERO(&own[found]);
		CPU_SET(cpu, &own[found++]);
	}
	if (found < 2) {
		fputs("two processors are needed\n", stderr);
		return 77;
	}
	fd = socket(AF_INET, SOCK_DGRAM, 0);
	for (int i = 0; i < 2; i++)
		pthread_create(&t[i], NULL, user, &own[i]);
	usleep(500000);
	stop = 1;
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	printf("calls %ld sleeps %ld\n", calls, sleeps);
	return 0;
}
