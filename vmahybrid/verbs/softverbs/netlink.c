/* Interfaces and their addresses, by rtnetlink. */
#include <linux/filter.h>
#include <linux/if_link.h>
#include <linux/netlink.h>
#include <linux/rtnetlink.h>
#include <net/if.h>
#include <stdlib.h>
#include <string.h>
#include "sv.h"

#define SV_NETLINK_BUFFER 32768

/* One dump. `each` gets every message of it; 0 or -errno. */
static int dump(int type, int family, void (*each)(const struct nlmsghdr *message, void *argument), void *argument)
{
	struct {
		struct nlmsghdr head;
		struct ifinfomsg info; /* begins with the family, as ifaddrmsg */
	} request = { { sizeof(request), (uint16_t)type, NLM_F_REQUEST | NLM_F_DUMP, 1, 0 }, { .ifi_family = (uint8_t)family } };
	struct msghdr message = { 0 };
	struct iovec part = { &request, sizeof(request) };
	int fd = sv_socket(AF_NETLINK, SOCK_RAW, NETLINK_ROUTE), error = 1;
	uint8_t *buffer = malloc(SV_NETLINK_BUFFER);

	message.msg_iov = &part;
	message.msg_iovlen = 1;
	if (fd < 0)
		error = fd;
	else if (!buffer)
		error = -ENOMEM;
	else if ((error = (int)sv_sendmsg(fd, &message, 0)) > 0)
		error = 1;
	while (error == 1) {
		long size = sv_recv(fd, buffer, SV_NETLINK_BUFFER, 0);
		struct nlmsghdr *at = (struct nlmsghdr *)buffer;

		if (size < 0)
			error = size == -EINTR ? 1 : (int)size;
		for (unsigned int left = size < 0 ? 0 : (unsigned int)size; error == 1 && NLMSG_OK(at, left);
		     at = NLMSG_NEXT(at, left)) {
			if (at->nlmsg_type == NLMSG_DONE)
				error = 0;
			else if (at->nlmsg_type == NLMSG_ERROR)
				error = ((struct nlmsgerr *)NLMSG_DATA(at))->error;
			else
				each(at, argument);
		}
	}
	free(buffer);
	sv_close(&fd);
	return error;
}

static bool read_link(const struct nlmsghdr *message, struct sv_link *link)
{
	const struct ifinfomsg *info = NLMSG_DATA(message);
	const struct rtattr *attr = IFLA_RTA(info);
	long left = (long)IFLA_PAYLOAD(message);

	if (message->nlmsg_type != RTM_NEWLINK)
		return false;
	memset(link, 0, sizeof(*link));
	link->ifindex = info->ifi_index;
	link->flags = info->ifi_flags;
	link->type = info->ifi_type;
	for (; RTA_OK(attr, left); attr = RTA_NEXT(attr, left)) {
		if (attr->rta_type == IFLA_IFNAME)
			strncpy(link->name, RTA_DATA(attr), sizeof(link->name) - 1);
		else if (attr->rta_type == IFLA_MTU)
			memcpy(&link->mtu, RTA_DATA(attr), sizeof(link->mtu));
		else if (attr->rta_type == IFLA_ADDRESS && RTA_PAYLOAD(attr) == sizeof(link->mac))
			memcpy(link->mac, RTA_DATA(attr), sizeof(link->mac));
	}
	return true;
}

struct link_walk {
	int (*each)(const struct sv_link *link, void *argument);
	void *argument;
	int stopped;
};

static void walk_link(const struct nlmsghdr *message, void *argument)
{
	struct link_walk *walk = argument;
	struct sv_link link;

	if (!walk->stopped && read_link(message, &link))
		walk->stopped = walk->each(&link, walk->argument);
}

int sv_links(int (*each)(const struct sv_link *link, void *argument), void *argument)
{
	struct link_walk walk = { each, argument, 0 };

	return dump(RTM_GETLINK, AF_UNSPEC, walk_link, &walk);
}

