"""The equality check: honest files pass, every trap is caught, and no file can take the tool down."""

import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from gemmnorm.errors import GemmNormValueError
from gemmnorm.userfiles import ModelFileError, load_candidate_file, load_model_file, without_dropout
from gemmnorm.verify import FAULTS, check_files, judge, references, verify
from gemmnorm.verify.equality import Limits, compare, pool
from gemmnorm.verify.families import Case, draw_inputs, draw_state, roles
from gemmnorm.verify.golden import Sample
from gemmnorm.verify.reading import suspicions
from gemmnorm.verify.rounding import Arithmetic, Kinks, Units
from gemmnorm.verify.schedule import Schedule
from gemmnorm.verify.trial import run_trial

TRAPS = Path(__file__).parent / "traps"
sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import gallery  # noqa: E402
from calibrate_verify import ALONE, GPU, MODELS, Header, candidates_of, model_of  # noqa: E402

MODELS = ("model.py", *MODELS)
FILES = [(model, name) for model in MODELS for name in candidates_of(model)]
HONEST = [pair for pair in FILES if not pair[1].startswith("trap_")]
CAUGHT = [pair for pair in FILES if pair[1].startswith("trap_")]
pytestmark = pytest.mark.usefixtures("warm_processes")


@pytest.fixture(scope="session")
def prepared():
    """Each model's references, built once and judged against by every candidate."""
    kept = {}

    def prepare(name, effort="usual"):
        if (name, effort) not in kept:
            file = load_model_file(TRAPS / name)
            with without_dropout():
                kept[name, effort] = file, list(references(file, seeds=1, effort=effort))
        return kept[name, effort]

    return prepare


@pytest.fixture
def judged(prepared):
    def judge_file(name, effort="usual", **how):
        original, cases = prepared(model_of(name), effort)
        with without_dropout():
            return judge(load_candidate_file(TRAPS / name), original, cases, **how)

    return judge_file


# ------------------------------------------------------------------------------------------------ files, good and bad


@pytest.mark.parametrize(("model", "name"), HONEST, ids=[name for _, name in HONEST])
def test_honest_files_are_not_accused(judged, model, name):
    result = judged(name)
    assert result["equal"], result["reason"]
    assert result["exit_code"] == 0 and result["failures"] == 0
    assert all(check["ratio"] < 0.9 for check in result["checks"])


@pytest.mark.parametrize(("model", "name"), CAUGHT, ids=[name for _, name in CAUGHT])
def test_traps_are_caught(judged, model, name):
    result = judged(name)
    assert not result["equal"] and result["exit_code"] == 1
    assert name in result["reason"]
    failed = [check for check in result.get("checks", []) if not check["ok"]]
    assert all(check["ratio"] is None or check["ratio"] > 1 for check in failed)
    assert failed or "differ" in result["reason"] or result["verdict"] == "candidate_raises"
    assert result["fault"]["class"] == Header.of(name).kind, result["reason"]


def test_the_page_of_the_gallery_is_that_of_its_files():
    assert (TRAPS / "README.md").read_text(encoding="utf-8") == gallery.page()
    names = [path.name for path in TRAPS.glob("*.py")]
    kinds = {Header.of(name).kind for name in names if name.startswith("trap_")}
    assert kinds == set(FAULTS)  # every class has a file, and every file a class
    assert all(model_of(name) != "model.py" or not name.startswith("model_") for name in names)


@pytest.mark.parametrize(
    ("name", "quantity", "phase"),
    [
        ("trap_biased_running_var.py", "bn.running_var", "train"),
        ("trap_eps_in_running_var.py", "bn.running_var", "train"),
        ("trap_counter_forgotten.py", "bn.num_batches_tracked", "train"),
        ("trap_bias_gradient_zero_in_eval.py", "grad:gemm.bias", "eval"),
        ("trap_momentum_swapped.py", "bn.running_mean", "train"),
        ("trap_scale_detached.py", "grad:scale", "eval"),
        ("trap_eval_uses_batch_statistics.py", "output", "eval"),
    ],
)
def test_the_right_quantity_is_named(judged, name, quantity, phase):
    failed = {(c["quantity"], c["phase"]) for c in judged(name, to_the_end=True)["checks"] if not c["ok"]}
    assert (quantity, phase) in failed
    assert "output without autograd" not in {q for q, _ in failed} or quantity == "output"


