/* See vmh_worker.h. The thread holds no lock when it calls into sockets or the session. */
#include "vmh_worker.h"
#include "vmh_affinity.h"
#include "vmh_control.h"
#include "vmh_links.h"
#include "vmh_lock.h"
#include "vmh_log.h"
#include "vmh_main.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_sleep.h"
#include "vmh_sock.h"
#include "vmh_stats.h"
#include "vmh_tcps.h"
#include "vmh_tcps_spare.h"
#include "vmh_verbs.h"
#include "vmh_wait.h"
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/eventfd.h>
#include <sys/stat.h>

#define EVENTS 256 /* what the service may say before the thread runs; more: oldest kept, rest counted */

_Atomic int vmh_worker_runs;
static _Atomic unsigned my_tid; /* of the internal thread */
static uint64_t homesick_since; /* generation of the net page at the last attempt to bring flows back */

static struct vmh_lock lock;
static struct vmh_msg_event events[EVENTS];
static unsigned head, count;
static _Atomic int control_fd = -1;
static _Atomic int lost;
static _Atomic int behind; /* the first session came after sockets were bound: they are not on rings yet */
static _Atomic int aside; /* ASKED to end for a moment, LEFT */
static _Atomic int first_ended; /* the first thread has, alone: the last one to end ends the process */
static int bell = -1;

void vmh_worker_wake(void)
{
	uint64_t one = 1;

	if (bell >= 0)
		vmh_sys(SYS_write, bell, &one, sizeof(one));
}

void vmh_worker_event(const struct vmh_msg_event *ev)
{
	vmh_lock(&lock);
	if (count < EVENTS)
		events[(head + count++) % EVENTS] = *ev;
	else
		atomic_store(&lost, 1); /* cannot follow: everything goes home and comes back */
	vmh_unlock(&lock);
	vmh_worker_wake();
}

void vmh_worker_parted(void)
{
	atomic_store(&control_fd, -1);
	vmh_worker_wake();
}

void vmh_worker_lost(void)
{
	atomic_store(&lost, 1);
	vmh_worker_parted();
}

static bool next_event(struct vmh_msg_event *ev)
{
	bool any;

	vmh_lock(&lock);
	any = count > 0;
	if (any) {
		*ev = events[head];
		head = (head + 1) % EVENTS;
		count--;
	}
	vmh_unlock(&lock);
	return any;
}

static void ring_gone(unsigned ring_id, unsigned reason)
{
	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = r->next) {
		if (r->id != ring_id || atomic_load(&r->gone))
			continue;
		vmh_tcps_ring_gone(r, reason);
		vmh_ring_retire(r);
		vmh_sock_ring_gone(r, reason);
		vmh_tring_close(r);
		vmh_ring_close(r);
		vmh_session_release(ring_id);
		vmh_info("the ring on %s is gone: %s; the kernel serves its flows", r->ifname, vmh_reason_text(reason));
	}
}

/* The session is over: every flow is the kernel's. What the rings still hold is delivered first. */
static void go_home(void)
{
	unsigned reason = vmh_session_reason();

	vmh_tcps_home_all(reason ? reason : VMH_R_SERVICE_GONE);
	vmh_tcps_finish(false);
	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = r->next)
		vmh_ring_retire(r);
	vmh_sock_home_all(reason ? reason : VMH_R_SERVICE_GONE, false);
	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = r->next) {
		vmh_tring_close(r);
		vmh_ring_close(r);
	}
	if (!vmh_session_id())
		vmh_tport_session_over();
	vmh_verbs_forget();
	vmh_wake_all();
}

static void handle(const struct vmh_msg_event *ev)
{
	switch (ev->event) {
	case VMH_EV_RING_GONE:
		ring_gone(ev->a, ev->hdr.reason);
		break;
	case VMH_EV_FLOW_HOME:
		vmh_sock_flow_home(ev->a, ev->hdr.reason);
		vmh_tcps_flow_home(ev->a, ev->hdr.reason);
		break;
	case VMH_EV_BYE:
		vmh_session_bye();
		go_home();
		vmh_session_end(VMH_R_SERVICE_STOP);
		break;
	case VMH_EV_ASKED: /* turn() looks */
		break;
	case VMH_EV_TCP_MOVE:
		vmh_tcps_told(ev->a == VMH_EV_ALL ? -1 : (int)ev->a, ev->b, ev->hdr.reason);
		break;
	default:
		vmh_debug("an event this version does not know: %u", ev->event);
	}
}

/* By the internal thread. Where there is none, by a call: with the thread each system call of a program of one thread would
 * take a reference of its descriptor, 2 % of a busy program's time. So it begins with the first ring, or when the service
 * has something to say. */
