"""The matrix products that a model multiplies: recorded, and computed again by themselves."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class Products(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Records the operands' shapes, layouts and dtype of every matrix product that runs inside."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[tuple[Tensor, Tensor]] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            a, b = args[-2:]
            self.found.append((a, b))
        return func(*args, **(kwargs or {}))

    def flops(self) -> float:
        """Multiplications and additions of all products."""
        return sum(2.0 * a.shape[0] * a.shape[1] * b.shape[1] for a, b in self.found)

    def replay(self) -> Callable[[], object]:
        """A function that computes the same products on random numbers of the same layout."""
        pairs = [(_like(a), _like(b)) for a, b in self.found]
        return lambda: [torch.mm(a, b) for a, b in pairs]


def _like(tensor: Tensor) -> Tensor:
    transposed = tensor.stride(0) == 1 and tensor.stride(1) != 1
    rows, columns = tensor.shape
    if transposed:
        return torch.randn(columns, rows, device=tensor.device).to(tensor.dtype).t()
    return torch.randn(rows, columns, device=tensor.device).to(tensor.dtype)
