"""The kernels of an exported file, and how C++ is broken into lines."""

from __future__ import annotations

import dataclasses
import textwrap
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from .. import activations
from ..errors import GemmNormRuntimeError
from ..plan import ROLES, Buffer, Launch, Map, Plan, Problem, Product, c_types
from ..plan.params import MAP, Field, config_text, layout
from ..plan.split import SPLIT_GEMM_TILE
from ..plan.tile import swapped, width
from .prune import kernel_text

WIDTH = 116

_KNOWN = {
    Launch: {"entry", "source", "parts", "function", "config", "params", "roles", "absent", "grid", "block", "resident",
             "shared", "cooperative", "least", "cluster", "maps", "numbers", "only_for"},
    Map: {"role", "tensor", "rows", "columns", "exact", "last", "shared", "overlap", "parity"},
    Product: {"out", "left", "right", "transpose_left", "transpose_right"},
    Buffer: {"role", "dtype", "shape", "pitch", "only_for"},
    Plan: {"problem", "phase", "strategy", "steps", "outputs", "workspace", "aliases", "reasons", "counters", "seconds",
           "floor"},
}  # fmt: skip


@dataclass(frozen=True)
class Kernel:
    """A `__global__` function: its name, and that of the struct it takes."""

    name: str
    params: str


class Kernels:
    """The `__global__` functions of a file and the structs they take, each distinct one once, by a name of its own.

    Args:
        read: identifiers in the kernels; parameters of no such name are left out. None: all parameters are there.
    """

    def __init__(self, read: Collection[str] | None = None) -> None:
        self.read = read
        self.files: list[str] = []
        self.launches: list[Launch] = []
        self.activations: dict[str | None, tuple[str, str]] = {}
        self.structs: dict[tuple[str, str], str] = {}  # device function and fields → name
        self.kernels: dict[str, Kernel] = {}  # text without its name → kernel
        self.text_of: dict[str, str] = {}  # name of a struct or a kernel → text, in the order of need

    def kernel(self, launch: Launch, plan: Plan, suffix: str) -> Kernel:
        """The kernel that `launch` calls."""
        check_known(launch)
        self.launches.append(launch)
        self.files += [name for name in (launch.source, *launch.parts) if name not in self.files]
        if launch.activates:
            struct = self._activation(plan.problem.activation)
            config = tuple((name, struct if name == "Activation" else value) for name, value in launch.config)
            launch = replace(launch, config=config)
        params = self._params(launch, plan.problem)
        text = _entry_text("", params, launch)
        if text not in self.kernels:
            name = self._free_name(launch.entry + suffix, plan)
            self.text_of[name] = _entry_text(name, params, launch)
            self.kernels[text] = Kernel(name, params)
        return self.kernels[text]

    def _params(self, launch: Launch, problem: Problem) -> str:
        """The name of the struct that holds a launch's parameters; launches with the same fields share it."""
        key = launch.function, self._params_text("", launch, problem)
        if key not in self.structs:
            base = _camel(launch.function)
            n = sum(function == launch.function for function, _ in self.structs)
            name = f"{base}{n + 1 if n else ''}Params"
            self.structs[key] = name
            self.text_of[name] = self._params_text(name, launch, problem)
        return self.structs[key]

    def fields(self, launch: Launch, problem: Problem) -> list[Field]:
        """The parameters of a launch that its kernel reads."""
        return [field for field in layout(launch, problem).fields if self._reads(field.name)]

    def _reads(self, name: str) -> bool:
        return self.read is None or name in self.read

    def _params_text(self, name: str, launch: Launch, problem: Problem) -> str:
        launch = replace(launch, absent=tuple(filter(self._reads, launch.absent)))
        return _params_text(name, launch, problem, self.fields(launch, problem))

    def _free_name(self, name: str, plan: Plan) -> str:
        taken = {kernel.name for kernel in self.kernels.values()}
        if name in taken and not plan.problem.training:
            name += "_evaluation"
        if name in taken and plan.phase == "backward":
            name += "_backward"
        base, n = name, 1
        while name in taken:
            n += 1
            name = f"{base}_{n}"
        return name

    def _activation(self, activation: str | None) -> str:
        """The name of the struct that computes `activation`: Identity, Relu, LeakyRelu, …"""
        if activation not in self.activations:
            base = "Identity" if activation is None else _camel(activations.parse(activation)[0].name)
            taken, name, n = {name for name, _ in self.activations.values()}, base, 1
            while name in taken:
                n += 1
                name = f"{base}{n}"
            text = activations.cuda_struct(activation).replace("struct Activation", f"struct {name}")
            self.activations[activation] = (name, text)
        return self.activations[activation][0]

    def text(self) -> str:
        """The kernel sources as far as they are needed, activations, structs and `__global__` functions."""
        return self.sources() + "\n" + self.own_text()

    def sources(self) -> str:
        """Of the files under kernels/ what the launches reach."""
        shapes = {shape for launch in self.launches for shape in _wgmma(launch)}
        return kernel_text(self.files, self.own_text(), _unused(self.launches), shapes, facts(self.launches))

    def own_text(self) -> str:
        """What is printed here: activations, structs and `__global__` functions."""
        return "\n".join([*(text for _, text in self.activations.values()), *self.text_of.values()])


