"""What `fuse` finds in a model, for a person: the chains, and the near misses with their reasons."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from torch import nn

from ..chain import ChainCall
from ..module import LinearScaleBatchNorm1d
from .analysis import OwnerPlan, analyse
from .classes import Filter, chosen, fusion_of
from .matching import Chain, Refusal


@dataclass(frozen=True)
class Calls:
    """How the calls of one chain went since it was fused.

    Attributes:
        fused: how many ran as one operation, which kernels or plain PyTorch ops may serve: `explain` says.
        unfused: how many ran module by module, by reason.
        compiled: what the last trace of `torch.compile` took into its graph: "fused", the reason why it holds single
            operations, or "" where there was none, or one of a checkpoint's body. Calls of compiled graphs are not
            counted.
    """

    fused: int
    unfused: dict[str, int]
    compiled: str

    @staticmethod
    def of(call: ChainCall) -> Calls:
        return Calls(call.fused, dict(call.unfused), call.compiled)

    def __str__(self) -> str:
        parts = [f"{self.fused} fused"]
        parts += [f"{count} unfused ({reason})" for reason, count in self.unfused.items()]
        compiled = {"": "", "fused": "; compiled: fused"}.get(self.compiled, f"; compiled: unfused ({self.compiled})")
        return f"calls: {', '.join(parts)}{compiled}"


@dataclass(frozen=True)
class Match:
    """One chain that can run fused. `fused` says whether it does. Names are below `owner` ("" is the model itself).

    `views`: what lays the product out for `bn`, in words. `calls` is there where it was asked for and the chain is
    fused.
    """

    owner: str
    linear: str
    scale: str | None
    bn: str
    activation: str | None
    in_features: int
    out_features: int
    fused: bool
    views: tuple[str, ...] = ()
    calls: Calls | None = field(default=None, compare=False)

    def __str__(self) -> str:
        prefix = f"{self.owner}." if self.owner else ""
        scale = f"× {self.scale}" if self.scale else ""
        steps = [prefix + self.linear, scale, *self.views, prefix + self.bn, self.activation or ""]
        text = f"{' → '.join(filter(None, steps))}  ({self.in_features} → {self.out_features})"
        return text if self.calls is None else f"{text}  {self.calls}"


@dataclass(frozen=True)
class FuseReport:
    """What `fuse` finds in a model as it stands: every chain, and every near miss with the reason.

    Attributes:
        matches: the chains.
        refusals: what looks like a chain, or may hold one, and is left alone.
        linears: how many nn.Linear the model has.
        batch_norms: how many nn.BatchNorm1d.
    """

    matches: tuple[Match, ...]
    refusals: tuple[Refusal, ...]
    linears: int = 0
    batch_norms: int = 0

    def __str__(self) -> str:
        lines = []
        if self.matches:
            fused = sum(match.fused for match in self.matches)
            count = len(self.matches)
            state = "fused" if fused == count else "not fused yet" if not fused else f"{fused} of them fused"
            lines.append(f"{count} chain{'s' * (count > 1)}, {state}:")
            lines += [f"  {match}" for match in self.matches]
            lines += ["left alone:"] * bool(self.refusals)
        else:
            lines.append(f"no Linear → BatchNorm1d chain: {self._why_none()}")
        return "\n".join([*lines, *(f"  {refusal}" for refusal in self.refusals)])

    def _why_none(self) -> str:
        if self.refusals:
            return "every candidate is refused"
        if not self.linears or not self.batch_norms:
            missing = [n for n, c in (("nn.Linear", self.linears), ("nn.BatchNorm1d", self.batch_norms)) if not c]
            return f"the model has no {' and no '.join(missing)}"
        return f"of {self.linears} nn.Linear none feeds one of the {self.batch_norms} nn.BatchNorm1d"


def fuse_report(model: nn.Module, filter_fn: Filter | None = None, calls: bool = False) -> FuseReport:
    """What `fuse` finds in `model` as it stands now. For a model that is not fused yet: what `fuse` would do.

    Args:
        model: is not changed.
        filter_fn: as `fuse` takes it; the chains that it leaves out are refusals here.
        calls: with a count of the calls of each chain, those of `LinearScaleBatchNorm1d` included: how many ran
            fused, and how many did not, and why.

    Raises:
        GemmNormTypeError: `model` is no `nn.Module`.

    Examples:
        >>> print(gemmnorm.fuse_report(gemmnorm.fuse(nn.Sequential(nn.Linear(128, 256), nn.BatchNorm1d(256)))))
        1 chain, fused:
          0 → 1  (128 → 256)
    """
    return report_of(model, analyse(model), filter_fn, calls)


def report_of(
    model: nn.Module,
    owners: Iterable[OwnerPlan],
    filter_fn: Filter | None = None,
    calls: bool = False,
    modules: bool = False,
) -> FuseReport:
    """The report on a model that has been analysed. `modules`: `LinearScaleBatchNorm1d` is a chain too."""
    matches: list[Match] = []
    refusals: list[Refusal] = []
    seen: set[tuple[str, str]] = set()  # an owner may have written out its children's chains among its own
    for plan in owners:
        owner = model.get_submodule(plan.path)
        names = [tuple(f"{plan.path}.{n}".strip(".") for n in (chain.linear, chain.bn)) for chain in plan.chains]
        for chain in (chain for chain, name in zip(plan.chains, names, strict=True) if name not in seen):
            if filter_fn is not None and not chosen(owner, plan, chain.linear, filter_fn):
                where = f"{plan.path}: {chain}" if plan.path else str(chain)
                refusals.append(Refusal(plan.path, where, "filter_fn leaves it out"))
                continue
            call = _call_of(owner, chain)
            scale = chain.scale if chain.scale is None else str(chain.scale)
            size = (chain.in_features, chain.out_features)
            counted = Calls.of(call) if calls and call is not None else None
            ends = (plan.path, chain.linear, scale, chain.bn, chain.activation)
            matches.append(Match(*ends, *size, call is not None, chain.views, counted))
        seen.update(names)  # type: ignore[arg-type]
        refusals += plan.refusals
    matches += [
        _match_of(path, m, calls)
        for path, m in model.named_modules()
        if (calls or modules) and isinstance(m, LinearScaleBatchNorm1d)
    ]
    linears = sum(isinstance(module, nn.Linear) for module in model.modules())
    norms = sum(isinstance(m, (nn.BatchNorm1d, nn.LazyBatchNorm1d, nn.SyncBatchNorm)) for m in model.modules())
    return FuseReport(tuple(matches), tuple(refusals), linears, norms)


def _call_of(owner: nn.Module, chain: Chain) -> ChainCall | None:
    """The call that stands for `chain` in the fused `forward` of `owner`, if there is one and it is switched on."""
    fusion = fusion_of(owner)
    if fusion is None or fusion.plan is None or chain not in fusion.plan.chains or not fusion.holds_for(owner):
        return None
    call = fusion.calls[fusion.plan.chains.index(chain)]
    return call if call.chosen else None


def _match_of(path: str, module: LinearScaleBatchNorm1d, calls: bool) -> Match:
    scale = None if module.scale is None else "scale"
    size = (getattr(module.gemm, "in_features", 0), getattr(module.gemm, "out_features", 0))  # it may be an adapter
    counted = Calls.of(module._call) if calls else None
    return Match(path, "gemm", scale, "bn", module.activation, *size, True, calls=counted)
