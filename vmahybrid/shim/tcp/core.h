/* Private to the core: lwIP's state machine, and around it what lwIP lacks. Compiled once, linked VMH_TCP_INSTANCES
 * times, each copy with its own globals (lwIP has many).
 *
 * Between two calls lwIP's lists are empty: a connection's pcb is put there alone before lwIP is entered and taken off
 * afterwards (core_enter, core_leave). So lwIP finds any pcb at once, however many there are, and all connections of a
 * copy may even belong to several instances. lwIP's timers are never called; timer.c has a heap of due connections.
 */
#ifndef VMH_TCP_CORE_H
#define VMH_TCP_CORE_H
#include "tcp_stack.h"
#include "vmh_heap.h"
#include "lwip/opt.h"
#include "lwip/def.h"
#include "lwip/ip.h"
#include "lwip/netif.h"
#include "lwip/pbuf.h"
#include "lwip/priv/tcp_priv.h"
#include "lwip/tcp.h"
#include <errno.h>
#include <string.h>

#define MS 1000u          /* times are in microseconds */
#define SEC 1000000ull
#define TIME_WAIT_US (60 * SEC)
#define FIN_WAIT2_US (60 * SEC)
#define ORPHAN_US (100 * SEC) /* closed by the program, and the peer does not answer */
#define SHUT_ORPHAN_US (204 * SEC) /* the same, by a peer that keeps its window shut: until Linux' probes would be 120 s apart */
#define GIVE_UP_US (924 * SEC) /* what tcp_retries2 = 15 comes to in Linux */
#define DELAYED_ACK_US (40 * MS)
#define TS_LEN 12 /* bytes of the timestamp option, aligned */

/* bits that lwIP leaves alone in tcp_seg.flags: the scoreboard of RFC 6675 */
#define SEG_SACKED 0x20u
#define SEG_LOST 0x40u
#define SEG_RETRANS 0x80u

#define MAX_SACKS 4
#define DUP_THRESHOLD 3u

/* lwIP has one pcb at a time and so needs no addresses to tell them apart: of an IPv6 connection it gets LOCAL_TOKEN and
 * REMOTE_TOKEN, IPv4 addresses of nobody; ip.c has the real ones. */
struct key {
	struct vmh_ip laddr, raddr;
	uint16_t lport, rport;
};
#define LOCAL_TOKEN 0x0100000au
#define REMOTE_TOKEN 0x0200000au

static inline bool key_is4(const struct key *k)
{
	return k->raddr.w[2] == PP_HTONL(0xffffu) && !(k->raddr.w[0] | k->raddr.w[1]);
}
static inline uint32_t key_local(const struct key *k)
{
	return key_is4(k) ? k->laddr.w[3] : LOCAL_TOKEN;
}
static inline uint32_t key_remote(const struct key *k)
{
	return key_is4(k) ? k->raddr.w[3] : REMOTE_TOKEN;
}
static inline uint8_t key_ttl(const struct key *k, const struct vmh_tcp_options *o)
{
	return key_is4(k) ? o->ttl : o->hops;
}
static inline uint8_t key_tos(const struct key *k, const struct vmh_tcp_options *o)
{
	return key_is4(k) ? o->tos : o->tclass;
}
static inline uint16_t key_headers(const struct key *k) /* bytes of IP and TCP */
{
	return key_is4(k) ? 40 : 60;
}

/* options of a received segment */
struct seg_in {
	uint32_t seq, ack, tsval, tsecr;
	uint16_t payload;
	uint8_t flags, nsacks;
	bool ts;
	struct {
		uint32_t from, to;
	} sack[MAX_SACKS];
};

/* a segment without data and without a pcb */
struct bare {
	uint32_t seq, ack;
	uint8_t flags, ttl, tos;
	uint16_t wnd;
	const uint8_t *options; /* whole words */
	size_t options_len;
};

#define REUSE_GAP (65535u + 2) /* tcp_twsk_unique() of Linux */

