/* Memory of our own: blocks are apart and aligned, keep what they hold, and are there in threads and after a fork. */
#include "check.h"
#include "vmh_base.h"
#include "vmh_heap.h"
#include <limits.h>
#include <pthread.h>
#include <sys/wait.h>

#define BIG (1 << 20)
#define HELD 256
#define FORKS 200

static void fill(unsigned char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		p[i] = (unsigned char)(seed + i * 7);
}

static bool is_filled(const unsigned char *p, size_t n, unsigned seed)
{
	for (size_t i = 0; i < n; i++)
		if (p[i] != (unsigned char)(seed + i * 7))
			return false;
	return true;
}

/* The bytes between two blocks of a size that were cut one after the other; 0: they were not. */
static size_t stride(size_t n)
{
	unsigned char *a = vmh_heap_get(n), *b = vmh_heap_get(n);

	return b > a && b - a < 2 * (long)n + 64 ? (size_t)(b - a) : 0; /* never given back: each call cuts */
}

static void test_classes(void)
{
	unsigned cut = 0;

	for (size_t n = 0; n <= 66000; n += n < 300 ? 1 : 61) {
		unsigned char *a = vmh_heap_get(n), *b = vmh_heap_get(n);

		CHECK(a && b && !((uintptr_t)a % 16) && !((uintptr_t)b % 16), "%zu: %p %p", n, (void *)a, (void *)b);
		fill(a, n, 1);
		fill(b, n, 2);
		CHECK(is_filled(a, n, 1) && is_filled(b, n, 2), "%zu: they overlap", n);
		vmh_heap_free(b);
		CHECK(n > 65536 || vmh_heap_get(n) == b, "%zu: the last one given back is the next", n);
		vmh_heap_free(a);
	}
	for (size_t n = 65; n <= 65536; n += n < 300 ? 1 : 4001) {
		size_t room = stride(n) - 16;

		if (room == (size_t)-16)
			continue;
		cut++;
		CHECK(room >= n && (room - n) * 5 <= room, "%zu bytes in %zu", n, room);
	}
	CHECK(cut > 200, "%u", cut);
}

static void test_zero(void)
{
	unsigned char *p = vmh_heap_get(1000), *q, zeros[1000] = {0};

	fill(p, 1000, 3);
	vmh_heap_free(p);
	q = vmh_heap_zero(10, 100);
	CHECK(q == p && !memcmp(q, zeros, 1000), "used before");
	vmh_heap_free(q);
	q = vmh_heap_zero(1, BIG);
	CHECK(q && !q[0] && !q[BIG - 1], "a mapping");
	vmh_heap_free(q);
	q = vmh_heap_zero(0, 8);
	CHECK(q, "nothing at all has an address, too");
	vmh_heap_free(q);
	errno = 77;
	CHECK(!vmh_heap_zero(SIZE_MAX / 8 + 2, 8) && !vmh_heap_zero(3, SIZE_MAX / 2), "the product is no size");
	CHECK(!vmh_heap_get(SIZE_MAX) && !vmh_heap_get(SIZE_MAX / 2) && !vmh_heap_get((size_t)1 << 50), "no such memory");
	CHECK(errno == 77, "%d", errno);
	vmh_heap_free(NULL);
}

static void test_more(void)
{
	unsigned char *p = vmh_heap_more(NULL, 10), *q;
	size_t had = 10;

	fill(p, had, 4);
	CHECK(vmh_heap_more(p, 16) == p && vmh_heap_more(p, 3) == p && vmh_heap_more(p, 0) == p, "it has the room");
	for (size_t n = 20; n < 4 * BIG; n += n / 3) { /* from class to class, to a mapping, and to bigger ones */
		q = vmh_heap_more(p, n);
		CHECK(q && is_filled(q, had, 4), "%zu to %zu", had, n);
		CHECK(!((uintptr_t)q % 16), "%p", (void *)q);
		fill(q, n, 4);
		p = q;
		had = n;
	}
	errno = 77;
	CHECK(!vmh_heap_more(p, SIZE_MAX) && !vmh_heap_more(p, (size_t)1 << 50) && errno == 77, "no such memory");
	CHECK(is_filled(p, had, 4), "it stays");
	vmh_heap_free(p);
}

/* Whether the page of p is mapped. */
static bool is_there(void *p)
{
	unsigned char in;

	return vmh_sys(SYS_mincore, (uintptr_t)p & ~4095ul, 4096, &in) == 0;
}

