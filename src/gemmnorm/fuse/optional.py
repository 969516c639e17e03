"""Values that may be None, where a `forward` compares one with None: a stand-in never is.

`batch.get("mask")` and other parts of an input become conditions; what a child or a method may give is refused.
"""

from __future__ import annotations

import dis
import inspect
import itertools
import operator
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, fx, nn

from .guards import COMPARED, part_of_input, shape_of
from .recorder import Method
from .scanning import Untraceable, is_none
from .structure import forward_of

_MAY_BE_NONE = ("grad", "grad_fn", "_grad", "_grad_fn", "_base", "name", "_backward_hooks")  # of a tensor


def conditions(owner: nn.Module, graph: fx.Graph, all_values: bool) -> Iterator[str]:
    """Expressions in the inputs, one of which is true where a value is None that a stand-in is not.

    Without `all_values` they are about the attributes alone that are compared with None.

    Raises:
        Untraceable: a value may be None that is no part of an input.
    """
    for node in graph.nodes:
        text = part_of_input(node)
        compared = COMPARED in node.meta and (text is not None or _may_be_none(owner, node))
        if not compared and not (all_values and _may_be_none(owner, node)):
            continue
        if text is None:
            name = getattr(node.target, "__name__", node.target)
            raise Untraceable(f"compares a value with None, and what {name} gives may be None")
        if node.target is getattr:
            text = f"getattr({part_of_input(node.args[0])}, {node.args[1]!r}, None)"
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
        return not hasattr(Tensor, str(node.args[1])) or node.args[1] in _MAY_BE_NONE
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
    uses = _uses(function)
    names = _names_of_none(function, uses)
    if within and any(is_none(instruction) for instruction, _ in uses):
        return True
    return any(
        (load.opname == "RETURN_CONST" and is_none(load)) or (use.opname == "RETURN_VALUE" and _gives(load, names))
        for load, use in uses
    )


def _uses(function: types.FunctionType) -> list[tuple[dis.Instruction, dis.Instruction]]:
    """Each instruction with the one that runs after it, where that does not depend on a value."""
    found = [*dis.get_instructions(inspect.unwrap(function))]
    at = {instruction.offset: instruction for instruction in found}
    pairs = itertools.pairwise([*found, found[-1]])
    return [(a, at[b.argval] if b.opname in ("JUMP_FORWARD", "JUMP_ABSOLUTE") else b) for a, b in pairs]


def _names_of_none(function: types.FunctionType, uses: list[tuple[dis.Instruction, dis.Instruction]]) -> set[str]:
    """Variables and parameters that may be None, also by way of another one."""
    found = {name for name, p in inspect.signature(function).parameters.items() if p.default is None}
    while True:
        stored = {_named(use)[0] for load, use in uses if use.opname.startswith("STORE_FAST") and _gives(load, found)}
        if stored <= found:
            return found
        found |= stored


def _gives(load: dis.Instruction, names: set[str]) -> bool:
    """It loads None, or what one of `names` stands for."""
    return is_none(load) or ("LOAD_FAST" in load.opname and _named(load)[-1] in names)


def _named(instruction: dis.Instruction) -> tuple[str, ...]:
    """The variables of an instruction, of which newer interpreters have some with two."""
    return instruction.argval if isinstance(instruction.argval, tuple) else (instruction.argval,)
