"""Filling the disk caches of torch.compile and the kernels before cells are timed, in processes beside each other."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor

import torch

from . import cases
from .cases import Cell
from .cell import Bench, CellRun, Options, Tell, package_module


def compile_ahead(chosen: Sequence[Cell], device: torch.device, tell: Tell = lambda _: None) -> None:
    """Run every cell once by torch.compile and by the package, on a GPU; elsewhere there is nothing to win."""
    workers = min(len(chosen), max(1, (os.cpu_count() or 2) - 2))
    if device.type != "cuda" or workers < 2:
        return
    parts = [list(chosen[start::workers]) for start in range(workers)]
    tell(f"compiling ahead, in {workers} processes")
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("spawn")) as pool:
        for _ in pool.map(_run_once, parts, [str(device)] * workers):
            pass


def _run_once(chosen: Sequence[Cell], device: str) -> None:
    bench = Bench(torch.device(device), Options())
    for cell in chosen:
        prepared = cases.prepare(cell, bench.device)
        with cases.conditions(cell):
            run = CellRun(bench, cell, prepared, package_module(cell, prepared.eager))
            for step in (run.compiled(), run.module):
                try:
                    run.step(step)()
                except Exception:  # where the cell is timed it fails again, and is reported
                    torch.cuda.synchronize(bench.device)
        torch._dynamo.reset()
