"""The folders of the tools: who may import whom, through the door, and that each says what is in it."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import gemmnorm

PACKAGE = Path(gemmnorm.__file__).parent
# Which of the folders a folder may import, in the order in which they stand on each other.
ALLOWED: dict[str, set[str]] = {
    "userfiles": set(),
    "fuse": set(),
    "export": {"userfiles", "fuse"},
    "verify": {"userfiles"},
    "bench": {"userfiles", "fuse"},
    "cli": {"userfiles", "fuse", "export", "verify", "bench"},
}


def folder_imports(path: Path) -> set[tuple[str, str]]:
    """(folder, module inside it or "") of each import of one of the folders, wherever it stands in the file."""
    here = ["gemmnorm", *path.relative_to(PACKAGE).parts[:-1]]
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom):
            base = here[: len(here) - node.level + 1] if node.level else []
            names = [".".join([*base, *([node.module] if node.module else [])])]
            names += [f"{names[0]}.{alias.name}" for alias in node.names] if names[0] == "gemmnorm" else []
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            _, folder, inside, *_ = *name.split("."), "", "", ""
            if name.startswith("gemmnorm.") and folder in ALLOWED:
                found.add((folder, inside))
    return found


@pytest.mark.parametrize("folder", ALLOWED)
def test_folders_stand_on_each_other_in_one_order(folder: str) -> None:
    order = list(ALLOWED)
    assert all(order.index(below) < order.index(folder) for below in ALLOWED[folder])
    used = {name for path in (PACKAGE / folder).rglob("*.py") for name, _ in folder_imports(path)} - {folder}
    assert used == ALLOWED[folder]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda p: str(p.relative_to(PACKAGE)))
def test_a_folder_is_entered_by_its_door(path: Path) -> None:
    """From outside a folder, only what its `__init__.py` offers is imported."""
    here = path.relative_to(PACKAGE).parts[0]
    allowed = {("cli", "main")} if path.name == "__main__.py" else set()
    assert not {(folder, inside) for folder, inside in folder_imports(path) if folder != here and inside} - allowed


@pytest.mark.parametrize("folder", ALLOWED)
def test_the_door_names_every_file_and_says_what_it_is_for(folder: str) -> None:
    door = ast.get_docstring(ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))) or ""
    for path in (PACKAGE / folder).glob("*.py"):
        if path.name != "__init__.py":
            assert f"- `{path.name}`" in door, path
            assert ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))), path
    listed = [line.split("`")[1] for line in door.splitlines() if line.startswith("- `")]
    assert all((PACKAGE / folder / name).is_file() for name in listed)


def test_importing_loads_no_compiler_and_no_tool() -> None:
    """`import gemmnorm` takes hardly longer than `import torch`."""
    unwanted = ["torch._dynamo", "torch._inductor", "rich", *(f"gemmnorm.{f}" for f in ALLOWED if f != "fuse")]
    code = (
        f"import sys, torch; had = set(sys.modules); import gemmnorm; print({{*{unwanted}}} & (set(sys.modules) - had))"
    )
    environment = {"PYTHONPATH": str(PACKAGE.parent), "PATH": ""}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.strip() == "set()", done.stdout + done.stderr


def test_signs_of_size() -> None:
    """No function of these folders is longer than two screens or takes more than nine parameters."""
    large = []
    for path in (path for folder in ALLOWED for path in (PACKAGE / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                arguments = node.args
                parameters = len([*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs])
                if node.end_lineno - node.lineno >= 60 or parameters > 9:
                    large.append(f"{path.name}: {node.name}")
    assert not large
