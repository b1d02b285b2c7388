/* Memory, queues, completions. */
#include "rig.h"
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/socket.h>

static void send_inline_limit(void)
{
	struct end end;
	uint8_t frame[512], seen[2048];
	struct ibv_wc wc;
	uint32_t length;

	make_end(&end, (struct options){ .inline_data = 204 });
	length = udp4(frame, (struct udp){ rig.peer, OWN_IP, PEER_IP, 7, 8, 0, 0 }, 204 - 42, 'i');
	CHECK(length == 204, "%u", length);
	CHECK(!post(&end, frame, length, 5, IBV_SEND_INLINE | IBV_SEND_SIGNALED), "%s", "at the limit");
	memset(frame, 0, sizeof(frame)); /* inline data are copied by the call */
	CHECK(completion(end.tx, &wc) && wc.status == IBV_WC_SUCCESS && wc.wr_id == 5 && wc.opcode == IBV_WC_SEND, "%d", wc.status);
	CHECK(from_wire(seen, sizeof(seen)) == 204 && seen[203] == 'i', "%u", seen[203]);
	CHECK(post(&end, frame, length + 1, 6, IBV_SEND_INLINE) == EINVAL, "%s", "above the limit");
	CHECK(post(&end, frame, 10, 6, IBV_SEND_SIGNALED) == 0, "%s", "");
	CHECK(completion(end.tx, &wc) && wc.status == IBV_WC_LOC_LEN_ERR, "%d: shorter than a header", wc.status);
	free_end(&end);
}

static void send_signalled(void)
{
	struct end end;
	uint8_t frame[64];
	struct ibv_wc wc;
	uint32_t length;

	make_end(&end, (struct options){ .send_wr = 4, .inline_data = 64 });
	length = udp4(frame, (struct udp){ rig.peer, OWN_IP, PEER_IP, 7, 8, 0, 0 }, 8, 's');
	for (int i = 0; i < 3; i++)
		CHECK(!post(&end, frame, length, (uint64_t)i, IBV_SEND_INLINE), "%d", i);
	CHECK(no_completion(end.tx, 5), "%s", "unsignalled requests complete silently");
	CHECK(!post(&end, frame, length, 3, IBV_SEND_INLINE | IBV_SEND_SIGNALED), "%s", "");
	CHECK(post(&end, frame, length, 4, IBV_SEND_INLINE) == ENOMEM, "%s", "the queue is full until a completion is polled");
	CHECK(completion(end.tx, &wc) && wc.wr_id == 3, "%d", (int)wc.wr_id);
	CHECK(!post(&end, frame, length, 4, IBV_SEND_INLINE), "%s", "all four are free again");
	free_end(&end);
}

