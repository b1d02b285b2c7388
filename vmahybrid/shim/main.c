/* Start, fork and end of the library in a process. */
#include "vmh_exec.h"
#include "vmh_main.h"
#include "vmh_banner.h"
#include "vmh_conf.h"
#include "vmh_control.h"
#include "vmh_heap.h"
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_ring.h"
#include "vmh_real.h"
#include "vmh_sock.h"
#include "vmh_stats.h"
#include "vmh_tcps.h"
#include "vmh_tcps_spare.h"
#include "vmh_uring.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include "vmh_worker.h"
#include <pthread.h>
#include <stdlib.h>
#include <sys/socket.h>

#define YOUNG_NS 100000000ull

static struct vmh_lock start_lock;
static struct vmh_lock end_lock; /* two threads may end the process: neither does before the connections have ended */
static _Atomic int started;
static _Atomic bool ended;
/* This thread took the session's lock, and start_lock. */
static __thread bool forking, starting;
static __thread bool daemonizes; /* the parent ends at once, so the child owns the sockets alone */
static long own_pid;
_Atomic bool vmh_accept_tells = true;
_Atomic bool vmh_filtered;
static uint64_t forked_ns; /* 0: this is no child of a fork */
static _Atomic bool accepted_one;

/* Nothing is made (no file, no connection) for a program that never opens a socket. */
void vmh_started(void)
{
	if (vmh_likely(atomic_load_explicit(&started, memory_order_acquire)))
		return;
	vmh_lock(&start_lock);
	if (!atomic_load(&started)) {
		vmh_fdtab_init();
		vmh_params_init();
		vmh_ring_batching = vmh_params.buffer_batching_mode;
		vmh_log_init();
		vmh_banner();
		vmh_params_report();
		vmh_warn_high_level();
		if (!vmh_lock_set_mode((int)vmh_params.thread_mode))
			vmh_warn("VMA_THREAD_MODE = 0: the kernel refuses membarrier(2), locks are taken as with 1");
		vmh_crash_init();
		vmh_stats_init();
		vmh_tcps_init();
		vmh_spin_init();
		own_pid = vmh_sys(SYS_getpid);
		vmh_fdtab_own();
		atomic_store_explicit(&started, 1, memory_order_release);
	}
	vmh_unlock(&start_lock);
}

/* A session costs as much as ten forks: who forks for each connection, or for a few, goes without. */
static bool too_young(void)
{
	return forked_ns && (!atomic_exchange(&accepted_one, true) || vmh_now_ns() - forked_ns < YOUNG_NS);
}

/* The child of a fork, and who was given its listener, may never make a socket. The kernel's other families are nothing to
 * tell of: their listener is remembered, so that it is not asked for each connection. */
void vmh_accept_tell(int listener, int fd)
{
	static _Atomic int other_family = -1;
	int domain = 0;
	socklen_t len = sizeof(domain);
	unsigned reason;

	if (listener == atomic_load_explicit(&other_family, memory_order_relaxed) || too_young())
		return;
	vmh_sys(SYS_getsockopt, fd, SOL_SOCKET, SO_DOMAIN, &domain, &len);
	if (domain != AF_INET && domain != AF_INET6) {
		atomic_store(&other_family, listener);
		return;
	}
	vmh_started();
	reason = vmh_session_open();
	if (!reason || reason == VMH_R_DISABLED)
		atomic_store(&vmh_accept_tells, false);
}

/* Once; who comes meanwhile waits. */
static void end_of_process(void)
{
	vmh_lock(&end_lock);
	if (!atomic_load(&ended)) {
		vmh_tcps_finish(true);
		vmh_tcps_home_all(VMH_R_CLOSED);
		vmh_stats_file_dump_all();
		vmh_session_fini();
		vmh_stats_fini();
		atomic_store(&ended, true);
	}
	vmh_unlock(&end_lock);
}

