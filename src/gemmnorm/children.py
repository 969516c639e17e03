"""What counts as a Linear and as a BatchNorm: by class, and because nothing has been hung on the module.

A convolution with kernel 1, stride 1 and no padding is a Linear over the channels: the same product, for every position
a row. A module of another class whose whole `forward` is `F.linear(x, self.weight, self.bias)` is a Linear too.
"""

from __future__ import annotations

import contextlib
import os
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.utils import parametrize

# Tuples, which every version of torch.compile can read.
POINTWISE = (nn.Conv1d, nn.Conv2d)  # over single positions
NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.SyncBatchNorm)
_TORCH = os.path.join(torch.__path__[0], "")
# What a subclass must not have changed, for a call of it to be a call of the class in `torch.nn`.
_CALLED = ("forward", "__call__", "_call_impl", "__getattr__", "__getattribute__", "_conv_forward", "_check_input_dim")
# The attribute of a class that has (the class, the `forward` that makes it a Linear), as long as the class lives. Every
# version of torch.compile can read it, unlike a weak reference.
_LINEAR_LIKE = "_gemmnorm_linear_like"


def base_of(cls: type[nn.Module], *bases: type[nn.Module]) -> type[nn.Module] | None:
    """Which of `bases` `cls` is, or is a subclass of that computes the same; None where it is neither."""
    for base in bases:
        if cls is base:
            return base
    for base in bases:
        if issubclass(cls, base) and not issubclass(cls, LazyModuleMixin) and not hasattr(cls, "weight"):
            changed = (name for name in _CALLED if getattr(cls, name, None) is not getattr(base, name, None))
            return base if next(changed, None) is None else None
    return None


def product_class(module: nn.Module) -> type[nn.Module] | None:
    """`nn.Linear`, or the convolution over single positions that `module` is; None where its class says otherwise."""
    cls = type(module)
    if cls is nn.Linear or _is_linear_like(cls):
        return nn.Linear
    base = base_of(cls, nn.Linear, *POINTWISE)
    return None if base is None or (base is not nn.Linear and _not_pointwise(module)) else base


def norm_class(module: nn.Module) -> type[nn.Module] | None:
    """Which of `NORMS` `module` is; None where the class of `module` says otherwise."""
    cls = type(module)
    return cls if cls is nn.BatchNorm1d else base_of(cls, *NORMS)


def dimensions(convolution: type[nn.Module]) -> int:
    """Of what a convolution takes: [N, C, L] or [N, C, H, W]."""
    return 3 if convolution is nn.Conv1d else 4


def register_linear_like(cls: type[nn.Module]) -> None:
    """From now on, modules of class `cls` count as Linear; `tracing` has found their `forward` to be `F.linear`."""
    if any(getattr(cls, name, None) is not getattr(nn.Module, name, None) for name in _CALLED[1:]):
        return  # more than its `forward` runs
    with contextlib.suppress(Exception):  # a metaclass that lets nobody set it
        setattr(cls, _LINEAR_LIKE, (cls, cls.forward))


def _is_linear_like(cls: type[nn.Module | None]) -> bool:
    known, forward = getattr(cls, _LINEAR_LIKE, (None, None))
    return known is cls and cls.forward is forward


def _not_pointwise(conv: Any) -> str:
    """What keeps a convolution from being a Linear over the channels; "" where nothing does."""
    if any(k != 1 for k in conv.kernel_size):
        return "has a kernel wider than 1"
    if any(s != 1 for s in conv.stride):
        return "has a stride"
    if conv.groups != 1:
        return f"has {conv.groups} groups"
    padded = not isinstance(conv.padding, str) and any(conv.padding)
    return "has padding" if padded else ""


def is_linear(module: nn.Module | None) -> bool:
    """Looks like a Linear, whether it can be fused or not: a Linear, a convolution with kernel 1, or the like."""
    if isinstance(module, (nn.Conv1d, nn.Conv2d)):
        return all(k == 1 for k in module.kernel_size)
    return isinstance(module, nn.Linear) or _is_linear_like(type(module))


def is_batch_norm(module: nn.Module | None) -> bool:
    """Looks like a BatchNorm, whether it can be fused or not."""
    return isinstance(module, (*NORMS, nn.LazyBatchNorm1d, nn.LazyBatchNorm2d))


def is_as_pytorch_has_it(cls: type[nn.Module]) -> bool:
    """Nobody has put another `forward` on a class of `torch.nn` that `cls` is, or is derived from."""
    bases: list[Any] = [base for base in cls.__mro__ if base.__module__.startswith("torch.nn.")]
    codes = [getattr(base.forward, "__code__", None) for base in bases if "forward" in vars(base)]
    return all(str(getattr(code, "co_filename", "")).startswith(_TORCH) for code in codes)


def is_untouched(module: nn.Module) -> bool:
    """No hooks, and no `forward` put on the instance: a call runs the `forward` of its class and nothing else."""
    hooks = module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks
    return not hooks and "forward" not in module.__dict__


def is_plain_tensor(value: object) -> bool:
    """A Tensor or Parameter, no subclass (a DTensor, a quantised weight), which may compute something else."""
    return type(value) is Tensor or type(value) is nn.Parameter


def why_not(module: nn.Module, name: str) -> str:
    """Why a module that looks like a Linear or a BatchNorm is not fused as one, in words; "" where it can be."""
    kind = type(module)
    norm = is_batch_norm(module)
    if isinstance(module, LazyModuleMixin):
        return f"{name} is a {kind.__name__}, which has no shape before its first call; fuse after that"
    if parametrize.is_parametrized(module):
        return f"{name} is parametrized"
    if (norm_class(module) if norm else product_class(module)) is None:
        if isinstance(module, (nn.Conv1d, nn.Conv2d)) and _not_pointwise(module):
            return f"{name} {_not_pointwise(module)}"
        expected = next(base for base in (nn.Linear, *POINTWISE, *NORMS) if isinstance(module, base))
        return f"{name} is a {kind.__name__}; a subclass of {expected.__name__} may compute something else"
    if "forward" in module.__dict__:
        return f"the forward of {name} is replaced on the instance"
    if not is_untouched(module):
        return f"{name} has hooks"
    if not is_as_pytorch_has_it(kind):
        return f"the forward of {kind.__name__} is not PyTorch's"
    weight: Any = module.weight
    if weight is not None and not is_plain_tensor(weight):
        return f"the weight of {name} is a {type(weight).__name__}"
    return ""


def matrix(weight: Tensor) -> Tensor:
    """The weight [O, I] of a Linear, or of a convolution [O, I, 1, …] over single positions."""
    return weight if weight.dim() == 2 else weight.flatten(1)


def rows_of(x: Tensor, product: type[nn.Module]) -> Tensor:
    """What a product multiplies, as a matrix [rows, I]: one row for each position of x.

    x is [..., I] for a Linear and [N, I, ...] for a convolution.
    """
    if product is not nn.Linear:
        x = x.movedim(1, -1)
    return x.reshape(-1, x.shape[-1])


def from_rows(rows: Tensor, x: Tensor, product: type[nn.Module]) -> Tensor:
    """[rows, O] in the shape that the product of x has: [..., O], or for a convolution [N, O, ...]."""
    if product is nn.Linear:
        return rows if x.dim() == 2 else rows.view(*x.shape[:-1], rows.shape[-1])
    return rows.view(x.shape[0], *x.shape[2:], rows.shape[-1]).movedim(-1, 1)


def channels_last(x: Tensor) -> bool:
    """x [N, C, ...] lies in memory as [N, ..., C]."""
    return not x.is_contiguous() and x.movedim(1, -1).is_contiguous()
