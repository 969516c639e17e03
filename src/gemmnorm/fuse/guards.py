"""Decisions by what inputs are: `if x.shape[0] > 1`, `if x.dtype == torch.float16`, `if "mask" in batch`.

While recording, an input is imagined as a matrix of many rows, as wide as a Linear of the owner takes it, of the dtype
of the owner's parameters, and a dictionary to have what is looked for; the branch that they would take is recorded. The
decision becomes a condition on the inputs; where it would fall otherwise, the original `forward` runs.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from .. import activations
from ..children import is_batch_norm, is_linear, product_class

IN_PLACE = {
    getattr(operator, name)
    for name in ("iadd", "isub", "imul", "itruediv", "ifloordiv", "imod", "ipow", "imatmul", "iand", "ior", "ixor")
}
LENGTH, ATTRIBUTE = len, getattr  # while something is recorded, others stand in for them
_LARGE, RANK = 1 << 20, 2  # a size, and a number of dimensions, of an imagined input
COMPARED = "compared"  # the key under which a node says that it is compared with None
NUMBER = "number"  # the key under which a node says that it is a parameter which is a number by default
UNPACKED = "unpacked"  # the key under which a node says which of how many values it is, and its variable
_DECIDED = "decided"  # the key under which a node says how it was decided
_COMPARE = {
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=", operator.eq: "==", operator.ne: "!=",
}  # fmt: skip
_PROPERTIES = ("dtype", "device", "is_cuda", "type")  # of a tensor, and of its device
_ANSWER = ("get", "keys", "values", "items", "index", "count", "size", "dim", "ndimension", "numel")  # and do no more
_LAY_OUT = ("unsqueeze_", "squeeze_", "transpose_", "t_", "swapaxes_", "swapdims_", "resize_", "resize_as_", "set_")
_ARITHMETIC = {operator.add: "+", operator.sub: "-", operator.mul: "*", operator.floordiv: "//", operator.mod: "%"}


class NotByShape(Exception):
    """The value of a node depends on more than shapes of inputs as they are given; the message may say on what."""


def decide(owner: nn.Module, node: fx.Node, planned: bool | None) -> tuple[bool, bool]:
    """How the decision `node` falls, as planned or else as for an imagined input, and whether this is the first time.

    Raises:
        NotByShape: it depends on more than shapes.
    """
    first = _DECIDED not in node.meta
    if first:
        imagined = _imagined(owner, node)
        node.meta[_DECIDED] = bool(imagined) if planned is None else planned
    return bool(node.meta[_DECIDED]), first


def _imagined(owner: nn.Module, node: Any, beside: Any = None) -> Any:
    """What `node` is for the imagined input; `beside`: what it is compared with."""
    if not isinstance(node, fx.Node):
        return node
    asked = _asked(node)
    if asked is not None:
        unchanged(node, asked[0])
        if asked[1] in (-1, RANK - 1):
            widths = _widths(owner)
            return beside if beside in widths else next(iter(widths), _LARGE)
        return RANK if asked[1] is None else _LARGE
    if _is_looked_up(node):
        unchanged(node, node)
        return True
    value, names = _property(node)
    if names:
        unchanged(node, value)
        held = {**dict(owner.named_parameters()), **dict(owner.named_buffers())}
        like = next(iter(held.values()), torch.empty(0))
        return functools.reduce(getattr, names, held[str(value.target)] if value.op == "get_attr" else like)
    if node.op == "call_function" and (node.target in _COMPARE or node.target in _ARITHMETIC):
        pairs = zip(node.args, reversed(node.args), strict=True)
        return node.target(*(_imagined(owner, a, beside) for a, beside in pairs))  # type: ignore[operator]
    raise NotByShape


def _widths(owner: nn.Module) -> list[int]:
    """The features that the owner's products take, those of the first one first."""
    products = [m for m in owner.modules() if isinstance(m, (nn.Conv1d, nn.Conv2d)) or is_linear(m)]
    weights = (module._parameters.get("weight") for module in products)
    return [weight.shape[1] for weight in weights if weight is not None and weight.dim() > 1]


def _is_looked_up(node: fx.Node) -> bool:
    """`"mask" in batch`, for an input or a part of one."""
    inside = node.op == "call_function" and node.target is operator.contains
    return inside and isinstance(node.args[1], str) and part_of_input(node.args[0]) is not None


