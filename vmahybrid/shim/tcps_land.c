/* Before TCP connections go home: what is under way lands, as far as that helps. */
#include "vmh_base.h"
#include "vmh_tcps.h"
#include "vmh_tcps_info.h"
#include "vmh_tcps_move.h"

/* What the peer has not acknowledged is the kernel's as if it had sent it, so that it goes again after a timeout of
 * seconds, in pieces, if it is much. So for a moment nothing new goes, if that helps: acknowledgements come, and what is
 * lost is sent again. The rest the kernel sends by itself. Nor does the window move on for a peer that sends much: what it
 * has under way while the connection moves comes to the kernel in another order, and is sent again. */
#define FLIGHT_LIGHT (10 * 1460) /* the kernel's first congestion window */
#define FLIGHT_RTT_US 5000
#define FLIGHT_STILL_NS 6000000u /* none has come for so long */
#define FLIGHT_NAP_NS 50000
#define COMES_MS 5               /* the last of it came so lately */
#define COMES_LEAST_NS 2000000u  /* no more is under way when nothing came for so long, and two round trips */

struct flight {
	struct vmh_tcps *s;
	bool comes;         /* it has much on its way to us */
	uint64_t in, in_ns; /* bytes that have come, and when the last ones did */
};

/* False: there is nothing to be done for it. */
static bool flight_info(struct vmh_tcps *s, struct vmh_tcp_info *i)
{
	return vmh_tcps_state(s) == VMH_TCPS_RING && vmh_tcps_info(s, i) && i->state != VMH_TCP_SYN_SENT &&
	       i->rtt_us <= FLIGHT_RTT_US;
}

void vmh_tmove_settle(struct vmh_tcps *s, bool on)
{
	vmh_lock(&s->io);
	if (s->conn && vmh_tcps_state(s) == VMH_TCPS_RING)
		vmh_tcp_settle(s->conn, on);
	vmh_unlock(&s->io);
}

/* Has the peer sent much at a time until now? */
static void take_note(struct flight *f, struct vmh_tcps *s, uint64_t now)
{
	struct vmh_tcp_info i;

	*f = (struct flight){ .s = s, .in_ns = now };
	if (!flight_info(s, &i))
		return;
	f->in = i.bytes_received;
	f->comes = i.ms_since_received < COMES_MS && i.bytes_received / (VMH_GET(s->watch.turns) + 1) > FLIGHT_LIGHT;
}

/* Bytes under way, at most. */
static uint64_t under_way(struct flight *f, uint64_t now)
{
	struct vmh_tcp_info i;
	uint64_t still = COMES_LEAST_NS, bytes = 0;

	if (!flight_info(f->s, &i))
		return 0;
	if (i.snd_wnd && i.unacked > FLIGHT_LIGHT)
		bytes = i.unacked;
	if (i.bytes_received != f->in)
		f->in_ns = now;
	f->in = i.bytes_received;
	if (2000ull * i.rtt_us > still)
		still = 2000ull * i.rtt_us;
	f->comes &= i.rcv_wnd >= i.rcv_mss && now - f->in_ns < still;
	return bytes + (f->comes ? i.rcv_wnd : 0);
}

/* How long it took. */
uint64_t vmh_tmove_land(struct vmh_tcps *const *v, int n, unsigned reason, uint64_t most)
{
	const struct timespec nap = { 0, FLIGHT_NAP_NS };
	uint64_t began = vmh_now_ns(), now = began, moved = began, before = UINT64_MAX;
	struct flight f[VMH_HOMES_MAX];

	if (vmh_tcps_trouble(reason) || !most)
		return 0;
	for (int i = 0; i < n; i++) {
		take_note(f + i, v[i], now);
		if (under_way(f + i, now))
			vmh_tmove_settle(v[i], true);
	}
	for (;;) {
		uint64_t flight = 0;

		for (int i = 0; i < n; i++)
			flight += under_way(f + i, now);
		if (flight < before)
			moved = now;
		before = flight;
		if (!flight || now - began > most || now - moved > FLIGHT_STILL_NS)
			return now - began;
		if (!vmh_rings_poll(64))
			vmh_sys(SYS_nanosleep, &nap, NULL);
		now = vmh_now_ns();
	}
}
