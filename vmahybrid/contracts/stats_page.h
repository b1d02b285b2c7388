/* Statistics page: one file per process (VMA_STATS_SHMEM_DIR/vmastat.<pid>), made and written by the
 * shim, handed to the service as an fd, read there with pread (never mapped: the file is the
 * program's and may shrink). Who may write the file gives the program orders in it. Contract page: docs/stats-page.md. All counters 64 bit, relaxed.
 */
#ifndef VMH_STATS_PAGE_H
#define VMH_STATS_PAGE_H

#define VMH_STATS_MAGIC 0x31534d56 /* "VMS1" */
#define VMH_STATS_VERSION 9
#define VMH_STATS_RINGS 256 /* as many as a service grants by default; libvma has 16 */
#define VMH_STATS_EPOLLS 32
#define VMH_STATS_GROUPS 64      /* per socket, first ones */
#define VMH_STATS_OPEN 4096

struct vmh_sock_stats {
	/* description; `used` is written last on creation, cleared first on close */
	unsigned int used;
	int fd;
	unsigned long long inode;
	unsigned char proto;         /* IPPROTO_UDP, IPPROTO_TCP */
	unsigned char family;        /* 4, 6 */
	unsigned char offloaded;     /* 1: a flow of this socket is on a ring (RX or TX) */
	unsigned char blocking;
	unsigned char mc_loop;
	unsigned char state;         /* TCP state number of the manual, 0 for UDP */
	unsigned char rx_offloaded;
	unsigned char tx_offloaded;
	unsigned int reason;         /* reasons.def: why not (or not wholly) offloaded */
	unsigned int reason_detail;  /* sockopt: level << 16 | optname */
	unsigned short local_port;   /* network order */
	unsigned short remote_port;
	unsigned int flow_id;        /* 0: none */
	unsigned char local_addr[16];
	unsigned char remote_addr[16];
	unsigned char mc_if[16];     /* zero: not set */
	unsigned int ngroups;
	unsigned int thread_rx;      /* last tid that received / sent */
	unsigned int thread_tx;
	unsigned int ring_id;
	unsigned int tx_os_reason;   /* reasons.def: why the kernel sent the last datagram that it sent; 0: none yet */
	unsigned char rx_many, tx_many; /* more than one thread has received / sent */
	unsigned short pad;
	unsigned int groups[VMH_STATS_GROUPS]; /* IPv4, network order */
	/* counters (meaning: research of the manual; one per successful call unless said) */
	unsigned long long rx_packets, rx_bytes, rx_eagain, rx_errors;
	unsigned long long rx_poll_hit, rx_poll_miss;
	unsigned long long rx_os_packets, rx_os_bytes, rx_os_eagain, rx_os_errors;
	unsigned long long tx_packets, tx_bytes, tx_eagain, tx_errors, tx_drops;
	unsigned long long tx_os_packets, tx_os_bytes, tx_os_eagain, tx_os_errors;
	unsigned long long tx_dummy;
	unsigned long long rx_drop_packets, rx_drop_bytes;       /* over SO_RCVBUF */
	unsigned long long rx_migrations, tx_migrations;
	unsigned long long retransmits;
	/* gauges */
	unsigned long long rx_ready_packets, rx_ready_bytes;
	unsigned long long rx_ready_packets_max, rx_ready_bytes_max;
	unsigned long long rx_limit;                             /* bytes */
	unsigned long long tx_ready_bytes;
	unsigned long long rx_zcopy_packets;
};