def _property(node: Any) -> tuple[fx.Node, tuple[str, ...]]:
    """`x.device.type`: the input, parameter or buffer, and the names behind it; none where it is not of that kind."""
    names: tuple[str, ...] = ()
    source = node
    while source.op == "call_function" and source.target is ATTRIBUTE and source.args[1] in _PROPERTIES:
        names, source = (source.args[1], *names), source.args[0]
    known = source.op == "get_attr" or part_of_input(source) is not None
    return source, names if known and names[:1] != ("type",) else ()


def _asked(node: fx.Node) -> tuple[fx.Node, int | None] | None:
    """(value, dimension) where `node` is a size of a value; (value, None) where it is its number of dimensions."""
    given: Any = node.args[0] if node.args else None
    if node.op == "call_method" and node.target in ("dim", "ndimension"):
        return given, None
    if node.op == "call_method" and node.target == "size" and len(node.args) == 2:
        return (given, node.args[1]) if type(node.args[1]) is int else None
    if node.op != "call_function":
        return None
    if node.target is ATTRIBUTE and node.args[1] == "ndim":
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
        attribute = node.op == "call_function" and node.target is ATTRIBUTE and node.args[1] == "shape"
        method = node.op == "call_method" and node.target == "size" and len(node.args) == 1
        if attribute or method:
            return node.args[0]  # type: ignore[return-value]
    return None


def iterated(node: fx.Node) -> tuple[fx.Node, range] | None:
    """(shape, positions) where `node` is the shape of a matrix, or a slice of it."""
    given: tuple[Any, ...] = node.args if node.target is operator.getitem else (node, slice(None))
    shape, part = given
    if not isinstance(part, slice) or any(type(a) not in (int, type(None)) for a in (part.start, part.stop, part.step)):
        return None
    return None if shape_of(shape) is None else (shape, range(RANK)[part])


def conditions(owner: nn.Module, graph: fx.Graph, render: Callable[[str], str]) -> Iterator[str]:
    """Expressions in the inputs, one of which is true where a decision would fall otherwise than recorded.

    `render` turns a dotted path below the owner into an expression.

    Raises:
        NotByShape: a decision is about a value whose shape does not follow from an input's.
    """
    for node in graph.nodes:
        if node.op == "placeholder" and node.meta.get("tensor"):
            yield f"not isinstance({node.target}, torch.Tensor)"
        if _DECIDED in node.meta:
            inner: dict[str, None] = {}
            text = _Spelling(owner, render, inner).of(node)
            yield from inner
            yield f"not ({text})" if node.meta[_DECIDED] else text


@dataclass(frozen=True)
class _Spelling:
    """Writes a decision as an expression in the inputs of `forward`; `also` takes further conditions on those."""

    owner: nn.Module
    render: Callable[[str], str]
    also: dict[str, None]

    def of(self, node: Any) -> str:
        if isinstance(node, torch.device):
            return f"torch.device({str(node)!r})"
        if not isinstance(node, fx.Node):
            return repr(node)
        if _is_looked_up(node):
            self.also.update(dict.fromkeys(unchanged(node, node)))
            return f"{node.args[1]!r} in {part_of_input(node.args[0])}"
        value, names = _property(node)
        if names:
            self.also.update(dict.fromkeys(unchanged(node, value)))
            return ".".join((part_of_input(value) or self.render(str(value.target)), *names))
        asked = _asked(node)
        if asked is not None:
            self.also.update(dict.fromkeys(unchanged(node, asked[0])))
            return self.size(*asked)
        left, right = map(self.of, node.args)
        sign = {**_COMPARE, **_ARITHMETIC}[node.target]  # type: ignore[index]
        return f"{left} {sign} {right}" if node.target in _COMPARE else f"({left} {sign} {right})"

    def size(self, value: fx.Node, dimension: int | None) -> str:
        """A size of `value`, or its number of dimensions."""
        source = value
        while source.op == "call_module" and _keeps_rows(self.owner.get_submodule(str(source.target))) and source.args:
            source = source.args[0]  # type: ignore[assignment]
        name = part_of_input(source)
        if name is None or (source is not value and dimension not in (0, None)):
            raise NotByShape
        if source is not value:  # the only dimension of a vector is its features
            self.also[f"{name}.dim() < 2"] = None
        return f"{name}.dim()" if dimension is None else f"{name}.shape[{dimension}]"


def _keeps_rows(module: nn.Module) -> bool:
    """The result has as many dimensions as the input, and the same first one."""
    plain = isinstance(module, (nn.Identity, nn.Dropout, nn.LayerNorm)) or is_batch_norm(module)
    return plain or product_class(module) is nn.Linear or activations.from_module(module) is not None


