"""What is measured: the named cases, the suites made of them, and the eager chain that is the peer.

A *cell* is one (case, precision, autocast, phase). Everything in a cell is timed side by side; the result file has one
row per cell and strategy.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

PRECISIONS = ("fp32", "tf32", "bf16", "fp16")
PHASES = ("train_fwd", "eval_fwd", "train_fwd_bwd")
DTYPES = {"fp32": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """A chain Linear → × scale → BatchNorm1d → activation of fixed sizes: x [batch, in_features]."""

    name: str
    batch: int
    in_features: int
    out_features: int
    bias: bool = True
    scale: bool = True
    activation: str | None = None

    @property
    def small(self) -> bool:
        """So small that launches decide: such a case is also timed as a CUDA graph."""
        return 2.0 * self.batch * self.in_features * self.out_features < 6e9

    def __str__(self) -> str:
        return f"{self.name} {self.batch}×{self.in_features}→{self.out_features}"


@dataclass(frozen=True)
class Cell:
    """One column of conditions: a case, how its numbers are represented, and what is asked for."""

    case: Case
    precision: str
    autocast: bool
    phase: str

    @property
    def param_dtype(self) -> torch.dtype:
        """dtype of x and the parameters: under autocast float32, else the precision's own."""
        return torch.float32 if self.autocast else DTYPES[self.precision]

    @property
    def label(self) -> str:
        """The precision as the tables call it; `amp` is bf16 autocast over float32 parameters."""
        return "amp" if self.autocast else self.precision

    def __str__(self) -> str:
        return f"{self.case.name} {self.label} {self.phase}"


_PROJECTOR = Case("projector", 2048, 2048, 8192, bias=False, scale=False, activation="relu")
# Products that cost less than writing them.
_THIN = (
    Case("thin64", 131072, 64, 64, activation="relu"),
    Case("thin1024", 65536, 128, 1024, activation="relu"),
    Case("thin9856", 59904, 112, 9856, activation="relu"),
)
# Few rows; rows of x that are no whole lines of memory, and the next size where they are.
_SHAPES = (
    *(Case(f"rows{rows}", rows, 4096, 4096) for rows in (64, 128, 256, 512)),
    *(Case(f"pitch{wide}", 8192, wide, 2048) for wide in (1000, 1024, 4040, 4096)),
)
CASES: dict[str, Case] = {
    c.name: c
    for c in (
        Case("kb33", 1024, 8192, 8192),
        Case("kb39", 16384, 4096, 4096),
        _PROJECTOR,
        replace(_PROJECTOR, name="projector256", batch=256),
        Case("mid", 512, 2048, 2048),
        Case("small", 256, 512, 512),
        Case("v0", 128, 1024, 512),
        *_THIN,
        *_SHAPES,
        # What a CPU times in a moment; the same chains, and one of odd sizes.
        Case("tiny", 64, 128, 96),
        Case("tiny_projector", 96, 128, 256, bias=False, scale=False, activation="relu"),
        Case("tiny_odd", 37, 65, 51),
    )
}
_GPU_CASES = ("kb33", "kb39", "projector", "projector256", "mid", "small", "v0")
_ALL = (("fp32", False), ("tf32", False), ("bf16", False), ("fp16", False), ("bf16", True))

SUITES: dict[str, tuple[Cell, ...]] = {
    "cpu": tuple(
        Cell(CASES[name], precision, autocast, phase)
        for name in ("tiny", "tiny_projector", "tiny_odd", "v0", "mid")
        for precision, autocast in (("fp32", False), ("bf16", False))
        for phase in PHASES
    ),
    "h200": tuple(
        Cell(CASES[name], precision, autocast, phase)
        for name in _GPU_CASES
        for precision, autocast in _ALL
        for phase in PHASES
    ),
    "shapes": tuple(
        Cell(case, "bf16", False, phase)
        for cases, phases in ((_THIN, PHASES), (_SHAPES, PHASES[:1]))
        for case in cases
        for phase in phases
    ),
    "quick": tuple(
        Cell(CASES[name], precision, False, phase)
        for name in ("projector256", "v0")
        for precision in ("fp32", "tf32", "bf16")
        for phase in PHASES
    ),
}


def select(
    suite: str,
    cases: Sequence[str] | None = None,
    precisions: Sequence[str] | None = None,
    phases: Sequence[str] | None = None,
) -> list[Cell]:
    """The cells of `suite` that pass every filter; `amp` is the precision of the autocast cells.

    Without a `suite` that has it, a case named in `cases` is added in every precision and phase of the suite's others:
    `--suite cpu --case kb33` works.
    """
    cells = list(SUITES[suite])
    for name in cases or ():
        if name not in {c.case.name for c in cells}:
            conditions = dict.fromkeys((c.precision, c.autocast, c.phase) for c in cells)
            cells += [Cell(CASES[name], *condition) for condition in conditions]
    return [
        c
        for c in cells
        if (not cases or c.case.name in cases)
        and (not precisions or c.label in precisions)
        and (not phases or c.phase in phases)
    ]


