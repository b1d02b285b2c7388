/* What the session with the service is asked: rings, flows, neighbours, and TCP connections that change sides. */
#include "vmh_control_int.h"
#include "vmh_iomux_int.h"
#include "vmh_lane.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_verbs.h"
#include "vmh_worker.h"

#define REFUSED_NS 1000000000ull
#define MAX_RINGS_REFUSED 32
#define MAX_RINGS_AGAIN 2 /* no QP, then no queue */

static struct {
	unsigned ifindex, lane, reason;
	uint64_t until_ns;
} refused[MAX_RINGS_REFUSED];

/* lock held */
void vmh_ctl_forget_refusals(void)
{
	memset(refused, 0, sizeof(refused));
}

static const char *kind_name(unsigned kind)
{
	return kind == VMH_RING_DIRECT ? "direct" : kind == VMH_RING_VETH ? "ring veth" : "raw packet QP";
}

static void give_back(unsigned ring_id)
{
	struct vmh_msg_release rel = { .ring_id = ring_id };
	struct vmh_msg_hdr ack;

	vmh_ctl_header(&rel.hdr, VMH_MSG_RELEASE, sizeof(rel));
	vmh_ctl_rpc(&rel.hdr, -1, &ack, sizeof(ack), NULL, NULL);
}

/* lock held. The second step where a bound XSK can't be mapped (before linux 6.4). */
static int have_bound(struct vmh_msg_ring_reply *grant)
{
	struct vmh_msg_ring_mapped req = { .ring_id = grant->ring_id };
	struct vmh_msg_ring_mapped_reply rep;
	int err;

	vmh_ctl_header(&req.hdr, VMH_MSG_RING_MAPPED, sizeof(req));
	err = vmh_ctl_rpc(&req.hdr, -1, &rep, sizeof(rep), NULL, NULL);
	grant->hdr.status = rep.hdr.status;
	grant->hdr.reason = rep.hdr.reason;
	grant->flags = rep.flags & ~(unsigned)VMH_RING_F_BIND_AFTER;
	return err;
}

static int take_ring(struct vmh_msg_ring_reply *rep, const char *name, int *fds, int nfds, struct vmh_ring **out)
{
	const struct vmh_xdp_limits limits = vmh_ring_limits();
	int err;

	/* the program may close all fds it does not know; the first one, the memory, is closed at once */
	for (int i = 1; i < nfds; i++)
		fds[i] = vmh_fd_hide(fds[i]);
	err = vmh_ring_xdp_open(rep, name, fds, nfds, &limits, have_bound, out);
	for (int i = 0; err && i < nfds; i++)
		vmh_fd_hidden_close(fds[i]);
	return err;
}