@pytest.mark.long
def test_the_quick_cases_catch_all_that_is_wrong(judged):
    assert [name for _, name in CAUGHT if judged(name, "quick")["equal"]] == []


def test_the_first_failure_ends_it(judged):
    short = judged("trap_tail_rows_left_out.py")
    full = judged("trap_tail_rows_left_out.py", to_the_end=True)
    assert {c["case"] for c in short["checks"]} == {"plain"} and not short["equal"]
    assert len({c["case"] for c in full["checks"]}) == 27


def test_limits_of_the_first_runs_are_refined_where_they_do_not_suffice(prepared):
    file, thorough = prepared("model_projector.py", "thorough")
    fresh = next(iter(references(file, seeds=1)))
    first = {name: limits.spread for name, limits in fresh.limits.items()}
    assert fresh.refine is not None and all(r.refine is None for r in thorough)
    fresh.refine()
    assert fresh.refine is None
    for name, limits in thorough[0].limits.items():
        if limits.spread is None:  # the count of batches, which no rounding error changes
            continue
        assert torch.equal(fresh.limits[name].spread, limits.spread)
        assert first[name].norm() < 0.8 * limits.spread.norm()
        assert limits.flips is None or torch.equal(fresh.limits[name].flips, limits.flips)


def test_properties(judged):
    fine = judged("honest_folded.py")["properties"]
    assert fine["same_parameter_names"] and fine["same_drawing_order"] and fine["deterministic"]
    assert fine["inputs_mutated"] is False and fine["outputs_share_memory"] is False
    assert fine["allclose_eager"] == {"train": True, "eval": True, "tolerance": 1e-4}
    order = judged("honest_drawn_in_another_order.py")
    assert order["equal"] and order["properties"]["same_drawing_order"] is False
    assert any("DRAWING ORDER" in sentence for sentence in order["warnings"])
    assert judged("trap_input_mutated.py")["properties"]["inputs_mutated"]
    assert judged("trap_output_buffer_reused.py")["properties"]["outputs_share_memory"]
    assert judged("trap_renamed_parameters.py")["properties"]["same_parameter_names"] is False
    more_exact = judged("honest_bf16_float32_inside.py")
    assert more_exact["equal"] and more_exact["properties"]["allclose_eager"]["tolerance"] == 1e-2


# --------------------------------------------------------------------------------------------------------- in isolation


def test_verify_answers_in_json(tmp_path):
    seen = []
    result = verify(TRAPS / "model.py", TRAPS / "honest_folded.py", seeds=1, device="cpu", on_progress=seen.append)
    assert json.loads(json.dumps(result, allow_nan=False)) == result
    assert result["schema"] == 1 and result["equal"] and result["verdict"] == "equal" and result["exit_code"] == 0
    keys = {"seed", "case", "phase", "quantity", "measure", "error", "eager_error", "limit", "ratio", "ok", "position"}
    assert keys <= set(result["checks"][0])
    assert {c["phase"] for c in result["checks"]} == {"train", "eval"}
    quantities = {c["quantity"] for c in result["checks"]}
    parameters = ("gemm.weight", "gemm.bias", "scale", "bn.weight", "bn.bias", "input0")
    assert {"output", "bn.running_mean", "bn.running_var", *(f"grad:{name}" for name in parameters)} <= quantities
    assert seen[-1]["done"] == seen[-1]["total"] > 20


# How a candidate ended: the verdict, and what its reason says.
ENDED = {
    "trap_hangs.py": ("candidate_hangs", "gave no answer within"),
    "trap_exits.py": ("candidate_crashes", "exited with code 0"),
    "trap_aborts.py": ("candidate_crashes", "SIGSEGV"),
}


