/* A signal handler that runs while a call spins must end the call with EINTR, as it ends the kernel's.
 * So each handler that the program installs is run by a wrapper that counts.
 *
 * There is no lock: sigaction is async-signal-safe and may be called between fork and exec. The table
 * holds the program's handler and the two flags that the wrapper needs in one word per signal, so a
 * handler never runs with another's flags. The kernel stays the one place that knows the disposition,
 * mask and flags; a handler installed by a raw system call is reported and run as it is.
 *
 * A handler may call recv, send, poll and close on the very socket whose lock the interrupted code holds.
 * So no handler runs while its thread holds a lock of ours: the wrapper sends the signal to its thread
 * again, siginfo and all, and returns into a context in which signals are blocked; the last unlock
 * unblocks them (vmh_lock.h). What the signal ends, a system call under a lock, is taken up again there.
 *
 * A program that has TCP connections on rings and dies by a signal would leave their peers without the rest of the data,
 * and without the end of the stream, which the kernel sends for it. So where it has left a signal that kills to the
 * kernel, there is a handler of ours that ends the connections as exit() does, and then has the kernel end the program.
 */
#include "vmh_real.h"
#include "vmh_iomux_int.h"
#include "vmh_main.h"
#include "vmh_obj.h"
#include <signal.h>
#include <ucontext.h>

__thread volatile sig_atomic_t vmh_signals_any __attribute__((tls_model("initial-exec")));
__thread volatile sig_atomic_t vmh_signals_norestart __attribute__((tls_model("initial-exec")));

/* Handlers that this thread is in, and those that it has left by longjmp(). */
static __thread volatile sig_atomic_t depth __attribute__((tls_model("initial-exec")));

bool vmh_in_handler(void)
{
	return depth > 0;
}

#define NSIGNALS 65
#define F_SIGINFO (1ull << 63) /* no user-space code lives that high */
#define F_RESTART (1ull << 62)
#define F_ONCE (1ull << 61)    /* SA_RESETHAND */
#define F_GONE (1ull << 60)    /* the kernel has another disposition since */
#define F_MASK (F_SIGINFO | F_RESTART | F_ONCE | F_GONE)

static _Atomic uint64_t handlers[NSIGNALS];
static _Atomic uint64_t interrupts; /* siginterrupt(sig, 1) was called: bit per signal */

typedef void (*info_handler)(int, siginfo_t *, void *);

#define BIT(sig) (1ull << ((sig) - 1))
/* Of the code that runs, not of the outside: they can't wait. */
#define FAULTS (BIT(SIGSEGV) | BIT(SIGBUS) | BIT(SIGFPE) | BIT(SIGILL) | BIT(SIGTRAP) | BIT(SIGABRT) | BIT(SIGSYS))
#define LIBC_OWN (BIT(32) | BIT(33))
#define UNSTOPPABLE (BIT(SIGKILL) | BIT(SIGSTOP)) /* no mask has them */

static bool put_off(int sig, siginfo_t *info, ucontext_t *interrupted)
{
	uint64_t all = ~(FAULTS | LIBC_OWN | UNSTOPPABLE), wait = all | BIT(sig), here, was;

	/* first, or SA_NODEFER would bring the signal back at once */
	vmh_sys(SYS_rt_sigprocmask, SIG_BLOCK, &wait, &here, sizeof(wait));
	if (vmh_sys(SYS_rt_tgsigqueueinfo, getpid(), vmh_tid(), sig, info) < 0) {
		vmh_sys(SYS_rt_sigprocmask, SIG_SETMASK, &here, NULL, sizeof(here));
		return false; /* RLIMIT_SIGPENDING: now or never */
	}
	/* Of several that came one inside another the outermost writes last, and knows the mask that counts. The
	 * kernel's mask has 8 bytes, where libc's type has 128. */
	memcpy(&was, &interrupted->uc_sigmask, sizeof(was));
	if (!vmh_held.put_off || (was & all) != all) /* else one waits already, and this is a fault's */
		memcpy(&vmh_held.mask, &was, sizeof(vmh_held.mask));
	vmh_held.put_off = 1;
	vmh_held.faults |= BIT(sig) & FAULTS;
	wait = all | was | vmh_held.faults;
	memcpy(&interrupted->uc_sigmask, &wait, sizeof(wait));
	return true;
}

