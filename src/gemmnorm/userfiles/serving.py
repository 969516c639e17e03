"""The other side of `bare.py`: reads calls, makes them, writes the answers. Imports PyTorch and nothing of ours."""

from __future__ import annotations

import faulthandler
import importlib
import os
import signal
import sys
import traceback
from typing import IO, Any

__all__ = ["opened", "serve"]

_SPARE = 0.9  # of the free memory: the rest is for the caller


def opened(file: int) -> IO[bytes]:
    """A file at its beginning, without what somebody read of it before."""
    os.lseek(file, 0, os.SEEK_SET)
    return os.fdopen(os.dup(file), "r+b")


def serve(calls: IO[str], target: str, arguments: list[Any], files: list[int]) -> None:
    """Build the object, then answer calls until the caller closes the pipe."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(2, 1)
    sys.stdout = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace", buffering=1)
    faulthandler.enable()
    if hasattr(faulthandler, "register"):
        faulthandler.register(signal.SIGUSR1, all_threads=True)
    import torch

    if "cpu" in arguments:
        _bound_memory()
    load, save = torch.load, torch.save  # before user code can put its own there

    def answer(kind: str, value: Any) -> None:
        with opened(files[1]) as file:
            file.truncate()
            save([kind, value], file)
        answers.write("answer\n")
        answers.flush()

    served: Any = None
    module, _, name = target.partition(":")
    while True:
        try:
            if served is None:
                served, value = getattr(importlib.import_module(module), name)(*arguments), None
            else:
                if not calls.readline():
                    os._exit(0)  # the caller is gone; threads and exit handlers of user code get no second chance
                with opened(files[0]) as file:
                    method, values = load(file, weights_only=False)
                value = getattr(served, method)(*values)
        except BaseException as error:  # SystemExit of user code included
            answer("raised", [type(error).__name__, str(error), traceback.format_exc()])
            if served is None:
                return
        else:
            answer("returned", value)


def _bound_memory() -> None:
    """Let this process have what memory is free: who takes more gets an error, rather than the system's killer."""
    try:
        import resource

        with open("/proc/meminfo", encoding="ascii") as stream:
            free = next(int(line.split()[1]) * 1024 for line in stream if line.startswith("MemAvailable"))
        with open("/proc/self/statm", encoding="ascii") as stream:
            own = int(stream.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
        resource.setrlimit(resource.RLIMIT_AS, (own + int(_SPARE * free), resource.RLIM_INFINITY))
    except (ImportError, OSError, ValueError, StopIteration):
        return
