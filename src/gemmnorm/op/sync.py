"""Statistics over the ranks of a process group, as `nn.SyncBatchNorm` takes them.

Each way to compute a call has the same four parts (`Parts`), between which the ranks exchange one tensor forward and
one backward: kernels (`runtime.ranks.Call`), plain PyTorch ops (`PlainParts`), and the registered operators
(`OperatorParts`), which a trace gets to see with functional collectives between them. Ranks that map each other's
memory exchange by a launch (`runtime.peers`), others by collectives.

Those do so in the midst of one call (`runtime.ranks.Call.forward`, `backward`), which has the four parts in it.

forward: the product a = x·Wᵀ, and of this rank's rows a's mean, M2 and count [2·O + 1]; gathered, and merged in the
order of the ranks, so that all have the same bits; y = φ(γ·s·rstd·(a − mean) + β). backward, with N rows in all:

    da = γ·s·rstd·(g − u − (a − mean)·v)      u = Σg/N      v = s²·rstd²·Σ g·(a − mean)/N      both summed over ranks

A rank's gradients of bias, scale, γ and β are its share: their sum over the ranks is the gradient of the whole batch,
which is what DistributedDataParallel and FSDP expect of it. The bias's is zero on every rank.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from .. import activations
from ..errors import GemmNormValueError
from ..runtime import casts, driver, peers, ranks
from ..runtime.arguments import check_arguments
from ..runtime.operands import Differentiable, Operands, Options, Saved, cast_operands
from . import autograd, reference

Kept = Sequence[Tensor | None]  # product [B, O], offset [groups, O], statistics [3, O]: mean, rstd, count of all rows


class Parts(Protocol):
    """What a way to compute a call has. `runtime.ranks.Call` says what goes in and out."""

    def statistics(self, operands: Operands) -> tuple[Tensor | None, Tensor | None, Tensor]: ...
    def normalize(
        self, operands: Operands, product: Tensor | None, offset: Tensor | None, gathered: Tensor
    ) -> tuple[Tensor, Tensor]: ...
    def sums(
        self, needs: Sequence[bool], grad: Tensor, operands: Differentiable, kept: Kept
    ) -> tuple[list[Tensor | None], Tensor]: ...
    def gradient(self, needs: Sequence[bool], grad: Tensor, saved: Saved, sums: Tensor) -> list[Tensor | None]: ...


def world_size(group: Any) -> int:
    """Ranks in `group`; 1 where `torch.distributed` is not initialised."""
    return dist.get_world_size(group) if dist.is_available() and dist.is_initialized() else 1


# --- the exchange -----------------------------------------------------------------------------------------------------

# PyTorch 2.13 has the one name, earlier versions the other.
_all_gather: Any = getattr(dist, "all_gather_single", None) or getattr(dist, "all_gather_into_tensor", None)


class Group(NamedTuple):
    """Who exchanges: a process group, or its name for functional collectives; and how many they are."""

    handle: Any
    ranks: int

    def peers(self, operands: Operands | Differentiable) -> peers.Peers | None:
        """Who exchanges statistics of a product's features; None where collectives do."""
        weight = operands.weight
        assert weight is not None
        return peers.of_count(self.handle, weight.device, 2 * weight.shape[0])

    def gather(self, row: Tensor) -> Tensor:
        """`row` [n] of every rank [ranks, n]."""
        if isinstance(self.handle, str):
            functional = torch.ops._c10d_functional
            gathered = functional.all_gather_into_tensor(row, self.ranks, self.handle)
            return functional.wait_tensor(gathered).view(self.ranks, -1)  # type: ignore[no-any-return]
        found = peers.find(self.handle, row)
        return found.gather(row) if found else self.gather_by_collective(row)

    def gather_by_collective(self, row: Tensor) -> Tensor:
        every = row.new_empty((self.ranks, row.numel()))
        _all_gather(every.view(-1), row, group=self.handle)
        return every

    def add_up(self, sums: Tensor) -> Tensor:
        """The sum over all ranks, which may be in the same memory."""
        if isinstance(self.handle, str):
            functional = torch.ops._c10d_functional
            return functional.wait_tensor(functional.all_reduce(sums, "sum", self.handle))  # type: ignore[no-any-return]
        found = peers.find(self.handle, sums)
        return found.add_up(sums) if found else self.add_up_by_collective(sums)

    def add_up_by_collective(self, sums: Tensor) -> Tensor:
        dist.all_reduce(sums, group=self.handle)
        return sums


