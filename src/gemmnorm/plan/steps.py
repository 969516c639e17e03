"""What a plan is made of: extents, buffers, products, launches, and the roles that bind arguments to tensors."""

from __future__ import annotations

from dataclasses import dataclass

from .problem import Problem

THREADS = 256  # of a block of the memory-bound kernels
GROUP_ROWS = 64  # that a row of group_mean and group_m2 stands for, in every strategy
VECTORS = ("bias", "scale", "scale_stride", "scale_value")  # roles of the bias and the scale
OWN_GEMM = ("gemm_stats_apply", "one_kernel")  # strategies whose product is not cuBLAS'


@dataclass(frozen=True)
class Extent:
    """times · ⌈batch / rows⌉ + plus, at most `limit`; just `times` where rows is 0. An exported file can print it."""

    times: int
    rows: int = 0
    limit: int = 0
    plus: int = 0

    def value(self, batch: int) -> int:
        size = self.times * (-(-batch // self.rows) if self.rows else 1) + self.plus
        return min(size, self.limit) if self.limit else size

    def cpp(self) -> str:
        """The same as a C++ expression in `batch`."""
        if self.rows:
            groups = "batch" if self.rows == 1 else f"((batch + {self.rows - 1}) / {self.rows})"
            size = groups if self.times == 1 else f"{self.times} * {groups}"
            size += f" + {self.plus}" if self.plus else ""
        else:
            size = str(self.times + self.plus)
        return f"std::min<int64_t>({size}, {self.limit})" if self.limit else size


ROWS = Extent(1, 1)  # of x
GROUPS = Extent(1, GROUP_ROWS)  # of its rows


@dataclass(frozen=True)
class Buffer:
    """A tensor that the plan allocates: role, dtype, and shape as extents.

    A matrix may have padded rows, which nobody writes behind their end: `pitch` elements from one to the next; 0 where
    they are dense. `only_for`: an output's role, where nobody needs the tensor unless that is wanted; else it is null.
    """

    role: str
    dtype: str
    shape: tuple[Extent, ...]
    pitch: int = 0
    only_for: str = ""

    @property
    def stored(self) -> tuple[Extent, ...]:
        """The extents in memory."""
        return (*self.shape[:-1], Extent(self.pitch)) if self.pitch else self.shape


@dataclass(frozen=True)
class Product:
    """A product by cuBLAS: out = left · right, either operand transposed. Roles name the tensors."""

    out: str
    left: str
    right: str
    transpose_left: bool = False
    transpose_right: bool = False


@dataclass(frozen=True)
class Map:
    """A TMA descriptor: argument role, the tensor's role, box rows and columns; 128-byte swizzle.

    Of float32 it rounds to TF32 on the way in, where the tensor cores would truncate, unless it is `exact`. Rows of a
    box beyond the matrix are slow: that of the `last` tile has the rows that are left for it, in eights. Of a tile that
    several blocks load together (`shared`) each loads as many rows. `overlap` rows of a tile are the last ones of the
    tile before. With `parity` 0 or 1 it is a map of the even or the odd rows.
    """

    role: str
    tensor: str
    rows: int
    columns: int
    exact: bool = False
    last: bool = False
    shared: int = 1
    overlap: int = 0
    parity: int | None = None

    def box(self, rows: int) -> tuple[int, int]:
        """Rows and columns of a box, for a matrix of so many rows."""
        of_tile = (rows - 1) % (self.rows - self.overlap) + 1 + self.overlap if self.last else self.rows
        return -(-of_tile // (8 * self.shared)) * 8, self.columns


OPERAND_MAPS = ("map_x", "map_last_x", "map_weight", "map_last_weight")


def operand_maps(
    x: str, weight: str, tile: tuple[int, int], columns: int, exact: bool = False, shared: int = 1, overlap: int = 0
) -> tuple[Map, ...]:
    """The maps named in `OPERAND_MAPS`, by the tensors' roles, the rows of each in a tile, and the columns of a box.

    `shared`: blocks that load a tile of x together. `overlap`: rows of the weight that two tiles load.
    """
    maps: list[Map] = []
    for name, tensor, rows, blocks, both in (("x", x, tile[0], shared, 0), ("weight", weight, tile[1], 1, overlap)):
        maps.append(Map(f"map_{name}", tensor, rows, columns, exact, shared=blocks, overlap=both))
        maps.append(Map(f"map_last_{name}", tensor, rows, columns, exact, last=True, shared=blocks, overlap=both))
    return tuple(maps)


@dataclass(frozen=True)
class Launch:
    """One kernel launch.

    Attributes:
        entry: the kernel's name, saying what it fuses.
        source: file under kernels/ that holds `function`.
        function: the device function template that the entry calls, `function<Config>(const Params&)`.
        config: members of `Config`, compile-time choices by name: constants (`kStages`) and types (`Activation`).
        params: fields of `Params`, by name; each is bound to the role of that name, unless `roles` says another.
        roles: (field, role) for those fields whose role has another name.
        parts: further files, with the types that `config` names.
        absent: fields that are null when the kernel is compiled, so that it has neither memory nor code for them.
        grid: number of blocks.
        block: threads of each.
        resident: blocks that must fit on one multiprocessor.
        shared: bytes of dynamic shared memory.
        cooperative: all blocks must run at once, because they wait for each other.
        least: blocks that the kernel needs, where an exported file meets a GPU with fewer multiprocessors.
        cluster: blocks that run together and see each other's shared memory; the grid is a multiple of it.
        maps: tensor maps among the arguments.
        numbers: arguments that the plan itself decides.
        only_for: an output's role where the launch is left out if nobody wants that output.
    """

    entry: str
    source: str
    function: str
    config: tuple[tuple[str, str | int], ...]
    params: tuple[str, ...]
    grid: Extent
    block: int = THREADS
    resident: int = 2
    shared: int = 0
    cooperative: bool = False
    least: int = 1
    cluster: int = 1
    maps: tuple[Map, ...] = ()
    numbers: tuple[tuple[str, int], ...] = ()
    only_for: str = ""
    roles: tuple[tuple[str, str], ...] = ()
    absent: tuple[str, ...] = ()
    parts: tuple[str, ...] = ()

    def member(self, name: str) -> str | int:
        """The member `name` of `Config`."""
        return dict(self.config)[name]

    @property
    def activates(self) -> bool:
        """The kernel applies the activation."""
        return any(name == "Activation" for name, _ in self.config)

    def role(self, field: str) -> str:
        """The role that a field of `Params` is bound to."""
        return dict(self.roles).get(field, field)


Step = Product | Launch

# Every role that a launch can name: C type ({T} compute, {Y} output, {L} bias and scale, {R} BatchNorm's, {X} and
# {W} of x and the weight as they are handed in) and shape.
ROLES: dict[str, tuple[str, str]] = {
    "product": ("const {T}*", "[batch, features]"),
    "offset": ("const float*", "[groups, features] or null"),
    "bias": ("const {L}*", "[features] or null"),
    "scale": ("const {L}*", "[features] or [1] or null"),
    "scale_stride": ("int", "1 for a vector, 0 for one number"),
    "scale_value": ("float", "the scale where it is a plain number"),
    "group_mean": ("float*", "[groups, features]"),
    "group_m2": ("float*", "[groups, features]"),
    "num_batches_tracked": ("long long*", "[1] or null"),
    "running_mean": ("{R}*", "[features] or null"),
    "running_var": ("{R}*", "[features] or null"),
    "momentum": ("float", "negative for the cumulative average"),
    "eps": ("float", ""),
    "mean": ("float*", "[features]"),
    "rstd": ("float*", "[features]"),
    "local_statistics": ("float*", "[2·features + 1]: mean and M2 of this rank's rows, and how many those are"),
    "gathered": ("const float*", "[ranks, 2·features + 1]: of all ranks"),
    "ranks": ("int", ""),
    "row_count": ("float*", "[features]: rows of all ranks"),
    "sent": ("const float*", "[count]: what this rank sends"),
    "received": ("float*", "[ranks, count] of all ranks, or [count], their sum"),
    "peers": ("const unsigned long long*", "[ranks]: where each rank's memory for exchanges is"),
    "rank": ("int", "this one"),
    "count": ("int", "numbers that each rank sends"),
    "limit_ms": ("int", "how long ranks wait for each other"),
    "merged_slope": ("float*", "[features]"),
    "merged_shift": ("float*", "[features]"),
    "bn_weight": ("const {R}*", "[features] or null"),
    "bn_bias": ("const {R}*", "[features] or null"),
    "y": ("{Y}*", "[batch, features]"),
    "batch": ("int", ""),
    "features": ("int", ""),
    "map_x": ("gemmnorm::TensorMap", "[batch, in_features]"),
    "map_last_x": ("gemmnorm::TensorMap", "[batch, in_features], boxes of the last tile"),
    "map_weight": ("gemmnorm::TensorMap", "[features, in_features]"),
    "map_last_weight": ("gemmnorm::TensorMap", "[features, in_features], boxes of the last tile"),
    "map_product": ("gemmnorm::TensorMap", "[batch, features]"),
    "map_y": ("gemmnorm::TensorMap", "[batch, features]"),
    "map_odd_product": (
        "gemmnorm::TensorMap",
        "[batch / 2, features], the odd rows; map_product has the others",
    ),
    "map_odd_y": ("gemmnorm::TensorMap", "likewise"),
    "map_grad_y": ("gemmnorm::TensorMap", "[batch, features]"),
    "map_grad_product": ("gemmnorm::TensorMap", "[batch, features]"),
    "stored_product": ("{T}*", "[batch, features]"),
    "counters": ("unsigned int*", "zero, and left zero"),
    "tile_counter": ("int", "which of the counters blocks take tiles by"),
    "group_panels": ("int", "panels that are worked on together"),
    "in_registers": ("int", "tiles wait for their panel there"),
    "stream_x": ("int", "whether the L2 should let go of x first"),
    "lag": ("int", "panels that are read again later"),
    "keep_product": ("int", "1: every tile of the product is written, for a backward or a later launch"),
    "in_features": ("int", ""),
    "map_gram": ("gemmnorm::TensorMap", "[2 · columns, columns] of the matrix"),
    "gram_partial": ("float*", "[slices of rows, parts, 128 · 128]: of the Gram matrix"),
    "gram_sum": ("float*", "[slices of rows, columns of the matrix]: sums of x - pivot"),
    "gram": ("gemmnorm::bfloat16*", "the Gram matrix of x - pivot, in_features to the next multiple of 128: high, low"),
    "gram_columns": ("float*", "[3, columns]: pivots, about the mean of x; sums of x - pivot; the diagonal"),
    "gram_scalars": ("float*", "[columns / 128, features / 128, 5, 128]: sums over columns, of every feature"),
    "x_pitch": ("int", "elements from one row to the next"),
    "inexact": ("int*", "whether any feature's statistics by the Gram matrix lack digits"),
    "x": ("const {T}*", "[batch, in_features]"),
    "weight": ("const {T}*", "[features, in_features]"),
    "given_x": ("const {X}*", "[batch, in_features]: x, of which cast_x is made"),
    "given_weight": ("const {W}*", "[features, in_features]: likewise"),
    "cast_x": ("{T}*", "[batch, in_features], rows padded to whole lines"),
    "cast_weight": ("{T}*", "[features, in_features], likewise"),
    "split_x": ("gemmnorm::half*", "[batch, ⌈in_features/64⌉, 2, 64]"),
    "split_weight": ("gemmnorm::half*", "[features, ⌈in_features/64⌉, 2, 64]"),
    "x_exponents": ("int*", "[batch]"),
    "weight_exponents": ("int*", "[features]"),
    "weight_amax": ("float*", "[features]: largest magnitude of each row of the weight"),
    "weight_abs_sum": ("float*", "[features]: sum of magnitudes of each row"),
    "weight_checksums": ("unsigned long long*", "[features] or null"),
    "amax_state": ("unsigned int*", "[4], after a number for each 64 features: zero, and left zero"),
    "x_rows": ("int", "of x, that are made already or begun"),
    "weight_rows": ("int", "of the weight, likewise"),
    "rows_of_block": ("int", "neighbouring rows that a block casts"),
    "chunks_converted": ("int", "chunks of 2048 columns of these rows, that are cast already"),
    "fallback_features": ("int*", "[features]: a list, in any order, of those to be computed in float32"),
    "source_x": ("const float*", "[batch, in_features]: rows that the kernel itself converts"),
    "source_weight": ("const float*", "[features, in_features]: likewise"),
    "converted_x": ("{T}*", "[batch, in_features]: what it makes of them"),
    "converted_weight": ("{T}*", "[features, in_features]: likewise"),
    "exponents": ("const int*", "[rows], of the left operand"),
    "out": ("float*", "[rows, columns]"),
    "rows": ("int", "of the left operand and the result"),
    "inner": ("int", "that is summed over"),
    "columns": ("int", "of the result"),
    "map_a": ("gemmnorm::TensorMap", "left operand, split"),
    "map_b": ("gemmnorm::TensorMap", "right operand, split"),
    "split_by_rows": ("gemmnorm::half*", "[batch, ⌈features/64⌉, 2, 64]"),
    "split_by_columns": ("gemmnorm::half*", "[batch, ⌈features/64⌉, 2, 64]"),
    "row_exponents": ("int*", "[batch]"),
    "column_exponents": ("int*", "[features]"),
    "grad_x": ("float*", "[batch, in_features]"),
    "grad_weight": ("float*", "[features, in_features]"),
    "grad_y": ("const {Y}*", "[batch, features]"),
    "group_sum": ("float*", "[groups, features]"),
    "group_dot": ("float*", "[groups, features]"),
    "group_linear": ("float*", "[groups, features] or null"),
    "mean_grad": ("float*", "[features]"),
    "slope_grad": ("float*", "[features]"),
    "grad_product": ("{T}*", "[batch, features]"),
    "grad_bias": ("{L}*", "[features] or null"),
    "grad_scale": ("float*", "[features] or null"),
    "grad_bn_weight": ("{R}*", "[features] or null"),
    "grad_bn_bias": ("{R}*", "[features] or null"),
}


@dataclass(frozen=True)
class Plan:
    """What to run, in order, and what to allocate before.

    Attributes:
        problem: what it was made for.
        phase: "forward", "backward" or "prepare", or of a synchronised call one of "statistics", "normalize", "sums",
            "gradient" and "exchange" (`ranks`).
        strategy: the one that was chosen.
        reasons: why others were not, strategy → sentence.
        steps: products and launches.
        outputs: tensors handed back.
        workspace: tensors that die with the call.
        aliases: role → role whose memory it shares (y over the product where nothing needs it later).
        counters: 32-bit numbers that the launches find zero and leave zero; `amax_state` is the last four.
        seconds: predicted time.
        floor: the product alone at the rate of cuBLAS.
    """

    problem: Problem
    phase: str
    strategy: str
    steps: tuple[Step, ...] = ()
    outputs: tuple[Buffer, ...] = ()
    workspace: tuple[Buffer, ...] = ()
    aliases: tuple[tuple[str, str], ...] = ()
    reasons: tuple[tuple[str, str], ...] = ()
    counters: int = 0
    seconds: float = 0.0
    floor: float = 0.0

    @property
    def launches(self) -> tuple[Launch, ...]:
        return tuple(step for step in self.steps if isinstance(step, Launch))

    @property
    def keeps_offsets(self) -> bool:
        """The product is kept, minus `group_mean`."""
        return self.strategy in OWN_GEMM and self.problem.training and self.problem.keep_product

    def __str__(self) -> str:
        p = self.problem
        split = p.split and self.strategy in OWN_GEMM and self.phase == "forward"
        few = any(launch.function == "small_panel" for launch in self.launches)
        arithmetic = p.arithmetic
        if split:
            arithmetic = "six bfloat16 products" if few else "three float16 products"
        kind = ("training" if p.training else "evaluation") + " " + self.phase
        where = "plain PyTorch ops" if self.strategy == "reference" else f"sm_{p.chip.arch if p.chip else 80}"
        lines = [
            f"{p.batch} × {p.in_features} → {p.out_features}, {p.dtype}"
            + (f" ({arithmetic})" if p.dtype == "float32" else "")
            + (", weight split ahead" if p.prepared else "")
            + (f", {' and '.join(p.cast)} cast" if p.cast else "")
            + (f", {' and '.join(p.copied)} copied" if p.copied else "")
            + f", {kind}: {self.strategy} ({where})"
        ]
        for step in self.steps:
            if isinstance(step, Product):
                left = step.left + ("ᵀ" if step.transpose_left else "")
                right = step.right + ("ᵀ" if step.transpose_right else "")
                lines.append(f"  {step.out} = {left} · {right} by cuBLAS")
            else:
                epilogue = dict(step.config).get("Epilogue<>")
                where = step.source + (f", {str(epilogue).removeprefix('gemmnorm::')}" if epilogue else "")
                grid = f"{step.grid.value(p.batch)} blocks of {step.block} threads"
                lines.append(f"  {step.entry} ({where}): {grid}")
        if self.seconds:
            ratio = self.seconds / self.floor
            lines.append(
                f"  predicted {self.seconds * 1e6:.1f} µs, {ratio:.2f} × the bare GEMM's {self.floor * 1e6:.1f} µs"
            )
        lines += [f"  not {name}: {reason}" for name, reason in self.reasons]
        return "\n".join(lines)
