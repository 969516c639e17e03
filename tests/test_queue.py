"""Blocks of the GEMM that take tiles as they become free: many tiles each, and counters that are left zero."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulator import COMPILER, Launcher, emulated
from gpu_support import assert_accurate, poisoned_memory, precision
from support import Chain, step, stir, twin
from test_emulated import check
from test_keep_product import again_by, call

from gemmnorm import plan
from gemmnorm.plan import Launch, Problem, candidates
from gemmnorm.plan.gemm import Gemm

__all__ = ["again_by"]  # a fixture
CHIP = plan.chip_for(90, 2)
WHOLE, PARTIAL = 1040, 1032  # features of bfloat16: rows of y are whole sectors of 32 bytes, or not
needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Launch]]:
    """Launches that take tiles, each time one is made."""
    found: list[Launch] = []
    init = Launcher.__init__

    def noted(self: Launcher, launch: Launch, problem: Problem) -> None:
        init(self, launch, problem)
        found.extend([launch] if dict(launch.config).get("kQueued") else [])

    monkeypatch.setattr(Launcher, "__init__", noted)
    yield found


def rows_for_many_tiles(rows: int, columns: int, features: int) -> int:
    """So that each of two blocks has more tiles than the numbers of tiles have slots, twice over."""
    return rows * (70 // -(-features // columns)) + 7


@needs_compiler
@pytest.mark.usefixtures("no_small_panel")
@pytest.mark.parametrize("one_tile", [(128, 32), (64, 128), (128, 64), (256, 64)], indirect=True)
@pytest.mark.parametrize(
    ("strategy", "epilogue", "training"),
    [
        ("one_kernel", "Evaluate", False),
        ("gemm_stats_apply", "Statistics", True),
        ("gemm_stats_apply", "Normalize", True),
    ],
)
@pytest.mark.parametrize("features", [WHOLE, PARTIAL])
def test_many_tiles_of_a_block(
    launched: list[Launch], one_tile: tuple[int, int], strategy: str, epilogue: str, training: bool, features: int
) -> None:
    batch = rows_for_many_tiles(*one_tile, features)
    check(CHIP, strategy, "bf16", batch, 24, features, training, epilogue=epilogue, activation="silu")
    assert launched


@needs_compiler
@pytest.mark.usefixtures("no_small_panel")
@pytest.mark.parametrize("again_by", [(64, 128), (128, 64), (256, 64), (256, 128)], indirect=True)
@pytest.mark.parametrize("features", [WHOLE, PARTIAL])
def test_many_tiles_of_a_block_in_the_backward(
    launched: list[Launch], again_by: tuple[int, int], features: int
) -> None:
    batch, shapes = rows_for_many_tiles(*again_by, features), []
    with precision("bf16") as dtype:
        module = stir(Chain(24, features, activation="silu")).to(dtype)
        x, grad = (torch.randn(batch, n, dtype=dtype) for n in (24, features))
        exact, eager, ours = twin(module).double(), twin(module), twin(module)
        want, theirs = step(exact, exact, x.double(), grad.double()), step(eager, eager, x, grad)
        with emulated(CHIP), poisoned_memory():
            got = step(ours, lambda x: call(ours, x, shapes, "one_kernel"), x, grad)
        assert_accurate(got, theirs, want, module, x, grad, 0.0, factor=1.5)
    assert any("Gradient" in str(launch.member("Epilogue<>")) for launch in launched)


def queued(problem: Problem, phase: str) -> list[Any]:
    def gemm(c: Any) -> Any:
        return c.variant if isinstance(c.variant, Gemm) else getattr(c.variant, "gemm", None)

    every = (c for c in candidates.candidates(problem, phase) if c.refusal is None and gemm(c))
    return [(c.plan(), gemm(c)) for c in every if gemm(c).queued]


@pytest.mark.parametrize(("phase", "training"), [("forward", True), ("forward", False), ("backward", True)])
@pytest.mark.parametrize("features", [WHOLE, PARTIAL])
def test_launches_of_a_plan_take_tiles_by_counters_of_their_own(phase: str, training: bool, features: int) -> None:
    problem = Problem(
        100_000, 128, features, *["bfloat16"] * 4, training=training, save=phase == "backward",
        keep_product=phase == "forward", chip=plan.chip_for(90),
    )  # fmt: skip
    found = queued(problem, phase)
    assert found
    for made, gemm in found:
        launches = [launch for launch in made.launches if dict(launch.config).get("kQueued")]
        taken = [dict(launch.numbers)["tile_counter"] for launch in launches]
        assert len(set(taken)) == len(taken) > 0 and max(taken) < made.counters
        unstored = ("ExactStatistics", "MissingStatistics", "Sums")
        stores = [one for one in launches if not any(word in str(one.member("Epilogue<>")) for word in unstored)]
        ring = gemm.tile.stages if features == WHOLE else min(gemm.tile.stages, 3)  # K has two stages
        assert {int(launch.member("kStages")) for launch in stores} == {ring}


def test_blocks_take_tiles_where_they_have_several_and_the_ring_holds_half_of_k() -> None:
    def any_queued(batch: int, inner: int) -> bool:
        problem = Problem(batch, inner, 1024, *["bfloat16"] * 4, training=False, chip=plan.chip_for(90))
        return bool(queued(problem, "forward"))

    assert any_queued(65536, 128)
    assert not any_queued(65536, 2048)
    assert not any_queued(128, 128)
