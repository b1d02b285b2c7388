/* Statistics for humans, written by the program itself: the fd dump (`vmahybrid` or vma_stats -S) in
 * the format of the monitoring manual's example 7, and VMA_STATS_FILE in that of its example 6. */
#include "vmh_fd.h"
#include "vmh_lock.h"
#include "vmh_log.h"
#include "vmh_obj.h"
#include "vmh_params.h"
#include "vmh_stats.h"
#include "vmh_tcps_info.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <stdarg.h>
#include <stdio.h>

#define KB(bytes) ((bytes) / 1024)

struct percent {
	char text[16];
};

/* "12.34%": printf's own decimals have a comma where the program has set such a locale. */
static struct percent percent(unsigned long long part, unsigned long long rest)
{
	double share = part ? (double)part / ((double)part + (double)rest) : 0;
	unsigned hundredths = (unsigned)(share * 10000 + 0.5);
	struct percent p;

	snprintf(p.text, sizeof(p.text), "%u.%02u%%", hundredths / 100, hundredths % 100);
	return p;
}

static const char *endpoint(const struct vmh_sock_stats *s, const unsigned char addr[16], unsigned short port,
			    char *text, size_t size)
{
	char ip[INET6_ADDRSTRLEN] = "";

	inet_ntop(s->family == 6 ? AF_INET6 : AF_INET, s->family == 6 ? addr : addr + 12, ip, sizeof(ip));
	snprintf(text, size, s->family == 6 ? "[%s]:%u" : "%s:%u", ip, ntohs(port));
	return text;
}

static bool was_active(const struct vmh_sock_stats *s)
{
	return VMH_GET(s->rx_packets) || VMH_GET(s->rx_os_packets) || VMH_GET(s->rx_eagain) ||
	       VMH_GET(s->rx_os_eagain) || VMH_GET(s->rx_errors) || VMH_GET(s->rx_os_errors) ||
	       VMH_GET(s->tx_packets) || VMH_GET(s->tx_os_packets) || VMH_GET(s->tx_eagain) ||
	       VMH_GET(s->tx_os_eagain) || VMH_GET(s->tx_errors) || VMH_GET(s->tx_os_errors) ||
	       VMH_GET(s->tx_drops) || VMH_GET(s->rx_drop_packets);
}

static void dump_counters(const struct vmh_sock_stats *s, int level)
{
	vmh_log(level, "Tx Offload : %llu / %llu / %llu / %llu [kilobytes/packets/eagains/errors]", KB(s->tx_bytes),
		s->tx_packets, s->tx_eagain, s->tx_errors);
	if (s->tx_os_packets || s->tx_os_errors)
		vmh_log(level, "Tx OS info : %llu / %llu / %llu [kilobytes/packets/errors]", KB(s->tx_os_bytes),
			s->tx_os_packets, s->tx_os_errors);
	if (s->tx_dummy)
		vmh_log(level, "Tx Dummy messages : %llu", s->tx_dummy);
	vmh_log(level, "Rx Offload : %llu / %llu / %llu / %llu [kilobytes/packets/eagains/errors]", KB(s->rx_bytes),
		s->rx_packets, s->rx_eagain, s->rx_errors);
	vmh_log(level, "Rx byte : max %llu / dropped %llu (%s) / limit %llu", s->rx_ready_bytes_max,
		s->rx_drop_bytes, percent(s->rx_drop_bytes, s->rx_bytes).text, s->rx_limit);
	vmh_log(level, "Rx pkt : max %llu / dropped %llu (%s)", s->rx_ready_packets_max, s->rx_drop_packets,
		percent(s->rx_drop_packets, s->rx_packets).text);
	if (s->rx_os_packets || s->rx_os_errors)
		vmh_log(level, "Rx OS info : %llu / %llu / %llu [kilobytes/packets/errors]", KB(s->rx_os_bytes),
			s->rx_os_packets, s->rx_os_errors);
	if (s->rx_poll_hit || s->rx_poll_miss)
		vmh_log(level, "Rx poll : %llu / %llu (%s) [miss/hit]", s->rx_poll_miss, s->rx_poll_hit,
			percent(s->rx_poll_hit, s->rx_poll_miss).text);
}

