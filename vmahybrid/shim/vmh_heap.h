/* The shim's memory. close, send, recv and more may be called by a signal handler that interrupted the program's
 * malloc(), which holds a lock of libc's then: nothing that they come to takes memory there. The lock of this heap puts
 * handlers off, as all of ours do (vmh_lock.h), and is the innermost: memory is taken and given under any other lock.
 *
 * A block is aligned to 16 bytes. NULL: there is no memory. errno stays as it was. With VMH_PLAIN_MALLOC (sanitizers)
 * each block is libc's, so that they see who uses one that was given back.
 */
#ifndef VMH_HEAP_H
#define VMH_HEAP_H
#include <stddef.h>

void *vmh_heap_get(size_t n);                /* not zeroed */
void *vmh_heap_zero(size_t count, size_t n); /* NULL as well if their product is no size_t */
void *vmh_heap_more(void *p, size_t n);      /* p, grown to n bytes; it may have moved. NULL: p stays as it is */
void vmh_heap_free(void *p);                 /* NULL is fine */
size_t vmh_heap_used(void);                  /* bytes of all blocks that are out; 0 with VMH_PLAIN_MALLOC */
void vmh_heap_fork_child(void);              /* the caller is the only thread */
#endif
