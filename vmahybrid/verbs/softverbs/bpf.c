/* The steering programs, their maps and rings, by bpf(2) alone. Links and maps are fds: they end with the process. */
#include <linux/bpf.h>
#include <linux/capability.h>
#include <string.h>
#include <sys/mman.h>
#include "sv.h"

enum { SV_MAP_RULES, SV_MAP_TABLES, SV_MAP_CONTROLS, SV_MAP_RINGS };
#include "steer_code.h"

/* of Linux 6.6; Debian 12's headers precede it */
enum { SV_TCX_INGRESS = 46, SV_TCX_EGRESS = 47 };

#define SV_MAX_RULES 65536
#define SV_LOG_SIZE 65536

static int sv_bpf(enum bpf_cmd command, union bpf_attr *attr)
{
	return (int)SV_CALL(SYS_bpf, command, attr, sizeof(*attr));
}

static int map_create(enum bpf_map_type type, const char *name, uint32_t key, uint32_t value, uint32_t entries,
		      uint32_t flags, int inner)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.map_type = type;
	attr.key_size = key;
	attr.value_size = value;
	attr.max_entries = entries;
	attr.map_flags = flags;
	if (inner >= 0)
		attr.inner_map_fd = (uint32_t)inner;
	strncpy(attr.map_name, name, sizeof(attr.map_name) - 1);
	return sv_own(sv_bpf(BPF_MAP_CREATE, &attr));
}

int sv_map_update(int map, const void *key, const void *value)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.map_fd = (uint32_t)map;
	attr.key = (uintptr_t)key;
	attr.value = (uintptr_t)value;
	return sv_bpf(BPF_MAP_UPDATE_ELEM, &attr);
}

int sv_map_delete(int map, const void *key)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.map_fd = (uint32_t)map;
	attr.key = (uintptr_t)key;
	return sv_bpf(BPF_MAP_DELETE_ELEM, &attr);
}

/* Of programs without this the verifier demands what ours are not, and refuses them with whatever it stumbled over. */
static bool has_perfmon(void)
{
	struct __user_cap_header_struct head = { .version = _LINUX_CAPABILITY_VERSION_3 };
	struct __user_cap_data_struct have[2] = { { 0 } };

	return SV_CALL(SYS_capget, &head, have) || have[0].effective & 1u << CAP_SYS_ADMIN ||
	       have[1].effective & 1u << (CAP_PERFMON - 32);
}

static int load(const struct sv_steering *steering, const char *name, const struct bpf_insn *code, uint32_t insns,
		const struct sv_reloc *relocs, uint32_t count)
{
	const int maps[] = { steering->rules, steering->tables, steering->controls, steering->rings };
	struct bpf_insn program[insns];
	union bpf_attr attr;
	static char log[SV_LOG_SIZE]; /* only written to in the registry lock */
	int fd, error;

	memcpy(program, code, insns * sizeof(*code));
	for (uint32_t i = 0; i < count; i++) {
		program[relocs[i].insn].src_reg = BPF_PSEUDO_MAP_FD;
		program[relocs[i].insn].imm = maps[relocs[i].map];
	}
	memset(&attr, 0, sizeof(attr));
	attr.prog_type = BPF_PROG_TYPE_SCHED_CLS;
	attr.insns = (uintptr_t)program;
	attr.insn_cnt = insns;
	attr.license = (uintptr_t) "GPL";
	strncpy(attr.prog_name, name, sizeof(attr.prog_name) - 1);
	fd = sv_bpf(BPF_PROG_LOAD, &attr);
	if (fd >= 0 || fd == -EPERM)
		return fd;
	if (!has_perfmon())
		return -EPERM;
	error = fd;
	attr.log_level = 1;
	attr.log_buf = (uintptr_t)log;
	attr.log_size = sizeof(log);
	fd = sv_bpf(BPF_PROG_LOAD, &attr);
	if (fd >= 0)
		return fd;
	sv_say("%s is refused: %s\n%s", name, strerror(-error), log);
	return error; /* not that of a log which is too small */
}

static int attach(int program, int ifindex, int where)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.link_create.prog_fd = (uint32_t)program;
	attr.link_create.target_fd = (uint32_t)ifindex; /* shares its place with target_ifindex */
	attr.link_create.attach_type = (uint32_t)where;
	return sv_own(sv_bpf(BPF_LINK_CREATE, &attr));
}

/* Asked of the kernel before its verifier refuses programs for reasons of its own. Without CAP_NET_ADMIN: false. */
static bool has_no_tcx(int ifindex)
{
	union bpf_attr attr;

	memset(&attr, 0, sizeof(attr));
	attr.query.target_fd = (uint32_t)ifindex;
	attr.query.attach_type = SV_TCX_INGRESS;
	return sv_bpf(BPF_PROG_QUERY, &attr) == -EINVAL;
}

static int attach_code(struct sv_steering *steering, int ifindex, bool ingress)
{
	int link, program;

	if (ingress)
		program = load(steering, "sv_ingress", sv_ingress_code, sizeof(sv_ingress_code) / sizeof(struct bpf_insn),
			       sv_ingress_relocs, sizeof(sv_ingress_relocs) / sizeof(struct sv_reloc));
	else
		program = load(steering, "sv_egress", sv_egress_code, sizeof(sv_egress_code) / sizeof(struct bpf_insn),
			       sv_egress_relocs, sizeof(sv_egress_relocs) / sizeof(struct sv_reloc));
	if (program < 0)
		return program;
	link = attach(program, ifindex, ingress ? SV_TCX_INGRESS : SV_TCX_EGRESS);
	sv_close(&program);
	return link;
}