@pytest.mark.parametrize("name", candidates_of("model.py", ALONE))
def test_candidates_that_need_a_process_of_their_own(name):
    limit = 10 if "hangs" in name else 100
    verdict, words = ENDED.get(name, (None, ""))
    result = verify(TRAPS / "model.py", TRAPS / name, seeds=1, device="cpu", time_limit=limit)
    assert not result["equal"] and result["exit_code"] == 1 and name in result["reason"]
    assert result["fault"]["class"] == Header.of(name).kind, result["reason"]
    assert words in result["reason"] and verdict in (None, result["verdict"])


@pytest.mark.gpu
@pytest.mark.parametrize("name", candidates_of("model.py", GPU))
def test_candidates_that_need_a_gpu(name):
    result = verify(TRAPS / "model.py", TRAPS / name, seeds=1, device="cuda", time_limit=200)
    assert not result["equal"] and result["fault"]["class"] == Header.of(name).kind, result["reason"]


def test_what_a_file_may_do_and_a_reader_should_know(judged):
    packed = judged("honest_weights_prepacked.py")
    assert packed["equal"] and packed["properties"]["weights_prepacked"]
    assert any("PREPACKED" in sentence for sentence in packed["warnings"])
    assert judged("honest_folded.py")["properties"]["weights_prepacked"] is False
    more_exact = judged("honest_three_products.py")
    assert "its output's error on plain data" in more_exact["reason"]
    assert 0 < more_exact["properties"]["output_error"]["train"]["error"] < 1e-6


def test_suspicious_sources_are_said_with_their_lines():
    said = " ".join(suspicions(str(TRAPS / "trap_patches_timers.py")))
    assert "assigns to time.perf_counter" in said and "assigns to torch.cuda.Event.elapsed_time" in said
    assert "reads the call stack (line" in " ".join(suspicions(str(TRAPS / "trap_reads_callers.py")))
    honest = [path for path in TRAPS.glob("*.py") if not path.name.startswith("trap_")]
    assert not any(suspicions(str(path)) for path in honest)


def test_no_limit_lets_zeros_or_another_sign_pass(prepared):
    """Whatever the scale of the outputs: the limit of the whole tensor is a small part of its norm on plain data."""
    for model in MODELS:
        _, cases = prepared(model)
        for reference in (r for r in cases if r.case.name == "plain"):
            for name in (n for n in reference.golden if n.startswith("output")):
                golden, eager = reference.golden[name], reference.eager[name]
                limits = compare(torch.zeros_like(eager), eager, golden, reference.limits.get(name))
                assert limits[0].limit < 0.05 and not limits[0].ok, (model, name)


def test_a_model_that_crashes_is_the_models_fault(tmp_path):
    path = tmp_path / "model.py"
    path.write_text("import os\nos.abort()\n")
    result = verify(path, TRAPS / "model.py", time_limit=60)
    assert result["verdict"] == "model_bad" and result["exit_code"] == 2 and "SIGABRT" in result["reason"]


# Computes in float32 and rounds once, to the input's dtype, before the normalisation: honest whatever that is.
ROUNDED_ONCE = """
class ModelNew(Model):
    def forward(self, x):
        y = torch.nn.functional.linear(x.float(), self.gemm.weight.float(), self.gemm.bias.float())
        return self.bn((y * self.scale.float()).to(x.dtype))
"""
# Operands rounded to bfloat16: honest where they are that, no float32.
ROUNDED_INSIDE = """
class ModelNew(Model):
    def forward(self, x):
        def half(t): return t.bfloat16().to(x.dtype)
        y = torch.nn.functional.linear(half(x), half(self.gemm.weight), self.gemm.bias) * self.scale
        return self.bn(y)
"""


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_precision_is_both_files(tmp_path, precision):
    source = (TRAPS / "model.py").read_text()
    path, new = tmp_path / "model.py", tmp_path / "new.py"
    path.write_text(source)
    new.write_text(source + ROUNDED_ONCE)
    result = verify(path, new, effort="quick", device="cpu", precision=precision)
    assert result["equal"] and result["precision"] == precision, result["reason"]
    new.write_text(source + ROUNDED_INSIDE)
    result = verify(path, new, effort="quick", device="cpu", precision=precision)
    assert result["equal"] == (precision == "bf16"), result["reason"]


