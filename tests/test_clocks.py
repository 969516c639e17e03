"""The clocks of a GPU, on a simulated one: no sample for which the GPU waited for the host counts."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from gemmnorm.bench import candidates, timing
from gemmnorm.bench.timing import Variant

CYCLES_PER_US = 2000


class Gpu:
    """A queue of work, and a host that takes time to fill it; microseconds."""

    def __init__(self) -> None:
        self.host = self.free = 0.0

    def work(self, us: float) -> None:
        self.free = max(self.free, self.host) + us

    def synchronize(self) -> None:
        self.host = max(self.host, self.free)

    def event(self, enable_timing: bool) -> Event:
        return Event(self)


class Event:
    """A CUDA event in that queue."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu, self.at = gpu, 0.0

    def record(self) -> None:
        self.at = max(self.gpu.free, self.gpu.host)

    def query(self) -> bool:
        return self.at <= self.gpu.host

    def synchronize(self) -> None:
        self.gpu.synchronize()

    def elapsed_time(self, end: Event) -> float:
        return (end.at - self.at) / 1e3


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """The simulated GPU in the place of PyTorch's."""
    found = Gpu()
    monkeypatch.setattr(torch.cuda, "Event", found.event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device=None: found.synchronize())
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: found.work(cycles / CYCLES_PER_US))
    monkeypatch.setattr(candidates, "FLUSH_BYTES", 16)
    monkeypatch.setattr(timing, "FLUSH_BYTES", 16)
    return found


def call(gpu: Gpu, us: float, late: int, asked: list[float]) -> Callable[[], None]:
    """Takes `us`, and 30 of the host; the first `late` times the host has something else to do in between."""

    def run() -> None:
        asked.append(us)
        gpu.host += 30.0
        if asked.count(us) <= late:
            gpu.host += 50_000.0
        gpu.work(us)

    return run


@pytest.mark.parametrize("late", [0, 1, 2])
def test_the_queue_takes_a_late_sample_again(gpu: Gpu, late: int) -> None:
    asked: list[float] = []
    calls = [call(gpu, 10.0, 0, asked), call(gpu, 20.0, late, asked), call(gpu, 40.0, 0, asked)]
    found = candidates.QueueClock("cpu")(calls)
    assert found == pytest.approx([10.0, 20.0, 40.0])
    assert asked.count(10.0) == 1 and asked.count(20.0) == 1 + late


def test_the_queue_gives_up_a_call_that_is_always_late(gpu: Gpu) -> None:
    asked: list[float] = []
    found = candidates.QueueClock("cpu")([call(gpu, 20.0, 0, asked), call(gpu, 10.0, 99, asked)])
    assert found[0] == pytest.approx(20.0) and found[1] > 40_000
    assert asked.count(10.0) == timing.TRIES


@pytest.mark.parametrize("late", [0, 1, 2])
def test_a_late_sample_beside_others_is_taken_again(gpu: Gpu, late: int) -> None:
    asked: list[float] = []
    clock = timing.CudaClock(torch.device("cpu"))
    clock.__dict__["_cycles_per_ms"] = 1e3 * CYCLES_PER_US
    assert clock.start(Variant("v", call(gpu, 20.0, late, asked)))() == pytest.approx(0.020)
    assert len(asked) == 1 + late


def test_what_synchronises_is_timed_once(gpu: Gpu) -> None:
    asked: list[float] = []
    clock = timing.CudaClock(torch.device("cpu"))
    clock.__dict__["_cycles_per_ms"] = 1e3 * CYCLES_PER_US
    variant = Variant("v", call(gpu, 20.0, 99, asked))
    clock._host_ms["v"] = timing.MAX_SPIN_MS
    assert clock.start(variant)() > 10.0
    assert len(asked) == 1
