"""The command line: `gemmnorm optimize | verify | bench | explain | tune | report | doctor`.

Exit codes: 0 done, and equal where equality was asked; 1 the replacement is not equal, raises, hangs or crashes; 2 the
model file is bad or holds no chain, or the command line is wrong, or gemmnorm itself fails. 130 after Ctrl-C.

Tables go to standard output, progress and complaints to standard error. User files run in processes of their own.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from .. import activations
from ..bench import (
    PHASES,
    FileOptions,
    Options,
    bench_files,
    check_comparable,
    command_line,
    compare,
    default_device,
    environment,
    history,
    new_document,
    random_problems,
    run_suite,
    select,
    tests_of,
    write_json,
    write_text,
)
from ..errors import GemmNormError
from ..plan import Problem
from ..runtime.arithmetic import arithmetic as arithmetic_of
from ..userfiles import PRECISIONS
from . import report
from .arguments import STANDARD_OUTPUT, TIME_LIMIT, check_options, check_outputs, make_parser
from .page import page
from .progress import reporting
from .variables import check_variables

EQUAL, NOT_EQUAL, BAD_MODEL = 0, 1, 2
RANDOM_COUNT = 20  # problems of a seed
# --dtype → of the product; of the parameters; arithmetic; what autocast casts.
_DTYPES: dict[str, tuple[str, str, str, tuple[str, ...]]] = {
    "fp32": ("float32", "float32", "float32", ()),
    "tf32": ("float32", "float32", "tf32", ()),
    "bf16": ("bfloat16", "bfloat16", "native", ()),
    "fp16": ("float16", "float16", "native", ()),
    "amp": ("bfloat16", "float32", "native", ("x", "weight")),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code."""
    _open_streams()
    try:
        parser = make_parser()
        arguments = parser.parse_args(argv)
        check_outputs(arguments, parser)
        if arguments.command not in ("doctor", "report"):
            check_variables()
        with _ending_cleanly():
            code: int = _RUN[arguments.command](arguments, parser)
    except GemmNormError as error:
        print(f"gemmnorm: {error}", file=sys.stderr)
        return BAD_MODEL
    except KeyboardInterrupt:
        print("gemmnorm: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of a pipe has left, and there is no verdict
        _drop(sys.stdout, sys.stderr)
        return 128 + 13  # as SIGPIPE would
    except OSError as error:  # a full disk, a folder that is gone
        print(f"gemmnorm: {error}", file=sys.stderr)
        return BAD_MODEL
    except Exception:  # a fault of gemmnorm's own is no verdict, which is what Python's exit code 1 would say
        traceback.print_exc()
        return BAD_MODEL
    return code


def _open_streams() -> None:
    """Standard streams that are open and take every character; where the shell closed one (`>&-`), Python has None."""
    for name in ("stdin", "stdout", "stderr"):
        if getattr(sys, name) is None:
            null = os.open(os.devnull, os.O_RDWR)  # gets the stream's number, unless a file has taken it since
            os.set_inheritable(null, True)
            setattr(sys, name, os.fdopen(null, "r" if name == "stdin" else "w", encoding="utf-8"))
        stream = getattr(sys, name)
        if name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


class _Ended(SystemExit):
    """SIGTERM or SIGHUP: what runs is cleaned up on the way out, as after an interruption from the keyboard."""


@contextlib.contextmanager
def _ending_cleanly() -> Iterator[None]:
    """Signals that end a process raise, so that child processes and temporary files do not outlive it."""

    def end(number: int, _: object) -> None:
        raise _Ended(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ours = [getattr(signal, name) for name in ("SIGTERM", "SIGHUP") if hasattr(signal, name)]
    previous = [signal.signal(number, end) for number in ours]
    if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # as the package's __init__ leaves it for the command
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        for number, handler in zip(ours, previous, strict=True):
            signal.signal(number, handler)


# --- the commands ----------------------------------------------------------------------------------------------------


def _optimize(arguments: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from .optimize import OptimizeOptions, optimize

    options = OptimizeOptions(
        output=arguments.output,
        hub=arguments.hub,
        target=arguments.target,
        strategy=arguments.strategy,
        device=arguments.device,
        precision=arguments.precision,
        seeds=arguments.seeds,
        effort=arguments.effort,
        compile=not arguments.no_compile,
        time_limit=arguments.time_limit or TIME_LIMIT,
    )
    with reporting("optimize", quiet=arguments.quiet) as progress:
        document = optimize(arguments.model, options, tell=progress.tell, command=command_line())
    _finish(document, arguments)
    return {"equal": EQUAL, "not equal": NOT_EQUAL, "failed": NOT_EQUAL, "not compiled": NOT_EQUAL}.get(
        document["status"], BAD_MODEL
    )


def _verify(arguments: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from ..verify import verify
    from .optimize import verify_stage

    with reporting("verify", quiet=arguments.quiet) as progress:
        verdict = verify(
            arguments.model,
            arguments.new,
            seeds=arguments.seeds,
            effort=arguments.effort,
            to_the_end=arguments.all or None,
            device=arguments.device,
            precision=arguments.precision,
            time_limit=arguments.time_limit or TIME_LIMIT,
            on_progress=lambda message: progress.tell(verify_stage(message)),
        )
    about = {"command": command_line(), "environment": environment(default_device(arguments.device))}
    document = new_document("verify", **about, **verdict)
    _finish(document, arguments)
    return int(document["exit_code"])


def _bench(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    if sum((arguments.suite is not None, arguments.random is not None, bool(arguments.files))) != 1:
        parser.error("bench: expected one of --suite NAME, --random SEED and MODEL.py [NEW.py …]")
    if (
        arguments.files and not Path(arguments.files[0]).is_file()
    ):  # replacements that are missing are named in the table
        parser.error(f"bench: there is no file {arguments.files[0]}")
    check_options(arguments, _bench_use(arguments), parser)
    casts = arguments.precision or []
    if arguments.files and (len(casts) > 1 or not set(casts) <= set(PRECISIONS)):
        parser.error(f"bench: for files expected --precision as one of {', '.join(PRECISIONS)}; got {','.join(casts)}")
    old, device = None, default_device(arguments.device)
    if arguments.compare:
        old = report.load(arguments.compare)
        kind = "bench-files" if arguments.files else "bench"
        check_comparable(kind, environment(device), old, arguments.compare)
    olds = report.load_runs(arguments.history or [])
    document = _bench_files(arguments) if arguments.files else _bench_suite(arguments, parser)
    if olds:
        document["history"] = history(document, olds, arguments.json)
    if old is not None:
        document["comparison"] = compare(document, old, arguments.compare)
    _finish(document, arguments)
    if document.get("comparison", {}).get("regressions"):
        return NOT_EQUAL
    if not arguments.files:
        return EQUAL
    if document["status"] == "ok" and len(arguments.files) == 1 and not document["matches"]:
        print(f"gemmnorm: {arguments.files[0]}: {document['report']}", file=sys.stderr)
        return BAD_MODEL
    return {"ok": EQUAL, "failed": NOT_EQUAL}.get(document["status"], BAD_MODEL)


def _bench_use(arguments: argparse.Namespace) -> str:
    return "MODEL.py" if arguments.files else "--suite" if arguments.suite else "--random"


def _bench_suite(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> dict[str, Any]:
    drawn, about = arguments.random is not None, None
    if drawn:
        cells = random_problems.cells(
            arguments.random, arguments.count or RANDOM_COUNT, arguments.precision, arguments.phase
        )
        about = {"random": {"seeds": arguments.random}}
    else:
        cells = select(arguments.suite, arguments.case, arguments.precision, arguments.phase)
    if not cells:
        parser.error("bench: no cell of the suite passes the filters")
    if arguments.resume and not arguments.json:
        parser.error("bench: --resume needs --json FILE")
    device = default_device(arguments.device)
    options = Options(
        budget_s=arguments.budget,
        compile=not arguments.no_compile,
        strategies=arguments.strategy,
        extras=not drawn,
        only_chosen=drawn and not arguments.strategy,
    )
    with reporting("bench", len(cells), arguments.quiet) as progress:
        document = run_suite(
            cells,
            device,
            options,
            path=arguments.json,
            resume=arguments.resume,
            tell=progress.tell,
            on_cell=lambda cell: progress.advance(),
            about=about,
        )
    if arguments.junit:
        document["tests"] = tests_of(arguments.junit)
    return document


def _bench_files(arguments: argparse.Namespace) -> dict[str, Any]:
    limit = arguments.time_limit or TIME_LIMIT
    options = FileOptions(
        phases=tuple(arguments.phase or PHASES),
        strategies=arguments.strategy,
        device=arguments.device,
        precision=arguments.precision[0] if arguments.precision else None,
        compile=not arguments.no_compile,
        budget_s=arguments.budget,
        limit_s=0.75 * limit,
    )
    model, *candidates = arguments.files
    with reporting("bench", quiet=arguments.quiet) as progress:
        return bench_files(
            model,
            candidates,
            options,
            time_limit=limit,
            tell=progress.tell,
            command=command_line(),
        )


def _explain(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from .explain import explain_file, explain_problem

    what = _model_or_problem(arguments, parser)
    if isinstance(what, Problem):
        document = explain_problem(what, target=arguments.target, strategy=arguments.strategy)
    else:
        with reporting("explain", quiet=arguments.quiet) as progress:
            document = explain_file(
                what,
                target=arguments.target,
                strategy=arguments.strategy,
                precision=arguments.precision,
                evaluation=arguments.eval,
                time_limit=arguments.time_limit or TIME_LIMIT,
                tell=progress.tell,
            )
    _finish(document, arguments)
    return EQUAL if document["status"] == "ok" else BAD_MODEL


def _model_or_problem(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> str | Problem:
    """What `MODEL.py | BATCH IN OUT` and the options for three numbers say."""
    what: list[str] = arguments.what
    if len(what) == 1 and not Path(what[0]).is_file():
        parser.error(f"{arguments.command}: there is no file {what[0]!r}")
    check_options(arguments, "MODEL.py" if len(what) == 1 else "three numbers", parser)
    if len(what) == 1:
        return what[0]
    if len(what) != 3 or not all(word.isdecimal() for word in what):
        parser.error(f"{arguments.command}: expected MODEL.py, or three numbers: batch, in_features, out_features")
    kind = arguments.dtype or "fp32"
    dtype, linear_dtype, arithmetic, cast = _DTYPES[kind]
    asked = arithmetic_of(torch.float32)
    batch, in_features, out_features = map(int, what)
    if batch == 1 and not arguments.eval:
        parser.error(
            f"{arguments.command}: BatchNorm in training needs two rows or more, PyTorch's too; got 1 (--eval?)"
        )
    return Problem(
        batch,
        in_features,
        out_features,
        dtype=dtype,
        out_dtype=dtype if arguments.no_scale else linear_dtype,
        linear_dtype=linear_dtype,
        norm_dtype=linear_dtype,
        arithmetic=asked if kind == "fp32" and asked != "tf32" else arithmetic,
        cast=cast,
        activation=activations.canonical(arguments.activation),
        training=not arguments.eval,
        scaled=not arguments.no_scale,
    )


def _tune(arguments: argparse.Namespace, parser: argparse.ArgumentParser) -> int:
    from ..runtime import measured
    from .tune import tune_here, usable

    if arguments.forget:
        found = measured.forget()
        print(f"deleted {', '.join(map(str, found))}" if found else "there is no table to delete")
        return EQUAL
    what = _model_or_problem(arguments, parser)
    device = usable(arguments.device)
    with reporting("tune", quiet=arguments.quiet) as progress:
        document = tune_here(
            what,
            device=device,
            precision=arguments.precision,
            evaluation=arguments.eval,
            time_limit=arguments.time_limit,
            tell=progress.tell,
        )
    _finish(document, arguments)
    return EQUAL if document["status"] == "ok" else BAD_MODEL


def _report(arguments: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    document = report.load(arguments.result)
    if arguments.history:
        document["history"] = history(document, report.load_runs(arguments.history), arguments.result)
    if arguments.page:
        write_text(arguments.page, page(document))
        print(f"wrote {arguments.page}", file=sys.stderr)
    else:
        _finish(document, arguments)
    return EQUAL


def _doctor(arguments: argparse.Namespace, _: argparse.ArgumentParser) -> int:
    from .doctor import diagnose

    _finish(diagnose(), arguments)
    return EQUAL


def _finish(document: dict[str, Any], arguments: argparse.Namespace) -> None:
    """Write the document and its page, and print it; a reader who leaves a pipe early changes no verdict."""
    path, shown = getattr(arguments, "json", None), arguments.page
    written = []
    if path and path != STANDARD_OUTPUT:
        write_json(path, document)
        written.append(path)
    if shown:
        write_text(shown, page(document))
        written.append(shown)
    try:
        if path == STANDARD_OUTPUT:
            print(json.dumps(document, indent=1))
        else:
            out = report.console()
            render = report.brief if getattr(arguments, "quiet", False) else report.render
            for part in render(document):
                out.print(part)
        sys.stdout.flush()
    except BrokenPipeError:
        _drop(sys.stdout)
    if written:
        try:
            print(f"wrote {' and '.join(written)}", file=sys.stderr, flush=True)
        except BrokenPipeError:
            _drop(sys.stderr)


def _drop(*streams: Any) -> None:
    """What is still written to them goes nowhere."""
    for stream in streams:
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


_RUN: dict[str, Callable[[argparse.Namespace, argparse.ArgumentParser], int]] = {
    "optimize": _optimize,
    "verify": _verify,
    "bench": _bench,
    "explain": _explain,
    "tune": _tune,
    "report": _report,
    "doctor": _doctor,
}
