"""A result over older runs: what is followed, what is left out, and how it is shown."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from test_page import NASTY, Balanced, nasty
from test_report import FILES, OPTIMIZE, bench, row

from gemmnorm.bench import history
from gemmnorm.cli import main as command
from gemmnorm.cli import report
from gemmnorm.cli.page import page
from gemmnorm.errors import GemmNormValueError


def run(day: int, *ms: float, **more: Any) -> dict[str, Any]:
    """A run of one cell for each of `ms`, of a day."""
    rows = [row(case=f"c{i}", ms=value, ms_iqr=0.0) for i, value in enumerate(ms)]
    return {**bench(*rows), "created": f"2026-01-{day:02}T00:00:00+00:00", "source_hash": f"h{day}", **more}


def files(day: int, ms: float) -> dict[str, Any]:
    timed = {"phase": "eval_fwd", "variant": "n.py", "kind": "candidate", "ms": ms, "gemm_ms": 1.0, "eager_ms": 2.0}
    return {**FILES, "created": f"2026-01-{day:02}", "rows": [timed]}


def test_cells_are_followed_through_the_runs_by_date() -> None:
    new = run(3, 0.16, 0.32, 0.5)
    found = history(new, [("b", run(2, 0.24, 0.32)), ("a", run(1, 0.16)), ("again", run(3, 0.16, 0.32, 0.5))], "new")
    assert [r["name"] for r in found["runs"]] == ["a", "b", "new"]
    assert found["runs"][0] == {"name": "a", "created": new["created"].replace("03T", "01T"), "source_hash": "h1",
                                "torch": "2.11.0"}  # fmt: skip
    first, second, third = found["cells"]
    assert (first["case"], first["phase"], first["name"]) == ("c0", "train_fwd", "bf16")
    assert [(p["run"], p["R"], p["verdict"]) for p in first["points"]] == [
        (0, pytest.approx(1.0), None), (1, pytest.approx(1.5), "slower"), (2, pytest.approx(1.0), "faster"),
    ]  # fmt: skip
    assert first["points"][1]["S"] == pytest.approx(0.3 / 0.24)
    assert [(p["run"], p["verdict"]) for p in second["points"]] == [(1, None), (2, "same")]
    assert [p["run"] for p in third["points"]] == [2] and found["left_out"] == []


def test_what_is_of_another_machine_kind_or_model_is_left_out_with_the_reason() -> None:
    other = run(1, 0.1, environment={"gpu": "Y", "torch": "2"})
    found = history(run(3, 0.1), [("y", other), ("f", files(1, 1.0)), ("ok", run(2, 0.1))])
    assert found["left_out"] == [
        {"name": "y", "reason": "of another machine, Y"}, {"name": "f", "reason": "of another kind, bench-files"},
    ]  # fmt: skip
    newer_torch = run(1, 0.1, environment={"gpu": "NVIDIA H200", "torch": "2.12"})
    assert history(run(3, 0.1), [("t", newer_torch)])["runs"][0]["torch"] == "2.12"
    other_model = {**files(1, 1.0), "model": "other.py"}
    found = history(files(3, 1.0), [("m", other_model), ("n", files(2, 2.0))])
    assert found["left_out"][0]["name"] == "m"
    assert found["cells"][0]["name"] == "n.py" and [p["S"] for p in found["cells"][0]["points"]] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("new", "olds", "message"),
    [
        (OPTIMIZE, [], "kind bench or bench-files; got 'optimize'"),
        (run(2, 0.1), [], "another run of the same; got none"),
        (run(2, 0.1), [("o", files(1, 1.0))], "o: of another kind"),
        (run(2, 0.1), [("o", bench(row(case="gone")))], "o: no cell in common"),
    ],
)
def test_what_makes_no_history_is_refused(new: dict[str, Any], olds: list[Any], message: str) -> None:
    with pytest.raises(GemmNormValueError, match=message):
        history(new, olds)


def test_a_page_and_a_table_show_it() -> None:
    old = run(1, 0.1, 0.2, environment={"gpu": "Y"})
    document = run(3, 0.2, 0.2)
    document["history"] = history(document, [("a.json", run(2, 0.16, 0.2)), ("y.json", old)])
    text = page(document)
    Balanced().feed(text)
    assert text.index("Over runs") < text.index("Speed") and 'class="mark worse"' in text
    assert "2026-01-03 00:00: R 1.250" in text and "a.json" in text and "y.json: of another machine, Y" in text
    lines = report.text(document).partition("R over runs")[2].splitlines()
    assert next(line.split() for line in lines if line.split()[:1] == ["c0"])[-3:] == ["1.000", "1.250", "1.50"]
    assert "not in the history: y.json: of another machine, Y" in lines
    nameless = files(2, 1.0)
    nameless["history"] = history(nameless, [("o", files(1, 1.0))])
    shown = page(nasty(nameless))
    assert "<script" not in shown and shown.count(NASTY[:7]) == 0


def test_report_and_bench_take_files_and_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    arguments = ["--case", "tiny_odd", "--precision", "fp32", "--phase", "eval_fwd", "--no-compile", "--budget", "0.02"]
    timed = ["bench", "--suite", "cpu", *arguments, "-q", "--no-report"]
    assert command.main([*timed, "--json", "one.json"]) == 0
    old = json.loads(Path("one.json").read_text())
    Path("runs").mkdir()
    rows = [{**row, "ms": 2 * row["ms"]} for row in old["rows"]]
    for name in ("1", "copy"):
        Path(f"runs/{name}.json").write_text(json.dumps({**old, "created": "2020-01-01", "rows": rows}))
    Path("runs/notes.json").write_text("[]")  # no result of ours: of a folder not an error
    assert command.main([*timed, "--json", "new.json", "--history", "runs"]) == 0
    assert "R over runs" in capsys.readouterr().out
    names = [r["name"] for r in json.loads(Path("new.json").read_text())["history"]["runs"]]
    assert names == ["runs/1.json", "new.json"]
    assert command.main(["report", "one.json", "--history", "runs", "-o", "page.html"]) == 0
    assert "Over runs" in Path("page.html").read_text()
    for wrong in ("nosuch.json", "runs/notes.json"):
        assert command.main(["report", "one.json", "--history", wrong]) == 2
        assert f"gemmnorm: {wrong}: expected" in capsys.readouterr().err
    assert command.main(["report", "one.json", "--history", "one.json"]) == 2  # itself is no history
