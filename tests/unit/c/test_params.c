/* Driver of tests/unit/test_shim_params.py: reads the environment as the shim does and does what its
 * arguments say. Prints to stdout; the log goes where the parameters send it. */
#include "vmh_affinity.h"
#include "vmh_banner.h"
#include "vmh_conf.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_stats.h"
#include <arpa/inet.h>
#include <locale.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <sys/wait.h>

void vmh_lane_detach(void); /* nor a ring */
void vmh_lane_detach(void)
{
}

void vmh_stats_asked(void)
{
}

void vmh_sock_dump(int fd, int level)
{
	(void)fd;
	(void)level;
}
struct vmh_obj *_Atomic *vmh_fdtab; /* no objects */
unsigned vmh_fdtab_size;
void vmh_epoll_dump(int epfd, int level)
{
	(void)epfd;
	(void)level;
}
void vmh_tcps_dump(int fd, int level); /* there is no TCP here */
void vmh_tcps_dump(int fd, int level)
{
	(void)fd, (void)level;
}

static void print_params(void)
{
#define NUMBER(field) printf(#field "=%lld\n", (long long)vmh_params.field)
#define STRING(field) printf(#field "=%s\n", vmh_params.field)
	STRING(spec), STRING(log_file), STRING(application_id), STRING(hybrid_socket), STRING(stats_shmem_dir);
	STRING(internal_thread_affinity);
	NUMBER(tracelevel), NUMBER(log_details), NUMBER(rx_poll), NUMBER(select_poll), NUMBER(select_poll_os_ratio);
	NUMBER(select_skip_os), NUMBER(rx_udp_poll_os_ratio), NUMBER(stats_fd_num), NUMBER(offloaded_sockets);
	NUMBER(tx_wre), NUMBER(rx_wre), NUMBER(cq_moderation_count), NUMBER(cq_moderation_enable);
	NUMBER(cq_aim_interval_msec), NUMBER(ring_allocation_logic_tx), NUMBER(tcp_timer_resolution_msec);
	NUMBER(rx_prefetch_bytes_before_poll), NUMBER(tcp_max_syn_rate), NUMBER(udp_3t_rules), NUMBER(tx_bufs), NUMBER(mss);
	printf("origin.rx_wre=%d\n", vmh_params_origin(VMH_PARAM_RX_WRE));
}

/* NAME=ORIGIN VALUE of every parameter */
static void print_all(void)
{
	for (unsigned i = 0; i < VMH_PARAMS_COUNT; i++) {
		const struct vmh_param_def *d = vmh_param_def(i);

		printf("%s=%d ", d->name, vmh_params_origin(i));
		if (d->type == VMH_PARAM_STRING)
			printf("%s\n", vmh_param_string(i));
		else
			printf("%lld\n", (long long)vmh_param_number(i));
	}
}

/* "ROLE ADDR PORT ADDR PORT" per line: what the rules say now, as the number of the reason */
static void conf(void)
{
	unsigned role, port, port2;
	char a[16], b[16];

	while (scanf("%u %15s %u %15s %u", &role, a, &port, b, &port2) == 5) {
		vmh_conf_refresh();
		printf("%u\n", vmh_conf_keeps(role, inet_addr(a), htons((uint16_t)port), inet_addr(b),
					      htons((uint16_t)port2)));
		fflush(stdout);
	}
}

/* A text per line: is it a list of processors, as VMA_INTERNAL_THREAD_AFFINITY has it? */
static void cpus(void)
{
	struct vmh_cpus found;
	char line[300];

	while (fgets(line, sizeof(line), stdin)) {
		line[strcspn(line, "\n")] = 0;
		printf("%s=%d\n", line, vmh_cpus_parse(line, &found));
	}
}

static struct vmh_sock_stats *busy_sock(int fd)
{
	struct vmh_sock_stats *s = vmh_stats_sock_new(fd);

	s->proto = IPPROTO_UDP;
	s->family = 4;
	s->offloaded = s->blocking = 1;
	memcpy(s->local_addr, "\0\0\0\0\0\0\0\0\0\0\xff\xff\x0a\x01\x02\x03", 16);
	s->local_port = htons(11111);
	VMH_COUNT(s->rx_packets, 233020);
	VMH_COUNT(s->rx_bytes, 465920);
	VMH_COUNT(s->tx_packets, 233020);
	VMH_COUNT(s->tx_bytes, 465920);
	VMH_COUNT(s->rx_poll_hit, 233020);
	VMH_COUNT(s->rx_poll_miss, 1000);
	s->rx_ready_bytes_max = 200;
	s->rx_ready_packets_max = 1;
	s->rx_limit = 2000000;
	return s;
}

