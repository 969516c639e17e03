"""The kernels of synchronised calls, by the emulator: all ranks in one process, one part of a call after another."""

from __future__ import annotations

import datetime
from types import SimpleNamespace

import pytest
import torch
import ways
from emulator import COMPILER, emulated
from gpu_support import assert_accurate, poisoned_memory, precision
from support import Chain, step, stir, twin
from torch import Tensor

from gemmnorm import plan
from gemmnorm.op import sync
from gemmnorm.plan import ranks as plans
from gemmnorm.runtime import peers, ranks
from gemmnorm.runtime.operands import Operands, Options

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
HOPPER = plan.chip_for(90, 3)


def operands_of(module: Chain, x: Tensor) -> Operands:
    bn = module.bn
    return Operands(
        x, module.gemm.weight, module.gemm.bias, module.scale, bn.running_mean, bn.running_var, bn.num_batches_tracked,
        bn.weight, bn.bias,
    )  # fmt: skip


def options_of(module: Chain, **more) -> Options:
    momentum = -1.0 if module.bn.momentum is None else module.bn.momentum
    return Options(1.0, True, momentum, module.bn.eps, module.activation, **more)


@torch.no_grad()
def in_step(modules: list[Chain], parts: list[sync.Parts], xs: list[Tensor], grads: list[Tensor]) -> dict[str, Tensor]:
    """Forward and backward of all ranks together: y and grad x of all rows, gradients summed over ranks, buffers."""
    operands = [operands_of(m, x) for m, x in zip(modules, xs, strict=True)]
    begun = [p.statistics(o) for p, o in zip(parts, operands, strict=True)]
    gathered = torch.stack([row for _, _, row in begun])
    done = [p.normalize(o, a, d, gathered) for p, o, (a, d, _) in zip(parts, operands, begun, strict=True)]
    for _, statistics in done:
        assert torch.equal(statistics, done[0][1])
    kept = [(a, d, statistics) for (a, d, _), (_, statistics) in zip(begun, done, strict=True)]
    needs = [t is not None for t in operands[0].differentiable]
    rest = list(zip(parts, grads, (o.differentiable for o in operands), kept, strict=True))
    summed = [p.sums(needs, g, o, k) for p, g, o, k in rest]
    sums = torch.stack([s for _, s in summed]).sum(0)
    products = [p.gradient(needs, g, [*o, *k], sums) for p, g, o, k in rest]
    found = {"y": torch.cat([y for y, _ in done]), "grad x": torch.cat([dx for dx, _ in products])}
    found["grad gemm.weight"] = torch.stack([dw.float() for _, dw in products]).sum(0).to(products[0][1].dtype)
    names = ("gemm.bias", "scale", "bn.weight", "bn.bias")
    for i, name in enumerate(names):
        if needs[2 + i]:
            found[f"grad {name}"] = torch.stack([v[i] for v, _ in summed]).sum(0)
    for other in modules:
        for name, buffer in other.named_buffers():
            assert torch.equal(buffer, modules[0].get_buffer(name)), name
    return found | {name: b.clone() for name, b in modules[0].named_buffers()}


def check(chip, strategy, name, rows, features, **options):
    """`rows` of each rank, against one process with the whole batch in float64; no more than eager's error."""
    with precision(name) as dtype:
        module = stir(Chain(72, features, **options)).to(dtype)
        x, grad = (torch.randn(sum(rows), n, dtype=dtype) for n in (72, features))
        exact, eager = twin(module).double(), twin(module)
        want, theirs = step(exact, exact, x.double(), grad.double()), step(eager, eager, x, grad)
        modules, xs, grads = [twin(module) for _ in rows], x.split(rows), grad.split(rows)
        with emulated(chip), poisoned_memory():
            asked = options_of(module, strategy=strategy, save=True)
            parts = [
                ranks.find(operands_of(m, x), asked, len(rows), (dtype, dtype))
                for m, x in zip(modules, xs, strict=True)
            ]
            assert all(p is not None and p.options.strategy == strategy for p in parts)
            got = in_step(modules, parts, xs, grads)
        assert_accurate(got, theirs, want, module, x, grad, 2.0**-11 if name == "tf32" else 0.0, factor=1.5)


