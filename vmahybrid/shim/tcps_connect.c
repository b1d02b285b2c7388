/* Connections that the program opens, from the SYN on the ring; and the calls that concern a connection that is opening.
 * Whatever is not plain is left to the kernel. */
#include "vmh_base.h"
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#define NEIGHBOUR_MS 100
#define ASK_NS 50000000u

/* The service resolves it; asked seldom, as a program may try again in a loop. */
static void ask_neighbour(const struct vmh_way *hop)
{
	static _Atomic uint64_t next;
	uint64_t now = vmh_now_ns();

	if (now < atomic_load(&next))
		return;
	atomic_store(&next, now + ASK_NS);
	vmh_session_neigh_of(hop->ifindex, &hop->via);
}

/* until it is resolved, or not worth waiting for */
static bool resolving(const struct vmh_tcps *s, unsigned reason, const struct vmh_signals *began)
{
	return reason == VMH_R_NO_NEIGHBOUR && !atomic_load(&s->nonblock) && !atomic_load(&vmh_tcps_ending) &&
	       !vmh_signals_end(began, VMH_GET(s->sndtimeo_ns) != 0);
}

/* The ring by which the kernel would send to a->raddr, and our address there; or why not. */
static unsigned find_way(struct vmh_tcps *s, struct vmh_tcp_addr *a, struct vmh_tcp_path *path,
			 const struct vmh_signals *began)
{
	const struct vmh_ip any = { 0 };
	struct vmh_way hop = { 0 };
	struct vmh_ring *r;
	unsigned reason = vmh_session_open();

	if (reason)
		return reason;
	vmh_session_serve();
	reason = vmh_net_way(&a->raddr, &any, &hop);
	if (reason == VMH_R_NO_NEIGHBOUR && !vmh_ip_any(&hop.via) && !vmh_net_link_served(hop.ifindex))
		ask_neighbour(&hop);
	for (int i = 0; resolving(s, reason, began) && i < NEIGHBOUR_MS; i++) {
		struct timespec ms = { 0, 1000000 };

		vmh_sys(SYS_nanosleep, &ms, NULL);
		reason = vmh_net_way(&a->raddr, &any, &hop);
	}
	if (!reason)
		reason = vmh_net_link_served(hop.ifindex);
	if (!reason && vmh_net_translates())
		reason = VMH_R_NAT;
	if (!reason)
		reason = vmh_tcps_tagged(s, hop.ifindex);
	if (!reason && vmh_ip_is4(&a->raddr) && vmh_net_is_broadcast(vmh_ip_v4(&a->raddr)))
		reason = VMH_R_BROADCAST;
	if (reason)
		return reason;
	r = vmh_session_ring(hop.ifindex, vmh_lane_of(&s->lane, VMH_LANE_RX, s->obj.fd, vmh_ip_v4(&hop.saddr)), &reason);
	if (!r)
		return reason ? reason : VMH_R_RING_FAILED;
	s->tring = vmh_tring_of(r);
	if (!s->tring)
		return VMH_R_RING_FAILED;
	s->ifindex = hop.ifindex;
	a->laddr = vmh_ip_any(&hop.saddr) ? vmh_tcps_source(&a->raddr) : hop.saddr;
	reason = vmh_tpath_make(s, &hop, &a->raddr, path);
	return !reason && vmh_ip_any(&a->laddr) ? VMH_R_NOT_OFFLOADABLE_ADDR : reason;
}

static bool plain(const struct vmh_tcps *s, int fd, const struct vmh_tcp_addr *to)
{
	const bool v4 = vmh_ip_is4(&to->raddr);
	in_addr_t a = ntohl(vmh_ip_v4(&to->raddr));

	if (VMH_GET(s->policy) != VMH_TCPS_OFFLOAD || s->bound || s->odd || s->listens || !to->rport || vmh_ip_any(&to->raddr))
		return false;
	if (v4 && (a >> 24 == 127 || IN_MULTICAST(a) || IN_BADCLASS(a)))
		return false;
	return !(s->v6 && v4) || !vmh_tcps_only_v6(fd);
}

