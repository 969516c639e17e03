"""Memory that the runtime keeps between calls: counters, scratch, and who allocates them; by the emulator."""

from __future__ import annotations

import threading

import pytest
import torch
from emulator import COMPILER, emulated
from support import Chain, stir
from test_emulated import SMALL_HOPPER, run

from gemmnorm import plan
from gemmnorm.plan import params
from gemmnorm.runtime import binding, driver, memory

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("no_small_panel")]


def test_captured_calls_have_counters_of_their_own():
    """Where none are left, zeros that the graph makes at each replay, and that are held as long as the call lasts."""
    with emulated(SMALL_HOPPER):
        memory = binding.Counters(torch.device("cpu"))
        first, held = memory.take(0, 100, True)
        assert held.data_ptr() == first and not held.any() and len(held) >= 100 and not memory._blocks
        shared = memory.take(0, 100, False)
        assert memory.take(0, 100, False) == memory.take(0, 128, False) == shared and shared[1] is None
        assert memory.take(1, 100, False) != shared != memory.take(0, 200, False)
        inside, other = memory.take(0, 100, True), memory.take(0, 100, True)
        assert len({first, shared[0], inside[0], other[0]}) == 4 and inside[1] is other[1] is None
        (block,) = memory._blocks
        assert all(
            block.data_ptr() <= a < block.data_ptr() + 4 * block.numel() for a in (shared[0], inside[0], other[0])
        )
        more = [memory.take(0, 1 << 14, True) for _ in range(5)]
        assert [held is None for _, held in more] == [True] * 3 + [False] * 2 and memory._blocks == [block]


def test_what_is_kept_is_allocated_by_another_thread(monkeypatch):
    """A thread's allocations may go to a pool in which nothing may be kept, as of `torch.compile`'s CUDA graphs."""
    module = stir(Chain(32, 24)).bfloat16().requires_grad_(False)
    x = torch.randn(70, 32, dtype=torch.bfloat16)
    here = []
    with emulated(SMALL_HOPPER):
        binding._scratch.clear()
        for target, name in ((driver, "empty"), (torch, "zeros")):
            plain = getattr(target, name)
            monkeypatch.setattr(
                target, name, lambda *a, plain=plain, **k: here.append((plain(*a, **k), threading.get_ident()))
                or here[-1][0]
            )  # fmt: skip
        run(module, x, "one_kernel")
        memory = binding.Counters(torch.device("cpu"))
        memory.take(0, 100, False)
        kept = [binding.scratch(None, 0), *memory._blocks]
    threads = {id(t): thread for t, thread in here}
    assert len(kept) == 2 and threading.get_ident() not in {threads[id(t)] for t in kept}
    assert threading.get_ident() in threads.values()  # what dies with the call


def test_a_stream_lends_its_scratch_to_calls_that_are_not_captured(monkeypatch):
    """Only where one kernel is the whole plan: between two, another thread's might come."""
    module = stir(Chain(32, 24)).bfloat16().requires_grad_(False)
    addresses = []

    class Recorder:
        def __init__(self, launch, problem):
            self.place = [f.name for f in params.layout(launch, problem).fields].index("mean")
            self.pack = lambda *values: values

        def __call__(self, stream, values):
            addresses.append(values[self.place])

    def used():
        run(module, torch.randn(70, 32, dtype=torch.bfloat16), "one_kernel")
        return addresses[-1]

    with emulated(SMALL_HOPPER):
        monkeypatch.setattr(driver, "Launcher", Recorder)
        here = used()
        assert used() == here
        with monkeypatch.context() as patched:
            patched.setattr(driver, "capturing", lambda: True)
            assert used() != here
        monkeypatch.setattr(driver, "stream_handle", lambda index: 7)
        assert used() != here
    several = plan.make_plan(plan.Problem(200, 64, 64, training=True, chip=plan.chip_for(90)), "one_kernel")
    large = plan.make_plan(
        plan.Problem(8192, 64, 4096, "bfloat16", "bfloat16", training=True, chip=plan.chip_for(90)), "one_kernel"
    )
    assert len(several.steps) > 1 and len(large.steps) == 1
    with monkeypatch.context() as patched:
        patched.setattr(driver, "Launcher", lambda launch, problem: None)
        assert not binding.Bound(several)._borrowed and binding.Bound(large)._borrowed <= memory.BORROWED