def test_a_model_that_the_cast_breaks_is_the_models_fault(tmp_path):
    """As with KernelBench, integers are cast too: nothing can be looked up any more."""
    path = tmp_path / "model.py"
    source = (TRAPS / "model.py").read_text()
    path.write_text(source.replace("self.gemm(x)", "self.gemm(x[torch.arange(160).to(x.dtype)])"))
    result = verify(path, path, effort="quick", device="cpu", precision="bf16")
    assert result["verdict"] == "model_bad"


@pytest.mark.parametrize(("name", "value", "said"), [
    ("precision", "tf32", "precision must be one of fp32, fp16, bf16, got 'tf32'"),
    ("seeds", 0, "seeds must be a whole number from 1"),
    ("effort", "bogus", "effort must be one of quick, usual, thorough"),
    ("time_limit", -1, "time_limit must be a positive number"),
    ("device", "bogus", "without CUDA"),
])  # fmt: skip
def test_arguments_of_verify(name, value, said):
    with pytest.raises(GemmNormValueError, match=said):
        verify("a.py", "b.py", **{name: value})


def test_bad_models(tmp_path):
    path = tmp_path / "model.py"
    result = check_files(str(path), str(TRAPS / "model.py"), 1, "cpu")
    assert (result["verdict"], result["exit_code"]) == ("model_bad", 2) and "no such file" in result["reason"]
    source = (TRAPS / "model.py").read_text()
    path.write_text(source.replace("torch.randn(160, 40)", "torch.randn(160, 41)"))
    assert "Model must run on what get_inputs() returns" in check_files(str(path), str(path), 1, "cpu")["reason"]
    path.write_text(source.replace("self.gemm(x) *", "torch.rand_like(self.gemm(x)) *"))
    assert "draws random numbers" in check_files(str(path), str(path), 1, "cpu")["reason"]


def test_a_candidate_that_does_not_load(tmp_path):
    path = tmp_path / "new.py"
    path.write_text("import nothing_of_this_name\n")
    result = check_files(str(TRAPS / "model.py"), str(path), 1, "cpu")
    assert (result["verdict"], result["exit_code"]) == ("candidate_raises", 1)


def test_a_model_whose_batch_is_fixed(tmp_path):
    path = tmp_path / "model.py"
    source = (TRAPS / "model.py").read_text().replace("torch.randn(160, 40)", "torch.randn(24, 40)")
    path.write_text(source.replace("self.gemm(x)", "self.gemm(x.reshape(24, 40))"))
    plan = Schedule(load_model_file(path), 1, "cpu")
    assert any("batch" in sentence for sentence in plan.skipped)
    result = judge(load_candidate_file(TRAPS / "honest_folded.py"), plan.file, plan.references())
    assert result["equal"], result["reason"]


# -------------------------------------------------------------------------------------------------------------- compare


def _measures(candidate, eager, golden, spread=None, flips=None):
    return {m.measure: m for m in compare(candidate, eager, golden, Limits(spread, flips))}


def test_compare_finds_the_worst_position():
    golden = torch.randn(6, 9, dtype=torch.float64)
    eager = golden.float()
    candidate = eager.clone()
    candidate[4, 7] += 1e-3
    found = _measures(candidate, eager, golden)
    assert [m.ok for m in found.values()] == [False] * 4
    assert found["worst"].position == [4, 7] and found["row"].position == [4] and found["column"].position == [7]
    assert found["worst"].error == pytest.approx(1e-3 / abs(golden[4, 7].item()), rel=1e-3)
    assert all(m.ok for m in _measures(eager, eager, golden).values())


def test_compare_uses_eager_spread_and_flips():
    golden = torch.ones(50, dtype=torch.float64)
    eager, candidate = golden.float(), golden.float() + 1e-4
    assert not _measures(candidate, eager, golden)["worst"].ok
    assert _measures(candidate, eager + 1e-4, golden)["worst"].ok
    assert _measures(candidate, eager, golden, spread=torch.full((50,), 5e-5).double())["worst"].ok
    assert _measures(candidate, eager, golden, flips=torch.full((50,), 1e-4).double())["worst"].ok


