/* See vmh_conf.h. Two sets of rules: one in use, one that a changed file is read into. */
#include "vmh_conf.h"
#include "vmh_fd.h"
#include "vmh_lock.h"
#include "vmh_log.h"
#include "vmh_params.h"
#include <arpa/inet.h>
#include <fcntl.h>
#include <stdio.h>

#define TEXT 65536
#define LOOK_NS 1000000u /* at the file, by programs that open connection after connection */

static struct vmh_lock lock;  /* a leaf: guards all below, taken with any other lock held */
static struct vmh_conf sets[2];
static unsigned current;      /* of sets */
static int block = -1;        /* of the current set, which decides for this program; -1: none */
static bool loaded;
static bool any_tcp;          /* some rule of the file has a policy of its own */
static struct stat seen;      /* the file as it was read, right or wrong */
static int seen_err = -ENODATA; /* not looked yet */
static char text[TEXT];

static bool changed(const struct stat *now)
{
	if (S_ISDIR(now->st_mode) && now->st_ino == seen.st_ino && now->st_dev == seen.st_dev)
		return false; /* what comes and goes in it is no news */
	return now->st_ino != seen.st_ino || now->st_dev != seen.st_dev || now->st_size != seen.st_size ||
	       now->st_mtim.tv_sec != seen.st_mtim.tv_sec || now->st_mtim.tv_nsec != seen.st_mtim.tv_nsec ||
	       now->st_ctim.tv_sec != seen.st_ctim.tv_sec || now->st_ctim.tv_nsec != seen.st_ctim.tv_nsec;
}

/* Another look tells nothing new while the file is the same. What kept us from it otherwise may have gone without that. */
static bool is_its_own(int err)
{
	return !err || err == -EISDIR || err == -EINVAL || err == -EFBIG;
}

static void unreadable(int err)
{
	const char *path = vmh_params.config_file, *now = loaded ? "The rules stay as they were" : "No rules apply";

	if (err == -EISDIR)
		vmh_warn("Configuration file %s is a directory: give the name of a file in VMA_CONFIG_FILE. %s", path, now);
	else if (err == -EINVAL && !S_ISREG(seen.st_mode))
		vmh_warn("Configuration file %s is not a regular file. %s", path, now);
	else if (err == -EINVAL)
		vmh_warn("Configuration file %s is no text: there is a zero byte in it. %s", path, now);
	else if (err == -EFBIG)
		vmh_warn("Configuration file %s is longer than %d bytes. %s", path, TEXT - 1, now);
	else
		vmh_warn("Configuration file %s can't be read: %s. %s", path, strerrorname_np(-err), now);
}

/* By default there may be none. */
static void missing(void)
{
	if (loaded)
		vmh_warn("%s is gone: no rules of libvma.conf apply", vmh_params.config_file);
	else if (vmh_params_origin(VMH_PARAM_CONFIG_FILE) != VMH_FROM_DEFAULT)
		unreadable(-ENOENT);
	block = -1;
	VMH_SET(loaded, false);
}

static const char *end_text(const struct vmh_conf_end *e, char *out, size_t size)
{
	char addr[INET_ADDRSTRLEN + 4] = "*", ports[16] = "*";
	int bits = __builtin_popcount(e->mask);

	if (bits) {
		inet_ntop(AF_INET, &e->addr, addr, sizeof(addr));
		if (bits < 32)
			snprintf(addr + strlen(addr), 4, "/%d", bits);
	}
	if (e->low || e->high != 65535)
		snprintf(ports, sizeof(ports), e->low == e->high ? "%u" : "%u-%u", e->low, e->high);
	snprintf(out, size, "%s:%s", addr, ports);
	return out;
}

static void tell_rules(const struct vmh_conf *c, unsigned of, enum vmh_conf_role role)
{
	bool tcp = role <= VMH_CONF_TCP_CLIENT, both = role == VMH_CONF_TCP_CLIENT || role == VMH_CONF_UDP_CONNECT;
	char first[48], second[48];

	for (unsigned i = 0; i < c->nrules; i++) {
		const struct vmh_conf_rule *r = &c->rules[i];

		if (r->block != of || r->role != role)
			continue;
		vmh_debug("\t\t\tuse %s %s %s%s%s",
			  r->os ? "os" : !r->tcp ? "vma" : r->tcp == 1 ? "adaptive" : "offload", tcp ? "tcp" : "udp",
			  end_text(&r->first, first, sizeof(first)), both ? " " : "",
			  both ? end_text(&r->second, second, sizeof(second)) : "");
	}
}

/* As libvma prints them. */
static void tell(const struct vmh_conf *c)
{
	static const struct { enum vmh_conf_role role; const char *title; } parts[] = {
		{ VMH_CONF_TCP_SERVER, "tcp_server's" }, { VMH_CONF_TCP_CLIENT, "tcp_client's" },
		{ VMH_CONF_UDP_RECEIVER, "udp receiver" }, { VMH_CONF_UDP_SENDER, "udp sender" },
		{ VMH_CONF_UDP_CONNECT, "udp connect" },
	};

	vmh_debug("Configuration File:");
	for (unsigned b = 0; b < c->nblocks; b++) {
		vmh_debug("application-id %s %s:", c->blocks[b].program, c->blocks[b].id);
		for (unsigned i = 0; i < sizeof(parts) / sizeof(parts[0]); i++) {
			vmh_debug("\t%s rules:", parts[i].title);
			tell_rules(c, b, parts[i].role);
		}
	}
}

