/* posix_spawn, system, popen: libc makes the child by a clone of its own, in which no exec of ours is called. So what the
 * new program gets goes home before: TCP connections without FD_CLOEXEC, and those that a file action names. */
#include "vmh_exec.h"
#include "vmh_main.h"
#include "vmh_real.h"
#include <fcntl.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>

#define REAL(name, ret, params, actions) \
	static ret(*real) params; \
	do { \
		int saved_ = errno; \
		if (!real) \
			vmh_real_find(&real, name); \
		vmh_before_spawn(actions); \
		errno = saved_; \
	} while (0)

VMH_EXPORT int posix_spawn(pid_t *pid, const char *path, const posix_spawn_file_actions_t *actions,
			   const posix_spawnattr_t *attr, char *const argv[], char *const envp[])
{
	REAL("posix_spawn", int, (pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
				  char *const[], char *const[]), actions != NULL);
	VMH_EXEC_ENVIRONMENT(envp, vmh_exec_bare(AT_FDCWD, path, envp));
	return real(pid, path, actions, attr, argv, envp);
}

VMH_EXPORT int posix_spawnp(pid_t *pid, const char *file, const posix_spawn_file_actions_t *actions,
			    const posix_spawnattr_t *attr, char *const argv[], char *const envp[])
{
	REAL("posix_spawnp", int, (pid_t *, const char *, const posix_spawn_file_actions_t *, const posix_spawnattr_t *,
				   char *const[], char *const[]), actions != NULL);
	VMH_EXEC_ENVIRONMENT(envp, vmh_exec_found_bare(file, envp));
	return real(pid, file, actions, attr, argv, envp);
}

/* What is in the file actions can't be read there, so it is noted when it is put in. */
VMH_EXPORT int posix_spawn_file_actions_adddup2(posix_spawn_file_actions_t *actions, int fd, int newfd)
{
	static int (*real)(posix_spawn_file_actions_t *, int, int);

	if (!real)
		vmh_real_find(&real, "posix_spawn_file_actions_adddup2");
	vmh_spawn_names(fd);
	return real(actions, fd, newfd);
}

VMH_EXPORT int system(const char *command)
{
	REAL("system", int, (const char *), false);
	return real(command);
}

VMH_EXPORT FILE *popen(const char *command, const char *mode)
{
	REAL("popen", FILE *, (const char *, const char *), false);
	return real(command, mode);
}
