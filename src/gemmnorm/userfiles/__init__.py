"""Running files that users bring: MODEL.py and its replacements, in a process of their own.

- `model_file.py`  a problem file → its `Model`, inputs and constructor arguments; errors that name the file
- `dropout.py`     dropout that keeps every element while two models are compared
- `originals.py`   functions of PyTorch's that a file has put others in the place of
- `isolate.py`     one function in a fresh interpreter, under a time limit; how it ended
- `bare.py`        an object in a process that holds nothing of its caller
- `serving.py`     the other side of it

`export`, `verify`, `bench` and `cli` stand on this; it knows none of them.
"""

from .bare import Bare, BareCallError, BareProcessError
from .dropout import DROPOUT_NOTE, is_seen, without_dropout, would_drop
from .isolate import Outcome, how_it_died, progress, run_isolated
from .model_file import (
    PRECISIONS,
    ModelFile,
    ModelFileError,
    load_candidate_file,
    load_model_file,
    load_source,
)
from .originals import functions, replaced

__all__ = [
    "DROPOUT_NOTE",
    "PRECISIONS",
    "Bare",
    "BareCallError",
    "BareProcessError",
    "ModelFile",
    "ModelFileError",
    "Outcome",
    "functions",
    "how_it_died",
    "is_seen",
    "load_candidate_file",
    "load_model_file",
    "load_source",
    "progress",
    "replaced",
    "run_isolated",
    "without_dropout",
    "would_drop",
]
