/* select: the sets become a pollfd array, by the kernel's own translation. */
#include "vmh_iomux_int.h"

static __thread struct vmh_oslook select_look __attribute__((tls_model("initial-exec")));

#define WORD_BITS (8 * (int)sizeof(unsigned long))
/* fs/select.c: POLLIN_SET, POLLOUT_SET, POLLEX_SET */
#define IN_SET (POLLRDNORM | POLLRDBAND | POLLIN | POLLHUP | POLLERR)
#define OUT_SET (POLLWRBAND | POLLWRNORM | POLLOUT | POLLERR)
#define EX_SET POLLPRI

struct sets {
	unsigned long *r, *w, *e; /* the caller's bitmaps; more than FD_SETSIZE bits are allowed */
	int nfds, words;
};

static struct sets sets_of(int nfds, const fd_set *r, const fd_set *w, const fd_set *e)
{
	struct sets s = { .r = (unsigned long *)r, .w = (unsigned long *)w, .e = (unsigned long *)e };

	/* The kernel, too, looks no further than the process's fd table: INT_MAX is a legal nfds. */
	s.nfds = nfds > (int)vmh_fdtab_size ? (int)vmh_fdtab_size : nfds;
	s.words = (s.nfds + WORD_BITS - 1) / WORD_BITS;
	return s;
}

static inline unsigned long word(const unsigned long *set, int k)
{
	return set ? set[k] : 0;
}

/* the bits of word k that are below nfds */
static unsigned long asked(const struct sets *s, int k)
{
	unsigned long bits = word(s->r, k) | word(s->w, k) | word(s->e, k);
	int over = (k + 1) * WORD_BITS - s->nfds;

	return over > 0 ? bits & (~0ul >> over) : bits;
}

bool vmh_select_wanted(int nfds, const fd_set *r, const fd_set *w, const fd_set *e)
{
	struct sets s;

	if (nfds <= 0)
		return false;
	s = sets_of(nfds, r, w, e);
	for (int k = 0; k < s.words; k++)
		for (unsigned long bits = asked(&s, k); bits; bits &= bits - 1)
			if (vmh_fd_wanted(k * WORD_BITS + __builtin_ctzl(bits)))
				return true;
	return false;
}

static unsigned count_asked(const struct sets *s)
{
	unsigned n = 0;

	for (int k = 0; k < s->words; k++)
		n += (unsigned)__builtin_popcountl(asked(s, k));
	return n;
}

static void to_poll(const struct sets *s, struct pollfd *p)
{
	for (int k = 0; k < s->words; k++) {
		for (unsigned long bits = asked(s, k); bits; bits &= bits - 1, p++) {
			unsigned long b = bits & -bits;

			p->fd = k * WORD_BITS + __builtin_ctzl(bits);
			p->events = (short)((word(s->r, k) & b ? IN_SET : 0) | (word(s->w, k) & b ? OUT_SET : 0) |
					    (word(s->e, k) & b ? EX_SET : 0));
			p->revents = 0;
		}
	}
}

static int put(unsigned long *set, int k, unsigned long b, bool ready)
{
	if (!set || !(set[k] & b))
		return 0;
	if (!ready)
		set[k] &= ~b;
	return ready;
}

/* Writes the answer over the question, whole words as the kernel does. */
static int from_poll(const struct sets *s, const struct pollfd *p)
{
	int n = 0;

	for (int k = 0; k < s->words; k++) {
		unsigned long all = asked(s, k);

		for (unsigned long bits = all; bits; bits &= bits - 1, p++) {
			unsigned long b = bits & -bits;

			n += put(s->r, k, b, p->revents & IN_SET);
			n += put(s->w, k, b, p->revents & OUT_SET);
			n += put(s->e, k, b, p->revents & EX_SET);
		}
		if (s->r)
			s->r[k] &= all;
		if (s->w)
			s->w[k] &= all;
		if (s->e)
			s->e[k] &= all;
	}
	return n;
}

/* poll() tells an error and an end without being asked; select() does not, in the third set, nor of an end that it can be
 * written to. The descriptor is left out from then on: nothing else will come for it. */
static bool only_untold(struct pollfd *p, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		if (p[i].revents & (p[i].events | POLLNVAL))
			return false;
	for (unsigned i = 0; i < n; i++)
		if (p[i].revents) {
			p[i].fd = -1;
			p[i].revents = 0;
		}
	return true;
}

/* As vmh_poll_run() */
static int run(struct pollfd *p, unsigned n, int64_t timeout_ns, const sigset_t *mask)
{
	uint64_t end = timeout_ns > 0 ? vmh_now_ns() + (uint64_t)timeout_ns : 0, now;
	int ret;

	for (;;) {
		ret = vmh_poll_run(p, n, timeout_ns, mask, &select_look, &vmh_stats->select);
		if (ret <= 0 || !only_untold(p, n))
			return ret;
		if (end) {
			now = vmh_now_ns();
			timeout_ns = now < end ? (int64_t)(end - now) : 0;
		}
	}
}

#define STACK_POLLFDS 64

int vmh_select(int nfds, fd_set *r, fd_set *w, fd_set *e, int64_t timeout_ns, const sigset_t *mask)
{
	struct sets s = sets_of(nfds, r, w, e);
	struct pollfd st[STACK_POLLFDS], *p = st;
	unsigned n = count_asked(&s);
	int ret;

	if (n > STACK_POLLFDS) {
		p = vmh_scratch_lent(n * sizeof(*p));
		if (!p)
			return -ENOMEM;
	}
	to_poll(&s, p);
	ret = run(p, n, timeout_ns, mask);
	if (ret >= 0)
		ret = from_poll(&s, p);
	if (p != st)
		vmh_scratch_give_back(p);
	return ret;
}
