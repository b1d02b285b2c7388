/* softverbs: a libibverbs.so.1 whose devices are the Ethernet interfaces of the network namespace.
 *
 * Transmission is an AF_PACKET socket per QP. Reception is a BPF ring per QP, filled by the device's steering programs
 * (steer.bpf.c, engine.c), emptied when a CQ is polled (rx.c): no thread of our own.
 *
 * Locks, in the order in which they are taken:
 *  0. cq->poll_lock: from ibv_start_poll to ibv_end_poll, while the program runs; taken with none of ours held.
 *  1. registry (fork.c): the lists of contexts and engines. Never with a packet in hand.
 *  2. engine->lock: rules and slots of one device.
 *  3. channel->lock: its CQs.
 *  4. qp->sq_lock: posting sends, state changes.
 *  5. cq->lock: its ring, the QPs that receive on it, and the rings of those QPs. Never two CQs at once.
 *  6. qp->rq_lock: the receive queue.
 *  7. context->link_lock, with none of the above.
 *  8. context->lock: lists of objects, asynchronous events.
 * context->mr_lock: for reading while memory of the program is copied, so that an MR cannot go meanwhile, anywhere in
 * this order: glibc lets readers pass waiting writers, and a writer takes nothing else.
 */
#ifndef SV_H
#define SV_H
#include <infiniband/verbs.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "steer.h"
#include "sys.h"

enum {
	SV_MAX_CQE = (1 << 17) - 1, /* a ring of a power of two has one entry more */
	SV_MAX_WR = 32768,
	SV_MAX_SGE = 16,
	SV_MAX_INLINE = 1024,
	SV_MAX_OBJECTS = 1 << 16,
	SV_TX_BATCH = 32,
	SV_SPARE_TX = 8,
	SV_HEADERS = 128, /* of an outgoing frame: what is copied to have its checksums filled in */
};

struct sv_device {
	struct ibv_device base;
	void *driver_ops; /* where struct verbs_device has its operations; mlx5dv_open_device() looks: NULL, not mlx5 */
	atomic_int references;
	int ifindex;
	uint8_t mac[6];
	uint64_t netns; /* inode of the namespace it was listed in */
	char netdev[16];
};

/* What rtnetlink knows of an interface. */
struct sv_link {
	int ifindex, mtu;
	unsigned int flags; /* IFF_* */
	unsigned short type; /* ARPHRD_* */
	uint8_t mac[6];
	char name[16];
};

struct sv_mr {
	struct ibv_mr base;
	uint64_t iova;
	unsigned int access;
};

struct sv_event; /* asynchronous, event.c */
struct sv_engine;

struct sv_context {
	struct sv_context *next; /* registry */
	struct sv_device *device;
	struct sv_engine *engine; /* since the first flow */
	pthread_mutex_t lock;
	pthread_rwlock_t mr_lock;
	struct sv_mr **mrs; /* by lkey >> 8 */
	uint32_t mr_slots, mr_hint;
	uint8_t mr_salt;
	atomic_uint handles;
	atomic_bool dead; /* the device is gone, or this is the child of a fork */
	bool forked;      /* the latter: fds that are shared with the parent are left alone */
	struct sv_qp *qps;
	struct sv_cq *cqs;
	struct sv_channel *channels;
	int spare_tx[SV_SPARE_TX]; /* sockets of QPs that are gone: closing one waits for an RCU grace period */
	int spares;
	struct sv_event *events, **events_end;
	int event_fd, netlink_fd;
	pthread_mutex_t link_lock; /* what netlink_fd tells is read, and becomes events, in order */
	bool was_active;
	struct verbs_context verbs; /* last: struct ibv_context ends it */
};

struct sv_pd {
	struct ibv_pd base;
	atomic_int users;
};

struct sv_channel {
	struct ibv_comp_channel base;
	struct sv_channel *next; /* context */
	pthread_mutex_t lock;
	struct sv_cq *cqs;
};

/* A completion: what ibv_wc has, and what only an extended CQ tells. */
struct sv_cqe {
	uint64_t wr_id, ktime;
	struct sv_qp *qp;
	uint32_t byte_len, vendor_err, qp_num, wc_flags, tag;
	uint32_t retires; /* send queue entries that it gives back */
	uint16_t cvlan;
	uint8_t status, opcode;
};

