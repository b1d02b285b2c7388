/* Maps of every program here. One set per attached interface or ring veth; the names are part of the contract with
 * vmahybrid/xdp. bcc rewrites map accesses in the main file only, so compile.py pastes these headers into one text.
 *
 * Hashes do not preallocate: three empty tables of VMH_MAX_RULES would cost 6 MB per interface.
 */
#ifndef VMH_MAPS_H
#define VMH_MAPS_H

#include "vmh_flow.h"

#define VMH_NO_PREALLOC 1 /* BPF_F_NO_PREALLOC */

BPF_ARRAY(port, struct vmh_port_config, 1);
BPF_F_TABLE("hash", struct vmh_flow_key, struct vmh_action, rules5, VMH_MAX_RULES, VMH_NO_PREALLOC);
BPF_F_TABLE("hash", struct vmh_flow_key, struct vmh_action, rules3, VMH_MAX_RULES, VMH_NO_PREALLOC);
BPF_F_TABLE("hash", struct vmh_flow_key, struct vmh_action, rulesmc, VMH_MAX_RULES, VMH_NO_PREALLOC);
BPF_PERCPU_ARRAY(memos, struct vmh_memo, VMH_MEMOS);
BPF_PERCPU_ARRAY(rule_hits, struct vmh_hits, VMH_MAX_RULES);
BPF_XSKMAP(xsks, VMH_MAX_XSK);
BPF_DEVMAP(devs, VMH_MAX_DEV);
BPF_PERCPU_ARRAY(outs, struct vmh_hits, VMH_OUT_COUNT);
BPF_ARRAY(nears, __u32, VMH_NEARS);

BPF_ARRAY(guard, struct vmh_guard_config, 1);
BPF_F_TABLE("hash", struct vmh_grant_key, __u32, granted, VMH_MAX_GRANTS, VMH_NO_PREALLOC);
BPF_DEVMAP(guard_dev, 1);
BPF_PERCPU_ARRAY(guard_outs, struct vmh_hits, VMH_GUARD_COUNT);

BPF_XSKMAP(rin_xsks, VMH_QUEUES);
BPF_PERCPU_ARRAY(rin_outs, struct vmh_hits, VMH_RIN_COUNT);

#endif
