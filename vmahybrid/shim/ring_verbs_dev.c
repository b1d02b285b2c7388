/* libibverbs and its devices: loading the library, finding the device of an interface, and what it can do. */
#include "ring_verbs.h"
#include "vmh_heap.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/capability.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/stat.h>

#define LIBRARY "libibverbs.so.1"
#define DISTRUSTED 8
#define DISTRUST_NS 30000000000ull
#define ADDRESSES 16 /* of a port that are compared */
#define SOFT_PREFIX "sv_" /* the software device of an interface is named after it */

struct verbs_lib vmh_ibv;

/* With VMA_BF=0 the providers of ConnectX adapters shall not use BlueFlame. They read these when a device is opened. */
static const struct {
	const char *name, *value;
} no_blueflame[] = {
	{ "MLX5_SHUT_UP_BF", "1" },
	{ "MLX5_POST_SEND_PREFER_BF", "0" },
	{ "MLX4_POST_SEND_PREFER_BF", "0" },
};

static bool find_functions(void *handle)
{
	static const struct {
		const char *name;
		size_t offset;
	} wanted[] = {
#define X(ret, name, args) { "ibv_" #name, offsetof(struct verbs_lib, name) },
		VERBS_FUNCTIONS(X)
#undef X
	};

	for (size_t i = 0; i < sizeof(wanted) / sizeof(wanted[0]); i++) {
		void *sym = dlsym(handle, wanted[i].name);

		if (!sym) {
			vmh_warn("%s has no %s: raw packet QPs are not used", LIBRARY, wanted[i].name);
			return false;
		}
		memcpy((char *)&vmh_ibv + wanted[i].offset, &sym, sizeof(sym));
	}
	return true;
}

/* Control lock held. Tried once per process image: a library that is installed later counts for the next one. */
static bool load(void)
{
	static int state; /* 0 not tried, 1 there, -1 not */
	void *handle;

	if (state)
		return state > 0;
	handle = dlopen(LIBRARY, RTLD_NOW | RTLD_LOCAL);
	if (!handle)
		vmh_debug("%s", dlerror());
	state = handle && find_functions(handle) ? 1 : -1;
	/* before anything is registered, or libibverbs could not protect it from a child's copy-on-write */
	if (state > 0 && vmh_params.fork && vmh_ibv.fork_init())
		vmh_warn("ibv_fork_init failed: the effect of fork() on this program's rings is undefined (VMA_FORK)");
	return state > 0;
}

static bool read_file(const char *dir, const char *file, char text[64])
{
	char path[512];
	long fd, n;

	snprintf(path, sizeof(path), "%s/%s", dir, file);
	fd = vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
	if (fd < 0)
		return false;
	n = vmh_sys(SYS_read, (int)fd, text, 63);
	vmh_sys(SYS_close, (int)fd);
	text[n > 0 ? n : 0] = 0;
	text[strcspn(text, "\n")] = 0;
	return n > 0;
}

static bool file_has(const char *dir, const char *file, const char *word)
{
	char text[64];

	return read_file(dir, file, text) && !strcmp(text, word);
}

struct own_link {
	const char *name;
	char ifindex[16], mac[18], eui64[20]; /* as sysfs writes them */
};

static _Atomic ino_t session_netns; /* 0: not known */

static ino_t netns_of(const char *path)
{
	struct stat s;

	return stat(path, &s) ? 0 : s.st_ino;
}

void vmh_verbs_session_begins(void)
{
	int saved = errno;

	atomic_store(&session_netns, netns_of("/proc/self/ns/net"));
	errno = saved;
}

/* A thread may have moved to another network namespace than the one that the service serves its program in. There a
 * device of the same name is another one. */
static bool elsewhere(void)
{
	ino_t own = atomic_load(&session_netns), here = netns_of("/proc/thread-self/ns/net");

	return own && here && own != here;
}

