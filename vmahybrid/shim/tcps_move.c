/* A TCP connection from the kernel onto a ring, and home. Both are the program's calls that wait for the service. */
#include "vmh_links.h"
#include "vmh_base.h"
#include "tcp/tcp_state.h"
#include "vmh_control.h"
#include "vmh_exception.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_param.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <fcntl.h>
#include <linux/filter.h>
#include <linux/sockios.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define RETRY_NS 50000000u     /* for a neighbour, or a thread that is in a call */
#define NEIGHBOUR_MS 100
#define NAP_NS 50000
#define NAPS 40
#define NAPS_ORDERED 500    /* longer than a plain poll() is, interpose_iomux.c */
#define LEFT_FRAMES 1024      /* of a ring, at the end of a move */
#define REPAIR_NAP_NS 5000000
#define LEAVE_NS 1000000000u  /* that the end of a process waits for the kernel to take some thousand */
#define STRANDED_NS 10000000000u /* that a connection waits for a service */
#define TRY_HOME_NS 1000000000u  /* one that waits for a route */
#define SYN_MS 1000u             /* the kernel repeats one after this, twice it, */
#define SYN_MOST_MS 120000u      /* and so on */

/* Passes by itself: the connection may be adopted later. */
static bool passing(unsigned reason)
{
	return reason == VMH_R_NO_NEIGHBOUR || reason == VMH_R_NOT_TRIED || reason == VMH_R_NO_SERVICE ||
	       reason == VMH_R_SERVICE_GONE || reason == VMH_R_SERVICE_STOP || reason == VMH_R_NO_ANSWER;
}

bool vmh_tcps_trouble(unsigned reason)
{
	return reason == VMH_R_IF_DOWN || reason == VMH_R_IF_GONE || reason == VMH_R_IF_MAC ||
	       reason == VMH_R_VERBS_FAILED || reason == VMH_R_SERVICE_GONE || reason == VMH_R_SERVICE_STOP;
}

/* What an interface that is down, or away, leaves. */
static bool no_way(unsigned reason)
{
	return reason == VMH_R_IF_DOWN || reason == VMH_R_IF_GONE || reason == VMH_R_NO_INTERFACE ||
	       reason == VMH_R_NO_ROUTE || reason == VMH_R_NOT_OFFLOADABLE_ADDR || reason == VMH_R_VERBS_FAILED ||
	       reason == VMH_R_RING_FAILED || reason == VMH_R_ATTACH_FAILED || reason == VMH_R_IF_BUSY;
}

static int64_t timeout_of(int fd, int name)
{
	struct timeval tv = { 0 };
	socklen_t len = sizeof(tv);

	if (vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, name, &tv, &len) < 0)
		return 0;
	return (int64_t)tv.tv_sec * 1000000000 + (int64_t)tv.tv_usec * 1000;
}

bool vmh_tcps_reuses(int fd)
{
	int v = 0;
	socklen_t len = sizeof(v);

	return vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_REUSEADDR, &v, &len) >= 0 && v;
}

/* Is it worth to ask again soon? The peer has just been spoken to, so its neighbour's entry is about to come, and while
 * the page is being written nothing is known at all. */
static bool too_early(unsigned reason, const struct vmh_way *hop)
{
	return hop->generation == VMH_NET_UNSURE || (reason == VMH_R_NO_NEIGHBOUR && vmh_params.hybrid_tcp == 2);
}

static unsigned next_hop(const struct vmh_tcp_addr *a, struct vmh_way *hop, bool patient)
{
	struct timespec ms = { 0, 1000000 };
	bool asked = false;
	unsigned reason;

	for (int i = 0;; i++) {
		reason = vmh_net_way(&a->raddr, &a->laddr, hop);
		if (reason == VMH_R_NO_NEIGHBOUR && !vmh_ip_any(&hop->via) && !asked) {
			vmh_session_neigh_of(hop->ifindex, &hop->via);
			asked = true;
		}
		if (!too_early(reason, hop) || !patient || i == NEIGHBOUR_MS)
			return hop->generation == VMH_NET_UNSURE ? VMH_R_NOT_TRIED : reason;
		vmh_sys(SYS_nanosleep, &ms, NULL);
	}
}

/* The ring and the way to the peer: 0, or why there is none. */
static unsigned find_way(struct vmh_tcps *s, const struct vmh_tcp_addr *a, struct vmh_tcp_path *path, bool patient)
{
	struct vmh_way hop = { 0 };
	struct vmh_ring *r;
	unsigned reason = vmh_session_open();

	if (reason)
		return reason;
	if (vmh_ip_is4(&a->raddr) && (ntohl(vmh_ip_v4(&a->raddr)) >> 24) == 127)
		return VMH_R_LOOPBACK;
	vmh_session_serve();
	reason = next_hop(a, &hop, patient);
	if (!reason)
		reason = vmh_link_served(hop.ifindex);
	if (!reason)
		reason = vmh_tcps_tagged(s, hop.ifindex);
	if (reason)
		return reason;
	r = vmh_session_ring(hop.ifindex, vmh_lane_of(&s->lane, VMH_LANE_RX, s->obj.fd, vmh_ip_v4(&a->laddr)), &reason);
	if (!r)
		return reason ? reason : VMH_R_RING_FAILED;
	s->tring = vmh_tring_of(r);
	s->ifindex = hop.ifindex;
	if (!s->tring)
		return VMH_R_RING_FAILED;
	return vmh_tpath_make(s, &hop, &a->raddr, path);
}

/* The kernel can't be told what the round trip was, and measures none as long as it sends again what a ring had sent: with
 * that a ring would begin by a timeout of a second. */
static void note_round_trip(struct vmh_tcps *s, const struct vmh_tcp_blob *state)
{
	const struct vmh_tcp_state *st = state->p;

	if (state->len >= sizeof(*st) && st->srtt_us) {
		s->srtt_us = st->srtt_us;
		s->rttvar_us = st->rttvar_us;
	}
}

static void recall_round_trip(const struct vmh_tcps *s, const struct vmh_tcp_blob *state)
{
	struct vmh_tcp_state *st = state->p;

	if (state->len >= sizeof(*st) && !st->srtt_us) {
		st->srtt_us = s->srtt_us;
		st->rttvar_us = s->rttvar_us;
	}
}

static int import(struct vmh_tcps *s, const struct vmh_tcp_blob *state, const struct vmh_tcp_path *path)
{
	int rc;

	recall_round_trip(s, state);
	vmh_lock(&s->io);
	rc = vmh_tcp_import(vmh_tring_stack(s->tring), state->p, state->len, path, s, &s->conn);
	if (!rc)
		rc = vmh_tcp_thaw(s->conn);
	if (!rc)
		vmh_tcps_adopted(s);
	vmh_unlock(&s->io);
	return rc;
}

static void leave(struct vmh_tcps *s, unsigned state, unsigned reason, bool abort_);

static void publish(struct vmh_tcps *s, int fd)
{
	vmh_tcps_ask_nonblock(s, fd);
	VMH_SET(s->rcvtimeo_ns, timeout_of(fd, SO_RCVTIMEO));
	VMH_SET(s->sndtimeo_ns, timeout_of(fd, SO_SNDTIMEO));
	vmh_tcps_watch_from_now(s);
	vmh_tring_count(s->tring, 1);
	VMH_SET(s->stats->flow_id, s->flow_id);
	VMH_SET(s->stats->ring_id, vmh_tring_ring(s->tring)->id);
	VMH_SET(s->stats->offloaded, 1);
	VMH_SET(s->stats->rx_offloaded, 1);
	VMH_SET(s->stats->tx_offloaded, 1);
	vmh_tcps_set_reason(s, VMH_R_NONE);
	vmh_lock(&s->io);
	vmh_tcps_refresh(s);
	atomic_store(&s->state, VMH_TCPS_RING);
	vmh_unlock(&s->io);
	vmh_tpath_begun(s);
	atomic_store(&s->put_off, 0);
	vmh_tended_watch(s);
	vmh_epoll_member_parked(&s->obj, true);
	vmh_epoll_member_on_ring(&s->obj);
	if (vmh_tcps_bits(s))
		vmh_epoll_notify(&s->obj);
	vmh_tring_flush(s->tring);
	vmh_wake_all();
	vmh_debug("fd %d: the TCP connection is on the ring of %s", fd, vmh_tring_ring(s->tring)->ifname);
}

