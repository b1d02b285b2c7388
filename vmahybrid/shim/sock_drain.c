/* VMA_RX_CQ_DRAIN_RATE_NSEC: who wants a socket's queue to show what has arrived in time looks at the rings before the
 * queue is empty, and pays for it with this much polling and no more. */
#include "vmh_params.h"
#include "vmh_sock.h"

void vmh_sock_drain_at_rate(struct vmh_sock *s)
{
	uint64_t now = vmh_now_ns();

	if (now - VMH_GET(s->drained_ns) < (uint64_t)vmh_params.rx_cq_drain_rate_nsec)
		return;
	VMH_SET(s->drained_ns, now);
	vmh_rings_poll(vmh_poll_batch());
}
