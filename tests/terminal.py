"""A terminal for tests of full-screen programs: a pseudo terminal that pyte draws."""

import fcntl
import os
import pty
import select
import struct
import subprocess
import termios
import time
from collections.abc import Callable
from pathlib import Path

import pyte

ROOT = Path(__file__).parents[1]


class Terminal:
    """A program on a pseudo terminal that pyte draws: it knows what TERM=linux says, and not all of xterm."""

    def __init__(self, argv: list[str], columns: int = 80, lines: int = 24, **env: str) -> None:
        self.screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self.screen)
        self.raw = b""
        self.master, self._slave = pty.openpty()
        self.resize(columns, lines)
        self.before = termios.tcgetattr(self._slave)
        inherited = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        self.process = subprocess.Popen(
            ["setsid", "-c", *argv], stdin=self._slave, stdout=self._slave, stderr=self._slave, cwd=ROOT,
            env=inherited | {"TERM": "linux", "LANG": "C.UTF-8"} | env)

    def resize(self, columns: int, lines: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self.screen.resize(lines, columns)

    def read(self, seconds: float) -> None:
        if select.select([self.master], [], [], seconds)[0]:
            data = os.read(self.master, 65536)
            self.raw += data
            self._stream.feed(data)

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.screen.display)

    def until(self, condition: Callable[[str], object], seconds: float = 10) -> str:
        end = time.monotonic() + seconds
        while not condition(self.text):
            assert time.monotonic() < end, f"{self.text}\n{self.process.poll()}"
            self.read(0.1)
        return self.text

    def keys(self, *keys: str) -> None:
        for key in keys:
            os.write(self.master, key.encode())

    def ended(self) -> int:
        """Its exit code; the terminal is as it was."""
        end = time.monotonic() + 10
        while self.process.poll() is None:
            assert time.monotonic() < end, self.text
            self.read(0.05)
        self.read(0.1)
        assert termios.tcgetattr(self._slave) == self.before
        return int(self.process.returncode)

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        os.close(self.master)
        os.close(self._slave)
