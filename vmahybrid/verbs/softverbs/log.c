#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "sv.h"

void sv_say(const char *format, ...)
{
	char text[4096] = "softverbs: ";
	size_t used = strlen(text);
	va_list arguments;
	int n;

	if (!getenv("SOFTVERBS_DEBUG"))
		return;
	va_start(arguments, format);
	n = vsnprintf(text + used, sizeof(text) - used - 1, format, arguments);
	va_end(arguments);
	if (n < 0)
		return;
	used = strlen(text);
	text[used++] = '\n';
	(void)SV_CALL(SYS_write, 2, text, used);
}
