/* Where the internal thread runs: VMA_INTERNAL_THREAD_AFFINITY and VMA_INTERNAL_THREAD_CPUSET. */
#include "vmh_affinity.h"
#include "vmh_lane.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include "vmh_real.h"
#include <ctype.h>
#include <fcntl.h>
#include <stdio.h>

static bool put(struct vmh_cpus *cpus, unsigned long cpu)
{
	if (cpu >= VMH_CPUS)
		return false;
	cpus->words[cpu / 64] |= 1ull << cpu % 64;
	return true;
}

static bool has(const struct vmh_cpus *cpus, unsigned cpu)
{
	return cpus->words[cpu / 64] >> cpu % 64 & 1;
}

static bool mask(const char *text, struct vmh_cpus *cpus)
{
	size_t digits = strlen(text);

	for (size_t i = 0; i < digits; i++) {
		char c = text[digits - 1 - i];
		unsigned nibble = (unsigned)(isdigit((unsigned char)c) ? c - '0' : tolower((unsigned char)c) - 'a' + 10);

		if (!isxdigit((unsigned char)c))
			return false;
		for (unsigned bit = 0; bit < 4; bit++)
			if (nibble >> bit & 1 && !put(cpus, i * 4 + bit))
				return false;
	}
	return digits > 0;
}

static bool number(const char **text, unsigned long *value)
{
	if (!isdigit((unsigned char)**text))
		return false;
	*value = 0;
	while (isdigit((unsigned char)**text) && *value < VMH_CPUS)
		*value = *value * 10 + (unsigned long)(*(*text)++ - '0');
	return !isdigit((unsigned char)**text);
}

/* As taskset(1) has it: 0,2-5,8-15:2 */
static bool list(const char *text, struct vmh_cpus *cpus)
{
	unsigned long first, last, step;

	for (;;) {
		if (!number(&text, &first))
			return false;
		last = first;
		step = 1;
		if (*text == '-') {
			text++;
			if (!number(&text, &last) || last < first)
				return false;
			if (*text == ':' && (text++, !number(&text, &step) || !step))
				return false;
		}
		for (; first <= last; first += step)
			if (!put(cpus, first))
				return false;
		if (!*text)
			return true;
		if (*text++ != ',')
			return false;
	}
}

bool vmh_cpus_parse(const char *text, struct vmh_cpus *cpus)
{
	bool any = false;

	*cpus = (struct vmh_cpus){ 0 };
	if (text[0] == '0' && (text[1] == 'x' || text[1] == 'X') ? !mask(text + 2, cpus) : !list(text, cpus))
		return false;
	for (unsigned i = 0; i < VMH_CPUS / 64; i++)
		any = any || cpus->words[i];
	return any;
}

bool vmh_cpus_says(const char *text)
{
	struct vmh_cpus cpus;

	return !strcmp(text, "-1") || vmh_cpus_parse(text, &cpus);
}

/* As a list: 0,2-5. What does not fit is left out. */
static const char *text_of(const struct vmh_cpus *cpus, char *text, size_t size)
{
	int used = 0;

	text[0] = 0;
	for (unsigned i = 0, last; i < VMH_CPUS; i = last + 1) {
		last = i;
		if (!has(cpus, i))
			continue;
		while (last + 1 < VMH_CPUS && has(cpus, last + 1))
			last++;
		if ((size_t)used + 16 > size)
			break;
		used += snprintf(text + used, size - (size_t)used, i == last ? "%s%u" : "%s%u-%u", used ? "," : "", i, last);
	}
	return text;
}

/* Where it may run now, which a cpuset decides as well. */
static const char *acting(char *text, size_t size)
{
	struct vmh_cpus cpus = { 0 };

	if (vmh_sys(SYS_sched_getaffinity, 0, sizeof(cpus.words), cpus.words) < 0)
		return "unknown";
	return text_of(&cpus, text, size);
}

static bool set(const struct vmh_cpus *cpus)
{
	return vmh_sys(SYS_sched_setaffinity, 0, sizeof(cpus->words), cpus->words) >= 0;
}

static void pin(void)
{
	static const struct vmh_cpus first = { { 1 } };
	const char *asked = vmh_params.internal_thread_affinity;
	struct vmh_cpus cpus;
	char text[128];

	if (!strcmp(asked, "-1")) {
		vmh_lane_detach();
	} else if (!(vmh_cpus_parse(asked, &cpus) && set(&cpus))) {
		if (set(&first))
			vmh_warn(" Failed to set internal thread affinity: %s...  deferring to cpu-0.", asked);
		else
			vmh_warn(" Failed to set internal thread affinity: %s...  its cpuset decides: cpus %s.", asked,
				 acting(text, sizeof(text)));
	}
	vmh_debug("the internal thread runs on cpus %s", acting(text, sizeof(text)));
}

static long write_to(const char *path, const char *text, size_t len)
{
	long fd = vmh_sys(SYS_openat, AT_FDCWD, path, O_WRONLY | O_CLOEXEC), r;

	if (fd < 0)
		return fd;
	r = vmh_sys(SYS_write, fd, text, len);
	vmh_sys(SYS_close, fd);
	return r;
}

/* cgroup v1 and the cpuset file system have tasks; a threaded cgroup of v2 has cgroup.threads. */
static void join_cpuset(void)
{
	static const char *const files[] = { "tasks", "cgroup.threads" };
	char path[512], tid[16];
	int len = snprintf(tid, sizeof(tid), "%u\n", (unsigned)vmh_sys(SYS_gettid));
	long r = -ENOENT;

	if (!vmh_params.internal_thread_cpuset[0])
		return;
	for (unsigned i = 0; i < 2 && r == -ENOENT; i++) {
		snprintf(path, sizeof(path), "%s/%s", vmh_params.internal_thread_cpuset, files[i]);
		r = write_to(path, tid, (size_t)len);
	}
	if (r < 0)
		vmh_warn("VMA_INTERNAL_THREAD_CPUSET = %s: the internal thread can't join it (%s), it stays in that of the process",
			 vmh_params.internal_thread_cpuset, strerrorname_np((int)-r));
}

void vmh_affinity_apply(void)
{
	join_cpuset();
	pin();
}