void vmh_before_filter(void)
{
	int saved = errno;

	if (vmh_fdtab_borrowed())
		return;
	if (atomic_load(&started)) {
		vmh_kernel_for_good(VMH_R_SECCOMP);
		end_of_process();
		vmh_worker_leave(); /* the filter may be one for all threads */
		vmh_signals_end_by_kernel(); /* nothing is left that would have to end well */
		vmh_tid(); /* asked for once */
	}
	atomic_store(&vmh_filtered, true); /* who has not begun does not begin any more */
	vmh_fdtab_off();
	errno = saved;
}

__attribute__((destructor)) static void library_unloaded(void)
{
	if (atomic_load(&started))
		end_of_process();
}

/* libc calls each such function once. A second thread that ends the process (main() returns while the first is in exit())
 * finds none that the first has begun, and would be through at once: so there is always one left until all is done. */
static void at_exit(int status, void *arg)
{
	(void)status;
	(void)arg;
	if (atomic_load(&ended) || !vmh_is_own_process())
		return;
	on_exit(at_exit, NULL);
	end_of_process();
}

static void at_quick(void)
{
	static _Atomic long done; /* by which process */

	if (vmh_filtered || !vmh_is_own_process() || atomic_load(&done) == own_pid)
		return;
	at_quick_exit(at_quick);
	vmh_before_exit();
	atomic_store(&done, own_pid);
}

__attribute__((constructor)) static void library_loaded(void)
{
	vmh_real_init();
	vmh_exec_init();
	vmh_cancel_find();
	vmh_fdtab_init();
	vmh_fdtab_own();
	on_exit(at_exit, NULL); /* before any other: they are called last */
	at_quick_exit(at_quick);
	vmh_worker_first_thread();
}

void vmh_before_exec(void)
{
	if (!atomic_load(&started) || vmh_filtered)
		return;
	if (vmh_sys(SYS_getpid) == own_pid) {
		vmh_tcps_home_all(VMH_R_EXEC);
		vmh_tcps_finish(false);
		vmh_sock_share_inherited();
	} else if (vmh_fdtab_borrowed()) { /* the parent goes on with the sockets that the new program does not get */
		vmh_tcps_home_inherited(NULL);
	}
}

/* Descriptors that file actions have named at any time: such an object may be used again, when the number is another's. */
#define NAMED_MAX 65536
static _Atomic uint64_t named[NAMED_MAX / 64];

void vmh_spawn_names(int fd)
{
	if (fd >= 0 && fd < NAMED_MAX)
		atomic_fetch_or_explicit(&named[fd / 64], 1ull << fd % 64, memory_order_relaxed);
}

static bool is_named(int fd)
{
	return fd >= NAMED_MAX || atomic_load_explicit(&named[fd / 64], memory_order_relaxed) >> fd % 64 & 1;
}

void vmh_before_spawn(bool actions)
{
	if (atomic_load(&started) && !vmh_filtered && (vmh_sys(SYS_getpid) == own_pid || vmh_fdtab_borrowed()))
		vmh_tcps_home_inherited(actions ? is_named : NULL);
}

bool vmh_is_own_process(void)
{
	return atomic_load(&started) && vmh_sys(SYS_getpid) == own_pid;
}

/* _exit(2): the kernel would send what is left of closed and open connections, and so do we. */
void vmh_before_exit(void)
{
	if (vmh_filtered || !vmh_is_own_process())
		return;
	vmh_lock(&end_lock);
	vmh_tcps_finish(true);
	vmh_tcps_home_all(VMH_R_CLOSED);
	vmh_stats_fini();
	vmh_unlock(&end_lock);
}

/* Who begins (vmh_started) has done so, or does it in parent and child each for itself. */
static void hold_still(void)
{
	vmh_lock(&start_lock);
	starting = true;
	if (!atomic_load(&started) || vmh_filtered)
		return;
	vmh_session_lock();
	vmh_tspare_before_fork();
	vmh_tcps_left_before_fork();
	forking = true;
}

