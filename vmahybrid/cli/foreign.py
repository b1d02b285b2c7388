"""The service's answers for a caller with process ids of its own, in a container say: each process has the pid that the
caller sees, and 0 where it sees none, as the kernel has it in SO_PEERCRED.
"""

from typing import Any

from vmahybrid.errors import NotFound


class Pids:
    """``processes``: as /v1/processes has them; ``namespace``: inode of the caller's PID namespace."""

    def __init__(self, processes: list[dict[str, Any]], namespace: int) -> None:
        self._seen: dict[int, int] = {p["pid"]: p["ns_pid"] for p in processes if p.get("pid_ns") == namespace}
        self._real: dict[int, int] = {seen: pid for pid, seen in self._seen.items()}

    def request(self, parts: tuple[str | int, ...]) -> tuple[str | int, ...]:
        """The path with the service's pids. Raises NotFound for a process that the caller does not see."""
        match parts:
            case ("v1", "processes" | "stats" as what, int(pid), *rest):
                return "v1", what, self._known(pid), *rest
            case ("v1", "sockets", str(name), "explain") if name.replace(":", "", 1).isdigit():
                first, colon, fd = name.partition(":")
                if first:
                    return "v1", "sockets", f"{self._known(int(first))}{colon}{fd}", "explain"
        return parts

    def _known(self, pid: int) -> int:
        if pid not in self._real:
            raise NotFound(f"process {pid}", "no process with that number in this PID namespace has a session with the "
                           "service", "ask on the host, with the PID that vmahybrid status shows there")
        return self._real[pid]

    def answer(self, asked: tuple[str | int, ...], body: Any) -> Any:
        if asked[1:2] == ("sockets",) and asked[-1] == "explain":
            return self._explained(str(asked[2]), body)
        return self._translated(body)

    def _translated(self, body: Any) -> Any:
        if isinstance(body, list):
            return [self._translated(item) for item in body]
        if not isinstance(body, dict):
            return body
        found = {name: self._translated(value) for name, value in body.items()}
        if "pid" in found and ("comm" in found or "ring_id" in found):  # not the service's own
            found["pid"] = self._seen.get(found["pid"], 0)
            if "socket_id" in found:
                found["socket_id"] = f"{found['pid']}:{found['fd']}"
        return found

    def _explained(self, name: str, body: Any) -> Any:
        """The sentences name the process at their beginning."""
        seen = name.partition(":")[0]
        if not seen.isdigit() or int(seen) not in self._real:
            return body
        real = self._real[int(seen)]

        def said(text: str) -> str:
            for before, behind in (("process ", " "), ("", ":")):
                if text.startswith(f"{before}{real}{behind}"):
                    return before + seen + text[len(f"{before}{real}"):]
            return text

        return body | {"socket": name, "steps": [step | {"text": said(step["text"])} for step in body["steps"]]}