static void test_big(void)
{
	unsigned char *p = vmh_heap_get(BIG), *q = vmh_heap_get(65537);

	CHECK(p && q && !((uintptr_t)p % 16), "%p %p", (void *)p, (void *)q);
	fill(p, BIG, 5);
	fill(q, 65537, 6);
	CHECK(is_filled(p, BIG, 5) && is_there(p) && is_there(p + BIG - 1), "all of it");
	vmh_heap_free(p);
	vmh_heap_free(q);
	CHECK(!is_there(p) && !is_there(p + BIG - 1) && !is_there(q + 65536), "given back to the kernel");
}

static _Atomic int over;
static _Atomic unsigned long rounds;

static size_t some_size(unsigned r)
{
	return r % 64 ? (r >> 6) % 2000 : (r >> 6) % 100000;
}

/* Gets and gives blocks of any size. The number of those that were not as it left them. */
static unsigned hammer(unsigned seed, unsigned long n)
{
	struct {
		unsigned char *p;
		size_t n;
	} held[HELD] = {0};
	unsigned r = seed, bad = 0;

	for (unsigned long i = 0; i < n && !atomic_load(&over); i++) {
		unsigned k = (r = r * 1103515245 + 12345) >> 16 & (HELD - 1);

		bad += held[k].p && !is_filled(held[k].p, held[k].n, seed + k);
		vmh_heap_free(held[k].p);
		held[k].n = some_size((r = r * 1103515245 + 12345) >> 8);
		held[k].p = vmh_heap_get(held[k].n);
		bad += !held[k].p;
		if (held[k].p)
			fill(held[k].p, held[k].n, seed + k);
		atomic_fetch_add_explicit(&rounds, 1, memory_order_relaxed);
	}
	for (unsigned k = 0; k < HELD; k++)
		vmh_heap_free(held[k].p);
	return bad;
}

static void *hammering(void *arg)
{
	return (void *)(uintptr_t)hammer((unsigned)(uintptr_t)arg, ULONG_MAX);
}

static void test_threads(void)
{
	pthread_t t[2];
	void *bad;

	atomic_store(&over, 0);
	atomic_store(&rounds, 0);
	for (uintptr_t i = 0; i < 2; i++)
		pthread_create(&t[i], NULL, hammering, (void *)(i + 1));
	while (atomic_load(&rounds) < 200000)
		usleep(1000);
	atomic_store(&over, 1);
	for (int i = 0; i < 2; i++) {
		pthread_join(t[i], &bad);
		CHECK(!bad, "%zu blocks were not as they were left", (size_t)bad);
	}
}

/* Gets and gives without a pause, so that most forks find it in the heap, with the lock. */
static void *churn(void *arg)
{
	while (!atomic_load(&over))
		vmh_heap_free(vmh_heap_get(100));
	return arg;
}

static void test_fork(void)
{
	unsigned char *inherited = vmh_heap_get(500);
	pthread_t t[2];
	int stuck = 0, bad = 0;

	atomic_store(&over, 0);
	fill(inherited, 500, 9);
	for (int i = 0; i < 2; i++)
		pthread_create(&t[i], NULL, churn, NULL);
	for (int i = 0; i < FORKS; i++) {
		int status;
		pid_t pid = fork();

		if (pid == 0) {
			alarm(10);
			vmh_heap_fork_child();
			vmh_heap_free(vmh_heap_more(vmh_heap_get(100), 200));
			bad = !is_filled(inherited, 500, 9);
			vmh_heap_free(inherited);
			_exit(bad || hammer(3, 300) ? 1 : 0);
		}
		waitpid(pid, &status, 0);
		stuck += WIFSIGNALED(status) != 0;
		bad += WIFEXITED(status) && WEXITSTATUS(status) != 0;
		if (stuck)
			break; /* one is enough to wait for */
	}
	atomic_store(&over, 1);
	for (int i = 0; i < 2; i++)
		pthread_join(t[i], NULL);
	CHECK(!stuck && !bad, "%d stuck, %d bad", stuck, bad);
	vmh_heap_free(inherited);
}

int main(void)
{
	size_t used;

	test_classes();
	used = vmh_heap_used();
	test_zero();
	test_more();
	test_big();
	test_threads();
	test_fork();
	CHECK(vmh_heap_used() == used, "%zu, %zu", used, vmh_heap_used());
	return check_result();
}
