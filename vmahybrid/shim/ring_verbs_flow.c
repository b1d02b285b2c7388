/* Flow rules of the QPs: which of the process' attached flows are steered to which verbs ring, and by which address.
 *
 * A rule exists per flow, ring and local address. The table follows from the list of flows: vmh_verbs_attach and
 * _detach change it, a wildcard's rules follow the addresses of the net page, and a ring takes its rules with it.
 * The lock comes inside object, control and ring locks; under it only the library is called.
 */
#include "ring_verbs.h"
#include "vmh_heap.h"
#include "vmh_log.h"
#include "vmh_net.h"
#include "vmh_params.h"
#include "vmh_sock.h"
#include <arpa/inet.h>

#define TAGS 4096      /* flows whose socket the device can name; 20 bits are what VMA uses at most */
#define ADDRS 64       /* addresses of an interface that a wildcard covers */
#define PRIORITY_5T 0  /* the most specific rule has to win */
#define PRIORITY_OTHER 1
#define VID_BITS 0xfff     /* with the value 0: no tag, or one of a priority. Frames with a VLAN are its device's */
#define GROUP_MAC_BITS 0x7fffff /* of a group that its Ethernet address has */

struct rule {
	struct rule *next;
	struct verbs_ring *ring;
	struct ibv_flow *flow;
	struct vmh_ip addr;
};

/* Of a flow. A wildcard (UDP only) covers the interface's IPv4 addresses. */
struct match {
	uint32_t id, kind, ifindex, lane;
	uint8_t proto;
	in_port_t lport, rport;
	struct vmh_ip laddr, raddr;
};

struct vflow {
	struct vflow *next;
	struct match f;
	uint32_t tag;    /* 0: none */
	struct rule *rules;
};

static struct vmh_lock lock;
static struct vflow *flows;
static struct vmh_sock *_Atomic tags[TAGS]; /* index is tag - 1; sockets' memory is never given back */
static uint32_t tags_used;                  /* above the highest that was ever taken */
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
			if (tags_used <= i)
				tags_used = i + 1;
			return i + 1;
		}
	}
	return 0;
}

/* ---- one rule ---- */

struct spec {
	struct ibv_flow_attr attr;
	struct ibv_flow_spec_eth eth;
	/* the rest without a gap: IP, ports, the tag */
	unsigned char rest[sizeof(struct ibv_flow_spec_ipv6) + sizeof(struct ibv_flow_spec_tcp_udp) +
			   sizeof(struct ibv_flow_spec_action_tag)];
};
_Static_assert(offsetof(struct spec, rest) == sizeof(struct ibv_flow_attr) + sizeof(struct ibv_flow_spec_eth), "packed");

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

static void put(struct spec *s, const void *spec, size_t size)
{
	memcpy((char *)s + s->attr.size, spec, size);
	s->attr.size = (uint16_t)(s->attr.size + size);
	s->attr.num_of_specs++;
}

static void put_ip(struct spec *s, const struct match *m, const struct vmh_ip *addr)
{
	const size_t from = m->kind == VMH_FLOW_5T;
	struct ibv_flow_spec_ipv4 v4 = { .type = IBV_FLOW_SPEC_IPV4, .size = sizeof(v4) };
	struct ibv_flow_spec_ipv6 v6 = { .type = IBV_FLOW_SPEC_IPV6, .size = sizeof(v6) };

	if (vmh_ip_is4(addr)) {
		v4.val.dst_ip = vmh_ip_v4(addr);
		memset(&v4.mask.dst_ip, 0xff, 4);
		v4.val.src_ip = vmh_ip_v4(&m->raddr);
		memset(&v4.mask.src_ip, 0xff, from * 4);
		put(s, &v4, sizeof(v4));
		return;
	}
	memcpy(v6.val.dst_ip, addr->b, 16);
	memset(v6.mask.dst_ip, 0xff, 16);
	memcpy(v6.val.src_ip, m->raddr.b, from * 16);
	memset(v6.mask.src_ip, 0xff, from * 16);
	put(s, &v6, sizeof(v6));
}

static void put_ports(struct spec *s, const struct match *m)
{
	struct ibv_flow_spec_tcp_udp ports = {
		.type = m->proto == IPPROTO_TCP ? IBV_FLOW_SPEC_TCP : IBV_FLOW_SPEC_UDP,
		.size = sizeof(ports),
		.val.dst_port = m->lport,
		.mask.dst_port = 0xffff,
	};

	if (m->kind == VMH_FLOW_5T) {
		ports.val.src_port = m->rport;
		ports.mask.src_port = 0xffff;
	}
	put(s, &ports, sizeof(ports));
}

/* VMA_ETH_MC_L2_ONLY_RULES: of a group only the Ethernet address; what it brings besides is sorted out here. */
static bool by_mac(const struct match *m)
{
	return m->kind == VMH_FLOW_MC && vmh_params.eth_mc_l2_only_rules;
}

