/* See vmh_log.h. One line is one write(2), so that lines of several threads and processes stay whole. */
#include "vmh_log.h"
#include "vmh_fd.h"
#include "vmh_params.h"
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <time.h>
#include <asm/termbits.h> /* not termios.h: only the size of the kernel's struct matters */

#define LINE_MAX_ 512

VMH_EACH_CALL _Atomic int vmh_log_level_now = VMH_LOG_INFO;
_Atomic int vmh_log_details_now;

static struct vmh_file file = { .fd = -1 };
static bool to_file, colours;
static void (*callback)(int level, const char *line);
static __thread bool in_callback; /* the program's function may make calls that are logged */
static uint64_t started_ns;
static struct vmh_file program_stderr = { .fd = -1 }; /* what the program means by 2; fd -1: it began without one */

static const struct {
	const char *name, *colour; /* red, magenta, plain, dim */
} levels[] = {
	[VMH_LOG_PANIC] = { "PANIC", "\033[0;31m" },     [VMH_LOG_ERROR] = { "ERROR", "\033[0;31m" },
	[VMH_LOG_WARNING] = { "WARNING", "\033[2;35m" }, [VMH_LOG_INFO] = { "INFO", "" },
	[VMH_LOG_DETAILS] = { "DETAILS", "" },           [VMH_LOG_DEBUG] = { "DEBUG", "" },
	[VMH_LOG_FINE] = { "FINE", "\033[2m" },          [VMH_LOG_FINER] = { "FINER", "\033[2m" },
	[VMH_LOG_ALL] = { "ALL", "\033[2m" },
};

__attribute__((constructor)) static void loaded(void)
{
	started_ns = vmh_now_ns();
	vmh_file_of(&program_stderr, 2);
}

static bool is_terminal(int fd)
{
	struct termios t;

	return vmh_sys(SYS_ioctl, fd, TCGETS, &t) == 0;
}

static int open_file(int truncate)
{
	return vmh_file_open(&file, vmh_params.log_file, O_WRONLY | O_CREAT | O_APPEND | truncate, 0644, false);
}

/* VMA_LOG_CB_FUNC_PTR is the program's own word for where to jump: only into code of a loaded file. */
static void find_callback(void)
{
	const char *text = vmh_params.log_cb_func_ptr;
	void *at = NULL;
	Dl_info info;

	if (!*text)
		return;
	if (sscanf(text, "%p", &at) == 1 && at && dladdr(at, &info))
		memcpy(&callback, &at, sizeof(callback));
	else
		vmh_warn("VMA_LOG_CB_FUNC_PTR = %s is not the address of a function of this process, logging as without it", text);
}

/* https://no-color.org, and a terminal that knows no escape sequences (in Emacs) */
static bool colours_wanted(void)
{
	const char *no_color = getenv("NO_COLOR"), *term = getenv("TERM");

	return vmh_params.log_colors && !(no_color && *no_color) && !(term && !strcmp(term, "dumb"));
}

static void use_file(void)
{
	int err = vmh_params.log_file[0] ? open_file(O_TRUNC) : 0;

	to_file = vmh_params.log_file[0] && !err;
	colours = colours_wanted() && is_terminal(to_file ? file.fd : 2);
	if (err)
		vmh_error("Failed to open logfile: %s (%s), logging to stderr", vmh_params.log_file, strerrorname_np(-err));
}

void vmh_log_init(void)
{
	atomic_store(&vmh_log_level_now, (int)vmh_params.tracelevel);
	atomic_store(&vmh_log_details_now, (int)vmh_params.log_details);
	use_file();
	find_callback();
}

/* A name with %d gives the child a file of its own; else parent and child append to the same one. */
void vmh_log_reopen(void)
{
	if (!to_file || !vmh_params_expand_again(VMH_PARAM_LOG_FILE))
		return;
	vmh_file_close(&file);
	use_file();
}

void vmh_log_stderr_moved(void)
{
	struct vmh_file now;

	if (program_stderr.fd < 0 || vmh_file_of(&now, 2))
		return;
	program_stderr = now;
	if (!to_file && colours)
		colours = is_terminal(2);
}

