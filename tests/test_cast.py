"""Operands that autocast wants in half precision, cast by the own kernels: bit for bit what PyTorch's casts give."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import ways
from emulator import COMPILER, emulated
from functorch.compile import make_boxed_func
from gpu_support import poisoned_memory
from support import Chain, arguments, step, stir, twin
from test_emulated import SMALL_HOPPER
from test_emulated import check as check_accuracy
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.plan import Plan, Problem, cast, gemm
from gemmnorm.plan.candidates import Candidate, candidates
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import sources

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
BOTH = ("x", "weight")


def tensors(batch: int, in_features: int, features: int, device: str = "cpu") -> list[Tensor]:
    torch.manual_seed(batch)
    shapes = ((batch, in_features), (features, in_features), (features,), (batch, features))
    return [torch.randn(shape, device=device) for shape in shapes]


def called(
    x: Tensor, weight: Tensor, scale: Tensor, grad: Tensor, strategy: str, training: bool, autocast: torch.dtype
) -> tuple[list[Tensor], Plan]:
    """y and in training all gradients, in float32; and the forward's plan."""
    x, weight, scale = (t.detach().clone().requires_grad_(training) for t in (x, weight, scale))
    running = scale.new_zeros(scale.shape), scale.new_ones(scale.shape)
    with torch.autocast(x.device.type, autocast), runtime.recording() as plans, torch.set_grad_enabled(training):
        y = linear_scale_batch_norm(
            x, weight, None, scale, *running, training=training, activation="relu", strategy=strategy
        )
    found = [y.detach()]
    if training:
        y.backward(grad.to(y.dtype))
        found += [t.grad for t in (x, weight, scale) if t.grad is not None]
    return [t.float() for t in (*found, *running)], plans[0]


def check(operands: list[Tensor], strategy: str, training: bool, autocast: torch.dtype, wide: tuple[str, ...]) -> Plan:
    """The kernels' casts against PyTorch's; of operands of which those of the names `wide` are float32."""
    x, weight, scale, grad = operands
    half = [t.to(autocast) for t in (x, weight)]
    given = [t if name in wide else h for name, t, h in zip(BOTH, (x, weight), half, strict=True)]
    got, chosen = called(*given, scale, grad, strategy, training, autocast)
    with plan.forcing(like(chosen)):
        runtime.forget()  # a call without casts that an earlier test prepared, with a tile of its own
        want, plain = called(*half, scale, grad, strategy, training, autocast)
    runtime.forget()
    assert (chosen.strategy, chosen.problem.cast, plain.problem.cast) == (strategy, wide, ())
    assert torch.equal(got[0], want[0])
    for a, b in zip(got, want, strict=True):  # the gradients of what was given in half precision are rounded to it
        assert torch.equal(a, b) or error_of(a, b) < 2**-8
    return chosen


def like(chosen: Plan) -> Callable[[Candidate], bool]:
    """Candidates with the tile and the epilogue of `chosen`, or its cluster, whatever they convert."""
    members = {name: value for launch in chosen.launches for name, value in launch.config}

    def wanted(c: Candidate) -> bool:
        if isinstance(c.variant, gemm.Gemm):
            tile, schedule = c.variant.tile, c.variant.schedule
            finishes, _ = gemm.EPILOGUES["normalize" if schedule in gemm.FIRST else schedule]
            like = {"kTileRows": tile.rows, "kTileColumns": tile.columns, "Epilogue<>": f"gemmnorm::{finishes}"}
            # Neighbours that share x have other last tiles, which wait in registers and round once less.
            return (like | {"kSharing": c.variant.sharing}).items() <= members.items()
        return not ways.small_panel(c) or c.variant.blocks == members.get("kCluster")

    return wanted


def error_of(a: Tensor, b: Tensor) -> float:
    return float((a - b).norm() / b.norm())


def epilogue(chosen: Plan) -> str:
    finishes = [str(value) for launch in chosen.launches for name, value in launch.config if name == "Epilogue<>"]
    return finishes[-1].removeprefix("gemmnorm::").removesuffix("Epilogue") if finishes else chosen.launches[1].function


