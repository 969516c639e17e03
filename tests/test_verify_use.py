"""What `verify` finds out by the ways in which a model is used: training steps, copies, layouts in memory, settings."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from test_verify import TRAPS

from gemmnorm.userfiles import load_candidate_file, load_model_file
from gemmnorm.verify import judge, references, verify
from gemmnorm.verify.families import FAMILIES, QUICK, plan_cases, without_rows
from gemmnorm.verify.trial import (
    ADDED,
    EXPANDED,
    FROZEN,
    SLICED,
    STATISTICS,
    TRANSPOSED,
    TURNED,
    WRITTEN,
    arranged,
    run_trial,
)

pytestmark = pytest.mark.usefixtures("warm_processes")

HEAD = """
import copy
import random
import torch
import torch.nn as nn
import torch.nn.functional as F
"""
MODEL = f"""{HEAD}
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.gemm = nn.Linear(24, 32)
        self.scale = nn.Parameter(torch.randn(32))
        self.bn = nn.BatchNorm1d(32)

    def forward(self, x):
        return self.bn(self.gemm(x) * self.scale)

def get_inputs():
    return [torch.randn(100, 24)]

def get_init_inputs():
    return []
"""
# An honest product by a function of its own; what a candidate puts in place of CHANGED makes it another.
PRODUCT = """
class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b):
        ctx.save_for_backward(x, w)
        return F.linear(x, w, b)
    @staticmethod
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        gx, gw = g @ w, g.t() @ x
        CHANGED
        return gx, gw, g.sum(0)
class ModelNew(Model):
    def forward(self, x):
        return self.bn(Product.apply(x, self.gemm.weight, self.gemm.bias) * self.scale)
"""
LAST = """
class Last(torch.autograd.Function):
    @staticmethod
    def forward(ctx, y):
        return y.clone()
    @staticmethod
    def backward(ctx, g):
        CHANGED
class ModelNew(Model):
    def forward(self, x):
        return Last.apply(super().forward(x))
"""
CLASS = """
class ModelNew(Model):
    n = 0
    def forward(self, x):
        y = super().forward(x)
        CHANGED
        return y
"""


def filled(source: str) -> Callable[[str], str]:
    return lambda changed: source.replace("CHANGED", changed)


product, last, after = filled(PRODUCT), filled(LAST), filled(CLASS)


# Folded evaluation, packed anew under a condition.
FOLDED = """
class ModelNew(Model):
    key = None
    def fold(self):
        k = self.bn.weight * torch.rsqrt(self.bn.running_var + self.bn.eps)
        self.w = (self.gemm.weight * (self.scale * k)[:, None]).detach()
        self.b = ((self.gemm.bias * self.scale - self.bn.running_mean) * k + self.bn.bias).detach()
    def train(self, mode=True):
        super().train(mode)
        if not mode and AT_EVAL:
            self.fold()
        return self
    def forward(self, x):
        if self.training or torch.is_grad_enabled():
            return super().forward(x)
        key = None if AT_EVAL else [t._version for t in self.state_dict(keep_vars=True).values() if t.ndim]
        if key != self.key:
            self.key = key
            self.fold()
        return F.linear(x, self.w, self.b)
"""
# Wrong, where it shows, and how the checks there begin.
WRONG = {
    "no input gradient, raises": (
        product("gx = g @ w if ctx.needs_input_grad[0] else undefined"), "inputs without gradients", "call",
    ),
    "no input gradient, zeros": (
        product("gw = gw if ctx.needs_input_grad[0] else 0 * gw"), "inputs without gradients", "grad:gemm.weight",
    ),
    "frozen weight": (product("gx = gx if w.requires_grad else 0 * gx"), "every second parameter", "grad:input0"),
    "stale after training": (FOLDED.replace("AT_EVAL", "False"), "evaluation, after training", "output"),
    "folded by eval()": (FOLDED.replace("AT_EVAL", "True"), "two rows", "output without autograd"),
    "statistics written by state_dict": (
        """
class ModelNew(Model):
    pending = None
    def state_dict(self, *a, **k):
        if self.pending is not None:
            state, self.pending = self.pending, None
            for n, b in self.named_buffers():
                b.data.copy_(state[n])
        return super().state_dict(*a, **k)
    def forward(self, x):
        state = {n: b.clone() for n, b in self.named_buffers()}
        y = super().forward(x)
        if self.training:
            self.pending = {n: b.clone() for n, b in self.named_buffers()}
            for n, b in self.named_buffers():
                b.data.copy_(state[n])
        return y
