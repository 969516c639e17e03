"""Kernel spans: what is read out of a trace, and that no profiler can break a bench."""

from __future__ import annotations

import random
import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.profiler import ProfilerActivity

from gemmnorm.bench import cross_check, model_files, suite, timing
from gemmnorm.bench.cases import CASES, Cell
from gemmnorm.bench.cell import Bench, Options
from gemmnorm.bench.spans import Event, Replays, SpansError, between_markers, disagreement, recorded, span_of
from gemmnorm.bench.timing import CudaClock, Variant
from gemmnorm.cli import report
from gemmnorm.cli.page import page
from gemmnorm.userfiles import Outcome

SPIN = "at::cuda::(anonymous namespace)::spin_kernel(long)"
CELL = Cell(CASES["tiny"], "fp32", False, "train_fwd")


class Device(CudaClock):
    """A GPU that writes a trace: what variants launch, one activity a call of `launch`."""

    def __init__(self) -> None:
        self.trace: list[Event] = []
        self.now, self.correlation = 1000.0, 0

    def launch(self, name: str, us: float, *, at: float | None = None, category: str = "kernel") -> None:
        begin = self.now if at is None else at
        self.correlation += 1
        event = {"cat": category, "name": name, "ts": begin, "dur": us, "args": {"correlation": self.correlation}}
        self.trace.insert(0, event)  # in no order
        self.now = max(self.now, begin + us)

    def spin(self, ms: float) -> None:
        """Outside the trace."""

    def start(self, variant: Variant, *, marked: bool = False) -> Callable[[], float]:
        assert marked
        self.launch(SPIN, 20e3)
        self.launch("fill", 90.0)
        self.launch(SPIN, 1.0)
        begin = self.now
        variant.run()
        taken = (self.now - begin) / 1e3
        self.launch(SPIN, 1.0)
        return lambda: taken

    def synchronize(self) -> None:
        self.now += 500.0  # the host is slow

    def record(self, run: Callable[[], object]) -> list[Event]:
        run()
        return [*self.trace, {"cat": "cuda_runtime", "name": "cudaLaunchKernel", "ts": 0.0, "dur": 9e9}]


def test_each_variant_has_the_kernels_that_it_launched_and_no_others() -> None:
    gpu = Device()

    def chain() -> None:
        gpu.launch("gemm", 30.0)
        gpu.now += 2.0
        gpu.launch("Memset (Device)", 1.0, category="gpu_memset")
        gpu.launch("norm", 7.0)

    def hidden() -> None:  # on another stream, while the first spin still runs: no event sees it
        gpu.launch("gemm", 400.0, at=gpu.now - 1000.0)

    replays = Replays(gpu)

    def run() -> None:
        for name, variant in (("chain", chain), ("hidden", hidden), ("nothing", lambda: None)):
            replays.add(("cell", name), Variant(name, variant, warmup=2))

    found = replays.taken(run, gpu.record)
    chained, aside, none = (found["cell", name] for name in ("chain", "hidden", "nothing"))
    assert (chained.span_ms, chained.sum_ms, chained.count) == (pytest.approx(0.040), pytest.approx(0.038), 3)
    assert chained.event_ms == pytest.approx(0.040) and disagreement(chained.event_ms, chained.as_dict()) is None
    assert aside.span_ms == pytest.approx(0.4) and aside.event_ms == 0.0
    assert "0.0000 ms by events, 0.4000 ms from the first of 1 kernels" in str(disagreement(0.0, aside.as_dict()))
    assert (none.span_ms, none.sum_ms, none.count) == (None, 0.0, 0) and disagreement(0.001, none.as_dict()) is None


def unseen(found: dict[str, Any]) -> bool:
    """Whether the span holds work that the events of the same run did not see.

    Who else uses the GPU cannot make this true: what preempts a stream comes between its events."""
    return found["span_ms"] > found["event_ms"] and disagreement(found["event_ms"], found) is not None


