/* seccomp: a filter may kill for calls that the program itself does not make. So from before it on the kernel serves the
 * program for good, and there is nothing left to do at its end. */
#include "vmh_base.h"
#include "vmh_main.h"
#include "vmh_real.h"
#include <linux/seccomp.h>
#include <stdarg.h>
#include <sys/prctl.h>
#include <sys/syscall.h>

/* Without a filter it asks whether there are any (EFAULT: there are). */
bool vmh_sets_filter(long number, unsigned long a, unsigned long b, const void *filter)
{
	if (number == SYS_prctl)
		return a == PR_SET_SECCOMP && (b != SECCOMP_MODE_FILTER || filter);
	return number == SYS_seccomp && (a == SECCOMP_SET_MODE_STRICT || (a == SECCOMP_SET_MODE_FILTER && filter));
}

VMH_EXPORT int prctl(int option, ...)
{
	static int (*real)(int, ...);
	unsigned long a[4];
	va_list list;

	va_start(list, option);
	for (int i = 0; i < 4; i++)
		a[i] = va_arg(list, unsigned long);
	va_end(list);
	if (!real)
		vmh_real_find(&real, "prctl");
	if (vmh_sets_filter(SYS_prctl, (unsigned long)option, a[0], (const void *)a[1]))
		vmh_before_filter();
	return real(option, a[0], a[1], a[2], a[3]);
}