_agreed: WeakIdKeyDictionary = WeakIdKeyDictionary()  # parameter → the groups that have as many features of it
_agreed_counts: set[Any] = set()  # likewise of any weight: group, features


def check_agreement(weight: Tensor, group: Group) -> None:
    """Raise on every rank where the ranks have different numbers of features; asked once for each parameter and group.

    Where they have the same, memory for what they will exchange is prepared too (`peers`).

    Exchanging rows of different lengths is an error that collectives do not always notice. Not asked while a CUDA graph
    is captured, because the answer comes to the host.
    """
    parameter = isinstance(weight, torch.nn.Parameter)
    known = _agreed.setdefault(weight, set()) if parameter else _agreed_counts
    key = group.handle if parameter else (group.handle, weight.shape[0])  # no id: another group may come to have it
    if key in known or (weight.is_cuda and driver.capturing()):
        return
    every = group.gather(torch.tensor([weight.shape[0]], device=weight.device)).view(-1).tolist()
    if len(set(every)) > 1:
        where = "; ".join(
            f"{count} on rank {', '.join(str(r) for r, c in enumerate(every) if c == count)}"
            for count in sorted(set(every))
        )
        raise GemmNormValueError(f"process_group: expected the same number of features on all ranks; got {where}")
    known.add(key)
    if not isinstance(group.handle, str):
        count = 2 * weight.shape[0] + 1
        rank, limit = dist.get_rank(group.handle), _limit_ms(group.handle)
        peers.reserve(group.handle, rank, group.ranks, weight.device, count, group.gather_by_collective, limit)


def _limit_ms(handle: Any) -> int:
    """How long a group's collectives wait for other ranks."""
    try:
        group: Any = handle or dist.group.WORLD
        limit = group._get_backend(torch.device("cuda")).options._timeout
    except Exception:  # a backend without options
        limit = datetime.timedelta(minutes=10)  # NCCL's, where nothing else is said
    return min(int(limit.total_seconds() * 1000), 2**31 - 1)


# --- plain PyTorch ops ------------------------------------------------------------------------------------------------


