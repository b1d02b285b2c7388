/* The TCP stack: what a ring, a socket class and the service's half of homecoming need of it.
 *
 * An instance (struct vmh_tcp) belongs to a ring. It knows nothing of rings and sockets: frames come in by
 * vmh_tcp_input and leave by env.send, time is env.now_ns, and what happened to a connection is told by env.ready. So
 * the tests join two instances by a wire made of memory, with a clock of their own.
 *
 * Invariants
 *  1. Every function takes the lock of its instance and none calls another instance; the env functions are called
 *     with it held and must not call back. Order: ring lock, then this one, then the ring's tx_lock.
 *  2. A connection is its holder's until vmh_tcp_close or vmh_tcp_forget, whatever happens to it on the wire.
 *  3. A frame that vmh_tcp_input kept (1) is given back exactly once by env.release, at the latest by vmh_tcp_destroy.
 *  4. Addresses and ports are in network order. Functions return 0 or a count, or -errno.
 */
#ifndef VMH_TCP_STACK_H
#define VMH_TCP_STACK_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>
#include "vmh_ip.h"

struct vmh_tcp;
struct vmh_tcp_conn; /* a connection or a listener */

#define VMH_TCP_INSTANCES 16 /* that run at the same time without waiting for each other; more share */

struct vmh_tcp_amounts {
	uint32_t unread, unread_pieces; /* received */
	uint32_t unacked;               /* bytes written and not yet acknowledged, sent or not */
	uint32_t resent;                /* segments that this instance sent again */
};

#define VMH_TCP_LATELY_NS 10000000000ull /* at least, and at most twice as long */

struct vmh_tcp_addr {
	struct vmh_ip laddr, raddr; /* of one family */
	uint16_t lport, rport;
};

struct vmh_tcp_env {
	void *ctx;
	uint64_t (*now_ns)(void *ctx); /* monotonic */
	int (*send)(void *ctx, const void *frame, size_t len); /* copied before it returns; 0 or -errno: tried again later */
	void (*release)(void *ctx, void *token);
	/* events as vmh_tcp_poll has them, where they may have changed; the state (linux/tcp_states.h) << 16; may be NULL */
	void (*level)(void *ctx, void *user, unsigned events, const struct vmh_tcp_amounts *a);
	void (*ready)(void *ctx, void *user, struct vmh_tcp_conn *c); /* after that: there is something new; may be NULL */
	/* An ACK waits for what may carry it: vmh_tcp_tick is wanted some microseconds later, or when nobody is about to
	 * write any more; may be NULL. */
	void (*soon)(void *ctx);
	void (*copied)(void *ctx, unsigned frames); /* whose payload was copied, at once or later; may be NULL */
	void (*resent)(void *ctx);                  /* a segment was sent again; may be NULL */
	/* A connection that began here has come to be open: its place on the caller's list, 0: none, until it is over; may
	 * both be NULL */
	unsigned (*opened)(void *ctx, const struct vmh_tcp_addr *a);
	void (*over)(void *ctx, unsigned place);
	/* Of a SYN to a listener: the kernel would not answer it by this ring; may be NULL */
	bool (*no_way_back)(void *ctx, const struct vmh_ip *laddr, const struct vmh_ip *raddr);
	/* How many connections had a segment lately; once for each of them in VMH_TCP_LATELY_NS; may be NULL */
	void (*talkers)(void *ctx, uint32_t n);
	unsigned hold_max;   /* received frames that may be kept at a time; beyond that payload is copied */
	unsigned hold_share; /* of them, for one connection; 0: all */
	unsigned tw_max;     /* connections in TIME_WAIT, 0: 65536; the oldest goes first */
	unsigned merge_max;  /* connections whose data vmh_tcp_input_all puts together at a time; 0: none */
	bool verify;         /* TCP checksums of received frames */
	bool partial;        /* one of the addresses alone is right as well: local senders leave the rest to a NIC */
	bool reset_unknown;  /* answer segments of no connection by a reset; else they are the caller's (-ENOENT) */
};

/* of the connections that a listener on any address takes */
#define VMH_TCP_IPV4 1u
#define VMH_TCP_IPV6 2u

struct vmh_tcp_path {
	uint8_t dmac[6], smac[6];
	uint16_t mtu; /* of IP */
};

