/* Asynchronous cancellation ends a thread anywhere, and libc's signal for it can't be put off as others are (signal.c). A
 * thread with that type has the deferred one as long as it holds a lock or an object of ours. */
#include "vmh_lock.h"
#include "vmh_main.h"
#include <pthread.h>

VMH_EXPORT int pthread_setcanceltype(int type, int *before)
{
	int err = vmh_cancel_type(type, before);

	if (!err)
		vmh_held.async_cancel = type == PTHREAD_CANCEL_ASYNCHRONOUS;
	return err;
}