/* One request; dev: the device that it offers, taken over. again: the next one may get another kind of ring. */
static unsigned ask_once(struct vmh_msg_ring *req, struct verbs_dev *dev, const char *name, struct vmh_ring **out,
			 bool *again)
{
	struct vmh_msg_ring_reply rep;
	int fds[MAX_FDS], nfds = 0, err;

	req->verbs = dev ? VMH_VERBS_USABLE : VMH_VERBS_NONE;
	vmh_ctl_header(&req->hdr, VMH_MSG_RING, sizeof(*req));
	err = vmh_ctl_rpc(&req->hdr, -1, &rep, sizeof(rep), fds, &nfds);
	if (err) {
		vmh_verbs_dev_close(dev);
		return rep.hdr.reason ? rep.hdr.reason : VMH_R_RING_FAILED;
	}
	rep.lane = req->lane;
	if (rep.kind == VMH_RING_VERBS) {
		vmh_ctl_close_fds(fds, nfds);
		err = dev ? vmh_ring_verbs_open(&rep, name, dev, out) : -EPROTO; /* none was offered */
	} else {
		vmh_verbs_dev_close(dev);
		err = take_ring(&rep, name, fds, nfds, out);
	}
	if (err == -ENOBUFS && vmh_lane_ring(req->ifindex, req->lane)) { /* and those that are there have some */
		give_back(rep.ring_id);
		return VMH_R_RING_LIMIT;
	}
	if (err) {
		*again = rep.kind == VMH_RING_VERBS ? dev != NULL : rep.hdr.status == -EBUSY;
		vmh_warn("the ring on %s could not be %s: %s", name,
			 rep.kind == VMH_RING_VERBS ? "made" : rep.hdr.status ? "bound" : "mapped", strerror(-err));
		give_back(rep.ring_id);
		return rep.kind == VMH_RING_VERBS ? VMH_R_VERBS_FAILED
		       : rep.hdr.reason		  ? rep.hdr.reason
						  : VMH_R_RING_FAILED;
	}
	vmh_debug("ring %u on %s, lane %u: %s, %s%s%s", rep.ring_id, name, rep.lane, kind_name(rep.kind),
		  rep.kind == VMH_RING_VERBS ? req->verbs_device
		  : rep.xdp_mode == VMH_XDP_NATIVE ? "native XDP" : "generic XDP",
		  rep.flags & VMH_RING_F_ZEROCOPY ? ", zero-copy" : "",
		  !(rep.flags & VMH_RING_F_STAMP) ? ""
		  : (*out)->hw_stamps ? ", time stamps of the adapter"
				      : ", no time stamps of the adapter by the clock of VMA_HW_TS_CONVERSION");
	if (vmh_params.mtu && vmh_params.mtu != (*out)->mtu)
		vmh_warn("Mismatch between interface %s MTU=%u and VMA_MTU=%lld. Make sure VMA_MTU and all offloaded "
			 "interfaces MTUs match.", name, (*out)->mtu, (long long)vmh_params.mtu);
	vmh_worker_wake(); /* it may sleep for as long as there is no ring */
	if (rep.kind == VMH_RING_VERBS) {
		vmh_params_no_effect(VMH_PARAM_ON_VERBS, "verbs");
	} else {
		vmh_params_no_effect(VMH_PARAM_ON_XDP, "xdp");
		vmh_ring_wish_compare(*out);
	}
	return 0;
}

static unsigned ask_ring(unsigned ifindex, unsigned lane, struct vmh_ring **out)
{
	struct vmh_msg_ring req = { .ifindex = ifindex, .lane = lane };
	char name[16] = "";
	struct verbs_dev *dev;
	unsigned reason;
	bool again = false;

	vmh_net_link_name(ifindex, name);
	vmh_ring_wish(&req);
	for (;;) {
		dev = vmh_verbs_probe(ifindex, name, req.verbs_device, &req.verbs_reason);
		reason = ask_once(&req, dev, name, out, &again);
		if (reason != VMH_R_RING_LIMIT || !req.frames)
			break;
		req.frames = 0; /* what the service gives anybody */
	}
	for (int i = 0; again && vmh_ctl_fd >= 0 && i < MAX_RINGS_AGAIN; i++) {
		again = false;
		if (reason == VMH_R_VERBS_FAILED)
			req.verbs_reason = VMH_R_VERBS_FAILED; /* the next rung */
		reason = ask_once(&req, NULL, name, out, &again);
	}
	return reason;
}

/* lock held. The ring of this very lane, or NULL and *reason. */
static struct vmh_ring *new_ring(unsigned ifindex, unsigned lane, unsigned *reason)
{
	uint64_t now = vmh_now_ns();
	struct vmh_ring *r = NULL;
	int slot = 0;

	for (int i = 0; i < MAX_RINGS_REFUSED; i++) {
		if (refused[i].ifindex == ifindex && refused[i].lane == lane && refused[i].until_ns > now) {
			*reason = refused[i].reason;
			return NULL;
		}
		if (refused[i].until_ns < refused[slot].until_ns)
			slot = i;
	}
	*reason = vmh_session_id() ? ask_ring(ifindex, lane, &r) : vmh_session_reason();
	if (!*reason)
		return r;
	refused[slot].ifindex = ifindex;
	refused[slot].lane = lane;
	refused[slot].reason = *reason;
	refused[slot].until_ns = now + REFUSED_NS;
	return NULL;
}

struct vmh_ring *vmh_session_ring(unsigned ifindex, unsigned lane, unsigned *reason)
{
	struct vmh_ring *r = vmh_lane_ring(ifindex, lane), *other;

