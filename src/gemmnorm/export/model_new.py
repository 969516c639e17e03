"""Write a model file's replacement: one self-contained Python file, all CUDA inlined through `load_inline`.

The file is MODEL's source word for word, the kernels and host functions printed from the plans that `runtime` would run
(`cpp.py`), and `class ModelNew(Model)` with the same generated `forward` that `fuse` puts into a model (`analysis.py`).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from .. import activations, plan
from ..errors import GemmNormRuntimeError, GemmNormValueError
from ..fuse.analysis import OwnerPlan, analyse
from ..fuse.fuse import FuseReport, fuse_report
from ..fuse.matching import Chain
from ..plan import OWN_GEMM, Extent, Plan, Problem, gradient, small
from ..plan.hopper import MOST_ROWS_IN_REGISTERS, choose_tile
from ..verify.model_file import load_model_file
from . import host as cpp

_DTYPES = {torch.float32: "float32", torch.float16: "float16", torch.bfloat16: "bfloat16"}
DEFAULT_TARGET, DEFAULT_STRATEGY = "sm_80", "cublas_folded_bn"
# Words that outside harnesses refuse anywhere in a file, comments included.
REFUSED = (r"\btry:", r"\bexcept\b", r"\bpass\b")


@dataclass(frozen=True)
class ExportResult:
    """What was written: the text, the strategy and target, the plans in it, and what was matched."""

    source: str
    strategy: str
    target: str
    plans: tuple[Plan, ...]
    report: FuseReport
    path: Path | None = None


def export(
    model_path: str | Path,
    output_path: str | Path | None,
    *,
    target: str | None = None,
    strategy: str | None = None,
) -> ExportResult:
    """Write the replacement of the model in `model_path` to `output_path` (None: only return the text).

    Args:
        target: `sm_80`, `sm_90`, …: the GPU that the plans are made for; the file runs on that one and newer ones,
            with Hopper's own strategies (`one_kernel`, `gemm_stats_apply`) on `sm_90` alone. Default: this machine's
            GPU, `sm_80` where there is none.
        strategy: one of `gemmnorm.plan.STRATEGIES`; default: the planner's choice for the target, if it is the same for
            every chain, else `cublas_folded_bn`.

    Raises:
        ModelFileError: the model file is bad.
        GemmNormValueError: it holds no chain (the reasons are in the message), or the strategy cannot be written out.
    """
    loaded = load_model_file(model_path)
    model = _built(loaded)
    owners = [owner for owner in analyse(model) if owner.chains]
    report = fuse_report(model)
    if not owners:
        raise GemmNormValueError(str(report))
    inputs = [t for t in loaded.inputs(0) if isinstance(t, torch.Tensor)]
    batch = inputs[0].shape[0] if inputs else 1024
    dtype = _DTYPES.get(next(model.parameters()).dtype)
    if dtype is None:
        raise GemmNormValueError(f"the kernels compute float32, float16 and bfloat16; the model's are {model}")
    target = (target or _this_machine()).removesuffix("a")
    names = {
        (owner.path, chain): (chain.in_features, chain.out_features, chain.activation, chain.scale is not None)
        for owner in owners
        for chain in owner.chains
    }
    problems = {key: _problem(key, batch, dtype, target) for key in names.values()}
    if strategy is None:
        chosen = {plan.make_plan(problem).strategy for problem in problems.values()}
        strategy = chosen.pop() if len(chosen) == 1 else DEFAULT_STRATEGY
    sites = _sites(problems, target, strategy)
    text = cpp.cuda_text([site for site, _ in sites.values()])
    generated = _python(owners, sites, names, text, strategy, target)
    source = Path(model_path).read_text(encoding="utf-8").rstrip() + "\n" + generated
    for word in REFUSED:
        if refused := re.search(word, generated):
            raise GemmNormRuntimeError(f"export: the generated text holds the word {refused.group()!r}")
    plans = tuple(p for site, _ in sites.values() for p in site.plans)
    path = None if output_path is None else Path(output_path)
    if path is not None:
        temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
        temporary.write_text(source, encoding="utf-8")
        os.replace(temporary, path)
    return ExportResult(source, strategy, target, plans, report, path)


def _built(loaded: Any) -> nn.Module:
    """The model without memory for its parameters where its constructor allows that."""
    args, kwargs = loaded.init_inputs()
    try:
        with torch.device("meta"):
            model: nn.Module = loaded.model_class(*args, **kwargs)
    except Exception:
        return loaded.build(0)  # type: ignore[no-any-return]
    return model


Key = tuple[int, int, str | None, bool]


def _this_machine() -> str:
    """The target that is this machine's GPU, or the default."""
    if torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 0):
        return "sm_{}{}".format(*torch.cuda.get_device_capability())
    return DEFAULT_TARGET


