/* Socket options of UDP sockets. The kernel socket gets every option first, so its errors are the
 * program's; then a table says what the ring path must know, ignore, or leave to the kernel for good. */
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <linux/udp.h>
#include <net/if.h>
#include <netinet/in.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/time.h>

#ifndef SO_BINDTOIFINDEX
#define SO_BINDTOIFINDEX 62
#endif
#ifndef SO_RCVTIMEO_NEW
#define SO_RCVTIMEO_NEW 66
#define SO_SNDTIMEO_NEW 67
#endif
#ifndef SO_RCVBUFFORCE
#define SO_RCVBUFFORCE 33
#endif

static int get_int(int fd, int level, int name, int fallback)
{
	int v = 0;
	socklen_t len = sizeof(v);

	if (vmh_sys(SYS_getsockopt, fd, level, name, &v, &len) < 0)
		return fallback;
	return len == 1 ? *(unsigned char *)&v : v; /* a few IP options answer one byte */
}

int64_t vmh_sock_timeout_of(int fd, int name)
{
	struct timeval tv = { 0 };
	socklen_t len = sizeof(tv);

	if (vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, name, &tv, &len) < 0)
		return 0;
	return (int64_t)tv.tv_sec * 1000000000 + (int64_t)tv.tv_usec * 1000;
}

static void read_device(struct vmh_sock *s, int fd)
{
	s->bound_if = (uint32_t)get_int(fd, SOL_SOCKET, SO_BINDTOIFINDEX, 0);
	atomic_fetch_add(&vmh_bindings, 1);
}

/* IP_TOS sets it as well (rt_tos2priority() of Linux): the kernel socket knows. */
static void read_priority(struct vmh_sock *s, int fd)
{
	s->priority = (uint32_t)get_int(fd, SOL_SOCKET, SO_PRIORITY, 0);
}

static void read_mc_if(struct vmh_sock *s, int fd)
{
	struct in_addr a = { 0 };
	socklen_t len = sizeof(a);

	vmh_sys(SYS_getsockopt, fd, IPPROTO_IP, IP_MULTICAST_IF, &a, &len);
	s->mc_if_addr = a.s_addr;
}

/* The first address of an interface, 0 if it has none: the net page may be there later, or never. */
static in_addr_t address_of(int fd, unsigned ifindex)
{
	struct ifreq r = { .ifr_ifindex = (int)ifindex };
	struct sockaddr_in a;

	if (vmh_sys(SYS_ioctl, fd, SIOCGIFNAME, &r) || vmh_sys(SYS_ioctl, fd, SIOCGIFADDR, &r))
		return 0;
	memcpy(&a, &r.ifr_addr, sizeof(a));
	return a.sin_addr.s_addr;
}

/* As libvma, which shows an interface that was chosen by its index by its address, too. */
static void show_mc_if(struct vmh_sock *s, int fd)
{
	in_addr_t a = s->mc_if_addr || !s->mc_if ? s->mc_if_addr : address_of(fd, s->mc_if);

	memset(s->stats->mc_if, 0, sizeof(s->stats->mc_if));
	if (!a)
		return;
	s->stats->mc_if[10] = s->stats->mc_if[11] = 0xff;
	memcpy(s->stats->mc_if + 12, &a, 4);
}

/* The limit of enqueue(). */
static void show_limit(struct vmh_sock *s)
{
	int64_t least = vmh_params.rx_bytes_min;

	VMH_SET(s->stats->rx_limit, s->rcvbuf > least ? s->rcvbuf : (uint64_t)least);
}

void vmh_sock_read_options(struct vmh_sock *s, int fd)
{
	/* the defaults of a fresh socket that a sysctl may change */
	s->rcvbuf = (uint32_t)get_int(fd, SOL_SOCKET, SO_RCVBUF, 212992);
	s->ttl = (uint8_t)get_int(fd, IPPROTO_IP, IP_TTL, 64);
	s->pmtudisc = (uint8_t)get_int(fd, IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_WANT);
	s->mc_ttl = 1;
	s->mc_loop = 1;
	show_limit(s);
}

