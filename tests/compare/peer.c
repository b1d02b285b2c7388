/* The other end of calls.c, on the plain kernel in the other namespace. Ports:
 *   7001 echo             7003 "N LEN": sends N datagrams of LEN bytes back
 *   7005 echo after 40 ms 7006 "GROUP PORT N": sends N datagrams to a multicast group
 *   7007 answers from port 7008 instead; nobody listens on 7004.
 *   7009 answers "DF" or "no DF", as the query's IP header had it.
 * Ends at a datagram "quit" on 7001, or by itself after the seconds given. */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <netinet/in.h>
#include <netinet/ip.h>
#include <netinet/udp.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static int port_socket(const char *ip, int port)
{
	struct sockaddr_in a = { .sin_family = AF_INET, .sin_port = htons(port) };
	int fd = socket(AF_INET, SOCK_DGRAM, 0);

	inet_pton(AF_INET, ip, &a.sin_addr);
	if (bind(fd, (void *)&a, sizeof(a))) {
		perror("bind");
		exit(1);
	}
	return fd;
}

static void burst(int fd, const char *ask, struct sockaddr_in *to)
{
	int n = 0, len = 0;
	char buf[65536];

	if (sscanf(ask, "%d %d", &n, &len) != 2 || n > 1000 || len > 60000)
		return;
	for (int i = 0; i < n; i++) {
		memset(buf, 'a' + i % 26, sizeof(buf));
		sendto(fd, buf, len, 0, (void *)to, sizeof(*to));
	}
}

static void multicast(const char *ip, const char *ask)
{
	struct sockaddr_in g = { .sin_family = AF_INET };
	char group[32];
	int port, n, fd;
	struct in_addr me;

	if (sscanf(ask, "%31s %d %d", group, &port, &n) != 3 || n > 100)
		return;
	inet_pton(AF_INET, group, &g.sin_addr);
	inet_pton(AF_INET, ip, &me);
	g.sin_port = htons(port);
	fd = port_socket(ip, 0);
	setsockopt(fd, IPPROTO_IP, IP_MULTICAST_IF, &me, sizeof(me));
	for (int i = 0; i < n; i++) {
		char text[32];
		int len = snprintf(text, sizeof(text), "mc-%d", i);
		sendto(fd, text, len, 0, (void *)&g, sizeof(g));
	}
	close(fd);
}

/* A raw socket gets a copy of every UDP packet with its IP header. */
static void headers(int raw, int answers)
{
	unsigned char packet[65536];
	ssize_t n = recv(raw, packet, sizeof(packet), MSG_DONTWAIT);
	const struct iphdr *ip = (void *)packet;
	const struct udphdr *udp = (void *)(packet + ip->ihl * 4);

	if (n < (ssize_t)(sizeof(*ip) + sizeof(*udp)) || ntohs(udp->dest) != 7009)
		return;
	struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = udp->source, .sin_addr.s_addr = ip->saddr };
	const char *text = ip->frag_off & htons(IP_DF) ? "DF" : "no DF";
	sendto(answers, text, strlen(text), 0, (void *)&to, sizeof(to));
}

int main(int argc, char **argv)
{
	const char *ip = argc > 1 ? argv[1] : "127.0.0.1";
	static const int ports[] = { 7001, 7003, 7005, 7006, 7007, 7008, 7009 };
	struct pollfd p[8];
	char buf[65536];

	alarm(argc > 2 ? atoi(argv[2]) : 120);
	for (int i = 0; i < 7; i++)
		p[i] = (struct pollfd){ .fd = port_socket(ip, ports[i]), .events = POLLIN };
	p[7] = (struct pollfd){ .fd = socket(AF_INET, SOCK_RAW, IPPROTO_UDP), .events = POLLIN };
	puts("ready");
	fflush(stdout);
	for (;;) {
		if (poll(p, 8, -1) < 0)
			return 1;
		if (p[7].revents)
			headers(p[7].fd, p[6].fd);
		for (int i = 0; i < 7; i++) {
			struct sockaddr_in from;
			socklen_t fl = sizeof(from);

			if (!p[i].revents)
				continue;
			ssize_t n = recvfrom(p[i].fd, buf, sizeof(buf) - 1, MSG_DONTWAIT, (void *)&from, &fl);
			if (n < 0)
				continue;
			buf[n] = 0;
			switch (ports[i]) {
			case 7005:
				usleep(40000); /* fall through */
			case 7001:
				if (n == 4 && !memcmp(buf, "quit", 4))
					return 0;
				sendto(p[i].fd, buf, n, 0, (void *)&from, fl);
				break;
			case 7003: burst(p[i].fd, buf, &from); break;
			case 7006: multicast(ip, buf); break;
			case 7007: sendto(p[5].fd, buf, n, 0, (void *)&from, fl); break;
			}
		}
	}
}
