"""Fits the planner's constants to measured candidates, and lists what they predict too badly (docs/planner.md).

    PYTHONPATH=src:benchmarks python benchmarks/fit_planner.py             the figures of the tables as they are
    PYTHONPATH=src:benchmarks python benchmarks/fit_planner.py --write     fits, writes plan/tables/
    PYTHONPATH=src:benchmarks python benchmarks/fit_planner.py --variants h100   what each wins (docs/variants.md)

One set of constants serves both GPUs that were measured, each with its own bandwidth, L2 and multiprocessors. `--fit`
prints what constants would predict that are fitted to one GPU alone.

Levenberg-Marquardt on the logarithms of the constants. An error is the logarithm of predicted over measured time; it
counts the less the slower a candidate is than the fastest of its problem, and once more less the mean error of its
problem, since a choice depends on that alone. A third of the problems is held out.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
import math
import re
import zlib
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import candidates as measured
import numpy as np

from gemmnorm.plan import cost, ranking, tables
from gemmnorm.plan.candidates import Candidate, candidates, with_other_group_panels
from gemmnorm.plan.problem import Problem

RESULTS = {gpu: Path(__file__).parent / "results" / f"candidates-{gpu}.json.gz" for gpu in ("h200", "h100")}
REGRET = 1.01  # of a held problem, from where the table has its measured best
GEMM = "GEMM"  # the product alone, in a row of times
GROUPING = re.compile(r"(?<=panels by )\d+")  # in a candidate's name: panels worked on together
COMPARED = 8.0  # weight of an error less the mean of its problem's


@dataclass(frozen=True)
class Row:
    """A measured problem: its candidates by name, and their microseconds."""

    problem: Problem
    kind: str
    phase: str
    held: bool
    gpu: str
    us: dict[str, float]
    bare: float

    @property
    def best(self) -> float:
        return min(self.us.values())

    @property
    def fitted(self) -> bool:
        """Two thirds of the problems; sizes go together."""
        p = self.problem
        return zlib.crc32(f"{p.batch} {p.in_features} {p.out_features}".encode()) % 3 > 0

    def candidates(self) -> list[Candidate]:
        """Those that were measured."""
        return [c for c in listed(self.problem, self.phase, kept=False) if c.name in self.us]


def listed(problem: Problem, phase: str, kept: bool = True) -> list[Candidate]:
    """What the planner knows of today: a measured candidate that it has lost counts no more."""
    every = list(candidates(problem, phase))
    every += [] if kept or phase == "forward" else candidates(replace(problem, keep_product=False), phase)
    return [c for c in every if c.refusal is None]


def times(every: Iterable[Candidate], us: dict[str, float]) -> dict[str, float]:
    """Microseconds by candidate; of one that was measured with other numbers of panels together, with the nearest."""
    alike: dict[str, list[tuple[int, float]]] = defaultdict(list)
    for name, time in us.items():
        if found := GROUPING.search(name):
            alike[GROUPING.sub("", name)].append((int(found[0]), time))
    result = {}
    for candidate in every:
        name = candidate.name
        found = GROUPING.search(name)
        near = alike.get(GROUPING.sub("", name)) if found else None
        if name in us:
            result[name] = us[name]
        elif found and near:
            wanted = int(found[0])
            result[name] = min(near, key=lambda pair: abs(math.log(pair[0] / wanted)))[1]
    return result


def rows(path: Path, kept: bool = True, step: int = 1) -> list[Row]:
    """The measurements of a file; a backward of a kept product, or of either if not `kept`.

    Of every `step`-th line only, and of those of problems that are held.
    """
    document = json.loads(gzip.decompress(path.read_bytes()))
    chip, gpu = measured.chip_of(document), document["gpu"]
    held = {(*sizes[:3], sizes[4]) for sizes in measured.HELD.values()} | {(*sizes, None) for sizes in measured.BROUGHT}
    found = []
    for line, row in enumerate(document["rows"]):
        sizes = row["batch"], row["in"], row["out"]
        is_held = (*sizes, row["activation"]) in held
        if line % step and not is_held:
            continue
        one = measured.case(
            row["kind"], sizes, row["training"], row["save"], row["vectors"], row["activation"], row["phase"]
        )
        one = measured.on(chip, one)
        bare, others = row["us"][GEMM], with_other_group_panels(one.problem) if row["phase"] == "forward" else ()
        us = {c.name: row["us"][c.name] for c in others if c.name in row["us"]}
        us |= times(listed(one.problem, row["phase"], kept), row["us"])
        found.append(Row(one.problem, row["kind"], row["phase"], is_held, gpu, us, bare))
    return [merged(same) for same in grouped(found).values()]


def everything(kept: bool = True) -> list[Row]:
    """The measurements of all GPUs."""
    return [row for path in RESULTS.values() for row in rows(path, kept)]


def grouped(every: Iterable[Row]) -> dict[tuple[Problem, str], list[Row]]:
    """Rows of one problem, which was measured with and without a bias and a scale."""
    found: dict[tuple[Problem, str], list[Row]] = defaultdict(list)
    for row in every:
        found[row.problem, row.phase].append(row)
    return found


def merged(same: Sequence[Row]) -> Row:
    """One row of several of a problem: geometric means."""

    def mean(times: Sequence[float]) -> float:
        return math.exp(sum(map(math.log, times)) / len(times))

    us = {name: mean([row.us[name] for row in same]) for name in same[0].us if all(name in row.us for row in same)}
    held = any(row.held for row in same)
    return replace(same[0], held=held, us=us, bare=mean([row.bare for row in same]))


# --- fitting ----------------------------------------------------------------------------------------------------------


@dataclass
class Batch:
    """Candidates of one form of terms and one GPU, as arrays: the problem's number, and how close to its fastest."""

    form: Any
    counted: dict[str, Any]
    us: np.ndarray
    weight: np.ndarray
    problem: np.ndarray
    near: np.ndarray
    chip: cost.Chip

    def errors(self, c: cost.Constants) -> np.ndarray:
        return np.log(sum(self.form(self.counted, cost.scaled(c, self.chip)).values()) / self.us)


