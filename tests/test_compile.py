"""torch.compile: one graph, the operator in it, the same numbers and the same buffers."""

from __future__ import annotations

import shutil
from copy import deepcopy

import pytest
import torch
from functorch.compile import make_boxed_func
from support import Chain, arguments, assert_same, step, stir, twin, worst
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.utils.checkpoint import checkpoint

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d, chain, linear_scale_batch_norm
from gemmnorm.op import route

COMPILER = shutil.which("g++") or shutil.which("clang++")
BACKENDS = [
    "eager",
    "aot_eager",
    pytest.param("inductor", marks=pytest.mark.skipif(COMPILER is None, reason="no C++ compiler")),
]


class Plain(nn.Module):
    """A chain as its user writes it, for `fuse`."""

    def __init__(self, in_features, out_features):
        super().__init__()
        self.gemm = nn.Linear(in_features, out_features)
        self.scale = nn.Parameter(torch.randn(out_features))
        self.bn = nn.BatchNorm1d(out_features)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("training", [True, False])
def test_forward_and_backward_in_one_graph(backend, training):
    original = stir(Chain(12, 7, scale_shape=(7,), activation="relu")).train(training)
    copy = twin(original)
    positional, keywords = arguments(copy)

    def call(x):
        return linear_scale_batch_norm(x, *positional, **keywords)

    compiled = torch.compile(call, fullgraph=True, backend=backend)
    x, grad = torch.randn(16, 12), torch.randn(16, 7)
    for _ in range(2):
        assert_same(step(copy, compiled, x, grad), step(original, original, x, grad), 1e-4, 1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_the_module_in_a_model(training):
    def build():
        torch.manual_seed(0)
        return torch.nn.Sequential(LinearScaleBatchNorm1d(6, 8, activation="gelu"), torch.nn.Linear(8, 3)).train(
            training
        )

    eager, compiled = build(), build()
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    x, grad = torch.randn(10, 6), torch.randn(10, 3)
    for _ in range(2):
        assert_same(step(compiled, run, x, grad), step(eager, eager, x, grad), 1e-4, 1e-5)


def test_without_gradients_and_with_a_cumulative_average():
    eager, compiled = LinearScaleBatchNorm1d(6, 8, momentum=None), LinearScaleBatchNorm1d(6, 8, momentum=None)
    compiled.load_state_dict(eager.state_dict())
    run = torch.compile(compiled, fullgraph=True, backend="aot_eager")
    with torch.no_grad():
        for _ in range(3):
            x = torch.randn(10, 6)
            assert worst(run(x), eager(x), 1e-5, 1e-6) is None
    assert compiled.bn.num_batches_tracked.item() == 3
    assert worst(compiled.bn.running_var, eager.bn.running_var, 1e-5, 1e-6) is None


def test_the_graph_holds_the_operator_once():
    seen = []

    def backend(graph, inputs):
        seen.append([node.target for node in graph.graph.nodes if "gemmnorm" in str(node.target)])
        return graph

    module = LinearScaleBatchNorm1d(6, 8)
    torch.compile(module, fullgraph=True, backend=backend)(torch.randn(4, 6))
    assert len(seen) == 1 and len(seen[0]) == 1


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_a_fused_model_holds_the_operator_forward_and_backward(training, named, monkeypatch):
    """Not the plain ops, which compute the same: `torch.compiler.is_exporting()` is traced as True by some versions."""
    if not named:
        monkeypatch.setattr(route, "_asked", None)
    graphs = {"forward": [], "backward": []}

    def record(phase):
        def compiler(graph, inputs):
            for node in graph.graph.nodes:  # one that writes to its arguments is itself an argument
                inner = [a for a in node.args if isinstance(a, torch._ops.OpOverload)]
                graphs[phase].append(str(inner[0] if inner else node.target))
            return make_boxed_func(graph.forward)

        return compiler

    backend = aot_autograd(fw_compiler=record("forward"), bw_compiler=record("backward"))
    original = stir(Plain(12, 7)).train(training)
    fused = gemmnorm.fuse(twin(original))
    compiled = torch.compile(fused, fullgraph=True, backend=backend)
    x, grad = torch.randn(16, 12), torch.randn(16, 7)
    assert_same(step(fused, compiled, x, grad), step(original, original, x, grad), 1e-4, 1e-5)
    for phase, name in (("forward", "linear_scale_batch_norm"), ("backward", "linear_scale_batch_norm_backward")):
        assert [t for t in graphs[phase] if "gemmnorm" in t] == [f"gemmnorm.{name}.default"], graphs[phase]
        assert not any(plain in t for t in graphs[phase] for plain in ("addmm", "aten.mm", "native_batch_norm"))


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("strict", [True, False])
def test_an_export_of_a_fused_model_holds_plain_ops(strict, named, monkeypatch):
    """`named`: with `torch.compiler.is_exporting`, which PyTorch has from 2.7 on; else Dynamo itself is asked."""
    if not named:
        monkeypatch.setattr(route, "_asked", None)
    model = gemmnorm.fuse(stir(Plain(12, 7)).eval())
    x = torch.randn(16, 12)
    program = torch.export.export(model, (x,), strict=strict)
    assert "gemmnorm" not in str(program.graph)
    assert worst(program.module()(x), model(x), 1e-5, 1e-6) is None


def test_any_batch_size_in_one_dynamic_graph():
    frames = []

    def backend(graph, inputs):
        frames.append(graph)
        return graph

    eager, compiled = LinearScaleBatchNorm1d(6, 8), LinearScaleBatchNorm1d(6, 8)
    compiled.load_state_dict(eager.state_dict())
    run = torch.compile(compiled, fullgraph=True, backend=backend, dynamic=True)
    for batch in (5, 17, 130, 2):
        x = torch.randn(batch, 6)
        assert worst(run(x), eager(x), 1e-5, 1e-5) is None
    assert len(frames) == 1


def test_a_frame_of_the_package_that_is_compiled_by_itself_leaves_its_names_alone():
    """Behind a graph break Dynamo compiles `ChainCall.__call__` as a frame of its own, and writes to its globals."""

    def breaks(h):
        torch._dynamo.graph_break()
        return h

    call, linear, bn = chain.ChainCall(), nn.Linear(4, 6), nn.BatchNorm1d(6)
    compiled = torch.compile(lambda x: call(x, linear, bn, view=breaks), backend="eager")
    before = dict(vars(chain))
    compiled(torch.randn(5, 4))
    compiled(torch.randn(7, 4))
    assert all(vars(chain)[name] is value for name, value in before.items())


def test_autocast_inside():
    eager, compiled = LinearScaleBatchNorm1d(6, 8), LinearScaleBatchNorm1d(6, 8)
    compiled.load_state_dict(eager.state_dict())

    def run(module, x):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return module(x)

    x = torch.randn(32, 6)
    got = torch.compile(run, fullgraph=True, backend="aot_eager")(compiled, x)
    expected = run(eager, x)
    assert got.dtype == expected.dtype
    assert worst(got, expected, 3e-2, 3e-2) is None


@pytest.mark.parametrize("strict", [True, False])
def test_export(strict):
    module = LinearScaleBatchNorm1d(6, 8).eval()
    x = torch.randn(4, 6)
    program = torch.export.export(module, (x,), strict=strict)
    assert "gemmnorm" not in str(program.graph)
    assert worst(program.module()(x), module(x), 1e-6, 1e-6) is None


@pytest.mark.parametrize("backend", BACKENDS[1:])
def test_a_checkpoint_inside_a_compiled_graph(backend):
    """Nothing outside may be written from its body.

    The statistics are updated once; by PyTorch 2.4's graph, as in eager mode, again where the body runs again.
    """
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())
    fused = deepcopy(model)
    gemmnorm.fuse(fused)
    x, grad = torch.randn(20, 6), torch.randn(20, 8)

    def run(m):
        return lambda x: checkpoint(m, x, use_reentrant=False)

    def compiled(m):
        return torch.compile(run(m), fullgraph=True, backend=backend)

    expected = run(model) if torch.__version__.startswith("2.4.") else compiled(model)
    assert_same(step(fused, compiled(fused), x, grad), step(model, expected, x, grad), 1e-4, 1e-5)


