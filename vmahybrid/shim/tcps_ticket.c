/* See vmh_tcps_ticket.h. What has come by a ring and nobody accepted is not in the queue of the kernel's listener, which
 * parent and child share, and can't be put there. A ticket can: a connection by which we come ourselves, over loopback.
 * The connection that it stands for waits in a pair of Unix sockets that both processes have. accept() knows a ticket by
 * its port, in memory that both have, and gives what it stands for. So select(), epoll and the like wake whoever waits,
 * with the shim or without it.
 *
 * It fails where loopback does not lead to the listener (SO_BINDTODEVICE, a firewall) or its queue is full. Then the
 * connection stays with the parent, as does one whose ticket is accepted by a process without the shim. */
#include "vmh_tcps_ticket.h"
#include "vmh_base.h"
#include "vmh_heap.h"
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define TICKETS 512
#define LOOPBACK_NS 20000000 /* a handshake over loopback is over when connect() returns */

struct shared {
	_Atomic uint32_t issued;         /* and not redeemed */
	_Atomic uint32_t ports[TICKETS]; /* network order; 0: free */
};

struct vmh_tickets {
	int give, take; /* hidden */
	struct shared *shared;
};

/* What goes with a connection: it is closed by a reset while nobody has accepted it, as the kernel's are. */
struct carried {
	struct linger linger;
};

union fds_of_one {
	char bytes[CMSG_SPACE(2 * sizeof(int))];
	struct cmsghdr align;
};

_Atomic bool vmh_tickets_any;

static struct shared *share(void)
{
	long p = vmh_sys(SYS_mmap, NULL, sizeof(struct shared), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0L);

	return p < 0 && p > -4096 ? NULL : (struct shared *)p;
}

static void let_go(struct vmh_tickets *t)
{
	if (t->shared)
		vmh_sys(SYS_munmap, t->shared, sizeof(*t->shared));
	vmh_heap_free(t);
}

void vmh_tickets_begin(struct vmh_tcps *listener)
{
	struct vmh_tickets *t = listener->tickets ? NULL : vmh_heap_zero(1, sizeof(*t));
	int pair[2];

	if (!t)
		return;
	t->shared = share();
	if (!t->shared || vmh_sys(SYS_socketpair, AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, pair) < 0) {
		let_go(t);
		return;
	}
	t->give = vmh_fd_hide(pair[0]);
	t->take = vmh_fd_hide(pair[1]);
	listener->tickets = t;
	atomic_store(&vmh_tickets_any, true);
}

void vmh_tickets_end(struct vmh_tcps *listener)
{
	struct vmh_tickets *t = listener->tickets;

	if (!t)
		return;
	listener->tickets = NULL;
	vmh_fd_hidden_close(t->give);
	vmh_fd_hidden_close(t->take);
	let_go(t);
}

static bool is_ready(int fd, short events, long ns)
{
	struct pollfd p = { .fd = fd, .events = events };
	struct timespec ts = { ns / 1000000000, ns % 1000000000 };

	return vmh_sys(SYS_ppoll, &p, 1, &ts, NULL, sizeof(uint64_t)) > 0 && p.revents == events;
}

/* ---- to give ---- */

static _Atomic uint32_t *slot_for(struct shared *all, in_port_t port)
{
	for (unsigned i = 0; i < TICKETS; i++) {
		uint32_t empty = 0;

		if (atomic_compare_exchange_strong(&all->ports[i], &empty, port))
			return &all->ports[i];
	}
	return NULL;
}

/* A socket from which connect() comes to the listener, its own port in *port; or -1. */
static int from_here(struct vmh_ip to, in_port_t *port)
{
	struct sockaddr_storage name;
	bool v6 = !vmh_ip_is4(&to);
	socklen_t len = vmh_tcps_compose(v6, &to, 0, &name);
	struct vmh_ip ip;
	int fd = (int)vmh_sys(SYS_socket, v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, IPPROTO_TCP);

	if (fd < 0)
		return -1;
	if (vmh_sys(SYS_bind, fd, &name, len) == 0 && vmh_tcps_kernel_name(fd, false, &ip, port))
		return fd;
	vmh_sys(SYS_close, fd);
	return -1;
}

/* With a byte, for TCP_DEFER_ACCEPT. */
static bool comes(int fd, const struct vmh_ip *to, in_port_t port)
{
	struct sockaddr_storage name;
	socklen_t len = vmh_tcps_compose(!vmh_ip_is4(to), to, port, &name);
	long r = vmh_sys(SYS_connect, fd, &name, len);

	return (!r || (r == -EINPROGRESS && is_ready(fd, POLLOUT, LOOPBACK_NS))) &&
	       vmh_sys(SYS_sendto, fd, "", 1, MSG_NOSIGNAL, NULL, 0) == 1;
}

static bool carry(int give, int fd, int ticket)
{
	struct carried what = { { 0 } };
	socklen_t len = sizeof(what.linger);
	union fds_of_one c = { { 0 } };
	struct iovec iov = { &what, sizeof(what) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = c.bytes, .msg_controllen = sizeof(c.bytes) };
	struct cmsghdr *h = CMSG_FIRSTHDR(&m);

	h->cmsg_level = SOL_SOCKET;
	h->cmsg_type = SCM_RIGHTS;
	h->cmsg_len = CMSG_LEN(2 * sizeof(int));
	memcpy(CMSG_DATA(h), (int[]){ fd, ticket }, 2 * sizeof(int));
	if (vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_LINGER, &what.linger, &len) < 0)
		return false;
	vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_LINGER, &(struct linger){ .l_onoff = 1 }, sizeof(struct linger));
	if (vmh_sys(SYS_sendmsg, give, &m, MSG_NOSIGNAL | MSG_DONTWAIT) == sizeof(what))
		return true;
	vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_LINGER, &what.linger, sizeof(what.linger));
	return false;
}

