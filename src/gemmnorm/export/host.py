"""A chain's plans printed as CUDA C++: the kernels that they launch, and host functions that do what `runtime` does.

The printer decides nothing. It walks `plan.steps`, and whatever it does not know (a new field of a launch, a new role,
a new kind of step) is an error that names it, never a file that silently does something else.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ..errors import GemmNormRuntimeError
from ..plan import DTYPE_BYTES, GROUP_ROWS, ROLES, Buffer, Extent, Launch, Map, Plan, Problem, Product, Step, c_types
from .kernels import Kernels, check_known, wrap
from .prune import identifiers

TEMPLATES = Path(__file__).parent / "templates"

_SCALAR_TYPES = {
    "float32": "torch::kFloat32",
    "float16": "torch::kFloat16",
    "bfloat16": "torch::kBFloat16",
    "float64": "torch::kFloat64",
    "int64": "torch::kInt64",
}
# The copy engine's names. float32 is rounded on the way in, where the tensor cores would truncate.
_MAP_TYPES = {"float32": "TFLOAT32", "float16": "FLOAT16", "bfloat16": "BFLOAT16"}
# Numbers that a launch may ask for, as expressions in the host function.
_NUMBERS = ("batch", "features", "in_features", "scale_stride", "scale_value", "momentum", "eps")
_GRADIENTS = ("grad_x", "grad_weight", "grad_bias", "grad_scale", "grad_bn_weight", "grad_bn_bias")
_INPUTS = ("x", "weight", "bias", "scale", "running_mean", "running_var", "num_batches_tracked", "bn_weight", "bn_bias")


@dataclass(frozen=True)
class Case:
    """Plans of one mode that serve some batch sizes, or all.

    Attributes:
        ending: what the names of its host functions carry ("" where every batch is served).
        condition: which batches are served, in C++, with `batch` ("" for every one).
        plans: save → plan.
    """

    ending: str
    condition: str
    plans: dict[bool, Plan]

    @property
    def of_kernels(self) -> str:
        """What the names of its kernels carry: those that serve every batch carry nothing."""
        return self.ending if self.condition else ""


@dataclass(frozen=True)
class Site:
    """The plans of one kind of chain.

    Attributes:
        suffix: what its host functions' names end in ("" where the file has one kind of chain only).
        forward, backward: training → cases, of which the last serves every batch.
    """

    suffix: str
    forward: dict[bool, tuple[Case, ...]]
    backward: dict[bool, tuple[Case, ...]]

    @property
    def plans(self) -> tuple[Plan, ...]:
        every = (*self.forward.values(), *self.backward.values())
        return tuple(plan for cases in every for case in cases for plan in case.plans.values())


@dataclass(frozen=True)
class CudaText:
    """The texts that `load_inline` takes, and the functions that it exposes to Python.

    The translation unit is declarations, kernels, host, in this order.
    """

    declarations: str
    kernels: str
    host: str
    functions: tuple[str, ...]


_DECLARATIONS = """\
#include <optional>
#include <vector>
#include <torch/types.h>

using Tensors = std::vector<torch::Tensor>;
using MaybeTensor = std::optional<torch::Tensor>;

