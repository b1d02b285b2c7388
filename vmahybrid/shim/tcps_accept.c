/* accept() of a listener on rings: theirs, the kernel's, and those that went home before anybody took them. */
#include "vmh_base.h"
#include "vmh_iomux_int.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_listen.h"
#include "vmh_tcps_spare.h"
#include "vmh_tcps_ticket.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <netinet/in.h>

#define KERNEL_EVERY 32  /* connections of rings: then the kernel's are looked at first */
#define OS_LOOK_NS 20000u /* for who accepts in a loop, without blocking */

/* What a connection has from its listener, whose io is held. */
static void inherit(struct vmh_tcps *n, const struct vmh_tcps *s)
{
	n->opt = s->opt;
	n->linger = s->linger;
	n->linger_s = s->linger_s;
	n->inq = s->inq;
	n->rcvtimeo_ns = VMH_GET(s->rcvtimeo_ns);
	n->sndtimeo_ns = VMH_GET(s->sndtimeo_ns);
	VMH_SET(n->connecting, 1);
	n->accepted = 1;
}

/* io of the listener held. The next connection, its holder is n. */
static int next_conn(struct vmh_tcps *s, struct vmh_tcps *n)
{
	struct vmh_tlisten *l = s->listening;
	int rc = -EAGAIN;

	for (unsigned i = 0; i < l->nrings && rc; i++) {
		rc = vmh_tcp_accept(l->r[i].conn, n, &n->conn);
		if (rc)
			continue;
		n->tring = l->r[i].tring;
		n->ifindex = l->r[i].ifindex;
		n->flow_id = l->flow_id;
		vmh_tcp_address(n->conn, &n->addr);
	}
	return rc;
}

/* A descriptor, -EAGAIN, or an error of socket(2). */
int vmh_tlisten_from_ring(struct vmh_tcps *s, int flags, struct vmh_tcp_addr *a)
{
	struct vmh_inherited of_listener;
	struct vmh_tcps *n;
	uint64_t inode;
	int fd, rc = -EAGAIN;

	if (!(vmh_tcps_bits(s) & VMH_IN))
		return -EAGAIN;
	of_listener.n = 0; /* the rest is large */
	flags &= SOCK_NONBLOCK | SOCK_CLOEXEC;
	fd = vmh_tspare_take(VMH_TSPARE_ACCEPTS, s->v6, flags, &inode);
	if (fd < 0)
		fd = (int)vmh_sys(SYS_socket, s->v6 ? AF_INET6 : AF_INET, SOCK_STREAM | flags, IPPROTO_TCP);
	if (fd < 0)
		return fd;
	vmh_fd_close(fd); /* closed behind our back */
	n = vmh_tcps_install(fd, s->v6, flags & SOCK_NONBLOCK, inode);
	if (!n) {
		vmh_sys(SYS_close, fd);
		return -ENFILE;
	}
	vmh_lock(&n->obj.lock);
	vmh_lock(&s->io);
	inherit(n, s);
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && vmh_tcps_state(n) == VMH_TCPS_KERNEL) {
		rc = next_conn(s, n);
		vmh_tlisten_refresh(s);
		if (s->listening->inherited.n)
			of_listener = s->listening->inherited;
	}
	vmh_unlock(&s->io);
	if (!rc) {
		*a = n->addr;
		n->touched = vmh_inherited_write(&of_listener, fd);
		vmh_tpath_accepted(n);
		vmh_tcps_publish(n);
	}
	vmh_unlock(&n->obj.lock);
	if (rc) {
		vmh_fd_close(fd);
		vmh_sys(SYS_close, fd);
		return rc;
	}
	/* a rule may be for one of the addresses that the listener has */
	if (vmh_ip_any(&s->listening->name.addr) && vmh_tcps_kept_server(&a->laddr, a->lport))
		vmh_tcps_home(n, VMH_R_CONF_RULE, false);
	return fd;
}

/* Under io: between the look and the call no other thread takes it, and a listener that another process has is not on
 * rings. So accept(2) does not sleep. */
static int from_kernel(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec zero = { 0 };
	socklen_t room = vmh_ticket_room(a, len);
	uint32_t reports = atomic_load(&vmh_os_reports); /* before the look: a later one calls for another */
	int r = -EAGAIN;

	vmh_lock(&s->io);
	if (vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) > 0)
		r = (int)vmh_sys(SYS_accept4, fd, a, len, flags);
	vmh_unlock(&s->io);
	if (r == -EAGAIN) /* until then it is known to have some: of a burst there is one report */
		VMH_SET(s->os_reports, reports);
	r = vmh_ticket_redeem(r, a, len, room, flags);
	if (r < 0)
		return r;
	vmh_fd_close(r);
	vmh_tcps_accepted(s, r, a, vmh_ticket_named(len, room), flags);
	return r;
}

