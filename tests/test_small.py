"""Few tiles of rows by clusters that share out K (small/kernel.cuh), run by the emulator, against float64."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import pytest
import torch
import ways
from emulator import COMPILER, emulated
from gpu_support import assert_accurate, error, fused, golden, model, poisoned_memory, precision
from support import Chain, step, stir, twin
from test_emulated import check, run

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.plan import Problem, candidates, small
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import compile_all, driver

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
HOPPER = plan.chip_for(90)
# By the blocks of a cluster and the columns of its panel; some have too few stages for the K of these tests.
STAGES = {(1, 32): 2, (2, 32): 8, (4, 32): 2, (8, 32): 4, (2, 64): 2, (8, 64): 4, (4, 128): 4}

Cluster = Callable[..., None]


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cluster]:
    """Sets the size of the clusters, whatever K and the number of panels."""

    def use(blocks: int, columns: int = 32) -> None:
        found = small.SmallPanel(columns, blocks, STAGES[blocks, columns])
        monkeypatch.setattr(small, "PANELS", (found,))
        plan.cached_plan.cache_clear()

    with plan.forcing(lambda c: ways.small_panel(c) or c.phase == "backward"):
        yield use


def fits(blocks: int, batch: int) -> bool:
    """Whether a cluster may have so many blocks for each tile of the batch."""
    return blocks * -(-batch // small.TILE_ROWS) <= small.LARGEST_CLUSTER


ALL = ("bf16", "tf32", "fp32")  # float16 is bfloat16's code; the GPU suite has it
STEPS = (
    (ALL, 4, 128, 600, 40),  # more stages than the ring has, the last not filled; a panel that is not filled
    (ALL, 4, 2, 72, 8),  # parts without any K
    (("bf16", "fp32"), 4, 65, 256, 72),
    (("bf16",), 2, 100, 136, 72),
    (("tf32",), 8, 100, 520, 40),
    (("fp32",), 8, 64, 16, 72),
    (("bf16", "fp32"), 1, 77, 136, 40),
    (("bf16", "tf32"), (8, 64), 128, 520, 72),
    (ALL, 4, 129, 136, 40),  # a row in the second tile; all blocks that a cluster may have
    (("tf32", "fp32"), 2, 300, 136, 72),
    (("bf16", "fp32"), 1, 2000, 72, 40),  # the largest cluster
    (("bf16",), 8, 240, 520, 40),
    (("bf16", "tf32"), (2, 64), 193, 136, 72),  # a row in the last group
    (("bf16", "tf32"), (4, 128), 256, 264, 136),
)


@needs_compiler
@pytest.mark.parametrize(
    ("name", "blocks", "batch", "in_features", "features"),
    [(name, *sizes) for names, *sizes in STEPS for name in names],
)
def test_a_step(
    cluster: Cluster, name: str, blocks: int | tuple[int, int], batch: int, in_features: int, features: int
) -> None:
    """Output, statistics and gradients, each feature with its own scale and affine part."""
    cluster(*(blocks if isinstance(blocks, tuple) else (blocks,)))
    options = {"scale_shape": (features,), "activation": "silu"}
    check(HOPPER, "one_kernel", name, batch, in_features, features, epilogue=None, **options)
    if blocks == 4 and name == "bf16":
        options = {"bias": False, "affine": False, "momentum": None, "activation": "relu"}
        check(HOPPER, "one_kernel", name, batch, in_features, features, epilogue=None, **options)


def check_evaluation(
    name: str, batch: int, in_features: int, features: int, where: AbstractContextManager[None], device: str
) -> None:
    """y is no less accurate than eager's, and the same every time."""
    with precision(name) as dtype, torch.no_grad():
        module = stir(Chain(in_features, features, scale_shape=(features,), activation="silu")).to(device, dtype).eval()
        x = torch.randn(batch, in_features, device=device, dtype=dtype)
        exact, eager = twin(module).double()(x.double()), module(x)
        with where, poisoned_memory(), runtime.recording() as plans:
            first, other = (run(module, x, "one_kernel") for _ in range(2))
    assert [launch.function for launch in plans[0].launches] == ["small_panel"]
    assert error(first, exact, columns=False) <= 1.02 * error(eager, exact, columns=False) + ROUNDING[name]
    assert torch.equal(first, other)


# Where eager runs on the CPU it has no TF32.
ROUNDING = {"bf16": 2**-12, "fp16": 2**-14, "tf32": 2**-11, "fp32": 2**-24}


