/* The end of connections that began on a ring: the stack closes them as the kernel would. What it is not through with
 * when the process ends goes to the kernel. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_spare.h"
#include "vmh_wait.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>

#define QUIET_NS 20000000u     /* at the end: as long as something moves, and this much longer */
#define FINISH_NS 1000000000u  /* for all that goes to the kernel then */

/* SO_LINGER: until the peer has everything, the time is over, a signal comes, the process ends, or it has gone home. */
static void linger(struct vmh_tcps *s, sig_atomic_t signals, uint64_t end)
{
	struct pollfd none = { .fd = -1 };
	bool drained = false;

	for (;;) {
		uint64_t now = vmh_now_ns();
		int wakefd;

		vmh_rings_poll(64);
		vmh_lock(&s->io);
		drained = !s->conn || vmh_tcp_poll(s->conn) & VMH_TCP_DRAINED;
		vmh_unlock(&s->io);
		if (drained || now >= end || vmh_signals_any != signals || atomic_load(&vmh_tcps_ending))
			return;
		wakefd = vmh_sleep_begin();
		vmh_sleep(&none, 1, end - now > 10000000 ? 10000000 : (int64_t)(end - now), NULL, wakefd);
		vmh_sleep_end();
	}
}

static bool on_ring(const struct vmh_tcps *s)
{
	return vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING;
}

/* Object lock held. false: it does not linger. */
static bool begins_to_linger(struct vmh_tcps *s)
{
	struct vmh_tcp_info info;
	bool open;

	if (!on_ring(s) || !s->linger || !s->linger_s)
		return false;
	if (vmh_tcps_info(s, &info) && info.unread) /* its peer is reset */
		return false;
	vmh_lock(&s->io);
	open = s->conn && !vmh_tcp_shutdown(s->conn, SHUT_WR); /* else there is nothing to wait for */
	vmh_unlock(&s->io);
	vmh_tring_flush(s->tring);
	return open;
}

/* exiting: nobody waits for it, and other threads may be in calls on it. */
static void close_fresh(struct vmh_tcps *s, bool exiting)
{
	struct vmh_tcp_conn *c;

	vmh_lock(&s->io);
	c = s->conn;
	s->conn = NULL;
	atomic_store(&s->bits, exiting ? EPOLLERR | EPOLLHUP | EPOLLIN | EPOLLOUT : 0);
	atomic_store(&s->state, exiting ? VMH_TCPS_LOST : VMH_TCPS_HOME);
	vmh_tshow_end(s);
	if (c && s->linger && !s->linger_s)
		vmh_tcp_abort(c);
	else if (c)
		vmh_tcp_close(c);
	vmh_unlock(&s->io);
	if (!c)
		return;
	vmh_tring_flush(s->tring);
	vmh_tring_count(s->tring, -1);
}

static bool has_sent_all(int fd)
{
	struct tcp_info info = { .tcpi_state = TCP_CLOSE };
	socklen_t len = sizeof(info);

	vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, &info, &len);
	return info.tcpi_state != TCP_FIN_WAIT1 && info.tcpi_state != TCP_CLOSING && info.tcpi_state != TCP_LAST_ACK;
}

/* One that has come home to be closed: the service may have a copy of the descriptor yet, and the kernel lingers for the
 * last one. */
static void linger_at_home(const struct vmh_tcps *s, sig_atomic_t signals, uint64_t end)
{
	const struct timespec nap = { 0, 1000000 };
	int unread = 0;

	vmh_sys(SYS_ioctl, s->obj.fd, FIONREAD, &unread);
	if (unread || vmh_sys(SYS_shutdown, s->obj.fd, SHUT_WR))
		return;
	while (!has_sent_all(s->obj.fd) && vmh_now_ns() < end && vmh_signals_any == signals &&
	       !atomic_load(&vmh_tcps_ending))
		if (vmh_sys(SYS_nanosleep, &nap, NULL) == -EINTR)
			break;
	vmh_sys(SYS_setsockopt, s->obj.fd, SOL_SOCKET, SO_LINGER, &(struct linger){ 0 }, sizeof(struct linger));
}

#define ACCEPT_NS 20000000u
#define ACCEPT_NAP_NS 50000

/* Others wait, and go on at the kernel: by left_fd, or, where none is to be had, by the number that is closed in a moment. */
static void go_on_at_kernel(struct vmh_tcps *s)
{
	bool listens = vmh_tcps_state(s) == VMH_TCPS_LISTEN, ours = vmh_tcps_leave(s, s->obj.fd);

	if (listens && !atomic_load(&s->left_fd))
		return;
	vmh_tcps_home(s, listens ? VMH_R_SHUTDOWN : VMH_R_CLOSED, false);
	if (ours && !listens && vmh_tcps_state(s) != VMH_TCPS_HOME)
		vmh_tcps_close_left(s);
}

