"""Settings that change after a graph was traced, or hold in another process than that which traced it."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory, precision
from test_emulated import SMALL_HOPPER
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d
from gemmnorm.op.registration import _with_offset
from gemmnorm.runtime import call
from gemmnorm.runtime.operands import Options

pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
BATCH, INNER = 150, 64


def gradients(run: nn.Module, of: LinearScaleBatchNorm1d, x: Tensor, grad: Tensor) -> tuple[Tensor, ...]:
    named = (of.gemm.weight, of.scale, of.bn.weight, of.bn.bias)
    return torch.autograd.grad(run(x), [p for p in named if p is not None], grad)


@pytest.mark.parametrize(
    ("features", "later"),
    [
        (72, lambda: gemmnorm.set_float32_arithmetic("ieee")),
        (37, lambda: precision("tf32")),  # whose own kernels need rows of whole 16 bytes
    ],
    ids=["ieee", "tf32"],
)
def test_another_float32_arithmetic_than_that_of_the_trace(features: int, later: Any) -> None:
    """The graph's strategy cannot serve then. Another one keeps other statistics: none are read that are not there."""
    torch.manual_seed(0)
    module = LinearScaleBatchNorm1d(INNER, features)
    plain, x, grad = deepcopy(module).double(), torch.randn(BATCH, INNER), torch.randn(BATCH, features)
    want = gradients(plain, plain, x.double(), grad.double())
    torch._dynamo.reset()
    with precision("fp32"), emulated(SMALL_HOPPER), poisoned_memory():
        run = torch.compile(module, backend="aot_eager", fullgraph=True)
        for _ in range(2):
            torch.testing.assert_close(
                gradients(run, module, x, grad), tuple(g.float() for g in want), atol=1e-3, rtol=1e-3
            )
        with later():
            got = gradients(run, module, x, grad)
    torch.testing.assert_close(got, tuple(g.float() for g in want), atol=3e-2, rtol=1e-2)


class Observed(TorchDispatchMode):
    """Sees every operator, as PyTorch's own checks of a graph's first run do."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("observed", [False, True])
def test_a_graph_of_another_process_gets_what_it_was_promised(observed: bool) -> None:
    """A cache on the disk has graphs by what they hold: this one is of a process with another float32 arithmetic."""
    module = LinearScaleBatchNorm1d(INNER, 72)
    bn = module.bn
    operands = (torch.randn(BATCH, INNER), module.gemm.weight, module.gemm.bias, module.scale,
                bn.running_mean, bn.running_var, bn.num_batches_tracked, bn.weight, bn.bias)  # fmt: skip
    given = [t.detach() for t in operands if t is not None]
    options = Options(strategy="one_kernel", save=True, keep_product=True)
    operator = torch.ops.gemmnorm.linear_scale_batch_norm.default
    with precision("fp32"), emulated(SMALL_HOPPER), torch.no_grad():
        with gemmnorm.set_float32_arithmetic("ieee"), Observed() if observed else torch.no_grad():
            y, product, statistics, *_ = operator(*given, *options)
        assert [t.shape for t in (y, product, statistics)] == [(BATCH, 72), (BATCH, 72), (2 + 3, 72)]
        whole = product + statistics[2:].repeat_interleave(64, 0)[:BATCH]
        torch.testing.assert_close(whole, given[0] @ given[1].t(), atol=1e-4, rtol=1e-4)


def test_a_product_gets_the_means_that_it_lacks_and_none_that_it_has() -> None:
    product, offset = torch.randn(BATCH, 8), torch.randn(3, 8)
    whole, none = _with_offset(product, offset, "cublas_bn")
    assert none.shape == (0, 8)
    torch.testing.assert_close(whole, product + offset.repeat_interleave(64, 0)[:BATCH])
    assert _with_offset(product, offset, "one_kernel") == (product, offset)
    same, zeros = _with_offset(product, none, "gemm_stats_apply")
    assert same is product and zeros.shape == (3, 8) and not zeros.any()


def test_settings_take_effect_on_what_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[tuple[str | None, bool | None]] = []
    forward = call.Call.forward
    monkeypatch.setattr(
        call.Call,
        "forward",
        lambda self, o: (ran.append((self.options.strategy, self.options.keep_product)), forward(self, o))[1],
    )
    module, x = LinearScaleBatchNorm1d(INNER, 72), torch.randn(BATCH, INNER)
    torch._dynamo.reset()
    with precision("tf32"), emulated(SMALL_HOPPER):
        run = torch.compile(module, backend="aot_eager", fullgraph=True)
        run(x)
        with gemmnorm.set_strategy("cublas_bn"):
            run(x)
        with gemmnorm.set_keep_product(False):
            run(x)
        run(x)
    first = ran[0]
    assert ran == [first, ("cublas_bn", True), (first[0], False), first] and first == ("one_kernel", True)


@pytest.mark.parametrize("name", ["STRATEGY", "KEEP_PRODUCT"])
def test_a_graph_holds_what_the_environment_asks_for(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that caches of graphs tell them apart."""
    graphs: list[torch.fx.GraphModule] = []
    torch._dynamo.reset()
    monkeypatch.setenv(f"GEMMNORM_{name}", {"STRATEGY": "cublas_bn", "KEEP_PRODUCT": "0"}[name])
    module = LinearScaleBatchNorm1d(INNER, 72)
    with precision("tf32"), emulated(SMALL_HOPPER):
        torch.compile(module, backend=lambda graph, _: (graphs.append(graph), graph)[1])(torch.randn(BATCH, INNER))
    (node,) = (n for n in graphs[0].graph.nodes if "linear_scale_batch_norm" in str(n.target))
    options = Options(*node.args[9:])
    assert (options.strategy, options.keep_product) == {"STRATEGY": ("cublas_bn", None), "KEEP_PRODUCT": (None, False)}[
        name
    ]
