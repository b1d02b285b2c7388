/* The rules of libvma.conf: parsed text and its questions. Plain C that needs nothing of the shim, because the command
 * line checks files with the same code (contracts/build_contracts.py gives it to Python). Grammar and precedence:
 * docs/libvma-conf.md. Addresses and ports are in network order, but the ports of a rule, which are ranges. */
#ifndef VMH_CONF_RULES_H
#define VMH_CONF_RULES_H
#include <stdint.h>

#define VMH_CONF_BLOCKS 64
#define VMH_CONF_RULES 1024
#define VMH_CONF_NAME 64
#define VMH_CONF_NOTICES 16

enum vmh_conf_role {
	VMH_CONF_TCP_SERVER,
	VMH_CONF_TCP_CLIENT,
	VMH_CONF_UDP_SENDER,
	VMH_CONF_UDP_RECEIVER,
	VMH_CONF_UDP_CONNECT,
};

struct vmh_conf_end {
	uint32_t addr, mask; /* of an address that matches: (address & mask) == addr */
	uint16_t low, high;
};

struct vmh_conf_rule {
	uint8_t role, os;    /* os: the kernel; else a ring, if there can be one */
	uint8_t tcp;         /* VMA_HYBRID_TCP of its connections; 0: the program's */
	uint16_t block;
	uint32_t line;
	struct vmh_conf_end first, second;
};

struct vmh_conf_block {
	char program[VMH_CONF_NAME], id[VMH_CONF_NAME]; /* patterns of fnmatch(3); a literal or * */
};

struct vmh_conf_error {
	uint32_t line;
	char what[80], token[VMH_CONF_NAME];
};

struct vmh_conf {
	uint32_t nblocks, nrules, nnotices;
	uint32_t log_line; /* of the first that says something of the log, which does nothing; 0: none */
	struct vmh_conf_block blocks[VMH_CONF_BLOCKS];
	struct vmh_conf_rule rules[VMH_CONF_RULES]; /* in the order of the file */
	struct vmh_conf_error notices[VMH_CONF_NOTICES]; /* what was taken for something else; the first of them */
};

/* 0, or -1 and *err; then *out is of no use. `text` ends with a 0. */
int vmh_conf_parse(const char *text, struct vmh_conf *out, struct vmh_conf_error *err);
/* The block that decides for the program; -1: none. */
int vmh_conf_block_of(const struct vmh_conf *c, const char *program, const char *id);
/* The rule that decides in a block (-1: none); NULL: no rule, so a ring. */
const struct vmh_conf_rule *vmh_conf_match(const struct vmh_conf *c, int block, int role, uint32_t addr, uint16_t port,
					   uint32_t addr2, uint16_t port2);
#endif