def merge(count: Tensor, mean: Tensor, m2: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Statistics of the union of groups, in a fixed order: count [G], mean and M2 [G, O] → count [], mean, M2 [O].

    The mean first, as a deviation from the first group's; then M2 about it: M2 = Σ_g M2_g + n_g (mean_g − mean)².
    """
    total = count.sum()
    weight = (count / total.clamp_min(1)).unsqueeze(1)
    merged = mean[0] + (weight * (mean - mean[0])).sum(0)
    return total, merged, (m2 + count.unsqueeze(1) * (mean - merged).square()).sum(0)


class PlainParts:
    """In plain PyTorch ops: the definition, and what runs where no kernels serve. Statistics in float32 or float64."""

    def __init__(self, options: Options, dtypes: Sequence[torch.dtype | None] = (None, None)) -> None:
        """`dtypes`: of the gradients of x and weight, where not theirs."""
        self._options, self._dtypes = options, dtypes

    def statistics(self, operands: Operands) -> tuple[Tensor, Tensor | None, Tensor]:
        x, weight, counter = operands.x, operands.weight, operands.num_batches_tracked
        if counter is not None:
            counter.add_(1)
        product = x @ weight.t()
        wide = _wide(product)
        mean = wide.mean(0) if len(wide) else wide.new_zeros(wide.shape[1])
        return product, None, torch.cat([mean, (wide - mean).square().sum(0), wide.new_full((1,), len(wide))])

    def normalize(
        self, operands: Operands, product: Tensor | None, offset: Tensor | None, gathered: Tensor
    ) -> tuple[Tensor, Tensor]:
        assert product is not None
        _, _, bias, scale, running_mean, running_var, counter, bn_weight, bn_bias = operands
        features = product.shape[1]
        count, mean, m2 = merge(gathered[:, -1], gathered[:, :features], gathered[:, features:-1])
        factor = self._factor(scale, gathered)
        variance = factor.square() * m2 / count.clamp_min(1)
        if running_mean is not None and running_var is not None:
            factor_of_batch = reference.averaging_factor(self._options.momentum, counter)
            new = factor_of_batch * (count > 0).to(count)  # where no rank has rows, all stays as it is
            z_mean = (mean if bias is None else mean + bias) * factor
            unbiased = variance * (count / (count - 1).clamp_min(1))
            running_mean.lerp_(z_mean.to(running_mean.dtype), new.to(running_mean.dtype))
            running_var.lerp_(unbiased.to(running_var.dtype), new.to(running_var.dtype))
        rstd = (variance + self._options.eps).rsqrt()
        statistics = torch.stack([mean, rstd, count.expand(features)])
        z = self._z(product, statistics, factor, bn_weight, bn_bias)
        dtype = product.dtype if scale is None or scale.dim() == 0 else torch.promote_types(product.dtype, scale.dtype)
        return activations.forward(z.to(dtype), self._options.activation), statistics

    def sums(
        self, needs: Sequence[bool], grad: Tensor, operands: Differentiable, kept: Kept
    ) -> tuple[list[Tensor | None], Tensor]:
        _, _, bias, scale, bn_weight, _ = operands
        product, _, statistics = kept
        assert product is not None and statistics is not None
        mean, rstd, count = statistics.unbind(0)
        factor = self._factor(scale, statistics)
        g = self._through_activation(grad, operands, kept)
        total, dot = g.sum(0), (g * (_wide(product) - mean)).sum(0)
        gamma = 1.0 if bn_weight is None else bn_weight
        of_scale = None
        if scale is not None:
            of_scale = gamma * self._options.eps * rstd.pow(3) * dot
            of_scale = of_scale.sum_to_size(scale.shape[-1:] or (1,)).view_as(scale)
        found = (
            None if bias is None else torch.zeros_like(bias),
            of_scale,
            None if bn_weight is None else factor * rstd * dot,
            total,
        )
        given = zip(needs[2:], operands[2:], found, strict=True)
        sums = torch.stack([total, (factor * rstd).square() * dot]) / count.clamp_min(1)
        return [None if t is None or v is None or not need else v.to(t.dtype) for need, t, v in given], sums

    def gradient(self, needs: Sequence[bool], grad: Tensor, saved: Saved, sums: Tensor) -> list[Tensor | None]:
        operands, kept = Differentiable(*saved[:6]), saved[6:]
        x, weight, _, scale, bn_weight, _ = operands
        product, _, statistics = kept
        assert product is not None and statistics is not None and x is not None and weight is not None
        mean, rstd, _ = statistics.unbind(0)
        mean_grad, slope_grad = sums.unbind(0)
        slope = self._factor(scale, statistics) * rstd
        slope = slope if bn_weight is None else slope * bn_weight
        g = self._through_activation(grad, operands, kept)
        da = (slope * (g - mean_grad - (_wide(product) - mean) * slope_grad)).to(product.dtype)
        found = (da @ weight if needs[0] else None, da.t() @ x if needs[1] else None)
        return [
            t if t is None else t.to(dtype or t.dtype) for t, dtype in zip(found, self._dtypes, strict=True)
        ]  # fmt: skip

    def _factor(self, scale: Tensor | None, like: Tensor) -> Tensor:
        """s, of a dtype and device that statistics have."""
        if scale is None:
            return like.new_full((), self._options.scale_value)
        return scale.reshape(-1).to(like) if scale.dim() else scale.to(like)

    def _z(
        self, product: Tensor, statistics: Tensor, factor: Tensor, gamma: Tensor | None, beta: Tensor | None
    ) -> Tensor:
        slope = factor * statistics[1]
        z = (_wide(product) - statistics[0]) * (slope if gamma is None else slope * gamma)
        return z if beta is None else z + beta

    def _through_activation(self, grad: Tensor, operands: Differentiable, kept: Kept) -> Tensor:
        """g = ∂L/∂z in the statistics' dtype."""
        product, _, statistics = kept
        assert product is not None and statistics is not None
        if self._options.activation is not None:
            factor = self._factor(operands.scale, statistics)
            z = self._z(product, statistics, factor, operands.bn_weight, operands.bn_bias)
            grad = activations.backward(grad, z.to(grad.dtype), self._options.activation)
        return _wide(grad)


def _wide(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.float16, torch.bfloat16) else t


# --- the registered operators -----------------------------------------------------------------------------------------


class OperatorParts:
    """The operators of `registration`: four nodes of a graph."""

    def __init__(self, options: Options, group: Group) -> None:
        self._options, self._ranks = options, group.ranks

    def statistics(self, operands: Operands) -> tuple[Tensor, Tensor, Tensor]:
        return torch.ops.gemmnorm.sync_statistics(*operands, *self._options, self._ranks)  # type: ignore[no-any-return]

    def normalize(
        self, operands: Operands, product: Tensor | None, offset: Tensor | None, gathered: Tensor
    ) -> tuple[Tensor, Tensor]:
        found: tuple[Tensor, Tensor] = torch.ops.gemmnorm.sync_normalize(
            *operands, product, offset, gathered, *self._options, self._ranks
        )
        return found

    def sums(
        self, needs: Sequence[bool], grad: Tensor, operands: Differentiable, kept: Kept
    ) -> tuple[list[Tensor | None], Tensor]:
        *found, sums = torch.ops.gemmnorm.sync_sums(grad, *operands, *kept, *self._options, self._ranks, needs)
        return found, sums

    def gradient(self, needs: Sequence[bool], grad: Tensor, saved: Saved, sums: Tensor) -> list[Tensor | None]:
        return list(torch.ops.gemmnorm.sync_gradient(grad, *saved, sums, *self._options, self._ranks, needs))


# --- autograd ---------------------------------------------------------------------------------------------------------


class LinearScaleSyncBatchNorm(torch.autograd.Function):
    """y by `parts` and `group`, differentiable in the six tensors that follow `operands`.

    `operands` are what is multiplied: where autocast has cast x and weight, those copies, which are kept as well.
    """

    @staticmethod
    def forward(ctx: Any, parts: Parts, group: Group, operands: Operands, *_: Tensor | None) -> Tensor:
        y, kept = _forward(parts, group, operands)
        ctx.save_for_backward(*operands.differentiable, *kept)
        ctx.parts, ctx.group = parts, group
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        needs = list(ctx.needs_input_grad[3:])
        saved: Saved = [*ctx.saved_tensors]
        if torch.is_grad_enabled():
            made_of = (grad, *saved[:6])
            with torch.no_grad():
                found = _backward(ctx.parts, ctx.group, needs, grad, saved)
            return None, None, None, *autograd.not_twice(found, made_of)
        if isinstance(ctx.parts, ranks.Call):
            autograd.let_go(ctx)
        return None, None, None, *_backward(ctx.parts, ctx.group, needs, grad, saved)


def _forward(parts: Parts, group: Group, operands: Operands) -> tuple[Tensor, Kept]:
    """y, and what the backward needs: of the parts one after the other three tensors, of all in one call two."""
    if isinstance(parts, ranks.Call) and parts.joins and (found := group.peers(operands)) is not None:
        return parts.forward(operands, found)
    product, offset, row = parts.statistics(operands)
    y, statistics = parts.normalize(operands, product, offset, group.gather(row))
    return y, (product, offset, statistics)


def _backward(parts: Parts, group: Group, needs: Sequence[bool], grad: Tensor, saved: Saved) -> list[Tensor | None]:
    """Gradients of what is differentiable, None where `needs` is False."""
    if len(saved) == 8:
        found = group.peers(Differentiable(*saved[:6]))
        assert isinstance(parts, ranks.Call) and found is not None
        return parts.backward(needs, grad, saved, found)
    of_vectors, sums = parts.sums(needs, grad, Differentiable(*saved[:6]), saved[6:])
    of_matrices: list[Tensor | None] = [None, None]
    if any(needs[:2]):
        of_matrices = parts.gradient(needs, grad, saved, group.add_up(sums))
    return [g if needed else None for g, needed in zip([*of_matrices, *of_vectors], needs, strict=True)]


_apply_directly = autograd.directly(LinearScaleSyncBatchNorm)


def apply(parts: Parts, group: Group, multiplied: Operands, differentiable: Differentiable) -> Tensor:
    """y, with its graph where one of `differentiable` wants it."""
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in differentiable):
        return LinearScaleSyncBatchNorm.apply(parts, group, multiplied, *differentiable)  # type: ignore[no-any-return]
    with torch.no_grad():
        return _forward(parts, group, multiplied)[0]


