"""Settings that every call looks at: the planner's, and environment variables.

`os.environ.get` takes a microsecond, mostly to raise and catch, and a call may ask three times.
"""

from __future__ import annotations

import os
from typing import Any

from ..plan import choice

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