def _problem(key: Key, batch: int, dtype: str, target: str) -> Problem:
    """What a plan is made for: one kind of chain, in training, on the target."""
    inner, features, activation, scaled = key
    arithmetic = "float32" if dtype == "float32" else "native"
    chip = plan.chip_for(int(re.sub(r"\D", "", target)))
    return Problem(
        batch, inner, features, dtype, dtype, dtype, dtype, arithmetic, activation, True, False, scaled, chip
    )  # fmt: skip


def _sites(problems: dict[Key, Problem], target: str, strategy: str) -> dict[Key, tuple[cpp.Site, str]]:
    """One set of plans for every distinct kind of chain."""
    sites: dict[Key, tuple[cpp.Site, str]] = {}
    for index, (key, problem) in enumerate(problems.items(), start=1):
        reason = plan.applicable(problem)[strategy]
        if strategy in OWN_GEMM and problem.chip and problem.chip.arch != 90:
            reason = f"its kernels need the target sm_90; this one is {target}"
        elif strategy == "reference":
            reason = "it has no kernels"
        if reason is not None:
            raise GemmNormValueError(f"strategy: {strategy} cannot be written out for this model: {reason}")
        suffix = "" if len(problems) == 1 else f"_{index}"
        sites[key] = (plan_site(problem, strategy, suffix), suffix)
    return sites


def plan_site(problem: Problem, strategy: str, suffix: str = "") -> cpp.Site:
    """The plans of both modes and directions for any batch, and those for batches like `problem`'s where others serve.

    A strategy that cannot keep what a backward needs gives way to the library's product there, as at run time.
    """
    modes = (True, False)
    return cpp.Site(
        suffix,
        {training: _cases(replace(problem, training=training), strategy) for training in modes},
        {training: _backward_cases(replace(problem, training=training, save=True), strategy) for training in modes},
    )


def _backward_cases(problem: Problem, strategy: str) -> tuple[cpp.Case, ...]:
    """Likewise: a cluster's shared memory holds so many rows. Without an own product a file is for other GPUs too."""
    if strategy not in OWN_GEMM and problem.chip:
        problem = replace(problem, chip=replace(problem.chip, arch=80))

    def made(p: Problem) -> Plan:
        return plan.make_plan(p, strategy, "backward")

    found = made(problem)
    rows = gradient.most_rows(found)
    if rows is None:
        return (cpp.Case("", "", {True: found}),)
    large = problem
    while gradient.most_rows(made(large)) is not None:
        large = replace(large, batch=2 * large.batch)
    return (cpp.Case(f"_to_{rows}", f"batch <= {rows}", {True: found}), cpp.Case("", "", {True: made(large)}))


def _cases(problem: Problem, strategy: str) -> tuple[cpp.Case, ...]:
    """A plan is made for one batch. Where it serves few others, that of a batch large enough to serve all is added."""

    def plans(p: Problem) -> dict[bool, Plan]:
        return {save: plan.make_plan(replace(p, save=save), strategy) for save in (True, False)}

    found = plans(problem)
    narrow = _narrow(found[False])
    if narrow is None:
        return (cpp.Case("", "", found),)
    large = problem
    while _narrow(plans(large)[False]) is not None:
        large = replace(large, batch=2 * large.batch)
    return (cpp.Case(*narrow, found), cpp.Case("", "", plans(large)))


def _narrow(found: Plan) -> tuple[str, str] | None:
    """A word for the batches that a plan serves, and the condition in C++; None where it serves all."""
    for launch in found.launches:
        tiles = launch.grid
        if launch.function == "small_panel":
            return "_one_tile", f"batch <= {small.TILE_ROWS}"
        if "gemmnorm::Finish::kOneBlock" in launch.constants:  # a block has all rows of its features
            return "_one_tile", f"batch <= {tiles.rows}"
        if "gemmnorm::Finish::kWholePanels" in launch.constants:  # blocks wait for each other, wave by wave
            count, weight = replace(tiles, limit=0).cpp(), launch.maps[1]
            if tiles.times * weight.rows >= found.problem.out_features:
                few = "" if choose_tile(found.problem).waits else f"batch <= {MOST_ROWS_IN_REGISTERS} && "
                return "_one_wave", f"{few}{count} <= multiprocessors()"
            rows = Extent(1, tiles.rows)
            same = f"{rows.cpp()} == {rows.value(found.problem.batch)}"
            return "_whole_panels", f"{same} && {count} <= multiprocessors()"
    return None


