/* Programs that are executed without the shim. */
#ifndef VMH_EXEC_H
#define VMH_EXEC_H
#include "vmh_base.h"

void vmh_exec_init(void);
/* Bytes for the environment of a program of musl, whose envp has the shim; 0: this program takes its envp. A path that
 * is relative to dir, as for execveat(2), a name that is looked for in PATH, or an open file. */
size_t vmh_exec_bare(int dir, const char *path, char *const envp[]);
size_t vmh_exec_found_bare(const char *file, char *const envp[]);
size_t vmh_exec_open_bare(int fd, char *const envp[]);
/* The environment without the shim, in room for it. */
char *const *vmh_exec_without(char *const envp[], void *room);
#define VMH_EXEC_ENVIRONMENT(envp, bare) \
	size_t room_ = (bare); \
	char *space_[room_ / sizeof(char *) + 1]; \
	if (vmh_unlikely(room_)) \
		(envp) = vmh_exec_without(envp, space_)
#endif
