"""Values that may be None, where a `forward` compares one with None: a stand-in never is.

`batch.get("mask")` and other parts of an input become conditions. Of any other value it has to be certain that it is
not None; what a child or a method may give is refused (`giving`).
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

from torch import Tensor, fx, nn

from . import giving, guards
from .scanning import Untraceable
from .structure import forward_of
from .values import Method

_MAY_BE_NONE = ("grad", "grad_fn", "_grad", "_grad_fn", "_base", "name", "_backward_hooks")  # of a tensor
_OF_TENSORS = ("shape", "ndim", "dtype", "device", "T", "mT", "is_cuda", "requires_grad")  # and of nothing else


def conditions(owner: nn.Module, graph: fx.Graph, all_values: bool, asked: giving.Asked) -> Iterator[str]:
    """Expressions in the inputs, one of which is true where a value is None that a stand-in is not.

    `asked` gets the modules that have to stay such as never give None. Without `all_values` the expressions are about
    the values alone that are marked as compared with None.

    Raises:
        Untraceable: a value may be None that is no part of an input.
        NotByShape: something may have changed the input before.
    """
    certainty = _Certainty(owner, asked)
    for node in graph.nodes:
        compared = guards.COMPARED in node.meta or (all_values and node.op != "placeholder")
        if node.op in ("get_attr", "output") or node.meta.get("tensor") or not compared:
            continue
        text = guards.part_of_input(node)
        if text is None and not certainty.of(node):
            name = getattr(node.target, "__name__", node.target)
            raise Untraceable(f"compares a value with None, and what {name} gives may be None")
        if text is not None and node.target is getattr:
            text = f"getattr({guards.part_of_input(node.args[0])}, {node.args[1]!r}, None)"
        if text is not None:
            yield from guards.unchanged(node, node)
            yield f"{text} is None"
    yield from (f"not isinstance({text}, torch.Tensor)" for text in certainty.tensors)


class _Certainty:
    """Whether values are surely not None, provided that the parts of inputs in `tensors` are tensors."""

    def __init__(self, owner: nn.Module, asked: giving.Asked) -> None:
        self.owner, self.asked = owner, asked
        self.tensors: dict[str, None] = {}

    def of(self, node: fx.Node, tensor: bool = False) -> bool:
        """It is not None; `tensor`: it is a tensor or consists of tensors."""
        text = guards.part_of_input(node)
        if text is not None:  # or a condition says that it is not None
            self.tensors |= {text: None} if tensor and not node.meta.get("tensor") else {}
            return True
        if node.op == "get_attr":
            return True
        if node.op == "call_module":
            return self._of_module(self.owner.get_submodule(str(node.target)), node, tensor)
        source = node.args[0] if node.args and isinstance(node.args[0], fx.Node) else None
        if node.op == "call_method":
            of_input = source is not None and guards.part_of_input(source) is not None
            return hasattr(Tensor, str(node.target)) and source is not None and self.of(source, tensor or of_input)
        if isinstance(node.target, Method):
            module = self.owner.get_submodule(node.target.path)
            return not tensor and giving.Giving(module, self.asked).of_method(node.target.name, not _gets_none(node))
        if node.target is getattr and source is not None:
            name = str(node.args[1])
            known = hasattr(Tensor, name) and name not in _MAY_BE_NONE
            return known and self.of(source, tensor or name not in _OF_TENSORS)
        if node.target is operator.getitem and source is not None:
            return self._of_item(source, node.args[1], tensor)
        given = not _gets_none(node)
        return giving.is_of_torch(node.target) or giving.Giving(None, self.asked).of_function(node.target, given)

    def _of_module(self, module: nn.Module, node: fx.Node, tensor: bool) -> bool:
        """What a child gives; one that passes its input on gives what it was given."""
        while isinstance(module, nn.Sequential) and giving.is_of_torch(forward_of(type(module))) and len(module):
            if not self._runs_as_its_class(module):
                return False
            module = module[-1]
        if not self._runs_as_its_class(module):
            return False
        if isinstance(module, (nn.Identity, nn.Sequential)) and giving.is_of_torch(forward_of(type(module))):
            given = node.args[0] if node.args else None
            return isinstance(given, fx.Node) and self.of(given, tensor)
        if tensor:
            return giving.is_of_torch(forward_of(type(module))) and not giving.mentions_none(module)
        return giving.Giving(module, self.asked).of_forward(not _gets_none(node))

    def _runs_as_its_class(self, module: nn.Module) -> bool:
        self.asked.note(module, "forward")
        return "forward" not in vars(module)

    def _of_item(self, source: fx.Node, index: object, tensor: bool) -> bool:
        if isinstance(index, (slice, tuple)):
            return self.of(source, tensor)
        if source.op == "call_module" and not tensor:
            module = self.owner.get_submodule(str(source.target))
            return self.of(source) and not giving.mentions_none(module)
        return self.of(source, tensor=True)


def _gets_none(node: fx.Node) -> bool:
    return any(value is None for value in (*node.args, *node.kwargs.values()))