@needs_compiler
@pytest.mark.parametrize(
    ("name", "found"), [("bf16", (4, 32)), ("tf32", (4, 32)), ("fp32", (1, 32)), ("fp32", (4, 32)), ("bf16", (8, 64))]
)
def test_evaluation(cluster: Cluster, found: tuple[int, int], name: str) -> None:
    cluster(*found)
    many = ((2200, 72, 40),) if found == (1, 32) else ()  # more tiles than a cluster has blocks
    for sizes in ((128, 600, 40), (1, 72, 8), (300, 136, 72), *many):
        check_evaluation(name, *sizes, emulated(HOPPER), "cpu")


@needs_compiler
def test_infinity_in_evaluation(cluster: Cluster) -> None:
    """float32 in three parts: those of infinity are zero times infinity."""
    cluster(4)
    x, weight = torch.randn(100, 136), torch.randn(40, 136).bfloat16().float()
    x[1, 3], x[70, 8], weight[5, 7] = torch.inf, torch.nan, -torch.inf
    running = torch.zeros(40), torch.ones(40)
    eager = linear_scale_batch_norm(x, weight, None, None, *running, strategy="reference")
    with emulated(HOPPER), poisoned_memory(), runtime.recording() as plans:
        y = linear_scale_batch_norm(x, weight, None, None, *running, strategy="one_kernel")
    assert [launch.function for launch in plans[0].launches] == ["small_panel"]
    torch.testing.assert_close(y, eager, equal_nan=True)


@needs_compiler
@pytest.mark.parametrize(("blocks", "batch"), [(1, 100), (4, 100), (8, 100), (2, 300)])
def test_under_autocast_and_with_nothing_saved(cluster: Cluster, blocks: int, batch: int) -> None:
    """y in float32 where the scale makes it so; running statistics are the same whether a backward follows or not."""
    cluster(blocks)
    module = stir(Chain(200, 72, scale_shape=(72,), activation="gelu"))
    x = torch.randn(batch, 200).bfloat16().float()
    with torch.no_grad():
        module.gemm.weight.copy_(module.gemm.weight.bfloat16())
        exact = twin(module).double()
        want = exact(x.double())
    found = []
    for grad in (True, False):
        ours = twin(module)
        with emulated(HOPPER), poisoned_memory(), torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
            y = run(ours, x, "one_kernel")
        assert y.dtype == torch.float32
        assert error(y.detach(), want) < 1e-5
        for running in ("running_mean", "running_var"):
            assert error(getattr(ours.bn, running), getattr(exact.bn, running)) < 1e-5
        assert torch.equal(ours.bn.num_batches_tracked, exact.bn.num_batches_tracked)
        found.append((y.detach(), ours.bn.running_mean, ours.bn.running_var))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@needs_compiler
@pytest.mark.parametrize(("blocks", "batch"), [(1, 100), (2, 100), (8, 100), (4, 200), (1, 600)])
def test_equal_bits_whatever_the_order_of_events(cluster: Cluster, blocks: int, batch: int) -> None:
    cluster(blocks)
    torch.manual_seed(3)
    module = stir(Chain(304, 72, momentum=None)).bfloat16()
    x, grad = (torch.randn(batch, n, dtype=torch.bfloat16) for n in (304, 72))
    found = []
    with emulated(HOPPER), poisoned_memory():
        for _ in range(4):
            ours = twin(module)
            found.append(step(ours, lambda x, m=ours: run(m, x, "one_kernel"), x, grad))
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)


@needs_compiler
@pytest.mark.parametrize("blocks", [1, 4, 8])
def test_mean_far_larger_than_the_deviation(cluster: Cluster, blocks: int) -> None:
    """As in test_emulated.py; and with a first row, about which deviations are taken, that stands out itself."""
    cluster(blocks)
    torch.manual_seed(0)
    for batch, mean in ((2, 100.0), (65, 1e4), (128, 1e4), (256, 1e4), (2000, 1e4)):
        if not fits(blocks, batch):
            continue
        weight, x = torch.randn(40, 264) / 16, torch.randn(batch, 264)
        x[0] *= 8 if batch in (128, 256) else 1
        weight[:, 0], x[:, 0] = mean, 1.0
        half = x.bfloat16(), weight.bfloat16()
        exact = linear_scale_batch_norm(*(t.double() for t in half), training=True)
        with emulated(HOPPER), poisoned_memory():
            y = linear_scale_batch_norm(*half, training=True, strategy="one_kernel")
        assert error(y, exact, columns=False) < 3e-3


