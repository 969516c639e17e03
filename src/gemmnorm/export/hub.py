"""An export as a project for Hugging Face's kernel-builder, whose builds the `kernels` library loads from the Hub.

::

    build.toml, flake.nix               what is built, for which compute capabilities
    README.md                           the card: what it is, how it computes, how it was verified
    <name>_cuda/<name>.cu               the CUDA text of the exported file, unchanged
    torch-ext/torch_binding.h, .cpp     its host functions as operators of PyTorch
    torch-ext/<name>/model.py           the model's source and `ModelNew`, which calls the operators
    torch-ext/<name>/layers.py          its fused `forward`s, as layers that may replace those of the model's classes

The builder adds `registration.h` and `_ops.py`. Written after its documentation (github.com/huggingface/kernels,
docs/source/builder/writing-kernels.md and kernel-requirements.md; `build.toml` of edition 5).
"""

from __future__ import annotations

import ast
import keyword
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

from ..errors import GemmNormValueError
from . import method
from .generated import Contents, ascii_text, python_text, served, template
from .host import cuda_text
from .kernels import wrap, wrapped
from .model_new import ExportResult

__all__ = ["check_hub_folder", "hub_files", "write_hub"]

LICENSE = "apache-2.0"  # ours, which the generated CUDA text is under
# Compute capabilities that the builder compiles for, of those that the kernels run on.
_CAPABILITIES = ("8.0", "8.6", "8.7", "8.9", "9.0", "10.0", "10.1", "10.3", "11.0", "12.0", "12.1")
_SCHEMA_TYPES = {
    "const torch::Tensor&": "Tensor",
    "const MaybeTensor&": "Tensor?",
    "double": "float",
    "bool": "bool",
    "const std::vector<bool>&": "bool[]",
}
_WRITTEN = ("running_mean", "running_var", "num_batches_tracked")  # in training, in place


def check_hub_folder(folder: str | Path) -> str:
    """The kernel's name, which is the folder's.

    Raises:
        GemmNormValueError: the Hub takes no such name, or the folder holds what `write_hub` has not written.
    """
    folder = Path(folder)
    name = folder.resolve().name
    package = name.replace("-", "_")
    if package in sys.stdlib_module_names or package == "torch" or keyword.iskeyword(package):
        raise GemmNormValueError(f"hub: expected a name that is free for a package; got {name!r}")
    if not re.fullmatch(r"[a-z][-a-z0-9]*[a-z0-9]", name):
        raise GemmNormValueError(
            f"hub: expected a folder whose name is a kernel's: lower-case letters, digits and dashes; got {name!r}"
        )
    if not folder.resolve().parent.is_dir() or (folder.exists() and not folder.is_dir()):
        raise GemmNormValueError(f"hub: expected a folder in an existing directory; got {folder}")
    build = folder / "build.toml"
    ours = build.is_file() and build.read_text(encoding="utf-8", errors="replace").startswith(method.MARK)
    if folder.is_dir() and any(folder.iterdir()) and not ours:
        raise GemmNormValueError(f"hub: {folder} is there already, and was not written by gemmnorm")
    return name


def hub_files(result: ExportResult, name: str) -> dict[str, str]:
    """The project's files: path → text.

    Raises:
        GemmNormValueError: the model's file imports what a kernel of the Hub must not: anything but PyTorch and the
            standard library.
    """
    foreign = sorted(set(_imports(result.model)))
    if foreign:
        raise GemmNormValueError(
            "hub: expected a model file that imports PyTorch and the standard library only, as kernels of the Hub must;"
            f" got {', '.join(foreign)}"
        )
    contents, package = result.contents, name.replace("-", "_")
    text = cuda_text(list(contents.sites.values()))
    declarations = ascii_text(text.declarations)
    head = f"{method.MARK}: above stands the original model, word for word, below the same with its chains fused."
    kernels = template("hub_ops.py.txt").format(**served(contents))
    return {
        "build.toml": _build(name, package, contents),
        "flake.nix": template("hub_flake.nix.txt"),
        "README.md": _card(name, result),
        f"{package}_cuda/{package}.cu": declarations + ascii_text(text.kernels) + ascii_text(text.host),
        "torch-ext/torch_binding.h": "#pragma once\n\n" + declarations,
        "torch-ext/torch_binding.cpp": _binding(declarations),
        f"torch-ext/{package}/__init__.py": template("hub_init.py.txt").format(name=name),
        f"torch-ext/{package}/model.py": result.model + python_text(contents, head, kernels),
        f"torch-ext/{package}/layers.py": _layers(contents),
    }


