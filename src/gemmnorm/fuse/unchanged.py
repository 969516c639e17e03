"""The check that a recorded `forward` still holds, as a function that is written for one plan.

It runs at every call of a fused model. As code of its own it asks no table what to compare, and Dynamo guards what it
reads of the owner, not what it compares that with.
"""

from __future__ import annotations

import hashlib
import linecache
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from ..runtime.traced import traced_as_constant
from .beside import one_at_a_time
from .structure import counts_as, is_as_assumed

if TYPE_CHECKING:
    from .analysis import OwnerPlan

_functions: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()
_INDENT = "    "


@one_at_a_time
def function_of(name: str, source: str, names: Mapping[str, Any], cls: type, key: Iterable[Any], described: str) -> Any:
    """The function `name` in `source`, a text about `cls` that refers to `names`.

    Equal ones are one function, and with it what `torch.compile` made of it. `key`: what makes them equal besides.
    """
    whole = (cls, source, *key)
    found = _functions.get(whole)
    if found is None:
        digest = hashlib.sha256(repr((source, cls)).encode()).hexdigest()[:12]
        filename = f"<gemmnorm: {cls.__name__} {described}, {digest}>"
        namespace = dict(names)  # without __name__: torch.compile would look the names up in that module
        exec(compile(source, filename, "exec"), namespace)
        _functions[whole] = found = namespace.pop(name)
        linecache.cache[filename] = (len(source), None, source.splitlines(True), filename)  # for tracebacks
        weakref.finalize(found, linecache.cache.pop, filename, None)
    return found


def check_of(plan: OwnerPlan) -> Callable[[nn.Module], bool]:
    """owner → whether all that `plan` takes for granted is still so. What is gone may raise.

    The owner's children go by the names that they had, functions are what they were, a Linear did not become a
    convolution, and what does not run as a module (`plan.assumed`) is as it was.
    """
    text = _Text()
    functions = [c for function, (code, *held) in plan.written for c in text.is_as_written(function, code, *held)]
    conditions = [
        *text.names("self._modules", plan.structure),
        *(f"{text.attribute(holder, name)} is {text.called(f, name)}" for holder, name, f in plan.definitions),
        *(c for name, f in plan.methods for c in text.is_method(name, f)),
        *text.kinds(plan),
        *(f"is_as_assumed(self, {text.called(assumed, 'assumed')})" for assumed in plan.assumed),
    ]
    source = (
        f"def is_as_written():\n{_INDENT}return {_all(functions)}\n"
        "is_as_written = traced_as_constant(is_as_written)\n"  # what reloads modules exchanges byte code
        f"def is_as_recorded(self):\n{_INDENT}return {_all(['is_as_written()', *conditions])}\n"
    )
    names = text.referred | {"counts_as": counts_as, "is_as_assumed": is_as_assumed, "nn": nn}
    names["traced_as_constant"] = traced_as_constant
    key = ((name, value if name.startswith("assumed") else id(value)) for name, value in text.referred.items())
    return function_of("is_as_recorded", source, names, plan.original, key, "as recorded")  # type: ignore[no-any-return]


def _all(conditions: list[str]) -> str:
    joined = f"\n{_INDENT * 2}and ".join(conditions)
    return f"(\n{_INDENT * 2}{joined}\n{_INDENT})" if conditions else "True"


class _Text:
    """Conditions, and what they refer to by name."""

    def __init__(self) -> None:
        self.referred: dict[str, Any] = {}
        self.known: dict[int, str] = {}

    def called(self, value: Any, name: str) -> str:
        """What the text calls `value`; `name` says something about it."""
        if id(value) not in self.known:
            readable = name if name.isidentifier() else "held"
            self.known[id(value)] = f"{readable}_{len(self.known)}"
            self.referred[self.known[id(value)]] = value
        return self.known[id(value)]

    def attribute(self, holder: Any, name: str) -> str:
        return f"{self.called(holder, str(getattr(holder, '__name__', 'holder')))}.{name}"

    def names(self, held: str, structure: tuple[Any, ...]) -> Iterator[str]:
        """As `child_names` has them, of the children in the dictionary `held`."""
        names = [name if isinstance(name, str) else name[0] for name in structure]
        yield f"[name for name, child in {held}.items() if child is not None] == {names!r}"
        for name in structure:
            if not isinstance(name, str):
                inner = f"{held}[{name[0]!r}]"
                yield f"isinstance({inner}, (nn.ModuleList, nn.ModuleDict))"
                yield from self.names(f"{inner}._modules", name[1])

    def is_as_written(
        self, function: types.FunctionType, code: types.CodeType, defaults: Any, named: tuple[Any, ...]
    ) -> Iterator[str]:
        """Byte code and defaults, as `structure.written` has them."""
        name = self.called(function, function.__name__)
        yield f"{name}.__code__ is {self.called(code, 'code')}"
        yield f"{name}.__defaults__ is {self.called(defaults, 'defaults') if defaults is not None else None}"
        keys, values = named[: len(named) // 2], named[len(named) // 2 :]
        yield f"list({name}.__kwdefaults__ or ()) == {[*keys]!r}" if keys else f"not {name}.__kwdefaults__"
        for key, value in zip(keys, values, strict=True):
            yield f"{name}.__kwdefaults__[{key!r}] is {self.called(value, key)}"

    def is_method(self, name: str, function: Any) -> Iterator[str]:
        """Of the owner's class, and the instance has none."""
        yield f"{name!r} not in self.__dict__"
        yield f"type(self).{name} is {self.called(function, name)}"

    def kinds(self, plan: OwnerPlan) -> Iterator[str]:
        """Products and norms are of their classes, or of others that count as the same."""
        # Where something runs between, a Linear that runs by itself is to do so at its own place.
        others = () if any(assumed.runs for assumed in plan.assumed) else (None,)
        for path, cls, kind in plan.kinds:
            module = "self" + "".join(f"._modules[{name!r}]" for name in path)
            allowed = self.kinds_of((kind, nn.SyncBatchNorm, *others))
            name = self.called(cls, cls.__name__)
            yield f"(type({module}) is {name} or counts_as({module}, {allowed}))"

    def kinds_of(self, kinds: tuple[Any, ...]) -> str:
        named = ("None" if kind is None else self.called(kind, kind.__name__) for kind in kinds)
        return f"({', '.join(named)})"