enum fate { SYN_DROPPED, SYN_TAKEN, SYN_COOKIE };

struct syn { /* as far as a cookie knows it */
	uint8_t tcp[44];
	size_t len;
};

/* What came in a frame from the TCP header on; `next`: frames that go on where it ends, as one segment (merge.c). */
struct segment {
	uint8_t *frame, *tcp;
	uint32_t len;
	uint16_t header, payload; /* bytes of it; payload: with that of all that follow. 0 until read */
	void *token;
	struct held *held;
	struct segment *next;
	bool kept;
};

struct kept {
	struct kept *next;
	size_t len;
	uint8_t frame[];
};

enum timer { T_RTO, T_PROBE, T_REORDER, T_ACK, T_PERSIST, T_KEEP, T_LIFE, T_RETRY, TIMERS };

enum recovery { OPEN, RECOVERY, LOSS };

struct cubic {
	double w_max, k, w_est, origin, prior; /* in segments; prior: the window before the last loss */
	uint64_t epoch, seen;           /* us; epoch 0: none; seen: the last acknowledgement */
};

struct listener;

struct vmh_tcp_conn {
	const struct vmh_tcp_ops *ops; /* first: the wrappers look here */
	struct vmh_tcp *t;
	struct key key;
	struct vmh_tcp_conn *hash_next;
	struct tcp_pcb *pcb;      /* NULL: closed, or a listener */
	struct listener *listening;
	struct vmh_tcp_conn *parent; /* listener, until accepted */
	struct vmh_tcp_conn *q_next, *q_prev; /* its SYN or accept queue */
	void *user;
	struct vmh_tcp_path path;
	unsigned place; /* of env.opened */
	struct vmh_tcp_options opt;
	/* what the holder knows or did */
	bool urgent; /* data of the peer, seen and not taken */
	struct kept *kept;        /* its frame, and those with data after it */
	size_t kept_bytes;
	bool kept_full;           /* or there was no memory: what comes is not kept any more */
	bool opened;              /* by us: the other end was the listener */
	bool long_frames;         /* of the peer: only their headers came, or so much that the kernel is better at it */
	bool fragments;           /* of the peer */
	bool uncorked, kept_rest; /* of TCP_CORK: the rest may go during this call; it has not gone in this call */
	bool settling;           /* it is about to be frozen: nothing new goes out, and the window does not move on */
	bool hold_ack, held_ack; /* the pure ACK of this segment is not to go yet; and did not */
	bool imported;           /* what was acknowledged before is another stack's to count */
	bool established, eof, shut_rd, shut_wr, app_closed, frozen, hashed, in_accept_queue, changed;
	uint8_t last_state;       /* when the pcb went */
	int error;
	uint16_t offered;         /* MSS in our SYN; 0: it was another stack's, or a cookie's */
	unsigned events;
	/* received and unread; pbuf->next links them, tot_len is void */
	struct pbuf *rx_head, *rx_tail;
	uint32_t rx_bytes, rx_off; /* rx_off: read of the head */
	uint32_t rx_pieces;       /* pbufs of it */
	struct vmh_tcp_conn *holder_next, *holder_prev; /* while held */
	uint32_t held;            /* of the unread ones, frames */
	bool not_read;            /* since it had to give frames back: what comes is copied */
	/* timers */
	uint64_t due[TIMERS];     /* us, 0: off */
	uint64_t heap_due;
	uint32_t heap_at;         /* 0: not in the heap */
	uint64_t resting_since;   /* nothing is on its way; 0: something is */
	uint64_t first_sent_at, heard_at; /* oldest unacknowledged went out; last segment came */
	uint64_t probing_since;   /* first probe of a closed window, answered or not; 0: none */
	uint32_t talked;          /* in this period of struct vmh_tcp */
	uint32_t out_then;        /* data segments sent when the last one came: as many now, and it went without an answer */
	uint32_t long_in;         /* bytes of long frames since the last data that was sent */
	uint64_t answered_at;     /* the last segment that made no sense */
	struct run *run;          /* merge.c: what of it is being put together, during one call */
	uint64_t long_runs_at;    /* bytes received: before, an ACK for each two segments */
	uint64_t sent_at, received_at; /* data */
	uint8_t retries, persist_shift, keep_sent;
	/* round trip, us */
	uint32_t srtt, rttvar, min_rtt;
	uint64_t rtt_at;          /* 0: no sample under way; */
	uint32_t rtt_from, rtt_seq; /* it began there, and is taken when this is acknowledged, */
	uint32_t rtt_most;        /* if it was cut: and no more than this */
	bool rtt_cut;
	uint8_t voids;            /* samples in a row of what went twice; one of them may be one all the same, if all that */
	uint8_t void_resent;      /* went again from void_from on, so often, comes twice: */
	uint64_t void_at;         /* 0: acknowledged, or none */
	uint32_t void_from, void_us;
	uint32_t ack_wait_us;     /* the peer may keep the ACK of a lone small segment back for so long */
	uint32_t ts_offset, ts_sent; /* sent: the last one, or a later one */
	/* sender */
	uint32_t una, nxt;        /* as last seen */
	uint32_t cwnd, ssthresh, recover, retrans_mark, fack, probe_end;
	uint32_t dupacks, pipe;
	uint8_t recovery, probed;
	bool sacked_any, cwnd_limited;
	uint64_t head_again_at;   /* the first unacknowledged segment went out again, the first time; 0: it did not */
	uint32_t head_again_nxt;  /* snd_nxt at that time */
	bool answered;            /* data went out after some had come */
	bool short_out;           /* less than a segment is unacknowledged; the last ends at short_end: */
	bool short_tail;          /* that is the end of more than a segment */
	bool young;               /* connect() has opened it, and nothing was written yet */
	uint32_t short_end;
	uint32_t flight_max, round_end; /* most that was on its way in this round trip */
	bool shut_out;            /* something was to be sent again for which the window has no room any more */
	struct cubic cubic;
	/* buffers of a long way */
	uint32_t grown_snd, grown_rcv; /* bytes; 0: as small as at first */
	uint64_t read_then, read_at;   /* bytes that the program had read, when */
	struct vmh_tcp_info count; /* only its counters */
	uint32_t resent;           /* of count.retransmits, by us: the rest was another stack's */
	/* frames that overtake one another */
	uint16_t reordering;      /* segments that may come before another one which is not lost */
	uint8_t reo_steps;        /* a hole is one after so many quarters of a round trip */
	uint32_t hole, hole_end;  /* T_REORDER is of that one, and what is missing before hole_end */
	uint8_t reo_left;         /* recoveries, until both are what they were at first; 0: they are */
	struct {
		bool may, timeout, stamped; /* whether; what began it; `stamp` is one */
		uint32_t cwnd, ssthresh;    /* as they were */
		struct cubic cubic;
		uint32_t from, to;          /* what was resent lies there */
		uint32_t resent;            /* segments, without those that the peer says it has twice */
		uint32_t round;             /* it has said so of all when this is acknowledged, a round trip more than it takes */
		uint32_t stamp;             /* the timestamp of the first */
		uint8_t doubt;              /* of a timeout: ALONE, then NEW_DATA; `again` is the end of all that went again */
		uint32_t again;
	} undo;
};

