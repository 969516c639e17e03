"""Exported files on a GPU: built by `load_inline`, equal to the model, captured in CUDA graphs."""

from __future__ import annotations

import warnings

import pytest
import torch
import ways
from export_support import EXAMPLES, NESTED, compare, hopper
from torch import nn

from gemmnorm import export as exporting
from gemmnorm import plan
from gemmnorm.userfiles import load_source


@pytest.mark.gpu
@pytest.mark.parametrize(
    "name",
    ["nested", "small", "kb33_cublas_bn", "kb33_cublas_folded_bn", "kb39_cublas_folded_bn", "kb33_one_kernel",
     "kb39_one_kernel"],
)  # fmt: skip
def test_built_by_load_inline_and_equal(name, tmp_path):
    """Every batch size runs the kernels; float32 without TF32, so that 1e-4 is asked of the founding files too."""
    if name.endswith("one_kernel") and torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs compute capability 9.0")
    if name == "nested":
        path = tmp_path / "nested.py"
        path.write_text(NESTED)
        source = exporting.export(path, None).source
    elif name == "small":
        source = exporting.export(EXAMPLES / "small.py", None).source
    else:
        source = (EXAMPLES / "model_new" / f"{name}.py").read_text()
    module = load_source(source, name)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert module._kernels_for(torch.device("cuda")) is not None
    calls = []
    original = module._FusedChain.apply
    module._FusedChain.apply = lambda *args: (calls.append(1), original(*args))[1]
    for batch in (40, 129, 1000):
        # Gradients are compared in the module's own scale, where sums over the batch reach thousands.
        compare(module, "cuda", 2e-4 if name == "nested" else 5e-3, batch)
    assert calls
    assert isinstance(module.ModelNew(*module.get_init_inputs()), nn.Module)


ON_HOPPER = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)


def assert_near(found, wanted, batch: int, name: str) -> None:
    """By norm, within 2 %; of elements that are one, or sums over the batch, where the true values are smaller."""
    least = (wanted.numel() * batch) ** 0.5
    error = (found.float() - wanted).norm().item()
    assert error <= 0.02 * max(wanted.norm().item(), least), f"{name}: {error}"


def compare_half(module, batch: int) -> None:
    """ModelNew in half precision against Model in float32 with the same parameters."""
    arguments = module.get_init_inputs()
    torch.manual_seed(5)
    old = module.Model(*arguments).cuda().float()
    torch.manual_seed(5)
    new = module.ModelNew(*arguments).cuda()
    for training in (True, False):
        old.train(training), new.train(training)
        x = torch.randn(batch, module.get_inputs()[0].shape[1], device="cuda").bfloat16()
        a, b = x.float().requires_grad_(), x.clone().requires_grad_()
        ya, yb = old(a), new(b)
        grad = torch.randn_like(yb)
        old.zero_grad(), new.zero_grad()
        ya.backward(grad.float()), yb.backward(grad)
        assert_near(yb, ya, 1, "y")
        assert_near(b.grad, a.grad, 1, "x")
        for (name, p), q in zip(old.named_parameters(), new.parameters(), strict=True):
            assert_near(q.grad, p.grad, batch, name)
        with torch.no_grad():
            assert_near(new(x), old(x.float()), 1, "y alone")
        for (name, p), q in zip(old.named_buffers(), new.buffers(), strict=True):
            assert_near(q, p.float(), 1, name)


def compare_captured(module, batch: int) -> None:
    """A captured call, replayed among calls that are not, gives what they give."""
    model = module.ModelNew(*module.get_init_inputs()).cuda()
    x = torch.randn(batch, module.get_inputs()[0].shape[1], device="cuda").to(module.get_inputs()[0].dtype)
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    with torch.no_grad():
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            model(x)
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph):
            y = model(x)
        for _ in range(3):
            x.normal_()
            wanted = model(x)
            graph.replay()
            torch.testing.assert_close(y, wanted)


@pytest.mark.gpu
@ON_HOPPER
@pytest.mark.parametrize(
    ("strategy", "dtype", "batch"),
    [
        ("one_kernel", "bfloat16", 64),
        ("one_kernel", "bfloat16", 256),
        ("one_kernel", "bfloat16", 16384),
        ("one_kernel", "float32", 256),
        ("gemm_stats_apply", "bfloat16", 256),
    ],
)
def test_the_own_product_built_by_load_inline_and_equal(strategy, dtype, batch, tmp_path):
    """Batches on both sides of every condition: one tile, one wave, more; full and partly empty groups."""
    module = load_source(hopper(tmp_path, strategy, dtype, batch).source, f"{strategy}_{dtype}_{batch}")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        assert module._kernels_for(torch.device("cuda")) is not None
    for rows in sorted({40, 128, 129, 1000, 2049, 8192, batch}):
        if dtype == "bfloat16":
            compare_half(module, rows)
        else:
            compare(module, "cuda", 5e-3, rows)
        compare_captured(module, rows)


@pytest.mark.gpu
@ON_HOPPER
def test_rows_that_begin_in_the_middle_of_a_sector_are_stored_by_two_maps(tmp_path):
    with plan.forcing(lambda c: c.phase == "backward" or ways.overlapping(c)):
        module = load_source(hopper(tmp_path, "gemm_stats_apply", batch=5000, features=376).source, "overlapping")
    for rows in (2, 255, 256, 5000):
        compare_half(module, rows)
        compare_captured(module, rows)