def in_each_run(problems: Callable[[], set[str]], runs: int = 4) -> set[str]:
    """The problems that every one of so many runs has; as soon as none is left, no more are made.

    Two runs on a GPU that others use take different times, now these and now those; a fault is there each time."""
    left = problems()
    for _ in range(runs - 1):
        left = left and left & problems()
    return left


def test_on_a_gpu_that_others_use_only_the_hidden_work_is_found_each_time() -> None:
    draw = random.Random(1)

    class Shared(Device):
        """Another process has the GPU for 2 ms before a kernel, as often as not."""

        def launch(self, name: str, us: float, *, at: float | None = None, category: str = "kernel") -> None:
            self.now += 2000.0 * draw.randrange(2)
            super().launch(name, us, at=at, category=category)

    def problems() -> set[str]:
        gpu = Shared()
        variants = {
            "seen": lambda: (gpu.launch("gemm", 400.0), gpu.launch("norm", 100.0)),
            "hidden": lambda: (gpu.launch("aside", 20e3, at=gpu.now - 19e3), gpu.launch("norm", 100.0)),
        }
        replays = Replays(gpu)
        taken = replays.taken(lambda: [replays.add(("", n), Variant(n, v)) for n, v in variants.items()], gpu.record)
        found = {name: span.as_dict() for (_, name), span in taken.items()}
        assert {name for name in found if unseen(found[name])} == {"hidden"}
        return {name for name, alone in (("seen", 0.5), ("hidden", 0.1)) if disagreement(alone, found[name])}

    assert {frozenset(problems()) for _ in range(20)} == {frozenset({"hidden"}), frozenset({"seen", "hidden"})}
    assert in_each_run(problems) == {"hidden"}
    assert in_each_run(iter([{"a", "b"}, {"a"}, set()]).__next__) == set()


@pytest.mark.parametrize(("ms", "apart"), [(0.1, False), (0.11, False), (0.07, True), (0.14, True), (None, False)])
def test_times_disagree_beyond_a_fifth_and_a_launch(ms: float | None, apart: bool) -> None:
    found = {"span_ms": 0.1, "sum_ms": 0.1, "count": 1, "event_ms": 0.1}
    assert (disagreement(ms, found) is not None) is apart and disagreement(ms, None) is None
    assert disagreement(0.006, {**found, "span_ms": 0.002}) is None  # three times, and 4 µs


def test_a_profiler_that_is_not_usable_says_why() -> None:
    gpu = Device()

    def broken(run: Callable[[], object]) -> list[Event]:
        raise RuntimeError("CUPTI_ERROR_NOT_INITIALIZED\nand more")

    replays = Replays(gpu)
    with pytest.raises(SpansError, match="RuntimeError: CUPTI_ERROR_NOT_INITIALIZED"):
        replays.taken(lambda: None, broken)

    def blind(run: Callable[[], object]) -> list[Event]:
        run()
        return []

    def raises() -> None:
        raise ValueError("out of luck")

    def run() -> None:
        replays.add(("c", "bad"), Variant("bad", raises))
        replays.add(("c", "v"), Variant("v", lambda: gpu.launch("gemm", 1.0)))

    with pytest.raises(SpansError, match="expected 3 markers in the trace; got 0"):  # under another profiler
        replays.taken(run, blind)
    assert replays.failed == {("c", "bad"): "ValueError: out of luck"}
    gpu = Device()
    spinning = Replays(gpu)
    with pytest.raises(SpansError, match="got 6"):  # a file that spins as well
        spinning.taken(
            lambda: spinning.add(("c", "v"), Variant("v", lambda: gpu.launch(SPIN, 1.0), warmup=2)), gpu.record
        )