/* The process' own interface: what sysfs shows may be another namespace's, with the same name. */
static bool own_link(const char *ifname, struct own_link *l)
{
	struct ifreq req = { 0 };
	int fd = (int)vmh_sys(SYS_socket, AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
	unsigned char *m = (unsigned char *)req.ifr_hwaddr.sa_data;
	bool found;

	if (fd < 0)
		return false;
	strncpy(req.ifr_name, ifname, sizeof(req.ifr_name) - 1);
	found = vmh_sys(SYS_ioctl, fd, SIOCGIFINDEX, &req) >= 0;
	snprintf(l->ifindex, sizeof(l->ifindex), "%d", req.ifr_ifindex);
	found = found && vmh_sys(SYS_ioctl, fd, SIOCGIFHWADDR, &req) >= 0;
	vmh_sys(SYS_close, fd);
	l->name = ifname;
	snprintf(l->mac, sizeof(l->mac), "%02x:%02x:%02x:%02x:%02x:%02x", m[0], m[1], m[2], m[3], m[4], m[5]);
	snprintf(l->eui64, sizeof(l->eui64), "%02x%02x:%02xff:fe%02x:%02x%02x", m[0] ^ 2, m[1], m[2], m[3], m[4], m[5]);
	return found;
}

/* Is an address of the port, or of the device, made of the interface's MAC? */
static bool has_mac(const char *dir, const char *eui64)
{
	char file[64], text[64];

	if (file_has(dir, "node_guid", eui64))
		return true;
	for (unsigned i = 0; i < ADDRESSES; i++) {
		snprintf(file, sizeof(file), "ports/1/gids/%u", i);
		/* eight groups of four digits */
		if (read_file(dir, file, text) && strlen(text) == 39 && !strcmp(text + 20, eui64))
			return true;
	}
	return false;
}

static bool is_soft(const char *name)
{
	return !strncmp(name, SOFT_PREFIX, strlen(SOFT_PREFIX));
}

/* 0: the interface is not of this device; else the port's number. */
static unsigned port_of(struct ibv_device *dev, const struct own_link *l)
{
	const char *name = vmh_ibv.get_device_name(dev);
	char path[512], port[] = "0";

	if (is_soft(name))
		return !strcmp(name + strlen(SOFT_PREFIX), l->name);
	snprintf(path, sizeof(path), "%s/device", dev->ibdev_path);
	if (!vmh_sys(SYS_faccessat, AT_FDCWD, path, F_OK)) {
		snprintf(path, sizeof(path), "%s/device/net/%s", dev->ibdev_path, l->name);
		if (!file_has(path, "ifindex", l->ifindex) || !file_has(path, "address", l->mac))
			return 0;
		/* ports of one PCI function: dev_port counts from 0 */
		for (port[0] = '0'; port[0] < '8'; port[0]++)
			if (file_has(path, "dev_port", port))
				return (unsigned)(port[0] - '0') + 1;
		return 1;
	}
	/* devices on top of any interface (rxe, siw) are in every namespace, and name theirs without it */
	if (!file_has(dev->ibdev_path, "parent", l->name) &&
	    !file_has(dev->ibdev_path, "ports/1/gid_attrs/ndevs/0", l->name))
		return 0;
	return has_mac(dev->ibdev_path, l->eui64);
}

static struct ibv_context *open_context(struct ibv_device *dev)
{
	bool set[sizeof(no_blueflame) / sizeof(no_blueflame[0])] = { false };
	struct ibv_context *ctx;

	for (size_t i = 0; !vmh_params.bf && i < sizeof(set); i++) {
		set[i] = !getenv(no_blueflame[i].name);
		if (set[i])
			setenv(no_blueflame[i].name, no_blueflame[i].value, 0);
	}
	ctx = vmh_ibv.open_device(dev);
	for (size_t i = 0; i < sizeof(set); i++)
		if (set[i])
			unsetenv(no_blueflame[i].name);
	if (ctx) { /* the internal thread looks for events, and does not wait for them */
		long flags = vmh_sys(SYS_fcntl, ctx->async_fd, F_GETFL);

		if (flags >= 0)
			vmh_sys(SYS_fcntl, ctx->async_fd, F_SETFL, flags | O_NONBLOCK);
	}
	return ctx;
}

static bool has_cap_net_raw(void)
{
	struct __user_cap_header_struct h = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct d[2] = { { 0 } };

	return vmh_sys(SYS_capget, &h, d) == 0 && (d[0].effective & 1u << CAP_NET_RAW);
}

static void learn(struct verbs_dev *d, uint32_t *raw_caps)
{
	struct verbs_context *v = verbs_get_ctx_op(d->ctx, query_device_ex);
	struct ibv_device_attr_ex a = { 0 };

	if (!v || v->query_device_ex(d->ctx, NULL, &a, sizeof(a))) {
		memset(&a, 0, sizeof(a));
		vmh_ibv.query_device(d->ctx, &a.orig_attr);
	}
	d->max_wr = a.orig_attr.max_qp_wr > 0 ? (uint32_t)a.orig_attr.max_qp_wr : 0;
	d->max_cqe = a.orig_attr.max_cqe > 0 ? (uint32_t)a.orig_attr.max_cqe : 0;
	/* drivers say it in one word or in the other */
	d->csum = (a.orig_attr.device_cap_flags & IBV_DEVICE_RAW_IP_CSUM) ||
		  (a.raw_packet_caps & IBV_RAW_PACKET_CAP_IP_CSUM);
	d->max_dm = a.max_dm_size;
	*raw_caps = a.raw_packet_caps | (a.orig_attr.device_cap_flags & IBV_DEVICE_RAW_IP_CSUM);
}

/* Only an attempt tells: no attribute says it for all drivers. 0, or the errno. */
static int try_qp(struct verbs_dev *d)
{
	struct ibv_cq *cq = vmh_ibv.create_cq(d->ctx, 16, NULL, NULL, 0);
	struct ibv_qp_init_attr a = { .send_cq = cq, .recv_cq = cq, .qp_type = IBV_QPT_RAW_PACKET,
				      .cap = { .max_send_wr = 16, .max_recv_wr = 16, .max_send_sge = 2,
					       .max_recv_sge = 1 } };
	struct ibv_qp *qp;
	int err = errno;

	if (!cq)
		return err ? err : EIO;
	qp = vmh_ibv.create_qp(d->pd, &a);
	err = qp ? 0 : errno ? errno : EIO;
	if (qp)
		vmh_ibv.destroy_qp(qp);
	vmh_ibv.destroy_cq(cq);
	return err;
}

/* The words of the manual, section "CAP_NET_RAW and root access". Once per interface and session is enough. */
static void warn_capability(const char *ifname)
{
	static char told[32][16]; /* when it is full, the rest is told again */
	static unsigned n;

	for (unsigned i = 0; i < n; i++)
		if (!strncmp(told[i], ifname, sizeof(told[i]) - 1))
			return;
	if (n < sizeof(told) / sizeof(told[0]))
		strncpy(told[n++], ifname, sizeof(told[0]) - 1);
	vmh_warn("******************************************************************************");
	vmh_warn("* Interface %s will not be offloaded.", ifname);
	vmh_warn("* Offloaded resources are restricted to root or user with CAP_NET_RAW privileges");
	vmh_warn("* Read the CAP_NET_RAW and root access section in the VMA's User Manual for more information");
	vmh_warn("* (by a raw packet QP, that is: vmahybrid goes on with an AF_XDP ring or the kernel)");
	vmh_warn("******************************************************************************");
}

/* 0, or why the device can't be used */
static unsigned examine(struct verbs_dev *d, const char *ifname)
{
	uint32_t raw_caps;
	int err;

	learn(d, &raw_caps);
	d->pd = vmh_ibv.alloc_pd(d->ctx);
	if (!d->pd) {
		vmh_warn("no protection domain on %s: %s", d->name, strerror(errno));
		return VMH_R_VERBS_FAILED;
	}
	err = try_qp(d);
	if (!err)
		return 0;
	vmh_debug("no raw packet QP on %s: %s", d->name, strerror(err));
	switch (err) {
	case EPERM:
	case EACCES:
		/* the kernel looks at the capability before the driver says what it can do */
		if (!raw_caps)
			return VMH_R_NO_RAW_PACKET_QP;
		if (!has_cap_net_raw())
			warn_capability(ifname);
		return VMH_R_NO_CAP_NET_RAW;
	case EOPNOTSUPP:
	case ENOSYS:
	case EINVAL:
		return VMH_R_NO_RAW_PACKET_QP;
	default:
		return VMH_R_VERBS_FAILED;
	}
}

void vmh_verbs_dev_close(struct verbs_dev *d)
{
	if (!d)
		return;
	if (d->pd)
		vmh_ibv.dealloc_pd(d->pd);
	if (d->ctx)
		vmh_ibv.close_device(d->ctx);
	vmh_heap_free(d);
}

static struct verbs_dev *open_device(struct ibv_device *dev, unsigned port, const char *ifname, unsigned *reason)
{
	struct verbs_dev *d = vmh_heap_zero(1, sizeof(*d));

	*reason = VMH_R_VERBS_FAILED;
	if (!d)
		return NULL;
	snprintf(d->name, sizeof(d->name), "%s", vmh_ibv.get_device_name(dev));
	d->soft = is_soft(d->name);
	d->port = (uint8_t)port;
	d->ctx = open_context(dev);
	if (!d->ctx) {
		*reason = errno == EPERM || errno == EACCES ? VMH_R_NO_CAP_NET_RAW : VMH_R_VERBS_FAILED;
		vmh_warn("the RDMA device %s can't be opened: %s", d->name, strerror(errno));
	} else {
		*reason = examine(d, ifname);
	}
	if (!*reason)
		return d;
	vmh_verbs_dev_close(d);
	return NULL;
}

static struct {
	_Atomic unsigned ifindex;  /* an interface that is made again has another one, and a device to be tried */
	_Atomic uint64_t until_ns; /* written last */
} distrusted[DISTRUSTED];

void vmh_verbs_distrust(unsigned ifindex)
{
	unsigned oldest = 0;

	for (unsigned i = 0; i < DISTRUSTED; i++)
		if (atomic_load(&distrusted[i].until_ns) < atomic_load(&distrusted[oldest].until_ns))
			oldest = i;
	atomic_store(&distrusted[oldest].ifindex, ifindex);
	atomic_store(&distrusted[oldest].until_ns, vmh_now_ns() + DISTRUST_NS);
}

static bool is_distrusted(unsigned ifindex)
{
	for (unsigned i = 0; i < DISTRUSTED; i++)
		if (atomic_load(&distrusted[i].until_ns) > vmh_now_ns() && atomic_load(&distrusted[i].ifindex) == ifindex)
			return true;
	return false;
}

struct verbs_dev *vmh_verbs_probe(unsigned ifindex, const char *ifname, char name[VMH_VERBS_DEVICE], unsigned *reason)
{
	struct ibv_device **list;
	struct verbs_dev *d = NULL;
	struct own_link link;

	name[0] = 0;
	*reason = VMH_R_NO_VERBS_LIBRARY;
	if (!load())
		return NULL;
	*reason = VMH_R_NO_VERBS_DEVICE;
	if (elsewhere() || !own_link(ifname, &link))
		return NULL;
	list = vmh_ibv.get_device_list(NULL);
	for (int i = 0; list && list[i] && !name[0]; i++) {
		unsigned port = port_of(list[i], &link);

		if (!port)
			continue;
		snprintf(name, VMH_VERBS_DEVICE, "%s", vmh_ibv.get_device_name(list[i]));
		*reason = VMH_R_VERBS_FAILED;
		if (!is_distrusted(ifindex))
			d = open_device(list[i], port, ifname, reason);
	}
	if (list)
		vmh_ibv.free_device_list(list);
	return d;
}
