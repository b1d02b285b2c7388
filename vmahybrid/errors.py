"""The exceptions of vmahybrid, each with the remedy a user needs.

VmahybridError
├── UsageError            a wrong command line, configuration key or API value (exit 2, HTTP 422)
├── NotPossibleHere       the machine lacks something (exit 77, HTTP 501)
├── NotFound              no such process, socket, flow, interface (HTTP 404)
├── Refused               the service says no, with a reason of the enumeration (HTTP 409)
└── ServiceUnreachable    no service answers (exit 1)
"""

from __future__ import annotations


class VmahybridError(Exception):
    """what failed, why, and what to do: printed as ``vmahybrid: WHAT: WHY. WHAT TO DO``."""

    exit_code = 1

    def __init__(self, what: str, why: str, remedy: str = "") -> None:
        self.what, self.why, self.remedy = what, why, remedy
        super().__init__(what, why, remedy)

    def __str__(self) -> str:
        text = f"{self.what}: {self.why}"
        return f"{text}. {self.remedy}" if self.remedy else text


class UsageError(VmahybridError):
    exit_code = 2


class NotPossibleHere(VmahybridError):
    exit_code = 77


class NotFound(VmahybridError):
    pass


class Refused(VmahybridError):
    """Carries the reason code (vmahybrid.steering.reasons.Reason) as ``reason``."""

    def __init__(self, what: str, why: str, remedy: str = "", reason: int = 0) -> None:
        super().__init__(what, why, remedy)
        self.reason = reason


class ServiceUnreachable(VmahybridError):
    pass
