/* TCP socket objects: creation and death. */
#include "vmh_tcps.h"
#include "vmh_heap.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_param.h"
#include "vmh_tcps_spare.h"
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_net.h"
#include "vmh_wait.h"
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/mman.h>

#define CHUNK 16

VMH_EACH_CALL _Atomic int vmh_tcps_on;
_Atomic bool vmh_tcps_ending;
static struct vmh_lock pool_lock;
static struct vmh_tcps *free_list;
static struct vmh_tcps *_Atomic all;

void vmh_tcps_init(void)
{
	bool wanted;

	if (!vmh_params.hybrid_tcp)
		vmh_conf_refresh();
	wanted = vmh_params.hybrid_tcp || vmh_conf_any_tcp() || vmh_params.stats_file[0]; /* the last: to be counted */
	atomic_store(&vmh_tcps_on, wanted && vmh_params.offloaded_sockets);
	if (vmh_params.tcp_max_syn_rate && vmh_params.hybrid_tcp != VMH_TCPS_OFFLOAD)
		vmh_log(VMH_LOG_DETAILS, "VMA_TCP_MAX_SYN_RATE has no effect where the kernel listens, as it does unless "
			"VMA_HYBRID_TCP = offload");
}

static struct vmh_tcps *alloc(void)
{
	struct vmh_tcps *s;

	vmh_lock(&pool_lock);
	vmh_plain_init();
	if (!free_list) {
		struct vmh_tcps *chunk = mmap(NULL, CHUNK * sizeof(*chunk), PROT_READ | PROT_WRITE,
					      MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		if (chunk == MAP_FAILED) {
			vmh_unlock(&pool_lock);
			return NULL;
		}
		for (int i = 0; i < CHUNK; i++) {
			atomic_store(&chunk[i].obj.closed, 2);
			chunk[i].free_next = free_list;
			free_list = &chunk[i];
			chunk[i].all_next = atomic_load(&all);
			atomic_store_explicit(&all, &chunk[i], memory_order_release);
		}
	}
	s = free_list;
	free_list = s->free_next;
	vmh_unlock(&pool_lock);
	return s;
}

/* closed: as far as that, at most */
static void each(void (*fn)(struct vmh_tcps *s, void *arg), void *arg, uint8_t closed)
{
	for (struct vmh_tcps *s = atomic_load_explicit(&all, memory_order_acquire); s; s = s->all_next) {
		if (atomic_load(&s->obj.closed) > closed)
			continue;
		vmh_obj_hold(&s->obj);
		if (atomic_load(&s->obj.closed) <= closed)
			fn(s, arg);
		vmh_obj_put(&s->obj);
	}
}

void vmh_tcps_each(void (*fn)(struct vmh_tcps *s, void *arg), void *arg)
{
	each(fn, arg, 0);
}

void vmh_tcps_each_closing(void (*fn)(struct vmh_tcps *s, void *arg), void *arg)
{
	each(fn, arg, 1);
}

void vmh_tcps_glance(void (*fn)(struct vmh_tcps *s, void *arg), void *arg)
{
	for (struct vmh_tcps *s = atomic_load_explicit(&all, memory_order_acquire); s; s = s->all_next)
		if (!atomic_load_explicit(&s->obj.closed, memory_order_relaxed))
			fn(s, arg);
}

void vmh_tcps_set_reason(struct vmh_tcps *s, unsigned reason)
{
	VMH_SET(s->stats->reason, reason);
}

void vmh_tcps_suppose(struct vmh_tcps *s, unsigned reason)
{
	unsigned was = VMH_GET(s->stats->reason);

	if (was == VMH_R_NOT_TRIED || was == VMH_R_TCP_KERNEL || was == VMH_R_TYPE || was == VMH_R_TCP_ACCEPT ||
	    was == VMH_R_TCP_BOUND || was == VMH_R_TCP_REFUSED || was == VMH_R_TCP_NO_ANSWER)
		vmh_tcps_set_reason(s, reason);
}

static void note_nonblock(struct vmh_tcps *s, bool on)
{
	atomic_store(&s->nonblock, on);
	VMH_SET(s->stats->blocking, !on);
}

void vmh_tcps_set_nonblock(struct vmh_tcps *s, bool on)
{
	note_nonblock(s, on);
	if (vmh_tcps_state(s) == VMH_TCPS_KERNEL)
		vmh_plain_shut(s->obj.fd); /* the next call opens it again, as it is now */
}

void vmh_tcps_ask_nonblock(struct vmh_tcps *s, int fd)
{
	long flags = vmh_sys(SYS_fcntl, fd, F_GETFL), was;

	do { /* another thread may set it meanwhile */
		was = flags;
		vmh_tcps_set_nonblock(s, flags >= 0 && (flags & O_NONBLOCK));
		flags = vmh_sys(SYS_fcntl, fd, F_GETFL);
	} while (flags != was);
}

void vmh_tcps_will_wait(struct vmh_tcps *s)
{
	if (!vmh_plain_nowait(s->obj.fd))
		return;
	note_nonblock(s, false);
	vmh_plain_waits(s->obj.fd);
}

void vmh_tcps_touch(int fd)
{
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s)
		s->touched |= VMH_TCPS_TOUCHED;
}

