/* From the environment to struct vmh_params, by the table of the catalogue.
 *
 * Runs once, from the constructor, before threads of ours exist. Warnings are collected, because the
 * log that they go to is itself configured here.
 */
#define VMH_PARAMS_TABLE
#include "vmh_params.h"
#include "vmh_affinity.h"
#include "vmh_log.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define WARNING_LEN 480 /* with what precedes it a line of the log, at most */
#define DIGITS_OF(n) #n
#define DIGITS(n) DIGITS_OF(n)
#define VALUE_LEN 64    /* letters of a value that a warning shows */

extern char **environ;

struct vmh_params vmh_params;

static uint8_t origins[VMH_PARAMS_COUNT];
static bool in_vain[VMH_PARAMS_COUNT]; /* named in the environment, with what can't be used */
static char warnings[1 << 16]; /* one behind the other, each with its terminator */
static size_t warnings_len;
static unsigned warnings_lost;
static const struct vmh_paramfile *reading; /* the file that values come from now */
static char profile_title[64];

#define warn vmh_params_warn
#define is_set vmh_params_is_set

void vmh_params_warn(const char *fmt, ...)
{
	char *out = warnings + warnings_len;
	va_list ap;
	int n = 0;

	if (sizeof(warnings) - warnings_len < WARNING_LEN) {
		warnings_lost++;
		return;
	}
	if (reading)
		n = snprintf(out, WARNING_LEN, "%.200s:%u: ", reading->path, reading->line);
	va_start(ap, fmt);
	vsnprintf(out + n, WARNING_LEN - (size_t)n, fmt, ap);
	va_end(ap);
	warnings_len += strlen(out) + 1;
}

/* A value as a warning shows it: the beginning of a long one, so that there is room for what is said of it. */
struct shown {
	char text[VALUE_LEN + 4];
};

static struct shown shorten(const char *text)
{
	struct shown s;

	snprintf(s.text, sizeof(s.text), "%.*s%s", VALUE_LEN, text, strlen(text) > VALUE_LEN ? "..." : "");
	return s;
}

static int64_t *number_of(const struct vmh_param_def *d)
{
	return (int64_t *)((char *)&vmh_params + d->offset);
}

static char *string_of(const struct vmh_param_def *d)
{
	return (char *)&vmh_params + d->offset;
}

/* Copies text, the first %d replaced by the process id where the parameter wants it; 0 or -E2BIG. */
static int expand(const struct vmh_param_def *d, const char *text, char *out)
{
	const char *mark = d->pid ? strstr(text, "%d") : NULL;
	int n;

	if (mark)
		n = snprintf(out, (size_t)d->max_length + 1, "%.*s%ld%s", (int)(mark - text), text,
			     (long)vmh_sys(SYS_getpid), mark + 2);
	else
		n = snprintf(out, (size_t)d->max_length + 1, "%s", text);
	return n > d->max_length ? -E2BIG : 0;
}

/* False: of a file, and left out. */
static bool set_string(unsigned param, const char *text, enum vmh_param_origin origin)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	char fits[sizeof(vmh_params.log_file)];

	if (!expand(d, text, fits)) {
		strcpy(string_of(d), fits);
	} else if (reading) {
		warn("%s = %s is longer than %u bytes, ignored", d->name, shorten(text).text, d->max_length);
		return false;
	} else {
		warn("%s = %s is longer than %u bytes, using the default [%s]", d->name, shorten(text).text, d->max_length, d->string);
		expand(d, d->string, string_of(d));
		origin = VMH_FROM_DEFAULT;
	}
	origins[param] = origin;
	return true;
}

static bool set_number(unsigned param, int64_t value, enum vmh_param_origin origin)
{
	*number_of(&vmh_param_defs[param]) = value;
	origins[param] = origin;
	return true;
}

/* A value as a user writes it: an enum's first word. */
static struct shown show(const struct vmh_param_def *d, int64_t value)
{
	const struct vmh_param_word *w;
	struct shown s;

	for (w = d->words; d->type == VMH_PARAM_ENUM && w->word; w++)
		if (w->value == value)
			return shorten(w->word);
	snprintf(s.text, sizeof(s.text), "%lld", (long long)value);
	return s;
}