static _Atomic int ends_well; /* those of ENDING have a handler of ours where the program has none */
#define ENDING (BIT(SIGHUP) | BIT(SIGINT) | BIT(SIGPIPE) | BIT(SIGALRM) | BIT(SIGTERM) | BIT(SIGUSR1) | BIT(SIGUSR2) | \
		BIT(SIGVTALRM) | BIT(SIGPROF) | BIT(SIGIO) | BIT(SIGPWR) | BIT(SIGSTKFLT) | BIT(SIGXCPU) | BIT(SIGXFSZ))

static _Atomic unsigned ends_tid; /* who ends the process */
static _Atomic int ends_sig;      /* for which signal */
static uint64_t ends_since;
#define IMPATIENT_NS 500000000u   /* a signal that comes twice, to a process and to its group, is no second wish */

/* false: it is being done. The same signal again, some time later, does not wait for it; another one, as SIGPIPE of a
 * thread that still runs, does. */
static bool end_connections(int sig)
{
	unsigned tid = 0;

	if (!vmh_is_own_process())
		return true;
	if (atomic_compare_exchange_strong(&ends_tid, &tid, vmh_tid())) {
		VMH_SET(ends_since, vmh_now_ns());
		atomic_store(&ends_sig, sig);
		vmh_before_exit();
		return true;
	}
	if (atomic_load(&ends_sig) == sig && vmh_now_ns() - VMH_GET(ends_since) > IMPATIENT_NS)
		return true;
	while (tid != vmh_tid())
		vmh_sys(SYS_pause);
	return false;
}

static void ending(int sig)
{
	const struct sigaction by_default = { .sa_handler = SIG_DFL };
	uint64_t this = BIT(sig);

	if (vmh_sys(SYS_getpid) == 1 || !end_connections(sig)) /* no signal ends the first process of a container */
		return;
	vmh_real()->sigaction(sig, &by_default, NULL);
	vmh_sys(SYS_rt_sigprocmask, SIG_UNBLOCK, &this, NULL, sizeof(this));
	vmh_sys(SYS_tgkill, vmh_sys(SYS_getpid), vmh_sys(SYS_gettid), sig);
}

static void gone(int sig, uint64_t w);
static void wrapper(int sig, siginfo_t *info, void *ctx);

/* Another process may send those of faults, as a watchdog does: they can wait, too. */
static bool can_wait(int sig, uint64_t w, const siginfo_t *info)
{
	bool sent = info->si_code == SI_USER || info->si_code == SI_QUEUE;

	if (BIT(sig) & FAULTS && !sent)
		return false;
	return (w & ~F_MASK) != (uintptr_t)ending || atomic_load(&ends_tid) != vmh_tid();
}

/* The kernel has taken a one-shot handler away, which has not run yet. */
static void once_more(int sig)
{
	struct sigaction a;

	if (vmh_real()->sigaction(sig, NULL, &a) || a.sa_handler != SIG_DFL)
		return;
	a.sa_sigaction = wrapper;
	vmh_real()->sigaction(sig, &a, NULL);
}

static bool waits(int sig, uint64_t w, siginfo_t *info, ucontext_t *interrupted)
{
	if (!can_wait(sig, w, info) || !put_off(sig, info, interrupted))
		return false;
	if (w & F_ONCE)
		once_more(sig);
	return true;
}

static void wrapper(int sig, siginfo_t *info, void *ctx)
{
	uint64_t w = atomic_load(&handlers[sig]);
	void *f = (void *)(uintptr_t)(w & ~F_MASK);

	if (vmh_unlikely(vmh_held.depth) && waits(sig, w, info, ctx))
		return;
	if (vmh_unlikely(w & F_ONCE))
		gone(sig, w);
	vmh_signals_any++;
	if (!(w & F_RESTART))
		vmh_signals_norestart++;
	depth++;
	vmh_sleep_interrupted();
	if (w & F_SIGINFO)
		((info_handler)f)(sig, info, ctx);
	else
		((sighandler_t)f)(sig);
	depth--;
	vmh_sleep_signal(); /* after it: a poll inside the handler drains the wake-up */
}

static bool ours(int sig)
{
	/* 32 and 33 belong to libc's threads: sigaction refuses them */
	return sig >= 1 && sig < NSIGNALS && sig != SIGKILL && sig != SIGSTOP && sig != 32 && sig != 33;
}

static bool is_handler(const struct sigaction *a)
{
	return a->sa_handler != SIG_DFL && a->sa_handler != SIG_IGN && a->sa_sigaction != wrapper;
}

