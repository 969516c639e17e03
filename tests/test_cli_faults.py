"""What the command line must withstand: detached processes, signals, narrow terminals, closed pipes, wrong paths."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from gemmnorm.bench import write_json
from gemmnorm.cli import main as command
from gemmnorm.cli import report
from gemmnorm.cli.optimize import OptimizeOptions, optimize
from gemmnorm.errors import GemmNormValueError
from gemmnorm.userfiles import run_isolated

MODEL = (Path(__file__).parents[1] / "examples" / "small.py").read_text().replace("512", "24").replace("256", "33")
LINUX = pytest.mark.skipif(not Path("/proc/self/environ").exists(), reason="no /proc")
DETACHED = """\
import os, subprocess, sys, time

def leave(pid_file, seconds):
    code = f"import os, time; open({pid_file!r}, 'w').write(str(os.getpid())); time.sleep(60)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    while not os.path.exists(pid_file):
        time.sleep(0.01)
    time.sleep(seconds)
    return 1
"""


def alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


@LINUX
@pytest.mark.parametrize(("seconds", "status"), [(30, "hung"), (0, "ok")])
def test_a_detached_process_holds_no_time_limit_and_does_not_survive(
    seconds: int, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "leaving.py").write_text(DETACHED)
    monkeypatch.syspath_prepend(str(tmp_path))
    pid_file, begin = tmp_path / "pid", time.monotonic()
    outcome = run_isolated("leaving:leave", {"pid_file": str(pid_file), "seconds": seconds}, time_limit=6.0)
    assert outcome.status == status and time.monotonic() - begin < 15
    assert not alive(int(pid_file.read_text()))


@LINUX
@pytest.mark.parametrize("name", ["SIGTERM", "SIGHUP", "SIGINT"])
def test_a_signal_ends_the_work_and_leaves_nothing(name: str, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("import time\ntime.sleep(600)\n" + MODEL)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "GEMMNORM_TEST": str(tmp_path)}
    run = subprocess.Popen(
        [sys.executable, "-m", "gemmnorm", "optimize", "model.py"],
        cwd=tmp_path, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip

    def children() -> list[int]:
        wanted = f"GEMMNORM_TEST={tmp_path}".encode()
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) not in (run.pid, os.getpid()):
                try:
                    if wanted in (entry / "environ").read_bytes().split(b"\0") and alive(int(entry.name)):
                        found.append(int(entry.name))
                except OSError:
                    continue
        return found

    for _ in range(600):
        if children():
            break
        time.sleep(0.1)
    assert children(), "the isolated process never began"
    run.send_signal(getattr(signal, name))
    _, err = run.communicate(timeout=30)
    assert run.returncode in (128 + getattr(signal, name), -getattr(signal, name)) and "Traceback" not in err
    for _ in range(50):
        if not children():
            break
        time.sleep(0.1)
    assert not children() and {path.name for path in tmp_path.iterdir()} <= {"model.py", "__pycache__"}


@pytest.mark.skipif(os.name != "posix", reason="signals")
@pytest.mark.parametrize("name", ["SIGTERM", "SIGINT"])
@pytest.mark.parametrize("module", [["-m", "gemmnorm"], ["-c"]], ids=["module", "script"])
def test_a_signal_while_torch_is_imported_leaves_no_traceback(name: str, module: list[str], tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("import time\nprint('importing', flush=True)\ntime.sleep(60)\n")
    if module == ["-c"]:
        module = ["-c", "import sys; sys.argv[0] = '/usr/bin/gemmnorm'; from gemmnorm.cli.main import main"]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    run = subprocess.Popen(
        [sys.executable, *module, "doctor"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert run.stdout is not None and run.stdout.readline() == "importing\n"
    run.send_signal(getattr(signal, name))
    _, err = run.communicate(timeout=30)
    assert run.returncode == -getattr(signal, name) and not err


@pytest.mark.usefixtures("warm_processes")
def test_quiet_prints_the_verdict_and_no_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "new.py").write_text(MODEL.replace("class Model(", "class ModelNew("))
    monkeypatch.chdir(tmp_path)
    assert command.main(["verify", "model.py", "new.py", "-q", "--quick", "--no-report"]) == 0
    out = capsys.readouterr().out.splitlines()
    assert out[0] == "new.py against model.py: equal" and len(out) <= 6 and not list(tmp_path.glob("*.html"))


@pytest.mark.parametrize("width", [60, 80, 120])
@pytest.mark.parametrize("name", ["h200.json", "h200-random.json"])
def test_tables_drop_columns_and_keep_ratios(
    width: int, name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    result = Path(__file__).parents[1] / "benchmarks" / "results" / name
    assert command.main(["report", str(result)]) == 0
    out = capsys.readouterr().out
    assert max(map(len, out.splitlines())) <= width and "…" not in out
    heads = [line.split() for line in out.splitlines() if {"R", "S"} <= set(line.split())]
    assert heads


def test_a_reader_who_leaves_changes_no_verdict_and_the_file_is_written(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    line = f"{sys.executable} -m gemmnorm explain 64 32 32 --target sm_90 --json e.json; echo $? >&2"
    done = subprocess.run(
        ["bash", "-c", f"({line}) | head -1"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stderr.strip().endswith("0") and "Traceback" not in done.stderr
    assert json.loads((tmp_path / "e.json").read_text())["kind"] == "explain"


def test_json_goes_to_standard_output(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert command.main(["explain", "64", "32", "32", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["kind"] == "explain" and not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["optimize", "nosuch.py"], "there is no file nosuch.py"),
        (["verify", "model.py", "nosuch.py"], "there is no file nosuch.py"),
        (["bench", "nosuch.py"], "there is no file nosuch.py"),
        (["optimize", "model.py", "--target", "sm_999"], "expected one of sm_80"),
        (["verify", "model.py", "model.py", "--device", "foo"], "expected cpu, cuda or cuda:N"),
        (["optimize", "model.py", "--strategy", "reference"], "invalid choice"),
        (["verify", "model.py", "model.py", "--report", "nowhere/v.html"], "existing directory"),
        (["explain", "1", "2", "3", "--json", "nowhere/e.json"], "existing directory"),
        (["explain", "1", "2", "3", "--json", "."], "existing directory"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_runs(
    arguments: list[str],
    complaint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        command.main(arguments)
    out, err = capsys.readouterr()
    assert ended.value.code == 2 and complaint in err and not out
    assert [path.name for path in tmp_path.iterdir()] == ["model.py"]


def test_outputs_that_would_clobber_or_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "model.py").write_text(MODEL)
    (tmp_path / "requirements.txt").write_text("torch\n")
    (tmp_path / "mine.py").write_text("print('mine')\n")
    (tmp_path / "folder.py").mkdir()
    monkeypatch.chdir(tmp_path)
    for output, complaint in (
        ("requirements.py", "requirements.txt"), ("mine.py", "not written by gemmnorm"), ("folder.py", "ends in .py"),
        ("x.txt", "ends in .py"), ("nowhere/x.py", "existing directory"), ("model.py", "other than the model's own"),
    ):  # fmt: skip
        with pytest.raises(GemmNormValueError, match=complaint):
            optimize("model.py", OptimizeOptions(output=output))
    assert (tmp_path / "requirements.txt").read_text() == "torch\n"


def test_a_report_of_something_else_is_refused_in_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "r.json"
    for content in ([], {"schema": report.SCHEMA, "kind": "optimize"}, {"schema": report.SCHEMA, "kind": "verify"}):
        write_json(path, content)  # type: ignore[arg-type]
        assert command.main(["report", str(path)]) == 2
        out, err = capsys.readouterr()
        assert "expected" in err and "Traceback" not in err and not out


@pytest.mark.usefixtures("warm_processes")
@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc")
def test_what_nvcc_refuses_is_no_success(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import gemmnorm.cli.optimize as optimizing

    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(optimizing, "compile_check", lambda path, target: "error: no")
    timed = optimizing.bench_files
    monkeypatch.setattr(optimizing, "bench_files", lambda m, n, o, **k: timed(m, n, replace(o, compile=False), **k))
    document = optimize("model.py", OptimizeOptions(seeds=1, effort="quick"))
    assert document["status"] == "not compiled" and not (tmp_path / "model_new.py").exists()
    assert "error: no" in report.text(document)


def test_what_lies_beside_the_model_can_be_imported(tmp_path: Path) -> None:
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    (folder / "widths.py").write_text("WIDTH = 24\n")
    lines = MODEL.replace("import torch\n", "import torch\nfrom widths import WIDTH\n", 1)
    (folder / "model.py").write_text(lines + "\nassert WIDTH == 24\n")
    outcome = run_isolated(
        "gemmnorm.cli.explain:child",
        {"path": str(folder / "model.py"), "target": "sm_90", "strategy": None},
        time_limit=120,
    )
    assert outcome.ok, outcome.detail


@pytest.mark.parametrize("name", ["optimize", "explain"])
def test_a_forward_that_raises_is_a_bad_model_and_not_one_without_a_chain(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    raising = MODEL.replace("        return self.bn(", "        raise KeyError('gone')\n        return self.bn(")
    (tmp_path / "model.py").write_text(raising)
    monkeypatch.chdir(tmp_path)
    assert command.main([name, "model.py", "-q"]) == 2
    out = capsys.readouterr().out
    assert "forward(*get_inputs()) raised KeyError: 'gone' (line" in " ".join(out.split()) and "no chain" not in out
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["model.py"]


@pytest.mark.parametrize(("changed", "more", "why"), [
    ("self.double()", [], "the model's dtype is torch.float64"),
    ("", ["--strategy", "one_kernel", "--target", "sm_80"], "its kernels need the target sm_90"),
])  # fmt: skip
def test_what_cannot_be_written_out_is_refused_in_a_sentence(
    changed: str, more: list[str], why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    text = MODEL.replace("    def forward(", f"        {changed or 'pass'}\n\n    def forward(", 1)
    (tmp_path / "model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert command.main(["optimize", "model.py", "-q", *more]) == 2
    out = " ".join(capsys.readouterr().out.split())
    assert "cannot be written out" in out and why in out and "Traceback" not in out


def test_a_mistyped_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str]) -> None:
    for typed, hint in (("optimise", "did you mean optimize?"), ("xyzzy", "expected one of optimize, verify")):
        with pytest.raises(SystemExit) as ended:
            command.main([typed])
        assert ended.value.code == 2 and hint in capsys.readouterr().err


def test_help_has_examples(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["--help"])
    assert "gemmnorm optimize model.py" in capsys.readouterr().out


@pytest.mark.skipif(os.name != "posix", reason="a shell script")
def test_a_half_made_environment_is_made_anew(tmp_path: Path) -> None:
    root = Path(__file__).parents[1]
    broken = tmp_path / "venv"
    (broken / "bin").mkdir(parents=True)
    (broken / "pyvenv.cfg").write_text("home = /nowhere\n")
    script = (root / "setup.sh").read_text()
    head = script[: script.index("# Done before, for these requirements?")].replace(
        'cd "$(dirname "${BASH_SOURCE[0]}")"\n', ""
    )
    environment = {**os.environ, "VENV": str(broken), "PYTHON": sys.executable}
    done = subprocess.run(["bash", "-c", head, "setup"], env=environment, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0 and "half-made" in done.stderr and (broken / "bin" / "python").exists()
    other = tmp_path / "mine"
    other.mkdir()
    done = subprocess.run(
        ["bash", "-c", head, "setup"],
        env={**environment, "VENV": str(other)},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1 and "no virtual environment" in done.stderr and other.is_dir()


@pytest.mark.usefixtures("warm_processes")
def test_a_model_without_running_statistics_refuses_one_row_and_is_equal(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = MODEL.replace("BatchNorm1d(out_features)", "BatchNorm1d(out_features, track_running_stats=False)")
    (tmp_path / "model.py").write_text(text)
    monkeypatch.chdir(tmp_path)
    assert command.main(["verify", "model.py", "model.py", "--quick", "--seeds", "1", "-q"]) == 0
