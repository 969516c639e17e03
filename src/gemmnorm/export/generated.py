"""The generated half of an exported file: CUDA text in its template, and `class ModelNew(Model)`.

`ModelNew` has the same generated `forward` that `fuse` puts into a model (`OwnerPlan.forward_source`).
"""

from __future__ import annotations

import ast
import json
import re
import sys
import types
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import torch

from .. import activations
from ..errors import GemmNormValueError
from ..fuse import Chain, OwnerPlan, import_line, is_importable, known_as, numbered
from ..plan import OWN_GEMM, Plan
from . import method
from .batches import Kind, kind_of
from .host import TEMPLATES, Site, cuda_text

_CALL = "fused_linear_scale_batch_norm"


@dataclass(frozen=True)
class Contents:
    """What a file is made of: the owners of the chains, the plans of each kind, for which target, by which strategy."""

    owners: list[OwnerPlan]
    sites: dict[Kind, Site]
    target: str
    strategy: str

    @property
    def arch(self) -> int:
        return int(re.sub(r"\D", "", self.target))

    @property
    def own(self) -> bool:
        """Whether a GEMM of our own multiplies: instructions that one compute capability has and no newer one."""
        return self.strategy in OWN_GEMM

    @property
    def plans(self) -> tuple[Plan, ...]:
        return tuple(plan for site in self.sites.values() for plan in site.plans)

    @property
    def classes(self) -> list[tuple[OwnerPlan, str]]:
        """Each owner with the class that has its fused `forward`."""
        inside = enumerate((owner for owner in self.owners if owner.path), start=1)
        names = {id(owner): f"_Fused{owner.original.__name__}{index}" for index, owner in inside}
        return [(owner, names.get(id(owner), "ModelNew")) for owner in self.owners]


def beside_model(owner: OwnerPlan, module: types.ModuleType) -> OwnerPlan:
    """`owner` in a file that begins with the source of `module`: what that defines is not imported.

    Raises:
        GemmNormValueError: the owner's class, or something that its `forward` reads, has no name that a file can use.
    """
    for held in owner.nameless:
        raise GemmNormValueError(
            f"forward: expected to read what has a name at the top level of a module; got {held!r}"
        )
    name = module.__name__
    own = {known: value for known, value in owner.namespace.items() if getattr(value, "__module__", "") == name}
    imports = [line for line in owner.imports if not line.startswith((f"from {name} import ", f"import {name} "))]
    for known, value in own.items():
        found = str(getattr(value, "__qualname__", known))
        if "<locals>" in found:
            raise GemmNormValueError(f"{found}: expected a name at the top level of the model file")
        imports += [] if found == known else [f"{known} = {found}"]
    base = _name_in(module, owner.original)
    if base is None:
        base = known_as(owner.original)
        if not is_importable(owner.original):
            raise GemmNormValueError(f"{owner.original.__qualname__}: expected a class at the top level of a module")
        imports.append(import_line(base, owner.original))
    return replace(owner.inside(name), imports=tuple(imports), base=base)


def _name_in(module: types.ModuleType, cls: type) -> str | None:
    """What the source of `module` can call `cls`: a name, `Outer.Block`, `blocks.Block`; PyTorch's by where it lies."""
    if getattr(torch.nn, cls.__name__, None) is cls:
        return f"torch.nn.{cls.__name__}"
    names = vars(module)
    for name in (cls.__name__, *names):
        if names.get(name) is cls:
            return name
    first, *inner = cls.__qualname__.split(".")
    found = names.get(first)
    for name in inner:
        found = getattr(found, name, None)
    return cls.__qualname__ if found is cls else None


def check_names(generated: str, module: types.ModuleType) -> None:
    """What is written below the source of `module` gives none of its names another meaning.

    Raises:
        GemmNormValueError: it would.
    """
    names = vars(module)
    for name, meant in _bound(ast.parse(generated)):
        if name in names and names[name] is not meant:
            raise GemmNormValueError(
                f"{name}: the written file needs this name for something of its own; rename the model file's"
            )


def _bound(tree: ast.Module) -> Iterator[tuple[str, object]]:
    """(name, what it means, None where that is only there once the file runs) of what a file binds at its top level."""
    for node in tree.body:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.split(".")[0]
                yield alias.asname or whole, sys.modules.get(whole)
        elif isinstance(node, ast.ImportFrom):
            holder = sys.modules.get(node.module or "")
            yield from ((alias.asname or alias.name, getattr(holder, alias.name, None)) for alias in node.names)
        elif isinstance(node, ast.Assign):
            yield from ((target.id, None) for target in node.targets if isinstance(target, ast.Name))
        elif isinstance(node, (ast.ClassDef, ast.FunctionDef)):
            yield node.name, None


