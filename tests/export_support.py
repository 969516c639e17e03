"""Model files that the tests of exported files share, and the comparison of `ModelNew` with `Model`."""

from __future__ import annotations

from pathlib import Path

import torch

from gemmnorm import export as exporting

EXAMPLES = Path(__file__).parents[1] / "examples"
# Around a class `Model(width)`: a model file of 24 inputs.
HEAD, INPUTS = (
    "import torch\nfrom torch import nn\n",
    "def get_inputs():\n    return [torch.randn(16, 24)]\ndef get_init_inputs():\n    return [24]\n",
)


def written(folder: Path, model: str) -> str:
    """The text of a written file of `model`, which stands between `HEAD` and `INPUTS`."""
    (folder / "model.py").write_text(HEAD + model + INPUTS)
    exporting.export(folder / "model.py", folder / "new.py")
    return (folder / "new.py").read_text()


NESTED = """
import torch
import torch.nn.functional as F
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.linear = nn.Linear(width, 24)
        self.gain = nn.Parameter(torch.randn(()))
        self.bn = nn.BatchNorm1d(24)

    def forward(self, x):
        return F.leaky_relu(self.bn(self.linear(x) * self.gain), 0.2)


class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.block = Block(width)
        self.head = nn.Sequential(nn.Linear(24, 16, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))

    def forward(self, x):
        return self.head(self.block(x))


def get_inputs():
    return [torch.randn(40, 32)]


def get_init_inputs():
    return [32]
"""


def compare(module, device: str, tolerance: float, batch: int = 40) -> None:
    """Model and ModelNew under one seed: names, outputs, gradients and buffers, in training and in evaluation."""
    arguments = module.get_init_inputs()
    torch.manual_seed(5)
    old = module.Model(*arguments).to(device)
    torch.manual_seed(5)
    new = module.ModelNew(*arguments).to(device)
    assert isinstance(new, module.Model)
    for (name, a), (other, b) in zip(old.state_dict().items(), new.state_dict().items(), strict=True):
        assert name == other and torch.equal(a, b)
    for training in (True, False):
        old.train(training), new.train(training)
        x = torch.randn(batch, module.get_inputs()[0].shape[1], device=device).to(module.get_inputs()[0].dtype)
        a, b = x.clone().requires_grad_(), x.clone().requires_grad_()
        ya, yb = old(a), new(b)
        grad = torch.randn_like(ya)
        ya.backward(grad), yb.backward(grad)
        close = {"rtol": tolerance, "atol": tolerance}
        torch.testing.assert_close(yb, ya, **close)
        torch.testing.assert_close(b.grad, a.grad, **close)
        for (name, p), q in zip(old.named_parameters(), new.parameters(), strict=True):
            torch.testing.assert_close(q.grad, p.grad, msg=lambda text, name=name: f"{name}: {text}", **close)
        for p, q in zip(old.buffers(), new.buffers(), strict=True):
            torch.testing.assert_close(q, p, **close)
        with torch.no_grad():
            torch.testing.assert_close(new(x), old(x), **close)


def small(path: Path, dtype: str = "bfloat16", batch: int = 256, features: int = 512) -> Path:
    """examples/small.py with another dtype, batch size or number of features."""
    text = (EXAMPLES / "small.py").read_text()
    for old, new in (
        ("momentum=momentum)\n", f"momentum=momentum)\n        self.to(torch.{dtype})\n"),
        ("torch.randn(batch_size, in_features)", f"torch.randn(batch_size, in_features).to(torch.{dtype})"),
        ("batch_size = 256", f"batch_size = {batch}"),
        ("out_features = 512", f"out_features = {features}"),
    ):
        assert text.count(old) == 1
        text = text.replace(old, new)
    path.write_text(text)
    return path


def hopper(folder: Path, strategy: str = "one_kernel", dtype: str = "bfloat16", batch: int = 256, features: int = 512):
    path = small(folder / f"small_{dtype}_{batch}.py", dtype, batch, features)
    return exporting.export(path, folder / f"{strategy}_{path.name}", strategy=strategy, target="sm_90")
