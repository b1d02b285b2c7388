/* The session with the service: lazy, reconnecting, never in the way. See contracts/control.h. */
#ifndef VMH_CONTROL_H_SHIM
#define VMH_CONTROL_H_SHIM
#include "vmh_base.h"
#include "vmh_ip.h"
#include "control.h"
#include "vmh_ring.h"

/* Connects at the first call (and after a loss, at most once a second). 0 when a session is open, else
 * the reason. */
VMH_HOT unsigned vmh_session_open(void);
/* A socket may go by a ring: from here on the internal thread attends to the session. A program whose sockets
 * are all local never gets one: a second thread would cost each of its system calls an atomic reference. */
VMH_COLD void vmh_session_serve(void);
VMH_COLD bool vmh_session_told(void);        /* the service has said something, or is gone, and nobody has read it */
VMH_HOT uint32_t vmh_session_id(void);       /* counts sessions; 0 = none now */
unsigned vmh_session_reason(void);   /* why there is none */
/* The ring of a lane on ifindex, asked for at the first call; another lane's there where the service gives no more.
 * NULL and *reason where there is none. */
struct vmh_ring *vmh_session_ring(unsigned ifindex, unsigned lane, unsigned *reason);
int vmh_session_attach(const struct vmh_msg_attach *req, int fd, uint32_t *flow_id, unsigned *reason);
#define VMH_TAKES_MAX 64
struct vmh_session_attach {
	struct vmh_msg_attach req;
	int fd, err;   /* err: 0 or -errno */
	uint32_t flow_id;
	unsigned reason;
};
void vmh_session_attach_all(struct vmh_session_attach *v, int n); /* n: from 1 to VMH_TAKES_MAX */
void vmh_session_detach(uint32_t flow_id, unsigned cause); /* returns when nothing more is steered */
#define VMH_DETACHES_MAX 128
void vmh_session_detach_all(const uint32_t *flow_ids, int n, unsigned cause); /* up to so many, in the time of two or three */
int vmh_session_reinject(struct vmh_msg_reinject *req, int fd); /* fills the header in; 0 / -errno */
/* The state of a TCP connection that changes sides (tcp_state.h), in memory of its own. */
struct vmh_tcp_blob {
	void *p; /* NULL: none */
	size_t len;
};
void vmh_tcp_blob_free(struct vmh_tcp_blob *state);
bool vmh_session_tcp_ready(void); /* what connections need to go home is there, whatever the program's limits will be */
/* Of a TCP connection (vmh_tcps.h): its socket is parked, *state the connection, the caller's; and back. 0, -errno;
 * -ENOTCONN: there is no service. */
struct vmh_session_take {
	int fd;
	uint32_t flow_id;
	unsigned why;
	int err;       /* 0 or -errno */
	unsigned reason;
	struct vmh_tcp_blob state; /* also with -ENOTCONN, where the service had got so far: the socket may be empty */
};
/* Several in the time of one, which nearly all waits; n: from 1 to VMH_TAKES_MAX. */
void vmh_session_tcp_take(struct vmh_session_take *v, int n);
int vmh_session_tcp_home(int fd, const struct vmh_tcp_blob *state, uint32_t flow_id, unsigned ifindex, unsigned reason);
#define VMH_HOMES_MAX 32
struct vmh_session_home {
	int fd;
	uint32_t flow_id;
	unsigned ifindex, reason;
	int err;       /* as of vmh_session_tcp_home() */
	struct vmh_tcp_blob state; /* the caller's */
};
/* The same; n: from 1 to VMH_HOMES_MAX */
void vmh_session_tcp_home_all(struct vmh_session_home *v, int n);
/* A connection that nobody has accepted, and its ticket (tcps_ticket.c): 0 or -errno */
int vmh_session_tcp_keep(int fd, int ticket);
/* What a ticket stands for: a descriptor or -errno. The ticket is closed then, but for -ENOTCONN, and -EPERM: nothing is
 * known of it */
int vmh_session_tcp_fetch(int ticket);
/* The kernel socket of a connection that has ended on the ring is as if new then. 0, or -errno. */
int vmh_session_tcp_renew(int fd);
/* What a ring got for a connection that is the kernel's again, struct vmh_tcp_frame; fills header and len in. 0 / -errno */
int vmh_session_tcp_frames(struct vmh_msg_tcp_frames *req, int fd, const struct vmh_tcp_blob *frames);
/* Connections that began on a ring, for the kernel's list of sockets; and not any more. fds: req->n */
int vmh_session_tcp_show(struct vmh_msg_tcp_show *req, const int *fds, struct vmh_msg_tcp_show_reply *rep);
void vmh_session_tcp_hide(struct vmh_msg_tcp_hide *req);
int vmh_session_neigh(unsigned ifindex, in_addr_t addr);   /* 0 when resolved, -errno */
int vmh_session_neigh_of(unsigned ifindex, const struct vmh_ip *addr);
void vmh_session_fork_child(void);   /* drop the parent's connection and rings */
void vmh_session_fini(void);
void vmh_session_lock(void);         /* around fork */
void vmh_session_unlock(void);
void vmh_session_unlock_fork_child(void);
#endif