/* The peer's text with {value} filled in, else one of ours. `name` is the name that the user wrote. */
static void warn_used(const struct vmh_param_def *d, const char *text, const char *name, const char *value, const char *used)
{
	const char *mark = text ? strstr(text, "{value}") : NULL;

	if (mark)
		warn("%.*s%s%s", (int)(mark - text), text, shorten(value).text, mark + strlen("{value}"));
	else if (text)
		warn("%s", text);
	else
		warn("%s = %s is not %s, using [%s]", name, shorten(value).text, d->expected, used);
}

static void warn_value(const struct vmh_param_def *d, const char *name, const char *value, int64_t used)
{
	warn_used(d, d->warns_above && used != d->max ? NULL : d->warning, name, value, show(d, used).text);
}

/* A decimal number with nothing but blanks around it. */
static bool parse_number(const char *text, int64_t *out)
{
	char *end;
	int saved = errno;
	bool overflow;

	errno = 0;
	*out = strtoll(text, &end, 10);
	overflow = errno != 0;
	errno = saved;
	if (end == text)
		return false;
	end += strspn(end, " \t");
	return !*end && !overflow;
}

static bool parse_word(const struct vmh_param_def *d, const char *text, int64_t *out)
{
	const struct vmh_param_word *w;

	for (w = d->words; w->word; w++) {
		if (!strcasecmp(w->word, text)) {
			*out = w->value;
			return true;
		}
	}
	return false;
}

/* The environment's becomes the default, as in the peer. A line of a file is left out: what lower layers and earlier
 * lines say stays, which nobody took back. The peer's texts, which say "default", would be wrong then; and of garbage,
 * which it does not notice. */
static bool refuse(unsigned param, const char *name, const char *text, bool peer_says)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];

	if (reading) {
		warn("%s = %s is not %s, ignored", name, shorten(text).text, d->expected);
		return false;
	}
	if (peer_says)
		warn_value(d, name, text, d->number);
	else
		warn("%s = %s is not %s, using the default [%s]", name, shorten(text).text, d->expected,
		     show(d, d->number).text);
	in_vain[param] = true;
	return set_number(param, d->number, VMH_FROM_DEFAULT);
}

/* A text that need say something, and does not: as a number that is out of range. */
static bool take_text(unsigned param, const char *name, const char *text, enum vmh_param_origin origin)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];

	if (!d->instead || strlen(text) > d->max_length || vmh_cpus_says(text))
		return set_string(param, text, origin);
	if (reading) {
		warn("%s = %s is not %s, ignored", name, shorten(text).text, d->expected);
		return false;
	}
	warn_used(d, d->warning, name, text, d->instead);
	return set_string(param, d->instead, origin);
}

static bool is_blank(const char *text)
{
	return !text[strspn(text, " \t")];
}

/* A value as a user writes it, in the environment or in a file. False: nothing was set. */
static bool take(unsigned param, const char *name, const char *text, enum vmh_param_origin origin)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	int64_t value, used;

	if (d->type == VMH_PARAM_STRING)
		return take_text(param, name, text, origin);
	if (is_blank(text)) /* in the environment it says nothing */
		return reading ? refuse(param, name, "", true) : false;
	text += strspn(text, " \t");
	if (parse_word(d, text, &value))
		return set_number(param, value, origin);
	if (!parse_number(text, &value))
		return refuse(param, name, text, false);
	if (d->type == VMH_PARAM_ENUM)
		return refuse(param, name, text, true);
	if (d->type == VMH_PARAM_BOOL) {
		if (value != 0 && value != 1)
			warn_value(d, name, text, 1);
		return set_number(param, value != 0, origin);
	}
	if ((value >= d->min && value <= d->max) || (d->has_also && value == d->also))
		return set_number(param, d->has_zero && !value ? d->zero : value, origin);
	if (!d->clamps)
		return refuse(param, name, text, true);
	used = value < d->min ? d->min : d->max;
	warn_value(d, name, text, used);
	return set_number(param, used, origin);
}

static bool apply_builtin(const char *name)
{
	unsigned i, k;

	for (i = 0; i < COUNT(vmh_param_profiles); i++) {
		const struct vmh_param_profile *p = &vmh_param_profiles[i];

		if (strcasecmp(p->name, name) && (!p->alias || strcmp(p->alias, name)))
			continue;
		for (k = 0; k < p->nvalues; k++) {
			if (p->values[k].string)
				set_string(p->values[k].param, p->values[k].string, VMH_FROM_BUILTIN);
			else
				set_number(p->values[k].param, p->values[k].number, VMH_FROM_BUILTIN);
		}
		set_string(VMH_PARAM_SPEC, i ? p->name : "", VMH_FROM_ENV);
		snprintf(profile_title, sizeof(profile_title), "%s", i ? p->title : "");
		return true;
	}
	return false;
}

