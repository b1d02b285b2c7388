/* Files of parameter values: profiles and the operator's policy. See vmh_params.h and docs/parameters.md. */
#include "vmh_params.h"
#include "vmh_fd.h"
#include <ctype.h>
#include <fnmatch.h>

static char text[VMH_PARAMFILE_MAX + 1]; /* read once, at the start, by one thread */

static char *trim(char *s)
{
	char *end = s + strlen(s);

	while (end > s && isspace((unsigned char)end[-1]))
		*--end = 0;
	return s + strspn(s, " \t");
}

/* A # at the start of the line or behind a blank begins a comment, unless it is quoted. */
static void cut_comment(char *s)
{
	bool quoted = false;

	for (char *c = s; *c; c++) {
		if (*c == '"')
			quoted = !quoted;
		else if (*c == '#' && !quoted && (c == s || isspace((unsigned char)c[-1]))) {
			*c = 0;
			return;
		}
	}
}

static void complain(const struct vmh_paramfile *f, const char *what, const char *token)
{
	if (!f->quiet)
		vmh_params_warn("%.200s:%u: %s: \"%.64s\"", f->path, f->line, what, token);
}

/* "[program GLOB]": does what follows concern the program? */
static bool meant(const struct vmh_paramfile *f, char *line)
{
	static const char word[] = "[program";
	size_t n = strlen(line);

	if (strncmp(line, word, sizeof(word) - 1) || !isspace((unsigned char)line[sizeof(word) - 1]) || line[n - 1] != ']') {
		complain(f, "not [program GLOB], what follows is ignored", line);
		return false;
	}
	line[n - 1] = 0;
	return fnmatch(trim(line + sizeof(word)), f->program, 0) == 0;
}

static void one_value(const struct vmh_paramfile *f, char *line)
{
	char *equals = strchr(line, '='), *value;
	size_t n;

	if (!equals) {
		complain(f, "not NAME = VALUE, ignored", line);
		return;
	}
	*equals = 0;
	value = trim(equals + 1);
	n = strlen(value);
	if (n > 1 && value[0] == '"' && value[n - 1] == '"') {
		value[n - 1] = 0;
		value++;
	}
	f->use(f, trim(line), value);
}

int vmh_paramfile_read(struct vmh_paramfile *f)
{
	struct stat st = { 0 };
	int err = vmh_file_load(f->path, text, sizeof(text), &st);
	bool ours = true;
	char *line, *next;

	if (err)
		return err == -EINVAL && S_ISREG(st.st_mode) ? -EILSEQ : err;
	f->line = 0;
	for (line = text; line && *line; line = next) {
		next = strchr(line, '\n');
		if (next)
			*next++ = 0;
		f->line++;
		cut_comment(line);
		line = trim(line);
		if (*line == '[')
			ours = meant(f, line);
		else if (*line && ours)
			one_value(f, line);
	}
	return 0;
}
