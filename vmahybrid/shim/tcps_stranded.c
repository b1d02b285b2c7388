/* TCP connections that stand still: they wait for a service, or for a route, to go home or to open. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_net.h"
#include "vmh_tcps.h"
#include "vmh_tcps_move.h"

#define TRY_HOME_NS 1000000000u  /* one that waits for a route */
#define SYN_MS 1000u             /* the kernel repeats one after this, twice it, */
#define SYN_MOST_MS 120000u      /* and so on */

_Atomic int vmh_tstranded_no_way_home, vmh_tstranded_no_way_open;

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
		vmh_tmove_leave(s, VMH_TCPS_LOST, reason, false);
	else
		vmh_tcps_restart(s, must);
	if (vmh_tcps_seeks(s))
		atomic_store(&vmh_tstranded_no_way_open, 1);
}

static int home_stranded(struct vmh_tcps *s, unsigned reason, bool must)
{
	int err;

	if (!s->stranded_in || s->stranded_in != vmh_session_id())
		s->flow_id = 0; /* of an earlier session: another flow of ours may have the number by now */
	err = vmh_session_tcp_home(s->obj.fd, &s->blob, vmh_tmove_flow(s), s->ifindex, reason);
	if (err && vmh_tmove_is_home(s)) /* by what was asked before, of a service that hung */
		err = 0;
	if (!must && err == -ENETUNREACH) {
		s->stranded_ns = vmh_now_ns();
		atomic_store(&vmh_tstranded_no_way_home, 1);
		return 0;
	}
	if (err && !must && err == -ENOTCONN && vmh_now_ns() - s->stranded_ns < VMH_STRANDED_NS)
		return 0;
	vmh_tmove_keep_blob(s, err ? (struct vmh_tcp_blob){ 0 } : vmh_tmove_end_of(&s->blob));
	if (err) {
		vmh_tmove_lost(s, reason, err);
	} else {
		vmh_tmove_off_the_qp(s);
		vmh_tmove_leave(s, VMH_TCPS_HOME, reason, false);
	}
	return err;
}

int vmh_tstranded_home(struct vmh_tcps *s, unsigned reason, bool must)
{
	if (!vmh_tcps_seeks(s))
		return home_stranded(s, reason, must);
	open_by_kernel(s, reason, must);
	return 0;
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
	if (vmh_tcps_at_kernel(s) && !atomic_load(&s->obj.closed) && vmh_tcps_owns_fd(s) &&
	    vmh_tmove_waits_for_thaw(s, s->obj.fd, NULL))
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
	return atomic_load(&vmh_tstranded_no_way_home) || atomic_load(&vmh_tstranded_no_way_open);
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

	if (may_try(&attempts, &vmh_tstranded_no_way_home))
		vmh_tcps_each(try_one, NULL);
}

/* Takes no word with the service. */
void vmh_tcps_try_open(void)
{
	static struct attempts attempts;

	if (may_try(&attempts, &vmh_tstranded_no_way_open))
		vmh_tcps_each(try_open_one, NULL);
}

void vmh_tcps_await_service(struct vmh_tcps *s)
{
	const struct timespec nap = { 0, 10000000 };

	for (uint64_t end = vmh_now_ns() + 2 * VMH_STRANDED_NS; vmh_tcps_state(s) == VMH_TCPS_STRANDED && vmh_now_ns() < end;)
		vmh_sys(SYS_nanosleep, &nap, NULL);
}