/* The file says which profile it, or the program, starts from. */
static void use_spec(const struct vmh_paramfile *f, const char *name, const char *value)
{
	if (!strcmp(name, "VMA_SPEC"))
		snprintf(f->arg, sizeof(vmh_params.spec), "%s", value);
}

/* The manual's line, of a name that was in use once. */
static void take_alias(unsigned param, const char *name, const char *text, enum vmh_param_origin origin)
{
	if (!take(param, name, text, origin))
		return;
	warn("The parameter %s is no longer in use. Parameter %s was set to %lld instead", name, vmh_param_defs[param].name,
	     (long long)vmh_param_number(param));
}

/* They say which files are read: in one of those it is too late. */
static bool is_of_environment(unsigned param)
{
	return param == VMH_PARAM_HYBRID_POLICY || param == VMH_PARAM_HYBRID_PROFILE_DIR;
}

static void use_value(const struct vmh_paramfile *f, const char *name, const char *value)
{
	int param = vmh_param_find(name, strlen(name));

	reading = f;
	if (param < 0)
		warn("%.64s is not a parameter, ignored", name);
	else if (is_of_environment((unsigned)param))
		warn("%s says where files are, so it is for the environment, ignored", name);
	else if (param != VMH_PARAM_SPEC && strcmp(name, vmh_param_defs[param].name))
		take_alias((unsigned)param, name, value, *(const enum vmh_param_origin *)f->arg);
	else if (param != VMH_PARAM_SPEC)
		take((unsigned)param, name, value, *(const enum vmh_param_origin *)f->arg);
	reading = NULL;
}

static int apply_file(const char *path, enum vmh_param_origin origin)
{
	struct vmh_paramfile f = { .path = path, .program = program_invocation_short_name, .use = use_value,
				   .arg = &origin };

	return vmh_paramfile_read(&f);
}

static void spec_of_file(const char *path, char *spec)
{
	struct vmh_paramfile f = { .path = path, .program = program_invocation_short_name, .use = use_spec,
				   .quiet = true, .arg = spec };

	spec[0] = 0;
	vmh_paramfile_read(&f);
}

/* Why a file is not read, in the words of `config show`. */
static const char *unread(int err)
{
	switch (err) {
	case -EFBIG: return "longer than " DIGITS(VMH_PARAMFILE_MAX) " bytes";
	case -EILSEQ: return "a zero byte";
	case -EINVAL: return "is not a regular file";
	}
	return strerrorname_np(-err);
}

static void apply_profile(const char *name)
{
	char path[512], base[sizeof(vmh_params.spec)];
	const char *slash = strrchr(name, '/');
	int err;

	if (apply_builtin(name))
		return;
	if (slash)
		snprintf(path, sizeof(path), "%s", name);
	else
		snprintf(path, sizeof(path), "%s/%s.conf", vmh_params.hybrid_profile_dir, name);
	spec_of_file(path, base);
	if (base[0] && !apply_builtin(base))
		warn("%.200s: VMA_SPEC = %.64s is no built-in profile, starting from none", path, base);
	err = apply_file(path, VMH_FROM_PROFILE);
	if (!err) {
		set_string(VMH_PARAM_SPEC, name, VMH_FROM_ENV);
		snprintf(profile_title, sizeof(profile_title), "%s", slash ? slash + 1 : name);
		return;
	}
	string_of(&vmh_param_defs[VMH_PARAM_SPEC])[0] = 0;
	if (slash || err != -ENOENT)
		warn("VMA_SPEC = %.200s can't be read (%s), using none", path, unread(err));
	else
		warn("VMA_SPEC = %.64s is no profile, using none. `vmahybrid config profiles` lists them", name);
}

static void apply_policy(bool spec_is_set)
{
	char spec[sizeof(vmh_params.spec)] = "";
	int err;

	if (!vmh_params.hybrid_policy[0])
		return;
	if (!spec_is_set) {
		spec_of_file(vmh_params.hybrid_policy, spec);
		if (spec[0])
			apply_profile(spec);
	}
	err = apply_file(vmh_params.hybrid_policy, VMH_FROM_POLICY);
	if (err && (err != -ENOENT || origins[VMH_PARAM_HYBRID_POLICY] == VMH_FROM_ENV))
		warn("VMA_HYBRID_POLICY = %s can't be read (%s)", vmh_params.hybrid_policy, unread(err));
}

