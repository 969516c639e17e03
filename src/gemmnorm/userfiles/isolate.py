"""Run one function in a Python process of its own, under a time limit, and say how it ended.

Model files come from anywhere. They may raise, hang, kill the process, print to any stream or leave children
behind, and none of that may take the tool down. So everything that executes a user's file goes through
`run_isolated`::

    outcome = run_isolated("gemmnorm.verify.answer:check_files", {"model_path": "m.py"}, time_limit=600)
    outcome.status       # "ok" | "raised" | "hung" | "crashed"

How the two processes talk. The request (one line of JSON) arrives on the child's standard input. Before any
user code runs, the child keeps a private duplicate of its standard output as the *channel* and points the original
descriptor at standard error, so a `print`, a C++ `std::cout` or a subprocess of the user's can only reach the
log. Answers are JSON lines on the channel: progress as it happens, then one result. The duplicate is not
inheritable, so programs that the user's code starts cannot write to it.

Arguments, progress and results are JSON values (`NaN` and `Infinity` included, as Python writes them).
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
import uuid
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import IO, Any, Literal

__all__ = ["Outcome", "Status", "how_it_died", "progress", "run_isolated"]

Status = Literal["ok", "raised", "hung", "crashed"]

_BOOTSTRAP = (
    "import json, sys; request = json.loads(sys.stdin.readline()); sys.path[:] = request['path']; "
    "from gemmnorm.userfiles.isolate import _child_main; _child_main(request)"
)
_LOG_CHARACTERS = 20_000
_GRACE_SECONDS = 0.5  # for the stacks that a hung child is asked to print before it is killed


@dataclass(frozen=True)
class Outcome:
    """How an isolated call ended.

    status      "ok": `value` is what the function returned.  "raised": it raised.  "hung": the time limit passed
                and everything it started was killed.  "crashed": the process died without an answer.
    value       the function's return value, after a trip through JSON; None unless the status is "ok"
    detail      one readable text for a person: the traceback, the stacks at the time limit, or the signal's name with
                the last lines that the process wrote
    error_type  the exception's qualified class name when the status is "raised"
    log         the last lines of everything user code wrote to standard output and standard error
    seconds     wall-clock time, the start of the process included
    last        the last dict that the function passed to `progress`; empty if there was none
    """

    status: Status
    value: Any = None
    detail: str = ""
    error_type: str | None = None
    log: str = ""
    seconds: float = 0.0
    last: dict[str, Any] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return self.status == "ok"

    @property
    def stage(self) -> str:
        """What the function was doing when it ended, by its own `progress({"stage": ...})`."""
        return str(self.last.get("stage", "starting"))

    @property
    def names_the_file(self) -> bool:
        """The function raised ModelFileError, whose message is written for whoever wrote the file."""
        return str(self.error_type).endswith("ModelFileError")

    def why(self) -> str:
        """What a person is told when there is no value: the message alone where it was written for them."""
        detail = self.detail.strip()
        if self.names_the_file:
            return detail.rpartition("ModelFileError: ")[2]
        return f"{self.status} while {self.stage}: {detail}"


# ---------------------------------------------------------------------------------------------------------- the child

_channel: IO[str] | None = None


def progress(message: dict[str, Any]) -> None:
    """Report progress from inside an isolated call; does nothing in a process that nobody isolated."""
    _send({"kind": "progress", "message": message})


def _send(line: dict[str, Any]) -> None:
    if _channel is None:
        return
    with contextlib.suppress(BrokenPipeError, ValueError):  # the parent has stopped listening
        _channel.write(json.dumps(line) + "\n")
        _channel.flush()


def _child_main(request: dict[str, Any]) -> None:
    """Entry point of the child: secure the channel, call the function, answer, leave without running exit handlers."""
    global _channel
    _channel = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    try:
        module_name, _, function_name = request["target"].partition(":")
        function = getattr(importlib.import_module(module_name), function_name)
        answer = {"kind": "result", "value": function(**request["kwargs"])}
        json.dumps(answer)
    except BaseException as error:  # SystemExit and KeyboardInterrupt of user code included
        kind = type(error)
        answer = {
            "kind": "error",
            "type": f"{kind.__module__}.{kind.__qualname__}",
            "traceback": "".join(traceback.format_exception(error)),
        }
    _send(answer)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
    os._exit(0)  # threads and exit handlers of user code get no second chance to hang


# --------------------------------------------------------------------------------------------------------- the parent


class _Tail:
    """Reads a stream to its end in a thread and keeps the last characters of it."""

    def __init__(self, stream: IO[str]) -> None:
        self._parts: deque[str] = deque()
        self._size = 0
        self._stream = stream
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._stream:
                self._parts.append(line)
                self._size += len(line)
                while self._size > _LOG_CHARACTERS and len(self._parts) > 1:
                    self._size -= len(self._parts.popleft())

    def text(self) -> str:
        self._thread.join(timeout=0.3)
        return "".join(list(self._parts))[-_LOG_CHARACTERS:]


class _Channel:
    """Reads the child's answers in a thread; progress is handed on as it arrives, in that thread."""

    def __init__(self, stream: IO[str], on_progress: Callable[[dict[str, Any]], None] | None) -> None:
        self.answer: dict[str, Any] | None = None
        self.last: dict[str, Any] = {}
        self.callback_error: BaseException | None = None
        self._stream = stream
        self._on_progress = on_progress
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        with contextlib.suppress(ValueError, OSError):
            for line in self._stream:
                try:
                    message = json.loads(line)
                    kind = message["kind"]
                except (ValueError, KeyError, TypeError):
                    continue
                if kind != "progress":
                    self.answer = message
                    continue
                self.last = message["message"]
                if self._on_progress is not None and self.callback_error is None:
                    try:
                        self._on_progress(self.last)
                    except BaseException as error:  # re-raised in the caller's thread
                        self.callback_error = error

    def join(self, timeout: float) -> None:
        self._thread.join(timeout)


