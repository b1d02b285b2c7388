/* ADDRESS PORT ask|flow THREADS: threads with an own UDP socket each.
 *   ask    one question after the other, without a pause
 *   flow   a question each 0.5 ms, and another thread of each takes the answers
 * A line on stdin: "fork" makes a child, which ends at once; "end" ends it. Says "ready", a line of each fork, and at the end:
 * questions, answers that never came (that were waited for for a second), and that came behind later ones. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CHECK(x) ((x) ? (void)0 : (fprintf(stderr, "%d: %s: %s\n", __LINE__, #x, strerror(errno)), _exit(3)))
#define MAX 16
#define AT_WORK 100
#define PACE_NS 500000

static struct sockaddr_in peer = { .sin_family = AF_INET };
static _Atomic long questions, lost, late;
static _Atomic int at_work;
static _Atomic bool over;

struct asker {
	pthread_t thread;
	int fd;
	_Atomic unsigned asked;
	bool flows;
};

static void question(struct asker *a)
{
	unsigned n = atomic_load(&a->asked) + 1;

	CHECK(send(a->fd, &n, sizeof(n), 0) == sizeof(n));
	atomic_store(&a->asked, n);
	atomic_fetch_add(&questions, 1);
	if (n == AT_WORK)
		atomic_fetch_add(&at_work, 1);
}

/* false: none for a second. */
static bool answer(const struct asker *a, unsigned *n)
{
	if (recv(a->fd, n, sizeof(*n), 0) == sizeof(*n))
		return true;
	CHECK(errno == EAGAIN);
	return false;
}

static void *take(void *arg)
{
	struct asker *a = arg;
	unsigned got = 0, last = 0, n;

	while (!atomic_load(&over) || got < atomic_load(&a->asked)) {
		if (!answer(a, &n) && atomic_load(&over))
			break;
		got++;
		atomic_fetch_add(&late, n < last);
		last = n > last ? n : last;
	}
	atomic_fetch_add(&lost, atomic_load(&a->asked) - got);
	return NULL;
}

static void flow(struct asker *a)
{
	pthread_t taker;

	CHECK(pthread_create(&taker, NULL, take, a) == 0);
	while (!atomic_load(&over)) {
		question(a);
		nanosleep(&(struct timespec){ 0, PACE_NS }, NULL);
	}
	pthread_join(taker, NULL);
}

static void ask(struct asker *a)
{
	unsigned n;

	while (!atomic_load(&over)) {
		question(a);
		while (answer(a, &n) && n != atomic_load(&a->asked))
			atomic_fetch_add(&late, 1);
		atomic_fetch_add(&lost, n != atomic_load(&a->asked));
	}
}

static void *work(void *arg)
{
	const struct timeval second = { 1, 0 };
	const int room = 4 << 20; /* the machine may be busy */
	struct asker *a = arg;

	a->fd = socket(AF_INET, SOCK_DGRAM, 0);
	CHECK(a->fd >= 0 && connect(a->fd, (struct sockaddr *)&peer, sizeof(peer)) == 0);
	CHECK(setsockopt(a->fd, SOL_SOCKET, SO_RCVBUFFORCE, &room, sizeof(room)) == 0);
	CHECK(setsockopt(a->fd, SOL_SOCKET, SO_RCVTIMEO, &second, sizeof(second)) == 0);
	(a->flows ? flow : ask)(a);
	close(a->fd);
	return NULL;
}

int main(int argc, char **argv)
{
	int threads = argc == 5 ? atoi(argv[4]) : 0;
	static struct asker all[MAX];
	char line[16];

	CHECK(threads > 0 && threads <= MAX && inet_pton(AF_INET, argv[1], &peer.sin_addr) == 1);
	peer.sin_port = htons((in_port_t)atoi(argv[2]));
	for (int i = 0; i < threads; i++) {
		all[i].flows = !strcmp(argv[3], "flow");
		CHECK(pthread_create(&all[i].thread, NULL, work, &all[i]) == 0);
	}
	while (atomic_load(&at_work) < threads)
		usleep(1000);
	printf("ready\n");
	fflush(stdout);
	while (fgets(line, sizeof(line), stdin) && !strcmp(line, "fork\n")) {
		pid_t child = fork();

		if (!child)
			_exit(0);
		CHECK(child > 0 && waitpid(child, NULL, 0) == child);
		printf("forked\n");
		fflush(stdout);
	}
	atomic_store(&over, true);
	for (int i = 0; i < threads; i++)
		pthread_join(all[i].thread, NULL);
	printf("%ld %ld %ld\n", atomic_load(&questions), atomic_load(&lost), atomic_load(&late));
	return 0;
}
