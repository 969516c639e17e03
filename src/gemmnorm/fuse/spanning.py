"""Chains that several forwards share: the recording of a child that holds one end, written into its owner's."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from torch import fx, nn

from .. import children
from . import inlining, matching, views
from .scanning import Untraceable
from .structure import Assumed, assume, is_owner
from .tracing import Trace

if TYPE_CHECKING:
    from .analysis import Records


def joined_recording(
    owner: nn.Module, trace: Trace, mode: int, records: Records, assumed: dict[Assumed, None]
) -> Trace:
    """A copy of `trace` with the calls of those children written out that hold one end of a chain.

    `mode`: 0 for training, 1 for evaluation. What that takes for granted goes to `assumed`.
    """
    trace, refused = inlining.copied(trace), set[str]()
    while True:
        spans = _spans(owner, trace.graph, records)
        called = [node for span in spans for node in span.inner if str(node.target) not in refused]
        if not called:
            return trace
        path = str(called[0].target)
        try:
            inner = records.of(owner.get_submodule(path))[mode]
            trace = inlining.inline(owner, trace, called[0], inner)
            assumed[assume(owner, path)] = None
        except (inlining.NotInlined, Untraceable):
            refused.add(path)


class _Span(NamedTuple):
    """A Linear and a BatchNorm that meet in a recording, but are called by others: the calls of those."""

    linear: str
    bn: str
    inner: tuple[fx.Node, ...]


def spanning(owner: nn.Module, graph: fx.Graph, records: Records) -> list[tuple[str, str]]:
    """(location, reason) of each Linear and BatchNorm that meet at a call and are called by different forwards."""
    reason = "the two are called by different forwards; one has to call both"
    return [(f"{span.linear} → {span.bn}", reason) for span in _spans(owner, graph, records)]


def _spans(owner: nn.Module, graph: fx.Graph, records: Records) -> list[_Span]:
    found = []
    for node in graph.nodes:
        bn = _entered(owner, node, records)
        for given in node.all_input_nodes if bn is not None else ():
            linear = _left(owner, given, records)
            if bn is not None and linear is not None and not (linear.direct and bn.direct):
                inner = [called.node for called in (linear, bn) if not called.direct]
                found.append(_Span(linear.name, bn.name, tuple(inner)))
    return found


def _left(owner: nn.Module, node: fx.Node, records: Records) -> _Called | None:
    """The Linear whose product, scaled and laid out anew or not, is the value of `node`."""
    given = views.viewed(owner, node)
    if given is not None:
        return _left(owner, given, records)
    for operand in (matching.scaled(node) or ([node], ""))[0]:
        module = matching.called_module(owner, operand)
        if children.is_linear(module):
            return _Called(operand, str(operand.target), direct=True)
        if module is not None and is_owner(module):
            graph = records.graph_of(module)
            returned = next(n for n in graph.nodes if n.op == "output").args[0] if graph else None
            inner = _left(module, returned, records) if isinstance(returned, fx.Node) else None
            if inner is not None:
                return _Called(operand, f"{operand.target}.{inner.name}", direct=False)
    return None


def _entered(owner: nn.Module, node: fx.Node, records: Records) -> _Called | None:
    """The BatchNorm that the input of the call `node` goes to, scaled or not."""
    module = matching.called_module(owner, node)
    if children.is_batch_norm(module):
        return _Called(node, str(node.target), direct=True)
    graph = records.graph_of(module) if module is not None and is_owner(module) else None
    given = next((n for n in graph.nodes if n.op == "placeholder"), None) if graph else None
    for user in given.users if given is not None else ():
        for inner_node in user.users if matching.scaled(user) else (user,):
            inner = _entered(module, inner_node, records) if module is not None else None
            if inner is not None:
                return _Called(node, f"{node.target}.{inner.name}", direct=False)
    return None


class _Called(NamedTuple):
    """A call, and the module that it runs: the called one itself (`direct`), or through it a descendant."""

    node: fx.Node
    name: str
    direct: bool
