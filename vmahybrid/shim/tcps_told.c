/* What the operator tells TCP connections to do: `vmahybrid adopt`, `vmahybrid home`. */
#include "vmh_base.h"
#include "vmh_control.h"
#include "vmh_tcps.h"
#include "vmh_tcps_move.h"

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
	vmh_homing_alone((struct vmh_homing){ .s = s, .must = false, .home.reason = reason });
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