def _params_text(name: str, launch: Launch, problem: Problem, fields: Sequence[Field]) -> str:
    """C++ of the struct `name`, the parameters of a kernel.

    Tensor maps need an address: a kernel that has any takes its parameters in constant memory, where the compiler would
    read every field again after each store. So it copies the others, and refers to the maps (`…View`).
    """
    types = c_types(problem)

    def line(field: Field) -> str:
        note = ROLES.get(field.name, ("", field.note))[1]
        return f"  {field.c_type} {field.name};" + (f"  // {note}" if note else "")

    null = [
        f"  static constexpr {ROLES[launch.role(field)][0].format(**types)} {field} = nullptr;"
        for field in launch.absent
    ]
    maps = [field for field in fields if field.c_type == MAP]
    if not maps:
        return "\n".join([f"struct {name} {{", *map(line, fields), *null, "};\n"])
    base, view = name.replace("Params", "Fields"), name.replace("Params", "View")
    copies = ["(p)".join([base, ""]), *(f"{field.name}(p.{field.name})" for field in maps)]
    return "\n".join([
        f"struct {base} {{", *(line(field) for field in fields if field.c_type != MAP), *null, "};",
        f"struct {name} : {base} {{", *map(line, maps), "};",
        f"struct {view} : {base} {{  // what the kernel works with: copies, and references to the maps",
        *(f"  const {MAP}& {field.name};" for field in maps),
        f"  __device__ __forceinline__ explicit {view}(const {name}& p)",
        wrap("      : ", copies, " {}"), "};\n",
    ])  # fmt: skip


def _entry_text(name: str, params: str, launch: Launch) -> str:
    """C++ of a kernel: its `Config`, and a call of the device function."""
    config = f"{_camel(name)}Config"
    head = f'extern "C" __global__ void __launch_bounds__({launch.block}, {launch.resident}) {name}(\n'
    call = f"gemmnorm::{launch.function}<{config}>"
    text = config_text(config, launch) + head
    if not launch.maps:
        return f"{text}    const {params} p) {{\n  {call}(p);\n}}\n"
    view = params.replace("Params", "View")
    return f"{text}    const __grid_constant__ {params} p) {{\n  {call}({view}(p));\n}}\n"


_ELEMENTS = {"gemmnorm::fp16x2": "half", "gemmnorm::tf32": "tf32", "gemmnorm::bf16x3": "bfloat16"}


def _wgmma(launch: Launch) -> set[str]:
    """The shapes of wgmma that a kernel instantiates: width, element."""
    if launch.function == "split_gemm":
        return {f"{SPLIT_GEMM_TILE}, half"}
    if "Operand" not in dict(launch.config):
        return set()
    operand = str(launch.member("Operand"))
    element = _ELEMENTS.get(operand) or str(launch.member("T")).removeprefix("gemmnorm::")
    wide = launch.member("kColumns") if launch.function == "small_panel" else width(*_tile(launch))
    return {f"{wide}, {element}"}


def _tile(launch: Launch) -> tuple[int, int]:
    """Of `fused_gemm`: rows and columns."""
    return int(launch.member("kTileRows")), int(launch.member("kTileColumns"))


def _unused(launches: Sequence[Launch]) -> set[str]:
    """The templates that gemm/types.cuh chooses between, and that none of the launches chooses."""
    gemms = [launch for launch in launches if launch.function == "fused_gemm"]
    unused = {"AccumulatorSwapAB", "AccumulatorNormal", "Mainloop", "SplitMainloop"}
    for gemm in gemms:
        unused.discard("AccumulatorSwapAB" if swapped(*_tile(gemm)) else "AccumulatorNormal")
        unused.discard("SplitMainloop" if gemm.member("Operand") == "gemmnorm::fp16x2" else "Mainloop")
    if any(launch.function == "split_gemm" for launch in launches):
        unused.discard("SplitMainloop")
    if any(launch.function == "small_panel" for launch in launches):
        unused.discard("Mainloop")
    return unused


