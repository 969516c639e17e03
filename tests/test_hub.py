"""An export as a project for Hugging Face's kernel-builder: its files, its Python on the CPU, its operators."""

from __future__ import annotations

import ast
import importlib
import inspect
import re
import shutil
import subprocess
import sys
import sysconfig
import types
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.cpp_extension import include_paths, library_paths

from gemmnorm import export as exporting
from gemmnorm.errors import GemmNormValueError

SMALL = Path(__file__).parents[1] / "examples" / "small.py"
BLOCKS = """
import math
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, inner, width):
        super().__init__()
        self.linear = nn.Linear(inner, width)
        self.bn = nn.BatchNorm1d(width)

    def forward(self, x):
        return F.leaky_relu(self.bn(self.linear(x)), 1 / math.e)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.first, self.second = Block(width, 24), Block(24, 16)

    def forward(self, x):
        return self.second(self.first(x))


def get_inputs():
    return [torch.randn(40, 32)]


def get_init_inputs():
    return [32]
"""


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    path = tmp_path_factory.mktemp("hub") / "blocks.py"
    path.write_text(BLOCKS)
    return path


@pytest.fixture
def project(model_path, tmp_path):
    result = exporting.export(model_path, None, target="sm_80", strategy="cublas_folded_bn")
    folder = tmp_path / "two-blocks"
    exporting.write_hub(exporting.hub_files(result, "two-blocks"), folder)
    return folder


@pytest.fixture
def package(project, monkeypatch):
    """The project's Python package, with an `_ops` such as the builder adds."""
    (project / "torch-ext" / "two_blocks" / "_ops.py").write_text("import torch\nops = torch.ops._two_blocks\n")
    monkeypatch.syspath_prepend(project / "torch-ext")
    yield importlib.import_module("two_blocks")
    for name in [name for name in sys.modules if name.split(".")[0] == "two_blocks"]:
        del sys.modules[name]


def test_every_file_of_the_layout_is_there_and_parses(project):
    files = {str(path.relative_to(project)) for path in project.rglob("*") if path.is_file()}
    python = {f"torch-ext/two_blocks/{name}.py" for name in ("__init__", "model", "layers")}
    assert files == {
        *python, "build.toml", "flake.nix", "README.md", "two_blocks_cuda/two_blocks.cu",
        "torch-ext/torch_binding.h", "torch-ext/torch_binding.cpp",
    }  # fmt: skip
    for name in python:
        ast.parse((project / name).read_text(), feature_version=(3, 9))
    for name in files - python:
        text = (project / name).read_text()
        assert text.isascii() or name == "README.md"
        assert name.endswith((".cu", ".nix")) or not re.search(r"\{\w*\}", text), name  # no field of a template is left


@pytest.mark.parametrize(
    ("strategy", "target", "capabilities"),
    [("cublas_folded_bn", "sm_89", ["8.9", "9.0", "10.0"]), ("one_kernel", "sm_90", ["9.0a"])],
)
def test_the_build_file_has_what_the_builder_requires(strategy, target, capabilities):
    tomllib = pytest.importorskip("tomllib")
    result = exporting.export(SMALL, None, target=target, strategy=strategy)
    files = exporting.hub_files(result, "fused-small")
    build = tomllib.loads(files["build.toml"])
    general, kernel = build["general"], build["kernel"]["fused_small"]
    assert general == {"name": "fused-small", "version": 1, "edition": 5, "license": "apache-2.0", "backends": ["cuda"]}
    assert (kernel["backend"], kernel["depends"]) == ("cuda", ["torch"])
    assert kernel["cuda-capabilities"][:3] == capabilities
    assert {*build["torch"]["src"], *kernel["src"]} <= set(files)
    assert f"compute capability {target[-2]}.{target[-1]}" in files["README.md"]


def test_the_cuda_text_is_the_exported_files(model_path, project):
    source = exporting.export(model_path, None, target="sm_80", strategy="cublas_folded_bn").source
    texts = re.findall(r'^_(?:DECLARATIONS|KERNELS|HOST) = r"""\n(.*?)"""', source, re.M | re.S)
    assert (project / "two_blocks_cuda" / "two_blocks.cu").read_text() == "".join(texts)


