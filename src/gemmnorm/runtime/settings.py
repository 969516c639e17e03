"""Settings that every call looks at: the planner's, and environment variables.

`os.environ.get` takes a microsecond, mostly to raise and catch, and a call may ask three times.
"""

from __future__ import annotations

import os
from typing import Any

from ..plan import choice
from .traced import traced_as_constant

# The dictionary behind `os.environ`, which has every change at once (docs/private_api.md).
_environment: dict[Any, Any] | None = getattr(os.environ, "_data", None)
_keys: dict[str, Any] = {}


def variable(name: str) -> str | None:
    """The value of an environment variable, or None."""
    if _environment is not None:
        key = _keys.get(name)
        if key is None:
            key = _keys[name] = os.environ.encodekey(name)  # type: ignore[attr-defined]
        if key not in _environment:
            return None
    return os.environ.get(name)


def settings() -> tuple[Any, ...]:
    """What `plan.check_strategy` and `plan.check_keep_product` decide by, to be compared with an earlier call's."""
    return choice._requested, choice._keep_product, variable("GEMMNORM_STRATEGY"), variable("GEMMNORM_KEEP_PRODUCT")


@traced_as_constant
def strategy_of_environment() -> str | None:
    """`GEMMNORM_STRATEGY`, for a trace."""
    return variable("GEMMNORM_STRATEGY") or None


@traced_as_constant
def keep_product_of_environment() -> bool | None:
    """`GEMMNORM_KEEP_PRODUCT`, for a trace where nothing goes before it."""
    return choice.check_keep_product(None)


def traced(strategy: str | None, keep_product: bool | None) -> tuple[str | None, bool | None]:
    """Strategy and `keep_product` that a call asks for, as its graph holds them, for Dynamo to follow.

    It guards the settings that it reads, so that another setting is another graph; and a cache on the disk tells graphs
    apart by what they hold.
    """
    strategy = strategy or choice._requested or strategy_of_environment()
    keep_product = choice._keep_product if keep_product is None else keep_product
    return strategy, keep_product_of_environment() if keep_product is None else keep_product
