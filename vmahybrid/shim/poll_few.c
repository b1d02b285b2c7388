/* poll(2) refuses more entries than RLIMIT_NOFILE (EINVAL), and what we wait for comes to what the program waits for:
 * sandboxes lower that limit to 0 once all is open. select(2) looks at what is open. */
#include "vmh_iomux_int.h"
#include "vmh_lock.h"
#include "vmh_wait.h"
#include <fcntl.h>
#include <pthread.h>

#define WORD 64u
#define FEW_WORDS 17u /* numbers up to 1087 */
#define SEEN (POLLIN | POLLRDNORM | POLLOUT | POLLWRNORM | POLLPRI) /* of one that waits for others select(2) tells nothing, */
#define LOOK_NS 10000000 /* so it is looked at in turn */

struct sets {
	uint64_t *in, *out, *pri;
	unsigned n; /* numbers */
};

static uint64_t bit(int fd)
{
	return 1ull << (unsigned)fd % WORD;
}

static void put(const struct sets *s, const struct pollfd *p)
{
	unsigned word = (unsigned)p->fd / WORD;

	if (p->events & (POLLIN | POLLRDNORM))
		s->in[word] |= bit(p->fd);
	if (p->events & (POLLOUT | POLLWRNORM))
		s->out[word] |= bit(p->fd);
	if (p->events & POLLPRI)
		s->pri[word] |= bit(p->fd);
}

/* What poll(2) says of it; where it says nothing at all (a limit of 0), what select(2) has said, which is less. */
static short told(const struct sets *s, struct pollfd *p)
{
	unsigned word = (unsigned)p->fd / WORD;
	struct timespec zero = { 0 };
	short all = 0;

	if (vmh_sys(SYS_ppoll, p, 1, &zero, NULL, sizeof(uint64_t)) >= 0)
		return p->revents;
	if (s->in[word] & bit(p->fd))
		all |= POLLIN | POLLRDNORM;
	if (s->out[word] & bit(p->fd))
		all |= POLLOUT | POLLWRNORM;
	if (s->pri[word] & bit(p->fd))
		all |= POLLPRI;
	return all & p->events;
}

/* failed: one is closed. */
static long tell(const struct sets *s, struct pollfd *p, unsigned n, bool failed)
{
	long all = 0;

	for (unsigned i = 0; i < n; i++) {
		p[i].revents = 0;
		if (p[i].fd < 0)
			continue;
		if (!failed)
			p[i].revents = told(s, &p[i]);
		else if (vmh_sys(SYS_fcntl, p[i].fd, F_GETFD) < 0)
			p[i].revents = POLLNVAL;
		all += p[i].revents != 0;
	}
	return all;
}

long vmh_poll_few(struct pollfd *p, unsigned n, struct timespec *ts, const sigset_t *mask, bool cancellable)
{
	struct {
		const sigset_t *mask;
		size_t size;
	} sixth = { mask, sizeof(uint64_t) };
	struct timespec look = { .tv_nsec = LOOK_NS };
	uint64_t few[3 * FEW_WORDS];
	struct sets s = { .in = few };
	bool hidden = false;
	size_t words;
	int type = 0;
	long r;

	for (unsigned i = 0; i < n; i++) {
		if (p[i].fd >= (int)s.n)
			s.n = (unsigned)p[i].fd + 1;
		hidden |= p[i].fd >= 0 && !(p[i].events & SEEN);
	}
	words = s.n / WORD + 1;
	if (words > FEW_WORDS)
		s.in = vmh_scratch_lent(3 * words * sizeof(*s.in));
	if (!s.in)
		return -ENOMEM;
	memset(s.in, 0, 3 * words * sizeof(*s.in));
	if (hidden && (!ts || ts->tv_sec || ts->tv_nsec > look.tv_nsec))
		ts = &look;
	s.out = s.in + words;
	s.pri = s.out + words;
	for (unsigned i = 0; i < n; i++)
		if (p[i].fd >= 0)
			put(&s, &p[i]);
	if (cancellable)
		vmh_cancel_type(PTHREAD_CANCEL_ASYNCHRONOUS, &type);
	r = vmh_sys(SYS_pselect6, s.n, s.in, s.out, s.pri, ts, &sixth);
	if (cancellable)
		vmh_cancel_type(type, NULL);
	if (r > 0 || r == -EBADF || (hidden && !r))
		r = tell(&s, p, n, r < 0);
	if (s.in != few)
		vmh_scratch_give_back(s.in);
	return r;
}
