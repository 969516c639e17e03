"""`gemmnorm tune`: what is measured and chosen, the table of it, and the planner that takes it."""

from __future__ import annotations

import contextlib
import json
import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from emulator import COMPILER, emulated
from test_cli import MODEL

import gemmnorm
from gemmnorm import plan
from gemmnorm.bench import candidates as timed
from gemmnorm.bench import tuning
from gemmnorm.cli import main as cli
from gemmnorm.cli import tune as command
from gemmnorm.errors import GemmNormWarning
from gemmnorm.export.method import head
from gemmnorm.fuse import described
from gemmnorm.plan import Problem, choice, cublas, tables
from gemmnorm.plan.candidates import Candidate
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import measured, sources
from gemmnorm.userfiles import Outcome

GPU = measured.Gpu("NVIDIA H20 (a test's)", plan.chip_for(90, 78))
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _a_cache_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(measured, "folder", lambda: tmp_path / "cache")  # compiled kernels stay where they are
    monkeypatch.setattr(tables, "here", {})
    yield
    monkeypatch.undo()
    choice._forget()
    runtime.forget()


def problem_of(*sizes: int, chip: plan.Chip = GPU.chip, **more: Any) -> Problem:
    return Problem(*sizes, *["bfloat16"] * 4, "native", chip=chip, **more)


def row_of(problem: Problem, line: str | None, phase: str = "forward", **more: Any) -> dict[str, Any]:
    return {"key": list(tables.key_here(problem, phase)), "line": line, **more}


def second(problem: Problem, phase: str = "forward") -> Candidate:
    """Another candidate of the planner's choice's strategy, of another name."""
    (_, first), *others = plan.ranking(problem, phase)
    return next(c for _, c in others if c.choices != first.choices and c.strategy == first.strategy)


# --- the planner ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("phase", "batch"), [("forward", 16), ("backward", 16384)])  # lines of the shipped table
def test_what_was_measured_here_wins_over_the_shipped_table(phase: str, batch: int) -> None:
    problem = problem_of(batch, 4096, 4096, chip=plan.chip_for(90, 132), save=phase == "backward")
    shipped = tables.measured_best(problem, phase)
    assert shipped is not None
    other, before = second(problem, phase), plan.cached_plan(problem, "one_kernel", phase)
    line = other.choices if phase == "backward" else other.name
    choice.set_measured_here(problem.chip, {tables.key_here(problem, phase): line})
    assert plan.ranking(problem, phase)[0][1] == other
    assert plan.ranking(problem, phase, shipped=True)[0][1] != other
    assert tables.measured_best(problem, phase, shipped=True) == shipped
    made = plan.cached_plan(problem, other.strategy, phase)
    assert made.steps != before.steps
    assert choice.measured_here(made) and not choice.measured_here(before)
    assert not choice.measured_here(plan.make_plan(problem, "reference", phase))
    assert "measured here" in described(made) and "(measured to be the best)" in described(made)
    assert "measured here" not in described(plan.make_plan(problem, "reference"))
    choice.set_measured_here(problem.chip, {})
    assert plan.cached_plan(problem, "one_kernel", phase) == before
    assert "measured here" not in described(before)


def test_a_line_is_for_its_own_chip_and_for_what_is_kept() -> None:
    problem = problem_of(1024, 8192, 8192)
    other = second(problem)
    choice.set_measured_here(GPU.chip, {tables.key_here(problem, "forward"): other.name})
    assert plan.ranking(problem)[0][1] == other
    for elsewhere in (
        replace(problem, chip=plan.chip_for(90, 114)), replace(problem, save=True), replace(problem, training=False),
        replace(problem, batch=1025), replace(problem, dtype="float32", arithmetic="tf32"),
    ):  # fmt: skip
        assert tables.measured_here(elsewhere, "forward") is None
    assert tables.measured_here(replace(problem, dtype="float16", out_dtype="float16"), "forward") == other.name
    assert tables.measured_here(replace(problem, save=True, keep_product=False), "forward") == other.name


