"""vmahybrid doctor: the probes on this machine, and on machines made of files."""

import errno
import json
import os
import resource
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from fake_view import FakeView, serve

from vmahybrid.bench import beside
from vmahybrid.bench.beside import Beside, Speed
from vmahybrid.bench.sandbox import SandboxError
from vmahybrid.cli import doctor
from vmahybrid.cli.main import main
from vmahybrid.cli.output import Style
from vmahybrid.cli.probes import Check, guarded, host, kernel, nic, service, verbs
from vmahybrid.net import tcpsock
from vmahybrid.net.netns import NetnsWorker
from vmahybrid.steering.reasons import Reason
from vmahybrid.verbs import caps, discovery, library
from vmahybrid.xdp import kfunc, latebind, stamped
from vmahybrid.xdp.holder import attached


def test_on_this_machine(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json"])
    body = json.loads(capsys.readouterr().out)
    assert body["schema"] == 1
    assert code == int(any(check["verdict"] == "fail" for check in body["checks"]))
    names = {check["name"] for check in body["checks"]}
    assert {"AF_XDP", "bpf", "RLIMIT_MEMLOCK", "bcc", "headers", "libxdp", "shim", "C-states", "CPU frequency",
            "verbs", "service"} <= names  # fmt: skip
    for check in body["checks"]:
        assert check["verdict"] in {"ok", "warn", "fail"}
        assert "the probe broke" not in check["text"], check
        if check["verdict"] == "fail":
            assert check["remedy"], check


@pytest.mark.root
def test_a_program_is_loaded_and_linked_without_a_trace() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to load a BPF program")
    checks = list(kernel.bpf_and_link())
    assert [(check.name, check.verdict) for check in checks] == [("bpf", "ok"), ("bpf_link", "ok")]
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("netns")]
    assert attached(socket.if_nametoindex("lo")) == {}


@pytest.mark.parametrize(("refused", "verdict", "said"), [
    (None, "ok", "can be moved"), (PermissionError(1, "not permitted"), "warn", "not known"),
    (OSError(errno.ENOPROTOOPT, "Protocol not available"), "fail", "can't be moved")])
def test_connections_that_can_or_can_not_be_moved(monkeypatch: pytest.MonkeyPatch, refused: OSError | None,
                                                  verdict: str, said: str) -> None:
    def enter(sock: socket.socket) -> None:
        if refused is not None:
            raise refused

    monkeypatch.setattr(tcpsock, "enter", enter)
    (check,) = kernel.tcp_repair()
    assert (check.name, check.verdict) == ("TCP_REPAIR", verdict)
    assert said in check.text
    assert bool(check.remedy) is (verdict != "ok")


@pytest.mark.parametrize(("answer", "verdict", "said"), [
    (True, "ok", "one step"), (False, "warn", "two steps"), (PermissionError(1, "not permitted"), "warn", "not known")])
def test_bound_sockets_that_can_or_can_not_be_mapped(monkeypatch: pytest.MonkeyPatch, answer: bool | OSError,
                                                     verdict: str, said: str) -> None:
    def look() -> bool:
        if isinstance(answer, OSError):
            raise answer
        return answer

    monkeypatch.setattr(latebind, "bound_can_be_mapped", look)
    checks = list(kernel.map_bound_xsk())
    assert [check.verdict for check in checks] == [verdict]
    assert said in checks[0].text
    assert bool(checks[0].remedy) == (verdict == "warn")


NONE = "no hardware time stamps; software ones (SO_TIMESTAMPING) come with every ring"
NATIVE = "hardware time stamps, which AF_XDP rings in native mode have from the driver"
WITHOUT = ("hardware time stamps, which AF_XDP rings don't have: {}. Sockets that ask for them are the kernel's, but "
           "on raw packet QPs")


