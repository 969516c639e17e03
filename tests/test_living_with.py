"""What other libraries do to a model before and after `fuse`: wrap its forward, derive from its class, copy, shard."""

from __future__ import annotations

import copy
import functools
import gc
import inspect
import io
import linecache
import pickle
from types import MethodType
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist
from fuse_support import FEATURES, Founding, Residual, assert_equal_in_use, projector
from support import stir, twin
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.utils import parametrize

import gemmnorm
from gemmnorm import LinearScaleBatchNorm1d


@pytest.fixture
def alone(tmp_path: Any) -> Any:
    """A process group of this process."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield dist.group.WORLD
    dist.destroy_process_group()


def wrap(model: nn.Module) -> None:
    """Put a `forward` on the instance, as accelerate's `prepare` does."""
    original = model._original_forward = model.forward
    wrapped = functools.wraps(original.__func__)(lambda self, *args: original.__func__(self, *args) + 1)
    model.forward = MethodType(wrapped, model)


def unwrap(model: nn.Module) -> None:
    """Take it off again, as `unwrap_model(keep_fp32_wrapper=False)` does."""
    forward, original = model.forward, model.__dict__.pop("_original_forward")
    while hasattr(forward, "__wrapped__") and forward != original:
        forward = forward.__wrapped__
    model.forward = MethodType(forward, model)


# --- a forward on the instance


def test_a_wrapped_forward_outlives_fuse_and_unfuse(calls: list[Any]) -> None:
    model = gemmnorm.fuse(stir(Founding()).eval())
    original, x = gemmnorm.unfuse(twin(model)), torch.randn(5, FEATURES)
    wrap(model)
    for step, fused in ((lambda m: m, 1), (gemmnorm.unfuse, 0), (gemmnorm.fuse, 1), (unwrap, 1)):
        step(model)
        calls.clear()
        torch.testing.assert_close(model(x), original(x) + (step is not unwrap))
        assert len(calls) == fused
        assert len(gemmnorm.fuse_report(model).matches) == 1
        assert gemmnorm.fuse_report(model).matches[0].fused == bool(fused)
        gemmnorm.explain(model, x)
    assert type(gemmnorm.unfuse(model)) is Founding and "forward" not in model.__dict__


def test_a_forward_that_was_wrapped_before_is_refused_until_it_is_unwrapped(calls: list[Any]) -> None:
    model, x = stir(Founding()).eval(), torch.randn(5, FEATURES)
    want = model(x)
    wrap(model)
    assert "replaced on the instance" in str(gemmnorm.fuse_report(gemmnorm.fuse(model)))
    torch.testing.assert_close(model(x), want + 1)
    unwrap(model)
    torch.testing.assert_close(gemmnorm.fuse(model)(x), want)
    assert len(calls) == 1


# --- a class that is derived after `fuse`


class Halved(nn.Module):
    def forward(self, value: Tensor) -> Tensor:
        return value / 2


def test_a_class_derived_later_is_kept(calls: list[Any]) -> None:
    model = gemmnorm.fuse(stir(Founding()))
    original = gemmnorm.unfuse(twin(model))
    for m in (model, original):
        parametrize.register_parametrization(m, "scale", Halved())
    derived = type(model)
    for step in (lambda m: m, gemmnorm.fuse, gemmnorm.unfuse, copy.deepcopy):
        changed = step(model)
        assert type(changed) is derived and derived.__name__ == "ParametrizedFounding"
        assert_equal_in_use(changed, original)
        assert not calls and not gemmnorm.fuse_report(changed).matches  # the scale is no parameter any more


def test_other_children_than_recorded_are_counted_too() -> None:
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    model.append(nn.Softplus())
    model(torch.randn(5, 6))
    match = gemmnorm.fuse_report(model, calls=True).matches[0]
    assert not match.fused and match.calls is None
    assert sum(model._gemmnorm.calls[0].unfused.values()) == 1