struct conn_list {
	struct vmh_tcp_conn *head, *tail;
	unsigned n;
};

struct listener {
	unsigned families;
	struct tcp_pcb_listen *pcb;
	struct vmh_tcp_conn *next; /* of the instance */
	unsigned backlog, rate_used;
	uint64_t rate_since, cookies_until; /* until when an ACK may answer a cookie */
	struct conn_list half_open, ready;
};

/* TIME_WAIT: all that is left */
struct tw {
	struct tw *hash_next, *next, **in; /* in: what points to it in the list */
	struct key key;
	uint32_t snd_nxt, rcv_nxt, ts_recent, ts_offset;
	uint64_t until;
	struct vmh_tcp_path path;
	bool ts : 1, moved : 1; /* moved: another stack has the connection, and answers */
	bool reuse : 1;         /* SO_REUSEADDR */
};

#define ENDS 512u
struct end { /* of a connection that we opened, and that has no TIME_WAIT here: the peer may have one */
	uint32_t tag, snd_nxt; /* tag: of the name; 0 none */
};

struct held { /* a received frame inside lwIP or unread */
	struct pbuf_custom p;
	void *token;
	struct vmh_tcp *t;
	struct held *next;
};

struct vmh_tcp {
	const struct vmh_tcp_ops *ops; /* first: the wrappers look here */
	unsigned core;                 /* which copy: its lock is ours */
	struct vmh_tcp_env env;
	uint64_t now;                  /* us, at core_enter */
	uint64_t secret[2];
	struct netif netif;
	struct vmh_tcp_path reply;     /* back to where the frame came from */
	struct key in;                 /* of that frame, while no connection is core_conn */
	struct vmh_tcp_conn **table, *last;
	uint32_t table_mask, nconns;
	struct vmh_tcp_conn *listeners;
	struct tw **tw_table, *tw_first, **tw_end;
	uint32_t tw_mask, ntw;
	struct end *ends;              /* ENDS by the hash of the name, once there is one */
	struct vmh_tcp_conn **heap;
	uint32_t heap_n, heap_size;
	struct held *free_held;
	struct vmh_tcp_conn *first_holder, *last_holder; /* hold.c */
	struct vmh_tcp_conn *new_conn; /* made by passive_open during this call */
	uint32_t isn_floor;            /* of the next sequence number, if `reusing` */
	bool reusing;
	bool prompt;                   /* what connect() opened last was written to at once: so will the next one be */
	bool recalling;                /* a SYN that was answered by a cookie, isn_floor: no second answer */
	struct {
		uint64_t until;        /* us */
		uint32_t period;       /* from 1 */
		uint32_t now, before;  /* connections that had a segment in this one, in the last one */
	} talkers;
	struct vmh_tcp_stats stats;
};

