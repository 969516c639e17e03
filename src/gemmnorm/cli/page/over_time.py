"""Sections about a result beside older ones: what `--compare` and `--history` put into a document."""

from __future__ import annotations

from collections.abc import Sequence

from ...bench import Document
from .charts import Step, trends
from .html import Html, folded, section, table, tag
from .timings import PHASES

_KINDS = {"slower": "worse", "faster": "better"}  # verdict on a run after the one before → class of its mark
_OPEN = 8  # cases that are shown unfolded


def comparison(document: Document) -> Html:
    """What became of an older result's cells."""
    found = document.get("comparison") or {"cells": []}
    lines = []
    for c in sorted(found["cells"], key=lambda c: -c["change"]):
        word = tag("b", c["verdict"], class_={"slower": "bad", "faster": "good"}.get(c["verdict"], "muted"))
        lines.append(
            [c["cell"], f"{c['old']:.3f}", f"{c['new']:.3f}", f"{c['change']:.3f}", f"{1 + c['limit']:.3f}", word]
        )
    columns = ("cell", "old R", "R", "change", "allowed", "")
    lead = f"R, the time over the bare GEMM of the same run, against {found.get('old')} of {found.get('created')}."
    return section("Against an older result", table(columns, lines) if lines else "", lead=lead)


def history(document: Document) -> Html:
    """R and S of every cell over runs, and what the runs were."""
    found = document.get("history") or {"runs": [], "cells": [], "left_out": []}
    runs, cells = found["runs"], found["cells"]
    cases = list(dict.fromkeys(cell["case"] for cell in cells))
    charts = [(case, _chart([cell for cell in cells if cell["case"] == case], runs)) for case in cases]
    shown = [
        tag("article", tag("h3", case), chart) if len(cases) <= _OPEN else folded(case, chart) for case, chart in charts
    ]
    rows = [[str(i + 1), _day(run), str(run["source_hash"] or "–")[:12], str(run["torch"] or "–"), str(run["name"])]
            for i, run in enumerate(runs)]  # fmt: skip
    lines = table(("run", "UTC", "sources", "torch", "file"), rows, words=5) if runs else None
    left = [tag("li", f"{item['name']}: {item['reason']}") for item in found["left_out"]]
    return section(
        "Over runs",
        shown,
        lines,
        [tag("p", "Not in the history:", class_="note"), tag("ul", *left)] if left else None,
        lead="R, the time over the bare GEMM of the same run (lower is faster), and S, eager’s time over it (higher is"
        " faster), from the oldest run to this one, each on an axis of its own. A red point is slower than the one"
        " before by more than 3% and by more than both runs’ spread, a green one faster.",
    )


def _day(run: Document) -> str:
    return str(run["created"])[:16].replace("T", " ")


def _chart(cells: Sequence[Document], runs: Sequence[Document]) -> Html:
    """A row for each cell, under its phase: R and S over the runs."""

    def steps(cell: Document, key: str) -> list[Step]:
        return [
            Step(p["run"], p[key], _KINDS.get(p["verdict"], ""), f"{_day(runs[p['run']])}: {key} {p[key]:.3f}")
            for p in cell["points"]
            if p[key]
        ]

    groups = [
        (PHASES.get(phase, phase),
         [(str(cell["name"]), [("R", steps(cell, "R")), ("S", steps(cell, "S"))])
          for cell in cells if cell["phase"] == phase])
        for phase in dict.fromkeys(cell["phase"] for cell in cells)
    ]  # fmt: skip
    return trends(groups, len(runs), names="long" if any(len(str(cell["name"])) > 8 for cell in cells) else "")
