"""What a program finds of a module besides its values: the inputs' names, hooks, pickling, the outputs' strides.

The judge looks at the original and the candidate's process at the candidate; what only the original has is reported,
and not demanded.
"""

from __future__ import annotations

import contextlib
import inspect
import pickle
from collections.abc import Mapping, Sequence
from typing import IO, Any, cast

import torch
from torch import nn

from .outputs import take_apart

__all__ = ["conventions", "lacking"]

_WRITTEN = 1 << 24  # elements of a state that are pickled for this


def conventions(model: nn.Module, inputs: Sequence[Any]) -> dict[str, Any]:
    """Call a model as it is, in evaluation, without autograd.

    arguments  the names of forward's parameters; null where it takes any
    hooks      names of the modules whose forward hooks the call runs, "" for the model itself
    pickle     what pickling the model raises; "" where it raises nothing, null for large models
    strides    of each output, 0 for a dimension of one element; null where it raises with hooks
    """
    ran: set[str] = set()

    def record(name: str) -> Any:
        return lambda *_: ran.add(name)

    strides = None
    with contextlib.ExitStack() as hooks, contextlib.suppress(Exception), torch.no_grad():  # it may refuse hooks
        for name, module in model.named_modules():
            hooks.callback(module.register_forward_hook(record(name)).remove)
        outputs = take_apart(model(*inputs)).tensors
        strides = [[s if size > 1 else 0 for s, size in zip(y.stride(), y.shape, strict=True)] for y in outputs]
    return {"arguments": _arguments(model), "hooks": sorted(ran), "pickle": _pickle(model), "strides": strides}


def lacking(original: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What only the original has, as properties of a candidate.

    other_arguments  names of its inputs, where the original's are not among them; hooks_not_run  names of modules;
    pickle_raises    what pickling it raises; other_strides  [own, original's] of the outputs; each empty where none
    """
    known, wanted = own["arguments"], original["arguments"]
    renamed = known is not None and wanted is not None and not {*wanted} <= {*known}
    strides = [own["strides"], original["strides"]]
    return {
        "other_arguments": known if renamed else [],
        "hooks_not_run": sorted({*original["hooks"]} - {*own["hooks"]}),
        "pickle_raises": own["pickle"] or "" if original["pickle"] == "" else "",
        "other_strides": [] if None in strides or strides[0] == strides[1] else strides,
    }


def _arguments(model: nn.Module) -> list[str] | None:
    try:
        parameters = inspect.signature(model.forward).parameters.values()
    except (TypeError, ValueError):
        return None
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]


class _Nowhere:
    """A file that keeps nothing."""

    @staticmethod
    def write(data: bytes) -> int:
        return len(data)


def _pickle(model: nn.Module) -> str | None:
    if sum(value.numel() for value in model.state_dict().values()) > _WRITTEN:
        return None
    try:
        pickle.dump(model, cast(IO[bytes], _Nowhere()))
    except Exception as error:
        return f"{type(error).__name__}: {error}".splitlines()[0]
    return ""