static void dump_sock(const struct vmh_sock_stats *s, int level)
{
	char text[INET6_ADDRSTRLEN + 8];

	vmh_log(level, "==================== SOCKET FD ===================");
	vmh_log(level, "Fd number : %d", s->fd);
	vmh_log(level, "Bind info : %s", endpoint(s, s->local_addr, s->local_port, text, sizeof(text)));
	vmh_log(level, "Connection info : %s", endpoint(s, s->remote_addr, s->remote_port, text, sizeof(text)));
	vmh_log(level, "Protocol : %s", s->proto == IPPROTO_UDP ? "PROTO_UDP" : s->proto == IPPROTO_TCP ? "PROTO_TCP"
													 : "PROTO_UNDEFINED");
	vmh_log(level, "Is closed : false"); /* a closed socket has no slot */
	vmh_log(level, "Is blocking : %s", s->blocking ? "true" : "false");
	vmh_log(level, "Rx reuse buffer pending : false"); /* what was read goes back to its ring at once */
	vmh_log(level, "Rx reuse buffer postponed : false");
	vmh_log(level, "Is offloaded : %s", s->offloaded ? "true" : "false");
	if (s->reason)
		vmh_log(level, "Reason : %s", vmh_reason_text(s->reason));
	if (was_active(s))
		dump_counters(s, level);
	else
		vmh_log(level, "Socket activity : Rx and Tx where not active");
	if (s->proto == IPPROTO_TCP && s->offloaded)
		vmh_tcps_dump(s->fd, level);
	if (s->proto == IPPROTO_UDP) {
		vmh_log(level, "Rx ready list size : %llu", s->rx_ready_packets);
		vmh_sock_dump(s->fd, level);
	}
}

static void dump_epoll(const struct vmh_iomux_stats *e, int level)
{
	vmh_log(level, "==================== EPOLL FD ====================");
	vmh_log(level, "Fd number : %d", e->epfd);
	vmh_epoll_dump(e->epfd, level);
	vmh_log(level, "Polling CPU : %llu%%", e->polling_percent);
	if (e->thread)
		vmh_log(level, "Thread Id : %5u", e->thread);
	vmh_log(level, "Rx fds ready : %llu / %llu [os/offload]", e->os_rx_ready, e->rx_ready);
	vmh_log(level, "Polls [miss/hit] : %llu / %llu (%s)", e->poll_miss, e->poll_hit,
		percent(e->poll_hit, e->poll_miss).text);
	vmh_log(level, "Timeouts : %llu", e->timeouts);
	vmh_log(level, "Errors : %llu", e->errors);
}

void vmh_stats_dump_fd(int fd, int level)
{
	static const char line[] = "==================================================";
	bool found = !fd;
	unsigned i;

	if (fd)
		vmh_log(level, "============ DUMPING FD %d STATISTICS ============", fd);
	else
		vmh_log(level, "======= DUMPING STATISTICS FOR ALL OPEN FDS ======");
	for (i = 0; i < vmh_stats->nsocks; i++) {
		/* a copy: the socket may be closed and its slot taken while we print */
		struct vmh_sock_stats s = vmh_stats->socks[i];

		if (s.used && (!fd || s.fd == fd)) {
			dump_sock(&s, level);
			found = true;
		}
	}
	for (i = 0; i < VMH_STATS_EPOLLS; i++) {
		struct vmh_iomux_stats e = vmh_stats->epoll[i];

		if (e.used && (!fd || e.epfd == fd)) {
			dump_epoll(&e, level);
			found = true;
		}
	}
	if (!found) { /* no socket, not of a kind that is offloaded, or over VMA_STATS_FD_NUM */
		vmh_log(level, "Fd number : %d", fd);
		vmh_log(level, "No statistics are kept of it");
		if ((unsigned)fd >= vmh_fdtab_size || !atomic_load(&vmh_fdtab[fd]))
			vmh_log(level, "Is offloaded : false");
	}
	vmh_log(level, "%s", line);
	vmh_log(level, "%s", line);
}

/* Appends one formatted line to a buffer; a line that does not fit is left out whole. */
static void __attribute__((format(printf, 3, 4))) append(char *buf, size_t size, const char *fmt, ...)
{
	size_t used = strlen(buf);
	va_list ap;
	int n;

	va_start(ap, fmt);
	n = vsnprintf(buf + used, size - used, fmt, ap);
	va_end(ap);
	if (n < 0 || (size_t)n >= size - used)
		buf[used] = 0;
}

