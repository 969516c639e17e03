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
    raised     what the call raises with these hooks; "" where it raises nothing
    pickle     what pickling the model raises; "" where it raises nothing, null for large models
    strides    of each output, 0 for a dimension of one element; null where it raises with hooks
    """
    ran: set[str] = set()

    def record(name: str) -> Any:
        return lambda *_: ran.add(name)

    strides, raised = None, ""
    with contextlib.ExitStack() as hooks, torch.no_grad():
        try:
            for name, module in model.named_modules():
                hooks.callback(module.register_forward_hook(record(name)).remove)
            outputs = take_apart(model(*inputs)).tensors
            strides = [[s if size > 1 else 0 for s, size in zip(y.stride(), y.shape, strict=True)] for y in outputs]
        except Exception as error:
            raised = _in_a_line(error)
    return {
        "arguments": _arguments(model), "hooks": sorted(ran), "raised": raised, "pickle": _pickle(model),
        "strides": strides,
    }  # fmt: skip


def lacking(original: Mapping[str, Any], own: Mapping[str, Any]) -> dict[str, Any]:
    """What only the original has, as properties of a candidate.

    missing_arguments  names of the original's inputs that a call of it may not use; hooks_not_run  names of modules;
    hooks_raise        what a call with hooks raises; pickle_raises  what pickling it raises; other_strides  [own,
                       original's] of the outputs; each empty where there is nothing to say
    """
    known, wanted = own["arguments"], original["arguments"] or ()
    strides = [own["strides"], original["strides"]]
    return {
        "missing_arguments": [] if known is None else [name for name in wanted if name not in known],
        "hooks_not_run": [] if own["raised"] else sorted({*original["hooks"]} - {*own["hooks"]}),
        "hooks_raise": "" if original["raised"] else own["raised"],
        "pickle_raises": (own["pickle"] or "") if original["pickle"] == "" else "",
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
        return _in_a_line(error)
    return ""


def _in_a_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