void vmh_stats_asked(void)
{
	unsigned asked = VMH_GET(vmh_stats->asked);
	int saved = errno;

	bool ours = vmh_worker_is_me() || !atomic_load(&vmh_worker_runs);

	if (!ours || vmh_held.depth || vmh_in_handler() || !vmh_is_own_process() ||
	    __atomic_exchange_n(&vmh_stats->taken, asked, __ATOMIC_SEQ_CST) == asked)
		return;
	atomic_store(&vmh_log_level_now, (int)VMH_GET(vmh_stats->log_level));
	atomic_store(&vmh_log_details_now, (int)VMH_GET(vmh_stats->log_details));
	if (__atomic_exchange_n(&vmh_stats->dump_wanted, 0, __ATOMIC_SEQ_CST))
		vmh_stats_dump_fd(VMH_GET(vmh_stats->dump_fd), VMH_GET(vmh_stats->dump_level));
	if (!atomic_load(&vmh_worker_runs) && !vmh_session_open() && vmh_session_told())
		vmh_session_serve();
	errno = saved;
}

/* Flows that went home because of their interface come back when the network has changed. */
static void look_for_change(void)
{
	uint64_t now = vmh_net_generation();

	if (!atomic_load(&vmh_homesick) || now == homesick_since)
		return;
	homesick_since = now;
	atomic_store(&vmh_homesick, 0);
	vmh_sock_service_back();
}

static void reconnect(void)
{
	if (vmh_session_open()) {
		vmh_tcps_service_back(); /* it may have waited too long */
		return;
	}
	vmh_info("the service is back: offloading again");
	vmh_tcps_service_back();
	vmh_sock_service_back();
	vmh_session_settled();
	vmh_sock_service_back(); /* those that were bound or connected meanwhile */
}

static bool any_ring(void)
{
	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = r->next)
		if (!atomic_load(&r->gone))
			return true;
	return false;
}

#define SHARED_MS 200

/* Sockets that a fork shared come back when this process is the only one left that holds them. */
static void look_at_shared(void)
{
	static uint64_t next;
	uint64_t now;

	if (!atomic_load(&vmh_sock_any_shared))
		return;
	now = vmh_now_ns();
	if (now < next)
		return;
	next = now + SHARED_MS * 1000000ull;
	atomic_store(&vmh_sock_any_shared, 0); /* before the look: one may be put off meanwhile */
	if (vmh_sock_retry_shared())
		atomic_store(&vmh_sock_any_shared, 1);
}

/* A ring whose device or QP died: its sockets get another one, by the next rung. */
static void look_at_verbs(void)
{
	struct vmh_ring *r = vmh_verbs_failed();
	unsigned why;

	vmh_verbs_follow();
	if (!r)
		return;
	ring_gone(r->id, VMH_R_VERBS_FAILED);
	/* wildcards are still attached and would not ask for it */
	if (!vmh_net_link_served(r->ifindex))
		vmh_session_ring(r->ifindex, r->lane, &why);
	vmh_sock_service_back();
}

#define LAST_MS 100

/* In the thread group, which is what the kernel looks at; ours counts. */
static bool has_threads(unsigned n)
{
	struct stat st;

	return !vmh_sys(SYS_stat, "/proc/self/task", &st) && st.st_nlink == 2 + n;
}

bool vmh_process_has_threads(void)
{
	return !has_threads(1);
}

bool vmh_worker_and_one(void)
{
	return atomic_load(&vmh_worker_runs) && has_threads(2);
}

void vmh_worker_first_ends(void)
{
	atomic_store(&first_ended, 1);
	vmh_worker_wake();
}

static void thread_ends(void *arg)
{
	(void)arg;
	vmh_worker_first_ends();
}

void vmh_worker_first_thread(void)
{
	static pthread_key_t key;
	static bool made;

	if (!made && pthread_key_create(&key, thread_ends))
		return;
	made = true;
	pthread_setspecific(key, &key);
}

/* A first thread that has ended is a zombie as long as there are others. */
static bool first_is_gone(void)
{
	char path[64], buf[128], *end;
	long fd, n;

	snprintf(path, sizeof(path), "/proc/self/task/%ld/stat", vmh_sys(SYS_getpid));
	fd = vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return false;
	n = vmh_sys(SYS_read, (int)fd, buf, sizeof(buf) - 1);
	vmh_sys(SYS_close, (int)fd);
	buf[n > 0 ? n : 0] = 0;
	end = strrchr(buf, ')'); /* of its name */
	return end && end[1] == ' ' && end[2] == 'Z';
}

