/* Between tcp_stack.c and a copy of the core: the one symbol that leaves it. */
#ifndef VMH_TCP_OPS_H
#define VMH_TCP_OPS_H
#include "tcp_stack.h"

struct vmh_tcp_ops {
	int (*open)(const struct vmh_tcp_env *env, const struct vmh_tcp_ops *self, unsigned core, struct vmh_tcp **out);
	void (*destroy)(struct vmh_tcp *t);
	int (*input)(struct vmh_tcp *t, void *frame, size_t len, void *token);
	unsigned (*input_all)(struct vmh_tcp *t, struct vmh_tcp_in *in, unsigned n);
	uint64_t (*tick)(struct vmh_tcp *t);
	bool (*name)(void *frame, size_t len, struct vmh_tcp_addr *a);
	int (*listen)(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families, unsigned backlog,
		      const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out);
	int (*accept)(struct vmh_tcp_conn *l, void *user, struct vmh_tcp_conn **out);
	void (*set_backlog)(struct vmh_tcp_conn *l, unsigned backlog);
	unsigned (*half_open)(struct vmh_tcp_conn *l);
	void (*refuse)(struct vmh_tcp *t, void *frame, size_t len);
	int (*reclaim)(struct vmh_tcp *t, void *user, struct vmh_tcp_conn **out);
	unsigned (*closing)(struct vmh_tcp *t, uint64_t *left);
	void (*let_go)(struct vmh_tcp *t);
	unsigned (*port_users)(struct vmh_tcp *t, uint16_t lport);
	bool (*in_use)(struct vmh_tcp *t, const struct vmh_ip *laddr, unsigned families, uint16_t lport, bool reuse);
	unsigned (*port_names)(struct vmh_tcp *t, uint16_t lport, struct vmh_tcp_addr *out, unsigned max);
	int (*connect)(struct vmh_tcp *t, const struct vmh_tcp_addr *a, const struct vmh_tcp_path *p,
		       const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out);
	ssize_t (*write)(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool more);
	ssize_t (*read)(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool peek);
	int (*take)(struct vmh_tcp_conn *c, struct vmh_tcp_piece *pieces, int max);
	void (*give)(struct vmh_tcp *t, void *handle);
	int (*shutdown)(struct vmh_tcp_conn *c, int how);
	void (*close)(struct vmh_tcp_conn *c, bool reset);
	unsigned (*poll)(struct vmh_tcp_conn *c);
	int (*error)(struct vmh_tcp_conn *c);
	int (*fail)(struct vmh_tcp_conn *c, int err);
	int (*end)(struct vmh_tcp_conn *c, int err);
	int (*set_options)(struct vmh_tcp_conn *c, const struct vmh_tcp_options *o);
	void (*get_options)(struct vmh_tcp_conn *c, struct vmh_tcp_options *o);
	void (*set_path)(struct vmh_tcp_conn *c, const struct vmh_tcp_path *p);
	void (*set_user)(struct vmh_tcp_conn *c, void *user);
	void (*address)(struct vmh_tcp_conn *c, struct vmh_tcp_addr *a);
	void (*info)(struct vmh_tcp_conn *c, struct vmh_tcp_info *i);
	void (*stats)(struct vmh_tcp *t, struct vmh_tcp_stats *s);
	void (*settle)(struct vmh_tcp_conn *c, bool settling);
	int (*freeze)(struct vmh_tcp_conn *c, bool frozen);
	void (*resume)(struct vmh_tcp_conn *c);
	void (*delist)(struct vmh_tcp_conn *c);
	void (*nudge)(struct vmh_tcp_conn *c);
	const void *(*urgent)(struct vmh_tcp_conn *c, const void *after, size_t *len);
	ssize_t (*export_)(struct vmh_tcp_conn *c, void *blob, size_t size);
	void (*forget)(struct vmh_tcp_conn *c);
	int (*import)(struct vmh_tcp *t, const void *blob, size_t len, const struct vmh_tcp_path *p, void *user,
		      struct vmh_tcp_conn **out);
};

/* How the wrappers find the lock: both structs of the core begin so. */
struct vmh_tcp_head {
	const struct vmh_tcp_ops *ops;
	union {
		struct vmh_tcp *t;  /* of a connection */
		unsigned core;      /* of an instance */
	};
};
#endif