@pytest.mark.parametrize("rows", [[130, 70], [1, 0, 65, 1]], ids=["two ranks", "uneven and empty"])
@pytest.mark.parametrize("name", ["bf16", "fp16", "tf32", "fp32"])
def test_after_the_librarys_product(name, rows):
    check(plan.chip_for(80, 4), "cublas_folded_bn", name, rows, 40, scale_shape=(40,), activation="silu")
    check(plan.chip_for(80, 4), "cublas_folded_bn", name, rows, 13, scale_shape=(), momentum=None)


@pytest.mark.parametrize("name", ["bf16", "tf32"])
def test_the_own_gemm(name, forced):
    forced(lambda c: c.phase == "backward" or ways.epilogue("Statistics")(c))
    check(HOPPER, "gemm_stats_apply", name, [300, 1, 0, 70], 136, scale_shape=(136,), activation="silu")
    check(HOPPER, "gemm_stats_apply", name, [0, 200], 40, bias=False, affine=False)


@pytest.mark.parametrize("way", ["Statistics", "Normalize"])
def test_without_gradients(way, forced):
    forced(ways.epilogue(way))
    module = stir(Chain(72, 136, activation="silu")).bfloat16()
    exact = twin(module).double()
    x = torch.randn(200, 72).bfloat16()
    with torch.no_grad(), emulated(HOPPER), poisoned_memory():
        found = [ranks.find(operands_of(module, part), options_of(module), 2, (x.dtype,) * 2) for part in x.split(100)]
        operands = [operands_of(twin(module), part) for part in x.split(100)]
        begun = [p.statistics(o) for p, o in zip(found, operands, strict=True)]
        gathered = torch.stack([row for _, _, row in begun])
        y = [p.normalize(o, a, d, gathered)[0] for p, o, (a, d, _) in zip(found, operands, begun, strict=True)]
        assert (begun[0][0] is None) == (way == "Normalize")
        assert torch.allclose(torch.cat(y).double(), exact(x.double()), atol=0.05)


def test_a_constant_column_is_exactly_beta_whatever_the_count_of_ranks():
    for rows in ([3, 4, 7], [1, 0, 5], [0, 9]):
        module = stir(Chain(64, 16, bias=False))
        with torch.no_grad(), precision("tf32"), emulated(HOPPER):
            module.gemm.weight.fill_(156.25)
            xs = torch.ones(sum(rows), 64).split(rows)
            parts = [ranks.find(operands_of(module, x), options_of(module), len(rows), (x.dtype,) * 2) for x in xs]
            begun = [p.statistics(operands_of(module, x)) for p, x in zip(parts, xs, strict=True)]
            gathered = torch.stack([row for _, _, row in begun])
            for p, x, (a, d, _) in zip(parts, xs, begun, strict=True):
                y, _ = p.normalize(operands_of(module, x), a, d, gathered)
                assert torch.equal(y, module.bn.bias.expand(len(x), 16))


def test_ranks_merge_to_the_same_bits_whatever_their_own_batch():
    torch.manual_seed(0)
    module, gathered, found = stir(Chain(8, 8)), torch.rand(20, 2 * 8 + 1), []
    gathered[:, -1] = torch.randint(1, 100, (20,))  # rows
    with torch.no_grad(), emulated(HOPPER):
        for rows in (0, 100, 4200):
            operands = operands_of(twin(module), torch.randn(rows, 8))
            part = ranks.find(operands, options_of(module, strategy="cublas_folded_bn"), 20, (torch.float32,) * 2)
            product, offset, _ = part.statistics(operands)
            found.append(part.normalize(operands, product, offset, gathered)[1])
    assert torch.equal(found[0], found[1]) and torch.equal(found[0], found[2])


def test_where_no_rank_has_rows_the_running_statistics_stay():
    module = stir(Chain(8, 16))
    before = twin(module)
    with torch.no_grad(), emulated(HOPPER):
        operands = operands_of(module, torch.empty(0, 8))
        parts = ranks.find(operands, options_of(module), 2, (torch.float32,) * 2)
        _, _, row = parts.statistics(operands)
        parts.normalize(operands, None, None, torch.stack([row, row]))
    assert torch.equal(module.bn.running_mean, before.bn.running_mean)
    assert torch.equal(module.bn.running_var, before.bn.running_var)
    assert module.bn.num_batches_tracked == before.bn.num_batches_tracked + 1