/* Object lock held. */
static void keep_blob(struct vmh_tcps *s, struct vmh_tcp_blob blob)
{
	vmh_tcp_blob_free(&s->blob);
	s->blob = blob;
}

/* The kernel keeps the connection: what came to the ring meanwhile is its, too. */
static void left_at_home(struct vmh_tcps *s, struct vmh_tcps_stash *st)
{
	if (s->flow_id)
		vmh_ring_poll(vmh_tring_ring(s->tring), LEFT_FRAMES);
	s->flow_id = 0;
	vmh_tring_stash_home(s->tring, st, s);
}

/* On its way to a ring, from ADOPTING on; the object lock is held. */
struct adoption {
	struct vmh_tcps *s;
	int fd;
	unsigned why, reason;           /* reason: 0, or why it stays; the connection is the kernel's then */
	struct vmh_tcp_addr a;
	struct vmh_tcp_path path;
	struct vmh_tcps_stash *st;
	struct vmh_session_take *take;  /* the service is asked for it */
};

/* Its frames are to come to the ring, where they wait. */
static unsigned ready_to_steer(struct adoption *m, struct vmh_msg_attach *req)
{
	const struct vmh_tcps *s = m->s;

	*req = (struct vmh_msg_attach){ .kind = VMH_FLOW_5T, .ifindex = s->ifindex, .fd = (unsigned)m->fd,
					.proto = IPPROTO_TCP, .family = s->v6 ? 6 : 4, .local_port = m->a.lport,
					.remote_port = m->a.rport, .lane = vmh_tring_ring(s->tring)->lane };
	memcpy(req->local_addr, m->a.laddr.b, sizeof(req->local_addr));
	memcpy(req->remote_addr, m->a.raddr.b, sizeof(req->remote_addr));
	m->st = vmh_tring_stash(s->tring, &m->a);
	return m->st ? 0 : VMH_R_RING_FAILED;
}

/* Of those without a reason, the ones whose frames come to the ring from here on. */
static void steer(struct adoption *m, int n)
{
	struct vmh_session_attach at[n];
	struct adoption *of[n];
	int asked = 0;

	for (int i = 0; i < n; i++) {
		if (!m[i].reason)
			m[i].reason = ready_to_steer(m + i, &at[asked].req);
		if (m[i].reason)
			continue;
		at[asked].fd = m[i].fd;
		of[asked++] = m + i;
	}
	if (asked)
		vmh_session_attach_all(at, asked);
	for (int i = 0; i < asked; i++) {
		of[i]->s->flow_id = at[i].flow_id;
		of[i]->reason = at[i].reason ? at[i].reason : vmh_verbs_attach_tcp(at[i].flow_id, &at[i].req);
	}
}

/* What the service has taken goes to the stack. 0, or why not. */
static unsigned to_ring(struct adoption *m)
{
	struct vmh_tcps *s = m->s;
	int err = import(s, &m->take->state, &m->path);

	if (!err)
		return 0;
	vmh_debug("fd %d: the stack does not take the connection: %s", m->fd, strerror(-err));
	err = vmh_session_tcp_home(m->fd, &m->take->state, s->flow_id, s->ifindex, VMH_R_TCP_STATE);
	vmh_verbs_detach(s->flow_id);
	if (err)
		vmh_warn("fd %d: a TCP connection was lost between kernel and ring", m->fd);
	return VMH_R_TCP_STATE;
}

/* The service did not answer, and may have parked the socket. It has been told, and gives it back to the kernel when it
 * goes on: until then every call on it would fail. */
static void await_kernel(int fd)
{
	const struct timespec nap = { 0, REPAIR_NAP_NS };
	int on = 0;
	socklen_t len = sizeof(on);

	for (uint64_t end = vmh_now_ns() + STRANDED_NS; vmh_now_ns() < end; vmh_sys(SYS_nanosleep, &nap, NULL))
		if (vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_REPAIR, &on, &len) < 0 || !on)
			return;
}

/* `ret 0`, as the service has it: nothing is to come in while it reads the state. */
static bool drops_all(int fd)
{
	struct sock_filter f[2] = { { 0 } };
	socklen_t n = 2; /* instructions */

	return !vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_GET_FILTER, f, &n) && n == 1 &&
	       f[0].code == (BPF_RET | BPF_K) && !f[0].k;
}

/* The service has ended, or does not answer, and has not said how far it has come. False: the connection is the kernel's. */
static bool was_left_frozen(int fd)
{
	int on = 0;
	socklen_t len = sizeof(on);

	if (!vmh_sys(SYS_getsockopt, fd, IPPROTO_TCP, TCP_REPAIR, &on, &len) && on)
		return true;
	if (drops_all(fd))
		vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_DETACH_FILTER, &on, sizeof(on));
	return false;
}

/* After steer() and the service. */
static void move(struct adoption *m)
{
	if (m->take && !m->take->err) {
		m->reason = to_ring(m);
		vmh_tcp_blob_free(&m->take->state);
	} else {
		if (m->take)
			m->reason = m->take->reason;
		if (m->s->flow_id)
			vmh_session_detach(m->s->flow_id, m->reason);
		if (m->take && m->take->err == -ETIMEDOUT) {
			await_kernel(m->fd);
			was_left_frozen(m->fd); /* the filter alone, most often */
			m->s->suspect = 1; /* it may go on, and end */
		}
	}
	if (!m->st)
		return;
	if (m->reason)
		left_at_home(m->s, m->st);
	else
		vmh_tring_unstash(m->s->tring, m->st, true);
}

/* Is nobody in a call on the kernel socket? One that sleeps there would never wake up again. The state is ADOPTING:
 * none begins. The internal thread has the time to wait for one that does not sleep. */
static bool left_alone(struct vmh_tcps *s, bool ordered)
{
	const int naps = ordered ? NAPS_ORDERED : NAPS;
	const struct timespec nap = { 0, NAP_NS };

	if (!vmh_plain_stop(s->obj.fd))
		return false;
	for (int i = 0; atomic_load(&s->in_kernel) || vmh_plain_is_in(s->obj.fd); i++) {
		if (!vmh_worker_is_me() || i == naps)
			return false;
		vmh_sys(SYS_nanosleep, &nap, NULL);
	}
	return true;
}

/* Object lock held. A program that waits for edges was told EAGAIN, or nothing, and no edge follows unless it is armed
 * anew. */
static void goes_on(struct vmh_tcps *s, unsigned state)
{
	atomic_store(&s->state, state);
	if (atomic_exchange(&s->put_off, 0)) {
		vmh_epoll_member_parked(&s->obj, false);
		vmh_wake_all();
	}
	vmh_plain_open(s);
}

static void stays(struct vmh_tcps *s, unsigned reason)
{
	vmh_tcps_set_reason(s, reason);
	VMH_SET(s->retry_ns, vmh_now_ns() + RETRY_NS);
	VMH_SET(s->rounds, 0);
	goes_on(s, passing(reason) || (s->troubled && no_way(reason)) ? VMH_TCPS_KERNEL : VMH_TCPS_HOME);
	vmh_debug("fd %d: the TCP connection stays on the kernel: %s", s->obj.fd, vmh_reason_text(reason));
}