def _stacked(counted: Sequence[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, first in counted[0].items():
        if isinstance(first, dict):
            found[name] = _stacked([c[name] for c in counted])
        elif isinstance(first, tuple):
            found[name] = tuple(np.array(column, float) for column in zip(*(c[name] for c in counted), strict=True))
        else:
            found[name] = np.array([c[name] for c in counted], float)
    return found


def _bare(counted: dict[str, Any], c: cost.Constants) -> dict[str, Any]:
    return {"product": c.first + cost.product_time(counted, c)}


def _bare_backward(counted: dict[str, Any], c: cost.Constants) -> dict[str, Any]:
    return {"products": cost.products_time(counted, c)}


def batches(chosen: Sequence[Row]) -> dict[str, list[Batch]]:
    """By arithmetic."""
    lists: dict[tuple[str, cost.Chip, Any], list[tuple[dict[str, Any], float, float, int, float]]] = defaultdict(list)
    for number, row in enumerate(chosen):
        p, arithmetic = row.problem, cost.arithmetic_of(row.problem)
        chip = p.chip or cost.FITTED
        for candidate in row.candidates():
            slower = row.us[candidate.name] / row.best
            if slower < 2.5:
                form, counted = candidate.counted()
                near = math.exp(-4 * (slower - 1))
                lists[arithmetic, chip, form].append((counted, row.us[candidate.name], 0.1 + near, number, near))
        if row.phase == "forward":
            counted = cost.count_product(p, p.batch, p.out_features, p.in_features)
            lists[arithmetic, chip, _bare].append((counted, row.bare, 0.5, number, 0.0))
        else:
            counted = cost.count_products(replace(p, grad_dtypes=()))
            lists[arithmetic, chip, _bare_backward].append((counted, row.bare, 0.5, number, 0.0))
    found = defaultdict(list)
    for (arithmetic, chip, form), items in lists.items():
        counted, us, weight, number, near = zip(*items, strict=True)
        # So that the many candidates of one kernel do not outweigh the few of another.
        scale = np.sqrt(np.array(weight) * min(1.0, 4000 / len(items)))
        columns = (np.array(column) for column in (us, scale, number, near))
        found[arithmetic].append(Batch(form, _stacked(counted), *columns, chip))
    return found


def fit(of: Sequence[Batch], start: cost.Constants, rounds: int = 40) -> cost.Constants:
    """The constants with the least squares; each stays within a factor of 50 of where it began."""
    names = list(asdict(start))
    centre = np.log([getattr(start, name) for name in names])
    at, damping = centre.copy(), 1e-2
    weight, problem, near = (np.concatenate([getattr(b, name) for b in of]) for name in ("weight", "problem", "near"))
    total = np.maximum(np.bincount(problem, near), 1e-9)

    def constants(logs: np.ndarray) -> cost.Constants:
        return replace(start, **dict(zip(names, np.exp(np.clip(logs, centre - 4, centre + 4)).tolist(), strict=True)))

    def errors(logs: np.ndarray) -> np.ndarray:
        c = constants(logs)
        each = np.concatenate([batch.errors(c) for batch in of])
        mean = np.bincount(problem, near * each) / total
        found = np.concatenate([weight * each, np.sqrt(COMPARED * near) * (each - mean[problem])])
        bounded = np.sign(found) * np.sqrt(np.minimum(found**2, 0.3 * np.abs(found)))  # outliers count less
        return np.concatenate([bounded, 0.3 * (logs - centre)])

    now = errors(at)
    for _ in range(rounds):
        slopes = np.empty((len(now), len(names)))
        for index in range(len(names)):
            moved = at.copy()
            moved[index] += 1e-3
            slopes[:, index] = (errors(moved) - now) / 1e-3
        normal, gradient = slopes.T @ slopes, slopes.T @ now
        for _ in range(8):
            step = np.linalg.solve(normal + damping * np.diag(np.diag(normal) + 1e-9), -gradient)
            tried = errors(at + np.clip(step, -0.5, 0.5))
            if tried @ tried < now @ now:
                break
            damping *= 4
        else:
            break
        done = now @ now - tried @ tried < 1e-5 * (now @ now)
        at, now, damping = at + np.clip(step, -0.5, 0.5), tried, damping / 3
        if done:
            break
    return constants(at)


# --- how good it is ---------------------------------------------------------------------------------------------------


def predicted(row: Row, of: dict[str, cost.Constants]) -> dict[str, float]:
    """Microseconds by candidate, measured or not, by an H200's constants."""
    c, found = cost.scaled(of[cost.arithmetic_of(row.problem)], row.problem.chip or cost.FITTED), {}
    for candidate in candidates(row.problem, row.phase):
        if candidate.refusal is None and candidate.strategy != "cublas_bn":
            form, counted = candidate.counted()
            found[candidate.name] = float(sum(form(counted, c).values()))
    return found


def figures(regrets: Sequence[float]) -> str:
    ordered = sorted(regrets)
    mean = math.exp(sum(map(math.log, ordered)) / len(ordered))
    at = [ordered[int(share * (len(ordered) - 1))] for share in (0.9, 0.99, 1)]
    return f"{len(ordered):5d} problems: mean {mean:.4f}, 90% {at[0]:.3f}, 99% {at[1]:.3f}, worst {at[2]:.2f}"


def report(every: Sequence[Row], predictions: Sequence[dict[str, float]]) -> None:
    """Figures of the choices; a problem whose choice was not measured, by a kernel of another day, is only counted."""
    groups: dict[str, list[float]] = defaultdict(list)
    near = total = unknown = 0
    for row, found in zip(every, predictions, strict=True):
        known = {name: us for name, us in found.items() if name in row.us}
        total += len(known)
        near += sum(0.8 <= us / row.us[name] <= 1.25 for name, us in known.items())
        choice = min(found, key=found.__getitem__)
        if choice not in known:
            unknown += 1
            continue
        regret = row.us[choice] / row.best
        mode = "training" if row.problem.training else "evaluation"
        for name in (
            "all", row.gpu, f"{row.gpu} {row.kind} {row.phase} {mode}", "fitted" if row.fitted else "held out",
            *(["held"] if row.held else []),
        ):  # fmt: skip
            groups[name].append(regret)
    for name in sorted(groups):
        print(f"{name:44s} {figures(groups[name])}")
    print(f"predictions within 25%: {near / total:.1%} of {total}; choices that were not measured: {unknown}")


def exceptions(every: Sequence[Row], predictions: Sequence[dict[str, float]]) -> list[tuple[str, ...]]:
    """Lines of the table of measured bests: problems of TARGETS and BROUGHT whose predicted choice is slower.

    By the first GPU that the predicted choice was measured on.
    """
    found: dict[tuple[str, ...], str] = {}
    seen: set[tuple[str, ...]] = set()
    pairs = sorted(zip(every, predictions, strict=True), key=lambda pair: pair[0].problem.save)  # a line serves both
    for row, prediction in pairs:
        key, choice = tables.key(row.problem, row.phase), min(prediction, key=prediction.__getitem__)
        # bfloat16's lines serve float16 too.
        if not row.held or row.problem.dtype == "float16" or key in seen or choice not in row.us:
            continue
        seen.add(key)
        if row.us[choice] > REGRET * row.best:
            name = min(row.us, key=row.us.__getitem__)
            found[key] = name if row.phase == "forward" else name.partition(" ")[2]  # `Candidate.listed`
    return [(*key, name) for key, name in sorted(found.items())]


def write_constants(of: dict[str, cost.Constants]) -> None:
    rounded = {arithmetic: asdict(of[arithmetic]) for arithmetic in sorted(of)}
    document = {"schema": "gemmnorm planner 1", "gpu": "NVIDIA H200",
                "fitted_to": [path.name for path in RESULTS.values()], "constants": rounded}  # fmt: skip
    tables.CONSTANTS.write_text(json.dumps(document, indent=1) + "\n")


def write_exceptions(lines: Sequence[tuple[str, ...]]) -> None:
    with tables.BEST.open("w", newline="") as file:
        csv.writer(file, lineterminator="\n").writerows([tables.COLUMNS, *lines])


def fitted(every: Sequence[Row]) -> dict[str, cost.Constants]:
    """By arithmetic; that of cast operands, which fewer problems have, begins with half precision's."""
    of = batches([row for row in every if row.fitted])
    found: dict[str, cost.Constants] = {}
    for arithmetic in ("half", "tf32", "float32", "cast"):
        found[arithmetic] = short(fit(of[arithmetic], found["half"] if arithmetic == "cast" else cost.Constants()))
    return found


def short(constants: cost.Constants) -> cost.Constants:
    """Of four digits."""
    return cost.Constants(**{name: float(f"{value:.4g}") for name, value in asdict(constants).items()})


def chosen(row: Row) -> str:
    """What the planner takes, by name; it may not have been measured."""
    strategy = None if row.phase == "forward" else next(iter(row.us)).split()[0]
    return ranking(row.problem, row.phase, strategy)[0][1].name


# --- what variants win ------------------------------------------------------------------------------------------------


def variant_of(name: str) -> list[str]:
    """The variants that a candidate is made of."""
    if name.startswith("cublas"):
        return ["cuBLAS product", "cluster_normalize" if "one launch" in name else "three launches after cuBLAS"]
    if "along K" in name:
        return ["small_panel", "small_panel " + name.split("one_kernel ")[1]]
    if "multiplied again" in name:
        return ["product multiplied again"]
    if "products" in name:
        kernel = re.sub(r"cluster_gradient .*blocks", "cluster_gradient", name.split(" ", 1)[1])
        return [kernel]
    _, tile, schedule, *_ = name.split()
    found = ["tile " + tile, "schedule " + schedule.strip(",")]
    found += ["tile waits in registers"] if "in registers" in name else []
    found += ["cluster for a panel"] if "in clusters" in name else []
    found += ["conversion inside the kernel"] if "converted before" in name else []
    found += ["x shared by two blocks"] if "sharing x" in name else []
    found += ["operands copied"] if "copied" in name else []
    found += ["tiles are taken as blocks become free"] if "queued" in name else []
    return found


def variant_table(every: Sequence[Row]) -> str:
    """For each variant: how often it is the best, and by how much over the best candidate without it."""
    wins: dict[tuple[str, str], list[tuple[float, Row]]] = defaultdict(list)
    for row in every:
        by_name = {name: variant_of(name) for name in row.us}
        for variant in {v for names in by_name.values() for v in names}:
            with_it = min(us for name, us in row.us.items() if variant in by_name[name])
            without = [us for name, us in row.us.items() if variant not in by_name[name]]
            if without and with_it < min(without):
                wins[row.kind, variant].append((min(without) / with_it - 1, row))
    lines = ["| variant | operands | best in | median | largest | largest at |", "|---|---|---:|---:|---:|---|"]
    for (kind, variant), found in sorted(wins.items(), key=lambda item: (item[0][1], item[0][0])):
        ordered = sorted(found, key=lambda pair: pair[0])
        most, row = ordered[-1]
        p = row.problem
        where = f"{p.batch} × {p.in_features} → {p.out_features}, {'training' if p.training else 'evaluation'}"
        median = ordered[len(ordered) // 2][0]
        lines.append(f"| {variant} | {kind} | {len(found)} | {median:.0%} | {most:.0%} | {where} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--fit", choices=RESULTS, help="the figures of constants fitted to this GPU alone, for it")
    parser.add_argument("--write", action="store_true", help="fit, and write the tables")
    parser.add_argument("--variants", choices=RESULTS, help="print what each variant wins on this GPU")
    options = parser.parse_args()
    if options.variants:
        print(variant_table(rows(RESULTS[options.variants], kept=False)))
        return
    if options.fit:
        alone = rows(RESULTS[options.fit])
        of = fitted(rows(RESULTS[options.fit], kept=False))
        print(f"constants fitted to {options.fit}")
        report(alone, [predicted(row, of) for row in alone])
    every = everything()
    if options.write:
        of = fitted(everything(kept=False))
        write_constants(of)
        write_exceptions(exceptions(every, [predicted(row, of) for row in every]))
    of = {name: cost.Constants(**values) for name, values in tables.constants().items()}
    print("without the table of measured bests")
    report(every, [predicted(row, of) for row in every])


if __name__ == "__main__":
    main()