def strategies_to_run(
    verdicts: Mapping[str, str | None], asked: Sequence[str] | None
) -> tuple[list[str], dict[str, str]]:
    """The strategies to time, and the reason for every other one.

    Args:
        verdicts: for every strategy None where it applies, else the reason why not (`plan.applicable`).
        asked: only these; None for every one that applies, the reference only where nothing else does.
    """
    refused = {s: why for s, why in verdicts.items() if why is not None and (asked is None or s in asked)}
    able = [s for s, why in verdicts.items() if why is None and (asked is None or s in asked)]
    if asked is None and able != ["reference"]:
        able = [s for s in able if s != "reference"]
    return able, refused


class EagerChain(nn.Module):
    """The chain with every optional part optional: the definition that everything is compared with."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        self.gemm = nn.Linear(case.in_features, case.out_features, bias=case.bias)
        if case.scale:
            self.scale = nn.Parameter(torch.randn(case.out_features))
        self.bn = nn.BatchNorm1d(case.out_features)
        self.has_scale = case.scale
        self.relu = case.activation == "relu"

    def forward(self, x: Tensor) -> Tensor:
        """x [batch, in_features] → y [batch, out_features]."""
        z = self.gemm(x)
        if self.has_scale:
            z = z * self.scale
        y: Tensor = self.bn(z)
        return torch.relu(y) if self.relu else y


@dataclass
class Prepared:
    """The tensors of a cell: the eager module, x [batch, in] and the upstream gradient g [batch, out] of the loss."""

    eager: EagerChain
    x: Tensor
    g: Tensor


def prepare(cell: Cell, device: torch.device, seed: int = 0) -> Prepared:
    """Draw weights and data. Everything random, the affine part and the running statistics included: zeros and ones
    run faster on a GPU than data do, and would hide errors."""
    generator = torch.Generator(device).manual_seed(seed)
    torch.manual_seed(seed)
    case = cell.case
    with torch.device(device):
        eager = EagerChain(case)

    def normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, device=device)

    def uniform(n: int) -> Tensor:
        return torch.rand(n, generator=generator, device=device) + 0.5

    with torch.no_grad():
        eager.bn.weight.copy_(uniform(case.out_features))
        eager.bn.bias.copy_(0.1 * normal(case.out_features))
        assert eager.bn.running_mean is not None and eager.bn.running_var is not None
        eager.bn.running_mean.copy_(0.1 * normal(case.out_features))
        eager.bn.running_var.copy_(uniform(case.out_features))
    eager = eager.to(cell.param_dtype).train(cell.phase != "eval_fwd")
    x = normal(case.batch, case.in_features).to(cell.param_dtype)
    g = normal(case.batch, case.out_features)
    # With a scale the chain's last tensor operand is a float32 parameter, so the output is float32; without, half.
    out_dtype = torch.bfloat16 if cell.autocast and not case.scale else cell.param_dtype
    x.requires_grad_(cell.phase == "train_fwd_bwd")
    return Prepared(eager, x, g.to(out_dtype))


@contextlib.contextmanager
def tf32(enabled: bool) -> Iterator[None]:
    """Allow TF32 for float32 matrix products in the body, and put everything back as it was.

    PyTorch 2.9 has two switches for this, which must not contradict each other: reading one of them raises after the
    other was set alone, and `torch.compile` reads both. Setting the older one sets both. Putting it back would leave
    the newer one at `"ieee"` in place of `"none"`, so that one is put back after it.
    """
    matmul: Any = torch.backends.cuda.matmul
    new = getattr(matmul, "fp32_precision", None)
    try:
        old = bool(matmul.allow_tf32)
    except RuntimeError:  # the caller has set the newer one alone
        matmul.fp32_precision = "tf32" if enabled else "none"
        try:
            yield
        finally:
            matmul.fp32_precision = new
        return
    if enabled != old:
        matmul.allow_tf32 = enabled
        if new is not None and not enabled:
            matmul.fp32_precision = "none"  # the default: float32 accuracy by whatever arithmetic
    try:
        yield
    finally:
        if enabled != old:
            matmul.allow_tf32 = old
            if new is not None:
                matmul.fp32_precision = new


@contextlib.contextmanager
def blas_backend(name: str | None) -> Iterator[None]:
    """Run the body on torch's BLAS backend `name` ("cublas" or "cublaslt"); None, or an old torch, changes nothing."""
    switch = getattr(torch.backends.cuda, "preferred_blas_library", None)
    if name is None or switch is None:
        yield
        return
    previous = switch()
    switch(name)
    try:
        yield
    finally:
        switch(previous)


def autocast(cell: Cell, device: torch.device) -> AbstractContextManager[object]:
    """Autocast as a training loop uses it: around the forward only, entered for each call.

    Entered once around many calls it would keep the half-precision copy of the weight from the first of them.
    """
    if cell.autocast:
        return torch.autocast(device.type, dtype=torch.bfloat16)
    return contextlib.nullcontext()


@contextlib.contextmanager
def conditions(cell: Cell) -> Iterator[None]:
    """What holds around the whole cell: TF32 or not, gradients or not."""
    with tf32(cell.precision == "tf32"), torch.set_grad_enabled(cell.phase == "train_fwd_bwd"):
        yield
