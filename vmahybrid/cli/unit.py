"""The service as a unit of systemd."""

import sys
from pathlib import Path

UNIT = """\
# vmahybrid unit printed it: > /etc/systemd/system/vmahybrid.service
[Unit]
Description=vmahybrid: sockets of programs on rings, past the kernel's network stack
After=network.target

[Service]
Type=notify
ExecStart={program} start --foreground
# One that is killed leaves TCP connections standing still. The next one brings them home if it is there within 10 s.
Restart=on-failure
RestartSec=1
CacheDirectory=vmahybrid

[Install]
WantedBy=multi-user.target
"""


def quoted(word: str) -> str:
    """As a unit file has it (systemd.service(5), command lines)."""
    for special, instead in (("\\", "\\\\"), ('"', '\\"'), ("%", "%%"), ("$", "$$")):
        word = word.replace(special, instead)
    return f'"{word}"' if set(word) & set(" \t'\"\\;") else word


def unit() -> str:
    """With the path of this installation."""
    return UNIT.format(program=quoted(str(Path(sys.executable).parent / "vmahybrid")))
