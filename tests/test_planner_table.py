"""The planner's candidates: each of them computes the same."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory
from torch import Tensor

from gemmnorm import plan
from gemmnorm.plan import Problem
from gemmnorm.plan.candidates import Candidate, candidates, with_other_group_panels
from gemmnorm.plan.gemm import Gemm
from gemmnorm.runtime import binding

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
# dtype, y's dtype, arithmetic, operands that are cast
PRECISIONS = {
    "bf16": ("bfloat16", "bfloat16", "native", ()),
    "tf32": ("float32", "float32", "tf32", ()),
    "fp32": ("float32", "float32", "float32", ()),
    "amp": ("bfloat16", "float32", "native", ("x", "weight")),
}


def problem_of(precision: str, sizes: tuple[int, int, int], training: bool, multiprocessors: int = 132) -> Problem:
    dtype, out, arithmetic, cast = PRECISIONS[precision]
    vectors = "float32" if cast else dtype
    chip = plan.chip_for(90, multiprocessors)
    return Problem(*sizes, dtype, out, vectors, vectors, arithmetic, None, training, False, True, chip, cast=cast)


def serving(problem: Problem, phase: str = "forward") -> list[Candidate]:
    every = candidates(problem, phase) + (with_other_group_panels(problem) if phase == "forward" else ())
    return [found for found in every if found.refusal is None]


def of_these_tiles(found: Candidate) -> bool:
    """A tile of each kind, by rows and by features: test_emulated.py has the others."""
    return not isinstance(found.variant, Gemm) or (found.variant.tile.rows, found.variant.tile.columns) in (
        (128, 64),
        (128, 128),
    )


def converting(found: Candidate) -> bool:
    """The kernel converts operands itself; the others' kernels are those of operands that need no cast."""
    return isinstance(found.variant, Gemm) and found.variant.converts(found.problem)


def outputs(found: Candidate, inputs: dict[str, Tensor]) -> list[Tensor]:
    """Of a fresh binding: what the call hands back, and the running statistics."""
    running = {role: inputs[role].clone() for role in ("running_mean", "running_var") if role in inputs}
    given = [(inputs | running).get(role) for role in binding.INPUTS[found.phase]]
    scalars = binding.scalars(found.problem, inputs["scale"], 1.0, 0.1, 1e-5)
    made = binding.Bound(found.plan())(given, scalars)
    count = 1 if found.phase == "forward" else 6
    return [t.double() for t in (*made[:count], *running.values()) if t is not None]


def inputs_of(problem: Problem, phase: str = "forward") -> dict[str, Tensor]:
    torch.manual_seed(0)
    b, i, o = problem.batch, problem.in_features, problem.out_features
    dtype, y, linear, norm = (
        getattr(torch, name) for name in (problem.dtype, problem.out_dtype, problem.linear_dtype, problem.norm_dtype)
    )
    wide = {name: torch.float32 if name in problem.cast else dtype for name in ("x", "weight")}
    found = {"x": torch.randn(b, i).to(wide["x"]), "weight": torch.randn(o, i).to(wide["weight"])}
    found |= {role: (torch.rand(o) + 0.5).to(linear) for role in ("bias", "scale")}
    found |= {role: (torch.rand(o) + 0.5).to(norm) for role in ("bn_weight", "bn_bias")}
    if phase == "forward":
        found |= {role: (torch.rand(o) + 0.5).to(norm) for role in ("running_mean", "running_var")}
        found["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)
    else:
        rows = 2 + -(-b // plan.GROUP_ROWS)
        found |= {"grad_y": torch.randn(b, o).to(y), "product": torch.randn(b, o).to(dtype)}
        found["statistics"] = torch.rand(rows, o) + 0.5
    return found


def check(problem: Problem, phase: str = "forward") -> list[str]:
    """All that serve against the first; their names."""
    every, inputs = [c for c in serving(problem, phase) if of_these_tiles(c)], inputs_of(problem, phase)
    if problem.cast:
        every = [every[0], *filter(converting, every)]
    assert len(every) > 1
    tolerance = 2e-2 if problem.dtype == "bfloat16" else 2e-3 if problem.arithmetic == "tf32" else 2e-6
    with emulated(problem.chip), poisoned_memory():
        wanted = outputs(every[0], inputs)
        for found in every[1:]:
            for a, b in zip(outputs(found, inputs), wanted, strict=True):
                assert (a - b).norm() <= tolerance * b.norm(), found.name
    return [found.name for found in every]


# On six multiprocessors, so that there are several waves.
@needs_compiler
@pytest.mark.parametrize(
    ("precision", "in_features", "training"), [("bf16", 136, True), ("amp", 2048, True), ("fp32", 136, False)]
)
def test_every_candidate_computes_the_same(precision: str, in_features: int, training: bool) -> None:
    check(problem_of(precision, (300, in_features, 264), training, 6))


@needs_compiler
def test_every_candidate_of_one_tile_of_rows_computes_the_same() -> None:
    check(problem_of("tf32", (100, 264, 40), True))


@needs_compiler
@pytest.mark.parametrize("precision", ["amp", "fp32"])
def test_every_candidate_of_a_backward_computes_the_same(precision: str) -> None:
    problem = problem_of(precision, (300, 72, 136), True, 6)
    dtypes = ("float32", "float32") if problem.cast else (problem.dtype,) * 2
    check(replace(problem, save=True, cast=(), grad_dtypes=dtypes), "backward")


@pytest.mark.parametrize("precision", PRECISIONS)
def test_candidates_have_names_of_their_own_and_plans_that_are_theirs(precision: str) -> None:
    for sizes in ((1, 64, 8), (128, 1024, 512), (1024, 8192, 8192), (16384, 4096, 4096), (1000, 100, 1000)):
        for training in (True, False):
            problem = problem_of(precision, sizes, training)
            every = serving(problem)
            assert len({found.name for found in every}) == len(every)
            assert {found.plan().strategy for found in candidates(problem) if found.refusal is None} == {
                name for name, reason in plan.applicable(problem).items() if reason is None and name != "reference"
            } - (set() if training else {"gemm_stats_apply"})
            assert all(len(c.refusal) > 10 for c in candidates(problem) if c.refusal)


@pytest.mark.parametrize(
    ("sizes", "together"),
    [
        ((65536, 128, 4096), 32),  # y 537 MB, the weight 1 MB: all panels, whole rows of y
        ((2048, 128, 4096), 12),  # y fits the L2
        ((16384, 4096, 4096), 12),  # the weight does not stay there
    ],
)
def test_whole_rows_of_y_are_written_where_it_is_larger_than_the_l2(sizes: tuple[int, int, int], together: int) -> None:
    for training in (True, False):
        gemms = [c.variant for c in candidates(problem_of("bf16", sizes, training)) if isinstance(c.variant, Gemm)]
        found = {g.schedule: g.group_panels for g in gemms if (g.tile.rows, g.tile.columns) == (256, 128)}
        # No panel waits for its statistics in the same launch.
        assert {found[s] for s in (("statistics", "two-pass") if training else ("evaluate",))} == {together}
        assert found.get("deferred", 12) == 12


def test_two_passes_multiply_operands_that_were_converted_before() -> None:
    problem = problem_of("amp", (4096, 2048, 4096), True)
    gemms = [c.variant for c in candidates(problem) if isinstance(c.variant, Gemm)]
    converting = {g.schedule for g in gemms if g.converts(problem)}
    assert {"statistics", "deferred"} <= converting  # the kernel can
    assert not converting & {"two-pass", "gram"}  # the second product begins before the first is done
