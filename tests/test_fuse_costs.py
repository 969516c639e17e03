"""What a call of a fused model asks, and what it leaves alone: no more than it has to."""

from __future__ import annotations

import copy
import linecache
from typing import Any

import pytest
import torch
from fuse_support import FEATURES, Written
from torch import Tensor, nn

import gemmnorm

X = torch.randn(5, FEATURES)


def h(self: Any, x: Tensor) -> Tensor:
    return self.bn(self.gemm(x))  # type: ignore[no-any-return]


def text_of(model: Any) -> str:
    """The fused `forward`."""
    return "".join(linecache.getlines(model._gemmnorm.forward.__code__.co_filename))


def assert_equal(fused: nn.Module, x: Tensor = X) -> None:
    plain = gemmnorm.unfuse(copy.deepcopy(fused))
    assert torch.equal(fused(x), plain(x))


# --- large containers are kept, not written down ---------------------------------------------------------------------

LARGE: dict[str, tuple[Any, Any, Any]] = {
    "a length": (lambda self, x: h(self, x) * len(self.held), {f"w{i}": i for i in range(5000)}, ("w0", 1)),
    "a member": (lambda self, x: h(self, x) * (2 if "w3" in self.held else 3), {f"w{i}": i for i in range(50)},
                 ("w4", 0)),
    "an item": (lambda self, x: h(self, x) * self.held[3], [float(i) for i in range(5000)], (3, 7.0)),
    "a list of lists": (lambda self, x: h(self, x) * self.held[3][0], [[float(i)] for i in range(50)], (3, [7.0])),
}  # fmt: skip


@pytest.mark.parametrize("name", LARGE)
def test_what_is_compared_with_is_made_once(name: str) -> None:
    forward, held, change = LARGE[name]
    model = Written(forward)
    model.held = copy.deepcopy(held)
    fused: Any = gemmnorm.fuse(model)
    assert len(text_of(fused)) < 1000
    assert_equal(fused)
    (call,) = fused._gemmnorm.calls
    assert call.fused == 1 and not call.unfused
    fused.held[change[0]] = change[1]
    assert_equal(fused)
    assert call.unfused


def test_a_small_container_is_written_down() -> None:
    model = Written(lambda self, x: h(self, x) * self.held[1])
    model.held = [1.0, 2.0]  # type: ignore[assignment]
    assert "unlike(self.held, [1.0, 2.0])" in text_of(gemmnorm.fuse(model))


def test_a_compiled_call_compares_with_what_is_kept() -> None:
    torch._dynamo.reset()
    model = Written(lambda self, x: h(self, x) * self.held["w3"] * self.few[1])
    model.held, model.few = {f"w{i}": i for i in range(30)}, (1.0, 2)  # type: ignore[assignment]
    fused = gemmnorm.fuse(copy.deepcopy(model))
    compiled = torch.compile(fused, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), model(X))
    fused.held["w3"] = model.held["w3"] = 5  # type: ignore[index, operator]
    torch.testing.assert_close(compiled(X), model(X))


# --- conditions of one mode ------------------------------------------------------------------------------------------


def stronger_in_training(self: Any, x: Tensor) -> Tensor:
    y = h(self, x)
    return y * self.gain if self.training else y * self.other


def test_a_mode_asks_only_what_it_needs() -> None:
    model = Written(stronger_in_training)
    model.gain, model.other = 2.0, 3.0  # type: ignore[assignment]
    fused: Any = gemmnorm.fuse(model)
    text = text_of(fused)
    assert "(self.training and (type(self.gain) is not float or self.gain != 2.0))" in text
    assert "(not self.training and (type(self.other) is not float or self.other != 3.0))" in text
    (call, *_) = fused._gemmnorm.calls
    for training, changed, unfused in ((False, "gain", 0), (True, "other", 1), (True, "gain", 2)):
        fused.train(training)
        setattr(fused, changed, 5.0)
        assert_equal(fused)
        assert sum(call.unfused.values()) == unfused


def test_a_key_that_only_training_reads_may_be_missing_in_evaluation() -> None:
    def forward(self: Any, batch: Any) -> Tensor:
        y = h(self, batch["x"])
        if self.training:
            return y - batch["y"] if batch["y"].dim() == 2 else y
        return y

    fused: Any = gemmnorm.fuse(Written(forward))
    fused.eval()({"x": X})
    (call,) = fused._gemmnorm.calls
    assert call.fused == 1 and not call.unfused
