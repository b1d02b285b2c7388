/* Helpers of the TCP cases. */
#ifndef TCP_CALLS_H
#define TCP_CALLS_H
#include "calls.h"
#include <linux/sockios.h>
#include <linux/tcp.h>

#define TCP_PORT 7100

void tcp_begin(void);                   /* before each case: a new control connection to the peer */
void tcp_end(void);
const char *tell(const char *fmt, ...) __attribute__((format(printf, 1, 2))); /* a command of tcp_peer.c: its answer */
void tell_said(const char *what, const char *fmt, ...) __attribute__((format(printf, 2, 3))); /* and it is compared */
int tcp_client(void);                   /* connected to the peer */
int tcp_served(void);                   /* accepted from the peer */
int tcp_pair(int accepted);
void nonblock(int fd);
void fill(char *buf, long n);           /* the pattern of the peer */
void say_yes(const char *what, int yes);
void say_events(const char *what, unsigned events);
void say_poll(const char *what, int fd, int ms);
long fill_window(int fd);               /* sends until EAGAIN: bytes */
extern const struct call_case tcp_data_cases[], tcp_wait_cases[], tcp_opt_cases[], tcp_life_cases[];
#endif
