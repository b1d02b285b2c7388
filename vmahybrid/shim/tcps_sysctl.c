/* The sysctls of the program's network namespace that connections on rings obey, as the kernel's do. */
#include "vmh_base.h"
#include "vmh_tcps_param.h"
#include <fcntl.h>
#include <stdatomic.h>
#include <stdio.h>

#define FRESH_NS 1000000000u
#define DIR "/proc/sys/net/"

static const struct {
	const char *path;
	int least, most, otherwise; /* otherwise: it can't be read; the kernel's default */
} sysctls[] = {
	[VMH_SYSCTL_TTL] = { DIR "ipv4/ip_default_ttl", 1, 255, 64 },
	[VMH_SYSCTL_TIMESTAMPS] = { DIR "ipv4/tcp_timestamps", 0, 2, 1 },
	[VMH_SYSCTL_SACK] = { DIR "ipv4/tcp_sack", 0, 1, 1 },
	[VMH_SYSCTL_WINDOW_SCALING] = { DIR "ipv4/tcp_window_scaling", 0, 1, 1 },
	[VMH_SYSCTL_SYN_COOKIES] = { DIR "ipv4/tcp_syncookies", 0, 2, 1 },
	[VMH_SYSCTL_SYN_RETRIES] = { DIR "ipv4/tcp_syn_retries", 1, 127, 6 },
	[VMH_SYSCTL_KEEP_IDLE_S] = { DIR "ipv4/tcp_keepalive_time", 1, 32767, 7200 },
	[VMH_SYSCTL_KEEP_INTVL_S] = { DIR "ipv4/tcp_keepalive_intvl", 1, 32767, 75 },
	[VMH_SYSCTL_KEEP_CNT] = { DIR "ipv4/tcp_keepalive_probes", 1, 127, 9 },
	[VMH_SYSCTL_AFTER_IDLE] = { DIR "ipv4/tcp_slow_start_after_idle", 0, 1, 1 },
	[VMH_SYSCTL_SOMAXCONN] = { DIR "core/somaxconn", 0, 1 << 20, 4096 },
};
#define N (sizeof(sysctls) / sizeof(sysctls[0]))

static _Atomic int values[N];
static _Atomic uint64_t read_at;

static int look(unsigned i)
{
	char text[16] = "";
	int value;
	long fd = vmh_sys(SYS_openat, AT_FDCWD, sysctls[i].path, O_RDONLY | O_CLOEXEC);

	if (fd < 0)
		return sysctls[i].otherwise;
	vmh_sys(SYS_read, fd, text, sizeof(text) - 1);
	vmh_sys(SYS_close, fd);
	if (sscanf(text, "%d", &value) != 1)
		return sysctls[i].otherwise;
	return value < sysctls[i].least ? sysctls[i].least : value > sysctls[i].most ? sysctls[i].most : value;
}

int vmh_tcps_sysctl(enum vmh_tcps_sysctl which)
{
	uint64_t now = vmh_now_ns(), at = atomic_load(&read_at);

	if (!at || now - at > FRESH_NS) {
		for (unsigned i = 0; i < N; i++)
			atomic_store(&values[i], look(i));
		atomic_store(&read_at, now);
	}
	return atomic_load(&values[which]);
}
