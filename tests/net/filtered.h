/* A seccomp filter of a test program, and a word of it that needs write(2) alone. */
#ifndef FILTERED_H
#define FILTERED_H
#define _GNU_SOURCE
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <stddef.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define NUMBER BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr))
#define ALLOW(name) \
	BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_##name, 0, 1), BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW)

static void say(const char *what)
{
	if (write(1, what, strlen(what)) < 0)
		_exit(3);
}

/* By prctl(), or by seccomp(2) of all threads. */
static void install(struct sock_filter *f, unsigned short n, int all)
{
	struct sock_fprog program = { n, f };

	if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
		_exit(4);
	if (all ? syscall(SYS_seccomp, SECCOMP_SET_MODE_FILTER, SECCOMP_FILTER_FLAG_TSYNC, &program)
		: prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program, 0, 0))
		_exit(5);
}
#endif
