/* What the steps of a move share: tcps_way.c, tcps_adopt.c, tcps_land.c, tcps_home.c, tcps_homes.c, tcps_leave.c,
 * tcps_stranded.c. Others call what vmh_tcps.h has. */
#ifndef VMH_TCPS_MOVE_H
#define VMH_TCPS_MOVE_H
#include "vmh_control.h"
#include "vmh_tcps.h"

#define VMH_LEFT_FRAMES 1024            /* of a ring, at the end of a move */
#define VMH_STRANDED_NS 10000000000u    /* that a connection waits for a service */
#define VMH_FLIGHT_NS 20000000u         /* that what is under way has to land: of one, or of those that go together */

/* tcps_way.c */
bool vmh_tmove_passes(unsigned reason);          /* by itself: the connection may be adopted later */
bool vmh_tmove_no_way(unsigned reason);          /* what an interface that is down, or away, leaves */
/* The ring and the way to the peer: 0, or why there is none. */
unsigned vmh_tmove_way(struct vmh_tcps *s, const struct vmh_tcp_addr *a, struct vmh_tcp_path *path, bool patient);
void vmh_tmove_note_rtt(struct vmh_tcps *s, const struct vmh_tcp_blob *state);
void vmh_tmove_recall_rtt(const struct vmh_tcps *s, const struct vmh_tcp_blob *state);

/* tcps_adopt.c. Object lock held. The service has ended, and left it frozen: true, and it waits for the next one, with the
 * state that is left (taken over, or freed) or as it is (NULL, or none). */
bool vmh_tmove_waits_for_thaw(struct vmh_tcps *s, int fd, struct vmh_tcp_blob *left);

/* tcps_land.c */
uint64_t vmh_tmove_land(struct vmh_tcps *const *v, int n, unsigned reason, uint64_t most); /* how long it took, ns */
void vmh_tmove_settle(struct vmh_tcps *s, bool on);

/* tcps_home.c */
/* On its way from a ring; the object lock is held. */
struct vmh_homing {
	struct vmh_tcps *s;
	bool must, may_stay;       /* on the ring, whatever keeps it there */
	struct vmh_tcps_stash *st;
	struct vmh_session_home home; /* .err: of it all */
};
bool vmh_homing_begins(struct vmh_homing *h);
void vmh_homing_ends(struct vmh_homing *h);
void vmh_homing_ask(struct vmh_session_home *home);
int vmh_homing_alone(struct vmh_homing h);       /* 0 or -errno */
bool vmh_tmove_is_home(const struct vmh_tcps *s);
struct vmh_tcp_blob vmh_tmove_end_of(const struct vmh_tcp_blob *state);
bool vmh_tmove_closed_unseen(struct vmh_tcps *s, unsigned reason);

/* tcps_leave.c. Object lock held. */
void vmh_tmove_leave(struct vmh_tcps *s, unsigned state, unsigned reason, bool abort_);
void vmh_tmove_keep_blob(struct vmh_tcps *s, struct vmh_tcp_blob blob);
void vmh_tmove_strand(struct vmh_tcps *s, struct vmh_tcp_blob blob, unsigned reason);
void vmh_tmove_lost(struct vmh_tcps *s, unsigned reason, int err);
void vmh_tmove_off_the_qp(struct vmh_tcps *s);
void vmh_tmove_at_home(struct vmh_tcps *s, unsigned reason, struct vmh_tcps_stash *st);
uint32_t vmh_tmove_flow(const struct vmh_tcps *s);

/* tcps_stranded.c */
extern _Atomic int vmh_tstranded_no_way_home;    /* some are stranded, most often since the kernel has no route, not even over lo */
extern _Atomic int vmh_tstranded_no_way_open;    /* some seek a route for their SYN */
int vmh_tstranded_home(struct vmh_tcps *s, unsigned reason, bool must); /* object lock held; 0 or -errno */
#endif
