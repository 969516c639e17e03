"""Processes that have imported PyTorch already: for tests that start many, none of which is about how they start.

`verify` starts two fresh interpreters a call, and each imports PyTorch for two seconds. Under the fixture
`warm_processes` they are forks of one process that has done so. Whatever depends on a fresh interpreter (candidates
that look for whoever judges them, hang or kill their process) is tested without it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

LINE = 1 << 16  # bytes that are read at once


class Popen:
    """As much of `subprocess.Popen` as gemmnorm uses, for `[sys.executable, "-c", code]`."""

    server = ""

    def __init__(
        self, command: Sequence[str], *, stdin: int, stdout: int, stderr: int | None = None, **options: Any
    ) -> None:
        python, flag, code = command
        assert (python, flag) == (sys.executable, "-c")
        pipes = [os.pipe() if wanted is not None else None for wanted in (stdin, stdout, stderr)]
        theirs = [os.dup(index) if pipe is None else pipe[index > 0] for index, pipe in enumerate(pipes)]
        passed = list(options.get("pass_fds", ()))
        request = {
            "code": code, "numbers": [0, 1, 2, *passed], "folder": os.getcwd(),
            "environment": dict(options.get("env") or os.environ), "leads": options.get("start_new_session", False),
        }  # fmt: skip
        self._connection = socket.socket(socket.AF_UNIX)
        self._connection.connect(self.server)
        text = json.dumps(request).encode()
        socket.send_fds(self._connection, [len(text).to_bytes(8, "big")], [*theirs, *passed])
        self._connection.sendall(text)
        for descriptor in theirs:
            os.close(descriptor)
        self.pid = self._told()
        self.returncode: int | None = None
        how = {"encoding": options.get("encoding", "utf-8"), "errors": options.get("errors", "strict")}
        self.stdin, self.stdout, self.stderr = (
            os.fdopen(pipe[not index], "r" if index else "w", **how) if pipe else None
            for index, pipe in enumerate(pipes)
        )

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            if not select.select([self._connection], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a warm process", timeout or 0.0)
            self.returncode = self._told()
            self._connection.close()
        return self.returncode

    def _told(self) -> int:
        told = self._connection.recv(8, socket.MSG_WAITALL)
        assert len(told) == 8, "the server of warm processes has ended"
        return int.from_bytes(told, "big", signed=True)

    def poll(self) -> int | None:
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.wait(0.0)
        return self.returncode

    def kill(self) -> None:
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)


warm_subprocess = types.SimpleNamespace(
    Popen=Popen,
    PIPE=subprocess.PIPE,
    TimeoutExpired=subprocess.TimeoutExpired,
)


def users() -> tuple[types.ModuleType, ...]:
    """The modules that start interpreters."""
    from gemmnorm.userfiles import bare, isolate

    return bare, isolate


@contextlib.contextmanager
def served() -> Iterator[str]:
    """A server's address."""
    with tempfile.TemporaryDirectory() as folder:
        address = str(Path(folder) / "warm")
        server = subprocess.Popen([sys.executable, __file__, address], stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None and server.stdout.readline()
            yield address
        finally:
            server.kill()
            server.wait()


# --- the server -------------------------------------------------------------------------------------------------------


def become(request: dict[str, Any], descriptors: list[int]) -> None:
    """In the fork: the process that was asked for. Its code sees what a fresh interpreter has, and PyTorch."""
    from gemmnorm.userfiles import bare

    if request["leads"]:
        os.setsid()
    high = [fcntl.fcntl(descriptor, fcntl.F_DUPFD, 200) for descriptor in descriptors]
    for number, descriptor in zip(request["numbers"], high, strict=True):
        os.dup2(descriptor, number)
    for number in {*range(400)} - {*request["numbers"]}:
        with contextlib.suppress(OSError):
            os.close(number)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.chdir(request["folder"])
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    sys.stdin, sys.stdout, sys.stderr = (os.fdopen(number, mode) for number, mode in enumerate("rww"))
    if request["code"] == bare._START:  # which brings the package's sources under another name
        for name in [name for name in sys.modules if name.partition(".")[0] == "gemmnorm"]:
            del sys.modules[name]
    code = 1
    try:
        exec(compile(request["code"], "<string>", "exec"), {"__name__": "__main__"})
        code = 0
    except SystemExit as ended:
        code = int(ended.code or 0)
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
        os._exit(code)


def serve(address: str) -> None:
    import torch._dynamo  # noqa: F401  (verify imports it as soon as it runs a dispatch mode)

    import gemmnorm.verify.answer
    import gemmnorm.verify.runner  # noqa: F401

    for module in users():
        module.subprocess = warm_subprocess
    Popen.server = address
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(address)
    listener.listen(64)
    print("ready", flush=True)
    asked: dict[int, socket.socket] = {}
    wakes, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready = select.select([listener, wakes], [], [])[0]
        if wakes in ready:
            os.read(wakes, LINE)
            while asked:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    break
                with contextlib.suppress(OSError), asked.pop(pid) as connection:
                    connection.sendall(os.waitstatus_to_exitcode(status).to_bytes(8, "big", signed=True))
        if listener in ready:
            connection, _ = listener.accept()
            size, descriptors, _, _ = socket.recv_fds(connection, 8, 16)
            text = b""
            while len(text) < int.from_bytes(size, "big"):
                text += connection.recv(LINE)
            pid = os.fork()
            if pid == 0:
                become(json.loads(text), descriptors)
            asked[pid] = connection
            connection.sendall(pid.to_bytes(8, "big", signed=True))
            for descriptor in descriptors:
                os.close(descriptor)


if __name__ == "__main__":
    serve(sys.argv[1])
