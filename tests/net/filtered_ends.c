/* ADDRESS PORT WHAT HOW: a client that has had its answer installs a seccomp filter, which kills ("kill") or refuses
 * ("errno") what is not named here, and makes the call WHAT; "signal" waits for one. "ask": there are filters, and none is
 * installed. */
#include "filtered.h"
#include <arpa/inet.h>
#include <errno.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/socket.h>

static void filter(int kills)
{
	struct sock_filter f[] = {
		NUMBER,
		ALLOW(read), ALLOW(write), ALLOW(close), ALLOW(exit_group), ALLOW(rt_sigaction), ALLOW(rt_sigreturn),
		ALLOW(epoll_ctl), ALLOW(dup2),
		BPF_STMT(BPF_RET | BPF_K, kills ? SECCOMP_RET_KILL_PROCESS : SECCOMP_RET_ERRNO | EPERM),
	};

	install(f, sizeof(f) / sizeof(*f), 0);
}

static void on(int sig)
{
	(void)sig;
}

int main(int argc, char **argv)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	struct sigaction a = { .sa_handler = on };
	struct epoll_event ev = { .events = EPOLLIN };
	int set = epoll_create1(0), fd = socket(AF_INET, SOCK_STREAM, 0), r = 0;
	const char *what = argc > 4 ? argv[3] : "";
	char c = 'x';

	inet_pton(AF_INET, argv[1], &to.sin_addr);
	to.sin_port = htons((uint16_t)atoi(argv[2]));
	if (connect(fd, (struct sockaddr *)&to, sizeof(to)) || send(fd, &c, 1, 0) != 1 || recv(fd, &c, 1, 0) != 1)
		return 2;
	if (!strcmp(what, "ask"))
		r = prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, NULL, 0, 0) != -1 || errno != EFAULT;
	else
		filter(!strcmp(argv[4], "kill"));
	if (!strcmp(what, "sigaction"))
		r = sigaction(SIGUSR1, &a, NULL);
	else if (!strcmp(what, "epoll_ctl"))
		r = epoll_ctl(set, EPOLL_CTL_ADD, fd, &ev);
	else if (!strcmp(what, "dup2"))
		r = dup2(1, 2) != 2;
	if (r)
		return 5;
	say("filtered\n");
	if (!strcmp(what, "signal") || !strcmp(what, "ask"))
		while (read(0, &c, 1) > 0)
			;
	return 0;
}
