/* Preloaded into sockperf, whose client sleeps for two seconds before it begins: 50 ms do here. */
#include <unistd.h>

unsigned int sleep(unsigned int seconds)
{
	usleep(seconds ? 50000 : 0);
	return 0;
}
