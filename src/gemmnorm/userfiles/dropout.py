"""Dropout switched off, so that two models which draw random numbers in training can be compared.

A mask depends on dtype, device and the order of draws, so a float64 run of a model never draws its own run's mask. What
a replacement changes has nothing to do with it: without dropout both compute one function, and that is compared; and
what each would have dropped.
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
DROPOUT_NOTE = "dropout was switched off in both models while their results were compared"

_drops: list[tuple[str, float, int]] = []  # kind, probability, elements
_compiled: list[str] = []  # functions that dropped in a compiled model


def is_seen() -> bool:
    """Whether `would_drop` has seen every dropout since they were switched off: it sees none of a compiled model."""
    return not _compiled


@contextlib.contextmanager
def would_drop() -> Iterator[Counter[tuple[str, float]]]:
    """What dropouts that are switched off would have dropped meanwhile: (kind, probability) → elements it is drawn for.

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
    """While active, the dropouts of `torch`, `torch.nn` and `torch.nn.functional` keep everything and draw nothing.

    Those of attention and of recurrent modules are among them. Yields a list of the functions that would have dropped
    something; it is empty where there were none.
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
    instead = {(owner, name): _keep(name, note) for owner, names in _FUNCTIONS.items() for name in names}
    instead[F, _ATTENTION] = _attend(getattr(F, _ATTENTION), note)
    instead |= {(kind, "forward"): _recur(kind.forward, kind.__name__, note) for kind in (nn.RNN, nn.GRU, nn.LSTM)}
    before = {(owner, name): getattr(owner, name) for owner, name in instead}
    for (owner, name), function in instead.items():
        setattr(owner, name, function)
    try:
        yield used
    finally:
        for (owner, name), function in before.items():
            setattr(owner, name, function)


def _keep(name: str, note: Callable[..., None]) -> Callable[..., Any]:
    of_channels = "feature" in name or name.endswith("d")
    kind = _ELEMENTS + " by channels" * of_channels + " (alpha dropout)" * ("alpha" in name)

    def same(input: Any, p: float = 0.5, training: bool = True, inplace: bool = False, *, train: bool = True) -> Any:
        note(name, p if training and train else 0, kind, input, input.numel())
        return input

    return same


def _attend(attention: Callable[..., Any], note: Callable[..., None]) -> Callable[..., Any]:
    def whole(query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *rest: Any,
              **more: Any) -> Any:  # fmt: skip
        note(_ATTENTION, dropout_p, _ELEMENTS, query, query.shape[:-1].numel() * key.shape[-2])
        return attention(query, key, value, attn_mask, 0.0, *rest, **more)

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
