/* What the TCP cases share. */
#include "tcp_calls.h"
#include <stdarg.h>
#include <sys/syscall.h>
#include <sys/un.h>

#define CLOSED 7 /* TCP_CLOSE of <netinet/tcp.h>, which <linux/tcp.h> has not */

static FILE *ctl;

void tcp_begin(void)
{
	struct sockaddr_un u = { .sun_family = AF_UNIX };
	int fd = socket(AF_UNIX, SOCK_STREAM, 0);
	const char *path = getenv("TCP_PEER");

	snprintf(u.sun_path, sizeof(u.sun_path), "%s", path ? path : "");
	if (connect(fd, (void *)&u, sizeof(u))) {
		perror("TCP_PEER");
		exit(2);
	}
	ctl = fdopen(fd, "r");
}

void tcp_end(void)
{
	fclose(ctl);
}

static const char *asked(const char *fmt, va_list ap)
{
	static char line[256];
	int saved = errno;

	vdprintf(fileno(ctl), fmt, ap);
	dprintf(fileno(ctl), "\n");
	if (!fgets(line, sizeof(line), ctl))
		strcpy(line, "no answer of the peer");
	line[strcspn(line, "\n")] = 0;
	errno = saved;
	return line;
}

const char *tell(const char *fmt, ...)
{
	const char *said;
	va_list ap;

	va_start(ap, fmt);
	said = asked(fmt, ap);
	va_end(ap);
	return said;
}

void tell_said(const char *what, const char *fmt, ...)
{
	const char *said;
	va_list ap;

	va_start(ap, fmt);
	said = asked(fmt, ap);
	va_end(ap);
	say_text(what, said);
}

/* Past the shim: neither its getsockopt() nor its syscall() */
static void kernels_option(int fd, int name, void *value, socklen_t len)
{
	register void *r10 __asm__("r10") = value;
	register socklen_t *r8 __asm__("r8") = &len;
	long r;

	__asm__ volatile("syscall"
			 : "=a"(r)
			 : "0"((long)SYS_getsockopt), "D"((long)fd), "S"((long)IPPROTO_TCP), "d"((long)name), "r"(r10),
			   "r"(r8)
			 : "rcx", "r11", "memory");
	if (r)
		say("the kernel's option", r);
}

/* In the statistics: a ring's is to the kernel a socket that was never connected, or one in repair mode. */
static void note_where(int fd)
{
	const char *path = getenv("VMA_STATS_FILE");
	FILE *file = path ? fopen(path, "a") : NULL;
	struct tcp_info info = { 0 };
	int repair = 0;

	if (!file)
		return;
	kernels_option(fd, TCP_INFO, &info, sizeof(info));
	kernels_option(fd, TCP_REPAIR, &repair, sizeof(repair));
	fprintf(file, "where %s\n", info.tcpi_state == CLOSED || repair ? "ring" : "kernel");
	fclose(file);
}

int tcp_client(void)
{
	struct sockaddr_in a = peer(TCP_PORT);
	int fd = socket(AF_INET, SOCK_STREAM, 0);
	const char *said;

	if (connect(fd, (void *)&a, sizeof(a)))
		say("connect", -1);
	said = tell("accept");
	if (strcmp(said, "accept 0"))
		say_text("peer", said);
	note_where(fd);
	return fd;
}

int tcp_served(void)
{
	struct sockaddr_in a = { .sin_family = AF_INET };
	int l = socket(AF_INET, SOCK_STREAM, 0), fd;
	const char *said;

	inet_pton(AF_INET, my_ip, &a.sin_addr);
	if (bind(l, (void *)&a, sizeof(a)) || listen(l, 4))
		say("listen", -1);
	poll(&(struct pollfd){ .fd = l, .events = POLLIN }, 1, 0); /* from the first wait on it listens on its rings */
	said = tell("connect %d", my_port(l));
	if (strcmp(said, "connect 0"))
		say_text("peer", said);
	fd = accept(l, NULL, NULL);
	if (fd < 0)
		say("accept", fd);
	close(l);
	note_where(fd);
	return fd;
}

int tcp_pair(int accepted)
{
	return accepted ? tcp_served() : tcp_client();
}

void nonblock(int fd)
{
	fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK);
}

void fill(char *buf, long n)
{
	for (long i = 0; i < n; i++)
		buf[i] = (char)('a' + i % 26);
}

void say_yes(const char *what, int yes)
{
	say_text(what, yes ? "yes" : "no");
}

void say_events(const char *what, unsigned events)
{
	static const struct { unsigned bit; const char *name; } names[] = {
		{ EPOLLIN, "IN" }, { EPOLLPRI, "PRI" }, { EPOLLOUT, "OUT" }, { EPOLLERR, "ERR" }, { EPOLLHUP, "HUP" },
		{ EPOLLRDHUP, "RDHUP" }, { EPOLLRDNORM, "RDNORM" }, { EPOLLWRNORM, "WRNORM" },
		{ POLLNVAL, "NVAL" },
	};
	char text[96] = "";

	for (unsigned i = 0; i < sizeof(names) / sizeof(names[0]); i++)
		if (events & names[i].bit)
			strcat(strcat(text, " "), names[i].name);
	printf("  %s:%s\n", what, *text ? text : " none");
}

void say_poll(const char *what, int fd, int ms)
{
	struct pollfd p = { .fd = fd, .events = POLLIN | POLLOUT | POLLPRI | POLLRDHUP };
	int r = poll(&p, 1, ms);

	if (r < 0)
		say(what, r);
	else
		say_events(what, (unsigned)p.revents);
}

/* What the peer does not read fills both buffers; a window that is being announced anew may take more for a moment. */
long fill_window(int fd)
{
	static char buf[1 << 16];
	long all = 0, r;

	for (int quiet = 0; quiet < 3;) {
		r = send(fd, buf, sizeof(buf), MSG_DONTWAIT | MSG_NOSIGNAL);
		if (r > 0) {
			all += r;
			quiet = 0;
		} else if (r < 0 && errno != EAGAIN) {
			say("fill", r);
			return all;
		} else {
			quiet++;
			usleep(20000);
		}
	}
	return all;
}