/* Object lock held, state KERNEL. 0: the SYN is sent. */
static int begin(struct vmh_tcps *s, int fd, const struct vmh_tcp_addr *to, const struct vmh_signals *began)
{
	struct vmh_tcp_addr a = *to;
	struct vmh_tcp_path path = { 0 };
	unsigned reason;
	int rc;

	if (atomic_load(&vmh_tcps_ending) || !plain(s, fd, to) || atomic_load(&s->in_kernel) ||
	    atomic_load(&s->obj.nfds) != 1 || !vmh_tcps_not_plain(s))
		return VMH_TCPS_KERNELS;
	vmh_conf_refresh();
	reason = find_way(s, &a, &path, began);
	if (!reason)
		reason = vmh_tcps_kept_client(s, &a);
	rc = reason ? -EADDRNOTAVAIL : vmh_tport_connect(s->tring, s->ifindex, s, &a, &path);
	if (rc) {
		vmh_tcps_set_reason(s, reason ? reason : VMH_R_RULE_LIMIT);
		return VMH_TCPS_KERNELS;
	}
	s->addr = a;
	VMH_SET(s->connecting, 1);
	s->opening = VMH_TCPS_OPENING;
	vmh_tcps_publish(s);
	return 0;
}

/* What the program has set meanwhile and the kernel socket was not told. */
static void tell_options(struct vmh_tcps *s)
{
	if (!vmh_params.avoid_sys_calls_on_tcp_fd)
		return;
	vmh_sys(SYS_setsockopt, s->obj.fd, IPPROTO_TCP, TCP_NODELAY, &(int){ s->opt.nodelay }, sizeof(int));
	vmh_sys(SYS_setsockopt, s->obj.fd, IPPROTO_TCP, TCP_CORK, &(int){ s->opt.cork }, sizeof(int));
	s->touched |= VMH_TCPS_TOUCHED;
}

/* Object lock held: the ring's part is over, or was before. state: KERNEL, HOME, or STRANDED. */
static void undo_to(struct vmh_tcps *s, unsigned state)
{
	bool had = vmh_tcps_state(s) == VMH_TCPS_RING, seeks = state == VMH_TCPS_STRANDED;

	vmh_lock(&s->io);
	if (s->conn)
		vmh_tcp_close(s->conn);
	s->conn = NULL;
	vmh_tcps_note_amounts(s, &(const struct vmh_tcp_amounts){ 0 });
	s->flow_id = 0;
	s->opening = seeks ? VMH_TCPS_SEEKING : VMH_TCPS_OPEN;
	atomic_store(&s->bits, 0);
	atomic_store(&s->fresh, 0);
	atomic_store(&s->state, state);
	vmh_unlock(&s->io);
	if (had) {
		vmh_tring_flush(s->tring);
		vmh_tring_count(s->tring, -1);
		tell_options(s);
		VMH_SET(s->stats->offloaded, 0);
		VMH_SET(s->stats->rx_offloaded, 0);
		VMH_SET(s->stats->tx_offloaded, 0);
		VMH_SET(s->stats->flow_id, 0);
	}
	if (!seeks)
		vmh_epoll_member_parked(&s->obj, false);
	vmh_wake_all();
}

/* Object lock held: the kernel socket is as it was made, and may be connected again. */
static void undo(struct vmh_tcps *s)
{
	undo_to(s, VMH_TCPS_KERNEL);
}

/* Object lock held. The error of one that is LOST, once if it is a connect()'s, as the kernel's the last one that it met: the
 * socket is new again then. */
static int take_lost(struct vmh_tcps *s)
{
	if (VMH_GET(s->opening) != VMH_TCPS_SEEKING)
		return ECONNRESET;
	undo(s);
	return s->route_err;
}

int vmh_tcps_take_lost(struct vmh_tcps *s)
{
	int err;

	if (vmh_tcps_state(s) != VMH_TCPS_LOST)
		return 0;
	vmh_lock(&s->obj.lock);
	err = vmh_tcps_state(s) == VMH_TCPS_LOST ? take_lost(s) : 0;
	vmh_unlock(&s->obj.lock);
	return err;
}

static unsigned why_not(const struct vmh_tcp_info *i)
{
	return i->why == ETIMEDOUT ? VMH_R_TCP_NO_ANSWER : VMH_R_TCP_REFUSED;
}

