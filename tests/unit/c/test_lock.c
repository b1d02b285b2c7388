/* The lock under threads: nothing is lost, nobody sleeps for ever. */
#include "check.h"
#include "vmh_lock.h"
#include <pthread.h>
#include <sched.h>
#include <sys/wait.h>
#include <unistd.h>

#define THREADS 6
#define ROUNDS 40000

static struct vmh_lock lock;
static uint64_t guarded[2];
static int rounds = ROUNDS;
static int inside, intruders;

static void *count(void *arg)
{
	unsigned spin = (unsigned)(uintptr_t)arg;

	for (int i = 0; i < rounds; i++) {
		if (i % 3 || !vmh_trylock(&lock))
			vmh_lock(&lock);
		intruders += inside++ != 0;
		guarded[0]++;
		for (volatile unsigned j = 0; j < spin; j++)
			;
		if (i % 20000 == 1) { /* a preempted holder: the others must sleep */
			struct timespec t = {0, 2000000};

			nanosleep(&t, NULL);
		}
		guarded[1]++;
		inside--;
		vmh_unlock(&lock);
	}
	return NULL;
}

static _Atomic int yields;

int sched_yield(void) /* libc's, counted */
{
	yields++;
	return (int)syscall(SYS_sched_yield);
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
static void test_sleep(int mode)
{
	struct timespec cpu, hold = {0, 200000000};
	pthread_t t;

	vmh_lock(&lock);
	pthread_create(&t, NULL, wait_asleep, &cpu);
	nanosleep(&hold, NULL);
	vmh_unlock(&lock);
	pthread_join(t, NULL);
	CHECK((mode == 3) == (yields != 0), "mode %d: %d yields", mode, yields);
	yields = 0;
	CHECK(cpu.tv_sec == 0 && cpu.tv_nsec < 50000000, "%ld ns of CPU burnt in 200 ms of waiting", cpu.tv_nsec);
}

static _Atomic int trying;
static uint64_t began_ns;

static uint64_t ns(void)
{
	struct timespec t;

	clock_gettime(CLOCK_MONOTONIC, &t);
	return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *wait_once(void *arg)
{
	began_ns = ns();
	atomic_store(&trying, 1);
	vmh_lock(&lock);
	vmh_unlock(&lock);
	return arg;
}

/* How long who waits spins before it sleeps, at least. */
static uint64_t spun(void)
{
	uint64_t least = UINT64_MAX, took, end = ns() + 1000000000;
	pthread_t t;

	for (int i = 0; i < 100 && ns() < end; i++) {
		atomic_store(&trying, 0);
		vmh_lock(&lock);
		pthread_create(&t, NULL, wait_once, NULL);
		while (atomic_load_explicit(&lock.word, memory_order_relaxed) != 2)
			;
		took = ns() - began_ns;
		vmh_unlock(&lock);
		pthread_join(t, NULL);
		if (took < least)
			least = took;
	}
	return least;
}

static void test_taken(void)
{
	CHECK(vmh_trylock(&lock), "a new lock is free");
	CHECK(!vmh_trylock(&lock), "taken twice");
	vmh_unlock(&lock);
	CHECK(lock.word == 0 && lock.own == 0, "free again");
}

/* With this thread among the others, which is the owner where there is one. */
static void test_threads(void)
{
	pthread_t t[THREADS];

	guarded[0] = guarded[1] = 0;
	for (uintptr_t i = 1; i < THREADS; i++)
		pthread_create(&t[i], NULL, count, (void *)(i * 10));
	count(NULL);
	for (int i = 1; i < THREADS; i++)
		pthread_join(t[i], NULL);
	CHECK(intruders == 0, "%d times two holders", intruders);
	CHECK(guarded[0] == (uint64_t)THREADS * rounds && guarded[1] == guarded[0], "%ju and %ju", (uintmax_t)guarded[0],
	      (uintmax_t)guarded[1]);
	CHECK(lock.word == 0 && lock.own == 0, "free at the end, not %u, %u", lock.word, lock.own);
}

static void *word_while_owned(void *arg)
{
	struct vmh_lock *l = arg;

	return (void *)(uintptr_t)(vmh_trylock(l) ? 1 : l->word == 0 ? 0 : 2);
}

/* The owner leaves the word alone, and the others are kept out all the same. */
static void test_owner(void)
{
	pthread_t t;
	void *got;

	yields = 0;
	CHECK(vmh_lock_set_mode(0), "membarrier");
	test_taken();
	vmh_lock(&lock);
	CHECK(lock.word == 0 && lock.own == 1, "word %u, own %u", lock.word, lock.own);
	pthread_create(&t, NULL, word_while_owned, &lock);
	pthread_join(t, &got);
	CHECK(got == NULL, "another thread: %p", got);
	vmh_unlock(&lock);
	test_sleep(0);
}

static void *take_often(void *arg)
{
	vmh_held.internal = arg != NULL;
	for (int i = 0; i < 2000; i++) {
		vmh_lock(&lock);
		vmh_unlock(&lock);
	}
	return NULL;
}

/* One that other threads of the program take the lock from over and over is none any more; our own thread may. */
static void test_owner_no_more(void)
{
	struct vmh_lock held = {0};
	pthread_t t;

	yields = 0;
	pthread_create(&t, NULL, take_often, &lock);
	pthread_join(t, NULL);
	CHECK(vmh_lock_biased && vmh_held.owner, "the internal thread ended it");
	vmh_lock(&held);
	pthread_create(&t, NULL, take_often, NULL);
	pthread_join(t, NULL);
	CHECK(vmh_lock_biased && vmh_held.owner && held.own, "ended while the owner was inside");
	vmh_unlock(&held);
	CHECK(held.own == 0 && held.word == 0, "not given back: own %u, word %u", held.own, held.word);
	pthread_create(&t, NULL, take_often, NULL);
	pthread_join(t, NULL);
	CHECK(!vmh_lock_biased && !vmh_held.owner, "still the owner: %d, %d", vmh_lock_biased, vmh_held.owner);
	test_taken();
	test_sleep(1);
	rounds = 400;
	for (int i = 0; i < 100; i++) { /* the turn at another moment each time */
		CHECK(vmh_lock_set_mode(0) && vmh_held.owner, "again");
		test_threads();
	}
	rounds = ROUNDS;
	CHECK(vmh_lock_set_mode(0), "again");
	test_threads();
	CHECK(!vmh_lock_biased, "many threads, and still an owner");
}

static _Atomic int tries;

static void *waits(void *arg)
{
	tries++;
	vmh_lock(arg);
	vmh_unlock(arg);
	return NULL;
}

/* A fork while the forking thread, here the owner, has the lock and another one waits for it. */
static void test_fork(void)
{
	struct timespec settle = {0, 50000000};
	int status = 0;
	pthread_t t;

	tries = 0;
	vmh_lock(&lock);
	pthread_create(&t, NULL, waits, &lock);
	while (!tries)
		sched_yield();
	nanosleep(&settle, NULL);
	pid_t pid = fork();
	if (!pid) {
		alarm(5);
		vmh_lock_fork_child();
		vmh_unlock_fork_child(&lock);
		vmh_lock(&lock);
		vmh_unlock(&lock);
		_exit(vmh_held.depth ? 1 : 0);
	}
	vmh_unlock(&lock);
	pthread_join(t, NULL);
	waitpid(pid, &status, 0);
	CHECK(status == 0, "the child ended with %#x", status);
}

static void *own_and_end(void *arg)
{
	CHECK(vmh_lock_set_mode(0), "membarrier");
	return arg;
}

/* Nobody writes into the memory of an owner that has ended: only the main thread's stays. */
static void test_owner_ends(void)
{
	pthread_t t;

	pthread_create(&t, NULL, own_and_end, NULL);
	pthread_join(t, NULL);
	for (int i = 0; i < 3; i++) {
		pthread_create(&t, NULL, take_often, NULL);
		pthread_join(t, NULL);
	}
	take_often(NULL);
	CHECK(lock.word == 0 && lock.own == 0 && vmh_lock_biased, "word %u, own %u", lock.word, lock.own);
}

/* 2 sleeps at once, 1 and 3 wait a while before. */
static void test_patience(void)
{
	uint64_t took[4] = { 0 };

	for (int tries = 0; tries < 5 && (took[1] <= 3 * took[2] || took[3] <= 3 * took[2]); tries++) {
		for (int mode = 1; mode <= 3; mode++) { /* on a machine that is busy a look may come late */
			vmh_lock_set_mode(mode);
			took[mode] = spun();
		}
	}
	CHECK(took[1] > 3 * took[2] && took[3] > 3 * took[2], "%ju, %ju and %ju ns", (uintmax_t)took[1], (uintmax_t)took[2],
	      (uintmax_t)took[3]);
	yields = 0;
}

static _Atomic int enough;

/* As a thread that polls: hardly out of the lock, and in again. */
static void *hogs(void *arg)
{
	while (!enough) {
		if (arg)
			vmh_lock(&lock);
		else if (!vmh_trylock(&lock))
			continue;
		for (volatile unsigned i = 0; i < 20000; i++)
			;
		vmh_unlock(&lock);
	}
	return arg;
}

/* More threads than processors that never sleep: who does has the lock in his turn. */
static void test_nobody_starves(void)
{
	struct timespec nap = {0, 100000};
	pthread_t t[4];
	uint64_t longest = 0;

	enough = 0;
	for (intptr_t i = 0; i < 4; i++)
		pthread_create(&t[i], NULL, hogs, (void *)(i % 2));
	for (int i = 0; i < 10; i++) {
		uint64_t since = vmh_now_ns(), took;

		vmh_lock(&lock);
		took = vmh_now_ns() - since;
		vmh_unlock(&lock);
		longest = took > longest ? took : longest;
		nanosleep(&nap, NULL);
	}
	enough = 1;
	for (int i = 0; i < 4; i++)
		pthread_join(t[i], NULL);
	CHECK(longest < 500000000, "waited for %ju us", (uintmax_t)longest / 1000);
	CHECK(lock.word == 0, "free at the end, not %u", lock.word);
	yields = 0;
}

/* The one that a lock is kept for is stopped, or never has a processor. */
static void test_kept_in_vain(void)
{
	uint64_t since = vmh_now_ns();
	int tries = 0;

	vmh_held.refused_ns = 0; /* of another test */
	vmh_held.refused_last = since;
	lock.word = VMH_LOCK_KEPT;
	while (!vmh_trylock(&lock) && tries < 1000000)
		tries++;
	CHECK(vmh_now_ns() - since >= 10000000, "kept for %ju us", (uintmax_t)(vmh_now_ns() - since) / 1000);
	CHECK(tries > 0 && tries < 1000000 && yields == tries, "%d tries, %d yields", tries, yields);
	vmh_unlock(&lock);
	lock.word = VMH_LOCK_KEPT;
	vmh_lock(&lock);
	vmh_unlock(&lock);
	vmh_lock(&lock); /* handed on, to nobody */
	vmh_unlock(&lock);
	CHECK(lock.word == 0, "free at the end, not %u", lock.word);
	CHECK(vmh_now_ns() - since < 1000000000, "%ju us", (uintmax_t)(vmh_now_ns() - since) / 1000);
	yields = 0;
}

int main(void)
{
	test_patience();
	for (int mode = 1; mode <= 3; mode++) {
		CHECK(vmh_lock_set_mode(mode), "mode %d", mode);
		test_taken();
		test_sleep(mode);
		test_threads();
		yields = 0;
		test_nobody_starves();
		test_kept_in_vain();
	}
	test_owner();
	test_fork();
	test_owner_no_more();
	vmh_held = (struct vmh_held){ 0 };
	test_owner_ends();
	return check_result();
}