@pytest.mark.parametrize(("hard", "told", "lacking", "said"), [
    ((False, -1), {"timestamp"}, "",
     f"{NONE} (the driver hands native XDP those that a frame brings along, and makes none)"),
    ((False, -1), set(), "", NONE),
    ((True, 2), {"hash", "timestamp"}, "",
     f"{NATIVE}. To be synchronised with the system's clock, programs must be able to read /dev/ptp2"),
    ((True, -1), {"timestamp"}, "",
     f"{NATIVE}, with VMA_HW_TS_CONVERSION=1, 2 or 4: it has no clock that could be followed"),
    ((True, 0), {"timestamp"}, "this kernel has no X", WITHOUT.format("this kernel has no X")),
    ((True, 0), {"hash"}, "", WITHOUT.format("the driver gives XDP no time stamps")),
    ((True, 0), None, "", WITHOUT.format("the kernel can't say what the driver gives to XDP")),
])  # fmt: skip
def test_time_stamps(monkeypatch: pytest.MonkeyPatch, hard: tuple[bool, int], told: set[str] | None, lacking: str,
                     said: str) -> None:
    for where in (nic, stamped):
        monkeypatch.setattr(where, "rx_metadata", lambda _ifindex: told)
    monkeypatch.setattr(nic, "hardware_stamps", lambda _name: hard)
    monkeypatch.setattr(kfunc, "missing", lambda: lacking)
    check = nic._stamps("eth7", 7, "mlx5_core")
    assert (check.verdict, check.text) == ("ok", said)
    assert check.data == {"hardware_stamps": hard[0], "clock": f"/dev/ptp{hard[1]}" if hard[1] >= 0 else None,
                          "xdp_rx_metadata": None if told is None else sorted(told)}


@pytest.mark.root
def test_an_interface_of_a_private_namespace() -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to make a namespace")
    worker = NetnsWorker.open_private()
    try:
        def look() -> list[Check]:
            here = f"--net=/proc/{os.getpid()}/task/{threading.get_native_id()}/ns/net"
            command = "ip link add vmhd0 mtu 9000 type veth peer vmhd1"
            subprocess.run(["nsenter", here, *command.split()], check=True)
            return list(nic.interface("vmhd0"))

        checks = worker.call(look)
    finally:
        worker.close()
    text = " ".join(check.text for check in checks)
    assert "driver veth, MTU 9000" in text
    assert "tcp-long-frames" in text
    assert {"TSO", "GRO"} <= checks[0].data["offloads"].keys()
    (stamps,) = [check for check in checks if "xdp_rx_metadata" in check.data]
    assert stamps.text.startswith("no hardware time stamps; software ones") and not stamps.data["hardware_stamps"]
    assert any("MTU 9000" in check.text and check.remedy == "ip link set vmhd0 mtu 1500" for check in checks)
    assert checks[0].data["xdp_features"] is None or "basic" in checks[0].data["xdp_features"]


def test_capabilities_by_name() -> None:
    assert kernel.effective_capabilities("CapEff:\t000001ffffffffff\n") == set(kernel.CAPABILITIES)
    assert kernel.effective_capabilities("Name:\tx\nCapEff:\t0000000000003000\n") == {"CAP_NET_ADMIN", "CAP_NET_RAW"}
    assert kernel.effective_capabilities("CapEff:\t0\n") == set()


@pytest.mark.parametrize(("capable", "soft", "verdict"), [
    (True, 0, "ok"), (False, resource.RLIM_INFINITY, "ok"), (False, 1 << 16, "fail"), (False, 1 << 30, "warn"),
])  # fmt: skip
def test_memlock(monkeypatch: pytest.MonkeyPatch, capable: bool, soft: int, verdict: str) -> None:
    monkeypatch.setattr(kernel, "effective_capabilities", lambda: {"CAP_IPC_LOCK"} if capable else set())
    monkeypatch.setattr(resource, "getrlimit", lambda _which: (soft, soft))
    (check,) = kernel.memlock()
    assert check.verdict == verdict
    assert (check.remedy == "") == (verdict == "ok")


def test_missing_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "find_spec", lambda _name: None)
    monkeypatch.setattr(kernel, "find_library", lambda _name: None)
    assert next(iter(kernel.compiler())).remedy == "apt-get install python3-bpfcc"
    assert [check.remedy for check in kernel.libraries()] == ["apt-get install libxdp1", "apt-get install libbpf1"]


def files(root: Path, contents: dict[str, str]) -> Path:
    for name, text in contents.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text + "\n")
    return root


