"""Recording the `forward` of one module, with every child a leaf, and refusing whatever a recording would get wrong.

`torch.fx` runs `forward` once on stand-ins and records the calls. What it cannot record it silently drops or freezes:
a `with torch.no_grad()`, the value of a plain attribute, a random draw, an assignment to `self`, `if mask is None`.
A fused model must compute what the original does, so each of these is either turned into a condition under which the
recording holds (`Trace.conditions`; where it does not, the original `forward` runs) or raises `Untraceable`.
"""

from __future__ import annotations

import collections
import dataclasses
import dis
import functools
import inspect
import operator
import threading
import traceback
import types
import weakref
from collections.abc import Callable, Container, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn

from ..children import is_untouched
from . import beside, guards, held
from .comparing import differs
from .parameters import VARIADIC, by_position, is_input, is_mapping, parameters_of
from .recorder import Recorder
from .scanning import ANY, Raised, Scan, Untraceable, finds_itself, in_a_line, is_of_users
from .stand_ins import MAPPING, StandIn, honest
from .structure import aliases, defined, forward_of, original_class
from .watching import Watch, forget_frames, take_back

_NUMBERS = (int, float)

_ATTEMPTS = 8  # recordings, each with other decisions, until one runs to its end


@dataclass(frozen=True)
class Trace:
    """One recording of a `forward`.

    Attributes:
        graph: the calls, in order, every child module a single node.
        parameters: the parameters of `forward` without `self`.
        fixed: names of the parameters that kept their default (None, a bool, a string) while recording.
        attributes: (path below the owner, attribute, value) of each plain value that `forward` read.
        tested: names of the parameters that `forward` compares with `is`, in all likelihood with None.
        booleans: names of those that it compares so with True or False.
        whole: methods of the owner that cannot be recorded and stay calls, with the reasons.
        surroundings: (expression, value) of what `forward` asked PyTorch, such as whether gradients are on, and of
            modules' globals and closures.
        namespaces: the modules of those globals, cells of those closures, functions and classes, by name.
        relations: (path below the owner, what was found there): the same module as elsewhere, one of a class.
        tests_values: it compares with None what it has computed, and which values that are is not known; those that
            are known are marked in the graph.
        definitions: (module or class, name, function) of what was read and is to be found there.
        methods: (name, function) of those of the owner's class whose names occur.
        tested_attributes: attributes that it compares so.
        functions: those that were read.
    """

    graph: fx.Graph
    parameters: tuple[inspect.Parameter, ...]
    fixed: frozenset[str]
    attributes: tuple[tuple[str, str, Any], ...]
    tested: frozenset[str]
    whole: tuple[tuple[str, str], ...] = ()
    surroundings: tuple[tuple[str, Any], ...] = ()
    namespaces: Mapping[str, Any] = field(default_factory=dict)
    tests_values: bool = False
    booleans: frozenset[str] = frozenset()
    tested_attributes: frozenset[str] = frozenset()
    definitions: tuple[tuple[Any, str, Any], ...] = ()
    methods: tuple[tuple[str, Any], ...] = ()
    relations: tuple[tuple[str, Any], ...] = ()
    functions: tuple[types.FunctionType, ...] = ()

    def asks_more_than(self, *names: str) -> bool:
        """It holds only under conditions on other attributes of the owner, or on parameters of `forward`."""
        asked = any(path or name not in names for path, name, _ in self.attributes)
        return (
            asked
            or any(guards.COMPARED in node.meta for node in self.graph.nodes)
            or bool(self.fixed or self.tested or self.booleans or self.surroundings or self.relations)
            or any(p.kind in VARIADIC for p in self.parameters)
        )

    def conditions(self, render: Callable[[str], str]) -> list[str]:
        """Python expressions, one of which is true where the recording does not stand for the original.

        `render` turns a dotted path below the owner ("" for itself) into an expression.
        """
        found = [differs(p.name, p.default, render) for p in self.parameters if p.name in self.fixed]
        found += [f"{p.name} is None" for p in self.parameters if p.name in self.tested - self.fixed]
        found += [f"isinstance({p.name}, bool)" for p in self.parameters if p.name in self.booleans - self.fixed]
        found += [
            f"len({p.name}) != 1" if is_input(p, self.parameters) else p.name
            for p in self.parameters
            if p.kind in VARIADIC and not is_mapping(p, self.parameters)
        ]
        found += [differs(render(path), value, render) for path, value in self.relations]
        found += [differs(expression, value, render) for expression, value in self.surroundings]
        return found + [differs(f"{render(path)}.{name}", value, render) for path, name, value in self.attributes]


