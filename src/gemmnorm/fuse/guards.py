"""Decisions that a `forward` takes by the shape of its inputs: `if x.shape[0] > 1`, `if x.dim() == 3`.

While recording, an input is imagined as a matrix of many rows, and the branch that it would take is recorded. The
decision becomes a condition on the inputs; where it would fall otherwise, the original `forward` runs.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from typing import Any

import torch.nn.functional as F
from torch import fx, nn

from .. import activations
from ..children import is_batch_norm, is_linear, product_class

LENGTH = len  # while something is recorded, another stands in for it
_LARGE, _RANK = 1 << 20, 2  # a size, and a number of dimensions, of an imagined input
_DECIDED = "decided"  # the key under which a node says how it was decided
_COMPARE = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip
_ARITHMETIC = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%"}


class NotByShape(Exception):
    """The value of a node depends on more than shapes."""


def decide(node: fx.Node, planned: bool | None) -> tuple[bool, bool]:
    """How the decision `node` falls, as planned or else as for an imagined input, and whether this is the first time.

    Raises:
        NotByShape: it depends on more than shapes.
    """
    first = _DECIDED not in node.meta
    if first:
        imagined = _imagined(node)
        node.meta[_DECIDED] = bool(imagined) if planned is None else planned
    return bool(node.meta[_DECIDED]), first


def _imagined(node: Any) -> Any:
    if isinstance(node, (int, float)):
        return node
    if isinstance(node, fx.Node):
        asked = _asked(node)
        if asked is not None:
            return _RANK if asked[1] is None else _LARGE
        if node.op == "call_function" and (node.target in _COMPARE or node.target in _ARITHMETIC):
            return node.target(*map(_imagined, node.args))  # type: ignore[operator]
    raise NotByShape


def _asked(node: fx.Node) -> tuple[fx.Node, int | None] | None:
    """(value, dimension) where `node` is a size of a value; (value, None) where it is its number of dimensions."""
    given: Any = node.args[0] if node.args else None
    if node.op == "call_method" and node.target in ("dim", "ndimension"):
        return given, None
    if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
        return (given, node.args[1]) if type(node.args[1]) is int else None
    if node.op != "call_function":
        return None
    if node.target is getattr and node.args[1] == "ndim":
        return given, None
    if node.target is LENGTH:
        shape = shape_of(given)
        return (given, 0) if shape is None else (shape, None)
    if node.target is operator.getitem and type(node.args[1]) is int:
        shape = shape_of(given)
        return None if shape is None else (shape, node.args[1])
    return None


def shape_of(node: Any) -> fx.Node | None:
    """The value whose whole shape `node` is."""
    if isinstance(node, fx.Node):
        attribute = node.op == "call_function" and node.target is getattr and node.args[1] == "shape"
        method = node.op == "call_method" and node.target == "size" and len(node.args) == 1
        if attribute or method:
            return node.args[0]  # type: ignore[return-value]
    return None


def conditions(owner: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """Expressions in the inputs, one of which is true where a decision would fall otherwise than recorded.

    Raises:
        NotByShape: a decision is about a value whose shape does not follow from an input's.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta.get("tensor"):
            yield f"not isinstance({node.target}, torch.Tensor)"
        if _DECIDED in node.meta:
            inner: dict[str, None] = {}
            text = _spelled(owner, node, lambda c, found=inner: found.setdefault(c))  # type: ignore[misc]
            yield from inner
            yield f"not ({text})" if node.meta[_DECIDED] else text


def _spelled(owner: nn.Module, node: Any, also: Callable[[str], Any]) -> str:
    """`node` as an expression in the inputs of `forward`; `also` takes further conditions on those."""
    if isinstance(node, (int, float)):
        return repr(node)
    asked = _asked(node)
    if asked is None:
        left, right = (_spelled(owner, a, also) for a in node.args)
        sign = _COMPARE.get(node.target) or _ARITHMETIC[node.target]
        return f"{left} {sign} {right}" if node.target in _COMPARE else f"({left} {sign} {right})"
    value, dimension = asked
    source = value
    while source.op == "call_module" and _keeps_rows(owner.get_submodule(str(source.target))) and source.args:
        source = source.args[0]  # type: ignore[assignment]
    if source.op != "placeholder" or (source is not value and dimension not in (0, None)):
        raise NotByShape
    if source is not value:  # the only dimension of a vector is its features
        also(f"{source.target}.dim() < 2")
    return f"{source.target}.dim()" if dimension is None else f"{source.target}.shape[{dimension}]"


def _keeps_rows(module: nn.Module) -> bool:
    """The result has as many dimensions as the input, and the same first one."""
    plain = isinstance(module, (nn.Identity, nn.Dropout, nn.LayerNorm)) or is_batch_norm(module)
    return plain or product_class(module) is nn.Linear or activations.from_module(module) is not None


def forget(graph: fx.Graph) -> None:
    """Take the decisions, and what only they asked for, out of a recording."""
    waiting = [node for node in graph.nodes if _DECIDED in node.meta]
    while waiting:
        node = waiting.pop()
        if node.users or node.op == "placeholder" or getattr(node, "_erased", False):
            continue
        if _DECIDED in node.meta or _asked(node) is not None or shape_of(node) is not None or _is_number(node):
            inputs = list(node.all_input_nodes)
            graph.erase_node(node)
            waiting += inputs


def _is_number(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _ARITHMETIC and all(map(_is_size, node.args))


def _is_size(value: Any) -> bool:
    return isinstance(value, int) or (isinstance(value, fx.Node) and (_asked(value) is not None or _is_number(value)))


_GIVE_TENSORS = (F.dropout, F.relu, F.gelu, F.silu, F.linear, F.batch_norm, F.normalize, F.mse_loss, F.cross_entropy)


def is_tensor(owner: nn.Module, node: fx.Node) -> bool:
    """The value is certainly a tensor; an input of the owner is made a condition."""
    if node.op == "placeholder":
        node.meta["tensor"] = True
        return True
    if node.op == "call_module":
        module = owner.get_submodule(str(node.target))
        known = is_linear(module) or is_batch_norm(module) or isinstance(module, (nn.Dropout, nn.LayerNorm))
        return known or activations.from_module(module) is not None
    if node.op != "call_function":
        return False
    if node.target in _ARITHMETIC or node.target is operator.truediv:
        return any(n.op != "placeholder" and is_tensor(owner, n) for n in node.all_input_nodes)
    return node.target in _GIVE_TENSORS
