/* Flow rules of the QPs: which of the process' attached flows are steered to which verbs ring, and by which address.
 *
 * A rule exists per flow, ring and local address. The table follows from the list of flows: vmh_verbs_attach and
 * _detach change it, a wildcard's rules follow the addresses of the net page, and a ring takes its rules with it.
 * The lock comes inside object, control and ring locks; under it only the library is called.
 */
#include "ring_verbs.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_sock.h"
#include <arpa/inet.h>
#include <stdlib.h>

#define TAGS 4096      /* flows whose socket the device can name; 20 bits are what VMA uses at most */
#define ADDRS 64       /* addresses of an interface that a wildcard covers */
#define PRIORITY_5T 0  /* the most specific rule has to win */
#define PRIORITY_OTHER 1

struct rule {
	struct rule *next;
	struct verbs_ring *ring;
	struct ibv_flow *flow;
	in_addr_t addr;
};

struct vflow {
	struct vflow *next;
	struct vmh_flow f;
	uint32_t tag;    /* 0: none */
	struct rule *rules;
};

static struct vmh_lock lock;
static struct vflow *flows;
static struct vmh_sock *_Atomic tags[TAGS]; /* index is tag - 1; sockets' memory is never given back */
static bool incomplete;                     /* a rule could not be made: tried again when another one is gone */
static int why;                             /* errno of the last rule that could not be made */
static uint64_t followed;                   /* generation of the net page */

struct vmh_sock *vmh_verbs_tagged(uint32_t tag)
{
	return tag - 1 < TAGS ? atomic_load_explicit(&tags[tag - 1], memory_order_acquire) : NULL;
}

static uint32_t tag_new(struct vmh_sock *s)
{
	for (uint32_t i = 0; i < TAGS; i++) {
		if (!atomic_load_explicit(&tags[i], memory_order_relaxed)) {
			atomic_store_explicit(&tags[i], s, memory_order_release);
			return i + 1;
		}
	}
	return 0;
}

/* ---- one rule ---- */

struct spec {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_eth eth;
	struct ibv_flow_spec_ipv4 ip;
	struct ibv_flow_spec_tcp_udp udp;
	struct ibv_flow_spec_action_tag tag;
};
/* the specifications follow each other without a gap */
_Static_assert(sizeof(struct spec) == sizeof(struct ibv_flow_attr) + sizeof(struct ibv_flow_spec_eth) +
	       sizeof(struct ibv_flow_spec_ipv4) + sizeof(struct ibv_flow_spec_tcp_udp) +
	       sizeof(struct ibv_flow_spec_action_tag), "packed");

static void group_mac(unsigned char mac[6], in_addr_t group)
{
	uint32_t g = ntohl(group);

	mac[0] = 0x01;
	mac[1] = 0x00;
	mac[2] = 0x5e;
	mac[3] = (g >> 16) & 0x7f;
	mac[4] = (unsigned char)(g >> 8);
	mac[5] = (unsigned char)g;
}

static void fill(struct spec *s, const struct verbs_ring *x, const struct vflow *v, in_addr_t addr, bool tagged)
{
	const bool five = v->f.kind == VMH_FLOW_5T;

	memset(s, 0, sizeof(*s));
	s->attr.type = IBV_FLOW_ATTR_NORMAL;
	s->attr.size = (uint16_t)(sizeof(*s) - (tagged ? 0 : sizeof(s->tag)));
	s->attr.priority = five ? PRIORITY_5T : PRIORITY_OTHER;
	s->attr.num_of_specs = tagged ? 4 : 3;
	s->attr.port = x->dev->port;
	s->eth.type = IBV_FLOW_SPEC_ETH;
	s->eth.size = sizeof(s->eth);
	if (v->f.kind == VMH_FLOW_MC)
		group_mac(s->eth.val.dst_mac, addr);
	else
		memcpy(s->eth.val.dst_mac, x->r.mac, 6);
	memset(s->eth.mask.dst_mac, 0xff, 6);
	s->eth.val.ether_type = htons(0x0800);
	s->eth.mask.ether_type = 0xffff;
	s->ip.type = IBV_FLOW_SPEC_IPV4;
	s->ip.size = sizeof(s->ip);
	s->ip.val.dst_ip = addr;
	s->ip.mask.dst_ip = 0xffffffff;
	s->udp.type = IBV_FLOW_SPEC_UDP;
	s->udp.size = sizeof(s->udp);
	s->udp.val.dst_port = v->f.lport;
	s->udp.mask.dst_port = 0xffff;
	if (five) {
		s->ip.val.src_ip = v->f.raddr;
		s->ip.mask.src_ip = 0xffffffff;
		s->udp.val.src_port = v->f.rport;
		s->udp.mask.src_port = 0xffff;
	}
	s->tag.type = IBV_FLOW_SPEC_ACTION_TAG;
	s->tag.size = sizeof(s->tag);
	s->tag.tag_id = v->tag;
}