static void fill(struct spec *s, const struct verbs_ring *x, const struct vflow *v, const struct vmh_ip *addr, bool tagged)
{
	struct ibv_flow_spec_action_tag tag = { .type = IBV_FLOW_SPEC_ACTION_TAG, .size = sizeof(tag), .tag_id = v->tag };

	memset(s, 0, sizeof(*s));
	s->attr.type = IBV_FLOW_ATTR_NORMAL;
	s->attr.size = offsetof(struct spec, rest);
	s->attr.priority = v->f.kind == VMH_FLOW_5T ? PRIORITY_5T : PRIORITY_OTHER;
	s->attr.num_of_specs = 1;
	s->attr.port = x->dev->port;
	s->eth.type = IBV_FLOW_SPEC_ETH;
	s->eth.size = sizeof(s->eth);
	if (v->f.kind == VMH_FLOW_MC)
		group_mac(s->eth.val.dst_mac, vmh_ip_v4(addr));
	else
		memcpy(s->eth.val.dst_mac, x->r.mac, 6);
	memset(s->eth.mask.dst_mac, 0xff, 6);
	s->eth.val.ether_type = htons(vmh_ip_is4(addr) ? 0x0800 : 0x86dd);
	s->eth.mask.ether_type = 0xffff;
	if (x->dev->soft) /* mlx5 takes any VLAN in the mask for the demand of a tag */
		s->eth.mask.vlan_tag = htons(VID_BITS);
	if (!by_mac(&v->f)) {
		put_ip(s, &v->f, addr);
		put_ports(s, &v->f);
	}
	if (tagged)
		put(s, &tag, sizeof(tag));
}

static struct ibv_flow *create(struct verbs_ring *x, const struct vflow *v, const struct vmh_ip *addr)
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

static bool same_match(const struct match *a, const struct match *b)
{
	if (by_mac(a) && by_mac(b))
		return true;
	return a->kind == b->kind && a->proto == b->proto && a->lport == b->lport && a->rport == b->rport &&
	       vmh_ip_same(&a->raddr, &b->raddr);
}

static bool same_address(const struct match *m, const struct vmh_ip *a, const struct vmh_ip *b)
{
	return vmh_ip_same(a, b) || (by_mac(m) && !((ntohl(vmh_ip_v4(a)) ^ ntohl(vmh_ip_v4(b))) & GROUP_MAC_BITS));
}

/* A second rule that matches the same frames: some devices refuse it, others would send each frame to the QP twice.
 * One is enough, as whatever comes is delivered to all sockets that it is for. */
static bool is_covered(const struct verbs_ring *x, const struct vflow *v, const struct vmh_ip *addr)
{
	for (const struct vflow *o = flows; o; o = o->next) {
		if (o == v || !same_match(&o->f, &v->f))
			continue;
		for (const struct rule *r = o->rules; r; r = r->next)
			if (r->ring->r.ifindex == x->r.ifindex && same_address(&v->f, &r->addr, addr))
				return true;
	}
	return false;
}

/* 0, or the errno. */
static int add_rule(struct verbs_ring *x, struct vflow *v, const struct vmh_ip *addr)
{
	char text[INET6_ADDRSTRLEN];
	struct rule *r;

	if (is_covered(x, v, addr)) {
		why = EEXIST;
		incomplete = true;
		return why;
	}
	r = vmh_heap_get(sizeof(*r));
	if (r)
		r->flow = create(x, v, addr);
	if (!r || !r->flow) {
		why = !r ? ENOMEM : errno ? errno : EIO;
		vmh_debug("no flow rule for %s:%u on %s: %s", inet_ntop(AF_INET6, addr->b, text, sizeof(text)),
			  ntohs(v->f.lport), x->dev->name, strerror(why));
		vmh_heap_free(r);
		incomplete = true;
		return why;
	}
	r->ring = x;
	r->addr = *addr;
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
	vmh_heap_free(r);
}

/* A rule that no frame meets: a loopback address is on no wire. */
int vmh_verbs_try_rule(struct verbs_ring *x)
{
	const struct vflow v = { .f = { .kind = VMH_FLOW_3T, .proto = IPPROTO_UDP, .lport = htons(9) } };
	const struct vmh_ip loopback = vmh_ip4(htonl(INADDR_LOOPBACK));
	struct ibv_flow *flow;

	errno = 0;
	flow = create(x, &v, &loopback);
	if (flow)
		ibv_destroy_flow(flow);
	else if (errno != EEXIST) /* another program tries just now */
		return errno ? -errno : -EIO;
	return 0;
}

/* ---- what a flow asks of a ring ---- */

static bool has(const struct vmh_ip *addrs, int n, const struct vmh_ip *a)
{
	while (n--)
		if (vmh_ip_same(&addrs[n], a))
			return true;
	return false;
}

static int addresses(unsigned ifindex, struct vmh_ip *out)
{
	in_addr_t v4[ADDRS];
	int n = vmh_net_addrs(ifindex, v4, ADDRS);

	for (int i = 0; i < n; i++)
		out[i] = vmh_ip4(v4[i]);
	return n;
}

