/* Rings of io_uring by libc's syscall(), as libuv and others use them, with a connection that may be on a ring of ours:
 * epoll_ctl by them, and data. Prints what each request answered, then "done", and waits to be killed.
 *
 * uring_calls CASE ADDRESS PORT */
#define _GNU_SOURCE
#include "calls.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/io_uring.h>
#include <poll.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>

#define ENTRIES 8u
#define NO_SQARRAY (1u << 16) /* Linux 6.6 */
#define ROUNDS 300
#define PORT_HERE 7420

static int c = -1;

/* ---- the ring ---- */

static struct io_uring_params params;
static int ring;
static char *queue, *answers, *requests;
static size_t queue_size, answers_size, requests_size, request_size;

static void open_ring(unsigned flags)
{
	memset(&params, 0, sizeof(params));
	params.flags = flags;
	ring = (int)syscall(SYS_io_uring_setup, ENTRIES, &params);
	if (ring < 0 && errno == EINVAL) { /* the kernel is too old for the flags */
		params.flags = 0;
		ring = (int)syscall(SYS_io_uring_setup, ENTRIES, &params);
	}
	if (ring < 0 && (errno == ENOSYS || errno == EPERM)) {
		puts("no io_uring");
		exit(0);
	}
	CHECK(ring >= 0);
	queue_size = params.sq_off.array + params.sq_entries * 4 + 4096;
	answers_size = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
	request_size = params.flags & IORING_SETUP_SQE128 ? 128 : 64;
	requests_size = params.sq_entries * request_size;
	if (queue_size < answers_size)
		queue_size = answers_size;
	queue = mmap(NULL, queue_size, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQ_RING);
	answers = mmap(NULL, answers_size, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_CQ_RING);
	requests = mmap(NULL, requests_size, PROT_READ | PROT_WRITE, MAP_SHARED, ring, IORING_OFF_SQES);
	CHECK(queue != MAP_FAILED && answers != MAP_FAILED && requests != MAP_FAILED);
}

static void close_ring(void)
{
	CHECK(!munmap(queue, queue_size) && !munmap(answers, answers_size) && !munmap(requests, requests_size));
	CHECK(!close(ring));
}

static void push(struct io_uring_sqe q)
{
	uint32_t *tail = (uint32_t *)(queue + params.sq_off.tail), at = *tail & (params.sq_entries - 1);

	/* not in order, where there is an array */
	if (!(params.flags & NO_SQARRAY)) {
		((uint32_t *)(queue + params.sq_off.array))[at] = at ^ 1;
		at ^= 1;
	}
	memcpy(requests + at * request_size, &q, sizeof(q));
	__atomic_store_n(tail, *tail + 1, __ATOMIC_RELEASE);
}

static void enter(unsigned n)
{
	CHECK(syscall(SYS_io_uring_enter, ring, n, n, IORING_ENTER_GETEVENTS, NULL, 0) == (long)n);
}

/* false: there is none */
static bool take_answer(struct io_uring_cqe *is)
{
	uint32_t *head = (uint32_t *)(answers + params.cq_off.head);
	const struct io_uring_cqe *all = (struct io_uring_cqe *)(answers + params.cq_off.cqes);

	if (*head == __atomic_load_n((uint32_t *)(answers + params.cq_off.tail), __ATOMIC_ACQUIRE))
		return false;
	*is = all[*head & (params.cq_entries - 1)];
	__atomic_store_n(head, *head + 1, __ATOMIC_RELEASE);
	return true;
}

static int answer(uint64_t user_data)
{
	struct io_uring_cqe is;

	CHECK(take_answer(&is) && is.user_data == user_data);
	return is.res;
}

static int one(struct io_uring_sqe q)
{
	q.user_data = 0x1234567890ull + q.opcode;
	push(q);
	enter(1);
	return answer(q.user_data);
}

static struct io_uring_sqe control(int ep, int op, int fd, struct epoll_event *ev)
{
	return (struct io_uring_sqe){ .opcode = IORING_OP_EPOLL_CTL, .fd = ep, .len = (uint32_t)op, .off = (uint64_t)fd,
				      .addr = (uintptr_t)ev };
}

/* ---- epoll_ctl ---- */

