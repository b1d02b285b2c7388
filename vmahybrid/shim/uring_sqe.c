/* What a request of io_uring asks for. epoll_ctl on one of our sockets in one of our sets is done as if the program had
 * called it, and the request is left to the kernel as one that does nothing. Any other that names a socket of ours has
 * it go home for good, as what hands descriptors to the kernel's queues does; and a set that is waited for so is one
 * inside of another.
 *
 * What is done here is done before all that was handed in with it. */
#include "vmh_interpose.h"
#include "vmh_iomux.h"
#include "vmh_tcps.h"
#include "vmh_uring.h"
#include <linux/io_uring.h>
#include <sys/epoll.h>

/* Linux 6.7 to 6.15: headers may be older */
enum { READ_MULTISHOT = 49, BIND = 56, LISTEN = 57, RECV_ZC = 58, EPOLL_WAIT = 59, READV_FIXED = 60, WRITEV_FIXED = 61 };

#define IN_BY_INDEX (1u << 31) /* SPLICE_F_FD_IN_FIXED */

/* Of others the field `fd` is something else, or no file that could be a socket. */
static const uint8_t names_file[] = {
	[IORING_OP_READV] = 1, [IORING_OP_WRITEV] = 1, [IORING_OP_READ_FIXED] = 1, [IORING_OP_WRITE_FIXED] = 1,
	[IORING_OP_POLL_ADD] = 1, [IORING_OP_SENDMSG] = 1, [IORING_OP_RECVMSG] = 1, [IORING_OP_ACCEPT] = 1,
	[IORING_OP_CONNECT] = 1, [IORING_OP_CLOSE] = 1, [IORING_OP_READ] = 1, [IORING_OP_WRITE] = 1, [IORING_OP_SEND] = 1,
	[IORING_OP_RECV] = 1, [IORING_OP_SPLICE] = 1, [IORING_OP_TEE] = 1, [IORING_OP_SHUTDOWN] = 1,
	[IORING_OP_URING_CMD] = 1, [IORING_OP_SEND_ZC] = 1, [IORING_OP_SENDMSG_ZC] = 1, [READ_MULTISHOT] = 1, [BIND] = 1,
	[LISTEN] = 1, [RECV_ZC] = 1, [EPOLL_WAIT] = 1, [READV_FIXED] = 1, [WRITEV_FIXED] = 1,
};

/* The descriptor that it works on; -1: none by its number */
static int file_of(const struct io_uring_sqe *q)
{
	bool names = q->opcode < sizeof(names_file) && names_file[q->opcode];

	if (!names || (q->opcode == IORING_OP_CLOSE && q->file_index))
		return -1;
	return q->flags & IOSQE_FIXED_FILE ? -1 : q->fd;
}

static int second_file_of(const struct io_uring_sqe *q)
{
	bool splices = q->opcode == IORING_OP_SPLICE || q->opcode == IORING_OP_TEE;

	return splices && !(q->splice_flags & IN_BY_INDEX) ? q->splice_fd_in : -1;
}

/* Ours, and not at home for good, as those are that have named it before: they come here with each message. */
static bool away(int fd)
{
	struct vmh_obj *o;

	if (!vmh_fd_known(fd))
		return false;
	o = vmh_fd_peek(fd, VMH_CLASS_TCP);
	if (o)
		return vmh_tcps_state(vmh_tcps_of(o)) != VMH_TCPS_HOME;
	o = vmh_fd_peek(fd, VMH_CLASS_UDP);
	return !o || !VMH_GET(vmh_sock_of(o)->home);
}

bool vmh_sqe_concerns(const struct io_uring_sqe *q)
{
	switch (q->opcode) {
	case IORING_OP_EPOLL_CTL:
		return vmh_fd_known(q->fd);
	case IORING_OP_FILES_UPDATE:
		return true;
	case IORING_OP_CLOSE:
		return vmh_fd_known(file_of(q));
	}
	return away(file_of(q)) || away(second_file_of(q));
}