/* What an option does to a socket on a ring. */
enum effect {
	E_IGNORE,      /* no meaning for a ring, or the same with and without */
	E_HOME,        /* only the kernel does this */
	E_RCVBUF, E_RCVTIMEO, E_SNDTIMEO, E_REUSEADDR, E_REUSEPORT, E_DEVICE, E_TIMESTAMP, E_STAMPING,
	E_PACING, E_PRIORITY,
	E_TTL, E_TOS, E_PKTINFO, E_RECVTTL, E_RECVTOS, E_MTU, E_RECVERR, E_MC_IF, E_MC_TTL, E_MC_LOOP, E_MC_ALL,
	E_JOIN, E_LEAVE, E_GROUP_JOIN, E_GROUP_LEAVE, E_SOURCE,
};

static const struct option {
	int level, name;
	enum effect effect;
} options[] = {
	{ SOL_SOCKET, SO_DEBUG, E_IGNORE },         { SOL_SOCKET, SO_KEEPALIVE, E_IGNORE },
	{ SOL_SOCKET, SO_LINGER, E_IGNORE },        { SOL_SOCKET, SO_OOBINLINE, E_IGNORE },
	{ SOL_SOCKET, SO_SNDBUF, E_IGNORE },        { SOL_SOCKET, SO_SNDBUFFORCE, E_IGNORE },
	{ SOL_SOCKET, SO_RCVLOWAT, E_IGNORE },      { SOL_SOCKET, SO_PRIORITY, E_PRIORITY },
	{ SOL_SOCKET, SO_BROADCAST, E_IGNORE },     { SOL_SOCKET, SO_BUSY_POLL, E_IGNORE },
	{ SOL_SOCKET, SO_NO_CHECK, E_IGNORE },      { SOL_SOCKET, SO_INCOMING_CPU, E_IGNORE },
	{ SOL_SOCKET, SO_RCVBUF, E_RCVBUF },        { SOL_SOCKET, SO_RCVBUFFORCE, E_RCVBUF },
	{ SOL_SOCKET, SO_RCVTIMEO, E_RCVTIMEO },    { SOL_SOCKET, SO_SNDTIMEO, E_SNDTIMEO },
	{ SOL_SOCKET, SO_RCVTIMEO_NEW, E_RCVTIMEO }, { SOL_SOCKET, SO_SNDTIMEO_NEW, E_SNDTIMEO },
	{ SOL_SOCKET, SO_REUSEADDR, E_REUSEADDR },  { SOL_SOCKET, SO_REUSEPORT, E_REUSEPORT },
	{ SOL_SOCKET, SO_BINDTODEVICE, E_DEVICE },  { SOL_SOCKET, SO_BINDTOIFINDEX, E_DEVICE },
	{ SOL_SOCKET, SO_TIMESTAMP_OLD, E_TIMESTAMP }, { SOL_SOCKET, SO_TIMESTAMPNS_OLD, E_TIMESTAMP },
	{ SOL_SOCKET, SO_TIMESTAMP_NEW, E_TIMESTAMP }, { SOL_SOCKET, SO_TIMESTAMPNS_NEW, E_TIMESTAMP },
	{ SOL_SOCKET, SO_TIMESTAMPING_OLD, E_STAMPING }, { SOL_SOCKET, SO_TIMESTAMPING_NEW, E_STAMPING },
	{ SOL_SOCKET, SO_MAX_PACING_RATE, E_PACING },
	{ IPPROTO_IP, IP_TTL, E_TTL },              { IPPROTO_IP, IP_TOS, E_TOS },
	{ IPPROTO_IP, IP_PKTINFO, E_PKTINFO },      { IPPROTO_IP, IP_RECVTTL, E_RECVTTL },
	{ IPPROTO_IP, IP_RECVTOS, E_RECVTOS },      { IPPROTO_IP, IP_MTU_DISCOVER, E_MTU },
	{ IPPROTO_IP, IP_RECVERR, E_RECVERR },       { IPPROTO_IP, IP_FREEBIND, E_IGNORE },
	{ IPPROTO_IP, IP_BIND_ADDRESS_NO_PORT, E_IGNORE },
	{ IPPROTO_IP, IP_MULTICAST_IF, E_MC_IF },   { IPPROTO_IP, IP_MULTICAST_TTL, E_MC_TTL },
	{ IPPROTO_IP, IP_MULTICAST_LOOP, E_MC_LOOP }, { IPPROTO_IP, IP_MULTICAST_ALL, E_MC_ALL },
	{ IPPROTO_IP, IP_ADD_MEMBERSHIP, E_JOIN },  { IPPROTO_IP, IP_DROP_MEMBERSHIP, E_LEAVE },
	{ IPPROTO_IP, MCAST_JOIN_GROUP, E_GROUP_JOIN }, { IPPROTO_IP, MCAST_LEAVE_GROUP, E_GROUP_LEAVE },
	{ IPPROTO_IP, IP_ADD_SOURCE_MEMBERSHIP, E_SOURCE }, { IPPROTO_IP, MCAST_JOIN_SOURCE_GROUP, E_SOURCE },
	{ IPPROTO_IP, IP_BLOCK_SOURCE, E_SOURCE },  { IPPROTO_IP, MCAST_BLOCK_SOURCE, E_SOURCE },
	{ IPPROTO_IP, IP_MSFILTER, E_SOURCE },      { IPPROTO_IP, MCAST_MSFILTER, E_SOURCE },
	{ IPPROTO_IP, IP_DROP_SOURCE_MEMBERSHIP, E_SOURCE }, { IPPROTO_IP, MCAST_LEAVE_SOURCE_GROUP, E_SOURCE },
	{ IPPROTO_IP, IP_UNBLOCK_SOURCE, E_SOURCE }, { IPPROTO_IP, MCAST_UNBLOCK_SOURCE, E_SOURCE },
};

