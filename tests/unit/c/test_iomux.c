/* select, poll, epoll, waiting and signals over the fakes of iomux_fake.c. Arguments: names of tests (all
 * when none) and, as a number, the iterations of the races. Prints "ok NAME" for each. */
#include "iomux_fake.h"
#include "vmh_real.h"
#include <sys/wait.h>

int iomux_races = 20000;

#ifndef __has_feature
#define __has_feature(x) 0
#endif
/* A cancelled thread's frames leave ASan's shadow of its stack poisoned: its own exit trips over that. */
#if !defined(__SANITIZE_ADDRESS__) && !__has_feature(address_sanitizer)
#define TEST_CANCELLATION 1
#endif
/* TSan's runtime deadlocks with itself in a handler that it did not install (SlotLock inside SlotLock). */
#if !defined(__SANITIZE_THREAD__) && !__has_feature(thread_sanitizer)
#define TEST_EINTR 1
#endif

#define T(f) { #f, t_##f }
static const struct {
	const char *name;
	void (*run)(void);
} tests[] = {
	T(level), T(edge), T(oneshot), T(oneshot_shared_data), T(masks), T(errors), T(many_sets), T(nested),
	T(fairness), T(kernel_not_starved), T(os_ratio), T(cpu_usage), T(timeouts), T(kernel_only_set),
	T(offloaded_later), T(wake_races),
	T(churn), T(mask_ready_first), T(handlers), T(put_off), T(poll_exact), T(select_exact),
	T(budget), T(os_forced), T(after_fork), T(model), T(link_closed), T(signal_before_sleep),
#ifdef TEST_EINTR
	T(eintr),
#endif
#ifdef TEST_CANCELLATION
	T(cancellation),
#endif
};

int main(int argc, char **argv)
{
	vmh_real_init(); /* as the shim's constructor does, before there are threads */
	for (int k = 1; k < argc; k++)
		if (atoi(argv[k]) > 0)
			iomux_races = atoi(argv[k]);
	for (unsigned i = 0; i < sizeof(tests) / sizeof(*tests); i++) {
		bool named = false, match = false;
		int status;

		for (int k = 1; k < argc; k++) {
			named |= atoi(argv[k]) <= 0;
			match |= strcmp(argv[k], tests[i].name) == 0;
		}
		if (named && !match)
			continue;
		/* each in a process of its own: fresh tables, and a hang has a name */
		pid_t pid = fork();
		if (pid == 0) {
			alarm(120);
			fake_start();
			tests[i].run();
			exit(0);
		}
		CHECK(waitpid(pid, &status, 0) == pid);
		if (status != 0) {
			printf("FAILED %s (status %#x)\n", tests[i].name, (unsigned)status);
			return 1;
		}
		printf("ok %s\n", tests[i].name);
		fflush(stdout);
	}
	return 0;
}