def test_the_package_is_the_model_and_its_layers_stand_in_for_its_classes(package):
    torch.manual_seed(0)
    model = package.Model(32)
    new = package.ModelNew(32)
    new.load_state_dict(model.state_dict())
    x = torch.randn(40, 32)
    assert type(new.first) is not type(model.first)
    torch.testing.assert_close(new(x), model(x))
    layer = package.layers.Block
    members = {name for name, _ in inspect.getmembers(layer)} - {name for name, _ in inspect.getmembers(nn.Module)}
    assert layer.__init__ is nn.Module.__init__ and not members  # as `kernels` demands: pure, nothing but `forward`
    assert list(inspect.signature(layer.forward).parameters) == ["self", "x"]
    model.second.forward = types.MethodType(layer.forward, model.second)
    torch.testing.assert_close(new(x), model(x))


REGISTRATION = """
#include <Python.h>
#define TORCH_LIBRARY_EXPAND(NAME, MODULE) TORCH_LIBRARY(NAME, MODULE)
#define REGISTER_EXTENSION(NAME)
"""


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_operators_are_registered_with_the_types_of_their_functions(project, package):
    """PyTorch refuses a schema that the C++ function does not have."""
    folder = project / "torch-ext"
    (folder / "registration.h").write_text(REGISTRATION)
    host = re.sub(r"\);", ") { return {}; }", (folder / "torch_binding.h").read_text())
    # In one unit: PyTorch's headers take the compiler ten seconds.
    (folder / "host.cpp").write_text(f'#include "torch_binding.cpp"\n{host.replace("#pragma once", "")}')
    library = project / "ops.so"
    command = [
        "g++",
        "-std=c++20",
        "-O0",
        "-w",
        "-fPIC",
        "-shared",
        "-DTORCH_EXTENSION_NAME=_two_blocks",
        f"-D_GLIBCXX_USE_CXX11_ABI={torch._C._GLIBCXX_USE_CXX11_ABI:d}",
        "-o",
        library,
    ]
    command += [f"-I{path}" for path in [*include_paths(), sysconfig.get_paths()["include"]]]
    command += [folder / "host.cpp", *(f"-L{path}" for path in library_paths())]
    done = subprocess.run([*command, "-ltorch", "-ltorch_cpu", "-lc10"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    load = f"import torch; torch.ops.load_library({str(library)!r})"
    done = subprocess.run([sys.executable, "-c", load], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-4000:]  # a schema that does not fit ends the process
    torch.ops.load_library(str(library))
    kernels = package.model._ops
    schema = kernels.forward_training_1.default._schema
    written = [a.name for a in schema.arguments if a.alias_info is not None and a.alias_info.is_write]
    assert written == ["running_mean", "running_var", "num_batches_tracked"]
    assert not any(a.alias_info for a in kernels.forward_evaluation_2.default._schema.arguments)
    assert torch._C._dispatch_has_kernel_for_dispatch_key("_two_blocks::backward_training_2", "CUDA")
    with pytest.raises(NotImplementedError):  # on the CPU there is no kernel; the arguments fit
        x = torch.randn(2, 32)
        kernels.backward_training_1(x, x, x, None, None, 1.0, None, None, x, x, x, 1e-5, [True] * 6)


def test_what_cannot_be_a_kernel_of_the_hub_is_refused(tmp_path, model_path):
    for name in ("My-Kernel", "kernel_", "1st", "a"):
        with pytest.raises(GemmNormValueError, match="lower-case letters"):
            exporting.check_hub_folder(tmp_path / name)
    with pytest.raises(GemmNormValueError, match="existing directory"):
        exporting.check_hub_folder(tmp_path / "nowhere" / "kernel")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "build.toml").write_text('[general]\nname = "mine"\n')
    with pytest.raises(GemmNormValueError, match="was not written by gemmnorm"):
        exporting.check_hub_folder(tmp_path / "mine")
    foreign = tmp_path / "foreign.py"
    foreign.write_text(BLOCKS.replace("import math", "import math, numpy"))
    result = exporting.export(foreign, None, target="sm_80", strategy="cublas_folded_bn")
    with pytest.raises(GemmNormValueError, match=r"standard library only.*got numpy"):
        exporting.hub_files(result, "foreign")
