"""A sandbox whose two sides are joined through a third namespace that loses frames, as a wire does: by a XDP program on
either port of it, since not every kernel has netem. Frames of rings and of the kernel meet it alike."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

from vmahybrid.bench.sandbox import Sandbox, SandboxError, Side, remove_netns, run_command

PROGRAM = """
static unsigned (*random32)(void) = (void *)7;
static long (*redirect)(unsigned ifindex, unsigned long flags) = (void *)23;

__attribute__((section("xdp"), used)) int wire(void *ctx)
{
	if (random32() % 1000000 < LOST)
		return 1;
	return (int)redirect(OTHER, 0);
}
char gpl[] __attribute__((section("license"), used)) = "GPL";
"""


class LossySandbox(Sandbox):
    """``loss``: share of frames lost in each direction. No segmentation offload: a lost frame is one segment."""

    def __init__(self, tag: str, loss: float) -> None:
        super().__init__(tag)
        self.loss = loss
        self._middle = f"{self.a.netns[:-1]}m"

    def _make(self) -> None:
        super()._make()
        run_command("ip", "netns", "add", self._middle)
        ports = []
        for side in self.sides:
            port = f"m{side.device}"
            ports.append(Side(self._middle, port, "", ""))
            if side is self.a:      # the direct pair goes, b's end with it
                side.ip("link", "del", side.device)
            side.ip("link", "add", side.device, "mtu", str(self.mtu), "address", side.mac, "type", "veth",
                    "peer", "name", port, "mtu", str(self.mtu), "netns", self._middle)
            side.ip("address", "add", f"{side.address}/24", "dev", side.device)
            side.ip("link", "set", side.device, "up")
            run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off"]))
        for one, other in (ports, ports[::-1]):
            one.ip("link", "set", one.device, "up")
            self._attach(one, other)

    def _attach(self, port: Side, other: Side) -> None:
        with tempfile.TemporaryDirectory() as where:
            source, built = Path(where) / "wire.c", Path(where) / "wire.o"
            source.write_text(PROGRAM)
            numbers = [f"-DLOST={int(self.loss * 1e6)}", f"-DOTHER={_ifindex(other)}"]
            command = ["clang-14", "-O2", "-target", "bpf", *numbers, "-c", str(source), "-o", str(built)]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            if done.returncode:
                raise SandboxError(f"{' '.join(command)}: {done.stderr}")
            port.ip("link", "set", "dev", port.device, "xdpgeneric", "obj", str(built), "sec", "xdp")

    def close(self) -> None:
        super().close()
        remove_netns(self._middle)


def _ifindex(side: Side) -> int:
    return int(side.ip("-o", "link", "show", side.device).partition(":")[0])
