"""A call with statistics over the ranks of a process group, in four parts; between them the ranks exchange.

    statistics → all_gather → normalize          sums → all_reduce → gradient

Where they do so by a launch (`peers`), it is one of the plan's, so that a forward is one call, and a backward. Else it
is the affair of `op/sync.py`. Nothing here waits for the device or asks how many rows other ranks have: an empty rank
sends zeros, and merges like every other.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from .. import plan
from ..plan import Plan, Problem
from ..plan import ranks as plans
from . import binding, memory
from . import call as calls
from .arguments import check_arguments
from .arithmetic import arithmetic
from .call import describe, prepared_like, record, remember, remembered, sizes, warn_once
from .operands import (
    Differentiable,
    Operands,
    Options,
    Saved,
    Shapes,
    all_served_as_they_are,
    as_served,
    dense,
    vectors,
)
from .peers import Peers


def _joined_forward(whole: Plan, statistics: Plan, normalize: Plan, peers: Peers) -> Plan:
    """The plan `whole`, with the merge of the ranks' statistics in the place of its own."""
    *kept, local = statistics.outputs
    (shape,) = local.shape
    exchange = peers.plan((shape.value(1),), False)
    y, *vectors = normalize.outputs
    return replace(
        whole,
        steps=(*statistics.steps, *exchange.steps, *normalize.steps),
        outputs=(y, *kept, *vectors),
        workspace=(*statistics.workspace, local, *exchange.outputs),
        aliases=(*normalize.aliases, ("sent", local.role), ("gathered", "received")),
    )


def _joined_backward(sums: Plan, gradient: Plan, peers: Peers) -> Plan:
    """Its last output is what the ranks add up, in its own memory."""
    exchange = peers.plan((2, sums.problem.out_features), True)
    return replace(
        sums,
        phase="backward",
        steps=(*sums.steps, *exchange.steps, *gradient.steps),
        outputs=(*gradient.outputs, *sums.outputs),
        workspace=(*sums.workspace, *gradient.workspace),
        aliases=(*sums.aliases, ("sent", "mean_grad"), ("received", "mean_grad")),
    )


