/* See vmh_tcps_spare.h. Under each connection on a ring is a kernel socket, which a short one never uses, and of what such
 * a connection costs, socket(2) and close(2) are a third. So close() keeps a few of them, and socket() and accept() give
 * them out again.
 *
 * A program can tell one from a new socket by the inode and SO_COOKIE alone, or it is not kept: no option was set but
 * TCP_NODELAY, no call of it has gone to the kernel, nobody else has it, owner and mode are those of a new one, and it is
 * the very file that was installed (a program may close by calls that nobody sees). Kept ones are the process's for one
 * to two seconds, under hidden numbers, and go before another process or thread gets a copy of the table of descriptors:
 * of a connection that has gone home the kernel sends no FIN while anybody has it. */
#include "vmh_tcps_spare.h"
#include "vmh_params.h"
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/stat.h>

#define SPARES 8
#define KEPT_NS 1000000000u

struct spare {
	int fd; /* 0: none. A hidden number is never 0. */
	bool v6, nonblock, nodelay;
	uint8_t use;
	uint64_t inode, since;
};

/* Of this thread, which is in close(). fd: + 1 */
static __thread struct {
	int fd;
	bool offered;
	struct spare as;
} closing __attribute__((tls_model("initial-exec")));

/* A leaf, and tried: who finds it held goes without. Held from before one has another number until it is in the list, or
 * is in nobody's: a fork waits for that. */
static struct vmh_lock lock;
static struct spare spares[SPARES];
static _Atomic unsigned kept;
static _Atomic bool off;

/* With *st of it. */
static bool is_the_file(const struct spare *it, struct stat *st)
{
	return !vmh_sys(SYS_fstat, it->fd, st) && S_ISSOCK(st->st_mode) && st->st_ino == it->inode;
}

/* As this thread would make it now? */
static bool is_as_new(const struct stat *st)
{
	return st->st_mode == (S_IFSOCK | 0777) && st->st_uid == (uid_t)vmh_sys(SYS_geteuid) &&
	       st->st_gid == (gid_t)vmh_sys(SYS_getegid);
}

/* Lock held. is_it: else the number is another file's by now, which stays open. */
static void let_go(struct spare *it, bool is_it)
{
	if (is_it)
		vmh_fd_hidden_close(it->fd);
	else
		vmh_fd_unguard(it->fd);
	it->fd = 0;
	atomic_fetch_sub(&kept, 1);
}

/* ---- to give ---- */

static struct spare *find(enum vmh_tspare_use use, bool v6)
{
	for (unsigned i = 0; i < SPARES; i++)
		if (spares[i].fd && spares[i].use == use && spares[i].v6 == v6)
			return &spares[i];
	return NULL;
}

/* Lock held. */
static int give(struct spare *it, int flags)
{
	struct stat st;
	long fd = -1;
	bool is_it = is_the_file(it, &st);

	if (is_it && is_as_new(&st))
		fd = vmh_sys(SYS_fcntl, it->fd, flags & SOCK_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
	if (fd >= 0 && it->nonblock != !!(flags & SOCK_NONBLOCK))
		vmh_sys(SYS_fcntl, (int)fd, F_SETFL, O_RDWR | (it->nonblock ? 0 : O_NONBLOCK));
	let_go(it, is_it);
	return (int)fd;
}

int vmh_tspare_take(enum vmh_tspare_use use, bool v6, int flags, uint64_t *inode)
{
	struct spare *it;
	int fd = -1;

	*inode = 0; /* of a new one */
	if (!atomic_load_explicit(&kept, memory_order_relaxed) || vmh_fdtab_borrowed() || !vmh_trylock(&lock))
		return -1;
	it = find(use, v6);
	if (it) {
		uint64_t is = it->inode;

		fd = give(it, flags);
		if (fd >= 0)
			*inode = is;
	}
	vmh_unlock(&lock);
	return fd;
}

/* ---- to keep ---- */

void vmh_tspare_closing(int fd)
{
	closing.fd = fd + 1;
	closing.offered = false;
}

void vmh_tspare_offer(const struct vmh_tcps *s)
{
	uint64_t inode = atomic_load(&s->inode);

	if (closing.fd != s->obj.fd + 1 || atomic_load(&off) || atomic_load(&vmh_tcps_ending) ||
	    (s->touched & VMH_TCPS_TOUCHED) || s->lent || s->bound || s->odd || !inode)
		return;
	closing.as = (struct spare){ .v6 = s->v6, .nonblock = atomic_load(&s->nonblock), .inode = inode,
				     .nodelay = s->touched & VMH_TCPS_NODELAY,
				     .use = s->accepted ? VMH_TSPARE_ACCEPTS : VMH_TSPARE_OPENS };
	closing.offered = true;
}

bool vmh_tspare_is_offered(const struct vmh_tcps *s)
{
	return closing.offered && closing.fd == s->obj.fd + 1;
}

/* Lock held. */
static void put(struct spare it, int fd)
{
	int nodelay = it.use == VMH_TSPARE_OPENS && vmh_params.tcp_nodelay;
	struct spare *place = NULL;
	struct stat st;

	for (unsigned i = 0; i < SPARES && !place; i++)
		if (!spares[i].fd)
			place = &spares[i];
	if (!place || (it.fd = vmh_fd_hide_another(fd)) < 0)
		return;
	if (!is_the_file(&it, &st) || !vmh_tcps_at_rest(it.fd)) {
		vmh_fd_hidden_close(it.fd);
		return;
	}
	if (it.nodelay)
		vmh_sys(SYS_setsockopt, it.fd, IPPROTO_TCP, TCP_NODELAY, &nodelay, sizeof(nodelay));
	it.since = vmh_now_ns();
	*place = it;
	atomic_fetch_add(&kept, 1);
}

void vmh_tspare_keep(int fd)
{
	const struct spare it = closing.as; /* before the rest: a handler may close another one */
	const bool offered = closing.offered && closing.fd == fd + 1;

	closing.fd = 0;
	closing.offered = false;
	if (vmh_likely(!offered) || !vmh_trylock(&lock))
		return;
	if (!atomic_load(&off))
		put(it, fd);
	vmh_unlock(&lock);
}

/* ---- to be rid of ---- */

/* Lock held. */
static void drop(uint64_t before)
{
	struct stat st;

	for (unsigned i = 0; i < SPARES; i++)
		if (spares[i].fd && spares[i].since < before)
			let_go(&spares[i], is_the_file(&spares[i], &st));
}

void vmh_tspare_look(void)
{
	static uint64_t looked;
	uint64_t now = vmh_now_ns();

	if (vmh_likely(!atomic_load_explicit(&kept, memory_order_relaxed)) || !vmh_due(&looked, now, KEPT_NS / 4))
		return;
	vmh_lock(&lock);
	drop(now - KEPT_NS);
	vmh_unlock(&lock);
}

void vmh_tspare_drop(void)
{
	if (vmh_fdtab_borrowed())
		return;
	vmh_lock(&lock);
	drop(UINT64_MAX);
	vmh_unlock(&lock);
}

void vmh_tspare_off(void)
{
	if (vmh_memory_borrowed())
		return;
	atomic_store(&off, true);
	vmh_tspare_drop();
}

void vmh_tspare_before_fork(void)
{
	vmh_lock(&lock);
	if (!vmh_fdtab_borrowed())
		drop(UINT64_MAX);
}

void vmh_tspare_after_fork_parent(void)
{
	vmh_unlock(&lock);
}

void vmh_tspare_after_fork_child(void)
{
	vmh_unlock_fork_child(&lock);
}
