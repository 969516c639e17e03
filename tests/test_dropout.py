"""Models with dropout are ordinary: they are judged by the draw that keeps every element, and that is said."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from gemmnorm.userfiles import DROPOUT_NOTE, is_seen, without_dropout, would_drop
from gemmnorm.verify.answer import check_files

pytestmark = pytest.mark.usefixtures("warm_processes")

TABULAR = """
import torch
from torch import nn


class {name}(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 24), nn.BatchNorm1d(24), nn.ReLU(), nn.Dropout(0.3), nn.Linear(24, 4))

    def forward(self, x):
        return {result}


def get_inputs():
    return [torch.randn(32, 16)]


def get_init_inputs():
    return []
"""


def test_dropout_draws_nothing_while_it_is_off() -> None:
    x, state = torch.ones(8), torch.get_rng_state()
    with without_dropout() as used:
        assert torch.equal(nn.Dropout(0.5)(x), 2 * x) and torch.allclose(F.dropout(x, 0.9), 10 * x)
        F.alpha_dropout(x, 0.5, training=True)
    assert used == ["dropout", "alpha_dropout"] and torch.equal(torch.get_rng_state(), state)
    with without_dropout() as used:
        nn.Dropout(0.5).eval()(x), nn.Dropout(0.0)(x)
    assert not used
    assert not torch.equal(F.dropout(torch.ones(1000)), torch.ones(1000))


DROPOUTS = {
    "dropout": lambda x: F.dropout(x, 0.3),
    "channels": lambda x: F.dropout2d(x, 0.3),
    "alpha": lambda x: F.alpha_dropout(x, 0.3, training=True),
    "alpha by channels": lambda x: torch.feature_alpha_dropout(x, 0.3, True),
    "in place": lambda x: F.dropout(x, 0.3, True, True),
    "PyTorch's in place": lambda x: torch.alpha_dropout_(x, 0.3, True),
}


@pytest.mark.parametrize("name", DROPOUTS)
def test_what_is_kept_is_what_pytorch_keeps(name: str) -> None:
    """The draw that keeps every element is right in all that any draw keeps."""
    x, kept = torch.rand(4, 60, 2, 3) + 1, torch.rand(4, 60, 2, 3) + 1
    kept.copy_(x)
    with without_dropout():
        all_kept = DROPOUTS[name](kept)
    drawn = DROPOUTS[name](x.clone())
    same = (drawn - all_kept).abs() < 1e-5
    assert 0.5 < same.double().mean() < 0.9
    assert (all_kept is kept) == ("in place" in name)


@pytest.mark.parametrize("training", [True, False])
def test_a_probability_of_one_or_none(training: bool) -> None:
    x = torch.ones(3, 4)
    calls = [
        lambda p: F.dropout(x, p, training),
        lambda p: F.alpha_dropout(x, p, training),
        lambda p: F.alpha_dropout(x),
    ]
    for call in calls:
        expected = call(1.0), call(0.0)
        with without_dropout():
            assert torch.equal(call(1.0), expected[0]) and torch.equal(call(0.0), expected[1])


def test_attention_is_scaled_by_what_its_weights_keep() -> None:
    q = torch.randn(2, 5, 8)
    plain = F.scaled_dot_product_attention(q, q, q)
    with without_dropout():
        assert torch.allclose(F.scaled_dot_product_attention(q, q, q, None, 0.2), plain / 0.8)
        attention = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)
        assert torch.allclose(attention(q, q, q)[0], attention(q, q, q, need_weights=False)[0], atol=1e-6)


def test_a_model_with_dropout_is_verified(tmp_path: Path) -> None:
    model, same, other = (tmp_path / name for name in ("model.py", "same.py", "other.py"))
    model.write_text(TABULAR.format(name="Model", result="self.net(x)"))
    same.write_text(TABULAR.format(name="ModelNew", result="self.net(x)"))
    other.write_text(TABULAR.format(name="ModelNew", result="self.net(x) * 1.01"))
    answer = check_files(str(model), str(same), 1, "cpu")
    assert answer["equal"] and DROPOUT_NOTE in answer["warnings"]
    assert not check_files(str(model), str(other), 1, "cpu")["equal"]


@pytest.mark.parametrize(
    ("result", "told"),
    [
        ("F.relu(y)", "drops nothing in training, the original 0.25 of"),
        ("F.dropout(F.relu(y), 0.1, self.training)", "drops 0.1 of"),
        ("F.dropout(F.relu(y), 0.25)", "in evaluation, the original nothing"),
        ("self.drop(self.drop(F.relu(y)))", "drops 0.25 of"),
        ("F.dropout1d(F.relu(y), 0.25, self.training)", "elements by channels in training"),
        ("torch.feature_alpha_dropout(F.relu(y), 0.25, self.training)", "elements by channels (alpha dropout)"),
        ("F.relu(y) * (self.drop(torch.ones_like(y)) > 0)", "without the factor 1/(1 - p) of its dropout, p = 0.25"),
        ("F.relu(y) * (self.drop(torch.ones_like(y)) > 0) / (0.75 if self.training else 1)", ""),
        ("F.relu(y) * self.drop(torch.ones_like(y))", ""),
        ("F.relu(self.drop(y))", ""),
        ("torch.dropout(F.relu(y), 0.25, self.training)", ""),
        ("nn.Dropout(0.25).train(self.training)(F.relu(y))", ""),
    ],
)
def test_what_is_dropped_belongs_to_the_function(tmp_path: Path, result: str, told: str) -> None:
    model, new = Path(__file__).parent / "traps" / "model_dropout.py", tmp_path / "new.py"
    text = model.read_text().replace("class Model(", "class ModelNew(")
    assert text.count("return self.drop(F.relu(self.bn(self.gemm(x))))") == 1
    new.write_text(
        text.replace(
            "return self.drop(F.relu(self.bn(self.gemm(x))))", f"y = self.bn(self.gemm(x))\n        return {result}"
        )
    )
    answer = check_files(str(model), str(new), 1, "cpu", "quick")
    assert answer["equal"] == (not told), answer["reason"]
    if told:
        assert answer["fault"]["class"] == "dropout" and told in answer["fault"]["sentence"]


def test_what_a_compiled_model_drops_is_not_seen() -> None:
    compiled = torch.compile(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)), backend="aot_eager", fullgraph=True)
    with without_dropout():
        with would_drop():
            F.dropout(torch.ones(4))
        assert is_seen()
        for rows in (4, 4, 5):
            with would_drop() as counter:
                compiled(torch.ones(rows, 8))
            assert not counter and not is_seen()
    with without_dropout():
        assert is_seen()


def test_a_compiled_replacement_may_drop_as_the_original(tmp_path: Path) -> None:
    model, new = Path(__file__).parent / "traps" / "model_dropout.py", tmp_path / "new.py"
    compiled = "class ModelNew(Model):\n    def __init__(self, *sizes):\n        super().__init__(*sizes)\n"
    compiled += "        self.compile(backend='aot_eager')\n"
    new.write_text(model.read_text() + "\n\n" + compiled)
    answer = check_files(str(model), str(new), 1, "cpu", "quick")
    assert answer["equal"], answer["reason"]
    assert answer["properties"]["one_backward"] == any("second backward" in said for said in answer["warnings"])


def test_dropout_of_attention_counts_by_its_weights() -> None:
    x = torch.randn(2, 5, 8)
    attention = nn.MultiheadAttention(8, 2, dropout=0.25, batch_first=True)
    with without_dropout():
        for needs_weights in (True, False):
            with would_drop() as counter:
                attention(x, x, x, need_weights=needs_weights)
            assert counter == {("elements", 0.25): 2 * 2 * 5 * 5}
        with would_drop() as counter:
            attention.eval()(x, x, x)
        assert not counter
