"""The kernels of an exported file as text: device sources, activations, and one entry for each distinct launch."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from .. import activations
from ..plan import Launch, Problem
from ..sources import device_source, entry_source

WIDTH = 116

_ASCII = {
    "·": "*", "×": "x", "Σ": "sum ", "φ": "phi", "γ": "gamma", "β": "beta", "α": "alpha", "μ": "mu", "σ": "sigma",
    "δ": "delta", "κ": "kappa", "∂": "d", "²": "^2", "³": "^3", "ᵀ": "^T", "√": "sqrt ", "≤": "<=", "≥": ">=",
    "≠": "!=", "≈": "~", "→": "->", "←": "<-", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "−": "-", "–": "-",
    "—": "-", "…": "...", "‖": "|", "∞": "inf", "≡": "==", "ŷ": "y_hat", "⁻": "^-", "°": " deg", "’": "'", "“": '"',
    "”": '"', "µ": "u", "¹": "^1", "⁰": "^0", "ε": "eps", "≫": ">>", "≪": "<<", "±": "+-", "∈": "in", "½": "1/2",
}  # fmt: skip


def ascii_text(text: str) -> str:
    """`text` with the mathematical letters of comments spelled out: compilers and editors differ on anything else."""
    return "".join(_ASCII.get(c, c) for c in text)


def wrap(head: str, items: Sequence[str], tail: str, first: str = "") -> str:
    """`head item, item, … tail`, broken into lines that hang below the first item."""
    lines, line, indent = [], head, " " * len(head)
    for i, item in enumerate(items):
        piece = item + ("," if i + 1 < len(items) else tail)
        gap = "" if line in (head, indent) else " "
        if gap and len(line) + 1 + len(piece) > WIDTH:
            lines.append(line)
            line, gap = indent, ""
        line += gap + piece
    return first + "\n".join([*lines, line])


class Kernels:
    """The `__global__` functions of a file, each distinct one once and under a name of its own."""

    def __init__(self) -> None:
        self._files: list[str] = []
        self._structs: dict[str | None, tuple[str, str]] = {}
        self._names: dict[str, str] = {}
        self._entries: list[str] = []

    def name(self, launch: Launch, problem: Problem) -> str:
        """The name of the kernel that `launch` calls; equal launches share one."""
        if launch.source not in self._files:
            self._files.append(launch.source)
        struct = self._activation(problem.activation) if "Activation" in launch.constants else ""
        launch = replace(launch, constants=tuple(struct if c == "Activation" else c for c in launch.constants))
        text = entry_source(launch, problem)
        if text not in self._names:
            self._names[text] = name = self._free_name(launch.entry, problem)
            entry = _folded(entry_source(replace(launch, entry=name), problem))
            self._entries.append(_for_sm_90a(entry) if launch.maps else entry)
        return self._names[text]

    def text(self) -> str:
        """All of it, in the order in which a compiler wants it."""
        structs = (text for _, text in self._structs.values())
        return "\n".join([device_source(self._files), *structs, *self._entries])

    def _free_name(self, name: str, problem: Problem) -> str:
        taken = set(self._names.values())
        if name in taken and not problem.training and "evaluate" not in name:
            name += "_evaluation"
        return unused(name, "_", taken)

    def _activation(self, activation: str | None) -> str:
        """The name of the struct that computes `activation`: Identity, Relu, LeakyRelu, …"""
        if activation not in self._structs:
            words = "identity" if activation is None else activations.parse(activation)[0].name
            camel = "".join(word.capitalize() for word in words.split("_"))
            name = unused(camel, "", {taken for taken, _ in self._structs.values()})
            text = activations.cuda_struct(activation).replace("struct Activation", f"struct {name}")
            self._structs[activation] = (name, text)
        return self._structs[activation][0]


def unused(name: str, joint: str, taken: Collection[str]) -> str:
    """`name`, with a number behind it where it is taken."""
    numbered, n = name, 1
    while numbered in taken:
        n += 1
        numbered = f"{name}{joint}{n}"
    return numbered


def _folded(entry: str) -> str:
    """An entry with its one call broken into lines."""
    lines = entry.split("\n")
    for i, line in enumerate(lines):
        if len(line) > WIDTH and line.endswith(");") and ">(" in line:
            head, arguments = line[:-2].split(">(", 1)
            function, constants = head.split("<", 1)
            template = wrap(f"{function}<", constants.split(", "), ">(")
            lines[i] = wrap("      ", arguments.split(", "), ");", first=f"{template}\n")
    return "\n".join(lines)


def _for_sm_90a(entry: str) -> str:
    """An entry whose instructions sm_90a has and plain sm_90 has not.

    Older releases of PyTorch compile for both; what should run for the wrong one of them stops with an error.
    """
    head, body = entry.split(") {\n", 1)
    call = body.removesuffix("}\n")
    guard = "#if defined(__CUDA_ARCH__) && !defined(__CUDA_ARCH_FEAT_SM90_ALL)\n  __trap();\n#else\n"
    return f"{head}) {{\n{guard}{call}#endif\n}}\n"
