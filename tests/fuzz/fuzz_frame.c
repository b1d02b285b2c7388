/* libFuzzer target: any bytes may come from the wire. The first byte chooses whether sums are verified. */
#include "vmh_ring.h"
#include <stdlib.h>

#define MUST(cond) \
	do { \
		if (!(cond)) \
			abort(); \
	} while (0)

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size);

int LLVMFuzzerTestOneInput(const unsigned char *data, size_t size)
{
	struct vmh_buf b = {.len = 0x55555555, .ttl = 0x55}, before = b, again = b;
	unsigned char *exact;
	bool verify;
	int rc;

	if (size < 1)
		return 0;
	verify = data[0] & 1;
	size--;
	exact = malloc(size ? size : 1); /* exactly as long as the frame: the sanitizer sees a read beyond it */
	memcpy(exact, data + 1, size);
	rc = vmh_frame_parse(exact, size, verify, &b);
	if (rc) {
		MUST(rc == -EBADMSG && !memcmp(&b, &before, sizeof(b)));
	} else {
		MUST(b.data >= exact + 42 && b.data + b.len <= exact + size);
		MUST(b.multicast == ((((const unsigned char *)&b.daddr)[0] & 0xf0) == 0xe0));
		if (verify) /* what passes the strict parser passes the other one, with the same result */
			MUST(!vmh_frame_parse(exact, size, false, &again) && again.data == b.data && again.len == b.len);
	}
	free(exact);
	return 0;
}