static bool unread(int fd)
{
	int in = 0;

	return vmh_sys(SYS_ioctl, fd, SIOCINQ, &in) < 0 || in;
}

#define PATIENT 1 /* for a neighbour; the others of a lot stand still meanwhile */
#define QUIET 2   /* only while there is nothing to read */

/* The object lock is held from here on. false: it is not, and nothing is to be done. */
static bool adoption_begins(struct adoption *m, struct vmh_tcps *s, int fd, unsigned why, int how)
{
	bool patient = how & PATIENT;

	*m = (struct adoption){ .s = s, .fd = fd, .why = why };
	if (VMH_GET(s->kept) || vmh_now_ns() < VMH_GET(s->retry_ns) || !vmh_trylock(&s->obj.lock))
		return false;
	if (vmh_tcps_state(s) != VMH_TCPS_KERNEL || atomic_load(&s->obj.nfds) != 1 || atomic_load(&vmh_tcps_ending) ||
	    !vmh_tcps_note_names(s, fd, &m->a)) {
		vmh_unlock(&s->obj.lock);
		return false;
	}
	vmh_obj_name(&s->obj, 0);
	/* the kernel has it, so no rule of its port would do */
	m->reason = s->peculiar ? VMH_R_SOCKOPT : vmh_params.tcp_3t_rules ? VMH_R_TCP_RULES : vmh_tcps_kept(s, &m->a);
	if (!m->reason)
		m->reason = find_way(s, &m->a, &m->path, patient);
	if (m->reason)
		return true;
	vmh_tcps_ask_untold(s, fd, &m->a);
	s->opt.reuse = vmh_tcps_reuses(fd);
	vmh_tcps_note_only_v6(s, fd);
	atomic_store(&s->taken, 0);
	atomic_store(&s->state, VMH_TCPS_ADOPTING);
	m->reason = left_alone(s, patient && why == VMH_R_OPERATOR) && vmh_epoll_member_settle(&s->obj) ? 0 : VMH_R_NOT_TRIED;
	if (m->reason || !(how & QUIET) || !unread(fd))
		return true;
	goes_on(s, VMH_TCPS_KERNEL);
	VMH_SET(s->rounds, (uint32_t)vmh_params.hybrid_tcp_rounds << s->homes); /* with the next lot */
	vmh_unlock(&s->obj.lock);
	return false;
}

/* Object lock held. */
static void strand(struct vmh_tcps *s, struct vmh_tcp_blob blob, unsigned reason)
{
	keep_blob(s, blob);
	s->stranded_ns = vmh_now_ns();
	s->stranded_in = vmh_session_id();
	leave(s, VMH_TCPS_STRANDED, reason, false);
}

/* Object lock held. Nobody has its state: the next service lets it go on as it was. */
static bool waits_for_thaw(struct vmh_tcps *s, int fd)
{
	struct vmh_tcp_blob blank = { vmh_scratch_new(sizeof(struct vmh_tcp_state)), sizeof(struct vmh_tcp_state) };

	if (!blank.p || !was_left_frozen(fd)) {
		vmh_tcp_blob_free(&blank);
		return false;
	}
	memset(blank.p, 0, blank.len);
	s->reuse_told = 1;
	atomic_store(&s->put_off, 0);
	vmh_epoll_member_parked(&s->obj, true);
	strand(s, blank, VMH_R_SERVICE_GONE);
	return true;
}

static void adoption_ends(struct adoption *m)
{
	move(m);
	if (!m->reason) {
		m->s->addr = m->a;
		publish(m->s, m->fd);
	} else if (m->take && m->take->err == -ENOTCONN && waits_for_thaw(m->s, m->fd)) {
		vmh_warn("fd %d: the service ended while it moved the TCP connection, which waits for the next one", m->fd);
	} else {
		stays(m->s, m->reason);
	}
	vmh_unlock(&m->s->obj.lock);
}

/* Those that have begun; began: when the first one did. */
static void adopt(struct adoption *m, int n, uint64_t began)
{
	struct vmh_session_take take[n];
	int asked = 0;

	steer(m, n);
	for (int i = 0; i < n; i++) {
		if (m[i].reason)
			continue;
		atomic_store(&m[i].s->taken, 1);
		m[i].s->lent = 1;
		take[asked] = (struct vmh_session_take){ .fd = m[i].fd, .flow_id = m[i].s->flow_id, .why = m[i].why };
		m[i].take = take + asked++;
	}
	if (asked)
		vmh_session_tcp_take(take, asked);
	for (int i = 0; i < n; i++)
		adoption_ends(m + i);
	vmh_tcps_adoption_took(vmh_now_ns() - began, (unsigned)n);
}

void vmh_tcps_adopt(struct vmh_tcps *s, int fd, unsigned why)
{
	uint64_t began = vmh_now_ns();
	struct adoption m;

	if (adoption_begins(&m, s, fd, why, PATIENT))
		adopt(&m, 1, began);
	vmh_tcps_adoption_over();
}

/* ---- by the internal thread: the program's call does not wait for the service ---- */

static struct vmh_tcps *_Atomic chosen; /* held */

/* A program that blocks would wait in its next call instead, and be found there. */
bool vmh_tcps_adopt_later(struct vmh_tcps *s, int fd)
{
	struct vmh_tcps *none = NULL;
	long flags;

	if (VMH_GET(s->policy) == VMH_TCPS_OFFLOAD || !atomic_load(&vmh_worker_runs))
		return false;
	flags = vmh_sys(SYS_fcntl, fd, F_GETFL);
	if (flags < 0 || !(flags & O_NONBLOCK))
		return false;
	VMH_SET(s->rounds, 0); /* asked once */
	if (vmh_trylock(&s->obj.lock)) { /* by this thread, which uses it */
		vmh_lane_of(&s->lane, VMH_LANE_RX, fd, 0);
		vmh_unlock(&s->obj.lock);
	}
	vmh_obj_hold(&s->obj);
	if (atomic_compare_exchange_strong(&chosen, &none, s)) {
		vmh_obj_hand_over();
		vmh_worker_wake();
	} else {
		vmh_obj_put(&s->obj);
	}
	return true;
}

void vmh_tcps_adopt_chosen(void)
{
	struct vmh_tcps *s = atomic_exchange(&chosen, NULL);

	if (!s)
		return;
	vmh_obj_take_over();
	if (!atomic_load(&s->obj.closed))
		vmh_tcps_adopt(s, s->obj.fd, VMH_R_TCP_BUSY);
	vmh_obj_put(&s->obj);
}

void vmh_tcps_move_fork_child(void)
{
	atomic_store(&chosen, NULL);
	atomic_store(&vmh_tcps_lots, 0);
}

VMH_EACH_CALL _Atomic int vmh_tcps_lots;

int vmh_tcps_adopt_together(struct vmh_tcps *const *v, int n, unsigned why, bool quiet)
{
	struct adoption m[VMH_TAKES_MAX];
	uint64_t began = vmh_now_ns();
	int moving = 0, moved = 0;

	atomic_fetch_add(&vmh_tcps_lots, 1);
	for (int i = 0; i < n; i++)
		moving += adoption_begins(m + moving, v[i], v[i]->obj.fd, why, quiet ? QUIET : 0);
	if (moving)
		adopt(m, moving, began);
	atomic_fetch_sub(&vmh_tcps_lots, 1);
	for (int i = 0; i < moving; i++)
		moved += !m[i].reason;
	return moved;
}

