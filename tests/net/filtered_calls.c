/* An echo server or its client that installs a seccomp filter, which kills for all calls but those that are named here:
 * "before" its first socket or "after" its connection, by prctl() or by seccomp(2) of all threads ("all"). */
#include "filtered.h"
#include <arpa/inet.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/socket.h>

#define ROUNDS 200

static void filter(int all)
{
	struct sock_filter f[] = {
		NUMBER,
		ALLOW(read), ALLOW(write), ALLOW(close), ALLOW(poll), ALLOW(socket), ALLOW(bind), ALLOW(listen), ALLOW(accept),
		ALLOW(connect), ALLOW(sendto), ALLOW(recvfrom), ALLOW(exit_group),
		BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_KILL_PROCESS),
	};

	install(f, sizeof(f) / sizeof(*f), all);
}

static void exchange(int fd, int asks)
{
	char data[500];

	memset(data, 'x', sizeof(data));
	for (int i = 0; i < ROUNDS; i++) {
		struct pollfd p = { .fd = fd, .events = POLLIN };

		if (asks && send(fd, data, sizeof(data), 0) != sizeof(data))
			_exit(6);
		if (poll(&p, 1, 3000) != 1 || recv(fd, data, sizeof(data), MSG_WAITALL) != sizeof(data))
			_exit(7);
		if (!asks && send(fd, data, sizeof(data), 0) != sizeof(data))
			_exit(8);
	}
}

int main(int argc, char **argv)
{
	struct sockaddr_in to = { .sin_family = AF_INET };
	int serves = argc > 5 && !strcmp(argv[1], "server"), before = !strcmp(argv[2], "before"), all = !strcmp(argv[3], "all");
	int fd, conn;

	inet_pton(AF_INET, argv[4], &to.sin_addr);
	to.sin_port = htons((uint16_t)atoi(argv[5]));
	if (before)
		filter(all);
	if (!strcmp(argv[1], "nothing")) {
		say("done\n");
		return 0;
	}
	fd = conn = socket(AF_INET, SOCK_STREAM, 0);
	if (serves) {
		if (bind(fd, (struct sockaddr *)&to, sizeof(to)) || listen(fd, 5))
			return 1;
		say("ready\n");
		conn = accept(fd, NULL, NULL);
	} else if (connect(fd, (struct sockaddr *)&to, sizeof(to))) {
		return 2;
	}
	if (!before) {
		exchange(conn, !serves);
		filter(all);
	}
	exchange(conn, !serves);
	close(conn);
	say("done\n");
	return 0;
}
