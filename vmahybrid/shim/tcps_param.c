/* The VMA_* parameters of TCP sockets, the kernel's, and what VMA_AVOID_SYS_CALLS_ON_TCP_FD answers. */
#include "vmh_base.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_param.h"
#include <fcntl.h>
#include <linux/tcp.h>

#define ACK_MS 40   /* of the stack, at most */
#define SEGS_ALL 32000 /* TCP_SND_QUEUELEN of the stack */
#define MSS_LEAST 88 /* of the kernel: TCP_MIN_MSS */

static bool timestamps(void)
{
	return vmh_params.tcp_timestamp_option == 2 ? vmh_tcps_sysctl(VMH_SYSCTL_TIMESTAMPS) != 0 : vmh_params.tcp_timestamp_option;
}

/* Bytes of TCP payload: VMA_MSS, and what a packet of VMA_MTU has room for; 0: what the path allows. */
static int64_t mss_wanted(bool v6)
{
	int64_t mss = vmh_params.mss >= MSS_LEAST ? vmh_params.mss : 0, heads = v6 ? 60 : 40;

	if (vmh_params.mtu && (!mss || mss > vmh_params.mtu - heads))
		mss = vmh_params.mtu - heads > MSS_LEAST ? vmh_params.mtu - heads : MSS_LEAST;
	return mss;
}

void vmh_tcps_defaults(struct vmh_tcp_options *o, bool v6)
{
	int64_t ack = vmh_params.tcp_timer_resolution_msec;

	o->nodelay = vmh_params.tcp_nodelay;
	o->quickack = vmh_params.tcp_quickack;
	o->cc = (uint8_t)vmh_params.tcp_cc_algo;
	o->no_timestamps = !timestamps();
	o->no_sack = !vmh_tcps_sysctl(VMH_SYSCTL_SACK);
	o->no_wscale = !vmh_tcps_sysctl(VMH_SYSCTL_WINDOW_SCALING);
	o->keeps_cwnd = !vmh_tcps_sysctl(VMH_SYSCTL_AFTER_IDLE);
	o->ttl = (uint8_t)vmh_tcps_sysctl(VMH_SYSCTL_TTL);
	o->syn_retries = (uint32_t)vmh_tcps_sysctl(VMH_SYSCTL_SYN_RETRIES);
	o->keep_idle_s = (uint32_t)vmh_tcps_sysctl(VMH_SYSCTL_KEEP_IDLE_S);
	o->keep_intvl_s = (uint32_t)vmh_tcps_sysctl(VMH_SYSCTL_KEEP_INTVL_S);
	o->keep_cnt = (uint8_t)vmh_tcps_sysctl(VMH_SYSCTL_KEEP_CNT);
	o->mss_max = (uint16_t)mss_wanted(v6);
	o->segs_max = vmh_params.tx_segs_tcp < SEGS_ALL ? (uint32_t)vmh_params.tx_segs_tcp : 0;
	o->syn_rate = (uint32_t)vmh_params.tcp_max_syn_rate;
	o->ack_ms = (uint8_t)(ack < ACK_MS ? ack : ACK_MS);
}

/* The kernel's connections too: what is adopted later has shaken hands by then. */
void vmh_tcps_defaults_kernel(int fd, bool v6)
{
	int on = 1, mss = (int)mss_wanted(v6);

	if (vmh_params.tcp_nodelay)
		vmh_sys(SYS_setsockopt, fd, IPPROTO_TCP, TCP_NODELAY, &on, sizeof(on));
	if (mss && mss <= 32767)
		vmh_sys(SYS_setsockopt, fd, IPPROTO_TCP, TCP_MAXSEG, &mss, sizeof(mss));
}

void vmh_tcps_adopted(struct vmh_tcps *s)
{
	struct vmh_tcp_options wanted = { 0 };
	socklen_t len = sizeof(int);
	int inq = 0;

	vmh_tcps_defaults(&wanted, s->v6);
	wanted.reuse = s->opt.reuse; /* repair mode has its own */
	vmh_tcp_get_options(s->conn, &s->opt);
	s->opt.reuse = wanted.reuse;
	s->opt.quickack |= wanted.quickack;
	s->opt.cc = wanted.cc;
	s->opt.keeps_cwnd = wanted.keeps_cwnd;
	s->opt.ack_ms = wanted.ack_ms;
	s->opt.segs_max = wanted.segs_max;
	vmh_tcp_set_options(s->conn, &s->opt);
	/* it may have been set in another process, or be its listener's */
	if (vmh_sys(SYS_getsockopt, s->obj.fd, IPPROTO_TCP, TCP_INQ, &inq, &len) >= 0)
		VMH_SET(s->inq, inq != 0);
}

/* True with *v, if it is a number that the stack and the kernel socket both have. */
static bool number(const struct vmh_tcp_options *o, int name, int *v)
{
	switch (name) {
	case TCP_NODELAY: *v = o->nodelay; return true;
	case TCP_CORK: *v = o->cork; return true;
	case TCP_KEEPIDLE: *v = (int)o->keep_idle_s; return true;
	case TCP_KEEPINTVL: *v = (int)o->keep_intvl_s; return true;
	case TCP_KEEPCNT: *v = o->keep_cnt; return true;
	case TCP_USER_TIMEOUT: *v = (int)o->user_timeout_ms; return true;
	}
	return false;
}

int vmh_tcps_known(const struct vmh_tcps *s, int level, int name, void *val, socklen_t *len)
{
	int v = 0;

	if (level == SOL_SOCKET && (name == SO_TYPE || name == SO_PROTOCOL || name == SO_DOMAIN || name == SO_ACCEPTCONN))
		v = name == SO_TYPE ? SOCK_STREAM : name == SO_PROTOCOL ? IPPROTO_TCP : name == SO_DOMAIN ? (s->v6 ? AF_INET6 : AF_INET) : 0;
	else if (level == IPPROTO_TCP && name == TCP_QUICKACK && s->quick) /* which the kernel socket was not told */
		v = s->quick - 1;
	else if (level != IPPROTO_TCP || !number(&s->opt, name, &v))
		return VMH_TCPS_KERNELS;
	return vmh_tcps_give(val, len, &v, sizeof(v));
}

int vmh_tcps_fcntl(const struct vmh_tcps *s, int cmd)
{
	if (!vmh_params.avoid_sys_calls_on_tcp_fd || cmd != F_GETFL || vmh_tcps_state(s) != VMH_TCPS_RING)
		return VMH_TCPS_KERNELS;
	return O_RDWR | (atomic_load_explicit(&s->nonblock, memory_order_relaxed) ? O_NONBLOCK : 0);
}
