/* What a device says of itself. */
#include <net/if.h>
#include <string.h>
#include <time.h>
#include "sv.h"

#define SV_MTU_CODES IBV_MTU_4096

/* The carrier, not IFF_RUNNING, which follows it up to a second later. */
#define CARRIER 0x10000u /* IFF_LOWER_UP of linux/if.h, which does not go together with net/if.h */

bool sv_link_active(const struct sv_link *link)
{
	return link->flags & IFF_UP && link->flags & CARRIER;
}

/* ns of CLOCK_REALTIME (0) or CLOCK_MONOTONIC (1) */
int64_t sv_clock(int which)
{
	struct timespec now;

	clock_gettime(which, &now);
	return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void fill_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	memset(attr, 0, sizeof(*attr));
	strcpy(attr->fw_ver, "softverbs-1");
	attr->node_guid = attr->sys_image_guid = ibv_get_device_guid(context->device);
	attr->max_mr_size = ~0ULL;
	attr->page_size_cap = ~0xfffULL;
	attr->vendor_id = 0xfffff1; /* of no vendor */
	attr->vendor_part_id = 1;
	attr->hw_ver = 1;
	attr->max_qp = attr->max_cq = attr->max_pd = attr->max_mr = SV_MAX_OBJECTS;
	attr->max_qp_wr = SV_MAX_WR;
	attr->max_sge = attr->max_sge_rd = SV_MAX_SGE;
	attr->max_cqe = SV_MAX_CQE;
	attr->max_pkeys = 1;
	attr->phys_port_cnt = 1;
	attr->max_raw_ethy_qp = SV_SLOTS; /* that receive */
	attr->device_cap_flags = IBV_DEVICE_RAW_IP_CSUM | IBV_DEVICE_MANAGED_FLOW_STEERING;
}

SV_EXPORT int ibv_query_device(struct ibv_context *context, struct ibv_device_attr *attr)
{
	fill_device(context, attr);
	return 0;
}

int sv_query_device_ex(struct ibv_context *context, const struct ibv_query_device_ex_input *input,
		       struct ibv_device_attr_ex *attr, size_t size)
{
	struct ibv_device_attr_ex known;

	if (input && input->comp_mask)
		return EINVAL;
	memset(&known, 0, sizeof(known));
	fill_device(context, &known.orig_attr);
	known.phys_port_cnt_ex = 1;
	known.hca_core_clock = 1000000; /* kHz: the clock counts ns */
	known.completion_timestamp_mask = ~0ULL;
	known.device_cap_flags_ex = IBV_DEVICE_RAW_IP_CSUM | IBV_DEVICE_MANAGED_FLOW_STEERING;
	known.raw_packet_caps = IBV_RAW_PACKET_CAP_IP_CSUM | IBV_RAW_PACKET_CAP_CVLAN_STRIPPING;
	known.cq_mod_caps = (struct ibv_cq_moderation_caps){ .max_cq_count = 65535, .max_cq_period = 65535 };
	memset(attr, 0, size);
	memcpy(attr, &known, size < sizeof(known) ? size : sizeof(known));
	return 0;
}

int sv_query_port(struct ibv_context *context, uint8_t port, struct ibv_port_attr *attr, size_t size)
{
	const struct sv_device *d = sv_context(context)->device;
	struct ibv_port_attr known;
	struct sv_link link;
	int error;

	if (port != 1)
		return EINVAL;
	error = sv_device_here(d) ? sv_link_of(d->ifindex, &link) : -ENODEV;
	if (error)
		return -error;
	memset(&known, 0, sizeof(known));
	known.state = sv_link_active(&link) ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
	known.phys_state = sv_link_active(&link) ? 5 : 3; /* LinkUp, Disabled */
	known.max_mtu = SV_MTU_CODES;
	known.active_mtu = IBV_MTU_256;
	while (known.active_mtu < SV_MTU_CODES && (256 << known.active_mtu) <= link.mtu)
		known.active_mtu++;
	known.gid_tbl_len = 128;
	known.pkey_tbl_len = 1;
	known.max_msg_sz = 1u << 20;
	known.active_width = 1;
	known.active_speed = 32;
	known.link_layer = IBV_LINK_LAYER_ETHERNET;
	memcpy(attr, &known, size < sizeof(known) ? size : sizeof(known));
	return 0;
}