/* `newer`: what the environment has by the present name, or NULL. That wins, and the warning says so. */
static void apply_aliases(unsigned param, const char *newer)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	const char *const *alias;
	const char *text;

	for (alias = d->aliases; *alias; alias++) {
		text = getenv(*alias);
		if (text && newer && !is_blank(newer))
			warn("The parameter %s is no longer in use. Parameter %s is set as well, and wins", *alias, d->name);
		else if (text)
			take_alias(param, *alias, text, VMH_FROM_ENV);
	}
}

static int64_t bound_value(const struct vmh_param_bound *b)
{
	return *number_of(&vmh_param_defs[b->other]) * b->times / b->divisor;
}

bool vmh_params_is_set(unsigned param)
{
	return origins[param] == VMH_FROM_ENV || origins[param] == VMH_FROM_POLICY || origins[param] == VMH_FROM_PROFILE;
}

/* What was warned about is what is used, too. */
static bool is_named(unsigned param)
{
	return is_set(param) || in_vain[param];
}

/* Whatever follows from another value is of nobody's choice. */
static bool is_chosen(unsigned param)
{
	return is_set(param) || origins[param] == VMH_FROM_BUILTIN;
}

/* `least`: "at least", "at most" or "only" */
static void warn_pair(unsigned param, unsigned other, const char *least, int64_t used)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	char acts[48] = "";

	if (d->has_cap && used > d->cap)
		snprintf(acts, sizeof(acts), ", which acts as %lld", (long long)d->cap);
	warn("%s = %lld does not go with %s = %lld (%s %lld), using [%lld]%s", d->name,
	     (long long)vmh_param_number(param), vmh_param_defs[other].name, (long long)vmh_param_number(other), least,
	     (long long)used, (long long)used, acts);
}

/* True: said what acts. */
static bool apply_bounds(unsigned param)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	bool says = is_named(param) || d->bound_warns;
	int64_t asked, value;

	if (d->type == VMH_PARAM_STRING)
		return false;
	asked = value = *number_of(d);
	if (d->floor.other >= 0 && value < bound_value(&d->floor))
		value = bound_value(&d->floor);
	if (d->ceiling.other >= 0 && value > bound_value(&d->ceiling))
		value = bound_value(&d->ceiling);
	if (value == asked)
		return false;
	if (says)
		warn_pair(param, (unsigned)(value > asked ? d->floor.other : d->ceiling.other),
			  value > asked ? "at least" : "at most", value);
	*number_of(d) = value;
	return says;
}

/* The value stays what was asked for, as in the peer. */
static void warn_cap(unsigned param)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];

	if (d->has_cap && is_set(param) && *number_of(d) > d->cap)
		warn("%s = %lld acts as %lld: more makes no difference", d->name, (long long)*number_of(d),
		     (long long)d->cap);
}

/* What is so already stays where it was said. */
static void derive(unsigned param, int64_t value)
{
	if (origins[param] == VMH_FROM_DEFAULT || vmh_param_number(param) != value)
		set_number(param, value, VMH_FROM_DERIVED);
}

/* One switch implies the value of another parameter, unless that one was set as explicitly. */
static void imply(unsigned param, int64_t value, unsigned by)
{
	if (origins[param] < origins[by] && !is_named(param))
		derive(param, value);
}

/* One value leaves no other for another parameter, whoever set it. */
static void compel(unsigned param, int64_t value, unsigned by)
{
	if (is_named(param) && vmh_param_number(param) != value)
		warn_pair(param, by, "only", value);
	derive(param, value);
}

/* The kernel's least MSS is ours: TCP's packets stay above a smaller VMA_MTU. */
static void warn_small_mtu(void)
{
	long long least = vmh_param_defs[VMH_PARAM_MSS].min, mtu = vmh_params.mtu;

	if (!mtu || mtu >= least + 60 || !is_set(VMH_PARAM_MTU))
		return;
	if (mtu < least + 40)
		warn("VMA_MTU = %lld acts as %lld for TCP (as %lld over IPv6): a segment has room for %lld bytes at least",
		     mtu, least + 40, least + 60, least);
	else
		warn("VMA_MTU = %lld acts as %lld for TCP over IPv6: a segment has room for %lld bytes at least", mtu,
		     least + 60, least);
}

