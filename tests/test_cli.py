"""The command line as a user meets it: exit codes, what is printed where, and what is written."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import warm

import gemmnorm
from gemmnorm.cli import main as cli
from gemmnorm.cli import optimize
from gemmnorm.userfiles import Outcome

pytestmark = pytest.mark.usefixtures("warm_processes")

MODEL = """
import torch
from torch import nn

class Model(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x):
        return self.bn(self.gemm(x))

def get_inputs():
    return [torch.randn(16, 12)]

def get_init_inputs():
    return [12, 8]
"""
NEW = MODEL.replace("class Model", "class ModelNew")
WRONG = NEW.replace("self.bn(self.gemm(x))", "self.bn(self.gemm(x)) + 0.01")
HANGS = NEW.replace("return self.bn", "import time; time.sleep(600); return self.bn")
CRASHES = NEW.replace("return self.bn", "import os; os.abort(); return self.bn")
NO_CHAIN = MODEL.replace("nn.BatchNorm1d", "nn.LayerNorm")
BROKEN = MODEL + "\nraise RuntimeError('out of order')\n"


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    for name, text in (
        ("model", MODEL), ("new", NEW), ("wrong", WRONG), ("hangs", HANGS), ("crashes", CRASHES),
        ("no_chain", NO_CHAIN), ("broken", BROKEN),
    ):  # fmt: skip
        (tmp_path / f"{name}.py").write_text(text)


def run(*arguments: str) -> int:
    try:
        return cli.main(list(arguments))
    except SystemExit as stop:
        return int(stop.code or 0)


# --- the command line itself -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ([], "required"),
        (["polish"], "there is no command"),
        (["bench"], "one of --suite NAME"),
        (["bench", "model.py", "--suite", "cpu"], "one of --suite NAME"),
        (["bench", "--suite", "cpu", "--case", "kb3"], "got 'kb3'"),
        (["bench", "--suite", "cpu", "--precision", "tf32"], "no cell"),
        (["bench", "--suite", "cpu", "--resume"], "--resume needs --json"),
        (["bench", "model.py", "--precision", "bf16,fp16"], "one of fp32, fp16, bf16; got bf16,fp16"),
        (["bench", "model.py", "--precision", "amp"], "one of fp32, fp16, bf16; got amp"),
        (["verify", "model.py", "new.py", "--precision", "tf32"], "invalid choice"),
        (["explain", "12", "13"], "three numbers"),
        (["explain", "1", "2", "3", "--target", "sm_70"], "sm_80 or higher"),
        (["verify", "model.py", "new.py", "--seeds", "0"], "whole number"),
        (["verify", "model.py", "new.py", "--time-limit", "-1"], "positive"),
        (["report", "nowhere.json"], "expected a result file"),
        (["report", "model.py"], "expected JSON"),
        (["explain", "4", "2", "3", "--activation", "mush"], "got 'mush'"),
        (["explain", "1", "2", "3"], "two rows or more"),
        (["explain", "4", "2", "3", "--precision", "bf16"], "--precision goes with MODEL.py, not with three numbers"),
        (["explain", "model.py", "--dtype", "bf16"], "--dtype goes with three numbers, not with MODEL.py"),
        (["tune", "model.py", "--no-scale"], "--no-scale goes with three numbers, not with MODEL.py"),
        (["bench", "model.py", "--case", "kb33"], "--case goes with --suite, not with MODEL.py"),
        (["bench", "--suite", "cpu", "--time-limit", "5"], "--time-limit goes with MODEL.py, not with --suite"),
        (["explain", "4", "2", "3", "--time-limit", "5"], "--time-limit goes with MODEL.py, not with three numbers"),
        (["bench", "--suite", "cpu", "--count", "3"], "--count goes with --random, not with --suite"),
        (["bench", "--suite", "cpu", "--junit", "nowhere.xml"], "there is no file nowhere.xml"),
        (["verify", "model.py", "new.py", "--report", "-"], "expected a file for the page; got -"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_reason(
    arguments: list[str], complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(*arguments) == 2
    out, err = capsys.readouterr()
    assert complaint in err and not out


def test_python_m_gemmnorm_is_the_command_and_writes_no_colours_to_a_pipe() -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "FORCE_COLOR": "", "NO_COLOR": "1"}
    command = [sys.executable, "-m", "gemmnorm", "doctor"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0 and "will run:" in done.stdout
    assert "\x1b[" not in done.stdout + done.stderr


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--version") == 0
    assert capsys.readouterr().out == f"gemmnorm {gemmnorm.__version__}\n"


# --- explain, doctor, report -----------------------------------------------------------------------------------------


def test_explain_of_three_numbers_gives_the_plans_of_the_target(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        run("explain", "1024", "8192", "8192", "--dtype", "bf16", "--target", "sm_80", "--strategy", "cublas_bn") == 0
    )
    out = capsys.readouterr().out
    assert "bfloat16, training forward: cublas_bn (sm_80)" in out and "training backward" in out
    assert "predicted" in out and "planned for sm_80, as asked" in out
    assert run("explain", "64", "32", "32", "--eval") == 0
    assert "training" not in capsys.readouterr().out


def test_explain_of_a_file_shows_its_chains_and_their_plan(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "model.py", "--target", "sm_90", "--json", "e.json") == 0
    out, err = capsys.readouterr()
    assert "gemm → bn" in out and "(sm_90)" in out and "loading model.py" in err
    assert json.loads(Path("e.json").read_text())["kind"] == "explain"


def test_explain_of_a_file_takes_its_mode_and_its_precision(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "model.py", "--eval", "--precision", "bf16", "--target", "sm_90") == 0
    out = capsys.readouterr().out
    assert "16 × 12 → 8, bfloat16" in out and "evaluation forward" in out and "training" not in out


def test_explain_and_bench_of_a_file_say_why_a_call_runs_module_by_module(capsys: pytest.CaptureFixture[str]) -> None:
    Path("model.py").write_text(MODEL.replace("randn(16, 12)", "randn(4, 8, 12)"))  # BatchNorm normalises the second
    assert run("explain", "model.py", "--target", "sm_90") == 0
    assert "calls: 0 fused, 1 unfused (x has 3 dimensions)" in capsys.readouterr().out
    assert run("bench", "model.py", "--phase", "train_fwd", "--budget", "0.01", "--no-compile", "--no-report") == 0
    assert "1 unfused (x has 3 dimensions)" in capsys.readouterr().out


def test_explain_of_a_file_without_a_chain_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("explain", "no_chain.py") == 2
    assert "no nn.BatchNorm1d" in capsys.readouterr().out


def test_what_doctor_writes_report_renders_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("doctor", "--json", "d.json") == 0
    first = capsys.readouterr().out
    assert run("report", "d.json") == 0
    assert capsys.readouterr().out == first


# --- verify ----------------------------------------------------------------------------------------------------------


def test_verify_of_another_function_is_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("verify", "model.py", "wrong.py", "--seeds", "1", "--json", "v.json", "-q") == 1
    out, err = capsys.readouterr()
    assert out.startswith("wrong.py against model.py: not equal") and err == "wrote v.json and v.html\n"
    assert json.loads(Path("v.json").read_text())["kind"] == "verify"


@pytest.mark.parametrize(("verdict", "code"), [("equal", 0), ("candidate_raises", 1), ("model_bad", 2)])
def test_verify_hands_its_arguments_on_and_the_exit_code_back(
    verdict: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    given = _judges(monkeypatch, verdict, code)
    assert (
        run(
            "verify",
            "model.py",
            "new.py",
            "--seeds",
            "2",
            "--device",
            "cpu",
            "--time-limit",
            "9",
            "--precision",
            "bf16",
        )
        == code
    )
    assert given[0][0] == ("model.py", "new.py")
    how = {"seeds": 2, "effort": "usual", "to_the_end": None, "device": "cpu", "time_limit": 9.0, "on_progress": None}
    how["precision"] = "bf16"
    assert {**given[0][1], "on_progress": None} == how
    assert verdict.replace("_", " ") in capsys.readouterr().out


def _judges(monkeypatch: pytest.MonkeyPatch, verdict: str, code: int) -> list[tuple[tuple[object, ...], dict]]:
    """Replace the judge by one with a fixed verdict; the list is filled with the arguments of its calls."""
    given: list[tuple[tuple[object, ...], dict]] = []

    def verify(*arguments: object, **options: object) -> dict[str, object]:
        given.append((tuple(map(str, arguments)), options))
        head = {"schema": 1, "tool": "verify", "model": str(arguments[0]), "candidate": str(arguments[1])}
        return {**head, "verdict": verdict, "exit_code": code, "equal": code == 0, "reason": f"{arguments[1]}: because"}

    monkeypatch.setattr("gemmnorm.verify.verify", verify)
    monkeypatch.setattr(optimize, "verify", verify)
    return given


# --- bench -----------------------------------------------------------------------------------------------------------


def test_a_suite_is_timed_and_written(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--case", "tiny_odd", "--precision", "fp32", "--phase", "eval_fwd", "--no-compile", "--budget", "0.05"]
    assert run("bench", "--suite", "cpu", *arguments, "--json", "s.json") == 0
    out, err = capsys.readouterr()
    assert "37 × 65 → 51" in out and "reference ●" in out and "ceilings" in err
    document = json.loads(Path("s.json").read_text())
    assert [row["phase"] for row in document["rows"]] == ["eval_fwd"]
    assert run("report", "s.json") == 0
    assert capsys.readouterr().out == out


def test_files_are_timed_side_by_side_and_wrong_ones_named(capsys: pytest.CaptureFixture[str]) -> None:
    code = run(
        "bench", "model.py", "new.py", "wrong.py", "nowhere.py", "--no-compile", "--budget", "0.05", "--json", "b.json"
    )
    assert code == 1
    document = json.loads(Path("b.json").read_text())
    timed = {(row["variant"], row["phase"]) for row in document["rows"]}
    for phase in ("train_fwd", "eval_fwd", "train_fwd_bwd"):
        assert {("eager", phase), ("fused: reference", phase), ("new.py", phase)} <= timed
    assert "computes something else" in document["failed"]["wrong.py"]
    assert "no such file" in document["failed"]["nowhere.py"] and len(document["failed"]) == 2
    assert all(row["gemm_ms"] > 0 for row in document["rows"])
    assert "FAILED wrong.py" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("new", "what", "limit"), [("hangs.py", "hung", "8"), ("crashes.py", "crashed", "100")], ids=["hangs", "crashes"]
)
def test_a_replacement_that_does_not_come_back_is_named(
    new: str, what: str, limit: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", "model.py", new, "--no-compile", "--budget", "0.05", "--time-limit", limit, "-q") == 1
    assert f"FAILED {new}: {what}" in capsys.readouterr().out


def test_a_replacement_that_ends_the_process_takes_no_times_along(capsys: pytest.CaptureFixture[str]) -> None:
    renamed = NEW.replace("self.gemm", "self.product")
    Path("exits.py").write_text(NEW.replace("return self.bn", "raise SystemExit(0); return self.bn"))
    Path("renamed.py").write_text(renamed)
    files = ("exits.py", "crashes.py", "renamed.py", "new.py")
    assert run("bench", "model.py", *files, "--no-compile", "--budget", "0.01", "--phase", "eval_fwd", "-q") == 1
    out = capsys.readouterr().out
    assert "FAILED crashes.py: crashed" in out and "FAILED exits.py: raised" in out and "new.py  " in out
    assert 'Missing key(s) in state_dict: "product.weight"' in " ".join(out.split())


@pytest.mark.parametrize(
    ("model", "complaint"),
    [("broken.py", "out of order"), ("no_chain.py", "BatchNorm1d")],
)
def test_a_bad_model_or_one_without_a_chain_is_code_2(
    model: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("bench", model, "--no-compile", "--budget", "0.05", "--phase", "train_fwd", "-q") == 2
    out, err = capsys.readouterr()
    assert complaint in out + err


def test_a_peer_that_fails_is_a_note_and_no_failure(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for module in warm.users():  # a fresh process: Inductor reads CXX when it is imported
        monkeypatch.setattr(module, "subprocess", subprocess)
    monkeypatch.setenv("CXX", "/nowhere/no-such-compiler")
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(Path("inductor").resolve()))
    code = run("bench", "model.py", "--budget", "0.05", "--phase", "eval_fwd", "-q")
    assert code == 0
    assert "torch.compile did not run" in capsys.readouterr().out


def test_a_short_verdict_says_what_it_rests_on(capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in (("model.py", MODEL), ("new.py", NEW)):
        drops = text.replace("return self.bn(", "return nn.functional.dropout(self.bn(")
        Path(name).write_text(drops.replace("self.gemm(x))", "self.gemm(x)), 0.2, self.training)"))
    assert run("verify", "model.py", "new.py", "--quick", "--no-report", "-q") == 0
    assert "dropout kept every element" in capsys.readouterr().out


# --- optimize --------------------------------------------------------------------------------------------------------


def test_optimize_writes_a_verified_replacement_and_its_report(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)  # nvcc takes half a minute; test_export.py runs it
    assert run("optimize", "model.py", "--no-compile", "--seeds", "1") == 0
    out, err = capsys.readouterr()
    assert "class ModelNew" in Path("model_new.py").read_text()
    document = json.loads(Path("model_new.json").read_text())
    assert document["status"] == "equal" and document["export"]["target"] == "sm_80"
    assert {row["variant"] for row in document["bench"]["rows"]} == {"eager", "fused: reference", "model_new.py"}
    assert ".tmp" not in json.dumps(document)
    lines = out.splitlines()
    verdict = "model_new.py: equal on the CPU; its kernels were neither compiled nor run"
    assert verdict in lines and document["kernels"] == "not compiled" and "1 chain, fused:" in lines[0]
    assert "<h1>model_new.py for model.py</h1>" in Path("model_new.html").read_text()
    assert [plan["candidates"][0]["terms"] for plan in document["export"]["plans"]]
    assert lines[-1].startswith("wrote model_new.py")
    said = " ".join(out.split())
    assert "Run, on the CPU:" in said and "Not run: the CUDA kernels" in said and "Not compiled" in said
    assert "verifying" in err
    assert Path("model_new.txt").read_text().splitlines()[-1] == lines[-1]


def test_a_precision_holds_for_the_written_file_its_verdict_and_its_times(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert run("optimize", "model.py", "--no-compile", "--quick", "--precision", "bf16") == 0
    document = json.loads(Path("model_new.json").read_text())
    assert [document[of]["precision"] for of in ("verify", "bench")] == ["bf16", "bf16"]
    assert "torch.bfloat16" in Path("model_new.py").read_text()
    assert "model_new.py against model.py in bf16: equal" in capsys.readouterr().out
    eager = next(row for row in document["bench"]["rows"] if row["variant"] == "eager")
    assert 1e-4 < eager["error"] < 0.1


def test_optimize_writes_a_project_for_the_hub_with_its_verdict(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _judges(monkeypatch, "equal", 0)
    for _ in range(2):  # the second run replaces what the first has written
        assert run("optimize", "model.py", "--no-compile", "--hub", "fused-tiny") == 0
    document = json.loads(Path("model_new.json").read_text())
    assert "fused-tiny/build.toml" in document["files"] and "hub" not in document["export"]
    card = Path("fused-tiny/README.md").read_text()
    assert "because" in card.partition("## How it was verified")[2] and "Not run: the CUDA kernels" in card
    assert Path("fused-tiny/torch-ext/fused_tiny/layers.py").is_file()
    _judges(monkeypatch, "not_equal", 1)
    assert run("optimize", "model.py", "--no-compile", "--hub", "fused-wrong") == 1 and not Path("fused-wrong").exists()
    assert run("optimize", "model.py", "--hub", "Wrong_Name") == 2
    assert "lower-case letters" in capsys.readouterr().err


def test_optimize_leaves_nothing_of_a_model_it_cannot_use(capsys: pytest.CaptureFixture[str]) -> None:
    before = sorted(p.name for p in Path().iterdir())
    assert run("optimize", "no_chain.py", "-q") == 2
    out, _ = capsys.readouterr()
    assert "no nn.BatchNorm1d" in out and "nothing was written" in out
    assert sorted(p.name for p in Path().iterdir()) == before


def test_optimize_leaves_nothing_that_is_not_equal(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The exporter is replaced by one that writes another function, the judge by one that sees it."""
    monkeypatch.setattr(optimize, "run_isolated", _writes(WRONG))
    _judges(monkeypatch, "not_equal", 1)
    before = sorted(p.name for p in Path().iterdir())
    assert run("optimize", "model.py", "-o", "other.py", "--seeds", "1", "-q") == 1
    out, _ = capsys.readouterr()
    assert "other.py: because" in out and "NOT EQUAL" in out and "nothing was written" in out and ".tmp" not in out
    assert sorted(p.name for p in Path().iterdir()) == before


