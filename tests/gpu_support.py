"""What the GPU tests share: models on the device, poisoned memory, and errors against float64."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.deterministic
from support import Chain, arguments, step, stir, twin
from torch import Tensor

from gemmnorm import linear_scale_batch_norm
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import driver

# precision → (dtype of the model, TF32 allowed)
PRECISIONS = {
    "fp32": (torch.float32, False),
    "tf32": (torch.float32, True),
    "bf16": (torch.bfloat16, False),
    "fp16": (torch.float16, False),
    "amp": (torch.float32, False),  # of a model under autocast
}
# Half the distance of neighbouring numbers, relative: 2⁻ᵖ⁻¹ for p stored bits.
ROUNDING = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}

_EMPTY = driver.empty


@contextlib.contextmanager
def poisoned_memory() -> Iterator[None]:
    """Every tensor that is allocated and not written holds NaN (integers: their largest value)."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    fill = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    allocate = driver._empty if driver.empty is _EMPTY else driver.empty  # the short way does not fill
    try:
        with mock.patch.object(driver, "empty", allocate):
            yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = fill
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


@contextlib.contextmanager
def precision(name: str) -> Iterator[torch.dtype]:
    """PyTorch's switches as `name` wants them; gives the model's dtype."""
    dtype, tf32 = PRECISIONS[name]
    matmul = torch.backends.cuda.matmul
    switch = "fp32_precision" if hasattr(matmul, "fp32_precision") else "allow_tf32"
    before = getattr(matmul, switch)
    setattr(matmul, switch, ("tf32" if tf32 else "none") if switch == "fp32_precision" else tf32)
    try:
        yield dtype
    finally:
        setattr(matmul, switch, before)


def model(dtype: torch.dtype, in_features: int, out_features: int, training: bool = True, **options: Any) -> Chain:
    """A stirred chain on the GPU."""
    module = stir(Chain(in_features, out_features, **options))
    return module.to("cuda", dtype).train(training)


def fused(module: Chain, strategy: str | None, **more: Any) -> Any:
    """A function of x that runs the operator on `module`'s tensors; skips where the planner refuses `strategy`."""

    def call(x: Tensor) -> Tensor:
        positional, keywords = arguments(module, strategy=strategy, **more)
        with runtime.recording() as plans:
            y = linear_scale_batch_norm(x, *positional, **keywords)
        if strategy is not None and plans and plans[0].strategy != strategy:
            pytest.skip(dict(plans[0].reasons).get(strategy, f"{plans[0].strategy} ran instead"))
        return y

    return call


