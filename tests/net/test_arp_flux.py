"""The manual's ARP flux: two interfaces on one network, for both of which Linux answers, are warned about."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

import pytest
from net.service_lab import module_pair, module_services  # noqa: F401

from vmahybrid.bench.sandbox import Program, Sandbox, run_command
from vmahybrid.bench.served import Service

pytestmark = [pytest.mark.root, pytest.mark.timeout(60)]

PROGRAM = """
import socket, sys, time
s = socket.socket(type=socket.SOCK_DGRAM)
s.bind((sys.argv[1], 0))
print("bound", flush=True)
time.sleep(float(sys.argv[2]))
"""
TEXT = "VMA WARNING: Interfaces va and vmhx are on the same network, and Linux answers ARP requests for the"


def start(box: Sandbox, service: Service, seconds: float) -> Program:
    argv = service.run_argv([sys.executable, "-c", PROGRAM, box.a.address, str(seconds)], "none")
    return box.start(box.a, argv, env=service.env)


def said(box: Sandbox, service: Service) -> str:
    program = start(box, service, 0)
    assert program.wait(10) == 0
    return program.errors


def doer(box: Sandbox) -> Callable[[str], None]:
    def do(command: str) -> None:
        run_command(*box.a.command(command.split()))

    return do


def test_the_second_interface_comes_while_the_program_runs(service: Service, netns_pair: Sandbox) -> None:
    do = doer(netns_pair)
    net = netns_pair.a.address.rpartition(".")[0]
    program = start(netns_pair, service, 30)
    try:
        program.wait_for("bound")
        do("ip link add vmhx type veth peer vmhy")
        do(f"ip address add {net}.77/24 dev vmhx")
        do("ip link set vmhx up")
        do("ip link set vmhy up")
        program.wait_for(r"\(ARP flux\)", 15)
        do(f"ip address add {net}.78/24 dev vmhx")
        time.sleep(1.5)
        assert program.errors.count("(ARP flux)") == 1 and TEXT in program.errors
    finally:
        do("ip link delete vmhx")
        program.stop()


def test_two_interfaces_on_one_network(service: Service, netns_pair: Sandbox) -> None:
    do = doer(netns_pair)
    assert "ARP flux" not in said(netns_pair, service)
    do("ip link add vmhx type veth peer vmhy")
    try:
        do("ip address add 10.99.0.1/24 dev vmhx")
        do("ip link set vmhx up")
        do("ip link set vmhy up")
        time.sleep(0.5)
        assert "ARP flux" not in said(netns_pair, service), "another network"
        net = netns_pair.a.address.rpartition(".")[0]
        do(f"ip address add {net}.77/24 dev vmhx")
        time.sleep(0.5)
        log = said(netns_pair, service)
        assert TEXT in log and log.count("(ARP flux)") == 1
        assert "net.ipv4.conf.[DEVICE].arp_announce=1 net.ipv4.conf.[DEVICE].arp_ignore=2" in log
        assert "sysctl -w net.ipv4.conf.[DEVICE].rp_filter=0\n" in log
        do("sysctl -qw net.ipv4.conf.vmhx.arp_ignore=2 net.ipv4.conf.va.arp_ignore=2")
        assert "ARP flux" not in said(netns_pair, service), "the manual's remedy"
        do("sysctl -qw net.ipv4.conf.vmhx.arp_ignore=0 net.ipv4.conf.va.arp_ignore=0")
        do("sysctl -qw net.ipv4.conf.all.arp_ignore=1")
        assert "ARP flux" not in said(netns_pair, service)
    finally:
        do("ip link delete vmhx")
        do("sysctl -qw net.ipv4.conf.all.arp_ignore=0")
