/* What programs need that drive a ring without a service: an XSK of their own, granted to themselves. */
#ifndef LIVE_H
#define LIVE_H
#include "vmh_ring.h"

/* Generic XDP program on ifname that redirects IPv4 to an XSK on queue 0; the rest goes to the kernel.
 * Opens the ring on it. Ends the process with a message on failure. Everything vanishes with it. */
struct vmh_ring *live_open(const char *ifname, unsigned frames, unsigned ring_size);
void live_mac(const char *text, unsigned char mac[6]);
void live_die(const char *what, int err) __attribute__((noreturn));
#endif