/* How far it is: 1 connected, 0 not yet, or -errno, once: the socket is new again then. */
static int outcome(struct vmh_tcps *s)
{
	struct vmh_tcp_info info;
	int rc = 1, err = 0;

	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) != VMH_TCPS_RING || !vmh_tcps_is_fresh(s)) {
		if (vmh_tcps_seeks(s)) {
			vmh_unlock(&s->obj.lock);
			return 0;
		}
		if (!s->opening)
			rc = VMH_TCPS_KERNELS;
		else if (vmh_tcps_state(s) == VMH_TCPS_LOST)
			rc = -take_lost(s);
		s->opening = VMH_TCPS_OPEN; /* it went home open, or failed */
		vmh_unlock(&s->obj.lock);
		return rc;
	}
	if (s->opening) {
		vmh_lock(&s->io);
		vmh_tcp_get_info(s->conn, &info);
		if (info.state == VMH_TCP_CLOSE)
			err = vmh_tcp_error(s->conn);
		vmh_unlock(&s->io);
		rc = info.state == VMH_TCP_CLOSE ? (err ? -err : -ECONNABORTED) : info.state != VMH_TCP_SYN_SENT;
		if (rc < 0 && s->shown) {
			vmh_tshow_end(s); /* it was open, and nobody has asked until now */
		} else if (rc < 0) {
			undo(s);
			vmh_tcps_set_reason(s, why_not(&info));
		} else if (rc) {
			s->opening = VMH_TCPS_OPEN;
		}
	}
	vmh_unlock(&s->obj.lock);
	return rc;
}

/* counted: vmh_tcps_blocks() has been said. */
static int wait_open(struct vmh_tcps *s, const struct vmh_signals *began, bool counted)
{
	TWAIT w;
	int rc, err, closed;

	vmh_twait_init(&w, s, VMH_GET(s->sndtimeo_ns), EPOLLOUT, -1, began);
	w.blocks = counted ? s : NULL;
	w.state = VMH_TCPS_RING; /* as the caller has seen it: a fork in another thread may have sent it home since */
	for (;;) {
		err = vmh_tcps_wait(s, &w);
		closed = vmh_tcps_is_closed(s, &w.w);
		if (vmh_unlikely(closed))
			return closed;
		rc = outcome(s);
		if (rc)
			return rc == VMH_TCPS_KERNELS && vmh_tcps_state(s) == VMH_TCPS_KERNEL ? -ECONNRESET :
			       rc < 0 ? rc : 0; /* by shutdown() in another thread: as tcp_disconnect() */
		if (err)
			return err == -EAGAIN ? -EINPROGRESS : err;
		if (vmh_tcps_seeks(s))
			w.state = VMH_TCPS_STRANDED; /* if it has gone on since, that is another one */
	}
}

/* What another connect() says meanwhile. */
static int still_opening(struct vmh_tcps *s)
{
	struct vmh_signals began = vmh_signals_now();
	int rc = atomic_load(&s->nonblock) ? -EALREADY : wait_open(s, &began, false);

	return rc == -EINPROGRESS ? -EALREADY : rc;
}

static bool is_open(struct vmh_tcps *s)
{
	struct vmh_tcp_info info;

	return vmh_tcps_info(s, &info) && info.state != VMH_TCP_SYN_SENT && info.state != VMH_TCP_CLOSE;
}

/* connect() to AF_UNSPEC on a connection that has ended, and whose kernel socket is in repair mode: with it no other one
 * can begin, and to leave that is not for the program. 0, or -errno. */
static int renew(struct vmh_tcps *s)
{
	uint32_t flow;
	int err = 0;

	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_RING) {
		flow = atomic_load(&s->fresh) ? 0 : s->flow_id;
		vmh_tended_leave(s);
		vmh_tshow_end(s);
		err = vmh_session_tcp_renew(s->obj.fd);
		if (!err) {
			undo(s);
			if (flow)
				vmh_verbs_detach(flow);
			atomic_store(&s->ended, 0);
			vmh_tcps_forget_peer(s);
			vmh_tcps_set_reason(s, VMH_R_NOT_TRIED);
		}
	}
	vmh_unlock(&s->obj.lock);
	return err ? -EISCONN : 0;
}

/* connect() on a connection that there is already. */
static int again(struct vmh_tcps *s, const struct sockaddr *a)
{
	int rc;

	if (a->sa_family == AF_UNSPEC) {
		/* the kernel resets it, and has an error to tell of that */
		if (is_open(s) && !vmh_tcps_home(s, VMH_R_UNKNOWN_CALL, true))
			return VMH_TCPS_KERNELS;
		if (vmh_tcps_in_repair(s->obj.fd))
			return renew(s);
		vmh_lock(&s->obj.lock);
		if (vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING) {
			vmh_lock(&s->io);
			vmh_tcp_abort(s->conn);
			s->conn = NULL;
			vmh_unlock(&s->io);
			undo(s);
			vmh_tcps_set_reason(s, VMH_R_NOT_TRIED);
		}
		vmh_unlock(&s->obj.lock);
		return 0;
	}
	if (!s->opening)
		return -EISCONN;
	vmh_rings_poll(1);
	rc = outcome(s);
	return rc > 0 ? 0 : rc ? rc : still_opening(s);
}