/* ---- home ---- */

int vmh_tcps_export(struct vmh_tcp_conn *c, struct vmh_tcp_blob *state)
{
	ssize_t n = vmh_tcp_export(c, NULL, 0);
	void *p;

	if (n < 0)
		return (int)n;
	p = vmh_scratch_new((size_t)n);
	if (!p)
		return -ENOMEM;
	if (vmh_tcp_export(c, p, (size_t)n) != n) {
		vmh_scratch_free(p, (size_t)n);
		return -EAGAIN;
	}
	*state = (struct vmh_tcp_blob){ p, (size_t)n };
	return 0;
}

static _Atomic int no_way_home; /* some are stranded, most often since the kernel has no route, not even over lo */
static _Atomic int no_way_open; /* some seek a route for their SYN */

/* Object lock held: the stack has it no more. */
static void leave(struct vmh_tcps *s, unsigned state, unsigned reason, bool abort_)
{
	bool had = s->conn != NULL, home = state == VMH_TCPS_HOME;

	if (home) {
		s->troubled = vmh_tcps_trouble(reason);
		if (s->resting || s->troubled)
			state = VMH_TCPS_KERNEL;
	}
	vmh_lock(&s->io);
	if (had && abort_)
		vmh_tcp_abort(s->conn);
	else if (had)
		vmh_tcp_forget(s->conn);
	s->conn = NULL;
	vmh_tcps_note_amounts(s, &(const struct vmh_tcp_amounts){ 0 });
	atomic_store(&s->bits, state == VMH_TCPS_LOST ? EPOLLERR | EPOLLHUP | VMH_IN | VMH_OUT : 0);
	atomic_store(&s->state, state);
	vmh_unlock(&s->io);
	if (had) {
		vmh_tring_flush(s->tring);
		vmh_tring_count(s->tring, -1);
	}
	VMH_SET(s->stats->offloaded, 0);
	VMH_SET(s->stats->rx_offloaded, 0);
	VMH_SET(s->stats->tx_offloaded, 0);
	if (home && s->reuse_told) { /* the service knows what it was when it came */
		vmh_sys(SYS_setsockopt, s->obj.fd, SOL_SOCKET, SO_REUSEADDR, &(int){ s->opt.reuse }, sizeof(int));
		s->reuse_told = 0;
	}
	if (home && atomic_load(&s->fresh))
		vmh_tport_retire(s->flow_id);
	if (state == VMH_TCPS_LOST)
		vmh_tshow_end(s);
	else if (home)
		vmh_tshow_home(s);
	if (state == VMH_TCPS_KERNEL)
		atomic_store(&s->fresh, 0); /* as any that the kernel has opened */
	if (state != VMH_TCPS_STRANDED)
		VMH_SET(s->stats->flow_id, s->flow_id = 0);
	vmh_tcps_set_reason(s, reason);
	if (home)
		vmh_epoll_member_parked(&s->obj, false);
	else if (state == VMH_TCPS_LOST)
		vmh_epoll_notify(&s->obj);
	if (state == VMH_TCPS_KERNEL)
		vmh_tcps_rested(s); /* plain calls begin: the kernel's sets are right */
	vmh_wake_all();
}

/* Object lock held. The end of a connection that could not go home. */
static void lost(struct vmh_tcps *s, unsigned reason, int err)
{
	uint32_t flow = atomic_load(&s->fresh) ? 0 : s->flow_id;

	if (err != -ENOTSUP || VMH_GET(s->phase)) /* else it has been closed by both sides, or reset */
		vmh_warn("fd %d: a TCP connection could not go home to the kernel (%s): reset", s->obj.fd, strerror(-err));
	leave(s, VMH_TCPS_LOST, reason, true);
	if (flow) /* by that other reason the service would go back to the state in which it has taken the connection */
		vmh_session_detach(flow, reason && reason != VMH_R_NO_ANSWER ? reason : VMH_R_TCP_STATE);
}

/* It has sent its SYN and heard nothing yet, nor does it from here on, being put aside: the kernel takes over by a SYN of
 * its own. */
static bool restart(struct vmh_tcps *s, unsigned reason, bool must)
{
	struct vmh_tcp_info info;

	vmh_lock(&s->io);
	vmh_tcp_get_info(s->conn, &info);
	vmh_unlock(&s->io);
	if (info.state != VMH_TCP_SYN_SENT)
		return false;
	vmh_tcps_restart(s, must);
	vmh_tcps_set_reason(s, reason);
	if (vmh_tcps_seeks(s)) {
		s->stranded_ns = vmh_now_ns();
		atomic_store(&no_way_open, 1);
	}
	return true;
}

/* By which the service knows the kernel socket; one that is shown by its inode, and the next service by its names. Of one
 * that may be shown, since there was no answer, by its port as well. */
static uint32_t flow_of(const struct vmh_tcps *s)
{
	return s->shown_flow ? 0 : s->flow_id;
}

/* The rule of a QP is ours to take away, and what has come until then was lost: the peer is asked what it has. */
static void off_the_qp(struct vmh_tcps *s)
{
	if (vmh_tring_ring(s->tring)->kind != VMH_RING_VERBS)
		return;
	if (atomic_load(&s->fresh))
		vmh_tport_went_home(s->tring, s->flow_id, &s->addr);
	else if (!s->shown)
		vmh_verbs_detach(s->flow_id);
	if (s->conn)
		vmh_tcp_nudge(s->conn);
}

/* Home: what came for it meanwhile is in the ring still, or put aside. */
static void at_home(struct vmh_tcps *s, unsigned reason, struct vmh_tcps_stash *st)
{
	off_the_qp(s);
	if (st)
		vmh_ring_poll(vmh_tring_ring(s->tring), LEFT_FRAMES);
	leave(s, VMH_TCPS_HOME, reason, false);
	if (st)
		vmh_tring_stash_home(s->tring, st, s);
}

/* On its way from a ring; the object lock is held. */
struct homing {
	struct vmh_tcps *s;
	bool must, may_stay;       /* on the ring, whatever keeps it there */
	struct vmh_tcps_stash *st;
	struct vmh_session_home home; /* .err: of it all */
};

/* What the peer has not acknowledged is the kernel's as if it had sent it, so that it goes again after a timeout of
 * seconds, in pieces, if it is much. So for a moment nothing new goes, if that helps: acknowledgements come, and what is
 * lost is sent again. The rest the kernel sends by itself. Nor does the window move on for a peer that sends much: what it
 * has under way while the connection moves comes to the kernel in another order, and is sent again. */
#define FLIGHT_LIGHT (10 * 1460) /* the kernel's first congestion window */
#define FLIGHT_RTT_US 5000
#define FLIGHT_NS 20000000u      /* of one, or of those that go together */
#define FLIGHTS_NS 100000000u    /* of all, lot after lot */
#define FLIGHT_STILL_NS 6000000u /* none has come for so long */
#define FLIGHT_NAP_NS 50000
#define COMES_MS 5               /* the last of it came so lately */
#define COMES_LEAST_NS 2000000u  /* no more is under way when nothing came for so long, and two round trips */

struct flight {
	struct vmh_tcps *s;
	bool comes;         /* it has much on its way to us */
	uint64_t in, in_ns; /* bytes that have come, and when the last ones did */
};

/* False: there is nothing to be done for it. */
static bool flight_info(struct vmh_tcps *s, struct vmh_tcp_info *i)
{
	return vmh_tcps_state(s) == VMH_TCPS_RING && vmh_tcps_info(s, i) && i->state != VMH_TCP_SYN_SENT &&
	       i->rtt_us <= FLIGHT_RTT_US;
}

