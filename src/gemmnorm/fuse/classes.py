"""`fuse(model)`: every `Linear → (× scale) → BatchNorm1d (→ activation)` of a model as one fused call, in place.

A chain belongs to the module whose `forward` writes it. That *owner* gets a generated subclass of its own class, whose
`forward` is the recorded one (`tracing`) with each chain (`matching`) replaced by one call (`source`). Children,
parameters, buffers and hooks stay where they are; the call looks the children up by name each time.

Whatever changes later, the fused model computes what the original would: `fused_linear_scale_batch_norm` looks at the
children at each call and runs them one by one where they are no longer plain; and where the owner's own structure
changed, or `forward` is called in a way that was not recorded, the original `forward` runs.
"""

from __future__ import annotations

import copy
import copyreg
import hashlib
import linecache
import weakref
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from .. import activations
from ..errors import GemmNormTypeError
from ..functional import linear_scale_batch_norm
from ..module import tensors_of
from .analysis import OwnerPlan, analyse, child_names, original_class, plan_of
from .matching import Chain, Refusal, is_plain_tensor, is_untouched

__all__ = [
    "Chain", "FuseReport", "Match", "OwnerPlan", "Refusal", "analyse", "fuse", "fuse_report", "unfuse",
]  # fmt: skip

M = TypeVar("M", bound=nn.Module)
_CALL = "fused_linear_scale_batch_norm"
_classes: weakref.WeakValueDictionary[tuple[Any, ...], type[nn.Module]] = weakref.WeakValueDictionary()


def fuse(model: M) -> M:
    """Replace the chains of `model` by fused calls, in place, and return `model`.

    `state_dict`, `isinstance`, optimizers, hooks on containers, `deepcopy`, pickling and conversion to SyncBatchNorm
    keep working. `fuse_report(model)` says what was fused and what was not, and why; `unfuse(model)` undoes it.
    Fusing a fused model looks at it afresh.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.
    """
    unfuse(model)
    for plan in analyse(model):
        if plan.chains:
            owner = model.get_submodule(plan.path)
            owner.__class__ = _fused_class(plan)
    return model


def unfuse(model: M) -> M:
    """Give every module of `model` the class back that it had before `fuse`, and return `model`."""
    if not isinstance(model, nn.Module):
        raise GemmNormTypeError(f"model: expected an nn.Module; got {type(model).__name__}")
    for module in model.modules():
        if "_gemmnorm_original" in type(module).__dict__:
            module.__class__ = original_class(module)
    return model


