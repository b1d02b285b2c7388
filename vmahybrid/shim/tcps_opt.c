/* Options of TCP sockets. The kernel socket has them all the same; a connection that began on a ring gets them from here,
 * and an option that the stack does not know keeps its socket on the kernel, or sends it there. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_param.h"
#include <limits.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>

#define NOT_ECN 0xfc /* of the byte, those bits are TCP's */
#define TCP_AO 38 /* linux/tcp.h: TCP_AO_ADD_KEY */
#define SEND_MIN 4608 /* SOCK_MIN_SNDBUF and SOCK_MIN_RCVBUF, about */

/* What the stack does not have to know of. */
static bool harmless(int level, int name)
{
	if (level == SOL_SOCKET)
		return name == SO_REUSEADDR || name == SO_RCVTIMEO || name == SO_SNDTIMEO || name == SO_PRIORITY ||
		       name == SO_DEBUG || name == SO_BROADCAST || name == SO_BUSY_POLL || name == SO_INCOMING_CPU;
	if (level == IPPROTO_IPV6)
		return name == IPV6_V6ONLY; /* read from the kernel where it counts */
	return level == IPPROTO_TCP && name == TCP_FASTOPEN; /* of a listener: the ring offers none */
}

/* What says how a socket is bound, listens or connects, and nothing of a connection that is open. */
static bool of_opening(int level, int name)
{
	if (level == SOL_SOCKET)
		return name == SO_REUSEPORT || name == SO_ATTACH_REUSEPORT_CBPF || name == SO_ATTACH_REUSEPORT_EBPF ||
		       name == SO_OOBINLINE; /* urgent data goes by the kernel */
	if (level == IPPROTO_IP)
		return name == IP_BIND_ADDRESS_NO_PORT || name == IP_FREEBIND;
	return level == IPPROTO_TCP && (name == TCP_DEFER_ACCEPT || name == TCP_FASTOPEN_CONNECT ||
					name == TCP_FASTOPEN_KEY || name == TCP_SAVE_SYN);
}

static uint32_t buffer(int value)
{
	return value < SEND_MIN / 2 ? SEND_MIN : (uint32_t)value * 2u > 1u << 30 ? 1u << 30 : (uint32_t)value * 2u;
}

static bool of_tcp(struct vmh_tcp_options *o, int name, int v)
{
	switch (name) {
	case TCP_NODELAY: o->nodelay = v != 0; return true;
	case TCP_QUICKACK: o->quickack = v != 0; return true;
	case TCP_CORK: o->cork = v != 0; return true;
	case TCP_KEEPIDLE: o->keep_idle_s = (uint32_t)v; return true;
	case TCP_KEEPINTVL: o->keep_intvl_s = (uint32_t)v; return true;
	case TCP_KEEPCNT: o->keep_cnt = (uint8_t)v; return true;
	case TCP_USER_TIMEOUT: o->user_timeout_ms = (uint32_t)v; return true;
	case TCP_SYNCNT: o->syn_retries = (uint32_t)v; return true;
	case TCP_MAXSEG: o->mss_max = (uint16_t)v; return true;
	}
	return false;
}

/* True if the stack has it. Only after the kernel has taken the value. */
static bool note(struct vmh_tcps *s, int level, int name, int v)
{
	struct vmh_tcp_options *o = &s->opt;

	if (level == IPPROTO_TCP && name == TCP_INQ) {
		VMH_SET(s->inq, v != 0);
		return true;
	}
	if (level == IPPROTO_TCP)
		return of_tcp(o, name, v);
	if (level == IPPROTO_IP && (name == IP_TOS || name == IP_TTL)) {
		if (name == IP_TOS)
			o->tos = (uint8_t)(v & NOT_ECN);
		else
			o->ttl = (uint8_t)(v == -1 ? vmh_tcps_sysctl(VMH_SYSCTL_TTL) : v);
		return true;
	}
	if (level == IPPROTO_IPV6 && (name == IPV6_TCLASS || name == IPV6_UNICAST_HOPS)) {
		if (name == IPV6_TCLASS)
			o->tclass = (uint8_t)(v == -1 ? 0 : v & NOT_ECN);
		else
			o->hops = (uint8_t)(v == -1 ? 64 : v);
		return true;
	}
	if (level != SOL_SOCKET)
		return false;
	switch (name) {
	case SO_KEEPALIVE: o->keepalive = v != 0; return true;
	case SO_SNDBUF:
		o->sndbuf = buffer(v);
		o->sndbuf_asked = true;
		return true;
	case SO_RCVBUF:
		o->rcvbuf = buffer(v);
		o->rcvbuf_asked = true;
		return true;
	}
	return false;
}