static void settle(struct vmh_tcps *s, bool on)
{
	vmh_lock(&s->io);
	if (s->conn && vmh_tcps_state(s) == VMH_TCPS_RING)
		vmh_tcp_settle(s->conn, on);
	vmh_unlock(&s->io);
}

/* Has the peer sent much at a time until now? */
static void take_note(struct flight *f, struct vmh_tcps *s, uint64_t now)
{
	struct vmh_tcp_info i;

	*f = (struct flight){ .s = s, .in_ns = now };
	if (!flight_info(s, &i))
		return;
	f->in = i.bytes_received;
	f->comes = i.ms_since_received < COMES_MS && i.bytes_received / (VMH_GET(s->watch.turns) + 1) > FLIGHT_LIGHT;
}

/* Bytes under way, at most. */
static uint64_t under_way(struct flight *f, uint64_t now)
{
	struct vmh_tcp_info i;
	uint64_t still = COMES_LEAST_NS, bytes = 0;

	if (!flight_info(f->s, &i))
		return 0;
	if (i.snd_wnd && i.unacked > FLIGHT_LIGHT)
		bytes = i.unacked;
	if (i.bytes_received != f->in)
		f->in_ns = now;
	f->in = i.bytes_received;
	if (2000ull * i.rtt_us > still)
		still = 2000ull * i.rtt_us;
	f->comes &= i.rcv_wnd >= i.rcv_mss && now - f->in_ns < still;
	return bytes + (f->comes ? i.rcv_wnd : 0);
}

/* How long it took. */
static uint64_t land(struct vmh_tcps *const *v, int n, unsigned reason, uint64_t most)
{
	const struct timespec nap = { 0, FLIGHT_NAP_NS };
	uint64_t began = vmh_now_ns(), now = began, moved = began, before = UINT64_MAX;
	struct flight f[VMH_HOMES_MAX];

	if (vmh_tcps_trouble(reason) || !most)
		return 0;
	for (int i = 0; i < n; i++) {
		take_note(f + i, v[i], now);
		if (under_way(f + i, now))
			settle(v[i], true);
	}
	for (;;) {
		uint64_t flight = 0;

		for (int i = 0; i < n; i++)
			flight += under_way(f + i, now);
		if (flight < before)
			moved = now;
		before = flight;
		if (!flight || now - began > most || now - moved > FLIGHT_STILL_NS)
			return now - began;
		if (!vmh_rings_poll(64))
			vmh_sys(SYS_nanosleep, &nap, NULL);
		now = vmh_now_ns();
	}
}

/* The stack has let go of it, and homing_ends() follows, if there is no .err when the service was asked. false: that was
 * all, with .err. */
static bool homing_begins(struct homing *h)
{
	struct vmh_tcps *s = h->s;
	struct vmh_session_home *home = &h->home;

	h->st = vmh_tring_stash(s->tring, &s->addr);
	if (s->opening && restart(s, home->reason, h->must)) {
		if (h->st)
			vmh_tring_unstash(s->tring, h->st, false);
		return false;
	}
	vmh_lock(&s->io);
	vmh_tcp_freeze(s->conn);
	home->err = vmh_tcps_export(s->conn, &home->state);
	if (!home->err)
		note_round_trip(s, &home->state);
	if (home->err == -ENOTSUP) { /* it has ended: the stack answers until close */
		vmh_tcp_thaw(s->conn);
		vmh_unlock(&s->io);
		if (h->st)
			vmh_tring_unstash(s->tring, h->st, true);
		if (!h->must || atomic_load(&s->fresh))
			return false;
		lost(s, home->reason, home->err);
		home->err = 0;
		return false;
	}
	atomic_store(&s->state, VMH_TCPS_HOMING);
	vmh_unlock(&s->io);
	s->lent = 1;
	vmh_tended_leave(s);
	VMH_COUNT(vmh_stats->calls_home, 1);
	if (atomic_load(&s->fresh)) {
		vmh_tcps_dress(s, s->obj.fd);
		if (vmh_tring_ring(s->tring)->kind == VMH_RING_VERBS)
			vmh_tport_retire(s->flow_id); /* before its rule is narrowed */
	}
	home->fd = s->obj.fd;
	home->flow_id = flow_of(s);
	home->ifindex = s->ifindex;
	return true;
}

static void stays_on_ring(struct vmh_tcps *s)
{
	vmh_lock(&s->io);
	vmh_tcp_thaw(s->conn);
	atomic_store(&s->state, VMH_TCPS_RING);
	vmh_unlock(&s->io);
	vmh_tended_watch(s);
	vmh_tring_flush(s->tring);
}

/* As the kernel says: a parked socket is in repair mode, one of a connection that began on a ring was never connected. */
static bool is_home_already(const struct vmh_tcps *s)
{
	struct tcp_info info = { 0 };
	socklen_t n = sizeof(info), m = sizeof(int);
	int repair = 1;

	return vmh_tcps_owns_fd(s) &&
	       !vmh_sys(SYS_getsockopt, s->obj.fd, IPPROTO_TCP, TCP_REPAIR, &repair, &m) && !repair &&
	       !vmh_sys(SYS_getsockopt, s->obj.fd, IPPROTO_TCP, TCP_INFO, &info, &n) && info.tcpi_state != TCP_CLOSE &&
	       info.tcpi_state != TCP_LISTEN;
}

/* That the peer has ended its stream, which it does not say again: the service tells the kernel as soon as that takes it,
 * and the next service has to hear of it. Without the data. */
static struct vmh_tcp_blob end_of(const struct vmh_tcp_blob *state)
{
	const struct vmh_tcp_state *st = state->p;
	struct vmh_tcp_state *end;

	if (state->len < sizeof(*st) || !(st->flags & VMH_TCP_F_PEER_FIN))
		return (struct vmh_tcp_blob){ 0 };
	end = vmh_scratch_new(sizeof(*end));
	if (!end)
		return (struct vmh_tcp_blob){ 0 };
	*end = *st;
	end->snd_nxt = end->snd_una;
	end->send_len = end->recv_len = 0;
	return (struct vmh_tcp_blob){ end, sizeof(*end) };
}

/* After the service's answer. */
static void homing_ends(struct homing *h)
{
	struct vmh_tcps *s = h->s;
	struct vmh_session_home *home = &h->home;
	bool back = false;

	if (home->err && is_home_already(s))
		home->err = 0; /* the service could not say so any more, or not in time */
	/* the rule is gone with the service; with one that only hangs it is not */
	h->must |= home->err == -ENOTCONN && !h->may_stay && atomic_load(&s->fresh) && !s->shown && !vmh_session_muted();
	if (!home->err) {
		keep_blob(s, end_of(&home->state));
		at_home(s, home->reason, h->st);
		h->st = NULL;
	} else if (!h->must && !h->may_stay && home->state.p &&
		   (home->err == -ENOTCONN || vmh_tcps_trouble(home->reason))) {
		if (home->err != -ENOTCONN) /* it can't stay, as its ring is about to be closed */
			atomic_store(&no_way_home, 1);
		strand(s, home->state, home->reason);
		home->state.p = NULL;
		home->err = 0;
	} else if (h->must) {
		lost(s, home->reason, home->err);
	} else {
		stays_on_ring(s);
		back = true;
	}
	if (h->st)
		vmh_tring_unstash(s->tring, h->st, back);
	vmh_tcp_blob_free(&home->state);
}

static void ask_home(struct vmh_session_home *home)
{
	if (!home->err)
		home->err = vmh_session_tcp_home(home->fd, &home->state, home->flow_id, home->ifindex, home->reason);
}

