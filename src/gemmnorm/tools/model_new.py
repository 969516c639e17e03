"""The Python part of an exported file: a callable for each kind of chain, and `ModelNew` with generated forwards."""

from __future__ import annotations

import ast
import importlib
import sys
import types
from collections.abc import Sequence
from dataclasses import dataclass

from torch import nn

from .. import activations
from ..errors import GemmNormValueError
from .analysis import OwnerPlan
from .cpp import TEMPLATES, CudaText
from .kernel_text import ascii_text, unused
from .matching import Chain

_IMPORTED = ("functools", "hashlib", "warnings", "torch")


@dataclass(frozen=True)
class Kind:
    """One kind of chain: what its callable in the file is made with.

    Attributes:
        in_features, out_features: of the Linear.
        dtype, scale_dtype, norm_dtype: of x and the Linear, of the scale, and of everything in the BatchNorm1d.
        scaled: a scale is multiplied by.
        activation: canonical string or None.
        module: class and attributes of the module that computes the activation; None where a function does.
        suffix: of the C++ functions' names.
    """

    in_features: int
    out_features: int
    dtype: str
    scale_dtype: str
    norm_dtype: str
    scaled: bool
    activation: str | None
    module: tuple[type[nn.Module], tuple[tuple[str, float | str], ...]] | None
    suffix: str = ""

    @property
    def base_name(self) -> str:
        """`fused_gemm_scale_bn_relu`: named for what it fuses."""
        parts = ["fused_gemm", *(["scale"] if self.scaled else []), "bn"]
        return "_".join([*parts, *([activations.parse(self.activation)[0].name] if self.activation else [])])

    def source(self) -> str:
        """The constructor call."""
        dtypes = {"dtype": self.dtype, "scale_dtype": self.scale_dtype, "norm_dtype": self.norm_dtype}
        lines = [
            f"in_features={self.in_features}, out_features={self.out_features}",
            ", ".join(f"{key}=torch.{value}" for key, value in dtypes.items()),
        ]
        if self.module is not None:
            cls, options = self.module
            given = f", options={{{', '.join(_quoted(key) + ': ' + _quoted(value) for key, value in options)}}}"
            lines.append(f"activation=torch.nn.{cls.__name__}{given if options else ''}")
        elif self.activation is not None:
            lines.append(f"function={_function_source(self.activation)}")
        if self.suffix:
            lines.append(f"suffix={_quoted(self.suffix)}")
        return "FusedChain(\n" + "".join(f"    {line},\n" for line in lines) + ")"


def _quoted(value: object) -> str:
    """As Python, with double quotes."""
    return f'"{value}"' if isinstance(value, str) else repr(value)


def _function_source(activation: str) -> str:
    """The PyTorch function that computes `activation`, as an expression."""
    row, values = activations.parse(activation)
    name = f"torch.nn.functional.{row.calls[0].__name__}"
    options = [f"{key}={value!r}" for key, value in zip((n for n, _ in row.parameters), values, strict=True)]
    options += [f"{key}={_quoted(value)}" for key, value in row.matches if value != "none"]
    return f"functools.partial({', '.join([name, *options])})" if options else name


def activation_module(module: nn.Module) -> tuple[type[nn.Module], tuple[tuple[str, float | str], ...]]:
    """The class of an activation module of the table, and the attributes that decide what it computes."""
    name = activations.from_module(module)
    assert name is not None  # it is part of a chain
    row, _ = activations.parse(name)
    keys = [key for key, _ in row.parameters] + [key for key, _ in row.matches]
    return type(module), tuple((key, getattr(module, key)) for key in keys)


@dataclass(frozen=True)
class Generated:
    """What the text is made of.

    Attributes:
        owners: the modules with chains, outermost first.
        kinds: (owner's path, chain) → kind.
        text: the CUDA code.
        strategy, target: for the headline. capabilities: the compute capabilities that it runs on; () for all from 8.0.
        tf32: float32 products are computed in TF32.
    """

    owners: Sequence[OwnerPlan]
    kinds: dict[tuple[str, Chain], Kind]
    text: CudaText
    strategy: str
    target: str
    capabilities: tuple[tuple[int, int], ...]
    tf32: bool


