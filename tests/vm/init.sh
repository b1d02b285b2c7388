#!/bin/busybox sh
# The guest's first process: modules, the host's file system under a layer of memory, then the program in it that the
# kernel command line names (vmh.run=DIRECTORY, in which `guest` is started). Whatever happens, the machine then ends.
b=/bin/busybox
finish() { echo "guest: $1"; $b sleep 1; $b reboot -f; }

$b mount -t proc proc /proc
$b mount -t sysfs sysfs /sys
$b mount -t devtmpfs devtmpfs /dev
for module in /modules/*; do
	options=
	case $module in *bonding*) options=max_bonds=0 ;; esac # no bond but those that are asked for
	$b insmod "$module" $options || finish "insmod $module failed"
done
for word in $($b cat /proc/cmdline); do
	case $word in vmh.run=*) run=${word#vmh.run=} ;; esac
done
[ -n "$run" ] || finish "no vmh.run= on the kernel command line"

# loose: nobody changes the files that are read meanwhile, and without a cache Python's start alone takes seconds
$b mount -t 9p -o trans=virtio,version=9p2000.L,ro,cache=loose,msize=512000 host /host || finish "no 9p"
$b mount -t tmpfs tmpfs /memory
$b mkdir /memory/upper /memory/work
$b mount -t overlay -o lowerdir=/host,upperdir=/memory/upper,workdir=/memory/work overlay /new || finish "no overlay"
for name in proc sys dev; do
	$b mount --move /$name /new/$name
done
$b mkdir -p /new/dev/shm
$b mount -t tmpfs tmpfs /new/dev/shm
$b mount -t tmpfs tmpfs /new/run
$b mount -t bpf bpf /new/sys/fs/bpf
$b ip link set lo up
exec $b switch_root /new "$run/guest"