	*reason = 0;
	if (vmh_likely(r && r->lane == lane))
		return r;
	vmh_lock(&vmh_ctl_lock);
	other = vmh_lane_ring(ifindex, lane);
	r = other && other->lane == lane ? other : new_ring(ifindex, lane, reason);
	if (!r && other && vmh_session_id()) {
		vmh_lane_refused(other->ifname, *reason);
		r = other;
		*reason = 0;
	}
	vmh_unlock(&vmh_ctl_lock);
	return r;
}

void vmh_session_attach_all(struct vmh_session_attach *v, int n)
{
	struct vmh_msg_attach_reply rep[n];
	struct vmh_ctl_request q[n];

	vmh_lock(&vmh_ctl_lock);
	for (int i = 0; i < n; i++) {
		vmh_ctl_header(&v[i].req.hdr, VMH_MSG_ATTACH, sizeof(v[i].req));
		q[i] = (struct vmh_ctl_request){ .req = &v[i].req.hdr, .out = { v[i].fd }, .nout = v[i].fd >= 0, .reply = &rep[i] };
	}
	vmh_ctl_rpc_many(q, n, sizeof(rep[0]));
	vmh_unlock(&vmh_ctl_lock);
	for (int i = 0; i < n; i++) {
		v[i].err = q[i].err;
		v[i].flow_id = rep[i].flow_id;
		if (v[i].req.flags & VMH_ATTACH_F_PORT)
			v[i].req.local_port = rep[i].local_port;
		v[i].reason = !q[i].err ? 0 : rep[i].hdr.reason ? rep[i].hdr.reason : vmh_session_reason();
		if (q[i].err && !v[i].reason)
			v[i].reason = VMH_R_PROTOCOL;
	}
}

int vmh_session_attach(const struct vmh_msg_attach *want, int fd, uint32_t *flow_id, unsigned *reason)
{
	struct vmh_session_attach one = { .req = *want, .fd = fd };

	vmh_session_attach_all(&one, 1);
	*flow_id = one.flow_id;
	*reason = one.reason;
	return one.err;
}

void vmh_session_detach_all(const uint32_t *flow_ids, int n, unsigned cause)
{
	static struct vmh_msg_detach req[VMH_DETACHES_MAX]; /* not on the stack, which may be a handler's */
	static struct vmh_msg_hdr ack[VMH_DETACHES_MAX];
	static struct vmh_ctl_request q[VMH_DETACHES_MAX];

	for (int i = 0; i < n; i++)
		vmh_verbs_detach(flow_ids[i]);
	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0 && n) {
		for (int i = 0; i < n; i++) {
			req[i] = (struct vmh_msg_detach){ .flow_id = flow_ids[i], .cause = cause };
			vmh_ctl_header(&req[i].hdr, VMH_MSG_DETACH, sizeof(req[i]));
			q[i] = (struct vmh_ctl_request){ .req = &req[i].hdr, .reply = &ack[i] };
		}
		vmh_ctl_rpc_many(q, n, sizeof(ack[0]));
	}
	vmh_unlock(&vmh_ctl_lock);
}

void vmh_session_detach(uint32_t flow_id, unsigned cause)
{
	vmh_session_detach_all(&flow_id, 1, cause);
}

/* Fire and forget: the reply (up to a second later) is dropped by whoever reads it. The kernel path
 * carries the datagrams meanwhile, and the page's generation tells when the neighbour is there. */
int vmh_session_neigh(unsigned ifindex, in_addr_t addr)
{
	const struct vmh_ip ip = vmh_ip4(addr);

	return vmh_session_neigh_of(ifindex, &ip);
}

int vmh_session_neigh_of(unsigned ifindex, const struct vmh_ip *addr)
{
	struct vmh_msg_neigh req = { .ifindex = ifindex, .family = vmh_ip_is4(addr) ? 4 : 6 };
	int err = -ENOTCONN;

	memcpy(req.addr, addr->b, sizeof(req.addr));
	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0) {
		vmh_ctl_header(&req.hdr, VMH_MSG_NEIGH, sizeof(req));
		err = vmh_ctl_send(&req, sizeof(req));
	}
	vmh_unlock(&vmh_ctl_lock);
	return err;
}