def generated_text(contents: Contents) -> str:
    """Everything that follows the model's own source, the CUDA text inlined."""
    text = cuda_text(list(contents.sites.values()))
    kernels = template("load_inline.py.txt").format(
        declarations=ascii_text(text.declarations),
        kernels=ascii_text(text.kernels),
        host=ascii_text(text.host),
        functions=list(text.functions),
        **served(contents),
    )
    return python_text(contents, method.head(contents.strategy, contents.arch, contents.plans), kernels)


def python_text(contents: Contents, head: str, kernels: str) -> str:
    """The Python that follows the model's own source; `kernels` defines `_kernels_for(device)`."""
    sites = contents.sites
    own, activates, several = contents.own, _activates(sites), len(sites) > 1
    return template("model_new.py.txt").format(
        head=head,
        kernels=kernels,
        activations=_activation_table(contents.owners),
        what="Linear, scale, BatchNorm" + (" and activation" if activates else ""),
        function=_function_head(contents),
        modules="(linear, bn, activation)" if activates else "(linear, bn)",
        activation_fits=_ACTIVATION_FITS if activates else "",
        unsaved=_UNSAVED if own else "",
        original=_ORIGINAL[activates],
        aligned=_ALIGNED if own else "    weight = linear.weight\n",
        mode='("training" if training else "evaluation")' + (" + suffix" if several else ""),
        chains="".join(_chain_function(kind, site, sites) + "\n\n" for kind, site in sites.items()) if several else "",
        classes=numbered("\n\n".join(_classes(contents))),
    )


def template(name: str) -> str:
    """The text of one of `templates/`."""
    return (TEMPLATES / name).read_text(encoding="utf-8")


