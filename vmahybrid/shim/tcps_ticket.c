/* See vmh_tcps_ticket.h. What has come by a ring and nobody accepted is not in the queue of the kernel's listener, and can't
 * be put there; another process, or program, that has the listener would never hear of it. A ticket can be: a connection
 * by which we come to the listener ourselves, over loopback. The service keeps what it stands for. So select(), epoll and
 * the like wake whoever waits, and accept() knows a ticket by the address it comes from, brings it to the service and
 * gives the program what it gets for it.
 *
 * It fails where loopback does not lead to the listener (SO_BINDTODEVICE, a firewall), or its queue is full. Then the
 * connection waits in the shim of the program that had the listener. */
#include "vmh_tcps_ticket.h"
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_main.h"
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>

#define FROM_V4 0x7f564d48u      /* 127.86.77.72 */
#define LOOPBACK_NS 20000000     /* a handshake over loopback is over when connect() returns */
#define KEPT_TRIES 50            /* another thread may be about to bring to the service what it stands for */
#define KEPT_NAP_NS 1000000

static struct vmh_ip from_address(bool v4)
{
	return v4 ? vmh_ip4(htonl(FROM_V4)) : vmh_ip6(&in6addr_loopback);
}

static bool is_ready(int fd, short events, long ns)
{
	struct pollfd p = { .fd = fd, .events = events };
	struct timespec ts = { 0, ns };

	return vmh_sys(SYS_ppoll, &p, 1, &ts, NULL, sizeof(uint64_t)) > 0 && p.revents == events;
}

static bool comes(int fd, const struct vmh_ip *to, in_port_t port)
{
	struct sockaddr_storage name;
	struct vmh_ip from = from_address(vmh_ip_is4(to));
	socklen_t len = vmh_tcps_compose(!vmh_ip_is4(to), &from, 0, &name);
	long r = vmh_sys(SYS_bind, fd, &name, len);

	if (r < 0)
		return false;
	len = vmh_tcps_compose(!vmh_ip_is4(to), to, port, &name);
	r = vmh_sys(SYS_connect, fd, &name, len);
	return !r || (r == -EINPROGRESS && is_ready(fd, POLLOUT, LOOPBACK_NS));
}

bool vmh_ticket_issue(const struct vmh_ip *addr, in_port_t port, unsigned families, int fd)
{
	bool any = vmh_ip_any(addr), issued;
	struct vmh_ip to = any ? vmh_ip4(htonl(INADDR_LOOPBACK)) : *addr;
	int ticket;

	if (any && !(families & VMH_TCP_IPV4) && !vmh_tcps_kernel_name(fd, false, &to, &(in_port_t){ 0 }))
		return false;
	ticket = (int)vmh_sys(SYS_socket, vmh_ip_is4(&to) ? AF_INET : AF_INET6, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK,
			      IPPROTO_TCP);
	if (ticket < 0)
		return false;
	issued = comes(ticket, &to, port) && !vmh_session_tcp_keep(fd, ticket);
	if (!issued) /* it leaves nothing in the queue but a reset */
		vmh_sys(SYS_setsockopt, ticket, SOL_SOCKET, SO_LINGER, &(struct linger){ .l_onoff = 1 }, sizeof(struct linger));
	vmh_sys(SYS_close, ticket);
	if (issued) {
		vmh_fd_close(fd);
		vmh_sys(SYS_close, fd);
	}
	return issued;
}

/* By its name, if the program has asked for that. */
static bool is_ticket(int fd, const struct sockaddr *a, const socklen_t *len, socklen_t room)
{
	struct vmh_ip there, here, v6 = from_address(false);
	in_port_t port;

	if ((room < sizeof(struct sockaddr_in) || !vmh_tcps_parse(a, *len < room ? *len : room, &there, &port)) &&
	    !vmh_tcps_kernel_name(fd, true, &there, &port))
		return false;
	if (vmh_ip_is4(&there))
		return vmh_ip_v4(&there) == htonl(FROM_V4);
	return !memcmp(&there, &v6, sizeof(v6)) && vmh_tcps_kernel_name(fd, false, &here, &port) &&
	       memcmp(&here, &v6, sizeof(v6)) != 0;
}

/* A connection, or why there is none. The ticket is open still with -EPERM (it is none) and -ENOTCONN. */
static int fetch(int ticket)
{
	static _Atomic bool in_vain; /* the last time: what came before is not worth the same wait again */
	const struct timespec nap = { 0, KEPT_NAP_NS };
	int r = -EPERM, tries = atomic_load(&in_vain) ? 2 : KEPT_TRIES;

	if (vmh_session_open())
		return -ENOTCONN;
	for (int i = 0; r == -EPERM && i < tries; i++) {
		if (i)
			vmh_sys(SYS_nanosleep, &nap, NULL);
		r = vmh_session_tcp_fetch(ticket);
	}
	atomic_store(&in_vain, r == -EPERM);
	return r;
}

int vmh_ticket_redeem(int r, struct sockaddr *a, socklen_t *len, socklen_t room, int flags)
{
	int fd;

	if (vmh_likely(r < 0 || !is_ticket(r, a, len, room)))
		return r;
	vmh_started(); /* it may be all that the program has to do with us */
	fd = fetch(r);
	if (fd == -EPERM || fd == -ENOTCONN) /* somebody else's who comes from there; or the service carries it, see tickets.py */
		return r;
	if (fd < 0)
		return fd;
	vmh_fd_close(fd);
	if (!(flags & SOCK_CLOEXEC))
		vmh_sys(SYS_fcntl, fd, F_SETFD, 0);
	if (flags & SOCK_NONBLOCK)
		vmh_sys(SYS_fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
	if (room) {
		*len = room;
		vmh_sys(SYS_getpeername, fd, a, len);
	}
	return fd;
}
