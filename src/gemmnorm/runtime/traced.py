"""What Dynamo asks once, while it traces, and takes for a constant."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def traced_as_constant(ask: Callable[P, R]) -> Callable[P, R]:
    """`ask`, which a trace calls instead of following it: its answer then is a constant of the graph, without a guard.

    All that `torch.compiler.assume_constant_result` does after importing Dynamo, which takes longer than `gemmnorm`
    (docs/private_api.md). Dynamo of 2.4 puts the answer among the globals of the frame that it compiles, under the name
    of the function's code, so that this must be nobody's.
    """
    ask.__code__ = ask.__code__.replace(co_name=f"_gemmnorm_{ask.__name__}_as_traced")
    ask._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return ask
