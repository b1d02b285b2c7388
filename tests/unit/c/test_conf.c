/* Parser and questions of libvma.conf: cases by hand, then the same texts cut and mangled. */
#include "check.h"
#include "vmh_conf_rules.h"
#include <arpa/inet.h>
#include <stdlib.h>
#include <string.h>

static struct vmh_conf conf;
static struct vmh_conf_error err;

static const struct bad {
	const char *text;
	unsigned line;
	const char *token, *what;
} bads[] = {
	{ "usse os udp_connect *:53", 1, "usse", "statement" },
	{ "use\n", 1, "end of line", "transport" },
	{ "use tcp udp_connect *:53", 1, "tcp", "transport" },
	{ "# c\n\nuse os udp_reciever *:53", 3, "udp_reciever", "role" },
	{ "use OS udp_receiver *:53", 1, "OS", "transport" },
	{ "use os udp_receiver 10.0.0:53", 1, "10.0.0", "address" },
	{ "use os udp_receiver 10.0.0.256:53", 1, "10.0.0.256", "address" },
	{ "use os udp_receiver 10.0.0.01:53", 1, "10.0.0.01", "address" },
	{ "use os udp_receiver 10.0.0.1/:53", 1, "10.0.0.1/", "address" },
	{ "use os udp_receiver 10.0.0.1/08:53", 1, "10.0.0.1/08", "address" },
	{ "use os udp_receiver 10.0.0.1/-1:53", 1, "10.0.0.1/-1", "address" },
	{ "use os udp_receiver fe80::1:53", 1, "fe80::1:53", "IPv6" },
	{ "use os tcp_client ::1:80:*:*", 1, "::1:80:*:*", "IPv6" },
	{ "use os tcp_server [2001:db8::/32]:80-90 # x", 1, "[2001:db8::/32]:80-90", "IPv6" },
	{ "use os tcp_client\t[::]:*\r\n", 1, "[::]:*", "IPv6" },
	{ "use os tcp_client ::ffff:10.0.0.1:80", 1, "::ffff:10.0.0.1:80", "IPv6" },
	{ "use os tcp_client *:80:fe80:0:0:0:1:2:3:4:7", 1, "fe80:0:0:0:1:2:3:4:7", "IPv6" },
	{ "use os tcp_client [:1", 1, "[:1", "IPv6" },
	{ "use os tcp_client :1", 1, ":", "address" },
	{ "use os tcp_client ab:1:cd:2", 1, "ab", "address" },
	{ "use os udp_receiver b\xfcro:53", 1, "b\xfcro", "address" },
	{ "use os udp_receiver 10.0.0.1", 1, "end of line", "':'" },
	{ "use os udp_receiver 10.0.0.1 53", 1, "53", "':'" },
	{ "use os udp_receiver 10.0.0.1:", 1, "end of line", "port" },
	{ "use os udp_receiver *:65536", 1, "65536", "port" },
	{ "use os udp_receiver *:053", 1, "053", "port" },
	{ "use os udp_receiver *:9-8", 1, "9-8", "port" },
	{ "use os udp_receiver *:-8", 1, "-8", "port" },
	{ "use os udp_receiver *:8-", 1, "8-", "port" },
	{ "use os udp_receiver *:8 - # 9", 1, "8-", "port" },
	{ "use os udp_receiver *:8 - : 9:9", 1, "8-", "port" },
	{ "use os udp_receiver *:8 - 9 - 10", 1, "8-9-10", "port" },
	{ "use os udp_receiver 10.0.0.1 / 8 / 9:1", 1, "10.0.0.1/8/9", "address" },
	{ "use os udp_receiver *:1 - 22222222222222222222222222222222222222222222222222222222222222", 1,
	  "22222222222222222222222222222222222222222222222222222222222222", "63 letters" },
	{ "use os udp_receiver *:99999999999999999999", 1, "99999999999999999999", "port" },
	{ "use os udp_receiver *:53:*:99999", 1, "99999", "port" },
	{ "use os udp_receiver *:53:*:*:*", 1, ":", "statement" },
	{ "use os udp_connect *:53:*", 1, "end of line", "':'" },
	{ "use os udp_connect *:53 extra", 1, "extra", "statement" },
	{ "application-id ping\nuse os udp_connect *:1", 1, "end of line", "program name" },
	{ "log destination printer", 1, "printer", "destination" },
	{ "log destination file", 1, "end of line", "name of a file" },
	{ "log min-level high", 1, "high", "level" },
	{ "\001\033[31m", 1, "?" "?[31m", "statement" },
	{ "application-id xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx 1", 1,
	  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx", "63 letters" },
};

static const char good[] =
	"# the file that the peer ships, and every word of the manual\n"
	"log destination stderr min-level 3\n"
	"log destination syslog\nlog destination file /tmp/x.log min-level 1\nlog\nlog destination ystderr\n"
	"log min-level 9 destination yfile x\n"
	"use os udp_receiver 224.0.0.1:5353\t# rules before any id are for all\n"
	"application-id ping* feed\r\n"
	"use vma udp_receiver 10.1.1.7 / 24 : 1000 - 2000\r\n"
	"use os udp_receiver 10.1.1.0/\t16:*\n"
	"use os udp_connect *:53\n"
	"use os udp_connect 10.2.0.0 /16:1- 10:10.3.0.1:7\n"
	"use sdp tcp_server *:1\nuse sa tcp_client *:1:*:*\n"
	"use * tcp_server *:80\nuse os tcp_server *:*\n"
	"use os udp_sender 239.0.0.0/8 : 5000 -5005# x\n"
	"application-id other *\n"
	"use os udp_sender *:*\n"
	"application-id ping* feed\n"
	"use os tcp_client 10.9.9.9/99:1-1\n"
	"   use   os   udp_connect 1.1.1.1/0:9   # no newline at the end";

static uint32_t ip(const char *a) { return inet_addr(a); }

static int answer(int block, int role, const char *a, unsigned port, const char *b, unsigned port2)
{
	const struct vmh_conf_rule *r = vmh_conf_match(&conf, block, role, ip(a), htons((uint16_t)port), ip(b),
						       htons((uint16_t)port2));

	return r ? r->os : -1;
}

static void answers(void)
{
	const char *any = "0.0.0.0";
	int b, all;

	CHECK(vmh_conf_parse(good, &conf, &err) == 0, "line %u: %s: %s", err.line, err.what, err.token);
	CHECK(conf.nblocks == 3, "%u", conf.nblocks);
	CHECK(conf.nrules == 11, "%u", conf.nrules);
	all = vmh_conf_block_of(&conf, "ping", "feed");
	CHECK(all == 0, "the first block is for all programs, and decides: %d", all);
	CHECK(answer(0, VMH_CONF_UDP_RECEIVER, "224.0.0.1", 5353, any, 0) == 1, "group");
	CHECK(answer(0, VMH_CONF_UDP_RECEIVER, "10.1.5.1", 9, any, 0) == -1, "later blocks are not asked");
	b = 1;
	CHECK(!strcmp(conf.blocks[b].program, "ping*") && !strcmp(conf.blocks[b].id, "feed"), "block");
	CHECK(answer(b, VMH_CONF_UDP_RECEIVER, "10.1.1.200", 1000, any, 0) == 0, "the address is masked: vma");
	CHECK(answer(b, VMH_CONF_UDP_RECEIVER, "10.1.1.200", 2000, any, 0) == 0, "end of the range");
	CHECK(answer(b, VMH_CONF_UDP_RECEIVER, "10.1.1.200", 2001, any, 0) == 1, "the second rule: os");
	CHECK(answer(b, VMH_CONF_UDP_RECEIVER, "10.2.1.200", 1500, any, 0) == -1, "no rule");
	CHECK(answer(b, VMH_CONF_UDP_RECEIVER, any, 1500, any, 0) == -1, "no address");
	CHECK(answer(b, VMH_CONF_UDP_CONNECT, "9.9.9.9", 53, "1.2.3.4", 99) == 1, "any local end");
	CHECK(answer(b, VMH_CONF_UDP_CONNECT, "10.2.3.4", 10, "10.3.0.1", 7) == 1, "both ends");
	CHECK(answer(b, VMH_CONF_UDP_CONNECT, "10.2.3.4", 10, "10.3.0.1", 8) == -1, "local port");
	CHECK(answer(b, VMH_CONF_UDP_CONNECT, "10.2.3.4", 10, "10.3.0.2", 7) == -1, "local address");
	CHECK(answer(b, VMH_CONF_UDP_CONNECT, "8.8.8.8", 9, any, 1) == 1, "a mask of 0 bits is any address");
	CHECK(answer(b, VMH_CONF_TCP_SERVER, any, 80, any, 0) == 0, "* is vma");
	CHECK(answer(b, VMH_CONF_TCP_SERVER, any, 1, any, 0) == 1, "sdp never matches");
	CHECK(answer(b, VMH_CONF_TCP_CLIENT, "10.9.9.9", 1, any, 0) == 1, "a block opened again; 99 bits are 32");
	CHECK(answer(b, VMH_CONF_TCP_CLIENT, "10.9.9.8", 1, any, 0) == -1, "32 bits");
	CHECK(answer(b, VMH_CONF_UDP_SENDER, "239.1.2.3", 5005, any, 0) == 1, "blanks beside the colon");
	CHECK(answer(-1, VMH_CONF_UDP_SENDER, "239.1.2.3", 5005, any, 0) == -1, "no block");
	CHECK(conf.rules[0].line == 8, "%u", conf.rules[0].line);
	CHECK(conf.nnotices == 1 && conf.notices[0].line == 22, "%u of line %u", conf.nnotices, conf.notices[0].line);
	CHECK(!strcmp(conf.notices[0].token, "10.9.9.9/99") && strstr(conf.notices[0].what, "using 32"), "%s: %s",
	      conf.notices[0].what, conf.notices[0].token);
}

static void blocks(void)
{
	static const char text[] = "application-id a?c 1\napplication-id [xy]* *\napplication-id * 7\n";

	CHECK(vmh_conf_parse(text, &conf, &err) == 0, "%s", err.what);
	CHECK(vmh_conf_block_of(&conf, "abc", "1") == 0, "?");
	CHECK(vmh_conf_block_of(&conf, "abc", "*") == 0, "an id * of the program matches every block");
	CHECK(vmh_conf_block_of(&conf, "abc", "2") == -1, "id");
	CHECK(vmh_conf_block_of(&conf, "yes", "VMA_DEFAULT_APPLICATION_ID") == 1, "[]");
	CHECK(vmh_conf_block_of(&conf, "zed", "7") == 2, "* 7");
	CHECK(vmh_conf_parse("", &conf, &err) == 0 && vmh_conf_block_of(&conf, "x", "y") == -1, "empty");
	CHECK(vmh_conf_parse("use sdp tcp_server *:*\napplication-id a b\nuse os tcp_client *:*\n", &conf, &err) == 0 &&
	      vmh_conf_block_of(&conf, "a", "b") == 0 && conf.rules[0].block == 1, "any rule before the first id opens * *");
	CHECK(vmh_conf_parse("#", &conf, &err) == 0 && !conf.nblocks && !conf.nrules, "comment");
}

static void limits(void)
{
	static char text[(VMH_CONF_RULES + 2) * 32];
	unsigned i;
	char *at = text;

	for (i = 0; i < VMH_CONF_RULES; i++)
		at += sprintf(at, "use os udp_sender *:%u\n", i);
	CHECK(vmh_conf_parse(text, &conf, &err) == 0 && conf.nrules == VMH_CONF_RULES, "%s", err.what);
	sprintf(at, "use os udp_sender *:1\n");
	CHECK(vmh_conf_parse(text, &conf, &err) == -1 && err.line == VMH_CONF_RULES + 1, "%u", err.line);
	for (i = 0, at = text; i < VMH_CONF_BLOCKS; i++)
		at += sprintf(at, "application-id p %u\n", i);
	CHECK(vmh_conf_parse(text, &conf, &err) == 0, "%s", err.what);
	sprintf(at, "application-id p more\n");
	CHECK(vmh_conf_parse(text, &conf, &err) == -1 && err.line == VMH_CONF_BLOCKS + 1, "%u", err.line);
}

/* The copy ends where its memory ends, so that the sanitizer sees a step too far. */
static void parse_copy(const char *from, size_t n)
{
	char *copy = malloc(n + 1);

	memcpy(copy, from, n);
	copy[n] = 0;
	if (vmh_conf_parse(copy, &conf, &err) == 0) {
		CHECK(conf.nrules <= VMH_CONF_RULES && conf.nblocks <= VMH_CONF_BLOCKS, "bounds");
		for (unsigned i = 0; i < conf.nrules; i++)
			CHECK(conf.rules[i].block < conf.nblocks && conf.rules[i].role <= VMH_CONF_UDP_CONNECT, "rule");
		vmh_conf_match(&conf, vmh_conf_block_of(&conf, "ping", "feed"), VMH_CONF_UDP_SENDER, 1, 2, 3, 4);
	} else {
		CHECK(err.line >= 1 && err.what[0] && err.token[0], "an error says what");
	}
	free(copy);
}

static void mangled(void)
{
	static const char letters[] = " \t\n\r#:*/-.0129xu\001\377";
	char text[sizeof(good) + 8];
	unsigned round, i, k;

	for (i = 0; i < sizeof(good); i++)
		parse_copy(good, i);
	srand(1);
	for (round = 0; round < 20000; round++) {
		size_t n = sizeof(good) - 1;

		memcpy(text, good, n);
		for (k = 1 + (unsigned)rand() % 4; k; k--) {
			size_t at = (size_t)rand() % n;

			if (rand() % 3) {
				text[at] = letters[(size_t)rand() % (sizeof(letters) - 1)];
			} else { /* a piece from elsewhere */
				size_t from = (size_t)rand() % n, len = (size_t)rand() % 12;

				len = from + len > n ? n - from : at + len > n ? n - at : len;
				memmove(text + at, text + from, len + at > n ? n - at : len);
			}
		}
		parse_copy(text, n - (size_t)rand() % 50);
	}
}

int main(void)
{
	for (unsigned i = 0; i < sizeof(bads) / sizeof(bads[0]); i++) {
		const struct bad *b = &bads[i];

		CHECK(vmh_conf_parse(b->text, &conf, &err) == -1, "%s", b->text);
		CHECK(err.line == b->line && !strcmp(err.token, b->token) && strstr(err.what, b->what),
		      "%s: line %u, %s: \"%s\"", b->text, err.line, err.what, err.token);
	}
	answers();
	blocks();
	limits();
	mangled();
	return check_result();
}
