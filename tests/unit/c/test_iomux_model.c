/* The kernel as the model: the same random calls on sets of ours, whose sockets get datagrams from the
 * ring or from the kernel, and on plain kernel sets. Return values and events must be the same. */
#include "iomux_fake.h"
#include <fcntl.h>

#define N 4            /* sockets, each with up to two fds */
#define SETS 2
#define OURS 200       /* fixed fd numbers, so that both sides reuse them alike */
#define THEIRS 300

static unsigned seed;
static bool open_[N][2];
static unsigned queued[N];
static bool ring[N];   /* where the queued datagrams are */
static uint32_t flags[SETS][N][2]; /* as accepted last */

static bool verbose;
#define SAY(...) (verbose ? (void)fprintf(stderr, __VA_ARGS__) : (void)0)

static unsigned pick(unsigned n)
{
	return (unsigned)rand_r(&seed) % n;
}

static int number(int base, int i, int k)
{
	return base + 2 * i + k;
}

static void open_socket(int i)
{
	int fd = fake_sock(true), n = number(OURS, i, 0);

	EQUAL(dup2(fd, n), n);
	vmh_fd_dup(fd, n);
	fake_close(fd);
	fd = fake_kernel_sock();
	EQUAL(dup2(fd, number(THEIRS, i, 0)), number(THEIRS, i, 0));
	close(fd);
	open_[i][0] = true;
	queued[i] = 0;
}

static void open_dup(int i, int k)
{
	EQUAL(dup2(number(OURS, i, !k), number(OURS, i, k)), number(OURS, i, k));
	vmh_fd_dup(number(OURS, i, !k), number(OURS, i, k));
	EQUAL(dup2(number(THEIRS, i, !k), number(THEIRS, i, k)), number(THEIRS, i, k));
	open_[i][k] = true;
	SAY("dup socket %d to fd %d\n", i, k);
}

static void close_one(int i, int k)
{
	fake_close(number(OURS, i, k));
	close(number(THEIRS, i, k));
	open_[i][k] = false;
	SAY("close socket %d fd %d\n", i, k);
}

static void random_ctl(int ours, int theirs, int set)
{
	static const uint32_t bits[] = { EPOLLIN, EPOLLOUT, EPOLLRDNORM, EPOLLPRI, EPOLLET, EPOLLONESHOT, EPOLLRDHUP };
	int i = (int)pick(N), k = (int)pick(2), op = 1 + (int)pick(3), r;
	struct epoll_event ev = { .events = pick(4) ? EPOLLIN : 0 };

	for (unsigned b = 0; b < sizeof(bits) / sizeof(*bits); b++)
		if (pick(3) == 0)
			ev.events |= bits[b];
	if (pick(20) == 0)
		ev.events |= EPOLLEXCLUSIVE;
	ev.data.u64 = (uint64_t)number(0, i, k);
	r = epoll_ctl(theirs, op, number(THEIRS, i, k), &ev) < 0 ? -errno : 0;
	EQUAL(ctl(ours, op, number(OURS, i, k), ev.events, ev.data.u64), r);
	SAY("ctl set %d op %d socket %d fd %d events %#x: %d\n", set, op, i, k, ev.events, r);
	if (r == 0)
		flags[set][i][k] = ev.events;
}

/* An edge from the kernel brings along all bits that are up, one from the ring only its own. */
static int sum_up(int set, const struct epoll_event *e, int n, uint32_t *got)
{
	int entries = 0;

	memset(got, 0, 2 * N * sizeof(*got));
	for (int j = 0; j < n; j++) {
		unsigned at = (unsigned)e[j].data.u64;
		uint32_t bits = e[j].events;

		CHECK(at < 2 * N);
		if ((flags[set][at / 2][at % 2] & (EPOLLET | EPOLLONESHOT)) == EPOLLET)
			bits &= ~(uint32_t)EPOLLOUT;
		if (!bits)
			continue;
		EQUAL(got[at], 0); /* one entry per fd */
		got[at] = bits;
		entries++;
	}
	return entries;
}

static void compare(int ours, int theirs, int set)
{
	struct epoll_event a[16], b[16];
	uint32_t got[2 * N], want[2 * N];
	int na, nb;

	na = sum_up(set, a, wait_ep(ours, a, 16, 0, NULL), got);
	nb = sum_up(set, b, epoll_wait(theirs, b, 16, 0), want);
	for (int at = 0; at < 2 * N; at++)
		if (got[at] != want[at])
			fprintf(stderr, "set %d socket %d fd %d flags %#x: %#x, the kernel says %#x\n", set, at / 2, at % 2,
				flags[set][at / 2][at % 2], got[at], want[at]);
	SAY("look at set %d: %d\n", set, na);
	EQUAL(na, nb);
	EQUAL(memcmp(got, want, sizeof(got)), 0);
}

static void rx(int i)
{
	int k = !open_[i][0];

	if (!open_[i][k])
		return;
	/* With datagrams in both queues an edge can be eaten by reading the other one: who reads until EAGAIN, as
	 * edges demand, sees no difference. So the source changes only while nothing is queued. */
	if (!queued[i])
		ring[i] = pick(4);
	queued[i]++;
	if (ring[i])
		fake_ring_rx(number(OURS, i, k));
	else
		fake_os_rx(number(OURS, i, k));
	SAY("rx socket %d by %s\n", i, ring[i] ? "ring" : "kernel");
	vmh_rings_poll(16);
	fake_os_rx(number(THEIRS, i, k));
}

static void take(int i)
{
	int k = !open_[i][0];
	char c;

	if (!open_[i][k])
		return;
	SAY("take socket %d\n", i);
	if (!queued[i])
		return;
	queued[i]--;
	EQUAL(recv(number(THEIRS, i, k), &c, 1, MSG_DONTWAIT), 1);
	if (ring[i])
		CHECK(fake_take(number(OURS, i, k)));
	else
		fake_os_take(number(OURS, i, k));
}

static void one_run(int steps)
{
	int ours[SETS], theirs[SETS];

	for (int s = 0; s < SETS; s++) {
		ours[s] = fake_epoll();
		theirs[s] = epoll_create1(0);
	}
	for (int step = 0; step < steps; step++) {
		int i = (int)pick(N), k = (int)pick(2), s = (int)pick(SETS);

		switch (pick(40)) {
		case 0:
			if (!open_[i][0] && !open_[i][1])
				open_socket(i);
			else if (!open_[i][k])
				open_dup(i, k);
			break;
		case 1:
			if (open_[i][k] && pick(2))
				close_one(i, k);
			break;
		case 2 ... 11:
			random_ctl(ours[s], theirs[s], s);
			break;
		case 12 ... 19:
			rx(i);
			break;
		case 20 ... 27:
			take(i);
			break;
		default:
			compare(ours[s], theirs[s], s);
		}
	}
	for (int i = 0; i < N; i++)
		for (int k = 0; k < 2; k++)
			if (open_[i][k])
				close_one(i, k);
	for (int s = 0; s < SETS; s++) {
		EQUAL(vmh_ep_of(atomic_load(&vmh_fdtab[ours[s]]))->nitems, 0);
		fake_close(ours[s]);
		close(theirs[s]);
	}
}

void t_model(void)
{
	verbose = getenv("IOMUX_VERBOSE") != NULL;
	for (int run = 0; run < 40; run++) {
		seed = (unsigned)run;
		memset(flags, 0, sizeof(flags));
		one_run(iomux_races / 10);
	}
}