static void say(const char *what, int r)
{
	printf("%s %d\n", what, r);
}

static void errors(int ep)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } }, alone = { EPOLLIN | EPOLLEXCLUSIVE, { .u64 = 7 } },
			   wrong = { EPOLLIN | EPOLLEXCLUSIVE | EPOLLONESHOT, { .u64 = 7 } };
	int file = open("/proc/self/exe", O_RDONLY), op = 99;

	say("DEL none", one(control(ep, EPOLL_CTL_DEL, c, NULL)));
	say("MOD none", one(control(ep, EPOLL_CTL_MOD, c, &in)));
	say("ADD", one(control(ep, EPOLL_CTL_ADD, c, &in)));
	say("ADD again", one(control(ep, EPOLL_CTL_ADD, c, &in)));
	say("MOD", one(control(ep, EPOLL_CTL_MOD, c, &in)));
	say("MOD EXCLUSIVE", one(control(ep, EPOLL_CTL_MOD, c, &alone)));
	say("op", one(control(ep, op, c, &in)));
	say("no event", one(control(ep, EPOLL_CTL_MOD, c, NULL)));
	say("fd -1", one(control(ep, EPOLL_CTL_ADD, -1, &in)));
	say("set -1", one(control(-1, EPOLL_CTL_ADD, c, &in)));
	say("no set", one(control(c, EPOLL_CTL_ADD, c, &in)));
	say("itself", one(control(ep, EPOLL_CTL_ADD, ep, &in)));
	say("file", one(control(ep, EPOLL_CTL_ADD, file, &in)));
	say("DEL", one(control(ep, EPOLL_CTL_DEL, c, &in)));
	say("ADD ONESHOT EXCLUSIVE", one(control(ep, EPOLL_CTL_ADD, c, &wrong)));
	say("ADD EXCLUSIVE", one(control(ep, EPOLL_CTL_ADD, c, &alone)));
	say("DEL", one(control(ep, EPOLL_CTL_DEL, c, NULL)));
	close(file);
}

/* The one after a request that fails is cancelled, and done after one that does not. */
static void chain(int ep)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };

	for (int i = 0; i < 2; i++) {
		struct io_uring_sqe add = control(ep, EPOLL_CTL_ADD, c, &in), after = { .opcode = IORING_OP_NOP, .user_data = 2 };

		add.flags = IOSQE_IO_LINK;
		add.user_data = 1;
		push(add);
		push(after);
		enter(2);
		say("first", answer(1));
		say("second", answer(2));
	}
	say("DEL", one(control(ep, EPOLL_CTL_DEL, c, NULL)));
}

static void send_one(void)
{
	CHECK(send(c, "x", 1, 0) == 1);
}

static void took_one_of(int fd, int ep, uint64_t data)
{
	struct epoll_event got;
	char x;

	CHECK(epoll_wait(ep, &got, 1, 5000) == 1 && got.events == EPOLLIN && got.data.u64 == data);
	CHECK(recv(fd, &x, 1, 0) == 1 && x == 'x');
}

static void took_one(int ep, uint64_t data)
{
	took_one_of(c, ep, data);
}

/* In and out with each round, several by one call, beside a descriptor of the kernel's. */
static void rounds(int ep)
{
	struct epoll_event in = { EPOLLIN, { 0 } }, none = { 0 }, got, other = { EPOLLIN, { .u64 = 1000000 } };
	int pipes[2];

	CHECK(!pipe(pipes));
	for (uint64_t i = 0; i < ROUNDS; i++) {
		in.data.u64 = i;
		push(control(ep, EPOLL_CTL_ADD, pipes[0], &other));
		push(control(ep, EPOLL_CTL_ADD, c, &none));
		push(control(ep, EPOLL_CTL_MOD, c, &in));
		enter(3);
		CHECK(!answer(0) && !answer(0) && !answer(0));
		send_one();
		took_one(ep, i);
		if (i % 50 == 0) {
			CHECK(!one(control(ep, EPOLL_CTL_MOD, c, &none)));
			send_one();
			CHECK(epoll_wait(ep, &got, 1, 100) == 0);
			in.data.u64 = ~i;
			CHECK(!one(control(ep, EPOLL_CTL_MOD, c, &in)));
			took_one(ep, ~i);
			CHECK(write(pipes[1], "y", 1) == 1 && epoll_wait(ep, &got, 1, 1000) == 1);
			CHECK(got.data.u64 == 1000000 && read(pipes[0], &got, 1) == 1);
		}
		CHECK(!one(control(ep, EPOLL_CTL_DEL, c, NULL)) && !one(control(ep, EPOLL_CTL_DEL, pipes[0], NULL)));
	}
	send_one();
	CHECK(epoll_wait(ep, &got, 1, 100) == 0);
	in.data.u64 = 5;
	CHECK(!one(control(ep, EPOLL_CTL_ADD, c, &in)));
	took_one(ep, 5);
	CHECK(!one(control(ep, EPOLL_CTL_DEL, c, NULL)));
}

