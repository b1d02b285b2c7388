/* The lock under threads: nothing is lost, nobody sleeps for ever. */
#include "check.h"
#include "vmh_lock.h"
#include <pthread.h>

#define THREADS 6
#define ROUNDS 100000

static struct vmh_lock lock;
static uint64_t guarded[2];
static int inside, intruders;

static void *count(void *arg)
{
	unsigned spin = (unsigned)(uintptr_t)arg;

	for (int i = 0; i < ROUNDS; i++) {
		if (i % 3 || !vmh_trylock(&lock))
			vmh_lock(&lock);
		intruders += inside++ != 0;
		guarded[0]++;
		for (volatile unsigned j = 0; j < spin; j++)
			;
		if (i % 20000 == 0) { /* a preempted holder: the others must sleep */
			struct timespec t = {0, 2000000};

			nanosleep(&t, NULL);
		}
		guarded[1]++;
		inside--;
		vmh_unlock(&lock);
	}
	return NULL;
}

static void *wait_asleep(void *arg)
{
	struct timespec *cpu = arg;

	vmh_lock(&lock);
	clock_gettime(CLOCK_THREAD_CPUTIME_ID, cpu);
	vmh_unlock(&lock);
	return NULL;
}

/* Who waits for long sleeps. */
static void test_sleep(void)
{
	struct timespec cpu, hold = {0, 200000000};
	pthread_t t;

	vmh_lock(&lock);
	pthread_create(&t, NULL, wait_asleep, &cpu);
	nanosleep(&hold, NULL);
	vmh_unlock(&lock);
	pthread_join(t, NULL);
	CHECK(cpu.tv_sec == 0 && cpu.tv_nsec < 50000000, "%ld ns of CPU burnt in 200 ms of waiting", cpu.tv_nsec);
}

int main(void)
{
	pthread_t t[THREADS];

	CHECK(vmh_trylock(&lock), "a new lock is free");
	CHECK(!vmh_trylock(&lock), "taken twice");
	vmh_unlock(&lock);
	CHECK(lock.word == 0, "free again");
	test_sleep();
	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&t[i], NULL, count, (void *)(i * 10));
	for (int i = 0; i < THREADS; i++)
		pthread_join(t[i], NULL);
	CHECK(intruders == 0, "%d times two holders", intruders);
	CHECK(guarded[0] == THREADS * ROUNDS && guarded[1] == guarded[0], "%ju and %ju", (uintmax_t)guarded[0],
	      (uintmax_t)guarded[1]);
	CHECK(lock.word == 0, "free at the end, not %u", lock.word);
	return check_result();
}
