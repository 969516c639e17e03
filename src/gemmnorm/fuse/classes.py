"""`fuse` and `unfuse`: the owner of a chain gets another `forward`, and loses it again.

That `forward` is the recorded one (`tracing`) with each chain (`matching`) replaced by one call (`chain.ChainCall`), as
`analysis` has written it down. It lies on the instance, in a `Fusion`. The instance's class becomes a subclass that
looks there, of the same name, and the same for all instances of the original class. (A `forward` on the instance alone
would run the original's tensors in shallow copies and DataParallel's replicas, and PyTorch 2.4 compiles an
`nn.Sequential` without it.) Children, parameters, buffers and hooks stay where they are; the calls look the children up
by name each time.

Whatever changes later, the fused model computes what the original would: a `ChainCall` looks at the children at each
call and runs them one by one where they are no longer plain; and where the owner's own structure changed, or `forward`
is called in a way that was not recorded, the original `forward` runs.
"""

from __future__ import annotations

import contextlib
import copyreg
import functools
import inspect
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch
from torch import nn

from ..chain import ChainCall
from ..errors import GemmNormRuntimeError, GemmNormWarning
from . import places
from .analysis import OwnerPlan, analyse, check_is_module, plan_of
from .beside import one_at_a_time
from .comparing import KEPT
from .structure import forward_of, original_class
from .tracing import is_replaced
from .unchanged import check_of, function_of
from .writing import forwarded, signature

M = TypeVar("M", bound=nn.Module)
Filter = Callable[[nn.Module, str], bool]
_KEY = "_gemmnorm"
_LEAVES = torch.__version__ < "2.5"  # Dynamo does not look into modules whose class is PyTorch's own
_classes: weakref.WeakValueDictionary[type[nn.Module], type[nn.Module]] = weakref.WeakValueDictionary()


def fuse(model: M, filter_fn: Filter | None = None) -> M:
    """Replace the chains of `model` by fused calls, in place, and return `model`.

    `state_dict`, class names, `isinstance`, optimizers, hooks on containers, `deepcopy`, pickling and conversion to
    SyncBatchNorm keep working. `fuse_report(model)` says what was fused and what was not, and why; `unfuse(model)`
    undoes it. Fusing a fused model looks at it afresh.

    Args:
        model: changed in place.
        filter_fn: called with the Linear of each chain and its qualified name; the chain is fused where it returns
            True. `fuse_report(model, filter_fn)` says what would be done. None fuses every chain.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.

    Examples:
        >>> wide = lambda linear, name: name.startswith("projector.") and linear.out_features >= 1024
        >>> model = gemmnorm.fuse(model, wide)
    """
    owners = analyse(model)
    left_out = [_left_out(model, plan, filter_fn) for plan in owners]  # before anything changes: it may raise
    unfuse(model)
    for plan, linears in zip(owners, left_out, strict=True):
        _fuse_owner(model, plan, linears)
    return model


def fuse_owners(model: nn.Module, owners: Iterable[OwnerPlan]) -> None:
    """`fuse` for a model that has been analysed: it, or the one that it is a copy of."""
    for plan in owners:
        _fuse_owner(model, plan, ())


def _left_out(model: nn.Module, plan: OwnerPlan, filter_fn: Filter | None) -> tuple[str, ...]:
    owner = model.get_submodule(plan.path)
    return tuple(c.linear for c in plan.chains if filter_fn and not chosen(owner, plan, c.linear, filter_fn))


def _fuse_owner(model: nn.Module, plan: OwnerPlan, left_out: tuple[str, ...]) -> None:
    if len(left_out) < len(plan.chains):
        _install_where_it_can_be(model.get_submodule(plan.path), plan, left_out)


def _install_where_it_can_be(owner: nn.Module, plan: OwnerPlan, left_out: tuple[str, ...]) -> None:
    """Its metaclass may not want a subclass of the same name, or Python not give one to the instance."""
    try:
        _install(owner, Fusion(plan, left_out))
    except Exception as error:
        name = plan.original.__name__
        text = f"{name} is not fused: a class derived of it raises {type(error).__name__}: {error}"
        warnings.warn(text, GemmNormWarning, stacklevel=4)


def chosen(owner: nn.Module, plan: OwnerPlan, linear: str, filter_fn: Filter) -> bool:
    """What `filter_fn` says to the Linear that `owner` calls `linear`."""
    return bool(filter_fn(owner.get_submodule(linear), f"{plan.path}.{linear}" if plan.path else linear))


def unfuse(model: M) -> M:
    """Give every module of `model` back what it was before `fuse`, and return `model`.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.

    Examples:
        >>> model = gemmnorm.unfuse(gemmnorm.fuse(model))
    """
    check_is_module(model)
    for module in model.modules():
        _uninstall(module)
    return model


