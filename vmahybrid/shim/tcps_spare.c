/* See vmh_tcps_spare.h. Under each connection on a ring is a kernel socket, which a short one never uses, and for which
 * socket(2) and close(2) are a fifth of all that it costs. So close() keeps a few of them, and socket() and accept()
 * give them out again: two short calls for each.
 *
 * A program can't tell one from a new socket, or it is not kept: no option was set but TCP_NODELAY, no call of it has gone
 * to the kernel, nobody else has it, and it is the very file that was installed (a program may close by calls that nobody
 * sees). Kept ones are the process's for a second at most, under hidden numbers, and go before a fork. */
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
	bool v6, nonblock;
	uint8_t use;
	uint32_t uid;
	uint64_t inode, since;
};

/* Of this thread, which is in close(). fd: + 1 */
static __thread struct {
	int fd;
	bool offered, nodelay;
	struct spare as;
} closing __attribute__((tls_model("initial-exec")));

static struct vmh_lock lock; /* a leaf, tried only: who finds it held goes without */
static struct spare spares[SPARES];
static _Atomic unsigned kept;
static _Atomic bool off;

static uint32_t uid(void)
{
	return (uint32_t)vmh_sys(SYS_geteuid);
}

static bool is_the_file(int fd, uint64_t inode)
{
	struct stat st;

	return !vmh_sys(SYS_fstat, fd, &st) && S_ISSOCK(st.st_mode) && st.st_ino == inode;
}

/* is_it: else the number is another file's by now, which stays open. */
static void let_go(const struct spare *it, bool is_it)
{
	if (is_it)
		vmh_fd_hidden_close(it->fd);
	else
		vmh_fd_unguard(it->fd);
}

/* Lock held. */
static struct spare pull(unsigned i)
{
	struct spare it = spares[i];

	spares[i].fd = 0;
	atomic_fetch_sub(&kept, 1);
	return it;
}

/* ---- to give ---- */

static bool find(struct spare *it, enum vmh_tspare_use use, bool v6)
{
	bool found = false;

	if (!vmh_trylock(&lock))
		return false;
	for (unsigned i = 0; i < SPARES && !found; i++)
		if (spares[i].fd && spares[i].use == use && spares[i].v6 == v6) {
			*it = pull(i);
			found = true;
		}
	vmh_unlock(&lock);
	return found;
}

int vmh_tspare_take(enum vmh_tspare_use use, bool v6, int flags, uint64_t *inode)
{
	struct spare it;
	long fd = -1;
	bool is_it;

	*inode = 0; /* of a new one */
	if (!atomic_load_explicit(&kept, memory_order_relaxed) || vmh_fdtab_borrowed() || !find(&it, use, v6))
		return -1;
	is_it = is_the_file(it.fd, it.inode);
	if (is_it && it.uid == uid())
		fd = vmh_sys(SYS_fcntl, it.fd, flags & SOCK_CLOEXEC ? F_DUPFD_CLOEXEC : F_DUPFD, 0);
	let_go(&it, is_it);
	if (fd < 0)
		return -1;
	if (it.nonblock != !!(flags & SOCK_NONBLOCK))
		vmh_sys(SYS_fcntl, (int)fd, F_SETFL, O_RDWR | (it.nonblock ? 0 : O_NONBLOCK));
	*inode = it.inode;
	return (int)fd;
}

void vmh_tspare_named(struct vmh_tcps *s, uint64_t inode)
{
	VMH_SET(s->unnamed, 0);
	vmh_stats_sock_name(s->stats, inode);
}

/* ---- to keep ---- */

void vmh_tspare_closing(int fd)
{
	closing.fd = fd + 1;
	closing.offered = false;
}

void vmh_tspare_offer(const struct vmh_tcps *s)
{
	uint64_t inode = VMH_GET(s->stats->inode);

	if (closing.fd != s->obj.fd + 1 || atomic_load(&off) || atomic_load(&vmh_tcps_ending) ||
	    (s->touched & VMH_TCPS_TOUCHED) || s->lent || s->bound || s->odd || !inode)
		return;
	closing.as = (struct spare){ .v6 = s->v6, .nonblock = atomic_load(&s->nonblock), .inode = inode,
				     .use = s->accepted ? VMH_TSPARE_ACCEPTS : VMH_TSPARE_OPENS };
	closing.nodelay = s->touched & VMH_TCPS_NODELAY;
	closing.offered = true;
}

bool vmh_tspare_is_offered(const struct vmh_tcps *s)
{
	return closing.offered && closing.fd == s->obj.fd + 1;
}

static bool put(const struct spare *it)
{
	bool done = false;

	if (!vmh_trylock(&lock))
		return false;
	for (unsigned i = 0; i < SPARES && !done; i++)
		if (!spares[i].fd) {
			spares[i] = *it;
			atomic_fetch_add(&kept, 1);
			done = true;
		}
	vmh_unlock(&lock);
	return done;
}

static bool is_unused(int fd)
{
	struct tcp_info info = { 0 };
	socklen_t len = 1; /* tcpi_state */

	return !vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, &info, &len) && info.tcpi_state == TCP_CLOSE;
}

void vmh_tspare_keep(int fd)
{
	const bool offered = closing.offered && closing.fd == fd + 1;
	struct spare it;
	int nodelay;

	closing.fd = 0;
	closing.offered = false;
	if (vmh_likely(!offered) || atomic_load(&kept) >= SPARES)
		return;
	it = closing.as;
	nodelay = it.use == VMH_TSPARE_OPENS && vmh_params.tcp_nodelay;
	it.fd = vmh_fd_hide_another(fd);
	if (it.fd < 0)
		return;
	it.uid = uid();
	it.since = vmh_now_ns();
	if (closing.nodelay)
		vmh_sys(SYS_setsockopt, it.fd, IPPROTO_TCP, TCP_NODELAY, &nodelay, sizeof(nodelay));
	if (!is_the_file(it.fd, it.inode) || !is_unused(it.fd) || !put(&it))
		vmh_fd_hidden_close(it.fd);
}

/* ---- to be rid of ---- */

static void drop(uint64_t before)
{
	for (unsigned i = 0; i < SPARES; i++) {
		struct spare it = { 0 };

		vmh_lock(&lock);
		if (spares[i].fd && spares[i].since < before)
			it = pull(i);
		vmh_unlock(&lock);
		if (it.fd)
			let_go(&it, is_the_file(it.fd, it.inode));
	}
}

void vmh_tspare_look(void)
{
	if (vmh_unlikely(atomic_load_explicit(&kept, memory_order_relaxed)))
		drop(vmh_now_ns() - KEPT_NS);
}

void vmh_tspare_drop(void)
{
	drop(UINT64_MAX);
}

void vmh_tspare_off(void)
{
	atomic_store(&off, true);
	vmh_tspare_drop();
}

/* One that another thread kept since the parent dropped them is the parent's. */
void vmh_tspare_fork_child(void)
{
	vmh_lock_reset(&lock);
	closing.fd = 0;
	closing.offered = false;
	vmh_tspare_drop();
}
