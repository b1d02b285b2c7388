/* Rings on raw packet QPs (libibverbs), as the rest of the shim sees them: finding the device of an interface, making
 * the ring, the flow rules that steer to it, and what the internal thread does for them.
 *
 * libibverbs is never linked: dlopen takes what the program's library path has, a NIC's or the software device's.
 */
#ifndef VMH_VERBS_H
#define VMH_VERBS_H
#include "vmh_ip.h"
#include "vmh_ring.h"

struct vmh_flow;
struct vmh_sock;
struct verbs_dev;

/* The opened device of the interface, on which a raw packet QP was made and destroyed again; NULL and *reason
 * (reasons.def) without one. name takes its name in either case, empty where there is no device at all. The caller
 * gives it to vmh_ring_verbs_open or to vmh_verbs_dev_close. */
struct verbs_dev *vmh_verbs_probe(unsigned ifindex, const char *ifname, char name[VMH_VERBS_DEVICE], unsigned *reason);
void vmh_verbs_dev_close(struct verbs_dev *dev);
/* The service is about to take the process' network namespace for the session's. */
void vmh_verbs_session_begins(void);

/* From a grant of kind VMH_RING_VERBS. Takes dev over, on failure too. Appends the ring to vmh_rings. 0 / -errno. */
int vmh_ring_verbs_open(const struct vmh_msg_ring_reply *grant, const char *ifname, struct verbs_dev *dev,
			struct vmh_ring **out);

/* After the service has attached the flow (object lock held): steers it to the verbs rings that it concerns. 0, or
 * VMH_R_VERBS_FAILED if there are such rings and none would take it. Wildcards follow addresses and new rings. */
unsigned vmh_verbs_attach(const struct vmh_flow *f, struct vmh_sock *s);
/* The same for a connection, or a local port of the program's own ones. */
unsigned vmh_verbs_attach_tcp(uint32_t flow_id, const struct vmh_msg_attach *req);

struct vmh_verbs_peer {
	struct vmh_ip addr;
	in_port_t port;
};
/* A connection of such a port is the kernel's from now on: no rule for the port any more, but one for each that is left. */
void vmh_verbs_narrow(uint32_t flow_id, const struct vmh_verbs_peer *gone, const struct vmh_verbs_peer *left, unsigned n);
/* Before the service detaches it, or when it has: nothing more is steered to a QP when this returns. */
void vmh_verbs_detach(uint32_t flow_id);

/* For the internal thread. follow: wildcard rules follow the addresses of the interface. failed: a ring whose device
 * or QP is dead, or which no flow can be steered to; NULL if there is none. forget: the session and all its flows are over, and the rings closed. */
bool vmh_verbs_any(void);
void vmh_verbs_follow(void);
struct vmh_ring *vmh_verbs_failed(void);
void vmh_verbs_forget(void);
void vmh_verbs_fork_child(void); /* before vmh_rings_fork_child */

/* sock.c: as vmh_deliver; where the device named the socket by the flow's tag, hint is it, and *used tells whether it
 * was the receiver without a look at others. */
VMH_HOT int vmh_deliver_hint(struct vmh_ring *r, struct vmh_buf *b, struct vmh_sock *hint, bool *used);
#endif
