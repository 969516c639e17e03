"""Weights that autocast casts are cast once for the calls of a step: the same results, and never an older copy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack
from typing import Any
from unittest import mock

import pytest
import torch
from emulator import COMPILER, emulated
from support import stir
from test_collective import needs_gloo, on_ranks
from test_emulated import SMALL_HOPPER
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from gemmnorm import LinearScaleBatchNorm1d, plan
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import casts, driver

GPU = torch.cuda.is_available()
pytestmark = pytest.mark.skipif(COMPILER is None, reason="no g++")
INNER, FEATURES = 64, 24


class Region:
    """Stands in for what autocast's cache holds: the emulator runs on the CPU, whose autocast shows none."""

    def __init__(self) -> None:
        self.open()

    def open(self) -> None:
        self.held = torch.empty(0)

    def __call__(self, device: torch.device) -> TensorWeakRef:
        return TensorWeakRef(self.held)


@pytest.fixture
def region(monkeypatch: pytest.MonkeyPatch) -> Iterator[Region]:
    found = Region()
    monkeypatch.setattr(casts, "_region", found)
    casts._made.clear()
    with emulated(SMALL_HOPPER), plan.set_strategy("cublas_folded_bn"):
        yield found


def module(in_features: int = INNER) -> Any:
    """A module that has been called twice in a step before."""
    torch.manual_seed(0)
    m: Any = stir(LinearScaleBatchNorm1d(in_features, FEATURES, activation="relu"))
    state = {name: t.clone() for name, t in m.state_dict().items()}
    _ = [called(m, torch.randn(70, in_features)) for _ in range(2)]
    m.load_state_dict(state)
    return m


def view(seed: int) -> Tensor:
    return torch.randn(70, INNER, generator=torch.Generator().manual_seed(seed), requires_grad=True)


