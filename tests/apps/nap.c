/* Preloaded into sockperf, whose client sleeps for two seconds before it begins, and measures whole seconds (by a timer,
 * with 400 ms of warm-up): 50 ms and 800 ms do here. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <sys/time.h>
#include <unistd.h>

#define LONGEST_US 800000

unsigned int sleep(unsigned int seconds)
{
	usleep(seconds ? 50000 : 0);
	return 0;
}

int setitimer(__itimer_which_t which, const struct itimerval *new, struct itimerval *old)
{
	int (*real)(__itimer_which_t, const struct itimerval *, struct itimerval *) = dlsym(RTLD_NEXT, "setitimer");
	struct itimerval shorter = *new;

	if (which == ITIMER_REAL && shorter.it_value.tv_sec)
		shorter.it_value = (struct timeval){ .tv_usec = LONGEST_US };
	return real(which, &shorter, old);
}