static void note_time(struct vmh_tcps *s, int name, const void *val, socklen_t len)
{
	struct timeval tv;

	if (len < sizeof(tv))
		return;
	memcpy(&tv, val, sizeof(tv));
	VMH_SET(*(name == SO_RCVTIMEO ? &s->rcvtimeo_ns : &s->sndtimeo_ns),
		(int64_t)tv.tv_sec * 1000000000 + (int64_t)tv.tv_usec * 1000);
}

/* A ring's connections have one priority, 0. */
unsigned vmh_tcps_tagged(const struct vmh_tcps *s, unsigned ifindex)
{
	return s->priority && vmh_net_is_vlan(ifindex) ? VMH_R_PRIORITY : 0;
}

static bool is_priority(int level, int name)
{
	return (level == SOL_SOCKET && name == SO_PRIORITY) || (level == IPPROTO_IP && name == IP_TOS);
}

static void read_priority(struct vmh_tcps *s, int fd)
{
	socklen_t len = sizeof(s->priority);

	vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_PRIORITY, &s->priority, &len);
}

/* Object lock and io held: the kernel has taken it. */
static void taken(struct vmh_tcps *s, int level, int name, const void *val, socklen_t len)
{
	bool time = level == SOL_SOCKET && (name == SO_RCVTIMEO || name == SO_SNDTIMEO);
	struct linger l = { 0 };
	int v = 0;

	memcpy(&v, val, len < sizeof(v) ? len : sizeof(v));
	if (level == IPPROTO_TCP && name == TCP_QUICKACK)
		s->quick = 1 + (v & 1);
	if (time) {
		note_time(s, name, val, len);
	} else if (level == SOL_SOCKET && name == SO_LINGER) {
		memcpy(&l, val, len < sizeof(l) ? len : sizeof(l));
		s->linger = l.l_onoff != 0;
		s->linger_s = (uint32_t)l.l_linger;
	} else if (level == SOL_SOCKET && name == SO_REUSEADDR) {
		s->opt.reuse = v != 0;
		s->reuse_told = vmh_tcps_parked(s);
	} else if (!note(s, level, name, v) && !harmless(level, name)) {
		s->odd = 1;
		s->peculiar |= !of_opening(level, name);
	}
}

/* nodelay: TCP_NODELAY was set, which lets go what a cork keeps, also where VMA_TCP_NODELAY had set it before. */
static void to_stack(struct vmh_tcps *s, bool nodelay)
{
	struct vmh_tcp_options before = s->opt;

	before.nodelay = false;
	vmh_lock(&s->io);
	if (s->conn && nodelay)
		vmh_tcp_set_options(s->conn, &before);
	if (s->conn)
		vmh_tcp_set_options(s->conn, &s->opt);
	vmh_unlock(&s->io);
	if (s->tring)
		vmh_tring_flush(s->tring);
}

/* May it stay where it is with this option? */
static bool stays(int level, int name)
{
	struct vmh_tcps probe;

	return harmless(level, name) || (level == SOL_SOCKET && name == SO_LINGER) || note(&probe, level, name, 0);
}

/* Is it not to be said to the kernel? A parked socket must be without keepalive; and what its state carries home need
 * not be said twice. */
static bool stack_alone(const struct vmh_tcps *s, int level, int name, socklen_t len)
{
	if (vmh_tcps_state(s) != VMH_TCPS_RING || len < sizeof(int) || len > INT_MAX)
		return false;
	if (level == SOL_SOCKET && name == SO_KEEPALIVE)
		return true;
	return vmh_params.avoid_sys_calls_on_tcp_fd && level == IPPROTO_TCP &&
	       (name == TCP_NODELAY || name == TCP_QUICKACK || name == TCP_CORK);
}

