"""The kernels on a GPU against float64: every strategy, dtype and phase, sizes that fill no tile, poisoned memory."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
import test_split
import torch
import torch.nn.functional as F
from gpu_support import (
    OPERAND_ROUNDING,
    SMOOTH,
    assert_accurate,
    check,
    check_without_gradients,
    error,
    fused,
    golden,
    model,
    poisoned_memory,
    precision,
)
from support import step, twin
from torch import nn

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d, activations, linear_scale_batch_norm, plan
from gemmnorm.plan import STRATEGIES, small
from gemmnorm.runtime import call as runtime

pytestmark = pytest.mark.gpu

LIBRARY = ("cublas_bn", "cublas_folded_bn")
KERNELS = [s for s in STRATEGIES if s != "reference"]
BATCHES = (2, 3, 127, 128, 129, 1000)
FEATURES = ((8, 8), (24, 100), (100, 129), (129, 24), (512, 512), (1000, 1000), (64, 130), (256, 1), (1, 64))
OPTIONS = (
    {"scale_shape": "vector"},
    {"bias": False, "activation": SMOOTH},
    {"scale_shape": "vector", "affine": False},
    {"track_running_stats": False, "activation": SMOOTH},
    {"bias": False, "scale_shape": "vector", "eps": 1e-2, "momentum": 0.5},
)


def options_for(index: int, out_features: int) -> dict:
    options = dict(OPTIONS[index % len(OPTIONS)])
    if options.get("scale_shape") == "vector":
        options["scale_shape"] = (out_features,)
    return options


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OPERAND_ROUNDING)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_sizes_that_fill_no_tile(strategy, name, training):
    served, refusals = 0, []
    for index, (batch, (inner, features)) in enumerate(itertools.product(BATCHES, FEATURES)):
        options = options_for(index, features)
        if not training:
            options.pop("track_running_stats", None)
        try:
            check(strategy, name, batch, inner, features, training, **options)
            served += 1
        except pytest.skip.Exception as refusal:
            refusals.append(f"{batch} × {inner} → {features}: {refusal}")
        except AssertionError as wrong:
            raise AssertionError(f"{batch} × {inner} → {features}, {options}: {wrong}") from wrong
    if not served:
        pytest.skip(refusals[0])


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_large_sizes(strategy, name, training):
    check(strategy, name, 1024, 2048, 2048, training, strict=True, scale_shape=(2048,))
    check(strategy, name, 2050, 1024, 4104, training, strict=True, bias=False, activation=SMOOTH)


@pytest.mark.parametrize("name", ["fp32", "tf32", "bf16", "fp16"])
def test_batches_whose_backward_takes_turns(name):
    check("one_kernel", name, 9000, 128, 1032, True, scale_shape=(1032,), activation=SMOOTH)
    check("one_kernel", name, 40001, 64, 520, True, bias=False)


@pytest.mark.parametrize("name", ["tf32", "bf16", "fp16", "amp"])
@pytest.mark.parametrize("strategy", ["one_kernel", "gemm_stats_apply"])
def test_rows_that_tma_would_refuse(strategy, name):
    """Of x and the weight, as they are; what is cast or copied is padded."""
    for batch, in_features, features in ((100, 37, 40), (1000, 1028, 2056), (1000, 2051, 512), (9001, 101, 1032)):
        check(strategy, name, batch, in_features, features, True, scale_shape=(features,))


@pytest.mark.parametrize(
    "one_tile", [(256, 128), (192, 128), (128, 128), (64, 128), (256, 64), (128, 64), (128, 32)], indirect=True
)
@pytest.mark.parametrize("name", ["bf16", "tf32", "fp32"])
def test_every_tile_in_every_way_to_finish(one_tile, name, monkeypatch):
    """One block, one wave of blocks, and on few multiprocessors several; half precision then waits in shared memory."""
    gpu = runtime.chip(torch.device("cuda", 0))
    if gpu.arch != 90:
        pytest.skip("not Hopper")
    if name == "fp32" and one_tile[0] > 128:
        pytest.skip("of split operands there is no such tile")
    seen = set()
    one = ((132, 60), (132, 100), (132, 200)) if one_tile != (256, 64) else ()  # whose consumers share out the rows
    for blocks, batch in (*one, (132, 500), (12, 700), (12, 4000)):
        part = replace(gpu, multiprocessors=min(blocks, gpu.multiprocessors))
        monkeypatch.setattr(runtime, "chip", lambda _, part=part: part)
        runtime.forget()
        with runtime.recording() as plans:
            check("one_kernel", name, batch, 200, 1032, True, scale_shape=(1032,))
            for training in (True, False):
                check_without_gradients(name, batch, 200, 1032, training)
            if name != "fp32":
                check("gemm_stats_apply", name, batch, 200, 1032, True, activation=SMOOTH)
            if name == "bf16":
                check_autocast("one_kernel", batch, 200, 1032, True, True, torch.bfloat16)
                check_without_gradients(name, batch, 200, 1032, False, autocast=True)
        launches = [launch for found in plans for launch in found.launches if launch.function == "fused_gemm"]
        assert all((launch.member("kTileRows"), launch.member("kTileColumns")) == one_tile for launch in launches)
        seen |= {
            str(launch.member("Epilogue<>")).removeprefix("gemmnorm::").removesuffix("Epilogue") for launch in launches
        }
    expected = ({"SingleTile"} if one else set()) | {"Evaluate"} | ({"Statistics"} if name != "fp32" else set())
    assert expected <= seen and seen & {"CoResident", "Deferred"}  # which of the two, the planner decides


@pytest.mark.parametrize("name", ["fp32", "amp"])
def test_one_tile_of_rows_in_several_waves(name):
    single_tile = plan.forcing(lambda c: c.phase == "backward" or getattr(c.variant, "schedule", "") == "single-tile")
    with single_tile, runtime.recording() as plans:
        if name == "fp32":
            check("one_kernel", name, 100, 2048, 20480, True, scale_shape=(20480,))
        else:
            check_autocast("one_kernel", 100, 512, 40960, True, True, torch.bfloat16)
    blocks = [
        launch
        for found in plans
        for launch in found.launches
        if ("Epilogue<>", "gemmnorm::SingleTileEpilogue") in launch.config
    ]
    assert blocks and blocks[0].grid.value(100) == blocks[0].grid.limit


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("activation", [activations.canonical(row.name) for row in activations.TABLE])
@pytest.mark.parametrize("strategy", KERNELS)
def test_activations(strategy, activation, training):
    check(strategy, "fp32" if strategy in LIBRARY else "tf32", 260, 64, 96, training, activation=activation)
    module = model(torch.bfloat16, 64, 96, training, scale_shape=(96,), activation=activation)
    x = torch.randn(260, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        got, exact = fused(module, strategy)(x), twin(module).double()(x.double())
    # Two roundings of values up to 4, relative to a norm that a saturating activation makes no smaller than a fifth.
    assert error(got, exact, columns=False) < 2e-2


@pytest.mark.parametrize("scale_shape", [(96,), (1, 96), (1,), ()])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_scale_shapes(strategy, training, scale_shape):
    for name in ("fp32", "bf16"):
        check(strategy, name, 130, 64, 96, training, scale_shape=scale_shape)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_number_as_scale_and_without_gradients(strategy):
    x, weight = torch.randn(70, 32, device="cuda"), torch.randn(48, 32, device="cuda")
    module = model(torch.float32, 32, 48, bias=False)
    with torch.no_grad(), poisoned_memory():
        got = fused(module, strategy)(x)
        assert error(got, F.batch_norm(F.linear(x.double(), module.gemm.weight.double()), None, None,
                                       module.bn.weight.double(), module.bn.bias.double(), True)) < 1e-5  # fmt: skip
        got = linear_scale_batch_norm(x, weight, None, -0.01, training=True, strategy=strategy)
    exact = F.batch_norm(F.linear(x.double(), weight.double()) * -0.01, None, None, training=True)
    assert error(got, exact) < 1e-5


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_cumulative_average_and_counter(strategy):
    module = model(torch.float32, 40, 64, scale_shape=(64,), momentum=None)
    exact = twin(module).double()
    for batch in (5, 200, 129):
        x = torch.randn(batch, 40, device="cuda")
        exact(x.double())
        fused(module, strategy)(x)
    assert module.bn.num_batches_tracked.item() == 3
    assert error(module.bn.running_mean, exact.bn.running_mean) < 1e-5
    assert error(module.bn.running_var, exact.bn.running_var) < 1e-5


@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("scale", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_autocast(strategy, scale, training, half):
    check_autocast(strategy, 300, 96, 128, training, scale, half)


def check_autocast(strategy, batch, in_features, out_features, training, scale, half):
    module = model(torch.float32, in_features, out_features, training, scale_shape=(out_features,) if scale else None)
    x = torch.randn(batch, in_features, device="cuda")
    grad = torch.randn(batch, out_features, device="cuda")
    exact = golden(module, x, grad)
    theirs, ours = twin(module), twin(module)
    with torch.autocast("cuda", dtype=half):
        eager = step(theirs, theirs, x, grad)
        with poisoned_memory():
            got = step(ours, fused(ours, strategy), x, grad)
    assert got["y"].dtype == eager["y"].dtype == (torch.float32 if scale else half)
    rounding = {torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}[half]
    assert_accurate(got, eager, exact, module, x, grad, rounding, factor=3.0 if strategy == "reference" else 1.25)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_batch_norm_kept_in_float32(strategy, training):
    module = model(torch.bfloat16, 64, 128, training, scale_shape=(128,), activation="relu")
    module.bn.float()
    x = torch.randn(140, 64, device="cuda", dtype=torch.bfloat16)
    y = fused(module, strategy)(x)
    exact = twin(module).double()(x.double())
    assert y.dtype == torch.bfloat16
    assert error(y, exact, columns=False) < 1e-2


# --- the traps --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [1024, 1030])  # the last tile is full, or its second group is empty
@pytest.mark.parametrize("ratio", [1, 300, 10_000])
@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_mean_far_larger_than_the_deviation(strategy, name, ratio, batch):
    """The product has mean `ratio` and deviation one: fp32 is as good as eager, own GEMMs keep bf16 right as well."""
    with precision(name) as dtype:
        x = torch.randn(batch, 256, device="cuda", dtype=dtype)
        weight = torch.randn(192, 256, device="cuda", dtype=dtype) / 16
        x[:, 0], weight[:, 0] = 1.0, ratio
        exact = F.batch_norm(F.linear(x.double(), weight.double()), None, None, training=True)
        eager = F.batch_norm(F.linear(x, weight), None, None, training=True)
        with runtime.recording() as plans:
            got = linear_scale_batch_norm(x, weight, training=True, strategy=strategy)
        if plans[0].strategy != strategy:
            pytest.skip(dict(plans[0].reasons)[strategy])
        assert error(got, exact) <= 1.1 * error(eager, exact) + 1e-6 + (4e-3 if name == "bf16" else 0.0)
        if name == "bf16" and strategy in ("gemm_stats_apply", "one_kernel"):
            assert error(got, exact) <= 5e-3


@pytest.mark.parametrize("name", test_split.CASES)
def test_split_operands_are_never_worse_than_float32(name):
    """The families of test_split.py, at their sizes and repeated eightfold along K."""
    for copies in (1, 8):
        x, weight = (t.repeat(1, copies).cuda() for t in test_split.CASES[name][:2])
        exact, eager = test_split.chain(x.double(), weight.double()), test_split.chain(x, weight)
        with precision("fp32"), runtime.recording() as plans:
            got = test_split.chain(x, weight, strategy="one_kernel")
        if plans[0].strategy != "one_kernel":
            pytest.skip(dict(plans[0].reasons)["one_kernel"])
        ours, theirs = test_split.column_error(got, exact), test_split.column_error(eager, exact)
        assert ours <= 1.02 * theirs + 2.0**-22


@pytest.mark.parametrize("batch", [60, 240, 300])
@pytest.mark.parametrize("strategy", KERNELS)
def test_constant_column_is_exactly_beta(strategy, batch, monkeypatch):
    monkeypatch.setattr(small, "PANELS", ())
    x = torch.ones(batch, 64, device="cuda")
    weight = torch.full((32, 64), 156.25, device="cuda")
    module = model(torch.float32, 64, 32, bias=False)
    with torch.no_grad():
        module.gemm.weight.copy_(weight)
        got = fused(module, strategy)(x)
    assert error(got, module.bn.bias.double().expand(batch, 32)) < 1e-6


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_negative_and_zero_scales(strategy, training):
    module = model(torch.float32, 32, 64, training, scale_shape=(64,))
    with torch.no_grad():
        module.scale.copy_(torch.linspace(-2, 2, 64))
        module.scale[:8] = torch.tensor([0.0, -0.0, 1e-20, -1e-20, 1e-40, 1e-3, -1e-3, 1e3])
    x, grad = torch.randn(200, 32, device="cuda"), torch.randn(200, 64, device="cuda")
    exact = golden(module, x, grad)
    theirs, ours = twin(module), twin(module)
    eager = step(theirs, theirs, x, grad)
    got = step(ours, fused(ours, strategy), x, grad)
    assert all(v.isfinite().all() for v in got.values())
    assert_accurate(got, eager, exact, module, x, grad)
    if training:
        assert torch.equal(got["y"][:, 0], module.bn.bias[0].expand(200))


@pytest.mark.parametrize("strategy", KERNELS)
def test_the_bias_has_exactly_no_gradient_in_training(strategy):
    module = model(torch.float32, 32, 64)
    x, grad = torch.randn(100, 32, device="cuda"), torch.randn(100, 64, device="cuda")
    assert not step(module, fused(module, strategy), x, grad)["grad gemm.bias"].any()


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_not_a_number_stays_in_its_column(strategy):
    x, weight = torch.randn(150, 64, device="cuda"), torch.zeros(16, 64, device="cuda")
    weight[:, :16] = torch.eye(16, device="cuda")
    x[7, 3], x[9, 5] = torch.nan, torch.inf
    for activation in (None, "relu"):
        got = linear_scale_batch_norm(x, weight, training=True, activation=activation, strategy=strategy)
        # 0 · inf is NaN, in every column: both rows that hold something bad poison all of them, as in the original.
        expected = activations.forward(F.batch_norm(F.linear(x, weight), None, None, training=True), activation)
        assert torch.equal(got.isnan(), expected.isnan())


# --- shapes and layouts -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_strides_and_offsets_do_not_matter(strategy, name):
    with precision(name) as dtype:
        base = torch.randn(300, 200, device="cuda", dtype=dtype)
        flat = torch.randn(130 * 64 + 1, device="cuda", dtype=dtype)
        weight = torch.randn(96, 64, device="cuda", dtype=dtype) / 8
        inputs = (
            base[:130, 1:65],
            base[::2, :64],
            base[:64, :130].t(),
            flat[1:].view(130, 64),
            base[:1, :64].expand(40, 64),
        )
        for x, w in itertools.product(
            inputs, (weight, weight.t().contiguous().t(), torch.cat([weight, weight], 1)[:, 64:])
        ):
            leaf = x.detach().requires_grad_()
            y = linear_scale_batch_norm(leaf, w, training=True, eps=0.1, strategy=strategy)
            y.sum(0)[::2].sum().backward()  # a gradient that is an expanded view
            exact_leaf = x.detach().double().requires_grad_()
            exact = F.batch_norm(F.linear(exact_leaf, w.double()), None, None, training=True, eps=0.1)
            exact.sum(0)[::2].sum().backward()
            assert float((y.double() - exact).abs().max()) < (6e-2 if name == "bf16" else 2e-3)
            assert float((leaf.grad.double() - exact_leaf.grad).abs().max()) < (3e-1 if name == "bf16" else 1e-4)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_three_dimensions_empty_batches_and_one_row(strategy):
    ours = LinearScaleBatchNorm1d(6, 4, device="cuda")
    with gemmnorm.set_strategy(strategy):
        x = torch.randn(3, 4, 6, device="cuda")
        expected = nn.BatchNorm1d(4, device="cuda")(ours.gemm(x) * ours.scale)
        assert error(ours(x).flatten(0, 1), expected.flatten(0, 1).double()) < 1e-5
        empty = torch.randn(0, 6, device="cuda", requires_grad=True)
        before = ours.bn.running_mean.clone()
        y = ours(empty)
        assert y.shape == (0, 4) and ours.bn.num_batches_tracked.item() == 2
        assert torch.equal(ours.bn.running_mean, before)
        y.sum().backward()
        assert empty.grad.shape == (0, 6) and not ours.gemm.weight.grad.any()
        with pytest.raises(ValueError, match="more than 1 value per channel"):
            ours(torch.randn(1, 6, device="cuda"))
        assert ours.eval()(torch.randn(1, 6, device="cuda")).shape == (1, 4)


@pytest.mark.parametrize("strategy", KERNELS)
def test_more_elements_than_an_int_can_count(strategy):
    """2.4·10⁹ elements of y: an index that is not 64 bits wide wraps here."""
    batch, features = 290_000, 8320
    if torch.cuda.get_device_properties(0).total_memory < 40 * 2**30:
        pytest.skip("needs 40 GB of device memory")
    module = model(torch.bfloat16, 64, features, bias=False)
    x = torch.randn(batch, 64, device="cuda", dtype=torch.bfloat16)
    with torch.no_grad():
        y = fused(module, strategy)(x)
        columns = torch.tensor([0, 1, 4160, features - 1], device="cuda")
        product = x.double() @ module.gemm.weight[columns].double().t()
        exact = F.batch_norm(
            product, None, None, module.bn.weight[columns].double(), module.bn.bias[columns].double(), True
        )
        assert error(y[:, columns], exact) < 1e-2
    del y
    torch.cuda.empty_cache()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["fp32", "bf16"])
@pytest.mark.parametrize("strategy", KERNELS)
def test_one_output_is_kept_for_the_backward(strategy, name):
    with precision(name) as dtype:
        module = model(dtype, 256, 2048, scale_shape=(2048,), activation="relu")
        x = torch.randn(4096, 256, device="cuda", dtype=dtype, requires_grad=True)
        call = fused(module, strategy)
        call(x).sum().backward()  # compile and warm up
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = call(x)
        kept = torch.cuda.memory_allocated() - before - y.numel() * y.element_size()
        assert kept <= y.numel() * x.element_size() * 1.05 + 2**18


@pytest.mark.parametrize("strategy", KERNELS)
def test_a_forward_without_gradients_keeps_nothing(strategy):
    module = model(torch.float32, 256, 2048)
    x = torch.randn(4096, 256, device="cuda")
    with torch.no_grad():
        fused(module, strategy)(x)
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        y = fused(module, strategy)(x)
        assert torch.cuda.memory_allocated() - before <= y.numel() * 4 * 1.01 + 2**16
