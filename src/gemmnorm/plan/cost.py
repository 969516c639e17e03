"""The predicted time of a candidate, as named terms, from its structure and constants that are fitted to measurements.

Two steps, so that `benchmarks/fit_planner.py` can do the second for thousands of candidates at once: `count_*` counts
what a candidate does (waves, stages of K, bytes), in numbers; `terms` multiplies those by `Constants`, and uses nothing
but arithmetic. docs/planner.md explains the terms.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from . import cast, small, split, tables
from .gemm import Gemm, bytes_of_x, stored_dtypes
from .gradient import Backward
from .panels import ClusterPanel
from .problem import CHIPS, DTYPE_BYTES, Chip, Problem
from .small import SmallPanel
from .split import ROW_BYTES
from .tile import TALL, WIDE

FITTED = CHIPS[90]  # the GPU that the constants are fitted to, an H200
L2_SHARE = 30e6 / FITTED.l2_bytes  # of an L2, that keeps what all multiprocessors read
# Tiles and split-K of cuBLAS' kernels, of which the prediction takes the best.
CUBLAS_TILES = (
    (320, 128), (256, 128), (192, 128), (128, 128), (128, 64), (64, 64), (64, 32), (32, 32),
)  # fmt: skip
CUBLAS_SPLIT_K = (1, 2, 3, 4, 6, 8, 16, 32)  # parts of K
SHARPNESS = 4  # of `overlapped`


@dataclass(frozen=True)
class Constants:
    """Constants of the cost function for one arithmetic on one GPU: µs, or ns where the name ends so."""

    # Launches and memory.
    launch: float = 2.0  # each launch after the first, its tail included
    first: float = 3.0  # the first
    bandwidth: float = 3.9  # TB/s of device memory
    l2_bandwidth: float = 8.0  # TB/s, of tensors that fit the L2
    group_ns: float = 20.0  # of merging the statistics of one group of rows
    normalize: float = 3.0  # of a launch that normalises panels held by clusters
    normalize_row_ns: float = 30.0  # of 128 bytes of a row that a warp holds, for each panel of its block
    panel_exchange: float = 4.0  # of every further panel of a cluster: its blocks wait for each other
    # Products by cuBLAS, the library.
    library_tensor_ns: float = 0.6  # of a stage of K, for each of a tile's columns in 128 rows
    library_load_ns: float = 0.5  # of a stage of K, for each of a tile's rows and columns
    library_tile: float = 1.5  # of a tile: prologue and epilogue
    library_split_k: float = 1.0  # of sums over parts of K
    library_vector: float = 3.0  # TB/s of the weight, where x is one row
    library_vector_ns: float = 15.0  # of 128 bytes of that row
    library_transposed: float = 0.3  # share by which a stage takes longer, where the operands do not lie along K
    sustained: float = 0.1  # the share by which long products run slower (power)
    # fused_gemm.
    tensor_ns: float = 0.6  # of a stage of K, for each column in 128 rows, where tensor cores are what limits it
    load_ns: float = 0.5  # of a stage of K, for each row and column that is loaded
    misaligned: float = 1.0  # share by which that takes longer, where rows are no whole sectors
    stage_ns: float = 50.0  # of a stage of K, whatever the tile
    prologue: float = 2.0  # launch, barriers, filling of the ring
    tile: float = 0.5  # of every tile, whatever its size
    epilogue_ns: float = 0.05  # of an element of a tile
    statistics: float = 0.5  # of a tile in training, here and in small_panel
    statistics_ns: float = 0.05  # of an element in training
    swapped: float = 0.5  # of a tile of 64 rows, which is multiplied as W·xᵀ and turned on its way out
    unswapped: float = 1.0  # of a tile of fewer than 128 features in training: its sums pass through shared memory
    staged_ns: float = 0.2  # of an element that waits in shared memory, and leaves during the next tile's main loop
    store_ns: float = 0.1  # of a byte of a tile that is stored
    partial_store: float = 1.0  # share by which that takes longer, where rows are no whole sectors
    tall: float = 0.1  # share by which x from device memory takes longer in tiles of 256 rows
    border: float = 1.0  # times that two neighbours' sectors are written, where rows of y are no whole sectors
    queued_border: float = 0.3  # likewise, where blocks take tiles as they become free
    normalize_ns: float = 0.1  # of an element that is normalised out of the L2
    registers_ns: float = 0.1  # of a byte of a tile that is stored from registers rather than shared memory
    wait: float = 1.5  # of a wave for a panel's statistics, between any blocks
    cluster_wait: float = 1.0  # likewise, within a cluster
    row_tile_ns: float = 20.0  # of that, for each tile of rows
    tail: float = 2.0  # of the deferred schedule: its last panel
    # Statistics by the Gram matrix of x.
    gram: float = 6.0  # its barriers, the pivot
    gram_stage_ns: float = 300.0  # of 64 rows of a block's part
    gram_tile: float = 1.5  # of a block's tile of features: its sums
    gram_square_ns: float = 300.0  # of 64 × 64 elements of the matrix, for 128 features
    # Conversion of operands.
    block_ns: float = 3.0  # of a block of the launch that converts rows
    inside_row_ns: float = 3.0  # likewise, by the kernel itself
    inside: float = 1.0  # TB/s of conversion by the kernel itself
    begin_inside: float = 2.0  # of the barriers that this takes
    fallback: float = 2.0  # of the launch that looks for features to compute again
    # small_panel.
    small_prologue: float = 3.0
    small_stage_ns: float = 150.0  # of a block's stage of K
    small_alone_ns: float = 20.0  # of that, for a block that shares K with no other
    small_column_ns: float = 1.0  # of a stage of K, for each column
    small_loads: float = 6.0  # TB/s, what all blocks together load from the L2
    exchange: float = 0.5  # within a cluster
    exchange_block_ns: float = 100.0  # of that, for each block
    small_finish_ns: float = 30.0  # of a column that a block finishes, of all rows of its tile
    # Backward.
    gradient: float = 3.0  # of a launch up to the product's gradient, by clusters
    gradient_row_ns: float = 20.0  # of 128 bytes of a row that a warp holds, for each panel of its block
    persistent_gradient: float = 5.0  # of a launch up to the product's gradient by blocks that take turns
    split_stage: float = 0.7  # of a stage of K in a product of split operands
    split_products: float = 4.0  # of the two launches


Counted = dict[str, Any]  # name → number; an array of them where candidates are fitted
Form = Callable[[Mapping[str, Any], Constants], dict[str, Any]]  # what is counted, constants → the terms


def arithmetic_of(problem: Problem) -> str:
    """The name of its constants."""
    wide = "float32" if problem.arithmetic != "tf32" else "tf32"
    return "cast" if problem.cast else "half" if DTYPE_BYTES[problem.dtype] == 2 else wide


@functools.cache
def _fitted() -> dict[str, Constants]:
    found = tables.constants()
    names = {field.name for field in fields(Constants)}
    return {
        arithmetic: Constants(**{name: value for name, value in values.items() if name in names})
        for arithmetic, values in found.items()
    }


def constants(problem: Problem) -> Constants:
    """The constants fitted, with the bandwidth of the problem's GPU for an H200's."""
    return _constants(arithmetic_of(problem), problem.chip or FITTED)


@functools.cache
def _constants(arithmetic: str, chip: Chip) -> Constants:
    return scaled(_fitted()[arithmetic], chip)


def scaled(constants: Constants, chip: Chip) -> Constants:
    """An H200's constants, for another GPU."""
    return replace(constants, bandwidth=constants.bandwidth * chip.bandwidth / FITTED.bandwidth)


