/* exec_ways WAY PROGRAM: a child executes it by one of libc's ways, with its own environment. Without a WAY, or as the
 * interpreter of a script, it tells its LD_PRELOAD. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

extern char **environ;

static int by(const char *way, const char *path)
{
	char *argv[] = { "told", NULL }, *name = strdup(path), *dir = dirname(strdup(path));
	int fd = open(path, O_PATH), at = open(dir, O_PATH);
	char **volatile nowhere = (char **)8;
	pid_t pid = -1;

	name = basename(name);
	if (!strcmp(way, "execve"))
		return execve(path, argv, environ);
	if (!strcmp(way, "execv"))
		return execv(path, argv);
	if (!strcmp(way, "execvp"))
		return execvp(name, argv);
	if (!strcmp(way, "execvpe"))
		return execvpe(name, argv, environ);
	if (!strcmp(way, "execl"))
		return execl(path, "told", NULL);
	if (!strcmp(way, "execlp"))
		return execlp(name, "told", NULL);
	if (!strcmp(way, "execle"))
		return execle(path, "told", NULL, environ);
	if (!strcmp(way, "fexecve"))
		return fexecve(fd, argv, environ);
	if (!strcmp(way, "execveat"))
		return execveat(at, name, argv, environ, 0);
	if (!strcmp(way, "empty"))
		return execveat(fd, "", argv, environ, AT_EMPTY_PATH);
	if (!strcmp(way, "flags"))
		return execveat(fd, "", argv, environ, AT_EMPTY_PATH | AT_SYMLINK_NOFOLLOW);
	if (!strcmp(way, "nothing"))
		return (int)syscall(SYS_execveat, fd, "", argv, NULL, AT_EMPTY_PATH);
	if (!strcmp(way, "syscall"))
		return (int)syscall(SYS_execve, path, argv, environ);
	if (!strcmp(way, "bad"))
		return execve(path, argv, nowhere);
	if (!strcmp(way, "posix_spawn"))
		errno = posix_spawn(&pid, path, NULL, NULL, argv, environ);
	else if (!strcmp(way, "posix_spawnp"))
		errno = posix_spawnp(&pid, name, NULL, NULL, argv, environ);
	else
		return printf("no such way\n");
	return waitpid(pid, NULL, 0) == pid ? 0 : -1;
}

int main(int argc, char **argv)
{
	char path[4096];
	pid_t pid;

	if (argc < 3 || argv[1][0] == '/') {
		printf("%s\n", getenv("LD_PRELOAD") ?: "none");
		return 0;
	}
	snprintf(path, sizeof(path), "/nowhere::%s/not:%s", dirname(strdup(argv[2])), dirname(strdup(argv[2])));
	setenv("PATH", path, 1);
	pid = strcmp(argv[1], "vfork") ? fork() : vfork();
	if (!pid) {
		if (by(strcmp(argv[1], "vfork") ? argv[1] : "execv", argv[2]) < 0)
			printf("%s\n", strerror(errno));
		fflush(stdout);
		_exit(0);
	}
	return waitpid(pid, NULL, 0) != pid;
}
