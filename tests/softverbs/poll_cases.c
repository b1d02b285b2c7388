/* Polling an extended CQ, and what a program does between start and end. */
#include "rig.h"
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <time.h>

static struct ibv_poll_cq_attr none;

static bool ready(struct ibv_qp *qp)
{
	return !to_state(qp, IBV_QPS_INIT) && !to_state(qp, IBV_QPS_RTR) && !to_state(qp, IBV_QPS_RTS);
}

/* A QP that sends and receives on one extended CQ, end->rx, in place of the end's own, which is returned. */
static struct ibv_qp *on_one_cq(struct end *end, uint32_t receives)
{
	struct ibv_qp_init_attr_ex attr = { .qp_type = IBV_QPT_RAW_PACKET, .pd = rig.pd,
		.send_cq = end->rx, .recv_cq = end->rx, .cap = { 64, receives, 1, 1, 128 },
		.comp_mask = IBV_QP_INIT_ATTR_PD | IBV_QP_INIT_ATTR_SEND_OPS_FLAGS, .send_ops_flags = IBV_QP_EX_WITH_SEND };
	struct ibv_qp *own = end->qp;

	end->qp = ibv_create_qp_ex(rig.context, &attr);
	CHECK(end->qp && ready(end->qp), "%s", strerror(errno));
	for (uint64_t i = 0; i < receives; i++)
		post_receive(end, i);
	return own;
}

static bool next_is(struct end *end, uint64_t wr_id, enum ibv_wc_status status)
{
	return !ibv_next_poll(end->rx_ex) && end->rx_ex->wr_id == wr_id && end->rx_ex->status == status;
}

static void in_the_error_state(struct end *end)
{
	CHECK(!to_state(end->qp, IBV_QPS_ERR), "%s", "");
	for (int i = 0; i < 4; i++)
		CHECK(!ibv_next_poll(end->rx_ex) && end->rx_ex->status == IBV_WC_WR_FLUSH_ERR, "%d", i);
	post_receive(end, 3);
	CHECK(next_is(end, 3, IBV_WC_WR_FLUSH_ERR), "%" PRIu64, end->rx_ex->wr_id);
	CHECK(!post(end, end->memory, 60, 7, IBV_SEND_SIGNALED) && next_is(end, 7, IBV_WC_WR_FLUSH_ERR), "%s", "");
	post_receive(end, 2);
	CHECK(!to_state(end->qp, IBV_QPS_RESET), "%s", "");
	CHECK(ibv_next_poll(end->rx_ex) == ENOENT, "%s", "RESET forgets what was not polled");
}

/* Receive buffers for frames that wait for them, sends, events, changes of the QP and the CQ: all of what is polled. */
static void posts(void)
{
	struct ibv_flow *flow;
	struct ibv_qp_ex *ex;
	struct ibv_qp *own;
	struct ibv_cq *cq;
	struct ibv_wc wc;
	struct end end;
	void *context;
	uint32_t n = 0;

	make_end(&end, (struct options){ .extended = true, .events = true, .wc_flags = IBV_WC_STANDARD_FLAGS, .recv_wr = 1 });
	own = on_one_cq(&end, 4);
	ex = ibv_qp_to_qp_ex(end.qp);
	flow = attach_udp(&end, 7000, 0, 0);
	for (uint32_t i = 1; i <= 8; i++)
		datagram(7000, i, 'p');
	CHECK(!ibv_start_poll(end.rx_ex, &none), "%s", "");
	do {
		n++;
		CHECK(!end.rx_ex->status && ibv_wc_read_byte_len(end.rx_ex) == 42 + n, "%u: %d", n, end.rx_ex->status);
		post_receive(&end, end.rx_ex->wr_id);
	} while (!ibv_next_poll(end.rx_ex));
	CHECK(n == 8, "%u", n);
	CHECK(!ibv_req_notify_cq(end.rx, 0) && !post(&end, end.memory, 60, 5, IBV_SEND_SIGNALED), "%s", "");
	CHECK(!ibv_get_cq_event(end.channel, &cq, &context) && cq == end.rx, "%s", "");
	ibv_ack_cq_events(cq, 1);
	CHECK(next_is(&end, 5, IBV_WC_SUCCESS) && ibv_wc_read_opcode(end.rx_ex) == IBV_WC_SEND, "%s", "what came meanwhile");
	ibv_wr_start(ex);
	ex->wr_id = 6, ex->wr_flags = IBV_SEND_SIGNALED;
	ibv_wr_send(ex);
	ibv_wr_set_sge(ex, end.mr->lkey, (uintptr_t)end.memory, 60);
	CHECK(!ibv_wr_complete(ex) && !ibv_resize_cq(end.rx, 100) && next_is(&end, 6, IBV_WC_SUCCESS), "%s", "");
	in_the_error_state(&end);
	CHECK(ready(end.qp), "%s", "");
	CHECK(!post(&end, end.memory, 60, 8, IBV_SEND_SIGNALED), "%s", "");
	ibv_end_poll(end.rx_ex);
	CHECK(completion(end.rx, &wc) && wc.wr_id == 8, "%s", "the end loses nothing");
	CHECK(!ibv_destroy_flow(flow) && !ibv_destroy_qp(end.qp), "%s", "");
	end.qp = own;
	free_end(&end);
}