#undef ibv_query_port
SV_EXPORT int ibv_query_port(struct ibv_context *context, uint8_t port, struct _compat_ibv_port_attr *attr)
{
	/* callers built before the structure grew */
	return sv_query_port(context, port, (struct ibv_port_attr *)attr, offsetof(struct ibv_port_attr, port_cap_flags2));
}

int sv_query_rt_values(struct ibv_context *context, struct ibv_values_ex *values)
{
	(void)context;
	if (values->comp_mask & ~(uint32_t)IBV_VALUES_MASK_RAW_CLOCK)
		return EINVAL;
	if (values->comp_mask)
		clock_gettime(CLOCK_MONOTONIC, &values->raw_clock);
	return 0;
}

struct gid_walk {
	uint32_t index, wanted;
	union ibv_gid gid;
	bool found;
};

static int count_gid(const uint8_t gid[16], void *argument)
{
	struct gid_walk *walk = argument;

	if (walk->index++ != walk->wanted)
		return 0;
	memcpy(walk->gid.raw, gid, 16);
	walk->found = true;
	return 1;
}

/* Entry 0 is the link-local one of the interface's address, then come its IP addresses. */
static int find_gid(struct ibv_context *context, uint32_t port, uint32_t index, union ibv_gid *gid)
{
	struct sv_device *d = sv_context(context)->device;
	struct gid_walk walk = { .index = 1, .wanted = index };
	int error;

	if (port != 1)
		return EINVAL;
	if (index == 0) {
		memset(gid, 0, sizeof(*gid));
		gid->raw[0] = 0xfe;
		gid->raw[1] = 0x80;
		gid->global.interface_id = ibv_get_device_guid(&d->base);
		return 0;
	}
	error = sv_device_here(d) ? sv_addresses(d->ifindex, count_gid, &walk) : -ENODEV;
	if (error)
		return -error;
	if (!walk.found)
		return ENODATA;
	*gid = walk.gid;
	return 0;
}

SV_EXPORT int ibv_query_gid(struct ibv_context *context, uint8_t port, int index, union ibv_gid *gid)
{
	int error = index < 0 || index >= 128 ? EINVAL : find_gid(context, port, (uint32_t)index, gid);

	if (error == ENODATA) { /* sysfs shows empty entries as zeros */
		memset(gid, 0, sizeof(*gid));
		return 0;
	}
	errno = error;
	return error ? -1 : 0;
}

SV_EXPORT int _ibv_query_gid_ex(struct ibv_context *context, uint32_t port, uint32_t index, struct ibv_gid_entry *entry,
				uint32_t flags, size_t size)
{
	struct ibv_gid_entry known = {
		.gid_index = index,
		.port_num = port,
		.gid_type = IBV_GID_TYPE_ROCE_V2,
		.ndev_ifindex = (uint32_t)sv_context(context)->device->ifindex,
	};
	int error = flags ? EINVAL : find_gid(context, port, index, &known.gid);

	if (error)
		return error;
	memcpy(entry, &known, size < sizeof(known) ? size : sizeof(known));
	return 0;
}

SV_EXPORT ssize_t _ibv_query_gid_table(struct ibv_context *context, struct ibv_gid_entry *entries, size_t max,
				       uint32_t flags, size_t size)
{
	for (size_t i = 0; i < max; i++) {
		int error = _ibv_query_gid_ex(context, 1, (uint32_t)i, (void *)((char *)entries + i * size), flags, size);

		if (error == ENODATA)
			return (ssize_t)i;
		if (error)
			return -error;
	}
	return max ? (ssize_t)max : -EINVAL;
}

/* Private between rdma-core's parts; pyverbs calls it. 1: RoCE v2 in its sysfs terms. */
SV_EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, int *type);
SV_EXPORT int ibv_query_gid_type(struct ibv_context *context, uint8_t port, unsigned int index, int *type)
{
	union ibv_gid gid;

	errno = find_gid(context, port, index, &gid);
	*type = 1;
	return errno ? -1 : 0;
}

SV_EXPORT int ibv_query_pkey(struct ibv_context *context, uint8_t port, int index, __be16 *pkey)
{
	(void)context;
	if (port != 1 || index) {
		errno = EINVAL;
		return -1;
	}
	*pkey = 0xffff;
	return 0;
}

SV_EXPORT int ibv_get_pkey_index(struct ibv_context *context, uint8_t port, __be16 pkey)
{
	(void)context;
	if (port == 1 && pkey == 0xffff)
		return 0;
	errno = EINVAL;
	return -1;
}
