"""The exported file: its Python on the CPU, its CUDA through nvcc where there is one. On a GPU: test_export_gpu.py."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest
import torch
import ways
from export_support import EXAMPLES, NESTED, compare, hopper, small

from gemmnorm import export as exporting
from gemmnorm import plan
from gemmnorm.errors import GemmNormValueError
from gemmnorm.export import method
from gemmnorm.export.batches import plan_site
from gemmnorm.export.host import cuda_text
from gemmnorm.plan import small as small_panels
from gemmnorm.runtime import measured
from gemmnorm.userfiles import load_source


@pytest.fixture(scope="module")
def nested(tmp_path_factory):
    path = tmp_path_factory.mktemp("export") / "nested.py"
    path.write_text(NESTED)
    return exporting.export(path, path.with_name("nested_new.py"))


def test_the_python_part_runs_from_a_string_and_equals_the_model(nested):
    compare(load_source(nested.source, "nested_new"), "cpu", 1e-5)


def test_a_scale_that_becomes_none_raises_as_in_the_original(nested):
    for name in ("Model", "ModelNew"):
        model = getattr(load_source(nested.source, "nested_new"), name)(32)
        model.block.gain = None
        with pytest.raises(TypeError):
            model(torch.randn(40, 32))


def test_the_file_is_the_source_word_for_word_then_what_harnesses_ask_for(nested):
    assert nested.source.startswith(NESTED.rstrip())
    generated = nested.source[len(NESTED.rstrip()) :]
    for word in (*exporting.REFUSED, r"__file__", r"from __future__"):
        assert not re.search(word, generated), word
    for word in ("load_inline", "__global__", "fused_gemm_scale_bn_", "class ModelNew(Model)"):
        assert word in generated
    assert nested.path.read_text() == nested.source


def test_a_model_without_a_chain_is_refused_with_the_reason(tmp_path):
    path = tmp_path / "none.py"
    path.write_text(NESTED.replace("nn.BatchNorm1d(24)", "nn.LayerNorm(24)").replace("nn.BatchNorm1d(16)", "nn.ReLU()"))
    with pytest.raises(GemmNormValueError, match="chain"):
        exporting.export(path, tmp_path / "new.py")
    assert not (tmp_path / "new.py").exists()


def _embedding(path: Path, rows: str, inputs: str) -> Path:
    path.write_text(
        "import torch\nfrom torch import nn\nclass Model(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.gemm, self.bn = nn.Linear(32, 64), nn.BatchNorm1d(64)\n"
        f"    def forward(self, *given):\n        x = given[-1]\n        return self.bn(self.gemm({rows}))\n"
        f"def get_inputs():\n    return [{inputs}]\n"
        "def get_init_inputs():\n    return []\n"
    )
    return path


@pytest.mark.parametrize(
    ("rows", "inputs", "batch"),
    [
        ("x", "torch.randn(48, 32)", 48),
        ("x.reshape(-1, 32)", "torch.randn(8, 256, 32)", 2048),
        ("x", "torch.tensor(2.0), torch.randn(48, 32)", 48),
        ("x[:, :32]", "torch.zeros(4096, dtype=torch.long), torch.randn(48, 40)", 48),
    ],
)
def test_plans_are_for_the_rows_that_reach_the_linear(rows, inputs, batch, tmp_path):
    found = exporting.export(_embedding(tmp_path / "rows.py", rows, inputs), None, target="sm_90")
    assert {plan.problem.batch for plan in found.plans if plan.problem.batch < 10_000} == {batch}


def test_more_than_a_matrix_at_the_batch_norm_is_refused(tmp_path):
    path = _embedding(tmp_path / "three.py", "x", "torch.randn(5, 64, 32)")
    with pytest.raises(GemmNormValueError, match="expected a matrix at the BatchNorm, got 3 dimensions"):
        exporting.export(path, None)


def test_a_synchronised_chain_is_refused(tmp_path):
    path = tmp_path / "synchronised.py"
    path.write_text(NESTED.replace("nn.BatchNorm1d(24)", "nn.SyncBatchNorm(24)"))
    with pytest.raises(GemmNormValueError, match="a SyncBatchNorm cannot be written out"):
        exporting.export(path, tmp_path / "new.py")


def host_function(source: str, name: str) -> str:
    """The text of the definition of one host function."""
    found = re.search(rf"^Tensors {name}\([^;{{]*\{{\n.*?^}}", source, re.M | re.S)
    assert found, name
    return found.group()


@pytest.fixture
def large_schedules():
    """Forwards of own products are those of large batches; the others have tests of their own."""
    wanted = ("deferred", "co-resident", "statistics", "evaluate")
    with plan.forcing(lambda c: c.phase == "backward" or getattr(c.variant, "schedule", "") in wanted):
        yield


@pytest.mark.parametrize(
    ("ending", "batch", "condition"),
    [
        ("_one_tile", 64, "batch <= 128"),
        ("_few_tiles", 200, r"\(\(batch \+ 127\) / 128\) == 2"),
        ("_one_wave", 16384, r"\(\(batch \+ 255\) / 256\) == 64 && 128 <= multiprocessors\(\)"),
        (None, 65536, ""),
    ],
)
def test_the_models_own_batch_has_its_plan_and_any_other_the_persistent_one(tmp_path, ending, batch, condition):
    source = hopper(tmp_path, batch=batch).source
    assert len(re.findall(r"^  const auto run = ", host_function(source, "forward_training"), re.M)) == bool(ending)
    kernels = re.findall(r"using Epilogue = gemmnorm::(\w+)Epilogue<", source)
    any_batch = host_function(source, "forward_training_any_batch" if ending else "forward_training")
    assert "launch_hopper(fused_gemm_scale_bn, std::min<int64_t>(" in any_batch
    assert re.search(
        r"multiprocessors\(\)\), 384,\s+\d+ /\* shared \*/, 1 /\* cluster \*/,\s+true /\* cooperative \*/", any_batch
    )
    assert any_batch.count("save ? 1 : 0") == 1 and "if (!save) return {y};" in any_batch
    if ending is None:
        assert kernels[0] == "Deferred" and kernels[1:] == ["Evaluate"]
        return
    chosen = rf"run = {condition} \? forward_training{ending} : forward_training_any_batch;"
    assert re.search(chosen, host_function(source, "forward_training"))
    launch = host_function(source, f"forward_training{ending}")
    if ending in ("_one_tile", "_few_tiles"):
        assert kernels[0] == "Deferred" and "gemmnorm::small_panel<" in source
        assert re.search(r"288,\s+\d+ /\* shared \*/, \d+ /\* cluster \*/,\s+false /\* cooperative \*/", launch)
        few, any_batch = (host_function(source, f"forward_evaluation{which}") for which in (ending, "_any_batch"))
        assert "((batch - 1) % 128 + 8) / 8 * 8, 64)" in few  # rows of the last tile's boxes
        assert "1 /* cluster */" in any_batch and "at::mm_out" not in any_batch
    else:
        assert kernels[0] == "Deferred" and kernels[1:] == ["CoResident", "Evaluate"]
        assert f"{2 if batch == 256 else 1} /* cluster */" in launch
        assert f"{'false' if batch == 256 else 'true'} /* cooperative */" in launch


def test_one_tile_of_float32_is_a_cluster_for_each_panel_or_a_block(tmp_path, monkeypatch):
    for blocks in (4, 1):
        source = hopper(tmp_path, dtype="float32", batch=64).source
        assert "run = batch <= 128 ? forward_training_one_tile" in host_function(source, "forward_training")
        assert ("gemmnorm::SingleTileEpilogue<" in source) == (blocks == 1)
        one = host_function(source, "forward_training_one_tile")
        assert f"{blocks} /* cluster */" in one and "false /* cooperative */" in one
        assert "TFLOAT32" not in one
        monkeypatch.setattr(small_panels, "PANELS", ())
        plan.cached_plan.cache_clear()
    plan.cached_plan.cache_clear()


def test_operands_of_odd_rows_are_copied_into_padded_ones(tmp_path):
    path = small(tmp_path / "odd.py")
    path.write_text(path.read_text().replace("in_features = 512", "in_features = 515"))
    module = exporting.export(path, tmp_path / "new.py", strategy="one_kernel", target="sm_90")
    forward = host_function(module.source, "forward_training_any_batch")
    assert ", 2 * batch * 576, 2 * 512 * 576}" in forward
    assert "p.given_x = pointer<gemmnorm::bfloat16>(x);" in forward
    assert "p.cast_weight = cast_weight;" in forward
    assert re.search(r"tensor_map\(cast_x, \w+, batch, 515, \d+, 64, 576 /\* pitch \*/\)", forward)
    assert "cast_" not in host_function(module.source, "backward_training_any_batch")


def test_a_limit_of_rows_is_no_number_of_multiprocessors():
    """Rows that are split before the product are a number of their own."""
    problem = plan.Problem(6144, 4096, 3072, chip=plan.chip_for(90))
    split_rows = plan.make_plan(problem, "one_kernel").launches[0]
    assert split_rows.function == "split_rows"
    host = cuda_text([plan_site(problem, "one_kernel")]).host
    assert f", {split_rows.grid.limit})" in host


@pytest.mark.usefixtures("large_schedules")
def test_the_own_product_saves_its_group_means_and_evaluation_with_gradients_is_the_modules(tmp_path):
    for strategy in ("one_kernel", "gemm_stats_apply"):
        result = hopper(tmp_path, strategy)
        source = result.source
        last = host_function(source, "forward_training" + ("_any_batch" if strategy == "one_kernel" else ""))
        assert last.endswith("return {y, product, group_mean, mean, rstd};\n}")
        chooser, few, any_batch = (
            host_function(source, f"backward_training{e}") for e in ("", "_to_256", "_any_batch")
        )
        assert "run = batch <= 256 ? backward_training_to_256 : backward_training_any_batch;" in chooser
        assert "pointer<float>(group_mean)" in few and "pointer<float>(group_mean)" in any_batch
        assert few.count("launch_hopper(") == 1
        assert any_batch.count(" launch(") == 3 and "launch_hopper(" not in any_batch
        evaluation = host_function(source, "forward_evaluation")
        assert "launch_hopper(" in evaluation and "at::mm_out" not in evaluation and "take_counters" not in evaluation
        assert "backward_evaluation" not in source and "serves and (training or not save)" in source
        assert {p.strategy for p in result.plans} == {strategy}


def test_a_backward_in_one_launch_stands_in_a_file_where_it_pays():
    """At 1024 x 8192 x 8192 two products take most of the time."""
    for batch, features, cases in ((256, 512, 2), (1024, 8192, 1)):
        problem = plan.Problem(batch, features, features, chip=plan.chip_for(90))
        site = plan_site(problem, "one_kernel")
        assert len(site.backward[True]) == cases and False not in site.backward


def test_in_evaluation_small_panel_may_be_the_plan_for_any_batch():
    """With six features nothing else is ever predicted cheaper; in training it has at most a cluster's tiles."""
    site = plan_site(plan.Problem(5, 6, 6, chip=plan.chip_for(90)), "one_kernel")
    assert site.forward[False][-1].condition == ""
    of_any_batch = {mode: cases[-1].plans[False].launches for mode, cases in site.forward.items()}
    assert "small_panel" in {launch.function for launch in of_any_batch[False]}
    assert "small_panel" not in {launch.function for launch in of_any_batch[True]}


