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
from ..plan import Launch, Plan, Problem, make_plan
from .host_function import Body, extent_text
from .kernel_text import Kernels, ascii_text, wrap

TEMPLATES = Path(__file__).parent / "templates"

_GRADIENTS = ("grad_x", "grad_weight", "grad_bias", "grad_scale", "grad_bn_weight", "grad_bn_bias")
_INPUTS = ("x", "weight", "bias", "scale", "running_mean", "running_var", "num_batches_tracked", "bn_weight", "bn_bias")


@dataclass(frozen=True)
class Site:
    """The plans of one kind of chain.

    Attributes:
        suffix: what its host functions' names end in ("" where the file has one kind of chain only).
        forward: (training, save) → plans; where the first serves batches up to some size only, a second serves all.
        backward: training → plan.
    """

    suffix: str
    forward: dict[tuple[bool, bool], tuple[Plan, ...]]
    backward: dict[bool, Plan]

    @property
    def plans(self) -> tuple[Plan, ...]:
        return (*(plan for plans in self.forward.values() for plan in plans), *self.backward.values())


def plan_site(problem: Problem, strategy: str, suffix: str = "") -> Site:
    """All plans for `problem`: forward and backward, training and evaluation, with and without gradients.

    The batch of `problem` is what they are made for; every other batch runs them too.
    """
    modes = (True, False)

    def forward(training: bool, save: bool) -> tuple[Plan, ...]:
        one = replace(problem, training=training, save=save)
        plans = [make_plan(one, strategy)]
        if _too_large(plans[0], {}) is not None:
            plans.append(make_plan(replace(one, batch=max(8 * problem.batch, 1 << 16)), strategy))
            if _too_large(plans[1], {}) is not None:
                raise GemmNormRuntimeError(f"export: no plan of {strategy} serves every batch size")
        return tuple(plans)

    return Site(
        suffix,
        {(training, save): forward(training, save) for training in modes for save in modes},
        {t: make_plan(replace(problem, training=t, save=True), strategy, "backward") for t in modes},
    )


def _too_large(plan: Plan, row_counts: dict[str, int]) -> str | None:
    """The C++ condition under which a batch is too large for `plan`; None where none is. See `extent_text`."""
    for launch in plan.launches:
        finish = next((c.rpartition("::")[2] for c in launch.constants if "Finish::" in c), "kPersistent")
        if finish == "kOneBlock":
            return f"batch > {launch.grid.rows}"
        if finish == "kOneWave":
            return f"{extent_text(replace(launch.grid, limit=0), row_counts)} > multiprocessors()"
        if finish not in ("kEvaluate", "kStatistics", "kPersistent"):
            raise GemmNormRuntimeError(f"export: it is not known which batches {finish} serves")
    return None


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
    kernels = Kernels()
    functions = [f for site in sites for f in _functions(site, kernels)]
    helpers = [_template("host.cu")]
    if any(launch.maps for site in sites for plan in site.plans for launch in plan.launches):
        helpers.append(_template("hopper.cu"))
    exposed = [f for f in functions if f.exposed]
    return CudaText(
        ascii_text(_DECLARATIONS + "\n".join(f"{f.signature};" for f in exposed) + "\n"),
        ascii_text(kernels.text()),
        ascii_text("\n".join([*helpers, *(f.text for f in functions)])),
        tuple(f.name for f in exposed),
    )


def _template(name: str) -> str:
    return (TEMPLATES / name).read_text(encoding="utf-8")


# --- host functions --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Function:
    name: str
    signature: str
    text: str
    exposed: bool = True


def _functions(site: Site, kernels: Kernels) -> list[_Function]:
    found: list[_Function] = []
    for training in (True, False):
        name = f"forward_{'training' if training else 'evaluation'}{site.suffix}"
        plain, saving = site.forward[training, False], site.forward[training, True]
        if len(plain) == len(saving) and all(map(_can_merge, plain, saving)):
            found += _by_batch(name, plain, saving, kernels)
        else:
            found += _by_save(name, plain, saving, kernels)
    for training in (True, False):
        name = f"backward_{'training' if training else 'evaluation'}{site.suffix}"
        saved = saved_roles(site.forward[training, True][0])
        found.append(_backward(name, site.backward[training], saved, kernels))
    return found


def _can_merge(plain: Plan, saving: Plan) -> bool:
    """The two differ in what they keep, and in numbers among their arguments, only."""
    steps = [[replace(s, numbers=()) if isinstance(s, Launch) else s for s in plan.steps] for plan in (plain, saving)]
    return steps[0] == steps[1] and not saving.aliases and plain.counters == saving.counters


def saved_roles(plan: Plan) -> tuple[str, ...]:
    """What a saving forward returns besides y, for the backward."""
    return tuple(b.role for b in plan.outputs if b.role != "y")


def _forward_signature(name: str, problem: Problem) -> str:
    out = f"[{problem.out_features}]"
    return _signature(
        name,
        [
            f"const torch::Tensor& x /* [batch, {problem.in_features}] */",
            f"const torch::Tensor& weight /* [{problem.out_features}, {problem.in_features}] */",
            f"const MaybeTensor& bias /* {out} */",
            f"const MaybeTensor& scale /* {out} or one element */",
            "double scale_value",
            f"const MaybeTensor& running_mean /* {out} */",
            f"const MaybeTensor& running_var /* {out} */",
            "const MaybeTensor& num_batches_tracked",
            f"const MaybeTensor& bn_weight /* {out} */",
            f"const MaybeTensor& bn_bias /* {out} */",
            "double momentum",
            "double eps",
            "bool save",
        ],
    )


