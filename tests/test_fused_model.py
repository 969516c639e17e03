"""A fused model stays the same model, whatever happens to it later."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
from fuse_support import Founding, Residual, assert_equal_in_use, projector
from support import stir, twin
from torch import Tensor, nn

import gemmnorm

# --- the model stays the same model


def test_unfuse_restores_the_classes_and_nothing_is_left_behind() -> None:
    model = Residual()
    before = {path: (type(m), set(m.__dict__)) for path, m in model.named_modules()}
    keys = list(model.state_dict())
    gemmnorm.fuse(gemmnorm.fuse(model))
    assert type(model).__name__ == "Residual" and isinstance(model, Residual)
    assert type(model).__module__ == Residual.__module__ and list(model.state_dict()) == keys
    assert inspect.getsource(type(model)) == inspect.getsource(Residual)
    assert inspect.signature(model.forward) == inspect.signature(Residual().forward)
    gemmnorm.unfuse(model)
    assert {path: (type(m), set(m.__dict__)) for path, m in model.named_modules()} == before


def test_equal_blocks_share_a_class() -> None:
    model = gemmnorm.fuse(nn.Sequential(*(Founding() for _ in range(3))))
    assert len({type(m) for m in model}) == 1


@pytest.mark.parametrize("how", ["deepcopy", "copy", "pickle", "save"])
def test_copies_are_fused_and_independent(how: str, calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), *projector()))
    if how == "deepcopy":
        new = copy.deepcopy(model)
        assert type(new[0]) is type(model[0])
    elif how == "copy":
        new = copy.copy(model)
    elif how == "pickle":
        new = pickle.loads(pickle.dumps(model))
    else:
        torch.save(model, stream := io.BytesIO())
        stream.seek(0)
        new = torch.load(stream, weights_only=False)
    assert str(gemmnorm.fuse_report(new)) == str(gemmnorm.fuse_report(model))
    assert all(m.fused for m in gemmnorm.fuse_report(new).matches)
    original = gemmnorm.unfuse(copy.deepcopy(model))
    assert type(original) is nn.Sequential and type(original[0]) is Founding
    assert_equal_in_use(new, original)
    assert len(calls) == 3 * 4
    if how != "copy":
        assert all(a.data_ptr() != b.data_ptr() for a, b in zip(new.parameters(), model.parameters(), strict=True))


def test_a_pickle_names_no_file_of_the_package() -> None:
    """Files move; what was saved names the folder, and `restore` in it."""
    saved = pickle.dumps(gemmnorm.fuse(nn.Sequential(Founding())))
    assert b"gemmnorm.fuse" in saved and b"restore" in saved and b"gemmnorm.fuse." not in saved


def test_hooks_on_the_owner_and_around_it_still_run() -> None:
    model, seen = nn.Sequential(Founding()), []
    for module in (model, model[0]):
        module.register_forward_hook(lambda m, args, y: seen.append(type(m).__name__))
    model[0].register_full_backward_hook(lambda *_: seen.append("backward"))
    gemmnorm.fuse(model)(torch.randn(4, 6, requires_grad=True)).sum().backward()
    assert seen == ["Founding", "Sequential", "backward"]


def test_conversion_to_sync_batch_norm_before_and_after() -> None:
    before = gemmnorm.fuse(nn.SyncBatchNorm.convert_sync_batchnorm(stir(Founding())))
    assert gemmnorm.fuse_report(before).matches[0].fused and type(before.bn) is nn.SyncBatchNorm
    assert_equal_in_use(before, gemmnorm.unfuse(twin(before)))
    model = stir(Founding())
    original = twin(model)
    after = nn.SyncBatchNorm.convert_sync_batchnorm(gemmnorm.fuse(model))
    assert type(after.bn) is nn.SyncBatchNorm and isinstance(after, Founding)
    assert gemmnorm.fuse_report(after).matches[0].fused
    assert list(after.state_dict()) == list(original.state_dict())
    x = torch.randn(5, 6)
    torch.testing.assert_close(after.eval()(x), original.eval()(x))


def test_a_structure_that_changed_runs_the_original_forward(calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)))
    original = gemmnorm.unfuse(twin(model))
    for module in (model, original):
        module.append(nn.Softplus())
    assert_equal_in_use(model, original)
    assert not calls
    gemmnorm.fuse(model)
    assert_equal_in_use(model, gemmnorm.unfuse(twin(model)))
    assert len(calls) == 3


def test_a_plain_attribute_that_changed_runs_the_original_forward() -> None:
    model = gemmnorm.fuse(Residual())
    original = gemmnorm.unfuse(twin(model))
    for module in (model, original):
        module.strength = -2.0
    assert_equal_in_use(model, original)


@pytest.mark.parametrize("shape", [(5, 6, 6), (2, 3), (1, 6), (6,), (0, 6)])
def test_other_inputs_get_the_original_answer(shape: tuple[int, ...]) -> None:
    model = gemmnorm.fuse(Founding())
    outcomes = []
    for module in (model, gemmnorm.unfuse(twin(model))):
        try:
            outcomes.append(module(torch.ones(shape)))
        except Exception as error:
            outcomes.append(type(error).__mro__[-4:])
    if isinstance(outcomes[0], Tensor):
        torch.testing.assert_close(*outcomes)
    else:
        assert ValueError in outcomes[0] if ValueError in outcomes[1] else outcomes[0]


def test_three_dimensions_run_the_original_ops(calls: list[Any]) -> None:
    model = gemmnorm.fuse(nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()))
    original = gemmnorm.unfuse(twin(model))
    x = torch.randn(4, 6, 6)
    torch.testing.assert_close(model(x), original(x))
    assert not calls


def test_autocast_gives_the_dtype_and_values_of_the_original() -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), *projector()).eval())
    original = gemmnorm.unfuse(twin(model))
    x = torch.randn(5, 6)
    with torch.autocast("cpu", torch.bfloat16):
        torch.testing.assert_close(model(x), original(x), rtol=0.05, atol=0.05)


def test_function_transforms_see_the_single_ops(calls: list[Any]) -> None:
    model = gemmnorm.fuse(Founding().eval())
    original = gemmnorm.unfuse(twin(model))
    x, state = torch.randn(3, 4, 6), dict(model.state_dict())
    for f in (torch.func.vmap, torch.func.jacrev):
        given = x[0] if f is torch.func.jacrev else x
        torch.testing.assert_close(f(model)(given), f(original)(given))
    assert not calls
    torch.testing.assert_close(torch.func.functional_call(model, state, x[0]), original(x[0]))
    assert len(calls) == 1


@pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")
def test_a_torchscript_trace_holds_plain_ops() -> None:
    model = gemmnorm.fuse(Founding().eval())
    x = torch.randn(4, 6)
    traced = torch.jit.trace(model, x)
    torch.testing.assert_close(traced(x), model(x))
    assert "gemmnorm::" not in str(traced.inlined_graph)


# --- torch.compile


def test_torch_compile_takes_the_whole_graph() -> None:
    model = gemmnorm.fuse(stir(Residual()))
    original = gemmnorm.unfuse(twin(model))
    targets: list[str] = []

    def backend(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        targets.extend(str(n.target) for n in graph.graph.nodes)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    x = torch.randn(5, 6)
    for mode in (True, False):
        model.train(mode), original.train(mode)
        torch.manual_seed(4)
        got = compiled(x)
        torch.manual_seed(4)
        torch.testing.assert_close(got, original(x))
    assert sum("gemmnorm.linear_scale_batch_norm" in t for t in targets) == 2 * 6
    assert [m.calls.compiled for m in gemmnorm.fuse_report(model, calls=True).matches] == ["fused"] * 6
    torch.testing.assert_close(model.state_dict(), original.state_dict())


def test_an_exported_program_holds_plain_ops() -> None:
    model = gemmnorm.fuse(nn.Sequential(Founding(), nn.ReLU()).eval())
    x = torch.randn(4, 6)
    program = torch.export.export(model, (x,), strict=False)
    assert "gemmnorm" not in str(program.graph)
    torch.testing.assert_close(program.module()(x), model(x))


# --- control


def test_filter_fn_chooses_by_module_and_name(calls: list[Any]) -> None:
    model = nn.Sequential(stir(Founding()), nn.Sequential(*projector()))
    original = twin(model)
    asked = []

    def wanted(linear: nn.Module, name: str) -> bool:
        asked.append(name)
        return name.startswith("1.") and linear.out_features == 8

    before = gemmnorm.fuse_report(model, wanted)
    assert asked == ["0.gemm", "1.0", "1.4", "1.7"]
    assert [m.linear for m in before.matches] == ["0", "4"] and not any(m.fused for m in before.matches)
    assert str(before).count("filter_fn leaves it out") == 2
    assert type(gemmnorm.fuse(model, wanted)[0]) is Founding
    assert [m.fused for m in gemmnorm.fuse_report(model).matches] == [False, True, True, False]
    assert_equal_in_use(model, original)
    assert len(calls) == 3 * 2
    assert str(gemmnorm.fuse_report(copy.deepcopy(model))) == str(gemmnorm.fuse_report(model))
    gemmnorm.fuse(model)
    assert all(m.fused for m in gemmnorm.fuse_report(model).matches)
    with pytest.raises(AttributeError):
        gemmnorm.fuse(model, lambda linear, name: linear.no_such_attribute)
    assert all(m.fused for m in gemmnorm.fuse_report(model).matches), "what fails changes nothing"