def test_rows_that_begin_in_the_middle_of_a_sector_have_a_map_of_their_own(tmp_path):
    with plan.forcing(lambda c: c.phase == "backward" or ways.overlapping(c)):
        source = hopper(tmp_path, "gemm_stats_apply", batch=5000, features=376).source
    kind, size = "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16", "376, 64, 64, 2 * 376 /* pitch */)"
    y, pairs = "tensor_map(pointer<gemmnorm::bfloat16>(y)", "std::max<int64_t>"
    last = host_function(source, "forward_training")
    assert f"p.map_y = {y}, {kind}, {pairs}((batch + 1) / 2, 1), {size}" in last
    assert f"p.map_odd_y = {y} + 376, {kind}, {pairs}((batch + 0) / 2, 1), {size}" in last
    assert re.search(r"p.map_last_weight = .*\(\(376 - 1\) % 128 \+ 16\) / 8 \* 8, 64\)", last)


@pytest.mark.usefixtures("large_schedules")
def test_launches_bind_maps_counters_and_numbers(tmp_path):
    alone = host_function(hopper(tmp_path, batch=2048).source, "forward_training_one_wave")
    kind = "CU_TENSOR_MAP_DATA_TYPE_BFLOAT16"
    assert re.search(rf"tensor_map\(pointer<gemmnorm::bfloat16>\(x\), {kind}, batch, 512, \d+, 64\)", alone)
    assert re.search(rf"tensor_map\(pointer<gemmnorm::bfloat16>\(weight\), {kind}, 512, 512, \d+, 64\)", alone)
    assert f"p.map_y = tensor_map(pointer<gemmnorm::bfloat16>(y), {kind}, batch, 512, 64, 64)" in alone
    assert "product = save ? empty(x, torch::kBFloat16, {batch, 512}) : y;" in alone
    assert "p.keep_product = save ? 1 : 0" in alone and "take_counters(x, stream, " in alone
    source = hopper(tmp_path, dtype="float32").source
    for ending in ("_any_batch", "_one_wave"):
        split = host_function(source, f"forward_training{ending}")
        counters = int(re.search(r"take_counters\(x, stream, (\d+)\)", split).group(1))
        assert split.count(f"pointer<unsigned int>(counters) + {counters - 4}") == 3  # `amax_state` is the last four
        assert re.search(r"tensor_map\(split_x, CU_TENSOR_MAP_DATA_TYPE_FLOAT16, batch, 1024, \d+, 64\)", split)
        launches = re.findall(r"(launch\w*)\((\w+),", split)
        assert launches == [
            ("launch", "fused_gemm_split_operands"),
            ("launch_hopper", "fused_gemm_scale_bn" + ("_one_wave" if ending == "_one_wave" else "")),
            ("launch", "fused_gemm_scale_bn_fallback"),
        ]


