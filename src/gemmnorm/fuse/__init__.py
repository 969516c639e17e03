"""Finding `Linear → (× scale) → BatchNorm1d (→ activation)` in a model, and running it as one call, in place.

A chain belongs to the module whose `forward` writes it, its *owner*. Read in this order:

- `tracing.py`   records the `forward` of one owner, and refuses what a recording would get wrong
- `scanning.py`  what misleads a recording, in the byte code
- `instructions.py` what single instructions of that do
- `watching.py`  the same for what is found only when it is called; questions, tensors, what is left behind
- `observing.py` which values are compared with None meanwhile
- `stand_ins.py` what takes the place of tensors meanwhile, and answers what code asks of it
- `functions.py` a call of an `autograd.Function` on them
- `parameters.py` what they stand for: the parameters of a `forward`
- `recorder.py`  what `forward` reads from its owner, and must not write
- `effects.py`   what a call that stays a call may change of that
- `keeping.py`   what lists, dictionaries, objects and classes hold meanwhile
- `values.py`    kinds of values that it tells apart
- `comparing.py` what it has read, as conditions
- `structure.py` what the modules below the owner are like, likewise
- `held.py`      what stays as it is meanwhile: random states
- `beside.py`    other threads meanwhile
- `guards.py`    decisions by what inputs are, as conditions under which a recording holds
- `outside.py`   globals, closures, functions, configurations that a `forward` reads
- `optional.py`  comparisons with None, likewise
- `giving.py`    what never gives None, by its byte code
- `views.py`     what may stand between the two: operations that only lay elements out
- `matching.py`  finds the chains in a recording, and gives the reason for every near miss
- `inlining.py`  a child's recording in its owner's, for chains that two modules share
- `spanning.py`  that, where a Linear and its BatchNorm are called by different forwards
- `writing.py`   writes a recording as Python, with each chain as one call
- `lines.py`     those of both modes in one, and long ones on several
- `analysis.py`  puts the three together: a model → one `OwnerPlan` for each owner
- `places.py`    where the modules are that it names
- `unchanged.py` the check that what was recorded still holds, as Python, and functions made of such texts
- `classes.py`   `fuse` and `unfuse`: another `forward` for the owner
- `report.py`    `fuse_report`: what was found and what was refused, in words
- `prepare.py`   `prepare` and `unprepare`: weights split ahead of evaluation
- `explain.py`   `explain` and `warmup`: the plans that a model's chains run by

The call that stands for a chain is `gemmnorm.chain.ChainCall`. `export` writes the same `OwnerPlan`s into files, with
another function to call.
"""

from .analysis import OwnerPlan, analyse
from .classes import Fusion, fuse, fuse_owners, restore, unfuse
from .explain import Explanation, described, explain, plans_of, warmup
from .matching import Chain, Refusal
from .outside import import_line, is_importable, known_as, numbered
from .prepare import prepare, unprepare
from .report import Calls, FuseReport, Match, fuse_report, report_of

__all__ = [
    "Calls",
    "Chain",
    "Explanation",
    "FuseReport",
    "Fusion",
    "Match",
    "OwnerPlan",
    "Refusal",
    "analyse",
    "described",
    "explain",
    "fuse",
    "fuse_owners",
    "fuse_report",
    "import_line",
    "is_importable",
    "known_as",
    "numbered",
    "plans_of",
    "prepare",
    "report_of",
    "restore",
    "unfuse",
    "unprepare",
    "warmup",
]