def called(m: Any, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        y: Tensor = m(x)
    return y


def copy_of(y: Tensor) -> Tensor:
    """The weight as it was multiplied."""
    saved: Tensor = y.grad_fn.saved_tensors[1]  # type: ignore[union-attr]
    return saved


def two_views(m: Any, between: Callable[[Tensor], object]) -> list[Tensor]:
    """Of two calls the results and all gradients; `between` them, with the first's result."""
    views = view(1), view(2)
    first = called(m, views[0])
    between(first)
    second = called(m, views[1])
    (first.float().square().sum() + second.float().cos().sum()).backward()
    return [first.detach(), second.detach(), *[v.grad for v in views], *[p.grad for p in m.parameters()]]  # type: ignore[misc]


def test_a_second_call_multiplies_by_the_copy_of_the_first(region: Region) -> None:
    want = two_views(module(), lambda _: casts._made.clear())

    def between(first: Tensor) -> None:
        assert casts._made[id(m.gemm.weight)].copy() is copy_of(first)

    m = module()
    with runtime.recording() as plans:
        got = two_views(m, between)
    assert [p.problem.cast for p in plans] == [("x", "weight"), ("x",)]
    for a, b in zip(got, want, strict=True):
        assert torch.equal(a, b)
    assert m.gemm.weight.grad.dtype == torch.float32
    assert casts._made[id(m.gemm.weight)].copy() is None  # nothing holds it when both have gone backward


def test_both_graphs_hold_one_copy(region: Region) -> None:
    m = module()
    first, second = (called(m, view(seed)) for seed in (1, 2))
    assert copy_of(first) is copy_of(second)
    second.float().sum().backward()
    assert copy_of(first).dtype == torch.bfloat16
    first.float().sum().backward()


def in_place(m: Any, _: Region) -> None:
    with torch.no_grad():
        m.gemm.weight.mul_(2)


def other_memory(m: Any, _: Region) -> None:
    m.gemm.weight.data = m.gemm.weight.detach() * 2


def past_the_version(m: Any, region: Region) -> None:
    """As where an optimizer works on `.data`: between two steps, each under its own autocast."""
    m.gemm.weight.data.mul_(2)
    region.open()


def another(m: Any, _: Region) -> None:
    m.gemm.weight = nn.Parameter(m.gemm.weight.detach() * 2)


@pytest.mark.parametrize("change", [in_place, other_memory, past_the_version, another])
def test_a_weight_that_has_changed_is_cast_anew(change: Callable[[Any, Region], None], region: Region) -> None:
    m = module()
    first = called(m, view(1))
    change(m, region)
    second = called(m, view(1))
    assert torch.equal(copy_of(second), m.gemm.weight.bfloat16())
    assert not torch.equal(copy_of(second), copy_of(first))


def test_another_stream_casts_anew(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    m = module()
    first = called(m, view(1))
    monkeypatch.setattr(driver, "stream_handle", lambda index: 7)
    assert copy_of(called(m, view(2))) is not copy_of(first)


def test_another_dtype_casts_anew(region: Region) -> None:
    m = module()
    first = called(m, view(1))
    with torch.autocast("cpu", torch.float16):
        second = m(view(1))
    assert (copy_of(first).dtype, copy_of(second).dtype) == (torch.bfloat16, torch.float16)


def test_the_first_step_shows_that_a_weight_is_called_twice(region: Region) -> None:
    m = stir(LinearScaleBatchNorm1d(INNER, FEATURES))
    results = [called(m, view(seed)) for seed in (1, 2, 3)]
    first, second, third = map(copy_of, results)
    assert first is not second and second is third


def test_a_weight_that_is_called_once_asks_for_no_region(region: Region, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(casts, "_region", None)
    m = stir(LinearScaleBatchNorm1d(INNER, FEATURES))
    for seed in range(3):
        called(m, view(seed)).float().sum().backward()


def frozen(m: Any) -> None:
    m.gemm.weight.requires_grad_(False)


def computed(m: Any) -> None:
    nn.utils.parametrizations.spectral_norm(m.gemm)


@pytest.mark.parametrize("change", [frozen, computed])
def test_what_is_not_shared(change: Callable[[Any], None], region: Region) -> None:
    m = module()
    change(m)
    casts._made.clear()
    for seed in (1, 2):
        called(m, view(seed))
    assert not casts._made


def test_rows_that_are_padded_are_not_shared(region: Region) -> None:
    m = module(INNER + 4)
    first, second = (called(m, torch.randn(70, INNER + 4)) for _ in range(2))
    assert copy_of(first) is not copy_of(second) and not copy_of(first).is_contiguous()


def test_what_hooks_of_saved_tensors_put_elsewhere_is_not_shared(region: Region) -> None:
    m = module()
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
        first = called(m, view(1))
        assert casts._made[id(m.gemm.weight)].copy() is None
        second = called(m, view(2))
    (first.float().sum() + second.float().sum()).backward()
    assert m.gemm.weight.grad is not None


def test_without_gradients_nothing_is_kept(region: Region) -> None:
    m = stir(LinearScaleBatchNorm1d(INNER, FEATURES))
    with torch.no_grad():
        called(m, view(1))
    assert not casts._made


# --- synchronised statistics ------------------------------------------------------------------------------------------


def _views_on_a_rank(rank: int, kernels: bool, share: bool) -> tuple[list[Any], int]:
    """Results and gradients of three steps of two views each, and how many calls multiplied by another's copy."""
    find, shared = casts.find, []

    def counted(weight: Tensor, dtype: torch.dtype) -> Tensor | None:
        found = find(weight, dtype) if share else None
        shared.append(found is not None)
        return found

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(casts, "find", counted))
        if kernels:
            stack.enter_context(emulated(plan.chip_for(90, 3)))
            stack.enter_context(mock.patch.object(casts, "_region", Region()))
        torch.manual_seed(0)
        m = LinearScaleBatchNorm1d(INNER, FEATURES, process_group=torch.distributed.group.WORLD)
        found = []
        for step in range(3):
            m.zero_grad()
            results = [called(m, view(4 * step + 2 * rank + i)) for i in range(2)]
            (results[0].float().square().sum() + results[1].float().cos().sum()).backward()
            found += [y.detach().float() for y in results] + [p.grad.clone() for p in m.parameters()]
            with torch.no_grad():
                m.gemm.weight.mul_(1.5)
    return [t.numpy() for t in found], sum(shared)


@needs_gloo
@pytest.mark.parametrize("kernels", [True, False])
def test_calls_that_synchronise_share_a_copy(kernels: bool) -> None:
    want, got = (on_ranks(2, _views_on_a_rank, kernels, share) for share in (False, True))
    for (a, none), (b, shared) in zip(want, got, strict=True):
        assert (none, shared) == (0, 2 * kernels)  # from the second step on
        assert all((one == other).all() for one, other in zip(a, b, strict=True))


# --- autocast's own cache, on a GPU -----------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="no GPU")
class TestRegion:
    device = torch.device("cuda", 0)

    def alive(self, cache_enabled: bool = True) -> AbstractContextManager[Any]:
        return torch.autocast("cuda", torch.bfloat16, cache_enabled=cache_enabled)

    def test_a_region_lasts_as_long_as_the_outermost_autocast(self) -> None:
        with self.alive():
            with self.alive():
                inner = casts._region(self.device)
            assert inner is not None and inner() is not None and casts._region(self.device) is inner
        gc.collect()
        assert inner() is None
        with self.alive():
            assert casts._region(self.device) is not inner

    def test_there_is_none_without_the_cache(self) -> None:
        with self.alive(cache_enabled=False):
            assert casts._region(self.device) is None

    def test_two_views_share_and_two_steps_do_not(self) -> None:
        m = LinearScaleBatchNorm1d(256, 512, device=self.device)
        x = torch.randn(128, 256, device=self.device)
        results = []
        for step in range(3):
            with self.alive():
                first, second = m(x), m(x)
            assert (copy_of(first) is copy_of(second)) == (step > 0)
            assert all(copy_of(first) is not copy_of(other) for other in results)
            results += [first, second]
        torch.stack(results).sum().backward()

    def test_the_weight_decides_not_its_copy(self) -> None:
        m = LinearScaleBatchNorm1d(256, 512, device=self.device)
        x = torch.randn(128, 256, device=self.device)
        held = []
        for _ in range(4):
            with self.alive():
                held += [m(x), m(x)]
            m.gemm.weight.data.mul_(2)  # no version counts that
        for i, y in enumerate(held):
            exact = m.gemm.weight.detach() / 2 ** (4 - i // 2)
            assert torch.equal(copy_of(y), exact.bfloat16())