@pytest.mark.parametrize("needs", ["all", "vectors", "weight"])
@pytest.mark.parametrize(
    ("chip", "strategy"), [(plan.chip_for(80, 4), "cublas_folded_bn"), (HOPPER, "gemm_stats_apply")]
)
def test_all_in_one_call_has_the_bits_of_the_parts(chip, strategy, needs, forced):
    """Of a group of one rank, which sends to itself."""
    forced(lambda c: c.phase == "backward" or c.strategy == "cublas_folded_bn" or ways.epilogue("Statistics")(c))
    torch.manual_seed(1)
    module = stir(Chain(72, 40, scale_shape=(40,), activation="silu")).bfloat16()
    x, grad = torch.randn(130, 72).bfloat16(), torch.randn(130, 40).bfloat16()
    wanted = [needs == "all" or (i > 0 and (needs == "weight") == (i == 1)) for i in range(6)]
    with torch.no_grad(), emulated(chip), poisoned_memory():
        first, second = operands_of(twin(module), x), operands_of(twin(module), x)
        call = ranks.find(first, options_of(module, strategy=strategy, save=True), 1, (x.dtype, x.dtype))
        assert call.joins
        product, offset, row = call.statistics(first)
        y, statistics = call.normalize(first, product, offset, row[None])
        vectors, sums = call.sums(wanted, grad, first.differentiable, (product, offset, statistics))
        matrices = [None, None]
        if any(wanted[:2]):
            matrices = call.gradient(wanted, grad, [*first.differentiable, product, offset, statistics], sums)
        memory = torch.zeros(plans.exchange_bytes(1 << 15, 1), dtype=torch.uint8)
        alone = peers.Peers(x.device, chip, [memory.data_ptr()], 0, 1 << 15, 1000)
        got, kept = call.forward(second, alone)
        found = call.backward(wanted, grad, [*second.differentiable, *kept], alone)
    assert torch.equal(got, y) and torch.equal(kept[0], product)
    assert torch.equal(kept[1], statistics if offset is None else torch.cat([statistics, offset]))
    assert [f is None for f in found] == [not want for want in wanted]
    for one, other in zip(found, [*matrices, *vectors], strict=True):
        assert (one is None and other is None) or torch.equal(one, other)
    for one, other in zip(first, second, strict=True):
        assert one is None or torch.equal(one, other)


def test_plans_are_cut_where_ranks_exchange():
    problem = plan.Problem(4096, 2048, 8192, *["bfloat16"] * 4, "native", "relu", True, True)
    assert plans.strategies(problem)[0] == "gemm_stats_apply"
    _, statistics, normalize = plans.forward(problem, "gemm_stats_apply", 8)
    assert [launch.function for launch in statistics.launches] == ["fused_gemm", "pack_statistics"]
    assert [launch.function for launch in normalize.launches] == ["merge_ranks", "normalize"]
    sums, gradient = plans.backward(problem, "gemm_stats_apply")
    assert [launch.function for launch in sums.launches] == ["gradient_sums", "merge_gradients"]
    assert [launch.function for launch in gradient.launches] == ["product_gradient"]


def test_a_rank_has_memory_for_all_that_an_exchange_sends():
    for of_ranks, count in ((2, 1), (3, 2 * 8192 + 1), (16, 1 << 17)):
        launch = plans.exchange(plan.chip_for(90), (count,), 1 << 17, of_ranks, 1, 1000, False).launches[0]
        part = launch.member("kPart")
        blocks = launch.grid.value(1)
        assert blocks * part >= 1 << 17
        assert plans.exchange_bytes(1 << 17, of_ranks) >= blocks * (2 * of_ranks * part * 8 + 4)


def test_groups_that_never_agreed_use_collectives():
    assert peers.find(None, torch.zeros(9)) is None and peers.find(None, torch.zeros(9, dtype=torch.float64)) is None


def test_how_long_ranks_wait_is_the_groups_affair():
    class Backend:
        options = SimpleNamespace(_timeout=datetime.timedelta(seconds=7))

    assert sync._limit_ms(SimpleNamespace(_get_backend=lambda device: Backend)) == 7000
    assert sync._limit_ms(SimpleNamespace()) == 600_000  # a private name that is gone
