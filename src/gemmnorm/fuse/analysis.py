"""From a model to one `OwnerPlan` for each module whose `forward` holds a chain or something like one.

`fuse` builds classes from the plans; the exporter prints them, with another function to call.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import fx, nn

from .. import children
from ..errors import GemmNormTypeError
from . import (
    comparing,
    giving,
    guards,
    lines,
    matching,
    optional,
    outside,
    places,
    spanning,
    structure,
    tracing,
    writing,
)
from .beside import recording_alone
from .matching import Chain, Refusal
from .scanning import Untraceable, in_a_line
from .structure import Assumed, assume, assume_between, child_names, is_owner, original_class
from .tracing import Trace

_INDENT = "    "


class Form(NamedTuple):
    """A `forward` as recorded: expressions, one of which is true where it does not hold, and its statements."""

    conditions: tuple[str, ...]
    body: tuple[str, ...]


@dataclass(frozen=True)
class OwnerPlan:
    """What is known of one module that calls children in its `forward`, and how its fused `forward` reads.

    Attributes:
        path: of the owner below the model; "" is the model itself.
        original: its class (never a generated one).
        base: what a text calls that; "" for its name.
        chains: in the order of execution.
        refusals: the near misses.
        imports: import lines that the text of the fused `forward` needs.
        namespace: what it refers to, by name, besides `self` and the function to call.
        variables: what it assigns to.
        structure: names of the owner's children when it was recorded (`child_names`).
        assumed: descendants that do not run as modules.
        definitions: (class or Python module, name, function) of what was read and has to be found there.
        methods: (name, function) of those of the owner's class, which the instance has not got.
        written: (function, `structure.written` of it) of those that were read; what reloads a module in a notebook
            exchanges that.
        kinds: (path as names, class, what it counts as) of the children that the chains compute.
        forms: what `forward` does, by which of its parameters are given.
        places: where the modules are that its text names (`places.found`).
    """

    path: str
    original: type[nn.Module]
    chains: tuple[Chain, ...] = ()
    refusals: tuple[Refusal, ...] = ()
    imports: tuple[str, ...] = ()
    namespace: Mapping[str, object] = field(default_factory=dict)
    variables: frozenset[str] = frozenset()
    structure: tuple[Any, ...] = ()
    assumed: tuple[Assumed, ...] = ()
    definitions: tuple[tuple[Any, str, Any], ...] = ()
    methods: tuple[tuple[str, Any], ...] = ()
    written: tuple[tuple[Any, Any], ...] = ()
    kinds: tuple[tuple[tuple[str, ...], type, type | None], ...] = ()
    signature: str = ""
    forwarded: str = ""
    forms: tuple[Form, ...] = ()
    places: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    base: str = ""

    def forward_source(
        self, call_name: str | Callable[[Chain], str], guard: str | None = None, original: str = "super().forward({})"
    ) -> str:
        """The fused `forward` as Python, unindented.

        Args:
            call_name: the function that stands for a chain, or what gives its name for each. It is called as
                `call_name(x, linear, bn, scale=…, activation=…)` with the children themselves; `scale` (tensor or
                number) and `activation` (module or canonical string) only where there is one.
            guard: an expression under which the original `forward` runs, besides the conditions of all forms.
            original: the call of that `forward`; `{}` stands for the arguments. As it is, for a subclass of `original`.
        """
        *others, last = self.forms
        instead = f"{_INDENT}return {original.format(self.forwarded)}"
        lines = [f"if {guard}:", instead] if guard and others else []
        for form in others:
            before, holds, _ = comparing.questions(form.conditions, guard is not None)
            lines += [*before, f"if {holds}:", *(_INDENT + line for line in form.body)]
        if conditions := [*([guard] if guard and not others else []), *last.conditions]:
            before, _, fails = comparing.questions(conditions, guard is not None)
            lines += [*before, f"if {fails}:", instead]
        lines = [f"def forward(self{self.signature}):", *(_INDENT + line for line in [*lines, *last.body])]
        text = "\n".join(lines) + "\n"
        for i, chain in enumerate(self.chains):
            text = text.replace(_placeholder(i), call_name if isinstance(call_name, str) else call_name(chain))
        return text

    def class_source(self, name: str, call_name: str | Callable[[Chain], str]) -> str:
        """The subclass of `original` with the fused `forward`, as Python."""
        forward = self.forward_source(call_name).splitlines()
        what = self.original.__name__
        if len(self.chains) == 1:
            lines = [f'{_INDENT}"""{what} with {self.chains[0]} as one operation."""']
        else:
            listed = [f"{_INDENT * 2}{chain}" for chain in self.chains]
            lines = [f'{_INDENT}"""{what} with each of these as one operation:', "", *listed, f'{_INDENT}"""']
        lines = [f"class {name}({self.base or what}):", *lines, ""]
        return "\n".join([*lines, *(_INDENT + line for line in forward)]) + "\n"

    @property
    def nameless(self) -> list[Any]:
        """Functions, classes and closure cells that the text refers to and that no other file can import."""
        held = (value for name, value in self.namespace.items() if name.startswith(outside.HELD))
        return [value for value in held if not outside.is_importable(value)]

    def inside(self, module: str) -> OwnerPlan:
        """The same in the text of `module` itself, whose globals go by their names there."""
        forms = self.forms
        for name, value in self.namespace.items():
            if name.startswith(outside.GLOBALS) and vars(value).get("__name__") == module:
                forms = tuple(
                    Form(tuple(c.replace(f"{name}.", "") for c in form.conditions), form.body) for form in forms
                )
        return replace(self, forms=forms)


@recording_alone
def analyse(model: nn.Module, only_plain: bool = False) -> list[OwnerPlan]:
    """A plan for each module of `model` that has a chain or a refusal, outermost first. Changes nothing.

    `only_plain` leaves the chains alone that are not `Chain.is_plain`.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.
    """
    check_is_module(model)
    records = Records(only_plain)
    records.learn(model)
    plans = []
    for path, owner in model.named_modules():
        if is_owner(owner) and any(children.is_batch_norm(m) for m in owner.modules()) and not records.bypasses(owner):
            plan = plan_of(owner, path, records)
            if plan.chains or plan.refusals:
                plans.append(plan)
    return plans


def check_is_module(model: object) -> None:
    """Raise `GemmNormTypeError` unless `model` is an `nn.Module`."""
    if not isinstance(model, nn.Module):
        raise GemmNormTypeError(f"model: expected an nn.Module; got {type(model).__name__}")


class Records:
    """The recordings of one analysis, by module; each is made once, when it is first wanted."""

    def __init__(self, only_plain: bool = False) -> None:
        self.only_plain = only_plain
        self.traces: dict[int, tuple[Trace, Trace] | str] = {}  # or the reason why there are none
        self.called: set[int] = set()
        self.known: set[type[nn.Module]] = set()

    def of(self, owner: nn.Module) -> tuple[Trace, Trace]:
        """The recordings in training and in evaluation mode.

        Raises:
            Untraceable: with the reason.
        """
        if id(owner) not in self.traces:
            self.traces[id(owner)] = self._record(owner)
        found = self.traces[id(owner)]
        if isinstance(found, str):
            raise Untraceable(found)
        return found

    def _record(self, owner: nn.Module) -> tuple[Trace, Trace] | str:
        try:
            with _refusing():
                pair = self.given(owner, tracing.forms(owner)[0])
        except Untraceable as reason:
            return str(reason)
        nodes = (node for trace in pair for node in trace.graph.nodes)
        called = (matching.called_module(owner, node) for node in nodes)
        self.called |= {id(module) for module in called if module is not None}
        return pair

    def given(self, owner: nn.Module, names: Container[str]) -> tuple[Trace, Trace]:
        """The same with tensors for these parameters of `owner.forward`; made each time."""
        return tracing.trace(owner, True, names), tracing.trace(owner, False, names)

    def learn(self, model: nn.Module) -> None:
        """Find the classes in `model` whose `forward` is `F.linear` with their own weight and bias, and no more."""
        for module in model.modules():
            cls = original_class(module)
            candidate = is_owner(module) and not module._modules and "weight" in module._parameters
            if cls in self.known or not candidate or not children.is_untouched(module):
                continue
            self.known.add(cls)
            if self.graph_of(module) is not None and all(map(matching.is_linear_call, self.of(module))):
                children.register_linear_like(cls)

    def graph_of(self, owner: nn.Module) -> fx.Graph | None:
        """The recording in training mode, None where there is none."""
        try:
            return self.of(owner)[0].graph
        except Untraceable:
            return None

    def bypasses(self, owner: nn.Module) -> bool:
        """An outer `forward` calls descendants of `owner` itself and never `owner`."""
        inner = (module for module in owner.modules() if module is not owner)
        return id(owner) not in self.called and any(id(module) in self.called for module in inner)


@recording_alone
def plan_of(owner: nn.Module, path: str = "", records: Records | None = None) -> OwnerPlan:
    """The plan of one module alone, with neither chains nor refusals where there is nothing to say."""
    original = original_class(owner)
    if records is None:
        records = Records()
        records.learn(owner)
    try:
        pair = records.of(owner)
        with _refusing():
            plan = _plan_of_traces(path, owner, records, pair)
        if plan.chains:
            plan = _with_further_forms(plan, owner, records)
            return replace(plan, places=places.found(owner, plan.forward_source("call")))
        train, _ = pair
        if plan.refusals or not train.whole or not _may_hold_chain(owner):
            return plan
        name, reason = train.whole[0]
        return replace(plan, refusals=(Refusal(path, path, f"its method {name} {reason}"),))
    except Untraceable as reason:
        if not _may_hold_chain(owner):
            return OwnerPlan(path, original)
        return OwnerPlan(path, original, refusals=(Refusal(path, path, f"its forward {reason}"),))


@contextlib.contextmanager
def _refusing() -> Iterator[None]:
    """What nobody has foreseen is a reason to leave an owner alone, and no more: its model works."""
    try:
        yield
    except Untraceable:
        raise
    except Exception as error:
        raise Untraceable(f"cannot be analysed ({in_a_line(error)})") from error


def _with_further_forms(plan: OwnerPlan, owner: nn.Module, records: Records) -> OwnerPlan:
    """`plan`, and what the owner does where it is given what is None by default, as far as that can be recorded."""
    for names in tracing.forms(owner)[1:]:
        try:
            with _refusing():
                further = _plan_of_traces(plan.path, owner, records, records.given(owner, names), plan)
        except Untraceable:
            continue
        body = further.forms[0].body
        called = any(_placeholder(i) in line for line in body for i in range(len(further.chains)))
        if not called or body in [form.body for form in plan.forms]:
            continue
        plan = replace(
            plan,
            chains=further.chains,
            imports=(*dict.fromkeys((*plan.imports, *further.imports)),),
            namespace=further.namespace,
            variables=further.variables,
            assumed=(*dict.fromkeys((*plan.assumed, *further.assumed)),),
            definitions=(*dict.fromkeys((*plan.definitions, *further.definitions)),),
            methods=(*dict.fromkeys((*plan.methods, *further.methods)),),
            written=(*{**dict(plan.written), **dict(further.written)}.items(),),
            kinds=further.kinds,
            forms=(*plan.forms, *further.forms),
        )
    return plan


def _plan_of_traces(
    path: str, owner: nn.Module, records: Records, pair: tuple[Trace, Trace], before: OwnerPlan | None = None
) -> OwnerPlan:
    """The plan with the one form that the recordings in training and evaluation are of.

    `before`: with the other forms, whose chains come first and whose names are taken.
    """
    chains = [*before.chains] if before else []
    bodies: list[list[str]] = []
    namespace, variables = ({**before.namespace}, {*before.variables}) if before else ({}, set())
    imports: dict[str, None] = {}
    refused: list[list[tuple[str, str]]] = []
    assumed: dict[Assumed, None] = {}
    asked: list[list[str]] = []
    definitions: dict[tuple[Any, str, Any], None] = {}
    recordings = [spanning.joined_recording(owner, t, mode, records, assumed) for mode, t in enumerate(pair)]
    for trace in recordings:
        texts, names, functions = _conditions(owner, trace)
        asked.append(texts)
        definitions |= dict.fromkeys((*trace.definitions, *functions))
        namespace |= names
        imports |= dict.fromkeys(comparing.lines_for(names.items()))
        found, missed = matching.match(owner, trace.graph, records.only_plain)
        missed += spanning.spanning(owner, trace.graph, records)
        refused.append(missed)
        chains += [chain for chain in dict.fromkeys(f.chain for f in found) if chain not in chains]
        called = [(_placeholder(chains.index(f.chain)), f) for f in found]
        writer = writing.Writer(owner, trace.graph, called, namespace, variables)
        bodies.append(writer.body())
        assumed |= dict.fromkeys(a for f in found for a in _assumed(owner, f))
        namespace, variables = writer.namespace, writer.variables
        imports |= dict.fromkeys(writer.imports)
    reasons = _reasons(*refused)
    conditions = _of_modes(*asked)
    writing.check_parameters((p.name for p in pair[0].parameters), [*conditions, *bodies[0], *bodies[1]])
    for name, value, line in comparing.named_by(conditions):
        namespace[name], imports[line] = value, None
    plain = [*dict.fromkeys(p for c in chains for p in (c.linear, c.bn, c.activation_module) if p is not None)]
    plan = OwnerPlan(
        path=path,
        original=original_class(owner),
        definitions=(*dict.fromkeys((*definitions, *structure.forwards(owner, (*plain, *(a.path for a in assumed))))),),
        methods=(*dict.fromkeys(m for trace in pair for m in trace.methods),),
        written=(*{f: structure.written(f) for trace in recordings for f in trace.functions}.items(),),
        kinds=(*dict.fromkeys(structure.kinds(owner, chains)),),
        chains=tuple(chains),
        refusals=tuple(Refusal(path, _joined(path, where), why) for where, why in reasons),
        imports=tuple(imports),
        namespace=namespace,
        variables=frozenset(variables),
        structure=child_names(owner),
        assumed=tuple(assumed),
        signature=writing.signature(pair[0].parameters),
        forwarded=writing.forwarded(pair[0].parameters),
        forms=(Form(tuple(conditions), tuple(lines.merge_modes(*bodies))),),
    )
    if chains:
        compile(plan.forward_source("call", "changed"), "<fused>", "exec")  # what no Python is raises here
    return plan


def _assumed(owner: nn.Module, found: matching.Found) -> Iterator[Assumed]:
    """What a chain takes for granted about the modules that lay its product out, and about those that run meanwhile."""
    yield from (assume(owner, str(node.target)) for node in found.views if node.op == "call_module")
    for node in matching.between(found.product, found.bn):
        if node.op == "call_module" and node not in found.nodes:
            yield assume_between(owner, str(node.target))


def _of_modes(train: list[str], evaluation: list[str]) -> list[str]:
    """Those in training and those in evaluation as one list; what only one mode asks is asked in that mode alone."""
    found: dict[str, None] = {}
    for mode, asked, other in (("self.training", train, evaluation), ("not self.training", evaluation, train)):
        for condition in asked:
            inside = f"({condition})" if " or " in condition or " if " in condition else condition
            found[condition if condition in other else f"{mode} and {inside}"] = None
    return [*found]


def _conditions(owner: nn.Module, trace: Trace) -> tuple[list[str], dict[str, Any], list[tuple[Any, str, Any]]]:
    """Expressions, one of which is true where the recording does not stand for the original.

    And what they refer to, by name, and (class, name, function) of what has to be found in classes of descendants.
    The decisions that they are about leave the graph.
    """
    try:
        render = functools.partial(writing.path_expression, owner)
        found = [*trace.conditions(render), *guards.conditions(owner, trace.graph, render)]
        asked = giving.Asked()
        of_none = [*optional.conditions(owner, trace.graph, trace.tests_values, asked)]
        of_modules, namespace, functions = structure.as_asked(owner, asked, render)
    except guards.NotByShape as error:
        raise Untraceable(str(error) or "decides by the shape of a value that it computes") from error
    for node in trace.graph.find_nodes(op="get_attr"):
        tested = str(node.target).rpartition(".")[2] in trace.tested_attributes or guards.COMPARED in node.meta
        found += [f"{render(str(node.target))} is None"] if tested or trace.tests_values else []
    found += of_modules + of_none
    guards.forget(trace.graph)
    return found, {**trace.namespaces, **namespace}, functions


def _reasons(training: list[tuple[str, str]], evaluation: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """(location, reason) of what is refused in either mode; the reason says in which, where it is not both."""
    found: dict[tuple[str, str], None] = {}
    for mode, missed, other in (("training", training, evaluation), ("evaluation", evaluation, training)):
        for where, why in missed:
            found[where, why if (where, why) in other else f"{why} (in {mode})"] = None
    return [*found]


def _placeholder(index: int) -> str:
    """What stands in a body for the name of the function that computes chain number `index`; as long as such a name."""
    return f"⟨chain {index:_>20}⟩"


def _joined(path: str, location: str) -> str:
    """ "head: gemm → bn" for a location inside of the owner at `path`."""
    return f"{path}: {location}" if path else location


def _may_hold_chain(owner: nn.Module) -> bool:
    """Among the children that only `owner` can call are a Linear and a BatchNorm1d."""
    own: list[nn.Module] = []
    waiting = [owner]
    while waiting:
        for child in waiting.pop().children():
            own.append(child)
            if isinstance(child, (nn.ModuleList, nn.ModuleDict)):
                waiting.append(child)
    return any(map(children.is_linear, own)) and any(map(children.is_batch_norm, own))
