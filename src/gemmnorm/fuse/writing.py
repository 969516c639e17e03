"""A recorded `forward`, written out as Python that a person would have written.

The text is what runs in a fused model and what an exported file shows, so there is one of it. Intermediate values take
over the name of the value that they use up (`x = self.drop(x)`), which also frees them where hand-written code would;
cheap expressions used once stand where they are used.
"""

from __future__ import annotations

import builtins
import enum
import inspect
import keyword
import math
import operator
import re
import sys
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from .comparing import HOLDS, UNLIKE, literal
from .guards import UNPACKED
from .lines import wrapped
from .matching import Found, resolve
from .outside import import_line, known_as
from .scanning import Untraceable, is_bound
from .values import Method
from .views import AS, does_nothing

_STARS: dict[Any, str] = {inspect.Parameter.VAR_POSITIONAL: "*", inspect.Parameter.VAR_KEYWORD: "**"}
_PRODUCT = "product"  # what a chain's product is called where it is laid out anew
_MODULES = {"F": F, "torch": torch, "operator": operator, "math": math}
_REFERRED = {*_MODULES, "os", "logging"}
_ALWAYS = {
    "torch",
    "Exception",
    "slice",
    "super",
    "getattr",
    "hasattr",
    "isinstance",
    HOLDS,
    UNLIKE,
    "numpy",
}  # what no parameter may be called
_RESERVED = {*_REFERRED, *_ALWAYS, _PRODUCT, "float", "len", "type"}  # nor any variable: the text refers to these
_BINARY = {
    operator.add: "+", operator.sub: "-", operator.mul: "*", operator.truediv: "/", operator.floordiv: "//",
    operator.mod: "%", operator.pow: "**", operator.matmul: "@", operator.and_: "&", operator.or_: "|",
    operator.xor: "^", operator.lshift: "<<", operator.rshift: ">>", operator.eq: "==", operator.ne: "!=",
    operator.lt: "<", operator.le: "<=", operator.gt: ">", operator.ge: ">=",
}  # fmt: skip
_IN_PLACE = {
    operator.iadd: "+=", operator.isub: "-=", operator.imul: "*=", operator.itruediv: "/=", operator.ifloordiv: "//=",
    operator.imod: "%=", operator.ipow: "**=", operator.imatmul: "@=", operator.iand: "&=", operator.ior: "|=",
    operator.ixor: "^=",
}  # fmt: skip
_UNARY = {operator.neg: "-", operator.pos: "+", operator.invert: "~"}
_PURE_METHODS = {"size", "dim", "numel", "ndimension"}
_ATOM = re.compile(r"[\w.]+(\[[^\[\]]*\]|\([^()]*\))*")
_NESTED = 20  # expressions inside of each other, at most: more would be hard to read, and Python allows 200