static int take_link(const struct sv_link *link, void *argument)
{
	struct sv_link *wanted = argument;

	if (link->ifindex != wanted->ifindex)
		return 0;
	*wanted = *link;
	return 1;
}

/* -ENODEV when there is none. */
int sv_link_of(int ifindex, struct sv_link *link)
{
	int error;

	memset(link, 0, sizeof(*link));
	link->ifindex = ifindex;
	error = sv_links(take_link, link);
	return error ? error : link->name[0] ? 0 : -ENODEV;
}

struct address_walk {
	int ifindex;
	int (*each)(const uint8_t gid[16], void *argument);
	void *argument;
	int stopped;
};

static void walk_address(const struct nlmsghdr *message, void *argument)
{
	const struct ifaddrmsg *info = NLMSG_DATA(message);
	const struct rtattr *attr = IFA_RTA(info);
	struct address_walk *walk = argument;
	long left = (long)IFA_PAYLOAD(message);
	uint8_t gid[16] = { [10] = 0xff, [11] = 0xff }; /* an IPv4 address is mapped, as in RoCE */
	bool found = false;

	if (walk->stopped || message->nlmsg_type != RTM_NEWADDR || (int)info->ifa_index != walk->ifindex)
		return;
	for (; RTA_OK(attr, left); attr = RTA_NEXT(attr, left)) {
		if (info->ifa_family == AF_INET && attr->rta_type == IFA_LOCAL && RTA_PAYLOAD(attr) == 4) {
			memcpy(gid + 12, RTA_DATA(attr), 4);
			found = true;
		} else if (info->ifa_family == AF_INET6 && attr->rta_type == IFA_ADDRESS && RTA_PAYLOAD(attr) == 16) {
			memcpy(gid, RTA_DATA(attr), 16);
			found = true;
		}
	}
	if (found)
		walk->stopped = walk->each(gid, walk->argument);
}

int sv_addresses(int ifindex, int (*each)(const uint8_t gid[16], void *argument), void *argument)
{
	struct address_walk walk = { ifindex, each, argument, 0 };

	return dump(RTM_GETADDR, AF_UNSPEC, walk_address, &walk);
}

/* A socket that is readable when something happened to the interface, and only then. */
int sv_netlink_watch(int ifindex)
{
	/* the index is at a fixed place, and BPF reads it in network order */
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, sizeof(struct nlmsghdr) + offsetof(struct ifinfomsg, ifi_index)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, __builtin_bswap32((uint32_t)ifindex), 0, 1),
		BPF_STMT(BPF_RET | BPF_K, 0xffffffff),
		BPF_STMT(BPF_RET | BPF_K, 0),
	};
	struct sock_fprog program = { sizeof(code) / sizeof(*code), code };
	struct sockaddr_nl address = { .nl_family = AF_NETLINK, .nl_groups = RTMGRP_LINK };
	int fd = sv_socket(AF_NETLINK, SOCK_RAW | SOCK_NONBLOCK, NETLINK_ROUTE), error;

	if (fd < 0)
		return fd;
	if (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__)
		code[1].k = (uint32_t)ifindex;
	error = sv_setsockopt(fd, SOL_SOCKET, SO_ATTACH_FILTER, &program, sizeof(program));
	if (!error)
		error = sv_bind(fd, &address, sizeof(address));
	if (error)
		sv_close(&fd);
	return error ? error : fd;
}

int sv_netlink_state(const void *message, size_t size, int ifindex)
{
	const struct nlmsghdr *at = message;
	unsigned int left = (unsigned int)size;
	struct sv_link link;
	int state = -2;

	for (; NLMSG_OK(at, left); at = NLMSG_NEXT(at, left)) {
		const struct ifinfomsg *info = NLMSG_DATA(at);

		if (info->ifi_index != ifindex)
			continue;
		/* bridges tell of ports in AF_BRIDGE messages of the same type */
		if (at->nlmsg_type == RTM_DELLINK && info->ifi_family == AF_UNSPEC)
			return -1;
		if (read_link(at, &link) && info->ifi_family == AF_UNSPEC)
			state = sv_link_active(&link);
	}
	return state;
}