int vmh_session_reinject(struct vmh_msg_reinject *req, int fd)
{
	struct vmh_msg_hdr ack;
	int err;

	vmh_lock(&vmh_ctl_lock);
	vmh_ctl_header(&req->hdr, VMH_MSG_REINJECT, offsetof(struct vmh_msg_reinject, data) + req->len);
	err = vmh_ctl_rpc(&req->hdr, fd, &ack, sizeof(ack), NULL, NULL);
	vmh_unlock(&vmh_ctl_lock);
	return err;
}

/* lock held. The service has not done it, or was not heard to. */
static bool no_answer(int err)
{
	return err && (vmh_ctl_fd < 0 || err == -ETIMEDOUT);
}

/* lock held; the state is in the file */
static int tcp_home(int fd, uint32_t flow_id, unsigned ifindex, unsigned reason)
{
	struct vmh_msg_tcp_home req = { .flow_id = flow_id, .ifindex = ifindex };
	const int out[2] = { fd, vmh_ctl_state_file() };
	struct vmh_msg_hdr ack;
	int err;

	vmh_ctl_header(&req.hdr, VMH_MSG_TCP_HOME, sizeof(req));
	req.hdr.reason = reason;
	err = vmh_ctl_rpc_fds(&req.hdr, out, 2, &ack, sizeof(ack), NULL, NULL);
	return no_answer(err) ? -ENOTCONN : err;
}

/* lock held. several: a file for their states; NULL: there is one, which goes by the one that is there always */
static void take(struct vmh_session_take *v, int n, const struct vmh_file *several)
{
	struct vmh_msg_tcp_take req[n];
	struct vmh_msg_tcp_take_reply rep[n];
	struct vmh_ctl_request q[n];
	int file = several ? several->fd : vmh_ctl_state_file();

	for (int i = 0; i < n; i++) {
		req[i] = (struct vmh_msg_tcp_take){ .flow_id = v[i].flow_id, .follow = (unsigned)(n - i - 1),
						    .at = (unsigned)i * VMH_CTL_STATE_ROOM };
		vmh_ctl_header(&req[i].hdr, VMH_MSG_TCP_TAKE, sizeof(req[i]));
		req[i].hdr.reason = v[i].why;
		q[i] = (struct vmh_ctl_request){ .req = &req[i].hdr, .out = { v[i].fd, file }, .nout = 2, .reply = &rep[i] };
	}
	if (file >= 0)
		vmh_ctl_rpc_many(q, n, sizeof(rep[0]));
	for (int i = 0; i < n; i++) {
		v[i].state = (struct vmh_tcp_blob){ 0 };
		v[i].err = file < 0 ? file : q[i].err;
		if (v[i].err) {
			if (v[i].err == -ETIMEDOUT)
				vmh_ctl_state_give_up(file, i);
			else if (vmh_ctl_fd < 0)
				v[i].err = -ENOTCONN;
			if (v[i].err == -ENOTCONN && file >= 0)
				vmh_ctl_state_left(several, i, &v[i].state);
			v[i].reason = file < 0 ? VMH_R_NOT_TRIED : rep[i].hdr.reason ? rep[i].hdr.reason :
				      v[i].err == -ENOTCONN ? VMH_R_SERVICE_GONE : VMH_R_TCP_STATE;
			continue;
		}
		v[i].reason = VMH_R_TCP_STATE;
		v[i].err = several ? vmh_ctl_states_get(several, i, &v[i].state, rep[i].len)
				   : vmh_ctl_state_get(&v[i].state, rep[i].len);
		if (v[i].err && ((several && vmh_ctl_states_again(several, i, rep[i].len) < 0) ||
				 tcp_home(v[i].fd, v[i].flow_id, 0, VMH_R_TCP_STATE)))
			vmh_warn("fd %d: a TCP connection was lost between kernel and ring", v[i].fd);
	}
	if (!several)
		vmh_ctl_state_done(vmh_ctl_fd >= 0 && v->err != -ETIMEDOUT);
}

void vmh_session_tcp_take(struct vmh_session_take *v, int n)
{
	struct vmh_file file = { .fd = -1 };

	vmh_lock(&vmh_ctl_lock);
	if (n > 1 && vmh_ctl_states_file(&file, n))
		take(v, n, &file);
	else
		for (int i = 0; i < n; i++)
			take(v + i, 1, NULL);
	vmh_file_close(&file);
	vmh_unlock(&vmh_ctl_lock);
}

