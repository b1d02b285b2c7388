/* Which frames go where. */
#include "rig.h"
#include <arpa/inet.h>
#include <linux/bpf.h>
#include <linux/filter.h>
#include <linux/virtio_net.h>
#include <linux/if_packet.h>
#include <linux/seccomp.h>
#include <net/ethernet.h>
#include <net/if.h>
#include <stddef.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>

static void expect(struct end *end, uint32_t payload, const char *what)
{
	struct ibv_wc wc;

	CHECK(completion(end->rx, &wc) && wc.status == IBV_WC_SUCCESS && wc.byte_len == 42 + payload, "%s: %d, %u octets", what,
	      wc.status, wc.byte_len);
}

/* A matching frame is the QP's alone, another the kernel's alone, and after the flow all are the kernel's. */
static void steal(void)
{
	int fd = kernel_socket(5000), other = kernel_socket(5001);
	struct ibv_flow *flow;
	struct end end;

	make_end(&end, (struct options){ 0 });
	flow = attach_udp(&end, 5000, 0, 0);
	for (uint32_t i = 1; i <= 50; i++) {
		datagram(5000, i, 'a');
		datagram(5001, i, 'b');
		expect(&end, i, "stolen");
		CHECK(kernel_gets(other, 1000) == (int)i, "%u", i);
	}
	CHECK(kernel_gets(fd, 50) < 0, "%s", "the kernel saw a stolen frame");
	CHECK(no_completion(end.rx, 5), "%s", "the QP saw a frame of the kernel's");
	CHECK(ibv_destroy_qp(end.qp) == EBUSY, "%s", "");
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	datagram(5000, 33, 'c');
	CHECK(kernel_gets(fd, 1000) == 33 && no_completion(end.rx, 5), "%s", "");
	close(fd);
	close(other);
	free_end(&end);
}

/* Priority decides across QPs; equal rules share; drop takes; DONT_TRAP copies. */
static void priorities(void)
{
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 1);
	struct ibv_flow *low, *high, *twin, *drop, *copy, *exact;
	int fd = kernel_socket(6000);
	struct end a, b;

	make_end(&a, (struct options){ 0 });
	make_end(&b, (struct options){ 0 });
	low = attach_udp(&a, 6000, 5, 0);
	datagram(6000, 1, 'p');
	expect(&a, 1, "alone");
	high = attach_udp(&b, 6000, 2, 0);
	datagram(6000, 2, 'p');
	expect(&b, 2, "the lower number wins");
	CHECK(no_completion(a.rx, 5), "%s", "");
	CHECK(!ibv_destroy_flow(high), "%s", "");
	twin = attach_udp(&b, 6000, 5, 0);
	datagram(6000, 3, 'p');
	expect(&a, 3, "twins both"), expect(&b, 3, "twins both");
	CHECK(!ibv_destroy_flow(twin), "%s", "");
	rule = new_flow(IBV_FLOW_ATTR_NORMAL, 5);
	add_eth(&rule, rig.own, ETHERTYPE_IP, 0), add_ipv4(&rule, PEER_IP, OWN_IP), add_udp(&rule, 9, 6000);
	exact = attach(&b, &rule);
	datagram(6000, 4, 'p');
	expect(&b, 4, "more fields win at equal priority");
	CHECK(no_completion(a.rx, 5) && !ibv_destroy_flow(exact), "%s", "");
	rule = new_flow(IBV_FLOW_ATTR_NORMAL, 1);
	rule.attr.flags = IBV_FLOW_ATTR_FLAGS_DONT_TRAP;
	add_udp(&rule, 0, 6000);
	copy = attach(&b, &rule);
	rule = new_flow(IBV_FLOW_ATTR_NORMAL, 2);
	rule.attr.flags = IBV_FLOW_ATTR_FLAGS_DONT_TRAP;
	add_ipv4(&rule, NULL, OWN_IP);
	errno = 0;
	CHECK(!attach(&a, &rule) && errno == EOPNOTSUPP, "%s", "a second copy of some frames");
	add_udp(&rule, 0, 6001);
	twin = attach(&a, &rule);
	CHECK(twin && !ibv_destroy_flow(twin), "%s", strerror(errno));
	datagram(6000, 5, 'p');
	expect(&b, 5, "the copy"), expect(&a, 5, "and the frame");
	rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	add_udp(&rule, 0, 6000), add_drop(&rule);
	drop = attach(&b, &rule);
	datagram(6000, 6, 'p');
	CHECK(no_completion(a.rx, 5) && no_completion(b.rx, 5), "%s", "dropped");
	CHECK(!ibv_destroy_flow(drop) && !ibv_destroy_flow(low), "%s", "");
	CHECK(kernel_gets(fd, 20) < 0, "%s", "");
	datagram(6000, 7, 'p');
	expect(&b, 7, "a copy");
	CHECK(kernel_gets(fd, 1000) == 7, "%s", "of what stays the kernel's");
	CHECK(!ibv_destroy_flow(copy), "%s", "");
	close(fd);
	free_end(&a);
	free_end(&b);
}

