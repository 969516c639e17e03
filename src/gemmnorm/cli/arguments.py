"""The arguments of every command, and what can be refused before anything runs."""

from __future__ import annotations

import argparse
import difflib
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import gemmnorm

from ..bench import CASES, PHASES, SUITES, default_device
from ..errors import GemmNormError
from ..plan import STRATEGIES
from ..userfiles import PRECISIONS as CASTS
from .page import MARK

COMMANDS = ("optimize", "verify", "bench", "explain", "tune", "report", "doctor")
ARCHITECTURES = (80, 86, 87, 89, 90, 100, 101, 103, 110, 120, 121)  # NVIDIA's, from Ampere on
STANDARD_OUTPUT = "-"  # as a path of --json
TIME_LIMIT = 600.0  # seconds
PRECISIONS = ("fp32", "tf32", "bf16", "fp16", "amp")
EPILOG = """\
examples:
  gemmnorm optimize model.py                      write model_new.py, verified and timed
  gemmnorm optimize model.py --hub fused-linear   and a project for Hugging Face's Kernel Hub
  gemmnorm verify model.py model_new.py           is it the same function?
  gemmnorm verify model.py new.py --precision bf16  cast to bfloat16 first, as KernelBench does
  gemmnorm bench model.py model_new.py            side by side with eager and torch.compile
  gemmnorm explain 2048 2048 8192 --dtype bf16    which kernels run, and why
  gemmnorm tune model.py                          measure the candidates here, keep what beats the planner's choices
  gemmnorm report result.json -o page.html        a result as one page
  gemmnorm report new.json --history runs/        R and S over older runs
  gemmnorm doctor                                 what this machine has, what is missing

Exit code 0: done, and equal; 1: NEW is not equal, raises, hangs or crashes, its kernels do not compile, or something
is slower than in `bench --compare OLD.json`; 2: nothing could be judged (a wrong command or path, a bad MODEL, no
chain, a fault of gemmnorm's own).
"""


_HISTORY: dict[str, Any] = {
    "nargs": "+",
    "metavar": "OLD.json",
    "help": "older results, or folders of them: R and S over runs",
}


def _one_or_more(choices: Sequence[str]) -> Any:
    """An argparse type: `a,b` → ["a", "b"], each of them one of `choices`."""

    def parse(text: str) -> list[str]:
        words = [word for word in text.split(",") if word]
        for word in words:
            if word not in choices:
                raise argparse.ArgumentTypeError(f"expected one or more of {', '.join(choices)}; got {word!r}")
        return words

    return parse


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 < value < 1e7:
        raise argparse.ArgumentTypeError(f"expected a positive number of seconds; got {text!r}")
    return value


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number from 1 on; got {text!r}")
    return int(text)


class _Parser(argparse.ArgumentParser):
    """Names the command that a mistyped one is nearest to."""

    def error(self, message: str) -> NoReturn:
        if typed := re.search(r"argument COMMAND: invalid choice: '([^']*)'", message):
            near = difflib.get_close_matches(typed[1], COMMANDS, 1)
            hint = f"; did you mean {near[0]}?" if near else f"; expected one of {', '.join(COMMANDS)}"
            message = f"there is no command {typed[1]!r}{hint}"
        super().error(message)