def kept_by_l2(problem: Problem, nbytes: float) -> float:
    """The share of so many bytes, which all multiprocessors read, that the L2 keeps."""
    return min(1.0, L2_SHARE * (problem.chip or FITTED).l2_bytes / max(nbytes, 1.0))


def overlapped(a: Any, b: Any) -> Any:
    """The time of two things that run beside each other: about the longer one's."""
    return (a**SHARPNESS + b**SHARPNESS) ** (1 / SHARPNESS)


def _smaller(a: Any, b: Any) -> Any:
    return (a + b - abs(a - b)) / 2


# --- what is counted --------------------------------------------------------------------------------------------------


def _pass(problem: Problem, counted: Counted, nbytes: float, resident: float) -> None:
    """A pass over so many bytes, of a tensor of `resident` bytes: part of it is still in the L2."""
    near = kept_by_l2(problem, resident)
    counted["launches"] += 1
    counted["near_bytes"] += near * nbytes
    counted["far_bytes"] += (1 - near) * nbytes


def empty() -> Counted:
    names = ("launches", "near_bytes", "far_bytes", "converted_bytes", "converted_blocks", "groups")
    return dict.fromkeys(names, 0.0)


def count_product(problem: Problem, rows: int, columns: int, inner: int, out_dtype: str = "") -> Counted:
    """A product by cuBLAS: for each tile and number of parts of K, waves and stages. `out_dtype`: if another one."""
    blocks, size = (problem.chip or CHIPS[90]).multiprocessors, DTYPE_BYTES[problem.dtype]
    # Steps of K without tensor cores: 32 bytes predict cuBLAS' times best, its kernels were not looked at.
    stage_bytes = 32 if arithmetic_of(problem) == "float32" else ROW_BYTES
    steps = -(-inner * size // stage_bytes)
    options = []
    for tile in CUBLAS_TILES:
        tiles = -(-rows // tile[0]) * -(-columns // tile[1])
        for parts in CUBLAS_SPLIT_K:
            waves = -(-tiles * parts // blocks)
            options += [float(waves), waves * -(-steps // parts) * stage_bytes / ROW_BYTES]
    nbytes = size * (rows * inner + columns * inner) + DTYPE_BYTES[out_dtype or problem.dtype] * rows * columns
    return {
        "options": tuple(options),
        "transposed": 0.0,
        "product_bytes": nbytes,
        "result_bytes": 4.0 * rows * columns,
        "vector_bytes": 1.0 * size * inner * columns if rows == 1 else 1e15,  # else it is not one: never the best
        "vector_stages": float(-(-inner * size // ROW_BYTES)),
    }


def count_products(problem: Problem) -> Counted:
    """The products of a backward. Their operands do not lie along K, as `wgmma` asks of TF32 and not of 16 bits."""
    b, i, o = problem.batch, problem.in_features, problem.out_features
    of_x, of_weight = problem.grad_dtypes or (problem.dtype, problem.dtype)
    transposed = {"transposed": float(arithmetic_of(problem) == "tf32")}
    return {
        "by_x": count_product(problem, b, i, o, of_x) | transposed,
        "by_weight": count_product(problem, o, i, b, of_weight) | transposed,
    }


def _convert(counted: Counted, blocks: float, nbytes: float) -> None:
    """A pass that converts rows."""
    counted["launches"] += 1
    counted["converted_blocks"] += blocks
    counted["converted_bytes"] += nbytes


def count_cast(problem: Problem, counted: Counted, x_rows: int, weight_rows: int, columns: int) -> None:
    """The pass that casts or copies operands before a product."""
    rows, each = {"x": x_rows, "weight": weight_rows}, cast.rows_of_block(columns)
    if problem.made:
        nbytes = sum(rows[name] * columns * cast.converted_bytes(problem, name) for name in problem.made)
        _convert(counted, sum(-(-rows[name] // each) for name in problem.made), nbytes)


def count_split(counted: Counted, rows: int, columns: int) -> None:
    """The pass that splits rows of float32."""
    _convert(counted, -(-rows // split.rows_of_block(columns)), 8.0 * rows * columns)


def count_cublas(problem: Problem, panel: ClusterPanel | None) -> Counted:
    """`cublas_folded_bn`: the product, statistics, their merge, normalisation; or all of those by clusters."""
    counted = (
        empty()
        | {"panels": 0.0, "held_rows": 0.0, "exchanges": 0.0}
        | count_product(problem, problem.batch, problem.out_features, problem.in_features)
    )
    elements, size = problem.batch * problem.out_features, DTYPE_BYTES[problem.dtype]
    count_cast(problem, counted, problem.batch, problem.out_features, problem.in_features)
    if panel is not None:
        counted |= {"panels": 1.0, **_held(problem, panel)}
    elif problem.training:
        _pass(problem, counted, size * elements, size * elements)
        counted["launches"] += 1
        counted["groups"] = -(-problem.batch // 64)
    _pass(problem, counted, (size + DTYPE_BYTES[problem.out_dtype]) * elements, size * elements)
    return counted


def misaligned_loads(problem: Problem) -> float:
    """How often `Constants.misaligned` counts: not at all, once where x is in the L2, twice where it is not."""
    return cast.misaligned(problem) * (2 - kept_by_l2(problem, bytes_of_x(problem)))


def count_gemm(problem: Problem, gemm: Gemm) -> Counted:
    """`fused_gemm` with all that stands before and after it."""
    tile, counted = gemm.tile, empty()
    blocks = (problem.chip or CHIPS[90]).multiprocessors
    (rows, panels), size = tile.counts(problem, gemm.sharing), DTYPE_BYTES[problem.dtype]
    out_size, elements = DTYPE_BYTES[problem.out_dtype], problem.batch * problem.out_features
    deferred, co_resident = gemm.schedule == "deferred", gemm.schedule == "co-resident"
    statistics = gemm.schedule in ("statistics", "exact-statistics")
    waves = -(-panels // gemm.panels) if co_resident else -(-rows * panels // blocks)
    of_tile = tile.rows * tile.columns
    staged = co_resident and tile.waits and not gemm.in_registers
    # The operands from device memory: x again for every group of panels where the L2 does not keep it.
    of_x, of_weight = problem.batch * problem.in_features * size, problem.out_features * problem.in_features * size
    panel_groups = -(-panels // gemm.group_panels)
    # In turns: of twice what the L2 keeps nothing is left when its turn comes again.
    again = (panel_groups - 1) * (1 - max(0.0, 2 * kept_by_l2(problem, of_x) - 1))
    stores = sum(DTYPE_BYTES[dtype] for dtype in stored_dtypes(problem, gemm.schedule))  # bytes of an element
    traffic = of_x * (1 + again) + of_weight + elements * stores
    partial, high = gemm.partial_sectors(problem), tile.rows / WIDE
    border = partial * 2 * cast.SECTOR_BYTES * problem.batch * (panels - 1)  # two sectors of each row of each border
    last = 0.0
    if deferred:  # the product again, once the last tile of its panel is there; of the last group beside nothing
        together = gemm.group_panels * tile.step * problem.batch * size
        traffic += elements * size * (1 - kept_by_l2(problem, together))
        last = float(max(min(gemm.group_panels, panels) * rows - blocks, 0) * of_tile)
    x_rows = min(gemm.x_rows, problem.batch)
    columns = min(gemm.chunks * cast.COLUMNS, problem.in_features)
    inside = inside_rows = 0.0
    if problem.made:
        count_cast(problem, counted, x_rows, gemm.weight_rows, columns)
        for name, rows_of, before in (("x", problem.batch, x_rows), ("weight", problem.out_features, gemm.weight_rows)):
            left = (rows_of - before * columns / problem.in_features) * (name in problem.made)
            inside += cast.converted_bytes(problem, name) * problem.in_features * left
            inside_rows += left
    elif problem.split:
        weight_rows = 0 if problem.prepared else gemm.weight_rows
        count_split(counted, x_rows + weight_rows, problem.in_features)
        every = problem.batch + (0 if problem.prepared else problem.out_features)
        inside_rows = every - x_rows - weight_rows
        inside = 8.0 * problem.in_features * inside_rows
    if statistics:
        counted["launches"] += 1
        counted["groups"] = -(-problem.batch // tile.group_rows)
    if gemm.schedule == "statistics":
        _pass(problem, counted, (size + out_size) * elements, size * elements)
    return counted | {
        "waves": waves,
        "stages": waves * tile.steps(problem),
        "trained": waves * problem.training,
        "statistics": waves * of_tile * problem.training,
        "staged": (waves - 1) * of_tile * staged,
        "swapped": float(waves * (tile.rows < 128)),
        "unswapped": float(waves * (not tile.swapped) * problem.training),
        "width": of_tile / 128,
        "loaded": (tile.rows / gemm.sharing + tile.columns) * tile.planes,
        "products": 3 if tile.planes == 2 else 1,
        "tile_elements": waves * of_tile,
        "tile_bytes": (1 if staged else waves) * of_tile * stores,
        "normalized": max(waves * of_tile - last / blocks, 0.0) if deferred else 0,
        "last_bytes": last * (size + out_size),
        "register_bytes": waves * of_tile * out_size * (gemm.in_registers or (co_resident and not tile.waits)),
        "grid_waits": (1 if staged else waves) * (co_resident and gemm.cluster == 1),
        "cluster_waits": float(co_resident and gemm.cluster > 1),
        "row_tiles": rows * (1 if staged else waves) * co_resident,
        "deferred": float(deferred),
        "traffic": traffic,
        "inside_bytes": inside,
        "inside_rows": inside_rows,
        "misaligned": misaligned_loads(problem),
        "tall_bytes": of_x * (1 + again) * (tile.rows == TALL),
        "border_bytes": border * high * (not gemm.queued),
        "queued_border_bytes": border * high**2 * gemm.queued,  # by the square, which predicts high tiles best
        "partial": float(partial > 0),
        "inside": float(inside > 0),
        "split": float(problem.split),
    }


def count_small(problem: Problem, panel: SmallPanel) -> Counted:
    """`small_panel`."""
    counted, size = empty(), DTYPE_BYTES[problem.dtype]
    count_cast(problem, counted, problem.batch, problem.out_features, problem.in_features)
    panels, tiles = -(-problem.out_features // panel.columns), small.row_tiles(problem)
    cluster = panel.cluster_size(problem)
    at_once = small.clusters_at_once((problem.chip or CHIPS[90]).multiprocessors, cluster)
    waves = -(-panels * tiles * panel.blocks // (max(at_once, 1) * cluster))
    steps = -(-problem.in_features * size // ROW_BYTES)
    rows = min(problem.batch, small.TILE_ROWS)
    trips = (panel.blocks > 1) + (problem.training and tiles > 1)
    nbytes = size * problem.in_features * (problem.batch + problem.out_features)
    return counted | {
        "waves": waves,
        "stages": waves * -(-steps // panel.blocks),
        "trained": waves * problem.training,
        "columns": panel.columns,
        "alone": float(panel.blocks == 1),
        "exchanges": waves * trips,
        "exchange_blocks": waves * panel.blocks * (panel.blocks > 1),
        "finished": waves * panel.columns / panel.blocks,
        "small_bytes": nbytes,
        "small_loaded": panels * tiles * size * problem.in_features * (rows + panel.columns),
        "misaligned": cast.misaligned(problem),
    }


def _held(problem: Problem, panel: ClusterPanel) -> Counted:
    """Panels that clusters hold: what a warp works through, in rows of 128 bytes; exchanges between blocks but one."""
    grid, resident = panel.launched(problem, 2)
    rounds = -(-(-(-problem.out_features // panel.columns) * panel.cluster) // grid.times)
    at_once = min(resident, -(-grid.times // (problem.chip or CHIPS[90]).multiprocessors))
    return {
        "held_rows": rounds * at_once * panel.rows * panel.lanes / 8,
        "exchanges": float((rounds - 1) * (panel.cluster > 1)),
    }


def count_backward(problem: Problem, backward: Backward) -> Counted:
    """The gradient of the product, and two products."""
    counted, size = empty(), DTYPE_BYTES[problem.dtype]
    b, i, o = problem.batch, problem.in_features, problem.out_features
    blocks = (problem.chip or CHIPS[90]).multiprocessors
    counted |= count_products(problem)
    once = b * o * (size + DTYPE_BYTES[problem.out_dtype])
    held = {"held_rows": 0.0, "exchanges": 0.0}
    if backward.panel is not None:
        held = _held(problem, backward.panel)
    elif backward.kernel == "persistent_gradient":
        _pass(problem, counted, once, once)
    else:
        _pass(problem, counted, once, once)
        counted["launches"] += 1
        counted["groups"] = -(-b // 64)
    _pass(problem, counted, once + b * o * size, 1e12 if backward.kernel == "cluster_gradient" else once)
    if backward.split_products:
        _convert(counted, -(-(b + o) // split.rows_of_block(i)), 4.0 * (b + 2 * o) * i)
        count_split(counted, b, i)
        _convert(counted, -(-b // split.rows_of_block(o)), 12.0 * b * o)
    return counted | {
        **held,
        "turns": float(backward.kernel == "persistent_gradient"),
        "split_products": float(backward.split_products),
        "cluster": float(backward.kernel == "cluster_gradient"),
        "split_stages": sum(
            -(-(-(-rows // 128) * -(-i // 128)) // blocks) * -(-inner // 64) for rows, inner in ((b, o), (o, b))
        ),
    }


# --- what it takes ----------------------------------------------------------------------------------------------------


def product_time(n: Mapping[str, Any], c: Constants) -> Any:
    """Time of a product by cuBLAS: its best tile and split-K, or the bytes moved."""
    best = n["vector_bytes"] / c.library_vector / 1e6 + n["vector_stages"] * c.library_vector_ns / 1e3
    at, load = iter(n["options"]), c.library_load_ns
    for rows, columns in CUBLAS_TILES:
        stage = overlapped(c.library_tensor_ns * rows * columns / 128, load * (rows + columns)) / 1e3
        stage = stage * (1 + c.library_transposed * n["transposed"])
        for parts in CUBLAS_SPLIT_K:
            waves, stages = next(at), next(at)
            found = waves * c.library_tile + stages * stage
            if parts > 1:
                found = found + c.library_split_k + parts * n["result_bytes"] / c.l2_bandwidth / 1e6
            best = _smaller(best, found)
    return overlapped(_throttled(best, c), n["product_bytes"] / c.bandwidth / 1e6)


def products_time(n: Mapping[str, Any], c: Constants) -> Any:
    """Time of a backward's products."""
    return 2 * c.first + product_time(n["by_x"], c) + product_time(n["by_weight"], c)


def _throttled(time: Any, c: Constants) -> Any:
    """Long products run slower: the clock falls within some hundred microseconds."""
    return time * (1 + c.sustained * time / (time + 200.0))


def pass_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    return {
        "launches": c.launch * n["launches"],
        "passes": n["near_bytes"] / c.l2_bandwidth / 1e6 + n["far_bytes"] / c.bandwidth / 1e6,
        "merge": n["groups"] * c.group_ns / 1e3,
        "conversion": overlapped(n["converted_blocks"] * c.block_ns / 1e3, n["converted_bytes"] / c.bandwidth / 1e6),
    }


def cublas_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    panels = n["panels"] * c.normalize + n["held_rows"] * c.normalize_row_ns / 1e3 + n["exchanges"] * c.panel_exchange
    return {"product": c.first + product_time(n, c), "panels": panels, **pass_terms(n, c)}


def gemm_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    load = c.load_ns * n["loaded"] * (1 + c.misaligned * n["misaligned"])
    stage = overlapped(c.tensor_ns * n["products"] * n["width"], load) + c.stage_ns
    main = _throttled(n["stages"] * stage / 1e3, c)
    main = overlapped(main, n["inside_bytes"] / c.inside / 1e6 + n["inside_rows"] * c.inside_row_ns / 1e3)
    main = overlapped(main, n["staged"] * c.staged_ns * (1 + c.partial_store * n["partial"]) / 1e3)
    main = overlapped(main, n["normalized"] * c.normalize_ns / 1e3)
    leaving = n["register_bytes"] * c.registers_ns + n["statistics"] * c.statistics_ns
    leaving = leaving + n["tile_elements"] * c.epilogue_ns
    leaving = leaving + n["tile_bytes"] * c.store_ns * (1 + c.partial_store * n["partial"])
    epilogue = leaving / 1e3 + n["waves"] * c.tile + n["swapped"] * c.swapped
    epilogue = epilogue + n["unswapped"] * c.unswapped + n["trained"] * c.statistics
    far = n["traffic"] + c.tall * n["tall_bytes"]
    far = far + c.border * n["border_bytes"] + c.queued_border * n["queued_border_bytes"]
    beyond = overlapped(main + epilogue, far / c.bandwidth / 1e6) - main - epilogue
    return {
        "prologue": c.first + c.prologue,
        "main loop": main,
        "memory": beyond,
        "epilogue": epilogue,
        "wait": n["grid_waits"] * c.wait + n["cluster_waits"] * c.cluster_wait + n["row_tiles"] * c.row_tile_ns / 1e3,
        "last panel": n["deferred"] * c.tail + n["last_bytes"] / c.l2_bandwidth / 1e6,
        "conversion inside": n["inside"] * c.begin_inside,
        "fallback": n["split"] * c.fallback,
        **pass_terms(n, c),
    }


def small_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    main = n["stages"] * (c.small_stage_ns + c.small_alone_ns * n["alone"] + c.small_column_ns * n["columns"]) / 1e3
    main = overlapped(main, n["small_loaded"] / c.small_loads / 1e6 * (1 + c.misaligned * n["misaligned"]))
    return {
        "prologue": c.first + n["waves"] * c.small_prologue,
        "main loop": overlapped(main, n["small_bytes"] / c.bandwidth / 1e6),
        "exchange": n["exchanges"] * c.exchange + n["exchange_blocks"] * c.exchange_block_ns / 1e3,
        "epilogue": n["finished"] * c.small_finish_ns / 1e3 + n["trained"] * c.statistics,
        **pass_terms(n, c),
    }


def backward_terms(n: Mapping[str, Any], c: Constants) -> dict[str, Any]:
    split = c.split_products + _throttled(n["split_stages"] * c.split_stage, c)
    return {
        "products": n["split_products"] * split + (1 - n["split_products"]) * products_time(n, c),
        "gradient": n["cluster"] * c.gradient
        + n["held_rows"] * c.gradient_row_ns / 1e3
        + n["exchanges"] * c.panel_exchange
        + n["turns"] * c.persistent_gradient,
        **pass_terms(n, c),
    }