def python_text(made: Generated, module: types.ModuleType) -> str:
    """Everything that stands behind the source of `module`, the model file.

    Raises:
        GemmNormValueError: a class or a name of the model file does not go together with the generated part.
    """
    names = _instance_names(made.kinds)
    imports, classes = _Classes(made, module, names).write()
    architecture = " and ".join(f"compute capability {major}.{minor}" for major, minor in made.capabilities)
    supported = f"capability in {made.capabilities!r}" if made.capabilities else "capability >= (8, 0)"
    fields = {
        "STRATEGY": made.strategy,
        "TARGET": made.target,
        "CHAINS": "\n".join(f"#     {line}" for line in _chain_lines(made)),
        "ARCHITECTURE": architecture or "compute capability 8.0 or newer",
        "IMPORTS": "".join(f"{line}\n" for line in imports),
        "DECLARATIONS": made.text.declarations,
        "KERNELS": made.text.kernels,
        "HOST": made.text.host,
        "FUNCTIONS": repr(list(made.text.functions)),
        "SUPPORTED": f"({supported})" if made.capabilities else supported,
        "TF32_HELPER": _TF32_HELPER if made.tf32 else "",
        "TF32": _TF32_CHECK if made.tf32 else "",
        "INSTANCES": "\n\n".join(f"{name} = {kind.source()}" for kind, name in names.items()),
        "CLASSES": "\n\n\n".join(classes),
    }
    text = (TEMPLATES / "model_new.py.txt").read_text(encoding="utf-8")
    for name, value in fields.items():
        text = text.replace(f"@{name}@", value)
    generated = ascii_text(text)
    _check_names(generated, module)
    return generated


_TF32_HELPER = '''\
def tf32_is_allowed():
    """PyTorch's own switch, by its newer name where there is one."""
    precision = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    return torch.backends.cuda.matmul.allow_tf32 if precision is None else precision == "tf32"


'''
_TF32_CHECK = """\
        if not tf32_is_allowed():
            return "the kernels multiply in TF32, which torch.backends.cuda.matmul.allow_tf32 does not allow"
"""


def _chain_lines(made: Generated) -> list[str]:
    lines = []
    for (path, chain), kind in made.kinds.items():
        where = f"{path}: " if path else ""
        lines.append(f"{where}{chain}    ({kind.in_features} -> {kind.out_features}, {kind.dtype})")
    return lines


def _instance_names(kinds: dict[tuple[str, Chain], Kind]) -> dict[Kind, str]:
    """A name for each kind: plain where there is one of its sort, else with the sizes behind it, else with a number."""
    distinct = list(dict.fromkeys(kinds.values()))
    names: dict[Kind, str] = {}
    for kind in distinct:
        name = kind.base_name
        if sum(other.base_name == name for other in distinct) > 1:
            name += f"_{kind.in_features}_{kind.out_features}"
        names[kind] = unused(name, "_", names.values())
    return names