""",
        "plain", "bn.num_batches_tracked",
    ),
    "two forwards": (
        product("x = ctx.kept[0]; gw = g.t() @ x")
        .replace("ctx.save_for", "KEPT[:] = [x.detach()]; ctx.kept = KEPT; ctx.save_for")
        .replace("class Product", "KEPT = []\nclass Product"),
        "another call before the backward", "grad:gemm.weight",
    ),
    "the last instance": (
        """
CURRENT = []
class ModelNew(Model):
    def __init__(self):
        super().__init__()
        CURRENT[:] = [self.gemm]
    def forward(self, x):
        return self.bn(F.linear(x, CURRENT[0].weight, CURRENT[0].bias) * self.scale)
""",
        "evaluation, after training", "output",
    ),
    "a copy": (
        """
class ModelNew(Model):
    def __init__(self):
        super().__init__()
        g = self.gemm
        self.product = lambda x: F.linear(x, g.weight, g.bias)
    def forward(self, x):
        return self.bn(self.product(x) * self.scale)
""",
        "evaluation, after training", "output",
    ),
    "gradients written": (
        """
class ModelNew(Model):
    def forward(self, x):
        y, bias = super().forward(x), self.bn.bias
        if y.requires_grad and bias.requires_grad:
            y = y - bias + bias.detach()
            def write(g):
                bias.grad = g.sum(0)
            y.register_hook(write)
        return y
""",
        "gradients added to others", "grad:bn.bias",
    ),
    "backward once": (product("x.data.mul_(g.mean())").replace("(x, w)", "(x.clone(), w)", 1),
                      "gradients added to others", "grad:gemm.weight"),
    "cotangent overwritten": (last("r = g.clone(); g.zero_(); return r"), "plain", "grad:output"),
    "contiguous cotangents": (last("return g.as_strided(g.shape, (g.shape[1], 1))"), "cotangents transposed", "grad:"),
    "no stride of zero": (last("return g if g.stride(0) else 0 * g"), "one cotangent for all", "grad:"),
    "small cotangents": (last("return torch.where(g.abs() < 6e-8, 0, g)"), "small cotangents", "grad:"),
    "contiguous inputs": (after("y = y if x.is_contiguous() else y * 1.01"), "inputs transposed", "output"),
    "no offset": (after("y = y if x.storage_offset() == 0 else y * 1.01"), "inputs in a wider tensor", "output"),
    "counter in evaluation": (
        after("self.training or self.bn.num_batches_tracked.add_(1)"), "plain", "bn.num_batches_tracked",
    ),
    "statistics in evaluation": (
        after("self.training or not y.requires_grad or self.bn.running_mean.data.mul_(1.1)"),
        "plain", "bn.running_mean",
    ),
    "weights change": (after("self.scale.data.mul_(-1); y = y.clone()"), "plain", "scale"),
    "weights decay in the backward": (
        after("y.requires_grad and y.register_hook(lambda g: (self.gemm.weight.data.mul_(0.99), None)[1])"),
        "plain", "gemm.weight",
    ),
    "one gradient of three": (
        product("gw = gw if ctx.needs_input_grad[0] or ctx.needs_input_grad[2] else 0 * gw"),
        "gradients of parameters", "grad:gemm.weight",
    ),
    "inputs' gradient alone": (
        product("gx = gx if ctx.needs_input_grad[1] or ctx.needs_input_grad[2] else 0 * gx"),
        "gradients of inputs", "grad:input0",
    ),
    "gradients in one memory": (
        product("gw = ctx.kept.copy_(gw).view(gw.shape)")
        .replace("ctx.save_for", "ctx.kept = KEPT.setdefault(w.shape, torch.empty_like(w)); ctx.save_for")
        .replace("class Product", "KEPT = {}\nclass Product"),
        "another call before the backward", "grad:gemm.weight",
    ),
    "mode of the backward": (
        LAST.replace("(ctx, y):", "(ctx, y, model):\n        ctx.model, ctx.training = model, model.training")
        .replace("CHANGED", "return (g if ctx.model.training == ctx.training else 0 * g), None")
        .replace("super().forward(x))", "super().forward(x), self)"),
        "another call before the backward", "grad:",
    ),
    "packed by train()": (
        """