def _writes(text: str) -> object:
    def instead(target: str, kwargs: dict[str, str], **_: object) -> Outcome:
        Path(kwargs["output_path"]).write_text(text)
        found = {"report": "1 chain", "matches": ["gemm → bn"], "refusals": []}
        return Outcome("ok", {**found, "target": "sm_80", "strategy": "cublas_bn"})

    return instead


def test_sizes_are_explained_in_the_arithmetic_that_is_asked_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = ("explain", "1024", "1024", "1024", "--json", "-")
    monkeypatch.setenv("GEMMNORM_FLOAT32", "ieee")
    assert run(*asked) == 0
    assert "float32 (ieee)" in json.loads(capsys.readouterr().out)["plans"][0]["text"]
    monkeypatch.setenv("GEMMNORM_FLOAT32", "bogus")
    assert run(*asked) == 2
    assert "GEMMNORM_FLOAT32: expected" in capsys.readouterr().err
    monkeypatch.delenv("GEMMNORM_FLOAT32")
    assert run(*asked, "--dtype", "amp") == 0
    assert "cast" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="a shell's pipe")
def test_a_reader_who_leaves_changes_no_verdict(tmp_path: Path) -> None:
    Path("new.py").write_text(MODEL.replace("class Model(", "class ModelNew(").replace("bn(", "bn(2 * "))
    command = f"{sys.executable} -m gemmnorm verify model.py new.py --quick --no-report 2>&1"
    codes = [
        subprocess.run(["bash", "-c", f"{command} | {reader}; exit ${{PIPESTATUS[0]}}"], check=False).returncode
        for reader in ("true", "cat >/dev/null")
    ]
    assert codes == [1, 1]


@pytest.mark.parametrize(
    ("output", "complaint"), [
        ("model.py", "other than the model's own"),
        ("no/where.py", "existing directory"),
        (".", "ends in .py"),
        ("data.txt", "ends in .py"),
    ],
)  # fmt: skip
def test_optimize_does_not_overwrite_its_model_or_invent_directories(
    output: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("optimize", "model.py", "-o", output) == 2
    assert complaint in capsys.readouterr().err
    assert Path("model.py").read_text() == MODEL