void vmh_before_fork(void)
{
	if (atomic_load(&started) && !vmh_filtered) {
		/* parent and child share the sockets from here on: the kernel serves both */
		vmh_tcps_home_all(VMH_R_FORK);
		if (daemonizes)
			vmh_sock_home_all(VMH_R_FORK, false);
		else
			vmh_sock_share_all();
	}
	hold_still();
}

void vmh_after_fork_parent(void)
{
	if (forking) {
		vmh_tcps_left_after_fork_parent();
		vmh_tspare_after_fork_parent();
		vmh_session_unlock();
	}
	forking = false;
	if (starting)
		vmh_unlock(&start_lock);
	starting = false;
}

static void begin_anew(void)
{
	own_pid = vmh_sys(SYS_getpid);
	forking = false;
	vmh_heap_fork_child();
	forked_ns = vmh_now_ns();
	atomic_store(&accepted_one, false);
	atomic_store(&vmh_accept_tells, true);
	vmh_lock_fork_child();
	vmh_lock_reset(&end_lock);
	atomic_store(&ended, false);
	vmh_signals_fork_child();
	vmh_wait_fork_child();
	vmh_session_fork_child();
	vmh_conf_fork_child();
	vmh_lane_fork_child();
	vmh_log_reopen();
	vmh_stats_fork_child();
	vmh_sock_fork_child();
	vmh_tcps_fork_child();
	vmh_epoll_fork_child();
	vmh_verbs_fork_child();
	vmh_rings_fork_child();
	vmh_tcps_left_after_fork_child();
	vmh_tspare_after_fork_child();
	vmh_session_unlock_fork_child();
}

void vmh_after_fork_child(void)
{
	if (!vmh_filtered) {
		vmh_fdtab_own();
		vmh_worker_first_thread();
		vmh_uring_fork_child();
	}
	if (forking)
		begin_anew();
	if (starting)
		vmh_unlock_fork_child(&start_lock);
	starting = false;
}

/* What libc's fork() calls, whoever called that: also daemon() and forkpty(), and who has it from libc's own handle. As
 * nobody else's handlers are registered before, or hardly anybody's, those that prepare run before ours and may wait for
 * threads that use sockets, and the others find all as it should be. */
static __thread bool forks_here, driver_forks;
static struct {
	void (*prepare)(void), (*parent)(void), (*child)(void);
} driver;

/* pthread_atfork(3) of a driver of verbs, whose locks our rings' calls take: those come between ours and the fork. */
VMH_EXPORT void vmh_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void));
VMH_EXPORT void vmh_atfork(void (*prepare)(void), void (*parent)(void), void (*child)(void))
{
	driver.parent = parent;
	driver.child = child;
	driver.prepare = prepare;
}

static void libc_forks(void)
{
	int saved = errno;

	forks_here = !starting;
	if (forks_here)
		vmh_before_fork();
	driver_forks = driver.prepare != NULL;
	if (driver_forks)
		driver.prepare();
	errno = saved;
}

static void libc_forked(void (*drivers)(void), void (*ours)(void))
{
	int saved = errno;

	if (driver_forks)
		drivers();
	if (forks_here)
		ours();
	forks_here = false;
	errno = saved;
}

static void libc_forked_parent(void)
{
	libc_forked(driver.parent, vmh_after_fork_parent);
}

static void libc_forked_child(void)
{
	libc_forked(driver.child, vmh_after_fork_child);
}

__attribute__((constructor)) void vmh_watch_forks(void)
{
	static _Atomic bool done;
	void *volatile first;

	if (vmh_likely(atomic_load_explicit(&done, memory_order_relaxed)) || atomic_exchange(&done, true))
		return;
	first = malloc(1); /* an allocator that has such handlers has them now, in front of ours: while we prepare it serves */
	free(first);
	pthread_atfork(libc_forks, libc_forked_parent, libc_forked_child);
}

void vmh_before_daemon(void)
{
	vmh_watch_forks();
	daemonizes = true;
}

void vmh_after_daemon(void)
{
	daemonizes = false;
	if (atomic_load(&started) && !vmh_filtered)
		vmh_sock_service_back();
}
