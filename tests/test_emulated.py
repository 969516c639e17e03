"""The kernels themselves, run on the CPU by the emulator: planner, runtime and device code in one piece, without a GPU.

Few and small sizes, chosen so that every way through the kernels is taken: one block, one wave, many tiles a block,
tiles that are not filled. Speed and races are the GPU suite's business.
"""

from __future__ import annotations

from dataclasses import replace

import gram_families
import pytest
import torch
import ways
from emulator import COMPILER, EmulationError, emulated
from gpu_support import assert_accurate, error, poisoned_memory, precision
from support import Chain, arguments, step, stir, twin
from torch import Tensor

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.plan import memory_bound
from gemmnorm.runtime import binding, driver
from gemmnorm.runtime import call as runtime

pytestmark = [pytest.mark.skipif(COMPILER is None, reason="no g++"), pytest.mark.usefixtures("no_small_panel")]


SMALL_HOPPER = plan.chip_for(90, 3)  # so few multiprocessors that a small problem takes many waves


def run(module: Chain, x: Tensor, strategy: str, epilogue: str | None = None) -> Tensor:
    """The operator on the tensors of `module`; fails where another strategy, or another way to epilogue, would run."""
    positional, keywords = arguments(module, strategy=strategy)
    with runtime.recording() as plans:
        y = linear_scale_batch_norm(x, *positional, **keywords)
    assert [p.strategy for p in plans] == [strategy], plans[0].reasons
    members = [member for launch in plans[0].launches for member in launch.config]
    assert epilogue is None or ("Epilogue<>", f"gemmnorm::{epilogue}Epilogue") in members
    return y


OPERAND_ROUNDING = {"tf32": 2.0**-11, "amp": 2.0**-8}  # of an operand, where it is not exact


def check(chip, strategy, name, batch, in_features, out_features, training=True, epilogue=None, **options):
    with precision(name) as dtype, torch.autocast("cpu", torch.bfloat16, enabled=name == "amp"):
        module = stir(Chain(in_features, out_features, **options)).to(dtype).train(training)
        x, grad = (torch.randn(batch, n, dtype=dtype) for n in (in_features, out_features))
        exact, eager, ours = twin(module).double(), twin(module), twin(module)
        want, theirs = step(exact, exact, x.double(), grad.double()), step(eager, eager, x, grad)
        with plan.forcing(ways.epilogue(epilogue)), emulated(chip), poisoned_memory():
            if epilogue == "Evaluate":  # with gradients the product would be wanted
                with torch.no_grad():
                    y = run(ours, x, strategy, epilogue)
                assert error(y, want["y"], columns=False) <= 1.25 * error(theirs["y"], want["y"], columns=False) + 1e-3
                return
            got = step(ours, lambda x: run(ours, x, strategy, epilogue), x, grad)
        assert_accurate(got, theirs, want, module, x, grad, OPERAND_ROUNDING.get(name, 0.0), factor=1.5)


@pytest.mark.parametrize(
    ("strategy", "training"), [("cublas_bn", True), ("cublas_folded_bn", True), ("cublas_folded_bn", False)]
)
def test_the_librarys_product(strategy, training):
    check(plan.chip_for(80, 4), strategy, "bf16", 70, 24, 40, training, scale_shape=(40,), activation="silu")
    check(plan.chip_for(80, 4), strategy, "fp32", 130, 24, 13, training, scale_shape=(), momentum=None)
    check(plan.chip_for(80, 4), strategy, "fp32", 2, 24, 36, training, bias=False, affine=False)
    check(plan.chip_for(80, 4), strategy, "bf16", 700, 8, 24, training, activation="relu")  # features fill four threads


def test_no_thread_of_a_block_lies_beyond_the_last_feature_where_fewer_would_do():
    for features in (8, 24, 32, 40, 64, 128, 256, 1024):
        tiling = memory_bound.tiling(plan.Problem(1 << 17, 64, features, "bfloat16", chip=plan.chip_for(90)))
        assert tiling.threads == 4 or tiling.threads // 2 * tiling.width < features


