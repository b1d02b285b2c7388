/* Namespaces: the kernel lets only a process of one thread enter or make some of them. Ours is out of the way meanwhile. */
#include "vmh_obj.h"
#include "vmh_real.h"
#include "vmh_worker.h"
#include <sched.h>

static bool for_one_thread(int r)
{
	return r < 0 && (errno == EINVAL || errno == EUSERS) && vmh_worker_step_aside();
}

static int done(int r)
{
	int saved = errno;

	vmh_worker_step_back();
	errno = saved;
	return r;
}

VMH_EXPORT int unshare(int flags)
{
	static int (*real)(int);
	int r;
	bool files = flags & CLONE_FILES && vmh_process_has_threads();

	if (!real)
		vmh_real_find(&real, "unshare");
	if (files && vmh_worker_and_one()) { /* a program of one thread has them alone already; ours must close with it */
		flags &= ~CLONE_FILES;
		files = false;
	}
	r = real(flags);
	if (!r && files)
		vmh_fdtab_part();
	return for_one_thread(r) ? done(real(flags)) : r;
}

VMH_EXPORT int setns(int fd, int type)
{
	static int (*real)(int, int);
	int r;

	if (!real)
		vmh_real_find(&real, "setns");
	r = real(fd, type);
	return for_one_thread(r) ? done(real(fd, type)) : r;
}