/* Before it is adopted. The first connect() after one without blocking says 0 when it is open, all others EISCONN: only the
 * kernel knows, and has told us then. */
void vmh_tcps_ask_untold(struct vmh_tcps *s, int fd, const struct vmh_tcp_addr *a)
{
	struct sockaddr_storage to;
	socklen_t len = vmh_tcps_compose(s->v6, &a->raddr, a->rport, &to);

	if (!s->accepted && !vmh_sys(SYS_connect, fd, &to, len))
		s->opening = VMH_TCPS_OPENING;
}

/* Of one that seeks a route, or has for too long: the program does not want it any more. */
static bool gives_up(struct vmh_tcps *s)
{
	bool sought;

	vmh_lock(&s->obj.lock);
	sought = vmh_tcps_parked(s) && VMH_GET(s->opening) == VMH_TCPS_SEEKING;
	if (sought) {
		undo(s);
		vmh_tcps_set_reason(s, VMH_R_NOT_TRIED);
	}
	vmh_unlock(&s->obj.lock);
	return sought;
}

/* connect() on one that the kernel had once, or has now, and that is or was on a ring. */
static int by_another(struct vmh_tcps *s, int fd, const struct sockaddr *a)
{
	int err;

	vmh_tcps_await_move(s);
	if (a->sa_family == AF_UNSPEC) {
		if (gives_up(s))
			return 0;
		if (vmh_tcps_parked(s) && !vmh_tcps_has_ended(s))
			vmh_tcps_home(s, VMH_R_UNKNOWN_CALL, false); /* its socket is in use */
		if (vmh_tcps_state(s) == VMH_TCPS_RING && vmh_tcps_is_over(s))
			return renew(s);
		return VMH_TCPS_KERNELS;
	}
	if (vmh_tcps_seeks(s))
		return still_opening(s);
	err = VMH_GET(s->opening) == VMH_TCPS_SEEKING ? vmh_tcps_take_lost(s) : 0;
	if (err)
		return -err;
	if (s->opening && (vmh_tcps_parked(s) || !vmh_tcps_at_rest(fd))) { /* it went home before connect() has said so */
		s->opening = VMH_TCPS_OPEN;
		return 0;
	}
	return vmh_tcps_parked(s) ? -EISCONN : VMH_TCPS_KERNELS;
}

/* The same of a send() with MSG_FASTOPEN, before it sends. */
int vmh_tcps_connect_by_send(struct vmh_tcps *s, int fd, bool now)
{
	struct vmh_signals began = vmh_signals_now();
	int rc;

	if (vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING) {
		vmh_rings_poll(1);
		rc = outcome(s);
		return rc ? rc > 0 ? 0 : rc : now ? -EALREADY : wait_open(s, &began, false);
	}
	if (vmh_tcps_seeks(s))
		return now ? -EALREADY : wait_open(s, &began, false);
	if (!vmh_tcps_parked(s) && vmh_tcps_at_rest(fd))
		return VMH_TCPS_KERNELS;
	s->opening = VMH_TCPS_OPEN;
	return 0;
}

/* A signal came before the kernel was asked: it begins, and does not wait. */
static int begin_at_kernel(int fd, const struct sockaddr *a, socklen_t len)
{
	int flags = (int)vmh_sys(SYS_fcntl, fd, F_GETFL), rc;

	vmh_sys(SYS_fcntl, fd, F_SETFL, flags | O_NONBLOCK);
	rc = (int)vmh_sys(SYS_connect, fd, a, len);
	vmh_sys(SYS_fcntl, fd, F_SETFL, flags);
	vmh_tcps_connected(fd, rc, a, len);
	return rc == -EINPROGRESS || rc == -EALREADY ? -EINTR : rc;
}

