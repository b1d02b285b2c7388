/* What recvmsg tells of a datagram beside its bytes: the control messages, as the kernel makes them. */
#include "vmh_net.h"
#include "vmh_sock.h"
#include <linux/net_tstamp.h>
#include <netinet/in.h>
#include <sys/socket.h>

#define NS 1000000000u
#define HEADERS 42          /* of the frame that the datagram came in; options and tags are not counted */

#ifndef SCM_TIMESTAMPING_PKTINFO
#define SCM_TIMESTAMPING_PKTINFO 58
#endif
#define OPT_RX_FILTER (1u << 17) /* SOF_TIMESTAMPING_OPT_RX_FILTER, Linux 6.12 */

/* As the kernel's put_cmsg: header always whole, data cut and MSG_CTRUNC set where it does not fit. */
void vmh_put_cmsg(struct vmh_cmsg_out *o, int level, int type, const void *data, size_t len)
{
	struct cmsghdr h = { .cmsg_len = CMSG_LEN(len), .cmsg_level = level, .cmsg_type = type };
	size_t space = CMSG_SPACE(len);

	if (o->left < sizeof(h)) {
		o->truncated = true;
		return;
	}
	if (o->left < CMSG_LEN(len)) {
		o->truncated = true;
		h.cmsg_len = o->left;
		len = o->left - sizeof(h);
	}
	memcpy(o->at, &h, sizeof(h));
	memcpy(o->at + CMSG_LEN(0), data, len);
	if (space > o->left)
		space = o->left;
	o->at += space;
	o->left -= space;
	o->used += space;
}

void vmh_cmsg_begin(struct vmh_cmsg_out *o, const struct msghdr *m)
{
	*o = (struct vmh_cmsg_out){ .at = m->msg_control, .left = m->msg_control ? m->msg_controllen : 0 };
}

void vmh_cmsg_end(const struct vmh_cmsg_out *o, struct msghdr *m)
{
	m->msg_controllen = o->used;
	if (o->truncated)
		m->msg_flags |= MSG_CTRUNC;
}

static struct timespec timespec_of(uint64_t ns)
{
	return (struct timespec){ (time_t)(ns / NS), (long)(ns % NS) };
}

static void put_timestamp(const struct vmh_sock *s, struct vmh_cmsg_out *o, uint64_t ns)
{
	struct timespec ts = timespec_of(ns);
	struct timeval tv = { ts.tv_sec, ts.tv_nsec / 1000 };

	if (s->opt_timestamp == VMH_STAMP_NS)
		vmh_put_cmsg(o, SOL_SOCKET, s->stamp_new ? SO_TIMESTAMPNS_NEW : SO_TIMESTAMPNS_OLD, &ts, sizeof(ts));
	else
		vmh_put_cmsg(o, SOL_SOCKET, s->stamp_new ? SO_TIMESTAMP_NEW : SO_TIMESTAMP_OLD, &tv, sizeof(tv));
}

/* With SOF_TIMESTAMPING_OPT_RX_FILTER a stamp that another socket asked for is not told (__sock_recv_timestamp). */
static bool told(uint32_t flags, uint32_t report, uint32_t generate)
{
	return (flags & report) && ((flags & generate) || !(flags & OPT_RX_FILTER));
}

static void put_timestamping(const struct vmh_sock *s, struct vmh_cmsg_out *o, const struct vmh_buf *b, uint64_t ns)
{
	uint32_t flags = s->stamping;
	bool hard = b->hw_stamped && told(flags, SOF_TIMESTAMPING_RAW_HARDWARE, SOF_TIMESTAMPING_RX_HARDWARE);
	struct timespec ts[3] = { { 0 } };

	if (ns && told(flags, SOF_TIMESTAMPING_SOFTWARE, SOF_TIMESTAMPING_RX_SOFTWARE))
		ts[0] = timespec_of(ns);
	else if (!hard)
		return;
	if (hard) {
		ts[2] = timespec_of(vmh_buf_hw_stamp(b));
		if (flags & SOF_TIMESTAMPING_OPT_PKTINFO) {
			const uint32_t info[4] = { b->ring->ifindex, b->len + HEADERS };

			vmh_put_cmsg(o, SOL_SOCKET, SCM_TIMESTAMPING_PKTINFO, info, sizeof(info));
		}
	}
	vmh_put_cmsg(o, SOL_SOCKET, s->stamp_new ? SO_TIMESTAMPING_NEW : SO_TIMESTAMPING_OLD, ts, sizeof(ts));
}

static void put_stamps(const struct vmh_sock *s, struct vmh_cmsg_out *o, const struct vmh_buf *b)
{
	uint64_t ns = b->stamp_ns;

	if (s->opt_timestamp && !ns) /* queued before the option was set */
		ns = vmh_wall_ns();
	if (s->opt_timestamp)
		put_timestamp(s, o, ns);
	if (s->stamping)
		put_timestamping(s, o, b, ns);
}

void vmh_sock_put_control(const struct vmh_sock *s, struct msghdr *m, const struct vmh_buf *b)
{
	struct vmh_cmsg_out o;

	vmh_cmsg_begin(&o, m);
	if (vmh_unlikely(s->opt_timestamp | s->stamping))
		put_stamps(s, &o, b);
	if (s->opt_pktinfo) {
		struct in_pktinfo info = { .ipi_ifindex = (int)b->ring->ifindex };

		info.ipi_addr.s_addr = b->daddr;
		info.ipi_spec_dst.s_addr = b->daddr;
		if (b->multicast)
			vmh_net_addr_of(b->ring->ifindex, &info.ipi_spec_dst.s_addr);
		vmh_put_cmsg(&o, IPPROTO_IP, IP_PKTINFO, &info, sizeof(info));
	}
	if (s->opt_recvttl) {
		int ttl = b->ttl;
		vmh_put_cmsg(&o, IPPROTO_IP, IP_TTL, &ttl, sizeof(ttl));
	}
	if (s->opt_recvtos)
		vmh_put_cmsg(&o, IPPROTO_IP, IP_TOS, &b->tos, 1);
	vmh_cmsg_end(&o, m);
}