static void send_checksums(void)
{
	struct end end;
	uint8_t frame[256], seen[2048], wanted[256];
	struct ibv_wc wc;
	struct flow rule = new_flow(IBV_FLOW_ATTR_NORMAL, 0);
	struct ibv_flow *flow;
	uint32_t length;

	make_end(&end, (struct options){ 0 });
	add_ipv4(&rule, NULL, PEER_IP);
	flow = attach(&end, &rule);
	length = udp4(wanted, (struct udp){ rig.peer, OWN_IP, PEER_IP, 7, 8, 0, 0 }, 101, 'c');
	memcpy(wanted + 6, rig.own, 6);
	memcpy(frame, wanted, length);
	memset(frame + 24, 0xee, 2); /* IP and UDP checksums are the device's business */
	memset(frame + 40, 0xee, 2);
	CHECK(!post(&end, frame, length, 1, IBV_SEND_IP_CSUM | IBV_SEND_SIGNALED), "%s", "");
	CHECK(completion(end.tx, &wc) && !wc.status, "%d", wc.status);
	CHECK(end.memory[(BUFFERS - 1) * BUFFER + 24] == 0xee, "%s", "the program's memory is not written to");
	CHECK(from_wire(seen, sizeof(seen)) == length && !memcmp(seen + 14, wanted + 14, 26), "%02x%02x", seen[24], seen[25]);
	/* a QP of the own device sees the finished checksum */
	CHECK(completion(end.rx, &wc) && wc.byte_len == length && wc.wc_flags & IBV_WC_IP_CSUM_OK, "%u %x", wc.byte_len, wc.wc_flags);
	CHECK(!memcmp(end.memory + wc.wr_id * BUFFER, wanted, length), "%s", "");
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

/* From registered memory, in two pieces of which the first has `first` octets. */
static enum ibv_wc_status post_parts(struct end *end, uint64_t at, uint32_t lkey, uint32_t first, uint32_t length)
{
	struct ibv_sge sge[2] = { { at, first, lkey }, { at + first, length - first, lkey } };
	struct ibv_send_wr wr = { .sg_list = sge, .num_sge = 2, .opcode = IBV_WR_SEND,
				  .send_flags = IBV_SEND_IP_CSUM | IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	CHECK(!ibv_post_send(end->qp, &wr, &bad) && completion(end->tx, &wc), "%u of %u", first, length);
	return wc.status;
}

/* What follows the IP packet is no part of its checksums, whatever it is and wherever the pieces meet. */
static void padding(void)
{
	static const struct { uint32_t payload, tail, first; bool v6; } sent[] = {
		{ 4, 14, 30, false }, { 5, 13, 45, false }, { 5, 13, 46, true }, { 18, 0, 30, false }, { 300, 7, 129, false },
		{ 301, 8, 200, false }, { 301, 1, 343, false }, { 302, 9, 345, false }, { 301, 0, 129, true }, { 86, 60, 128, false },
	};
	uint8_t *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(rig.pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE);
	uint8_t wanted[512], seen[2048], *at = memory + 3896;
	uint32_t length, got, sum, tries = 0;
	char command[128];
	struct end end;

	snprintf(command, sizeof(command), "ethtool -K %s tx off >/dev/null", rig.netdev); /* so that sums are on the wire */
	run(command);
	make_end(&end, (struct options){ .recv_wr = 1 });
	do /* on a busy machine the interface drops what is sent before its carrier was seen */
		got = post(&end, memory, 60, 1, 0) ? 0 : from_wire(seen, sizeof(seen));
	while (!got && ++tries < 5);
	for (uint32_t i = 0; i < sizeof(sent) / sizeof(*sent); i++) {
		uint8_t fill = (uint8_t)(0x31 + i);

		length = sent[i].v6 ? udp6(wanted, rig.peer, "2001:db8::9", "2001:db8::1", 8, sent[i].payload) :
				      udp4(wanted, (struct udp){ rig.peer, OWN_IP, "10.77.0.9", 7, 8, 0, 0 }, sent[i].payload, fill);
		memset(wanted + length, 0xab, sent[i].tail);
		length += sent[i].tail;
		memcpy(at, wanted, length);
		sum = sent[i].v6 ? 60 : 40;
		memset(at + sum, 0xee, 2);
		CHECK(post_parts(&end, (uintptr_t)at, mr->lkey, sent[i].first, length) == IBV_WC_SUCCESS, "%u", i);
		got = from_wire(seen, sizeof(seen));
		CHECK(got == length && !memcmp(seen, wanted, length), "%u: %u octets, sum %02x%02x, not %02x%02x", i, got,
		      seen[sum], seen[sum + 1], wanted[sum], wanted[sum + 1]);
		CHECK(at[sum] == 0xee, "%s", "the program's memory is not written to");
	}
	length = udp4(at, (struct udp){ rig.peer, OWN_IP, PEER_IP, 7, 8, 0, 0 }, 300, 'p');
	munmap(memory + 4096, 4096);
	CHECK(post_parts(&end, (uintptr_t)at, mr->lkey, 60, length + 9) == IBV_WC_LOC_PROT_ERR, "%s", "what is to be summed up is gone");
	CHECK(!ibv_dereg_mr(mr), "%s", "");
	free_end(&end);
	munmap(memory, 4096);
}

static void receive_faults(void)
{
	struct end end;
	struct ibv_wc wc;
	struct ibv_flow *flow;
	struct ibv_mr *constant;
	struct ibv_sge sge;
	struct ibv_recv_wr wr = { .wr_id = 77, .sg_list = &sge, .num_sge = 1 }, *bad;

	for (int fault = 0; fault < 5; fault++) {
		make_end(&end, (struct options){ .recv_wr = 4 });
		constant = ibv_reg_mr(rig.pd, end.memory, BUFFER, 0);
		to_state(end.qp, IBV_QPS_RESET); /* forgets what is posted */
		to_state(end.qp, IBV_QPS_INIT);
		flow = attach_udp(&end, 4000, 0, 0);
		sge = (struct ibv_sge){ (uintptr_t)end.memory, BUFFER, end.mr->lkey };
		if (fault == 0)
			sge.lkey ^= 1; /* no such key */
		else if (fault == 1)
			sge.lkey = constant->lkey; /* not to be written to */
		else if (fault == 2)
			sge.addr = (uintptr_t)end.memory + BUFFERS * BUFFER - 100; /* ends outside */
		else if (fault == 3)
			sge.addr -= 1; /* begins outside */
		else
			sge.length = 41; /* too short for the frame */
		CHECK(!ibv_post_recv(end.qp, &wr, &bad), "%d", fault);
		post_receive(&end, 2);
		CHECK(!to_state(end.qp, IBV_QPS_RTR) && !to_state(end.qp, IBV_QPS_RTS), "%d", fault);
		datagram(4000, 10, 'f');
		CHECK(completion(end.rx, &wc) && wc.wr_id == 77, "%d", fault);
		CHECK(wc.status == (fault == 4 ? IBV_WC_LOC_LEN_ERR : IBV_WC_LOC_PROT_ERR), "%d: %d", fault, wc.status);
		CHECK(completion(end.rx, &wc) && wc.wr_id == 2 && wc.status == IBV_WC_WR_FLUSH_ERR, "%d: %d", fault, wc.status);
		CHECK(end.qp->state == IBV_QPS_ERR, "%d", end.qp->state);
		CHECK(!ibv_destroy_flow(flow) && !ibv_dereg_mr(constant), "%d", fault);
		free_end(&end);
	}
}

static void send_faults(void)
{
	struct end end;
	uint8_t frame[128] = { 0 };
	struct ibv_wc wc;
	struct ibv_sge sge;
	struct ibv_send_wr wr = { .wr_id = 9, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND }, *bad;

	make_end(&end, (struct options){ .recv_wr = 1 });
	sge = (struct ibv_sge){ (uintptr_t)end.memory, 60, end.mr->lkey + (1 << 8) };
	CHECK(!ibv_post_send(end.qp, &wr, &bad), "%s", "");
	CHECK(completion(end.tx, &wc) && wc.status == IBV_WC_LOC_PROT_ERR, "%d: also of an unsignalled request", wc.status);
	CHECK(completion(end.rx, &wc) && wc.status == IBV_WC_WR_FLUSH_ERR, "%d", wc.status);
	CHECK(!post(&end, frame, 60, 10, 0), "%s", "");
	CHECK(completion(end.tx, &wc) && wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == 10, "%d", wc.status);
	wr.opcode = IBV_WR_RDMA_WRITE;
	CHECK(ibv_post_send(end.qp, &wr, &bad) == EINVAL && bad == &wr, "%s", "");
	free_end(&end);
}

static void memory_regions(void)
{
	uint8_t *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	struct ibv_mr *mr = ibv_reg_mr(rig.pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_pd *other = ibv_alloc_pd(rig.context);
	uint32_t key = mr->lkey;

	CHECK(ibv_dealloc_pd(rig.pd) == EBUSY, "%s", "");
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION | IBV_REREG_MR_CHANGE_PD, other, memory + 4096, 4096, 0), "%s", "");
	CHECK(mr->addr == memory + 4096 && mr->pd == other, "%p", mr->addr);
	CHECK(ibv_rereg_mr(mr, 1 << 9, other, memory, 4096, 0) == IBV_REREG_MR_ERR_INPUT, "%s", "");
	CHECK(ibv_dealloc_pd(other) == EBUSY, "%s", "");
	CHECK(!ibv_dereg_mr(mr), "%s", "");
	mr = ibv_reg_mr(rig.pd, memory, 4096, IBV_ACCESS_LOCAL_WRITE);
	CHECK(mr->lkey != key, "%s", "a freed key is not given out at once");
	CHECK(!ibv_dereg_mr(mr) && !ibv_dealloc_pd(other), "%s", "");
	munmap(memory, 8192);
	errno = 0;
	CHECK(!ibv_reg_mr(rig.pd, memory, 4096, 0) && errno == EFAULT, "%s", strerror(errno));
	memory = mmap(NULL, 12288, PROT_READ, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	CHECK(!ibv_reg_mr(rig.pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT, "%s", strerror(errno));
	mr = ibv_reg_mr(rig.pd, memory, 8192, 0);
	CHECK(mr && ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS, NULL, NULL, 0, IBV_ACCESS_LOCAL_WRITE) && errno == EFAULT, "%s",
	      "what cannot be written to");
	CHECK(!mprotect(memory, 4096, PROT_READ | PROT_WRITE) && !mprotect(memory + 8192, 4096, PROT_NONE), "%s", "");
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_ACCESS | IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 4096,
			    IBV_ACCESS_LOCAL_WRITE), "%s", strerror(errno));
	CHECK(ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory, 8192, 0) && errno == EFAULT, "%s", "half of it");
	CHECK(!ibv_dereg_mr(mr), "%s", "");
	CHECK(!ibv_reg_mr(rig.pd, memory + 8191, 2, 0) && errno == EFAULT, "%s", "one octet cannot be read");
	munmap(memory, 12288);
	CHECK(!ibv_reg_mr(rig.pd, rig.own, 6, IBV_ACCESS_REMOTE_WRITE) && errno == EINVAL, "%s", strerror(errno));
	CHECK(!ibv_reg_mr(rig.pd, rig.own, 6, IBV_ACCESS_ON_DEMAND) && errno == EOPNOTSUPP, "%s", strerror(errno));
}

