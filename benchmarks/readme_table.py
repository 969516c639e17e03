"""Writes the table of figures of the README, or of another page, from a result file.

    python benchmarks/readme_table.py [--check] [RESULT.json [README.md]]
    python benchmarks/readme_table.py benchmarks/results/h200-x2.json docs/ranks.md
    python benchmarks/readme_table.py benchmarks/results/h100.json docs/h100.md

The block between `<!-- table:NAME -->` and `<!-- /table:NAME -->` is replaced, where NAME is the result file's name
without its ending (benchmarks/results/h200.json → h200). With --check nothing is written, and the exit code is 1 where
the README says something else than the result file. Without a result file the block says that nothing was measured.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "src"))
from gemmnorm.runtime import sources  # noqa: E402

CASES = ("kb33", "kb39", "projector", "v0")
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "amp")
PHASES = {
    "train_fwd": "Training, forward",
    "eval_fwd": "Evaluation, forward",
    "train_fwd_bwd": "Training, forward and backward",
}
UNMEASURED = "The figures of this version have not been measured yet."
_HEAD = "| case | precision | gemm | eager | torch.compile | gemmnorm | R |\n|---|---|---|---|---|---|---|"

Row = dict[str, Any]


def precision_of(row: Row) -> str:
    """The name of a row's precision; rows under autocast are "amp"."""
    return "amp" if row.get("autocast") else str(row["precision"])


def chosen_rows(document: dict[str, Any], phase: str) -> Iterable[Row]:
    """The planner's own rows of one phase, by case and precision; of several the first."""
    for case in CASES:
        for precision in PRECISIONS:
            for row in document["rows"]:
                if row.get("chosen") and (row["case"], precision_of(row), row["phase"]) == (case, precision, phase):
                    yield row
                    break


def milliseconds(value: float | None) -> str:
    """Three significant digits; a dash for what was not measured."""
    if value is None:
        return "—"
    digits = 0 if value >= 100 else 1 if value >= 10 else 2 if value >= 1 else 3 if value >= 0.1 else 4
    return f"{value:.{digits}f}"


def line(row: Row) -> str:
    """One row of the table."""
    size = f"{row['case']} {row['batch']} × {row['in_features']} → {row['out_features']}"
    times = " | ".join(milliseconds(row.get(key)) for key in ("gemm_ms", "eager_ms", "compile_ms"))
    ratio = "—" if not row.get("gemm_ms") or row.get("ms") is None else f"{row['ms'] / row['gemm_ms']:.2f}"
    return f"| {size} | {precision_of(row)} | {times} | **{milliseconds(row.get('ms'))}** | {ratio} |"


def ranks_table(document: dict[str, Any]) -> str:
    """Of a result of benchmarks/ranks.py: ours, ours without synchronisation, and SyncBatchNorm."""
    lines = [
        "| rows a GPU, layer | | device | alone | SyncBatchNorm | wall clock | alone | SyncBatchNorm | CUDA graph |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for row in document["rows"]:
        keys = ("ms", "alone_ms", "eager_ms", "wall_ms", "alone_wall_ms", "eager_wall_ms", "graph_ms")
        times = [milliseconds(row.get(key)) for key in keys]
        times[0], times[3] = f"**{times[0]}**", f"**{times[3]}**"
        what = f"step, {row['wrapper']}" if "wrapper" in row else "step" if row["grad"] else "forward"
        size = f"{row['batch']}, {row['in_features']} → {row['out_features']}"
        lines.append(f"| {size} | {what} | {' | '.join(times)} |")
    return "\n".join(lines)


def table(document: dict[str, Any] | None, name: str, folder: str = "benchmarks/results") -> str:
    """The text between the markers; `folder` is where the page finds result files."""
    if document is None:
        return UNMEASURED
    of_ranks = document.get("kind") == "ranks"
    parts = [ranks_table(document)] if of_ranks else []
    for phase, title in PHASES.items():
        lines = [] if of_ranks else [line(row) for row in chosen_rows(document, phase)]
        if not lines:
            continue
        body = "\n".join([_HEAD, *lines])
        parts.append(
            body if not parts else f"<details><summary>{title[:1].upper()}{title[1:]}</summary>\n\n{body}\n\n</details>"
        )
    if not parts:
        return UNMEASURED
    machine = document["environment"]
    versions = ", ".join(f"{key} {machine[key]}" for key in ("driver", "cuda", "torch") if machine.get(key))
    source = (
        f"{machine.get('gpu', name)}, {versions}; {document['created'][:10]}, `{document['command']}`; every row in"
    )
    parts.append(f"{source} [{name}.json]({folder}/{name}.json).{since(document)}")
    return "\n\n".join(parts)


def since(document: dict[str, Any]) -> str:
    """A sentence about a result of other sources than these, or nothing."""
    changed = document.get("source_hash") not in (None, sources.source_hash())
    return " The kernels or the planner have changed since that run." if changed else ""


def replaced(text: str, name: str, block: str) -> str:
    """`text` with the block of `name` replaced."""
    pattern = re.compile(rf"(<!-- table:{re.escape(name)} -->\n).*?(\n<!-- /table:{re.escape(name)} -->)", re.S)
    if not pattern.search(text):
        raise SystemExit(f"the page has no block <!-- table:{name} -->")
    return pattern.sub(lambda match: match.group(1) + block + match.group(2), text)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", nargs="?", type=Path, default=ROOT / "benchmarks" / "results" / "h200.json")
    parser.add_argument("readme", nargs="?", type=Path, default=ROOT / "README.md")
    parser.add_argument("--check", action="store_true", help="write nothing; exit code 1 where the README differs")
    options = parser.parse_args(arguments)
    document = json.loads(options.result.read_text(encoding="utf-8")) if options.result.exists() else None
    before = options.readme.read_text(encoding="utf-8")
    name, folder = options.result.stem, os.path.relpath(options.result.parent, options.readme.parent)
    after = replaced(before, name, table(document, name, Path(folder).as_posix()))
    if options.check:
        return int(before != after)
    options.readme.write_text(after, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
