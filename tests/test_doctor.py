"""What `doctor` makes of machines: each thing that can be missing, and the command that mends it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from gemmnorm import plan
from gemmnorm.cli import doctor, report
from gemmnorm.cli.doctor import Check, Facts
from gemmnorm.cli.main import main
from gemmnorm.cli.variables import VALUES, variables
from gemmnorm.runtime import measured

HEALTHY = Facts(
    python=(3, 12),
    torch="2.11.0+cu130",
    torch_cuda="13.0",
    driver_cuda="13.0",
    gpu="NVIDIA H200",
    capability=(9, 0),
    cuda_core="1.2.2",
    bindings="13.0.3",
    nvrtc=("13.0.88",),
    nvcc="13.0",
    cache="cache",
)


def problems(facts: Facts) -> dict[str, Check]:
    return {c.name: c for c in doctor.examine(facts) if c.state in ("missing", "warning")}


def test_a_healthy_machine_has_nothing_to_mend() -> None:
    assert problems(HEALTHY) == {}
    assert all(not c.command for c in doctor.examine(HEALTHY))


@pytest.mark.parametrize(
    ("changes", "name", "state", "command"),
    [
        ({"cuda_core": None}, "cuda-core", "missing", "pip install 'gemmnorm[cu13]'"),
        ({"cuda_core": "0.4.0"}, "cuda-core", "warning", "pip install 'gemmnorm[cu13]'"),
        ({"bindings": None}, "cuda-bindings", "missing", "pip install 'gemmnorm[cu13]'"),
        ({"nvrtc": (), "unavailable": "NVRTC does not load (x)"}, "NVRTC", "missing", "pip install 'gemmnorm[cu13]'"),
        ({"nvrtc": ("12.8.93",), "unavailable": "no"}, "NVRTC", "missing", "pip install 'gemmnorm[cu13]'"),
        ({"bindings": "12.9.0", "nvrtc": ("12.8.93",)}, "cuda-bindings", "warning", "pip install 'gemmnorm[cu13]'"),
        (
            {"torch_cuda": "12.8", "torch": "2.8.0+cu128", "driver_cuda": "12.9"},
            "cuda-bindings",
            "missing",
            "pip install 'gemmnorm[cu12]'",
        ),
        (
            {"torch": "2.11.0+cpu", "torch_cuda": None},
            "PyTorch",
            "missing",
            "pip install torch --index-url https://download.pytorch.org/whl/cu130",
        ),
        (
            {"driver_cuda": "12.4"},
            "PyTorch",
            "missing",
            "pip install torch --index-url https://download.pytorch.org/whl/cu126",
        ),
        ({"torch": "2.3.1+cu121"}, "PyTorch", "missing", "pip install --upgrade torch"),
        ({"python": (3, 9)}, "Python", "missing", ""),
        ({"capability": (7, 5)}, "GPU", "missing", ""),
        ({"gpu": None, "capability": None}, "GPU", "missing", ""),
        ({"driver_cuda": None}, "NVIDIA driver", "missing", ""),
        (
            {"cache_problem": "no permission"},
            "kernel cache",
            "warning",
            "export GEMMNORM_CACHE_DIR=/a/directory/you/can/write",
        ),
    ],
)
def test_what_is_wrong_is_named_with_the_command_that_mends_it(
    changes: dict[str, object], name: str, state: str, command: str
) -> None:
    found = problems(replace(HEALTHY, **changes))  # type: ignore[arg-type]
    assert found[name].state == state
    assert found[name].command == command


def test_an_older_minor_of_the_same_major_is_no_fault() -> None:
    assert problems(replace(HEALTHY, torch_cuda="13.2", bindings="13.1.0")) == {}


def test_nvrtc_of_a_toolkit_serves_where_there_is_no_wheel() -> None:
    assert problems(replace(HEALTHY, nvrtc=())) == {}


def test_the_extra_follows_torch_and_never_exceeds_the_driver() -> None:
    assert doctor.extra_of(HEALTHY) == "cu13"
    assert doctor.extra_of(replace(HEALTHY, torch_cuda="12.8")) == "cu12"
    assert doctor.extra_of(replace(HEALTHY, driver_cuda="12.8")) == "cu12"
    assert doctor.extra_of(replace(HEALTHY, torch_cuda=None, driver_cuda=None)) == "cu13"


def test_what_tune_has_left_is_told_with_whether_it_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measured, "folder", lambda: tmp_path)
    assert measured.stored() == []
    gpu = measured.Gpu("NVIDIA H20", plan.chip_for(90, 78))
    measured.path(gpu).write_text(json.dumps(measured.document(gpu, {("forward", "1"): "one_kernel"})))
    (tmp_path / "measured-broken.json").write_text("{")
    old = {**measured.document(gpu, {}), "sources": "others", "gpu": "NVIDIA A100"}
    (tmp_path / "measured-old.json").write_text(json.dumps(old))
    stored = {table.gpu: table for table in measured.stored()}
    assert stored["NVIDIA H20"].current and not stored["NVIDIA A100"].current
    checks = doctor.examine(replace(HEALTHY, measured=tuple(stored.values())))
    found = {c.found: c.state for c in checks if c.name == "choices"}
    assert found["1 measured on NVIDIA H20"] == "ok" and list(found.values()).count("note") == 2


def test_a_mac_is_told_no_command() -> None:
    facts = Facts(platform="darwin", torch="2.11.0", cache="cache")
    assert all(not c.command for c in doctor.examine(facts))


def test_a_cache_directory_is_tried_where_it_is_and_where_it_would_be_made(tmp_path: Path) -> None:
    assert doctor._cache_problem(tmp_path) is None
    assert doctor._cache_problem(tmp_path / "not" / "there" / "yet") is None
    file = tmp_path / "file"
    file.write_text("")
    assert "not a directory" in str(doctor._cache_problem(file / "below"))
    assert not (tmp_path / "not").exists()


def test_this_machine_is_described_with_what_will_run() -> None:
    document = doctor.diagnose()
    text = report.text(document)
    assert document["runs"] and "will run:" in text
    for name in ("Python", "PyTorch", "NVIDIA driver", "GPU", "cuda-core", "NVRTC", "kernel cache", "nvcc"):
        assert name in text


@pytest.fixture
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in variables():
        monkeypatch.delenv(variable.name)


@pytest.mark.parametrize("name", [name for name, values in VALUES.items() if values])
@pytest.mark.usefixtures("_no_variables")
def test_a_variable_with_a_wrong_value_is_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(name, "bogus")
    check = problems(replace(HEALTHY, variables=variables()))[name]
    assert check.state == "missing" and VALUES[name][0] in check.advice and check.command == f"unset {name}"
    assert doctor.what_runs() == [f"calls that read {name} raise"]
    assert main(["explain", "64", "64", "64"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"gemmnorm: {name}: expected one of {VALUES[name][0]}") and "'bogus'" in error
    monkeypatch.setenv(name, VALUES[name][0])
    assert problems(replace(HEALTHY, variables=variables())) == {}
    monkeypatch.setenv(name, "")
    assert variables() == ()


@pytest.mark.usefixtures("_no_variables")
def test_a_variable_that_nobody_reads_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GEMMNORM_STRATEGIE", "one_kernel")
    assert problems(replace(HEALTHY, variables=variables()))["GEMMNORM_STRATEGIE"].state == "warning"
    assert main(["explain", "64", "64", "64"]) == 0


def test_every_variable_that_the_package_reads_is_known() -> None:
    sources = Path(doctor.__file__).parents[1].rglob("*.py")
    read = {name for path in sources for name in re.findall(r"[\"'](GEMMNORM_[A-Z0-9_]+)[\"']", path.read_text())}
    assert read == set(VALUES)