static void tags(void)
{
	struct ibv_poll_cq_attr none = { 0 };
	struct ibv_flow *first, *second;
	struct end end;
	struct timespec at;
	uint64_t stamp;
	int error = ENOENT;

	make_end(&end, (struct options){ .extended = true, .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_FLOW_TAG |
				 IBV_WC_EX_WITH_COMPLETION_TIMESTAMP | IBV_WC_EX_WITH_COMPLETION_TIMESTAMP_WALLCLOCK });
	first = attach_udp(&end, 6001, 0, 0xfffff);
	second = attach_udp(&end, 6002, 0, 25);
	datagram(6001, 1, 't');
	datagram(6002, 2, 't');
	for (int i = 0; i < 1000 && error; i++, usleep(1000))
		error = ibv_start_poll(end.rx_ex, &none);
	CHECK(!error && ibv_wc_read_flow_tag(end.rx_ex) == 0xfffff, "%x", ibv_wc_read_flow_tag(end.rx_ex));
	CHECK(ibv_wc_read_byte_len(end.rx_ex) == 43 && ibv_wc_read_opcode(end.rx_ex) == IBV_WC_RECV, "%s", "");
	clock_gettime(CLOCK_MONOTONIC, &at);
	stamp = ibv_wc_read_completion_ts(end.rx_ex);
	CHECK((uint64_t)at.tv_sec * 1000000000 + (uint64_t)at.tv_nsec - stamp < 1000000000, "%" PRIu64, stamp);
	clock_gettime(CLOCK_REALTIME, &at);
	stamp = ibv_wc_read_completion_wallclock_ns(end.rx_ex);
	CHECK((uint64_t)at.tv_sec * 1000000000 + (uint64_t)at.tv_nsec - stamp < 1000000000, "%" PRIu64, stamp);
	CHECK(!ibv_next_poll(end.rx_ex) && ibv_wc_read_flow_tag(end.rx_ex) == 25, "%s", "");
	CHECK(ibv_next_poll(end.rx_ex) == ENOENT, "%s", "");
	ibv_end_poll(end.rx_ex);
	CHECK(!ibv_destroy_flow(first) && !ibv_destroy_flow(second), "%s", "");
	free_end(&end);
}

