"""vmahybrid home and adopt where the socket does not stay what it was."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from fake_view import FakeView, process, serve, sock

from vmahybrid.cli.main import main
from vmahybrid.service.view import ProcessStats, SocketView

NAME = "4711:14"


def connection(**changes: object) -> SocketView:
    return sock(**{"proto": "tcp", "remote": "10.0.0.2:80", "offloaded": False} | changes)  # type: ignore[arg-type]


class Moving(FakeView):
    """``then``: the sockets of the process after a move was asked for."""

    def __init__(self, *then: SocketView) -> None:
        super().__init__()
        self.then = list(then)
        self._has([connection(), connection(fd=15)])

    def _has(self, sockets: list[SocketView]) -> None:
        self.readings = {4711: [ProcessStats(process(), 1.0, sockets, [], [])]}

    async def move(self, pid: int, fd: int | None, to: str) -> None:
        await super().move(pid, fd, to)
        self._has(self.then)


OTHER = connection(fd=15, offloaded=True)


@pytest.mark.parametrize(("target", "then", "code", "moved", "left"), [
    (NAME, [connection(offloaded=True), OTHER], 0, [14], []),
    (NAME, [OTHER], 1, [], [14]),
    (NAME, [], 1, [], [14]),
    (NAME, [connection(offloaded=True, inode=5), OTHER], 1, [], [14]),   # its number is another's by now
    ("4711", [OTHER], 0, [15], []),
])
def test_one_that_is_gone_was_not_moved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
                                        capsys: pytest.CaptureFixture[str], target: str, then: list[SocketView],
                                        code: int, moved: list[int], left: list[int]) -> None:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    with serve(Moving(*then), tmp_path / "api.sock"):
        assert main(["adopt", target, "--json"]) == code
    body = json.loads(capsys.readouterr().out)
    assert ([s["fd"] for s in body["moved"]], [s["fd"] for s in body["left"]]) == (moved, left)
    if target == NAME and left:
        assert body["left"][0]["reason"] == "closed"


def test_it_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    with serve(Moving(), tmp_path / "api.sock"):
        assert main(["adopt", NAME]) == 1
    out = capsys.readouterr().out
    assert "not on a ring:" in out and NAME in out and "closed" in out
