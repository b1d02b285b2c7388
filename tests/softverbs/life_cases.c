/* Events, threads, and the ends of things. */
#include "rig.h"
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <net/if.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>

static bool readable(int fd, int ms)
{
	struct pollfd ready = { fd, POLLIN, 0 };

	return poll(&ready, 1, ms) == 1;
}

static void *later(void *argument)
{
	(void)argument;
	usleep(50000);
	datagram(7000, 9, 'l');
	return NULL;
}

static void events(void)
{
	struct epoll_event member = { .events = EPOLLIN }, got;
	struct ibv_flow *flow;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	struct end end;
	pthread_t thread;
	void *context;
	int epoll = epoll_create1(0), flags;

	make_end(&end, (struct options){ .events = true, .recv_wr = 4 });
	flow = attach_udp(&end, 7000, 0, 0);
	epoll_ctl(epoll, EPOLL_CTL_ADD, end.channel->fd, &member);
	flags = fcntl(end.channel->fd, F_GETFL);
	datagram(7000, 1, 'e');
	CHECK(!readable(end.channel->fd, 20), "%s", "no event of a CQ that is not armed");
	CHECK(completion(end.rx, &wc), "%s", "");
	CHECK(!ibv_req_notify_cq(end.rx, 0) && !readable(end.channel->fd, 20), "%s", "armed, and nothing there");
	datagram(7000, 2, 'e');
	CHECK(readable(end.channel->fd, 1000) && epoll_wait(epoll, &got, 1, 1000) == 1, "%s", "poll and epoll see it");
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context) && cq == end.rx && context == &end, "%s", "");
	ibv_ack_cq_events(cq, 1);
	CHECK(completion(end.rx, &wc), "%s", "");
	datagram(7000, 3, 'e');
	CHECK(!readable(end.channel->fd, 20), "%s", "an event disarms");
	CHECK(!ibv_req_notify_cq(end.rx, 0) && readable(end.channel->fd, 1000), "%s", "a frame that came before is told");
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context), "%s", "");
	ibv_ack_cq_events(cq, 1);
	CHECK(completion(end.rx, &wc) && wc.wr_id == 2, "%d", (int)wc.wr_id);
	CHECK(!ibv_req_notify_cq(end.rx, 0), "%s", "");
	fcntl(end.channel->fd, F_SETFL, flags | O_NONBLOCK);
	CHECK(ibv_get_cq_event(end.channel, &cq, &context) && errno == EAGAIN, "%s", strerror(errno));
	fcntl(end.channel->fd, F_SETFL, flags);
	pthread_create(&thread, NULL, later, NULL);
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context), "%s", "sleeps until the frame is there");
	ibv_ack_cq_events(cq, 1);
	pthread_join(thread, NULL);
	CHECK(completion(end.rx, &wc), "%s", "");
	/* no receive buffer: the frame waits, and is told when there is one */
	CHECK(!ibv_req_notify_cq(end.rx, 0), "%s", "");
	datagram(7000, 4, 'e');
	fcntl(end.channel->fd, F_SETFL, flags | O_NONBLOCK);
	usleep(5000);
	CHECK(ibv_get_cq_event(end.channel, &cq, &context) && errno == EAGAIN, "%s", "");
	post_receive(&end, 0);
	CHECK(readable(end.channel->fd, 1000) && !ibv_get_cq_event(end.channel, &cq, &context), "%s", "");
	ibv_ack_cq_events(cq, 1);
	/* completions of sends */
	CHECK(!ibv_req_notify_cq(end.tx, 0), "%s", "");
	CHECK(!post(&end, end.memory, 60, 1, IBV_SEND_SIGNALED) && !ibv_get_cq_event(end.channel, &cq, &context) && cq == end.tx, "%s", "");
	ibv_ack_cq_events(cq, 1);
	CHECK(ibv_destroy_comp_channel(end.channel) == EBUSY && !ibv_destroy_flow(flow), "%s", "");
	close(epoll);
	free_end(&end);
}

#define SENDERS 2
#define FRAMES 20000

static struct end shared;

static void poll_sent(struct end *end)
{
	struct ibv_wc wc[16];

	ibv_poll_cq(end->tx, 16, wc);
}

static void *sender(void *argument)
{
	send_numbered(&shared, (uint32_t)(uintptr_t)argument, FRAMES, 16, poll_sent);
	return NULL;
}

