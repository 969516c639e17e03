"""Write a model file's replacement: one self-contained Python file, all CUDA inlined through `load_inline`.

The file is MODEL's source word for word, then the generated half (`generated.py`). `read_model` loads the model and
looks for its chains, once; `write_replacement` writes what it found; `export` does one after the other.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import os
import re
import tokenize
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from ..errors import GemmNormRuntimeError, GemmNormValueError
from ..fuse import FuseReport, OwnerPlan, analyse, report_of
from ..plan import Plan
from ..runtime import measured
from ..userfiles import ModelFile, ModelFileError, load_model_file
from .batches import Kind, common_strategy, kind_of, problem_of, sites_of
from .generated import Contents, beside_model, check_names, generated_text

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
DEFAULT_TARGET, DEFAULT_STRATEGY = "sm_80", "cublas_folded_bn"
# Words that outside harnesses refuse anywhere in a file, comments included.
REFUSED = (r"\btry:", r"\bexcept\b", r"\bpass\b")
# Strategy → the target that its committed examples are written for.
EXAMPLES = {"cublas_bn": "sm_80", "cublas_folded_bn": "sm_80", "one_kernel": "sm_90"}


@dataclass(frozen=True)
class FoundModel:
    """A model file that has been loaded, and the chains in its model."""

    path: Path
    file: ModelFile
    model: nn.Module
    owners: list[OwnerPlan]
    report: FuseReport


@dataclass(frozen=True)
class ExportResult:
    """What was written: the text, the strategy and target, the plans in it, and what was matched.

    `model` is the part of the text that is the model's own source, `contents` what the rest is generated from.
    """

    source: str
    strategy: str
    target: str
    plans: tuple[Plan, ...]
    report: FuseReport
    model: str
    contents: Contents
    path: Path | None = None


def export(
    model_path: str | Path,
    output_path: str | Path | None,
    *,
    target: str | None = None,
    strategy: str | None = None,
    precision: str | None = None,
) -> ExportResult:
    """Write the replacement of the model in `model_path` to `output_path` (None: only return the text).

    Args:
        model_path: a file with `Model`, `get_inputs` and `get_init_inputs`.
        output_path: where the file is written.
        target: `sm_80`, `sm_90`, …: the GPU that the plans are made for; the file runs on that one and newer ones,
            with Hopper's own strategies (`one_kernel`, `gemm_stats_apply`) on `sm_90` alone. Default: this machine's
            GPU, `sm_80` where there is none.
        strategy: one of `gemmnorm.plan.STRATEGIES`; default: the planner's choice for the target, if it is the same for
            every chain, else `cublas_folded_bn`.
        precision: "fp32", "fp16" or "bf16": the kernels are for the model cast to it; default: as the file makes it.

    Raises:
        ModelFileError: the model file is bad.
        GemmNormValueError: it holds no chain (the reasons are in the message), or the strategy cannot be written out.

    Examples:
        >>> result = gemmnorm.export.export("model.py", "model_new.py", target="sm_90")  # doctest: +SKIP
    """
    return write_replacement(read_model(model_path, precision), output_path, target=target, strategy=strategy)


def read_model(path: str | Path, precision: str | None = None) -> FoundModel:
    """Load the model file and analyse its model.

    Raises:
        ModelFileError: the model file is bad.
    """
    file = load_model_file(path, precision)
    model = _built(file)
    owners = analyse(model, only_plain=True)
    return FoundModel(Path(path), file, model, owners, report_of(model, owners))


def write_replacement(
    found: FoundModel, output_path: str | Path | None, *, target: str | None = None, strategy: str | None = None
) -> ExportResult:
    """Write the replacement of a model that has been read; see `export`."""
    owners = [beside_model(owner, found.file.module) for owner in found.owners if owner.chains]
    if not owners:
        raise GemmNormValueError(str(found.report))
    synchronised = [str(chain) for owner in owners for chain in owner.chains if chain.synchronised]
    if synchronised:
        raise GemmNormValueError(
            f"{', '.join(synchronised)}: a SyncBatchNorm cannot be written out, because a file knows no process groups"
        )
    target = (target or _this_machine()).removesuffix("a")
    rows, dtype = _rows(found, owners), _dtype(found)
    problems = {kind: problem_of(kind, batch, dtype, target) for kind, batch in rows.items()}
    strategy = strategy or common_strategy(problems.values(), DEFAULT_STRATEGY)
    sites = sites_of(problems, target, strategy)
    contents = Contents(owners, sites, target, strategy)
    generated = generated_text(contents)
    check_names(generated, found.file.module)
    for word in REFUSED:
        if refused := re.search(word, generated):
            raise GemmNormRuntimeError(f"export: the generated text holds the word {refused.group()!r}")
    model = _text_of(found.path).rstrip() + "\n"
    source = model + generated
    path = None if output_path is None else Path(output_path)
    if path is not None:
        end = path.resolve()  # what a link leads to is replaced, not the link
        temporary = end.with_name(f".{end.name}.{os.getpid()}.tmp")
        temporary.write_text(source, encoding="utf-8")
        os.replace(temporary, end)
    return ExportResult(source, strategy, target, contents.plans, found.report, model, contents, path)


def regenerate(folder: str | Path) -> list[Path]:
    """Write `model_new/<model>_<strategy>.py` for KernelBench's 33 and 39 in `folder`; returns the paths."""
    folder, written = Path(folder), []
    for name in ("kb33", "kb39"):
        found = read_model(folder / f"{name}.py")
        for strategy, target in EXAMPLES.items():
            path = folder / "model_new" / f"{name}_{strategy}.py"
            write_replacement(found, path, strategy=strategy, target=target)
            written.append(path)
    return written


