"""Values that may be None, where a `forward` compares one with None: a stand-in never is.

`batch.get("mask")` and other parts of an input become conditions; what a child or a method may give is refused.
"""

from __future__ import annotations

import dis
import inspect
import operator
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from .guards import shape_of
from .recorder import Method
from .scanning import Untraceable
from .tracing import forward_of


def conditions(owner: nn.Module, graph: fx.Graph) -> Iterator[str]:
    """Expressions in the inputs, one of which is true where a value is None that a stand-in is not.

    Raises:
        Untraceable: a value may be None that is no part of an input.
    """
    for node in graph.nodes:
        if not _may_be_none(owner, node):
            continue
        text = _part_of_input(node)
        if text is None:
            name = getattr(node.target, "__name__", node.target)
            raise Untraceable(f"compares a value with None, and what {name} gives may be None")
        yield f"{text} is None"


def _may_be_none(owner: nn.Module, node: fx.Node) -> bool:
    if node.op == "call_module":
        module = owner.get_submodule(str(node.target))
        return not type(module).__module__.startswith("torch.nn.") and _gives_none(forward_of(type(module)))
    if node.op == "call_method":
        return not hasattr(Tensor, str(node.target))
    if node.op != "call_function":
        return False
    if isinstance(node.target, Method):
        module = owner.get_submodule(node.target.path)
        return _gives_none(inspect.getattr_static(type(module), node.target.name, None))
    if node.target is getattr:
        return not hasattr(Tensor, str(node.args[1])) or node.args[1] in ("grad", "grad_fn")
    if node.target is operator.getitem:
        source, index = node.args
        if not isinstance(source, fx.Node) or type(index) not in (int, str) or shape_of(source) is not None:
            return False
        if source.op == "call_module":
            return _gives_none(forward_of(type(owner.get_submodule(str(source.target)))), within=True)
        return source.op == "placeholder" or _may_be_none(owner, source)
    return isinstance(node.target, types.FunctionType) and _gives_none(node.target)


def _gives_none(function: Any, within: bool = False) -> bool:
    """It returns None somewhere, or (`within`) has a None that may be part of what it returns."""
    if not isinstance(function, types.FunctionType):
        return True
    none_before = False
    for instruction in dis.get_instructions(inspect.unwrap(function)):
        is_none = instruction.opname in ("LOAD_CONST", "RETURN_CONST") and instruction.argval is None
        returned = (is_none and instruction.opname == "RETURN_CONST") or (
            none_before and instruction.opname == "RETURN_VALUE"
        )
        if returned or (within and is_none):
            return True
        none_before = is_none
    return False


def _part_of_input(node: Any) -> str | None:
    """`batch.get("mask")`, `batch["x"]`, `batch.y`: a part of an input as an expression."""
    if node.op == "placeholder":
        return str(node.target)
    if any(isinstance(a, fx.Node) for a in (*node.args[1:], *node.kwargs.values())) or not node.args:
        return None
    source = _part_of_input(node.args[0]) if isinstance(node.args[0], fx.Node) else None
    if source is None:
        return None
    if node.op == "call_method" and node.target == "get":
        return f"{source}.get({', '.join(map(repr, node.args[1:]))})"
    if node.target is operator.getitem:
        return f"{source}[{node.args[1]!r}]"
    return f"{source}.{node.args[1]}" if node.target is getattr else None