#define ENTERS_NS 1000000 /* from the table to the kernel, mostly much less */

static void let_them_enter(void)
{
	const struct timespec nap = { 0, ENTERS_NS };

	vmh_sys(SYS_nanosleep, &nap, NULL);
}

/* Who waits is on its way to the kernel. An accept() has its number from its beginning there, which must not be the one
 * that is closed in a moment. last: who is not there in time had no chance to run, or has left its call by siglongjmp(). */
static void let_them_pass(struct vmh_tcps *s, bool last)
{
	if (vmh_tcps_let_pass(s)) {
		if (!atomic_load(&s->left_fd) || atomic_load(&s->listens))
			let_them_enter();
	} else if (last) {
		vmh_tcps_close_left(s);
	}
}

/* Connections that came by the rings: who waits has one each, the others are reset. */
static void let_them_accept(const struct vmh_tcps *s)
{
	const struct timespec nap = { 0, ACCEPT_NAP_NS };
	uint64_t end = vmh_now_ns() + ACCEPT_NS;

	while (vmh_tlisten_holds(s) && atomic_load(&s->blocked) && vmh_now_ns() < end)
		vmh_sys(SYS_nanosleep, &nap, NULL);
}

/* Calls of other threads that wait go on, as with the kernel, and the connection ends when they have. */
static void leave_open(struct vmh_tcps *s)
{
	if (!vmh_tcps_is_waited_for(s))
		return;
	go_on_at_kernel(s);
	vmh_tcps_left(s);
	let_them_accept(s);
	if (vmh_tcps_at_kernel(s) && !atomic_load(&s->left_fd))
		let_them_pass(s, true);
}

/* One that is the kernel's, or stays where it is since the program has another descriptor of it: others that wait, and are
 * on their way to the kernel, do not go on by a number that is another file by then. */
static void pass_on(struct vmh_tcps *s, int fd, bool last)
{
	vmh_tcps_leave(s, fd);
	if (vmh_tcps_at_kernel(s))
		let_them_pass(s, last);
}

static void others_go_on(struct vmh_tcps *s, int fd, bool last)
{
	const uint64_t all = ~0ull;
	uint64_t mask;

	vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &all, &mask, sizeof(mask));
	if (last && vmh_tcps_on_rings(s))
		leave_open(s);
	else
		pass_on(s, fd, last);
	vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &mask, NULL, sizeof(mask));
}

void vmh_tcps_laid_over(int fd)
{
	int saved = errno;
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s && !vmh_fdtab_borrowed() && vmh_tcps_others_wait(s))
		others_go_on(s, fd, atomic_load(&s->obj.nfds) == 1);
	if (s)
		vmh_tcps_home(s, VMH_R_CLOSED, false);
	errno = saved;
}

void vmh_tcps_closes_one(struct vmh_tcps *s, int fd)
{
	if (vmh_unlikely(vmh_tcps_others_wait(s)))
		others_go_on(s, fd, false);
}

void vmh_tcps_close(struct vmh_tcps *s, int fd)
{
	uint64_t end = s->linger ? vmh_now_ns() + s->linger_s * 1000000000ull : 0;
	sig_atomic_t signals = vmh_signals_any;
	bool lingers;

	if (vmh_unlikely(vmh_fdtab_parted()))
		vmh_tcps_home(s, VMH_R_DUP, false); /* a thread may have another descriptor of it */
	if (vmh_unlikely(vmh_tcps_others_wait(s))) {
		others_go_on(s, fd, true);
	} else if (vmh_unlikely(atomic_load(&s->left_fd))) { /* who has it is in the kernel, or has left that by siglongjmp() */
		if (vmh_tcps_left_is_used(s))
			let_them_enter();
		vmh_tcps_close_left(s);
	}
	if (!vmh_tcps_is_fresh(s)) {
		bool ring = vmh_tcps_state(s) == VMH_TCPS_RING;

		vmh_tcps_policy_end(s);
		vmh_tcps_home(s, VMH_R_CLOSED, true); /* first: who is in a call goes on at the kernel */
		if (ring && s->linger && s->linger_s && vmh_tcps_state(s) == VMH_TCPS_HOME)
			linger_at_home(s, signals, end);
		return;
	}
	/* the peer may have answered: it gets a connection that ends; or has sent something, which resets it, or its end */
	vmh_rings_poll(VMH_TCPS_POLL);
	vmh_lock(&s->obj.lock);
	lingers = begins_to_linger(s);
	vmh_unlock(&s->obj.lock);
	if (lingers) {
		linger(s, signals, end);
		vmh_lock(&s->obj.lock); /* it may be on its way home */
		vmh_unlock(&s->obj.lock);
		if (vmh_tcps_at_kernel(s))
			linger_at_home(s, signals, end);
	}
	atomic_store(&s->obj.closed, 1);
	vmh_lock(&s->obj.lock);
	if (on_ring(s)) {
		vmh_tspare_offer(s);
		close_fresh(s, false);
	}
	vmh_unlock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_STRANDED || !vmh_tcps_is_fresh(s)) /* trouble came meanwhile */
		vmh_tcps_home(s, VMH_R_CLOSED, true);
}