static int send_from(struct end *end, const struct ibv_mr *mr, uint64_t addr)
{
	struct ibv_sge sge = { addr, 60, mr->lkey };
	struct ibv_send_wr wr = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND, .send_flags = IBV_SEND_SIGNALED }, *bad;
	struct ibv_wc wc;

	CHECK(!ibv_post_send(end->qp, &wr, &bad) && completion(end->tx, &wc), "%s", "");
	return (int)wc.status;
}

static void receive_at(struct end *end, const struct ibv_mr *mr, uint64_t addr)
{
	struct ibv_sge sge = { addr, BUFFER, mr->lkey };
	struct ibv_recv_wr wr = { .wr_id = 77, .sg_list = &sge, .num_sge = 1 }, *bad;

	CHECK(!ibv_post_recv(end->qp, &wr, &bad), "%s", "");
}

/* What a work request calls an address need not be one, and may come to lie elsewhere. */
static void memory_addresses(void)
{
	const uint64_t iova = 0x10000;
	uint8_t *memory = aligned_alloc(4096, 8192), frame[BUFFER];
	struct ibv_mr *mr = ibv_reg_mr_iova(rig.pd, memory, 4096, iova, IBV_ACCESS_LOCAL_WRITE);
	struct ibv_flow *flow;
	struct ibv_wc wc;
	struct end end;

	CHECK(mr && mr->addr == memory, "%s", strerror(errno));
	make_end(&end, (struct options){ .recv_wr = 2 });
	flow = attach_udp(&end, 7000, 0, 0);
	datagram(7000, 1, 'x');
	datagram(7000, 1, 'x');
	CHECK(completion(end.rx, &wc) && completion(end.rx, &wc), "%s", "the buffers of the rig are used up");
	receive_at(&end, mr, iova + 2048);
	datagram(7000, 20, 'i');
	CHECK(completion(end.rx, &wc) && wc.wr_id == 77 && wc.status == IBV_WC_SUCCESS, "%d", wc.status);
	CHECK(wc.byte_len == 62 && memory[2048 + 42] == 'i' && memory[2048 + 61] == 'i', "%u", wc.byte_len);
	udp4(memory + 100, (struct udp){ rig.peer, OWN_IP, "10.77.0.9", 7000, 9, 0, 0 }, 18, 'o');
	CHECK(send_from(&end, mr, iova + 100) == IBV_WC_SUCCESS, "%s", "");
	CHECK(from_wire(frame, sizeof(frame)) == 60 && frame[42] == 'o', "%c", frame[42]);
	/* moved: the address is that of the memory from now on, and what was there is not touched */
	CHECK(!ibv_rereg_mr(mr, IBV_REREG_MR_CHANGE_TRANSLATION, NULL, memory + 4096, 4096, 0), "%s", strerror(errno));
	receive_at(&end, mr, (uintptr_t)memory + 4096);
	datagram(7000, 20, 'm');
	CHECK(completion(end.rx, &wc) && wc.status == IBV_WC_SUCCESS, "%d", wc.status);
	CHECK(memory[4096 + 42] == 'm' && memory[2048 + 42] == 'i', "%c%c", memory[4096 + 42], memory[2048 + 42]);
	udp4(memory + 4200, (struct udp){ rig.peer, OWN_IP, "10.77.0.9", 7000, 9, 0, 0 }, 18, 'n');
	CHECK(send_from(&end, mr, (uintptr_t)memory + 4200) == IBV_WC_SUCCESS, "%s", "");
	CHECK(from_wire(frame, sizeof(frame)) == 60 && frame[42] == 'n', "%c", frame[42]);
	CHECK(send_from(&end, mr, iova + 100) == IBV_WC_LOC_PROT_ERR, "%s", "its address of before");
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
	CHECK(!ibv_dereg_mr(mr), "%s", "");
	free(memory);
}

