"""An object in a Python process that holds nothing of its caller: for files that may look for whoever judges them.

`Bare` starts a fresh interpreter, hands it the few sources that the object needs as text, under a neutral name,
and calls the object's methods there::

    with Bare("verify.runner:load", ["model.py", "new.py", "cpu", None]) as runner:
        own = runner.call("build", 0, [40, 40], {})

The user's code finds no module, no frame, no file and no variable of the environment that bears the package's name, and
none of the caller's tensors. Values travel through two unnamed files, in memory where the system has such (/dev/shm).
What comes back is loaded without running any code (`weights_only`): plain values and tensors. On the CPU the process
may take up what memory is free, and no more.

This hides the caller and keeps it intact; it is no jail. The user's code may still do all that the user may.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch

from ..errors import GemmNormError
from .serving import opened

__all__ = ["Bare", "BareCallError", "BareProcessError"]

_PACKAGE = Path(__file__).resolve().parents[1]
_NEUTRAL = "problem"  # the package's name over there
_SOURCES = (
    *("errors", "userfiles.dropout", "userfiles.model_file", "userfiles.originals", "userfiles"),
    *("verify", "verify.outputs", "verify.conventions", "verify.process", "verify.trial", "verify.runner", "serving"),
)
_TEXTS = {
    "userfiles": (
        "from .dropout import is_seen, without_dropout, would_drop\n"
        "from .model_file import *\n"
        "from .originals import functions, replaced\n"
    ),
    "verify": "",
}  # of packages; of modules it is the file's
_FILES = {"serving": "userfiles/serving.py"}
_START = """
import json, os, sys, types
calls = os.fdopen(os.dup(0), encoding="utf-8")
request = json.loads(calls.readline())
sys.path[:] = request.pop("path")
modules = request.pop("modules")
for name, text, folder in modules:
    module = sys.modules[name] = types.ModuleType(name)
    module.__package__ = name if folder else name.rpartition(".")[0]
    if folder:
        module.__path__ = []
for name, text, folder in modules:
    module = sys.modules[name]
    exec(compile(text, f"<{name}>", "exec"), module.__dict__)
module.serve(calls, **request)
"""


class BareCallError(GemmNormError, RuntimeError):
    """A method raised over there.

    type_name  the exception's class, without its module
    message    its text; traceback: as Python prints it
    """

    def __init__(self, type_name: str, message: str, traceback: str) -> None:
        super().__init__(message)
        self.type_name, self.message, self.traceback = type_name, message, traceback


class BareProcessError(GemmNormError, RuntimeError):
    """The process ended without an answer; `code` is its exit code, negative for a signal."""

    def __init__(self, code: int) -> None:
        super().__init__(f"the process ended with code {code} and without an answer")
        self.code = code


class Bare:
    """A process that serves the methods of what `target` ("verify.runner:load") returns for `arguments`.

    Starting returns at once; the first call waits for the process. Close it, or use it in a `with` statement.
    """

    def __init__(self, target: str, arguments: Sequence[Any]) -> None:
        where = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None
        self._files = []
        for _ in range(2):  # of calls, of answers
            with tempfile.TemporaryFile(dir=where) as file:
                self._files.append(os.dup(file.fileno()))
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            pass_fds=self._files,
        )
        self._waiting = True
        request = {"path": sys.path, "modules": _modules(), "target": f"{_NEUTRAL}.{target}", "files": self._files}
        with contextlib.suppress(BrokenPipeError):
            self._tell({**request, "arguments": list(arguments)})

    def call(self, method: str, *arguments: Any) -> Any:
        """The method's result. Raises BareCallError for what it raises, BareProcessError where the process ended."""
        if self._waiting:
            self._waiting = False
            self._answer()
        with opened(self._files[0]) as file:
            file.truncate()
            torch.save([method, list(arguments)], file)
        try:
            self._tell("call")
        except BrokenPipeError:
            raise BareProcessError(self._process.wait()) from None
        return self._answer()

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()
        for stream in (self._process.stdin, self._process.stdout):
            with contextlib.suppress(OSError):
                assert stream is not None
                stream.close()
        while self._files:
            os.close(self._files.pop())

    def __enter__(self) -> Bare:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()

    def _tell(self, value: Any) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(value) + "\n")
        self._process.stdin.flush()

    def _answer(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        try:
            with opened(self._files[1]) as file:
                kind, value = torch.load(file, weights_only=True)
        except Exception:  # not what was agreed on: the user's code has ended or broken the server
            line = ""
        if not line:
            if self._process.poll() is None and not self._ends():
                self._process.kill()
            raise BareProcessError(self._process.wait())
        if kind == "raised":
            raise BareCallError(*map(str, value))
        return value

    def _ends(self) -> bool:
        """Whether the process is on its way out: its pipe closes a moment before it is gone."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=5)
            return True
        return False


def _modules() -> list[tuple[str, str, bool]]:
    """Name over there, text, and whether it is a package; in the order in which they run."""
    found = [(_NEUTRAL, "", True)]
    for name in _SOURCES:
        file = _PACKAGE / _FILES.get(name, f"{name.replace('.', '/')}.py")
        text = _TEXTS[name] if name in _TEXTS else file.read_text(encoding="utf-8")
        found.append((f"{_NEUTRAL}.{name}", text, name in _TEXTS))
    return found