@needs_compiler
@pytest.mark.parametrize(
    ("batch", "in_features", "features", "strategy", "training", "way", "wide"),
    [
        (70, 64, 24, "cublas_folded_bn", True, "cluster_normalize", BOTH),
        (70, 37, 40, "one_kernel", True, "small_panel", BOTH),
        (70, 72, 40, "one_kernel", True, "small_panel", BOTH),
        (140, 72, 40, "one_kernel", True, "CoResident", BOTH),  # one wave: nothing is left to the product
        (400, 200, 264, "one_kernel", True, "Deferred", ("x",)),  # nor of rows that are no whole chunks
        (400, 131, 264, "one_kernel", True, "Deferred", ("weight",)),  # and x copied
        (300, 2048, 264, "one_kernel", True, "CoResident", ("weight",)),
        (600, 2048, 136, "one_kernel", True, "CoResident", BOTH),
        (600, 2048, 264, "one_kernel", True, "Deferred", BOTH),
        (400, 2048, 264, "one_kernel", True, "Deferred", ("x",)),
        (400, 2048, 264, "gemm_stats_apply", True, "Statistics", BOTH),
        (300, 2048, 264, "gemm_stats_apply", True, "Normalize", BOTH),
        (400, 2048, 264, "one_kernel", False, "Evaluate", BOTH),
    ],
)
def test_the_kernels_cast_as_pytorch_does(
    batch: int, in_features: int, features: int, strategy: str, training: bool, way: str, wide: tuple[str, ...]
) -> None:
    whole = in_features % cast.COLUMNS == 0 and way != "Normalize"  # whose second product begins early

    def wanted(c: Candidate) -> bool:
        if not isinstance(c.variant, gemm.Gemm):
            return way == "small_panel" and ways.small_panel(c)
        return ways.epilogue(way)(c) and (not c.problem.cast or c.variant.converts(c.problem) == whole)

    with plan.forcing(wanted), emulated(SMALL_HOPPER), poisoned_memory():
        operands = tensors(batch, in_features, features)
        chosen = check(operands, strategy, training, torch.bfloat16, wide)
    assert epilogue(chosen) == way
    product = [launch for launch in chosen.launches if launch.function == "fused_gemm"]
    left = [role for launch in product for field in launch.params if (role := launch.role(field)).startswith("given_")]
    assert left == ([f"given_{name}" for name in chosen.problem.made] if whole else [])


@needs_compiler
@pytest.mark.parametrize(
    ("precision", "epilogue", "batch", "in_features", "features"),
    [
        ("amp", None, 70, 36, 40),
        ("amp", "CoResident", 140, 100, 72),
        ("amp", "Deferred", 1200, 101, 264),
        ("amp", "Statistics", 300, 36, 264),
        ("amp", "Normalize", 300, 37, 264),
        ("amp", "Evaluate", 300, 260, 264),
        ("bf16", None, 70, 1, 40),
        ("bf16", "CoResident", 140, 101, 72),
        ("bf16", "Deferred", 1200, 36, 264),
        ("bf16", "Normalize", 300, 37, 264),
        ("bf16", "Evaluate", 300, 261, 264),
        ("fp16", "Deferred", 400, 2051, 264),
        ("tf32", None, 70, 37, 40),
        ("tf32", "Deferred", 400, 101, 264),
    ],
)
def test_rows_that_tma_would_refuse(
    precision: str, epilogue: str | None, batch: int, in_features: int, features: int
) -> None:
    """No multiples of 16 bytes, but as they are cast or copied."""
    strategy = "gemm_stats_apply" if epilogue in ("Statistics", "Normalize") else "one_kernel"
    options = {"scale_shape": (features,), "training": epilogue != "Evaluate"}
    check_accuracy(SMALL_HOPPER, strategy, precision, batch, in_features, features, epilogue=epilogue, **options)


@needs_compiler
@pytest.mark.parametrize(
    ("batch", "features", "training", "way", "wide"),
    [
        (300, 136, True, "CoResident", BOTH),
        (300, 136, False, "Evaluate", ("weight",)),
        (300, 136, False, "Evaluate", BOTH),
        (600, 264, True, "Deferred", BOTH),  # and rows of x are left, of which all chunks are cast before
    ],
)
def test_the_product_begins_with_a_part_of_k(
    batch: int, features: int, training: bool, way: str, wide: tuple[str, ...]
) -> None:
    """One chunk of two is cast before it, the other beside it."""
    chunks = 1 if batch == 300 else 2

    def wanted(c: Candidate) -> bool:
        return (
            ways.epilogue(way)(c)
            and isinstance(c.variant, gemm.Gemm)
            and (not c.problem.cast or c.variant.chunks == chunks)
        )

    with plan.forcing(wanted), emulated(SMALL_HOPPER), poisoned_memory():
        chosen = check(tensors(batch, 2 * cast.COLUMNS, features), "one_kernel", training, torch.bfloat16, wide)
    assert epilogue(chosen) == way
    assert dict(chosen.launches[0].numbers)["chunks_converted"] == chunks


