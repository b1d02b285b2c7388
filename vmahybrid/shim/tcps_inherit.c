/* Options of a listener for the connections that its rings accept. The kernel socket of such a connection is a new one,
 * and few programs set anything on a listener but SO_REUSEADDR: what differs from a new socket is found out once, so that
 * each accept() pays for that alone. */
#include "vmh_tcps_inherit.h"
#include "vmh_params.h"
#include "vmh_tcps.h"
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/time.h>

/* What can be set on a listener that stays on rings (tcps_opt.c), less what the kernel gives no connection (SO_PRIORITY,
 * TCP_FASTOPEN, TCP_QUICKACK) or the stack answers (SO_KEEPALIVE, SO_REUSEADDR, TCP_MAXSEG). */
static const struct {
	int level, name;
	socklen_t size;
} options[] = {
	{ SOL_SOCKET, SO_SNDBUF, sizeof(int) }, { SOL_SOCKET, SO_RCVBUF, sizeof(int) },
	{ SOL_SOCKET, SO_LINGER, sizeof(struct linger) },
	{ SOL_SOCKET, SO_RCVTIMEO, sizeof(struct timeval) }, { SOL_SOCKET, SO_SNDTIMEO, sizeof(struct timeval) },
	{ SOL_SOCKET, SO_BROADCAST, sizeof(int) }, { SOL_SOCKET, SO_DEBUG, sizeof(int) },
	{ SOL_SOCKET, SO_BUSY_POLL, sizeof(int) },
	{ IPPROTO_TCP, TCP_NODELAY, sizeof(int) }, { IPPROTO_TCP, TCP_CORK, sizeof(int) },
	{ IPPROTO_TCP, TCP_KEEPIDLE, sizeof(int) }, { IPPROTO_TCP, TCP_KEEPINTVL, sizeof(int) },
	{ IPPROTO_TCP, TCP_KEEPCNT, sizeof(int) }, { IPPROTO_TCP, TCP_USER_TIMEOUT, sizeof(int) },
	{ IPPROTO_TCP, TCP_SYNCNT, sizeof(int) }, { IPPROTO_TCP, TCP_INQ, sizeof(int) },
	{ IPPROTO_IP, IP_TOS, sizeof(int) }, { IPPROTO_IP, IP_TTL, sizeof(int) },
	{ IPPROTO_IPV6, IPV6_TCLASS, sizeof(int) }, { IPPROTO_IPV6, IPV6_UNICAST_HOPS, sizeof(int) },
	{ IPPROTO_IPV6, IPV6_V6ONLY, sizeof(int) },
};
#define OPTIONS (sizeof(options) / sizeof(options[0]))
_Static_assert(OPTIONS <= VMH_INHERITED, "there is room for all");

static bool is(unsigned which, int level, int name)
{
	return options[which].level == level && options[which].name == name;
}

static bool is_buffer(unsigned which)
{
	return is(which, SOL_SOCKET, SO_SNDBUF) || is(which, SOL_SOCKET, SO_RCVBUF);
}

static bool read_option(int fd, unsigned which, uint64_t value[2])
{
	socklen_t len = options[which].size;

	return vmh_sys(SYS_getsockopt, fd, options[which].level, options[which].name, value, &len) >= 0;
}

/* The kernel doubles what it is given. */
static void halve(uint64_t value[2])
{
	int v;

	memcpy(&v, value, sizeof(v));
	v /= 2;
	memcpy(value, &v, sizeof(v));
}

void vmh_inherited_read(struct vmh_inherited *i, int listener, bool v6)
{
	int new = (int)vmh_sys(SYS_socket, v6 ? AF_INET6 : AF_INET, SOCK_STREAM | SOCK_CLOEXEC, IPPROTO_TCP);

	i->n = 0;
	if (new < 0)
		return;
	for (unsigned which = 0; which < OPTIONS; which++) {
		uint64_t has[2] = { 0 }, usual[2] = { 0 };

		if ((options[which].level == IPPROTO_IPV6 && !v6) || !read_option(listener, which, has) ||
		    !read_option(new, which, usual) || !memcmp(has, usual, sizeof(has)))
			continue;
		if (is_buffer(which))
			halve(has);
		memcpy(i->o[i->n].value, has, sizeof(has));
		i->o[i->n++].which = (uint8_t)which;
	}
	vmh_sys(SYS_close, new);
}

uint8_t vmh_inherited_write(const struct vmh_inherited *i, int fd)
{
	uint8_t touched = 0;

	for (unsigned k = 0; k < i->n; k++) {
		unsigned which = i->o[k].which;
		bool nodelay = is(which, IPPROTO_TCP, TCP_NODELAY);

		if (nodelay && vmh_params.avoid_sys_calls_on_tcp_fd)
			continue; /* the stack answers, and its state carries it home */
		touched |= nodelay ? VMH_TCPS_NODELAY : VMH_TCPS_TOUCHED;
		vmh_sys(SYS_setsockopt, fd, options[which].level, options[which].name, i->o[k].value, options[which].size);
		if (is(which, IPPROTO_IP, IP_TOS)) /* sets it as well, and accept(2) sets it to 0 */
			vmh_sys(SYS_setsockopt, fd, SOL_SOCKET, SO_PRIORITY, &(int){ 0 }, sizeof(int));
	}
	return touched;
}