static void stats(void)
{
	struct vmh_sock_stats *a, *b;
	unsigned long long tx = 0;
	char name[300], link[32], target[300] = { 0 };
	struct stat st;

	printf("locale=%s\n", setlocale(LC_NUMERIC, "") ? localeconv()->decimal_point : "none");
	vmh_stats_init();
	printf("fd=%d\n", vmh_stats_fd() >= 0);
	a = busy_sock(10);
	b = vmh_stats_sock_new(11);
	printf("slots=%d\n", a != b && a == &vmh_stats->socks[0]);
	vmh_stats_dump_fd(10, VMH_LOG_INFO);
	vmh_stats_file_dump(a);
	vmh_stats_file_dump(b);
	b->fd = 13;
	b->family = 6;
	memcpy(b->remote_addr, "\xfd\0\0\x77\0\0\0\0\0\0\0\0\0\0\0\x02", 16);
	b->remote_port = htons(7950);
	vmh_stats_dump_fd(13, VMH_LOG_INFO);
	vmh_stats_sock_free(b);
	printf("reused=%d\n", vmh_stats_sock_new(12) == b);
	fflush(stdout);
	a->rx_packets = 7;
	a->tx_packets = 0;
	vmh_stats->listens = vmh_stats->dump_wanted = vmh_stats->asked = 1;
	if (!fork()) {
		vmh_stats_fork_child();
		a->tx_packets = 5;
		printf("child=%d\n", a->used && a->rx_packets == 0 && a->rx_poll_hit == 0 && a->rx_limit == 2000000 && vmh_stats->pid == (unsigned)getpid() &&
		       vmh_stats_fd() < 0); /* nobody is to see it yet */
		snprintf(name, sizeof(name), "%s/vmastat.%d", vmh_params.stats_shmem_dir, (int)getpid());
		vmh_stats_show();
		if (pread(vmh_stats_fd(), &tx, sizeof(tx), (char *)&a->tx_packets - (char *)vmh_stats) < 0)
			perror("pread");
		printf("child_fd=%d\n", vmh_stats_fd() >= 0);
		printf("child_orders=%d\n", !vmh_stats->listens && !vmh_stats->dump_wanted && vmh_stats->taken == 1);
		printf("child_named=%d\n", lstat(name, &st) == 0 && a->tx_packets == 5 && tx == 5);
		vmh_stats_fini();
		printf("child_gone=%d\n", lstat(name, &st) != 0);
		fflush(stdout);
		_exit(0);
	}
	wait(NULL);
	snprintf(name, sizeof(name), "%s/vmastat.%d", vmh_params.stats_shmem_dir, (int)getpid());
	printf("nameless=%d\n", lstat(name, &st) != 0);
	vmh_stats_show();
	snprintf(link, sizeof(link), "/proc/self/fd/%d", vmh_stats_fd());
	if (readlink(link, target, sizeof(target) - 1) < 0)
		perror("readlink");
	printf("named=%s\n", target);
	printf("parent=%d\n", a->rx_packets == 7 && a->tx_packets == 0 && vmh_stats->pid == (unsigned)getpid());
	printf("parent_orders=%d\n", vmh_stats->listens && vmh_stats->dump_wanted && !vmh_stats->taken);
	printf("file=%s/vmastat.%d\n", vmh_params.stats_shmem_dir, (int)getpid());
	fstat(vmh_stats_fd(), &st);
	printf("mode=%o size=%d\n", st.st_mode & 07777, st.st_size == (off_t)vmh_stats->size);
	fflush(stdout);
	getchar(); /* the test looks at the file now */
	vmh_stats_fini();
}

static void many(void)
{
	struct vmh_sock_stats *last = NULL;
	int i;

	vmh_stats_init();
	vmh_stats_show();
	for (i = 0; i < 1030; i++)
		last = vmh_stats_sock_new(i);
	last->rx_packets = 1; /* the dummy: must be writable */
	vmh_stats_sock_free(last);
	printf("over=%llu nsocks=%u\n", vmh_stats->socks_over, vmh_stats->nsocks);
	vmh_stats_fini();
}

static void logs(void)
{
	errno = ENOENT;
	vmh_info("hello %s", "world");
	printf("errno=%d\n", errno == ENOENT);
	char longtext[2000];
	memset(longtext, 'x', sizeof(longtext));
	longtext[1999] = 0;
	vmh_error("%s", longtext);
	vmh_debug("hidden unless debug");
	vmh_warn("before");
	if (getenv("CLOSE_ALL")) {
		syscall(SYS_close_range, 3, ~0u, 0);
		vmh_warn("after");
	}
	printf("reason=%s|%s|%s\n", vmh_reason_slug(2), vmh_reason_slug(4711), vmh_reason_slug(0));
	fflush(stdout);
	if (!fork()) {
		vmh_log_reopen();
		vmh_warn("child");
		_exit(0);
	}
	wait(NULL);
}

int main(int argc, char **argv)
{
	vmh_params_init();
	vmh_log_init();
	if (getenv("BANNER"))
		vmh_banner();
	vmh_params_report();
	vmh_warn_high_level();
	if (argc < 2)
		print_params();
	else if (!strcmp(argv[1], "all"))
		print_all();
	else if (!strcmp(argv[1], "conf"))
		conf();
	else if (!strcmp(argv[1], "cpus"))
		cpus();
	else if (!strcmp(argv[1], "effect"))
		for (int i = 0; i < 2; i++) {
			vmh_params_no_effect(VMH_PARAM_ON_XDP, "xdp");
			vmh_params_no_effect(VMH_PARAM_ON_VERBS, "verbs");
		}
	else if (!strcmp(argv[1], "stats"))
		stats();
	else if (!strcmp(argv[1], "many"))
		many();
	else if (!strcmp(argv[1], "logs"))
		logs();
	return 0;
}