/* TCP_NODELAY of a new socket that has it, by VMA_TCP_NODELAY. */
static bool has_already(const struct vmh_tcps *s, int level, int name, const void *val, socklen_t len)
{
	int on = 0;

	if (level != IPPROTO_TCP || name != TCP_NODELAY || len < sizeof(on) || !s->opt.nodelay || s->opt.cork ||
	    vmh_tcps_state(s) != VMH_TCPS_KERNEL || VMH_GET(s->connecting))
		return false;
	memcpy(&on, val, sizeof(on));
	return on != 0;
}

/* Has it a connection of which the kernel socket does not know? */
static bool is_open(struct vmh_tcps *s)
{
	struct vmh_tcp_info info;

	return vmh_tcps_state(s) == VMH_TCPS_RING && vmh_tcps_info(s, &info) && info.state != TCP_CLOSE &&
	       info.state != TCP_TIME_WAIT;
}

int vmh_tcps_setsockopt(struct vmh_tcps *s, int fd, int level, int name, const void *val, socklen_t len)
{
	bool secret = level == IPPROTO_TCP && (name == TCP_MD5SIG || name == TCP_MD5SIG_EXT || name == TCP_AO);
	unsigned state, tagged = 0;
	int r;

	if (level == IPPROTO_IPV6 && name == IPV6_V6ONLY && vmh_tcps_is_fresh(s))
		return -EINVAL; /* it has a port, of which its kernel socket does not know */
	state = vmh_tcps_state(s);
	if (level == IPPROTO_TCP && name == TCP_FASTOPEN && is_open(s))
		return -EINVAL;
	if (secret || (state != VMH_TCPS_KERNEL && state != VMH_TCPS_HOME && !stays(level, name))) {
		r = vmh_tcps_kernel_takes(s, VMH_R_SOCKOPT);
		if (r)
			return r;
	}
	vmh_lock(&s->obj.lock);
	if (stack_alone(s, level, name, len) || has_already(s, level, name, val, len)) {
		r = 0;
	} else {
		r = (int)vmh_sys(SYS_setsockopt, fd, level, name, val, len);
		s->touched |= level == IPPROTO_TCP && name == TCP_NODELAY ? VMH_TCPS_NODELAY : VMH_TCPS_TOUCHED;
	}
	if (!r) {
		s->secret |= secret;
		vmh_lock(&s->io); /* another thread accepts, and has the listener's */
		taken(s, level, name, val, len);
		vmh_unlock(&s->io);
		if (is_priority(level, name)) {
			read_priority(s, fd);
			tagged = vmh_tcps_parked(s) ? vmh_tcps_tagged(s, s->ifindex) : 0;
		}
		if (vmh_tcps_parked(s))
			to_stack(s, level == IPPROTO_TCP && name == TCP_NODELAY);
		else if (vmh_tcps_state(s) == VMH_TCPS_LISTEN)
			vmh_tlisten_options(s);
	}
	vmh_unlock(&s->obj.lock);
	if (tagged)
		vmh_tcps_home(s, tagged, false);
	return r;
}

/* ---- reading ---- */

/* The kernel's length is the caller's, who may not ask for more than there is. */
static int peer_name(const struct vmh_tcps *s, void *val, const socklen_t *len)
{
	struct sockaddr_storage name;

	if ((int)*len < 0 || *len > vmh_tcps_compose(s->v6, &s->addr.raddr, s->addr.rport, &name))
		return -EINVAL;
	memcpy(val, &name, *len);
	return 0;
}

/* What the kernel socket of a connection on a ring does not know: it was never connected, or is parked, without
 * keepalive. */
