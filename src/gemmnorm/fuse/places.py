"""The modules that a fused `forward` names, each looked up once for a call.

`self.convs[0].nn` takes PyTorch 3 µs, by a function of Python for each step, and a `forward` may name it many times.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator, Mapping

from torch import nn

Names = tuple[str, ...]
_INDENT = "    "
_NAMED = (ast.Name, ast.arg)


def found(owner: nn.Module, source: str) -> dict[str, Names]:
    """Expression → names of the steps down from `owner`: of the modules that `source` names, and of those on the way.

    Only where each step is PyTorch's own look-up of a child, so that `_modules` holds what it gives.
    """
    places: dict[str, Names] = {}

    def below(node: ast.expr) -> tuple[Names, nn.Module] | None:
        if isinstance(node, ast.Name):
            return ((), owner) if node.id == "self" else None
        step = _step(node)
        above = below(step[0]) if step is not None else None
        if step is None or above is None or not _is_child(above[1], step[1]):
            return None
        names, module = (*above[0], step[1]), above[1]._modules[step[1]]
        places[ast.unparse(node)] = names
        assert module is not None
        return names, module

    for node in ast.walk(ast.parse(source)):
        if isinstance(node, (ast.Attribute, ast.Subscript)):
            below(node)
    return places


def looked_up(source: str, places: Mapping[str, Names], instead: str) -> str:
    """The `def` in `source`, with the modules at `places` in variables. `instead`: what it does where one is gone."""
    variables: dict[Names, str] = {}
    tree = ast.parse(source)
    taken = {node.id if isinstance(node, ast.Name) else node.arg for node in ast.walk(tree) if isinstance(node, _NAMED)}
    tree = _Exchange(places, variables, taken).visit(tree)
    if not variables:
        return source
    head, *body = ast.unparse(tree).splitlines()
    lines = [f"{_INDENT}{line}" for line in _statements(variables)]
    return "\n".join([head, f"{_INDENT}try:", *lines, f"{_INDENT}except Exception:", _INDENT * 2 + instead, *body, ""])


def _statements(variables: Mapping[Names, str]) -> Iterator[str]:
    for names, variable in variables.items():
        above = variables[names[:-1]] if len(names) > 1 else "self"
        yield f"{_INDENT}{variable} = {above}._modules[{names[-1]!r}]"


def _step(node: ast.expr) -> tuple[ast.expr, str] | None:
    """What a child is looked up in, and its name."""
    if isinstance(node, ast.Attribute):
        return node.value, node.attr
    if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
        return node.value, str(node.slice.value)
    return None


_LOOK_UPS = ("__getattr__", "__getattribute__", "__getitem__", "_get_abs_string_index")


def _is_child(module: nn.Module, name: str) -> bool:
    cls = type(module)
    own = (getattr(cls, look_up, None) for look_up in _LOOK_UPS)
    by_pytorch = all(str(getattr(f, "__module__", None) or "torch.").startswith("torch.") for f in own)
    names = [*module._modules]
    by_index = isinstance(module, (nn.Sequential, nn.ModuleList)) and name.isdecimal()
    if by_index and names[int(name) : int(name) + 1] != [name]:
        return False
    return by_pytorch and module._modules.get(name) is not None and not (hasattr(cls, name) or name in module.__dict__)


class _Exchange(ast.NodeTransformer):
    """Puts variables in the place of modules."""

    def __init__(self, places: Mapping[str, Names], variables: dict[Names, str], taken: Container[str]) -> None:
        self.places, self.variables, self.taken = places, variables, taken

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        return self._exchanged(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        return self._exchanged(node)

    def _exchanged(self, node: ast.Attribute | ast.Subscript) -> ast.AST:
        names = self.places.get(ast.unparse(node))
        return self.generic_visit(node) if names is None else ast.Name(self._variable(names), ast.Load())

    def _variable(self, names: Names) -> str:
        for count in range(1, len(names) + 1):  # those on the way first
            above = names[:count]
            if above not in self.variables:
                variable = re.sub(r"\W", "_", "_".join(("self", *above)))
                while variable in self.taken or variable in self.variables.values():
                    variable += "_"
                self.variables[above] = variable
        return self.variables[names]
