"""What every result file has in common: its head, and how it is written."""

from __future__ import annotations

import datetime
import json
import os
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

SCHEMA = 1
Document = dict[str, Any]


def new_document(kind: str, **fields: Any) -> Document:
    """A document of this kind, created now. `gemmnorm report` renders it by its kind."""
    return {"schema": SCHEMA, "kind": kind, "created": now(), **fields}


def now() -> str:
    """The time in UTC, to the second, as ISO 8601."""
    return datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds")


def write_json(path: str | Path, document: Document) -> None:
    """Write `document` whole or not at all.

    NaN and Infinity become strings: JSON has no such numbers, and other readers refuse Python's.
    """
    write_text(path, json.dumps(_plain(document), indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def write_text(path: str | Path, text: str) -> None:
    """Write `text` so that `path` never holds half of it: under a temporary name beside it, then renamed.

    What a link leads to is replaced, not the link.
    """
    path = Path(path).resolve()
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8", errors="surrogateescape") as file:
            file.write(text)
        umask = os.umask(0)
        os.umask(umask)
        os.chmod(temporary, 0o666 & ~umask)  # mkstemp makes files that nobody else may read
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return str(value)
    return value


def command_line() -> str:
    """The command that is running, as one could type it anywhere: of an absolute path the name alone."""
    return shlex.join(["gemmnorm", *(Path(a).name if Path(a).is_absolute() else a for a in sys.argv[1:])])
