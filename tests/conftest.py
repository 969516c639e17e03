"""What tests share: a clean strategy, one seed, the marker for what needs a GPU, a spy on the operator,
a single tile for the planner, and the backward of large batches at small sizes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulator
import pytest
import torch
import warm
from torch import Tensor

import gemmnorm
from gemmnorm import chain, functional, plan
from gemmnorm.plan import gradient, small
from gemmnorm.plan.candidates import Candidate
from gemmnorm.plan.gemm import Gemm
from gemmnorm.plan.gradient import Backward
from gemmnorm.runtime import call as runtime
from gemmnorm.runtime import measured
from gemmnorm.runtime.operands import Operands, Options


@pytest.fixture(autouse=True)
def _same_conditions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with the planner's own choice, one seed and PyTorch's default precision, and leaves them so."""
    monkeypatch.delenv("GEMMNORM_STRATEGY", raising=False)
    monkeypatch.delenv("GEMMNORM_KEEP_PRODUCT", raising=False)
    monkeypatch.delenv("GEMMNORM_FLOAT32", raising=False)
    monkeypatch.setattr(measured, "folder", lambda: Path(__file__).parent / "no tables")  # of `gemmnorm tune`
    gemmnorm.set_strategy(None)
    gemmnorm.set_float32_arithmetic(None)
    torch.manual_seed(0)
    yield
    gemmnorm.set_fusion(True)
    gemmnorm.set_keep_product("auto")
    gemmnorm.set_strategy(None)
    gemmnorm.set_float32_arithmetic(None)


@pytest.fixture(scope="session")
def _warm_server() -> Iterator[str]:
    with warm.served() as address:
        yield address


@pytest.fixture
def warm_processes(_warm_server: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What verify and the command line start has imported PyTorch already."""
    monkeypatch.setattr(warm.Popen, "server", _warm_server)
    for module in warm.users():
        monkeypatch.setattr(module, "subprocess", warm.warm_subprocess)


def pytest_configure() -> None:
    emulator.folder()  # before there are workers, so that they share it


def pytest_collection_finish() -> None:
    gc.collect()
    gc.freeze()  # PyTorch's own objects: every full collection would look at each of them


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The long ones first. GPU tests that are asked for without a GPU are skipped with the reason, not failed."""
    items.sort(key=lambda item: "long" not in item.keywords)
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """The options of every call of the operator that a fused model or module makes; none is kept for later calls.

    Chains over more than a matrix go to the operator here too, as where kernels can serve them.
    """
    made: list[dict[str, Any]] = []

    def spy(operands: Operands, options: Options, process_group: Any | None) -> Tensor:
        made.append(options._asdict())
        return functional.call(operands, options, process_group)

    monkeypatch.setattr(chain, "call", spy)
    monkeypatch.setattr(chain, "cached_call", lambda *_: None)
    monkeypatch.setattr(chain, "runs_plain_ops", lambda x, strategy: False)
    return made


@pytest.fixture
def one_tile(request: pytest.FixtureRequest) -> Iterator[tuple[int, int]]:
    """The only tile (rows, columns) that the planner has. Fails where no plan had it: others then serve unasked."""
    runtime.forget()
    with (
        plan.forcing(
            lambda c: isinstance(c.variant, Gemm) and (c.variant.tile.rows, c.variant.tile.columns) == request.param
        ),
        runtime.recording() as plans,
    ):
        yield request.param
    gemms = [launch for found in plans for launch in found.launches if launch.function == "fused_gemm"]
    assert not plans or request.param in [(g.member("kTileRows"), g.member("kTileColumns")) for g in gemms]
    runtime.forget()


@pytest.fixture
def no_small_panel(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The kernels of large batches at small sizes: `small_panel` has tests of its own."""
    monkeypatch.setattr(small, "PANELS", ())
    plan.cached_plan.cache_clear()
    yield
    plan.cached_plan.cache_clear()


@pytest.fixture
def turns(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Blocks take turns whatever the batch, with as few panels between sums and gradients as may be."""
    monkeypatch.setattr(gradient, "IN_FLIGHT", 0)
    with plan.forcing(
        lambda c: c.variant.kernel == "persistent_gradient" if isinstance(c.variant, Backward) else c.phase == "forward"
    ):
        yield


@pytest.fixture
def forced() -> Iterator[Callable[[Callable[[Candidate], bool]], None]]:
    """Restricts the candidates of the rest of the test."""
    with contextlib.ExitStack() as stack:
        yield lambda wanted: stack.enter_context(plan.forcing(wanted))
