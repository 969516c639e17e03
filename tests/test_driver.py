"""The driver and the runtime's fallbacks, as far as they go without a GPU: sources, cache, missing pieces."""

from __future__ import annotations

import os
import shutil
import warnings
from dataclasses import replace

import pytest
import torch
from support import worst

from gemmnorm import linear_scale_batch_norm, plan
from gemmnorm.errors import GemmNormWarning
from gemmnorm.plan import Problem, chip_for, make_plan
from gemmnorm.runtime import binding, driver, sources
from gemmnorm.runtime import call as runtime

compiler = pytest.mark.skipif(driver.unavailable() is not None, reason=str(driver.unavailable()))
PROBLEM = Problem(256, 64, 512, save=True, activation="relu", chip=chip_for(80))


def launches(problem=PROBLEM):
    return [x for phase in ("forward", "backward") for x in make_plan(problem, "cublas_folded_bn", phase).launches]


# --- sources ----------------------------------------------------------------------------------------------------------


def test_an_entry_names_what_it_fuses_and_types_its_arguments():
    for launch in launches():
        text = sources.entry_source(launch, PROBLEM)
        assert launch.entry.startswith("fused_gemm_scale_bn")
        assert f"__launch_bounds__({launch.block}, {launch.resident}) {launch.entry}(" in text
        assert "{" + "T" + "}" not in text and all(f" {field};" in text for field in launch.params)


def test_equal_launches_have_equal_sources_whatever_the_batch():
    """One compilation serves every batch size with the same tile."""
    large = replace(PROBLEM, batch=257)
    for a, b in zip(launches(), launches(large), strict=True):
        assert sources.translation_unit(a, PROBLEM) == sources.translation_unit(b, large)


def test_the_source_hash_ignores_comments_and_follows_code(tmp_path, monkeypatch):
    def hashed() -> str:
        sources.source_hash.cache_clear()
        sources._read.cache_clear()
        return sources.source_hash()

    before = hashed()
    package = tmp_path / "gemmnorm"
    shutil.copytree(sources.KERNELS.parent, package, ignore=shutil.ignore_patterns("__pycache__", "tools"))
    copy = package / "kernels"
    monkeypatch.setattr(sources, "KERNELS", copy)
    assert hashed() == before
    common = copy / "common/common.cuh"
    common.write_text("// a remark\n" + common.read_text())
    assert hashed() == before
    common.write_text(common.read_text() + "\nint x;\n")
    assert hashed() != before
    monkeypatch.undo()
    assert hashed() == before


# --- the cache directory ----------------------------------------------------------------------------------------------


def test_where_the_cache_is(monkeypatch, tmp_path):
    monkeypatch.setenv("GEMMNORM_CACHE_DIR", str(tmp_path / "a"))
    assert driver.cache_directory() == tmp_path / "a"
    monkeypatch.delenv("GEMMNORM_CACHE_DIR")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert driver.cache_directory() == tmp_path / "gemmnorm"


@pytest.fixture
def fresh_cache():
    driver._disk_cache.cache_clear()
    yield
    driver._disk_cache.cache_clear()


@compiler
def test_a_cache_that_cannot_be_written_is_one_warning(monkeypatch, tmp_path, fresh_cache):
    blocked = tmp_path / "file"
    blocked.write_text("not a directory")
    monkeypatch.setenv("GEMMNORM_CACHE_DIR", str(blocked / "cache"))
    with pytest.warns(GemmNormWarning, match="GEMMNORM_CACHE_DIR"):
        assert driver._disk_cache() is None
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert driver._disk_cache() is None


