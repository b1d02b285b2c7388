#include "rig.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <linux/if_packet.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>

struct rig rig;
int checks, failures;

int check_result(void)
{
	printf("%d checks, %d failed\n", checks, failures);
	return failures != 0;
}

static double now(void)
{
	struct timespec at;

	clock_gettime(CLOCK_MONOTONIC, &at);
	return (double)at.tv_sec + (double)at.tv_nsec / 1e9;
}

static void hardware_address(const char *netdev, uint8_t *to)
{
	int fd = socket(AF_INET, SOCK_DGRAM, 0);
	struct ifreq request = { 0 };

	strncpy(request.ifr_name, netdev, IFNAMSIZ - 1);
	if (ioctl(fd, SIOCGIFHWADDR, &request))
		perror("SIOCGIFHWADDR");
	memcpy(to, request.ifr_hwaddr.sa_data, 6);
	close(fd);
}

static void open_wire(const char *netns, const char *netdev)
{
	struct sockaddr_ll address = { .sll_family = AF_PACKET, .sll_protocol = htons(ETH_P_ALL) };
	int own = open("/proc/self/ns/net", O_RDONLY), other = open(netns, O_RDONLY), on = 1;

	if (own < 0 || other < 0 || setns(other, CLONE_NEWNET))
		exit((perror(netns), 2));
	hardware_address(netdev, rig.peer);
	rig.wire = socket(AF_PACKET, SOCK_RAW, htons(ETH_P_ALL));
	address.sll_ifindex = (int)if_nametoindex(netdev);
	setsockopt(rig.wire, SOL_PACKET, PACKET_IGNORE_OUTGOING, &on, sizeof(on));
	if (rig.wire < 0 || bind(rig.wire, (void *)&address, sizeof(address)) || setns(own, CLONE_NEWNET))
		exit((perror(netdev), 2));
	close(own);
	close(other);
}

void open_device(const char *netdev)
{
	char name[64];
	int count;
	struct ibv_device **list = ibv_get_device_list(&count);

	snprintf(name, sizeof(name), "sv_%s", netdev);
	rig.netdev = netdev;
	rig.context = NULL;
	for (int i = 0; list && i < count; i++)
		if (!strcmp(ibv_get_device_name(list[i]), name))
			rig.context = ibv_open_device(list[i]);
	if (!rig.context)
		exit((fprintf(stderr, "no %s: %s\n", name, strerror(errno)), 2));
	ibv_free_device_list(list);
	hardware_address(netdev, rig.own);
	rig.pd = ibv_alloc_pd(rig.context);
}

int to_state(struct ibv_qp *qp, enum ibv_qp_state state)
{
	struct ibv_qp_attr attr = { .qp_state = state, .port_num = 1 };

	return ibv_modify_qp(qp, &attr, IBV_QP_STATE | (state == IBV_QPS_INIT ? IBV_QP_PORT : 0));
}

void post_receive(struct end *end, uint64_t wr_id)
{
	struct ibv_sge sge = { (uintptr_t)end->memory + wr_id * BUFFER, BUFFER, end->mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(end->qp, &wr, &bad), "%" PRIu64, wr_id);
}

static void make_cqs(struct end *end, const struct options *options)
{
	struct ibv_cq_init_attr_ex ex = { .cqe = (uint32_t)options->cqe, .channel = end->channel,
					  .wc_flags = options->wc_flags };

	end->tx = ibv_create_cq(rig.context, options->cqe, NULL, end->channel, 0);
	if (options->extended) {
		end->rx_ex = ibv_create_cq_ex(rig.context, &ex);
		end->rx = ibv_cq_ex_to_cq(end->rx_ex);
	} else {
		end->rx = ibv_create_cq(rig.context, options->cqe, end, end->channel, 0);
	}
	CHECK(end->tx && end->rx, "%s", strerror(errno));
}

void make_end(struct end *end, struct options options)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RAW_PACKET, .comp_mask = IBV_QP_INIT_ATTR_PD, .pd = rig.pd };

	memset(end, 0, sizeof(*end));
	options.cqe = options.cqe ? options.cqe : 512;
	if (options.events)
		end->channel = ibv_create_comp_channel(rig.context);
	make_cqs(end, &options);
	end->memory = aligned_alloc(4096, BUFFERS * BUFFER);
	end->mr = ibv_reg_mr(rig.pd, end->memory, BUFFERS * BUFFER, IBV_ACCESS_LOCAL_WRITE);
	attr.send_cq = end->tx;
	attr.recv_cq = end->rx;
	attr.cap = (struct ibv_qp_cap){ options.send_wr ? options.send_wr : 64, options.recv_wr ? options.recv_wr : BUFFERS / 2,
					2, 2, options.inline_data };
	if (options.strip) {
		attr.comp_mask |= IBV_QP_INIT_ATTR_CREATE_FLAGS;
		attr.create_flags = IBV_QP_CREATE_CVLAN_STRIPPING;
	}
	end->qp = ibv_create_qp_ex(rig.context, &attr);
	if (!end->qp || !end->mr)
		exit((perror("QP"), 2));
	CHECK(!to_state(end->qp, IBV_QPS_INIT) && !to_state(end->qp, IBV_QPS_RTR) && !to_state(end->qp, IBV_QPS_RTS), "%s", "");
	for (uint32_t i = 0; i < attr.cap.max_recv_wr && i < BUFFERS / 2; i++)
		post_receive(end, i);
}

