"""Filling the disk caches of torch.compile and the kernels before cells are timed, in processes beside each other."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool

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
    spawn = multiprocessing.get_context("spawn")
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process starts as many again
    # A process that died has compiled less: no reason to end the measurement.
    with contextlib.suppress(BrokenProcessPool), ProcessPoolExecutor(workers, mp_context=spawn) as pool:
        for _ in pool.map(_run_once, parts, [str(device)] * workers):
            pass


def _run_once(chosen: Sequence[Cell], device: str) -> None:
    bench = Bench(torch.device(device), Options())
    for cell in chosen:
        # Where the cell is timed, what fails here fails again and is reported, or runs because it is alone on the GPU.
        with contextlib.suppress(Exception), cases.conditions(cell):
            prepared = cases.prepare(cell, bench.device)
            run = CellRun(bench, cell, prepared, package_module(cell, prepared.eager))
            for module in (run.module, run.compiled()):
                run.step(module)()
        torch._dynamo.reset()