def make_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="gemmnorm",
        description="Linear → scale → BatchNorm at the price of the Linear: find, replace, verify and time it.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"gemmnorm {gemmnorm.__version__}")
    commands = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=argparse.ArgumentParser)
    shared = _shared_options()

    def command(name: str, text: str, options: str = "") -> argparse.ArgumentParser:
        """A command with `--json`, `--quiet` and these of the shared options."""
        parents = [shared[option] for option in ("common", *options.split())]
        made: argparse.ArgumentParser = commands.add_parser(name, help=text, description=text, parents=parents)
        made.set_defaults(command=name)
        return made

    text = "Write a verified and timed replacement of MODEL.py."
    made = command("optimize", text, "device time-limit target no-compile effort cast")
    kernels = [strategy for strategy in STRATEGIES if strategy != "reference"]
    made.add_argument("--strategy", choices=kernels, help="default: the planner's choice")
    made.add_argument("model", type=_file, metavar="MODEL.py")
    text = "default: MODEL_new.py in the current directory"
    made.add_argument("-o", "--output", type=_path, metavar="NEW.py", help=text)
    text = "also write a project for Hugging Face's kernel-builder there; its name is the kernel's"
    made.add_argument("--hub", type=_path, metavar="DIR", help=text)

    made = command("verify", "Is NEW.py the same function as MODEL.py?", "device time-limit effort cast report")
    made.add_argument("model", type=_file, metavar="MODEL.py")
    made.add_argument("new", type=_file, metavar="NEW.py")
    made.add_argument("--all", action="store_true", help="go on after a case that failed")

    text = "Time MODEL.py and replacements, or a suite, side by side with the peers."
    _add_bench_options(command("bench", text, "device time-limit no-compile report"))

    text = "The plan and its predicted time, in words."
    made = command("explain", text, "time-limit strategy target sizes file-cast")
    made.add_argument("what", nargs="+", metavar="MODEL.py | BATCH IN OUT")
    made.add_argument("--eval", action="store_true", help="evaluation mode; else training")

    text = "Measure the planner's candidates on this GPU; later processes run those that beat its choices."
    made = command("tune", text, "device sizes file-cast")
    made.add_argument("what", nargs="*", metavar="MODEL.py | BATCH IN OUT")
    made.add_argument("--eval", action="store_true", help="evaluation mode; else training, forward and backward")
    made.add_argument("--forget", action="store_true", help="delete what was measured, and measure nothing")
    made.add_argument(
        "--time-limit", type=_seconds, default=TIME_LIMIT, metavar="S", help="seconds, compiling included (600)"
    )

    made = commands.add_parser("report", help="Render a result file.", description="Render a result file.")
    made.add_argument("result", metavar="RESULT.json")
    made.add_argument("-o", "--output", type=_path, metavar="PAGE.html", help="as one HTML page that needs no network")
    made.add_argument("--history", **_HISTORY)
    made.set_defaults(command="report")

    command("doctor", "What this machine has, what will run, what is missing and what mends it.")
    return parser


def _shared_options() -> dict[str, argparse.ArgumentParser]:
    """Options that several commands take, each as a parent parser under its own name; "common" is every command's."""

    def parent(*names: str, **settings: Any) -> argparse.ArgumentParser:
        made = argparse.ArgumentParser(add_help=False)
        made.add_argument(*names, **settings)
        return made

    common = parent("--json", type=_path, metavar="FILE", help="write everything there")
    common.add_argument("-q", "--quiet", action="store_true", help="no progress; of a verdict no table")
    effort = argparse.ArgumentParser(add_help=False)
    efforts = effort.add_mutually_exclusive_group()
    for name, text in (
        ("quick", "one draw, the cases that an edit breaks first"),
        ("thorough", "five draws, every case under each, to the end"),
    ):
        efforts.add_argument(f"--{name}", dest="effort", action="store_const", const=name, default="usual", help=text)
    effort.add_argument("--seeds", type=_count, help="draws of weights and inputs to verify with (3)")
    sizes = parent("--dtype", choices=PRECISIONS, help="for three numbers (fp32)")
    sizes.add_argument("--no-scale", action="store_true", help="no scale, for three numbers")
    sizes.add_argument("--activation", help="such as relu, for three numbers")
    shown = parent(
        "--report",
        type=_path,
        metavar="PAGE.html",
        help="default: beside --json, else gemmnorm-COMMAND.html here",
    )
    shown.add_argument("--no-report", action="store_true", help="write no page")
    return {
        "common": common,
        "report": shown,
        "effort": effort,
        "sizes": sizes,
        "device": parent("--device", type=_device, help="torch device; default: the GPU where there is one"),
        "time-limit": parent("--time-limit", type=_seconds, metavar="S", help="seconds that user files may take (600)"),
        "cast": parent(
            "--precision", choices=tuple(CASTS), help="cast both models and all inputs to it, as KernelBench does"
        ),
        "file-cast": parent(
            "--precision", choices=tuple(CASTS), help="cast the model of MODEL.py and its inputs to it, as verify does"
        ),
        "strategy": parent("--strategy", choices=STRATEGIES, help="default: the planner's choice"),
        "target": parent("--target", metavar="sm_XX", type=_target, help="GPU architecture; default: this machine's"),
        "no-compile": parent("--no-compile", action="store_true", help="neither time torch.compile nor run nvcc"),
    }


