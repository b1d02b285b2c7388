"""Redis, memcached, nginx, Python's servers and iperf3 over TCP: unmodified, on rings (`offload`) and adopted
(`adaptive`), with the shim on either side or on both. What they say must be right; figures are `make bench`'s."""

from __future__ import annotations

import hashlib
import json
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from apps.shimmed import Stage, stop

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = pytest.mark.apps

WAYS = [("offload", "both"), ("offload", "server"), ("offload", "client"), ("adaptive", "both")]
SIZE = 2_000_000

ECHO = """
import asyncio, sys
async def echo(reader, writer):
    while data := await reader.read(65536):
        writer.write(data)
        await writer.drain()
    writer.close()
async def main():
    server = await asyncio.start_server(echo, sys.argv[1], 7777)
    print("listening", flush=True)
    await server.serve_forever()
asyncio.run(main())
"""
ASK = """
import asyncio, sys
async def one(number):
    reader, writer = await asyncio.open_connection(sys.argv[1], 7777)
    for n in range(60):
        sent = b"%d/%d;" % (number, n) * (1 + n * 7)
        writer.write(sent)
        assert await reader.readexactly(len(sent)) == sent, (number, n)
    writer.write_eof()
    assert await reader.read() == b""
    writer.close()
async def main():
    await asyncio.wait_for(asyncio.gather(*(one(n) for n in range(10))), 20)
    print("answered")
asyncio.run(main())
"""
MEMCACHED = """
import socket, sys
def line(f):
    return f.readline().rstrip(b"\\r\\n")
for connection in range(4):
    with socket.create_connection((sys.argv[1], 11311), 10) as s, s.makefile("rb") as f:
        for n in range(200):
            value = b"%d:" % n * (1 + n % 50)
            s.sendall(b"set k%d 0 0 %d\\r\\n%s\\r\\n" % (n, len(value), value))
            assert line(f) == b"STORED"
            s.sendall(b"get k%d\\r\\n" % n)
            assert line(f) == b"VALUE k%d 0 %d" % (n, len(value)) and line(f) == value and line(f) == b"END"
print("stored")
"""


@pytest.fixture(scope="module")
def served() -> Iterator[tuple[Sandbox, Service]]:
    with Sandbox("tcpapps") as sandbox, Service(sandbox) as service:
        for side in sandbox.sides:
            run_command(*side.command(["ethtool", "-K", side.device, "tso", "off", "gso", "off", "tx", "off"]))
        yield sandbox, service


class TcpStage(Stage):
    """A stage whose programs have a policy."""

    policy = "offload"
    reports: Path

    def serve(self, *argv: str, **variables: str) -> Program:
        return super().serve(*argv, **self.variables("server"), **variables)

    def client(self, *argv: str, **variables: str) -> Program:
        return super().client(*argv, **self.variables("client"), **variables)

    def variables(self, who: str) -> dict[str, str]:
        return {"VMA_HYBRID_TCP": self.policy, "VMA_HYBRID_TCP_ROUNDS": "8", "VMA_TRACELEVEL": "warn",
                "VMA_RX_POLL": "500", "VMA_STATS_FILE": str(self.reports / who)}

    def used_rings(self, *who: str) -> None:
        """What the last such program counted as sent by rings, of its sockets that are closed."""
        for name in who:
            if self.shimmed in ("both", name):
                counted = (self.reports / name).read_text()
                sent = [int(n) for n in re.findall(r"Tx Offload: \d+ / (\d+) ", counted)]
                assert sum(sent) > 0, counted

    def wait_listening(self, port: int, timeout: float = 8.0) -> None:
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            listing = self.sandbox.start(self.sandbox.b, ["cat", "/proc/net/tcp"]).result(5)
            if f":{port:04X} 00000000:0000 0A" in listing:
                return
            time.sleep(0.05)
        raise AssertionError(f"nobody listens on TCP port {port}")

    @property
    def address(self) -> str:
        return self.sandbox.b.address


@pytest.fixture(params=WAYS, ids=[f"{policy}-{side}" for policy, side in WAYS])
def stage(served: tuple[Sandbox, Service], request: pytest.FixtureRequest,
          tmp_path_factory: pytest.TempPathFactory) -> TcpStage:
    stage = TcpStage(*served, shimmed=request.param[1])
    stage.reports = tmp_path_factory.mktemp("reports")
    stage.policy = request.param[0]
    return stage


@pytest.fixture
def files(tmp_path: Path) -> Path:
    tmp_path.chmod(0o755)
    (tmp_path / "big").write_bytes(os.urandom(SIZE))
    (tmp_path / "small").write_text("small\n" * 20)
    return tmp_path


