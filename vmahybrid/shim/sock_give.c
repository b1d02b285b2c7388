/* Datagrams that a ring had delivered and nobody has read, when somebody else is to read them: the service
 * puts them into the kernel's receive path, from where they reach the socket's own queue. */
#include "vmh_control.h"
#include "vmh_iomux.h"
#include "vmh_log.h"
#include "vmh_sock.h"
#include "vmh_wait.h"
#include <fcntl.h>

static int give(struct vmh_sock *s, int fd, const struct vmh_buf *b)
{
	struct vmh_msg_reinject m;

	memset(&m, 0, offsetof(struct vmh_msg_reinject, data));
	m.kind = b->multicast ? VMH_FLOW_MC : s->rport ? VMH_FLOW_5T : VMH_FLOW_3T;
	m.ifindex = b->ring->ifindex;
	m.len = b->len;
	m.proto = IPPROTO_UDP;
	m.family = 4;
	m.local_port = s->lport;
	m.src_port = b->sport;
	m.ttl = b->ttl;
	m.tos = b->tos;
	vmh_map4(m.local_addr, b->multicast ? b->daddr : s->laddr);
	if (m.kind == VMH_FLOW_5T) {
		m.remote_port = s->rport;
		vmh_map4(m.remote_addr, s->raddr);
	}
	vmh_map4(m.src_addr, b->saddr);
	vmh_map4(m.dst_addr, b->daddr);
	memcpy(m.data, b->data, b->len);
	return vmh_session_reinject(&m, fd);
}

void vmh_sock_give_back(struct vmh_sock *s, int fd)
{
	struct vmh_buf *b;

	while (s->session == vmh_session_id() && (b = vmh_sock_pop(s))) {
		/* the kernel gives one of a group to all: the others have theirs */
		int err = b->len > VMH_REINJECT_DATA ? -EMSGSIZE :
			  b->multicast && vmh_sock_has_company(s) ? -ENOTUNIQ : give(s, fd, b);

		if (err) {
			vmh_sock_unpop(s, b); /* this process still reads it, and may have looked meanwhile */
			vmh_epoll_member_on_ring(&s->obj);
			vmh_epoll_notify(&s->obj);
			vmh_wake_all();
			vmh_debug("fd %d: unread datagrams stay in this process: %s", fd, strerror(-err));
			return;
		}
		vmh_sock_buf_put(b);
	}
}
