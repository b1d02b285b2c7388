/* From the environment to struct vmh_params, by the table of the catalogue.
 *
 * Runs once, from the constructor, before threads of ours exist. Warnings are collected, because the
 * log that they go to is itself configured here.
 */
#define VMH_PARAMS_TABLE
#include "vmh_params.h"
#include "vmh_log.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <strings.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))
#define WARNINGS 32

extern char **environ;

struct vmh_params vmh_params;

static uint8_t origins[VMH_PARAMS_COUNT];
static char warnings[WARNINGS][256];
static unsigned nwarnings, warnings_lost;

static void __attribute__((format(printf, 1, 2))) warn(const char *fmt, ...)
{
	va_list ap;

	if (nwarnings == WARNINGS) {
		warnings_lost++;
		return;
	}
	va_start(ap, fmt);
	vsnprintf(warnings[nwarnings++], sizeof(warnings[0]), fmt, ap);
	va_end(ap);
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

static void set_string(unsigned param, const char *text, enum vmh_param_origin origin)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];

	if (expand(d, text, string_of(d))) {
		warn("%s: the text is longer than %u bytes, using the default [%s]", d->name, d->max_length, d->string);
		expand(d, d->string, string_of(d));
		return;
	}
	origins[param] = origin;
}

static void set_number(unsigned param, int64_t value, enum vmh_param_origin origin)
{
	*number_of(&vmh_param_defs[param]) = value;
	origins[param] = origin;
}

/* The peer's text with {value} filled in, else one of ours. `name` is the name that the user wrote. */
static void warn_value(const struct vmh_param_def *d, const char *name, const char *value, int64_t used)
{
	const char *mark = d->warning ? strstr(d->warning, "{value}") : NULL;

	if (mark)
		warn("%.*s%s%s", (int)(mark - d->warning), d->warning, value, mark + strlen("{value}"));
	else if (d->warning)
		warn("%s", d->warning);
	else
		warn("%s = %s is not %s, using [%lld]", name, value, d->expected, (long long)used);
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

static void from_environment(unsigned param, const char *name, const char *text)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	int64_t value;

	if (d->type == VMH_PARAM_STRING) {
		set_string(param, text, VMH_FROM_ENV);
		return;
	}
	text += strspn(text, " \t");
	if (!*text)
		return;
	if (parse_word(d, text, &value)) {
		set_number(param, value, VMH_FROM_ENV);
		return;
	}
	if (!parse_number(text, &value)) {
		/* The peer's range texts would be wrong here: it does not notice garbage. */
		warn("%s = %s is not %s, using the default [%lld]", name, text, d->expected, (long long)d->number);
		set_number(param, d->number, VMH_FROM_DEFAULT);
		return;
	}
	if (d->type == VMH_PARAM_BOOL) {
		set_number(param, value != 0, VMH_FROM_ENV);
	} else if (d->type == VMH_PARAM_ENUM) {
		warn_value(d, name, text, d->number);
		set_number(param, d->number, VMH_FROM_DEFAULT);
	} else if ((value < d->min || value > d->max) && !(d->has_also && value == d->also)) {
		int64_t used = !d->clamps ? d->number : value < d->min ? d->min : d->max;

		warn_value(d, name, text, used);
		set_number(param, used, d->clamps ? VMH_FROM_ENV : VMH_FROM_DEFAULT);
	} else {
		set_number(param, d->has_zero && !value ? d->zero : value, VMH_FROM_ENV);
	}
}

static void apply_profile(const char *name)
{
	unsigned i, k;

	for (i = 0; i < COUNT(vmh_param_profiles); i++) {
		const struct vmh_param_profile *p = &vmh_param_profiles[i];

		if (strcasecmp(p->name, name) && (!p->alias || strcmp(p->alias, name)))
			continue;
		for (k = 0; k < p->nvalues; k++) {
			if (p->values[k].string)
				set_string(p->values[k].param, p->values[k].string, VMH_FROM_PROFILE);
			else
				set_number(p->values[k].param, p->values[k].number, VMH_FROM_PROFILE);
		}
		set_string(VMH_PARAM_SPEC, i ? p->name : "", VMH_FROM_ENV);
		return;
	}
	warn("VMA_SPEC = %.64s is no profile, using none. `vmahybrid run --help` lists them", name);
	string_of(&vmh_param_defs[VMH_PARAM_SPEC])[0] = 0;
}

static void apply_aliases(unsigned param)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	const char *const *alias;
	const char *text;

	for (alias = d->aliases; *alias; alias++) {
		text = getenv(*alias);
		if (!text)
			continue;
		from_environment(param, *alias, text);
		warn("The parameter %s is no longer in use. Parameter %s was set to %lld instead", *alias, d->name,
		     (long long)*number_of(d));
	}
}

