"""Kernel spans of a suite: every timed variant of every cell once more, in a process of its own.

The process is the profiler's: what CUPTI leaves behind there slows nothing that is timed, and a crash ends no bench.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any

import torch

from ..plan import STRATEGIES
from ..userfiles import progress, run_isolated
from . import cases
from .cases import Case, Cell
from .cell import Bench, CellRun, Options, Tell, floor_variants, package_module
from .documents import Document
from .spans import Replays, disagreement
from .timing import CudaClock, Variant, reason

PEERS = ("gemm", "eager", "compile", "eager_graphed")  # their times are `…_ms` of a row, their spans `…_kernels`
_START_S, _CELL_S = 120.0, 20.0  # of the time limit: in all, and for each cell


def add_spans(rows: Sequence[Document], cells: Sequence[Cell], device: torch.device, tell: Tell) -> list[str]:
    """Put `kernels` and the peers' `…_kernels` into rows of these cells; notes on what disagrees, or is missing.

    Args:
        rows: in groups of one cell each; those that have `kernels` already are left alone.
        cells: of the rows, in any order.
    """
    wanted = {cell: mine for cell in cells if (mine := [r for r in rows if _is_of(r, cell) and not r.get("kernels")])}
    if device.type != "cuda" or not wanted:
        return []
    torch.cuda.empty_cache()
    tell("kernel spans")
    outcome = run_isolated(
        "gemmnorm.bench.cross_check:child",
        {"wanted": [{"cell": asdict(c), "names": _timed(mine)} for c, mine in wanted.items()], "device": str(device)},
        time_limit=_START_S + _CELL_S * len(wanted),
        on_progress=lambda message: tell(message["stage"]),
    )
    if not outcome.ok:
        return [f"kernel spans were not taken: {outcome.why().strip().splitlines()[-1]}"]
    notes = [f"no kernel span: {note}" for note in outcome.value["notes"]]
    for (cell, mine), spans in zip(wanted.items(), outcome.value["spans"], strict=True):
        for row in mine:
            row["kernels"] = spans.get(row["strategy"])
            row.update({f"{peer}_kernels": spans.get(_variant(row, peer)) for peer in PEERS})
        notes += [f"{cell}: {note}" for note in _disagreements(mine)]
    return notes


def _is_of(row: Document, cell: Cell) -> bool:
    found = row["case"], row["precision"], row["autocast"], row["phase"]
    return found == (cell.case.name, cell.precision, cell.autocast, cell.phase)


def _variant(row: Document, peer: str) -> str:
    return str(row["gemm_form"]) if peer == "gemm" else peer


def _timed(rows: Sequence[Document]) -> list[str]:
    """Names of the variants of one cell that have a time."""
    peers = [_variant(rows[0], peer) for peer in PEERS if rows[0][f"{peer}_ms"] is not None]
    return [*peers, *(row["strategy"] for row in rows)]


def _disagreements(rows: Sequence[Document]) -> Iterator[str]:
    for peer in PEERS:
        if why := disagreement(rows[0][f"{peer}_ms"], rows[0][f"{peer}_kernels"]):
            yield f"{peer}: {why}"
    for row in rows:
        if why := disagreement(row["ms"], row["kernels"]):
            yield f"{row['strategy']}: {why}"


# --- the child -------------------------------------------------------------------------------------------------------


def child(wanted: list[dict[str, Any]], device: str) -> dict[str, Any]:
    """Runs in the isolated process: `spans`, for each cell by the variant's name, and `notes` on those without."""
    compiled = any("compile" in item["names"] for item in wanted)
    bench = Bench(torch.device(device), Options(compile=compiled))
    assert isinstance(bench.clock, CudaClock)
    replays, notes = Replays(bench.clock), []

    def run() -> None:
        for number, item in enumerate(wanted):
            cell = cell_from(item["cell"])
            progress({"stage": f"kernel spans, cell {number + 1} of {len(wanted)}"})
            with cases.conditions(cell):
                try:
                    variants = variants_of(bench, cell, item["names"])
                except Exception as error:  # a cell that does not fit into what memory is left
                    notes.append(f"{cell}: {reason(error)}")
                    continue
                for variant in variants:
                    replays.add((number, variant.name), variant)

    taken = replays.taken(run)
    for (number, name), why in replays.failed.items():
        notes.append(f"{cell_from(wanted[number]['cell'])}: {name}: {why}")
    spans: list[dict[str, Any]] = [{} for _ in wanted]
    for (number, name), span in taken.items():
        spans[number][name] = span.as_dict()
    return {"spans": spans, "notes": notes}


def cell_from(fields: dict[str, Any]) -> Cell:
    """The cell whose `asdict` this is."""
    return Cell(**{**fields, "case": Case(**fields["case"])})


def variants_of(bench: Bench, cell: Cell, names: Sequence[str]) -> list[Variant]:
    """The variants of a cell that have these names, made anew."""
    prepared = cases.prepare(cell, bench.device)
    run = CellRun(bench, cell, prepared, package_module(cell, prepared.eager))
    strategies = [name for name in names if name in STRATEGIES]
    made = (*floor_variants(cell, prepared), *run.peers(), *run.fused(strategies))
    return [variant for variant in made if variant.name in names]
