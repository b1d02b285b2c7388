"""The command `vmahybrid`. What is slow to import is imported by the command that needs it."""

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Iterable
from types import ModuleType
from typing import Any, NoReturn

from vmahybrid.cli.output import Style, any_name_prints, emit, lost_stdout
from vmahybrid.errors import UsageError, VmahybridError

COMMANDS = ("status", "flows", "explain", "home", "adopt", "run", "softverbs", "start", "stop", "doctor", "config",
            "unit", "completion", "version")
RUN_USAGE = "vmahybrid run [-p PROFILE|FILE] [-e VMA_X=Y]... [--softverbs] -- COMMAND ARG..."
SOFTVERBS_USAGE = "vmahybrid softverbs -- COMMAND ARG..."
_TOP = ("-h", "--help", "--version")


class Parser(argparse.ArgumentParser):
    """Errors as one line that names the token, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        why = message.removeprefix("argument ")
        what = self.prog.removeprefix("vmahybrid").strip() or "command line"
        raise UsageError(what, why, f"{self.prog} --help shows how")


def build_parser(with_start: bool = True) -> Parser:
    """``with_start``: with the options of the service, whose module takes its time."""
    parser = Parser(prog="vmahybrid", description="Kernel bypass for unmodified socket programs.",
                    epilog="Without a command: status. VMAHYBRID_RUNDIR names the run directory of the service.",
                    allow_abbrev=False)  # fmt: skip
    parser.add_argument("--version", action="store_true", help="print the version")
    commands = parser.add_subparsers(dest="command_name", metavar="COMMAND", parser_class=Parser)

    def add(name: str, text: str, **more: Any) -> argparse.ArgumentParser:
        return commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".", allow_abbrev=False,
                                   **more)  # fmt: skip

    _json(add("status", "show the service, interfaces, processes, flows and what is wrong"))
    _flows(add("flows", "show the steering table; add or delete rules of the operator",
               usage="vmahybrid flows [-h] [--json] [--tcp] [VERB ...]"))  # fmt: skip
    explain = add("explain", "say why a socket is or is not on a ring")
    explain.add_argument("socket", metavar="PID[:FD]|ADDR:PORT", help="a process, its descriptor, or a local address")
    explain.add_argument("--all", action="store_true",
                         help="of a process: each socket, also where the same is to be said of many")
    _json(explain)
    _move(add("home", "bring sockets of a program home to the kernel; new ones may come to rings"))
    _move(add("adopt", "bring TCP connections of a program onto its rings"))
    _run(add("run", "run a program with the shim", usage=RUN_USAGE))
    softverbs = add("softverbs", "run a verbs program with the software RDMA device, without the shim",
                    usage=SOFTVERBS_USAGE)  # fmt: skip
    softverbs.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")
    start = add("start", "start the service")
    if with_start:
        from vmahybrid.service.main import add_arguments

        add_arguments(start)
    _json(add("stop", "stop the service; programs go on with the kernel"))
    doctor = add("doctor", "check what this machine offers, and say how to mend it")
    doctor.add_argument("interfaces", metavar="IF", nargs="*", help="interfaces to look at (default: all)")
    doctor.add_argument("--verbs-selftest", metavar="IF", help="only try each step of a raw packet QP on this "
                        "interface")  # fmt: skip
    _json(doctor)
    _config(add("config", "show the configuration of the running service, or change it; parameters of programs",
                usage="vmahybrid config [-h] [--json] [VERB ...]"))  # fmt: skip
    add("unit", "print the service as a unit of systemd")
    completion = add("completion", "print a completion script for the shell")
    completion.add_argument("shell", choices=("bash", "zsh"), help="eval \"$(vmahybrid completion bash)\"")
    add("version", "print the version")
    return parser


def _json(parser: argparse.ArgumentParser, *, verb: bool = False) -> None:
    """``verb``: below a command that has the option too, whose value must not be reset."""
    default = argparse.SUPPRESS if verb else False
    parser.add_argument("--json", action="store_true", default=default, help="print JSON with a schema number")


def _flows(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser, prog=parser.prog)
    add = verbs.add_parser("add", help="add a rule: what it covers stays on the kernel, or is dropped",
                           allow_abbrev=False)  # fmt: skip
    add.add_argument("action", choices=("kernel", "drop"), help="kernel: never offload; drop: drop in XDP")
    add.add_argument("local", metavar="ADDR:PORT", help="local address and port, * for any")
    add.add_argument("--remote", metavar="ADDR:PORT", default="*:*", help="remote address and port (default *:*)")
    add.add_argument("--proto", choices=("udp", "tcp"), default="udp", help="protocol (default udp)")
    add.add_argument("--netns", default="*", help="network namespace (default: all)")
    add.add_argument("--interface", metavar="IF", default="*", help="interface (default: every served one)")
    parser.add_argument("--tcp", action="store_true", help="TCP connections of programs instead: where each lives, and "
                        "its state on a ring")  # fmt: skip
    delete = verbs.add_parser("delete", help="delete a rule, or send a socket's flow home", allow_abbrev=False)
    delete.add_argument("flow_id", metavar="FLOW", help="number of the flow, the first column of vmahybrid flows")
    _json(add, verb=True)
    _json(delete, verb=True)


def _move(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("process", metavar="PID[:FD]", help="a process, or one of its descriptors")
    _json(parser)


def _run(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-p", "--profile", metavar="PROFILE|FILE", help="profile (VMA_SPEC): safe (the default), "
                        "adaptive, throughput, latency ...; vmahybrid config profiles lists them")  # fmt: skip
    parser.add_argument("-e", "--env", metavar="VMA_X=Y", action="append", default=[], help="parameter of the shim")
    parser.add_argument("--softverbs", action="store_true", help="with the software RDMA device: every Ethernet "
                        "interface has raw packet QPs (the program needs CAP_NET_RAW)")  # fmt: skip
    parser.add_argument("command", nargs=argparse.REMAINDER, help="program and its arguments")


def _config(parser: argparse.ArgumentParser) -> None:
    _json(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", parser_class=Parser, prog=parser.prog)
    change = verbs.add_parser("set", help="change settings of the service that are live, or VMA_* parameters in the "
                              "policy file; all are taken or none", allow_abbrev=False)  # fmt: skip
    change.add_argument("changes", metavar="KEY=VALUE", nargs="+", help="limits.rules=2048, VMA_RX_POLL=1000 ...")
    where = change.add_mutually_exclusive_group()
    where.add_argument("--program", metavar="GLOB", help="VMA_*: only for programs of this name")
    where.add_argument("--pid", type=int, help="VMA_TRACELEVEL, VMA_LOG_DETAILS: in this running program")
    show = verbs.add_parser("show", help="the VMA_* parameters as the shim would take them here, or as a running "
                            "program's shim did, and where each came from", allow_abbrev=False)  # fmt: skip
    show.add_argument("what", metavar="PID|PARAMETER", nargs="*", help="a program; parameters (default: all)")
    show.add_argument("--changed", action="store_true", help="only those that something has set")
    show.add_argument("--program", metavar="NAME", default="", help="program name, for the policy file's sections")
    diff = verbs.add_parser("diff", help="parameters that differ between two of: default, env, PID, PROFILE, FILE",
                            allow_abbrev=False)  # fmt: skip
    diff.add_argument("sources", metavar="SOURCE", nargs="*", help="one: against default; none: env "
                      "against default. A number is a PID: profile:15 is the profile of that number")  # fmt: skip
    check = verbs.add_parser("check", help="check files: libvma.conf, profiles, the policy, the service's TOML",
                             allow_abbrev=False)  # fmt: skip
    check.add_argument("files", metavar="FILE", nargs="+", help="what is wrong is printed with line and token")
    imported = verbs.add_parser("import", help="check a profile file and copy it to the profile directory",
                                allow_abbrev=False)  # fmt: skip
    imported.add_argument("file", metavar="FILE", help="lines VMA_X = VALUE")
    imported.add_argument("name", metavar="NAME", nargs="?", help="name of the profile (default: that of the file)")
    imported.add_argument("--force", action="store_true", help="replace a profile of that name")
    listed = verbs.add_parser("profiles", help="list profiles, or print one as a commented file", allow_abbrev=False)
    listed.add_argument("name", metavar="NAME", nargs="?", help="profile")
    for verb in (change, show, diff, check, imported, listed):
        _json(verb, verb=True)


def main(argv: list[str] | None = None) -> int:
    """Exit code 0 ok, 1 failed or unhealthy, 2 usage, 77 not possible here; of `run` that of the program."""
    any_name_prints()
    try:
        return dispatch(sys.argv[1:] if argv is None else argv)
    except VmahybridError as error:
        sys.stdout.flush()
        print(f"vmahybrid: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        return lost_stdout("vmahybrid", error)


def dispatch(argv: list[str]) -> int:
    if not argv or (argv[0].startswith("-") and argv[0] not in _TOP):
        argv = ["status", *argv]
    if argv[0] not in COMMANDS and argv[0] not in _TOP:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        raise UsageError(argv[0], "no such command", f"{hint}the commands are {', '.join(COMMANDS)}")
    try:
        args = build_parser(argv[0] == "start").parse_args(argv)
    except SystemExit as done:  # --help
        return int(done.code or 0)
    name = "version" if args.version else args.command_name
    if name in _DIRECT:
        return _DIRECT[name](args)
    return _ask(name, args)


def _ask(name: str, args: argparse.Namespace) -> int:
    """Commands that ask the service, and those of their verbs that need not."""
    from vmahybrid.cli import config, explain, flows, move, parameters, status, stop
    from vmahybrid.cli.client import Client

    module: ModuleType = {"status": status, "flows": flows, "explain": explain, "config": config, "home": move,
                          "adopt": move, "stop": stop}[name]
    if name == "config" and parameters.is_local(args):
        module = parameters
        body, code = parameters.run(args)
    else:
        with Client() as client:
            body, code = module.run(args, client)
    show(body, args.json, lambda: module.lines(body, Style.of(sys.stdout)))
    return int(code)


def show(body: dict[str, Any], as_json: bool, lines: Callable[[], Iterable[str]]) -> None:
    if as_json:
        print(json.dumps(body, indent=2))
    else:
        emit(lines())
    sys.stdout.flush()


def _doctor(args: argparse.Namespace) -> int:
    from vmahybrid.cli import doctor

    body, code = doctor.run(args)
    show(body, args.json, lambda: doctor.lines(body, Style.of(sys.stdout)))
    return code


def _run_program(args: argparse.Namespace) -> int:
    from vmahybrid.cli import run

    return run.run(args)


def _softverbs(args: argparse.Namespace) -> int:
    from vmahybrid.cli import run

    return run.softverbs(args)


def _start(args: argparse.Namespace) -> int:
    from vmahybrid.service import main as service

    return int(service.main(args))


def _version(_args: argparse.Namespace) -> int:
    from vmahybrid.cli.version import version

    print(f"vmahybrid {version()}")
    return 0


def _completion(args: argparse.Namespace) -> int:
    from vmahybrid.cli import completion

    print(completion.script(args.shell, build_parser()), end="")
    return 0


def _unit(_args: argparse.Namespace) -> int:
    from vmahybrid.cli.unit import unit

    print(unit(), end="")
    return 0


_DIRECT: dict[str, Callable[[argparse.Namespace], int]] = {
    "doctor": _doctor, "run": _run_program, "softverbs": _softverbs, "start": _start, "version": _version,
    "completion": _completion, "unit": _unit,
}  # fmt: skip

if __name__ == "__main__":
    sys.exit(main())