/* VMA_STATS_FILE: made at the start; opened again, not truncated, where the program closed our fd. */
static struct vmh_file stats_file = { .fd = -1 };
static struct vmh_lock stats_file_lock;
static bool stats_file_failed;

static void open_stats_file(bool anew)
{
	int err = vmh_file_open(&stats_file, vmh_params.stats_file, O_WRONLY | O_CREAT | O_APPEND, 0644, true);

	if (!err && anew)
		err = vmh_file_truncate(&stats_file);
	if (err == -EINVAL || err == -EISDIR || err == -ENXIO) /* a device, a directory, a FIFO */
		vmh_warn("FAILED to create VMA statistics file. %s is not a regular file.", vmh_params.stats_file);
	else if (err)
		vmh_warn("FAILED to create VMA statistics file %s (%s)", vmh_params.stats_file, strerrorname_np(-err));
	stats_file_failed = err != 0;
}

void vmh_stats_file_init(void)
{
	if (vmh_params.stats_file[0])
		open_stats_file(true);
}

void vmh_stats_file_fork_child(void)
{
	vmh_lock_reset(&stats_file_lock);
	if (!vmh_params.stats_file[0] || !vmh_params_expand_again(VMH_PARAM_STATS_FILE))
		return; /* the parent's file: both append to it */
	vmh_file_close(&stats_file);
	open_stats_file(true);
}

static void write_stats_file(const char *text)
{
	vmh_lock(&stats_file_lock);
	if (!stats_file_failed && vmh_file_write(&stats_file, text, strlen(text)) == -EBADF) {
		open_stats_file(false);
		if (!stats_file_failed)
			vmh_file_write(&stats_file, text, strlen(text));
	}
	vmh_unlock(&stats_file_lock);
}

void vmh_stats_file_dump(const struct vmh_sock_stats *s)
{
	char text[1024] = "";

	if (!vmh_params.stats_file[0] || !s || !s->used || !was_active(s))
		return;
	append(text, sizeof(text), "VMA: [fd=%d] Tx Offload: %llu / %llu / %llu [kilobytes/packets/errors]\n", s->fd,
	       KB(s->tx_bytes), s->tx_packets, s->tx_errors);
	append(text, sizeof(text), "VMA: [fd=%d] Tx OS info: %llu / %llu / %llu [kilobytes/packets/errors]\n", s->fd,
	       KB(s->tx_os_bytes), s->tx_os_packets, s->tx_os_errors);
	append(text, sizeof(text), "VMA: [fd=%d] Rx Offload: %llu / %llu / %llu [kilobytes/packets/errors]\n", s->fd,
	       KB(s->rx_bytes), s->rx_packets, s->rx_errors);
	append(text, sizeof(text), "VMA: [fd=%d] Rx OS info: %llu / %llu / %llu [kilobytes/packets/errors]\n", s->fd,
	       KB(s->rx_os_bytes), s->rx_os_packets, s->rx_os_errors);
	append(text, sizeof(text), "VMA: [fd=%d] Rx byte: max %llu / dropped %llu (%s) / limit %llu\n", s->fd,
	       s->rx_ready_bytes_max, s->rx_drop_bytes, percent(s->rx_drop_bytes, s->rx_bytes).text, s->rx_limit);
	append(text, sizeof(text), "VMA: [fd=%d] Rx pkt : max %llu / dropped %llu (%s)\n", s->fd,
	       s->rx_ready_packets_max, s->rx_drop_packets, percent(s->rx_drop_packets, s->rx_packets).text);
	append(text, sizeof(text), "VMA: [fd=%d] Rx poll: %llu / %llu (%s) [miss/hit]\n", s->fd, s->rx_poll_miss,
	       s->rx_poll_hit, percent(s->rx_poll_hit, s->rx_poll_miss).text);
	write_stats_file(text);
}

static void dump_copy(struct vmh_sock_stats *s)
{
	struct vmh_sock_stats copy = *s; /* another thread may still close it */

	vmh_stats_file_dump(&copy);
}

void vmh_stats_file_dump_all(void)
{
	if (vmh_params.stats_file[0])
		vmh_stats_each_sock(dump_copy);
}