def facts(launches: Sequence[Launch]) -> dict[str, dict[str, bool]]:
    """Folder under kernels/ → conditions in its files that are the same for all kernels of a file."""
    gemms = [launch for launch in launches if launch.function == "fused_gemm"]
    forms = [str(launch.member("kForm")) for launch in launches if "kForm" in dict(launch.config)]
    gradients = [launch for launch in launches if "grad_product" in launch.params and launch.activates]
    of_forms = [{f"FORM == Form::{form}": given.endswith(form) for form in FORMS} for given in forms]
    of_gradients = [{"kExponents": "column_exponents" in launch.params} for launch in gradients]
    form = _common(of_forms)
    kinds = {gemm.member("Epilogue<>") for gemm in gemms}
    of_batches = [{"OF_BATCH": kind != KNOWN[0]} for kind in KNOWN if kind in kinds]
    merges = [launch for launch in launches if launch.function == "merge_statistics"]
    return {
        "gemm": _common([_gemm_facts(launch) for launch in gemms]) | _common(of_batches),
        "common": form,
        "memory_bound": form | _common([_absent(launch) for launch in merges]),
        "backward": form | _common(of_gradients),
    }


KNOWN = ("gemmnorm::EvaluateEpilogue", "gemmnorm::NormalizeEpilogue")
FORMS = ("kScaled", "kFolded", "kRunning")
_BYTES = {"float": 4, "gemmnorm::half": 2, "gemmnorm::bfloat16": 2}


def _gemm_facts(launch: Launch) -> dict[str, bool]:
    """What gemm/types.cuh makes of a launch's `Config`."""
    rows, columns = _tile(launch)
    size, size_y = (_BYTES[str(launch.member(letter))] for letter in "TY")
    split, swaps = launch.member("Operand") == "gemmnorm::fp16x2", swapped(*_tile(launch))
    staged = not split and (swaps or (size == 2 and columns >= 64))
    staged_y = staged and (swaps or size_y == 2)
    found = {
        "kSplit": split,
        "kStaged": staged,
        "kStagedY": staged_y,
        "kFitsStaging": staged and size == 2,
        "kOverlaps": columns % 16 > 0,
        "kMovesRegisters": width(*_tile(launch)) * (1 if swaps else rows // 128) * (2 if split else 1) >= 192,
        "Shape::kSwapAB": swaps,
        "Conversion::kConverts": launch.member("Conversion<>") != "gemmnorm::NoConversion",
        "kStatisticsKnown": launch.member("Epilogue<>") in KNOWN,
    }
    shares = int(launch.member("kSharing")) > 1
    found = {f"G::{name}": value for name, value in found.items()} | {"kSwapAB": swaps, "kSplit": split}
    found |= {"G::kShares": shares} if shares else {"G::kShares": False, "BLOCKS > 1": False}
    if staged == staged_y:
        found["STAGED"] = staged
    if size == size_y:
        found |= {f"sizeof({letter}) == 2": size == 2 for letter in "TYV"} | {"sizeof(Y) == sizeof(T)": True}
    return found | _absent(launch)


def _absent(launch: Launch) -> dict[str, bool]:
    """Fields that kernels ask for before they use them."""
    return {f"p.{field}": False for field in ("weight_checksums", "inexact") if field in launch.absent}


def _common(of_launches: Sequence[dict[str, bool]]) -> dict[str, bool]:
    """What all of them say."""
    if not of_launches:
        return {}
    first, *others = of_launches
    return {name: value for name, value in first.items() if all(other.get(name) == value for other in others)}


def _camel(name: str) -> str:
    return "".join(part.capitalize() for part in name.split("_"))


def wrap(head: str, items: Sequence[str], tail: str, between: str = ",") -> str:
    """`head item, item, … tail`, broken into lines that hang below the first item."""
    lines, line, indent = [], head, " " * len(head)
    for i, item in enumerate(items):
        piece = item + (between if i + 1 < len(items) else tail)
        gap = "" if line in (head, indent) else " "
        if gap and len(line) + 1 + len(piece) > WIDTH:
            lines.append(line)
            line, gap = indent, ""
        line += gap + piece
    return "\n".join([*lines, line])


def wrapped(text: str, width: int) -> list[str]:
    """Prose broken into lines of at most `width` characters."""
    return textwrap.wrap(" ".join(text.split()), width, break_long_words=False, break_on_hyphens=False)


def check_known(item: Any) -> None:
    """Raise for a field that this printer does not know and that is not at its default."""
    known = _KNOWN[type(item)]
    for entry in dataclasses.fields(item):
        if entry.name not in known and getattr(item, entry.name) != entry.default:
            kind = type(item).__name__
            raise GemmNormRuntimeError(
                f"export: the {kind} has {entry.name}={getattr(item, entry.name)!r}, which it cannot print as C++ yet"
            )
