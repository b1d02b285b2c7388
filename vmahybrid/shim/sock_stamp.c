/* Time stamps that a UDP socket asked for: what a ring can tell, and what only the kernel can.
 *
 * A ring stamps a datagram when it is taken from it. Stamps of sending are the kernel's, so that such a socket sends
 * there. Stamps of the adapter come with a ring on a raw packet QP, and with an AF_XDP ring whose driver gives them to
 * XDP (VMA_HW_TS_CONVERSION); on another one the socket receives by the kernel if its adapter has them. */
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_sock.h"
#include "vmh_worker.h"
#include <linux/ethtool.h>
#include <linux/net_tstamp.h>
#include <linux/sockios.h>
#include <net/if.h>
#include <sys/ioctl.h>

#define TX_COMPLETION (1u << 18) /* SOF_TIMESTAMPING_TX_COMPLETION, Linux 6.15 */

static void want(struct vmh_sock *s)
{
	bool on = s->opt_timestamp || (s->stamping & SOF_TIMESTAMPING_RX_SOFTWARE), was = s->want_stamp;

	if (on == was)
		return;
	atomic_store(&s->want_stamp, on);
	if (!on)
		atomic_fetch_sub(&vmh_want_stamps, 1);
	else if (!atomic_fetch_add(&vmh_want_stamps, 1))
		vmh_worker_wake(); /* it looks at the rings more often from now on */
}

/* As in the kernel: the last one set wins, and clearing either clears both. */
void vmh_sock_set_timestamp(struct vmh_sock *s, int name, bool on)
{
	bool ns = name == SO_TIMESTAMPNS_OLD || name == SO_TIMESTAMPNS_NEW;

	s->opt_timestamp = !on ? 0 : ns ? VMH_STAMP_NS : VMH_STAMP_US;
	if (on)
		s->stamp_new = name == SO_TIMESTAMP_NEW || name == SO_TIMESTAMPNS_NEW;
	want(s);
}

void vmh_sock_set_timestamping(struct vmh_sock *s, int fd, int name, uint32_t flags)
{
	uint32_t changed = s->stamping ^ flags;

	s->stamping = flags;
	s->stamp_new = name == SO_TIMESTAMPING_NEW;
	want(s);
	if (!(changed & SOF_TIMESTAMPING_RAW_HARDWARE))
		return;
	atomic_store(&vmh_wanted_hw_stamps, true);
	atomic_fetch_add(&vmh_want_hw_stamps, flags & SOF_TIMESTAMPING_RAW_HARDWARE ? 1 : -1);
	/* other flows may be on a ring now, or have to leave it */
	vmh_sock_release_flows(s, VMH_R_TIMESTAMPING);
	vmh_sock_update(s, fd);
}

unsigned vmh_sock_sends_stamped(const struct vmh_sock *s)
{
	return s->stamping & (SOF_TIMESTAMPING_TX_RECORD_MASK | TX_COMPLETION) ? VMH_R_TIMESTAMPING : 0;
}

static bool adapter_stamps(int fd, unsigned ifindex)
{
	struct ethtool_ts_info info = { .cmd = ETHTOOL_GET_TS_INFO };
	struct ifreq req = { .ifr_data = (void *)&info };

	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = __atomic_load_n(&r->next, __ATOMIC_ACQUIRE))
		if (r->ifindex == ifindex && !atomic_load(&r->gone) && r->hw_stamps)
			return false; /* and its ring tells them */
	return vmh_net_link_name(ifindex, req.ifr_name) && vmh_sys(SYS_ioctl, fd, SIOCETHTOOL, &req) >= 0 &&
	       (info.so_timestamping & SOF_TIMESTAMPING_RX_HARDWARE);
}

unsigned vmh_sock_stamped_by_adapter(const struct vmh_sock *s, int fd, unsigned ifindex)
{
	unsigned links[VMH_NET_LINKS];
	int n;

	if (vmh_likely(!(s->stamping & SOF_TIMESTAMPING_RAW_HARDWARE)))
		return 0;
	if (ifindex)
		return adapter_stamps(fd, ifindex) ? VMH_R_TIMESTAMPING : 0;
	n = vmh_net_served_links(links, VMH_NET_LINKS);
	for (int i = 0; i < n; i++)
		if (adapter_stamps(fd, links[i]))
			return VMH_R_TIMESTAMPING;
	return 0;
}

void vmh_sock_dump(int fd, int level)
{
	struct vmh_obj *o = vmh_fd_get(fd);

	if (!o)
		return;
	if (atomic_load(&o->class_) == VMH_CLASS_UDP) {
		const struct vmh_sock *s = vmh_sock_of(o);

		vmh_log(level, "Socket timestamp : m_b_rcvtstamp %s, m_b_rcvtstampns %s, m_n_tsing_flags %u",
			s->opt_timestamp ? "true" : "false", s->opt_timestamp == VMH_STAMP_NS ? "true" : "false",
			s->stamping);
	}
	vmh_obj_put(o);
}
