/* See vmh_conf_rules.h. One cursor over the text; a word ends at a blank, a colon, a comment or the line. */
#include "vmh_conf_rules.h"
#include <arpa/inet.h>
#include <fnmatch.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define COUNT(array) (sizeof(array) / sizeof((array)[0]))

struct cursor {
	const char *at;
	uint32_t line;
	struct vmh_conf *out;
	struct vmh_conf_error *err;
	int block; /* that rules go to; -1: none yet */
};

static const char *const roles[] = {
	[VMH_CONF_TCP_SERVER] = "tcp_server",     [VMH_CONF_TCP_CLIENT] = "tcp_client",
	[VMH_CONF_UDP_SENDER] = "udp_sender",     [VMH_CONF_UDP_RECEIVER] = "udp_receiver",
	[VMH_CONF_UDP_CONNECT] = "udp_connect",
};

static bool blank(char c)
{
	return c == ' ' || c == '\t' || c == '\r';
}

static void skip_blanks(struct cursor *c)
{
	while (blank(*c->at))
		c->at++;
	if (*c->at == '#')
		c->at += strcspn(c->at, "\n");
}

static void tell(const struct cursor *c, struct vmh_conf_error *e, const char *what, const char *token)
{
	e->line = c->line;
	snprintf(e->what, sizeof(e->what), "%s", what);
	snprintf(e->token, sizeof(e->token), "%s", *token ? token : "end of line");
	for (char *p = e->token; *p; p++) /* it goes into logs */
		if ((unsigned char)*p < ' ' || *p == 127)
			*p = '?';
}

static int wrong(struct cursor *c, const char *what, const char *token)
{
	tell(c, c->err, what, token);
	return -1;
}

static void notice(struct cursor *c, const char *what, const char *token)
{
	struct vmh_conf *o = c->out;

	if (o->nnotices < VMH_CONF_NOTICES)
		tell(c, &o->notices[o->nnotices++], what, token);
}

/* The next word of the line, empty at its end; -1 where it is too long for any place. */
static int word(struct cursor *c, char out[VMH_CONF_NAME])
{
	size_t n;

	skip_blanks(c);
	n = strcspn(c->at, " \t\r\n#:");
	if (n == 0 && *c->at == ':')
		n = 1;
	snprintf(out, VMH_CONF_NAME, "%.*s", (int)(n < VMH_CONF_NAME ? n : VMH_CONF_NAME - 1), c->at);
	if (n >= VMH_CONF_NAME)
		return wrong(c, "longer than 63 letters", out);
	c->at += n;
	return 0;
}

/* A word, and what the separator joins to it: blanks beside it say nothing ("1.1.1.1 / 24", "80 - 90"). */
static int joined(struct cursor *c, char separator, char out[VMH_CONF_NAME])
{
	char more[VMH_CONF_NAME];
	size_t n;

	if (word(c, out))
		return -1;
	for (;;) {
		skip_blanks(c);
		n = strlen(out);
		if (!n || *c->at == ':' || (*c->at != separator && out[n - 1] != separator))
			return 0;
		if (word(c, more))
			return -1;
		if (!*more)
			return 0;
		if (n + strlen(more) >= VMH_CONF_NAME)
			return wrong(c, "longer than 63 letters", more);
		strcpy(out + n, more);
	}
}

/* Digits without leading zeros, at most `most`. */
static bool number(const char *text, unsigned most, unsigned *out)
{
	unsigned long value = 0;

	if (!*text || (text[0] == '0' && text[1]))
		return false;
	for (; *text; text++) {
		if (*text < '0' || *text > '9')
			return false;
		value = value * 10 + (unsigned)(*text - '0');
		if (value > most)
			return false;
	}
	*out = (unsigned)value;
	return true;
}

/* "a.b.c.d", "a.b.c.d/len" or "*" */
static bool address(struct cursor *c, char *text, struct vmh_conf_end *e)
{
	char *slash = strchr(text, '/');
	unsigned bits = 32, i;
	struct in_addr a;
	bool ok;

	if (!strcmp(text, "*")) {
		e->addr = e->mask = 0;
		return true;
	}
	if (slash)
		*slash = 0;
	ok = inet_pton(AF_INET, text, &a) == 1; /* it refuses leading zeros and short forms */
	if (slash) {
		*slash = '/'; /* the word is named in the message */
		ok = ok && number(slash + 1, 1000000, &bits);
	}
	if (!ok)
		return false;
	if (bits > 32) {
		notice(c, "a prefix of more than 32 bits, using 32", text);
		bits = 32;
	}
	for (i = 0, e->mask = 0; i < bits; i++)
		e->mask |= 1u << (31 - i);
	e->mask = htonl(e->mask);
	e->addr = a.s_addr & e->mask;
	return true;
}