def test_sleep_states(tmp_path: Path) -> None:
    cpu = files(tmp_path, {
        "cpuidle/current_driver": "intel_idle", "cpuidle/current_governor": "menu",
        "cpu0/cpuidle/state0/name": "POLL", "cpu0/cpuidle/state0/latency": "0",
        "cpu0/cpuidle/state1/name": "C1", "cpu0/cpuidle/state1/latency": "2",
        "cpu0/cpuidle/state2/name": "C6", "cpu0/cpuidle/state2/latency": "133",
    })  # fmt: skip
    (check,) = host.sleep_states(cpu)
    assert (check.verdict, check.remedy) == ("warn", "cpupower idle-set -D 10")
    assert "C6 takes 133 us" in check.text
    files(tmp_path, {"cpu0/cpuidle/state2/disable": "1"})
    (check,) = host.sleep_states(cpu)
    assert check.verdict == "ok"
    assert next(iter(host.sleep_states(tmp_path / "nothing"))).verdict == "ok"


def test_frequency_and_isolation(tmp_path: Path) -> None:
    assert next(iter(host.frequency(tmp_path))).verdict == "ok"
    cpu = files(tmp_path, {"cpu0/cpufreq/scaling_governor": "powersave", "isolated": "2-3"})
    (check,) = host.frequency(cpu)
    assert (check.verdict, check.remedy) == ("warn", "cpupower frequency-set -g performance")
    files(tmp_path, {"cpu0/cpufreq/scaling_governor": "performance"})
    assert next(iter(host.frequency(cpu))).verdict == "ok"
    assert "2-3" in next(iter(host.isolation(cpu))).text


def test_verbs_without_pyverbs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyverbs", None)
    monkeypatch.setitem(sys.modules, "pyverbs.device", None)
    monkeypatch.setattr(library, "find_spec", lambda _name: None)
    monkeypatch.setattr(discovery, "names", lambda: ["mlx5_0"])
    (check,) = verbs.bindings()
    assert (check.verdict, check.remedy) == ("warn", "apt-get install python3-pyverbs")
    listed, device = verbs.devices()
    assert (listed.data, device.verdict) == ({"devices": ["mlx5_0"]}, "warn")
    (step,) = verbs.selftest("lo")
    assert (step.name, step.verdict, step.remedy) == ("library", "fail", "apt-get install python3-pyverbs")


@pytest.mark.parametrize(("name", "reason", "verdict", "said"), [
    ("rxe0", "no-raw-packet-qp", "ok", "(no-raw-packet-qp): AF_XDP carries its rings"),
    ("mlx5_0", "no-cap-net-raw", "warn", "(no-cap-net-raw)"),
    ("mlx5_0", "none", "warn", "nothing of it was verified on a ConnectX"),
    ("sv_eth0", "none", "ok", "a software device"),
])
def test_verbs_devices(monkeypatch: pytest.MonkeyPatch, name: str, reason: str, verdict: str, said: str) -> None:
    monkeypatch.setattr(caps, "devices", lambda: [name])
    monkeypatch.setattr(caps, "capabilities", lambda device: caps.Capabilities(device, reason))
    monkeypatch.setattr(discovery, "scan", lambda: [discovery.RdmaLink(name, 1, "eth0", 2, "")])
    _, check = verbs.devices()
    assert (check.name, check.verdict) == (name, verdict)
    assert said in check.text
    assert check.text.startswith("interface eth0: ")
    if verdict == "warn":
        assert check.remedy
    assert check.data["reason"] == Reason.from_slug(reason).slug


def test_no_rdma_device_says_what_nobody_has_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caps, "devices", list)
    monkeypatch.setattr(discovery, "names", list)
    (check,) = verbs.devices()
    assert check.verdict == "ok"
    assert "verified on a ConnectX" in check.text


