"""Launches of one call hand numbers on in their stream's counters, so that nobody else's may come between them."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
import ways
from emulator import COMPILER, Launcher, emulated
from gpu_support import precision
from test_emulated import SMALL_HOPPER
from torch import Tensor

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.runtime import binding

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("no_small_panel")]
BATCH, INNER, FEATURES = 150, 256, 72


def chain(x: Tensor, weight: Tensor) -> Tensor:
    with precision("fp32"):
        return linear_scale_batch_norm(x, weight, training=True, strategy="one_kernel")


def ordinary() -> tuple[Tensor, Tensor]:
    return torch.randn(BATCH, INNER), torch.randn(FEATURES, INNER)


def graded() -> tuple[Tensor, Tensor]:
    """x and a weight whose columns float16's exponents do not hold: features fall back, and launches count them."""
    grade = 10.0 ** torch.linspace(-6, 6, INNER)
    return torch.randn(BATCH, INNER) * grade, torch.randn(FEATURES, INNER) / grade


def relative_error(y: Tensor, x: Tensor, weight: Tensor) -> float:
    exact = torch.nn.functional.batch_norm(x.double() @ weight.double().t(), None, None, training=True)
    return float((y - exact).norm() / exact.norm())


def slowed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """From now on a launch takes a while; the threads that launch, in their order."""
    order: list[int] = []
    plain = Launcher.__call__

    def slow(self: Launcher, stream: int, values: Any) -> None:
        order.append(threading.get_ident())
        time.sleep(0.02)
        plain(self, stream, values)

    monkeypatch.setattr(Launcher, "__call__", slow)
    return order


def test_calls_of_two_threads_on_one_stream_do_not_come_between_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launches of a call hand numbers on in the stream's counters."""
    work = [graded(), ordinary()]
    with emulated(SMALL_HOPPER), ThreadPoolExecutor(2) as pool:
        for operands in work:
            chain(*operands)
        order = slowed(monkeypatch)
        got = list(pool.map(lambda operands: chain(*operands), work))
    assert len(order) == 6 and len(set(order)) == 2 and len(set(order[:3])) == len(set(order[3:])) == 1
    for y, operands in zip(got, work, strict=True):
        assert relative_error(y, *operands) < 1e-5


def test_a_call_of_one_launch_does_not_come_between_anothers(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_launch(x: Tensor, weight: Tensor) -> Tensor:
        with precision("bf16"), plan.forcing(ways.epilogue("CoResident")):
            return linear_scale_batch_norm(x.bfloat16(), weight.bfloat16(), training=True, strategy="one_kernel")

    calls = [(chain, graded()), (one_launch, ordinary())]
    with emulated(SMALL_HOPPER), ThreadPoolExecutor(2) as pool:
        for call, operands in calls:
            call(*operands)
        order = slowed(monkeypatch)
        first = pool.submit(chain, *calls[0][1])
        while not order:
            time.sleep(0.001)
        pool.submit(one_launch, *calls[1][1]).result()
        first.result()
    assert len(order) == 4 and len(set(order[:3])) == 1 and order[3] != order[0]


def test_a_call_that_breaks_off_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, launches = Launcher.__call__, 0

    def stops(self: Launcher, stream: int, values: Any) -> None:
        nonlocal launches
        launches += 1
        if launches == 3:
            raise KeyboardInterrupt
        plain(self, stream, values)

    operands = ordinary()
    with emulated(SMALL_HOPPER):
        monkeypatch.setattr(Launcher, "__call__", stops)
        with pytest.raises(KeyboardInterrupt):
            chain(*graded())
        assert relative_error(chain(*operands), *operands) < 1e-5
        binding._counters.clear()  # what broke off had no chance to leave them at zero