def _backward_signature(name: str, problem: Problem, saved: Iterable[str]) -> str:
    out = f"[{problem.out_features}]"
    return _signature(
        name,
        [
            f"const torch::Tensor& grad /* [batch, {problem.out_features}] */",
            f"const torch::Tensor& x /* [batch, {problem.in_features}] */",
            f"const torch::Tensor& weight /* [{problem.out_features}, {problem.in_features}] */",
            f"const MaybeTensor& bias /* {out} */",
            f"const MaybeTensor& scale /* {out} or one element */",
            "double scale_value",
            f"const MaybeTensor& bn_weight /* {out} */",
            f"const MaybeTensor& bn_bias /* {out} */",
            *(f"const torch::Tensor& {role}" for role in saved),
            "double eps",
            "const std::vector<bool>& needs",
        ],
    )


def _signature(name: str, parameters: Iterable[str]) -> str:
    return wrap(f"Tensors {name}(", list(parameters), ")")


def _hand_on(name: str, problem: Problem, indent: str) -> str:
    """`return name(x, weight, …);` in a function of the same signature."""
    signature = re.sub(r"/\*.*?\*/", "", _forward_signature(name, problem))
    parameters = signature[signature.index("(") + 1 : signature.rindex(")")].split(",")
    return wrap(f"{indent}return {name}(", [parameter.split()[-1].lstrip("&") for parameter in parameters], ");")


def _by_batch(
    name: str, plain: Sequence[Plan], saving: Sequence[Plan], kernels: Kernels, exposed: bool = True
) -> list[_Function]:
    """A function for each of the plans, the first of which hands on to the second what is too large for it."""
    if len(plain) == 1:
        return [_forward(name, plain[0], saving[0], kernels, exposed=exposed)]
    large = f"{name}_large_batch"
    return [
        _forward(large, plain[1], saving[1], kernels, exposed=False),
        _forward(name, plain[0], saving[0], kernels, large, exposed),
    ]


def _by_save(name: str, plain: Sequence[Plan], saving: Sequence[Plan], kernels: Kernels) -> list[_Function]:
    """Where keeping something for the backward takes other steps: functions for both, and one that chooses."""
    problem = plain[0].problem
    signature = _forward_signature(name, problem)
    saved, alone = _hand_on(f"{name}_saving", problem, " " * 4), _hand_on(f"{name}_alone", problem, " " * 2)
    choice = f"  if (save)\n{saved}\n{alone}\n"
    return [
        *_by_batch(f"{name}_alone", plain, plain, kernels, exposed=False),
        *_by_batch(f"{name}_saving", saving, saving, kernels, exposed=False),
        _Function(name, signature, f"{signature} {{\n{choice}}}\n"),
    ]


def _forward(
    name: str, plain: Plan, saving: Plan, kernels: Kernels, large: str = "", exposed: bool = True
) -> _Function:
    """One function for the plan without and the plan with gradients. Where both are the same, it serves one alone.

    `large`: the function for batches that are too large for this one.
    """
    merged, kept_by_call = plain is not saving, saved_roles(saving)
    mode = "Batch statistics" if plain.problem.training else "Running statistics"
    what = f"y and{', with `save`,' if merged else ''} what the backward needs: {', '.join(kept_by_call)}"
    comment = f"// {mode}. Returns {what if kept_by_call else 'y'}."
    signature = _forward_signature(name, plain.problem)
    body = Body(saving, kernels, _INPUTS)
    body.other_numbers = {launch.entry: dict(launch.numbers) for launch in plain.launches} if merged else {}
    if large:
        body.line(f"if ({_too_large(plain, body.row_counts)})")
        body.lines += _hand_on(large, plain.problem, " " * 4).split("\n")
    aliases = dict(plain.aliases)
    made_anyway = {b.role for b in (*plain.outputs, *plain.workspace)}
    for buffer in sorted(saving.outputs, key=lambda b: b.role in aliases):
        otherwise = aliases.get(buffer.role, None if buffer.role in made_anyway else "torch::Tensor()")
        body.tensor(buffer, f"save ? {{}} : {otherwise}" if otherwise else "{}")
    outputs = {b.role for b in saving.outputs}
    body.workspace({b.role: b for b in (*plain.workspace, *saving.workspace) if b.role not in outputs}.values())
    body.aliases((role, target) for role, target in saving.aliases)
    body.steps()
    if merged and kept_by_call:
        body.line("if (!save) return {y};")
    body.line(f"return {{{', '.join(['y', *kept_by_call])}}};")
    return _Function(name, signature, body.function(comment, signature), exposed)


def _backward(name: str, plan: Plan, saved: Sequence[str], kernels: Kernels) -> _Function:
    mode = "batch" if plan.problem.training else "running"
    comment = (
        f"// Through {mode} statistics. Returns the gradients of x, weight, bias, scale, bn_weight and bn_bias; those\n"
        "// that `needs` leaves out are undefined."
    )
    # What was subtracted from each group of rows before the product was stored.
    saved = tuple("offset" if role == "group_mean" else role for role in saved)
    signature = _backward_signature(name, plan.problem, saved)
    body = Body(plan, kernels, ("grad_y", "x", "weight", "bias", "scale", "bn_weight", "bn_bias", *saved))
    body.line("const torch::Tensor grad_y = dense(grad);")
    for buffer in plan.outputs:
        if buffer.role not in _GRADIENTS:
            raise GemmNormRuntimeError(f"export: a backward returns {buffer.role}, which is no gradient that it knows")
        body.tensor(buffer, f"needs[{_GRADIENTS.index(buffer.role)}] ? {{}} : torch::Tensor()")
    body.optional = {b.role for b in plan.outputs}
    body.workspace(plan.workspace)
    body.aliases(plan.aliases)
    body.steps()
    body.line(f"return {{{', '.join(_GRADIENTS)}}};")
    return _Function(name, signature, body.function(comment, signature))