_ASCII = {
    "·": "*", "×": "x", "Σ": "sum ", "φ": "phi", "γ": "gamma", "β": "beta", "α": "alpha", "μ": "mu", "σ": "sigma",
    "δ": "delta", "κ": "kappa", "∂": "d", "²": "^2", "³": "^3", "ᵀ": "^T", "√": "sqrt ", "≤": "<=", "≥": ">=",
    "≠": "!=", "≈": "~", "→": "->", "←": "<-", "⌈": "ceil(", "⌉": ")", "⌊": "floor(", "⌋": ")", "−": "-", "–": "-",
    "—": "-", "…": "...", "‖": "|", "∞": "inf", "≡": "==", "ŷ": "y_hat", "⁻": "^-", "°": " deg", "’": "'", "“": '"',
    "”": '"', "µ": "u", "¹": "^1", "⁰": "^0", "ε": "eps", "≫": ">>", "≪": "<<", "±": "+-", "∈": "in", "½": "1/2",
}  # fmt: skip


def ascii_text(text: str) -> str:
    """`text` with the mathematical letters of comments spelled out: compilers and editors differ on anything else."""
    return "".join(_ASCII.get(c, c) for c in text)


def _python(
    owners: list[OwnerPlan],
    sites: dict[Key, tuple[cpp.Site, str]],
    names: dict[tuple[str, Chain], Key],
    text: cpp.CudaText,
    strategy: str,
    target: str,
) -> str:
    template = (cpp.TEMPLATES / "model_new.py.txt").read_text(encoding="utf-8")
    arch = int(re.sub(r"\D", "", target))
    chains = []
    for (inner, features, activation, _), (site, suffix) in sites.items():
        dtype = site.plans[0].problem.dtype
        problem = f"({inner}, {features}, torch.{dtype}, {activation is not None}, {suffix!r})"
        what = f"Linear({inner}, {features}) -> scale -> BatchNorm1d" + (f" -> {activation}" if activation else "")
        chains.append(
            f"def fused_linear_scale_batch_norm{suffix}(x, linear, bn, scale=None, activation=None):\n"
            f'    """{what}."""\n'
            f"    return _chain({problem}, x, linear, bn, scale, activation)\n"
        )
    own = strategy in OWN_GEMM  # instructions that one compute capability has and no newer one
    return template.format(
        title=f"generated for {plan.target(arch)} only" if own else f"generated for {target} and newer",
        strategy=strategy,
        declarations=ascii_text(text.declarations),
        kernels=ascii_text(text.kernels),
        host=ascii_text(text.host),
        functions=list(text.functions),
        unserved="!=" if own else "<",
        capability=(arch // 10, arch % 10),
        capability_text=f"{arch / 10}" + (" and no other" if own else ""),
        aligned=_ALIGNED if own else "",
        chains="\n\n".join(chains),
        activations=", ".join(sorted(_called_activations(names))),
        classes="\n\n".join(_classes(owners, sites, names)),
    )


# The copy engine reads the weight too, from addresses that are multiples of 16.
_ALIGNED = "    weight = weight.clone() if weight.data_ptr() % 16 else weight\n"
_FUNCTIONS = {
    "relu": "torch.relu",
    "gelu": "torch.nn.functional.gelu",
    "gelu_tanh": 'lambda y: torch.nn.functional.gelu(y, approximate="tanh")',
    "silu": "torch.nn.functional.silu",
    "leaky_relu": "lambda y: torch.nn.functional.leaky_relu(y, {0})",
    "tanh": "torch.tanh",
    "sigmoid": "torch.sigmoid",
    "hardtanh": "lambda y: torch.nn.functional.hardtanh(y, {0}, {1})",
}


def _called_activations(names: dict[tuple[str, Chain], Key]) -> set[str]:
    """Dictionary entries for the activations that chains apply as functions."""
    found = set()
    for _, chain in names:
        if chain.activation is not None and chain.activation_module is None:
            row, values = activations.parse(chain.activation)
            found.add(f'"{chain.activation}": {_FUNCTIONS[row.name].format(*values)}')
    return found


def _classes(
    owners: list[OwnerPlan], sites: dict[Key, tuple[cpp.Site, str]], names: dict[tuple[str, Chain], Key]
) -> list[str]:
    """A subclass for every owner, and `ModelNew`, whose constructor gives them to the modules inside."""
    found, swaps = [], []
    root = next((owner for owner in owners if not owner.path), None)
    for index, owner in enumerate(o for o in owners if o.path):
        name = f"_Fused{owner.original.__name__}{index + 1}"
        found.append(_class(owner, name, sites, names))
        swaps.append(f'self.get_submodule("{owner.path}").__class__ = {name}')
    lines = ["class ModelNew(Model):", '    """`Model` with its chains fused."""', ""]
    if swaps:
        lines += ["    def __init__(self, *args, **kwargs):", "        super().__init__(*args, **kwargs)"]
        lines += [f"        {swap}" for swap in swaps] + [""]
    if root is not None:
        forward = root.forward_source(_caller(root, sites, names)).splitlines()
        lines += ["    " + line for line in forward]
        found = [*dict.fromkeys(root.imports), *found] if root.imports else found
    return [*found, "\n".join(lines).rstrip() + "\n"]


def _caller(owner: OwnerPlan, sites: dict[Key, tuple[cpp.Site, str]], names: dict[tuple[str, Chain], Key]) -> Any:
    return lambda chain: "fused_linear_scale_batch_norm" + sites[names[owner.path, chain]][1]


def _class(
    owner: OwnerPlan, name: str, sites: dict[Key, tuple[cpp.Site, str]], names: dict[tuple[str, Chain], Key]
) -> str:
    text = owner.class_source(name, _caller(owner, sites, names))
    if owner.original.__module__.startswith("torch."):
        text = text.replace(f"({owner.original.__name__}):", f"(torch.nn.{owner.original.__name__}):", 1)
    return "\n".join([*owner.imports, *([""] if owner.imports else []), text])


def compile_check(path: str | Path, target: str | None = None) -> str | None:
    """Compile the CUDA text of an exported file with nvcc: None when it compiles, else the reason or the log.

    Needs no GPU and no CUDA build of PyTorch: its CPU headers suffice, with an empty `cuda_cmake_macros.h`.
    """
    nvcc = shutil.which("nvcc")
    if nvcc is None:
        return "there is no nvcc here"
    source = Path(path).read_text(encoding="utf-8")
    texts = ("_DECLARATIONS", "_KERNELS", "_HOST")
    parts = [re.search(rf'^{name} = r"""\n(.*?)"""', source, re.M | re.S) for name in texts]
    if not all(parts):
        return "the file holds no CUDA text of gemmnorm's"
    arch = re.sub(r"\D", "", target or DEFAULT_TARGET)
    arch += "a" if arch == "90" else ""
    from torch.utils.cpp_extension import include_paths

    with tempfile.TemporaryDirectory() as folder:
        macros = Path(folder) / "c10" / "cuda" / "impl"
        macros.mkdir(parents=True)
        (macros / "cuda_cmake_macros.h").write_text("#pragma once\n", encoding="utf-8")
        unit = Path(folder) / "unit.cu"
        unit.write_text("".join(p.group(1) for p in parts if p), encoding="utf-8")
        includes = [f"-I{folder}", *(f"-I{p}" for p in include_paths())]
        done = subprocess.run(
            [nvcc, "-std=c++20" if _needs_20() else "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}", "-c",
             str(unit), "-o", str(Path(folder) / "unit.o"), "--expt-relaxed-constexpr", *includes],
            capture_output=True,
            text=True,
            timeout=600,
        )  # fmt: skip
    return None if done.returncode == 0 else (done.stderr or done.stdout)[-4000:]


def _needs_20() -> bool:
    """Newer releases of PyTorch have headers in C++20."""
    return tuple(int(v) for v in torch.__version__.split("+")[0].split(".")[:2]) >= (2, 12)


# Strategy → the target that its committed examples are written for.
EXAMPLES = {"cublas_bn": "sm_80", "cublas_folded_bn": "sm_80", "one_kernel": "sm_90"}


def regenerate(folder: str | Path) -> list[Path]:
    """Write `model_new/<model>_<strategy>.py` for the founding models in `folder`; returns the paths."""
    folder, written = Path(folder), []
    for name in ("kb33", "kb39"):
        for strategy, target in EXAMPLES.items():
            path = folder / "model_new" / f"{name}_{strategy}.py"
            export(folder / f"{name}.py", path, strategy=strategy, target=target)
            written.append(path)
    return written