static struct ibv_flow *create(struct verbs_ring *x, const struct vflow *v, in_addr_t addr)
{
	bool tagged = x->rx_ex && v->tag;
	struct ibv_flow *flow;
	struct spec s;

	fill(&s, x, v, addr, tagged);
	flow = ibv_create_flow(x->qp, &s.attr);
	if (flow || !tagged || (errno != EOPNOTSUPP && errno != EINVAL && errno != ENOTSUP))
		return flow;
	fill(&s, x, v, addr, false);
	return ibv_create_flow(x->qp, &s.attr);
}

static bool same_match(const struct vmh_flow *a, const struct vmh_flow *b)
{
	return a->kind == b->kind && a->lport == b->lport && a->raddr == b->raddr && a->rport == b->rport;
}

/* A second rule that matches the same frames: some devices refuse it, others would send each frame to the QP twice.
 * One is enough, as whatever comes is delivered to all sockets that it is for. */
static bool is_covered(const struct verbs_ring *x, const struct vflow *v, in_addr_t addr)
{
	for (const struct vflow *o = flows; o; o = o->next) {
		if (o == v || !same_match(&o->f, &v->f))
			continue;
		for (const struct rule *r = o->rules; r; r = r->next)
			if (r->ring == x && r->addr == addr)
				return true;
	}
	return false;
}

/* 0, or the errno. */
static int add_rule(struct verbs_ring *x, struct vflow *v, in_addr_t addr)
{
	char text[INET_ADDRSTRLEN];
	struct rule *r;

	if (is_covered(x, v, addr)) {
		why = EEXIST;
		incomplete = true;
		return why;
	}
	r = malloc(sizeof(*r));
	if (r)
		r->flow = create(x, v, addr);
	if (!r || !r->flow) {
		why = errno ? errno : EIO;
		vmh_debug("no flow rule for %s:%u on %s: %s", inet_ntop(AF_INET, &addr, text, sizeof(text)),
			  ntohs(v->f.lport), x->dev->name, strerror(why));
		free(r);
		incomplete = true;
		return why;
	}
	r->ring = x;
	r->addr = addr;
	r->next = v->rules;
	v->rules = r;
	x->rules++;
	atomic_store(&x->refused, 0);
	return 0;
}

static void remove_rule(struct rule **at)
{
	struct rule *r = *at;

	*at = r->next;
	r->ring->rules--;
	ibv_destroy_flow(r->flow);
	free(r);
}

/* A rule that no frame meets: a loopback address is on no wire. */
int vmh_verbs_try_rule(struct verbs_ring *x)
{
	const struct vflow v = { .f = { .kind = VMH_FLOW_3T, .lport = htons(9) } };
	struct ibv_flow *flow;

	errno = 0;
	flow = create(x, &v, htonl(INADDR_LOOPBACK));
	if (flow)
		ibv_destroy_flow(flow);
	else if (errno != EEXIST) /* another program tries just now */
		return errno ? -errno : -EIO;
	return 0;
}

/* ---- what a flow asks of a ring ---- */

static bool has(const in_addr_t *addrs, int n, in_addr_t a)
{
	while (n--)
		if (addrs[n] == a)
			return true;
	return false;
}

static void sync_ring(struct vflow *v, struct verbs_ring *x)
{
	in_addr_t wanted[ADDRS] = { v->f.laddr }, there[ADDRS];
	int n = 1, m = 0, err = 0;

	if (v->f.ifindex && v->f.ifindex != x->r.ifindex)
		return;
	if (!v->f.laddr)
		n = vmh_net_addrs(x->r.ifindex, wanted, ADDRS);
	for (struct rule **at = &v->rules; *at;) {
		struct rule *r = *at;

		if (r->ring == x && !has(wanted, n, r->addr)) {
			remove_rule(at);
			continue;
		}
		if (r->ring == x && m < ADDRS)
			there[m++] = r->addr;
		at = &r->next;
	}
	for (int i = 0; i < n; i++)
		if (!has(there, m, wanted[i])) {
			int e = add_rule(x, v, wanted[i]);

			err = e && e != EEXIST ? e : err;
		}
	/* its flows would stay on the kernel: the internal thread gives it back */
	if (err && !x->rules)
		atomic_store(&x->refused, err);
}