extern struct vmh_tcp *core_now;      /* the instance that is inside lwIP */
extern struct vmh_tcp_conn *core_conn;

/* of a header */
static inline uint16_t get16(const uint8_t *p)
{
	uint16_t v;

	memcpy(&v, p, 2);
	return lwip_ntohs(v);
}

static inline uint32_t get32(const uint8_t *p)
{
	uint32_t v;

	memcpy(&v, p, 4);
	return lwip_ntohl(v);
}

/* The checksum of what adds up to that. */
static inline uint16_t sum_of(uint32_t sum)
{
	sum = (sum & 0xffff) + (sum >> 16);
	sum += sum >> 16;
	return (uint16_t)~sum;
}

/* No more fits into it: the MSS of lwIP counts the timestamps. */
static inline bool is_whole(const struct tcp_pcb *pcb, const struct tcp_seg *s)
{
	return s->len + (s->flags & TF_SEG_OPTS_TS ? TS_LEN : 0) >= pcb->mss;
}

/* core.c */
void core_enter(struct vmh_tcp *t, struct vmh_tcp_conn *c);
void core_leave(struct vmh_tcp *t, struct vmh_tcp_conn *c);
void core_callbacks(struct vmh_tcp_conn *c, struct tcp_pcb *pcb);
struct vmh_tcp_conn *core_conn_new(struct vmh_tcp *t, const struct key *k, const struct vmh_tcp_options *o);
void core_conn_free(struct vmh_tcp_conn *c);
void core_delist(struct vmh_tcp_conn *c);
void core_ack_soon(struct vmh_tcp_conn *c); /* inside: by the next tick, unless something carries it before */
void core_drop(struct vmh_tcp_conn *c, int err, bool reset); /* inside */
void core_nagle(struct vmh_tcp_conn *c);
/* Bytes from one number to another. lwIP's snd_lbb does not count a FIN that its last segment of data has taken. */
static inline uint32_t core_ahead(uint32_t end, uint32_t from)
{
	return TCP_SEQ_GT(from, end) ? 0 : end - from;
}

