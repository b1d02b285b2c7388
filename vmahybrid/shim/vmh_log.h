/* Log lines of the library: " VMA <LEVEL>: text", to stderr or VMA_LOG_FILE, levels and details as in
 * the manual (VMA_TRACELEVEL, VMA_LOG_DETAILS, VMA_LOG_COLORS). On the packet path there is vmh_trace.h alone,
 * at the levels fine and finer. */
#ifndef VMH_LOG_H
#define VMH_LOG_H
#include "vmh_base.h"

enum vmh_log_level {
	VMH_LOG_NONE = -1,
	VMH_LOG_PANIC = 0,
	VMH_LOG_ERROR,
	VMH_LOG_WARNING,
	VMH_LOG_INFO,
	VMH_LOG_DETAILS,
	VMH_LOG_DEBUG,
	VMH_LOG_FINE,
	VMH_LOG_FINER,
	VMH_LOG_ALL,
};
extern _Atomic int vmh_log_level_now;   /* changed live by `vma_stats -l` */
extern _Atomic int vmh_log_details_now;

void vmh_log_init(void);    /* after vmh_params_init */
void vmh_log_reopen(void);  /* in the child of a fork */
/* The program has put another file under 2, with dup2() and the like: its lines go there, and ours. */
void vmh_log_stderr_moved(void);
bool vmh_log_stderr_usable(void); /* false: 2 is something else by now, a file or a connection of the program */
/* keeps errno; one write(2) per line; at most 512 bytes */
void vmh_log_write(int level, const char *fmt, ...) __attribute__((format(printf, 2, 3)));

#define vmh_log(level, ...) \
	do { \
		if (vmh_unlikely((level) <= atomic_load_explicit(&vmh_log_level_now, memory_order_relaxed))) \
			vmh_log_write((level), __VA_ARGS__); \
	} while (0)
#define vmh_error(...) vmh_log(VMH_LOG_ERROR, __VA_ARGS__)
#define vmh_warn(...) vmh_log(VMH_LOG_WARNING, __VA_ARGS__)
#define vmh_info(...) vmh_log(VMH_LOG_INFO, __VA_ARGS__)
#define vmh_debug(...) vmh_log(VMH_LOG_DEBUG, __VA_ARGS__)
#endif