def test_a_name_that_the_planner_does_not_have_changes_nothing() -> None:
    problem = problem_of(1024, 8192, 8192)
    before = plan.ranking(problem)
    choice.set_measured_here(GPU.chip, {tables.key_here(problem, "forward"): "one_kernel by magic"})
    assert plan.ranking(problem) == before
    assert not choice.measured_here(plan.make_plan(problem))


def test_whether_the_product_is_kept_does_not_depend_on_it() -> None:
    problem = problem_of(65536, 128, 1024, save=True)
    kept = plan.decide_keep_product(problem, None)
    slowest = plan.ranking(replace(problem, keep_product=kept))[-2][1]
    choice.set_measured_here(GPU.chip, {tables.key_here(replace(problem, keep_product=kept), "forward"): slowest.name})
    assert plan.ranking(replace(problem, keep_product=kept))[0][1] == slowest
    assert plan.decide_keep_product(problem, None) is kept


def test_exported_files_say_it() -> None:
    problem = problem_of(1024, 8192, 8192)
    assert "Measured here" not in head("one_kernel", 90, [plan.make_plan(problem)])
    other = second(problem)
    choice.set_measured_here(GPU.chip, {tables.key_here(problem, "forward"): other.name})
    assert "Measured here" in head("one_kernel", 90, [plan.make_plan(problem)])


# --- the file ---------------------------------------------------------------------------------------------------------


def test_the_table_is_written_whole_and_read_again(tmp_path: Path) -> None:
    one, two = problem_of(1024, 8192, 8192), problem_of(300, 64, 64, training=False)
    tuning.store_measured([row_of(one, None)], GPU)
    assert not measured.path(GPU).exists()
    tuning.store_measured([row_of(one, "a"), row_of(two, "b")], GPU)
    assert measured.read(GPU) == {tables.key_here(one, "forward"): "a", tables.key_here(two, "forward"): "b"}
    assert tables.here[GPU.chip] == measured.read(GPU)
    tuning.store_measured([row_of(one, None)], GPU)  # measured again: the planner's choice is the best now
    assert measured.read(GPU) == {tables.key_here(two, "forward"): "b"}
    path = measured.path(GPU)
    assert [p.name for p in path.parent.iterdir()] == ["measured-NVIDIA-H20-a-test-s-sm_90-78.json"]
    assert path.parent == tmp_path / "cache"


def test_it_lies_beside_the_compiled_kernels(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.undo()
    monkeypatch.setenv("GEMMNORM_CACHE_DIR", str(tmp_path))
    assert measured.path(GPU).parent == tmp_path


def test_a_table_of_other_sources_or_of_another_gpu_is_ignored(monkeypatch: pytest.MonkeyPatch) -> None:
    tuning.store_measured([row_of(problem_of(1024, 8192, 8192), "a")], GPU)
    text = measured.path(GPU).read_text()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert measured.read(GPU)
        for other in (GPU._replace(name="NVIDIA GH200"), GPU._replace(chip=plan.chip_for(90, 114))):
            assert not measured.read(other)
            measured.path(other).write_text(text)
            assert not measured.read(other)
        monkeypatch.setattr(sources, "source_hash", lambda: "of other sources")
        assert not measured.read(GPU)


@pytest.fixture
def here(monkeypatch: pytest.MonkeyPatch) -> Iterator[torch.device]:
    """`GPU` in the place of the machine's."""
    found = SimpleNamespace(name=GPU.name, major=9, minor=0, multi_processor_count=78)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)
    monkeypatch.setattr(measured.driver, "memory_of", lambda index: (0.0, 0))
    measured.described.cache_clear()
    yield torch.device("cuda", 0)
    measured.described.cache_clear()


@pytest.mark.parametrize("broken", ["", "{", "[]", "lines", '{"lines": [[]]}'])
def test_a_broken_table_is_one_warning_and_is_ignored(broken: str, here: torch.device) -> None:
    tuning.store_measured([row_of(problem_of(1024, 8192, 8192), "a")], GPU)
    whole = json.loads(measured.path(GPU).read_text())
    choice.set_measured_here(GPU.chip, {})
    text = json.dumps({**whole, **json.loads(broken)}) if broken.startswith('{"') else broken
    measured.path(GPU).write_text(text)
    with pytest.warns(GemmNormWarning, match="tune --forget") as said:
        assert measured.described(here) == GPU
        assert measured.described(here) == GPU
    assert len(said) == 1 and tables.here[GPU.chip] == {}


