"""The operator among other things on a GPU: streams, threads, graphs, torch.compile, processes, a bad cache."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from gpu_support import error, fused, model
from support import assert_same, step, twin
from torch import nn

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d
from gemmnorm.plan import STRATEGIES
from gemmnorm.runtime import binding
from gemmnorm.runtime import call as runtime

pytestmark = pytest.mark.gpu

KERNELS = [s for s in STRATEGIES if s != "reference"]
DTYPES = [torch.float32, torch.bfloat16]


def tensors(batch: int, inner: int, features: int, dtype: torch.dtype = torch.float32):
    return torch.randn(batch, inner, device="cuda", dtype=dtype), torch.randn(
        batch, features, device="cuda", dtype=dtype
    )


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", KERNELS)
def test_the_same_bits_on_every_run(strategy, dtype):
    start = model(dtype, 512, 1000, scale_shape=(1000,), activation="relu")
    x, grad = tensors(1000, 512, 1000, dtype)
    first = None
    noise = torch.randn(3000, 3000, device="cuda")
    other = torch.cuda.Stream()
    for run in range(50):
        if run % 2:  # other work on the chip changes who comes first
            with torch.cuda.stream(other):
                noise @ noise
        module = twin(start)
        got = step(module, fused(module, strategy), x, grad)
        first = first or got
        for name, value in got.items():
            assert torch.equal(value, first[name]), f"run {run}: {name}"


@pytest.mark.parametrize("compiled", [False, True])
def test_a_float32_convolution_is_fused_where_products_may_do_what_it_may(compiled):
    """cuDNN may use TF32 by default, and cuBLAS not: then the convolution runs as it would."""
    module = nn.Sequential(nn.Conv1d(64, 96, 1), nn.BatchNorm1d(96), nn.ReLU()).cuda()
    x = torch.randn(8, 200, 64, device="cuda").transpose(1, 2)
    want = copy.deepcopy(module).double()(x.double())
    for allowed in (True, False):
        torch.compiler.reset()  # nobody guards the switch
        ours = gemmnorm.fuse(copy.deepcopy(module))
        with torch.backends.cudnn.flags(enabled=True, allow_tf32=allowed):
            y = (torch.compile(ours) if compiled else ours)(x)
        (calls,) = [match.calls for match in gemmnorm.fuse_report(ours, calls=True).matches]
        assert (calls.compiled == "fused" if compiled else calls.fused == 1) is not allowed
        assert error(y, want) <= (5e-3 if allowed else 1e-6)


# --- streams, threads, devices, graphs --------------------------------------------------------------------------------


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_no_host_synchronisation(strategy):
    module = model(torch.float32, 64, 96, scale_shape=(96,), momentum=0.1 if strategy == "reference" else None)
    x, grad = tensors(200, 64, 96)
    call = fused(module, strategy)

    def everything():
        x.requires_grad_()
        call(x).backward(grad)
        with torch.no_grad():
            call(x)

    everything()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        everything()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("strategy", KERNELS)
def test_capture_and_replay(strategy, dtype):
    module = model(dtype, 256, 512, scale_shape=(512,), activation="relu")
    eager = twin(module)
    static_x, static_grad = tensors(300, 256, 512, dtype)
    static_x.requires_grad_()
    call = fused(module, strategy)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    state = {k: v.clone() for k, v in module.state_dict().items()}
    with torch.cuda.stream(stream):
        for _ in range(3):
            call(static_x).backward(static_grad)
    torch.cuda.current_stream().wait_stream(stream)
    module.load_state_dict(state)
    module.zero_grad(set_to_none=True)
    static_x.grad = None
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = call(static_x)
        y.backward(static_grad)
    module.load_state_dict(state)
    for turn in range(1, 4):
        x, grad = tensors(300, 256, 512, dtype)
        static_x.data.copy_(x), static_grad.copy_(grad)
        graph.replay()
        expected = step(eager, fused(eager, strategy), x, grad)
        assert torch.equal(y, expected["y"]), turn
        assert torch.equal(static_x.grad, expected["grad x"]), turn
        assert torch.equal(module.gemm.weight.grad, expected["grad gemm.weight"]), turn
        assert module.bn.num_batches_tracked.item() == turn
        assert torch.equal(module.bn.running_var, expected["bn.running_var"])


@pytest.mark.parametrize("strategy", KERNELS)
def test_two_streams_at_once(strategy):
    work = [
        (model(torch.bfloat16, 512, 1024, activation="relu"), *tensors(1500, 512, 1024, torch.bfloat16))
        for _ in range(2)
    ]
    expected = [step(twin(m), fused(twin(m), strategy), x, g)["y"] for m, x, g in work]
    torch.cuda.synchronize()
    streams = [torch.cuda.Stream() for _ in work]
    for _ in range(20):
        found = []
        for (module, x, _), stream in zip(work, streams, strict=True):
            with torch.cuda.stream(stream), torch.no_grad():
                found.append(fused(module, strategy)(x))
        torch.cuda.synchronize()
        for got, want in zip(found, expected, strict=True):
            assert torch.equal(got, want)


@pytest.mark.parametrize("strategy", KERNELS)
def test_two_threads_at_once(strategy):
    work = [(model(torch.float32, 256, 512, scale_shape=(512,)), *tensors(400, 256, 512)) for _ in range(2)]
    probe = twin(work[0][0])
    fused(probe, strategy)(work[0][1])  # skips here, where pytest can see it
    wanted = []
    for module, x, grad in work:
        copy = twin(module)
        wanted.append(step(copy, fused(copy, strategy), x, grad))
    problems: list[str] = []

    def run(index: int) -> None:
        try:
            module, x, grad = work[index]
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(20):
                    copy = twin(module)
                    got = step(copy, fused(copy, strategy), x, grad)
                    torch.cuda.current_stream().synchronize()
                    assert_same(got, wanted[index], 0.0, 0.0)
        except BaseException as caught:
            problems.append(f"thread {index}: {caught!r}")

    torch.cuda.synchronize()
    threads = [threading.Thread(target=run, args=(i,)) for i in range(2)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert not problems


@pytest.mark.skipif("torch.cuda.device_count() < 2", reason="needs two GPUs")
@pytest.mark.parametrize("strategy", KERNELS)
def test_a_device_that_is_not_the_current_one(strategy):
    module = model(torch.float32, 64, 96, scale_shape=(96,))
    x, grad = tensors(150, 64, 96)
    copy = twin(module)
    expected = step(copy, fused(copy, strategy), x, grad)
    away = twin(module).to("cuda:1")
    assert torch.cuda.current_device() == 0
    got = step(away, fused(away, strategy), x.to("cuda:1"), grad.to("cuda:1"))
    assert {v.device.index for v in got.values()} == {1}
    assert_same({k: v.to("cuda:0") for k, v in got.items()}, expected, 1e-5, 1e-5)
    with pytest.raises(TypeError, match="weight"):
        fused(module, strategy)(x.to("cuda:1"))


# --- PyTorch's own machinery ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_opcheck(strategy, training, grad):
    module = model(torch.bfloat16, 32, 24, training, scale_shape=(24,)).requires_grad_(grad)
    x = torch.randn(20, 32, device="cuda", dtype=torch.bfloat16, requires_grad=grad)
    fused(module, strategy)(x)
    bn = module.bn
    arguments = (
        x, module.gemm.weight, module.gemm.bias, module.scale, bn.running_mean, bn.running_var,
        bn.num_batches_tracked, bn.weight, bn.bias, 1.0, training, 0.1, 1e-5, "relu", strategy, False, None, None,
    )  # fmt: skip
    # Tracing compares gradients at float32's tolerance; the compiled graphs below are compared at bf16's.
    checks = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.gemmnorm.linear_scale_batch_norm.default, arguments, test_utils=checks)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("amp", [False, True])
def test_compiled_into_one_graph(training, amp):
    torch._dynamo.reset()
    eager = nn.Sequential(
        LinearScaleBatchNorm1d(64, 128, activation="silu"), LinearScaleBatchNorm1d(128, 64, bias=False, scale=False)
    )
    eager = eager.cuda().train(training)
    compiled = twin(eager)
    run = torch.compile(compiled, fullgraph=True)
    x, grad = tensors(150, 64, 64)
    for _ in range(2):
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            got, expected = step(compiled, run, x, grad), step(eager, eager, x, grad)
        assert_same(got, expected, 5e-2 if amp else 1e-4, 5e-1 if amp else 1e-3)


@pytest.mark.parametrize("amp", [False, True])
def test_compiled_with_cuda_graphs(amp):
    """`mode="reduce-overhead"`: a replayed graph updates the running statistics and counts, as a call does."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = nn.Sequential(nn.Linear(64, 512), nn.BatchNorm1d(512), nn.SiLU(), nn.Linear(512, 64), nn.BatchNorm1d(64))
    eager = gemmnorm.fuse(eager.cuda())
    fused_model = twin(eager)
    run = torch.compile(fused_model, mode="reduce-overhead")
    for _ in range(5):  # it is recorded in the second or third
        x, grad = tensors(300, 64, 64)
        torch.compiler.cudagraph_mark_step_begin()
        with torch.autocast("cuda", dtype=torch.bfloat16, enabled=amp):
            got, expected = step(fused_model, run, x, grad), step(eager, eager, x, grad)
        assert_same(got, expected, 5e-2 if amp else 1e-4, 5e-1 if amp else 1e-3)
    assert not torch._dynamo.utils.counters["inductor"]["cudagraph_skips"]
    report = gemmnorm.fuse_report(fused_model, calls=True)
    assert [m.calls.compiled for m in report.matches] == ["fused"] * 2


