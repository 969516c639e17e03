"""Calibrate the limits of `gemmnorm verify`: honest files must never be accused, traps always be caught.

Every file of tests/traps is judged under many seeds. For an honest file the figure is the largest error over limit
of any comparison under any seed (it must stay below 1). For a trap it is the largest ratio under one seed, and of
those the smallest over the seeds (it must stay above 1 under every seed); "named" says that the fault is found as
such, without a number: a gradient that is missing, memory that is shared, an exception.

    python benchmarks/calibrate_verify.py --honest-seeds 100 --trap-seeds 25

prints a table in Markdown (its figures: lab/README.md) and exits with 1 if any file is on the wrong side.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import math
import platform
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from gemmnorm.userfiles import ModelFile, load_candidate_file, load_model_file, without_dropout
from gemmnorm.verify import judge, references

FOLDER = Path(__file__).resolve().parent.parent / "tests" / "traps"
ALONE, GPU = "a process of its own", "a GPU"  # what a file's header says that it needs; tests judge those
MODELS = {
    "model_bf16.py": (
        "honest_bf16_float32_inside.py",
        "honest_bf16_rounded_product.py",
        "honest_bf16_stored_centred.py",
    ),
    "model_small_outputs.py": ("honest_small_outputs.py", "trap_small_zeros.py"),
    "model_dropout.py": (
        "honest_dropout_before.py",
        "honest_dropout_mask.py",
        "trap_dropout_left_out.py",
        "trap_dropout_in_eval.py",
        "trap_dropout_unscaled.py",
    ),
    "model_heads.py": ("honest_heads.py", "trap_heads_label.py", "trap_heads_scores.py"),
    "model_projector.py": ("honest_projector.py", "trap_projector_leaky.py"),
}


@dataclass
class Record:
    """One file: its ratio under each seed, and which comparison gave the figure that counts."""

    name: str
    doc: str
    ratios: list[float] = field(default_factory=list)
    where: str = ""

    @property
    def honest(self) -> bool:
        return not self.name.startswith("trap_")

    @property
    def figure(self) -> float:
        return max(self.ratios) if self.honest else min(self.ratios)

    @property
    def right(self) -> bool:
        return self.figure <= 1.0 if self.honest else self.figure > 1.0

    def add(self, ratio: float, where: str) -> None:
        if not self.ratios or (ratio > self.figure if self.honest else ratio < self.figure):
            self.where = where
        self.ratios.append(ratio)


def model_of(candidate: str) -> str:
    """The model file that a candidate of tests/traps replaces."""
    return next((model for model, names in MODELS.items() if candidate in (*names, model)), "model.py")


@dataclass(frozen=True)
class Header:
    """What the docstring of a file of tests/traps says: what the file does, the class of its fault, what it needs."""

    does: str
    kind: str
    needs: str

    @staticmethod
    def of(name: str) -> Header:
        doc = ast.get_docstring(ast.parse((FOLDER / name).read_text(encoding="utf-8"))) or ""
        fields = dict(line.rstrip(".").split(": ", 1) for line in doc.splitlines()[2:])
        return Header(doc.splitlines()[0], fields.get("Class", ""), fields.get("Needs", ""))


def candidates_of(model: str, needs: str = "") -> list[str]:
    """The model itself and its replacements, or those of them that need something."""
    names = sorted(path.name for path in FOLDER.glob("*.py"))
    own = [n for n in names if n.startswith(("honest_", "trap_")) and model_of(n) == model]
    return [name for name in (model, *own) if Header.of(name).needs == needs]


def calibrate(model: str, honest_seeds: int, trap_seeds: int) -> list[Record]:
    original = load_model_file(FOLDER / model)
    files = {name: load_candidate_file(FOLDER / name) for name in candidates_of(model)}
    records = {name: Record(name, (file.module.__doc__ or "").splitlines()[0]) for name, file in files.items()}
    stream = references(original, seeds=max(honest_seeds, trap_seeds))
    for seed, group in itertools.groupby(stream, key=lambda reference: reference.seed):
        cases = list(group)
        for name, file in files.items():
            record = records[name]
            if seed < (honest_seeds if record.honest else trap_seeds):
                record.add(*worst(file, original, cases))
        print(f"{model}: seed {seed}", file=sys.stderr, flush=True)
    return list(records.values())


def worst(file: ModelFile, original: ModelFile, cases: Sequence[object]) -> tuple[float, str]:
    result = judge(file, original, cases, to_the_end=True)  # type: ignore[arg-type]
    checks = result.get("checks") or []
    if not checks:
        return math.inf, result["reason"].partition(": ")[2].partition(":")[0]
    finite = [c for c in checks if c["ratio"] is not None]
    named = [c for c in checks if c["ratio"] is None]
    if named:
        return math.inf, f"{named[0]['quantity']}: {named[0]['note']}"
    check = max(finite, key=lambda c: c["ratio"])
    return check["ratio"], f"{check['quantity']}, {check['phase']}, {check['case']} ({check['measure']})"


def table(records: Sequence[Record]) -> str:
    lines = ["| file | what it does | seeds | error / limit | where |", "|---|---|---|---|---|"]
    for record in records:
        figure = "named" if math.isinf(record.figure) else f"{record.figure:.2f}"
        if math.isfinite(record.figure) and record.figure >= 100:
            figure = f"{record.figure:.0f}" if record.figure < 1e4 else f"{record.figure:.0e}"
        where = record.where.replace("|", "\\|")
        doc = record.doc.replace("|", "\\|")
        lines.append(f"| `{record.name}` | {doc} | {len(record.ratios)} | {figure} | {where} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--honest-seeds", type=int, default=100)
    parser.add_argument("--trap-seeds", type=int, default=25)
    parser.add_argument("--model", action="append", help="only this model file of tests/traps")
    arguments = parser.parse_args()
    models = arguments.model or ["model.py", *MODELS]
    with without_dropout():
        records = [r for m in models for r in calibrate(m, arguments.honest_seeds, arguments.trap_seeds)]
    print(f"torch {torch.__version__}, Python {platform.python_version()}, {platform.machine()} CPU\n")
    print("**Honest files** (largest ratio over all seeds; must stay below 1)\n")
    print(table([r for r in records if r.honest]))
    print("\n**Traps** (smallest over the seeds of the largest ratio; must stay above 1)\n")
    print(table([r for r in records if not r.honest]))
    return 0 if all(r.right for r in records) else 1


if __name__ == "__main__":
    sys.exit(main())
