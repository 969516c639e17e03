"""What the modules below an owner are like, where its recorded `forward` takes that for granted."""

from __future__ import annotations

import contextlib
import functools
import operator
import types
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor, fx, nn

from .. import children
from ..module import LinearScaleBatchNorm1d
from .comparing import Absent, Compared, Length, OfClass, Render, Same, differs, literal
from .outside import attribute_of, known_as, namespace_of, path_of
from .scanning import Scan, Untraceable
from .values import PLAIN, is_known

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "==": operator.eq, "!=": operator.ne, "is": operator.is_, "is not": operator.is_not,
    "in": lambda a, b: a in b, "not in": lambda a, b: a not in b,
}  # fmt: skip
if TYPE_CHECKING:
    from .giving import Asked
    from .matching import Chain


class Assumed(NamedTuple):
    """A descendant that does not run as a module: its path, class, attributes with their values, children's names.

    One that does (`runs`) stands between the two ends of a chain, and is of a class that leaves both alone.
    """

    path: str
    cls: type[nn.Module]
    attributes: tuple[tuple[str, Any], ...]
    structure: tuple[Any, ...]
    runs: bool = False


def original_class(module: nn.Module) -> type[nn.Module]:
    """The class of `module` before `fuse`; its own where that class was derived from later."""
    cls = type(module)
    original: type[nn.Module] = getattr(cls, "_gemmnorm_original", cls)
    return original if getattr(cls, "_gemmnorm_fused", None) is cls else cls


def child_names(owner: nn.Module) -> tuple[Any, ...]:
    """Names of the children that are not None, those inside of lists and dictionaries of modules included."""
    return tuple([  # at every call: a list is faster than a generator
        (name, child_names(child)) if isinstance(child, (nn.ModuleList, nn.ModuleDict)) else name
        for name, child in owner._modules.items()
        if child is not None
    ])  # fmt: skip


def written(function: types.FunctionType) -> tuple[Any, ...]:
    """What a function consists of, to be compared by identity."""
    named = function.__kwdefaults__ or {}
    return function.__code__, function.__defaults__, (*named, *named.values())


def is_as_assumed(owner: nn.Module, assumed: Assumed) -> bool:
    """What is assumed about a descendant of `owner` is so."""
    path, cls, attributes, inner, runs = assumed
    module: Any = below(owner, path)
    if type(module) is not cls and (module is None or original_class(module) is not cls):
        return False
    if not runs and not (
        children.is_untouched(module)
        and module.training == owner.training
        and ((not inner and not module._modules) or child_names(module) == inner)
    ):
        return False
    return not attributes or all(getattr(module, name) == value for name, value in attributes)


def below(owner: nn.Module, path: str) -> nn.Module | None:
    """The descendant at `path`, None where there is none."""
    module: nn.Module | None = owner
    for name in path.split("."):
        if module is None:
            break
        module = module._modules.get(name)
    return module


def kind_of(module: nn.Module) -> type[nn.Module] | None:
    """The class of `torch.nn` that a product or a norm counts as; None where it has become something else."""
    return children.norm_class(module) if children.is_batch_norm(module) else children.product_class(module)


def counts_as(module: nn.Module | None, allowed: tuple[type[nn.Module] | None, ...]) -> bool:
    """A product or a norm of another class than was recorded still computes the same."""
    return module is not None and kind_of(module) in allowed


def kinds(owner: nn.Module, chains: Iterable[Chain]) -> Iterator[tuple[tuple[str, ...], type, type | None]]:
    """(path as names, class, what it counts as) of the modules whose products and norms `chains` compute."""
    for path in (path for chain in chains for path in (chain.linear, chain.bn)):
        module = owner.get_submodule(path)
        yield tuple(path.split(".")), type(module), kind_of(module)


def forwards(owner: nn.Module, paths: Iterable[str]) -> Iterator[tuple[Any, str, Any]]:
    """(class, "forward", the function) of descendants that do not run as modules."""
    for path in paths:
        cls = original_class(owner.get_submodule(path))
        yield cls, "forward", cls.forward


def is_in_a_list(owner: nn.Module, path: str) -> bool:
    """The children of the descendant at `path` are among what `child_names` has of the owner."""
    above = path.split(".") if path else []
    modules = [owner.get_submodule(".".join(above[: i + 1])) for i in range(len(above))]
    return all(isinstance(m, (nn.ModuleList, nn.ModuleDict)) for m in modules)


def defined(scan: Scan, helpers: Iterable[tuple[Any, str, Any]]) -> tuple[tuple[Any, str, Any], ...]:
    """(module or class, name, function) of the functions that were read and are found there by that name."""
    found = [(as_written(scan.owner), "forward", forward_of(scan.owner)), *helpers]
    for holder, name in scan.globals:
        if isinstance(holder, dict) and "-packages" not in str(holder.get("__file__")):
            function = holder.get(name)
            if isinstance(function, types.FunctionType) and function in scan.functions:
                found.append((namespace_of(holder)[1], name, function))
    return tuple(dict.fromkeys(found))


def forward_of(cls: type[nn.Module]) -> Any:
    """The `forward` that the owner's author wrote, also of a class that `fuse` made; None for TorchScript's."""
    return getattr(as_written(cls), "forward", None)


def as_written(cls: type[nn.Module]) -> Any:
    """`cls`, or the one that `fuse` has made it or its base of."""
    return getattr(cls, "_gemmnorm_original", cls)


