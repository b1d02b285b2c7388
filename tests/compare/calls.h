/* Helpers of the comparison cases: every line that a case prints is compared between the kernel and the shim. */
#ifndef CALLS_H
#define CALLS_H
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/ioctl.h>
#include <sys/select.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

extern const char *peer_ip, *my_ip;

/* "what: value" or "what: -1 ENAME" */
void say(const char *what, long r);
void say_data(const char *what, const void *data, long n); /* length, first and last byte, checksum */
void say_text(const char *what, const char *text);
void say_cancelled(pthread_t t);   /* cancels it, and waits for it, 3 s at most */

struct sockaddr_in peer(int port);
int udp(void);                    /* AF_INET, SOCK_DGRAM */
int udp_bound(void);              /* to my_ip, any port */
int udp_any(void);                /* to INADDR_ANY, any port */
int udp_connected(int port);      /* to the peer */
void ask(int fd, int port, const char *text); /* sendto the peer (send, if connected to that port) */
void drain(int fd, const char *what); /* says every datagram that is there */
void settle(void);                /* long enough for an answer to arrive: CALLS_SETTLE_MS, 30 ms */
int my_port(int fd);
long elapsed_ms(const struct timespec *since);
void now(struct timespec *t);

struct call_case {
	const char *name;
	void (*run)(int arg);
	int arg;
};
extern const struct call_case recv_cases[], send_cases[], mux_cases[], opt_cases[], life_cases[], odd_cases[], stamp_cases[];
#endif
