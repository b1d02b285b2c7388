/* TCP connections that go home in the time of one: at a fork, an exec, the end of a ring, a session or the process. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_tcps.h"
#include "vmh_tcps_move.h"
#include "vmh_verbs.h"
#include <fcntl.h>

#define LEAVE_NS 1000000000u  /* that the end of a process waits for the kernel to take some thousand */
#define FLIGHTS_NS 100000000u    /* of all, lot after lot */

/* Those that go home from rings in the time of one. What does not, for a call of another thread, stays for
 * vmh_tcps_home(). In memory of its own: who calls may be a handler with a small stack. */
struct homers {
	unsigned reason;
	bool must, may_stay;
	int n;
	uint64_t landed_ns;
	struct vmh_tcps *v[VMH_HOMES_MAX]; /* held */
	struct vmh_homing h[VMH_HOMES_MAX];
	struct vmh_homing *alone[VMH_HOMES_MAX], *of[VMH_HOMES_MAX]; /* of[i]: whom ask[i] is for */
	struct vmh_session_home ask[VMH_HOMES_MAX];
};

/* The object lock is held from here on; false: it is not. */
static bool joins(struct vmh_homing *h, struct vmh_tcps *s, const struct homers *l)
{
	if (!vmh_trylock(&s->obj.lock))
		return false;
	*h = (struct vmh_homing){ .s = s, .must = l->must, .may_stay = l->may_stay, .home.reason = l->reason };
	if (vmh_tcps_state(s) == VMH_TCPS_RING && vmh_homing_begins(h))
		return true;
	vmh_unlock(&s->obj.lock);
	return false;
}

static void arrives(struct vmh_homing *h)
{
	vmh_homing_ends(h);
	vmh_debug("fd %d: the TCP connection goes home to the kernel: %s", h->s->obj.fd, vmh_reason_text(h->home.reason));
	vmh_unlock(&h->s->obj.lock);
}

/* Those that have much would hold the others up, and come last. */
static void go_home_together(struct homers *l, int n)
{
	int asked = 0, left = 0;

	for (int i = 0; i < n; i++) {
		struct vmh_homing *h = l->h + i;

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
		vmh_homing_ask(&l->alone[i]->home);
		arrives(l->alone[i]);
	}
}

static void home_together(struct homers *l)
{
	uint64_t left;
	int n = 0;

	for (int i = 0; i < l->n; i++) /* no lock is held yet */
		vmh_tmove_closed_unseen(l->v[i], l->reason);
	left = l->landed_ns < FLIGHTS_NS ? FLIGHTS_NS - l->landed_ns : 0;
	l->landed_ns += vmh_tmove_land(l->v, l->n, l->reason, left < VMH_FLIGHT_NS ? left : VMH_FLIGHT_NS);
	for (int i = 0; i < l->n; i++)
		n += joins(l->h + n, l->v[i], l);
	go_home_together(l, n);
	for (int i = 0; i < l->n; i++) {
		vmh_tmove_settle(l->v[i], false); /* one that stays */
		vmh_obj_put(&l->v[i]->obj);
	}
	l->n = 0;
}

/* NULL: each has to go by itself. */
static struct homers *homers_new(unsigned reason, bool must)
{
	struct homers *l = vmh_scratch_certain(sizeof(*l));

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
		vmh_homing_alone((struct vmh_homing){ .s = s, .may_stay = true, .home.reason = VMH_R_CLOSED });
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
