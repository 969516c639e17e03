"""The environment variables that gemmnorm reads, and what is wrong with those that are set."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..errors import GemmNormValueError
from ..plan import STRATEGIES
from ..runtime.arithmetic import ARITHMETICS, VARIABLE

# The values of each; (): any text (GEMMNORM_PEERS is off at 0, and on at all else). An empty variable is none.
VALUES: dict[str, tuple[str, ...]] = {
    "GEMMNORM_CACHE_DIR": (),
    VARIABLE: ARITHMETICS,
    "GEMMNORM_KEEP_PRODUCT": ("0", "1", "auto"),
    "GEMMNORM_PEERS": (),
    "GEMMNORM_STRATEGY": STRATEGIES,
}


class Variable(NamedTuple):
    """A variable that is set.

    expected  what it may be, in words, where it is something else
    read      gemmnorm reads a variable of this name
    """

    name: str
    value: str
    expected: str | None = None
    read: bool = True


def variables() -> tuple[Variable, ...]:
    """All that are set and whose names begin with GEMMNORM_, by name."""
    found = []
    for name in sorted(os.environ):
        value = os.environ[name]
        if name.startswith("GEMMNORM_") and value:
            allowed = VALUES.get(name, ())
            expected = ", ".join(allowed) if allowed and value not in allowed else None
            found.append(Variable(name, value, expected, name in VALUES))
    return tuple(found)


def check_variables() -> None:
    """Refuse a value that calls would refuse.

    Raises:
        GemmNormValueError: names the variable, what is allowed and what it is.
    """
    for name, value, expected, _ in variables():
        if expected is not None:
            raise GemmNormValueError(f"{name}: expected one of {expected}; got {value!r}")
