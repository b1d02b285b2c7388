/* How long the program's calls wait for a service that does not answer: 3 s in all, not 3 s each time.
 * Slow answers use the same budget up, and it comes back with time. The internal thread, which keeps no call
 * waiting, has a second for each answer even then, and what it waits costs nothing unless no answer comes.
 * Guarded by the control lock. */
#ifndef VMH_PATIENCE_H
#define VMH_PATIENCE_H
#include "vmh_base.h"

uint64_t vmh_patience_ns(uint64_t now, bool internal); /* how long the next answer may take */
void vmh_patience_spent(uint64_t start, uint64_t now, bool timed_out, bool internal);
uint64_t vmh_patience_retry_ns(uint64_t usual); /* pause before the next connection; rarer after timeouts */
#endif
