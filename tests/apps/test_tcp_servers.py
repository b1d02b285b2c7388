"""Servers that fork, share listeners, hand connections on and use threads, with connections on rings: each answers as
it does on the kernel. What leaves the process goes home; what stays in one stays on its ring."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from apps.tcp_servers import SERVERS
from apps.test_tcp_programs import TcpStage, served, stage  # noqa: F401
from net.service_lab import Api

from vmahybrid.bench.sandbox import Program

pytestmark = pytest.mark.apps

PROGRAM = [sys.executable, str(Path(__file__).with_name("tcp_servers.py"))]
BOTH = [("offload", "both"), ("adaptive", "both")]
# what they accept on a ring leaves the process
HAND_ON = ("forking", "inetd", "processes-fork", "processes-spawn", "subprocesses", "passing")
STAY = ("threads", "accepting-threads")  # in the process that accepted them


@pytest.fixture
def ending() -> Iterator[list[Program]]:
    """Servers that end with the test, and their children."""
    programs: list[Program] = []
    yield programs
    for program in programs:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(program.pid, signal.SIGKILL)
        program.close()


@pytest.mark.parametrize("stage", BOTH, ids=["offload", "adaptive"], indirect=True)
@pytest.mark.parametrize("kind", SERVERS)
def test_server(stage: TcpStage, ending: list[Program], kind: str) -> None:  # noqa: F811
    before = Api(stage.service).status()["counters"].get("tcp_homed_total", 0)
    serving = stage.serve(*PROGRAM, kind, stage.address, "7800")
    ending.append(serving)
    serving.wait_for("ready")
    asking = stage.client(*PROGRAM, "client", stage.address, "7800")
    assert asking.wait(40) == 0, asking.errors[-3000:] + serving.errors[-3000:]
    assert asking.output == "answered 6\n", asking.errors + serving.errors
    stage.used_rings("client")
    homed = Api(stage.service).status()["counters"].get("tcp_homed_total", 0) - before
    if stage.policy == "offload" and kind in HAND_ON:
        assert homed > 0, "no connection was on a ring of the server"
    if kind in STAY:
        serving.stop(signal.SIGINT)
        stage.used_rings("server")


@pytest.mark.parametrize("stage", BOTH, ids=["offload", "adaptive"], indirect=True)
def test_threads_that_begin_to_accept_at_once(stage: TcpStage, ending: list[Program]) -> None:  # noqa: F811
    """One puts the listener on rings; the others wait for it there, not in the kernel for ever."""
    serving = stage.serve(*PROGRAM, "accepting-threads", stage.address, "7800")
    ending.append(serving)
    serving.wait_for("ready")
    asking = stage.client(*PROGRAM, "client-of-many", stage.address, "7800")
    assert asking.result(40) == "answered 8\n", serving.errors


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of the host and of the user; for this test alone."""
    where = tmp_path_factory.mktemp("ssh")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", where / name], check=True, timeout=30)
    shutil.copy(where / "user.pub", where / "authorized")
    return where


def ssh_server(stage: TcpStage, keys: Path) -> Program:  # noqa: F811
    """sshd executes itself for each connection, which so becomes the kernel's; it wants its absolute path."""
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    options = [f"HostKey={keys}/host", f"AuthorizedKeysFile={keys}/authorized", "StrictModes=no", "UsePAM=no",
               "PidFile=none", "PermitRootLogin=yes", "PasswordAuthentication=no", "PrintMotd=no", "UseDNS=no",
               f"ListenAddress={stage.address}:2200"]
    words = [word for option in options for word in ("-o", option)]
    return stage.serve("/usr/sbin/sshd", "-D", "-e", "-f", "/dev/null", *words)


def test_ssh(stage: TcpStage, ending: list[Program], keys: Path) -> None:  # noqa: F811
    """A command, and data through it both ways."""
    serving = ssh_server(stage, keys)
    ending.append(serving)
    serving.wait_for("Server listening")
    data = os.urandom(600_000)
    (keys / "sent").write_bytes(data)
    options = ["StrictHostKeyChecking=no", f"UserKnownHostsFile={keys}/known", "IdentitiesOnly=yes", "BatchMode=yes",
               "ConnectTimeout=10"]
    words = [word for option in options for word in ("-o", option)]
    ssh = ["ssh", "-F", "none", "-q", "-p", "2200", "-i", str(keys / "user"), *words, f"root@{stage.address}"]
    said = stage.client("timeout", "20", *ssh, "echo it is $((6 * 7))").result(30)
    assert said == "it is 42\n", serving.errors
    command = f"{' '.join(ssh)} cat < {keys}/sent > {keys}/got"
    stage.client("timeout", "20", "sh", "-c", command).result(30)
    assert (keys / "got").read_bytes() == data
    if stage.policy == "offload" and stage.shimmed in ("both", "client"):
        assert re.search(r"Tx Offload: \d+ / [1-9]", (stage.reports / "client").read_text())