/* Two threads send on one QP, whose own flow gets the frames back; the receiver sleeps on events. */
static void threads(void)
{
	uint32_t next[SENDERS] = { 0 }, got = 0, wrong = 0;
	pthread_t thread[SENDERS];
	struct ibv_flow *flow;

	make_end(&shared, (struct options){ .events = true, .inline_data = 128, .send_wr = 128 });
	flow = attach_udp(&shared, 7100, 0, 0);
	ibv_req_notify_cq(shared.rx, 0);
	for (uintptr_t i = 0; i < SENDERS; i++)
		pthread_create(&thread[i], NULL, sender, (void *)i);
	while (got < SENDERS * FRAMES && readable(shared.channel->fd, 1000)) {
		struct ibv_wc wc[16];
		struct ibv_cq *cq;
		void *context;
		int n;

		if (ibv_get_cq_event(shared.channel, &cq, &context))
			break;
		ibv_ack_cq_events(cq, 1);
		ibv_req_notify_cq(shared.rx, 0);
		while ((n = ibv_poll_cq(shared.rx, 16, wc)) > 0)
			for (int i = 0; i < n; i++, got++) {
				uint32_t at[2];

				memcpy(at, shared.memory + wc[i].wr_id * BUFFER + 42, 8);
				if (at[0] < SENDERS && at[1] == next[at[0]])
					next[at[0]]++;
				else
					wrong++;
				post_receive(&shared, wc[i].wr_id);
			}
	}
	for (int i = 0; i < SENDERS; i++)
		pthread_join(thread[i], NULL);
	CHECK(got == SENDERS * FRAMES && !wrong, "%u frames, %u out of order", got, wrong);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&shared);
}

static int open_fds(void)
{
	DIR *directory = opendir("/proc/self/fd");
	int n = 0;

	while (readdir(directory))
		n++;
	closedir(directory);
	return n;
}

static long resident(void)
{
	long pages = 0, size;
	FILE *file = fopen("/proc/self/statm", "r");

	CHECK(fscanf(file, "%ld %ld", &size, &pages) == 2, "%s", "");
	fclose(file);
	return pages;
}

static void cycles(void)
{
	int cycles = getenv("OWN_CYCLES") ? atoi(getenv("OWN_CYCLES")) : 10000, before = 0;
	long memory = 0;

	for (int i = 0; i < cycles && !failures; i++) {
		struct ibv_flow *flow;
		struct end end;

		make_end(&end, (struct options){ .events = true, .recv_wr = 1, .inline_data = 64 });
		flow = attach_udp(&end, 7200, (uint16_t)(i % 7), 0);
		CHECK(!ibv_destroy_flow(flow), "%d", i);
		free_end(&end);
		if (i == cycles / 10) {
			before = open_fds();
			memory = resident();
		}
	}
	CHECK(open_fds() == before, "%d, then %d fds", before, open_fds());
#ifdef __SANITIZE_ADDRESS__
	(void)memory; /* the sanitizer keeps freed memory a while, and looks for leaks itself */
#else
	CHECK(resident() - memory < 64, "%ld, then %ld pages", memory, resident());
#endif
}

static void link_state(void)
{
	struct ibv_port_attr port;
	struct ibv_async_event event;
	struct ibv_flow *flow;
	struct ibv_wc wc;
	struct end end;
	char command[128];

	make_end(&end, (struct options){ 0 });
	flow = attach_udp(&end, 7300, 0, 0);
	CHECK(!ibv_query_port(rig.context, 1, &port) && port.state == IBV_PORT_ACTIVE, "%d", port.state);
	snprintf(command, sizeof(command), "ip link set %s down", rig.netdev);
	run(command);
	CHECK(readable(rig.context->async_fd, 1000) && !ibv_get_async_event(rig.context, &event), "%s", "");
	CHECK(event.event_type == IBV_EVENT_PORT_ERR && event.element.port_num == 1, "%s", ibv_event_type_str(event.event_type));
	ibv_ack_async_event(&event);
	CHECK(!ibv_query_port(rig.context, 1, &port) && port.state == IBV_PORT_DOWN, "%d", port.state);
	CHECK(!post(&end, end.memory, 60, 1, IBV_SEND_SIGNALED) && completion(end.tx, &wc) && !wc.status, "%d", wc.status);
	snprintf(command, sizeof(command), "ip link set %s up", rig.netdev);
	run(command);
	CHECK(readable(rig.context->async_fd, 1000) && !ibv_get_async_event(rig.context, &event), "%s", "");
	CHECK(event.event_type == IBV_EVENT_PORT_ACTIVE, "%s", ibv_event_type_str(event.event_type));
	ibv_ack_async_event(&event);
	for (int i = 0; i < 100 && no_completion(end.rx, 0); i++) { /* the peer's carrier follows shortly */
		uint8_t frame[128];

		usleep(10000);
		if (send(rig.wire, frame, udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 7300, 0, 0 }, 5, 'u'), 0) > 0 &&
		    completion(end.rx, &wc))
			break;
	}
	CHECK(wc.opcode == IBV_WC_RECV && wc.byte_len == 47, "%u: the rules are still there", wc.byte_len);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