def is_replaced(module: nn.Module) -> bool:
    """The instance has a `forward` that is not its class's."""
    own = module.__dict__.get("forward")
    return own is not None and getattr(own, "__func__", None) is not getattr(type(module), "forward", None)


def forms(owner: nn.Module) -> list[frozenset[str]]:
    """Which parameters of `owner.forward` that are None by default to give tensors for, in one recording each.

    The first parameter is the input: it is given in all. Then each of the others (`labels=None`) alone, and all.

    Raises:
        Untraceable: no recording can be made of it.
    """
    forward = forward_of(type(owner))
    if is_replaced(owner) and forward is type(owner).forward:
        raise Untraceable("is replaced on the instance")
    if method := finds_itself(original_class(owner)):  # type: ignore[arg-type]
        raise Untraceable(
            f"is beside {method}, which calls super() of its own class: in a derived class that is itself"
        )
    if isinstance(owner, torch.jit.ScriptModule):
        raise Untraceable("is TorchScript")
    if isinstance(owner, fx.GraphModule):
        raise Untraceable("belongs to a torch.fx.GraphModule, which regenerates it by itself")
    if not isinstance(forward, types.FunctionType):
        raise Untraceable("is not a plain Python function")
    parameters = parameters_of(forward)
    optional = [p.name for p in parameters if p.default is None]
    always = {p.name for p in parameters[:1]} & {*optional}
    found = [always, *({*always, name} for name in optional), {*optional}]
    return list(dict.fromkeys(map(frozenset, found)))


def trace(owner: nn.Module, training: bool, given: Container[str] = ()) -> Trace:
    """Record `owner.forward` as it runs in training or evaluation mode, with tensors for the parameters `given`.

    Other parameters that have a default keep it. Nothing of the model changes, nor does any random state.

    Raises:
        Untraceable: with the reason.
    """
    whole: dict[str, str] = {}
    variable: tuple[type, ...] = _NUMBERS
    while True:
        try:
            return _record(owner, training, given, whole, variable)
        except Untraceable as reason:
            method = _failed_method(owner, reason)
            if method is not None and method not in whole:
                whole[method] = str(reason)
            elif variable and any(type(p.default) in variable for p in parameters_of(forward_of(type(owner)))):
                variable = ()  # a number that says how often, or whether
            else:
                raise


def _record(
    owner: nn.Module, training: bool, given: Container[str], whole: dict[str, str], variable: tuple[type, ...]
) -> Trace:
    """One attempt, in which the methods `whole` stay calls, and defaults of the types `variable` stay parameters."""
    forward: Any = forward_of(type(owner))
    parameters = parameters_of(forward)
    scan = Scan(type(owner), forward, whole)
    failed: Untraceable | None = None
    used = {"numpy"}  # whose functions do not show who calls them
    with beside.alone(), beside.compiled_calls_wait(), torch.enable_grad(), held.random_state(used) as drew:
        tracer = _OwnerTracer(owner, parameters, given, variable, scan.tested_attributes)
        recorder = Recorder(owner, training, tracer, whole, scan)
        try:
            with recorder, honest(tracer) as answers:
                tracer.watch = Watch(recorder, answers, inspect.unwrap(forward).__code__, used)
                graph = _run(tracer, owner)
                recorder.look_back(graph)
            recorder.look_again()
        except Untraceable as reason:
            failed = reason
            forget_frames(reason)
        finally:
            changed = recorder.keeper.restore(scan.stores)
            kept = take_back(tracer.made_up())
        if failed is not None:
            raise failed
        if changed or kept:
            raise Untraceable(f"changes {changed}" if changed else f"keeps what it computes in {kept}")
        if drew():  # a number drawn while recording would be the same for ever
            raise Untraceable("draws random numbers")
    if not tracer.watch.observer.saw_all:
        scan.note_any_test()
    tested = {p.name for p in parameters if (p.name in scan.tested or ANY in scan.tested) and p.name not in given}
    return Trace(
        graph=graph,
        parameters=parameters,
        fixed=frozenset(tracer.fixed),
        attributes=tuple(recorder.attributes),
        tested=frozenset(tested),
        whole=tuple(whole.items()),
        surroundings=(*answers.items(), *recorder.surroundings.items()),
        namespaces=recorder.namespaces,
        tests_values=scan.tests_values,
        booleans=frozenset(scan.booleans),
        definitions=defined(scan, recorder.helpers),
        functions=tuple(scan.functions),
        methods=tuple((name, f) for name, f in scan.methods.items() if name not in owner.__dict__),
        tested_attributes=frozenset(scan.tested_attributes),
        relations=(*recorder.relations, *aliases(owner, graph, (path for path, _, _ in recorder.attributes))),
    )


