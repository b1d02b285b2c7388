/* What libvma.conf says about a TCP socket: asked when it listens, connects or is accepted. */
#include "vmh_conf.h"
#include "vmh_params.h"
#include "vmh_tcps.h"

/* The rules are of IPv4; an IPv6 address is one that only a rule for any matches. */
static in_addr_t v4(const struct vmh_ip *a)
{
	return vmh_ip_is4(a) ? vmh_ip_v4(a) : 0;
}

/* The local port only of a socket that was bound: nobody can name another one in a rule. */
unsigned vmh_tcps_kept_client(const struct vmh_tcps *s, const struct vmh_tcp_addr *a)
{
	return vmh_conf_keeps(VMH_CONF_TCP_CLIENT, v4(&a->raddr), a->rport, v4(&a->laddr), s->bound ? a->lport : 0);
}

unsigned vmh_tcps_kept_server(const struct vmh_ip *laddr, in_port_t lport)
{
	return vmh_conf_keeps(VMH_CONF_TCP_SERVER, v4(laddr), lport, 0, 0);
}

unsigned vmh_tcps_kept(const struct vmh_tcps *s, const struct vmh_tcp_addr *a)
{
	vmh_conf_refresh();
	return s->accepted ? vmh_tcps_kept_server(&a->laddr, a->lport) : vmh_tcps_kept_client(s, a);
}

/* ---- VMA_HYBRID_TCP of a connection or listener: of its rule, or the program's ---- */

static void follow(struct vmh_tcps *s, int policy)
{
	static const unsigned reasons[] = {
		[VMH_TCPS_PLAIN] = VMH_R_TYPE, [VMH_TCPS_ADAPTIVE] = VMH_R_TCP_KERNEL, [VMH_TCPS_OFFLOAD] = VMH_R_NOT_TRIED,
	};

	if (policy < 0)
		policy = (int)vmh_params.hybrid_tcp;
	VMH_SET(s->policy, (uint8_t)policy);
	if (policy == VMH_TCPS_OFFLOAD)
		vmh_obj_name(&s->obj, 0);
	vmh_tcps_suppose(s, reasons[policy]);
}

void vmh_tcps_policy_client(struct vmh_tcps *s, const struct vmh_tcp_addr *a)
{
	vmh_conf_refresh();
	follow(s, vmh_conf_tcp(VMH_CONF_TCP_CLIENT, v4(&a->raddr), a->rport, v4(&a->laddr), s->bound ? a->lport : 0));
}

void vmh_tcps_policy_server(struct vmh_tcps *s, const struct vmh_ip *laddr, in_port_t lport)
{
	vmh_conf_refresh();
	follow(s, vmh_conf_tcp(VMH_CONF_TCP_SERVER, v4(laddr), lport, 0, 0));
}
