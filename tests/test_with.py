"""The table of docs/site/with.md: each line is run, fused and not, and what runs is what the page says."""

from __future__ import annotations

import functools
import importlib
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.utils.checkpoint
from support import stir
from torch import Tensor, nn

import gemmnorm

PAGE = Path(__file__).parents[1] / "docs" / "site" / "with.md"
ROWS = [
    tuple(cell.strip() for cell in line.strip("|").split(" | "))
    for line in PAGE.read_text(encoding="utf-8").splitlines()
    if line.startswith("| ") and "`" in line
]
CASES = [
    pytest.param(*row, id=row[0].replace("`", ""), marks=[pytest.mark.long] if "AOTInductor" in row[0] else [])
    for row in ROWS
]
OPERATOR = "gemmnorm::linear_scale_batch_norm"
MODULES = ("torch", "copy", "pickle", "functools", "accelerate", "lightning", "peft", "torchao", "transformers")
# A tool, or this PyTorch's part of it. The two errors are one from PyTorch 2.5 on.
NOT_HERE = (ImportError, AttributeError, torch.onnx.OnnxExporterError, torch.onnx.errors.OnnxExporterError)


@pytest.fixture
def alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of this process, a folder of its own, and the registered operator, as on a GPU."""
    monkeypatch.chdir(tmp_path)
    gemmnorm.set_strategy("reference")
    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'group'}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()
    torch._dynamo.reset()


def made(code: str, fuse: Callable[[nn.Module], nn.Module]) -> Any:
    """`m` of a line; where it has none, what runs the file that the line has written."""
    torch.manual_seed(1)
    model = stir(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU())).eval()
    names: dict[str, Any] = {"model": model, "x": torch.randn(5, 6), "fuse": fuse, "unfuse": gemmnorm.unfuse, "nn": nn}
    for name in MODULES:
        if f"{name}." in code:
            names[name] = importlib.import_module(name)
    if "fully_shard" in code:
        from torch.distributed.fsdp import fully_shard

        names["fully_shard"] = functools.partial(fully_shard, mesh=dist.init_device_mesh("cpu", (1,)))
    if "parallelize_module" in code:
        names |= vars(importlib.import_module("torch.distributed.tensor.parallel"))
        names["Replicate"] = torch.distributed.tensor.Replicate  # from PyTorch 2.5 on
        names["mesh"] = dist.init_device_mesh("cpu", (1,))
    if "Trainer" in code:
        names |= two_steps()
    exec(code, names)
    if "m" in names:
        return names["m"]
    return by_onnxruntime("m.onnx") if "onnx" in code else torch._inductor.aoti_load_package("m.pt2")


def two_steps() -> dict[str, Any]:
    """What a Trainer is given: arguments, rows by the name of what `nn.Sequential.forward` takes, and a loss."""
    arguments = importlib.import_module("transformers").TrainingArguments
    return {
        "args": arguments("out", max_steps=2, save_steps=1, label_names=["labels"], use_cpu=True, report_to=[]),
        "data": [{"input": torch.randn(6), "labels": i % 8} for i in range(16)],
        "loss": lambda outputs, labels, **_: nn.functional.cross_entropy(outputs, labels),
    }


def by_onnxruntime(path: str) -> Callable[[Tensor], Tensor]:
    session = importlib.import_module("onnxruntime").InferenceSession(path)
    name = session.get_inputs()[0].name
    return lambda x: torch.from_numpy(session.run(None, {name: x.numpy()})[0])


def ran(m: Callable[[Tensor], Tensor]) -> tuple[Tensor, str]:
    """What `m` gives, and which operations it took; the second time, when all is traced."""
    torch.manual_seed(2)
    x = torch.randn(5, 6)
    m(x)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        y = m(x)
    fused = any(event.key == OPERATOR for event in profile.key_averages())
    return y, "fused" if fused else "plain operations"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("tool", "code", "wanted"), CASES)
def test_what_the_page_says(tool: str, code: str, wanted: str, alone: None) -> None:
    code = re.sub(r"^`|`$", "", code)
    if "AOTInductor" in tool and not (shutil.which("g++") or os.environ.get("CXX")):
        pytest.skip("no C++ compiler")
    try:
        # Compiling for AOTInductor takes ten seconds; what the plain model computes is known without.
        want, how = ran(made("m = model" if "AOTInductor" in tool else code, lambda model: model))
    except NOT_HERE as error:
        pytest.skip(f"not here: {type(error).__name__}: {str(error)[:100]}")
    assert how == "plain operations"
    torch._dynamo.reset()
    try:
        got, how = ran(made(code, gemmnorm.fuse))
    except gemmnorm.GemmNormError as error:
        how = "refused"
        assert "unfuse" in str(error)
    else:
        torch.testing.assert_close(got, want)
    assert how == wanted


@pytest.mark.filterwarnings("ignore")
def test_checkpoints_of_a_trainer_do_not_tell_whether_the_model_is_fused(alone: None) -> None:
    pytest.importorskip("transformers")
    code = next(row[1] for row in ROWS if "Trainer" in row[0]).strip("`")
    read = importlib.import_module("safetensors.torch").load_file
    saved = {}
    for fuse in (lambda model: model, gemmnorm.fuse):
        model = made(code, fuse)
        assert fuse is not gemmnorm.fuse or "calls: 2 fused" in str(gemmnorm.fuse_report(model, calls=True))
        saved[fuse] = read("out/checkpoint-2/model.safetensors")
        assert saved[fuse].keys() == model.state_dict().keys()
    plain, fused = saved.values()
    assert plain["1.num_batches_tracked"] == 2
    torch.testing.assert_close(fused, plain, rtol=1e-4, atol=2e-4)  # a bias' gradient is 0 ± 1e-9: Adam steps 5e-5


def test_every_line_is_read() -> None:
    assert len(ROWS) >= 28 and {row[2] for row in ROWS} == {"fused", "plain operations", "refused"}


@pytest.mark.filterwarnings("ignore")
def test_a_script_of_the_module_is_refused_and_of_its_plain_modules_is_not() -> None:
    module = stir(gemmnorm.LinearScaleBatchNorm1d(6, 4, activation="relu")).eval()
    with pytest.raises(gemmnorm.GemmNormError, match="to_modules"):
        torch.jit.script(nn.Sequential(module))
    x = torch.randn(5, 6)
    torch.testing.assert_close(torch.jit.script(module.to_modules())(x), module(x))