struct vmh_tcps *vmh_tcps_install(int fd, bool v6, bool nonblock, uint64_t inode)
{
	const size_t from = offsetof(struct vmh_tcps, state), to = offsetof(struct vmh_tcps, io);
	struct vmh_tcps *s;

	vmh_fdtab_init();
	if (!vmh_fd_fits(fd) || !(s = alloc()))
		return NULL;
	memset((char *)s + from, 0, to - from);
	VMH_SET(s->rounds, 0);
	VMH_SET(s->policy, (uint8_t)vmh_params.hybrid_tcp);
	vmh_tcp_options_init(&s->opt);
	vmh_tcps_defaults(&s->opt, v6);
	s->obj.items = NULL;
	atomic_store(&s->obj.class_, VMH_CLASS_TCP);
	VMH_SET(s->stats, vmh_stats_sock_new(fd));
	VMH_SET(s->stats->proto, IPPROTO_TCP);
	s->v6 = v6;
	VMH_SET(s->stats->family, v6 ? 6 : 4);
	note_nonblock(s, nonblock);
	vmh_tcps_set_reason(s, vmh_params.hybrid_tcp == 1 ? VMH_R_TCP_KERNEL : VMH_R_NOT_TRIED);
	vmh_fd_install(fd, &s->obj);
	/* else before a move: most never come to it */
	if (inode || VMH_GET(s->policy) == VMH_TCPS_OFFLOAD || vmh_fdtab_parted())
		vmh_obj_name(&s->obj, inode);
	vmh_plain_open(s);
	return s;
}

/* Object lock held, state KERNEL, conn and addr are set. */
void vmh_tcps_publish(struct vmh_tcps *s)
{
	struct vmh_sock_stats *st = s->stats;

	memcpy(st->local_addr, s->addr.laddr.b, 16);
	memcpy(st->remote_addr, s->addr.raddr.b, 16);
	VMH_SET(st->local_port, s->addr.lport);
	VMH_SET(st->remote_port, s->addr.rport);
	VMH_SET(st->flow_id, s->flow_id);
	VMH_SET(st->ring_id, vmh_tring_ring(s->tring)->id);
	VMH_SET(st->offloaded, 1);
	VMH_SET(st->rx_offloaded, 1);
	VMH_SET(st->tx_offloaded, 1);
	vmh_tcps_set_reason(s, VMH_R_NONE);
	vmh_tring_count(s->tring, 1);
	vmh_plain_shut(s->obj.fd);
	vmh_lock(&s->io);
	atomic_store(&s->fresh, 1);
	vmh_tcps_refresh(s);
	atomic_store(&s->state, VMH_TCPS_RING);
	vmh_unlock(&s->io);
	vmh_tcps_unfit_from_birth(s);
	vmh_tpath_begun(s);
	if (__atomic_load_n(&s->obj.items, __ATOMIC_RELAXED)) {
		vmh_epoll_member_parked(&s->obj, true);
		vmh_epoll_member_on_ring(&s->obj);
		if (vmh_tcps_bits(s))
			vmh_epoll_notify(&s->obj);
	}
	vmh_tring_flush(s->tring);
	vmh_wake_all();
}

static bool is_tcp(int domain, int type, int protocol)
{
	return (domain == AF_INET || domain == AF_INET6) && (type & 0xf) == SOCK_STREAM &&
	       (!protocol || protocol == IPPROTO_TCP);
}

