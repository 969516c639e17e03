"""A result beside older ones, as text: what `--compare` and `--history` put into a document."""

from __future__ import annotations

from collections.abc import Iterable

from rich.console import RenderableType
from rich.text import Text

from ..bench import Document
from .tables import FittingTable


def sections(document: Document) -> Iterable[RenderableType]:
    """Both, where they are there."""
    yield from _comparison(document)
    yield from _history(document)


def _comparison(document: Document) -> Iterable[RenderableType]:
    """What became of an older result's cells."""
    found = document.get("comparison")
    if not found:
        return
    title = f"R against {found['old']} of {found['created']}"
    table = FittingTable(title, ["cell", "old R", "R", "change", "allowed", ""], 1, (4, 1))
    for cell in found["cells"]:
        figures_of = (f"{cell[key]:.3f}" for key in ("old", "new", "change"))
        table.add_row(str(cell["cell"]), *figures_of, f"{1 + cell['limit']:.3f}", str(cell["verdict"]))
    yield table
    count = found["regressions"]
    yield Text(f"{count} of {len(found['cells'])} cells are slower", style="bold red" if count else "bold green")


def _history(document: Document) -> Iterable[RenderableType]:
    """R of every cell, one column for each run; the oldest go where there is no room."""
    found = document.get("history")
    if not found:
        return
    dates = [str(run["created"])[:16].replace("T", " ") for run in found["runs"]]
    table = FittingTable("R over runs", ["case", "", "phase", *dates, "S"], 3, range(3, 2 + len(dates)))
    for cell in found["cells"]:
        shown = {point["run"]: f"{point['R']:.3f}" for point in cell["points"]}
        last = cell["points"][-1]["S"]
        ratios = [shown.get(run, "–") for run in range(len(dates))]
        table.add_row(cell["case"], cell["name"], cell["phase"], *ratios, "–" if last is None else f"{last:.2f}")
    yield table
    for item in found["left_out"]:
        yield Text(f"not in the history: {item['name']}: {item['reason']}")