class Call:
    """One kind of synchronised call, prepared. Kernels launch on the current stream.

    Attributes:
        options: those of the call, with the strategy that runs.
    """

    def __init__(self, operands: Operands, options: Options, ranks: int, dtypes: Sequence[torch.dtype]) -> None:
        """`dtypes`: of the gradients of x and weight, which autocast may have cast."""
        problem = describe(operands, options)
        self.options, self._batch, self._features = options, problem.batch, problem.out_features
        assert options.strategy is not None
        self._whole, statistics, normalize = plans.forward(problem, options.strategy, ranks)
        self._statistics = binding.bind(statistics) if problem.batch else None
        self._normalize = binding.bind(normalize)
        self._names = self._statistics.outputs if self._statistics else ()
        self._mapped = any(launch.maps for launch in (*statistics.launches, *normalize.launches))
        self._as_they_are = all_served_as_they_are(operands)
        self._norm_dtype = memory.DTYPES[problem.norm_dtype]
        self._scalars = binding.scalars(problem, operands.scale, options.scale_value, options.momentum, options.eps)
        if options.save and problem.batch:
            names = tuple(str(dtype).removeprefix("torch.") for dtype in dtypes)
            problem = replace(problem, grad_dtypes=names)
            self._parts_of_backward = plans.backward(problem, options.strategy)
            self._sums, self._gradient = map(binding.bind, self._parts_of_backward)
            self._in_shapes = Shapes(operands.differentiable[2:], self._sums.kinds[:4])
        self._parts_of_forward = statistics, normalize
        self._joined: dict[Peers, tuple[binding.Bound, binding.Bound | None]] = {}  # by who exchanges

    @property
    def joins(self) -> bool:
        """`forward` and `backward` serve: this rank has rows, and nothing has to be converted."""
        return bool(self._batch) and self._as_they_are

    def _joint(self, peers: Peers) -> tuple[binding.Bound, binding.Bound | None]:
        found = self._joined.get(peers)
        if found is None:
            forward = binding.bind(_joined_forward(self._whole, *self._parts_of_forward, peers))
            backward = binding.bind(_joined_backward(*self._parts_of_backward, peers)) if self.options.save else None
            found = self._joined[peers] = forward, backward
        return found

    def forward(self, operands: Operands, peers: Peers) -> tuple[Tensor, list[Tensor | None]]:
        """y [B, O]; the product, where it is stored, and float32 [3 or 3 + groups, O]: mean, rstd and rows of all
        ranks, and where the product is minus means of groups of rows, those. Updates the running statistics."""
        if self._mapped:
            operands = operands._replace(x=dense(operands.x), weight=dense(operands.weight))
        record(self._whole)
        peers.follow()
        y, *kept = self._joint(peers)[0]([*operands, peers.addresses], self._scalars)
        assert y is not None
        return y, kept

    def backward(self, needs: Sequence[bool], grad: Tensor, saved: Saved, peers: Peers) -> list[Tensor | None]:
        """Gradients of what is differentiable, None where `needs` is False; `saved` ends with what `forward` kept."""
        if not any(needs[:2]):  # nobody needs the sums over all ranks
            product, statistics = saved[6:]
            assert statistics is not None
            offset = statistics[3:] if len(statistics) > 3 else None
            kept = (product, offset, statistics[:3])
            return [None, None, *self.sums(needs, grad, Differentiable(*saved[:6]), kept)[0]]
        bound = self._joint(peers)[1]
        assert bound is not None
        wanted = (*(need and t is not None for need, t in zip(needs, saved, strict=False)), True)
        inputs = [dense(grad), *saved, peers.addresses]
        saved.clear()
        peers.follow()
        of_x, of_weight, *of_vectors, _ = bound(inputs, self._scalars, wanted)
        return [of_x, of_weight, *self._in_shapes(of_vectors)]

    def statistics(self, operands: Operands) -> tuple[Tensor | None, Tensor | None, Tensor]:
        """The product [B, O], where it is stored; where minus means of groups of rows, those [groups, O]; and this
        rank's mean, M2 and number of rows [2·O + 1], float32. Counts the batch."""
        x, weight, counter = operands.x, operands.weight, operands.num_batches_tracked
        if self._statistics is None:
            if counter is not None:
                counter.add_(1)
            product = x.new_empty((0, self._features))
            return product, None, x.new_zeros(2 * self._features + 1, dtype=torch.float32)
        if self._mapped:
            x, weight = dense(x), dense(weight)
        record(self._whole)
        outputs = self._statistics([x, weight, None, None, counter], self._scalars)
        found = dict(zip(self._names, outputs, strict=True))
        local = found["local_statistics"]
        assert local is not None
        return found.get("product"), found.get("statistics"), local

    def normalize(
        self, operands: Operands, product: Tensor | None, offset: Tensor | None, gathered: Tensor
    ) -> tuple[Tensor, Tensor]:
        """y [B, O]; mean, rstd and rows of all ranks, float32 [3, O]. Updates the running statistics."""
        write_back = None
        if not self._as_they_are:
            operands, write_back = as_served(operands)
        x, weight, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = operands
        if self._mapped:
            x, weight = dense(x), dense(weight)
        y, statistics = self._normalize(
            [gathered, product, offset, x, weight, bias, scale,
             running_mean, running_var, counter, bn_weight, bn_bias],
            self._scalars,
        )  # fmt: skip
        if write_back is not None:
            write_back()
        assert y is not None and statistics is not None
        return y, statistics

    def sums(
        self, needs: Sequence[bool], grad: Tensor, operands: Differentiable, kept: Sequence[Tensor | None]
    ) -> tuple[list[Tensor | None], Tensor]:
        """This rank's gradients of bias, scale, bn_weight and bn_bias; its share of what ranks add up [2, O].

        kept: product, offset and statistics.
        """
        if not self._batch:
            nothing = [
                None if t is None or not need else torch.zeros_like(t)
                for t, need in zip(operands[2:], needs[2:], strict=True)
            ]
            return nothing, grad.new_zeros((2, self._features), dtype=torch.float32)
        wanted = tuple(need and t is not None for need, t in zip(needs[2:], operands[2:], strict=True))
        *found, sums = self._sums([dense(grad), *kept, *self._vectors(operands)], self._scalars, (*wanted, True))
        assert sums is not None
        return self._in_shapes(found), sums

    def gradient(
        self,
        needs: Sequence[bool],
        grad: Tensor,
        saved: Saved,
        sums: Tensor,
    ) -> list[Tensor | None]:
        """The gradients of x and weight, given the `sums` over all ranks."""
        if not self._batch:
            return [
                torch.zeros_like(t) if need and t is not None else None
                for t, need in zip(saved[:2], needs, strict=False)
            ]
        inputs = [dense(grad), *saved[6:], sums, *saved[:2], *self._vectors(Differentiable(*saved[:6]))]
        saved.clear()
        return self._gradient(inputs, self._scalars, tuple(needs[:2]))

    def _vectors(self, operands: Differentiable) -> tuple[Tensor | None, ...]:
        x, _, bias, scale, bn_weight, bn_bias = operands
        if self._as_they_are:
            return bias, scale, bn_weight, bn_bias
        assert x is not None
        norm = (None if v is None else v.to(self._norm_dtype).contiguous() for v in (bn_weight, bn_bias))
        return (*vectors(bias, scale, x.device), *norm)


def strategy_of(operands: Operands, options: Options) -> str:
    """The strategy that serves a synchronised call: the one asked for, or the planner's choice of those that can."""
    requested = plan.check_strategy(options.strategy)
    if requested == "reference":
        return "reference"
    return _resolved(describe(operands, options), requested, calls.generation)


@functools.lru_cache(maxsize=4096)
def _resolved(problem: Problem, requested: str | None, generation: int) -> str:
    """Asked anew in each `generation` of prepared calls."""
    for name in sorted(plans.strategies(problem), key=lambda name: name != requested):  # stable
        try:
            _, *parts = plans.forward(problem, name, 2)
            if not problem.batch:
                parts = parts[1:]
            elif problem.save:
                parts += plans.backward(problem, name)
            for part in parts:
                binding.bind(part)
        except torch.cuda.OutOfMemoryError:
            raise
        except Exception as error:
            warn_once(name, error)
            continue
        return name
    return "reference"


def find(operands: Operands, options: Options, ranks: int, dtypes: tuple[torch.dtype, ...]) -> Call | None:
    """The prepared call for these tensors, options and number of ranks; None where no kernels serve it.

    Raises what `check_arguments` raises, the first time that such a call is made.
    """
    options = options._replace(strategy=plan.check_strategy(options.strategy))
    key = ("ranks", sizes(operands), operands.x.numel(), options, ranks, dtypes, arithmetic(operands.x.dtype))
    found: Call | None = remembered(key, operands)
    if found is not None:
        return found
    check_arguments(operands, True, synchronised=True)
    strategy = strategy_of(operands, options)
    if strategy == "reference":
        return None
    found = prepared_like(Call, operands, options._replace(strategy=strategy), ranks, dtypes)
    remember(key, operands, found)
    return found
