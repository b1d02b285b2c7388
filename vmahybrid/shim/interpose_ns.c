/* Namespaces: the kernel lets only a process of one thread enter or make some of them, so ours is out of the way meanwhile.
 * And rings are those of the network namespace in which the program began. */
#include "vmh_control.h"
#include "vmh_log.h"
#include "vmh_main.h"
#include "vmh_obj.h"
#include "vmh_real.h"
#include "vmh_ring.h"
#include "vmh_sock.h"
#include "vmh_tcps.h"
#include "vmh_tcps_spare.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <linux/nsfs.h>
#include <sched.h>

static bool for_one_thread(int r)
{
	return r < 0 && (errno == EINVAL || errno == EUSERS) && vmh_worker_step_aside();
}

static int stepped_back(int r)
{
	int saved = errno;

	vmh_worker_step_back();
	errno = saved;
	return r;
}

#define CLOSED_NS 300000000u
#define CLOSED_NAP_NS 500000

/* By the internal thread. A table that is copied before has them, too, and a ring stays bound as long. */
static void await_closed_rings(void)
{
	const struct timespec nap = { 0, CLOSED_NAP_NS };

	for (uint64_t end = vmh_now_ns() + CLOSED_NS; !vmh_rings_closed() && vmh_now_ns() < end;)
		vmh_sys(SYS_nanosleep, &nap, NULL);
}

void vmh_kernel_for_good(unsigned reason)
{
	int saved = errno;

	if (vmh_fdtab_borrowed())
		return;
	vmh_tspare_off();
	if (reason == VMH_R_SECCOMP || vmh_session_id() || atomic_load(&vmh_worker_runs) || vmh_process_has_threads()) {
		vmh_info("%s", vmh_reason_text(reason));
		vmh_session_closing(reason); /* its rules are given back while it is there, and there are no more of them */
		vmh_sock_home_all(reason, true);
		vmh_session_part(reason);
		vmh_tcps_home_all(reason);
		vmh_tcps_finish(false);
		vmh_sock_home_all(reason, true); /* what has come meanwhile */
		vmh_session_end(reason);
		if (reason == VMH_R_DESCRIPTORS) {
			await_closed_rings();
			vmh_sleep_give_up(); /* the others could not close it any more */
		}
	}
	errno = saved;
}

/* This thread's sockets have the interfaces and routes of another namespace from here on. Which thread has which one is
 * not followed: the kernel serves them all, and each socket stays in its own. A program of one thread that has not begun
 * yet will begin there; a thread with descriptors of its own has none that the shim knows. */
VMH_EXPORT int unshare(int flags)
{
	static int (*real)(int);
	int r;
	bool files;

	if (!real)
		vmh_real_find(&real, "unshare");
	if (vmh_filtered)
		return real(flags);
	files = flags & CLONE_FILES && vmh_process_has_threads();
	if (files && vmh_worker_and_one()) { /* a program of one thread has them alone already; ours must close with it */
		flags &= ~CLONE_FILES;
		files = false;
	}
	if (files) /* last, for which all goes home: the others may be refused */
		flags &= ~CLONE_FILES;
	r = files && !flags ? 0 : real(flags);
	if (for_one_thread(r))
		r = stepped_back(real(flags));
	if (!r && flags & CLONE_NEWNET)
		vmh_kernel_for_good(VMH_R_NETNS);
	if (r || !files)
		return r;
	vmh_kernel_for_good(VMH_R_DESCRIPTORS);
	vmh_fdtab_name_all();
	r = real(CLONE_FILES);
	if (!r)
		vmh_fdtab_part();
	return r;
}

/* type: 0 is that of the file */
static bool is_network(int fd, int type)
{
	return type ? type & CLONE_NEWNET : vmh_sys(SYS_ioctl, fd, NS_GET_NSTYPE) == CLONE_NEWNET;
}

VMH_EXPORT int setns(int fd, int type)
{
	static int (*real)(int, int);
	int r;

	if (!real)
		vmh_real_find(&real, "setns");
	r = real(fd, type);
	if (for_one_thread(r))
		r = stepped_back(real(fd, type));
	if (!r && !vmh_filtered && is_network(fd, type))
		vmh_kernel_for_good(VMH_R_NETNS);
	return r;
}