def test_a_real_trace_is_read() -> None:
    """The profiler's own, of what a CPU records: names, microseconds and categories are where they are looked for."""
    a = torch.randn(256, 256)
    begin = time.perf_counter()
    events = recorded(lambda: (a @ a).relu(), ProfilerActivity.CPU)
    wall_ms = (time.perf_counter() - begin) * 1e3
    operators = [e for e in events if e.get("cat") == "cpu_op"]
    found = span_of(operators, 0.0)
    assert {"aten::mm", "aten::relu"} <= {e["name"] for e in operators} and found.count == len(operators)
    assert found.span_ms is not None and 0 < found.span_ms < wall_ms and found.sum_ms > 0
    assert between_markers(events, ("cpu_op",)) == []  # nothing before the first marker counts
    if not torch.cuda.is_available():
        with pytest.raises(SpansError):
            Replays(Device()).taken(lambda: None)


# --- results ---------------------------------------------------------------------------------------------------------


def rows_of(cell: Cell) -> list[dict[str, Any]]:
    document = suite.run_suite([cell], torch.device("cpu"), Options(budget_s=0.02, compile=False, extras=False))
    assert document["notes"] == [] and [row["kernels"] for row in document["rows"]] == [None]
    return list(document["rows"])


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Outcome], list[dict[str, Any]]]:
    """Calls of the child process, which gives this outcome."""

    def prepare(outcome: Outcome) -> list[dict[str, Any]]:
        calls: list[dict[str, Any]] = []

        def run_isolated(target: str, kwargs: dict[str, Any], **_: Any) -> Outcome:
            calls.append(kwargs)
            return outcome

        monkeypatch.setattr(cross_check, "run_isolated", run_isolated)
        monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
        return calls

    return prepare


def test_rows_get_their_spans_and_notes_what_disagrees(on_a_gpu: Callable[..., list[dict[str, Any]]]) -> None:
    rows = rows_of(CELL)
    ms, form = rows[0]["ms"], rows[0]["gemm_form"]
    good = {"span_ms": ms, "sum_ms": ms, "count": 2, "event_ms": ms}
    bad = {**good, "span_ms": 7 * rows[0]["eager_ms"]}
    value = {"spans": [{"reference": good, form: None, "eager": bad}], "notes": ["tiny: compile: too long"]}
    calls = on_a_gpu(Outcome("ok", value))
    gpu = torch.device("cuda")
    notes = cross_check.add_spans(rows, [CELL], gpu, lambda _: None)
    assert calls[0]["wanted"][0]["names"] == [form, "eager", "reference"]
    assert cross_check.cell_from(calls[0]["wanted"][0]["cell"]) == CELL
    assert rows[0]["kernels"] == good and rows[0]["eager_kernels"] == bad and rows[0]["compile_kernels"] is None
    assert notes[0] == "no kernel span: tiny: compile: too long" and len(notes) == 2
    assert notes[1].startswith("tiny fp32 train_fwd: eager: ")
    assert cross_check.add_spans(rows, [CELL], gpu, lambda _: None) == [] and len(calls) == 1  # resumed: all there
    shown = {"schema": 1, "kind": "bench", "rows": rows, "notes": notes, "environment": {}}
    assert "span ms (kernels)" in report.text(shown) and "span ms (kernels)" in page(shown)


@pytest.mark.parametrize("status", ["crashed", "hung", "raised"])
def test_a_lost_profiler_loses_no_times(status: Any, on_a_gpu: Callable[..., Any]) -> None:
    rows = rows_of(CELL)
    on_a_gpu(Outcome(status, detail="log\nthe process was killed by SIGSEGV"))
    notes = cross_check.add_spans(rows, [CELL], torch.device("cuda"), lambda _: None)
    assert len(notes) == 1 and notes[0].startswith("kernel spans were not taken: ") and "SIGSEGV" in notes[0]
    assert rows[0]["kernels"] is None and rows[0]["ms"] > 0


def test_the_variants_of_a_cell_can_be_made_again() -> None:
    row = rows_of(CELL)[0]
    bench = Bench(torch.device("cpu"), Options(compile=False))
    made = cross_check.variants_of(bench, cross_check.cell_from(asdict(CELL)), cross_check._timed([row]))
    assert [v.name for v in made] == [row["gemm_form"], "eager", "reference"]
    assert all(timing.warm_up(v, bench.clock, timed=False) is None for v in made)