static enum effect effect_of(int level, int name)
{
	for (size_t i = 0; i < sizeof(options) / sizeof(options[0]); i++)
		if (options[i].level == level && options[i].name == name)
			return options[i].effect;
	return E_HOME;
}

/* The interface of an ip_mreq or ip_mreqn; 0: the kernel chose by route. */
static unsigned mreq_if(const void *val, socklen_t len)
{
	struct ip_mreqn r = { 0 };
	unsigned ifindex = 0;

	memcpy(&r, val, len < sizeof(r) ? len : sizeof(r));
	if (len >= sizeof(r) && r.imr_ifindex)
		return (unsigned)r.imr_ifindex;
	if (r.imr_address.s_addr)
		vmh_net_is_local(r.imr_address.s_addr, &ifindex);
	return ifindex;
}

static in_addr_t mreq_group(const void *val)
{
	in_addr_t a;

	memcpy(&a, val, sizeof(a));
	return a;
}

static void set_mc_if(struct vmh_sock *s, int fd, const void *val, socklen_t len)
{
	struct ip_mreqn r = { 0 };

	read_mc_if(s, fd);
	s->mc_if = 0;
	if (len >= sizeof(struct ip_mreqn)) {
		memcpy(&r, val, sizeof(r));
		s->mc_if = (uint32_t)r.imr_ifindex;
	}
	if (!s->mc_if && s->mc_if_addr) {
		vmh_session_open();
		vmh_net_is_local(s->mc_if_addr, &s->mc_if);
	}
	show_mc_if(s, fd);
}

static void group_req(struct vmh_sock *s, int fd, const void *val, socklen_t len, bool join)
{
	struct group_req g;
	struct sockaddr_in a;

	if (len < sizeof(g))
		return;
	memcpy(&g, val, sizeof(g));
	memcpy(&a, &g.gr_group, sizeof(a));
	if (join)
		vmh_sock_join(s, fd, a.sin_addr.s_addr, g.gr_interface);
	else
		vmh_sock_leave(s, a.sin_addr.s_addr, g.gr_interface);
}