def test_fully_shard_before_and_after(alone: Any, calls: list[Any]) -> None:
    fully_shard = pytest.importorskip("torch.distributed.fsdp", reason="PyTorch 2.6").__dict__.get("fully_shard")
    if fully_shard is None:
        pytest.skip("PyTorch 2.6")
    mesh = dist.init_device_mesh("cpu", (1,))
    model = gemmnorm.fuse(stir(nn.Sequential(Founding(), *projector())))
    original, x = gemmnorm.unfuse(twin(model)), torch.randn(5, FEATURES)
    fully_shard(model[0], mesh=mesh), fully_shard(model, mesh=mesh)
    torch.manual_seed(1)
    y = model(x)
    torch.manual_seed(1)
    torch.testing.assert_close(y, original(x))
    y.sum().backward()
    assert len(calls) == 4 and type(model[0]).__name__ == "FSDPFounding"
    gemmnorm.warmup(model, x)
    gemmnorm.explain(model, x)
    gemmnorm.unfuse(model)
    calls.clear()
    model(x)
    assert not calls and type(model[0]).__name__ == "FSDPFounding"


def test_a_sharded_child_runs_by_itself(alone: Any, calls: list[Any]) -> None:
    fsdp = pytest.importorskip("torch.distributed.fsdp")
    if not hasattr(fsdp, "fully_shard"):
        pytest.skip("PyTorch 2.6")
    ours = LinearScaleBatchNorm1d(FEATURES, FEATURES)
    original = Founding()
    original.load_state_dict(ours.state_dict())
    fsdp.fully_shard(ours.gemm, mesh=dist.init_device_mesh("cpu", (1,)))
    x = torch.randn(5, FEATURES)
    torch.testing.assert_close(ours(x), original(x))
    assert not calls


# --- names and classes


def test_the_class_keeps_its_name_and_its_instances_stay_together() -> None:
    narrow, wide = Founding(), nn.Sequential(nn.Linear(FEATURES, 4), nn.BatchNorm1d(4))
    model = gemmnorm.fuse(nn.ModuleList([narrow, Founding(), wide, nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))]))
    assert [type(m).__name__ for m in model] == ["Founding", "Founding", "Sequential", "Sequential"]
    # A wrapping policy picks one class by name and asks isinstance.
    assert type(model[0]) is type(model[1]) and type(model[2]) is type(model[3])
    assert type(model[0]).__qualname__ == "Founding" and type(model[0]).__module__ == Founding.__module__
    assert inspect.getsource(type(model[0])) == inspect.getsource(Founding)
    assert repr(model) == repr(gemmnorm.unfuse(twin(model)))


class Registered(nn.Module):
    known: ClassVar[dict[str, type]] = {}

    def __init_subclass__(cls, *, key: str) -> None:
        Registered.known[key] = cls


class Entry(Registered, key="entry"):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(3, 3), nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.fc(x))


def test_a_class_that_registers_its_subclasses_does_not_hear_of_it() -> None:
    model = gemmnorm.fuse(Entry())
    assert all(m.fused for m in gemmnorm.fuse_report(model).matches) and Registered.known == {"entry": Entry}


def test_what_data_parallel_makes_of_a_module_runs_on_its_own_tensors() -> None:
    model = gemmnorm.fuse(stir(Founding()).eval())
    replica = model._replicate_for_data_parallel()
    for name, child in model.named_children():
        replica._modules[name] = copy.deepcopy(child)
        replica._modules[name].weight.data.mul_(2)
    replica.scale = nn.Parameter(model.scale * 2)
    original = gemmnorm.unfuse(twin(model))
    for tensor in (original.gemm.weight, original.bn.weight, original.scale):
        tensor.data.mul_(2)
    x = torch.randn(5, FEATURES)
    torch.testing.assert_close(replica(x), original(x))


def test_a_shallow_copy_reads_its_own_attributes() -> None:
    model = gemmnorm.fuse(Residual())
    other = copy.copy(model)
    other.strength = -3.0
    original = gemmnorm.unfuse(twin(other))
    other.eval(), original.eval()
    x = torch.randn(5, FEATURES)
    torch.testing.assert_close(other(x), original(x))


def test_text_for_tracebacks_goes_with_its_function() -> None:
    def texts() -> int:
        gc.collect()
        return sum(name.startswith("<gemmnorm") for name in linecache.cache)

    before = texts()
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(31, 7), nn.BatchNorm1d(7), nn.Tanh(), nn.Hardtanh(0.1, 0.9)))
    assert texts() == before + 2  # `forward`, and the check before it
    del model
    assert texts() == before