def same(stage: TcpStage, url: str, files: Path, times: int = 1) -> None:
    """curl gets what is in the file."""
    for name in ("big", "small"):
        got = files / f"{name}.got"
        stage.client("curl", "-sS", "--max-time", "20", "-o", str(got), *[f"{url}/{name}"] * times).result(30)
        digests = {hashlib.sha256(path.read_bytes()).hexdigest() for path in (got, files / name)}
        assert len(digests) == 1, name


def test_asyncio(stage: TcpStage) -> None:
    serving = stage.serve(sys.executable, "-c", ECHO, stage.address)
    serving.wait_for("listening")
    assert "answered" in stage.client(sys.executable, "-c", ASK, stage.address).result(30)
    stop(serving)
    stage.used_rings("server", "client")


def test_http_server(stage: TcpStage, files: Path) -> None:
    argv = [sys.executable, "-u", "-m", "http.server", "8000", "--bind", stage.address, "--directory", str(files)]
    serving = stage.serve(*argv)
    serving.wait_for("Serving HTTP")
    same(stage, f"http://{stage.address}:8000", files)
    stop(serving)
    if stage.policy == "offload":  # one request per connection
        stage.used_rings("server", "client")


def test_redis(stage: TcpStage, tmp_path: Path) -> None:
    serving = stage.serve("redis-server", "--port", "6400", "--bind", stage.address, "--save", "", "--appendonly", "no",
                          "--protected-mode", "no", "--dir", str(tmp_path))
    serving.wait_for("(?i)ready to accept connections")
    argv = ["redis-benchmark", "-h", stage.address, "-p", "6400", "-t", "set,get,lpush", "-n", "1500", "-c", "5", "-q"]
    said = stage.client(*argv).result(40)
    for name in ("SET", "GET", "LPUSH"):
        assert re.search(rf"{name}: [1-9][\d.]* requests per second", said), said
    # the value of redis-benchmark is "VXK" or "xxx", three bytes
    cli = ["redis-cli", "-h", stage.address, "-p", "6400"]
    length = stage.client(*cli, "LLEN", "mylist").result(10).strip()
    assert length == "1500"
    assert len(stage.client(*cli, "GET", "key:__rand_int__").result(10).strip()) == 3
    stop(serving)
    stage.used_rings("server")


def test_memcached(stage: TcpStage) -> None:
    serving = stage.serve("memcached", "-u", "root", "-l", stage.address, "-p", "11311", "-U", "0", "-t", "2")
    stage.wait_listening(11311)
    assert "stored" in stage.client(sys.executable, "-c", MEMCACHED, stage.address).result(30)
    stop(serving)
    stage.used_rings("server", "client")


def nginx(stage: TcpStage, files: Path) -> Program:
    conf = files / "nginx.conf"
    conf.write_text(f"""daemon off; worker_processes 1; user root; pid {files}/pid; error_log stderr warn;
        events {{ worker_connections 256; }}
        http {{ access_log off; sendfile on; client_body_temp_path {files}/1; proxy_temp_path {files}/2;
               fastcgi_temp_path {files}/3; uwsgi_temp_path {files}/4; scgi_temp_path {files}/5;
               server {{ listen {stage.address}:8080; root {files};
                         location /said {{ return 200 "{'said' * 30}"; }} }} }}""")
    serving = stage.serve("nginx", "-p", str(files), "-c", str(conf))
    stage.wait_listening(8080)
    return serving


def test_nginx_curl_wrk(stage: TcpStage, files: Path) -> None:
    serving = nginx(stage, files)
    url = f"http://{stage.address}:8080"
    same(stage, url, files)
    for name in ("small", "said"):  # the kernel sends files
        said = stage.client("wrk", "-t1", "-c8", "-d1s", f"{url}/{name}").result(20)
        found = re.search(r"(\d+) requests in", said)
        assert found and int(found[1]) > 50 and "errors" not in said, said
    stop(serving)
    stage.used_rings("server", "client")


@pytest.mark.parametrize("reverse", [False, True], ids=["forth", "back"])
def test_iperf3(stage: TcpStage, reverse: bool) -> None:
    serving = stage.serve("iperf3", "-s", "-1", "-B", stage.address, "-p", "5301", "--forceflush")
    serving.wait_for("listening")
    # who receives stops when the other has sent all, whatever is on its way
    argv = ["iperf3", "-c", stage.address, "-p", "5301", "-n", "16M", "-J", *(["-R"] if reverse else [])]
    report = json.loads(stage.client(*argv).result(30))
    assert "error" not in report
    assert report["end"]["sum_received"]["bytes"] >= SIZE
    serving.wait(10)
    if stage.policy == "offload":  # bulk has no rounds
        stage.used_rings("server", "client")
