/* Lanes: which of the process' rings a socket uses (VMA_RING_ALLOCATION_LOGIC_TX and _RX).
 *
 * On each interface a lane has one ring of its own, made when it is first asked for. Sockets of one key (the address,
 * the thread that bound the socket, and so on) share a lane; by default there is one for all. Where the service gives
 * no further ring, or VMA_RING_LIMIT_PER_INTERFACE is reached, further keys share the lanes that are there, the one
 * with the fewest keys first.
 */
#ifndef VMH_LANE_H
#define VMH_LANE_H
#include "vmh_base.h"
#include "vmh_params.h"
#include "vmh_ring.h"

enum vmh_lane_logic {
	VMH_LANE_PER_INTERFACE = 0,
	VMH_LANE_PER_IP = 1,
	VMH_LANE_PER_SOCKET = 10,
	VMH_LANE_PER_THREAD = 20,
	VMH_LANE_PER_CORE = 30,
	VMH_LANE_PER_CORE_ATTACH = 31,
};
enum vmh_lane_direction { VMH_LANE_RX, VMH_LANE_TX };

struct vmh_lane_key;

/* What a socket has of a lane, in one direction. All zero: none yet. Object lock, but for the counting of
 * accesses, of which a lost one does no harm. */
struct vmh_lane_use {
	struct vmh_lane_key *key;
	uint64_t value;       /* of the key */
	uint64_t candidate;   /* what the key would be for who accesses the ring now, + 1; 0: nobody else does */
	int32_t left;         /* accesses before the next look */
};

static inline int64_t vmh_lane_logic(enum vmh_lane_direction d)
{
	return d == VMH_LANE_RX ? vmh_params.ring_allocation_logic_rx : vmh_params.ring_allocation_logic_tx;
}
/* The number of the lane; the first call takes one, by the calling thread or core, `fd` or `addr`, and it stays. Per
 * address it follows the address. */
unsigned vmh_lane_of(struct vmh_lane_use *u, enum vmh_lane_direction d, int fd, in_addr_t addr);
void vmh_lane_leave(struct vmh_lane_use *u);
/* The caller's thread or core instead of the former; false: it is the same. */
bool vmh_lane_move(struct vmh_lane_use *u, enum vmh_lane_direction d);
bool vmh_lane_look(struct vmh_lane_use *u, enum vmh_lane_direction d);

/* One access to the ring. Have VMA_RING_MIGRATION_RATIO and some more come from another thread or core? */
static inline bool vmh_lane_due(struct vmh_lane_use *u, enum vmh_lane_direction d)
{
	int32_t left;

	if (vmh_likely(vmh_lane_logic(d) < VMH_LANE_PER_THREAD))
		return false;
	left = VMH_GET(u->left);
	if (vmh_likely(left > 0)) {
		VMH_SET(u->left, left - 1);
		return false;
	}
	return vmh_lane_look(u, d);
}

/* The service gave no ring for a lane on an interface where the process has others: no more lanes for a while. */
void vmh_lane_refused(const char *ifname, unsigned reason);
/* The internal thread, started by one that is attached to a core: it is not. */
void vmh_lane_detach(void);
void vmh_lane_fork_child(void);
#endif