static bool is_live(const struct vmh_ring *r)
{
	return r->kind == VMH_RING_VERBS && !atomic_load(&r->gone);
}

/* A ring is closed with its rules under this lock, so that a live one stays whole meanwhile. */
static bool sync_rings(struct vflow *v)
{
	bool any = false;

	for (struct vmh_ring *r = atomic_load(&vmh_rings); r; r = r->next) {
		if (!is_live(r) || !verbs_ring_of(r)->qp || (v->f.ifindex && v->f.ifindex != r->ifindex))
			continue;
		any = true;
		sync_ring(v, verbs_ring_of(r));
	}
	return any;
}

static void sync_all(void)
{
	incomplete = false;
	for (struct vflow *v = flows; v; v = v->next)
		sync_rings(v);
}

/* ---- from the rest of the shim ---- */

static void drop(struct vflow **at)
{
	struct vflow *v = *at;

	while (v->rules)
		remove_rule(&v->rules);
	if (v->tag)
		atomic_store_explicit(&tags[v->tag - 1], NULL, memory_order_release);
	VMH_SET(*at, v->next); /* vmh_verbs_follow() looks at the first without the lock */
	free(v);
}

unsigned vmh_verbs_attach(const struct vmh_flow *f, struct vmh_sock *s)
{
	struct vflow *v;
	unsigned reason = 0;
	bool concerned;
	int saved = errno;

	if (!vmh_ibv.create_qp || (f->ifindex && !vmh_verbs_any()))
		return 0;
	v = calloc(1, sizeof(*v));
	if (!v)
		return VMH_R_VERBS_FAILED;
	v->f = *f;
	vmh_lock(&lock);
	v->tag = tag_new(s);
	v->next = flows;
	VMH_SET(flows, v);
	concerned = sync_rings(v);
	/* where it is only one more rule of this process that stands in the way, that one goes soon */
	if (concerned && !v->rules && why != EEXIST && f->laddr)
		reason = VMH_R_VERBS_FAILED;
	if (reason || (!concerned && f->ifindex))
		drop(&flows);
	vmh_unlock(&lock);
	errno = saved;
	return reason;
}

void vmh_verbs_detach(uint32_t flow_id)
{
	int saved = errno;

	if (!vmh_ibv.create_qp)
		return;
	vmh_lock(&lock);
	for (struct vflow **at = &flows; *at;) {
		if ((*at)->f.id == flow_id)
			drop(at);
		else
			at = &(*at)->next;
	}
	if (incomplete)
		sync_all();
	vmh_unlock(&lock);
	errno = saved;
}

void vmh_verbs_ring_opened(struct verbs_ring *x)
{
	vmh_lock(&lock);
	for (struct vflow *v = flows; v; v = v->next)
		sync_ring(v, x);
	vmh_unlock(&lock);
}

void vmh_verbs_ring_closing(struct verbs_ring *x)
{
	vmh_lock(&lock);
	for (struct vflow **at = &flows; *at;) {
		for (struct rule **r = &(*at)->rules; *r;) {
			if ((*r)->ring == x)
				remove_rule(r);
			else
				r = &(*r)->next;
		}
		if ((*at)->f.ifindex == x->r.ifindex)
			drop(at);
		else
			at = &(*at)->next;
	}
	vmh_unlock(&lock);
}

void vmh_verbs_forget(void)
{
	vmh_lock(&lock);
	while (flows)
		drop(&flows);
	vmh_unlock(&lock);
}

void vmh_verbs_follow(void)
{
	uint64_t now = vmh_net_generation();

	if (!VMH_GET(flows) || now == followed)
		return;
	vmh_lock(&lock);
	followed = now;
	sync_all();
	vmh_unlock(&lock);
}

void vmh_verbs_flows_fork_child(void)
{
	/* the rules are the parent's: forgotten, not destroyed */
	vmh_lock_reset(&lock);
	flows = NULL;
	incomplete = false;
	for (uint32_t i = 0; i < TAGS; i++)
		atomic_store_explicit(&tags[i], NULL, memory_order_relaxed);
}
