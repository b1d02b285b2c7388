/* What the library says when it starts: the manual's banner, line by line as there. */
#include "vmh_banner.h"
#if __has_include("commit.h")
#include "commit.h"
#endif
#include "vmh_fd.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <stdio.h>
#include <sys/utsname.h>
#include <time.h>

#ifndef VMH_VERSION
#define VMH_VERSION "0"
#endif
#ifndef VMH_COMMIT
#define VMH_COMMIT "unknown"
#endif
#define DASHES "---------------------------------------------------------------------------"
#define CMDLINE 400 /* a log line has 512 */

static void command_line(void)
{
	char text[CMDLINE];
	long fd = vmh_sys(SYS_open, "/proc/self/cmdline", 0 /* O_RDONLY */), n = -1;

	if (fd >= 0) {
		n = vmh_sys(SYS_read, (int)fd, text, sizeof(text) - 1);
		vmh_sys(SYS_close, (int)fd);
	}
	while (n > 0 && !text[n - 1])
		n--;
	for (long i = 0; i < n; i++)
		if ((unsigned char)text[i] < ' ' || text[i] == 127)
			text[i] = text[i] ? '?' : ' '; /* an argument ends with 0 */
	if (n >= 0) {
		text[n] = 0;
		vmh_info("Cmd Line: %s", text);
	}
}

/* As ctime(3) would, but in UTC: libc's own conversions take a lock, and the program may be the child of a fork that
 * happened while somebody held it. */
static void current_time(void)
{
	static const char days[] = "ThuFriSatSunMonTueWed", months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
	static const uint8_t length[] = { 31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31 };
	unsigned year = 1970, month = 0, of_day, day, n;
	struct timespec now;

	clock_gettime(CLOCK_REALTIME, &now);
	of_day = (unsigned)(now.tv_sec % 86400);
	day = (unsigned)(now.tv_sec / 86400);
	n = day % 7;
	for (unsigned days_of; day >= (days_of = year % 4 || (year % 100 == 0 && year % 400) ? 365 : 366); year++)
		day -= days_of;
	for (unsigned leap = !(year % 4 || (year % 100 == 0 && year % 400)), l;
	     day >= (l = length[month] + (month == 1 ? leap : 0)); month++)
		day -= l;
	vmh_info("Current Time: %.3s %.3s %2u %02u:%02u:%02u %u UTC", days + 3 * n, months + 3 * month, day + 1,
		 of_day / 3600, of_day / 60 % 60, of_day % 60, year);
}

static void machine(void)
{
	struct utsname u;

	current_time();
	vmh_info("Pid: %5u", (unsigned)vmh_sys(SYS_getpid));
	if (vmh_sys(SYS_uname, &u) == 0) {
		vmh_info("Architecture: %s", u.machine);
		vmh_info("Node: %s", u.nodename);
	}
}

/* The formats of the manual: a number, a text, or a number with its meaning. */
static void number_line(int level, const struct vmh_param_def *d, int64_t value)
{
	const struct vmh_param_banner *b = &d->banner;
	const char *note = value ? b->note : b->zero_note, *label = value ? b->label : b->zero_label, *word = NULL;
	const struct vmh_param_word *w;
	char acts[64];

	if (!b->number)
		for (w = d->words; w->word && !word; w++)
			word = w->value == value ? w->text : NULL;
	label = label ? label : d->label;
	if (!word && !value)
		word = b->zero;
	if (d->has_cap && value > d->cap && value != d->number) { /* the default looks as in the manual */
		snprintf(acts, sizeof(acts), "%lld (acts as %lld)", (long long)value, (long long)d->cap);
		word = acts;
	}
	if (word)
		note = word[0] == '(' ? word : NULL;
	if (note)
		vmh_log(level, "%-30s %-2lld%-24s [%s]", label, (long long)value, note, d->name);
	else if (word)
		vmh_log(level, "%-30s %-26s [%s]", label, word, d->name);
	else
		vmh_log(level, "%-30s %-26lld [%s]", label, (long long)value, d->name);
}

static bool is_default(unsigned param, const struct vmh_param_def *d)
{
	if (d->type != VMH_PARAM_STRING)
		return vmh_param_number(param) == d->number;
	/* %d of a default is filled in */
	return vmh_params_origin(param) == VMH_FROM_DEFAULT || !strcmp(vmh_param_string(param), d->string);
}

/* The two parameters of the profiles for which the peer knew them. */
static bool takes_parameters(void)
{
	return !strcmp(vmh_params.spec, "29west") || !strcmp(vmh_params.spec, "wombat_fh");
}

static void parameter(unsigned param)
{
	const struct vmh_param_def *d = vmh_param_def(param);
	int level = is_default(param, d) && param != VMH_PARAM_TRACELEVEL ? VMH_LOG_DETAILS : VMH_LOG_INFO;

	if (!d->label[0])
		return;
	if ((param == VMH_PARAM_SPEC_PARAM1 || param == VMH_PARAM_SPEC_PARAM2) && !takes_parameters())
		return;
	if (param == VMH_PARAM_SPEC) {
		if (vmh_params_profile())
			vmh_info("%-30s %-26s [%s]", d->label, vmh_params_profile(), d->name);
	} else if (d->type == VMH_PARAM_STRING) {
		vmh_log(level, "%-30s %-26s [%s]", d->label, vmh_param_string(param), d->name);
	} else {
		number_line(level, d, vmh_param_number(param));
	}
}

void vmh_banner(void)
{
	vmh_info(DASHES);
	vmh_info("VMA_VERSION: %s-0 Release vmahybrid built on %s %s", VMH_VERSION, __DATE__, __TIME__);
	if (strcmp(VMH_COMMIT, "unknown"))
		vmh_info("Git: %s", VMH_COMMIT);
	command_line();
	machine();
	vmh_info(DASHES);
	for (unsigned i = 0; i < VMH_PARAMS_COUNT; i++)
		parameter(i);
	vmh_info(DASHES);
}
