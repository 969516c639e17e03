"""Cells prepared in processes beside each other and measured one at a time, on the CPU."""

from __future__ import annotations

import json
import multiprocessing
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from gemmnorm.bench import cases, suite, workers
from gemmnorm.bench.cases import CASES, Case, Cell
from gemmnorm.bench.cell import Bench, CellResult, Options

CPU = torch.device("cpu")
QUICK = Options(budget_s=0.0, compile=False)
CELLS = cases.select("cpu", ["tiny"], ["fp32"])
FINDS = {"copy_gb_per_s": 1.0, "tflops": {"fp32": 1.0}}


@pytest.fixture(autouse=True)
def _no_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ceilings that take no time to find."""

    def found(self: Bench, _: Any) -> dict[str, Any]:
        self.ceilings = FINDS
        return FINDS

    monkeypatch.setattr(Bench, "measure_ceilings", found)


@pytest.fixture(autouse=True)
def _imported_already(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes are forks of one that has imported PyTorch; but where they need this one's environment."""
    if request.function is not test_nothing_happens_beside_a_measurement:
        server = multiprocessing.get_context("forkserver")
        server.set_forkserver_preload(["gemmnorm.bench.workers"])
        monkeypatch.setattr(workers.multiprocessing, "get_context", lambda method: server)


def spoiled(name: str, phase: str, how: Callable[[], object]) -> Callable[..., None]:
    """`workers.work` in a process where `prepare` or `measure` of the cells of this phase begins with `how`."""
    original = getattr(Bench, name)

    def instead(self: Bench, what: Any) -> Any:
        if (what if isinstance(what, Cell) else what.run.cell).phase == phase:
            how()
        return original(self, what)

    setattr(Bench, name, instead)
    return work


work = workers.work  # as it is, whatever `workers.work` is replaced by


def raising(*given: Any) -> None:
    spoiled("prepare", "eval_fwd", lambda: 1 / 0)(*given)


def raising_late(*given: Any) -> None:
    spoiled("measure", "eval_fwd", lambda: 1 / 0)(*given)


def dying(*given: Any) -> None:
    spoiled("prepare", "eval_fwd", lambda: os._exit(7))(*given)


def dying_late(*given: Any) -> None:
    spoiled("measure", "eval_fwd", lambda: os._exit(7))(*given)


def hanging(*given: Any) -> None:
    spoiled("measure", "eval_fwd", lambda: time.sleep(600))(*given)


def dead(*_: Any) -> None:
    os._exit(9)


def tracing(*given: Any) -> None:
    """Write down when each cell is prepared and measured."""
    for name in ("prepare", "measure"):
        original = getattr(Bench, name)

        def instead(self: Bench, what: Any, name: str = name, original: Any = original) -> Any:
            begin = time.time()
            result = original(self, what)
            with open(os.environ["TRACED"], "a") as file:
                file.write(json.dumps([name, begin, time.time()]) + "\n")
            return result

        setattr(Bench, name, instead)
    work(*given)


def spoil(monkeypatch: pytest.MonkeyPatch, how: Callable[..., None]) -> list[float]:
    """Processes that run `how`; the result collects each one's exit code."""
    monkeypatch.setattr(workers, "work", how)
    end, codes = workers._Worker.end, []

    def ended(self: Any) -> None:
        end(self)
        codes.append(self.process.exitcode)

    monkeypatch.setattr(workers._Worker, "end", ended)
    return codes


def run(cells: Any = CELLS, **given: Any) -> dict[str, Any]:
    return suite.run_suite(cells, CPU, QUICK, workers=2, **given)


def test_the_rows_are_those_of_one_process(tmp_path: Path) -> None:
    told: list[str] = []
    advanced: list[Cell] = []
    path = tmp_path / "r.json"
    got = run(path=path, tell=told.append, on_cell=advanced.append)
    want = suite.run_suite(CELLS, CPU, QUICK)
    for kind in ("rows", "not_applicable"):
        assert [(r["phase"], r["strategy"]) for r in got[kind]] == [(r["phase"], r["strategy"]) for r in want[kind]]
        assert [set(row) for row in got[kind]] == [set(row) for row in want[kind]]
    for ours, theirs in zip(got["rows"], want["rows"], strict=True):
        assert ours["bound_ms"] == theirs["bound_ms"] > 0  # the ceilings have arrived
        assert ours["peak_activation_bytes"] == theirs["peak_activation_bytes"]
        assert ours["error"] == pytest.approx(theirs["error"], rel=0.5) and ours["ms"] > 0
    assert got["notes"] == [] and sorted(map(str, advanced)) == sorted(map(str, CELLS))
    assert json.loads(path.read_text())["rows"] == got["rows"]
    assert got["seconds"]["preparing"] > 0 <= got["seconds"]["measuring"]
    assert told[-1].startswith("cells took ") and told[-1].endswith(" s to measure")