/* Memory that went after its registration: the request fails, the program lives. */
static void memory_gone(void)
{
	for (int way = 0; way < 5; way++) {
		uint8_t *memory = mmap(NULL, 8192, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
		struct ibv_mr *mr = ibv_reg_mr(rig.pd, memory, 8192, IBV_ACCESS_LOCAL_WRITE);
		struct ibv_sge sge = { (uintptr_t)memory + 4090, 60, mr->lkey }; /* six octets on the first page */
		struct ibv_send_wr send = { .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND,
					    .send_flags = way ? IBV_SEND_IP_CSUM : 0 }, *bad;
		struct ibv_flow *flow;
		struct ibv_wc wc;
		struct end end;

		make_end(&end, (struct options){ .recv_wr = 1 });
		flow = attach_udp(&end, 7000, 0, 0);
		if (way == 4)
			mprotect(memory + 4096, 4096, PROT_READ);
		else
			munmap(way == 2 ? memory + 4096 : memory, way == 2 ? 4096 : 8192);
		if (way < 3) {
			CHECK(!ibv_post_send(end.qp, &send, &bad) && completion(end.tx, &wc), "%d", way);
		} else {
			datagram(7000, 18, 'x');
			CHECK(completion(end.rx, &wc) && !wc.status, "%s", "the rig's buffer is used up");
			receive_at(&end, mr, sge.addr);
			datagram(7000, 18, 'g');
			CHECK(completion(end.rx, &wc) && wc.wr_id == 77, "%d", way);
		}
		CHECK(wc.status == IBV_WC_LOC_PROT_ERR, "%d: %s", way, ibv_wc_status_str(wc.status));
		CHECK(!ibv_destroy_flow(flow) && !ibv_dereg_mr(mr), "%d", way);
		free_end(&end);
		munmap(memory, 8192);
	}
}

/* A full CQ whose program waits for an event: the frame stays where it is until there is room. */
static void full_queue(void)
{
	struct ibv_flow *flow;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	struct end end;
	void *context;
	int n = 0;

	make_end(&end, (struct options){ .events = true, .cqe = 3, .recv_wr = 16 });
	flow = attach_udp(&end, 7000, 0, 0);
	fcntl(end.channel->fd, F_SETFL, O_NONBLOCK);
	for (; n < 3; n++) {
		CHECK(!ibv_req_notify_cq(end.rx, 0), "%d", n);
		datagram(7000, 3, 'c');
		CHECK(!ibv_get_cq_event(end.channel, &cq, &context), "%d: %s", n, strerror(errno));
		ibv_ack_cq_events(cq, 1);
	}
	CHECK(!ibv_req_notify_cq(end.rx, 0), "%s", "");
	datagram(7000, 3, 'c');
	CHECK(ibv_get_cq_event(end.channel, &cq, &context) == -1 && errno == EAGAIN, "%s", strerror(errno));
	CHECK(completion(end.rx, &wc) && !wc.status, "%d", wc.status);
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context), "%s", "there is room for it now");
	ibv_ack_cq_events(cq, 1);
	for (n = 0; ibv_poll_cq(end.rx, 1, &wc) == 1; n++)
		CHECK(!wc.status, "%d", wc.status);
	CHECK(n == 3, "%d", n);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