struct vmh_ring_stats {
	unsigned int used;
	unsigned int ring_id;
	unsigned int ifindex;
	unsigned int kind;           /* VMH_RING_* of control.h */
	unsigned int xdp_mode;
	unsigned int flags;
	char ifname[16];
	unsigned long long rx_packets, rx_bytes;                 /* bytes with headers */
	unsigned long long tx_packets, tx_bytes;
	unsigned long long kicks;                                /* wake-up syscalls for TX */
	unsigned long long interrupts_requested, interrupts_received; /* sleeps armed / woken */
	unsigned long long drained_max;                          /* most frames in one poll */
	unsigned long long rx_no_socket;                         /* frames no socket wanted */
	unsigned long long rx_bad;                               /* frames that did not parse */
	unsigned long long rx_dropped;                           /* no room in the socket */
	unsigned long long tx_full;
	unsigned long long rx_tcp_kept;                          /* frames whose TCP payload stayed in them until it was read */
	unsigned long long rx_tcp_copied;                        /* frames whose TCP payload was copied before, to free them */
	unsigned long long rx_tcp_merged;                        /* frames that were one segment with an earlier one (GRO) */
	unsigned long long tx_tcp_resent;                        /* TCP segments sent again */
	/* verbs rings only, like mod_count, mod_usec and dm_size */
	unsigned long long cq_errors;                            /* completions with an error, flushes apart */
	unsigned long long rx_tagged;                            /* frames whose flow tag named the socket */
	unsigned long long rx_hw_csum;                           /* frames whose checksums the device verified */
	unsigned long long tx_inline;                            /* frames sent inline */
	unsigned long long dm_packets, dm_bytes, dm_full;        /* device memory: frames sent, bytes, no room */
	unsigned long long pool_rx_free, pool_tx_free;           /* gauges, frames */
	unsigned long long pool_rx_empty, pool_tx_empty;         /* requests that failed */
	unsigned long long queue_len;                            /* drained, not yet taken */
	unsigned long long mod_count, mod_usec;                  /* gauges: interrupt moderation of the receive CQ */
	unsigned long long dm_size;                              /* gauge: bytes of device memory */
};

struct vmh_iomux_stats {
	unsigned int used;
	int epfd;                    /* epoll only */
	unsigned int thread;         /* last tid that called */
	unsigned char many;          /* more than one thread has called */
	unsigned char pad[3];
	unsigned long long rx_ready, os_rx_ready;
	unsigned long long poll_hit, poll_miss;
	unsigned long long timeouts, errors;
	unsigned long long polling_percent;
};

/* A TCP connection that began on a ring, and of which the service has not been told by itself yet: whom to tell when the
 * program is killed. `used` as in a socket's slot. */
struct vmh_open_name {
	unsigned int used;
	unsigned short local_port;   /* network order */
	unsigned short remote_port;
	unsigned char local_addr[16];
	unsigned char remote_addr[16];
};

struct vmh_stats_page {
	unsigned int magic;
	unsigned int version;
	unsigned int size;           /* of the whole file */
	unsigned int pid;
	unsigned int nsocks;         /* slots that follow the header */
	unsigned int sock_size;      /* sizeof(struct vmh_sock_stats) */
	unsigned int state;          /* 0 kernel only, 1 connected to a service */
	unsigned int reason;         /* why kernel only */
	unsigned long long session;
	unsigned long long started_ns; /* CLOCK_REALTIME */
	unsigned long long socks_over; /* sockets that found no slot */
	unsigned long long calls_home; /* homecomings */
	char comm[16];
	/* Written by others, too: vma_stats and the service. `asked` grows when they have; the program follows, and says
	 * up to where. */
	unsigned int log_level;
	unsigned int log_details;
	unsigned int asked, taken;
	unsigned int dump_wanted;    /* 1: of dump_fd (0: all), at dump_level, into the log; then 0 again */
	int dump_fd, dump_level;
	unsigned int listens;        /* 1: the internal thread hears the service */
	struct vmh_iomux_stats select, poll;
	struct vmh_iomux_stats epoll[VMH_STATS_EPOLLS];
	struct vmh_ring_stats rings[VMH_STATS_RINGS];
	struct vmh_sock_stats socks[]; /* nsocks of them; VMH_STATS_OPEN of struct vmh_open_name follow */
};

#endif