static void device_removed(void)
{
	struct ibv_async_event event;
	struct ibv_flow *flow;
	struct end end;
	char command[128];

	make_end(&end, (struct options){ 0 });
	flow = attach_udp(&end, 7400, 0, 0);
	snprintf(command, sizeof(command), "ip link del %s", rig.netdev);
	run(command);
	do
		CHECK(readable(rig.context->async_fd, 2000) && !ibv_get_async_event(rig.context, &event), "%s", "");
	while (!failures && event.event_type != IBV_EVENT_DEVICE_FATAL);
	CHECK(post(&end, end.memory, 60, 1, 0) == EIO, "%s", "");
	CHECK(!ibv_destroy_flow(flow), "%s", "what is left can be put away");
	free_end(&end);
}

/* Another interface with the name and the index of one that was deleted, while the old one's context is open. */
static void device_recreated(void)
{
	struct rig before = rig;
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct ibv_flow *old, *flow;
	struct end gone, end;
	uint8_t frame[128];
	char command[256];
	struct ibv_wc wc;

	make_end(&gone, (struct options){ 0 });
	old = attach_udp(&gone, 7400, 0, 0);
	snprintf(command, sizeof(command), "ip link del %s && ip link add %s index %u up type veth peer name other0 && "
		 "ip link set other0 up", rig.netdev, rig.netdev, if_nametoindex(rig.netdev));
	run(command);
	open_device(rig.netdev);
	make_end(&end, (struct options){ 0 });
	add_udp(&rule, 0, 7401);
	flow = attach(&end, &rule);
	CHECK(flow, "%s", strerror(errno));
	CHECK(!post(&end, frame, udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 7401, 0, 0 }, 5, 'u'), 1, 0), "%s", "");
	CHECK(completion(end.rx, &wc) && wc.byte_len == 47, "%s", "its own QPs' frames come back");
	CHECK(flow && !ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
	CHECK(!ibv_dealloc_pd(rig.pd) && !ibv_close_device(rig.context), "%s", "");
	rig = before;
	CHECK(!ibv_destroy_flow(old), "%s", "");
	free_end(&gone);
}

static int kernel_socket_of(const char *netns, uint16_t port)
{
	int own = open("/proc/self/ns/net", O_RDONLY), other = open(netns, O_RDONLY), fd;

	CHECK(!setns(other, CLONE_NEWNET), "%s", netns);
	fd = kernel_socket(port);
	CHECK(!setns(own, CLONE_NEWNET), "%s", "");
	close(own);
	close(other);
	return fd;
}

/* The interface goes to the other namespace: with the event its frames are that one's. */
static void device_moved(void)
{
	struct ibv_async_event event;
	struct ibv_flow *flow;
	char command[512];
	struct end end;
	int fd;

	make_end(&end, (struct options){ 0 });
	flow = attach_udp(&end, 7800, 0, 0);
	snprintf(command, sizeof(command), "ip link set %s netns %s && nsenter --net=%s sh -c 'ip addr flush dev %s; "
		 "ip addr add " OWN_IP "/24 dev %s; ip link set %s up'", rig.netdev, rig.other, rig.other, rig.peer_netdev,
		 rig.netdev, rig.netdev);
	run(command);
	fd = kernel_socket_of(rig.other, 7800);
	do
		CHECK(readable(rig.context->async_fd, 2000) && !ibv_get_async_event(rig.context, &event), "%s", "");
	while (!failures && event.event_type != IBV_EVENT_DEVICE_FATAL);
	for (int i = 0; i < 100; i++) { /* the carrier comes a little later */
		uint8_t frame[128];
		uint32_t length = udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 7800, 0, 0 }, 5, 'm');

		if (send(rig.wire, frame, length, 0) > 0 && kernel_gets(fd, 10) == 5)
			break;
	}
	datagram(7800, 6, 'm');
	CHECK(kernel_gets(fd, 1000) == 6, "%s", "");
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
	close(fd);
}