def unchanged(asked: fx.Node, part: fx.Node) -> list[str]:
    """Conditions under which `part` of an input is at the node `asked` what it was at the start.

    Raises:
        NotByShape: something that runs before may change that input.
    """
    root, holders, conditions = _root(part), _holders(part), list[str]()
    for node in asked.graph.nodes if root is not None else ():
        if node is asked:
            break
        name = str(getattr(node.target, "__name__", node.target))
        first = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        of_input = first is not None and _root(first) is root
        text = part_of_input(first) if first is not None else None
        in_place = node.target in (operator.setitem, *IN_PLACE) or (name[-1:] == "_" and name[-2:] != "__")
        changes = in_place and (of_input or (name in _LAY_OUT and _is_made_of(node, root)))
        if node.op == "call_method" and of_input and text is not None and name not in _ANSWER:
            changes |= not hasattr(Tensor, name)
            conditions.append(f"not isinstance({text}, torch.Tensor)")
        elif node.op == "call_module" or (node.op == "call_function" and not _only_reads(node)):
            changes |= any(part_of_input(value) in holders for value in node.all_input_nodes)
        changes |= isinstance(out := node.kwargs.get("out"), fx.Node) and _root(out) is root
        if changes:
            raise NotByShape(f"decides by what an input is after {name}, which may change it")
    return conditions


def _root(node: fx.Node) -> fx.Node | None:
    """The input that `node` is a part of, or may be itself by way of methods such as `contiguous`."""
    while node.op in ("call_method", "call_function") and node.args and isinstance(node.args[0], fx.Node):
        if node.op == "call_function" and node.target not in (ATTRIBUTE, operator.getitem, operator.contains):
            return None
        node = node.args[0]
    return node if node.op == "placeholder" else None


def _holders(part: fx.Node) -> set[str]:
    """The parts of an input that hold `part`, which who is given one may exchange."""
    found = set[str]()
    while part.op != "placeholder" and part.args and isinstance(part.args[0], fx.Node):
        part = part.args[0]
        found |= {text} if (text := part_of_input(part)) is not None else set()
    return found


def _only_reads(node: fx.Node) -> bool:
    return node.target in (ATTRIBUTE, LENGTH, operator.getitem, operator.contains, *_COMPARE)


def _is_made_of(node: fx.Node, root: fx.Node | None) -> bool:
    return node is root or any(_is_made_of(value, root) for value in node.all_input_nodes)


def forget(graph: fx.Graph) -> None:
    """Take the decisions, and what only they asked for, out of a recording."""
    waiting = [node for node in graph.nodes if {_DECIDED, COMPARED} & {*node.meta} or iterated(node)]
    while waiting:
        node = waiting.pop()
        if node.users or node.op == "placeholder" or UNPACKED in node.meta or getattr(node, "_erased", False):
            continue
        known = _DECIDED in node.meta or iterated(node) or _asked(node) is not None or _is_number(node)
        if known or _property(node)[1] or part_of_input(node) is not None:
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
        node.meta["tensor"] = NUMBER not in node.meta
        return bool(node.meta["tensor"])
    if node.op == "call_module":
        module = owner.get_submodule(str(node.target))
        known = is_linear(module) or is_batch_norm(module) or isinstance(module, (nn.Dropout, nn.LayerNorm))
        return known or activations.from_module(module) is not None
    if node.op != "call_function":
        return False
    if node.target in _ARITHMETIC or node.target is operator.truediv:
        return any(n.op != "placeholder" and is_tensor(owner, n) for n in node.all_input_nodes)
    return node.target in _GIVE_TENSORS


def part_of_input(node: Any) -> str | None:
    """`batch.get("mask")`, `batch["x"]`, `batch.y`: a part of an input as an expression."""
    if node.op == "placeholder":
        return str(node.target)
    if any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values())) or not node.args:
        return None
    source = part_of_input(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if node.op == "call_method" and node.target == "get":
        return f"{source}.get({', '.join(map(repr, node.args[1:]))})"
    if node.target is operator.getitem:
        return f"{source}[{node.args[1]!r}]"
    return f"{source}.{node.args[1]}" if node.target is ATTRIBUTE else None


def modules_asked(graph: fx.Graph) -> set[str]:
    """The children whose results' shapes, or kinds, decisions are about."""
    waiting = [node for node in graph.nodes if _DECIDED in node.meta]
    seen: set[fx.Node] = set()
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += node.all_input_nodes
    return {str(node.target) for node in seen if node.op == "call_module"}
