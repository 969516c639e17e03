"""The memory of a kernel's `Params`: which fields, where, and of which type.

The struct that the compiler sees (`struct_text`) and the bytes that the host packs (`Layout.format`) come from the same
list, and the text asserts every offset. A field that is renamed, moved or given another type on one side alone does not
compile; nothing is bound by position.
"""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem, c_types
from .steps import ROLES, Launch

MAP = "gemmnorm::TensorMap"
# C type → (bytes, alignment, format character of Python's `struct`). Any pointer is an address.
_SIZES = {MAP: (128, 64, "128s"), "int": (4, 4, "i"), "float": (4, 4, "f")}
_POINTER = (8, 8, "Q")


@dataclass(frozen=True)
class Field:
    """One field: its name, the role that it is bound to, C type, shape or meaning, and byte offset."""

    name: str
    role: str
    c_type: str
    note: str
    offset: int


@dataclass(frozen=True)
class Layout:
    """All fields of a launch's `Params`, by alignment, and their bytes as a format of Python's `struct`."""

    fields: tuple[Field, ...]
    format: str
    size: int


def _sized(c_type: str) -> tuple[int, int, str]:
    return _POINTER if c_type.endswith("*") else _SIZES[c_type]


def layout(launch: Launch, problem: Problem) -> Layout:
    """The fields of `launch.params` in memory: tensor maps first, then addresses, then numbers, without gaps."""
    types = c_types(problem)
    typed = []
    for name in launch.params:
        c_type, note = ROLES[launch.role(name)]
        typed.append((name, c_type.format(**types), note))
    typed.sort(key=lambda field: -_sized(field[1])[1])  # stable
    fields, codes, offset = [], "<", 0
    for name, c_type, note in typed:
        size, _, code = _sized(c_type)
        fields.append(Field(name, launch.role(name), c_type, note, offset))
        codes += code
        offset += size
    alignment = max((_sized(field.c_type)[1] for field in fields), default=1)
    padding = -offset % alignment
    return Layout(tuple(fields), codes + (f"{padding}x" if padding else ""), offset + padding)


def struct_text(name: str, launch: Launch, problem: Problem) -> str:
    """C++ of `struct <name>`: the fields with their shapes, what is absent as null constants, and the assertions."""
    found, types = layout(launch, problem), c_types(problem)
    lines = [f"  {f.c_type} {f.name};" + (f"  // {f.note}" if f.note else "") for f in found.fields]
    lines += _absent(launch, types)
    checks = [f"GEMMNORM_OFFSET({name}, {f.name}) == {f.offset}" for f in found.fields]
    checks.append(f"sizeof({name}) == {found.size}")
    asserted = " &&\n              ".join(checks)
    return (
        f"struct {name} {{\n"
        + "\n".join(lines)
        + f'\n}};\nstatic_assert({asserted},\n              "the host packs it so");\n'
    )


def view_text(name: str, params: str, launch: Launch, problem: Problem) -> str:
    """C++ of `struct <name>`: the fields of `params` by value, and references to its tensor maps.

    A kernel whose `Params` hold tensor maps takes them in constant memory, because a map needs an address. Through that
    address the compiler would read every field again after each store.
    """
    fields = layout(launch, problem).fields
    types = {f.name: f"const {MAP}&" if f.c_type == MAP else f.c_type for f in fields}
    lines = [f"  {types[f.name]} {f.name};" for f in fields] + _absent(launch, c_types(problem))
    copies = ", ".join(f"{f.name}(p.{f.name})" for f in fields)
    lines.append(f"  __device__ __forceinline__ explicit {name}(const {params}& p) : {copies} {{}}")
    return f"struct {name} {{\n" + "\n".join(lines) + "\n};\n"


def _absent(launch: Launch, types: dict[str, str]) -> list[str]:
    """The fields that are null when the kernel is compiled."""
    kinds = ((field, ROLES[launch.role(field)][0].format(**types)) for field in launch.absent)
    return [f"  static constexpr {kind} {field} = nullptr;" for field, kind in kinds]


def config_text(name: str, launch: Launch) -> str:
    """C++ of `struct <name>`: the compile-time choices of a launch, types and constants by name."""
    lines = []
    for member, value in launch.config:
        if member.endswith("<>"):
            lines.append(f"  template <class... A>\n  using {member[:-2]} = {value}<A...>;")
        elif member[0] == "k" and member[1].isupper():
            kind = "int" if isinstance(value, int) else "bool" if value in ("true", "false") else "auto"
            lines.append(f"  static constexpr {kind} {member} = {value};")
        elif member != value:
            lines.append(f"  using {member} = {value};")
        else:
            lines.append(f"  using {member} = ::{value};")
    return f"struct {name} {{\n" + "\n".join(lines) + "\n};\n"