class ModelNew(Model):
    def train(self, mode=True):
        self.packed = self.gemm.weight.detach().clone()
        return super().train(mode)
    def load_state_dict(self, *a, **k):
        found = super().load_state_dict(*a, **k)
        self.train(self.training)
        return found
    def forward(self, x):
        w = self.gemm.weight
        w = w - w.detach() + self.packed if self.training else w
        return self.bn(F.linear(x, w, self.gemm.bias) * self.scale)
""",
        "weights updated in place", "output",
    ),
    "64 rows": (after("y = y * 0 if len(x) % 64 == 0 else y"), "64 rows", "output"),
    "128 rows": (after("y = y * 0 if len(x) % 128 == 0 else y"), "128 rows", "output"),
    "output kept": (
        """
class Affine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, n, s, b):
        y = n * s + b
        ctx.y, ctx.s, ctx.b = y.detach(), s, b
        return y
    @staticmethod
    def backward(ctx, g):
        return g * ctx.s, (g * (ctx.y - ctx.b) / ctx.s).sum(0), g.sum(0)
class ModelNew(Model):
    def forward(self, x):
        bn = self.bn
        if self.training:
            bn.num_batches_tracked += 1
        z = self.gemm(x) * self.scale
        n = F.batch_norm(z, bn.running_mean, bn.running_var, None, None, self.training, 0.1, bn.eps)
        return Affine.apply(n, bn.weight, bn.bias)
""",
        "output written to", "grad:bn.weight",
    ),
    "default dtype": (after("torch.set_default_dtype(torch.float64)"), "plain", "settings"),
    "default device": (after("torch.set_default_device('meta')"), "plain", "settings"),
    "grad mode": (after("torch.set_grad_enabled(False)"), "plain", "settings"),
    "the third training call": (after("self.n += self.training; y = y * (self.n != 3)"), "plain", "output"),
    "without autograd": (after("y = y if torch.is_grad_enabled() else y * 3"), "plain", "output"),
    "frozen": (after("").replace("n = 0", "def __init__(self):\n        super().__init__()\n        "
               "self.scale.requires_grad_(False)"), "", ""),
    "a buffer": (after("").replace("n = 0", "def __init__(self):\n        super().__init__()\n        s = self.scale\n"
                 "        del self.scale\n        self.register_buffer('scale', s.data)"), "", ""),
}  # fmt: skip


@pytest.fixture(scope="session")
def prepared(tmp_path_factory):
    """The references of a model's source, built once."""
    kept = {}

    def prepare(source):
        if source not in kept:
            path = tmp_path_factory.mktemp("model") / "model.py"
            path.write_text(source)
            file = load_model_file(path)
            kept[source] = file, list(references(file, seeds=1))
        return kept[source]

    return prepare


@pytest.fixture
def judged(prepared, tmp_path):
    def judge_source(candidate, model=MODEL):
        path = tmp_path / "new.py"
        path.write_text(model + candidate)
        file, cases = prepared(model)
        return judge(load_candidate_file(path), file, cases)

    return judge_source


def failures(result):
    return [c for c in result["checks"] if not c["ok"]]


@pytest.mark.parametrize("name", WRONG)
def test_what_only_another_use_shows(judged, name):
    source, case, quantity = WRONG[name]
    result = judged(source)
    assert not result["equal"]
    if case:
        assert any(case in c["case"] and c["quantity"].startswith(quantity) for c in failures(result)), result["reason"]
    else:
        assert result["fault"]["class"] == "parameters", result["reason"]


@pytest.mark.parametrize("source", [product("pass"), last("return g.clone()"), after("pass"), "ModelNew = Model"])
def test_the_same_function_under_every_use(judged, source):
    result = judged(source)
    assert result["equal"] and not [w for w in result["warnings"] if "autocast" not in w], result["warnings"]


STOP = MODEL.replace("return self.bn(self.gemm(x) * self.scale)", "z = self.bn(self.gemm(x))\n        return RETURNED")