enum vmh_tcp_cc { VMH_TCP_CC_LWIP, VMH_TCP_CC_CUBIC, VMH_TCP_CC_NONE }; /* as VMA_TCP_CC_ALGO */

#define VMH_TCP_SNDBUF (512u << 10) /* bytes, where the program asks for nothing */

struct vmh_tcp_options {
	bool nodelay, cork, quickack, keepalive;
	bool no_timestamps, no_sack, no_wscale; /* before the SYN */
	bool keeps_cwnd;                        /* the congestion window, when nothing was sent for a while */
	uint8_t ttl, tos, hops, tclass, keep_cnt, cc; /* ttl, tos: of IPv4; hops, tclass: of IPv6 */
	uint16_t mss_max;         /* 0: what the path allows */
	uint8_t ack_ms;           /* an acknowledgement waits so long for company; 0: 40 */
	uint32_t keep_idle_s, keep_intvl_s, user_timeout_ms;
	uint32_t sndbuf, rcvbuf;  /* bytes; they grow with the way, but for those that were asked for: */
	bool sndbuf_asked, rcvbuf_asked;
	uint32_t segs_max;        /* pieces that wait to be sent or acknowledged; 0: no limit but sndbuf */
	uint32_t syn_retries, syn_rate; /* syn_rate: of a listener, per second; 0: no limit */
	bool reuse;               /* SO_REUSEADDR: another socket that has it may be bound to the port */
	uint8_t syn_cookies;      /* of a listener, as net.ipv4.tcp_syncookies: 0 never, 1 in a flood, 2 always */
};

/* events of vmh_tcp_poll */
#define VMH_TCP_IN      0x01u /* data, end of stream, or a connection to accept */
#define VMH_TCP_OUT     0x02u /* room to write, or the connect came to its end */
#define VMH_TCP_RDHUP   0x04u /* the peer has closed its side */
#define VMH_TCP_HUP     0x08u /* both sides are closed */
#define VMH_TCP_ERR     0x10u /* vmh_tcp_error tells */
#define VMH_TCP_DRAINED 0x20u /* all that was written is acknowledged, our FIN as well */
#define VMH_TCP_URGENT  0x40u /* the peer sends urgent data: its segments are not taken, another stack has to */
#define VMH_TCP_LONG    0x80u /* the peer sends frames that are too long for the ring: it gets their headers alone */
#define VMH_TCP_FRAGMENTS 0x100u /* the peer's segments come in IP fragments, of which rings get the first alone */

struct vmh_tcp_span {
	uint32_t seq, len;
	bool fin;
};

struct vmh_tcp_pcb_info { /* for who looks into the machine: vma_stats --fd_dump */
	uint32_t flags, rcv_nxt, rcv_wnd, right_edge, rcvbuf, snd_nxt, snd_wl1, snd_wl2, snd_wnd_max, sndbuf, lastack, rtseq;
	uint32_t rtime_ms; /* since the oldest unacknowledged segment went out; 0: none */
	struct vmh_tcp_span first_unsent, last_unsent, first_unacked, last_unacked;
};

/* as in linux/tcp_states.h; those that somebody asks for */
enum { VMH_TCP_SYN_SENT = 2, VMH_TCP_TIME_WAIT = 6, VMH_TCP_CLOSE = 7, VMH_TCP_LISTEN = 10 };

struct vmh_tcp_info {
	uint8_t state;            /* VMH_TCP_SYN_SENT and so on */
	uint8_t ca_state;         /* TCP_CA_Open 0, Recovery 3, Loss 4 */
	bool peer_ended;          /* its FIN has come */
	uint8_t snd_wscale, rcv_wscale, retries, timestamps, sack, wscale;
	uint32_t rto_us, rtt_us, rttvar_us, min_rtt_us, snd_mss, rcv_mss, cwnd, ssthresh, snd_wnd, rcv_wnd;
	uint32_t unacked, unsent, unread; /* bytes */
	uint32_t left, left_unsent; /* of one that has ended: what the peer has not acknowledged, and what never went */
	uint32_t retransmits, probes, rtos, dsacks, fast_recoveries;
	uint32_t overtaken, undone; /* segments that came late, and recoveries for nothing */
	uint32_t waiting;         /* connections that a listener has opened, and nobody has accepted */
	uint32_t reordering;      /* segments */
	uint32_t segs_in, segs_out, ooo_in, held;
	uint32_t why;             /* errno: what ended it, also after the program was told; 0: nothing, or it has ended well */
	uint32_t adv_mss, mtu, probing, unread_pieces, data_segs_in, data_segs_out;
	uint32_t ms_since_sent, ms_since_received, ms_since_heard;
	uint64_t bytes_acked, bytes_received;
	struct vmh_tcp_pcb_info pcb;
};

