"""The generated half of an exported file: CUDA text in its template, and `class ModelNew(Model)`.

`ModelNew` has the same generated `forward` that `fuse` puts into a model (`OwnerPlan.forward_source`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from .. import activations, plan
from ..fuse import Chain, OwnerPlan
from ..plan import OWN_GEMM
from .batches import Kind, kind_of
from .host import TEMPLATES, Site, cuda_text

_CALL = "fused_linear_scale_batch_norm"


@dataclass(frozen=True)
class Contents:
    """What a file is made of: the owners of the chains, the plans of each kind, for which target, by which strategy."""

    owners: list[OwnerPlan]
    sites: dict[Kind, Site]
    target: str
    strategy: str


def generated_text(contents: Contents) -> str:
    """Everything that follows the model's own source."""
    text = cuda_text(list(contents.sites.values()))
    arch = int(re.sub(r"\D", "", contents.target))
    own = contents.strategy in OWN_GEMM  # instructions that one compute capability has and no newer one
    return (
        (TEMPLATES / "model_new.py.txt")
        .read_text(encoding="utf-8")
        .format(
            title=f"generated for {plan.target(arch)} only" if own else f"generated for {contents.target} and newer",
            strategy=contents.strategy,
            declarations=ascii_text(text.declarations),
            kernels=ascii_text(text.kernels),
            host=ascii_text(text.host),
            functions=list(text.functions),
            unserved="!=" if own else "<",
            capability=(arch // 10, arch % 10),
            capability_text=f"{arch / 10}" + (" and no other" if own else ""),
            aligned=_ALIGNED if own else "",
            chains="\n\n".join(_chain_function(kind, site) for kind, site in contents.sites.items()),
            activations=", ".join(sorted(_activation_entries(contents.owners))),
            classes="\n\n".join(_classes(contents)),
        )
    )


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


# TMA reads the weight, from addresses that are multiples of 16.
_ALIGNED = "    weight = weight.clone() if weight.data_ptr() % 16 else weight\n"


def _chain_function(kind: Kind, site: Site) -> str:
    """The Python function that stands for the chains of one kind."""
    sizes, activation = f"{kind.in_features}, {kind.out_features}", kind.activation
    problem = f"({sizes}, torch.{site.plans[0].problem.dtype}, {activation is not None}, {site.suffix!r})"
    what = f"Linear({sizes}) -> scale -> BatchNorm1d" + (f" -> {activation}" if activation else "")
    return (
        f"def {_CALL}{site.suffix}(x, linear, bn, scale=None, activation=None):\n"
        f'    """{what}."""\n'
        f"    return _chain({problem}, x, linear, bn, scale, activation)\n"
    )


def _activation_entries(owners: list[OwnerPlan]) -> Iterator[str]:
    """Dictionary entries for the activations that chains apply as functions, each once."""
    names = {c.activation for owner in owners for c in owner.chains if c.activation_module is None}
    for name in names - {None}:
        yield f'"{name}": {activations.python_source(str(name))}'


def _classes(contents: Contents) -> list[str]:
    """A subclass for every owner, and `ModelNew`, whose constructor gives them to the modules inside."""

    def call_name(chain: Chain) -> str:
        return _CALL + contents.sites[kind_of(chain)].suffix

    found: list[str] = []
    swaps = []
    root = next((owner for owner in contents.owners if not owner.path), None)
    for index, owner in enumerate((o for o in contents.owners if o.path), start=1):
        name = f"_Fused{owner.original.__name__}{index}"
        found.append(_class(owner, name, call_name))
        swaps.append(f'self.get_submodule("{owner.path}").__class__ = {name}')
    lines = ["class ModelNew(Model):", '    """`Model` with its chains fused."""', ""]
    if swaps:
        lines += ["    def __init__(self, *args, **kwargs):", "        super().__init__(*args, **kwargs)"]
        lines += [f"        {swap}" for swap in swaps] + [""]
    if root is not None:
        lines += ["    " + line for line in root.forward_source(call_name).splitlines()]
        found = [*dict.fromkeys(root.imports), *found] if root.imports else found
    return [*found, "\n".join(lines).rstrip() + "\n"]


def _class(owner: OwnerPlan, name: str, call_name: Callable[[Chain], str]) -> str:
    text = owner.class_source(name, call_name)
    if owner.original.__module__.startswith("torch."):
        text = text.replace(f"({owner.original.__name__}):", f"(torch.nn.{owner.original.__name__}):", 1)
    return "\n".join([*owner.imports, *([""] if owner.imports else []), text])
