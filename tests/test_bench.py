"""The timing core, the suites, the figures of a row, and the result file."""

from __future__ import annotations

import contextlib
import itertools
import json
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gemmnorm.bench import accuracy, cases, comparison, documents, random_problems, roofline, suite, timing
from gemmnorm.bench import cell as one_cell
from gemmnorm.bench.cases import CASES, Case, Cell
from gemmnorm.bench.cell import Bench, CellResult, CellRun, Options
from gemmnorm.bench.environment import current, default_device
from gemmnorm.bench.model_files import Products
from gemmnorm.bench.timing import Variant, WallClock
from gemmnorm.errors import GemmNormValueError, GemmNormWarning

CPU = torch.device("cpu")
# The row's keys that other people rely on (the result files' format).
ROW = {
    "case", "batch", "in_features", "out_features", "bias", "scale", "activation", "precision", "arithmetic",
    "param_dtype", "autocast", "grad", "phase", "strategy", "chosen", "ms", "ms_iqr", "gemm_ms", "eager_ms",
    "compile_ms", "eager_tf32_ms", "graph_us", "host_us", "sustained_ms", "error", "eager_error",
    "peak_activation_bytes", "eager_activation_bytes",
}  # fmt: skip
QUICK = Options(budget_s=0.02, compile=False)