/* The answer to it, whenever it comes, is 0; or EINVAL, as of a set that is to hold itself. */
static void now_answers(struct io_uring_sqe *q, bool well)
{
	struct io_uring_sqe is = { .flags = q->flags, .user_data = q->user_data, .personality = q->personality,
				   .opcode = well ? IORING_OP_NOP : IORING_OP_EPOLL_CTL };

	if (!well) {
		is.fd = q->fd;
		is.off = (uint64_t)q->fd;
		is.len = EPOLL_CTL_DEL;
	}
	*q = is;
}

/* From memory that the program names and may not have: false, and the kernel says EFAULT. */
static bool copied(void *to, uint64_t from, size_t len)
{
	struct iovec here = { to, len }, there = { (void *)(uintptr_t)from, len };
	long n = vmh_sys(SYS_process_vm_readv, vmh_sys(SYS_getpid), &here, 1, &there, 1, 0);

	if (n != -ENOSYS && n != -EPERM)
		return n == (long)len;
	if (vmh_bad_ptr(there.iov_base)) /* a sandbox forbids it */
		return false;
	memcpy(to, there.iov_base, len);
	return true;
}

/* The kernel's set is asked first by our epoll_ctl, too: what it refuses there it refuses here again, and says so
 * itself. The rest is refused by us. */
static void control(struct io_uring_sqe *q)
{
	struct epoll_event ev;
	struct vmh_obj *set = vmh_fd_peek(q->fd, VMH_CLASS_EPOLL);
	int op = (int)q->len, fd = (int)q->off;

	if (!set || q->ioprio || q->buf_index || q->splice_fd_in || q->flags & IOSQE_BUFFER_SELECT)
		return; /* or the kernel refuses it as it is */
	if (op != EPOLL_CTL_DEL && !copied(&ev, q->addr, sizeof(ev)))
		return;
	if (!vmh_fd_known(fd)) {
		if (op != EPOLL_CTL_DEL)
			vmh_epoll_others(set, ev.data.u64);
		return;
	}
	if (!epoll_ctl(q->fd, op, fd, &ev))
		now_answers(q, true);
	else if (errno == EINVAL || errno == ENOMEM)
		now_answers(q, false);
}

static int home(int fd)
{
	return vmh_kernel_takes(fd, VMH_R_IO_URING) ? -errno : 0;
}

static int all_home(const struct io_uring_sqe *q)
{
	int fds[64], err = 0;
	unsigned n;

	for (unsigned i = 0; !err && i < q->len; i += n) {
		n = q->len - i < 64 ? q->len - i : 64;
		if (!copied(fds, q->addr + (uint64_t)i * sizeof(int), n * sizeof(int)))
			break;
		for (unsigned k = 0; !err && k < n; k++)
			err = vmh_fd_known(fds[k]) ? home(fds[k]) : 0;
	}
	return err;
}

static void waited_for(int fd)
{
	struct vmh_obj *o = vmh_fd_get(fd);

	if (!o)
		return;
	if (atomic_load(&o->class_) == VMH_CLASS_EPOLL)
		vmh_epoll_nested(o, VMH_R_NESTED);
	vmh_obj_put(o);
}

int vmh_sqe_taken(struct io_uring_sqe *q, bool linked)
{
	int fd = file_of(q), err;

	if (q->opcode == IORING_OP_EPOLL_CTL) {
		control(q);
		return 0;
	}
	if (q->opcode == IORING_OP_FILES_UPDATE)
		return all_home(q);
	err = home(fd);
	if (!err)
		err = home(second_file_of(q));
	if (!err && (q->opcode == IORING_OP_POLL_ADD || q->opcode == EPOLL_WAIT || (q->opcode == IORING_OP_CLOSE && linked)))
		waited_for(fd); /* of one that may not be closed the kernel's set is enough then */
	if (!err && q->opcode == IORING_OP_CLOSE)
		vmh_fd_close(fd); /* as close() does, before the kernel */
	return err;
}
