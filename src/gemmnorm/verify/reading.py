"""What the source of a candidate does that no model needs: said, with the line, and not condemned."""

from __future__ import annotations

import ast
from collections.abc import Iterator

__all__ = ["suspicions"]

_READS = {
    "the call stack": ("inspect.stack", "inspect.currentframe", "sys._getframe", "sys._current_frames",
                       "traceback.extract_stack", "traceback.format_stack", "traceback.walk_stack"),
    "objects that are not its own": ("gc.get_objects", "gc.get_referrers", "gc.get_referents"),
    "which modules are loaded": ("sys.modules",),
    "which program runs": ("sys.argv", "psutil.Process", "os.getppid"),
}  # fmt: skip
_PATCHED = ("torch", "time", "builtins", "sys")


def suspicions(path: str) -> list[str]:
    """One sentence for each kind of thing that the file at `path` does; empty where it cannot be read."""
    try:
        with open(path, "rb") as stream:
            tree = ast.parse(stream.read())
    except (OSError, SyntaxError, ValueError):
        return []
    lines: dict[str, list[int]] = {}
    for what, line in _found(tree):
        lines.setdefault(what, []).append(line)
    return [f"the file {what} (line {', '.join(map(str, sorted(set(at))))})" for what, at in lines.items()]


def _found(tree: ast.AST) -> Iterator[tuple[str, int]]:
    names = {path: f"reads {what}" for what, paths in _READS.items() for path in paths}
    imported: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            imported.update({a.asname or a.name: f"{node.module}.{a.name}" for a in node.names})
        elif isinstance(node, ast.Import):
            imported.update({a.asname: a.name for a in node.names if a.asname})
    for node in ast.walk(tree):
        if isinstance(node, (ast.Attribute, ast.Name)) and isinstance(node.ctx, ast.Load):
            path = _path(node, imported)
            if path in names:
                yield names[path], node.lineno
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            path = _path(node, imported)
            if path.partition(".")[0] in _PATCHED and not path.startswith("torch.backends."):
                yield f"assigns to {path}", node.lineno
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("/proc/"):
            yield "reads /proc", node.lineno


def _path(node: ast.expr, imported: dict[str, str]) -> str:
    """ "torch.cuda.Event" of the expression that reads so, imports resolved; empty for anything else."""
    if isinstance(node, ast.Name):
        return imported.get(node.id, node.id)
    if isinstance(node, ast.Attribute):
        inner = _path(node.value, imported)
        return f"{inner}.{node.attr}" if inner else ""
    return ""