static inline uint32_t core_sndbuf(const struct vmh_tcp_conn *c)
{
	return c->opt.sndbuf_asked ? c->opt.sndbuf : LWIP_MAX(c->opt.sndbuf, c->grown_snd);
}

static inline uint32_t core_rcvbuf(const struct vmh_tcp_conn *c)
{
	return c->opt.rcvbuf_asked ? c->opt.rcvbuf : LWIP_MAX(c->opt.rcvbuf, c->grown_rcv);
}

void core_grow_sndbuf(struct vmh_tcp_conn *c);
bool core_window_due(struct vmh_tcp_conn *c);
void core_window(struct vmh_tcp_conn *c);
unsigned core_events(struct vmh_tcp_conn *c);
void core_address(struct vmh_tcp_conn *c, struct vmh_tcp_addr *a);
void core_note(struct vmh_tcp_conn *c); /* what core_events says now */
/* input.c */
int core_input(struct vmh_tcp *t, void *frame, size_t len, void *token);
uint8_t *input_find(uint8_t *frame, size_t len, size_t *tcp_len, struct key *k); /* the TCP header of a whole segment */
bool input_sum_ok(const struct vmh_tcp *t, const uint8_t *tcp, size_t len, const struct key *k);
void input_segment(struct vmh_tcp_conn *c, struct segment *s); /* its checksums are right */
bool input_count(struct vmh_tcp_conn *c, const struct seg_in *in, unsigned n); /* n frames; true: its ACK goes soon */
int input_conn(struct vmh_tcp_conn *c, struct segment *s);     /* one frame; the answer of vmh_tcp_input */
void core_refuse(struct vmh_tcp *t, void *frame, size_t len);
bool core_name(void *frame, size_t len, struct vmh_tcp_addr *a);
/* merge.c */
unsigned merge_input(struct vmh_tcp *t, struct vmh_tcp_in *in, unsigned n);
/* fast.c: true if it did all there was to do */
bool fast_input(struct vmh_tcp_conn *c, struct segment *s);
bool fast_output(struct vmh_tcp_conn *c, const struct iovec *data); /* inside */
/* hold.c */
struct pbuf *hold_segment(struct vmh_tcp *t, struct vmh_tcp_conn *c, const struct seg_in *in,
			  struct segment *s);             /* as pbufs; NULL: no memory */
bool hold_next(struct vmh_tcp_conn *c, struct segment *s); /* its payload is unread now; false: no memory */
void hold_done(struct vmh_tcp *t, struct segment *s);     /* lwIP has had it: what stays? */
void hold_append(struct vmh_tcp_conn *c, struct pbuf *p); /* p is the queue's */
struct pbuf *hold_pop(struct vmh_tcp_conn *c);            /* the oldest; there is one */
void hold_was_read(struct vmh_tcp_conn *c);
void hold_let_go(struct vmh_tcp *t);
/* ip.c */
err_t core_send(struct vmh_tcp_conn *c, struct pbuf *p); /* a segment, from its TCP header on */
int core_send_segment(struct vmh_tcp *t, const struct vmh_tcp_path *path, const struct key *k, uint32_t seq, uint32_t ack,
		      uint8_t flags, uint32_t tsval, uint32_t tsecr, bool ts);