def _failed_method(owner: nn.Module, reason: Untraceable) -> str | None:
    """The method of `owner` that its `forward` called and that could not be recorded, where it may stay a call.

    It runs as it is, when it would. So it may do what it likes, but for changing attributes that `forward` asks for.
    """
    name = getattr(reason, "method", None) or _method_in(owner, reason.__cause__ or reason)
    function = inspect.getattr_static(type(owner), name or "", None)
    if name is None or hasattr(nn.Module, name) or not isinstance(function, types.FunctionType):
        return None
    codes = [inspect.unwrap(function).__code__]
    for code in codes:
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
    assigns = any(i.opname in ("STORE_ATTR", "DELETE_ATTR") for code in codes for i in dis.get_instructions(code))
    return None if assigns else name


def _method_in(owner: nn.Module, error: BaseException) -> str | None:
    """The name of what `forward` itself had called where `error` was raised, by way of a decorator or not."""
    forward = inspect.unwrap(forward_of(type(owner))).__code__
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    at = next((i for i, frame in enumerate(frames) if frame.f_code is forward), len(frames))
    for called in frames[at + 1 :]:
        function = inspect.getattr_static(type(owner), called.f_code.co_name, None)
        if isinstance(function, types.FunctionType) and inspect.unwrap(function).__code__ is called.f_code:
            return called.f_code.co_name
        if is_of_users(called.f_code.co_filename):
            return None
    return None


def _run(tracer: _OwnerTracer, owner: nn.Module) -> fx.Graph:
    """The recording; where one raises, another with the last decision the other way."""
    raised: list[Raised] = []
    while True:
        try:
            return _attempt(tracer, owner)
        except Raised as reason:
            forget_frames(reason)
            raised.append(reason)
        if len(raised) == _ATTEMPTS or not tracer.turn_last_decision():
            raise raised[0]


def _attempt(tracer: _OwnerTracer, owner: nn.Module) -> fx.Graph:
    raised: list[Untraceable] = []
    Untraceable.raised = raised
    try:
        graph = beside.trace(tracer, owner)
        if raised:  # `forward` has caught it
            raise raised[-1]
        return graph
    except Untraceable:
        raise
    except fx.proxy.TraceError as error:
        raise Untraceable(f"decides by the data ({error})") from error
    except Exception as error:
        raise Raised(f"cannot be traced ({in_a_line(error)})") from error
    finally:
        Untraceable.raised = None
        raised.clear()  # whose frames have the model


