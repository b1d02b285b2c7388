"""A program under the shim that does what it is told, one system call at a time: see counter_lab.py.

Reads Python from stdin, one JSON string a line; answers with the value of the last expression, as JSON.
"""

import ast
import ctypes
import json
import os
import select  # noqa: F401  for what is told
import signal  # noqa: F401
import socket
import struct
import sys
import threading  # noqa: F401
import time  # noqa: F401

libc = ctypes.CDLL(None, use_errno=True)


def udp(address: str, port: int = 0, *options: tuple[int, int, int]) -> socket.socket:
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    for option in options:
        made.setsockopt(*option)
    made.bind((address, port))
    return made


def timeout(sock: socket.socket, microseconds: int) -> None:
    """SO_RCVTIMEO: settimeout() of Python would poll(2)."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", *divmod(microseconds, 1_000_000)))


def fails(call: object, *arguments: object) -> str:
    """The name of the errno that a call ends with; "" where it does not fail."""
    try:
        call(*arguments)  # type: ignore[operator]
    except OSError as error:
        return type(error).__name__ if error.errno is None else os.strerror(error.errno)
    return ""


class Message(ctypes.Structure):
    """struct mmsghdr with one buffer and no address."""

    _fields_ = (("name", ctypes.c_void_p), ("namelen", ctypes.c_uint), ("iov", ctypes.c_void_p),
                ("iovlen", ctypes.c_size_t), ("control", ctypes.c_void_p), ("controllen", ctypes.c_size_t),
                ("flags", ctypes.c_long), ("len", ctypes.c_uint))


def sendmmsg(sock: socket.socket, count: int, size: int) -> int:
    data = ctypes.create_string_buffer(size)
    iov = (ctypes.c_size_t * 2)(ctypes.addressof(data), size)
    one = Message(iov=ctypes.addressof(iov), iovlen=1)
    return int(libc.sendmmsg(sock.fileno(), (Message * count)(*[one] * count), count, 0))


def recvmmsg(sock: socket.socket, count: int, size: int, flags: int = 0) -> int:
    room = [ctypes.create_string_buffer(size) for _ in range(count)]
    iov = [(ctypes.c_size_t * 2)(ctypes.addressof(data), size) for data in room]
    return int(libc.recvmmsg(sock.fileno(), (Message * count)(*[Message(iov=ctypes.addressof(one), iovlen=1)
                                                                 for one in iov]), count, flags, None))


BAD = ctypes.c_void_p(8)


def refused(name: str, sock: socket.socket, *arguments: object) -> bool:
    """Does libc's call of that name fail?"""
    ctypes.set_errno(0)
    return getattr(libc, name)(sock.fileno(), *arguments) == -1 and ctypes.get_errno() != 0


def vector(count: int = 1, size: int = 1) -> object:
    """So many buffers, for readv and writev."""
    room = ctypes.create_string_buffer(size)
    return (ctypes.c_size_t * (2 * count))(*[ctypes.addressof(room), size] * count)


def told(code: str, names: dict[str, object]) -> object:
    tree = ast.parse(code)
    last = tree.body.pop() if isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, "told", "exec"), names)
    return eval(compile(ast.Expression(last.value), "told", "eval"), names) if isinstance(last, ast.Expr) else None


def main() -> None:
    names = dict(globals())
    for line in sys.stdin:
        try:
            answer = {"ok": told(json.loads(line), names)}
        except BaseException as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer, default=repr), flush=True)


if __name__ == "__main__":
    main()