static void sniffer(void)
{
	struct flow rule = new_flow(IBV_FLOW_ATTR_SNIFFER, 0);
	int fd = kernel_socket(6100);
	struct ibv_flow *flow;
	struct end end;
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons(9) };
	char command[128];

	/* no ARP among what is seen */
	snprintf(command, sizeof(command), "ip neigh replace " PEER_IP " lladdr 02:76:6d:68:00:02 dev %s", rig.netdev);
	run(command);
	make_end(&end, (struct options){ 0 });
	flow = attach(&end, &rule);
	CHECK(flow, "%s", strerror(errno));
	datagram(6100, 12, 's');
	expect(&end, 12, "in");
	CHECK(kernel_gets(fd, 1000) == 12, "%s", "and the kernel has it as well");
	inet_pton(AF_INET, PEER_IP, &to.sin_addr);
	CHECK(sendto(fd, "12345", 5, 0, (void *)&to, sizeof(to)) == 5, "%s", strerror(errno));
	expect(&end, 5, "out");
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	while (!no_completion(end.rx, 5)) /* the peer's answer: nobody listens there */
		;
	datagram(6100, 13, 's');
	CHECK(kernel_gets(fd, 1000) == 13 && no_completion(end.rx, 5), "%s", "");
	close(fd);
	free_end(&end);
}

static void vlan(void)
{
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct ibv_flow *flow;
	uint8_t frame[256];
	struct ibv_wc wc;
	struct end end;
	uint32_t length;

	for (int strip = 0; strip < 2; strip++) {
		make_end(&end, (struct options){ .strip = strip });
		rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
		add_eth(&rule, rig.own, ETHERTYPE_IP, 100), add_ipv4(&rule, NULL, OWN_IP), add_udp(&rule, 0, 6200);
		flow = attach(&end, &rule);
		for (uint16_t id = 99; id <= 100; id++) {
			length = udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 6200, id, 0 }, 20, 'v');
			inject(frame, length);
		}
		datagram(6200, 20, 'v');
		CHECK(completion(end.rx, &wc) && wc.wc_flags & IBV_WC_IP_CSUM_OK, "%x", wc.wc_flags);
		CHECK(wc.byte_len == length - (strip ? 4 : 0), "%u of %u", wc.byte_len, length);
		if (strip)
			memmove(frame + 12, frame + 16, length - 16);
		CHECK(!memcmp(end.memory + wc.wr_id * BUFFER, frame, wc.byte_len), "%s", "the tag is where it was");
		CHECK(no_completion(end.rx, 5), "%s", "another VLAN, or none");
		CHECK(!ibv_destroy_flow(flow), "%s", "");
		free_end(&end);
	}
}

/* What QPs of the device send each other has the tag in it, unlike what the kernel took in. */
static void vlan_loop(void)
{
	struct ibv_poll_cq_attr none = { 0 };
	uint8_t frame[256], *got;
	struct ibv_flow *flow;
	struct end end;
	uint32_t length;

	for (int way = 0; way < 4; way++) { /* stripped, from the wire */
		struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
		bool strip = way & 1;
		int error = ENOENT;

		make_end(&end, (struct options){ .strip = strip, .extended = true,
						 .wc_flags = IBV_WC_STANDARD_FLAGS | IBV_WC_EX_WITH_CVLAN });
		add_eth(&rule, rig.own, ETHERTYPE_IP, 100), add_ipv4(&rule, NULL, OWN_IP), add_udp(&rule, 0, 6200);
		flow = attach(&end, &rule);
		length = udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 6200, 0x6064, 0 }, 20, 'v');
		if (way & 2)
			inject(frame, length);
		else
			CHECK(!post(&end, frame, length, 1, IBV_SEND_IP_CSUM), "%d", way);
		for (int i = 0; i < 1000 && error; i++, usleep(1000))
			error = ibv_start_poll(end.rx_ex, &none);
		CHECK(!error && end.rx_ex->status == IBV_WC_SUCCESS, "%d", way);
		if (error)
			exit(check_result());
		CHECK(ibv_wc_read_byte_len(end.rx_ex) == length - (strip ? 4 : 0), "%d: %u", way, ibv_wc_read_byte_len(end.rx_ex));
		CHECK(ibv_wc_read_cvlan(end.rx_ex) == 0x6064, "%d: %x", way, ibv_wc_read_cvlan(end.rx_ex));
		CHECK(ibv_wc_read_wc_flags(end.rx_ex) & IBV_WC_IP_CSUM_OK, "%d", way);
		got = end.memory + end.rx_ex->wr_id * BUFFER;
		CHECK(!memcmp(got, frame, 12) && !memcmp(got + (strip ? 12 : 16), frame + 16, length - 16), "%d", way);
		ibv_end_poll(end.rx_ex);
		CHECK(!ibv_destroy_flow(flow), "%d", way);
		free_end(&end);
	}
}