def test_warmup_compiles_ahead_and_changes_nothing():
    module = LinearScaleBatchNorm1d(48, 80, activation="silu").cuda()
    before = {k: v.clone() for k, v in module.state_dict().items()}
    x = torch.randn(64, 48, device="cuda")
    gemmnorm.warmup(module, x)
    assert all(torch.equal(before[k], v) for k, v in module.state_dict().items())
    compiled = runtime.driver._kernel.cache_info().misses
    module(x).sum().backward()
    assert runtime.driver._kernel.cache_info().misses == compiled


# --- processes and the cache ------------------------------------------------------------------------------------------

SCRIPT = """
import os, sys, warnings
caught = []
warnings.showwarning = lambda message, category, *rest: caught.append(category.__name__)
warnings.simplefilter("always")
if os.environ.get("HIDE"):
    sys.modules[os.environ["HIDE"]] = None
import torch, gemmnorm
torch.manual_seed(0)
m = gemmnorm.LinearScaleBatchNorm1d(96, 200, activation="relu").cuda()
x = torch.randn(300, 96, device="cuda", requires_grad=True)
from gemmnorm.runtime import call as runtime
with runtime.recording() as plans:
    y = m(x)
y.square().sum().backward()
want = torch.relu(torch.nn.functional.batch_norm(m.gemm(x).double() * m.scale, None, None, training=True))
assert float((y - want).abs().max()) < 1e-4, float((y - want).abs().max())
assert torch.isfinite(x.grad).all()
print(plans[0].strategy, caught.count("GemmNormWarning"))
"""