static int of_ring(struct vmh_tcps *s, int level, int name, void *val, socklen_t *len)
{
	struct vmh_tcp_info info;
	int v;

	if (level == SOL_SOCKET && name == SO_KEEPALIVE) {
		v = s->opt.keepalive;
		return vmh_tcps_give(val, len, &v, sizeof(v));
	}
	if (level == IPPROTO_TCP && name == TCP_INFO)
		return vmh_tcps_tcp_info(s, val, len);
	if (level == IPPROTO_TCP && name == TCP_MAXSEG && vmh_tcps_info(s, &info)) {
		v = (int)info.snd_mss;
		return vmh_tcps_give(val, len, &v, sizeof(v));
	}
	if (level == SOL_SOCKET && name == SO_PEERNAME)
		return peer_name(s, val, len);
	if (((level == IPPROTO_IP && name == IP_MTU) || (level == IPPROTO_IPV6 && name == IPV6_MTU && s->v6)) &&
	    vmh_tcps_info(s, &info)) {
		v = (int)info.mtu;
		return vmh_tcps_give(val, len, &v, sizeof(v));
	}
	/* repair mode has its own; a fresh one that was accepted has its listener's */
	if ((level == SOL_SOCKET && name == SO_REUSEADDR) ||
	    ((!vmh_tcps_is_fresh(s) || s->shown) && level == IPPROTO_TCP && name == TCP_REPAIR)) {
		v = level == SOL_SOCKET ? s->opt.reuse : 0;
		return vmh_tcps_give(val, len, &v, sizeof(v));
	}
	return vmh_params.avoid_sys_calls_on_tcp_fd ? vmh_tcps_known(s, level, name, val, len) : VMH_TCPS_KERNELS;
}

/* What of_ring() left to the kernel socket, or what is the kernel's. Nobody moves it meanwhile. */
static int of_kernel(struct vmh_tcps *s, int fd, int level, int name, void *val, socklen_t *len)
{
	int r;

	if (vmh_tcps_state(s) == VMH_TCPS_HOME)
		return (int)vmh_sys(SYS_getsockopt, fd, level, name, val, len);
	vmh_lock(&s->obj.lock);
	r = vmh_tcps_state(s) == VMH_TCPS_RING ? of_ring(s, level, name, val, len) : VMH_TCPS_KERNELS;
	if (r == VMH_TCPS_KERNELS)
		r = (int)vmh_sys(SYS_getsockopt, fd, level, name, val, len);
	vmh_unlock(&s->obj.lock);
	return r;
}

int vmh_tcps_getsockopt(struct vmh_tcps *s, int fd, int level, int name, void *val, socklen_t *len)
{
	int r = VMH_TCPS_KERNELS;

	vmh_tcps_await_move(s);
	if (level == IPPROTO_TCP && name == TCP_INFO && vmh_tcps_parked(s))
		vmh_rings_poll(VMH_TCPS_POLL);
	if (level == SOL_SOCKET && name == SO_ERROR && vmh_tcps_parked(s) && (int)*len >= 0) {
		int err = vmh_tcps_take_lost(s);

		vmh_rings_poll(1);
		vmh_lock(&s->io);
		if (s->conn) {
			err = vmh_tcp_error(s->conn);
			vmh_tcps_refresh(s);
		}
		vmh_unlock(&s->io);
		return vmh_tcps_give(val, len, &err, sizeof(err));
	}
	if (level == IPPROTO_IPV6 && name == IPV6_V6ONLY && VMH_GET(s->only_v6))
		return vmh_tcps_give(val, len, &(int){ s->only_v6 == VMH_TCPS_ONLY_V6 }, sizeof(int));
	if (level == IPPROTO_TCP && name == TCP_ZEROCOPY_RECEIVE && vmh_tcps_parked(s)) { /* it reads */
		int err = vmh_tcps_kernel_takes(s, VMH_R_SOCKOPT);

		if (err)
			return err;
	}
	if (vmh_tcps_state(s) == VMH_TCPS_RING)
		r = of_ring(s, level, name, val, len);
	else if (level == IPPROTO_TCP && name == TCP_INFO && vmh_tcps_state(s) == VMH_TCPS_LISTEN)
		r = vmh_tcps_listener_info(s, fd, val, len);
	return r == VMH_TCPS_KERNELS ? of_kernel(s, fd, level, name, val, len) : r;
}

/* Before the service makes a connection of it: what that would change, or has to know. */
void vmh_tcps_dress(struct vmh_tcps *s, int fd)
{
	if (s->opt.reuse) /* in TIME_WAIT, too: a server is started again */
		vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_REUSEADDR, &(int){ 1 }, sizeof(int));
	vmh_tcps_note_only_v6(s, fd);
}

/* bind() to an IPv6 address, as of the service, sets it for ever. */
void vmh_tcps_note_only_v6(struct vmh_tcps *s, int fd)
{
	if (s->v6 && !VMH_GET(s->only_v6))
		VMH_SET(s->only_v6, vmh_tcps_only_v6(fd) ? VMH_TCPS_ONLY_V6 : VMH_TCPS_NOT_ONLY_V6);
}
