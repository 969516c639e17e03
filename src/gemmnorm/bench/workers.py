"""The cells of a suite one after the other, or prepared beside each other in processes and measured one at a time.

Compiling and first calls take many times as long as the samples of a cell. So a round goes like this:

1. Each process is sent one cell, prepares it, waits for the GPU, gives back what memory it can, and answers.
2. When all have answered, one after the other is told to measure; it frees the cell's memory, then sends the result.

Between its answer and the word to measure, and after its result, a process waits for a message and launches, allocates
and frees nothing: whoever measures is alone on the GPU. A process that raises, dies or hangs is replaced.
"""

from __future__ import annotations

import contextlib
import gc
import multiprocessing
import os
import signal
import time
import warnings
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

import torch

from ..errors import GemmNormRuntimeError
from ..userfiles import how_it_died
from . import accuracy
from .cases import Cell
from .cell import Bench, CellResult, Options, Ready
from .environment import current
from .timing import clock_for, reason

MEMORY = 2**33  # bytes of the GPU that each process should find: its context, the clock's buffer, a cell
START_S = 300.0  # that a process may take, beside what the options allow


@dataclass(frozen=True)
class Failure:
    """Why a cell has no result; `raised` where its process lived to tell."""

    reason: str
    raised: bool = True


Outcome = tuple[Cell, CellResult | Failure]


@dataclass
class Spent:
    """Seconds that went into preparing cells and into measuring them."""

    preparing: float = 0.0
    measuring: float = 0.0

    def __str__(self) -> str:
        return f"cells took {self.preparing:.0f} s to prepare and {self.measuring:.0f} s to measure"

    @contextlib.contextmanager
    def on(self, what: str) -> Iterator[None]:
        """Add the body's time to `preparing` or `measuring`."""
        begin = time.monotonic()
        try:
            yield
        finally:
            setattr(self, what, getattr(self, what) + time.monotonic() - begin)


def how_many(cells: Sequence[Cell], device: torch.device) -> int:
    """The number of processes that is worth while: one, this one, but on a GPU."""
    if device.type != "cuda":
        return 1
    room = torch.cuda.get_device_properties(device).total_memory // MEMORY
    return max(1, min(len(cells), (os.cpu_count() or 2) - 2, room))


def one_by_one(bench: Bench, cells: Sequence[Cell], spent: Spent) -> Generator[Outcome, None, None]:
    """Prepare and measure each cell in this process."""
    for cell in cells:
        yield cell, _outcome(bench, cell, spent)


def _outcome(bench: Bench, cell: Cell, spent: Spent) -> CellResult | Failure:
    try:
        with spent.on("preparing"):
            ready = bench.prepare(cell)
        with spent.on("measuring"):
            return bench.measure(ready)
    except Exception as error:
        return Failure(reason(error))


def in_rounds(bench: Bench, cells: Sequence[Cell], spent: Spent, workers: int) -> Generator[Outcome, None, None]:
    """Prepare cells in so many processes beside each other, and measure them one at a time.

    A cell that raises, or finds too little memory beside the others, has a second try when they are done, in this
    process; one whose process dies or hangs has none. After a round without a result this process does the rest.
    Forward and backward, which take longest to prepare, come in rounds of their own. The outcomes come as they are
    made; closing the iterator ends the processes.
    """
    bench.clock = clock_for(bench.device)  # without the old one's memory
    _give_back(bench.device)
    waiting, alone, useful = sorted(cells, key=lambda c: c.phase == "train_fwd_bwd"), [], True
    with contextlib.closing(_Pool(bench, spent)) as pool:
        while waiting and useful:
            now, waiting, useful = waiting[:workers], waiting[workers:], False
            for cell, outcome in pool.round(now):
                useful |= isinstance(outcome, CellResult)
                if _suffers_from_company(outcome):
                    alone.append(cell)
                else:
                    yield cell, outcome
    yield from one_by_one(bench, [*alone, *waiting], spent)


def _suffers_from_company(outcome: CellResult | Failure) -> bool:
    """Whether alone on the GPU there may be a result, or errors and variants for which memory was lacking."""
    if isinstance(outcome, Failure):
        return outcome.raised
    said = [*outcome.notes, *(item["reason"] for item in outcome.not_applicable)]
    return any(row["error"] is None for row in outcome.rows) or any("OutOfMemoryError" in words for words in said)


# --- the parent ------------------------------------------------------------------------------------------------------