void free_end(struct end *end)
{
	CHECK(!ibv_destroy_qp(end->qp), "%s", "");
	CHECK(!ibv_destroy_cq(end->tx) && !ibv_destroy_cq(end->rx), "%s", "");
	CHECK(!ibv_dereg_mr(end->mr), "%s", "");
	if (end->channel)
		CHECK(!ibv_destroy_comp_channel(end->channel), "%s", "");
	free(end->memory);
}

bool completion(struct ibv_cq *cq, struct ibv_wc *wc)
{
	for (double end = now() + 1; now() < end;) {
		int n = ibv_poll_cq(cq, 1, wc);

		if (n)
			return n > 0;
	}
	return false;
}

bool no_completion(struct ibv_cq *cq, int ms)
{
	struct ibv_wc wc;

	usleep((useconds_t)ms * 1000);
	return ibv_poll_cq(cq, 1, &wc) == 0;
}

int post(struct end *end, const void *frame, uint32_t length, uint64_t wr_id, unsigned int flags)
{
	uint8_t *at = end->memory + (BUFFERS - 1) * BUFFER;
	struct ibv_sge sge = { (uintptr_t)(flags & IBV_SEND_INLINE ? frame : at), length, end->mr->lkey };
	struct ibv_send_wr wr = { .wr_id = wr_id, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = flags };
	struct ibv_send_wr *bad;

	if (!(flags & IBV_SEND_INLINE) && length <= BUFFER)
		memcpy(at, frame, length);
	return ibv_post_send(end->qp, &wr, &bad);
}

void send_numbered(struct end *end, uint32_t index, uint32_t frames, uint32_t signal_every, void (*full)(struct end *))
{
	uint8_t frame[128];
	uint32_t length = udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 7100, 0, 0 }, 18, 't');

	for (uint32_t i = 0; i < frames; i++) {
		bool signal = i % signal_every == signal_every - 1;

		memcpy(frame + 42, &index, 4);
		memcpy(frame + 46, &i, 4);
		while (post(end, frame, length, i, IBV_SEND_INLINE | (signal ? IBV_SEND_SIGNALED : 0)) == ENOMEM)
			full(end);
	}
}

void inject(const void *frame, uint32_t length)
{
	CHECK(send(rig.wire, frame, length, 0) == (ssize_t)length, "%s", strerror(errno));
}

void datagram(uint16_t dport, uint32_t size, uint8_t fill)
{
	uint8_t frame[2048];

	inject(frame, udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, dport, 0, 0 }, size, fill));
}

uint32_t from_wire(uint8_t *frame, uint32_t size)
{
	struct pollfd ready = { rig.wire, POLLIN, 0 };

	return poll(&ready, 1, 1000) == 1 ? (uint32_t)recv(rig.wire, frame, size, 0) : 0;
}

int kernel_socket(uint16_t port)
{
	struct sockaddr_in address = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	CHECK(!bind(fd, (void *)&address, sizeof(address)), "%s", strerror(errno));
	return fd;
}

int kernel_gets(int fd, int ms)
{
	struct pollfd ready = { fd, POLLIN, 0 };
	char data[2048];

	return poll(&ready, 1, ms) == 1 ? (int)recv(fd, data, sizeof(data), 0) : -1;
}

void run(const char *command)
{
	CHECK(!system(command), "%s", command);
}

static bool run_case(const struct named_case *cases, const char *name)
{
	for (; cases->name; cases++)
		if (!strcmp(cases->name, name)) {
			cases->run();
			return true;
		}
	return false;
}

/* Usage: own NETDEV /run/netns/PEER PEER-NETDEV CASE */
int main(int argc, char **argv)
{
	if (argc != 5)
		return 2;
	rig.other = argv[2];
	rig.peer_netdev = argv[3];
	open_wire(argv[2], argv[3]);
	open_device(argv[1]);
	if (!run_case(queue_cases, argv[4]) && !run_case(poll_cases, argv[4]) && !run_case(flow_cases, argv[4]) &&
	    !run_case(life_cases, argv[4]))
		return 2;
	CHECK(!ibv_dealloc_pd(rig.pd), "%s", "objects are left");
	CHECK(!ibv_close_device(rig.context), "%s", "");
	return check_result();
}