class Writer:
    """Writes the body of one recorded `forward`, each chain as one call.

    Attributes:
        namespace: what the text refers to besides `self`, by name.
        imports: the import lines that provide it.
        variables: what it assigns to, and what the bodies do that were written before.
    """

    def __init__(
        self,
        owner: nn.Module,
        graph: fx.Graph,
        chains: Iterable[tuple[str, Found]],
        namespace: Mapping[str, object],
        variables: Iterable[str],
    ) -> None:
        """`chains` are (the name to call, the chain); `namespace` and `variables` are those of other bodies."""
        self.owner = owner
        self.namespace = dict(namespace)
        self.variables = set(variables)
        self.imports: list[str] = []
        self.chain_at = {found.bn: (name, found) for name, found in chains}
        self.products = {found.product: found for _, found in self.chain_at.values()}
        self.viewing: Found | None = None  # the chain whose views are being written
        hidden = {node: found for _, found in self.chain_at.values() for node in found.nodes}
        self.result = {found.bn: found.result for _, found in self.chain_at.values()}
        self.order = [
            node for node in graph.nodes
            if node.op not in ("placeholder", "get_attr") and (node not in hidden or node in self.chain_at)
        ]  # fmt: skip
        self.unpacked = {nodes[0]: nodes for nodes in _unpacked(self.order)}
        self.order = [n for n in self.order if n in self.unpacked or not any(n in v for v in self.unpacked.values())]
        self.users = self._count_users()
        self.names: dict[fx.Node, str] = {n: str(n.target) for n in graph.nodes if n.op == "placeholder"}
        self.inlined = self._choose_inlined()
        for node in self.order:  # imports first, so that no variable takes a function's name
            if node.op == "call_function" and not _is_syntax(node) and not isinstance(node.target, Method):
                self._callable(node.target)

    def body(self) -> list[str]:
        """The statements, without indentation."""
        statements = [node for node in self.order if node not in self.inlined]
        last_use: dict[fx.Node, fx.Node] = {}
        for statement in statements:
            for used in self._variables(statement):
                last_use[used] = statement
        lines: list[str] = []
        for i, statement in enumerate(statements):
            text = self._expression(statement)
            if statement.op == "output":
                lines += wrapped("return ", text)
                continue
            result = self.result.get(statement, statement)
            live = [n for n, last in last_use.items() if n in self.names and statements.index(last) > i]
            used = self._variables(statement)  # type: ignore[assignment]
            dying = [v for v in used if last_use[v] is statement]  # type: ignore[attr-defined]
            if statement.target is operator.setitem:
                receiver, index, value = statement.args
                lines.append(f"{self._atom(receiver)}[{self._subscript(index)}] = {self._argument(value)}")
                continue
            if _is_in_place(statement) and statement.args[0] in dying:
                target, value = (self._argument(a) for a in statement.args)
                lines.append(f"{target} {_IN_PLACE[statement.target]} {value}")
                self.names[result] = target
                continue
            if statement in self.unpacked:
                lines.append(f"{self._unpacking(statement, live, last_use)} = {self._argument(statement.args[0])}")
                continue
            if result not in last_use:
                lines += wrapped("", text)
                continue
            first = used[0] if used and used[0] in dying else None  # type: ignore[index]
            self.names[result] = self.names[first] if first is not None else self._new_name(result, live)
            lines += wrapped(f"{self.names[result]} = ", text)
        return lines

    # --- which values get a name -------------------------------------------------------------------------------------

    def _inputs(self, node: fx.Node) -> list[fx.Node]:
        """The nodes whose values a statement needs, in the order in which they are written."""
        if node not in self.chain_at:  # who asks for a product's shape is told by the chain's input
            return [self.products[n].input if n in self.products else n for n in node.all_input_nodes]
        found = self.chain_at[node][1]
        inside = [n for view in found.views for n in view.all_input_nodes if n not in found.nodes]
        return [found.input, *inside]

    def _count_users(self) -> dict[fx.Node, list[fx.Node]]:
        users: dict[fx.Node, list[fx.Node]] = {}
        for node in self.order:
            for used in self._inputs(node):
                users.setdefault(used, []).append(node)
        return users

    def _choose_inlined(self) -> set[fx.Node]:
        """Pure expressions with one user and nothing but such expressions in between."""
        inlined: set[fx.Node] = set()
        depth: dict[fx.Node, int] = {}  # of an inlined expression, inside of others
        position = {node: i for i, node in enumerate(self.order)}
        for i in reversed(range(len(self.order))):
            node = self.order[i]
            result = self.result.get(node, node)
            users = self.users.get(result, [])
            if (
                node in self.unpacked
                or len(users) != 1
                or (users[0] not in self.chain_at and _occurrences(users[0], result) != 1)
            ):
                continue
            returned = (
                (users[0].op == "output" or users[0] in self.unpacked)
                and i + 1 == position[users[0]]
                and not _is_in_place(node)
            )
            between = self.order[i + 1 : position[users[0]]]
            inside = depth.get(users[0], 0) + 1
            if inside <= _NESTED and (_is_pure(node) or returned) and all(n in inlined for n in between):
                inlined.add(node)
                depth[node] = inside
        return inlined

    def _variables(self, statement: fx.Node) -> list[fx.Node]:
        """The named values that a statement reads, inlined expressions included."""
        found: list[fx.Node] = []
        for node in self._inputs(statement):
            source = next((bn for bn, result in self.result.items() if result is node), node)
            if node.op == "get_attr":
                continue
            found += self._variables(source) if source in self.inlined else [node]
        return list(dict.fromkeys(found))

    def _unpacking(self, head: fx.Node, live: Sequence[fx.Node], used: Container[fx.Node]) -> str:
        """`a, b`: the names of the values that are unpacked, of which `head` is the first."""
        named: list[fx.Node] = []
        for node in self.unpacked[head]:
            if node in used:
                self.names[node] = self._new_name(node, [*live, *named], node.meta[UNPACKED][2])
                named.append(node)
        names = [self.names[node] if node in used else "_" for node in self.unpacked[head]]
        return ", ".join(names) + "," * (len(names) == 1)

    def _new_name(self, node: fx.Node, live: Iterable[fx.Node], base: str = "") -> str:
        """A name after the function or child that makes the value, not that of a value which is still needed."""
        in_chain = node in self.result.values()
        last = str(node.target).rpartition(".")[2] if node.op == "call_module" else re.sub(r"_\d+$", "", node.name)
        base = base or ("h" if in_chain or not last.isidentifier() else last.strip("_") or "h")
        taken = {*(self.names[n] for n in live), *self.namespace, *_RESERVED, "self", "nn"}
        name, n = base, 1
        while name in taken or keyword.iskeyword(name) or hasattr(builtins, name):
            n += 1
            name = f"{base}_{n}"
        self.variables.add(name)
        return name

    # --- expressions -------------------------------------------------------------------------------------------------

    def _expression(self, node: fx.Node) -> str:
        if node in self.chain_at:
            return self._fused_call(*self.chain_at[node])
        if node.op == "output":
            return self._argument(node.args[0])
        if node.op == "call_module":
            return f"{self.path(str(node.target))}({self._arguments(node.args, node.kwargs)})"
        if node.op == "call_method":
            receiver, *rest = node.args
            like = rest[0] if rest and node.target in AS else None
            if isinstance(like, fx.Node) and like in self.products:
                return f"{self._atom(receiver)}.{AS[str(node.target)]}({self._sizes(self.products[like])})"
            return f"{self._atom(receiver)}.{node.target}({self._arguments(rest, node.kwargs)})"
        return self._function(node)

    def _fused_call(self, name: str, found: Found) -> str:
        chain = found.chain
        arguments = [self._argument(found.input), self.path(chain.linear), self.path(chain.bn)]
        if chain.scale is not None:
            scale = self.path(chain.scale) if isinstance(chain.scale, str) else self._argument(chain.scale)
            arguments.append(f"scale={scale}")
        if chain.activation_module is not None:
            arguments.append(f"activation={self.path(chain.activation_module)}")
        elif chain.activation is not None:
            arguments.append(f'activation="{chain.activation}"')
        self.viewing = found
        view = self._argument(found.bn.all_input_nodes[0])
        self.viewing = None
        if view != _PRODUCT:
            arguments.append(f"view=lambda {_PRODUCT}: {view}")
        if not chain.pointwise and chain.ranks != (2,):
            arguments.append(f"ranks={chain.ranks}")
        if chain.any_strides:
            arguments.append("any_strides=True")
        return f"{name}({', '.join(arguments)})"

    def _viewed(self, node: fx.Node, found: Found) -> str:
        """A value between the product and the BatchNorm of `found`, inside of the function that lays it out anew."""
        if node is found.product:
            return _PRODUCT
        if node in found.views and not does_nothing(self.owner, node):
            return self._expression(node)
        return self._argument(next(n for n in node.all_input_nodes if n in found.nodes))

    def _like_product(self, found: Found) -> str:
        """A tensor of the product's shape, without memory, for those who only ask for the shape."""
        return f"{self._argument(found.input)}.new_empty(()).expand({self._sizes(found)})"

    def _sizes(self, found: Found) -> str:
        """Those of the product, as arguments."""
        x, features = self._argument(found.input), found.chain.out_features
        return f"{x}.shape[0], {features}, *{x}.shape[2:]" if found.chain.pointwise else f"*{x}.shape[:-1], {features}"

    def _function(self, node: fx.Node) -> str:
        target, args = node.target, node.args
        if target in _BINARY and len(args) == 2:  # where a number of numpy's is one of Python's
            args = tuple(float(a) if isinstance(a, float) else a for a in args)
            return f"{self._atom(args[0])} {_BINARY[target]} {self._atom(args[1])}"
        if target in _UNARY and len(args) == 1:
            return f"{_UNARY[target]}{self._atom(args[0])}"
        if target is operator.getitem:
            return f"{self._atom(args[0])}[{self._subscript(args[1])}]"
        if target is getattr and isinstance(args[1], str) and args[1].isidentifier():
            return f"{self._atom(args[0])}.{args[1]}"
        if isinstance(target, Method):
            return f"{self.path(target.path)}.{target.name}({self._arguments(args, node.kwargs)})"
        kwargs = _without_defaults(target, dict(node.kwargs))
        return f"{self._callable(target)}({self._arguments(args, kwargs)})"

    def _arguments(self, args: Iterable[Any], kwargs: dict[str, Any]) -> str:
        return ", ".join([*map(self._argument, args), *(f"{k}={self._argument(v)}" for k, v in kwargs.items())])

    def _atom(self, value: Any) -> str:
        text = self._argument(value)
        return text if _ATOM.fullmatch(text) else f"({text})"

    def _subscript(self, value: Any) -> str:
        if isinstance(value, tuple) and value:
            return ", ".join(map(self._subscript, value)) + ("," if len(value) == 1 else "")
        if isinstance(value, slice):
            parts = ["" if p is None else self._argument(p) for p in (value.start, value.stop, value.step)]
            return ":".join(parts if value.step is not None else parts[:2])
        return self._argument(value)

    def _argument(self, value: Any) -> str:
        if isinstance(value, fx.Node):
            if value.op == "get_attr":
                return self.path(str(value.target))
            if self.viewing is not None and value in self.viewing.nodes:
                return self._viewed(value, self.viewing)
            if value in self.products:
                return self._like_product(self.products[value])
            source = next((bn for bn, result in self.result.items() if result is value), value)
            return self._expression(source) if source in self.inlined else self.names[value]
        if value is ...:
            return "..."
        if isinstance(value, str) and type(value) is str:
            return _quoted(value)
        if value is None or type(value) in (bool, int, float):
            return literal(value)
        if isinstance(value, float) and type(value).__module__ == "numpy":
            self._import("numpy", sys.modules["numpy"], "import numpy")
            return f"numpy.{type(value).__name__}({literal(float(value))})"
        if isinstance(value, tuple) and hasattr(value, "_fields"):
            return f"{self._callable(type(value))}({self._arguments(value, {})})"
        if isinstance(value, tuple):
            return f"({', '.join(map(self._argument, value))}{',' * (len(value) == 1)})"
        if isinstance(value, list):
            return f"[{', '.join(map(self._argument, value))}]"
        if isinstance(value, dict):
            return "{" + ", ".join(f"{self._argument(k)}: {self._argument(v)}" for k, v in value.items()) + "}"
        if isinstance(value, slice):
            return f"slice({', '.join(map(self._argument, (value.start, value.stop, value.step)))})"
        if isinstance(value, (torch.dtype, torch.memory_format, torch.layout)):
            self._import("torch", torch, "import torch")
            return str(value)
        if isinstance(value, torch.device):
            self._import("torch", torch, "import torch")
            return f'torch.device("{value}")'
        if isinstance(value, enum.Enum) and type(value).__members__.get(value.name) is value:
            name = known_as(type(value))
            self._import(name, type(value), import_line(name, type(value)))
            return f"{name}[{value.name!r}]"
        raise Untraceable(f"uses a {type(value).__name__} that cannot be written down")

    def _callable(self, target: Any) -> str:
        """The name of a function, importing it if need be."""
        if is_bound(target):  # of a class, such as the `apply` of a torch.autograd.Function
            return f"{self._callable(target.__self__)}.{target.__name__}"
        name = getattr(target, "__name__", "")
        for prefix, module in _MODULES.items():
            if name and getattr(module, name, None) is target:
                alias = " as F" if module is F else ""
                self._import(prefix, module, f"import {module.__name__}{alias}")
                return f"{prefix}.{name}"
        if getattr(builtins, name, None) is target:
            return name
        home = getattr(target, "__module__", None)
        if not name.isidentifier():
            raise Untraceable(f"calls {target!r}, which has no name")
        taken = {*self.names.values(), *self.variables}
        while self.namespace.get(name, target) is not target or hasattr(builtins, name) or name in taken:
            name += "_"
        alias = f" as {name}" if name != target.__name__ else ""  # type: ignore[attr-defined]
        self._import(name, target, f"from {home} import {target.__name__}{alias}")  # type: ignore[attr-defined]
        return name

    def _import(self, name: str, value: object, line: str) -> None:
        self.namespace[name] = value
        if line not in self.imports:
            self.imports.append(line)

    def path(self, path: str) -> str:
        """`self.gemm`, `self.layers[0].bn`, `self["key"]`: a dotted path below the owner as an expression."""
        return path_expression(self.owner, path)


