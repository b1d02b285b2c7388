/* The calls of tcp_stack.h: the lock, and the copy of the core that an instance runs on. */
#include "ops.h"
#include "tcp_state.h"
#include "vmh_lock.h"

#define COPY(n) extern const struct vmh_tcp_ops vmh_tcp_core_##n;
COPY(0) COPY(1) COPY(2) COPY(3) COPY(4) COPY(5) COPY(6) COPY(7)
COPY(8) COPY(9) COPY(10) COPY(11) COPY(12) COPY(13) COPY(14) COPY(15)

static const struct vmh_tcp_ops *const copies[VMH_TCP_INSTANCES] = {
	&vmh_tcp_core_0, &vmh_tcp_core_1, &vmh_tcp_core_2, &vmh_tcp_core_3,
	&vmh_tcp_core_4, &vmh_tcp_core_5, &vmh_tcp_core_6, &vmh_tcp_core_7,
	&vmh_tcp_core_8, &vmh_tcp_core_9, &vmh_tcp_core_10, &vmh_tcp_core_11,
	&vmh_tcp_core_12, &vmh_tcp_core_13, &vmh_tcp_core_14, &vmh_tcp_core_15,
};

/* Of a copy, not of an instance: its globals are what must not be shared. */
static struct {
	_Alignas(64) struct vmh_lock lock;
	unsigned users;
} slots[VMH_TCP_INSTANCES];
static struct vmh_lock slots_lock;

static inline struct vmh_tcp_head *head(const void *p)
{
	return (struct vmh_tcp_head *)(uintptr_t)p;
}

static inline struct vmh_lock *lock_of(const struct vmh_tcp *t)
{
	return &slots[head(t)->core].lock;
}

#define WITH(t_, type, call) \
	({ \
		const struct vmh_tcp *with = (t_); \
		type result; \
		vmh_lock(lock_of(with)); \
		result = head(with)->ops->call; \
		vmh_unlock(lock_of(with)); \
		result; \
	})
#define WITH_VOID(t_, call) \
	do { \
		const struct vmh_tcp *with = (t_); \
		vmh_lock(lock_of(with)); \
		head(with)->ops->call; \
		vmh_unlock(lock_of(with)); \
	} while (0)
#define OF(c) head(c)->t

void vmh_tcp_options_init(struct vmh_tcp_options *o)
{
	*o = (struct vmh_tcp_options){.ttl = 64, .hops = 64, .keep_cnt = 9, .keep_idle_s = 7200, .keep_intvl_s = 75,
				      .cc = VMH_TCP_CC_CUBIC, .sndbuf = VMH_TCP_SNDBUF, .rcvbuf = 1u << 20, .syn_retries = 6,
				      .syn_cookies = 1};
}

int vmh_tcp_open(const struct vmh_tcp_env *env, struct vmh_tcp **out)
{
	unsigned best = 0;
	int rc;

	vmh_lock(&slots_lock);
	for (unsigned i = 1; i < VMH_TCP_INSTANCES; i++)
		if (slots[i].users < slots[best].users)
			best = i;
	vmh_lock(&slots[best].lock);
	rc = copies[best]->open(env, copies[best], best, out);
	vmh_unlock(&slots[best].lock);
	if (!rc)
		slots[best].users++;
	vmh_unlock(&slots_lock);
	return rc;
}

void vmh_tcp_destroy(struct vmh_tcp *t)
{
	unsigned i = head(t)->core;

	vmh_lock(&slots_lock);
	vmh_lock(&slots[i].lock);
	head(t)->ops->destroy(t);
	vmh_unlock(&slots[i].lock);
	slots[i].users--;
	vmh_unlock(&slots_lock);
}

void vmh_tcp_fork_child(void)
{
	vmh_lock_reset(&slots_lock);
	for (unsigned i = 0; i < VMH_TCP_INSTANCES; i++)
		vmh_lock_reset(&slots[i].lock);
}

int vmh_tcp_input(struct vmh_tcp *t, void *frame, size_t len, void *token)
{
	return WITH(t, int, input(t, frame, len, token));
}

unsigned vmh_tcp_input_all(struct vmh_tcp *t, struct vmh_tcp_in *in, unsigned n)
{
	return WITH(t, unsigned, input_all(t, in, n));
}

uint64_t vmh_tcp_tick(struct vmh_tcp *t)
{
	return WITH(t, uint64_t, tick(t));
}

bool vmh_tcp_name(struct vmh_tcp *t, void *frame, size_t len, struct vmh_tcp_addr *a)
{
	return head(t)->ops->name(frame, len, a); /* touches nothing of the core */
}

int vmh_tcp_listen(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families, unsigned backlog,
		   const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out)
{
	return WITH(t, int, listen(t, laddr, lport, families, backlog, o, user, out));
}

int vmh_tcp_accept(struct vmh_tcp_conn *l, void *user, struct vmh_tcp_conn **out)
{
	return WITH(OF(l), int, accept(l, user, out));
}

void vmh_tcp_set_backlog(struct vmh_tcp_conn *l, unsigned backlog)
{
	WITH_VOID(OF(l), set_backlog(l, backlog));
}

unsigned vmh_tcp_half_open(struct vmh_tcp_conn *l)
{
	return WITH(OF(l), unsigned, half_open(l));
}

void vmh_tcp_let_go(struct vmh_tcp *t)
{
	WITH_VOID(t, let_go(t));
}

void vmh_tcp_refuse(struct vmh_tcp *t, void *frame, size_t len)
{
	WITH_VOID(t, refuse(t, frame, len));
}