def test_softverbs_that_is_not_built(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("VMAHYBRID_SOFTVERBS", str(tmp_path))
    (check,) = verbs.softverbs()
    assert (check.verdict, "not built" in check.text) == ("warn", True)
    (tmp_path / "libibverbs.so.1").touch()
    (check,) = verbs.softverbs()
    assert (check.verdict, check.data) == ("ok", {"path": str(tmp_path)})
    assert "may be slower than the kernel's UDP: vmahybrid softverbs -- vmahybrid doctor measures it" in check.text


@pytest.mark.parametrize(("softverbs", "kernel", "verdict", "said"), [
    (Speed(1.9, 300_000), Speed(2.0, 200_000), "ok", "softverbs 1.9 us and 300,000 messages/s, the kernel's UDP 2"),
    (Speed(2.4, 300_000), Speed(2.0, 200_000), "warn", "slower than the kernel's UDP here: half round trip. "),
    (Speed(1.9, 190_000), Speed(2.0, 200_000), "warn", "slower than the kernel's UDP here: rate one way. "),
    (Speed(2.4, 190_000), Speed(2.0, 200_000), "warn", "here: half round trip and rate one way. sockperf, 64 bytes"),
])
def test_the_speed_of_softverbs(monkeypatch: pytest.MonkeyPatch, softverbs: Speed, kernel: Speed, verdict: str,
                                said: str) -> None:
    """What was measured on this machine, and a warning where the kernel is better in anything."""
    monkeypatch.setattr(library, "loaded", lambda: str(library.softverbs_directory() / library.LIBRARY))
    monkeypatch.setattr(beside, "obstacle", lambda: ("", ""))
    monkeypatch.setattr(beside, "measure", lambda: Beside(softverbs, kernel))
    (check,) = verbs.speed()
    assert (check.verdict, said in check.text, bool(check.remedy)) == (verdict, True, verdict == "warn"), check
    assert check.data["softverbs"] == {"half_rtt_us": softverbs.half_rtt_us, "rate": softverbs.rate}


def test_the_speed_that_can_not_be_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> Beside:
        raise SandboxError("no ring")

    assert list(verbs.speed()) == []  # not on the software device: nobody's processors are taken
    monkeypatch.setattr(library, "loaded", lambda: str(library.softverbs_directory() / library.LIBRARY))
    monkeypatch.setattr(beside, "measure", fails)
    monkeypatch.setattr(beside, "obstacle", lambda: ("sockperf is not there", "apt-get install sockperf"))
    (check,) = verbs.speed()
    assert (check.verdict, check.remedy) == ("warn", "apt-get install sockperf")
    monkeypatch.setattr(beside, "obstacle", lambda: ("", ""))
    (check,) = verbs.speed()
    assert (check.verdict, "no ring" in check.text, check.remedy) == ("warn", True, "make bench")


@pytest.mark.parametrize(("argv", "said"), [
    (["--verbs-selftest", "nope0"], "interface 'nope0': no such interface"),
    (["--verbs-selftest", "lo", "lo"], "--verbs-selftest: it takes one interface, 'lo' is too many"),
    (["--verbs-selftest"], "doctor: --verbs-selftest: expected one argument"),
])
def test_wrong_use_of_the_selftest(argv: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *argv]) == 2
    assert capsys.readouterr().err.startswith(f"vmahybrid: {said}")


def test_the_service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VMAHYBRID_RUNDIR", str(tmp_path))
    (check,) = service.service()
    assert (check.verdict, check.remedy) == ("warn", "vmahybrid start")
    view = FakeView()
    view.health = ["eth9 is gone"]
    with serve(view, tmp_path / "api.sock"):
        first, second = service.service()
        assert (first.verdict, second.text) == ("ok", "eth9 is gone")


def test_a_broken_probe_is_one_line() -> None:
    def broken() -> list[Check]:
        raise ZeroDivisionError("odd machine")

    (check,) = guarded("kernel", "probe name", broken)
    assert (check.name, check.verdict) == ("probe name", "warn")
    assert "odd machine" in check.text


def test_our_own_veths_are_not_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    found = [(1, "lo"), (2, "eth0"), (3, "vmhr7"), (4, "vmhf0")]
    monkeypatch.setattr("socket.if_nameindex", lambda: found)
    assert nic.names() == ["eth0"]


def test_interface_that_is_gone() -> None:
    assert not nic.exists("nope0")
    assert not nic.exists("")
    assert not nic.exists("a" * 300)
    (check,) = guarded("interfaces", "nope0", lambda: nic.interface("nope0"))
    assert "no interface nope0" in check.text


def test_lines_and_the_exit_code(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    checks = [Check("kernel", "a", "ok", "fine", "never shown"), Check("kernel", "b", "fail", "word " * 60, "mend it")]
    monkeypatch.setattr(doctor, "examine", lambda _interfaces: iter(checks))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out.splitlines()
    assert out[:2] == ["kernel", "  ok    a: fine"]
    assert "        -> mend it" in out
    assert out[-1] == "1 ok, 0 to look at, 1 failed"
    assert max(map(len, out)) <= 100
    assert not any("never shown" in line for line in out)
    body, _ = doctor.run(type("Args", (), {"interfaces": [], "verbs_selftest": None})())
    assert "\x1b[31mfail" in "\n".join(doctor.lines(body, Style(True, 100)))