def start(cache: Path | str, **environment: str) -> subprocess.Popen:
    paths = os.pathsep.join([str(Path(gemmnorm.__file__).parents[1]), *sys.path])
    return subprocess.Popen(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "PYTHONPATH": paths, "GEMMNORM_CACHE_DIR": str(cache), **environment},
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip


def answer(process: subprocess.Popen) -> tuple[str, int]:
    """(strategy that ran, warnings of ours) of a process that ended well."""
    out, err = process.communicate(timeout=240)
    assert process.returncode == 0, err
    strategy, warned = out.split()[-2:]
    return strategy, int(warned)


def test_processes_and_caches(tmp_path):
    cache, blocked = tmp_path / "cache", tmp_path / "file"
    blocked.write_text("a file, so nothing can be made below it")
    both = [start(cache), start(cache)]  # two processes that compile the same kernels at once
    others = [
        start(blocked / "cache"),
        start(cache / "x", HIDE="cuda.core"),
        start(cache / "y", HIDE="cuda.bindings.nvrtc"),
    ]
    strategies = [answer(p) for p in both]
    assert strategies[0] == strategies[1] and strategies[0][1] == 0
    chosen = strategies[0][0]
    assert chosen != "reference"
    assert answer(others[0]) == (chosen, 1)  # unwritable: compiled all the same, one warning
    for hidden in others[1:]:
        strategy, warned = answer(hidden)
        assert strategy == "reference" and warned <= 1

    files = [p for p in cache.rglob("*") if p.is_file() and p.stat().st_size > 1000]
    assert files, "nothing was stored"
    for path in files:
        os.truncate(path, 500)
    assert answer(start(cache)) == (chosen, 0)
    for path in files:
        if path.exists():
            path.write_bytes(b"\x7fELF" + os.urandom(2000))
    strategy, warned = answer(start(cache))
    assert strategy == chosen and warned <= 1


def test_a_kernel_that_does_not_load_gives_way_to_another_strategy(monkeypatch):
    """The next call on the same machine is right and quiet."""
    module = model(torch.float32, 40, 72, scale_shape=(72,))
    x, grad = tensors(60, 40, 72)
    expected = step(twin(module), twin(module), x, grad)["y"]
    monkeypatch.setattr(runtime, "_warned", set())
    runtime.forget()
    original = binding.bind

    def fails(chosen, packed=False):
        if chosen.strategy != "reference":
            raise RuntimeError("CUDA_ERROR_NO_BINARY_FOR_GPU")
        return original(chosen, packed)

    monkeypatch.setattr(binding, "bind", fails)
    with pytest.warns(gemmnorm.errors.GemmNormWarning):
        got = step(module, lambda x: fused(module, None)(x), x, grad)
    assert error(got["y"], expected.double()) < 1e-5