@pytest.mark.parametrize(
    ("epilogue", "batch", "in_features", "out_features"),
    [
        ("SingleTile", 100, 72, 72),
        ("SingleTile", 2, 8, 8),
        ("CoResident", 200, 136, 40),
        ("Deferred", 400, 200, 264),
        ("Deferred", 1027, 64, 520),
    ],
)
@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_one_kernel(epilogue, name, batch, in_features, out_features):
    check(SMALL_HOPPER, "one_kernel", name, batch, in_features, out_features, epilogue=epilogue, activation="silu")


@pytest.mark.parametrize(
    ("one_tile", "blocks", "batch", "features"),
    [
        ((128, 64), 4, 200, 456),  # four waves
        ((256, 64), 4, 450, 456),
        ((64, 128), 3, 180, 264),
        ((128, 128), 3, 300, 264),  # a panel is a wave, and the last is not filled
        ((192, 128), 4, 450, 600),
        ((256, 128), 4, 450, 600),  # the last tiles of some blocks lie in a panel whose others wait in shared memory
    ],
    indirect=["one_tile"],
)
@pytest.mark.parametrize("waits_in", ["registers", "shared memory"])
def test_whole_panels_in_several_waves(waits_in, one_tile, blocks, batch, features, forced):
    forced(ways.in_registers(waits_in == "registers"))
    chip = plan.chip_for(90, blocks)
    options = {"scale_shape": (features,), "activation": "silu"}
    check(chip, "one_kernel", "bf16", batch, 72, features, epilogue="CoResident", **options)
    if waits_in == "registers":  # where TF32 always waits
        check(chip, "one_kernel", "tf32", batch, 72, features, epilogue="CoResident", **options)

    module = stir(Chain(72, features, **options))
    x = torch.randn(batch, 72).bfloat16().float()
    with torch.no_grad():
        module.gemm.weight.copy_(module.gemm.weight.bfloat16())
        exact = twin(module).double()(x.double())
    grad = waits_in == "registers"  # with a kept product and without
    with emulated(chip), poisoned_memory(), torch.autocast("cpu", torch.bfloat16), torch.set_grad_enabled(grad):
        y = run(twin(module), x, "one_kernel", "CoResident")
    assert y.dtype == torch.float32
    assert error(y.detach(), exact) < 6e-3


@pytest.mark.parametrize(
    ("one_tile", "features"),
    [((128, 64), 40), ((256, 64), 40), ((192, 128), 72), ((256, 128), 72)],
    indirect=["one_tile"],
)
def test_whole_panels_of_more_groups_than_a_block_merges_for_itself(one_tile, features, forced):
    forced(ways.in_registers(False))
    check(plan.chip_for(90, 66), "one_kernel", "bf16", 8290, 16, features, epilogue="CoResident")


