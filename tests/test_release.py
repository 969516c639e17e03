"""What a release rests on: one version, and files that agree with it and are shipped."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import gemmnorm

tomllib = pytest.importorskip("tomllib")  # Python 3.11

ROOT = Path(__file__).resolve().parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))


def test_the_version_stands_in_one_place() -> None:
    assert PROJECT["project"]["dynamic"] == ["version"] and "version" not in PROJECT["project"]
    assert PROJECT["tool"]["hatch"]["version"]["path"] == "src/gemmnorm/__init__.py"


def test_change_log_and_citation_know_it() -> None:
    changes = re.findall(r"^## (.+)$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M)
    assert changes[0] in ("Unreleased", gemmnorm.__version__) and gemmnorm.__version__ in changes
    assert f"\nversion: {gemmnorm.__version__}\n" in (ROOT / "CITATION.cff").read_text(encoding="utf-8")


def test_what_is_shipped_is_there() -> None:
    assert all((ROOT / name).exists() for name in PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert (ROOT / "src" / "gemmnorm" / "py.typed").is_file()


def test_the_release_script_tries_the_oldest_pytorch_that_is_supported() -> None:
    pairs = re.search(r"PAIRS:-([^}]*)", (ROOT / ".ci" / "release").read_text(encoding="utf-8"))
    floor = re.search(r"torch>=([\d.]+)", " ".join(PROJECT["project"]["dependencies"]))
    assert pairs and floor
    tried = [tuple(pair.split(":")) for pair in pairs[1].split()]
    assert any(torch.startswith(floor[1]) for torch, _ in tried) and len({torch for torch, _ in tried}) >= 4
    assert (
        f">={min((p for _, p in tried), key=lambda v: int(v.split('.')[1]))}" == PROJECT["project"]["requires-python"]
    )
