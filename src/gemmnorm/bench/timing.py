"""The timing core: interleaved samples of many variants of one computation, with nothing timed but the computation.

Four things spoil a comparison of two kernels, and each has its remedy here:

* *Drift.* Clocks and temperature move by several percent in a minute. All variants are therefore interleaved in
  one process, and the order rotates by one place each round, so that a drift meets all of them alike.
* *The host.* A chain of small kernels takes longer to ask for than to run. Every CUDA sample is queued behind enough
  GPU work (a spin of 1.5 × the variant's own host time, then the L2 flush) that the GPU does not wait for
  Python; where it did, because something else had the processor, the sample is taken again. Host time is a figure of
  its own (`host_microseconds`).
* *The L2.* A repeated call finds its inputs in cache, which a training step does not. Before every sample a buffer of
  256 MB is written and read, several times any L2.
* *One number.* The median says what is typical, the interquartile range whether to believe a difference.

On the CPU the wall clock is used and no cache is flushed: the problems worth timing exceed them.

All times here are milliseconds unless a name says microseconds.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch

from .verdicts import LOOKS, disturbed, judge

FLUSH_BYTES = 256 * 2**20  # written and read before each sample; the largest L2 of today is 126 MB
SLOW_S = 1.0  # after so long a variant needs no more warming up
PATIENCE = 3.0  # budgets that pairs which are not decided may take
SPIN_MS = 3.0  # that a variant's host time is measured beside; where that is longer, MAX_SPIN_MS
TRIES = 3  # at a sample for which the host was late
MAX_SPIN_MS = 20.0  # a variant whose host time is beyond this synchronises, or is not worth hiding the host of


@dataclass(frozen=True)
class Variant:
    """One way to compute the thing.

    Attributes:
        name: the key of its timing in the result.
        run: computes it once; what it returns is dropped.
        around: entered around each call and outside the timed span (a BLAS backend, a precision, a strategy).
        warmup: calls before the first sample; fewer, down to `least`, once they have taken a second.
        limit_s: the first call may take this long (a compilation); None for no limit.
    """

    name: str
    run: Callable[[], object]
    around: Callable[[], AbstractContextManager[object]] = contextlib.nullcontext
    warmup: int = 3
    least: int = 1
    limit_s: float | None = None


@dataclass(frozen=True)
class Timing:
    """`ms` is the median of `samples` samples, `iqr` the distance between their quartiles (0 for a single sample).

    `disturbed` of them were far above the others; they stay among them, and a median does not mind.
    """

    ms: float
    iqr: float
    samples: int
    disturbed: int = 0


@dataclass
class Timings:
    """Result of `interleave`: a timing for every variant that ran, and the reason for every one that did not."""

    ran: dict[str, Timing] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)
    samples: dict[str, list[float]] = field(default_factory=dict)

    def ms(self, name: str) -> float | None:
        """The median of variant `name`, or None where it did not run."""
        return self.ran[name].ms if name in self.ran else None

    def against(self, name: str, peers: Sequence[str]) -> dict[str, dict[str, Any]]:
        """The verdict on variant `name` against each of these peers that ran."""
        found = {p: judge(self.samples[name], self.samples[p]) for p in peers if p in self.ran and name in self.ran}
        return {p: verdict.as_dict() for p, verdict in found.items() if verdict is not None}

    def fastest(self, names: Sequence[str]) -> float | None:
        """The smallest median among `names`, or None where none of them ran."""
        found = [self.ran[n].ms for n in names if n in self.ran]
        return min(found) if found else None


def summarize(samples: Sequence[float]) -> Timing:
    """Median and interquartile range; with two or three samples the range is the whole spread."""
    if len(samples) >= 4:
        low, _, high = statistics.quantiles(samples, n=4, method="inclusive")
    else:
        low, high = min(samples), max(samples)
    return Timing(statistics.median(samples), high - low, len(samples), disturbed(samples))


class TookTooLong(BaseException):
    """Raised by `deadline`. No `Exception`, so that no handler between here and there takes it for its own."""


@contextlib.contextmanager
def deadline(seconds: float | None) -> Iterator[None]:
    """Raise `TookTooLong` in the body after `seconds`. Without effect outside the main thread and on Windows."""
    usable = hasattr(signal, "SIGALRM") and threading.current_thread() is threading.main_thread()
    if seconds is None or not usable:
        yield
        return

    def ring(*_: Any) -> None:
        raise TookTooLong

    previous = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _event() -> Any:
    """A CUDA event that keeps the time."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def _sleep(cycles: int) -> None:
    """Queue a kernel that spins for so many clock cycles."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


class WallClock:
    """Times on the CPU: the call is over when it returns."""

    def prepare(self, variant: Variant) -> None:
        """Nothing to learn about a variant beforehand."""

    def start(self, variant: Variant) -> Callable[[], float]:
        """Run `variant` once; the returned function gives the milliseconds it took."""
        with variant.around():
            begin = time.perf_counter()
            variant.run()
            taken = (time.perf_counter() - begin) * 1e3
        return lambda: taken

    def synchronize(self) -> None:
        """The CPU is always at the end of its queue."""


class CudaClock:
    """Times on a CUDA device with events; see the head of this file for what precedes each sample.

    Until it first times or spins it holds no memory and leaves the device alone.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._host_ms: dict[str, float] = {}

    @functools.cached_property
    def _flush(self) -> torch.Tensor:
        return torch.zeros(FLUSH_BYTES // 4, dtype=torch.float32, device=self.device)

    @functools.cached_property
    def _sink(self) -> torch.Tensor:
        return torch.zeros((), dtype=torch.float32, device=self.device)

    @functools.cached_property
    def _cycles_per_ms(self) -> float:
        """Clock cycles of one millisecond of `torch.cuda._sleep`, on a device that does nothing else."""
        torch.sum(self._flush, 0, out=self._sink)  # both are made here, and not within a sample
        cycles = 20_000_000
        elapsed = 0.0
        for _ in range(2):  # the first one wakes the device up
            begin, end = _event(), _event()
            begin.record()
            _sleep(cycles)
            end.record()
            end.synchronize()
            elapsed = begin.elapsed_time(end)
        return cycles / max(elapsed, 1e-3)

    def spin(self, ms: float) -> None:
        """Keep the device's current stream busy for about `ms`."""
        _sleep(int(ms * self._cycles_per_ms))

    def prepare(self, variant: Variant) -> None:
        """Measure what the variant costs the host, so that `start` can queue it behind enough work."""
        for spin_ms in (SPIN_MS, MAX_SPIN_MS):
            worst = max(self._host_ms_beside(spin_ms, variant) for _ in range(2))
            if worst < spin_ms:
                break
        self._host_ms[variant.name] = worst

    def _host_ms_beside(self, spin_ms: float, variant: Variant) -> float:
        """Host time of one call while the device is busy for so long."""
        self.synchronize()
        self.spin(spin_ms)
        with variant.around():
            begin = time.perf_counter()
            variant.run()
            taken = (time.perf_counter() - begin) * 1e3
        self.synchronize()
        return taken

    def start(self, variant: Variant, *, marked: bool = False) -> Callable[[], float]:
        """Queue `variant` behind a spin and the L2 flush; the returned function waits and gives milliseconds.

        `marked`: between two more, short spins, for the readers of a profile (which makes the host slow: `spans.py`).
        """
        host_ms = MAX_SPIN_MS if marked else self._host_ms.get(variant.name, 1.0)
        with variant.around():
            for _ in range(TRIES):
                begin, end = _event(), _event()
                self.spin(min(1.5 * host_ms + 0.05, MAX_SPIN_MS))
                self._flush.zero_()
                torch.sum(self._flush, 0, out=self._sink)
                if marked:
                    _sleep(1)
                begin.record()
                variant.run()
                end.record()
                if marked:
                    _sleep(1)
                # A variant that synchronises, or is not worth hiding the host of, is late each time.
                if host_ms >= MAX_SPIN_MS or not begin.query():
                    break

        def wait() -> float:
            end.synchronize()
            return float(begin.elapsed_time(end))

        return wait

    def synchronize(self) -> None:
        """Wait until the device has nothing left to do."""
        torch.cuda.synchronize(self.device)


def clock_for(device: torch.device) -> WallClock | CudaClock:
    """The clock that fits the device."""
    return CudaClock(device) if device.type == "cuda" else WallClock()


def reason(error: BaseException) -> str:
    """The first telling line of an exception, for a table or a JSON field."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:200]}" if lines else type(error).__name__


def warm_up(variant: Variant, clock: WallClock | CudaClock, *, timed: bool = True) -> str | None:
    """Call `variant` until it is ready to be run, and `timed`. Returns None, or the reason it cannot be run."""
    begin = time.perf_counter()
    try:
        for i in range(max(1, variant.warmup)):
            with variant.around(), deadline(variant.limit_s if i == 0 else None):
                variant.run()
            if time.perf_counter() - begin > SLOW_S and i + 1 >= variant.least:
                break
        clock.synchronize()
        if timed:
            clock.prepare(variant)
    except TookTooLong:
        return f"the first call took longer than {variant.limit_s:.0f} s"
    except Exception as error:  # any failure of a peer or of a candidate is a result, not the end of the run
        return reason(error)
    return None


def interleave(
    variants: Sequence[Variant],
    clock: WallClock | CudaClock,
    *,
    budget_s: float = 1.5,
    min_samples: int = 5,
    max_samples: int = 100,
    limit_s: float = 60.0,
    on_progress: Callable[[str], None] | None = None,
    decide: Sequence[tuple[str, str]] = (),
) -> Timings:
    """Time `variants` side by side.

    Each is warmed up, then their samples are interleaved. A first round says what a round costs; as many follow as
    fit into `budget_s`, at least `min_samples` and at most `max_samples` in all, and fewer than the minimum (but one)
    where they would take more than `limit_s`. With pairs to `decide` the sampling ends as soon as the verdict on each
    has its confidence, and goes on for up to `PATIENCE` budgets until then. A variant that raises at any time is
    dropped and named in `failed`.

    Args:
        variants: names must differ.
        clock: from `clock_for`.
        on_progress: told in a few words what is being done.
        decide: pairs of names, a variant and its peer; see `verdicts.py`.
    """
    tell = on_progress or (lambda _: None)
    result = Timings()
    alive = _warmed_up(variants, clock, result, tell)
    samples: dict[str, list[float]] = {v.name: [] for v in alive}
    collecting = gc.isenabled()
    gc.disable()
    try:
        rounds, done = 1, 0
        begin = time.perf_counter()
        while done < rounds and alive:
            shift = done % len(alive)
            for variant in alive[shift:] + alive[:shift]:
                try:
                    samples[variant.name].append(clock.start(variant)())
                except Exception as error:  # as in warm_up
                    result.failed[variant.name] = reason(error)
                    alive = [v for v in alive if v is not variant]
            done += 1
            if done == 1:
                cost = max(time.perf_counter() - begin, 1e-6)
                patience = PATIENCE if decide else 1.0
                rounds = min(max(int(patience * budget_s / cost), min_samples), max_samples)
                rounds = max(1, min(rounds, int(limit_s / cost)))
            if done in LOOKS and decide and _decided(samples, decide):
                break
            tell(f"timing, round {done} of {rounds}")
    finally:
        if collecting:
            gc.enable()
    for variant in alive:
        result.ran[variant.name] = summarize(samples[variant.name])
        result.samples[variant.name] = samples[variant.name]
    return result


def _warmed_up(
    variants: Sequence[Variant], clock: WallClock | CudaClock, result: Timings, tell: Callable[[str], None]
) -> list[Variant]:
    """The variants that are ready; the others are named in `result.failed`."""
    alive = []
    for variant in variants:
        tell(f"warming up {variant.name}")
        why = warm_up(variant, clock)
        if why is None:
            alive.append(variant)
        else:
            result.failed[variant.name] = why
    return alive


def _decided(samples: dict[str, list[float]], pairs: Sequence[tuple[str, str]]) -> bool:
    """Whether no further round is needed for any of the pairs that are still running."""
    length = max(map(len, samples.values()))
    running = [p for p in pairs if all(len(samples.get(name, ())) == length for name in p)]
    found = [judge(samples[ours], samples[peer]) for ours, peer in running]
    return all(verdict is not None and verdict.verdict != "undecidable" for verdict in found)


def host_microseconds(run: Callable[[], object], clock: CudaClock, calls: int = 40) -> float:
    """Host time of one call, µs: the median over `calls` calls made while the device is busy with something else."""
    for _ in range(3):
        run()
    clock.synchronize()
    taken = []
    for _ in range(2):  # few enough launches to stay clear of the driver's queue limit of about a thousand
        clock.spin(100.0)
        for _ in range(calls):
            begin = time.perf_counter()
            run()
            taken.append((time.perf_counter() - begin) * 1e6)
        clock.synchronize()
    return statistics.median(taken)


def captured(run: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one call, after three on a side stream, as capturing wants."""
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream(device).wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def graphed(run: Callable[[], object], device: torch.device) -> Callable[[], object]:
    """The same call replayed from a CUDA graph, which the first call captures (and may fail to)."""
    graphs: list[torch.cuda.CUDAGraph] = []

    def replay() -> None:
        if not graphs:
            graphs.append(captured(run, device))
        graphs[0].replay()

    return replay


def graph_microseconds(run: Callable[[], object], clock: CudaClock, replays: int = 100, rounds: int = 7) -> float:
    """Time of one call replayed from a CUDA graph, µs, with a warm L2.

    The graph holds one call; `replays` of them run back to back behind a spin. Median of `rounds` such runs.
    """
    graph = captured(run, clock.device)
    for _ in range(3):
        graph.replay()
    found: list[float] = []
    for _ in range(rounds):
        begin, end = _event(), _event()
        clock.synchronize()
        clock.spin(10.0)
        begin.record()
        for _ in range(replays):
            graph.replay()
        end.record()
        end.synchronize()
        found.append(begin.elapsed_time(end) / replays * 1e3)
    return statistics.median(found)


def sustained_ms(run: Callable[[], object], clock: CudaClock, seconds: float = 2.0, chunk: int = 20) -> float:
    """Mean time of a call, ms, over `seconds` of calls without a break: what is left when the chip has warmed up."""
    for _ in range(3):
        run()
    clock.synchronize()
    first, last = _event(), _event()
    marks: list[Any] = []
    calls = 0
    begin = time.perf_counter()
    first.record()
    while time.perf_counter() - begin < seconds:
        for _ in range(chunk):
            run()
        calls += chunk
        marks.append(_event())
        marks[-1].record()
        if len(marks) > 2:  # two chunks stay in flight, so that the device never waits
            marks.pop(0).synchronize()
    last.record()
    last.synchronize()
    return float(first.elapsed_time(last)) / calls


def activation_bytes(forward: Callable[[], torch.Tensor], known: Sequence[torch.Tensor]) -> int:
    """Bytes that `forward` keeps for its backward, beside the tensors in `known` (x, parameters and buffers).

    `forward` must have run before, so that no workspace is allocated in it for the first time. The output itself counts
    only where backward needs it: it is dropped, and only its graph is kept. On the CPU, which counts no allocations,
    the tensors handed to autograd are added up, each storage once; an `autograd.Function` that keeps tensors by other
    means than `save_for_backward` would escape that.
    """
    device = known[0].device
    if device.type == "cuda":
        gc.collect()
        torch.cuda.synchronize(device)
        before = torch.cuda.memory_allocated(device)
        graph = forward().grad_fn
        torch.cuda.synchronize(device)
        kept = torch.cuda.memory_allocated(device) - before
        del graph
        return max(0, kept)
    ours = {t.untyped_storage().data_ptr() for t in known}
    seen: dict[int, int] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            seen[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        output = forward()
        del output
    return sum(seen.values())
