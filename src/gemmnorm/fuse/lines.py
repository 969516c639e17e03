"""Lines of a written `forward`: those of both modes in one, and long ones on several."""

from __future__ import annotations

import re

LINE = 116
_PIECE = re.compile(r"""'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\w+|\W""")  # of a line; a text in quotes is one


def merge_modes(train: list[str], evaluation: list[str]) -> list[str]:
    """One body for both modes: where they differ only in True against False, `self.training` says which."""
    if train == evaluation:
        return train
    if len(train) == len(evaluation):
        merged = [_merge_line(a, b) for a, b in zip(train, evaluation, strict=True)]
        if None not in merged:
            return [line for line in merged if line is not None]
    indented = ["    " + line for line in train]
    return ["if self.training:", *indented, *evaluation]


def _merge_line(train: str, evaluation: str) -> str | None:
    pieces = [_PIECE.findall(line) for line in (train, evaluation)]
    if len(pieces[0]) != len(pieces[1]):
        return None
    merged = []
    for a, b in zip(*pieces, strict=True):
        if a != b and (a, b) not in (("True", "False"), ("False", "True")):
            return None
        merged.append(a if a == b else "self.training" if a == "True" else "(not self.training)")
    return "".join(merged)


def wrapped(prefix: str, text: str) -> list[str]:
    """One statement, with the arguments of its outermost call on a line of their own if it would be too long."""
    if len(prefix) + len(text) <= LINE - 8 or not text.endswith(")"):
        return [prefix + text]
    opened, place = [0], 0  # where the parentheses begin that are open at `place`
    for piece in _PIECE.findall(text):
        if piece == "(":
            opened.append(place)
        last = opened.pop() if piece == ")" else 0
        place += len(piece)
    return [f"{prefix}{text[:last]}(", f"    {text[last + 1 : -1]}", ")"]