static int64_t bound_value(const struct vmh_param_bound *b)
{
	return *number_of(&vmh_param_defs[b->other]) * b->times / b->divisor;
}

static void apply_bounds(unsigned param)
{
	const struct vmh_param_def *d = &vmh_param_defs[param];
	int64_t asked, value;

	if (d->type == VMH_PARAM_STRING)
		return;
	asked = value = *number_of(d);
	if (d->floor.other >= 0 && value < bound_value(&d->floor))
		value = bound_value(&d->floor);
	if (d->ceiling.other >= 0 && value > bound_value(&d->ceiling))
		value = bound_value(&d->ceiling);
	if (value == asked)
		return;
	if (origins[param] == VMH_FROM_ENV)
		warn("%s = %lld does not go with %s = %lld, using [%lld]", d->name, (long long)asked,
		     vmh_param_defs[value > asked ? d->floor.other : d->ceiling.other].name,
		     (long long)*number_of(&vmh_param_defs[value > asked ? d->floor.other : d->ceiling.other]),
		     (long long)value);
	*number_of(d) = value;
}

/* One switch implies the value of another parameter, unless that one was set as explicitly. */
static void imply(unsigned param, int64_t value, unsigned by)
{
	if (origins[param] < origins[by])
		set_number(param, value, VMH_FROM_DERIVED);
}

static void apply_implied(void)
{
	if (vmh_params.select_poll_os_force) {
		imply(VMH_PARAM_SELECT_POLL_OS_RATIO, 1, VMH_PARAM_SELECT_POLL_OS_FORCE);
		imply(VMH_PARAM_SELECT_SKIP_OS, 1, VMH_PARAM_SELECT_POLL_OS_FORCE);
	}
	if (vmh_params.tracelevel >= VMH_LOG_DEBUG && origins[VMH_PARAM_LOG_DETAILS] != VMH_FROM_ENV)
		set_number(VMH_PARAM_LOG_DETAILS, 2, VMH_FROM_DERIVED);
	if (vmh_params.rx_poll < 0 || vmh_params.select_poll < 0)
		set_number(VMH_PARAM_CQ_MODERATION_ENABLE, 0, VMH_FROM_DERIVED);
	if (!vmh_params.cq_moderation_enable)
		set_number(VMH_PARAM_CQ_AIM_INTERVAL_MSEC, 0, VMH_FROM_DERIVED);
	if (!vmh_params.progress_engine_wce_max)
		set_number(VMH_PARAM_PROGRESS_ENGINE_INTERVAL, 0, VMH_FROM_DERIVED);
}

/* A misspelt parameter must not be ignored silently. */
static void warn_unknown(void)
{
	char **entry;
	unsigned i, k;

	for (entry = environ; entry && *entry; entry++) {
		size_t n = strcspn(*entry, "=");
		bool known = strncmp(*entry, "VMA_", 4) != 0;

		for (i = 0; !known && i < VMH_PARAMS_COUNT; i++) {
			const char *const *alias = vmh_param_defs[i].aliases;

			known = strlen(vmh_param_defs[i].name) == n && !memcmp(*entry, vmh_param_defs[i].name, n);
			for (; !known && *alias; alias++)
				known = strlen(*alias) == n && !memcmp(*entry, *alias, n);
		}
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

void vmh_params_init(void)
{
	const char *text;
	unsigned i;

	nwarnings = warnings_lost = 0;
	memset(origins, VMH_FROM_DEFAULT, sizeof(origins));
	for (i = 0; i < VMH_PARAMS_COUNT; i++) {
		const struct vmh_param_def *d = &vmh_param_defs[i];

		if (d->type == VMH_PARAM_STRING)
			expand(d, d->string, string_of(d));
		else
			*number_of(d) = d->number;
	}
	text = getenv("VMA_SPEC");
	if (text && *text)
		apply_profile(text);
	for (i = 0; i < VMH_PARAMS_COUNT; i++) {
		apply_aliases(i);
		text = i == VMH_PARAM_SPEC ? NULL : getenv(vmh_param_defs[i].name);
		if (text)
			from_environment(i, vmh_param_defs[i].name, text);
	}
	apply_implied();
	for (i = 0; i < VMH_PARAMS_COUNT; i++)
		apply_bounds(i);
	warn_obsolete();
	warn_unknown();
}

void vmh_params_report(void)
{
	unsigned i;

	for (i = 0; i < nwarnings; i++)
		vmh_warn("%s", warnings[i]);
	if (warnings_lost)
		vmh_warn("%u more warnings about parameters", warnings_lost);
	nwarnings = warnings_lost = 0;
}

enum vmh_param_origin vmh_params_origin(unsigned param)
{
	return param < VMH_PARAMS_COUNT ? (enum vmh_param_origin)origins[param] : VMH_FROM_DEFAULT;
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