/* lock held */
static int home(int fd, const struct vmh_tcp_blob *state, uint32_t flow_id, unsigned ifindex, unsigned reason)
{
	int err = vmh_ctl_fd < 0 ? -ENOTCONN : vmh_ctl_state_put(state);

	if (err >= 0) {
		err = tcp_home(fd, flow_id, ifindex, reason);
		vmh_ctl_state_done(err != -ENOTCONN);
	}
	return err;
}

int vmh_session_tcp_home(int fd, const struct vmh_tcp_blob *state, uint32_t flow_id, unsigned ifindex, unsigned reason)
{
	int err;

	vmh_lock(&vmh_ctl_lock);
	err = home(fd, state, flow_id, ifindex, reason);
	vmh_unlock(&vmh_ctl_lock);
	return err;
}

/* Not on the stack, which may be a handler's. */
struct homes {
	struct vmh_msg_tcp_home req[VMH_HOMES_MAX];
	struct vmh_msg_hdr ack[VMH_HOMES_MAX];
	struct vmh_ctl_request q[VMH_HOMES_MAX];
};

/* lock held; the states are in the file */
static void home_all(struct vmh_session_home *v, int n, const struct vmh_file *several, struct homes *m)
{
	for (int i = 0; i < n; i++) {
		m->req[i] = (struct vmh_msg_tcp_home){ .flow_id = v[i].flow_id, .ifindex = v[i].ifindex,
						       .follow = (unsigned)(n - i - 1),
						       .at = (unsigned)i * VMH_CTL_STATE_ROOM };
		vmh_ctl_header(&m->req[i].hdr, VMH_MSG_TCP_HOME, sizeof(m->req[i]));
		m->req[i].hdr.reason = v[i].reason;
		m->q[i] = (struct vmh_ctl_request){ .req = &m->req[i].hdr, .out = { v[i].fd, several->fd }, .nout = 2,
						    .reply = &m->ack[i] };
	}
	vmh_ctl_rpc_many(m->q, n, sizeof(m->ack[0]));
	for (int i = 0; i < n; i++)
		v[i].err = no_answer(m->q[i].err) ? -ENOTCONN : m->q[i].err;
}

/* lock held. In a file of their own. */
static bool put_all(const struct vmh_session_home *v, int n, struct vmh_file *several)
{
	bool done = vmh_ctl_fd >= 0 && vmh_ctl_states_file(several, n);

	for (int i = 0; done && i < n; i++)
		done = !vmh_ctl_states_put(several, i, &v[i].state);
	return done;
}

void vmh_session_tcp_home_all(struct vmh_session_home *v, int n)
{
	struct homes *m = n > 1 ? vmh_scratch_certain(sizeof(*m)) : NULL;
	struct vmh_file file = { .fd = -1 };

	vmh_lock(&vmh_ctl_lock);
	if (m && put_all(v, n, &file))
		home_all(v, n, &file, m);
	else
		for (int i = 0; i < n; i++)
			v[i].err = home(v[i].fd, &v[i].state, v[i].flow_id, v[i].ifindex, v[i].reason);
	vmh_file_close(&file);
	vmh_unlock(&vmh_ctl_lock);
	if (m)
		vmh_scratch_free(m, sizeof(*m));
}

int vmh_session_tcp_frames(struct vmh_msg_tcp_frames *req, int fd, const struct vmh_tcp_blob *frames)
{
	struct vmh_msg_hdr ack;
	int out[2] = { fd }, err;

	vmh_lock(&vmh_ctl_lock);
	err = out[1] = vmh_ctl_fd < 0 ? -ENOTCONN : vmh_ctl_state_put(frames);
	if (err >= 0) {
		vmh_ctl_header(&req->hdr, VMH_MSG_TCP_FRAMES, sizeof(*req));
		req->len = (unsigned)frames->len;
		err = vmh_ctl_rpc_fds(&req->hdr, out, 2, &ack, sizeof(ack), NULL, NULL);
		vmh_ctl_state_done(vmh_ctl_fd >= 0 && err != -ETIMEDOUT);
	}
	vmh_unlock(&vmh_ctl_lock);
	return err;
}