def write_hub(files: dict[str, str], folder: str | Path, verified: Sequence[str] = ()) -> list[Path]:
    """Write the project, with what is known of its verification in the card; returns the paths."""
    check_hub_folder(folder)
    said = verified or ("It was not. `gemmnorm optimize --hub` verifies before it writes.",)
    written = []
    for name, text in files.items():
        path = Path(folder) / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if name == "README.md":
            text += "".join(f"- {line}\n" for line in said)
        path.write_text(text, encoding="utf-8")
        written.append(path)
    return written


def _imports(source: str) -> Iterator[str]:
    """Modules that the source imports and a kernel of the Hub must not."""
    for node in ast.walk(ast.parse(source)):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        if isinstance(node, ast.ImportFrom):
            names = ["." * node.level + (node.module or "")]
        yield from (name for name in names if name.split(".")[0] not in {"torch", *sys.stdlib_module_names})


def imports_beside(source: str, folder: Path) -> list[str]:
    """What the source imports from its own folder: where it goes, that has to go too."""
    names = sorted({name.lstrip(".").split(".")[0] for name in _imports(source)} - {""})
    return [name for name in names if (folder / f"{name}.py").is_file() or (folder / name).is_dir()]


def _build(name: str, package: str, contents: Contents) -> str:
    least = contents.arch / 10
    capabilities = ["9.0a"] if contents.own else [c for c in _CAPABILITIES if float(c) >= least]
    return template("hub_build.toml.txt").format(
        mark=method.MARK,
        name=name,
        package=package,
        license=LICENSE,
        capabilities=", ".join(f'"{capability}"' for capability in capabilities),
    )


def _binding(declarations: str) -> str:
    """Registers every host function that the declarations name."""
    found = re.findall(r"^Tensors (\w+)\((.*?)\);", declarations, re.M | re.S)
    lines = [line for name, parameters in found for line in _registration(name, parameters)]
    return template("hub_binding.cpp.txt").format(registrations="\n".join(f"  {line}" for line in lines))


def _registration(name: str, parameters: str) -> Iterator[str]:
    """The statements that register one host function."""
    typed = [p.strip().rpartition(" ") for p in re.sub(r"/\*.*?\*/", "", parameters).split(",")]
    pairs = [(" ".join(kind.split()), given) for kind, _, given in typed]
    written = iter("abc")
    arguments = []
    for kind, given in pairs:
        schema = _SCHEMA_TYPES[kind]
        if given in _WRITTEN and "training" in name:
            schema = f"Tensor({next(written)}!)?"
        arguments.append(f"{schema} {given}")
    yield f'ops.def("{name}({", ".join(arguments)}) -> Tensor[]");'
    if all(schema != "bool[]" for schema in (_SCHEMA_TYPES[kind] for kind, _ in pairs)):
        yield f'ops.impl("{name}", torch::kCUDA, &{name});'
        return
    # The dispatcher hands lists over as c10::List.
    listed = [(kind.replace("std::vector", "c10::List"), given) for kind, given in pairs]
    values = [f"{given}.vec()" if "List" in kind else given for kind, given in listed]
    given_as = [f"{kind} {given}" for kind, given in listed]
    yield from wrap(f'ops.impl("{name}", torch::kCUDA, [](', given_as, ") {").split("\n")
    yield from wrap(f"  return {name}(", values, ");").split("\n")
    yield "});"


def _layers(contents: Contents) -> str:
    """A layer for each class of the model's own that owns a chain; of owners with the same forward, one.

    None where the fused forward falls back to the original one, which a layer does not inherit.
    """
    layers: dict[str, str] = {}
    seen = set()
    for owner, name in contents.classes:
        forward = owner.class_source("_", "_")
        falls_back = any(form.conditions for form in owner.forms)
        if owner.original.__module__.startswith("torch.") or falls_back or forward in seen:
            continue
        seen.add(forward)
        original = owner.original.__name__
        layers[original if original not in layers else f"{original}{len(layers) + 1}"] = name
    each = [f"\n\nclass {layer}(nn.Module):\n    forward = model.{name}.forward\n" for layer, name in layers.items()]
    return template("hub_layers.py.txt") + "".join(each)


def _card(name: str, result: ExportResult) -> str:
    how, accuracy = method.explained(result.strategy, result.plans)
    return template("hub_card.md.txt").format(
        license=LICENSE,
        name=name,
        chains="\n".join(f"- {match}" for match in result.report.matches),
        dtype=result.plans[0].problem.dtype,
        capability=f"{served(result.contents)['capability_text']}{'' if result.contents.own else ' or higher'}",
        strategy=result.strategy,
        method="\n".join(wrapped(how, 117)),
        accuracy="\n".join(wrapped(accuracy, 117)),
    )