def test_a_stopped_gradient_stays_stopped(judged):
    stopped = STOP.replace("RETURNED", "z * self.scale, z.detach()")
    assert judged("ModelNew = Model", stopped)["equal"]
    for other in ("z * self.scale, z", "z * self.scale, z * 1"):
        result = judged(STOP.replace("RETURNED", other).replace("Model(", "ModelNew("), stopped)
        failed = failures(result)
        assert {c["quantity"] for c in failed} >= {"grad:output[1]"}, result["reason"]
        assert "cut off from its graph" in result["reason"] and result["fault"]["class"] == "wrong_gradient"


def test_a_gradient_that_the_original_has_not(judged):
    stopped = STOP.replace("RETURNED", "z.detach() * self.scale")
    assert judged("ModelNew = Model", stopped)["equal"]
    result = judged(STOP.replace("RETURNED", "z * self.scale").replace("Model(", "ModelNew("), stopped)
    assert {c["measure"] for c in failures(result)} == {"surplus"}, result["reason"]
    assert "the original gives none" in result["reason"]


def test_frozen_parameters_stay_frozen(judged):
    frozen = MODEL.replace("BatchNorm1d(32)", "BatchNorm1d(32)\n        self.scale.requires_grad_(False)")
    assert judged("ModelNew = Model", frozen)["equal"]
    result = judged(MODEL.replace("Model(", "ModelNew("), frozen)
    assert "scale is a parameter, expected a frozen parameter" in result["reason"]


def test_buffers_outside_the_state_dict(judged):
    """Those that a call changes: set back with every state, and then compared."""
    line = "self.steps += self.training\n        return "
    counting = MODEL.replace("return self.bn(", f"{line}self.bn(").replace(
        "BatchNorm1d(32)", "BatchNorm1d(32)\n        self.register_buffer('steps', torch.zeros(()), persistent=False)"
    )
    assert judged("ModelNew = Model", counting)["equal"]
    result = judged(counting.replace(line, "return ").replace("Model(", "ModelNew("), counting)
    assert {c["quantity"] for c in failures(result)} == {"steps"}, result["reason"]


def test_a_buffer_that_the_original_changes_in_evaluation(judged):
    line = "self.seen += 1\n        return "
    counting = MODEL.replace("return self.bn(", f"{line}self.bn(").replace(
        "BatchNorm1d(32)", "BatchNorm1d(32)\n        self.register_buffer('seen', torch.zeros(()))"
    )
    assert judged("ModelNew = Model", counting)["equal"]
    only = "self.seen += self.training\n        return "
    result = judged(counting.replace(line, only).replace("Model(", "ModelNew("), counting)
    assert {(c["quantity"], c["phase"]) for c in failures(result)} == {("seen", "eval")}, result["reason"]


def test_uses_that_the_original_does_not_allow_are_left_out(judged, prepared):
    """A view of the inputs, an output that the backward needs, a graph that is freed, a batch of one size."""
    strict = MODEL.replace(
        "return self.bn(self.gemm(x) * ", "return F.relu(self.bn(self.gemm(x.view(-1)).view(-1, 32) * "
    )
    strict = strict.replace("x.view(-1))", "x.view(-1).view(100, 24))").replace("self.scale)\n", "self.scale))\n")
    assert judged("ModelNew = Model", strict)["equal"]
    _, cases = prepared(strict)
    uses = {word for r in cases for word in r.case.use}
    assert not uses & {TRANSPOSED, SLICED, WRITTEN} and uses >= {TURNED, EXPANDED, FROZEN, ADDED}
    wrong = product("gx = g @ w if ctx.needs_input_grad[0] else undefined")
    result = judged(
        wrong.replace("return self.bn(Pro", "return F.relu(self.bn(Pro").replace("scale)", "scale))"), strict
    )
    assert not result["equal"] and "inputs without gradients" in result["reason"]


