/* The memory file by which the states of TCP connections pass between the program and the service.
 *
 * A program at the limit of its descriptors gets no new one, and a connection must come home all the same: so there is
 * one file, made before the first connection comes to a ring, and used for one request after the other. It has its size
 * from the start, which RLIMIT_FSIZE would not let it get later. One that the service may read or write yet, since it did
 * not answer in time, is given up. */
#include "vmh_control_int.h"
#include "vmh_iomux_int.h"
#include "vmh_obj.h"
#include "tcp/tcp_state.h"
#include <fcntl.h>
#include <sys/mman.h>

#define MOST_BYTES (16ul << 20) /* what the buffers of nearly all connections have room for */

static struct vmh_file file = { .fd = -1 }; /* a program may close every number, and use it anew */
static size_t file_bytes;
static _Atomic int ready;

static int set_size(int fd, size_t bytes)
{
	struct vmh_quiet q = vmh_quiet_begin();
	long r = vmh_sys(SYS_ftruncate, fd, bytes);

	vmh_quiet_end(&q, r);
	return (int)r;
}

/* Of so many bytes; where RLIMIT_FSIZE does not let it: of `less`. *got: which. */
static int make(struct vmh_file *f, size_t bytes, size_t less, size_t *got)
{
	long fd = vmh_sys(SYS_memfd_create, "vmahybrid-tcp", MFD_CLOEXEC);
	struct stat st;
	int r;

	if (fd < 0)
		return (int)fd;
	r = set_size((int)fd, *got = bytes);
	if (r == -EFBIG && less)
		r = set_size((int)fd, *got = less);
	if (r || vmh_sys(SYS_fstat, fd, &st)) {
		vmh_sys(SYS_close, fd);
		return -EIO;
	}
	*f = (struct vmh_file){ .fd = vmh_fd_hide((int)fd), .dev = st.st_dev, .ino = st.st_ino };
	return 0;
}

static int make_one(struct vmh_file *f)
{
	return make(f, VMH_CTL_STATE_ROOM, MOST_BYTES, &file_bytes);
}

int vmh_ctl_state_file(void)
{
	int err = 0;

	if (file.fd >= 0 && !vmh_file_is_ours(&file))
		vmh_file_close(&file);
	if (file.fd < 0)
		err = make_one(&file);
	atomic_store(&ready, !err);
	return err ? err : file.fd;
}

bool vmh_session_tcp_ready(void)
{
	bool made;

	if (vmh_likely(atomic_load_explicit(&ready, memory_order_relaxed)))
		return true;
	vmh_lock(&vmh_ctl_lock);
	made = vmh_ctl_state_file() >= 0;
	vmh_unlock(&vmh_ctl_lock);
	return made;
}

#define PAGE 4096u

static size_t place_of(int i)
{
	return (unsigned)i * VMH_CTL_STATE_ROOM;
}

/* The first bytes of a place in a file of several, which begins anywhere in a page. NULL and -errno in *err. */
static char *map_place(int fd, int i, size_t len, int prot, long *err)
{
	const size_t in = place_of(i) % PAGE;
	long p = vmh_sys(SYS_mmap, NULL, in + len, prot, MAP_SHARED, fd, (long)(place_of(i) - in));

	*err = p < 0 && p > -(long)PAGE ? p : 0;
	return *err ? NULL : (char *)p + in;
}

static void unmap_place(char *p, size_t len)
{
	const size_t in = (uintptr_t)p % PAGE;

	vmh_sys(SYS_munmap, p - in, in + len);
}

/* Not by write(2), for which RLIMIT_FSIZE would count. */
void vmh_ctl_state_give_up(int fd, int i)
{
	long err;
	char *p = map_place(fd, i, 1, PROT_READ | PROT_WRITE, &err);

	if (!p)
		return;
	__atomic_store_n(p, 1, __ATOMIC_SEQ_CST);
	unmap_place(p, 1);
}

/* By who may map no more (RLIMIT_AS). */
static int written(int fd, int i, const struct vmh_tcp_blob *state)
{
	struct vmh_quiet q = vmh_quiet_begin();
	long n = vmh_sys(SYS_pwrite64, fd, state->p, state->len, place_of(i));

	vmh_quiet_end(&q, n);
	return n == (long)state->len ? 0 : n < 0 ? (int)n : -EFBIG;
}