def served(contents: Contents) -> dict[str, object]:
    """The fields of a template that say on which compute capabilities the kernels run."""
    arch = contents.arch
    return {
        "unserved": "!=" if contents.own else "<",
        "capability": (arch // 10, arch % 10),
        "capability_text": f"{arch / 10}" + (" and no other" if contents.own else ""),
    }


_ASCII = {
    "·": "*", "×": "x", "Σ": "sum ", "φ": "phi", "γ": "gamma", "β": "beta", "α": "alpha", "μ": "mu", "σ": "sigma",
    "δ": "delta", "κ": "kappa", "∂": "d", "²": "^2", "³": "^3", "ᵀ": "^T", "√": "sqrt ", "≤": "<=", "≥": ">=",
    "≠": "!=", "≈": "~", "→": "->", "←": "<-", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "−": "-", "–": "-",
    "—": "-", "…": "...", "‖": "|", "∞": "inf", "≡": "==", "ŷ": "y_hat", "⁻": "^-", "°": " deg", "’": "'", "“": '"',
    "”": '"', "µ": "u", "¹": "^1", "⁰": "^0", "ε": "eps", "≫": ">>", "≪": "<<", "±": "+-", "∈": "in", "½": "1/2",
}  # fmt: skip
_PASS = re.compile(r"\bpass\b")  # a word that harnesses refuse (model_new.REFUSED)


def ascii_text(text: str) -> str:
    """`text` with the mathematical letters of comments spelled out: compilers and editors differ on anything else."""
    return _PASS.sub("sweep", "".join(_ASCII.get(c, c) for c in text))


_UNSAVED = "    serves = serves and (training or not save)  # in evaluation nothing is kept for a backward\n"
# `wanted`: classes and attributes of modules that compute the kernels' activation. A string is the model's own text.
_ACTIVATION_FITS = """\
        and (activation is None if wanted is None else _builtins.isinstance(activation, _builtins.str) or (
            _builtins.type(activation) in wanted[0]
            and _builtins.all(_builtins.getattr(activation, name) == value for name, value in wanted[1])))
"""
# TMA reads the weight, from addresses that are multiples of 16.
_ALIGNED = "    weight = linear.weight.clone() if linear.weight.data_ptr() % 16 else linear.weight\n"
_ORIGINAL = {
    False: "        return bn(y if scale_vector is None and scale == 1.0 else y * scale)",
    True: """\
        y = bn(y if scale_vector is None and scale == 1.0 else y * scale)
        activation = _ACTIVATIONS[activation] if _builtins.isinstance(activation, _builtins.str) else activation
        return y if activation is None else activation(y)""",
}


def _what(kind: Kind) -> str:
    scale = " -> scale" if kind.scaled else ""
    return f"Linear({kind.in_features}, {kind.out_features}){scale} -> BatchNorm1d" + (
        f" -> {kind.activation}" if kind.activation else ""
    )


def _parameters(kinds: Iterable[Kind]) -> str:
    return "x, linear, bn, scale=1.0" + (", activation=None" if _activates(kinds) else "")


def _function_head(contents: Contents) -> str:
    """The head of the function that runs a chain: of one kind, with its sizes; of several, which it is given."""
    (kind, site), *others = contents.sites.items()
    served = "by the kernels where they serve, else by the modules"
    if others:
        return (
            f"def _chain(problem, {_parameters(contents.sites)}):\n"
            f'    """A chain: {served}."""\n'
            f"    {_named(contents.sites)}, suffix = problem"
        )
    return (
        f"def {_CALL}({_parameters(contents.sites)}):\n"
        f'    """{_what(kind)}: {served}."""\n'
        f"    {_named([kind])} = {_problem(kind, site, contents.sites)}"
    )


def _activates(kinds: Iterable[Kind]) -> bool:
    return any(kind.activation for kind in kinds)


def _named(kinds: Iterable[Kind]) -> str:
    """The names of what `_problem` gives."""
    return "in_features, out_features, dtype" + (", wanted" if _activates(kinds) else "")


def _problem(kind: Kind, site: Site, kinds: Iterable[Kind]) -> str:
    """What the kernels of a kind are for; with its activation, where any of `kinds` has one."""
    sizes = f"{kind.in_features}, {kind.out_features}, torch.{site.plans[0].problem.dtype}"
    return sizes + (f", {activations.module_source(kind.activation)}" if _activates(kinds) else "")


def _chain_function(kind: Kind, site: Site, kinds: Iterable[Kind]) -> str:
    """The Python function that stands for the chains of one of several kinds."""
    given = ", activation" if kind.activation else ""
    return (
        f"def {_CALL}{site.suffix}({_parameters([kind])}):\n"
        f'    """{_what(kind)}."""\n'
        f"    return _chain(({_problem(kind, site, kinds)}, {site.suffix!r}), x, linear, bn, scale{given})\n"
    )


def _activation_table(owners: list[OwnerPlan]) -> str:
    """What activations given as functions are where the kernels do not run; "" where the model has no activation."""
    if not any(chain.activation for owner in owners for chain in owner.chains):
        return ""
    entries = ", ".join(sorted(_activation_entries(owners)))
    comment = "# Activations that the model applies as functions: what runs where the kernels do not."
    return f"\n{comment}\n_ACTIVATIONS = {{{entries}}}\n\n"


def _activation_entries(owners: list[OwnerPlan]) -> Iterator[str]:
    """Dictionary entries for the activations that chains apply as functions, each once."""
    names = {c.activation for owner in owners for c in owner.chains if c.activation_module is None}
    for name in names - {None}:
        yield f'"{name}": {activations.python_source(str(name))}'


def _classes(contents: Contents) -> list[str]:
    """A subclass for every owner, and `ModelNew`, whose constructor gives them to the modules inside."""

    def call_name(chain: Chain) -> str:
        return _CALL + contents.sites[kind_of(chain)].suffix

    found: list[str] = []
    swaps = []
    root = next((owner for owner in contents.owners if not owner.path), None)
    for owner, name in ((owner, name) for owner, name in contents.classes if owner.path):
        found.append(_class(owner, name, call_name))
        path = json.dumps(owner.path, ensure_ascii=False)
        swaps.append(f"            ({path}, {name}, {owner.structure!r}),")
    lines = ["class ModelNew(Model):", '    """`Model` with its chains fused."""', "", *_CONSTRUCTOR]
    if swaps:
        lines += ["        inside = _builtins.dict(self.named_modules())", "        for path, cls, names in (", *swaps]
        lines += ["        ):", *_SWAP]
    if root is not None:
        lines += [
            f"        if _children(self) != {root.structure!r}:",
            "            self.__class__ = _AsWritten",
            "",
        ]
        lines += ["    " + line for line in root.forward_source(call_name).splitlines()]
        found = [*dict.fromkeys(root.imports), *found] if root.imports else found
    found += ["\n".join(lines).rstrip() + "\n"]
    return [_CHILDREN, *found, *([_AS_WRITTEN] if root is not None else [])]


_CHILDREN = '''\
def _children(module):
    """Names of the children, those inside of lists and dictionaries of modules included; None for no module."""
    if not _builtins.isinstance(module, torch.nn.Module):
        return None
    lists = (torch.nn.ModuleList, torch.nn.ModuleDict)
    return _builtins.tuple((name, _children(child)) if _builtins.isinstance(child, lists) else name
                           for name, child in module._modules.items() if child is not None)
'''
_CONSTRUCTOR = ["    def __init__(self, *args, **kwargs):", "        Model.__init__(self, *args, **kwargs)"]
_SWAP = [
    "            module = inside.get(path)",
    "            if _builtins.type(module) is cls.__bases__[0] and _children(module) == names:",
    "                module.__class__ = cls",
]
_AS_WRITTEN = '''\
class _AsWritten(ModelNew):
    """`ModelNew` with other children than those that its chains were found in, by other arguments: all as it was."""

    forward = Model.forward
'''


def _class(owner: OwnerPlan, name: str, call_name: Callable[[Chain], str]) -> str:
    text = owner.class_source(name, call_name)
    return "\n".join([*owner.imports, *([""] if owner.imports else []), text])