struct vmh_tcp_stats { /* of an instance */
	uint64_t in, merged, out, bad, no_conn, paws, copied, kept, syn_dropped, accept_dropped, resets_out, send_failed, tw_dropped;
	uint64_t predicted; /* segments in and out that fast.c did */
	uint64_t cookies_sent, cookies_taken, cookies_failed;
	uint32_t conns, listeners, time_wait, held;
};

/* unread bytes where they lie, until given back */
struct vmh_tcp_piece {
	const void *data;
	size_t len;
	void *handle;
};

int vmh_tcp_open(const struct vmh_tcp_env *env, struct vmh_tcp **out);
void vmh_tcp_destroy(struct vmh_tcp *t); /* no resets; connections and listeners are gone with it */
void vmh_tcp_fork_child(void); /* the instances are the parent's: their locks may be held by threads of it */

/* A frame, Ethernet header first. 1: kept until env.release(token); 0: taken; -EBADMSG: not TCP over IP, or broken;
 * -ENOENT: of no connection or listener; -EBUSY: of a frozen connection. token NULL: never kept. The frame's TCP header
 * may be changed if the answer is not negative. */
int vmh_tcp_input(struct vmh_tcp *t, void *frame, size_t len, void *token);
/* Frames in the order in which they came, rc of each as by vmh_tcp_input. Data that goes on where the last frame of its
 * connection ended is one segment with that. How many frames became part of an earlier one's. */
struct vmh_tcp_in {
	void *frame, *token;
	uint32_t len;
	int rc;
};
unsigned vmh_tcp_input_all(struct vmh_tcp *t, struct vmh_tcp_in *in, unsigned n);
/* The name of the connection of a frame, seen from its receiver. */
bool vmh_tcp_name(struct vmh_tcp *t, void *frame, size_t len, struct vmh_tcp_addr *a);
uint64_t vmh_tcp_tick(struct vmh_tcp *t); /* runs timers; ns of the next one, UINT64_MAX if there is none */

/* families: VMH_TCP_IPV*; those of an address are its own */
int vmh_tcp_listen(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families, unsigned backlog,
		   const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out);
int vmh_tcp_accept(struct vmh_tcp_conn *listener, void *user, struct vmh_tcp_conn **out); /* -EAGAIN: none */
void vmh_tcp_let_go(struct vmh_tcp *t); /* gives back all frames but those of pieces; unread bytes are copied */
void vmh_tcp_set_backlog(struct vmh_tcp_conn *listener, unsigned backlog);
unsigned vmh_tcp_half_open(struct vmh_tcp_conn *listener); /* connections that wait for the end of their handshake */
int vmh_tcp_connect(struct vmh_tcp *t, const struct vmh_tcp_addr *a, const struct vmh_tcp_path *p,
		    const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out);

ssize_t vmh_tcp_write(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool more); /* -EAGAIN, -EPIPE, ... */
/* 0: end of stream. What goes to NULL is thrown away. */
ssize_t vmh_tcp_read(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool peek);
int vmh_tcp_take(struct vmh_tcp_conn *c, struct vmh_tcp_piece *pieces, int max); /* number of pieces, 0: end, -EAGAIN */
void vmh_tcp_give(struct vmh_tcp *t, void *handle); /* any time, also after close */
int vmh_tcp_shutdown(struct vmh_tcp_conn *c, int how); /* SHUT_RD, SHUT_WR, SHUT_RDWR */
/* Answers the segment of a frame that vmh_tcp_input did not know (-ENOENT) by a reset, as a host without it does. */
void vmh_tcp_refuse(struct vmh_tcp *t, void *frame, size_t len);
/* A connection that was closed and goes on closing becomes its holder's again, to be moved. -ENOENT: there is none. */
int vmh_tcp_reclaim(struct vmh_tcp *t, void *user, struct vmh_tcp_conn **out);
/* Connections that were closed, and have sent or acknowledged not all yet; left: what their peers have not acknowledged. */
unsigned vmh_tcp_closing(struct vmh_tcp *t, uint64_t *left);
unsigned vmh_tcp_port_users(struct vmh_tcp *t, uint16_t lport); /* connections, but for those in TIME_WAIT */
/* May a socket not be bound there, as the kernel has it, for connections that are or were (TIME_WAIT) of the port?
 * families: of the socket, VMH_TCP_IPV*. */
