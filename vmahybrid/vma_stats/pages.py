"""The statistics files of a directory (-k, VMA_STATS_SHMEM_DIR) read without a service: what libvma's vma_stats does.

A file counts as a process's when the process runs and the file is its user's, so that nobody can pretend to be somebody
else's program. Who may write it gives the program orders there (stats/orders.py).
"""

import os
import stat
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vmahybrid.errors import NotFound, ServiceUnreachable
from vmahybrid.service.view import ProcessStats, ProcessView
from vmahybrid.stats import orders
from vmahybrid.stats.page import PageError, StatsPage, read_page
from vmahybrid.vma_stats.directory import pids_in


class Pages:
    """Answers as cli.client.Client what vma_stats asks for: processes, stats and flows."""

    def __init__(self, directory: str, why: ServiceUnreachable) -> None:
        self._directory, self._why = directory, why
        self.refused: set[int] = set()  # processes whose files are there, and not for this user

    def get(self, *path: str | int) -> Any:
        match path:
            case ("v1", "processes"):
                return [reading["process"] for reading in self._all()]
            case ("v1", "stats"):
                return self._all()
            case ("v1", "stats", int(pid)):
                return self._one(pid)
            case ("v1", "flows"):
                return []
        raise self._why

    def post(self, *path: str | int, body: Any = None) -> Any:
        match path:
            case ("v1", "processes", int(pid), "zero"):
                self._order(pid, orders.zero)
            case ("v1", "processes", int(pid), "log"):
                self._order(pid, lambda fd: orders.set_log(fd, body["level"], body["details"]))
            case ("v1", "processes", int(pid), "dump-fd"):
                self._order(pid, lambda fd: orders.dump(fd, body["fd"], body["level"]))
            case _:
                raise self._why

    def _order(self, pid: int, order: Callable[[int], None]) -> None:
        with self._file(pid, os.O_RDWR) as (fd, _):
            order(fd)

    def _all(self) -> list[dict[str, Any]]:
        found = []
        for pid in sorted(pids_in(self._directory)):
            try:
                found.append(self._one(pid))
            except NotFound:
                continue
        return found

    def _one(self, pid: int) -> dict[str, Any]:
        with self._file(pid, os.O_RDONLY) as (fd, owner):
            return asdict(_reading(read_page(fd, pid), owner))

    @contextmanager
    def _file(self, pid: int, mode: int) -> Iterator[tuple[int, int]]:
        """The descriptor, and the user of the process. Raises NotFound."""
        path = os.path.join(self._directory, f"vmastat.{pid}")
        try:
            owner = os.stat(f"/proc/{pid}").st_uid
            fd = os.open(path, mode | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        except OSError as why:
            if isinstance(why, PermissionError):
                self.refused.add(pid)
            raise NotFound(f"process {pid}", why.strerror or str(why)) from None
        try:
            info = os.fstat(fd)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != owner:
                raise NotFound(f"process {pid}", f"{path} is not of its user")
            yield fd, owner
        except (OSError, PageError) as why:
            raise NotFound(f"process {pid}", str(why)) from None
        finally:
            os.close(fd)


class Beside:
    """A client, and the files of the programs with these pids, which it does not know."""

    def __init__(self, client: Any, pages: Pages, pids: set[int]) -> None:
        self._client, self._pages, self._pids = client, pages, pids

    def get(self, *path: str | int) -> Any:
        if path == ("v1", "stats"):
            found = self._pages.get(*path)
            return self._client.get(*path) + [one for one in found if one["process"]["pid"] in self._pids]
        return self._of(path).get(*path)

    def post(self, *path: str | int, body: Any = None) -> Any:
        return self._of(path).post(*path, body=body)

    def _of(self, path: tuple[str | int, ...]) -> Any:
        return self._pages if self._pids.intersection(path[2:3]) else self._client


def _reading(page: StatsPage, uid: int) -> ProcessStats:
    try:
        words = Path(f"/proc/{page.pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        words = []
    process = ProcessView(
        pid=page.pid, uid=uid, comm=page.comm, cmdline=b" ".join(words).decode("utf-8", "replace").strip(), profile="",
        application_id="", netns="", session=page.session, started=page.started,
        offloaded_sockets=sum(sock.offloaded for sock in page.sockets), sockets=len(page.sockets),
        rings=[ring.ring_id for ring in page.rings], flows=[], reason=page.reason, log_level=page.log_level,
        log_details=page.log_details, sockets_over=page.sockets_over, homecomings=page.homecomings,
        orders_waiting=page.orders_waiting,
    )  # fmt: skip
    return ProcessStats(process, time.monotonic(), page.sockets, page.iomux, page.rings)