def _text_of(path: Path) -> str:
    """A source file's text, which will be written as UTF-8 whatever its encoding."""
    with tokenize.open(path) as file:
        encoding, text = file.encoding, file.read()
    first, second, *others = (*text.split("\n", 2), "")
    if encoding not in ("utf-8", "utf-8-sig"):
        first, second = (re.sub(r"(#.*?coding[:=]\s*)[-\w.]+", r"\1utf-8", line) for line in (first, second))
    return "\n".join((first, second, *others))


def _built(file: ModelFile) -> nn.Module:
    """The model, without memory for its parameters where its constructor allows that."""
    arguments = file.init_inputs()
    try:
        with torch.device("meta"):
            return file.build(0, arguments)
    except ModelFileError:
        return file.build(0)


def _rows(found: FoundModel, owners: Sequence[OwnerPlan]) -> dict[Kind, int]:
    """How many rows each kind of chain is given, by a run without memory; else the first dimension of the inputs.

    Raises:
        GemmNormValueError: each BatchNorm is given more than a matrix, which the kernels do not serve.
    """
    inputs = [v.to("meta") if isinstance(v, torch.Tensor) else v for v in found.file.inputs(0)]
    batch = next((v.shape[0] for v in inputs if isinstance(v, torch.Tensor) and v.ndim > 0), 1024)
    rows = {kind_of(chain): batch for owner in owners for chain in owner.chains}
    ranks: dict[str, int] = {}
    with contextlib.suppress(Exception), torch.no_grad():
        model = copy.deepcopy(found.model).to("meta").eval()
        for owner in owners:
            module = model.get_submodule(owner.path)
            for chain in owner.chains:
                note = functools.partial(_note_rows, rows, kind_of(chain))
                module.get_submodule(chain.linear).register_forward_pre_hook(note)
                note = functools.partial(_note_rank, ranks, str(chain))
                module.get_submodule(chain.bn).register_forward_pre_hook(note)
        model(*inputs)
    if ranks and min(ranks.values()) > 2:
        name, rank = next(iter(ranks.items()))
        raise GemmNormValueError(
            f"{name}: expected a matrix at the BatchNorm, got {rank} dimensions, of which it normalises the second"
        )
    return rows


def _note_rows(rows: dict[Kind, int], kind: Kind, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    rows[kind] = given[0].shape[:-1].numel()


def _note_rank(ranks: dict[str, int], chain: str, _: nn.Module, given: tuple[torch.Tensor, ...]) -> None:
    ranks[chain] = given[0].ndim


def _dtype(found: FoundModel) -> str:
    """Of the model's parameters."""
    dtype = next(found.model.parameters()).dtype
    if dtype not in _DTYPES:
        raise GemmNormValueError(f"the kernels compute float32, float16 and bfloat16; the model's dtype is {dtype}")
    return _DTYPES[dtype]


def _this_machine() -> str:
    """The target that is this machine's GPU, or the default."""
    if torch.cuda.is_available():
        arch = measured.described(torch.device("cuda", torch.cuda.current_device())).chip.arch
        return f"sm_{arch}" if arch >= 80 else DEFAULT_TARGET
    return DEFAULT_TARGET