static void overrun(void)
{
	struct end end;
	uint8_t frame[64];
	struct ibv_wc wc;
	struct ibv_async_event event;
	int n = 0;

	make_end(&end, (struct options){ .cqe = 3, .inline_data = 64, .recv_wr = 1 });
	memset(frame, 0, sizeof(frame));
	for (int i = 0; i < 5; i++)
		CHECK(!post(&end, frame, 60, (uint64_t)i, IBV_SEND_INLINE | IBV_SEND_SIGNALED), "%d", i);
	CHECK(!ibv_get_async_event(rig.context, &event) && event.event_type == IBV_EVENT_CQ_ERR && event.element.cq == end.tx,
	      "%d", event.event_type);
	ibv_ack_async_event(&event);
	CHECK(!ibv_get_async_event(rig.context, &event) && event.event_type == IBV_EVENT_QP_FATAL && event.element.qp == end.qp,
	      "%d", event.event_type);
	ibv_ack_async_event(&event);
	while (ibv_poll_cq(end.tx, 1, &wc) == 1)
		n++;
	CHECK(n == 3 && ibv_poll_cq(end.tx, 1, &wc) < 0, "%d", n);
	CHECK(end.qp->state == IBV_QPS_ERR, "%d", end.qp->state);
	free_end(&end);
}