# --- models that are not all plain modules


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("make", [torch.jit.script, lambda m: torch.jit.trace(m, torch.randn(3, 4))])
def test_a_torchscript_module_inside(make: Any) -> None:
    model = nn.Sequential(make(nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))), nn.Linear(4, 8), nn.BatchNorm1d(8))
    assert [m.linear for m in gemmnorm.fuse_report(gemmnorm.fuse(model)).matches if m.fused] == ["1"]
    assert model(torch.randn(3, 4)).shape == (3, 8)


@pytest.mark.parametrize("training", [True, False])
def test_meta_tensors(training: bool) -> None:
    x = torch.randn(5, FEATURES, device="meta")
    for model in (gemmnorm.fuse(Founding()), LinearScaleBatchNorm1d(FEATURES, FEATURES)):
        assert model.to("meta").train(training)(x).shape == (5, FEATURES)
        gemmnorm.explain(model, x)
        gemmnorm.warmup(model, x)


def test_inside_of_fake_tensor_mode() -> None:
    with FakeTensorMode():
        for model in (gemmnorm.fuse(Founding()), LinearScaleBatchNorm1d(FEATURES, FEATURES)):
            assert model(torch.randn(5, FEATURES)).shape == (5, FEATURES)


# --- warming up and explaining


class Cached(nn.Module):
    """Keeps a tensor that is no leaf, has a dictionary for an answer, draws numbers, and takes a keyword."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Sequential(*projector())
        self.last = nn.utils.weight_norm(nn.Linear(FEATURES, 2))
        self.kept = self.last.weight * 2

    def forward(self, x: Tensor, *, gain: Tensor) -> dict[str, Any]:
        return {"y": [self.last(self.head(x) * gain)], "size": len(x)}


@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
@pytest.mark.parametrize("fused", [True, False])
def test_warmup_and_explain_run_on_the_model_and_leave_no_trace(fused: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Cached()
    if fused:
        gemmnorm.fuse(model)
    x, gain = torch.randn(5, FEATURES, requires_grad=True), torch.ones(1, requires_grad=True)
    model(x, gain=gain)["y"][0].sum().backward()
    wanted = [x, gain, *model.parameters()]
    kept = [None if t.grad is None else t.grad.clone() for t in wanted]
    buffers = [(b, b.clone()) for b in model.buffers()]
    state, classes = torch.get_rng_state(), [type(m) for m in model.modules()]
    backwards = []
    model.last.weight_g.register_hook(lambda g: backwards.append(1))
    gemmnorm.warmup(model, x, gain=gain)
    assert backwards == [1]
    assert len(gemmnorm.explain(model, x, gain=gain).plans) == 3
    assert torch.equal(torch.get_rng_state(), state) and [type(m) for m in model.modules()] == classes
    for tensor, grad in zip(wanted, kept, strict=True):
        assert tensor.grad is None if grad is None else torch.equal(tensor.grad, grad)
    assert all(a is b and torch.equal(b, value) for a, (b, value) in zip(model.buffers(), buffers, strict=True))


def test_warmup_under_ddp_leaves_the_reducer_ready(alone: Any) -> None:
    model = nn.parallel.DistributedDataParallel(gemmnorm.fuse(Founding()))
    x = torch.randn(5, FEATURES)
    gemmnorm.warmup(model, x)
    for _ in range(2):
        model(x).sum().backward()


def test_a_group_is_shared_by_copies(alone: Any) -> None:
    ours = LinearScaleBatchNorm1d(FEATURES, FEATURES, process_group=alone)
    averaged = torch.optim.swa_utils.AveragedModel(nn.Sequential(ours))
    assert averaged.module[0].process_group is alone and averaged.module[0].gemm is not ours.gemm
    gemmnorm.warmup(ours, torch.randn(5, FEATURES))


@pytest.mark.parametrize("save", [pickle.dumps, lambda m: (torch.save(m, s := io.BytesIO()), s.getvalue())[1]])
def test_a_saved_choice_is_loaded(save: Any, calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(*projector()), lambda linear, name: name == "4")
    data = save(model)
    loaded = torch.load(io.BytesIO(data), weights_only=False) if data[:2] == b"PK" else pickle.loads(data)
    assert [m.linear for m in gemmnorm.fuse_report(loaded).matches if m.fused] == ["4"]
    assert_equal_in_use(loaded, gemmnorm.unfuse(twin(loaded)))
    assert len(calls) == 3
