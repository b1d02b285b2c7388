/* A ring and a socket class for the tests of select, poll and epoll: a ring is an eventfd and a list of
 * pending datagrams (only counted); the kernel side of a socket is a real UDP socket on loopback. */
#ifndef IOMUX_FAKE_H
#define IOMUX_FAKE_H
#include "vmh_iomux_int.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include <arpa/inet.h>
#include <stdio.h>
#include <stdlib.h>

#define MS 1000000ll

extern _Atomic int fake_polls;        /* calls of vmh_rings_poll */
extern _Atomic int fake_homes;        /* calls of vmh_sock_home */
extern void (*fake_before_sleep)(void); /* runs in vmh_sleep, after all checks and before ppoll */

void fake_start(void);
int fake_sock(bool rx_on);            /* fd of a new UDP socket of our class, bound to 127.0.0.1 */
int fake_kernel_sock(void);           /* one that we know nothing of */
void fake_on_ring(int fd);            /* it becomes offloaded */
void fake_ring_rx(int fd);            /* a datagram arrives on the ring (any thread) */
void fake_direct(int fd);             /* another thread delivered it already */
void fake_os_rx(int fd);              /* a datagram arrives at the kernel socket */
bool fake_take(int fd);               /* recv from the ring queue */
void fake_os_take(int fd);
void fake_close(int fd);
int fake_epoll(void);

#define CHECK(x) \
	do { \
		if (!(x)) { \
			fprintf(stderr, "%s:%d: %s: %s\n", __FILE__, __LINE__, __func__, #x); \
			exit(1); \
		} \
	} while (0)
#define EQUAL(a, b) \
	do { \
		long long a_ = (long long)(a), b_ = (long long)(b); \
		if (a_ != b_) { \
			fprintf(stderr, "%s:%d: %s: %s is %lld, not %s (%lld)\n", __FILE__, __LINE__, __func__, \
				#a, a_, #b, b_); \
			exit(1); \
		} \
	} while (0)

/* as the interposers do it */
int ctl(int ep, int op, int fd, uint32_t events, uint64_t data);
int wait_ep(int ep, struct epoll_event *evs, int max, int64_t ns, const sigset_t *mask);

/* the tests, by file */
extern int iomux_races;
void t_level(void);
void t_put_off(void);
void t_edge(void);
void t_oneshot(void);
void t_oneshot_shared_data(void);
void t_masks(void);
void t_errors(void);
void t_many_sets(void);
void t_nested(void);
void t_fairness(void);
void t_kernel_not_starved(void);
void t_os_ratio(void);
void t_cpu_usage(void);
void t_timeouts(void);
void t_kernel_only_set(void);
void t_offloaded_later(void);
void t_wake_races(void);
void t_churn(void);
void t_mask_ready_first(void);
void t_handlers(void);
void t_poll_exact(void);
void t_select_exact(void);
void t_budget(void);
void t_os_forced(void);
void t_link_closed(void);
void t_signal_before_sleep(void);
void t_model(void);
void t_after_fork(void);
void t_eintr(void);
void t_cancellation(void);
#endif