bool vmh_tcp_in_use(struct vmh_tcp *t, const struct vmh_ip *laddr, unsigned families, uint16_t lport, bool reuse);
/* Their names, those in TIME_WAIT left out; how many, at most `max`. */
unsigned vmh_tcp_port_names(struct vmh_tcp *t, uint16_t lport, struct vmh_tcp_addr *out, unsigned max);
void vmh_tcp_close(struct vmh_tcp_conn *c);  /* a reset if bytes are unread, as in Linux; else the stack goes on closing */
void vmh_tcp_abort(struct vmh_tcp_conn *c);  /* reset (SO_LINGER 0), and close */
unsigned vmh_tcp_poll(struct vmh_tcp_conn *c);
int vmh_tcp_error(struct vmh_tcp_conn *c);   /* SO_ERROR: a positive errno once, 0 if none */
int vmh_tcp_end(struct vmh_tcp_conn *c, int err);  /* reset from outside; what has come can be read before the error */
int vmh_tcp_fail(struct vmh_tcp_conn *c, int err); /* from outside (ICMP, no neighbour): fails a connect that waits */

void vmh_tcp_options_init(struct vmh_tcp_options *o);
int vmh_tcp_set_options(struct vmh_tcp_conn *c, const struct vmh_tcp_options *o);
void vmh_tcp_get_options(struct vmh_tcp_conn *c, struct vmh_tcp_options *o);
void vmh_tcp_set_path(struct vmh_tcp_conn *c, const struct vmh_tcp_path *p); /* a smaller MTU cuts what is queued again */
void vmh_tcp_set_user(struct vmh_tcp_conn *c, void *user);
void vmh_tcp_address(struct vmh_tcp_conn *c, struct vmh_tcp_addr *a);
void vmh_tcp_delist(struct vmh_tcp_conn *c); /* env.over now: others know of it */
void vmh_tcp_get_info(struct vmh_tcp_conn *c, struct vmh_tcp_info *i);
void vmh_tcp_get_stats(struct vmh_tcp *t, struct vmh_tcp_stats *s);

/* Homecoming and adoption, see tcp_state.h. freeze: nothing is sent, frames are refused (-EBUSY), timers stand still.
 * export works on a frozen connection: bytes needed, and written if size suffices; -ENOTSUP in a state that can't move.
 * resume: there was no way to the peer, and there is one: what was sent again meanwhile goes again now, as RFC 6069 has it.
 * nudge: the peer of a frozen connection is made to say what it has, to whoever gets its frames by now.
 * forget: gone without a segment, and what still comes for it is taken and dropped for a while. thaw: as if nothing had
 * been, timers run anew. settle: before that, nothing new is sent, and what is on its way comes to an end. */
void vmh_tcp_settle(struct vmh_tcp_conn *c, bool settling);
int vmh_tcp_freeze(struct vmh_tcp_conn *c);
void vmh_tcp_resume(struct vmh_tcp_conn *c);
void vmh_tcp_nudge(struct vmh_tcp_conn *c);
/* The next of the frames that were not taken, the first after NULL: one with urgent data, and what came after it. They are
 * there until the connection is thawed, or ends. NULL: no more, or there was no memory. */
const void *vmh_tcp_urgent(struct vmh_tcp_conn *c, const void *after, size_t *len);
ssize_t vmh_tcp_export(struct vmh_tcp_conn *c, void *blob, size_t size);
int vmh_tcp_thaw(struct vmh_tcp_conn *c);
void vmh_tcp_forget(struct vmh_tcp_conn *c);
int vmh_tcp_import(struct vmh_tcp *t, const void *blob, size_t len, const struct vmh_tcp_path *p, void *user,
		   struct vmh_tcp_conn **out);
#endif
