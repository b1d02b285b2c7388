/* See vmh_trace.h. */
#include "vmh_trace.h"
#include "vmh_obj.h"
#include "vmh_fd.h"
#include <arpa/inet.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>

const char *vmh_trace_addr(char *text, const struct sockaddr *a, socklen_t len, ssize_t r)
{
	char ip[INET6_ADDRSTRLEN];
	int saved = errno;

	snprintf(text, VMH_TRACE_TEXT, "%p", (const void *)a);
	if (vmh_bad_ptr(a) || (r < 0 && saved == EFAULT) || len < sizeof(sa_family_t))
		return text;
	if (a->sa_family == AF_INET && len >= sizeof(struct sockaddr_in)) {
		const struct sockaddr_in *in = (const struct sockaddr_in *)a;

		inet_ntop(AF_INET, &in->sin_addr, ip, sizeof(ip));
		snprintf(text, VMH_TRACE_TEXT, "%s:%u", ip, ntohs(in->sin_port));
	} else if (a->sa_family == AF_INET6 && len >= sizeof(struct sockaddr_in6)) {
		const struct sockaddr_in6 *in = (const struct sockaddr_in6 *)a;

		inet_ntop(AF_INET6, &in->sin6_addr, ip, sizeof(ip));
		snprintf(text, VMH_TRACE_TEXT, "[%s]:%u", ip, ntohs(in->sin6_port));
	} else {
		snprintf(text, VMH_TRACE_TEXT, "family %u", a->sa_family);
	}
	errno = saved;
	return text;
}

void vmh_trace_said(int level, const char *name, ssize_t r, const char *fmt, ...)
{
	const char *why = r < 0 ? strerrorname_np(errno) : NULL;
	char arguments[256];
	int saved = errno;
	va_list ap;

	va_start(ap, fmt);
	vsnprintf(arguments, sizeof(arguments), fmt, ap);
	va_end(ap);
	vmh_log_write(level, "%s(%s) = %zd%s%s", name, arguments, r, why ? " " : "", why ? why : "");
	errno = saved;
}

bool vmh_trace_known(int fd)
{
	return vmh_fd_peek(fd, VMH_CLASS_UDP) || vmh_fd_peek(fd, VMH_CLASS_TCP) || vmh_fd_peek(fd, VMH_CLASS_EPOLL);
}