@pytest.mark.parametrize(
    ("strategy", "dtype", "features", "target", "reason"),
    [
        ("one_kernel", "bfloat16", 512, "sm_80", "sm_90"),
        ("gemm_stats_apply", "bfloat16", 512, "sm_100", "sm_90"),
        ("gemm_stats_apply", "float32", 512, "sm_90", "split operands"),
        ("one_kernel", "bfloat16", 508, "sm_90", "multiple of 16 bytes"),
        ("reference", "float32", 512, "sm_90", "no kernels"),
    ],
)
def test_a_strategy_that_cannot_be_written_out_says_why(tmp_path, strategy, dtype, features, target, reason):
    model = small(tmp_path / "model.py", dtype, features=features)
    with pytest.raises(GemmNormValueError, match=f"{strategy} cannot be written out for this model: .*{reason}"):
        exporting.export(model, tmp_path / "new.py", strategy=strategy, target=target)


def test_several_chains_with_the_own_product(tmp_path):
    path = tmp_path / "nested.py"
    path.write_text(NESTED.replace("    def forward(self, x):\n        return self.head",
                                  "        self.bfloat16()\n\n    def forward(self, x):\n        return self.head")
                    .replace("torch.randn(40, 32)", "torch.randn(40, 32).bfloat16()"))  # fmt: skip
    source = exporting.export(path, None, strategy="one_kernel", target="sm_90").source
    names = re.findall(r"__launch_bounds__\(\d+, \d\) (\w+)\(", source)
    assert len(names) == len(set(names))
    for suffix in ("_1", "_2"):
        assert f"forward_training{suffix}_one_tile" in host_function(source, f"forward_training{suffix}")
    compare(load_source(source, "nested_half"), "cpu", 1e-5)