/* Nobody of the program is left: libc would end the process, and does not, because of this thread. */
static void look_for_end(void)
{
	if (vmh_worker_and_one() && first_is_gone())
		exit(0);
}

#define ASKED_MS 1000 /* between two looks at the page: vma_stats writes there without a service, too */
#define WAY_MS 5    /* while a connection waits for a change of the network */
#define STAMPS_MS 1
#define PROMPT_BUDGET 2048 /* frames of each ring */
#define FIXED_FDS 3
#define WATCH_FDS 256      /* of rings; the others are looked at by the clock */

/* A datagram is stamped when somebody looks at its ring. */
static bool stamps_wanted(void)
{
	return atomic_load(&vmh_want_stamps) && any_ring();
}

static int interval_ms(void)
{
	bool look = atomic_load(&control_fd) < 0 || vmh_session_muted() || atomic_load(&vmh_homesick) || vmh_verbs_any();
	int idle = look ? VMH_RECONNECT_MS : ASKED_MS;

	if (atomic_load(&vmh_sock_any_shared))
		idle = SHARED_MS;
	if (vmh_tcps_without_way())
		return WAY_MS;
	if (stamps_wanted())
		return STAMPS_MS;
	if (!any_ring() || !vmh_params.progress_engine_interval || !vmh_params.progress_engine_wce_max)
		return idle;
	return (int)vmh_params.progress_engine_interval;
}

/* VMA_INTERNAL_THREAD_ARM_CQ, or VMA_TCP_CTL_THREAD with TCP on rings: each packet wakes this thread, which brings it to
 * its socket, or answers it. */
static int watch_rings(struct pollfd *p, bool tcp)
{
	int fds[WATCH_FDS];
	bool watch = vmh_params.internal_thread_arm_cq || (tcp && vmh_params.tcp_ctl_thread == 1);
	int n = watch ? vmh_rings_wait_fds(fds, WATCH_FDS) : 0;

	for (int i = 0; i < n; i++)
		p[i] = (struct pollfd){ .fd = fds[i], .events = POLLIN };
	if (n)
		vmh_rings_poll(PROMPT_BUDGET); /* what came before the CQ was armed raises no event */
	return n;
}

static void turn(void)
{
	struct vmh_msg_event ev = { 0 };
	int fd = atomic_load(&control_fd);
	struct pollfd p[FIXED_FDS + WATCH_FDS] = { { .fd = bell, .events = POLLIN }, { .fd = fd, .events = POLLIN }, { .fd = vmh_tended_fd(), .events = POLLIN } };
	int ms = interval_ms(), tcp = vmh_trings_progress(), together = vmh_tcps_together(), rings = fd < 0 ? 0 : watch_rings(p + FIXED_FDS, tcp >= 0);

	if (tcp >= 0 && tcp < ms)
		ms = tcp;
	if (together >= 0 && together < ms)
		ms = together;
	if (tcp >= 0) {
		vmh_tcps_look();
		vmh_tlisten_look();
	}
	vmh_warn_arp_flux(); /* an address may have come since */
	vmh_tpath_look(); /* also of listeners that have had no connection for a while */
	if (atomic_load(&first_ended) && ms > LAST_MS)
		ms = LAST_MS;
	struct timespec ts = { ms / 1000, (ms % 1000) * 1000000L };
	unsigned all = fd < 0 ? 1 : (unsigned)(FIXED_FDS + rings);
	long n = vmh_sys(SYS_ppoll, p, all, &ts, NULL, 0);
	uint64_t bells;

	if (vmh_unlikely(n == -EINVAL))
		n = vmh_poll_few(p, all, &ts, NULL, false);
	if (n > 0 && p[0].revents)
		vmh_sys(SYS_read, bell, &bells, sizeof(bells));
	if (n > 0 && fd >= 0 && p[1].revents)
		vmh_session_read();
	if (n > 0 && fd >= 0 && p[2].revents)
		vmh_tended_look();
	if (n > 0 && rings)
		vmh_rings_woken(p + FIXED_FDS, rings);
	while (next_event(&ev))
		handle(&ev);
	vmh_stats_look();
	if (vmh_unlikely(atomic_load(&first_ended)))
		look_for_end();
	vmh_tport_work();
	vmh_tshow_look();
	vmh_tspare_look();
	vmh_tcps_unfit_home();
	vmh_wake_for_child();
	vmh_watch_look();
	vmh_tcps_adopt_chosen();
	if (atomic_exchange(&lost, 0))
		go_home();
	vmh_tcps_try_open();
	if (atomic_load(&control_fd) < 0) {
		reconnect();
		return;
	}
	if (vmh_session_ask_again()) {
		vmh_tcps_service_back();
		vmh_sock_service_back();
	}
	look_for_change();
	vmh_tcps_try_home();
	look_at_shared();
	look_at_verbs();
	if (stamps_wanted() || rings)
		vmh_rings_poll(PROMPT_BUDGET);
	else if (vmh_params.progress_engine_interval)
		vmh_rings_drain((unsigned)vmh_params.progress_engine_wce_max);
}