def test_nothing_happens_beside_a_measurement(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("TRACED", str(tmp_path / "trace"))
    spoil(monkeypatch, tracing)
    run([*CELLS, Cell(CASES["tiny"], "bf16", False, "train_fwd")])
    spans = [json.loads(line) for line in (tmp_path / "trace").read_text().splitlines()]
    measured = sorted((begin, end) for name, begin, end in spans if name == "measure")
    assert len(measured) == 4 and len(spans) == 8
    for begin, end in measured:
        beside = [span for span in spans if span[1] < end and span[2] > begin]
        assert len(beside) == 1


@pytest.mark.parametrize("how", [raising, raising_late])
def test_a_cell_that_raises_beside_others_has_a_second_try(how: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, how)
    got = run()
    assert [row["phase"] for row in got["rows"]] == list(cases.PHASES) and got["notes"] == []


def test_a_cell_that_always_raises_leaves_a_note_and_the_others() -> None:
    got = run([Cell(CASES["tiny"], "fp7", False, "train_fwd"), *CELLS])
    assert len(got["rows"]) == 3
    assert len(got["notes"]) == 1 and "fp7" in got["notes"][0] and "KeyError" in got["notes"][0]


@pytest.mark.parametrize("how", [dying, dying_late, pytest.param(hanging, marks=pytest.mark.long)])
def test_a_process_that_is_lost_takes_one_cell_along(how: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spoil(monkeypatch, how)
    if how is hanging:
        monkeypatch.setattr(workers, "START_S", 8.0 - QUICK.compile_limit_s)
    path = tmp_path / "r.json"
    got = run([*CELLS, Cell(CASES["tiny"], "bf16", False, "train_fwd")], path=path)
    assert [(row["precision"], row["phase"]) for row in got["rows"]] == [
        ("fp32", "train_fwd"),
        ("fp32", "train_fwd_bwd"),
        ("bf16", "train_fwd"),
    ]
    why = "gave no answer in time" if how is hanging else "exited with code 7 and without an answer"
    assert got["notes"] == [f"tiny fp32 eval_fwd: its process {why}"]
    monkeypatch.setattr(workers, "work", work)
    again = run(path=path, resume=True)
    assert len(again["rows"]) == 4 and again["notes"] == got["notes"]


def test_where_no_process_lives_this_one_does_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    spoil(monkeypatch, dead)
    got = run()
    assert len(got["notes"]) == 2 and all("exited with code 9" in note for note in got["notes"])
    assert [row["phase"] for row in got["rows"]] == ["train_fwd_bwd"]


def test_an_interrupted_run_keeps_its_file_ends_its_processes_and_goes_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    codes = spoil(monkeypatch, work)
    path = tmp_path / "r.json"

    def interrupt(_: Cell) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(path=path, on_cell=interrupt)
    assert len(codes) == 2 and all(code is not None for code in codes)
    kept = json.loads(path.read_text())
    assert len(kept["rows"]) == 1
    got = run(path=path, resume=True)
    assert sorted(row["phase"] for row in got["rows"]) == sorted(cases.PHASES) and kept["rows"][0] in got["rows"]


def test_what_company_may_have_spoiled_is_measured_again() -> None:
    fine = CellResult(rows=[{"error": 1e-3}], notes=["v0: compile did not run: RuntimeError: no"])
    assert not workers._suffers_from_company(fine)
    assert workers._suffers_from_company(CellResult(rows=[{"error": None}]))
    lacking = [{"reason": "failed: OutOfMemoryError: CUDA out of memory"}]
    assert workers._suffers_from_company(CellResult(not_applicable=lacking))
    assert workers._suffers_from_company(workers.Failure("no"))
    assert not workers._suffers_from_company(workers.Failure("it died", raised=False))


def test_the_number_of_processes_is_that_of_the_cores_or_of_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    many = [Cell(Case(str(i), 8, 8, 8), "fp32", False, "train_fwd") for i in range(50)]
    assert workers.how_many(many, CPU) == 1
    gpu = torch.device("cuda", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 16)
    for memory, want in ((139 * 2**30, 14), (24 * 2**30, 3), (4 * 2**30, 1)):
        about = type("Properties", (), {"total_memory": memory})
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _, about=about: about)
        assert workers.how_many(many, gpu) == want
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: type("P", (), {"total_memory": 2**40}))
    assert workers.how_many(many[:2], gpu) == 2


@pytest.mark.gpu
@pytest.mark.timeout(600)
def test_on_the_gpu_processes_measure_what_one_measures() -> None:
    gpu, options = torch.device("cuda", 0), Options(budget_s=0.2, extras=False, only_chosen=True)
    cells = [Cell(CASES["projector256"], "bf16", False, phase) for phase in cases.PHASES]
    before = torch.cuda.memory_allocated()
    beside, alone = (suite.run_suite(cells, gpu, options, workers=count) for count in (3, 1))
    assert beside["notes"] == alone["notes"] == [] and len(beside["rows"]) == 3
    for ours, theirs in zip(beside["rows"], alone["rows"], strict=True):
        assert ours["strategy"] == theirs["strategy"] and ours["error"] == pytest.approx(theirs["error"], rel=0.5)
        for key in ("ms", "gemm_ms", "eager_ms", "compile_ms", "eager_graphed_ms"):
            # Other tests may be on the same GPU: what disturbs every round of a cell is more than they do.
            assert 0.5 < ours[key] / theirs[key] < 2, key
    assert torch.cuda.memory_allocated() - before < 2**30
