/* The texts of reasons.def. */
#include "vmh_base.h"

static const struct {
	const char *slug, *text;
} reasons[] = {
#define REASON(code, name, slug_, text_, remedy) [code] = { slug_, text_ },
#include "reasons.def"
#undef REASON
};

#define KNOWN(reason) ((reason) < sizeof(reasons) / sizeof(reasons[0]) && reasons[reason].slug)

/* A newer service may send codes that this shim does not know. */
const char *vmh_reason_slug(unsigned reason)
{
	return KNOWN(reason) ? reasons[reason].slug : "unknown";
}

const char *vmh_reason_text(unsigned reason)
{
	return KNOWN(reason) ? reasons[reason].text : "a reason that this version does not know";
}
