"""Echo servers of the kinds that there are, and a client: `python tcp_servers.py KIND ADDRESS PORT`. Each connection is
echoed until its end. A server says "ready"; the client "answered N" when all was right."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading

CHILDREN = 3
THREADS = 8


def echo(sock: socket.socket) -> None:
    """Who resets the connection has no need of an answer."""
    with sock, contextlib.suppress(ConnectionError):
        while data := sock.recv(65536):
            sock.sendall(data)


def listener(address: str, port: int) -> socket.socket:
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind((address, port))
    sock.listen(32)
    return sock


def ready() -> None:
    print("ready", flush=True)


def forking(at: socket.socket) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ready()
    while True:
        sock, _ = at.accept()
        if not os.fork():
            at.close()
            echo(sock)
            os._exit(0)
        sock.close()


def preforking(at: socket.socket) -> None:
    """The children share the listener; each serves one connection after another."""
    for _ in range(CHILDREN):
        if not os.fork():
            while True:
                echo(at.accept()[0])
    ready()
    os.wait()


def inetd(at: socket.socket) -> None:
    """The program that is executed has the connection as its standard input and output."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    ready()
    while True:
        sock, _ = at.accept()
        if not os.fork():
            for fd in (0, 1):
                os.dup2(sock.fileno(), fd)
            sock.close()
            os.execvp("cat", ["cat"])
        sock.close()


def inetd_wait(at: socket.socket) -> None:
    """As inetd with "wait": the program gets the listener as its standard input."""
    ready()
    os.dup2(at.fileno(), 0)
    os.execv(sys.executable, [sys.executable, __file__, "taken", *sys.argv[2:]])


def taken() -> None:
    serving = socket.socket(fileno=os.dup(0))
    while True:
        threading.Thread(target=echo, args=(serving.accept()[0],), daemon=True).start()


def threads(at: socket.socket) -> None:
    """One for each connection, that ends with it."""
    ready()
    while True:
        threading.Thread(target=echo, args=(at.accept()[0],), daemon=True).start()


def accepting_threads(at: socket.socket) -> None:
    """All wait in accept() on one listener."""
    def serve() -> None:
        while True:
            echo(at.accept()[0])

    workers = [threading.Thread(target=serve, daemon=True) for _ in range(THREADS)]
    for worker in workers:
        worker.start()
    ready()
    workers[0].join()


def processes(at: socket.socket, how: str) -> None:
    """multiprocessing: the connection goes to the process by fork, or by SCM_RIGHTS."""
    context = multiprocessing.get_context(how)
    ready()
    while True:
        sock, _ = at.accept()
        context.Process(target=echo, args=(sock,), daemon=True).start()
        sock.close()


def pool(at: socket.socket) -> None:
    """Workers that were there before the connections, which reach them by SCM_RIGHTS."""
    with multiprocessing.get_context("fork").Pool(CHILDREN) as workers:
        ready()
        while True:
            sock, _ = at.accept()
            workers.apply_async(echo, (sock,), callback=lambda _, mine=sock: mine.close())


def subprocesses(at: socket.socket) -> None:
    """As inetd, by vfork."""
    ready()
    running = []
    while True:
        sock, _ = at.accept()
        running.append(subprocess.Popen(["cat"], stdin=sock, stdout=sock))
        sock.close()


def passing(at: socket.socket) -> None:
    """By vfork; the connection keeps its number."""
    ready()
    running = []
    while True:
        sock, _ = at.accept()
        argv = [sys.executable, __file__, "given", "", str(sock.fileno())]
        running.append(subprocess.Popen(argv, pass_fds=[sock.fileno()]))
        sock.close()


def ask(address: str, port: int, number: int, done: list[int]) -> None:
    with socket.create_connection((address, port), 15) as sock:
        for turn in range(30):      # small ones first: a connection that is adopted when it is hot
            sent = b"%d/%d;" % (number, turn) * (1 if turn < 20 else turn * turn * 5)
            sender = threading.Thread(target=sock.sendall, args=(sent,))
            sender.start()
            got = b""
            while len(got) < len(sent) and (part := sock.recv(len(sent) - len(got))):
                got += part
            sender.join()
            assert got == sent, (number, turn, len(got), len(sent))
        sock.shutdown(socket.SHUT_WR)
        assert sock.recv(1) == b""
        done.append(number)


def client(address: str, port: int) -> None:
    """Some connections one after another, then some at a time."""
    done: list[int] = []
    for number in range(3):
        ask(address, port, number, done)
    together = [threading.Thread(target=ask, args=(address, port, 10 + n, done)) for n in range(CHILDREN)]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    print("answered", len(done))


def client_of_many(address: str, port: int) -> None:
    """All are open before the first is asked, and stay: each needs a thread of its own."""
    with contextlib.ExitStack() as stack:
        socks = [stack.enter_context(socket.create_connection((address, port), 10)) for _ in range(THREADS)]
        for number, sock in enumerate(socks):
            sock.sendall(b"%d" % number)
        answers = [sock.recv(10) for sock in socks]
    assert answers == [b"%d" % number for number in range(THREADS)], answers
    print("answered", len(answers))


SERVERS = {
    "forking": forking, "preforking": preforking, "inetd": inetd, "inetd-wait": inetd_wait, "threads": threads,
    "accepting-threads": accepting_threads, "processes-fork": lambda at: processes(at, "fork"),
    "processes-spawn": lambda at: processes(at, "spawn"), "pool": pool, "subprocesses": subprocesses,
    "passing": passing,
}


def main(kind: str, address: str, port: int) -> None:
    if kind == "client":
        client(address, port)
    elif kind == "client-of-many":
        client_of_many(address, port)
    elif kind == "taken":
        taken()
    elif kind == "given":
        echo(socket.socket(fileno=port))
    else:
        SERVERS[kind](listener(address, port))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
