/* A libibverbs.so.1 before the software one (REAL), for what a device would see and softverbs has no use for: it writes
 * a line per call to $VMH_SPY_LOG. What is not here the loader finds in REAL, which this library needs. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <infiniband/verbs.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <unistd.h>

static int (*real_post_send)(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad);

/* By system calls: the shim, which calls us, has its own open() and write(). */
static void say(const char *text)
{
	char line[128];
	int length = snprintf(line, sizeof(line), "%s\n", text);
	long fd = syscall(SYS_openat, AT_FDCWD, getenv("VMH_SPY_LOG"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);

	if (fd < 0 || syscall(SYS_write, fd, line, length) != length)
		abort();
	syscall(SYS_close, fd);
}

static void *real(const char *name)
{
	void *found = dlsym(dlopen(REAL, RTLD_NOW | RTLD_NOLOAD), name);

	if (!found)
		abort();
	return found;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad)
{
	say(wr->send_flags & IBV_SEND_SIGNALED ? "send signalled" : "send");
	return real_post_send(qp, wr, bad);
}

int ibv_fork_init(void)
{
	say("fork_init");
	return ((int (*)(void))real(__func__))();
}

struct ibv_context *ibv_open_device(struct ibv_device *device)
{
	static const char *const asked[] = { "MLX5_SHUT_UP_BF", "MLX5_POST_SEND_PREFER_BF", "MLX4_POST_SEND_PREFER_BF" };
	struct ibv_context *context = ((struct ibv_context * (*)(struct ibv_device *))real(__func__))(device);
	char text[64];

	for (unsigned i = 0; i < sizeof(asked) / sizeof(asked[0]); i++) {
		const char *value = getenv(asked[i]);

		snprintf(text, sizeof(text), "open %s=%s", asked[i], value ? value : "");
		say(text);
	}
	if (context) {
		real_post_send = context->ops.post_send;
		context->ops.post_send = post_send;
	}
	return context;
}
