"""What single instructions do, and what stands around them."""

from __future__ import annotations

import dis
import functools
import re
import types
from collections.abc import Iterator

CONSTANTS = ("LOAD_CONST", "LOAD_COMMON_CONSTANT")  # what loads None: the second from Python 3.15 on
_JUMPS = {*dis.hasjrel, *dis.hasjabs}


def unpacked(frame: types.FrameType) -> list[str] | None:
    """The variables that take what is unpacked in `frame` (`a, b = …`), "" for what is none; None where nothing is."""
    found = [*dis.get_instructions(frame.f_code)]
    at = next(k for k, i in enumerate(found) if i.offset == frame.f_lasti)
    if found[at].opname != "UNPACK_SEQUENCE":
        return None
    names: list[str] = []
    for i in found[at + 1 :]:
        if not i.opname.startswith("STORE_FAST"):
            break
        names += i.argval if isinstance(i.argval, tuple) else (i.argval,)
    return [*names, *[""] * found[at].argval][: found[at].argval]


def reads_attribute(frame: types.FrameType) -> bool:
    """What runs in `frame` is about to get an attribute by its name."""
    return frame.f_lasti in _attribute_loads(frame.f_code)


@functools.lru_cache(maxsize=64)
def _attribute_loads(code: types.CodeType) -> frozenset[int]:
    return frozenset(i.offset for i in dis.get_instructions(code) if i.opname == "LOAD_ATTR")


def is_none(instruction: dis.Instruction) -> bool:
    """It loads or returns None."""
    return instruction.opname in (*CONSTANTS, "RETURN_CONST") and instruction.argval is None


def one_by_one(instruction: dis.Instruction) -> Iterator[dis.Instruction]:
    """Newer interpreters load and store two variables by one instruction."""
    names = instruction.argval if isinstance(instruction.argval, tuple) else ()
    if not re.fullmatch("(LOAD|STORE)_FAST(_BORROW)?_(LOAD|STORE)_FAST(_BORROW)?", instruction.opname):
        yield instruction
        return
    for kind, name in zip(re.findall("LOAD|STORE", instruction.opname), names, strict=True):
        yield instruction._replace(opname=f"{kind}_FAST", argval=name)


def raising(code: types.CodeType) -> set[int]:
    """Offsets of what stands before a `raise` without a jump between, as the call that writes its message.

    No recording comes to an end that has run it, and what is called there may do what it likes.
    """
    found, stretch = set[int](), list[int]()
    for instruction in dis.get_instructions(code):
        stretch = [*([] if instruction.is_jump_target else stretch), instruction.offset]
        if instruction.opname == "RAISE_VARARGS":
            found.update(stretch)
        if instruction.opcode in _JUMPS:
            stretch = []
    return found


def with_lines(code: types.CodeType) -> Iterator[tuple[dis.Instruction, int]]:
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        positions = getattr(instruction, "positions", None)  # Python 3.10 has none
        line = (positions.lineno if positions else instruction.starts_line) or line
        yield instruction, line