static void ipv6(void)
{
	struct ibv_flow_spec_ipv6 spec = { .type = IBV_FLOW_SPEC_IPV6, .size = sizeof(spec) };
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct ibv_flow *flow;
	uint8_t frame[256];
	struct ibv_wc wc;
	struct end end;
	uint32_t length;

	make_end(&end, (struct options){ 0 });
	inet_pton(AF_INET6, "2001:db8::1", spec.val.dst_ip);
	memset(spec.mask.dst_ip, 0xff, 16);
	add_eth(&rule, rig.own, ETHERTYPE_IPV6, 0), add_spec(&rule, &spec, sizeof(spec)), add_udp(&rule, 0, 6300);
	flow = attach(&end, &rule);
	CHECK(flow, "%s", strerror(errno));
	inject(frame, udp6(frame, rig.own, "2001:db8::9", "2001:db8::2", 6300, 10));
	length = udp6(frame, rig.own, "2001:db8::9", "2001:db8::1", 6300, 11);
	inject(frame, length);
	CHECK(completion(end.rx, &wc) && wc.byte_len == length && wc.wc_flags & IBV_WC_IP_CSUM_OK, "%u %x", wc.byte_len, wc.wc_flags);
	CHECK(no_completion(end.rx, 5) && !ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

static bool subscribed(void)
{
	char command[128];

	snprintf(command, sizeof(command), "ip maddress show dev %s | grep -q 01:00:5e:01:02:03", rig.netdev);
	return !system(command);
}

static void multicast(void)
{
	static const uint8_t group[6] = { 1, 0, 0x5e, 1, 2, 3 }, other[6] = { 1, 0, 0x5e, 1, 2, 4 };
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 1), rest = new_flow(IBV_FLOW_ATTR_MC_DEFAULT, 0);
	struct ibv_flow *flow, *others;
	struct end end, second;
	uint8_t frame[256];

	make_end(&end, (struct options){ 0 });
	make_end(&second, (struct options){ 0 });
	add_eth(&rule, group, ETHERTYPE_IP, 0), add_ipv4(&rule, NULL, "239.1.2.3"), add_udp(&rule, 0, 6400);
	flow = attach(&end, &rule);
	CHECK(flow && subscribed(), "%s", "the interface lets the group in");
	inject(frame, udp4(frame, (struct udp){ group, PEER_IP, "239.1.2.3", 9, 6400, 0, 0 }, 15, 'm'));
	expect(&end, 15, "group");
	/* a QP of the same device that sends to the group reaches it as well */
	CHECK(!post(&second, frame, 57, 1, 0), "%s", "");
	expect(&end, 15, "loopback");
	others = attach(&second, &rest);
	CHECK(others, "%s", strerror(errno));
	inject(frame, udp4(frame, (struct udp){ other, PEER_IP, "239.1.2.4", 9, 6400, 0, 0 }, 16, 'm'));
	expect(&second, 16, "default");
	inject(frame, udp4(frame, (struct udp){ group, PEER_IP, "239.1.2.3", 9, 6400, 0, 0 }, 17, 'm'));
	expect(&end, 17, "group");
	CHECK(no_completion(second.rx, 5), "%s", "");
	CHECK(!ibv_destroy_flow(flow) && !ibv_destroy_flow(others) && !subscribed(), "%s", "");
	free_end(&end);
	free_end(&second);
}

/* Fragments are the kernel's, as are frames that end before their headers do. */
static void odd_frames(void)
{
	struct ibv_flow *flow;
	uint8_t frame[256];
	struct ibv_wc wc;
	struct end end;
	uint32_t length;

	make_end(&end, (struct options){ 0 });
	flow = attach_udp(&end, 6500, 0, 0);
	length = udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 6500, 0, 0 }, 20, 'o');
	frame[20] = 0x20; /* more fragments */
	inject(frame, length);
	frame[20] = 0;
	for (uint32_t cut = 14; cut < 38; cut++)
		inject(frame, cut);
	frame[14] = 0x43; /* a header length that cannot be */
	inject(frame, length);
	CHECK(no_completion(end.rx, 10), "%s", "");
	frame[14] = 0x45;
	frame[44] ^= 1;
	inject(frame, length);
	CHECK(completion(end.rx, &wc) && !wc.status && !(wc.wc_flags & IBV_WC_IP_CSUM_OK), "%x: a wrong checksum", wc.wc_flags);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