def test_the_python_part_with_the_own_product_runs_on_the_cpu_and_refuses_other_gpus(tmp_path, monkeypatch):
    module = load_source(hopper(tmp_path).source, "small_half")
    compare(module, "cpu", 1e-5)
    monkeypatch.setattr(module, "_CUDA_HOME", "/usr/local/cuda")
    monkeypatch.setattr(module, "_extension", lambda capability: capability)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    for index, capability in enumerate([(8, 0), (10, 0), (12, 0)]):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device, found=capability: found)
        with pytest.warns(UserWarning, match=r"9\.0 and no other; plain PyTorch") as caught:
            assert module._kernels_for(torch.device("cuda", index)) is None
            assert module._kernels_for(torch.device("cuda", index)) is None
        assert len(caught) == 1
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert module._kernels_for(torch.device("cuda", 3)) == (9, 0)


@pytest.mark.parametrize(("strategy", "target"), exporting.EXAMPLES.items())
@pytest.mark.parametrize("name", ["kb33", "kb39"])
def test_the_committed_files_are_what_is_generated(name, strategy, target):
    committed = EXAMPLES / "model_new" / f"{name}_{strategy}.py"
    generated = exporting.export(EXAMPLES / f"{name}.py", None, strategy=strategy, target=target)
    assert committed.read_text() == generated.source


