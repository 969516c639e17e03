"""What may stand between a Linear and its BatchNorm: operations that only say how the elements are laid out.

The product of x [..., I] is [..., O]; a BatchNorm takes its features at dimension 1. `step` follows the features from
one operation to the next, so that `matching` knows for which inputs they end up there. Then every other element of a
feature is one of the batch, wherever it lies, and normalising the rows before the views or after them is the same.
"""

from __future__ import annotations

import operator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import fx, nn


class Layout(NamedTuple):
    """How many dimensions a value has, and which of them is the features."""

    rank: int
    axis: int


class Source(NamedTuple):
    """A product in a recording: its node, that of its input, the features of both, and the layout of both."""

    product: fx.Node
    input: fx.Node
    in_features: int
    out_features: int
    layout: Layout


_NOTHING = {"contiguous", "clone"}
_SWAP = {"transpose", "swapaxes", "swapdims"}
_MOVE = {"movedim", "moveaxis"}
_RESHAPE = {"view", "reshape"}
_NAMES = {*_NOTHING, *_SWAP, *_MOVE, *_RESHAPE, "permute", "flatten", "unflatten", "unsqueeze", "t"}
_ATTRIBUTES = {"T": (-1, -2), "mT": (-1, -2)}
_KEYWORDS = ("start_dim", "end_dim", "dim0", "dim1", "dim", "dims", "shape", "sizes", "source", "destination")
AS = {"reshape_as": "reshape", "view_as": "view", "expand_as": "expand"}  # by another's sizes, and by sizes
SHAPE_ONLY = {"size", "dim", "ndimension", "numel"}


def viewed(owner: nn.Module, node: fx.Node) -> fx.Node | None:
    """What `node` is another view of; None where it is no view."""
    if node.op == "call_module":
        known = does_nothing(owner, node) or type(owner.get_submodule(str(node.target))) is nn.Flatten
        given = node.args[0] if known and len(node.args) == 1 and not node.kwargs else None
    elif does_nothing(owner, node):
        given = node.args[0]
    elif node.op == "call_function" and node.target is getattr:
        given = node.args[0] if node.args[1] in _ATTRIBUTES else None
    else:
        given = node.args[0] if _name(node) in _NAMES and node.args else None
    return given if isinstance(given, fx.Node) else None


def does_nothing(owner: nn.Module, node: fx.Node) -> bool:
    """An Identity, or a Dropout that keeps everything."""
    if node.op == "call_module":
        module: Any = owner.get_submodule(str(node.target))
        return type(module) is nn.Identity or (type(module) is nn.Dropout and bool(module.p == 0))
    return node.target is F.dropout and bool(node.args) and bool(node.kwargs.get("p", (*node.args, 0.5)[1]) == 0)


def _name(node: fx.Node) -> str:
    """Of a method, or of the function of the same name in `torch`."""
    if node.op == "call_method":
        return str(node.target)
    name = getattr(node.target, "__name__", "")
    return name if node.op == "call_function" and getattr(torch, name, None) is node.target else ""


def step(owner: nn.Module, node: fx.Node, layout: Layout, source: Source) -> Layout | None:
    """The layout after the view `node`; None where its features are no longer one dimension, or nobody can say."""
    rank, axis = layout
    if does_nothing(owner, node):
        return layout
    if node.op == "call_module":
        module: Any = owner.get_submodule(str(node.target))
        return _flattened(layout, module.start_dim, module.end_dim)
    if node.op == "call_function" and node.target is getattr:
        return _swapped(layout, -1, -2) if rank == 2 or node.args[1] == "mT" else None
    name = _name(node)
    given = [*node.args[1:], *(node.kwargs[k] for k in _KEYWORDS if k in node.kwargs)]
    if name == "clone" or (name == "contiguous" and not given):
        return layout
    if name in _RESHAPE:
        sizes = list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
        kept = axis == rank - 1 and bool(sizes) and _is_features(sizes[-1], source)
        return Layout(len(sizes), len(sizes) - 1) if kept else None
    if name == "permute":
        given = list(given[0]) if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    numbers = [g for g in given if type(g) is int]
    if len(numbers) != len(given):
        return None
    if name == "t":
        return _swapped(layout, -1, -2) if rank == 2 else None
    if name == "permute":
        order = [n % rank for n in numbers] if len(numbers) == rank else []
        return Layout(rank, order.index(axis)) if axis in order else None
    if name in _SWAP and len(numbers) == 2:
        return _swapped(layout, *numbers)
    if name in _MOVE and len(numbers) == 2 and all(-rank <= n < rank for n in numbers):
        order = [d for d in range(rank) if d != numbers[0] % rank]
        order.insert(numbers[1] % rank, numbers[0] % rank)
        return Layout(rank, order.index(axis))
    if name == "flatten" and len(numbers) <= 2:
        dims: dict[str, Any] = {"start_dim": 0, "end_dim": -1}
        dims.update(zip(dims, node.args[1:], strict=False))
        return _flattened(layout, **{**dims, **{k: v for k, v in node.kwargs.items() if k in dims}})
    if name == "unsqueeze" and len(numbers) == 1 and -rank - 1 <= numbers[0] <= rank:
        at = numbers[0] % (rank + 1)
        return Layout(rank + 1, axis + (at <= axis))
    return None


def _swapped(layout: Layout, first: int, second: int) -> Layout | None:
    rank, axis = layout
    if not (-rank <= first < rank and -rank <= second < rank):
        return None
    a, b = first % rank, second % rank
    return Layout(rank, b if axis == a else a if axis == b else axis)


def _flattened(layout: Layout, start_dim: int, end_dim: int) -> Layout | None:
    rank, axis = layout
    if not (-rank <= start_dim < rank and -rank <= end_dim < rank):
        return None
    a, b = start_dim % rank, end_dim % rank
    if a > b or (a <= axis <= b and a != b):
        return None
    return Layout(rank - (b - a), axis if axis <= a else axis - (b - a))


def _is_features(size: Any, source: Source) -> bool:
    """A size that is certainly the number of features of the product."""
    if type(size) is int:
        return size == source.out_features
    value, index = size_of(size) or (None, 0)
    rank, axis = source.layout
    if not -rank <= index < rank or index % rank != axis:
        return False
    return value is source.product or (value is source.input and source.in_features == source.out_features)


def size_of(node: Any) -> tuple[fx.Node, int] | None:
    """(value, dimension) where `node` is `value.shape[dimension]` or `value.size(dimension)`."""
    if not isinstance(node, fx.Node):
        return None
    if node.op == "call_method" and node.target == "size" and len(node.args) == 2 and type(node.args[1]) is int:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    if node.target is operator.getitem and type(node.args[1]) is int and isinstance(node.args[0], fx.Node):
        shape = node.args[0]
        of_attribute = shape.target is getattr and shape.args[1] == "shape"
        of_method = shape.op == "call_method" and shape.target == "size" and len(shape.args) == 1
        return (shape.args[0], node.args[1]) if of_attribute or of_method else None  # type: ignore[return-value]
    return None


def asks_only_for_the_shape(user: fx.Node, value: fx.Node) -> bool:
    """`user` reads nothing of `value` but its sizes."""
    if user.op == "call_function" and user.target is getattr:
        return user.args[1] in ("shape", "ndim")
    if user.op != "call_method":
        return False
    if user.target in AS:
        return len(user.args) == 2 and user.args[0] is not value and user.args[1] is value
    return user.target in SHAPE_ONLY
