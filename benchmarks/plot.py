"""Error against time for every arithmetic, from a result file.

    python benchmarks/plot.py [RESULT.json [PLOT.svg]]        needs matplotlib: pip install "gemmnorm[plots]"

Training forward at kb33 and kb39; error is the worst of the output's global, row and column errors against float64.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import matplotlib.pyplot as plt
from matplotlib.ticker import FixedLocator, NullFormatter, NullLocator, ScalarFormatter

ROOT = Path(__file__).resolve().parents[1]
CASES = ("kb33", "kb39")
COLOURS = {"fp32": "tab:blue", "tf32": "tab:green", "bf16": "tab:orange", "fp16": "tab:red"}


def main() -> None:
    arguments = sys.argv[1:]
    result = Path(arguments[0]) if arguments else ROOT / "benchmarks" / "results" / "h200.json"
    target = Path(arguments[1]) if arguments[1:] else ROOT / "docs" / "error_time.svg"
    document = json.loads(result.read_text(encoding="utf-8"))
    plt.rcParams |= {"svg.hashsalt": "gemmnorm", "svg.fonttype": "none"}  # the same file from the same figures
    figure, axes = plt.subplots(1, len(CASES), figsize=(10, 4), sharey=True)
    for axis, case in zip(axes, CASES, strict=True):
        rows = [
            row
            for row in document["rows"]
            if (row["case"], row["phase"]) == (case, "train_fwd") and row["chosen"] and not row["autocast"]
        ]
        for row in rows:
            colour, name = COLOURS[row["precision"]], row["precision"]
            axis.plot(
                [row["eager_ms"], row["ms"]], [row["eager_error"], row["error"]], color=colour, linewidth=0.8, alpha=0.5
            )
            axis.scatter(row["eager_ms"], row["eager_error"], marker="o", facecolors="none", edgecolors=colour)
            axis.scatter(row["ms"], row["error"], marker="s", color=colour)
            axis.annotate(name, (row["ms"], row["error"]), textcoords="offset points", xytext=(-6, -13), ha="right")
        first = rows[0]
        axis.set(xscale="log", yscale="log", xlabel="milliseconds")
        axis.set_title(f"{case}: {first['batch']} × {first['in_features']} → {first['out_features']}")
        axis.xaxis.set_major_locator(FixedLocator([0.2, 0.5, 1, 2, 5, 10]))
        axis.xaxis.set_major_formatter(ScalarFormatter())
        axis.xaxis.set_minor_locator(NullLocator())
        axis.yaxis.set_minor_formatter(NullFormatter())
        axis.grid(True, linewidth=0.3)
        axis.margins(0.2)
    axes[0].set_ylabel("error against float64")
    axes[0].scatter([], [], marker="o", facecolors="none", edgecolors="black", label="eager")
    axes[0].scatter([], [], marker="s", color="black", label="gemmnorm")
    axes[0].legend()
    figure.suptitle(f"Training forward, {document['environment']['gpu']}", y=0.99)
    figure.tight_layout()
    figure.savefig(target, metadata={"Date": None})


if __name__ == "__main__":
    main()
