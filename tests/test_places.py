"""The modules that a fused `forward` names are looked up once for a call, and found where the original finds them."""

from __future__ import annotations

import linecache
from typing import Any

import pytest
import torch
from support import step, stir, twin
from torch import Tensor, nn

import gemmnorm
from gemmnorm.fuse import places

X, GRAD = torch.randn(10, 6), torch.randn(10, 8)


class Blocks(nn.Module):
    """Two chains: one below a list, one below a dictionary; the second runs its ReLU again."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())])
        self.named = nn.ModuleDict({"gemm-1": nn.Linear(8, 8), "bn": nn.BatchNorm1d(8)})

    def forward(self, x: Tensor) -> Tensor:
        x = self.blocks[0](x)
        y: Tensor = self.blocks[0][2](self.named["bn"](self.named["gemm-1"](x)))
        return y


def text_of(model: Any) -> str:
    return "".join(linecache.getlines(model._gemmnorm.forward.__code__.co_filename))


def test_each_module_is_looked_up_once() -> None:
    original = stir(Blocks())
    fused: Any = gemmnorm.fuse(twin(original))
    text = text_of(fused)
    for name in ("blocks", "0", "2", "named", "gemm-1", "bn"):
        assert text.count(f"_modules[{name!r}]") == 1
    assert "self.blocks" not in text and "self.named" not in text
    got, want = step(fused, fused, X, GRAD), step(original, original, X, GRAD)
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor)
    assert fused._gemmnorm.calls[0].fused == 1


CHANGES: dict[str, Any] = {
    "another Linear": lambda m: m.named.update({"gemm-1": stir(nn.Linear(8, 8))}),
    "another ReLU": lambda m: m.blocks[0].__setitem__(2, nn.Tanh()),
    "one more block": lambda m: m.blocks.append(nn.Linear(6, 8)),
    "a list in its place": lambda m: setattr(m, "blocks", nn.ModuleList([nn.Linear(6, 8)])),
    "no Linear": lambda m: m.named.__setitem__("gemm-1", nn.Identity()),
    "a BatchNorm that is gone": lambda m: m.named.pop("bn"),
    "None": lambda m: setattr(m, "blocks", None),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_later_is_seen(name: str) -> None:
    torch.manual_seed(0)
    original = stir(Blocks())
    fused = gemmnorm.fuse(twin(original))
    fused(X)
    original(X)
    for model in (original, fused):
        torch.manual_seed(1)
        CHANGES[name](model)
    try:
        want = original(X)
    except Exception as error:
        with pytest.raises(type(error)) as raised:
            fused(X)
        assert str(raised.value) == str(error)
    else:
        torch.testing.assert_close(fused(X), want)


class OfItsOwn(nn.ModuleList):
    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(0)


class Shadowed(nn.Module):
    """Looks its children up in its own way."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = OfItsOwn([nn.Linear(6, 8), nn.Linear(6, 8)])
        self.norm = nn.BatchNorm1d(8)
        self._modules["linear"] = nn.Linear(6, 8)

    @property
    def linear(self) -> nn.Module:
        return self.layers._modules["1"]  # type: ignore[return-value]


def test_only_children_that_pytorch_looks_up() -> None:
    found = places.found(Shadowed(), "def forward(self, x):\n    return self.norm(self.linear(self.layers[1](x)))\n")
    assert found == {"self.norm": ("norm",), "self.layers": ("layers",)}


def test_an_index_is_a_place_and_not_a_name() -> None:
    layers = nn.Sequential()
    for name in ("1", "0", "2"):
        layers.add_module(name, nn.Linear(6, 6))
    found = places.found(layers, "def forward(self, x):\n    return self[2](self[1](self[0](x)))\n")
    assert found == {"self[2]": ("2",)}


def test_variables_take_no_name_of_the_text() -> None:
    source = "def forward(self, self_norm, *, self_norm_):\n    return self.norm(self_norm)\n"
    text = places.looked_up(source, {"self.norm": ("norm",)}, "return None")
    assert "self_norm__ = self._modules['norm']" in text and "return self_norm__(self_norm)" in text