def _add_bench_options(made: argparse.ArgumentParser) -> None:
    made.add_argument("files", nargs="*", metavar="FILE", help="MODEL.py [NEW.py …]")
    made.add_argument("--suite", choices=SUITES)
    made.add_argument("--random", type=_numbers, metavar="SEED", help="problems drawn from it; several with commas")
    made.add_argument("--count", type=_count, help="of random problems for each seed (20)")
    made.add_argument("--case", type=_one_or_more(tuple(CASES)), help="of a suite, such as kb33; several with commas")
    made.add_argument(
        "--precision",
        type=_one_or_more(("fp32", "tf32", "bf16", "fp16", "amp")),
        help="of a suite: fp32, tf32, bf16, fp16, amp; for files one of fp32, fp16, bf16: cast models and inputs to it",
    )
    made.add_argument("--phase", type=_one_or_more(PHASES), help=f"{', '.join(PHASES)}; several with commas")
    made.add_argument("--strategy", type=_one_or_more(STRATEGIES))
    made.add_argument("--budget", type=_seconds, default=1.5, metavar="S", help="sampling time per cell or phase (1.5)")
    made.add_argument(
        "--resume", action="store_true", help="of a suite: keep what --json FILE has and measure only the rest"
    )
    made.add_argument(
        "--compare", type=_path, metavar="OLD.json", help="exit code 1 where a cell is slower than in this result"
    )
    made.add_argument("--history", **_HISTORY)
    made.add_argument(
        "--junit", type=_file, metavar="FILE", help="of a suite: put a pytest run's counts into the result file"
    )


