/* Finding the libc functions that we stand in front of. */
#include "vmh_real.h"
#include <dlfcn.h>

struct vmh_real vmh_real_table;
_Atomic int vmh_real_ready;

/* ISO C has no cast from object to function pointer: copy the bits. */
void vmh_real_find(void *slot, const char *name)
{
	void *sym = dlsym(RTLD_NEXT, name);

	memcpy(slot, &sym, sizeof(sym));
}

void vmh_real_init(void)
{
#define X(ret, name, args) vmh_real_find(&vmh_real_table.name, #name);
	VMH_REAL_LIST(X)
#undef X
	if (!vmh_real_table.fcntl64)
		vmh_real_table.fcntl64 = vmh_real_table.fcntl;
	/* two threads may both come here: they write the same values */
	atomic_store_explicit(&vmh_real_ready, 1, memory_order_release);
}