/* A connection that was carried, or a number below 0. */
static int next_one(const struct vmh_tickets *t)
{
	struct carried what = { { 0 } };
	union fds_of_one c = { { 0 } };
	struct iovec iov = { &what, sizeof(what) };
	struct msghdr m = { .msg_iov = &iov, .msg_iovlen = 1, .msg_control = c.bytes, .msg_controllen = sizeof(c.bytes) };
	const struct cmsghdr *h;
	int fds[2];

	if (vmh_sys(SYS_recvmsg, t->take, &m, MSG_DONTWAIT | MSG_CMSG_CLOEXEC) != sizeof(what))
		return -EAGAIN;
	h = CMSG_FIRSTHDR(&m);
	if (!h || h->cmsg_type != SCM_RIGHTS || h->cmsg_len < CMSG_LEN(sizeof(int)))
		return -EMFILE;
	memcpy(fds, CMSG_DATA(h), h->cmsg_len == CMSG_LEN(sizeof(fds)) ? sizeof(fds) : sizeof(fds[0]));
	if (h->cmsg_len == CMSG_LEN(sizeof(fds))) {
		vmh_fd_close(fds[1]);
		vmh_sys(SYS_close, fds[1]);
	}
	vmh_sys(SYS_setsockopt, fds[0], SOL_SOCKET, SO_LINGER, &what.linger, sizeof(what.linger));
	return fds[0];
}

int vmh_ticket_issue(const struct vmh_tcps *listener, const struct vmh_ip *addr, in_port_t port, unsigned families, int fd)
{
	const struct vmh_tickets *t = listener->tickets;
	struct vmh_ip to = *addr;
	_Atomic uint32_t *slot = NULL;
	in_port_t mine;
	uint32_t mark;
	int ticket;
	bool came;

	if (!t)
		return fd;
	if (vmh_ip_any(&to))
		to = families & VMH_TCP_IPV4 ? vmh_ip4(htonl(INADDR_LOOPBACK)) : vmh_ip6(&in6addr_loopback);
	ticket = from_here(to, &mine);
	if (ticket >= 0)
		slot = slot_for(t->shared, mine);
	mark = mine;
	if (!slot || !carry(t->give, fd, ticket)) {
		if (slot)
			atomic_store(slot, 0);
		if (ticket >= 0)
			vmh_sys(SYS_close, ticket);
		return fd;
	}
	vmh_fd_close(fd);
	vmh_sys(SYS_close, fd);
	atomic_fetch_add(&t->shared->issued, 1);
	came = comes(ticket, &to, port);
	vmh_sys(SYS_close, ticket); /* the other copy of it stays open as long as it is in the queue */
	if (!came && atomic_compare_exchange_strong(slot, &mark, 0)) {
		atomic_fetch_sub(&t->shared->issued, 1);
		return next_one(t); /* another one's, perhaps, whose ticket stands for ours now */
	}
	return -EALREADY;
}

/* ---- to take ---- */

struct vmh_ticket vmh_ticket_await(const struct vmh_tcps *listener, struct sockaddr *a, socklen_t *len, int flags)
{
	struct vmh_ticket t = { .a = a, .len = len, .flags = flags };

	if (!listener || !listener->tickets)
		return t;
	t.listener = listener;
	t.size = !a || vmh_bad_ptr(len) ? 0 : *len;
	return t;
}

static bool is_ticket(struct shared *all, int fd)
{
	struct vmh_ip here, there;
	in_port_t port, from;

	if (!atomic_load(&all->issued) || !vmh_tcps_kernel_name(fd, true, &there, &from) ||
	    !vmh_tcps_kernel_name(fd, false, &here, &port) || memcmp(&here, &there, sizeof(here)) != 0)
		return false;
	for (unsigned i = 0; i < TICKETS; i++) {
		uint32_t mark = from;

		if (atomic_load(&all->ports[i]) == from && atomic_compare_exchange_strong(&all->ports[i], &mark, 0)) {
			atomic_fetch_sub(&all->issued, 1);
			return true;
		}
	}
	return false;
}

int vmh_ticket_redeem(const struct vmh_ticket *t, int r)
{
	const struct vmh_tickets *of = t->listener ? t->listener->tickets : NULL;
	int fd;

	if (!of || r < 0 || !is_ticket(of->shared, r))
		return r;
	fd = next_one(of);
	if (fd < 0) {
		vmh_sys(SYS_close, r);
		return fd;
	}
	vmh_fd_close(fd);
	vmh_sys(SYS_dup3, fd, r, t->flags & SOCK_CLOEXEC);
	vmh_sys(SYS_close, fd);
	if (t->flags & SOCK_NONBLOCK)
		vmh_sys(SYS_fcntl, r, F_SETFL, O_RDWR | O_NONBLOCK);
	if (t->a && !vmh_bad_ptr(t->len)) {
		*t->len = t->size;
		vmh_sys(SYS_getpeername, r, t->a, t->len);
	}
	return r;
}
