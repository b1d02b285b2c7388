/* The start-up banner and the boxes of the manual's troubleshooting section. */
#ifndef VMH_BANNER_H
#define VMH_BANNER_H

void vmh_banner(void);
void vmh_warn_high_level(void);
void vmh_warn_locked_memory(void); /* memory could not be locked; nothing if there is no limit; once */
void vmh_warn_huge_pages(void);    /* huge pages were asked for, and there are not enough; once */
#endif