@compiler
def test_without_a_home_directory_there_is_no_cache(monkeypatch, fresh_cache):
    def no_home():
        raise RuntimeError("Could not determine home directory.")

    for name in ("GEMMNORM_CACHE_DIR", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(driver.Path, "home", no_home)
    with pytest.warns(GemmNormWarning, match="home directory"):
        assert driver._disk_cache() is None


@compiler
def test_compiled_code_is_found_again_and_a_broken_file_is_not_trusted(monkeypatch, tmp_path, fresh_cache):
    """Truncated, overwritten and foreign entries are as good as none: the driver would crash on them."""
    monkeypatch.setenv("GEMMNORM_CACHE_DIR", str(tmp_path))
    text, code = sources.translation_unit(launches()[1], PROBLEM), os.urandom(3000)
    assert driver.recall(driver._disk_cache(), text, 80) is None
    driver.remember(driver._disk_cache(), text, 80, code)
    assert driver.recall(driver._disk_cache(), text, 80) == code
    assert driver.recall(driver._disk_cache(), text, 90) is None
    assert driver.recall(driver._disk_cache(), text + " ", 80) is None
    (path,) = [p for p in tmp_path.rglob("*") if p.is_file() and p.stat().st_size > 3000]
    whole = path.read_bytes()
    for broken in (
        whole[:100],
        whole[:-1],
        b"",
        b"\x7fELF" + os.urandom(len(whole) - 4),
        whole[:50] + b"?" + whole[51:],
    ):
        path.write_bytes(broken)
        assert driver.recall(driver._disk_cache(), text, 80) is None
    driver.remember(driver._disk_cache(), text, 80, code)
    assert driver.recall(driver._disk_cache(), text, 80) == code


@compiler
def test_compile_report_sees_a_spill():
    """The check that CI relies on can fail: 250 live values do not fit in the registers of eight resident blocks."""
    from gemmnorm.runtime.compile_all import Kernel, Outcome, compile_one

    wide = replace(PROBLEM, dtype="bfloat16", out_dtype="bfloat16")
    launch = make_plan(wide, "cublas_folded_bn").launches[-1]
    assert compile_one(Kernel(launch, wide, 80)).fault == ""
    crowded = compile_one(Kernel(replace(launch, resident=8), wide, 80))
    assert "spill" in crowded.fault
    broken = compile_one(Kernel(replace(launch, function="no_such_function"), wide, 80))
    assert "no_such_function" in broken.fault
    assert Outcome(Kernel(launch, wide, 80), {"registers": 10, "stack": 16}).fault == "stack: 16"


# --- missing pieces ---------------------------------------------------------------------------------------------------


def test_without_cuda_core_the_reference_runs(monkeypatch):
    driver.unavailable.cache_clear()
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    try:
        message = driver.unavailable()
        assert message is not None and "pip install 'gemmnorm[cu" in message
        x, weight = torch.randn(8, 4), torch.randn(3, 4)
        got = linear_scale_batch_norm(x, weight, training=True, strategy="cublas_bn")
        assert worst(got, torch.nn.functional.batch_norm(x @ weight.t(), None, None, training=True), 1e-5, 1e-5) is None
    finally:
        driver.unavailable.cache_clear()


def test_a_gpu_without_a_compiler_is_warned_of(monkeypatch):
    monkeypatch.setattr(driver, "unavailable", lambda: "cuda.core is missing")
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    with pytest.warns(GemmNormWarning, match="plain PyTorch ops run on cuda:0: cuda.core is missing"):
        assert runtime.chip.__wrapped__(torch.device("cuda", 0)) is None
    assert runtime.chip.__wrapped__(torch.device("cpu")) is None


def test_a_strategy_that_does_not_load_is_replaced_with_one_warning(monkeypatch):
    """A kernel that fails to compile or load is found out before the call starts; the next strategy takes over."""

    def fails(chosen, packed=False):
        raise RuntimeError("no image for this device")

    monkeypatch.setattr(binding, "bind", fails)
    monkeypatch.setattr(runtime, "_warned", set())
    runtime._resolved.cache_clear()
    with pytest.warns(GemmNormWarning, match="no image for this device"):
        assert runtime.resolve(PROBLEM, "cublas_bn") not in ("cublas_bn", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the strategy that took its place fails here as well
        assert runtime.resolve(PROBLEM, "cublas_bn") == "reference"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert runtime.resolve(PROBLEM, "cublas_bn") == "reference"


def test_resolving_runs_nothing_for_the_reference():
    assert runtime.resolve(replace(PROBLEM, chip=None), None) == "reference"
    assert plan.cached_plan(PROBLEM, None, "forward") is plan.cached_plan(PROBLEM, None, "forward")