def check_parameters(names: Iterable[str], lines: Iterable[str]) -> None:
    """Raise `Untraceable` where a parameter hides a function or a module that `lines` refer to by the same name."""
    text = "\n".join(lines)
    for name in names:
        word = re.escape(name)
        builtin = rf"(?<![\w.]){word}\(|\bis not {word}\b|\blambda {word}:"
        if name in _ALWAYS or re.search(rf"(?<![\w.]){word}\." if name in _REFERRED else builtin, text):
            raise Untraceable(f"has a parameter called {name}")


def path_expression(owner: nn.Module, path: str) -> str:
    """A dotted path below `owner` ("" for itself) as an expression in `self`."""
    text, module = "self", owner
    for name in path.split(".") if path else ():
        indexed = isinstance(module, (nn.Sequential, nn.ModuleList)) and name in module._modules
        if indexed and list(module._modules) == [str(i) for i in range(len(module._modules))]:
            text += f"[{name}]"
        elif isinstance(module, nn.ModuleDict) and name in module._modules:
            text += f"[{_quoted(name)}]"
        elif name.isidentifier() and not keyword.iskeyword(name):
            text += f".{name}"
        else:
            text = f"getattr({text}, {_quoted(name)})"
        module = resolve(module, name)
    return text


def _quoted(text: str) -> str:
    return repr(text) if any(c in text for c in "\"'\\") else f'"{repr(text)[1:-1]}"'


