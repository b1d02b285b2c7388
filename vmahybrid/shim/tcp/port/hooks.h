/* What lwIP calls at its documented hooks. */
#ifndef VMH_TCP_HOOKS_H
#define VMH_TCP_HOOKS_H
#include "lwip/ip_addr.h"

u32_t core_isn(const ip_addr_t *laddr, u16_t lport, const ip_addr_t *raddr, u16_t rport); /* RFC 6528 */
#define LWIP_HOOK_TCP_ISN core_isn

struct pbuf;
struct tcp_hdr;
struct tcp_pcb;
u32_t *core_options_out(struct pbuf *p, struct tcp_hdr *hdr, const struct tcp_pcb *pcb, u32_t *end);
#define LWIP_HOOK_TCP_OUT_ADD_TCPOPTS core_options_out

#endif