def test_compare_judges_exact_zeros_by_what_cancelled():
    golden, noise = torch.zeros(20, dtype=torch.float64), torch.full((20,), 1e-7, dtype=torch.float64)
    exact, noisy, wrong = torch.zeros(20), 1e-7 * torch.randn(20).clamp(-2, 2), torch.full((20,), 0.1)
    assert all(m.ok for m in _measures(exact, noisy, golden, noise).values())
    assert all(m.ok for m in _measures(noisy, exact, golden, noise).values())
    assert not any(m.ok for m in _measures(wrong, noisy, golden, noise).values())


def test_compare_of_values_that_are_not_finite():
    nan, inf = math.nan, math.inf
    golden = torch.tensor([1.0, nan, inf, 2.0, 1e30]).double()
    eager = torch.tensor([1.0, nan, inf, 2.0, inf])
    assert all(m.ok for m in _measures(eager, eager, golden).values())
    assert all(m.ok for m in _measures(torch.tensor([1.0, inf, nan, 2.0, 7.0]), eager, golden).values())
    invented = compare(torch.tensor([nan, nan, inf, 2.0, inf]), eager, golden)
    assert [m.ok for m in invented] == [False] and invented[0].position == [0]
    assert "nan, where the original is finite" in invented[0].note and invented[0].as_dict()["ratio"] is None
    swallowed = compare(torch.tensor([1.0, 0.0, inf, 2.0, inf]), eager, golden)
    assert not swallowed[0].ok and swallowed[0].position == [1]


def test_compare_of_shapes_dtypes_and_integers():
    x = torch.ones(3)
    assert compare(torch.ones(4), x, x)[0].measure == "shape"
    assert compare(x.half(), x, x)[0].note == "dtype float16, expected float32"
    counter = torch.tensor(3)
    assert compare(counter, counter, counter)[0].ok
    assert compare(counter + 1, counter, counter)[0].note == "4, expected 3"
    assert compare(torch.ones(0, 3), torch.ones(0, 3), torch.ones(0, 3))[0].ok


def test_pool_takes_the_larger_of_own_and_role():
    squares = torch.ones(16, dtype=torch.float64)
    squares[3], squares[11], squares[4] = 0.0, 8.0, 100.0
    pooled = pool(squares)
    assert pooled[3] == 4.0 and pooled[11] == 8.0 and pooled[12] == 50.5 and pooled[5] == 1.0


# ------------------------------------------------------------------------------------------------------------- rounding

FLOAT32 = Units(2.0**-24, 2.0**-24)


def _spread(function, *inputs, units=FLOAT32, draws=40):
    exact = function(*inputs)
    squares = 0.0
    for seed in range(draws):
        with Arithmetic(units, seed=seed):
            squares = squares + (function(*(x.clone() for x in inputs)) - exact).square()
    return (squares / draws).sqrt()


def test_spread_of_a_product_covers_a_float32_product():
    x, w = torch.randn(30, 500, dtype=torch.float64), torch.randn(20, 500, dtype=torch.float64)
    spread = _spread(lambda a, b: a @ b.t(), x, w)
    float32 = (x.float() @ w.float().t()).double() - x.float().double() @ w.float().double().t()
    assert 1 < spread.norm() / float32.norm() < 60
    exact = 2.0**-24 * math.sqrt(500) * math.sqrt(500)  # u·‖x‖·‖w‖
    assert 0.3 * exact < spread.mean() < 3 * exact


def test_spread_grows_with_the_mean_of_a_column():
    bn = nn.BatchNorm1d(4).double()
    x = torch.randn(64, 4, dtype=torch.float64)
    near = _spread(lambda z: bn(z + 0.0), x).mean()
    far = _spread(lambda z: bn(z + 1e4), x).mean()
    assert 1e-8 < near < 1e-6 and 1e3 < far / near < 1e5


def test_half_precision_grids_let_columns_collapse():
    x = 1e4 + torch.randn(16, 64, dtype=torch.float64)
    with Arithmetic(Units(2.0**-8, 2.0**-24, grid=torch.bfloat16), seed=1):
        stored = x + 0.0
    assert ((stored.max(0).values - stored.min(0).values) == 0).float().mean() > 0.5
    assert ((stored - x).abs() <= 2.0**-8 * x.abs()).all()


