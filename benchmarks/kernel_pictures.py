"""One picture for each family of kernels: who computes what, by the sizes, tiles, clusters and grids of a plan."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from drawing import BLUE, GREEN, GREY, INK, ORANGE, PALE, RED, Drawing, problem

from gemmnorm import plan
from gemmnorm.plan import ROLES, Launch, Plan, Problem, gram

WIDTH = 900
COLOURS = (BLUE, ORANGE, GREEN, RED, "#e3d6f3", "#d3eef0", "#f6e7a9", GREY)


def candidate(of: Problem, phase: str, name: str, strategy: str | None = None) -> Plan:
    """The plan of the first candidate with that in its name, whether it is the planner's choice or not."""
    return next(c.plan() for _, c in plan.ranking(of, phase, strategy) if name in c.name)


def sizes(of: Problem) -> str:
    return f"{of.batch} × {of.in_features} → {of.out_features} in bf16"


def titled(height: int, title: str, below: str) -> Drawing:
    drawing = Drawing(WIDTH, height)
    drawing.text(16, 22, title, 13, bold=True)
    drawing.text(16, 40, below, 11)
    return drawing


# --- one tile of rows -------------------------------------------------------------------------------------------------


def small() -> str:
    of = replace(problem(128, 1024, 512), save=False)
    launch = plan.make_plan(of, "one_kernel").launches[0]
    assert launch.function == "small_panel"
    blocks, columns = launch.cluster, int(launch.member("kColumns"))
    panels, share, part = of.out_features // columns, of.in_features // blocks, columns // blocks
    drawing = titled(
        330, f"small/: {sizes(of)}, in one launch of {launch.grid.value(of.batch)} blocks",
        f"A cluster of {blocks} blocks owns a panel of {columns} features, of {panels}. Its blocks share out K.",
    )  # fmt: skip
    left, wide, top = 16, 300, 80
    drawing.text(left, top - 8, f"x [{of.batch}, {of.in_features}]", 11)
    drawing.text(left, top + 112, f"the panel's rows of the weight [{columns}, {of.in_features}]", 11)
    for block in range(blocks):
        x, step = left + block * wide / blocks, wide / blocks
        drawing.box(x, top, step, 80, COLOURS[block])
        drawing.text(x + step / 2, top + 36, f"block {block}", 10, "middle")
        drawing.text(x + step / 2, top + 50, f"K {block * share}–{(block + 1) * share - 1}", 9, "middle")
        drawing.box(x, top + 120, step, 26, COLOURS[block])
    middle, high = 400, 52
    drawing.text(middle - 20, top - 8, f"partial sums [{of.batch}, {columns}]", 11)
    last = 640
    drawing.text(last - 12, top - 8, "finished", 11)
    for block in range(blocks):
        y = top + block * high
        drawing.box(middle, y, 84, 40, COLOURS[block])
        drawing.text(middle + 42, y + 24, f"of block {block}", 10, "middle")
        drawing.box(last, y, 60, 40, COLOURS[block])
        drawing.text(last + 66, y + 17, f"block {block}: statistics and y", 10)
        drawing.text(last + 66, y + 31, f"of features {block * part}–{(block + 1) * part - 1}", 10)
        for source in range(blocks):
            drawing.line(middle + 84, top + source * high + 20, last, y + 20, arrow=source != block)
    drawing.line(left + wide + 8, top + 76, middle - 8, top + 76, arrow=True)
    drawing.text(left + wide + 42, top + 68, "wgmma", 10, "middle")
    drawing.text((middle + 84 + last) / 2, top + blocks * high + 10, "one exchange, over DSMEM", 10, "middle")
    return drawing.svg()


# --- the GEMM ---------------------------------------------------------------------------------------------------------


def tile_at(number: int, rows: int, panels: int, together: int) -> tuple[int, int]:
    """(row of tiles, panel) of a tile: `TileScheduler::at` in gemm/tile_scheduler.cuh."""
    group = number // (together * rows)
    first = group * together
    wide, rest = min(together, panels - first), number - first * rows
    return rest // wide, first + rest % wide