def test_the_planner_gets_the_table_when_the_gpu_is_first_described(here: torch.device) -> None:
    tuning.store_measured([row_of(problem_of(1024, 8192, 8192), "a")], GPU)
    choice.set_measured_here(GPU.chip, {})
    assert measured.described(here) == GPU
    assert list(tables.here[GPU.chip].values()) == ["a"]


def test_forgetting_deletes_every_table(capsys: pytest.CaptureFixture[str]) -> None:
    tuning.store_measured([row_of(problem_of(1024, 8192, 8192), "a")], GPU)
    path = measured.path(GPU)
    assert cli.main(["tune", "--forget"]) == 0
    assert str(path) in capsys.readouterr().out
    assert not path.exists() and tables.here == {GPU.chip: {}}
    assert cli.main(["tune", "--forget"]) == 0
    assert "no table" in capsys.readouterr().out


# --- measuring --------------------------------------------------------------------------------------------------------


@dataclass
class Fake:
    """Stands for a candidate's call: what it takes, and what it gives."""

    name: str
    us: float
    value: float = 1.0

    def __call__(self) -> list[torch.Tensor | None]:
        return [torch.full((4,), self.value)]


@pytest.fixture
def timing(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[dict[str, Any]]]:
    """Tunes problems on a machine where each candidate takes what a function says, with a noise of one percent."""

    def run(
        problem: Problem,
        us: Callable[[Candidate], float],
        value: Callable[[Candidate], float] = lambda c: 1.0,
    ) -> list[dict[str, Any]]:
        ticks = iter(range(10**9))
        monkeypatch.setattr(timed, "compile_units", lambda texts, arch: {})
        monkeypatch.setattr(timed, "tensors", lambda *arguments: {})
        monkeypatch.setattr(
            timed, "calls", lambda chosen, given: {c.name: Fake(c.name, us(c), value(c)) for c in chosen}
        )
        clock = lambda calls: [c.us * (1 + next(ticks) * 7919 % 100 / 1e4) for c in calls]  # noqa: E731
        return list(tuning.tune([problem, problem], CPU, clock))

    return run


def test_the_phases_of_a_problem_are_those_that_the_runtime_poses() -> None:
    assert [(p.save, phase) for p, phase in tuning.phases(problem_of(64, 64, 64, training=False, save=True))] == [
        (False, "forward")
    ]
    autocast = problem_of(65536, 128, 1024, cast=("weight",))
    plain, saving, backward = tuning.phases(autocast)
    assert (plain[0].save, saving[0].save, backward[1]) == (False, True, "backward")
    decided = plan.decide_keep_product(replace(autocast, save=True), None)
    assert saving[0].keep_product is backward[0].keep_product is decided
    assert (backward[0].cast, backward[0].grad_dtypes) == ((), ("bfloat16", "float32"))
    with plan.set_keep_product(False):
        assert not list(tuning.phases(autocast))[2][0].keep_product


def test_what_beats_the_planners_choice_clearly_becomes_a_line(timing: Callable[..., list[dict[str, Any]]]) -> None:
    problem = problem_of(1024, 8192, 8192)
    names = {phase: second(p, phase).choices for p, phase in tuning.phases(problem)}
    rows = timing(problem, lambda c: 90.0 if c.choices == names[c.phase] else 100.0)
    assert [row["phase"] for row in rows] == ["training", "training, saving", "backward"]
    for row in rows:
        assert row["line"] in (row["best"], names["backward"]) and row["best"].endswith(names[row["key"][0]])
        assert row["chosen_us"] == pytest.approx(100, rel=0.02) and row["best_us"] == pytest.approx(90, rel=0.02)
        assert not row["failed"] and not row["wrong"]
    tuning.store_measured(rows, GPU)
    for asked, phase in tuning.phases(problem):
        assert plan.ranking(asked, phase, rows[1]["strategy"])[0][1].choices == names[phase]
    again = timing(problem, lambda c: 100.0)  # the planner's own choice is the baseline, whatever was measured before
    assert [row["chosen"] for row in again] == [row["chosen"] for row in rows]
    tuning.store_measured(again, GPU)
    assert not measured.read(GPU)