/* "n", "n-m" or "*" */
static bool ports(char *text, struct vmh_conf_end *e)
{
	char *dash = strchr(text, '-');
	unsigned low = 0, high = 65535;
	bool ok = true;

	if (strcmp(text, "*")) {
		if (dash)
			*dash = 0;
		ok = number(text, 65535, &low);
		high = low;
		if (dash) {
			*dash = '-';
			ok = ok && number(dash + 1, 65535, &high) && low <= high;
		}
	}
	e->low = (uint16_t)low;
	e->high = (uint16_t)high;
	return ok;
}

static int colon(struct cursor *c)
{
	char text[VMH_CONF_NAME];

	if (word(c, text))
		return -1;
	return strcmp(text, ":") ? wrong(c, "not ':'", text) : 0;
}

/* [ADDR], or with more colons than a pair of IPv4 addresses with their ports; text: the whole of it, its port as well. */
static bool is_ip6(const char *at, char text[VMH_CONF_NAME])
{
	size_t n = strspn(at, "0123456789abcdefABCDEF:"), all = strcspn(at, " \t\r\n#"), colons = 0;
	bool two = false;

	for (size_t i = 0; i < n; i++) {
		colons += at[i] == ':';
		two = two || (at[i] == ':' && at[i + 1] == ':');
	}
	if (*at != '[' && !two && colons < 6)
		return false;
	snprintf(text, VMH_CONF_NAME, "%.*s", (int)(all < VMH_CONF_NAME ? all : VMH_CONF_NAME - 1), at);
	return true;
}

static int end_of_tuple(struct cursor *c, struct vmh_conf_end *e)
{
	char text[VMH_CONF_NAME];

	skip_blanks(c);
	if (is_ip6(c->at, text))
		return wrong(c, "an IPv6 address: rules have IPv4 addresses, and * is for both", text);
	if (joined(c, '/', text))
		return -1;
	if (!address(c, text, e))
		return wrong(c, "not an address (a.b.c.d, a.b.c.d/bits or *)", text);
	if (colon(c) || joined(c, '-', text))
		return -1;
	return ports(text, e) ? 0 : wrong(c, "not a port (0 to 65535), a range of ports, or *", text);
}

/* The block of the pair, made if it is new; -1 and the error where there is no room. */
static int block(struct cursor *c, const char *program, const char *id)
{
	struct vmh_conf *o = c->out;
	uint32_t i;

	for (i = 0; i < o->nblocks; i++)
		if (!strcmp(o->blocks[i].program, program) && !strcmp(o->blocks[i].id, id))
			return (int)i;
	if (o->nblocks == VMH_CONF_BLOCKS)
		return wrong(c, "more than 64 different application-id lines", program);
	snprintf(o->blocks[i].program, VMH_CONF_NAME, "%s", program);
	snprintf(o->blocks[i].id, VMH_CONF_NAME, "%s", id);
	o->nblocks++;
	return (int)i;
}

static int application_id(struct cursor *c)
{
	char program[VMH_CONF_NAME], id[VMH_CONF_NAME];

	if (word(c, program) || word(c, id))
		return -1;
	if (!program[0] || !id[0])
		return wrong(c, "application-id needs a program name and an id", id);
	c->block = block(c, program, id);
	return c->block < 0 ? -1 : 0;
}

static int role_of(const char *text)
{
	for (unsigned i = 0; i < COUNT(roles); i++)
		if (!strcmp(text, roles[i]))
			return (int)i;
	return -1;
}

