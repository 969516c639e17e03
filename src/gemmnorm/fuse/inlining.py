"""A child's recording written into its owner's, for a chain that begins in the one and ends in the other.

The Linear of a projector and the BatchNorm that its owner applies to the result are called by different `forward`s.
Where both are recorded, the outer recording takes over the inner one's calls, with the child's name before theirs; then
one `forward` has both. What the inner recording takes for granted becomes a condition of the outer one.
"""

from __future__ import annotations

import inspect
from dataclasses import replace
from typing import Any

from torch import fx, nn

from ..children import is_untouched
from . import guards
from .comparing import below
from .structure import original_class
from .tracing import Trace
from .values import Method


class NotInlined(Exception):
    """The child's recording does not stand for this call of it."""


def copied(trace: Trace) -> Trace:
    """The same recording with a graph of its own."""
    graph = fx.Graph()
    graph.output(graph.graph_copy(trace.graph, {}))
    return replace(trace, graph=graph)


def inline(owner: nn.Module, outer: Trace, node: fx.Node, inner: Trace) -> Trace:
    """`outer`, with the call `node` of a child replaced by the calls that the child makes, in place.

    Raises:
        NotInlined: and nothing has changed.
    """
    prefix, graph = str(node.target), outer.graph
    if not is_untouched(owner.get_submodule(prefix)):
        raise NotInlined
    values = _bound(owner, node, inner)
    returned = next(n for n in inner.graph.nodes if n.op == "output").args[0]
    if not isinstance(returned, fx.Node):
        raise NotInlined
    with graph.inserting_before(node):
        for n in inner.graph.nodes:
            if n.op not in ("placeholder", "output"):
                values[n] = graph.node_copy(n, values.__getitem__)
                if n.op in ("call_module", "get_attr"):
                    values[n].target = f"{prefix}.{n.target}"
                elif isinstance(n.target, Method):
                    values[n].target = Method(n.target.name, f"{prefix}.{n.target.path}".rstrip("."))
    if not isinstance(values[returned], fx.Node):
        raise NotInlined
    for asked, value in ((node, values[returned]), *((n, values[n]) for n in inner.graph.find_nodes(op="placeholder"))):
        if guards.COMPARED in asked.meta:
            value.meta[guards.COMPARED] = True
    node.replace_all_uses_with(values[returned])
    graph.erase_node(node)
    read = [
        (f"{prefix}.{path}" if path else prefix, name, below(prefix, value)) for path, name, value in inner.attributes
    ]
    around = ((expression, below(prefix, value)) for expression, value in inner.surroundings)
    relations = ((f"{prefix}.{path}" if path else prefix, below(prefix, value)) for path, value in inner.relations)
    methods = [(original_class(owner.get_submodule(prefix)), *method) for method in inner.methods]
    new = [entry for entry in read if entry not in outer.attributes]
    return replace(
        outer,
        attributes=(*outer.attributes, *new),
        surroundings=(*outer.surroundings, *(entry for entry in around if entry not in outer.surroundings)),
        namespaces={**outer.namespaces, **inner.namespaces},
        relations=(*outer.relations, *(entry for entry in relations if entry not in outer.relations)),
        definitions=(*dict.fromkeys((*outer.definitions, *inner.definitions, *methods)),),
        functions=(*dict.fromkeys((*outer.functions, *inner.functions)),),
        tested_attributes=outer.tested_attributes | inner.tested_attributes,
        tests_values=outer.tests_values or inner.tests_values,
    )


def _bound(owner: nn.Module, call: fx.Node, inner: Trace) -> dict[fx.Node, Any]:
    """The placeholders of `inner` and what `call` gives for them."""
    try:
        given = inspect.Signature(list(inner.parameters)).bind(*call.args, **call.kwargs)
    except TypeError as error:
        raise NotInlined from error
    for p in inner.parameters:
        if p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) and (given.arguments.get(p.name) or p is inner.parameters[0]):
            raise NotInlined
        if p.name in inner.fixed and given.arguments.get(p.name, p.default) is not p.default:
            raise NotInlined
    given.apply_defaults()
    values: dict[fx.Node, Any] = {}
    for placeholder in (n for n in inner.graph.nodes if n.op == "placeholder"):
        name = str(placeholder.target)
        value = values[placeholder] = given.arguments[name]
        asked = name in inner.tested | inner.booleans or placeholder.meta.get("tensor")
        if asked and not (isinstance(value, fx.Node) and guards.is_tensor(owner, value)):
            raise NotInlined
        if guards.COMPARED in placeholder.meta and not isinstance(value, fx.Node):
            raise NotInlined
    return values