int vmh_tcps_connect(struct vmh_tcps *s, int fd, const struct sockaddr *a, socklen_t len)
{
	struct vmh_signals began = vmh_signals_now();
	struct vmh_tcp_addr to = { 0 };
	bool waits;
	int rc;

	if (len < sizeof(a->sa_family) || len > sizeof(struct sockaddr_storage))
		return VMH_TCPS_KERNELS;
	if (vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING)
		return again(s, a);
	if (vmh_tcps_state(s) != VMH_TCPS_KERNEL || VMH_GET(s->connecting))
		return by_another(s, fd, a);
	if (a->sa_family != (s->v6 ? AF_INET6 : AF_INET) ||
	    !vmh_tcps_parse(a, len, &to.raddr, &to.rport))
		return VMH_TCPS_KERNELS;
	if (!vmh_trylock(&s->obj.lock))
		return VMH_TCPS_KERNELS;
	if (s->bound)
		vmh_tcps_kernel_name(fd, false, &to.laddr, &to.lport);
	vmh_tcps_policy_client(s, &to);
	rc = vmh_tcps_state(s) == VMH_TCPS_KERNEL ? begin(s, fd, &to, &began) : VMH_TCPS_KERNELS;
	waits = !rc && !atomic_load(&s->nonblock);
	if (waits) /* from here on another thread may close it */
		vmh_tcps_blocks(s);
	vmh_unlock(&s->obj.lock);
	if (rc == VMH_TCPS_KERNELS && !atomic_load(&s->nonblock) &&
	    vmh_unlikely(vmh_signals_end(&began, VMH_GET(s->sndtimeo_ns) != 0)))
		return begin_at_kernel(fd, a, len);
	if (rc)
		return rc;
	rc = waits ? wait_open(s, &began, true) : -EINPROGRESS;
	return rc == VMH_TCPS_KERNELS ? VMH_TCPS_WAITS_ON : rc;
}

static bool no_route(long err)
{
	return err == -ENETUNREACH || err == -EHOSTUNREACH || err == -ENETDOWN || err == -EADDRNOTAVAIL;
}

/* It has not begun, or nobody knows: the kernel begins anew, before anybody is told to ask it. It would wait for a route
 * only if it had one to begin with. */
void vmh_tcps_restart(struct vmh_tcps *s, bool must)
{
	struct sockaddr_storage to;
	socklen_t len = vmh_tcps_compose(s->v6, &s->addr.raddr, s->addr.rport, &to);
	long flags = vmh_sys(SYS_fcntl, s->obj.fd, F_GETFL), err;

	vmh_sys(SYS_fcntl, s->obj.fd, F_SETFL, flags | O_NONBLOCK);
	err = vmh_sys(SYS_connect, s->obj.fd, &to, len);
	vmh_sys(SYS_fcntl, s->obj.fd, F_SETFL, flags);
	s->route_err = (int)-err;
	vmh_tcps_note_names(s, s->obj.fd, &(struct vmh_tcp_addr){ 0 }); /* its port is another one now */
	undo_to(s, no_route(err) && !must ? VMH_TCPS_STRANDED : VMH_TCPS_HOME);
}

bool vmh_tcps_is_over(struct vmh_tcps *s)
{
	struct vmh_tcp_info info = { .state = VMH_TCP_CLOSE };

	vmh_lock(&s->io);
	if (s->conn)
		vmh_tcp_get_info(s->conn, &info);
	vmh_unlock(&s->io);
	return info.state == VMH_TCP_CLOSE || info.state == VMH_TCP_TIME_WAIT;
}

/* Could a socket be bound to the address? */
static bool is_ours(const struct sockaddr *a, socklen_t len)
{
	struct sockaddr_storage any_port = { 0 };
	int fd = (int)vmh_sys(SYS_socket, a->sa_family, SOCK_STREAM | SOCK_CLOEXEC, 0);
	long r;

	if (fd < 0)
		return true;
	memcpy(&any_port, a, len < sizeof(any_port) ? len : sizeof(any_port));
	((struct sockaddr_in *)&any_port)->sin_port = 0; /* where sin6_port is */
	r = vmh_sys(SYS_bind, fd, &any_port, len < sizeof(any_port) ? len : sizeof(any_port));
	vmh_sys(SYS_close, fd);
	return r != -EADDRNOTAVAIL;
}

/* The port is that of connections on rings: the kernel does not know of them, or has them in repair mode, where everybody
 * may share it who has SO_REUSEADDR. */