/* Who comes seldom is told the truth each time, and so is whoever heard of readiness from the kernel. */
static bool os_due(struct vmh_tcps *s)
{
	if (VMH_GET(s->os_reports) != atomic_load_explicit(&vmh_os_reports, memory_order_relaxed))
		return true;
	return vmh_due(&s->os_looked_ns, vmh_now_ns(), OS_LOOK_NS);
}

/* As accept(2): a name that can't be told costs the connection. */
static int untold(int fd, int err)
{
	vmh_fd_close(fd);
	vmh_sys(SYS_close, fd);
	return err;
}

/* io held. A connection of the kernel's that nobody has accepted, or -EAGAIN. */
int vmh_tlisten_next_waiting(struct vmh_tlisten *l)
{
	if (!l->nwaiting)
		return -EAGAIN;
	l->nwaiting--;
	return l->waiting[l->first++ % VMH_TLISTEN_WAITING_MAX];
}

/* One that went home before anybody had accepted it. */
static int from_waiting(struct vmh_tcps *s, struct sockaddr *a, socklen_t *len, int flags)
{
	struct vmh_tlisten *l;
	int fd = -EAGAIN, err;

	vmh_lock(&s->io);
	l = s->listening;
	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN && l->nwaiting) {
		fd = vmh_tlisten_next_waiting(l);
		vmh_tlisten_refresh(s);
		if (!l->nwaiting && !l->nrings)
			atomic_store(&s->state, l->back ? VMH_TCPS_KERNEL : VMH_TCPS_HOME);
	}
	vmh_unlock(&s->io);
	if (fd < 0)
		return fd;
	if (!(flags & SOCK_CLOEXEC))
		vmh_sys(SYS_fcntl, fd, F_SETFD, 0);
	if (flags & SOCK_NONBLOCK)
		vmh_sys(SYS_fcntl, fd, F_SETFL, O_RDWR | O_NONBLOCK);
	err = a ? (int)vmh_sys(SYS_getpeername, fd, a, len) : 0;
	return err == -EFAULT || err == -EINVAL ? untold(fd, err) : fd;
}

static int accept_any(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags)
{
	struct vmh_tcp_addr from;
	bool kernel_first = atomic_fetch_add_explicit(&s->accepts, 1, memory_order_relaxed) % KERNEL_EVERY == KERNEL_EVERY - 1;
	int err, r = VMH_GET(s->listening->nwaiting) ? from_waiting(s, a, len, flags) : -EAGAIN;

	if (r == -EAGAIN && kernel_first)
		r = from_kernel(s, fd, a, len, flags);
	if (r != -EAGAIN)
		return r;
	r = vmh_tlisten_from_ring(s, flags, &from);
	err = r >= 0 && a ? vmh_tcps_tell(s->v6, &from.raddr, from.rport, a, len) : 0;
	return err ? untold(r, err) : r;
}

/* A signal came while the rings were asked to listen, and they don't: accept(2) would wait for another. */
static bool ended_before(struct vmh_tcps *s, int fd, const struct vmh_signals *began)
{
	struct pollfd p = { .fd = fd, .events = POLLIN };
	struct timespec zero = { 0 };

	return vmh_unlikely(vmh_signals_end(began, VMH_GET(s->rcvtimeo_ns) != 0)) && !atomic_load(&s->nonblock) &&
	       vmh_sys(SYS_ppoll, &p, 1, &zero, NULL, sizeof(uint64_t)) == 0;
}

int vmh_tcps_accept(struct vmh_tcps *s, int fd, struct sockaddr *a, socklen_t *len, int flags,
		    const struct vmh_signals *began, struct vmh_tcps **goes_on)
{
	TWAIT w;
	bool listens;
	int r, err;

	vmh_twait_init(&w, s, VMH_GET(s->rcvtimeo_ns), VMH_IN, fd, began);
	if (w.state != VMH_TCPS_LISTEN)
		return atomic_load(&s->listens) && ended_before(s, fd, began) ? -EINTR : VMH_TCPS_KERNELS;
	vmh_rings_poll(1);
	for (;;) {
		err = vmh_tcps_is_closed(s, &w.w);
		if (vmh_unlikely(err))
			return err;
		listens = vmh_tcps_state(s) == VMH_TCPS_LISTEN;
		if (w.blocks && !*goes_on && (!listens || atomic_load(&s->left_fd)) && !vmh_fds_apart)
			vmh_tcps_goes_on(*goes_on = s, fd);
		if (!listens)
			return VMH_TCPS_KERNELS;
		if (*goes_on)
			fd = w.kfd = vmh_tcps_fd(s, fd);
		r = accept_any(s, fd, a, len, flags);
		if (r != -EAGAIN)
			return r;
		err = vmh_tcps_wait(s, &w);
		if (vmh_tcps_bits(s) & VMH_IN)
			continue;
		if (w.now && !os_due(s))
			return err;
		r = from_kernel(s, fd, a, len, flags);
		if (r != -EAGAIN && !(err && r == -EBADF)) /* a handler that ended the wait has closed it */
			return r;
		if (err)
			return err;
	}
}
