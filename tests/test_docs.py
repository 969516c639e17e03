"""README, docs/ and the site: every snippet is run here, in CI or on a GPU; links and public names are there."""

from __future__ import annotations

import doctest
import importlib
import inspect
import os
import re
import shutil
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

import gemmnorm
from gemmnorm import errors

ROOT = Path(__file__).resolve().parents[1]
SITE = ROOT / "docs" / "site"
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
BESIDE = ("CHANGELOG.md", "lab/README.md", "tests/traps/README.md")
LINKED = [*PAGES, *(path for name in BESIDE if (path := ROOT / name).is_file())]
# (page, who runs it, language, text) of every fenced block
BLOCKS = [
    (page.relative_to(ROOT).as_posix(), who or "", language, text)
    for page in PAGES
    for who, language, text in re.findall(
        r"(?:<!-- run: (\w+) -->\n)?^```(\w*)\n(.*?)^```$", page.read_text(encoding="utf-8"), re.S | re.M
    )
]


# --- snippets ---------------------------------------------------------------------------------------------------------


def run(language: str, text: str, folder: Path, path: str, *more: Path) -> None:
    """Run a block in `folder`, with `gemmnorm` and `examples/` at hand as after an installation, and `path` besides.

    `more` folders are on Python's path.
    """
    tool = folder / "bin" / "gemmnorm"
    tool.parent.mkdir()
    tool.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m gemmnorm "$@"\n')
    tool.chmod(tool.stat().st_mode | stat.S_IEXEC)
    (folder / "examples").symlink_to(ROOT / "examples")
    searched = [str(Path(gemmnorm.__file__).parents[1]), *map(str, more), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "PATH": f"{tool.parent}{os.pathsep}{path}",
        "PYTHONPATH": os.pathsep.join(searched),
    }
    command = [sys.executable, "-c", text] if language == "python" else ["bash", "-euc", text]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=280)
    assert done.returncode == 0, f"{text}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}"


def blocks(who: str) -> list[object]:
    found = [(page, lang, text) for page, by, lang, text in BLOCKS if by == who]
    return [pytest.param(lang, text, id=f"{page}-{text.strip().split(chr(10))[0][:40]}") for page, lang, text in found]


@pytest.mark.parametrize(("language", "text"), blocks("cpu"))
def test_what_runs_anywhere(language, text, tmp_path):
    run(language, text, tmp_path, "/usr/bin:/bin")  # without nvcc, which takes half a minute where it is found


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize(("language", "text"), blocks("emulator"))
def test_what_runs_in_the_emulator(language, text, tmp_path):
    run(language, text, tmp_path, os.environ["PATH"], ROOT / "tests")


@pytest.mark.gpu
@pytest.mark.parametrize(("language", "text"), [*blocks("gpu"), *blocks("cpu")])
def test_what_runs_on_a_gpu(language, text, tmp_path):
    run(language, text, tmp_path, os.environ["PATH"])


def test_every_block_is_run_by_somebody():
    assert {by for _, by, _, _ in BLOCKS} <= {"cpu", "gpu", "ci", "emulator", ""}
    # Text is for reading. The one other block without a marker is the line of PyTorch that the first snippet replaces.
    left = [(page, text) for page, by, language, text in BLOCKS if not by and language != "text"]
    assert [page for page, text in left if "# PyTorch" not in text] == []
    assert len(blocks("cpu")) >= 8 and len(blocks("gpu")) >= 1 and len(blocks("emulator")) >= 1


def test_ci_runs_the_two_commands():
    script = "".join((ROOT / ".ci" / name).read_text(encoding="utf-8") for name in ("run", "wheel"))
    lines = [line.split("#")[0].strip() for _, by, _, text in BLOCKS if by == "ci" for line in text.strip().split("\n")]
    assert len(lines) == 2
    for command in lines:
        assert re.search(rf"^\s*{re.escape(command)}\b", script, re.M), command


@pytest.mark.parametrize("name", gemmnorm.__all__)
def test_examples_of_docstrings(name):
    """Every public function and class has one, which runs; an exception needs none."""
    public = getattr(gemmnorm, name)
    model = nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256), nn.ReLU())
    names = {"torch": torch, "nn": nn, "gemmnorm": gemmnorm, "model": model}
    runner = doctest.DocTestRunner(verbose=False)
    found = [test for test in doctest.DocTestFinder().find(public, name, globs=names) if test.examples]
    assert found or public is gemmnorm.GemmNormError
    for test in found:
        assert runner.run(test).failed == 0


# --- links ------------------------------------------------------------------------------------------------------------


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives to a page's headings."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ +(.+?)\s*$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", LINKED, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_links_lead_somewhere(page):
    for target, anchor in re.findall(r"\]\((?![a-z]+:)([^)#\s]*)(?:#([^)\s]+))?\)", page.read_text(encoding="utf-8")):
        path = page.parent / target if target else page
        assert path.exists(), target
        assert not anchor or anchor in anchors(path), f"{target}#{anchor}"


# --- the site ---------------------------------------------------------------------------------------------------------


def shown() -> set[object]:
    """The objects that the API pages show."""
    found = set()
    for page in (SITE / "api").glob("*.md"):
        for name in re.findall(r"^::: ([\w.]+)$", page.read_text(encoding="utf-8"), re.M):
            module, _, last = name.rpartition(".")
            # A function and the file that holds it may have one name: the file is what importlib gives.
            found.add(importlib.import_module(name) if name == "gemmnorm.errors" else getattr(_module(module), last))
    return found


def _module(name: str) -> object:
    importlib.import_module(name)
    return sys.modules[name]


def test_the_site_shows_every_public_name():
    pages = shown()
    assert errors in pages  # with all that it defines
    missing = [n for n in gemmnorm.__all__ if getattr(gemmnorm, n) not in pages and not hasattr(errors, n)]
    assert missing == []
    assert all(inspect.getdoc(public) for public in pages)


def test_every_page_is_in_the_sites_menu():
    menu = re.findall(r": ([\w./]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.M)
    pages = [path.relative_to(SITE).as_posix() for path in SITE.rglob("*.md")]
    pages += [path.name for path in (ROOT / "docs").glob("*.md")]
    assert sorted(menu) == sorted([*pages, "CONTRIBUTING.md", "lab/README.md", "tests/traps/README.md"])