static bool in_use(const struct vmh_tcps *s, const struct sockaddr *a, socklen_t len)
{
	struct vmh_ip addr;
	in_port_t port;
	unsigned families;

	if (vmh_tcps_state(s) != VMH_TCPS_KERNEL || s->bound || s->connecting || vmh_bad_ptr(a) ||
	    a->sa_family != (s->v6 ? AF_INET6 : AF_INET) || !vmh_tcps_parse(a, len, &addr, &port) || !port)
		return false;
	families = vmh_tcps_families(s, s->obj.fd);
	if (s->v6 && IN6_IS_ADDR_V4MAPPED(&((const struct sockaddr_in6 *)a)->sin6_addr))
		families &= VMH_TCP_IPV4;
	return vmh_trings_in_use(&addr, families, port, vmh_tcps_reuses(s->obj.fd)) && is_ours(a, len);
}

/* What the kernel says of its address comes first; and it would bind the socket below, which has no connection. */
int vmh_tcps_bind(struct vmh_tcps *s, const struct sockaddr *a, socklen_t len)
{
	const socklen_t least = s->v6 ? offsetof(struct sockaddr_in6, sin6_scope_id) : sizeof(struct sockaddr_in);

	if (in_use(s, a, len))
		return -EADDRINUSE;
	if (!vmh_tcps_is_fresh(s) || s->shown || vmh_bad_ptr(a) || len < least || vmh_tcps_is_over(s))
		return VMH_TCPS_KERNELS;
	if (a->sa_family != (s->v6 ? AF_INET6 : AF_INET))
		return VMH_TCPS_KERNELS;
	return s->v6 || is_ours(a, len) ? -EINVAL : -EADDRNOTAVAIL; /* of IPv6 the state is looked at first */
}

void vmh_tcps_bound(struct vmh_tcps *s, int fd)
{
	struct vmh_ip addr;
	in_port_t port;

	VMH_SET(s->bound, 1);
	if (vmh_tcps_kernel_name(fd, false, &addr, &port)) {
		memcpy(s->stats->local_addr, addr.b, 16);
		VMH_SET(s->stats->local_port, port);
	}
	if (VMH_GET(s->stats->reason) == VMH_R_NOT_TRIED)
		vmh_tcps_set_reason(s, VMH_R_TCP_BOUND);
}

int vmh_tcps_shutdown(struct vmh_tcps *s, int fd, int how)
{
	struct vmh_tcp_info info;
	int rc = VMH_TCPS_KERNELS;

	(void)fd;
	if (how < SHUT_RD || how > SHUT_RDWR)
		return -EINVAL;
	if (vmh_tcps_has_ended(s)) {
		vmh_epoll_notify(&s->obj); /* as the kernel: an edge all the same */
		vmh_wake_all();
		return -ENOTCONN;
	}
	vmh_rings_settle(); /* what has come before is read still */
	vmh_lock(&s->obj.lock);
	if (vmh_tcps_seeks(s)) {
		undo(s);
		vmh_tcps_set_reason(s, VMH_R_SHUTDOWN);
		rc = 0;
	} else if (vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING) {
		vmh_lock(&s->io);
		vmh_tcp_get_info(s->conn, &info);
		rc = info.state == VMH_TCP_SYN_SENT ? 0 : vmh_tcp_shutdown(s->conn, how);
		vmh_tcps_refresh(s);
		vmh_unlock(&s->io);
		vmh_tring_flush(s->tring);
		if (info.state == VMH_TCP_SYN_SENT) {
			undo(s);
			vmh_tcps_set_reason(s, VMH_R_SHUTDOWN);
		} else if (vmh_tcps_bits(s)) {
			vmh_epoll_notify(&s->obj);
		}
		if (!rc && info.state != VMH_TCP_SYN_SENT)
			s->opening = VMH_TCPS_OPEN; /* the next connect() says EISCONN */
		vmh_wake_all();
	}
	vmh_unlock(&s->obj.lock);
	return rc;
}

int vmh_tcps_name(struct vmh_tcps *s, bool peer, struct sockaddr *a, socklen_t *len)
{
	struct vmh_tcp_info info = { .state = VMH_TCP_CLOSE };
	bool parked;

	vmh_lock(&s->io);
	parked = vmh_tcps_parked(s);
	if (s->conn)
		vmh_tcp_get_info(s->conn, &info);
	vmh_unlock(&s->io);
	if (!parked) /* it has just gone home */
		return VMH_TCPS_KERNELS;
	if (peer && (info.state == VMH_TCP_SYN_SENT || info.state == VMH_TCP_CLOSE || info.state == VMH_TCP_TIME_WAIT))
		return -ENOTCONN;
	return vmh_tcps_tell(s->v6, peer ? &s->addr.raddr : &s->addr.laddr, peer ? s->addr.rport : s->addr.lport, a, len);
}