def by_operators(operands: Operands, options: Options, handle: Any) -> Tensor:
    """The training-mode chain with statistics over all ranks, where a trace or a mode has to see operators."""
    check_arguments(operands, True, synchronised=True)
    scale_value, training, momentum, eps, activation, strategy, save, *_ = options
    found: Tensor = torch.ops.gemmnorm.linear_scale_sync_batch_norm(
        *operands, scale_value, training, momentum, eps, activation, strategy, save, True, None,  # the product kept
        handle.group_name, world_size(handle),
    )  # fmt: skip
    return found


def prepared(operands: Operands, options: Options, handle: Any) -> Callable[[Operands], Tensor]:
    """The training-mode chain with statistics over all ranks of a process group: one collective each way.

    What computes y of operands like these. It asks at each call whether the ranks agree about the weight, because they
    must ask together. Raises what `check_arguments` raises; the result what `check_agreement` raises.
    """
    group = Group(handle, world_size(handle))
    dtypes = (operands.x.dtype, operands.weight.dtype)
    save = options.save and operands.require_gradients
    options = options._replace(save=save)
    device = operands.x.device.type
    if torch.is_autocast_enabled(device):
        check_arguments(operands, True, synchronised=True)
        dtype = torch.get_autocast_dtype(device)

        def cast_first(operands: Operands) -> Tensor:
            check_agreement(operands.weight, group)
            copy = casts.find(operands.weight, dtype)
            with torch.no_grad():
                multiplied = cast_operands(operands if copy is None else operands._replace(weight=copy), dtype)
                if save and copy is None and multiplied.weight is not operands.weight:
                    casts.keep(operands.weight, multiplied.weight)
            parts: Parts = ranks.find(multiplied, options, group.ranks, dtypes) or PlainParts(options, dtypes)
            with torch.autocast(device, enabled=False):
                return apply(parts, group, multiplied, operands.differentiable)

        return cast_first
    parts: Parts = ranks.find(operands, options, group.ranks, dtypes) or PlainParts(options, dtypes)

    def run(operands: Operands) -> Tensor:
        check_agreement(operands.weight, group)
        if not save:
            return _forward(parts, group, operands)[0]
        return _apply_directly(parts, group, operands, *operands.differentiable)  # type: ignore[no-any-return]

    return run
