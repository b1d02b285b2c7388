/* The kernel's end of what is on a ring: `ss -K`, and whoever else asks for it by sock_diag(7), sees and ends the parked
 * socket of a connection, or the kernel's part of a listener. The rest ends with it, as it would have: the peer is reset,
 * the program is told ECONNABORTED behind what it has not read yet, accept() says EINVAL. The internal thread is woken by an
 * epoll set of these sockets; one in it costs nothing as long as nothing ends it. */
#include "vmh_base.h"
#include "vmh_fd.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include <sys/epoll.h>

#define ENDED_MAX 64 /* at a time */

static struct vmh_lock make_lock; /* no other is taken under it */
static _Atomic int set_plus_one;

int vmh_tended_fd(void)
{
	return atomic_load(&set_plus_one) - 1;
}

static int make(void)
{
	vmh_lock(&make_lock);
	if (vmh_tended_fd() < 0)
		atomic_store(&set_plus_one, vmh_fd_hide((int)vmh_sys(SYS_epoll_create1, EPOLL_CLOEXEC)) + 1);
	vmh_unlock(&make_lock);
	return vmh_tended_fd();
}

static void control(struct vmh_tcps *s, int op)
{
	struct epoll_event ev = { .events = EPOLLET, .data.ptr = s };

	vmh_sys(SYS_epoll_ctl, vmh_tended_fd(), op, s->obj.fd, &ev);
}

/* One that began on a ring is, once the service has said so. */
static bool is_seen(const struct vmh_tcps *s)
{
	switch (vmh_tcps_state(s)) {
	case VMH_TCPS_RING:
		return !vmh_tcps_is_fresh(s) || s->shown_flow;
	case VMH_TCPS_LISTEN:
		return true;
	default:
		return false;
	}
}

/* One that has ended since the service parked it is told of at once. */
void vmh_tended_watch(struct vmh_tcps *s)
{
	if (is_seen(s) && (vmh_tended_fd() >= 0 || make() >= 0))
		control(s, EPOLL_CTL_ADD);
}

void vmh_tended_watch_again(struct vmh_tcps *s)
{
	if (!vmh_tcps_at_rest(s->obj.fd)) /* else a homecoming has left it as it could */
		vmh_tended_watch(s);
}

void vmh_tended_leave(struct vmh_tcps *s)
{
	if (vmh_tended_fd() >= 0)
		control(s, EPOLL_CTL_DEL);
}

/* Object lock held. */
static void end(struct vmh_tcps *s)
{
	bool ended;

	if (atomic_load(&s->obj.closed) || !is_seen(s) || !vmh_tcps_owns_fd(s) || !vmh_tcps_at_rest(s->obj.fd))
		return;
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN) {
		vmh_tlisten_shut(s);
		return;
	}
	vmh_lock(&s->io);
	ended = s->conn && !vmh_tcp_end(s->conn, ECONNABORTED);
	vmh_unlock(&s->io);
	vmh_tring_flush(s->tring);
	if (ended)
		vmh_info("fd %d: the kernel's part of this TCP connection was ended from outside (ss -K): reset", s->obj.fd);
}

void vmh_tended_look(void)
{
	struct epoll_event ev[ENDED_MAX];
	long n = vmh_tended_fd() < 0 ? 0 : vmh_sys(SYS_epoll_pwait, vmh_tended_fd(), ev, ENDED_MAX, 0, NULL, sizeof(uint64_t));

	for (long i = 0; i < n; i++) {
		struct vmh_tcps *s = ev[i].data.ptr;

		vmh_obj_hold(&s->obj);
		if (vmh_trylock(&s->obj.lock)) {
			end(s);
			vmh_unlock(&s->obj.lock);
		} else if (is_seen(s)) { /* never waiting for who may wait for us: the next turn tells again */
			control(s, EPOLL_CTL_MOD);
		}
		vmh_obj_put(&s->obj);
	}
}

void vmh_tended_fork_child(void)
{
	vmh_lock_reset(&make_lock);
	vmh_fd_hidden_close(vmh_tended_fd());
	atomic_store(&set_plus_one, 0);
}