void core_send_probe(struct vmh_tcp_conn *c, uint32_t tsval);
void core_probe(struct vmh_tcp_conn *c);
int core_send_bare(struct vmh_tcp *t, const struct vmh_tcp_path *path, const struct key *k, const struct bare *b);
uint64_t core_hash(const struct vmh_tcp *t, const struct key *k, uint64_t salt); /* with the secret */
uint64_t core_hash_more(const struct vmh_tcp *t, uint64_t hash, uint64_t word);
uint32_t core_pseudo(const struct key *k); /* one's complement sum of the addresses */
/* demux.c */
int demux_open(struct vmh_tcp *t);
void demux_close(struct vmh_tcp *t);
struct vmh_tcp_conn *demux_find(struct vmh_tcp *t, const struct key *k);
int demux_add(struct vmh_tcp_conn *c);
void demux_remove(struct vmh_tcp_conn *c);
struct vmh_tcp_conn *demux_listener(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport);
struct vmh_tcp_conn *demux_taken(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families);
struct tw *demux_tw(struct vmh_tcp *t, const struct key *k);
void demux_tw_add(struct vmh_tcp_conn *c, const struct tcp_pcb *pcb, bool moved);
struct vmh_tcp_conn *demux_orphan(struct vmh_tcp *t);
unsigned demux_closing(struct vmh_tcp *t, uint64_t *left);
unsigned demux_port_users(struct vmh_tcp *t, uint16_t lport);
bool demux_in_use(struct vmh_tcp *t, const struct vmh_ip *laddr, unsigned families, uint16_t lport, bool reuse);
unsigned demux_port_names(struct vmh_tcp *t, uint16_t lport, struct vmh_tcp_addr *out, unsigned max);
void demux_tw_renew(struct vmh_tcp *t, struct tw *w); /* its time begins anew */
void demux_tw_remove(struct vmh_tcp *t, struct tw *w);
uint64_t demux_tw_expire(struct vmh_tcp *t);
void demux_ended(struct vmh_tcp *t, const struct key *k, uint32_t snd_nxt); /* of one that was opened here */
/* Has a connection of this name left sequence numbers that the peer may remember? True with that after its last one. */
bool demux_end(const struct vmh_tcp *t, const struct key *k, uint32_t *snd_nxt);
enum fate demux_syn(struct vmh_tcp_conn *l);
void list_add(struct conn_list *l, struct vmh_tcp_conn *c);
void list_remove(struct conn_list *l, struct vmh_tcp_conn *c);
/* cookie.c */
void cookie_send(struct vmh_tcp_conn *l, const struct key *k, const uint8_t *tcp, const struct seg_in *in);
bool cookie_awaited(const struct vmh_tcp_conn *l); /* the answer to one is likely to come */
bool cookie_syn(struct vmh_tcp_conn *l, const struct key *k, const uint8_t *tcp, const struct seg_in *in, struct syn *out);
/* timer.c */
void timer_sync(struct vmh_tcp_conn *c);
void timer_arm(struct vmh_tcp_conn *c);
void timer_remove(struct vmh_tcp_conn *c);
uint64_t core_tick(struct vmh_tcp *t);
void core_resume(struct vmh_tcp_conn *c);
/* recovery.c */
void recovery_start(struct vmh_tcp_conn *c);
void recovery_before(struct vmh_tcp_conn *c, const struct seg_in *in);
void recovery_limited(struct vmh_tcp_conn *c);
void recovery_idle(struct vmh_tcp_conn *c);
void recovery_ack(struct vmh_tcp_conn *c, const struct seg_in *in, uint32_t acked, bool dup);
void recovery_rto(struct vmh_tcp_conn *c);
void recovery_probe(struct vmh_tcp_conn *c);
void recovery_reorder(struct vmh_tcp_conn *c);
void recovery_rtt(struct vmh_tcp_conn *c, uint32_t us);
uint32_t recovery_rto_us(const struct vmh_tcp_conn *c);
uint32_t recovery_flight(const struct vmh_tcp_conn *c);
err_t core_split(struct tcp_pcb *pcb, u16_t at); /* `at` bytes, at most an MSS, in the first one */
bool recovery_resend(struct vmh_tcp_conn *c, struct tcp_seg **at);
uint32_t recovery_probe_us(const struct vmh_tcp_conn *c);
void recovery_output(struct vmh_tcp_conn *c);
void recovery_push(struct vmh_tcp_conn *c);
/* undo.c */
void undo_start(struct vmh_tcp_conn *c);
void undo_overtaken(struct vmh_tcp_conn *c);
void undo_begin(struct vmh_tcp_conn *c, bool timeout);
void undo_resent(struct vmh_tcp_conn *c, uint32_t end);
/* Do D-SACKs come of what the wire doubles? One that doubles every frame tells nothing; one that doubles few of them hardly
 * ever what we sent again. */