/* A stderr may be one since the start (inetd), and what is said there is the protocol's. */
static bool stderr_is_a_connection(void)
{
	int domain = 0;
	socklen_t n = sizeof(domain);

	return vmh_sys(SYS_getsockopt, 2, SOL_SOCKET, SO_DOMAIN, &domain, &n) == 0 &&
	       (domain == AF_INET || domain == AF_INET6);
}

/* A program that has closed its stderr gets the number for its next file, which our lines would spoil. */
bool vmh_log_stderr_usable(void)
{
	return vmh_file_is_ours(&program_stderr) && !stderr_is_a_connection();
}

static void to_stderr(const char *line, size_t len)
{
	struct vmh_quiet q;
	long r;

	if (!vmh_log_stderr_usable())
		return;
	q = vmh_quiet_begin();
	do
		r = vmh_sys(SYS_write, 2, line, len);
	while (r == -EINTR);
	vmh_quiet_end(&q, r);
}

/* Of a full disk, say. The lines after that one would spoil what the program shows there. */
static void unwritten(int err)
{
	static _Atomic bool told;
	char line[LINE_MAX_];
	int n;

	if (atomic_exchange(&told, true))
		return;
	n = snprintf(line, sizeof(line), " VMA ERROR: Failed to write logfile: %.300s (%s), lines are lost\n",
		     vmh_params.log_file, strerrorname_np(-err));
	to_stderr(line, (size_t)n);
}

static void put(const char *line, size_t len)
{
	int err;

	if (to_file) {
		err = vmh_file_write(&file, line, len);
		/* the program closed our fd (daemons close all of them): once more, without truncating */
		if (err && file.fd < 0 && !(err = open_file(0)))
			err = vmh_file_write(&file, line, len);
		if (err)
			unwritten(err);
		return;
	}
	to_stderr(line, len);
}

/* The prefix that VMA_LOG_DETAILS asks for. Bytes written. */
static int prefix(char *line, size_t size)
{
	int details = atomic_load_explicit(&vmh_log_details_now, memory_order_relaxed);
	unsigned tid, pid;
	uint64_t us;

	if (details <= 0)
		return 0;
	tid = (unsigned)vmh_sys(SYS_gettid);
	if (details == 1)
		return snprintf(line, size, " Tid: %5u", tid);
	pid = (unsigned)vmh_sys(SYS_getpid);
	if (details == 2)
		return snprintf(line, size, " Pid: %5u Tid: %5u", pid, tid);
	us = (vmh_now_ns() - started_ns) / 1000;
	return snprintf(line, size, " Time: %5llu.%03u Pid: %5u Tid: %5u", (unsigned long long)(us / 1000),
			(unsigned)(us % 1000), pid, tid);
}

/* What is a value's or a name's must not begin a line of its own, or move the terminal's cursor. */
static void tame(char *text, int len)
{
	for (int i = 0; i < len; i++)
		if (((unsigned char)text[i] < ' ' && text[i] != '\t') || text[i] == 0x7f)
			text[i] = '?';
}

void vmh_log_write(int level, const char *fmt, ...)
{
	int saved = errno, n, room, want;
	char line[LINE_MAX_];
	const char *colour;
	va_list ap;

	if (level < VMH_LOG_PANIC || level > VMH_LOG_ALL)
		level = VMH_LOG_ALL;
	colour = colours ? levels[level].colour : "";
	n = snprintf(line, sizeof(line), "%s", colour);
	n += prefix(line + n, sizeof(line) - (size_t)n);
	n += snprintf(line + n, sizeof(line) - (size_t)n, " VMA %s: ", levels[level].name);
	room = (int)sizeof(line) - n - (*colour ? 5 : 1); /* the end of colour and the newline always fit */
	va_start(ap, fmt);
	errno = saved; /* for %m */
	want = vsnprintf(line + n, (size_t)room, fmt, ap);
	want = want < 0 ? 0 : want < room ? want : room - 1;
	tame(line + n, want);
	n += want;
	va_end(ap);
	n += snprintf(line + n, sizeof(line) - (size_t)n, "%s\n", *colour ? "\033[0m" : "");
	if (callback && !in_callback) {
		in_callback = true;
		callback(level, line);
		in_callback = false;
	} else if (!callback) {
		put(line, (size_t)n);
	}
	errno = saved;
}
