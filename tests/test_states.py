"""What a `forward` asks of a clock, a file, a queue or a switch, or tells them, is refused rather than done once."""

from __future__ import annotations

import os
import pathlib
import pprint
import queue
import random
import secrets
import sys
import threading
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from fuse_support import FEATURES, Written
from support import stir, twin

import gemmnorm

QUEUE: queue.SimpleQueue[int] = queue.SimpleQueue()
LOCK, EVENT, HERE = threading.Lock(), threading.Event(), pathlib.Path(__file__)

REFUSED: dict[str, Callable[[], Any]] = {
    "a generator of NumPy": lambda: np.random.default_rng().uniform(),
    "a generator of Python": lambda: random.Random().random(),
    "secrets": lambda: secrets.randbelow(5),
    "an identifier": lambda: uuid.uuid4().int,
    "noise of the system": lambda: os.urandom(1)[0],
    "an event": EVENT.is_set,
    "whether a path is there": HERE.exists,
    "the same by os.path": lambda: os.path.exists(__file__),
    "a file": lambda: len(open(__file__, encoding="utf-8").read()),  # noqa: SIM115
    "the working directory": lambda: len(os.getcwd()),
    "the thread": lambda: len(threading.current_thread().name),
    "a seed": lambda: torch.manual_seed(0) and 1,
    "a seed of Python's": lambda: random.seed(0) or 1,
    "a trace": lambda: torch._C._get_tracing_state() is None,
    "a profiler": lambda: torch.autograd._profiler_enabled(),
    "determinism": lambda: torch.get_deterministic_debug_mode(),
    "a word on the terminal": lambda: sys.stdout.write("once"),
    "a printed word": lambda: pprint.pprint("once") or 1,
    "a queue": lambda: QUEUE.put(1) or 1,
    "a lock": lambda: LOCK.acquire(blocking=False),
    "threads": lambda: torch.set_num_threads(torch.get_num_threads()) or 1,
    "a precision": lambda: torch.set_float32_matmul_precision("high") or 1,
}


@pytest.mark.parametrize("ask", REFUSED.values(), ids=REFUSED)
def test_a_state_is_neither_asked_nor_changed_by_a_recording(
    ask: Callable[[], Any], capsys: pytest.CaptureFixture[str]
) -> None:
    model = Written(lambda self, x: self.bn(self.gemm(x)) * ask())
    precision, seed = torch.get_float32_matmul_precision(), torch.initial_seed()
    (refusal,) = gemmnorm.fuse_report(model).refusals
    assert "which a recording would do once" in refusal.reason or "draws random numbers" in refusal.reason
    assert (torch.get_float32_matmul_precision(), torch.initial_seed()) == (precision, seed)
    assert QUEUE.empty() and not LOCK.locked() and not capsys.readouterr().out


def test_what_gives_the_same_for_the_same_is_recorded() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        width = max(len(os.path.join("a", "b")), sum(map(ord, "abc")) // 100)
        return self.bn(self.gemm(x)) * width  # type: ignore[no-any-return]

    model = stir(Written(forward)).double()
    fused = gemmnorm.fuse(twin(model))
    assert len(gemmnorm.fuse_report(fused).matches) == 1
    x = torch.randn(5, FEATURES, dtype=torch.float64)
    assert torch.equal(model(x), fused(x))