def golden(module: Chain, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
    """One step of the chain in float64, from the same values."""
    exact = twin(module).double()
    return step(exact, exact, x.double(), grad.double())


def error(got: Tensor, exact: Tensor, size: float | None = None, columns: bool = True) -> float:
    """The relative error, the worst column's where that is larger; NaN counts as infinite.

    `size` replaces the norm of `exact` as denominator, for results that are all cancellation.
    """
    difference = got.double() - exact
    if not bool(difference.isfinite().all()):
        return float("inf")
    tiny = 1e-30
    total = float(difference.norm()) / max(float(exact.norm()) if size is None else size, tiny)
    if exact.dim() != 2 or size is not None or not columns:
        return total
    norms = exact.norm(dim=0)
    # A column that is (nearly) zero is judged against the average one.
    norms = norms.clamp_min(float(norms.square().mean().sqrt()) * 0.1 + tiny)
    return max(total, float((difference.norm(dim=0) / norms).max()))


def cancelled(name: str, module: Chain, x: Tensor, grad: Tensor, exact: dict[str, Tensor]) -> float | None:
    """The size of a gradient before its parts cancel: what its rounding errors are relative to. None for the rest.

    In training the mean and the part along ŷ are taken out of g. What is left may be far smaller than g, for two or
    three rows almost nothing; errors are those of g all the same. A sum over few rows may cancel in evaluation too.
    Likewise y of two or three rows: where these agree in nearly all digits, the product's rounding decides y.
    """
    few = x.shape[0] <= 3
    if not name.startswith("grad") and not (few and name == "y"):
        return None
    bn, weight = module.bn, module.gemm.weight.detach().double()
    gamma = 1.0 if bn.weight is None else bn.weight.detach().double().abs()
    scale = weight.new_ones(1) if module.scale is None else module.scale.double().reshape(-1)
    linear = torch.nn.functional.linear(x.double(), weight)
    linear = linear if module.gemm.bias is None else linear + module.gemm.bias.double()
    z = linear * scale
    if bn.training or bn.running_mean is None:
        centre, variance = z.mean(0), z.var(0, unbiased=False)
    else:
        centre, variance = bn.running_mean.double(), bn.running_var.double()
    rstd = (variance + bn.eps).rsqrt()
    g = grad.double().norm(dim=0)
    # Two rows may agree in nearly all digits: ŷ is then what the product's rounding left of them.
    left = 1.0 + rstd * z.detach().abs().amax(dim=0) if few else torch.ones_like(rstd)
    at_z = gamma * rstd * g * left
    at_product = float((at_z * scale).detach().norm())
    sizes = {
        "y": float((gamma * left).detach().norm()) * x.shape[0] ** 0.5,
        "grad x": at_product * float(weight.norm()) / weight.shape[0] ** 0.5,
        "grad gemm.weight": at_product * float(x.double().norm()) / x.shape[0] ** 0.5,
        "grad gemm.bias": at_product,
        "grad scale": float((at_z * linear.norm(dim=0)).detach().norm()),
        "grad bn.weight": float((left * rstd * g * (z - centre).norm(dim=0)).detach().norm()),
        "grad bn.bias": float(g.norm()),
    }
    return max(sizes[name], float(exact[name].norm()))


def assert_accurate(
    got: dict[str, Tensor],
    eager: dict[str, Tensor],
    exact: dict[str, Tensor],
    module: Chain,
    x: Tensor,
    grad: Tensor,
    operand_rounding: float = 0.0,
    strict: bool = False,
    factor: float = 1.25,
) -> None:
    """Every output, gradient and buffer is as near to float64 as eager's, beyond a floor of a few roundings.

    The floor: roundings of what is stored (y, the product, ∂L/∂a), the operands' rounding (TF32, autocast), and √K
    roundings of float32 sums. `strict`, for tensors large enough that errors average out: 1.02 × eager, columns too.
    """
    assert got.keys() == exact.keys()
    for name, want in exact.items():
        if want is None:
            assert got[name] is None, name
            continue
        if not want.is_floating_point():
            assert torch.equal(got[name], want), name
            continue
        assert got[name].dtype == eager[name].dtype and got[name].shape == want.shape, name
        size = cancelled(name, module, x, grad, exact)
        ours, theirs = error(got[name], want, size, strict), error(eager[name], want, size, strict)
        stored = max(ROUNDING[got[name].dtype], ROUNDING[module.gemm.weight.dtype])
        floor = stored + operand_rounding / 2 + 2.0**-26 * max(x.shape[1], 64) ** 0.5
        few = 2.0 if x.shape[0] <= 3 else 1.0  # hardly anything is left after the mean is taken out
        allowed = 1.02 * theirs + floor if strict else few * factor * theirs + 4.0 * floor
        assert ours <= allowed, f"{name}: error {ours:.3g}, eager's {theirs:.3g}, allowed {allowed:.3g}"


# Of an operand, where it is not exact.
OPERAND_ROUNDING = {"fp32": 0.0, "tf32": 2.0**-11, "bf16": 0.0, "fp16": 0.0, "amp": 2.0**-8}
SMOOTH = "silu"  # near a kink, float64 and a rounded product may fall on different sides of it


def check(strategy, name, batch, in_features, out_features, training, strict=False, **options):
    with precision(name) as dtype, torch.autocast("cuda", torch.bfloat16, enabled=name == "amp"):
        module = model(dtype, in_features, out_features, training, **options)
        x = torch.randn(batch, in_features, device="cuda", dtype=dtype)
        grad = torch.randn(batch, out_features, device="cuda", dtype=dtype)
        exact = golden(module, x, grad)
        theirs, ours = twin(module), twin(module)
        eager = step(theirs, theirs, x, grad)
        with poisoned_memory():
            got = step(ours, fused(ours, strategy), x, grad)
        # The reference computes in the dtype, op by op, as eager does, with roundings of its own.
        factor = 3.0 if strategy == "reference" else 1.25
        assert_accurate(
            got, eager, exact, module, x, grad, OPERAND_ROUNDING[name], strict and strategy != "reference", factor
        )


def check_without_gradients(name, batch, in_features, out_features, training, autocast=False, strategy="one_kernel"):
    """Nothing is kept: of the own product's plans only these write y and no more."""
    with precision(name) as dtype, torch.no_grad():
        dtype = torch.float32 if autocast else dtype
        module = model(dtype, in_features, out_features, training, scale_shape=(out_features,), activation=SMOOTH)
        x = torch.randn(batch, in_features, device="cuda", dtype=dtype)
        exact = twin(module).double()(x.double())
        with torch.autocast("cuda", torch.bfloat16, enabled=autocast):
            eager = twin(module)(x)
            with poisoned_memory():
                got = fused(module, strategy)(x)
    assert got.dtype == eager.dtype
    assert error(got, exact) <= 1.25 * error(eager, exact) + 2 * OPERAND_ROUNDING[name]
