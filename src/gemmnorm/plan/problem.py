"""What a plan is made for: the problem, and the GPU."""

from __future__ import annotations

from dataclasses import dataclass, field

DTYPE_BYTES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8, "int64": 8, "int32": 4}
C_TYPES = {"float32": "float", "float16": "gemmnorm::half", "bfloat16": "gemmnorm::bfloat16"}

# Activations whose derivative takes few registers of a kernel, or many: what `resident` of a launch allows for.
FEW_REGISTERS, MANY_REGISTERS = ("identity", "relu", "leaky_relu", "hardtanh"), ("gelu",)


@dataclass(frozen=True)
class Chip:
    """What the planner knows of a GPU.

    Attributes:
        arch: compute capability × 10, e.g. 90.
        multiprocessors: number of SMs.
        bandwidth: of device memory by its clock and width, TB/s.
        l2_bytes: size of the L2.
    """

    arch: int
    multiprocessors: int
    bandwidth: float
    l2_bytes: int


# By compute capability: A100, RTX 3090, RTX 4090, H200, B200, RTX 5090.
CHIPS = {
    arch: Chip(arch, multiprocessors, bandwidth, l2_mib << 20)
    for arch, multiprocessors, bandwidth, l2_mib in (
        (80, 108, 2.04, 40), (86, 82, 0.94, 6), (89, 128, 1.01, 72),
        (90, 132, 4.81, 60), (100, 148, 8.0, 126), (120, 170, 1.79, 96),
    )
}  # fmt: skip


def chip_for(arch: int, multiprocessors: int | None = None, bandwidth: float = 0.0, l2_bytes: int = 0) -> Chip:
    """The nearest known chip at or below `arch`, with the machine's own figures where they are not 0."""
    known = CHIPS[max((a for a in CHIPS if a <= arch), default=80)]
    return Chip(
        arch, multiprocessors or known.multiprocessors, bandwidth or known.bandwidth, l2_bytes or known.l2_bytes
    )


def target(arch: int) -> str:
    """The name NVRTC and nvcc want: `sm_90a` for Hopper, whose own instructions need the `a`."""
    return f"sm_{arch}a" if arch == 90 else f"sm_{arch}"


@dataclass(frozen=True)
class Problem:
    """Everything a plan depends on. B × I times (O × I)ᵀ.

    Attributes:
        batch: B.
        in_features: I.
        out_features: O.
        dtype: of x, the weight and the product (the compute dtype).
        out_dtype: of y and its gradient: what the chain of PyTorch ops returns.
        linear_dtype: of bias and scale.
        norm_dtype: of running statistics, γ and β.
        arithmetic: "tf32" | "float32" (float32 accuracy by any arithmetic) | "ieee" (float32 arithmetic), for float32
            operands; "native" otherwise.
        activation: canonical string or None.
        training: batch statistics (else running ones).
        save: keep what a backward needs.
        keep_product: the product is part of that; else, in training, the backward multiplies again.
        scaled: a scale is there (a tensor or a number other than 1).
        chip: the GPU; None for any other device.
        grad_dtypes: of the gradients of x and the weight, where autocast has cast those to `dtype`; () for `dtype`.
        prepared: the weight is split already (float32 by split operands, in evaluation).
        cast: which of "x" and "weight" are float32 in memory, and are to be cast to `dtype` (autocast, a forward).
        copied: which of them have that dtype, and are to be copied into padded rows. The planner decides it.
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
    copied: tuple[str, ...] = ()
    keep_product: bool = True

    @property
    def saves_product(self) -> bool:
        """The product is kept for a backward."""
        return self.save and self.keep_product

    @property
    def made(self) -> tuple[str, ...]:
        """Which of x and the weight are multiplied as a kernel has cast or copied them."""
        return tuple(name for name in ("x", "weight") if name in self.cast or name in self.copied)

    @property
    def flops(self) -> float:
        """Floating-point operations of one product."""
        return 2.0 * self.batch * self.in_features * self.out_features

    @property
    def derivative_registers(self) -> str:
        """What the activation's derivative takes of a kernel's registers: "few", "some" or "many"."""
        name = (self.activation or "identity").partition("(")[0]
        return "few" if name in FEW_REGISTERS else "many" if name in MANY_REGISTERS else "some"

    @property
    def split(self) -> bool:
        """The own product of float32 operands is that of several narrow numbers for each, with float32's accuracy.

        Of two float16, or in `small_panel` of three bfloat16.
        """
        return self.dtype == "float32" and self.arithmetic == "float32"


def type_members(problem: Problem, letters: str = "TYLR") -> tuple[tuple[str, str], ...]:
    """Members of a kernel's `Config` for these letters of `ROLES`."""
    types = c_types(problem)
    return tuple((letter, types[letter]) for letter in letters)


def c_types(problem: Problem) -> dict[str, str]:
    """The C type of each letter in `ROLES`."""
    given = ("float32" if name in problem.cast else problem.dtype for name in ("x", "weight"))
    return dict(zip("XW", map(C_TYPES.__getitem__, given), strict=True)) | {
        "T": C_TYPES[problem.dtype],
        "Y": C_TYPES[problem.out_dtype],
        "L": C_TYPES[problem.linear_dtype],
        "R": C_TYPES[problem.norm_dtype],
    }