def gemm() -> str:
    of = problem(2048, 2048, 8192)
    launch = candidate(of, "forward", "co-resident", "one_kernel").launches[0]
    rows, columns = int(launch.member("kTileRows")), int(launch.member("kTileColumns"))
    across, down, grid = of.out_features // columns, of.batch // rows, launch.grid.value(of.batch)
    together = dict(launch.numbers)["group_panels"]
    waves = -(-across * down // grid)
    drawing = titled(
        430, f"gemm/: {sizes(of)}, training, one cooperative launch of {grid} blocks",
        f"y [{of.batch}, {of.out_features}] in {down} × {across} tiles of {rows} rows × {columns} features; "
        f"a colour for each of {waves} waves; outlined: the tiles of block 0; white: one panel.",
    )  # fmt: skip
    left, top, w, h = 16, 60, 13.5, 22
    own = []
    for number in range(across * down):
        m, n = tile_at(number, down, across, together)
        drawing.box(left + n * w, top + m * h, w, h, COLOURS[number // grid % len(COLOURS)])
        if number % grid == 0:
            own.append((left + n * w, top + m * h))
    panel = left + 5 * w
    drawing.parts.append(
        f'<rect x="{panel:g}" y="{top:g}" width="{w:g}" height="{down * h:g}" fill="{PALE}" fill-opacity="0.75"'
        f' stroke="{INK}" stroke-width="1.5"/>'
    )
    for x, y in own:
        drawing.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" fill="none" stroke="{INK}" stroke-width="2.5"/>'
        )
    base = top + down * h
    drawing.line(panel + w / 2, base, panel + w / 2, base + 22)
    drawing.text(
        panel, base + 34, f"a panel: its {down} tiles have one set of statistics; {together} panels at a time", 11
    )
    size, stages = 2, int(launch.member("kStages"))
    inner = 128 // size
    y = base + 70
    drawing.text(left, y, "A tile", 12, bold=True)
    drawing.box(left, y + 26, 90, 40, ORANGE)
    drawing.text(left + 45, y + 50, f"x {rows} × {inner}", 10, "middle")
    drawing.box(left, y + 76, 90, 26, ORANGE)
    drawing.text(left + 45, y + 93, f"W {columns} × {inner}", 10, "middle")
    drawing.text(left, y + 18, f"TMA, a ring of {stages} stages", 10)
    drawing.line(left + 94, y + 66, left + 140, y + 66, arrow=True)
    x = left + 146
    for consumer in range(2):
        drawing.box(x, y + 26 + consumer * 40, 200, 36, BLUE)
        first = consumer * columns // 2
        words = f"consumer {consumer}: W·xᵀ, features {first}–{first + columns // 2 - 1}"
        drawing.text(x + 100, y + 48 + consumer * 40, words, 10, "middle")
    steps = (
        ("mean and M2 of the", "tile's own rows", GREEN), ("staged; merged with the", "panel's other tiles", RED),
        ("scale, shift, activation:", "y by TMA", GREY),
    )  # fmt: skip
    x += 200
    for one, two, fill in steps:
        drawing.line(x + 4, y + 66, x + 20, y + 66, arrow=True)
        drawing.box(x + 22, y + 40, 146, 52, fill)
        drawing.text(x + 95, y + 62, one, 10, "middle")
        drawing.text(x + 95, y + 77, two, 10, "middle")
        x += 170
    epilogue = str(launch.member("Epilogue<>")).removeprefix("gemmnorm::")
    drawing.text(
        left + 146,
        y + 122,
        f"{epilogue}. The producer's warpgroup loads, and normalises earlier tiles meanwhile.",
        10,
    )
    return drawing.svg()


# --- sweeps over memory -----------------------------------------------------------------------------------------------


def moved(launch: Launch) -> tuple[list[str], list[str]]:
    """The [batch, features] matrices that a launch reads, and those that it writes."""
    whole = [name for name in launch.params if ROLES[launch.role(name)][1] == "[batch, features]"]
    reads = [name for name in whole if ROLES[launch.role(name)][0].startswith("const")]
    return reads, [name for name in whole if name not in reads]


def traffic(drawing: Drawing, left: float, top: float, title: str, found: Plan) -> None:
    """The launches of a plan, and the matrices that each moves."""
    drawing.text(left, top, title, 11, bold=True)
    passes = 0
    for i, launch in enumerate(found.launches):
        y = top + 10 + 44 * i
        reads, writes = moved(launch)
        passes += len(reads) + len(writes)
        drawing.box(left, y, 130, 34, GREY)
        drawing.text(left + 65, y + 21, launch.function, 10, "middle")
        told = [f"{verb} {', '.join(names)}" for verb, names in (("reads", reads), ("writes", writes)) if names]
        for row, words in enumerate(told or ["vectors of features"]):
            drawing.text(left + 138, y + (21 if len(told) < 2 else 14 + 14 * row), words, 10)
        if i + 1 < len(found.launches):
            drawing.line(left + 65, y + 34, left + 65, y + 44, arrow=True)
    batch, features = found.problem.batch, found.problem.out_features
    mebibytes = passes * batch * features * 2 / 2**20
    drawing.text(left, top + 28 + 44 * len(found.launches), f"{passes} passes, {mebibytes:g} MiB", 11)


def cluster(drawing: Drawing, launch: Launch, of: Problem, top: float) -> None:
    """A panel of columns, and how a cluster holds it."""
    blocks, rows = launch.cluster, int(launch.member("kRowsPerWarp"))
    columns = int(launch.member("kThreadsX")) * 8  # 16 bytes of bf16
    warps = launch.block // 32
    panels, clusters = of.out_features // columns, launch.grid.value(of.batch) // blocks
    left, high = 16, 200
    drawing.box(left, top, 220, high, PALE)
    drawing.text(left, top - 8, f"[{of.batch}, {of.out_features}]: {panels} panels of {columns} features", 11)
    drawing.text(left + 120, top + high / 2, f"{clusters} clusters, in turn", 11, "middle")
    for block in range(blocks):
        drawing.box(left + 24, top + block * high / blocks, 14, high / blocks, COLOURS[block])
        drawing.box(300, top + block * high / blocks, 90, high / blocks, COLOURS[block])
        drawing.text(345, top + (block + 0.5) * high / blocks + 4, f"block {block}", 10, "middle")
    drawing.line(left + 38, top, 300, top, dashed=True)
    drawing.line(left + 38, top + high, 300, top + high, dashed=True)
    drawing.text(300, top - 8, f"a panel, in the shared memory of {blocks} blocks", 11)
    drawing.text(300, top + high + 16, f"{of.batch // blocks} rows each: {warps} warps of {rows} rows", 10)
    drawing.text(300, top + high + 30, "column sums: registers → block → cluster (DSMEM)", 10)


def memory_bound() -> str:
    of = problem(2048, 2048, 8192)
    held = candidate(of, "forward", "128 bytes, 32 rows, 8 blocks", "cublas_folded_bn")
    apart = next(
        c.plan() for _, c in plan.ranking(of, "forward", "cublas_folded_bn") if len(c.plan().launches) == 3
    )  # fmt: skip
    drawing = titled(
        372, f"memory_bound/: {sizes(of)}, training, after cuBLAS",
        "Where a cluster holds the batch, statistics and normalisation take one launch and one reading of the product.",
    )  # fmt: skip
    cluster(drawing, held.launches[0], of, 80)
    traffic(drawing, 590, 84, "in one launch", held)
    traffic(drawing, 590, 194, "in three", apart)
    return drawing.svg()


# --- the backward -----------------------------------------------------------------------------------------------------


def backward() -> str:
    of = problem(2048, 2048, 8192)
    held = candidate(of, "backward", "cluster_gradient 128 bytes, 32 rows, 8 blocks", "one_kernel")
    apart = candidate(of, "backward", "three launches", "one_kernel")
    drawing = titled(
        390, f"backward/: {sizes(of)}, up to the product's gradient",
        "A panel of the product and of y's gradient stay in shared memory from the column sums to the gradients.",
    )  # fmt: skip
    cluster(drawing, held.launches[0], of, 80)
    traffic(drawing, 590, 84, "in one launch", held)
    traffic(drawing, 590, 194, "in three", apart)
    for i, (words, fill) in enumerate((
        ("Σg and h of each column", GREEN), ("exchanged in the cluster", RED), ("gradients of γ, β, scale", GREY),
        ("da of the same rows,", BLUE), ("the next panel's in their place", ORANGE),
    )):  # fmt: skip
        drawing.box(16 + 174 * i, 344, 166, 28, fill)
        drawing.text(16 + 174 * i + 83, 362, words, 10, "middle")
        if i:
            drawing.line(8 + 174 * i, 358, 16 + 174 * i, 358, arrow=True)
    return drawing.svg()


# --- the Gram matrix --------------------------------------------------------------------------------------------------


def gram_matrix() -> str:
    of = replace(problem(65536, 512, 4096), save=False)
    found = next(
        c.plan() for _, c in plan.ranking(of, "forward") if c.plan().launches[0].function == "gram_statistics"
    )  # fmt: skip
    parts, slices, across = gram.parts(of), gram.slices(of), -(-of.in_features // gram.TILE)
    drawing = titled(
        330, f"gram/: {sizes(of)}, training",
        "Mean and M2 of every feature before the product is multiplied, from the Gram matrix of x and the weight.",
    )  # fmt: skip
    top, left = 84, 16
    drawing.text(left, top - 10, f"x [{of.batch}, {of.in_features}]", 11)
    for i in range(slices):
        drawing.box(left, top + i * 200 / slices, 90, 200 / slices, COLOURS[i % 2])
    drawing.text(left, top + 216, f"{slices} slices of rows", 10)
    drawing.line(left + 96, top + 100, left + 146, top + 100, arrow=True)
    x = left + 154
    side = 160 / across
    drawing.text(x, top - 10, f"G [{of.in_features}, {of.in_features}]", 11)
    for i in range(across):
        for j in range(across):
            own = i <= j
            drawing.box(x + j * side, top + 20 + i * side, side, side, GREEN if own else PALE)
            if not own:
                drawing.text(x + (j + 0.5) * side, top + 24 + (i + 0.5) * side, "mirror", 9, "middle")
    drawing.text(x, top + 202, f"{parts} parts of {gram.TILE} × {gram.TILE};", 10)
    drawing.text(
        x, top + 216, f"{parts} × {slices} = {parts * slices} of {found.launches[0].grid.value(of.batch)} blocks,", 10
    )
    drawing.text(x, top + 230, "a part of a slice each", 10)
    drawing.line(x + 168, top + 100, x + 214, top + 100, arrow=True)
    x += 222
    for i, (words, fill) in enumerate((
        ("mean = w·mean(x)", ORANGE), ("M2 = wᵀ·G·w − (w·Σ(x − p))²/B", ORANGE), ("too few digits? then inexact", RED),
    )):  # fmt: skip
        drawing.box(x, top + 20 + 56 * i, 200, 44, fill)
        drawing.text(x + 100, top + 46 + 56 * i, words, 10, "middle")
    drawing.text(x, top - 10, "every feature, w a row of the weight", 11)
    drawing.line(x + 206, top + 100, x + 236, top + 100, arrow=True)
    x += 244
    drawing.text(x, top - 10, "the launches of the plan", 11)
    for i, launch in enumerate(found.launches):
        epilogue = str(dict(launch.config).get("Epilogue<>", "")).removeprefix("gemmnorm::")
        behind_gram = "inexact" in launch.params and launch.function != "gram_statistics"
        detail = " ".join(filter(None, (epilogue, "(where inexact)" if behind_gram else "")))
        drawing.box(x, top + 50 * i, 214, 38, BLUE if epilogue else GREY)
        drawing.text(x + 107, top + 50 * i + (16 if detail else 23), launch.function, 10, "middle")
        if detail:
            drawing.text(x + 107, top + 50 * i + 30, detail, 9, "middle")
    return drawing.svg()


KERNELS: dict[str, Callable[[], str]] = {
    "kernel_small.svg": small, "kernel_gemm.svg": gemm, "kernel_memory_bound.svg": memory_bound,
    "kernel_backward.svg": backward, "kernel_gram.svg": gram_matrix,
}  # fmt: skip
