"""The backward that streams panels past all blocks (streamed_gradient.cuh), run by the emulator, and on a GPU, against
float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from emulator import COMPILER, emulated
from gpu_support import poisoned_memory
from test_emulated import SMALL_HOPPER
from test_panel_gradient import NAMES, gradients

from gemmnorm import linear_scale_batch_norm, plan, runtime
from gemmnorm.plan import Problem, gradient

needs_compiler = pytest.mark.skipif(COMPILER is None, reason="no g++")


@pytest.fixture
def streamed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plan of a batch that no cluster holds, for any batch."""
    plan.cached_plan.cache_clear()
    runtime.forget()
    monkeypatch.setattr(gradient, "one_launch", lambda problem, exponents: None)
    yield
    monkeypatch.undo()
    plan.cached_plan.cache_clear()
    runtime.forget()


def check(device: str, strategy: str, batch: int, features: int, dtype: str, activation: str | None) -> None:
    torch.manual_seed(batch)
    kind = getattr(torch, dtype)
    x, weight = torch.randn(batch, 24).to(kind), torch.randn(features, 24).to(kind)
    vectors = [torch.randn(features).to(kind) for _ in range(4)]
    grad = torch.randn(batch, features).to(kind)
    wide = [t.double() for t in (x, weight, *vectors)]
    want = gradients(*wide, grad=grad.double(), activation=activation, strategy="reference")
    eager = gradients(x, weight, *vectors, grad=grad, activation=activation, strategy="reference")
    moved = [t.to(device) for t in (x, weight, *vectors)]
    with poisoned_memory():
        got = gradients(*moved, grad=grad.to(device), activation=activation, strategy=strategy)
        again = gradients(*moved, grad=grad.to(device), activation=activation, strategy=strategy)
    assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))
    unit = torch.finfo(kind).eps
    for name, ours, theirs, exact in zip(NAMES, got, eager, want, strict=True):
        size = exact.norm().clamp_min(1e-3)
        error, allowed = (found.cpu().double().sub(exact).norm() / size for found in (ours, theirs))
        assert error <= 1.1 * allowed + 2 * unit, name


def function(problem: Problem) -> str:
    return plan.make_plan(problem, "one_kernel", "backward").launches[0].function


@needs_compiler
@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("strategy", ["cublas_folded_bn", "one_kernel"])
@pytest.mark.parametrize(
    ("batch", "features", "dtype", "activation"),
    [
        (2, 8, "bfloat16", None),  # three panels could be worked on at once, and there is one
        (100, 328, "bfloat16", "relu"),  # two tiles of rows
        (300, 136, "float16", "silu"),  # three, of two groups each, more panels than slots of the ring
        (300, 580, "bfloat16", None),
        (500, 72, "bfloat16", "gelu"),  # three groups each
    ],
)
def test_gradients(strategy: str, batch: int, features: int, dtype: str, activation: str | None) -> None:
    problem = Problem(batch, 24, features, dtype, dtype, dtype, dtype, "native", chip=SMALL_HOPPER, save=True)
    whole = features % 8 == 0
    assert function(problem) == ("streamed_gradient" if whole else "gradient_sums")
    with emulated(SMALL_HOPPER):
        check("cpu", strategy, batch, features, dtype, activation)


@needs_compiler
@pytest.mark.usefixtures("streamed")
@pytest.mark.parametrize("batch", [70, 300])
def test_gradients_in_float32_and_of_float32_from_half_precision(batch: int) -> None:
    torch.manual_seed(batch)
    x, weight, grad = torch.randn(batch, 24), torch.randn(200, 24), torch.randn(batch, 200)
    vectors = [torch.randn(200) for _ in range(4)]
    with emulated(SMALL_HOPPER):
        check("cpu", "cublas_folded_bn", batch, 200, "float32", "relu")
        rounded = [t.bfloat16().float() for t in (x, weight)]
        want = gradients(*rounded, *vectors, grad=grad, activation="silu", strategy="reference")
        with torch.autocast("cpu", torch.bfloat16), poisoned_memory():
            got = gradients(*rounded, *vectors, grad=grad, activation="silu", strategy="one_kernel")
    for ours, exact in zip(got, want, strict=True):
        assert (ours - exact).norm() <= 8e-3 * exact.norm()


def test_where_it_serves() -> None:
    problem = Problem(16384, 64, 4096, "bfloat16", "bfloat16", save=True)
    launch = gradient.streamed_launch(problem)
    assert launch is not None and launch.grid.value(16384) == 128 and function(problem) == "streamed_gradient"
    assert function(replace(problem, out_dtype="float32")) == "streamed_gradient"
    for other in (
        replace(problem, batch=65536),  # more rows than four tiles of the ring hold
        replace(problem, out_features=60),  # no whole words of 16 bytes
        replace(problem, training=False),
        replace(problem, chip=plan.chip_for(80)),
    ):
        assert gradient.streamed_launch(other) is None and function(other) == "gradient_sums"


@pytest.mark.gpu
@pytest.mark.parametrize("activation", [None, "gelu"])
@pytest.mark.parametrize("batch", [12300, 16384, 20000])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_gradients_on_a_gpu(dtype: str, batch: int, activation: str | None) -> None:
    check("cuda", "one_kernel", batch, 584, dtype, activation)


@pytest.mark.gpu
def test_in_a_graph_and_on_two_streams() -> None:
    """The counters are left zero, and those of a captured call are its own."""
    torch.manual_seed(0)
    x, weight = (torch.randn(n, 64, device="cuda", dtype=torch.bfloat16).requires_grad_() for n in (16384, 1032))
    running = torch.zeros(1032, device="cuda"), torch.ones(1032, device="cuda")
    grad = torch.randn(16384, 1032, device="cuda", dtype=torch.bfloat16)

    def run() -> tuple[torch.Tensor, ...]:
        y = linear_scale_batch_norm(x, weight, None, None, *running, training=True, strategy="one_kernel")
        return torch.autograd.grad(y, (x, weight), grad)

    want = run()
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    found = []
    for i in range(6):
        with torch.cuda.stream(streams[i % 2]):
            found.append(run())
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    for other in (*found, captured):
        assert all(torch.equal(a, b) for a, b in zip(want, other, strict=True))
