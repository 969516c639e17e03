"""What an exported file has of the kernel sources: pruned, folded, the same PTX; and the figures in its head."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from gemmnorm import export as exporting
from gemmnorm import plan
from gemmnorm.export import host, kernels, method, prune
from gemmnorm.export.batches import plan_site
from gemmnorm.export.fold import fold
from gemmnorm.runtime.sources import KERNELS, device_source

EXAMPLES = Path(__file__).parents[1] / "examples"


def test_the_figures_are_those_of_the_result_file():
    """The worst errors, to the two digits that a file shows, or a quarter where they were measured anew since."""
    rows = json.loads((EXAMPLES.parent / method.RESULTS).read_text())["rows"]
    for (strategy, dtype), models in method.FIGURES.items():
        for model, figures in models.items():
            (row,) = (
                r for r in rows if (r["case"], r["strategy"], r["phase"], r["param_dtype"], r["autocast"])
                == (model, strategy, "train_fwd", dtype, False) and r["arithmetic"] != "tf32" and not r["activation"]
            )  # fmt: skip
            assert figures[1] == pytest.approx(row["eager_error"], rel=0.25), (strategy, dtype, model)
            # These rows ran cluster_normalize before it corrected its mean; exported files run three launches.
            if (strategy, dtype) != ("cublas_folded_bn", "float32"):
                assert figures[0] == pytest.approx(row["error"], rel=0.25), (strategy, dtype, model)


def test_statistics_by_the_gram_matrix_take_the_multiprocessors_that_are_there():
    """No more than their memory is for, and not fewer than the matrix has parts."""
    half = ("bfloat16",) * 4
    problem = plan.Problem(65536, 256, 2048, *half, "native", chip=plan.chip_for(90))
    launch = plan.make_plan(problem, "gemm_stats_apply").launches[0]
    assert launch.function == "gram_statistics" and launch.least == 3
    text = host.cuda_text([plan_site(problem, "gemm_stats_apply")]).host
    assert "std::min<int64_t>(132, multiprocessors())" in text and "TORCH_CHECK(multiprocessors() >= 3, " in text


@pytest.mark.parametrize("name", sorted(str(path.relative_to(KERNELS)) for path in KERNELS.rglob("*.cuh")))
def test_pruning_loses_nothing_that_it_keeps(name):
    """With everything kept a file's text is what it was, but for blank lines and comments to tools."""
    *_, source = prune._in_order([name])
    for declaration in source.declarations:
        for part in (declaration, *declaration.members):
            part.kept = True
    text = (KERNELS / name).read_text()
    inside = prune._FOR_TOOLS.sub("", text[text.index("namespace gemmnorm {\n") + 21 : text.rindex("}  // namespace")])
    inside = re.sub(r"\n\n(?:// [^\n]*\n)+(?=\n)", "\n", inside)  # a comment that stands alone describes nothing
    kept = source.kept_text()[len(source.head) :]
    assert [line for line in kept.splitlines() if line] == [line for line in inside.splitlines() if line]


@pytest.mark.parametrize(
    ("source", "folded"),
    [
        ("  if (kYes) a();\n  b();\n", "  a();\n  b();\n"),
        ("  if constexpr (kNo) {\n    a();\n  }\n  b();\n", "  b();\n"),
        ("  if (kNo)\n    a();  // why\n  b();\n", "  b();\n"),
        ("  if constexpr (kNo) {\n    a();\n  } else {\n#pragma unroll\n    b();\n  }\n", "#pragma unroll\n  b();\n"),
        ("  if (x) a();\n  else if (kNo) b();\n  else c();\n", "  if (x) a();\n  else c();\n"),
        ("  if (x) a();\n  else if (kNo) b();\n  c();\n", "  if (x) a();\n  c();\n"),
        ("  if (kYes && x > 0) a();\n", "  if (x > 0) a();\n"),
        ("  if (kNo && x) for (;;) a();\n  b();\n", "  b();\n"),
        ("  if (!(kNo && x)) a();\n", "  a();\n"),
        ("  if (!(x <= 1) || kNo) a();\n", "  if (!(x <= 1)) a();\n"),
        ("  i = (kYes ? p.a : p.b) + c;\n", "  i = p.a + c;\n"),
        ("  return kNo ? 1 : f(x, N::y);\n", "  return f(x, N::y);\n"),
        ("  const int n = f();\n  if (kNo) g(n);\n", ""),
        ("  const bool b = x && kYes ? c : d;  // unknown\n", "  const bool b = x && kYes ? c : d;  // unknown\n"),
        ("  // if (kYes) a();\n", "  // if (kYes) a();\n"),
    ],
)
def test_known_branches_are_folded(source, folded):
    assert fold(source, {"kYes": True, "kNo": False}) == folded


def test_a_file_holds_what_its_plans_reach(tmp_path):
    source = exporting.export(EXAMPLES / "kb33.py", None, strategy="one_kernel", target="sm_90").source
    for there in (
        "GEMMNORM_WGMMA(128, half,",
        "struct AccumulatorSwapAB {",
        "to_float(half v)",
        "OperandTraits<fp16x2>",
    ):
        assert there in source, there
    for absent in (
        *(
            "GEMMNORM_WGMMA(64",
            'bfloat16, "m64',
            "struct AccumulatorNormal {",
            "struct Mainloop {",
            "to_float(bfloat16",
        ),
        *(
            "OperandTraits<tf32>",
            "cluster_gradient",
            "CoResidentEpilogue",
            "normalize_staged",
            "cast_rows",
            '#include "',
        ),
    ):
        assert absent not in source, absent
    structs = re.findall(r"^struct (\w+) [{:]", source, re.M)
    assert len(set(structs)) == len(structs)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
@pytest.mark.parametrize(
    ("strategy", "dtype", "batch", "features"),
    [
        ("cublas_bn", "float32", 1000, 500),
        ("gemm_stats_apply", "bfloat16", 256, 512),
        ("one_kernel", "float32", 64, 512),
        ("one_kernel", "bfloat16", 65536, 512),  # multiplied twice, beside evaluation
        ("one_kernel", "bfloat16", 8192, 1000),  # x shared by two blocks
    ],
)
def test_pruned_and_unpruned_sources_are_the_same_ptx(strategy, dtype, batch, features, tmp_path):
    arithmetic = "float32" if dtype == "float32" else "native"
    problem = plan.Problem(batch, features, features, *[dtype] * 4, arithmetic, "gelu", chip=plan.chip_for(90))
    found = kernels.Kernels()
    host._functions(plan_site(problem, strategy), found)
    texts = found.text(), device_source(found.files) + found.own_text()
    assert len(texts[0]) < len(texts[1])
    ptx = []
    for i, text in enumerate(texts):
        unit = tmp_path / f"{i}.cu"
        unit.write_text(text)
        arch = "90a" if strategy in plan.OWN_GEMM else "80"
        command = ["nvcc", "-std=c++17", f"-arch=sm_{arch}", "-ptx", "--expt-relaxed-constexpr", "-o", "-", str(unit)]
        done = subprocess.run(command, capture_output=True, text=True, check=True)
        ptx.append(re.sub(r"//[^\n]*", "", done.stdout))
    assert ptx[0] == ptx[1]
