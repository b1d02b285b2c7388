/* Asynchronous events: of the link by rtnetlink, of CQs and QPs by ourselves. The fd is an epoll fd of both. */
#include <fcntl.h>
#include <stdlib.h>
#include "sv.h"

struct sv_event {
	struct sv_event *next;
	enum ibv_event_type type;
	void *element; /* struct sv_cq, struct sv_qp, NULL for the port or the device */
};

enum { QUEUE, LINK };

int sv_events_open(struct sv_context *x)
{
	int epoll = sv_epoll_create(), error;

	x->event_fd = sv_eventfd();
	x->netlink_fd = sv_netlink_watch(x->device->ifindex);
	sv_public(x)->async_fd = epoll;
	error = epoll < 0 ? epoll : x->event_fd < 0 ? x->event_fd : x->netlink_fd < 0 ? x->netlink_fd : 0;
	if (!error)
		error = sv_epoll_ctl(epoll, EPOLL_CTL_ADD, x->event_fd, EPOLLIN, QUEUE);
	if (!error)
		error = sv_epoll_ctl(epoll, EPOLL_CTL_ADD, x->netlink_fd, EPOLLIN, LINK);
	if (error)
		sv_events_close(x);
	return error;
}

void sv_events_close(struct sv_context *x)
{
	sv_close(&x->event_fd);
	sv_close(&x->netlink_fd);
	sv_close(&sv_public(x)->async_fd);
	while (x->events) {
		struct sv_event *event = x->events;

		x->events = event->next;
		free(event);
	}
	x->events_end = &x->events;
}

void sv_event_queue(struct sv_context *x, enum ibv_event_type type, void *element)
{
	struct sv_event *event = calloc(1, sizeof(*event));

	if (!event)
		return;
	event->type = type;
	event->element = element;
	pthread_mutex_lock(&x->lock);
	*x->events_end = event;
	x->events_end = &event->next;
	if (x->event_fd >= 0)
		sv_eventfd_add(x->event_fd, 1);
	pthread_mutex_unlock(&x->lock);
}

void sv_device_gone(struct sv_context *x)
{
	if (atomic_exchange(&x->dead, true))
		return;
	sv_engine_device_gone(x);
	sv_event_queue(x, IBV_EVENT_DEVICE_FATAL, NULL);
}

/* With link_lock held. */
static bool read_link(struct sv_context *x)
{
	union {
		char bytes[16384];
		uint64_t aligned;
	} buffer;
	long size = sv_recv(x->netlink_fd, &buffer, sizeof(buffer), MSG_DONTWAIT);
	struct sv_link link;
	int state;

	if (size == -ENOBUFS && !sv_device_here(x->device))
		state = -2; /* cannot be looked up from there */
	else if (size == -ENOBUFS) /* lost some; what counts is the present */
		state = sv_link_of(x->device->ifindex, &link) ? -1 : sv_link_active(&link);
	else if (size <= 0)
		return false;
	else
		state = sv_netlink_state(&buffer, (size_t)size, x->device->ifindex);
	if (state == -1) {
		sv_device_gone(x);
	} else if (state >= 0 && x->was_active != (state == 1)) {
		x->was_active = state == 1;
		sv_event_queue(x, state ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR, NULL);
	}
	return true;
}

static void read_links(struct sv_context *x)
{
	pthread_mutex_lock(&x->link_lock);
	while (read_link(x))
		;
	pthread_mutex_unlock(&x->link_lock);
}

static bool take(struct sv_context *x, struct ibv_async_event *out)
{
	struct sv_event *event;

	pthread_mutex_lock(&x->lock);
	event = x->events;
	if (event) {
		x->events = event->next;
		if (!x->events)
			x->events_end = &x->events;
		sv_eventfd_take(x->event_fd);
		out->event_type = event->type;
		if (event->type == IBV_EVENT_CQ_ERR) {
			out->element.cq = event->element;
			((struct sv_cq *)event->element)->async_told++;
		} else if (event->element) {
			out->element.qp = event->element;
			((struct sv_qp *)event->element)->async_told++;
		} else {
			out->element.port_num = 1;
		}
	}
	pthread_mutex_unlock(&x->lock);
	free(event);
	return event;
}

SV_EXPORT int ibv_get_async_event(struct ibv_context *context, struct ibv_async_event *event)
{
	struct sv_context *x = sv_context(context);

	for (;;) {
		bool blocking = !(sv_fcntl(context->async_fd, F_GETFL, 0) & O_NONBLOCK);
		struct epoll_event ready;
		int n = x->forked ? -EIO : sv_epoll_wait(context->async_fd, &ready, 1, blocking ? -1 : 0);

		if (n <= 0) {
			errno = n < 0 ? -n : EAGAIN;
			return -1;
		}
		/* all: a program that reads no further than the port's error is to lose a device that is gone */
		if (ready.data.u64 == LINK)
			read_links(x);
		if (take(x, event))
			return 0;
	}
}

static void acknowledge(pthread_mutex_t *mutex, pthread_cond_t *cond, uint32_t *completed)
{
	pthread_mutex_lock(mutex);
	(*completed)++;
	pthread_cond_broadcast(cond);
	pthread_mutex_unlock(mutex);
}

SV_EXPORT void ibv_ack_async_event(struct ibv_async_event *event)
{
	struct ibv_cq *cq = event->element.cq;
	struct ibv_qp *qp = event->element.qp;

	switch (event->event_type) {
	case IBV_EVENT_CQ_ERR:
		acknowledge(&cq->mutex, &cq->cond, &cq->async_events_completed);
		break;
	case IBV_EVENT_QP_FATAL:
	case IBV_EVENT_SQ_DRAINED:
	case IBV_EVENT_QP_LAST_WQE_REACHED:
		acknowledge(&qp->mutex, &qp->cond, &qp->events_completed);
		break;
	default:
		break;
	}
}

void sv_event_drain(struct sv_context *x, void *element, pthread_mutex_t *mutex, pthread_cond_t *cond,
		    const uint32_t *completed, const uint32_t *told)
{
	struct sv_event **at = &x->events;

	if (x->forked)
		return;
	pthread_mutex_lock(&x->lock);
	while (*at) {
		struct sv_event *event = *at;

		if (event->element != element) {
			at = &event->next;
			continue;
		}
		*at = event->next;
		sv_eventfd_take(x->event_fd);
		free(event);
	}
	x->events_end = at;
	pthread_mutex_unlock(&x->lock);
	pthread_mutex_lock(mutex);
	while (*completed != *told)
		pthread_cond_wait(cond, mutex);
	pthread_mutex_unlock(mutex);
}