enum { SV_UNARMED, SV_ARMED, SV_ARMED_SOLICITED };

struct sv_cq {
	struct ibv_cq_ex base; /* begins as struct ibv_cq */
	struct sv_cq *next; /* context */
	struct sv_cq *channel_next;
	pthread_mutex_t poll_lock, lock;
	struct sv_cqe *ring, current; /* current: of who holds poll_lock */
	uint32_t size; /* a power of two */
	uint32_t head, tail;
	uint64_t wc_flags;
	bool extended, single_threaded, overrun, overrun_told;
	uint8_t armed;     /* one shot, separate from events that wait to be read */
	bool blocked;      /* was full when its rings were to be armed */
	uint32_t pending;  /* in event_fd */
	uint32_t told;     /* got from the channel; acknowledged ones: base.comp_events_completed */
	uint32_t async_told;
	int event_fd;
	int64_t wallclock; /* realtime minus monotonic at the last start_poll, ns */
	atomic_int users;
	struct sv_qp *receivers;
};

struct sv_recv {
	uint64_t wr_id;
	int sges;
	struct ibv_sge *sge;
};

/* A BPF ring buffer, mapped. engine.c makes and keeps them, rx.c reads. */
struct sv_ring {
	int fd;
	size_t size;
	unsigned long *consumer;
	const unsigned long *producer;
	const uint8_t *data;
};

struct sv_flow {
	struct ibv_flow base;
	struct sv_flow *next; /* engine */
	struct sv_qp *qp;
	union sv_words value, mask;
	uint32_t rank; /* type, then priority: lower wins */
	uint32_t tag;
	bool drop, pass, sniffer;
};

struct sv_qp {
	struct ibv_qp_ex base; /* begins as struct ibv_qp */
	struct sv_qp *next;    /* context */
	struct sv_qp *cq_next; /* receivers of the receive CQ */
	pthread_mutex_t sq_lock, rq_lock;
	struct ibv_qp_cap cap;
	bool sig_all, strip_vlan;
	atomic_uint state;
	int tx_fd;
	uint32_t async_told;
	/* send queue: entries posted, and given back by completions that were polled */
	uint32_t sq_posted, sq_unsignalled;
	atomic_uint sq_retired;
	struct sv_tx *tx;
	struct sv_held *held, *held_last; /* in the drain state */
	uint32_t holds;
	/* ibv_wr_*: between start and complete, which hold sq_lock */
	struct sv_builder *builder;
	/* receive queue */
	struct sv_recv *rq;
	struct ibv_sge *rq_sges;
	uint32_t rq_size;
	atomic_uint rq_head, rq_tail; /* taken under cq->lock, put under rq_lock */
	/* under cq->lock */
	struct sv_ring *ring;
	struct sv_slot *slot;
	uint32_t slot_index, generation;
	uint32_t segment; /* next one of the super frame at the ring's head */
	atomic_bool starved; /* frames found no receive buffer; set under rq_lock */
	uint8_t *scratch;
	uint64_t tx_dropped;
	atomic_int flows;
};

static inline struct sv_context *sv_context(struct ibv_context *context)
{
	return (struct sv_context *)((char *)verbs_get_ctx(context) - offsetof(struct sv_context, verbs));
}

static inline struct ibv_context *sv_public(struct sv_context *x)
{
	return &x->verbs.context;
}

static inline struct sv_cq *sv_cq(struct ibv_cq *cq)
{
	return (struct sv_cq *)cq;
}

static inline struct sv_qp *sv_qp(struct ibv_qp *qp)
{
	return (struct sv_qp *)qp;
}

static inline struct ibv_qp *sv_qp_public(struct sv_qp *q)
{
	return &q->base.qp_base;
}

static inline struct ibv_cq *sv_cq_public(struct sv_cq *cq)
{
	return (struct ibv_cq *)&cq->base;
}

/* Failure of a function that returns a pointer. */
#define SV_NULL(error) ({ errno = (error); NULL; })

#define SV_EXPORT __attribute__((visibility("default")))

