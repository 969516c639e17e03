"""What the tools refuse to overwrite or to compare with, and what a written file needs beside it."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from gemmnorm.bench.comparison import compare
from gemmnorm.bench.documents import write_json
from gemmnorm.cli import arguments
from gemmnorm.errors import GemmNormValueError
from gemmnorm.export import imports_beside
from gemmnorm.userfiles import ModelFileError, load_model_file


def check(path: Path, **options: object) -> None:
    given = argparse.Namespace(json=str(path), command="bench", no_report=True, **options)
    arguments.check_outputs(given, argparse.ArgumentParser())


def test_a_result_replaces_an_earlier_one_and_no_other_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, model, empty = tmp_path / "result.json", tmp_path / "model.py", tmp_path / "empty"
    write_json(result, {"schema": 1, "kind": "bench"})
    model.write_text("import torch\n")
    empty.touch()
    for path in (result, empty, tmp_path / "new.json"):
        check(path)
    with pytest.raises(SystemExit):
        check(model)
    assert "was not written by gemmnorm" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        check(Path("/dev/null"))
    assert "is no file" in capsys.readouterr().err


def test_a_link_stays_one(tmp_path: Path) -> None:
    target, link = tmp_path / "target.json", tmp_path / "link.json"
    link.symlink_to(target)
    write_json(link, {"schema": 1})
    assert link.is_symlink() and '"schema"' in target.read_text()


def test_a_result_of_another_model_is_not_compared() -> None:
    new, old = ({"kind": "bench", "model": f"folder/{name}.py", "environment": {}} for name in ("a", "b"))
    with pytest.raises(GemmNormValueError, match=r"OLD: expected a result of a\.py; got one of b\.py"):
        compare(new, old)


def test_what_a_file_imports_from_its_folder(tmp_path: Path) -> None:
    (tmp_path / "blocks.py").touch()
    assert imports_beside("import torch, os\nimport elsewhere\nfrom blocks.more import Block\n", tmp_path) == ["blocks"]


@pytest.mark.parametrize("text", ["²", "0", "-1", "1.5"])
def test_counts_are_whole_numbers(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match="expected a whole number from 1 on"):
        arguments._count(text)


def test_a_model_file_that_exits_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text("import sys\nsys.exit('no data')\n")
    with pytest.raises(ModelFileError, match="must run when imported, it raised SystemExit"):
        load_model_file(path)
