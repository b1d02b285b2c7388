/* Names of TCP sockets: a sockaddr of either family, and addresses as the stack has them. An AF_INET6 socket may have a
 * connection over IPv4, whose addresses it calls ::ffff:a.b.c.d. */
#include "vmh_base.h"
#include "vmh_tcps.h"

bool vmh_tcps_parse(const struct sockaddr *a, socklen_t len, struct vmh_ip *ip, in_port_t *port)
{
	struct sockaddr_in v4;
	struct sockaddr_in6 v6 = { 0 };

	if (len >= sizeof(v4) && a->sa_family == AF_INET) {
		memcpy(&v4, a, sizeof(v4));
		*ip = vmh_ip4(v4.sin_addr.s_addr);
		*port = v4.sin_port;
		return true;
	}
	if (len < offsetof(struct sockaddr_in6, sin6_scope_id) || a->sa_family != AF_INET6)
		return false;
	memcpy(&v6, a, len < sizeof(v6) ? len : sizeof(v6));
	*ip = vmh_ip6(&v6.sin6_addr);
	if (vmh_ip_is4(ip) && !ip->w[3]) /* ::ffff:0.0.0.0 */
		*ip = vmh_ip4(0);
	*port = v6.sin6_port;
	return true;
}

socklen_t vmh_tcps_compose(bool v6, const struct vmh_ip *ip, in_port_t port, struct sockaddr_storage *out)
{
	struct sockaddr_in in4 = { .sin_family = AF_INET, .sin_port = port, .sin_addr.s_addr = vmh_ip_v4(ip) };
	struct sockaddr_in6 in6 = { .sin6_family = AF_INET6, .sin6_port = port };

	if (!v6) {
		memcpy(out, &in4, sizeof(in4));
		return sizeof(in4);
	}
	memcpy(&in6.sin6_addr, ip->b, 16);
	memcpy(out, &in6, sizeof(in6));
	return sizeof(in6);
}

int vmh_tcps_tell(bool v6, const struct vmh_ip *ip, in_port_t port, struct sockaddr *a, socklen_t *len)
{
	struct sockaddr_storage name;
	socklen_t size = vmh_tcps_compose(v6, ip, port, &name);

	if (vmh_bad_ptr(len))
		return -EFAULT;
	if ((int)*len < 0)
		return -EINVAL;
	if (*len && vmh_bad_ptr(a))
		return -EFAULT;
	if (*len)
		memcpy(a, &name, *len < size ? *len : size);
	*len = size;
	return 0;
}

bool vmh_tcps_kernel_name(int fd, bool peer, struct vmh_ip *ip, in_port_t *port)
{
	struct sockaddr_storage name = { 0 };
	socklen_t len = sizeof(name);

	return vmh_sys(peer ? SYS_getpeername : SYS_getsockname, fd, &name, &len) >= 0 &&
	       vmh_tcps_parse((struct sockaddr *)&name, len, ip, port) && *port;
}

bool vmh_tcps_only_v6(int fd)
{
	int v = 0;
	socklen_t len = sizeof(v);

	return vmh_sys(SYS_getsockopt, fd, IPPROTO_IPV6, IPV6_V6ONLY, &v, &len) >= 0 && v;
}

/* RFC 6724, by who knows all that it asks for. */
struct vmh_ip vmh_tcps_source(const struct vmh_ip *to)
{
	struct vmh_ip from = { 0 };
	struct sockaddr_storage name;
	socklen_t len = vmh_tcps_compose(true, to, htons(9), &name);
	in_port_t port;
	int fd = (int)vmh_sys(SYS_socket, AF_INET6, SOCK_DGRAM | SOCK_CLOEXEC, 0);

	if (fd < 0)
		return from;
	if (vmh_sys(SYS_connect, fd, &name, len) < 0 || !vmh_tcps_kernel_name(fd, false, &from, &port))
		from = (struct vmh_ip){ 0 };
	vmh_sys(SYS_close, fd);
	return from;
}