def test_the_planner_counts_chunks_and_bands_as_the_kernels_do() -> None:
    planned = ("memory_bound/cast.cuh", "kCastColumns", cast.COLUMNS), ("gemm/conversion.cuh", "kBands", gemm.BANDS)
    for file, name, value in planned:
        assert f"constexpr int {name} = {value};" in (sources.KERNELS / file).read_text(encoding="utf-8")


@needs_compiler
def test_one_tile_of_rows_in_several_waves_leaves_no_rows_to_the_product() -> None:
    """A single tile converts none."""
    with plan.forcing(ways.fused_gemm), emulated(SMALL_HOPPER), poisoned_memory():
        chosen = check(tensors(20, 72, 1040), "one_kernel", True, torch.bfloat16, BOTH)
    assert epilogue(chosen) == "SingleTile"


@needs_compiler
def test_pytorch_casts_nothing_whatever_the_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(264, 72)
    monkeypatch.setattr(runtime, "cast_operands", lambda *_: pytest.fail("cast by PyTorch"))
    with emulated(SMALL_HOPPER), torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for batch in (300, 200, 300):
            linear_scale_batch_norm(torch.randn(batch, 72), weight, training=True, strategy="one_kernel")


def test_a_plan_casts_only_what_it_is_told_to() -> None:
    for strategy in ("one_kernel", "gemm_stats_apply", "cublas_folded_bn", "cublas_bn"):
        problem = Problem(16384, 4096, 4096, "bfloat16", "bfloat16", save=True, cast=("weight",))
        chosen = plan.make_plan(problem, strategy)
        assert chosen.strategy == strategy
        assert chosen.launches[0].params == (
            "given_weight",
            "cast_weight",
            "weight_rows",
            "rows_of_block",
            "chunks_converted",
            "in_features",
            "batch",
        )
        assert [b.role for b in chosen.outputs if b.role in cast.CAST] == ["cast_weight"]
        blocks, first = 4096 // cast.rows_of_block(4096), chosen.launches[0].grid.value(problem.batch)
        assert first < blocks if strategy in plan.OWN_GEMM else first == blocks


@needs_compiler
@pytest.mark.parametrize(("precision", "in_features"), [("amp", 36), ("amp", 101), ("bf16", 37)])
def test_the_gram_matrix_of_padded_rows(precision: str, in_features: int) -> None:
    with plan.forcing(ways.by_gram), plan.forcing(lambda c: c.phase == "backward" or bool(c.problem.made)):
        check_accuracy(SMALL_HOPPER, "gemm_stats_apply", precision, 300, in_features, 264, scale_shape=(264,))


def test_the_product_casts_whole_chunks_of_rows_or_none() -> None:
    for in_features, some in ((4096, True), (4104, False), (1024, False), (1027, False)):
        problem = Problem(4096, in_features, 4096, "bfloat16", "bfloat16", save=True, cast=BOTH)
        own = [c.variant for c in candidates(problem) if isinstance(c.variant, gemm.Gemm) and c.refusal is None]
        assert own and any(way.converts(problem) for way in own) == some