def _guards(model, monkeypatch):
    """How many questions Dynamo asks at each call of the graph of `model`."""
    managers = []
    made = torch._dynamo.guards.CheckFunctionManager.__init__

    def init(self, *args, **kwargs):
        made(self, *args, **kwargs)
        managers.append(self.guard_manager)

    with monkeypatch.context() as patch:
        patch.setattr(torch._dynamo.guards.CheckFunctionManager, "__init__", init)
        torch.compile(model, fullgraph=True, backend="eager")(torch.randn(16, 12))
    return str(managers[0]).count("+- ")


@pytest.mark.skipif(not torch.__version__ >= "2.11", reason="earlier versions guard other things")
def test_a_fused_graph_is_guarded_by_little_more_than_its_tensors(monkeypatch):
    """Each guard takes time at each call. Before they were counted a graph had 350 more, and each owner 100."""

    def guards(count, prepare):
        torch._dynamo.reset()
        return _guards(prepare(nn.Sequential(*(Plain(12, 12) for _ in range(count)))), monkeypatch)

    plain = [guards(count, lambda model: model) for count in (1, 4)]
    fused = [guards(count, gemmnorm.fuse) for count in (1, 4)]
    assert fused[0] < plain[0] + 250, (plain, fused)
    assert fused[1] - fused[0] < 2 * (plain[1] - plain[0]), (plain, fused)


def test_what_is_done_to_a_class_or_a_child_after_a_trace_shows(monkeypatch):
    fused = gemmnorm.fuse(nn.Sequential(Plain(12, 7)))
    compiled = torch.compile(fused, backend="eager")
    x = torch.randn(16, 12)
    compiled(x)
    with monkeypatch.context() as patch:
        patch.setattr(Plain, "forward", lambda self, x: self.gemm(x) - 3)
        assert worst(compiled(x), fused[0].gemm(x) - 3, 1e-6, 1e-6) is None
    fused[0].gemm = nn.Sequential(nn.Linear(12, 7), nn.Tanh())
    twice = deepcopy(fused)
    assert worst(compiled(x), twice(x), 1e-5, 1e-5) is None
    fused[0].bn = nn.Identity()
    assert worst(compiled(x), fused[0].gemm(x) * fused[0].scale, 1e-5, 1e-5) is None
