/* Two stacks joined by a wire made of memory, with a clock that only the wire moves: every run is the same. */
#ifndef TCP_WIRE_H
#define TCP_WIRE_H
#include "tcp_stack.h"
#include <arpa/inet.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define WIRE_MTU 1500
#define WIRE_LOOK_MAX 40

struct wire_faults {
	double loss, duplicate, corrupt, reorder, full; /* probabilities; full: the ring has no room for its data */
	uint64_t delay_ns, reorder_ns;            /* one way; what a reordered frame waits in addition */
	double gbit;                              /* 0: infinitely fast */
	unsigned queue;                           /* frames in flight one way; more are lost; 0: no limit */
};

struct wire;

struct wire_end {
	struct wire *w;
	struct vmh_tcp *t;
	struct vmh_ip addr;
	struct wire_faults faults; /* of what it sends */
	uint64_t free_at;          /* when the link has sent what came before */
	unsigned in_flight, held_frames, copied;
	uint64_t sent, lost, resets, data_bytes;
	/* a test's look at each frame that goes out: 0 lets it pass, else it is lost */
	int (*watch)(void *arg, const uint8_t *frame, size_t len);
	void *arg;
	unsigned ready;            /* calls of env.ready */
	unsigned talkers;
};

struct wire_frame;

struct wire {
	uint64_t now;
	uint64_t random;
	uint64_t seq;
	struct wire_frame **heap;
	unsigned n, size;
	struct wire_end end[2];
	bool zero_copy;
	uint64_t look_ns;          /* WIRE_LOOK: an end takes what comes within that time together */
	unsigned looks;            /* so often more than one frame */
	unsigned streams;          /* WIRE_STREAMS */
	struct wire_frame *open[WIRE_LOOK_MAX]; /* wire_inject_more */
	unsigned nopen;
};

void wire_open(struct wire *w, const struct wire_faults *both, unsigned hold_max);
void wire_open_share(struct wire *w, const struct wire_faults *both, unsigned hold_max, unsigned hold_share);
void wire_close(struct wire *w); /* checks that nothing is left */
void wire_faults(struct wire *w, const struct wire_faults *both);
bool wire_step(struct wire *w, uint64_t until); /* the next event; false: none before `until` */
void wire_run(struct wire *w, uint64_t ns);
double wire_random(struct wire *w);
void wire_inject(struct wire *w, int to, const void *frame, size_t len); /* arrives now */
void wire_inject_more(struct wire *w, int to, const void *frame, size_t len); /* in one look with those before and ... */
void wire_look(struct wire *w, int to); /* ... now */

/* Connects end 0 to a listener of end 1 on `port`, and accepts. */
struct vmh_tcp_conn *wire_listen(struct wire *w, uint16_t port, unsigned backlog, const struct vmh_tcp_options *o);
struct vmh_tcp_conn *wire_connect(struct wire *w, uint16_t from, uint16_t port, const struct vmh_tcp_options *o);
/* One connection: end 0's in *c, and in *p what end 1 has accepted after `ns`. */
void wire_meet(struct wire *w, const struct vmh_tcp_options *o, uint64_t ns, struct vmh_tcp_conn **c, struct vmh_tcp_conn **p);
void wire_part(struct wire *w, struct vmh_tcp_conn *c, struct vmh_tcp_conn *p); /* resets it; a second later wire_close() */
struct vmh_tcp_path wire_path(int end);
/* The ends have IPv6 addresses if the environment has WIRE_IPV6. */
static inline size_t wire_headers(const uint8_t *frame) /* Ethernet and IP */
{
	return frame[12] == 8 ? 34 : 54;
}
ssize_t wire_write(struct vmh_tcp_conn *c, const void *data, size_t len);
ssize_t wire_read(struct vmh_tcp_conn *c, void *data, size_t len);

/* A frame as the other end would send it; returns its length. options: whole words. */
size_t wire_segment(struct wire *w, uint8_t *frame, int from, uint16_t sport, uint16_t dport, uint32_t seq, uint32_t ack,
		    uint8_t flags, uint16_t wnd, const void *options, size_t options_len, const void *data, size_t len);

/* A stream of bytes that tells where it was cut: writes and checks go on by themselves. */
struct stream {
	struct vmh_tcp_conn *from, *to;
	uint64_t total, written, read;
	uint64_t ended_at; /* on the wire's clock */
	bool bad, ended, shut, failed;
	uint32_t chunk, read_max; /* per call; 0: 60000 */
};
void stream_pump(struct stream *s); /* writes and reads what can be, shuts down at the end */
bool stream_run(struct wire *w, struct stream *s, int n, uint64_t ns); /* all of them to their ends; false: time is up */
#endif