def as_asked(
    owner: nn.Module, asked: Asked, render: Render
) -> tuple[list[str], dict[str, Any], list[tuple[Any, str, Any]]]:
    """Expressions, one of which is true where a module that was `asked` may do otherwise; what they refer to; and the
    functions, as `forwards` has them, that have to be found in the classes.

    Raises:
        Untraceable: one is no descendant, so that nobody can say where another may come to be.
    """
    paths = {id(module): path for path, module in owner.named_modules()}
    found: list[str] = []
    namespace: dict[str, Any] = {}
    functions: list[tuple[Any, str, Any]] = []
    for key, module in asked.modules.items():
        if key not in paths:
            raise Untraceable(f"asks what a {type(module).__name__} gives that is none of its own modules")
        text, cls = render(paths[key]), original_class(module)
        if module is not owner:
            # A BatchNorm may have become a SyncBatchNorm.
            synchronised = f" and {text}.__class__ is not torch.nn.SyncBatchNorm" * children.is_batch_norm(module)
            found.append(differs(text, OfClass(cls), render) + synchronised)
            namespace[known_as(cls)] = cls
        if isinstance(module, (nn.Sequential, nn.ModuleList, nn.ModuleDict)):
            found.append(differs(text, Length(len(module)), render))
        for name in sorted(asked.names[key]):
            held = vars(module).get(name)
            if held is not None:
                found.append(f"{text}.{name} is not {literal(held)}")
                namespace |= {known_as(held): held} if path_of(held) is None else {}
                continue
            found.append(f"{name!r} in {text}.__dict__")
            if isinstance(getattr(cls, name, None), types.FunctionType):
                functions.append((cls, name, getattr(cls, name)))
    return found, namespace, functions


def assume(owner: nn.Module, path: str) -> Assumed:
    """What is taken for granted about a descendant that does not run as a module."""
    module = owner.get_submodule(path)
    names = {nn.Flatten: ("start_dim", "end_dim"), nn.Dropout: ("p",)}.get(type(module), ())
    attributes = tuple((name, getattr(module, name)) for name in names)
    return Assumed(path, original_class(module), attributes, child_names(module))


def assume_between(owner: nn.Module, path: str) -> Assumed:
    """What is taken for granted about one that runs between a product and its BatchNorm."""
    module = owner.get_submodule(path)
    attributes = tuple((name, held) for name, held in vars(module).items() if name == "inplace")
    return Assumed(path, original_class(module), attributes, (), runs=True)


def aliases(owner: nn.Module, graph: fx.Graph, read: Iterable[str]) -> list[tuple[str, Same]]:
    """(path, another path to the same) of the modules and tensors that a recording names, or reads attributes of.

    They are recorded under one name, whichever `forward` uses.
    """
    used = {str(node.target) for node in graph.nodes if node.op in ("call_module", "get_attr")} | {*read}
    found: dict[int, list[str]] = {}
    for path, value in _everything(owner, "", ()):
        found.setdefault(id(value), []).append(path)
    groups = [paths for paths in found.values() if len(paths) > 1 and used & {*paths}]
    return [(paths[0], Same(other)) for paths in groups for other in paths[1:]]


def _everything(module: nn.Module, prefix: str, above: tuple[int, ...]) -> Iterator[tuple[str, Any]]:
    """(path, module or tensor) below `module`, each under all its paths."""
    held: dict[str, Any] = {**module._parameters, **module._buffers}
    held |= {name: value for name, value in vars(module).items() if isinstance(value, Tensor)}
    yield from ((prefix + name, tensor) for name, tensor in held.items() if tensor is not None)
    for name, child in module._modules.items():
        if child is not None and id(child) not in above:
            yield prefix + name, child
            yield from _everything(child, f"{prefix}{name}.", (*above, id(child)))


def compared_attributes(
    owner: nn.Module, found: Iterable[tuple[tuple[str, ...], str, tuple[str, ...]]]
) -> Iterator[Compared]:
    """How attributes of `owner` compare that its code compares; of plain ones it is known what they are."""
    for names, sign, others in found:
        left: Any = functools.reduce(_held_as, names, owner)
        right: Any = functools.reduce(_held_as, others, owner)
        plain = is_known(left) and is_known(right) and (type(left) in PLAIN or sign[:2] != "is")
        if plain or left is Absent or right is Absent:
            continue
        with contextlib.suppress(Exception):  # where it is asked it raises too
            answer = _COMPARISONS[sign](left, right)
            if isinstance(answer, bool):
                yield Compared(names, sign, "", others, answer)


def _held_as(value: Any, name: str) -> Any:
    """What `value.name` is, without asking a module by `getattr`, which is recorded."""
    if not isinstance(value, nn.Module):
        return attribute_of(value, name)
    with contextlib.suppress(AttributeError):
        return object.__getattribute__(value, name)
    places: tuple[Any, ...] = (value._parameters, value._buffers, value._modules)
    return next((held[name] for held in places if name in held), Absent)


def is_owner(module: nn.Module) -> bool:
    """Has a `forward` of its own that may hold a chain: a user's module, or an `nn.Sequential`."""
    forward = forward_of(type(module))
    if isinstance(module, LinearScaleBatchNorm1d) or forward in (None, nn.Module.forward):
        return False
    return forward is nn.Sequential.forward or not str(getattr(forward, "__module__", "")).startswith("torch.nn.")
