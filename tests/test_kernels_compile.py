"""Kernels compiled through NVRTC, without a GPU: a sample here, all of them by `gemmnorm.runtime.compile_all` in CI."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest

from gemmnorm import activations, plan
from gemmnorm.plan import STRATEGIES, Problem, gradient, gram, make_plan
from gemmnorm.runtime import compile_all, driver, sources

pytestmark = pytest.mark.skipif(driver.unavailable() is not None, reason=str(driver.unavailable()))


SIZES = (
    (2, 8),
    (64, 256),
    (128, 512),
    (1000, 1000),
    (1024, 8192),
    (16384, 4096),
    (3000, 130),
    (128, 129),
    (5000, 2048),
)


def test_the_enumeration_holds_what_users_ask_for():
    """Plans of ordinary calls ask for no kernel of the memory-bound families that the enumeration leaves out."""
    listed = {(k.launch.function, k.launch.config) for k in compile_all.kernels(80)}
    forms = [f for f in compile_all.dtype_forms() if f[0] != "float16"]  # whose code is bfloat16's
    asked = 0
    for (batch, features), (dtype, out, linear, norm), training, phase, strategy in itertools.product(
        SIZES, forms, (True, False), ("forward", "backward"), STRATEGIES
    ):
        problem = Problem(
            batch, 512, features, dtype, out, linear, norm, training=training, save=True, chip=plan.chip_for(80)
        )
        for launch in make_plan(problem, strategy, phase).launches:
            assert (launch.function, launch.config) in listed, (problem, launch)
            asked += 1
    assert asked > 1000


def test_the_enumeration_has_every_dtype_activation_and_width():
    kernels = compile_all.kernels(80)
    assert len({str(k) for k in kernels}) > 500
    configs = [dict(k.launch.config) for k in kernels if k.launch.function == "normalize"]
    assert {c["T"] for c in configs} == set(plan.C_TYPES.values())
    assert {c["kVector"] for c in configs} == {1, 2, 4, 8}
    assert {c["kThreadsX"] for c in configs} == {4, 8, 16, 32}
    used = {k.problem.activation for k in kernels if k.launch.function == "product_gradient"}
    assert used == {None, *(activations.canonical(row.name) for row in activations.TABLE)}


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu"])
def test_every_panel_of_a_backward_compiles_without_a_spill(activation):
    """Also those that the planner does not choose: narrow ones of clusters of four and eight had spilled with ReLU."""
    problem = next(
        p
        for p in compile_all.problems(90, quick=True)
        if (p.batch, p.out_dtype, p.norm_dtype, p.activation) == (1024, "bfloat16", "bfloat16", activation) and p.save
    )
    launches = {k for made in compile_all.plans(problem) for k in made.launches if k.function == "cluster_gradient"}
    assert launches == {gradient.cluster_launch(problem, False, panel) for panel in gradient.cluster_panels(problem)}
    assert len(launches) == 6 and {launch.resident for launch in launches} >= {1, 2}
    for outcome in compile_all.compile_group([compile_all.Kernel(launch, problem, 90) for launch in launches]):
        assert not outcome.fault, f"{outcome.kernel}: {outcome.fault}"


@pytest.mark.parametrize("arch", compile_all.ARCHITECTURES)
def test_a_sample_compiles_without_a_spill(arch):
    """Two kernels of every function; the widest vectors, which need the most registers, first."""
    sample: dict[str, list[compile_all.Kernel]] = {}
    for kernel in compile_all.kernels(arch, quick=True):
        if kernel.problem.dtype != "float16":
            sample.setdefault(kernel.launch.function, []).append(kernel)
    chosen = [kernel for found in sample.values() for kernel in (found[0], found[-1])]
    for kernel in chosen:
        outcome = compile_all.compile_one(kernel)
        assert not outcome.fault, f"{kernel}: {outcome.fault}"
        assert 0 < outcome.report["registers"] <= 255


def test_kernels_compiled_together_are_told_apart():
    kernels = [k for k in compile_all.kernels(80) if k.launch.source == "memory_bound/statistics.cuh"][:6]
    assert compile_all.together(kernels, most=4) == [kernels[:4], kernels[4:]]
    alone = [compile_all.compile_one(kernel).report for kernel in kernels]
    assert len({report["registers"] for report in alone}) > 1
    assert [o.report for o in compile_all.compile_group(kernels)] == alone
    broken = replace(kernels[1], launch=replace(kernels[1].launch, function="no_such_function"))
    outcomes = compile_all.compile_group([kernels[0], broken, kernels[2]])
    assert [bool(o.fault) for o in outcomes] == [False, True, False]


def test_multiplications_in_series_are_seen(monkeypatch):
    """An accumulator that is multiplied into before the first `wgmma` makes each wait for the one before."""
    problem = Problem(16384, 512, 4096, *["bfloat16"] * 4, save=False, chip=plan.chip_for(90, 132))
    launch, text = gram.launch(problem), sources.translation_unit
    assert driver.compile_report(launch, problem, 90)["serialized_wgmma"] == 0

    def zeroed(*kernels: object) -> str:
        found = text(*kernels).replace("float acc[kColumns / 2];", "float acc[kColumns / 2] = {};")
        return found.replace("k + turn > begin || step > 0", "1")

    monkeypatch.setattr(sources, "translation_unit", zeroed)
    assert driver.compile_report(launch, problem, 90)["serialized_wgmma"] == 1