/* A thread that went to another namespace: an interface of the same index there is not the device. */
static void other_namespace(void)
{
	int own = open("/proc/self/ns/net", O_RDONLY), other = open(rig.other, O_RDONLY);
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RAW_PACKET };
	struct flow any = new_flow(IBV_FLOW_ATTR_ALL_DEFAULT, 0);
	struct ibv_port_attr port;
	union ibv_gid gid;
	struct ibv_flow *flow;
	struct ibv_wc wc;
	struct end end;

	make_end(&end, (struct options){ 0 });
	attr.send_cq = attr.recv_cq = end.rx;
	CHECK(!setns(other, CLONE_NEWNET), "%s", rig.other);
	CHECK(!ibv_create_qp(rig.pd, &attr) && errno == ENODEV, "%s", strerror(errno));
	CHECK(!attach(&end, &any) && errno == ENODEV, "%s", strerror(errno));
	CHECK(ibv_query_port(rig.context, 1, &port) == ENODEV, "%s", "");
	CHECK(ibv_query_gid(rig.context, 1, 1, &gid) == -1 && errno == ENODEV, "%s", strerror(errno));
	CHECK(!setns(own, CLONE_NEWNET), "%s", "");
	flow = attach_udp(&end, 7810, 0, 0);
	CHECK(flow && !ibv_query_port(rig.context, 1, &port), "%s", "back again");
	CHECK(!setns(other, CLONE_NEWNET), "%s", "");
	datagram(7810, 5, 'n');
	CHECK(completion(end.rx, &wc) && wc.byte_len == 47, "%s", "what there is works from anywhere");
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	CHECK(!setns(own, CLONE_NEWNET), "%s", "");
	free_end(&end);
	close(own);
	close(other);
}

/* A device is closed with all that is left on it: of another context's rules nothing changes. */
static void closed_with_flows(void)
{
	struct rig before = rig;
	struct flow all = new_flow(IBV_FLOW_ATTR_SNIFFER, 0);
	static struct ibv_flow *kept[2]; /* what is left is not freed, as with a NIC */
	static struct end left;
	int fd = kernel_socket(7820);
	struct ibv_flow *flow;
	struct ibv_wc wc;
	struct end end;

	make_end(&end, (struct options){ 0 });
	flow = attach_udp(&end, 7821, 0, 0);
	open_device(before.netdev);
	make_end(&left, (struct options){ 0 });
	kept[0] = attach_udp(&left, 7820, 0, 0);
	kept[1] = attach(&left, &all);
	CHECK(kept[0] && kept[1], "%s", strerror(errno));
	ibv_dereg_mr(left.mr);
	free(left.memory);
	CHECK(!ibv_close_device(rig.context), "%s", "");
	rig = before;
	datagram(7820, 5, 'c');
	CHECK(kernel_gets(fd, 1000) == 5, "%s", "the rule went with its context");
	datagram(7821, 6, 'c');
	CHECK(completion(end.rx, &wc) && wc.byte_len == 48, "%u", wc.byte_len);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
	close(fd);
}

/* A killed process leaves nothing: its frames are the kernel's again. */
static void killed(void)
{
	int fd = kernel_socket(7500), ready[2], status;
	struct end end;
	char byte;
	pid_t child;

	CHECK(!pipe(ready), "%s", "");
	child = fork();
	if (!child) {
		/* what the parent opened is not the child's */
		CHECK(!ibv_create_cq(rig.context, 1, NULL, NULL, 0) && errno == EIO, "%s", strerror(errno));
		open_device(rig.netdev);
		make_end(&end, (struct options){ 0 });
		attach_udp(&end, 7500, 0, 0);
		CHECK(write(ready[1], failures ? "n" : "y", 1) == 1, "%s", "");
		pause();
		_exit(0);
	}
	CHECK(read(ready[0], &byte, 1) == 1 && byte == 'y', "%c", byte);
	datagram(7500, 3, 'k');
	CHECK(kernel_gets(fd, 20) < 0, "%s", "taken while it lives");
	kill(child, SIGKILL);
	waitpid(child, &status, 0);
	for (int i = 0; i < 100; i++) { /* the kernel detaches a little later */
		datagram(7500, 4, 'k');
		if (kernel_gets(fd, 10) == 4)
			break;
	}
	datagram(7500, 5, 'k');
	CHECK(kernel_gets(fd, 1000) >= 4, "%s", "");
	close(fd);
}