static uint64_t word_of(const struct sigaction *a)
{
	return (uint64_t)(uintptr_t)a->sa_handler | (a->sa_flags & SA_SIGINFO ? F_SIGINFO : 0) |
	       (a->sa_flags & SA_RESTART ? F_RESTART : 0) | ((unsigned)a->sa_flags & SA_RESETHAND ? F_ONCE : 0);
}

/* What the kernel says is the wrapper was the program's handler `w`; and of VMA_HANDLE_SIGSEGV a program that hands
 * faults on to the handler before its own knows nothing: it would have found none. */
static void unwrap(struct sigaction *a, uint64_t w)
{
	if (vmh_crash_handles(a)) {
		*a = (struct sigaction){ .sa_handler = SIG_DFL };
		return;
	}
	if (a->sa_sigaction != wrapper)
		return;
	if ((sighandler_t)(uintptr_t)(w & ~F_MASK) == ending) {
		*a = (struct sigaction){ .sa_handler = SIG_DFL };
		return;
	}
	a->sa_handler = (sighandler_t)(uintptr_t)(w & ~F_MASK);
	if (!(w & F_SIGINFO))
		a->sa_flags &= ~SA_SIGINFO;
}

static struct sigaction end_well(void)
{
	return (struct sigaction){ .sa_sigaction = wrapper, .sa_flags = SA_SIGINFO | SA_RESTART | SA_NODEFER };
}

static void arm(int sig)
{
	const struct sigaction mine = end_well();
	struct sigaction was;
	uint64_t w = atomic_load(&handlers[sig]);

	if ((w && !(w & F_GONE)) || vmh_real()->sigaction(sig, NULL, &was) || was.sa_handler != SIG_DFL ||
	    !atomic_compare_exchange_strong(&handlers[sig], &w, (uintptr_t)ending))
		return;
	/* the program may have set one meanwhile */
	if (!vmh_real()->sigaction(sig, &mine, &was) && was.sa_handler != SIG_DFL)
		vmh_real()->sigaction(sig, &was, NULL);
}

/* The kernel has its default for it now, and the program no handler `w` any more. */
static void gone(int sig, uint64_t w)
{
	if (atomic_compare_exchange_strong(&handlers[sig], &w, w | F_GONE) && ENDING & BIT(sig) &&
	    atomic_load(&ends_well) && vmh_is_own_process())
		arm(sig);
}

void vmh_signals_end_well(void)
{
	/* the first process of a container: the kernel lets no signal end it that it has no handler for */
	if (vmh_likely(atomic_load_explicit(&ends_well, memory_order_relaxed)) || vmh_sys(SYS_getpid) == 1 ||
	    atomic_exchange(&ends_well, 1))
		return;
	for (int sig = 1; sig < NSIGNALS; sig++)
		if (ENDING & BIT(sig))
			arm(sig);
}

void vmh_signals_end_by_kernel(void)
{
	const struct sigaction by_default = { .sa_handler = SIG_DFL };

	if (!atomic_exchange(&ends_well, 0))
		return;
	for (int sig = 1; sig < NSIGNALS; sig++)
		if (atomic_load(&handlers[sig]) == (uintptr_t)ending)
			vmh_real()->sigaction(sig, &by_default, NULL);
}

void vmh_signals_fork_child(void)
{
	atomic_store(&ends_sig, 0);
	atomic_store(&ends_tid, 0);
	if (vmh_sys(SYS_getpid) == 1) /* of a new namespace: without a handler these would not even interrupt it */
		vmh_signals_end_by_kernel();
}

/* 0, or -1 with libc's errno */
static int set_action(int sig, const struct sigaction *act, struct sigaction *old)
{
	struct sigaction mine, was;
	uint64_t w;
	int r;

	if (!ours(sig))
		return vmh_real()->sigaction(sig, act, old);
	w = atomic_load(&handlers[sig]);
	/* the table is the parent's; or it is not known whose, and no call of ours waits for a handler */
	if (vmh_unlikely(vmh_filtered) || vmh_memory_borrowed()) {
		r = vmh_real()->sigaction(sig, act, old);
		if (!r && old)
			unwrap(old, w);
		return r;
	}
	if (act && is_handler(act)) {
		mine = *act;
		mine.sa_sigaction = wrapper;
		mine.sa_flags |= SA_SIGINFO;
		/* before the kernel knows: the wrapper must never find an empty entry */
		w = atomic_exchange(&handlers[sig], word_of(act));
		act = &mine;
	} else if (act && act->sa_handler == SIG_DFL && ENDING & BIT(sig) && atomic_load(&ends_well) &&
		   vmh_is_own_process()) {
		mine = end_well();
		w = atomic_exchange(&handlers[sig], (uintptr_t)ending);
		act = &mine;
	}
	r = vmh_real()->sigaction(sig, act, &was);
	if (r == 0 && act && act->sa_handler == SIG_DFL)
		atomic_compare_exchange_strong(&handlers[sig], &(uint64_t){ w }, w | F_GONE);
	if (r == 0 && old) {
		unwrap(&was, w);
		*old = was;
	}
	return r;
}