def test_a_little_is_no_gain(timing: Callable[..., list[dict[str, Any]]]) -> None:
    problem = problem_of(1024, 8192, 8192, training=False)
    (row,) = timing(problem, lambda c: 98.8 if c.name != second(problem).name else 98.5)
    assert row["phase"] == "evaluation" and row["line"] is None and row["best_us"] == row["chosen_us"]


def test_what_computes_something_else_is_left_out(timing: Callable[..., list[dict[str, Any]]]) -> None:
    problem = problem_of(1024, 8192, 8192, training=False)
    wrong = second(problem).name
    (row,) = timing(problem, lambda c: 50.0 if c.name == wrong else 100.0, lambda c: 2.0 if c.name == wrong else 1.0)
    assert row["wrong"] == {wrong: pytest.approx(1.0)} and row["line"] is None


def test_what_does_not_run_here_is_named_and_the_rest_is_timed(
    timing: Callable[..., list[dict[str, Any]]],
) -> None:
    problem = problem_of(1024, 8192, 8192, training=False)
    first = plan.ranking(problem)[0][1].name

    def us(candidate: Candidate) -> float:
        if candidate.name == first:
            raise RuntimeError("too many resources")
        return 100.0

    (row,) = timing(problem, us)
    assert row["failed"] == {first: "RuntimeError: too many resources"} and row["chosen"] != first
    assert row["line"] == row["best"]  # which the planner takes from now on
    with pytest.raises(gemmnorm.GemmNormError, match="no candidate runs"):
        timing(problem, lambda c: 1 / 0)


