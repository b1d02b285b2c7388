/* An epoll set in the fd dump: which members rings serve now. */
#include "vmh_iomux_int.h"
#include "vmh_log.h"
#include "vmh_ring.h"
#include <stdio.h>

#define LIST_MAX 512 /* characters */

static unsigned offloaded_members(struct vmh_ep *e, char *list)
{
	unsigned n = 0;
	int used = 0;

	vmh_lock(&e->obj.lock);
	for (const struct vmh_epitem *it = e->items; it; it = it->set_next) {
		if (!vmh_epitem_on_ring(it))
			continue;
		n++;
		if (used < LIST_MAX - 16)
			used += snprintf(list + used, LIST_MAX - (size_t)used, " %d", it->fd);
		else if (used < LIST_MAX - 8)
			used += snprintf(list + used, LIST_MAX - (size_t)used, " ...");
	}
	vmh_unlock(&e->obj.lock);
	return n;
}

void vmh_epoll_dump(int epfd, int level)
{
	struct vmh_obj *o = vmh_fd_get(epfd);
	char list[LIST_MAX] = "";
	unsigned n, rings = 0;

	if (!o)
		return;
	if (atomic_load(&o->class_) == VMH_CLASS_EPOLL) {
		n = offloaded_members(vmh_ep_of(o), list);
		for (const struct vmh_ring *r = atomic_load(&vmh_rings); r; r = r->next)
			rings += !atomic_load(&r->gone);
		vmh_log(level, "Offloaded Fds : %u", n);
		if (n)
			vmh_log(level, "Offloaded Fds list:%s", list);
		vmh_log(level, "Number of rings : %u", n ? rings : 0);
		vmh_log(level, "Number of ready Fds : %u", atomic_load(&vmh_ep_of(o)->rdy_n));
	}
	vmh_obj_put(o);
}
