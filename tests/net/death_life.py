"""Rough lives of a program: `python -S -E death_life.py LIFE ADDRESS PORT`. It speaks to a server that echoes.

Prints "WHAT PID" where the test looks at it and waits for SIGUSR1; ends with 0 when all was well.
"""

import os
import signal
import socket
import sys
import threading
import time

TIMEOUT = 2.0


def connected(address: str, port: int) -> socket.socket:
    sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    sock.settimeout(TIMEOUT)
    sock.connect((address, port))
    return sock


def exchange(sock: socket.socket, times: int, tag: str = "") -> None:
    """Every answer must be the one to its question."""
    for number in range(times):
        data = f"{tag} {number} {time.monotonic_ns()}".encode()
        sock.send(data)
        answer = sock.recv(2048)
        if answer != data:
            raise SystemExit(f"asked {data!r}, answered {answer!r}")


def look(what: str) -> None:
    """Let the test look at this process until it sends SIGUSR1."""
    print(f"{what} {os.getpid()}", flush=True)
    signal.sigwait({signal.SIGUSR1})


def closing(how: str, address: str, port: int) -> None:
    """As daemons do: everything but 0, 1, 2 is closed; then the life goes on, and numbers are used again."""
    first = connected(address, port)
    exchange(first, 10)
    look("before")
    top = os.sysconf("SC_OPEN_MAX")
    if how == "closefrom":
        import ctypes

        ctypes.CDLL(None).closefrom(3)  # the preloaded one
    elif how == "closerange":
        os.closerange(3, top)
    else:
        for fd in range(3, top):
            try:
                os.close(fd)
            except OSError:
                continue
    # whatever was behind a number is a file of the program now
    files = [os.open("/dev/null", os.O_WRONLY) for _ in range(32)]
    sock = connected(address, port)
    first.detach()
    exchange(sock, 50, "after")
    look("after")
    exchange(sock, 50, "later")
    look("later")
    for file in files:
        os.write(file, b"x")
        os.close(file)


def forks(address: str, port: int) -> None:
    """Twenty children with open sockets, each with one of its own; the parent goes on meanwhile."""
    sock = connected(address, port)
    exchange(sock, 10)
    look("before")
    children = []
    for number in range(20):
        child = os.fork()
        if not child:
            exchange(connected(address, port), 20, f"child {number}")
            os._exit(0)
        children.append(child)
        exchange(sock, 5, "parent")
    bad = sum(os.waitpid(child, 0)[1] != 0 for child in children)
    if bad:
        raise SystemExit(f"{bad} children failed")
    fresh = connected(address, port)
    exchange(fresh, 50, "fresh")
    look("after")


def cycles(address: str, port: int) -> None:
    """Open, bind, close; a tenth of them speak."""
    keep = connected(address, port)
    exchange(keep, 10)

    def some(count: int) -> None:
        for number in range(count):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
                sock.bind(("", 0))
                if number % 10 == 0:
                    sock.settimeout(TIMEOUT)
                    sock.connect((address, port))
                    exchange(sock, 1, "cycle")

    some(200)
    look("before")
    some(2000)
    exchange(keep, 10)
    look("after")


def many(address: str, port: int) -> None:
    """Sixty-four sockets at once, by turns."""
    socks = [connected(address, port) for _ in range(64)]
    for _ in range(10):
        for number, sock in enumerate(socks):
            sock.send(b"socket %8d" % number)
        for number, sock in enumerate(socks):
            if sock.recv(100) != b"socket %8d" % number:
                raise SystemExit(f"socket {number} got another one's answer")
    look("after")
    for sock in socks:
        sock.close()
    look("closed")


def threads(address: str, port: int) -> None:
    """Eight threads with a socket each, two that open and close, and one socket that is used by two at once."""
    failed = []

    def guarded(work, *arguments) -> None:
        try:
            work(*arguments)
        except BaseException as error:
            failed.append(repr(error))

    def churn() -> None:
        for _ in range(50):
            with connected(address, port) as sock:
                exchange(sock, 1, "churn")

    shared = connected(address, port)

    def sender() -> None:
        for number in range(500):
            shared.send(b"%8d" % number)
            time.sleep(0.0005)

    def taker(got: list[int]) -> None:
        while len(got) < 500:
            got.append(int(shared.recv(100)))

    got: list[int] = []
    work = [threading.Thread(target=guarded, args=(exchange, connected(address, port), 200, f"thread {n}"))
            for n in range(8)]
    work += [threading.Thread(target=guarded, args=(churn,)) for _ in range(2)]
    work += [threading.Thread(target=guarded, args=(sender,)), threading.Thread(target=guarded, args=(taker, got))]
    for thread in work:
        thread.start()
    for thread in work:
        thread.join()
    if failed or sorted(got) != list(range(500)):
        raise SystemExit(f"failed: {failed}, {len(set(got))} of 500 datagrams")
    look("after")


def late(address: str, port: int) -> None:
    """The service comes when the program runs already: a new socket meets it, and takes the old one along."""
    old = connected(address, port)
    exchange(old, 20)
    look("before")
    time.sleep(1.1)  # the shim asks for a service once a second
    new = connected(address, port)
    exchange(new, 20)
    look("after")
    exchange(old, 50)
    exchange(new, 50)
    look("later")


def main() -> None:
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
    life, address, port = sys.argv[1], sys.argv[2], int(sys.argv[3])
    if life in ("closefrom", "closerange", "close"):
        closing(life, address, port)
    else:
        {"forks": forks, "cycles": cycles, "many": many, "threads": threads, "late": late}[life](address, port)


if __name__ == "__main__":
    main()