static int put_at(int fd, int i, const struct vmh_tcp_blob *state)
{
	long err;
	char *p = map_place(fd, i, state->len, PROT_READ | PROT_WRITE, &err);

	if (!p)
		return written(fd, i, state);
	memcpy(p, state->p, state->len);
	unmap_place(p, state->len);
	return 0;
}

int vmh_ctl_state_put(const struct vmh_tcp_blob *state)
{
	int fd = vmh_ctl_state_file(), err;

	if (fd < 0)
		return fd;
	if (state->len > file_bytes)
		return -EFBIG;
	err = put_at(fd, 0, state);
	return err ? err : fd;
}

int vmh_ctl_states_put(const struct vmh_file *f, int i, const struct vmh_tcp_blob *state)
{
	return put_at(f->fd, i, state);
}

static int get_at(int fd, off_t from, struct vmh_tcp_blob *state, size_t len)
{
	struct stat st;
	size_t at = 0;
	char *p;

	if (vmh_sys(SYS_fstat, fd, &st) || !len || (uint64_t)st.st_size < (uint64_t)from + len)
		return -EPROTO;
	p = vmh_scratch_certain(len);
	if (!p)
		return -ENOMEM;
	while (at < len) {
		long n = vmh_sys(SYS_pread64, fd, p + at, len - at, (long)from + (long)at);

		if (n > 0) {
			at += (size_t)n;
		} else if (n != -EINTR) {
			vmh_scratch_free(p, len);
			return n ? (int)n : -EPROTO;
		}
	}
	*state = (struct vmh_tcp_blob){ p, len };
	return 0;
}

int vmh_ctl_state_get(struct vmh_tcp_blob *state, size_t len)
{
	return vmh_file_is_ours(&file) ? get_at(file.fd, 0, state, len) : -EPROTO;
}

bool vmh_ctl_states_file(struct vmh_file *f, int n)
{
	size_t bytes;

	return !make(f, (unsigned)n * VMH_CTL_STATE_ROOM, 0, &bytes);
}

int vmh_ctl_states_get(const struct vmh_file *f, int i, struct vmh_tcp_blob *state, size_t len)
{
	return vmh_file_is_ours(f) ? get_at(f->fd, (off_t)place_of(i), state, len) : -EPROTO;
}

void vmh_ctl_state_left(const struct vmh_file *several, int i, struct vmh_tcp_blob *state)
{
	const struct vmh_file *f = several ? several : &file;
	const struct vmh_tcp_state *head;
	struct vmh_tcp_blob got = { 0 };
	size_t len = 0;

	if (vmh_ctl_states_get(f, i, &got, sizeof(*head)))
		return;
	head = got.p;
	if (head->magic == VMH_TCP_STATE_MAGIC && head->header_len == sizeof(*head) &&
	    head->send_len <= VMH_TCP_STATE_MAX_QUEUE && head->recv_len <= VMH_TCP_STATE_MAX_QUEUE)
		len = sizeof(*head) + head->send_len + head->recv_len;
	vmh_tcp_blob_free(&got);
	if (len)
		vmh_ctl_states_get(f, i, state, len);
}

int vmh_ctl_states_again(const struct vmh_file *f, int i, size_t len)
{
	long err = -EBADF;
	char *p = vmh_file_is_ours(f) ? map_place(f->fd, i, len, PROT_READ, &err) : NULL;

	if (!p)
		return (int)err;
	err = vmh_ctl_state_put(&(struct vmh_tcp_blob){ p, len });
	unmap_place(p, len);
	return (int)err;
}

void vmh_tcp_blob_free(struct vmh_tcp_blob *state)
{
	if (state->p)
		vmh_scratch_free(state->p, state->len);
	*state = (struct vmh_tcp_blob){ 0 };
}

void vmh_ctl_state_done(bool answered)
{
	struct vmh_file again = { .fd = -1 };

	if (!vmh_file_is_ours(&file))
		return;
	if (answered) {
		vmh_sys(SYS_fallocate, file.fd, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0L, (long)file_bytes); /* its memory */
		return;
	}
	if (make_one(&again)) { /* else there is one all the time */
		vmh_file_close(&file);
		make_one(&again);
	} else {
		vmh_file_close(&file);
	}
	file = again;
	atomic_store(&ready, file.fd >= 0);
}

void vmh_ctl_state_fork_child(void)
{
	vmh_file_close(&file); /* the parent's goes on */
	atomic_store(&ready, 0);
}
