/* VMA_EXCEPTION_HANDLING: what becomes of a call that only the kernel can do on an offloaded socket. */
#include "vmh_exception.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <stdlib.h>
#include <unistd.h>

enum { EXIT_ON_STARTUP = -2, LOG_ERROR = 1, RETURN_ERROR = 2, ABORT = 3 }; /* others: log at debug, go home */

int vmh_exception(int fd, unsigned reason)
{
	int64_t mode = vmh_params.exception_handling;

	if (mode < LOG_ERROR) {
		vmh_debug("fd %d: %s", fd, vmh_reason_text(reason));
		return 0;
	}
	vmh_error("fd %d: %s [VMA_EXCEPTION_HANDLING=%d]", fd, vmh_reason_text(reason), (int)mode);
	if (mode == ABORT)
		abort();
	return mode == RETURN_ERROR ? -EINVAL : 0;
}

void vmh_exception_start(unsigned reason)
{
	if (vmh_params.exception_handling != EXIT_ON_STARTUP)
		return;
	vmh_error("not offloading: %s (%s): exit, as VMA_EXCEPTION_HANDLING=-2 asks", vmh_reason_text(reason),
		  vmh_params.hybrid_socket);
	_exit(1);
}
