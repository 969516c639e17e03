"""What every test shares: a clean strategy, two threads, and the marker for what needs a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import gemmnorm


@pytest.fixture(autouse=True)
def _same_conditions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Every test starts with the planner's own choice, one seed and PyTorch's default precision, and leaves them so."""
    monkeypatch.delenv("GEMMNORM_STRATEGY", raising=False)
    gemmnorm.set_strategy(None)
    torch.manual_seed(0)
    yield
    gemmnorm.set_strategy(None)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """GPU tests that are asked for on a machine without one are skipped with the reason, not failed."""
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