def test_copies_are_a_candidate_where_tma_cannot_read_the_rows() -> None:
    for in_features, every in ((2048, {()}), (2056, {()}), (2051, {BOTH})):
        problem = Problem(4096, in_features, 4096, "bfloat16", "bfloat16", "bfloat16", save=True)
        own = [c for c in candidates(problem) if isinstance(c.variant, gemm.Gemm) and c.refusal is None]
        assert {c.problem.copied for c in own} == every
        assert len({c.name for c in own}) == len(own)
    copied = own[0].plan()
    assert [b.role for b in copied.workspace if b.role in cast.CAST] == list(cast.CAST)  # not kept
    assert {b.pitch for b in copied.workspace if b.role in cast.CAST} == {2112}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("autocast", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("wide", [BOTH, ("weight",), ("x",)])
@pytest.mark.parametrize(
    ("batch", "in_features", "features", "strategy"),
    [
        (96, 1024, 512, "one_kernel"),
        (1000, 2048, 8200, "one_kernel"),
        (5000, 1032, 4104, "one_kernel"),
        (1100, 6144, 4104, "one_kernel"),  # the product begins when two chunks of three are cast
        (9000, 520, 2056, "one_kernel"),
        (3000, 2048, 4104, "gemm_stats_apply"),
        (300, 1088, 514, "cublas_folded_bn"),
        (2000, 1027, 2056, "one_kernel"),
        (100, 37, 512, "one_kernel"),
    ],
)
def test_on_a_gpu(
    batch: int, in_features: int, features: int, strategy: str, wide: tuple[str, ...], autocast: torch.dtype
) -> None:
    operands = tensors(batch, in_features, features, "cuda")
    with poisoned_memory():
        for training in (True, False):
            check(operands, strategy, training, autocast, wide)


@needs_compiler
@pytest.mark.parametrize("inner", [torch.float32, torch.bfloat16])
def test_a_compiled_graph_casts_nothing_for_autocast(inner):
    """The operator does, and so do its kernels: what is stored, read and given as a gradient is as in eager mode."""
    torch._dynamo.reset()
    module, names = stir(Chain(64, 72, scale_shape=(72,), activation="silu")), []
    x, grad = torch.randn(200, 64, dtype=inner), torch.randn(200, 72)

    def call(m, x):
        positional, keywords = arguments(m, strategy="one_kernel")
        with torch.autocast("cpu", torch.bfloat16):
            return linear_scale_batch_norm(x, *positional, **keywords)

    def record(graph, inputs):
        names.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return make_boxed_func(graph.forward)

    compiled = torch.compile(call, fullgraph=True, backend=aot_autograd(fw_compiler=record, bw_compiler=record))
    direct, traced = twin(module), twin(module)
    with emulated(SMALL_HOPPER), poisoned_memory(), runtime.recording() as plans:
        want = step(direct, lambda x: call(direct, x), x, grad)
        got = step(traced, lambda x: compiled(traced, x), x, grad)
    assert all(torch.equal(got[key], want[key]) and got[key].dtype == want[key].dtype for key in want)
    assert any("linear_scale_batch_norm_backward" in name for name in names)
    assert not [name for name in names if "_to_copy" in name or "convert_element_type" in name]
    assert [plan.problem.cast for plan in plans] == [("x", "weight") if inner == torch.float32 else ("weight",)] * 2


@needs_compiler
@pytest.mark.parametrize("between", ["nothing", "written", "no gradients"])
def test_a_weight_that_a_compiled_graph_multiplies_by_twice_is_cast_once(between, monkeypatch):
    """As two views of a batch go through one projector; unless the weight is written in between.

    Gradients of the copy are in its dtype, and added up in the weight's; one alone is in the weight's at once.
    """
    written, frozen = between == "written", between == "no gradients"
    torch._dynamo.reset()
    module, dtypes = stir(Chain(64, 72, scale_shape=(72,), activation="relu")), []
    x, grad = torch.randn(2, 200, 64), torch.randn(200, 72)

    def call(m, x):
        positional, keywords = arguments(m, strategy="one_kernel")
        with torch.autocast("cpu", torch.bfloat16):
            y = linear_scale_batch_norm(x[0], *positional, **keywords)
            if written:
                with torch.no_grad():
                    m.gemm.weight.mul_(2)
            with torch.set_grad_enabled(not frozen):
                other = linear_scale_batch_norm(x[1], *positional, **keywords)
            return y * other

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager_decomp_partition")
    direct, traced = twin(module), twin(module)
    with emulated(SMALL_HOPPER), runtime.recording() as plans:
        want = step(direct, lambda x: call(direct, x), x, grad)
        eager, found = len(plans), runtime.find_backward
        monkeypatch.setattr(
            runtime, "find_backward", lambda o, options, d: (dtypes.append(d[1]), found(o, options, d))[1]
        )
        got = step(traced, lambda x: compiled(traced, x), x, grad)
    assert all(got[key].dtype == want[key].dtype for key in want)
    assert all(torch.equal(got[key], want[key]) for key in want if key != "grad gemm.weight")
    off, size = (got["grad gemm.weight"] - want["grad gemm.weight"]).norm(), want["grad gemm.weight"].norm()
    assert off == 0 if written or frozen else 0 < off < 2**-8 * size
    assert dtypes == {"nothing": [torch.bfloat16] * 2, "written": [torch.float32] * 2}.get(between, [torch.float32])
    assert [plan.problem.cast for plan in plans[eager:]] == [("x", "weight"), ("x", "weight") if written else ("x",)]
