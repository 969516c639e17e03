"""What `verify` reports of a module besides its values: names of inputs, hooks, pickling, strides."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from test_verify_use import MODEL, PRODUCT

from gemmnorm.userfiles import ModelFile, load_candidate_file, load_model_file
from gemmnorm.verify import judge, references
from gemmnorm.verify.golden import Reference


@functools.cache
def evaluation(model: str) -> tuple[ModelFile, list[Reference]]:
    """A model's file and its one reference in which these are looked at."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.py")
        path.write_text(model)
        file = load_model_file(path)
    return file, [found for found in references(file, seeds=1) if found.case.name == "evaluation"]


@pytest.fixture
def judged(tmp_path: Path) -> Callable[..., dict[str, Any]]:
    def judge_source(candidate: str, model: str = MODEL) -> dict[str, Any]:
        path = tmp_path / "new.py"
        path.write_text(model + candidate)
        return judge(load_candidate_file(path), *evaluation(model))

    return judge_source


CONVENTIONS = {
    "missing_arguments": (
        "class ModelNew(Model):\n    def forward(self, data):\n        return super().forward(data)\n",
        ["x"], "no input by the name x: a call",
    ),
    "hooks_not_run": (
        "class ModelNew(Model):\n    def __call__(self, x):\n        return self.forward(x)\n", [""], "hooks",
    ),
    "pickle_raises": (
        "class ModelNew(Model):\n    def __getstate__(self):\n        raise TypeError('not mine')\n"
        "    def __deepcopy__(self, memo):\n        new = ModelNew()\n"
        "        new.load_state_dict(self.state_dict())\n        return new.train(self.training)\n",
        "TypeError: not mine", "pickling it raises TypeError: not mine",
    ),
    "other_strides": (
        "class ModelNew(Model):\n    def forward(self, x):\n        y = super().forward(x)\n"
        "        return y.t().contiguous().t()\n",
        [[[1, 33]], [[32, 1]]], "other strides: (1, 33), the original's (32, 1)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONVENTIONS)
def test_what_a_program_finds_besides_values_is_reported(judged: Callable[..., dict[str, Any]], name: str) -> None:
    source, found, said = CONVENTIONS[name]
    result = judged(source)
    assert result["equal"] and result["properties"][name] == found, result["reason"]
    assert any(said in w for w in result["warnings"]), result["warnings"]
    of_its_own = result["properties"] if name == "other_strides" else judged("ModelNew = Model")["properties"]
    assert not any(of_its_own[other] for other in CONVENTIONS if other != name)


def test_what_the_original_lacks_as_well_is_no_difference(judged: Callable[..., dict[str, Any]]) -> None:
    bare = MODEL.replace(
        "    def forward(self, x)", "    __call__ = lambda self, x: self.forward(x)\n    def forward(self, x)"
    )
    locked = bare.replace(
        "    def forward", "    unpicklable = 1\n    def __getstate__(self):\n        raise TypeError\n    def forward"
    )
    properties = judged("ModelNew = Model", locked)["properties"]
    assert not any(properties[name] for name in CONVENTIONS)


def test_hooks_on_what_is_fused_are_named_and_no_warning(judged: Callable[..., dict[str, Any]]) -> None:
    result = judged(PRODUCT.replace("CHANGED", "pass"))
    assert result["properties"]["hooks_not_run"] == ["gemm"] and "hook" not in "".join(result["warnings"])
