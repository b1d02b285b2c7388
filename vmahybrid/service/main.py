"""``vmahybrid start``: arguments, logging, daemon or foreground."""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import logging.handlers
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from vmahybrid.config.service import ServiceConfig, load
from vmahybrid.errors import NotPossibleHere, UsageError, VmahybridError

log = logging.getLogger("vmahybrid.service")

LOG_FILE = "/var/log/vmahybrid.log"  # without syslog
LOG_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The options of ``vmahybrid start``."""
    parser.add_argument("--config", metavar="FILE",
                        help="configuration, TOML (default: /etc/vmahybrid.toml if it exists)")
    parser.add_argument("--interface", metavar="[NETNS:]IF", action="append", default=[],
                        help="serve this interface (a shell pattern; may be repeated; default: every Ethernet "
                             "interface with an address, on demand)")
    parser.add_argument("--control", metavar="PATH", help="control socket that programs connect to")
    parser.add_argument("--foreground", action="store_true",
                        help="stay in the foreground and log to stderr (default: return when programs may be "
                             f"offloaded, and log to syslog, or to {LOG_FILE} where there is no /dev/log)")
    parser.add_argument("--log-level", metavar="LEVEL", help="what is logged: debug, info, warning or error")


def main(args: argparse.Namespace) -> int:
    """Run the service. Exit codes: 0, 1 failed, 2 usage, 77 not possible here; messages go to stderr."""
    try:
        if args.config == "":
            raise UsageError("--config", "it is empty", "name a file, or leave it out")
        config = load(Path(args.config) if args.config else None, _from_command_line(args))
        if args.foreground:
            _log_to(logging.StreamHandler(), config)
            _serve(config, lambda: None)
            return 0
        return _daemonize(config)
    except VmahybridError as error:
        print(f"vmahybrid: {error}", file=sys.stderr)
        return error.exit_code
    except OSError as error:
        print(f"vmahybrid: service: {error}", file=sys.stderr)
        return 1


def _from_command_line(args: argparse.Namespace) -> dict[str, Any]:
    values: dict[str, Any] = {}
    if args.interface:
        values["interfaces"] = list(args.interface)
    if args.control is not None:
        values["control.path"] = os.path.abspath(args.control) if args.control else ""
    if args.log_level is not None:
        values["log.level"] = args.log_level
    return values


def _log_to(handler: logging.Handler, config: ServiceConfig) -> None:
    handler.setFormatter(logging.Formatter(LOG_FORMAT))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    logging.getLogger("vmahybrid").setLevel(config["log.level"].upper())


def _serve(config: ServiceConfig, on_ready: Callable[[], None]) -> None:
    from vmahybrid.service.app import Service
    from vmahybrid.service.backend_xdp import XdpBackend
    from vmahybrid.service.watching import make_watcher

    async def life() -> None:
        backend = XdpBackend(switch=config["bulk.switch"], detach=config["bulk.detach"])
        await Service(config, backend, make_watcher, on_ready).run()

    gc.freeze()  # the imported modules are here to stay: collections need not look at them
    try:
        asyncio.run(life())
    except PermissionError as error:
        raise NotPossibleHere("service", str(error), "start the service as root, with its capabilities") from error


def _daemonize(config: ServiceConfig) -> int:
    """Fork; the parent returns when the child is ready (0) or with its error, the child serves and never returns."""
    reader, writer = os.pipe()
    child = os.fork()
    if child:
        os.close(writer)
        with os.fdopen(reader, "r", encoding="utf-8") as pipe:
            answer = pipe.read()
        if answer.startswith("ready"):
            print(f"vmahybrid: ready, process {child}, control socket {config['control.path']}")
            return 0
        _, status = os.waitpid(child, 0)
        print(f"vmahybrid: {answer or 'the service ended before it was ready; see the log'}", file=sys.stderr)
        return os.waitstatus_to_exitcode(status) or 1
    os.close(reader)
    os._exit(_child(config, writer))


def _daemon_log() -> logging.Handler:
    """Syslog, or LOG_FILE where nobody listens. Raises OSError."""
    if os.path.exists("/dev/log"):
        handler = logging.handlers.SysLogHandler("/dev/log", logging.handlers.SysLogHandler.LOG_DAEMON)
        handler.ident = f"vmahybrid[{os.getpid()}]: "
        return handler
    # Made here with its mode: it names programs and their command lines.
    try:
        os.close(os.open(LOG_FILE, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o640))
    except PermissionError as error:
        raise NotPossibleHere("service", f"the log can't be written: {error}",
                              "start the service as root, or with --foreground") from None
    return logging.FileHandler(LOG_FILE, encoding="utf-8", errors="backslashreplace")


def _child(config: ServiceConfig, writer: int) -> int:
    os.setsid()
    os.chdir("/")
    os.umask(0o022)
    null = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    told = False

    def ready() -> None:
        nonlocal told
        told = True
        os.write(writer, b"ready")
        os.close(writer)

    try:
        _log_to(_daemon_log(), config)
        _serve(config, ready)
        return 0
    except Exception as error:
        log.critical("%s", error, exc_info=not isinstance(error, VmahybridError))
        if not told:
            os.write(writer, str(error).encode())
        return error.exit_code if isinstance(error, VmahybridError) else 1