VMH_EXPORT int sigaction(int sig, const struct sigaction *act, struct sigaction *old)
{
	return set_action(sig, act, old);
}

VMH_EXPORT int __sigaction(int sig, const struct sigaction *act, struct sigaction *old)
{
	return set_action(sig, act, old);
}

static bool interrupts_of(int sig)
{
	return ours(sig) && atomic_load(&interrupts) >> (sig - 1) & 1;
}

static sighandler_t install(int sig, sighandler_t h, int flags, bool mask_self)
{
	struct sigaction a = { .sa_handler = h, .sa_flags = flags }, old;

	if (h == SIG_ERR || sig < 1 || sig >= NSIGNALS) {
		errno = EINVAL;
		return SIG_ERR;
	}
	sigemptyset(&a.sa_mask);
	if (mask_self)
		sigaddset(&a.sa_mask, sig);
	return set_action(sig, &a, &old) < 0 ? SIG_ERR : old.sa_handler;
}

/* BSD semantics, as glibc's signal */
VMH_EXPORT sighandler_t signal(int sig, sighandler_t h)
{
	return install(sig, h, interrupts_of(sig) ? 0 : SA_RESTART, true);
}

VMH_EXPORT sighandler_t bsd_signal(int sig, sighandler_t h)
{
	return install(sig, h, interrupts_of(sig) ? 0 : SA_RESTART, true);
}

VMH_EXPORT sighandler_t ssignal(int sig, sighandler_t h)
{
	return install(sig, h, interrupts_of(sig) ? 0 : SA_RESTART, true);
}

#define SYSV_FLAGS ((int)(SA_RESETHAND | SA_NODEFER | 0x20000000)) /* SA_INTERRUPT: glibc sets it, the kernel ignores it */

VMH_EXPORT sighandler_t sysv_signal(int sig, sighandler_t h)
{
	return install(sig, h, SYSV_FLAGS, false);
}

VMH_EXPORT sighandler_t __sysv_signal(int sig, sighandler_t h)
{
	return install(sig, h, SYSV_FLAGS, false);
}

VMH_EXPORT int siginterrupt(int sig, int on)
{
	struct sigaction a;

	if (set_action(sig, NULL, &a) < 0)
		return -1;
	if (on) {
		if (ours(sig))
			atomic_fetch_or(&interrupts, 1ull << (sig - 1));
		a.sa_flags &= ~SA_RESTART;
	} else {
		if (ours(sig))
			atomic_fetch_and(&interrupts, ~(1ull << (sig - 1)));
		a.sa_flags |= SA_RESTART;
	}
	return set_action(sig, &a, NULL);
}

#ifndef SIG_HOLD
#define SIG_HOLD ((sighandler_t)2)
#endif

VMH_EXPORT sighandler_t sigset(int sig, sighandler_t h)
{
	sigset_t set, was;
	struct sigaction old;
	sighandler_t r;

	if (h == SIG_ERR || sig < 1 || sig >= NSIGNALS) {
		errno = EINVAL;
		return SIG_ERR;
	}
	sigemptyset(&set);
	sigaddset(&set, sig);
	if (h == SIG_HOLD) {
		if (sigprocmask(SIG_BLOCK, &set, &was) < 0 || set_action(sig, NULL, &old) < 0)
			return SIG_ERR;
		return sigismember(&was, sig) ? SIG_HOLD : old.sa_handler;
	}
	r = install(sig, h, 0, false);
	if (r == SIG_ERR || sigprocmask(SIG_UNBLOCK, &set, &was) < 0)
		return SIG_ERR;
	return sigismember(&was, sig) ? SIG_HOLD : r;
}
