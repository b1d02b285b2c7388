/* Between control.c, which has the session, and control_ask.c, which asks by it. */
#ifndef VMH_CONTROL_INT_H
#define VMH_CONTROL_INT_H
#include "vmh_control.h"
#include "tcp/tcp_state.h"
#include "vmh_fd.h"

#define MAX_FDS 17

extern struct vmh_lock vmh_ctl_lock; /* one request at a time */
extern int vmh_ctl_fd;               /* -1: no session */

void vmh_ctl_header(struct vmh_msg_hdr *h, unsigned type, size_t len);
int vmh_ctl_send(const void *msg, size_t len); /* no reply is waited for */
/* Lock held. 0, or -errno: the service's, or of the session, which is lost then. */
int vmh_ctl_rpc(struct vmh_msg_hdr *req, int fd, void *reply, size_t reply_len, int *fds, int *nfds);
int vmh_ctl_rpc_fds(struct vmh_msg_hdr *req, const int *out, int nout, void *reply, size_t reply_len, int *fds, int *nfds);
void vmh_ctl_close_fds(int *fds, int n);
/* Lock held. Several requests of one type, answered in any order, without descriptors; each answer has the time that one
 * has. */
struct vmh_ctl_request {
	struct vmh_msg_hdr *req;
	int out[2], nout;
	void *reply;           /* of at least reply_len bytes, as vmh_ctl_rpc() has it */
	int err;
};
void vmh_ctl_rpc_many(struct vmh_ctl_request *q, int n, size_t reply_len);
/* control_state.c, lock held: the memory file for states. A descriptor, which stays ours, or -errno. */
int vmh_ctl_state_file(void);
int vmh_ctl_state_put(const struct vmh_tcp_blob *state); /* with this in it */
int vmh_ctl_state_get(struct vmh_tcp_blob *state, size_t len); /* what the service has written; 0 or -errno */
void vmh_ctl_state_done(bool answered);                  /* after the request */
void vmh_ctl_state_give_up(int fd, int i);               /* nobody waits for the state of that place any more */
#define VMH_CTL_STATE_ROOM (VMH_TCP_STATE_LEN + 2ul * VMH_TCP_STATE_MAX_QUEUE) /* holes, but for what is in it */
/* A file for several states at a time, used once; closed by vmh_file_close(). false: the program's limits forbid it */
bool vmh_ctl_states_file(struct vmh_file *f, int n);
int vmh_ctl_states_put(const struct vmh_file *f, int i, const struct vmh_tcp_blob *state); /* 0 or -errno */
int vmh_ctl_states_again(const struct vmh_file *f, int i, size_t len); /* into the file that is there always, as _put() */
int vmh_ctl_states_get(const struct vmh_file *f, int i, struct vmh_tcp_blob *state, size_t len);
/* Whole, if any, of a service that has not answered. several: NULL for the file that is there always, and i is 0 */
void vmh_ctl_state_left(const struct vmh_file *several, int i, struct vmh_tcp_blob *state);
void vmh_ctl_state_fork_child(void);
void vmh_ctl_forget_refusals(void);    /* control_ask.c: those of rings, for a new session */

#endif