JAVA = """
import java.io.*;
import java.net.Socket;
import java.util.Arrays;

class Ask {
    public static void main(String[] words) throws Exception {
        try (Socket socket = new Socket(words[0], 7800)) {
            DataInputStream in = new DataInputStream(socket.getInputStream());
            OutputStream out = socket.getOutputStream();
            for (int turn = 0; turn < 200; turn++) {
                byte[] sent = new byte[1 + turn * turn], got = new byte[sent.length];
                Arrays.fill(sent, (byte) turn);
                out.write(sent);
                in.readFully(got);
                if (!Arrays.equals(sent, got)) throw new IOException("other bytes in turn " + turn);
            }
            socket.shutdownOutput();
            if (in.read() != -1) throw new IOException("more bytes");
        }
        System.out.println("answered");
    }
}
"""

GO = """
package main

import (
	"bytes"
	"fmt"
	"io"
	"net"
	"os"
)

func check(err error) {
	if err != nil {
		fmt.Println(err)
		os.Exit(1)
	}
}

func main() {
	connection, err := net.Dial("tcp", os.Args[1]+":7800")
	check(err)
	for turn := 0; turn < 200; turn++ {
		sent := bytes.Repeat([]byte{byte(turn)}, 1+turn*turn)
		got := make([]byte, len(sent))
		_, err = connection.Write(sent)
		check(err)
		_, err = io.ReadFull(connection, got)
		check(err)
		if !bytes.Equal(sent, got) {
			fmt.Println("other bytes in turn", turn)
			os.Exit(1)
		}
	}
	check(connection.(*net.TCPConn).CloseWrite())
	rest, err := io.ReadAll(connection)
	check(err)
	fmt.Println("answered", len(rest))
}
"""

GO_SERVER = """
package main

import (
	"fmt"
	"io"
	"net"
	"net/http"
	"os"
	"os/exec"
)

func main() {
	http.HandleFunc("/echo", func(w http.ResponseWriter, r *http.Request) { io.Copy(w, r.Body) })
	http.HandleFunc("/child", func(w http.ResponseWriter, r *http.Request) {
		said, err := exec.Command("sh", "-c", "echo it is $((6 * 7))").Output()
		fmt.Fprint(w, string(said), err)
	})
	listener, err := net.Listen("tcp", os.Args[1]+":7800")
	if err != nil {
		panic(err)
	}
	fmt.Println("ready")
	panic(http.Serve(listener, nil))
}
"""

OFFLOAD = pytest.mark.parametrize("stage", [("offload", "both")], ids=["offload"], indirect=True)
CGO = pytest.mark.parametrize("cgo", ["0", "1"], ids=["static", "dynamic"])


def go_program(where: Path, source: str, cgo: str) -> str:
    """Linked with libc or without; it makes its system calls by itself either way."""
    (where / "program.go").write_text(source)
    env = {**os.environ, "CGO_ENABLED": cgo, "GOCACHE": str(where / "cache"), "GOFLAGS": "-p=1"}
    subprocess.run(["go", "build", "-o", where / "program", where / "program.go"], env=env, check=True, timeout=300)
    return str(where / "program")


@OFFLOAD
@CGO
def test_go_client(stage: TcpStage, ending: list[Program], tmp_path: Path, cgo: str) -> None:  # noqa: F811
    """No shim sees its system calls. The kernel serves it, unharmed."""
    serving = stage.serve(*PROGRAM, "threads", stage.address, "7800")
    ending.append(serving)
    serving.wait_for("ready")
    asking = stage.client(go_program(tmp_path, GO, cgo), stage.address)
    assert asking.result(40) == "answered 0\n"
    assert ("statically linked: there is no ld.so" in asking.errors) == (cgo == "0")


@OFFLOAD
@CGO
def test_go_server(stage: TcpStage, ending: list[Program], tmp_path: Path, cgo: str) -> None:  # noqa: F811
    """The same, of a server with children; curl is on a ring."""
    serving = stage.serve(go_program(tmp_path, GO_SERVER, cgo), stage.address)
    ending.append(serving)
    serving.wait_for("ready")
    data = os.urandom(600_000)
    (tmp_path / "sent").write_bytes(data)
    url = f"http://{stage.address}:7800"
    argv = ["curl", "-sS", "--max-time", "20", "-o", f"{tmp_path}/got", "--data-binary", f"@{tmp_path}/sent"]
    stage.client(*argv, f"{url}/echo").result(30)
    assert (tmp_path / "got").read_bytes() == data
    stage.used_rings("client")
    assert stage.client("curl", "-sS", "--max-time", "20", f"{url}/child").result(30) == "it is 42\n<nil>"


# Java "if at hand": a machine without it has no such test.
if shutil.which("javac"):
    @OFFLOAD
    def test_java_client(stage: TcpStage, ending: list[Program], tmp_path: Path) -> None:
        serving = stage.serve(*PROGRAM, "threads", stage.address, "7800")
        ending.append(serving)
        serving.wait_for("ready")
        (tmp_path / "Ask.java").write_text(JAVA)
        subprocess.run(["javac", "-d", tmp_path, tmp_path / "Ask.java"], check=True, timeout=60)
        # its sockets are IPv6 ones otherwise
        argv = ["java", "-Djava.net.preferIPv4Stack=true", "-cp", str(tmp_path), "Ask", stage.address]
        assert stage.client(*argv).result(40) == "answered\n"
        stage.used_rings("client")
