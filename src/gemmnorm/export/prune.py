"""The kernel sources, less what a file's kernels never reach.

A file that holds a few kernels would otherwise carry every overload, every wgmma shape and every helper that some
other kernel needs. The sources are plain: one namespace, declarations at its top level, no preprocessor beyond a few
macros. So they fall into top-level declarations, and structs into members, by counting brackets, and what is reached
follows from the identifiers in each. Nothing else is touched; comments stay with what they describe.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

from ..runtime.sources import KERNELS
from .fold import fold

_NAMESPACE = re.compile(r"^namespace gemmnorm \{\n(.*?)^\}  // namespace gemmnorm\n", re.M | re.S)
_INCLUDE = re.compile(r'^#include "([^"]+)"\n', re.M)
_NOT_CODE = re.compile(r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\])*"', re.S)
_WORD = re.compile(r"[A-Za-z_]\w*")
_FOR_TOOLS = re.compile(r"^\s*// clang-format o(?:n|ff)\n", re.M)
# What may stand before the name of a function or in its place: not a name that is declared.
_SPECIFIERS = {"__launch_bounds__", "__align__", "alignas", "__attribute__", "decltype", "defined"}


@dataclass
class Declaration:
    """One top-level declaration: its comment and text, the names that it declares, and the identifiers in it.

    Attributes:
        selects: identifiers among its parameter types or its specialisation's arguments, in which overloads and
            specialisations of one name differ.
        follows: no blank line stands before it, so that it may share the comment of the one before.
        defines: more than an announcement such as `struct Name;`.
        shape: of an invocation of a wgmma macro, its first two arguments.
        members: of a struct; `text` then ends where they begin.
        needed: of a member, that it is there whenever the struct is: data, a constructor, an operator.
    """

    comment: str
    text: str
    names: frozenset[str]
    words: frozenset[str]
    selects: frozenset[str]
    follows: bool
    defines: bool
    shape: str | None = None
    members: list[Declaration] = field(default_factory=list)
    needed: bool = False
    kept: bool = False

    @property
    def kept_text(self) -> str:
        """Its text, of a struct with the members that are kept."""
        return self.text + _joined(self.members).removeprefix("\n") + "};\n" if self.members else self.text


@dataclass
class SourceFile:
    """A file under kernels/: the comment at its head, and its declarations."""

    name: str
    head: str
    declarations: list[Declaration]

    def kept_text(self) -> str:
        """What is kept of it; "" where that is nothing."""
        text = _joined(self.declarations)
        return self.head + text if text else ""


def _joined(declarations: Iterable[Declaration]) -> str:
    """What is kept, with blank lines where there were some. One comment may stand above several declarations."""
    parts, comment, previous = [], "", False
    for d in declarations:
        comment = d.comment or (comment if d.follows else "")
        if d.kept:
            parts.append(("" if d.follows and previous else "\n") + comment + d.kept_text)
            comment = ""
        previous = d.kept or (d.follows and previous)
    return "".join(parts)


def kernel_text(
    files: Iterable[str],
    roots: str,
    unused: Collection[str] = (),
    wgmma: Collection[str] = (),
    facts: Mapping[str, Mapping[str, bool]] = MappingProxyType({}),
) -> str:
    """The text of `files` (under kernels/) and of what they include, less what `roots` does not reach.

    Args:
        roots: C++ that uses the sources: its identifiers are reached.
        unused: templates that reached declarations mention and never instantiate: of these only announcements stay.
        wgmma: the shapes that are instantiated, each as the first two arguments of `GEMMNORM_WGMMA…(N, TYPE, …)`.
        facts: folder under kernels/ → what is known of the conditions in its files (`fold.py`).
    """
    sources = list(_in_order(files, facts))
    every = [d for source in sources for d in source.declarations if d.shape is None or d.shape in wgmma]
    _mark(every, identifiers(roots), unused)
    texts = [text for source in sources if (text := source.kept_text())]
    return "namespace gemmnorm {\n\n" + "\n".join(texts) + "\n}  // namespace gemmnorm\n"


def _mark(every: list[Declaration], reached: set[str], unused: Collection[str]) -> None:
    """Mark what is reached, until nothing changes.

    One of several declarations of a name is reached when the types that it is for are reached as well: without a value
    of that type nobody calls the overload, or instantiates the specialisation.
    """
    declared: dict[str, int] = {}
    for d in every:
        for name in d.names:
            declared[name] = declared.get(name, 0) + d.defines
    changed = True
    while changed:
        changed = False
        for d in every:
            if d.kept or not d.names & reached or (d.defines and d.names <= set(unused)):
                continue
            one_of_several = any(declared[name] > 1 for name in d.names)
            if one_of_several and (d.selects & declared.keys()) - d.names - reached:
                continue
            d.kept = changed = True
            reached |= d.words
        for member in [member for d in every if d.kept for member in d.members if not member.kept]:
            if member.needed or member.names & reached:
                member.kept = changed = True
                reached |= member.words


def _in_order(
    files: Iterable[str], facts: Mapping[str, Mapping[str, bool]] = MappingProxyType({})
) -> Iterator[SourceFile]:
    """The files and all they include, each once, what is included first."""
    seen: set[str] = set()
    macros: dict[str, str] = {}

    def visit(name: str) -> Iterator[SourceFile]:
        if name in seen:
            return
        seen.add(name)
        text = _FOR_TOOLS.sub("", (KERNELS / name).read_text(encoding="utf-8"))
        for included in _INCLUDE.findall(text):
            yield from visit(included)
        yield _parsed(name, fold(text, facts.get(name.split("/")[0], {})), macros)

    for name in files:
        yield from visit(name)


def _parsed(name: str, text: str, macros: dict[str, str]) -> SourceFile:
    head = text.split("#pragma once\n")[0]
    bodies = _NAMESPACE.findall(text)
    assert len(bodies) == 1, f"{name}: one namespace was expected"
    rule = f"// --- {name} ".ljust(118, "-") + "\n"
    return SourceFile(name, rule + head, list(_declarations(bodies[0], macros)))


def _declarations(body: str, macros: dict[str, str]) -> Iterator[Declaration]:
    """Cut the inside of the namespace into its declarations. `macros`: name → text, as far as known; added to."""
    comment, text, blank = "", "", True
    for line in body.splitlines(keepends=True):
        if not text and not line.strip():
            comment, blank = "", True
        elif not text and line.lstrip().startswith("//"):
            comment += line
        else:
            text += line
            if _complete(text):
                yield _declaration(comment, text, not blank, macros)
                comment, text, blank = "", "", False
    assert not text, f"a declaration does not end: {text[:200]}"


def _complete(text: str) -> bool:
    """Whether `text` ends where a declaration does."""
    if text.startswith("#define"):
        return not text.endswith("\\\n")
    code = _code(text).rstrip()
    if any(code.count(a) != code.count(b) for a, b in ("{}", "()", "[]")):
        return False
    return code.endswith((";", "}")) or re.fullmatch(r"GEMMNORM_\w+\(.*\)", code, re.S) is not None


def _code(text: str) -> str:
    """`text` without comments, and with empty strings."""
    return _NOT_CODE.sub(lambda found: '""' if found.group()[0] == '"' else " ", text)


def identifiers(text: str) -> set[str]:
    """The words of C++ code, comments and strings left out."""
    return set(_WORD.findall(_code(text)))


def _declaration(comment: str, text: str, follows: bool, macros: dict[str, str]) -> Declaration:
    code = _code(text)
    words = frozenset(_WORD.findall(code))
    if code.startswith("#define"):
        name = code.split(maxsplit=2)[1].split("(")[0]
        macros[name] = code
        return Declaration(comment, text, frozenset({name}), words, frozenset(), follows, True)
    invoked = code.split("(")[0].strip()
    if invoked in macros:  # it declares what its macro's text declares
        body = macros[invoked].split(")", 1)[1].replace("\\\n", "\n").strip()
        arguments = code.split("(", 1)[1]
        selects, shape = frozenset(_WORD.findall(arguments)) - macros.keys(), ",".join(arguments.split(",", 2)[:2])
        return Declaration(comment, text, _declared(body)[0], words, selects, follows, True, shape)
    names, selects = _declared(code)
    defines = re.fullmatch(r"(?:template\s*<.*>\s*)?struct \w+;", code.strip(), re.S) is None
    found = Declaration(comment, text, names, words, selects, follows, defines)
    if body_of := re.fullmatch(r"((?:template[^\n]*\n)*struct [^{;]*\{[^\n]*\n)(.*)\};\n", text, re.S):
        found.text, found.words = body_of.group(1), frozenset(identifiers(body_of.group(1)))
        found.members = [_as_member(member, names) for member in _declarations(body_of.group(2), macros)]
    return found


def _as_member(member: Declaration, struct: frozenset[str]) -> Declaration:
    """Functions, types and constants can be left out; the rest of a struct cannot."""
    code = re.sub(r"^(?:template\s*<.*?>\s*\n\s*)+", "", _code(member.text).strip(), flags=re.S)
    optional = code.startswith(("struct", "static constexpr", "using")) or re.match(r"[^={;]*\w\(", code) is not None
    member.needed = not optional or not member.names or bool(member.names & struct) or "operator" in code.split("(")[0]
    return member


def _declared(code: str) -> tuple[frozenset[str], frozenset[str]]:
    """The names that a declaration declares, and the identifiers that tell it from others of that name."""
    code = code.strip()
    parameters: set[str] = set()
    while code.startswith("template"):
        end = _closing(code, code.index("<"))
        parameters |= {found.split()[-1] for found in re.findall(r"(?:class|typename|int|bool|\w+) \w+", code[:end])}
        code = code[end:].lstrip()
    if found := re.match(r"(?:struct|class|enum class|enum)\s+(?:alignas\(.*?\)\s+)?(\w+)\s*(<)?", code):
        arguments = code[found.end() : _closing(code, found.end() - 1)] if found.group(2) else ""
        return frozenset({found.group(1)}), frozenset(_WORD.findall(arguments)) - parameters
    if found := re.match(r"using\s+(\w+)", code):
        return frozenset({found.group(1)}), frozenset()
    head = re.split(r"[{=]", code, maxsplit=1)[0]
    for call in re.finditer(r"(\w+)\s*\(", head):
        if call.group(1) not in _SPECIFIERS:
            inside = code[call.end() : _closing(code, call.end() - 1)]
            return frozenset({call.group(1)}), frozenset(_WORD.findall(inside)) - parameters
    if found := re.search(r"(\w+)\s*<[^=]*>\s*$", head):  # a specialised variable
        return frozenset({found.group(1)}), frozenset(_WORD.findall(head[found.end(1) :])) - parameters
    return frozenset(re.findall(r"([A-Za-z_]\w*)(?:\[[^\]]*\])*\s*=(?!=)", code)), frozenset()


def _closing(code: str, start: int) -> int:
    """The position behind the bracket that closes the one at `start`."""
    opened, pairs = 0, {"<": ">", "(": ")", "{": "}"}
    open_, close = code[start], pairs[code[start]]
    for i in range(start, len(code)):
        opened += (code[i] == open_) - (code[i] == close and code[i - 1] != "-")
        if not opened:
            return i + 1
    raise AssertionError(f"a bracket is not closed: {code[:200]}")
