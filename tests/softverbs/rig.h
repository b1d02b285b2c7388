/* What the cases share: a device, QPs on it, and the other end of its cable. */
#ifndef RIG_H
#define RIG_H
#include <errno.h>
#include <inttypes.h>
#include <infiniband/verbs.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

/* A failed check is printed and counted, over all files; the program's exit code says whether there was one. */
extern int checks, failures;
#define CHECK(cond, ...) \
	do { \
		checks++; \
		if (!(cond)) { \
			failures++; \
			printf("%s:%d: %s: ", __FILE__, __LINE__, #cond); \
			printf(__VA_ARGS__); \
			putchar('\n'); \
			fflush(stdout); \
		} \
	} while (0)
int check_result(void);

#define BUFFERS 256
#define BUFFER 2048
#define OWN_IP "10.77.0.1"
#define PEER_IP "10.77.0.2"

struct rig {
	struct ibv_context *context;
	struct ibv_pd *pd;
	int wire;           /* AF_PACKET on the peer's interface */
	const char *netdev; /* the device's */
	const char *other, *peer_netdev; /* path of the peer's namespace, its interface there */
	uint8_t own[6], peer[6];
};
extern struct rig rig;

struct end {
	struct ibv_comp_channel *channel;
	struct ibv_cq *tx, *rx;
	struct ibv_cq_ex *rx_ex; /* rx as an extended one, or NULL */
	struct ibv_qp *qp;
	struct ibv_mr *mr;
	uint8_t *memory; /* BUFFERS of BUFFER octets: the lower half receives */
};

struct options {
	bool extended, strip, events;
	int cqe;
	uint32_t send_wr, recv_wr, inline_data;
	uint64_t wc_flags;
};

/* Sets the rig's context and PD anew. */
void open_device(const char *netdev);
/* A QP that is ready to send, with `recv_wr` buffers posted. */
void make_end(struct end *end, struct options options);
void free_end(struct end *end);
int to_state(struct ibv_qp *qp, enum ibv_qp_state state);
void post_receive(struct end *end, uint64_t wr_id);
/* Polls up to a second for one completion. */
bool completion(struct ibv_cq *cq, struct ibv_wc *wc);
bool no_completion(struct ibv_cq *cq, int ms);
/* posts `length` octets at `frame` (inline or from registered memory); ibv_post_send()'s result */
int post(struct end *end, const void *frame, uint32_t length, uint64_t wr_id, unsigned int flags);
/* UDP to OWN_IP, port 7100, with `index` and a count at octets 42 and 46; `full` is called until the queue has room. */
void send_numbered(struct end *end, uint32_t index, uint32_t frames, uint32_t signal_every, void (*full)(struct end *));

/* Frames. Addresses and ports in host terms; the payload is `size` octets of `fill`. Returns the length. */
struct udp {
	const uint8_t *to;
	const char *src, *dst;
	uint16_t sport, dport, vlan; /* vlan 0: none */
	uint8_t protocol;            /* 0: UDP */
};
uint32_t udp4(uint8_t *frame, struct udp udp, uint32_t size, uint8_t fill);
uint32_t udp6(uint8_t *frame, const uint8_t *to, const char *src, const char *dst, uint16_t dport, uint32_t size);
void inject(const void *frame, uint32_t length);
/* A UDP datagram from the peer to port `dport`. */
void datagram(uint16_t dport, uint32_t size, uint8_t fill);
/* a frame that the peer gets within a second, not its own; its length or 0 */
uint32_t from_wire(uint8_t *frame, uint32_t size);

/* Flows: one attribute with specs, grown by the add_ functions. */
struct flow {
	struct ibv_flow_attr attr;
	uint8_t specs[512];
};
struct flow new_flow(enum ibv_flow_attr_type type, uint16_t priority);
void add_eth(struct flow *flow, const uint8_t *to, uint16_t type, uint16_t vlan);
void add_ipv4(struct flow *flow, const char *src, const char *dst);
void add_udp(struct flow *flow, uint16_t sport, uint16_t dport);
void add_tag(struct flow *flow, uint32_t tag);
void add_drop(struct flow *flow);
void add_spec(struct flow *flow, const void *spec, uint16_t size);
struct ibv_flow *attach(struct end *end, struct flow *flow);
/* dst port on the own address; priority; tag 0: none */
struct ibv_flow *attach_udp(struct end *end, uint16_t dport, uint16_t priority, uint32_t tag);

/* A socket of the kernel on the device's side. */
int kernel_socket(uint16_t port);
/* a datagram's size within `ms`, or -1 */
int kernel_gets(int fd, int ms);
void run(const char *command);

typedef void (*case_function)(void);
struct named_case {
	const char *name;
	case_function run;
};
extern const struct named_case queue_cases[], poll_cases[], flow_cases[], life_cases[];
#endif
