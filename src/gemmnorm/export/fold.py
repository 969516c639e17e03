"""Branches that are decided when a file is written: `if (kSplit) …` where every kernel in it has split operands.

What is known comes from the plans (`kernels.facts`): a condition as it stands in the sources → whether it holds.
Folding changes nothing that a compiler would not: folded and original sources compile to the same PTX.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

_NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)
_IF = re.compile(r"\bif (?:constexpr )?\(")
_LOCAL = re.compile(r"^ +(?:const|constexpr) [\w:<>*& ]*[\w>*&] (\w+) = [^;{]*;\n", re.M)
_PAIRS = {"(": ")", "{": "}", "[": "]"}


def fold(text: str, facts: Mapping[str, bool]) -> str:
    """`text` with what is taken in place of the branches that `facts` decide, less variables that nobody reads then."""
    before = None
    changed = False
    while before != text:
        before = text
        text = _fold_choice(_fold_if(text, facts), facts)
        changed |= before != text
        if changed:
            text = _without_unread(text)
    return text


def _mask(text: str) -> str:
    """`text` with blanks for comments and strings."""
    return _NOT_CODE.sub(lambda found: re.sub(r"[^\n]", " ", found.group()), text)


def _closing(mask: str, start: int) -> int:
    """Where the bracket at `start` closes."""
    depth = 0
    for i in range(start, len(mask)):
        depth += (mask[i] in "({[") - (mask[i] in ")}]")
        if not depth:
            return i
    raise AssertionError(f"a bracket is not closed: {mask[start : start + 100]}")


def _simplified(condition: str, facts: Mapping[str, bool]) -> str | bool:
    """The condition without what is known; True or False where that is all."""
    for symbol, absorbing in (("||", True), ("&&", False)):
        parts = _split(condition, symbol)
        if len(parts) > 1:
            left = [_simplified(part, facts) for part in parts]
            if absorbing in left:
                return absorbing
            unknown = [part for part in left if isinstance(part, str)]
            return f" {symbol} ".join(unknown) if unknown else not absorbing
    condition = condition.strip()
    negated, inside = condition.startswith("!"), condition.removeprefix("!")
    if inside.startswith("(") and _closing(inside, 0) == len(inside) - 1:
        inner = _simplified(inside[1:-1], facts)
        rest: str | bool = f"({inner})" if isinstance(inner, str) else inner
    else:
        rest = facts.get(inside, inside)
    if isinstance(rest, bool):
        return rest != negated
    return f"!{rest}" if negated else rest


def _split(condition: str, symbol: str) -> list[str]:
    """At `symbol`, outside of brackets."""
    parts, depth, begin = [], 0, 0
    for i, c in enumerate(condition):
        depth += (c in "({[") - (c in ")}]")
        if not depth and condition.startswith(symbol, i):
            parts.append(condition[begin:i])
            begin = i + len(symbol)
    return [*parts, condition[begin:]]


def _fold_if(text: str, facts: Mapping[str, bool]) -> str:
    """The first `if` that is known, or known in part."""
    mask = _mask(text)
    for found in _IF.finditer(mask):
        close = _closing(mask, found.end() - 1)
        condition = " ".join(mask[found.end() : close].split())
        value = _simplified(condition, facts)
        if isinstance(value, str):
            if "".join(value.split()) != "".join(condition.split()):
                return text[: found.end()] + value + text[close:]
            continue
        then = _statement(mask, close + 1)
        otherwise = re.match(r"\s*else\b", mask[then:])
        end = _statement(mask, then + otherwise.end()) if otherwise else then
        if value:
            kept = text[close + 1 : then]
        else:
            kept = text[then + otherwise.end() : end] if otherwise else ""
        return _replaced(text, mask, found.start(), end, kept)
    return text


def _statement(mask: str, start: int) -> int:
    """Where the statement that begins at or after `start` ends."""
    start += len(mask[start:]) - len(mask[start:].lstrip())
    if mask[start] == "{":
        return _closing(mask, start) + 1
    if head := re.compile(r"(?:if (?:constexpr )?|for |while )\(").match(mask, start):
        end = _statement(mask, _closing(mask, head.end() - 1) + 1)
        if mask.startswith("if", start) and (otherwise := re.compile(r"\s*else\b").match(mask, end)):
            end = _statement(mask, otherwise.end())
        return end
    while mask[start] != ";":
        start = _closing(mask, start) + 1 if mask[start] in _PAIRS else start + 1
    return start + 1


def _replaced(text: str, mask: str, start: int, end: int, kept: str) -> str:
    """`text` with `kept`, a statement or nothing, in place of the `if` statement from `start` to `end`."""
    before = text[:start]
    follows_else = mask[:start].rstrip().endswith("else")
    if follows_else and kept.strip():
        return before + kept.strip() + text[end:]
    if follows_else:
        before = text[: mask[:start].rstrip().rindex("else")].rstrip()
        return before + text[end:]
    indent = before[before.rfind("\n") + 1 :]
    assert not indent.strip(), f"an if stands in the middle of a line: {indent}"
    if not kept.strip():
        return before[: len(before) - len(indent)] + text[text.index("\n", end) + 1 :]
    inner = kept.strip()
    if inner.startswith("{"):
        lines = inner[inner.index("\n") + 1 : inner.rindex("}")].rstrip().split("\n")
    else:
        lines = (indent + "  " + inner).split("\n")
    moved = "\n".join(line.removeprefix("  ") if line.startswith("  ") else line for line in lines)
    return before[: len(before) - len(indent)] + moved + text[end:]


def _fold_choice(text: str, facts: Mapping[str, bool]) -> str:
    """The first `known ? a : b`."""
    mask = _mask(text)
    for leaf, value in facts.items():
        for found in re.finditer(rf"(?<![\w:.>]){re.escape(leaf)} \? ", mask):
            if not re.search(r"(?:[(=,\[{?]|\breturn)\s*$", mask[: found.start()]):
                continue
            colon = _until(mask, found.end(), ":")
            end = _until(mask, colon + 1, ";,")
            chosen = (text[found.end() : colon] if value else text[colon + 1 : end]).strip()
            before, after = text[: found.start()], text[end:]
            if re.fullmatch(r"[\w.:\[\]]+", chosen) and re.search(r"[\s(]\($", before) and after.startswith(")"):
                before, after = before[:-1], after[1:]
            return before + chosen + re.sub(r"^(;) {2,}//", r"\1  //", after)
    return text


def _until(mask: str, start: int, ends: str) -> int:
    """The next of `ends`, or the bracket that closes, outside of brackets; `::` is no colon."""
    i = start
    while mask.startswith("::", i) or (mask[i] not in ends and mask[i] not in ")}]"):
        i = _closing(mask, i) + 1 if mask[i] in _PAIRS else i + (2 if mask.startswith("::", i) else 1)
    return i


def _without_unread(text: str) -> str:
    """Without local variables that are declared in a line and never read."""
    mask = _mask(text)
    for found in _LOCAL.finditer(mask):
        begin = mask.rfind("\n}", 0, found.start())
        end = mask.find("\n}", found.end())
        if len(re.findall(rf"\b{found.group(1)}\b", mask[max(begin, 0) : end])) == 1:
            return text[: found.start()] + text[found.end() :]
    return text
