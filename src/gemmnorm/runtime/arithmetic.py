"""How float32 products are computed. PyTorch's switches allow TF32 or not; gemmnorm's decides where they do not."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from ..errors import GemmNormValueError
from .settings import variable
from .traced import traced_as_constant

ARITHMETICS = ("float32", "ieee")
VARIABLE = "GEMMNORM_FLOAT32"

_requested: str | None = None


def set_float32_arithmetic(arithmetic: str | None) -> contextlib.AbstractContextManager[None]:
    """Choose how float32 products are computed where PyTorch's switches do not allow TF32.

    - "float32", the default: float32 accuracy by the fastest arithmetic. On Hopper that is float16 or bfloat16 products
      of split operands, whose error is as a rule below that of float32 arithmetic.
    - "ieee": float32 arithmetic, about four times as slow on Hopper.
    - None: what the environment variable `GEMMNORM_FLOAT32` says, else the default.

    Takes effect at once; used as a context manager it is undone at the end. TF32 is PyTorch's own switch and is left to
    it: where it is allowed, TF32 runs whatever is chosen here.

    Raises:
        GemmNormValueError: `arithmetic` is none of these.

    Examples:
        >>> with gemmnorm.set_float32_arithmetic("ieee"):
        ...     y = model(torch.randn(32, 128))
    """
    global _requested
    previous = _requested
    _requested = _checked(arithmetic, "arithmetic") if arithmetic is not None else None
    return _restoring(previous)


@contextlib.contextmanager
def _restoring(previous: str | None) -> Iterator[None]:
    global _requested
    try:
        yield
    finally:
        _requested = previous


def _checked(name: str, argument: str) -> str:
    if name not in ARITHMETICS:
        raise GemmNormValueError(f"{argument}: expected None or one of {', '.join(ARITHMETICS)}; got {name!r}")
    return name


def tf32_allowed() -> bool:
    """PyTorch's switches let float32 products of matrices run in TF32."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)  # since PyTorch 2.9
    return bool(torch.backends.cuda.matmul.allow_tf32) if precision is None else precision == "tf32"


def tf32_allowed_to_convolutions() -> bool:
    """PyTorch's switches, which are others, let float32 convolutions run in TF32: their default."""
    precision = getattr(getattr(torch.backends.cudnn, "conv", None), "fp32_precision", None)  # since PyTorch 2.9
    return bool(torch.backends.cudnn.allow_tf32) if precision is None else precision == "tf32"


@traced_as_constant
def convolutions_differ() -> bool:
    """TF32 is allowed to float32 products or to float32 convolutions, and not to both."""
    return tf32_allowed_to_convolutions() != tf32_allowed()


def arithmetic(dtype: torch.dtype) -> str:
    """`Problem.arithmetic` of operands of `dtype`: "tf32", "float32" or "ieee" for float32, else "native".

    PyTorch's `fp32_precision = "ieee"` does not mean "ieee" here: `allow_tf32 = False` and
    `set_float32_matmul_precision("highest")` set it too, and those who write them ask for float32's accuracy.
    """
    if dtype != torch.float32:
        return "native"
    if tf32_allowed():
        return "tf32"
    found = _requested or variable(VARIABLE)
    return _checked(found, VARIABLE) if found else "float32"


def float32_reason() -> str:
    """One line: how float32 products are computed in this process now, and why."""
    found = arithmetic(torch.float32)
    if found == "tf32":
        return "float32 products run in TF32: PyTorch's switches allow it"
    by = f'set_float32_arithmetic("{_requested}")' if _requested else f"{VARIABLE}={found}"
    if found == "ieee":
        return f"float32 products run in float32 arithmetic: {by} asks for it"
    asked = by if _requested or variable(VARIABLE) else "PyTorch's switches do not allow TF32"
    return f"float32 products have float32's accuracy by the fastest arithmetic: {asked}"
