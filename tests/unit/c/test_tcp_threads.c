/* Instances at the same time: more than there are copies of the core, each pair of them in a thread of its own. */
#include "tcp_wire.h"
#include "check.h"
#include <pthread.h>
#include <sys/socket.h>

#define THREADS 12 /* two instances each: some copies are shared */

static void *run(void *arg)
{
	struct wire_faults f = {.delay_ns = 20000, .loss = 0.01, .gbit = 10};
	struct vmh_tcp_conn *l, *c, *p = NULL;
	uintptr_t id = (uintptr_t)arg, bad = 0;
	struct wire w;
	char got[64], sent[64];

	wire_open(&w, &f, 64);
	l = wire_listen(&w, 80, 10, NULL);
	for (int k = 0; k < 20; k++) {
		p = NULL;
		c = wire_connect(&w, (uint16_t)(4000 + k), 80, NULL);
		for (int i = 0; i < 50 && vmh_tcp_accept(l, NULL, &p); i++)
			wire_run(&w, 100000000);
		for (int i = 0; i < 50 && p; i++) {
			memset(sent, (int)(id * 50 + (uintptr_t)i), sizeof(sent));
			wire_write(c, sent, sizeof(sent));
			for (int wait = 0; wait < 100 && !(vmh_tcp_poll(p) & VMH_TCP_IN); wait++)
				wire_run(&w, 100000000);
			bad += wire_read(p, got, sizeof(got)) != sizeof(got) || memcmp(got, sent, sizeof(got));
		}
		bad += !p;
		vmh_tcp_close(c);
		if (p)
			vmh_tcp_close(p);
	}
	vmh_tcp_close(l);
	wire_close(&w);
	return (void *)bad;
}

int main(void)
{
	pthread_t t[THREADS];
	void *bad;

	for (uintptr_t i = 0; i < THREADS; i++)
		pthread_create(&t[i], NULL, run, (void *)i);
	for (int i = 0; i < THREADS; i++) {
		pthread_join(t[i], &bad);
		CHECK(!bad, "thread %d: %lu", i, (uintptr_t)bad);
	}
	return check_result();
}