# --- the report ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Match:
    """One chain that can run fused. `fused` says whether it does. Names are below `owner` ("" is the model itself)."""

    owner: str
    linear: str
    scale: str | None
    bn: str
    activation: str | None
    in_features: int
    out_features: int
    fused: bool

    def __str__(self) -> str:
        prefix = f"{self.owner}." if self.owner else ""
        steps = [prefix + self.linear, f"× {self.scale}" if self.scale else "", prefix + self.bn, self.activation or ""]
        return f"{' → '.join(filter(None, steps))}  ({self.in_features} → {self.out_features})"


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` finds in a model as it stands: every chain, and every near miss with the reason.

    Attributes:
        matches: the chains.
        refusals: what looks like a chain, or may hold one, and is left alone.
        linears, batch_norms: how many nn.Linear and nn.BatchNorm1d the model has.
    """

    matches: tuple[Match, ...]
    refusals: tuple[Refusal, ...]
    linears: int = field(default=0)
    batch_norms: int = field(default=0)

    def __str__(self) -> str:
        lines = []
        if self.matches:
            fused = sum(match.fused for match in self.matches)
            count = len(self.matches)
            state = "fused" if fused == count else "not fused yet" if not fused else f"{fused} of them fused"
            lines.append(f"{count} chain{'s' * (count > 1)}, {state}:")
            lines += [f"  {match}" for match in self.matches]
            lines += ["left alone:"] * bool(self.refusals)
        else:
            lines.append(f"no Linear → BatchNorm1d chain: {self._why_none()}")
        return "\n".join([*lines, *(f"  {refusal}" for refusal in self.refusals)])

    def _why_none(self) -> str:
        if self.refusals:
            return "every candidate is refused"
        if not self.linears or not self.batch_norms:
            missing = [n for n, c in (("nn.Linear", self.linears), ("nn.BatchNorm1d", self.batch_norms)) if not c]
            return f"the model has no {' and no '.join(missing)}"
        return f"of {self.linears} nn.Linear none feeds one of the {self.batch_norms} nn.BatchNorm1d"


def fuse_report(model: nn.Module) -> FuseReport:
    """What `fuse` finds in `model` as it stands now. For a model that is not fused yet: what `fuse` would do."""
    if not isinstance(model, nn.Module):
        raise GemmNormTypeError(f"model: expected an nn.Module; got {type(model).__name__}")
    matches: list[Match] = []
    refusals: list[Refusal] = []
    for plan in analyse(model):
        current = getattr(type(model.get_submodule(plan.path)), "_gemmnorm_plan", None)
        for chain in plan.chains:
            scale = chain.scale if chain.scale is None else str(chain.scale)
            fused = current is not None and chain in current.chains
            size = (chain.in_features, chain.out_features)
            matches.append(Match(plan.path, chain.linear, scale, chain.bn, chain.activation, *size, fused))
        refusals += plan.refusals
    modules = list(model.modules())
    linears = sum(isinstance(m, nn.Linear) for m in modules)
    norms = sum(isinstance(m, (nn.BatchNorm1d, nn.SyncBatchNorm, nn.LazyBatchNorm1d)) for m in modules)
    return FuseReport(tuple(matches), tuple(refusals), linears, norms)


# --- the generated class ---------------------------------------------------------------------------------------------


def _fused_class(plan: OwnerPlan) -> type[nn.Module]:
    """The subclass that `plan` describes; equal owners share one, and with it what torch.compile made of it."""
    source = plan.class_source(f"Fused{plan.original.__name__}", _CALL, guard="not has_recorded_structure(self)")
    # The recorded names belong to the class, so they are part of what makes two classes equal.
    key = (plan.original, source, plan.structure, tuple((n, id(v)) for n, v in plan.namespace.items()), plan.chains)
    found = _classes.get(key)
    if found is not None:
        return found
    namespace: dict[str, Any] = {  # without __name__: torch.compile would look the names up in that module instead
        **plan.namespace,
        plan.original.__name__: plan.original,
        _CALL: fused_linear_scale_batch_norm,
        "has_recorded_structure": has_recorded_structure,
    }
    digest = hashlib.sha256(repr((source, plan.original)).encode()).hexdigest()[:12]
    filename = f"<gemmnorm: {plan.original.__name__} fused, {digest}>"
    linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
    exec(compile(source, filename, "exec"), namespace)
    cls: type[nn.Module] = namespace[f"Fused{plan.original.__name__}"]
    cls.__module__ = plan.original.__module__
    cls._gemmnorm_original = plan.original  # type: ignore[attr-defined]
    cls._gemmnorm_plan = plan  # type: ignore[attr-defined]
    cls._gemmnorm_structure = plan.structure  # type: ignore[attr-defined, assignment]
    _make_copyable(cls)
    _classes[key] = cls
    return cls


def has_recorded_structure(owner: nn.Module) -> bool:
    """The owner's children still go by the names that they had when its `forward` was recorded."""
    return child_names(owner) == owner._gemmnorm_structure  # type: ignore[no-any-return]


def _make_copyable(cls: type[nn.Module]) -> None:
    """Pickled as the original class plus "fuse this", as the generated class cannot be imported; copied as it is."""

    def reduce(self: nn.Module, protocol: Any) -> Any:
        found = super(cls, self).__reduce_ex__(max(int(protocol), 2))
        if not isinstance(found, tuple) or found[0] is not copyreg.__newobj__:  # type: ignore[attr-defined]
            return found  # the original has a way of its own
        return (_restore, (original_class(self),), *found[2:])

    def deepcopy(self: nn.Module, memo: dict[int, Any]) -> nn.Module:
        new: nn.Module = self.__class__.__new__(self.__class__)
        memo[id(self)] = new
        state = super(cls, self).__reduce_ex__(2)[2]
        new.__setstate__(copy.deepcopy(state, memo))
        return new

    cls.__reduce_ex__ = reduce  # type: ignore[method-assign, assignment]
    if not hasattr(cls, "__deepcopy__"):
        cls.__deepcopy__ = deepcopy  # type: ignore[attr-defined]


def _restore(original: type[nn.Module]) -> nn.Module:
    """An empty module of class `original` that is fused as soon as its state has been set."""

    def set_state(self: nn.Module, state: dict[str, Any]) -> None:
        self.__class__ = original
        self.__setstate__(state)
        plan = plan_of(self)
        if plan.chains:
            self.__class__ = _fused_class(plan)

    arriving: Any = type(original)(original.__name__, (original,), {"__setstate__": set_state})  # type: ignore[misc]
    module: nn.Module = arriving.__new__(arriving)
    return module


# --- the call --------------------------------------------------------------------------------------------------------

# Activation classes that are one function whatever their attributes: found without asking each row of the table.
_NAME_OF = {row.module: row.name for row in activations.TABLE if not row.parameters and not row.matches}
_global_hooks = getattr(nn.modules.module, "_has_any_global_hook", lambda: False)
_transforms = getattr(torch._C._functorch, "peek_interpreter_stack", lambda: None)
_exporting = getattr(torch.compiler, "is_exporting", lambda: False)


def fused_linear_scale_batch_norm(
    x: Tensor,
    linear: nn.Linear,
    bn: nn.BatchNorm1d,
    *,
    scale: Tensor | float | None = None,
    activation: nn.Module | str | None = None,
) -> Tensor:
    """activation(bn(linear(x) * scale)) in one operation, with the modules' own parameters and buffers.

    Runs the modules one after the other where one operation would not do what they do:

    - a module's class changed (converted to SyncBatchNorm, parametrized, wrapped by an adapter), or it has hooks;
    - a tensor is of a subclass, the dtypes are mixed, the sizes no longer fit, or x has not two dimensions;
    - somebody looks at the single operations: a global hook, `torch.func`, forward-mode differentiation, an export.
    """
    child = activation if isinstance(activation, nn.Module) else None
    name = _name_of(activation) if isinstance(activation, nn.Module) else activation
    if _can_fuse(x, linear, bn, scale):
        training = bn.training
        weight, bias, running_mean, running_var, counter, bn_weight, bn_bias = tensors_of(linear, bn)
        if not (training and bn.track_running_stats):
            counter = None
            if training:  # as in nn.BatchNorm1d: the running statistics are left out of it
                running_mean = running_var = None
        if (running_mean is None) == (running_var is None):
            y: Tensor = linear_scale_batch_norm(
                x, weight, bias, scale, running_mean, running_var, bn_weight, bn_bias,
                num_batches_tracked=counter, training=training or running_mean is None,
                momentum=bn.momentum, eps=bn.eps, activation=name,
            )  # fmt: skip
            return y if child is None or name is not None else child(y)  # type: ignore[no-any-return]
    y = linear(x)
    y = bn(y if scale is None else y * scale)
    return activations.forward(y, name) if child is None else child(y)  # type: ignore[no-any-return]


def _name_of(activation: nn.Module) -> str | None:
    if not is_untouched(activation):
        return None
    return _NAME_OF.get(type(activation)) or activations.from_module(activation)


def _can_fuse(x: Tensor, linear: nn.Linear, bn: nn.BatchNorm1d, scale: Tensor | float | None) -> bool:
    if type(linear) is not nn.Linear or type(bn) is not nn.BatchNorm1d:
        return False
    if not (is_untouched(linear) and is_untouched(bn)) or _is_watched():
        return False
    weight = linear.weight
    if not (is_plain_tensor(x) and is_plain_tensor(weight) and x.dim() == 2 and weight.shape[0] == bn.num_features):
        return False
    if weight.dtype != x.dtype and not torch.is_autocast_enabled(x.device.type):
        return False
    if not isinstance(scale, Tensor):
        return True
    features = bn.num_features
    return is_plain_tensor(scale) and tuple(scale.shape) in ((features,), (1, features), (1,), ())


def _is_watched() -> bool:
    """Somebody wants to see the single operations."""
    if torch.compiler.is_compiling():
        return bool(_exporting())  # what is exported holds PyTorch's own operations and runs without this package
    in_transform = _transforms() is not None or torch.autograd.forward_ad._current_level >= 0
    return in_transform or bool(_global_hooks()) or torch.jit.is_tracing()  # type: ignore[attr-defined]
