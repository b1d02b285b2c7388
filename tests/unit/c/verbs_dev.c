/* Prints the port of the device whose directory is argv[1] that the interface argv[2] of this namespace is, 0 for none. */
#include "../../../vmahybrid/shim/ring_verbs_dev.c"

struct vmh_params vmh_params;
_Atomic int vmh_log_level_now = -1;
void vmh_log_write(int level, const char *fmt, ...) { (void)level; (void)fmt; }

static const char *name_of(struct ibv_device *dev)
{
	return strrchr(dev->ibdev_path, '/') + 1;
}

int main(int argc, char **argv)
{
	struct ibv_device dev = { 0 };
	struct own_link link;

	if (argc != 3 || !own_link(argv[2], &link))
		return 1;
	vmh_ibv.get_device_name = name_of;
	snprintf(dev.ibdev_path, sizeof(dev.ibdev_path), "%s", argv[1]);
	printf("%u\n", port_of(&dev, &link));
	return 0;
}