def run_isolated(
    target: str,
    kwargs: dict[str, Any],
    *,
    time_limit: float,
    on_progress: Callable[[dict[str, Any]], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> Outcome:
    """Call `target` ("package.module:function") with `kwargs` in a fresh interpreter.

    The child sees this process's `sys.path`, environment (with what `environment` has besides, where a name is not
    set) and working directory, and nothing of its state. `kwargs`
    and the return value must be JSON-serialisable (TypeError if `kwargs` are not; a return value that is not makes
    the call "raised"). `on_progress` gets every dict the function passes to `progress`, in order; an exception
    from it ends the child and is raised here. After `time_limit` seconds the child is asked for its stacks and then
    killed together with everything that it started, detached processes included (on Linux; elsewhere its group).
    """
    if ":" not in target:
        raise ValueError(f'run_isolated: target must read "package.module:function", got {target!r}')
    request = json.dumps({"target": target, "kwargs": kwargs, "path": list(sys.path)}) + "\n"
    started = time.monotonic()
    with _spawn(environment or {}) as child:
        assert child.stdin is not None and child.stdout is not None and child.stderr is not None
        log = _Tail(child.stderr)
        channel = _Channel(child.stdout, on_progress)
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.close()
        hung = False
        deadline = started + time_limit
        while child.poll() is None and channel.callback_error is None:
            if time.monotonic() >= deadline:
                hung = channel.answer is None
                _ask_for_stacks(child)
                break
            with contextlib.suppress(subprocess.TimeoutExpired):
                child.wait(timeout=min(0.05, max(0.0, deadline - time.monotonic())))
        _kill_group(child)
        code = child.wait()
        channel.join(timeout=2.0)
        seconds = time.monotonic() - started
        if channel.callback_error is not None:
            raise channel.callback_error
        ending = _outcome(hung, code, channel.answer, log.text(), time_limit)
        return replace(ending, seconds=seconds, last=channel.last)


def _outcome(hung: bool, code: int, answer: dict[str, Any] | None, log: str, time_limit: float) -> Outcome:
    if hung:
        return Outcome("hung", detail=f"no answer within {time_limit:g} s; killed\n{log}", log=log)
    if answer is None:
        return Outcome("crashed", detail=f"the process {how_it_died(code)}\n{log}", log=log)
    if answer["kind"] == "error":
        return Outcome("raised", detail=answer["traceback"], error_type=answer["type"], log=log)
    return Outcome("ok", answer["value"], log=log)


def how_it_died(code: int) -> str:
    """What an exit code (negative for a signal) says, to go on after "the process"."""
    if code < 0:
        with contextlib.suppress(ValueError):
            return f"was killed by {signal.Signals(-code).name}"
        return f"was killed by signal {-code}"
    return f"exited with code {code} and without an answer"


@contextlib.contextmanager
def _spawn(environment: Mapping[str, str]) -> Iterator[subprocess.Popen[str]]:
    """Start the child in a session (process group) of its own; whatever happens, nothing of it survives the block."""
    mark = f"R{uuid.uuid4().hex}"  # a variable of the environment, for the child and everything that it starts
    child = subprocess.Popen(
        [sys.executable, "-c", _BOOTSTRAP],
        env={**environment, **os.environ, mark: "1"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        encoding="utf-8",
        errors="replace",
        start_new_session=os.name == "posix",
    )
    try:
        yield child
    finally:
        _kill_group(child)
        child.wait()
        _kill_marked(mark)
        for stream in (child.stdin, child.stdout, child.stderr):
            if stream is not None:
                _close(stream)


def _close(stream: IO[str]) -> None:
    """Without waiting: a thread may still read from a pipe that some process holds open, and would keep the lock."""

    def close() -> None:
        with contextlib.suppress(OSError, ValueError):
            stream.close()

    closing = threading.Thread(target=close, daemon=True)
    closing.start()
    closing.join(timeout=1.0)


def _ask_for_stacks(child: subprocess.Popen[str]) -> None:
    """Have faulthandler print every thread's stack; it works even while the child is stuck inside C code."""
    if hasattr(signal, "SIGUSR1"):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGUSR1)  # what it started prints its own, or ends a moment early
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(timeout=_GRACE_SECONDS)


def _kill_marked(mark: str) -> None:
    """Kill what carries the child's mark in its environment: processes that left its group. Needs Linux' /proc."""
    wanted = f"{mark}=1".encode()
    for _ in range(5):  # a process may start another while it is looked for
        found = []
        for entry in os.scandir("/proc") if os.path.isdir("/proc") else ():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError), open(f"/proc/{entry.name}/environ", "rb") as file:
                    if wanted in file.read().split(b"\0"):
                        found.append(int(entry.name))
        for pid in found:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        if not found:
            return
        time.sleep(0.02)


def _kill_group(child: subprocess.Popen[str]) -> None:
    """Kill the child and everything it started; processes that already ended are no error."""
    if os.name == "posix":
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
    elif child.poll() is None:
        child.kill()