enum { NOT_ASKED, ASKED, LEFT };
#define ASIDE_NAP_NS 100000
#define ASIDE_NAPS 20000 /* 2 s: it may wait for the service */

static bool leaves(void)
{
	int asked = ASKED;

	if (vmh_likely(atomic_load_explicit(&aside, memory_order_relaxed) != ASKED))
		return false;
	if (!atomic_compare_exchange_strong(&aside, &asked, LEFT))
		return false;
	atomic_store(&vmh_worker_runs, 0);
	VMH_SET(vmh_stats->listens, 0);
	atomic_store(&my_tid, 0);
	return true;
}

bool vmh_worker_step_aside(void)
{
	const struct timespec nap = { 0, ASIDE_NAP_NS };
	int asked = ASKED;

	if (!vmh_worker_and_one() || vmh_worker_is_me())
		return false;
	atomic_store(&aside, ASKED);
	vmh_worker_wake();
	for (int i = 0; i < ASIDE_NAPS && !has_threads(1); i++)
		vmh_sys(SYS_nanosleep, &nap, NULL);
	return !atomic_compare_exchange_strong(&aside, &asked, NOT_ASKED);
}

/* Until the thread is no more, or is in a call for too long. */
void vmh_worker_leave(void)
{
	const struct timespec nap = { 0, ASIDE_NAP_NS };
	long tid = atomic_load(&my_tid);

	if (!atomic_load(&vmh_worker_runs) || !tid || vmh_worker_is_me())
		return;
	atomic_store(&aside, ASKED);
	vmh_worker_wake();
	for (int i = 0; i < ASIDE_NAPS && !vmh_sys(SYS_tgkill, vmh_sys(SYS_getpid), tid, 0); i++)
		vmh_sys(SYS_nanosleep, &nap, NULL);
}

void vmh_worker_step_back(void)
{
	atomic_store(&aside, NOT_ASKED);
	vmh_worker_start(atomic_load(&control_fd), atomic_load(&behind));
}

static void *loop(void *arg)
{
	(void)arg;
	vmh_held.internal = true;
	atomic_store(&my_tid, vmh_tid());
	vmh_affinity_apply();
	if (atomic_load(&behind))
		vmh_sock_service_back();
	while (!leaves())
		turn();
	return NULL;
}

bool vmh_worker_is_me(void)
{
	return atomic_load_explicit(&my_tid, memory_order_relaxed) == vmh_tid();
}

void vmh_worker_start(int fd, bool late)
{
	pthread_attr_t attr;
	pthread_t thread;
	sigset_t all, old;

	atomic_store(&control_fd, fd);
	atomic_store(&behind, late);
	if (atomic_load(&vmh_worker_runs)) {
		vmh_worker_wake();
		return;
	}
	if (bell < 0)
		bell = vmh_fd_hide((int)vmh_sys(SYS_eventfd2, 0, EFD_CLOEXEC | EFD_NONBLOCK));
	/* the program's handlers run in the program's threads */
	sigfillset(&all);
	pthread_sigmask(SIG_SETMASK, &all, &old);
	pthread_attr_init(&attr);
	pthread_attr_setdetachstate(&attr, PTHREAD_CREATE_DETACHED);
	pthread_attr_setstacksize(&attr, 256 * 1024);
	if (pthread_create(&thread, &attr, loop, NULL) == 0) {
		atomic_store(&vmh_worker_runs, 1);
		VMH_SET(vmh_stats->listens, 1);
		pthread_setname_np(thread, "vmahybrid");
	} else {
		vmh_warn("no internal thread: rings are drained by the program's own calls only");
	}
	pthread_attr_destroy(&attr);
	pthread_sigmask(SIG_SETMASK, &old, NULL);
}

void vmh_worker_fork_child(void)
{
	vmh_fd_hidden_close(bell);
	bell = -1;
	atomic_store(&vmh_worker_runs, 0);
	atomic_store(&my_tid, 0);
	atomic_store(&first_ended, 0);
	atomic_store(&aside, NOT_ASKED);
	head = count = 0;
	vmh_lock_reset(&lock);
	atomic_store(&control_fd, -1);
	atomic_store(&lost, 0);
}