"""


def cuda_text(sites: Sequence[Site]) -> CudaText:
    """Print the plans of `sites` as one translation unit; launches that are the same share one kernel.

    Raises:
        GemmNormRuntimeError: a plan holds something that this printer does not know.
    """
    every = Kernels()
    for site in sites:
        _functions(site, every)
    kernels = Kernels(identifiers(every.sources()))
    functions = [f for site in sites for f in _functions(site, kernels)]
    launches = [launch for site in sites for plan in site.plans for launch in plan.launches]
    files = ["host.cu", *(["hopper.cu"] if any(launch.shared for launch in launches) else [])]
    helpers = [(TEMPLATES / name).read_text(encoding="utf-8") for name in files]
    exposed = [f for f in functions if f.exposed]
    return CudaText(
        _DECLARATIONS + "\n".join(f"{f.signature};" for f in exposed) + "\n",
        kernels.text(),
        "\n".join([*helpers, *(f.text for f in functions)]),
        tuple(f.name for f in exposed),
    )


# --- host functions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    name: str
    signature: str
    text: str
    exposed: bool = True


def _functions(site: Site, kernels: Kernels) -> list[_Function]:
    found: list[_Function] = []
    for training, cases in site.forward.items():
        name = f"forward_{'training' if training else 'evaluation'}{site.suffix}"
        inner = [
            _forward(name + case.ending, case.plans, kernels, case.of_kernels + site.suffix) for case in reversed(cases)
        ]
        found += _chosen_by_batch(name, cases, inner[::-1])
    for training, cases in site.backward.items():
        name = f"backward_{'training' if training else 'evaluation'}{site.suffix}"
        saved = saved_roles(site.forward[training][-1].plans[True])
        inner = [
            _backward(name + case.ending, case.plans[True], saved, kernels, case.of_kernels + site.suffix)
            for case in reversed(cases)
        ]
        found += _chosen_by_batch(name, cases, inner[::-1])
    return found


def _chosen_by_batch(name: str, cases: Sequence[Case], inner: Sequence[_Function]) -> list[_Function]:
    """The functions of the cases, and where there are two, the one that chooses."""
    if len(cases) == 1:
        return list(inner)
    (few, general), signature = inner, inner[0].signature.replace(f"{inner[0].name}(", f"{name}(", 1)
    arguments = ", ".join(_parameter_names(signature))
    lines = [
        f"{_rewrapped(signature)} {{",
        "  const c10::cuda::CUDAGuard guard(x.device());",
        "  const int64_t batch = x.size(0);",
        f"  const auto run = {cases[0].condition} ? {few.name} : {general.name};",
        *wrap("  return run(", arguments.split(" "), ");", "").split("\n"),
        "}\n",
    ]
    return [
        *(replace(function, exposed=False) for function in inner),
        _Function(name, _rewrapped(signature), "\n".join(lines)),
    ]


def _rewrapped(signature: str) -> str:
    head, tail = signature.split("(", 1)
    return wrap(head + "(", [line.strip().rstrip(",") for line in re.split(r",\s+(?![^/]*\*/)", tail[:-1])], ")")


def saved_roles(plan: Plan) -> tuple[str, ...]:
    """What a saving forward returns besides y, for the backward."""
    return tuple(b.role for b in plan.outputs if b.role != "y")


def _signature(name: str, direction: str, problem: Problem, saved: Iterable[str] = ()) -> str:
    """The head of a host function: `templates/<direction>.txt` has its parameters, one a line."""
    text = (TEMPLATES / f"{direction}.txt").read_text(encoding="utf-8")
    kept = "\n".join(f"const torch::Tensor& {role}" for role in saved)
    text = text.format(inner=problem.in_features, features=problem.out_features, saved=kept)
    return wrap(f"Tensors {name}(", text.splitlines(), ")")


def _forward(name: str, plans: dict[bool, Plan], kernels: Kernels, suffix: str) -> _Function:
    """One function for both plans, which differ in what they keep."""
    plain = plans[False]
    saving = plans.get(True, plain)
    if [_same_for_both(step) for step in plain.steps] != [_same_for_both(step) for step in saving.steps]:
        raise GemmNormRuntimeError("export: a forward that keeps something for the backward launches other kernels")
    saves = True in plans
    saved = saved_roles(saving)
    mode = "Batch statistics" if plain.problem.training else "Running statistics"
    returns = f"y and, with `save`, what the backward needs: {', '.join(saved)}" if saves else "y"
    signature = _signature(name, "forward", plain.problem)
    body = _Body(saving, kernels, suffix, _INPUTS)
    aliases = dict(plain.aliases)
    kept = {b.role for b in plain.outputs} | {b.role for b in plain.workspace}
    first = [b for b in saving.outputs if b.role not in aliases]
    for buffer in (*first, *(b for b in saving.outputs if b.role in aliases)):
        otherwise = aliases.get(buffer.role, None if buffer.role in kept else "torch::Tensor()")
        body.tensor(buffer, f"save ? {{}} : {otherwise}" if otherwise else "{}")
    known = {b.role for b in saving.outputs}
    scratch = {b.role: b for b in (*plain.workspace, *saving.workspace) if b.role not in known}
    body.workspace(scratch.values())
    body.aliases()
    body.by_save = {
        (i, role): f"save ? {value} : {dict(without.numbers)[role]}"
        for i, (step, without) in enumerate(zip(saving.steps, plain.steps, strict=True))
        if isinstance(step, Launch) and isinstance(without, Launch)
        for role, value in step.numbers
        if dict(without.numbers)[role] != value
    }
    body.steps()
    if saves:
        body.line("if (!save) return {y};")
    body.line(f"return {{{', '.join(['y', *saved])}}};")
    return _Function(name, signature, body.function(f"// {mode}. Returns {returns}.", signature))


def _same_for_both(step: Step) -> Step:
    """A step without the numbers that say what is kept."""
    return replace(step, numbers=tuple((role, 0) for role, _ in step.numbers)) if isinstance(step, Launch) else step


def _parameter_names(signature: str) -> list[str]:
    inside = re.sub(r"/\*.*?\*/", "", signature[signature.index("(") + 1 : signature.rindex(")")])
    return [parameter.split()[-1].lstrip("&") for parameter in inside.split(",")]


def _backward(name: str, plan: Plan, saved: Sequence[str], kernels: Kernels, suffix: str) -> _Function:
    mode = "batch" if plan.problem.training else "running"
    comment = (
        f"// Through {mode} statistics. Returns the gradients of x, weight, bias, scale, bn_weight and bn_bias; those\n"
        "// that `needs` leaves out are undefined."
    )
    signature = _signature(name, "backward", plan.problem, saved)
    body = _Body(plan, kernels, suffix, ("grad_y", "x", "weight", "bias", "scale", "bn_weight", "bn_bias", *saved))
    body.line("const torch::Tensor grad_y = dense(grad);")
    for buffer in plan.outputs:
        if buffer.role not in _GRADIENTS:
            raise GemmNormRuntimeError(f"export: a backward returns {buffer.role}, which is no gradient that it knows")
        body.tensor(buffer, f"needs[{_GRADIENTS.index(buffer.role)}] ? {{}} : torch::Tensor()")
    body.optional = {b.role for b in plan.outputs}
    body.workspace(plan.workspace)
    body.aliases()
    body.steps()
    body.line(f"return {{{', '.join(_GRADIENTS)}}};")
    return _Function(name, signature, body.function(comment, signature))


def _if_wanted(buffer: Buffer, value: str, otherwise: str) -> str:
    """`value`, or where the output that the buffer is only for is not wanted, `otherwise`."""
    return f"needs[{_GRADIENTS.index(buffer.only_for)}] ? {value} : {otherwise}" if buffer.only_for else value


class _Body:
    """Collects the statements of one host function for one plan."""

    def __init__(self, plan: Plan, kernels: Kernels, suffix: str, inputs: Iterable[str]) -> None:
        check_known(plan)
        self.plan = plan
        self.kernels = kernels
        self.suffix = suffix
        self.types = c_types(plan.problem)
        self.tensors = set(inputs)  # roles that are tensors, or optional ones
        self.pointers: set[str] = set()  # roles that are pointers into the scratch memory
        self.optional: set[str] = set()  # tensors that may be undefined
        self.lines: list[str] = []
        self.row_counts: dict[str, int] = {}
        self.by_save: dict[tuple[int, str], str] = {}  # numbers of a step that differ with `save`

    def line(self, text: str) -> None:
        self.lines.append(f"  {text}")

    def extent(self, extent: Extent, resident: int = 1) -> str:
        """An extent as an expression; row groups, and multiprocessors with `resident` blocks each, by name."""
        text = extent.cpp()
        chip = self.plan.problem.chip
        if extent.limit and chip and extent.limit == resident * chip.multiprocessors:
            each = "" if resident == 1 else f"{resident} * "
            text = text.replace(f", {extent.limit})", f", {each}multiprocessors())")
        if extent.rows > 1:
            name = "groups" if extent.rows == GROUP_ROWS else f"tiles_of_{extent.rows}"
            self.row_counts[name] = extent.rows
            text = text.replace(Extent(1, extent.rows).cpp(), name)
        return text

    def tensor(self, buffer: Buffer, form: str = "{}") -> None:
        """Declare and allocate one tensor; `form` says under which condition."""
        check_known(buffer)
        shape, dtype = ", ".join(map(self.extent, buffer.shape)), _SCALAR_TYPES[buffer.dtype]
        value = f"empty(x, {dtype}, {{{shape}}})"
        if buffer.pitch:
            value = f"torch::empty_strided({{{shape}}}, {{{buffer.pitch}, 1}}, x.options().dtype({dtype}))"
        value = form.format(value)
        self.tensors.add(buffer.role)
        self.line(f"torch::Tensor {buffer.role} = {value};")

    def workspace(self, buffers: Iterable[Buffer]) -> None:
        """What dies with the call: the operands of products as tensors, the rest from one allocation."""
        products = [s for s in self.plan.steps if isinstance(s, Product)]
        operands = {role for p in products for role in (p.out, p.left, p.right)}
        scratch = []
        for buffer in buffers:
            check_known(buffer)
            if buffer.role in operands:
                self.tensor(buffer, _if_wanted(buffer, "{}", "torch::Tensor()"))
            else:
                scratch.append(buffer)
        if not scratch:
            return
        sizes = [
            _if_wanted(b, " * ".join([str(DTYPE_BYTES[b.dtype]), *map(self.extent, b.stored)]), "0") for b in scratch
        ]
        self.lines += wrap("  const Scratch scratch(x, {", sizes, "});").split("\n")
        for i, buffer in enumerate(scratch):
            kind = self.element_type(buffer.role)
            self.pointers.add(buffer.role)
            self.line(f"{kind}* {buffer.role} = {_if_wanted(buffer, f'scratch.piece<{kind}>({i})', 'nullptr')};")

    def aliases(self) -> None:
        for role, target in self.plan.aliases:
            self.tensors.add(role)
            self.line(f"torch::Tensor {role} = {target};")

    def element_type(self, role: str) -> str:
        """The C type of one element of `role`."""
        return self.c_type(role).removeprefix("const ").rstrip("*").strip()

    def c_type(self, role: str) -> str:
        if role not in ROLES:
            raise GemmNormRuntimeError(f"export: a launch has an argument {role!r}, which plan.ROLES does not have")
        return ROLES[role][0].format(**self.types)

    def steps(self) -> None:
        arguments = {step.role(field) for step in self.plan.launches for field in step.params}
        if "scale_stride" in arguments:
            features = self.plan.problem.out_features
            self.line(f"const int scale_stride = scale && scale->numel() == {features} ? 1 : 0;")
        if self.plan.counters:
            self.tensors.add("counters")
            self.line("const std::unique_lock<std::mutex> turn = take_turn(x, stream);")
            self.line(f"const torch::Tensor counters = take_counters(x, stream, {self.plan.counters});")
        self.line("")
        for i, step in enumerate(self.plan.steps):
            if isinstance(step, Product):
                self.product(step)
            elif isinstance(step, Launch):
                self.launch(step, {role: text for (of, role), text in self.by_save.items() if of == i})
            else:
                kind = type(step).__name__
                raise GemmNormRuntimeError(f"export: a plan has a step of kind {kind}, which it cannot print")
        self.line("")

    def product(self, step: Product) -> None:
        check_known(step)
        left = step.left + (".t()" if step.transpose_left else "")
        right = step.right + (".t()" if step.transpose_right else "")
        condition = f"if ({step.out}.defined()) " if step.out in self.optional else ""
        self.line(f"{condition}at::mm_out({step.out}, {left}, {right});  // by the library")

    def launch(self, step: Launch, by_save: dict[str, str]) -> None:
        """A block of statements: the kernel's `Params`, filled by name, and the launch."""
        kernel = self.kernels.kernel(step, self.plan, self.suffix)
        own = {role: str(value) for role, value in step.numbers} | by_save
        own |= {m.role: self.tensor_map(m) for m in step.maps}
        fields = self.kernels.fields(step, self.plan.problem)
        if step.only_for in self.optional:
            self.line(f"if ({step.only_for}.defined()) {{")
        else:
            self.line("{")
        if step.least > 1:
            needs = f"{kernel.name} needs {step.least} multiprocessors"
            self.line(f'  TORCH_CHECK(multiprocessors() >= {step.least}, "{needs}");')
        self.line(f"  {kernel.params} p;")
        self.lines += wrap(
            "    ", [f"p.{f.name} = {own.get(f.name) or self.argument(f.role)}" for f in fields], ";", ";"
        ).split("\n")
        size = [self.extent(step.grid, step.resident if step.cooperative else 1), str(step.block)]
        if step.shared or step.cooperative:
            waits = "true" if step.cooperative else "false"
            more = [f"{step.shared} /* shared */", f"{step.cluster} /* cluster */", f"{waits} /* cooperative */"]
            head = "    launch_hopper("
        else:
            head, more = "    launch(", []
        self.lines += wrap(head, [kernel.name, *size, *more, "stream", "p"], ");").split("\n")
        self.line("}")

    def tensor_map(self, found: Map) -> str:
        """The expression that encodes a tensor map."""
        check_known(found)
        p, role = self.plan.problem, dict(self.plan.aliases).get(found.tensor, found.tensor)
        buffers = {b.role: b for b in (*self.plan.outputs, *self.plan.workspace)}
        buffers["x"] = Buffer("x", p.dtype, (Extent(1, 1), Extent(p.in_features)))
        buffers["weight"] = Buffer("weight", p.dtype, (Extent(p.out_features), Extent(p.in_features)))
        rows, columns = map(self.extent, buffers[role].shape)
        dtype = buffers[role].dtype
        kind = "CU_TENSOR_MAP_DATA_TYPE_" + ("FLOAT32" if found.exact and dtype == "float32" else _MAP_TYPES[dtype])
        eights = 8 * found.shared
        last = f"(({rows} - 1) % {found.rows - found.overlap} + {found.overlap + eights}) / {eights} * 8"
        box_rows = last if found.last else found.rows // found.shared
        matrix, pitch = self.argument(role), str(buffers[role].pitch or "")
        if found.parity is not None:  # of a single row there are no odd ones, and nothing is stored
            matrix, pitch = matrix + found.parity * f" + {columns}", f"2 * {columns}"
            rows = f"std::max<int64_t>(({rows} + {1 - found.parity}) / 2, 1)"
        sizes = [rows, columns, str(box_rows), str(found.columns)]
        sizes += [f"{pitch} /* pitch */"] if pitch else []
        return f"tensor_map({matrix}, {kind}, {', '.join(sizes)})"

    def argument(self, role: str) -> str:
        """What a launch is given for `role`."""
        if role == "stored_product":
            role = "product"
        elif role.startswith("given_"):
            role = role.removeprefix("given_")
        elif role == "offset" and self.plan.keeps_offsets:
            role = "group_mean"
        elif role == "amax_state":
            return f"{self.argument('counters')} + {self.plan.counters - 4}"
        if role in self.pointers:
            return role
        if role in self.tensors:
            return f"pointer<{self.element_type(role)}>({role})"
        if self.c_type(role).endswith("*"):
            return f"nullptr /* {role} */"
        if role not in _NUMBERS:
            raise GemmNormRuntimeError(f"export: no host expression is known for the argument {role!r}")
        constants = {"features": self.plan.problem.out_features, "in_features": self.plan.problem.in_features}
        return str(constants.get(role, role))

    def function(self, comment: str, signature: str) -> str:
        start = [
            "  const c10::cuda::CUDAGuard guard(x.device());",
            "  const cudaStream_t stream = c10::cuda::getCurrentCUDAStream();",
            "  const int64_t batch = x.size(0);",
            *(f"  const int64_t {name} = (batch + {rows - 1}) / {rows};" for name, rows in self.row_counts.items()),
        ]
        lines = [line.rstrip() for line in (*start, *self.lines)]
        return "\n".join([comment, f"{signature} {{", *lines, "}", ""])