/* netlink.c: 0 or -errno. The callback returns nonzero to stop. */
int sv_links(int (*each)(const struct sv_link *link, void *argument), void *argument);
int sv_link_of(int ifindex, struct sv_link *link);
int sv_addresses(int ifindex, int (*each)(const uint8_t gid[16], void *argument), void *argument);
int sv_netlink_watch(int ifindex);
/* The state in a message of sv_netlink_watch(): 1 up, 0 down, -1 the interface is gone, -2 something else. */
int sv_netlink_state(const void *message, size_t size, int ifindex);

/* device.c: is the calling thread in the device's network namespace? An interface index means something else elsewhere. */
bool sv_device_here(const struct sv_device *d);

/* query.c */
bool sv_link_active(const struct sv_link *link);
int sv_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
		       struct ibv_device_attr_ex *attr, size_t size);
int sv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size);
int sv_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values);
int64_t sv_clock(int which);

/* memory.c. The first returns 0 or an errno; the others are for memory that was registered, and may be gone since. */
int sv_memory_check(const void *address, size_t length, bool write);
bool sv_memory_readable(const void *at, size_t length);
bool sv_memory_writable(void *at, size_t length);

/* mr.c: the program's memory behind a scatter/gather entry, or NULL. The caller holds mr_lock for reading. */
void *sv_mr_at(struct sv_context *x, struct ibv_pd *pd, const struct ibv_sge *sge, unsigned int access);

/* cq.c. The first three with cq->lock held. */
void sv_cq_push(struct sv_cq *cq, const struct sv_cqe *cqe);
uint32_t sv_cq_room(const struct sv_cq *cq);
bool sv_cq_take(struct sv_cq *cq, struct sv_cqe *cqe, uint32_t wanted);
void sv_cq_forget(struct sv_cq *cq, struct sv_qp *qp);
struct sv_cq *sv_cq_make(struct ibv_context *context, uint32_t cqe, void *cq_context, struct ibv_comp_channel *channel,
			 uint32_t vector);
int sv_poll_cq(struct ibv_cq *cq, int entries, struct ibv_wc *wc);
int sv_modify_cq(struct ibv_cq *cq, struct ibv_modify_cq_attr *attr);
struct ibv_cq_ex *sv_create_cq_ex(struct ibv_context *context, struct ibv_cq_init_attr_ex *attr);

/* channel.c, with cq->lock held but for the last */
void sv_channel_watch(struct sv_cq *cq, struct sv_qp *qp);
void sv_channel_unwatch(struct sv_cq *cq, struct sv_qp *qp);
void sv_channel_arm(struct sv_cq *cq, struct sv_qp *qp);
void sv_channel_disarm(struct sv_cq *cq);
void sv_channel_room(struct sv_cq *cq); /* something was taken out of it */
int sv_channel_join(struct sv_channel *channel, struct sv_cq *cq);
void sv_channel_leave(struct sv_channel *channel, struct sv_cq *cq);
int sv_req_notify_cq(struct ibv_cq *cq, int solicited_only);

/* qp.c */
struct ibv_qp *sv_create_qp_ex(struct ibv_context *context, struct ibv_qp_init_attr_ex *attr);
/* Moves to the error state and flushes. The caller holds sq_lock, and no CQ. */
void sv_qp_fail(struct sv_qp *qp);
/* Flushes the receive queue of a QP in the error state. The caller holds the receive CQ's lock. */
void sv_qp_flush_receives(struct sv_qp *qp);

/* send.c, held.c, wr.c, recv.c, rx.c */
int sv_tx_make(struct sv_qp *qp);
void sv_tx_free(struct sv_qp *qp);
void sv_tx_close_spares(struct sv_context *x);
int sv_post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int sv_post_send_locked(struct sv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);
int sv_hold(struct sv_qp *qp, const struct ibv_send_wr *wr);
void sv_held_go(struct sv_qp *qp);
void sv_held_forget(struct sv_qp *qp);
int sv_builder_make(struct sv_qp *qp);
void sv_builder_free(struct sv_qp *qp);
int sv_post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad);
/* Turns frames into completions; the caller holds cq->lock. */
void sv_rx_pump(struct sv_cq *cq, uint32_t wanted);
void sv_rx_discard(struct sv_qp *qp);