/* The kernel hands super frames over a veth uncut; a NIC would have cut them. */
static void super_frames(void)
{
	struct virtio_net_hdr head = { .flags = VIRTIO_NET_HDR_F_NEEDS_CSUM, .gso_type = VIRTIO_NET_HDR_GSO_TCPV4,
				       .hdr_len = 54, .gso_size = 1000, .csum_start = 34, .csum_offset = 16 };
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	static uint8_t message[sizeof(head) + 14 + 40 + 3500];
	uint8_t *frame = message + sizeof(head);
	struct ibv_flow_spec_tcp_udp spec = { .type = IBV_FLOW_SPEC_TCP, .size = sizeof(spec) };
	struct ibv_flow *flow;
	struct ibv_wc wc;
	struct end end;
	uint32_t sequence = 0, seen = 0;
	int on = 1;

	make_end(&end, (struct options){ 0 });
	add_ipv4(&rule, NULL, OWN_IP), add_spec(&rule, &spec, sizeof(spec));
	flow = attach(&end, &rule);
	CHECK(flow, "%s", strerror(errno));
	udp4(frame, (struct udp){ rig.own, PEER_IP, OWN_IP, 9, 10, 0, 6 }, 3512, 0);
	memset(frame + 34 + 4, 0, 16);
	frame[34 + 12] = 5 << 4;
	frame[34 + 13] = 0x18; /* ACK, PSH */
	for (uint32_t i = 0; i < 3500; i++)
		frame[54 + i] = (uint8_t)(i * 7);
	memcpy(message, &head, sizeof(head));
	/* the kernel wants the pseudo header's sum there; the segments get sums of their own */
	CHECK(!setsockopt(rig.wire, SOL_PACKET, PACKET_VNET_HDR, &on, sizeof(on)), "%s", strerror(errno));
	CHECK(send(rig.wire, message, sizeof(message), 0) == sizeof(message), "%s", strerror(errno));
	for (int i = 0; i < 4; i++) {
		uint8_t *at;

		CHECK(completion(end.rx, &wc) && wc.byte_len == 54u + (i < 3 ? 1000 : 500), "%d: %u", i, wc.byte_len);
		CHECK(wc.wc_flags & IBV_WC_IP_CSUM_OK, "%d", i);
		at = end.memory + wc.wr_id * BUFFER;
		memcpy(&sequence, at + 38, 4);
		CHECK(ntohl(sequence) == seen && (at[47] & 8) == (i == 3 ? 8 : 0), "%d: %u", i, ntohl(sequence));
		for (uint32_t k = 0; k < wc.byte_len - 54; k++, seen++)
			if (at[54 + k] != (uint8_t)(seen * 7)) {
				CHECK(false, "octet %u", seen);
				break;
			}
	}
	CHECK(no_completion(end.rx, 5) && !ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

/* Everything that no other rule takes, frames to other hosts too. */
static void all_default(void)
{
	struct flow all = new_flow(IBV_FLOW_ATTR_ALL_DEFAULT, 0);
	const uint8_t other[6] = { 2, 0, 0, 0, 0, 9 };
	uint8_t frame[2048];
	struct ibv_flow *every, *one;
	int fd = kernel_socket(6000);
	struct end a, b;

	make_end(&a, (struct options){ 0 });
	make_end(&b, (struct options){ 0 });
	every = attach(&a, &all);
	CHECK(every, "%s", strerror(errno));
	one = attach_udp(&b, 6001, 5, 0);
	datagram(6000, 1, 'a');
	expect(&a, 1, "a port of the kernel's");
	CHECK(kernel_gets(fd, 20) < 0, "%s", "");
	datagram(6001, 2, 'a');
	expect(&b, 2, "any other rule comes first");
	CHECK(no_completion(a.rx, 5), "%s", "");
	inject(frame, udp4(frame, (struct udp){ other, PEER_IP, "10.77.0.9", 9, 6002, 0, 0 }, 3, 'a'));
	expect(&a, 3, "to another host");
	CHECK(!ibv_destroy_flow(every), "%s", "");
	datagram(6000, 4, 'a');
	CHECK(kernel_gets(fd, 1000) == 4 && no_completion(a.rx, 5), "%s", "the kernel's again");
	add_udp(&all, 0, 6000);
	CHECK(!attach(&a, &all) && errno == EINVAL, "%s", "it has no specs");
	CHECK(!ibv_destroy_flow(one), "%s", "");
	close(fd);
	free_end(&a);
	free_end(&b);
}

static void refusals(void)
{
	struct ibv_flow_spec_esp esp = { .type = IBV_FLOW_SPEC_ESP, .size = sizeof(esp) };
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct end end;

	make_end(&end, (struct options){ 0 });
	CHECK(!attach(&end, &rule) && errno == EINVAL, "%s", "no specs");
	add_udp(&rule, 0, 1), add_ipv4(&rule, NULL, OWN_IP);
	CHECK(!attach(&end, &rule) && errno == EINVAL, "%s", "layers in the wrong order");
	rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	add_spec(&rule, &esp, sizeof(esp));
	CHECK(!attach(&end, &rule) && errno == EOPNOTSUPP, "%s", "ESP");
	rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	add_tag(&rule, 1 << 24);
	CHECK(!attach(&end, &rule) && errno == EINVAL, "%s", "a tag of 25 bits");
	rule.attr.port = 2;
	CHECK(!attach(&end, &rule) && errno == EINVAL, "%s", "port 2");
	free_end(&end);
}

/* A kernel before 6.6, as Linux 6.1 answers: it does not know the place, and its verifier refuses the programs. */
static void no_tcx(void)
{
	struct sock_filter code[] = {
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_bpf, 0, 3),
		BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, args[0])),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, BPF_PROG_QUERY, 2, 0),
		BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, BPF_PROG_LOAD, 2, 0),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EINVAL),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | EACCES),
	};
	struct sock_fprog filter = { sizeof(code) / sizeof(*code), code };
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct end end;

	make_end(&end, (struct options){ 0 });
	CHECK(!prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) && !prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &filter), "%s", "seccomp");
	add_udp(&rule, 0, 5000);
	CHECK(!attach(&end, &rule) && errno == EOPNOTSUPP, "%s", strerror(errno));
	free_end(&end);
}

const struct named_case flow_cases[] = {
	{ "steal", steal },	      { "priorities", priorities }, { "tags", tags },
	{ "sniffer", sniffer },	      { "vlan", vlan },		    { "ipv6", ipv6 },
	{ "vlan-loop", vlan_loop },
	{ "multicast", multicast },   { "odd-frames", odd_frames }, { "super-frames", super_frames },
	{ "all-default", all_default },
	{ "refusals", refusals },     { "no-tcx", no_tcx },	    { NULL, NULL },
};