/* Where VMA_MTU leaves no room for such segments: 40 bytes are headers, 60 over IPv6. */
static void bound_mss(void)
{
	long long least = vmh_param_defs[VMH_PARAM_MSS].min, mss = vmh_params.mss, mtu = vmh_params.mtu;
	long long v4 = mtu - 40 > least ? mtu - 40 : least, v6 = mtu - 60 > least ? mtu - 60 : least;

	if (!mtu || mss <= v6)
		return;
	if (mss <= v4) {
		warn("VMA_MSS = %lld does not go with VMA_MTU = %lld over IPv6 (%lld to %lld), using [%lld] there", mss, mtu,
		     least, v6, v6);
		return;
	}
	warn("VMA_MSS = %lld does not go with VMA_MTU = %lld (%lld to %lld, over IPv6 to %lld), using [%lld]", mss, mtu,
	     least, v4, v6, v4);
	vmh_params.mss = v4;
}

static void apply_implied(void)
{
	if (vmh_params.select_poll_os_force) {
		imply(VMH_PARAM_SELECT_POLL_OS_RATIO, 1, VMH_PARAM_SELECT_POLL_OS_FORCE);
		imply(VMH_PARAM_SELECT_SKIP_OS, 1, VMH_PARAM_SELECT_POLL_OS_FORCE);
	}
	if (vmh_params.tracelevel >= VMH_LOG_DEBUG && origins[VMH_PARAM_LOG_DETAILS] == VMH_FROM_DEFAULT &&
	    !is_named(VMH_PARAM_LOG_DETAILS))
		set_number(VMH_PARAM_LOG_DETAILS, 2, VMH_FROM_DERIVED);
	if (vmh_params.rx_poll < 0)
		compel(VMH_PARAM_CQ_MODERATION_ENABLE, 0, VMH_PARAM_RX_POLL);
	else if (vmh_params.select_poll < 0)
		compel(VMH_PARAM_CQ_MODERATION_ENABLE, 0, VMH_PARAM_SELECT_POLL);
	if (!vmh_params.cq_moderation_enable)
		compel(VMH_PARAM_CQ_AIM_INTERVAL_MSEC, 0, VMH_PARAM_CQ_MODERATION_ENABLE);
	if (vmh_params.socketxtreme)
		warn("VMA_SOCKETXTREME: this version has no SocketXtreme API, programs use their sockets");
	if (!vmh_params.progress_engine_wce_max)
		compel(VMH_PARAM_PROGRESS_ENGINE_INTERVAL, 0, VMH_PARAM_PROGRESS_ENGINE_WCE_MAX);
}

/* A misspelt parameter must not be ignored silently. */
static void warn_unknown(void)
{
	char **entry;
	unsigned k;

	for (entry = environ; entry && *entry; entry++) {
		size_t n = strcspn(*entry, "=");
		bool known = strncmp(*entry, "VMA_", 4) != 0 || vmh_param_find(*entry, n) >= 0;

		for (k = 0; !known && k < COUNT(vmh_param_obsoletes); k++)
			known = strlen(vmh_param_obsoletes[k].name) == n &&
				!memcmp(*entry, vmh_param_obsoletes[k].name, n);
		if (!known)
			warn("%.*s is not a parameter, ignored. docs/parameters.md lists them", (int)(n < 64 ? n : 64), *entry);
	}
}

static void warn_obsolete(void)
{
	const char *const *line;
	unsigned i;

	for (i = 0; i < COUNT(vmh_param_obsoletes); i++)
		if (getenv(vmh_param_obsoletes[i].name))
			for (line = vmh_param_obsoletes[i].lines; *line; line++)
				warn("%s", *line);
}

static void from_environment(unsigned param)
{
	const char *text = getenv(vmh_param_defs[param].name);

	apply_aliases(param, text);
	if (text)
		take(param, vmh_param_defs[param].name, text, VMH_FROM_ENV);
}

bool vmh_param_asked(unsigned param)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	const char *text = getenv(d->name);
	int64_t value;

	return text && (parse_word(d, text, &value) || parse_number(text, &value)) ? value != 0 : d->number != 0;
}

