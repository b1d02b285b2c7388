/* Programs of musl: its ld.so ends one for a preload that it can't link, where glibc's says so and goes on. They start
 * without the shim, and are the kernel's. */
#include "vmh_exec.h"
#include "vmh_main.h"
#include <dlfcn.h>
#include <elf.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/stat.h>
#include <unistd.h>

#define LIBRARY "libvmahybrid.so"
#define PRELOAD "LD_PRELOAD="
#define LOADER "ld-musl"
#define SCRIPTS 5     /* interpreters that are scripts, as execve(2) follows them */
#define SEGMENTS 64   /* the loader is named by one of the first */
#define NAME_MOST 512 /* a name in PATH that is longer is not looked for */

static bool is_named(const char *path, size_t n, const char *name)
{
	const char *slash = memrchr(path, '/', n);
	size_t skip = slash ? (size_t)(slash + 1 - path) : 0, len = strlen(name);

	return n - skip >= len && !memcmp(path + skip, name, len);
}

static bool has_musl_loader(int fd, const Elf64_Ehdr *e)
{
	char loader[512];
	Elf64_Phdr p;

	for (unsigned i = 0; i < e->e_phnum && i < SEGMENTS; i++) {
		if (vmh_sys(SYS_pread64, fd, &p, sizeof(p), e->e_phoff + i * sizeof(p)) != (long)sizeof(p))
			return false;
		if (p.p_type == PT_INTERP)
			return vmh_sys(SYS_pread64, fd, loader, sizeof(loader), p.p_offset) > 0 &&
			       is_named(loader, strnlen(loader, sizeof(loader)), LOADER);
	}
	return false;
}

/* The interpreter of a script, in its head; NULL: it is none. */
static const char *interpreter(char *head)
{
	char *name = head + 2;

	if (head[0] != '#' || head[1] != '!')
		return NULL;
	name += strspn(name, " \t");
	name[strcspn(name, " \t\n")] = 0;
	return name;
}

/* 1, 0; -errno: it can't be read. What is no file is not opened: that may do something. */
static int is_musl(int dir, const char *path, int scripts)
{
	struct stat st;
	union {
		Elf64_Ehdr elf;
		char text[256];
	} head = { 0 };
	const char *next;
	int fd;
	long n = vmh_sys(SYS_newfstatat, dir, path, &st, 0);
	bool is;

	if (n < 0 || !S_ISREG(st.st_mode))
		return n < 0 ? (int)n : -EISDIR;
	fd = (int)vmh_sys(SYS_openat, dir, path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return fd;
	n = vmh_sys(SYS_pread64, fd, &head, sizeof(head) - 1, 0);
	is = n >= (long)sizeof(head.elf) && !memcmp(head.text, ELFMAG, SELFMAG) &&
	     head.text[EI_CLASS] == ELFCLASS64 && has_musl_loader(fd, &head.elf);
	vmh_sys(SYS_close, fd);
	if (n < 0)
		return (int)n;
	next = interpreter(head.text);
	return next && scripts ? is_musl(AT_FDCWD, next, scripts - 1) : is;
}

/* As execvp(3) looks for it. */
static bool found_is_musl(const char *file)
{
	const char *dirs = getenv("PATH");
	char path[NAME_MOST];

	if (strchr(file, '/'))
		return is_musl(AT_FDCWD, file, SCRIPTS) > 0;
	for (dirs = dirs ? dirs : "/bin:/usr/bin";; dirs++) {
		int len = (int)strcspn(dirs, ":");
		int n = snprintf(path, sizeof(path), "%.*s%s%s", len, dirs, len ? "/" : "", file);
		int is = n < (int)sizeof(path) ? (int)vmh_sys(SYS_faccessat, AT_FDCWD, path, X_OK) : -ENAMETOOLONG;

		if (!is && (is = is_musl(AT_FDCWD, path, SCRIPTS)) != -EISDIR)
			return is > 0;
		dirs += len;
		if (!*dirs)
			return false;
	}
}

/* The next library of a list, and its length; 0: none. */
static size_t next_library(const char **at)
{
	*at += strspn(*at, ": ");
	return strcspn(*at, ": ");
}

static const char *own; /* this library, as ld.so has found it */

void vmh_exec_init(void)
{
	Dl_info found;

	if (dladdr(vmh_exec_init, &found))
		own = found.dli_fname;
}

static bool is_shim(const char *path, size_t n)
{
	return is_named(path, n, LIBRARY) || (own && strlen(own) == n && !memcmp(path, own, n));
}

static bool has_shim(const char *list)
{
	for (size_t n; (n = next_library(&list)); list += n)
		if (is_shim(list, n))
			return true;
	return false;
}

static const char *preload(const char *entry)
{
	return strncmp(entry, PRELOAD, sizeof(PRELOAD) - 1) ? NULL : entry + sizeof(PRELOAD) - 1;
}

/* Bytes for it without the shim; 0: it has none. */
static size_t room_for(char *const envp[])
{
	size_t n = 0, text = 0;

	if (vmh_bad_ptr(envp))
		return 0;
	for (; envp[n]; n++) {
		const char *list = vmh_bad_ptr(envp[n]) ? NULL : preload(envp[n]);

		if (list && has_shim(list))
			text += sizeof(PRELOAD) + strlen(list);
	}
	return text ? (n + 1) * sizeof(*envp) + text : 0;
}

size_t vmh_exec_bare(int dir, const char *path, char *const envp[])
{
	return !vmh_filtered && is_musl(dir, path, SCRIPTS) > 0 ? room_for(envp) : 0;
}

size_t vmh_exec_found_bare(const char *file, char *const envp[])
{
	return !vmh_filtered && !vmh_bad_ptr(file) && found_is_musl(file) ? room_for(envp) : 0;
}

size_t vmh_exec_open_bare(int fd, char *const envp[])
{
	char path[32];

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	return vmh_exec_bare(AT_FDCWD, path, envp);
}

/* The others of a list. Where it ends. */
static char *write_others(char *to, const char *list)
{
	to = stpcpy(to, PRELOAD);
	for (size_t n; (n = next_library(&list)); list += n) {
		if (is_shim(list, n))
			continue;
		if (to[-1] != '=')
			*to++ = ':';
		to = mempcpy(to, list, n);
	}
	*to = 0;
	return to + 1;
}

char *const *vmh_exec_without(char *const envp[], void *room)
{
	char **out = room;
	size_t n = 0;
	char *text;

	while (envp[n])
		n++;
	text = (char *)(out + n + 1);
	for (size_t i = 0; i <= n; i++) {
		const char *list = vmh_bad_ptr(envp[i]) ? NULL : preload(envp[i]);

		out[i] = envp[i];
		if (!list || !has_shim(list))
			continue;
		out[i] = text;
		text = write_others(text, list);
	}
	return room;
}
