"""Problem files: how they are executed, and what a bad one is told."""

import inspect
import pickle
import sys
import traceback
from pathlib import Path

import pytest
import torch

from gemmnorm.errors import GemmNormError
from gemmnorm.export import export
from gemmnorm.userfiles import ModelFileError, load_candidate_file, load_model_file, load_source

GOOD = '''
"""A model."""
import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self, features, bias=True):
        super().__init__()
        self.linear = nn.Linear(features, 3, bias=bias)

    def forward(self, x):
        return self.linear(x)


def get_inputs():
    return [torch.randn(5, 4)]


def get_init_inputs():
    return [4]
'''


@pytest.fixture
def write(tmp_path):
    def write_file(source, name="model.py"):
        path = tmp_path / name
        path.write_bytes(source if isinstance(source, bytes) else source.encode())
        return path

    return write_file


def test_a_good_file(write):
    path = write(GOOD)
    file = load_model_file(path)
    assert file.name == str(path) and file.class_name == "Model" and file.has_inputs
    assert file.init_inputs() == ([4], {})
    assert torch.equal(file.inputs(3)[0], file.inputs(3)[0])
    assert not torch.equal(file.inputs(3)[0], file.inputs(4)[0])
    assert torch.equal(file.build(1).linear.weight, file.build(1).linear.weight)


def test_the_module_is_a_proper_one(write):
    path = write(GOOD)
    file = load_model_file(path)
    assert sys.modules[file.module.__name__] is file.module
    assert file.module.__file__ == str(path.resolve())
    assert "self.linear = nn.Linear" in inspect.getsource(file.model_class)
    model = file.build(0)
    assert torch.equal(pickle.loads(pickle.dumps(model)).linear.weight, model.linear.weight)
    with pytest.raises(RuntimeError) as caught:
        model(torch.zeros(2, 3))
    assert "return self.linear(x)" in "".join(traceback.format_exception(caught.value))


def test_two_files_of_one_name_do_not_collide(write, tmp_path):
    (tmp_path / "other").mkdir()
    first = load_model_file(write(GOOD))
    second = load_model_file(write(GOOD.replace("3", "7"), "other/model.py"))
    assert first.module is not second.module
    assert (first.build(0).linear.out_features, second.build(0).linear.out_features) == (3, 7)


def test_source_without_a_file():
    module = load_source("assert '__file__' not in globals()\ndef f():\n    return 1\n", "inline")
    assert module.f() == 1 and "def f" in inspect.getsource(module.f)


def test_declared_encoding(write):
    source = "# -*- coding: latin-1 -*-\nname = 'gr\u00fc\u00df'\n" + GOOD
    assert load_model_file(write(source.encode("latin-1"))).module.name == "grüß"


def test_keyword_constructor_arguments(write):
    file = load_model_file(write(GOOD.replace("return [4]", "return {'features': 4, 'bias': False}")))
    assert file.build(0).linear.bias is None


@pytest.mark.parametrize(
    ("precision", "dtype"), [(None, None), ("fp32", torch.float32), ("fp16", torch.float16), ("bf16", torch.bfloat16)]
)
def test_a_precision_casts_the_model_that_was_drawn_in_float32_and_every_tensor_given(write, precision, dtype):
    source = GOOD.replace("nn.Linear(features, 3, bias=bias)", "nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))")
    source = source.replace("[torch.randn(5, 4)]", "[torch.randn(5, 4).double(), torch.arange(5), 2]")
    source = source.replace("return [4]", "return [torch.ones(4), None]")
    path = write(source)
    for file in (load_model_file(path, precision), load_candidate_file(path, precision)):
        x, index, number = file.inputs(0)
        assert [x.dtype, index.dtype, number] == [dtype or torch.float64, dtype or torch.int64, 2]
        (features, nothing), _ = file.init_inputs()
        assert features.dtype == (dtype or torch.float32) and nothing is None
        state, plain = file.build(5).state_dict(), load_model_file(path).build(5).state_dict()
        assert torch.equal(state["linear.0.weight"], plain["linear.0.weight"].to(dtype or torch.float32))
        assert state["linear.1.running_var"].dtype == (dtype or torch.float32)
        assert state["linear.1.num_batches_tracked"].dtype == torch.int64


