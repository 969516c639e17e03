"""Dropout that drops nothing, so that two models which draw random numbers in training can be compared.

A mask depends on dtype, device and the order of draws, so a float64 run of a model never draws its own run's mask. One
draw is the same wherever a model drops and whatever the order: that which keeps every element. What is kept is scaled,
by 1/(1 − p), so that a replacement which forgets this factor computes something else. That draw is compared, and what
each model would have dropped.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# Owners of functions that take (input, p, training); torch's own call the third one `train`.
_FUNCTIONS = {
    F: ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout", "feature_alpha_dropout"),
    torch: ("dropout", "dropout_", "alpha_dropout", "alpha_dropout_", "feature_dropout", "feature_dropout_",
            "feature_alpha_dropout", "feature_alpha_dropout_"),
}  # fmt: skip
_ATTENTION = "scaled_dot_product_attention"  # what nn.MultiheadAttention and the Transformer layers call, too
_ELEMENTS = "elements"
_ALPHA = 1.7580993408473766  # alpha dropout puts −α in place of what it drops, as PyTorch has it
DROPOUT_NOTE = "dropout kept every element in both models while their results were compared"

_drops: list[tuple[str, float, int]] = []  # kind, probability, elements
_compiled: list[str] = []  # functions that dropped in a compiled model
_standing: list[Any] = []  # the functions that are in the place of PyTorch's now


def is_seen() -> bool:
    """Whether `would_drop` has seen every dropout since they drop nothing: it sees none of a compiled model."""
    return not _compiled


def stands_in(function: object) -> bool:
    """`without_dropout` has put `function` in the place of one of PyTorch's."""
    return any(function is one for one in _standing)


@contextlib.contextmanager
def would_drop() -> Iterator[Counter[tuple[str, float]]]:
    """What dropouts that keep all would have dropped meanwhile: (kind, probability) → elements it is drawn for.

    Those of attention count by the weights' elements, whoever multiplies them; recurrent modules by their calls. It is
    there at the end; one inside of another takes the first part from that.
    """
    counter: Counter[tuple[str, float]] = Counter()
    _drops.clear()
    yield counter
    for kind, p, elements in _drops:
        counter[kind, round(float(p), 6)] += int(elements)
    _drops.clear()


@contextlib.contextmanager
def without_dropout() -> Iterator[list[str]]:
    """While active, the dropouts of `torch`, `torch.nn` and `torch.nn.functional` draw nothing, and keep every element.

    They scale it as they scale what they keep; attention's too. Those of recurrent modules leave everything as it is.
    Yields a list of the functions that would have dropped something; it is empty where there were none.
    """
    used: list[str] = []
    _compiled.clear()

    def note(name: str, p: float, kind: str, of: Any, elements: int) -> None:
        if p > 0:
            fake = isinstance(of, Tensor) and type(of) not in (Tensor, nn.Parameter)
            if fake or torch.compiler.is_compiling():
                _compiled.append(name)
            else:
                _drops.append((kind, p, elements))
            if name not in used:
                used.append(name)

    instead: dict[tuple[Any, str], Any]
    instead = {(owner, name): _keep(owner, name, note) for owner, names in _FUNCTIONS.items() for name in names}
    instead[F, _ATTENTION] = _attend(getattr(F, _ATTENTION), note)
    instead |= {(kind, "forward"): _recur(kind.forward, kind.__name__, note) for kind in (nn.RNN, nn.GRU, nn.LSTM)}
    before = {(owner, name): getattr(owner, name) for owner, name in instead}
    for (owner, name), function in instead.items():
        setattr(owner, name, function)
    outside, _standing[:] = [*_standing], instead.values()
    try:
        yield used
    finally:
        _standing[:] = outside
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def _keep(owner: Any, name: str, note: Callable[..., None]) -> Callable[..., Any]:
    of_channels, alpha = "feature" in name or name.endswith("d"), "alpha" in name
    kind = _ELEMENTS + " by channels" * of_channels + " (alpha dropout)" * alpha
    usual = not (alpha and owner is F)  # what PyTorch takes for `training` where it is not given

    def kept(input: Any, p: float = 0.5, training: bool = usual, inplace: bool = False, *, train: bool = True) -> Any:
        p = p if training and train else 0
        note(name, p, kind, input, input.numel())
        if p == 0:
            return input
        factor, shift = _scale(p), 0.0
        if alpha and p < 1:
            factor = ((_ALPHA**2 * p + 1) * (1 - p)) ** -0.5
            shift = _ALPHA * factor * p
        scaled = input.mul_(factor) if inplace or name.endswith("_") else input * factor
        return (scaled.add_(shift) if scaled is input else scaled + shift) if shift else scaled

    return kept


def _scale(p: float) -> float:
    """The factor of what is kept; where nothing ever is, all becomes zero."""
    return 1 / (1 - p) if p < 1 else 0.0


def _attend(attention: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def whole(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
              **more: Any) -> Any:  # fmt: skip
        note(_ATTENTION, dropout_p, _ELEMENTS, query, query.shape[:-1].numel() * key.shape[-2])
        result = attention(query, key, value, attn_mask, 0.0, *rest, **more)
        return result * _scale(dropout_p) if dropout_p > 0 else result

    return whole


def _recur(forward: Callable[..., Any], name: str, note: Callable[..., None]) -> Callable[..., Any]:
    def whole(module: Any, *inputs: Any, **more: Any) -> Any:
        drops = module.training and module.num_layers > 1
        note(name, module.dropout if drops else 0, f"calls of {name}", inputs[0] if inputs else None, 1)
        p, module.dropout = module.dropout, 0.0
        try:
            return forward(module, *inputs, **more)
        finally:
            module.dropout = p

    return whole