def signature(parameters: Iterable[inspect.Parameter]) -> str:
    """`x, mask=None, *, flag=False`: what stands behind `self` in the def."""
    parts: list[str] = []
    for p in parameters:
        if p.kind is p.KEYWORD_ONLY and not any(part[0] == "*" for part in parts):
            parts.append("*")
        parts.append(_STARS.get(p.kind, "") + (p.name if p.default is p.empty else f"{p.name}={literal(p.default)}"))
        if p.kind is p.POSITIONAL_ONLY:
            parts[:] = [*(part for part in parts if part != "/"), "/"]
    return "".join(f", {part}" for part in parts)


def forwarded(parameters: Sequence[inspect.Parameter]) -> str:
    """`x, mask, flag=flag`: the same parameters as arguments."""
    named = (f"{p.name}=" if p.kind is p.KEYWORD_ONLY else _STARS.get(p.kind, "") for p in parameters)
    return ", ".join(prefix + p.name for prefix, p in zip(named, parameters, strict=True))


def _unpacked(order: Iterable[fx.Node]) -> Iterator[list[fx.Node]]:
    """The values that one statement unpacks, as long as all of them are there: how many there are is to be checked."""
    found: list[fx.Node] = []
    for node in order:
        index, count, _ = node.meta.get(UNPACKED, (None, 0, ""))
        found = [*(found if index else []), node]
        if index == count - 1 == len(found) - 1:
            yield found


def _is_in_place(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target in _IN_PLACE


def _is_syntax(node: fx.Node) -> bool:
    """An operator, subscript or attribute, which has no function to call."""
    return (
        node.target in (getattr, operator.getitem, operator.setitem) or node.target in _BINARY or node.target in _UNARY
    )


def _is_pure(node: fx.Node) -> bool:
    if node.op == "call_method":
        return node.target in _PURE_METHODS
    return node.op == "call_function" and _is_syntax(node) and node.target is not operator.setitem


def _occurrences(user: fx.Node, node: fx.Node) -> int:
    count = 0

    def visit(argument: fx.Node) -> fx.Node:
        nonlocal count
        count += argument is node
        return argument

    fx.node.map_arg((user.args, user.kwargs), visit)
    return count


def _without_defaults(target: Any, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Without the keyword arguments that only repeat the function's defaults, as torch.fx records them.

    `training` stays, so that both modes' texts have it and differ in its value only (`merge_modes`).
    """
    try:
        defaults = {p.name: p.default for p in inspect.signature(target).parameters.values()}
    except (TypeError, ValueError):
        return kwargs
    return {k: v for k, v in kwargs.items() if k == "training" or k not in defaults or v is not defaults[k]}