static int home_from_ring(struct homing h)
{
	land(&h.s, 1, h.home.reason, FLIGHT_NS);
	if (homing_begins(&h)) {
		ask_home(&h.home);
		homing_ends(&h);
	}
	return h.home.err;
}

/* That the kernel would repeat the SYN. */
static uint64_t seek_ns(const struct vmh_tcps *s)
{
	uint64_t wait = SYN_MS, all = 0;

	for (unsigned i = 0; i <= s->opt.syn_retries; i++) {
		all += wait;
		wait = wait < SYN_MOST_MS / 2 ? 2 * wait : SYN_MOST_MS;
	}
	if (s->opt.user_timeout_ms && s->opt.user_timeout_ms < all)
		all = s->opt.user_timeout_ms;
	return all * 1000000;
}

static void open_by_kernel(struct vmh_tcps *s, unsigned reason, bool must)
{
	if (!must && vmh_now_ns() - s->stranded_ns > seek_ns(s))
		leave(s, VMH_TCPS_LOST, reason, false);
	else
		vmh_tcps_restart(s, must);
	if (vmh_tcps_seeks(s))
		atomic_store(&no_way_open, 1);
}

static int home_stranded(struct vmh_tcps *s, unsigned reason, bool must)
{
	int err;

	if (!s->stranded_in || s->stranded_in != vmh_session_id())
		s->flow_id = 0; /* of an earlier session: another flow of ours may have the number by now */
	err = vmh_session_tcp_home(s->obj.fd, &s->blob, flow_of(s), s->ifindex, reason);
	if (err && is_home_already(s)) /* by what was asked before, of a service that hung */
		err = 0;
	if (!must && err == -ENETUNREACH) {
		s->stranded_ns = vmh_now_ns();
		atomic_store(&no_way_home, 1);
		return 0;
	}
	if (err && !must && err == -ENOTCONN && vmh_now_ns() - s->stranded_ns < STRANDED_NS)
		return 0;
	keep_blob(s, err ? (struct vmh_tcp_blob){ 0 } : end_of(&s->blob));
	if (err) {
		lost(s, reason, err);
	} else {
		off_the_qp(s);
		leave(s, VMH_TCPS_HOME, reason, false);
	}
	return err;
}

bool vmh_tcps_owns_fd(const struct vmh_tcps *s)
{
	return !vmh_fd_is_another(s->obj.fd, &s->obj);
}

/* By a call that nobody saw: it is closed as any other, and its number names something else to the service. */
static bool closed_unseen(struct vmh_tcps *s, unsigned reason)
{
	if (reason == VMH_R_CLOSED || !vmh_tcps_parked(s) || vmh_tcps_owns_fd(s))
		return false;
	vmh_debug("fd %d: closed without our seeing it", s->obj.fd);
	if (s->linger_s)
		s->linger = 0; /* nobody waits for it */
	return vmh_fd_forget(&s->obj, s->obj.fd) && atomic_load(&s->obj.closed);
}

int vmh_tcps_home(struct vmh_tcps *s, unsigned reason, bool must)
{
	int err = 0;

	if (vmh_tcps_state(s) == VMH_TCPS_HOME ||
	    (vmh_unlikely(vmh_memory_borrowed()) ? vmh_tcps_home_by_worker(s, reason) : closed_unseen(s, reason)))
		return 0;
	vmh_lock(&s->obj.lock);
	switch (vmh_tcps_state(s)) {
	case VMH_TCPS_KERNEL:
		atomic_store(&s->state, VMH_TCPS_HOME);
		if (vmh_plain_nowait(s->obj.fd)) /* other processes, too, may say from now on whether its calls wait */
			VMH_SET(vmh_plain_fds[s->obj.fd], VMH_PLAIN);
		vmh_tcps_set_reason(s, reason);
		break;
	case VMH_TCPS_RING:
		err = home_from_ring((struct homing){ .s = s, .must = must, .home.reason = reason });
		vmh_debug("fd %d: the TCP connection goes home to the kernel: %s", s->obj.fd, vmh_reason_text(reason));
		break;
	case VMH_TCPS_STRANDED:
		if (vmh_tcps_seeks(s))
			open_by_kernel(s, reason, must);
		else
			err = home_stranded(s, reason, must);
		break;
	case VMH_TCPS_LISTEN:
		vmh_tlisten_home(s, reason);
		break;
	}
	vmh_unlock(&s->obj.lock);
	return err;
}

/* Those that go home from rings in the time of one. What does not, for a call of another thread, stays for
 * vmh_tcps_home(). In memory of its own: who calls may be a handler with a small stack. */
struct homers {
	unsigned reason;
	bool must, may_stay;
	int n;
	uint64_t landed_ns;
	struct vmh_tcps *v[VMH_HOMES_MAX]; /* held */
	struct homing h[VMH_HOMES_MAX];
	struct homing *alone[VMH_HOMES_MAX], *of[VMH_HOMES_MAX]; /* of[i]: whom ask[i] is for */
	struct vmh_session_home ask[VMH_HOMES_MAX];
};

/* The object lock is held from here on; false: it is not. */
static bool joins(struct homing *h, struct vmh_tcps *s, const struct homers *l)
{
	if (!vmh_trylock(&s->obj.lock))
		return false;
	*h = (struct homing){ .s = s, .must = l->must, .may_stay = l->may_stay, .home.reason = l->reason };
	if (vmh_tcps_state(s) == VMH_TCPS_RING && homing_begins(h))
		return true;
	vmh_unlock(&s->obj.lock);
	return false;
}

static void arrives(struct homing *h)
{
	homing_ends(h);
	vmh_debug("fd %d: the TCP connection goes home to the kernel: %s", h->s->obj.fd, vmh_reason_text(h->home.reason));
	vmh_unlock(&h->s->obj.lock);
}

/* Those that have much would hold the others up, and come last. */
static void go_home_together(struct homers *l, int n)
{
	int asked = 0, left = 0;

	for (int i = 0; i < n; i++) {
		struct homing *h = l->h + i;

		if (h->home.err || h->home.state.len > VMH_TCPS_LIGHT_BYTES) {
			l->alone[left++] = h;
		} else {
			l->ask[asked] = h->home;
			l->of[asked++] = h;
		}
	}
	if (asked)
		vmh_session_tcp_home_all(l->ask, asked);
	for (int i = 0; i < asked; i++) {
		l->of[i]->home.err = l->ask[i].err;
		arrives(l->of[i]);
	}
	for (int i = 0; i < left; i++) {
		ask_home(&l->alone[i]->home);
		arrives(l->alone[i]);
	}
}

static void home_together(struct homers *l)
{
	uint64_t left;
	int n = 0;

	for (int i = 0; i < l->n; i++) /* no lock is held yet */
		closed_unseen(l->v[i], l->reason);
	left = l->landed_ns < FLIGHTS_NS ? FLIGHTS_NS - l->landed_ns : 0;
	l->landed_ns += land(l->v, l->n, l->reason, left < FLIGHT_NS ? left : FLIGHT_NS);
	for (int i = 0; i < l->n; i++)
		n += joins(l->h + n, l->v[i], l);
	go_home_together(l, n);
	for (int i = 0; i < l->n; i++) {
		settle(l->v[i], false); /* one that stays */
		vmh_obj_put(&l->v[i]->obj);
	}
	l->n = 0;
}

/* NULL: each has to go by itself. */
static struct homers *homers_new(unsigned reason, bool must)
{
	struct homers *l = vmh_scratch_new(sizeof(*l));

	if (l) { /* zeros */
		l->reason = reason;
		l->must = must;
	}
	return l;
}