/* Others may have the port from here on: a connected socket is steered by its peer, too, and its datagrams may come by
 * another socket's ring. */
static void port_may_be_shared(struct vmh_sock *s, int fd)
{
	if (s->rport)
		vmh_sock_update(s, fd);
	if (atomic_exchange(&s->only_ring, NULL))
		vmh_wake_all();
}

/* Object lock held, the kernel has accepted the option. Returns true if only the kernel can do it. */
static bool apply(struct vmh_sock *s, int fd, enum effect e, int level, int name, const void *val, socklen_t len)
{
	int v = e < E_MC_IF ? get_int(fd, level, name, 0) : 0;

	switch (e) {
	case E_IGNORE: break;
	case E_HOME: return true;
	case E_RCVBUF:
		s->rcvbuf = (uint32_t)get_int(fd, SOL_SOCKET, SO_RCVBUF, (int)s->rcvbuf);
		show_limit(s);
		break;
	case E_RCVTIMEO: VMH_SET(s->rcvtimeo_ns, vmh_sock_timeout_of(fd, SO_RCVTIMEO)); break;
	case E_SNDTIMEO: VMH_SET(s->sndtimeo_ns, vmh_sock_timeout_of(fd, SO_SNDTIMEO)); break;
	case E_REUSEADDR: s->reuseaddr = (uint8_t)v; port_may_be_shared(s, fd); break;
	case E_REUSEPORT: s->reuseport = (uint8_t)v; port_may_be_shared(s, fd); break;
	case E_DEVICE: read_device(s, fd); vmh_sock_update(s, fd); break;
	case E_TIMESTAMP: vmh_sock_set_timestamp(s, name, v != 0); break;
	case E_STAMPING: vmh_sock_set_timestamping(s, fd, name, (uint32_t)v); break;
	case E_PACING: vmh_sock_read_pacing(s, fd); break;
	case E_TTL: s->ttl = (uint8_t)v; break;
	case E_TOS: s->tos = (uint8_t)v; read_priority(s, fd); break;
	case E_PRIORITY: read_priority(s, fd); break;
	case E_PKTINFO: s->opt_pktinfo = v != 0; break;
	case E_RECVTTL: s->opt_recvttl = v != 0; break;
	case E_RECVTOS: s->opt_recvtos = v != 0; break;
	case E_MTU: s->pmtudisc = (uint8_t)v; break;
	case E_RECVERR: s->recverr = v != 0; break;
	case E_MC_IF: set_mc_if(s, fd, val, len); break;
	case E_MC_TTL: s->mc_ttl = (uint8_t)get_int(fd, IPPROTO_IP, IP_MULTICAST_TTL, 1); break;
	case E_MC_LOOP:
		s->mc_loop = get_int(fd, IPPROTO_IP, IP_MULTICAST_LOOP, 1) != 0;
		VMH_SET(s->stats->mc_loop, s->mc_loop);
		break;
	case E_MC_ALL: s->mc_all = get_int(fd, IPPROTO_IP, IP_MULTICAST_ALL, 1) != 0; break;
	case E_JOIN: vmh_session_open(); vmh_sock_join(s, fd, mreq_group(val), mreq_if(val, len)); break;
	case E_LEAVE: vmh_sock_leave(s, mreq_group(val), mreq_if(val, len)); break;
	case E_GROUP_JOIN: group_req(s, fd, val, len, true); break;
	case E_GROUP_LEAVE: group_req(s, fd, val, len, false); break;
	case E_SOURCE: return true;
	}
	s->tx_cfg++;
	return false;
}

/* What vma_stats shows of a socket, also of one that is the kernel's for good. */
static bool is_shown(enum effect e)
{
	return e == E_RCVBUF || e == E_MC_IF || e == E_MC_LOOP || e == E_JOIN || e == E_LEAVE || e == E_GROUP_JOIN ||
	       e == E_GROUP_LEAVE;
}

