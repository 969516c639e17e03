"""Inputs of which the Gram matrix of x tells too little, so that the product itself has to give the statistics."""

from __future__ import annotations

from collections.abc import Callable

import torch
from gpu_support import error, poisoned_memory
from support import Chain, arguments, stir, twin
from torch import Tensor

from gemmnorm import linear_scale_batch_norm
from gemmnorm.runtime import call as runtime

Family = Callable[[int, int, int], tuple[Tensor, Tensor]]


def ordinary(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, wide), torch.randn(out, wide)


def features_alike(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    """Columns of x that are nearly the same, and weights that take their differences."""
    x, weight = torch.randn(batch, 1) + 0.02 * torch.randn(batch, wide), torch.randn(out, wide)
    return x, weight - weight.mean(1, keepdim=True)


def rows_far_out(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    """Rows of which the pivot is taken, that have nothing in common with the others."""
    x = torch.randn(batch, wide)
    x[torch.arange(32) * batch // 32] += 300
    return x, torch.randn(out, wide)


def far_from_zero(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    return 20 + torch.randn(batch, wide), torch.randn(out, wide)


def rows_of_many_sizes(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    return torch.randn(batch, wide) * torch.exp(2 * torch.randn(batch, 1)), torch.randn(out, wide)


def alike_and_far_from_zero(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    """Columns of x that are nearly the same, and whose mean is several deviations."""
    return 5 + torch.randn(batch, 1) + 0.05 * torch.randn(batch, wide), torch.randn(out, wide)


def constant_features(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(batch, wide), torch.randn(out, wide)
    x[:, :4], weight[::2, 4:] = 0.7, 0
    return x, weight


def infinities(batch: int, wide: int, out: int) -> tuple[Tensor, Tensor]:
    x, weight = torch.randn(batch, wide), torch.randn(out, wide)
    x[5, 3], weight[: out // 2, 3] = torch.inf, 0
    return x, weight


ALL: tuple[Family, ...] = (
    ordinary, features_alike, rows_far_out, far_from_zero, rows_of_many_sizes, alike_and_far_from_zero,
    constant_features, infinities,
)  # fmt: skip


def check(family: Family, batch: int, wide: int, out: int, device: str) -> None:
    """The forward without gradients against float64 and eager, twice, where the plan takes the Gram matrix."""
    x, weight = (t.bfloat16().to(device) for t in family(batch, wide, out))
    module = stir(Chain(wide, out, bias=False)).bfloat16().to(device)
    with torch.no_grad():
        module.gemm.weight.copy_(weight)
        a = x.double() @ module.gemm.weight.double().t()
        exact = twin(module).double()
        want, eager = exact(x.double()), twin(module)(x)
        found = []
        for _ in range(2):
            ours = twin(module)
            positional, keywords = arguments(ours, strategy="gemm_stats_apply")
            with poisoned_memory(), runtime.recording() as plans:
                found.append(linear_scale_batch_norm(x, *positional, **keywords))
            assert plans[0].launches[0].function == "gram_statistics"
    for name, buffer in exact.bn.named_buffers():  # each feature's once, whoever finds its statistics
        finite = buffer.isfinite()
        updated = getattr(ours.bn, name)[finite].double()
        torch.testing.assert_close(
            updated, buffer[finite].double(), rtol=2**-6, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}"
        )
    y, again = found
    assert torch.equal(y.nan_to_num(), again.nan_to_num()), "the same bits"
    assert torch.equal(y.isnan(), eager.isnan()), "as eager has it"
    constant = a.amax(0) == a.amin(0)
    beta = module.bn.bias[constant].expand(batch, -1)
    torch.testing.assert_close(y[:, constant], beta, rtol=2**-7, atol=1e-3)
    finite = ~(constant | want.isnan().any(0))
    assert not finite.any() or error(y[:, finite], want[:, finite]) <= error(eager[:, finite], want[:, finite]) + 1e-3