/* In the child of a fork: the device opened anew is as good as the parent's. */
static void device_of_child(void)
{
	struct rig parents = rig;
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct ibv_flow *flow;
	struct ibv_wc wc;
	struct end end;

	open_device(rig.netdev);
	make_end(&end, (struct options){ 0 });
	add_udp(&rule, 0, 7601);
	flow = attach(&end, &rule);
	CHECK(flow, "%s", strerror(errno));
	datagram(7601, 6, 'c');
	CHECK(completion(end.rx, &wc) && wc.byte_len == 48, "%s", "");
	CHECK(flow && !ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
	CHECK(!ibv_dealloc_pd(rig.pd) && !ibv_close_device(rig.context), "%s", "");
	rig = parents;
}

/* A child that lives on does not keep the parent's rules; the parent does not notice that it was forked. */
static void forked(void)
{
	int fd = kernel_socket(7600), status, hold[2];
	struct ibv_flow *flow;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	struct end end;
	void *context;
	pid_t child;

	make_end(&end, (struct options){ .events = true });
	ibv_req_notify_cq(end.rx, 0);
	flow = attach_udp(&end, 7600, 0, 0);
	CHECK(!ibv_fork_init() && ibv_is_fork_initialized() == IBV_FORK_UNNEEDED && !pipe(hold), "%s", "");
	CHECK(!post(&end, end.memory, 60, 8, IBV_SEND_SIGNALED), "%s", "its completion waits for the parent");
	child = fork();
	if (!child) {
		char byte;

		CHECK(post(&end, end.memory, 60, 1, 0) == EIO, "%s", "");
		CHECK(ibv_poll_cq(end.rx, 1, &wc) == 0 && to_state(end.qp, IBV_QPS_ERR) == EIO, "%s", "");
		CHECK(ibv_poll_cq(end.tx, 1, &wc) == 0, "%d", (int)wc.wr_id);
		CHECK(ibv_rereg_mr(end.mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, 0) && errno == EIO, "%s", strerror(errno));
		CHECK(ibv_resize_cq(end.rx, 16) == EIO, "%s", "");
		CHECK(ibv_get_cq_event(end.channel, &cq, &context) == -1 && errno == EIO, "%s", "the parent's event");
		CHECK(ibv_req_notify_cq(end.rx, 0) == EIO, "%s", "");
		device_of_child();
		close(hold[1]);
		CHECK(read(hold[0], &byte, 1) == 0, "%s", "until the parent has looked");
		CHECK(!ibv_destroy_flow(flow), "%s", "");
		free_end(&end);
		CHECK(!ibv_dealloc_pd(rig.pd) && !ibv_close_device(rig.context), "%s", "");
		_exit(failures);
	}
	close(hold[0]);
	CHECK(completion(end.tx, &wc) && wc.wr_id == 8 && !wc.status, "%d", wc.status);
	datagram(7600, 6, 'f');
	CHECK(readable(end.channel->fd, 1000) && !ibv_get_cq_event(end.channel, &cq, &context), "%s", "");
	ibv_ack_cq_events(cq, 1);
	CHECK(completion(end.rx, &wc) && wc.byte_len == 48, "%u", wc.byte_len);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
	CHECK(!ibv_dealloc_pd(rig.pd) && !ibv_close_device(rig.context), "%s", "");
	datagram(7600, 7, 'f');
	CHECK(kernel_gets(fd, 1000) == 7, "%s", "the living child does not hold the rules");
	close(hold[1]);
	CHECK(waitpid(child, &status, 0) == child && !status, "%x", status);
	close(fd);
	exit(check_result());
}

const struct named_case life_cases[] = {
	{ "events", events }, { "threads", threads }, { "cycles", cycles }, { "link-state", link_state },
	{ "device-removed", device_removed }, { "device-recreated", device_recreated }, { "device-moved", device_moved },
	{ "other-namespace", other_namespace }, { "closed-with-flows", closed_with_flows }, { "killed", killed },
	{ "forked", forked }, { NULL, NULL },
};