def test_golden_arithmetic_ignores_casts_and_rounds_nothing():
    x = torch.randn(5, 3, dtype=torch.float64)
    with Arithmetic():
        y = x.float() * 3 + torch.ones(3, dtype=torch.float32) + x.to(torch.bfloat16)
    assert y.dtype == torch.float64 and torch.equal(y, x * 3 + 1 + x)


def test_rounding_reaches_backward_and_leaves_inputs_alone():
    model = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5)).double()
    x = torch.randn(12, 6, dtype=torch.float64)
    g = torch.randn(12, 5, dtype=torch.float64)
    runs = [
        run_trial(model, [x.clone()], training=True, cotangent=lambda i, y: g, mode=Arithmetic(units, seed=1)).values
        for units in (None, FLOAT32)
    ]
    for name in ("output", "grad:0.weight", "grad:0.bias", "grad:1.weight", "grad:1.bias", "grad:input0"):
        difference = (runs[0][name] - runs[1][name]).abs().max()
        assert 0 < difference < 1e-3, name


def test_kinks_are_found_and_flipped():
    x = torch.tensor([[1.0, 1e-9, -1e-9, -1.0]], dtype=torch.float64)
    kinks = Kinks()

    def gradient(units):
        z = x.clone().requires_grad_()
        with Arithmetic(units, kinks=kinks):
            torch.relu(z + 1.0 - 1.0).sum().backward()
        return z.grad

    before = gradient(None)
    kinks.mode = "measure"
    for _ in range(3):
        gradient(FLOAT32)
    assert kinks.mark(pool) == 2
    kinks.mode = "flip"
    assert before.tolist() == [[1, 1, 0, 0]] and gradient(None).tolist() == [[1, 0, 1, 0]]


def test_large_tensors_are_compared_by_whole_periods_of_rows():
    sample = Sample.of(torch.empty(1003, 100), 20_000)
    rows = sample.rows.tolist()
    assert 190 <= len(rows) <= 210 and rows[:8] == list(range(8)) and rows[-1] == 1002
    assert all(row % 8 == index % 8 for index, row in enumerate(rows))


# ------------------------------------------------------------------------------------------------------------- families


def test_roles_and_states():
    model = load_model_file(TRAPS / "model.py").build(0)
    found = roles(model)
    assert found == {
        "scale": "vector", "gemm.weight": "matrix", "gemm.bias": "bias", "bn.weight": "gamma", "bn.bias": "beta",
        "bn.running_mean": "mean", "bn.running_var": "var", "bn.num_batches_tracked": "counter",
    }  # fmt: skip
    initial = model.state_dict()
    state = draw_state(initial, found, "scales", torch.Generator().manual_seed(0))
    assert (state["scale"] == 0).sum() == 5 and (state["scale"] < 0).sum() == 15
    assert (state["bn.running_var"] >= 0).all() and torch.equal(state["gemm.weight"], initial["gemm.weight"])
    graded = draw_state(initial, found, "graded", torch.Generator().manual_seed(0))["gemm.weight"]
    assert (graded.norm(dim=1) == 0).sum() == 5


def test_input_families():
    full = [torch.randn(10, 6), torch.randn(6), 3]
    generator = torch.Generator().manual_seed(0)
    rows = draw_inputs(full, Case("rows", 13), generator)
    assert rows[0].shape == (13, 6) and rows[1].shape == (6,) and rows[2] == 3
    assert not torch.equal(rows[0][0], rows[0][10])
    constant = draw_inputs(full, Case("constant", 4, inputs="constant"), generator)[0]
    assert torch.equal(constant[0], constant[3])
    large = draw_inputs(full, Case("large", 9, inputs="large mean"), generator)[0]
    assert (large[:, 0] == large[0, 0]).all() and large[0, 0] > 1e4
    assert not full[0].isnan().any()
    assert draw_inputs(full, Case("nan", 9, inputs="not finite"), generator)[0].isnan().sum() == 1


def test_the_loader_is_strict(prepared):
    original, _ = prepared("model.py")
    with pytest.raises(ModelFileError):
        load_candidate_file(TRAPS / "nowhere.py")
    assert original.class_name == "Model"
