"""Plans as data: what the planner says for a grid of problems, without a GPU."""

from __future__ import annotations

import itertools
from dataclasses import FrozenInstanceError, replace

import pytest
import torch
import ways
from torch import nn

import gemmnorm
from gemmnorm import plan
from gemmnorm.plan import ROLES, STRATEGIES, Buffer, Extent, Launch, Problem, Product, chip_for, gemm, make_plan
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import sources

SIZES = [
    (2, 8, 1),
    (3, 64, 24),
    (127, 100, 129),
    (128, 1024, 512),
    (1000, 512, 1000),
    (1024, 8192, 8192),
    (16384, 4096, 4096),
]
DTYPES = [("float32", "float32"), ("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]


def grid():
    for (batch, inner, features), (dtype, out), training, save, arch in itertools.product(
        SIZES, DTYPES, (True, False), (True, False), (80, 89, 90, 100, 120)
    ):
        arithmetics = ("float32", "tf32", "ieee") if dtype == "float32" else ("native",)
        for arithmetic in arithmetics:
            yield Problem(
                batch, inner, features, dtype, out, arithmetic=arithmetic, activation="relu", training=training,
                save=save, chip=chip_for(arch),
            )  # fmt: skip


def plans():
    for problem, strategy in itertools.product(grid(), STRATEGIES):
        yield make_plan(problem, strategy, "forward")
        if problem.save:
            yield make_plan(problem, strategy, "backward")


ALL = list(plans())


def test_every_strategy_is_served_or_refused_with_a_reason():
    for p in grid():
        verdicts = plan.applicable(p)
        assert tuple(verdicts) == STRATEGIES
        assert verdicts["reference"] is None
        for strategy, reason in verdicts.items():
            chosen = make_plan(p, strategy)
            assert (chosen.strategy == strategy) == (reason is None)
            if reason is not None:
                assert dict(chosen.reasons)[strategy] == reason and len(reason) > 10
                assert f"not {strategy}: {reason}" in str(chosen)


def test_library_strategies_serve_every_gpu_of_the_grid():
    for p in grid():
        verdicts = plan.applicable(p)
        assert verdicts["cublas_bn"] is None and verdicts["cublas_folded_bn"] is None


def test_launches_are_positive_and_their_roles_known():
    for p in ALL:
        given = {b.role for b in (*p.outputs, *p.workspace)} | {a for a, _ in p.aliases} | set(ROLES)
        given |= {"x", "weight", "grad_y"}
        for step in p.steps:
            if isinstance(step, Product):
                assert {step.out, step.left, step.right} <= given
                continue
            assert isinstance(step, Launch)
            assert step.grid.value(p.problem.batch) > 0
            assert 32 <= step.block <= 1024 and step.block % 32 == 0
            assert {step.role(field) for field in (*step.params, *step.absent)} <= given
            assert len({*step.params, *step.absent}) == len((*step.params, *step.absent))
            assert set(dict(step.roles)) <= set(step.params)
            assert step.resident >= 1
            assert (sources.KERNELS / step.source).is_file()


def test_a_grid_covers_the_whole_output():
    """Blocks of the memory-bound kernels cover [batch, features] once: groups of rows times tiles of columns."""
    for p in ALL:
        for step in p.launches:
            if step.function not in ("column_statistics", "normalize", "gradient_sums", "product_gradient"):
                continue
            members = dict(step.config)
            width, threads = members["kVector"], members["kThreadsX"]
            blocks = step.grid.value(p.problem.batch)
            groups = -(-p.problem.batch // plan.GROUP_ROWS)
            assert blocks == groups * -(-p.problem.out_features // (width * threads))
            assert p.problem.out_features % width == 0
            assert width * plan.DTYPE_BYTES[p.problem.dtype] <= 16


def test_nothing_is_allocated_twice_and_nothing_is_used_before_it_exists():
    for p in ALL:
        roles = [b.role for b in (*p.outputs, *p.workspace)]
        assert len(set(roles)) == len(roles)
        for buffer in (*p.outputs, *p.workspace):
            assert isinstance(buffer, Buffer)
            assert all(e.value(p.problem.batch) > 0 for e in buffer.shape)
        for alias, role in p.aliases:
            assert role in roles and alias not in roles


def test_a_forward_that_saves_hands_back_what_the_backward_reads():
    for p in ALL:
        if p.phase == "forward" and p.problem.save and p.strategy != "reference":
            roles = {b.role for b in p.outputs} | {a for a, _ in p.aliases}
            assert {"y", "product", "mean", "rstd"} <= roles


def test_one_output_is_kept_for_the_backward():
    """Beside x, W, vectors and group means, a forward keeps the product in the compute dtype; y is the caller's."""
    for p in ALL:
        if p.phase == "forward" and p.strategy != "reference":
            large = [b for b in p.outputs if b.shape[0].rows == 1 and b.role != "y"]
            assert len(large) <= 1
            assert all(b.dtype == p.problem.dtype for b in large)


@pytest.mark.parametrize(
    "extent", [Extent(1, 1), Extent(3, 1), Extent(5), Extent(7, 128), Extent(1, 128), Extent(2, 64), Extent(2, 64, 132)]
)
def test_an_extent_prints_what_it_computes(extent):
    for batch in (1, 2, 63, 64, 127, 128, 129, 16384):
        python = extent.cpp().replace("/", "//").replace("std::min<int64_t>", "min")
        assert eval(python, {"batch": batch, "min": min}) == extent.value(batch)


def test_sizes_depend_on_the_batch_only_through_extents():
    """The plans of two batches with the same tiles differ in nothing but the problem: an exported file relies on it."""
    for dtype, strategy in itertools.product(("float32", "bfloat16"), STRATEGIES):
        arithmetic = "native" if dtype != "float32" else "tf32"
        problems = (Problem(batch, 4096, 4096, dtype, dtype, arithmetic=arithmetic) for batch in (16384, 16383))
        with plan.forcing(lambda c: c.choices.startswith("256x128 persistent")):
            small, large = (make_plan(problem, strategy) for problem in problems)
        assert small.steps == large.steps and small.outputs == large.outputs and small.workspace == large.workspace


def test_printing():
    problem = Problem(1024, 8192, 8192, "bfloat16", "bfloat16", arithmetic="native", chip=chip_for(80))
    text = str(make_plan(problem, "cublas_folded_bn"))
    first, *rest = text.splitlines()
    assert first == "1024 × 8192 → 8192, bfloat16, training forward: cublas_folded_bn (sm_80)"
    assert rest[0] == "  product = x · weightᵀ by cuBLAS"
    assert "blocks of 256 threads" in text and "predicted" in text and "× the bare GEMM's" in text
    for p in ALL[::97]:
        assert str(p).startswith(f"{p.problem.batch} × {p.problem.in_features} → {p.problem.out_features}")
        assert "None" not in str(p)


def test_plans_are_frozen_and_hashable():
    p = ALL[0]
    with pytest.raises(FrozenInstanceError):
        p.strategy = "other"
    assert hash(p) == hash(replace(p))
    assert make_plan(p.problem, p.strategy, p.phase) == p


def test_every_plan_has_a_predicted_time():
    assert all(p.seconds > 0.0 and p.floor > 0.0 for p in ALL if p.strategy != "reference")


@pytest.mark.parametrize(("change", "word"), [
    ({"chip": None}, "not on an NVIDIA GPU"),
    ({"chip": chip_for(75)}, "below 8.0"),
    ({"dtype": "float64", "out_dtype": "float64"}, "float64"),
    ({"batch": 0}, "nothing to compute"),
    ({"out_features": 0}, "nothing to compute"),
    ({"batch": 2**31}, "beyond"),
])  # fmt: skip
def test_what_no_kernel_serves_runs_as_plain_ops(change, word):
    problem = replace(Problem(8, 8, 8), **change)
    for strategy in (None, *STRATEGIES):
        chosen = make_plan(problem, strategy)
        assert chosen.strategy == "reference" and chosen.steps == ()
    assert word in str(chosen)


def test_unknown_chips_are_planned_like_their_nearest_ancestor():
    assert chip_for(103).arch == 103 and chip_for(103).multiprocessors == chip_for(100).multiprocessors
    assert chip_for(90, 66).multiprocessors == 66
    assert (chip_for(90, 132, 3.35, 50 << 20).bandwidth, chip_for(90).bandwidth) == (3.35, 4.81)
    assert [plan.target(a) for a in (80, 90, 120)] == ["sm_80", "sm_90a", "sm_120"]


# --- asking for a strategy --------------------------------------------------------------------------------------------


def test_order_of_precedence(monkeypatch):
    monkeypatch.setenv("GEMMNORM_STRATEGY", "cublas_bn")
    assert plan.check_strategy(None) == "cublas_bn"
    with gemmnorm.set_strategy("reference"):
        assert plan.check_strategy(None) == "reference"
        assert plan.check_strategy("one_kernel") == "one_kernel"
        with gemmnorm.set_strategy(None):
            assert plan.check_strategy(None) == "cublas_bn"
        assert plan.check_strategy(None) == "reference"
    assert plan.check_strategy(None) == "cublas_bn"


def test_unknown_strategies_are_refused_where_they_are_named(monkeypatch):
    x, w = torch.randn(4, 3), torch.randn(2, 3)
    for ask in (
        gemmnorm.set_strategy,
        lambda name: gemmnorm.linear_scale_batch_norm(x, w, training=True, strategy=name),
    ):
        with pytest.raises(gemmnorm.GemmNormError, match=r"cublas_folded_bn.*'fast'") as caught:
            ask("fast")
        assert isinstance(caught.value, ValueError)
    monkeypatch.setenv("GEMMNORM_STRATEGY", "fast")
    with pytest.raises(gemmnorm.GemmNormError, match="'fast'"):
        gemmnorm.linear_scale_batch_norm(x, w, training=True)


def test_the_runtime_records_the_plans_it_runs():
    module = gemmnorm.LinearScaleBatchNorm1d(5, 3)
    with runtime.recording() as seen:
        module(torch.randn(4, 5))
        module.eval()(torch.randn(6, 5))
    assert [(p.problem.batch, p.problem.training, p.problem.save) for p in seen] == [(4, True, True), (6, False, True)]
    assert {p.strategy for p in seen} == {"reference"}


def test_explain():
    text = str(gemmnorm.explain(Problem(1024, 8192, 8192, chip=chip_for(80)), strategy="cublas_bn"))
    assert "cublas_bn (sm_80)" in text
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.ReLU())
    before = {k: v.clone() for k, v in model.state_dict().items()}
    text = str(gemmnorm.explain(model, torch.randn(8, 6)))
    assert "8 × 6 → 4" in text and "not cublas_bn: the tensors are not on an NVIDIA GPU" in text
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


@pytest.mark.parametrize("beyond", [True, False])
def test_operands_are_split_for_so_many_features_only(beyond):
    features = gemm.MOST_SPLIT_FEATURES - 4 * (not beyond)
    problem = Problem(1024, 512, features, *["float32"] * 4, "float32", chip=chip_for(90))
    assert make_plan(problem).strategy == ("cublas_folded_bn" if beyond else "one_kernel")


@pytest.mark.parametrize(
    ("change", "serves"),
    [
        ({}, True),
        ({"arithmetic": "ieee"}, False),
        ({"arithmetic": "tf32"}, False),
        ({"dtype": "bfloat16", "arithmetic": "native", "in_features": 513}, False),
        ({"training": True}, False),
        ({"chip": chip_for(80)}, False),
    ],
)
def test_a_weight_that_is_split_ahead_is_for_the_kernel_that_splits_it_so(change, serves):
    given = Problem(1024, 512, 264, *["float32"] * 4, "float32", training=False, chip=chip_for(90))
    problem = replace(given, prepared=True, **change)
    verdicts = plan.applicable(problem)
    assert verdicts["cublas_bn"] == verdicts["cublas_folded_bn"] == "the weight is there as split operands only"
    assert (verdicts["one_kernel"] is None) == serves
    for strategy in (None, *STRATEGIES[:-1]):
        chosen = make_plan(problem, strategy)
        assert chosen.strategy == ("one_kernel" if serves else "reference")
        assert dict(chosen.reasons)["cublas_bn"] == verdicts["cublas_bn"]


def test_a_backward_that_no_candidate_serves_says_why():
    problem = Problem(64, 64, 64, training=False, save=True, keep_product=False)
    with pytest.raises(gemmnorm.GemmNormError, match=r"cublas_bn: no candidate .* in evaluation the backward reads"):
        make_plan(problem, "cublas_bn", "backward")


def test_output_dtype_is_the_chains():
    half, full = torch.zeros(2, 2, dtype=torch.bfloat16), torch.zeros(2)
    for scale in (None, full, full.bfloat16(), torch.tensor(1.0), full[:1]):
        chain = half if scale is None else half * scale
        assert runtime.output_dtype(half, scale) == chain.dtype


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_blocks_that_wait_for_each_others_rows_are_launched_together(dtype):
    """Else two such calls on two streams could each hold half of the GPU, and wait for ever."""
    cast = ("x", "weight") if dtype == "bfloat16" else ()
    for batch, features in ((256, 512), (8192, 4096)):
        problem = Problem(batch, 4096, features, dtype, dtype, training=False, cast=cast)
        with plan.forcing(ways.fused_gemm):
            (launch,) = (found for found in make_plan(problem, "one_kernel").launches if found.function == "fused_gemm")
        waves = batch * features > 132 * 128 * 256
        numbers = dict(launch.numbers)
        left = numbers["x_rows"] < batch or numbers["weight_rows"] < features
        assert (launch.cooperative, left) == (waves, waves)


@pytest.mark.parametrize(
    ("batch", "features", "cluster"),
    [(256, 512, 2), (512, 512, 4), (256, 2048, 2)],
)
def test_the_tiles_of_a_panel_are_a_cluster_where_all_clusters_run_at_once(batch, features, cluster):
    problem = Problem(batch, 1024, features, *["bfloat16"] * 4, chip=plan.chip_for(90))
    with plan.forcing(lambda c: ways.fused_gemm(c) and c.variant.cluster == cluster):
        (launch,) = make_plan(problem, "one_kernel").launches
    assert (launch.cluster, launch.cooperative) == (cluster, False)


@pytest.mark.parametrize(
    ("batch", "features", "training", "tile", "epilogue"),
    [
        (128, 8192, True, (128, 64), "SingleTile"),
        (200, 16384, True, (256, 128), "SingleTile"),
        (1024, 8192, True, (256, 128), "CoResident"),
        (16384, 4096, True, (256, 128), "Deferred"),
    ],
)
def test_tiles(batch, features, training, tile, epilogue):
    """A block that holds all rows of its features waits for nobody; else rows are cut up first."""
    half = ("bfloat16",) * 4
    problem = Problem(batch, 4096, features, *half, "native", training=training, chip=plan.chip_for(90))
    (launch,) = (found for found in make_plan(problem, "one_kernel").launches if found.function == "fused_gemm")
    members = dict(launch.config)
    assert (members["kTileRows"], members["kTileColumns"]) == tile
    assert members["Epilogue<>"] == f"gemmnorm::{epilogue}Epilogue"
    box = launch.maps[0].box(batch)
    assert box == (tile[0] if training else min(tile[0], batch), 64)


@pytest.mark.parametrize("in_features", [512, 4096, 8192])
@pytest.mark.parametrize("features", [2048, 10240, 40960])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_kernel_that_makes_no_rows_is_left_none(dtype, features, in_features):
    """One tile of rows in training, in several waves of blocks too."""
    cast = ("x", "weight") if dtype == "bfloat16" else ()
    for batch in (2, 128):
        chosen = make_plan(Problem(batch, in_features, features, dtype, dtype, cast=cast, save=True), "one_kernel")
        for launch in chosen.launches:
            if ("Epilogue<>", "gemmnorm::SingleTileEpilogue") in launch.config:
                numbers = dict(launch.numbers)
                assert numbers["x_rows"] >= batch and numbers["weight_rows"] == features