/* sum.c */
enum { SV_SUM_NONE, SV_SUM_BAD, SV_SUM_GOOD, SV_SUM_UNFINISHED };
struct sv_sum {
	uint32_t at;     /* offset of the transport checksum, 0: none */
	uint16_t value;  /* what belongs there, as in the frame */
};
/* What a NIC's checksum unit says of a frame. UNFINISHED: the kernel left the transport checksum to the NIC. */
int sv_sum_check(const uint8_t *frame, uint32_t length, struct sv_sum *sum);
struct sv_offload {
	uint16_t start, offset; /* as in struct virtio_net_hdr; 0: no transport checksum to fill in */
	uint32_t end;           /* of the IP packet, in the frame */
};
/* Fills in what IBV_SEND_IP_CSUM asks for, all but the payload's part of the transport checksum. `head` holds the first
 * `have` of `length` octets. */
void sv_sum_prepare(uint8_t *head, uint32_t have, uint32_t length, struct sv_offload *offload);
/* Adds what lies `offset` octets behind the start of what is summed up. */
uint16_t sv_sum_add(uint16_t sum, const uint8_t *at, uint32_t length, uint32_t offset);
/* Puts the checksum for a sum that began with the pseudo header's, which sv_sum_prepare() left in the field. */
void sv_sum_put(uint8_t *head, const struct sv_offload *offload, uint16_t sum);
/* Completes a frame that was cut out of a super frame. */
void sv_sum_fill(uint8_t *frame, uint32_t length);
uint32_t sv_frame_headers(const uint8_t *frame, uint32_t length, bool *tcp);
/* Cuts frame `index` out of a super frame into `out`; its length, 0 when there is no such. */
uint32_t sv_segment(const uint8_t *frame, uint32_t length, uint32_t gso_size, uint32_t index, uint8_t *out);

/* flow.c, engine.c */
struct ibv_flow *sv_create_flow(struct ibv_qp *qp, struct ibv_flow_attr *attr);
int sv_destroy_flow(struct ibv_flow *flow);
int sv_flow_parse(const struct ibv_flow_attr *attr, struct sv_flow *flow);
int sv_engine_add(struct sv_context *x, struct sv_flow *flow);
void sv_engine_remove(struct sv_context *x, struct sv_flow *flow);
void sv_engine_forget(struct sv_context *x); /* its flows and slots: a device that is closed steers nothing */
void sv_engine_leave(struct sv_context *x);
void sv_engine_device_gone(struct sv_context *x);
void sv_engine_release_slot(struct sv_qp *qp);

/* bpf.c */
struct sv_steering {
	int rules, tables, controls, rings; /* maps */
	int ingress, egress;                /* links */
	struct sv_control *control;
};
int sv_steering_open(int ifindex, struct sv_steering *steering);
void sv_steering_close(struct sv_steering *steering);
bool sv_steering_attached(const struct sv_steering *steering, int ifindex);
int sv_map_update(int map, const void *key, const void *value);
int sv_map_delete(int map, const void *key);
int sv_ring_open(size_t size, struct sv_ring *ring);
void sv_ring_close(struct sv_ring *ring);

/* event.c */
int sv_events_open(struct sv_context *x);
void sv_events_close(struct sv_context *x);
void sv_event_queue(struct sv_context *x, enum ibv_event_type type, void *element);
/* Forgets undelivered events of an object that goes; returns when the delivered ones are acknowledged. */
void sv_event_drain(struct sv_context *x, void *element, pthread_mutex_t *mutex, pthread_cond_t *cond,
		    const uint32_t *completed, const uint32_t *told);
void sv_device_gone(struct sv_context *x);

/* fork.c */
void sv_registry_lock(void);
void sv_registry_unlock(void);
void sv_registry_add(struct sv_context *x);
void sv_registry_remove(struct sv_context *x);
void sv_engines_after_fork(void);

/* log.c: to stderr, when SOFTVERBS_DEBUG is set */
void sv_say(const char *format, ...) __attribute__((format(printf, 1, 2)));
#endif
