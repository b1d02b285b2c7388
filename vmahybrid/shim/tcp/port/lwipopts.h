/* lwIP as the shim uses it: the TCP state machine and nothing else. IP, timers, demultiplexing, loss recovery and
 * congestion control are ours (core.h); so only what tcp.c, tcp_in.c, tcp_out.c and pbuf.c ask for is set here. */
#ifndef VMH_LWIPOPTS_H
#define VMH_LWIPOPTS_H

#define LWIP_DONT_PROVIDE_BYTEORDER_FUNCTIONS 1
#define NO_SYS 1
#define SYS_LIGHTWEIGHT_PROT 0
#define LWIP_TIMERS 0
#define LWIP_SOCKET 0
#define LWIP_NETCONN 0
#define LWIP_IPV6 0
#define LWIP_UDP 0
#define LWIP_RAW 0
#define LWIP_ARP 0
#define LWIP_ICMP 0
#define LWIP_STATS 0
#define IP_REASSEMBLY 0
#define IP_FRAG 0

#define MEM_ALIGNMENT 8
#define MEM_CUSTOM_ALLOCATOR 1
#define MEM_CUSTOM_MALLOC core_malloc
#define MEM_CUSTOM_FREE core_free
#define MEM_CUSTOM_CALLOC core_calloc
#define MEMP_MEM_MALLOC 1
#define LWIP_SUPPORT_CUSTOM_PBUF 1
#define LWIP_NETIF_TX_SINGLE_PBUF 1 /* a segment is one piece of memory */
#define PBUF_LINK_HLEN 34 /* Ethernet, and what an IPv6 header is longer than lwIP knows */
#define PBUF_POOL_SIZE 0

#define TCP_MSS 8960
#define LWIP_WND_SCALE 1
#define TCP_RCV_SCALE 7
#define TCP_WND (4 * 1024 * 1024)
#define TCP_SND_BUF (4 * 1024 * 1024)
#define TCP_SND_QUEUELEN 32000
#define TCP_SNDLOWAT 4096
#define TCP_LISTEN_BACKLOG 0 /* backlogs are bounded by demux.c */
#define TCP_QUEUE_OOSEQ 1
#define TCP_OOSEQ_MAX_PBUFS 4096
#define LWIP_TCP_SACK_OUT 1
#define LWIP_TCP_MAX_SACK_NUM 4
#define LWIP_TCP_TIMESTAMPS 1
#define LWIP_TCP_KEEPALIVE 1
#define LWIP_TCP_PCB_NUM_EXT_ARGS 1
#define LWIP_CHECKSUM_ON_COPY 1
#define LWIP_CHKSUM core_chksum
#define LWIP_CHECKSUM_CTRL_PER_NETIF 1
#define LWIP_HOOK_FILENAME "hooks.h"

#ifndef VMH_TCP_ASSERT
#define LWIP_NOASSERT 1
#endif
#endif
