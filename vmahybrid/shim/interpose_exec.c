/* exec: the new image finds plain kernel sockets, with every datagram that has not been read.
 *
 * Only for sockets without FD_CLOEXEC, and not in the child of a vfork, which runs in its parent's memory:
 * there the parent goes on with the socket. */
#include "vmh_exec.h"
#include "vmh_main.h"
#include "vmh_real.h"
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>

extern char **environ;

/* an exec that fails changes nothing: the worker brings the sockets back */
#define REAL(name, ret, params) \
	static ret(*real) params; \
	do { \
		int saved_ = errno; \
		if (!real) \
			vmh_real_find(&real, name); \
		vmh_before_exec(); \
		errno = saved_; \
	} while (0)

#define EXIT(name) \
	VMH_EXPORT void name(int status) \
	{ \
		static void (*exits)(int); \
		if (!exits) \
			vmh_real_find(&exits, #name); \
		vmh_before_exit(); \
		exits(status); \
		__builtin_unreachable(); \
	}

EXIT(_exit)
EXIT(_Exit)

VMH_EXPORT int execve(const char *path, char *const argv[], char *const envp[])
{
	REAL("execve", int, (const char *, char *const[], char *const[]));
	VMH_EXEC_ENVIRONMENT(envp, vmh_exec_bare(AT_FDCWD, path, envp));
	return real(path, argv, envp);
}

VMH_EXPORT int execv(const char *path, char *const argv[])
{
	return execve(path, argv, environ);
}

VMH_EXPORT int execvpe(const char *file, char *const argv[], char *const envp[])
{
	REAL("execvpe", int, (const char *, char *const[], char *const[]));
	VMH_EXEC_ENVIRONMENT(envp, vmh_exec_found_bare(file, envp));
	return real(file, argv, envp);
}

VMH_EXPORT int execvp(const char *file, char *const argv[])
{
	return execvpe(file, argv, environ);
}

VMH_EXPORT int fexecve(int fd, char *const argv[], char *const envp[])
{
	REAL("fexecve", int, (int, char *const[], char *const[]));
	VMH_EXEC_ENVIRONMENT(envp, vmh_exec_open_bare(fd, envp));
	return real(fd, argv, envp);
}

VMH_EXPORT int execveat(int dir, const char *path, char *const argv[], char *const envp[], int flags)
{
	bool empty = flags & AT_EMPTY_PATH && !vmh_bad_ptr(path) && !*path;

	REAL("execveat", int, (int, const char *, char *const[], char *const[], int));
	VMH_EXEC_ENVIRONMENT(envp, empty ? vmh_exec_open_bare(dir, envp) : vmh_exec_bare(dir, path, envp));
	return real(dir, path, argv, envp, flags);
}

/* The list forms: count, copy to the stack, call the vector form. */
#define COUNT_LIST(first, ap) \
	size_t n = 1; \
	va_list count_; \
	va_copy(count_, ap); \
	while (va_arg(count_, char *)) \
		n++; \
	va_end(count_); \
	char *argv[n + 1]; \
	argv[0] = (char *)(first); \
	for (size_t i = 1; i <= n; i++) \
	argv[i] = va_arg(ap, char *)

VMH_EXPORT int execl(const char *path, const char *arg, ...)
{
	va_list ap;

	va_start(ap, arg);
	COUNT_LIST(arg, ap);
	va_end(ap);
	return execve(path, argv, environ);
}

VMH_EXPORT int execlp(const char *file, const char *arg, ...)
{
	va_list ap;

	va_start(ap, arg);
	COUNT_LIST(arg, ap);
	va_end(ap);
	return execvp(file, argv);
}

VMH_EXPORT int execle(const char *path, const char *arg, ...)
{
	va_list ap;

	va_start(ap, arg);
	COUNT_LIST(arg, ap);
	char *const *envp = va_arg(ap, char *const *);
	va_end(ap);
	return execve(path, argv, envp);
}