int vmh_tcp_reclaim(struct vmh_tcp *t, void *user, struct vmh_tcp_conn **out)
{
	return WITH(t, int, reclaim(t, user, out));
}

unsigned vmh_tcp_closing(struct vmh_tcp *t, uint64_t *left)
{
	return WITH(t, unsigned, closing(t, left));
}

unsigned vmh_tcp_port_users(struct vmh_tcp *t, uint16_t lport)
{
	return WITH(t, unsigned, port_users(t, lport));
}

bool vmh_tcp_in_use(struct vmh_tcp *t, const struct vmh_ip *laddr, unsigned families, uint16_t lport, bool reuse)
{
	return WITH(t, bool, in_use(t, laddr, families, lport, reuse));
}

unsigned vmh_tcp_port_names(struct vmh_tcp *t, uint16_t lport, struct vmh_tcp_addr *out, unsigned max)
{
	return WITH(t, unsigned, port_names(t, lport, out, max));
}

int vmh_tcp_connect(struct vmh_tcp *t, const struct vmh_tcp_addr *a, const struct vmh_tcp_path *p,
		    const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out)
{
	return WITH(t, int, connect(t, a, p, o, user, out));
}

ssize_t vmh_tcp_write(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool more)
{
	return WITH(OF(c), ssize_t, write(c, iov, n, more));
}

ssize_t vmh_tcp_read(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool peek)
{
	return WITH(OF(c), ssize_t, read(c, iov, n, peek));
}

int vmh_tcp_take(struct vmh_tcp_conn *c, struct vmh_tcp_piece *pieces, int max)
{
	return WITH(OF(c), int, take(c, pieces, max));
}

void vmh_tcp_give(struct vmh_tcp *t, void *handle)
{
	WITH_VOID(t, give(t, handle));
}

int vmh_tcp_shutdown(struct vmh_tcp_conn *c, int how)
{
	return WITH(OF(c), int, shutdown(c, how));
}

void vmh_tcp_close(struct vmh_tcp_conn *c)
{
	WITH_VOID(OF(c), close(c, false));
}

void vmh_tcp_abort(struct vmh_tcp_conn *c)
{
	WITH_VOID(OF(c), close(c, true));
}

unsigned vmh_tcp_poll(struct vmh_tcp_conn *c)
{
	return WITH(OF(c), unsigned, poll(c));
}

int vmh_tcp_error(struct vmh_tcp_conn *c)
{
	return WITH(OF(c), int, error(c));
}

int vmh_tcp_fail(struct vmh_tcp_conn *c, int err)
{
	return WITH(OF(c), int, fail(c, err));
}

int vmh_tcp_end(struct vmh_tcp_conn *c, int err)
{
	return WITH(OF(c), int, end(c, err));
}

int vmh_tcp_set_options(struct vmh_tcp_conn *c, const struct vmh_tcp_options *o)
{
	return WITH(OF(c), int, set_options(c, o));
}

void vmh_tcp_get_options(struct vmh_tcp_conn *c, struct vmh_tcp_options *o)
{
	WITH_VOID(OF(c), get_options(c, o));
}

void vmh_tcp_set_path(struct vmh_tcp_conn *c, const struct vmh_tcp_path *p)
{
	WITH_VOID(OF(c), set_path(c, p));
}

void vmh_tcp_set_user(struct vmh_tcp_conn *c, void *user)
{
	WITH_VOID(OF(c), set_user(c, user));
}

void vmh_tcp_address(struct vmh_tcp_conn *c, struct vmh_tcp_addr *a)
{
	WITH_VOID(OF(c), address(c, a));
}

void vmh_tcp_get_info(struct vmh_tcp_conn *c, struct vmh_tcp_info *i)
{
	WITH_VOID(OF(c), info(c, i));
}

void vmh_tcp_get_stats(struct vmh_tcp *t, struct vmh_tcp_stats *s)
{
	WITH_VOID(t, stats(t, s));
}

void vmh_tcp_settle(struct vmh_tcp_conn *c, bool settling)
{
	WITH_VOID(OF(c), settle(c, settling));
}

int vmh_tcp_freeze(struct vmh_tcp_conn *c)
{
	return WITH(OF(c), int, freeze(c, true));
}

int vmh_tcp_thaw(struct vmh_tcp_conn *c)
{
	return WITH(OF(c), int, freeze(c, false));
}

void vmh_tcp_delist(struct vmh_tcp_conn *c)
{
	WITH_VOID(OF(c), delist(c));
}

void vmh_tcp_resume(struct vmh_tcp_conn *c)
{
	WITH_VOID(OF(c), resume(c));
}

void vmh_tcp_nudge(struct vmh_tcp_conn *c)
{
	WITH_VOID(OF(c), nudge(c));
}

const void *vmh_tcp_urgent(struct vmh_tcp_conn *c, const void *after, size_t *len)
{
	return WITH(OF(c), const void *, urgent(c, after, len));
}

ssize_t vmh_tcp_export(struct vmh_tcp_conn *c, void *blob, size_t size)
{
	return WITH(OF(c), ssize_t, export_(c, blob, size));
}

void vmh_tcp_forget(struct vmh_tcp_conn *c)
{
	WITH_VOID(OF(c), forget(c));
}

int vmh_tcp_import(struct vmh_tcp *t, const void *blob, size_t len, const struct vmh_tcp_path *p, void *user,
		   struct vmh_tcp_conn **out)
{
	return WITH(t, int, import(t, blob, len, p, user, out));
}