@pytest.mark.parametrize(
    ("name", "batch", "features"),
    [("bf16", 180, 264), ("bf16", 300, 1000), ("bf16", 500, 72), ("tf32", 300, 1000), ("fp32", 500, 72)],
)
def test_few_tiles_of_a_panel_are_a_cluster(name, batch, features, forced):
    """They run at the same time as it is, and the launch need not be cooperative."""
    forced(lambda c: c.phase == "backward" or getattr(c.variant, "cluster", 1) > 1)
    arithmetic = {"bf16": "native", "tf32": "tf32", "fp32": "float32"}[name]
    dtypes, chip = ["bfloat16" if name == "bf16" else "float32"] * 4, plan.chip_for(90)
    found = plan.make_plan(plan.Problem(batch, 136, features, *dtypes, arithmetic, chip=chip), "one_kernel")
    (launch,) = (launch for launch in found.launches if launch.function == "fused_gemm")
    assert launch.cluster == -(-batch // launch.grid.rows) > 1 and not launch.cooperative
    check(chip, "one_kernel", name, batch, 136, features, epilogue="CoResident")


def test_more_groups_than_a_block_merges_for_itself():
    check(SMALL_HOPPER, "one_kernel", "fp16", 8290, 16, 40, epilogue="Deferred", scale_shape=(40,), bias=False)


@pytest.mark.parametrize(
    ("one_tile", "batch"),
    [((64, 128), 60), ((128, 128), 120), ((192, 128), 180), ((256, 128), 240), ((128, 32), 60)],
    indirect=["one_tile"],
)
def test_nothing_is_left_of_a_constant_column_in_one_block(one_tile, batch):
    """Its mean is exact where the tile is not full: every product is 10⁴, and 10⁴·batch a whole number."""
    module = stir(Chain(64, 136, bias=False))
    with torch.no_grad(), emulated(SMALL_HOPPER), poisoned_memory(), precision("tf32"):
        module.gemm.weight.fill_(156.25)
        y = run(module, torch.ones(batch, 64), "one_kernel", "SingleTile")
    assert torch.equal(y, module.bn.bias.expand(batch, 136))


@pytest.mark.parametrize("name", ["fp16", "tf32"])
def test_gemm_stats_apply(name):
    check(SMALL_HOPPER, "gemm_stats_apply", name, 300, 72, 136, epilogue="Statistics", scale_shape=(136,))


@pytest.mark.parametrize(
    ("name", "one_tile"),
    [
        ("bf16", (256, 128)),
        ("bf16", (64, 128)),
        ("bf16", (192, 128)),
        ("bf16", (256, 64)),
        ("bf16", (128, 64)),
        ("bf16", (128, 32)),
        ("bf16", (256, 136)),
        ("tf32", (256, 128)),
        ("tf32", (128, 64)),  # which goes from registers to memory
    ],
    indirect=["one_tile"],
)
def test_multiplied_twice(name, one_tile):
    """With the product kept for gradients, and without them, where nothing but y goes to memory."""
    strategy, epilogue = "gemm_stats_apply", "Normalize"
    check(SMALL_HOPPER, strategy, name, 600, 72, 136, epilogue=epilogue, activation="silu", scale_shape=(136,))
    with precision(name) as dtype, torch.no_grad():
        module = stir(Chain(72, 136, scale_shape=(136,))).to(dtype)
        x = torch.randn(330, 72, dtype=dtype)
        exact, ours = twin(module).double(), twin(module)
        want = exact(x.double())
        with plan.forcing(ways.epilogue(epilogue)), emulated(SMALL_HOPPER), poisoned_memory():
            y = run(ours, x, strategy, epilogue)
        assert error(y, want, columns=False) <= (6e-3 if name == "bf16" else 2e-3)
        for got, wanted in zip(ours.buffers(), exact.buffers(), strict=True):
            assert torch.allclose(got.double(), wanted.double(), atol=1e-2)


@pytest.mark.parametrize(
    ("name", "sizes", "one_tile", "options"),
    [
        ("bf16", (300, 72, 72), (256, 128), {"activation": "silu"}),
        ("fp16", (1000, 136, 200), (128, 64), {"scale_shape": (200,), "momentum": None}),
        ("bf16", (330, 72, 72), (256, 64), {"activation": "silu"}),
        ("bf16", (500, 136, 264), (192, 128), {"activation": "silu"}),
        ("bf16", (130, 200, 40), (128, 128), {"bias": False, "scale_shape": ()}),
        ("fp16", (64, 16, 8), (128, 32), {"affine": False}),
        ("bf16", (1000, 64, 72), (256, 64), {"activation": "silu"}),  # each warpgroup has half of a stage's rows
        ("fp16", (385, 24, 136), (128, 128), {"scale_shape": (136,)}),
        ("bf16", (331, 72, 280), (256, 136), {"activation": "silu"}),
        ("fp16", (257, 40, 104), (256, 136), {"scale_shape": ()}),
        ("bf16", (150, 200, 1000), (128, 128), {}),  # several tiles of W·G for a block
    ],
    indirect=["one_tile"],
)
def test_statistics_by_the_gram_matrix(name, sizes, one_tile, options, forced):
    forced(ways.by_gram)
    with runtime.recording() as plans:
        check(SMALL_HOPPER, "gemm_stats_apply", name, *sizes, **options)
    assert plans[0].launches[0].function == "gram_statistics"


@pytest.mark.parametrize("family", gram_families.ALL)
def test_where_the_gram_matrix_is_inexact_the_product_gives_the_statistics(family, forced):
    forced(ways.by_gram)
    with emulated(SMALL_HOPPER):
        gram_families.check(family, 200, 32, 40, "cpu")


@pytest.mark.parametrize(
    ("name", "batch", "features", "blocks", "options"),
    [
        ("bf16", 100, 72, 1, {"activation": "silu"}),
        ("fp16", 300, 200, 2, {"bias": False, "momentum": None}),
        ("fp32", 300, 100, 4, {"scale_shape": (100,), "activation": "silu"}),
        ("tf32", 300, 100, 4, {"scale_shape": (100,), "activation": "silu"}),
        ("fp32", 2, 36, 1, {"affine": False}),
        ("bf16", 1300, 264, 8, {"activation": "silu", "scale_shape": ()}),
    ],
)
def test_normalised_by_clusters_that_hold_panels(name, batch, features, blocks, options, forced):
    forced(lambda c: c.phase == "backward" or (ways.in_panels(c) and c.variant.panel.cluster == blocks))
    with runtime.recording() as plans:
        check(SMALL_HOPPER, "cublas_folded_bn", name, batch, 24, features, **options)
    assert [launch.function for launch in plans[0].launches] == ["cluster_normalize"]
    assert plans[0].launches[0].cluster == blocks


def test_float32_normalised_by_clusters_where_the_first_row_stands_far_out(forced):
    """The mean comes of deviations from the first row; what their rounding costs it is corrected."""
    forced(ways.in_panels)
    module = stir(Chain(64, 40))
    x = torch.randn(1000, 64)
    x[0] *= 1000
    with torch.no_grad():
        want, eager = twin(module).double()(x.double()), twin(module)(x)
        with emulated(SMALL_HOPPER), poisoned_memory(), runtime.recording() as plans:
            y = run(twin(module), x, "cublas_folded_bn")
    assert [launch.function for launch in plans[0].launches] == ["cluster_normalize"]
    ordinary = slice(1, None)
    assert error(y[ordinary], want[ordinary]) <= 1.2 * error(eager[ordinary], want[ordinary])


@pytest.mark.parametrize("batch", [2, 60, 300])
def test_panels_held_by_clusters_a_constant_column_is_exactly_beta(batch, forced):
    forced(ways.in_panels)
    module = stir(Chain(64, 136, bias=False))
    with torch.no_grad(), emulated(SMALL_HOPPER), poisoned_memory(), runtime.recording() as plans:
        module.gemm.weight.fill_(156.25)
        y = run(module, torch.ones(batch, 64), "cublas_folded_bn")
    assert [launch.function for launch in plans[0].launches] == ["cluster_normalize"]
    assert torch.equal(y, module.bn.bias.expand(batch, 136))


@pytest.mark.parametrize("one_tile", [(256, 128), (192, 128), (256, 64), (128, 64)], indirect=True)
@pytest.mark.parametrize("batch", [240, 300])
def test_multiplied_twice_a_constant_column_is_exactly_beta(batch, one_tile):
    module = stir(Chain(64, 136, bias=False))
    with torch.no_grad(), emulated(SMALL_HOPPER), poisoned_memory(), precision("tf32"):
        module.gemm.weight.fill_(156.25)
        with plan.forcing(ways.epilogue("Normalize")):
            y = run(module, torch.ones(batch, 64), "gemm_stats_apply", "Normalize")
    assert torch.equal(y, module.bn.bias.expand(batch, 136))


@pytest.mark.parametrize(
    "one_tile", [(128, 64), (256, 64), (64, 128), (128, 128), (192, 128), (256, 128)], indirect=True
)
def test_every_tile_that_passes_through_shared_memory(one_tile):
    """By rows and by features; the last tile is not full."""
    columns = one_tile[1]
    check(SMALL_HOPPER, "one_kernel", "bf16", 950, 72, 2 * columns + 8, epilogue="Deferred", activation="relu")
    check(SMALL_HOPPER, "gemm_stats_apply", "fp16", 300, 72, columns + 8, epilogue="Statistics", bias=False)


@pytest.mark.parametrize(("name", "one_tile"), [("bf16", (256, 136)), ("fp16", (256, 136))], indirect=["one_tile"])
def test_rows_that_begin_in_the_middle_of_a_sector(name, one_tile):
    """Every other row does, where there are 8 features more than a multiple of 16; tiles then overlap."""
    for sizes in ((1, 72, 8), (2, 72, 120), (128, 72, 136), (129, 72, 264), (641, 72, 376), (600, 72, 72)):
        check(SMALL_HOPPER, "one_kernel", name, *sizes, False, "Evaluate", activation="relu")


@pytest.mark.parametrize(
    "one_tile", [(64, 128), (128, 128), (192, 128), (256, 128), (256, 64), (128, 32)], indirect=True
)
@pytest.mark.parametrize("name", ["bf16", "tf32", "fp32"])  # float16 is bfloat16's code
def test_every_tile_in_evaluation(name, one_tile):
    if name == "fp32" and one_tile[0] > 128:
        pytest.skip("of split operands there is no such tile")
    options = {"training": False, "epilogue": "Evaluate", "activation": "relu"}
    for batch, features in ((129, 264), (600, 136)):
        with precision(name):
            check(SMALL_HOPPER, "one_kernel", name, batch, 72, features, **options)


@pytest.mark.parametrize(
    "one_tile", [(128, 32), (128, 64), (64, 128), (128, 128), (192, 128), (256, 128)], indirect=True
)
@pytest.mark.parametrize("name", ["bf16", "tf32", "fp32"])
def test_one_tile_of_rows_and_several_for_a_block(name, one_tile):
    """Each with the scale, the affine part and the running statistics of its own features."""
    if name == "fp32" and one_tile[0] > 128:
        pytest.skip("of split operands there is no such tile")
    features, batch = 7 * one_tile[1] + 8, one_tile[0] * 4 // 5
    with precision(name):
        check(SMALL_HOPPER, "one_kernel", name, batch, 72, features, epilogue="SingleTile", scale_shape=(features,))


@pytest.mark.parametrize("name", ["bf16", "tf32", "fp32"])
@pytest.mark.parametrize("batch", [300, 100, 3])  # boxes of x have no more rows than that
def test_evaluation_in_one_launch(name, batch):
    check(SMALL_HOPPER, "one_kernel", name, batch, 72, 136, False, "Evaluate", scale_shape=(136,), activation="relu")


def test_equal_bits_whatever_the_order_of_events():
    """Each launch has other interleavings; no result may show them."""
    torch.manual_seed(3)
    module = stir(Chain(64, 264)).bfloat16()
    x = torch.randn(400, 64, dtype=torch.bfloat16)
    grad = torch.randn(400, 264, dtype=torch.bfloat16)
    found = []
    with plan.forcing(ways.epilogue("Deferred")), emulated(SMALL_HOPPER), poisoned_memory():
        for _ in range(6):
            ours = twin(module)
            found.append(step(ours, lambda x, m=ours: run(m, x, "one_kernel", "Deferred"), x, grad))
    for other in found[1:]:
        assert all(torch.equal(found[0][key], other[key]) for key in other)


def test_mean_far_larger_than_the_deviation():
    """Half precision keeps 3e-3 where |mean|/std is 10⁴, because the product is stored minus its group's mean."""
    weight = torch.randn(136, 64) / 8
    weight[:, 0] = 1e4
    for batch in (100, 130, 300, 700):  # with and without an empty group in the last tile
        x = torch.randn(batch, 64)
        x[:, 0] = 1.0
        half = x.bfloat16(), weight.bfloat16()
        exact = linear_scale_batch_norm(*(t.double() for t in half), training=True)
        with emulated(SMALL_HOPPER), poisoned_memory():
            for strategy in ("one_kernel", "gemm_stats_apply"):
                y = linear_scale_batch_norm(*half, training=True, strategy=strategy)
                assert error(y, exact, columns=False) < 3e-3


@pytest.mark.parametrize(("epilogue", "batch"), [("SingleTile", 100), ("Deferred", 1500)])
def test_a_value_that_stands_out(epilogue, batch):
    """One row far larger than the rest: statistics are those of the product as it is stored, so that its rounding is
    normalised away and what is left is the rounding of y."""
    torch.manual_seed(0)
    features = 72 if epilogue == "SingleTile" else 264
    x, weight = torch.randn(batch, 64), torch.randn(features, 64) / 8
    x[7] *= 300
    half = (x.bfloat16(), weight.bfloat16(), None, None, None, None, (torch.rand(features) + 0.5).bfloat16())
    exact = linear_scale_batch_norm(*(t if t is None else t.double() for t in half), training=True)
    with plan.forcing(ways.epilogue(epilogue)), emulated(SMALL_HOPPER), poisoned_memory(), runtime.recording() as plans:
        y = linear_scale_batch_norm(*half, training=True, strategy="one_kernel")
    assert plans[0].launches[0].member("Epilogue<>") == f"gemmnorm::{epilogue}Epilogue"
    assert error(y, exact) <= 1.25 * error(exact.bfloat16(), exact)


def test_the_emulator_reports_what_never_comes(monkeypatch):
    """Blocks that wait for each other, run three at a time, wait for blocks that have not begun."""
    module = stir(Chain(64, 40)).bfloat16()
    x = torch.randn(1000, 64, dtype=torch.bfloat16)
    with emulated(plan.chip_for(90, 8)):
        launcher = driver.Launcher
        monkeypatch.setattr(driver, "Launcher", lambda launch, p: launcher(replace(launch, cooperative=False), p))
        with pytest.raises(EmulationError, match="waits for a counter in global memory"), torch.no_grad():
            run(module, x, "one_kernel", "CoResident")
        binding._counters.clear()  # the kernel had no chance to leave them at zero


@pytest.mark.parametrize("strategy", ["one_kernel", "cublas_folded_bn"])
def test_the_registered_operator_and_its_fake_agree(strategy):
    """The dispatcher's path, which eager calls do not take: schema, shapes of what is kept, forward and backward."""
    module = stir(Chain(32, 24, scale_shape=(24,))).bfloat16().requires_grad_(False)
    bn = module.bn
    x, grad = torch.randn(70, 32, dtype=torch.bfloat16), torch.randn(70, 24, dtype=torch.bfloat16)
    linear = (x, module.gemm.weight, module.gemm.bias, module.scale)
    running = (bn.running_mean, bn.running_var, bn.num_batches_tracked)
    forward = torch.ops.gemmnorm.linear_scale_batch_norm.default
    backward = torch.ops.gemmnorm.linear_scale_batch_norm_backward.default
    options = (1.0, True, 0.1, 1e-5, "relu", strategy, True, None, None)
    checks = ("test_schema", "test_faketensor")
    with emulated(SMALL_HOPPER):
        arguments_ = (*linear, *running, bn.weight, bn.bias, *options)
        torch.library.opcheck(forward, arguments_, test_utils=checks)
        _, product, statistics, *_ = forward(*arguments_)
        arguments_ = (
            grad, *linear, bn.weight, bn.bias, product, statistics, *options, x.dtype, x.dtype, [True] * 6,
        )  # fmt: skip
        torch.library.opcheck(backward, arguments_, test_utils=checks)


def test_a_compiled_graph_runs_the_same_kernels():
    torch._dynamo.reset()
    module = stir(Chain(64, 72, scale_shape=(72,), activation="silu")).bfloat16()
    x, grad = torch.randn(200, 64, dtype=torch.bfloat16), torch.randn(200, 72, dtype=torch.bfloat16)

    def call(m, x):
        positional, keywords = arguments(m, strategy="one_kernel")
        return linear_scale_batch_norm(x, *positional, **keywords)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    direct, traced = twin(module), twin(module)
    with emulated(SMALL_HOPPER), poisoned_memory():
        want = step(direct, lambda x: call(direct, x), x, grad)
        got = step(traced, lambda x: compiled(traced, x), x, grad)
    assert all(torch.equal(got[key], want[key]) for key in want)
