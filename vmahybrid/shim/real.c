/* Finding the libc functions that we stand in front of. */
#include "vmh_real.h"
#include <dlfcn.h>
#include <gnu/libc-version.h>

struct vmh_real vmh_real_table;
VMH_EACH_CALL _Atomic int vmh_real_ready;
VMH_EACH_CALL bool vmh_real_is_libc;

/* ISO C has no cast from object to function pointer: copy the bits. */
void vmh_real_find(void *slot, const char *name)
{
	void *sym = dlsym(RTLD_NEXT, name);

	memcpy(slot, &sym, sizeof(sym));
}

/* Of the calls that vmh_real_is_libc is asked for. */
static bool all_are_libc(void)
{
	struct vmh_real *r = &vmh_real_table;
	void *slots[] = { &r->read, &r->write, &r->recv, &r->send, &r->readv, &r->writev, &r->recvfrom, &r->sendto,
			  &r->recvmsg, &r->sendmsg, &r->epoll_ctl };
	Dl_info libc, its;
	void *at;

	at = (void *)gnu_get_libc_version;
	if (!dladdr(at, &libc))
		return false;
	for (size_t i = 0; i < sizeof(slots) / sizeof(slots[0]); i++) {
		memcpy(&at, slots[i], sizeof(at));
		if (!at || !dladdr(at, &its) || its.dli_fbase != libc.dli_fbase)
			return false;
	}
	return true;
}

void vmh_real_init(void)
{
#define X(ret, name, args) vmh_real_find(&vmh_real_table.name, #name);
	VMH_REAL_LIST(X)
#undef X
	if (!vmh_real_table.fcntl64)
		vmh_real_table.fcntl64 = vmh_real_table.fcntl;
	vmh_real_is_libc = all_are_libc();
	/* two threads may both come here: they write the same values */
	atomic_store_explicit(&vmh_real_ready, 1, memory_order_release);
}