bool undo_is_doubled(const struct vmh_tcp_conn *c);
void undo_twice(struct vmh_tcp_conn *c, uint32_t from, uint32_t to);
void undo_acked(struct vmh_tcp_conn *c, const struct seg_in *in);
void undo_doubt(struct vmh_tcp_conn *c);
bool undo_waits(struct vmh_tcp_conn *c, uint32_t acked, bool dup); /* nothing more is sent again before the next ACK */
/* cubic.c */
void cc_ack(struct vmh_tcp_conn *c, uint32_t acked, uint32_t lwip_cwnd);
void cc_loss(struct vmh_tcp_conn *c, bool timeout);
void cc_rested(struct vmh_tcp_conn *c, uint64_t us); /* for so long nothing was on its way */
/* conn.c, the calls of the holder */
int core_listen(struct vmh_tcp *t, const struct vmh_ip *laddr, uint16_t lport, unsigned families, unsigned backlog,
		const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out);
int core_accept(struct vmh_tcp_conn *l, void *user, struct vmh_tcp_conn **out);
void core_set_backlog(struct vmh_tcp_conn *l, unsigned backlog);
unsigned core_half_open(struct vmh_tcp_conn *l);
int core_reclaim(struct vmh_tcp *t, void *user, struct vmh_tcp_conn **out);
int core_connect(struct vmh_tcp *t, const struct vmh_tcp_addr *a, const struct vmh_tcp_path *p,
		 const struct vmh_tcp_options *o, void *user, struct vmh_tcp_conn **out);
ssize_t core_write(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool more);
ssize_t core_read(struct vmh_tcp_conn *c, const struct iovec *iov, int n, bool peek);
int core_take(struct vmh_tcp_conn *c, struct vmh_tcp_piece *pieces, int max);
void core_give(struct vmh_tcp *t, void *handle);
int core_shutdown(struct vmh_tcp_conn *c, int how);
void core_close(struct vmh_tcp_conn *c, bool reset);
int core_fail(struct vmh_tcp_conn *c, int err);
int core_end(struct vmh_tcp_conn *c, int err);
/* info.c */
int core_set_options(struct vmh_tcp_conn *c, const struct vmh_tcp_options *o);
void core_set_path(struct vmh_tcp_conn *c, const struct vmh_tcp_path *p);
void core_get_info(struct vmh_tcp_conn *c, struct vmh_tcp_info *i);
void core_get_settled(const struct vmh_tcp_conn *c, struct vmh_tcp_info *i); /* what the SYNs have settled; it has a PCB */
uint8_t core_state(const struct vmh_tcp_conn *c);
/* state.c */
void core_settle(struct vmh_tcp_conn *c, bool settling);
int core_freeze(struct vmh_tcp_conn *c, bool frozen);
void core_nudge(struct vmh_tcp_conn *c);
const void *core_urgent(struct vmh_tcp_conn *c, const void *after, size_t *len);
void core_forget_kept(struct vmh_tcp_conn *c);
bool core_movable(const struct vmh_tcp_conn *c);
ssize_t core_export(struct vmh_tcp_conn *c, void *blob, size_t size);
void core_forget(struct vmh_tcp_conn *c);
int core_import(struct vmh_tcp *t, const void *blob, size_t len, const struct vmh_tcp_path *p, void *user,
		struct vmh_tcp_conn **out);

/* What the wrappers of tcp_stack.c call: the one name that leaves a copy. */
struct vmh_tcp_ops;
#endif