static void epoll_by(unsigned flags)
{
	int ep = epoll_create1(0);

	open_ring(flags);
	for (int i = 0; i < 2; i++) {
		errors(ep);
		chain(ep);
		rounds(ep);
	}
}

static void epoll(void)
{
	epoll_by(0);
}

static void epoll_no_array(void)
{
	epoll_by(NO_SQARRAY);
}

static void epoll_long(void)
{
	epoll_by(IORING_SETUP_SQE128);
}

/* Written behind what is handed in: nothing of it is done before it is, too. */
static void written_only(void)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int ep = epoll_create1(0);

	open_ring(0);
	push(control(ep, EPOLL_CTL_ADD, c, &in));
	push(control(ep, EPOLL_CTL_DEL, c, NULL));
	push((struct io_uring_sqe){ .opcode = IORING_OP_CLOSE, .fd = ep });
	for (unsigned i = 0; i < 3; i++) {
		enter(1);
		CHECK(!answer(0));
		send_one();
		if (i == 1) {
			char x;

			CHECK(epoll_wait(ep, &in, 1, 50) == 0 && recv(c, &x, 1, 0) == 1);
			in = (struct epoll_event){ EPOLLIN, { .u64 = 7 } };
			CHECK(!epoll_ctl(ep, EPOLL_CTL_ADD, c, &in));
		} else if (i == 0) {
			took_one(ep, 7);
		}
	}
	CHECK(epoll_wait(ep, &in, 1, 50) == -1 && errno == EBADF);
}

/* A set that would be closed but for what fails before: it tells as ever. */
static void cancelled_close(void)
{
	struct io_uring_sqe fails = { .opcode = IORING_OP_CLOSE, .fd = 5000, .flags = IOSQE_IO_LINK, .user_data = 1 };
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int ep = epoll_create1(0);

	open_ring(0);
	CHECK(!one(control(ep, EPOLL_CTL_ADD, c, &in)));
	push(fails);
	push((struct io_uring_sqe){ .opcode = IORING_OP_CLOSE, .fd = ep, .user_data = 2 });
	enter(2);
	CHECK(answer(1) == -EBADF && answer(2) == -ECANCELED);
	send_one();
	took_one(ep, 7);
}

static void plain_round(int fd)
{
	char x = 0;

	CHECK(send(fd, "p", 1, 0) == 1 && recv(fd, &x, 1, 0) == 1 && x == 'p');
}

/* Memory that is not there, and more than there is of it. */
static void unreadable(void)
{
	int ep = epoll_create1(0), some[2] = { -1, -1 };
	const uint64_t nowhere = 0x10000;

	open_ring(0);
	CHECK(!syscall(SYS_io_uring_register, ring, IORING_REGISTER_FILES, some, 2));
	say("event", one((struct io_uring_sqe){ .opcode = IORING_OP_EPOLL_CTL, .fd = ep, .len = EPOLL_CTL_ADD, .off = (uint64_t)c,
						.addr = nowhere }));
	say("files", one((struct io_uring_sqe){ .opcode = IORING_OP_FILES_UPDATE, .fd = -1, .addr = nowhere, .len = 1 }));
	say("many", one((struct io_uring_sqe){ .opcode = IORING_OP_FILES_UPDATE, .fd = -1, .addr = (uintptr_t)some,
					       .len = 100000000 }));
	plain_round(c);
}

/* ---- data ---- */