/* The QP of the completion that is being looked at goes; so do those of its completions that were not polled. */
static void destroys(void)
{
	struct ibv_flow *flow;
	struct ibv_qp *own;
	struct end end;

	make_end(&end, (struct options){ .extended = true, .wc_flags = IBV_WC_STANDARD_FLAGS, .recv_wr = 1 });
	flow = attach_udp(&end, 7000, 0, 0);
	own = on_one_cq(&end, 4);
	for (uint64_t i = 8; i < 10; i++)
		CHECK(!post(&end, end.memory, 60, i, IBV_SEND_SIGNALED), "%d", (int)i);
	CHECK(!ibv_start_poll(end.rx_ex, &none) && end.rx_ex->wr_id == 8, "%s", "");
	CHECK(!ibv_destroy_qp(end.qp), "%s", "");
	CHECK(end.rx_ex->wr_id == 8 && ibv_wc_read_opcode(end.rx_ex) == IBV_WC_SEND, "%s", "");
	CHECK(ibv_next_poll(end.rx_ex) == ENOENT, "%s", "");
	end.qp = own;
	datagram(7000, 3, 'd');
	CHECK(!ibv_next_poll(end.rx_ex) && ibv_wc_read_byte_len(end.rx_ex) == 45, "%s", "the other QP's");
	ibv_end_poll(end.rx_ex);
	CHECK(!ibv_destroy_flow(flow), "%s", "");
	free_end(&end);
}

enum { WORKERS = 2, FRAMES = 5000, SIGNALLED = FRAMES / 8 };

static struct end shared;
static atomic_uchar seen[WORKERS][FRAMES];
static atomic_uint received, completed;

static void wait_for_pollers(struct end *end)
{
	(void)end;
	sched_yield();
}

static void *sender(void *argument)
{
	send_numbered(&shared, (uint32_t)(uintptr_t)argument, FRAMES, 8, wait_for_pollers);
	return NULL;
}

static void take_one(void)
{
	struct ibv_cq_ex *cq = shared.rx_ex;
	uint64_t wr_id = cq->wr_id;
	uint32_t at[2];

	sched_yield(); /* the other poller must not get at it now */
	CHECK(cq->wr_id == wr_id, "%" PRIu64 ", then %" PRIu64, wr_id, cq->wr_id);
	if (cq->status != IBV_WC_SUCCESS) {
		CHECK(false, "%s", ibv_wc_status_str(cq->status));
	} else if (ibv_wc_read_opcode(cq) == IBV_WC_SEND) {
		completed++;
	} else {
		memcpy(at, shared.memory + cq->wr_id * BUFFER + 42, 8);
		if (at[0] < WORKERS && at[1] < FRAMES)
			seen[at[0]][at[1]]++;
		post_receive(&shared, cq->wr_id);
		received++;
	}
}

static void *poller(void *argument)
{
	time_t end = time(NULL) + 30;

	while ((received < WORKERS * FRAMES || completed < WORKERS * SIGNALLED) && time(NULL) < end) {
		if (ibv_start_poll(shared.rx_ex, &none))
			continue;
		do
			take_one();
		while (!ibv_next_poll(shared.rx_ex));
		ibv_end_poll(shared.rx_ex);
	}
	return argument;
}

/* Two threads poll one CQ and post meanwhile, two send on its QP: each completion is told once. */
static void poll_threads(void)
{
	pthread_t thread[2 * WORKERS];
	struct ibv_flow *flow;
	struct ibv_qp *own;
	uint32_t wrong = 0;

	make_end(&shared, (struct options){ .extended = true, .wc_flags = IBV_WC_STANDARD_FLAGS, .recv_wr = 1 });
	own = on_one_cq(&shared, 4);
	flow = attach_udp(&shared, 7100, 0, 0);
	for (uintptr_t i = 0; i < 2 * WORKERS; i++)
		pthread_create(&thread[i], NULL, i < WORKERS ? sender : poller, (void *)i);
	for (int i = 0; i < 2 * WORKERS; i++)
		pthread_join(thread[i], NULL);
	for (int i = 0; i < WORKERS * FRAMES; i++)
		wrong += seen[i / FRAMES][i % FRAMES] != 1;
	CHECK(!wrong && completed == WORKERS * SIGNALLED, "%u of %u frames, %u sends", wrong, received, completed);
	CHECK(!ibv_destroy_flow(flow) && !ibv_destroy_qp(shared.qp), "%s", "");
	shared.qp = own;
	free_end(&shared);
}

const struct named_case poll_cases[] = {
	{ "poll-posts", posts }, { "poll-destroys", destroys }, { "poll-threads", poll_threads }, { NULL, NULL },
};
