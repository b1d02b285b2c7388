/* Whether the program's memory can be read and written to: a NIC's driver would pin it and fail, the kernel says EFAULT,
 * and we must not fault in its stead. */
#include <fcntl.h>
#include <string.h>
#include "sv.h"

/* A file of the kernel, octet by octet. */
struct reader {
	int fd;
	long have, at;
	char buffer[4096];
};

static int next(struct reader *r)
{
	if (r->at == r->have) {
		r->at = 0;
		do
			r->have = SV_CALL(SYS_read, r->fd, r->buffer, sizeof(r->buffer));
		while (r->have == -EINTR);
	}
	if (r->have <= 0) {
		r->have = 0;
		return -1;
	}
	return (unsigned char)r->buffer[r->at++];
}

/* A hexadecimal number and the character behind it; false at the end of the file. */
static bool number(struct reader *r, uintptr_t *value)
{
	static const char digits[] = "0123456789abcdef";
	const char *found;
	int c;

	for (*value = 0; (c = next(r)) > 0 && (found = strchr(digits, c)); *value = *value << 4 | (uintptr_t)(found - digits))
		;
	return c > 0;
}

/* START-END rwxp OFFSET ... in ascending order, a line per mapping. */
static bool covered(struct reader *r, uintptr_t start, uintptr_t end, bool write)
{
	uintptr_t from, to;

	while (start < end && number(r, &from) && number(r, &to)) {
		bool readable = next(r) == 'r', writable = next(r) == 'w';

		if (from > start)
			return false;
		if (to > start) {
			if (!(write ? writable : readable))
				return false;
			start = to;
		}
		for (int c = next(r); c >= 0 && c != '\n';)
			c = next(r);
	}
	return start >= end;
}

/* Where /proc is not mounted: mincore(2) knows at least whether there is memory. */
static int mapped(uintptr_t start, uintptr_t end, uintptr_t page)
{
	unsigned char map[512];

	while (start < end) {
		size_t part = end - start < sizeof(map) * page ? end - start : sizeof(map) * page;
		long error = SV_CALL(SYS_mincore, start, part, map);

		if (error)
			return error == -ENOMEM ? EFAULT : (int)-error;
		start += part;
	}
	return 0;
}

/* Without touching it: what the program never uses is to cost no memory. */
int sv_memory_check(const void *address, size_t length, bool write)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), start = (uintptr_t)address & ~(page - 1), end;
	struct reader reader;
	bool good;

	if (__builtin_add_overflow((uintptr_t)address, length, &end))
		return EINVAL;
	if (start >= end)
		return 0;
	reader.have = reader.at = 0;
	reader.fd = (int)SV_CALL(SYS_openat, AT_FDCWD, "/proc/self/maps", O_RDONLY | O_CLOEXEC);
	if (reader.fd < 0)
		return mapped(start, end, page);
	good = covered(&reader, start, end, write);
	(void)SV_CALL(SYS_close, reader.fd);
	return good ? 0 : EFAULT;
}

/* rt_sigprocmask(2) reads a set before it refuses to do what it is not told. */
bool sv_memory_readable(const void *at, size_t length)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), address = (uintptr_t)at & ~(uintptr_t)7, end = (uintptr_t)at + length;

	for (; address < end; address = (address & ~(page - 1)) + page)
		if (SV_CALL(SYS_rt_sigprocmask, -1, address, NULL, 8) == -EFAULT)
			return false;
	return true;
}

/* For what is going to be overwritten: getcpu(2) puts four octets there, the shortest system call to do so. */
bool sv_memory_writable(void *at, size_t length)
{
	uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE), address = (uintptr_t)at, end = address + length;

	if (length < 4)
		return SV_CALL(SYS_getrandom, at, length, 1 /* GRND_NONBLOCK */) != -EFAULT;
	for (; address < end; address = (address & ~(page - 1)) + page)
		if (SV_CALL(SYS_getcpu, end - address < 4 ? end - 4 : address, NULL, NULL) == -EFAULT)
			return false;
	return true;
}
