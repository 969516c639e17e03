"""What a plan is made for: the problem, and the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4}
C_TYPES = {"float32": "float", "float16": "gemmnorm::half", "bfloat16": "gemmnorm::bfloat16"}


@dataclass(frozen=True)
class Chip:
    """What the planner knows of a GPU. Rates are dense and per second; `bandwidth` counts bytes read plus written.

    Attributes:
        arch: compute capability × 10, e.g. 90.
        multiprocessors: number of SMs.
        bandwidth: of device memory.
        tensor_half, tensor_tf32, vector_fp32: FLOP/s for fp16/bf16, TF32, and float32 arithmetic.
    """

    arch: int = 80
    multiprocessors: int = 108
    bandwidth: float = 1.4e12
    tensor_half: float = 250e12
    tensor_tf32: float = 125e12
    vector_fp32: float = 18e12


# Rates that library kernels reach on random data, by compute capability (A100, L40S/4090, H200, B200, RTX 50). The
# H200's are measured (benchmarks/results/h200.json), the others scaled from datasheets: they serve `explain`'s
# prediction and never change a result.
CHIPS = {
    80: Chip(),
    86: Chip(86, 84, 0.8e12, 120e12, 60e12, 30e12),
    89: Chip(89, 128, 0.85e12, 260e12, 130e12, 60e12),
    90: Chip(90, 132, 4.2e12, 790e12, 415e12, 51e12),
    100: Chip(100, 148, 6.5e12, 1500e12, 750e12, 60e12),
    120: Chip(120, 170, 1.5e12, 350e12, 170e12, 90e12),
}


def chip_for(arch: int, multiprocessors: int | None = None) -> Chip:
    """The nearest known chip at or below `arch`, with the machine's own count of multiprocessors."""
    known = CHIPS[max((a for a in CHIPS if a <= arch), default=80)]
    return replace(known, arch=arch, multiprocessors=multiprocessors or known.multiprocessors)


def target(arch: int) -> str:
    """The name NVRTC and nvcc want: `sm_90a` for Hopper, whose own instructions need the `a`."""
    return f"sm_{arch}a" if arch == 90 else f"sm_{arch}"


@dataclass(frozen=True)
class Problem:
    """Everything a plan depends on. B × I times (O × I)ᵀ.

    Attributes:
        batch, in_features, out_features: B, I, O.
        dtype: of x, the weight and the product (the compute dtype).
        out_dtype: of y and its gradient: what the chain of PyTorch ops returns.
        linear_dtype, norm_dtype: of (bias, scale) and of (running statistics, γ, β).
        arithmetic: "tf32" | "float32" (float32 accuracy by any arithmetic) | "ieee" (float32 arithmetic), for float32
            operands; "native" otherwise.
        activation: canonical string or None.
        training: batch statistics (else running ones).
        save: keep what a backward needs.
        scaled: a scale is there (a tensor or a number other than 1).
        chip: the GPU; None for any other device.
        grad_dtypes: of the gradients of x and the weight, where autocast has cast those to `dtype`; () for `dtype`.
        prepared: the weight is split already (float32 by split operands, in evaluation).
        cast: which of "x" and "weight" are float32 in memory, and are to be cast to `dtype` (autocast, a forward).
    """

    batch: int
    in_features: int
    out_features: int
    dtype: str = "float32"
    out_dtype: str = "float32"
    linear_dtype: str = "float32"
    norm_dtype: str = "float32"
    arithmetic: str = "float32"
    activation: str | None = None
    training: bool = True
    save: bool = False
    scaled: bool = True
    chip: Chip | None = field(default_factory=lambda: chip_for(90))
    grad_dtypes: tuple[str, ...] = ()
    prepared: bool = False
    cast: tuple[str, ...] = ()

    @property
    def flops(self) -> float:
        """Floating-point operations of one product."""
        return 2.0 * self.batch * self.in_features * self.out_features

    @property
    def split(self) -> bool:
        """The own product of float32 operands is that of several narrow numbers for each, with float32's accuracy.

        Of two float16, or in `small_panel` of three bfloat16.
        """
        return self.dtype == "float32" and self.arithmetic == "float32"

    @property
    def gemm_rate(self) -> float:
        """FLOP/s at which the product can run."""
        chip = self.chip or CHIPS[80]
        if self.dtype in ("float16", "bfloat16"):
            return chip.tensor_half
        return chip.tensor_tf32 if self.arithmetic == "tf32" else chip.vector_fp32


def type_members(problem: Problem, letters: str = "TYLR") -> tuple[tuple[str, str], ...]:
    """Members of a kernel's `Config` for these letters of `ROLES`."""
    types = c_types(problem)
    return tuple((letter, types[letter]) for letter in letters)


def c_types(problem: Problem) -> dict[str, str]:
    """The C type of each letter in `ROLES`."""
    return {
        "T": C_TYPES[problem.dtype],
        "Y": C_TYPES[problem.out_dtype],
        "L": C_TYPES[problem.linear_dtype],
        "R": C_TYPES[problem.norm_dtype],
    }