static void homers_add(struct homers *l, struct vmh_tcps *s)
{
	if (!l || vmh_tcps_state(s) != VMH_TCPS_RING)
		return;
	vmh_obj_hold(&s->obj);
	l->v[l->n++] = s;
	if (l->n == VMH_HOMES_MAX)
		home_together(l);
}

static void homers_free(struct homers *l)
{
	if (!l)
		return;
	home_together(l);
	vmh_scratch_free(l, sizeof(*l));
}

bool vmh_tcps_rest(struct vmh_tcps *s, unsigned reason)
{
	bool done = false;

	if (closed_unseen(s, reason))
		return true;
	if (vmh_session_muted()) /* nobody would take it, and it can wait */
		return false;
	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_RING && !atomic_load(&s->obj.closed)) {
		s->resting = 1;
		done = !home_from_ring((struct homing){ .s = s, .must = false, .home.reason = reason });
		s->resting = 0;
		vmh_debug("fd %d: the TCP connection goes home to the kernel for now: %s", s->obj.fd, vmh_reason_text(reason));
	}
	vmh_unlock(&s->obj.lock);
	return done;
}

void vmh_tcps_let_name_go(struct vmh_tcps *s)
{
	uint32_t flow = 0;

	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_RING && !atomic_load(&s->fresh) && !atomic_load(&s->obj.closed)) {
		flow = s->flow_id;
		VMH_SET(s->stats->flow_id, s->flow_id = 0);
	}
	vmh_unlock(&s->obj.lock);
	if (flow)
		vmh_session_detach(flow, 0);
}

void vmh_tcps_home_fd(int fd, unsigned reason)
{
	int saved = errno;
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s)
		vmh_tcps_home(s, reason, false);
	errno = saved;
}

int vmh_tcps_kernel_takes(struct vmh_tcps *s, unsigned reason)
{
	int err = vmh_tcps_on_rings(s) ? vmh_exception(s->obj.fd, reason) : 0;

	if (!err)
		vmh_tcps_home(s, reason, false);
	return err;
}

int vmh_tcps_kernel_takes_fd(int fd, unsigned reason)
{
	int saved = errno, err;
	TCPS_HELD s = vmh_tcps_get(fd);

	if (s && vmh_memory_borrowed()) /* the standard input of a child, most often */
		vmh_tcps_note_handed(s);
	err = s ? vmh_tcps_kernel_takes(s, reason) : 0;
	errno = saved;
	return err;
}

static void home_listener(struct vmh_tcps *s, void *arg)
{
	const unsigned *reason = arg;

	if (vmh_tcps_state(s) != VMH_TCPS_LISTEN)
		return;
	if (*reason != VMH_R_FORK)
		vmh_tlisten_rings_go(s); /* all do, or the program ends */
	vmh_tcps_home(s, *reason, false);
}

static void add_homer(struct vmh_tcps *s, void *arg)
{
	homers_add(arg, s);
}

/* Nobody goes on with it here. After a fork the parent does, and most children never touch it. */
static bool is_the_last(unsigned reason)
{
	return reason == VMH_R_EXEC || reason == VMH_R_CLOSED;
}

/* A connect() or adoption in another thread may have asked for its ring before the session ended. */
static bool has_begun(struct vmh_tcps *s)
{
	unsigned state;

	vmh_lock(&s->obj.lock);
	vmh_unlock(&s->obj.lock);
	state = vmh_tcps_state(s);
	return state >= VMH_TCPS_ADOPTING && state != VMH_TCPS_LISTEN;
}

static void home_one(struct vmh_tcps *s, void *arg)
{
	const unsigned *reason = arg;

	if (vmh_tcps_state(s) == VMH_TCPS_LISTEN)
		return;
	/* what has not been adopted yet may be, later */
	if (vmh_tcps_state(s) >= VMH_TCPS_ADOPTING || *reason == VMH_R_FORK || *reason == VMH_R_EXEC || has_begun(s))
		vmh_tcps_home(s, *reason, is_the_last(*reason));
}

void vmh_tcps_home_all(unsigned reason)
{
	struct homers *l = homers_new(reason, is_the_last(reason));

	if (reason == VMH_R_FORK)
		vmh_tcps_note_fork();
	vmh_tcps_each(add_homer, l);
	homers_free(l);
	vmh_tcps_each(home_one, &reason);
	vmh_tcps_each(home_listener, &reason);
	vmh_tcps_each(home_one, &reason); /* what other threads have accepted meanwhile */
}

struct leaving {
	struct homers *l;
	uint64_t until;
};

static void add_fresh(struct vmh_tcps *s, void *arg)
{
	const struct leaving *g = arg;

	if (vmh_tcps_is_fresh(s) && vmh_now_ns() < g->until)
		homers_add(g->l, s);
}

/* With the time that it takes, where another thread was in a call, or is about to come to a ring. */
static void leave_one(struct vmh_tcps *s, void *arg)
{
	const struct leaving *g = arg;

	vmh_lock(&s->obj.lock);
	if (vmh_tcps_is_fresh(s) && vmh_tcps_state(s) == VMH_TCPS_RING && vmh_now_ns() < g->until)
		home_from_ring((struct homing){ .s = s, .may_stay = true, .home.reason = VMH_R_CLOSED });
	vmh_unlock(&s->obj.lock);
}

void vmh_tcps_leave_to_kernel(void)
{
	struct leaving g = { .l = vmh_trings_any() ? homers_new(VMH_R_CLOSED, false) : NULL,
			     .until = vmh_now_ns() + LEAVE_NS };
	unsigned reason = VMH_R_CLOSED;

	if (g.l) {
		g.l->may_stay = true;
		vmh_tcps_each(add_fresh, &g);
		homers_free(g.l);
	}
	vmh_tcps_each(home_listener, &reason); /* no more are accepted from rings */
	vmh_tcps_each(leave_one, &g);
}

struct heirs {
	bool (*named)(int fd);
	struct homers *l; /* first of all, those that go together */
};

static void home_inherited(struct vmh_tcps *s, void *arg)
{
	const struct heirs *h = arg;
	long flags = vmh_sys(SYS_fcntl, s->obj.fd, F_GETFD, 0);

	if (flags < 0 || (flags & FD_CLOEXEC && !(h->named && h->named(s->obj.fd))) || !vmh_tcps_owns_fd(s))
		return;
	if (h->l)
		homers_add(h->l, s);
	else
		vmh_tcps_home(s, VMH_R_EXEC, false);
}

void vmh_tcps_home_inherited(bool (*named)(int fd))
{
	struct heirs h = { .named = named, .l = vmh_memory_borrowed() ? NULL : homers_new(VMH_R_EXEC, false) };

	if (h.l)
		vmh_tcps_each(home_inherited, &h);
	homers_free(h.l);
	h.l = NULL;
	vmh_tcps_each(home_inherited, &h);
}

struct gone {
	struct vmh_ring *ring;
	uint32_t flow_id;
	unsigned reason;
	struct homers *l;
};

static bool is_its(const struct vmh_tcps *s, const struct gone *g)
{
	return (g->ring && s->tring && vmh_tring_ring(s->tring) == g->ring) ||
	       (g->flow_id && (s->flow_id == g->flow_id || s->shown_flow == g->flow_id));
}

static void add_of_ring(struct vmh_tcps *s, void *arg)
{
	const struct gone *g = arg;

	if (vmh_tcps_parked(s) && is_its(s, g))
		homers_add(g->l, s);
}

static void gone_one(struct vmh_tcps *s, void *arg)
{
	const struct gone *g = arg;

	/* on its way to a ring by another thread, which may not have noted the flow yet */
	if (vmh_tcps_state(s) == VMH_TCPS_ADOPTING && (!s->flow_id || is_its(s, g)))
		vmh_tcps_await_move(s);
	if ((g->ring || g->flow_id) && vmh_tlisten_is(s, g->ring, g->flow_id)) {
		vmh_tlisten_rings_go(s);
		vmh_tcps_home(s, g->reason, false);
	}
	if (vmh_tcps_parked(s) && is_its(s, g))
		vmh_tcps_home(s, g->reason, false);
}