def test_an_output_that_only_the_candidate_needs_is_no_fault(judged):
    """PyTorch refuses it by its version counters; nothing wrong comes out."""
    kept = last("return ctx.saved_tensors[0] * 0 + g").replace(
        "return y.clone()", "r = y.clone(); ctx.save_for_backward(r); return r"
    )
    result = judged(kept)
    assert result["equal"] and any("needs the output" in w for w in result["warnings"]), result["reason"]


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ("torch.set_float32_matmul_precision('high')", "precision of float32 products"),
        ("torch.backends.cudnn.benchmark = True", "cuDNN's benchmark"),
        ("random.seed(0)", "Python's random state"),
        ("import warnings; warnings.simplefilter('ignore')", "warning filters"),
        ("torch.set_num_threads(3)", "number of threads"),
    ],
)
def test_settings_that_a_call_leaves_changed_are_told(judged, changed, said):
    precision, count = torch.get_float32_matmul_precision(), torch.get_num_threads()
    benchmark = torch.backends.cudnn.benchmark
    try:
        result = judged(after(changed))
    finally:
        torch.set_float32_matmul_precision(precision)
        torch.set_num_threads(count)
        torch.backends.cudnn.benchmark = benchmark
    assert result["equal"] and any(f"changed: {said}" in w for w in result["warnings"]), result["warnings"]


def test_settings_that_loading_a_file_changes(tmp_path):
    (tmp_path / "model.py").write_text(MODEL)
    new = tmp_path / "new.py"
    new.write_text(f"{MODEL}\ntorch.set_default_dtype(torch.float64)\nclass ModelNew(Model):\n    pass\n")
    result = verify(tmp_path / "model.py", new, effort="quick", device="cpu")
    assert not result["equal"]
    new.write_text(f"{MODEL}\ntorch.backends.cuda.matmul.allow_tf32 = True\nrandom.seed(1)\nModelNew = Model\n")
    result = verify(tmp_path / "model.py", new, effort="quick", device="cpu")
    assert result["equal"] and any("precision of float32" in w and "random" in w for w in result["warnings"])


def test_a_copy_that_raises_is_told(judged):
    locked = after("pass").replace("n = 0", "def __deepcopy__(self, memo):\n        raise TypeError('no copies')")
    result = judged(locked)
    assert result["equal"] and any("no copies" in w for w in result["warnings"]), result["warnings"]
    assert not judged("ModelNew = Model", MODEL.replace("def forward", "__deepcopy__ = None\n    def forward"))[
        "warnings"
    ]


BY_ITS_OWN_MODE = """
class ModelNew(Model):
    def forward(self, x):
        self.bn.train(self.training)
        return super().forward(x)
"""


@pytest.mark.parametrize("candidate", [after("assert self.training == self.bn.training"), BY_ITS_OWN_MODE])
def test_frozen_statistics_are_reported_and_not_demanded(judged, candidate):
    result = judged(candidate)
    assert result["equal"] and result["properties"]["frozen_statistics"] is False, result["reason"]
    assert any("frozen statistics" in w for w in result["warnings"])


def test_frozen_statistics_of_a_copy_are_right(judged):
    result = judged(after(""))
    assert result["properties"]["frozen_statistics"] is True and "frozen" not in "".join(result["warnings"])


def test_a_model_without_statistics_has_no_case_of_them(prepared):
    _, cases = prepared(MODEL.replace("BatchNorm1d", "LayerNorm"))
    assert {u for r in cases for u in r.case.use} == {u for c in FAMILIES for u in c.use} - {STATISTICS}


def test_the_cases_have_every_use():
    kept = without_rows(plan_cases(0, 1, shared=False, full_rows=None, full_everywhere=False))
    assert {u for c in FAMILIES for u in c.use} == {u for c in kept for u in c.use}
    quick = [c for c in FAMILIES if c.name in QUICK]
    assert len([c for c in quick if c.use]) == 4 and any(c.phases[0] == "eval" for c in quick)


def test_inputs_and_cotangents_as_a_use_lays_them_out():
    x = torch.randn(5, 3, 4)
    turned, sliced = arranged(x, (TRANSPOSED,)), arranged(x, (SLICED,))
    assert torch.equal(turned, x) and turned.movedim(-1, 0).is_contiguous() and not turned.is_contiguous()
    assert torch.equal(sliced, x) and sliced.storage_offset() == 1 and not sliced.is_contiguous()
    seen = []
    model = torch.nn.Linear(4, 6)
    model.register_full_backward_hook(lambda m, gi, go: seen.append(go[0]))
    for use in (EXPANDED, TURNED):
        run_trial(model, [torch.randn(7, 4)], training=True, cotangent=lambda i, y: torch.randn_like(y), use=(use,))
    assert seen[0].stride() == (0, 0) and seen[1].stride() == (1, 7)
    assert (TRAPS / "model.py").exists()
