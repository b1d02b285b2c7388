/* VMA_HANDLE_SIGSEGV: where the program crashed, on stderr; then it crashes as it would have. */
#include "vmh_log.h"
#include "vmh_main.h"
#include "vmh_params.h"
#include "vmh_real.h"
#include <execinfo.h>
#include <signal.h>

#define DEPTH 64

/* Runs once (SA_RESETHAND): the instruction that failed fails again, and the core shows it. A signal that was sent does
 * not come again: it is sent on, as it came, to this thread, which gets it when this handler returns. */
static void crashed(int sig, siginfo_t *info, void *interrupted)
{
	void *frames[DEPTH];

	(void)interrupted;
	vmh_error("Segmentation Fault");
	if (vmh_log_stderr_usable())
		backtrace_symbols_fd(frames, backtrace(frames, DEPTH), 2);
	if (info->si_code <= 0)
		vmh_sys(SYS_rt_tgsigqueueinfo, vmh_sys(SYS_getpid), vmh_sys(SYS_gettid), sig, info);
}

bool vmh_crash_handles(const struct sigaction *act)
{
	return act->sa_sigaction == crashed;
}

void vmh_crash_init(void)
{
	struct sigaction act = { .sa_sigaction = crashed, .sa_flags = (int)SA_RESETHAND | SA_SIGINFO | SA_ONSTACK }, now;
	void *frame;

	if (!vmh_params.handle_sigsegv)
		return;
	if (vmh_real()->sigaction(SIGSEGV, NULL, &now) || now.sa_handler != SIG_DFL) {
		vmh_info("No SIGSEGV handler: the program has its own");
		return;
	}
	backtrace(&frame, 1); /* loads libgcc: not what one wants to do in the handler */
	if (!vmh_real()->sigaction(SIGSEGV, &act, NULL))
		vmh_info("Registered a SIGSEGV handler");
}