int vmh_session_tcp_keep(int fd, int ticket)
{
	const int out[2] = { fd, ticket };
	struct vmh_msg_tcp_keep req;
	struct vmh_msg_hdr ack;
	int err = -ENOTCONN;

	vmh_lock(&vmh_ctl_lock);
	vmh_ctl_header(&req.hdr, VMH_MSG_TCP_KEEP, sizeof(req));
	if (vmh_ctl_fd >= 0 && !vmh_session_muted())
		err = vmh_ctl_rpc_fds(&req.hdr, out, 2, &ack, sizeof(ack), NULL, NULL);
	vmh_unlock(&vmh_ctl_lock);
	return err;
}

int vmh_session_tcp_fetch(int ticket)
{
	struct vmh_msg_tcp_fetch req = { 0 };
	struct vmh_msg_tcp_fetch_reply rep;
	int fds[MAX_FDS], n = 0, err;

	vmh_lock(&vmh_ctl_lock);
	vmh_ctl_header(&req.hdr, VMH_MSG_TCP_FETCH, sizeof(req));
	err = vmh_ctl_rpc_fds(&req.hdr, &ticket, 1, &rep, sizeof(rep), NULL, NULL);
	if (err && err != -EPERM) {
		err = -ENOTCONN;
	} else if (!err) {
		vmh_sys(SYS_close, ticket);
		req.id = rep.id;
		vmh_ctl_header(&req.hdr, VMH_MSG_TCP_FETCH, sizeof(req));
		err = vmh_ctl_rpc_fds(&req.hdr, NULL, 0, &rep, sizeof(rep), fds, &n);
		if (!err && n != 1)
			err = -EMFILE;
		else if (err)
			err = -ECONNABORTED;
	}
	vmh_unlock(&vmh_ctl_lock);
	return err ? err : fds[0];
}

int vmh_session_tcp_show(struct vmh_msg_tcp_show *req, const int *fds, struct vmh_msg_tcp_show_reply *rep)
{
	int err;

	vmh_lock(&vmh_ctl_lock);
	vmh_ctl_header(&req->hdr, VMH_MSG_TCP_SHOW, sizeof(*req));
	err = -EBUSY; /* not -ETIMEDOUT, by which it may have been done: a service that hangs is not asked */
	if (!vmh_session_muted())
		err = vmh_ctl_rpc_fds(&req->hdr, fds, (int)req->n, rep, sizeof(*rep), NULL, NULL);
	vmh_unlock(&vmh_ctl_lock);
	return err;
}

void vmh_session_tcp_hide(struct vmh_msg_tcp_hide *req)
{
	struct vmh_msg_hdr ack;

	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0) {
		vmh_ctl_header(&req->hdr, VMH_MSG_TCP_HIDE, sizeof(*req));
		vmh_ctl_rpc(&req->hdr, -1, &ack, sizeof(ack), NULL, NULL);
	}
	vmh_unlock(&vmh_ctl_lock);
}

void vmh_session_release(unsigned ring_id)
{
	struct vmh_msg_release req = { .ring_id = ring_id };
	struct vmh_msg_hdr ack;

	vmh_lock(&vmh_ctl_lock);
	if (vmh_ctl_fd >= 0) {
		vmh_ctl_header(&req.hdr, VMH_MSG_RELEASE, sizeof(req));
		vmh_ctl_rpc(&req.hdr, -1, &ack, sizeof(ack), NULL, NULL);
	}
	vmh_unlock(&vmh_ctl_lock);
}

int vmh_session_tcp_renew(int fd)
{
	struct vmh_msg_tcp_renew req;
	struct vmh_msg_hdr ack;
	int err = -ENOTCONN;

	vmh_lock(&vmh_ctl_lock);
	vmh_ctl_header(&req.hdr, VMH_MSG_TCP_RENEW, sizeof(req));
	if (vmh_ctl_fd >= 0)
		err = vmh_ctl_rpc_fds(&req.hdr, &fd, 1, &ack, sizeof(ack), NULL, NULL);
	vmh_unlock(&vmh_ctl_lock);
	return err;
}