static void transfer(uint8_t opcode, int fd, char *p, int n)
{
	for (int have = 0; have < n;) {
		int r = one((struct io_uring_sqe){ .opcode = opcode, .fd = fd, .addr = (uintptr_t)(p + have),
						   .len = (uint32_t)(n - have) });

		CHECK(r > 0);
		have += r;
	}
}

static void data_rounds(int fd)
{
	static char out[3000], in[3000];

	for (int i = 0; i < ROUNDS; i++) {
		int n = 1 + i * 37 % 1400;

		memset(out, i, sizeof(out));
		transfer(IORING_OP_SEND, fd, out, n);
		transfer(IORING_OP_RECV, fd, in, n);
		CHECK(!memcmp(in, out, (size_t)n));
	}
}

static int connected(int type)
{
	int fd = socket(AF_INET, type, 0);

	CHECK(fd >= 0 && !connect(fd, (struct sockaddr *)&server, sizeof(server)));
	return fd;
}

static void data_on(int fd)
{
	open_ring(0);
	plain_round(fd);
	data_rounds(fd);
	plain_round(fd);
}

static void data(void)
{
	data_on(c);
}

static void datagrams(void)
{
	data_on(connected(SOCK_DGRAM));
}

/* Closed by the ring: the peer sees the end, and the number is another's then. */
static void closes(void)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int ep = epoll_create1(0), number = c;

	open_ring(0);
	for (int i = 0; i < 3; i++) {
		CHECK(!one(control(ep, EPOLL_CTL_ADD, c, &in)));
		send_one();
		took_one(ep, 7);
		CHECK(!one((struct io_uring_sqe){ .opcode = IORING_OP_CLOSE, .fd = c }));
		CHECK(epoll_wait(ep, &in, 1, 50) == 0);
		c = connected(SOCK_STREAM);
		CHECK(c == number);
	}
	plain_round(c);
}

static void accept_one(bool waits, bool looks)
{
	struct sockaddr_in here = { .sin_family = AF_INET, .sin_port = htons(PORT_HERE) };
	int listener = socket(AF_INET, SOCK_STREAM, 0), yes = 1, fd;
	struct pollfd in = { listener, POLLIN, 0 };
	char text[5];

	setsockopt(listener, SOL_SOCKET, SO_REUSEADDR, &yes, sizeof(yes));
	CHECK(!bind(listener, (struct sockaddr *)&here, sizeof(here)) && !listen(listener, 5));
	open_ring(0);
	CHECK(!waits || poll(&in, 1, 0) == 0); /* now rings may have it */
	puts("listens");
	fflush(stdout);
	CHECK(!waits || poll(&in, 1, 5000) == 1);
	if (looks)
		CHECK(one((struct io_uring_sqe){ .opcode = IORING_OP_POLL_ADD, .fd = listener, .poll32_events = POLLIN }) == POLLIN);
	fd = one((struct io_uring_sqe){ .opcode = IORING_OP_ACCEPT, .fd = listener });
	CHECK(fd >= 0);
	transfer(IORING_OP_RECV, fd, text, 5);
	transfer(IORING_OP_SEND, fd, text, 5);
}

static void accepts(void)
{
	accept_one(false, false);
}

/* One that waits already. */
static void accepts_waiting(void)
{
	accept_one(true, false);
}

static void polls_listener(void)
{
	accept_one(true, true);
}

/* The set itself is waited for. */
static void polls_set(void)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int ep = epoll_create1(0);

	open_ring(0);
	CHECK(!epoll_ctl(ep, EPOLL_CTL_ADD, c, &in));
	send_one();
	took_one(ep, 7);
	for (int i = 0; i < 20; i++) {
		send_one();
		CHECK(one((struct io_uring_sqe){ .opcode = IORING_OP_POLL_ADD, .fd = ep, .poll32_events = POLLIN }) == POLLIN);
		took_one(ep, 7);
	}
}

/* ---- the life of a ring ---- */

static int rings_in_memory(void)
{
	FILE *maps = fopen("/proc/self/maps", "r");
	char line[512];
	int n = 0;

	while (fgets(line, sizeof(line), maps))
		n += strstr(line, "io_uring") != NULL;
	fclose(maps);
	return n;
}

