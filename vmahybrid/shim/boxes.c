/* The boxes of the manual's troubleshooting section, in its words, each where what it says is so here. */
#include "vmh_banner.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <sys/resource.h>

static void box(const char *const *lines, unsigned n)
{
	for (unsigned i = 0; i < n; i++)
		vmh_warn("%s", lines[i]);
}

void vmh_warn_high_level(void)
{
	static const char *const lines[] = {
		"*************************************************************",
		"* VMA is currently configured with high log level           *",
		"* Application performance will decrease in this log level!  *",
		"* This log level is recommended for debugging purposes only *",
		"*************************************************************",
	};

	if (vmh_params.tracelevel >= VMH_LOG_DEBUG)
		box(lines, sizeof(lines) / sizeof(lines[0]));
}

void vmh_warn_locked_memory(void)
{
	static const char stars[] = "**********************************************************";
	static _Atomic int said;
	struct rlimit limit;

	if (vmh_sys(SYS_prlimit64, 0, RLIMIT_MEMLOCK, NULL, &limit) || limit.rlim_cur == RLIM_INFINITY ||
	    atomic_exchange(&said, 1))
		return;
	vmh_warn("%s", stars);
	vmh_warn("Your current max locked memory is: %lld. Please change it to unlimited.", (long long)limit.rlim_cur);
	vmh_warn("Set this user's default to `ulimit -l unlimited`.");
	vmh_warn("Read more about this issue in the VMA's User Manual.");
	vmh_warn("%s", stars);
}

void vmh_warn_huge_pages(void)
{
	static const char *const head[] = {
		"***************************************************************",
		"* NO IMMEDIATE ACTION NEEDED!                                 *",
		"* Not enough hugepage resources for VMA memory allocation.    *",
		"* VMA will continue working with regular memory allocation.   *",
	};
	static const char *const optional[] = {
		"* Optional: 1. Switch to a different memory allocation type   *",
		"*              (VMA_MEM_ALLOC_TYPE= 0 or 1)                   *",
		"*           2. Restart process after increasing the number of *",
		"*              hugepages resources in the system:             *",
		"* \"cat /proc/meminfo |  grep -i HugePage\"                     *",
		"* \"echo 1000000000 > /proc/sys/kernel/shmmax\"                 *",
		"* \"echo 800 > /proc/sys/vm/nr_hugepages\"                      *",
	};
	static const char *const foot[] = {
		"* Please refer to the memory allocation section in the VMA's  *",
		"* User Manual for more information                            *",
		"***************************************************************",
	};
	static _Atomic int said;

	if (atomic_exchange(&said, 1))
		return;
	box(head, sizeof(head) / sizeof(head[0]));
	for (unsigned i = 0; i < sizeof(optional) / sizeof(optional[0]); i++)
		vmh_info("%s", optional[i]);
	box(foot, sizeof(foot) / sizeof(foot[0]));
}
