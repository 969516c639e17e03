"""The environment variables that gemmnorm reads, and what is wrong with those that are set."""

from __future__ import annotations

import os
from typing import NamedTuple

from ..errors import GemmNormValueError
from ..plan import STRATEGIES
from ..runtime.arithmetic import ARITHMETICS, VARIABLE

# The values of each; (): any text. An empty variable is none.
VALUES: dict[str, tuple[str, ...]] = {
    "GEMMNORM_CACHE_DIR": (),
    VARIABLE: ARITHMETICS,
    "GEMMNORM_KEEP_PRODUCT": ("0", "1", "auto"),
    "GEMMNORM_PEERS": ("0", "1"),
    "GEMMNORM_STRATEGY": STRATEGIES,
}


class Variable(NamedTuple):
    """A variable that is set. expected: in words, where it has another value; `read`: gemmnorm knows the name."""

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
            values = VALUES.get(name)
            wrong = values and value not in values
            found.append(Variable(name, value, ", ".join(values) if values and wrong else None, values is not None))
    return tuple(found)


def check_variables() -> None:
    """Raises: GemmNormValueError: a variable has a value that would be refused wherever it is read."""
    for name, value, expected, _ in variables():
        if expected is not None:
            raise GemmNormValueError(f"{name}: expected one of {expected}; got {value!r}")