def test_what_is_slow_twice_is_left_out_and_turns_are_taken() -> None:
    asked: list[list[str]] = []

    def clock(calls: Any) -> list[float]:
        asked.append([call.name for call in calls])
        first = 400.0 if len(asked) == 1 else calls[0].us  # the first sample of all is far off
        return [first, *(call.us for call in calls[1:])]

    calls = {name: Fake(name, us) for name, us in (("a", 10.0), ("b", 11.0), ("c", 30.0))}
    samples = timed.sampled(calls, clock)
    assert [len(samples[name]) for name in "abc"] == [9, 9, 1] and asked[:2] == [["a", "b", "c"], ["b", "c", "a"]]
    assert asked[2:4] == [["a", "b"], ["b", "a"]] and timed.medians(samples) == {"a": 10.0, "b": 11.0, "c": 30.0}


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_real_calls_are_made_and_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward by cuBLAS and three launches, or one, in the emulator."""
    monkeypatch.setattr(timed, "compile_units", lambda texts, arch: {})
    problem = problem_of(70, 16, 24, chip=plan.chip_for(90, 6))
    wanted = {phase: plan.ranking(p, phase, "cublas_folded_bn")[:2] for p, phase in tuning.phases(problem)}
    names = {c.choices for ranked in wanted.values() for _, c in ranked}

    def clock(calls: Any) -> list[float]:
        for call in calls:
            call()
        return [100.0 - 10 * i for i in range(len(calls))]

    with emulated(problem.chip), plan.forcing(lambda c: c.choices in names and c.strategy != "one_kernel"):
        rows = list(tuning.tune([problem], CPU, clock))
    assert [row["candidates"] for row in rows] == [2, 2, 2]
    assert not any(row["failed"] or row["wrong"] for row in rows)


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_a_call_that_was_prepared_before_does_not_keep_the_old_choice() -> None:
    problem = problem_of(70, 16, 24, chip=plan.chip_for(90, 6), training=False)
    other = plan.ranking(problem, strategy="cublas_folded_bn")[0][1]
    module = gemmnorm.LinearScaleBatchNorm1d(16, 24, dtype=torch.bfloat16).eval()
    x = torch.randn(70, 16, dtype=torch.bfloat16)
    with emulated(problem.chip), torch.no_grad(), runtime.recording() as plans:
        before = module(x)
        assert plans[-1].strategy != other.strategy
        tuning.store_measured([row_of(problem, other.name)], GPU._replace(chip=problem.chip))
        after = module(x)
    assert plans[-1].steps == other.plan().steps and choice.measured_here(plans[-1])
    assert torch.allclose(before, after, rtol=0.02, atol=0.02)


# --- the command ------------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("arguments", [["1024", "512", "512"], ["examples/small.py"]])
def test_without_a_gpu_it_says_so_in_one_sentence(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["tune", *arguments]) == 2
    out, err = capsys.readouterr()
    assert not out and err.count("\n") == 1 and "nothing can be measured: there is no NVIDIA GPU here" in err


def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in ([], ["1", "2"]):
        with pytest.raises(SystemExit) as stop:
            cli.main(["tune", *arguments])
        assert stop.value.code == 2 and "three numbers" in capsys.readouterr().err


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """One where the isolated process measures these rows, and then ends so."""

    def pretend(rows: list[dict[str, Any]], ending: Outcome) -> None:
        def isolated(target: str, kwargs: Any, *, time_limit: float, on_progress: Any) -> Outcome:
            json.dumps(kwargs)
            for row in rows:
                on_progress({"stage": row["phase"], "row": row})
            return ending

        monkeypatch.setattr(command, "usable", lambda name: CPU)
        monkeypatch.setattr(measured, "described", lambda device: GPU)
        monkeypatch.setattr(command, "run_isolated", isolated)

    return pretend


@pytest.mark.skipif(COMPILER is None, reason="no g++")
def test_what_runs_in_the_process_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A model file's chains, and three sizes, in the emulator; every message is JSON."""
    chip = plan.chip_for(90, 6)
    sent: list[dict[str, Any]] = []
    monkeypatch.setattr(command, "progress", lambda message: sent.append(json.loads(json.dumps(message))))
    monkeypatch.setattr(command, "QueueClock", lambda device: lambda calls: [10.0 for call in calls])
    monkeypatch.setattr(measured, "described", lambda device: GPU._replace(chip=chip))
    monkeypatch.setattr(timed, "compile_units", lambda texts, arch: {})
    monkeypatch.setattr(torch.cuda, "device", lambda device: contextlib.nullcontext())
    (tmp_path / "model.py").write_text(MODEL)
    double = re.sub(r"(nn\.Linear|nn\.BatchNorm1d)(\(.*\))", r"\1\2.double()", MODEL)
    (tmp_path / "double.py").write_text(double.replace("torch.randn(16, 12)", "torch.randn(16, 12).double()"))
    with emulated(chip), plan.forcing(lambda c: c.variant == cublas.CublasForward() or c.phase == "backward"):
        assert command.child(str(tmp_path / "model.py"), None, "cpu", False) == ""
        assert [m["row"]["phase"] for m in sent if "row" in m] == ["training", "training, saving", "backward"]
        sent.clear()
        assert command.child(str(tmp_path / "model.py"), None, "cpu", True) == ""
        sizes = {k: v for k, v in vars(problem_of(16, 12, 8, training=False)).items() if k != "chip"}
        assert command.child(None, json.loads(json.dumps(sizes)), "cpu", False) == ""
        rows = [m["row"] for m in sent if "row" in m]
        assert [(row["title"], row["phase"]) for row in rows] == [
            ("16 × 12 → 8, float32", "evaluation"), ("16 × 12 → 8, bfloat16", "evaluation"),
        ]  # fmt: skip
        assert "float64 is computed by plain PyTorch ops" in command.child(
            str(tmp_path / "double.py"), None, "cpu", False
        )


def finished(line: str | None) -> dict[str, Any]:
    problem = problem_of(1024, 8192, 8192)
    about = {"title": "1024 × 8192 → 8192, bfloat16", "phase": "training", "strategy": "one_kernel", "candidates": 9}
    us = {
        "chosen": "one_kernel a",
        "chosen_us": 100.0,
        "best": line or "one_kernel a",
        "best_us": 90.0 if line else 100.0,
    }
    return {**row_of(problem, line), **about, **us, "failed": {"c": "too large"}, "wrong": {}}


