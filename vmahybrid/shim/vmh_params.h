/* The VMA_* parameters as the shim sees them. The catalogue is vmahybrid/config/parameters.toml; the
 * build generates params_gen.h from it: a struct field per parameter (lower-case name without VMA_)
 * and the table that parses the environment. Precedence: defaults < profile (VMA_SPEC) < policy file <
 * environment. */
#ifndef VMH_PARAMS_H
#define VMH_PARAMS_H
#include "vmh_base.h"
#include "params_gen.h" /* struct vmh_params: int64_t for numbers and booleans, char[N] for strings */

/* ascending: a later one wins over an earlier one. A built-in profile is ours, a profile that is a file its user's. */
enum vmh_param_origin {
	VMH_FROM_DEFAULT, VMH_FROM_BUILTIN, VMH_FROM_PROFILE, VMH_FROM_POLICY, VMH_FROM_DERIVED, VMH_FROM_ENV
};

extern struct vmh_params vmh_params;
/* Reads the environment; never fails: a bad value is warned about by name and the default used. The
 * warnings are kept and emitted by vmh_params_report (the log is opened in between). */
void vmh_params_init(void);
void vmh_params_report(void);
/* Where a value came from; the parameter as VMH_PARAM_RX_WRE of params_gen.h. */
enum vmh_param_origin vmh_params_origin(unsigned param);
/* A person has said it, in the environment or a file: it is never changed without a word. */
bool vmh_params_is_set(unsigned param);
/* Again the environment's VMA_LOG_FILE etc., with the present pid for %d: for the child of a fork.
 * 1 if the text changed. */
int vmh_params_expand_again(unsigned param);
const struct vmh_param_def *vmh_param_def(unsigned param);
/* The number of the parameter, or of the one that the older name sets; -1: neither. */
int vmh_param_find(const char *name, size_t len);
int64_t vmh_param_number(unsigned param); /* not of a text */
bool vmh_param_asked(unsigned param);     /* of a yes or no, before vmh_params_init(): by the environment alone */
const char *vmh_param_string(unsigned param);
/* How the banner calls the profile in use; NULL: none. */
const char *vmh_params_profile(void);
/* Once, at level details: what is set, also by a built-in profile, and has no effect on this backend (VMH_PARAM_ON_*).
 * What has none on any is said by vmh_params_report. */
void vmh_params_no_effect(unsigned backend, const char *name);
/* Once: what is set can't be had on interface `where`, which takes `least` to `most`; `used` is what there is. Nothing if
 * it was not set, or is what was asked for. */
void vmh_params_used(unsigned param, const char *where, int64_t least, int64_t most, int64_t used);
/* Kept for vmh_params_report. */
void vmh_params_warn(const char *fmt, ...) __attribute__((format(printf, 1, 2)));
/* Frames that a call takes in one look at a ring. */
static inline unsigned vmh_poll_batch(void)
{
	return (unsigned)vmh_params.cq_poll_batch_max;
}

/* paramfile.c: profiles and the policy file. Calls use() for each line "VMA_X = VALUE" that is meant for
 * the program; warns about what is no such line, and goes on. 0 or -errno: -EILSEQ for a zero byte in it, -EINVAL
 * where it is no regular file. */
#define VMH_PARAMFILE_MAX 32767 /* bytes */
struct vmh_paramfile {
	const char *path, *program;
	void (*use)(const struct vmh_paramfile *f, const char *name, const char *value);
	bool quiet;  /* a first pass: what is wrong is said in the second */
	unsigned line;
	void *arg;
};
int vmh_paramfile_read(struct vmh_paramfile *f);
#endif