int vmh_tcps_spare(int domain, int type, int protocol, uint64_t *inode)
{
	const int flags = type & (SOCK_NONBLOCK | SOCK_CLOEXEC);

	*inode = 0;
	if (!is_tcp(domain, type, protocol) || type != (SOCK_STREAM | flags) || !atomic_load(&vmh_tcps_on))
		return -1;
	return vmh_tspare_take(VMH_TSPARE_OPENS, domain == AF_INET6, flags, inode);
}

void vmh_tcps_created(int fd, int domain, int type, int protocol, uint64_t inode)
{
	if (!is_tcp(domain, type, protocol))
		return;
	if (!inode)
		vmh_tcps_defaults_kernel(fd, domain == AF_INET6);
	if (atomic_load(&vmh_tcps_on))
		vmh_tcps_install(fd, domain == AF_INET6, type & SOCK_NONBLOCK, inode);
}

bool vmh_tcps_at_rest(int fd)
{
	struct tcp_info info = { 0 };
	socklen_t len = 1; /* tcpi_state */

	return vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_INFO, &info, &len) < 0 || info.tcpi_state == TCP_CLOSE;
}

bool vmh_tcps_in_repair(int fd)
{
	int on = 0;
	socklen_t len = sizeof(on);

	return !vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_REPAIR, &on, &len) && on;
}

static void note_local(struct vmh_tcps *s, const struct vmh_tcp_addr *a)
{
	memcpy(s->stats->local_addr, a->laddr.b, 16);
	VMH_SET(s->stats->local_port, a->lport);
}

static void note_remote(struct vmh_tcps *s, const struct vmh_tcp_addr *a)
{
	memcpy(s->stats->remote_addr, a->raddr.b, 16);
	VMH_SET(s->stats->remote_port, a->rport);
}

void vmh_tcps_forget_peer(struct vmh_tcps *s)
{
	note_remote(s, &(const struct vmh_tcp_addr){ 0 });
}

bool vmh_tcps_note_names(struct vmh_tcps *s, int fd, struct vmh_tcp_addr *a)
{
	memset(a, 0, sizeof(*a));
	if (vmh_tcps_kernel_name(fd, false, &a->laddr, &a->lport))
		note_local(s, a);
	if (vmh_tcps_kernel_name(fd, true, &a->raddr, &a->rport))
		note_remote(s, a);
	return a->lport && a->rport;
}

/* The kernel has opened it. */
static void offload(struct vmh_tcps *s, int fd)
{
	if (vmh_tcps_wants_adoption(s))
		vmh_tcps_adopt(s, fd, VMH_R_TCP_OFFLOAD);
	else
		vmh_tcps_suppose(s, VMH_R_TCP_TURN);
}

void vmh_tcps_connected(int fd, long r, const struct sockaddr *to, socklen_t len)
{
	TCPS_HELD s = vmh_tcps_get(fd);
	bool begun = !r || r == -EINPROGRESS;
	struct vmh_tcp_addr a;

	if (!s)
		return;
	s->touched |= VMH_TCPS_TOUCHED;
	if (begun && to && vmh_tcps_parse(to, len, &a.raddr, &a.rport) && a.rport && !vmh_ip_any(&a.raddr)) {
		note_remote(s, &a);
		if (vmh_tcps_kernel_name(fd, false, &a.laddr, &a.lport))
			note_local(s, &a);
	} else {
		vmh_tcps_note_names(s, fd, &a);
	}
	VMH_SET(s->connecting, begun || !vmh_tcps_at_rest(fd));
	if (!r && to && to->sa_family == AF_UNSPEC && vmh_tcps_state(s) == VMH_TCPS_LISTEN) {
		vmh_lock(&s->obj.lock);
		vmh_tlisten_shut(s);
		vmh_unlock(&s->obj.lock);
	}
	if (!r && VMH_GET(s->policy) == VMH_TCPS_OFFLOAD)
		offload(s, fd);
}

/* The kernel has such a listener for good, or for long: each of its connections would be moved to a ring, and home at its
 * end. */
static bool is_shared(const struct vmh_tcps *listener)
{
	unsigned reason = VMH_GET(listener->stats->reason);

	return listener->odd || reason == VMH_R_FORK || reason == VMH_R_EXEC || reason == VMH_R_PORT_SHARED;
}

static bool speaks_tcp(int fd)
{
	int protocol = 0;
	socklen_t len = sizeof(protocol);

	return !vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_PROTOCOL, &protocol, &len) && protocol == IPPROTO_TCP;
}