class FakeClock(WallClock):
    """Every call takes as many milliseconds as the variant's name says; remembers the order."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def start(self, variant: Variant) -> Callable[[], float]:
        variant.run()
        self.calls.append(variant.name)
        return lambda: float(variant.name)


def nothing() -> None:
    """A variant that costs nothing."""


# --- the timing core -------------------------------------------------------------------------------------------------


def test_the_summary_is_the_median_and_the_distance_of_the_quartiles() -> None:
    got = timing.summarize([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (got.ms, got.iqr, got.samples) == (3.0, 2.0, 5)
    assert timing.summarize([7.0]).iqr == 0.0
    assert timing.summarize([1.0, 4.0]) == timing.Timing(2.5, 3.0, 2)


def test_variants_are_sampled_in_turn_and_the_turn_moves_on() -> None:
    clock = FakeClock()
    variants = [Variant(name, nothing) for name in "123"]
    got = timing.interleave(variants, clock, budget_s=0.0, min_samples=4)
    assert "".join(clock.calls) == "123" + "231" + "312" + "123"
    assert got.ms("2") == 2.0 and got.ran["2"].samples == 4
    assert got.fastest(["3", "2", "absent"]) == 2.0 and got.fastest(["absent"]) is None


def test_the_number_of_samples_follows_the_budget_within_its_bounds() -> None:
    slow = Variant("slow", lambda: time.sleep(0.01))
    few = timing.interleave([slow], WallClock(), budget_s=0.1, min_samples=3, max_samples=50)
    assert 3 <= few.ran["slow"].samples <= 10
    assert few.ran["slow"].ms == pytest.approx(10, rel=0.5)
    bounded = timing.interleave([slow], WallClock(), budget_s=9.0, min_samples=3, max_samples=4)
    assert bounded.ran["slow"].samples == 4
    hurried = timing.interleave([slow], WallClock(), budget_s=9.0, min_samples=9, limit_s=0.025)
    assert hurried.ran["slow"].samples <= 2  # the limit is above the minimum


def test_a_variant_that_raises_is_named_with_its_reason_and_spoils_nothing() -> None:
    countdown = itertools.count(5, -1)

    def later() -> None:
        if next(countdown) <= 0:
            raise RuntimeError("out of luck\nand more")

    def never() -> None:
        raise ValueError("no such thing")

    got = timing.interleave(
        [Variant("1", never), Variant("2", later), Variant("3", nothing)], FakeClock(), budget_s=0, min_samples=6
    )
    assert got.failed == {"1": "ValueError: no such thing", "2": "RuntimeError: out of luck"}
    assert set(got.ran) == {"3"} and got.ran["3"].samples == 6


def test_a_first_call_over_its_limit_is_given_up() -> None:
    begin = time.perf_counter()
    got = timing.interleave([Variant("stuck", lambda: time.sleep(30), limit_s=0.2)], WallClock())
    assert time.perf_counter() - begin < 5
    assert "longer than" in got.failed["stuck"]


def test_what_is_around_a_variant_is_not_timed_but_in_force() -> None:
    state: list[str] = []

    class Around:
        def __enter__(self) -> None:
            state.append("in")
            time.sleep(0.02)

        def __exit__(self, *_: object) -> None:
            state.pop()

    seen: list[list[str]] = []
    got = timing.interleave(
        [Variant("v", lambda: seen.append(list(state)), Around)], WallClock(), budget_s=0, min_samples=2
    )
    assert all(s == ["in"] for s in seen) and got.ran["v"].ms < 10


# --- precision switches ----------------------------------------------------------------------------------------------


def matmul_state() -> tuple[object, ...]:
    matmul = torch.backends.cuda.matmul
    return (getattr(matmul, "fp32_precision", None), matmul.allow_tf32, torch.get_float32_matmul_precision())


def test_tf32_is_switched_on_and_everything_put_back() -> None:
    before = matmul_state()
    with cases.tf32(True):
        assert torch.backends.cuda.matmul.allow_tf32
        assert getattr(torch.backends.cuda.matmul, "fp32_precision", "tf32") == "tf32"
        with cases.tf32(False):
            assert not torch.backends.cuda.matmul.allow_tf32
            # "ieee" would ask gemmnorm for float32 arithmetic, not for float32 accuracy.
            assert getattr(torch.backends.cuda.matmul, "fp32_precision", "none") == "none"
        assert torch.backends.cuda.matmul.allow_tf32
    assert matmul_state() == before


@pytest.mark.skipif(not hasattr(torch.backends.cuda.matmul, "fp32_precision"), reason="a torch with one switch only")
def test_tf32_works_where_the_caller_has_used_the_newer_switch() -> None:
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    try:
        with cases.tf32(False):
            assert torch.backends.cuda.matmul.fp32_precision == "none"
        assert torch.backends.cuda.matmul.fp32_precision == "tf32"
    finally:
        torch.backends.cuda.matmul.fp32_precision = "none"


# --- cases -----------------------------------------------------------------------------------------------------------


def test_the_gpu_suite_has_every_case_precision_and_phase_of_the_published_files() -> None:
    found = {(c.case.name, c.label, c.phase) for c in cases.SUITES["h200"]}
    names = ("kb33", "kb39", "projector", "projector256", "mid", "small", "v0")
    assert found == set(itertools.product(names, ("fp32", "tf32", "bf16", "fp16", "amp"), cases.PHASES))
    kb39, projector = CASES["kb39"], CASES["projector"]
    assert (kb39.batch, kb39.in_features, kb39.out_features, kb39.scale) == (16384, 4096, 4096, True)
    assert (projector.bias, projector.scale, projector.activation) == (False, False, "relu")


def test_filters_narrow_a_suite_and_a_case_can_be_borrowed() -> None:
    got = cases.select("h200", ["v0"], ["amp"], ["train_fwd"])
    assert [(c.case.name, c.precision, c.autocast) for c in got] == [("v0", "bf16", True)]
    assert {c.case.name for c in cases.select("cpu", ["small"])} == {"small"}
    assert not cases.select("cpu", precisions=["tf32"])


def test_nothing_that_is_timed_is_zero_or_one() -> None:
    prepared = cases.prepare(Cell(CASES["tiny"], "bf16", False, "eval_fwd"), CPU)
    bn = prepared.eager.bn
    for tensor in (prepared.x, prepared.g, bn.weight, bn.bias, bn.running_mean, bn.running_var):
        assert tensor is not None and tensor.dtype == torch.bfloat16 and float(tensor.detach().float().std()) > 0.01
    assert not prepared.eager.training


# --- accuracy --------------------------------------------------------------------------------------------------------


def test_the_error_is_the_worst_row_or_column_not_the_average() -> None:
    want = torch.randn(40, 30, dtype=torch.float64)
    assert accuracy.relative_error(want.float(), want) < 1e-6
    for index in ((slice(None), 3), (5, slice(None))):
        got = want.clone()
        got[index] *= 1.5
        assert accuracy.relative_error(got, want) == pytest.approx(0.5, rel=1e-6)
    got = want.clone()
    got[0, 0] = float("nan")
    assert accuracy.relative_error(got, want) == float("inf")


def test_an_all_but_empty_column_is_not_blown_up() -> None:
    want = torch.randn(40, 30, dtype=torch.float64)
    want[:, 0] = 1e-12
    got = want.clone()
    got[:, 0] = 2e-12
    assert accuracy.relative_error(got, want) < 1e-8


@pytest.mark.parametrize("parameter", ["gemm.weight", "gemm.bias", "scale", "bn.weight", "bn.bias", "x", "y"])
def test_a_wrong_gradient_shows_whichever_it_is(parameter: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias's gradient is zero and the scale's nearly so: both must be judged all the same, and not accused."""
    cell = Cell(CASES["tiny"], "fp32", False, "train_fwd_bwd")
    prepared = cases.prepare(cell, CPU)
    want = accuracy.golden(prepared, cell)
    assert want is not None

    def forward(module: nn.Module, x: Tensor) -> Tensor:
        y: Tensor = module(x)
        return y

    right = accuracy.error_of(prepared.eager, forward, prepared, cell, want)
    assert right is not None and right < 1e-5
    original = accuracy.outputs

    def spoiled(*args: object) -> dict[str, Tensor]:
        found = original(*args)  # type: ignore[arg-type]
        scale = want.norms[parameter].max() if parameter in want.norms else found[parameter].abs().max()
        found[parameter] = found[parameter] + 0.01 * scale
        return found

    monkeypatch.setattr(accuracy, "outputs", spoiled)
    wrong = accuracy.error_of(prepared.eager, forward, prepared, cell, want)
    assert wrong is not None and wrong > 1e-3