@contextlib.contextmanager
def fused_for_now(model: nn.Module, owners: Iterable[OwnerPlan]) -> Iterator[None]:
    """`model`, fused inside where nothing of it is fused outside."""
    if any(map(fusion_of, model.modules())):
        yield
        return
    fuse_owners(model, owners)
    try:
        yield
    finally:
        unfuse(model)


# --- what is put on an owner -----------------------------------------------------------------------------------------


class Fusion:
    """The fused `forward` of one owner.

    Attributes:
        plan: what it was written from; None in a pickle, which finds the chains again when it is loaded.
        left_out: the Linears of the chains that `fuse` was told to leave alone.
        calls: one for each chain of the plan.
        forward: (owner, *arguments) → what the owner returns.
        is_as_recorded: owner → whether `forward` still does what the owner's own does; may raise where it does not.
    """

    def __init__(self, plan: OwnerPlan | None, left_out: tuple[str, ...] = ()) -> None:
        self.plan = plan
        self.left_out = left_out
        self.calls: list[ChainCall] = []
        if plan is not None:
            self.calls = [ChainCall(c.linear not in left_out, c.scale is not None) for c in plan.chains]
            self.forward = _forward(plan)
            self.is_as_recorded = check_of(plan)

    def holds_for(self, owner: nn.Module) -> bool:
        """Nothing changed that the recorded `forward` takes for granted."""
        try:
            return self.is_as_recorded(owner)
        except Exception:  # what it looks at is gone
            return False

    def original(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The `forward` that the owner's author wrote."""
        for call in self.calls:
            call.note("the owner's children or arguments are not those that were recorded")
        return forward_of(type(owner))(owner, *args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Fusion:
        return Fusion(self.plan, self.left_out)

    def __reduce__(self) -> tuple[Any, ...]:
        return Fusion, (None, self.left_out)


Fusion.__module__ = __package__ or Fusion.__module__  # what pickles name it by, so that this file may move


def fusion_of(module: nn.Module) -> Fusion | None:
    """What `fuse` has put on `module`."""
    found: Fusion | None = module.__dict__.get(_KEY)
    return found


def _install(owner: nn.Module, fusion: Fusion) -> None:
    _drop_idle_forward(owner)
    if not hasattr(owner, "_gemmnorm_fused"):
        owner.__class__ = _fused_class(type(owner))
    owner.__dict__[_KEY] = fusion


def _uninstall(module: nn.Module) -> None:
    module.__dict__.pop(_KEY, None)
    original = original_class(module)
    if original is not type(module):
        _drop_idle_forward(module)
        # What wraps `forward` on the instance, as accelerate does, holds on to the class's: that runs the original now.
        if "forward" not in module.__dict__:
            module.__class__ = original


def _drop_idle_forward(module: nn.Module) -> None:
    """Take a `forward` from the instance that is its class's, such as accelerate leaves when it unwraps a model."""
    if not is_replaced(module):
        module.__dict__.pop("forward", None)


def _forward(plan: OwnerPlan) -> Callable[..., Any]:
    """The function that `plan` describes; equal owners share one, and with it what torch.compile made of it."""
    calls = {chain: f"self.{_KEY}.calls[{i}]" for i, chain in enumerate(plan.chains)}
    original = f"self.{_KEY}.original(self{', ' if plan.forwarded else ''}{{}})"
    source = plan.forward_source(lambda chain: calls[chain], f"not self.{_KEY}.is_as_recorded(self)", original)
    source = places.looked_up(source, plan.places, f"return {original.format(plan.forwarded)}")
    # The recorded names belong to the function, so they are part of what makes two of them equal.
    # Those of kept containers say what is in there.
    names = ((name, 0 if name.startswith(KEPT) else id(value)) for name, value in plan.namespace.items())
    return function_of("forward", source, plan.namespace, plan.original, names, "fused")  # type: ignore[no-any-return]


# --- the class -------------------------------------------------------------------------------------------------------


class Fused:
    """First base of the classes that `fuse` makes; the second is the original."""

    def __init_subclass__(cls, **_: Any) -> None:
        """A class that keeps a list of its subclasses is not to hear of this one."""


class _Bare:
    __slots__ = ()


def _bases(original: type[nn.Module]) -> tuple[type, ...]:
    """Python gives an instance another class where both get their `__dict__` behind the same base.

    A class gets its own where a base without one stands before `nn.Module`, as ABC or Generic: there `Fused` is one
    that is derived of that base, which does not hear of it either where it becomes its base afterwards.
    """
    layout: Any = original
    while layout.__base__.__dictoffset__:
        layout = layout.__base__
    if layout.__base__ is object:
        return (Fused, original)
    first = type("Fused", (_Bare,), {"__init_subclass__": vars(Fused)["__init_subclass__"]})
    try:
        first.__bases__ = (layout.__base__,)
    except TypeError:  # that base has more than no `__dict__`
        return (original,)
    return (first, original)


def _prepare_scriptable(self: Any) -> Any:
    """`torch.jit.script` asks for what it is to read; the fused `forward` is not TorchScript."""
    raise GemmNormRuntimeError(
        "torch.jit.script: expected modules whose source is TorchScript; got a fused one. Script"
        " gemmnorm.unfuse(model), or take torch.jit.trace or torch.export, which see the plain operations"
    )


def _reduce(self: Any, protocol: Any) -> Any:
    """As the original class plus "fuse this": the class that `fuse` made cannot be imported."""
    found = super(self._gemmnorm_fused, self).__reduce_ex__(max(int(protocol), 2))
    original = original_class(self)
    if original is type(self) or not isinstance(found, tuple) or found[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
        return found  # a class derived later, or an original that has a way of its own
    if _KEY not in self.__dict__:
        return (copyreg.__newobj__, (original,), *found[2:])  # type: ignore[attr-defined]
    return (restore, (original,), *found[2:])


def _set_state(self: Any, state: dict[str, Any]) -> None:
    super(self._gemmnorm_fused, self).__setstate__(state)
    fusion = fusion_of(self)
    if fusion is None or fusion.plan is None:  # out of a pickle
        plan = plan_of(self)
        left_out = () if fusion is None else fusion.left_out
        if any(chain.linear not in left_out for chain in plan.chains):
            _install(self, Fusion(plan, left_out))
        else:
            _uninstall(self)


_METHODS = {"__prepare_scriptable__": _prepare_scriptable, "__reduce_ex__": _reduce, "__setstate__": _set_state}


def restore(original: type[nn.Module]) -> nn.Module:
    """An empty module of class `original` that is fused as soon as its state has been set."""
    cls = _fused_class(original)
    module: nn.Module = cls.__new__(cls)
    return module


restore.__module__ = __package__ or restore.__module__  # as above


@one_at_a_time
def _fused_class(original: type[nn.Module]) -> type[nn.Module]:
    """The subclass of `original` that `fuse` gives to its instances."""
    found, written = _classes.get(original), forward_of(original)
    if found is not None and vars(found)["_gemmnorm_written"] is written:
        return found

    described = ("__module__", "__qualname__", "__doc__", "__firstlineno__")  # 3.13 finds the source by the last
    body = {name: vars(original)[name] for name in described if name in vars(original)}
    if _LEAVES and original.__module__.startswith("torch."):
        body["__module__"] = __package__
    body |= {"forward": _forward_or(written), "_gemmnorm_original": original, "_gemmnorm_written": written, **_METHODS}
    _classes[original] = found = types.new_class(original.__name__, _bases(original), {}, lambda ns: ns.update(body))
    found._gemmnorm_fused = found  # type: ignore[attr-defined] # tells it from classes derived of it, to Dynamo too
    return found


def _forward_or(written: Callable[..., Any]) -> Callable[..., Any]:
    """The fused `forward` where the instance has one, else `written`. Its parameters go by name, as torch.fx wants."""
    found = inspect.signature(written)
    parameters = list(found.parameters.values())[1:]
    optional = [p for p in parameters if p.default is not p.empty]
    arguments = f"(self, {forwarded(parameters)})"
    source = (
        f"def forward(self{signature(p.replace(default=None) if p in optional else p for p in parameters)}):\n"
        f"    if getattr(self, {_KEY!r}, None) is None:\n"
        f"        return self._gemmnorm_original.forward{arguments}\n"
        f"    return self.{_KEY}.forward{arguments}\n"
    )
    namespace: dict[str, Any] = {}
    exec(compile(source, f"<gemmnorm: {written.__qualname__} or fused>", "exec"), namespace)
    forward: Any = namespace["forward"]
    forward.__defaults__ = tuple(p.default for p in optional if p.kind is not p.KEYWORD_ONLY) or None
    forward.__kwdefaults__ = {p.name: p.default for p in optional if p.kind is p.KEYWORD_ONLY} or None
    of_torch = _LEAVES and str(written.__module__).startswith("torch.")
    functools.update_wrapper(forward, written, ("__qualname__", "__doc__", *([] if of_torch else ["__module__"])))
    del forward.__wrapped__  # whoever unwraps what is around a `forward` would go on to the original
    with contextlib.suppress(Exception):  # a name in a string that is not there
        forward.__annotations__ = inspect.get_annotations(written, eval_str=True)
    forward.__signature__ = found
    return forward  # type: ignore[no-any-return]
