/* A whole TCP connection as bytes: what passes between the stack (tcp_export, tcp_import) and the service, which
 * reads and writes the kernel's side of it through TCP_REPAIR.
 *
 * Layout: struct vmh_tcp_state, then send_len bytes (snd_una first: what was sent and not acknowledged, then what was
 * never sent), then recv_len bytes that the program has not read (the last one is rcv_nxt - 1).
 * Every number is little-endian, but addresses and ports, which are in network order as in a sockaddr.
 *
 * Rules
 *  1. A FIN is never counted: not ours in snd_una, snd_nxt, not the peer's in rcv_nxt. The flags tell of them. So a side
 *     is always rebuilt as an established connection, and gets its FINs afterwards: ours by shutdown(SHUT_WR), which
 *     sends it (again) with the sequence number snd_una + send_len; the peer's as an (injected) segment at rcv_nxt.
 *  2. snd_una + send_len is what the kernel calls write_seq. TCP_QUEUE_SEQ of the send queue is snd_una before its bytes
 *     are put back; that of the receive queue is rcv_nxt - recv_len. With TCP_REPAIR on, bytes put into the send queue
 *     count as sent: put back (snd_nxt - snd_una) bytes in repair mode and send the other ones after it.
 *  3. Data that came out of order is dropped; the peer sends it again, even if we told of it by SACK (RFC 2018 section 8).
 *  4. snd_wnd, max_window, rcv_wnd are in bytes, scaling done; rcv_wup + rcv_wnd is the announced right edge, which must
 *     not move to the left. snd_wl1, snd_wnd, max_window, rcv_wnd, rcv_wup are struct tcp_repair_window.
 *  5. tsval_now is the clock that goes out as TSval, at the moment of export (TCP_TIMESTAMP of getsockopt; a
 *     millisecond each). It must go on from there without a step back, else the peer's PAWS drops what we send.
 *  6. A reader refuses another magic, version or header_len, lengths that do not add up, and any unknown flag.
 *
 * Python: struct.unpack_from("<IHHI4B16s16s2H10I4B18I2Q4I", blob); struct.calcsize of it is VMH_TCP_STATE_LEN.
 */
#ifndef VMH_TCP_STATE_H
#define VMH_TCP_STATE_H
#include <stdint.h>

#define VMH_TCP_STATE_MAGIC 0x53435456u /* "VTCS" */
#define VMH_TCP_STATE_VERSION 2
#define VMH_TCP_STATE_LEN 200
#define VMH_TCP_STATE_MAX_QUEUE (64u << 20) /* bytes in one direction; more is not believed */

/* flags: what was agreed upon in the SYNs */
#define VMH_TCP_F_WSCALE     0x00000001u /* snd_wscale and rcv_wscale count */
#define VMH_TCP_F_SACK       0x00000002u
#define VMH_TCP_F_TIMESTAMPS 0x00000004u
/* how far the closing has come */
#define VMH_TCP_F_FIN_WANTED 0x00000010u /* shutdown(SHUT_WR) or close was called */
#define VMH_TCP_F_FIN_SENT   0x00000020u /* it went out at least once: implies FIN_WANTED and snd_nxt = snd_una + send_len */
#define VMH_TCP_F_FIN_ACKED  0x00000040u /* implies FIN_SENT and send_len = 0 */
#define VMH_TCP_F_PEER_FIN   0x00000080u /* the peer's FIN came, in order */
#define VMH_TCP_F_SHUT_RD    0x00000100u /* the program called shutdown(SHUT_RD) */
/* options of the socket */
#define VMH_TCP_F_NODELAY    0x00001000u
#define VMH_TCP_F_CORK       0x00002000u
#define VMH_TCP_F_QUICKACK   0x00004000u /* acknowledge at once: TCP_QUICKACK 1, and to stay so */
#define VMH_TCP_F_KEEPALIVE  0x00008000u
#define VMH_TCP_F_LINGER     0x00010000u /* linger_s counts */
#define VMH_TCP_F_ALL        0x0001f1f7u

struct vmh_tcp_state {
	uint32_t magic;
	uint16_t version;
	uint16_t header_len;    /* VMH_TCP_STATE_LEN */
	uint32_t flags;
	uint8_t family;         /* AF_INET 2, AF_INET6 10 */
	uint8_t state;          /* as in linux/tcp_states.h: ESTABLISHED 1, FIN_WAIT1 4, FIN_WAIT2 5, CLOSE_WAIT 8, ... */
	uint8_t snd_wscale;     /* shift of windows the peer announces */
	uint8_t rcv_wscale;     /* shift of those that we announce */
	uint8_t laddr[16];      /* IPv4: the first four bytes */
	uint8_t raddr[16];
	uint16_t lport;         /* network order */
	uint16_t rport;
	/* sequence numbers and windows */
	uint32_t snd_una;
	uint32_t snd_nxt;
	uint32_t rcv_nxt;
	uint32_t snd_wl1;
	uint32_t snd_wnd;
	uint32_t max_window;    /* largest snd_wnd ever seen */
	uint32_t rcv_wnd;
	uint32_t rcv_wup;       /* rcv_nxt when the window was last announced */
	/* queues */
	uint32_t send_len;
	uint32_t recv_len;
	uint8_t keep_cnt;       /* TCP_KEEPCNT */
	uint8_t ttl;            /* IP_TTL */
	uint8_t tos;            /* IP_TOS */
	uint8_t retries;        /* of the oldest unacknowledged segment, in a row */
	uint32_t mss;           /* what the peer's SYN allowed (TCPOPT_MAXSEG of TCP_REPAIR_OPTIONS) */
	uint32_t snd_mss;       /* what is in use: also limited by the path, options subtracted */
	uint32_t rcv_mss;       /* what our SYN allowed */
	uint32_t pmtu;          /* of the path, IP header included; 0 unknown */
	/* timestamps */
	uint32_t tsval_now;
	uint32_t ts_recent;     /* the peer's clock as last echoed; 0 unknown (TCP_REPAIR does not tell) */
	/* timers and congestion: hints, a kernel socket starts anew */
	uint32_t srtt_us;       /* 0 unknown */
	uint32_t rttvar_us;
	uint32_t rto_us;
	uint32_t cwnd;          /* bytes */
	uint32_t ssthresh;      /* bytes */
	/* options of the socket */
	uint32_t keep_idle_s;   /* TCP_KEEPIDLE */
	uint32_t keep_intvl_s;  /* TCP_KEEPINTVL */
	uint32_t user_timeout_ms; /* TCP_USER_TIMEOUT, 0 none */
	uint32_t linger_s;
	uint32_t sndbuf;        /* bytes, as the program asked; 0 never asked */
	uint32_t rcvbuf;
	uint32_t error;         /* pending SO_ERROR, an errno */
	/* statistics go on counting: bytes as TCP_INFO has them */
	uint64_t bytes_acked;
	uint64_t bytes_received;
	uint32_t segs_out;
	uint32_t segs_in;
	uint32_t retransmits;
	uint32_t tsval_idle;    /* ms: tsval_now less this is the last TSval that was sent; 0 also: not known */
};
_Static_assert(sizeof(struct vmh_tcp_state) == VMH_TCP_STATE_LEN, "both sides of the service agree on this");
#endif
