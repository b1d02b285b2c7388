/* epoll_ctl on TCP connections that the kernel serves: programs take one in and out of their set with each message, so
 * such a call is the kernel's alone, and the item is behind. Only what the set must know at once goes by the item:
 * other data, edges, ONESHOT, and another set than the one that was last told of it.
 *
 * The kernel knows all of it: before the connection goes to a ring, /proc/self/fdinfo says what it is registered for.
 * No call is under way then (tcps_plain.c). */
#include "vmh_iomux_int.h"
#include "vmh_tcps.h"
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>

#define TEXT_BYTES 65536
#define LINE_BYTES 256
#define NOT_PLAIN ((uint32_t)(EPOLLET | EPOLLONESHOT | EPOLLEXCLUSIVE))

/* by descriptor */
struct plain {
	int set;       /* + 1: whose calls are plain; 0: none */
	uint8_t behind;
	uint64_t data;
};
VMH_EACH_CALL static struct plain *_Atomic plain;

static struct plain *plain_of(int fd)
{
	struct plain *p = atomic_load_explicit(&plain, memory_order_acquire);

	return p && (unsigned)fd < vmh_plain_size ? &p[fd] : NULL;
}

bool vmh_epoll_plain(int epfd, int op, int fd, const struct epoll_event *ev)
{
	struct plain *p = plain_of(fd);

	if (!p || VMH_GET(p->set) != epfd + 1)
		return false;
	if (op != EPOLL_CTL_DEL && (ev->data.u64 != VMH_GET(p->data) || (ev->events & NOT_PLAIN)))
		return false;
	VMH_SET(p->behind, 1);
	return true;
}

/* The first one makes the table; who comes second takes that. */
static struct plain *table(void)
{
	struct plain *none = NULL, *made = atomic_load(&plain);

	if (made || !vmh_plain_size)
		return made;
	made = vmh_scratch_new(vmh_plain_size * sizeof(*made));
	if (made && !atomic_compare_exchange_strong(&plain, &none, made)) {
		vmh_scratch_free(made, vmh_plain_size * sizeof(*made));
		made = none;
	}
	return made;
}

void vmh_ep_open(const struct vmh_epitem *it, int epfd)
{
	const struct vmh_ep *e = it->set;
	struct plain *p;

	if (atomic_load(&it->member->class_) != VMH_CLASS_TCP || !table() || !(p = plain_of(it->fd)))
		return;
	VMH_SET(p->set, 0);
	if (vmh_tcps_state(vmh_tcps_of(it->member)) != VMH_TCPS_KERNEL || (it->events & NOT_PLAIN) || atomic_load(&e->nested) ||
	    epfd != e->obj.fd || atomic_load(&e->obj.nfds) != 1)
		return;
	VMH_SET(p->data, it->data);
	VMH_SET(p->set, epfd + 1);
}

void vmh_ep_shut(int fd)
{
	struct plain *p = plain_of(fd);

	if (p && VMH_GET(p->set))
		VMH_SET(p->set, 0);
}

void vmh_ep_shut_all(struct vmh_ep *e)
{
	for (struct vmh_epitem *it = e->items; it; it = it->set_next)
		vmh_ep_shut(it->fd);
}

void vmh_ep_plain_fork_child(void)
{
	struct plain *p = atomic_load(&plain);

	if (p)
		madvise(p, vmh_plain_size * sizeof(*p), MADV_DONTNEED); /* all 0 again */
}

/* ---- what the kernel says ---- */

struct answer {
	int fd;
	ino_t ino;
	bool found;
	uint32_t events;
};

/* "tfd: FD events: HEX data: HEX  pos:N ino:HEX sdev:HEX" */
static void read_line(struct answer *a, const char *line)
{
	unsigned events;
	unsigned long ino;

	if (strncmp(line, "tfd:", 4) || atoi(line + 4) != a->fd) /* of a thousand lines nearly all */
		return;
	if (sscanf(line, "tfd: %*d events: %x data: %*x pos:%*d ino:%lx", &events, &ino) != 2)
		return;
	if ((ino_t)ino != a->ino) /* the number may have been another file's, which lives on by a dup */
		return;
	a->found = true;
	a->events = events;
}

static bool read_lines(struct answer *a, int file, char *text)
{
	size_t have = 0;
	long got;

	while ((got = vmh_sys(SYS_read, file, text + have, TEXT_BYTES - 1 - have)) > 0) {
		char *line = text, *end;

		have += (size_t)got;
		text[have] = 0;
		while ((end = strchr(line, '\n'))) {
			*end = 0;
			read_line(a, line);
			line = end + 1;
		}
		have -= (size_t)(line - text);
		if (have >= LINE_BYTES)
			return false;
		memmove(text, line, have);
	}
	return got == 0;
}

/* fd: that the member has now; it may have been registered by another. false: it does not say. */
static bool ask_kernel(struct answer *a, int epfd, int fd)
{
	char path[64], *text;
	struct stat st;
	bool good;
	long file;

	if (vmh_sys(SYS_fstat, fd, &st))
		return false;
	a->ino = st.st_ino;
	a->found = false;
	snprintf(path, sizeof(path), "/proc/thread-self/fdinfo/%d", epfd);
	file = vmh_sys(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
	if (file < 0)
		return false;
	text = vmh_scratch_new(TEXT_BYTES);
	good = text && read_lines(a, (int)file, text);
	if (text)
		vmh_scratch_free(text, TEXT_BYTES);
	vmh_sys(SYS_close, file);
	return good;
}

bool vmh_ep_behind(int fd)
{
	struct plain *p = plain_of(fd);

	return p && VMH_GET(p->behind);
}

bool vmh_ep_catch_up(struct vmh_ep *e, struct vmh_obj *member, int fd)
{
	struct vmh_epitem *it = vmh_epitem_find(e, member, fd);
	struct answer a = { .fd = fd };

	if (!it || !vmh_ep_behind(fd))
		return true;
	if (!ask_kernel(&a, e->obj.fd, member->fd))
		return false;
	if (!a.found) {
		vmh_epitem_unlink(it);
		return true;
	}
	vmh_lock(&e->rdy_lock);
	it->events = a.events;
	vmh_unlock(&e->rdy_lock);
	return true;
}

void vmh_ep_caught_up(int fd)
{
	struct plain *p = plain_of(fd);

	if (p)
		VMH_SET(p->behind, 0);
}
