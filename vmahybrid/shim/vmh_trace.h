/* Calls of the program in the log, as the manual has it: debug has the socket API's, fine what sends and receives, finer
 * what waits. A branch where the level is lower, which a call that moves data can spare. */
#ifndef VMH_TRACE_H
#define VMH_TRACE_H
#include "vmh_base.h"
#include "vmh_log.h"
#include <sys/socket.h>

#define VMH_TRACE_TEXT 80

/* "10.0.0.1:53", for a call that returned r; text has VMH_TRACE_TEXT bytes. errno is kept, here and below. */
const char *vmh_trace_addr(char *text, const struct sockaddr *a, socklen_t len, ssize_t r);
VMH_COLD void vmh_trace_said(int level, const char *name, ssize_t r, const char *fmt, ...)
	__attribute__((format(printf, 4, 5)));
/* Is it one of our sockets or sets? */
VMH_COLD bool vmh_trace_known(int fd);

static inline bool vmh_traces(int level)
{
	return vmh_unlikely(level <= atomic_load_explicit(&vmh_log_level_now, memory_order_relaxed));
}

/* Before the body of an exported call: it becomes the body of NAME_call, and the call itself logs what that returned. */
#define VMH_TRACED_AS(level, type, name, params, args, known, ...) \
	static inline __attribute__((always_inline)) type name##_call params; \
	VMH_EXPORT type name params \
	{ \
		type r_ = name##_call args; \
		if (vmh_traces(level) && (known)) \
			vmh_trace_said(level, #name, (ssize_t)r_, __VA_ARGS__); \
		return r_; \
	} \
	static inline __attribute__((always_inline)) type name##_call params

#define VMH_TRACED(name, params, args, ...) VMH_TRACED_AS(VMH_LOG_DEBUG, int, name, params, args, true, __VA_ARGS__)
#define VMH_TRACED_DATA(type, name, params, args) \
	VMH_TRACED_AS(VMH_LOG_FINE, type, name, params, args, vmh_trace_known(fd), "%d", fd)
#define VMH_TRACED_WAIT(name, params, args, ...) \
	VMH_TRACED_AS(VMH_LOG_FINER, int, name, params, args, true, __VA_ARGS__)
#endif
