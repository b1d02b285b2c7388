/* What tcps_listen.c, tcps_accept.c and tcps_listen_home.c share. */
#ifndef VMH_TCPS_LISTEN_H
#define VMH_TCPS_LISTEN_H
#include "vmh_tcps.h"
#include "vmh_tcps_inherit.h"

#define VMH_TLISTEN_RINGS_MAX 8
#define VMH_TLISTEN_WAITING_MAX 512

struct vmh_tlisten {
	struct vmh_tname name;
	unsigned families;       /* of a wildcard: VMH_TCP_IPV* */
	uint32_t ifindex;        /* 0: all rings of the lane */
	uint32_t lane;
	uint32_t flow_id;
	bool syns_left;          /* by a rule that leaves SYNs to the kernel */
	bool rings_go;           /* nobody can stay there */
	bool back;               /* the kernel's alone for now: it may come to rings again */
	unsigned why;            /* of one that is on its way home, and stays for what is half open */
	uint64_t until;          /* the same: so long at most; else 0 */
	unsigned nrings;
	struct {
		struct vmh_tring *tring;
		struct vmh_tcp_conn *conn;
		uint32_t ifindex;
	} r[VMH_TLISTEN_RINGS_MAX];
	struct vmh_inherited inherited; /* io */
	/* the kernel's by now, accepted by nobody yet; io */
	unsigned first, nwaiting;
	int waiting[VMH_TLISTEN_WAITING_MAX];
};

void vmh_tlisten_stop(struct vmh_tlisten *l);                /* io held: no ring listens any more */
bool vmh_tlisten_rings_have(const struct vmh_tlisten *l);    /* io held: connections to accept */
/* A descriptor, -EAGAIN, or an error of socket(2). */
int vmh_tlisten_from_ring(struct vmh_tcps *s, int flags, struct vmh_tcp_addr *a);
int vmh_tlisten_next_waiting(struct vmh_tlisten *l);         /* io held; a descriptor, or -EAGAIN */
#endif
