/* The VMA_* parameters as the shim sees them. The catalogue is vmahybrid/config/parameters.toml; the
 * build generates params_gen.h from it: a struct field per parameter (lower-case name without VMA_)
 * and the table that parses the environment. Precedence: defaults < profile (VMA_SPEC) < environment. */
#ifndef VMH_PARAMS_H
#define VMH_PARAMS_H
#include "vmh_base.h"
#include "params_gen.h" /* struct vmh_params: int64_t for numbers and booleans, char[N] for strings */

enum vmh_param_origin { VMH_FROM_DEFAULT, VMH_FROM_PROFILE, VMH_FROM_DERIVED, VMH_FROM_ENV };

extern struct vmh_params vmh_params;
/* Reads the environment; never fails: a bad value is warned about by name and the default used. The
 * warnings are kept and emitted by vmh_params_report (the log is opened in between). */
void vmh_params_init(void);
void vmh_params_report(void);
/* Where a value came from; the parameter as VMH_PARAM_RX_WRE of params_gen.h. */
enum vmh_param_origin vmh_params_origin(unsigned param);
/* Again the environment's VMA_LOG_FILE etc., with the present pid for %d: for the child of a fork.
 * 1 if the text changed. */
int vmh_params_expand_again(unsigned param);
#endif
