/* Devices: one per Ethernet interface of the calling thread's network namespace, named sv_INTERFACE.
 * SOFTVERBS_DEVICES=eth0,eth1 in the environment limits them. */
#include <fcntl.h>
#include <net/if.h>
#include <net/if_arp.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include "sv.h"

static void put_device(struct sv_device *d)
{
	if (atomic_fetch_sub(&d->references, 1) == 1)
		free(d);
}

static bool wanted(const char *name)
{
	const char *list = getenv("SOFTVERBS_DEVICES");
	size_t length = strlen(name);

	if (!list)
		return true;
	for (const char *at = list; *at; at += strcspn(at, ","), at += *at == ',')
		if (strcspn(at, ",") == length && !strncmp(at, name, length))
			return true;
	return false;
}

struct device_list {
	struct sv_device **devices;
	int count;
	uint64_t netns;
	bool failed;
};

static int add_device(const struct sv_link *link, void *argument)
{
	struct device_list *list = argument;
	struct sv_device *d, **grown;

	if (link->type != ARPHRD_ETHER || link->flags & IFF_LOOPBACK || !wanted(link->name))
		return 0;
	grown = realloc(list->devices, ((size_t)list->count + 2) * sizeof(*grown));
	if (grown)
		list->devices = grown;
	d = calloc(1, sizeof(*d));
	if (!grown || !d) {
		free(d);
		list->failed = true;
		return 1;
	}
	d->references = 1;
	d->ifindex = link->ifindex;
	d->netns = list->netns;
	memcpy(d->mac, link->mac, sizeof(d->mac));
	memcpy(d->netdev, link->name, sizeof(d->netdev));
	d->base.node_type = IBV_NODE_CA;
	d->base.transport_type = IBV_TRANSPORT_IB;
	snprintf(d->base.name, sizeof(d->base.name), "sv_%s", link->name);
	snprintf(d->base.dev_name, sizeof(d->base.dev_name), "uverbs_%s", link->name);
	snprintf(d->base.dev_path, sizeof(d->base.dev_path), "/sys/class/net/%s", link->name);
	snprintf(d->base.ibdev_path, sizeof(d->base.ibdev_path), "/sys/class/net/%s", link->name);
	list->devices[list->count++] = d;
	list->devices[list->count] = NULL;
	return 0;
}

static uint64_t netns_of_thread(void)
{
	struct stat status;

	return stat("/proc/thread-self/ns/net", &status) ? 0 : status.st_ino;
}

bool sv_device_here(const struct sv_device *d)
{
	return netns_of_thread() == d->netns;
}

#undef ibv_get_device_list
SV_EXPORT struct ibv_device **ibv_get_device_list(int *num)
{
	struct device_list list = { .netns = netns_of_thread() };
	int error;

	if (num)
		*num = 0;
	list.devices = calloc(1, sizeof(*list.devices));
	if (!list.devices)
		return NULL;
	error = sv_links(add_device, &list);
	if (error || list.failed) {
		for (int i = 0; i < list.count; i++)
			put_device(list.devices[i]);
		free(list.devices);
		return SV_NULL(error ? -error : ENOMEM);
	}
	if (num)
		*num = list.count;
	return (struct ibv_device **)list.devices;
}

SV_EXPORT void ibv_free_device_list(struct ibv_device **list)
{
	for (int i = 0; list[i]; i++)
		put_device((struct sv_device *)list[i]);
	free(list);
}

SV_EXPORT const char *ibv_get_device_name(struct ibv_device *device)
{
	return device->name;
}

SV_EXPORT int ibv_get_device_index(struct ibv_device *device)
{
	return ((struct sv_device *)device)->ifindex;
}

/* The EUI-64 of the interface's address. */
SV_EXPORT __be64 ibv_get_device_guid(struct ibv_device *device)
{
	const uint8_t *mac = ((struct sv_device *)device)->mac;
	uint8_t guid[8] = { mac[0] ^ 2, mac[1], mac[2], 0xff, 0xfe, mac[3], mac[4], mac[5] };
	__be64 result;

	memcpy(&result, guid, sizeof(result));
	return result;
}

static void fill_operations(struct verbs_context *v)
{
	v->context.ops.poll_cq = sv_poll_cq;
	v->context.ops.req_notify_cq = sv_req_notify_cq;
	v->context.ops.post_send = sv_post_send;
	v->context.ops.post_recv = sv_post_recv;
	v->query_port = sv_query_port;
	v->query_device_ex = sv_query_device_ex;
	v->query_rt_values = sv_query_rt_values;
	v->create_cq_ex = sv_create_cq_ex;
	v->modify_cq = sv_modify_cq;
	v->create_qp_ex = sv_create_qp_ex;
	v->ibv_create_flow = sv_create_flow;
	v->ibv_destroy_flow = sv_destroy_flow;
}

SV_EXPORT struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	struct sv_device *d = (struct sv_device *)device;
	struct sv_context *x;
	struct sv_link link;
	int error = sv_link_of(d->ifindex, &link);

	/* the thread may have changed its namespace since it listed the devices */
	if (!error && (strcmp(link.name, d->netdev) != 0 || !sv_device_here(d)))
		error = -ENODEV;
	if (error)
		return SV_NULL(-error);
	x = calloc(1, sizeof(*x));
	if (!x)
		return NULL;
	x->device = d;
	x->events_end = &x->events;
	x->mr_salt = (uint8_t)(sv_clock(0) >> 10);
	x->was_active = sv_link_active(&link);
	pthread_mutex_init(&x->lock, NULL);
	pthread_mutex_init(&x->link_lock, NULL);
	pthread_rwlock_init(&x->mr_lock, NULL);
	error = sv_events_open(x);
	if (error) {
		free(x);
		return SV_NULL(-error);
	}
	atomic_fetch_add(&d->references, 1);
	sv_public(x)->device = device;
	sv_public(x)->cmd_fd = -1;
	sv_public(x)->num_comp_vectors = 1;
	sv_public(x)->abi_compat = __VERBS_ABI_IS_EXTENDED;
	pthread_mutex_init(&sv_public(x)->mutex, NULL);
	x->verbs.sz = sizeof(x->verbs);
	fill_operations(&x->verbs);
	sv_registry_add(x);
	return sv_public(x);
}

SV_EXPORT int ibv_close_device(struct ibv_context *context)
{
	struct sv_context *x = sv_context(context);

	sv_registry_remove(x);
	sv_engine_forget(x);
	sv_engine_leave(x);
	for (struct sv_qp *q = x->qps; q; q = q->next)
		sv_close(&q->tx_fd); /* and with it what it has the interface let in */
	sv_events_close(x);
	sv_tx_close_spares(x);
	put_device(x->device);
	pthread_mutex_destroy(&x->lock);
	pthread_mutex_destroy(&x->link_lock);
	pthread_rwlock_destroy(&x->mr_lock);
	pthread_mutex_destroy(&context->mutex);
	free(x->mrs);
	free(x);
	return 0;
}