def _path(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("expected a path; got ''")
    return text


def _file(text: str) -> str:
    if not Path(text).is_file():
        raise argparse.ArgumentTypeError(f"there is no file {text}")
    return text


def _device(text: str) -> str:
    try:
        return str(default_device(text))
    except GemmNormError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _numbers(text: str) -> list[int]:
    if not all(part.isdigit() for part in text.split(",")):
        raise argparse.ArgumentTypeError(f"expected numbers, separated by commas; got {text!r}")
    return [int(part) for part in text.split(",")]


def _target(text: str) -> str:
    digits = text.removeprefix("sm_").removesuffix("a")
    if not text.startswith("sm_") or not digits.isdigit() or int(digits) < 80:
        raise argparse.ArgumentTypeError(f"expected sm_80 or higher, such as sm_90; got {text!r}")
    if int(digits) not in ARCHITECTURES:
        known = ", ".join(f"sm_{arch}" for arch in ARCHITECTURES)
        raise argparse.ArgumentTypeError(f"expected one of {known}; got {text!r}")
    return text


# --- what goes together -----------------------------------------------------------------------------------------------

_SIZES_OR_FILE: dict[str, tuple[str, ...]] = {
    "dtype": ("three numbers",),
    "no_scale": ("three numbers",),
    "activation": ("three numbers",),
    "precision": ("MODEL.py",),
}
# Options that serve some uses of a command alone. Each is None or False unless it is given.
_SERVES: dict[str, dict[str, tuple[str, ...]]] = {
    "bench": {
        "case": ("--suite",),
        "count": ("--random",),
        "junit": ("--suite", "--random"),
        "resume": ("--suite", "--random"),
        "time_limit": ("MODEL.py",),
    },
    "explain": {**_SIZES_OR_FILE, "time_limit": ("MODEL.py",)},
    "tune": _SIZES_OR_FILE,
}


def check_options(arguments: argparse.Namespace, use: str, parser: argparse.ArgumentParser) -> None:
    """Refuse options that would have no effect where a command is used like that."""
    for name, uses in _SERVES[arguments.command].items():
        if use not in uses and getattr(arguments, name):
            option = "--" + name.replace("_", "-")
            parser.error(f"{arguments.command}: {option} goes with {' or '.join(uses)}, not with {use}")


# --- what is written, and where ---------------------------------------------------------------------------------------


def check_outputs(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> None:
    """Can what the options name be written? Sets `arguments.page`, where the page goes, or None for none."""
    data = getattr(arguments, "json", None)
    data = None if data == STANDARD_OUTPUT else data
    resumed = getattr(arguments, "resume", False)
    if data and (why := _not_writable(data) or (None if resumed else _no_result(data))):
        parser.error(f"--json: {why}")
    option = "output" if arguments.command == "report" else "report"
    asked = getattr(arguments, option, None)
    if asked == STANDARD_OUTPUT:
        parser.error(f"--{option}: expected a file for the page; got - (--json - writes to standard output)")
    if asked and (why := _not_writable(asked) or _not_ours(asked)):
        parser.error(f"--{option}: {why}")
    arguments.page = asked
    if asked is None and not getattr(arguments, "no_report", True):
        chosen = str(Path(data).with_suffix(".html")) if data else f"gemmnorm-{arguments.command}.html"
        why = _not_writable(chosen) or _not_ours(chosen)
        if why:
            print(f"gemmnorm: no page: {why}", file=sys.stderr)
        arguments.page = None if why else chosen
    _check_distinct(arguments, data, f"--{option}", parser)


def _check_distinct(
    arguments: argparse.Namespace, data: str | None, page: str, parser: argparse.ArgumentParser
) -> None:
    """No two files that are written are one file, and none is a file that is read."""
    written = {"--json": data, page: arguments.page}
    if arguments.command == "optimize":
        from .optimize import check_output, output_path, reports_of

        output = output_path(arguments.model, arguments.output)
        try:
            check_output(output, Path(arguments.model))
        except GemmNormError as error:
            parser.error(str(error))
        beside = {f"NEW{path.suffix}": path for path in reports_of(output)}
        if data and _identity(data) == _identity(beside["NEW.json"]):  # one document
            del written["--json"]
        written = {"NEW.py": output, **beside, **written}
    known = {_identity(path): path for path in _read(arguments)}
    for name, path in written.items():
        if path is not None and (other := known.setdefault(_identity(path), name)) != name:
            parser.error(f"{name}: expected a file of its own; got {path}, which is {other} as well")


def _read(arguments: argparse.Namespace) -> list[str]:
    """The files that a command reads; not older results, which a new one may replace."""
    named = [getattr(arguments, name, None) for name in ("model", "new", "result")]
    return [path for path in (*named, *getattr(arguments, "files", ()), *getattr(arguments, "what", ())) if path]


def _identity(path: str | Path) -> object:
    """Equal for two paths of one file."""
    try:
        found = os.stat(path)
    except OSError:
        return Path(path).resolve()
    return found.st_dev, found.st_ino


def _not_writable(path: str) -> str | None:
    folder = Path(path).resolve().parent
    if Path(path).is_dir() or not folder.is_dir():
        return f"expected a file in an existing directory, or -; got {path}"
    return None if os.access(folder, os.W_OK) else f"{folder} is not writable"


def _no_result(path: str) -> str | None:
    """A result may replace an earlier one, or an empty file, and nothing else."""
    file = Path(path)
    if not file.exists():
        return None
    if not file.is_file():
        return f"{path} is there already, and is no file"
    head = file.read_text(encoding="utf-8", errors="replace")[:200]
    return None if not head or '"schema"' in head else f"{path} is there already, and was not written by gemmnorm"


def _not_ours(path: str) -> str | None:
    """A page may replace a page of an earlier run, and nothing else."""
    if not Path(path).exists() or MARK in Path(path).read_text(encoding="utf-8", errors="replace")[:500]:
        return None
    return f"{path} is there already, and was not written by gemmnorm"