def test_keyword_constructor_arguments_are_cast(write):
    file = load_model_file(write(GOOD.replace("return [4]", "return dict(features=torch.ones(4))")), "bf16")
    assert file.init_inputs()[1]["features"].dtype == torch.bfloat16


def test_candidate_names(write):
    both = load_candidate_file(write(GOOD + "\nclass ModelNew(Model):\n    x = 1\n"))
    assert both.class_name == "ModelNew"
    assert load_candidate_file(write(GOOD, "again.py")).class_name == "Model"
    only_new = load_candidate_file(write("import torch\nclass ModelNew(torch.nn.Module):\n    x = 1\n", "new.py"))
    assert only_new.class_name == "ModelNew" and not only_new.has_inputs
    with pytest.raises(ModelFileError, match="must define ModelNew, it defines nothing callable"):
        load_candidate_file(write("x = 1\n", "none.py"))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("class Model(:\n", "must be Python source, got SyntaxError.*line 1"),
        (b"x = '\xff'\n", "must be readable Python source|must be Python source"),
        ("import no_such_module_anywhere\n", "must run when imported, it raised ModuleNotFoundError.*line 1"),
        (GOOD.replace("class Model", "class Net"), "must define Model, it defines Net"),
        (GOOD.replace("def get_inputs", "def inputs"), "must define get_inputs"),
        (GOOD.replace("def get_init_inputs", "def init"), "must define get_init_inputs"),
        ("def Model():\n    return 1\n" + GOOD.partition("def get_inputs")[2], "must"),
        (GOOD + "\nget_inputs = 3\n", "get_inputs must be callable, got int"),
        (GOOD + "\nModel = int\n", "Model must be a torch.nn.Module class, got type"),
    ],
)
def test_bad_files(write, source, message):
    path = write(source)
    with pytest.raises(ModelFileError, match=message) as caught:
        load_model_file(path)
    assert str(path) in str(caught.value)
    assert isinstance(caught.value, GemmNormError) and isinstance(caught.value, ValueError)


def test_missing_file_and_directory(tmp_path):
    with pytest.raises(ModelFileError, match="found no such file"):
        load_model_file(tmp_path / "nowhere.py")
    with pytest.raises(ModelFileError, match="found a directory"):
        load_model_file(tmp_path)


def test_functions_that_fail(write):
    file = load_model_file(write(GOOD.replace("return [torch.randn(5, 4)]", "return [torch.randn(-5, 4)]")))
    with pytest.raises(ModelFileError, match=r"get_inputs\(\) must return the inputs, it raised RuntimeError.*line 17"):
        file.inputs(0)
    file = load_model_file(write(GOOD.replace("return [torch.randn(5, 4)]", "return torch.randn(5, 4)"), "b.py"))
    with pytest.raises(ModelFileError, match=r"must return a list of inputs, got torch\.Tensor"):
        file.inputs(0)
    file = load_model_file(write(GOOD.replace("return [torch.randn(5, 4)]", "return [1, 2]"), "c.py"))
    with pytest.raises(ModelFileError, match="a list with a tensor in it, got int"):
        file.inputs(0)
    file = load_model_file(write(GOOD.replace("return [4]", "return 4"), "d.py"))
    with pytest.raises(ModelFileError, match="must return a list of constructor arguments, got int"):
        file.build(0)
    file = load_model_file(write(GOOD.replace("return [4]", "return ['four']"), "e.py"))
    with pytest.raises(ModelFileError, match=r"must build the model, it raised TypeError"):
        file.build(0)


def test_a_file_of_another_encoding_is_written_as_utf_8(tmp_path: Path) -> None:
    text = (Path(__file__).parents[1] / "examples" / "small.py").read_text()
    lines = ["# -*- coding: latin-1 -*-", text, 'NAME = "café"', ""]
    (tmp_path / "model.py").write_bytes("\n".join(lines).encode("latin-1", "replace"))
    export(tmp_path / "model.py", tmp_path / "new.py")
    written = (tmp_path / "new.py").read_text(encoding="utf-8")
    assert written.startswith("# -*- coding: utf-8 -*-\n") and 'NAME = "café"' in written
    compile((tmp_path / "new.py").read_bytes(), "new.py", "exec")
