/* Rings of io_uring that the program makes and enters by libc's syscall(), as libuv does: what it asks for by them
 * concerns descriptors of ours, too. Rings whose requests the kernel takes by itself (SQPOLL), whose memory is the
 * program's (NO_MMAP), or that were made by the instruction itself are not seen. */
#ifndef VMH_URING_H
#define VMH_URING_H
#include "vmh_base.h"

struct io_uring_params;
struct io_uring_sqe;

/* uring.c: the rings */
extern _Atomic unsigned vmh_urings; /* above the last one that was ever known */
void vmh_uring_made(int fd, const struct io_uring_params *params);
bool vmh_uring_known(int fd);
struct vmh_uring_call {
	int fd;
	unsigned submit, wait, flags;
	void *arg;
	size_t size;
};
long vmh_uring_enter(const struct vmh_uring_call *k); /* io_uring_enter(2): its result, or -errno */
void vmh_uring_fork_child(void);
VMH_COLD void vmh_urings_forget(unsigned first, unsigned last);
static inline void vmh_urings_closed(unsigned first, unsigned last) /* descriptors: they are about to be, or were */
{
	if (vmh_unlikely(atomic_load_explicit(&vmh_urings, memory_order_relaxed)))
		vmh_urings_forget(first, last);
}

/* uring_sqe.c: one request */
bool vmh_sqe_concerns(const struct io_uring_sqe *q);
/* linked: what fails before it has the kernel cancel it. 0, and it is the kernel's, maybe as another one; or -errno: none is */
int vmh_sqe_taken(struct io_uring_sqe *q, bool linked);
#endif