# --- cells -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def document() -> dict[str, object]:
    torch.set_num_threads(1)  # on a busy machine two threads wait for each other
    chosen = [c for c in cases.select("cpu", ["tiny", "tiny_projector"]) if c.precision == "fp32"]
    chosen.append(Cell(CASES["tiny"], "bf16", True, "train_fwd_bwd"))
    return suite.run_suite(chosen, CPU, QUICK)


def test_all_of_a_run_has_its_gpu_as_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Events and graphs are of the current GPU, tensors of their own."""
    assert current(torch.device("cuda", 1)).idx == 1
    inside: list[bool] = []

    @contextlib.contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        assert device == CPU
        inside.append(True)
        yield
        inside.append(False)

    measure = Bench.measure
    monkeypatch.setattr(suite, "current", entered)
    monkeypatch.setattr(Bench, "measure", lambda *given: (inside.append(inside[-1]), measure(*given))[1])
    suite.run_suite(cases.select("cpu", ["tiny"], ["fp32"])[:1], CPU, QUICK)
    assert inside == [True, True, False]


def test_a_row_has_every_published_key_and_null_where_nothing_was_measured(document: dict[str, list[dict]]) -> None:
    assert len(document["rows"]) == 7
    for row in document["rows"]:
        assert set(row) >= ROW
        assert row["strategy"] == "reference" and row["chosen"] is True
        assert row["ms"] > 0 and row["gemm_ms"] > 0 and row["eager_ms"] > 0 and row["ms_iqr"] >= 0
        assert all(row[k] is None for k in ("compile_ms", "eager_tf32_ms", "graph_us", "host_us", "sustained_ms"))
        assert row["grad"] is (row["phase"] == "train_fwd_bwd")
        assert 0 < row["error"] < (0.05 if row["autocast"] else 1e-5)
        assert row["error"] <= 1.5 * row["eager_error"]
    json.dumps(document, allow_nan=False)


def test_strategies_that_do_not_apply_are_listed_with_the_reason(document: dict[str, list[dict]]) -> None:
    found = {item["strategy"] for item in document["not_applicable"]}
    assert {"cublas_bn", "cublas_folded_bn"} <= found and "reference" not in found
    assert all(item["reason"] for item in document["not_applicable"])


def test_memory_kept_for_backward_is_one_output_where_eager_keeps_two(document: dict[str, list[dict]]) -> None:
    row = next(r for r in document["rows"] if r["case"] == "tiny" and r["grad"] and not r["autocast"])
    output = row["batch"] * row["out_features"] * 4
    assert 2 * output <= row["eager_activation_bytes"] < 2.2 * output
    assert output <= row["peak_activation_bytes"] < 1.2 * output


def test_flops_and_bytes_are_the_products_and_each_operand_once() -> None:
    case = Case("c", 10, 20, 30)
    assert roofline.work(Cell(case, "fp32", False, "train_fwd")) == (2.0 * 6000, 4.0 * (200 + 600 + 300))
    assert roofline.work(Cell(case, "bf16", False, "eval_fwd"))[1] == 2.0 * (200 + 600 + 300)
    assert roofline.work(Cell(case, "bf16", False, "train_fwd_bwd"))[0] == 6.0 * 6000
    found = {"copy_gb_per_s": 1.0, "tflops": {"fp32": 1e-6}}
    assert roofline.bound_ms(Cell(case, "fp32", False, "train_fwd"), found) == pytest.approx(12.0)
    assert roofline.bound_ms(Cell(case, "fp16", False, "train_fwd"), found) is None


def test_a_strategy_that_falls_back_is_not_timed_under_its_name() -> None:
    class Falling(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            warnings.warn("kernels do not load, plain ops take over", GemmNormWarning, stacklevel=1)
            return x

    cell = Cell(CASES["tiny"], "fp32", False, "train_fwd")
    run = CellRun(Bench(CPU, QUICK), cell, cases.prepare(cell, CPU), Falling())
    with torch.no_grad():
        assert "plain ops take over" in str(run.first_call("cublas_bn"))
        run.module = one_cell.package_module(cell, run.prepared.eager)
        assert run.first_call("cublas_bn") == "reference ran in its place"  # which is not warned of twice
        assert run.first_call("reference") is None


def test_the_floor_multiplies_what_the_chain_multiplies() -> None:
    cell = Cell(CASES["tiny"], "bf16", True, "train_fwd_bwd")
    for variant in one_cell.floor_variants(cell, cases.prepare(cell, CPU)):
        with Products() as products, torch.no_grad():
            variant.run()
        assert products.flops() == 3 * 2.0 * 64 * 128 * 96
        assert all(a.dtype == torch.bfloat16 for a, _ in products.found)


def test_products_are_recorded_and_replayed_with_their_layout() -> None:
    x = torch.randn(6, 4, requires_grad=True)
    linear = nn.Linear(4, 5)
    with Products() as products:
        (linear(x) * torch.randn(6, 5)).sum().backward()
    assert products.flops() == 3 * 2.0 * 6 * 4 * 5
    with Products() as again:
        products.replay()()
    for (a, b), (c, d) in zip(products.found, again.found, strict=True):
        assert (a.shape, a.stride(), b.shape, b.stride()) == (c.shape, c.stride(), d.shape, d.stride())


# --- the file --------------------------------------------------------------------------------------------------------


def test_a_run_that_was_cut_off_is_continued(tmp_path: object, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "r.json"  # type: ignore[operator]
    ran: list[str] = []

    def measure(self: Bench, cell: Cell) -> CellResult:
        ran.append(str(cell))
        if len(ran) == 2:
            raise KeyboardInterrupt
        return CellResult(rows=[{**one_cell._conditions(cell), "strategy": "reference"}])

    monkeypatch.setattr(Bench, "prepare", lambda self, cell: cell)
    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(Bench, "measure_ceilings", lambda self, cells: {"tflops": {f"run {len(ran)}": 1.0}})
    chosen = cases.select("cpu", ["tiny"], ["fp32"])
    with pytest.raises(KeyboardInterrupt):
        suite.run_suite(chosen, CPU, QUICK, path=path)
    assert len(json.loads(path.read_text())["rows"]) == 1
    got = suite.run_suite(chosen, CPU, QUICK, path=path, resume=True)
    assert [r["phase"] for r in got["rows"]] == list(cases.PHASES)
    assert len(ran) == 4 and json.loads(path.read_text())["rows"] == got["rows"]
    assert got["ceilings"]["tflops"] == {"run 0": 1.0, "run 2": 1.0}
    monkeypatch.setattr(suite.sources, "source_hash", lambda: "of other kernels")
    afresh = suite.run_suite(chosen[:1], CPU, QUICK, path=path, resume=True)
    assert len(afresh["rows"]) == 1 and "started afresh" in afresh["notes"][0]


def test_a_cell_that_fails_leaves_a_note_and_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(self: Bench, cell: Cell) -> CellResult:
        if cell.phase == "eval_fwd":
            raise RuntimeError("out of memory")
        return CellResult(rows=[one_cell._conditions(cell)])

    monkeypatch.setattr(Bench, "prepare", lambda self, cell: cell)
    monkeypatch.setattr(Bench, "measure", measure)
    monkeypatch.setattr(Bench, "measure_ceilings", lambda self, cells: {"tflops": {}})
    got = suite.run_suite(cases.select("cpu", ["tiny"], ["fp32"]), CPU, QUICK)
    assert len(got["rows"]) == 2 and "out of memory" in got["notes"][0]


def test_a_file_is_written_whole_or_not_at_all(tmp_path: object) -> None:
    path = tmp_path / "r.json"  # type: ignore[operator]
    documents.write_json(path, {"a": float("inf"), "b": [float("nan"), 1.5], "c": (1, None)})
    assert json.loads(path.read_text()) == {"a": "inf", "b": ["nan", 1.5], "c": [1, None]}
    with pytest.raises(TypeError):
        documents.write_json(path, {"a": object()})
    assert json.loads(path.read_text())["c"] == [1, None]
    assert [p.name for p in path.parent.iterdir()] == ["r.json"]


def test_counts_come_from_a_junit_file(tmp_path: object) -> None:
    path = tmp_path / "j.xml"  # type: ignore[operator]
    path.write_text('<testsuites><testsuite tests="9" failures="1" errors="1" skipped="3"/></testsuites>')
    assert suite.tests_of(path) == {"passed": 4, "failed": 2, "skipped": 3}


# --- on a GPU --------------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("index", [0, 1])
def test_a_small_cell_on_the_gpu_has_every_figure(index: int) -> None:
    if index >= torch.cuda.device_count():
        pytest.skip("needs two GPUs")
    device = torch.device("cuda", index)
    chosen = [
        Cell(CASES["v0"], "bf16", False, "train_fwd"),
        Cell(CASES["v0"], "fp32", False, "train_fwd_bwd"),
        Cell(CASES["v0"], "bf16", True, "train_fwd_bwd"),
    ]
    got = suite.run_suite(chosen, device, Options(budget_s=0.2, compile=False))
    # Beside the other tests on this GPU, events and kernels may disagree, and say so.
    assert got["rows"] and all("by events" in note for note in got["notes"])
    for row in got["rows"]:
        assert row["strategy"] != "reference"
        assert 0.5 * row["gemm_ms"] < row["ms"] < 50 * row["gemm_ms"]
        assert row["error"] <= 1.25 * row["eager_error"]
        assert (row["graph_us"] is not None) is (row["phase"] == "train_fwd")
        assert (row["host_us"] is not None) is row["grad"]
        assert (row["eager_tf32_ms"] is not None) is (row["precision"] == "fp32")
    assert got["ceilings"]["copy_gb_per_s"] > 100 and got["environment"]["gpu"]


@pytest.mark.gpu
def test_the_host_is_never_what_is_timed_on_the_gpu() -> None:
    """A tiny kernel behind 2 ms of Python takes its own microseconds, not the host's milliseconds."""
    clock = timing.CudaClock(torch.device("cuda", 0))
    x = torch.randn(64, device="cuda")

    def slow_to_ask() -> None:
        time.sleep(0.002)
        x.mul_(1.0)

    got = timing.interleave([Variant("v", slow_to_ask)], clock, budget_s=0.2)
    assert got.ran["v"].ms < 0.2


def test_a_command_names_no_place_of_this_machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("sys.argv", ["gemmnorm", "bench", "examples/small.py", "--json", str(tmp_path / "r.json")])
    assert documents.command_line() == "gemmnorm bench examples/small.py --json r.json"


def test_a_gpu_that_is_not_there_is_refused(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert default_device("cuda:1") == torch.device("cuda", 1) and default_device(None) == torch.device("cuda")
    with pytest.raises(GemmNormValueError, match="expected one of 2 CUDA GPUs, from cuda:0 on; got 'cuda:9'"):
        default_device("cuda:9")


def test_rows_without_what_they_would_be_compared_with():
    """Neither a peer's time nor a GEMM's: no verdict is made up, and no report ends."""
    assert random_problems.behind({"ms": 1.0, "eager_ms": None}) == 0.0
    old, new = {"ms": 2.0, "gemm_ms": 2.0}, {"ms": 2.0, "gemm_ms": None}
    assert comparison.judged(old, new)["verdict"] == "same"
    assert comparison.judged(old, {"ms": 3.0, "gemm_ms": 2.0})["verdict"] == "slower"