class _Classes:
    """The generated subclasses, and the imports that they need."""

    def __init__(self, made: Generated, module: types.ModuleType, names: dict[Kind, str]) -> None:
        self.made = made
        self.module = module
        self.names = names
        self.imports: dict[str, None] = {}

    def write(self) -> tuple[list[str], list[str]]:
        """(import lines, classes)."""
        texts: dict[str, str] = {}  # body → name of the class that has it
        swaps: list[tuple[str, str, str]] = []  # path, original class, generated class
        found: list[str] = []
        root = None
        for owner in self.made.owners:
            if not owner.path:
                root = owner
                continue
            base = self._class_expression(owner.original)
            body = self._body(owner, base)
            if body not in texts:
                texts[body] = unused(f"Fused{owner.original.__name__}", "", texts.values())
                found.append(f"class {texts[body]}({base}):\n{body}")
            swaps.append((owner.path, base, texts[body]))
        found.append(self._model_new(root, swaps))
        return list(self.imports), found

    def _body(self, owner: OwnerPlan, base: str) -> str:
        """Docstring and forward of a generated class, as `fuse` would write them."""
        self._need(owner.imports, owner.namespace)
        guard = f"children(self) != {_tuple_source(owner.structure)}"
        source = owner.class_source("_", lambda chain: self.names[self.made.kinds[owner.path, chain]], guard=guard)
        return source.split("\n", 1)[1].rstrip("\n")

    def _model_new(self, root: OwnerPlan | None, swaps: list[tuple[str, str, str]]) -> str:
        head = "class ModelNew(Model):"
        if not swaps:
            assert root is not None
            return f"{head}\n{self._body(root, 'Model')}"
        pairs = "".join(f'            ("{path}", {base}, {fused}),\n' for path, base, fused in swaps)
        constructor = (
            "    @functools.wraps(Model.__init__)\n"
            "    def __init__(self, *args, **kwargs):\n"
            "        super().__init__(*args, **kwargs)\n"
            "        modules = dict(self.named_modules())\n"
            f"        for path, original, fused in (\n{pairs}        ):\n"
            "            if type(modules.get(path)) is original:\n"
            "                modules[path].__class__ = fused\n"
        )
        if root is None:
            docstring = '    """Model, whose parts get the generated classes as soon as they are made."""'
            return f"{head}\n{docstring}\n\n{constructor}".rstrip()
        docstring, forward = self._body(root, "Model").split("\n    def forward(", 1)
        return f"{head}\n{docstring}\n{constructor}\n    def forward({forward}"

    def _class_expression(self, cls: type[nn.Module]) -> str:
        """How the file names a class: as the model file does, or by importing it."""
        for name, value in vars(self.module).items():
            if value is cls and name.isidentifier():
                return name
        if getattr(nn, cls.__name__, None) is cls:
            return f"torch.nn.{cls.__name__}"
        home = importlib.import_module(cls.__module__) if cls.__module__ in sys.modules else None
        if getattr(home, cls.__qualname__, None) is not cls:
            raise GemmNormValueError(
                f"the class {cls.__qualname__} has a chain in its forward, and a file cannot name it; define it at the"
                " top level of a module"
            )
        self._need([f"from {cls.__module__} import {cls.__name__}"], {cls.__name__: cls})
        return cls.__name__

    def _need(self, lines: Sequence[str], namespace: object) -> None:
        """Keep import lines, without those of names that the file has anyway."""
        for line in lines:
            name = line.split()[-1]
            own = line.startswith(f"from {self.module.__name__} import ")
            if own and " as " not in line:
                continue
            if own:
                _, _, original = line.partition(" import ")
                line = "{1} = {0}".format(*original.split(" as "))
            if name not in _IMPORTED:
                self.imports[line] = None


def _tuple_source(structure: tuple[object, ...]) -> str:
    """`("gemm", "bn")`, with double quotes as everything else in the file."""
    parts = [_quoted(part) if isinstance(part, str) else _tuple_source(part) for part in structure]  # type: ignore[arg-type]
    return f"({', '.join(parts)}{',' if len(parts) == 1 else ''})"


def _check_names(generated: str, module: types.ModuleType) -> None:
    """No name that the model file uses for something of its own may mean something else after the generated part."""
    for node in ast.parse(generated).body:
        bound: list[str] = []
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            bound = [node.name]
        elif isinstance(node, ast.Assign):
            bound = [target.id for target in node.targets if isinstance(target, ast.Name)]
        elif isinstance(node, (ast.Import, ast.ImportFrom)):
            bound = [alias.asname or alias.name.partition(".")[0] for alias in node.names]
        for name in bound:
            if name in vars(module) and not _is_same(vars(module)[name], name, node):
                raise GemmNormValueError(
                    f"the model file defines {name}, which the generated part would replace; rename it there"
                )


def _is_same(value: object, name: str, node: ast.stmt) -> bool:
    """Whether an import binds `name` to what it is bound to already."""
    if isinstance(node, ast.Import):
        alias = next(a for a in node.names if (a.asname or a.name.partition(".")[0]) == name)
        return value is sys.modules.get(alias.name if alias.asname else name)
    if isinstance(node, ast.ImportFrom):
        alias = next(a for a in node.names if (a.asname or a.name) == name)
        return value is getattr(sys.modules.get(node.module or ""), alias.name, None)
    return False