void vmh_params_init(void)
{
	const char *text;
	unsigned i;

	warnings_len = warnings_lost = 0;
	profile_title[0] = 0;
	memset(origins, VMH_FROM_DEFAULT, sizeof(origins));
	for (i = 0; i < VMH_PARAMS_COUNT; i++) {
		const struct vmh_param_def *d = &vmh_param_defs[i];

		if (d->type == VMH_PARAM_STRING)
			expand(d, d->string, string_of(d));
		else
			*number_of(d) = d->number;
	}
	from_environment(VMH_PARAM_HYBRID_POLICY);
	from_environment(VMH_PARAM_HYBRID_PROFILE_DIR);
	text = getenv("VMA_SPEC");
	if (text && *text)
		apply_profile(text);
	apply_policy(text && *text);
	for (i = 0; i < VMH_PARAMS_COUNT; i++)
		if (i != VMH_PARAM_SPEC && !is_of_environment(i))
			from_environment(i);
	apply_implied();
	for (i = 0; i < VMH_PARAMS_COUNT; i++)
		if (!apply_bounds(i))
			warn_cap(i);
	bound_mss();
	warn_small_mtu();
	warn_obsolete();
	warn_unknown();
}

void vmh_params_report(void)
{
	const char *text;

	for (text = warnings; text < warnings + warnings_len; text += strlen(text) + 1)
		vmh_warn("%s", text);
	if (warnings_lost)
		vmh_warn("%u more warnings about parameters", warnings_lost);
	warnings_len = warnings_lost = 0;
	for (unsigned i = 0; i < VMH_PARAMS_COUNT; i++)
		if (is_chosen(i) && !vmh_param_defs[i].backends)
			vmh_log(VMH_LOG_DETAILS, "%s has no effect", vmh_param_defs[i].name);
}

enum vmh_param_origin vmh_params_origin(unsigned param)
{
	return param < VMH_PARAMS_COUNT ? (enum vmh_param_origin)origins[param] : VMH_FROM_DEFAULT;
}

const struct vmh_param_def *vmh_param_def(unsigned param)
{
	return &vmh_param_defs[param];
}

int vmh_param_find(const char *name, size_t len)
{
	for (int i = 0; i < VMH_PARAMS_COUNT; i++) {
		const char *const *alias = vmh_param_defs[i].aliases;

		if (strlen(vmh_param_defs[i].name) == len && !memcmp(name, vmh_param_defs[i].name, len))
			return i;
		for (; *alias; alias++)
			if (strlen(*alias) == len && !memcmp(name, *alias, len))
				return i;
	}
	return -1;
}

int64_t vmh_param_number(unsigned param)
{
	return *number_of(&vmh_param_defs[param]);
}

const char *vmh_param_string(unsigned param)
{
	return string_of(&vmh_param_defs[param]);
}

const char *vmh_params_profile(void)
{
	return profile_title[0] ? profile_title : NULL;
}

void vmh_params_no_effect(unsigned backend, const char *name)
{
	static _Atomic unsigned said;
	unsigned i;

	if (atomic_fetch_or(&said, backend) & backend)
		return;
	for (i = 0; i < VMH_PARAMS_COUNT; i++)
		if (is_chosen(i) && vmh_param_defs[i].backends && !(vmh_param_defs[i].backends & backend))
			vmh_log(VMH_LOG_DETAILS, "%s has no effect on %s", vmh_param_defs[i].name, name);
}

void vmh_params_used(unsigned param, const char *where, int64_t least, int64_t most, int64_t used)
{
	static _Atomic uint8_t said[VMH_PARAMS_COUNT];
	int64_t asked = vmh_param_number(param);
	int level = is_set(param) ? VMH_LOG_WARNING : VMH_LOG_DETAILS; /* that of a built-in profile adapts itself */

	if (used == asked || !is_chosen(param) || atomic_exchange(&said[param], 1))
		return;
	if (least >= most) /* of the others' making: there is no choice */
		vmh_log(level, "%s = %lld is not what %s can have, using [%lld]", vmh_param_defs[param].name,
			(long long)asked, where, (long long)used);
	else
		vmh_log(level, "%s = %lld is not a number from %lld to %lld, which is what %s can have, using [%lld]",
			vmh_param_defs[param].name, (long long)asked, (long long)least, (long long)most, where,
			(long long)used);
}

int vmh_params_expand_again(unsigned param)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	const char *text = getenv(d->name);
	char now[sizeof(vmh_params.log_file)];

	if (origins[param] != VMH_FROM_ENV || !text || expand(d, text, now) || !strcmp(now, string_of(d)))
		return 0;
	strcpy(string_of(d), now);
	return 1;
}