void vmh_tcps_flow_home(uint32_t flow_id, unsigned reason)
{
	struct gone g = { .flow_id = flow_id, .reason = reason };

	vmh_tport_gone(NULL, flow_id);
	vmh_tcps_each(gone_one, &g);
	vmh_verbs_detach(flow_id);
}

void vmh_tcps_ring_gone(struct vmh_ring *r, unsigned reason)
{
	struct gone g = { .ring = r, .reason = reason, .l = homers_new(reason, false) };

	vmh_tcps_each(add_of_ring, &g);
	homers_free(g.l);
	vmh_tcps_each(gone_one, &g);
}

static void tell_end(struct vmh_tcps *s)
{
	vmh_lock(&s->obj.lock);
	if (s->blob.p && vmh_tcps_at_kernel(s) && !atomic_load(&s->obj.closed) && vmh_tcps_owns_fd(s))
		vmh_session_tcp_home(s->obj.fd, &s->blob, 0, s->ifindex, VMH_R_SERVICE_GONE);
	vmh_unlock(&s->obj.lock);
}

/* One that was about to park it hung, and has ended since. */
static void thaw_suspect(struct vmh_tcps *s)
{
	vmh_lock(&s->obj.lock);
	s->suspect = 0;
	if (vmh_tcps_at_kernel(s) && !atomic_load(&s->obj.closed) && vmh_tcps_owns_fd(s) && waits_for_thaw(s, s->obj.fd))
		vmh_plain_stop(s->obj.fd);
	vmh_unlock(&s->obj.lock);
}

static void back_one(struct vmh_tcps *s, void *arg)
{
	(void)arg;
	tell_end(s);
	if (vmh_unlikely(s->suspect))
		thaw_suspect(s);
	if (vmh_tcps_state(s) == VMH_TCPS_STRANDED)
		vmh_tcps_home(s, VMH_R_SERVICE_GONE, false);
	else if (s->listening) /* it was on rings before */
		vmh_tcps_waited_for(&s->obj, s->obj.fd);
}

void vmh_tcps_service_back(void)
{
	vmh_tcps_each(back_one, NULL);
}

static void try_one(struct vmh_tcps *s, void *arg)
{
	(void)arg;
	if (vmh_tcps_state(s) == VMH_TCPS_STRANDED)
		vmh_tcps_home(s, VMH_R_IF_DOWN, false);
}

static void try_open_one(struct vmh_tcps *s, void *arg)
{
	if (vmh_tcps_seeks(s))
		try_one(s, arg);
}

bool vmh_tcps_without_way(void)
{
	return atomic_load(&no_way_home) || atomic_load(&no_way_open);
}

/* When the network has changed, and at times. */
struct attempts {
	uint64_t next, generation;
};

static bool may_try(struct attempts *a, _Atomic int *wanted)
{
	uint64_t now, generation;

	if (!atomic_load(wanted))
		return false;
	now = vmh_now_ns();
	generation = vmh_net_generation();
	if (generation == a->generation && now < a->next)
		return false;
	*a = (struct attempts){ now + TRY_HOME_NS, generation };
	atomic_store(wanted, 0);
	return true;
}

/* When the network has changed at once: the peer may send, and the kernel knows of no such connection. */
void vmh_tcps_try_home(void)
{
	static struct attempts attempts;

	if (may_try(&attempts, &no_way_home))
		vmh_tcps_each(try_one, NULL);
}

/* Takes no word with the service. */
void vmh_tcps_try_open(void)
{
	static struct attempts attempts;

	if (may_try(&attempts, &no_way_open))
		vmh_tcps_each(try_open_one, NULL);
}

void vmh_tcps_await_service(struct vmh_tcps *s)
{
	const struct timespec nap = { 0, 10000000 };

	for (uint64_t end = vmh_now_ns() + 2 * STRANDED_NS; vmh_tcps_state(s) == VMH_TCPS_STRANDED && vmh_now_ns() < end;)
		vmh_sys(SYS_nanosleep, &nap, NULL);
}

/* ---- by the operator ---- */

struct told {
	int fd;
	unsigned reason;
	int n;
	struct vmh_tcps *v[VMH_TAKES_MAX]; /* held; on their way to a ring together */
};

/* It may come back by the operator only. Object lock held. */
static void keep(struct vmh_tcps *s, unsigned reason)
{
	VMH_SET(s->kept, 1);
	if (vmh_tcps_state(s) == VMH_TCPS_KERNEL) {
		vmh_tcps_set_reason(s, reason);
		return;
	}
	s->resting = 1;
	home_from_ring((struct homing){ .s = s, .must = false, .home.reason = reason });
	s->resting = 0;
}

void vmh_tcps_keep_home(struct vmh_tcps *s, unsigned reason)
{
	vmh_lock(&s->obj.lock);
	if (vmh_tcps_state(s) == VMH_TCPS_RING && !atomic_load(&s->obj.closed))
		keep(s, reason);
	vmh_unlock(&s->obj.lock);
}

static bool is_meant(const struct vmh_tcps *s, const struct told *t)
{
	return t->fd < 0 || s->obj.fd == t->fd;
}

static void adopt_gathered(struct told *t)
{
	if (t->n)
		vmh_tcps_adopt_together(t->v, t->n, VMH_R_OPERATOR, false);
	for (int i = 0; i < t->n; i++)
		vmh_obj_put(&t->v[i]->obj);
	t->n = 0;
}

static void told_to_come(struct vmh_tcps *s, void *arg)
{
	struct told *t = arg;

	if (!is_meant(s, t))
		return;
	vmh_lock(&s->obj.lock);
	VMH_SET(s->kept, 0);
	vmh_unlock(&s->obj.lock);
	if (vmh_tcps_state(s) != VMH_TCPS_KERNEL || !VMH_GET(s->connecting))
		return;
	VMH_SET(s->retry_ns, 0);
	vmh_obj_hold(&s->obj);
	t->v[t->n++] = s;
	if (t->n == VMH_TAKES_MAX)
		adopt_gathered(t);
}

/* Those that could not come together, with the time that it takes. */
static void told_again(struct vmh_tcps *s, void *arg)
{
	if (!is_meant(s, arg) || vmh_tcps_state(s) != VMH_TCPS_KERNEL || !VMH_GET(s->connecting))
		return;
	VMH_SET(s->retry_ns, 0);
	vmh_tcps_adopt(s, s->obj.fd, VMH_R_OPERATOR);
}

static void told_to_go(struct vmh_tcps *s, void *arg)
{
	const struct told *t = arg;

	if (!is_meant(s, t))
		return;
	vmh_lock(&s->obj.lock);
	if (!atomic_load(&s->obj.closed) && VMH_GET(s->connecting) &&
	    (vmh_tcps_state(s) == VMH_TCPS_KERNEL || vmh_tcps_state(s) == VMH_TCPS_RING))
		keep(s, t->reason);
	vmh_unlock(&s->obj.lock);
}

void vmh_tcps_told(int fd, bool adopt, unsigned reason)
{
	struct told t = { .fd = fd, .reason = reason };

	if (!atomic_load(&vmh_tcps_on))
		return;
	if (!adopt) {
		vmh_tcps_each(told_to_go, &t);
		return;
	}
	vmh_tcps_each(told_to_come, &t);
	adopt_gathered(&t);
	vmh_tcps_each(told_again, &t);
}
