"""Counts that say how a checkout is built: signs, not goals.

    python benchmarks/structure.py [CHECKOUT …]        the table of lab/README.md, a column for each

Lines by folder; functions over 60 lines and over nine parameters (Python's by its syntax tree, CUDA's by a scan for
`__device__` and `__global__` and the braces that follow); numeric literals in plan/ but for 0, 1 and 2; words of docs/.
"""

from __future__ import annotations

import ast
import re
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
LONG, MANY = 60, 9
FREE = (0, 1, 2)  # numbers that need no name


@dataclass(frozen=True)
class Function:
    """Where it is, its lines with its signature, and its parameters without `self`."""

    path: str
    name: str
    lines: int
    parameters: int


def python_functions(path: Path, name: str) -> Iterator[Function]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            a = node.args
            names = [arg.arg for arg in (*a.posonlyargs, *a.args, *a.kwonlyargs)]
            count = len([n for n in names if n not in ("self", "cls", "ctx")]) + bool(a.vararg) + bool(a.kwarg)
            assert node.end_lineno is not None
            yield Function(name, node.name, node.end_lineno - node.lineno + 1, count)


_SKIPPED = re.compile(r"//[^\n]*|/\*.*?\*/|^#(?:[^\n]*\\\n)*[^\n]*", re.S | re.M)
_QUALIFIER = re.compile(r"__(?:device|global)__")
_ATTRIBUTE = re.compile(r"__launch_bounds__\s*\([^)]*\)|__\w+__")


def cuda_functions(path: Path, name: str) -> Iterator[Function]:
    text = path.read_text(encoding="utf-8")
    # Comments and directives become blanks, so that lines keep their numbers.
    text = _SKIPPED.sub(lambda m: re.sub(r"[^\n]", " ", m.group()), text)
    at = 0
    while (found := _QUALIFIER.search(text, at)) is not None:
        begin = found.start()
        end = next((i for i in range(begin, len(text)) if text[i] in ";{"), len(text))
        head = text[begin:end]
        at = end + 1
        plain = _ATTRIBUTE.sub(" ", head)
        if end == len(text) or text[end] == ";" or "(" not in plain:
            continue
        inside = _bracketed(plain, plain.index("("))
        if "operator()" in plain:
            inside = _bracketed(plain, plain.index("(", plain.index("operator()") + len("operator()")))
        closing = end + len(_bracketed(text, end, "{", "}")) + 1
        words = re.findall(r"[~\w]+", plain[: plain.index("(")])
        at = closing
        yield Function(name, words[-1], text.count("\n", begin, closing) + 1, _arguments(inside))


def _bracketed(text: str, at: int, left: str = "(", right: str = ")") -> str:
    """What stands between the bracket at `at` and the one that closes it."""
    depth = 0
    for i in range(at, len(text)):
        depth += (text[i] == left) - (text[i] == right)
        if depth == 0:
            return text[at + 1 : i]
    return text[at + 1 :]


def _arguments(inside: str) -> int:
    depth, commas = 0, 0
    for letter in inside:
        depth += (letter in "(<[{") - (letter in ")>]}")
        commas += letter == "," and depth == 0
    return commas + 1 if inside.strip() else 0


def functions(checkout: Path) -> list[Function]:
    package = checkout / "src" / "gemmnorm"
    found: list[Function] = []
    for path in sorted(package.rglob("*.py")):
        found += python_functions(path, str(path.relative_to(package)))
    for path in sorted(p for p in package.rglob("*") if p.suffix in (".cu", ".cuh")):
        found += cuda_functions(path, str(path.relative_to(package)))
    return found


def lines(checkout: Path) -> dict[str, int]:
    """By folder of the package (kernels/ with its subfolders), and of the rest."""
    package = checkout / "src" / "gemmnorm"
    counted: Counter[str] = Counter()
    for path in (p for p in package.rglob("*") if p.suffix in (".py", ".cuh", ".cu", ".txt")):
        parts = path.relative_to(package).parts
        inner = parts[0] == "kernels" and len(parts) > 2
        folder = "(top)" if len(parts) == 1 else "/".join(parts[:2]) if inner else parts[0]
        counted[folder] += len(path.read_text(encoding="utf-8").splitlines())
    for folder in ("tests", "benchmarks", "lab"):
        for path in (p for p in (checkout / folder).rglob("*") if p.suffix in (".py", ".cuh", ".hpp", ".cpp", ".sh")):
            counted[folder + " (outside)"] += len(path.read_text(encoding="utf-8").splitlines())
    return dict(sorted(counted.items()))


def literals(checkout: Path) -> int:
    """Numbers written in plan/, wherever they stand."""
    count = 0
    for path in (checkout / "src" / "gemmnorm" / "plan").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            number = isinstance(node, ast.Constant) and type(node.value) in (int, float)
            count += number and node.value not in FREE
    return count


def words(path: Path) -> int:
    """Of a Markdown file: whatever is set apart by blanks and holds a letter or digit."""
    return sum(bool(re.search(r"\w", word)) for word in path.read_text(encoding="utf-8").split())


def measure(checkout: Path) -> dict[str, int]:
    found = functions(checkout)
    python = [f for f in found if f.path.endswith(".py")]
    cuda = [f for f in found if not f.path.endswith(".py")]
    rows = {f"lines, {folder}": count for folder, count in lines(checkout).items()}
    for kind, those in (("Python", python), ("CUDA", cuda)):
        rows[f"{kind} functions"] = len(those)
        rows[f"{kind} functions over {LONG} lines"] = sum(f.lines > LONG for f in those)
        rows[f"{kind} functions over {MANY} parameters"] = sum(f.parameters > MANY for f in those)
        rows[f"most parameters of a {kind} function"] = max(f.parameters for f in those)
    rows["numeric literals in plan/"] = literals(checkout)
    rows["words of docs/"] = sum(map(words, (checkout / "docs").glob("*.md")))
    rows["words of lab/README.md"] = words(checkout / "lab" / "README.md")
    return rows


def main(arguments: list[str]) -> int:
    checkouts = [Path(a) for a in arguments if not a.startswith("-")] or [ROOT]
    columns = [measure(checkout) for checkout in checkouts]
    every = dict.fromkeys(name for column in columns for name in column)
    names = sorted(n for n in every if n.startswith("lines")) + [n for n in every if not n.startswith("lines")]
    if "--list" in arguments:
        for checkout in checkouts:
            for f in functions(checkout):
                if f.lines > LONG or f.parameters > MANY:
                    print(f"{f.path}: {f.name}: {f.lines} lines, {f.parameters} parameters")
    print("| | " + " | ".join(str(c) for c in checkouts) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for name in names:
        print(f"| {name} | " + " | ".join(str(column.get(name, "–")) for column in columns) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