def test_a_file_says_how_it_computes_and_how_accurately(tmp_path):
    source = hopper(tmp_path, dtype="float32").source
    comment = source[source.index("# Generated by gemmnorm") : source.index("import functools")]
    for words in ("# Method", "# Accuracy", "22 to 24", "no cheat", "3.1e-7 at kb33", "eager: 1.9e-6", method.RESULTS):
        assert words in comment, words
    half = hopper(tmp_path).source
    assert "centred" in half and "no cheat" not in half and "3.8e-3 at kb33" in half
    assert "allow_tf32" in exporting.export(EXAMPLES / "kb33.py", None, strategy="cublas_bn", target="sm_80").source


@pytest.mark.parametrize(("capability", "target", "strategy"), [
    (None, "sm_80", "cublas_folded_bn"), ((7, 5), "sm_80", "cublas_folded_bn"), ((8, 9), "sm_89", "cublas_folded_bn"),
    ((9, 0), "sm_90", "one_kernel"), ((10, 0), "sm_100", "cublas_folded_bn"),
])  # fmt: skip
def test_by_default_a_file_is_for_this_machine(monkeypatch, capability, target, strategy):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: capability is not None)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    chip = capability and plan.chip_for(10 * capability[0] + capability[1])
    monkeypatch.setattr(measured, "described", lambda device: measured.Gpu("a GPU", chip))
    result = exporting.export(EXAMPLES / "kb33.py", None)
    assert (result.target, result.strategy) == (target, strategy)


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_the_cuda_part_compiles(nested):
    assert exporting.compile_check(nested.path, "sm_90") is None
    in_host = "int f(const torch::Tensor& t) { return t.no(); }"
    assert 'has no member "no"' in str(exporting.compile_check(_broken(nested.path, in_host), "sm_90"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc here")
def test_the_own_product_compiles_for_hopper(tmp_path):
    assert exporting.compile_check(hopper(tmp_path, dtype="float32").path, "sm_90") is None


def _broken(path: Path, line: str) -> Path:
    broken = path.with_name("broken.py")
    broken.write_text(path.read_text().replace('_HOST = r"""\n', f'_HOST = r"""\n{line}\n'))
    return broken