static void sync_ring(struct vflow *v, struct verbs_ring *x)
{
	struct vmh_ip wanted[ADDRS] = { v->f.laddr }, there[ADDRS];
	int n = 1, m = 0, err = 0;

	if (v->f.ifindex && v->f.ifindex != x->r.ifindex)
		return;
	if (vmh_lane_ring(x->r.ifindex, v->f.lane) != &x->r)
		n = 0; /* another ring carries it by now */
	else if (vmh_ip_any(&v->f.laddr))
		n = addresses(x->r.ifindex, wanted);
	for (struct rule **at = &v->rules; *at;) {
		struct rule *r = *at;

		if (r->ring == x && !has(wanted, n, &r->addr)) {
			remove_rule(at);
			continue;
		}
		if (r->ring == x && m < ADDRS)
			there[m++] = r->addr;
		at = &r->next;
	}
	for (int i = 0; i < n; i++)
		if (!has(there, m, &wanted[i])) {
			int e = add_rule(x, v, &wanted[i]);

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
		any = any || vmh_lane_ring(r->ifindex, v->f.lane) == r;
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
	vmh_heap_free(v);
}

static unsigned attach(const struct match *m, struct vmh_sock *s)
{
	struct vflow *v;
	unsigned reason = 0;
	bool concerned;
	int saved = errno;

	if (!vmh_ibv.create_qp || (m->ifindex && !vmh_verbs_any()))
		return 0;
	v = vmh_heap_zero(1, sizeof(*v));
	if (!v)
		return VMH_R_VERBS_FAILED;
	v->f = *m;
	vmh_lock(&lock);
	v->tag = s ? tag_new(s) : 0;
	v->next = flows;
	VMH_SET(flows, v);
	concerned = sync_rings(v);
	/* where it is only one more rule of this process that stands in the way, that one goes soon */
	if (concerned && !v->rules && why != EEXIST && !vmh_ip_any(&m->laddr))
		reason = VMH_R_VERBS_FAILED;
	if (reason || (!concerned && m->ifindex))
		drop(&flows);
	vmh_unlock(&lock);
	errno = saved;
	return reason;
}

unsigned vmh_verbs_attach(const struct vmh_flow *f, struct vmh_sock *s)
{
	const struct match m = { .id = f->id, .kind = f->kind, .ifindex = f->ifindex, .lane = f->lane,
				 .proto = IPPROTO_UDP,
				 .laddr = vmh_ip4(f->laddr), .raddr = vmh_ip4(f->raddr), .lport = f->lport,
				 .rport = f->rport };

	return attach(&m, s);
}

unsigned vmh_verbs_attach_tcp(uint32_t flow_id, const struct vmh_msg_attach *req)
{
	const struct match m = { .id = flow_id, .kind = req->kind, .ifindex = req->ifindex, .lane = req->lane,
				 .proto = IPPROTO_TCP,
				 .laddr = vmh_ip6(req->local_addr), .raddr = vmh_ip6(req->remote_addr),
				 .lport = req->local_port, .rport = req->remote_port };

	return attach(&m, NULL);
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

/* That of the flow which steers one connection, or all of its port, if `of` is NULL. */
static struct vflow **of_flow(uint32_t flow_id, const struct vmh_verbs_peer *of)
{
	struct vflow **at = &flows;

	for (; *at; at = &(*at)->next) {
		const struct match *m = &(*at)->f;

		if (m->id == flow_id && (of ? m->kind == VMH_FLOW_5T && m->rport == of->port && vmh_ip_same(&m->raddr, &of->addr)
					    : m->kind == VMH_FLOW_3T))
			break;
	}
	return at;
}

static void narrow(struct vflow *port, const struct vmh_verbs_peer *peers, unsigned n)
{
	for (unsigned i = 0; i < n; i++) {
		struct vflow *v = vmh_heap_zero(1, sizeof(*v));

		if (!v)
			return;
		v->f = port->f;
		v->f.kind = VMH_FLOW_5T;
		v->f.raddr = peers[i].addr;
		v->f.rport = peers[i].port;
		v->next = flows;
		VMH_SET(flows, v);
		sync_rings(v);
	}
}

void vmh_verbs_narrow(uint32_t flow_id, const struct vmh_verbs_peer *gone, const struct vmh_verbs_peer *left, unsigned n)
{
	struct vflow **port, **one;
	int saved = errno;

	if (!vmh_ibv.create_qp)
		return;
	vmh_lock(&lock);
	port = of_flow(flow_id, NULL);
	if (*port) {
		narrow(*port, left, n);
		drop(of_flow(flow_id, NULL));
	}
	one = of_flow(flow_id, gone);
	if (*one)
		drop(one);
	vmh_unlock(&lock);
	errno = saved;
}

void vmh_verbs_ring_opened(void)
{
	vmh_lock(&lock);
	sync_all(); /* of its lane's flows another ring may have had the rules */
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
		if ((*at)->f.ifindex == x->r.ifindex &&
		    ((*at)->f.lane == x->r.lane || !vmh_lane_ring(x->r.ifindex, (*at)->f.lane)))
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
	for (uint32_t i = 0; i < tags_used; i++)
		atomic_store_explicit(&tags[i], NULL, memory_order_relaxed);
	tags_used = 0;
}