class _OwnerTracer(fx.Tracer):
    """Every child is a leaf; parameters and buffers go by name; no tensor becomes a constant."""

    proxy_buffer_attributes = True

    def __init__(
        self,
        root: nn.Module,
        parameters: tuple[inspect.Parameter, ...],
        given: Container[str],
        variable: tuple[type, ...],
        compared: Container[str],
    ) -> None:
        super().__init__()
        self.compared = compared  # attributes
        self.parameters, self.given, self.variable = parameters, given, variable
        self.thread = threading.get_ident()
        self.made: dict[int, nn.Module] = {}  # by `forward` itself
        self.called: list[nn.Module] = []  # children, in this attempt
        self.names: dict[int, str] = {}  # of tensors
        self.proxies: dict[str, fx.Proxy] = {}  # of those, in this attempt
        self.watch: Watch
        self.recorder: Any  # who notes what is read
        self.stand_ins: list[weakref.ref[fx.Proxy]] = []
        self.fixed: set[str] = set()
        # How the first decisions are to fall, and whether both ways were tried; and how those of this attempt fell.
        self.planned: list[tuple[bool, bool]] = []
        self.taken: list[bool] = []
        self.grad_mode = (torch.is_grad_enabled(), torch.is_inference_mode_enabled())

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return True

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A module of PyTorch that `forward` makes, as in `nn.MSELoss()(y, target)`, is written out."""
        if threading.get_ident() != self.thread:  # which runs a model meanwhile
            return forward(*args, **kwargs)
        if any(isinstance(a, (list, dict, set)) and not a for a in (*args, *kwargs.values())):
            raise Untraceable("hands a child an empty container, which the child may fill")
        if m not in (self.submodule_paths or {}):
            self._refuse_other(m)
            return forward(*args, **kwargs)
        self.recorder.hand_over(self.recorder.effects_of(m)[0], (*args, *kwargs.values()))
        self.called.append(m)
        return super().call_module(m, forward, args, kwargs)

    def _refuse_other(self, m: nn.Module) -> None:
        """Of other modules those of PyTorch's run that `forward` has made, and that hold no tensors of their own."""
        name = type(m).__name__
        if id(m) not in self.made:
            raise Untraceable(f"calls a {name} that is none of its own modules")
        if not type(m).__module__.startswith("torch.nn.modules.") or not is_untouched(m):
            raise Untraceable(f"makes a module, a {name}, and calls it")
        if any(tensor is not None for held in (m._parameters, m._buffers) for tensor in held.values()):
            raise Untraceable(f"makes a {name} with parameters or buffers of its own, and calls it")

    def proxy(self, node: fx.Node) -> fx.Proxy:
        found = StandIn(node, self)
        self.stand_ins.append(weakref.ref(found))
        return found

    def made_up(self) -> list[weakref.ref[fx.Proxy]]:
        """The stand-ins of this recording, which the tracer lets go of."""
        self.proxies = {}
        return self.stand_ins

    def named(self, value: Any) -> Any:
        """What stands for a parameter or buffer of the owner, or for a tensor that is an attribute; else `value`."""
        name = self.names.get(id(value))
        if name is None:
            return value
        if name not in self.proxies:
            self.proxies[name] = self.create_proxy("get_attr", name, (), {})
        return self.proxies[name]

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, Any]) -> Any:
        return self.named(attr_val) if threading.get_ident() == self.thread else attr_val

    def create_args_for_root(self, root_fn: Any, is_module: bool, concrete_args: Any = None) -> tuple[Any, list[Any]]:
        root_fn = forward_of(type(self.root))
        self.taken, self.called, self.proxies = [], [], {}
        held = (*self.root.named_buffers(), *self.root.named_parameters())
        self.names = {id(t): name for t, name in self.tensor_attrs.items()} | {id(t): name for name, t in held}
        positional: list[Any] = [self.root]
        keywords: dict[str, Any] = {}
        for p in self.parameters:
            value: Any
            if is_mapping(p, self.parameters):
                root_fn = by_position(root_fn)
                positional.append(self.create_proxy("placeholder", p.name, (), {}))
                positional[-1].node.meta[MAPPING] = True
            elif is_input(p, self.parameters):
                given = self.create_proxy("placeholder", p.name, (), {})
                positional.append(self.create_proxy("call_function", operator.getitem, (given, 0), {}))
            if p.kind in VARIADIC:
                continue
            if p.name in self.given or p.default is p.empty or type(p.default) in self.variable:
                value = self.create_proxy("placeholder", p.name, (), {})
                if p.name in self.given:
                    value.node.meta["tensor"] = True
                elif p.default is not p.empty:
                    value.node.meta[guards.NUMBER] = True
            else:
                self.fixed.add(p.name)
                value = p.default
            if p.kind is p.KEYWORD_ONLY:
                keywords[p.name] = value
            else:
                positional.append(value)

        def watched(*args: Any) -> Any:
            with self.watch:
                found = root_fn(*args, **keywords)
            return self.recorder.returned(found)

        return watched, positional

    def create_proxy(self, *args: Any, **kwargs: Any) -> fx.Proxy:
        with self.watch.paused():
            return super().create_proxy(*args, **kwargs)

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        if (torch.is_grad_enabled(), torch.is_inference_mode_enabled()) != self.grad_mode:
            raise Untraceable("switches gradients on or off")
        return super().create_node(*args, **kwargs)

    def to_bool(self, obj: fx.Proxy) -> bool:
        """A decision by the shape of an input falls as for an imagined one (`guards`), or as planned."""
        index = len(self.taken)
        try:
            outcome, first = guards.decide(
                self.root, obj.node, self.planned[index][0] if index < len(self.planned) else None
            )
        except guards.NotByShape as reason:
            raise Untraceable(str(reason) or "decides by the data") from None
        if first:
            self.taken.append(outcome)
        return outcome

    def iter(self, obj: fx.Proxy) -> Iterator[fx.Proxy]:
        """`*x.shape[:-1]` has the sizes of a matrix, on the condition that it is one."""
        found = guards.iterated(obj.node)
        if found is None:
            raise Untraceable("decides by the data (iterates over a value)")
        call = functools.partial(self.create_proxy, "call_function", kwargs={})
        shape = self.proxy(found[0])
        rank = call(guards.LENGTH, (shape,))
        if not self.to_bool(call(operator.eq, (rank, guards.RANK))):
            raise Raised("iterates over a shape")
        return iter([call(operator.getitem, (shape, i)) for i in found[1]])

    def turn_last_decision(self) -> bool:
        """Plan the last decision the other way in the next attempt; whether there is one left to turn."""
        tried = [both for _, both in self.planned] + [False] * len(self.taken)
        self.planned = [(outcome, tried[i]) for i, outcome in enumerate(self.taken)]
        while self.planned and self.planned[-1][1]:
            self.planned.pop()
        if not self.planned:
            return False
        self.planned[-1] = (not self.planned[-1][0], True)
        return True

    def create_arg(self, a: Any) -> Any:
        if isinstance(a, Tensor) and not self._has_a_name(a):
            raise Untraceable("makes a tensor of its own")
        if type(a).__module__ == "numpy" and not isinstance(a, float):  # which is a Python number too
            raise Untraceable(f"uses a {type(a).__name__} of numpy; float() or int() of it can be recorded")
        if type(a) is torch.Size:  # torch.fx has a tuple for it
            return self.create_proxy("call_function", torch.Size, ([*a],), {}).node
        plain = type(a) in _PLAIN_CONTAINERS or hasattr(a, "_fields")
        if not plain and (isinstance(a, (dict, list, tuple)) or _is_dataclass(a)):
            return self._made_again(a)
        return super().create_arg(a)

    def _made_again(self, a: Any) -> Any:
        """The call that makes a container of a class of its own, such as a ModelOutput of transformers."""
        args: tuple[Any, ...] = (dict(a),) if type(a) is collections.OrderedDict else ()
        values = {f.name: getattr(a, f.name) for f in dataclasses.fields(a) if f.init} if _is_dataclass(a) else {}
        if not (args or values) or isinstance(a, (list, tuple)) or not _same(type(a)(*args, **values), a):
            raise Untraceable(f"makes a {type(a).__name__}, which a recording would take for a plain container")
        return self.create_proxy("call_function", type(a), args, values).node

    def _has_a_name(self, tensor: Tensor) -> bool:
        named = (*self.root.parameters(), *self.root.buffers(), *getattr(self, "tensor_attrs", ()))
        return any(tensor is known for known in named)


def _is_dataclass(value: Any) -> bool:
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _same(made: Any, wanted: Any) -> bool:
    """The two hold the very same values, as attributes and as items, in the same order."""
    pairs = [[*getattr(a, "__dict__", {}).items()] for a in (made, wanted)]
    for found, a in zip(pairs, (made, wanted), strict=True):
        found += [(f.name, getattr(a, f.name)) for f in dataclasses.fields(a)] if _is_dataclass(a) else []
        found += a.items() if isinstance(a, dict) else []
    names, values = ([[pair[i] for pair in found] for found in pairs] for i in (0, 1))
    return names[0] == names[1] and all(map(operator.is_, *values))


_PLAIN_CONTAINERS = (dict, list, tuple)
