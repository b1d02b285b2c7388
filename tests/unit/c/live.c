#include "live.h"
#include "vmh_stats.h"
#include <linux/bpf.h>
#include <linux/if_link.h>
#include <linux/if_xdp.h>
#include <net/if.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/socket.h>

#define FRAME 2048

static const struct vmh_xdp_limits no_limits;
#define INSN(c, d, s, o, i) ((struct bpf_insn){.code = (c), .dst_reg = (d), .src_reg = (s), .off = (o), .imm = (i)})

static struct vmh_ring_stats stats[8];
static int nstats;

struct vmh_ring_stats *vmh_stats_ring_new(void)
{
	return &stats[nstats++ % 8];
}

void vmh_stats_ring_free(struct vmh_ring_stats *s)
{
	s->used = 0;
}

void live_die(const char *what, int err)
{
	fprintf(stderr, "%s: %s\n", what, strerror(err < 0 ? -err : err));
	exit(1);
}

void live_mac(const char *text, unsigned char mac[6])
{
	if (sscanf(text, "%hhx:%hhx:%hhx:%hhx:%hhx:%hhx", mac, mac + 1, mac + 2, mac + 3, mac + 4, mac + 5) != 6)
		live_die(text, EINVAL);
}

static int bpf(int cmd, union bpf_attr *a)
{
	int fd = (int)syscall(SYS_bpf, cmd, a, sizeof(*a));

	if (fd < 0)
		live_die("bpf", errno);
	return fd;
}

static int load(int map)
{
	const struct bpf_insn prog[] = {
		INSN(BPF_ALU64 | BPF_MOV | BPF_X, 6, 1, 0, 0),
		INSN(BPF_LDX | BPF_MEM | BPF_W, 2, 6, 0, 0),
		INSN(BPF_LDX | BPF_MEM | BPF_W, 3, 6, 4, 0),
		INSN(BPF_ALU64 | BPF_MOV | BPF_X, 4, 2, 0, 0),
		INSN(BPF_ALU64 | BPF_ADD | BPF_K, 4, 0, 0, 14),
		INSN(BPF_JMP | BPF_JGT | BPF_X, 4, 3, 8, 0), /* too short: pass */
		INSN(BPF_LDX | BPF_MEM | BPF_H, 4, 2, 12, 0),
		INSN(BPF_JMP | BPF_JNE | BPF_K, 4, 0, 6, 0x0008), /* not IPv4: pass */
		INSN(BPF_LDX | BPF_MEM | BPF_W, 2, 6, 16, 0), /* rx_queue_index */
		INSN(BPF_LD | BPF_DW | BPF_IMM, 1, BPF_PSEUDO_MAP_FD, 0, map),
		INSN(0, 0, 0, 0, 0),
		INSN(BPF_ALU64 | BPF_MOV | BPF_K, 3, 0, 0, XDP_PASS),
		INSN(BPF_JMP | BPF_CALL, 0, 0, 0, BPF_FUNC_redirect_map),
		INSN(BPF_JMP | BPF_EXIT, 0, 0, 0, 0),
		INSN(BPF_ALU64 | BPF_MOV | BPF_K, 0, 0, 0, XDP_PASS),
		INSN(BPF_JMP | BPF_EXIT, 0, 0, 0, 0),
	};
	union bpf_attr a = {.prog_type = BPF_PROG_TYPE_XDP,
			    .insns = (uintptr_t)prog,
			    .insn_cnt = sizeof(prog) / sizeof(prog[0]),
			    .license = (uintptr_t) "GPL"};

	a.expected_attach_type = BPF_XDP;
	return bpf(BPF_PROG_LOAD, &a);
}

static void attach(unsigned ifindex, int xsk)
{
	union bpf_attr m = {.map_type = BPF_MAP_TYPE_XSKMAP, .key_size = 4, .value_size = 4, .max_entries = 1};
	union bpf_attr u = {0}, l = {0};
	unsigned zero = 0;
	static int map = -1;
	bool attached = map >= 0;

	if (!attached)
		map = bpf(BPF_MAP_CREATE, &m);
	u.map_fd = (unsigned)map;
	u.key = (uintptr_t)&zero;
	u.value = (uintptr_t)&xsk;
	bpf(BPF_MAP_UPDATE_ELEM, &u);
	if (attached)
		return;
	l.link_create.prog_fd = (unsigned)load(map);
	l.link_create.target_ifindex = ifindex;
	l.link_create.attach_type = BPF_XDP;
	l.link_create.flags = XDP_FLAGS_SKB_MODE;
	bpf(BPF_LINK_CREATE, &l); /* stays open: the link lives as long as the process */
}

static void set(int xsk, int option, unsigned value)
{
	if (setsockopt(xsk, SOL_XDP, option, &value, sizeof(value)))
		live_die("setsockopt SOL_XDP", errno);
}

static int make_xsk(unsigned ifindex, int memfd, const struct vmh_msg_ring_reply *g)
{
	size_t len = (size_t)g->frames * FRAME;
	void *umem = mmap(NULL, len, PROT_READ | PROT_WRITE, MAP_SHARED, memfd, 0);
	struct xdp_umem_reg reg = {.addr = (uintptr_t)umem, .len = len, .chunk_size = FRAME};
	struct sockaddr_xdp a = {
		.sxdp_family = AF_XDP, .sxdp_flags = XDP_COPY | XDP_USE_NEED_WAKEUP, .sxdp_ifindex = ifindex};
	int xsk = socket(AF_XDP, SOCK_RAW | SOCK_CLOEXEC, 0);

	if (umem == MAP_FAILED || xsk < 0 || setsockopt(xsk, SOL_XDP, XDP_UMEM_REG, &reg, sizeof(reg)))
		live_die("UMEM", errno);
	set(xsk, XDP_RX_RING, g->rx_size);
	set(xsk, XDP_TX_RING, g->tx_size);
	set(xsk, XDP_UMEM_FILL_RING, g->fill_size);
	set(xsk, XDP_UMEM_COMPLETION_RING, g->comp_size);
	/* the kernel frees the queue of an ended process some 25 ms later */
	for (int i = 0; bind(xsk, (struct sockaddr *)&a, sizeof(a)); i++) {
		if (errno != EBUSY || i == 100)
			live_die("bind XSK", errno);
		usleep(2000);
	}
	munmap(umem, len);
	return xsk;
}

struct vmh_ring *live_open(const char *ifname, unsigned frames, unsigned ring_size)
{
	struct vmh_msg_ring_reply g = {.ring_id = 1,
				       .ifindex = if_nametoindex(ifname),
				       .nqueues = 1,
				       .frame_size = FRAME,
				       .frames = frames,
				       .rx_size = ring_size,
				       .tx_size = ring_size,
				       .fill_size = ring_size * 2,
				       .comp_size = ring_size,
				       .mtu = 1500};
	struct vmh_ring *r;
	int fds[2], rc;

	fds[0] = memfd_create("umem", MFD_CLOEXEC);
	if (!g.ifindex || fds[0] < 0 || ftruncate(fds[0], (off_t)frames * FRAME))
		live_die(ifname, errno);
	fds[1] = make_xsk(g.ifindex, fds[0], &g);
	attach(g.ifindex, fds[1]);
	rc = vmh_ring_xdp_open(&g, ifname, fds, 2, &no_limits, NULL, &r);
	if (rc)
		live_die("vmh_ring_xdp_open", rc);
	return r;
}
