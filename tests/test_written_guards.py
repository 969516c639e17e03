"""What a written file does with a model that is not, or is no longer, the one that it was written for."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from export_support import written
from torch import Tensor, nn

import gemmnorm
from gemmnorm.errors import GemmNormValueError
from gemmnorm.export.hub import check_hub_folder

ONE = """
class Model(nn.Module):
    def __init__(self, width, act="leaky_relu", shape=(24,)):
        super().__init__()
        self.lin, self.bn = nn.Linear(width, 24), nn.BatchNorm1d(24)
        self.act = {"leaky_relu": nn.LeakyReLU(0.2), "steeper": nn.LeakyReLU(0.3), "tanh": nn.Tanh()}[act]
        self.scale = nn.Parameter(torch.rand(shape) + 0.5)
    def forward(self, x):
        return self.act(self.bn(self.lin(x) * self.scale))
"""
BY_DEPTH = {
    "a sequence": '''
class Model(nn.Sequential):
    def __init__(self, width, depth=2):
        layers = []
        for _ in range(depth):
            layers += [nn.Linear(width, width), nn.BatchNorm1d(width), nn.ReLU()]
        super().__init__(*layers)
''',
    "two lists": '''
class Model(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.fc = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.bn = nn.ModuleList(nn.BatchNorm1d(width) for _ in range(depth))
    def forward(self, x):
        for i in range(len(self.fc)):
            x = self.bn[i](self.fc[i](x))
        return x
''',
    "blocks": '''
class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.lin, self.bn = nn.Linear(width, width), nn.BatchNorm1d(width)
    def forward(self, x):
        return torch.relu(self.bn(self.lin(x)))
class Model(nn.Module):
    def __init__(self, width, depth=2):
        super().__init__()
        self.blocks = nn.ModuleDict({f'say "{i}" \\\\': Block(width) for i in range(depth)})
    def forward(self, x):
        for block in self.blocks.values():
            x = block(x)
        return x
''',
}  # fmt: skip


def loaded(text: str) -> dict[str, Any]:
    space: dict[str, Any] = {"__name__": "written"}
    exec(compile(text, "new.py", "exec"), space)
    return space


@pytest.fixture(scope="module")
def would_launch(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bool]:
    """Whether a file's kernels would run on a GPU: of the file as it is, but for the device."""
    text = written(tmp_path_factory.mktemp("one"), ONE)
    assert text.count("x.is_cuda and ") == 1
    space, said = loaded(text.replace("x.is_cuda and ", "")), []

    class Kernels:
        def __getattr__(self, name: str) -> Callable[..., list[Tensor]]:
            said.append(name)
            return lambda x, *_: [x]

    space["_kernels_for"] = lambda _: Kernels()

    def asked(*arguments: Any, change: Callable[[Any], Any] = lambda _: None) -> bool:
        said.clear()
        module = space["ModelNew"](24, *arguments)
        change(module)
        with torch.no_grad():
            module.eval()(torch.randn(16, 24))
        return bool(said)

    return asked


def test_the_kernels_run_for_what_the_file_was_written_for(would_launch: Callable[..., bool]) -> None:
    assert would_launch() and would_launch("leaky_relu", (1, 24)) and would_launch("leaky_relu", (1,))


@pytest.mark.parametrize("arguments", [("tanh",), ("steeper",), ("leaky_relu", (16, 1)), ("leaky_relu", (16, 24))])
def test_other_arguments_of_the_constructor(arguments: tuple[Any, ...], would_launch: Callable[..., bool]) -> None:
    assert not would_launch(*arguments)


@pytest.mark.parametrize(
    "change",
    [
        lambda m: setattr(m, "act", nn.Tanh()),
        lambda m: setattr(m.act, "negative_slope", 0.5),
        lambda m: setattr(m, "bn", nn.Identity()),
        lambda m: setattr(m, "lin", nn.Sequential(m.lin)),
        lambda m: m.act.register_forward_hook(lambda *_: None),
        lambda m: m.bn.register_full_backward_pre_hook(lambda *_: None),
        lambda m: setattr(m.lin, "forward", lambda x: x),
    ],
    ids=["activation", "its slope", "norm", "linear", "hook of the activation", "backward pre-hook", "forward"],
)
def test_a_child_that_was_changed(change: Callable[[Any], Any], would_launch: Callable[..., bool]) -> None:
    assert not would_launch(change=change)


@pytest.mark.parametrize("name", BY_DEPTH)
def test_another_depth_than_that_of_the_file(name: str, tmp_path: Path) -> None:
    space = loaded(written(tmp_path, BY_DEPTH[name]))
    for depth in (1, 2, 3):
        found = []
        for cls in (space["Model"], space["ModelNew"]):
            torch.manual_seed(0)
            found.append(cls(24, depth))
        x = torch.randn(16, 24)
        torch.testing.assert_close(found[1](x), found[0](x))
        assert isinstance(found[1], space["ModelNew"]) and list(found[0].state_dict()) == list(found[1].state_dict())


def test_two_exports_are_the_same_text(tmp_path: Path) -> None:
    """What a forward compares by its identity has a number for a name, not its address."""
    model = '''
import dataclasses
@dataclasses.dataclass
class Config:
    slope: float = 0.1
class Model(nn.Module):
    config = Config()
    def __init__(self, width):
        super().__init__()
        self.lin, self.bn = nn.Linear(width, 24), nn.BatchNorm1d(24)
    def forward(self, x):
        return self.bn(self.lin(x) * self.config.slope)
'''  # fmt: skip
    texts = [written(tmp_path, model) for _ in range(2)]
    assert texts[0] == texts[1] and "held_Config_1" in texts[0]


def test_what_a_link_leads_to_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "new.py").symlink_to(tmp_path / "elsewhere" / "new.py")
    text = written(tmp_path, ONE)
    assert (tmp_path / "new.py").is_symlink() and (tmp_path / "elsewhere" / "new.py").read_text() == text


@pytest.mark.parametrize("name", ["class", "torch", "json"])
def test_the_name_of_a_hub_folder_is_free_for_a_package(name: str, tmp_path: Path) -> None:
    with pytest.raises(GemmNormValueError, match="free for a package"):
        check_hub_folder(tmp_path / name)


def test_the_source_of_an_activation_names_its_modules() -> None:
    for name, text in {
        None: "None", "relu": "((torch.nn.ReLU,), ())", "gelu_tanh": "((torch.nn.GELU,), (('approximate', 'tanh'),))",
        "relu6": "((torch.nn.Hardtanh, torch.nn.ReLU6,), (('min_val', 0.0), ('max_val', 6.0),))",
    }.items():  # fmt: skip
        assert gemmnorm.activations.module_source(name) == text
        classes, attributes = eval(text) or ((), ())
        for cls in classes:
            module = cls(*([] if cls is nn.ReLU6 else [value for _, value in attributes]))
            assert gemmnorm.activations.from_module(module) == gemmnorm.activations.canonical(name)