struct source_group {
	in_addr_t group, by; /* by: address of the interface, where it has no index */
	unsigned ifindex;
};

/* The group of an option that names sources; false: too short for it. */
static bool source_group(struct source_group *g, int name, const void *val, socklen_t len)
{
	struct group_req r; /* as group_source_req and group_filter begin; their numbers follow the older ones' */
	struct sockaddr_in a;

	*g = (struct source_group){ 0 };
	if (name < MCAST_JOIN_GROUP) {
		struct ip_mreq m; /* as ip_mreq_source and ip_msfilter begin */

		if (len < sizeof(m))
			return false;
		memcpy(&m, val, sizeof(m));
		g->group = m.imr_multiaddr.s_addr;
		g->by = m.imr_interface.s_addr;
		vmh_net_is_local(g->by, &g->ifindex);
		return true;
	}
	if (len < sizeof(r))
		return false;
	memcpy(&r, val, sizeof(r));
	memcpy(&a, &r.gr_group, sizeof(a));
	g->group = a.sin_addr.s_addr;
	g->ifindex = r.gr_interface;
	return true;
}

/* The last source that is dropped ends the membership. The kernel knows filters of its members only. */
static bool is_still_member(int fd, const struct source_group *g)
{
	struct ip_msfilter by_address = { .imsf_multiaddr.s_addr = g->group, .imsf_interface.s_addr = g->by };
	struct group_filter by_index = { .gf_interface = g->ifindex };
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_addr.s_addr = g->group };
	socklen_t len = g->ifindex ? sizeof(by_index) : sizeof(by_address);

	memcpy(&by_index.gf_group, &a, sizeof(a));
	return vmh_sys(SYS_getsockopt, fd, IPPROTO_IP, g->ifindex ? MCAST_MSFILTER : IP_MSFILTER,
		       g->ifindex ? (void *)&by_index : (void *)&by_address, &len) >= 0;
}

/* Object lock held, the socket is home: its groups with sources, for vma_stats. */
static void show_source(struct vmh_sock *s, int fd, int name, const void *val, socklen_t len)
{
	struct source_group g;
	bool listed = false;

	vmh_session_open(); /* for the interface of an address */
	if (!source_group(&g, name, val, len))
		return;
	for (unsigned i = 0; i < s->nmembers; i++)
		listed |= s->members[i].group == g.group && (!g.ifindex || s->members[i].ifindex == g.ifindex);
	if (listed == is_still_member(fd, &g))
		return;
	if (listed)
		vmh_sock_leave(s, g.group, g.ifindex);
	else
		vmh_sock_join(s, fd, g.group, g.ifindex);
}

int vmh_sock_setsockopt(struct vmh_sock *s, int fd, int level, int name, const void *val, socklen_t len)
{
	enum effect e = effect_of(level, name);
	unsigned why = e == E_SOURCE ? VMH_R_SOURCE_MEMBERSHIP : VMH_R_SOCKOPT;
	bool only_kernel;
	long r;

	if (vmh_unlikely(e == E_HOME || e == E_SOURCE) && !s->home) {
		r = vmh_exception(fd, why);
		if (r)
			return (int)r;
	}
	vmh_lock(&s->obj.lock);
	r = vmh_sys(SYS_setsockopt, fd, level, name, val, len);
	only_kernel = r >= 0 && (!s->home || is_shown(e)) && apply(s, fd, e, level, name, val, len);
	vmh_unlock(&s->obj.lock);
	if (only_kernel)
		vmh_sock_home(s, why, (uint32_t)level << 16 | (uint32_t)(name & 0xffff));
	if (r >= 0 && e == E_SOURCE) {
		vmh_lock(&s->obj.lock);
		show_source(s, fd, name, val, len);
		vmh_unlock(&s->obj.lock);
	}
	return (int)r;
}
