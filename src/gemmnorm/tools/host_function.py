"""One host function of an exported file, statement by statement: allocations, products and launches of one plan."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from .. import plan as plans
from ..errors import GemmNormRuntimeError
from ..plan import Buffer, Extent, Launch, Map, Plan, Product
from .kernel_text import Kernels, wrap

_SCALAR_TYPES = {
    "float32": "torch::kFloat32",
    "float16": "torch::kFloat16",
    "bfloat16": "torch::kBFloat16",
    "float64": "torch::kFloat64",
    "int64": "torch::kInt64",
}
# Numbers that a launch may ask for and that are variables of the host function.
_NUMBERS = ("batch", "scale_stride", "scale_value", "momentum", "eps")
# Roles that a launch reads under another name than the plan allocates them.
_SAME_MEMORY = {"stored_product": "product"}

_KNOWN = {
    Launch: {"entry", "source", "function", "constants", "arguments", "grid", "block", "resident", "shared",
             "cooperative", "maps", "numbers"},
    Product: {"out", "left", "right", "transpose_left", "transpose_right"},
    Buffer: {"role", "dtype", "shape"},
    Map: {"role", "tensor", "rows", "columns"},
    Extent: {"times", "rows", "limit"},
    Plan: {"problem", "phase", "strategy", "steps", "outputs", "workspace", "aliases", "reasons", "counters", "seconds",
           "floor"},
}  # fmt: skip


class Body:
    """Collects the statements of one host function for one plan."""

    def __init__(self, plan: Plan, kernels: Kernels, inputs: Iterable[str]) -> None:
        check_known(plan)
        self.plan = plan
        self.kernels = kernels
        self.types = plans.c_types(plan.problem)
        self.tensors = set(inputs)  # roles that are tensors, or optional ones
        self.pointers: set[str] = set()  # roles that are pointers into the scratch memory
        self.optional: set[str] = set()  # tensors that may be undefined
        self.other_numbers: dict[str, dict[str, int]] = {}  # entry → its numbers in the plan without gradients
        self.row_counts: dict[str, int] = {}
        self.lines: list[str] = []

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def tensor(self, buffer: Buffer, form: str = "{}") -> None:
        """Declare and allocate one tensor; `form` says under which condition."""
        check_known(buffer)
        shape = ", ".join(extent_text(e, self.row_counts) for e in buffer.shape)
        value = form.format(f"empty(x, {_SCALAR_TYPES[buffer.dtype]}, {{{shape}}})")
        self.tensors.add(buffer.role)
        self.line(f"torch::Tensor {buffer.role} = {value};")

    def workspace(self, buffers: Iterable[Buffer]) -> None:
        """What dies with the call: tensors for the library and the copy engine, the rest from one allocation."""
        products = [s for s in self.plan.steps if isinstance(s, Product)]
        operands = {role for p in products for role in (p.out, p.left, p.right)}
        operands |= {m.tensor for launch in self.plan.launches for m in launch.maps}
        scratch = []
        for buffer in buffers:
            check_known(buffer)
            if buffer.role in operands:
                self.tensor(buffer)
            else:
                scratch.append(buffer)
        if not scratch:
            return
        sizes = []
        for buffer in scratch:
            extents = [extent_text(extent, self.row_counts) for extent in buffer.shape]
            sizes.append(" * ".join([str(plans.DTYPE_BYTES[buffer.dtype]), *extents]))
        self.lines += wrap("  const Scratch scratch(x, {", sizes, "});").split("\n")
        for i, buffer in enumerate(scratch):
            kind = self._element_type(buffer.role)
            self.pointers.add(buffer.role)
            self.line(f"{kind}* {buffer.role} = scratch.piece<{kind}>({i});")

    def aliases(self, aliases: Iterable[tuple[str, str]]) -> None:
        for role, target in aliases:
            self.tensors.add(role)
            self.line(f"torch::Tensor {role} = {target};")

    def steps(self) -> None:
        arguments = {role for step in self.plan.launches for role in step.arguments}
        if "scale_stride" in arguments:
            features = self.plan.problem.out_features
            self.line(f"const int scale_stride = scale && scale->numel() == {features} ? 1 : 0;")
        for operand in dict.fromkeys(m.tensor for launch in self.plan.launches for m in launch.maps):
            if operand in ("x", "weight"):
                self.line(f"const torch::Tensor dense_{operand} = dense({operand});")
        if self.plan.counters:
            self.tensors.add("counters")
            self.line(f"const torch::Tensor counters = zero_numbers(x, stream, {self.plan.counters});")
        self.line("")
        for step in self.plan.steps:
            if isinstance(step, Product):
                self._product(step)
            elif isinstance(step, Launch):
                self._launch(step)
            else:
                kind = type(step).__name__
                raise GemmNormRuntimeError(f"export: a plan has a step of kind {kind}, which it cannot print")
        self.line("")

    def _product(self, step: Product) -> None:
        check_known(step)
        left = step.left + (".t()" if step.transpose_left else "")
        right = step.right + (".t()" if step.transpose_right else "")
        condition = f"if ({step.out}.defined()) " if step.out in self.optional else ""
        self.line(f"{condition}at::mm_out({step.out}, {left}, {right});  // by the library")

    def _launch(self, step: Launch) -> None:
        check_known(step)
        name = self.kernels.name(step, self.plan.problem)
        chip = self.plan.problem.chip
        shape = [extent_text(step.grid, self.row_counts, chip.multiprocessors if chip else 0), str(step.block)]
        if step.shared or step.cooperative:
            shape += [f"{step.shared} /* bytes */", *(["/* cooperative */ true"] if step.cooperative else [])]
        arguments = [self._argument(step, role) for role in step.arguments]
        self.lines += wrap("  launch(", [name, f"{{{', '.join(shape)}}}", "stream", *arguments], ");").split("\n")

    def _argument(self, launch: Launch, role: str) -> str:
        """What a launch is given for `role`."""
        for m in launch.maps:
            check_known(m)
            if m.role == role:
                tensor = f"dense_{m.tensor}" if m.tensor in ("x", "weight") else m.tensor
                return f"tensor_map({tensor}, {m.rows}, {m.columns})"
        numbers = dict(launch.numbers)
        if role in numbers:
            other = self.other_numbers.get(launch.entry, numbers).get(role)
            same = other is None or other == numbers[role]
            return f"{numbers[role]} /* {role} */" if same else f"save ? {numbers[role]} : {other} /* {role} */"
        memory = _SAME_MEMORY.get(role, role)
        if memory in self.pointers:
            return memory
        if memory in self.tensors:
            return f"pointer<{self._element_type(role)}>({memory})"
        if self._c_type(role).endswith("*"):
            return f"nullptr /* {role} */"
        if role in ("in_features", "features"):
            return str(self.plan.problem.in_features if role == "in_features" else self.plan.problem.out_features)
        if role not in _NUMBERS:
            raise GemmNormRuntimeError(f"export: no host expression is known for the argument {role!r}")
        return role

    def _element_type(self, role: str) -> str:
        """The C type of one element of `role`."""
        return self._c_type(role).removeprefix("const ").rstrip("*").strip()

    def _c_type(self, role: str) -> str:
        if role not in plans.ROLES:
            raise GemmNormRuntimeError(f"export: a launch has an argument {role!r}, which plan.ROLES does not have")
        return plans.ROLES[role][0].format(**self.types)

    def function(self, comment: str, signature: str) -> str:
        start = [
            "  const c10::cuda::CUDAGuard guard(x.device());",
            "  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();",
            "  const int64_t batch = x.size(0);",
            *(f"  const int64_t {name} = (batch + {rows - 1}) / {rows};" for name, rows in self.row_counts.items()),
        ]
        lines = [line.rstrip() for line in (*start, *self.lines)]
        return "\n".join([comment, f"{signature} {{", *lines, "}", ""])


def extent_text(extent: Extent, row_counts: dict[str, int], multiprocessors: int = 0) -> str:
    """An extent as an expression, with the number of row groups by name; the names are noted in `row_counts`."""
    check_known(extent)
    text = replace(extent, limit=0).cpp()
    if extent.rows > 1:
        name = "groups" if extent.rows == plans.GROUP_ROWS else f"tiles_of_{extent.rows}_rows"
        row_counts[name] = extent.rows
        text = text.replace(Extent(1, extent.rows).cpp(), name)
    if not extent.limit:
        return text
    # A plan limits a grid to the multiprocessors of the GPU that it was made for; the file may run on another.
    limit = "multiprocessors()" if extent.limit == multiprocessors else str(extent.limit)
    return f"std::min<int64_t>({text}, {limit})"


def check_known(item: Any) -> None:
    """Raise for a field that this printer does not know and that is not at its default."""
    known = _KNOWN[type(item)]
    for entry in dataclasses.fields(item):
        if entry.name not in known and getattr(item, entry.name) != entry.default:
            kind = type(item).__name__
            raise GemmNormRuntimeError(
                f"export: the {kind} has {entry.name}={getattr(item, entry.name)!r}, which it cannot print as C++ yet"
            )
