/* ICMP errors about connections that the kernel does not know, as those from the SYN are. The kernel believes such an
 * error of a socket of its own only; of others it counts it (InErrors of RFC 2011, and of RFC 2466). A count that has
 * grown while a SYN went unanswered is reason enough to let the kernel open that connection: its own SYN is answered by
 * the same error. One that was about another connection costs an unanswered SYN its ring, no more. */
#include "vmh_fd.h"
#include "vmh_iomux_int.h"
#include "vmh_tcps.h"
#include <inttypes.h>
#include <stdio.h>

#define BYTES 8192          /* of either file: twice what they have */
#define HEARD_NS 1500000000u /* since the SYN that is answered by it */

static _Atomic uint64_t counted[2]; /* of IPv4 and IPv6 */

static uint64_t count_in(const char *text, bool v6)
{
	const char *at = strstr(text, v6 ? "Icmp6InErrors" : "\nIcmp: ");
	uint64_t n = 0;

	if (at && !v6) /* names, then values */
		at = strstr(at + 1, "\nIcmp: ");
	if (!at || sscanf(at, v6 ? "%*s %" SCNu64 : " Icmp: %*u %" SCNu64, &n) != 1)
		return 0;
	return n;
}

/* 0: it can't be read. */
static uint64_t count(bool v6)
{
	char *text = vmh_scratch_new(BYTES); /* zeros; the last one stays */
	uint64_t n;

	if (!text)
		return 0;
	vmh_file_load(v6 ? "/proc/thread-self/net/snmp6" : "/proc/thread-self/net/snmp", text, BYTES - 1, NULL);
	n = count_in(text, v6);
	vmh_scratch_free(text, BYTES);
	return n;
}

void vmh_ticmp_begin(void)
{
	atomic_store(&counted[0], count(false));
	atomic_store(&counted[1], count(true));
}

bool vmh_ticmp_heard(bool v6, uint64_t now)
{
	static uint64_t looked_ns[2], heard_ns[2];
	uint64_t n;

	if (looked_ns[v6] != now) { /* once for all that are looked at now */
		looked_ns[v6] = now;
		n = count(v6);
		if (n > atomic_exchange(&counted[v6], n))
			heard_ns[v6] = now;
	}
	return heard_ns[v6] && now - heard_ns[v6] < HEARD_NS;
}
