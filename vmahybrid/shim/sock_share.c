/* UDP sockets that a fork or an exec shares with another process: the kernel serves them until one holds them alone. */
#include "vmh_log.h"
#include "vmh_sock.h"
#include <fcntl.h>

#define SHARE_FIRST_NS 200000000ull /* a child that execs or ends soon */
#define SHARE_TRIES_MAX 8           /* doubles up to 51 s, then stays */

/* Object lock held. Its flows are to go, if it goes home at all. */
static bool is_shared_now(struct vmh_sock *s)
{
	if (s->home)
		return false;
	if (vmh_sock_any_flow(s))
		VMH_COUNT(vmh_stats->calls_home, 1);
	atomic_store(&s->shared, 1);
	s->share_tries = 0;
	s->share_next_ns = vmh_now_ns() + SHARE_FIRST_NS;
	return true;
}

static void share_one(struct vmh_sock *s, void *arg)
{
	const unsigned *reason = arg;

	vmh_lock(&s->obj.lock);
	if (is_shared_now(s)) {
		vmh_sock_release_flows(s, *reason);
		vmh_sock_give_back(s, s->obj.fd);
		s->tx_cfg++;
		VMH_SET(s->stats->tx_offloaded, 0);
		VMH_SET(s->stats->offloaded, 0);
		vmh_sock_set_reason(s, *reason, 0);
		atomic_store(&s->plain, 0);
	} else {
		vmh_sock_give_back(s, s->obj.fd); /* what came by a ring before it went home, and nobody has read */
	}
	vmh_unlock(&s->obj.lock);
}

_Atomic uint8_t vmh_sock_any_shared; /* some socket waits for the others to let go of it */

void vmh_sock_share_all(void)
{
	unsigned reason = VMH_R_FORK;

	atomic_store(&vmh_sock_any_shared, 1);
	vmh_sock_release_all(is_shared_now, reason);
	vmh_sock_each(share_one, &reason);
}

static bool is_inherited(const struct vmh_sock *s)
{
	long flags = vmh_sys(SYS_fcntl, s->obj.fd, F_GETFD);

	return flags >= 0 && !(flags & FD_CLOEXEC);
}

static bool is_shared_by_exec(struct vmh_sock *s)
{
	return is_inherited(s) && is_shared_now(s);
}

static void share_if_inherited(struct vmh_sock *s, void *arg)
{
	if (is_inherited(s))
		share_one(s, arg);
}

void vmh_sock_share_inherited(void)
{
	unsigned reason = VMH_R_EXEC;

	atomic_store(&vmh_sock_any_shared, 1);
	vmh_sock_release_all(is_shared_by_exec, reason);
	vmh_sock_each(share_if_inherited, &reason);
}

static void retry_one(struct vmh_sock *s, void *arg)
{
	bool *later = arg;

	if ((!atomic_load(&s->shared) && !atomic_load(&s->put_off)) || s->home)
		return;
	vmh_lock(&s->obj.lock);
	if (atomic_load(&s->put_off))
		vmh_sock_update(s, s->obj.fd);
	if (atomic_load(&s->shared) && vmh_now_ns() >= s->share_next_ns && s->lport) {
		vmh_sock_converge(s, s->obj.fd);
		if (vmh_sock_any_flow(s)) {
			atomic_store(&s->shared, 0);
			s->tx_cfg++;
			vmh_debug("fd %d is this process's alone again: back on a ring", s->obj.fd);
		} else {
			s->share_next_ns = vmh_now_ns() + (SHARE_FIRST_NS << s->share_tries);
			s->share_tries += s->share_tries < SHARE_TRIES_MAX;
		}
	}
	*later |= atomic_load(&s->shared);
	vmh_unlock(&s->obj.lock);
}

bool vmh_sock_retry_shared(void)
{
	bool later = false;

	vmh_sock_each(retry_one, &later);
	return later;
}
