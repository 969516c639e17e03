"""Timing chains, models and their replacements, side by side in one process.

docs/benchmarking.md says what the figures mean.

Read in this order:

- `timing.py`       the clock: interleaved samples of several variants, with nothing timed but the computation
- `verdicts.py`     faster, slower, the same, undecidable: what samples allow to say
- `cases.py`        what is measured: sizes, precisions, phases, and the eager chain that is the peer
- `accuracy.py`     errors against float64, to stand beside a time
- `roofline.py`     FLOPs and bytes of a cell, and what the device reaches
- `cell.py`         one cell: bare GEMM, eager, torch.compile and every strategy → rows
- `spans.py`        kernel spans out of a profile, beside the events' times
- `cross_check.py`  kernel spans of a suite, in a process of their own
- `workers.py`      cells prepared in processes beside each other, and measured one at a time
- `suite.py`        a suite of cells → a result file
- `random_problems.py`  problems drawn from a seed, and what a result file of them says
- `model_files.py`  MODEL.py and replacements of it → a result file
- `products.py`     the matrix products of a model, for the bare GEMMs beside it
- `candidates.py`   every candidate of the planner beside the others
- `tuning.py`       what beats the planner's choices on this GPU → its table
- `comparison.py`   a result file against an older one
- `history.py`      a result over all older ones
- `environment.py`  facts about this machine
- `documents.py`    what every result file has in common, those of other commands too
"""

from . import random_problems
from .candidates import QueueClock
from .cases import CASES, PHASES, SUITES, select
from .cell import Options
from .comparison import check_comparable, compare
from .documents import SCHEMA, Document, command_line, new_document, write_json, write_text
from .environment import default_device, environment, major, nvcc_version, package_version
from .history import history
from .model_files import FileOptions, bench_files
from .suite import run_suite, tests_of
from .tuning import store_measured, tune

__all__ = [
    "CASES",
    "PHASES",
    "SCHEMA",
    "SUITES",
    "Document",
    "FileOptions",
    "Options",
    "QueueClock",
    "bench_files",
    "check_comparable",
    "command_line",
    "compare",
    "default_device",
    "environment",
    "history",
    "major",
    "new_document",
    "nvcc_version",
    "package_version",
    "random_problems",
    "run_suite",
    "select",
    "store_measured",
    "tests_of",
    "tune",
    "write_json",
    "write_text",
]