@needs_compiler
@pytest.mark.parametrize("row", [0, 7])
def test_a_value_that_stands_out(cluster: Cluster, row: int) -> None:
    """y has its own rounding and no other, and gradients come from statistics of the product as it is stored."""
    cluster(4)
    torch.manual_seed(0)
    module = stir(Chain(256, 72)).bfloat16()
    x, grad = (torch.randn(100, n).bfloat16() for n in (256, 72))
    x[row] *= 300
    exact, eager, ours = twin(module).double(), twin(module), twin(module)
    want, theirs = step(exact, exact, x.double(), grad.double()), step(eager, eager, x, grad)
    with emulated(HOPPER), poisoned_memory():
        got = step(ours, lambda x: run(ours, x, "one_kernel"), x, grad)
    assert error(got["y"], want["y"]) <= 1.01 * error(want["y"].bfloat16(), want["y"])
    for key in ("grad x", "grad gemm.weight", "grad bn.weight"):
        assert error(got[key], want[key], columns=False) <= 1.1 * error(theirs[key], want[key], columns=False)


def hard(batch: int, inner: int, family: str) -> tuple[torch.Tensor, torch.Tensor]:
    """x and W whose products cancel, or lie far apart."""
    x, weight = torch.randn(batch, inner), torch.randn(40, inner)
    if family == "graded":
        grades = torch.logspace(-6, 6, inner)
        return x * grades, weight / grades
    if family == "outliers":
        x[1, 5], weight[2, 7], x[:, 9] = 1e6, -1e6, x[:, 9] * 1e4
    elif family == "tiny":
        return x * 1e-30, weight * 1e-6
    elif family == "cancelling":
        x[:, 1::2], weight[:, 1::2] = x[:, ::2] * (1 + 1e-3 * torch.randn(batch, inner // 2)), -weight[:, ::2]
    return x, weight


@needs_compiler
@pytest.mark.parametrize("family", ["gaussian", "graded", "outliers", "tiny", "cancelling"])
def test_float32_in_three_parts_is_as_accurate_as_float32(cluster: Cluster, family: str) -> None:
    cluster(4)
    for batch, inner in ((128, 512), (65, 72), (2, 256), (250, 264)):
        torch.manual_seed(batch)
        x, weight = hard(batch, inner, family)
        exact = linear_scale_batch_norm(x.double(), weight.double(), training=True)
        eager = linear_scale_batch_norm(x, weight, training=True, strategy="reference")
        with emulated(HOPPER), poisoned_memory(), runtime.recording() as plans:
            y = linear_scale_batch_norm(x, weight, training=True, strategy="one_kernel")
        assert plans[0].problem.split and plans[0].launches[0].function == "small_panel"
        assert error(y, exact, columns=False) <= 1.02 * error(eager, exact, columns=False) + 2**-24


@needs_compiler
@pytest.mark.parametrize("value", [float("inf"), float("nan"), 3e38, 3.4e38])
def test_float32_that_is_infinite_or_no_number(cluster: Cluster, value: float) -> None:
    cluster(4)
    x, weight = torch.randn(100, 136), torch.randn(40, 136)
    x[1, 3] = value
    weight[:, 3] = torch.randn(40) / 8
    weight[4:, 3] = 0.0 if 1e38 < value < float("inf") else weight[4:, 3]
    eager = linear_scale_batch_norm(x, weight, training=True, strategy="reference")
    with emulated(HOPPER), poisoned_memory():
        y = linear_scale_batch_norm(x, weight, training=True, strategy="one_kernel")
    assert torch.equal(y.isnan(), eager.isnan())


def problem(inner: int = 1024, features: int = 512, **more: object) -> Problem:
    return replace(Problem(128, inner, features, "bfloat16", "bfloat16", arithmetic="native"), **more)  # type: ignore[arg-type]


def test_where_it_serves() -> None:
    def blocks(p: Problem) -> set[int]:
        found = (c for c in candidates.candidates(p, "forward") if ways.small_panel(c) and c.refusal is None)
        return {c.variant.blocks for c in found}

    assert blocks(problem()) == {1, 2, 4, 8}
    assert blocks(replace(problem(), batch=257)) == {1, 2, 4}
    assert blocks(replace(problem(), batch=2048)) == {1}
    assert blocks(replace(problem(), batch=50_000, training=False)) == {1, 2, 4, 8}
    assert blocks(problem(dtype="float32", out_dtype="float32", arithmetic="tf32"))
    for other in (
        {"batch": 2049},
        {"training": False, "save": True},
        {"training": False, "dtype": "float32", "out_dtype": "float32", "arithmetic": "float32", "prepared": True},
        {"dtype": "float32", "out_dtype": "float32", "arithmetic": "ieee"},
    ):
        assert not blocks(replace(problem(), **other))
    few = [p for p in compile_all.problems(90, quick=True) if p.batch == 100 and not p.activation]
    listed = {launch.config for p in few for launch in plan.make_plan(p, "one_kernel").launches}
    for inner, dtype in ((192, "bfloat16"), (1024, "bfloat16"), (1024, "float32")):
        p = problem(inner=inner, dtype=dtype, out_dtype=dtype, linear_dtype=dtype, norm_dtype=dtype)
        p = replace(p, arithmetic="tf32" if dtype == "float32" else "native")
        assert plan.make_plan(p, "one_kernel").launches[0].config in listed


@pytest.mark.skipif(driver.unavailable() is not None, reason=str(driver.unavailable()))
@pytest.mark.parametrize("found", STAGES)
def test_every_size_of_cluster_compiles(cluster: Cluster, found: tuple[int, int]) -> None:
    cluster(*found)
    most = small.LARGEST_CLUSTER // found[0]
    for dtype, arithmetic, tiles in (("bfloat16", "native", most), ("float32", "float32", 1)):
        p = problem(dtype=dtype, out_dtype=dtype, arithmetic=arithmetic, activation="gelu", save=True)
        p = replace(p, batch=128 * tiles)
        if p.split and found[1] > 32:
            continue  # refused
        (launch,) = plan.make_plan(p, "one_kernel").launches
        report = driver.compile_report(launch, p, 90)
        assert not any(value for name, value in report.items() if name != "registers")


@needs_compiler
def test_the_planner_takes_it_by_itself() -> None:
    module = stir(Chain(256, 40)).bfloat16()
    x = torch.randn(100, 256).bfloat16()
    with emulated(HOPPER), poisoned_memory(), runtime.recording() as plans, torch.no_grad():
        run(module, x, "one_kernel")
    assert [launch.function for launch in plans[0].launches] == ["small_panel"]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize("found", STAGES)
def test_evaluation_on_a_gpu(cluster: Cluster, found: tuple[int, int], name: str) -> None:
    if name == "fp32" and found[1] > small.MOST_SPLIT_COLUMNS:
        pytest.skip("no such shape")
    cluster(*found)
    runtime.forget()
    sizes = ((128, 1024, 512), (100, 200, 72), (2, 64, 8), (65, 2048, 1000), (3, 3072, 512), (100, 4104, 72))
    for size in (*sizes, (232, 2056, 264), (2000, 512, 640)):
        check_evaluation(name, *size, nullcontext(), "cuda")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp32"])
@pytest.mark.parametrize("found", STAGES)
def test_a_step_on_a_gpu(cluster: Cluster, found: tuple[int, int], name: str) -> None:
    """Against float64, and the same bits every time."""
    cluster(*found)
    runtime.forget()
    sizes = ((128, 1024, 512), (100, 200, 72), (2, 64, 8), (65, 2048, 1000), (232, 2056, 264), (390, 328, 72))
    for batch, inner, features in (*sizes, (512, 1024, 2048), (1000, 512, 640), (2000, 256, 64)):
        if not fits(found[0], batch):
            continue
        options = {"scale_shape": (features,), "activation": "silu"}
        with precision(name) as dtype:
            module = model(dtype, inner, features, **options)
            x, grad = (torch.randn(batch, n, device="cuda", dtype=dtype) for n in (inner, features))
            exact, theirs = golden(module, x, grad), twin(module)
            eager = step(theirs, theirs, x, grad)
            with poisoned_memory(), runtime.recording() as plans:
                every = [step(ours, fused(ours, "one_kernel"), x, grad) for ours in (twin(module) for _ in range(20))]
        served = any(launch.function == "small_panel" for launch in plans[0].launches)
        assert served or name == "fp32"  # whose fragments do not fit the registers beside 64 columns
        rounding = 2.0**-11 if name == "tf32" else 0.0
        assert_accurate(every[0], eager, exact, module, x, grad, rounding)
        for other in every[1:]:
            assert all(torch.equal(every[0][key], other[key]) for key in other)
    runtime.forget()