/* ---- the end of the process ---- */

/* One that a thread is about to close, or that could not go home. Of one that is over its calls tell the truth. */
static void close_one(struct vmh_tcps *s, void *arg)
{
	(void)arg;
	vmh_lock(&s->obj.lock);
	if (on_ring(s) && !vmh_tcps_is_over(s)) {
		close_fresh(s, true);
		vmh_epoll_notify(&s->obj);
		vmh_wake_all();
	}
	vmh_unlock(&s->obj.lock);
}

/* Until nothing moves any more. */
static void let_them_end(void)
{
	struct pollfd none = { .fd = -1 };
	uint64_t now = vmh_now_ns(), end = now + QUIET_NS, last = now + FINISH_NS;
	uint64_t left, was;
	unsigned n = vmh_trings_closing(&was), before = n;

	for (; n && now < end && now < last; now = vmh_now_ns()) {
		int wakefd = vmh_sleep_begin();

		if (!vmh_rings_poll(64))
			vmh_sleep(&none, 1, 1000000, NULL, wakefd);
		vmh_sleep_end();
		vmh_rings_poll(64);
		n = vmh_trings_closing(&left);
		if (n != before || left != was)
			end = vmh_now_ns() + QUIET_NS;
		before = n;
		was = left;
	}
}

/* For a connection that nobody has a descriptor of. At the program's limit this thread's own means to sleep is given
 * for it: the program ends. */
static int socket_for(const struct vmh_tcp_addr *a)
{
	const int domain = vmh_ip_is4(&a->raddr) ? AF_INET : AF_INET6;
	long fd = vmh_sys(SYS_socket, domain, SOCK_STREAM | SOCK_CLOEXEC, 0);

	if (fd == -EMFILE && vmh_sleep_give_up())
		fd = vmh_sys(SYS_socket, domain, SOCK_STREAM | SOCK_CLOEXEC, 0);
	return (int)fd;
}

/* Nobody goes on with it: a peer that waits for the rest, or the end, is told. */
static void orphan_lost(struct vmh_tring *t, struct vmh_tcp_conn *c)
{
	if (vmh_tcp_poll(c) & VMH_TCP_DRAINED) {
		vmh_tcp_forget(c);
		return;
	}
	vmh_tcp_abort(c);
	vmh_tring_flush(t);
}

/* One that is still closing: the kernel goes on with it, and sends what is left. */
static void orphan_home(struct vmh_tring *t, struct vmh_tcp_conn *c, int *tries)
{
	struct vmh_tcp_addr a;
	struct vmh_tcp_blob state = { 0 };
	int fd, err;

	vmh_tcp_address(c, &a);
	fd = socket_for(&a);
	if (fd >= 0) /* what is left of it must not keep a server from being started again */
		vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	vmh_tcp_freeze(c);
	err = fd < 0 ? fd : vmh_tcps_export(c, &state);
	if (!err)
		err = vmh_session_tcp_home(fd, &state, vmh_tport_flow(a.lport), vmh_tring_ring(t)->ifindex, VMH_R_CLOSED);
	vmh_tcp_blob_free(&state);
	if (fd >= 0)
		vmh_sys(SYS_close, fd);
	if (err)
		(*tries)--;
	else
		vmh_tport_went_home(t, vmh_tport_flow(a.lport), &a);
	if (err && err != -ENOTCONN) /* else the kernel has it, or may have */
		orphan_lost(t, c);
	else
		vmh_tcp_forget(c);
}

void vmh_tcps_finish(bool exiting)
{
	uint64_t end, left;
	struct vmh_tcp_conn *c;
	struct vmh_tring *t;
	int tries = 8;

	if (exiting) { /* other threads, and destructors that come later, go on with kernel sockets until it ends */
		atomic_store(&vmh_tcps_ending, true);
		vmh_tcps_leave_to_kernel();
		vmh_tcps_each_closing(close_one, NULL);
	}
	if (!vmh_trings_any())
		return;
	let_them_end();
	if (vmh_trings_closing(&left))
		vmh_tshow_flush();
	end = vmh_now_ns() + FINISH_NS;
	while (tries && vmh_now_ns() < end && (t = vmh_trings_orphan(&c)))
		orphan_home(t, c, &tries);
	while ((t = vmh_trings_orphan(&c)))
		orphan_lost(t, c);
}