/* What the device says that it has is what one gets, and no more. */
static void limits(void)
{
	struct ibv_device_attr device;
	struct ibv_cq *cq;

	CHECK(!ibv_query_device(rig.context, &device), "%s", "");
	cq = ibv_create_cq(rig.context, device.max_cqe, NULL, NULL, 0);
	CHECK(cq && cq->cqe == device.max_cqe, "%d", cq ? cq->cqe : 0);
	CHECK(ibv_resize_cq(cq, device.max_cqe + 1) == EINVAL && !ibv_destroy_cq(cq), "%s", "");
	CHECK(!ibv_create_cq(rig.context, device.max_cqe + 1, NULL, NULL, 0) && errno == EINVAL, "%s", strerror(errno));
	CHECK(device.max_raw_ethy_qp == 256, "%d", device.max_raw_ethy_qp);
}

/* Flow rules may come before the QP receives: what they took until then is lost. */
static void receives_from_rtr(struct end *end)
{
	struct ibv_flow *flow = attach_udp(end, 7000, 0, 0);
	struct ibv_wc wc;

	CHECK(!to_state(end->qp, IBV_QPS_RESET) && !to_state(end->qp, IBV_QPS_INIT), "%s", "");
	for (uint64_t i = 0; i < 2; i++)
		post_receive(end, 1 - i);
	datagram(7000, 1, 'i');
	usleep(2000);
	CHECK(!to_state(end->qp, IBV_QPS_RTR), "%s", "");
	datagram(7000, 2, 'r');
	CHECK(completion(end->rx, &wc) && wc.byte_len == 44, "%u", wc.byte_len);
	post_receive(end, 1);
	CHECK(!to_state(end->qp, IBV_QPS_RTS) && !ibv_destroy_flow(flow), "%s", "");
}

static void states(void)
{
	struct ibv_qp_attr attr;
	struct ibv_qp_init_attr init;
	struct end end;
	uint8_t frame[64] = { 0 };
	struct ibv_wc wc;

	limits();
	make_end(&end, (struct options){ .recv_wr = 2 });
	CHECK(!ibv_query_qp(end.qp, &attr, IBV_QP_STATE | IBV_QP_CAP, &init) && attr.qp_state == IBV_QPS_RTS, "%d", attr.qp_state);
	CHECK(attr.cap.max_recv_wr == 2 && init.qp_type == IBV_QPT_RAW_PACKET, "%u", attr.cap.max_recv_wr);
	CHECK(to_state(end.qp, IBV_QPS_INIT) == EINVAL && to_state(end.qp, IBV_QPS_RTR) == EINVAL, "%s", "");
	receives_from_rtr(&end);
	CHECK(to_state(end.qp, IBV_QPS_SQE) == EINVAL, "%s", "");
	CHECK(!to_state(end.qp, IBV_QPS_ERR), "%s", "");
	for (uint64_t i = 0; i < 2; i++)
		CHECK(completion(end.rx, &wc) && wc.status == IBV_WC_WR_FLUSH_ERR && wc.wr_id == i, "%d", wc.status);
	post_receive(&end, 1);
	CHECK(completion(end.rx, &wc) && wc.status == IBV_WC_WR_FLUSH_ERR, "%d: posted in the error state", wc.status);
	CHECK(!to_state(end.qp, IBV_QPS_RESET), "%s", "");
	CHECK(post(&end, frame, 60, 1, 0) == EINVAL, "%s", "nothing is sent in RESET");
	attr.qp_state = IBV_QPS_INIT;
	CHECK(ibv_modify_qp(end.qp, &attr, IBV_QP_STATE) == EINVAL, "%s", "INIT wants the port");
	CHECK(!to_state(end.qp, IBV_QPS_INIT) && to_state(end.qp, IBV_QPS_RTS) == EINVAL, "%s", "RTR was left out");
	init = (struct ibv_qp_init_attr){ .send_cq = end.tx, .recv_cq = end.rx, .cap = { 1, 1, 1, 1, 0 }, .qp_type = IBV_QPT_UD };
	errno = 0;
	CHECK(!ibv_create_qp(rig.pd, &init) && errno == EOPNOTSUPP, "%s", strerror(errno));
	CHECK(ibv_destroy_cq(end.tx) == EBUSY, "%s", "");
	free_end(&end);
}

