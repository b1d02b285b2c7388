"""The API client: errors by kind, and servers that close, hang or talk nonsense."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from fake_view import FakeView, serve

from vmahybrid.cli import client as module
from vmahybrid.cli.client import Client
from vmahybrid.errors import NotFound, Refused, ServiceUnreachable, UsageError, VmahybridError

OK = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 2\r\n\r\n{}"


@contextmanager
def answering(path: Path, *answers: bytes) -> Iterator[list[bytes]]:
    """One answer per connection, which is then closed without a word."""
    seen: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(path))
        server.listen()

        def work() -> None:
            for answer in answers:
                peer, _ = server.accept()
                with peer:
                    seen.append(peer.recv(65536))
                    peer.sendall(answer)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        yield seen
        thread.join(5)
        assert not thread.is_alive()


def test_errors_keep_their_kind(tmp_path: Path) -> None:
    with serve(FakeView(), tmp_path / "s") as path, Client(path) as client:
        assert client.get("v1", "status")["pid"] == 42
        with pytest.raises(NotFound, match="process 1: it is not under the shim"):
            client.get("v1", "stats", 1)
        with pytest.raises(UsageError, match=r"path\.pid"):
            client.get("v1", "stats", "x")
        with pytest.raises(Refused) as refused:
            client.post("v1", "flows", body={"action": "drop", "local": "*:1"})
        assert (refused.value.reason, refused.value.remedy) == (18, "raise limits.rules")
        with pytest.raises(VmahybridError, match="unexpected error in the service"):
            client.post("v1", "flows", body={"action": "drop", "local": "*:2"})
        assert client.post("v1", "processes", 4711, "zero") is None


def test_a_connection_that_the_server_closed_while_idle(tmp_path: Path) -> None:
    with answering(tmp_path / "s", OK, OK) as seen, Client(tmp_path / "s") as client:
        assert client.get("a") == {}
        assert client.get("b") == {}
        assert [request.split()[1] for request in seen] == [b"/a", b"/b"]


def test_what_changes_something_is_never_repeated(tmp_path: Path) -> None:
    """The server takes the second request of a connection, and dies."""
    seen: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()

        def work() -> None:
            for answers in ([OK, b""], [b""]):
                peer, _ = server.accept()
                with peer:
                    for answer in answers:
                        if request := peer.recv(65536):
                            seen.append(request.split(b" HTTP")[0])
                            peer.sendall(answer)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        with Client(tmp_path / "s") as client:
            assert client.get("a") == {}
            with pytest.raises(ServiceUnreachable):
                client.post("b")
        thread.join(5)
    assert seen == [b"GET /a", b"POST /b"]


@pytest.mark.parametrize("answer", [b"", b"SSH-2.0\r\n", b"HTTP/1.1 200 OK\r\ncontent-length: 9\r\n\r\n{"])
def test_nonsense(tmp_path: Path, answer: bytes) -> None:
    with answering(tmp_path / "s", answer), Client(tmp_path / "s") as client, pytest.raises(ServiceUnreachable):
        client.get("a")


def test_a_server_that_hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TIMEOUT", 0.05)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
        server.listen()
        with Client(tmp_path / "s") as client, pytest.raises(ServiceUnreachable, match="no answer within"):
            client.get("a")


def test_nobody_there(tmp_path: Path) -> None:
    with Client(tmp_path / "s") as client, pytest.raises(ServiceUnreachable, match="no such socket"):
        client.get("a")
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "s"))
    with Client(tmp_path / "s") as client, pytest.raises(ServiceUnreachable, match="connection refused"):
        client.get("a")