def test_a_file_whose_profile_takes_the_process_along_keeps_its_times(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = {"rows": [{"phase": "eval_fwd", "ms": 1.0}], "failed": {}, "notes": ["a"], "matches": []}
    last = {"stage": "kernel spans", "subject": "timing", "answer": answer}
    monkeypatch.setattr(model_files, "run_isolated", lambda *_, **__: Outcome("crashed", detail="gone", last=last))
    found = model_files.bench_files("m.py")
    assert found["status"] == "ok" and found["rows"] == answer["rows"]
    assert found["notes"] == ["a", "kernel spans were not taken: crashed"]


# --- on a GPU --------------------------------------------------------------------------------------------------------

MODEL = """
import torch
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm, self.bn = torch.nn.Linear(1024, 2048), torch.nn.BatchNorm1d(2048)
    def forward(self, x):
        return self.bn(self.gemm(x))
def get_inputs():
    return [torch.randn(2048, 1024)]
def get_init_inputs():
    return []
"""
ASIDE = """
class ModelNew(Model):
    def forward(self, x):
        aside = torch.cuda.Stream()
        with torch.cuda.stream(aside):
            for _ in range(20):
                torch.mm(self.gemm.weight, self.gemm.weight.t())
        return super().forward(x)
"""


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_kernels_bear_the_events_out_on_the_gpu() -> None:
    """Sizes from launches to milliseconds; what events said is what the kernels took."""
    cells = [
        Cell(CASES["v0"], "bf16", False, "train_fwd"),
        Cell(CASES["v0"], "fp32", False, "train_fwd_bwd"),
        Cell(CASES["kb33"], "tf32", False, "train_fwd"),
    ]

    def problems() -> set[str]:
        got = suite.run_suite(cells, torch.device("cuda", 0), Options(budget_s=0.3))
        print("\nnotes:", *got["notes"], sep="\n  ")
        found = {note.split(" ms by events")[0].rpartition(": ")[0] or note for note in got["notes"]}
        for row in got["rows"]:
            cell = f"{row['case']} {row['precision']} {row['phase']}"
            print(cell, row["strategy"], row["ms"], row["kernels"])
            assert row["kernels"]["count"] >= 1 and row["kernels"]["sum_ms"] > 0 and not unseen(row["kernels"])
            if disagreement(row["kernels"]["event_ms"], row["kernels"]):
                found.add(f"{cell}: {row['strategy']}: in the same run")
            for peer in cross_check.PEERS:
                print("  ", peer, row[f"{peer}_ms"], row[f"{peer}_kernels"])
                assert row[f"{peer}_kernels"]["count"] >= 1 and not unseen(row[f"{peer}_kernels"])
        return found

    assert not in_each_run(problems)


@pytest.mark.gpu
@pytest.mark.timeout(900)
def test_work_on_another_stream_shows_in_the_span(tmp_path: Path) -> None:
    model, aside = tmp_path / "m.py", tmp_path / "n.py"
    model.write_text(MODEL)
    aside.write_text(MODEL + ASIDE)
    options = model_files.FileOptions(phases=("eval_fwd",), compile=False, budget_s=0.3)

    def problems() -> set[str]:
        """Of the two files, the one that should have no note and has one, or should and has none."""
        got = model_files.bench_files(model, [aside], options)
        rows = {row["variant"]: row for row in got["rows"]}
        print(got["notes"], {name: (row["ms"], row["kernels"]) for name, row in rows.items()})
        eager, candidate = rows["eager"]["kernels"], rows[str(aside)]["kernels"]
        assert eager["count"] >= 2 and not unseen(eager)
        assert candidate["count"] > 20 and unseen(candidate)
        noted = {name for name in rows if any(note.startswith(f"eval_fwd: {name}: ") for note in got["notes"])}
        return (noted & {"eager", str(aside)}) ^ {str(aside)}

    assert not in_each_run(problems)