static int open_maps(struct sv_steering *steering)
{
	int inner = map_create(BPF_MAP_TYPE_RINGBUF, "sv_ring", 0, 0, 4096, 0, -1);

	if (inner < 0)
		return inner;
	steering->rules = map_create(BPF_MAP_TYPE_HASH, "sv_rules", sizeof(struct sv_rule_key), sizeof(struct sv_rule),
				     SV_MAX_RULES, BPF_F_NO_PREALLOC, -1);
	steering->tables = map_create(BPF_MAP_TYPE_ARRAY, "sv_tables", 4, sizeof(struct sv_table), SV_TABLES, 0, -1);
	steering->controls = map_create(BPF_MAP_TYPE_ARRAY, "sv_control", 4, sizeof(struct sv_control), 1, BPF_F_MMAPABLE,
					-1);
	steering->rings = map_create(BPF_MAP_TYPE_ARRAY_OF_MAPS, "sv_rings", 4, 4, SV_SLOTS, 0, inner);
	sv_close(&inner);
	for (const int *fd = &steering->rules; fd <= &steering->rings; fd++)
		if (*fd < 0)
			return *fd;
	steering->control = sv_mmap(sizeof(struct sv_control), PROT_READ | PROT_WRITE, MAP_SHARED, steering->controls, 0);
	if (!steering->control)
		return -ENOMEM;
	/* The child of a fork has no business there, and must not keep it. */
	madvise(steering->control, sizeof(struct sv_control), MADV_DONTFORK);
	return 0;
}

/* 0 or -errno: EPERM without CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN, EOPNOTSUPP on kernels before 6.6 (no tcx). */
int sv_steering_open(int ifindex, struct sv_steering *steering)
{
	int error;

	*steering = (struct sv_steering){ -1, -1, -1, -1, -1, -1, NULL };
	error = has_no_tcx(ifindex) ? -EOPNOTSUPP : open_maps(steering);
	if (!error) {
		steering->ingress = attach_code(steering, ifindex, true);
		error = steering->ingress < 0 ? steering->ingress : 0;
	}
	if (!error) {
		steering->egress = attach_code(steering, ifindex, false);
		error = steering->egress < 0 ? steering->egress : 0;
	}
	if (error) {
		sv_say("no steering on interface %d: %s%s", ifindex, strerror(-error),
		       error == -EPERM        ? "; CAP_BPF, CAP_PERFMON and CAP_NET_ADMIN are needed"
		       : error == -EOPNOTSUPP ? "; the kernel has no tcx (Linux 6.6)"
					      : "");
		sv_steering_close(steering);
	}
	return error;
}

void sv_steering_close(struct sv_steering *steering)
{
	int *fds[] = { &steering->ingress, &steering->egress,   &steering->rules,
		       &steering->tables,  &steering->controls, &steering->rings };

	for (size_t i = 0; i < sizeof(fds) / sizeof(*fds); i++)
		sv_close(fds[i]);
	if (steering->control)
		sv_munmap(steering->control, sizeof(struct sv_control));
	steering->control = NULL;
}

/* A link outlives its interface, and names none then. */
bool sv_steering_attached(const struct sv_steering *steering, int ifindex)
{
	struct bpf_link_info info;
	union bpf_attr attr;

	memset(&info, 0, sizeof(info));
	memset(&attr, 0, sizeof(attr));
	attr.info.bpf_fd = (uint32_t)steering->ingress;
	attr.info.info_len = sizeof(info);
	attr.info.info = (uintptr_t)&info;
	/* tcx.ifindex, which Debian 12's headers have not, is at the same place */
	return sv_bpf(BPF_OBJ_GET_INFO_BY_FD, &attr) || info.xdp.ifindex == (uint32_t)ifindex;
}

/* `size`: of the data, a power of two. Linux maps it twice in a row, so that no record is torn. */
int sv_ring_open(size_t size, struct sv_ring *ring)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);
	uint8_t *producer;

	ring->size = size;
	ring->fd = map_create(BPF_MAP_TYPE_RINGBUF, "sv_ring", 0, 0, (uint32_t)size, 0, -1);
	if (ring->fd < 0)
		return ring->fd;
	ring->consumer = sv_mmap(page, PROT_READ | PROT_WRITE, MAP_SHARED, ring->fd, 0);
	producer = sv_mmap(page + 2 * size, PROT_READ, MAP_SHARED, ring->fd, (long)page);
	if (!ring->consumer || !producer) {
		if (ring->consumer)
			sv_munmap(ring->consumer, page);
		sv_close(&ring->fd);
		return -ENOMEM;
	}
	madvise(ring->consumer, page, MADV_DONTFORK);
	madvise(producer, page + 2 * size, MADV_DONTFORK);
	ring->producer = (const unsigned long *)producer;
	ring->data = producer + page;
	return 0;
}

void sv_ring_close(struct sv_ring *ring)
{
	size_t page = (size_t)sysconf(_SC_PAGESIZE);

	if (ring->fd < 0)
		return;
	sv_munmap(ring->consumer, page);
	sv_munmap((void *)(uintptr_t)ring->producer, page + 2 * ring->size);
	sv_close(&ring->fd);
}
