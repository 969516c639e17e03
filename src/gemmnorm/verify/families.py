"""The cases that an equality check runs: families of weights, statistics and inputs, for any model.

A family knows nothing of a particular model. It knows *roles* of parameters and buffers, read off the modules:

    matrix   two and more dimensions (a Linear's or a convolution's weight); its features are dimension 0
    bias     the bias beside a matrix
    gamma, beta, mean, var, counter    of a normalisation layer
    vector   every other parameter: scales and the like

Whatever differs between features or rows follows a pattern of period 8 in the index, so that every feature has
relatives of the same role (`gemmnorm.verify.equality.pool` uses that) and every magnitude meets every sign.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase

from .trial import (
    ADDED,
    AFTER,
    ALL_FROZEN,
    AUTOCAST,
    AUTOCAST_FP16,
    BETWEEN,
    EXPANDED,
    FROZEN,
    KIND_FROZEN,
    NO_INPUT_GRADIENT,
    SLICED,
    SMALL,
    STATISTICS,
    TRANSPOSED,
    TURNED,
    WRITTEN,
    autocast_dtype,
)

__all__ = ["FAMILIES", "ORDINARY", "PLAIN", "QUICK", "Case", "draw_inputs", "draw_state", "plan_cases", "roles"]

PLAIN = ("plain", "updated")  # weights without extremes
LARGE = 1e4  # |mean| / std of the columns in the families of large means


@dataclass(frozen=True)
class Case:
    """One case: how the state and the inputs are drawn, and what is compared.

    rows       leading dimension of the inputs; None: as get_inputs() made them
    weights    "plain", "updated" (plain, but no matrix as constructed), "scales", "graded", "large bias"
    inputs     "plain", "large mean", "offset", "constant", "outliers", "tiny", "not finite", "exchanged" (those of the
               case before, two rows in the middle in each other's place: sums, first and last rows stay)
    settled    evaluation uses the statistics of this very batch instead of random ones, as after training
    load       how the state reaches the models: "state_dict", "in place" (an optimizer's update), "keep" (unchanged
               parameters of the case before: only the inputs are new, in the same memory)
    same_inputs  the inputs are those of the case before: what is kept under their contents or their address goes stale
    gradients  phases in which gradients are compared
    phases     phases that run at all, in their order; a state is loaded in the mode that the case before ended with
    use        how the model is used besides (`trial.py`); where the original raises then, it is left out
    """

    name: str
    rows: int | None
    weights: str = "plain"
    inputs: str = "plain"
    settled: bool = False
    load: str = "state_dict"
    same_inputs: bool = False
    gradients: tuple[str, ...] = ("train", "eval")
    phases: tuple[str, ...] = ("train", "eval")
    use: tuple[str, ...] = ()

    @property
    def title(self) -> str:
        return ", ".join((self.name, *self.use))


FAMILIES: tuple[Case, ...] = (
    Case("plain", 33),
    Case("new inputs, same weights", 33, load="keep", phases=("eval", "train")),  # the next one loads in training
    Case("two rows exchanged", 33, inputs="exchanged", load="keep", gradients=(), phases=("eval", "train")),
    Case("same inputs, weights updated in place", 33, weights="updated", load="in place", same_inputs=True),
    Case("tiny, zero and negative scales", 31, weights="scales"),
    Case("graded and zero weights", 17, weights="graded", settled=True),
    Case("large bias", 16, weights="large bias", settled=True),
    Case("columns with |mean| = 1e4 std", 32, inputs="large mean", settled=True),
    Case("inputs far from zero", 24, inputs="offset", settled=True),
    Case("constant columns", 9, inputs="constant", settled=True),
    Case("outliers", 40, inputs="outliers", settled=True),
    Case("tiny inputs", 15, inputs="tiny", settled=True),
    Case("two rows", 2, phases=("eval", "train")),
    Case("three rows", 3, use=(FROZEN,)),
    Case("one row", 1, gradients=("eval",)),
    Case("63 rows", 63, use=(TRANSPOSED, TURNED)),
    Case("64 rows", 64, use=(ADDED,)),
    Case("65 rows", 65, use=(NO_INPUT_GRADIENT,)),
    Case("127 rows", 127, use=(SLICED, EXPANDED)),
    Case("128 rows", 128, gradients=("train",), use=(WRITTEN,)),
    Case("129 rows", 129, use=(BETWEEN, SMALL)),
    Case("gradients of inputs", 5, use=(ALL_FROZEN,)),
    Case("gradients of parameters", 6, use=(FROZEN, NO_INPUT_GRADIENT)),
    Case("statistics", 7, phases=("train",), use=(STATISTICS,)),
    Case("evaluation", 33, phases=("eval",), gradients=(), use=(AFTER,)),
    Case("four rows", 4, use=(KIND_FROZEN,)),
    Case("NaN and infinity", 12, inputs="not finite", gradients=()),
    # The last ones: they may end the process, or spoil its memory.
    Case("autocast", 33, use=(AUTOCAST,)),
    Case("autocast in float16", 33, use=(AUTOCAST_FP16,)),
)


_AS_IT_IS = ("plain", "new inputs, same weights", "same inputs, weights updated in place")
ORDINARY = (*_AS_IT_IS, "full size")  # without which nothing is known of a model

# What an edit of a kernel breaks first; every wrong file of tests/traps fails one of them.
QUICK = frozenset(
    (
        "plain",
        "new inputs, same weights",
        "two rows exchanged",
        "same inputs, weights updated in place",
        "tiny, zero and negative scales",
        "graded and zero weights",
        "columns with |mean| = 1e4 std",
        "two rows",
        "four rows",
        "one row",
        "64 rows",
        "65 rows",
        "evaluation",
        "NaN and infinity",
    )
)


def plan_cases(
    seed_index: int,
    seeds: int,
    *,
    shared: bool,
    full_rows: int | None,
    full_everywhere: bool,
    families: Sequence[Case] = FAMILIES,
) -> list[Case]:
    """The cases of one seed: every family under every seed or, of large models, `shared` out over the seeds.

    The first family runs under every seed; the full-size case under the first, or under all of them where arithmetic is
    cheap (a GPU) or has been asked for; those of autocast end the last one.
    """
    first, *rest = families
    last = [case for case in rest if autocast_dtype(case.use)]
    rest = rest[: len(rest) - len(last)]
    cases = [first, *(c for i, c in enumerate(rest) if not shared or i % seeds == seed_index)]
    cases += last if seed_index == seeds - 1 else []
    if seed_index == 0 or full_everywhere:
        cases.insert(1 if shared else 4, Case("full size", full_rows, gradients=("train",)))
    return cases


def without_rows(cases: Sequence[Case]) -> list[Case]:
    """The same cases at the batch that get_inputs() makes, for models whose batch cannot be changed.

    Uses of the cases that are left out go over to those that stay.
    """
    of_rows = [c for c in cases if c.name.endswith(("rows", "row"))]
    uses = [c.use for c in of_rows if c.use]
    kept = []
    for case in (c for c in cases if c not in of_rows):
        free = case.name not in _AS_IT_IS and not case.use and case.gradients == ("train", "eval")
        kept.append(replace(case, rows=None, use=uses.pop() if uses and free else case.use))
    return kept


# ----------------------------------------------------------------------------------------------- weights and statistics


def roles(model: nn.Module) -> dict[str, str]:
    """The role of every parameter and buffer of the state_dict ("other" for buffers nobody knows)."""
    found: dict[str, str] = {}
    norm_roles = {"weight": "gamma", "bias": "beta"}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        is_norm = isinstance(module, (_NormBase, nn.LayerNorm, nn.GroupNorm))
        own = dict(module.named_parameters(recurse=False))
        has_matrix = any(_is_matrix(p) for p in own.values())
        for name, parameter in own.items():
            if is_norm and name in norm_roles:
                found[dot + name] = norm_roles[name]
            elif _is_matrix(parameter):
                found[dot + name] = "matrix"
            else:
                found[dot + name] = "bias" if has_matrix and "bias" in name else "vector"
    named_buffers = {"running_mean": "mean", "running_var": "var", "num_batches_tracked": "counter"}
    for name in model.state_dict():
        if name not in found:
            found[name] = named_buffers.get(name.rpartition(".")[2], "other")
    return found


def _is_matrix(parameter: Tensor) -> bool:
    return parameter.ndim >= 2 and parameter.numel() > max(parameter.shape)


_SCALES = (1.0, -1.0, 1e-3, -3e-3, 0.0, 1e-2, -0.5, 3e-5)
_VARIANCES = (1.0, 1e-2, 1e-6, 1e-5, 0.0, 1e-4, 0.3, 1e-6)
_GRADES = (1.0, -1.0, 1e-3, 1e-2, 0.0, 10.0, 3e-3, 1.0)


def draw_state(
    initial: dict[str, Tensor], role_of: dict[str, str], weights: str, generator: torch.Generator
) -> dict[str, Tensor]:
    """A state_dict drawn for a family: matrices and plain scales as the constructor drew them, the rest random."""
    return {name: _draw(value, role_of[name], weights, generator) for name, value in initial.items()}


def _draw(value: Tensor, role: str, weights: str, generator: torch.Generator) -> Tensor:
    def uniform(low: float, high: float) -> Tensor:
        return torch.rand(value.shape, generator=generator) * (high - low) + low

    def normal() -> Tensor:
        return torch.randn(value.shape, generator=generator)

    plain = weights in PLAIN
    zeros = value.is_floating_point() and not bool(value.any())
    if role == "counter":
        return torch.full_like(value, int(torch.randint(0, 5, (), generator=generator)))
    if role == "gamma":
        new = uniform(0.5, 1.5) * torch.where(normal() > -0.5, 1.0, -1.0)
    elif role in ("beta", "mean"):
        new = normal() * (0.5 if plain else 0.1)
    elif role == "var":
        new = uniform(0.5, 1.5) * (1.0 if plain else _pattern(value, _VARIANCES, generator))
    elif role == "vector" and weights == "scales":
        new = uniform(0.5, 1.5) * _pattern(value, _SCALES, generator)
    elif role == "bias" and weights == "large bias":
        new = LARGE * normal()
    elif zeros and weights == "updated" and role in ("matrix", "vector"):  # as an adapter begins: others train it
        new = normal() * 0.1
    elif weights == "updated" and role in ("matrix", "bias", "vector"):
        return value * uniform(0.5, 1.5).to(value)
    elif weights == "scales" and role == "other" and value.is_floating_point():  # what a checkpoint brings
        new = normal() * 0.1 if zeros else value * uniform(0.5, 1.0).to(value)
    elif role == "matrix" and weights == "graded":
        return value * _pattern(value, _GRADES, generator).to(value)
    else:
        return value.clone()
    return new.to(value)


def _pattern(value: Tensor, pattern: Sequence[float], generator: torch.Generator) -> Tensor:
    """The pattern along the features of `value`: dimension 0 of a matrix, the longest one of anything else."""
    longest = max(range(value.ndim), key=lambda d: value.shape[d], default=0)
    dimension = 0 if _is_matrix(value) else longest
    length = value.shape[dimension] if value.ndim else 1
    shift = int(torch.randint(0, len(pattern), (), generator=generator)) if length == 1 else 0
    repeated = torch.tensor([pattern[(i + shift) % len(pattern)] for i in range(length)])
    shape = [length if d == dimension else 1 for d in range(value.ndim)]
    return repeated.reshape(shape)


# --------------------------------------------------------------------------------------------------------------- inputs


def draw_inputs(full: Sequence[Any], case: Case, generator: torch.Generator, *, offset: int = 0) -> list[Any]:
    """Inputs of a case: rows of `full` (from row `offset` on, wrapping), then what the family does to them."""
    leading = leading_rows(full)
    result = []
    for value in full:
        if isinstance(value, Tensor) and case.rows is not None and value.ndim and value.shape[0] == leading:
            value = _take_rows(value, case.rows, offset)
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim:
            value = _adverse(value.clone(), case.inputs, generator)
        result.append(value.clone() if isinstance(value, Tensor) else value)
    return result


def exchanged(inputs: Sequence[Any]) -> list[Any]:
    """These with two rows in the middle in each other's place: sums, moments, first and last rows stay."""
    rows = leading_rows(inputs) or 0
    order = torch.arange(rows)
    if rows > 3:
        order[[rows // 2 - 1, rows // 2]] = order[[rows // 2, rows // 2 - 1]]
    return [v[order] if isinstance(v, Tensor) and v.ndim and v.shape[0] == rows else v for v in inputs]


def leading_rows(inputs: Sequence[Any]) -> int | None:
    """The leading dimension of the first tensor that has one: the batch."""
    return next((int(v.shape[0]) for v in inputs if isinstance(v, Tensor) and v.ndim), None)


def _take_rows(value: Tensor, rows: int, offset: int) -> Tensor:
    have = value.shape[0]
    if rows == have or have == 0:
        return value
    index = (torch.arange(rows) + offset) % have
    taken = value[index.to(value.device)]
    for lap in range(1, (rows + have - 1) // have):  # more rows than there are: shifted, so that none repeats
        if value.ndim > 1:
            taken[lap * have :] = taken[lap * have :].roll(lap, dims=-1)
    return taken


def _adverse(x: Tensor, family: str, generator: torch.Generator) -> Tensor:
    half = x.dtype in (torch.float16, torch.bfloat16)
    spread = max(float(x.double().std()) if x.numel() > 1 else 1.0, 1e-3)
    features = x.shape[-1]
    if family == "large mean":  # one constant feature, exact in every dtype, takes the columns of the product far off
        x[..., 0] = min(LARGE * spread * features**0.5, 6e4 if x.dtype == torch.float16 else 1e30)
    elif family == "offset":
        x += (16.0 if half else LARGE) * spread
    elif family == "constant":
        x = x[:1].expand_as(x).clone()
    elif family == "outliers":
        x[x.shape[0] // 2] *= 1e3 if not half else 30.0
        x[..., features // 2] *= 1e3 if not half else 30.0
    elif family == "tiny":
        x *= 1e-3
    elif family == "not finite":
        x[x.shape[0] // 2].view(-1)[0] = float("nan")
        x[x.shape[0] // 3].view(-1)[-1] = float("inf")
    return x
