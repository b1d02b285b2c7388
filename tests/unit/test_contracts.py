"""The contracts through cffi: layouts that C and BPF agreed on, bytes in and out, addresses."""

from __future__ import annotations

import re
import socket
import subprocess
from pathlib import Path

import pytest

from vmahybrid.contracts import (
    action,
    addr_to_bytes,
    addr_to_text,
    as_dict,
    c_text,
    family_of,
    flow_key,
    grant_key,
    lib,
    pack,
    parse_action,
    parse_flow_key,
    size_of,
    unpack,
)

ROOT = Path(__file__).resolve().parents[2]
HEADERS = ["bpf/vmh_flow.h", "vmahybrid/contracts/control.h", "vmahybrid/contracts/net_page.h",
           "vmahybrid/contracts/stats_page.h", "vmahybrid/shim/vmh_conf_rules.h"]


def test_every_struct_and_constant_of_the_headers_is_there(tmp_path: Path) -> None:
    """Sizes and values as the C compiler sees the headers now: a stale extension module fails here."""
    text = "\n".join((ROOT / header).read_text() for header in HEADERS)
    structs = sorted(set(re.findall(r"^struct (vmh_\w+) \{", text, re.M)))
    constants = sorted(set(re.findall(r"^#define (VMH_\w+) +\w", text, re.M)))
    assert len(structs) > 20
    assert len(constants) > 80
    lines = [*(f'printf("%zu\\n", sizeof(struct {name}));' for name in structs),
             *(f'printf("%lld\\n", (long long){name});' for name in constants)]
    source = "#include <stdio.h>\n" + "".join(f'#include "{ROOT / header}"\n' for header in HEADERS)
    (tmp_path / "sizes.c").write_text(source + "int main(void) {\n" + "\n".join(lines) + "\nreturn 0;\n}\n")
    subprocess.run(["cc", "-o", tmp_path / "sizes", tmp_path / "sizes.c"], check=True)
    said = subprocess.run([tmp_path / "sizes"], check=True, capture_output=True, text=True).stdout.split()
    ours = [size_of(f"struct {name}") for name in structs] + [getattr(lib, name) for name in constants]
    assert dict(zip(structs + constants, ours, strict=True)) == \
        dict(zip(structs + constants, map(int, said), strict=True))


@pytest.mark.parametrize(("text", "packed"), [
    ("10.0.0.1", bytes(10) + b"\xff\xff\x0a\0\0\1"), ("fe80::1", b"\xfe\x80" + bytes(13) + b"\1"),
    ("*", bytes(16)), ("255.255.255.255", bytes(10) + b"\xff" * 6), ("::1", bytes(15) + b"\1"),
])
def test_addresses_both_ways(text: str, packed: bytes) -> None:
    assert addr_to_bytes(text) == packed
    assert addr_to_text(packed) == text
    assert addr_to_bytes(packed) == packed


def test_address_oddities() -> None:
    assert addr_to_bytes("") == bytes(16)
    assert addr_to_bytes(b"\x0a\0\0\1") == addr_to_bytes("10.0.0.1")
    assert addr_to_text(addr_to_bytes("0.0.0.0")) == "0.0.0.0"
    assert [family_of(addr_to_bytes(a)) for a in ("1.2.3.4", "::2", "*")] == [4, 6, 4]
    for wrong in ("10.0.0", "1.2.3.4.5", "fe80:::1", "host", "10.0.0.1 ", b"\1\2\3"):
        with pytest.raises(ValueError, match="address"):
            addr_to_bytes(wrong)


def test_flow_key_is_in_network_order() -> None:
    key = flow_key("10.0.0.1", 0x1234, "10.0.0.2", 0x5678, vlan=5)
    assert key == (addr_to_bytes("10.0.0.1") + addr_to_bytes("10.0.0.2") + b"\x12\x34\x56\x78" + bytes([17, 4])
                   + (5).to_bytes(2, "little" if socket.htons(1) != 1 else "big") + bytes(4))
    assert parse_flow_key(key) == {"dst": "10.0.0.1", "dport": 0x1234, "src": "10.0.0.2", "sport": 0x5678,
                                   "proto": 17, "family": 4, "vlan": 5, "vlan2": 0}
    assert parse_flow_key(flow_key("ff02::1", 1))["family"] == 6
    assert parse_action(action(lib.VMH_ACT_RING, 64, 9, 1)) == (lib.VMH_ACT_RING, 64, 9, 1)
    assert grant_key("10.0.0.1", 1)[16:] == b"\0\1\x11\4"


def test_structs_to_bytes_and_back() -> None:
    message = pack("struct vmh_msg_event", hdr={"magic": lib.VMH_CTL_MAGIC, "status": -5}, event=lib.VMH_EV_BYE)
    fields = as_dict(unpack("struct vmh_msg_event", message + b"more"))
    assert (fields["hdr"]["status"], fields["event"], fields["a"]) == (-5, lib.VMH_EV_BYE, 0)
    hello = unpack("struct vmh_msg_hello", pack("struct vmh_msg_hello", comm=b"x" * 16, profile=b"caf\xe9"))
    assert c_text(hello.comm) == "x" * 16
    assert c_text(hello.profile) == "caf\\xe9"
    page = as_dict(unpack("struct vmh_stats_page", bytes(size_of("struct vmh_stats_page"))))
    assert len(page["epoll"]) == lib.VMH_STATS_EPOLLS
    assert "socks" not in page  # of no fixed length
    with pytest.raises(ValueError, match="has 40 bytes, got 39"):
        unpack("struct vmh_msg_event", message[:39])
    with pytest.raises(KeyError):
        pack("struct vmh_msg_event", nosuch=1)
    with pytest.raises(OverflowError):
        pack("struct vmh_msg_event", a=-1)