static void built_requests(void)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RAW_PACKET, .pd = rig.pd,
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	struct end end;
	struct ibv_qp *plain;
	struct ibv_qp_ex *ex;
	uint8_t seen[2048];
	struct ibv_wc wc;

	make_end(&end, (struct options){ 0 });
	attr.send_cq = attr.recv_cq = end.tx;
	attr.cap = (struct ibv_qp_cap){ 3, 1, 2, 1, 64 };
	plain = end.qp;
	CHECK(!ibv_qp_to_qp_ex(plain), "%s", "");
	end.qp = ibv_create_qp_ex(rig.context, &attr);
	ex = ibv_qp_to_qp_ex(end.qp);
	to_state(end.qp, IBV_QPS_INIT), to_state(end.qp, IBV_QPS_RTR), to_state(end.qp, IBV_QPS_RTS);
	memset(end.memory, 0x42, 60);
	ibv_wr_start(ex);
	ex->wr_id = 1, ex->wr_flags = 0;
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, end.mr->lkey, (uintptr_t)end.memory, 60);
	ex->wr_id = 2, ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_inline_data(ex, end.memory, 61);
	memset(end.memory, 0x43, 61);
	CHECK(!ibv_wr_complete(ex), "%s", "");
	CHECK(completion(end.tx, &wc) && wc.wr_id == 2 && !wc.status, "%d", wc.status);
	CHECK(from_wire(seen, sizeof(seen)) == 60 && seen[30] == 0x43, "%x: read when the batch is posted", seen[30]);
	CHECK(from_wire(seen, sizeof(seen)) == 61 && seen[30] == 0x42, "%x: inline data are read at once", seen[30]);
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_inline_data(ex, end.memory, 65);
	CHECK(ibv_wr_complete(ex) == EINVAL && no_completion(end.tx, 2), "%s", "all or none");
	for (int i = 0; i < 3; i++)
		CHECK(!post(&end, seen, 60, 3, 0), "%d", i);
	ibv_wr_start(ex);
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, end.mr->lkey, (uintptr_t)end.memory, 60);
	CHECK(ibv_wr_complete(ex) == ENOMEM, "%s", "the queue is full");
	ibv_wr_start(ex);
	ibv_wr_set_sge(ex, end.mr->lkey, (uintptr_t)end.memory, 60);
	CHECK(ibv_wr_complete(ex) == EINVAL, "%s", "of no request");
	ibv_wr_start(ex);
	ibv_wr_abort(ex);
	CHECK(!ibv_destroy_qp(end.qp), "%s", "");
	end.qp = plain;
	free_end(&end);
}

static bool drained(struct end *end)
{
	struct ibv_qp_attr attr = { .qp_state = IBV_QPS_SQD, .en_sqd_async_notify = 1 };
	struct ibv_async_event event;
	bool told = !ibv_modify_qp(end->qp, &attr, IBV_QP_STATE | IBV_QP_EN_SQD_ASYNC_NOTIFY) &&
		    !ibv_get_async_event(rig.context, &event) && event.event_type == IBV_EVENT_SQ_DRAINED &&
		    event.element.qp == end->qp;

	if (told)
		ibv_ack_async_event(&event);
	return told && end->qp->state == IBV_QPS_SQD;
}

