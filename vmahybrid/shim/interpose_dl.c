/* A library that is opened with RTLD_DEEPBIND, as each extension of PHP is, finds libc's calls before ours: it would meet
 * the parked sockets of connections on rings. So the flag is taken out, as other preloaded libraries do. */
#include "vmh_params.h"
#include "vmh_real.h"
#include <dlfcn.h>

/* A jump, not a call: libc's looks up, by where it returns to, whose paths and namespace it searches. */
VMH_EXPORT __attribute__((optimize("O2", "optimize-sibling-calls"))) void *dlopen(const char *file, int mode)
{
	if (vmh_unlikely(mode & RTLD_DEEPBIND) && !vmh_param_asked(VMH_PARAM_HYBRID_DEEP_BIND))
		mode &= ~RTLD_DEEPBIND;
	return vmh_real()->dlopen(file, mode);
}