static int use(struct cursor *c)
{
	struct vmh_conf_rule r = { .line = c->line, .second = { .high = 65535 } };
	struct vmh_conf_end unused; /* other roles know one end only, and the peer passes a second one by */
	char transport[VMH_CONF_NAME], text[VMH_CONF_NAME];
	bool never, ours, both;
	int role;

	if (word(c, transport) || word(c, text))
		return -1;
	r.os = !strcmp(transport, "os");
	never = !strcmp(transport, "sdp") || !strcmp(transport, "sa");
	r.tcp = !strcmp(transport, "offload") ? 2 : !strcmp(transport, "adaptive");
	ours = r.os || never || r.tcp || !strcmp(transport, "vma") || !strcmp(transport, "*");
	if (!ours)
		return wrong(c, "not a transport (os, vma, offload, adaptive, sdp, sa or *)", transport);
	role = role_of(text);
	if (role < 0)
		return wrong(c, "not a role (tcp_server, tcp_client, udp_sender, udp_receiver, udp_connect)", text);
	if (r.tcp && role != VMH_CONF_TCP_SERVER && role != VMH_CONF_TCP_CLIENT)
		return wrong(c, "offload and adaptive are for tcp_server and tcp_client", text);
	r.role = (uint8_t)role;
	if (end_of_tuple(c, &r.first))
		return -1;
	skip_blanks(c);
	both = role == VMH_CONF_TCP_CLIENT || role == VMH_CONF_UDP_CONNECT;
	if (*c->at == ':' && (colon(c) || end_of_tuple(c, both ? &r.second : &unused)))
		return -1;
	if (c->block < 0)
		c->block = block(c, "*", "*");
	if (c->block < 0)
		return -1;
	if (never)
		return 0;
	if (c->out->nrules == VMH_CONF_RULES)
		return wrong(c, "more than 1024 rules", transport);
	r.block = (uint16_t)c->block;
	c->out->rules[c->out->nrules++] = r;
	return 0;
}

/* Accepted as in the peer: log [destination stderr|syslog|file NAME] [min-level N]. VMA_TRACELEVEL and VMA_LOG_FILE
 * are what acts. The peer's scanner knew some of the words with a y before them only. */
static int log_line(struct cursor *c)
{
	char text[VMH_CONF_NAME];
	unsigned level;

	for (;;) {
		const char *before = c->at;

		if (word(c, text))
			return -1;
		if (!strcmp(text, "destination")) {
			if (word(c, text))
				return -1;
			if (!strcmp(text, "file") || !strcmp(text, "yfile")) {
				if (word(c, text))
					return -1;
				if (!text[0])
					return wrong(c, "no name of a file", text);
			} else if (strcmp(text, "stderr") && strcmp(text, "ystderr") && strcmp(text, "syslog")) {
				return wrong(c, "not a destination (stderr, syslog or file NAME)", text);
			}
		} else if (!strcmp(text, "min-level")) {
			if (word(c, text))
				return -1;
			if (!number(text, 1000, &level))
				return wrong(c, "not a level (a number)", text);
		} else {
			c->at = before;
			return 0;
		}
		if (!c->out->log_line)
			c->out->log_line = c->line;
	}
}

static int statement(struct cursor *c)
{
	static const struct {
		const char *name;
		int (*parse)(struct cursor *c);
	} statements[] = { { "application-id", application_id }, { "use", use }, { "log", log_line } };
	char text[VMH_CONF_NAME];

	if (word(c, text))
		return -1;
	for (unsigned i = 0; i < COUNT(statements); i++)
		if (!strcmp(text, statements[i].name))
			return statements[i].parse(c);
	return wrong(c, "not a statement (application-id, use or log)", text);
}

int vmh_conf_parse(const char *text, struct vmh_conf *out, struct vmh_conf_error *err)
{
	struct cursor c = { .at = text, .line = 1, .out = out, .err = err, .block = -1 };

	memset(err, 0, sizeof(*err));
	out->nblocks = out->nrules = out->nnotices = out->log_line = 0;
	for (;;) {
		skip_blanks(&c);
		if (!*c.at)
			return 0;
		if (*c.at == '\n') {
			c.at++;
			c.line++;
		} else if (statement(&c)) {
			return -1;
		}
	}
}

int vmh_conf_block_of(const struct vmh_conf *c, const char *program, const char *id)
{
	for (uint32_t i = 0; i < c->nblocks; i++) {
		const struct vmh_conf_block *b = &c->blocks[i];

		if (fnmatch(b->program, program, 0) == 0 &&
		    (!strcmp(b->id, "*") || !strcmp(id, "*") || !strcmp(b->id, id)))
			return (int)i;
	}
	return -1;
}

static bool end_matches(const struct vmh_conf_end *e, uint32_t addr, uint16_t port)
{
	port = ntohs(port);
	return (addr & e->mask) == e->addr && port >= e->low && port <= e->high;
}

const struct vmh_conf_rule *vmh_conf_match(const struct vmh_conf *c, int block, int role, uint32_t addr, uint16_t port,
					   uint32_t addr2, uint16_t port2)
{
	for (uint32_t i = 0; i < c->nrules; i++) {
		const struct vmh_conf_rule *r = &c->rules[i];

		if (r->block == block && r->role == role && end_matches(&r->first, addr, port) &&
		    end_matches(&r->second, addr2, port2))
			return r;
	}
	return NULL;
}