/* Requests of the drain state wait: sent by RTS in their order, flushed by the error state, forgotten by RESET. */
static void drain(void)
{
	struct end end;
	uint8_t frame[64], seen[2048];
	struct ibv_flow *flow;
	struct ibv_wc wc;
	uint32_t length;

	make_end(&end, (struct options){ .send_wr = 3, .inline_data = 64 });
	flow = attach_udp(&end, 7000, 0, 0);
	length = udp4(frame, (struct udp){ rig.peer, OWN_IP, "10.77.0.9", 7, 8, 0, 0 }, 18, 'a');
	for (int way = 0; way < 3; way++) {
		CHECK(drained(&end) && !to_state(end.qp, IBV_QPS_SQD), "%d", way);
		frame[42] = 'a';
		CHECK(!post(&end, frame, length, 1, IBV_SEND_INLINE), "%d", way);
		frame[42] = 'b';
		CHECK(!post(&end, frame, length, 2, 0), "%d", way);
		CHECK(!post(&end, frame, length, 3, IBV_SEND_SIGNALED | IBV_SEND_INLINE), "%d", way);
		CHECK(post(&end, frame, length, 4, 0) == ENOMEM, "%d: the queue is full", way);
		CHECK(no_completion(end.tx, 5) && recv(rig.wire, seen, sizeof(seen), MSG_DONTWAIT) < 0, "%d", way);
		datagram(7000, 3, 'r');
		CHECK(completion(end.rx, &wc) && wc.byte_len == 45, "%d: it receives", way);
		post_receive(&end, wc.wr_id);
		CHECK(!to_state(end.qp, way == 0 ? IBV_QPS_RTS : way == 1 ? IBV_QPS_ERR : IBV_QPS_RESET), "%d", way);
		for (uint64_t i = 1; way == 0 && i < 4; i++)
			CHECK(from_wire(seen, sizeof(seen)) == length && seen[42] == (i == 1 ? 'a' : 'b'), "%d", (int)i);
		CHECK(way || (completion(end.tx, &wc) && wc.wr_id == 3 && !wc.status), "%d", wc.status);
		for (uint64_t i = 1; way == 1 && i < 4; i++)
			CHECK(completion(end.tx, &wc) && wc.wr_id == i && wc.status == IBV_WC_WR_FLUSH_ERR, "%d", wc.status);
		if (way == 1)
			to_state(end.qp, IBV_QPS_RESET);
		if (way) /* what is posted there waits for nothing */
			CHECK(!to_state(end.qp, IBV_QPS_INIT) && !to_state(end.qp, IBV_QPS_RTR) &&
			      !to_state(end.qp, IBV_QPS_RTS), "%d", way);
		for (uint64_t i = 0; way && i < 2; i++)
			post_receive(&end, i);
		CHECK(no_completion(end.tx, 2) && recv(rig.wire, seen, sizeof(seen), MSG_DONTWAIT) < 0, "%d", way);
	}
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

/* What belongs to one context is of no use to another, though it be of the same device. */
static void other_context(void)
{
	struct rig before = rig;
	struct end first, second;
	struct ibv_qp_init_attr attr = { .cap = { 4, 4, 1, 1, 0 }, .qp_type = IBV_QPT_RAW_PACKET };

	make_end(&first, (struct options){ .events = true });
	open_device(before.netdev);
	make_end(&second, (struct options){ 0 });
	attr.send_cq = first.tx;
	attr.recv_cq = second.rx;
	CHECK(!ibv_create_qp(rig.pd, &attr) && errno == EINVAL, "%s", "send CQ");
	attr.send_cq = second.tx;
	attr.recv_cq = first.rx;
	CHECK(!ibv_create_qp(rig.pd, &attr) && errno == EINVAL, "%s", "receive CQ");
	CHECK(!ibv_create_cq(rig.context, 4, NULL, first.channel, 0) && errno == EINVAL, "%s", "channel");
	CHECK(ibv_rereg_mr(second.mr, IBV_REREG_MR_CHANGE_PD, before.pd, NULL, 0, 0) == IBV_REREG_MR_ERR_INPUT &&
	      errno == EINVAL, "%s", "PD");
	free_end(&second);
	CHECK(!ibv_dealloc_pd(rig.pd) && !ibv_close_device(rig.context), "%s", "");
	rig = before;
	free_end(&first);
}

const struct named_case queue_cases[] = {
	{ "inline-limit", send_inline_limit }, { "signalled", send_signalled }, { "checksums", send_checksums },
	{ "receive-faults", receive_faults },  { "send-faults", send_faults },  { "memory-regions", memory_regions },
	{ "memory-addresses", memory_addresses }, { "memory-gone", memory_gone }, { "full-queue", full_queue },
	{ "overrun", overrun },		       { "states", states },		{ "built-requests", built_requests },
	{ "drain", drain },		       { "other-context", other_context },	{ "padding", padding },
	{ NULL, NULL },
};