static void ends(void)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int ep = epoll_create1(0), number, pipes[2], status;

	for (int i = 0; i < 100; i++) { /* more than are known at a time */
		open_ring(0);
		number = ring;
		CHECK(!one(control(ep, EPOLL_CTL_ADD, c, &in)) && !one(control(ep, EPOLL_CTL_DEL, c, NULL)));
		if (i == 50) { /* a child has it, too */
			if (!fork()) {
				int other = connected(SOCK_STREAM);

				CHECK(!one(control(ep, EPOLL_CTL_ADD, other, &in)));
				c = other;
				send_one();
				took_one(ep, 7);
				CHECK(!one(control(ep, EPOLL_CTL_DEL, other, NULL)));
				_exit(7);
			}
			CHECK(wait(&status) > 0 && WEXITSTATUS(status) == 7);
			plain_round(c);
		}
		close_ring();
		CHECK(!rings_in_memory());
	}
	open_ring(0);
	CHECK(ring == number && !one(control(ep, EPOLL_CTL_ADD, c, &in)));
	CHECK(!pipe(pipes) && dup2(pipes[0], ring) == ring);
	CHECK(syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0) == -1 && errno == EOPNOTSUPP);
	send_one();
	took_one(ep, 7);
}

/* ---- threads that hand in by one ring at the same time ---- */

#define THREADS 4

static pthread_mutex_t filling = PTHREAD_MUTEX_INITIALIZER;
static _Atomic int answered[THREADS]; /* 1: not yet; else 0 or -errno */

static void take_answers(void)
{
	struct io_uring_cqe is;

	pthread_mutex_lock(&filling);
	while (take_answer(&is))
		answered[is.user_data] = is.res;
	pthread_mutex_unlock(&filling);
}

static int one_of(int thread, struct io_uring_sqe q)
{
	q.user_data = (uint64_t)thread;
	answered[thread] = 1;
	pthread_mutex_lock(&filling); /* a thread has one at most, so there is room */
	push(q);
	pthread_mutex_unlock(&filling);
	while (answered[thread] == 1) {
		CHECK(syscall(SYS_io_uring_enter, ring, 1, 0, 0, NULL, 0) >= 0);
		take_answers();
	}
	return answered[thread];
}

static void *works(void *arg)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int me = (int)(intptr_t)arg, ep = epoll_create1(0), fd = connected(SOCK_STREAM);

	for (int i = 0; i < ROUNDS * 2; i++) {
		CHECK(!one_of(me, control(ep, EPOLL_CTL_ADD, fd, &in)));
		CHECK(send(fd, "x", 1, 0) == 1);
		took_one_of(fd, ep, 7);
		CHECK(!one_of(me, control(ep, EPOLL_CTL_DEL, fd, NULL)));
	}
	return NULL;
}

static void threads(void)
{
	struct epoll_event in = { EPOLLIN, { .u64 = 7 } };
	int ep = epoll_create1(0);
	pthread_t ids[THREADS];

	open_ring(0);
	CHECK(!one(control(ep, EPOLL_CTL_ADD, c, &in)));
	for (intptr_t i = 0; i < THREADS; i++)
		CHECK(!pthread_create(&ids[i], NULL, works, (void *)i));
	for (int i = 0; i < THREADS; i++)
		CHECK(!pthread_join(ids[i], NULL));
	CHECK(!one(control(ep, EPOLL_CTL_DEL, c, NULL))); /* and waits */
}

static const struct call_case cases[] = {
	{ "epoll", epoll }, { "epoll_no_array", epoll_no_array }, { "epoll_long", epoll_long }, { "data", data },
	{ "datagrams", datagrams }, { "closes", closes }, { "accepts", accepts },
	{ "accepts_waiting", accepts_waiting }, { "polls_listener", polls_listener }, { "polls_set", polls_set },
	{ "ends", ends }, { "threads", threads }, { "written_only", written_only }, { "cancelled_close", cancelled_close },
	{ "unreadable", unreadable }, { 0 },
};

int main(int argc, char **argv)
{
	CHECK(argc == 4 && inet_pton(AF_INET, argv[2], &server.sin_addr) == 1);
	server.sin_port = htons((uint16_t)atoi(argv[3]));
	alarm(90);
	c = connected(SOCK_STREAM);
	run_case(cases, argv[1]);
	return done();
}