static void take(struct vmh_conf *fresh)
{
	bool asked = vmh_params_origin(VMH_PARAM_APPLICATION_ID) != VMH_FROM_DEFAULT;

	for (unsigned i = 0; i < fresh->nnotices; i++)
		vmh_warn("%s:%u: %s: \"%s\"", vmh_params.config_file, fresh->notices[i].line, fresh->notices[i].what,
			 fresh->notices[i].token);
	if (fresh->log_line)
		vmh_log(VMH_LOG_DETAILS, "%s:%u: log has no effect: VMA_TRACELEVEL and VMA_LOG_FILE say what is logged, and where",
			vmh_params.config_file, fresh->log_line);
	block = vmh_conf_block_of(fresh, program_invocation_short_name, vmh_params.application_id);
	if (block < 0 && asked)
		vmh_warn("requested VMA_APPLICATION_ID does not exist in the configuration file");
	current = !current;
	VMH_SET(any_tcp, false);
	for (unsigned i = 0; i < fresh->nrules; i++)
		if (fresh->rules[i].tcp)
			VMH_SET(any_tcp, true);
	VMH_SET(loaded, true);
	vmh_debug("%s: %u rules in %u blocks, block %d is for %s", vmh_params.config_file, fresh->nrules,
		  fresh->nblocks, block, program_invocation_short_name);
	if (atomic_load(&vmh_log_level_now) >= VMH_LOG_DEBUG)
		tell(fresh);
}

/* The file is as in now, which is NULL where there is none. */
static void load(int err, const struct stat *now)
{
	struct vmh_conf_error error;
	bool told;

	if (!err)
		err = vmh_file_load(vmh_params.config_file, text, sizeof(text), NULL);
	told = err && err == seen_err && (!now || !changed(now));
	seen_err = err;
	if (now)
		seen = *now;
	if (told)
		return;
	if (err == -ENOENT)
		missing();
	else if (err)
		unreadable(err);
	else if (vmh_conf_parse(text, &sets[!current], &error) == 0)
		take(&sets[!current]);
	else
		vmh_error("%s:%u: %s: \"%s\". %s", vmh_params.config_file, error.line, error.what, error.token,
			  loaded ? "The rules stay as they were" : "No rule of it applies");
}

void vmh_conf_refresh(void)
{
	static uint64_t looked;
	struct stat now;
	int err;

	if (!vmh_params.config_file[0] || !vmh_due(&looked, vmh_now_ns(), LOOK_NS))
		return;
	vmh_lock(&lock);
	err = (int)vmh_sys(SYS_newfstatat, AT_FDCWD, vmh_params.config_file, &now, 0);
	if (err || !is_its_own(seen_err) || changed(&now))
		load(err, err ? NULL : &now);
	vmh_unlock(&lock);
}

/* The rule that decides: os and tcp of it; both 0 where there is none. */
static struct vmh_conf_rule decides(enum vmh_conf_role role, uint32_t addr, uint16_t port, uint32_t addr2, uint16_t port2)
{
	const struct vmh_conf_rule *r = NULL;
	struct vmh_conf_rule copy = { 0 };

	if (!VMH_GET(loaded))
		return copy;
	vmh_lock(&lock);
	if (block >= 0)
		r = vmh_conf_match(&sets[current], block, (int)role, addr, port, addr2, port2);
	if (r)
		copy = *r;
	vmh_unlock(&lock);
	return copy;
}

unsigned vmh_conf_keeps(enum vmh_conf_role role, uint32_t addr, uint16_t port, uint32_t addr2, uint16_t port2)
{
	static const char *const names[] = {
		[VMH_CONF_TCP_SERVER] = "TCP SERVER (LISTEN)", [VMH_CONF_TCP_CLIENT] = "TCP CLIENT (CONNECT)",
		[VMH_CONF_UDP_SENDER] = "UDP SENDER", [VMH_CONF_UDP_RECEIVER] = "UDP RECEIVER",
		[VMH_CONF_UDP_CONNECT] = "UDP CONNECT",
	};
	bool os = decides(role, addr, port, addr2, port2).os;

	if (VMH_GET(loaded))
		vmh_debug("MATCH %s: => %s", names[role], os ? "OS" : "VMA");
	return os ? VMH_R_CONF_RULE : 0;
}

int vmh_conf_tcp(enum vmh_conf_role role, uint32_t addr, uint16_t port, uint32_t addr2, uint16_t port2)
{
	struct vmh_conf_rule r = { 0 };

	if (vmh_conf_any_tcp())
		r = decides(role, addr, port, addr2, port2);
	return r.tcp ? r.tcp : -1;
}

bool vmh_conf_any_tcp(void)
{
	return VMH_GET(loaded) && VMH_GET(any_tcp);
}

void vmh_conf_fork_child(void)
{
	vmh_lock_reset(&lock); /* a thread of the parent may have held it; what it wrote is not in use */
}