def test_what_was_gained_is_told_and_stored(
    machine: Callable[..., None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine([finished("one_kernel b")], Outcome("ok", ""))
    path = tmp_path / "t.json"
    assert cli.main(["tune", "1024", "8192", "8192", "--dtype", "bf16", "-q", "--json", str(path)]) == 0
    out = capsys.readouterr().out
    for words in ("one_kernel a", "one_kernel b", "100.0", "90.0", "10.0%", "c does not run: too large"):
        assert words in out, words
    assert "10.0 of 100.0 µs in all are gained" in " ".join(out.split())
    assert list(measured.read(GPU).values()) == ["one_kernel b"]
    assert cli.main(["report", str(path), "-o", str(tmp_path / "p.html")]) == 0
    assert "measured here" in (tmp_path / "p.html").read_text()


def test_nothing_to_gain_is_told(machine: Callable[..., None], capsys: pytest.CaptureFixture[str]) -> None:
    machine([finished(None)], Outcome("ok", ""))
    assert cli.main(["tune", "1024", "8192", "8192", "--dtype", "bf16", "-q"]) == 0
    assert "nothing to gain" in capsys.readouterr().out


@pytest.mark.parametrize(("ending", "rows", "status"), [
    (Outcome("hung", detail="no answer"), 1, "failed"),
    (Outcome("raised", detail="x.ModelFileError: m.py: bad", error_type="x.ModelFileError"), 0, "bad model"),
    (Outcome("ok", "no chain in it"), 0, "no chain"),
])  # fmt: skip
def test_an_end_before_the_end_keeps_what_was_measured(
    ending: Outcome, rows: int, status: str, machine: Callable[..., None], capsys: Any, tmp_path: Path
) -> None:
    machine([finished("one_kernel b")][:rows], ending)
    (path := tmp_path / "model.py").write_text(MODEL)
    assert cli.main(["tune", str(path), "-q", "--json", "-"]) == 2
    document = json.loads(capsys.readouterr().out)
    assert document["status"] == status and document["detail"] and len(measured.read(GPU)) == rows


# --- on a GPU ---------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_small_problem_is_tuned_on_the_gpu_and_the_planner_takes_it(tmp_path: Path) -> None:
    """The line that the planner is given in the end is another candidate than its choice, whichever was faster."""
    device = torch.device("cuda", torch.cuda.current_device())
    path = tmp_path / "t.json"
    assert cli.main(["tune", "4096", "64", "64", "--dtype", "bf16", "--eval", "--json", str(path)]) == 0
    gpu = measured.described(device)
    document = json.loads(path.read_text())
    (row,) = document["rows"]
    assert row["candidates"] > 1 and not row["failed"] and not row["wrong"]
    assert 1.0 < row["best_us"] <= row["chosen_us"]
    assert list(measured.read(gpu).values()) == ([row["line"]] if row["line"] else [])

    problem = problem_of(4096, 64, 64, chip=gpu.chip, training=False)
    other = next(c for _, c in plan.ranking(problem)[1:] if c.strategy != "cublas_bn")
    module = gemmnorm.LinearScaleBatchNorm1d(64, 64, device=device, dtype=torch.bfloat16).eval()
    x = torch.randn(4096, 64, device=device, dtype=torch.bfloat16)
    try:
        with torch.no_grad():
            before = module(x)
            tuning.store_measured([{**row, "line": other.name}], gpu)
            choice.set_measured_here(gpu.chip, {})
            measured.described.cache_clear()  # as in a new process
            runtime.chip.cache_clear()
            with runtime.recording() as plans:
                after = module(x)
        (made,) = plans
        assert made.steps == other.plan().steps and "measured here" in described(made)
        assert torch.allclose(after, before, rtol=0.02, atol=0.02)
    finally:
        measured.described.cache_clear()
        runtime.chip.cache_clear()
