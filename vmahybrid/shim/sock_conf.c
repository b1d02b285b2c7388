/* What libvma.conf says about a UDP socket: the questions of the manual's roles. */
#include "vmh_conf.h"
#include "vmh_sock.h"

unsigned vmh_sock_kept_connected(const struct vmh_sock *s)
{
	return s->rport ? vmh_conf_keeps(VMH_CONF_UDP_CONNECT, s->raddr, s->rport, s->laddr, s->lport) : 0;
}

unsigned vmh_sock_kept_receiver(const struct vmh_sock *s, in_addr_t local)
{
	return vmh_conf_keeps(VMH_CONF_UDP_RECEIVER, local, s->lport, 0, 0);
}

unsigned vmh_sock_kept_sender(in_addr_t daddr, in_port_t dport)
{
	return vmh_conf_keeps(VMH_CONF_UDP_SENDER, daddr, dport, 0, 0);
}