void vmh_tcps_accepted(const struct vmh_tcps *from, int fd, const struct sockaddr *peer, socklen_t peer_len, int flags)
{
	struct sockaddr_storage name = { 0 };
	socklen_t len = sizeof(name);
	struct vmh_tcp_addr a = { 0 };

	if (!atomic_load(&vmh_tcps_on) || vmh_sys(SYS_getsockname, fd, &name, &len) < 0 ||
	    !vmh_tcps_parse((struct sockaddr *)&name, len, &a.laddr, &a.lport) || (!from && !speaks_tcp(fd)))
		return;
	vmh_tcps_install(fd, name.ss_family == AF_INET6, flags & SOCK_NONBLOCK, 0);
	TCPS_HELD s = vmh_tcps_get(fd);
	if (!s)
		return;
	VMH_SET(s->connecting, 1);
	s->accepted = 1;
	note_local(s, &a);
	if (!peer_len || !vmh_tcps_parse(peer, peer_len, &a.raddr, &a.rport))
		vmh_tcps_kernel_name(fd, true, &a.raddr, &a.rport);
	if (a.rport)
		note_remote(s, &a);
	s->peculiar = from && from->peculiar;
	vmh_tcps_policy_server(s, &a.laddr, a.lport);
	if (from && from->secret) {
		s->secret = true;
		vmh_tcps_kernel_takes(s, VMH_R_SOCKOPT);
		return;
	}
	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD && (vmh_tcps_hands_on() || (from && is_shared(from))))
		VMH_SET(s->policy, VMH_TCPS_ADAPTIVE);
	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD)
		offload(s, fd);
}

void vmh_tcps_closed(struct vmh_tcps *s)
{
	vmh_epoll_member_closed(&s->obj, vmh_tspare_is_offered(s) || (s->lent && vmh_tcps_owns_fd(s)));
	vmh_wake_all();
}

void vmh_tcps_recycle(struct vmh_tcps *s)
{
	vmh_tcps_close_left(s);
	vmh_lock(&s->io);
	vmh_heap_free(s->listening);
	s->listening = NULL;
	atomic_store(&s->state, VMH_TCPS_HOME);
	vmh_unlock(&s->io);
	vmh_tcp_blob_free(&s->blob);
	vmh_lane_leave(&s->lane);
	vmh_stats_file_dump(s->stats);
	vmh_stats_sock_free(s->stats);
	atomic_store(&s->obj.class_, VMH_CLASS_FREE);
	vmh_lock(&pool_lock);
	s->free_next = free_list;
	free_list = s;
	vmh_unlock(&pool_lock);
}

static void child_reset(struct vmh_tcps *s, void *arg)
{
	if (!*(const bool *)arg)
		vmh_tcps_left_fork_child(s);
	vmh_tcps_left(s);
	vmh_lock_reset(&s->obj.lock);
	vmh_lock_reset(&s->io);
	vmh_tlisten_fork_child(s);
	atomic_store(&s->fresh, 0);
	s->shown = 0;
	atomic_store(&s->state, VMH_TCPS_HOME);
	s->conn = NULL;
	s->tring = NULL;
	s->flow_id = 0;
	VMH_SET(s->stats->flow_id, 0);
	VMH_SET(s->stats->offloaded, 0);
	vmh_tcps_set_reason(s, VMH_R_FORK);
}

static void child_refs(struct vmh_tcps *s, void *arg)
{
	(void)arg;
	vmh_obj_fork_child(&s->obj);
}

/* All went home before the fork. The stack's locks may be another thread's of the parent: a child of a process that
 * had TCP rings leaves new connections to the kernel. */
void vmh_tcps_fork_child(void)
{
	bool in_call = vmh_held.objs; /* a handler has forked: that call goes on here, too */

	vmh_lock_reset(&pool_lock);
	atomic_store(&vmh_tcps_ending, false);
	vmh_trings_fork_child();
	vmh_tport_fork_child();
	vmh_tshow_fork_child();
	vmh_tended_fork_child();
	vmh_plain_fork_child();
	vmh_tcps_move_fork_child();
	vmh_tcps_glance(child_refs, NULL);
	vmh_tcps_each_closing(child_reset, &in_call); /* the thread that closes one has its lock in the parent */
	if (vmh_trings_any())
		atomic_store(&vmh_tcps_on, 0);
}