@dataclass
class _Worker:
    """A process, and the end of the pipe on which it is told what to do."""

    process: Any
    pipe: Connection

    def say(self, message: object) -> None:
        """Send; a process that has died is found out by `answer`."""
        with contextlib.suppress(OSError):
            self.pipe.send(message)

    def answer(self, limit_s: float) -> Any:
        """What it sends within so many seconds, or a `Failure`, and with that it has ended."""
        try:
            found = self.pipe.recv() if self.pipe.poll(max(0.0, limit_s)) else None
        except (EOFError, OSError):
            self.process.join(5.0)
            code = self.process.exitcode
            found = Failure(f"its process {how_it_died(code)}" if code is not None else "its process died", False)
        if found is None:
            found = Failure("its process gave no answer in time", False)
        if isinstance(found, Failure):
            self.end()
        return found

    def end(self) -> None:
        """Kill it, and wait until what it had on the GPU is gone."""
        self.process.kill()
        self.process.join(30.0)  # a driver that hangs lets nobody go
        self.pipe.close()


@dataclass
class _Pool:
    """The processes that live; each round starts what is missing."""

    bench: Bench
    spent: Spent
    workers: list[_Worker] = field(default_factory=list)
    started: int = 0

    def close(self) -> None:
        for worker in self.workers:
            worker.end()

    def round(self, cells: Sequence[Cell]) -> Iterator[Outcome]:
        """Prepare each of `cells` in a process of its own, then measure them one at a time."""
        options = self.bench.options
        limit_s = START_S + options.compile_limit_s + 10 * options.budget_s
        with self.spent.on("preparing"):
            self.bench.tell(f"preparing, {len(cells)} cells")
            ready, failed = self._prepared(cells, limit_s)
        yield from failed
        for cell, worker in ready:
            with self.spent.on("measuring"):
                self.bench.tell(f"measuring, {cell}")
                worker.say("measure")
                outcome = self._answer(worker, limit_s)
            yield cell, outcome

    def _prepared(
        self, cells: Sequence[Cell], limit_s: float
    ) -> tuple[list[tuple[Cell, _Worker]], list[tuple[Cell, Failure]]]:
        """Cells that are ready with their processes, and the others. The largest is last: then others hold little."""
        while len(self.workers) < len(cells):
            self.workers.append(self._start())
        at_work = list(zip(cells, self.workers, strict=False))
        for cell, worker in at_work:
            worker.say(cell)
        until = time.monotonic() + limit_s
        answers = [(cell, worker, self._answer(worker, until - time.monotonic())) for cell, worker in at_work]
        ready = [(cell, worker) for cell, worker, found in answers if not isinstance(found, Failure)]
        failed = [(cell, found) for cell, _, found in answers if isinstance(found, Failure)]
        return sorted(ready, key=lambda pair: accuracy.float64_bytes(pair[0])), failed

    def _answer(self, worker: _Worker, limit_s: float) -> Any:
        found = worker.answer(limit_s)
        if isinstance(found, Failure):
            self.workers = [w for w in self.workers if w is not worker]  # the next round starts another
        return found

    def _start(self) -> _Worker:
        """One more process; the first gives warnings for all."""
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        arguments = (theirs, self.bench.device, self.bench.options, self.bench.ceilings, self.started > 0)
        process = spawn.Process(target=work, args=arguments, daemon=True)
        process.start()
        theirs.close()
        self.started += 1
        return _Worker(process, ours)


# --- the process -----------------------------------------------------------------------------------------------------


def work(pipe: Connection, device: torch.device, options: Options, ceilings: dict[str, Any], quiet: bool) -> None:
    """Prepare and measure the cells that come, until one fails or nobody is there to send more."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")  # else each process starts as many again
    if quiet:
        warnings.simplefilter("ignore")
    bench = Bench(device, options)
    bench.ceilings = ceilings
    with current(device), contextlib.suppress(EOFError, ConnectionError):  # the parent is gone
        while True:
            cell = pipe.recv()
            try:
                ready = _prepared(bench, cell)
            except Exception as error:
                pipe.send(Failure(reason(error)))
                return  # with whatever memory, caches or broken context this leaves
            pipe.send("ready")
            pipe.recv()
            try:
                result = bench.measure(ready)
                del ready
                if options.compile:
                    torch._dynamo.reset()
                _give_back(device)
            except Exception as error:
                pipe.send(Failure(reason(error)))
                return
            pipe.send(result)


def _prepared(bench: Bench, cell: Cell) -> Ready:
    """`Bench.prepare`, after which nothing is left to collect, free or wait for.

    Whatever cannot run fails the cell: memory may be lacking, which alone it would have.
    """
    gc.unfreeze()
    ready = bench.prepare(cell)
    for name, why in ready.failed.items():
        raise GemmNormRuntimeError(f"{name}: {why}")
    gc.collect()  # what the last cell left in cycles, too
    gc.freeze()  # no need to look through it all again while measuring
    _give_back(bench.device)
    return ready


def _give_back(device: torch.device) -> None:
    """Free what the allocator keeps, and wait until the device has done it."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.synchronize(device)
